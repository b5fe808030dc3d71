"""What the machine can do: the raw limits of ``llm_datadist.bench.limits`` as sides.

They have memory like the side they are compared with and move the same blocks, but by plain loops of their own.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from llm_datadist.bench import workload as work
from llm_datadist.bench.limits import RawBlocks, copy_raw, move_process, stream_raw, streaming_bits
from llm_datadist.bench.sides.base import Facts, Role, Side
from llm_datadist.bench.sides.pages import private_tensors, tensors_like
from llm_datadist.bench.workload import Op, Workload

if TYPE_CHECKING:
    from llm_datadist.bench.workload import Bytes

__all__ = ["Cma", "Memcpy", "MemcpyStreaming", "TcpRaw", "useful_threads"]

_HOST: Final = "127.0.0.1"
_BETWEEN: Final = (Op.PULL, Op.PUSH, Op.LATENCY)
# Below this a thread takes longer to start than it saves.
_THREAD_PAYS_ABOVE: Final = 1 << 20
# Only so that nothing waits for ever: the driver's own bound comes first.
_STREAM_S: Final = 300
_STREAM_BUFFER_BYTES: Final = 4 << 20
_GO: Final = b"g"


def useful_threads(workload: Workload) -> int:
    """Return how many threads make a limit fastest: they are started for every transfer, so few for little."""
    return max(1, min(workload.threads, workload.nbytes // _THREAD_PAYS_ABOVE))


class Memcpy(Side):
    """memcpy of every block inside one process, from and to shared pages where the workload is about pools."""

    label: ClassVar[str] = "memcpy"
    roles: ClassVar[tuple[Role, ...]] = (Role.ALONE,)
    streaming: ClassVar[bool] = False

    @classmethod
    def why_not(cls, workload: Workload) -> str | None:
        """Everything that moves blocks."""
        moves = workload.op in (*_BETWEEN, Op.COPY, Op.SWAP)
        return None if moves else f"copies blocks, not for {workload.op}"

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
        """Copy all blocks."""
        copy_raw(self._dst, self._src, threads=useful_threads(self.workload), streaming=self.streaming)

    def transfer_one(self, index: int) -> None:
        """Copy one block."""
        dst, src = self._steps[index]
        copy_raw(dst, src, threads=1, streaming=self.streaming)


class MemcpyStreaming(Memcpy):
    """The same with the widest streaming (non-temporal) stores of the processor."""

    label: ClassVar[str] = "streaming stores"
    streaming: ClassVar[bool] = True

    @classmethod
    def why_not(cls, workload: Workload) -> str | None:
        """Only where the processor has such stores."""
        return super().why_not(workload) if streaming_bits() else "this processor has no streaming stores"


class Cma(Side):
    """process_vm_readv of another process's private pages, 512 ranges a call; process_vm_writev for a push."""

    label: ClassVar[str] = "process_vm_readv"

    @classmethod
    def why_not(cls, workload: Workload) -> str | None:
        """Between two processes."""
        return None if workload.op in _BETWEEN else f"moves blocks between processes, not for {workload.op}"

    def start(self) -> Facts:
        """Make this end's tensors."""
        self._tensors = private_tensors(self.workload)
        self.own(self._tensors)
        return {"pid": os.getpid(), "bases": [each.ctypes.data for each in self._tensors]}

    def connect(self, facts: Facts) -> Facts:
        """Note where the source's blocks are."""
        if self.role is Role.SOURCE:
            return {}
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
        """Read or write all blocks."""
        threads = useful_threads(self.workload)
        move_process(self._near, self._far, self._pid, threads=threads, write=self._write)

    def transfer_one(self, index: int) -> None:
        """Read one block."""
        near, far = self._steps[index]
        move_process(near, far, self._pid, threads=1)


class TcpRaw(Side):
    """One TCP stream on loopback: as many bytes as the workload's, without a word about blocks, at most 1 MiB a call.

    Source and destination have the workload's memory. What is sent is the first ``blocks`` rows of every tensor, which
    are contiguous, so that the size of a block makes no difference; the rest of the destination must stay untouched.
    """

    label: ClassVar[str] = "raw TCP"

    @classmethod
    def why_not(cls, workload: Workload) -> str | None:
        """One stream of everything, between two processes."""
        return None if workload.op in (Op.PULL, Op.PUSH) else f"streams whole transfers, not for {workload.op}"

    def start(self) -> Facts:
        """Make this end's tensors; the source listens, and answers in a thread of its own."""
        tensors = private_tensors(self.workload)
        self.own(tensors)
        self._front = RawBlocks.of([_halves(each) for each in tensors], np.zeros(1, np.int64))
        self._stream: socket.socket | None = None
        self._stopping = False
        if self.role is Role.DESTINATION:
            return {}
        self._listener = socket.create_server((_HOST, 0))
        self._thread = threading.Thread(target=self._serve, name="bench-stream", daemon=True)
        self._thread.start()
        return {"port": self._listener.getsockname()[1]}

    def connect(self, facts: Facts) -> Facts:
        """Connect to the source."""
        if self.role is Role.SOURCE:
            return {}
        self._stream = socket.socket()
        _prepare(self._stream)
        self._stream.connect((_HOST, facts["port"]))
        return {"transport": "tcp"}

    def transfer(self) -> None:
        """Ask for everything and receive it, or send it and wait until it is there."""
        assert self._stream is not None, "connected"
        self._stream.sendall(_GO)
        sends = self.workload.op is Op.PUSH
        stream_raw(self._stream, self._front, send=sends)
        if sends and self._stream.recv(1) != _GO:
            raise ConnectionError("the other end closed the stream")

    def verify(self, seed: int) -> bool:
        """Compare every byte: the rows that were sent, and those behind them."""
        if self.destination_views:
            work.verify_front(self.destination_views, self.workload, seed)
        return bool(self.destination_views)

    def stop(self) -> None:
        """Close the stream; the source's thread ends with it."""
        if self.role is Role.SOURCE:
            self._stopping = True
            # A mere close would not wake a thread that waits in accept or recv.
            _shut(self._listener)
            if self._stream is not None:
                _shut(self._stream)
            self._thread.join()
            self._listener.close()
        if self._stream is not None:
            self._stream.close()

    def _serve(self) -> None:
        """In the source's thread: one pass for each request, until the stream ends."""
        try:
            self._stream, _ = self._listener.accept()
            _prepare(self._stream)
            # Either this sees the flag or stop() sees the stream.
            while not self._stopping and self._stream.recv(1):
                sends = self.workload.op is Op.PULL
                stream_raw(self._stream, self._front, send=sends)
                if not sends:
                    self._stream.sendall(_GO)
        except OSError:
            return  # the destination, if it still waits for something, sees the end of the stream


def _halves(tensor: Bytes) -> Bytes:
    """Return a tensor as two rows: what is streamed, and the rest."""
    return tensor.reshape(work.SPREAD, -1)


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
