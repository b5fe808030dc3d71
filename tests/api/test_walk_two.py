"""Walk 2 of the architecture and its other exits, step by step: allocate, pull, deallocate, consume, free
(interface I5, I6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist.errors import CacheNotFound, TransferFailed
from tests.support.gates import stopped
from tests.support.moves import Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import cluster_info

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.ends import End
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers("CacheManager.remove_cache_key")

KEY, OTHER = CacheKey(1, 10), CacheKey(1, 20)
SOURCE = Spec(rows=2, stride=5000, keys=(KEY,))
PAGE = 4096
HELD = 4 * 3 * PAGE  # four tensors of 10000 bytes, each rounded up to pages
TARGET = Spec(rows=6, stride=5000)


def both(pair: Pair, source: Spec = SOURCE, target: Spec = TARGET, **settings: Any) -> tuple[Bytes, Bytes]:
    pair.start(**settings)
    return pair.prompt.do(make, "kv", source, 1), pair.decoder.do(make, "kv", target, 2)


def seen(end: End) -> tuple[int, int, int, int, int, int]:
    """Return (live, deferred, draining caches, keys, pins, used bytes of the device pool)."""
    now = end.do(picture)
    device = next(pool for pool in now.pools if pool.name == "device")
    caches = now.caches
    return caches.live, caches.deferred, caches.draining, len(now.keys), now.pins, device.used_bytes


def until(end: End, wanted: tuple[int, int, int, int, int, int]) -> None:
    """A release is on its way when a pull returns."""
    wait_until(lambda: seen(end) == wanted)


def test_walk_two_step_by_step(pair: Pair, tmp_path: Path) -> None:
    src, dst = both(pair)
    assert seen(pair.prompt) == (1, 0, 0, 1, 0, HELD)
    with stopped(pair.decoder, "before copy", tmp_path, "pull_cache", KEY, Use("kv"), 3) as pulling:
        assert seen(pair.prompt) == (1, 0, 0, 1, 1, HELD)
        pair.prompt.do(forget, "kv")
        assert seen(pair.prompt) == (0, 1, 0, 1, 1, HELD)
        pulling.finish()
    until(pair.prompt, (0, 0, 0, 0, 0, 0))
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(3, 0)]))
    assert pair.prompt.do(picture).pools[0].largest_hole_bytes == pair.prompt.do(picture).pools[0].capacity_bytes


def test_i5_deallocate_before_the_pull_keeps_the_bytes_until_the_key_is_consumed(tcp_pair: Pair) -> None:
    pair = tcp_pair
    src, dst = both(pair, Spec(rows=2, stride=5000, keys=(KEY, OTHER)))
    pair.prompt.do(forget, "kv")
    assert seen(pair.prompt) == (0, 1, 0, 2, 0, HELD)
    pair.prompt.do(make, "noise", Spec(rows=8, stride=5000), 9)  # must not land on the bytes that wait
    pair.decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, 1, 1), Use("kv"), 0)  # by id as well
    until(pair.prompt, (1, 1, 0, 1, 0, HELD + 4 * 10 * PAGE))
    pair.decoder.do(call, "pull_cache", KEY, Use("kv"), 1)
    until(pair.prompt, (1, 0, 0, 0, 0, 4 * 10 * PAGE))
    dst = moved(dst, src, [(0, 1), (1, 0)])
    same_bytes(pair.decoder.do(show, "kv"), dst)
    with pytest.raises(CacheNotFound):
        pair.decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, 1, 0), Use("kv"), 1)
    # A consumed key does not free what its owner still has.
    pair.prompt.do(forget, "noise")
    late = pair.prompt.do(make, "kv", SOURCE, 3)
    pair.decoder.do(call, "pull_cache", KEY, Use("kv"), 5)
    until(pair.prompt, (1, 0, 0, 0, 0, HELD))
    pair.prompt.do(forget, "kv")
    assert seen(pair.prompt) == (0, 0, 0, 0, 0, 0)
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, late, [(5, 0)]))


def test_a_key_removed_during_a_pull_fails_it_and_the_memory_waits_for_its_pin(shm_pair: Pair, tmp_path: Path) -> None:
    pair = shm_pair
    _, dst = both(pair)
    with stopped(pair.decoder, "before copy", tmp_path, "pull_cache", KEY, Use("kv"), 3) as pulling:
        pair.prompt.do(forget, "kv")
        pair.prompt.do(call, "remove_cache_key", KEY)
        assert seen(pair.prompt) == (0, 0, 1, 0, 1, HELD)
        with pytest.raises(TransferFailed) as caught:
            pulling.finish()
    assert caught.value.status_code is LLMStatusCode.LLM_FAILED
    until(pair.prompt, (0, 0, 0, 0, 0, 0))
    for got, before in zip(pair.decoder.do(show, "kv"), dst, strict=True):
        got[3] = before[3]
        same_bytes([got], [before])  # the addressed row is undefined, the rest untouched


def test_a_peer_that_goes_before_its_release_consumes_nothing(tcp_pair: Pair, tmp_path: Path) -> None:
    pair = tcp_pair
    both(pair)
    with stopped(pair.decoder, "release", tmp_path, "pull_cache", KEY, Use("kv"), 3) as pulling:
        assert seen(pair.prompt) == (1, 0, 0, 1, 1, HELD)
        pair.prompt.do(_drop, 2)
        until(pair.prompt, (1, 0, 0, 1, 0, HELD))
        pulling.finish()  # every byte was there before the link was given up
    assert seen(pair.prompt) == (1, 0, 0, 1, 0, HELD)
    wait_until(lambda: not pair.decoder.do(picture).links)
    pair.link()
    pair.decoder.do(call, "pull_cache", KEY, Use("kv"), 3)
    until(pair.prompt, (1, 0, 0, 0, 0, HELD))


def _drop(world: World, cluster_id: int) -> None:
    status, _ = world.dd.unlink_clusters([cluster_info(cluster_id, 1)], 1000, force=True)
    assert status is LLMStatusCode.LLM_SUCCESS
