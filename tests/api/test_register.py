"""register_cache, register_blocks_cache, unregister_cache, remap_registered_memory (interface §6.6, §6.7, §6.15)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
)
from llm_datadist.errors import CacheNotFound, NoneArgument, NotLinked, ParamError
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


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("call", ["register_cache", "register_blocks_cache"])
def test_a_fake_address_is_registered_untouched_and_unregistered(world: World, call: str, placement: Placement) -> None:
    nothing = state(world)
    cache = getattr(world.cm, call)(desc(placement=placement), FAKE)
    assert (cache.cache_id, cache.tensor_addrs) == (1, FAKE)
    assert cache.is_blocks_cache is (call == "register_blocks_cache")
    assert world.dd.statistics().caches.registered == 1
    world.cm.unregister_cache(cache.cache_id)
    assert state(world) == nothing


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


# --- what a peer sees -------------------------------------------------------------------------------------------------


def register_rows(world: World, accessible: bool | None, placement: Placement) -> Bytes:
    """Registered memory inside a pool, so that every transport reaches it."""
    memory = world.caches["memory"] = world.cm.allocate_cache(desc(placement=placement))
    world.caches["kv"] = world.cm.register_cache(
        desc(placement=placement), list(memory.tensor_addrs), [CacheKey(1, 1)], accessible
    )
    return fill(world.caches["kv"], 1)


def unregister(world: World) -> Bytes:
    world.cm.unregister_cache(world.caches["kv"].cache_id)
    return read(world.caches["kv"])


def pull(world: World, key: CacheKey | CacheKeyByIdAndIndex) -> tuple[Bytes, Bytes]:
    world.caches["kv"] = cache = world.cm.allocate_cache(desc())
    before = fill(cache, 2)
    world.cm.pull_cache(key, cache, 1)
    return before, read(cache)


def pull_fails(world: World, key: CacheKey | CacheKeyByIdAndIndex) -> tuple[type[BaseException], LLMStatusCode, bool]:
    cache = world.cm.allocate_cache(desc())
    before = fill(cache, 2)
    with pytest.raises((ParamError, CacheNotFound)) as caught:
        world.cm.pull_cache(key, cache, 1)
    untouched = all(np.array_equal(one, other) for one, other in zip(before, read(cache), strict=True))
    return type(caught.value), caught.value.status_code, untouched


@pytest.mark.parametrize("placement", Placement)
def test_r16_none_means_remote_accessible_for_both_placements(pair: Pair, placement: Placement) -> None:
    pair.start()
    source = pair.prompt.do(register_rows, None, placement)
    for _ in range(2):  # pulling consumes no key of a registered cache
        before, after = pair.decoder.do(pull, CacheKey(1, 1))
        for s, b, a in zip(source, before, after, strict=True):
            b[1] = s[0]
            np.testing.assert_array_equal(a, b)
    equal(pair.prompt.do(unregister), source)
    refused_as = pair.decoder.do(pull_fails, CacheKey(1, 1))
    assert refused_as == (CacheNotFound, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, True)


def copy_rows(world: World) -> tuple[Bytes, Bytes]:
    before = read(world.caches["kv"])
    world.cm.copy_cache(world.caches["kv"], world.caches["kv"], 3, 0)
    return before, read(world.caches["kv"])


def test_r16_false_refuses_remote_access_to_that_cache_and_nothing_else(pair: Pair) -> None:
    pair.start()
    pair.prompt.do(register_rows, False, Placement.DEVICE)
    for key in (CacheKey(1, 1), CacheKeyByIdAndIndex(1, 2, 0)):
        kind, status, untouched = pair.decoder.do(pull_fails, key)
        assert issubclass(kind, ParamError)
        assert (status, untouched) == (LLMStatusCode.LLM_PARAM_INVALID, True)
    before, after = pair.prompt.do(copy_rows)
    for b in before:
        b[3] = b[0]
    equal(after, before)
    pair.decoder.do(pull, CacheKeyByIdAndIndex(1, 1, 0))


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


@pytest.mark.parametrize(
    ("infos", "kind", "parts"),
    [
        ([], ParamError, ["mem_infos", "empty"]),
        (None, NoneArgument, ["mem_infos[0]", "None"]),
        ([GOOD, None], NoneArgument, ["mem_infos[1]", "None"]),
        (4096, ParamError, ["mem_infos[0]", "int"]),
        ((GOOD,), ParamError, ["mem_infos[0]", "tuple"]),
        ([GOOD, "x"], ParamError, ["mem_infos[1]", "str"]),
        (MemInfo(Memtype.MEM_TYPE_HOST, 4096, 64), ParamError, ["mem_infos[0]", "MEM_TYPE_HOST"]),
        ([GOOD, MemInfo(Memtype.MEM_TYPE_DEVICE, 0, 64)], ParamError, ["mem_infos[1]", "addr", "0"]),
        (MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, 0), ParamError, ["mem_infos[0]", "size", "0"]),
        (MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, -1), ParamError, ["mem_infos[0]", "size", "-1"]),
    ],
)
def test_remap_refuses(world: World, infos: Any, kind: type[Exception], parts: list[str]) -> None:
    with refused(world, kind, *parts):
        world.cm.remap_registered_memory(infos)


def test_remap_without_a_link_is_not_yet_link(world: World) -> None:
    with refused(world, NotLinked, "remap_registered_memory", status=LLMStatusCode.LLM_NOT_YET_LINK):
        world.cm.remap_registered_memory(GOOD)


# --- wrong arguments --------------------------------------------------------------------------------------------------

KEYS = [CacheKey(1, n) for n in range(5)]


@pytest.mark.parametrize(
    ("arguments", "kind", "parts"),
    [
        ((None, FAKE), NoneArgument, ["cache_desc", "None"]),
        (([1], FAKE), TypeError, ["cache_desc", "list"]),
        ((desc(), None), NoneArgument, ["addrs", "None"]),
        ((desc(), tuple(FAKE)), TypeError, ["addrs", "tuple"]),
        ((desc(), np.array(FAKE)), TypeError, ["addrs", "ndarray"]),
        ((desc(), 4096), TypeError, ["addrs", "int"]),
        ((desc(), [4096, None]), NoneArgument, ["addrs[1]", "None"]),
        ((desc(), [4096, "8192"]), TypeError, ["addrs[1]", "'8192'"]),
        ((desc(), [4096.0, 8192]), TypeError, ["addrs[0]", "4096.0"]),
        ((desc(), [4096, -1]), ParamError, ["addrs[1]", "-1"]),
        ((desc(), [4096, 2**64]), ParamError, ["addrs[1]", str(2**64)]),
        ((desc(), [4096, 2**64 - 8]), ParamError, ["addrs", str(2**64 - 8), "address space"]),
        ((desc(), []), ParamError, ["addrs", "empty"]),
        ((desc(), [4096]), ParamError, ["addrs", "1 addresses", "2"]),
        ((desc(), [1, 2, 3]), ParamError, ["addrs", "3 addresses", "2"]),
        ((desc(), [4096, 0]), ParamError, ["addrs[1]=0"]),
        ((desc(), FAKE, (), 1), TypeError, ["remote_accessible", "int"]),
        ((desc(), FAKE, (), "yes"), TypeError, ["remote_accessible", "'yes'"]),
        ((desc(), FAKE, None), NoneArgument, ["cache_keys", "None"]),
        ((desc(), FAKE, BlocksCacheKey(1)), TypeError, ["cache_keys", "BlocksCacheKey"]),
        ((desc(), FAKE, [KEYS[0], 7]), TypeError, ["cache_keys[1]", "7"]),
        ((desc(), FAKE, KEYS), ParamError, ["cache_keys", "5 keys", "4"]),
        ((CacheDesc(0, [1], DataType.DT_INT8), []), ParamError, ["num_tensors", "0"]),
        ((CacheDesc(2, [0, 1], DataType.DT_INT8), FAKE), ParamError, ["shape", "[0, 1]"]),
    ],
)
@pytest.mark.parametrize("call", ["register_cache", "register_blocks_cache"])
def test_r01_wrong_arguments_are_refused_and_nothing_happens(
    world: World, call: str, arguments: tuple[Any, ...], kind: type[Exception], parts: list[str]
) -> None:
    if call == "register_blocks_cache":
        if "cache_keys" in parts[0]:
            arguments, kind, parts = (*arguments[:2], KEYS[0]), TypeError, ["blocks_cache_key", "CacheKey"]
        elif len(arguments) == 4:
            arguments = (*arguments[:2], None, arguments[3])
    world.caches["there"] = world.cm.allocate_cache(desc(), [CacheKey(1, 77)])
    with refused(world, kind, *parts):
        getattr(world.cm, call)(*arguments)


@pytest.mark.parametrize(
    ("cache_id", "kind", "parts"),
    [
        (None, NoneArgument, ["cache_id", "None"]),
        ("1", TypeError, ["cache_id", "'1'"]),
        (1.0, TypeError, ["cache_id", "1.0"]),
        (2**63, ParamError, ["cache_id", str(2**63)]),
        (-(2**63) - 1, ParamError, ["cache_id", str(-(2**63) - 1)]),
    ],
)
def test_r01_unregister_cache_refuses(world: World, cache_id: Any, kind: type[Exception], parts: list[str]) -> None:
    world.cm.register_cache(desc(), FAKE, [CacheKey(1, 1)])
    with refused(world, kind, *parts):
        world.cm.unregister_cache(cache_id)
