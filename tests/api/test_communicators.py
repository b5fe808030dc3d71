"""link, unlink, query_register_mem_status: rank tables become links, whichever member calls first, and what becomes of
members that are lost before all have come (interface §3.5, B2.3)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist._links.communicators import Communicators
from llm_datadist._links.retry import RetryQueue
from llm_datadist.errors import CacheNotFound, LinkRefused, LLMStatusCode, NotLinked
from tests.support import linking, ranks
from tests.support.background import Call
from tests.support.ends import ChildEnd, LocalEnd
from tests.support.linking import SUCCESS, alone, bytes_move_both_ways, info, link, link_number, links, not_linked
from tests.support.moves import picture, wait_until
from tests.support.ranks import FAILED, OK, PREPARING, SECONDS, Meeting, drop, explained, host, joined, settle, status
from tests.support.world import make_config, residue_of

if TYPE_CHECKING:
    from tests.support.pairs import Pair

pytestmark = pytest.mark.covers("LLMDataDist: link query_register_mem_status unlink explain_communicator")

ALREADY = LLMStatusCode.LLM_ALREADY_LINK


def test_r20_either_member_may_be_first_and_unlink_is_local(pair: Pair) -> None:
    ends = ranks.start_two(pair)
    for comm_id, early, late, hosts in ((1, *ends, (host(0), host(1))), (2, *ends[::-1], (host(0), host(0)))):
        meeting = Meeting((1, 2), table=ranks.table(*hosts))
        assert meeting.join(early) == [comm_id]
        assert early.do(status, comm_id) is PREPARING
        assert "PREPARING" in not_linked(early, late.cluster_id)
        spelled_differently = json.dumps(json.loads(meeting.table), indent=2, sort_keys=True)
        assert spelled_differently != meeting.table
        assert replace(meeting, table=spelled_differently).join(late) == [comm_id]
        assert settle(ends, [comm_id, comm_id]) == [OK, OK]
        for end, peer in (ends, ends[::-1]):
            assert end.do(links) == {peer.cluster_id: "ready"}
            there = end.do(linking.explain, peer.cluster_id)
            assert (there.transport, there.remote_cluster_id) == (pair.transport, peer.cluster_id)
            assert end.do(explained, comm_id).waiting_for == ()
        bytes_move_both_ways(*ends)
        early.do(drop, comm_id)
        alone(*ends)
        assert late.do(status, comm_id) is OK, "until it unlinks itself"
        not_linked(late, early.cluster_id)
        with pytest.raises(NotLinked, match=f"communicator {comm_id}"):
            early.do(status, comm_id)
        late.do(drop, comm_id)


def _warned(caplog: pytest.LogCaptureFixture, reason: str) -> bool:
    return any(reason in record.getMessage() for record in caplog.records if record.levelname == "WARNING")


def test_a_member_that_never_calls_is_failed_in_bounded_time_with_the_reason_and_the_same_may_be_tried_again(
    local_pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    ends = ranks.start_two(local_pair, link_total_time=1)
    here = ends[0]
    meetings = {missing: Meeting((1, missing)) for missing in (9, 0, 2)}
    ids = [meeting.join(here)[0] for meeting in meetings.values()]
    assert settle([here] * 3, ids, 10) == [FAILED] * 3
    for comm_id, missing in zip(ids, meetings, strict=True):
        told = here.do(explained, comm_id)
        assert told.waiting_for == (missing,)
        assert f"cluster {missing} did not join within 1 s" in told.reason
        wait_until(partial(_warned, caplog, told.reason))  # the status changes before the line is written
        assert "did not join" in not_linked(here, missing)
        assert here.do(status, comm_id) is FAILED, "for good"
    # The same name again, while the failed one is still there.
    again = meetings[2].join(*ends)
    assert again == [4, 1]
    assert settle(ends, again) == [OK, OK]
    bytes_move_both_ways(*ends)
    for comm_id in ids:
        here.do(drop, comm_id)
    assert [each.comm_id for each in here.do(picture).communicators] == [4]


SHM, TCP = {"llm.Transport": "shm"}, {"llm.Transport": "tcp"}
#: What differs between members: settings, members and table of the decoder, and what is said.
DIFFERENCES: Final[dict[str, tuple[dict[str, Any], dict[int, int], dict[str, Any], str]]] = {
    "members": ({}, {1: 0, 2: 1, 3: 2}, {}, "cluster_rank_info differs: {1: 0, 2: 1"),
    "ranks": ({}, {1: 1, 2: 3}, {}, "cluster_rank_info differs"),
    "table": ({}, {1: 0, 2: 1}, {"version": "1.2"}, "rank_table differs: digest"),
    "rca": ({"enable_remote_cache_accessible": True}, {1: 0, 2: 1}, {}, "EnableRemoteCacheAccessible differs"),
    "transport": ({"extra": TCP}, {1: 0, 2: 1}, {}, "llm.Transport differs: shm at the peer, tcp here"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_members_that_do_not_mean_the_same_fail_and_say_what_differs(shm_pair: Pair, name: str) -> None:
    settings, members, fields, text = DIFFERENCES[name]
    # Only for another transport is the time waited for: another attempt may find another one.
    seconds = {"link_total_time": 2 if name == "transport" else 60}
    shm_pair.prompt.start("PROMPT", 1, **({"extra": SHM} | seconds))
    shm_pair.decoder.start("DECODER", 2, **({"extra": SHM} | seconds | settings))
    ends, communicator, hosts = (shm_pair.prompt, shm_pair.decoder), ranks.new_name(), [host(0)] * 4
    ids = [
        ends[0].do(ranks.join, communicator, {1: 0, 2: 1}, ranks.table(*hosts)),
        ends[1].do(ranks.join, communicator, members, ranks.table(*hosts, **fields)),
    ]
    assert settle(ends, ids) == [FAILED, FAILED]
    reasons = [end.do(explained, comm_id).reason for end, comm_id in zip(ends, ids, strict=True)]
    assert text in reasons[1]
    for reason in reasons if name != "transport" else []:
        assert all(part in reason for part in (text, "cluster 1", "cluster 2")), reason
    assert [end.do(links) for end in ends] == [{}, {}]


def test_members_that_never_come_do_not_hold_up_one_that_does(shm_pair: Pair) -> None:
    ends = ranks.start_two(shm_pair)
    for missing in range(100, 130):
        for end in ends:
            Meeting((end.cluster_id, missing)).join(end)
    # Those that are dialled: more than there are threads.
    dead = [Meeting((1, 2), table=ranks.table(host(2), host(3))).join(ends[1])[0] for _ in range(40)]
    assert joined(*ends) == [31, 71]
    bytes_move_both_ways(*ends)
    assert {ends[1].do(status, each) for each in dead} == {PREPARING}


def test_four_processes_in_one_communicator_are_linked_pairwise(four: list[ChildEnd]) -> None:
    for cluster_id, end in enumerate(four, 2**63 + 1):
        end.start("MIX", cluster_id, **SECONDS)
    members = tuple(end.cluster_id for end in four)
    meeting = Meeting(members, table=ranks.table(*(host(number) for number in range(4))))
    assert meeting.join(four[2], four[0], four[3]) == [1] * 3
    wait_until(lambda: len(four[0].do(links)) == 2)
    assert four[0].do(status, 1) is PREPARING
    assert "PREPARING" in not_linked(four[0], four[2].cluster_id), "linked, but the communicator is not ready"
    meeting.join(four[1])
    assert settle(four, [1] * 4) == [OK] * 4
    for number, first in enumerate(four):
        assert sorted(first.do(links)) == sorted({*members} - {first.cluster_id})
        for second in four[number + 1 :]:
            bytes_move_both_ways(first, second)
    four[3].do(drop, 1)
    wait_until(lambda: all(len(end.do(links)) == 2 for end in four[:3]))
    bytes_move_both_ways(four[0], four[1])


def test_r21_unlink_and_finalize_end_a_preparation_and_the_same_may_be_tried_again(shm_pair: Pair) -> None:
    ends = ranks.start_two(shm_pair, link_total_time=2)
    meeting = Meeting((1, 2))
    before = [end.do(picture) for end in ends]
    for end in ends:
        end.do(drop, meeting.join(end)[0])
        assert end.do(picture).communicators == ()
    # The next one waits in vain.
    ids = meeting.join(ends[0])
    assert settle(ends[:1], ids) == [FAILED]
    ends[0].do(drop, ids[0])
    assert [end.do(picture) for end in ends] == before
    joined(*ends)
    Meeting((1, 77)).join(ends[0])
    for end in ends:
        end.do(ranks.finalize_and_init, make_config(extra=SHM, **SECONDS))
        assert end.do(picture).communicators == ()
        with pytest.raises(NotLinked):
            end.do(status, 1)
    assert meeting.join(*ends) == [1, 1], "ids begin anew"
    assert settle(ends, [1, 1]) == [OK, OK]
    bytes_move_both_ways(*ends)


def test_communicators_with_one_member_have_ids_of_their_own_and_the_last_one_keeps_the_link(tcp_pair: Pair) -> None:
    ends = ranks.start_two(tcp_pair)
    # Calls with the very same arguments find each other pairwise, also while none is ready.
    same = Meeting((1, 2))
    assert [same.join(*ends) for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    meetings = [Meeting((1, 2)) for _ in range(40)]
    for end, order in zip(ends, (meetings, meetings[::-1]), strict=True):
        for meeting in order:
            meeting.join(end)
    for end in ends:
        assert settle([end] * 43, range(1, 44)) == [OK] * 43
    assert [end.do(links) for end in ends] == [{2: "ready"}, {1: "ready"}]
    for gone in ([1], [43], range(3, 43)):  # the oldest, the newest
        for end in ends:
            for comm_id in gone:
                end.do(drop, comm_id)
        bytes_move_both_ways(*ends)
    ends[0].do(drop, 2)
    alone(*ends)


def test_link_clusters_and_communicators_share_a_link_and_each_keeps_it_for_itself(shm_pair: Pair) -> None:
    prompt, decoder = ends = shm_pair.prompt, shm_pair.decoder
    prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=SHM, **SECONDS)
    decoder.start("DECODER", 2, extra=SHM, **SECONDS)
    shm_pair.link()
    before = [end.do(linking.explain, peer) for end, peer in zip(ends, (2, 1), strict=True)]
    joined(*ends)
    assert [end.do(linking.explain, peer) for end, peer in zip(ends, (2, 1), strict=True)] == before, "the same link"
    for end in ends:
        end.do(drop, 1)
    bytes_move_both_ways(*ends)
    there = [info(1, prompt.port)]
    assert decoder.do(linking.unlink, there) == SUCCESS
    alone(*ends)
    # The other way round: link_clusters comes to the link of a communicator, and unlink_clusters ends it.
    assert joined(*ends) == [2, 2]
    assert decoder.do(link, there) == (ALREADY, [ALREADY])
    assert decoder.do(linking.unlink, there) == SUCCESS
    alone(*ends)
    assert [end.do(status, 2) for end in ends] == [OK, OK]
    not_linked(decoder, 1)
    assert decoder.do(link, there) == SUCCESS
    for end in ends:
        end.do(drop, 2)
    bytes_move_both_ways(*ends)


def test_link_clusters_claims_a_link_whose_communicator_is_not_ready(four: list[ChildEnd]) -> None:
    """Two of three members are linked; link_clusters makes that link usable, and keeps it when the rest fails."""
    for cluster_id, end in enumerate(four[:3], 1):
        end.start("MIX", cluster_id, listen_ip_info="127.0.0.1:0", **SECONDS)
    listening, dialling, third = four[:3]
    meeting, there = Meeting((1, 2, 3)), [info(1, listening.port)]
    meeting.join(listening, dialling)
    wait_until(lambda: all(end.do(links) for end in (listening, dialling)))
    not_linked(dialling, 1)
    assert dialling.do(link, there) == SUCCESS
    assert dialling.do(link, there) == (ALREADY, [ALREADY])
    dialling.do(drop, 1)
    assert dialling.do(links) == {1: "ready"}
    with pytest.raises(CacheNotFound):
        dialling.do(linking.pull_from, 1)
    was = dialling.do(link_number, 1)
    # At the other end the communicator fails, and its link with it: the one that link_clusters made is dialled again.
    replace(meeting, table=ranks.table(*[host(0)] * 3, version="1.2")).join(third)
    assert settle([listening], [1]) == [FAILED]
    wait_until(lambda: dialling.do(link_number, 1) > was)
    bytes_move_both_ways(listening, dialling)


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.parametrize("victim", [1, 3], ids=["it listened", "it dialled"])
def test_r22_a_member_that_is_killed_after_it_was_met_does_not_count_and_may_come_back(
    four: list[ChildEnd], victim: int, comes_back: bool
) -> None:
    """Cluster 2 has met the victim; then the victim is killed, and then cluster 4 comes."""
    waiting, late, dying, other = four
    seconds = SECONDS if comes_back else {"link_total_time": 2}
    for end, number in ((waiting, 2), (dying, victim), (late, 4), (other, victim)):
        end.start("MIX", number, **seconds)
    meeting = Meeting((victim, 2, 4))
    meeting.join(dying, waiting)
    wait_until(lambda: waiting.do(links) == {victim: "ready"})
    wait_until(lambda: waiting.do(explained, 1).waiting_for == (4,))
    dying.kill()
    four.remove(dying)
    if comes_back:
        ends = [waiting, other, late]
        meeting.join(other, late)
        assert settle(ends, [1, 1, 1]) == [OK] * 3
        for one, two in ((waiting, late), (waiting, other), (late, other)):
            bytes_move_both_ways(one, two)
        return
    alone(waiting)
    wait_until(lambda: victim in waiting.do(explained, 1).waiting_for)
    meeting.join(late)
    wait_until(lambda: waiting.do(explained, 1).waiting_for == (victim,))
    assert settle([waiting, late], [1, 1]) == [FAILED, FAILED]
    assert f"cluster {victim} did not join" in waiting.do(explained, 1).reason


def test_r22_kill_9_of_a_member_that_was_ready_and_its_successor_joins_without_any_unlink(shm_pair: Pair) -> None:
    survivor, victim = shm_pair.prompt, ChildEnd("victim")
    for killed in (3, 0):  # the one that dialled, the one that listened
        survivor.start("MIX", 1, **SECONDS)
        victim.start("MIX", killed, **SECONDS)
        joined(survivor, victim)
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


def test_a_link_that_is_cut_while_preparing_is_made_again(local_pair: Pair, end: LocalEnd) -> None:
    """Both members live; the third one comes after the link between them was given up by hand."""
    ends, third = ranks.start_two(local_pair), end
    third.start("MIX", 3, extra={"llm.Transport": local_pair.transport}, **SECONDS)
    meeting = Meeting((1, 2, 3))
    meeting.join(*ends)
    wait_until(lambda: all(each.do(explained, 1).waiting_for == (3,) for each in ends))
    for here, peer in zip(ends, (2, 1), strict=True):
        was = here.do(link_number, peer)
        assert here.do(linking.unlink, [info(peer)], 5000, True) == SUCCESS
        wait_until(lambda here=here, peer=peer, was=was: here.do(link_number, peer) > was)  # type: ignore[misc]
        wait_until(lambda: all(each.do(explained, 1).waiting_for == (3,) for each in ends))
    meeting.join(third)
    assert settle([*ends, third], [1, 1, 1]) == [OK] * 3
    bytes_move_both_ways(*ends)
    for each in (third, *ends):
        each.stop()


def test_a_link_is_closed_again_when_only_a_communicator_that_is_not_ready_holds_it(local_pair: Pair) -> None:
    """And only after the operation that uses it, not under it."""
    ends = ranks.start_two(local_pair)
    ready_ids = joined(*ends)
    waiting = Meeting((1, 2, 3)).join(ends[0])
    bytes_move_both_ways(*ends)
    ends[0].do(drop, ready_ids[0])
    assert ends[0].do(links) == {2: "ready"}, "the other communicator wants it too"
    assert "PREPARING" in not_linked(ends[0], 2)
    ends[0].do(drop, waiting[0])
    alone(*ends)
    comm_id, _ = joined(*ends)
    link_ = ends[0].do(lambda world: world.dd._engine.links.get(2))
    with link_:
        dropping = Call(ends[0].do, drop, comm_id)
        wait_until(lambda: link_.state.value == "draining")
        assert dropping.thread.is_alive()
    dropping.result()
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
    ends = ranks.start_two(local_pair)
    meeting = Meeting((0, 1, 2))
    really = RetryQueue.add

    def added_late(self: RetryQueue[Any], member: Any) -> bool:
        if member.cluster_id == 0 and member.communicator.expected:
            replace(meeting, table=ranks.table(*[host(0)] * 3, version="1.2")).join(ends[1])
            wait_until(lambda: not member.communicator.preparing)
        return really(self, member)

    monkeypatch.setattr(RetryQueue, "add", added_late)
    assert meeting.join(ends[0]) == [1]
    assert ends[0].do(status, 1) is FAILED
    wait_until(lambda: not any("llm-datadist-meet" in name for name in ends[0].do(residue_of)["threads"]))
    assert ends[0].do(status, 1) is FAILED
