"""Allocating, registering and giving back caches, and the pools they come from (interface §6.1 to §6.7, §6.15, §7).
Wrong arguments by themselves: test_bad_input_*.py."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, Cache, CacheKey, LLMStatusCode, MemInfo, Memtype, Placement
from llm_datadist._cache.geometry import CacheKind, Geometry
from llm_datadist._cache.registry import Effects
from llm_datadist._cache.store import CacheStore
from llm_datadist._deadline import Deadline
from llm_datadist._memory.device import HostDevice
from llm_datadist._memory.guards import Guard, GuardTable
from llm_datadist._memory.host import host_memory_limit
from llm_datadist.config import Options
from llm_datadist.errors import NotLinked, OutOfMemory, ParamError
from llm_datadist.types import LLMRole
from tests.support.memory import cpu_cache, desc, equal, pool, refused, state, user_memory
from tests.support.world import World, fill, make_config, read

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import LocalEnd

pytestmark = pytest.mark.covers(
    "Registry",
    "Cache.cache_id",
    "CacheKeyByIdAndIndex.cache_id",
    "CacheManager: allocate_blocks_cache allocate_cache deallocate_blocks_cache deallocate_cache",
    "CacheManager: register_blocks_cache register_cache remap_registered_memory remove_cache_key unregister_cache",
    "LLMDataDist.check_integrity",
    "LLMStatusCode.LLM_OUT_OF_MEMORY",
    "PoolOptions.parse",
    "MemInfo",
    "errors: NotLinked OutOfMemory",
)

PAGE = 4096
FAKE = [1, 4096]


@pytest.fixture
def world(end: LocalEnd) -> World:
    """An initialised end with both pools, pages of 4 KiB."""
    end.start("PROMPT", 1)
    return end.world


def totals(world: World) -> tuple[int, int]:
    """Bytes used of the device pool, and caches with memory."""
    caches = world.dd.statistics().caches
    return pool(world).used_bytes, caches.live + caches.deferred + caches.draining


# --- allocate and deallocate ------------------------------------------------------------------------------------------


def test_allocated_tensors_are_separate_page_aligned_and_come_from_the_pool_of_their_placement(world: World) -> None:
    for placement, name in ((Placement.DEVICE, "device"), (Placement.HOST, "host")):
        cache = world.cm.allocate_cache(desc(3, (2, 1025), placement=placement))
        assert pool(world, name).used_bytes == 3 * 3 * PAGE  # 8200 bytes each, separately rounded up
        addrs = sorted(cache.tensor_addrs)
        assert len(set(addrs)) == 3
        assert min(np.diff(addrs)) >= 8200
        assert all((addr - addrs[0]) % PAGE == 0 for addr in addrs)
        equal(fill(cache, 1), read(cache))


def test_ids_count_from_one_and_one_descriptor_serves_both_kinds_of_cache(world: World) -> None:
    shared = desc()
    rows, blocks = world.cm.allocate_cache(shared), world.cm.allocate_blocks_cache(shared)
    assert [(each.cache_id, each.is_blocks_cache) for each in (rows, blocks)] == [(1, False), (2, True)]
    with refused(world, ParamError, "cache", "blocks"):
        world.cm.deallocate_cache(blocks)
    with refused(world, ParamError, "cache", "not a blocks cache"):
        world.cm.deallocate_blocks_cache(rows)
    world.cm.deallocate_cache(rows)
    world.cm.deallocate_blocks_cache(blocks)
    assert world.cm.allocate_cache(desc()).cache_id == 3


@pytest.mark.parametrize("kind", ["cache", "blocks_cache"])
def test_deallocate_gives_the_memory_back_empties_the_handle_and_is_a_noop_again(world: World, kind: str) -> None:
    nothing = totals(world)
    cache = getattr(world.cm, f"allocate_{kind}")(desc())
    other = world.caches["other"] = getattr(world.cm, f"allocate_{kind}")(desc())
    fill(other, 3)
    getattr(world.cm, f"deallocate_{kind}")(cache)
    assert cache.tensor_addrs == []
    once = state(world)
    getattr(world.cm, f"deallocate_{kind}")(cache)
    getattr(world.cm, f"deallocate_{kind}")(Cache(999, desc(), [], kind == "blocks_cache"))
    assert state(world) == once
    getattr(world.cm, f"deallocate_{kind}")(other)
    assert totals(world) == nothing


def test_r27_deallocate_blocks_cache_drops_owner_and_key_at_once_and_takes_a_cpu_cache(world: World) -> None:
    key = BlocksCacheKey(1, 7)
    cache = world.cm.allocate_blocks_cache(desc(), key)
    assert [each.cache_id for each in world.dd.statistics().keys] == [1]
    world.cm.deallocate_blocks_cache(cache)
    assert totals(world) == (0, 0)
    assert world.dd.statistics().keys == ()
    world.cm.deallocate_blocks_cache(cache)
    assert world.cm.allocate_blocks_cache(desc(), key).cache_id == 2
    cpu = cpu_cache(world, "cpu", desc(placement=Placement.HOST))
    world.cm.deallocate_blocks_cache(cpu)
    assert cpu.tensor_addrs == []


def test_a_registered_cache_is_emptied_by_deallocate_and_stays_registered(world: World) -> None:
    cache = world.cm.register_cache(desc(), [4096, 8192])
    blocks = world.cm.register_blocks_cache(desc(), [4096, 8192], BlocksCacheKey(1))
    world.cm.deallocate_cache(cache)
    world.cm.deallocate_blocks_cache(blocks)
    assert cache.tensor_addrs == blocks.tensor_addrs == []
    assert world.dd.statistics().caches.registered == 2
    assert len(world.dd.statistics().keys) == 1


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


def test_addresses_may_repeat_and_be_of_numpy_and_ids_come_from_the_same_counter_as_allocations(world: World) -> None:
    first = world.cm.register_blocks_cache(desc(), FAKE)
    allocated = world.cm.allocate_cache(desc())
    second = world.cm.register_cache(desc(), FAKE)
    assert [first.cache_id, allocated.cache_id, second.cache_id] == [1, 2, 3]
    world.cm.unregister_cache(3)
    cache = world.cm.register_cache(desc(), [np.uint64(2**40), np.int64(4096)])  # type: ignore[list-item]
    assert (cache.cache_id, cache.tensor_addrs) == (4, [2**40, 4096])
    assert all(type(address) is int for address in cache.tensor_addrs)


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


# --- out of memory ----------------------------------------------------------------------------------------------------


def test_out_of_memory_names_the_figures_and_leaves_nothing_behind(world: World) -> None:
    keep = world.caches["keep"] = world.cm.allocate_cache(desc(1, (1, 2**22)))
    fill(keep, 1)
    figures = ("pool device", "2 x 16777216 bytes", "requested 33554432", "free 16777216", "largest hole 16777216")
    large, status = desc(2, (1, 2**22)), LLMStatusCode.LLM_OUT_OF_MEMORY
    with refused(world, OutOfMemory, *figures, status=status):
        world.cm.allocate_cache(large, [CacheKey(1, 5)])
    with refused(world, OutOfMemory, *figures, status=status):
        world.cm.allocate_blocks_cache(large, BlocksCacheKey(1, 5))
    assert world.dd.statistics().keys == ()
    world.cm.allocate_cache(desc(1, (1, 2**22)), [CacheKey(1, 5)])


def test_a_full_guard_table_leaves_nothing_behind() -> None:
    options = Options.parse(make_config(), LLMRole.PROMPT)
    store = CacheStore(options, HostDevice(), HostDevice(), bytes(16))
    store._guards.close()
    small = store._guards = GuardTable(slots=4)
    soon = Deadline(10_000)
    geometry = store.allocate(Geometry.of(desc(), CacheKind.CACHE), [], soon).geometry
    keys = [(CacheKey(1, n), n) for n in range(2)]
    for _ in range(3):
        with pytest.raises(OutOfMemory, match="guard table is full"):
            store.allocate(geometry, keys, soon)
        with pytest.raises(OutOfMemory, match="guard table is full"):
            store.register(geometry, [4096, 8192], keys, remote_accessible=True)
        assert small.live == 1
        assert [each.statistics().live_allocations for each in store.pools] == [2, 0]
    store.allocate(geometry, keys[:1], soon)
    store.check_integrity()
    store.close()


class Probe:
    """Stands where an allocation stands, and looks at the guards when it is freed."""

    def __init__(self, guards: GuardTable, watched: list[Guard]) -> None:
        self.guards, self.watched = guards, watched
        self.seen: list[bool] = []

    def free(self) -> None:
        self.seen = [self.guards.load(guard.slot) != guard.generation for guard in self.watched]


def test_readers_are_told_before_the_memory_goes(world: World) -> None:
    store = world.cm._engine.store
    guards = store._guards
    advanced, retired = guards.allocate(), guards.allocate()
    probe = Probe(guards, [advanced, retired])
    freed: Any = SimpleNamespace(storage=SimpleNamespace(tag=1, allocation=probe, private=False), guard=retired)
    store.apply(Effects(advance=[advanced], retire=[retired], free=[freed]))
    assert probe.seen == [True, True]
    assert guards.live == 1
    guards.release(advanced.slot)


def test_effects_that_are_overtaken_by_those_of_the_last_release_harm_nobody(world: World) -> None:
    """remove_cache_key in one thread, the end of the last pin in another: either may be carried out first."""
    store, peer = world.cm._engine.store, object()
    cache = world.cm.allocate_cache(desc(), [CacheKey(1, 77)])
    pin = store.registry.pin(peer, time.monotonic() + 60, key=(0, 77, 0))
    overtaken = store.registry.remove_key((0, 77, 0))
    store.apply(store.registry.release(peer, pin.pin_id))
    other = world.cm.allocate_cache(desc(), [CacheKey(1, 78)])  # its key's guard has the slot that was given back
    store.apply(overtaken)
    store.check_integrity()
    entry, _, binding = store.registry.find(key=(0, 78, 0))
    assert binding is not None
    for guard in (entry.guard, binding.guard):
        assert store.exports.guards.load(guard.slot) == guard.generation
    world.cm.deallocate_cache(cache)
    world.cm.remove_cache_key(CacheKey(1, 78))
    world.cm.deallocate_cache(other)


# --- no pool ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "option"), [(Placement.DEVICE, "mem_pool_cfg"), (Placement.HOST, "host_mem_pool_cfg")]
)
def test_r12_without_a_pool_allocation_names_the_missing_option(
    end: LocalEnd, placement: Placement, option: str
) -> None:
    end.start("PROMPT", 1, **{option: None})
    words = (f"cache_desc.placement={placement.name}", option, "llm.")
    with refused(end.world, ParamError, *words):
        end.world.cm.allocate_cache(desc(placement=placement), [CacheKey(1, 1)])
    with refused(end.world, ParamError, *words):
        end.world.cm.allocate_blocks_cache(desc(placement=placement), BlocksCacheKey(1))
    other = Placement.HOST if placement is Placement.DEVICE else Placement.DEVICE
    end.world.cm.allocate_cache(desc(placement=other))


def test_r12_without_any_pool_giving_back_is_a_noop(end: LocalEnd) -> None:
    end.start("PROMPT", 1, mem_pool_cfg=None, host_mem_pool_cfg=None)
    before = state(end.world)
    end.world.cm.deallocate_cache(Cache(1, desc(), [], is_blocks_cache=False))
    end.world.cm.deallocate_blocks_cache(Cache(1, desc(), [], is_blocks_cache=True))
    end.world.cm.remove_cache_key(CacheKey(1, 1))
    assert state(end.world) == before


# --- pools at init ----------------------------------------------------------------------------------------------------


def test_r11_i6_page_shift_is_16_unless_given_and_capacity_whole_pages(end: LocalEnd) -> None:
    end.start(
        "PROMPT",
        1,
        mem_pool_cfg='{"memory_size": 200000}',
        host_mem_pool_cfg='{"memory_size": 200000, "page_shift": 10}',
    )
    assert [pool(end.world, name).page_bytes for name in ("device", "host")] == [65536, 1024]
    assert [pool(end.world, name).capacity_bytes for name in ("device", "host")] == [3 * 65536, 195 * 1024]


def test_r11_a_pool_larger_than_the_host_is_out_of_memory_naming_both_figures(end: LocalEnd) -> None:
    most, source = host_memory_limit()
    size = (most // 65536 + 1) * 65536
    with pytest.raises(OutOfMemory) as caught:
        end.start("PROMPT", 1, mem_pool_cfg=f'{{"memory_size": {size}}}')
    assert caught.value.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY
    assert f"{size} bytes" in str(caught.value)
    assert f"{most} bytes of {source}" in str(caught.value)
