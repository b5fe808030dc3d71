"""The transport nixl with agents that move nothing: who decides that a link uses it, and what a peer's requests and
answers may cost. No NIXL is needed."""

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NoReturn
from unittest import mock

import msgspec
import numpy as np
import pytest

from faults.fuzz.nixl import TAG, StillAgent, ask, serving
from llm_datadist._deadline import Deadline
from llm_datadist._memory.exports import NON_POOL
from llm_datadist._native import Plan, plan_row
from llm_datadist._native.lane_engine import CHANGED, LOST, TORN
from llm_datadist._native.public_call import public_call, put_off
from llm_datadist._transport.connection import Transfer
from llm_datadist._transport.moves import MoveReply
from llm_datadist._transport.nixl.bindings import NixlFailed
from llm_datadist._transport.nixl.messages import (
    Address,
    Ask,
    Done,
    Moved,
    NixlRefused,
    Ready,
    encode,
    read_answer,
    read_request,
)
from llm_datadist._transport.nixl.transport import NixlConnection, NixlTransport, common_fabric
from llm_datadist._transport.transport import Context, Meeting
from llm_datadist._transport.users import why_other_user
from llm_datadist.errors import DeadlineExceeded, LinkRefused, LLMStatusCode, PeerLost, ProtocolError
from llm_datadist.testing.scene import tensors_over
from tests.support.linking import has_ipv6
from tests.support.moves import wait_until


def in_time(call: Callable[..., object], *arguments: object) -> bool:
    """Call it in a thread of its own; return False if it has not ended in 30 seconds."""
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    thread.join(30)
    return not thread.is_alive()


@pytest.mark.parametrize(
    ("mine", "theirs", "asked", "authenticated", "used"),
    [
        ("tcp", "tcp", True, False, "tcp"),
        ("tcp", "tcp", False, True, ""),
        ("rdma", "tcp", False, True, ""),
        ("tcp", "rdma", True, False, "tcp"),
        ("rdma", "rdma", False, False, ""),
        ("rdma", "rdma", False, True, "rdma"),
        ("rdma", "rdma", True, False, "rdma"),
        ("", "tcp", True, True, ""),
    ],
)
def test_a_peer_never_chooses_nixl_over_tcp_or_without_credentials_for_this_end(
    mine: str, theirs: str, asked: bool, authenticated: bool, used: str
) -> None:
    transport = object.__new__(NixlTransport)
    transport.fabric, transport.why_not, transport.asked = mine, "not here", asked
    meeting = Meeting({"nixl": transport}, mock.Mock(device=None), "nixl", authenticated, bytes(16), dialled=False)
    meeting.hear({"nixl": theirs.encode()}, None, bytes(16), "the peer", 1)
    if used:
        assert meeting.choose().name == "nixl"
        assert common_fabric(mine, theirs) == used
    else:
        with pytest.raises(LinkRefused, match=r"not nixl: (this side does not ask for it|not here)"):
            meeting.choose()
    meeting.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize(("listen", "dial"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def test_nobody_but_the_users_that_are_admitted_is_at_the_other_end(listen: str, dial: str) -> None:
    if ":" in listen and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    script = (
        "import os, socket, sys; os.setuid(54321); near = socket.socket(int(sys.argv[1]))\n"
        "near.connect((sys.argv[2], int(sys.argv[3]))); near.recv(1)"
    )
    families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in (listen, dial)]
    with socket.create_server((listen, 0), family=families[0], dualstack_ipv6=listen == "::") as listener:
        port = listener.getsockname()[1]
        arguments = [str(int(families[1])), dial, str(port)]
        with subprocess.Popen([sys.executable, "-c", script, *arguments]) as other:
            stranger, _ = listener.accept()
            with stranger:
                assert why_other_user(stranger, frozenset()).startswith("the peer runs as uid 54321, this process as")
                assert why_other_user(stranger, frozenset({54321})) == ""
            assert other.wait(60) == 0
        with socket.create_connection((dial, port)) as near, listener.accept()[0] as far:
            assert (why_other_user(near, frozenset()), why_other_user(far, frozenset())) == ("", "")
            near.close()  # then the kernel shows root
            assert why_other_user(far, frozenset()).startswith("the user of the peer is unknown")


MOVING = threading.Event()


class NamedAgent(StillAgent):
    """An agent with a name of its own."""

    def __init__(self, fabric: str, *, progress: bool, pools: object = ()) -> None:
        super().__init__(fabric, progress=progress, pools=pools)
        self.name = secrets.token_hex(8)


class SlowAgent(NamedAgent):
    """An agent whose bytes do not move until they are given up."""

    def move(self, *arguments: Any) -> None:
        MOVING.set()
        while True:
            arguments[4]()
            time.sleep(1e-3)


class ExhaustedAgent(StillAgent):
    """An agent without memory for what is received."""

    def receive(self, *_: object) -> NoReturn:
        raise MemoryError


class FailingAgent(StillAgent):
    """An agent that NIXL fails."""

    cover = mock.Mock(side_effect=NixlFailed("NIXL_ERR_BACKEND"))


class Owner:
    """The owner's end of a connection, and what it has answered."""

    def __init__(self, connection: NixlConnection) -> None:
        self.connection, self.server = connection, connection.server
        self.push_receiver = connection.server.push_receiver
        self.answers: list[bytes] = []

    def hear(self, *requests: Ask | Done) -> None:
        for request in requests:
            self.server.on_request(encode(request), self.answers.append)

    def said(self, count: int = 1) -> list[Ready | Moved | NixlRefused]:
        """Wait for so many answers; return all."""
        wait_until(lambda: len(self.answers) >= count)
        return [read_answer(each) for each in self.answers]


@contextmanager
def owner(agent: type[StillAgent] = StillAgent) -> Iterator[Owner]:
    MOVING.clear()
    with serving(agent) as connection:
        yield Owner(connection)


PUSH, PUSHED = ask(write=True), Done(1, good=True)
BUSY = int(LLMStatusCode.LLM_LINK_BUSY) & 0xFFFFFFFF


def test_a_peer_that_asks_faster_than_it_is_served_is_refused_and_then_served_again() -> None:
    large = Address("receiver", 1, bytes(1 << 20), "1")
    with owner(SlowAgent) as end:
        end.hear(*(msgspec.structs.replace(ask(move), receiver=large) for move in range(1, 100)))
        refused = end.said(0)
        assert 30 < len(refused) < 40  # 64 MiB are kept
        assert all(isinstance(each, NixlRefused) and each.code == BUSY for each in refused)
        with pytest.raises(ProtocolError, match="64 MiB of requests wait already"):
            end.hear(*[PUSHED] * 1000)
        end.server.quiesce(TAG)
        end.said(99)
        wait_until(lambda: not end.server.waiting_bytes)  # the last answer may come after that
        end.hear(ask(1000, write=True))
        wait_until(lambda: any(isinstance(each, Ready) for each in end.said(99)))


def test_a_move_is_granted_once_and_done_once() -> None:
    with owner() as end:
        end.hear(PUSH)
        with pytest.raises(ProtocolError, match="move 1 is asked for twice"):
            end.hear(PUSH)
        end.hear(*[PUSHED] * 3)
        assert [type(each) for each in end.said(4)] == [Ready, Moved, NixlRefused, NixlRefused]


def test_memory_that_was_taken_back_is_refused_and_ends_the_receiver_that_was_written_to() -> None:
    with owner() as end:
        end.hear(PUSH)
        end.said()
        with end.push_receiver.using(lambda: 1.0) as before:
            assert end.push_receiver.users == 1
        end.server.quiesce(TAG)
        with end.push_receiver.using(lambda: 1.0) as after:
            assert (end.push_receiver.users, after is before) == (0, False)
        end.hear(PUSHED)
        refused = end.said(2)[1]
        assert isinstance(refused, NixlRefused)
        assert refused.touched


@pytest.mark.parametrize(
    ("write", "agent", "budget_ms", "taken_back", "code"),
    [
        (False, SlowAgent, 1, False, NixlRefused.OVERDUE),
        (False, SlowAgent, 60_000, True, CHANGED),
        (False, FailingAgent, 60_000, False, LOST),
        (True, StillAgent, 1, False, NixlRefused.OVERDUE),
        (True, StillAgent, 60_000, True, TORN),
    ],
)
def test_the_owner_says_whether_time_memory_or_nixl_ended_a_transfer(
    write: bool, agent: type[StillAgent], budget_ms: int, taken_back: bool, code: int
) -> None:
    with owner(agent) as end:
        end.hear(ask(write=write, budget_ms=budget_ms))
        if taken_back:
            wait_until(lambda: bool(end.answers) or MOVING.is_set())
            end.server.quiesce(TAG)
        refused = end.said()[0]
        if isinstance(refused, Ready):  # a push, whose time was not over before
            wait_until(lambda: not end.server.requests)
            end.hear(PUSHED)
            refused = end.said(2)[1]
    assert isinstance(refused, NixlRefused)
    assert refused.code == code


def test_a_push_whose_receiver_ended_for_the_sake_of_another_is_asked_for_again() -> None:
    with owner(NamedAgent) as end:
        end.hear(PUSH, ask(2, write=True), Done(1, good=False), Done(2, good=True))
        codes = [each.code for each in end.said(4)[2:] if isinstance(each, NixlRefused)]
    assert codes == [LOST, NixlRefused.AGAIN]


def test_a_peer_reads_by_itself_only_where_rdma_keys_hold_it() -> None:
    with owner() as end, pytest.raises(ProtocolError, match="over RDMA only"):
        end.hear(msgspec.structs.replace(ask(), direct=True, receiver=None))


def test_without_remote_access_nothing_is_pushed_and_a_request_after_the_end_of_its_link_holds_no_memory() -> None:
    with owner() as end:
        end.server._writable = False
        end.hear(PUSH)
        (refused,) = end.said()
        assert isinstance(refused, NixlRefused)
        assert (refused.code, refused.touched) == (int(LLMStatusCode.LLM_FEATURE_NOT_ENABLED) & 0xFFFFFFFF, False)
        end.server._writable = True
        end.server.stop()
        end.hear(PUSH)
        assert in_time(end.server.quiesce, TAG)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nothing_waits_for_a_thread_that_has_ended() -> None:
    with owner(ExhaustedAgent) as end:
        end.hear(PUSH)
        assert in_time(end.server.join)
        end.hear(ask(2, write=True))
        assert end.server.requests == {}
        end.push_receiver.users = 0


class CountingAgent(NamedAgent):
    """An agent that counts how often bytes may come in, and knows all tensors."""

    polls = 0

    def receive(self) -> None:
        CountingAgent.polls += 1
        super().receive()

    def covers_any(self, bases: list[int]) -> bool:
        return True


@pytest.mark.parametrize("held", [True, False], ids=["a push that is granted", "a pull that waits"])
def test_memory_is_taken_back_beside_a_pull_of_which_nothing_moves(held: bool) -> None:
    """However long that may take, as its peer says."""
    with owner(SlowAgent) as end:
        context, tags = end.connection.context, iter([TAG, 8] if held else [8, TAG])
        honest = context.owner.on_move

        def grant(*asked: Any) -> MoveReply:
            return replace(honest(*asked), tag=next(tags))

        end.server._context = replace(context, owner=mock.Mock(on_move=grant))
        end.hear(ask(1, write=held, budget_ms=2**62), ask(2, budget_ms=2**62))
        assert MOVING.wait(10)
        assert in_time(end.server.quiesce, TAG)
        if held:
            assert end.push_receiver.users == 0
        assert in_time(end.server.quiesce, 8)
        end.said(2)


def test_a_finalizer_in_the_thread_that_serves_takes_memory_back_and_ends_the_link() -> None:
    """It runs once a request is over, and nothing comes after that it could wait for."""
    seen: list[object] = []
    with owner(CountingAgent) as end:
        end.hear(PUSH)
        (granted,) = end.said()
        assert isinstance(granted, Ready)

        def give_back() -> None:
            end.server.quiesce(TAG)
            seen.append((end.push_receiver.users, end.push_receiver.is_agent(granted.receiver.name)))
            end.connection.abort()
            end.server.join()
            seen.append(end.push_receiver._closed)

        @public_call
        def finalizer(data: bytes) -> None:
            assert put_off(give_back)

        end.server.on_request(encode(ask(2)), finalizer)
        wait_until(lambda: len(seen) == 2)
        assert seen == [(0, False), True]


def test_pushed_bytes_come_in_while_the_owner_waits_for_its_sender() -> None:
    """A push of its own may have it, which ends once the peer, that may wait likewise, lets its bytes come in."""
    with owner(CountingAgent) as end:
        end.hear(PUSH)
        end.said()
        with end.server.push_sender.using(lambda: 1.0):
            end.hear(ask(2))
            wait_until(end.server._queue.empty)
            before = CountingAgent.polls
            wait_until(lambda: CountingAgent.polls > before + 100)
            assert len(end.answers) == 1


def test_the_thread_that_receives_does_not_poll_without_end() -> None:
    queue = mock.Mock(wraps=SimpleQueue())

    def sleeps() -> list[bool]:
        return [bool(given.get("timeout")) for name, _, given in queue.mock_calls if name.startswith("get")]

    with owner() as end:
        end.server._queue = queue
        end.hear(PUSH)
        wait_until(lambda: sum(sleeps()) > 50)
        since = sleeps()[sleeps().index(True) :]
    assert all(since[:50])


def test_a_link_without_its_thread_ends() -> None:
    with owner() as end:
        no_thread = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
        with no_thread, pytest.raises(RuntimeError):
            end.hear(PUSH)
        assert in_time(end.server.quiesce, TAG)
        end.connection.abort()
        assert in_time(end.server.join)
        assert end.server.push_sender._closed


def test_memory_that_a_transfer_uses_is_forgotten_once_it_is_over() -> None:
    with serving(CountingAgent) as connection:
        with connection.server.push_sender.using(lambda: 1.0) as agent:
            assert in_time(connection.server.push_sender.forget, [1])
            assert connection.server.push_sender.is_agent(agent.name)
        assert not connection.server.push_sender.is_agent(agent.name)


def test_memory_that_is_forgotten_at_the_last_moment_of_a_transfer_is_forgotten_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(CountingAgent) as connection:
        slot = connection.server.push_sender
        end_retired = slot._end_retired

        def then_forget() -> None:
            end_retired()
            monkeypatch.setattr(slot, "_end_retired", end_retired)
            assert in_time(slot.forget, [1])

        with slot.using(lambda: 1.0) as agent:
            monkeypatch.setattr(slot, "_end_retired", then_forget)
        assert not slot.is_agent(agent.name)


# The initiator


class Peer:
    """Grants every push and answers what is done by one answer; takes a push that goes on beyond it for given up."""

    def __init__(self, answer: Moved | NixlRefused) -> None:
        self._answer = answer
        self.told: list[object] = []

    def ask(self, link: object, data: bytes, deadline: Deadline) -> bytes:
        if isinstance(request := read_request(data), Ask):
            return encode(Ready(request.move, Address("theirs", 1, b"metadata", "1"), bytes(8), bytes(8)))
        return encode(self._answer)

    def tell(self, link: object, data: bytes) -> None:
        self.told.append(read_request(data))


def push(agent: type[StillAgent], peer: Peer, deadline: Deadline) -> None:
    context = Context(mock.sentinel.no_options, mock.Mock(regions={}), mock.sentinel.nobody, peer)
    with (
        mock.patch("llm_datadist._transport.nixl.slots.Agent", agent),
        NixlConnection(context, "tcp", writable=True) as connection,
    ):
        remote = connection.map(np.array([NON_POOL], np.uint32), np.zeros(1, np.uint64), 64, writable=True)
        plan = Plan(0, 0, 1, plan_row(0, 0, 64), False, 64)
        connection.move(Transfer(plan, tensors_over(np.zeros(64, np.uint8)), remote, None, deadline, True))


def test_the_owner_is_told_of_every_push_that_is_given_up() -> None:
    """Else it keeps its memory for a peer that does not come any more."""
    deadline, peer = Deadline(60_000, cancellable=True), Peer(Moved(""))

    class LateAgent(StillAgent):
        def move(self, *_: object) -> None:
            deadline.cancel()

    with pytest.raises(DeadlineExceeded):
        push(LateAgent, peer, deadline)
    assert peer.told == [Done(1, good=False)]


def test_what_did_not_move_is_no_success_whatever_the_peer_says() -> None:
    with pytest.raises(ProtocolError, match="answered with Moved"):
        push(FailingAgent, Peer(Moved("")), Deadline(60_000))


def test_what_a_peer_says_of_nixl_stays_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    class MovingAgent(StillAgent):
        def move(self, *_: object) -> None:
            """All of it."""

    with pytest.raises(PeerLost, match="at the peer: it failed forged"):
        push(MovingAgent, Peer(NixlRefused(LOST, "it failed\nforged", touched=True)), Deadline(60_000))
    assert "it failed forged" in caplog.text
