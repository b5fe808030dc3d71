"""pull_cache over both transports: every byte inside and outside the addressed row, at both ends (interface §6.10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import CacheKey, CacheKeyByIdAndIndex
from llm_datadist.errors import CacheMismatch, CacheNotFound, LLMStatusCode, NoneArgument, NotLinked, ParamError
from tests.support.moves import Spec, Use, cache_id, call, forget, make, moved, refused, refused_all, same_bytes, show

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.moves import Bytes, Case

pytestmark = pytest.mark.covers("CacheManager.pull_cache", "errors.CacheMismatch")

KEYS = (CacheKey(1, 10), CacheKey(1, 2**64 - 1, prefix_id=11), CacheKey(1, 12, model_id=5))
SOURCE = Spec(rows=4, keys=KEYS)
TARGET = Spec(rows=6)
BY_ID = CacheKeyByIdAndIndex(1, 1, 2)


def both(pair: Pair, source: Spec = SOURCE, target: Spec = TARGET, **settings: Any) -> tuple[Bytes, Bytes]:
    """Start both ends with one filled cache each, called "kv"."""
    pair.start(**settings)
    return pair.prompt.do(make, "kv", source, 1), pair.decoder.do(make, "kv", target, 2)


def check(pair: Pair, src: Bytes, wanted: Bytes) -> None:
    same_bytes(pair.decoder.do(show, "kv"), wanted)
    same_bytes(pair.prompt.do(show, "kv"), src)


@pytest.mark.parametrize(
    ("key", "row"),
    [
        (KEYS[0], 0),
        (KEYS[1], 1),
        (KEYS[2], 2),
        (CacheKeyByIdAndIndex(1, 1, 3), 3),
        (CacheKeyByIdAndIndex(1, 1), 0),
        (BY_ID, 2),
    ],
)
def test_seed_pull_cache_moves_one_row(pair: Pair, key: CacheKey | CacheKeyByIdAndIndex, row: int) -> None:
    src, dst = both(pair)
    pair.decoder.do(call, "pull_cache", key, Use("kv"), 4)
    check(pair, src, moved(dst, src, [(4, row)]))


def test_defaults_are_row_zero_and_the_whole_row(pair: Pair) -> None:
    src, dst = both(pair)
    pair.decoder.do(call, "pull_cache", KEYS[0], Use("kv"))
    check(pair, src, moved(dst, src, [(0, 0)]))


def test_i1_either_side_pulls_from_the_other(pair: Pair) -> None:
    dst, src = both(pair, TARGET, Spec(rows=3, keys=(CacheKey(2, 7),)))
    pair.prompt.do(call, "pull_cache", CacheKey(2, 7), Use("kv"), 5)
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(5, 0)]))
    same_bytes(pair.decoder.do(show, "kv"), src)


@pytest.mark.parametrize("size", [1, 17, 47, 48])
def test_size_is_bytes_per_tensor_from_the_start_of_the_row(pair: Pair, size: int) -> None:
    src, dst = both(pair)
    pair.decoder.do(call, "pull_cache", KEYS[0], Use("kv"), 1, size)
    wanted = [tensor.copy() for tensor in dst]
    for to, from_ in zip(wanted, src, strict=True):
        to[1, :size] = from_[0, :size]
    check(pair, src, wanted)


def test_i7_a_longer_remote_row_is_truncated(pair: Pair) -> None:
    src, dst = both(pair, Spec(rows=3, stride=80, keys=KEYS), Spec(rows=2, stride=32))
    pair.decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, 1, 2), Use("kv"), 1)
    check(pair, src, moved(dst, src, [(1, 2)]))


def test_size_lets_a_shorter_remote_row_into_a_longer_one(pair: Pair) -> None:
    src, dst = both(pair, Spec(rows=2, stride=32, keys=KEYS[:1]), Spec(rows=3, stride=80))
    pair.decoder.do(call, "pull_cache", KEYS[0], Use("kv"), 2, 32)
    check(pair, src, moved(dst, src, [(2, 0)]))


# --- layer ranges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src_tensors", "dst_tensors", "ranges", "tensors"),
    [
        (4, 4, {"src_layer_range": range(1), "dst_layer_range": range(1)}, [(0, 0), (1, 1)]),
        (6, 4, {"src_layer_range": range(2, 3), "dst_layer_range": range(1)}, [(0, 4), (1, 5)]),
        (4, 6, {"src_layer_range": range(2), "dst_layer_range": range(1, 3)}, [(2, 0), (3, 1), (4, 2), (5, 3)]),
        (2, 6, {"dst_layer_range": range(1, 2)}, [(2, 0), (3, 1)]),  # the whole of a smaller remote cache
        (6, 2, {"src_layer_range": range(1, 2)}, [(0, 2), (1, 3)]),  # into the whole of a smaller local one
        (
            6,
            3,
            {"src_layer_range": range(4, 6), "dst_layer_range": range(1, 3), "tensor_num_per_layer": 1},
            [(1, 4), (2, 5)],
        ),
        (3, 3, {"src_layer_range": range(1), "tensor_num_per_layer": 3}, [(0, 0), (1, 1), (2, 2)]),
        (4, 4, {"src_layer_range": range(0), "dst_layer_range": range(5, 5)}, None),  # empty means not given
        (5, 5, {}, None),  # MindIE: an odd number of tensors with the default tensor_num_per_layer
        (5, 5, {"tensor_num_per_layer": 7}, None),
    ],
)
def test_r14_layer_ranges(
    pair: Pair, src_tensors: int, dst_tensors: int, ranges: dict[str, Any], tensors: list[tuple[int, int]] | None
) -> None:
    src, dst = both(pair, Spec(src_tensors, keys=KEYS), Spec(dst_tensors))
    pair.decoder.do(_pull_with, KEYS[2], 3, ranges)
    check(pair, src, moved(dst, src, [(3, 2)], tensors))


def _pull_with(world: Any, key: Any, row: int, ranges: dict[str, Any]) -> None:
    call(world, "pull_cache", key, Use("kv"), row, **ranges)


def test_r14_in_rca_mode_too(pair: Pair) -> None:
    src, dst = both(pair, Spec(6, keys=KEYS), Spec(4), rca=True)
    pair.decoder.do(_pull_with, BY_ID, 0, {"src_layer_range": range(1, 3)})
    check(pair, src, moved(dst, src, [(0, 2)], [(i, i + 2) for i in range(4)]))


def test_rca_pulls_by_id_can_be_repeated(pair: Pair) -> None:
    src, dst = both(pair, rca=True)
    for row in (1, 2, 3):
        pair.decoder.do(call, "pull_cache", BY_ID, Use("kv"), row)
    check(pair, src, moved(dst, src, [(1, 2), (2, 2), (3, 2)]))


# --- arguments (interface §6.10): nothing happens at either end -------------------------------------------------------

BAD_ARGUMENTS: list[Case] = [
    (NoneArgument, (None, Use("kv")), {}, ("cache_key", "None")),
    (TypeError, ("key", Use("kv")), {}, ("cache_key", "'key'")),
    (NoneArgument, (KEYS[0], None), {}, ("cache", "None")),
    (TypeError, (KEYS[0], 1), {}, ("cache", "int")),
    (TypeError, (KEYS[0], Use("kv"), 1.0), {}, ("batch_index", "1.0")),
    (NoneArgument, (KEYS[0], Use("kv"), None), {}, ("batch_index",)),
    (ParamError, (KEYS[0], Use("kv"), -1), {}, ("batch_index", "-1")),
    (ParamError, (KEYS[0], Use("kv"), 2**32), {}, ("batch_index", str(2**32))),
    (TypeError, (KEYS[0], Use("kv"), 0, "8"), {}, ("size", "'8'")),
    (ParamError, (KEYS[0], Use("kv"), 0, 2**63), {}, ("size", str(2**63))),
    (ParamError, (KEYS[0], Use("blocks")), {}, ("cache", "blocks cache", "pull_blocks")),
    (ParamError, (KEYS[0], Use("kv"), 0, 0), {}, ("size=0",)),
    (ParamError, (KEYS[0], Use("kv"), 0, -2), {}, ("size=-2",)),
    (TypeError, (KEYS[0], Use("kv")), {"tensor_num_per_layer": 1.0}, ("tensor_num_per_layer", "1.0")),
    (TypeError, (KEYS[0], Use("kv")), {"tensor_num_per_layer": "x"}, ("tensor_num_per_layer", "'x'")),
    (ParamError, (KEYS[0], Use("kv")), {"tensor_num_per_layer": -1}, ("tensor_num_per_layer", "-1")),
    (ParamError, (KEYS[0], Use("kv")), {"tensor_num_per_layer": 0}, ("tensor_num_per_layer=0",)),
    (ParamError, (CacheKey(1, 2**64 - 1), Use("kv")), {}, ("cache_key", "exactly one")),
    (ParamError, (CacheKey(1, 1, 0, 1), Use("kv")), {}, ("cache_key", "exactly one")),
    (TypeError, (KEYS[0], Use("kv")), {"src_layer_range": [0]}, ("src_layer_range", "list")),
    (TypeError, (KEYS[0], Use("kv")), {"dst_layer_range": (0, 1)}, ("dst_layer_range", "tuple")),
    (ParamError, (KEYS[0], Use("kv")), {"src_layer_range": range(0, 2, 2)}, ("src_layer_range", "step 2")),
    (ParamError, (KEYS[0], Use("kv")), {"dst_layer_range": range(-1, 1)}, ("dst_layer_range", "-1")),
    (ParamError, (CacheKey(2, 10), Use("kv")), {}, ("cluster_id=2", "our own")),
    (ParamError, (CacheKeyByIdAndIndex(2, 1), Use("kv")), {}, ("cluster_id=2", "our own")),
    (ParamError, (KEYS[0], Use("kv"), 6), {}, ("batch_index=6", "6 rows")),
    (ParamError, (KEYS[0], Use("kv"), 0, 49), {}, ("size=49", "48 bytes")),
    (ParamError, (KEYS[0], Use("kv")), {"dst_layer_range": range(2, 3)}, ("dst_layer_range=range(2, 3)", "2 layers")),
    (ParamError, (KEYS[0], Use("kv")), {"src_layer_range": range(1)}, ("src_layer_range=range(0, 1)", "equal")),
    (
        ParamError,
        (KEYS[0], Use("kv")),
        {"src_layer_range": range(1), "dst_layer_range": range(2)},
        ("src_layer_range=range(0, 1)", "dst_layer_range=range(0, 2)", "equal"),
    ),
    (
        ParamError,
        (KEYS[0], Use("kv")),
        {"src_layer_range": range(1), "tensor_num_per_layer": 3},
        ("tensor_num_per_layer=3", "4 tensors"),
    ),
    (ParamError, (KEYS[0], Use("kv")), {"src_layer_range": range(2**70)}, ("src_layer_range",)),
]


def test_r01_a_wrong_argument_is_refused_before_anything_happened(pair: Pair) -> None:
    both(pair)
    pair.decoder.do(make, "blocks", Spec(blocks=True), 3)
    refused_all((pair.decoder, pair.prompt), ("kv", "blocks"), "pull_cache", BAD_ARGUMENTS)


def test_r01_with_rca_a_cache_key_is_a_type_error(pair: Pair) -> None:
    both(pair, rca=True)
    ends = (pair.decoder, pair.prompt)
    refused(ends, ["kv"], TypeError, ("cache_key", "CacheKeyByIdAndIndex"), call, "pull_cache", KEYS[0], Use("kv"))


def test_ranges_are_keyword_only(pair: Pair) -> None:
    both(pair)
    ends = (pair.decoder, pair.prompt)
    refused(ends, ["kv"], TypeError, ("positional",), call, "pull_cache", KEYS[0], Use("kv"), 0, -1, range(1))


NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        (CacheKey(1, 13), ("req_id=13",)),
        (CacheKey(1, 10, model_id=1), ("req_id=10", "model_id=1")),
        (CacheKey(1, 11), ("req_id=11",)),  # 11 is a prefix id
        (CacheKey(1, 2**64 - 1, prefix_id=10), ("prefix_id=10",)),  # 10 is a request id
        (CacheKeyByIdAndIndex(1, 99), ("99",)),
        (CacheKeyByIdAndIndex(1, 0), ("0",)),
        (CacheKeyByIdAndIndex(1, -1), ("-1",)),
        (CacheKeyByIdAndIndex(1, 1, 4), ("4 rows", "row 4")),
        (CacheKeyByIdAndIndex(1, 1, 2**32 - 1), ("4 rows",)),
    ],
)
def test_what_the_peer_does_not_have_does_not_exist(pair: Pair, key: Any, parts: tuple[str, ...]) -> None:
    both(pair)
    ends = (pair.decoder, pair.prompt)
    refused(ends, ["kv"], CacheNotFound, parts, call, "pull_cache", key, Use("kv"), status=NOT_EXIST)
    pair.decoder.do(call, "pull_cache", KEYS[0], Use("kv"))  # the link stays usable


@pytest.mark.parametrize(
    ("source", "kwargs", "parts"),
    [
        (Spec(rows=4, stride=47, keys=KEYS), {}, ("47", "48")),
        (Spec(rows=4, stride=16, keys=KEYS), {"size": 17}, ("size=17", "16")),
        (Spec(6, keys=KEYS), {}, ("num_tensors", "6", "4")),
        (
            Spec(6, keys=KEYS),
            {"src_layer_range": range(2, 4), "dst_layer_range": range(2)},
            ("range(2, 4)", "3 layers"),
        ),
        (Spec(6, keys=KEYS), {"dst_layer_range": range(1)}, ("range(0, 1)",)),
        (Spec(5, keys=KEYS), {"dst_layer_range": range(1), "src_layer_range": range(1)}, ("5 tensors",)),
    ],
)
def test_a_remote_cache_that_does_not_fit_is_refused(
    pair: Pair, source: Spec, kwargs: dict[str, Any], parts: tuple[str, ...]
) -> None:
    both(pair, source)
    refused((pair.decoder, pair.prompt), ["kv"], ParamError, parts, call, "pull_cache", KEYS[0], Use("kv"), **kwargs)


def test_a_remote_blocks_cache_is_refused(pair: Pair) -> None:
    both(pair, Spec(blocks=True))
    key = CacheKeyByIdAndIndex(1, 1)
    refused((pair.decoder, pair.prompt), ["kv"], CacheMismatch, ("blocks cache",), call, "pull_cache", key, Use("kv"))


def test_order_of_checks_types_own_cluster_local_cache_local_geometry_link_remote(pair: Pair) -> None:
    pair.start(linked=False)
    pair.decoder.do(make, "kv", TARGET, 1)
    pair.decoder.do(make, "gone", TARGET, 2)
    ends, names = (pair.decoder, pair.prompt), ["kv"]
    gone = pair.decoder.do(_stale_handle)
    args: Any = ("pull_cache", CacheKey(2, 1), Use("stale"), 6)
    refused(ends, names, TypeError, ("batch_index",), call, *args[:3], "6")
    refused(ends, names, ParamError, ("our own",), call, *args)
    args = ("pull_cache", CacheKey(1, 1), Use("stale"), 6)
    refused(ends, names, CacheNotFound, (f"no cache with id {gone}",), call, *args, status=NOT_EXIST)
    args = ("pull_cache", CacheKey(1, 1), Use("kv"), 6)
    refused(ends, names, ParamError, ("batch_index=6",), call, *args)
    unlinked = LLMStatusCode.LLM_NOT_YET_LINK
    refused(ends, names, NotLinked, ("cluster 1",), call, "pull_cache", CacheKey(1, 1), Use("kv"), status=unlinked)
    pair.link()
    refused(ends, names, CacheNotFound, ("req_id=1",), call, "pull_cache", CacheKey(1, 1), Use("kv"), status=NOT_EXIST)


def _stale_handle(world: Any) -> int:
    world.caches["stale"] = world.caches.pop("gone")
    forget(world, "stale")
    return cache_id(world, "stale")
