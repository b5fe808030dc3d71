"""Memory that changes under a reader or a writer is never a success, and what is kept about a remote cache is never
taken for another one; memory under a stopped writer waits in quarantine."""

import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

from faults.gated import count_messages, resolves, stopped
from faults.gates import watched
from faults.midcopy import release, set_trap, trapped
from faults.page_trap import trap_denied
from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode, errors
from llm_datadist.errors import (
    CacheMismatch,
    CacheNotFound,
    DeadlineExceeded,
    GrantEnded,
    OutOfMemory,
    PeerLost,
    TransferFailed,
)
from llm_datadist.types.grant import Grant
from tests.support import moves
from tests.support.ends import ChildEnd, LocalEnd, begin_there, ended, freeze, in_background, result_there
from tests.support.grants import grant
from tests.support.kinds import Bytes, Pair
from tests.support.linking import SUCCESS, info, link, unlink
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import World, residue, settled

pytestmark = [pytest.mark.covers("errors.TransferFailed"), pytest.mark.gpu]

KEY = CacheKey(1, 10)
PAGED = Spec(blocks=True, blocks_key=BLOCKS)
TARGET = Spec(blocks=True)
REGISTERED = Spec(blocks=True, blocks_key=BLOCKS, memory="inside")
ROWS = Spec(keys=(KEY,))
PULL = ("pull_blocks", BLOCKS, Use("kv"), [1, 2], [6, 0])
PUSH = ("push_blocks", BLOCKS, Use("kv"), [1, 6], [0, 3])
PAIRS = [(6, 1), (0, 2)]


def kept(pair: Pair) -> int:
    (link,) = pair.decoder.do(picture).links
    answers: int = link.resolved
    return answers


# --- kept answers -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", [PAGED, REGISTERED], ids=["allocated", "registered"])
@pytest.mark.parametrize("rca", [False, True])
def test_r15_r27_an_answer_about_a_blocks_cache_lasts_while_it_has_the_key(pair: Pair, source: Spec, rca: bool) -> None:
    prompt, decoder = pair.start(rca=rca)
    prompt.do(count_messages)
    target = decoder.do(make, "kv", TARGET, 2)

    def pulled(held: Bytes, asked: int) -> None:
        """A pull gets these bytes, and the peer has been asked so often by now."""
        nonlocal target
        decoder.do(call, *PULL)
        target = moved(target, held, PAIRS)
        same_bytes(decoder.do(show, "kv"), target)
        assert (prompt.do(resolves), kept(pair), prompt.do(picture).pins) == (asked, 1, 0)

    def missing() -> None:
        with pytest.raises(CacheNotFound) as caught:
            decoder.do(call, *PULL)
        assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        assert kept(pair) == 0
        same_bytes(decoder.do(show, "kv"), target)

    missing()
    pulled(prompt.do(make, "kv", source, 1), 2)  # what appears after a miss is found
    pulled(prompt.do(show, "kv"), 2)
    pulled(prompt.do(moves.refill, "kv", 7), 2)  # what it holds now
    prompt.do(forget, "kv")
    later = prompt.do(make, "later", source, 9)
    pulled(later, 3)
    names = ["later"]
    if source is REGISTERED:  # the newest has the key; the older one is still there
        pulled(prompt.do(make, "newest", source, 10), 4)
        names.append("newest")
    asked = prompt.do(resolves)
    assert decoder.do(unlink, [info(1, 1)]) == SUCCESS
    wait_until(lambda: not prompt.do(picture).links)
    pair.link()
    assert kept(pair) == 0, "kept answers end with their link"
    pulled(prompt.do(show, names[-1]), asked + 1)
    for name in names:
        prompt.do(forget, name)
    missing()


def test_r15_an_answer_that_no_longer_fits_is_asked_for_again(pair: Pair) -> None:
    prompt, decoder = pair.start()
    prompt.do(make, "kv", PAGED, 1)
    decoder.do(make, "kv", TARGET, 2)
    decoder.do(call, *PULL)
    for stride in (16, 48):
        prompt.do(forget, "kv")
        source = prompt.do(make, "kv", Spec(2, stride=stride, blocks=True, blocks_key=BLOCKS), 9)
        if stride == 16:  # by the next, only what is kept does not fit
            with pytest.raises(CacheMismatch, match="block sizes differ: source blocks have 16"):
                decoder.do(call, *PULL)
        dst = decoder.do(make, "kv", Spec(2, stride=stride, blocks=True), 4)
        decoder.do(call, *PULL)
        same_bytes(decoder.do(show, "kv"), moved(dst, source, PAIRS))


@pytest.mark.parametrize("rca", [False, True])
def test_rows_are_resolved_every_time_but_registered_ones_with_rca(shm_pair: Pair, rca: bool) -> None:
    shm_pair.start(rca=rca)
    shm_pair.prompt.do(count_messages)
    for name, spec in (("rows", ROWS), ("registered", Spec(keys=(CacheKey(1, 11),), memory="inside"))):
        shm_pair.prompt.do(make, name, spec, 1)
    shm_pair.decoder.do(make, "kv", Spec(), 2)
    for number, asked in ((1, 3), (3, 1 if rca else 3)):
        before = shm_pair.prompt.do(resolves)
        for row in range(3):
            shm_pair.decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, number, 1), Use("kv"), row)
        assert shm_pair.prompt.do(resolves) == before + asked
        assert kept(shm_pair) == (asked == 1)
        wait_until(lambda: shm_pair.prompt.do(picture).pins == 0)


def test_r15_pushes_keep_their_own_answers_and_see_what_is_registered_and_freed(pair: Pair) -> None:
    pair.start(rca=True)
    pair.prompt.do(count_messages)
    src = pair.decoder.do(make, "kv", TARGET, 2)
    for seed, asked in ((3, 3), (4, 7)):  # a miss, the pull and the push; and the push that misses
        with pytest.raises(CacheNotFound):
            pair.decoder.do(call, *PUSH)
        dst = pair.prompt.do(make, "kv", REGISTERED, seed)
        pair.decoder.do(call, *PULL)
        src = moved(src, dst, PAIRS)
        for _ in range(3):
            pair.decoder.do(call, *PUSH)
        assert (pair.prompt.do(resolves), kept(pair)) == (asked, 2)
        same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(0, 1), (3, 6)]))
        pair.prompt.do(forget, "kv")
        with pytest.raises(CacheNotFound):
            pair.decoder.do(call, *PUSH)
    same_bytes(pair.decoder.do(show, "kv"), src)


def test_one_answer_serves_other_local_caches_other_layers_and_both_directions_in_turn(pair: Pair) -> None:
    prompt, decoder = pair.start(rca=True)
    source = prompt.do(make, "kv", PAGED, 1)
    #: As many blocks as the source, fewer, more; and what is unfit.
    rows = {"same": (4, 8, 48), "short": (4, 3, 48), "long": (4, 12, 48), "wide": (4, 8, 96), "few": (2, 8, 48)}
    shown = {name: decoder.do(make, name, Spec(*shape, blocks=True), 10) for name, shape in rows.items()}

    def pull(name: str, src: int, dst: int, half: bool = False) -> None:
        layers: Any = {"src_layer_range": range(1, 2), "dst_layer_range": range(1)} if half else {}
        decoder.do(partial(call, **layers), "pull_blocks", BLOCKS, Use(name), [src], [dst])
        shown[name] = moved(shown[name], source, [(dst, src)], [(0, 2), (1, 3)] if half else None)

    for turn in range(2):
        for name, block in (("same", 7), ("long", 11), ("short", 2)):
            pull(name, turn + 3, block)
        for name, block, kind, says in (
            ("short", 11, errors.ParamError, r"dst_blocks\[0\]=11"),  # a block that only the cache before had
            ("wide", 1, CacheMismatch, "block sizes"),
            ("few", 1, CacheMismatch, "num_tensors"),
        ):
            pull("long", 1, 11)
            with pytest.raises(kind, match=says):
                pull(name, 1, block)
        pull("same", 1, 2, half=True)
        pull("same", 3, 4)
        pull("same", 5, 6, half=True)
        decoder.do(call, "push_blocks", BLOCKS, Use("short"), [turn], [turn + 5])
        source = moved(source, shown["short"], [(turn + 5, turn)])
    for name, expected in shown.items():
        same_bytes(decoder.do(show, name), expected)
    same_bytes(prompt.do(show, "kv"), source)


# --- changes while an operation is on its way -------------------------------------------------------------------------
THEN, NOW = "the bytes of before", "the bytes of after"


def change(world: World, what: str, spec: Spec) -> None:
    """Take the memory (freed), or the key of a row (unbound), of what is named; give the key to another cache
    (replaced, rebound), or the pages to another cache with another key (reused)."""
    if what in ("unbound", "rebound"):
        world.cm.remove_cache_key(KEY)
    else:
        forget(world, "kv")
    if what == "reused":
        make(world, "later", Spec(blocks=True, blocks_key=BlocksCacheKey(1, 8)), 9)
    elif what in ("replaced", "rebound"):
        make(world, "later", spec, 9)


BY_KEY, BY_ID = (("pull_cache", key, Use("kv"), 5) for key in (KEY, CacheKeyByIdAndIndex(1, 1, 0)))
BOTH: Final = (PAGED, REGISTERED)
#: What the owner does while a call stands at a step, and what comes of the call. Guards are compared before the first
#: byte and after the last, by whichever side it is; a change between them is in tests/unit/test_native_movers.py.
CHANGES: Final[list[tuple[Any, ...]]] = [
    *[(PULL, "resolved", spec, "replaced", NOW) for spec in BOTH],
    *[(PULL, "resolved", spec, "freed", CacheNotFound) for spec in BOTH],
    (BY_KEY, "resolved", ROWS, "rebound", NOW),
    (BY_KEY, "resolved", ROWS, "unbound", CacheNotFound),
    (PULL, "before copy", PAGED, "replaced", NOW),
    *[(PULL, "before copy", spec, "freed", CacheNotFound) for spec in BOTH],
    (PULL, "before copy", PAGED, "reused", CacheNotFound),
    (BY_KEY, "before copy", ROWS, "unbound", CacheNotFound),
    *[(PULL, "after copy", spec, what, THEN) for what in ("replaced", "freed") for spec in BOTH],
    *[(which, "after copy", ROWS, "unbound", THEN) for which in (BY_KEY, BY_ID)],
    (PUSH, "before write", REGISTERED, "freed", CacheNotFound),
    (PUSH, "after write", REGISTERED, "freed", THEN),
]


@pytest.mark.parametrize(
    ("args", "step", "source", "what", "outcome"), CHANGES, ids=[f"{step}-{what}" for _, step, _, what, _ in CHANGES]
)
def test_r15_a_source_that_changes_on_the_way_never_passes_for_the_one_that_was_named(
    pair: Pair, tmp_path: Path, args: tuple[Any, ...], step: str, source: Spec, what: str, outcome: Any
) -> None:
    prompt, decoder = pair.start(rca=args is PUSH)
    prompt.do(count_messages)
    src, dst = prompt.do(make, "kv", source, 1), decoder.do(make, "kv", Spec(blocks=source.blocks), 2)
    # In one process the owner waits for a reader of registered memory, which would be freed under it.
    with stopped(decoder, step, tmp_path, *args) as moving, in_background(prompt, change, what, source):
        if outcome is NOW:  # what is found must have its bytes by then
            wait_until(lambda: prompt.do(ended))
        if isinstance(outcome, str):
            moving.finish()
        else:
            with pytest.raises(outcome):
                moving.finish()
    expected = dst
    if args is PUSH:
        if outcome is CacheNotFound:
            same_bytes(prompt.do(show, "kv"), src)
    elif outcome is not CacheNotFound:
        pairs = PAIRS if source.blocks else [(5, 0)]
        expected = moved(dst, prompt.do(show, "later") if outcome is NOW else src, pairs)
    same_bytes(decoder.do(show, "kv"), expected)
    assert prompt.do(resolves) == (1 if outcome is THEN else 2)
    wait_until(lambda: prompt.do(picture).pins == 0)


def _reused_beneath(world: World) -> None:
    if grant := world.memory.pop("grant", None):
        grant.revoke()
    forget(world, "kv")


@pytest.mark.parametrize(
    ("pair", "how"),
    [*product(("inproc", "shm", "cma"), ("pulled", "granted")), ("inproc", "pushed")],
    indirect=["pair"],
)
def test_r15_memory_that_changes_during_the_copy_fails_it(pair: Pair, how: str) -> None:
    """The copy stands at the last page of its destination, after the first comparison of the guards."""
    if (denied := trap_denied()) is not None:
        pytest.skip(f"no page can be trapped here: {denied}")
    push = how == "pushed"
    large = Spec(rows=7, stride=MIB // 2, blocks=True, memory="private" if pair.transport == "cma" else "pool")
    prompt, decoder = pair.start(rca=push, mem_pool_cfg=f'{{"memory_size": {16 * MIB}, "page_shift": 16}}')
    prompt.do(make, "kv", replace(large, blocks_key=BLOCKS), 1)
    before = decoder.do(make, "kv", large, 2)
    more: dict[str, Any] = {"grant": Grant.from_bytes(prompt.do(grant, [1, 2]))} if how == "granted" else {}
    moving = partial(call, **more)
    target, args = (prompt, PUSH) if push else (decoder, PULL)
    if not target.do(set_trap, "kv", large.tensors - 1, args[-1][-1] * large.stride) and pair.transport == "cma":
        target.do(release)
        pytest.skip("the kernel stops no system call at a trapped page here")
    decoder.do(begin_there, "moving", moving, *args)
    try:
        wait_until(lambda: target.do(trapped))
        prompt.do(_reused_beneath)
    finally:
        target.do(release)
        error = decoder.do(result_there, "moving")
    if how == "granted":
        assert isinstance(error, GrantEnded), error
    else:
        assert isinstance(error, TransferFailed), error
        assert "freed, rebound or unregistered during the copy; the " in str(error)
        assert f"the {'remote' if push else 'local'} bytes addressed are undefined" in str(error)
        assert (error.status_code, error.peer, error.phase, error.retryable) == (
            LLMStatusCode.LLM_FAILED,
            1,
            "copy",
            True,
        )
    found = decoder.do(show, "kv")
    same_bytes(found, before if push else moved(before, found, [(to, to) for to in args[-1]]))
    assert kept(pair) == 0


def test_an_answer_that_changes_every_time_is_a_failed_transfer(local_pair: Pair) -> None:
    local_pair.start()
    local_pair.prompt.do(count_messages)
    world, owner = local_pair.decoder.world, local_pair.prompt.world  # type: ignore[attr-defined]
    make(owner, "kv", PAGED, 1)
    dst = make(world, "kv", TARGET, 2)

    def replace_cache() -> None:
        forget(owner, "kv")
        make(owner, "kv", PAGED, 9)

    def late(step: str, subject: object, details: object) -> None:
        """Whenever the peer's answer has come, what it says is not true any more."""
        if step == "resolved":
            # In this thread, inside of the pull, it would be put off.
            other = threading.Thread(target=replace_cache)
            other.start()
            other.join()

    with watched(late), pytest.raises(TransferFailed, match="changed, or its connection broke, 4 times") as caught:
        call(world, *PULL)
    assert caught.value.phase == "copy"
    assert local_pair.prompt.do(resolves) == 4
    same_bytes(show(world, "kv"), dst)


MODEL = BlocksCacheKey(1, 0)
#: What the pusher calls: two of its blocks into two of the owner's.
PUSH_ROWS = ("push_blocks", MODEL, Use("kv"), [0, 5], [6, 7])
MIB = 1 << 20
#: Of the owner: one pool, with pages of 4 KiB.
SMALL_POOL: dict[str, Any] = {"mem_pool_cfg": f'{{"memory_size": {MIB}, "page_shift": 12}}', "host_mem_pool_cfg": None}
POOL_ROWS, STRIDE = 160, 4096  # of the 256 pages of that pool
NBYTES = POOL_ROWS * STRIDE
SECOND = Spec(1, POOL_ROWS, STRIDE, blocks=True)
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
        self.owner.do(make, "kv", Spec(1, rows, STRIDE, blocks=True, blocks_key=MODEL, memory=memory), 1)
        return self.pusher.do(make, "kv", Spec(1, rows, STRIDE, blocks=True), 2)


@pytest.fixture
def pushed(request: pytest.FixtureRequest, gpu: bool) -> Iterator[Pushed]:
    """Two ends that are not started yet; afterwards nothing may be left in this process."""
    before = residue()
    pushed = Pushed(LocalEnd("prompt"), ChildEnd("decoder"), request.param)
    pushed.owner.gpu = pushed.pusher.gpu = gpu
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
def test_memory_under_a_stopped_writer_is_not_used_again(pushed: Pushed, tmp_path: Path, step: str, how: str) -> None:
    """A lost link proves nothing about it: its page is still looked at."""
    owner, pusher, _ = pushed
    pushed.start(POOL_ROWS, sync_kv_timeout=SHORT, **SMALL_POOL)
    with stopped(pusher, step, tmp_path, *PUSH_ROWS) as push:
        freeze(pusher)
        if how == "unlinked":
            assert owner.do(unlink, [info(2)], 1000, True) == SUCCESS
        assert owner.do(picture).lost_writers == (how == "unlinked")
        owner.do(forget, "kv")
        assert owner.do(quarantined) == NBYTES
        other = owner.do(make, "other", Spec(1, 64, STRIDE, blocks=True), 3)
        with pytest.raises(OutOfMemory) as caught:
            owner.do(make, "second", SECOND, 4)
        if how == "killed":
            pusher.signal(signal.SIGKILL)
            with pytest.raises(EOFError):
                push.finish()
        else:
            pusher.signal(signal.SIGCONT)
            # It finds the guard changed before its first byte, or has compared it after its last.
            refusal = pytest.raises((PeerLost, CacheNotFound)) if step == "before write" else nullcontext()
            with refusal:
                push.finish()
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
    pushed.start(POOL_ROWS, **SMALL_POOL)
    before = owner.do(show, "kv")
    with stopped(pusher, "resolved", tmp_path, *PUSH_ROWS) as push:
        freeze(pusher)
        assert owner.do(unlink, [info(2)], 1000, True) == SUCCESS
        assert owner.do(picture).lost_writers == 0
        pusher.signal(signal.SIGCONT)
        with pytest.raises(PeerLost):
            push.finish()
    same_bytes(show(owner.world, "kv"), before)


@POOLED
def test_an_allocation_waits_for_writers_of_what_was_given_back(pushed: Pushed, tmp_path: Path) -> None:
    owner, pusher, _ = pushed
    pushed.start(POOL_ROWS, sync_kv_timeout=600_000, **SMALL_POOL)
    with stopped(pusher, "before write", tmp_path, *PUSH_ROWS) as push:
        owner.do(forget, "kv")
        with pytest.raises(OutOfMemory) as caught:
            owner.do(make, "second", Spec(1, 257, STRIDE, blocks=True), 4)
        assert caught.value.quarantined == NBYTES
        with in_background(owner, _allocate_beside_a_guard):
            assert not owner.do(ended)
            with pytest.raises(CacheNotFound):
                push.finish()
    assert "second" in owner.world.caches


def _allocate_beside_a_guard(world: World) -> None:
    make(world, "a sign of life", Spec(1, 1, STRIDE, blocks=True), 5)
    make(world, "second", SECOND, 4)


# --- registered memory ------------------------------------------------------------------------------------------------
@pytest.mark.gpu(False)
@PRIVATE
def test_unregister_names_the_writer_it_waited_for_in_vain(pushed: Pushed, tmp_path: Path) -> None:
    owner, pusher, _ = pushed
    source = pushed.start(8, "private", sync_kv_timeout=SHORT)
    before = owner.do(show, "kv")
    with stopped(pusher, "before write", tmp_path, *PUSH_ROWS) as push:
        freeze(pusher)
        with pytest.raises(DeadlineExceeded, match=rf"cluster 2 \(pid {pusher.pid} on .*stays registered") as caught:
            owner.do(forget, "kv")
        assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
        assert (caught.value.peer, caught.value.phase) == (2, "drain")
        with pytest.raises(DeadlineExceeded):  # the same writer is found again
            owner.do(forget, "kv")
        same_bytes(owner.do(show, "kv"), before)
        pusher.signal(signal.SIGCONT)
        push.finish()  # still registered, under a newer guard, with its key
    same_bytes(owner.do(show, "kv"), moved(before, source, [(6, 0), (7, 5)]))
    owner.do(picture)
    owner.do(forget, "kv")
    with pytest.raises(Exception, match="not bound"):
        pusher.do(call, *PUSH_ROWS)


@pytest.mark.gpu(False)
@PRIVATE
@pytest.mark.parametrize("killed", [False, True], ids=["goes on", "killed"])
def test_unregister_waits_for_a_writer_that_ends_in_time(pushed: Pushed, tmp_path: Path, killed: bool) -> None:
    owner, pusher, _ = pushed
    pushed.start(8, "private")
    with stopped(pusher, "before write" if killed else "after write", tmp_path, *PUSH_ROWS) as push:
        freeze(pusher)
        with in_background(owner, forget, "kv"):
            assert not owner.do(ended)
            pusher.signal(signal.SIGKILL if killed else signal.SIGCONT)
            if not killed:
                push.finish()
        after = owner.do(show, "kv")
        if killed:
            with pytest.raises(EOFError):
                push.finish()
    same_bytes(owner.do(show, "kv"), after)


@pytest.mark.gpu(False)
@pytest.mark.parametrize("push", [False, True])
def test_in_one_process_registered_memory_waits_for_readers_too(local_pair: Pair, tmp_path: Path, push: bool) -> None:
    prompt, decoder = local_pair.start(rca=True)
    decoder.do(make, "kv", Spec(blocks=True, memory="private"), 2)
    step, method = ("before write", "push_blocks") if push else ("before copy", "pull_blocks")
    for memory in ("private", "pool"):
        (folder := tmp_path / memory).mkdir()
        prompt.do(make, "kv", Spec(blocks=True, blocks_key=MODEL, memory=memory), 1)
        with stopped(decoder, step, folder, method, MODEL, Use("kv"), [1], [2]) as move:
            if memory == "pool":
                prompt.do(forget, "kv")
                assert prompt.do(quarantined) == (4 * 4096 if push else 0)
                with pytest.raises(CacheNotFound):
                    move.finish()
                continue
            with pytest.raises(DeadlineExceeded, match="in use by a thread of this process"):
                prompt.do(_unregister_within, 100)
            with pytest.raises(DeadlineExceeded) as caught:  # its own call uses this end's
                decoder.do(_unregister_within, 100)
            number = decoder.do(moves.cache_id, "kv")
            assert str(caught.value) == (
                f"unregister_cache: after 100 ms the memory of cache {number} is still in use by "
                "1 calls of this process; the cache stays registered: try again later (unlinking stops no writer, the "
                "end of its process does)"
            )
            with in_background(prompt, _unregister_and_wipe), pytest.raises(CacheNotFound):
                move.finish()
    assert prompt.do(quarantined) == 0
    decoder.do(forget, "kv")


def _unregister_within(world: World, milliseconds: int) -> None:
    engine = world.probe.engine
    options = engine.options
    engine.options = replace(options, sync_kv_timeout_ms=milliseconds)
    try:
        world.cm.unregister_cache(world.caches["kv"].cache_id)
    finally:
        engine.options = options


def _unregister_and_wipe(world: World) -> None:
    """What a user does: free the memory. What still writes there would show."""
    forget(world, "kv")
    for array in world.memory["kv"]:
        array[:] = 0xEE
    np.testing.assert_array_equal(np.concatenate(world.memory["kv"]), 0xEE)


@pytest.mark.gpu(False)
@pytest.mark.parametrize("pushed", ["tcp"], indirect=True)
def test_over_tcp_no_writer_is_waited_for(pushed: Pushed, tmp_path: Path) -> None:
    """The owner's own lanes write: they stop before the call returns, for whichever peer they do."""
    owner, pusher, _ = pushed
    pushed.start(8, "private", sync_kv_timeout=SHORT)
    with stopped(pusher, "before write", tmp_path, *PUSH_ROWS) as push:
        freeze(pusher)
        owner.do(_unregister_and_wipe)
        pusher.signal(signal.SIGCONT)
        with pytest.raises((CacheNotFound, TransferFailed)):
            push.finish()
    same_bytes(owner.do(show, "kv"), [np.full((8, STRIDE), 0xEE, np.uint8)])
