"""Links by rank tables: members that come, fail, differ, die and come back; the arguments of link(); busy ports and
strangers where members meet; loopback_links (interface §3.5, §6.6, B2.3)."""

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, Final

import numpy as np
import pytest
from msgspec import structs

from faults.strangers import Stranger
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMDataDist, LLMRole, LLMStatusCode, RegisterMemStatus
from llm_datadist._links.identity import PeerSecrets
from llm_datadist._links.loop import ControlLoop
from llm_datadist._links.messages import CONTROL_PREAMBLE, CommunicatorId, Refused
from llm_datadist._links.ranktable import PORTS_VARIABLE, RankTable, ports
from llm_datadist._links.retry import RetryQueue
from llm_datadist._transfer.engine import Engine
from llm_datadist.errors import CacheNotFound, LinkRefused, LLMException, NotLinked, ParamError
from llm_datadist.testing import loopback_links
from tests.support import linking, ranks
from tests.support.ends import Call, ChildEnd, LocalEnd
from tests.support.errands import traced
from tests.support.linking import SUCCESS, alone, bytes_move_both_ways, info, link, link_number, links, not_linked
from tests.support.moves import Spec, Use, call, make, moved, picture, refused, same_bytes, show, wait_until
from tests.support.pairs import Pair
from tests.support.probe import Probe
from tests.support.ranks import FAILED, OK, PREPARING, SECONDS, Meeting, drop, explained, host, joined, settle, status
from tests.support.refusals import NONE, RULE, TYPE, UINT64, UNLINKED, Row, Table, bad, refuse
from tests.support.refusals import Spec as Argument
from tests.support.world import World, make_config, residue_of

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


def test_a_member_that_never_calls_fails_in_bounded_time(local_pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
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
def test_r22_a_member_killed_once_met_does_not_count(four: list[ChildEnd], victim: int, comes_back: bool) -> None:
    """Cluster 2 has met the victim; then the victim is killed, and then cluster 4 comes.

    Regression: a communicator became OK with a dead link.
    """
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


def test_a_link_that_is_cut_while_preparing_is_made_again(local_pair: Pair, end: LocalEnd) -> None:
    """Both members live; the third one comes after the link between them was given up by hand.

    Regression: a communicator became OK with a dead link.
    """
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
    """And only after the operation that uses it, not under it.

    Regression: unlink left such a link open for operations.
    """
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
    link_ = ends[0].do(lambda world: world.probe.link(2))
    with ends[0].do(lambda world: world.probe.engine.links.operation(2)):
        dropping = Call(ends[0].do, drop, comm_id)
        wait_until(lambda: link_.state.value == "draining")
        assert dropping.thread.is_alive()
    dropping.result()
    alone(*ends)


@pytest.mark.parametrize("number", [1, 3], ids=["it listens", "it dials"])
def test_finalize_inside_of_link_leaves_nothing(end: LocalEnd, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """finalize is to be alone (interface §11); a caller that breaks the rule gets an error, not a listener for ever.

    Regression: the listener was made after all listeners had ended.
    """
    end.start("MIX", number, **SECONDS)
    communicators, really = end.world.probe.engine.links.communicators, ControlLoop.call

    def called_late(self: ControlLoop, *args: Any) -> Any:
        """The first thing that link() does about its communicator."""
        monkeypatch.setattr(ControlLoop, "call", really)
        communicators.stop()
        return self.call(*args)

    monkeypatch.setattr(ControlLoop, "call", called_late)
    with pytest.raises(LinkRefused, match="finalized"):
        Meeting((1, 3)).join(end)


def test_a_communicator_that_has_failed_is_not_dialled(local_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member with another table comes between listening and dialling.

    Regression: a failure that came before this side began to dial was dialled for ever.
    """
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


@contextlib.contextmanager
def taken(address: str, numbers: list[int], *, listening: bool) -> Iterator[None]:
    """Hold ports; a listening one accepts connections, as the kernel does for it, and never says a word."""
    with contextlib.ExitStack() as stack:
        for number in numbers:
            sock = stack.enter_context(socket.socket())
            # Past connections of that port do not count, but from now on it is taken.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, number))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            if listening:
                sock.listen(64)
        yield


def free_name() -> str:
    """Return the name of a communicator whose ports no other process uses now: tests run in several."""
    for name in (ranks.new_name() for _ in range(100)):
        with contextlib.suppress(OSError), taken("0.0.0.0", ports(name, 1), listening=True):
            return name
    raise AssertionError("no name of a hundred has only free ports")


@pytest.mark.parametrize("busy", ["0.0.0.0", host(0)], ids=["all addresses", "the address"])
def test_busy_ports_cost_only_the_next_one(shm_pair: Pair, busy: str) -> None:
    # A silent stranger costs one attempt: link_total_time / link_retry_count.
    ends, meeting = ranks.start_two(shm_pair, link_retry_count=100), Meeting((1, 2), free_name())
    numbers = ports(meeting.name, 1)
    assert len(set(numbers)) == 8
    with taken(busy, numbers[:2], listening=True), taken(busy, numbers[2:6], listening=False):
        assert settle(ends, meeting.join(*ends)) == [OK, OK]
    bytes_move_both_ways(*ends)


def test_without_a_free_port_link_fails_and_nothing_is_left(end: LocalEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    end.start("MIX", 1)
    name = free_name()
    code = LLMStatusCode.LLM_LINK_FAILED
    arguments = (name, {1: 0, 2: 1}, ranks.table(host(0), host(0)))
    with taken(host(0), ports(name, 1), listening=False):
        parts = [host(0), str(ports(name, 1)[7]), PORTS_VARIABLE]
        refused([end], [], LinkRefused, parts, ranks.join, *arguments, status=code)
    assert end.do(ranks.join, *arguments) == 1
    for text in ("x", "1", "5-4", "0-5", "1-65536", "-", "1-2-3"):
        monkeypatch.setenv(PORTS_VARIABLE, text)
        for members in ({1: 0, 2: 1}, {0: 0, 1: 1}):
            given = "n", members, ranks.table(host(0), host(0))
            refused([end], [], ParamError, [PORTS_VARIABLE, text], ranks.join, *given)


def test_an_exception_in_the_middle_of_link_costs_no_later_link(end: LocalEnd) -> None:
    """One that no call holds back: of ``PyThreadState_SetAsyncExc``, or for want of memory."""

    def fail_inside(frame: FrameType, event: str, _: object) -> None:
        if frame.f_code.co_qualname == "Communicator.__init__":
            sys.settrace(None)
            raise MemoryError("inside of what open calls")

    end.start("MIX", 2)
    arguments = (free_name(), {1: 0, 2: 1}, ranks.table(host(0), host(0)))
    with traced(fail_inside), pytest.raises(MemoryError):
        end.do(ranks.join, *arguments)
    assert end.do(status, end.do(ranks.join, *arguments)) is PREPARING


def test_another_communicator_at_the_first_port_is_passed_by(local_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two communicators of one end whose ports begin alike: the range is so small that they share it."""
    ends = ranks.start_two(local_pair)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        low = probe.getsockname()[1] - 8
    monkeypatch.setenv(PORTS_VARIABLE, f"{low}-{low + 7}")
    waiting = [Meeting((1, 9)).join(ends[0])[0] for _ in range(4)]
    joined(*ends)
    assert {ends[0].do(status, each) for each in waiting} == {PREPARING}


def test_an_address_that_is_not_of_this_host_is_listened_for_on_all_of_them(shm_pair: Pair) -> None:
    """Behind address translation the table names an address that this host does not have."""
    ends = ranks.start_two(shm_pair)
    meeting = Meeting((1, 2), table=ranks.table("192.0.2.1", host(1)))
    meeting.join(ends[0])
    assert _open_port(meeting.name)
    assert ends[0].do(status, 1) is PREPARING


def _open_port(name: str) -> int:
    for number in ports(name, 1):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", number)):
            return number
    raise AssertionError("there is no listener")


#: The stranger's id, what it says of the communicator (None: nothing, as link_clusters does), and the refusal.
STRANGERS: Final[dict[str, tuple[int, dict[str, Any] | None, LLMStatusCode]]] = {
    "another name": (2, {"name": "another"}, LLMStatusCode.LLM_NOT_YET_LINK),
    "no member": (3, {}, LLMStatusCode.LLM_NOT_YET_LINK),
    "ourselves": (1, {}, LLMStatusCode.LLM_NOT_YET_LINK),
    "another idea of the members": (3, {"members": [(1, 0), (3, 1)]}, LLMStatusCode.LLM_NOT_YET_LINK),
    "link_clusters": (2, None, LLMStatusCode.LLM_LINK_FAILED),
}


def test_strangers_at_the_port_cost_their_own_connection_only_and_the_preparation_goes_on(shm_pair: Pair) -> None:
    ends = ranks.start_two(shm_pair)
    meeting = Meeting((1, 2), table=ranks.table("127.0.0.1", "127.0.0.1"))  # where strangers reach them
    digest = RankTable.parse(meeting.table).digest
    said = CommunicatorId(meeting.name, list(meeting.ranks.items()), digest, token=b"t" * 16)
    meeting.join(ends[0])
    port = _open_port(meeting.name)
    for name, (cluster_id, changes, code) in STRANGERS.items():
        with Stranger(port, cluster_id) as stranger:
            communicator = None if changes is None else structs.replace(said, **changes)
            stranger.say(CONTROL_PREAMBLE, stranger.hello(communicator=communicator))
            assert stranger.hear(Refused).code == code, name
            assert stranger.is_hung_up_on()
        assert ends[0].do(status, 1) is PREPARING
    failed = LLMStatusCode.LLM_LINK_FAILED
    assert ends[1].do(link, [info(1, port)]) == (failed, [failed])  # a good end that takes it for another listener
    assert ends[0].do(status, 1) is PREPARING
    with Stranger(port) as garbage, Stranger(port) as silent, Stranger(port) as half:
        garbage.say(b"GET / HTTP/1.1\r\n\r\n")
        assert garbage.is_hung_up_on()
        half.say(CONTROL_PREAMBLE[:5])
        meeting.join(ends[1])
        assert settle(ends, [1, 1]) == [OK, OK]
        # Closed once all are met, whatever strangers are still there.
        wait_until(lambda: not linking.reachable(port), 5)
        assert silent.is_hung_up_on()
    bytes_move_both_ways(*ends)


def test_a_member_that_links_again_and_again_costs_one_greeting_without_its_offers() -> None:
    here, meeting = LLMDataDist(LLMRole.PROMPT, 1), Meeting((1, 2), table=ranks.table("127.0.0.1", "127.0.0.1"))
    here.init(make_config(link_total_time=60))
    here.link(meeting.name, meeting.ranks, meeting.table)
    digest = RankTable.parse(meeting.table).digest
    said = CommunicatorId(meeting.name, list(meeting.ranks.items()), digest, token=b"t" * 16)
    with contextlib.ExitStack() as strangers:
        known, incarnation, port = PeerSecrets(), bytes(range(16)), _open_port(meeting.name)
        for sequence in range(1, 5):  # each replaces the one before, which has not answered yet
            stranger = strangers.enter_context(Stranger(port, 2, incarnation=incarnation, known=known))
            offers = stranger.hello().offers | {"unknown": bytes(8192)}
            stranger.link(sequence=sequence, communicator=said, offers=offers)
        [there] = Probe(here).engine.links.all()
        assert [(each.communicator, each.offers) for each in there.origin.greetings] == [(said, {})]
        here.finalize()


def test_a_listener_of_link_clusters_at_the_port_is_passed_by(shm_pair: Pair) -> None:
    name = ranks.new_name()
    first = ports(name, 1)[0]
    shm_pair.prompt.start("PROMPT", 1, listen_ip_info=f"{host(0)}:{first}", link_total_time=60)
    shm_pair.decoder.start("DECODER", 2, link_total_time=60)
    ends = [shm_pair.prompt, shm_pair.decoder]
    assert settle(ends, Meeting((1, 2), name).join(*ends)) == [OK, OK]
    assert [end.do(links) for end in ends] == [{2: "ready"}, {1: "ready"}]


LATE: Final = Spec(tensors=1, rows=4, blocks=True, blocks_key=BlocksCacheKey(1, 5), memory="private")
ROWS: Final = Spec(tensors=1, rows=4, memory="private")


def test_r16_after_link_memory_is_accessible_unless_told_otherwise_and_true_may_not_be_said(shm_pair: Pair) -> None:
    ends = ranks.start_two(shm_pair, enable_remote_cache_accessible=True, extra={"llm.Transport": "auto"})
    ends[0].do(make, "early", replace(LATE, accessible=True), 1)
    joined(*ends)
    for spec in (replace(LATE, accessible=True), replace(ROWS, accessible=True)):
        refused([ends[0]], [], ParamError, ["remote_accessible", "link()"], make, "late", spec, 1)
    source = ends[0].do(make, "late", LATE, 2)
    ends[0].do(make, "row", replace(ROWS, accessible=False), 3)
    target = ends[1].do(make, "kv", replace(LATE, blocks_key=None, memory="pool"), 4)
    ends[1].do(call, "pull_blocks", BlocksCacheKey(1, 5), Use("kv"), [1, 2], [0, 3])
    same_bytes(ends[1].do(show, "kv"), moved(target, source, [(0, 1), (3, 2)]))
    ends[0].do(ranks.finalize_and_init, make_config())
    ends[0].do(make, "again", replace(LATE, accessible=True), 5)  # nothing was linked since this init


GOOD_TABLE = ranks.table("127.0.0.1", "127.0.0.1")
GOOD: dict[str, Any] = {"comm_name": "n", "cluster_rank_info": {2: 0, 3: 1}, "rank_table": GOOD_TABLE}


def servers(**changes: Any) -> str:
    """Return a table whose first server has these fields."""
    content = json.loads(GOOD_TABLE)
    content["server_list"][0] |= changes
    return json.dumps(content)


def devices(*ranks: Any, **fields: Any) -> str:
    return servers(device=[{"device_id": "0", "rank_id": rank} | fields for rank in ranks])


SPECS: dict[str, Argument] = {
    "comm_name": Argument((1,), (RULE, "{}", "", "\ud800"), (RULE, "128", "x" * 128), (RULE, "NUL", "a\0b")),
    "cluster_rank_info": Argument(
        ([(2, 0), (3, 1)],),
        (TYPE, "{}", {"2": 0, 3: 1}),
        (NONE, "{}", {None: 0, 3: 1}),
        (TYPE, "{}[2]", {2: "0", 3: 1}),
        (NONE, "{}[3]", {2: 0, 3: None}),
        (RULE, "0 members", {}),
        (RULE, "5 members", {2: 0, 3: 1, 4: 2, 5: 3, 6: 4}),
        (RULE, "{}: -1", {-1: 0, 2: 1}),
        (RULE, str(2**64), {2: 0, 2**64: 1}),
        (RULE, "{}[2]: -1", {2: -1, 3: 1}),
        (RULE, "{}[3]", {2: 0, 3: 2**32}),
        (RULE, "[1, 0] are not in ascending", {3: 1, 2: 0}),
        (RULE, "ascending", {3: 0, 2: 0}, {np.int64(2): 0, 3: 1, np.uint8(4): 1}),
        (RULE, "{}", {3: 0, 4: 1}),
    ),
    "rank_table": Argument(({},)),
}
WRONG: list[Row] = [
    bad(RULE, "rank_table", "JSON", rank_table="{"),
    bad(RULE, "rank_table", "JSON", rank_table="[" * 100_000),
    bad(RULE, "rank_table", "list", rank_table="[]"),
    bad(RULE, "rank_table.server_list", rank_table="{}"),
    bad(RULE, "rank_table.server_list", "[]", rank_table='{"server_list": []}'),
    bad(RULE, "rank_table.server_list: dict {'device': []}", rank_table='{"server_list": {"device": []}}'),
    bad(RULE, "rank_table.server_list: str 'a'", rank_table='{"server_list": "a"}'),
    bad(RULE, "rank_table.server_list: int 7", rank_table='{"server_list": 7}'),
    bad(RULE, "server_list[0].device: bool True", rank_table=servers(device=True)),
    bad(RULE, "rank_table.server_list[0]", "int", rank_table='{"server_list": [1]}'),
    bad(RULE, "server_list[0].device[0]", "str", rank_table=servers(device=["0"])),
    bad(RULE, "server_list[0].device[0].rank_id", "'a'", rank_table=devices("a")),
    bad(RULE, "rank_id", "True", rank_table=devices(True)),
    bad(RULE, "rank_id", "-1", rank_table=devices(-1)),
    bad(RULE, "rank_id", "4294967296", rank_table=devices("4294967296")),
    bad(RULE, "device[1].rank_id", "twice", rank_table=devices("0", "0")),
    bad(RULE, "rank_id 0", "cluster 2", rank_table=devices("7")),
    bad(RULE, "server_list[0].host_ip", "a host", rank_table=servers(host_ip="a host")),
    bad(RULE, "server_list[0].host_ip", "int", rank_table=servers(host_ip=1)),
    bad(RULE, "device[0].device_ip", "::g", rank_table=devices("0", device_ip="::g")),
    bad(RULE, "no IP address", "rank 0", rank_table=servers(host_ip="", server_id="0", device=[{"rank_id": "0"}])),
]
#: Several things are wrong: interface R19 says which check comes first.
IN_ORDER: list[Row] = [
    bad(NONE, "comm_name", comm_name=None, cluster_rank_info=None, rank_table=None),
    bad(NONE, "cluster_rank_info", cluster_rank_info=None, rank_table=None),
    bad(RULE, "5 members", cluster_rank_info=dict.fromkeys(range(5), 0), rank_table=None),
    bad(RULE, "-1", cluster_rank_info={-1: 0}, rank_table=None),
    bad(NONE, "rank_table", cluster_rank_info={9: 0}, rank_table=None),
    bad(RULE, "1 members", cluster_rank_info={9: 0}, rank_table="{"),
    bad(RULE, "ascending", cluster_rank_info={9: 1, 8: 0}, rank_table="{"),
    bad(RULE, "this cluster, 2", cluster_rank_info={8: 0, 9: 1}, rank_table="{"),
    bad(RULE, "JSON", cluster_rank_info={2: 0, 9: 1}, rank_table="{"),
]


UNKNOWN: list[Row] = [
    bad(UNLINKED, f"communicator {comm_id}", comm_id=comm_id)
    for comm_id in (0, 1, 2**64 - 1, int(LLMStatusCode.LLM_ALREADY_LINK))
]


def test_r01_r19_a_wrong_argument_of_link_is_refused_in_the_documented_order(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    for call_ in ("unlink", "query_register_mem_status", "explain_communicator"):
        refuse([end], Table(f"dd.{call_}", {}, {"comm_id": UINT64}, *UNKNOWN))
    refuse([end], Table("dd.link", GOOD, SPECS, *WRONG, *IN_ORDER))
    end.do(make, "early", replace(ROWS, accessible=True), 1)  # link() has not been called
    assert end.do(ranks.join, *GOOD.values()) == 1, "no id was used up"


def test_with_the_hixl_backend_all_three_calls_are_feature_not_enabled(end: LocalEnd) -> None:
    end.start("DECODER", 2, listen_ip_info="127.0.0.1:0", transfer_backend="hixl")
    code = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    for function, args in ((ranks.join, GOOD.values()), (drop, [1]), (status, [1])):
        refused([end], [], LLMException, ["link_clusters"], function, *args, status=code)


SPEC = Spec(2, 4, 64, blocks=True, memory="private")
EMPTY = '{"version": "1.0", "status": "completed", "server_count": "0", "server_list": []}'


@pytest.mark.parametrize("rca", [True, False])
def test_link_is_ok_when_it_returns_and_bytes_are_real(end: LocalEnd, rca: bool) -> None:
    end.start("DECODER", 1, enable_remote_cache_accessible=rca)
    here, there = end.world, World("there")
    with loopback_links() as peers:
        for number, rank_table in enumerate((EMPTY, "{}", "", "not even JSON"), start=1):
            comm_id = here.dd.link("link", {1: 0, 2: 1}, rank_table)
            assert (comm_id, here.dd.query_register_mem_status(comm_id)) == (number, OK)
            there.dd = peers[2]
            theirs, ours = (
                make(world, "kv", replace(SPEC, blocks_key=BlocksCacheKey(cluster, 0)), 10 * number + cluster)
                for world, cluster in ((there, 2), (here, 1))
            )
            call(here, "pull_blocks", BlocksCacheKey(2, 0), Use("kv"), [0, 1], [1, 3])
            same_bytes(show(here, "kv"), ours := moved(ours, theirs, [(1, 0), (3, 1)]))
            call(there, "pull_blocks", BlocksCacheKey(1, 0), Use("kv"), [3], [2])
            same_bytes(show(there, "kv"), moved(theirs, ours, [(2, 3)]))
            here.dd.unlink(comm_id)
            assert here.dd.statistics().links == ()


def test_the_members_are_gone_afterwards_and_link_reads_its_table_again(end: LocalEnd) -> None:
    end.start("DECODER", 1)
    with loopback_links({"llm.MemPoolConfig": '{"memory_size": 1048576}'}) as peers:
        for wrong in ({1: 0}, {2: 0, 3: 1}, {2: 1, 1: 0}):
            with pytest.raises(ParamError):
                end.world.dd.link("link", wrong, EMPTY)
        with pytest.raises(TypeError):
            end.world.dd.link("link", {1: 0, 2: 1}, None)  # type: ignore[arg-type]
        assert peers.members == {}
        end.world.dd.link("link", {1: 0, 2: 1, 3: 2, 4: 3}, EMPTY)
        assert sorted(peers.members) == [2, 3, 4]
        assert sorted(each.remote_cluster_id for each in peers[3].statistics().links) == [1, 2, 4]
        assert peers[2].cache_manager.allocate_blocks_cache(CacheDesc(1, [2, 8], DataType.DT_UINT8)).tensor_addrs
        assert LLMDataDist.llm_engine_instance is end.world.dd
        with pytest.raises(KeyError):
            peers[5]
    assert not any(thread.name.startswith("llm-datadist-meet") for thread in threading.enumerate())
    for member in peers.members.values():
        with pytest.raises(RuntimeError, match="not initialized"):
            member.statistics()
    with pytest.raises(ParamError, match="server_list"):
        end.world.dd.link("link", {1: 0, 2: 1}, EMPTY)
    end.do(make, "kv", Spec(blocks=True), 1)
    with pytest.raises(NotLinked):
        end.do(call, "pull_blocks", BlocksCacheKey(2, 0), Use("kv"), [0], [0])


def test_the_newest_loopback_stands_for_all_the_older_one_after_it_and_no_method_is_replaced(end: LocalEnd) -> None:
    end.start("DECODER", 1)
    method = Engine.open_communicator
    with loopback_links() as outer:
        with loopback_links() as inner:
            end.world.dd.unlink(end.world.dd.link("first", {1: 0, 2: 1}, EMPTY))
            assert Engine.open_communicator is method
        end.world.dd.link("second", {1: 0, 3: 1}, EMPTY)
    assert (sorted(inner.members), sorted(outer.members)) == ([2], [3])


def test_r20_ends_that_the_test_made_itself_meet_each_other(end: LocalEnd) -> None:
    other = LocalEnd("other")
    end.start("PROMPT", 1)
    other.start("DECODER", 2)
    with loopback_links() as peers:
        first = end.world.dd.link("pair", {1: 0, 2: 1}, EMPTY)
        assert end.world.dd.query_register_mem_status(first) is RegisterMemStatus.PREPARING
        second = other.world.dd.link("pair", {1: 0, 2: 1}, EMPTY)
        assert settle([end, other], [first, second]) == [OK, OK]
        assert peers.members == {}
        source = end.do(make, "kv", Spec(blocks=True, blocks_key=BlocksCacheKey(1, 0)), 1)
        target = other.do(make, "kv", Spec(blocks=True), 2)
        other.do(call, "pull_blocks", BlocksCacheKey(1, 0), Use("kv"), [1, 2], [5, 0])
        same_bytes(other.do(show, "kv"), moved(target, source, [(5, 1), (0, 2)]))
    other.stop()
