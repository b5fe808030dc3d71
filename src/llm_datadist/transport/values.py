"""The values that connections take and give: what a transport can do, where a peer's tensors are, what moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from llm_datadist.errors import TransferFailed
from llm_datadist.native import Tensors

if TYPE_CHECKING:
    from llm_datadist.deadline import Deadline

__all__ = ["Capabilities", "MemoryChanged", "RemoteTensors", "Transfer", "Window"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do, as data.

    Attributes:
        name: Name of the transport, as in ``llm.Transport``.
        shared_regions: True when exported regions (ids from 1) can be reached.
        private_memory: True when :data:`PRIVATE` memory can be reached.
        remote_guards: True when the owner of the memory checks its guards by itself, before the first byte and after
            the last: :meth:`Connection.generation` is not available then, and a change is ``TransferFailed``.
        same_addresses: True when an address of the peer means the same memory here.
        announces_reads: True when :meth:`Connection.announced` is for reads too, not for writes only.
    """

    name: str
    shared_regions: bool
    private_memory: bool
    remote_guards: bool = False
    same_addresses: bool = False
    announces_reads: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """Where a peer's memory lies, by address, and whether this process may write it. Size in bytes.

    Attributes:
        memory: What keeps it mapped for as long as somebody has this; None where the connection does.
    """

    base: int
    nbytes: int
    writable: bool
    memory: object = None


@dataclass(slots=True, eq=False)
class RemoteTensors(Tensors):
    """Tensors of a peer as returned by :meth:`Connection.map`; only the connection that made them may use them.

    Attributes:
        owner: Serial number of that connection: another one would read these addresses blindly.
        writable: False when the mapping is read-only and a write would be a segmentation fault.
        handle: What the owner of the memory needs to find it again, opaque to transports.
        private: True when the addresses are those of the peer's private memory.
        remote_guards: True when the owner checks its guards by itself, see :class:`Capabilities`.
    """

    owner: int
    writable: bool
    handle: bytes = b""
    private: bool = False
    remote_guards: bool = False


class MemoryChanged(TransferFailed):
    """The owner says that the memory is not what was resolved any more.

    It said so before the first byte: nothing was moved.
    """


class Transfer(msgspec.Struct, eq=False):
    """A movement of bytes. This class is the finished one: shm and inproc are done at return.

    Attributes:
        nbytes: Bytes that move.
    """

    nbytes: int

    def done(self) -> bool:
        """Return True when every byte is in place."""
        return True

    def wait(self, deadline: Deadline) -> None:
        """Return when every byte is in place.

        Raises:
            DeadlineExceeded: The deadline passed first (phase ``copy``); the transfer is aborted.
        """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.nbytes} bytes: {'done' if self.done() else 'running'}>"
