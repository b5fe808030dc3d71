"""Quarantine: pool memory that was given back while foreign writers were at work in it, until they are not."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_datadist.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.pool import Allocation, DirectMemory, MemoryPool
    from llm_datadist._memory.write_intents import Hazard, WriteIntents

__all__ = ["Quarantine", "writers_named"]


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    allocation: Allocation
    hazards: tuple[Hazard, ...]


class Quarantine:
    """Who gives memory back never waits, who needs it may. Any thread; calls nobody under its lock.

    What is held here is counted by its pool as used, and as quarantined, until the moment it is free.

    Args:
        writers: Knows which writers have ended.
    """

    def __init__(self, writers: WriteIntents) -> None:
        self._writers = writers
        self._lock = threading.Lock()  # guards the list
        self._held: list[_Held] = []

    def free(self, allocation: Allocation, hazards: tuple[Hazard, ...]) -> None:
        """Free the memory, or once these writers have ended: see :meth:`sweep`."""
        if not hazards:
            allocation.free()
            return
        allocation.detain()
        with self._lock:
            self._held.append(_Held(allocation, hazards))

    def sweep(self) -> bool:
        """Free what nobody writes any more; True when there was some."""
        over = {each for each in self._snapshot() if not self._writers.pending(each.hazards)}
        for each in over:
            each.allocation.free()
        # Only now: until its memory can be taken again, whoever looks for memory must see that some is held.
        if over:
            with self._lock:
                self._held = [each for each in self._held if each not in over]
        return bool(over)

    def allocate(self, pool: MemoryPool | DirectMemory, count: int, nbytes: int, deadline: Deadline) -> Allocation:
        """``pool.allocate_many``, which waits for quarantined memory where that could be enough.

        Raises:
            OutOfMemory: There is not enough, or foreign writers still had it when the deadline passed; the text says
                who they are.
        """
        if not self._held:
            try:
                return pool.allocate_many(count, nbytes)
            except OutOfMemory as error:
                if not error.quarantined:
                    raise  # nothing to wait for, as below
        shortage: OutOfMemory
        taken: list[Allocation] = []

        def try_it() -> bool:
            nonlocal shortage
            self.sweep()
            try:
                taken.append(pool.allocate_many(count, nbytes))
            except OutOfMemory as error:
                shortage = error
                # Nothing to wait for: the caller hears at once.
                return not error.quarantined or error.free + error.quarantined < error.requested
            return True

        deadline.poll(try_it)
        if taken:
            return taken[0]
        raise self._explained(shortage)

    @property
    def nbytes(self) -> int:
        """Bytes held, in whole pages."""
        return sum(each.allocation.detained for each in self._snapshot())

    def release_all(self) -> None:
        """Free everything, written or not: the pools are closed next."""
        with self._lock:
            held, self._held = self._held, []
        for each in held:
            each.allocation.free()

    def check_integrity(self) -> None:
        """Raise AssertionError when something is held for nothing."""
        for each in self._snapshot():
            if not each.hazards:
                raise AssertionError(f"{each.allocation!r} is held in quarantine for nobody")

    def _snapshot(self) -> list[_Held]:
        with self._lock:
            return list(self._held)

    def _explained(self, shortage: OutOfMemory) -> OutOfMemory:
        if not shortage.quarantined:
            return shortage
        pending = self._writers.pending(hazard for each in self._snapshot() for hazard in each.hazards)
        return OutOfMemory(
            f"{shortage}; {shortage.quarantined} bytes were given back but may still be written by "
            f"{writers_named(pending)}",
            pool=shortage.pool,
            requested=shortage.requested,
            free=shortage.free,
            largest_hole=shortage.largest_hole,
            quarantined=shortage.quarantined,
        )

    def __repr__(self) -> str:
        held = self._snapshot()
        return f"<Quarantine {len(held)} allocations, {self.nbytes} bytes>"


def writers_named(hazards: Iterable[Hazard]) -> str:
    """Return who they are, each once, for a message."""
    return ", ".join(sorted({each.page.who for each in hazards})) or "nobody any more"
