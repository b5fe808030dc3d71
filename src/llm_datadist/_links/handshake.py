"""Handshakes: :class:`Dial` in a caller's thread, :class:`Listener` on the control thread.

docs/protocol.md numbers the steps. A failure ends only its own connection.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec

from llm_datadist._links.channel import FrameParser, tune
from llm_datadist._links.identity import PeerSecrets, Transcript, new_share
from llm_datadist._links.link import LinkOrigin, Peer
from llm_datadist._links.messages import (
    CONTROL_PREAMBLE,
    MAX_REASON,
    PREAMBLE_BYTES,
    TLS_PREAMBLE,
    Greeting,
    Hello,
    Linked,
    Refused,
    TransportChoice,
    Welcome,
    decode,
    frame,
    refused,
    remote_refusal,
)
from llm_datadist._links.renewal import Renewal
from llm_datadist._links.tls_session import MAX_HANDSHAKE_BYTES
from llm_datadist._log import logger, named
from llm_datadist._transport import instances
from llm_datadist._transport.address import PROTOCOL_VERSION, DialledSocket, new_socket, read_exactly, resolve
from llm_datadist.errors import AuthFailed, LinkError, LinkRefused, LLMException, LLMStatusCode, ProtocolError
from llm_datadist.types.cluster import show_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline
    from llm_datadist._links.credentials import Credentials
    from llm_datadist._links.loop import ControlLoop
    from llm_datadist._links.messages import CommunicatorId, Message
    from llm_datadist._links.tls_session import TlsSession
    from llm_datadist._memory.exports import Exports
    from llm_datadist._transport.choose import Choice
    from llm_datadist._transport.connection import DataPath
    from llm_datadist._transport.registry import Transports
    from llm_datadist._transport.transport import Meeting, Transport

GREETING_SECONDS: Final = 10.0
_RECEIVE_BYTES: Final = 1 << 16
#: For hundreds of dials at once: the kernel repeats others after a second. somaxconn bounds it too.
_BACKLOG: Final = 1024
#: Handshakes in progress, in all and of one address.
_MAX_GREETINGS: Final = 128
_MAX_GREETINGS_OF_ONE_ADDRESS: Final = 64
#: So many may be a new peer's, for its transport.
_FEW_SILENT: Final = 16
_ACCEPT_PAUSE_SECONDS: Final = 1.0
SHARE_BYTES: Final = 32
TOKEN_BYTES: Final = 16
#: The only message to a rejected peer.
_NOT_AUTHENTICATED: Final = Refused(
    int(LLMStatusCode.LLM_LINK_FAILED), "this listener asks for authentication", authentication=True
)
_DIALER, _LISTENER = b"initiator", b"target"  # roles in proofs, on the wire
M = TypeVar("M", bound="Message")


class PeerRules(Protocol):
    """Permissions of clusters in handshakes. Threads: any."""

    def require_link(self, cluster_id: int) -> None:
        """Raise AuthFailed if the cluster may not link."""

    def offered_to(self, cluster_id: int) -> Exports:
        """Return the exports that the cluster may map; raise LinkRefused for none."""
        ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """This instance in a handshake, as either side."""

    cluster_id: int
    remote_accessible: bool
    exports: Exports
    transports: Transports
    peer_secrets: PeerSecrets = field(default_factory=PeerSecrets)
    credentials: Credentials | None = None  # None: links are plain
    check_reach: Callable[[str], None] = lambda host: None  # raises ParamError to forbid a host
    rules: PeerRules | None = None  # None: all peers may link and map all exports

    def offered_to(self, peer: Greeting) -> Exports | LinkRefused:
        """Return the exports for the peer, or the reason for none."""
        try:
            return self.exports if self.rules is None else self.rules.offered_to(peer.cluster_id)
        except LinkRefused as error:
            return error

    def session(self, *, server_side: bool) -> TlsSession | None:
        return None if self.credentials is None else self.credentials.session(server_side=server_side)

    def renewal(self, peer: Greeting, secret: bytes, *, dialled: bool) -> Renewal | None:
        if self.credentials is None:
            return None
        return Renewal(self.credentials.session, lambda tls: _check_identity(self, tls, peer), secret, dialled=dialled)

    def greeting(self, offers: dict[str, bytes], nonce: bytes, share: bytes) -> dict[str, Any]:
        return {
            "version": PROTOCOL_VERSION,
            "cluster_id": self.cluster_id,
            "incarnation": self.exports.incarnation,
            "remote_accessible": self.remote_accessible,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "transport": self.transports.asked,
            "nonce": nonce,
            "share": share,
            "offers": offers,
        }

    def fresh(self) -> tuple[bytes, bytes]:
        return secrets.token_bytes(16), b"" if self.credentials is None else secrets.token_bytes(SHARE_BYTES)


@dataclass(frozen=True, slots=True)
class NewLink:
    """Result of a handshake: a link without a channel."""

    peer: Peer
    connection: DataPath
    choice: Choice
    origin: LinkOrigin
    sock: socket.socket
    leftover: bytes  # bytes after the handshake
    share: bytes = b""  # the listener's half of a new secret
    admitted: Callable[[], None] = lambda: None  # called after admission
    tls: TlsSession | None = None  # encrypts all bytes of the socket
    renewal: Renewal | None = None

    def close(self) -> None:
        self.connection.close()
        self.sock.close()


def _take(parser: FrameParser) -> Message | None:
    """Return the next complete message, or None. Raises ProtocolError."""
    payload = parser.take()
    return None if payload is None else decode(payload)


def _expect(kind: type[M], message: Message) -> M:
    """Return the message. Raises ProtocolError for another kind, even our own echoed greeting."""
    if not isinstance(message, kind):
        raise ProtocolError(f"expected {kind.__name__}, the peer sent {type(message).__name__}")
    return message


def _check_version(mine: Endpoint, theirs: Greeting) -> None:
    if theirs.version != PROTOCOL_VERSION:
        raise LinkRefused(
            f"protocol version differs: {theirs.version} at cluster {theirs.cluster_id}, "
            f"{PROTOCOL_VERSION} at cluster {mine.cluster_id}"
        )
    expected = 0 if mine.credentials is None else SHARE_BYTES
    if len(theirs.share) != expected:
        raise LinkRefused(f"a share of {len(theirs.share)} bytes of the secret: {expected} are needed")


def _check_place(theirs: Greeting, here: Exports | None) -> None:
    """Refuse an unproven claim to live in this process."""
    if here is None and instances.lives_here(theirs.incarnation):
        raise LinkRefused(f"incarnation {theirs.incarnation.hex()[:8]} lives in this process, the peer does not")
    if here is not None and here.incarnation != theirs.incarnation:
        raise LinkRefused(f"the peer lives in this process, incarnation {theirs.incarnation.hex()[:8]} does not")


def _check_access(mine: Endpoint, theirs: Greeting) -> None:
    if theirs.remote_accessible != mine.remote_accessible:
        raise LinkRefused(
            f"llm.EnableRemoteCacheAccessible differs: {int(theirs.remote_accessible)} at cluster "
            f"{theirs.cluster_id}, {int(mine.remote_accessible)} at cluster {mine.cluster_id}",
            status_code=LLMStatusCode.LLM_PARAM_INVALID,
        )


def _check_identity(mine: Endpoint, tls: TlsSession | None, theirs: Greeting) -> None:
    """Raise AuthFailed if the peer may not be that cluster, or may not link."""
    if mine.credentials is not None and tls is not None:
        mine.credentials.check(tls, theirs.cluster_id)
    if mine.rules is not None:
        mine.rules.require_link(theirs.cluster_id)


def _hear(meeting: Meeting, theirs: Greeting) -> None:
    meeting.hear(theirs.offers, theirs.transport, theirs.incarnation, str(Peer.of(theirs)), theirs.cluster_id)


def _link_secret(transcript: Transcript, dialer_share: bytes, listener_share: bytes) -> bytes:
    """Return the link's secret: HKDF-Extract of both shares, sent encrypted. Empty without shares."""
    if not dialer_share:
        return b""
    return hmac.digest(b"".join(transcript), dialer_share + listener_share, "sha256")


class _BlockingFrames(DialledSocket):
    """Frames under one deadline. Raises DeadlineExceeded, LinkRefused or AuthFailed."""

    def __init__(self, addresses: list[tuple[str, int]], deadline: Deadline, what: str, tls: TlsSession | None) -> None:
        super().__init__(addresses, deadline, what)
        self.parser = FrameParser()
        self.tls = tls
        self._heard = False  # a message came: the peer accepts this side

    def introduce(self, hello: Hello) -> None:
        """Send preamble and Hello; with credentials, authenticate the listener in between."""
        if self.tls is None:
            self.send(CONTROL_PREAMBLE + frame(hello))
            return
        self.send(TLS_PREAMBLE)
        try:
            self.send(self.tls.shake())
            while not self.tls.authenticated:
                self.send(self.tls.shake(self._read_some()))
        except AuthFailed as error:
            with suppress(LLMException):
                self.send(self.tls.alert())
            raise self._not_authenticated(error) from None
        self.put(hello)

    def put(self, message: Message) -> None:
        data = frame(message)
        self.send(data if self.tls is None else self.tls.encrypt(data))

    def _read_some(self) -> bytes:
        """Raise AuthFailed if the peer leaves a TLS connection before its first message."""
        try:
            data = self.read(_RECEIVE_BYTES)
        except LinkRefused as error:
            if self.tls is None or self._heard:
                raise
            raise AuthFailed(str(error)) from None
        if data:
            return data
        if self.tls is None or self._heard:
            raise LinkRefused(f"{self.what}: the peer closed the connection in the handshake", phase="handshake")
        raise AuthFailed("the peer closed the connection: it rejected this instance's credentials, or has none")

    def _not_authenticated(self, error: AuthFailed) -> AuthFailed:
        return AuthFailed(f"{self.what}: not authenticated: {error}", phase="handshake")

    def receive(self, kind: type[M]) -> M:
        try:
            while (message := _take(self.parser)) is None:
                data = self._read_some()
                self.parser.feed(data if self.tls is None else self.tls.decrypt(data))
            self._heard = True
            if isinstance(message, Refused):
                raise remote_refusal(message, self.what)
            return _expect(kind, message)
        except ProtocolError as error:
            raise LinkRefused(f"{self.what}: it does not speak this protocol: {error}") from error
        except AuthFailed as error:
            raise self._not_authenticated(error) from None


class Dial(AbstractContextManager["Dial"]):
    """One handshake at the dialer; a context manager.

    :meth:`greet` sets ``peer``, ``connection`` and ``choice``. If given, only ``incarnation`` may answer, and the
    listener must know the ``communicator``.

    Owns: socket and connection until :meth:`take`; the end of the block frees them.
    Threads: one; any for :meth:`hang_up`.
    """

    peer: Peer
    connection: DataPath
    choice: Choice

    def __init__(
        self,
        endpoint: Endpoint,
        address: tuple[str, int],
        deadline: Deadline,
        *,
        incarnation: bytes | None = None,
        communicator: CommunicatorId | None = None,
    ) -> None:
        self._what = f"link to {show_address(address)}"
        addresses = resolve(address, deadline, self._what)
        for host, _ in addresses:
            endpoint.check_reach(host)
        self._address = address
        self._incarnation = incarnation
        self._communicator = communicator
        self._endpoint = endpoint
        self._deadline = deadline
        self._frames = _BlockingFrames(addresses, deadline, self._what, endpoint.session(server_side=False))
        self._undo = ExitStack()
        self._undo.callback(self._frames.close)
        self._meeting = endpoint.transports.meet(secrets.token_bytes(TOKEN_BYTES), dialled=True)
        self._undo.callback(self._meeting.close)
        self._transcript: Transcript
        self._welcome: Welcome
        self._proven = False

    def greet(self, wanted: int | None) -> None:
        """Do steps 1 to 4: connect, exchange greetings, open the data path.

        Raises DeadlineExceeded; AuthFailed if either side rejects the other; LinkRefused if the peer is unreachable,
        refuses, speaks another protocol, or no transport reaches it.
        """
        if wanted is not None and self._endpoint.rules is not None:
            try:
                self._endpoint.rules.require_link(wanted)
            except AuthFailed as error:
                raise AuthFailed(f"{self._what}: {error}") from None
        meeting = self._meeting
        hello = Hello(
            **self._endpoint.greeting(meeting.offers(), *self._endpoint.fresh()),
            wanted=wanted,
            reconnects=self._incarnation is not None,
            token=meeting.token,
            communicator=self._communicator,
        )
        self._frames.connect(tune)
        self._frames.introduce(hello)
        self._welcome = welcome = self._frames.receive(Welcome)
        _hear(meeting, welcome)
        self._transcript = Transcript(hello.incarnation, welcome.incarnation, hello.nonce, welcome.nonce)
        meeting.secret = _link_secret(self._transcript, hello.share, welcome.share)
        known = self._endpoint.peer_secrets
        proven = known.is_proven(welcome.incarnation, _LISTENER, self._transcript, welcome.proof)
        self._proven = proven or meeting.here is not None
        try:
            self._check(welcome, wanted)
            self._open(welcome)
        except (LinkRefused, AuthFailed) as error:
            raise type(error)(f"{self._what}: {error}", status_code=error.status_code) from error
        self.peer = Peer.of(welcome)

    def _check(self, welcome: Welcome, wanted: int | None) -> None:
        _check_version(self._endpoint, welcome)
        _check_identity(self._endpoint, self._frames.tls, welcome)
        _check_place(welcome, self._meeting.here)
        if self._incarnation not in (None, welcome.incarnation):
            raise LinkRefused(
                f"another process answers there: cluster {welcome.cluster_id}, pid {welcome.pid}",
                status_code=LLMStatusCode.LLM_NOT_YET_LINK,
            )
        if self._incarnation is not None and not self._proven:
            raise LinkRefused(
                f"cluster {welcome.cluster_id}, pid {welcome.pid}, answers there and cannot prove that it is the "
                "process of the lost link",
                status_code=LLMStatusCode.LLM_NOT_YET_LINK,
            )
        if wanted is not None and welcome.cluster_id != wanted:
            raise LinkRefused(f"remote_cluster_id={wanted}, but cluster {welcome.cluster_id} answered")
        _check_access(self._endpoint, welcome)

    def _open(self, welcome: Welcome) -> None:
        meeting, frames = self._meeting, self._frames
        meeting.offered = self._endpoint.offered_to(welcome)
        meeting.sock, meeting.address, meeting.deadline = frames.socket, frames.address, self._deadline
        meeting.choose()
        self.connection = meeting.open()
        self._undo.callback(self.connection.close)
        self.choice = meeting.choice

    def confirm(self, sequence: int, *, present: bool = False) -> int:
        """Do steps 5 and 6: send the choice and this side's number, return the listener's.

        ``present``: use the existing link with that number.
        """
        reason, known, peer = self.choice.reason[:MAX_REASON], self._endpoint.peer_secrets, self.peer.incarnation
        proof = known.prove(peer, _DIALER, self._transcript) if self._proven else b""
        share = b"" if proof else new_share()
        self._frames.put(
            TransportChoice(self.choice.name, reason, sequence, present, proof, share, self.choice.private)
        )
        linked = self._frames.receive(Linked)
        if share:
            known.agree(peer, share, linked.share, self._transcript)
        return linked.sequence

    def take(self, sequence: int, peer_sequence: int) -> NewLink:
        self._undo.pop_all()
        self._meeting.close()
        by_communicator = self._communicator is not None
        origin = LinkOrigin(
            dialled=True,
            sequence=sequence,
            peer_sequence=peer_sequence,
            # A communicator's listener closes soon.
            address=None if by_communicator else self._address,
            reconnected=self._incarnation is not None,
            by_communicator=by_communicator,
        )
        sock, leftover, tls = self._frames.socket, self._frames.parser.rest(), self._frames.tls
        renewal = self._endpoint.renewal(self._welcome, self._meeting.secret, dialled=True)
        return NewLink(self.peer, self.connection, self.choice, origin, sock, leftover, tls=tls, renewal=renewal)

    def hang_up(self) -> None:
        """Fail a waiting call at once; also end a taken link."""
        _shut_down(self._frames.socket)

    def abandon(self) -> None:
        self._frames.socket.close()

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()


class Host(Protocol):
    """Link manager of a listener, on the control thread. Raises LinkError to refuse."""

    def refuse_if_full(self, hello: Hello, source: str) -> None: ...
    async def admit(self, hello: Hello, *, proven: bool) -> None: ...
    def install(self, new: NewLink) -> None: ...
    def recognise(self, hello: Hello) -> int: ...


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Admission of peers. On the control thread."""

    check: Callable[[Hello], None]  # raises LinkError to refuse
    refused: Callable[[Hello, LLMException], None]  # after an identified Hello was refused


def listening_socket(address: tuple[str, int]) -> socket.socket:
    """Return a listening socket; port 0 picks a free one. Raises OSError."""
    sock = new_socket(address)
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
    """As :func:`listening_socket`; raises LinkError, which names the address (interface §3.1)."""
    try:
        return listening_socket(address)
    except OSError as error:
        raise LinkError(
            f"listenIpInfo={show_address(address)}: cannot listen there: {error.strerror or error}",
            status_code=LLMStatusCode.LLM_FAILED,
        ) from error


class _AsyncFrames:
    """Frames for coroutines. Raises OSError, ProtocolError and AuthFailed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._loop = loop
        self.socket = sock
        self.parser = FrameParser()
        self.tls: TlsSession | None = None

    async def preamble(self) -> bytes:
        """Read the preamble only: the rest may be a transport's."""
        return await read_exactly(self._loop, self.socket, PREAMBLE_BYTES, "preamble")

    async def authenticate(self, tls: TlsSession) -> None:
        """Authenticate both sides, and encrypt from here on. Raises AuthFailed."""
        self.tls = tls
        try:
            while not tls.authenticated:
                reply = tls.shake(await self._receive_some(MAX_HANDSHAKE_BYTES))
                await self._loop.sock_sendall(self.socket, reply)
        except AuthFailed:
            await self._loop.sock_sendall(self.socket, tls.alert())
            raise
        self.parser.feed(tls.decrypt(b""))  # the handshake may have brought the first message

    async def send(self, message: Message) -> None:
        data = frame(message)
        await self._loop.sock_sendall(self.socket, data if self.tls is None else self.tls.encrypt(data))

    async def receive(self, kind: type[M]) -> M:
        while (message := _take(self.parser)) is None:
            data = await self._receive_some(_RECEIVE_BYTES)
            self.parser.feed(data if self.tls is None else self.tls.decrypt(data))
        return _expect(kind, message)

    async def _receive_some(self, most: int) -> bytes:
        data = await self._loop.sock_recv(self.socket, most)
        if not data:
            raise ProtocolError("the connection ended inside the handshake", phase="handshake")
        return data


@dataclass(slots=True)
class _Handshake:
    """One handshake at the listener."""

    frames: _AsyncFrames
    hello: Hello
    meeting: Meeting
    source: str  # dialer's address
    proven: bool = False
    choice: TransportChoice = field(init=False)  # set after the choice
    transcript: Transcript = field(init=False)


@dataclass(eq=False)
class Listener:
    """One listening address: of one communicator if it has ``_admission``, otherwise of ``link_clusters``.

    Owns: the listening socket, and unverified connections until they are links or a transport's.
    Threads: control.
    """

    _control: ControlLoop
    _sock: socket.socket
    _endpoint: Endpoint
    _host: Host
    _admission: AdmissionPolicy | None = None
    #: Oldest first: addresses of handshakes in progress; those without a Hello.
    _greetings: dict[socket.socket, str] = field(default_factory=dict)
    _silent: dict[socket.socket, None] = field(default_factory=dict)
    _resume: asyncio.TimerHandle | None = None
    _warn_again_at: float = 0.0

    def __post_init__(self) -> None:
        self.address: tuple[str, int] = self._sock.getsockname()[:2]
        self._listen()

    def close(self) -> None:
        """Stop listening and end the handshakes in progress, no links."""
        if self._resume is not None:
            self._resume.cancel()
        self._control.loop.remove_reader(self._sock)
        self._sock.close()
        for sock in list(self._greetings):
            self._hang_up(sock)

    def abandon(self) -> None:
        """In a forked child: close copies of sockets only."""
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
            # Out of descriptors the loop would spin without a pause.
            logger.warning("listener %s cannot accept and pauses: %s", show_address(self.address), error)
            self._control.loop.remove_reader(self._sock)
            self._resume = self._control.loop.call_later(_ACCEPT_PAUSE_SECONDS, self._listen)
            return
        neighbours = [each for each, source in self._greetings.items() if source == address[0]]
        if len(neighbours) >= _MAX_GREETINGS_OF_ONE_ADDRESS:
            self._make_room(neighbours)
        elif len(self._greetings) >= _MAX_GREETINGS:
            self._make_room(list(self._greetings))
        sock.setblocking(False)
        self._greetings[sock] = address[0]
        self._silent[sock] = None
        self._control.spawn(self._greet(sock, address))

    def _make_room(self, among: list[socket.socket]) -> None:
        """Hang up on the oldest, on the oldest silent one if more than :data:`_FEW_SILENT` are silent."""
        silent = [each for each in among if each in self._silent]
        self._hang_up((silent if len(silent) > _FEW_SILENT else among)[0])

    def _hang_up(self, sock: socket.socket) -> None:
        """End a handshake; its coroutine closes the socket."""
        self._silent.pop(sock, None)
        self._greetings.pop(sock, None)
        _shut_down(sock)

    async def _greet(self, sock: socket.socket, address: tuple[str, int]) -> None:
        handed_over = False
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                handed_over = await self._shake_hands(sock, address[0])
        except AuthFailed as error:
            self._warn(address, error)
        except (TimeoutError, OSError, LLMException) as error:
            reason = named(error) if str(error) else "it took too long"
            logger.info("handshake with %s failed: %s", show_address(address[:2]), reason)
        finally:
            self._greetings.pop(sock, None)
            self._silent.pop(sock, None)
            if not handed_over:
                sock.close()

    def _warn(self, address: tuple[str, int], error: AuthFailed) -> None:
        """Warn at most once a second, because any number of connections may come."""
        now = self._control.loop.time()
        if now >= self._warn_again_at:
            self._warn_again_at = now + 1
            logger.warning("a connection from %s is not admitted: %s", show_address(address[:2]), named(error))

    async def _shake_hands(self, sock: socket.socket, source: str) -> bool:
        """Do all steps; return True if the socket has another owner."""
        frames = _AsyncFrames(self._control.loop, sock)
        preamble = await frames.preamble()
        if (transport := self._endpoint.transports.of_preamble(preamble)) is not None:
            await self._hand_over(sock, transport)
            return True
        if preamble not in (CONTROL_PREAMBLE, TLS_PREAMBLE):
            raise ProtocolError(f"the preamble {preamble!r} is not one of ours")
        tune(sock)
        await self._authenticate(frames, encrypted=preamble == TLS_PREAMBLE)
        hello = await frames.receive(Hello)
        await self._identify(frames, hello)
        self._silent.pop(sock, None)
        meeting = self._endpoint.transports.meet(hello.token, dialled=False)
        handshake = _Handshake(frames, hello, meeting, source)
        try:
            self._check(handshake)
            self._host.refuse_if_full(hello, source)
            await self._host.admit(hello, proven=True)  # as claimed; the proof comes with the choice
            await self._exchange_offers(handshake)
            if not handshake.proven:
                await self._host.admit(hello, proven=False)
            if handshake.choice.present:
                await self._recognise(handshake)
                return False
            self._complete(handshake)
        except BaseException as error:
            meeting.close()
            if isinstance(error, LLMException):
                await self._refuse(frames, hello, error)
            raise
        finally:
            meeting.close()
        return True

    async def _authenticate(self, frames: _AsyncFrames, *, encrypted: bool) -> None:
        tls = self._endpoint.session(server_side=True)
        if tls is not None and encrypted:
            await frames.authenticate(tls)
        elif tls is not None:
            await frames.send(_NOT_AUTHENTICATED)
            raise AuthFailed("it does not authenticate itself")
        elif encrypted:
            raise AuthFailed("it asks for authentication; this instance has no credentials")

    async def _identify(self, frames: _AsyncFrames, hello: Hello) -> None:
        try:
            _check_identity(self._endpoint, frames.tls, hello)
        except AuthFailed:
            await frames.send(_NOT_AUTHENTICATED)
            raise

    async def _refuse(self, frames: _AsyncFrames, hello: Hello, error: LLMException) -> None:
        try:
            with suppress(OSError):  # the reason is logged anyway
                await frames.send(refused(error))
        finally:
            # Last: it may close this listener.
            if self._admission is not None:
                self._admission.refused(hello, error)

    async def _recognise(self, handshake: _Handshake) -> None:
        """Answer with the number of the present link."""
        if not handshake.proven:
            raise LinkRefused(
                f"cluster {handshake.hello.cluster_id} cannot prove that it is the linked process",
                status_code=LLMStatusCode.LLM_LINK_BUSY,
            )
        handshake.meeting.close()
        await handshake.frames.send(Linked(self._host.recognise(handshake.hello), b""))

    async def _hand_over(self, sock: socket.socket, transport: Transport) -> None:
        """Give a transport its own connection."""
        take = await transport.admit(self._control.loop, sock)
        self._greetings.pop(sock, None)
        take()

    def _check(self, handshake: _Handshake) -> None:
        mine, hello = self._endpoint, handshake.hello
        _check_version(mine, hello)
        _check_place(hello, handshake.meeting.here)
        if hello.wanted is not None and hello.wanted != mine.cluster_id:
            raise LinkRefused(
                f"remote_cluster_id={hello.wanted}: the listener at {show_address(self.address)} is cluster "
                f"{mine.cluster_id}"
            )
        if self._admission is not None:
            self._admission.check(hello)
        elif hello.communicator is not None:
            raise LinkRefused("no communicator is prepared at this port", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        _check_access(mine, hello)

    async def _exchange_offers(self, handshake: _Handshake) -> None:
        """Send Welcome; receive choice and proof."""
        frames, hello, meeting = handshake.frames, handshake.hello, handshake.meeting
        known, own = self._endpoint.peer_secrets, self._endpoint.exports.incarnation
        nonce, share = self._endpoint.fresh()
        handshake.transcript = transcript = Transcript(hello.incarnation, own, hello.nonce, nonce)
        meeting.sock, meeting.offered = frames.socket, self._endpoint.offered_to(hello)
        meeting.secret = _link_secret(transcript, hello.share, share)
        _hear(meeting, hello)
        proof = known.prove(hello.incarnation, _LISTENER, transcript)
        await frames.send(Welcome(**self._endpoint.greeting(meeting.offers(), nonce, share), proof=proof))
        handshake.choice = choice = await frames.receive(TransportChoice)
        meeting.end_exchange()
        if frames.socket not in self._greetings:
            # This side has hung up, and cannot answer.
            raise LinkRefused("this listener has hung up", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        shown = known.is_proven(hello.incarnation, _DIALER, transcript, choice.proof)
        handshake.proven = shown or meeting.here is not None

    def _complete(self, handshake: _Handshake) -> None:
        """Open the data path if both sides chose alike, and install the link."""
        hello, theirs, frames, meeting = handshake.hello, handshake.choice, handshake.frames, handshake.meeting
        mine = meeting.choose()
        if theirs.transport != mine.name:
            there = " ".join(f"{theirs.transport} ({theirs.reason})".split())
            raise LinkRefused(f"the sides chose different transports: {there} there, {mine.name} ({mine.reason}) here")
        meeting.yield_to(theirs.private)
        connection = meeting.open()
        try:
            by_communicator = hello.communicator is not None
            origin = LinkOrigin(
                dialled=False,
                sequence=0,  # the host sets it
                peer_sequence=theirs.sequence,
                reconnected=hello.reconnects,
                source=handshake.source,
                by_communicator=by_communicator,
                greetings=[msgspec.structs.replace(hello, offers={})] if by_communicator else [],
            )
            sock, leftover = frames.socket, frames.parser.rest()
            peer, share = Peer.of(hello), new_share() if theirs.share else b""
            shares = peer.incarnation, theirs.share, share, handshake.transcript
            agree = partial(self._endpoint.peer_secrets.agree, *shares) if share else lambda: None
            renewal = self._endpoint.renewal(hello, meeting.secret, dialled=False)
            self._host.install(
                NewLink(peer, connection, meeting.choice, origin, sock, leftover, share, agree, frames.tls, renewal)
            )
        except BaseException:
            connection.close()
            raise


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
