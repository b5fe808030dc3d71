"""Walk 2 of the architecture and its other exits, step by step: allocate, pull, deallocate, consume, free; and the
printed example of blocks (interface I5, I6, §6, §7, R27)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from llm_datadist import BlocksCacheKey, CacheKey, LLMStatusCode, Placement
from llm_datadist.errors import CacheNotFound, KeyInUse, TransferFailed
from tests.support.gates import stopped
from tests.support.linking import SUCCESS, info, unlink
from tests.support.memory import cpu_cache
from tests.support.moves import Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import fill

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.ends import End
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "CacheManager: allocate_blocks_cache copy_blocks deallocate_blocks_cache pull_blocks remove_cache_key swap_blocks",
    "LLMStatusCode: LLM_KV_CACHE_NOT_EXIST",
)

KEY = CacheKey(1, 10)
HELD = 4 * 3 * 4096  # four tensors of 10000 bytes, each rounded up to pages


def both(pair: Pair) -> tuple[Bytes, Bytes]:
    pair.start()
    source = Spec(rows=2, stride=5000, keys=(KEY,))
    return pair.prompt.do(make, "kv", source, 1), pair.decoder.do(make, "kv", Spec(rows=6, stride=5000), 2)


def seen(end: End) -> tuple[int, int, int, int, int, int]:
    """Return (live, deferred, draining caches, keys, pins, used bytes of the device pool)."""
    now = end.do(picture)
    device = next(pool for pool in now.pools if pool.name == "device")
    caches = now.caches
    return caches.live, caches.deferred, caches.draining, len(now.keys), now.pins, device.used_bytes


def until(end: End, wanted: tuple[int, int, int, int, int, int]) -> None:
    """A release is on its way when a pull returns."""
    wait_until(lambda: seen(end) == wanted)


def test_i5_walk_two_step_by_step(pair: Pair, tmp_path: Path) -> None:
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
        assert pair.prompt.do(unlink, [info(2)], 1000, True) == SUCCESS
        until(pair.prompt, (1, 0, 0, 1, 0, HELD))
        pulling.finish()  # every byte was there before the link was given up
    assert seen(pair.prompt) == (1, 0, 0, 1, 0, HELD)
    wait_until(lambda: not pair.decoder.do(picture).links)
    pair.link()
    pair.decoder.do(call, "pull_cache", KEY, Use("kv"), 3)
    until(pair.prompt, (1, 0, 0, 0, 0, HELD))


def cpu(world: World, seed: int) -> Bytes:
    return fill(cpu_cache(world, "host", Spec(rows=10, stride=256, placement=Placement.HOST).desc), seed)


def test_seed_blocks_are_allocated_pulled_copied_swapped_and_deallocated(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    shm_pair.start()
    key, sample = BlocksCacheKey(1, 0), Spec(rows=10, stride=256, blocks=True)
    keyed = replace(sample, blocks_key=key)
    src = prompt.do(make, "kv", keyed, 1)
    with pytest.raises(KeyInUse):  # one blocks cache per model
        prompt.do(make, "other", keyed, 2)
    assert seen(prompt) == (1, 0, 0, 1, 0, 4 * 4096)
    dst = decoder.do(make, "kv", sample, 3)
    host = decoder.do(cpu, 4)
    for to in ([2, 3], [9, 0]):  # a blocks key is not consumed
        decoder.do(call, "pull_blocks", key, Use("kv"), [0, 1], to)
        dst = moved(dst, src, zip(to, [0, 1], strict=True))
    decoder.do(call, "copy_blocks", Use("kv"), {2: [0, 1], 3: [8]})
    dst = moved(dst, src, [(0, 0), (1, 0), (8, 1)])
    same_bytes(decoder.do(show, "kv"), dst)
    # Swapped out, pulled over, swapped in again.
    decoder.do(call, "swap_blocks", Use("kv"), Use("host"), {2: 0, 3: 1})
    decoder.do(call, "pull_blocks", key, Use("kv"), [8, 9], [2, 3])
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(2, 8), (3, 9)]))
    decoder.do(call, "swap_blocks", Use("host"), Use("kv"), {0: 2, 1: 3})
    same_bytes(decoder.do(show, "kv"), dst)
    same_bytes(decoder.do(show, "host"), moved(host, src, [(0, 0), (1, 1)]))
    same_bytes(prompt.do(show, "kv"), src)

    # Memory and key go at once, although a peer may still want to pull; the key is free for the next cache.
    for _ in range(2):  # the second time is a no-op
        prompt.do(forget, "kv")
        assert seen(prompt) == (0, 0, 0, 0, 0, 0)
    with pytest.raises(CacheNotFound):
        decoder.do(call, "pull_blocks", key, Use("kv"), [0], [0])
    src = prompt.do(make, "kv", keyed, 5)
    decoder.do(call, "pull_blocks", key, Use("kv"), [4], [5])
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(5, 4)]))
    same_bytes(prompt.do(show, "kv"), src)
