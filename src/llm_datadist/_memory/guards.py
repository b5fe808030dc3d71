"""Guards: generations in a shared table, which tell a peer that memory changed."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llm_datadist._checks import HERE, require_intact, require_process
from llm_datadist._memory.segment import Segment, SharedSegment
from llm_datadist._native import Canary, advance_generation, load_generation
from llm_datadist.errors import OutOfMemory, ProtocolError, StateError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SLOT_BYTES: Final = 64  # a cache line: no false sharing
COOKIE_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Guard:
    """Promise about memory, valid while ``slot`` shows ``generation`` (never 0)."""

    slot: int
    generation: int


def slot_address(base: int, slot: int, nbytes: int) -> int:
    """Return a slot's address in a table at ``base``; ProtocolError for the header (0) or a missing slot."""
    if not 1 <= slot < nbytes // SLOT_BYTES:
        raise ProtocolError(f"guard slot {slot} must be in [1, {nbytes // SLOT_BYTES}) of a table of {nbytes} bytes")
    return base + slot * SLOT_BYTES


def read_cookie(segment: Segment) -> bytes:
    """Return a guard table's cookie; ProtocolError if it has no room for one."""
    if segment.nbytes < SLOT_BYTES:
        raise ProtocolError(f"guard table of {segment.nbytes} bytes has no room for its header of {SLOT_BYTES}")
    return segment.view(0, COOKIE_BYTES).tobytes()


class GuardTable:
    """Generations of one instance, which peers map read-only.

    Slots have 64 bytes. Slot 0 begins with a random cookie of 16 bytes, which proves that two sides share a host. Every
    other slot begins with a generation, a uint64 that only grows, also through reuse. The two canaries name this
    address space to peers that write by address.

    Owns: the segment (sparse) and the canaries.
    Threads: any; one lock, which :meth:`load` does not take.
    Errors: StateError once closed, and for changes in a forked child; ValueError for a slot that is not allocated.
    """

    def __init__(self, slots: int = 1 << 20) -> None:
        self.cookie = secrets.token_bytes(COOKIE_BYTES)
        self.canaries = Canary(), Canary()
        self.segment = SharedSegment.create("guards", slots * SLOT_BYTES, peers_may_write=False)
        # Keeps the memory mapped for a load() during close().
        self._memory: NDArray[np.uint8] | None = self.segment.view()
        self._memory[:COOKIE_BYTES] = bytearray(self.cookie)
        self._base = self.segment.address
        self._owner = HERE["pid"]
        self._lock = threading.Lock()  # protects the three below and generations
        self._live: dict[int, int] = {}  # slot -> its generation
        self._reusable: list[int] = []
        self._next_fresh = 1

    @property
    def capacity(self) -> int:
        return self.segment.nbytes // SLOT_BYTES - 1

    @property
    def live(self) -> int:
        return len(self._live)

    def allocate(self) -> Guard:
        return self.allocate_many(1)[0]

    def allocate_many(self, count: int) -> list[Guard]:
        """Return ``count`` guards; raise OutOfMemory, and allocate none, if fewer are free."""
        require_process(self._owner, "guard table")
        with self._lock:
            self._check_open()
            if count <= self.capacity - len(self._live):
                return [self._take_slot() for _ in range(count)]
        text = (
            f"guard table is full: all {self.capacity} guards are live, or would be after this call; unbind keys or "
            "free caches"
        )
        raise OutOfMemory(text, pool=self.segment.name, requested=count * SLOT_BYTES)

    def advance(self, slot: int) -> int:
        """Advance a slot, visibly to peers before this returns; return the new generation."""
        require_process(self._owner, "guard table")
        with self._lock:
            self._check_live(slot)
            generation = self._live[slot] = advance_generation(self.address_of(slot))
        return generation

    def void(self, guard: Guard) -> None:
        """Advance the guard's slot if it still shows the guard's generation."""
        require_process(self._owner, "guard table")
        with self._lock:
            self._check_open()
            if self._live.get(guard.slot) == guard.generation:
                self._live[guard.slot] = advance_generation(self.address_of(guard.slot))

    def release(self, slot: int) -> None:
        """Advance the slot, then let it be reused."""
        require_process(self._owner, "guard table")
        with self._lock:
            self._check_live(slot)
            advance_generation(self._base + slot * SLOT_BYTES)
            del self._live[slot]
            self._reusable.append(slot)

    def address_of(self, slot: int) -> int:
        """Return the address of a slot, allocated or not; ProtocolError if it does not exist."""
        return slot_address(self._base, slot, self.segment.nbytes)

    def load(self, slot: int) -> int:
        """Return the slot's generation, loaded with acquire order."""
        keep = self._memory
        if keep is None:
            raise StateError("guard table is closed")
        return load_generation(self.address_of(slot))

    def check_integrity(self) -> None:
        with self._lock:
            self._check_open()
            known, last = sorted([*self._live, *self._reusable]), self._next_fresh - 1
            should = f"should be 1 to {last} once each"
            require_intact(known == list(range(1, last + 1)), f"slots in use or reusable are {known}, {should}")
            for slot, generation in self._live.items():
                shown = load_generation(self.address_of(slot))
                require_intact(shown == generation, f"guard slot {slot} shows generation {shown}, not {generation}")
            require_intact(read_cookie(self.segment) == self.cookie, "the cookie in the header was overwritten")

    def close(self) -> None:
        """Advance every live slot, visibly to peers, then close the table. Idempotent."""
        require_process(self._owner, "guard table")
        with self._lock:
            if self._memory is None:
                return
            for slot in self._live:
                advance_generation(self.address_of(slot))
            self._live.clear()
            self._memory = None
        for canary in self.canaries:
            canary.close()
        self.segment.close()

    def _take_slot(self) -> Guard:
        if self._reusable:
            slot = self._reusable.pop()
        else:
            slot = self._next_fresh
            self._next_fresh += 1
        generation = self._live[slot] = advance_generation(self.address_of(slot))
        return Guard(slot, generation)

    def _check_open(self) -> None:
        if self._memory is None:
            raise StateError("guard table is closed")

    def _check_live(self, slot: int) -> None:
        self._check_open()
        if slot not in self._live:
            raise ValueError(f"guard slot {slot} is not allocated: unknown or released twice")
