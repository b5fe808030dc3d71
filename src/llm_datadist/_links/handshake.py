"""How two processes become linked: the frames, in order, of the initiator and of the target.

    initiator (a caller's thread, blocking)           target (the control thread, a coroutine)
    1  connect, preamble, Hello            ------>    checks version, RCA, wanted id, other links of that id
    2                                      <------    Welcome (or Refused), token now valid at its rendezvous
    3  same-host rendezvous: fds both ways <----->    samehost listener
       data lanes, where one is needed     ------>    the same listener, by their token
    4  chooses a transport, Met            ------>    chooses too; both must agree
    5                                      <------    Linked (or Refused); the link is usable at the target
    6  the link is usable at the initiator

Any failure ends only this connection. The target gives a stranger :data:`GREETING_SECONDS` for all of it. This module
is the initiator's half, ``_links/handshake.py`` the target's.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeVar

from llm_datadist._links.channel import FrameParser, tune
from llm_datadist._links.link import Peer
from llm_datadist._links.messages import (
    CONTROL_PREAMBLE,
    PREAMBLE_BYTES,
    PROTOCOL_VERSION,
    Hello,
    Linked,
    Refused,
    TransportChoice,
    Welcome,
    decode,
    frame,
)
from llm_datadist._log import logger
from llm_datadist._transport import agree
from llm_datadist._transport.connect import (
    LANES_PER_LINK,
    ConnectionBuilder,
    LaneDialer,
    PeerIdentity,
    exchange_memory_with,
)
from llm_datadist._transport.lanes import LANE_PREAMBLE, TOKEN_BYTES, accept_lane, read_lane_greeting
from llm_datadist.errors import LinkError, LinkRefused, LLMException, LLMStatusCode, ProtocolError, code_2_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline
    from llm_datadist._links.loop import ControlLoop
    from llm_datadist._links.messages import CommunicatorId, Message
    from llm_datadist._memory.exports import Exports
    from llm_datadist._transport import Choice, PeerMemory
    from llm_datadist._transport.connection import DataPath
    from llm_datadist._transport.lanes import LaneGroup, Lanes
    from llm_datadist._transport.samehost import SameHostListener

__all__ = ["GREETING_SECONDS", "AdmissionPolicy", "Dial", "Host", "Identity", "Listener", "bind", "listening_socket"]

GREETING_SECONDS: Final = 10.0
M = TypeVar("M", bound="Message")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this end is, as it introduces itself."""

    cluster_id: int
    incarnation: bytes
    pid: int
    host: str
    remote_accessible: bool
    transport: str | None  # forced, or None


class _Wire:
    """Blocking frames on one socket under one deadline. Whatever fails leaves as DeadlineExceeded or LinkRefused."""

    def __init__(self, deadline: Deadline, what: str) -> None:
        self.parser = FrameParser()
        self._deadline = deadline
        self._what = what
        try:
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            raise LinkRefused(f"{what}: no socket: {error.strerror}") from error

    def connect(self, address: tuple[str, int]) -> None:
        self._call("connect", lambda: self.socket.connect(address))
        self._call("connect", lambda: tune(self.socket))

    def send(self, data: bytes) -> None:
        self._call("handshake", lambda: self.socket.sendall(data))

    def receive(self, kind: type[M]) -> M:
        """Return the next message, which must be of ``kind``; a Refused raises LinkRefused with its code."""
        try:
            while (payload := self.parser.take()) is None:
                data = self._call("handshake", lambda: self.socket.recv(65536))
                if not data:
                    raise LinkRefused(
                        f"{self._what}: the peer closed the connection in the handshake", phase="handshake"
                    )
                self.parser.feed(data)
            message = decode(payload)
        except ProtocolError as error:
            raise LinkRefused(f"{self._what}: it does not speak this protocol: {error}") from error
        if isinstance(message, Refused):
            raise _refusal(self._what, message)
        if not isinstance(message, kind):
            raise LinkRefused(f"{self._what}: expected {kind.__name__}, the peer sent {type(message).__name__}")
        return message

    def _call(self, phase: str, operation: Callable[[], R]) -> R:
        """Do one socket call within what is left of the deadline."""
        self._deadline.check(self._what, phase)
        self.socket.settimeout(max(self._deadline.remaining(), 1e-6))
        try:
            return operation()
        except OSError as error:
            # The timeout set above has no number; ETIMEDOUT is the network's own verdict.
            if isinstance(error, TimeoutError) and error.errno is None:
                raise self._deadline.error(self._what, phase) from error
            raise LinkRefused(f"{self._what}: {phase} failed: {error.strerror or error}", phase=phase) from error


class Dial:
    """One handshake, seen from the initiator. Used by one thread, as a context manager; :meth:`hang_up` by any.

    What it holds is given back at the end of the block, unless it was taken.

    Args:
        again: The incarnation that must answer, when a lost link is dialled again.
        meeting: The communicator that this is for, and that must be known there; None: ``link_clusters`` asks.

    Attributes:
        peer: Who answered.
        connection: The data connection, open.
        choice: Its transport, and why.
        address: Where it dials.
        by_table: True when it is for a communicator.
    """

    peer: Peer
    connection: DataPath
    choice: Choice

    def __init__(
        self,
        address: tuple[str, int],
        identity: Identity,
        exports: Exports,
        lanes: Lanes,
        deadline: Deadline,
        *,
        again: bytes | None = None,
        meeting: CommunicatorId | None = None,
    ) -> None:
        self._what = f"link to {address[0]}:{address[1]}"
        self.address = address
        self.by_table = meeting is not None
        self._again = again
        self._meeting = meeting
        self._identity = identity
        self._exports = exports
        self._lanes = lanes
        self._deadline = deadline
        self._wire = _Wire(deadline, self._what)
        self._undo = ExitStack()
        self._undo.callback(self._wire.socket.close)

    def greet(self, wanted: int | None) -> None:
        """Steps 1 to 4, without the Met: connect, introduce, meet, choose.

        Raises:
            DeadlineExceeded: Not done in time, in whichever phase.
            LinkRefused: Unreachable, refused, speaks something else, or no transport reaches it.
        """
        token = secrets.token_bytes(16)
        self._wire.connect(self.address)
        self._wire.send(CONTROL_PREAMBLE + frame(self._hello(wanted, token)))
        welcome = self._wire.receive(Welcome)
        self._check(welcome, wanted)
        forced = self._agree(welcome)
        memory = exchange_memory_with(
            welcome.rendezvous, token, welcome.incarnation, self._exports, forced, self._deadline
        )
        try:
            self._open(welcome, memory, forced)
        except LinkRefused as error:
            raise LinkRefused(f"{self._what}: {error}") from error
        self._undo.callback(self.connection.close)
        self.peer = Peer(welcome.cluster_id, welcome.incarnation, welcome.pid, welcome.host)

    def _agree(self, welcome: Welcome) -> str | None:
        try:
            return agree(self._identity.transport, welcome.transport)
        except LinkRefused as error:
            raise LinkRefused(f"{self._what}: {error}") from error

    def _open(self, welcome: Welcome, memory: PeerMemory | LinkError | None, forced: str | None) -> None:
        """Choose the transports, dial the lanes where one goes over them, open the connection."""
        claim = PeerIdentity(welcome.incarnation, welcome.cookie, welcome.cookie_address, welcome.exports)
        with closing(ConnectionBuilder(claim, memory, forced)) as opening:
            dialer = LaneDialer(self.address, welcome.lane_token)
            group = self._lanes.open(dialer.dial(LANES_PER_LINK, self._deadline) if opening.wants_lanes else ())
            self._undo.callback(self._lanes.shut, group)
            self.connection = opening.open(self._lanes, group, writable=self._exports.writable, reconnect=dialer.dial)
            self.choice = opening.choice

    def settle(self, sequence: int, *, present: bool = False) -> int:
        """Steps 4 to 6: tell the choice and this end's number, return the target's.

        ``present``: the link with that number is to be used, not this one.
        """
        self._wire.send(frame(TransportChoice(self.choice.name, self.choice.reason[:4000], sequence, present)))
        return self._wire.receive(Linked).sequence

    def take(self) -> tuple[socket.socket, bytes]:
        """Return the socket and what came after the handshake; they and the connection are the caller's from now on."""
        self._undo.pop_all()
        return self._wire.socket, self._wire.parser.rest()

    def hang_up(self) -> None:
        """Let the call that waits for the peer fail at once. Any thread; what was taken is hung up on too."""
        with suppress(OSError):
            self._wire.socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """In a forked child: close the child's copy of the socket, and say nothing to the peer."""
        self._wire.socket.close()

    def _hello(self, wanted: int | None, token: bytes) -> Hello:
        mine = self._identity
        return Hello(
            version=PROTOCOL_VERSION,
            cluster_id=mine.cluster_id,
            incarnation=mine.incarnation,
            remote_accessible=mine.remote_accessible,
            pid=mine.pid,
            host=mine.host,
            wanted=wanted,
            redials=self._again is not None,
            token=token,
            cookie=self._exports.guards.cookie,
            cookie_address=self._exports.guards.segment.address,
            exports=self._exports.descriptors(),
            transport=mine.transport,
            meeting=self._meeting,
        )

    def _check(self, welcome: Welcome, wanted: int | None) -> None:
        """What the target has checked in our Hello is checked in its answer too."""
        if welcome.version != PROTOCOL_VERSION:
            raise LinkRefused(f"{self._what}: it speaks version {welcome.version}, this end {PROTOCOL_VERSION}")
        if self._again not in (None, welcome.incarnation):
            raise LinkRefused(
                f"{self._what}: another process answers there: cluster {welcome.cluster_id}, pid {welcome.pid}",
                status_code=LLMStatusCode.LLM_NOT_YET_LINK,
            )
        if wanted is not None and welcome.cluster_id != wanted:
            raise LinkRefused(f"{self._what}: remote_cluster_id={wanted}, but cluster {welcome.cluster_id} answered")
        if welcome.remote_accessible != self._identity.remote_accessible:
            raise LinkRefused(
                f"{self._what}: llm.EnableRemoteCacheAccessible differs: {int(welcome.remote_accessible)} there, "
                f"{int(self._identity.remote_accessible)} here",
                status_code=LLMStatusCode.LLM_PARAM_INVALID,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()


def _refusal(what: str, message: Refused) -> LinkRefused:
    """Nothing that is raised carries success (R29), whatever the peer says; its words go on one line."""
    code = code_2_status(message.code)
    if code is LLMStatusCode.LLM_SUCCESS:
        code = LLMStatusCode.LLM_LINK_FAILED
    return LinkRefused(f"{what}: refused: {' '.join(message.text.split())}", status_code=code)


_BACKLOG: Final = 128
#: Strangers in the middle of a handshake; beyond, one makes room: the oldest of those who have not said who they are,
#: else the oldest of all.
_MAX_GREETINGS: Final = 128
_ACCEPT_PAUSE_SECONDS: Final = 1.0


class Host(Protocol):
    """What the listener asks of the link manager. All on the control thread."""

    async def admit(self, hello: Hello) -> None:
        """Raise LinkError when there may be no link to that peer now."""

    def install(
        self,
        hello: Hello,
        met: TransportChoice,
        connection: DataPath,
        choice: Choice,
        sock: socket.socket,
        leftover: bytes,
    ) -> None:
        """Make the link usable, then send Linked. Owns connection and socket, unless it raises LinkError."""

    def recognise(self, hello: Hello) -> int:
        """A communicator is to use the link that there is; return its number. Raises LinkError if there is none."""


class AdmissionPolicy(Protocol):
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

    With ``admission`` it serves for one communicator only; without one it lets no communicator in.
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
        admission: AdmissionPolicy | None = None,
    ) -> None:
        self._control = control
        self._sock = sock
        self._identity = identity
        self._exports = exports
        self._rendezvous = rendezvous
        self._lanes = lanes
        self._host = host
        self._admission = admission
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
            if self._admission is not None:
                self._admission.refused(hello, error)

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
        token = await read_lane_greeting(self._control.loop, sock)
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
        if self._admission is not None:
            self._admission.check(hello)
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
    ) -> tuple[TransportChoice, PeerMemory | LinkError | None]:
        """Let the peer into the rendezvous, and wait until it says what came of it."""
        outcome: list[PeerMemory | LinkError] = []
        self._rendezvous.expect(hello.token, outcome.append)
        try:
            await stream.send(self._welcome(group.token))
            met = await stream.receive(TransportChoice)
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
        met: TransportChoice,
        memory: PeerMemory | LinkError | None,
        group: LaneGroup,
    ) -> None:
        """Both ends must have chosen alike; then the link is usable here before the peer hears so."""
        claim = PeerIdentity(hello.incarnation, hello.cookie, hello.cookie_address, hello.exports)
        with closing(ConnectionBuilder(claim, memory, agree(self._identity.transport, hello.transport))) as opening:
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
