"""Handshakes without I/O: one protocol for both sides. A side is fed bytes; it says which to send, and what it decides.

docs/protocol.md numbers the steps. :mod:`.dial` drives the dialer's side, :mod:`.listener` the listener's. They own
sockets and deadlines, and open the data path.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import msgspec

from llm_datadist._links import messages
from llm_datadist._links.channel import FrameParser
from llm_datadist._links.identity import DIALER, LISTENER, SHARE_BYTES, PeerSecrets, Transcript, new_share
from llm_datadist._links.link import Link, Peer
from llm_datadist._links.messages import Greeting, Hello, Linked, Message, Refused, TransportChoice, Welcome
from llm_datadist._links.renewal import Renewal
from llm_datadist._links.versions import FEATURES, VERSIONS, Spoken, agree, release
from llm_datadist._transport import instances
from llm_datadist._transport.address import is_plain, other_build
from llm_datadist._transport.users import why_other_user
from llm_datadist.config import AUTH_SECRET, INSECURE, SAME_USER_ONLY
from llm_datadist.errors import AuthFailed, LinkRefused, LLMException, LLMStatusCode, ProtocolError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._links.credentials import Credentials
    from llm_datadist._links.link import LinkOrigin
    from llm_datadist._links.tls_session import TlsSession
    from llm_datadist._memory.exports import Exports
    from llm_datadist._transport.connection import DataPath
    from llm_datadist._transport.registry import Transports
    from llm_datadist._transport.transport import Meeting

#: The only message to a rejected peer.
_NOT_AUTHENTICATED: Final = Refused(
    int(LLMStatusCode.LLM_LINK_FAILED), "this listener asks for authentication", authentication=True
)
_OTHER_USERS: Final = (
    f"{SAME_USER_ONLY}=1 links no other users unless both sides have credentials ({AUTH_SECRET}, --secrets of "
    f"llm-datadist store) or {INSECURE}=1 believes everybody"
)
M = TypeVar("M", bound=Message)


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
    role: Callable[[], str] = str  # of this instance, by name
    users: frozenset[int] | None = None  # of this host that may link, with this process's own; None: all
    peer_secrets: PeerSecrets = field(default_factory=PeerSecrets)

    def session(self, *, server_side: bool) -> TlsSession | None:
        return None if self.credentials is None else self.credentials.session(server_side=server_side)

    def other_user(self, sock: socket.socket) -> str:
        """Return why the peer's user may not link; empty if it may."""
        why = "" if self.users is None else why_other_user(sock, self.users)
        return f"{why}; {_OTHER_USERS}" if why else ""

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
            "release": release()[:64],  # as a Name; a local version may be longer
            "role": self.role(),
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
    tls: TlsSession | None = None  # encrypts all bytes of the socket


#: Messages in their order, each with its speaker. Instead of any message of its own the listener may say Refused, which
#: is then the last one.
ORDER: Final = ((DIALER, Hello), (LISTENER, Welcome), (DIALER, TransportChoice), (LISTENER, Linked))


class Handshake:
    """One side of a handshake: its bytes, its state, and what both sides have in common.

    Owns: nothing; the driver closes the socket and the meeting.
    Threads: the driver's.
    Errors: ProtocolError, LinkRefused or AuthFailed of any method end the handshake; the driver closes the socket.
    """

    role: ClassVar[bytes]
    other: ClassVar[bytes]
    what = ""  # the dialer's errors begin with it

    def __init__(self, endpoint: Endpoint, tls: TlsSession | None = None) -> None:
        self.endpoint = endpoint
        self.tls = tls  # None: plain
        self.step = 0  # messages of ORDER that were said and heard
        self.parser = FrameParser()
        self.meeting: Meeting
        self.theirs: Hello | Welcome
        self.transcript: Transcript
        self.spoken: Spoken
        self.proven = False  # the peer is the process that this side has met before, or lives in this one

    @property
    def authenticating(self) -> bool:
        return self.tls is not None and not self.tls.authenticated

    def feed(self, received: bytes) -> bytes:
        """Take received bytes; return those to send at once. If it raises AuthFailed, send :meth:`alert`."""
        reply = b""
        if self.tls is not None and self.authenticating:
            reply, received = self.tls.shake(received), b""  # may bring the first message, too
            if self.authenticating:
                return reply
        self.parser.feed(received if self.tls is None else self.tls.decrypt(received))
        return reply

    def alert(self) -> bytes:
        """Return the bytes by which TLS reports that it rejects the peer."""
        return self.tls.alert() if self.tls is not None and self.authenticating else b""

    def say(self, message: Message) -> bytes:
        """Return the bytes of a message of this side. Raises StateError unless it is due."""
        if not isinstance(message, Refused):
            self._advance(self.role, message)
        data = messages.frame(message)
        return data if self.tls is None else self.tls.encrypt(data)

    def hear(self, kind: type[M]) -> M | None:
        """Return the peer's message, once complete. Raises ProtocolError for another kind, even our own echoed."""
        if (payload := self.parser.take()) is None:
            return None
        message = messages.decode(payload)
        if isinstance(message, Refused) and self.role == DIALER:
            raise messages.remote_refusal(message, self.what)
        if not isinstance(message, kind):
            raise ProtocolError(f"expected {kind.__name__}, the peer sent {type(message).__name__}")
        self._advance(self.other, message)
        return message

    def _advance(self, speaker: bytes, message: Message) -> None:
        if (speaker, type(message)) not in ORDER[self.step : self.step + 1]:
            raise StateError(f"handshake: {type(message).__name__} is illegal as message {self.step}")
        self.step += 1

    def _greeted(self, hello: Hello, welcome: Welcome) -> None:
        """Both greetings are known: tell the meeting of the peer and of the link's secret, which was sent encrypted."""
        theirs, meeting = self.theirs, self.meeting
        self.transcript = Transcript.of(hello, welcome)
        meeting.secret = self.transcript.secret(hello.share + welcome.share)
        meeting.hear(theirs.offers, theirs.transport, theirs.incarnation, str(Peer.of(theirs)), theirs.cluster_id)

    def _judge_proof(self, proof: bytes) -> None:
        known = self.endpoint.peer_secrets
        proven = known.is_proven(self.theirs.incarnation, self.other, self.transcript, proof)
        self.proven = proven or self.meeting.here is not None

    def _check_place(self) -> None:
        """Refuse an unproven claim to live in this process."""
        here, incarnation = self.meeting.here, self.theirs.incarnation
        if here is None and instances.lives_here(incarnation):
            raise LinkRefused(f"incarnation {incarnation.hex()[:8]} lives in this process, the peer does not")
        if here is not None and here.incarnation != incarnation:
            raise LinkRefused(f"the peer lives in this process, incarnation {incarnation.hex()[:8]} does not")

    def _check_agreed(self, message: TransportChoice | Linked) -> None:
        if message.agreed != self.transcript.digest():
            text = "the greetings were changed on the way: each side heard other versions or features than sent"
            raise LinkRefused(text)

    def link(self, connection: DataPath, origin: LinkOrigin, sock: socket.socket) -> NewLink:
        theirs, mine, meeting, renewal = self.theirs, self.endpoint, self.meeting, None
        if mine.credentials is not None:
            check = partial(mine.check_identity, theirs=theirs)
            renewal = Renewal(mine.credentials.session, check, meeting.secret, dialled=origin.dialled)
        link = Link(Peer.of(theirs), connection, meeting.choice, origin, self.spoken, renewal)
        return NewLink(link, sock, self.parser.rest(), self.tls)


class DialerSide(Handshake):
    """The dialer's side; ``what`` is linked, for errors."""

    role, other = DIALER, LISTENER

    def __init__(self, endpoint: Endpoint, what: str) -> None:
        super().__init__(endpoint, endpoint.session(server_side=False))
        self.what = what
        self._hello: Hello
        self._share = b""

    def begin(self, wanted: int | None, communicator: messages.CommunicatorId | None, *, reconnects: bool) -> bytes:
        """Return the first bytes. With credentials, Hello follows once the listener is authenticated."""
        said, offers, token = self.endpoint.greeting(), self.meeting.offers(), self.meeting.token
        self._hello = Hello(
            **said, offers=offers, wanted=wanted, reconnects=reconnects, token=token, communicator=communicator
        )
        if self.tls is None:
            return messages.CONTROL_PREAMBLE + self.say(self._hello)
        return messages.TLS_PREAMBLE + self.feed(b"")

    def feed(self, received: bytes) -> bytes:
        reply = super().feed(received)
        if self.tls is not None and self.tls.authenticated and self.step == 0:
            reply += self.say(self._hello)
        return reply

    def welcomed(self, theirs: Welcome, other_user: str, incarnation: bytes | None) -> None:
        """Take the listener's greeting. Raises LinkRefused or AuthFailed unless it may be linked, and is the process
        of ``incarnation``, if given.
        """
        self.theirs, wanted, endpoint = theirs, self._hello.wanted, self.endpoint
        self._greeted(self._hello, theirs)
        self._judge_proof(theirs.proof)
        if other_user:
            raise AuthFailed(other_user)
        self.spoken = endpoint.agree(theirs)
        endpoint.check_identity(self.tls, theirs)
        self._check_place()
        if incarnation not in (None, theirs.incarnation):
            text = f"another process answers there: cluster {theirs.cluster_id}, pid {theirs.pid}"
            raise LinkRefused(text, status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        if incarnation is not None and not self.proven:
            text = f"cluster {theirs.cluster_id}, pid {theirs.pid}, answers there and cannot prove that it is the "
            raise LinkRefused(f"{text}process of the lost link", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        if wanted is not None and theirs.cluster_id != wanted:
            raise LinkRefused(f"remote_cluster_id={wanted}, but cluster {theirs.cluster_id} answered")
        endpoint.check_access(theirs)

    def choose(self, sequence: int, *, present: bool) -> bytes:
        """Return the bytes that tell this side's choice of transports, with its proof or its half of a new secret."""
        choice, known = self.meeting.choice, self.endpoint.peer_secrets
        proof = known.prove(self.theirs.incarnation, DIALER, self.transcript) if self.proven else b""
        self._share = b"" if proof else new_share()
        reason, agreed = choice.reason[: messages.MAX_REASON], self.transcript.digest()
        return self.say(
            TransportChoice(choice.name, reason, sequence, agreed, present, proof, self._share, choice.private)
        )

    def linked(self, linked: Linked) -> None:
        """Take the listener's last message. Raises LinkRefused."""
        self._check_agreed(linked)
        if self._share:
            self.endpoint.peer_secrets.agree(self.theirs.incarnation, self._share, linked.share, self.transcript)


class ListenerSide(Handshake):
    """The listener's side. After an error :meth:`last_words` are to be sent."""

    role, other = LISTENER, DIALER

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.hello: Hello
        self.choice: TransportChoice
        self.identified = False  # the dialer may learn why it is refused
        self._refusal: Refused | None = None

    def open(self, preamble: bytes) -> None:
        """Take the first bytes of a control channel. Raises ProtocolError, or AuthFailed if one side asks in vain."""
        if preamble not in (messages.CONTROL_PREAMBLE, messages.TLS_PREAMBLE):
            text = other_build(preamble)
            if is_plain(preamble):  # every build reads this answer
                self._refusal = Refused(int(LLMStatusCode.LLM_LINK_FAILED), text)
            raise ProtocolError(text)
        tls, encrypted = self.endpoint.session(server_side=True), preamble == messages.TLS_PREAMBLE
        if tls is None and encrypted:
            raise AuthFailed("it asks for authentication; this instance has no credentials")
        if tls is not None and not encrypted:
            self._refusal = _NOT_AUTHENTICATED
            raise AuthFailed("it does not authenticate itself")
        self.tls = tls

    def identify(self, hello: Hello, other_user: str) -> None:
        """Raise AuthFailed unless the dialer may be the cluster that it claims to be, and may link."""
        self.hello = self.theirs = hello
        if other_user:
            why = f"the listener says: {other_user}"
            self._refusal = Refused(int(LLMStatusCode.LLM_LINK_FAILED), why, authentication=True)
            raise AuthFailed(other_user)
        try:
            self.endpoint.check_identity(self.tls, hello)
        except AuthFailed:
            self._refusal = _NOT_AUTHENTICATED
            raise
        self.identified = True

    def last_words(self, error: LLMException) -> bytes:
        """Return the bytes that tell the dialer why it is refused, perhaps none.

        An identified dialer learns the error's status and text. Any other dialer learns what the failed step lets it
        know: the Refused of that step, else TLS's alert, if there is one.
        """
        if self.identified:
            self._refusal = Refused(int(error.status_code), str(error)[: messages.MAX_REASON])
        return self.alert() if self._refusal is None else self.say(self._refusal)

    def check(self, address: str, admits: Callable[[Hello], None] | None) -> None:
        """Raise LinkError unless the dialer may link here; ``admits`` is of the communicator that listens here."""
        mine, hello = self.endpoint, self.hello
        self.spoken = mine.agree(hello)
        self._check_place()
        if hello.wanted is not None and hello.wanted != mine.cluster_id:
            raise LinkRefused(
                f"remote_cluster_id={hello.wanted}: the listener at {address} is cluster {mine.cluster_id}"
            )
        if admits is not None:
            admits(hello)
        elif hello.communicator is not None:
            raise LinkRefused("no communicator is prepared at this port", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        mine.check_access(hello)

    def greet(self) -> bytes:
        """Return the bytes of Welcome. The offers in it are for this dialer, so the meeting hears of it first."""
        welcome = Welcome(**self.endpoint.greeting(), offers={}, proof=b"")
        self._greeted(self.hello, welcome)
        proof = self.endpoint.peer_secrets.prove(self.hello.incarnation, LISTENER, self.transcript)
        return self.say(msgspec.structs.replace(welcome, offers=self.meeting.offers(), proof=proof))

    def chosen(self, choice: TransportChoice) -> None:
        """Take the dialer's choice and proof. Raises LinkRefused if the greetings were changed."""
        self.choice = choice
        self._check_agreed(choice)
        self._judge_proof(choice.proof)

    def choose(self) -> None:
        """Choose transports, too. Raises LinkRefused unless both sides chose alike."""
        theirs, mine = self.choice, self.meeting.choose()
        if theirs.transport != mine.name:
            there = f"{theirs.transport} ({theirs.reason})"
            raise LinkRefused(f"the sides chose different transports: {there} there, {mine.name} ({mine.reason}) here")
        self.meeting.yield_to(theirs.private)

    def linked(self, sequence: int) -> Linked:
        """Return the last message, of an admitted link; keep its new secret if the dialer sent the other half."""
        share = new_share() if self.choice.share else b""
        if share:
            self.endpoint.peer_secrets.agree(self.hello.incarnation, self.choice.share, share, self.transcript)
        return Linked(sequence, self.transcript.digest(), share)
