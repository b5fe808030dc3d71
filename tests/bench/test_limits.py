"""The raw limits: the right bytes at every size and number of threads, and nothing done on bad input."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist._native import _native
from llm_datadist.bench.sides.limits import RawBlocks, copy_raw, move_process, stream_raw, streaming_bits
from llm_datadist.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Tensor = NDArray[np.uint8]

#: Of one block: less than a vector, odd, and more than the 256 bytes of one turn of the streaming loop.
SIZES = [1, 63, 256, 1000, 4096, 70_001]
#: More than the 512 ranges of one call of process_vm_readv.
MANY = 1200

STREAMING = [False, pytest.param(True, marks=pytest.mark.skipif(not streaming_bits(), reason="no such stores here"))]


def tensors(count: int, rows: int, block_bytes: int, seed: int) -> list[Tensor]:
    shape = (count, rows, block_bytes)
    return list(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def numbers(blocks: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(2 * blocks)[:blocks].astype(np.int64)


def expected(dst: list[Tensor], src: list[Tensor], to: NDArray[np.int64], of: NDArray[np.int64]) -> list[Tensor]:
    copies = [each.copy() for each in dst]
    for copy, each in zip(copies, src, strict=True):
        copy[to] = each[of]
    return copies


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize("size", SIZES)
def test_copies_every_byte_and_no_other(size: int, streaming: bool, threads: int) -> None:
    src, dst = tensors(2, 20, size, 1), tensors(2, 20, size, 2)
    to, of = numbers(10, 3), numbers(10, 4)
    wanted = expected(dst, src, to, of)
    copy_raw(RawBlocks.of(dst, to), RawBlocks.of(src, of), threads=threads, streaming=streaming)
    assert np.array_equal(dst, wanted)


@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize("shift", [1, 7, 32, 63])
def test_copies_between_odd_addresses(shift: int, streaming: bool) -> None:
    memory = np.arange(20_000, dtype=np.uint32).view(np.uint8)
    src, dst = memory[shift : shift + 30_000].reshape(3, -1), memory[40_000 + 5 : 70_005].reshape(3, -1)
    before, wanted = memory.copy(), src[[2, 0]].copy()
    copy_raw(
        RawBlocks.of([dst], np.array([0, 2])), RawBlocks.of([src], np.array([2, 0])), threads=2, streaming=streaming
    )
    assert np.array_equal(dst[[0, 2]], wanted)
    dst[[0, 2]] = before[40_005:70_005].reshape(3, -1)[[0, 2]]
    assert np.array_equal(memory, before)


@pytest.mark.parametrize("threads", [2, 64])
def test_more_threads_than_blocks(threads: int) -> None:
    src, dst = tensors(1, 2, 100, 1), tensors(1, 2, 100, 2)
    one = np.array([1])
    wanted = expected(dst, src, one, one)
    copy_raw(RawBlocks.of(dst, one), RawBlocks.of(src, one), threads=threads)
    assert np.array_equal(dst, wanted)


def test_no_blocks_at_all() -> None:
    none = RawBlocks.of(tensors(1, 2, 8, 1), np.zeros(0, np.int64))
    copy_raw(none, none, threads=2)
    move_process(none, none, os.getpid(), threads=2)


def test_where_the_caller_may_run_is_its_own_affair() -> None:
    """Also where the others have ended before anybody could say where they should run."""
    none = RawBlocks(np.zeros(0, np.uint64), 64)
    before = os.sched_getaffinity(0)
    for _ in range(200):
        copy_raw(none, none, threads=8)
        assert os.sched_getaffinity(0) == before


def test_steps_take_one_block_of_every_tensor() -> None:
    src, dst = tensors(3, 4, 64, 1), tensors(3, 4, 64, 2)
    to, of = np.array([3, 0]), np.array([1, 2])
    wanted = expected(dst, src, to[1:], of[1:])
    copy_raw(RawBlocks.of(dst, to).steps(2)[1], RawBlocks.of(src, of).steps(2)[1], threads=1)
    assert np.array_equal(dst, wanted)


CHILD = """
import sys
import numpy as np
memory = np.random.default_rng(7).integers(0, 256, (2, int(sys.argv[1]), int(sys.argv[2])), dtype=np.uint8)
print(*(each.ctypes.data for each in memory), flush=True)
for line in sys.stdin:
    sys.stdout.buffer.write(memory.tobytes())
    sys.stdout.flush()
"""


class Other:
    """Another process with two tensors, which shows its bytes when it is asked."""

    def __init__(self, rows: int, size: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(rows), str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.pid = self._process.pid
        self.bases = [int(each) for each in self._stdout.readline().split()]
        self.shape = (2, rows, size)
        self.filled = list(np.random.default_rng(7).integers(0, 256, self.shape, dtype=np.uint8))

    def blocks(self, rows: NDArray[np.int64]) -> RawBlocks:
        return RawBlocks.elsewhere(self.bases, self.shape[1], self.shape[2], rows)

    def memory(self) -> NDArray[np.uint8]:
        self._stdin.write(b"show\n")
        self._stdin.flush()
        return np.frombuffer(self._stdout.read(int(np.prod(self.shape))), np.uint8).reshape(self.shape)

    def end(self) -> None:
        self._stdin.close()
        self._process.wait(30)
        self._stdout.close()


@pytest.fixture
def other() -> Iterator[Other]:
    process = Other(2 * MANY, 300)
    yield process
    process.end()


@pytest.mark.parametrize("threads", [1, 3])
def test_reads_another_process(other: Other, threads: int) -> None:
    dst = tensors(2, 2 * MANY, 300, 2)
    to, of = numbers(MANY, 3), numbers(MANY, 4)
    wanted = expected(dst, other.filled, to, of)
    move_process(RawBlocks.of(dst, to), other.blocks(of), other.pid, threads=threads)
    assert np.array_equal(dst, wanted)
    assert np.array_equal(other.memory(), other.filled)


@pytest.mark.parametrize("threads", [1, 3])
def test_writes_to_another_process(other: Other, threads: int) -> None:
    src = tensors(2, 2 * MANY, 300, 2)
    of, to = numbers(MANY, 3), numbers(MANY, 4)
    wanted = expected(other.filled, src, to, of)
    move_process(RawBlocks.of(src, of), other.blocks(to), other.pid, threads=threads, write=True)
    assert np.array_equal(other.memory(), wanted)


def test_addresses_that_are_not_mapped_there(other: Other) -> None:
    dst = tensors(1, 4, 300, 2)
    one = np.array([1])
    nowhere = RawBlocks.elsewhere([4096], 4, 300, one)
    with pytest.raises(OSError, match="process_vm_readv"):
        move_process(RawBlocks.of(dst, one), nowhere, other.pid, threads=1)


def test_some_blocks_not_mapped_there(other: Other) -> None:
    """The kernel moves what comes before and says so only by the number of bytes."""
    dst = tensors(2, 4, 300, 2)
    one = np.array([1])
    far = other.blocks(one)
    far.addresses[1] = 4096
    with pytest.raises(OSError, match="process_vm_readv"):
        move_process(RawBlocks.of(dst, one), far, other.pid, threads=1)


def test_a_process_that_is_gone(other: Other) -> None:
    dst = tensors(2, 4, 300, 2)
    one = np.array([1])
    far = other.blocks(one)
    other.end()
    with pytest.raises(ProcessLookupError):
        move_process(RawBlocks.of(dst, one), far, other.pid, threads=1)


def in_thread(connection: socket.socket, blocks: RawBlocks) -> threading.Thread:
    sender = threading.Thread(target=stream_raw, args=(connection, blocks), kwargs={"send": True})
    sender.start()
    return sender


def test_streams_every_byte_and_no_other() -> None:
    """More than one write of 1 MiB, and two tensors."""
    src, dst = tensors(2, 3, 1_500_000, 1), tensors(2, 3, 1_500_000, 2)
    to, of = np.array([1]), np.array([2])
    wanted = expected(dst, src, to, of)
    near, far = socket.socketpair()
    with near, far:
        sender = in_thread(far, RawBlocks.of(src, of))
        stream_raw(near, RawBlocks.of(dst, to), send=False)
        sender.join(30)
        assert not sender.is_alive()
    assert np.array_equal(dst, wanted)


def test_a_stream_that_ends_early() -> None:
    near, far = socket.socketpair()
    blocks = RawBlocks.of(tensors(1, 2, 1000, 1), np.array([0]))
    with near:
        with far:
            far.sendall(b"x" * 999)
        with pytest.raises(ConnectionResetError):
            stream_raw(near, blocks, send=False)
        with pytest.raises(BrokenPipeError):
            stream_raw(near, blocks, send=True)


def blocks_of(count: int = 2, size: int = 64) -> RawBlocks:
    return RawBlocks.of(tensors(1, 4, size, 1), np.arange(count))


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_refuses_such_numbers_of_threads(threads: int) -> None:
    with pytest.raises(ParamError, match=rf"threads is {threads}: must be in \[1, 1024\]"):
        copy_raw(blocks_of(), blocks_of(), threads=threads)
    with pytest.raises(ParamError, match=rf"threads is {threads}: must be in \[1, 1024\]"):
        move_process(blocks_of(), blocks_of(), os.getpid(), threads=threads)


def test_refuses_unequal_ends() -> None:
    with pytest.raises(ParamError, match="dst has 2 blocks and src 3"):
        copy_raw(blocks_of(2), blocks_of(3), threads=1)
    with pytest.raises(ParamError, match="dst has blocks of 64 bytes, src of 65"):
        copy_raw(blocks_of(2), blocks_of(2, 65), threads=1)


def test_refuses_memory_that_may_not_be_written() -> None:
    frozen = tensors(1, 4, 64, 1)
    frozen[0].flags.writeable = False
    dst = RawBlocks.of(frozen, np.arange(2))
    with pytest.raises(ParamError, match="dst is read-only"):
        copy_raw(dst, blocks_of(), threads=1)
    with pytest.raises(ParamError, match="near is read-only"):
        move_process(dst, blocks_of(), os.getpid(), threads=1)


@pytest.mark.parametrize("number", [-1, 4])
def test_refuses_blocks_outside_the_tensor(number: int) -> None:
    with pytest.raises(ParamError, match=r"must be in \[0, 4\)"):
        RawBlocks.of(tensors(1, 4, 64, 1), np.array([0, number]))
    with pytest.raises(ParamError, match=r"must be in \[0, 4\)"):
        RawBlocks.elsewhere([1 << 20], 4, 64, np.array([0, number]))


def test_refuses_tensors_of_another_shape_or_layout() -> None:
    good = tensors(1, 4, 64, 1)[0]
    bad: list[Any] = [good.T, good[:, ::2], good.view(np.int64), good.reshape(-1)]
    for each in bad:
        with pytest.raises(ParamError, match="must be C-contiguous uint8"):
            RawBlocks.of([each], np.array([0]))
    with pytest.raises(ParamError, match="all of one shape"):
        RawBlocks.of([good, good[:2]], np.array([0]))
    with pytest.raises(ParamError, match="tensors is empty"):
        RawBlocks.of([], np.array([0]))


def test_the_native_part_refuses_by_itself() -> None:
    good, null = np.array([1 << 20], np.uint64), np.zeros(1, np.uint64)
    with pytest.raises(ParamError, match="address 0 is 0"):
        _native.limit_memcpy(good, null, 8, 1, False)
    for size in (0, -1, (1 << 30) + 1):
        with pytest.raises(ParamError, match=f"block_bytes is {size}"):
            _native.limit_process(os.getpid(), False, good, good, size, 1)
    with pytest.raises(ParamError, match="block_bytes is 0"):
        _native.limit_stream(0, True, good, 0)


def test_refuses_a_stream_with_a_timeout() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(1.0)
        with pytest.raises(ParamError, match="must be blocking"):
            stream_raw(near, blocks_of(), send=True)
