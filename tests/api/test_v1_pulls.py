"""v1: pull_cache and pull_blocks between two processes, every byte compared (interface §8, R5, R12, R28)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist.errors import CacheMismatch, CacheNotFound, DeadlineExceeded, LLMException, NotLinked
from tests.faults.gates import Gate
from tests.support.linking import begin_there, result_there
from tests.support.moves import Use, moved, picture, refused, same_bytes, show, wait_until
from tests.support.v1 import DIRECT, POOL, desc, drop, gated_call_v1, kv_call, kv_id, kv_make, start_v1

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.moves import Bytes

pytestmark = pytest.mark.covers("KvCacheManager: is_initialized pull_blocks pull_cache")

KEYS = (CacheKey(1, 10, 1), CacheKey(1, 11, 1))
BLOCKS = BlocksCacheKey(1, 3)


def both(pair: Pair, source: Any = None, target: Any = None, **settings: Any) -> tuple[Bytes, Bytes]:
    """Start, link, and make a cache "kv" at each end, the prompt's with KEYS on rows 0 and 1."""
    start_v1(pair, **settings)
    return (
        pair.prompt.do(kv_make, "kv", source or desc(), 1, KEYS),
        pair.decoder.do(kv_make, "kv", target or desc(), 2),
    )


def consumed(pair: Pair, *keys: CacheKey) -> None:
    """Wait until the prompt has these keys left, and no pin."""
    left = [f"({key.req_id}, {key.model_id})" for key in keys]
    wait_until(lambda: pair.prompt.do(picture).pins == 0 and len(pair.prompt.do(picture).keys) == len(left))


@pytest.mark.parametrize("memory", ["pool", "direct"])
def test_r12_a_row_is_pulled_by_key_which_is_consumed_and_by_id(pair: Pair, memory: str) -> None:
    if memory == "direct" and pair.transport == "shm":
        pair.transport = "auto"  # shm maps pools; what has none is reached by cma, beside it
    src, dst = both(pair, **(DIRECT if memory == "direct" else POOL))
    pair.decoder.do(kv_call, "pull_cache", KEYS[1], Use("kv"), 5)
    dst = moved(dst, src, [(5, 1)])
    same_bytes(pair.decoder.do(show, "kv"), dst)
    consumed(pair, KEYS[0])
    with pytest.raises(CacheNotFound) as caught:
        pair.decoder.do(kv_call, "pull_cache", KEYS[1], Use("kv"))
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    # By id and row: row 0 carries the other key, row 7 none.
    number = pair.prompt.do(kv_id, "kv")
    for row in (0, 7):
        pair.decoder.do(kv_call, "pull_cache", CacheKeyByIdAndIndex(1, number, row), Use("kv"), row)
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(0, 0), (7, 7)]))
    same_bytes(pair.prompt.do(show, "kv"), src)
    consumed(pair)


@pytest.mark.parametrize(
    ("src_at", "dst_at", "size", "length"),
    [
        (0, 0, 48, 48),
        (7, 0, 16, 16),
        (0, 9, 16, 16),
        (31, 13, 17, 17),
        (8, 40, -1, 8),
        (None, 47, -1, 1),
        (47, None, 1, 1),
    ],
)
def test_offsets_are_bytes_inside_the_row_of_either_end(
    pair: Pair, src_at: int | None, dst_at: int | None, size: int, length: int
) -> None:
    src, dst = both(pair)
    pair.decoder.do(
        _pull_with,
        KEYS[0],
        3,
        size,
        {"src_cache_offset": src_at, "dst_cache_offset": dst_at, "tensor_num_per_layer": 1},
    )
    for tensor, from_ in zip(dst, src, strict=True):
        tensor[3, (dst_at or 0) : (dst_at or 0) + length] = from_[0, (src_at or 0) : (src_at or 0) + length]
    same_bytes(pair.decoder.do(show, "kv"), dst)
    consumed(pair, KEYS[1])  # interface R5: neither offsets nor size make a pull incomplete


def _pull_with(world: Any, key: CacheKey, row: int, size: int, keywords: dict[str, Any]) -> None:
    kv_call(world, "pull_cache", key, Use("kv"), row, size, **keywords)


def test_offsets_go_with_layer_ranges_and_rows_of_unequal_length(pair: Pair) -> None:
    src, dst = both(pair, desc(6, 2, 100), desc(4, 3, 40))
    keywords = {"src_layer_range": range(1, 2), "dst_layer_range": range(1), "src_cache_offset": 70}
    pair.decoder.do(_pull_with, KEYS[1], 2, 30, keywords)
    for to, from_ in ((0, 2), (1, 3)):
        dst[to][2, :30] = src[from_][1, 70:]
    same_bytes(pair.decoder.do(show, "kv"), dst)
    consumed(pair, *KEYS)  # a third of the layers: the key stays
    pair.decoder.do(_pull_with, KEYS[1], 0, 40, keywords | {"src_layer_range": range(1), "src_cache_offset": 0})
    pair.decoder.do(_pull_with, KEYS[1], 0, 40, keywords | {"src_layer_range": range(2, 3), "src_cache_offset": 0})
    consumed(pair, KEYS[0])  # interface R5: the union covers it


def test_an_offset_outside_a_row_is_refused_at_either_end_and_nothing_happens(pair: Pair) -> None:
    both(pair, desc(4, 2, 32), desc(4, 8, 48))
    ends = (pair.decoder, pair.prompt)

    def is_refused(kind: type[Exception], size: int, keywords: dict[str, Any], *parts: str) -> None:
        refused(ends, ["kv"], kind, parts, kv_call, "pull_cache", KEYS[0], Use("kv"), 0, size, **keywords)

    for at in (48, 2**64 - 1):
        is_refused(ValueError, -1, {"dst_cache_offset": at}, f"dst_cache_offset={at}", "48 bytes")
    is_refused(ValueError, 9, {"dst_cache_offset": 40}, "size=9", "dst_cache_offset=40", "48 bytes")
    for size, at in ((-1, 0), (32, 1), (1, 32), (1, 2**64 - 1)):
        named = [f"src_cache_offset={at} to dst_cache_offset=0"] if at else []
        is_refused(CacheMismatch, size, {"src_cache_offset": at}, f"size={size}", "32 bytes", "48", *named)


@pytest.mark.parametrize("memory", ["pool", "direct"])
def test_blocks_are_pulled_in_the_order_given_and_consume_nothing(pair: Pair, memory: str) -> None:
    if memory == "direct" and pair.transport == "shm":
        pair.transport = "auto"
    start_v1(pair, **(DIRECT if memory == "direct" else POOL))
    src = pair.prompt.do(kv_make, "kv", desc(), 1, (), True, BLOCKS)
    dst = pair.decoder.do(kv_make, "kv", desc(rows=6), 2, (), True)
    for _ in range(2):
        pair.decoder.do(kv_call, "pull_blocks", BLOCKS, Use("kv"), [1, 2, 7, 0], [3, 4, 0, 3])
        dst = moved(dst, src, [(3, 1), (4, 2), (0, 7), (3, 0)])
        same_bytes(pair.decoder.do(show, "kv"), dst)
    second_to_first = partial(kv_call, src_layer_range=range(1, 2), dst_layer_range=range(1))
    pair.decoder.do(second_to_first, "pull_blocks", BLOCKS, Use("kv"), [5], [5])
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(5, 5)], [(0, 2), (1, 3)]))
    same_bytes(pair.prompt.do(show, "kv"), src)
    assert len(pair.prompt.do(picture).keys) == 1


def test_r12_memory_straight_from_the_device_that_is_made_after_linking_is_reached(pair: Pair) -> None:
    if pair.transport == "shm":
        pair.transport = "auto"
    start_v1(pair, **DIRECT)
    before = pair.prompt.do(picture).pools
    for request in range(3):
        key = CacheKey(1, request, 1)
        src = pair.prompt.do(kv_make, "kv", desc(2, 1, 100_000), request, (key,))
        pair.prompt.do(kv_call, "deallocate_cache", Use("kv"))
        dst = pair.decoder.do(kv_make, "kv", desc(2, 1, 100_000), 9)
        pair.decoder.do(kv_call, "pull_cache", key, Use("kv"))
        same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(0, 0)]))
        pair.decoder.do(drop, "kv")
        pair.decoder.do(kv_call, "is_initialized")
    # Deallocated and pulled: the memory is back, all of it.
    wait_until(lambda: pair.prompt.do(picture).pools[0].used_bytes == 0)
    assert pair.prompt.do(picture).pools[0].live_allocations == before[0].live_allocations == 0


def test_r28_the_peer_may_carry_our_own_cluster_id(pair: Pair) -> None:
    settings = POOL | {"extra": {"llm.Transport": pair.transport}}
    pair.prompt.start("PROMPT", 0, listen_ip_info="127.0.0.1:0", **settings)
    pair.decoder.start("DECODER", 0, **settings)
    assert pair.decoder.do(_link_to, 0, pair.prompt.port) == LLMStatusCode.LLM_SUCCESS
    key = CacheKey(0, 5, 1)
    src = pair.prompt.do(kv_make, "kv", desc(), 1, (key,))
    dst = pair.decoder.do(kv_make, "kv", desc(), 2)
    pair.decoder.do(kv_call, "pull_cache", key, Use("kv"), 4)
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(4, 0)]))


def _link_to(world: Any, cluster_id: int, port: int) -> LLMStatusCode:
    from tests.support.world import cluster_info

    code: LLMStatusCode = world.dd.link_clusters([cluster_info(cluster_id, port)], 10_000)[0]
    return code


def test_r06_a_pull_that_times_out_has_v1s_code_and_the_link_stays(pair: Pair, tmp_path: Path) -> None:
    src, dst = both(pair, sync_kv_timeout=200)
    Gate(tmp_path).open()  # only the time of the call is waited for there
    with pytest.raises(DeadlineExceeded) as caught:
        pair.decoder.do(gated_call_v1, 1, "deadline", tmp_path, "pull_cache", KEYS[0], Use("kv"), 2)
    assert caught.value.status_code is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    assert (caught.value.phase, caught.value.budget_ms) == ("copy", 200)
    consumed(pair, *KEYS)
    pair.decoder.do(kv_call, "pull_cache", KEYS[0], Use("kv"), 2)
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(2, 0)]))


def test_what_is_not_there_is_told_by_its_own_code(pair: Pair) -> None:
    start_v1(pair, linked=False)
    pair.decoder.do(kv_make, "kv", desc(), 2)
    pair.decoder.do(kv_make, "paged", desc(), 2, (), True)
    ends = (pair.decoder, pair.prompt)
    not_linked = LLMStatusCode.LLM_NOT_YET_LINK
    refused(ends, ["kv"], NotLinked, ("1",), kv_call, "pull_cache", KEYS[0], Use("kv"), status=not_linked)
    refused(ends, ["kv"], NotLinked, ("1",), kv_call, "pull_blocks", BLOCKS, Use("paged"), [0], [0], status=not_linked)
    pair.link()
    missing = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    for key in (CacheKey(1, 99), CacheKeyByIdAndIndex(1, 99)):
        refused(ends, ["kv"], CacheNotFound, ("99",), kv_call, "pull_cache", key, Use("kv"), status=missing)
    refused(ends, ["kv"], CacheNotFound, (), kv_call, "pull_blocks", BLOCKS, Use("paged"), [0], [0], status=missing)
    pair.decoder.do(kv_call, "deallocate_cache", Use("kv"))
    number = (str(pair.decoder.do(kv_id, "kv")),)
    refused(ends, [], CacheNotFound, number, kv_call, "pull_cache", KEYS[0], Use("kv"), status=missing)


def _pull_until_unlinked(world: Any) -> list[str]:
    """Pull again and again until the link is gone; return what the errors said."""
    texts: list[str] = []
    while True:
        try:
            kv_call(world, "pull_blocks", BlocksCacheKey(1), Use("kv"), [0], [0])
        except NotLinked as error:
            return [*texts, str(error)]
        except LLMException as error:
            texts.append(str(error))


def test_r22_whatever_a_lost_prompt_interrupts_the_error_names_the_call(shm_pair: Pair) -> None:
    start_v1(shm_pair)
    shm_pair.prompt.do(kv_make, "kv", desc(), 1, (), True, BlocksCacheKey(1))
    shm_pair.decoder.do(kv_make, "kv", desc(), 2, (), True)
    for i in range(4):
        shm_pair.decoder.do(begin_there, f"pull {i}", _pull_until_unlinked)
    shm_pair.prompt.stop()
    for i in range(4):
        *during, after = shm_pair.decoder.do(result_there, f"pull {i}")
        assert [text for text in during if not text.startswith("pull_blocks: ")] == []
        assert "cluster 1" in after
