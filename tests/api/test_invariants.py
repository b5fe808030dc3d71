"""The invariants interface I4 to I11 of interface B12, about caches; those about links (I1 to I3, I12 to I15) are in
test_links.py, test_unlink.py, test_peer_death.py and test_switch_role.py. The numbers are in the names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import CacheKey, CacheKeyByIdAndIndex, LLMStatusCode, Placement
from llm_datadist.errors import CacheNotFound
from tests.support.linking import SUCCESS, info, unlink
from tests.support.moves import Spec, Use, cache_id, call, forget, make, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import End, LocalEnd
    from tests.support.world import World

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


def _pull_layers(world: World, layers: range) -> None:
    world.cm.pull_cache(KEY, world.caches["kv"], src_layer_range=layers, dst_layer_range=layers)


def test_i09_layered_pulls_release_the_key_only_when_all_layers_were_pulled(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    shm_pair.start()
    source = prompt.do(make, "kv", Spec(tensors=8, rows=1, keys=(KEY,)), 1)
    target = decoder.do(make, "kv", Spec(tensors=8, rows=1), 2)
    for layers in (range(1), range(2, 4), range(1), range(2, 3)):
        decoder.do(_pull_layers, layers)
        wait_until(lambda: prompt.do(picture).pins == 0)
        assert keys(prompt) == 1, layers
    decoder.do(_pull_layers, range(1, 2))
    wait_until(lambda: keys(prompt) == 0 and prompt.do(picture).pins == 0)
    same_bytes(decoder.do(show, "kv"), moved(target, source, [(0, 0)]))


@pytest.mark.parametrize("placement", Placement)
def test_i10_a_registered_cache_survives_everything_but_unregister(shm_pair: Pair, placement: Placement) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    shm_pair.start()
    source = prompt.do(make, "kv", Spec(rows=1, keys=(KEY,), memory="inside", placement=placement), 1)

    def arrives(key: Any) -> None:
        target = decoder.do(make, "kv", Spec(rows=1), 2)
        decoder.do(call, "pull_cache", key, Use("kv"))
        same_bytes(decoder.do(show, "kv"), moved(target, source, [(0, 0)]))

    by_id = CacheKeyByIdAndIndex(1, prompt.do(cache_id, "kv"), 0)
    for _ in range(2):
        arrives(KEY)  # pulling consumes nothing
    prompt.do(call, "deallocate_cache", Use("kv"))  # a no-op
    arrives(KEY)
    assert decoder.do(unlink, [info(1, prompt.port)]) == SUCCESS
    shm_pair.link()
    arrives(KEY)
    prompt.do(call, "remove_cache_key", KEY)  # the key goes, the cache stays (interface R25)
    not_found(decoder, KEY)
    arrives(by_id)
    prompt.do(call, "unregister_cache", by_id.cache_id)
    not_found(decoder, by_id)


def test_i11_ids_count_from_one_in_every_init_so_that_peers_may_assume_them(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    for seed in (1, 5):
        shm_pair.start(rca=True)
        theirs = prompt.do(make, "kv", Spec(rows=1), seed)
        prompt.do(make, "kv 2", Spec(rows=1), seed + 1)
        ours = decoder.do(make, "kv", Spec(rows=1), seed + 2)
        assert [end.do(cache_id, "kv") for end in (prompt, decoder)] == [1, 1]
        decoder.do(call, "push_cache", CacheKeyByIdAndIndex(1, 2), Use("kv"))
        decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, 1), Use("kv"))
        same_bytes(prompt.do(show, "kv 2"), ours)
        same_bytes(decoder.do(show, "kv"), theirs)
        decoder.stop()
        prompt.stop()
