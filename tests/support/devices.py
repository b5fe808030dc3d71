"""Devices for the swap tests: host memory that declares staging, with gates instead of luck."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from llm_datadist.testing import StagedDevice

if TYPE_CHECKING:
    from llm_datadist._memory.segment import Segment

__all__ = ["BrokenDevice", "GatedDevice", "MeetingDevice"]

#: Longer than anything here takes; only a hang reaches it.
_HANG_SECONDS = 30.0


class GatedDevice(StagedDevice):
    """Stops every copy on the device at a gate until the test opens it."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = threading.Event()
        self.gate = threading.Event()

    def copy_on_device(self, dst: int, src: int, nbytes: int) -> None:
        """Tell the test, wait for it, copy."""
        self.arrived.set()
        assert self.gate.wait(_HANG_SECONDS)
        super().copy_on_device(dst, src, nbytes)


class MeetingDevice(StagedDevice):
    """Copies from the device only when ``parties`` threads are at it at once: the proof that there are so many."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.meeting = threading.Barrier(parties)

    def copy_from_device(self, dst: int, src: int, nbytes: int) -> None:
        """Wait for the others, copy."""
        self.meeting.wait(_HANG_SECONDS)
        super().copy_from_device(dst, src, nbytes)


class BrokenDevice(StagedDevice):
    """Fails in the method named by ``broken``: a driver's error, which is none of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = ""
        self._staged = 0

    def allocate(self, nbytes: int, name: str, *, peers_may_write: bool, prefault: bool) -> Segment:
        """Fail at the third staging buffer."""
        if self.broken == "allocate" and name == "swap-staging" and self._staged == 2:
            raise OSError("device is lost")
        self._staged = self._staged + 1 if name == "swap-staging" else 0
        return super().allocate(nbytes, name, peers_may_write=peers_may_write, prefault=prefault)

    def copy_to_device(self, dst: int, src: int, nbytes: int) -> None:
        """Copy, or fail."""
        self._check("copy_to_device")
        super().copy_to_device(dst, src, nbytes)

    def copy_from_device(self, dst: int, src: int, nbytes: int) -> None:
        """Copy, or fail."""
        self._check("copy_from_device")
        super().copy_from_device(dst, src, nbytes)

    def copy_on_device(self, dst: int, src: int, nbytes: int) -> None:
        """Copy, or fail."""
        self._check("copy_on_device")
        super().copy_on_device(dst, src, nbytes)

    def _check(self, method: str) -> None:
        if self.broken == method:
            raise OSError("device is lost")
