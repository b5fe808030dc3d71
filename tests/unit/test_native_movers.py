"""The two executors, inside one process and between two: against their twin, every byte inside and outside the
addressed ranges; how they end early; generations; each refusal of the kernel."""

import errno
import mmap
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from itertools import product
from mmap import PAGESIZE

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from faults.page_trap import PageTrap, trap_denied
from llm_datadist import _native as native
from llm_datadist._deadline import Deadline
from llm_datadist._native import (
    CHANGED_BEFORE,
    CHANGED_DURING,
    NO_DEADLINE,
    CopyPool,
    GuardSet,
    Plan,
    ProcessMemory,
    Tensors,
    execute,
    peek_process,
    plan_row,
)
from llm_datadist.errors import ParamError
from llm_datadist.testing.scene import tensors_over
from tests.support import twin
from tests.support.moves import same_bytes
from tests.support.users import USER, become

from .holder import COOKIE, Holder, in_a_forked_child

BLOCKS, BLOCK = 16, 24
TENSOR = BLOCKS * BLOCK
PAIRS = st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)), max_size=30)
MIB = 1 << 20
BOUND_S = 60
PAST = 1  # a deadline
ROW = twin.make_plan(plan_row(0, 0, 64))


class Mover:
    """Moves between the test's memory and more of it, or that of another process."""

    def __init__(self, holder: Holder | None) -> None:
        self.holder = holder

    def place(self, tensors: list[twin.Bytes]) -> Tensors:
        self._far = tensors
        if self.holder is None:
            return twin.tensors_of(tensors)
        self.holder.fill(np.concatenate(tensors))
        return self.holder.tensors(len(tensors), tensors[0].size)

    def show(self) -> list[twin.Bytes]:
        if self.holder is None:
            return self._far
        return list(self.holder.show(sum(tensor.size for tensor in self._far)).reshape(len(self._far), -1))

    def move(
        self,
        plan: Plan,
        near: Tensors,
        far: Tensors,
        pool: CopyPool | None = None,
        deadline_ns: int = NO_DEADLINE,
        cancelled: bytearray | None = None,
        guards: GuardSet | None = None,
        *,
        write: bool = False,
    ) -> int:
        local, remote = near.native, far.native
        if (holder := self.holder) is None:
            dst, src = (remote, local) if write else (local, remote)
            return execute(plan, dst, src, pool, deadline_ns, cancelled, guards)
        memory = ProcessMemory(holder.pid, holder.pidfd, holder.cookie_address, COOKIE, holder.canaries)
        verb = memory.write if write else memory.read
        return verb(plan, local, remote, pool, deadline_ns, cancelled, guards)


@pytest.fixture(scope="module")
def holder() -> Iterator[Holder]:
    with closing(Holder()) as shared:
        yield shared


@pytest.fixture(scope="module", params=["inside", "between"])
def mover(request: pytest.FixtureRequest, holder: Holder) -> Mover:
    return Mover(holder if request.param == "between" else None)


def blocks(values: list[int]) -> NDArray[np.int64]:
    return native.parse_indices("blocks", values)


def plan_of(pairs: list[tuple[int, int]], *, alias: bool, block: int = BLOCK, blocks_each: int = BLOCKS) -> Plan:
    dst, src = blocks([d for d, _ in pairs]), blocks([s for _, s in pairs])
    return native.plan_blocks(dst, src, block_bytes=block, dst_count=blocks_each, src_count=blocks_each, alias=alias)


def check(plan: Plan, dst: list[twin.Bytes], src: list[twin.Bytes], pool: CopyPool | None) -> None:
    """Execute here and in the twin; every byte of both ends must come out the same."""
    alias = dst is src
    expected_dst = [tensor.copy() for tensor in dst]
    expected_src = expected_dst if alias else [tensor.copy() for tensor in src]
    twin.execute(plan, expected_dst, expected_src)
    assert execute(plan, twin.tensors_of(dst).native, twin.tensors_of(src).native, pool, NO_DEADLINE) == plan.nbytes
    for tensor, expected in zip([*dst, *src], [*expected_dst, *expected_src], strict=True):
        assert np.array_equal(tensor, expected)


def check_both_ways(mover: Mover, plan: Plan, tensors: int, extent: int, pool: CopyPool | None) -> None:
    """Read and write the plan here and in the twin; every byte of both ends, as their owners see them."""
    for write in (False, True):
        near, far = twin.noise(1, tensors, extent), twin.noise(2, tensors, extent)
        want_near, want_far = [tensor.copy() for tensor in near], [tensor.copy() for tensor in far]
        twin.execute(plan, *((want_far, want_near) if write else (want_near, want_far)))
        assert mover.move(plan, twin.tensors_of(near), mover.place(far), pool, write=write) == plan.nbytes
        for tensor, expected in zip([*near, *mover.show()], [*want_near, *want_far], strict=True):
            assert np.array_equal(tensor, expected)


# Guards


@pytest.mark.parametrize("write", [False, True])
def test_guards_are_compared_before_the_first_byte_and_after_the_last(mover: Mover, write: bool) -> None:
    """The table of slots of 64 bytes lies in the near memory, where a read may change it."""
    (near,), far = twin.noise(1, 1, 256), twin.noise(2, 1, 256)
    there, generation = mover.place(far), int(near[64:72].view(np.uint64)[0])

    def moved(at: int, shown: int) -> int:
        guards = GuardSet([(1, shown)], 64, near.ctypes.data, near.size)
        plan = twin.make_plan(np.array([[at, 128, 64]], np.uint64))
        return mover.move(plan, twin.tensors_of([near]), there, None, guards=guards, write=write)

    before = near.copy()
    assert moved(0, generation ^ 1) == CHANGED_BEFORE
    same_bytes([near, *mover.show()], [before, *far])
    assert moved(0, generation) == 64
    before[:64] = before[:64] if write else far[0][128:192]
    expected = [each.copy() for each in far]
    if write:
        expected[0][:64] = before[128:192]
    same_bytes([near, *mover.show()], [before, *expected])
    if not write:
        assert moved(64, generation) == CHANGED_DURING
        before[64:128] = far[0][128:192]
        same_bytes([near, *mover.show()], [before, *expected])


# Bytes


@given(PAIRS, st.integers(0, 2), st.integers(0, 2), st.integers(0, 3))
def test_blocks_between_two_caches(
    mover: Mover, pairs: list[tuple[int, int]], dst_first: int, src_first: int, count: int
) -> None:
    """Blocks that occur twice among them: such plans are ordered."""
    plan = plan_of(pairs, alias=False)
    nbytes = count * int(plan.runs[:, 2].sum())
    plan = plan.replace(dst_first=dst_first, src_first=src_first, count=count, nbytes=nbytes)
    check_both_ways(mover, plan, 5, TENSOR, None)


@given(PAIRS)
def test_pairs_of_one_cache_take_effect_in_the_order_given(pairs: list[tuple[int, int]]) -> None:
    """interface R26, against the pairs themselves: nothing the planner did may show."""
    (tensor,) = twin.noise(3, 1, TENSOR)
    expected = tensor.copy()
    for d, s in pairs:
        expected[d * BLOCK : (d + 1) * BLOCK] = expected[s * BLOCK : (s + 1) * BLOCK].copy()
    plan = plan_of(pairs, alias=True)
    ends = twin.tensors_of([tensor])
    assert execute(plan, ends.native, ends.native, None, NO_DEADLINE) == plan.nbytes
    assert np.array_equal(tensor, expected)


SHAPES = [
    ([9 * MIB + 11], 2),  # one run, many chunks
    ([4096] * 700, 8),
    ([512] * 3000, 3),  # between processes: more ranges than a call takes, in one chunk
    ([4096] * 1024, 1),  # exactly as many as a call takes
    ([5000, 1, 0, 7 * MIB + 1, 3, 63, 64, 65, 4095, 4097], 3),
    ([(16 << 10) - 1, 16 << 10, (16 << 10) + 1] * 60, 1),  # around the least that streams
    ([777], 5000),  # many small tensors in one chunk
    ([MIB, MIB], 1),
    ([0, 0], 4),
]
ABOVE_THE_CACHES = ([40 * MIB + 13], 1)


@pytest.mark.parametrize(
    ("mover", "shape"),
    [("inside", ABOVE_THE_CACHES), *product(["inside", "between"], SHAPES)],
    indirect=["mover"],
    ids=lambda value: value if isinstance(value, str) else f"{len(value[0])} runs of {value[0][0]} x {value[1]}",
)
@pytest.mark.parametrize("threads", [0, 1, 2, 5])
def test_every_byte_whatever_the_shape_of_the_plan(mover: Mover, shape: tuple[list[int], int], threads: int) -> None:
    (lengths, count), gap = shape, 7  # bytes between runs that must stay as they were, and misalignment
    starts = np.cumsum([gap, *(n + gap for n in lengths)])
    runs = np.array([(starts[i], starts[i] + 3, n) for i, n in enumerate(lengths)], dtype=np.uint64)
    with closing(CopyPool(threads)) if threads else nullcontext() as pool:
        check_both_ways(mover, twin.make_plan(runs, count=count), count, int(starts[-1]) + 3, pool)


def test_an_ordered_plan_of_many_calls_and_chunks_takes_effect_in_its_order(mover: Mover, pool: CopyPool) -> None:
    """Every source block goes to one of three places: only the last to each may be seen."""
    block, blocks = 4096, 2000
    runs = np.array([(i % 3 * block, i * block, block) for i in range(blocks)], np.uint64)
    check_both_ways(mover, twin.make_plan(runs, ordered=True), 1, blocks * block, pool)


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
        check_both_ways(Mover(holder), twin.make_plan(runs, count=2), 2, blocks * 2 * size, helpers)


@pytest.mark.parametrize("shift", [-5 * MIB, -4096, -1, 0, 1, 100, 5 * MIB])
@pytest.mark.parametrize("size", [1000, 9 * MIB])
def test_a_run_that_overlaps_itself_moves_like_memmove(pool: CopyPool, shift: int, size: int) -> None:
    tensors = twin.noise(8, 2, 20 * MIB)
    check(twin.make_plan(plan_row(6 * MIB + shift, 6 * MIB, size), count=2), tensors, tensors, pool)


def test_overlap_is_seen_between_tensors_at_other_addresses(pool: CopyPool) -> None:
    """The tensors of both pairs meet, but only the run of the second overlaps itself."""
    (arena,) = twin.noise(9, 1, 20 * MIB)
    expected = arena.copy()
    dst, src = [0, 13 * MIB], [4 * MIB, 12 * MIB]
    for d, s in zip(dst, src, strict=True):
        expected[d : d + 3 * MIB] = expected[s : s + 3 * MIB].copy()
    to, from_ = (Tensors(np.array([arena.ctypes.data + at for at in end], np.uint64), 5 * MIB) for end in (dst, src))
    plan = twin.make_plan(plan_row(0, 0, 3 * MIB), count=2)
    assert execute(plan, to.native, from_.native, pool, NO_DEADLINE) == 6 * MIB
    assert np.array_equal(arena, expected)


# Refusals of the plan


def second_run(dst: int, src: int, length: int) -> Plan:
    return Plan(0, 0, 1, np.array([(0, 0, 64), (dst, src, length)], np.uint64), False, 128)


TWO = twin.make_plan(plan_row(0, 0, 64), count=2)
TOP = 2**64 - 1
BAD_PLANS = [
    (TWO.replace(dst_first=3), "plan.dst_first is 3 and plan.count 2: the dst side has 4 tensors"),
    (TWO.replace(src_first=3), "plan.src_first is 3 and plan.count 2: the src side has 4 tensors"),
    (TWO.replace(dst_first=-1), "plan.dst_first is -1 and plan.count 2"),
    (TWO.replace(src_first=-1), "plan.src_first is -1 and plan.count 2"),
    (TWO.replace(count=-1), "plan.dst_first is 0 and plan.count -1"),
    (TWO.replace(count=2**63 - 1, dst_first=1), "plan.dst_first is 1 and plan.count 9223372036854775807"),
    (TWO.replace(nbytes=127), "plan.nbytes is 127: the plan is 2 tensors of 64 bytes"),
    (TWO.replace(nbytes=-1), "plan.nbytes is -1"),
    (second_run(TENSOR, 0, 1), f"plan.runs[1] is 1 bytes at dst offset {TENSOR}: ends outside the tensor of {TENSOR}"),
    (second_run(0, TENSOR - 63, 64), f"plan.runs[1] is 64 bytes at src offset {TENSOR - 63}: ends outside"),
    (second_run(0, TOP, 2), f"plan.runs[1] is 2 bytes at src offset {TOP}: ends outside"),
    (second_run(TOP - 7, 0, 16), f"plan.runs[1] is 16 bytes at dst offset {TOP - 7}: ends outside"),
    (second_run(0, 0, TOP), f"plan.runs[1] is {TOP} bytes at dst offset 0: ends outside"),
]


@pytest.mark.parametrize(("plan", "text"), BAD_PLANS, ids=[text[:40] for _, text in BAD_PLANS])
@pytest.mark.parametrize("write", [False, True])
def test_a_plan_outside_the_ends_moves_nothing(mover: Mover, plan: Plan, text: str, write: bool) -> None:
    near, far = twin.noise(10, 4, TENSOR), twin.noise(11, 4, TENSOR)
    before = [tensor.copy() for tensor in [*near, *far]]
    with pytest.raises(ParamError) as caught:
        mover.move(plan, twin.tensors_of(near), mover.place(far), write=write)
    assert str(caught.value).startswith(text)
    assert all(map(np.array_equal, [*near, *mover.show()], before))


@pytest.mark.parametrize("base", [0, 2**64 - 32])
def test_an_impossible_address_is_refused(base: int) -> None:
    end = Tensors(np.array([base], np.uint64), 64)
    with pytest.raises(ParamError, match=rf"^dst.bases\[0\] is {base}: no address"):
        execute(twin.make_plan(plan_row(0, 0, 8)), end.native, end.native, None, NO_DEADLINE)


# Ends before the last byte


@pytest.mark.parametrize("size", [64, 3 * MIB, 9 * MIB])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("deadline_ns", "flag"), [(PAST, None), (NO_DEADLINE, b"\1")], ids=["the deadline has passed", "cancelled"]
)
def test_what_is_over_before_it_begins_moves_nothing(
    mover: Mover, pool: CopyPool, size: int, ordered: bool, deadline_ns: int, flag: bytes | None
) -> None:
    near, far = twin.noise(12, 2, size)
    before = near.copy()
    plan, local = twin.make_plan(plan_row(0, 0, size), ordered=ordered), tensors_over(near)
    cancelled = None if flag is None else bytearray(flag)
    assert mover.move(plan, local, mover.place([far]), pool, deadline_ns, cancelled) == 0
    assert np.array_equal(near, before)
    assert mover.move(plan, local, mover.place([far]), pool, NO_DEADLINE, bytearray(1)) == size
    assert np.array_equal(near, far)


TAIL = 64


def long_plan(ordered: bool, repeats: int) -> Plan:
    """Return a plan that writes 8 MiB again and again, and at last the tail behind them."""
    runs = np.repeat(plan_row(0, 0, 8 * MIB), repeats, axis=0)
    return twin.make_plan(np.concatenate([runs, plan_row(8 * MIB, 8 * MIB, TAIL)]), ordered=ordered)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_deadline_ends_a_copy_between_chunks(mover: Mover, pool: CopyPool, ordered: bool) -> None:
    near, far = twin.noise(14, 2, 8 * MIB + TAIL)
    plan, remote = long_plan(ordered, 200_000), mover.place([far])  # 1.5 TiB
    for budget_ms in (50, 1_000, 20_000):  # a busy machine may not get as far as the first chunks
        deadline = time.monotonic_ns() + budget_ms * 1_000_000
        done = mover.move(plan, tensors_over(near), remote, pool, deadline)
        assert done < plan.nbytes
        assert time.monotonic_ns() >= deadline
        if done >= 64 * MIB:
            break
    assert done >= 64 * MIB
    assert np.array_equal(near[:-TAIL], far[:-TAIL])


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("end", ["a flag", "a signal"])
def test_another_python_thread_runs_during_a_large_copy_and_ends_it(
    mover: Mover, ordered: bool, threads: int, end: str
) -> None:
    """160 GiB: without the other thread they go on to the last byte. After the end no byte arrives."""
    near, far = np.zeros(8 * MIB + TAIL, np.uint8), np.full(8 * MIB + TAIL, 7, np.uint8)
    plan, remote, deadline = long_plan(ordered, 20_000), mover.place([far]), Deadline(BOUND_S * 1000, cancellable=True)
    main = threading.get_ident()

    def stop() -> None:
        assert Deadline(BOUND_S * 1000).poll(lambda: bool(near[0]))
        deadline.cancel() if end == "a flag" else signal.pthread_kill(main, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    pool = CopyPool(threads) if threads else None
    stopper = threading.Thread(target=stop)
    stopper.start()
    try:
        if end == "a signal":
            with pytest.raises(KeyboardInterrupt):
                mover.move(plan, tensors_over(near), remote, pool)
        else:
            done = mover.move(plan, tensors_over(near), remote, pool, NO_DEADLINE, deadline.cancelled)
            assert 0 < done < plan.nbytes
            assert done % MIB == 0, "whole chunks"
        assert not near[-TAIL:].any()
        near[:] = 1
        time.sleep(0.02)
        assert (near == 1).all()
    finally:
        stopper.join()
        signal.signal(signal.SIGALRM, before)
        if pool:
            pool.close()


@pytest.mark.skipif(trap_denied() is not None, reason=f"no page can be trapped here: {trap_denied()}")
@pytest.mark.parametrize(("ordered", "cancel"), [(False, True), (True, True), (False, False)])
def test_a_cancelled_copy_ends_after_the_chunk_it_is_at(ordered: bool, cancel: bool) -> None:
    """Stopped at a page of its first chunk; without a cancellation it goes on to the end."""
    size, done = 64 * MIB, []
    dst, src = (np.frombuffer(mmap.mmap(-1, size), np.uint8) for _ in range(2))  # can be trapped
    dst[:], src[:] = 1, 2
    starts = np.arange(0, size, MIB, dtype=np.uint64)  # in steps, because a single run may go backwards
    runs = np.stack([starts, starts, np.full_like(starts, MIB)], axis=1)
    deadline = Deadline(BOUND_S * 1000, cancellable=True)

    def copy() -> None:
        plan = twin.make_plan(runs, ordered=ordered)
        done.append(
            execute(plan, tensors_over(dst).native, tensors_over(src).native, None, NO_DEADLINE, deadline.cancelled)
        )

    thread = threading.Thread(target=copy, daemon=True)
    with PageTrap(dst.ctypes.data + 8192) as trap:
        thread.start()
        try:
            assert trap.wait(BOUND_S), "the copy never came to the page"
            if cancel:
                deadline.cancel()
        finally:
            trap.release()
            thread.join(BOUND_S)
    assert not thread.is_alive()
    assert done == [4 * MIB if cancel else size]
    assert (dst[: done[0]] == 2).all()
    assert (dst[done[0] :] == 1).all()


@pytest.mark.parametrize("size", [0, 1, 2])
def test_a_flag_is_one_byte_and_not_kept(size: int) -> None:
    """A bytearray that somebody still holds a buffer of cannot change its size."""
    dst, src = twin.noise(4, 2, 64)
    expected, flag = src if size == 1 else dst.copy(), bytearray(size)
    wrong = pytest.raises(ParamError, match=f"^cancelled has {size} bytes: must be one")
    with nullcontext() if size == 1 else wrong:
        execute(ROW, tensors_over(dst).native, tensors_over(src).native, None, NO_DEADLINE, flag)
    assert np.array_equal(dst, expected)
    flag += b"more"


def test_a_failure_of_one_thread_ends_the_work_of_all(holder: Holder, pool: CopyPool) -> None:
    """64 GiB would follow the chunk that fails, and the tail."""
    near, far = np.zeros(24 * MIB, np.uint8), Tensors(np.array([holder.edge - 20 * MIB], np.uint64), 24 * MIB)
    good, tail = np.repeat(plan_row(0, 0, 8 * MIB), 8000, axis=0), plan_row(23 * MIB, 20 * MIB - TAIL, TAIL)
    runs = np.concatenate([plan_row(0, 16 * MIB, 8 * MIB), good, tail])
    with pytest.raises(OSError, match="Bad address"):
        ProcessMemory(holder.pid).read(twin.make_plan(runs), tensors_over(near).native, far.native, pool, NO_DEADLINE)
    assert not near[23 * MIB :].any()


# Callers and processes beside one another


@pytest.mark.parametrize("close_meanwhile", [False, True])
def test_several_callers_share_one_pool(mover: Mover, close_meanwhile: bool) -> None:
    callers, size = 5, 4 * MIB
    (far,) = twin.noise(6, 1, callers * size)
    pool, remote = CopyPool(3), mover.place([far])

    def copy(number: int) -> bool:
        near = np.zeros(size, np.uint8)
        plan = twin.make_plan(plan_row(0, number * size, size))
        for _ in range(20):
            near.fill(0xA5)
            done = mover.move(plan, tensors_over(near), remote, pool)
            if done != size or not np.array_equal(near, far[number * size : (number + 1) * size]):
                return False
        return True

    with ThreadPoolExecutor(callers) as threads:
        results = [threads.submit(copy, number) for number in range(callers)]
        if close_meanwhile:
            pool.close()
        assert all(result.result() for result in results)
    pool.close()


def test_two_processes_advance_one_generation() -> None:
    slot = np.frombuffer(mmap.mmap(-1, PAGESIZE), np.uint64, count=1)

    def advance() -> None:
        for _ in range(100_000):
            native.advance_generation(slot.ctypes.data)

    here = threading.Thread(target=advance)
    here.start()
    in_a_forked_child(advance)
    here.join()
    assert native.load_generation(slot.ctypes.data) == 200_000


# Refusals of the kernel


@pytest.mark.parametrize("write", [False, True])
def test_a_process_whose_pid_is_another_ones_by_now(holder: Holder, write: bool) -> None:
    """The pid is that of a living process; only the pidfd knows."""
    with subprocess.Popen(["true"]) as gone:
        pidfd = os.pidfd_open(gone.pid)
    before = holder.show(64).tolist()
    memory = ProcessMemory(holder.pid, pidfd, holder.cookie_address, COOKIE, holder.canaries)
    try:
        with pytest.raises(ProcessLookupError, match=f"pid {holder.pid} has ended"):
            move(memory, holder.address, np.full(64, 7, np.uint8), write=write)
    finally:
        os.close(pidfd)
    assert holder.show(64).tolist() == before


def move(memory: ProcessMemory, at: int, ours: twin.Bytes, plan: Plan = ROW, *, write: bool = False) -> int:
    """Move between one local tensor and the one at an address of the other process."""
    remote = Tensors(np.array([at], np.uint64), ours.size)
    verb = memory.write if write else memory.read
    return verb(plan, tensors_over(ours).native, remote.native, None, NO_DEADLINE)


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
            move(ProcessMemory(dead.pid), dead.address, np.zeros(64, np.uint8), write=write)
        with pytest.raises(ProcessLookupError):
            peek_process(dead.pid, dead.address, 16)


def test_a_write_that_misses_a_canary_writes_nothing_although_the_cookie_is_there(holder: Holder) -> None:
    """As a write that was stopped behind all its checks, and goes on in another address space."""
    holder.fill(np.arange(64, dtype=np.uint8))
    first, second = holder.canaries
    for canaries in ((8, second), (first, 8), (holder.edge, second), (first, holder.edge), (0, 0)):
        memory = ProcessMemory(holder.pid, holder.pidfd, holder.cookie_address, COOKIE, canaries)
        with pytest.raises(ProcessLookupError, match=r"process_vm_writev of pid .*64 bytes at its address"):
            move(memory, holder.address, np.full(64, 7, np.uint8), write=True)
        assert holder.show(64).tolist() == list(range(64))


def test_canaries_lie_anywhere_and_a_forked_child_has_none() -> None:
    canaries = [native.Canary() for _ in range(20)]
    places = [canary.address for canary in canaries]
    assert len(set(places)) == 20
    assert max(places) - min(places) > 1 << 36
    assert [peek_process(os.getpid(), place, PAGESIZE) for place in places] == [bytes(PAGESIZE)] * 20

    def look() -> None:
        for canary, place in zip(canaries, places, strict=True):
            with pytest.raises(OSError, match="Bad address"):
                peek_process(os.getpid(), place, 1)
            canary.close()

    in_a_forked_child(look)
    for canary, place in zip(canaries, places, strict=True):
        assert peek_process(os.getpid(), place, 1) == bytes(1)
        for _ in range(2):
            canary.close()
            assert canary.address == 0
            with pytest.raises(OSError, match="Bad address"):
                peek_process(os.getpid(), place, 1)


def test_an_address_space_with_another_cookie_is_not_read(holder: Holder) -> None:
    """As after exec, of which the pid does not tell."""
    for address, cookie, raised in (
        (holder.cookie_address, b"another's cookie", ProcessLookupError),
        (holder.cookie_address + 1, COOKIE, ProcessLookupError),
        (holder.edge - 8, COOKIE, ProcessLookupError),  # half of it is mapped
        (8, COOKIE, OSError),
        (holder.cookie_address, COOKIE + b"s", ParamError),
    ):
        with pytest.raises(raised):
            move(ProcessMemory(holder.pid, -1, address, cookie), holder.address, np.full(64, 7, np.uint8))


def test_a_process_that_may_not_be_touched() -> None:
    with closing(Holder()) as hidden, closing(Holder()) as stranger:
        hidden.hide()
        if os.geteuid() == 0:
            stranger.do(become, USER)  # root may look into everything
        with pytest.raises(PermissionError) as caught:
            stranger.peek(hidden)
        assert caught.value.errno == errno.EPERM


@pytest.mark.parametrize("write", [False, True])
def test_what_is_mapped_moves_and_the_rest_is_named(holder: Holder, write: bool) -> None:
    """The kernel moves the mapped part without a word; the call that goes on from there is told why it cannot."""
    ours = np.arange(256, dtype=np.uint8)
    theirs = peek_process(holder.pid, holder.edge - 128, 128)
    plan = twin.make_plan(np.array([(0, 0, 64), (64, 64, 128), (192, 192, 64)], np.uint64))
    with pytest.raises(OSError, match=rf"128 bytes at its address 0x{holder.edge:x}: Bad address") as caught:
        move(ProcessMemory(holder.pid), holder.edge - 128, ours, plan, write=write)
    assert caught.value.errno == errno.EFAULT
    moved = bytes(range(128)) if write else theirs
    assert peek_process(holder.pid, holder.edge - 128, 128) == ours[:128].tobytes() == moved
    assert ours[192:].tolist() == list(range(192, 256))


def test_peek_returns_the_bytes(holder: Holder) -> None:
    data = twin.noise(7, 1, MIB)[0]
    holder.fill(data)
    for at, nbytes in ((3, 16), (0, MIB), (0, 0)):
        assert peek_process(holder.pid, holder.address + at, nbytes) == data[at : at + nbytes].tobytes()
    for nbytes in (-1, MIB + 1):
        with pytest.raises(ParamError, match=rf"^nbytes is {nbytes}: must be in \[0, {MIB}\]"):
            peek_process(holder.pid, holder.address, nbytes)
    for address in (0, 8, 2**63, 2**64 - 1):
        with pytest.raises(OSError, match="Bad address") as caught:
            peek_process(holder.pid, address, 16)
        assert caught.value.errno == errno.EFAULT
