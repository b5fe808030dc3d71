"""The listening side: accepts raw sockets, reads the preamble, and shakes hands as the target."""

from __future__ import annotations

import asyncio
import secrets
import socket
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from llm_datadist.control.channel import FrameParser, tune
from llm_datadist.control.handshake import GREETING_SECONDS
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
from llm_datadist.transport import agree
from llm_datadist.transport.connect import Claim, Opening
from llm_datadist.transport.lanedial import LANE_PREAMBLE, TOKEN_BYTES, accept_lane, read_lane_greeting

if TYPE_CHECKING:
    from llm_datadist.control.handshake import Identity
    from llm_datadist.control.loop import ControlLoop
    from llm_datadist.control.messages import Message
    from llm_datadist.transport import Choice
    from llm_datadist.transport.base import Exports
    from llm_datadist.transport.datapath import DataPath
    from llm_datadist.transport.lanes import LaneGroup, Lanes
    from llm_datadist.transport.samehost import PeerMemory, SameHostListener

__all__ = ["Door", "Host", "Listener", "bind", "listening_socket"]

_BACKLOG: Final = 128
#: Strangers in the middle of a handshake; beyond, one makes room: the oldest of those who have not said who they are,
#: else the oldest of all.
_MAX_GREETINGS: Final = 128
_ACCEPT_PAUSE_SECONDS: Final = 1.0
M = TypeVar("M", bound="Message")


class Host(Protocol):
    """What the listener asks of the link manager. All on the control thread."""

    async def admit(self, hello: Hello) -> None:
        """Raise LinkError when there may be no link to that peer now."""

    def install(
        self, hello: Hello, met: Met, connection: DataPath, choice: Choice, sock: socket.socket, leftover: bytes
    ) -> None:
        """Make the link usable, then send Linked. Owns connection and socket, unless it raises LinkError."""

    def recognise(self, hello: Hello) -> int:
        """A communicator is to use the link that there is; return its number. Raises LinkError if there is none."""


class Door(Protocol):
    """Who is let in at a listener that is not open to everybody. All on the control thread."""

    def check(self, hello: Hello) -> None:
        """Raise LinkError unless this listener is there for that peer."""

    def refused(self, hello: Hello, error: LLMException) -> None:
        """A peer that said hello did not become a link."""


def listening_socket(address: tuple[str, int]) -> socket.socket:
    """Return a listening socket; port 0 picks a free one. Raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def bind(address: tuple[str, int]) -> socket.socket:
    """Return a listening socket; port 0 picks a free one.

    Raises:
        LinkError: The address cannot be bound (``LLM_FAILED``, API §3.1): the text names it.
    """
    try:
        return listening_socket(address)
    except OSError as error:
        raise LinkError(
            f"listenIpInfo={address[0]}:{address[1]}: cannot listen there: {error.strerror or error}",
            status_code=LLMStatusCode.LLM_FAILED,
        ) from error


class _Stream:
    """Frames on a non-blocking socket, for the control thread's coroutines."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._loop = loop
        self._sock = sock
        self.parser = FrameParser()

    async def preamble(self) -> bytes:
        """Read the preamble and not a byte more: what follows on a lane is not ours."""
        data = b""
        while len(data) < PREAMBLE_BYTES:
            more = await self._loop.sock_recv(self._sock, PREAMBLE_BYTES - len(data))
            if not more:
                raise ProtocolError("the connection ended before its preamble")
            data += more
        if data not in (CONTROL_PREAMBLE, LANE_PREAMBLE):
            raise ProtocolError(f"the preamble {data!r} is not one of ours")
        return data

    async def send(self, message: Message) -> None:
        await self._loop.sock_sendall(self._sock, frame(message))

    async def receive(self, kind: type[M]) -> M:
        while (payload := self.parser.take()) is None:
            data = await self._loop.sock_recv(self._sock, 65536)
            if not data:
                raise ProtocolError("the connection ended inside the handshake", phase="handshake")
            self.parser.feed(data)
        message = decode(payload)
        if not isinstance(message, kind):
            raise ProtocolError(f"expected {kind.__name__}, the peer sent {type(message).__name__}")
        return message


class Listener:
    """One listening address. Made and closed on the control thread; a bad stranger costs its own socket only.

    With a ``door`` it is there for one communicator and lets nobody else in; without one it lets no communicator in.
    """

    def __init__(
        self,
        control: ControlLoop,
        sock: socket.socket,
        identity: Identity,
        exports: Exports,
        rendezvous: SameHostListener,
        lanes: Lanes,
        host: Host,
        door: Door | None = None,
    ) -> None:
        self._control = control
        self._sock = sock
        self._identity = identity
        self._exports = exports
        self._rendezvous = rendezvous
        self._lanes = lanes
        self._host = host
        self._door = door
        #: The oldest first, as below.
        self._greetings: dict[socket.socket, None] = {}
        #: Those of them that have not said who they are.
        self._silent: dict[socket.socket, None] = {}
        self._resume: asyncio.TimerHandle | None = None
        self.address: tuple[str, int] = sock.getsockname()[:2]
        self._listen()

    def close(self) -> None:
        """Stop listening and drop who is still shaking hands. Links that exist are not touched."""
        if self._resume is not None:
            self._resume.cancel()
        self._control.loop.remove_reader(self._sock)
        self._sock.close()
        for sock in list(self._greetings):
            self._greetings.pop(sock)
            _hang_up(sock)

    def abandon(self) -> None:
        """In a forked child: close the child's copies of the sockets, and touch nothing else."""
        for sock in (self._sock, *self._greetings):
            sock.close()

    def _listen(self) -> None:
        self._control.loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(error)
            return
        if len(self._greetings) >= _MAX_GREETINGS:
            self._make_room()
        sock.setblocking(False)
        self._greetings[sock] = None
        self._silent[sock] = None
        self._control.spawn(self._greet(sock, f"{address[0]}:{address[1]}"))

    def _pause(self, error: OSError) -> None:
        # Out of descriptors: the backlog stays readable, so without a pause the loop would do nothing else.
        logger.warning("listener %s:%d cannot accept and pauses: %s", *self.address, error)
        self._control.loop.remove_reader(self._sock)
        self._resume = self._control.loop.call_later(_ACCEPT_PAUSE_SECONDS, self._listen)

    def _make_room(self) -> None:
        """Hang up on whoever has been silent for longest, or else has been at it for longest."""
        oldest = next(iter(self._silent or self._greetings))
        self._silent.pop(oldest, None)
        self._greetings.pop(oldest, None)
        _hang_up(oldest)

    async def _greet(self, sock: socket.socket, who: str) -> None:
        handed_over = False
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                handed_over = await self._shake(sock)
        except (TimeoutError, OSError, LLMException) as error:
            logger.info("a connection from %s came to nothing: %s", who, str(error) or "it took too long")
        finally:
            self._greetings.pop(sock, None)
            self._silent.pop(sock, None)
            if not handed_over:
                sock.close()

    async def _shake(self, sock: socket.socket) -> bool:
        stream = _Stream(self._control.loop, sock)
        if await stream.preamble() == LANE_PREAMBLE:
            await self._take_lane(sock)
            return True
        tune(sock)
        hello = await stream.receive(Hello)
        self._silent.pop(sock, None)
        group = self._lanes.open(token=secrets.token_bytes(TOKEN_BYTES))
        try:
            self._check(hello)
            await self._host.admit(hello)
            met, memory = await self._meet(sock, stream, hello, group)
            if met.present:
                await self._recognise(stream, hello, memory, group)
                return False
            self._settle(sock, stream, hello, met, memory, group)
        except BaseException as error:
            self._lanes.shut(group)
            if isinstance(error, LLMException):
                await self._refuse(stream, hello, error)
            raise
        return True

    async def _refuse(self, stream: _Stream, hello: Hello, error: LLMException) -> None:
        try:
            await stream.send(Refused(int(error.status_code), str(error)[:4000]))
        finally:
            # Last, because it may close this listener, and every connection here with it.
            if self._door is not None:
                self._door.refused(hello, error)

    async def _recognise(
        self, stream: _Stream, hello: Hello, memory: PeerMemory | LinkError | None, group: LaneGroup
    ) -> None:
        """The two ends are linked already: nothing of this handshake is kept."""
        if memory is not None and not isinstance(memory, LinkError):
            memory.close()
        self._lanes.shut(group)
        await stream.send(Linked(self._host.recognise(hello)))

    async def _take_lane(self, sock: socket.socket) -> None:
        """A data lane of a link that is there, or about to be."""
        token, _ = await read_lane_greeting(self._control.loop, sock)
        group = self._lanes.find(token)
        await accept_lane(self._control.loop, sock)
        self._greetings.pop(sock, None)
        self._lanes.add(group, sock)

    def _check(self, hello: Hello) -> None:
        mine = self._identity
        if hello.version != PROTOCOL_VERSION:
            raise LinkRefused(f"protocol version {hello.version}: this end speaks {PROTOCOL_VERSION}")
        if hello.wanted is not None and hello.wanted != mine.cluster_id:
            raise LinkRefused(
                f"remote_cluster_id={hello.wanted}: the listener at {self.address[0]}:{self.address[1]} is cluster "
                f"{mine.cluster_id}"
            )
        if self._door is not None:
            self._door.check(hello)
        elif hello.meeting is not None:
            raise LinkRefused("no communicator is prepared at this port", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        if hello.remote_accessible != mine.remote_accessible:
            raise LinkRefused(
                f"llm.EnableRemoteCacheAccessible differs: {int(hello.remote_accessible)} at cluster "
                f"{hello.cluster_id}, {int(mine.remote_accessible)} at cluster {mine.cluster_id}",
                status_code=LLMStatusCode.LLM_PARAM_INVALID,
            )

    async def _meet(
        self, sock: socket.socket, stream: _Stream, hello: Hello, group: LaneGroup
    ) -> tuple[Met, PeerMemory | LinkError | None]:
        """Let the peer into the rendezvous, and wait until it says what came of it."""
        outcome: list[PeerMemory | LinkError] = []
        self._rendezvous.expect(hello.token, outcome.append)
        try:
            await stream.send(self._welcome(group.token))
            met = await stream.receive(Met)
            if sock not in self._greetings:
                # Its last word came, but this end has hung up meanwhile and can tell it nothing any more.
                raise LinkRefused("this listener has hung up", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
            return met, outcome.pop() if outcome else None
        finally:
            self._rendezvous.forget(hello.token)
            for unused in outcome:
                if not isinstance(unused, LinkError):
                    unused.close()

    def _welcome(self, lane_token: bytes) -> Welcome:
        mine = self._identity
        return Welcome(
            version=PROTOCOL_VERSION,
            cluster_id=mine.cluster_id,
            incarnation=mine.incarnation,
            remote_accessible=mine.remote_accessible,
            pid=mine.pid,
            host=mine.host,
            rendezvous=self._rendezvous.name,
            cookie=self._exports.guards.cookie,
            cookie_address=self._exports.guards.segment.address,
            exports=self._exports.descriptors(),
            transport=mine.transport,
            lane_token=lane_token,
        )

    def _settle(
        self,
        sock: socket.socket,
        stream: _Stream,
        hello: Hello,
        met: Met,
        memory: PeerMemory | LinkError | None,
        group: LaneGroup,
    ) -> None:
        """Both ends must have chosen alike; then the link is usable here before the peer hears so."""
        claim = Claim(hello.incarnation, hello.cookie, hello.cookie_address, hello.exports)
        with closing(Opening(claim, memory, agree(self._identity.transport, hello.transport))) as opening:
            mine = opening.choice
            if met.transport != mine.name:
                theirs = " ".join(f"{met.transport} ({met.reason})".split())
                raise LinkRefused(f"the ends chose differently: {theirs} there, {mine.name} ({mine.reason}) here")
            connection = opening.open(self._lanes, group, writable=self._exports.writable)
        try:
            self._host.install(hello, met, connection, opening.choice, sock, stream.parser.rest())
        except BaseException:
            connection.close()
            raise
        if not opening.wants_lanes:
            self._lanes.shut(group)


def _hang_up(sock: socket.socket) -> None:
    """End a greeting: not closed but shut down, so that its coroutine sees the end and closes."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
