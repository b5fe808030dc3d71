"""Memory of a peer's GPU, mapped here from the descriptors of a rendezvous.

The driver takes a descriptor of anything, and may wait for its other end: a FIFO, a socket, a file of FUSE. So a thread
of its own imports. What is not mapped, or not yet, goes over data lanes.
"""

from __future__ import annotations

import _thread
import threading
import time
from typing import TYPE_CHECKING, Final

from llm_datadist._checks import HERE, clean
from llm_datadist._log import logger
from llm_datadist._memory.cuda import CudaDevice, DeviceSegment
from llm_datadist._native import close_elsewhere
from llm_datadist._native.public_call import elsewhere
from llm_datadist.errors import LLMException

if TYPE_CHECKING:
    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.exports import RegionDescriptor

_LINK_SECONDS: Final = 3.0  # most that a link waits for imports, which take milliseconds on an idle host
_LATE_SECONDS: Final = 5.0
_MAX_LATE: Final = 16  # imports that have taken longer; while there are so many, none is begun

_begun: Final[dict[DeviceRegions, float]] = {}  # whose imports have not ended


class DeviceRegions:
    """Regions of a peer's GPU.

    Owns: the descriptors, until they are imported; the segments, until :meth:`close`.
    Threads: one of its own imports; any others. Its own are no ``threading.Thread``, whose ``start`` never returns if
        the thread ends at once for want of memory.
    Errors: a region that is not mapped has its reason in ``left_out``.
    """

    def __init__(self, device: CudaDevice, wanted: list[tuple[RegionDescriptor, int]]) -> None:
        self._device = device
        self._pid = HERE["pid"]
        self._lock = threading.Lock()  # for the next four, held for no call
        self.left_out = {each.region: _because(each, "the driver has not answered yet") for each, _ in wanted}
        self._segments: dict[int, DeviceSegment] = {}
        self._closed = False
        self._wanted = wanted
        self._ended = threading.Event()
        try:
            if sum(time.monotonic() - since > _LATE_SECONDS for since in list(_begun.values())) >= _MAX_LATE:
                raise RuntimeError(f"{_MAX_LATE} imports of other peers' memory do not end")
            _thread.start_new_thread(self._import, ())
        except (RuntimeError, MemoryError) as error:  # no thread
            self.left_out = {each.region: _because(each, str(error)) for each, _ in wanted}
            self._drop_wanted()
            self._ended.set()

    def get(self, region: int) -> DeviceSegment | None:
        return self._segments.get(region)

    @elsewhere
    def wait(self, deadline: Deadline) -> None:
        """Wait a little until all imports have ended, so that the first transfer needs no lane."""
        self._ended.wait(min(_LINK_SECONDS, deadline.remaining_ms() / 2000))

    def remark(self) -> str:
        with self._lock:
            return "".join(f"; {reason}: by data lanes" for reason in self.left_out.values())

    def close(self) -> None:
        """Unmap all in a thread, as the driver may wait; what is imported later is unmapped at once. Idempotent."""
        if HERE["pid"] != self._pid:
            return
        with self._lock:
            self._closed = True
            segments = list(self._segments.values())
        self._drop_wanted()
        if any(not each.closed for each in segments):
            _unmap_elsewhere(segments)

    def _drop_wanted(self) -> None:
        with self._lock:
            left, self._wanted = self._wanted, []
        close_elsewhere([fd for _, fd in left])

    def _import(self) -> None:
        _begun[self] = time.monotonic()
        try:
            while (wanted := self._next()) is not None:
                self._import_one(*wanted)
        except Exception:  # noqa: BLE001 (a bug costs a region, and the other descriptors are closed)
            logger.exception("the import of a peer's memory failed")
        finally:
            self._drop_wanted()
            self._ended.set()
            _begun.pop(self, None)

    def _next(self) -> tuple[RegionDescriptor, int] | None:
        with self._lock:
            return self._wanted.pop(0) if self._wanted else None

    def _import_one(self, described: RegionDescriptor, fd: int) -> None:
        region, writable = described.region, described.writable
        try:
            segment = DeviceSegment.attach(self._device, fd, described.nbytes, described.device, writable=writable)
        except LLMException as error:
            with self._lock:
                self.left_out[region] = _because(described, str(error))
            return
        with self._lock:
            closed = self._closed
            if not closed:
                self._segments[region] = segment
                del self.left_out[region]
        if closed:
            segment.close()


def _because(described: RegionDescriptor, why: str) -> str:
    return f"region {described.region} (GPU {described.device.hex()[:8]}) is not mapped: {clean(why)}"


def _unmap_elsewhere(segments: list[DeviceSegment]) -> None:
    def unmap() -> None:
        for segment in segments:
            segment.close()

    try:
        _thread.start_new_thread(unmap, ())
    except (RuntimeError, MemoryError):
        unmap()
