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
from llm_datadist._links.identity import DIALER, LISTENER, SHARE_BYTES, PeerSecrets, Transcript, new_share
from llm_datadist._links.link import Link, LinkOrigin, Peer
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
    remote_refusal,
)
from llm_datadist._links.renewal import Renewal
from llm_datadist._links.tls_session import MAX_HANDSHAKE_BYTES
from llm_datadist._links.versions import FEATURES, VERSIONS, Spoken, agree
from llm_datadist._log import logger, named
from llm_datadist._transport import instances
from llm_datadist._transport.address import (
    DialledSocket,
    is_plain,
    new_socket,
    other_build,
    read_exactly,
    resolve,
    shut_down,
)
from llm_datadist._transport.users import why_other_user
from llm_datadist.config import AUTH_SECRET, INSECURE, SAME_USER_ONLY
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
    from llm_datadist._transport.registry import Transports
    from llm_datadist._transport.transport import Meeting

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
#: The only message to a rejected peer.
_NOT_AUTHENTICATED: Final = Refused(
    int(LLMStatusCode.LLM_LINK_FAILED), "this listener asks for authentication", authentication=True
)
_OTHER_USERS: Final = (
    f"{SAME_USER_ONLY}=1 links no other users unless both sides have credentials ({AUTH_SECRET}, --secrets of "
    f"llm-datadist store) or {INSECURE}=1 believes everybody"
)
M = TypeVar("M", bound="Message")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """This instance in a handshake, as either side."""

    cluster_id: int
    remote_accessible: bool
    transports: Transports
    credentials: Credentials | None  # None: links are plain
    check_reach: Callable[[str], None]  # raises ParamError to forbid a host
    require_link: Callable[[int], None]  # raises AuthFailed if the cluster may not link; any thread
    offered_to: Callable[[int], Exports | LinkRefused]  # exports that the cluster may map, or why none; any thread
    users: frozenset[int] | None = None  # of this host that may link, with this process's own; None: all
    peer_secrets: PeerSecrets = field(default_factory=PeerSecrets)

    def session(self, *, server_side: bool) -> TlsSession | None:
        return None if self.credentials is None else self.credentials.session(server_side=server_side)

    def renewal(self, peer: Greeting, secret: bytes, *, dialled: bool) -> Renewal | None:
        if self.credentials is None:
            return None
        return Renewal(self.credentials.session, lambda tls: self.check_identity(tls, peer), secret, dialled=dialled)

    def require_user(self, sock: socket.socket) -> None:
        """Raise AuthFailed unless the peer's user may link."""
        if self.users is not None and (why := why_other_user(sock, self.users)):
            raise AuthFailed(f"{why}; {_OTHER_USERS}")

    def greeting(self) -> dict[str, Any]:
        """Return the fields of a new greeting, but for its offers."""
        return {
            "versions": VERSIONS,
            "features": FEATURES,
            "cluster_id": self.cluster_id,
            "incarnation": self.transports.exports.incarnation,
            "remote_accessible": self.remote_accessible,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "transport": self.transports.asked,
            "nonce": secrets.token_bytes(16),
            "share": b"" if self.credentials is None else new_share(),
        }

    def agree(self, theirs: Greeting) -> Spoken:
        """Return what the link speaks. Raises LinkRefused."""
        spoken = agree(self.cluster_id, theirs)
        expected = 0 if self.credentials is None else SHARE_BYTES
        if len(theirs.share) != expected:
            raise LinkRefused(f"a share of {len(theirs.share)} bytes of the secret: {expected} are needed")
        return spoken

    def check_access(self, theirs: Greeting) -> None:
        if theirs.remote_accessible != self.remote_accessible:
            there = f"{int(theirs.remote_accessible)} at cluster {theirs.cluster_id}"
            here = f"{int(self.remote_accessible)} at cluster {self.cluster_id}"
            text = f"llm.EnableRemoteCacheAccessible differs: {there}, {here}"
            raise LinkRefused(text, status_code=LLMStatusCode.LLM_PARAM_INVALID)

    def check_identity(self, tls: TlsSession | None, theirs: Greeting) -> None:
        """Raise AuthFailed if the peer may not be that cluster, or may not link."""
        if self.credentials is not None and tls is not None:
            self.credentials.check(tls, theirs.cluster_id)
        self.require_link(theirs.cluster_id)


@dataclass(frozen=True, slots=True)
class NewLink:
    """Result of a handshake: a link without a channel."""

    link: Link
    sock: socket.socket
    leftover: bytes  # bytes after the handshake
    agreed: bytes = b""  # digest of the greetings, for the dialer
    share: bytes = b""  # the listener's half of a new secret
    admitted: Callable[[], None] = lambda: None  # called after admission
    tls: TlsSession | None = None  # encrypts all bytes of the socket


def _expect(kind: type[M], message: Message) -> M:
    """Return the message. Raises ProtocolError for another kind, even our own echoed greeting."""
    if not isinstance(message, kind):
        raise ProtocolError(f"expected {kind.__name__}, the peer sent {type(message).__name__}")
    return message


def _check_agreed(message: TransportChoice | Linked, agreed: bytes) -> None:
    if message.agreed != agreed:
        raise LinkRefused("the greetings were changed on the way: each side heard other versions or features than sent")


def _check_place(theirs: Greeting, here: Exports | None) -> None:
    """Refuse an unproven claim to live in this process."""
    if here is None and instances.lives_here(theirs.incarnation):
        raise LinkRefused(f"incarnation {theirs.incarnation.hex()[:8]} lives in this process, the peer does not")
    if here is not None and here.incarnation != theirs.incarnation:
        raise LinkRefused(f"the peer lives in this process, incarnation {theirs.incarnation.hex()[:8]} does not")


def _hear(meeting: Meeting, theirs: Greeting, transcript: Transcript, shares: bytes) -> None:
    """Tell the meeting of the peer, and the link's secret: HKDF-Extract of both shares, sent encrypted."""
    meeting.secret = hmac.digest(b"".join(transcript), shares, "sha256") if shares else b""
    meeting.hear(theirs.offers, theirs.transport, theirs.incarnation, str(Peer.of(theirs)), theirs.cluster_id)


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
        try:
            self.send(TLS_PREAMBLE + self.tls.shake())
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
            if data := self.read(_RECEIVE_BYTES):
                return data
            text = f"{self.what}: the peer closed the connection in the handshake"
        except LinkRefused as error:
            if self.hung_up:
                raise
            text = str(error)
        if self._heard:
            raise LinkRefused(text, phase="handshake")
        if self.tls is None:
            raise LinkRefused(f"{text}; is it another program, or a release before 0.2.0?", phase="handshake")
        text = text.removeprefix(f"{self.what}: ")
        raise AuthFailed(f"{text}: it rejected this instance's credentials, has none, or is a release before 0.2.0")

    def _not_authenticated(self, error: AuthFailed) -> AuthFailed:
        return AuthFailed(f"{self.what}: not authenticated: {error}", phase="handshake")

    def receive(self, kind: type[M]) -> M:
        try:
            while (payload := self.parser.take()) is None:
                data = self._read_some()
                self.parser.feed(data if self.tls is None else self.tls.decrypt(data))
            message = decode(payload)
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

    :meth:`greet` sets ``peer``. If given, only ``incarnation`` may answer, from a listener of ``communicator``.

    Owns: socket and connection until :meth:`take`; the end of the block frees them.
    Threads: one; any for :meth:`hang_up`.
    """

    peer: Peer

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
        self._meeting = endpoint.transports.meet(secrets.token_bytes(16), dialled=True)
        self._undo.callback(self._meeting.close)

    def greet(self, wanted: int | None) -> None:
        """Do steps 1 to 4: connect, exchange greetings, open the data path.

        Raises DeadlineExceeded; AuthFailed if either side rejects the other; LinkRefused if the peer is unreachable,
        refuses, speaks another protocol, or no transport reaches it.
        """
        endpoint, meeting = self._endpoint, self._meeting
        if wanted is not None:
            try:
                endpoint.require_link(wanted)
            except AuthFailed as error:
                raise AuthFailed(f"{self._what}: {error}") from None
        hello = Hello(
            **endpoint.greeting(),
            offers=meeting.offers(),
            wanted=wanted,
            reconnects=self._incarnation is not None,
            token=meeting.token,
            communicator=self._communicator,
        )
        self._frames.connect(tune)
        self._frames.introduce(hello)
        self._welcome = welcome = self._frames.receive(Welcome)
        self._transcript = Transcript.of(hello, welcome)
        _hear(meeting, welcome, self._transcript, hello.share + welcome.share)
        proven = endpoint.peer_secrets.is_proven(welcome.incarnation, LISTENER, self._transcript, welcome.proof)
        self._proven = proven or meeting.here is not None
        try:
            self._open(welcome, wanted)
        except (LinkRefused, AuthFailed) as error:
            raise type(error)(f"{self._what}: {error}", status_code=error.status_code) from error
        self.peer = Peer.of(welcome)

    def _open(self, welcome: Welcome, wanted: int | None) -> None:
        """Check the peer, then open the data path."""
        endpoint, meeting, frames = self._endpoint, self._meeting, self._frames
        endpoint.require_user(frames.socket)
        self._spoken = endpoint.agree(welcome)
        endpoint.check_identity(frames.tls, welcome)
        _check_place(welcome, meeting.here)
        if self._incarnation not in (None, welcome.incarnation):
            text = f"another process answers there: cluster {welcome.cluster_id}, pid {welcome.pid}"
            raise LinkRefused(text, status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        if self._incarnation is not None and not self._proven:
            text = f"cluster {welcome.cluster_id}, pid {welcome.pid}, answers there and cannot prove that it is the "
            raise LinkRefused(f"{text}process of the lost link", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        if wanted is not None and welcome.cluster_id != wanted:
            raise LinkRefused(f"remote_cluster_id={wanted}, but cluster {welcome.cluster_id} answered")
        endpoint.check_access(welcome)
        meeting.offered = endpoint.offered_to(welcome.cluster_id)
        meeting.sock, meeting.address, meeting.deadline = frames.socket, frames.address, self._deadline
        meeting.choose()
        self._connection = meeting.open()
        self._undo.callback(self._connection.close)

    def confirm(self, sequence: int, *, present: bool = False) -> int:
        """Do steps 5 and 6 with this side's number, of an existing link if ``present``; return the listener's."""
        choice, known, peer = self._meeting.choice, self._endpoint.peer_secrets, self.peer.incarnation
        proof = known.prove(peer, DIALER, self._transcript) if self._proven else b""
        share = b"" if proof else new_share()
        reason = choice.reason[:MAX_REASON]
        agreed = self._transcript.digest()
        self._frames.put(TransportChoice(choice.name, reason, sequence, agreed, present, proof, share, choice.private))
        linked = self._frames.receive(Linked)
        try:
            _check_agreed(linked, agreed)
        except LinkRefused as error:
            raise LinkRefused(f"{self._what}: {error}") from None
        if share:
            known.agree(peer, share, linked.share, self._transcript)
        return linked.sequence

    def take(self, sequence: int, peer_sequence: int) -> NewLink:
        behind = self._meeting.behind(self._frames.address[0])
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
            behind=behind,
        )
        renewal = self._endpoint.renewal(self._welcome, self._meeting.secret, dialled=True)
        link = Link(self.peer, self._connection, self._meeting.choice, origin, self._spoken, renewal)
        return NewLink(link, self._frames.socket, self._frames.parser.rest(), tls=self._frames.tls)

    def hang_up(self) -> None:
        """Fail a waiting call at once; also end a taken link."""
        self._frames.hang_up()

    def abandon(self) -> None:
        self._frames.socket.close()

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()


class Host(Protocol):
    """Link manager of a listener, on the control thread. Raises LinkError to refuse."""

    async def admit(self, hello: Hello, source: str, *, proven: bool) -> None: ...
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
        text = f"listenIpInfo={show_address(address)}: cannot listen there: {error.strerror or error}"
        raise LinkError(text, status_code=LLMStatusCode.LLM_FAILED) from error


class _AsyncFrames:
    """Frames for coroutines, from the dialer at ``source``. Raises OSError, ProtocolError and AuthFailed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, source: str) -> None:
        self._loop = loop
        self.socket = sock
        self.source = source
        self.parser = FrameParser()
        self.tls: TlsSession | None = None

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
        while (payload := self.parser.take()) is None:
            data = await self._receive_some(_RECEIVE_BYTES)
            self.parser.feed(data if self.tls is None else self.tls.decrypt(data))
        return _expect(kind, decode(payload))

    async def _receive_some(self, most: int) -> bytes:
        data = await self._loop.sock_recv(self.socket, most)
        if not data:
            raise ProtocolError("the connection ended inside the handshake", phase="handshake")
        return data


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
        self._control.loop.add_reader(self._sock, self._accept)

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

    def _accept(self) -> None:
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors the loop would spin without a pause.
            logger.warning("listener %s cannot accept and pauses: %s", show_address(self.address), error)
            loop = self._control.loop
            loop.remove_reader(self._sock)
            self._resume = loop.call_later(_ACCEPT_PAUSE_SECONDS, loop.add_reader, self._sock, self._accept)
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
        shut_down(sock)

    async def _greet(self, sock: socket.socket, address: tuple[str, int]) -> None:
        handed_over = False
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                handed_over = await self._shake_hands(sock, address[0])
        except AuthFailed as error:
            # At most once a second, because any number of connections may come.
            if (now := self._control.loop.time()) >= self._warn_again_at:
                self._warn_again_at = now + 1
                logger.warning("a connection from %s is not admitted: %s", show_address(address[:2]), named(error))
        except (TimeoutError, OSError, LLMException) as error:
            reason = named(error) if str(error) else "it took too long"
            logger.info("handshake with %s failed: %s", show_address(address[:2]), reason)
        finally:
            self._greetings.pop(sock, None)
            self._silent.pop(sock, None)
            if not handed_over:
                sock.close()

    async def _shake_hands(self, sock: socket.socket, source: str) -> bool:
        """Do all steps; return True if the socket has another owner."""
        loop = self._control.loop
        preamble = await read_exactly(loop, sock, PREAMBLE_BYTES, "preamble")  # only: the rest may be a transport's
        if (transport := self._endpoint.transports.of_preamble(preamble)) is not None:
            take = await transport.admit(loop, sock)
            self._greetings.pop(sock, None)
            take()
            return True
        if preamble not in (CONTROL_PREAMBLE, TLS_PREAMBLE):
            text = other_build(preamble)
            if is_plain(preamble):  # every build reads this answer
                await loop.sock_sendall(sock, frame(Refused(int(LLMStatusCode.LLM_LINK_FAILED), text)))
            raise ProtocolError(text)
        tune(sock)
        frames = _AsyncFrames(loop, sock, source)
        await self._authenticate(frames, encrypted=preamble == TLS_PREAMBLE)
        hello = await frames.receive(Hello)
        try:
            self._endpoint.require_user(sock)
        except AuthFailed as error:
            why = f"the listener says: {error}"
            await frames.send(Refused(int(LLMStatusCode.LLM_LINK_FAILED), why, authentication=True))
            raise
        try:
            self._endpoint.check_identity(frames.tls, hello)
        except AuthFailed:
            await frames.send(_NOT_AUTHENTICATED)
            raise
        self._silent.pop(sock, None)
        meeting = self._endpoint.transports.meet(hello.token, dialled=False)
        try:
            return await self._meet(frames, hello, meeting)
        except BaseException as error:
            meeting.close()
            if isinstance(error, LLMException):
                await self._refuse(frames, hello, error)
            raise
        finally:
            meeting.close()

    async def _authenticate(self, frames: _AsyncFrames, *, encrypted: bool) -> None:
        if (tls := self._endpoint.session(server_side=True)) is not None and encrypted:
            await frames.authenticate(tls)
        elif tls is not None:
            await frames.send(_NOT_AUTHENTICATED)
            raise AuthFailed("it does not authenticate itself")
        elif encrypted:
            raise AuthFailed("it asks for authentication; this instance has no credentials")

    async def _refuse(self, frames: _AsyncFrames, hello: Hello, error: LLMException) -> None:
        try:
            with suppress(OSError):  # the reason is logged anyway
                await frames.send(Refused(int(error.status_code), str(error)[:MAX_REASON]))
        finally:
            # Last: it may close this listener.
            if self._admission is not None:
                self._admission.refused(hello, error)

    async def _meet(self, frames: _AsyncFrames, hello: Hello, meeting: Meeting) -> bool:
        """Do the steps after Hello; return True if the socket has become a link's."""
        spoken = self._check(hello, meeting.here)
        await self._host.admit(hello, frames.source, proven=True)  # as claimed; the proof comes with the choice
        transcript, theirs = await self._exchange_offers(frames, hello, meeting)
        known = self._endpoint.peer_secrets
        proven = meeting.here is not None or known.is_proven(hello.incarnation, DIALER, transcript, theirs.proof)
        if not proven:
            await self._host.admit(hello, frames.source, proven=False)
        if not theirs.present:
            self._complete(frames, hello, meeting, transcript, theirs, spoken)
            return True
        if not proven:
            text = f"cluster {hello.cluster_id} cannot prove that it is the linked process"
            raise LinkRefused(text, status_code=LLMStatusCode.LLM_LINK_BUSY)
        meeting.close()
        await frames.send(Linked(self._host.recognise(hello), transcript.digest()))
        return False

    def _check(self, hello: Hello, here: Exports | None) -> Spoken:
        mine = self._endpoint
        spoken = mine.agree(hello)
        _check_place(hello, here)
        if hello.wanted is not None and hello.wanted != mine.cluster_id:
            listener = f"the listener at {show_address(self.address)} is cluster {mine.cluster_id}"
            raise LinkRefused(f"remote_cluster_id={hello.wanted}: {listener}")
        if self._admission is not None:
            self._admission.check(hello)
        elif hello.communicator is not None:
            raise LinkRefused("no communicator is prepared at this port", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        mine.check_access(hello)
        return spoken

    async def _exchange_offers(
        self, frames: _AsyncFrames, hello: Hello, meeting: Meeting
    ) -> tuple[Transcript, TransportChoice]:
        """Send Welcome; receive choice and proof."""
        welcome = Welcome(**self._endpoint.greeting(), offers={}, proof=b"")
        transcript = Transcript.of(hello, welcome)
        meeting.sock, meeting.offered = frames.socket, self._endpoint.offered_to(hello.cluster_id)
        _hear(meeting, hello, transcript, hello.share + welcome.share)
        proof = self._endpoint.peer_secrets.prove(hello.incarnation, LISTENER, transcript)
        await frames.send(msgspec.structs.replace(welcome, offers=meeting.offers(), proof=proof))
        choice = await frames.receive(TransportChoice)
        meeting.end_exchange()
        _check_agreed(choice, transcript.digest())
        if frames.socket not in self._greetings:
            # This side has hung up, and cannot answer.
            raise LinkRefused("this listener has hung up", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        return transcript, choice

    def _complete(
        self,
        frames: _AsyncFrames,
        hello: Hello,
        meeting: Meeting,
        transcript: Transcript,
        theirs: TransportChoice,
        spoken: Spoken,
    ) -> None:
        """Open the data path if both sides chose alike, and install the link."""
        mine = meeting.choose()
        if theirs.transport != mine.name:
            there = f"{theirs.transport} ({theirs.reason})"
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
                source=frames.source,
                behind=meeting.behind(frames.source),
                by_communicator=by_communicator,
                greetings=[msgspec.structs.replace(hello, offers={})] if by_communicator else [],
            )
            share = new_share() if theirs.share else b""
            shares = hello.incarnation, theirs.share, share, transcript
            admitted = partial(self._endpoint.peer_secrets.agree, *shares) if share else lambda: None
            renewal = self._endpoint.renewal(hello, meeting.secret, dialled=False)
            link = Link(Peer.of(hello), connection, meeting.choice, origin, spoken, renewal)
            new = NewLink(link, frames.socket, frames.parser.rest(), transcript.digest(), share, admitted, frames.tls)
            self._host.install(new)
        except BaseException:
            connection.close()
            raise
