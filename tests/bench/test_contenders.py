"""Limits and peers as contenders of the bench: all bytes verified, or a reason given before anything starts.

First the bytes: whatever is wrong with a destination is found. Then the raw limits: the right bytes at every size and
number of threads.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_void_p
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from llm_datadist.tools.bench import ContenderFailed, WrongBytes, cuda
from llm_datadist.tools.bench.contenders import LIMITS, PEERS, why_not, why_not_importable
from llm_datadist.tools.bench.contenders.base import Role
from llm_datadist.tools.bench.contenders.limits import (
    RawBlocks,
    TcpRaw,
    TcpRawEncrypted,
    Wait,
    copy_raw,
    move_process,
    stream_raw,
    streaming_bits,
    useful_threads,
)
from llm_datadist.tools.bench.processes import RunningContender
from llm_datadist.tools.bench.workload import (
    BESIDE_GPU,
    POISON,
    BenchMemory,
    BenchWorkload,
    Bytes,
    Op,
    fill,
    poison,
    verify,
)
from tests.support import fakecuda
from tests.support.source import PATHS
from tests.unit.holder import Holder

_TIMEOUT_S: Final = 60.0
_BETWEEN: Final = {Op.PULL, Op.PUSH, Op.LATENCY}
_INSIDE: Final = {Op.COPY, Op.SWAP}

#: What each contender is for; everything else it must refuse.
OPS: Final = {
    "memcpy": _BETWEEN | _INSIDE,
    "memcpy-nt": _BETWEEN | _INSIDE,
    "cma": _BETWEEN,
    "tcp-raw": _BETWEEN,
    "tcp-raw-encrypted": _BETWEEN,
    "nixl": _BETWEEN,
    "nixl-prepared": _BETWEEN,
    "nixl-tcp": _BETWEEN,
    "nixl-tcp-prepared": _BETWEEN,
    "mooncake": _BETWEEN,
    "torch": _INSIDE,
    **{f"cuda-{name}": {*BESIDE_GPU, Op.SWAP, Op.PULL, Op.PUSH} for name in ("copy", "loop", "batch")},
    "nixl-gpu": _BETWEEN,
    "torch-gpu": {*BESIDE_GPU, Op.SWAP},
}
#: Those for memory of a GPU; the fake driver is enough for the first three.
ON_GPU: Final = {"cuda-copy", "cuda-loop", "cuda-batch", "nixl-gpu", "torch-gpu"}
#: What must be importable for it.
MODULES: Final = {"mooncake": "mooncake.engine", "torch": "torch", "torch-gpu": "torch"} | dict.fromkeys(
    [name for name in PEERS if name.startswith("nixl")], "nixl"
)
#: Of one block: less than a vector, odd (so that blocks lie at odd addresses), and more than the 256 bytes of one turn
#: of the streaming loop.
SIZES: Final = [1, 63, 256, 1000, 4096, 70_001]
#: More than the 512 ranges of one call of process_vm_readv.
MANY: Final = 1200
STREAMING = [False, pytest.param(True, marks=pytest.mark.skipif(not streaming_bits(), reason="no such stores here"))]


# --- bytes ------------------------------------------------------------------------------------------------------------
def blocks_to_pull(block_bytes: int, blocks: int, tensors: int = 2) -> BenchWorkload:
    return BenchWorkload(op=Op.PULL, block_bytes=block_bytes, blocks=blocks, tensors=tensors)


def tensors(work: BenchWorkload) -> list[Bytes]:
    return [np.zeros((work.rows, work.block_bytes), np.uint8) for _ in range(work.tensors)]


def ends(work: BenchWorkload, seed: int = 1) -> tuple[list[Bytes], list[Bytes]]:
    """Return a filled source and a poisoned destination."""
    source, destination = tensors(work), tensors(work)
    fill(source, seed)
    poison(destination)
    return source, destination


def moved(work: BenchWorkload, seed: int, *, in_place: bool = False) -> list[Bytes]:
    source, destination = ends(work, seed)
    if in_place:
        destination = source
        poison(source, in_place=True)
    for there, here in zip(source, destination, strict=True):
        here[work.dst_blocks] = there[work.src_blocks]
    return destination


def test_blocks_are_random_not_adjacent_and_the_same_for_every_side() -> None:
    work = blocks_to_pull(8, 1000, 1)
    src, dst = work.src_blocks, work.dst_blocks
    assert src.dtype == dst.dtype == np.int64
    assert sorted(src) == list(range(0, 2000, 2))
    assert sorted(dst) == list(range(1, 2000, 2))
    assert (np.abs(np.diff(src)) > 2).mean() > 0.9
    assert np.array_equal(src, work.src_blocks)
    assert not np.array_equal(src + 1, dst)


def test_every_block_has_bytes_of_its_own_each_seed_others_and_poison_is_where_something_is_to_come() -> None:
    work = blocks_to_pull(24, 6)
    views, second = ends(work)
    assert all((view == POISON).all() for view in second)
    fill(second, 2)
    rows = {bytes(row) for view in (*views, *second) for row in view}
    assert len(rows) == 2 * work.tensors * work.rows
    kept = [view.copy() for view in views]
    poison(views, in_place=True)
    for view, old in zip(views, kept, strict=True):
        assert (view[1::2] == POISON).all()
        assert np.array_equal(view[::2], old[::2])


@pytest.mark.parametrize("block_bytes", [24, 7])
@pytest.mark.parametrize("in_place", [False, True])
def test_every_single_wrong_byte_is_found(block_bytes: int, in_place: bool) -> None:
    work = blocks_to_pull(block_bytes, 6)
    views = moved(work, 3, in_place=in_place)
    for (tensor, view), row, byte in product(enumerate(views), range(work.rows), range(work.block_bytes)):
        view[row, byte] ^= 0x10
        where = "inside" if row % 2 else "outside"
        with pytest.raises(WrongBytes, match=rf"{where} .* 1 or more of tensor {tensor}, first in block {row}$"):
            verify(views, work, 3, in_place=in_place)
        view[row, byte] ^= 0x10
    verify(views, work, 3, in_place=in_place)
    with pytest.raises(WrongBytes):  # the bytes of another pass
        verify(views, work, 4, in_place=in_place)


def test_blocks_larger_than_a_part_are_compared_whole() -> None:
    work = blocks_to_pull((1 << 20) + 8, 2, 1)
    views = moved(work, 1)
    verify(views, work, 1)
    views[0][work.dst_blocks[1], -1] ^= 1
    with pytest.raises(WrongBytes, match=f"first in block {work.dst_blocks[1]}"):
        verify(views, work, 1)


# --- raw limits -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize("size", SIZES)
def test_copies_every_byte_and_no_other(size: int, streaming: bool, threads: int) -> None:
    work = blocks_to_pull(size, 10)
    src, dst = ends(work)
    to, of = RawBlocks.of(dst, work.dst_blocks), RawBlocks.of(src, work.src_blocks)
    copy_raw(to, of, threads=threads, streaming=streaming)
    verify(dst, work, 1)
    for each in dst:
        each[work.dst_blocks[1:3]] ^= 0xFF
    copy_raw(to.steps(10)[1], of.steps(10)[1], threads=1)  # one step: one block of every tensor
    for each in dst:
        each[work.dst_blocks[2]] ^= 0xFF
    verify(dst, work, 1)


def test_where_the_caller_may_run_is_its_own_affair() -> None:
    """Also where the other threads have ended before they could be told where to run: there are no blocks at all.

    Regression: a limit set the CPUs of a thread that had ended, and so those of its own process.
    """
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


def blocks_of_other(other: Holder, work: BenchWorkload, numbers: Any) -> RawBlocks:
    """Return blocks of two tensors, one behind the other."""
    return RawBlocks.at([other.address, other.address + work.tensor_bytes], work.block_bytes, numbers)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("write", [False, True])
def test_reads_and_writes_another_process(other: Holder, threads: int, write: bool) -> None:
    work = blocks_to_pull(300, MANY)
    src, dst = ends(work)
    here, there = (src, dst) if write else (dst, src)
    near, far = (work.src_blocks, work.dst_blocks) if write else (work.dst_blocks, work.src_blocks)
    was = np.concatenate(there).reshape(-1)
    other.fill(was)
    move_process(RawBlocks.of(here, near), blocks_of_other(other, work, far), other.pid, threads=threads, write=write)
    now = other.show(2 * work.tensor_bytes)
    if write:
        verify(list(now.reshape(2, work.rows, 300)), work, 1)
    else:
        assert np.array_equal(now, was)
        verify(here, work, 1)


@pytest.mark.parametrize("wait", Wait)
def test_streams_every_byte_and_no_other_and_says_when_the_stream_ends_early(wait: Wait) -> None:
    """More than one write of 1 MiB, and two tensors."""
    work = blocks_to_pull(1_500_000, 1)
    src, dst = ends(work)
    to, of = RawBlocks.of(dst, work.dst_blocks), RawBlocks.of(src, work.src_blocks)
    near, far = socket.socketpair()
    with near:
        with far:
            sender = threading.Thread(target=stream_raw, args=(far, of), kwargs={"send": True})
            sender.start()
            stream_raw(near, to, send=False, wait=wait)
            sender.join(30)
            assert not sender.is_alive()
            verify(dst, work, 1)
            far.sendall(b"x" * 999)
        with pytest.raises(ConnectionResetError):
            stream_raw(near, to, send=False, wait=wait)
        with pytest.raises(BrokenPipeError):
            stream_raw(near, to, send=True)


def bytes_sent(blocks: RawBlocks, **encrypted: Any) -> bytes:
    """Return what a small stream sends."""
    near, far = socket.socketpair()
    with near:
        with far:
            stream_raw(far, blocks, send=True, **encrypted)
        return b"".join(iter(lambda: near.recv(1 << 16), b""))


@pytest.mark.parametrize("wait", Wait)
def test_an_encrypted_stream_moves_every_byte_and_no_other_under_new_nonces(wait: Wait) -> None:
    """More records than one step has, the last of each tensor shorter."""
    work = blocks_to_pull(700_001, 1)
    src, dst = ends(work)
    to, of = RawBlocks.of(dst, work.dst_blocks), RawBlocks.of(src, work.src_blocks)
    key, next_record = bytes(range(32)), 5 + 2 * 11
    near, far = socket.socketpair()
    with near, far, ThreadPoolExecutor(1) as sender:
        sent = sender.submit(stream_raw, far, of, send=True, key=key, first=5)
        assert stream_raw(near, to, send=False, key=key, first=5, wait=wait) == next_record
        assert sent.result(30) == next_record
    verify(dst, work, 1)
    block = RawBlocks(of.addresses[:1], 1000)
    plain = bytes(src[0][work.src_blocks[0], :1000])
    assert bytes_sent(block) == plain
    first, second = (bytes_sent(block, key=key, first=number) for number in (5, 6))
    assert len(first) == len(second) == 1000 + 16
    assert sum(one == other for one, other in zip(first, plain, strict=False)) < 100
    assert sum(one == other for one, other in zip(first, second, strict=True)) < 100


def changed(wire: bytes, at: int) -> bytes:
    return wire[:at] + bytes([wire[at] ^ 1]) + wire[at + 1 :]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda wire: changed(wire, 0), RuntimeError),
        (lambda wire: changed(wire, 1015), RuntimeError),
        (lambda wire: changed(wire, 1016 + 999), RuntimeError),
        (lambda wire: changed(wire, 3 * 1016 - 1), RuntimeError),
        (lambda wire: wire[1016:2032] + wire[:1016] + wire[2032:], RuntimeError),
        (lambda wire: wire[:1016] + wire[:1016] + wire[2032:], RuntimeError),
        (lambda wire: wire[1:] + wire[:1], RuntimeError),
        (lambda wire: wire[:-1], ConnectionResetError),
        (bytes, None),
    ],
    ids=[
        "first byte",
        "first tag",
        "last byte of the second",
        "last tag",
        "swapped",
        "repeated",
        "moved",
        "cut",
        "as sent",
    ],
)
@pytest.mark.parametrize("other", [{}, {"key": bytes(32)}, {"first": 8}], ids=["", "other key", "other number"])
def test_an_encrypted_stream_that_is_not_as_the_peer_sent_it_is_an_error(
    change: Callable[[bytes], bytes], error: type[Exception] | None, other: dict[str, Any]
) -> None:
    """Three records of 1000 bytes, each with its tag."""
    src, dst = np.arange(3000, dtype=np.uint8).reshape(3, 1000), np.zeros((3, 1000), np.uint8)
    to, of = (RawBlocks.of([each], np.arange(3)) for each in (dst, src))
    encrypted: dict[str, Any] = {"key": bytes(range(32)), "first": 7}
    near, far = socket.socketpair()
    with near:
        with far:
            far.sendall(change(bytes_sent(of, **encrypted)))
        if error is None and not other:
            assert stream_raw(near, to, send=False, **encrypted) == 10
            assert np.array_equal(dst, src)
        else:
            text = None if error is ConnectionResetError else "not as the peer sent it"
            with pytest.raises(error or RuntimeError, match=text):
                stream_raw(near, to, send=False, **encrypted | other)


# --- contenders -------------------------------------------------------------------------------------------------------
def work(op: Op, block_bytes: int = 5000, memory: BenchMemory = BenchMemory.POOL) -> BenchWorkload:
    return BenchWorkload(op=op, block_bytes=block_bytes, blocks=70, tensors=3, memory=memory, threads=2)


def expects_reason(contender: str) -> bool:
    if contender in MODULES:
        command = [sys.executable, "-c", f"import {MODULES[contender]}"]
        return subprocess.run(command, capture_output=True, check=False).returncode != 0
    return contender == "memcpy-nt" and not streaming_bits()


def passes(contender: str, workload: BenchWorkload) -> None:
    """Two passes with bytes of their own, so that those of the first do not do for the second."""
    with RunningContender(contender, _TIMEOUT_S) as running:
        running.start(workload)
        for seed in (1, 2):
            running.prepare(seed)
            running.run(*(("sample", workload.blocks) if workload.op is Op.LATENCY else ("timed", 2)))
            running.verify(seed)


@pytest.mark.parametrize("contender", OPS)
def test_moves_the_right_bytes_or_says_why_not_and_refuses_other_ops(
    contender: str, request: pytest.FixtureRequest
) -> None:
    """Also blocks of a byte, in either memory, and more than one write of 1 MiB."""
    assert set(OPS) == {*LIMITS, *PEERS}
    if contender in ON_GPU:
        request.getfixturevalue("fake")
    absent, memory = expects_reason(contender), BenchMemory.GPU if contender in ON_GPU else BenchMemory.POOL
    for op in Op:
        reason = why_not(contender, work(op, memory=memory))
        assert (reason is not None) == (absent or op not in OPS[contender]), reason
        if op in OPS[contender] and not contender.startswith("tcp-raw"):
            other = BenchMemory.POOL if contender in ON_GPU else BenchMemory.GPU
            assert f"not for {other}" in (why_not(contender, work(op, memory=other)) or "")
        if reason is None and contender in ON_GPU:
            if contender not in MODULES:  # those need a GPU
                passes(contender, work(op, 4096 if op is Op.D2D else 333, memory))
        elif reason is None:
            passes(contender, work(op, 33_333 if op is Op.PULL else 5000))
            if op is Op.PULL and contender in ("memcpy", "cma", "tcp-raw", "tcp-raw-encrypted"):
                passes(contender, work(op, 1, BenchMemory.REGISTERED))
        else:
            assert absent or op in reason


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake driver, here and in workers."""
    try:
        fakecuda.load()
    except fakecuda.Unsupported as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PYTHONPATH", PATHS["PYTHONPATH"], prepend=os.pathsep)
    for name, value in fakecuda.environment(delay_us=100).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("fake")
def test_the_bytes_of_the_gpu_are_compared_and_a_driver_without_a_function_is_a_reason() -> None:
    for op in (Op.D2D, Op.H2D, Op.D2H):
        with pytest.raises(ContenderFailed, match="wrong bytes among the first blocks"):
            passes("tests.bench.broken:MovesNothingOnAGpu", work(op, memory=BenchMemory.GPU))
    assert cuda.why_not("cuInit", "cuFly") == "the driver has no cuFly"
    with pytest.raises(RuntimeError, match="cuStreamSynchronize: CUDA_ERROR_INVALID_HANDLE"):
        cuda.call("cuStreamSynchronize", c_void_p(8))


def test_a_stream_that_writes_beyond_its_rows_is_found() -> None:
    alone = TcpRaw(Role.SOURCE, work(Op.PULL))
    alone.start()
    alone.stop()  # also where no destination has come
    contender = TcpRaw(Role.DESTINATION, work(Op.PULL))
    contender.start()
    contender.poison()
    rows = contender.workload.blocks
    source = TcpRaw(Role.SOURCE, contender.workload)
    source.own([np.empty_like(each) for each in contender.destination_views])
    source.fill(3)
    for view, wanted in zip(contender.destination_views, source.source_views, strict=True):
        view[:rows] = wanted[:rows]
    assert contender.verify(3)
    last = contender.destination_views[-1]
    for row, text in ((rows, "behind the first"), (2 * rows - 1, "behind the first"), (rows - 1, "among the first")):
        kept, last[row, -1] = last[row, -1], last[row, -1] ^ 1
        with pytest.raises(Exception, match=text):
            contender.verify(3)
        last[row, -1] = kept


@pytest.mark.parametrize(
    ("op", "error", "text"),
    [(Op.PULL, RuntimeError, "not as the peer sent it"), (Op.PUSH, ConnectionError, None)],
    ids=[Op.PULL, Op.PUSH],
)
def test_encrypted_streams_have_own_keys_and_new_nonces_and_another_key_is_an_error(
    op: Op, error: type[Exception], text: str | None
) -> None:
    """Also where the source finds the wrong tag, and the destination waits for it."""
    source, right, wrong = (
        TcpRawEncrypted(role, work(op)) for role in (Role.SOURCE, Role.DESTINATION, Role.DESTINATION)
    )
    facts = source.start()
    assert len({*facts["keys"]}) == 4
    right.start()
    right.connect(facts)
    used = [list(source.records)]
    for _ in range(2):
        right.transfer()
        used.append(list(right.records))
    assert used[0][0] < used[1][0] < used[2][0]
    right.stop()
    source.stop()
    assert source.records == right.records
    facts = source.start()
    wrong.start()
    with pytest.raises(error, match=text):
        wrong.connect(facts | {"keys": [bytes(32).hex()] * 4})
    wrong.stop()
    source.stop()
    assert not any(each.name.startswith("bench-stream") for each in threading.enumerate())


def test_a_lost_source_is_told() -> None:
    workload = work(Op.PULL)
    with RunningContender("tcp-raw", _TIMEOUT_S) as running:
        running.start(workload)
        running.prepare(1)
        running.run("timed", 1)
        source, destination = running.processes
        os.kill(source.pid, signal.SIGKILL)
        with pytest.raises(ContenderFailed, match=r"tcp-raw \(destination\): timed: (ConnectionReset|BrokenPipe)Error"):
            running.ask(destination, "timed", count=1)


def test_threads_only_where_they_pay() -> None:
    def threads(nbytes: int) -> int:
        return useful_threads(BenchWorkload(op=Op.PULL, block_bytes=nbytes, blocks=1, threads=4))

    assert [threads(each << 20) for each in (1, 2, 3, 4, 500)] == [1, 2, 3, 4, 4]
    assert threads(4096) == 1


def test_why_a_peer_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_importable("json", "json") is None
    assert why_not_importable("no_such_module_here", "some==1") == "not installed (pip install some==1)"
    (tmp_path / "broken_peer_module.py").write_text("raise ImportError('libsomething.so.1: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "libsomething.so.1: cannot open" in (why_not_importable("broken_peer_module", "x") or "")
