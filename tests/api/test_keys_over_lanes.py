"""Pulls by key over data lanes, resolved and read by one request: which of them are, and that all of them bring the
bytes, errors and consumption of a pull that asks where the cache is."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from faults.gated import gated_call, stopped
from faults.gates import Gate, count_arrivals
from llm_datadist import BlocksCacheKey, CacheKey, LLMStatusCode
from llm_datadist.errors import CacheMismatch, CacheNotFound, DeadlineExceeded
from tests.support.ends import ChildEnd
from tests.support.frozen import frozen
from tests.support.linking import SUCCESS, begin_there, info, link, result_there
from tests.support.moves import Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.ends import End
    from tests.support.moves import Bytes
    from tests.support.pairs import Pair
    from tests.support.world import World

pytestmark = pytest.mark.covers("CacheManager: pull_blocks pull_cache")

KV: Final = Use("kv")
ASKED, AT_ONCE = (1, 1), (0, 1)
REFUSED = (1, 2)


def key(number: int) -> CacheKey:
    return CacheKey(1, req_id=number)


def keys(*numbers: int) -> tuple[CacheKey, ...]:
    return tuple(key(number) for number in numbers)


def pull(world: World, method: str, *args: Any, **kwargs: Any) -> tuple[int, int]:
    """Pull; return how often the peer was asked where the cache is, and how often for bytes."""
    with count_arrivals() as counts:
        call(world, method, *args, **kwargs)
    return counts["ask, tcp"], counts["before copy, tcp"]


def waiting(end: End) -> set[str]:
    """Return the keys that wait, once no pull holds anything any more."""
    wait_until(lambda: end.do(picture).pins == 0)
    return {each.key for each in end.do(picture).keys}


@pytest.fixture
def ends(tcp_pair: Pair) -> Iterator[tuple[End, End, Bytes, Bytes]]:
    """A producer with keys 10 to 15 of one cache, a consumer that has pulled key 10 into its row 7."""
    tcp_pair.start(sync_kv_timeout=20_000)
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    src = prompt.do(make, "kv", Spec(keys=keys(10, 11, 12, 13, 14, 15)), 1)
    dst = decoder.do(make, "kv", Spec(), 2)
    assert decoder.do(pull, "pull_cache", key(10), KV, 7) == ASKED
    yield prompt, decoder, src, moved(dst, src, [(7, 0)])
    assert prompt.do(picture).unknown_releases == 0


def test_every_pull_by_key_but_the_first_is_one_request_and_brings_the_row_of_its_key(
    ends: tuple[End, End, Bytes, Bytes],
) -> None:
    prompt, decoder, src, dst = ends
    for number, into in ((13, 0), (11, 5)):
        assert decoder.do(pull, "pull_cache", key(number), KV, into) == AT_ONCE
        dst = moved(dst, src, [(into, number - 10)])
    layers: dict[str, Any] = {"src_layer_range": range(1, 2), "dst_layer_range": range(1)}
    assert decoder.do(partial(pull, **layers), "pull_cache", key(14), KV, 6) == AT_ONCE
    for tensor, half in zip(dst[:2], src[2:], strict=True):
        tensor[6] = half[4]
    same_bytes(decoder.do(show, "kv"), dst)
    same_bytes(prompt.do(show, "kv"), src)
    assert waiting(prompt) == {repr((0, number, 0)) for number in (12, 14, 15)}
    assert [each.unconsumed_bytes for each in prompt.do(picture).keys] == [192, 96, 192]
    # Into blocks: the first pull into such a cache asks.
    blocks = decoder.do(make, "blocks", Spec(stride=16, blocks=True), 3)
    for number, blocks_of, ways in ((12, [6, 0, 3], ASKED), (15, [1, 2, 5], AT_ONCE)):
        assert decoder.do(pull, "pull_blocks", key(number), Use("blocks"), [], blocks_of) == ways
        for tensor, rows in zip(blocks, src, strict=True):
            tensor[blocks_of] = rows[number - 10].reshape(3, 16)
    same_bytes(decoder.do(show, "blocks"), blocks)
    same_bytes(decoder.do(show, "kv"), dst)
    # A second pull of a key that was consumed finds nothing, however soon it comes.
    for number in (13, 13, 15):
        with pytest.raises(CacheNotFound, match=f"req_id={number}, model_id=0.* is not bound") as caught:
            decoder.do(call, "pull_cache", key(number), KV, 1)
        assert (caught.value.status_code, caught.value.phase) == (LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "resolve")
    same_bytes(decoder.do(show, "kv"), dst)


def test_a_cache_of_another_geometry_is_asked_about_and_then_assumed(ends: tuple[End, End, Bytes, Bytes]) -> None:
    prompt, decoder, src, dst = ends
    wide = prompt.do(make, "wide", Spec(rows=3, stride=80, keys=keys(20, 21, 22)), 4)
    assert decoder.do(pull, "pull_cache", key(21), KV, 1) == REFUSED
    assert decoder.do(pull, "pull_cache", key(22), KV, 2) == AT_ONCE
    assert decoder.do(pull, "pull_cache", key(11), KV, 3) == REFUSED
    for tensor, row, rows in zip(dst, wide, src, strict=True):
        tensor[1], tensor[2], tensor[3] = row[1, :48], row[2, :48], rows[1]
    same_bytes(decoder.do(show, "kv"), dst)
    # The same key, of a cache of another geometry.
    prompt.do(call, "remove_cache_key", key(12))
    again = prompt.do(make, "again", Spec(rows=2, stride=96, keys=keys(30, 12)), 5)
    assert decoder.do(pull, "pull_cache", key(12), KV, 4) == REFUSED
    for tensor, row in zip(dst, again, strict=True):
        tensor[4] = row[1, :48]
    # What does not fit is not pulled, neither by what is assumed nor by what is true.
    prompt.do(make, "short", Spec(rows=12, stride=32, keys=keys(40)), 6)  # tensors of as many bytes as assumed
    assert decoder.do(pull, "pull_cache", key(13), KV, 0) == REFUSED
    with pytest.raises(CacheMismatch, match="a source row has 32 bytes"):
        decoder.do(call, "pull_cache", key(40), KV, 5)
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(0, 3)]))
    assert waiting(prompt) == {repr((0, number, 0)) for number in (14, 15, 20, 30, 40)}


def test_what_one_request_is_not_enough_for_is_asked_about(ends: tuple[End, End, Bytes, Bytes]) -> None:
    prompt, decoder, _, _ = ends
    # A blocks cache has no pin; its answer is kept.
    paged = prompt.do(make, "paged", Spec(blocks=True, blocks_key=BlocksCacheKey(1, 0)), 7)
    mine = decoder.do(make, "paged", Spec(blocks=True), 8)
    for into, ways in ((3, ASKED), (4, AT_ONCE)):
        assert decoder.do(pull, "pull_blocks", BlocksCacheKey(1, 0), Use("paged"), [1], [into]) == ways
    same_bytes(decoder.do(show, "paged"), moved(mine, paged, [(3, 1), (4, 1)]))
    # Nor is a large one, whatever is assumed for its parts.
    large = Spec(tensors=2, rows=4, stride=1 << 20, keys=keys(50, 51, 52, 53))
    src, dst = prompt.do(make, "large", large, 9), decoder.do(make, "large", Spec(2, 4, 1 << 20), 10)
    for row, (size, ways) in enumerate(((4096, ASKED), (4096, AT_ONCE), (-1, ASKED), (-1, ASKED))):
        assert decoder.do(pull, "pull_cache", key(50 + row), Use("large"), row, size) == ways
        for tensor, rows in zip(dst, src, strict=True):
            tensor[row, : size if size > 0 else None] = rows[row, : size if size > 0 else None]
    same_bytes(decoder.do(show, "large"), dst)


def _settle_ahead(world: World) -> None:
    """What has ended a transfer is counted here, and is on its way for ever."""
    assert world.dd._engine is not None
    world.dd._engine.links.get(1).settled += 1


def test_a_request_that_overtakes_the_end_of_a_transfer_is_refused(ends: tuple[End, End, Bytes, Bytes]) -> None:
    """That transfer may have consumed the key."""
    _, decoder, src, dst = ends
    decoder.do(_settle_ahead)
    assert decoder.do(pull, "pull_cache", key(11), KV, 1) == REFUSED
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(1, 1)]))


def test_r05_of_two_pulls_of_one_key_at_once_both_succeed_and_a_later_binding_is_not_consumed(
    ends: tuple[End, End, Bytes, Bytes], tmp_path: Path
) -> None:
    prompt, decoder, src, dst = ends
    decoder.do(begin_there, "first", gated_call, 1, "after copy", tmp_path, "pull_cache", key(11), KV, 1)
    (gate := Gate(tmp_path)).wait()
    assert prompt.do(picture).pins == 1
    assert decoder.do(pull, "pull_cache", key(11), KV, 2) == AT_ONCE
    wait_until(lambda: repr((0, 11, 0)) not in {each.key for each in prompt.do(picture).keys})
    new = prompt.do(make, "new", Spec(rows=1, keys=keys(11)), 3)
    gate.open()
    decoder.do(result_there, "first")
    same_bytes(decoder.do(show, "kv"), dst := moved(dst, src, [(1, 1), (2, 1)]))
    assert repr((0, 11, 0)) in waiting(prompt)
    assert decoder.do(pull, "pull_cache", key(11), KV, 3) == REFUSED  # of one row: another geometry
    same_bytes(decoder.do(show, "kv"), moved(dst, new, [(3, 0)]))


def test_the_memory_of_a_key_that_is_removed_waits_for_the_pull(
    ends: tuple[End, End, Bytes, Bytes], tmp_path: Path
) -> None:
    prompt, decoder, _, _ = ends
    prompt.do(make, "one", Spec(keys=keys(60)), 3)
    with stopped(decoder, "after copy", tmp_path, "pull_cache", key(60), KV, 1) as pulling:
        prompt.do(forget, "one")
        prompt.do(call, "remove_cache_key", key(60))
        assert (prompt.do(picture).pins, prompt.do(picture).caches.draining) == (1, 1)
        pulling.finish()
    wait_until(lambda: prompt.do(picture).caches.draining == 0)
    assert prompt.do(picture).pins == 0


def test_r07_a_pull_from_an_owner_that_stands_still_ends_in_time_and_leaves_no_pin(tcp_pair: Pair) -> None:
    tcp_pair.start(sync_kv_timeout=400, extra={"llm.PeerTimeout": "600"})
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    src, dst = prompt.do(make, "kv", Spec(keys=keys(10, 11, 12)), 1), decoder.do(make, "kv", Spec(), 2)
    decoder.do(call, "pull_cache", key(10), KV, 0)
    with frozen(prompt), pytest.raises(DeadlineExceeded) as caught:
        decoder.do(call, "pull_cache", key(11), KV, 1)
    assert (caught.value.status_code, caught.value.phase) == (LLMStatusCode.LLM_TIMEOUT, "copy")
    # The request and the release come together, in any order. Longer than that a pin would stay for two seconds.
    wait_until(lambda: prompt.do(picture).pins == 0, 1.0)
    assert waiting(prompt) == {repr((0, 11, 0)), repr((0, 12, 0))}
    wait_until(lambda: _pulled(decoder, 11))
    shown = decoder.do(show, "kv")
    same_bytes(shown, moved(moved(dst, src, [(0, 0)]), shown, [(1, 1)]))  # what was addressed was undefined meanwhile
    same_bytes([tensor[1:2] for tensor in shown], [tensor[1:2] for tensor in src])


def _pulled(decoder: End, number: int) -> bool:
    """One more call; a loaded machine may need several within so short a time."""
    try:
        decoder.do(call, "pull_cache", key(number), KV, 1)
    except DeadlineExceeded:
        return False
    return True


@pytest.mark.parametrize("step", ["after copy", "release"])
def test_i5_the_pin_of_a_caller_that_is_killed_goes_and_the_key_stays(
    children: tuple[ChildEnd, ChildEnd], tmp_path: Path, step: str
) -> None:
    prompt, _ = children
    victim = ChildEnd("victim")
    settings: dict[str, Any] = {"extra": {"llm.Transport": "tcp"}}
    prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", **settings)
    victim.start("DECODER", 2, **settings)
    try:
        assert victim.do(link, [info(1, prompt.port)]) == SUCCESS
        src = prompt.do(make, "kv", Spec(keys=keys(10, 11)), 1)
        victim.do(make, "kv", Spec(), 2)
        victim.do(call, "pull_cache", key(10), KV, 0)
        wait_until(lambda: prompt.do(picture).pins == 0)
        with stopped(victim, step, tmp_path, "pull_cache", key(11), KV, 1):
            assert prompt.do(picture).pins == 1
            victim.kill()
        wait_until(lambda: prompt.do(picture).links == ())
        assert waiting(prompt) == {repr((0, 11, 0))}
        same_bytes(prompt.do(show, "kv"), src)
    finally:
        prompt.stop()
