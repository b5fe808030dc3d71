"""The dialer's handshake: :class:`Dial`, in a caller's thread, which may block until its deadline."""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import TYPE_CHECKING, Final

from llm_datadist._links.channel import tune
from llm_datadist._links.handshake import DialerSide
from llm_datadist._links.link import LinkOrigin, Peer
from llm_datadist._links.messages import Linked, Welcome
from llm_datadist._transport.address import DialledSocket, resolve
from llm_datadist.errors import AuthFailed, LinkRefused, LLMException, ProtocolError
from llm_datadist.types.cluster import show_address

if TYPE_CHECKING:
    from llm_datadist._deadline import Deadline
    from llm_datadist._links.handshake import Endpoint, M, NewLink
    from llm_datadist._links.messages import CommunicatorId

_RECEIVE_BYTES: Final = 1 << 16


class Dial(AbstractContextManager["Dial"]):
    """One handshake at the dialer; a context manager.

    :meth:`greet` sets ``peer``. If given, only ``incarnation`` may answer, from a listener of ``communicator``.

    Owns: socket, meeting and connection until :meth:`take`; the end of the block frees them.
    Threads: one; any for :meth:`hang_up`.
    Errors: DeadlineExceeded, LinkRefused or AuthFailed, after which only the end of the block may follow.
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
        self._endpoint, self._address, self._deadline = endpoint, address, deadline
        self._incarnation, self._communicator = incarnation, communicator
        self._side = DialerSide(endpoint, self._what)
        limit = "the argument timeout" if communicator is None else "link_total_time"
        self._socket = DialledSocket(addresses, deadline, self._what, limit)
        self._undo = ExitStack()
        self._undo.callback(self._socket.close)
        self._meeting = self._side.meeting = endpoint.transports.meet(secrets.token_bytes(16), dialled=True)
        self._undo.callback(self._meeting.close)

    def greet(self, wanted: int | None) -> None:
        """Do steps 1 to 4: connect, exchange greetings, open the data path.

        Raises DeadlineExceeded; AuthFailed if either side rejects the other; LinkRefused if the peer is unreachable,
        refuses, speaks another protocol, or no transport reaches it.
        """
        if wanted is not None:
            try:
                self._endpoint.require_link(wanted)
            except AuthFailed as error:
                raise AuthFailed(f"{self._what}: {error}") from None
        first = self._side.begin(wanted, self._communicator, reconnects=self._incarnation is not None)
        self._socket.connect(tune)
        self._socket.send(first)
        welcome = self._receive(Welcome)
        try:
            self._side.welcomed(welcome, self._endpoint.other_user(self._socket.socket), self._incarnation)
            self._open(welcome.cluster_id)
        except (LinkRefused, AuthFailed) as error:
            raise type(error)(f"{self._what}: {error}", status_code=error.status_code) from error
        self.peer = Peer.of(welcome)

    def _open(self, cluster_id: int) -> None:
        meeting, frames = self._meeting, self._socket
        meeting.offered = self._endpoint.offered_to(cluster_id)
        meeting.sock, meeting.address, meeting.deadline = frames.socket, frames.address, self._deadline
        meeting.choose()
        self._connection = meeting.open()
        self._undo.callback(self._connection.close)

    def confirm(self, sequence: int, *, present: bool = False) -> int:
        """Do steps 5 and 6 with this side's number, of an existing link if ``present``; return the listener's."""
        self._socket.send(self._side.choose(sequence, present=present))
        linked = self._receive(Linked)
        try:
            self._side.linked(linked)
        except LinkRefused as error:
            raise LinkRefused(f"{self._what}: {error}") from None
        return linked.sequence

    def take(self, sequence: int, peer_sequence: int) -> NewLink:
        behind = self._meeting.behind(self._socket.address[0])
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
        return self._side.link(self._connection, origin, self._socket.socket)

    def hang_up(self) -> None:
        """Fail a waiting call at once; also end a taken link."""
        self._socket.hang_up()

    def abandon(self) -> None:
        self._socket.socket.close()

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()

    def _receive(self, kind: type[M]) -> M:
        try:
            while (message := self._side.hear(kind)) is None:
                self._socket.send(self._side.feed(self._read()))
            return message
        except ProtocolError as error:
            raise LinkRefused(f"{self._what}: it does not speak this protocol: {error}") from error
        except AuthFailed as error:
            with suppress(LLMException):
                self._socket.send(self._side.alert())
            raise AuthFailed(f"{self._what}: not authenticated: {error}", phase="handshake") from None

    def _read(self) -> bytes:
        """Raise AuthFailed if the peer leaves a TLS connection before its first message."""
        try:
            if data := self._socket.read(_RECEIVE_BYTES):
                return data
            text = f"{self._what}: the peer closed the connection in the handshake"
        except LinkRefused as error:
            if self._socket.hung_up:
                raise
            text = str(error)
        if self._side.step > 1:  # the peer accepts this side: Welcome came
            raise LinkRefused(text, phase="handshake")
        if self._side.tls is None:
            raise LinkRefused(f"{text}; is it another program, or a release before 0.2.0?", phase="handshake")
        text = text.removeprefix(f"{self._what}: ")
        raise AuthFailed(f"{text}: it rejected this instance's credentials, has none, or is a release before 0.2.0")
