"""PushKvBlocks (interface R31, R14): two processes, its printed example, layer pairs, tensors per layer, its codes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.cpp_api import Cache, CacheDesc, CacheIndex, KvCacheExtParam, LlmDataDist
from tests.support.cpp import (
    BAD,
    GONE,
    HOST,
    OK,
    UNLINKED,
    Shape,
    attempt,
    index,
    link,
    made,
    run,
    show,
    start_pair,
    unchanged,
)
from tests.support.moves import Use, moved, same_bytes

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers("cpp_api: Cache CacheDesc KvCacheExtParam", "cpp_api.LlmDataDist.PushKvBlocks")

ALL = (-1, -1)
INDEX = CacheIndex(1, 1, 0)
EVERY_TENSOR = range(4)


@pytest.fixture
def both(pair: Pair) -> tuple[Pair, Bytes, Bytes]:
    """Return the linked ends, what the decoder pushes from and what the prompt holds."""
    start_pair(pair)
    return pair, pair.decoder.do(made, "kv", Shape(), 1), pair.prompt.do(made, "kv", Shape(), 2)


def push(pair: Pair, src: list[int], dst: list[int], *ext: Any, to: CacheIndex = INDEX) -> Any:
    return pair.decoder.do(run, "PushKvBlocks", Use("kv"), to, src, dst, *([KvCacheExtParam(*ext)] if ext else []))


def test_r31_the_parameters_have_exactly_the_names_of_the_page() -> None:
    parameters = inspect.signature(LlmDataDist.PushKvBlocks).parameters
    assert list(parameters) == ["self", "src_cache", "dst_cache_index", "src_blocks", "dst_blocks", "ext_param"]
    assert parameters["ext_param"].default == KvCacheExtParam((-1, -1), (-1, -1), 2)


def test_seed_push_kv_blocks_moves_blocks_one_and_two_to_three_and_four(both: tuple[Pair, Bytes, Bytes]) -> None:
    pair, src, dst = both
    assert push(pair, [1, 2], [3, 4]) is OK
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(3, 1), (4, 2)]))
    same_bytes(pair.decoder.do(show, "kv"), src)


@pytest.mark.parametrize("tnpl", [1, 2, 4])
def test_seed_push_kv_blocks_of_the_first_layer_with_ranges_zero_zero(
    both: tuple[Pair, Bytes, Bytes], tnpl: int
) -> None:
    pair, src, dst = both
    assert push(pair, [1, 2], [3, 4], (0, 0), (0, 0), tnpl) is OK
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(3, 1), (4, 2)], [(t, t) for t in range(tnpl)]))
    same_bytes(pair.decoder.do(show, "kv"), src)


def test_seed_push_kv_blocks_layer_by_layer_with_one_tensor_per_layer(both: tuple[Pair, Bytes, Bytes]) -> None:
    pair, src, dst = both
    for layer in EVERY_TENSOR:
        assert push(pair, [5, 6, 7], [5, 6, 7], (layer, layer), (layer, layer), 1) is OK
        wanted = moved(dst, src, [(5, 5), (6, 6), (7, 7)], [(t, t) for t in range(layer + 1)])
        same_bytes(pair.prompt.do(show, "kv"), wanted)


def test_r14_layer_pairs_are_inclusive_and_may_differ_between_the_ends(both: tuple[Pair, Bytes, Bytes]) -> None:
    pair, src, dst = both
    assert push(pair, [0], [7], (0, 1), (2, 3), 1) is OK
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(7, 0)], [(2, 0), (3, 1)]))


@pytest.mark.parametrize("tnpl", [1, 3, 4, 5, 255])
def test_r14_default_ranges_move_everything_whatever_tnpl(both: tuple[Pair, Bytes, Bytes], tnpl: int) -> None:
    pair, src, dst = both
    assert push(pair, [1, 2], [3, 4], ALL, ALL, tnpl) is OK
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(3, 1), (4, 2)]))


def test_r14_one_default_range_stands_for_all_layers(both: tuple[Pair, Bytes, Bytes]) -> None:
    pair, src, dst = both
    assert push(pair, [1], [3], ALL, (0, 1), 2) is OK
    assert push(pair, [2], [4], (0, 0), ALL, 4) is OK
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(3, 1), (4, 2)]))


@pytest.mark.parametrize(
    ("ext", "parts"),
    [
        ((ALL, (0, 0), 2), ("dst_layer_range",)),
        (((0, 0), ALL, 2), ("src_layer_range",)),
        (((0, 1), (0, 0), 2), ("src_layer_range", "dst_layer_range")),
        (((0, 0), (0, 0), 3), ("tensor_num_per_layer=3",)),
        (((0, 0), (0, 0), 8), ("tensor_num_per_layer=8",)),
        (((0, 2), (0, 2), 2), ("src_layer_range", "2 layers")),
        (((0, 0), (2, 2), 2), ("dst_layer_range", "2 layers")),
        (((4, 4), (4, 4), 1), ("src_layer_range", "4 layers")),
        (((1, 0), (1, 0), 2), ("src_layer_range", "first <= last")),
        (((0, -1), (0, -1), 2), ("src_layer_range",)),
        (((0, 0), (0, -1), 2), ("dst_layer_range",)),
        (((-1, 0), (-1, 0), 2), ("src_layer_range",)),
        (((-2, -2), ALL, 2), ("src_layer_range",)),
        (((0, 2**31), ALL, 2), ("src_layer_range[1]", "int32")),
        ((ALL, ALL, 0), ("tensor_num_per_layer=0",)),
        ((ALL, ALL, 256), ("tensor_num_per_layer", "uint8")),
        ((ALL, ALL, -1), ("tensor_num_per_layer", "uint8")),
    ],
)
def test_r14_wrong_ranges_are_invalid_parameters(
    both: tuple[Pair, Bytes, Bytes], ext: tuple[Any, ...], parts: tuple[str, ...]
) -> None:
    ends = (both[0].decoder, both[0].prompt)
    args = (Use("kv"), INDEX, [1], [3], KvCacheExtParam(*ext))
    unchanged(ends, ["kv"], BAD, parts, "PushKvBlocks", *args)


@pytest.mark.parametrize(
    ("to", "src", "dst", "parts"),
    [
        (INDEX, [], [], ("src_blocks is empty",)),
        (INDEX, [], [3], ("src_blocks is empty",)),
        (INDEX, [1], [], ("1", "0", "equal")),
        (INDEX, [1, 2], [3], ("2", "1", "equal")),
        (INDEX, [8], [3], ("src_blocks[0]=8",)),
        (INDEX, [1], [8], ("dst_blocks[0]",)),
        (INDEX, [-1], [3], ("src_blocks[0]", "-1")),
        (INDEX, [1], [2**64], ("dst_blocks[0]",)),
        (CacheIndex(1, 1, 1), [1], [3], ("batch_index=1",)),
        (CacheIndex(2**64, 1), [1], [3], ("cluster_id", "uint64")),
        (CacheIndex(1, 2**63), [1], [3], ("cache_id", "int64")),
        (CacheIndex(1, 1, 2**32), [1], [3], ("batch_index", "uint32")),
    ],
)
def test_r31_wrong_arguments_are_invalid_parameters(
    both: tuple[Pair, Bytes, Bytes], to: CacheIndex, src: list[int], dst: list[int], parts: tuple[str, ...]
) -> None:
    unchanged((both[0].decoder, both[0].prompt), ["kv"], BAD, parts, "PushKvBlocks", Use("kv"), to, src, dst)


def test_r31_codes_of_what_does_not_exist_at_either_end_and_of_no_link(both: tuple[Pair, Bytes, Bytes]) -> None:
    ends = (both[0].decoder, both[0].prompt)
    for cache_id in (99, 0, -1, -(2**63)):
        to = CacheIndex(1, cache_id)
        unchanged(ends, ["kv"], GONE, (), "PushKvBlocks", Use("kv"), to, [1], [3])
        nothing = Cache(cache_id)
        unchanged(ends, ["kv"], GONE, (f"id {cache_id}",), "PushKvBlocks", nothing, INDEX, [1], [3])
    unchanged(ends, ["kv"], UNLINKED, ("cluster 7",), "PushKvBlocks", Use("kv"), CacheIndex(7, 1), [1], [3])


def test_r31_only_the_cache_id_of_the_source_is_read(both: tuple[Pair, Bytes, Bytes]) -> None:
    pair, src, dst = both
    only_id = Cache(pair.decoder.do(index, "kv").cache_id, [1, 2, 3], CacheDesc(HOST, 77))
    assert pair.decoder.do(run, "PushKvBlocks", only_id, INDEX, [1, 2], [3, 4]) is OK
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(3, 1), (4, 2)]))


def test_r31_needs_a_link_first_and_works_both_ways_after_one(pair: Pair) -> None:
    port = start_pair(pair, linked=False)
    src, dst = pair.decoder.do(made, "kv", Shape(), 1), pair.prompt.do(made, "kv", Shape(), 2)
    unchanged((pair.decoder, pair.prompt), ["kv"], UNLINKED, (), "PushKvBlocks", Use("kv"), INDEX, [1], [3])
    link(pair.decoder, 1, port)
    assert push(pair, [1, 2], [3, 4]) is OK
    dst = moved(dst, src, [(3, 1), (4, 2)])
    same_bytes(pair.prompt.do(show, "kv"), dst)
    assert pair.prompt.do(run, "PushKvBlocks", Use("kv"), CacheIndex(2, 1), [3], [0]) is OK
    same_bytes(pair.decoder.do(show, "kv"), moved(src, dst, [(0, 3)]))


@pytest.mark.parametrize("width", [1, 15, 17])
def test_r17_different_block_sizes_are_refused_before_any_byte_moves(pair: Pair, width: int) -> None:
    start_pair(pair)
    pair.decoder.do(made, "kv", Shape(), 1)
    pair.prompt.do(made, "kv", Shape(width=width), 2)
    parts = ("64 bytes", f"{4 * width}")
    unchanged((pair.decoder, pair.prompt), ["kv"], BAD, parts, "PushKvBlocks", Use("kv"), INDEX, [1], [3])


@pytest.mark.parametrize("pairs", [[(0, 1), (0, 2), (0, 3)], [(3, 1), (1, 2), (3, 5), (1, 0)]])
def test_r26_pairs_take_effect_in_the_order_given(
    both: tuple[Pair, Bytes, Bytes], pairs: list[tuple[int, int]]
) -> None:
    pair, src, dst = both
    assert push(pair, [s for _, s in pairs], [d for d, _ in pairs]) is OK
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, pairs))


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("target", [0, 1])
def test_r16_blocks_go_between_all_placements(shm_pair: Pair, source: int, target: int) -> None:
    pair, (src_on, dst_on) = shm_pair, ([HOST, type(HOST).kDevice][i] for i in (source, target))
    start_pair(pair)
    src = pair.decoder.do(made, "kv", Shape(placement=src_on), 1)
    dst = pair.prompt.do(made, "kv", Shape(placement=dst_on), 2)
    assert push(pair, [1, 2], [3, 4]) is OK
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(3, 1), (4, 2)]))


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_memory_of_the_user_is_reached_too(shm_pair: Pair, transport: str) -> None:
    start_pair(shm_pair, transport=transport)
    src = shm_pair.decoder.do(made, "kv", Shape(memory="private"), 1)
    dst = shm_pair.prompt.do(made, "kv", Shape(memory="private"), 2)
    assert push(shm_pair, [1, 2], [3, 4]) is OK
    same_bytes(shm_pair.prompt.do(show, "kv"), moved(dst, src, [(3, 1), (4, 2)]))


def test_block_lists_may_be_arrays(both: tuple[Pair, Bytes, Bytes]) -> None:
    pair, src, dst = both
    args = (Use("kv"), INDEX, np.array([1, 2]), np.array([3, 4], np.uint64))
    assert pair.decoder.do(run, "PushKvBlocks", *args) is OK
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(3, 1), (4, 2)]))


def test_a_cache_that_the_peer_has_dropped_does_not_exist(both: tuple[Pair, Bytes, Bytes]) -> None:
    pair = both[0]
    assert push(pair, [1], [3]) is OK
    assert pair.prompt.do(run, "DeallocateCache", 1) is OK
    assert pair.decoder.do(attempt, "PushKvBlocks", Use("kv"), INDEX, [1], [3])[0] is GONE


def _other_id(world: World) -> int:
    return int(index(world, "kv").cache_id)


def test_equal_ids_are_given_at_both_ends(both: tuple[Pair, Bytes, Bytes]) -> None:
    pair = both[0]
    assert (pair.prompt.do(_other_id), pair.decoder.do(_other_id)) == (1, 1)
