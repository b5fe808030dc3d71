"""A peer in a child process that is reached over NIXL; run as a module this file is that child.

Requests and answers travel over a stream socket instead of a link; a handle names its tensors as for lanes.
"""

from __future__ import annotations

import itertools
import socket
import struct
import sys
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateAnswer
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from faults.lanepeer import MemoryHandler
from llm_datadist._memory.exports import RegionDescriptor
from llm_datadist._transport.nixl import Nixl, NixlConnection, Server
from llm_datadist._transport.nixl_agent import fabric, usable
from llm_datadist.errors import LinkError, PeerLost
from llm_datadist.testing.peers import REGION_BYTES, Child, LocalPeer, PeerProcess, child_main

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from llm_datadist._deadline import Deadline
    from llm_datadist._transport.connection import RemoteTensors

_HEAD: Final = struct.Struct(">IQ?")  # bytes of data, number, True for a question


class SocketWire:
    """Questions and answers over one stream socket, which it owns together with the thread that reads it."""

    def __init__(self, sock: socket.socket, on_question: Callable[[bytes, Callable[[bytes], None]], None]) -> None:
        self._sock = sock
        self._on_question = on_question
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


class SocketConnection(NixlConnection):
    def map(
        self, regions: NDArray[Any], offsets: NDArray[Any], extent: int, *, writable: bool, located: bool = False
    ) -> RemoteTensors:
        """Return where the peer's tensors are, with a handle that says so too."""
        handle = msgspec.msgpack.encode([regions.tolist(), offsets.tolist()])
        return replace(super().map(regions, offsets, extent, writable=writable, located=located), handle=handle)

    def abort(self) -> None:
        super().abort()
        self.close_wire()

    def _release(self) -> None:
        super()._release()
        if not self._forked:
            self.close_wire()
            self.server.join()

    def close_wire(self) -> None:
        wire = self.nixl.wire
        assert isinstance(wire, SocketWire)
        wire.close()


def open_over(sock: socket.socket, peer: LocalPeer, handler: MemoryHandler, *, writable: bool) -> SocketConnection:
    """Return one end of a connection; what the other end asks is granted by ``handler``."""
    server: list[Server] = []  # not the connection, which may be forgotten
    wire = SocketWire(sock, lambda data, reply: server[0].on_request(data, reply))  # noqa: PLW0108 (made later)
    pools = [(segment.address, segment.nbytes) for segment in peer.exports.regions.values()]
    regions = [RegionDescriptor(region, size, "", writable) for region, size in REGION_BYTES.items()]
    connection = SocketConnection(Nixl(wire, handler, pools), fabric(), regions, writable=writable)
    connection.server._reads = True  # as over RDMA: tests read over TCP too
    server.append(connection.server)
    wire.start()
    return connection


class NixlPeerProcess(PeerProcess):
    module = __name__

    def __init__(self) -> None:
        super().__init__(_no_rendezvous)
        usable(fabric())  # what a first agent loads stays
        self._mine = LocalPeer(writable=False)
        self._handler = MemoryHandler(self._mine)
        self._writable = False

    @contextmanager
    def serving(self, *, writable: bool) -> Iterator[Self]:
        self._writable = writable
        with super().serving(writable=writable):
            yield self

    def connect(self) -> SocketConnection:
        port = self._ask(int, "port")
        sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return open_over(sock, self._mine, self._handler, writable=self._writable)

    def hold(self, slot: int, generation: int) -> None:
        self._tell("hold", slot, generation)

    def quiesce(self) -> None:
        self._tell("quiesce")

    def close(self) -> None:
        super().close()
        self._mine.close()


def _no_rendezvous(_: object) -> Any:
    raise AssertionError("NIXL needs no rendezvous")


class _NixlChild(Child):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        usable(fabric())
        self._open: list[SocketConnection] = []

    def obey(self, verb: str, arguments: list[Any]) -> object:
        own: dict[str, Callable[..., object]] = {
            "port": lambda: int(self._server.getsockname()[1]),
            "hold": self._hold,
            "quiesce": self._quiesce,
        }
        return own[verb](*arguments) if verb in own else super().obey(verb, arguments)

    def _serve(self, writable: bool, private: bool) -> None:
        super()._serve(writable, private)
        self._handler = MemoryHandler(self._peer)
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

    def _hold(self, slot: int, generation: int) -> None:
        self._handler.guards = [(self._peer.exports.guards.address_of(slot), generation)]

    def _quiesce(self) -> None:
        for each in self._open:
            each.server.quiesce(0)


if __name__ == "__main__":
    child_main(int(sys.argv[1]), _NixlChild)
