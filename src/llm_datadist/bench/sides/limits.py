"""The raw limits of this machine as sides: memcpy, process_vm_readv and TCP streams.

They move the same blocks in the same kind of memory as the side that they are compared with, by plain loops in threads
of their own (the module ``_native/_limits``). The library's engine takes no part, and nothing else imports them.
"""

from __future__ import annotations

import enum
import math
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from llm_datadist._native import _limits
from llm_datadist.bench import workload as work
from llm_datadist.bench.memory import private_tensors, tensors_like
from llm_datadist.bench.sides.base import HOST, Facts, Role, Side
from llm_datadist.bench.workload import Bytes, Op, Workload
from llm_datadist.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


_BETWEEN: Final = (Op.PULL, Op.PUSH, Op.LATENCY)
# Below this a thread takes longer to start than it saves.
_THREAD_PAYS_ABOVE: Final = 1 << 20
# Only so that nothing waits for ever: the driver's own bound comes first.
_STREAM_S: Final = 300
_STREAM_BUFFER_BYTES: Final = 4 << 20
_GO: Final = b"g"

streaming_bits = _limits.streaming_bits


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
        return cls.elsewhere([each.ctypes.data for each in tensors], rows, block_bytes, numbers, tuple(tensors))

    @classmethod
    def elsewhere(
        cls, bases: Sequence[int], rows: int, block_bytes: int, numbers: NDArray[np.int64], owner: object = None
    ) -> RawBlocks:
        """Return rows ``numbers`` of tensors of ``rows`` blocks that begin at ``bases``. Raises as ``of``."""
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < rows):
            raise ParamError(f"numbers are in [{numbers.min()}, {numbers.max()}]: must be in [0, {rows})")
        offsets = numbers.astype(np.uint64) * np.uint64(block_bytes)
        starts = np.asarray(bases, np.uint64)
        return cls((starts[:, None] + offsets).reshape(-1), block_bytes, owner)

    def steps(self, count: int) -> list[RawBlocks]:
        """Return ``count`` lists: list ``i`` is block ``i`` of every tensor."""
        columns = np.ascontiguousarray(self.addresses.reshape(-1, count).T)
        return [RawBlocks(each, self.block_bytes, self.owner) for each in columns]


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
    _limits.limit_memcpy(dst.addresses, src.addresses, dst.block_bytes, threads, streaming)


def move_process(near: RawBlocks, far: RawBlocks, pid: int, *, threads: int, write: bool = False) -> None:
    """Read the blocks ``far`` of process ``pid`` into ``near``, or write them.

    By process_vm_readv or process_vm_writev with 512 ranges a call, shared by ``threads`` threads.

    Raises:
        OSError: The kernel refused.
        ParamError: As ``copy_raw``.
    """
    _check_same_size(near, far)
    if not write:
        _check_writable(near, "near")
    _limits.limit_process(pid, write, near.addresses, far.addresses, near.block_bytes, threads)


class Wait(enum.IntEnum):
    """How the receiver of a stream waits."""

    BLOCKING = 0
    """Until something is there."""
    LOW_WATER = 1
    """Until 256 KiB are there (SO_RCVLOWAT), or all that is left."""
    SPINNING = 2
    """Not at all: it asks again and again."""


def stream_raw(connection: socket.socket, blocks: RawBlocks, *, send: bool, wait: Wait = Wait.BLOCKING) -> None:
    """Send blocks over a stream, or receive into them, at most 1 MiB a call.

    Args:
        connection: Connected, blocking. Its bounds are SO_SNDTIMEO and SO_RCVTIMEO: a Python timeout makes it
            non-blocking.
        blocks: Of this process.
        send: The direction.
        wait: How the receiver waits.

    Raises:
        OSError: The connection broke (ConnectionResetError when the peer ended it), or its time is over.
        ParamError: A connection that does not block, or read-only memory.
    """
    if not connection.getblocking() or connection.gettimeout() is not None:
        raise ParamError("connection has a timeout: must be blocking")
    if not send:
        _check_writable(blocks, "blocks")
    _limits.limit_stream(connection.fileno(), send, blocks.addresses, blocks.block_bytes, wait)


def useful_threads(workload: Workload) -> int:
    """Return the fastest number of threads, which start anew for every transfer."""
    return max(1, min(workload.threads, workload.nbytes // _THREAD_PAYS_ABOVE))


class Memcpy(Side):
    """memcpy of every block inside one process, in shared pages for pools."""

    ops: ClassVar[tuple[Op, ...]] = (*_BETWEEN, Op.COPY, Op.SWAP)
    roles: ClassVar[tuple[Role, ...]] = (Role.ALONE,)
    streaming: ClassVar[bool] = False

    @classmethod
    def footprint(cls, workload: Workload) -> int:
        """Source and destination, or one memory for both."""
        return workload.tensor_bytes * workload.tensors * (1 if workload.op is Op.COPY else 2)

    def start(self) -> Facts:
        """Make source and destination; for a copy they are the same tensors."""
        here = self.workload
        self.source_views = tensors_like(here)
        self.destination_views = self.source_views if here.op is Op.COPY else tensors_like(here)
        self._src = RawBlocks.of(self.source_views, here.src_blocks)
        self._dst = RawBlocks.of(self.destination_views, here.dst_blocks)
        if here.op is Op.LATENCY:
            self._steps = list(zip(self._dst.steps(here.blocks), self._src.steps(here.blocks), strict=True))
        return {"transport": "local"}

    def transfer(self) -> None:
        copy_raw(self._dst, self._src, threads=useful_threads(self.workload), streaming=self.streaming)

    def transfer_one(self, index: int) -> None:
        dst, src = self._steps[index]
        copy_raw(dst, src, threads=1, streaming=self.streaming)


class MemcpyStreaming(Memcpy):
    """The same with the widest streaming (non-temporal) stores of the processor."""

    streaming: ClassVar[bool] = True

    @classmethod
    def why_not(cls, workload: Workload) -> str | None:
        return super().why_not(workload) if streaming_bits() else "this processor has no streaming stores"


class Cma(Side):
    """process_vm_readv of another process's private pages, 512 ranges a call; process_vm_writev for a push."""

    ops: ClassVar[tuple[Op, ...]] = _BETWEEN

    def start(self) -> Facts:
        self._tensors = private_tensors(self.workload)
        self.own(self._tensors)
        return {"pid": os.getpid(), "bases": [each.ctypes.data for each in self._tensors]}

    def connect(self, facts: Facts) -> Facts:
        here = self.workload
        self._pid = int(facts["pid"])
        self._write = here.op is Op.PUSH
        mine, theirs = (here.src_blocks, here.dst_blocks) if self._write else (here.dst_blocks, here.src_blocks)
        self._near = RawBlocks.of(self._tensors, mine)
        self._far = RawBlocks.elsewhere(facts["bases"], here.rows, here.block_bytes, theirs)
        if here.op is Op.LATENCY:
            self._steps = list(zip(self._near.steps(here.blocks), self._far.steps(here.blocks), strict=True))
        return {"transport": "cma"}

    def transfer(self) -> None:
        threads = useful_threads(self.workload)
        move_process(self._near, self._far, self._pid, threads=threads, write=self._write)

    def transfer_one(self, index: int) -> None:
        near, far = self._steps[index]
        move_process(near, far, self._pid, threads=1)


@dataclass(frozen=True)
class _Way:
    """One way to move all bytes over TCP."""

    streams: int
    wait: Wait
    unsent: int | None
    """TCP_NOTSENT_LOWAT of the sender; None: without a bound."""

    def __str__(self) -> str:
        how = {Wait.BLOCKING: "blocking", Wait.LOW_WATER: "SO_RCVLOWAT", Wait.SPINNING: "spinning"}[self.wait]
        bound = f", {self.unsent >> 10} KiB unsent" if self.unsent else ""
        return f"{how}, {self.streams} stream{'s' if self.streams > 1 else ''}{bound}"


_STREAMS: Final = 2
_UNSENT: Final = (None, 512 << 10)
_WAYS: Final = tuple(_Way(*each) for each in product(range(1, _STREAMS + 1), Wait, _UNSENT))
_NO_BOUND: Final = (1 << 31) - 1
_TRIALS: Final = 4


class TcpRaw(Side):
    """One or two TCP streams: the bytes of the workload without any framing, the best way there is.

    Source and destination have the workload's memory. What is sent is the first ``blocks`` rows of every tensor, which
    are contiguous, so that the size of a block makes no difference; the rest of the destination must stay untouched.
    The ways are tried when the destination connects, and the fastest is used.

    Threads: one for each stream at the source, ``bench-stream``; one for the second stream at the destination.
    """

    ops: ClassVar[tuple[Op, ...]] = (Op.PULL, Op.PUSH)

    def start(self) -> Facts:
        """Make the tensors; the source listens and serves."""
        tensors = private_tensors(self.workload)
        self.own(tensors)
        # Each stream has its part of the front of every tensor.
        nbytes = tensors[0].size // work.SPREAD
        cuts = [nbytes * number // _STREAMS for number in range(_STREAMS + 1)]
        self._parts = [_slices(tensors, begin, end) for begin, end in pairwise(cuts)]
        self._front = _slices(tensors, 0, nbytes)
        self._streams: list[socket.socket] = []
        self._stopping = False
        self._way = _WAYS[0]
        if self.role is Role.DESTINATION:
            return {}
        self._listener = socket.create_server((HOST, 0))
        self._threads = ThreadPoolExecutor(_STREAMS, "bench-stream")
        self._served = [self._threads.submit(self._serve, number) for number in range(_STREAMS)]
        return {"port": self._listener.getsockname()[1]}

    def connect(self, facts: Facts) -> Facts:
        self._threads = ThreadPoolExecutor(1, "bench-stream")
        for number in range(_STREAMS):
            self._streams.append(stream := socket.socket())
            _prepare(stream)
            stream.connect((HOST, facts["port"]))
            stream.sendall(bytes([number]))
        times: dict[_Way, float] = {}
        for _ in range(_TRIALS):  # in turns, because the speed of a machine changes
            for self._way in _WAYS:
                times[self._way] = min(self.timed(1)[0], times.get(self._way, math.inf))
        self._way = min(times, key=times.__getitem__)
        return {"transport": "tcp", "way": str(self._way)}

    def transfer(self) -> None:
        """Ask for all bytes and receive them, or send them and wait for the answer."""
        others = [self._threads.submit(self._move, number) for number in range(1, self._way.streams)]
        self._move(0)
        for each in others:
            each.result()

    def _move(self, number: int) -> None:
        stream, sends = self._streams[number], self.workload.op is Op.PUSH
        stream.sendall(bytes([_WAYS.index(self._way)]))
        self._stream(stream, number, self._way, send=sends)
        if sends and stream.recv(1) != _GO:
            raise ConnectionError("the other end closed the stream")

    def _stream(self, stream: socket.socket, number: int, way: _Way, *, send: bool) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, way.unsent or _NO_BOUND)
        stream_raw(stream, self._front if way.streams == 1 else self._parts[number], send=send, wait=way.wait)

    def verify(self, seed: int) -> bool:
        """Compare every byte: the rows that were sent, and those behind them."""
        if self.destination_views:
            work.verify_front(self.destination_views, self.workload, seed)
        return bool(self.destination_views)

    def stop(self) -> None:
        """Close the streams; the source's threads end with them."""
        if self.role is Role.SOURCE:
            self._stopping = True
            # A mere close would not wake a thread that waits in accept or recv.
            _shut(self._listener)
            for stream in self._streams:
                _shut(stream)
            wait(self._served)
            self._listener.close()
        for stream in self._streams:
            stream.close()

    def _serve(self, _: int) -> None:
        """Send or receive all bytes of one stream for each request until it ends."""
        try:
            stream, _ = self._listener.accept()
            self._streams.append(stream)
            _prepare(stream)
            [number] = stream.recv(1)
            # Either this sees the flag or stop() sees the stream.
            while not self._stopping and (asked := stream.recv(1)):
                sends = self.workload.op is Op.PULL
                self._stream(stream, number, _WAYS[asked[0]], send=sends)
                if not sends:
                    stream.sendall(_GO)
        except OSError:
            return  # the destination, if it still waits for something, sees the end of the stream


def _slices(tensors: Sequence[Bytes], begin: int, end: int) -> RawBlocks:
    """Return the bytes from ``begin`` to ``end`` of every tensor, each slice as one block."""
    return RawBlocks.of([each.reshape(-1)[begin:end].reshape(1, -1) for each in tensors], np.zeros(1, np.int64))


def _shut(each: socket.socket) -> None:
    with suppress(OSError):  # the other end was first
        each.shutdown(socket.SHUT_RDWR)


def _prepare(stream: socket.socket) -> None:
    bound = struct.pack("ll", _STREAM_S, 0)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        stream.setsockopt(socket.SOL_SOCKET, option, _STREAM_BUFFER_BYTES)
