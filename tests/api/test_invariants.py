"""The invariants interface I1 to I15 of interface B12, one test each: its number is in its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMException, LLMRole, LLMStatusCode, Placement
from llm_datadist.errors import CacheNotFound, DeadlineExceeded, NotLinked
from tests.support.ends import ChildEnd
from tests.support.frozen import freeze, frozen
from tests.support.linking import (
    SUCCESS,
    alone,
    begin_there,
    bytes_move_both_ways,
    info,
    link,
    links,
    result_there,
    unlink,
)
from tests.support.moves import (
    BLOCKS,
    Spec,
    Use,
    cache_id,
    call,
    forget,
    make,
    moved,
    picture,
    same_bytes,
    show,
    wait_until,
)
from tests.support.world import World, make_config, residue_of, settled_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Pair
    from tests.support.ends import End

KEY: Final = CacheKey(1, 10)
ROW: Final = Spec(rows=1, keys=(KEY,))


def keys(end: End) -> int:
    """How many keys are bound there."""
    return len(end.do(picture).keys)


def used(end: End) -> int:
    """Bytes in use of the device pool there."""
    return next(int(pool.used_bytes) for pool in end.do(picture).pools if pool.name == "device")


def consumed(prompt: End) -> None:
    """The release that consumes a key is on its way when the pull returns."""
    wait_until(lambda: keys(prompt) == 0 and prompt.do(picture).pins == 0)


@pytest.fixture
def newborn() -> Iterator[Callable[[str], ChildEnd]]:
    """More processes than the pair's two. Those that live at the end must have nothing left."""
    made: dict[ChildEnd, dict[str, Any]] = {}

    def born(name: str) -> ChildEnd:
        end = ChildEnd(name)
        made[end] = end.do(residue_of)
        return end

    yield born
    for end, before in made.items():
        if end._process.poll() is None:
            end.stop()
            assert end.do(settled_of, before) == before
            end.close()


def test_i01_one_link_clusters_makes_a_link_that_both_ends_can_use(pair: Pair) -> None:
    pair.start()
    wait_until(lambda: pair.prompt.do(links) == {2: "ready"})
    assert pair.decoder.do(links) == {1: "ready"}
    bytes_move_both_ways(pair.prompt, pair.decoder)


def test_i02_unlink_is_idempotent_and_by_force_the_peer_is_not_contacted(shm_pair: Pair) -> None:
    pair = shm_pair
    pair.start(linked=False)
    for force in (False, True):
        for _ in range(2):  # nothing is linked, then nothing is linked any more
            assert pair.decoder.do(unlink, [info(1, pair.prompt.port)], 5000, force) == SUCCESS
        pair.link()
        assert pair.decoder.do(unlink, [info(1, pair.prompt.port)], 5000, force) == SUCCESS
        assert pair.decoder.do(unlink, [info(1, pair.prompt.port)], 5000, force) == SUCCESS
        alone(pair.decoder, pair.prompt)
    pair.link()
    assert isinstance(pair.prompt, ChildEnd)
    with frozen(pair.prompt):
        assert pair.decoder.do(unlink, [info(1)], 5000, True) == SUCCESS
        assert pair.decoder.do(links) == {}


@pytest.mark.parametrize("dialler", [False, True])
def test_i03_a_restarted_peer_is_linked_again_without_any_call_at_the_survivor(
    shm_pair: Pair, newborn: Callable[[str], ChildEnd], dialler: bool
) -> None:
    """The peer that restarts is the one that linked, or the one that was linked to."""
    survivor = shm_pair.decoder
    survivor.start("DECODER", 2, listen_ip_info="127.0.0.1:0")
    for life in range(3):
        peer = newborn(f"life {life}")
        peer.start("PROMPT", 1, listen_ip_info="127.0.0.1:0")
        if dialler:
            assert peer.do(link, [info(2, survivor.port)]) == SUCCESS
        else:
            assert survivor.do(link, [info(1, peer.port)]) == SUCCESS
        wait_until(lambda: survivor.do(links) == {1: "ready"})
        bytes_move_both_ways(peer, survivor)
        peer.kill()


def test_i04_a_key_is_consumed_exactly_once(pair: Pair) -> None:
    pair.start()
    source = pair.prompt.do(make, "kv", ROW, 1)
    target = pair.decoder.do(make, "kv", Spec(rows=2), 2)
    pair.decoder.do(call, "pull_cache", KEY, Use("kv"), 0)
    consumed(pair.prompt)
    with pytest.raises(CacheNotFound) as caught:
        pair.decoder.do(call, "pull_cache", KEY, Use("kv"), 1)
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    same_bytes(pair.decoder.do(show, "kv"), moved(target, source, [(0, 0)]))
    pair.decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, 1, 0), Use("kv"), 1)  # the cache itself is still there


def test_i05_deallocate_before_the_pull_keeps_the_bytes_until_the_key_is_consumed(pair: Pair) -> None:
    pair.start()
    assert used(pair.prompt) == 0
    source = pair.prompt.do(make, "kv", ROW, 1)
    held = used(pair.prompt)
    pair.prompt.do(call, "deallocate_cache", Use("kv"))
    assert (used(pair.prompt), pair.prompt.do(picture).caches.deferred) == (held, 1)
    target = pair.decoder.do(make, "kv", Spec(rows=1), 2)
    pair.decoder.do(call, "pull_cache", KEY, Use("kv"))
    same_bytes(pair.decoder.do(show, "kv"), moved(target, source, [(0, 0)]))
    wait_until(lambda: used(pair.prompt) == 0)


@pytest.mark.parametrize(("stride", "pages"), [(1, 1), (4095, 1), (4096, 1), (4097, 2), (12288, 3)])
def test_i06_each_tensor_takes_whole_pages_of_the_pool(pair: Pair, stride: int, pages: int) -> None:
    pair.start(linked=False, mem_pool_cfg='{"memory_size": 1048576, "page_shift": 12}')
    pair.prompt.do(make, "kv", Spec(tensors=3, rows=1, stride=stride), 1)
    assert used(pair.prompt) == 3 * pages * 4096
    pair.prompt.do(forget, "kv")
    assert used(pair.prompt) == 0


@pytest.mark.parametrize("size", [-1, 1, 20, 32])
def test_i07_a_pull_moves_the_local_stride_unless_a_size_is_given_and_truncates_longer_rows(
    pair: Pair, size: int
) -> None:
    pair.start()
    source = pair.prompt.do(make, "kv", Spec(rows=1, stride=48, keys=(KEY,)), 1)
    target = pair.decoder.do(make, "kv", Spec(rows=3, stride=32), 2)
    pair.decoder.do(call, "pull_cache", KEY, Use("kv"), 1, size)
    count = 32 if size == -1 else size
    expected = [tensor.copy() for tensor in target]
    for tensor, theirs in zip(expected, source, strict=True):
        tensor[1, :count] = theirs[0, :count]
    same_bytes(pair.decoder.do(show, "kv"), expected)


def test_i08_the_last_block_of_a_row_may_be_filled_in_part(pair: Pair) -> None:
    pair.start()
    source = pair.prompt.do(make, "kv", Spec(rows=1, stride=80, keys=(KEY,)), 1)
    target = pair.decoder.do(make, "kv", Spec(rows=5, stride=32, blocks=True), 2)
    pair.decoder.do(call, "pull_blocks", KEY, Use("kv"), [], [4, 0, 2])
    expected = [tensor.copy() for tensor in target]
    for tensor, theirs in zip(expected, source, strict=True):
        tensor[4], tensor[0] = theirs[0, :32], theirs[0, 32:64]
        tensor[2, :16] = theirs[0, 64:]
    same_bytes(pair.decoder.do(show, "kv"), expected)


def _pull_layers(world: World, layers: range) -> None:
    world.cm.pull_cache(KEY, world.caches["kv"], src_layer_range=layers, dst_layer_range=layers)


def test_i09_layered_pulls_release_the_key_only_when_all_layers_were_pulled(pair: Pair) -> None:
    pair.start()
    source = pair.prompt.do(make, "kv", Spec(tensors=8, rows=1, keys=(KEY,)), 1)
    target = pair.decoder.do(make, "kv", Spec(tensors=8, rows=1), 2)
    for layers in (range(1), range(2, 4), range(1), range(2, 3)):
        pair.decoder.do(_pull_layers, layers)
        wait_until(lambda: pair.prompt.do(picture).pins == 0)
        assert keys(pair.prompt) == 1, layers
    pair.decoder.do(_pull_layers, range(1, 2))
    consumed(pair.prompt)
    same_bytes(pair.decoder.do(show, "kv"), moved(target, source, [(0, 0)]))


@pytest.mark.parametrize("placement", Placement)
def test_i10_a_registered_cache_survives_everything_but_unregister(pair: Pair, placement: Placement) -> None:
    pair.start()
    source = pair.prompt.do(make, "kv", Spec(rows=1, keys=(KEY,), memory="inside", placement=placement), 1)
    target = pair.decoder.do(make, "kv", Spec(rows=1), 2)

    def arrives(key: Any) -> None:
        pair.decoder.do(call, "pull_cache", key, Use("kv"))
        same_bytes(pair.decoder.do(show, "kv"), moved(target, source, [(0, 0)]))

    by_id = CacheKeyByIdAndIndex(1, pair.prompt.do(cache_id, "kv"), 0)
    for _ in range(2):
        arrives(KEY)  # pulling consumes nothing
    pair.prompt.do(call, "deallocate_cache", Use("kv"))  # a no-op
    arrives(KEY)
    assert pair.decoder.do(unlink, [info(1, pair.prompt.port)]) == SUCCESS
    pair.link()
    arrives(KEY)
    pair.prompt.do(call, "remove_cache_key", KEY)  # the key goes, the cache stays (interface R25)
    with pytest.raises(CacheNotFound):
        pair.decoder.do(call, "pull_cache", KEY, Use("kv"))
    arrives(by_id)
    pair.prompt.do(call, "unregister_cache", by_id.cache_id)
    with pytest.raises(CacheNotFound):
        pair.decoder.do(call, "pull_cache", by_id, Use("kv"))


def test_i11_ids_count_from_one_in_every_init_so_that_peers_may_assume_them(pair: Pair) -> None:
    first, second = CacheKeyByIdAndIndex(1, 1), CacheKeyByIdAndIndex(1, 2)
    for seed in (1, 5):
        pair.start(rca=True)
        theirs = pair.prompt.do(make, "kv", Spec(rows=1), seed)
        pair.prompt.do(make, "kv 2", Spec(rows=1), seed + 1)
        ours = pair.decoder.do(make, "kv", Spec(rows=1), seed + 2)
        assert [end.do(cache_id, "kv") for end in (pair.prompt, pair.decoder)] == [1, 1]
        pair.decoder.do(call, "push_cache", second, Use("kv"))
        pair.decoder.do(call, "pull_cache", first, Use("kv"))
        same_bytes(pair.prompt.do(show, "kv 2"), ours)
        same_bytes(pair.decoder.do(show, "kv"), theirs)
        pair.decoder.stop()
        pair.prompt.stop()


@pytest.mark.parametrize("call_", ["pull_cache", "pull_blocks", "link", "unlink"])
def test_i12_every_call_ends_at_its_timeout_while_the_peer_answers_nothing(shm_pair: Pair, call_: str) -> None:
    """It ends although the peer goes on being stopped; the link stays, and works when the peer goes on
    (interface R7)."""
    pair = shm_pair
    pair.start(linked=call_ != "link", sync_kv_timeout=300, extra={"llm.PeerTimeout": "600"})
    pair.prompt.do(make, "rows", ROW, 1)
    pair.prompt.do(make, "paged", Spec(blocks=True, blocks_key=BLOCKS), 2)
    pair.decoder.do(make, "rows", Spec(rows=1), 3)
    pair.decoder.do(make, "paged", Spec(blocks=True), 4)
    clusters = [info(1, pair.prompt.port)]
    assert isinstance(pair.prompt, ChildEnd)
    with frozen(pair.prompt):
        if call_ in ("link", "unlink"):
            function = link if call_ == "link" else unlink
            assert pair.decoder.do(function, clusters, 300) == (LLMStatusCode.LLM_TIMEOUT, [LLMStatusCode.LLM_TIMEOUT])
        else:
            args = (KEY, Use("rows")) if call_ == "pull_cache" else (BLOCKS, Use("paged"), [1], [2])
            with pytest.raises(DeadlineExceeded) as caught:
                pair.decoder.do(call, call_, *args)
            assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
    if call_ == "link":
        pair.link()
    bytes_move_both_ways(pair.prompt, pair.decoder)


def _again(world: World, options: dict[str, str]) -> int | None:
    """Finalize, and initialise the same object."""
    world.dd.finalize()
    world.caches.clear()
    with pytest.raises(RuntimeError, match="not initialized"):
        _ = world.dd.cache_manager
    world.dd.init(options)
    return world.dd.listen_port


def test_i14_one_object_is_initialised_finalized_and_initialised_again(pair: Pair) -> None:
    options = make_config(listen_ip_info="127.0.0.1:0", extra={"llm.Transport": pair.transport})
    pair.start()
    for _ in range(3):
        bytes_move_both_ways(pair.prompt, pair.decoder)
        pair.prompt.port = pair.prompt.do(_again, options)
        alone(pair.decoder)
        pair.link()
    bytes_move_both_ways(pair.prompt, pair.decoder)


@pytest.mark.parametrize("fate", ["stopped", "killed"])
def test_i15_one_dead_peer_does_not_block_traffic_with_others(
    shm_pair: Pair, newborn: Callable[[str], ChildEnd], fate: str
) -> None:
    pair = shm_pair
    extra = {"llm.PeerTimeout": "600"}  # so that nothing ends because of missed beats
    pair.start(sync_kv_timeout=600_000, extra=extra)
    dead = newborn("dead")
    dead.start("PROMPT", 3, listen_ip_info="127.0.0.1:0", extra=extra)
    assert pair.decoder.do(link, [info(3, dead.port)]) == SUCCESS
    dead.do(make, "kv", Spec(blocks=True, blocks_key=BlocksCacheKey(3, 0)), 1)
    pair.decoder.do(make, "kv", Spec(blocks=True), 2)
    freeze(dead)
    try:
        pair.decoder.do(begin_there, "stuck", call, "pull_blocks", BlocksCacheKey(3, 0), Use("kv"), [0], [0])
        wait_until(lambda: pair.decoder.do(_waits, 3))
        if fate == "stopped":
            for _ in range(3):
                bytes_move_both_ways(pair.prompt, pair.decoder)
            assert pair.decoder.do(_waits, 3), "it was stuck all the time"
        dead.kill()
        error = pair.decoder.do(result_there, "stuck")
        assert error.status_code is LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR, repr(error)
    finally:
        dead.kill()
    wait_until(lambda: pair.decoder.do(links) == {1: "ready"})
    bytes_move_both_ways(pair.prompt, pair.decoder)
    with pytest.raises(NotLinked):
        pair.decoder.do(call, "pull_blocks", BlocksCacheKey(3, 0), Use("kv"), [0], [0])


def _waits(world: World, peer: int) -> bool:
    """True while a call waits for an answer of that peer."""
    assert world.dd._engine is not None
    return len(world.dd._engine.links.get(peer).requests.waiters) > 0


def _switch(world: World, role: LLMRole, options: dict[str, str] | None) -> None:
    method = "switch_role"
    getattr(world.dd, method)(role, options)


def test_i13_a_role_is_not_switched_while_there_is_a_link_whoever_made_it(pair: Pair) -> None:
    pair.start()
    wait_until(lambda: pair.prompt.do(links) == {2: "ready"})
    for end, role in ((pair.prompt, LLMRole.DECODER), (pair.decoder, LLMRole.PROMPT), (pair.prompt, LLMRole.PROMPT)):
        with pytest.raises(LLMException) as caught:
            end.do(_switch, role, {"llm.listenIpInfo": "127.0.0.1:0"})
        assert caught.value.status_code is LLMStatusCode.LLM_EXIST_LINK
    bytes_move_both_ways(pair.prompt, pair.decoder)
    assert pair.decoder.do(unlink, [info(1, pair.prompt.port)]) == SUCCESS
    alone(pair.prompt, pair.decoder)
    pair.decoder.do(_switch, LLMRole.PROMPT, None)
    pair.link()  # the prompt has not stopped to listen: nothing of the refused switch was done
    bytes_move_both_ways(pair.prompt, pair.decoder)
