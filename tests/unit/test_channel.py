"""The control thread, and what it serves: messages, frames, channels over real sockets, with order, back-pressure,
callers that read their answers, every end."""

from __future__ import annotations

import asyncio
import errno
import gc
import pickle
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import cast, get_args
from unittest.mock import Mock

import msgspec
import pytest

from faults.fuzz.forge import HANDSHAKE, LINK, Forge
from llm_datadist._deadline import Deadline
from llm_datadist._links import messages
from llm_datadist._links.channel import TRANSITIONS, Channel, Event, FrameParser, State, tune
from llm_datadist._links.credentials import Credentials, new_secret
from llm_datadist._links.loop import ControlLoop
from llm_datadist._links.machine import Machine
from llm_datadist._links.messages import FRAME_HEADER, FRAME_LIMIT, Beat, Failed, Ping, UnlinkAck, decode, encode, frame
from llm_datadist._links.tls_session import TlsSession
from llm_datadist._native import Requests, Waiter
from llm_datadist._native.public_call import public_call
from llm_datadist.config import CredentialFiles
from llm_datadist.errors import LLMStatusCode, NotLinked, ProtocolError, StateError
from tests.support.moves import wait_until
from tests.unit.test_tls_session import shaken

CONTROL = "llm-datadist-control"


@pytest.fixture
def control() -> Iterator[ControlLoop]:
    control = ControlLoop()
    control.start()
    yield control
    control.stop()
    assert CONTROL not in [thread.name for thread in threading.enumerate()]


def test_a_loop_without_descriptors_is_not_made_and_leaves_nothing_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asyncio's own loop would warn, and fail to close what it has not."""
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    monkeypatch.setattr(socket, "socketpair", Mock(side_effect=OSError(errno.EMFILE, "no descriptor is left")))
    with pytest.raises(OSError, match="no descriptor"):
        ControlLoop()
    gc.collect()
    assert ignored == []


def test_what_was_accepted_runs_before_the_stop_and_nothing_is_accepted_after(control: ControlLoop) -> None:
    done: list[object] = []

    async def hold() -> None:
        try:
            done.append("begun")
            await asyncio.sleep(600)
        finally:
            done.append("given back")

    for number in range(100):
        control.post(done.append, number)
    control.post(lambda: control.spawn(hold()))
    control.stop()
    assert done == [*range(100), "begun", "given back"], "a coroutine has begun before it is cancelled"
    for refused in (control.post, control.call):
        with pytest.raises(StateError, match="stopped"):
            refused(done.append, 0)
    control.stop()
    ControlLoop().stop()  # one that was never started


@contextmanager
def served(control: ControlLoop, callback: Callable[[], object]) -> Iterator[socket.socket]:
    """Serve one end of a socket pair; yield the other one."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def take_one() -> None:
            ours.recv(1)
            callback()

        control.call(control.serve, ours, take_one)
        yield theirs
        control.call(control.dismiss, ours)
        control.call(control.dismiss, ours)  # once is enough


def test_calls_and_what_is_served_until_it_is_dismissed_run_on_the_control_thread(control: ControlLoop) -> None:
    where: list[str] = []
    assert (control.call(control.inside), control.inside()) == (True, False)
    with pytest.raises(ZeroDivisionError):
        control.call(lambda: 1 // 0)
    with served(control, lambda: where.append(control.call(lambda: threading.current_thread().name))) as theirs:
        theirs.send(b"abc")
        wait_until(lambda: len(where) == 3)
        assert control.call(lambda: 7) == 7
    with served(control, lambda: where.append("another")) as another:  # may have the descriptor of the first
        another.send(b"a")
        wait_until(lambda: len(where) == 4)
    control.call(lambda: None)
    assert where == [CONTROL] * 3 + ["another"]


def test_asyncio_has_its_turn_beside_what_is_served_without_end(control: ControlLoop) -> None:
    turns: list[str] = []

    async def coroutine() -> None:
        await asyncio.sleep(0.001)
        turns.append("timer")

    with served(control, lambda: None) as theirs:

        def feed() -> None:
            while not turns:
                theirs.send(b"x" * 64)

        feeder = threading.Thread(target=feed, daemon=True)
        feeder.start()
        control.post(lambda: control.spawn(coroutine()))
        assert control.call(lambda: 7) == 7
        feeder.join(10)
        assert turns == ["timer"]


def test_asyncio_and_input_have_their_turns_beside_one_that_always_goes_on(control: ControlLoop) -> None:
    turns: list[str] = []
    over = threading.Event()

    def go_on() -> None:
        if not over.is_set():
            control.go_on(go_on)

    async def coroutine() -> None:
        await asyncio.sleep(0.001)
        turns.append("timer")

    with served(control, lambda: turns.append("input")) as theirs:
        control.call(go_on)
        control.post(lambda: control.spawn(coroutine()))
        theirs.send(b"x")
        wait_until(lambda: sorted(turns) == ["input", "timer"])
        over.set()


def test_asyncio_is_not_told_of_what_a_served_callback_has_closed(control: ControlLoop) -> None:
    """Regression: the control thread ended with a KeyError."""
    told: list[int] = []
    ours, theirs = socket.socketpair()

    def close() -> None:
        control.loop.remove_writer(ours)
        ours.close()

    def both_at_once(peer: socket.socket) -> None:
        # The loop finds what asyncio watches first, and what is served, when it looks next.
        control.loop.add_writer(ours, told.append, 1)
        peer.send(b"a")

    with theirs, served(control, close) as peer:
        control.call(both_at_once, peer)
        wait_until(lambda: ours.fileno() == -1)
        assert control.call(lambda: "alive") == "alive"
    assert len(told) <= 1


def test_what_fails_is_logged_and_the_loop_goes_on(control: ControlLoop, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise KeyError("in a coroutine")

    control.post(lambda: 1 // 0)
    control.post(lambda: control.spawn(fail()))
    with served(control, lambda: int("not a number")) as theirs:
        theirs.send(b"a")
        wait_until(lambda: len(caplog.records) == 3)
    assert all(part in caplog.text for part in ("ZeroDivisionError", "in a coroutine", "ValueError"))
    assert {record.name for record in caplog.records} == {"LLM_DATADIST.links"}
    assert control.call(lambda: "alive") == "alive"


# Messages

KINDS = {str(kind.__struct_config__.tag): kind for kind in get_args(messages.AnyMessage)}


@pytest.mark.parametrize("tag", sorted(KINDS))
def test_every_message_survives_the_trip_and_none_is_one_cut_short_or_with_more_behind_it(tag: str) -> None:
    """faults/fuzz feeds what is random or changed."""
    forge, tripped = Forge(1, {tag: (LINK | HANDSHAKE)[tag]}, wrong=0), 0
    for _ in range(60):
        payload = forge.payload()
        with suppress(ProtocolError):
            message = decode(payload)
            assert type(message) is KINDS[tag]
            assert decode(encode(message)) == message
            tripped += 1
        for wrong in (payload[: forge.rng.randrange(len(payload))], payload + forge.rng.randbytes(3)):
            with pytest.raises(ProtocolError):
                decode(wrong)
    assert tripped > 10


def test_all_kinds_are_decoded_and_every_field_up_to_its_limit() -> None:
    bases = messages.Message, messages.Greeting, messages.Numbered
    found = {kind for base in (*bases, messages.Resolved) for kind in base.__subclasses__()}
    assert set(KINDS.values()) == found - {*bases}
    id, u64, same = 2**63 - 1, 2**64 - 1, bytes(16)
    communicator = messages.CommunicatorId("x" * 127, [(u64, 2**32 - 1)] * 4, same, same)
    offers = {f"{number:064}": b"x" * messages.MAX_OFFER for number in range(messages.MAX_OFFERS)}
    features = [f"{number:064}" for number in range(messages.MAX_FEATURES)]
    greeting = (2**32 - 1, 2**32 - 1), features, u64, same, True, id, "x" * 4096, "x" * 64, same, b"x" * 32, offers
    for message in (
        messages.Hello(*greeting, u64, True, same, communicator),
        messages.Resolve(id, True, (-id, u64, u64), -id, id, id),
    ):
        assert decode(encode(message)) == message


VALUES = [["nothing", 1], [], ["beat"], {"type": "beat", "count": 1}, ["beat", True], ["failed", 1, 2, b"x"]]
VALUES += [["release", -1, 0, 0], ["release", 2**63, 0, 0], ["failed", 1, 2, "x" * 4097]]
VALUES += [["resolve", 1, False, [0, -1, 0], 1, 0, 0]]
DEEP = b"\x91" * 200_000
BYTES = [b"", b"\x92\xa4beat\xc7\xff\x01", DEEP, b"\x99\xa8resolved\x01\x01" + DEEP, pickle.dumps(Beat)]
MANY = b"\xdd" + (1 << 17).to_bytes(4, "big") + b"\xc0" * (1 << 17)
#: A Resolved with a large geometry, one with many guards, a Beat with much behind what is known.
BYTES += [b"\x99\xa8resolved\x01\x01" + MANY + b"\x00\xc4\x00\xc4\x00\x90\x00"]
BYTES += [b"\x99\xa8resolved\x01\x01\xc0\x00\xc4\x00\xc4\x00\x95" + b"\x92\x01\x01" * 5 + b"\x00"]
BYTES += [b"\x95\xa4beat\x01\x00\x00" + MANY]
BYTES += [b"HTTP/1.1 400 Bad Request\r\n\r\n"]


@pytest.mark.parametrize("payload", [*BYTES, *map(msgspec.msgpack.encode, VALUES)], ids=lambda value: repr(value[:30]))
def test_what_is_no_message_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)


def test_unknown_elements_at_the_end_are_ignored_up_to_64_kib() -> None:
    behind = b"\xdc" + (60_000).to_bytes(2, "big") + b"\xc0" * 60_000
    assert decode(b"\x95\xa4beat\x01\x00\x00" + behind) == Beat(1)


def test_a_frame_is_length_and_payload_and_its_sender_refuses_one_that_is_too_large() -> None:
    message = Beat(7)
    assert frame(message) == FRAME_HEADER.pack(len(encode(message))) + encode(message)
    large = messages.Resolved(1, 1, msgspec.Raw(b"\xc0"), 0, b"x" * FRAME_LIMIT, b"", [], 0)
    with pytest.raises(ProtocolError, match=f"Resolved of .* at most {FRAME_LIMIT}"):
        frame(large)


# Channels

LARGE = "x" * 4000
PATIENCE_MS = 30_000


def test_a_frame_may_have_as_many_bytes_as_the_limit_and_what_came_before_a_larger_one_is_delivered() -> None:
    """Streams that are cut anywhere: the tests of many threads below."""
    parser, full = FrameParser(), bytes(FRAME_LIMIT)
    parser.feed(FRAME_HEADER.pack(0) + FRAME_HEADER.pack(FRAME_LIMIT) + full + FRAME_HEADER.pack(FRAME_LIMIT + 1))
    assert [parser.take(), parser.take()] == [b"", full]
    for _ in range(2):
        with pytest.raises(ProtocolError, match=f"{FRAME_LIMIT + 1} bytes: at most {FRAME_LIMIT}"):
            parser.take()


class Ends:
    """A channel whose answers are UnlinkAcks, the socket at its other end, and what was reported in which thread."""

    def __init__(
        self,
        control: ControlLoop,
        first: messages.Message | None = None,
        tls: tuple[TlsSession, TlsSession] | tuple[None, None] = (None, None),
    ) -> None:
        self.control, self.tls = control, tls[1]
        self.ours, self.theirs = socket.socketpair()
        for sock in (self.ours, self.theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32768)
        self.theirs.settimeout(20)
        self.requests = Requests()
        self.heard: list[messages.Message] = []
        self.lost: list[str] = []
        self.threads: set[str] = set()
        self.on_message: Callable[[messages.Message], None] = lambda message: None
        self.channel = Channel(control, self.ours, self._message, self._end, self.requests, tls[0])
        if first is not None:
            self.channel.send_first(first)

    def begin(self) -> Ends:
        self.channel.begin()
        wait_until(self.at_rest)
        return self

    def expect(self) -> Waiter:
        return Waiter(self.requests).__enter__()

    def answer(self, *waiters: Waiter) -> None:
        self.say(*map(ack, waiters))

    def begin_to_wait(self, waiter: Waiter, deadline: Deadline | None = None) -> threading.Thread:
        """Wait in a thread; return once that reads the channel, or waits beside another one that does."""
        arguments = waiter, deadline or Deadline(PATIENCE_MS)
        thread = threading.Thread(target=self.channel.wait, args=arguments, name="caller")
        thread.start()
        wait_until(self.led)
        return thread

    def led(self) -> bool:
        return self.channel.being_read

    def at_rest(self) -> bool:
        return not self.channel.being_read

    def ended(self) -> bool:
        return bool(self.lost) and self.ours.fileno() == -1

    def say(self, *said: messages.Message) -> None:
        data = b"".join(map(frame, said))
        self.theirs.sendall(data if self.tls is None else self.tls.encrypt(data))

    def read(self, count: int) -> list[messages.Message]:
        """Read messages at the other end until there are ``count``, or the stream ends."""
        parser, heard = FrameParser(), list[messages.Message]()
        while len(heard) < count and (data := self.theirs.recv(1 + len(heard) % 3000)):
            parser.feed(data)
            heard += map(decode, iter(parser.take, None))
        assert parser.rest() == b""
        return heard

    def _message(self, message: messages.Message) -> None:
        self.threads.add(threading.current_thread().name)
        self.heard.append(message)
        self.on_message(message)

    def _end(self, reason: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.lost.append(reason)
        self.requests.close()

    def close(self) -> None:
        self.channel.close("test over")
        wait_until(self.ended)
        assert len(self.lost) == 1, "the end is told exactly once"
        assert self.threads <= {CONTROL}, "but for answers, callbacks run on the control thread"
        self.theirs.close()


def ack(waiter: Waiter) -> UnlinkAck:
    return UnlinkAck(waiter.number)


def answered(waiter: Waiter) -> bool:
    if waiter.answer is None:
        return False
    assert waiter.done
    assert decode(waiter.answer) == ack(waiter)
    return True


@pytest.fixture
def ends(control: ControlLoop) -> Iterator[Ends]:
    ends = Ends(control).begin()
    yield ends
    ends.close()


@contextmanager
def held(control: ControlLoop) -> Iterator[None]:
    """Hold the control thread, so that all that is said meanwhile is there when it looks."""
    holds, over = threading.Event(), threading.Event()

    def hold() -> None:
        holds.set()
        over.wait(30)

    control.post(hold)
    holds.wait(30)
    yield
    over.set()


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_nothing_is_read_before_the_begin_and_what_came_with_the_handshake_is_first_then(control: ControlLoop) -> None:
    ends = Ends(control, first=Beat(0))
    ends.channel.send(Beat(1))
    waiter = ends.expect()
    stream = frame(Beat(5)) + frame(ack(waiter)) + frame(Beat(6))
    ends.theirs.sendall(stream[-20:])
    ends.channel.wait(waiter, Deadline(10))
    assert not answered(waiter)
    ends.channel.begin(stream[:-20])
    ends.channel.wait(waiter, Deadline(PATIENCE_MS))
    assert answered(waiter)
    wait_until(lambda: ends.heard == [Beat(5), Beat(6)])
    ends.channel.send(Beat(2))
    assert ends.read(3) == [Beat(0), Beat(1), Beat(2)]
    ends.close()


def test_frames_of_several_threads_never_interleave_whatever_the_reader_does(ends: Ends) -> None:
    per_thread, threads = 150, 8

    def talk(number: int) -> None:
        for i in range(per_thread):
            ends.channel.send(Failed(i, number, LARGE[: 50 * (i % 70)]))

    with ThreadPoolExecutor(threads) as pool:
        talkers = pool.map(talk, range(threads))
        got = ends.read(per_thread * threads)
        assert [*talkers] == [None] * threads
    assert all(isinstance(m, Failed) and m.text == LARGE[: 50 * (m.id % 70)] for m in got)
    for number in range(threads):
        assert [m.id for m in got if isinstance(m, Failed) and m.code == number] == list(range(per_thread))


def test_a_peer_that_reads_nothing_at_all_is_given_up_above_the_bound(ends: Ends) -> None:
    message, sent = Failed(0, 0, LARGE), 0
    while not ends.channel.reason:
        ends.channel.send(message)
        sent += 1
    assert (15 << 20) < sent * len(LARGE) < (18 << 20)
    wait_until(ends.ended)
    with pytest.raises(NotLinked) as caught:
        ends.channel.send(message)
    assert caught.value.status_code is LLMStatusCode.LLM_NOT_YET_LINK
    assert all("unread" in text for text in (str(caught.value), ends.lost[0]))


@pytest.mark.parametrize("waits", [False, True], ids=["control thread reads", "caller reads"])
@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        (FRAME_HEADER.pack(FRAME_LIMIT + 1) + frame(UnlinkAck(2)), "peer announced a frame of .* at most"),
        (FRAME_HEADER.pack(1) + b"\xc1" + frame(UnlinkAck(2)), "no message of this protocol"),
        (b"GET / HTTP/1.1\r\n\r\n", "at most"),
        (b"", "^the peer closed the connection$"),
        (frame(UnlinkAck(2))[:-1], "^the peer closed the connection inside a frame$"),
        (None, "^the connection broke: Connection reset by peer$"),
    ],
    ids=["size", "content", "protocol", "end between frames", "end inside a frame", "reset"],
)
def test_a_bad_frame_or_the_peers_end_ends_the_channel_after_what_came_before(
    ends: Ends, rest: bytes | None, reason: str, waits: bool
) -> None:
    first, second = ends.expect(), ends.expect()
    threads = [ends.begin_to_wait(second)] if waits else []
    before: list[messages.Message] = [UnlinkAck(1)] if waits else [Beat(1), UnlinkAck(1), Beat(2)]
    ends.theirs.sendall(b"".join(map(frame, before)) + (rest or b""))
    if rest is None:
        ends.channel.send(Beat(0))  # unread, which makes an end a reset
        ends.theirs.close()
    else:
        ends.theirs.shutdown(socket.SHUT_WR)
    join(*threads)
    wait_until(ends.ended)
    assert (answered(first), answered(second)) == (True, False)
    assert ends.heard == ([] if waits else [Beat(1), Beat(2)])
    assert re.search(reason, ends.lost[0])
    with suppress(ConnectionResetError):
        assert rest is None or ends.theirs.recv(1) == b"", "the peer sees the end"
    with pytest.raises(NotLinked, match="closed"):
        ends.channel.send(Beat(1))


def test_an_encrypted_message_that_was_changed_ends_the_channel_after_what_came_before(
    control: ControlLoop, tmp_path: Path
) -> None:
    tls = shaken(Credentials(CredentialFiles(secrets=new_secret(tmp_path / "secrets", "a"))))
    ends = Ends(control, tls=tls).begin()
    first, second, third = (tls[1].encrypt(frame(Beat(number))) for number in range(3))
    ends.theirs.sendall(first)
    wait_until(lambda: ends.heard == [Beat(0)])
    ends.theirs.sendall(second[:-1] + bytes([second[-1] ^ 1]) + third)
    wait_until(ends.ended)
    assert ends.heard == [Beat(0)]
    assert "tampered" in ends.lost[0]
    ends.close()


@pytest.mark.parametrize("late", [True, False], ids=["an answer that nobody took", "read"])
@pytest.mark.parametrize("fails", [True, False])
def test_after_a_bug_or_a_close_nothing_is_delivered(
    ends: Ends, fails: bool, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(message: messages.Message) -> None:
        if fails:
            raise KeyError("a bug")
        ends.channel.close("enough")

    ends.on_message = handle
    other = Ends(ends.control).begin()
    if late:
        ends.requests.late.extend([encode(Beat(2)), encode(Beat(1))])
        ends.control.call(ends.channel.handle_late)
    else:
        ends.say(Beat(1), Beat(2))
    wait_until(ends.ended)
    assert ends.heard == [Beat(1)]
    assert ends.lost == ["internal error: KeyError('a bug')" if fails else "enough"]
    assert ("unexpected error" in caplog.text) == fails
    other.say(Beat(3))
    wait_until(lambda: other.heard == [Beat(3)])
    other.close()


def test_closing_while_many_threads_flush_tells_once_wakes_the_reader_and_leaves_nothing(control: ControlLoop) -> None:
    def talk_until_closed(one: Channel) -> None:
        with suppress(NotLinked):
            while True:
                one.send(Beat(1))

    for _ in range(10):
        ends = Ends(control).begin()
        for i in range(100):
            ends.channel.send(Failed(i, 0, LARGE))
        reader = ends.begin_to_wait(waiter := ends.expect())
        closers = [threading.Thread(target=ends.channel.close, args=(f"reason {i}",)) for i in range(6)]
        talkers = [threading.Thread(target=talk_until_closed, args=(ends.channel,)) for _ in range(2)]
        for thread in [*talkers, *closers]:
            thread.start()
        ends.theirs.recv(20_000)
        join(*closers, *talkers, reader)
        wait_until(ends.ended)
        assert waiter.answer is None
        assert ends.lost[0].startswith("reason ")
        # What the peer gets is a prefix of what was sent, cut anywhere.
        while ends.theirs.recv(65536):
            pass
        ends.close()


def test_a_loop_that_has_stopped_ends_the_channel_at_the_next_use(control: ControlLoop) -> None:
    closed, read, late = Ends(control).begin(), Ends(control).begin(), Ends(control)
    control.stop()
    closed.channel.close("finalized")
    waiter = read.expect()
    read.say(Beat(1))
    read.channel.wait(waiter, Deadline(PATIENCE_MS))
    assert waiter.answer is None
    late.channel.begin()
    stopped = "the control thread has stopped"
    assert [each.lost for each in (closed, read, late)] == [["finalized"], [stopped], [stopped]]
    for each in (closed, read, late):
        assert each.ended()
        each.theirs.close()


# States

#: The next state for each event; "-" if the event is illegal.
ANSWERS = """
        BEGIN INPUT NEXT  DRAINED END   DONE  LEFT  FULL
NEW     TURN  -     -     -       ENDED -     -     -
FREE    -     TURN  -     -       ENDED -     -     -
TURN    -     -     -     -       ENDED FREE  DUE   PAUSED
DUE     -     -     TURN  -       ENDED -     -     -
PAUSED  -     -     -     TURN    ENDED -     -     -
ENDED   -     ENDED -     -       -     ENDED ENDED ENDED
"""


def test_each_event_has_an_answer_in_each_state() -> None:
    head, *rows = (line.split() for line in ANSWERS.strip().splitlines())
    assert (head, [row[0] for row in rows]) == ([each.name for each in Event], [each.name for each in State])
    for state, (_, *answers) in zip(State, rows, strict=True):
        for event, answer in zip(Event, answers, strict=True):
            machine = Machine("channel", TRANSITIONS, state)
            assert machine.can(event) is (answer != "-")
            with nullcontext() if answer != "-" else pytest.raises(StateError, match="is illegal when"):
                machine.fire(event)
            assert machine.state is (state if answer == "-" else State[answer])


# Turns

BEATS = [Beat(number) for number in range(64)]


@pytest.mark.parametrize("flooders", [1, 10])
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_an_honest_message_waits_for_at_most_four_of_each_flooders(
    control: ControlLoop, tmp_path: Path, flooders: int, encrypted: bool
) -> None:
    credentials = Credentials(CredentialFiles(secrets=new_secret(tmp_path / "secrets", "a")))
    honest = Ends(control).begin()
    floods = [Ends(control, tls=shaken(credentials) if encrypted else (None, None)).begin() for _ in range(flooders)]
    waits: dict[int, Counter[int]] = {}
    waited: list[int] = []

    def heard_from(flooder: int, message: messages.Message) -> None:
        for each in waits.values():
            each[flooder] += 1
        if flooder == 0 and message in BEATS[1::8]:
            waits[message.count] = Counter()
            honest.say(message)

    for flooder, ends in enumerate(floods):
        ends.on_message = partial(heard_from, flooder)
    honest.on_message = lambda message: waited.append(max(waits.pop(cast("Beat", message).count).values(), default=0))
    with held(control):
        for ends in floods:
            ends.say(*BEATS)
    wait_until(lambda: len(waited) == 8 and all(len(ends.heard) == 64 for ends in floods))
    assert max(waited) <= 4
    assert all(ends.heard == BEATS for ends in floods), "each once, in order"
    for ends in (honest, *floods):
        wait_until(ends.at_rest)
        ends.close()


def test_a_message_that_takes_long_ends_the_turn(control: ControlLoop) -> None:
    slow, honest, order = Ends(control).begin(), Ends(control).begin(), list[str]()

    def spin(message: messages.Message) -> None:
        order.append("slow")
        if message == Beat(0):
            honest.say(Beat(0))
        until = time.perf_counter() + 0.001
        while time.perf_counter() < until:
            pass

    slow.on_message = spin
    honest.on_message = lambda message: order.append("honest")
    slow.say(*BEATS[:8])
    wait_until(lambda: len(order) == 9)
    assert order.index("honest") == 1
    for ends in (slow, honest):
        ends.close()


def test_what_came_before_the_end_is_handled_in_turns_before_it(ends: Ends) -> None:
    with held(ends.control):
        ends.say(*BEATS)
        ends.theirs.shutdown(socket.SHUT_WR)
    wait_until(ends.ended)
    assert ends.heard == BEATS


def test_a_caller_gets_an_answer_that_is_behind_the_frames_of_many_turns(ends: Ends) -> None:
    waiter = ends.expect()
    thread = ends.begin_to_wait(waiter)
    ends.say(*BEATS[:32], ack(waiter), *BEATS[32:])
    join(thread)
    assert answered(waiter)
    wait_until(lambda: len(ends.heard) == 64)
    assert ends.heard == BEATS
    wait_until(ends.at_rest)


def test_a_peer_that_reads_nothing_is_not_served_until_it_reads_even_what_has_come(ends: Ends) -> None:
    answers = [Failed(number, 0, LARGE) for number in range(32)]

    def answer(message: messages.Message) -> None:
        for each in answers:
            ends.channel.send(each)

    ends.on_message = answer
    ends.say(*BEATS)
    wait_until(lambda: ends.channel.state is State.PAUSED)
    assert len(ends.heard) < 32
    assert ends.read(64 * 32) == answers * 64
    assert ends.heard == BEATS
    wait_until(ends.at_rest)


def test_a_channel_that_ends_between_two_turns_handles_nothing_more_and_is_closed(ends: Ends) -> None:
    def close_after_this_turn(message: messages.Message) -> None:
        if message == BEATS[0]:
            ends.control.post(ends.channel.close, "enough")

    ends.on_message = close_after_this_turn
    ends.say(*BEATS)
    wait_until(ends.ended)
    ends.control.call(lambda: None)
    assert ends.lost == ["enough"]
    assert ends.heard == BEATS[: len(ends.heard)]
    assert 1 <= len(ends.heard) <= 4


def test_tune_sets_what_every_control_socket_has() -> None:
    with socket.socket() as sock:
        tune(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000


def test_the_caller_that_reads_hands_answers_to_others_and_those_it_leaves_behind_get_theirs_too(ends: Ends) -> None:
    """A frame that is no answer goes to the control thread, in order with all that follows."""
    for _ in range(20):
        waiters = [ends.expect() for _ in range(8)]
        threads = [ends.begin_to_wait(waiter) for waiter in waiters]
        ends.answer(waiters[3], waiters[2], waiters[0])
        join(threads[0], threads[2], threads[3])
        left = [waiters[number] for number in (7, 6, 5, 4, 1)]
        assert not any(map(answered, left))
        ends.answer(*left)
        join(*threads)
        assert all(map(answered, waiters))
        wait_until(ends.at_rest)
    waiter = ends.expect()
    thread = ends.begin_to_wait(waiter)
    request = Ping(waiter.number)  # the peer's numbers are its own
    ends.say(Beat(1), request, ack(waiter), Beat(3), UnlinkAck(2**40), Beat(4))
    join(thread)
    assert answered(waiter)
    wait_until(lambda: len(ends.heard) == 5)
    # The control thread also gets an answer that no caller waits for.
    assert ends.heard == [Beat(1), request, Beat(3), UnlinkAck(2**40), Beat(4)]


def test_many_callers_and_other_frames_at_once_that_come_in_pieces_cut_anywhere(ends: Ends) -> None:
    callers, rounds, sending = 6, 100, threading.Lock()

    def call(caller: int) -> None:
        for number in range(caller * rounds, (caller + 1) * rounds):
            waiter = ends.expect()
            stream = b"".join(map(frame, (Beat(2 * number), ack(waiter), Beat(2 * number + 1))))
            cut = number % len(stream)
            with sending:
                ends.theirs.sendall(stream[:cut])
                ends.theirs.sendall(stream[cut:])
            ends.channel.wait(waiter, Deadline(PATIENCE_MS))
            assert answered(waiter)

    with ThreadPoolExecutor(callers) as threads:
        list(threads.map(call, range(callers)))
    wait_until(lambda: len(ends.heard) == 2 * callers * rounds)
    beats = [message.count for message in ends.heard if isinstance(message, Beat)]
    assert sorted(beats) == list(range(2 * callers * rounds)), "each once"
    assert all(first + 1 == second for first, second in zip(beats[::2], beats[1::2], strict=True)), "in order"
    assert ends.requests.waiting == 0


def test_a_deadline_a_cancellation_and_an_interrupt_end_a_wait_and_nothing_else(ends: Ends) -> None:
    def kill() -> None:
        wait_until(ends.led)
        signal.pthread_kill(main, signal.SIGUSR1)

    handler, main = signal.signal(signal.SIGUSR1, lambda *_: sys.exit()), threading.get_ident()
    try:
        ends.channel.wait(waiter := ends.expect(), Deadline(20))
        assert not answered(waiter)
        assert ends.at_rest()
        later = Deadline(PATIENCE_MS, cancellable=True)
        thread = ends.begin_to_wait(ends.expect(), later)
        later.cancel()
        join(thread)
        assert ends.at_rest()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(kill)
            with pytest.raises(SystemExit):
                ends.channel.wait(ends.expect(), Deadline(PATIENCE_MS))
        wait_until(ends.at_rest)
        ends.answer(waiter)
        ends.say(Beat(1))
        wait_until(lambda: ends.heard == [Beat(1)])
        assert not ends.lost
    finally:
        signal.signal(signal.SIGUSR1, handler)


def test_a_signal_handler_waits_for_an_answer_beside_the_wait_that_it_interrupts(ends: Ends) -> None:
    outer, answers = ends.expect(), list[bool]()

    def handle(*_: object) -> None:
        inner = ends.expect()
        ends.answer(inner)
        ends.channel.wait(inner, Deadline(PATIENCE_MS))
        answers.append(answered(inner))
        ends.answer(outer)

    def kill() -> None:
        wait_until(ends.led)
        signal.pthread_kill(main, signal.SIGUSR1)

    before, main = signal.signal(signal.SIGUSR1, handle), threading.get_ident()
    try:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(kill)
            public_call(ends.channel.wait)(outer, Deadline(PATIENCE_MS))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (answers, answered(outer)) == ([True], True)
