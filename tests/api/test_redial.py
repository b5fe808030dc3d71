"""What one end dialled and lost comes back by itself, to the same incarnation only, until it is unlinked
(interface R22)."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist.errors import NotLinked
from tests.support.ends import ChildEnd
from tests.support.family import Family, one_family
from tests.support.frozen import frozen
from tests.support.linking import (
    SUCCESS,
    bytes_move_both_ways,
    finalize,
    info,
    link,
    link_number,
    links,
    not_linked,
    redials,
    start_both,
    unlink,
)
from tests.support.moves import Spec, make, wait_until
from tests.support.strangers import silent_port
from tests.support.world import World, residue_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Pair
    from tests.support.ends import End

pytestmark = pytest.mark.covers("errors.NotLinked")

ALREADY, TIMEOUT = LLMStatusCode.LLM_ALREADY_LINK, LLMStatusCode.LLM_TIMEOUT
REDIAL = "llm-datadist-redial"
BOTH_UP = ({2: "ready"}, {1: "ready"})
PATIENT = {"llm.PeerTimeout": "600"}


def lose(world: World, peer: int) -> None:
    """Cut the control connection, as a network would: neither end meant it."""
    assert world.dd._engine is not None
    channel = world.dd._engine.links.get(peer).channel
    assert channel is not None
    with suppress(OSError):  # it may just have been lost
        channel._socket.shutdown(socket.SHUT_RDWR)


def threads(world: World) -> list[str]:
    names: list[str] = residue_of(world)["threads"]
    return names


def both(pair: Pair) -> tuple[dict[int, str], dict[int, str]]:
    return pair.prompt.do(links), pair.decoder.do(links)


def comes_back(pair: Pair, was: int) -> None:
    """Wait for another link than ``was`` at the decoder, and for the end of the redial."""
    wait_until(lambda: pair.decoder.do(link_number, 1) > was)
    wait_until(lambda: both(pair) == BOTH_UP)
    assert pair.decoder.do(redials) == ()
    wait_until(lambda: REDIAL not in pair.decoder.do(threads))


def test_a_lost_link_comes_back_by_itself_and_an_explicit_link_after_that_succeeds_once(pair: Pair) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    prompt, decoder = pair.prompt, pair.decoder
    pair.link()  # the decoder dials
    for loser, peer in ((prompt, 2), (decoder, 1), (prompt, 2)):
        was = decoder.do(link_number, 1)
        loser.do(lose, peer)
        comes_back(pair, was)
        bytes_move_both_ways(prompt, decoder)
    for here, there in ((decoder, prompt), (prompt, decoder)):
        mended = here.do(link_number, there.cluster_id)
        assert here.do(link, [info(there.cluster_id, there.port)]) == SUCCESS
        assert here.do(link_number, there.cluster_id) == mended, "the link that was there is the one"
        assert here.do(link, [info(there.cluster_id, there.port)]) == (ALREADY, [ALREADY])
    bytes_move_both_ways(prompt, decoder)


def redialling(end: End) -> bool:
    return [(each.remote_cluster_id, each.attempts > 0) for each in end.do(redials)] == [(1, True)]


@contextmanager
def redial_without_answer(pair: Pair) -> Iterator[tuple[ChildEnd, ChildEnd]]:
    """The decoder has lost its link and dials the prompt, which is stopped meanwhile."""
    assert isinstance(pair.prompt, ChildEnd)
    assert isinstance(pair.decoder, ChildEnd)
    with frozen(pair.prompt):
        pair.decoder.do(lose, 1)
        wait_until(lambda: redialling(pair.decoder))
        yield pair.prompt, pair.decoder


def test_a_redial_is_told_of_and_goes_on_after_an_explicit_link_that_times_out(shm_pair: Pair) -> None:
    shm_pair.start()
    shm_pair.decoder.do(make, "kv", Spec(blocks=True), 1)
    with redial_without_answer(shm_pair) as (prompt, decoder):
        not_linked(decoder, 1, "cluster 1", f"127.0.0.1:{prompt.port} is being dialled again")
        assert decoder.do(links) == {}
        (reconnect,) = decoder.do(redials)
        assert reconnect.address == f"127.0.0.1:{prompt.port}"
        assert decoder.do(link, [info(1, prompt.port)], 200) == (TIMEOUT, [TIMEOUT])
        wait_until(lambda: redialling(decoder))  # it goes on: the user wants the link, too
    wait_until(lambda: both(shm_pair) == BOTH_UP)
    wait_until(lambda: decoder.do(redials) == ())
    bytes_move_both_ways(prompt, decoder)


def test_an_unlink_an_explicit_link_and_finalize_end_a_redial(shm_pair: Pair) -> None:
    shm_pair.start()
    for force in (False, True):
        with redial_without_answer(shm_pair) as (prompt, decoder):
            for _ in range(2):
                assert decoder.do(unlink, [info(1, prompt.port)], 5000, force) == SUCCESS
                assert decoder.do(redials) == ()
            wait_until(lambda: REDIAL not in decoder.do(threads))
        # Whatever the frozen one finds in its backlog when it goes on, no link comes of it.
        wait_until(lambda: prompt.do(links) == {})
        assert decoder.do(links) == {}
        shm_pair.link()
        bytes_move_both_ways(prompt, decoder)
    with redial_without_answer(shm_pair):
        pass
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    assert decoder.do(redials) == ()
    with redial_without_answer(shm_pair):
        decoder.stop()
        assert REDIAL not in decoder.do(threads)


def unlink_in_the_moment_of_a_loss(world: World, peer: int, port: int) -> Any:
    """Unlink, and lose the link after the unlink has looked for redials and before it looks for the link."""
    assert world.dd._engine is not None
    table, me = world.dd._engine.links._table, threading.get_ident()
    original = table.get

    def get(cluster_id: int) -> Any:
        if threading.get_ident() == me and "get" in table.__dict__:
            del table.__dict__["get"]
            lose(world, peer)
            wait_until(lambda: original(peer) is None)
        return original(cluster_id)

    table.get = get  # type: ignore[method-assign]
    return unlink(world, [info(peer, port)])


def test_a_loss_in_the_moment_of_an_unlink_is_not_dialled_again(shm_pair: Pair) -> None:
    shm_pair.start()
    with frozen(shm_pair.prompt):
        assert shm_pair.decoder.do(unlink_in_the_moment_of_a_loss, 1, shm_pair.prompt.port) == SUCCESS
        assert shm_pair.decoder.do(redials) == ()
    wait_until(lambda: both(shm_pair) == ({}, {}))
    shm_pair.link()


def test_a_link_that_the_peer_gave_up_does_not_come_back_by_itself(shm_pair: Pair) -> None:
    """By force, or when it had lost the link already: the redial is refused."""
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    shm_pair.start()
    assert prompt.do(unlink, [info(2)], 5000, True) == SUCCESS
    wait_until(lambda: both(shm_pair) == ({}, {}) and decoder.do(redials) == ())
    shm_pair.link()
    was = decoder.do(link_number, 1)
    decoder.do(lose, 1)  # linked explicitly since: forgiven
    comes_back(shm_pair, was)
    with frozen(decoder):
        prompt.do(lose, 2)
        wait_until(lambda: prompt.do(links) == {})
        assert prompt.do(unlink, [info(2, 1)]) == SUCCESS
    wait_until(lambda: decoder.do(links) == {} and decoder.do(redials) == ())
    assert both(shm_pair) == ({}, {})
    shm_pair.link()


# --- another incarnation, and none ------------------------------------------------------------------------------------


@pytest.fixture
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    with one_family(getattr(request, "param", "shm")) as family:
        yield family


def born(family: Family) -> ChildEnd:
    return family.born("PROMPT", 1)


@pytest.fixture
def decoder(family: Family) -> ChildEnd:
    end = family.born("DECODER", 2, extra=PATIENT)
    end.do(make, "kv", Spec(blocks=True), 1)
    return end


@pytest.mark.parametrize("cluster_id", [1, 9])
def test_an_address_without_a_listener_is_tried_on_until_another_incarnation_listens_there(
    family: Family, decoder: ChildEnd, cluster_id: int
) -> None:
    prompt = born(family)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    prompt.do(finalize)  # the process goes on: nothing but its silence tells
    # An address without a listener is tried on.
    wait_until(lambda: [each.attempts >= 2 for each in decoder.do(redials)] == [True])
    (reconnect,) = decoder.do(redials)
    assert "refused" in reconnect.reason
    not_linked(decoder, 1, "attempts, the last attempt: link to 127.0.0.1", "refused")
    other = family.born("PROMPT", cluster_id, port=prompt.port)
    wait_until(lambda: decoder.do(redials) == (), 20)
    assert decoder.do(links) == {}, "nothing has asked for a link to the new one"
    assert other.do(links) == {}
    not_linked(decoder, 1, "link_clusters makes the link")
    assert decoder.do(link, [info(cluster_id, prompt.port)]) == SUCCESS


def test_r22_a_restarted_peer_is_linked_at_once_although_its_end_has_not_been_seen(
    family: Family, decoder: ChildEnd
) -> None:
    for wanted in (1, None):
        first = born(family)
        assert decoder.do(link, [info(1, first.port)]) == SUCCESS
        # The process is only stopped: no end of stream, no pidfd tells anything.
        with frozen(first):
            second = born(family)
            assert decoder.do(link, [info(wanted, second.port)]) == SUCCESS
            bytes_move_both_ways(second, decoder)
        wait_until(lambda end=first: end.do(links) == {})  # type: ignore[misc]
        assert decoder.do(unlink, [info(1, second.port)]) == SUCCESS


def kill_and_link_again(world: World, pid: int, port: int) -> Any:
    """The news of the end may not have been read when the other process is dialled."""
    os.kill(pid, signal.SIGKILL)
    return link(world, [info(1, port)])


def test_r22_a_link_in_the_moment_of_the_kill_is_never_already_link(family: Family, decoder: ChildEnd) -> None:
    first = born(family)
    assert decoder.do(link, [info(1, first.port)]) == SUCCESS
    for _ in range(4):
        second = born(family)
        assert decoder.do(kill_and_link_again, first.pid, second.port) == SUCCESS
        family.kill(first)
        bytes_move_both_ways(second, decoder)
        first = second


def test_a_silent_but_linked_peer_is_already_link(shm_pair: Pair) -> None:
    shm_pair.start(extra=PATIENT)
    with frozen(shm_pair.prompt), silent_port() as silent:
        for port in (shm_pair.prompt.port, silent):
            assert shm_pair.decoder.do(link, [info(1, port)], 500) == (ALREADY, [ALREADY])
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)


def test_a_redial_in_a_storm_of_losses_links_and_unlinks_leaves_one_truth(tcp_pair: Pair) -> None:
    pair = tcp_pair
    pair.start()
    for number in range(15):
        loser, peer = (pair.decoder, 1) if number % 2 else (pair.prompt, 2)
        with suppress(NotLinked):
            loser.do(lose, peer)
        if number % 3 == 1:
            assert pair.decoder.do(link, [info(1, pair.prompt.port)]) in (SUCCESS, (ALREADY, [ALREADY]))
            wait_until(lambda: both(pair) == BOTH_UP)
        elif number % 3 == 2:
            assert pair.decoder.do(unlink, [info(1, pair.prompt.port)]) == SUCCESS
            assert (pair.decoder.do(links), pair.decoder.do(redials)) == ({}, ())
            wait_until(lambda: both(pair) == ({}, {}))
            pair.link()
    wait_until(lambda: both(pair) == BOTH_UP)
    bytes_move_both_ways(pair.prompt, pair.decoder)


def test_a_forked_child_redials_nothing_and_its_parent_goes_on(family: Family) -> None:
    prompt, forker = born(family), family.born("DECODER", 2)
    assert forker.do(link, [info(1, prompt.port)]) == SUCCESS
    with frozen(prompt):
        forker.do(lose, 1)
        wait_until(lambda: redialling(forker))
        assert forker.do(fork_and_look) == "not initialized"
    wait_until(lambda: (prompt.do(links), forker.do(links)) == BOTH_UP)
    bytes_move_both_ways(prompt, forker)
    family.kill(forker)  # a fork ends threads of other libraries, too


def fork_and_look(world: World) -> str:
    """Return what a forked child finds: no thread, no link, nothing initialised."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        found = "?"
        try:
            names = [thread.name for thread in threading.enumerate() if "reconnect" in thread.name]
            world.dd.statistics()
            found = f"a live object, {names}"
        except RuntimeError as error:
            found = "not initialized" if "not initialized" in str(error) and not names else str(error)
        finally:
            os.write(into, found.encode())
            os._exit(0)
    os.close(into)
    os.waitpid(child, 0)
    with os.fdopen(out, "rb") as pipe:
        return pipe.read().decode()
