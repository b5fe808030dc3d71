"""A peer in a child process that is reached over NIXL; run as a module this file is that child.

Requests and answers travel over a stream socket instead of a link; a handle names its tensors as for lanes.
"""

import asyncio
import itertools
import socket
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateAnswer
from contextlib import suppress
from functools import partial
from typing import Final
from unittest import mock

from faults.lanepeer import OwnerChild, OwnerProcess
from llm_datadist._checks import HERE
from llm_datadist._deadline import Deadline
from llm_datadist._transport.nixl.agent import fabric, usable
from llm_datadist._transport.nixl.transport import NixlConnection
from llm_datadist._transport.nixl.worker import NixlWorker
from llm_datadist._transport.transport import Context
from llm_datadist.errors import LinkError, PeerLost
from llm_datadist.testing.peers import Handles, LocalPeer, MemoryHandler, child_main

_HEAD: Final = struct.Struct(">IQ?")  # bytes of data, number, True for a question


class SocketWire:
    """Questions and answers over one stream socket, which it owns together with the thread that reads it."""

    def __init__(self, sock: socket.socket, on_question: Callable[[bytes, Callable[[bytes], None]], None]) -> None:
        self._sock, self._on_question = sock, on_question
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[bytes]] = {}
        self._sending = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="nixl-wire")

    def start(self) -> None:
        self._reader.start()

    def ask(self, link: object, data: bytes, deadline: Deadline) -> bytes:
        number, waiting = next(self._numbers), Future[bytes]()
        self._waiting[number] = waiting
        self._send(number, data, question=True)
        while True:
            with suppress(LateAnswer):
                return waiting.result(deadline.next_turn())
            if not self._reader.is_alive() and not waiting.done():
                raise PeerLost("the wire has ended")
            deadline.check("ask", "copy")

    def tell(self, link: object, data: bytes) -> None:
        with suppress(LinkError):
            self._send(0, data, question=True)

    def close(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._sock.close()

    def _send(self, number: int, data: bytes, *, question: bool) -> None:
        try:
            with self._sending:
                self._sock.sendall(_HEAD.pack(len(data), number, question) + data)
        except OSError as error:
            raise PeerLost(f"the wire has ended: {error}") from error

    def _answer(self, number: int, data: bytes) -> None:
        with suppress(LinkError):
            self._send(number, data, question=False)

    def _read(self) -> None:
        with self._sock.makefile("rb") as stream:
            while len(head := stream.read(_HEAD.size)) == _HEAD.size:
                nbytes, number, question = _HEAD.unpack(head)
                data = stream.read(nbytes)
                if question:
                    self._on_question(data, partial(self._answer, number))
                elif (waiting := self._waiting.pop(number, None)) is not None:
                    waiting.set_result(data)


class SocketConnection(Handles, NixlConnection):
    def abort(self) -> None:
        super().abort()
        self.close_wire()

    def _release(self) -> None:
        super()._release()
        if self._pid == HERE["pid"]:
            self.close_wire()
            self.server.join()

    def close_wire(self) -> None:
        wire = self.context.wire
        assert isinstance(wire, SocketWire)
        wire.close()


def open_over(sock: socket.socket, peer: LocalPeer, handler: MemoryHandler, *, writable: bool) -> SocketConnection:
    """Return one end of a connection; what the other end asks is granted by ``handler``."""
    server: list[NixlWorker] = []  # not the connection, which may be forgotten
    wire = SocketWire(sock, lambda data, reply: server[0].on_request(data, reply))  # noqa: PLW0108 (made later)
    context = Context(mock.sentinel.no_options, peer.exports, handler, wire)
    connection = SocketConnection(context, fabric(), writable=writable)
    connection.server.peer_reads = True  # as over RDMA: tests read over TCP too
    server.append(connection.server)
    wire.start()
    return connection


class NixlPeerProcess(OwnerProcess):
    """Reached over NIXL with the fabric that this host has."""

    module = __name__

    def __init__(self) -> None:
        super().__init__()
        usable(fabric())  # what a first agent loads stays
        self._mine = LocalPeer(writable=False)
        self._handler = MemoryHandler(self._mine)

    def connect(self) -> SocketConnection:
        port = self.ask(int, "port")
        sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return open_over(sock, self._mine, self._handler, writable=self._writable)

    def close(self) -> None:
        super().close()
        self._mine.close()


class _NixlChild(OwnerChild):
    own = ("hold", "quiesce", "port")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        usable(fabric())
        self._open: list[SocketConnection] = []

    def _port(self) -> int:
        return int(self._server.getsockname()[1])

    def _serve(self, writable: bool, private: bool) -> None:
        super()._serve(writable, private)
        self._writable = writable
        self._server = socket.create_server(("127.0.0.1", 0))
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._server.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.append(open_over(sock, self._peer, self._handler, writable=self._writable))

    def _stop(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._server.close()
        while self._open:
            self._open.pop().abort()
        super()._stop()

    def _quiesce(self) -> None:
        for each in self._open:
            each.server.quiesce(0)


if __name__ == "__main__":
    child_main(int(sys.argv[1]), _NixlChild)
