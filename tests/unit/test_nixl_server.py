"""The owner's side of the transport nixl, with agents that move nothing: what a peer's requests may cost."""

from __future__ import annotations

import secrets
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from llm_datadist._native.lanes import CHANGED, LOST, TORN
from llm_datadist._transport.nixl import _AGAIN, _OVERDUE, Ask, Done, Granted, Moved, Refused
from llm_datadist._transport.nixl_agent import Address, NixlFailed
from llm_datadist.errors import LLMStatusCode, ProtocolError
from tests.faults.fuzz.nixl import TAG, StillAgent, answer_of, ask, serving
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist._transport.nixl_agent import Progress

encode = msgspec.msgpack.Encoder().encode


MOVING = threading.Event()


class SlowAgent(StillAgent):
    """An agent whose bytes do not move until they are given up."""

    def move(
        self,
        verb: str,
        peer: str,
        here: NDArray[np.uint64],
        there: NDArray[np.uint64],
        stop: Callable[[], bool],
        progress: Progress,
    ) -> bool:
        """Wait for the order to stop."""
        MOVING.set()
        while not stop():
            time.sleep(1e-3)
        return False


class NamedAgent(StillAgent):
    """An agent with a name of its own."""

    def __init__(self, fabric: str, *, progress: bool, pools: object = ()) -> None:
        super().__init__(fabric, progress=progress, pools=pools)
        self.name = secrets.token_hex(8)


class ExhaustedAgent(StillAgent):
    """An agent in which memory runs out while bytes come in."""

    def receive(self) -> None:
        """End the thread."""
        raise MemoryError


class FailingAgent(StillAgent):
    """An agent that NIXL fails."""

    def cover(self, bases: NDArray[np.uint64], extent: int) -> None:
        """Fail."""
        raise NixlFailed("NIXL_ERR_BACKEND")


def large_ask(move: int) -> Ask:
    """Return a request of 1 MiB."""
    return msgspec.structs.replace(ask(move), receiver=Address("receiver", 1, bytes(1 << 20), "1"))


def _repeat(call: Callable[[], None]) -> None:
    for _ in range(1000):
        call()


def test_a_peer_that_asks_faster_than_it_is_served_is_refused_and_then_served_again() -> None:
    answers: list[bytes] = []
    with serving(SlowAgent) as connection:
        server = connection.server
        for move in range(1, 100):
            server.on_request(encode(large_ask(move)), answers.append)
        refused = [answer_of(each) for each in answers]
        assert 30 < len(refused) < 40  # 64 MiB are kept
        assert {(type(each), each.code) for each in refused if isinstance(each, Refused)} == {
            (Refused, int(LLMStatusCode.LLM_LINK_BUSY) & 0xFFFFFFFF)
        }
        with pytest.raises(ProtocolError, match="64 MiB of requests wait already"):
            _repeat(lambda: server.on_request(encode(Done(1, good=True)), answers.append))
        server.quiesce(TAG)
        wait_until(lambda: len(answers) >= 99)
        asked = len(answers)
        wait_until(lambda: not server._waiting_bytes)
        server.on_request(encode(ask(1000, write=True)), answers.append)
        wait_until(lambda: len(answers) > asked)
        assert isinstance(answer_of(answers[-1]), Granted)


def test_a_move_is_granted_once_and_done_once() -> None:
    answers: list[bytes] = []
    with serving() as connection:
        server = connection.server
        server.on_request(encode(ask(1, write=True)), answers.append)
        with pytest.raises(ProtocolError, match="move 1 is asked for twice"):
            server.on_request(encode(ask(1, write=True)), answers.append)
        for _ in range(3):
            server.on_request(encode(Done(1, good=True)), answers.append)
        wait_until(lambda: len(answers) == 4)
        assert [type(answer_of(each)) for each in answers] == [Granted, Moved, Refused, Refused]


def test_memory_that_was_taken_back_is_refused_and_ends_the_receiver_that_was_written_to() -> None:
    answers: list[bytes] = []
    with serving() as connection:
        server = connection.server
        server.on_request(encode(ask(1, write=True)), answers.append)
        wait_until(lambda: len(answers) == 1)
        with connection._pushed.using(lambda: 1.0) as before:
            assert connection._pushed.users == 1
        server.quiesce(TAG)
        with connection._pushed.using(lambda: 1.0) as after:
            assert (connection._pushed.users, after is before) == (0, False)
        server.on_request(encode(Done(1, good=True)), answers.append)
        wait_until(lambda: len(answers) == 2)
        refused = answer_of(answers[1])
        assert isinstance(refused, Refused)
        assert refused.touched


@pytest.mark.parametrize(
    ("agent", "budget_ms", "taken_back", "code"),
    [(SlowAgent, 1, False, _OVERDUE), (SlowAgent, 60_000, True, CHANGED), (FailingAgent, 60_000, False, LOST)],
)
def test_the_owner_says_whether_time_memory_or_nixl_ended_a_pull(
    agent: type[StillAgent], budget_ms: int, taken_back: bool, code: int
) -> None:
    answers: list[bytes] = []
    MOVING.clear()
    with serving(agent) as connection:
        connection.server.on_request(encode(ask(1, budget_ms=budget_ms)), answers.append)
        if taken_back:
            assert MOVING.wait(10)
            connection.server.quiesce(TAG)
        wait_until(lambda: len(answers) == 1)
    refused = answer_of(answers[0])
    assert isinstance(refused, Refused)
    assert refused.code == code


@pytest.mark.parametrize(("budget_ms", "taken_back", "code"), [(1, False, _OVERDUE), (60_000, True, TORN)])
def test_the_owner_says_whether_time_or_memory_ended_a_push(budget_ms: int, taken_back: bool, code: int) -> None:
    answers: list[bytes] = []
    with serving() as connection:
        server = connection.server
        server.on_request(encode(ask(1, write=True, budget_ms=budget_ms)), answers.append)
        wait_until(lambda: len(answers) == 1)
        if taken_back:
            server.quiesce(TAG)
        if isinstance(answer_of(answers[0]), Granted):  # else its time was over before
            wait_until(lambda: not server._served)
            server.on_request(encode(Done(1, good=True)), answers.append)
            wait_until(lambda: len(answers) == 2)
    refused = answer_of(answers[-1])
    assert isinstance(refused, Refused)
    assert refused.code == code


def test_a_push_whose_receiver_ended_for_the_sake_of_another_is_asked_for_again() -> None:
    answers: list[bytes] = []
    with serving(NamedAgent) as connection:
        for move in (1, 2):
            connection.server.on_request(encode(ask(move, write=True)), answers.append)
        for move, good in ((1, False), (2, True)):
            connection.server.on_request(encode(Done(move, good=good)), answers.append)
        wait_until(lambda: len(answers) == 4)
    codes = [each.code for each in map(answer_of, answers[2:]) if isinstance(each, Refused)]
    assert codes == [LOST, _AGAIN]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nothing_waits_for_a_thread_that_has_ended() -> None:
    answers: list[bytes] = []
    with serving(ExhaustedAgent) as connection:
        connection.server.on_request(encode(ask(1, write=True)), answers.append)
        waiting = threading.Thread(target=connection.server.join, daemon=True)
        waiting.start()
        waiting.join(30)
        assert not waiting.is_alive()
        connection.server.on_request(encode(ask(2, write=True)), answers.append)
        assert connection.server._served == {}
        connection._pushed.users = 0
