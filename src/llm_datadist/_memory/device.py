"""Devices: where pools take their memory from. What a device must offer, and the host as the simplest one."""

from __future__ import annotations

import ctypes
from typing import Protocol

from llm_datadist._memory.segment import Segment, SharedSegment


class Device(Protocol):
    """Provides memory, and copies into, out of and inside it. Every method may be called from any thread.

    Addresses are those of this process; the caller keeps both ranges allocated during a copy, and a copy is complete
    when its method returns.
    """

    @property
    def name(self) -> str:
        """Name in messages and statistics."""

    @property
    def needs_staging(self) -> bool:
        """True if host memory reaches single blocks only through staging buffers on the device (interface R10)."""

    def allocate(
        self, nbytes: int, name: str, *, peers_may_write: bool, prefault: bool, huge_pages: bool = False
    ) -> Segment:
        """Return a new segment of ``nbytes`` bytes, owned by the caller.

        Raises:
            OutOfMemory: The device cannot provide it.
            ParamError: It has no huge pages, or ``nbytes`` is no multiple of their size.
        """

    def copy_to_device(self, dst: int, src: int, nbytes: int) -> None:
        """Copy ``nbytes`` bytes from host address ``src`` to device address ``dst``."""

    def copy_from_device(self, dst: int, src: int, nbytes: int) -> None:
        """Copy ``nbytes`` bytes from device address ``src`` to host address ``dst``."""

    def copy_on_device(self, dst: int, src: int, nbytes: int) -> None:
        """Copy ``nbytes`` bytes from device address ``src`` to device address ``dst``; they may overlap."""


class HostDevice:
    """Host memory as a device: shared segments, plain copies, no staging. Has no state; any thread."""

    name = "host"
    needs_staging = False

    def allocate(
        self, nbytes: int, name: str, *, peers_may_write: bool, prefault: bool, huge_pages: bool = False
    ) -> Segment:
        """Return a new shared segment of zero bytes, owned by the caller; see :meth:`SharedSegment.create`."""
        return SharedSegment.create(
            name, nbytes, peers_may_write=peers_may_write, prefault=prefault, huge_pages=huge_pages
        )

    def copy_on_device(self, dst: int, src: int, nbytes: int) -> None:
        """Copy ``nbytes`` bytes, which may overlap, without the GIL."""
        ctypes.memmove(dst, src, nbytes)

    copy_to_device = copy_from_device = copy_on_device
