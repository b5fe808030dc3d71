"""What this machine can do, measured without this library's engine: the yardsticks of ``llm-datadist bench``.

Plain loops in threads of their own that move blocks: memcpy, process_vm_readv and one TCP stream. Nothing else of the
library uses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist._native import _native
from llm_datadist.errors import ParamError

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["RawBlocks", "copy_raw", "move_process", "stream_raw", "streaming_bits"]

streaming_bits = _native.streaming_bits


@dataclass(frozen=True)
class RawBlocks:
    """Blocks of one size, by address.

    Attributes:
        addresses: Where each begins, uint64, shape (N,).
        block_bytes: Bytes of each.
        owner: What keeps the memory of this process alive; None for that of another one.
    """

    addresses: NDArray[np.uint64]
    block_bytes: int
    owner: object = None

    @classmethod
    def of(cls, tensors: Sequence[NDArray[np.uint8]], numbers: NDArray[np.int64]) -> RawBlocks:
        """Return rows ``numbers`` of every tensor, tensor after tensor.

        Args:
            tensors: At least one array, uint8, shape (rows, block_bytes), C-contiguous, all of one shape.
            numbers: int64, shape (N,).

        Raises:
            ParamError: Tensors that are not like that, or a row that there is not.
        """
        if not tensors:
            raise ParamError("tensors is empty: must be at least one")
        for each in tensors:
            _check_tensor(each, tensors[0])
        rows, block_bytes = tensors[0].shape
        return cls._at([each.ctypes.data for each in tensors], rows, block_bytes, numbers, tuple(tensors))

    @classmethod
    def elsewhere(cls, bases: Sequence[int], rows: int, block_bytes: int, numbers: NDArray[np.int64]) -> RawBlocks:
        """Return the same of another process, whose tensors of ``rows`` blocks begin at ``bases``. Raises as ``of``."""
        return cls._at(bases, rows, block_bytes, numbers, None)

    def steps(self, count: int) -> list[RawBlocks]:
        """Return list ``i`` of ``count``: block ``i`` of every tensor, where ``of`` was given ``count`` numbers."""
        columns = np.ascontiguousarray(self.addresses.reshape(-1, count).T)
        return [RawBlocks(each, self.block_bytes, self.owner) for each in columns]

    @classmethod
    def _at(
        cls, bases: Sequence[int], rows: int, block_bytes: int, numbers: NDArray[np.int64], owner: object
    ) -> RawBlocks:
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < rows):
            raise ParamError(f"numbers are in [{numbers.min()}, {numbers.max()}]: must be in [0, {rows})")
        offsets = numbers.astype(np.uint64) * np.uint64(block_bytes)
        starts = np.asarray(bases, np.uint64)
        return cls((starts[:, None] + offsets).reshape(-1), block_bytes, owner)


def _check_tensor(tensor: NDArray[Any], first: NDArray[Any]) -> None:
    if tensor.dtype != np.uint8 or tensor.ndim != 2 or not tensor.flags.c_contiguous or tensor.shape != first.shape:
        raise ParamError(
            f"a tensor is a {tensor.dtype} array of shape {tensor.shape}: must be C-contiguous uint8, shape (rows, "
            "block_bytes), all of one shape"
        )


def _check_same_size(dst: RawBlocks, src: RawBlocks) -> None:
    if dst.block_bytes != src.block_bytes:
        raise ParamError(f"dst has blocks of {dst.block_bytes} bytes, src of {src.block_bytes}: must be the same")


def _check_writable(blocks: RawBlocks, name: str) -> None:
    owner = blocks.owner
    if isinstance(owner, tuple) and not all(each.flags.writeable for each in owner):
        raise ParamError(f"{name} is read-only: must be writable")


def copy_raw(dst: RawBlocks, src: RawBlocks, *, threads: int, streaming: bool = False) -> None:
    """Copy block ``i`` of ``src`` to block ``i`` of ``dst``, shared by ``threads`` threads.

    Args:
        dst: Where to; must not overlap ``src``.
        src: Where from.
        threads: 1 to 1024; all but the caller are started for this call.
        streaming: The widest streaming (non-temporal) stores of this processor, see ``streaming_bits``, and a store
            fence; otherwise plain ``memcpy``.

    Raises:
        ParamError: Unequal numbers or sizes of blocks, read-only memory, no such number of threads, or no streaming
            stores here.
    """
    _check_same_size(dst, src)
    _check_writable(dst, "dst")
    _native.limit_memcpy(dst.addresses, src.addresses, dst.block_bytes, threads, streaming)


def move_process(near: RawBlocks, far: RawBlocks, pid: int, *, threads: int, write: bool = False) -> None:
    """Read block ``i`` of ``far``, in process ``pid``, into block ``i`` of ``near``; or write, the other way.

    By process_vm_readv or process_vm_writev with 512 ranges a call, shared by ``threads`` threads.

    Raises:
        OSError: The kernel refused.
        ParamError: As ``copy_raw``.
    """
    _check_same_size(near, far)
    if not write:
        _check_writable(near, "near")
    _native.limit_process(pid, write, near.addresses, far.addresses, near.block_bytes, threads)


def stream_raw(connection: socket.socket, blocks: RawBlocks, *, send: bool) -> None:
    """Send blocks one after the other over a stream, or receive into them, at most 1 MiB a call.

    Args:
        connection: Connected, blocking. Its bounds are SO_SNDTIMEO and SO_RCVTIMEO: a Python timeout makes it
            non-blocking.
        blocks: Of this process.
        send: The direction.

    Raises:
        OSError: The connection broke (ConnectionResetError when the peer ended it), or its time is over.
        ParamError: A connection that does not block, or read-only memory.
    """
    if not connection.getblocking() or connection.gettimeout() is not None:
        raise ParamError("connection has a timeout: must be blocking")
    if not send:
        _check_writable(blocks, "blocks")
    _native.limit_stream(connection.fileno(), send, blocks.addresses, blocks.block_bytes)
