"""Slots of one namespace: their states, readers and keys, and SIEVE eviction. No I/O, no locks; see docs/store.md.

A slot holds one key's block of all tensors. SIEVE keeps slots in the order of publication. Its hand moves from the
oldest to the newest, spares each slot that was found since its last visit, and evicts the first that was not.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from llm_datadist._checks import require_intact
from llm_datadist.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

#: Slots that the hand visits for one call of :meth:`Slots.fill`, because lookups wait for it.
MAX_VISITS: Final = 8192
_NONE: Final = -1
_HISTORY: Final = 8


class SlotState(Enum):
    """State of a slot."""

    FREE = "free"
    FILLING = "filling"  # a pull may write it
    PUBLISHED = "published"  # its key is found; bytes and digest do not change
    DROPPED = "dropped"  # its key is gone, but a reader may still read


class SlotEvent(Enum):
    """Event of a slot."""

    FILL = "fill"  # taken for a key
    PUBLISH = "publish"  # pulled and digested
    ABANDON = "abandon"  # the pull failed
    EVICT = "evict"  # without readers
    DROP = "drop"  # its bytes are wrong, and readers are left
    IDLE = "idle"  # the last reader's grant has ended


_S, _E = SlotState, SlotEvent

TRANSITIONS: Final[dict[tuple[SlotState, SlotEvent], SlotState]] = {
    (_S.FREE, _E.FILL): _S.FILLING,
    (_S.FILLING, _E.PUBLISH): _S.PUBLISHED,
    (_S.FILLING, _E.ABANDON): _S.FREE,
    (_S.PUBLISHED, _E.EVICT): _S.FREE,
    (_S.PUBLISHED, _E.DROP): _S.DROPPED,
    (_S.DROPPED, _E.IDLE): _S.FREE,
}


class Filling(NamedTuple):
    """Result of :meth:`Slots.fill`."""

    positions: list[int]  # of the keys that got slots, ascending
    slots: list[int]  # one each
    evicted: list[bytes]  # keys that made room


class Slots:
    """States, readers and keys of ``count`` slots. Threads: one at a time; the caller has a lock."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.filling = self.published = 0
        self._states = [SlotState.FREE] * count
        self._free = list(range(count - 1, -1, -1))
        self._slot_of: dict[bytes, int] = {}  # FILLING and PUBLISHED
        self._keys: list[bytes] = [b""] * count
        self._digests = np.zeros((count, 2), np.uint64)
        self._readers = [0] * count
        self._visited = bytearray(count)
        # Published slots as a list from the oldest to the newest; _NONE ends it.
        self._newer, self._older = [_NONE] * count, [_NONE] * count
        self._oldest = self._newest = self._hand = _NONE
        self._history: deque[tuple[int, SlotEvent]] = deque(maxlen=_HISTORY)

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def keys(self) -> list[bytes]:
        """Return the published keys, the oldest first."""
        found, slot = [], self._oldest
        while slot != _NONE:
            found.append(self._keys[slot])
            slot = self._newer[slot]
        return found

    def run(self, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of the leading keys that are published; SIEVE counts them as found."""
        found: list[int] = []
        for key in keys:
            slot = self._slot_of.get(key, _NONE)
            if slot == _NONE or self._states[slot] is not SlotState.PUBLISHED:
                break
            found.append(slot)
            self._visited[slot] = 1
        return found

    def published_of(self, slots: Sequence[int]) -> list[int]:
        """Return those of any slot numbers that are published, once each."""
        known = (slot for slot in dict.fromkeys(slots) if 0 <= slot < self.count)
        return [slot for slot in known if self._states[slot] is SlotState.PUBLISHED]

    def digests(self, slots: Sequence[int]) -> NDArray[np.uint64]:
        """Return the digests of published slots, shape (n, 2)."""
        return self._digests[list(slots)]

    def begin_read(self, slots: Sequence[int]) -> None:
        """Count a reader of published slots: they are not evicted until :meth:`end_read`."""
        for slot in slots:
            if self._states[slot] is not SlotState.PUBLISHED:
                raise StateError(f"slot {slot} is {self._states[slot].value}: only a published one is read")
        for slot in slots:
            self._readers[slot] += 1

    def end_read(self, slots: Sequence[int]) -> None:
        """End a reader, whose grant has ended: its guard has advanced."""
        for slot in slots:
            self._readers[slot] -= 1
            if not self._readers[slot] and self._states[slot] is SlotState.DROPPED:
                self._fire(slot, SlotEvent.IDLE)
                self._free.append(slot)

    def fill(self, keys: Sequence[bytes]) -> Filling:
        """Take slots for keys that have none, in order, evicting others; without room the last keys get none."""
        positions: list[int] = []
        slots: list[int] = []
        evicted: list[bytes] = []
        visits = MAX_VISITS
        for position, key in enumerate(keys):
            known = self._slot_of.get(key, _NONE)
            if known != _NONE:
                self._visited[known] = 1
                continue
            if not self._free:
                visits = self._evict(visits, evicted)
                if not self._free:
                    break
            slot = self._free.pop()
            self._fire(slot, SlotEvent.FILL)
            self._keys[slot], self._slot_of[key] = key, slot
            self.filling += 1
            positions.append(position)
            slots.append(slot)
        return Filling(positions, slots, evicted)

    def publish(self, slots: Sequence[int], digests: NDArray[np.uint64]) -> None:
        """Let filled slots be found."""
        for slot, digest in zip(slots, digests, strict=True):
            self._fire(slot, SlotEvent.PUBLISH)
            self._digests[slot] = digest
            self._visited[slot] = 0
            self._older[slot], self._newer[slot] = self._newest, _NONE
            if self._newest != _NONE:
                self._newer[self._newest] = slot
            else:
                self._oldest = slot
            self._newest = slot
        self.filling -= len(slots)
        self.published += len(slots)

    def abandon(self, slots: Sequence[int]) -> None:
        """Give filled slots back; no write into them may be under way."""
        for slot in slots:
            self._fire(slot, SlotEvent.ABANDON)
            del self._slot_of[self._keys[slot]]
            self._free.append(slot)
        self.filling -= len(slots)

    def drop(self, slots: Sequence[int]) -> list[bytes]:
        """Forget published slots whose bytes are wrong; return their keys. Other slots are left out."""
        keys = []
        for slot in dict.fromkeys(slots):
            if self._states[slot] is SlotState.PUBLISHED:
                keys.append(self._unlink(slot))
                self._fire(slot, SlotEvent.DROP)
                if not self._readers[slot]:
                    self._fire(slot, SlotEvent.IDLE)
                    self._free.append(slot)
        return keys

    def idle(self) -> bool:
        """Return True if no slot is being filled or read."""
        return not self.filling and not any(self._readers)

    def check_integrity(self) -> None:
        """Raise AssertionError unless states, keys, readers and the order of SIEVE agree."""
        by_state = {each: [n for n in range(self.count) if self._states[n] is each] for each in SlotState}
        held = [*by_state[SlotState.FILLING], *by_state[SlotState.PUBLISHED]]
        require_intact(sorted(self._free) == by_state[SlotState.FREE], f"free slots are {sorted(self._free)}")
        require_intact(sorted(self._slot_of.values()) == sorted(held), "keys and held slots differ")
        require_intact(all(self._keys[slot] == key for key, slot in self._slot_of.items()), "a key of another slot")
        order = [self._slot_of[key] for key in self.keys()]
        require_intact(sorted(order) == by_state[SlotState.PUBLISHED], "the order of SIEVE lacks slots")
        counts = len(by_state[SlotState.FILLING]), len(by_state[SlotState.PUBLISHED])
        require_intact(counts == (self.filling, self.published), f"counts are {counts}")
        read = {n for n in range(self.count) if self._readers[n]}
        allowed = {*by_state[SlotState.PUBLISHED], *by_state[SlotState.DROPPED]}
        require_intact(min(self._readers) >= 0 and read <= allowed, f"readers of slots {read - allowed}")
        require_intact(read >= {*by_state[SlotState.DROPPED]}, "a dropped slot without readers")

    def _evict(self, visits: int, evicted: list[bytes]) -> int:
        """Free one published slot without readers, within ``visits``; return the visits left."""
        while visits and self._oldest != _NONE:
            visits -= 1
            slot = self._hand if self._hand != _NONE else self._oldest
            self._hand = self._newer[slot]
            if self._readers[slot]:
                continue
            if self._visited[slot]:
                self._visited[slot] = 0
                continue
            evicted.append(self._unlink(slot))
            self._fire(slot, SlotEvent.EVICT)
            self._free.append(slot)
            break
        return visits

    def _unlink(self, slot: int) -> bytes:
        """Take a published slot out of the index and the order; return its key."""
        older, newer = self._older[slot], self._newer[slot]
        if older != _NONE:
            self._newer[older] = newer
        else:
            self._oldest = newer
        if newer != _NONE:
            self._older[newer] = older
        else:
            self._newest = older
        if self._hand == slot:
            self._hand = newer
        self.published -= 1
        key = self._keys[slot]
        del self._slot_of[key]
        return key

    def _fire(self, slot: int, event: SlotEvent) -> None:
        state = self._states[slot]
        after = TRANSITIONS.get((state, event))
        if after is None:
            recent = [each.value for number, each in self._history if number == slot]
            raise StateError(f"slot {slot}: {event.value} is illegal while {state.value}; recent events: {recent}")
        self._states[slot] = after
        self._history.append((slot, event))
