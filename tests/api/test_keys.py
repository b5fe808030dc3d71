"""Keys of allocated caches as the calls of one process show them (interface R2, R3, R4, R5, R25), and what a peer finds
by them. `tests/unit/test_registry_machine.py` has the rules; `test_consume.py` what consumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist._checks import INVALID_ID
from llm_datadist.errors import CacheNotFound, KeyInUse, ParamError
from tests.support.memory import desc, pool, refused, settled, state
from tests.support.moves import Spec, Use, call, forget, make, moved, picture, same_bytes, show
from tests.support.world import World, fill

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import LocalEnd

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


def test_r02_r04_key_i_names_row_i_the_last_of_equal_keys_wins_placeholders_bind_nothing(world: World) -> None:
    equal = [CacheKey(1, 1), CacheKey(1, 2), CacheKey(1, 1), CacheKey(1, 3)]
    for keys, expected in (
        ([CacheKey(1, 10), CacheKey(1, 11)], {request(10): (1, 0), request(11): (1, 1)}),
        (equal, {request(1): (2, 2), request(2): (2, 1), request(3): (2, 3)}),
        ([PLACEHOLDER, CacheKey(1, 4), PLACEHOLDER, PLACEHOLDER], {request(4): (3, 1)}),
        ([PLACEHOLDER] * 4, {}),
        # Requests, prefixes, models and blocks have namespaces of their own; a prefix key is no placeholder.
        ([CacheKey(1, 5, 0), CacheKey(1, 5, 1)], {request(5): (5, 0), request(5, 1): (5, 1)}),
        ([CacheKey(1, 0, 0, 5), CacheKey(1, INVALID_ID, 1, 5)], {repr((1, 5, 0)): (6, 0), repr((1, 5, 1)): (6, 1)}),
    ):
        before = bound(world)
        world.cm.allocate_cache(desc(), keys)
        assert bound(world) == before | expected
    before = bound(world)
    for model in (5, 0):
        world.cm.allocate_blocks_cache(desc(), BlocksCacheKey(1, model))
    assert bound(world) == before | {repr((2, 0, 5)): (7, 0), repr((2, 0, 0)): (8, 0)}


def test_r03_a_key_in_use_is_refused_and_nothing_is_allocated_or_bound(world: World) -> None:
    """Whatever cluster id it names; also when its cache is deallocated and waits for the pull."""
    world.caches["first"] = first = world.cm.allocate_cache(desc(), [CacheKey(5, 1)])
    fill(first, 1)
    for key in (CacheKey(1, 1), CacheKey(6, 1)):
        with refused(world, KeyInUse, "req_id=1", "cache 1"):
            world.cm.allocate_cache(desc(), [CacheKey(1, 2), key])
    world.cm.deallocate_cache(first)
    with refused(world, KeyInUse, "req_id=1", "cache 1"):
        world.cm.allocate_cache(desc(), [CacheKey(1, 1)])
    world.cm.remove_cache_key(CacheKey(7, 1))
    world.cm.allocate_cache(desc(), [CacheKey(1, 1)])
    world.cm.allocate_blocks_cache(desc(), BlocksCacheKey(1, 3))
    with refused(world, KeyInUse, "BlocksCacheKey", "model_id=3"):
        world.cm.allocate_blocks_cache(desc(), BlocksCacheKey(2, 3))


def test_r05_a_deallocated_cache_keeps_its_memory_until_the_last_key_is_removed(world: World) -> None:
    prefix = CacheKey(1, 0, 0, 9)
    cache = world.cm.allocate_cache(desc(), [CacheKey(1, 1), CacheKey(1, 2), prefix])
    world.cm.remove_cache_key(CacheKey(1, 2))
    used = pool(world).used_bytes
    assert used > 0
    world.cm.deallocate_cache(cache)
    assert cache.tensor_addrs == []
    for key in (CacheKey(1, 1), CacheKey(1, 1), CacheKey(1, 0), prefix):
        assert (pool(world).used_bytes, world.dd.statistics().caches.deferred) == (used, 1)
        world.cm.remove_cache_key(key)
    assert (pool(world).used_bytes, world.dd.statistics().caches.deferred) == (0, 0)
    cache = world.cm.allocate_cache(desc(), [CacheKey(1, 1)])
    world.cm.remove_cache_key(CacheKey(1, 1))
    assert pool(world).used_bytes > 0
    world.cm.deallocate_cache(cache)
    assert pool(world).used_bytes == 0


def test_r05_statistics_show_age_and_bytes_of_unconsumed_keys(world: World) -> None:
    world.cm.allocate_cache(desc(3, (2, 16)), [CacheKey(1, 1)])
    (first,) = world.dd.statistics().keys
    (later,) = world.dd.statistics().keys
    assert first.unconsumed_bytes == 3 * 64
    assert 0.0 <= first.age_seconds <= later.age_seconds


def test_r25_a_key_of_a_registered_cache_is_unbound_unknown_keys_and_placeholders_touch_nothing(world: World) -> None:
    world.cm.allocate_blocks_cache(desc(), BlocksCacheKey(1, 0))
    world.cm.allocate_blocks_cache(desc(), BlocksCacheKey(1, 4))
    cache = world.cm.register_cache(desc(), [4096, 8192], [CacheKey(1, 1)])
    before, keys = state(world), bound(world)
    for key in (PLACEHOLDER, CacheKey(1, INVALID_ID, 4), CacheKey(1, 2), CacheKey(1, 1, 9), CacheKey(1, 1, 0, 1)):
        world.cm.remove_cache_key(key)
    assert state(world) == before
    world.cm.remove_cache_key(CacheKey(1, 1))
    assert bound(world) == {key: where for key, where in keys.items() if key != request(1)}
    assert world.dd.statistics().caches.registered == 1
    assert cache.tensor_addrs == [4096, 8192]


def test_check_cache_key_wants_exactly_one_id(world: World) -> None:
    world.cm.check_cache_key(CacheKey(1, 1))
    world.cm.check_cache_key(CacheKey(1, INVALID_ID, 0, 1))
    for key in (PLACEHOLDER, CacheKey(1, 1, 0, 1)):
        with refused(world, ParamError, f"req_id={key.req_id}", f"prefix_id={key.prefix_id}"):
            world.cm.check_cache_key(key)


def test_r02_r05_r25_what_a_peer_finds_by_keys(shm_pair: Pair) -> None:
    """The last row of equal keys; what is deallocated until its key is removed; of a registered cache then its id."""
    shm_pair.start()
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    prefix, other, mine = CacheKey(1, INVALID_ID, 0, 5), CacheKey(1, 1), CacheKey(1, 3)
    source = prompt.do(make, "kv", Spec(keys=(other, prefix, other)), 1)
    registered = prompt.do(make, "registered", Spec(keys=(mine,), memory="inside"), 2)
    target = decoder.do(make, "kv", Spec(), 3)
    alone = prompt.do(used) // 2
    for key, row in ((prefix, 2), (CacheKeyByIdAndIndex(1, 1, 2), 4)):
        decoder.do(call, "pull_cache", key, Use("kv"), row)
    target = moved(target, source, [(2, 1), (4, 2)])
    assert list(prompt.do(bound)) == ["(1, 5, 0)", "(0, 3, 0)"]
    prompt.do(forget, "kv")
    decoder.do(call, "pull_cache", prefix, Use("kv"), 0)
    decoder.do(call, "pull_cache", mine, Use("kv"), 1)
    target = moved(moved(target, source, [(0, 1)]), registered, [(1, 0)])
    assert settled(lambda: prompt.do(picture).pins, 0) == 0
    assert prompt.do(used) == 2 * alone
    for key in (prefix, mine):
        prompt.do(call, "remove_cache_key", key)
        with pytest.raises(CacheNotFound) as caught:
            decoder.do(call, "pull_cache", key, Use("kv"), 0)
        assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert prompt.do(used) == alone
    decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, 3, 3), Use("kv"), 3)
    same_bytes(decoder.do(show, "kv"), moved(target, registered, [(3, 3)]))
    same_bytes(prompt.do(show, "registered"), registered)


def used(world: World) -> int:
    return int(pool(world).used_bytes)
