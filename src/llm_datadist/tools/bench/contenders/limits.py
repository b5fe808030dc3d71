"""The raw limits of this machine as contenders: memcpy, process_vm_readv and TCP streams.

They use plain loops (the module ``_native/_limits``) that share no code with the engine, except its cipher.
"""

from __future__ import annotations

import enum
import math
import os
import secrets
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import numpy as np

from llm_datadist._native import _limits, usable_cpus
from llm_datadist.tools.bench import workload as work
from llm_datadist.tools.bench.contenders.base import HOST, Contender, Facts, Role
from llm_datadist.tools.bench.workload import BenchMemory, BenchWorkload, Bytes, Op, private_tensors, tensors_like

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


_BETWEEN: Final = (Op.PULL, Op.PUSH, Op.LATENCY)
# Bytes below which a thread costs more than it saves.
_THREAD_PAYS_ABOVE: Final = 1 << 20
# Bounds every wait; the driver's own bound comes first.
_STREAM_S: Final = 300
_STREAM_BUFFER_BYTES: Final = 4 << 20
_GO: Final = b"g"
_KEY_BYTES: Final = 32

streaming_bits = _limits.streaming_bits


@dataclass(frozen=True)
class RawBlocks:
    """Blocks of one size, by address: uint64, shape (N,). Whoever has them keeps the memory alive."""

    addresses: NDArray[np.uint64]
    block_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[NDArray[np.uint8]], numbers: NDArray[np.int64]) -> RawBlocks:
        """Return rows ``numbers`` (int64, shape (N,)) of every tensor (rows, block_bytes), tensor after tensor."""
        return cls.at([each.ctypes.data for each in tensors], tensors[0].shape[1], numbers)

    @classmethod
    def at(cls, bases: Sequence[int], block_bytes: int, numbers: NDArray[np.int64]) -> RawBlocks:
        """Return rows ``numbers`` of tensors at these addresses, perhaps another process's."""
        offsets = numbers.astype(np.uint64) * np.uint64(block_bytes)
        return cls((np.asarray(bases, np.uint64)[:, None] + offsets).reshape(-1), block_bytes)

    def steps(self, count: int) -> list[RawBlocks]:
        """Return ``count`` lists: list ``i`` is block ``i`` of every tensor."""
        columns = np.ascontiguousarray(self.addresses.reshape(-1, count).T)
        return [replace(self, addresses=each) for each in columns]


def copy_raw(dst: RawBlocks, src: RawBlocks, *, threads: int, streaming: bool = False) -> None:
    """Copy block ``i`` of ``src`` to block ``i`` of ``dst``, which must not overlap, on 1 to 1024 ``threads``.

    ``streaming`` uses the widest streaming (non-temporal) stores and a store fence, not ``memcpy``. Unequal numbers of
    blocks, ``threads`` out of range and a lack of streaming stores are a ParamError.
    """
    _limits.limit_memcpy(dst.addresses, src.addresses, dst.block_bytes, threads, streaming)


def move_process(near: RawBlocks, far: RawBlocks, pid: int, *, threads: int, write: bool = False) -> None:
    """Read the blocks ``far`` of process ``pid`` into ``near``, or write them, 512 ranges a system call.

    A refusal of the kernel is an OSError; ParamError as in ``copy_raw``.
    """
    _limits.limit_process(pid, write, near.addresses, far.addresses, near.block_bytes, threads)


class Wait(enum.IntEnum):
    """A stream receiver waits until a byte arrives, until 256 KiB (SO_RCVLOWAT) or the rest arrive, or it polls."""

    BLOCKING = 0
    LOW_WATER = 1
    SPINNING = 2


def stream_raw(
    connection: socket.socket,
    blocks: RawBlocks,
    *,
    send: bool,
    wait: Wait = Wait.BLOCKING,
    key: bytes = b"",
    first: int = 0,
) -> int:
    """Send blocks over a blocking socket, or receive into them, at most 1 MiB a system call.

    With a ``key`` of 32 bytes, which serves one direction only, they travel as records of AES-256-GCM of at most
    64 KiB. ``first`` is the number of the first one, and so its nonce. Returns the number of the next.

    SO_SNDTIMEO and SO_RCVTIMEO bound it; a Python timeout would make the socket non-blocking. A connection that breaks
    (ConnectionResetError if the peer ended it) or times out is an OSError, a wrong tag a RuntimeError.
    """
    addresses, block_bytes = blocks.addresses, blocks.block_bytes
    return _limits.limit_stream(connection.fileno(), send, addresses, block_bytes, wait, key, first)


def useful_threads(workload: BenchWorkload) -> int:
    """Return the fastest number of threads that each transfer starts."""
    return max(1, min(workload.threads, workload.nbytes // _THREAD_PAYS_ABOVE))


class Memcpy(Contender):
    """memcpy of every block inside one process, in shared pages for pools."""

    ops: ClassVar[tuple[Op, ...]] = (*_BETWEEN, Op.COPY, Op.SWAP)
    roles: ClassVar[tuple[Role, ...]] = (Role.ALONE,)
    streaming: ClassVar[bool] = False

    @classmethod
    def footprint(cls, workload: BenchWorkload) -> int:
        return workload.tensor_bytes * workload.tensors * (1 if workload.op is Op.COPY else 2)

    def start(self) -> Facts:
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
    """Memcpy with streaming stores."""

    streaming: ClassVar[bool] = True

    @classmethod
    def why_not(cls, workload: BenchWorkload) -> str | None:
        return super().why_not(workload) if streaming_bits() else "this processor has no streaming stores"


class Cma(Contender):
    """process_vm_readv from another process's private pages; process_vm_writev for a push."""

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
        self._far = RawBlocks.at(facts["bases"], here.block_bytes, theirs)
        if here.op is Op.LATENCY:
            self._steps = list(zip(self._near.steps(here.blocks), self._far.steps(here.blocks), strict=True))
        return {"transport": "cma"}

    def transfer(self) -> None:
        threads = useful_threads(self.workload)
        move_process(self._near, self._far, self._pid, threads=threads, write=self._write)

    def transfer_one(self, index: int) -> None:
        near, far = self._steps[index]
        move_process(near, far, self._pid, threads=1)


class _Way(NamedTuple):
    streams: int
    wait: Wait
    unsent: int | None
    """TCP_NOTSENT_LOWAT of the sender in bytes; None: no bound."""
    reno: bool
    """True: the sender's congestion control is reno; False: the system's."""

    def __str__(self) -> str:
        how = {Wait.BLOCKING: "blocking", Wait.LOW_WATER: "SO_RCVLOWAT", Wait.SPINNING: "spinning"}[self.wait]
        bound = f", {self.unsent >> 10} KiB unsent" if self.unsent else ""
        return f"{how}, {self.streams} stream{'s' if self.streams > 1 else ''}{bound}{', reno' if self.reno else ''}"


_UNSENT: Final = (None, 512 << 10, 1 << 20)
_NO_BOUND: Final = (1 << 31) - 1
_TRIALS: Final = 3
_NAME_BYTES: Final = 16  # of a congestion control
_RENO: Final = b"reno"
_STEP: Final = struct.Struct("<I")


class TcpRaw(Contender):
    """TCP streams without framing, in the fastest of several ways; of one block a request and its answer.

    One or two streams, with four CPUs also four, send the first ``blocks`` rows of every tensor: contiguous, so the
    block size makes no difference. A request is the number of a step; requester and owner wait in blocking calls.

    Threads: ``bench-stream``, one for each stream except the destination's first.

    ``records``: by stream, how many encrypted records have passed.
    """

    ops: ClassVar[tuple[Op, ...]] = _BETWEEN
    memories: ClassVar[tuple[BenchMemory, ...]] = tuple(BenchMemory)
    streams: ClassVar[tuple[int, ...]] = (1, 2, 4)
    encrypted: ClassVar[bool] = False
    _way: _Way  # from `connect` on

    @classmethod
    def footprint_on_gpu(cls, workload: BenchWorkload) -> int:
        return 0

    def start(self) -> Facts:
        here = self.workload
        tensors = private_tensors(here)
        self.own(tensors)
        self._answers = here.op is Op.LATENCY
        if self._answers:
            numbers = here.src_blocks if self.role is Role.SOURCE else here.dst_blocks
            self._steps = RawBlocks.of(tensors, numbers).steps(here.blocks)
        nbytes = tensors[0].size // work.SPREAD
        self._parts = {
            count: [_part(tensors, nbytes * n // count, nbytes * (n + 1) // count) for n in range(count)]
            for count in self.streams
        }
        self._streams: list[socket.socket] = []
        self._keys = [secrets.token_bytes(_KEY_BYTES) if self.encrypted else b"" for _ in range(max(self.streams))]
        self.records = [0] * len(self._keys)
        self._stopping = False
        self._ways = [_Way(*each) for each in product(self.streams, Wait, _UNSENT, (False, True))]
        with socket.socket() as fresh:
            self._systems = fresh.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
            try:
                fresh.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _RENO)
                self._reno = True
            except OSError:  # the system refuses it
                self._reno = False
        self._threads = ThreadPoolExecutor(max(self.streams), "bench-stream")
        if self.role is Role.DESTINATION:
            return {}
        self._listener = socket.create_server((HOST, 0))
        for _ in self._keys:
            self._threads.submit(self._serve)
        return {"port": self._listener.getsockname()[1], "keys": [key.hex() for key in self._keys]}

    def connect(self, facts: Facts) -> Facts:
        self._keys = [bytes.fromhex(key) for key in facts["keys"]]
        for number in range(max(self.streams)):
            self._streams.append(stream := socket.socket())
            self._prepare(stream)
            stream.connect((HOST, facts["port"]))
            stream.sendall(bytes([number]))
        if self._answers:
            return {"transport": "tcp", "way": "request and answer"}
        times: dict[_Way, float] = {}
        most = max(2, usable_cpus())
        ways = [way for way in self._ways if way.streams <= most and self._parts[way.streams][0].block_bytes]
        usable = [way for way in ways if self._reno or not way.reno]
        for _ in range(_TRIALS):  # in turns, because a machine's speed changes
            for way in usable:
                self._way = way
                times[way] = min(self.timed(1)[0], times.get(way, math.inf))
        self._way = min(times, key=times.__getitem__)
        return {"transport": "tcp", "way": str(self._way)}

    def transfer_one(self, index: int) -> None:
        stream = self._streams[0]
        stream.sendall(_STEP.pack(index))
        self._carry(stream, 0, self._steps[index], send=False)

    def transfer(self) -> None:
        others = [self._threads.submit(self._move, number) for number in range(1, self._way.streams)]
        self._move(0)
        for each in others:
            each.result()

    def _move(self, number: int) -> None:
        stream, sends = self._streams[number], self.workload.op is Op.PUSH
        stream.sendall(bytes([self._ways.index(self._way)]))
        self._stream(stream, number, self._way, send=sends)
        if sends and stream.recv(1) != _GO:
            raise ConnectionError("the source closed the stream")

    def _stream(self, stream: socket.socket, number: int, way: _Way, *, send: bool) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, way.unsent or _NO_BOUND)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _RENO if way.reno else self._systems)
        self._carry(stream, number, self._parts[way.streams][number], send=send, wait=way.wait)

    def _carry(
        self, stream: socket.socket, number: int, blocks: RawBlocks, *, send: bool, wait: Wait = Wait.BLOCKING
    ) -> None:
        key, first = self._keys[number], self.records[number]
        self.records[number] = stream_raw(stream, blocks, send=send, wait=wait, key=key, first=first)

    def verify(self, seed: int) -> bool:
        if self._answers:
            return super().verify(seed)
        if self.destination_views:
            work.verify_front(self.destination_views, self.workload, seed)
        return bool(self.destination_views)

    def stop(self) -> None:
        self._stopping = True
        sockets = [*self._streams, *([self._listener] if self.role is Role.SOURCE else [])]
        # A close would not wake a thread that waits in accept or recv.
        for each in sockets:
            with suppress(OSError):  # the peer shut it down first
                each.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown()
        for each in sockets:
            each.close()

    def _prepare(self, stream: socket.socket) -> None:
        bound = struct.pack("ll", _STREAM_S, 0)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            stream.setsockopt(socket.SOL_SOCKET, option, _STREAM_BUFFER_BYTES)
        if self._answers and self._reno:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _RENO)

    def _serve(self) -> None:
        with suppress(OSError):
            stream, _ = self._listener.accept()
            self._streams.append(stream)
            with stream:  # closed, because the destination must see any end
                self._prepare(stream)
                [number] = stream.recv(1)
                while self._answers and (asked := stream.recv(_STEP.size)):
                    self._carry(stream, number, self._steps[_STEP.unpack(asked)[0]], send=True)
                # This sees the flag, or stop() the stream.
                while not self._stopping and (asked := stream.recv(1)):
                    sends = self.workload.op is Op.PULL
                    self._stream(stream, number, self._ways[asked[0]], send=sends)
                    if not sends:
                        stream.sendall(_GO)


class TcpRawEncrypted(TcpRaw):
    """TcpRaw under the cipher of this library's lanes, with a key for each stream. Requests are plain."""

    encrypted: ClassVar[bool] = True


def _part(tensors: Sequence[Bytes], begin: int, end: int) -> RawBlocks:
    return RawBlocks(np.array([each.ctypes.data + begin for each in tensors], np.uint64), end - begin)
