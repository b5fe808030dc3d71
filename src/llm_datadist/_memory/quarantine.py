"""Quarantine: pool memory that was given back while foreign writers were still writing it.

Giving memory back never waits; taking memory may. Threads: any.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_datadist._checks import require_intact
from llm_datadist.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.pool import Allocation, DirectMemory, MemoryPool
    from llm_datadist._memory.write_intents import Hazard, WriteIntents


@dataclass(frozen=True, slots=True, eq=False)
class _Quarantined:
    allocation: Allocation
    hazards: tuple[Hazard, ...]


class Quarantine:
    """Keeps allocations until their writers have ended. Its lock is held across no call out of here.

    A pool counts what is kept here as used, and as quarantined, until it is freed.
    """

    def __init__(self, writers: WriteIntents) -> None:
        self._writers = writers
        self._lock = threading.Lock()  # guards the list
        self._held: list[_Quarantined] = []

    def free(self, allocation: Allocation, hazards: tuple[Hazard, ...]) -> None:
        """Free the memory now, or by :meth:`sweep` once all ``hazards`` are over."""
        if not hazards:
            allocation.free()
            return
        allocation.detain()
        with self._lock:
            self._held.append(_Quarantined(allocation, hazards))

    def sweep(self) -> bool:
        """Free the memory whose writers have ended; return True if there was any."""
        over = {each for each in self._snapshot() if not self._writers.pending(each.hazards)}
        for each in over:
            each.allocation.free()
        # After freeing: until then allocate() must see that there is something to wait for.
        if over:
            with self._lock:
                self._held = [each for each in self._held if each not in over]
        return bool(over)

    def allocate(self, pool: MemoryPool | DirectMemory, count: int, nbytes: int, deadline: Deadline) -> Allocation:
        """Call ``pool.allocate_many``, and wait for quarantined memory if that could be enough.

        If it is not free at the deadline, OutOfMemory names the writers that still have it.
        """
        shortage: OutOfMemory
        taken: list[Allocation] = []

        def take_or_give_up() -> bool:
            nonlocal shortage
            self.sweep()
            try:
                taken.append(pool.allocate_many(count, nbytes))
            except OutOfMemory as error:
                shortage = error
                return not error.quarantined or error.free + error.quarantined < error.requested
            return True

        deadline.poll(take_or_give_up)
        if taken:
            return taken[0]
        if shortage.quarantined:
            pending = self._writers.pending(hazard for each in self._snapshot() for hazard in each.hazards)
            held = f"{shortage.quarantined} bytes were given back but may still be written by {writers_named(pending)}"
            shortage.args = (f"{shortage}; {held}",)
        raise shortage

    @property
    def nbytes(self) -> int:
        return sum(each.allocation.detained for each in self._snapshot())

    def release_all(self) -> None:
        """Free everything, even under a writer: the pools are closed next."""
        with self._lock:
            held, self._held = self._held, []
        for each in held:
            each.allocation.free()

    def check_integrity(self) -> None:
        """Raise AssertionError if an allocation is kept without a writer."""
        for each in self._snapshot():
            require_intact(each.hazards, f"{each.allocation!r} is held in quarantine without a writer")

    def _snapshot(self) -> list[_Quarantined]:
        with self._lock:
            return list(self._held)


def writers_named(hazards: Iterable[Hazard]) -> str:
    return ", ".join(sorted({each.page.who for each in hazards})) or "nobody any more"
