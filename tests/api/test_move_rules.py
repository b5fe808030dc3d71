"""Pulls and pushes: what the peer's cache must be, and one's own cluster (interface §6.10 to §6.13, R26, R28).
Arguments, and the order of their checks: test_bad_input_calls.py."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKeyByIdAndIndex, DataType
from llm_datadist.errors import ParamError
from tests.support.linking import SUCCESS, info, link
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, refused, same_bytes, show

if TYPE_CHECKING:
    from tests.support.ends import LocalEnd
    from tests.support.pairs import Pair
    from tests.support.world import World

pytestmark = pytest.mark.covers("errors: CacheMismatch CacheNotFound", "LLMStatusCode.LLM_SUCCESS")


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
