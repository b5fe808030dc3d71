"""Guards, kept answers and visibility (interface R15): what changes between resolve and copy never passes for
success."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist.errors import CacheMismatch, CacheNotFound, TransferFailed
from tests.support.background import in_background
from tests.support.gates import count_messages, resolves, stopped
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import cluster_info, fill

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.moves import Bytes
    from tests.support.world import World

KEY = CacheKey(1, 10)
PAGED = Spec(blocks=True, blocks_key=BLOCKS)
TARGET = Spec(blocks=True)
REGISTERED = Spec(blocks=True, blocks_key=BLOCKS, memory="inside")
PULL = ("pull_blocks", BLOCKS, Use("kv"), [1, 2], [6, 0])
PAIRS = [(6, 1), (0, 2)]


def both(pair: Pair, source: Spec = PAGED, target: Spec = TARGET, **settings: Any) -> tuple[Bytes, Bytes]:
    pair.start(**settings)
    pair.prompt.do(count_messages)
    return pair.prompt.do(make, "kv", source, 1), pair.decoder.do(make, "kv", target, 2)


def kept(pair: Pair) -> int:
    (link,) = pair.decoder.do(picture).links
    answers: int = link.resolved
    return answers


def untouched_but(pair: Pair, before: Bytes, rows: list[int]) -> None:
    """The addressed rows are undefined, the rest is as it was."""
    for got, was in zip(pair.decoder.do(show, "kv"), before, strict=True):
        got[rows] = was[rows]
        same_bytes([got], [was])


# --- kept answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [PAGED, REGISTERED])
@pytest.mark.parametrize("rca", [False, True])
def test_a_second_pull_of_a_blocks_cache_asks_nothing(pair: Pair, rca: bool, source: Spec) -> None:
    src, dst = both(pair, source, rca=rca)
    for blocks in (1, 2, 3):
        pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [blocks], [blocks])
    assert pair.prompt.do(resolves) == 1
    assert kept(pair) == 1
    assert pair.prompt.do(picture).pins == 0
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(1, 1), (2, 2), (3, 3)]))


def test_a_kept_answer_shows_what_the_source_holds_now(pair: Pair) -> None:
    _, dst = both(pair)
    pair.decoder.do(call, *PULL)
    now = pair.prompt.do(_refill, 7)
    pair.decoder.do(call, *PULL)
    assert pair.prompt.do(resolves) == 1
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, now, PAIRS))


def _refill(world: World, seed: int) -> Bytes:
    return fill(world.caches["kv"], seed)


def test_pushes_keep_their_own_answers(pair: Pair) -> None:
    both(pair, rca=True)
    pair.decoder.do(call, *PULL)
    for _ in range(3):
        pair.decoder.do(call, "push_blocks", BLOCKS, Use("kv"), [0], [3])
    assert pair.prompt.do(resolves) == 2
    assert kept(pair) == 2


def test_registered_rows_are_kept_with_rca_only(pair: Pair) -> None:
    both(pair, Spec(keys=(KEY,), memory="inside"), Spec(), rca=True)
    for row in range(3):
        pair.decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, 2, 1), Use("kv"), row)
    assert pair.prompt.do(resolves) == 1


@pytest.mark.parametrize("rca", [False, True])
def test_allocated_rows_are_resolved_every_time(pair: Pair, rca: bool) -> None:
    both(pair, Spec(keys=(KEY,)), Spec(), rca=rca)
    for row in range(3):
        pair.decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, 1, 1), Use("kv"), row)
    assert pair.prompt.do(resolves) == 3
    assert kept(pair) == 0
    wait_until(lambda: pair.prompt.do(picture).pins == 0)


@pytest.mark.parametrize("source", [PAGED, REGISTERED])
def test_r15_a_key_that_moved_to_another_cache_is_resolved_again(pair: Pair, source: Spec) -> None:
    src, dst = both(pair, source)
    pair.decoder.do(call, *PULL)
    pair.prompt.do(forget, "kv")
    later = pair.prompt.do(make, "later", source, 9)
    pair.decoder.do(call, *PULL)
    assert pair.prompt.do(resolves) == 2
    same_bytes(pair.decoder.do(show, "kv"), moved(moved(dst, src, PAIRS), later, PAIRS))


def test_r15_the_newest_registered_blocks_cache_has_the_key(pair: Pair) -> None:
    src, dst = both(pair, REGISTERED)
    pair.decoder.do(call, *PULL)
    later = pair.prompt.do(make, "later", REGISTERED, 9)  # the older one is still registered
    pair.decoder.do(call, *PULL)
    assert pair.prompt.do(resolves) == 2
    same_bytes(pair.decoder.do(show, "kv"), moved(moved(dst, src, PAIRS), later, PAIRS))


def test_r15_a_kept_answer_that_no_longer_fits_is_asked_for_again(pair: Pair) -> None:
    both(pair)
    pair.decoder.do(call, *PULL)
    pair.prompt.do(forget, "kv")
    smaller = pair.prompt.do(make, "later", Spec(2, stride=16, blocks=True, blocks_key=BLOCKS), 9)
    with pytest.raises(CacheMismatch, match="block sizes differ: source blocks have 16"):
        pair.decoder.do(call, *PULL)
    dst = pair.decoder.do(make, "kv", Spec(2, stride=16, blocks=True), 4)
    pair.decoder.do(call, *PULL)
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, smaller, PAIRS))


@pytest.mark.parametrize("source", [PAGED, REGISTERED])
def test_r15_what_is_freed_after_the_link_does_not_exist(pair: Pair, source: Spec) -> None:
    src, dst = both(pair, source)
    pair.decoder.do(call, *PULL)
    pair.prompt.do(forget, "kv")
    with pytest.raises(CacheNotFound) as caught:
        pair.decoder.do(call, *PULL)
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert kept(pair) == 0
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, PAIRS))


@pytest.mark.parametrize("source", [PAGED, REGISTERED])
@pytest.mark.parametrize("rca", [False, True])
def test_r15_what_appears_after_a_miss_is_found_at_the_next_call(pair: Pair, rca: bool, source: Spec) -> None:
    pair.start(rca=rca)
    dst = pair.decoder.do(make, "kv", TARGET, 2)
    with pytest.raises(CacheNotFound):
        pair.decoder.do(call, *PULL)
    src = pair.prompt.do(make, "kv", source, 1)
    pair.decoder.do(call, *PULL)
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, PAIRS))


def test_r15_what_is_registered_and_freed_after_the_link_is_seen_by_the_next_push(pair: Pair) -> None:
    pair.start(rca=True)
    src = pair.decoder.do(make, "kv", Spec(blocks=True), 2)
    push = ("push_blocks", BLOCKS, Use("kv"), [1, 6], [0, 3])
    with pytest.raises(CacheNotFound):
        pair.decoder.do(call, *push)
    for seed in (3, 4):
        dst = pair.prompt.do(make, "kv", REGISTERED, seed)
        pair.decoder.do(call, *push)
        same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(0, 1), (3, 6)]))
        pair.prompt.do(forget, "kv")
        with pytest.raises(CacheNotFound):
            pair.decoder.do(call, *push)
    same_bytes(pair.decoder.do(show, "kv"), src)


def test_kept_answers_end_with_their_link(pair: Pair) -> None:
    src, dst = both(pair)
    pair.decoder.do(call, *PULL)
    pair.decoder.do(_unlink)
    wait_until(lambda: not pair.prompt.do(picture).links)
    pair.link()
    assert kept(pair) == 0
    pair.decoder.do(call, *PULL)
    assert pair.prompt.do(resolves) == 2
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, PAIRS))


def _unlink(world: World) -> None:
    assert world.dd.unlink_clusters([cluster_info(1, 1)], 10_000)[0] is LLMStatusCode.LLM_SUCCESS


# --- changes while an operation is on its way -------------------------------------------------------------------------


def _replace(world: World, spec: Spec) -> Bytes:
    """Free what has the key and give the key to another cache."""
    forget(world, "kv")
    return make(world, "later", spec, 9)


@pytest.mark.parametrize("source", [PAGED, REGISTERED])
def test_a_rebind_between_resolve_and_copy_is_resolved_once_more(pair: Pair, tmp_path: Path, source: Spec) -> None:
    _, dst = both(pair, source)
    with stopped(pair.decoder, "resolved", tmp_path, *PULL) as pulling:
        later = pair.prompt.do(_replace, source)
        pulling.finish()
    assert pair.prompt.do(resolves) == 2
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, later, PAIRS))


@pytest.mark.parametrize("source", [PAGED, REGISTERED])
def test_a_source_freed_between_resolve_and_copy_does_not_exist(pair: Pair, tmp_path: Path, source: Spec) -> None:
    _, dst = both(pair, source)
    with stopped(pair.decoder, "resolved", tmp_path, *PULL) as pulling:
        pair.prompt.do(forget, "kv")
        with pytest.raises(CacheNotFound):
            pulling.finish()
    same_bytes(pair.decoder.do(show, "kv"), dst)


def test_a_key_removed_between_resolve_and_copy_does_not_exist(pair: Pair, tmp_path: Path) -> None:
    _, dst = both(pair, Spec(keys=(KEY,)), Spec())
    with stopped(pair.decoder, "resolved", tmp_path, "pull_cache", KEY, Use("kv")) as pulling:
        pair.prompt.do(call, "remove_cache_key", KEY)
        with pytest.raises(CacheNotFound):
            pulling.finish()
    same_bytes(pair.decoder.do(show, "kv"), dst)
    wait_until(lambda: pair.prompt.do(picture).pins == 0)


def test_a_key_rebound_between_resolve_and_copy_gives_the_later_row(pair: Pair, tmp_path: Path) -> None:
    _, dst = both(pair, Spec(keys=(KEY,)), Spec())
    with stopped(pair.decoder, "resolved", tmp_path, "pull_cache", KEY, Use("kv"), 3) as pulling:
        pair.prompt.do(call, "remove_cache_key", KEY)
        later = pair.prompt.do(make, "later", Spec(keys=(CacheKey(1, 7), KEY)), 9)
        pulling.finish()
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, later, [(3, 1)]))
    wait_until(lambda: pair.prompt.do(picture).pins == 0)
    assert [key.key for key in pair.prompt.do(picture).keys] == ["(0, 7, 0)"]


@pytest.mark.parametrize("step", ["before copy", "after copy"])
@pytest.mark.parametrize("source", [PAGED, REGISTERED])
@pytest.mark.parametrize("change", [forget, _replace])
def test_a_source_that_changes_during_the_copy_is_a_failed_transfer(
    mapped_pair: Pair, tmp_path: Path, step: str, source: Spec, change: Any
) -> None:
    pair = mapped_pair
    _, dst = both(pair, source)
    # In one process the owner waits for a reader of registered memory, which would be freed under it.
    with (
        stopped(pair.decoder, step, tmp_path, *PULL) as pulling,
        in_background(pair.prompt, change, *(["kv"] if change is forget else [source])),
        pytest.raises(TransferFailed, match="freed, rebound or unregistered") as caught,
    ):
        pulling.finish()
    assert caught.value.status_code is LLMStatusCode.LLM_FAILED
    assert (caught.value.peer, caught.value.phase, caught.value.retryable) == (1, "copy", True)
    untouched_but(pair, dst, [6, 0])
    assert kept(pair) == 0


@pytest.mark.parametrize("step", ["before copy", "after copy"])
def test_a_row_key_removed_during_the_copy_is_a_failed_transfer(mapped_pair: Pair, tmp_path: Path, step: str) -> None:
    pair = mapped_pair
    _, dst = both(pair, Spec(keys=(KEY,)), Spec())
    with stopped(pair.decoder, step, tmp_path, "pull_cache", KEY, Use("kv"), 5) as pulling:
        pair.prompt.do(call, "remove_cache_key", KEY)
        with pytest.raises(TransferFailed):
            pulling.finish()
    untouched_but(pair, dst, [5])


def test_rows_pulled_by_id_do_not_mind_a_key_that_goes(pair: Pair, tmp_path: Path) -> None:
    src, dst = both(pair, Spec(keys=(KEY,)), Spec())
    by_id = CacheKeyByIdAndIndex(1, 1, 0)
    with stopped(pair.decoder, "after copy", tmp_path, "pull_cache", by_id, Use("kv"), 5) as pulling:
        pair.prompt.do(call, "remove_cache_key", KEY)
        pulling.finish()
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(5, 0)]))


@pytest.mark.parametrize("step", ["before write", "after write"])
def test_a_target_unregistered_during_a_push_is_a_failed_transfer(mapped_pair: Pair, tmp_path: Path, step: str) -> None:
    pair = mapped_pair
    both(pair, REGISTERED, rca=True)
    src = pair.decoder.do(show, "kv")
    pushing = ("push_blocks", BLOCKS, Use("kv"), [1], [2])
    with (
        stopped(pair.decoder, step, tmp_path, *pushing) as push,
        in_background(pair.prompt, forget, "kv"),
        pytest.raises(TransferFailed) as caught,
    ):
        push.finish()
    assert caught.value.phase == "copy"
    assert "remote bytes" in str(caught.value)
    same_bytes(pair.decoder.do(show, "kv"), src)


def test_memory_of_a_freed_cache_is_reused_under_a_stopped_reader_without_wrong_success(
    mapped_pair: Pair, tmp_path: Path
) -> None:
    pair = mapped_pair
    _, dst = both(pair)
    with stopped(pair.decoder, "before copy", tmp_path, *PULL) as pulling:
        pair.prompt.do(forget, "kv")
        pair.prompt.do(make, "other", Spec(blocks=True, blocks_key=BlocksCacheKey(1, 8)), 9)  # the same pages
        with pytest.raises(TransferFailed):
            pulling.finish()
    untouched_but(pair, dst, [6, 0])


@pytest.mark.parametrize("step", ["before copy", "after copy"])
@pytest.mark.parametrize("source", [PAGED, REGISTERED])
@pytest.mark.parametrize("change", [forget, _replace])
def test_over_lanes_the_owner_judges_a_source_that_changes(
    tcp_pair: Pair, tmp_path: Path, step: str, source: Spec, change: Any
) -> None:
    """Before its first byte it is asked for again, after its last the old bytes were right."""
    src, dst = both(tcp_pair, source)
    with stopped(tcp_pair.decoder, step, tmp_path, *PULL) as pulling:
        later = tcp_pair.prompt.do(change, *(["kv"] if change is forget else [source]))
        if step == "before copy" and change is forget:
            with pytest.raises(CacheNotFound):
                pulling.finish()
            same_bytes(tcp_pair.decoder.do(show, "kv"), dst)
        else:
            pulling.finish()
            pulled = later if step == "before copy" else src
            same_bytes(tcp_pair.decoder.do(show, "kv"), moved(dst, pulled, PAIRS))


@pytest.mark.parametrize("step", ["before write", "after write"])
def test_over_lanes_a_target_is_never_written_after_it_was_unregistered(
    tcp_pair: Pair, tmp_path: Path, step: str
) -> None:
    both(tcp_pair, REGISTERED, rca=True)
    with stopped(tcp_pair.decoder, step, tmp_path, "push_blocks", BLOCKS, Use("kv"), [1], [2]) as push:
        before = tcp_pair.prompt.do(_unregister_and_show)
        if step == "before write":
            with pytest.raises(CacheNotFound):
                push.finish()
        else:
            push.finish()
    same_bytes(tcp_pair.prompt.do(_memory_of, "kv"), before)


def _unregister_and_show(world: World) -> Bytes:
    """What a forgotten cache's memory holds is the user's again."""
    forget(world, "kv")
    return _memory_of(world, "kv")


def _memory_of(world: World, name: str) -> Bytes:
    return show(world, name)


def test_an_answer_that_changes_every_time_is_a_failed_transfer(local_pair: Pair) -> None:
    _, dst = both(local_pair)
    local_pair.decoder.do(_always_late, local_pair.prompt.world)  # type: ignore[attr-defined]  # both ends are here
    with pytest.raises(TransferFailed, match="changed, or its data lanes broke, 4 times") as caught:
        local_pair.decoder.do(call, *PULL)
    assert caught.value.phase == "copy"
    assert local_pair.prompt.do(resolves) == 4
    same_bytes(local_pair.decoder.do(show, "kv"), dst)


def _always_late(world: World, prompt: World) -> None:
    """Whenever the peer's answer has come, what it says is not true any more."""
    assert world.dd._engine is not None
    initiator: Any = world.dd._engine.initiator
    original = initiator._resolve

    def resolved(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        forget(prompt, "kv")
        make(prompt, "kv", PAGED, 9)
        return result

    initiator._resolve = resolved
