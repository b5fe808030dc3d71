"""Memory of an NVIDIA GPU as a device: pools that peers of this host map by a descriptor.

No host code may touch its addresses: copies name the device of a side (:class:`Place`), and the driver moves the bytes.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final, Self

from llm_datadist._log import logger
from llm_datadist._memory.device import HostDevice
from llm_datadist._memory.segment import AddressRange, Segment
from llm_datadist._native import Device as NativeDevice
from llm_datadist._native import DeviceMemory, DeviceMover, PinnedMemory, Place
from llm_datadist.errors import DeviceError, LLMException, OutOfMemory, ParamError, StateError
from llm_datadist.metrics import DeviceStatistics
from llm_datadist.types import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

MOVERS: Final = {"auto": DeviceMover.AUTO, "kernel": DeviceMover.KERNEL, "copy": DeviceMover.COPY}


class DeviceSegment(Segment):
    """Memory of a GPU, mapped here: of this process, or of a peer (``attach``).

    The driver keeps it as long as any process maps it. Arrays of :func:`llm_datadist.views.torch_views` keep it mapped
    here. Nothing can seal it: who has its descriptor may map it for writing.
    """

    def __init__(
        self, name: str, memory: DeviceMemory, nbytes: int, place: Place, uuid: bytes, *, writable: bool = True
    ) -> None:
        super().__init__(name, AddressRange(memory.address, nbytes, writable))
        self.place = place
        self.uuid = uuid
        self._device_memory: DeviceMemory | None = memory

    @classmethod
    def attach(cls, device: CudaDevice, fd: int, nbytes: int, uuid: bytes, *, writable: bool) -> Self:
        """Map a peer's memory, and close ``fd``, also if this raises: DeviceError, LLMException or OutOfMemory.

        The descriptor may be anything; the driver may wait for its other end.
        """
        try:
            memory = DeviceMemory(device.ordinal, nbytes, fd, writable)
        finally:
            os.close(fd)
        return cls("peer", memory, nbytes, device.place, uuid, writable=writable)

    def open_for_peer(self, *, writable: bool) -> int:
        """Return a descriptor as :class:`Segment` says, but none of a GPU can only read."""
        return self.keep().export_fd()

    def keep(self) -> DeviceMemory:
        """Return an object that keeps the memory mapped."""
        if (memory := self._device_memory) is None:
            raise StateError(f"segment {self.name!r} is closed")
        return memory

    def view(self, offset: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        raise ParamError(f"segment {self.name!r}: memory of a device has no NumPy array; torch_views has CUDA tensors")

    def close(self) -> None:
        """Drop the memory. Whoever drops it last, as an array, waits for copies that still run, without the GIL."""
        super().close()
        self._device_memory = None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            super().__del__()


class CudaDevice:
    """An NVIDIA GPU, for ``LLMDataDist(..., device=CudaDevice(0))``; caches with Placement.DEVICE lie in it.

    Args:
        ordinal: Number of the GPU as this process sees it (``CUDA_VISIBLE_DEVICES``).
        mover: How it moves bytes: ``auto``, ``kernel`` or ``copy``, as ``llm.DeviceMover``.

    Raises:
        LLMException: There is no driver, an older one, or no such GPU (``LLM_FEATURE_NOT_ENABLED``).
        ParamError: ``mover`` is none of the three.
    """

    def __init__(self, ordinal: int = 0, mover: str = "auto") -> None:
        if mover not in MOVERS:
            raise ParamError(f"mover: {mover!r} is unknown, known: {', '.join(MOVERS)}")
        self._native = NativeDevice.open(ordinal)
        self.ordinal = ordinal
        self.mover = mover
        self.name = self._native.name
        self.uuid = self._native.uuid
        self.place = Place(device=ordinal, mover=MOVERS[mover])
        if self._native.no_kernel and mover != "copy":
            logger.warning("%s: %s; plain copies move all bytes", self.name, self._native.no_kernel)

    def statistics(self) -> DeviceStatistics:
        """Return the figures of this process, of all its instances."""
        nbytes, waited = self._native.windows()
        return DeviceStatistics(self.name, nbytes, waited / 1e9)

    def limit(self) -> tuple[int, str]:
        """Return the bytes of the device."""
        return self._native.memory()[1], self.name

    def require(self, what: str, nbytes: int) -> None:
        """Raise OutOfMemory unless so many bytes are free."""
        free, total = self._native.memory()
        if nbytes > free:
            text = f"{what}: memory_size is {nbytes} bytes, {self.name} has {free} free of {total}"
            raise OutOfMemory(text, pool=what.removeprefix("pool "), requested=nbytes, free=free, largest_hole=free)

    def allocate(
        self, nbytes: int, name: str, *, peers_may_write: bool, prefault: bool, huge_pages: bool = False
    ) -> Segment:
        """Return memory of the device, in whole pages of 2 MiB; all of it is there at once."""
        if huge_pages:
            raise ParamError(f"pool {name}: huge_pages is for host memory, and {self.name} has none; leave it out")
        try:
            memory = DeviceMemory(self.ordinal, nbytes)
        except OutOfMemory as error:
            free, total = self._native.memory()
            text = f"{name}: {error}: {nbytes} bytes are wanted, and {free} of {total} free"
            raise OutOfMemory(text, pool=name, requested=nbytes, free=free, largest_hole=free) from error
        return DeviceSegment(name, memory, nbytes, self.place, self.uuid)

    def place_of(self, name: str, addresses: Sequence[int], nbytes: int, placement: Placement) -> Place:
        """Return the place of a user's tensors; ParamError if they lie elsewhere than ``placement`` says."""
        wanted = self.ordinal if placement is Placement.DEVICE else -1
        for i, address in enumerate(addresses):
            for found in {self._native.device_of(address), self._native.device_of(address + max(1, nbytes) - 1)}:
                if found != wanted:
                    here = "memory of the host, or of nobody" if found < 0 else f"memory of device {found}"
                    text = (
                        f"{name}[{i}]={address:#x}: {nbytes} bytes there are {here}, placement {placement.name} means"
                    )
                    raise ParamError(f"{text} {self.name if wanted >= 0 else 'the host'}")
        return self.place if wanted >= 0 else HostDevice().place_of(name, addresses, nbytes, placement)

    def pin(self, segment: Segment) -> None:
        """Let the device reach a segment of the host; where that fails, copies use windows, which is said once."""
        try:
            segment.pinned_by(PinnedMemory(self.ordinal, segment.address, segment.nbytes))
        except (DeviceError, LLMException) as error:
            text = "pool %s is not pinned (%s): copies between it and %s are slower"
            logger.warning(text, segment.name, error, self.name)

    def has(self, address: int) -> bool:
        """Return True if the address is memory of this GPU."""
        return self._native.device_of(address) == self.ordinal

    def __repr__(self) -> str:
        return f"CudaDevice({self.ordinal})"
