"""Communicators whose members are lost before all have come, and calls that cross the end of one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist._links.communicators import Communicators
from llm_datadist._links.retry import RetryQueue
from llm_datadist.errors import LinkRefused
from tests.support.ends import ChildEnd, LocalEnd
from tests.support.linking import SUCCESS, alone, bytes_move_both_ways, info, link_number, links, not_linked, unlink
from tests.support.moves import Spec, make, wait_until
from tests.support.ranks import (
    FAILED,
    OK,
    SECONDS,
    Meeting,
    drop,
    explained,
    host,
    joined,
    settle,
    start_two,
    status,
    table,
)

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import End
    from tests.support.world import World


@pytest.mark.parametrize("victim", [1, 3], ids=["it listened", "it dialled"])
def test_r22_kill_9_of_a_member_that_was_met_is_no_success_for_one_that_waits_for_another(
    four: list[ChildEnd], victim: int
) -> None:
    """Cluster 2 has met the victim; then the victim is killed, and then cluster 4 comes."""
    waiting, late, dying, _ = four
    for end, number in ((waiting, 2), (dying, victim), (late, 4), (four[3], 9)):
        end.start("MIX", number, link_total_time=2)
    meeting = Meeting((victim, 2, 4))
    meeting.join(dying, waiting)
    wait_until(lambda: waiting.do(links) == {victim: "ready"})
    wait_until(lambda: victim not in waiting.do(explained, 1).waiting_for)
    dying.kill()
    four.remove(dying)
    alone(waiting)
    wait_until(lambda: victim in waiting.do(explained, 1).waiting_for)
    meeting.join(late)
    wait_until(lambda: waiting.do(explained, 1).waiting_for == (victim,))
    assert settle([waiting, late], [1, 1]) == [FAILED, FAILED]
    assert f"cluster {victim} did not join" in waiting.do(explained, 1).reason


@pytest.mark.parametrize("restarted", [1, 3], ids=["it listened", "it dialled"])
def test_r22_a_member_that_is_killed_while_preparing_may_come_back(four: list[ChildEnd], restarted: int) -> None:
    first, second, third, dying = four
    for end, number in ((first, 2), (second, 4), (dying, restarted)):
        end.start("MIX", number, **SECONDS)
    meeting = Meeting((restarted, 2, 4))
    meeting.join(dying, first)
    wait_until(lambda: first.do(explained, 1).waiting_for == (4,))
    dying.kill()
    four.remove(dying)
    third.start("MIX", restarted, **SECONDS)
    meeting.join(third, second)
    ends = [first, second, third]
    assert settle(ends, [1, 1, 1]) == [OK] * 3
    for one, other in ((first, second), (first, third), (second, third)):
        bytes_move_both_ways(one, other)


def test_r22_kill_9_of_a_member_that_was_ready_and_its_successor_joins_without_any_unlink(shm_pair: Pair) -> None:
    survivor, victim = shm_pair.prompt, ChildEnd("victim")
    for killed in (3, 0):  # the one that dialled, the one that listened
        survivor.start("MIX", 1, **SECONDS)
        victim.start("MIX", killed, **SECONDS)
        joined(survivor, victim)
        survivor.do(make, "kv", Spec(blocks=True), 1)
        victim.kill()
        alone(survivor)
        not_linked(survivor, killed)
        victim = ChildEnd("successor")
        victim.start("MIX", killed, **SECONDS)
        assert joined(survivor, victim) == [2, 1]
        bytes_move_both_ways(survivor, victim)
        survivor.stop()
        victim.stop()
    victim.close()


def test_a_link_that_is_cut_while_preparing_is_made_again(local_pair: Pair) -> None:
    """Both members live; the third one comes after the link between them was given up by hand."""
    ends = start_two(local_pair)
    third = LocalEnd("third")
    third.start("MIX", 3, extra={"llm.Transport": local_pair.transport}, **SECONDS)
    meeting = Meeting((1, 2, 3))
    try:
        meeting.join(*ends)
        wait_until(lambda: all(end.do(explained, 1).waiting_for == (3,) for end in ends))
        for end, peer in zip(ends, (2, 1), strict=True):
            was = end.do(link_number, peer)
            assert end.do(unlink, [info(peer)], 5000, True) == SUCCESS
            made_again(end, peer, was)
            wait_until(lambda: all(each.do(explained, 1).waiting_for == (3,) for each in ends))
        meeting.join(third)
        assert settle([*ends, third], [1, 1, 1]) == [OK] * 3
        bytes_move_both_ways(*ends)
    finally:
        third.stop()


def made_again(end: End, peer: int, was: int) -> None:
    """There is a newer link than number ``was``."""
    wait_until(lambda: end.do(link_number, peer) > was)


def test_a_link_is_closed_again_when_only_a_communicator_that_is_not_ready_holds_it(local_pair: Pair) -> None:
    ends = start_two(local_pair)
    ready_ids = joined(*ends)
    for end in ends:
        end.do(make, "kv", Spec(blocks=True), 1)
    waiting = Meeting((1, 2, 3)).join(ends[0])
    bytes_move_both_ways(*ends)
    ends[0].do(drop, ready_ids[0])
    assert ends[0].do(links) == {2: "ready"}, "the other communicator wants it too"
    assert "PREPARING" in not_linked(ends[0], 2)
    ends[0].do(drop, waiting[0])
    alone(*ends)


@pytest.mark.parametrize("number", [1, 3], ids=["it listens", "it dials"])
def test_finalize_while_link_is_being_called_leaves_nothing(
    end: LocalEnd, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """finalize is to be alone (interface §11); a caller that breaks the rule gets an error, not a listener for ever."""
    end.start("MIX", number, **SECONDS)
    really = Communicators._enter

    def entered_late(self: Communicators, *args: Any) -> Any:
        communicator = really(self, *args)
        self.stop()
        return communicator

    monkeypatch.setattr(Communicators, "_enter", entered_late)
    with pytest.raises(LinkRefused, match="finalized"):
        Meeting((1, 3)).join(end)


def test_a_communicator_that_has_failed_before_this_end_began_to_dial_is_not_dialled(
    local_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member with another table comes between listening and dialling."""
    ends = start_two(local_pair)
    meeting = Meeting((0, 1, 2))
    really = RetryQueue.add

    def added_late(self: RetryQueue[Any], member: Any) -> bool:
        if member.cluster_id == 0 and member.communicator.expected:
            replace(meeting, table=table(*[host(0)] * 3, version="1.2")).join(ends[1])
            wait_until(lambda: not member.communicator.preparing)
        return really(self, member)

    monkeypatch.setattr(RetryQueue, "add", added_late)
    assert meeting.join(ends[0]) == [1]
    assert ends[0].do(status, 1) is FAILED
    wait_until(lambda: not ends[0].do(is_dialling))
    assert ends[0].do(status, 1) is FAILED


def is_dialling(world: World) -> bool:
    engine = world.dd._engine
    assert engine is not None
    dials = engine.links.communicators._dials
    with dials._changed:
        return bool(dials._waiting or dials._current)
