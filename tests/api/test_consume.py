"""What consumes a key and what does not (interface R5), over both transports, seen in statistics() at the producer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist.errors import CacheNotFound, LLMException
from tests.support.ends import LocalEnd
from tests.support.gates import stopped
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import cluster_info

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.ends import End
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers("llm.Transport")

KEY, OTHER, PREFIX = CacheKey(1, 10), CacheKey(1, 20), CacheKey(1, 2**64 - 1, prefix_id=30)
SOURCE = Spec(rows=4, keys=(KEY, OTHER, PREFIX))
TARGET = Spec(rows=6)
BY_ROW = CacheKeyByIdAndIndex(1, 1, 0)
STRIDE, TENSORS = 48, 4


def both(pair: Pair, source: Spec = SOURCE, target: Spec = TARGET, **settings: Any) -> tuple[Bytes, Bytes]:
    pair.start(**settings)
    return pair.prompt.do(make, "kv", source, 1), pair.decoder.do(make, "kv", target, 2)


def left(end: End) -> dict[str, int]:
    """Return key -> bytes that wait with it, once no transfer runs any more."""
    wait_until(lambda: end.do(picture).pins == 0)
    return {key.key: key.unconsumed_bytes for key in end.do(picture).keys}


def used_bytes(end: End) -> int:
    return sum(pool.used_bytes for pool in end.do(picture).pools)


def pull(world: World, key: Any, row: int = 0, src: range | None = None, dst: range | None = None) -> None:
    call(world, "pull_cache", key, Use("kv"), row, src_layer_range=src, dst_layer_range=dst)


def gone(pair: Pair, key: Any) -> None:
    with pytest.raises(CacheNotFound) as caught:
        pair.decoder.do(pull, key)
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert caught.value.peer == 1


ALL = {"(0, 10, 0)": STRIDE * TENSORS, "(0, 20, 0)": STRIDE * TENSORS, "(1, 30, 0)": STRIDE * TENSORS}


def without(*names: str) -> dict[str, int]:
    return {name: left for name, left in ALL.items() if name not in names}


# --- what consumes ------------------------------------------------------------------------------------------------


def test_i4_a_complete_pull_by_key_consumes_it_exactly_once(pair: Pair) -> None:
    both(pair)
    assert left(pair.prompt) == ALL
    pair.decoder.do(pull, KEY)
    gone(pair, KEY)
    assert left(pair.prompt) == without("(0, 10, 0)")
    pair.decoder.do(pull, OTHER)
    gone(pair, OTHER)
    assert left(pair.prompt) == without("(0, 10, 0)", "(0, 20, 0)")


def test_r05_a_complete_pull_by_id_and_row_consumes_the_rows_key(pair: Pair) -> None:
    src, dst = both(pair)
    pair.decoder.do(pull, CacheKeyByIdAndIndex(1, 1, 1), 5)
    gone(pair, OTHER)
    assert left(pair.prompt) == without("(0, 20, 0)")
    # By id the row can be pulled for as long as the cache is there.
    pair.decoder.do(pull, CacheKeyByIdAndIndex(1, 1, 1), 4)
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(5, 1), (4, 1)]))


def test_r05_a_row_without_a_key_consumes_nothing(pair: Pair) -> None:
    both(pair)
    pair.decoder.do(pull, CacheKeyByIdAndIndex(1, 1, 3))
    assert left(pair.prompt) == ALL


@pytest.mark.parametrize("key", [KEY, BY_ROW])
def test_r05_complete_means_successful_whatever_the_size(pair: Pair, key: Any) -> None:
    both(pair)
    pair.decoder.do(call, "pull_cache", key, Use("kv"), 0, 1)
    assert left(pair.prompt) == without("(0, 10, 0)")


@pytest.mark.parametrize("key", [KEY, BY_ROW])
def test_r05_cache_to_blocks_consumes_whatever_the_number_of_blocks(pair: Pair, key: Any) -> None:
    both(pair, SOURCE, Spec(stride=16, blocks=True))
    pair.decoder.do(call, "pull_blocks", key, Use("kv"), [], [5])
    assert left(pair.prompt) == without("(0, 10, 0)")


# --- layer ranges: the union, per key ------------------------------------------------------------------------------


def test_i9_layered_pulls_release_the_key_only_at_full_coverage(pair: Pair) -> None:
    src, dst = both(pair)
    pair.decoder.do(pull, KEY, 0, range(1), range(1))
    assert left(pair.prompt) == ALL | {"(0, 10, 0)": STRIDE * 2}
    pair.decoder.do(pull, KEY, 0, range(1), range(1))  # the same again
    assert left(pair.prompt) == ALL | {"(0, 10, 0)": STRIDE * 2}
    pair.decoder.do(pull, KEY, 0, range(1, 2), range(1, 2))
    gone(pair, KEY)
    assert left(pair.prompt) == without("(0, 10, 0)")
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(0, 0)]))


def test_r05_partial_pulls_of_two_keys_of_one_batch_count_for_each_key_alone(pair: Pair) -> None:
    both(pair)
    pair.decoder.do(pull, KEY, 0, range(1), range(1))
    pair.decoder.do(pull, OTHER, 0, range(1, 2), range(1, 2))
    assert left(pair.prompt) == ALL | {"(0, 10, 0)": STRIDE * 2, "(0, 20, 0)": STRIDE * 2}
    pair.decoder.do(pull, KEY, 0, range(1, 2), range(1, 2))
    assert left(pair.prompt) == without("(0, 10, 0)") | {"(0, 20, 0)": STRIDE * 2}
    pair.decoder.do(pull, OTHER, 0, range(1), range(1))
    assert left(pair.prompt) == without("(0, 10, 0)", "(0, 20, 0)")


def test_r05_pulls_by_key_by_row_and_into_blocks_are_one_union(pair: Pair) -> None:
    both(pair, Spec(6, rows=4, keys=(KEY,)), Spec(6))
    pair.decoder.do(make, "blocks", Spec(6, stride=16, blocks=True), 3)
    pair.decoder.do(pull, KEY, 0, range(2, 3), range(1))
    pair.decoder.do(pull, BY_ROW, 0, range(1), range(1))
    assert left(pair.prompt) == {"(0, 10, 0)": STRIDE * 2}
    one = range(1, 2)
    pair.decoder.do(_into_blocks, KEY, one)
    assert left(pair.prompt) == {}


def _into_blocks(world: World, key: Any, layers: range) -> None:
    call(world, "pull_blocks", key, Use("blocks"), [], [0, 1], src_layer_range=layers, dst_layer_range=layers)


def test_r05_a_pull_of_everything_completes_what_a_partial_one_began(pair: Pair) -> None:
    both(pair)
    pair.decoder.do(pull, KEY, 0, range(1), range(1))
    pair.decoder.do(pull, KEY)
    assert left(pair.prompt) == without("(0, 10, 0)")


# --- what does not consume ----------------------------------------------------------------------------------------


def test_r05_prefix_keys_are_never_consumed(pair: Pair) -> None:
    src, dst = both(pair)
    for row in (0, 1):
        pair.decoder.do(pull, PREFIX, row)
    pair.decoder.do(pull, CacheKeyByIdAndIndex(1, 1, 2), 2)  # nor by their row
    assert left(pair.prompt) == ALL
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(0, 2), (1, 2), (2, 2)]))


def test_r05_blocks_keys_are_never_consumed(pair: Pair) -> None:
    both(pair, Spec(blocks=True, blocks_key=BLOCKS), Spec(blocks=True))
    for _ in range(2):
        pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), list(range(8)), list(range(8)))
    assert left(pair.prompt) == {"(2, 0, 0)": STRIDE * TENSORS}


@pytest.mark.parametrize("key", [KEY, BY_ROW])
def test_i10_keys_of_registered_caches_are_never_consumed(pair: Pair, key: Any) -> None:
    both(pair, Spec(rows=4, keys=(KEY, OTHER, PREFIX), memory="inside"))
    key = KEY if key is KEY else CacheKeyByIdAndIndex(1, 2, 0)  # the memory under it is cache 1
    for _ in range(2):
        pair.decoder.do(pull, key)
    assert left(pair.prompt) == ALL
    pair.prompt.do(forget, "kv")
    gone(pair, key)
    assert left(pair.prompt) == {}


def test_r05_in_rca_mode_a_pull_consumes_nothing(pair: Pair) -> None:
    both(pair, rca=True)
    pair.decoder.do(make, "blocks", Spec(stride=16, blocks=True), 3)
    pair.decoder.do(pull, BY_ROW)
    pair.decoder.do(call, "pull_blocks", BY_ROW, Use("blocks"), [], [0])
    pair.decoder.do(call, "pull_blocks", KEY, Use("blocks"), [], [0])
    assert left(pair.prompt) == ALL
    pair.prompt.do(call, "remove_cache_key", KEY)  # there it is the producer who removes
    assert left(pair.prompt) == without("(0, 10, 0)")


@pytest.mark.parametrize(
    "fault", [{"size": 49}, {"src_layer_range": range(1)}, {"tensor_num_per_layer": 0}, {"batch_index": 99}]
)
def test_r05_a_refused_pull_consumes_nothing(pair: Pair, fault: dict[str, Any]) -> None:
    both(pair)
    with pytest.raises(LLMException):
        pair.decoder.do(_faulty, KEY, fault)
    assert left(pair.prompt) == ALL
    pair.decoder.do(pull, KEY)


@pytest.mark.parametrize("source", [Spec(6, rows=4, keys=(KEY,)), Spec(stride=40, rows=4, keys=(KEY,))])
def test_r05_a_pull_that_does_not_fit_consumes_nothing(pair: Pair, source: Spec) -> None:
    both(pair, source)
    before = left(pair.prompt)
    with pytest.raises(LLMException):
        pair.decoder.do(pull, KEY)
    assert left(pair.prompt) == before != {}


def _faulty(world: World, key: Any, fault: dict[str, Any]) -> None:
    call(world, "pull_cache", key, Use("kv"), **fault)


# --- pushes -------------------------------------------------------------------------------------------------------


def push(world: World, key: Any, row: int = 0, src: range | None = None, dst: range | None = None) -> None:
    call(world, "push_cache", key, Use("kv"), row, src, dst)


def test_r05_a_complete_push_consumes_the_rows_key(pair: Pair) -> None:
    both(pair, rca=True)
    pair.decoder.do(push, CacheKeyByIdAndIndex(1, 1, 1))
    wait_until(lambda: left(pair.prompt) == without("(0, 20, 0)"))
    pair.decoder.do(push, CacheKeyByIdAndIndex(1, 1, 3))  # a row without a key
    pair.decoder.do(push, CacheKeyByIdAndIndex(1, 1, 2))  # a row with a prefix key
    pair.decoder.do(push, BY_ROW)
    wait_until(lambda: left(pair.prompt) == {"(1, 30, 0)": STRIDE * TENSORS})


def test_r05_layered_pushes_are_unioned(pair: Pair) -> None:
    both(pair, rca=True)
    pair.decoder.do(push, BY_ROW, 0, range(1, 2), range(1, 2))
    wait_until(lambda: left(pair.prompt) == ALL | {"(0, 10, 0)": STRIDE * 2})
    pair.decoder.do(push, BY_ROW, 0, range(1), range(1))
    wait_until(lambda: left(pair.prompt) == without("(0, 10, 0)"))


def test_r05_a_push_frees_a_cache_that_waited_for_it(pair: Pair) -> None:
    both(pair, Spec(rows=4, keys=(KEY,)), rca=True)
    pair.prompt.do(forget, "kv")
    assert pair.prompt.do(picture).caches.deferred == 1
    pair.decoder.do(push, BY_ROW)
    wait_until(lambda: used_bytes(pair.prompt) == 0)
    assert left(pair.prompt) == {}


def test_r05_a_push_into_a_registered_cache_leaves_its_key(pair: Pair) -> None:
    src, dst = both(pair, Spec(rows=4, keys=(KEY,), memory="inside"), rca=True)
    pair.decoder.do(push, CacheKeyByIdAndIndex(1, 2, 0))
    pair.decoder.do(push, CacheKeyByIdAndIndex(1, 2, 1))
    same_bytes(pair.prompt.do(show, "kv"), moved(src, dst, [(0, 0), (1, 0)]))
    assert left(pair.prompt) == {"(0, 10, 0)": STRIDE * TENSORS}


# --- one binding, never a later one (interface R5) --------------------------------------------------------------------


def _rebind(world: World) -> Bytes:
    world.cm.remove_cache_key(KEY)
    return make(world, "later", Spec(rows=2, keys=(KEY,)), 9)


def test_r05_a_release_that_comes_late_leaves_a_later_binding_of_the_key_alone(pair: Pair, tmp_path: Path) -> None:
    src, dst = both(pair)
    # Every byte is there and the guards held: the pull is a success, its release is not sent yet.
    with stopped(pair.decoder, "release", tmp_path, "pull_cache", KEY, Use("kv"), 3) as pulling:
        later = pair.prompt.do(_rebind)
        pulling.finish()
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(3, 0)]))
    assert left(pair.prompt) == ALL
    pair.decoder.do(pull, KEY, 4)
    same_bytes(pair.decoder.do(show, "kv"), moved(moved(dst, src, [(3, 0)]), later, [(4, 0)]))
    assert left(pair.prompt) == without("(0, 10, 0)")


def test_r05_of_two_pulls_of_one_key_at_once_both_succeed_and_the_first_release_consumes(
    local_pair: Pair, tmp_path: Path
) -> None:
    src, dst = both(local_pair)
    with stopped(local_pair.decoder, "release", tmp_path, "pull_cache", KEY, Use("kv"), 1) as pulling:
        assert local_pair.prompt.do(picture).pins == 1
        local_pair.decoder.do(pull, KEY, 2)
        gone(local_pair, KEY)
        later = local_pair.prompt.do(make, "later", Spec(rows=1, keys=(KEY,)), 9)
        pulling.finish()
    assert left(local_pair.prompt) == ALL  # the later binding's bytes
    local_pair.decoder.do(pull, KEY, 3)
    wanted = moved(moved(dst, src, [(1, 0), (2, 0)]), later, [(3, 0)])
    same_bytes(local_pair.decoder.do(show, "kv"), wanted)


def test_r05_the_union_is_over_all_peers(local_pair: Pair) -> None:
    both(local_pair)
    third = LocalEnd("third")
    third.start("DECODER", 3, extra={"llm.Transport": "inproc"})
    try:
        assert local_pair.prompt.port is not None
        third.do(_link, local_pair.prompt.port)
        third.do(make, "kv", TARGET, 5)
        local_pair.decoder.do(pull, KEY, 0, range(1), range(1))
        third.do(pull, KEY, 0, range(1, 2), range(1, 2))
        assert left(local_pair.prompt) == without("(0, 10, 0)")
    finally:
        third.stop()


def _link(world: World, port: int) -> None:
    assert world.dd.link_clusters([cluster_info(1, port)], 10_000)[0] is LLMStatusCode.LLM_SUCCESS
