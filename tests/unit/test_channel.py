"""Frames and channels: order, back-pressure, bad frames and the end, over real sockets with a reader of the test's."""

from __future__ import annotations

import itertools
import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._links.channel import Channel, FrameParser, tune
from llm_datadist._links.loop import ControlLoop
from llm_datadist._links.messages import FRAME_HEADER, FRAME_LIMIT, Beat, Failed, Message, decode, encode, frame
from llm_datadist.errors import LLMStatusCode, NotLinked, ProtocolError
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LARGE = "x" * 4000

# --- FrameParser ------------------------------------------------------------------------------------------------------


def take_all(parser: FrameParser) -> list[bytes]:
    payloads = []
    while (payload := parser.take()) is not None:
        payloads.append(payload)
    return payloads


@given(st.lists(st.binary(max_size=40), max_size=12), st.lists(st.integers(0, 600)), st.binary(max_size=3))
def test_frames_come_out_however_the_stream_is_split(payloads: list[bytes], cuts: list[int], rest: bytes) -> None:
    stream = b"".join(FRAME_HEADER.pack(len(payload)) + payload for payload in payloads) + rest
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    parser, got = FrameParser(), []
    for begin, end in itertools.pairwise(edges):
        parser.feed(stream[begin:end])
        got += take_all(parser)
    assert got == payloads
    assert parser.rest() == rest


@given(st.integers(0, 100), st.integers(0, 2**32 - 1))
def test_the_limit_holds_and_what_came_before_is_delivered(limit: int, announced: int) -> None:
    parser = FrameParser(limit)
    parser.feed(FRAME_HEADER.pack(0) + FRAME_HEADER.pack(announced))
    assert parser.take() == b""
    if announced <= limit:
        assert parser.take() == (b"" if announced == 0 else None)
        return
    with pytest.raises(ProtocolError, match=f"{announced} bytes: at most {limit}"):
        parser.take()


def test_a_parser_keeps_no_more_than_one_frame_of_a_hostile_stream() -> None:
    parser = FrameParser(10)
    parser.feed(FRAME_HEADER.pack(11))
    for _ in range(2):
        with pytest.raises(ProtocolError):
            parser.take()


# --- Channel ----------------------------------------------------------------------------------------------------------


class Ends:
    """A channel, the socket at its other end, and what the channel reported."""

    def __init__(self, control: ControlLoop, on_message: Callable[[Message], None] | None = None) -> None:
        ours, self.theirs = socket.socketpair()
        for sock in (ours, self.theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32768)
        self.theirs.settimeout(20)
        self.heard: list[Message] = []
        self.lost: list[str] = []
        self.threads: set[str] = set()
        self._on_message = on_message
        self.channel = Channel(control, ours, self._message, self._lost)
        self.channel.begin()

    def _message(self, message: Message) -> None:
        self.threads.add(threading.current_thread().name)
        self.heard.append(message)
        if self._on_message is not None:
            self._on_message(message)

    def _lost(self, reason: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.lost.append(reason)

    def read(self, count: int) -> list[Message]:
        """Read messages at the other end until there are ``count``, or the stream ends."""
        parser = FrameParser()
        messages: list[Message] = []
        while len(messages) < count and (data := self.theirs.recv(65536)):
            parser.feed(data)
            messages += [decode(payload) for payload in take_all(parser)]
        return messages

    def close(self) -> None:
        self.channel.close("test over")
        self.theirs.close()
        wait_until(lambda: bool(self.lost))
        assert len(self.lost) == 1, "the end is told exactly once"
        assert self.threads <= {"llm-datadist-control"}


@contextmanager
def channel(on_message: Callable[[Message], None] | None = None) -> Iterator[Ends]:
    control = ControlLoop()
    control.start()
    ends = Ends(control, on_message)
    try:
        yield ends
        ends.close()
    finally:
        ends.theirs.close()
        control.stop()


def test_messages_come_in_order_and_on_the_control_thread() -> None:
    with channel() as ends:
        sent: list[Message] = [Beat(i) for i in range(1000)]
        ends.theirs.sendall(b"".join(frame(message) for message in sent))
        wait_until(lambda: len(ends.heard) == 1000)
        assert ends.heard == sent


def test_what_came_with_the_handshake_is_delivered_first() -> None:
    control = ControlLoop()
    control.start()
    ours, theirs = socket.socketpair()
    heard: list[Message] = []
    lost: list[str] = []
    one = Channel(control, ours, heard.append, lost.append)
    one.begin(frame(Beat(1)) + frame(Beat(2))[:-3])
    theirs.sendall(frame(Beat(2))[-3:] + frame(Beat(3)))
    wait_until(lambda: len(heard) == 3)
    assert heard == [Beat(1), Beat(2), Beat(3)]
    one.close("enough")
    wait_until(lambda: bool(lost))
    control.stop()
    theirs.close()


def test_frames_of_several_threads_never_interleave_whatever_the_reader_does() -> None:
    with channel() as ends:
        per_thread, threads = 150, 8

        def talk(number: int) -> None:
            for i in range(per_thread):
                ends.channel.send(Failed(i, number, LARGE[: 50 * (i % 70)]))

        talkers = [threading.Thread(target=talk, args=(number,)) for number in range(threads)]
        for talker in talkers:
            talker.start()
        parser = FrameParser()
        got: list[Message] = []
        while len(got) < per_thread * threads:
            parser.feed(ends.theirs.recv(1 + len(got) % 3000))
            got += [decode(payload) for payload in take_all(parser)]
        for talker in talkers:
            talker.join()
        assert parser.rest() == b""
        assert all(isinstance(m, Failed) and m.text == LARGE[: 50 * (m.id % 70)] for m in got)
        for number in range(threads):
            assert [m.id for m in got if isinstance(m, Failed) and m.code == number] == list(range(per_thread))
        assert not ends.lost


def test_a_peer_that_does_not_take_its_answers_is_not_read_from() -> None:
    answers = 2000  # of 4 KB, to as many Beats

    def answer(message: Message) -> None:
        assert isinstance(message, Beat)
        ends.channel.send(Failed(message.count, 0, LARGE))

    with channel(answer) as ends:
        asker = threading.Thread(target=ends.theirs.sendall, args=(b"".join(frame(Beat(i)) for i in range(answers)),))
        asker.start()
        wait_until(lambda: ends.channel._paused)
        taken = len(ends.heard)
        assert taken < answers / 2, "8 MB of answers were asked for, about 1 MiB may wait"
        assert (1 << 20) < len(ends.channel._backlog) < (1 << 20) + 2 * 4096
        got = ends.read(answers)
        asker.join()
        assert [m.id for m in got if isinstance(m, Failed)] == list(range(answers))
        assert len(ends.heard) == answers
        assert not ends.lost


def test_a_peer_that_reads_nothing_at_all_is_given_up_above_the_bound() -> None:
    with channel() as ends:
        message = Failed(0, 0, LARGE)
        while not ends.channel.reason:
            ends.channel.send(message)
        wait_until(lambda: bool(ends.lost))
        with pytest.raises(NotLinked) as caught:
            ends.channel.send(message)
        assert caught.value.status_code is LLMStatusCode.LLM_NOT_YET_LINK
        assert "unread" in str(caught.value)
        assert "unread" in ends.lost[0]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (FRAME_HEADER.pack(FRAME_LIMIT + 1), "at most"),
        (FRAME_HEADER.pack(3) + b"abc", "no message of this protocol"),
        (frame(Beat(1)) + b"GET / HTTP/1.1\r\n\r\n", "at most"),
    ],
)
def test_a_bad_frame_ends_the_channel(data: bytes, reason: str) -> None:
    with channel() as ends:
        ends.theirs.sendall(data)
        wait_until(lambda: bool(ends.lost))
        assert reason in ends.lost[0]
        assert ends.theirs.recv(1) == b"", "the peer sees the end"
        with pytest.raises(NotLinked, match="closed"):
            ends.channel.send(Beat(1))


def test_good_frames_before_a_bad_one_are_delivered_and_none_after() -> None:
    with channel() as ends:
        ends.theirs.sendall(frame(Beat(1)) + frame(Beat(2)) + FRAME_HEADER.pack(1) + b"\xc1" + frame(Beat(3)))
        wait_until(lambda: bool(ends.lost))
        assert ends.heard == [Beat(1), Beat(2)]


@pytest.mark.parametrize("inside", [False, True])
def test_the_peers_end_is_told_with_what_it_left_unsaid(inside: bool) -> None:
    with channel() as ends:
        ends.theirs.sendall(frame(Beat(1)) + (encode(Beat(2))[:3] if inside else b""))
        ends.theirs.close()
        wait_until(lambda: bool(ends.lost))
        assert ends.heard == [Beat(1)]
        assert ends.lost == ["the peer closed the connection" + (" inside a frame" if inside else "")]


def test_a_bug_in_a_handler_ends_its_own_channel_and_not_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    def buggy(message: Message) -> None:
        raise KeyError("a bug")

    control = ControlLoop()
    control.start()
    bad, good = Ends(control, buggy), Ends(control)
    bad.theirs.sendall(frame(Beat(1)) + frame(Beat(2)))
    wait_until(lambda: bool(bad.lost))
    assert "KeyError" in bad.lost[0]
    assert bad.heard == [Beat(1)], "nothing is delivered after the end"
    good.theirs.sendall(frame(Beat(3)))
    wait_until(lambda: good.heard == [Beat(3)])
    assert "unexpected error" in caplog.text
    bad.close()
    good.close()
    control.stop()


def test_closing_from_a_handler_delivers_nothing_more() -> None:
    with channel(lambda message: ends.channel.close("enough")) as ends:
        ends.theirs.sendall(frame(Beat(1)) + frame(Beat(2)))
        wait_until(lambda: bool(ends.lost))
        assert ends.heard == [Beat(1)]
        assert ends.lost == ["enough"]


def test_closing_while_flushing_from_many_threads_tells_once_and_leaves_nothing() -> None:
    for _ in range(20):
        with channel() as ends:
            for i in range(100):
                ends.channel.send(Failed(i, 0, LARGE))
            closers = [threading.Thread(target=ends.channel.close, args=(f"reason {i}",)) for i in range(6)]
            talkers = [threading.Thread(target=talk_until_closed, args=(ends.channel,)) for _ in range(2)]
            for thread in [*talkers, *closers]:
                thread.start()
            ends.theirs.recv(20_000)
            for thread in [*closers, *talkers]:
                thread.join(20)
                assert not thread.is_alive()
            wait_until(lambda: bool(ends.lost))
            assert ends.lost[0].startswith("reason ")
            # What the peer gets is a prefix of what was sent, cut anywhere.
            while ends.theirs.recv(65536):
                pass


def talk_until_closed(one: Channel) -> None:
    with suppress(NotLinked):
        while True:
            one.send(Beat(1))


def test_a_channel_of_a_stopped_loop_ends_at_once() -> None:
    control = ControlLoop()
    control.start()
    ends = Ends(control)
    control.stop()
    ends.threads.clear()
    ends.channel.close("finalized")
    assert ends.lost == ["finalized"]
    assert ends.theirs.recv(1) == b""
    ends.theirs.close()
    late_ours, late_theirs = socket.socketpair()
    late: list[str] = []
    Channel(control, late_ours, lambda message: None, late.append).begin()
    assert late == ["the control thread has stopped"]
    late_theirs.close()


def test_tune_sets_what_every_control_socket_has() -> None:
    with socket.socket() as sock:
        tune(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000


def test_the_first_message_goes_out_before_what_anybody_sends() -> None:
    control = ControlLoop()
    control.start()
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    lost: list[str] = []
    one = Channel(control, ours, lambda message: None, lost.append, first=Beat(0))
    one.send(Beat(1))
    one.begin()
    one.send(Beat(2))
    wanted = b"".join(frame(Beat(i)) for i in range(3))
    got = b""
    while len(got) < len(wanted):
        got += theirs.recv(100)
    assert got == wanted
    one.close("enough")
    wait_until(lambda: bool(lost))
    control.stop()
    theirs.close()
