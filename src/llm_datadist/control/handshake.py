"""How two processes become linked: the frames, in order, of the initiator and of the target.

    initiator (a caller's thread, blocking)           target (the control thread, a coroutine)
    1  connect, preamble, Hello            ------>    checks version, RCA, wanted id, existing link
    2                                      <------    Welcome (or Refused), token now valid at its rendezvous
    3  same-host rendezvous: fds both ways <----->    samehost listener
    4  chooses a transport, Met            ------>    chooses too; both must agree
    5                                      <------    Linked (or Refused); the link is usable at the target
    6  the link is usable at the initiator

Any failure ends only this connection. The target gives a stranger :data:`GREETING_SECONDS` for all of it.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar, cast

from llm_datadist import transport
from llm_datadist.control.channel import FrameParser, tune
from llm_datadist.control.messages import (
    CONTROL_PREAMBLE,
    PROTOCOL_VERSION,
    Hello,
    Linked,
    Met,
    Refused,
    Welcome,
    decode,
    frame,
)
from llm_datadist.errors import LinkError, LinkRefused, ProtocolError, code_2_status
from llm_datadist.transport import inproc, samehost

if TYPE_CHECKING:
    from llm_datadist.control.messages import Message
    from llm_datadist.deadline import Deadline
    from llm_datadist.transport import Choice
    from llm_datadist.transport.base import Connection, Exports
    from llm_datadist.transport.samehost import PeerMemory

__all__ = ["GREETING_SECONDS", "Dialled", "Identity", "dial", "open_connection"]

GREETING_SECONDS: Final = 10.0
M = TypeVar("M", bound="Message")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this end is, as it introduces itself."""

    cluster_id: int
    incarnation: bytes
    pid: int
    host: str
    remote_accessible: bool
    transport: str | None  # forced, or None


@dataclass(frozen=True, slots=True)
class Dialled:
    """A handshake that succeeded at the initiator: everything a link is made of. The receiver owns all of it."""

    sock: socket.socket
    welcome: Welcome
    connection: Connection
    choice: Choice
    leftover: bytes


class _Wire:
    """Blocking frames on a socket under one deadline: the initiator's half of the handshake."""

    def __init__(self, sock: socket.socket, deadline: Deadline, what: str) -> None:
        self._sock = sock
        self._deadline = deadline
        self._what = what
        self._parser = FrameParser()
        self._frames: list[bytes] = []

    def send(self, message: Message) -> None:
        self._arm("send")
        self._sock.sendall(frame(message))

    def receive(self, kind: type[M]) -> M:
        """Return the next message, which must be of ``kind``; a Refused raises LinkRefused with its code."""
        while not self._frames:
            self._arm("handshake")
            data = self._sock.recv(65536)
            if not data:
                raise LinkRefused(f"{self._what}: the peer closed the connection during the handshake")
            self._frames = self._parser.feed(data)
        message = decode(self._frames.pop(0))
        if isinstance(message, Refused):
            raise LinkRefused(f"{self._what}: refused: {message.text}", status_code=code_2_status(message.code))
        if not isinstance(message, kind):
            raise ProtocolError(f"{self._what}: expected {kind.__name__}, the peer sent {type(message).__name__}")
        return message

    def leftover(self) -> bytes:
        """Bytes that came after the last frame read: the channel begins with them."""
        whole = b"".join(len(f).to_bytes(4, "big") + f for f in self._frames)
        return whole + self._parser.rest()

    def _arm(self, phase: str) -> None:
        left = self._deadline.remaining()
        if left <= 0:
            raise self._deadline.error(self._what, phase)
        self._sock.settimeout(left)


def dial(
    address: tuple[str, int],
    wanted: int | None,
    sequence: int,
    identity: Identity,
    exports: Exports,
    deadline: Deadline,
) -> Dialled:
    """Shake hands with the listener at ``address``. Runs on the initiator.

    Raises:
        DeadlineExceeded: Not done in time, in whichever phase.
        LinkError: Unreachable, refused, speaks something else, or no transport reaches it; the code says which.
    """
    what = f"link to {address[0]}:{address[1]}"
    sock = _connect(address, deadline, what)
    try:
        return _shake(sock, wanted, sequence, identity, exports, deadline, what)
    except TimeoutError as error:
        sock.close()
        if isinstance(error, LinkError) or hasattr(error, "status_code"):
            raise
        raise deadline.error(what, "handshake") from error
    except OSError as error:
        sock.close()
        raise LinkRefused(f"{what}: the connection broke during the handshake: {error}") from error
    except ProtocolError as error:
        sock.close()
        raise LinkRefused(f"{what}: it does not speak this protocol: {error}") from error
    except BaseException:
        sock.close()
        raise


def _connect(address: tuple[str, int], deadline: Deadline, what: str) -> socket.socket:
    try:
        sock = socket.create_connection(address, timeout=max(deadline.remaining(), 1e-3))
    except TimeoutError as error:
        if deadline.expired():
            raise deadline.error(what, "connect") from error
        raise LinkRefused(f"{what}: cannot connect: {error}") from error
    except OSError as error:
        raise LinkRefused(f"{what}: cannot connect: {error}; is the peer listening there?") from error
    tune(sock)
    return sock


def _shake(
    sock: socket.socket,
    wanted: int | None,
    sequence: int,
    identity: Identity,
    exports: Exports,
    deadline: Deadline,
    what: str,
) -> Dialled:
    wire = _Wire(sock, deadline, what)
    token = secrets.token_bytes(16)
    sock.settimeout(max(deadline.remaining(), 1e-3))
    sock.sendall(CONTROL_PREAMBLE)
    wire.send(
        Hello(
            version=PROTOCOL_VERSION,
            cluster_id=identity.cluster_id,
            incarnation=identity.incarnation,
            sequence=sequence,
            remote_accessible=identity.remote_accessible,
            pid=identity.pid,
            host=identity.host,
            wanted=wanted,
            token=token,
            cookie=exports.guards.cookie,
        )
    )
    welcome = wire.receive(Welcome)
    memory = _rendezvous(welcome, token, identity, exports, deadline)
    connection, choice = open_connection(welcome.incarnation, memory, identity.transport)
    try:
        wire.send(Met(choice.name, choice.reason))
        wire.receive(Linked)
        sock.settimeout(None)
        return Dialled(sock, welcome, connection, choice, wire.leftover())
    except BaseException:
        connection.close()
        raise


def _rendezvous(
    welcome: Welcome, token: bytes, identity: Identity, exports: Exports, deadline: Deadline
) -> PeerMemory | LinkError | None:
    """Meet the target on the same host, where that is needed; a refusal is returned, because the choice reports it."""
    if inproc.lives_here(welcome.incarnation) and identity.transport in (None, "inproc"):
        return None
    try:
        memory = samehost.meet(welcome.rendezvous, token, exports, deadline)
    except LinkError as error:
        return error
    return verify_cookie(memory, welcome.cookie)


def verify_cookie(memory: PeerMemory, expected: bytes) -> PeerMemory | LinkError:
    """Return ``memory`` if its guard page shows the cookie told over the control channel: proof of the same host."""
    if memory.cookie == expected:
        return memory
    memory.close()
    return LinkRefused("the mapped guard page shows another cookie: the rendezvous met a stranger")


def open_connection(
    incarnation: bytes, memory: PeerMemory | LinkError | None, forced: str | None
) -> tuple[Connection, Choice]:
    """Choose a transport and open its connection; on failure the peer's memory is given back."""
    try:
        choice = transport.choose(same_process=inproc.lives_here(incarnation), same_host=memory, forced=forced)
        connection: Connection
        if choice.name == "inproc":
            connection = inproc.connect(incarnation)
            _discard(memory)
        else:
            connection = transport.ShmConnection(cast("PeerMemory", memory))
    except BaseException:
        _discard(memory)
        raise
    return connection, choice


def _discard(memory: PeerMemory | LinkError | None) -> None:
    if memory is not None and not isinstance(memory, LinkError):
        memory.close()
