"""push_cache over both transports: every byte inside and outside the addressed row, at both ends (interface §6.12)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import CacheKey, CacheKeyByIdAndIndex
from llm_datadist.errors import CacheMismatch, CacheNotFound, LLMStatusCode, NoneArgument, NotLinked, ParamError
from tests.support.moves import Spec, Use, call, make, moved, refused, refused_all, same_bytes, show

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.moves import Bytes, Case
    from tests.support.world import World

pytestmark = pytest.mark.covers("LayerSelection", "CacheManager.push_cache", "errors: CacheMismatch CacheNotFound")

# The decoder pushes: its cache is the source, the prompt's the destination.
TARGET = Spec(rows=4)
SOURCE = Spec(rows=6)
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def row(index: int, cache_id: int = 1) -> CacheKeyByIdAndIndex:
    return CacheKeyByIdAndIndex(1, cache_id, index)


def both(pair: Pair, source: Spec = SOURCE, target: Spec = TARGET, *, rca: bool = True) -> tuple[Bytes, Bytes]:
    """Start both; return what the decoder (source) and the prompt (destination) hold in "kv"."""
    pair.start(rca=rca)
    return pair.decoder.do(make, "kv", source, 1), pair.prompt.do(make, "kv", target, 2)


def push(world: World, key: Any, src_row: int, ranges: dict[str, Any]) -> None:
    call(world, "push_cache", key, Use("kv"), src_row, **ranges)


def check(pair: Pair, src: Bytes, wanted: Bytes) -> None:
    same_bytes(pair.prompt.do(show, "kv"), wanted)
    same_bytes(pair.decoder.do(show, "kv"), src)


@pytest.mark.parametrize(("src_row", "dst_row"), [(0, 0), (5, 0), (0, 3), (5, 3)])
def test_seed_push_cache_moves_one_row(pair: Pair, src_row: int, dst_row: int) -> None:
    src, dst = both(pair)
    pair.decoder.do(push, row(dst_row), src_row, {})
    check(pair, src, moved(dst, src, [(dst_row, src_row)]))


def test_defaults_are_row_zero_at_both_ends(pair: Pair) -> None:
    src, dst = both(pair)
    pair.decoder.do(call, "push_cache", CacheKeyByIdAndIndex(1, 1), Use("kv"))
    check(pair, src, moved(dst, src, [(0, 0)]))


def test_i11_push_by_id_one_works_from_either_side(pair: Pair) -> None:
    dst, src = both(pair)
    pair.prompt.do(call, "push_cache", CacheKeyByIdAndIndex(2, 1, 4), Use("kv"), 2)
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(4, 2)]))
    same_bytes(pair.prompt.do(show, "kv"), src)


def test_i7_a_longer_remote_row_keeps_its_tail(pair: Pair) -> None:
    src, dst = both(pair, Spec(rows=2, stride=32), Spec(rows=3, stride=80))
    pair.decoder.do(push, row(2), 1, {})
    check(pair, src, moved(dst, src, [(2, 1)]))


@pytest.mark.parametrize("cache_id", [0, -1])
@pytest.mark.parametrize("model", [0, 1])
def test_a_push_to_no_id_means_the_row_of_request_zero_of_model_zero(pair: Pair, cache_id: int, model: int) -> None:
    key = CacheKey(1, 0, model_id=model)
    src, dst = both(pair, target=Spec(rows=4, keys=(CacheKey(1, 7), key)))
    if model:
        ends = (pair.decoder, pair.prompt)
        refused(ends, ["kv"], CacheNotFound, ("req_id=0",), push, row(0, cache_id), 5, {}, status=NOT_EXIST)
    else:
        pair.decoder.do(push, row(0, cache_id), 5, {})
        check(pair, src, moved(dst, src, [(1, 5)]))


@pytest.mark.parametrize(
    ("src_tensors", "dst_tensors", "ranges", "tensors"),
    [
        (4, 4, {"src_layer_range": range(1), "dst_layer_range": range(1)}, [(0, 0), (1, 1)]),
        (6, 4, {"src_layer_range": range(2, 3), "dst_layer_range": range(1)}, [(0, 4), (1, 5)]),
        (2, 6, {"dst_layer_range": range(1, 2)}, [(2, 0), (3, 1)]),
        (6, 2, {"src_layer_range": range(1, 2)}, [(0, 2), (1, 3)]),
        (3, 3, {"src_layer_range": range(1), "tensor_num_per_layer": 3}, [(0, 0), (1, 1), (2, 2)]),
        (6, 6, {"src_layer_range": range(5, 6), "dst_layer_range": range(1), "tensor_num_per_layer": 1}, [(0, 5)]),
        (5, 5, {}, None),  # odd with the default tensor_num_per_layer
        (1, 1, {}, None),  # fewer tensors than a layer: they move (no success with nothing moved)
        (2, 2, {"tensor_num_per_layer": 3}, None),
    ],
)
def test_r14_layer_ranges(
    pair: Pair, src_tensors: int, dst_tensors: int, ranges: dict[str, Any], tensors: list[tuple[int, int]] | None
) -> None:
    src, dst = both(pair, Spec(src_tensors), Spec(dst_tensors))
    pair.decoder.do(push, row(3), 2, ranges)
    check(pair, src, moved(dst, src, [(3, 2)], tensors))


def test_seed_layers_pushed_one_by_one_make_the_whole_row(pair: Pair) -> None:
    src, dst = both(pair)
    for layer in range(4):
        one = range(layer, layer + 1)
        ranges = {"src_layer_range": one, "dst_layer_range": one, "tensor_num_per_layer": 1}
        pair.decoder.do(push, row(1), 4, ranges)
        check(pair, src, moved(dst, src, [(1, 4)], [(t, t) for t in range(layer + 1)]))


# --- arguments (interface §6.12) --------------------------------------------------------------------------------------

KEY = row(0)
BAD_ARGUMENTS: list[Case] = [
    (NoneArgument, (None, Use("kv")), {}, ("dst_cache_key", "None")),
    (TypeError, (CacheKey(1, 1), Use("kv")), {}, ("dst_cache_key", "CacheKeyByIdAndIndex")),
    (NoneArgument, (KEY, None), {}, ("src_cache", "None")),
    (TypeError, (KEY, 1), {}, ("src_cache", "int")),
    (TypeError, (KEY, Use("kv"), "0"), {}, ("src_batch_index", "'0'")),
    (NoneArgument, (KEY, Use("kv"), None), {}, ("src_batch_index",)),
    (ParamError, (KEY, Use("kv"), -1), {}, ("src_batch_index", "-1")),
    (ParamError, (KEY, Use("kv"), 2**32), {}, ("src_batch_index", str(2**32))),
    (ParamError, (KEY, Use("blocks")), {}, ("src_cache", "push_blocks")),
    (TypeError, (KEY, Use("kv")), {"tensor_num_per_layer": 2.0}, ("tensor_num_per_layer", "2.0")),
    (ParamError, (KEY, Use("kv")), {"tensor_num_per_layer": 0}, ("tensor_num_per_layer=0",)),
    (ParamError, (KEY, Use("kv")), {"tensor_num_per_layer": -1}, ("tensor_num_per_layer", "-1")),
    (TypeError, (KEY, Use("kv")), {"src_layer_range": [0, 1]}, ("src_layer_range", "list")),
    (TypeError, (KEY, Use("kv")), {"dst_layer_range": slice(0, 1)}, ("dst_layer_range", "slice")),
    (ParamError, (KEY, Use("kv")), {"src_layer_range": range(0)}, ("src_layer_range", "empty")),
    (ParamError, (KEY, Use("kv")), {"dst_layer_range": range(2, 1)}, ("dst_layer_range", "empty")),
    (ParamError, (KEY, Use("kv")), {"dst_layer_range": range(0, 4, 3)}, ("dst_layer_range", "step 3")),
    (ParamError, (KEY, Use("kv")), {"src_layer_range": range(-1, 1)}, ("src_layer_range", "-1")),
    (TypeError, (KEY, Use("kv")), {"size": "48"}, ("size", "'48'")),
    (NoneArgument, (KEY, Use("kv")), {"size": None}, ("size",)),
    (ParamError, (KEY, Use("kv")), {"size": 48}, ("size=48", "-1")),
    (ParamError, (KEY, Use("kv")), {"size": 0}, ("size=0",)),
    (ParamError, (KEY, Use("kv")), {"size": -2}, ("size=-2",)),
    (ParamError, (KEY, Use("kv"), 6), {}, ("src_batch_index=6", "6 rows")),
    (ParamError, (KEY, Use("kv")), {"src_layer_range": range(1, 3)}, ("src_layer_range=range(1, 3)", "2 layers")),
    (ParamError, (KEY, Use("kv")), {"dst_layer_range": range(1)}, ("dst_layer_range=range(0, 1)", "equal")),
    (
        ParamError,
        (KEY, Use("kv")),
        {"src_layer_range": range(1), "dst_layer_range": range(2)},
        ("src_layer_range", "dst_layer_range", "equal"),
    ),
    (
        ParamError,
        (KEY, Use("kv")),
        {"src_layer_range": range(1), "dst_layer_range": range(1), "tensor_num_per_layer": 3},
        ("tensor_num_per_layer=3", "4 tensors"),
    ),
    (ParamError, (row(4), Use("kv")), {}, ("batch_index", "4", "4 rows")),
    (ParamError, (row(2**32 - 1), Use("kv")), {}, ("batch_index", str(2**32 - 1))),
]


def test_r01_a_wrong_argument_is_refused_before_anything_happened(pair: Pair) -> None:
    both(pair)
    pair.decoder.do(make, "blocks", Spec(blocks=True), 3)
    refused_all((pair.decoder, pair.prompt), ("kv", "blocks"), "push_cache", BAD_ARGUMENTS)


def test_r16_without_rca_a_push_is_refused(pair: Pair) -> None:
    both(pair, rca=False)
    ends = (pair.decoder, pair.prompt)
    refused(ends, ["kv"], ParamError, ("push_cache", "enable_remote_cache_accessible"), push, row(0), 0, {})


def test_a_cache_that_the_peer_does_not_have_does_not_exist(pair: Pair) -> None:
    src, dst = both(pair)
    ends = (pair.decoder, pair.prompt)
    refused(ends, ["kv"], CacheNotFound, ("99",), push, row(0, 99), 0, {}, status=NOT_EXIST)
    pair.decoder.do(push, row(0), 0, {})
    check(pair, src, moved(dst, src, [(0, 0)]))


@pytest.mark.parametrize(
    ("target", "ranges", "parts"),
    [
        (Spec(stride=47), {}, ("47", "48")),
        (Spec(6), {}, ("num_tensors", "6", "4")),
        (Spec(5), {"src_layer_range": range(1), "dst_layer_range": range(1)}, ("5 tensors",)),
        (Spec(4), {"src_layer_range": range(2), "dst_layer_range": range(1, 3)}, ("dst_layer_range=range(1, 3)",)),
        (Spec(6), {"src_layer_range": range(1)}, ("range(0, 1)",)),
    ],
)
def test_a_remote_cache_that_does_not_fit_is_refused(
    pair: Pair, target: Spec, ranges: dict[str, Any], parts: tuple[str, ...]
) -> None:
    both(pair, target=target)
    refused((pair.decoder, pair.prompt), ["kv"], ParamError, parts, push, row(0), 0, ranges)


def test_a_remote_blocks_cache_is_refused(pair: Pair) -> None:
    both(pair, target=Spec(blocks=True))
    refused((pair.decoder, pair.prompt), ["kv"], CacheMismatch, ("blocks cache",), push, row(0), 0, {})


def test_order_of_checks_rca_types_local_cache_local_geometry_link_remote(pair: Pair) -> None:
    pair.start(linked=False, rca=True)
    pair.decoder.do(make, "kv", SOURCE, 1)
    pair.decoder.do(make, "stale", SOURCE, 2)
    pair.decoder.do(call, "deallocate_cache", Use("stale"))
    ends, names = (pair.decoder, pair.prompt), ["kv"]
    refused(ends, names, TypeError, ("src_batch_index",), call, "push_cache", row(0), Use("stale"), "9")
    args: Any = ("push_cache", row(0), Use("stale"), 9)
    refused(ends, names, CacheNotFound, ("no cache with id 2",), call, *args, status=NOT_EXIST)
    refused(ends, names, ParamError, ("src_batch_index=9",), push, row(0), 9, {})
    refused(ends, names, NotLinked, ("cluster 1",), push, row(0), 0, {}, status=LLMStatusCode.LLM_NOT_YET_LINK)
    pair.link()
    refused(ends, names, CacheNotFound, ("no cache with id 1",), push, row(9), 0, {}, status=NOT_EXIST)
    pair.prompt.do(make, "kv", Spec(stride=16), 3)
    refused(ends, names, ParamError, ("batch_index",), push, row(9), 0, {})
    refused(ends, names, CacheMismatch, ("16",), push, row(0), 0, {})
