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
is the initiator's half, ``control/listener.py`` the target's.
"""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self, TypeVar

from llm_datadist.control.channel import FrameParser, tune
from llm_datadist.control.link import Peer
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
from llm_datadist.errors import LinkRefused, LLMStatusCode, ProtocolError, code_2_status
from llm_datadist.transport import agree
from llm_datadist.transport.connect import LANES_PER_LINK, Claim, LaneDialer, Opening, meet_peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.control.messages import Meeting, Message
    from llm_datadist.deadline import Deadline
    from llm_datadist.errors import LinkError
    from llm_datadist.transport import Choice, PeerMemory
    from llm_datadist.transport.base import Exports
    from llm_datadist.transport.datapath import DataPath
    from llm_datadist.transport.lanes import Lanes

__all__ = ["GREETING_SECONDS", "Dial", "Identity"]

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
        meeting: Meeting | None = None,
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
        memory = meet_peer(welcome.rendezvous, token, welcome.incarnation, self._exports, forced, self._deadline)
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
        claim = Claim(welcome.incarnation, welcome.cookie, welcome.cookie_address, welcome.exports)
        with closing(Opening(claim, memory, forced)) as opening:
            dialer = LaneDialer(self.address, welcome.lane_token)
            group = self._lanes.open(dialer.dial(LANES_PER_LINK, self._deadline) if opening.wants_lanes else ())
            self._undo.callback(self._lanes.shut, group)
            self.connection = opening.open(self._lanes, group, writable=self._exports.writable, redial=dialer.dial)
            self.choice = opening.choice

    def settle(self, sequence: int, *, present: bool = False) -> int:
        """Steps 4 to 6: tell the choice and this end's number, return the target's.

        ``present``: the link with that number is to be used, not this one.
        """
        self._wire.send(frame(Met(self.choice.name, self.choice.reason[:4000], sequence, present)))
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
