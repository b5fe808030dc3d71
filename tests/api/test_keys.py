"""Keys of allocated caches: interface R2, R3, R4, R5 (what this process sees of it), interface R25, and what a peer
finds by them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist._checks import INVALID_ID
from llm_datadist.errors import CacheNotFound, KeyInUse, ParamError
from tests.support.memory import desc, pool, refused, settled, state
from tests.support.world import World, fill, read

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.conftest import Pair
    from tests.support.ends import LocalEnd

    Bytes = list[NDArray[np.uint8]]

pytestmark = pytest.mark.covers(
    "CacheManager: allocate_cache check_cache_key deallocate_cache", "LLMDataDist.statistics", "errors.KeyInUse"
)

PLACEHOLDER = CacheKey(1, req_id=2**64 - 1)


@pytest.fixture
def world(end: LocalEnd) -> World:
    """An initialised end with both pools."""
    end.start("PROMPT", 1)
    return end.world


def bound(world: World) -> dict[str, tuple[int, int]]:
    """Which key names which (cache, row)."""
    return {each.key: (each.cache_id, each.row) for each in world.dd.statistics().keys}


def request(number: int, model: int = 0) -> str:
    """How statistics() shows a request key."""
    return repr((0, number, model))


# --- binding ----------------------------------------------------------------------------------------------------------


def test_key_i_names_row_i_and_fewer_keys_than_rows_will_do(world: World) -> None:
    world.cm.allocate_cache(desc(), [CacheKey(1, 10), CacheKey(1, 11)])
    assert bound(world) == {request(10): (1, 0), request(11): (1, 1)}


def test_the_cluster_id_of_a_key_does_not_matter_here(world: World) -> None:
    world.cm.allocate_cache(desc(), [CacheKey(5, 10)])
    with refused(world, KeyInUse, "req_id=10"):
        world.cm.allocate_cache(desc(), [CacheKey(6, 10)])
    world.cm.remove_cache_key(CacheKey(7, 10))
    assert bound(world) == {}


def test_requests_prefixes_models_and_blocks_have_namespaces_of_their_own(world: World) -> None:
    keys = [CacheKey(1, 5, 0), CacheKey(1, 5, 1), CacheKey(1, 0, 0, 5), CacheKey(1, 0, 1, 5)]
    world.cm.allocate_cache(desc(), keys)
    world.cm.allocate_blocks_cache(desc(), BlocksCacheKey(1, 5))
    world.cm.allocate_blocks_cache(desc(), BlocksCacheKey(1, 0))
    assert len(bound(world)) == 6


def test_r02_the_same_key_twice_in_one_allocate_cache_names_the_last_row(world: World) -> None:
    world.cm.allocate_cache(desc(), [CacheKey(1, 1), CacheKey(1, 2), CacheKey(1, 1), CacheKey(1, 3)])
    assert bound(world) == {request(1): (1, 2), request(2): (1, 1), request(3): (1, 3)}


def test_r03_a_key_in_use_is_refused_and_nothing_is_allocated_or_bound(world: World) -> None:
    world.caches["first"] = world.cm.allocate_cache(desc(), [CacheKey(1, 1)])
    fill(world.caches["first"], 1)
    with refused(world, KeyInUse, "req_id=1", "cache 1"):
        world.cm.allocate_cache(desc(), [CacheKey(1, 2), CacheKey(1, 1)])
    assert bound(world) == {request(1): (1, 0)}


def test_r03_a_key_of_a_deallocated_cache_that_is_not_pulled_yet_is_in_use(world: World) -> None:
    world.cm.deallocate_cache(world.cm.allocate_cache(desc(), [CacheKey(1, 1)]))
    with refused(world, KeyInUse, "req_id=1", "cache 1"):
        world.cm.allocate_cache(desc(), [CacheKey(1, 1)])
    world.cm.remove_cache_key(CacheKey(1, 1))
    world.cm.allocate_cache(desc(), [CacheKey(1, 1)])


def test_r03_a_blocks_key_in_use_is_refused(world: World) -> None:
    world.cm.allocate_blocks_cache(desc(), BlocksCacheKey(1, 3))
    with refused(world, KeyInUse, "BlocksCacheKey", "model_id=3"):
        world.cm.allocate_blocks_cache(desc(), BlocksCacheKey(2, 3))


def test_r04_placeholders_bind_nothing_any_number_of_them_anywhere(world: World) -> None:
    world.cm.allocate_blocks_cache(desc(), BlocksCacheKey(1, 0))
    world.cm.allocate_cache(desc(), [PLACEHOLDER, CacheKey(1, 1), PLACEHOLDER, PLACEHOLDER])
    world.cm.allocate_cache(desc(), [PLACEHOLDER] * 4)
    world.cm.allocate_cache(desc(), [PLACEHOLDER, PLACEHOLDER, CacheKey(1, 2)])
    assert bound(world) == {repr((2, 0, 0)): (1, 0), request(1): (2, 1), request(2): (4, 2)}


def test_r04_a_prefix_key_without_request_is_no_placeholder(world: World) -> None:
    world.cm.allocate_cache(desc(), [CacheKey(1, INVALID_ID, 0, 8)])
    assert len(bound(world)) == 1


# --- removing ---------------------------------------------------------------------------------------------------------


def test_r05_a_deallocated_cache_keeps_its_memory_until_the_last_key_is_removed(world: World) -> None:
    cache = world.cm.allocate_cache(desc(), [CacheKey(1, 1), CacheKey(1, 2)])
    used = pool(world).used_bytes
    world.cm.deallocate_cache(cache)
    assert cache.tensor_addrs == []
    for key in (CacheKey(1, 1), CacheKey(1, 1)):
        assert (pool(world).used_bytes, world.dd.statistics().caches.deferred) == (used, 1)
        world.cm.remove_cache_key(key)
    world.cm.remove_cache_key(CacheKey(1, 2))
    assert (pool(world).used_bytes, world.dd.statistics().caches.deferred) == (0, 0)


def test_r05_a_key_removed_before_deallocate_does_not_keep_the_memory(world: World) -> None:
    cache = world.cm.allocate_cache(desc(), [CacheKey(1, 1)])
    world.cm.remove_cache_key(CacheKey(1, 1))
    assert pool(world).used_bytes > 0
    world.cm.deallocate_cache(cache)
    assert pool(world).used_bytes == 0


def test_r05_prefix_keys_keep_a_deallocated_cache_too(world: World) -> None:
    key = CacheKey(1, 0, 0, 9)
    world.cm.deallocate_cache(world.cm.allocate_cache(desc(), [key]))
    assert pool(world).used_bytes > 0
    world.cm.remove_cache_key(CacheKey(1, 0))
    assert pool(world).used_bytes > 0
    world.cm.remove_cache_key(key)
    assert pool(world).used_bytes == 0


def test_r05_statistics_show_age_and_bytes_of_unconsumed_keys(world: World) -> None:
    world.cm.allocate_cache(desc(3, (2, 16)), [CacheKey(1, 1)])
    (first,) = world.dd.statistics().keys
    (later,) = world.dd.statistics().keys
    assert first.unconsumed_bytes == 3 * 64
    assert 0.0 <= first.age_seconds <= later.age_seconds


def test_r25_removing_a_placeholder_or_an_unknown_key_touches_nothing(world: World) -> None:
    world.cm.allocate_blocks_cache(desc(), BlocksCacheKey(1, 0))
    world.cm.allocate_blocks_cache(desc(), BlocksCacheKey(1, 4))
    world.cm.allocate_cache(desc(), [CacheKey(1, 1)])
    before = state(world)
    for key in (PLACEHOLDER, CacheKey(1, INVALID_ID, 4), CacheKey(1, 2), CacheKey(1, 1, 9), CacheKey(1, 1, 0, 1)):
        world.cm.remove_cache_key(key)
    assert state(world) == before


def test_r25_the_key_of_a_registered_cache_is_unbound(world: World) -> None:
    cache = world.cm.register_cache(desc(), [4096, 8192], [CacheKey(1, 1)])
    world.cm.remove_cache_key(CacheKey(1, 1))
    assert bound(world) == {}
    assert world.dd.statistics().caches.registered == 1
    assert cache.tensor_addrs == [4096, 8192]


# --- what a peer finds ------------------------------------------------------------------------------------------------


def publish_rows(world: World, keys: list[CacheKey]) -> Bytes:
    world.caches["kv"] = world.cm.allocate_cache(desc(), keys)
    return fill(world.caches["kv"], 1)


def deallocate(world: World) -> None:
    world.cm.deallocate_cache(world.caches.pop("kv"))


def remove(world: World, key: CacheKey) -> None:
    world.cm.remove_cache_key(key)


def used(world: World, nbytes: int) -> int:
    """Bytes of the device pool in use: as expected, once the peer's releases have arrived."""
    return settled(lambda: int(pool(world).used_bytes), nbytes)


def register_rows(world: World, keys: list[CacheKey]) -> Bytes:
    memory = world.cm.allocate_cache(desc())
    world.caches["kv"] = world.cm.register_cache(desc(), list(memory.tensor_addrs), keys)
    world.caches["owner"] = memory
    return fill(world.caches["kv"], 1)


def pull_row(world: World, key: CacheKey | CacheKeyByIdAndIndex, row: int) -> tuple[Bytes, Bytes]:
    cache = world.cm.allocate_cache(desc())
    before = fill(cache, 2)
    try:
        world.cm.pull_cache(key, cache, row)
        return before, read(cache)
    finally:
        world.cm.deallocate_cache(cache)


def pull_refused(world: World, key: CacheKey) -> tuple[LLMStatusCode, bool]:
    cache = world.cm.allocate_cache(desc())
    before = fill(cache, 2)
    try:
        with pytest.raises(CacheNotFound) as caught:
            world.cm.pull_cache(key, cache, 0)
        untouched = all(np.array_equal(one, other) for one, other in zip(before, read(cache), strict=True))
        return caught.value.status_code, untouched
    finally:
        world.cm.deallocate_cache(cache)


def content(world: World) -> Bytes:
    return read(world.caches["kv"])


def check_row(source: Bytes, source_row: int, before: Bytes, after: Bytes, row: int) -> None:
    for s, b, a in zip(source, before, after, strict=True):
        b[row] = s[source_row]
        np.testing.assert_array_equal(a, b)


def test_r02_a_peer_gets_the_last_row(pair: Pair) -> None:
    pair.start()
    source = pair.prompt.do(publish_rows, [CacheKey(1, 1), CacheKey(1, 2), CacheKey(1, 1)])
    before, after = pair.decoder.do(pull_row, CacheKey(1, 1), 3)
    check_row(source, 2, before, after, 3)
    for one, other in zip(source, pair.prompt.do(content), strict=True):
        np.testing.assert_array_equal(one, other)


def test_r05_a_deallocated_cache_answers_until_its_key_is_removed(pair: Pair) -> None:
    pair.start()
    source = pair.prompt.do(publish_rows, [CacheKey(1, 1), CacheKey(1, 0, 0, 5)])
    pair.prompt.do(deallocate)
    before, after = pair.decoder.do(pull_row, CacheKey(1, INVALID_ID, 0, 5), 0)
    check_row(source, 1, before, after, 0)
    pair.prompt.do(remove, CacheKey(1, 0, 0, 5))
    not_there = (LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, True)
    assert pair.decoder.do(pull_refused, CacheKey(1, INVALID_ID, 0, 5)) == not_there
    assert pair.prompt.do(used, 8192) == 8192
    pair.prompt.do(remove, CacheKey(1, 1))
    assert pair.prompt.do(used, 0) == 0
    assert pair.decoder.do(pull_refused, CacheKey(1, 1)) == not_there


def test_r25_a_peer_finds_no_removed_key_of_a_registered_cache_but_its_id(pair: Pair) -> None:
    pair.start()
    source = pair.prompt.do(register_rows, [CacheKey(1, 1)])
    before, after = pair.decoder.do(pull_row, CacheKey(1, 1), 1)
    check_row(source, 0, before, after, 1)
    pair.prompt.do(remove, CacheKey(1, 1))
    assert pair.decoder.do(pull_refused, CacheKey(1, 1)) == (LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, True)
    before, after = pair.decoder.do(pull_row, CacheKeyByIdAndIndex(1, 2, 3), 0)
    check_row(source, 3, before, after, 0)


# --- check_cache_key --------------------------------------------------------------------------------------------------


def test_check_cache_key_wants_exactly_one_id(world: World) -> None:
    world.cm.check_cache_key(CacheKey(1, 1))
    world.cm.check_cache_key(CacheKey(1, INVALID_ID, 0, 1))
    for key in (PLACEHOLDER, CacheKey(1, 1, 0, 1)):
        with refused(world, ParamError, f"req_id={key.req_id}", f"prefix_id={key.prefix_id}"):
            world.cm.check_cache_key(key)
