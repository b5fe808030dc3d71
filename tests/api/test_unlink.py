"""unlink_clusters, forced and not, under way and at rest, and linking again (interface §3.4, B2.2)."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist.errors import LLMException, NoneArgument, NotLinked, PeerLost
from tests.support.frozen import frozen
from tests.support.gates import gated_call
from tests.support.linking import (
    SUCCESS,
    alone,
    begin_there,
    bytes_move_both_ways,
    info,
    link,
    links,
    result_there,
    start_both,
    unlink,
)
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, picture, refused, same_bytes, show, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.ends import End, LocalEnd
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "CacheKey.cluster_id",
    "CacheKeyByIdAndIndex.cluster_id",
    "LLMDataDist: cluster_id unlink_clusters",
    "LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR",
)

TIMEOUT, INVALID = LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_PARAM_INVALID


def caches(pair: Pair) -> tuple[Bytes, Bytes]:
    source = pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    return source, pair.decoder.do(make, "kv", Spec(blocks=True), 2)


def not_linked(end: End, peer: int) -> None:
    with pytest.raises(NotLinked) as caught:
        end.do(call, "pull_blocks", type(BLOCKS)(peer, 0), Use("kv"), [0], [0])
    assert caught.value.status_code is LLMStatusCode.LLM_NOT_YET_LINK
    assert str(peer) in str(caught.value)


# --- at rest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("by_the_dialler", [False, True])
def test_after_an_unlink_neither_end_is_linked_and_nothing_else_has_changed(
    pair: Pair, force: bool, by_the_dialler: bool
) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    source, target = caches(pair)
    before = [end.do(picture) for end in (pair.prompt, pair.decoder)]
    assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == SUCCESS
    unlinker, peer = (pair.decoder, pair.prompt) if by_the_dialler else (pair.prompt, pair.decoder)
    assert unlinker.do(unlink, [info(peer.cluster_id, peer.port)], 5000, force) == SUCCESS
    not_linked(unlinker, peer.cluster_id)
    if not force:
        not_linked(peer, unlinker.cluster_id)  # it has agreed: at once, not soon
    alone(pair.prompt, pair.decoder)
    assert [end.do(picture) for end in (pair.prompt, pair.decoder)] == before
    same_bytes(pair.prompt.do(show, "kv"), source)
    same_bytes(pair.decoder.do(show, "kv"), target)


@pytest.mark.parametrize("force", [False, True])
def test_i2_unlinking_what_is_not_linked_is_a_success(pair: Pair, force: bool) -> None:
    pair.start()
    clusters = [info(77, pair.prompt.port), info(1, pair.prompt.port), info(1, pair.prompt.port)]
    assert pair.decoder.do(unlink, clusters, 5000, force) == (SUCCESS[0], SUCCESS[1] * 3)
    assert pair.decoder.do(unlink, clusters, 5000, force) == (SUCCESS[0], SUCCESS[1] * 3)


def test_without_force_exactly_one_remote_ip_is_needed_and_with_force_none(pair: Pair) -> None:
    pair.start()
    port = pair.prompt.port
    clusters = [info(1), info(1, port, port), info(5, port)]
    assert pair.decoder.do(unlink, clusters) == (INVALID, [INVALID, INVALID, SUCCESS[0]])
    assert pair.decoder.do(links) == {1: "ready"}
    assert pair.decoder.do(unlink, [info(1, local=None)], 5000, True) == SUCCESS


@pytest.mark.parametrize(("kind", "force", "part"), [(TypeError, 1, "force"), (NoneArgument, None, "force")])
def test_r01_force_must_be_a_bool(end: LocalEnd, kind: type[Exception], force: Any, part: str) -> None:
    end.start("DECODER", 2)
    refused([end], [], kind, [part], unlink, [info(1, 1)], 5000, force)


def test_r01_unlinking_needs_a_cluster_id(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    parts = ["clusters[1].remote_cluster_id"]
    refused([end], [], NoneArgument, parts, unlink, [info(1, 1), info(None, 1)])


# --- linking again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [False, True])
def test_linking_again_at_once_works_many_times_from_either_side(pair: Pair, force: bool) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == SUCCESS
    for number in range(12):
        unlinker, peer = (pair.prompt, pair.decoder) if number % 3 else (pair.decoder, pair.prompt)
        assert unlinker.do(unlink, [info(peer.cluster_id, peer.port)], 5000, force) == SUCCESS
        # The peer may still hold its end of a link that was given up by force.
        assert unlinker.do(link, [info(peer.cluster_id, peer.port)]) == SUCCESS
        wait_until(lambda: (pair.prompt.do(links), pair.decoder.do(links)) == ({2: "ready"}, {1: "ready"}))
    bytes_move_both_ways(pair.prompt, pair.decoder)


def test_unlinking_from_both_sides_at_once_many_times(pair: Pair) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    for _ in range(10):
        assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == SUCCESS
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
    pair.decoder.do(begin_there, "pull", gated_pull, folder)
    try:
        wait_until((folder / "reached").exists)
        yield
    finally:
        (folder / "go").touch()


@pytest.mark.parametrize("force", [False, True])
def test_an_unlink_of_our_own_waits_for_our_running_pull(pair: Pair, tmp_path: Path, force: bool) -> None:
    pair.start()
    source, target = caches(pair)
    with pull_under_way(pair, tmp_path):
        pair.decoder.do(begin_there, "unlink", unlink, [info(1, pair.prompt.port)], 30_000, force)
        wait_until(lambda: pair.decoder.do(links) == {1: "draining"})
        not_linked(pair.decoder, 1)  # nothing new begins
    assert pair.decoder.do(result_there, "pull") is None
    assert pair.decoder.do(result_there, "unlink") == SUCCESS
    same_bytes(pair.decoder.do(show, "kv"), moved(target, source, [(0, 1), (3, 6)]))
    same_bytes(pair.prompt.do(show, "kv"), source)
    alone(pair.prompt, pair.decoder)


def test_an_unlink_of_the_peer_waits_for_our_running_pull(pair: Pair, tmp_path: Path) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == SUCCESS
    source, target = caches(pair)
    with pull_under_way(pair, tmp_path):
        pair.prompt.do(begin_there, "unlink", unlink, [info(2, pair.decoder.port)], 30_000)
        wait_until(lambda: pair.decoder.do(links) == {1: "draining"})
        assert pair.prompt.do(links) == {2: "draining"}
    assert pair.decoder.do(result_there, "pull") is None
    assert pair.prompt.do(result_there, "unlink") == SUCCESS
    same_bytes(pair.decoder.do(show, "kv"), moved(target, source, [(0, 1), (3, 6)]))
    same_bytes(pair.prompt.do(show, "kv"), source)
    alone(pair.prompt, pair.decoder)


@pytest.mark.parametrize("by_the_puller", [False, True])
def test_an_unlink_that_cannot_wait_that_long_keeps_the_link_at_both_ends(
    pair: Pair, tmp_path: Path, by_the_puller: bool
) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == SUCCESS
    source, target = caches(pair)
    unlinker, peer = (pair.decoder, pair.prompt) if by_the_puller else (pair.prompt, pair.decoder)
    with pull_under_way(pair, tmp_path):
        assert unlinker.do(unlink, [info(peer.cluster_id, peer.port)], 100) == (TIMEOUT, [TIMEOUT])
        wait_until(lambda: (pair.prompt.do(links), pair.decoder.do(links)) == ({2: "ready"}, {1: "ready"}))
    assert pair.decoder.do(result_there, "pull") is None
    same_bytes(pair.decoder.do(show, "kv"), moved(target, source, [(0, 1), (3, 6)]))
    bytes_move_both_ways(pair.prompt, pair.decoder)
    assert unlinker.do(unlink, [info(peer.cluster_id, peer.port)]) == SUCCESS
    alone(pair.prompt, pair.decoder)


def test_a_forced_unlink_does_not_wait_for_longer_than_it_may(pair: Pair, tmp_path: Path) -> None:
    pair.start()
    source, _ = caches(pair)
    with pull_under_way(pair, tmp_path):
        assert pair.decoder.do(unlink, [info(1)], 100, True) == SUCCESS
        assert pair.decoder.do(links) == {}
    error = pair.decoder.do(result_there, "pull")
    assert isinstance(error, NotLinked), error
    assert error.status_code is LLMStatusCode.LLM_NOT_YET_LINK
    assert (error.peer, error.phase) == (1, "copy")
    assert "given up" in str(error)
    same_bytes(pair.prompt.do(show, "kv"), source)
    pair.link()
    bytes_move_both_ways(pair.prompt, pair.decoder)


def test_a_forced_unlink_of_the_peer_ends_our_running_pull_with_a_typed_error(pair: Pair, tmp_path: Path) -> None:
    pair.start()
    source, _ = caches(pair)
    with pull_under_way(pair, tmp_path):
        assert pair.prompt.do(unlink, [info(2)], 5000, True) == SUCCESS
        alone(pair.prompt, pair.decoder)
    error = pair.decoder.do(result_there, "pull")
    assert isinstance(error, PeerLost), error
    assert (error.status_code, error.peer, error.phase) == (LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR, 1, "copy")
    same_bytes(pair.prompt.do(show, "kv"), source)


def pull_until_refused(world: World) -> tuple[int, LLMException]:
    """Pull from three threads until there is no link any more; return how many pulls succeeded, and the refusal."""
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
    return counts[0], errors[0]


@pytest.mark.parametrize("by_the_puller", [False, True])
def test_an_unlink_in_a_storm_of_pulls_cuts_none_of_them(pair: Pair, by_the_puller: bool) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    source, target = caches(pair)
    for _ in range(5):
        assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == SUCCESS
        pair.decoder.do(begin_there, "storm", pull_until_refused)
        wait_until(lambda: pair.decoder.do(read_bytes) > 0)
        unlinker, peer = (pair.decoder, pair.prompt) if by_the_puller else (pair.prompt, pair.decoder)
        assert unlinker.do(unlink, [info(peer.cluster_id, peer.port)]) == SUCCESS
        count, _ = pair.decoder.do(result_there, "storm")
        assert count > 0
        alone(pair.prompt, pair.decoder)
    same_bytes(pair.decoder.do(show, "kv"), moved(target, source, [(0, 1), (3, 6)]))
    same_bytes(pair.prompt.do(show, "kv"), source)


def read_bytes(world: World) -> int:
    return sum(each.read_bytes for each in world.dd.statistics().links)


# --- a peer that stands still -----------------------------------------------------------------------------------------


def test_an_unlink_that_is_not_answered_keeps_the_link_for_when_the_peer_goes_on(shm_pair: Pair) -> None:
    shm_pair.start()
    with frozen(shm_pair.prompt):
        assert shm_pair.decoder.do(unlink, [info(1, shm_pair.prompt.port)], 200) == (TIMEOUT, [TIMEOUT])
        assert shm_pair.decoder.do(links) == {1: "ready"}
    bytes_move_both_ways(shm_pair.decoder, shm_pair.prompt)
    assert shm_pair.prompt.do(links) == {2: "ready"}
    assert shm_pair.decoder.do(unlink, [info(1, shm_pair.prompt.port)]) == SUCCESS


def test_i2_a_forced_unlink_never_contacts_the_peer(shm_pair: Pair) -> None:
    shm_pair.start()
    with frozen(shm_pair.prompt):
        assert shm_pair.decoder.do(unlink, [info(1)], 200, True) == SUCCESS
        assert shm_pair.decoder.do(links) == {}
        # The kernel takes the connection of a stopped process; nobody answers.
        assert shm_pair.decoder.do(link, [info(1, shm_pair.prompt.port)], 200) == (TIMEOUT, [TIMEOUT])
    shm_pair.link()
    bytes_move_both_ways(shm_pair.decoder, shm_pair.prompt)
