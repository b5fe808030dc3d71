"""Callers that wait for answers read the channel by themselves: who gets what, in which order, and what ends a wait."""

from __future__ import annotations

import itertools
import signal
import socket
import struct
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from llm_datadist._deadline import CancellableDeadline, Deadline
from llm_datadist._links.channel import Channel, Waiter
from llm_datadist._links.loop import ControlLoop
from llm_datadist._links.messages import FRAME_HEADER, Beat, Message, UnlinkAck, frame
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_MS = 30_000
CONTROL = "llm-datadist-control"


class BothEnds:
    """A channel whose answers are Farewells, the socket at its other end, and who was told what in which thread."""

    def __init__(self, control: ControlLoop) -> None:
        self.control = control
        self.ours, self.theirs = socket.socketpair()
        self.theirs.settimeout(20)
        self.waiters: dict[int, Waiter] = {}
        self.heard: list[Message] = []
        self.answered: list[tuple[int, str]] = []
        self.others: set[str] = set()
        self.lost: list[str] = []
        self.channel = Channel(control, self.ours, self._message, self._end, None, self._answer)

    def expect(self, number: int) -> Waiter:
        self.waiters[number] = Waiter()
        return self.waiters[number]

    def begin_to_wait(self, waiter: Waiter, deadline: Deadline) -> threading.Thread:
        """Wait in a thread; return once that reads the channel, or waits beside who does."""
        thread = threading.Thread(target=self.channel.wait, args=(waiter, deadline), name="caller")
        thread.start()
        wait_until(self.led)
        return thread

    def led(self) -> bool:
        return self.channel._reader is not None and not self.channel._watched

    def once_led(self, act: Callable[[], None]) -> threading.Thread:
        """Call ``act`` in a thread once a caller reads the channel."""

        def run() -> None:
            wait_until(self.led)
            act()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def say(self, *messages: Message) -> None:
        self.theirs.sendall(b"".join(map(frame, messages)))

    def _answer(self, message: Message) -> bool:
        if not isinstance(message, UnlinkAck) or (waiter := self.waiters.pop(message.id, None)) is None:
            return False
        self.answered.append((message.id, threading.current_thread().name))
        waiter.wake(message)
        return True

    def _message(self, message: Message) -> None:
        self.others.add(threading.current_thread().name)
        if not self._answer(message):
            self.heard.append(message)

    def _end(self, reason: str) -> None:
        self.others.add(threading.current_thread().name)
        self.lost.append(reason)
        for number in list(self.waiters):
            self.waiters.pop(number).wake(None)

    def files_closed(self) -> bool:
        return self.ours.fileno() == -1 and self.channel._watch.closed

    def at_rest(self) -> bool:
        return not self.channel._role_held and self.channel._watched


@contextmanager
def ends(*, begun: bool = True) -> Iterator[BothEnds]:
    control = ControlLoop()
    control.start()
    both = BothEnds(control)
    if begun:
        both.channel.begin()
        wait_until(both.at_rest)
    try:
        yield both
        both.channel.close("test over")
        wait_until(lambda: bool(both.lost) and both.files_closed())
        assert len(both.lost) == 1, "the end is told exactly once"
        assert both.others <= {CONTROL}, "but for answers, callbacks run on the control thread"
    finally:
        both.theirs.close()
        control.stop()


def test_a_caller_reads_its_answer_by_itself_and_then_leaves_the_channel_to_the_control_thread() -> None:
    with ends() as both:
        for number in range(50):
            waiter = both.expect(number)
            thread = both.begin_to_wait(waiter, Deadline(PATIENCE_MS))
            both.say(UnlinkAck(number))
            thread.join(20)
            assert waiter.answer == UnlinkAck(number)
            assert both.at_rest()
        assert both.answered == [(number, "caller") for number in range(50)]
        both.say(Beat(1))
        wait_until(lambda: both.heard == [Beat(1)])


def test_an_answer_that_is_there_before_anybody_waits_wakes_only_who_prepared_for_it() -> None:
    with ends() as both:
        waiter = both.expect(7)
        both.channel.prepare(waiter)
        both.say(UnlinkAck(7))
        # Two turns of the control thread: it would have read what it is woken for.
        both.control.call(lambda: None)
        both.control.call(lambda: None)
        assert waiter.waiting
        both.channel.wait(waiter, Deadline(PATIENCE_MS))
        assert waiter.answer == UnlinkAck(7)
        assert both.answered == [(7, threading.current_thread().name)]
        assert both.at_rest()


def test_who_prepared_and_asks_nothing_leaves_the_channel_to_the_others() -> None:
    with ends() as both:
        first, second = both.expect(1), both.expect(2)
        both.channel.prepare(first)
        both.channel.prepare(second)  # somebody reads already
        both.channel.forgo(second)
        assert both.led()
        both.say(Beat(1))
        both.channel.forgo(first)
        wait_until(lambda: both.heard == [Beat(1)])
        both.say(UnlinkAck(2), UnlinkAck(1))
        both.channel.wait(first, Deadline(PATIENCE_MS))
        both.channel.wait(second, Deadline(PATIENCE_MS))
        assert (first.answer, second.answer) == (UnlinkAck(1), UnlinkAck(2))
        wait_until(both.at_rest)


def test_what_is_no_answer_goes_to_the_control_thread_in_order_with_all_that_follows() -> None:
    with ends() as both:
        waiter = both.expect(7)
        thread = both.begin_to_wait(waiter, Deadline(PATIENCE_MS))
        both.say(Beat(1), Beat(2), UnlinkAck(7), Beat(3), UnlinkAck(8), Beat(4))
        thread.join(20)
        assert waiter.answer == UnlinkAck(7)
        assert both.answered == [(7, CONTROL)]
        wait_until(lambda: len(both.heard) == 5)
        # An answer that nobody waits for is the control thread's too.
        assert both.heard == [Beat(1), Beat(2), Beat(3), UnlinkAck(8), Beat(4)]
        wait_until(both.at_rest)


def test_answers_for_others_are_handed_to_them_by_who_reads() -> None:
    with ends() as both:
        waiters = [both.expect(number) for number in range(8)]
        threads = [both.begin_to_wait(waiter, Deadline(PATIENCE_MS)) for waiter in waiters]
        both.say(*(UnlinkAck(number) for number in reversed(range(8))))
        for thread in threads:
            thread.join(20)
        assert [waiter.answer for waiter in waiters] == [UnlinkAck(number) for number in range(8)]
        assert [number for number, _ in both.answered] == list(reversed(range(8)))


def test_callers_left_behind_by_who_read_are_served_by_the_control_thread() -> None:
    with ends() as both:
        first, second = both.expect(1), both.expect(2)
        threads = [both.begin_to_wait(waiter, Deadline(PATIENCE_MS)) for waiter in (first, second)]
        both.say(UnlinkAck(1))
        threads[0].join(20)
        assert not threads[0].is_alive()
        assert second.waiting
        both.say(UnlinkAck(2))
        threads[1].join(20)
        assert second.answer == UnlinkAck(2)


def test_many_callers_and_other_frames_at_once() -> None:
    callers, rounds = 6, 100
    with ends() as both:
        wrong: list[object] = []
        numbers = itertools.count()

        def call() -> None:
            for _ in range(rounds):
                number = next(numbers)
                waiter = both.expect(number)
                with sending:
                    both.say(Beat(2 * number), UnlinkAck(number), Beat(2 * number + 1))
                both.channel.wait(waiter, Deadline(PATIENCE_MS))
                if waiter.answer != UnlinkAck(number):
                    wrong.append((number, waiter.answer))

        sending = threading.Lock()
        threads = [threading.Thread(target=call) for _ in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        wait_until(lambda: len(both.heard) == 2 * callers * rounds)
        beats = [message.count for message in both.heard if isinstance(message, Beat)]
        assert sorted(beats) == list(range(2 * callers * rounds)), "each once"
        assert all(first + 1 == second for first, second in zip(beats[::2], beats[1::2], strict=True)), "in order"
        assert sorted(number for number, _ in both.answered) == list(range(callers * rounds))


def test_frames_may_come_in_pieces_cut_anywhere() -> None:
    stream = frame(UnlinkAck(1)) + frame(Beat(5)) + frame(UnlinkAck(2))
    for cut in range(len(stream) + 1):
        with ends() as both:
            first, second = both.expect(1), both.expect(2)
            threads = [both.begin_to_wait(first, Deadline(PATIENCE_MS))]
            both.theirs.sendall(stream[:cut])
            if cut >= len(frame(UnlinkAck(1))):
                threads[0].join(20)
            threads.append(threading.Thread(target=both.channel.wait, args=(second, Deadline(PATIENCE_MS))))
            threads[1].start()
            both.theirs.sendall(stream[cut:])
            for thread in threads:
                thread.join(20)
            assert (first.answer, second.answer) == (UnlinkAck(1), UnlinkAck(2))
            wait_until(lambda: both.heard == [Beat(5)])


@pytest.mark.parametrize("half", [b"", frame(UnlinkAck(1))[:-1]], ids=["between frames", "inside a frame"])
def test_the_peers_end_is_told_by_the_control_thread_and_wakes_who_waits(half: bytes) -> None:
    with ends() as both:
        waiter = both.expect(1)
        thread = both.begin_to_wait(waiter, Deadline(PATIENCE_MS))
        both.theirs.sendall(half)
        both.theirs.shutdown(socket.SHUT_WR)
        thread.join(20)
        assert not thread.is_alive()
        assert waiter.answer is None
        assert both.lost == ["the peer closed the connection" + (" inside a frame" if half else "")]


def test_a_reset_wakes_who_waits() -> None:
    control = ControlLoop()
    control.start()
    listener = socket.create_server(("127.0.0.1", 0))
    both = BothEnds(control)
    both.theirs.close()
    both.ours.close()
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    listener.close()
    both.ours, both.channel = ours, Channel(control, ours, both._message, both._end, None, both._answer)
    both.channel.begin()
    wait_until(both.at_rest)
    thread = both.begin_to_wait(both.expect(1), Deadline(PATIENCE_MS))
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    thread.join(20)
    wait_until(both.files_closed)
    assert both.lost == ["the connection broke: Connection reset by peer"]
    assert both.others == {CONTROL}
    control.stop()


@pytest.mark.parametrize("bad", [FRAME_HEADER.pack(1 << 30), FRAME_HEADER.pack(1) + b"\xc1"], ids=["size", "content"])
def test_a_bad_frame_ends_the_channel_after_the_answers_before_it(bad: bytes) -> None:
    with ends() as both:
        other, waiter = both.expect(1), both.expect(2)
        thread = both.begin_to_wait(waiter, Deadline(PATIENCE_MS))
        both.theirs.sendall(frame(UnlinkAck(1)) + bad + frame(UnlinkAck(2)))
        thread.join(20)
        assert other.answer == UnlinkAck(1)
        assert waiter.answer is None
        assert "peer " in both.lost[0]


def test_a_deadline_and_a_cancellation_end_a_wait_and_nothing_else() -> None:
    with ends() as both:
        waiter = both.expect(1)
        both.channel.wait(waiter, Deadline(20))
        assert waiter.waiting
        assert both.at_rest()
        later = CancellableDeadline(PATIENCE_MS)
        thread = both.begin_to_wait(both.expect(2), later)
        later.cancel()
        thread.join(20)
        assert not thread.is_alive()
        assert both.at_rest()
        both.say(UnlinkAck(2), Beat(1))
        wait_until(lambda: both.heard == [Beat(1)])
        assert not both.lost


def test_closing_from_another_thread_wakes_who_reads() -> None:
    with ends() as both:
        waiter = both.expect(1)
        thread = both.begin_to_wait(waiter, Deadline(PATIENCE_MS))
        both.channel.close("given up")
        thread.join(20)
        assert not thread.is_alive()
        assert waiter.answer is None
        assert both.lost == ["given up"]


def test_nobody_reads_before_the_channel_begins() -> None:
    with ends(begun=False) as both:
        waiter = both.expect(1)
        both.theirs.sendall(frame(UnlinkAck(1))[3:])
        both.channel.wait(waiter, Deadline(10))
        assert waiter.waiting
        both.channel.begin(frame(UnlinkAck(1))[:3])
        both.channel.wait(waiter, Deadline(PATIENCE_MS))
        assert waiter.answer == UnlinkAck(1)


def test_a_loop_that_has_stopped_ends_the_channel_when_a_frame_is_left_to_it() -> None:
    control = ControlLoop()
    control.start()
    both = BothEnds(control)
    both.channel.begin()
    wait_until(both.at_rest)
    control.stop()
    waiter = both.expect(1)
    both.say(Beat(1))
    both.channel.wait(waiter, Deadline(PATIENCE_MS))
    assert waiter.answer is None
    assert both.lost == ["the control thread has stopped"]
    assert both.files_closed()
    both.theirs.close()


class Interrupt(BaseException):
    """What a handler of signals raises."""


def test_an_interrupt_while_nothing_comes_costs_nothing() -> None:
    def interrupt(number: int, where: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.get_ident()
    try:
        with ends() as both:
            killer = both.once_led(lambda: signal.pthread_kill(main, signal.SIGUSR1))
            waiter = both.expect(1)
            with pytest.raises(Interrupt):
                both.channel.wait(waiter, Deadline(PATIENCE_MS))
            killer.join(20)
            wait_until(both.at_rest)
            both.say(Beat(1))
            wait_until(lambda: both.heard == [Beat(1)])
            assert not both.lost
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_while_an_answer_is_handed_over_ends_the_channel() -> None:
    with ends() as both:
        waiter = both.expect(1)

        def interrupted(message: Message) -> bool:
            raise Interrupt

        both.channel._on_answer = interrupted
        peer = both.once_led(lambda: both.say(UnlinkAck(1), UnlinkAck(2)))
        with pytest.raises(Interrupt):
            both.channel.wait(waiter, Deadline(PATIENCE_MS))
        peer.join(20)
        assert both.channel._role_held, "nobody may read what follows"
        wait_until(both.files_closed)
        assert both.lost == ["a caller was interrupted while it read an answer"]
        assert both.heard == []
