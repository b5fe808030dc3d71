"""Events of one namespace: what was stored and removed, by number. No I/O, no locks."""

from __future__ import annotations

import secrets
from collections import deque
from itertools import islice
from typing import Final, Literal

from llm_datadist.store.messages import Event, Events

#: Keys of one answer, but for the last event.
_KEYS_AT_ONCE: Final = 2048
#: Most bytes of a key that is kept.
KEY_BYTES: Final = 112


class EventLog:
    """The latest events of a namespace; it forgets the oldest ones. Threads: one at a time; the caller has a lock."""

    def __init__(self, most_keys: int) -> None:
        self.incarnation = secrets.token_bytes(16)
        self.number = 0  # of the last event
        self.keys = 0  # kept, with one more for each event
        self._most = most_keys
        self._events: deque[Event] = deque()

    def add(self, kind: Literal["stored", "removed"], keys: list[bytes]) -> None:
        """Add an event, and forget the oldest ones above the bound; no event without keys."""
        if not keys:
            return
        self.number += 1
        self.keys += len(keys) + 1
        self._events.append(Event(self.number, kind, keys))
        while self.keys > self._most and len(self._events) > 1:
            self.keys -= len(self._events.popleft().keys) + 1

    def after(self, incarnation: bytes, number: int) -> Events:
        """Return the next events after a number of an incarnation."""
        oldest = self.number - len(self._events) + 1
        known = incarnation == self.incarnation and oldest - 1 <= number <= self.number
        follows = known or (not incarnation and oldest == 1)
        first = number + 1 if known else oldest
        found: list[Event] = []
        room = _KEYS_AT_ONCE
        for event in islice(self._events, first - oldest, None):
            if room <= 0:
                break
            found.append(event)
            room -= len(event.keys) + 1
        return Events(self.incarnation, oldest, first - 1 + len(found), follows, found)
