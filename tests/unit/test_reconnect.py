"""Dials that are repeated: when an attempt is due, what ends one, and a thread only while there is work."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import Mock

import pytest

from llm_datadist._deadline import Deadline
from llm_datadist._links.channel import Channel
from llm_datadist._links.communicators import Communicator, MemberDial
from llm_datadist._links.handshake import Endpoint
from llm_datadist._links.link import Link, LinkOrigin, Peer
from llm_datadist._links.loop import ControlLoop
from llm_datadist._links.manager import LinkManager
from llm_datadist._links.retry import Reconnect, Reconnector
from llm_datadist._links.versions import Spoken
from llm_datadist._native import readable
from llm_datadist._transport.address import DialledSocket
from llm_datadist._transport.choose import Choice
from llm_datadist._transport.connection import Connection, DataPath, Watch
from llm_datadist.errors import LinkRefused, LLMStatusCode
from tests.support.ends import Call
from tests.support.moves import wait_until

ADDRESS = ("127.0.0.1", 4711)
LONG_MS = 60_000


def lost(cluster_id: int = 7, pidfd: int | None = None, sequence: int = 1) -> Link:
    """Return a link to a process that has ended once ``pidfd`` is readable."""
    own = -1 if pidfd is None else os.dup(pidfd)
    watch = None if pidfd is None else Watch(partial(readable, own), partial(os.close, own))
    connection = Mock(Connection, watch=lambda: watch)
    path = Mock(DataPath, connections=(connection,))
    origin = LinkOrigin(dialled=True, sequence=sequence, peer_sequence=sequence, address=ADDRESS)
    spoken = Spoken(11, frozenset())
    return Link(Peer(cluster_id, bytes(16), 1, "host"), path, Choice("tcp", None, "test"), origin, spoken)


class Attempts:
    """What the reconnector dials, and what comes of it."""

    def __init__(self) -> None:
        self.made: list[Reconnect] = []
        self.linked: set[int] = set()
        self.outcome: Callable[[], None] = lambda: None
        self.reconnector = Reconnector(self.dial, lambda each: each.peer.cluster_id in self.linked)

    def dial(self, reconnect: Reconnect, deadline: Deadline) -> None:
        assert 0 < deadline.remaining() < 60
        self.made.append(reconnect)
        self.outcome()

    def over(self) -> bool:
        return self.reconnector.statistics() == () and not self.reconnector._running


@pytest.fixture
def attempts() -> Iterator[Attempts]:
    attempts = Attempts()
    yield attempts
    attempts.reconnector.stop()
    assert not [each for each in threading.enumerate() if each.name.startswith("llm-datadist-redial")]


def refuse(status: LLMStatusCode = LLMStatusCode.LLM_LINK_FAILED) -> None:
    raise LinkRefused("no such luck", status_code=status)


@contextmanager
def unanswered(attempts: Attempts) -> Iterator[threading.Semaphore]:
    """Attempts go on, until each is given one of the semaphore's answers: it is refused."""
    answers = threading.Semaphore(0)

    def hold() -> None:
        answers.acquire(timeout=60)
        refuse()

    attempts.outcome = hold
    try:
        yield answers
    finally:
        answers.release(1000)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """Let the clock of dials stand still, and return what it shows."""
    for module in ("retry", "communicators"):
        monkeypatch.setattr(f"llm_datadist._links.{module}.time", Mock(monotonic=lambda: 1000.0))
    return 1000.0


def test_the_delay_doubles_up_to_ten_seconds_with_jitter_below_it(now: float) -> None:
    reconnect = Reconnect(lost(), ADDRESS, 0.1)
    shares = []
    for number in range(13):
        seconds, full = reconnect.due - now, min(0.1 * 2**number, 10.0)
        assert full / 2 <= seconds <= full
        shares.append(round(seconds / full, 6))
        reconnect.postpone(0)
    assert len(set(shares)) > 6


def test_a_success_ends_it_and_the_thread_and_a_loss_at_once_goes_on_with_the_back_off(attempts: Attempts) -> None:
    delays = []
    for number in range(1, 5):
        reconnect = attempts.reconnector.begin(lost())
        assert reconnect is not None
        delays.append(reconnect.delay)
        wait_until(attempts.over)
        assert len(attempts.made) == number
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8])


def test_failures_are_tried_again_and_told_in_one_line(attempts: Attempts) -> None:
    attempts.outcome = refuse
    reconnect = attempts.reconnector.begin(lost())
    wait_until(lambda: len(attempts.made) == 2)
    (now,) = attempts.reconnector.statistics()
    assert (now.remote_cluster_id, now.address) == (7, "127.0.0.1:4711")
    story = attempts.reconnector.story(7)
    assert "no such luck" in story
    assert all("\n" not in text and "127.0.0.1:4711" in text for text in (story, repr(reconnect)))
    assert attempts.reconnector.story(8) == ""


def test_what_would_not_change_ends_it_with_one_line(attempts: Attempts, caplog: pytest.LogCaptureFixture) -> None:
    for number, name in enumerate(("LLM_ALREADY_LINK", "LLM_NOT_YET_LINK", "LLM_PARAM_INVALID"), start=1):
        attempts.outcome = partial(refuse, LLMStatusCode[name])
        attempts.reconnector.begin(lost())
        wait_until(attempts.over)
        lines = [record.getMessage() for record in caplog.records if "not dialled again" in record.getMessage()]
        assert (len(lines), len(attempts.made)) == (number, number)
        assert "link_clusters links again" in lines[-1]


def test_a_bug_in_an_attempt_costs_that_cluster_only(attempts: Attempts, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        if attempts.made[-1].peer.cluster_id == 7:
            raise ValueError("a bug")

    attempts.outcome = fail
    attempts.reconnector.begin(lost(7))
    attempts.reconnector.begin(lost(8))
    wait_until(attempts.over)
    assert sorted(each.peer.cluster_id for each in attempts.made) == [7, 8]
    assert "unexpected error" in caplog.text


def test_what_is_linked_ended_or_was_not_dialled_here_is_not_dialled(attempts: Attempts) -> None:
    accepted, ended = lost(), lost()
    accepted.origin.address = None
    ended.end("over", lost=True)
    assert [attempts.reconnector.begin(each) for each in (accepted, ended)] == [None, None]
    assert attempts.over()
    attempts.linked.add(7)
    attempts.reconnector.begin(lost())
    assert attempts.reconnector.statistics() == ()
    wait_until(attempts.over)
    assert attempts.made == []


def test_a_process_that_has_ended_is_dialled_no_more_and_no_descriptor_is_left(attempts: Attempts) -> None:
    open_before = os.listdir("/proc/self/fd")
    told, teller = os.pipe()
    attempts.outcome = refuse
    assert attempts.reconnector.begin(lost(7, told)) is not None
    wait_until(lambda: len(attempts.made) >= 1)
    os.close(teller)  # readable from now on, as a pidfd is
    wait_until(attempts.over)
    assert attempts.reconnector.begin(lost(7, told)) is None
    os.close(told)
    assert os.listdir("/proc/self/fd") == open_before


def test_a_cancelled_redial_makes_no_further_attempt_and_after_a_stop_there_is_none(attempts: Attempts) -> None:
    def made(cluster_id: int) -> int:
        return sum(each.peer.cluster_id == cluster_id for each in attempts.made)

    first = attempts.reconnector.begin(lost(7))
    assert first is not None
    attempts.reconnector.cancel(7)
    attempts.outcome = refuse
    attempts.reconnector.begin(lost(7))
    attempts.reconnector.drop(lambda each: each is first)  # takes no later one of its cluster along
    attempts.reconnector.begin(lost(8))
    wait_until(lambda: {each.peer.cluster_id for each in attempts.made if each is not first} == {7, 8})
    for cluster_id in (7, 7, 99):
        attempts.reconnector.unlink(cluster_id, Deadline(LONG_MS))
    count, wanted = made(7), made(8) + 2
    wait_until(lambda: made(8) >= wanted)
    assert made(7) == count
    attempts.reconnector.stop()
    count = len(attempts.made)
    assert attempts.reconnector.begin(lost()) is None
    assert attempts.reconnector.statistics() == ()
    assert len(attempts.made) == count


def test_silent_peers_are_dialled_side_by_side_and_the_link_lost_last_before_them(attempts: Attempts) -> None:
    with unanswered(attempts) as answers:
        for number in range(100, 124):
            attempts.reconnector.begin(lost(number))
        wait_until(lambda: len(attempts.made) == 8)
        last = attempts.reconnector.begin(lost(7))
        assert last is not None
        wait_until(lambda: time.monotonic() > last.due)
        answers.release()
        wait_until(lambda: len(attempts.made) == 9)
        assert attempts.made[8] is last


def test_after_ten_minutes_a_peer_is_dialled_about_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("llm_datadist._links.retry.time", Mock(monotonic=lambda: now[0]))
    reconnect = Reconnect(lost(), ADDRESS, 0.1)
    while reconnect.due < 1600:
        now[0] = reconnect.due
        reconnect.postpone(0)
        assert reconnect.due - now[0] <= 10
    for _ in range(9):
        now[0] = reconnect.due
        reconnect.postpone(0)
        assert 40 <= reconnect.due - now[0] <= 80


def test_a_cancel_waits_for_the_attempt_that_goes_on_as_long_as_it_may(attempts: Attempts) -> None:
    inside, go = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        go.wait(30)

    attempts.outcome = hold
    attempts.reconnector.begin(lost())
    assert inside.wait(10)
    attempts.reconnector.unlink(7, Deadline(20))
    assert attempts.made[0].cancelled
    assert attempts.reconnector._current == attempts.made, "it was not waited for in vain"
    threading.Timer(0.05, go.set).start()
    attempts.reconnector.unlink(7, Deadline(LONG_MS))
    assert attempts.reconnector._current == []
    wait_until(attempts.over)


def test_a_link_that_is_lost_while_it_is_brought_up_is_dialled_again(attempts: Attempts) -> None:
    """The dialling thread says that it is linked after the control thread has found it lost.

    Regression: the dialling thread dropped the dial that the new loss had begun.
    """

    def lose() -> None:
        attempts.outcome = lambda: None
        attempts.reconnector.begin(second)
        attempts.reconnector.drop_older(second)

    attempts.outcome, second = lose, lost(sequence=2)
    attempts.reconnector.begin(lost())
    wait_until(attempts.over)
    assert [each.sequence for each in attempts.made] == [1, 2]


@pytest.mark.usefixtures("now")
def test_the_dial_of_an_earlier_link_gives_way_to_that_of_a_later(attempts: Attempts) -> None:
    attempts.reconnector.begin(lost())
    second = attempts.reconnector.begin(lost(sequence=2))
    for cluster_id, sequence in ((8, 3), (7, 2)):
        attempts.reconnector.drop_older(lost(cluster_id, sequence=sequence))
        assert attempts.reconnector._waiting == [second]
    attempts.reconnector.drop_older(lost(sequence=3))
    assert attempts.reconnector._waiting == []


def test_an_attempt_for_an_earlier_link_that_goes_on_beside_that_of_a_later_is_not_repeated(attempts: Attempts) -> None:
    """Regression: both were repeated for good, and statistics had the cluster twice."""
    with unanswered(attempts) as answers:
        for number in (1, 2):
            attempts.reconnector.begin(lost(sequence=number))
            wait_until(lambda number=number: len(attempts.made) == number)  # type: ignore[misc]
            assert [each.attempts for each in attempts.reconnector.statistics()] == [1]
        assert attempts.reconnector.begin(lost()) is None, "a thread that notices the first loss late"
        attempts.outcome = refuse
        answers.release(2)
        wait_until(lambda: len(attempts.made) == 5)
        assert [each.sequence for each in attempts.made] == [1, 2, 2, 2, 2]


@pytest.mark.usefixtures("now")
@pytest.mark.parametrize("second", ["loses", "ends", "loses, then the cluster is unlinked"])
def test_a_loss_that_two_threads_notice_is_dialled_again_unless_one_unlinks(
    second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second thread ends the link between two steps of the first, whose link the table has until then.

    Regression: the slower of the two threads dropped the dial of both.
    """
    manager = LinkManager(Mock(ControlLoop), Mock(Endpoint), Mock(max_links=9), {}, Mock(), Mock())
    link, begin, told = lost(), manager._reconnector.begin, []
    link.ready(Mock(Channel))
    manager._table.install(link)

    def begin_beside_another(lost_link: Link) -> Reconnect | None:
        monkeypatch.setattr(manager._reconnector, "begin", begin)
        reconnect = begin(lost_link)
        told.append(manager.reconnects())
        manager.end(lost_link, "noticed by the second", lost=second != "ends")
        if "unlinked" in second:
            manager._table.refuse_reconnects(7)
        return reconnect

    monkeypatch.setattr(manager._reconnector, "begin", begin_beside_another)
    try:
        manager.end(link, "noticed by the first", lost=True)
        assert [len(each) for each in (*told, manager.reconnects())] == [1, 1 if second == "loses" else 0]
    finally:
        manager._reconnector.stop()


def test_the_lost_link_is_not_taken_for_the_one_that_is_dialled() -> None:
    manager = LinkManager(Mock(ControlLoop), Mock(Endpoint), Mock(max_links=9), {}, Mock(), Mock())
    reconnect = Reconnect(lost(), ADDRESS, 0.1)
    for found in ((lost(sequence=2), False), (lost(), True)):
        manager._dial = Mock(return_value=found)  # type: ignore[method-assign]
        manager._reconnect(reconnect, Deadline(LONG_MS))
    manager._dial = Mock(return_value=(lost(), False))  # type: ignore[method-assign]
    with pytest.raises(LinkRefused, match="still ending"):
        manager._reconnect(reconnect, Deadline(LONG_MS))


def member(*, again: bool = False) -> MemberDial:
    return MemberDial(Mock(Communicator, ports={1: [1, 2, 3]}), 1, again=again)


def pauses(crowd: int, now: float) -> list[float]:
    one, waits = member(), []
    for _ in range(40):
        one.postpone(crowd)
        waits.append(one.due - now)
    return waits


def test_a_member_is_dialled_at_once_or_a_little_later_and_never_less_than_twice_a_second(now: float) -> None:
    first, second = member(), member(again=True)
    assert first.due <= now
    assert second.due >= now + 0.4
    waits = pauses(0, now)
    assert waits[0] < 0.1
    assert all(wait < 0.6 for wait in waits)
    assert sorted(waits[:8]) == waits[:8], "less and less often"


def test_many_that_never_come_cost_so_many_attempts_in_all_and_no_more(now: float) -> None:
    """Regression: each was dialled at its own rate, and together they kept a CPU busy."""
    for crowd in (300, 1500, 10_000):
        assert crowd / min(pauses(crowd, now)) < 160


def test_a_dial_that_is_not_connected_yet_ends_when_it_is_hung_up_and_tries_no_other_address() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as stack:
        for _ in range(3):  # the kernel drops what comes after these
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        dialled = DialledSocket([full.getsockname(), full.getsockname()], Deadline(LONG_MS), "test")
        stack.callback(dialled.close)
        dial = Call(dialled.connect, lambda _: None)
        wait_until(lambda: dialled.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\2")  # SYN_SENT
        dialled.hang_up()
        outcome = dial.outcome()
        assert isinstance(outcome, LinkRefused)
        assert "given up" in str(outcome)
