"""Quarantine: freed pool memory that foreign writers still write. Freeing never waits; allocating may. Any thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from llm_datadist.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.pool import Allocation, DirectMemory, MemoryPool
    from llm_datadist._memory.write_intents import ActiveWrite, WriteIntents


class Quarantine:
    """Freed allocations whose writers have not ended. Their pool counts them as used and quarantined."""

    def __init__(self, writers: WriteIntents) -> None:
        self._writers = writers
        self._lock = threading.Lock()  # protects the next; held across no call to another object
        self._held: dict[Allocation, tuple[ActiveWrite, ...]] = {}

    def free(self, allocation: Allocation, writes: tuple[ActiveWrite, ...]) -> None:
        """Free the memory now, or in :meth:`sweep` once all ``writes`` have ended."""
        if not writes:
            allocation.free()
            return
        allocation.pool.detain(allocation)
        with self._lock:
            self._held[allocation] = writes

    def sweep(self) -> None:
        """Free memory whose writers have ended."""
        for allocation, writes in self._snapshot():
            if not self._writers.pending(writes):
                allocation.free()
                with self._lock:  # only now: allocate() must see what it can wait for
                    self._held.pop(allocation, None)

    def allocate(self, pool: MemoryPool | DirectMemory, count: int, nbytes: int, deadline: Deadline) -> Allocation:
        """Allocate from ``pool``; wait for quarantined memory if that could be enough.

        After the deadline, OutOfMemory names the writers that still use it.
        """
        outcome: Allocation | OutOfMemory

        def take_or_give_up() -> bool:
            nonlocal outcome
            self.sweep()
            try:
                outcome = pool.allocate_many(count, nbytes)
            except OutOfMemory as error:
                outcome = error
                return not error.quarantined or error.free + error.quarantined < error.requested
            return True

        deadline.poll(take_or_give_up)
        if not isinstance(outcome, OutOfMemory):
            return outcome
        if outcome.quarantined:
            pending = self._writers.pending(write for _, writes in self._snapshot() for write in writes)
            held = f"{outcome.quarantined} bytes were given back but may still be written by {writers_named(pending)}"
            outcome.args = (f"{outcome}; {held}",)
        raise outcome

    @property
    def nbytes(self) -> int:
        return sum(allocation.detained for allocation, _ in self._snapshot())

    def release_all(self) -> None:
        """Free everything, even under a writer; the pools are closed next."""
        with self._lock:
            held, self._held = self._held, {}
        for allocation in held:
            allocation.free()

    def _snapshot(self) -> list[tuple[Allocation, tuple[ActiveWrite, ...]]]:
        with self._lock:
            return list(self._held.items())


def writers_named(writes: Iterable[ActiveWrite]) -> str:
    return ", ".join(sorted({each.page.who for each in writes})) or "writers that have ended since"
