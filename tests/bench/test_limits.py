"""The raw limits: the right bytes at every size and number of threads, and nothing done on bad input."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist._native import _native
from llm_datadist.bench.sides.limits import RawBlocks, Wait, copy_raw, move_process, stream_raw, streaming_bits
from llm_datadist.errors import ParamError
from tests.support.moves import wait_until
from tests.unit.holder import Holder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    Tensor = NDArray[np.uint8]

#: Of one block: less than a vector, odd (so that blocks lie at odd addresses), and more than the 256 bytes of one turn
#: of the streaming loop.
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


@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize("size", SIZES)
def test_copies_every_byte_and_no_other(size: int, streaming: bool, threads: int) -> None:
    src, dst = tensors(2, 20, size, 1), tensors(2, 20, size, 2)
    to, of = numbers(10, 3), numbers(10, 4)
    wanted = expected(dst, src, to, of)
    copy_raw(RawBlocks.of(dst, to), RawBlocks.of(src, of), threads=threads, streaming=streaming)
    assert np.array_equal(dst, wanted)
    wanted = expected(dst, src, to[1:2], of[3:4])  # one step: one block of every tensor
    for each in (dst[0], dst[1]):
        each[to[1]] ^= 0xFF
    copy_raw(RawBlocks.of(dst, to).steps(10)[1], RawBlocks.of(src, of[[0, 3]]).steps(2)[1], threads=1)
    assert np.array_equal(dst, wanted)


def test_where_the_caller_may_run_is_its_own_affair() -> None:
    """Also where the other threads have ended before they could be told where to run: there are no blocks at all."""
    none = RawBlocks(np.zeros(0, np.uint64), 64)
    move_process(none, none, os.getpid(), threads=2)
    before = os.sched_getaffinity(0)
    for _ in range(200):
        copy_raw(none, none, threads=8)
        assert os.sched_getaffinity(0) == before


@pytest.fixture
def other() -> Iterator[Holder]:
    process = Holder()
    yield process
    process.close()


def blocks_of_other(other: Holder, rows: int, numbers: NDArray[np.int64]) -> RawBlocks:
    """Return blocks of 300 bytes of two tensors, one behind the other."""
    return RawBlocks.elsewhere([other.address, other.address + rows * 300], rows, 300, numbers)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("write", [False, True])
def test_reads_and_writes_another_process(other: Holder, threads: int, write: bool) -> None:
    here, there = tensors(2, 2 * MANY, 300, 2), tensors(2, 2 * MANY, 300, 7)
    other.fill(np.concatenate(there).reshape(-1))
    to, of = numbers(MANY, 3), numbers(MANY, 4)
    wanted = expected(there, here, to, of) if write else expected(here, there, to, of)
    near, far = (of, to) if write else (to, of)
    move_process(
        RawBlocks.of(here, near), blocks_of_other(other, 2 * MANY, far), other.pid, threads=threads, write=write
    )
    assert np.array_equal(other.show(4 * MANY * 300), np.concatenate(wanted if write else there).reshape(-1))
    if not write:
        assert np.array_equal(here, wanted)


def test_what_is_not_mapped_there_and_a_process_that_is_gone(other: Holder) -> None:
    near = RawBlocks.of(tensors(2, 4, 300, 2), np.array([1]))
    for unmapped in ([0, 1], [1]):  # of the second the kernel moves a part, and says so only by the number of bytes
        far = blocks_of_other(other, 4, np.array([1]))
        far.addresses[unmapped] = 4096
        with pytest.raises(OSError, match="process_vm_readv"):
            move_process(near, far, other.pid, threads=1)
    other.close()
    with pytest.raises(ProcessLookupError):
        move_process(near, far, other.pid, threads=1)


@pytest.mark.parametrize("wait", Wait)
def test_streams_every_byte_and_no_other_and_says_when_the_stream_ends_early(wait: Wait) -> None:
    """More than one write of 1 MiB, and two tensors."""
    src, dst = tensors(2, 3, 1_500_000, 1), tensors(2, 3, 1_500_000, 2)
    to, of = np.array([1]), np.array([2])
    wanted = expected(dst, src, to, of)
    near, far = socket.socketpair()
    with near:
        with far:
            sender = threading.Thread(target=stream_raw, args=(far, RawBlocks.of(src, of)), kwargs={"send": True})
            sender.start()
            stream_raw(near, RawBlocks.of(dst, to), send=False, wait=wait)
            sender.join(30)
            assert not sender.is_alive()
            assert np.array_equal(dst, wanted)
            far.sendall(b"x" * 999)
        with pytest.raises(ConnectionResetError):
            stream_raw(near, RawBlocks.of(dst, to), send=False, wait=wait)
        with pytest.raises(BrokenPipeError):
            stream_raw(near, RawBlocks.of(dst, to), send=True)


def test_a_part_of_the_last_bytes_is_no_reason_to_wait_for_ever() -> None:
    src, dst, more = tensors(1, 1, 300_000, 1), tensors(1, 1, 300_000, 2), tensors(2, 1, 8 << 20, 3)
    zero = np.array([0])
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as near:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        with far:
            sender = threading.Thread(target=far.sendall, args=(more[0],))
            sender.start()
            stream_raw(near, RawBlocks.of(more[1:], zero), send=False)  # opens the window
            sender.join()
            far.sendall(src[0][0, :280_000].tobytes())
            wait_until(lambda: queued(near) == 280_000)
            receive = {"send": False, "wait": Wait.LOW_WATER}
            receiver = threading.Thread(target=stream_raw, args=(near, RawBlocks.of(dst, zero)), kwargs=receive)
            receiver.start()
            wait_until(lambda: queued(near) == 0)
            far.sendall(src[0][0, 280_000:290_000].tobytes())
            wait_until(lambda: queued(near) == 10_000)  # fewer than are left: left there
            far.sendall(src[0][0, 290_000:].tobytes())
            receiver.join(10)
            late = receiver.is_alive()
        receiver.join()  # the end of the stream wakes it
        assert not late
        assert np.array_equal(dst, src)


def queued(sock: socket.socket) -> int:
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))[0])


def blocks_of(count: int = 2, size: int = 64, *, writable: bool = True) -> RawBlocks:
    memory = tensors(1, 4, size, 1)
    memory[0].flags.writeable = writable
    return RawBlocks.of(memory, np.arange(count))


def over(*memory: Any, rows: tuple[int, ...] = (0,)) -> RawBlocks:
    return RawBlocks.of(list(memory), np.array(rows))


def stream_with_a_timeout() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(1.0)
        stream_raw(near, blocks_of(), send=True)


ONE, NULL, ME = np.array([1 << 20], np.uint64), np.zeros(1, np.uint64), os.getpid()
GOOD = tensors(1, 4, 64, 1)[0]
CONTIGUOUS, NUMBERS, THREADS = "must be C-contiguous uint8", r"must be in \[0, 4\)", r"must be in \[1, 1024\]"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: copy_raw(blocks_of(), blocks_of(), threads=0), f"threads is 0: {THREADS}"),
        (lambda: copy_raw(blocks_of(), blocks_of(), threads=1025), f"threads is 1025: {THREADS}"),
        (lambda: move_process(blocks_of(), blocks_of(), ME, threads=-1), f"threads is -1: {THREADS}"),
        (lambda: copy_raw(blocks_of(2), blocks_of(3), threads=1), "dst has 2 blocks and src 3"),
        (lambda: copy_raw(blocks_of(), blocks_of(2, 65), threads=1), "dst has blocks of 64 bytes, src of 65"),
        (lambda: move_process(blocks_of(), blocks_of(2, 65), ME, threads=1), "dst has blocks of 64 bytes, src of 65"),
        (lambda: copy_raw(blocks_of(writable=False), blocks_of(), threads=1), "dst is read-only"),
        (lambda: move_process(blocks_of(writable=False), blocks_of(), ME, threads=1), "near is read-only"),
        (lambda: over(GOOD, rows=(0, -1)), NUMBERS),
        (lambda: RawBlocks.elsewhere([1 << 20], 4, 64, np.array([0, 4])), NUMBERS),
        (lambda: over(GOOD.T), CONTIGUOUS),
        (lambda: over(GOOD[:, ::2]), CONTIGUOUS),
        (lambda: over(GOOD.view(np.int64)), CONTIGUOUS),
        (lambda: over(GOOD.reshape(-1)), CONTIGUOUS),
        (lambda: over(GOOD, GOOD[:2]), "all of one shape"),
        (over, "tensors is empty"),
        (stream_with_a_timeout, "must be blocking"),
        (lambda: _native.limit_memcpy(ONE, NULL, 8, 1, False), "address 0 is 0"),
        (lambda: _native.limit_process(ME, False, ONE, ONE, 0, 1), "block_bytes is 0"),
        (lambda: _native.limit_process(ME, False, ONE, ONE, (1 << 30) + 1, 1), "block_bytes is 1073741825"),
        (lambda: _native.limit_stream(0, True, ONE, 0, 0), "block_bytes is 0"),
        (lambda: _native.limit_stream(0, True, ONE, 8, 3), r"wait is 3: must be in \[0, 2\]"),
    ],
)
def test_what_it_refuses(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ParamError, match=said):
        call()
