"""Peers that are stopped in the middle of a push while the owner takes the memory back (architecture rule 5)."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist import LLMStatusCode
from llm_datadist._deadline import Deadline
from llm_datadist.errors import CacheNotFound, DeadlineExceeded, OutOfMemory, PeerLost, TransferFailed
from tests.support.background import ended, in_background
from tests.support.gates import stopped
from tests.support.moves import Spec, Use, call, forget, make, moved, same_bytes, show, wait_until
from tests.support.pushers import (
    KEY,
    PUSH,
    Pushed,
    both,
    freeze,
    pushed_over,
    quarantined,
    small_pool,
)
from tests.support.world import World, cluster_info

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Pair

pytestmark = pytest.mark.covers("errors.TransferFailed")

ROWS, STRIDE = 160, 4096  # of the 256 pages of a pool of 1 MiB
NBYTES = ROWS * STRIDE
SECOND = Spec(1, ROWS, STRIDE, blocks=True)
SMALL = Spec(1, 64, STRIDE, blocks=True)
SHORT = 200  # a sync_kv_timeout that a test waits for


@pytest.fixture
def pushed(request: pytest.FixtureRequest) -> Iterator[Pushed]:
    """The owner here, the pusher in a child."""
    with pushed_over(request.param) as pushed:
        yield pushed


#: Memory that is mapped and by the kernel's hand; of "private" memory, outside every pool, both go by the latter.
POOLED = pytest.mark.parametrize("pushed", ["shm", "cma"], indirect=True)
PRIVATE = pytest.mark.parametrize("pushed", ["auto", "cma"], indirect=True)


@POOLED
@pytest.mark.parametrize(
    ("step", "how"),
    [("before write", "goes on"), ("after write", "goes on"), ("before write", "killed"), ("before write", "unlinked")],
)
def test_memory_under_a_stopped_writer_is_not_used_again_before_it_ends(
    pushed: Pushed, tmp_path: Path, step: str, how: str
) -> None:
    """A lost link proves nothing about it: its page is still looked at."""
    both(pushed, ROWS, STRIDE, sync_kv_timeout=SHORT, **small_pool())
    owner, pusher = pushed.owner, pushed.pusher
    pid = pusher.pid
    with stopped(pusher, step, tmp_path, *PUSH) as push:
        freeze(pusher)
        if how == "unlinked":
            owner.do(_unlink_by_force)
        assert owner.world.dd.statistics().lost_writers == (how == "unlinked")
        forget(owner.world, "kv")
        assert quarantined(owner.world) == NBYTES
        other = make(owner.world, "other", SMALL, 3)
        with pytest.raises(OutOfMemory) as caught:
            make(owner.world, "second", SECOND, 4)
        if how == "killed":
            pusher.signal(signal.SIGKILL)
            with pytest.raises(EOFError):
                push.finish()
        else:
            pusher.signal(signal.SIGCONT)
            with pytest.raises((PeerLost, TransferFailed)) as failed:
                push.finish()
            assert how == "unlinked" or "freed, rebound or unregistered" in str(failed.value)
    error = caught.value
    assert (error.quarantined, error.requested, error.free) == (NBYTES, NBYTES, (1 << 20) - NBYTES - 64 * STRIDE)
    assert f"{NBYTES} bytes were given back but may still be written by cluster 2 (pid {pid} on " in str(error)
    wait_until(lambda: quarantined(owner.world) == 0 and owner.world.dd.statistics().lost_writers == 0)
    same_bytes(show(owner.world, "other"), other)
    forget(owner.world, "other")
    (pool,) = owner.world.dd.statistics().pools
    assert pool.free_bytes == 1 << 20
    make(owner.world, "second", SECOND, 4)


def _unlink_by_force(world: World) -> None:
    code, _ = world.dd.unlink_clusters([cluster_info(2, 1)], 1000, force=True)
    assert code is LLMStatusCode.LLM_SUCCESS


@POOLED
def test_a_push_that_has_not_begun_does_not_begin_once_the_owner_has_unlinked(pushed: Pushed, tmp_path: Path) -> None:
    both(pushed, ROWS, STRIDE, **small_pool())
    owner, pusher = pushed.owner, pushed.pusher
    before = show(owner.world, "kv")
    with stopped(pusher, "resolved", tmp_path, *PUSH) as push:
        freeze(pusher)
        owner.do(_unlink_by_force)
        assert owner.world.dd.statistics().lost_writers == 0
        pusher.signal(signal.SIGCONT)
        with pytest.raises(PeerLost):
            push.finish()
    same_bytes(show(owner.world, "kv"), before)


@POOLED
def test_an_allocation_waits_for_writers_of_what_was_given_back_if_that_can_be_enough(
    pushed: Pushed, tmp_path: Path
) -> None:
    both(pushed, ROWS, STRIDE, sync_kv_timeout=600_000, **small_pool())
    owner = pushed.owner
    with stopped(pushed.pusher, "before write", tmp_path, *PUSH) as push:
        forget(owner.world, "kv")
        with pytest.raises(OutOfMemory) as caught:
            make(owner.world, "second", Spec(1, 257, STRIDE, blocks=True), 4)
        assert caught.value.quarantined == NBYTES
        with in_background(owner, _allocate_beside_a_guard):
            assert not ended(owner.world)
            with pytest.raises(TransferFailed):
                push.finish()
    assert "second" in owner.world.caches


def _allocate_beside_a_guard(world: World) -> None:
    make(world, "a sign of life", Spec(1, 1, STRIDE, blocks=True), 5)
    make(world, "second", SECOND, 4)


# --- registered memory ------------------------------------------------------------------------------------------------


def _unregister(world: World) -> None:
    world.cm.unregister_cache(world.caches["kv"].cache_id)


@PRIVATE
def test_unregister_names_the_writer_it_waited_for_in_vain(pushed: Pushed, tmp_path: Path) -> None:
    source = both(pushed, 8, STRIDE, "private", sync_kv_timeout=SHORT)
    owner, pusher = pushed.owner, pushed.pusher
    before = show(owner.world, "kv")
    with stopped(pusher, "before write", tmp_path, *PUSH) as push:
        freeze(pusher)
        with pytest.raises(DeadlineExceeded, match=rf"cluster 2 \(pid {pusher.pid} on .*stays registered") as caught:
            _unregister(owner.world)
        assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
        assert (caught.value.peer, caught.value.phase) == (2, "drain")
        with pytest.raises(DeadlineExceeded):  # the same writer is found again
            _unregister(owner.world)
        same_bytes(show(owner.world, "kv"), before)
        pusher.signal(signal.SIGCONT)
        with pytest.raises(TransferFailed):
            push.finish()
    # Still registered, under a newer guard, with its key.
    before = show(owner.world, "kv")
    pusher.do(call, *PUSH)
    same_bytes(show(owner.world, "kv"), moved(before, source, [(6, 0), (7, 5)]))
    owner.world.dd.check_integrity()
    _unregister(owner.world)
    with pytest.raises(Exception, match="not bound"):
        pusher.do(call, *PUSH)


@PRIVATE
@pytest.mark.parametrize("killed", [False, True], ids=["goes on", "killed"])
def test_unregister_waits_for_a_writer_that_ends_in_time(pushed: Pushed, tmp_path: Path, killed: bool) -> None:
    both(pushed, 8, STRIDE, "private")
    owner, pusher = pushed.owner, pushed.pusher
    with stopped(pusher, "before write" if killed else "after write", tmp_path, *PUSH) as push:
        freeze(pusher)
        with in_background(owner, _unregister):
            assert not ended(owner.world)
            pusher.signal(signal.SIGKILL if killed else signal.SIGCONT)
            if not killed:
                with pytest.raises(TransferFailed):
                    push.finish()
        after = show(owner.world, "kv")
        if killed:
            with pytest.raises(EOFError):
                push.finish()
    same_bytes(show(owner.world, "kv"), after)


def test_finalize_names_the_writer_of_registered_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pushed_over("cma") as pushed:
        both(pushed, 8, STRIDE, "private", sync_kv_timeout=SHORT)
        with stopped(pushed.pusher, "before write", tmp_path, *PUSH) as push:
            freeze(pushed.pusher)
            pushed.owner.world.dd.finalize()
            pushed.pusher.signal(signal.SIGCONT)
            with pytest.raises((PeerLost, TransferFailed)):
                push.finish()
        pid = pushed.pusher.pid
    (text,) = [record.getMessage() for record in caplog.records if "finalize" in record.getMessage()]
    assert f"cluster 2 (pid {pid} on " in text
    assert "\n" not in text


@pytest.mark.parametrize("push", [False, True])
def test_in_one_process_registered_memory_waits_for_readers_too_and_pool_memory_for_writers_alone(
    local_pair: Pair, tmp_path: Path, push: bool
) -> None:
    local_pair.start(rca=True)
    prompt, decoder = local_pair.prompt, local_pair.decoder
    decoder.do(make, "kv", Spec(blocks=True, memory="private"), 2)
    step, method = ("before write", "push_blocks") if push else ("before copy", "pull_blocks")
    for memory in ("private", "pool"):
        (folder := tmp_path / memory).mkdir()
        prompt.do(make, "kv", Spec(blocks=True, blocks_key=KEY, memory=memory), 1)
        with stopped(decoder, step, folder, method, KEY, Use("kv"), [1], [2]) as move:
            if memory == "pool":
                prompt.do(forget, "kv")
                assert prompt.do(quarantined) == (4 * 4096 if push else 0)
                with pytest.raises(TransferFailed):
                    move.finish()
                continue
            with pytest.raises(DeadlineExceeded, match="in use by a thread of this process"):
                prompt.do(_unregister_within, 100)
            with pytest.raises(DeadlineExceeded) as caught:  # its own call uses this end's
                decoder.do(_unregister_within, 100)
            assert str(caught.value) == (
                "unregister_cache: after 100 ms the memory of cache 1 is still in use by 1 calls of this process; the "
                "cache stays registered: try again later (unlinking stops no writer, the end of its process does)"
            )
            with in_background(prompt, _unregister_and_wipe), pytest.raises(TransferFailed):
                move.finish()
    assert prompt.do(quarantined) == 0
    decoder.do(_unregister)


def _unregister_within(world: World, milliseconds: int) -> None:
    assert world.dd._engine is not None
    world.dd._engine.store.unregister(world.caches["kv"].cache_id, Deadline(milliseconds))


def _unregister_and_wipe(world: World) -> None:
    """What a user does: free the memory. What still writes there would show."""
    _unregister(world)
    for array in world.memory["kv"]:
        array[:] = 0xEE
    np.testing.assert_array_equal(np.concatenate(world.memory["kv"]), 0xEE)


def test_over_tcp_no_writer_is_waited_for(tmp_path: Path) -> None:
    """The owner's own lanes write: they stop before the call returns, for whichever peer they do."""
    with pushed_over("tcp") as pushed:
        both(pushed, 8, STRIDE, "private", sync_kv_timeout=SHORT)
        with stopped(pushed.pusher, "before write", tmp_path, *PUSH) as push:
            freeze(pushed.pusher)
            _unregister_and_wipe(pushed.owner.world)
            pushed.pusher.signal(signal.SIGCONT)
            with pytest.raises((CacheNotFound, TransferFailed)):
                push.finish()
        same_bytes(show(pushed.owner.world, "kv"), [np.full((8, STRIDE), 0xEE, np.uint8)])
