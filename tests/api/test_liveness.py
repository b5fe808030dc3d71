"""How the death of a peer is noticed where its sockets do not tell, and what must not pass for one (interface R22)."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.ends import ChildEnd
from tests.support.linking import SUCCESS, alone, bytes_move_both_ways, info, link, links, unlink
from tests.support.moves import wait_until
from tests.support.world import World, residue_of, settled_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.covers("llm.PeerTimeout")

TCP = {"llm.Transport": "tcp"}
PATIENT = {"llm.PeerTimeout": "600"}  # nothing in these tests is noticed by missed beats


@pytest.fixture
def killed() -> Iterator[ChildEnd]:
    """A prompt of the test's own, for it to kill."""
    end = ChildEnd("prompt")
    yield end
    end.kill()


@pytest.fixture
def survivor() -> Iterator[ChildEnd]:
    """A decoder that must have nothing left afterwards."""
    end = ChildEnd("decoder")
    before = end.do(residue_of)
    yield end
    end.stop()
    assert end.do(settled_of, before) == before
    end.close()


def fork_and_wait(world: World, *, properly: bool) -> int:
    """Fork a child that outlives its parent: by Python, or by a library that knows nothing of Python."""
    child: int = os.fork() if properly else ctypes.CDLL(None).fork()
    if child == 0:
        # Nothing but system calls: a raw fork has told Python nothing.
        while True:
            signal.pause()
    return child


@pytest.mark.parametrize("properly", [True, False])
def test_r22_a_killed_peer_is_noticed_although_a_child_of_it_lives_on(
    killed: ChildEnd, survivor: ChildEnd, properly: bool
) -> None:
    killed.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=PATIENT)
    survivor.start("DECODER", 2, extra=PATIENT)
    assert survivor.do(link, [info(1, killed.port)]) == SUCCESS
    child = killed.do(_fork, properly)
    try:
        bytes_move_both_ways(killed, survivor)  # the child disturbs nobody
        killed.kill()
        alone(survivor)
    finally:
        os.kill(child, signal.SIGKILL)


def test_r22_over_tcp_beats_tell_what_the_sockets_in_a_forked_child_hide(killed: ChildEnd, survivor: ChildEnd) -> None:
    killed.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=TCP)
    survivor.start("DECODER", 2, extra=TCP | {"llm.PeerTimeout": "1.5"})
    assert survivor.do(link, [info(1, killed.port)]) == SUCCESS
    child = killed.do(_fork, False)  # it holds the link, the lanes and the listener, and the kernel tells nothing
    try:
        bytes_move_both_ways(killed, survivor)
        killed.kill()
        alone(survivor)
        # The listener's port still takes connections; whoever dials it again hears nothing, and says so meanwhile.
        wait_until(lambda: [each.attempts > 0 for each in survivor.do(redials)] == [True])
        assert survivor.do(unlink, [info(1, killed.port)]) == SUCCESS
        assert survivor.do(redials) == ()
    finally:
        os.kill(child, signal.SIGKILL)


def redials(world: World) -> tuple[Any, ...]:
    return world.dd.statistics().redials


def _fork(world: World, properly: bool) -> int:
    return fork_and_wait(world, properly=properly)


def test_a_killed_peer_is_unlinked_with_and_without_force(killed: ChildEnd, survivor: ChildEnd) -> None:
    killed.start("PROMPT", 1, listen_ip_info="127.0.0.1:0")
    survivor.start("DECODER", 2)
    assert survivor.do(link, [info(1, killed.port)]) == SUCCESS
    killed.kill()
    assert survivor.do(unlink, [info(1, killed.port)]) == SUCCESS
    assert survivor.do(unlink, [info(1)], 1000, True) == SUCCESS
    assert survivor.do(links) == {}


def test_a_small_peer_timeout_at_one_end_invents_no_death(killed: ChildEnd, survivor: ChildEnd) -> None:
    killed.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=PATIENT)
    survivor.start("DECODER", 2, extra={"llm.PeerTimeout": "0.6"})
    assert survivor.do(link, [info(1, killed.port)]) == SUCCESS
    number = survivor.do(explained_sequence)
    begun = survivor.do(beats)
    wait_until(lambda: survivor.do(beats) > begun + 15, 20)  # more than two seconds, at its own pace
    assert survivor.do(links) == {1: "ready"}
    assert survivor.do(explained_sequence) == number, "the same link all along"
    bytes_move_both_ways(killed, survivor)


def beats(world: World) -> int:
    assert world.dd._engine is not None
    return world.dd._engine.links._heartbeat._count


def explained_sequence(world: World) -> int:
    assert world.dd._engine is not None
    return world.dd._engine.links.get(1).origin.sequence
