"""The relay: carries faithfully, and does to a stream exactly what a fault says; nothing is left of it."""

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from faults.relay import Fault, Relay, Stream
from llm_datadist._links.messages import CONTROL_PREAMBLE
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


# --- the relay --------------------------------------------------------------------------------------------------------


def heard(sock: socket.socket) -> bytes:
    data = bytearray()
    while more := sock.recv(1 << 16):
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


def test_without_a_fault_every_byte_arrives_both_ways() -> None:
    up, down = CONTROL_PREAMBLE + random.Random(1).randbytes(3 << 20), random.Random(2).randbytes(2 << 20)
    before = residue()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        Relay(server.getsockname()[:2]) as relay,
        socket.create_connection(relay.address, 20) as dialer,
        saying(dialer, up),
    ):
        accepted, _ = server.accept()
        with accepted, saying(accepted, down):
            results: list[bytes] = []
            reader = threading.Thread(target=lambda: results.append(heard(dialer)))
            reader.start()
            assert heard(accepted) == up
            reader.join()
        assert results == [down]
        wait_until(lambda: relay.carried()[0].over)
        assert repr(relay.carried()[0]) == f"<Carried control, over: {len(up)} bytes up, {len(down)} down>"
    assert settled(before) == before


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
