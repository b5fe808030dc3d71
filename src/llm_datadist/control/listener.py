"""The listening side: accepts raw sockets, reads the preamble, and shakes hands as the target."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final, Protocol

from llm_datadist.control.channel import FrameParser, tune
from llm_datadist.control.handshake import GREETING_SECONDS, open_connection, verify_cookie
from llm_datadist.control.messages import (
    CONTROL_PREAMBLE,
    PREAMBLE_BYTES,
    PROTOCOL_VERSION,
    Hello,
    Linked,
    Met,
    Refused,
    Welcome,
    decode,
    frame,
)
from llm_datadist.errors import LinkError, LinkRefused, LLMException, LLMStatusCode, ProtocolError
from llm_datadist.log import logger

if TYPE_CHECKING:
    from llm_datadist.control.handshake import Identity
    from llm_datadist.control.loop import ControlLoop
    from llm_datadist.control.messages import Message
    from llm_datadist.transport import Choice
    from llm_datadist.transport.base import Connection, Exports
    from llm_datadist.transport.samehost import PeerMemory, SameHostListener

__all__ = ["Host", "Listener", "bind"]

_BACKLOG: Final = 128
#: Strangers in the middle of a handshake; the next one is turned away at once.
_MAX_GREETINGS: Final = 128


class Host(Protocol):
    """What the listener asks of the link manager. All on the control thread."""

    async def admit(self, hello: Hello) -> None:
        """Raise LinkError when there may be no link to that peer now."""

    def install(
        self, hello: Hello, connection: Connection, choice: Choice, sock: socket.socket, leftover: bytes
    ) -> None:
        """Make the link usable."""


def bind(address: tuple[str, int]) -> socket.socket:
    """Return a listening socket; port 0 picks a free one.

    Raises:
        LinkError: The address cannot be bound (``LLM_FAILED``, API §3.1): the text names it.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise LinkError(
            f"listenIpInfo={address[0]}:{address[1]}: cannot listen there: {error.strerror or error}",
            status_code=LLMStatusCode.LLM_FAILED,
        ) from error
    return sock


class _Stream:
    """Frames on a non-blocking socket, for the control thread's coroutines."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._loop = loop
        self._sock = sock
        self._parser = FrameParser()
        self._frames: list[bytes] = []

    async def preamble(self) -> None:
        data = b""
        while len(data) < PREAMBLE_BYTES:
            more = await self._loop.sock_recv(self._sock, PREAMBLE_BYTES - len(data))
            if not more:
                raise ProtocolError("the connection ended before its preamble")
            data += more
        if data != CONTROL_PREAMBLE:
            raise ProtocolError(f"the preamble {data!r} is not one of ours")

    async def send(self, message: Message) -> None:
        await self._loop.sock_sendall(self._sock, frame(message))

    async def receive(self) -> Message:
        while not self._frames:
            data = await self._loop.sock_recv(self._sock, 65536)
            if not data:
                raise ProtocolError("the connection ended inside the handshake")
            self._frames = self._parser.feed(data)
        return decode(self._frames.pop(0))

    def leftover(self) -> bytes:
        whole = b"".join(len(f).to_bytes(4, "big") + f for f in self._frames)
        return whole + self._parser.rest()


class Listener:
    """One listening address. Made and closed on the control thread; a bad stranger costs its own socket only."""

    def __init__(
        self,
        control: ControlLoop,
        sock: socket.socket,
        identity: Identity,
        exports: Exports,
        rendezvous: SameHostListener,
        host: Host,
    ) -> None:
        self._control = control
        self._sock = sock
        self._identity = identity
        self._exports = exports
        self._rendezvous = rendezvous
        self._host = host
        self._greetings: set[socket.socket] = set()
        self.address: tuple[str, int] = sock.getsockname()[:2]
        control.loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Stop listening and drop who is still shaking hands. Links that exist are not touched."""
        self._control.loop.remove_reader(self._sock)
        self._sock.close()
        for sock in list(self._greetings):
            # Shut down, not closed: the greeting's own coroutine sees the end and closes it.
            _hang_up(sock)

    def _accept(self) -> None:
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            logger.warning("listener %s: accept failed: %s", self.address, error)
            return
        if len(self._greetings) >= _MAX_GREETINGS:
            sock.close()
            return
        sock.setblocking(False)
        self._greetings.add(sock)
        self._control.spawn(self._greet(sock, f"{address[0]}:{address[1]}"))

    async def _greet(self, sock: socket.socket, who: str) -> None:
        handed_over = False
        try:
            tune(sock)
            async with asyncio.timeout(GREETING_SECONDS):
                handed_over = await self._shake(sock)
        except (TimeoutError, OSError, LLMException) as error:
            logger.info("a connection from %s came to nothing: %s", who, error)
        finally:
            self._greetings.discard(sock)
            if not handed_over:
                sock.close()

    async def _shake(self, sock: socket.socket) -> bool:
        stream = _Stream(self._control.loop, sock)
        await stream.preamble()
        hello = await stream.receive()
        if not isinstance(hello, Hello):
            raise ProtocolError(f"the first frame is a {type(hello).__name__}, not a Hello")
        try:
            self._check(hello)
            await self._host.admit(hello)
            return await self._answer(sock, stream, hello)
        except LLMException as error:
            await stream.send(Refused(int(error.status_code), str(error)[:4000]))
            raise

    def _check(self, hello: Hello) -> None:
        mine = self._identity
        if hello.version != PROTOCOL_VERSION:
            raise LinkRefused(f"protocol version {hello.version}: this end speaks {PROTOCOL_VERSION}")
        if hello.wanted is not None and hello.wanted != mine.cluster_id:
            raise LinkRefused(
                f"remote_cluster_id={hello.wanted}: the listener at {self.address[0]}:{self.address[1]} is cluster "
                f"{mine.cluster_id}"
            )
        if hello.remote_accessible != mine.remote_accessible:
            raise LinkRefused(
                f"llm.EnableRemoteCacheAccessible differs: {int(hello.remote_accessible)} at cluster "
                f"{hello.cluster_id}, {int(mine.remote_accessible)} at cluster {mine.cluster_id}",
                status_code=LLMStatusCode.LLM_PARAM_INVALID,
            )

    async def _answer(self, sock: socket.socket, stream: _Stream, hello: Hello) -> bool:
        met: list[PeerMemory | LinkError] = []
        self._rendezvous.expect(hello.token, met.append)
        try:
            mine = self._identity
            await stream.send(
                Welcome(
                    version=PROTOCOL_VERSION,
                    cluster_id=mine.cluster_id,
                    incarnation=mine.incarnation,
                    remote_accessible=mine.remote_accessible,
                    pid=mine.pid,
                    host=mine.host,
                    rendezvous=self._rendezvous.name,
                    cookie=self._exports.guards.cookie,
                )
            )
            choice_of_peer = await stream.receive()
            if not isinstance(choice_of_peer, Met):
                raise ProtocolError(f"expected Met, the peer sent {type(choice_of_peer).__name__}")
            memory = met.pop() if met else None
        finally:
            self._rendezvous.forget(hello.token)
            for unused in met:
                if not isinstance(unused, LinkError):
                    unused.close()
        if memory is not None and not isinstance(memory, LinkError):
            memory = verify_cookie(memory, hello.cookie)
        connection, choice = open_connection(hello.incarnation, memory, self._identity.transport)
        return await self._settle(sock, stream, hello, choice_of_peer, connection, choice)

    async def _settle(
        self,
        sock: socket.socket,
        stream: _Stream,
        hello: Hello,
        met: Met,
        connection: Connection,
        choice: Choice,
    ) -> bool:
        """Both ends must have chosen alike; then the link is usable here before the peer hears so."""
        try:
            if met.transport != choice.name:
                raise LinkRefused(
                    f"the ends chose differently: {met.transport} ({met.reason}) there, {choice.name} "
                    f"({choice.reason}) here"
                )
            await stream.send(Linked())
            self._host.install(hello, connection, choice, sock, stream.leftover())
        except BaseException:
            connection.close()
            raise
        return True


def _hang_up(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
