"""A device for tests of staging (interface R10)."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llm_datadist._memory.device import HostDevice
from llm_datadist.errors import OutOfMemory

if TYPE_CHECKING:
    from llm_datadist._memory.segment import Segment

Direction = Literal["to_device", "from_device", "on_device"]


@dataclass(frozen=True, slots=True)
class CopyCount:
    """Copies in one direction so far: number, bytes, and names of the threads."""

    copies: int = 0
    nbytes: int = 0
    threads: frozenset[str] = frozenset()


class StagedDevice:
    """Host memory that declares staging, counts copies, and can refuse allocations.

    Owns no segment: one counts as allocated until its owner closes it.
    Threads: any; one lock guards counters and allocation, none is held during a copy.

    Args:
        refuse_after_bytes: Most allocated bytes; allocations beyond are refused. None refuses none.
    """

    needs_staging = True

    def __init__(self, name: str = "staged", *, refuse_after_bytes: int | None = None) -> None:
        self.name = name
        self._host = HostDevice()
        self._lock = threading.RLock()
        self._segments: weakref.WeakSet[Segment] = weakref.WeakSet()
        self._counts: dict[Direction, CopyCount] = {}
        self._refuse_after_bytes = refuse_after_bytes

    def refuse_after(self, nbytes: int | None) -> None:
        """Refuse allocations beyond ``nbytes`` bytes in all; None refuses none."""
        with self._lock:
            self._refuse_after_bytes = nbytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all unclosed segments."""
        with self._lock:
            return sum(segment.nbytes for segment in self._segments if not segment.closed)

    def count(self, direction: Direction) -> CopyCount:
        """Return the copies in one direction so far."""
        with self._lock:
            return self._counts.get(direction, CopyCount())

    def allocate(
        self, nbytes: int, name: str, *, peers_may_write: bool, prefault: bool, huge_pages: bool = False
    ) -> Segment:
        """Return a new shared segment, owned by the caller.

        Raises:
            OutOfMemory: The allocation is refused, see :meth:`refuse_after`.
        """
        # One lock for check and allocation: two threads must not both pass.
        with self._lock:
            self._check_room(nbytes, name)
            segment = self._host.allocate(
                nbytes, name, peers_may_write=peers_may_write, prefault=prefault, huge_pages=huge_pages
            )
            self._segments.add(segment)
            return segment

    def copy_to_device(self, dst: int, src: int, nbytes: int) -> None:
        """Copy from host to device, and count."""
        self._host.copy_to_device(dst, src, nbytes)
        self._record("to_device", nbytes)

    def copy_from_device(self, dst: int, src: int, nbytes: int) -> None:
        """Copy from device to host, and count."""
        self._host.copy_from_device(dst, src, nbytes)
        self._record("from_device", nbytes)

    def copy_on_device(self, dst: int, src: int, nbytes: int) -> None:
        """Copy from device to device, and count."""
        self._host.copy_on_device(dst, src, nbytes)
        self._record("on_device", nbytes)

    def _check_room(self, nbytes: int, name: str) -> None:
        most, taken = self._refuse_after_bytes, self.allocated_bytes
        if most is None or taken + nbytes <= most:
            return
        free = max(0, most - taken)
        raise OutOfMemory(
            f"device {self.name} refuses {nbytes} bytes for {name}: {taken} of {most} are taken",
            pool=self.name,
            requested=nbytes,
            free=free,
            largest_hole=free,
        )

    def _record(self, direction: Direction, nbytes: int) -> None:
        thread = threading.current_thread().name
        with self._lock:
            old = self._counts.get(direction, CopyCount())
            self._counts[direction] = CopyCount(old.copies + 1, old.nbytes + nbytes, old.threads | {thread})

    def __repr__(self) -> str:
        return f"<StagedDevice {self.name}: {self.allocated_bytes} bytes allocated>"
