"""PullKvCache, PullKvBlocks, PushKvCache and CopyKvCache with every byte; a cache serves as rows and as blocks."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import CacheKeyByIdAndIndex
from llm_datadist.cpp_api import CacheIndex, KvCacheExtParam, LlmRole
from llm_datadist.errors import LLMStatusCode
from tests.support.cpp import (
    BAD,
    GONE,
    HOST,
    OK,
    UNLINKED,
    Shape,
    attempt,
    link,
    made,
    run,
    show,
    start,
    start_pair,
    unchanged,
)
from tests.support.ends import ChildEnd
from tests.support.frozen import freeze
from tests.support.moves import Spec, Use, call, make, moved, same_bytes, wait_until
from tests.support.moves import show as show_v2
from tests.support.world import cluster_info

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import LocalEnd
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "cpp_api: CacheIndex KvCacheExtParam", "cpp_api.LlmDataDist: CopyKvCache PullKvBlocks PullKvCache PushKvCache"
)

ROW = CacheIndex(1, 1, 3)
BLOCKS = CacheIndex(1, 1)


def both(pair: Pair, here: Shape | None = None, there: Shape | None = None, **options: str) -> tuple[Bytes, Bytes]:
    """Return what the decoder, which calls, and the prompt hold in cache 1."""
    start_pair(pair, options=options)
    return pair.decoder.do(made, "kv", here or Shape(), 1), pair.prompt.do(made, "kv", there or Shape(), 2)


def part(dst: Bytes, src: Bytes, to: int, from_: int, nbytes: int) -> Bytes:
    """The first bytes of a row go to the first bytes of a row."""
    result = [tensor.copy() for tensor in dst]
    for target, source in zip(result, src, strict=True):
        target[to, :nbytes] = source[from_, :nbytes]
    return result


def refused(pair: Pair, status: LLMStatusCode, parts: tuple[str, ...], method: str, *args: Any) -> None:
    unchanged((pair.decoder, pair.prompt), ["kv"], status, parts, method, *args)


# --- PullKvCache ------------------------------------------------------------------------------------------------------


def test_pull_kv_cache_moves_a_row(pair: Pair) -> None:
    mine, theirs = both(pair)
    assert pair.decoder.do(run, "PullKvCache", ROW, Use("kv"), 5) is OK
    same_bytes(pair.decoder.do(show, "kv"), moved(mine, theirs, [(5, 3)]))
    same_bytes(pair.prompt.do(show, "kv"), theirs)


def test_pull_kv_cache_defaults_to_row_zero_and_whole_rows(pair: Pair) -> None:
    mine, theirs = both(pair)
    assert pair.decoder.do(run, "PullKvCache", CacheIndex(1, 1), Use("kv")) is OK
    same_bytes(pair.decoder.do(show, "kv"), moved(mine, theirs, [(0, 0)]))


def test_pull_kv_cache_moves_size_bytes_and_truncates_longer_rows(shm_pair: Pair) -> None:
    mine, theirs = both(shm_pair, there=Shape(width=20))
    assert shm_pair.decoder.do(run, "PullKvCache", ROW, Use("kv"), 5, 7) is OK
    mine = part(mine, theirs, 5, 3, 7)
    assert shm_pair.decoder.do(run, "PullKvCache", ROW, Use("kv"), 6, -1) is OK
    same_bytes(shm_pair.decoder.do(show, "kv"), part(mine, theirs, 6, 3, 64))


def test_r14_pull_kv_cache_of_layers_and_of_an_odd_number_of_tensors(shm_pair: Pair) -> None:
    mine, theirs = both(shm_pair, Shape(tensors=5), Shape(tensors=5))
    assert shm_pair.decoder.do(run, "PullKvCache", ROW, Use("kv"), 5, -1, KvCacheExtParam((1, 2), (3, 4), 1)) is OK
    mine = moved(mine, theirs, [(5, 3)], [(3, 1), (4, 2)])
    same_bytes(shm_pair.decoder.do(show, "kv"), mine)
    assert shm_pair.decoder.do(run, "PullKvCache", ROW, Use("kv"), 6) is OK
    same_bytes(shm_pair.decoder.do(show, "kv"), moved(mine, theirs, [(6, 3)]))


def test_pull_kv_cache_refuses(shm_pair: Pair) -> None:
    both(shm_pair)
    refused(shm_pair, BAD, ("size=0",), "PullKvCache", ROW, Use("kv"), 5, 0)
    refused(shm_pair, BAD, ("size=-2",), "PullKvCache", ROW, Use("kv"), 5, -2)
    refused(shm_pair, BAD, ("size=65", "64"), "PullKvCache", ROW, Use("kv"), 5, 65)
    refused(shm_pair, BAD, ("size", "int64"), "PullKvCache", ROW, Use("kv"), 5, 2**63)
    refused(shm_pair, BAD, ("batch_index=8",), "PullKvCache", ROW, Use("kv"), 8)
    refused(shm_pair, BAD, ("batch_index", "uint32"), "PullKvCache", ROW, Use("kv"), -1)
    refused(shm_pair, BAD, ("our own",), "PullKvCache", CacheIndex(2, 1), Use("kv"))
    refused(shm_pair, GONE, (), "PullKvCache", CacheIndex(1, 1, 8), Use("kv"))
    refused(shm_pair, GONE, ("99",), "PullKvCache", CacheIndex(1, 99), Use("kv"))
    refused(shm_pair, UNLINKED, ("cluster 7",), "PullKvCache", CacheIndex(7, 1), Use("kv"))


# --- PullKvBlocks -----------------------------------------------------------------------------------------------------


def test_pull_kv_blocks_moves_pairs(pair: Pair) -> None:
    mine, theirs = both(pair, there=Shape(rows=20))
    assert pair.decoder.do(run, "PullKvBlocks", BLOCKS, Use("kv"), [15, 16, 2], [0, 1, 7]) is OK
    same_bytes(pair.decoder.do(show, "kv"), moved(mine, theirs, [(0, 15), (1, 16), (7, 2)]))
    same_bytes(pair.prompt.do(show, "kv"), theirs)


def test_r14_pull_kv_blocks_of_layers(pair: Pair) -> None:
    mine, theirs = both(pair, there=Shape(tensors=6))
    ext = KvCacheExtParam((2, 2), (0, 0), 2)
    assert pair.decoder.do(run, "PullKvBlocks", BLOCKS, Use("kv"), [1], [2], ext) is OK
    same_bytes(pair.decoder.do(show, "kv"), moved(mine, theirs, [(2, 1)], [(0, 4), (1, 5)]))


def test_pull_kv_blocks_refuses(shm_pair: Pair) -> None:
    both(shm_pair)
    for src, dst, text in (([], [], "src_blocks"), ([], [1], "src_blocks"), ([1], [], "equal"), ([1], [1, 2], "equal")):
        refused(shm_pair, BAD, (text,), "PullKvBlocks", BLOCKS, Use("kv"), src, dst)
    refused(shm_pair, BAD, ("batch_index=3",), "PullKvBlocks", ROW, Use("kv"), [1], [2])
    refused(shm_pair, BAD, ("dst_blocks[0]=8",), "PullKvBlocks", BLOCKS, Use("kv"), [1], [8])
    refused(shm_pair, BAD, ("src_blocks[0]",), "PullKvBlocks", BLOCKS, Use("kv"), [8], [1])
    refused(shm_pair, BAD, ("our own",), "PullKvBlocks", CacheIndex(2, 1), Use("kv"), [1], [2])
    refused(shm_pair, GONE, ("99",), "PullKvBlocks", CacheIndex(1, 99), Use("kv"), [1], [2])
    refused(shm_pair, UNLINKED, ("cluster 7",), "PullKvBlocks", CacheIndex(7, 1), Use("kv"), [1], [2])


def test_r17_pull_kv_blocks_of_another_size_is_refused(shm_pair: Pair) -> None:
    both(shm_pair, there=Shape(width=32))
    refused(shm_pair, BAD, ("128 bytes", "64"), "PullKvBlocks", BLOCKS, Use("kv"), [1], [2])


# --- PushKvCache ------------------------------------------------------------------------------------------------------


def test_push_kv_cache_moves_a_row_of_four_tensors_as_one_layer(pair: Pair) -> None:
    mine, theirs = both(pair)
    ext = KvCacheExtParam((0, 0), (0, 0), 4)
    assert pair.decoder.do(run, "PushKvCache", Use("kv"), CacheIndex(1, 1, 4), 6, -1, ext) is OK
    same_bytes(pair.prompt.do(show, "kv"), moved(theirs, mine, [(4, 6)]))
    assert pair.decoder.do(run, "PushKvCache", Use("kv"), CacheIndex(1, 1)) is OK
    same_bytes(pair.prompt.do(show, "kv"), moved(theirs, mine, [(4, 6), (0, 0)]))
    same_bytes(pair.decoder.do(show, "kv"), mine)


def test_push_kv_cache_refuses(shm_pair: Pair) -> None:
    both(shm_pair)
    for size in (64, 1, 0, -2):
        refused(shm_pair, BAD, (f"size={size}",), "PushKvCache", Use("kv"), ROW, 0, size)
    refused(shm_pair, BAD, ("src_batch_index=8",), "PushKvCache", Use("kv"), ROW, 8)
    refused(shm_pair, BAD, ("batch_index",), "PushKvCache", Use("kv"), CacheIndex(1, 1, 8))
    refused(shm_pair, GONE, ("99",), "PushKvCache", Use("kv"), CacheIndex(1, 99))
    refused(shm_pair, UNLINKED, ("cluster 7",), "PushKvCache", Use("kv"), CacheIndex(7, 1))


def test_r16_push_kv_cache_goes_from_the_device_only_and_to_either(shm_pair: Pair) -> None:
    mine, theirs = both(shm_pair, there=Shape(placement=HOST))
    shm_pair.decoder.do(made, "cpu", Shape(placement=HOST), 3)
    refused(shm_pair, BAD, ("src_cache", "kHost"), "PushKvCache", Use("cpu"), ROW)
    assert shm_pair.decoder.do(run, "PushKvCache", Use("kv"), ROW) is OK
    same_bytes(shm_pair.prompt.do(show, "kv"), moved(theirs, mine, [(3, 0)]))


# --- one cache, both uses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["pool", "inside", "private"])
def test_one_cache_serves_as_rows_and_as_blocks(shm_pair: Pair, memory: str) -> None:
    start_pair(shm_pair, transport="auto")
    mine = shm_pair.decoder.do(made, "kv", Shape(memory=memory), 1)
    theirs = shm_pair.prompt.do(made, "kv", Shape(memory=memory), 2)
    cache = shm_pair.prompt.do(_named, "kv")
    assert shm_pair.decoder.do(run, "PullKvBlocks", cache, Use("kv"), [1], [2]) is OK
    assert shm_pair.decoder.do(run, "PullKvCache", cache, Use("kv"), 3) is OK
    mine = moved(mine, theirs, [(2, 1), (3, 0)])
    same_bytes(shm_pair.decoder.do(show, "kv"), mine)
    assert shm_pair.decoder.do(run, "PushKvBlocks", Use("kv"), cache, [2], [5]) is OK
    assert shm_pair.decoder.do(run, "PushKvCache", Use("kv"), cache, 4) is OK
    same_bytes(shm_pair.prompt.do(show, "kv"), moved(theirs, mine, [(5, 2), (0, 4)]))


def _named(world: World, name: str) -> CacheIndex:
    return CacheIndex(1, world.memory[f"cache {name}"].cache_id)


def test_a_cache_manager_at_the_other_end_uses_it_too(pair: Pair) -> None:
    port = pair.prompt.do(start, LlmRole.kPrompt, 1, pair.transport, {})
    theirs = pair.prompt.do(made, "kv", Shape(), 1)
    pair.decoder.start("DECODER", 2, enable_remote_cache_accessible=True, extra={"llm.Transport": pair.transport})
    assert port is not None
    assert pair.decoder.do(_link_v2, port)[0] is OK
    rows = pair.decoder.do(make, "rows", Spec(rows=8, stride=64), 2)
    blocks = pair.decoder.do(make, "blocks", Spec(rows=16, stride=32, blocks=True), 3)
    pair.decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, 1, 3), Use("rows"), 5)
    same_bytes(pair.decoder.do(show_v2, "rows"), moved(rows, theirs, [(5, 3)]))
    # A row of the peer in pieces of a block.
    pair.decoder.do(call, "pull_blocks", CacheKeyByIdAndIndex(1, 1, 2), Use("blocks"), [], [9, 4])
    pieces = [tensor[2].reshape(2, 32) for tensor in theirs]
    same_bytes(pair.decoder.do(show_v2, "blocks"), moved(blocks, pieces, [(9, 0), (4, 1)]))
    paged = pair.decoder.do(make, "paged", Spec(rows=8, stride=64, blocks=True), 4)
    pair.decoder.do(call, "push_blocks", CacheKeyByIdAndIndex(1, 1), Use("paged"), [1, 2], [6, 7])
    pair.decoder.do(call, "push_cache", CacheKeyByIdAndIndex(1, 1, 0), Use("rows"), 1)
    wanted = moved(moved(theirs, paged, [(6, 1), (7, 2)]), rows, [(0, 1)])
    same_bytes(pair.prompt.do(show, "kv"), wanted)


def _link_v2(world: World, port: int) -> Any:
    return world.dd.link_clusters([cluster_info(1, port)], 10_000)


# --- CopyKvCache ------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(end: LocalEnd) -> tuple[LocalEnd, Bytes, Bytes]:
    end.do(start, LlmRole.kMix, 1, "auto", {})
    return end, end.do(made, "src", Shape(), 1), end.do(made, "dst", Shape(rows=3), 2)


def test_copy_kv_cache_copies_part_of_a_row_source_first(alone: tuple[LocalEnd, Bytes, Bytes]) -> None:
    end, src, dst = alone
    assert end.do(run, "CopyKvCache", Use("src"), Use("dst"), 7, 2) is OK
    dst = moved(dst, src, [(2, 7)])
    same_bytes(end.do(show, "dst"), dst)
    assert end.do(run, "CopyKvCache", Use("src"), Use("dst"), 5, 0, 9, 20) is OK
    for target, source in zip(dst, src, strict=True):
        target[0, 9:29] = source[5, 9:29]
    same_bytes(end.do(show, "dst"), dst)
    same_bytes(end.do(show, "src"), src)


def test_copy_kv_cache_from_device_to_host_but_not_from_host(alone: tuple[LocalEnd, Bytes, Bytes]) -> None:
    end, src, _ = alone
    cpu = end.do(made, "cpu", Shape(placement=HOST), 3)
    assert end.do(run, "CopyKvCache", Use("src"), Use("cpu"), 1, 2) is OK
    same_bytes(end.do(show, "cpu"), moved(cpu, src, [(2, 1)]))
    unchanged([end], ["src", "cpu"], BAD, ("src_cache", "kHost"), "CopyKvCache", Use("cpu"), Use("src"))


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ((8, 0), ("src_batch_index=8",)),
        ((0, 3), ("dst_batch_index=3",)),
        ((-1, 0), ("src_batch_index", "uint32")),
        ((0, 2**32), ("dst_batch_index", "uint32")),
        ((0, 0, -1), ("offset", "uint64")),
        ((0, 0, 2**64), ("offset", "uint64")),
        ((0, 0, 64), ("offset=64",)),
        ((0, 0, 0, 0), ("size=0",)),
        ((0, 0, 0, -2), ("size=-2",)),
        ((0, 0, 1, 64), ("offset=1", "size=64")),
        ((0, 0, 0, 2**63), ("size", "int64")),
    ],
)
def test_copy_kv_cache_refuses(
    alone: tuple[LocalEnd, Bytes, Bytes], args: tuple[int, ...], parts: tuple[str, ...]
) -> None:
    unchanged([alone[0]], ["src", "dst"], BAD, parts, "CopyKvCache", Use("src"), Use("dst"), *args)


def test_r08_copy_kv_cache_needs_caches_that_match(alone: tuple[LocalEnd, Bytes, Bytes]) -> None:
    end, _, _ = alone
    end.do(made, "wide", Shape(width=20), 3)
    end.do(made, "few", Shape(tensors=2), 4)
    unchanged([end], ["wide"], BAD, ("row shapes",), "CopyKvCache", Use("src"), Use("wide"))
    unchanged([end], ["few"], BAD, ("4 tensors", "2"), "CopyKvCache", Use("src"), Use("few"))
    assert end.do(run, "CopyKvCache", Use("src"), Use("wide"), 0, 0, 0, 64) is OK


# --- what goes wrong on the way ---------------------------------------------------------------------------------------


def test_r06_r07_a_peer_that_does_not_answer_times_out_and_the_link_stays(shm_pair: Pair) -> None:
    mine, theirs = both(shm_pair, SyncKvCacheWaitTime="300")
    assert isinstance(shm_pair.prompt, ChildEnd)
    freeze(shm_pair.prompt)
    try:
        for method, args in (
            ("PullKvBlocks", (BLOCKS, Use("kv"), [1], [2])),
            ("PullKvCache", (ROW, Use("kv"))),
            ("PushKvBlocks", (Use("kv"), BLOCKS, [1], [2])),
            ("PushKvCache", (Use("kv"), ROW)),
        ):
            status, text = shm_pair.decoder.do(attempt, method, *args)
            assert status is LLMStatusCode.LLM_TIMEOUT, text
            assert method in text
            assert "300 ms" in text
    finally:
        shm_pair.prompt.signal(signal.SIGCONT)
    same_bytes(shm_pair.decoder.do(show, "kv"), mine)
    wait_until(lambda: shm_pair.decoder.do(run, "PullKvBlocks", BLOCKS, Use("kv"), [1], [2]) is OK)
    same_bytes(shm_pair.decoder.do(show, "kv"), moved(mine, theirs, [(2, 1)]))


def test_r22_a_dead_peer_is_told_apart_and_can_be_linked_again(pair: Pair) -> None:
    both(pair)
    assert pair.decoder.do(run, "PullKvBlocks", BLOCKS, Use("kv"), [1], [2]) is OK
    assert pair.prompt.do(run, "Finalize") is OK
    wait_until(lambda: pair.decoder.do(attempt, "PullKvBlocks", BLOCKS, Use("kv"), [1], [2])[0] is UNLINKED)
    port = pair.prompt.do(start, LlmRole.kPrompt, 1, pair.transport, {})
    theirs = pair.prompt.do(made, "kv", Shape(), 7)
    assert port is not None
    link(pair.decoder, 1, port)
    mine = pair.decoder.do(show, "kv")
    assert pair.decoder.do(run, "PullKvBlocks", BLOCKS, Use("kv"), [1], [2]) is OK
    same_bytes(pair.decoder.do(show, "kv"), moved(mine, theirs, [(2, 1)]))


def test_every_call_is_counted_under_its_own_name(shm_pair: Pair) -> None:
    both(shm_pair)
    assert shm_pair.decoder.do(run, "PullKvBlocks", BLOCKS, Use("kv"), [1, 2], [2, 3]) is OK
    assert shm_pair.decoder.do(run, "PushKvCache", Use("kv"), ROW) is OK
    totals = shm_pair.decoder.do(_totals)
    assert totals["PullKvBlocks"] == (1, 0, 2 * 4 * 64)
    assert totals["PushKvCache"] == (1, 0, 4 * 64)


def _totals(world: World) -> dict[str, tuple[int, int, int]]:
    return {each.name: (each.count, each.errors, each.nbytes) for each in world.dd.statistics().operations}


@pytest.mark.parametrize("memory", ["pool", "private"])
def test_where_a_cache_is_is_asked_once(shm_pair: Pair, memory: str) -> None:
    start_pair(shm_pair, transport="auto")
    for end in (shm_pair.decoder, shm_pair.prompt):
        end.do(made, "kv", Shape(memory=memory), 1)
    for _ in range(3):
        assert shm_pair.decoder.do(run, "PullKvBlocks", BLOCKS, Use("kv"), [1, 2], [2, 3]) is OK
        assert shm_pair.decoder.do(run, "PushKvBlocks", Use("kv"), BLOCKS, [1, 2], [2, 3]) is OK
    assert shm_pair.decoder.do(_resolved) == 2  # once for each direction
    assert shm_pair.prompt.do(_pins) == 0


def _resolved(world: World) -> int:
    return world.dd.statistics().links[0].resolved


def _pins(world: World) -> int:
    return world.dd.statistics().pins


def test_checksums_cover_them(shm_pair: Pair) -> None:
    mine, theirs = both(shm_pair, Checksum="1")
    assert shm_pair.decoder.do(run, "PullKvBlocks", BLOCKS, Use("kv"), [1, 2], [2, 3]) is OK
    assert shm_pair.decoder.do(run, "PullKvCache", ROW, Use("kv"), 5) is OK
    same_bytes(shm_pair.decoder.do(show, "kv"), moved(mine, theirs, [(2, 1), (3, 2), (5, 3)]))
    assert shm_pair.decoder.do(_verified) == 3 * 4 * 64


def _verified(world: World) -> int:
    return world.dd.statistics().links[0].verified_bytes
