"""CopyKvBlocks (interface R13): device to device, device to host and back, one source list to every inner list, its
codes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.cpp_api import Cache, CacheDesc, DataType, LlmDataDist, LlmRole
from llm_datadist.testing import StagedDevice
from tests.support.cpp import (
    BAD,
    DEVICE,
    GONE,
    HOST,
    OK,
    Shape,
    addresses,
    attempt,
    dist,
    made,
    run,
    show,
    start,
    unchanged,
)
from tests.support.devices import BrokenDevice
from tests.support.moves import Use, moved, same_bytes

if TYPE_CHECKING:
    from llm_datadist.cpp_api import CachePlacement
    from tests.support.ends import LocalEnd
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers("cpp_api: Cache CacheDesc LlmDataDist Undefined", "cpp_api.LlmDataDist.CopyKvBlocks")


@pytest.fixture(params=["plain", "staged"])
def one(request: pytest.FixtureRequest, end: LocalEnd) -> LocalEnd:
    """Return an end whose device needs staging buffers, or does not."""
    device = StagedDevice() if request.param == "staged" else None
    end.do(start, LlmRole.kMix, 1, "auto", {}, device)
    return end


@pytest.fixture
def plain(end: LocalEnd) -> LocalEnd:
    end.do(start, LlmRole.kMix, 1, "auto", {})
    return end


def cpu_cache(world: World, name: str, shape: Shape, seed: int) -> Bytes:
    """Put host memory without an id behind a name: cache_id -1, cache_desc and tensor_addrs are all there is."""
    random = np.random.default_rng(seed)
    arrays = [random.integers(0, 2**31, (shape.rows, shape.width), dtype=np.int32) for _ in range(shape.tensors)]
    world.memory[f"memory of {name}"] = arrays
    world.memory[f"cache {name}"] = Cache(-1, addresses(arrays), shape.desc)
    return show(world, name)


def test_r13_the_parameters_have_the_names_of_the_page() -> None:
    parameters = list(inspect.signature(LlmDataDist.CopyKvBlocks).parameters)
    assert parameters == ["self", "src_cache", "dst_cache", "src_blocks", "dst_blocks_list"]


def test_r13_seed_example_device_to_device_one_list_to_every_inner_list(one: LocalEnd) -> None:
    src, dst = one.do(made, "src", Shape(), 1), one.do(made, "dst", Shape(), 2)
    assert one.do(run, "CopyKvBlocks", Use("src"), Use("dst"), [1, 2], [[3, 4], [5, 6]]) is OK
    same_bytes(one.do(show, "dst"), moved(dst, src, [(3, 1), (4, 2), (5, 1), (6, 2)]))
    same_bytes(one.do(show, "src"), src)


def test_r13_inside_one_cache_a_shared_block_is_copied_before_it_is_written(one: LocalEnd) -> None:
    kv = one.do(made, "kv", Shape(), 1)
    assert one.do(run, "CopyKvBlocks", Use("kv"), Use("kv"), [0], [[1], [2], [7]]) is OK
    same_bytes(one.do(show, "kv"), moved(kv, kv, [(1, 0), (2, 0), (7, 0)]))


@pytest.mark.parametrize("by_id", [True, False])
def test_r13_device_to_host_and_back(one: LocalEnd, by_id: bool) -> None:
    device, shape = one.do(made, "kv", Shape(), 1), Shape(rows=5, placement=HOST)
    host = one.do(made if by_id else cpu_cache, "cpu", shape, 2)
    assert one.do(run, "CopyKvBlocks", Use("kv"), Use("cpu"), [6, 7, 2], [[0, 1, 4], [3, 2, 3]]) is OK
    host = moved(host, device, [(0, 6), (1, 7), (4, 2), (3, 6), (2, 7), (3, 2)])
    same_bytes(one.do(show, "cpu"), host)
    same_bytes(one.do(show, "kv"), device)
    assert one.do(run, "CopyKvBlocks", Use("cpu"), Use("kv"), [0, 4], [[0, 1], [7, 6]]) is OK
    same_bytes(one.do(show, "kv"), moved(device, host, [(0, 0), (1, 4), (7, 0), (6, 4)]))
    same_bytes(one.do(show, "cpu"), host)


def test_r10_a_swap_uses_the_staging_of_the_device(end: LocalEnd) -> None:
    end.do(start, LlmRole.kMix, 1, "auto", {}, StagedDevice())
    end.do(made, "kv", Shape(), 1)
    end.do(cpu_cache, "cpu", Shape(placement=HOST), 2)
    assert end.do(run, "CopyKvBlocks", Use("kv"), Use("cpu"), [0], [[0]]) is OK
    assert end.world.dd.statistics().swap.staging_bytes == 0
    assert end.do(run, "CopyKvBlocks", Use("cpu"), Use("kv"), [0], [[0]]) is OK
    assert end.world.dd.statistics().swap.staging_bytes == 4 * 64


def test_a_device_that_fails_is_a_status_and_not_an_exception(end: LocalEnd) -> None:
    device = BrokenDevice()
    device.broken = "copy_to_device"
    end.do(start, LlmRole.kMix, 1, "auto", {}, device)
    end.do(made, "kv", Shape(), 1)
    end.do(cpu_cache, "cpu", Shape(placement=HOST), 2)
    status, text = end.do(attempt, "CopyKvBlocks", Use("cpu"), Use("kv"), [0], [[0]])
    assert (status.name, text) == ("LLM_FAILED", "device is lost")
    assert isinstance(dist(end.world).last_error, OSError)
    device.broken = ""
    assert end.do(run, "CopyKvBlocks", Use("cpu"), Use("kv"), [0], [[0]]) is OK


@pytest.mark.parametrize(
    ("sources", "lists"),
    [
        ([0, 1, 2], [[1, 2, 3]]),  # a chain: block 0 arrives everywhere
        ([0, 1], [[1, 2], [3, 4]]),  # the second list sees what the first one wrote
        ([1, 0], [[0, 1]]),
        ([0, 1], [[5, 5], [5, 6]]),
        ([3, 4], [[3, 4]]),  # nothing
    ],
)
def test_r26_pairs_take_effect_list_by_list_in_the_order_given(
    plain: LocalEnd, sources: list[int], lists: list[list[int]]
) -> None:
    wanted = plain.do(made, "kv", Shape(), 1)
    assert plain.do(run, "CopyKvBlocks", Use("kv"), Use("kv"), sources, lists) is OK
    for tensor in wanted:
        for targets in lists:
            for from_, to in zip(sources, targets, strict=True):
                tensor[to] = tensor[from_].copy()
    same_bytes(plain.do(show, "kv"), wanted)


def test_r13_random_lists(plain: LocalEnd) -> None:
    random = np.random.default_rng(0)
    src, dst = plain.do(made, "src", Shape(rows=50), 1), plain.do(made, "dst", Shape(rows=70), 2)
    for _ in range(20):
        sources = random.integers(0, 50, int(random.integers(1, 40)))
        lists = random.integers(0, 70, (int(random.integers(1, 5)), len(sources)))
        assert plain.do(run, "CopyKvBlocks", Use("src"), Use("dst"), sources.tolist(), lists.tolist()) is OK
        dst = moved(dst, src, [(int(to), int(at)) for row in lists for at, to in zip(sources, row, strict=True)])
        same_bytes(plain.do(show, "dst"), dst)


ALONE = {"src": Shape(), "dst": Shape(rows=6), "wide": Shape(width=17), "few": Shape(tensors=3)}
ON_HOST = {"host": Shape(placement=HOST)}


@pytest.mark.parametrize(
    ("src", "dst", "sources", "lists", "parts"),
    [
        ("src", "dst", [], [[]], ("src_blocks is empty",)),
        ("src", "dst", [], [[1]], ("src_blocks is empty",)),
        ("src", "dst", [1], [], ("dst_blocks_list is empty",)),
        ("src", "dst", [1], [[2], []], ("dst_blocks_list[1]", "equal")),
        ("src", "dst", [1, 2], [[2]], ("dst_blocks_list[0]", "2", "1", "equal")),
        ("src", "dst", [1], [[2], [3, 4]], ("dst_blocks_list[1]", "equal")),
        ("src", "dst", [8], [[2]], ("src_blocks[0]", "8")),
        ("src", "dst", [0, 1], [[2, 3], [4, 6]], ("dst_blocks_list[1][1]=6", "[0, 6)")),
        ("src", "dst", [-1], [[2]], ("src_blocks[0]", "-1")),
        ("src", "dst", [1], [[-2]], ("dst_blocks_list[0][0]", "-2")),
        ("src", "dst", [1], [[2**64]], ("dst_blocks_list[0][0]",)),
        ("src", "wide", [1], [[2]], ("block sizes", "64", "68")),
        ("src", "few", [1], [[2]], ("num_tensors", "4", "3")),
        ("host", "host", [1], [[2]], ("HOST",)),
        ("host", "cpu", [1], [[2]], ("HOST",)),
        ("cpu", "cpu", [1], [[2]], ("HOST",)),
    ],
)
def test_r13_wrong_arguments_are_invalid_parameters(
    plain: LocalEnd, src: str, dst: str, sources: list[int], lists: list[list[int]], parts: tuple[str, ...]
) -> None:
    for seed, (name, shape) in enumerate((ALONE | ON_HOST).items()):
        plain.do(made, name, shape, seed)
    plain.do(cpu_cache, "cpu", Shape(placement=HOST), 9)
    names = [*ALONE, *ON_HOST, "cpu"]
    unchanged([plain], names, BAD, parts, "CopyKvBlocks", Use(src), Use(dst), sources, lists)


def host_desc(num_tensors: int = 4, placement: CachePlacement = HOST, shape: list[int] | None = None) -> CacheDesc:
    return CacheDesc(placement, num_tensors, DataType.DT_INT32, [8, 16] if shape is None else shape)


@pytest.mark.parametrize(
    ("cache", "parts"),
    [
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
    ],
)
def test_r13_a_cache_without_an_id_must_be_complete_host_memory(
    plain: LocalEnd, cache: Cache, parts: tuple[str, ...]
) -> None:
    plain.do(made, "kv", Shape(), 1)
    unchanged([plain], ["kv"], BAD, parts, "CopyKvBlocks", cache, Use("kv"), [1], [[2]])
    unchanged([plain], ["kv"], BAD, parts, "CopyKvBlocks", Use("kv"), cache, [1], [[2]])


def test_r13_an_unknown_id_does_not_exist_whatever_else_the_struct_says(plain: LocalEnd) -> None:
    plain.do(made, "kv", Shape(), 1)
    unknown = Cache(99, [64] * 4, host_desc())
    unchanged([plain], ["kv"], GONE, ("src_cache", "99"), "CopyKvBlocks", unknown, Use("kv"), [1], [[2]])
    unchanged([plain], ["kv"], GONE, ("dst_cache", "99"), "CopyKvBlocks", Use("kv"), unknown, [1], [[2]])


def test_r13_an_id_is_looked_up_and_nothing_else_of_the_struct_is_read(plain: LocalEnd) -> None:
    src, dst = plain.do(made, "src", Shape(), 1), plain.do(made, "dst", Shape(), 2)
    assert plain.do(run, "CopyKvBlocks", Cache(1, [1], CacheDesc(HOST, 9)), Cache(2), [1], [[2]]) is OK
    same_bytes(plain.do(show, "dst"), moved(dst, src, [(2, 1)]))


def test_tensors_that_overlap_without_being_the_same_are_refused(plain: LocalEnd) -> None:
    plain.do(made, "kv", Shape(tensors=1), 1)
    shifted = Cache(-1, [plain.world.memory["cache kv"].tensor_addrs[0] + 64], host_desc(num_tensors=1))
    unchanged([plain], ["kv"], BAD, ("overlap",), "CopyKvBlocks", shifted, Use("kv"), [1], [[2]])


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


def test_r13_not_initialised_is_a_failure_and_none_a_type_error(plain: LocalEnd) -> None:
    args: list[Any] = [Cache(1), Cache(2), [1], [[2]]]
    assert LlmDataDist(1, LlmRole.kMix).CopyKvBlocks(*args).name == "LLM_FAILED"
    for i in range(4):
        with pytest.raises(TypeError):
            plain.do(run, "CopyKvBlocks", *args[:i], None, *args[i + 1 :])
