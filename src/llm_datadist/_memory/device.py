"""Devices, from which pools take memory: their protocol, and the host."""

from __future__ import annotations

import ctypes
from typing import Protocol

from llm_datadist._memory.segment import Segment, SharedSegment


class Device(Protocol):
    """Provider of memory, and of copies to, from and inside it.

    Addresses are those of this process. A copy is complete when its method returns; until then the caller keeps both
    ranges allocated. Threads: any.
    """

    @property
    def name(self) -> str:
        """Name of the device."""

    @property
    def needs_staging(self) -> bool:
        """True if block copies to and from the host need staging buffers on the device (interface R10)."""

    def allocate(
        self, nbytes: int, name: str, *, peers_may_write: bool, prefault: bool, huge_pages: bool = False
    ) -> Segment:
        """Return a new segment, owned by the caller.

        Raises:
            OutOfMemory: The device has too little memory.
            ParamError: It has no huge pages, or ``nbytes`` is not a multiple of their size.
        """

    def copy_to_device(self, dst: int, src: int, nbytes: int) -> None:
        """Copy from host to device."""

    def copy_from_device(self, dst: int, src: int, nbytes: int) -> None:
        """Copy from device to host."""

    def copy_on_device(self, dst: int, src: int, nbytes: int) -> None:
        """Copy inside the device; the ranges may overlap."""


class HostDevice:
    """Host memory as a device: shared segments, no staging. Stateless; any thread."""

    name = "host"
    needs_staging = False

    def allocate(
        self, nbytes: int, name: str, *, peers_may_write: bool, prefault: bool, huge_pages: bool = False
    ) -> Segment:
        return SharedSegment.create(
            name, nbytes, peers_may_write=peers_may_write, prefault=prefault, huge_pages=huge_pages
        )

    def copy_on_device(self, dst: int, src: int, nbytes: int) -> None:
        """Copy without the GIL; the ranges may overlap."""
        ctypes.memmove(dst, src, nbytes)

    copy_to_device = copy_from_device = copy_on_device
