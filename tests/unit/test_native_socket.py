"""What is done with control sockets: what Python's calls return, when, and who has the interpreter meanwhile."""

import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from llm_datadist._links.listener import listening_socket
from llm_datadist._native import Stream
from tests.support.busy import Busy

Pair = tuple[socket.socket, socket.socket]


def stream(sock: socket.socket, *most: int, watch: select.epoll | None = None) -> Stream:
    return Stream(sock.fileno(), -1 if watch is None else watch.fileno(), (), 1 << 20, *most)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def test_receive_returns_what_is_there_waits_no_longer_than_told_and_tells_the_end_from_a_reset(pair: Pair) -> None:
    ours, theirs = pair
    receive = stream(ours).receive
    assert receive() is None
    began = time.monotonic()
    assert receive(0.02) is None
    assert 0.02 <= time.monotonic() - began < 5
    assert stream(theirs).send(b"abc") == 0
    assert receive(5) == b"abc"
    later = threading.Timer(0.02, theirs.send, [b"late"])
    later.start()
    assert receive(5) == b"late"
    later.join()
    theirs.sendall(bytes(100_000))
    assert [receive(5), receive(5)] == [bytes(1 << 16), bytes(100_000 - (1 << 16))]
    theirs.sendall(bytes(3))
    assert [stream(ours, 2).receive(5) for _ in range(2)] == [bytes(2), bytes(1)]
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    for _ in range(2):
        with pytest.raises(ConnectionResetError):
            receive(5)
    assert stream(ours).receive() == b""
    assert stream(ours).send(b"lost") == 0, "reading reports it"


def test_a_stream_keeps_what_the_kernel_does_not_take_and_no_signal_comes_of_a_broken_pipe() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        sender = stream(ours)
        with theirs:
            assert sender.send(b"first", now=False) == 5
            kept = sender.send(bytes(10 << 20))
            assert kept is not None
            assert 0 < kept <= 5 + (10 << 20)
            assert sender.send(b"more") == sender.unsent == kept + 4, "in order"
            assert sender.flush() < kept + 4
            assert theirs.recv(5) == b"first"
        assert sender.flush() == 0, "a broken connection takes all"
        assert sender.send(b"gone") == 0
        assert (sender.shut(), sender.shut(), sender.send(b"shut")) == (True, False, None)


def test_a_signal_ends_a_wait_so_that_its_handler_can_run(pair: Pair) -> None:
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert stream(pair[0]).receive(30) is None
    finally:
        signal.signal(signal.SIGALRM, handler)


def test_a_descriptor_that_is_not_listened_to_is_reported_at_its_end_only_and_that_once(pair: Pair) -> None:
    ours, theirs = pair
    with select.epoll() as watch:
        watch.register(ours, select.EPOLLIN)
        reader = stream(ours, watch=watch)
        for _ in range(2):
            reader.watch(watched=False)
            theirs.send(b"a")
            assert watch.poll(0.01) == []
            reader.watch(watched=True)
            assert watch.poll(5) == [(ours.fileno(), select.EPOLLIN)]
        reader.watch(watched=False)
        ours.shutdown(socket.SHUT_RDWR)
        theirs.close()
        assert len(watch.poll(5)) == 1
        assert watch.poll(0.01) == []


def test_no_other_thread_gets_the_interpreter_unless_there_is_nothing_to_receive(pair: Pair) -> None:
    sender = stream(pair[1])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1)  # what it costs each time
    busy = Busy()
    try:
        with select.epoll() as watch:
            watch.register(pair[0], select.EPOLLIN)
            receiver = stream(pair[0], watch=watch)
            began = time.monotonic()
            for _ in range(300):
                receiver.watch(watched=False)
                sender.send(b"request")
                assert receiver.receive(5) == b"request"
                receiver.watch(watched=True)
                assert receiver.receive() is None
            assert time.monotonic() - began < 60  # 300 turns of the busy thread take five times as long
    finally:
        sys.setswitchinterval(interval)
        busy.end()


_DIALS = 600
_SOMAXCONN = Path("/proc/sys/net/core/somaxconn")


@pytest.mark.skipif(int(_SOMAXCONN.read_text()) < _DIALS, reason=f"{_SOMAXCONN} is below {_DIALS}")
def test_hundreds_of_dials_at_once_need_no_second_attempt_while_nothing_is_accepted() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listening_socket(("127.0.0.1", 0)))
        socks = [stack.enter_context(socket.socket()) for _ in range(_DIALS)]
        for sock in socks:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        # Over loopback a first attempt is over when connect returns; a second one comes a second later.
        for number, sock in enumerate(socks):
            ready = select.poll()
            ready.register(sock, select.POLLOUT)
            assert ready.poll(200), f"dial {number} waits for its second attempt"
