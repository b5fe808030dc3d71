"""Invariants I4 to I8 of interface B12. The others are beside what they are about: their numbers are in the names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist.errors import CacheNotFound
from tests.support.moves import Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import End, LocalEnd

KEY: Final = CacheKey(1, 10)
ROW: Final = Spec(rows=1, keys=(KEY,))


def keys(end: End) -> int:
    """How many keys are bound there."""
    return len(end.do(picture).keys)


def used(end: End) -> int:
    """Bytes in use of the device pool there."""
    return next(int(pool.used_bytes) for pool in end.do(picture).pools if pool.name == "device")


def not_found(end: End, key: Any) -> None:
    with pytest.raises(CacheNotFound) as caught:
        end.do(call, "pull_cache", key, Use("kv"))
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_i04_i05_a_key_is_consumed_exactly_once_and_keeps_the_bytes_of_a_deallocated_cache(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    shm_pair.start()
    assert used(prompt) == 0
    target = decoder.do(make, "kv", Spec(rows=2), 2)
    for deallocated in (False, True):
        source = prompt.do(make, "kv", ROW, 1 + 10 * deallocated)
        held = used(prompt)
        if deallocated:
            prompt.do(call, "deallocate_cache", Use("kv"))
            assert (used(prompt), prompt.do(picture).caches.deferred) == (held, 1)
        decoder.do(call, "pull_cache", KEY, Use("kv"), 1)
        wait_until(lambda: keys(prompt) == 0 and prompt.do(picture).pins == 0)  # the release is on its way
        not_found(decoder, KEY)
        same_bytes(decoder.do(show, "kv"), moved(target, source, [(1, 0)]))
        if not deallocated:
            decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, 1, 0), Use("kv"), 1)  # the cache is still there
            prompt.do(forget, "kv")
        assert used(prompt) == 0


def test_i06_each_tensor_takes_whole_pages_of_the_pool(end: LocalEnd) -> None:
    end.start("PROMPT", 1, mem_pool_cfg='{"memory_size": 1048576, "page_shift": 12}')
    for stride, pages in ((1, 1), (4095, 1), (4096, 1), (4097, 2), (12288, 3)):
        end.do(make, "kv", Spec(tensors=3, rows=1, stride=stride), 1)
        assert used(end) == 3 * pages * 4096
        end.do(forget, "kv")
        assert used(end) == 0


def test_i07_i08_a_pull_moves_the_local_stride_or_the_size_and_may_fill_its_last_block_in_part(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    shm_pair.start()
    decoder.do(make, "kv", Spec(rows=3, stride=32), 2)
    for size, count in ((-1, 32), (1, 1), (20, 20), (32, 32)):  # longer rows are truncated
        source = prompt.do(make, "kv", Spec(rows=1, stride=48, keys=(KEY,)), 3 + size)
        expected = decoder.do(show, "kv")
        decoder.do(call, "pull_cache", KEY, Use("kv"), 1, size)
        for tensor, theirs in zip(expected, source, strict=True):
            tensor[1, :count] = theirs[0, :count]
        same_bytes(decoder.do(show, "kv"), expected)
        wait_until(lambda: keys(prompt) == 0)
    source = prompt.do(make, "kv", Spec(rows=1, stride=80, keys=(KEY,)), 1)
    expected = decoder.do(make, "kv", Spec(rows=5, stride=32, blocks=True), 2)
    decoder.do(call, "pull_blocks", KEY, Use("kv"), [], [4, 0, 2])
    for tensor, theirs in zip(expected, source, strict=True):
        tensor[4], tensor[0] = theirs[0, :32], theirs[0, 32:64]
        tensor[2, :16] = theirs[0, 64:]
    same_bytes(decoder.do(show, "kv"), expected)
