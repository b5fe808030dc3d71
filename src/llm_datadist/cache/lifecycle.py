"""The life of one cache as a transition table: events in, next state out, an illegal pair raises with its story.

| state | owner | keys | pins | who finds it |
|---|---|---|---|---|
| LIVE | yes | any | any | everybody |
| DEFERRED | no | some | any | peers by key and by id; its owner gave it back (walk 2 of the architecture) |
| DRAINING | no | none | some | nobody; its memory waits for the last pin |
| FREED | no | none | none | nobody; its storage has been handed back exactly once |
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final

from llm_datadist.errors import StateError

__all__ = ["TRANSITIONS", "Event", "Lifecycle", "State"]

_STORY_LENGTH: Final = 16


class State(Enum):
    """Where an entry is in its life."""

    LIVE = "live"
    DEFERRED = "deferred"
    DRAINING = "draining"
    FREED = "freed"

    __hash__ = object.__hash__  # a member is itself and no other; that of Enum is Python code, twice per transition


class Event(Enum):
    """What can happen to an entry."""

    BIND = "bind"
    UNBIND = "unbind"
    PIN = "pin"
    UNPIN = "unpin"
    DROP_OWNER = "drop owner"
    WITHDRAW = "withdraw"  # owner and keys at once: blocks caches, registered caches, finalize

    __hash__ = object.__hash__  # as State's


_L, _D, _P, _F = State.LIVE, State.DEFERRED, State.DRAINING, State.FREED

#: (state, event) -> the states it may lead to. A pair that is not here is illegal; which of several targets it is
#: follows from what is left: keys -> DEFERRED, pins only -> DRAINING, nothing -> FREED.
TRANSITIONS: Final[dict[tuple[State, Event], frozenset[State]]] = {
    (_L, Event.BIND): frozenset({_L}),
    (_L, Event.UNBIND): frozenset({_L}),
    (_L, Event.PIN): frozenset({_L}),
    (_L, Event.UNPIN): frozenset({_L}),
    (_L, Event.DROP_OWNER): frozenset({_D, _P, _F}),
    (_L, Event.WITHDRAW): frozenset({_P, _F}),
    (_D, Event.UNBIND): frozenset({_D, _P, _F}),
    (_D, Event.PIN): frozenset({_D}),
    (_D, Event.UNPIN): frozenset({_D}),
    (_D, Event.WITHDRAW): frozenset({_P, _F}),
    (_P, Event.UNPIN): frozenset({_P, _F}),
}


class Lifecycle:
    """State of one entry and the last things that happened to it. Used under the registry's lock only."""

    __slots__ = ("_story", "name", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = State.LIVE
        self._story: deque[tuple[Event, int, int, State]] = deque(maxlen=_STORY_LENGTH)

    def require(self, event: Event) -> frozenset[State]:
        """Return where ``event`` may lead from here; raise StateError, with the story, when it is illegal."""
        targets = TRANSITIONS.get((self.state, event))
        if targets is None:
            raise StateError(f"{self.name}: {event.value} is illegal when {self.state.value}; story: {self.story()}")
        return targets

    def settle(self, event: Event, *, owner: bool, keys: int, pins: int) -> State:
        """Move to the state that the remaining references imply, after ``event`` changed them."""
        targets = self.require(event)
        target = _L if owner else _D if keys else _P if pins else _F
        if target not in targets:
            raise StateError(
                f"{self.name}: {event.value} cannot lead from {self.state.value} to {target.value}; "
                f"story: {self.story()}"
            )
        self.state = target
        self._story.append((event, keys, pins, target))  # put into words when somebody asks
        return target

    def story(self) -> str:
        """Return what happened to this entry, oldest first, on one line."""
        told = [
            f"{event.value} (keys {keys}, pins {pins}) -> {target.value}" for event, keys, pins, target in self._story
        ]
        return "; ".join(told) or "added"
