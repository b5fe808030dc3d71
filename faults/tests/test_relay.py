"""The relay: carries faithfully, and does to a stream exactly what a fault says; nothing is left of it."""

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from faults.relay import FAULTS, Fault, Relay, Stream
from llm_datadist._links.messages import CONTROL_PREAMBLE, TLS_PREAMBLE
from llm_datadist._transport.lanes import LANE_PREAMBLE
from tests.support.moves import wait_until
from tests.support.world import residue, settled

DATA = bytes(range(1, 101))
FLIPPED = bytes(byte ^ 0xFF for byte in DATA)

# --- the stream, without a network ------------------------------------------------------------------------------------


def through(*faults: Fault, cuts: int = 1, data: bytes = DATA) -> Stream:
    stream = Stream(faults)
    for first in range(0, len(data), cuts):
        stream.feed(data[first : first + cuts], 0.0)
    return stream


@pytest.mark.parametrize("cuts", [1, 7, 100])
@pytest.mark.parametrize(
    ("fault", "expected", "end"),
    [
        (Fault("drop", at=10, count=5), DATA[:10] + DATA[15:], ""),
        (Fault("drop", at=10), DATA[:10], ""),
        (Fault("drop"), b"", ""),
        (Fault("corrupt", at=0), FLIPPED[:1] + DATA[1:], ""),
        (Fault("corrupt", at=98, count=9), DATA[:98] + FLIPPED[98:], ""),
        (Fault("duplicate", at=3, count=4), DATA[:7] + DATA[3:], ""),
        (Fault("duplicate", at=99), DATA + DATA[99:], ""),
        (Fault("truncate", at=42), DATA[:42], "truncate"),
        (Fault("reset", at=0), b"", "reset"),
        (Fault("half_close", at=100), DATA, "half_close"),
    ],
)
def test_a_stream_suffers_exactly_its_fault(fault: Fault, expected: bytes, end: str, cuts: int) -> None:
    stream = through(fault, cuts=cuts)
    assert stream.due(0.0) == expected
    assert (stream.end, stream.waiting) == (end, 0)


def test_faults_of_one_stream_come_one_after_the_other() -> None:
    faults = (
        Fault("truncate", at=60),
        Fault("drop", at=10, count=10),
        Fault("corrupt", at=30),
        Fault("duplicate", at=40),
    )
    expected = DATA[:10] + DATA[20:30] + FLIPPED[30:31] + DATA[31:41] + DATA[40:60]
    assert through(*faults, cuts=9).due(0.0) == expected


def test_delay_and_throttle_say_when_what_may_leave() -> None:
    late = through(Fault("delay", at=50, seconds=2.0), cuts=100)
    assert late.due(0.0) == DATA[:50]
    assert late.next_due() == 2.0
    assert late.due(1.9) == b""
    assert late.due(2.0) == DATA[50:]
    slow = through(Fault("throttle", rate=100.0), cuts=100)
    assert [len(slow.due(at / 4 + 1e-6)) for at in range(5)] == [0, 25, 25, 25, 25]
    assert slow.next_due() is None


def test_a_stalled_stream_keeps_everything_until_it_goes_on() -> None:
    stream = through(Fault("stall", at=30), cuts=10)
    assert stream.due(9.0) == DATA[:0]
    assert (stream.waiting, stream.next_due()) == (100, None)
    stream.stalled = False
    assert stream.due(9.0) == DATA


def test_a_fault_that_comes_late_begins_with_the_next_byte() -> None:
    stream = through(data=DATA[:50])
    stream.add(Fault("drop", at=20, count=5))
    stream.feed(DATA[50:], 0.0)
    assert stream.due(0.0) == DATA[:50] + DATA[55:]


def test_what_is_no_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="what='burn' is no fault; known are drop, delay"):
        Fault("burn")
    with pytest.raises(ValueError, match="rate=0"):
        Fault("throttle")
    for what in FAULTS:
        assert replace(Fault("drop"), what=what, rate=1.0).what == what


# --- the relay --------------------------------------------------------------------------------------------------------


class Ends:
    def __init__(self, relay: Relay, server: socket.socket) -> None:
        self.relay, self._server = relay, server

    @contextmanager
    def join(self, first: bytes = CONTROL_PREAMBLE) -> Iterator[tuple[socket.socket, socket.socket]]:
        with socket.create_connection(self.relay.address, 20) as dialer:
            dialer.sendall(first)
            accepted, _ = self._server.accept()
            with accepted:
                accepted.settimeout(20)
                yield dialer, accepted


@pytest.fixture
def ends() -> Iterator[Ends]:
    before = residue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        with Relay(server.getsockname()[:2]) as relay:
            yield Ends(relay, server)
    assert settled(before) == before


def heard(sock: socket.socket) -> bytes:
    data = bytearray()
    while more := sock.recv(1 << 16):
        data += more
    return bytes(data)


def exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = sock.recv(count - len(data))
        assert more, f"the end after {len(data)} of {count} bytes"
        data += more
    return bytes(data)


@contextmanager
def saying(sock: socket.socket, data: bytes) -> Iterator[None]:
    """Send in a thread, and end that half."""

    def say() -> None:
        with suppress(OSError):  # cut before
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=say)
    thread.start()
    yield
    thread.join()


def test_without_a_fault_every_byte_arrives_both_ways(ends: Ends) -> None:
    up, down = random.Random(1).randbytes(3 << 20), random.Random(2).randbytes(2 << 20)
    with ends.join() as (dialer, accepted), saying(dialer, up), saying(accepted, down):
        results: list[bytes] = []
        reader = threading.Thread(target=lambda: results.append(heard(dialer)))
        reader.start()
        assert heard(accepted) == CONTROL_PREAMBLE + up
        reader.join()
        assert results == [down]
    wait_until(lambda: ends.relay.carried()[0].over)
    assert repr(ends.relay.carried()[0]) == f"<Carried control, over: {len(up) + 12} bytes up, {len(down)} down>"


def test_faults_go_to_the_kind_of_connection_they_were_planned_for(ends: Ends) -> None:
    ends.relay.plan("lane", "up", Fault("corrupt", at=12))
    ends.relay.plan("control", "down", Fault("drop", count=1))
    for first, up, down in (
        (CONTROL_PREAMBLE, DATA, DATA[1:]),
        (LANE_PREAMBLE, FLIPPED[:1] + DATA[1:], DATA),
        (TLS_PREAMBLE, DATA, DATA[1:]),
    ):
        with ends.join(first) as (dialer, accepted):
            dialer.sendall(DATA)
            assert exactly(accepted, 112) == first + up  # by now the relay knows what kind it is
            accepted.sendall(DATA)
            assert exactly(dialer, len(down)) == down
    assert [each.kind for each in ends.relay.carried()] == ["control", "lane", "control"]
    assert len(ends.relay.carried("lane")) == 1
    ends.relay.forget_plans()
    with ends.join(LANE_PREAMBLE) as (dialer, accepted):
        dialer.sendall(DATA)
        assert exactly(accepted, 112) == LANE_PREAMBLE + DATA


def test_a_reset_reaches_both_ends(ends: Ends) -> None:
    with ends.join() as (dialer, accepted):
        assert exactly(accepted, 12) == CONTROL_PREAMBLE
        assert ends.relay.cut("lane", reset=True) == 0
        assert ends.relay.cut("control", reset=True) == 1
        for end in (dialer, accepted):
            with pytest.raises(ConnectionResetError):
                end.recv(1)


def test_a_stalled_connection_goes_on_where_it_stopped(ends: Ends) -> None:
    with ends.join() as (dialer, accepted):
        assert exactly(accepted, 12) == CONTROL_PREAMBLE
        assert ends.relay.now("control", "up", Fault("stall")) == 1
        with saying(dialer, DATA * 30_000):  # more than the relay keeps: the sender has to wait
            wait_until(lambda: ends.relay.carried()[0].taken("up") > 1 << 20)
            accepted.settimeout(0.05)
            with pytest.raises(TimeoutError):
                accepted.recv(1)
            assert ends.relay.carried()[0].taken("up") < 2 << 20
            accepted.sendall(DATA)
            assert exactly(dialer, 100) == DATA
            accepted.settimeout(20)
            ends.relay.resume()
            assert heard(accepted) == DATA * 30_000


def test_a_cut_cable_swallows_the_end_too(ends: Ends) -> None:
    with ends.join() as (dialer, accepted):
        assert exactly(accepted, 12) == CONTROL_PREAMBLE
        ends.relay.now(None, "up", Fault("drop"))
        dialer.sendall(DATA)
        dialer.shutdown(socket.SHUT_WR)
        wait_until(lambda: ends.relay.carried()[0].taken("up") == 112)
        accepted.settimeout(0.05)
        with pytest.raises(TimeoutError):
            accepted.recv(1)


@pytest.mark.parametrize(
    ("faults", "first", "said", "arrives", "answered"),
    [
        pytest.param([Fault("truncate", at=50)], CONTROL_PREAMBLE, DATA, DATA[:38], False, id="cut"),
        pytest.param([Fault("half_close", at=20)], CONTROL_PREAMBLE, DATA, DATA[:8], True, id="half closed"),
        pytest.param(
            [Fault("delay", seconds=0.05), Fault("throttle", at=12, rate=1e6)],
            *(CONTROL_PREAMBLE, DATA * 500, DATA * 500, True),
            id="delayed and throttled",
        ),
        pytest.param([], b"GET", b"", b"", True, id="less than a preamble"),
    ],
)
def test_what_arrives_until_the_end_and_whether_the_other_way_goes_on(
    ends: Ends, faults: list[Fault], first: bytes, said: bytes, arrives: bytes, answered: bool
) -> None:
    ends.relay.plan(None, "up", *faults)
    with ends.join(first) as (dialer, accepted), saying(dialer, said):
        assert heard(accepted) == first + arrives
        if answered:
            accepted.sendall(DATA)
            assert exactly(dialer, 100) == DATA
        else:
            with suppress(ConnectionResetError):  # not all that it said was read
                assert heard(dialer) == b""


def test_a_listener_that_is_gone_is_an_end_at_once() -> None:
    before = residue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
    with Relay(address) as relay, socket.create_connection(relay.address, 20) as dialer:
        assert dialer.recv(1) == b""
        assert relay.carried() == []
        relay.close()
        relay.close()
    assert settled(before) == before
