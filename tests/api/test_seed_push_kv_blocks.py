"""PushKvBlocks' semantics through push_blocks (interface R31, R14): addressing by cache id, inclusive layer pairs, its
codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMStatusCode
from llm_datadist.errors import CacheNotFound, LLMException, NotLinked, ParamError
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, refused, same_bytes, show
from tests.support.world import fill

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers("CacheManager.push_blocks", "LLMStatusCode: LLM_KV_CACHE_NOT_EXIST LLM_NOT_YET_LINK")

#: CacheIndex{cluster 1, cache 1, batch 0} of the C++ interface.
INDEX = CacheKeyByIdAndIndex(1, 1)


def sample(world: World, seed: int) -> Bytes:
    """The samples' cache: 4 int32 tensors of [8, 16]."""
    cache = world.caches["kv"] = world.cm.allocate_blocks_cache(CacheDesc(4, [8, 16], DataType.DT_INT32))
    return fill(cache, seed)


def push_kv_blocks(
    world: World,
    index: Any,
    src: list[int],
    dst: list[int],
    src_range: tuple[int, int],
    dst_range: tuple[int, int],
    tnpl: int,
) -> None:
    """PushKvBlocks(src_cache, dst_cache_index, src_blocks, dst_blocks, ext_param); (-1, -1): all layers."""
    ranges = [None if pair == (-1, -1) else range(pair[0], pair[1] + 1) for pair in (src_range, dst_range)]
    call(world, "push_blocks", index, Use("kv"), src, dst, *ranges, tnpl)


ALL = (-1, -1)


@pytest.fixture
def both(pair: Pair) -> tuple[Pair, Bytes, Bytes]:
    """Return the linked ends, what the decoder pushes from and what the prompt holds."""
    pair.start(rca=True)
    return pair, pair.decoder.do(sample, 1), pair.prompt.do(sample, 2)


def test_seed_push_kv_blocks_moves_blocks_one_and_two_to_three_and_four(both: tuple[Pair, Bytes, Bytes]) -> None:
    pair, src, dst = both
    pair.decoder.do(push_kv_blocks, INDEX, [1, 2], [3, 4], ALL, ALL, 2)
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(3, 1), (4, 2)]))
    same_bytes(pair.decoder.do(show, "kv"), src)


@pytest.mark.parametrize("tnpl", [1, 2, 4])
def test_seed_push_kv_blocks_first_layer_only(both: tuple[Pair, Bytes, Bytes], tnpl: int) -> None:
    pair, src, dst = both
    pair.decoder.do(push_kv_blocks, INDEX, [1, 2], [3, 4], (0, 0), (0, 0), tnpl)
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(3, 1), (4, 2)], [(t, t) for t in range(tnpl)]))


def test_seed_push_kv_blocks_layer_by_layer_with_one_tensor_per_layer(both: tuple[Pair, Bytes, Bytes]) -> None:
    pair, src, dst = both
    for layer in range(4):
        pair.decoder.do(push_kv_blocks, INDEX, [5, 6, 7], [5, 6, 7], (layer, layer), (layer, layer), 1)
        wanted = moved(dst, src, [(5, 5), (6, 6), (7, 7)], [(t, t) for t in range(layer + 1)])
        same_bytes(pair.prompt.do(show, "kv"), wanted)


def test_seed_push_kv_blocks_to_another_layer(both: tuple[Pair, Bytes, Bytes]) -> None:
    pair, src, dst = both
    pair.decoder.do(push_kv_blocks, INDEX, [0], [7], (0, 1), (2, 3), 1)
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(7, 0)], [(2, 0), (3, 1)]))


@pytest.mark.parametrize("tnpl", [3, 5, 9])
def test_r14_default_ranges_move_everything_whatever_tnpl(both: tuple[Pair, Bytes, Bytes], tnpl: int) -> None:
    pair, src, dst = both
    pair.decoder.do(push_kv_blocks, INDEX, [1, 2], [3, 4], ALL, ALL, tnpl)
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(3, 1), (4, 2)]))


@pytest.mark.parametrize(
    ("src_range", "dst_range", "tnpl"),
    [
        (ALL, (0, 0), 2),  # the default stands for all layers
        ((0, 0), ALL, 2),
        ((0, 1), (0, 0), 2),
        ((0, 0), (0, 0), 3),  # no divisor
        ((0, 0), (0, 0), 8),
        ((0, 2), (0, 2), 2),  # above num_tensors / tnpl - 1
        ((4, 4), (4, 4), 1),
        ((1, 0), (1, 0), 2),  # first > second
        ((0, -1), (0, -1), 2),
        ((-1, 0), (-1, 0), 2),
        (ALL, ALL, 0),
    ],
)
def test_r14_wrong_ranges_are_parameter_errors(
    both: tuple[Pair, Bytes, Bytes], src_range: tuple[int, int], dst_range: tuple[int, int], tnpl: int
) -> None:
    pair, _, _ = both
    ends = (pair.decoder, pair.prompt)
    refused(ends, ["kv"], ParamError, (), push_kv_blocks, INDEX, [1], [3], src_range, dst_range, tnpl)


@pytest.mark.parametrize(
    ("index", "src", "dst"),
    [
        (INDEX, [], []),
        (INDEX, [1], []),
        (INDEX, [], [3]),
        (INDEX, [1, 2], [3]),
        (INDEX, [8], [3]),
        (INDEX, [1], [8]),
        (CacheKeyByIdAndIndex(1, 1, 1), [1], [3]),  # the batch index of dst_cache_index must be 0
    ],
)
def test_r31_wrong_lists_are_parameter_errors(
    both: tuple[Pair, Bytes, Bytes], index: Any, src: list[int], dst: list[int]
) -> None:
    pair, _, _ = both
    refused((pair.decoder, pair.prompt), ["kv"], ParamError, (), push_kv_blocks, index, src, dst, ALL, ALL, 2)


def test_r31_codes_of_what_does_not_exist_at_either_end_and_of_no_link(both: tuple[Pair, Bytes, Bytes]) -> None:
    pair, _, _ = both
    ends, args = (pair.decoder, pair.prompt), ([1], [3], ALL, ALL, 2)
    code = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    refused(ends, ["kv"], CacheNotFound, ("99",), push_kv_blocks, CacheKeyByIdAndIndex(1, 99), *args, status=code)
    index, unlinked = CacheKeyByIdAndIndex(7, 1), LLMStatusCode.LLM_NOT_YET_LINK
    refused(ends, ["kv"], NotLinked, ("cluster 7",), push_kv_blocks, index, *args, status=unlinked)
    pair.decoder.do(_deallocate)
    refused(ends, [], CacheNotFound, ("no cache with id 1",), push_kv_blocks, INDEX, *args, status=code)


def _deallocate(world: World) -> None:
    world.caches["copy"] = world.caches["kv"]
    world.cm.deallocate_blocks_cache(world.caches["copy"])


def test_r31_both_ways_of_addressing_are_one_cache(pair: Pair) -> None:
    pair.start(rca=True)
    src = pair.decoder.do(make, "kv", Spec(blocks=True), 1)
    dst = pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 2)
    pair.decoder.do(call, "push_blocks", BLOCKS, Use("kv"), [1], [3])
    pair.decoder.do(call, "push_blocks", INDEX, Use("kv"), [2], [4])
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(3, 1), (4, 2)]))


def test_r31_needs_a_link_first(pair: Pair) -> None:
    pair.start(rca=True, linked=False)
    pair.decoder.do(sample, 1)
    pair.prompt.do(sample, 2)
    with pytest.raises(LLMException) as caught:
        pair.decoder.do(push_kv_blocks, INDEX, [1, 2], [3, 4], ALL, ALL, 2)
    assert caught.value.status_code is LLMStatusCode.LLM_NOT_YET_LINK
    pair.link()
    pair.decoder.do(push_kv_blocks, INDEX, [1, 2], [3, 4], ALL, ALL, 2)
