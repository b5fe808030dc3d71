"""Devices, from which pools take memory: their protocol, and the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from llm_datadist._memory.host import available_memory, host_memory_limit
from llm_datadist._memory.segment import Segment, SharedSegment
from llm_datadist._native import MAPPED, USER, Place, check_mapped
from llm_datadist.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.types import Placement


class Device(Protocol):
    """Provider of memory. Threads: any."""

    name: str  # for messages
    ordinal: int  # number of the GPU; -1 for the host
    uuid: bytes  # of the GPU; empty for the host
    place: Place  # of its memory

    def has(self, address: int) -> bool:
        """Return True if the address is known to be memory of this device."""

    def limit(self) -> tuple[int, str]:
        """Return the most bytes that this process could have, and what says so."""

    def require(self, what: str, nbytes: int) -> None:
        """Raise OutOfMemory, which names ``what``, if this process cannot have so many bytes now (interface R11)."""

    def allocate(
        self, nbytes: int, name: str, *, peers_may_write: bool, prefault: bool, huge_pages: bool = False
    ) -> Segment:
        """Return a new segment, owned by the caller.

        Raises:
            OutOfMemory: The device has too little memory.
            ParamError: It has no huge pages, or ``nbytes`` is not a multiple of their size.
        """

    def place_of(self, name: str, addresses: Sequence[int], nbytes: int, placement: Placement) -> Place:
        """Return the place of a user's tensors of ``nbytes``; ParamError, with ``name``: not of that placement."""

    def pin(self, segment: Segment) -> None:
        """Let the device reach a segment of the host, if it can, as long as that is mapped."""


class HostDevice:
    """Host memory as a device: shared segments. Stateless; any thread."""

    name = "host"
    ordinal = -1
    uuid = b""
    place = MAPPED

    def has(self, address: int) -> bool:
        return False

    def limit(self) -> tuple[int, str]:
        return host_memory_limit()

    def require(self, what: str, nbytes: int) -> None:
        most, source = host_memory_limit()
        free, bound = available_memory()
        if nbytes <= min(most, free):
            return
        why = f"of which {free} can be had now ({bound}); pages that cannot be had would end this process when used"
        if nbytes > most:
            free, why = most, f"larger than the {most} bytes of {source}"
        text = f"{what}: memory_size is {nbytes} bytes, {why}"
        raise OutOfMemory(text, pool=what.removeprefix("pool "), requested=nbytes, free=free, largest_hole=free)

    def allocate(
        self, nbytes: int, name: str, *, peers_may_write: bool, prefault: bool, huge_pages: bool = False
    ) -> Segment:
        return SharedSegment.create(
            name, nbytes, peers_may_write=peers_may_write, prefault=prefault, huge_pages=huge_pages
        )

    def place_of(self, name: str, addresses: Sequence[int], nbytes: int, placement: Placement) -> Place:
        check_mapped(name, list(addresses), nbytes)
        return USER

    def pin(self, segment: Segment) -> None:
        """Do nothing: there is no device."""
