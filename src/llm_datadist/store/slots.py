"""Slots of one namespace: their states, readers and keys, and SIEVE eviction. No I/O, no locks; see docs/store.md.

A slot holds one key's block of all tensors. SIEVE keeps slots in the order of publication. Its hand moves from the
oldest to the newest, spares slots with readers and those found since its last visit, and evicts the others.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from llm_datadist._checks import require_intact
from llm_datadist._native import KeyTable
from llm_datadist.errors import StateError
from llm_datadist.types.grant import ascending

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]  # of slots

#: Slots that the hand visits for one call of :meth:`Slots.fill` or ``drop_oldest``, because lookups wait for it.
MAX_VISITS: Final = 1024
#: Most bytes of a slot's bookkeeping here, with a key of 64 bytes.
SLOT_BYTES: Final = 384
_HISTORY: Final = 8


class SlotState(IntEnum):
    """State of a slot."""

    FREE = 0
    FILLING = auto()  # a pull may write it
    PUBLISHED = auto()  # its key is found; bytes and digest do not change
    DROPPED = auto()  # its key is gone, but a reader may still read


class SlotEvent(IntEnum):
    """Event of a slot."""

    FILL = auto()  # taken for a key
    PUBLISH = auto()  # pulled and digested
    ABANDON = auto()  # the pull failed
    DROP = auto()  # evicted without readers, its bytes are wrong, or the namespace is emptied
    IDLE = auto()  # no reader's grant lasts


_S, _E = SlotState, SlotEvent
_PUBLISHED, _DROPPED = int(_S.PUBLISHED), int(_S.DROPPED)  # looking a member up takes as long as finding ten keys

#: State before and after each event.
TRANSITIONS: Final[dict[SlotEvent, tuple[SlotState, SlotState]]] = {
    _E.FILL: (_S.FREE, _S.FILLING),
    _E.PUBLISH: (_S.FILLING, _S.PUBLISHED),
    _E.ABANDON: (_S.FILLING, _S.FREE),
    _E.DROP: (_S.PUBLISHED, _S.DROPPED),
    _E.IDLE: (_S.DROPPED, _S.FREE),
}


class Filling(NamedTuple):
    """Result of :meth:`Slots.fill`."""

    positions: list[int]  # of the keys that got slots, ascending
    slots: list[int]  # one each
    evicted: list[bytes]  # keys that made room
    left: int  # keys that got none


class Readers:
    """Numbers of readers of each slot, of all peers or of one."""

    def __init__(self, count: int, kind: type[np.unsignedinteger[Any]] = np.uint32) -> None:
        self.of = np.zeros(count, kind)
        self.slots = 0  # slots with readers

    def begin(self, slots: Numbers) -> None:
        """Count a reader of each of different slots."""
        self.slots += int(np.count_nonzero(self.of[slots] == 0))
        self.of[slots] += 1

    def end(self, slots: Numbers) -> Numbers:
        """End a reader of each; return the slots that have none any more."""
        self.of[slots] -= 1
        idle: Numbers = slots[self.of[slots] == 0]
        self.slots -= len(idle)
        return idle


class Slots:
    """States, readers and keys of ``count`` slots. Threads: one at a time; the caller has a lock."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.filling = self.published = 0
        self.readers = Readers(count)
        self._states = np.zeros(count, np.uint8)
        self._free = list(range(count - 1, -1, -1))
        self._slot_of = KeyTable()  # FILLING and PUBLISHED
        self._keys: list[bytes] = [b""] * count
        self._digests = np.zeros((count, 2), np.uint64)
        self._visited = bytearray(count)
        self._marks = np.frombuffer(self._visited, np.uint8)  # the same bytes
        # Published slots, the oldest first: those that the hand has passed, then the others.
        self._passed: deque[int] = deque()
        self._ahead: deque[int] = deque()
        self._history: deque[tuple[SlotEvent, Numbers]] = deque(maxlen=_HISTORY)

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def keys(self) -> list[bytes]:
        """Return the published keys, the oldest first."""
        return [self._keys[slot] for slot in (*self._passed, *self._ahead)]

    def run(self, keys: bytes) -> Numbers:
        """Return the slots of the leading keys, a MessagePack array, that are published; SIEVE counts them as found."""
        return self._slot_of.run(keys, self._states, _PUBLISHED, self._marks)

    def published_of(self, slots: Sequence[int]) -> list[int]:
        """Return those of any slot numbers that are published, once each."""
        known = (slot for slot in dict.fromkeys(slots) if 0 <= slot < self.count)
        return [slot for slot in known if self._states[slot] == SlotState.PUBLISHED]

    def digests(self, slots: Sequence[int] | Numbers) -> NDArray[np.uint64]:
        """Return the digests of published slots, shape (n, 2)."""
        return self._digests[np.asarray(slots, np.int64)]

    def begin_read(self, slots: Sequence[int] | Numbers) -> Numbers:
        """Count a reader of published slots, and return them once each.

        They are not evicted until :meth:`end_read`.
        """
        read = ascending(slots)
        if (other := read[self._states[read] != _PUBLISHED]).size:
            state = SlotState(self._states[other[0]]).name.lower()
            raise StateError(f"slot {other[0]} is {state}: only a published one is read")
        self.readers.begin(read)
        return read

    def end_read(self, slots: Numbers) -> None:
        """End a reader of what :meth:`begin_read` returned. Its grant has ended: the guard has advanced."""
        idle = self.readers.end(slots)
        dropped = idle[self._states[idle] == _DROPPED]
        self._fire(SlotEvent.IDLE, dropped)
        self._free += dropped.tolist()

    def fill(self, keys: Sequence[bytes]) -> Filling:
        """Take slots for keys that have none, in order, evicting others; without room the last keys get none."""
        wanted: dict[bytes, int] = {}  # position of each
        known: set[int] = set()
        for position, key in enumerate(keys):
            slot = self._slot_of.find(key)
            if slot < 0:
                wanted.setdefault(key, position)
            else:
                self._visited[slot] = 1
                known.add(slot)
        evicted = self._evict(len(wanted) - len(self._free), known)
        slots = [self._free.pop() for _ in range(min(len(wanted), len(self._free)))]
        self._fire(SlotEvent.FILL, slots)
        for key, slot in zip(wanted, slots, strict=False):
            self._keys[slot], self._slot_of[key] = key, slot
        self.filling += len(slots)
        return Filling(list(wanted.values())[: len(slots)], slots, evicted, len(wanted) - len(slots))

    def publish(self, slots: Sequence[int], digests: NDArray[np.uint64]) -> None:
        """Let filled slots be found."""
        fitting = digests.reshape(len(slots), 2)  # one of each slot, or ValueError
        self._fire(SlotEvent.PUBLISH, slots)
        self._digests[slots] = fitting
        self._marks[slots] = 0
        self._ahead.extend(slots)
        self.filling -= len(slots)
        self.published += len(slots)

    def abandon(self, slots: Sequence[int]) -> None:
        """Give filled slots back; no write into them may be under way."""
        self._fire(SlotEvent.ABANDON, slots)
        for slot in slots:
            del self._slot_of[self._keys[slot]]
        self._free += reversed(slots)  # they are taken from the end: neighbours stay neighbours
        self.filling -= len(slots)

    def drop(self, slots: Sequence[int]) -> list[bytes]:
        """Forget published slots whose bytes are wrong; return their keys. Other slots are left out."""
        wrong = self.published_of(slots)
        if wrong:
            gone = set(wrong)
            self._passed, self._ahead = (deque(s for s in q if s not in gone) for q in (self._passed, self._ahead))
            self._wrap()
        return self._drop(wrong)

    def drop_oldest(self) -> list[bytes]:
        """Forget the oldest published slots, a bounded number; return their keys."""
        queue = self._passed or self._ahead
        oldest = [queue.popleft() for _ in range(min(MAX_VISITS, len(queue)))]
        self._wrap()
        return self._drop(oldest)

    def _drop(self, slots: list[int]) -> list[bytes]:
        keys, at = [self._keys[slot] for slot in slots], np.array(slots, np.int64)
        for key in keys:
            del self._slot_of[key]
        self._fire(SlotEvent.DROP, at)
        unread = at[self.readers.of[at] == 0]
        self._fire(SlotEvent.IDLE, unread)
        self._free += unread[::-1].tolist()
        self.published -= len(slots)
        return keys

    def idle(self) -> bool:
        """Return True if no slot is being filled or read."""
        return not self.filling and not self.readers.slots

    def check_integrity(self) -> None:
        """Raise AssertionError unless states, keys, readers and the order of SIEVE agree."""
        by_state = {each: np.flatnonzero(self._states == each).tolist() for each in SlotState}
        held = [*by_state[SlotState.FILLING], *by_state[SlotState.PUBLISHED]]
        require_intact(sorted(self._free) == by_state[SlotState.FREE], f"free slots are {sorted(self._free)}")
        found = [self._slot_of.find(self._keys[slot]) for slot in held]
        require_intact(found == held, "keys and held slots differ")
        order = [*self._passed, *self._ahead]
        require_intact(sorted(order) == by_state[SlotState.PUBLISHED], "the order of SIEVE lacks slots")
        counts = len(by_state[SlotState.FILLING]), len(by_state[SlotState.PUBLISHED])
        require_intact(counts == (self.filling, self.published), f"counts are {counts}")
        read = set(np.flatnonzero(self.readers.of).tolist())
        require_intact(len(read) == self.readers.slots, f"{self.readers.slots} slots are counted as read: {read}")
        allowed = {*by_state[SlotState.PUBLISHED], *by_state[SlotState.DROPPED]}
        require_intact(read <= allowed, f"readers of slots {read - allowed}")
        require_intact(read >= {*by_state[SlotState.DROPPED]}, "a dropped slot without readers")

    def _evict(self, count: int, kept: set[int]) -> list[bytes]:
        """Free at most ``count`` published slots without readers, but not those to be kept; return their keys."""
        gone: list[int] = []
        in_row = 0  # visits of slots with readers, or kept
        readers: Any = memoryview(self.readers.of)  # type: ignore[arg-type]  # one number costs half as much as from an array
        for _ in range(MAX_VISITS):
            if len(gone) >= count or in_row == self.published - len(gone):
                break
            slot = self._ahead.popleft()
            in_row = in_row + 1 if readers[slot] or slot in kept else 0
            if in_row:
                self._passed.append(slot)
            elif self._visited[slot]:
                self._visited[slot] = 0
                self._passed.append(slot)
            else:
                gone.append(slot)
            self._wrap()
        return self._drop(gone)

    def _wrap(self) -> None:
        """Begin again with the oldest, once the hand has passed the newest."""
        if not self._ahead:
            self._passed, self._ahead = self._ahead, self._passed

    def _fire(self, event: SlotEvent, slots: Sequence[int] | Numbers) -> None:
        if not len(slots):
            return
        before, after = TRANSITIONS[event]
        at = np.asarray(slots, np.int64)
        if (odd := at[self._states[at] != before]).size:
            slot, state = int(odd[0]), SlotState(self._states[odd[0]]).name.lower()
            recent = [each.name.lower() for each, among in self._history if slot in among]
            raise StateError(f"slot {slot}: {event.name.lower()} is illegal while {state}; recent events: {recent}")
        self._states[at] = after
        self._history.append((event, at))
