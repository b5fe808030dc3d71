"""Pulls and pushes: what the peer's cache must be, the order of the checks, and one's own cluster (interface §6.10 to
§6.13, R14, R17, R26, R28). Arguments by themselves: test_bad_input_*.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMStatusCode
from llm_datadist.errors import CacheMismatch, CacheNotFound, NotLinked, ParamError
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, refused, same_bytes, show
from tests.support.world import cluster_info

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import LocalEnd
    from tests.support.world import World

pytestmark = pytest.mark.covers("errors: CacheMismatch CacheNotFound", "LLMStatusCode.LLM_SUCCESS")

GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
UNLINKED = LLMStatusCode.LLM_NOT_YET_LINK
OURS = ("rows", "blocks")
Calls = list[tuple[str, type[Exception], str, tuple[Any, ...]]]
STATUS: dict[type[Exception], LLMStatusCode] = {CacheNotFound: GONE, NotLinked: UNLINKED}
#: The prompt's caches; their ids count from 1.
THEIRS: Final = {
    "rows": Spec(rows=4),
    "blocks": Spec(blocks=True, blocks_key=BLOCKS),
    "short rows": Spec(rows=4, stride=47),
    "six rows": Spec(6),
    "five rows": Spec(5),
    "small blocks": Spec(blocks=True, stride=47, blocks_key=BlocksCacheKey(1, 1)),
    "large blocks": Spec(blocks=True, stride=96, blocks_key=BlocksCacheKey(1, 2)),
    "six blocks": Spec(6, blocks=True, blocks_key=BlocksCacheKey(1, 3)),
    "request 0 of another model": Spec(keys=(CacheKey(1, 0, model_id=1),)),
    "five blocks": Spec(5, blocks=True, blocks_key=BlocksCacheKey(1, 4)),
}
FIRST: Final[dict[str, Any]] = {"src_layer_range": range(1), "dst_layer_range": range(1)}
THIRD_THERE: Final[dict[str, Any]] = {"src_layer_range": range(2, 4), "dst_layer_range": range(2)}


def theirs(name: str, row: int = 0) -> CacheKeyByIdAndIndex:
    return CacheKeyByIdAndIndex(1, list(THEIRS).index(name) + 1, row)


#: Calls that only the answer of the peer shows to be wrong: method, key, blocks or nothing, ranges; class and words.
MISFITS: Final[list[tuple[str, Any, tuple[Any, ...], dict[str, Any], type[Exception], tuple[str, ...]]]] = [
    ("pull_cache", CacheKeyByIdAndIndex(1, 99), (), {}, CacheNotFound, ("99",)),
    ("pull_cache", theirs("rows", 4), (), {}, CacheNotFound, ("4 rows", "row 4")),
    ("pull_cache", theirs("short rows"), (), {}, CacheMismatch, ("47", "48")),
    ("pull_cache", theirs("six rows"), (), {}, CacheMismatch, ("num_tensors", "6", "4")),
    ("pull_cache", theirs("six rows"), (), THIRD_THERE, ParamError, ("range(2, 4)", "3 layers")),
    ("pull_cache", theirs("six rows"), (), {"dst_layer_range": range(1)}, ParamError, ("range(0, 1)",)),
    ("pull_cache", theirs("five rows"), (), FIRST, ParamError, ("5 tensors",)),
    ("pull_cache", theirs("blocks"), (), {}, CacheMismatch, ("blocks cache",)),
    ("pull_blocks", BlocksCacheKey(1, 9), ([0], [0]), {}, CacheNotFound, ("model_id=9",)),
    ("pull_blocks", BLOCKS, ([8], [0]), {}, ParamError, ("src_blocks[0] is 8", "[0, 8)")),
    ("pull_blocks", BlocksCacheKey(1, 1), ([0], [0]), {}, CacheMismatch, ("47 bytes", "48")),
    ("pull_blocks", BlocksCacheKey(1, 2), ([0], [0]), {}, CacheMismatch, ("96 bytes", "48")),
    ("pull_blocks", BlocksCacheKey(1, 3), ([0], [0]), {}, CacheMismatch, ("num_tensors", "6", "4")),
    ("pull_blocks", BlocksCacheKey(1, 4), ([0], [0]), FIRST, ParamError, ("5 tensors",)),
    ("pull_blocks", theirs("blocks"), ([], [0]), {}, CacheMismatch, ("blocks", "BlocksCacheKey")),
    ("pull_blocks", theirs("rows"), ([], [0, 1]), {}, ParamError, ("dst_blocks", "1 pieces")),
    ("push_cache", theirs("rows", 4), (), {}, ParamError, ("batch_index", "4 rows")),
    ("push_cache", CacheKeyByIdAndIndex(1, -1), (), {}, CacheNotFound, ("req_id=0",)),
    ("push_cache", theirs("short rows"), (), {}, CacheMismatch, ("47", "48")),
    ("push_cache", theirs("five rows"), (), FIRST, ParamError, ("5 tensors",)),
    ("push_cache", theirs("blocks"), (), {}, CacheMismatch, ("blocks cache",)),
    ("push_blocks", CacheKeyByIdAndIndex(1, 99), ([0], [0]), {}, CacheNotFound, ("99",)),
    ("push_blocks", BLOCKS, ([0], [8]), {}, ParamError, ("dst_blocks[0] is 8", "[0, 8)")),
    ("push_blocks", BlocksCacheKey(1, 1), ([0], [0]), {}, CacheMismatch, ("48 bytes", "destination 47")),
    ("push_blocks", BlocksCacheKey(1, 3), ([0], [0]), {"src_layer_range": range(1)}, ParamError, ("range(0, 1)",)),
    ("push_blocks", theirs("rows"), ([0], [0]), {}, CacheMismatch, ("destination is not a blocks cache",)),
]


def test_r17_a_cache_of_the_peer_that_does_not_fit_is_refused_and_the_link_stays_usable(pair: Pair) -> None:
    pair.start(rca=True)
    for seed, (name, spec) in enumerate(THEIRS.items()):
        pair.prompt.do(make, name, spec, seed)
    pair.decoder.do(make, "rows", Spec(), 20)
    dst = pair.decoder.do(make, "blocks", Spec(blocks=True), 21)
    for method, key, lists, ranges, kind, parts in MISFITS:
        own, status = Use(method[5:].replace("cache", "rows")), STATUS.get(kind, LLMStatusCode.LLM_PARAM_INVALID)
        ends, args = (pair.decoder, pair.prompt), (call, method, key, own, *lists)
        refused(ends, THEIRS, kind, parts, *args, status=status, **ranges)
    src = pair.prompt.do(show, "blocks")
    pair.decoder.do(call, "pull_blocks", BLOCKS, Use("blocks"), [0], [5])
    same_bytes(pair.decoder.do(show, "blocks"), moved(dst, src, [(5, 0)]))


OWN, OTHER = BlocksCacheKey(2, 0), CacheKeyByIdAndIndex(1, 1, 9)
#: Calls that are also wrong in what is checked later, before and after the ends are linked.
BEFORE_THE_LINK: Final[Calls] = [
    ("pull_cache", TypeError, "batch_index", (CacheKeyByIdAndIndex(2, 1), Use("no rows"), "6")),
    ("pull_cache", ParamError, "our own", (CacheKeyByIdAndIndex(2, 1), Use("no rows"), 6)),
    ("pull_cache", CacheNotFound, "no cache with id 3", (OTHER, Use("no rows"), 6)),
    ("pull_cache", ParamError, "batch_index=6", (OTHER, Use("rows"), 6)),
    ("pull_cache", NotLinked, "cluster 1", (OTHER, Use("rows"), 5)),
    ("push_cache", TypeError, "src_batch_index", (OTHER, Use("no rows"), "6")),
    ("push_cache", CacheNotFound, "no cache with id 3", (OTHER, Use("no rows"), 6)),
    ("push_cache", ParamError, "src_batch_index=6", (OTHER, Use("rows"), 6)),
    ("push_cache", NotLinked, "cluster 1", (OTHER, Use("rows"), 5)),
    ("pull_blocks", TypeError, "dst_blocks", (OWN, Use("no blocks"), [0], ["9"])),
    ("pull_blocks", ParamError, "our own", (OWN, Use("no blocks"), [0], [9])),
    ("pull_blocks", CacheNotFound, "no cache with id 4", (BLOCKS, Use("no blocks"), [0], [9])),
    ("pull_blocks", ParamError, "dst_blocks[0]=9", (BLOCKS, Use("blocks"), [0], [9])),
    ("pull_blocks", NotLinked, "cluster 1", (BLOCKS, Use("blocks"), [99], [0])),
    ("push_blocks", TypeError, "src_blocks", (BLOCKS, Use("no blocks"), ["9"], [0])),
    ("push_blocks", CacheNotFound, "no cache with id 4", (BLOCKS, Use("no blocks"), [9], [0])),
    ("push_blocks", ParamError, "src_blocks[0]=9", (BLOCKS, Use("blocks"), [9], [0])),
    ("push_blocks", NotLinked, "cluster 1", (BLOCKS, Use("blocks"), [0], [99])),
]
WITHOUT_A_CACHE_THERE: Final[Calls] = [
    ("pull_cache", CacheNotFound, "no cache with id 1", (OTHER, Use("rows"))),
    ("push_cache", CacheNotFound, "no cache with id 1", (OTHER, Use("rows"))),
    ("pull_blocks", CacheNotFound, "model_id=0", (BLOCKS, Use("blocks"), [99], [0])),
    ("push_blocks", CacheNotFound, "model_id=0", (BLOCKS, Use("blocks"), [0], [99])),
]
WITH_A_CACHE_THERE: Final[Calls] = [
    ("pull_cache", CacheNotFound, "row 9", (OTHER, Use("rows"))),
    ("push_cache", ParamError, "batch_index", (OTHER, Use("rows"))),
    ("pull_blocks", CacheMismatch, "block sizes", (BLOCKS, Use("blocks"), [99], [0])),
    ("push_blocks", CacheMismatch, "block sizes", (BLOCKS, Use("blocks"), [0], [99])),
]


def test_checks_come_in_order_types_own_cluster_local_cache_local_geometry_link_remote(shm_pair: Pair) -> None:
    pair = shm_pair
    pair.start(linked=False, rca=True)
    for seed, name in enumerate(("rows", "blocks", "no rows", "no blocks")):
        pair.decoder.do(make, name, Spec(rows=6, blocks="blocks" in name), seed)
    pair.decoder.do(forget, "no rows")
    pair.decoder.do(forget, "no blocks")

    def refuse_all(calls: Calls) -> None:
        for method, kind, part, args in calls:
            status = STATUS.get(kind, LLMStatusCode.LLM_PARAM_INVALID)
            refused((pair.decoder, pair.prompt), OURS, kind, (part,), call, method, *args, status=status)

    refuse_all(BEFORE_THE_LINK)
    pair.link()
    refuse_all(WITHOUT_A_CACHE_THERE)
    pair.prompt.do(make, "rows", Spec(stride=16), 5)
    pair.prompt.do(make, "blocks", Spec(stride=16, blocks=True, blocks_key=BLOCKS), 6)
    refuse_all(WITH_A_CACHE_THERE)


def _publish_too_many_tensors(world: World) -> None:
    pool = world.cm.allocate_blocks_cache(CacheDesc(1, [1, 64], DataType.DT_UINT8))
    count = 90_000
    desc = CacheDesc(count, [1, 16], DataType.DT_UINT8)
    world.cm.register_blocks_cache(desc, [pool.tensor_addrs[0]] * count, BlocksCacheKey(1, 77))


def _pull_too_many_tensors(world: World) -> None:
    cache = world.cm.allocate_blocks_cache(CacheDesc(1, [1, 16], DataType.DT_UINT8))
    world.cm.pull_blocks(BlocksCacheKey(1, 77), cache, [0], [0])


def test_a_cache_with_more_tensors_than_a_frame_can_name_is_refused_and_not_waited_for(shm_pair: Pair) -> None:
    shm_pair.start()
    shm_pair.prompt.do(_publish_too_many_tensors)
    with pytest.raises(ParamError, match="too many tensors"):
        shm_pair.decoder.do(_pull_too_many_tensors)


# --- one's own cluster (interface R28) --------------------------------------------------------------------------------


def _link_to_itself(end: LocalEnd) -> None:
    end.start("MIX", 1, listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True)
    assert end.port is not None
    success = LLMStatusCode.LLM_SUCCESS
    assert end.world.dd.link_clusters([cluster_info(1, end.port)], 10_000) == (success, [success])


def test_r28_a_link_to_oneself_pushes_but_does_not_pull(end: LocalEnd) -> None:
    _link_to_itself(end)
    dst = end.do(make, "there", Spec(blocks=True, blocks_key=BLOCKS), 1)
    src = end.do(make, "kv", Spec(rows=6, blocks=True), 2)
    end.do(call, "push_blocks", BLOCKS, Use("kv"), [0, 5], [7, 3])
    same_bytes(end.do(show, "there"), moved(dst, src, [(7, 0), (3, 5)]))
    same_bytes(end.do(show, "kv"), src)
    end.do(make, "rows", Spec(), 3)
    names, rows = ("kv", "there", "rows"), CacheKeyByIdAndIndex(1, 3)
    refused([end], names, ParamError, ("our own",), call, "pull_blocks", BLOCKS, Use("kv"), [0], [0])
    refused([end], names, ParamError, ("our own",), call, "pull_cache", rows, Use("rows"))


def test_r26_pairs_within_one_cache_take_effect_in_the_order_given(end: LocalEnd) -> None:
    _link_to_itself(end)
    wanted = end.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    for pairs in (
        [(1, 0), (2, 1), (3, 2), (4, 3)],  # a chain: block 0 arrives everywhere
        [(0, 5), (5, 6), (6, 7)],  # a shift
        [(0, 0), (1, 1)],  # nothing
        [(1, 0), (0, 1), (2, 2)],
    ):
        end.do(call, "push_blocks", BLOCKS, Use("kv"), [s for _, s in pairs], [d for d, _ in pairs])
        for tensor in wanted:
            for to, from_ in pairs:
                tensor[to] = tensor[from_].copy()
        same_bytes(end.do(show, "kv"), wanted)
    layers = {"src_layer_range": range(1), "dst_layer_range": range(1, 2)}
    end.do(_push_to_another_layer, layers)
    same_bytes(end.do(show, "kv"), moved(wanted, wanted, [(6, 6), (3, 3)], [(2, 0), (3, 1)]))


def _push_to_another_layer(world: World, layers: dict[str, range]) -> None:
    call(world, "push_blocks", BLOCKS, Use("kv"), [6, 3], [6, 3], **layers)
