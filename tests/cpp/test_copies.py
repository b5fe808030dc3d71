"""What only CopyKvCache and CopyKvBlocks of the C++-shaped interface have: host memory without an id, lists of lists,
the order, and the codes of what they refuse (interface §9, R8, R10, R13, R26). The rest: tests/api/test_dialects.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.cpp_api import Cache, CacheDesc, DataType, LlmRole
from llm_datadist.testing import StagedDevice
from tests.support.cpp import (
    BAD,
    DEVICE,
    GONE,
    HOST,
    OK,
    Shape,
    all_unchanged,
    attempt,
    dist,
    host_memory,
    made,
    run,
    show,
    start,
)
from tests.support.devices import BrokenDevice
from tests.support.moves import Use, moved, same_bytes

if TYPE_CHECKING:
    from llm_datadist.cpp_api import CachePlacement
    from tests.support.cpp import Row
    from tests.support.ends import LocalEnd

pytestmark = pytest.mark.covers(
    "cpp_api: Cache CacheDesc LlmDataDist Undefined", "cpp_api.LlmDataDist: CopyKvBlocks CopyKvCache"
)

KV = Use("kv")
ON_HOST = Shape(placement=HOST)


@pytest.fixture
def one(end: LocalEnd) -> LocalEnd:
    end.do(start, LlmRole.kMix, 1, "auto", {})
    return end


@pytest.mark.parametrize("device", [None, "staged"])
@pytest.mark.parametrize("by_id", [True, False])
def test_r13_device_to_host_and_back_one_list_to_every_inner_list(
    end: LocalEnd, device: str | None, by_id: bool
) -> None:
    end.do(start, LlmRole.kMix, 1, "auto", {}, StagedDevice() if device else None)
    kv = end.do(made, "kv", Shape(), 1)
    host = end.do(made if by_id else host_memory, "host", Shape(rows=5, placement=HOST), 2)
    assert end.do(run, "CopyKvBlocks", KV, Use("host"), [6, 7, 2], [[0, 1, 4], [3, 2, 3]]) is OK
    host = moved(host, kv, [(0, 6), (1, 7), (4, 2), (3, 6), (2, 7), (3, 2)])
    same_bytes(end.do(show, "host"), host)
    same_bytes(end.do(show, "kv"), kv)
    assert end.do(run, "CopyKvBlocks", Use("host"), KV, [0, 4], [[0, 1], [7, 6]]) is OK
    kv = moved(kv, host, [(0, 0), (1, 4), (7, 0), (6, 4)])
    same_bytes(end.do(show, "kv"), kv)
    same_bytes(end.do(show, "host"), host)


def test_r26_r13_random_lists_take_effect_list_by_list_in_the_order_given(one: LocalEnd) -> None:
    random = np.random.default_rng(0)
    kv, other = one.do(made, "kv", Shape(rows=50), 1), one.do(made, "other", Shape(rows=70), 2)
    for _ in range(20):
        sources = random.integers(0, 50, int(random.integers(1, 40)))
        lists = random.integers(0, 50, (int(random.integers(1, 5)), len(sources)))
        pairs = [(int(to), int(of)) for row in lists for of, to in zip(sources, row, strict=True)]
        for name, target in (("other", other), ("kv", kv)):  # the second one reads what it wrote
            assert one.do(run, "CopyKvBlocks", KV, Use(name), sources.tolist(), lists.tolist()) is OK
            for tensor, source in zip(target, kv, strict=True):
                for to, of in pairs:
                    tensor[to] = source[of]
            same_bytes(one.do(show, name), target)


def test_a_device_that_fails_is_a_status_and_not_an_exception(end: LocalEnd) -> None:
    device = BrokenDevice()
    device.broken = "copy_to_device"
    end.do(start, LlmRole.kMix, 1, "auto", {}, device)
    end.do(made, "kv", Shape(), 1)
    end.do(host_memory, "cpu", ON_HOST, 2)
    status, text = end.do(attempt, "CopyKvBlocks", Use("cpu"), KV, [0], [[0]])
    assert (status.name, text) == ("LLM_FAILED", "device is lost")
    assert isinstance(dist(end.world).last_error, OSError)
    device.broken = ""
    assert end.do(run, "CopyKvBlocks", Use("cpu"), KV, [0], [[0]]) is OK


def test_r06_a_copy_on_the_device_that_takes_too_long_times_out(end: LocalEnd) -> None:
    pool = '{"memory_size": 402653184}'
    end.do(start, LlmRole.kMix, 1, "auto", {"llm.SyncKvCacheWaitTime": "1", "llm.MemPoolConfig": pool})
    big = Shape(tensors=1, rows=2, width=16 << 20)  # 64 MiB a block
    world = end.world
    for name in ("src", "dst"):
        status, world.memory[f"cache {name}"] = dist(world).AllocateCache(big.desc)
        assert status is OK
    status, text = end.do(attempt, "CopyKvBlocks", Use("src"), Use("dst"), [0, 1], [[0, 1]] * 16)
    assert status.name == "LLM_TIMEOUT", text
    assert "CopyKvBlocks" in text
    world.dd.check_integrity()


def test_r13_an_id_is_looked_up_and_nothing_else_of_the_struct_is_read(one: LocalEnd) -> None:
    src, dst = one.do(made, "src", Shape(), 1), one.do(made, "dst", Shape(), 2)
    assert one.do(run, "CopyKvBlocks", Cache(1, [1], CacheDesc(HOST, 9)), Cache(2), [1], [[2]]) is OK
    assert one.do(run, "CopyKvCache", Cache(1, [1], CacheDesc(HOST, 9)), Cache(2), 3, 4) is OK
    same_bytes(one.do(show, "dst"), moved(dst, src, [(2, 1), (4, 3)]))


# --- what is refused --------------------------------------------------------------------------------------------------

SHAPES = {
    "src": Shape(),
    "dst": Shape(rows=6),
    "wide": Shape(width=17),
    "few": Shape(tensors=3),
    "host": ON_HOST,
    "one": Shape(tensors=1),
}
SRC, DST = Use("src"), Use("dst")


def host_desc(num_tensors: int = 4, placement: CachePlacement = HOST, shape: list[int] | None = None) -> CacheDesc:
    return CacheDesc(placement, num_tensors, DataType.DT_INT32, [8, 16] if shape is None else shape)


#: (src, dst, src_blocks, dst_blocks_list, parts of the reason)
LISTS: list[tuple[Any, ...]] = [
    (SRC, DST, [], [[]], ("src_blocks is empty",)),
    (SRC, DST, [], [[1]], ("src_blocks is empty",)),
    (SRC, DST, [1], [], ("dst_blocks_list is empty",)),
    (SRC, DST, [1], [[2], []], ("dst_blocks_list[1]", "equal")),
    (SRC, DST, [1, 2], [[2]], ("dst_blocks_list[0]", "2", "1", "equal")),
    (SRC, DST, [1], [[2], [3, 4]], ("dst_blocks_list[1]", "equal")),
    (SRC, DST, [8], [[2]], ("src_blocks[0]", "8")),
    (SRC, DST, [0, 1], [[2, 3], [4, 6]], ("dst_blocks_list[1][1]=6", "[0, 6)")),
    (SRC, DST, [-1], [[2]], ("src_blocks[0]", "-1")),
    (SRC, DST, [1], [[-2]], ("dst_blocks_list[0][0]", "-2")),
    (SRC, DST, [1], [[2**64]], ("dst_blocks_list[0][0]",)),
    (SRC, Use("wide"), [1], [[2]], ("block sizes", "64", "68")),
    (SRC, Use("few"), [1], [[2]], ("num_tensors", "4", "3")),
    *((Use(src), Use(dst), [1], [[2]], ("HOST",)) for src, dst in (("host", "host"), ("host", "cpu"), ("cpu", "cpu"))),
]
#: What is no host memory without an id, and parts of the reason.
INCOMPLETE: list[tuple[Cache, tuple[str, ...]]] = [
    (Cache(-1, [64] * 4, host_desc(placement=DEVICE)), ("cache_id=-1", "kDevice")),
    (Cache(-1, [64] * 4, host_desc(num_tensors=0)), ("num_tensors=0",)),
    (Cache(-1, [64] * 4, CacheDesc(HOST, 4, shape=[8, 16])), ("DT_UNDEFINED",)),
    (Cache(-1, [64] * 4, host_desc(shape=[])), ("shape is empty",)),
    (Cache(-1, [64] * 4, host_desc(shape=[8, 0])), ("shape", "0")),
    (Cache(-1, [64] * 4, host_desc(shape=[8, -16])), ("shape", "-16")),
    (Cache(-1, [64] * 3, host_desc()), ("tensor_addrs has 3", "4")),
    (Cache(-1, [], host_desc()), ("tensor_addrs has 0",)),
    (Cache(-1, [64, 64, 0, 64], host_desc()), ("tensor_addrs[2]=0",)),
    (Cache(-1, [64, 64, -1, 64], host_desc()), ("tensor_addrs[2]", "uint64")),
    (Cache(-1, [64, 64, 2**64 - 8, 64], host_desc()), ("address space",)),
    (Cache(0, [64] * 4, host_desc()), ("cache_id=0",)),
    (Cache(-2, [64] * 4, host_desc()), ("cache_id=-2",)),
    (Cache(2**63, [64] * 4, host_desc()), ("cache_id", "int64")),
    (Cache(), ("cache_id=-1", "kDevice")),
]
UNKNOWN = Cache(99, [64] * 4, host_desc())
BLOCK_ROWS: list[Row] = [
    *((BAD, parts, ("CopyKvBlocks", *args)) for *args, parts in LISTS),
    *((BAD, parts, ("CopyKvBlocks", cache, SRC, [1], [[2]])) for cache, parts in INCOMPLETE),
    *((BAD, parts, ("CopyKvBlocks", SRC, cache, [1], [[2]])) for cache, parts in INCOMPLETE),
    (GONE, ("src_cache", "99"), ("CopyKvBlocks", UNKNOWN, SRC, [1], [[2]])),
    (GONE, ("dst_cache", "99"), ("CopyKvBlocks", SRC, UNKNOWN, [1], [[2]])),
]
#: (src_batch_index, dst_batch_index, offset, size), parts of the reason
RANGES: list[tuple[tuple[int, ...], tuple[str, ...]]] = [
    ((8, 0), ("src_batch_index=8",)),
    ((0, 6), ("dst_batch_index=6",)),
    ((0, 0, 64), ("offset=64",)),
    ((0, 0, 1, 64), ("offset=1", "size=64")),
]
ROW_ROWS: list[Row] = [
    *((BAD, parts, ("CopyKvCache", SRC, DST, *args)) for args, parts in RANGES),
    (BAD, ("row shapes",), ("CopyKvCache", SRC, Use("wide"))),
    (BAD, ("4 tensors", "3"), ("CopyKvCache", SRC, Use("few"))),
    (BAD, ("src_cache", "kHost"), ("CopyKvCache", Use("host"), SRC)),
]


@pytest.mark.parametrize("rows", [BLOCK_ROWS, ROW_ROWS], ids=["CopyKvBlocks", "CopyKvCache"])
def test_r08_r13_what_is_refused_has_its_code_and_changes_nothing(one: LocalEnd, rows: list[Row]) -> None:
    before = {name: one.do(made, name, shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())}
    one.do(host_memory, "cpu", ON_HOST, 9)
    # Tensors that overlap without being the same.
    shifted = Cache(-1, [one.world.memory["cache one"].tensor_addrs[0] + 64], host_desc(num_tensors=1))
    overlap: Row = (BAD, ("overlap",), ("CopyKvBlocks", shifted, Use("one"), [1], [[2]]))
    all_unchanged([one], [*SHAPES, "cpu"], [*rows, overlap])
    # With a size, rows of unequal length will do (interface R8), and the host may be the destination.
    assert one.do(run, "CopyKvCache", SRC, Use("wide"), 0, 0, 0, 64) is OK
    assert one.do(run, "CopyKvCache", SRC, Use("host"), 1, 2) is OK
    for got, old, source in zip(one.do(show, "wide"), before["wide"], before["src"], strict=True):
        old[0, :64] = source[0]
        np.testing.assert_array_equal(got, old)
    same_bytes(one.do(show, "host"), moved(before["host"], before["src"], [(2, 1)]))
