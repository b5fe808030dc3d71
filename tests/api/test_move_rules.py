"""Pulls and pushes: what the peer's cache must be, the order of the checks, and one's own cluster (interface §6.10 to
§6.13, R14, R17, R26, R28). Arguments by themselves: test_bad_input_*.py."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMStatusCode
from llm_datadist.errors import CacheMismatch, CacheNotFound, NotLinked, ParamError
from tests.support.linking import SUCCESS, info, link
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, refused, same_bytes, show

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import LocalEnd
    from tests.support.world import World

pytestmark = pytest.mark.covers("errors: CacheMismatch CacheNotFound", "LLMStatusCode.LLM_SUCCESS")

#: Class, words, method, arguments.
Calls = list[tuple[type[Exception], str, str, tuple[Any, ...]]]
STATUS: dict[type[Exception], LLMStatusCode] = {
    CacheNotFound: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    NotLinked: LLMStatusCode.LLM_NOT_YET_LINK,
}
OWN, OTHER = BlocksCacheKey(2, 0), CacheKeyByIdAndIndex(1, 1, 9)
#: Calls that are also wrong in what is checked later. What is wrong here before the link: test_bad_input_calls.py.
BEFORE_THE_LINK: Final[Calls] = [
    (TypeError, "batch_index", "pull_cache", (CacheKeyByIdAndIndex(2, 1), Use("no rows"), "6")),
    (ParamError, "our own", "pull_cache", (CacheKeyByIdAndIndex(2, 1), Use("no rows"), 6)),
    (CacheNotFound, "no cache with id 3", "pull_cache", (OTHER, Use("no rows"), 6)),
    (NotLinked, "cluster 1", "pull_cache", (OTHER, Use("rows"), 5)),
    (TypeError, "src_batch_index", "push_cache", (OTHER, Use("no rows"), "6")),
    (CacheNotFound, "no cache with id 3", "push_cache", (OTHER, Use("no rows"), 6)),
    (NotLinked, "cluster 1", "push_cache", (OTHER, Use("rows"), 5)),
    (TypeError, "dst_blocks", "pull_blocks", (OWN, Use("no blocks"), [0], ["9"])),
    (ParamError, "our own", "pull_blocks", (OWN, Use("no blocks"), [0], [9])),
    (CacheNotFound, "no cache with id 4", "pull_blocks", (BLOCKS, Use("no blocks"), [0], [9])),
    (NotLinked, "cluster 1", "pull_blocks", (BLOCKS, Use("blocks"), [99], [0])),
    (TypeError, "src_blocks", "push_blocks", (BLOCKS, Use("no blocks"), ["9"], [0])),
    (CacheNotFound, "no cache with id 4", "push_blocks", (BLOCKS, Use("no blocks"), [9], [0])),
    (NotLinked, "cluster 1", "push_blocks", (BLOCKS, Use("blocks"), [0], [99])),
]
WITHOUT_A_CACHE_THERE: Final[Calls] = [
    (CacheNotFound, "no cache with id 1", "pull_cache", (OTHER, Use("rows"))),
    (CacheNotFound, "no cache with id 1", "push_cache", (OTHER, Use("rows"))),
    (CacheNotFound, "model_id=0", "pull_blocks", (BLOCKS, Use("blocks"), [99], [0])),
    (CacheNotFound, "model_id=0", "push_blocks", (BLOCKS, Use("blocks"), [0], [99])),
]
WITH_A_CACHE_THERE: Final[Calls] = [
    (CacheNotFound, "row 9", "pull_cache", (OTHER, Use("rows"))),
    (ParamError, "batch_index", "push_cache", (OTHER, Use("rows"))),
    # A request 0 of another model is not what a push without an id means.
    (CacheNotFound, "req_id=0", "push_cache", (CacheKeyByIdAndIndex(1, -1), Use("rows"))),
    (CacheMismatch, "block sizes", "pull_blocks", (BLOCKS, Use("blocks"), [99], [0])),
    (CacheMismatch, "block sizes", "push_blocks", (BLOCKS, Use("blocks"), [0], [99])),
]


def refuse_all(pair: Pair, calls: Calls) -> None:
    for kind, part, method, args in calls:
        status = STATUS.get(kind, LLMStatusCode.LLM_PARAM_INVALID)
        ends = (pair.decoder, pair.prompt)
        refused(ends, ("rows", "blocks"), kind, (part,), call, method, *args, status=status)


def test_checks_come_in_order_types_own_cluster_local_cache_local_geometry_link_remote(tcp_pair: Pair) -> None:
    pair = tcp_pair
    pair.start(linked=False, rca=True)
    for seed, name in enumerate(("rows", "blocks", "no rows", "no blocks")):
        pair.decoder.do(make, name, Spec(rows=6, blocks="blocks" in name), seed)
    pair.decoder.do(forget, "no rows")
    pair.decoder.do(forget, "no blocks")

    refuse_all(pair, BEFORE_THE_LINK)
    pair.link()
    refuse_all(pair, WITHOUT_A_CACHE_THERE)
    pair.prompt.do(make, "rows", Spec(stride=16, keys=(CacheKey(1, 0, model_id=1),)), 5)
    pair.prompt.do(make, "blocks", Spec(stride=16, blocks=True, blocks_key=BLOCKS), 6)
    src = pair.prompt.do(make, "good", Spec(blocks=True, blocks_key=BlocksCacheKey(1, 1)), 7)
    refuse_all(pair, WITH_A_CACHE_THERE)
    dst = pair.decoder.do(show, "blocks")
    pair.decoder.do(call, "pull_blocks", BlocksCacheKey(1, 1), Use("blocks"), [7], [5])
    same_bytes(pair.decoder.do(show, "blocks"), moved(dst, src, [(5, 7)]))


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


def test_r26_r28_a_link_to_oneself_pushes_in_the_order_given_but_does_not_pull(end: LocalEnd) -> None:
    end.start("MIX", 1, listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True)
    assert end.do(link, [info(1, end.port)]) == SUCCESS
    wanted = end.do(make, "there", Spec(blocks=True, blocks_key=BLOCKS), 1)
    src = end.do(make, "kv", Spec(rows=6, blocks=True), 2)
    end.do(make, "rows", Spec(), 3)
    end.do(call, "push_blocks", BLOCKS, Use("kv"), [0, 5], [7, 3])
    wanted = moved(wanted, src, [(7, 0), (3, 5)])
    same_bytes(end.do(show, "there"), wanted)
    same_bytes(end.do(show, "kv"), src)
    names, rows = ("kv", "there", "rows"), CacheKeyByIdAndIndex(1, 3)
    refused([end], names, ParamError, ("our own",), call, "pull_blocks", BLOCKS, Use("kv"), [0], [0])
    refused([end], names, ParamError, ("our own",), call, "pull_cache", rows, Use("rows"))
    for pairs in (
        [(1, 0), (2, 1), (3, 2), (4, 3)],  # a chain: block 0 arrives everywhere
        [(0, 5), (5, 6), (6, 7)],  # a shift
        [(0, 0), (1, 1)],  # nothing
        [(1, 0), (0, 1), (2, 2)],
    ):
        end.do(call, "push_blocks", BLOCKS, Use("there"), [s for _, s in pairs], [d for d, _ in pairs])
        for to, from_ in pairs:
            wanted = moved(wanted, wanted, [(to, from_)])
        same_bytes(end.do(show, "there"), wanted)
    one_layer = partial(call, src_layer_range=range(1), dst_layer_range=range(1, 2))
    end.do(one_layer, "push_blocks", BLOCKS, Use("there"), [6, 3], [6, 3])
    same_bytes(end.do(show, "there"), moved(wanted, wanted, [(6, 6), (3, 3)], [(2, 0), (3, 1)]))
