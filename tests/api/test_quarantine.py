"""Peers that are stopped in the middle of a push while the owner takes the memory back (architecture rule 5)."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from faults.gated import stopped
from llm_datadist import BlocksCacheKey, LLMStatusCode
from llm_datadist._deadline import Deadline
from llm_datadist.errors import CacheNotFound, DeadlineExceeded, OutOfMemory, PeerLost, TransferFailed
from tests.support.background import ended, in_background
from tests.support.ends import ChildEnd, LocalEnd
from tests.support.frozen import freeze
from tests.support.linking import SUCCESS, finalize, info, link, unlink
from tests.support.moves import Spec, Use, cache_id, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import World, residue, settled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.moves import Bytes
    from tests.support.pairs import Pair

pytestmark = pytest.mark.covers("errors.TransferFailed")

KEY = BlocksCacheKey(1, 0)
#: What the pusher calls: two of its blocks into two of the owner's.
PUSH = ("push_blocks", KEY, Use("kv"), [0, 5], [6, 7])
MIB = 1 << 20
#: Of the owner: one pool, with pages of 4 KiB.
SMALL_POOL: dict[str, Any] = {
    "mem_pool_cfg": f'{{"memory_size": {MIB}, "page_shift": 12}}',
    "host_mem_pool_cfg": None,
}
ROWS, STRIDE = 160, 4096  # of the 256 pages of that pool
NBYTES = ROWS * STRIDE
SECOND = Spec(1, ROWS, STRIDE, blocks=True)
SMALL = Spec(1, 64, STRIDE, blocks=True)
SHORT = 200  # a sync_kv_timeout that a test waits for


class Pushed(NamedTuple):
    """The owner (cluster 1, here) and the pusher (cluster 2, a child that is stopped in the middle of a push)."""

    owner: LocalEnd
    pusher: ChildEnd
    transport: str

    def start(self, rows: int, memory: str = "pool", **settings: Any) -> Bytes:
        """Start both, and make a blocks cache "kv" at both; return the pusher's. ``settings`` are the owner's."""
        extra = {"llm.Transport": self.transport, "llm.PeerTimeout": "600"}
        common: dict[str, Any] = {"enable_remote_cache_accessible": True, "extra": extra}
        self.owner.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", **common, **settings)
        self.pusher.start("DECODER", 2, **common)
        assert self.pusher.do(link, [info(1, self.owner.port)]) == SUCCESS
        self.owner.do(make, "kv", Spec(1, rows, STRIDE, blocks=True, blocks_key=KEY, memory=memory), 1)
        return self.pusher.do(make, "kv", Spec(1, rows, STRIDE, blocks=True), 2)


@pytest.fixture
def pushed(request: pytest.FixtureRequest) -> Iterator[Pushed]:
    """Two ends that are not started yet; afterwards nothing may be left in this process."""
    before = residue()
    pushed = Pushed(LocalEnd("prompt"), ChildEnd("decoder"), request.param)
    yield pushed
    pushed.pusher.signal(signal.SIGCONT)
    pushed.pusher.kill()
    pushed.owner.stop()
    assert settled(before) == before


def quarantined(world: World) -> int:
    """Return the quarantined bytes, the same by both ways of counting, tables checked."""
    statistics = picture(world)
    assert sum(pool.quarantined_bytes for pool in statistics.pools) == statistics.quarantined_bytes
    return int(statistics.quarantined_bytes)


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
    owner, pusher, _ = pushed
    pushed.start(ROWS, sync_kv_timeout=SHORT, **SMALL_POOL)
    with stopped(pusher, step, tmp_path, *PUSH) as push:
        freeze(pusher)
        if how == "unlinked":
            assert owner.do(unlink, [info(2)], 1000, True) == SUCCESS
        assert owner.do(picture).lost_writers == (how == "unlinked")
        owner.do(forget, "kv")
        assert owner.do(quarantined) == NBYTES
        other = owner.do(make, "other", SMALL, 3)
        with pytest.raises(OutOfMemory) as caught:
            owner.do(make, "second", SECOND, 4)
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
    assert (error.quarantined, error.requested, error.free) == (NBYTES, NBYTES, MIB - NBYTES - 64 * STRIDE)
    assert f"{NBYTES} bytes were given back but may still be written by cluster 2 (pid {pusher.pid} on " in str(error)
    wait_until(lambda: owner.do(quarantined) == 0 and owner.do(picture).lost_writers == 0)
    same_bytes(owner.do(show, "other"), other)
    owner.do(forget, "other")
    assert [pool.free_bytes for pool in owner.do(picture).pools] == [MIB]
    owner.do(make, "second", SECOND, 4)


@POOLED
def test_a_push_that_has_not_begun_does_not_begin_once_the_owner_has_unlinked(pushed: Pushed, tmp_path: Path) -> None:
    owner, pusher, _ = pushed
    pushed.start(ROWS, **SMALL_POOL)
    before = owner.do(show, "kv")
    with stopped(pusher, "resolved", tmp_path, *PUSH) as push:
        freeze(pusher)
        assert owner.do(unlink, [info(2)], 1000, True) == SUCCESS
        assert owner.do(picture).lost_writers == 0
        pusher.signal(signal.SIGCONT)
        with pytest.raises(PeerLost):
            push.finish()
    same_bytes(show(owner.world, "kv"), before)


@POOLED
def test_an_allocation_waits_for_writers_of_what_was_given_back_if_that_can_be_enough(
    pushed: Pushed, tmp_path: Path
) -> None:
    owner, pusher, _ = pushed
    pushed.start(ROWS, sync_kv_timeout=600_000, **SMALL_POOL)
    with stopped(pusher, "before write", tmp_path, *PUSH) as push:
        owner.do(forget, "kv")
        with pytest.raises(OutOfMemory) as caught:
            owner.do(make, "second", Spec(1, 257, STRIDE, blocks=True), 4)
        assert caught.value.quarantined == NBYTES
        with in_background(owner, _allocate_beside_a_guard):
            assert not owner.do(ended)
            with pytest.raises(TransferFailed):
                push.finish()
    assert "second" in owner.world.caches


def _allocate_beside_a_guard(world: World) -> None:
    make(world, "a sign of life", Spec(1, 1, STRIDE, blocks=True), 5)
    make(world, "second", SECOND, 4)


# --- registered memory ------------------------------------------------------------------------------------------------


@PRIVATE
def test_unregister_names_the_writer_it_waited_for_in_vain(pushed: Pushed, tmp_path: Path) -> None:
    owner, pusher, _ = pushed
    source = pushed.start(8, "private", sync_kv_timeout=SHORT)
    before = owner.do(show, "kv")
    with stopped(pusher, "before write", tmp_path, *PUSH) as push:
        freeze(pusher)
        with pytest.raises(DeadlineExceeded, match=rf"cluster 2 \(pid {pusher.pid} on .*stays registered") as caught:
            owner.do(forget, "kv")
        assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
        assert (caught.value.peer, caught.value.phase) == (2, "drain")
        with pytest.raises(DeadlineExceeded):  # the same writer is found again
            owner.do(forget, "kv")
        same_bytes(owner.do(show, "kv"), before)
        pusher.signal(signal.SIGCONT)
        with pytest.raises(TransferFailed):
            push.finish()
    # Still registered, under a newer guard, with its key.
    before = owner.do(show, "kv")
    pusher.do(call, *PUSH)
    same_bytes(owner.do(show, "kv"), moved(before, source, [(6, 0), (7, 5)]))
    owner.do(picture)
    owner.do(forget, "kv")
    with pytest.raises(Exception, match="not bound"):
        pusher.do(call, *PUSH)


@PRIVATE
@pytest.mark.parametrize("killed", [False, True], ids=["goes on", "killed"])
def test_unregister_waits_for_a_writer_that_ends_in_time(pushed: Pushed, tmp_path: Path, killed: bool) -> None:
    owner, pusher, _ = pushed
    pushed.start(8, "private")
    with stopped(pusher, "before write" if killed else "after write", tmp_path, *PUSH) as push:
        freeze(pusher)
        with in_background(owner, forget, "kv"):
            assert not owner.do(ended)
            pusher.signal(signal.SIGKILL if killed else signal.SIGCONT)
            if not killed:
                with pytest.raises(TransferFailed):
                    push.finish()
        after = owner.do(show, "kv")
        if killed:
            with pytest.raises(EOFError):
                push.finish()
    same_bytes(owner.do(show, "kv"), after)


@pytest.mark.parametrize("pushed", ["cma"], indirect=True)
def test_finalize_names_the_writer_of_registered_memory(
    pushed: Pushed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owner, pusher, _ = pushed
    pushed.start(8, "private", sync_kv_timeout=SHORT)
    with stopped(pusher, "before write", tmp_path, *PUSH) as push:
        freeze(pusher)
        owner.do(finalize)
        pusher.signal(signal.SIGCONT)
        with pytest.raises((PeerLost, TransferFailed)):
            push.finish()
    (text,) = [record.getMessage() for record in caplog.records if "finalize" in record.getMessage()]
    assert f"cluster 2 (pid {pusher.pid} on " in text
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
                f"unregister_cache: after 100 ms the memory of cache {decoder.do(cache_id, 'kv')} is still in use by "
                "1 calls of this process; the cache stays registered: try again later (unlinking stops no writer, the "
                "end of its process does)"
            )
            with in_background(prompt, _unregister_and_wipe), pytest.raises(TransferFailed):
                move.finish()
    assert prompt.do(quarantined) == 0
    decoder.do(forget, "kv")


def _unregister_within(world: World, milliseconds: int) -> None:
    assert world.dd._engine is not None
    world.dd._engine.store.unregister(world.caches["kv"].cache_id, Deadline(milliseconds))


def _unregister_and_wipe(world: World) -> None:
    """What a user does: free the memory. What still writes there would show."""
    forget(world, "kv")
    for array in world.memory["kv"]:
        array[:] = 0xEE
    np.testing.assert_array_equal(np.concatenate(world.memory["kv"]), 0xEE)


@pytest.mark.parametrize("pushed", ["tcp"], indirect=True)
def test_over_tcp_no_writer_is_waited_for(pushed: Pushed, tmp_path: Path) -> None:
    """The owner's own lanes write: they stop before the call returns, for whichever peer they do."""
    owner, pusher, _ = pushed
    pushed.start(8, "private", sync_kv_timeout=SHORT)
    with stopped(pusher, "before write", tmp_path, *PUSH) as push:
        freeze(pusher)
        owner.do(_unregister_and_wipe)
        pusher.signal(signal.SIGCONT)
        with pytest.raises((CacheNotFound, TransferFailed)):
            push.finish()
    same_bytes(owner.do(show, "kv"), [np.full((8, STRIDE), 0xEE, np.uint8)])
