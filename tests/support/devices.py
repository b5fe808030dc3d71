"""A device that fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.testing import StagedDevice

if TYPE_CHECKING:
    from llm_datadist._memory.segment import Segment
    from llm_datadist.testing.staged_device import Direction


class BrokenDevice(StagedDevice):
    """Fails in the method named by ``broken``: a driver's error, which is none of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = ""
        self._names: list[str] = []

    def allocate(
        self, nbytes: int, name: str, *, peers_may_write: bool, prefault: bool, huge_pages: bool = False
    ) -> Segment:
        """Fail at the third staging buffer."""
        self._names.append(name)
        if self.broken == "allocate" and self._names.count("swap-staging") == 3:
            raise OSError("device is lost")
        return super().allocate(nbytes, name, peers_may_write=peers_may_write, prefault=prefault, huge_pages=huge_pages)

    def _record(self, direction: Direction, nbytes: int) -> None:
        if self.broken == f"copy_{direction}":
            raise OSError("device is lost")
        super()._record(direction, nbytes)
