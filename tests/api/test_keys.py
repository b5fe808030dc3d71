"""Keys as the calls show them (interface R2 to R5, R25, I5): what binds and removes them, what a peer finds by them,
what consumes them at the producer, and walk 2 of the architecture: allocate, pull, deallocate, consume, free. The rules
are those of `tests/unit/test_registry_machine.py`."""

from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from faults.gated import stopped
from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist.errors import CacheNotFound, KeyInUse, ParamError
from tests.support.kinds import Bytes, End, Pair
from tests.support.memory import desc, pool, refused, state, user_memory
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import World, fill

#: Method, arguments, layer ranges, and what it leaves: row of the producer's "kv" -> bytes that wait with its key.
Step = tuple[str, tuple[Any, ...], dict[str, Any], dict[int, int]]

pytestmark = [
    pytest.mark.covers(
        "CacheKey.req_id", "CacheManager: allocate_cache check_cache_key deallocate_cache", "errors.KeyInUse"
    ),
    pytest.mark.gpu,
]

INVALID_ID = 2**64 - 1
PLACEHOLDER = CacheKey(1, req_id=INVALID_ID)


def bound(world: World) -> dict[str, tuple[int, int]]:
    """Which key names which (cache, row)."""
    return {each.key: (each.cache_id, each.row) for each in world.dd.statistics().keys}


def request(number: int, model: int = 0) -> str:
    """How statistics() shows a request key."""
    return repr((0, number, model))


def test_r02_r03_r04_r25_what_binds_keys_what_is_refused_and_what_unbinds_them(world: World) -> None:
    equal = [CacheKey(1, 1), CacheKey(1, 2), CacheKey(1, 1), CacheKey(1, 3)]
    for keys, expected in (
        # Key i names row i, the last of equal keys wins, placeholders bind nothing.
        ([CacheKey(1, 10), CacheKey(1, 11)], {request(10): (1, 0), request(11): (1, 1)}),
        (equal, {request(1): (2, 2), request(2): (2, 1), request(3): (2, 3)}),
        ([PLACEHOLDER, CacheKey(1, 4), PLACEHOLDER, PLACEHOLDER], {request(4): (3, 1)}),
        ([PLACEHOLDER] * 4, {}),
        # Requests, prefixes, models and blocks have namespaces of their own; a prefix key is no placeholder.
        ([CacheKey(1, 5, 0), CacheKey(1, 5, 1)], {request(5): (5, 0), request(5, 1): (5, 1)}),
        ([CacheKey(1, 0, 0, 5), CacheKey(1, INVALID_ID, 1, 5)], {repr((1, 5, 0)): (6, 0), repr((1, 5, 1)): (6, 1)}),
    ):
        before = bound(world)
        world.caches["last"] = cache = world.cm.allocate_cache(desc(), keys)
        fill(cache, 1)
        assert bound(world) == before | expected
    first, later = (world.dd.statistics().keys[0] for _ in range(2))
    assert first.unconsumed_bytes == 2 * 64
    assert 0.0 <= first.age_seconds <= later.age_seconds
    before = bound(world)
    for model in (5, 0):
        world.cm.allocate_blocks_cache(desc(), BlocksCacheKey(1, model))
    assert bound(world) == before | {repr((2, 0, 5)): (7, 0), repr((2, 0, 0)): (8, 0)}
    with refused(world, KeyInUse, "BlocksCacheKey", "model_id=5"):
        world.cm.allocate_blocks_cache(desc(), BlocksCacheKey(2, 5))
    # Unknown keys and placeholders touch nothing; of a registered cache only the key goes.
    addrs = user_memory(world, "registered", desc())
    registered = world.cm.register_cache(desc(), addrs, [CacheKey(1, 20)])
    shown_, keys_ = state(world), bound(world)
    for key in (PLACEHOLDER, CacheKey(1, INVALID_ID, 4), CacheKey(1, 21), CacheKey(1, 20, 9), CacheKey(1, 1, 0, 1)):
        world.cm.remove_cache_key(key)
    assert state(world) == shown_
    world.cm.remove_cache_key(CacheKey(7, 20))
    assert bound(world) == {key: where for key, where in keys_.items() if key != request(20)}
    assert (world.dd.statistics().caches.registered, registered.tensor_addrs) == (1, addrs)
    # A deallocated cache, whose key waits for the pull, keeps it in use.
    world.cm.deallocate_cache(cache)
    with refused(world, KeyInUse, "prefix_id=5", "cache 6"):
        world.cm.allocate_cache(desc(), [CacheKey(1, 20), CacheKey(1, 0, 0, 5)])
    world.cm.remove_cache_key(CacheKey(7, 0, 0, 5))
    world.cm.allocate_cache(desc(), [CacheKey(1, 20), CacheKey(1, 0, 0, 5)])


def test_check_cache_key_wants_exactly_one_id(world: World) -> None:
    world.cm.check_cache_key(CacheKey(1, 1))
    world.cm.check_cache_key(CacheKey(1, INVALID_ID, 0, 1))
    for key in (PLACEHOLDER, CacheKey(1, 1, 0, 1)):
        with refused(world, ParamError, f"req_id={key.req_id}", f"prefix_id={key.prefix_id}"):
            world.cm.check_cache_key(key)


def used(world: World) -> int:
    return int(pool(world).used_bytes)


# --- what consumes ----------------------------------------------------------------------------------------------------
STRIDE, TENSORS = 48, 4
WHOLE, HALF = STRIDE * TENSORS, STRIDE * TENSORS // 2
KEYS = tuple(CacheKey(1, 10 + row) for row in range(7))
PREFIX = CacheKey(1, 2**64 - 1, prefix_id=30)  # of row 7; row 8 has no key
SOURCE = Spec(rows=9, keys=(*KEYS, PREFIX))
REGISTERED = Spec(rows=4, keys=(CacheKey(1, 90), CacheKey(1, 91)), memory="inside")
FIRST: Final = {"src_layer_range": range(1), "dst_layer_range": range(1)}
SECOND: Final = {"src_layer_range": range(1, 2), "dst_layer_range": range(1, 2)}
SECOND_TO_FIRST: Final = {"src_layer_range": range(1, 2), "dst_layer_range": range(1)}
KV: Final = Use("kv")


def by_row(row: int, cache_id: int = 1) -> CacheKeyByIdAndIndex:
    return CacheKeyByIdAndIndex(1, cache_id, row)


def left(end: End) -> dict[str, int]:
    """Return key -> bytes that a pull can consume, once no transfer runs any more."""
    wait_until(lambda: end.do(picture).pins == 0)
    return {key.key: key.unconsumed_bytes for key in end.do(picture).keys}


def shown(row: int) -> str:
    """Return how statistics() shows the key of a row of "kv"."""
    return "(1, 30, 0)" if row == 7 else f"(0, {10 + row}, 0)"


def gone(pair: Pair, key: Any) -> None:
    with pytest.raises(CacheNotFound) as caught:
        pair.decoder.do(call, "pull_cache", key, KV)
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert caught.value.peer == 1


def leave(pair: Pair, steps: list[Step]) -> None:
    """Make the calls in turn; after each, exactly what it says is left at the producer."""
    waiting = left(pair.prompt)
    for method, args, kwargs, changes in steps:
        pair.decoder.do(partial(call, **kwargs), method, *args)
        changed = {shown(row): nbytes for row, nbytes in changes.items()}
        waiting = {key: nbytes for key, nbytes in (waiting | changed).items() if changed.get(key) != 0}
        wait_until(lambda expected=waiting: left(pair.prompt) == expected)  # type: ignore[misc]


PULLS: list[Step] = [
    # Complete means successful, whatever the size and the number of blocks.
    ("pull_cache", (KEYS[0], KV, 0), {}, {0: 0}),
    ("pull_cache", (KEYS[1], KV, 1, 1), {}, {1: 0}),
    ("pull_blocks", (KEYS[2], Use("blocks"), [], [5]), {}, {2: 0}),
    # By id and row it is the row's key, if it has one; the row is there for as long as the cache is.
    ("pull_cache", (by_row(3), KV, 3), {}, {3: 0}),
    ("pull_cache", (by_row(3), KV, 1), {}, {}),
    ("pull_cache", (by_row(8), KV, 2), {}, {}),
    # Prefix keys, blocks keys and keys of registered caches are never consumed.
    *[("pull_cache", (key, KV, 4), {}, {}) for key in (PREFIX, PREFIX, by_row(7))],
    *[("pull_cache", (key, KV, 5), {}, {}) for key in (CacheKey(1, 90), CacheKey(1, 90), by_row(1, 3), by_row(1, 3))],
    *[("pull_blocks", (BLOCKS, Use("paged"), list(range(8)), list(range(8))), {}, {})] * 2,
    # Layers of the source are united, for each key alone, whether pulled by key, by row or into blocks.
    ("pull_cache", (KEYS[4], KV, 6), FIRST, {4: HALF}),
    ("pull_cache", (KEYS[4], KV, 6), FIRST, {}),
    ("pull_cache", (KEYS[5], KV, 7), SECOND_TO_FIRST, {5: HALF}),
    ("pull_cache", (by_row(4), KV, 6), SECOND, {4: 0}),
    ("pull_blocks", (KEYS[5], Use("blocks"), [], [0, 1]), FIRST, {5: 0}),
    ("pull_cache", (KEYS[6], KV, 8), SECOND, {6: HALF}),
    ("pull_cache", (KEYS[6], KV, 8), {}, {6: 0}),
]
PULLED = [(0, 0), (3, 3), (1, 3), (2, 8), (4, 7), (6, 4), (8, 6)]


def test_r05_i4_i9_i10_complete_pulls_consume_a_key_exactly_once_and_nothing_else_does(pair: Pair) -> None:
    prompt, decoder = pair.start()
    src, dst = prompt.do(make, "kv", SOURCE, 1), decoder.do(make, "kv", Spec(rows=9), 2)
    registered = prompt.do(make, "registered", REGISTERED, 3)  # cache 3, in the memory of cache 2
    prompt.do(make, "paged", Spec(blocks=True, blocks_key=BLOCKS), 4)
    decoder.do(make, "paged", Spec(blocks=True), 5)
    decoder.do(make, "blocks", Spec(stride=16, blocks=True), 6)
    before = left(prompt)
    never = {shown(7), "(0, 90, 0)", "(0, 91, 0)", "(2, 0, 0)"}  # consumed by a pull
    assert before == {shown(row): WHOLE for row in range(7)} | dict.fromkeys(never, 0)
    leave(pair, PULLS)
    for consumed in KEYS:
        gone(pair, consumed)
    expected = moved(moved(dst, src, PULLED), registered, [(5, 1)])
    for tensor, half in zip(expected[:2], src[2:], strict=True):
        tensor[7] = half[5]
    same_bytes(decoder.do(show, "kv"), expected)
    # Of a registered cache the key goes, the cache itself with unregister (interface R25).
    prompt.do(call, "remove_cache_key", CacheKey(1, 91))
    gone(pair, CacheKey(1, 91))
    same_bytes(prompt.do(show, "registered"), registered)
    prompt.do(call, "deallocate_cache", Use("registered"))
    decoder.do(call, "pull_cache", by_row(1, 3), KV, 0)
    expected = moved(expected, registered, [(0, 1)])
    prompt.do(forget, "registered")
    for lost in (CacheKey(1, 90), by_row(1, 3)):
        gone(pair, lost)
    assert "(0, 90, 0)" not in left(prompt)
    # What is deallocated is found until its last key is removed.
    held = prompt.do(used)
    prompt.do(forget, "kv")
    decoder.do(call, "pull_cache", PREFIX, KV, 1)
    same_bytes(decoder.do(show, "kv"), moved(expected, src, [(1, 7)]))
    assert (prompt.do(used), prompt.do(picture).caches.deferred) == (held, 1)
    prompt.do(call, "remove_cache_key", PREFIX)
    gone(pair, PREFIX)
    wait_until(lambda: prompt.do(used) < held)


PUSHES: list[Step] = [
    # With remote cache access a pull consumes nothing: there it is the producer who removes, or a push.
    ("pull_cache", (by_row(0), KV), {}, {}),
    ("pull_blocks", (by_row(0), Use("blocks"), [], [0]), {}, {}),
    ("pull_blocks", (KEYS[0], Use("blocks"), [], [0]), {}, {}),
    ("push_cache", (by_row(1), KV), {}, {1: 0}),
    ("push_cache", (by_row(8), KV), {}, {}),
    ("push_cache", (by_row(7), KV), {}, {}),
    ("push_cache", (by_row(2), KV, 0, range(1), range(1, 2)), {}, {2: HALF}),
    ("push_cache", (by_row(2), KV, 0, range(1), range(1)), {}, {2: 0}),
    ("push_cache", (by_row(1, 3), KV, 1), {}, {}),  # the registered cache
    ("push_cache", (by_row(3, 3), KV, 2), {}, {}),
]


def test_r05_with_remote_cache_access_complete_pushes_consume_the_rows_key_and_pulls_nothing(pair: Pair) -> None:
    prompt, decoder = pair.start(rca=True)
    prompt.do(make, "kv", SOURCE, 1)
    src = decoder.do(make, "kv", Spec(rows=9), 2)
    registered = prompt.do(make, "registered", REGISTERED, 3)
    decoder.do(make, "blocks", Spec(stride=16, blocks=True), 6)
    leave(pair, PUSHES)
    same_bytes(prompt.do(show, "registered"), moved(registered, decoder.do(show, "kv"), [(1, 1), (3, 2)]))
    same_bytes([tensor[1:] for tensor in decoder.do(show, "kv")], [tensor[1:] for tensor in src])
    prompt.do(call, "remove_cache_key", KEYS[0])
    assert shown(0) not in left(prompt)
    # The last keys of a cache that was given back: a push frees it.
    prompt.do(forget, "registered")
    prompt.do(call, "remove_cache_key", PREFIX)
    prompt.do(forget, "kv")
    held = prompt.do(used)
    assert prompt.do(picture).caches.deferred == 1
    for row in (3, 4, 5, 6):
        assert prompt.do(used) == held
        decoder.do(call, "push_cache", by_row(row), KV)
    wait_until(lambda: prompt.do(used) < held)
    assert left(prompt) == {}


# --- walk 2 and its other exits ---------------------------------------------------------------------------------------
HELD: Final = 4 * 3 * 4096  # four tensors of 10000 bytes, each rounded up to pages
PULL_ROW: Final = ("pull_cache", KEYS[0], KV, 3)


def begin_walk(pair: Pair) -> tuple[Bytes, Bytes]:
    pair.start()
    source = Spec(rows=2, stride=5000, keys=KEYS[:1])
    return pair.prompt.do(make, "kv", source, 1), pair.decoder.do(make, "kv", Spec(rows=6, stride=5000), 2)


def seen(end: End) -> tuple[int, int, int, int, int, int]:
    """Return (live, deferred, draining caches, keys, pins, used bytes of the device pool)."""
    now = end.do(picture)
    caches = now.caches
    return caches.live, caches.deferred, caches.draining, len(now.keys), now.pins, end.do(used)


@pytest.mark.parametrize("removed", [False, True], ids=["consumed", "removed"])
def test_i5_walk_two_step_by_step(pair: Pair, tmp_path: Path, removed: bool) -> None:
    """A key that is removed during the pull fails it; the memory waits for its pin."""
    src, dst = begin_walk(pair)
    prompt = pair.prompt
    assert seen(prompt) == (1, 0, 0, 1, 0, HELD)
    with stopped(pair.decoder, "before copy", tmp_path, *PULL_ROW) as pulling:
        assert seen(prompt) == (1, 0, 0, 1, 1, HELD)
        prompt.do(forget, "kv")
        assert seen(prompt) == (0, 1, 0, 1, 1, HELD)
        if removed:
            prompt.do(call, "remove_cache_key", KEYS[0])
            assert seen(prompt) == (0, 0, 1, 0, 1, HELD)
            with pytest.raises(CacheNotFound):
                pulling.finish()
        else:
            pulling.finish()
    wait_until(lambda: seen(prompt) == (0, 0, 0, 0, 0, 0))  # a release is on its way when a pull returns
    same_bytes(pair.decoder.do(show, "kv"), dst if removed else moved(dst, src, [(3, 0)]))
    assert prompt.do(picture).pools[0].largest_hole_bytes == prompt.do(picture).pools[0].capacity_bytes
