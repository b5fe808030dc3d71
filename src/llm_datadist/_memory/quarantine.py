"""Quarantine: freed pool memory that foreign writers still write.

Freeing never waits; allocating may. Threads: any.
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
    from llm_datadist._memory.write_intents import ActiveWrite, WriteIntents


@dataclass(frozen=True, slots=True, eq=False)
class _Quarantined:
    allocation: Allocation
    writes: tuple[ActiveWrite, ...]


class Quarantine:
    """Freed allocations whose writers have not ended. Their pool counts them as used and quarantined.

    The lock is held across no call to another object.
    """

    def __init__(self, writers: WriteIntents) -> None:
        self._writers = writers
        self._lock = threading.Lock()  # protects the list
        self._held: list[_Quarantined] = []

    def free(self, allocation: Allocation, writes: tuple[ActiveWrite, ...]) -> None:
        """Free the memory now, or in :meth:`sweep` once all ``writes`` have ended."""
        if not writes:
            allocation.free()
            return
        allocation.detain()
        with self._lock:
            self._held.append(_Quarantined(allocation, writes))

    def sweep(self) -> bool:
        """Free memory whose writers have ended; return True if there was any."""
        over = {each for each in self._snapshot() if not self._writers.pending(each.writes)}
        for each in over:
            each.allocation.free()
        # Only now: allocate() must see what it can wait for.
        if over:
            with self._lock:
                self._held = [each for each in self._held if each not in over]
        return bool(over)

    def allocate(self, pool: MemoryPool | DirectMemory, count: int, nbytes: int, deadline: Deadline) -> Allocation:
        """Allocate from ``pool``; wait for quarantined memory if that could be enough.

        After the deadline, OutOfMemory names the writers that still use it.
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
            pending = self._writers.pending(write for each in self._snapshot() for write in each.writes)
            held = f"{shortage.quarantined} bytes were given back but may still be written by {writers_named(pending)}"
            shortage.args = (f"{shortage}; {held}",)
        raise shortage

    @property
    def nbytes(self) -> int:
        return sum(each.allocation.detained for each in self._snapshot())

    def release_all(self) -> None:
        """Free everything, even under a writer; the pools are closed next."""
        with self._lock:
            held, self._held = self._held, []
        for each in held:
            each.allocation.free()

    def check_integrity(self) -> None:
        for each in self._snapshot():
            require_intact(each.writes, f"{each.allocation!r} is held in quarantine without a writer")

    def _snapshot(self) -> list[_Quarantined]:
        with self._lock:
            return list(self._held)


def writers_named(writes: Iterable[ActiveWrite]) -> str:
    return ", ".join(sorted({each.page.who for each in writes})) or "writers that have ended since"
