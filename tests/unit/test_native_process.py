"""The executor between two processes: every byte of both, as their owners see them, and each refusal of the kernel."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from mmap import PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._native import (
    NO_DEADLINE,
    Canary,
    CopyPool,
    Plan,
    ProcessMemory,
    Tensors,
    parse_indices,
    peek_process,
    plan_blocks,
    plan_row,
)
from llm_datadist.errors import ParamError
from tests.support import twin

from .holder import COOKIE, Holder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

MIB = 1 << 20
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def holder() -> Iterator[Holder]:
    with closing(Holder()) as shared:
        yield shared


@pytest.fixture(scope="module")
def pool() -> Iterator[CopyPool]:
    shared = CopyPool(3)
    yield shared
    shared.close()


def split(memory: twin.Bytes, extent: int) -> list[twin.Bytes]:
    return list(memory.reshape(-1, extent))


def check(holder: Holder, plan: Plan, tensors: int, extent: int, pool: CopyPool | None) -> None:
    """Read and write the plan here and in the twin; every byte of both processes must come out the same."""
    for write in (False, True):
        ours, theirs = twin.noise(1, 2, tensors * extent)
        holder.fill(theirs)
        want_ours, want_theirs = ours.copy(), theirs.copy()
        ends = (want_theirs, want_ours) if write else (want_ours, want_theirs)
        twin.execute(plan, *(split(end, extent) for end in ends))
        local, remote = twin.tensors_of(split(ours, extent)), holder.tensors(tensors, extent)
        memory = ProcessMemory(holder.pid, holder.pidfd, holder.cookie_address, COOKIE, holder.canaries)
        assert move(memory, plan, local, remote, pool, write=write) == plan.nbytes
        assert np.array_equal(ours, want_ours)
        assert np.array_equal(holder.show(theirs.size), want_theirs)


def move(
    memory: ProcessMemory,
    plan: Plan,
    local: Tensors,
    remote: Tensors,
    pool: CopyPool | None = None,
    *,
    write: bool,
    deadline_ns: int = NO_DEADLINE,
) -> int:
    return (memory.write if write else memory.read)(plan, local.native, remote.native, pool, deadline_ns)


def read(
    holder: Holder,
    plan: Plan,
    into: twin.Bytes,
    at: int,
    pool: CopyPool | None = None,
    *,
    pid: int | None = None,
    deadline_ns: int = NO_DEADLINE,
    write: bool = False,
) -> int:
    """Read into one local tensor from the one at an address of the holder; or write it."""
    local = Tensors(np.array([into.ctypes.data], np.uint64), into.size)
    remote = Tensors(np.array([at], np.uint64), into.size)
    memory = ProcessMemory(holder.pid if pid is None else pid)
    return move(memory, plan, local, remote, pool, write=write, deadline_ns=deadline_ns)


# Bytes

BLOCKS = 16
BLOCK = 24
PAIRS = st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)), max_size=30)


@given(PAIRS, st.integers(0, 2), st.integers(0, 2), st.integers(0, 3))
def test_blocks_between_two_processes(
    holder: Holder, pairs: list[tuple[int, int]], dst_first: int, src_first: int, count: int
) -> None:
    """Blocks that occur twice among them: such plans are ordered."""
    dst, src = (parse_indices("blocks", [pair[end] for pair in pairs]) for end in (0, 1))
    runs, ordered = twin.parts_of(
        plan_blocks(dst, src, block_bytes=BLOCK, dst_count=BLOCKS, src_count=BLOCKS, alias=False)
    )
    plan = twin.make_plan(runs, ordered=ordered, dst_first=dst_first, src_first=src_first, count=count)
    check(holder, plan, 5, BLOCKS * BLOCK, None)


@pytest.mark.parametrize(
    ("lengths", "count"),
    [
        ([9 * MIB + 11], 2),  # one run, many chunks
        ([512] * 3000, 3),  # more ranges than a call takes, in one chunk
        ([4096] * 1024, 1),  # exactly as many as a call takes
        ([5000, 1, 0, 7 * MIB + 1, 3, 63, 64, 65, 4095, 4097], 3),
        ([777], 5000),  # many small tensors in one chunk
        ([MIB, MIB], 1),
        ([0, 0], 4),
    ],
)
@pytest.mark.parametrize("threads", [0, 1, 4])
def test_every_byte_whatever_the_shape_of_the_plan(
    holder: Holder, lengths: list[int], count: int, threads: int
) -> None:
    gap = 7  # bytes between runs that must stay as they were, and misalignment
    starts = np.cumsum([gap, *(n + gap for n in lengths)])
    runs = np.array([(starts[i], starts[i] + 3, n) for i, n in enumerate(lengths)], dtype=np.uint64)
    pool = CopyPool(threads) if threads else None
    check(holder, twin.make_plan(runs, count=count), count, int(starts[-1]) + 3, pool)
    if pool:
        pool.close()


def test_an_ordered_plan_of_many_calls_and_chunks_takes_effect_in_its_order(holder: Holder, pool: CopyPool) -> None:
    """Every source block goes to one of three places: only the last to each may be seen."""
    block, blocks = 4096, 2000
    runs = np.array([(i % 3 * block, i * block, block) for i in range(blocks)], np.uint64)
    check(holder, twin.make_plan(runs, ordered=True), 1, blocks * block, pool)


# Refusals of the plan


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dst_first": 1}, "plan.dst_first is 1 and plan.count 1: the dst end has 1 tensors"),
        ({"src_first": -1}, "plan.src_first is -1 and plan.count 1: the src end has 1 tensors"),
        ({"nbytes": 65}, "plan.nbytes is 65: the plan is 1 tensors of 64 bytes"),
        ({"runs": plan_row(1, 0, 64)}, "plan.runs[0] is 64 bytes at dst offset 1: ends outside the tensor of 64 bytes"),
        ({"runs": plan_row(0, 2, 64)}, "plan.runs[0] is 64 bytes at src offset 2: ends outside the tensor of 64 bytes"),
    ],
)
@pytest.mark.parametrize("write", [False, True])
def test_a_plan_outside_the_ends_moves_nothing(holder: Holder, change: dict[str, Any], text: str, write: bool) -> None:
    ours, theirs = twin.noise(2, 2, 64)
    holder.fill(theirs)
    before = ours.copy()
    with pytest.raises(ParamError) as caught:
        read(holder, twin.make_plan(plan_row(0, 0, 64)).replace(**change), ours, holder.address, write=write)
    assert str(caught.value).startswith(text)
    assert np.array_equal(ours, before)
    assert np.array_equal(holder.show(64), theirs)


# Refusals of the kernel


@pytest.mark.parametrize("write", [False, True])
def test_a_process_whose_pid_is_another_ones_by_now(holder: Holder, write: bool) -> None:
    """The pid is that of a living process; only the pidfd knows."""
    with subprocess.Popen(["true"]) as gone:
        pidfd = os.pidfd_open(gone.pid)
    plan, ours = twin.make_plan(plan_row(0, 0, 64)), np.full(64, 7, np.uint8)
    local, remote = Tensors(np.array([ours.ctypes.data], np.uint64), 64), holder.tensors(1, 64)
    before = holder.show(64).tolist()
    memory = ProcessMemory(holder.pid, pidfd, holder.cookie_address, COOKIE, holder.canaries)
    try:
        with pytest.raises(ProcessLookupError, match=f"pid {holder.pid} has ended"):
            move(memory, plan, local, remote, write=write)
    finally:
        os.close(pidfd)
    assert holder.show(64).tolist() == before


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize("write", [False, True])
def test_a_process_that_has_ended(reaped: bool, write: bool) -> None:
    with closing(Holder()) as dead:
        dead.process.kill()
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        if reaped:
            dead.process.wait()
        call = "process_vm_writev" if write else "process_vm_readv"
        with pytest.raises(ProcessLookupError, match=rf"{call} of pid {dead.pid}, 64 bytes at .*: No such process"):
            read(dead, twin.make_plan(plan_row(0, 0, 64)), np.zeros(64, np.uint8), dead.address, write=write)
        with pytest.raises(ProcessLookupError):
            peek_process(dead.pid, dead.address, 16)


@pytest.mark.parametrize("pid", [0, -1, 2**31 - 1])
def test_a_pid_that_is_none(holder: Holder, pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        read(holder, twin.make_plan(plan_row(0, 0, 64)), np.zeros(64, np.uint8), holder.address, pid=pid)


def test_a_write_that_misses_a_canary_writes_nothing_although_the_cookie_is_there(holder: Holder) -> None:
    """As a write that was stopped behind all its checks, and goes on in another address space."""
    holder.fill(np.arange(64, dtype=np.uint8))
    plan, ours = twin.make_plan(plan_row(0, 0, 64)), np.full(64, 7, np.uint8)
    local, remote = Tensors(np.array([ours.ctypes.data], np.uint64), 64), holder.tensors(1, 64)
    first, second = holder.canaries
    for canaries in ((8, second), (first, 8), (holder.edge, second), (first, holder.edge), (0, 0)):
        memory = ProcessMemory(holder.pid, holder.pidfd, holder.cookie_address, COOKIE, canaries)
        with pytest.raises(ProcessLookupError, match=r"process_vm_writev of pid .*64 bytes at its address"):
            move(memory, plan, local, remote, write=True)
        assert holder.show(64).tolist() == list(range(64))


def test_canaries_lie_anywhere_and_a_forked_child_has_none() -> None:
    canaries = [Canary() for _ in range(20)]
    places = [canary.address for canary in canaries]
    assert len(set(places)) == 20
    assert max(places) - min(places) > 1 << 36
    assert [peek_process(os.getpid(), place, PAGESIZE) for place in places] == [bytes(PAGESIZE)] * 20
    child = os.fork()
    if child == 0:
        failures = 0
        for canary, place in zip(canaries, places, strict=True):
            try:
                peek_process(os.getpid(), place, 1)
            except OSError as error:
                failures += error.errno == errno.EFAULT
            canary.close()
        os._exit(failures)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 20
    for canary, place in zip(canaries, places, strict=True):
        assert peek_process(os.getpid(), place, 1) == bytes(1)
        for _ in range(2):
            canary.close()
            assert canary.address == 0
            with pytest.raises(OSError, match="Bad address"):
                peek_process(os.getpid(), place, 1)


def test_an_address_space_with_another_cookie_is_not_read(holder: Holder) -> None:
    """As after exec, of which the pid does not tell."""
    holder.fill(np.arange(64, dtype=np.uint8))
    plan, ours = twin.make_plan(plan_row(0, 0, 64)), np.full(64, 7, np.uint8)
    local, remote = Tensors(np.array([ours.ctypes.data], np.uint64), 64), holder.tensors(1, 64)
    for address, cookie, raised in (
        (holder.cookie_address, b"another's cookie", ProcessLookupError),
        (holder.cookie_address + 1, COOKIE, ProcessLookupError),
        (holder.edge - 8, COOKIE, ProcessLookupError),  # half of it is mapped
        (8, COOKIE, OSError),
        (holder.cookie_address, COOKIE + b"s", ParamError),
    ):
        with pytest.raises(raised):
            move(ProcessMemory(holder.pid, -1, address, cookie), plan, local, remote, write=False)


STRANGER = """
import errno, os, sys
from llm_datadist._native import peek_process

if os.geteuid() == 0:
    os.setuid(65534)  # root may look into everything
try:
    peek_process(int(sys.argv[1]), int(sys.argv[2]), 16)
except PermissionError as error:
    assert error.errno == errno.EPERM, error
    sys.exit(7)
"""


def test_a_process_that_may_not_be_touched() -> None:
    with closing(Holder()) as hidden:
        hidden.hide()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-c", STRANGER, str(hidden.pid), str(hidden.address)]
        assert subprocess.run(command, env=environment, timeout=60, check=False).returncode == 7


@pytest.mark.parametrize("write", [False, True])
def test_what_is_mapped_moves_and_the_rest_is_named(holder: Holder, write: bool) -> None:
    """The kernel moves the mapped part without a word; the call that goes on from there is told why it cannot."""
    ours = np.arange(256, dtype=np.uint8)
    theirs = peek_process(holder.pid, holder.edge - 128, 128)
    runs = np.array([(0, 0, 64), (64, 64, 128), (192, 192, 64)], np.uint64)
    with pytest.raises(OSError, match=rf"128 bytes at its address 0x{holder.edge:x}: Bad address") as caught:
        read(holder, twin.make_plan(runs), ours, holder.edge - 128, write=write)
    assert caught.value.errno == errno.EFAULT
    moved = bytes(range(128)) if write else theirs
    assert peek_process(holder.pid, holder.edge - 128, 128) == ours[:128].tobytes() == moved
    assert ours[192:].tolist() == list(range(192, 256))


def test_local_memory_that_is_not_there(holder: Holder) -> None:
    plan = twin.make_plan(plan_row(0, 0, 64))
    nowhere, there = (Tensors(np.array([at], np.uint64), 64) for at in (8, holder.address))
    with pytest.raises(OSError, match="Bad address"):
        move(ProcessMemory(holder.pid), plan, nowhere, there, write=False)


def test_a_failure_of_one_thread_ends_the_work_of_all(holder: Holder, pool: CopyPool) -> None:
    """64 GiB would follow the chunk that fails."""
    good = np.repeat(plan_row(0, 0, 8 * MIB), 8000, axis=0)
    runs = np.concatenate([plan_row(0, 16 * MIB, 8 * MIB), good])
    local, _ = twin.noise(3, 2, 24 * MIB)
    started = time.monotonic()
    with pytest.raises(OSError, match="Bad address"):
        read(holder, twin.make_plan(runs), local, holder.edge - 20 * MIB, pool)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("spread", ["dst", "src"])
@pytest.mark.parametrize("blocks", [3, 1023, 1024, 1025, 5000])
def test_blocks_side_by_side_at_one_end_only(holder: Holder, pool: CopyPool, spread: str, blocks: int) -> None:
    """That end becomes one range, the other keeps its many; more of them than one call takes."""
    size = 96
    apart = np.random.default_rng(blocks).permutation(blocks) * 2 * size
    together = np.arange(blocks) * size
    columns = [apart, together] if spread == "dst" else [together, apart]
    runs = np.stack([*columns, np.full(blocks, size)], axis=1).astype(np.uint64)
    for helpers in (None, pool):
        check(holder, twin.make_plan(runs, count=2), 2, blocks * 2 * size, helpers)


# Deadlines and threads


@pytest.mark.parametrize("nbytes", [64, 8 * MIB])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_passed_deadline_moves_nothing(holder: Holder, pool: CopyPool, nbytes: int, ordered: bool) -> None:
    ours = twin.noise(4, 1, nbytes)[0]
    before = ours.copy()
    plan = twin.make_plan(plan_row(0, 0, nbytes), ordered=ordered)
    assert read(holder, plan, ours, holder.address, pool, deadline_ns=time.monotonic_ns() - 1) == 0
    assert np.array_equal(ours, before)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_deadline_ends_a_copy_between_chunks(holder: Holder, pool: CopyPool, ordered: bool) -> None:
    ours, theirs = twin.noise(5, 2, 8 * MIB)
    holder.fill(theirs)
    plan = twin.make_plan(np.repeat(plan_row(0, 0, 8 * MIB), 200_000, axis=0), ordered=ordered)  # 1.5 TiB
    for budget_ms in (50, 1_000, 20_000):  # a busy machine may not get as far as the first chunks
        deadline = time.monotonic_ns() + budget_ms * 1_000_000
        done = read(holder, plan, ours, holder.address, pool, deadline_ns=deadline)
        assert done < plan.nbytes
        assert time.monotonic_ns() >= deadline
        if done >= 64 * MIB:
            break
    assert done >= 64 * MIB
    assert np.array_equal(ours, theirs)


def test_other_python_threads_run_during_a_large_copy(holder: Holder) -> None:
    stop = threading.Event()
    gaps = [0.0]

    def tick() -> None:
        last = time.monotonic()
        while not stop.is_set():
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    runs = np.repeat(plan_row(0, 0, 8 * MIB), 20_000, axis=0)
    thread = threading.Thread(target=tick)
    thread.start()
    deadline = time.monotonic_ns() + 500_000_000
    read(holder, twin.make_plan(runs), np.zeros(8 * MIB, np.uint8), holder.address, deadline_ns=deadline)
    stop.set()
    thread.join()
    assert max(gaps) < 0.45  # the copy took 0.5 s


@pytest.mark.parametrize("close_meanwhile", [False, True])
def test_several_callers_share_one_pool(holder: Holder, close_meanwhile: bool) -> None:
    theirs = twin.noise(6, 1, 4 * MIB)[0]
    holder.fill(theirs)
    plan = twin.make_plan(plan_row(0, 0, 4 * MIB))
    pool = CopyPool(3)

    def read_often() -> bool:
        into: NDArray[np.uint8] = np.zeros(4 * MIB, np.uint8)
        for _ in range(10):
            into.fill(0xA5)
            if read(holder, plan, into, holder.address, pool) != into.size or not np.array_equal(into, theirs):
                return False
        return True

    with ThreadPoolExecutor(4) as callers:
        results = [callers.submit(read_often) for _ in range(4)]
        if close_meanwhile:
            pool.close()
        assert all(result.result() for result in results)
    pool.close()


def test_peek_returns_the_bytes(holder: Holder) -> None:
    data = twin.noise(7, 1, MIB)[0]
    holder.fill(data)
    assert peek_process(holder.pid, holder.address + 3, 16) == data[3:19].tobytes()
    assert peek_process(holder.pid, holder.address, MIB) == data.tobytes()
    assert peek_process(holder.pid, holder.address, 0) == b""


@pytest.mark.parametrize("nbytes", [-1, MIB + 1])
def test_peek_is_for_few_bytes(holder: Holder, nbytes: int) -> None:
    with pytest.raises(ParamError, match=rf"^nbytes is {nbytes}: must be in \[0, {MIB}\]"):
        peek_process(holder.pid, holder.address, nbytes)


@pytest.mark.parametrize("address", [0, 8, 2**63, 2**64 - 1])
def test_peek_at_an_address_that_is_none(holder: Holder, address: int) -> None:
    with pytest.raises(OSError, match="Bad address") as caught:
        peek_process(holder.pid, address, 16)
    assert caught.value.errno == errno.EFAULT
