"""register_cache, register_blocks_cache, unregister_cache, remap_registered_memory (interface §6.6, §6.7, §6.15)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
)
from llm_datadist.errors import NotLinked
from tests.support.memory import desc, equal, pool, refused, state, user_memory
from tests.support.world import World, fill, read

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.conftest import Pair
    from tests.support.ends import LocalEnd

    Bytes = list[NDArray[np.uint8]]

pytestmark = pytest.mark.covers(
    "MemInfo",
    "CacheManager: register_blocks_cache register_cache remap_registered_memory unregister_cache",
    "errors.NotLinked",
)

FAKE = [1, 4096]


@pytest.fixture
def world(end: LocalEnd) -> World:
    """An initialised end with both pools."""
    end.start("PROMPT", 1)
    return end.world


# --- registering ------------------------------------------------------------------------------------------------------


def test_a_fake_address_is_registered_untouched_and_unregistered(world: World) -> None:
    nothing = state(world)
    for number, placement in enumerate(Placement):
        for register in (world.cm.register_cache, world.cm.register_blocks_cache):
            cache = register(desc(placement=placement), FAKE)
            assert cache.tensor_addrs == FAKE
            assert cache.is_blocks_cache is (register == world.cm.register_blocks_cache)
            assert world.dd.statistics().caches.registered == 1
            world.cm.unregister_cache(cache.cache_id)
            assert state(world) == nothing
        assert cache.cache_id == 2 * number + 2


@pytest.mark.parametrize("call", ["register_cache", "register_blocks_cache"])
def test_registering_and_unregistering_change_no_byte_of_the_memory(world: World, call: str) -> None:
    addrs = user_memory(world, "mine", desc())
    for array in world.memory["mine"]:
        array[:] = np.arange(array.size) % 251
    before = [array.copy() for array in world.memory["mine"]]
    cache = getattr(world.cm, call)(desc(), addrs)
    equal([tensor.reshape(-1) for tensor in read(cache)], before)
    world.cm.unregister_cache(cache.cache_id)
    equal(world.memory["mine"], before)


def test_addresses_may_repeat_and_ids_come_from_the_same_counter_as_allocations(world: World) -> None:
    first = world.cm.register_blocks_cache(desc(), FAKE)
    allocated = world.cm.allocate_cache(desc())
    second = world.cm.register_cache(desc(), FAKE)
    assert [first.cache_id, allocated.cache_id, second.cache_id] == [1, 2, 3]
    world.cm.unregister_cache(3)
    assert world.cm.register_cache(desc(), FAKE).cache_id == 4


def test_numpy_addresses_are_integers_too(world: World) -> None:
    cache = world.cm.register_cache(desc(), [np.uint64(2**40), np.int64(4096)])  # type: ignore[list-item]
    assert cache.tensor_addrs == [2**40, 4096]
    assert all(type(address) is int for address in cache.tensor_addrs)


def test_keys_of_registered_caches_first_one_stays_for_rows_newest_wins_for_blocks(world: World) -> None:
    world.cm.register_cache(desc(), FAKE, [CacheKey(1, 1)])
    world.cm.register_cache(desc(), FAKE, [CacheKey(1, 2), CacheKey(1, 1), CacheKey(1, 2)])
    world.cm.register_blocks_cache(desc(), FAKE, BlocksCacheKey(1, 0))
    world.cm.register_blocks_cache(desc(), FAKE, BlocksCacheKey(1, 0))
    assert {(each.key, each.cache_id, each.row) for each in world.dd.statistics().keys} == {
        ("(0, 1, 0)", 1, 0),
        ("(0, 2, 0)", 2, 0),
        ("(2, 0, 0)", 4, 0),
    }


def test_registered_keys_do_not_disturb_allocated_ones(world: World) -> None:
    world.cm.allocate_cache(desc(), [CacheKey(1, 1)])
    world.cm.register_cache(desc(), FAKE, [CacheKey(1, 1), CacheKey(1, 2**64 - 1)])
    assert [(each.key, each.cache_id) for each in world.dd.statistics().keys] == [("(0, 1, 0)", 1)]


# --- unregistering ----------------------------------------------------------------------------------------------------


def test_unregister_drops_keys_and_is_a_noop_for_ids_that_are_not_registered(world: World) -> None:
    world.cm.register_cache(desc(), FAKE, [CacheKey(1, 1), CacheKey(1, 2)])
    allocated = world.caches["allocated"] = world.cm.allocate_cache(desc(), [CacheKey(1, 3)])
    world.cm.unregister_cache(1)
    assert [each.cache_id for each in world.dd.statistics().keys] == [allocated.cache_id]
    once = state(world)
    for cache_id in (1, 999, 0, -1, -(2**63), 2**63 - 1, allocated.cache_id):
        world.cm.unregister_cache(cache_id)
    assert state(world) == once


def test_memory_of_a_pool_registered_again_survives_unregister(world: World) -> None:
    memory = world.cm.allocate_blocks_cache(desc())
    alias = world.cm.register_blocks_cache(desc(), list(memory.tensor_addrs))
    before = fill(memory, 1)
    equal(read(alias), before)
    world.cm.unregister_cache(alias.cache_id)
    equal(read(memory), before)
    world.cm.deallocate_blocks_cache(memory)
    assert pool(world).used_bytes == 0


# --- remap ------------------------------------------------------------------------------------------------------------

GOOD = MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, 64)


def remap(world: World, infos: Any) -> None:
    before = state(world)
    world.cm.remap_registered_memory(infos)
    assert state(world) == before


def test_remap_checks_and_does_nothing_when_linked(local_pair: Pair) -> None:
    local_pair.start()
    for infos in (GOOD, [GOOD], [GOOD, GOOD]):
        local_pair.prompt.do(remap, infos)


def test_remap_without_a_link_is_not_yet_link(world: World) -> None:
    with refused(world, NotLinked, "remap_registered_memory", status=LLMStatusCode.LLM_NOT_YET_LINK):
        world.cm.remap_registered_memory(GOOD)
