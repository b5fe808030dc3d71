"""v1 without a pool: freed memory is unmapped, but never under a peer that may still be at it (interface R7, R12)."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheKey, TransferConfig
from llm_datadist._memory import pool
from llm_datadist.errors import CacheNotFound, PeerLost, TransferFailed
from tests.faults.gates import Gate, shut
from tests.support.ends import ChildEnd, LocalEnd
from tests.support.layers import Always
from tests.support.linking import SUCCESS, begin_there, info, link, result_there
from tests.support.moves import Use, picture, same_bytes, show, wait_until
from tests.support.pushers import freeze, quarantined
from tests.support.v1 import (
    DIRECT,
    POOL,
    desc,
    gated_call_v1,
    kv_call,
    kv_id,
    kv_make,
    kv_properties,
    start_end,
    start_v1,
)
from tests.support.world import residue, settled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.world import World

BLOCKS, ROW = BlocksCacheKey(1, 3), CacheKey(1, 10)


def pulling(pair: Pair, folder: Path, **settings: object) -> Gate:
    """Begin a pull of blocks, in the same process, that stops when it has announced itself and moved nothing."""
    start_v1(pair, **(DIRECT | settings))
    pair.prompt.do(kv_make, "kv", desc(), 1, (), True, BLOCKS)
    pair.decoder.do(kv_make, "kv", desc(), 2, (), True)
    args = ("pull_blocks", BLOCKS, Use("kv"), [0, 1], [2, 3])
    pair.decoder.do(begin_there, "pull", gated_call_v1, 1, "before copy", folder, *args)
    gate = Gate(folder)
    gate.wait()
    return gate


def test_memory_that_is_deallocated_under_a_reader_waits_for_it(local_pair: Pair, tmp_path: Path) -> None:
    gate = pulling(local_pair, tmp_path)
    local_pair.prompt.do(kv_call, "deallocate_cache", Use("kv"))
    waiting = local_pair.prompt.do(picture)
    assert (waiting.caches.live, waiting.quarantined_bytes) == (0, 4 * 4096)
    gate.open()
    assert isinstance(local_pair.decoder.do(result_there, "pull"), TransferFailed)
    wait_until(lambda: local_pair.prompt.do(picture).quarantined_bytes == 0)
    assert local_pair.prompt.do(picture).pools[0].used_bytes == 0


def test_memory_that_is_read_at_finalize_stays_mapped(
    local_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = pulling(local_pair, tmp_path, sync_kv_timeout=100)
    try:
        with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
            local_pair.prompt.stop()
        assert "stay mapped" in caplog.text
        assert len(pool._kept_mapped) == 1
        gate.open()
        assert isinstance(local_pair.decoder.do(result_there, "pull"), PeerLost)
    finally:
        gate.open()
        pool._kept_mapped.clear()


# --- with a peer in another process that is killed -------------------------------------------------------------------

NBYTES = 4 * 4096  # of one cache of desc(): a page per tensor


@pytest.fixture
def ends() -> Iterator[tuple[ChildEnd, LocalEnd]]:
    """A PROMPT in a child (cluster 1) that a test may kill, and the DECODER here (cluster 2), both without a pool."""
    before = residue()
    prompt, decoder = ChildEnd("prompt"), LocalEnd("decoder")
    try:
        extra = {"llm.PeerTimeout": "600"}
        start_end(prompt, "PROMPT", 1, extra=extra, **DIRECT)
        start_end(decoder, "DECODER", 2, extra=extra, sync_kv_timeout=500, **DIRECT)
        assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
        yield prompt, decoder
    finally:
        prompt.kill()
        decoder.stop()
        pool._kept_mapped.clear()
        assert settled(before) == before


def made(ends: tuple[ChildEnd, LocalEnd], *, blocks: bool) -> None:
    """Make "kv" at both ends and "other" at the decoder."""
    prompt, decoder = ends
    prompt.do(kv_make, "kv", desc(), 1, () if blocks else (ROW,), blocks, BLOCKS if blocks else None)
    decoder.do(kv_make, "kv", desc(), 2, (), blocks)
    decoder.do(kv_make, "other", desc(), 3)


def begin_to_send(ends: tuple[ChildEnd, LocalEnd], folder: Path) -> None:
    """Let the PROMPT send into the DECODER's cache, and stop the whole process right before it writes."""
    prompt, decoder = ends
    prompt.begin(_send, decoder.do(kv_properties, "kv")[1][0], folder)
    Gate(folder).wait()
    freeze(prompt)


def _send(world: World, addrs: list[int], folder: Path) -> Any:
    with shut(world.dd, "before write", folder, peer=2):
        return kv_call(world, "transfer_cache_async", Use("kv"), Always(), [TransferConfig(2, addrs)]).get_results()


@pytest.mark.parametrize("blocks", [False, True])
def test_r12_memory_that_a_killed_prompt_was_writing_comes_back(
    ends: tuple[ChildEnd, LocalEnd], tmp_path: Path, blocks: bool
) -> None:
    prompt, decoder = ends
    made(ends, blocks=blocks)
    other = decoder.do(show, "other")
    begin_to_send(ends, tmp_path)
    decoder.do(kv_call, "deallocate_cache", Use("kv"))
    # The place of a row is pinned for its writer, that of blocks is not.
    assert decoder.do(quarantined) == (NBYTES if blocks else 0)
    decoder.do(kv_make, "next", desc(), 4)  # in memory of its own
    assert decoder.do(picture).pools[0].used_bytes == 3 * NBYTES
    prompt.signal(signal.SIGKILL)
    wait_until(lambda: decoder.do(picture).pools[0].used_bytes == 2 * NBYTES)
    assert decoder.do(quarantined) == 0
    same_bytes(decoder.do(show, "other"), other)


def test_memory_that_a_stopped_prompt_may_write_stays_mapped_at_finalize(
    ends: tuple[ChildEnd, LocalEnd], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = ends[1]
    made(ends, blocks=True)
    begin_to_send(ends, tmp_path)
    address, before = decoder.world.caches["kv"].tensor_addrs[0], decoder.do(show, "kv")
    with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
        decoder.stop()
    assert "registered memory is still in use by cluster 1" in caplog.text
    assert "stay mapped" in caplog.text
    assert [view.ctypes.data for view in pool._kept_mapped] == [address]
    assert np.array_equal(pool._kept_mapped[0][:48], before[0][0])


def test_a_handle_that_is_dropped_during_its_transfer_frees_nothing_before_the_end(
    local_pair: Pair, tmp_path: Path
) -> None:
    start_v1(local_pair, **DIRECT)
    src = local_pair.prompt.do(kv_make, "kv", desc(), 1)
    local_pair.decoder.do(kv_make, "kv", desc(), 2)
    number = local_pair.prompt.do(kv_id, "kv")
    local_pair.prompt.do(begin_there, "send", _send, local_pair.decoder.do(kv_properties, "kv")[1][0], tmp_path)
    gate = Gate(tmp_path)
    try:
        gate.wait()
        del local_pair.prompt.world.memory["kv kv"], local_pair.prompt.world.caches["kv"]  # type: ignore[attr-defined]
        # Not at once: the thread that sends may still be on its way out of the call that took the handle.
        wait_until(lambda: local_pair.prompt.do(_given_back, number))
        assert local_pair.prompt.do(picture).pools[0].used_bytes == NBYTES
    finally:
        gate.open()
        results = local_pair.prompt.do(result_there, "send")
    assert results == [0]
    wait_until(lambda: local_pair.prompt.do(picture).pools[0].used_bytes == 0)
    same_bytes([each[:1] for each in local_pair.decoder.do(show, "kv")], [each[:1] for each in src])


def _given_back(world: World, number: int) -> bool:
    """Make a call, which gives dropped caches back, and return whether that one is gone."""
    world.dd.kv_cache_manager.remove_cache_key(CacheKey(1, 2**64 - 1))
    assert world.dd._engine is not None
    try:
        world.dd._engine.store.registry.lookup(number)
    except CacheNotFound:
        return True
    return False


# --- many ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [DIRECT, POOL], ids=["direct", "pool"])
def test_many_caches_made_and_dropped_leave_nothing(end: LocalEnd, settings: dict[str, Any]) -> None:
    start_end(end, "PROMPT", **settings)
    manager = end.world.dd.kv_cache_manager
    held = [manager.allocate_cache(desc()) for _ in range(10)]
    del held
    manager.remove_cache_key(CacheKey(1, 0))
    before, engine = residue(), end.world.dd._engine
    assert engine is not None
    for i in range(300):
        keys = [CacheKey(1, i)] if i % 3 == 0 else []
        cache = manager.allocate_cache(desc(), keys) if i % 2 else manager.allocate_blocks_cache(desc())
        if i % 5 == 0:
            manager.deallocate_cache(cache)
        if keys:
            manager.remove_cache_key(keys[0])
        del cache
    manager.remove_cache_key(CacheKey(1, 0))
    assert settled(before) == before
    assert engine.store._guards.live == 0
    caches, pools = end.do(picture).caches, end.do(picture).pools
    assert (caches.live, caches.deferred, pools[0].used_bytes) == (0, 0, 0)
    end.world.dd.check_integrity()
