"""Pulls and pushes: what the peer's cache must be, one's own cluster, many threads (interface §6.10 to §6.13, R26, R28).
Arguments, and the order of their checks: test_bad_input_calls.py."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType
from llm_datadist.errors import ParamError
from tests.support.background import Call
from tests.support.linking import SUCCESS, info, link
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, picture, refused, same_bytes, show, wait_until

if TYPE_CHECKING:
    from tests.support.ends import LocalEnd
    from tests.support.moves import Bytes
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


THREADS = 12


def _pull_all(world: World, peer: int) -> None:
    """Pull from many threads at once: blocks into a cache of each thread's own, and every row by its key, once."""
    start = threading.Barrier(THREADS)

    def work(thread: int) -> None:
        start.wait(30)
        for turn in range(THREADS):
            call(
                world, "pull_blocks", BlocksCacheKey(peer, 0), Use(f"blocks {thread}"), [thread, turn, 3], [turn, 1, 1]
            )
            call(world, "pull_cache", CacheKey(peer, thread * THREADS + turn), Use(f"row {thread}"), turn)

    for each in [Call(work, thread) for thread in range(THREADS)]:
        each.result()


def test_both_ends_pull_with_twelve_threads_at_the_same_time(pair: Pair) -> None:
    """Pushes by as many: tests/clients/test_sglang.py; over several links: faults/tests/test_campaign.py."""
    pair.start()
    ends = (pair.prompt, pair.decoder)
    held: list[dict[str, Bytes]] = []
    for own, end in enumerate(ends, 1):
        keys = tuple(CacheKey(own, number) for number in range(THREADS * THREADS))
        specs = {"source": Spec(2, THREADS, 8000, blocks=True, blocks_key=BlocksCacheKey(own, 0))}
        specs["rows"] = Spec(2, len(keys), 1000, keys=keys)
        for thread in range(THREADS):
            specs |= {f"blocks {thread}": Spec(2, THREADS, 8000, blocks=True), f"row {thread}": Spec(2, THREADS, 1000)}
        held.append({name: end.do(make, name, spec, 100 * own + n) for n, (name, spec) in enumerate(specs.items())})
    for each in [Call(end.do, _pull_all, peer) for end, peer in zip(ends, (2, 1), strict=True)]:
        each.result()
    for end, expected, source in zip(ends, held, held[::-1], strict=True):
        for thread in range(THREADS):
            pairs = [each for turn in range(THREADS) for each in ((turn, thread), (1, turn), (1, 3))]
            expected[f"blocks {thread}"] = moved(expected[f"blocks {thread}"], source["source"], pairs)
            rows = [(turn, thread * THREADS + turn) for turn in range(THREADS)]
            expected[f"row {thread}"] = moved(expected[f"row {thread}"], source["rows"], rows)
        for name, content in expected.items():
            same_bytes(end.do(show, name), content)
        wait_until(lambda end=end: end.do(picture).pins == 0)  # type: ignore[misc]  # bound at once
        assert len(end.do(picture).keys) == 1, "every key of a row was pulled, once"
