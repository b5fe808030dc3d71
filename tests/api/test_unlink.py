"""unlink_clusters, forced and not, under way and at rest, and linking again (interface §3.4, B2.2)."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist.errors import LLMException, NotLinked, PeerLost
from tests.support.gates import gated_call
from tests.support.linking import (
    SUCCESS,
    alone,
    begin_there,
    bytes_move_both_ways,
    info,
    link,
    links,
    not_linked,
    result_there,
    start_both,
    unlink,
)
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import fill

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.ends import End
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "CacheKey.cluster_id",
    "CacheKeyByIdAndIndex.cluster_id",
    "LLMDataDist: cluster_id unlink_clusters",
    "LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR",
)

TIMEOUT, INVALID = LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_PARAM_INVALID
TIMED_OUT = (TIMEOUT, [TIMEOUT])
LINKED: Final = {"prompt": {2: "ready"}, "decoder": {1: "ready"}}


def caches(pair: Pair) -> tuple[Bytes, Bytes]:
    source = pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    return source, pair.decoder.do(make, "kv", Spec(blocks=True), 2)


def refilled(world: World, seed: int) -> Bytes:
    """Fill the cache with other bytes, and return them."""
    return fill(world.caches["kv"], seed)


def both(pair: Pair) -> dict[str, dict[int, str]]:
    return {"prompt": pair.prompt.do(links), "decoder": pair.decoder.do(links)}


# --- at rest ----------------------------------------------------------------------------------------------------------


def test_i02_after_an_unlink_by_either_end_neither_is_linked_and_a_second_one_is_a_success(pair: Pair) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    source, target = caches(pair)
    before = [end.do(picture) for end in (pair.prompt, pair.decoder)]
    for unlinker, peer in ((pair.prompt, pair.decoder), (pair.decoder, pair.prompt)):
        for force in (False, True):
            pair.link()
            assert unlinker.do(unlink, [info(peer.cluster_id, peer.port)], 5000, force) == SUCCESS
            not_linked(unlinker, peer.cluster_id)
            if not force:
                not_linked(peer, unlinker.cluster_id)  # it has agreed: at once, not soon
            clusters = [info(77, peer.port, local=None), *[info(peer.cluster_id, peer.port)] * 2]
            assert unlinker.do(unlink, clusters, 5000, force) == (SUCCESS[0], SUCCESS[1] * 3)
            alone(pair.prompt, pair.decoder)
    assert [end.do(picture) for end in (pair.prompt, pair.decoder)] == before
    same_bytes(pair.prompt.do(show, "kv"), source)
    same_bytes(pair.decoder.do(show, "kv"), target)


@pytest.mark.parametrize("pair", ["shm", "tcp"], indirect=True)
def test_linking_again_at_once_works_many_times_from_either_side(pair: Pair) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    pair.link()
    for number in range(12):
        unlinker, peer = (pair.prompt, pair.decoder) if number % 3 else (pair.decoder, pair.prompt)
        assert unlinker.do(unlink, [info(peer.cluster_id, peer.port)], 5000, number % 2 == 0) == SUCCESS
        # The peer may still hold its end of a link that was given up by force.
        assert unlinker.do(link, [info(peer.cluster_id, peer.port)]) == SUCCESS
        wait_until(lambda: both(pair) == LINKED)
    bytes_move_both_ways(pair.prompt, pair.decoder)


@pytest.mark.parametrize("pair", ["inproc", "shm"], indirect=True)
def test_unlinking_from_both_sides_at_once_many_times(pair: Pair) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    for _ in range(10):
        pair.link()
        pair.prompt.do(begin_there, "unlink", unlink, [info(2, pair.decoder.port)])
        assert pair.decoder.do(unlink, [info(1, pair.prompt.port)]) == SUCCESS
        assert pair.prompt.do(result_there, "unlink") == SUCCESS
        alone(pair.prompt, pair.decoder)


# --- under way --------------------------------------------------------------------------------------------------------


def gated_pull(world: World, folder: Path) -> None:
    gated_call(world, 1, "before copy", folder, "pull_blocks", BLOCKS, Use("kv"), [1, 6], [0, 3])


@contextmanager
def pull_under_way(pair: Pair, folder: Path) -> Iterator[None]:
    """The decoder pulls and stands still before its first byte; the end of the block lets it go on."""
    folder.mkdir()
    pair.decoder.do(begin_there, "pull", gated_pull, folder)
    try:
        wait_until((folder / "reached").exists)
        yield
    finally:
        (folder / "go").touch()


def test_an_unlink_that_may_wait_waits_for_a_running_pull(pair: Pair, tmp_path: Path) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    source, _ = caches(pair)
    rows = [(pair.decoder, pair.prompt, False), (pair.decoder, pair.prompt, True), (pair.prompt, pair.decoder, False)]
    for number, (unlinker, peer, force) in enumerate(rows):
        pair.link()
        target = pair.decoder.do(refilled, number)
        with pull_under_way(pair, tmp_path / str(number)):
            unlinker.do(begin_there, "unlink", unlink, [info(peer.cluster_id, peer.port)], 30_000, force)
            wait_until(lambda: pair.decoder.do(links) == {1: "draining"})
            if unlinker is pair.prompt:
                assert pair.prompt.do(links) == {2: "draining"}
            not_linked(pair.decoder, 1)  # nothing new begins
        assert pair.decoder.do(result_there, "pull") is None
        assert unlinker.do(result_there, "unlink") == SUCCESS
        same_bytes(pair.decoder.do(show, "kv"), moved(target, source, [(0, 1), (3, 6)]))
        same_bytes(pair.prompt.do(show, "kv"), source)
        alone(pair.prompt, pair.decoder)


def test_an_unlink_that_cannot_wait_that_long_keeps_the_link_at_both_ends(pair: Pair, tmp_path: Path) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    source, _ = caches(pair)
    for number, (unlinker, peer) in enumerate([(pair.prompt, pair.decoder), (pair.decoder, pair.prompt)]):
        pair.link()
        target = pair.decoder.do(refilled, number)
        with pull_under_way(pair, tmp_path / str(number)):
            assert unlinker.do(unlink, [info(peer.cluster_id, peer.port)], 100) == TIMED_OUT
            wait_until(lambda: both(pair) == LINKED)
        assert pair.decoder.do(result_there, "pull") is None
        same_bytes(pair.decoder.do(show, "kv"), moved(target, source, [(0, 1), (3, 6)]))
        bytes_move_both_ways(pair.prompt, pair.decoder)
        assert unlinker.do(unlink, [info(peer.cluster_id, peer.port)]) == SUCCESS
        alone(pair.prompt, pair.decoder)


def test_a_forced_unlink_ends_a_running_pull_with_a_typed_error_when_its_time_is_over_or_at_once_from_the_other_end(
    pair: Pair, tmp_path: Path
) -> None:
    pair.start()
    source, _ = caches(pair)
    rows: list[tuple[End, int, int, type[LLMException], LLMStatusCode, str]] = [
        (pair.decoder, 1, 100, NotLinked, LLMStatusCode.LLM_NOT_YET_LINK, "given up"),
        (pair.prompt, 2, 5000, PeerLost, LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR, ""),
    ]
    for unlinker, peer, timeout, kind, status, part in rows:
        with pull_under_way(pair, tmp_path / str(peer)):
            assert unlinker.do(unlink, [info(peer)], timeout, True) == SUCCESS
            assert unlinker.do(links) == {}
            alone(pair.prompt, pair.decoder)
        error = pair.decoder.do(result_there, "pull")
        assert isinstance(error, kind), error
        assert (error.status_code, error.peer, error.phase) == (status, 1, "copy")
        assert part in str(error)
        same_bytes(pair.prompt.do(show, "kv"), source)
        pair.link()
        bytes_move_both_ways(pair.prompt, pair.decoder)


def pull_until_refused(world: World) -> int:
    """Pull from three threads until there is no link any more; return how many pulls succeeded."""
    counts, errors = [0], []

    def run() -> None:
        while True:
            try:
                call(world, "pull_blocks", BLOCKS, Use("kv"), [1, 6], [0, 3])
            except LLMException as error:
                errors.append(error)
                return
            counts[0] += 1

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {type(error) for error in errors} == {NotLinked}, errors
    return counts[0]


def test_an_unlink_in_a_storm_of_pulls_cuts_none_of_them(pair: Pair) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    source, _ = caches(pair)
    for number, (unlinker, peer) in enumerate([(pair.prompt, pair.decoder), (pair.decoder, pair.prompt)] * 3):
        pair.link()
        target = pair.decoder.do(refilled, number)
        pair.decoder.do(begin_there, "storm", pull_until_refused)
        wait_until(lambda: pair.decoder.do(read_bytes) > 0)
        assert unlinker.do(unlink, [info(peer.cluster_id, peer.port)]) == SUCCESS
        assert pair.decoder.do(result_there, "storm") > 0
        alone(pair.prompt, pair.decoder)
        same_bytes(pair.decoder.do(show, "kv"), moved(target, source, [(0, 1), (3, 6)]))
    same_bytes(pair.prompt.do(show, "kv"), source)


def read_bytes(world: World) -> int:
    return sum(each.read_bytes for each in world.dd.statistics().links)
