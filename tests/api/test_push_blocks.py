"""push_blocks over both transports: every byte inside and outside the addressed blocks, at both ends
(interface §6.13)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist.errors import CacheMismatch, CacheNotFound, NoneArgument, NotLinked, ParamError
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, refused, refused_all, same_bytes, show
from tests.support.world import cluster_info

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import LocalEnd
    from tests.support.moves import Bytes, Case
    from tests.support.world import World

pytestmark = pytest.mark.covers("CacheManager.push_blocks", "LLMStatusCode.LLM_SUCCESS")

# The decoder pushes: its cache is the source, the prompt's the destination.
TARGET = Spec(rows=8, blocks=True, blocks_key=BLOCKS)
SOURCE = Spec(rows=6, blocks=True)
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def both(pair: Pair, source: Spec = SOURCE, target: Spec = TARGET, *, rca: bool = True) -> tuple[Bytes, Bytes]:
    """Start both; return what the decoder (source) and the prompt (destination) hold in "kv"."""
    pair.start(rca=rca)
    return pair.decoder.do(make, "kv", source, 1), pair.prompt.do(make, "kv", target, 2)


def push(world: World, key: Any, src: Any, dst: Any, ranges: dict[str, Any]) -> None:
    call(world, "push_blocks", key, Use("kv"), src, dst, **ranges)


def check(pair: Pair, src: Bytes, wanted: Bytes) -> None:
    same_bytes(pair.prompt.do(show, "kv"), wanted)
    same_bytes(pair.decoder.do(show, "kv"), src)


@pytest.mark.parametrize("kind", [list, tuple, np.array])
@pytest.mark.parametrize("key", [BLOCKS, CacheKeyByIdAndIndex(1, 1)])
def test_seed_push_blocks_moves_pairs(pair: Pair, key: Any, kind: Any) -> None:
    src, dst = both(pair)
    pair.decoder.do(push, key, kind([1, 2, 5]), kind([6, 7, 0]), {})
    check(pair, src, moved(dst, src, [(6, 1), (7, 2), (0, 5)]))


def test_i1_the_end_that_was_linked_pushes_as_well(pair: Pair) -> None:
    dst, src = both(pair, Spec(rows=6, blocks=True, blocks_key=BlocksCacheKey(2, 3)))
    pair.prompt.do(push, BlocksCacheKey(2, 3), [7, 0], [0, 5], {})
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(0, 7), (5, 0)]))
    same_bytes(pair.prompt.do(show, "kv"), src)


@pytest.mark.parametrize("pairs", [[(0, 1), (0, 2), (0, 3)], [(3, 1), (1, 2), (3, 5), (1, 0)], [(0, 0), (1, 0)]])
def test_r26_pairs_take_effect_in_the_order_given(pair: Pair, pairs: list[tuple[int, int]]) -> None:
    src, dst = both(pair)
    pair.decoder.do(push, BLOCKS, [s for _, s in pairs], [d for d, _ in pairs], {})
    check(pair, src, moved(dst, src, pairs))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    src = pair.decoder.do(make, "kv", Spec(tensors, rows[0], stride, blocks=True), seed)
    dst = pair.prompt.do(make, "kv", Spec(tensors, rows[1], stride, blocks=True, blocks_key=BLOCKS), seed + 1)
    try:
        pair.decoder.do(push, BLOCKS, [s for _, s in pairs], [d for d, _ in pairs], {})
        check(pair, src, moved(dst, src, pairs))
    finally:
        for end in (pair.prompt, pair.decoder):
            end.do(call, "deallocate_blocks_cache", Use("kv"))


def test_r26_random_blocks_of_random_shapes(pair: Pair) -> None:
    pair.start(rca=True)
    _random_blocks(pair)


@pytest.mark.parametrize(
    ("src_tensors", "dst_tensors", "ranges", "tensors"),
    [
        (4, 4, {"src_layer_range": range(1, 2), "dst_layer_range": range(1)}, [(0, 2), (1, 3)]),
        (8, 2, {"src_layer_range": range(3, 4)}, [(0, 6), (1, 7)]),
        (2, 8, {"dst_layer_range": range(3, 4)}, [(6, 0), (7, 1)]),
        (6, 4, {"src_layer_range": range(5, 6), "dst_layer_range": range(1), "tensor_num_per_layer": 1}, [(0, 5)]),
        (3, 3, {}, [(0, 0), (1, 1), (2, 2)]),  # odd with the default tensor_num_per_layer
        (1, 1, {"tensor_num_per_layer": 9}, [(0, 0)]),
    ],
)
def test_r14_layer_ranges(
    pair: Pair, src_tensors: int, dst_tensors: int, ranges: dict[str, Any], tensors: list[tuple[int, int]]
) -> None:
    source, target = Spec(src_tensors, blocks=True), Spec(dst_tensors, blocks=True, blocks_key=BLOCKS)
    src, dst = both(pair, source, target)
    pair.decoder.do(push, BLOCKS, [7, 2], [1, 3], ranges)
    check(pair, src, moved(dst, src, [(1, 7), (3, 2)], tensors))


# --- interface R28: one's own cluster ---------------------------------------------------------------------------------


def _link_self(world: World) -> Any:
    assert world.dd.listen_port is not None
    return world.dd.link_clusters([cluster_info(world.dd.cluster_id, world.dd.listen_port)], 10_000)


def test_r28_a_link_to_oneself_pushes_but_does_not_pull(end: LocalEnd) -> None:
    end.start("MIX", 1, listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True)
    success = LLMStatusCode.LLM_SUCCESS
    assert end.do(_link_self) == (success, [success])
    dst = end.do(make, "there", TARGET, 1)
    src = end.do(make, "kv", SOURCE, 2)
    end.do(push, BLOCKS, [0, 5], [7, 3], {})
    same_bytes(end.do(show, "there"), moved(dst, src, [(7, 0), (3, 5)]))
    same_bytes(end.do(show, "kv"), src)
    names = ["kv", "there"]
    refused([end], names, ParamError, ("our own",), call, "pull_blocks", BLOCKS, Use("kv"), [0], [0])
    end.do(make, "rows", Spec(), 3)
    refused([end], names, ParamError, ("our own",), call, "pull_cache", CacheKeyByIdAndIndex(1, 3), Use("rows"))


@pytest.mark.parametrize(
    "pairs",
    [
        [(1, 0), (2, 1), (3, 2), (4, 3)],  # a chain: block 0 arrives everywhere
        [(0, 1), (1, 2), (2, 3)],  # a shift
        [(0, 0), (1, 1)],  # nothing
        [(1, 0), (0, 1), (2, 2)],
    ],
)
def test_r26_chains_within_one_cache_take_effect_in_order(end: LocalEnd, pairs: list[tuple[int, int]]) -> None:
    end.start("MIX", 1, listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True)
    end.do(_link_self)
    wanted = end.do(make, "kv", TARGET, 1)
    end.do(push, BLOCKS, [s for _, s in pairs], [d for d, _ in pairs], {})
    for tensor in wanted:
        for to, from_ in pairs:
            tensor[to] = tensor[from_].copy()
    same_bytes(end.do(show, "kv"), wanted)


def test_r26_the_same_block_of_another_layer_moves(end: LocalEnd) -> None:
    end.start("MIX", 1, listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True)
    end.do(_link_self)
    before = end.do(make, "kv", TARGET, 1)
    end.do(push, BLOCKS, [2, 3], [2, 3], {"src_layer_range": range(1), "dst_layer_range": range(1, 2)})
    same_bytes(end.do(show, "kv"), moved(before, before, [(2, 2), (3, 3)], [(2, 0), (3, 1)]))


# --- arguments (interface §6.13) --------------------------------------------------------------------------------------

BAD_ARGUMENTS: list[Case] = [
    (NoneArgument, (None, Use("kv"), [0], [0]), {}, ("dst_cache_key", "None")),
    (TypeError, (CacheKey(1, 1), Use("kv"), [0], [0]), {}, ("dst_cache_key", "CacheKey")),
    (NoneArgument, (BLOCKS, None, [0], [0]), {}, ("src_cache", "None")),
    (TypeError, (BLOCKS, "kv", [0], [0]), {}, ("src_cache", "'kv'")),
    (NoneArgument, (BLOCKS, Use("kv"), None, [0]), {}, ("src_blocks", "None")),
    (NoneArgument, (BLOCKS, Use("kv"), [0], None), {}, ("dst_blocks", "None")),
    (TypeError, (BLOCKS, Use("kv"), iter([0]), [0]), {}, ("src_blocks", "iterator")),
    (TypeError, (BLOCKS, Use("kv"), [0, 1.5], [0, 1]), {}, ("src_blocks[1]", "1.5")),
    (ParamError, (BLOCKS, Use("kv"), [0], [-3]), {}, ("dst_blocks[0]", "-3")),
    (ParamError, (BLOCKS, Use("rows"), [0], [0]), {}, ("src_cache", "push_cache")),
    (ParamError, (BLOCKS, Use("kv")), {}, ("dst_blocks is empty",)),
    (ParamError, (BLOCKS, Use("kv"), [0], ()), {}, ("dst_blocks is empty",)),
    (ParamError, (BLOCKS, Use("kv"), [], [0]), {}, ("src_blocks is empty",)),
    (ParamError, (BLOCKS, Use("kv"), [0], [0, 1]), {}, ("src_blocks has 1", "dst_blocks 2", "equal")),
    (ParamError, (CacheKeyByIdAndIndex(1, 1, 1), Use("kv"), [0], [0]), {}, ("batch_index=1",)),
    (TypeError, (BLOCKS, Use("kv"), [0], [0]), {"tensor_num_per_layer": "2"}, ("tensor_num_per_layer", "'2'")),
    (ParamError, (BLOCKS, Use("kv"), [0], [0]), {"tensor_num_per_layer": 0}, ("tensor_num_per_layer=0",)),
    (TypeError, (BLOCKS, Use("kv"), [0], [0]), {"src_layer_range": 0}, ("src_layer_range", "0")),
    (ParamError, (BLOCKS, Use("kv"), [0], [0]), {"src_layer_range": range(1, 1)}, ("src_layer_range", "empty")),
    (ParamError, (BLOCKS, Use("kv"), [0], [0]), {"dst_layer_range": range(0, 4, 2)}, ("dst_layer_range", "step 2")),
    (ParamError, (BLOCKS, Use("kv"), [0, 6], [0, 0]), {}, ("src_blocks[1]=6", "6 blocks")),
    (ParamError, (BLOCKS, Use("kv"), [0], [8]), {}, ("dst_blocks[0] is 8", "[0, 8)")),
    (ParamError, (BLOCKS, Use("kv"), [0], [0]), {"src_layer_range": range(2, 3)}, ("src_layer_range", "2 layers")),
    (ParamError, (BLOCKS, Use("kv"), [0], [0]), {"dst_layer_range": range(1)}, ("dst_layer_range", "equal")),
]


def test_r01_a_wrong_argument_is_refused_before_anything_happened(local_pair: Pair) -> None:
    _refused(local_pair, BAD_ARGUMENTS)


def test_r01_wrong_arguments_leave_two_processes_as_they_were(shm_pair: Pair) -> None:
    # An iterator does not travel between processes.
    _refused(shm_pair, [case for case in BAD_ARGUMENTS if "iterator" not in case[3]])


def _refused(pair: Pair, cases: list[Case]) -> None:
    both(pair)
    pair.decoder.do(make, "rows", Spec(), 3)
    refused_all((pair.decoder, pair.prompt), ("kv", "rows"), "push_blocks", cases)


def test_r16_without_rca_a_push_is_refused(pair: Pair) -> None:
    both(pair, rca=False)
    ends = (pair.decoder, pair.prompt)
    refused(ends, ["kv"], ParamError, ("push_blocks", "enable_remote_cache_accessible"), push, BLOCKS, [0], [0], {})


@pytest.mark.parametrize("key", [BlocksCacheKey(1, 1), CacheKeyByIdAndIndex(1, 99), CacheKeyByIdAndIndex(1, 0)])
def test_what_the_peer_does_not_have_does_not_exist(pair: Pair, key: Any) -> None:
    src, dst = both(pair)
    ends = (pair.decoder, pair.prompt)
    refused(ends, ["kv"], CacheNotFound, (), push, key, [0], [0], {}, status=NOT_EXIST)
    pair.decoder.do(push, BLOCKS, [0], [0], {})  # the link stays usable
    check(pair, src, moved(dst, src, [(0, 0)]))


@pytest.mark.parametrize("stride", [16, 47, 49, 96])
def test_r17_different_block_sizes_are_refused(pair: Pair, stride: int) -> None:
    both(pair, target=Spec(stride=stride, blocks=True, blocks_key=BLOCKS))
    ends = (pair.decoder, pair.prompt)
    refused(ends, ["kv"], ParamError, ("48 bytes", f"destination {stride}"), push, BLOCKS, [0], [0], {})


@pytest.mark.parametrize(
    ("target", "key", "ranges", "parts"),
    [
        (Spec(), CacheKeyByIdAndIndex(1, 1), {}, ("destination is not a blocks cache",)),
        (Spec(6, blocks=True, blocks_key=BLOCKS), BLOCKS, {}, ("num_tensors", "6", "4")),
        (Spec(6, blocks=True, blocks_key=BLOCKS), BLOCKS, {"src_layer_range": range(1)}, ("range(0, 1)",)),
        (
            Spec(3, blocks=True, blocks_key=BLOCKS),
            BLOCKS,
            {"src_layer_range": range(1), "dst_layer_range": range(1)},
            ("3 tensors",),
        ),
    ],
)
def test_a_remote_cache_that_does_not_fit_is_refused(
    pair: Pair, target: Spec, key: Any, ranges: dict[str, Any], parts: tuple[str, ...]
) -> None:
    both(pair, target=target)
    refused((pair.decoder, pair.prompt), ["kv"], ParamError, parts, push, key, [0], [0], ranges)


def test_order_of_checks_types_local_cache_local_geometry_link_remote(pair: Pair) -> None:
    pair.start(linked=False, rca=True)
    pair.decoder.do(make, "kv", SOURCE, 1)
    pair.decoder.do(make, "stale", SOURCE, 2)
    pair.decoder.do(call, "deallocate_blocks_cache", Use("stale"))
    ends, names = (pair.decoder, pair.prompt), ["kv"]
    refused(ends, names, TypeError, ("src_blocks",), call, "push_blocks", BLOCKS, Use("stale"), ["9"], [0])
    args: Any = ("push_blocks", BLOCKS, Use("stale"), [9], [0])
    refused(ends, names, CacheNotFound, ("no cache with id 2",), call, *args, status=NOT_EXIST)
    refused(ends, names, ParamError, ("src_blocks[0]=9",), push, BLOCKS, [9], [0], {})
    unlinked = LLMStatusCode.LLM_NOT_YET_LINK
    refused(ends, names, NotLinked, ("cluster 1",), push, BLOCKS, [0], [99], {}, status=unlinked)
    pair.link()
    refused(ends, names, CacheNotFound, ("model_id=0",), push, BLOCKS, [0], [99], {}, status=NOT_EXIST)
    pair.prompt.do(make, "kv", Spec(stride=16, blocks=True, blocks_key=BLOCKS), 3)
    refused(ends, names, CacheMismatch, ("block sizes",), push, BLOCKS, [0], [99], {})
