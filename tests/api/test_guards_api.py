"""Guards, kept answers and visibility (interface R15): what changes between resolve and copy never passes for
success, and what is kept about a remote cache is never taken for another one."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from faults.gated import count_messages, resolves, stopped
from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist.errors import CacheMismatch, CacheNotFound, ParamError, TransferFailed
from tests.support.background import ended, in_background
from tests.support.linking import SUCCESS, info, unlink
from tests.support.moves import (
    BLOCKS,
    Spec,
    Use,
    call,
    forget,
    make,
    moved,
    picture,
    refill,
    same_bytes,
    show,
    wait_until,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.moves import Bytes
    from tests.support.pairs import Pair
    from tests.support.world import World

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
def test_r15_the_answer_about_a_blocks_cache_is_kept_for_as_long_as_the_cache_has_the_key(
    pair: Pair, source: Spec, rca: bool
) -> None:
    pair.start(rca=rca)
    prompt, decoder = pair.prompt, pair.decoder
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
    pulled(prompt.do(refill, "kv", 7), 2)  # what it holds now
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
    pair.start()
    prompt, decoder = pair.prompt, pair.decoder
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
    for cache_id, asked in ((1, 3), (3, 1 if rca else 3)):
        before = shm_pair.prompt.do(resolves)
        for row in range(3):
            shm_pair.decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, cache_id, 1), Use("kv"), row)
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
    pair.start(rca=True)
    prompt, decoder = pair.prompt, pair.decoder
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
            ("short", 11, ParamError, r"dst_blocks\[0\]=11"),  # a block that only the cache before had
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


FAILED: Final = TransferFailed
BY_KEY, BY_ID = (("pull_cache", key, Use("kv"), 5) for key in (KEY, CacheKeyByIdAndIndex(1, 1, 0)))
BOTH: Final = (PAGED, REGISTERED)
#: What the owner does while a call stands at a step, and what comes of the call: where the initiator compares the
#: guards by itself; and where the owner judges, before its first byte and after its last.
CHANGES: Final[list[tuple[Any, ...]]] = [
    *[(PULL, "resolved", spec, "replaced", NOW, NOW) for spec in BOTH],
    *[(PULL, "resolved", spec, "freed", CacheNotFound, CacheNotFound) for spec in BOTH],
    (BY_KEY, "resolved", ROWS, "rebound", NOW, NOW),
    (BY_KEY, "resolved", ROWS, "unbound", CacheNotFound, CacheNotFound),
    *[(PULL, "before copy", spec, "replaced", FAILED, NOW) for spec in BOTH],
    *[(PULL, "before copy", spec, "freed", FAILED, CacheNotFound) for spec in BOTH],
    (PULL, "before copy", PAGED, "reused", FAILED, CacheNotFound),
    (BY_KEY, "before copy", ROWS, "unbound", FAILED, CacheNotFound),
    *[(PULL, "after copy", spec, what, FAILED, THEN) for what in ("replaced", "freed") for spec in BOTH],
    (BY_KEY, "after copy", ROWS, "unbound", FAILED, THEN),
    (BY_ID, "after copy", ROWS, "unbound", THEN, THEN),
    (PUSH, "before write", REGISTERED, "freed", FAILED, CacheNotFound),
    (PUSH, "after write", REGISTERED, "freed", FAILED, THEN),
]


@pytest.mark.parametrize(
    ("args", "step", "source", "what", "mapped", "lanes"),
    CHANGES,
    ids=[f"{step}-{what}" for _, step, _, what, *_ in CHANGES],
)
def test_r15_a_source_that_changes_on_the_way_never_passes_for_the_one_that_was_named(
    pair: Pair, tmp_path: Path, args: tuple[Any, ...], step: str, source: Spec, what: str, mapped: Any, lanes: Any
) -> None:
    pair.start(rca=args is PUSH)
    prompt, decoder = pair.prompt, pair.decoder
    prompt.do(count_messages)
    src, dst = prompt.do(make, "kv", source, 1), decoder.do(make, "kv", Spec(blocks=source.blocks), 2)
    outcome, error = lanes if pair.transport == "tcp" else mapped, None
    # In one process the owner waits for a reader of registered memory, which would be freed under it.
    with stopped(decoder, step, tmp_path, *args) as moving, in_background(prompt, change, what, source):
        if outcome is NOW:  # what is found must have its bytes by then
            wait_until(lambda: prompt.do(ended))
        if isinstance(outcome, str):
            moving.finish()
        else:
            with pytest.raises(outcome) as caught:
                moving.finish()
            error = caught.value
    if isinstance(error, TransferFailed):
        assert "freed, rebound or unregistered" in str(error)
        assert error.status_code is LLMStatusCode.LLM_FAILED
        assert (error.peer, error.phase, error.retryable) == (1, "copy", True)
    if args is PUSH:
        assert error is None or outcome is CacheNotFound or "remote bytes" in str(error)
        same_bytes(decoder.do(show, "kv"), dst)
        if outcome is CacheNotFound:
            same_bytes(prompt.do(show, "kv"), src)
        return
    expected, pairs = dst, PAIRS if source.blocks else [(5, 0)]
    found = decoder.do(show, "kv")
    if outcome is FAILED:  # what was addressed is undefined, the rest is as it was
        expected = moved(dst, found, [(to, to) for to, _ in pairs])
        assert kept(pair) == 0
    elif outcome in (NOW, THEN):
        expected = moved(dst, prompt.do(show, "later") if outcome is NOW else src, pairs)
    same_bytes(found, expected)
    assert prompt.do(resolves) == (2 if outcome in (NOW, CacheNotFound) else 1)
    wait_until(lambda: prompt.do(picture).pins == 0)


def test_an_answer_that_changes_every_time_is_a_failed_transfer(local_pair: Pair) -> None:
    local_pair.start()
    local_pair.prompt.do(count_messages)
    world, owner = local_pair.decoder.world, local_pair.prompt.world  # type: ignore[attr-defined]
    make(owner, "kv", PAGED, 1)
    dst = make(world, "kv", TARGET, 2)
    initiator = world.dd._require_engine("test").initiator
    resolve = initiator._resolve

    def replace_cache() -> None:
        forget(owner, "kv")
        make(owner, "kv", PAGED, 9)

    def late(*args: Any, **kwargs: Any) -> Any:
        """Whenever the peer's answer has come, what it says is not true any more."""
        result = resolve(*args, **kwargs)
        # In this thread, inside of the pull, it would be put off.
        other = threading.Thread(target=replace_cache)
        other.start()
        other.join()
        return result

    initiator._resolve = late
    with pytest.raises(TransferFailed, match="changed, or its data lanes broke, 4 times") as caught:
        call(world, *PULL)
    assert caught.value.phase == "copy"
    assert local_pair.prompt.do(resolves) == 4
    same_bytes(show(world, "kv"), dst)
