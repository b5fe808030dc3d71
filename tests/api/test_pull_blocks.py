"""pull_blocks over both transports: every byte inside and outside the addressed blocks, at both ends
(interface §6.11)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType
from llm_datadist.errors import CacheMismatch, CacheNotFound, LLMStatusCode, NoneArgument, NotLinked, ParamError
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, refused, refused_all, same_bytes, show

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.moves import Bytes, Case
    from tests.support.world import World

pytestmark = pytest.mark.covers("LayerSelection", "CacheManager.pull_blocks")

SOURCE = Spec(rows=8, blocks=True, blocks_key=BLOCKS)
TARGET = Spec(rows=6, blocks=True)
ROW_KEYS = (CacheKey(1, 10), CacheKey(1, 2**64 - 1, prefix_id=11))
ROWS = Spec(rows=3, stride=5 * 48 - 7, keys=ROW_KEYS)
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def both(pair: Pair, source: Spec = SOURCE, target: Spec = TARGET, **options: Any) -> tuple[Bytes, Bytes]:
    pair.start(**options)
    return pair.prompt.do(make, "kv", source, 1), pair.decoder.do(make, "kv", target, 2)


def pull(world: World, key: Any, src: Any, dst: Any, ranges: dict[str, Any]) -> None:
    call(world, "pull_blocks", key, Use("kv"), src, dst, **ranges)


def check(pair: Pair, src: Bytes, wanted: Bytes) -> None:
    same_bytes(pair.decoder.do(show, "kv"), wanted)
    same_bytes(pair.prompt.do(show, "kv"), src)


@pytest.mark.parametrize("rca", [False, True])
@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_seed_pull_blocks_moves_pairs(pair: Pair, rca: bool, kind: Any) -> None:
    src, dst = both(pair, rca=rca)
    pair.decoder.do(pull, BLOCKS, kind([1, 2, 7]), kind([4, 5, 0]), {})
    check(pair, src, moved(dst, src, [(4, 1), (5, 2), (0, 7)]))


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 1), (0, 2), (0, 3)],  # the last one wins
        [(3, 1), (1, 2), (3, 5), (1, 0)],
        [(0, 0), (1, 0), (2, 0)],  # one source for several
        [(5, 0), (4, 1), (3, 2), (2, 3), (1, 4), (0, 5)],
    ],
)
def test_r26_pairs_take_effect_in_the_order_given(pair: Pair, pairs: list[tuple[int, int]]) -> None:
    src, dst = both(pair)
    pair.decoder.do(pull, BLOCKS, [s for _, s in pairs], [d for d, _ in pairs], {})
    check(pair, src, moved(dst, src, pairs))


def test_bools_and_numpy_integers_are_block_numbers(pair: Pair) -> None:
    src, dst = both(pair)
    pair.decoder.do(pull, BLOCKS, [True, np.int32(5)], (np.uint64(3), False), {})
    check(pair, src, moved(dst, src, [(3, 1), (0, 5)]))


def test_a_blocks_key_names_the_model(pair: Pair) -> None:
    both(pair)
    other = pair.prompt.do(make, "other", Spec(blocks=True, blocks_key=BlocksCacheKey(77, 9)), 5)
    dst = pair.decoder.do(show, "kv")
    pair.decoder.do(pull, BlocksCacheKey(1, 9), [3], [3], {})
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, other, [(3, 3)]))
    same_bytes(pair.prompt.do(show, "other"), other)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.integers(1, 5),
    rows=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    stride=st.sampled_from([1, 7, 48, 512, 4096, 5000]),
    seed=st.integers(0, 2**32 - 1),
)
def _random_blocks(pair: Pair, tensors: int, rows: tuple[int, int], stride: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 200))
    pairs = [(int(d), int(s)) for d, s in random.integers(0, (rows[1], rows[0]), (count, 2))]
    source = Spec(tensors, rows[0], stride, blocks=True, blocks_key=BLOCKS)
    src = pair.prompt.do(make, "kv", source, seed)
    dst = pair.decoder.do(make, "kv", Spec(tensors, rows[1], stride, blocks=True), seed + 1)
    try:
        pair.decoder.do(pull, BLOCKS, [s for _, s in pairs], [d for d, _ in pairs], {})
        check(pair, src, moved(dst, src, pairs))
    finally:
        for end in (pair.prompt, pair.decoder):
            end.do(call, "deallocate_blocks_cache", Use("kv"))


def test_r26_random_blocks_of_random_shapes(pair: Pair) -> None:
    pair.start()
    _random_blocks(pair)


# --- cache -> blocks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "row", "rca"),
    [
        (ROW_KEYS[0], 0, False),
        (ROW_KEYS[1], 1, False),
        (CacheKeyByIdAndIndex(1, 1, 2), 2, False),
        (CacheKeyByIdAndIndex(1, 1, 2), 2, True),
        (ROW_KEYS[0], 0, True),
    ],
)
@pytest.mark.parametrize("targets", [[4, 5, 0, 2, 1], [3], [0, 1, 2]])
def test_i8_a_row_goes_into_blocks_and_the_last_piece_may_be_short(
    pair: Pair, key: Any, row: int, rca: bool, targets: list[int]
) -> None:
    src, dst = both(pair, ROWS, TARGET, rca=rca)
    pair.decoder.do(pull, key, [], targets, {})
    check(pair, src, pieces(dst, src, row, targets))


def pieces(dst: Bytes, src: Bytes, row: int, targets: list[int]) -> Bytes:
    wanted = [tensor.copy() for tensor in dst]
    unit = wanted[0].shape[1]
    for to, from_ in zip(wanted, src, strict=True):
        for i, target in enumerate(targets):
            piece = from_[row, i * unit : (i + 1) * unit]
            to[target, : len(piece)] = piece
    return wanted


def test_a_row_shorter_than_a_block_is_one_short_piece(pair: Pair) -> None:
    src, dst = both(pair, Spec(rows=2, stride=5, keys=ROW_KEYS[:1]), TARGET)
    pair.decoder.do(pull, ROW_KEYS[0], (), [2], {})
    check(pair, src, pieces(dst, src, 0, [2]))


def test_a_piece_beyond_the_row_is_refused(pair: Pair) -> None:
    both(pair, ROWS, TARGET)
    ends = (pair.decoder, pair.prompt)
    refused(ends, ["kv"], ParamError, ("dst_blocks", "5 pieces"), pull, ROW_KEYS[0], [], [0, 1, 2, 3, 4, 5], {})


# --- layer ranges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src_tensors", "dst_tensors", "ranges", "tensors"),
    [
        (4, 4, {"src_layer_range": range(1, 2), "dst_layer_range": range(1)}, [(0, 2), (1, 3)]),
        (8, 2, {"src_layer_range": range(3, 4)}, [(0, 6), (1, 7)]),
        (2, 8, {"dst_layer_range": range(3, 4)}, [(6, 0), (7, 1)]),
        (
            6,
            4,
            {"src_layer_range": range(1, 4), "dst_layer_range": range(3), "tensor_num_per_layer": 1},
            [(0, 1), (1, 2), (2, 3)],
        ),
        (3, 3, {}, [(0, 0), (1, 1), (2, 2)]),  # MindIE: odd, default tensor_num_per_layer
    ],
)
@pytest.mark.parametrize("paged", [True, False])
def test_r14_layer_ranges(
    pair: Pair,
    paged: bool,
    src_tensors: int,
    dst_tensors: int,
    ranges: dict[str, Any],
    tensors: list[tuple[int, int]],
) -> None:
    source = Spec(src_tensors, blocks=True, blocks_key=BLOCKS) if paged else Spec(src_tensors, keys=ROW_KEYS)
    src, dst = both(pair, source, Spec(dst_tensors, rows=6, blocks=True))
    if paged:
        pair.decoder.do(pull, BLOCKS, [7, 2], [1, 3], ranges)
        wanted = moved(dst, src, [(1, 7), (3, 2)], tensors)
    else:
        pair.decoder.do(pull, ROW_KEYS[0], [], [3], ranges)
        wanted = moved(dst, src, [(3, 0)], tensors)
    check(pair, src, wanted)


# --- arguments (interface §6.11) --------------------------------------------------------------------------------------

BAD_ARGUMENTS: list[Case] = [
    (NoneArgument, (None, Use("kv"), [0], [0]), {}, ("src_cache_key", "None")),
    (TypeError, (7, Use("kv"), [0], [0]), {}, ("src_cache_key", "7")),
    (NoneArgument, (BLOCKS, None, [0], [0]), {}, ("dst_cache", "None")),
    (TypeError, (BLOCKS, "kv", [0], [0]), {}, ("dst_cache", "'kv'")),
    (NoneArgument, (BLOCKS, Use("kv"), None, [0]), {}, ("src_blocks", "None")),
    (NoneArgument, (BLOCKS, Use("kv"), [0], None), {}, ("dst_blocks", "None")),
    (TypeError, (BLOCKS, Use("kv"), {0}, [0]), {}, ("src_blocks", "set")),
    (TypeError, (BLOCKS, Use("kv"), [0], range(1)), {}, ("dst_blocks", "range")),
    (TypeError, (BLOCKS, Use("kv"), [0, 1.0], [0, 1]), {}, ("src_blocks[1]", "1.0")),
    (TypeError, (BLOCKS, Use("kv"), [0], ["0"]), {}, ("dst_blocks[0]", "'0'")),
    (TypeError, (BLOCKS, Use("kv"), [None], [0]), {}, ("src_blocks[0]", "None")),
    (TypeError, (BLOCKS, Use("kv"), np.zeros((1, 1), np.int64), [0]), {}, ("src_blocks", "2-D")),
    (TypeError, (BLOCKS, Use("kv"), np.zeros(1), [0]), {}, ("src_blocks", "float64")),
    (ParamError, (BLOCKS, Use("kv"), [0, -1], [0, 1]), {}, ("src_blocks[1]", "-1")),
    (ParamError, (BLOCKS, Use("kv"), [0], [-1]), {}, ("dst_blocks[0]", "-1")),
    (ParamError, (BLOCKS, Use("kv"), [2**64], [0]), {}, ("src_blocks[0]", str(2**64))),
    (ParamError, (BLOCKS, Use("kv"), [0], np.array([2**63], np.uint64)), {}, ("dst_blocks[0]", str(2**63))),
    (ParamError, (BLOCKS, Use("rows"), [0], [0]), {}, ("dst_cache", "pull_cache")),
    (ParamError, (BLOCKS, Use("kv"), [], []), {}, ("dst_blocks is empty",)),
    (ParamError, (BLOCKS, Use("kv")), {}, ("dst_blocks is empty",)),
    (ParamError, (BLOCKS, Use("kv"), [0], []), {}, ("dst_blocks is empty",)),
    (ParamError, (BLOCKS, Use("kv"), [], [0]), {}, ("src_blocks is empty", "BlocksCacheKey")),
    (ParamError, (BLOCKS, Use("kv"), [0, 1], [0]), {}, ("src_blocks has 2", "dst_blocks 1", "equal")),
    (ParamError, (CacheKey(1, 1), Use("kv"), [0], [0]), {}, ("src_blocks has 1", "BlocksCacheKey")),
    (ParamError, (CacheKeyByIdAndIndex(1, 1), Use("kv"), [0], [0]), {}, ("src_blocks has 1",)),
    (ParamError, (CacheKey(1, 2**64 - 1), Use("kv"), [], [0]), {}, ("cache_key", "exactly one")),
    (ParamError, (CacheKey(1, 1, 0, 1), Use("kv"), [], [0]), {}, ("cache_key", "exactly one")),
    (TypeError, (BLOCKS, Use("kv"), [0], [0]), {"tensor_num_per_layer": 1.5}, ("tensor_num_per_layer", "1.5")),
    (NoneArgument, (BLOCKS, Use("kv"), [0], [0]), {"tensor_num_per_layer": None}, ("tensor_num_per_layer",)),
    (ParamError, (BLOCKS, Use("kv"), [0], [0]), {"tensor_num_per_layer": 0}, ("tensor_num_per_layer=0",)),
    (ParamError, (BLOCKS, Use("kv"), [0], [0]), {"tensor_num_per_layer": 2**32}, ("tensor_num_per_layer",)),
    (TypeError, (BLOCKS, Use("kv"), [0], [0]), {"src_layer_range": 1}, ("src_layer_range", "1")),
    (ParamError, (BLOCKS, Use("kv"), [0], [0]), {"dst_layer_range": range(3, 0, -1)}, ("dst_layer_range", "step -1")),
    (ParamError, (BLOCKS, Use("kv"), [0], [0]), {"dst_layer_range": range(-2, 0)}, ("dst_layer_range", "-2")),
    (ParamError, (BlocksCacheKey(2, 0), Use("kv"), [0], [0]), {}, ("cluster_id=2", "our own")),
    (ParamError, (CacheKey(2, 1), Use("kv"), [], [0]), {}, ("cluster_id=2", "our own")),
    (ParamError, (BLOCKS, Use("kv"), [0, 1], [0, 6]), {}, ("dst_blocks[1]=6", "6 blocks")),
    (ParamError, (BLOCKS, Use("kv"), [0], [0]), {"dst_layer_range": range(1, 3)}, ("dst_layer_range=range(1, 3)",)),
    (ParamError, (BLOCKS, Use("kv"), [0], [0]), {"src_layer_range": range(1)}, ("src_layer_range", "equal")),
]


def test_r01_a_wrong_argument_is_refused_before_anything_happened(pair: Pair) -> None:
    both(pair)
    pair.decoder.do(make, "rows", Spec(), 3)
    refused_all((pair.decoder, pair.prompt), ("kv", "rows"), "pull_blocks", BAD_ARGUMENTS)


@pytest.mark.parametrize("key", [BlocksCacheKey(1, 1), CacheKey(1, 0), CacheKeyByIdAndIndex(1, 99)])
def test_what_the_peer_does_not_have_does_not_exist(pair: Pair, key: Any) -> None:
    src, dst = both(pair)
    lists = ([0], [0]) if isinstance(key, BlocksCacheKey) else ([], [0])
    refused((pair.decoder, pair.prompt), ["kv"], CacheNotFound, (), pull, key, *lists, {}, status=NOT_EXIST)
    pair.decoder.do(pull, BLOCKS, [0], [0], {})  # the link stays usable
    check(pair, src, moved(dst, src, [(0, 0)]))


@pytest.mark.parametrize("stride", [16, 47, 49, 96])
def test_r17_different_block_sizes_are_refused(pair: Pair, stride: int) -> None:
    both(pair, Spec(stride=stride, blocks=True, blocks_key=BLOCKS))
    ends = (pair.decoder, pair.prompt)
    refused(ends, ["kv"], ParamError, (f"{stride} bytes", "48"), pull, BLOCKS, [0], [0], {})


@pytest.mark.parametrize(
    ("source", "key", "src", "ranges", "parts"),
    [
        (SOURCE, BLOCKS, [8], {}, ("src_blocks[0] is 8", "[0, 8)")),
        (Spec(6, blocks=True, blocks_key=BLOCKS), BLOCKS, [0], {}, ("num_tensors", "6", "4")),
        (Spec(6, blocks=True, blocks_key=BLOCKS), BLOCKS, [0], {"src_layer_range": range(2, 4)}, ("range(2, 4)",)),
        (Spec(5, blocks=True, blocks_key=BLOCKS), BLOCKS, [0], {"src_layer_range": range(2)}, ("5 tensors",)),
        (SOURCE, CacheKeyByIdAndIndex(1, 1), [], {}, ("blocks", "BlocksCacheKey")),
    ],
)
def test_a_remote_cache_that_does_not_fit_is_refused(
    pair: Pair, source: Spec, key: Any, src: list[int], ranges: dict[str, Any], parts: tuple[str, ...]
) -> None:
    both(pair, source)
    refused((pair.decoder, pair.prompt), ["kv"], ParamError, parts, pull, key, src, [0], ranges)


def test_order_of_checks_types_own_cluster_local_cache_local_geometry_link_remote(pair: Pair) -> None:
    pair.start(linked=False)
    pair.decoder.do(make, "kv", TARGET, 1)
    pair.decoder.do(make, "stale", TARGET, 2)
    pair.decoder.do(call, "deallocate_blocks_cache", Use("stale"))
    ends, names, own = (pair.decoder, pair.prompt), ["kv"], BlocksCacheKey(2, 0)
    refused(ends, names, TypeError, ("dst_blocks",), call, "pull_blocks", own, Use("stale"), [0], ["9"])
    refused(ends, names, ParamError, ("our own",), call, "pull_blocks", own, Use("stale"), [0], [9])
    args: Any = ("pull_blocks", BLOCKS, Use("stale"), [0], [9])
    refused(ends, names, CacheNotFound, ("no cache with id 2",), call, *args, status=NOT_EXIST)
    refused(ends, names, ParamError, ("dst_blocks[0]=9",), pull, BLOCKS, [0], [9], {})
    unlinked = LLMStatusCode.LLM_NOT_YET_LINK
    refused(ends, names, NotLinked, ("cluster 1",), pull, BLOCKS, [99], [0], {}, status=unlinked)
    pair.link()
    refused(ends, names, CacheNotFound, ("model_id=0",), pull, BLOCKS, [99], [0], {}, status=NOT_EXIST)
    pair.prompt.do(make, "kv", Spec(stride=16, blocks=True, blocks_key=BLOCKS), 3)
    refused(ends, names, CacheMismatch, ("block sizes",), pull, BLOCKS, [99], [0], {})


def _publish_too_many_tensors(world: World) -> None:
    pool = world.cm.allocate_blocks_cache(CacheDesc(1, [1, 64], DataType.DT_UINT8))
    count = 90_000
    desc = CacheDesc(count, [1, 16], DataType.DT_UINT8)
    world.cm.register_blocks_cache(desc, [pool.tensor_addrs[0]] * count, BlocksCacheKey(1, 77))


def _pull_too_many_tensors(world: World) -> None:
    cache = world.cm.allocate_blocks_cache(CacheDesc(1, [1, 16], DataType.DT_UINT8))
    world.cm.pull_blocks(BlocksCacheKey(1, 77), cache, [0], [0])


def test_a_cache_with_more_tensors_than_a_frame_can_name_is_refused_and_not_waited_for(pair: Pair) -> None:
    pair.start()
    pair.prompt.do(_publish_too_many_tensors)
    with pytest.raises(ParamError, match="too many tensors"):
        pair.decoder.do(_pull_too_many_tensors)
