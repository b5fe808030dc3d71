"""The executor against its twin, every byte inside and outside the addressed ranges; the pool; generations."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist._native import (
    NO_DEADLINE,
    CopyPool,
    Plan,
    Tensors,
    advance_generation,
    execute,
    load_generation,
    parse_indices,
    plan_blocks,
    plan_row,
)
from llm_datadist.errors import ParamError
from llm_datadist.testing.scene import kernel_threads, residue, settled
from tests.support import twin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

BLOCKS = 16
BLOCK = 24
TENSOR = BLOCKS * BLOCK
PAIRS = st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)), max_size=30)
MIB = 1 << 20


@pytest.fixture(scope="module")
def pool() -> Iterator[CopyPool]:
    shared = CopyPool(3)
    yield shared
    shared.close()


def blocks(values: list[int]) -> NDArray[np.int64]:
    return parse_indices("blocks", values)


def plan_of(pairs: list[tuple[int, int]], *, alias: bool, block: int = BLOCK, blocks_each: int = BLOCKS) -> Plan:
    dst, src = blocks([d for d, _ in pairs]), blocks([s for _, s in pairs])
    runs, ordered = twin.parts_of(
        plan_blocks(dst, src, block_bytes=block, dst_count=blocks_each, src_count=blocks_each, alias=alias)
    )
    return twin.make_plan(runs, ordered=ordered)


def check(plan: Plan, dst: list[twin.Bytes], src: list[twin.Bytes], pool: CopyPool | None) -> None:
    """Execute here and in the twin; every byte of both ends must come out the same."""
    alias = dst is src
    expected_dst = [tensor.copy() for tensor in dst]
    expected_src = expected_dst if alias else [tensor.copy() for tensor in src]
    twin.execute(plan, expected_dst, expected_src)
    assert execute(plan, twin.tensors_of(dst), twin.tensors_of(src), pool, NO_DEADLINE) == plan.nbytes
    for tensor, expected in zip([*dst, *src], [*expected_dst, *expected_src], strict=True):
        assert np.array_equal(tensor, expected)


@given(PAIRS, st.integers(0, 2), st.integers(0, 2), st.integers(0, 3))
def test_blocks_between_two_caches(pairs: list[tuple[int, int]], dst_first: int, src_first: int, count: int) -> None:
    plan = plan_of(pairs, alias=False).replace(dst_first=dst_first, src_first=src_first, count=count)
    plan = plan.replace(nbytes=count * int(plan.runs[:, 2].sum()))
    check(plan, twin.noise(1, 5, TENSOR), twin.noise(2, 5, TENSOR), None)


@given(PAIRS)
def test_pairs_of_one_cache_take_effect_in_the_order_given(pairs: list[tuple[int, int]]) -> None:
    """interface R26, against the pairs themselves: nothing the planner did may show."""
    (tensor,) = twin.noise(3, 1, TENSOR)
    expected = tensor.copy()
    for d, s in pairs:
        expected[d * BLOCK : (d + 1) * BLOCK] = expected[s * BLOCK : (s + 1) * BLOCK].copy()
    plan = plan_of(pairs, alias=True)
    ends = twin.tensors_of([tensor])
    assert execute(plan, ends, ends, None, NO_DEADLINE) == plan.nbytes
    assert np.array_equal(tensor, expected)


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(32)), st.sampled_from([65536, 65537, 300_001]), st.booleans(), st.booleans())
def test_large_plans_shared_by_threads(
    pool: CopyPool, order: list[int], block: int, alias: bool, chained: bool
) -> None:
    half = 16
    shift = 8 if chained else 0  # sources among the destinations
    pairs = list(zip(order[:half], order[half - shift : 32 - shift], strict=True))
    plan = plan_of(pairs, alias=alias, block=block, blocks_each=32)
    assert plan.ordered is (alias and chained)
    dst = twin.noise(4, 1, 32 * block)
    check(plan, dst, dst if alias else twin.noise(5, 1, 32 * block), pool)


@pytest.mark.parametrize(
    ("lengths", "count"),
    [
        ([40 * MIB + 13], 1),  # one run, many chunks, above the caches
        ([4096] * 700, 9),
        ([5000, 1, 0, 7 * MIB + 1, 3, 63, 64, 65, 4095, 4097], 3),
        ([777], 5000),  # many small tensors in one chunk
        ([MIB, MIB], 1),
        ([0, 0], 4),
    ],
)
@pytest.mark.parametrize("threads", [0, 1, 2, 5])
def test_every_byte_whatever_the_shape_of_the_plan(lengths: list[int], count: int, threads: int) -> None:
    gap = 7  # bytes between runs that must stay as they were, and misalignment
    starts = np.cumsum([gap, *(n + gap for n in lengths)])
    runs = np.array([(starts[i], starts[i] + 3, n) for i, n in enumerate(lengths)], dtype=np.uint64)
    extent = int(starts[-1]) + 3
    dst, src = (list(np.concatenate(twin.noise(seed, 1, extent * count)).reshape(count, -1)) for seed in (6, 7))
    pool = CopyPool(threads) if threads else None
    check(twin.make_plan(runs, count=count), dst, src, pool)
    if pool:
        pool.close()


@pytest.mark.parametrize("shift", [-5 * MIB, -4096, -1, 0, 1, 100, 5 * MIB])
@pytest.mark.parametrize("size", [1000, 9 * MIB])
def test_a_run_that_overlaps_itself_moves_like_memmove(pool: CopyPool, shift: int, size: int) -> None:
    tensors = twin.noise(8, 2, 20 * MIB)
    plan = twin.make_plan(plan_row(6 * MIB + shift, 6 * MIB, size), count=2)
    check(plan, tensors, tensors, pool)


def test_overlap_is_seen_between_tensors_at_other_addresses(pool: CopyPool) -> None:
    """The tensors of both pairs meet, but only the run of the second overlaps itself."""
    (arena,) = twin.noise(9, 1, 20 * MIB)
    expected = arena.copy()
    dst, src = [0, 13 * MIB], [4 * MIB, 12 * MIB]
    for d, s in zip(dst, src, strict=True):
        expected[d : d + 3 * MIB] = expected[s : s + 3 * MIB].copy()
    to, from_ = (Tensors(np.array([arena.ctypes.data + at for at in end], np.uint64), 5 * MIB) for end in (dst, src))
    plan = twin.make_plan(plan_row(0, 0, 3 * MIB), count=2)
    assert execute(plan, to, from_, pool, NO_DEADLINE) == 6 * MIB
    assert np.array_equal(arena, expected)


BAD_PLANS: list[tuple[dict[str, Any], str]] = [
    ({"dst_first": 3}, "plan.dst_first is 3 and plan.count 2: the dst end has 4 tensors"),
    ({"src_first": 3}, "plan.src_first is 3 and plan.count 2: the src end has 4 tensors"),
    ({"dst_first": -1}, "plan.dst_first is -1 and plan.count 2"),
    ({"count": -1}, "plan.dst_first is 0 and plan.count -1"),
    ({"count": 2**63 - 1, "dst_first": 1}, "plan.dst_first is 1 and plan.count 9223372036854775807"),
    ({"nbytes": 127}, "plan.nbytes is 127: the plan is 2 tensors of 64 bytes"),
    ({"nbytes": -1}, "plan.nbytes is -1"),
]


@pytest.mark.parametrize(("change", "text"), BAD_PLANS, ids=lambda value: str(value)[:30])
def test_a_plan_outside_the_ends_writes_nothing(change: dict[str, Any], text: str) -> None:
    refused(twin.make_plan(plan_row(0, 0, 64), count=2).replace(**change), text)


@pytest.mark.parametrize(
    ("run", "text"),
    [
        ((TENSOR, 0, 1), f"plan.runs[1] is 1 bytes at dst offset {TENSOR}: ends outside the tensor of {TENSOR} bytes"),
        ((0, TENSOR - 63, 64), f"plan.runs[1] is 64 bytes at src offset {TENSOR - 63}: ends outside"),
        ((0, 2**64 - 1, 2), f"plan.runs[1] is 2 bytes at src offset {2**64 - 1}: ends outside"),
        ((2**64 - 8, 0, 16), f"plan.runs[1] is 16 bytes at dst offset {2**64 - 8}: ends outside"),
        ((0, 0, 2**64 - 1), f"plan.runs[1] is {2**64 - 1} bytes at dst offset 0: ends outside"),
    ],
)
def test_a_run_outside_its_tensor_writes_nothing(run: tuple[int, int, int], text: str) -> None:
    runs = np.array([(0, 0, 64), run], dtype=np.uint64)
    refused(Plan(0, 0, 1, runs, False, 128), text)


def refused(plan: Plan, text: str) -> None:
    dst, src = twin.noise(10, 4, TENSOR), twin.noise(11, 4, TENSOR)
    before = [tensor.copy() for tensor in dst]
    with pytest.raises(ParamError) as caught:
        execute(plan, twin.tensors_of(dst), twin.tensors_of(src), None, NO_DEADLINE)
    assert str(caught.value).startswith(text)
    assert all(np.array_equal(a, b) for a, b in zip(dst, before, strict=True))


@pytest.mark.parametrize(
    ("base", "extent", "text"),
    [(0, 64, "dst.bases[0] is 0: no address"), (2**64 - 32, 64, "dst.bases[0] is 18446744073709551584: no address")],
)
def test_an_impossible_address_is_refused(base: int, extent: int, text: str) -> None:
    end = Tensors(np.array([base], np.uint64), extent)
    with pytest.raises(ParamError) as caught:
        execute(twin.make_plan(plan_row(0, 0, 8)), end, end, None, NO_DEADLINE)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("size", [64, 4 * MIB])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_passed_deadline_moves_nothing(pool: CopyPool, size: int, ordered: bool) -> None:
    dst, src = twin.noise(12, 1, size), twin.noise(13, 1, size)
    before = dst[0].copy()
    plan = twin.make_plan(plan_row(0, 0, size), ordered=ordered)
    past = time.monotonic_ns() - 1
    assert execute(plan, twin.tensors_of(dst), twin.tensors_of(src), pool, past) == 0
    assert np.array_equal(dst[0], before)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_deadline_ends_a_copy_between_chunks(pool: CopyPool, ordered: bool) -> None:
    dst, src = twin.noise(14, 1, 8 * MIB), twin.noise(15, 1, 8 * MIB)
    plan = twin.make_plan(np.repeat(plan_row(0, 0, 8 * MIB), 200_000, axis=0), ordered=ordered)  # 1.5 TiB
    for budget_ms in (50, 1_000, 20_000):  # a busy machine may not get as far as the first chunks
        deadline = time.monotonic_ns() + budget_ms * 1_000_000
        done = execute(plan, twin.tensors_of(dst), twin.tensors_of(src), pool, deadline)
        assert done < plan.nbytes
        assert time.monotonic_ns() >= deadline
        if done >= 64 * MIB:
            break
    assert done >= 64 * MIB
    assert np.array_equal(dst[0], src[0])


def test_other_python_threads_run_during_a_large_copy() -> None:
    stop = threading.Event()
    gaps = [0.0]

    def tick() -> None:
        last = time.monotonic()
        while not stop.is_set():
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    dst, src = twin.noise(16, 1, 8 * MIB), twin.noise(17, 1, 8 * MIB)
    plan = twin.make_plan(np.repeat(plan_row(0, 0, 8 * MIB), 20_000, axis=0), ordered=True)
    thread = threading.Thread(target=tick)
    thread.start()
    execute(plan, twin.tensors_of(dst), twin.tensors_of(src), None, time.monotonic_ns() + 500_000_000)
    stop.set()
    thread.join()
    assert max(gaps) < 0.45  # the copy took 0.5 s


def test_a_pool_names_its_threads_and_joins_them() -> None:
    before = residue()
    pool = CopyPool(3)
    new = [name for number, name in kernel_threads().items() if number not in before["kernel threads"]]
    assert sorted(new) == ["lldd-copy-0", "lldd-copy-1"]  # the caller is the third
    assert (pool.threads, pool.closed, repr(pool)) == (3, False, "<CopyPool 3 threads>")
    pool.close()
    pool.close()
    assert settled(before) == before
    assert (pool.closed, repr(pool)) == (True, "<CopyPool 3 threads, closed>")
    forgotten = CopyPool(2)
    del forgotten
    assert settled(before) == before


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_a_pool_of_an_impossible_size(threads: int) -> None:
    with pytest.raises(ParamError, match=f"^threads is {threads}: a CopyPool has 1 to 1024 threads"):
        CopyPool(threads)


def test_a_closed_pool_leaves_the_caller_to_copy_alone() -> None:
    pool = CopyPool(2)
    pool.close()
    check(twin.make_plan(plan_row(0, 0, 4 * MIB)), twin.noise(18, 1, 4 * MIB), twin.noise(19, 1, 4 * MIB), pool)


def copy_and_compare(pool: CopyPool, seed: int) -> bool:
    dst, src = twin.noise(seed, 2, 2 * MIB), twin.noise(seed + 1, 2, 2 * MIB)
    ends = twin.tensors_of(dst), twin.tensors_of(src)
    plan = twin.make_plan(plan_row(0, 0, 2 * MIB), count=2)
    for _ in range(20):
        for tensor in dst:
            tensor.fill(0xA5)
        done = execute(plan, *ends, pool, NO_DEADLINE)
        if done != plan.nbytes or not all(np.array_equal(d, s) for d, s in zip(dst, src, strict=True)):
            return False
    return True


@pytest.mark.parametrize("close_meanwhile", [False, True])
def test_several_callers_share_one_pool(close_meanwhile: bool) -> None:
    pool = CopyPool(3)
    with ThreadPoolExecutor(5) as callers:
        results = [callers.submit(copy_and_compare, pool, seed) for seed in range(100, 150, 10)]
        if close_meanwhile:
            pool.close()
        assert all(result.result() for result in results)
    pool.close()


FORK = """
import os, signal, sys, warnings
import numpy as np
from llm_datadist._native import NO_DEADLINE, CopyPool, Plan, Tensors, execute, plan_row

def copy(pool):
    dst, src = np.zeros(4 << 20, np.uint8), np.arange(4 << 20, dtype=np.uint32).view(np.uint8)[: 4 << 20]
    ends = [Tensors(np.array([end.ctypes.data], np.uint64), end.nbytes) for end in (dst, src)]
    plan = Plan(0, 0, 1, plan_row(0, 0, dst.nbytes), False, dst.nbytes)
    assert execute(plan, *ends, pool, NO_DEADLINE) == dst.nbytes
    assert np.array_equal(dst, src)

warnings.simplefilter("ignore")  # Python 3.12 on: fork beside threads
pool, kept = CopyPool(3), CopyPool(2)
copy(pool)
child = os.fork()
signal.alarm(50)  # no child outlives a failed test
copy(pool)
if child == 0:
    pool.close()
    own = CopyPool(2)
    copy(own)
    own.close()
    del pool
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
copy(pool)
pool.close()
"""


def run_script(script: str) -> None:
    source = Path(__file__).parents[2] / "src"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environment)


def test_a_forked_child_copies_alone_and_ends() -> None:
    """The child's exit runs the destructors: of a closed pool, a deleted one and one that was left alone."""
    run_script(FORK)


def test_a_generation_is_loaded_and_advanced() -> None:
    slot = np.array([41, 7], dtype=np.uint64)
    address = slot.ctypes.data
    assert load_generation(address) == 41
    assert advance_generation(address) == 42
    assert load_generation(address) == 42
    assert slot.tolist() == [42, 7]


@pytest.mark.parametrize("offset", [1, 4, 7])
@pytest.mark.parametrize("call", [load_generation, advance_generation])
def test_a_generation_has_an_aligned_address(call: Any, offset: int) -> None:
    slot = np.zeros(2, dtype=np.uint64)
    with pytest.raises(ParamError, match=r"^address is \d+: a generation needs"):
        call(slot.ctypes.data + offset)
    with pytest.raises(ParamError, match=r"^address is 0: "):
        call(0)


ADVANCE = """
import mmap, os, warnings
import numpy as np
from llm_datadist._native import advance_generation, load_generation

warnings.simplefilter("ignore")  # Python 3.12 on: fork beside threads
slot = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=np.uint64, count=1)
child = os.fork()
for _ in range(100_000):
    advance_generation(slot.ctypes.data)
if child == 0:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert load_generation(slot.ctypes.data) == 200_000
"""


def test_two_processes_advance_one_generation() -> None:
    run_script(ADVANCE)
