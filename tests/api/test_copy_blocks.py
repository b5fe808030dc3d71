"""copy_blocks: blocks inside one blocks cache (seed copy_blocks, interface §6.8, R26)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMStatusCode, Placement
from llm_datadist.errors import CacheNotFound, NoneArgument, ParamError
from tests.support.ends import LocalEnd
from tests.support.memory import desc, equal, refused, user_memory
from tests.support.world import World, fill, read

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.covers("CacheDesc.placement", "CacheManager.copy_blocks")

BLOCKS = 10


@pytest.fixture
def world(end: LocalEnd) -> World:
    """One filled blocks cache "kv" of 2 tensors, 10 blocks of 64 bytes, and a neighbour."""
    end.start("PROMPT", 1)
    allocate(end.world, "kv", shape=(BLOCKS, 16))
    allocate(end.world, "neighbour", shape=(BLOCKS, 16))
    return end.world


def allocate(world: World, name: str, **geometry: Any) -> None:
    world.caches[name] = world.cm.allocate_blocks_cache(desc(**geometry))
    fill(world.caches[name], len(world.caches))


def check(world: World, info: Any) -> None:
    """The pairs take effect one after the other, in the order given, and not one byte else changes."""
    cache, neighbour = world.caches["kv"], world.caches["neighbour"]
    expected, beside = read(cache), read(neighbour)
    for source, targets in info.items():
        for target in targets:
            for tensor in expected:
                tensor[int(target)] = tensor[int(source)]
    world.cm.copy_blocks(cache, info)
    equal(read(cache), expected)
    equal(read(neighbour), beside)
    assert world.dd.statistics().pins == 0


@pytest.mark.parametrize(
    "info",
    [
        {2: [0, 1]},  # the example of the page
        {0: [9]},
        {0: [1], 5: [6, 7, 8], 9: [4]},
        {0: [5], 1: [6], 2: [7]},
        {3: []},
        {},
        {True: [0, 2]},
    ],
)
def test_seed_copy_blocks_copies_each_source_to_its_destinations(world: World, info: dict[int, list[int]]) -> None:
    check(world, info)


def test_seed_copy_blocks_the_whole_cache_from_one_block(world: World) -> None:
    check(world, {4: list(range(BLOCKS))})


@pytest.mark.parametrize(
    "info",
    [
        {1: [2], 2: [3]},  # a chain: 3 gets block 1
        {2: [3], 1: [2]},  # not a chain: 3 gets block 2
        {1: [2], 2: [1]},  # 1 stays, no exchange
        {1: [5], 2: [5]},  # a duplicate: the last one wins
        {1: [5, 5, 5]},
        {4: [4]},
        {4: [4, 5], 5: [4, 6]},
        {0: [1], 1: [2], 2: [3], 3: [4], 4: [5], 5: [6], 6: [7], 7: [8], 8: [9]},
        {8: [9], 7: [8], 6: [7], 5: [6], 4: [5], 3: [4], 2: [3], 1: [2], 0: [1]},
    ],
)
def test_r26_chains_and_duplicates_take_effect_in_the_order_given(world: World, info: dict[int, list[int]]) -> None:
    check(world, info)


def test_r26_a_long_chain_of_large_blocks(world: World) -> None:
    allocate(world, "kv", num_tensors=2, shape=(16, 2**16))
    check(world, {n: [n + 1] for n in range(15)})


def test_many_large_blocks_that_may_go_at_once(world: World) -> None:
    allocate(world, "kv", num_tensors=3, shape=(32, 2**15))
    check(world, {n: [n + 16] for n in range(16)})


@pytest.fixture(scope="module")
def one_world() -> Iterator[World]:
    """A world for all of hypothesis' examples."""
    end = LocalEnd("hypothesis")
    end.start("PROMPT", 1)
    yield end.world
    end.stop()


@settings(deadline=None, max_examples=150)
@given(info=st.dictionaries(st.integers(0, 7), st.lists(st.integers(0, 7), max_size=5), max_size=6))
def test_r26_any_dict_takes_effect_in_the_order_given(one_world: World, info: dict[int, list[int]]) -> None:
    if not one_world.caches:
        allocate(one_world, "kv", shape=(8, 3), data_type=DataType.DT_INT8)
        allocate(one_world, "neighbour", shape=(8, 3), data_type=DataType.DT_INT8)
    fill(one_world.caches["kv"], 1)
    check(one_world, info)


def test_numpy_integers_are_block_numbers_too(world: World) -> None:
    numbers = np.array([[3, 4], [7, 8]])
    check(world, {np.int64(1): list(numbers[0]), 2: [np.uint8(9), *numbers[1]]})


@pytest.mark.parametrize("placement", Placement)
def test_registered_memory_of_either_placement(world: World, placement: Placement) -> None:
    geometry = desc(shape=(BLOCKS, 16), placement=placement)
    world.caches["kv"] = world.cm.register_blocks_cache(geometry, user_memory(world, "mine", geometry))
    fill(world.caches["kv"], 5)
    check(world, {2: [0, 1]})


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "kind", "parts"),
    [
        (None, NoneArgument, ["copy_block_info", "None"]),
        ([(1, [2])], TypeError, ["copy_block_info", "list"]),
        ({1: (2, 3)}, TypeError, ["copy_block_info[1]", "tuple"]),
        ({1: np.array([2])}, TypeError, ["copy_block_info[1]", "ndarray"]),
        ({1: 2}, TypeError, ["copy_block_info[1]", "int"]),
        ({1: {2}}, TypeError, ["copy_block_info[1]", "set"]),
        ({0: [1], 1: None}, NoneArgument, ["copy_block_info[1]", "None"]),
        ({0: [1], 1: [3, "2"]}, TypeError, ["copy_block_info[1][1]", "'2'"]),
        ({0: [1], 1: [2.0]}, TypeError, ["copy_block_info[1][0]", "2.0"]),
        ({1: [2, np.float64(3)]}, TypeError, ["copy_block_info[1][1]", "3.0"]),
        ({1: [[2]]}, TypeError, ["copy_block_info[1][0]", "[2]"]),
        ({1: [None]}, NoneArgument, ["copy_block_info[1][0]", "None"]),
        ({"1": [2]}, TypeError, ["key of copy_block_info", "'1'"]),
        ({1.0: [2]}, TypeError, ["key of copy_block_info", "1.0"]),
        ({"1": []}, TypeError, ["key of copy_block_info", "'1'"]),
        ({None: [2]}, NoneArgument, ["key of copy_block_info", "None"]),
        ({-1: [2]}, ParamError, ["key of copy_block_info", "-1"]),
        ({1: [2, -3]}, ParamError, ["copy_block_info[1][1]", "-3"]),
        ({1: [2**64]}, ParamError, ["copy_block_info[1][0]", str(2**64)]),
        ({10: [2]}, ParamError, ["copy_block_info", "10", "sources"]),
        ({0: [1], 1: [2, 10]}, ParamError, ["copy_block_info", "10", "destinations"]),
        ({0: [2**63 - 1]}, ParamError, ["copy_block_info", str(2**63 - 1)]),
    ],
)
def test_r01_a_wrong_copy_block_info_is_refused_and_nothing_happens(
    world: World, info: Any, kind: type[Exception], parts: list[str]
) -> None:
    with refused(world, kind, *parts):
        world.cm.copy_blocks(world.caches["kv"], info)


@pytest.mark.parametrize(
    ("cache", "kind", "parts"),
    [
        (None, NoneArgument, ["cache", "None"]),
        (1, TypeError, ["cache", "int"]),
        ({1: [2]}, TypeError, ["cache", "dict"]),
    ],
)
def test_r01_a_wrong_cache_is_refused(world: World, cache: Any, kind: type[Exception], parts: list[str]) -> None:
    with refused(world, kind, *parts):
        world.cm.copy_blocks(cache, {1: [2]})


def test_a_continuous_cache_is_refused(world: World) -> None:
    world.caches["rows"] = world.cm.allocate_cache(desc())
    with refused(world, ParamError, "cache", "not a blocks cache"):
        world.cm.copy_blocks(world.caches["rows"], {0: [1]})


def test_a_cache_that_is_not_there_is_not_found(world: World) -> None:
    status = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    gone = world.cm.allocate_blocks_cache(desc(), BlocksCacheKey(1))
    world.cm.deallocate_blocks_cache(gone)
    geometry = CacheDesc(1, [4, 16], DataType.DT_FLOAT, Placement.HOST)
    cpu = Cache.create_cpu_cache(geometry, user_memory(world, "cpu", geometry))
    for cache in (gone, cpu):
        with refused(world, CacheNotFound, "copy_blocks", f"id {cache.cache_id}", status=status):
            world.cm.copy_blocks(cache, {0: [1]})


def test_a_handle_of_another_kind_of_cache_with_that_id_is_refused(world: World) -> None:
    world.caches["rows"] = rows = world.cm.allocate_cache(desc())
    stale = Cache(rows.cache_id, desc(), list(rows.tensor_addrs), is_blocks_cache=True)
    with refused(world, ParamError, "copy_blocks", "cache"):
        world.cm.copy_blocks(stale, {0: [1]})
    stale = Cache(world.caches["kv"].cache_id, desc(), [1, 1], is_blocks_cache=False)
    with refused(world, ParamError, "copy_cache", "src"):
        world.cm.copy_cache(rows, stale)
    with refused(world, ParamError, "copy_cache", "dst"):
        world.cm.copy_cache(stale, rows)
