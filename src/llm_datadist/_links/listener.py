"""The listener's handshakes: :class:`Listener`, coroutines on the control thread.

The bounds here are against peers that say nothing, or come in numbers. :mod:`.handshake` bounds the bytes of each peer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from llm_datadist._links.channel import tune
from llm_datadist._links.handshake import ListenerSide
from llm_datadist._links.link import LinkOrigin
from llm_datadist._links.messages import PREAMBLE_BYTES, Hello, Linked, TransportChoice
from llm_datadist._links.tls_session import MAX_HANDSHAKE_BYTES
from llm_datadist._log import SeldomLog, named
from llm_datadist._log import links_logger as logger
from llm_datadist._transport.address import new_socket, read_exactly, shut_down
from llm_datadist.errors import AuthFailed, LinkError, LinkRefused, LLMException, LLMStatusCode, ProtocolError
from llm_datadist.types.cluster import show_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._links.handshake import Endpoint, M, NewLink
    from llm_datadist._links.loop import ControlLoop

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


class Host(Protocol):
    """Link manager of a listener, on the control thread. Raises LinkError to refuse."""

    async def admit(self, hello: Hello, source: str, *, proven: bool) -> None: ...
    def install(self, new: NewLink, linked: Callable[[int], Linked]) -> None: ...
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


@dataclass(eq=False, slots=True)
class _Accepted:
    """One handshake in progress, of a dialer at ``source``. Calls raise OSError, ProtocolError and AuthFailed."""

    loop: asyncio.AbstractEventLoop
    socket: socket.socket
    source: str
    side: ListenerSide

    async def send(self, data: bytes) -> None:
        if data:
            await self.loop.sock_sendall(self.socket, data)

    async def receive(self, kind: type[M]) -> M:
        while (message := self.side.hear(kind)) is None:
            most = MAX_HANDSHAKE_BYTES if self.side.authenticating else _RECEIVE_BYTES
            if not (data := await self.loop.sock_recv(self.socket, most)):
                raise ProtocolError("the connection ended inside the handshake", phase="handshake")
            await self.send(self.side.feed(data))
        return message


@dataclass(eq=False)
class Listener:
    """One listening address: of one communicator if it has ``_admission``, otherwise of ``link_clusters``.

    Owns: the listening socket, and unverified connections until they are links or a transport's.
    Threads: control.
    Errors: a failed handshake ends its own connection. The log tells why, of rejected peers at most once a second; the
        dialer is told what it may learn.
    """

    _control: ControlLoop
    _sock: socket.socket
    _endpoint: Endpoint
    _host: Host
    _admission: AdmissionPolicy | None = None
    #: Handshakes in progress, oldest first.
    _greetings: dict[_Accepted, None] = field(default_factory=dict)
    _resume: asyncio.TimerHandle | None = None
    _seldom: SeldomLog = field(default_factory=lambda: SeldomLog(logger))  # any number of connections may come

    def __post_init__(self) -> None:
        self.address: tuple[str, int] = self._sock.getsockname()[:2]
        self._control.loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        """Stop listening and end the handshakes in progress, no links."""
        if self._resume is not None:
            self._resume.cancel()
        self._control.loop.remove_reader(self._sock)
        self._sock.close()
        for each in list(self._greetings):
            self._hang_up(each)

    def abandon(self) -> None:
        """In a forked child: close copies of sockets only."""
        for sock in (self._sock, *(each.socket for each in self._greetings)):
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
        neighbours = [each for each in self._greetings if each.source == address[0]]
        if len(neighbours) >= _MAX_GREETINGS_OF_ONE_ADDRESS:
            self._make_room(neighbours)
        elif len(self._greetings) >= _MAX_GREETINGS:
            self._make_room(list(self._greetings))
        sock.setblocking(False)
        accepted = _Accepted(self._control.loop, sock, address[0], ListenerSide(self._endpoint))
        self._greetings[accepted] = None
        self._control.spawn(self._greet(accepted, show_address(address[:2])))

    def _make_room(self, among: list[_Accepted]) -> None:
        """Hang up on the oldest, on the oldest silent one if more than :data:`_FEW_SILENT` are silent."""
        silent = [each for each in among if not each.side.identified]
        self._hang_up((silent if len(silent) > _FEW_SILENT else among)[0])

    def _hang_up(self, accepted: _Accepted) -> None:
        """End a handshake; its coroutine closes the socket."""
        self._greetings.pop(accepted, None)
        shut_down(accepted.socket)

    async def _greet(self, accepted: _Accepted, who: str) -> None:
        handed_over = False
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                handed_over = await self._shake_hands(accepted)
        except AuthFailed as error:
            self._seldom.log(logging.WARNING, "", f"a connection from {who} is not admitted: {named(error)}")
        except (TimeoutError, OSError, LLMException) as error:
            reason = named(error) if str(error) else "it took too long"
            logger.info("handshake with %s failed: %s", who, reason)
        finally:
            self._greetings.pop(accepted, None)
            if not handed_over:
                accepted.socket.close()

    async def _shake_hands(self, accepted: _Accepted) -> bool:
        """Do all steps; return True if the socket has another owner."""
        loop, sock, side = accepted.loop, accepted.socket, accepted.side
        preamble = await read_exactly(loop, sock, PREAMBLE_BYTES, "preamble")  # only: the rest may be a transport's
        if (transport := self._endpoint.transports.of_preamble(preamble)) is not None:
            take = await transport.admit(loop, sock)
            self._greetings.pop(accepted, None)
            take()
            return True
        try:
            side.open(preamble)
            tune(sock)
            side.identify(await accepted.receive(Hello), self._endpoint.other_user(sock))
            with closing(self._endpoint.transports.meet(side.hello.token, dialled=False)) as side.meeting:
                return await self._meet(accepted)
        except LLMException as error:
            try:
                with suppress(OSError):  # the reason is logged anyway
                    await accepted.send(side.last_words(error))
            finally:
                # Last: it may close this listener.
                if side.identified and self._admission is not None:
                    self._admission.refused(side.hello, error)
            raise

    async def _meet(self, accepted: _Accepted) -> bool:
        """Do the steps after Hello; return True if the socket has become a link's."""
        side, hello, meeting = accepted.side, accepted.side.hello, accepted.side.meeting
        side.check(show_address(self.address), None if self._admission is None else self._admission.check)
        await self._host.admit(hello, accepted.source, proven=True)  # as claimed; the proof comes with the choice
        meeting.sock, meeting.offered = accepted.socket, self._endpoint.offered_to(hello.cluster_id)
        await accepted.send(side.greet())
        choice = await accepted.receive(TransportChoice)
        meeting.end_exchange()
        side.chosen(choice)
        if accepted not in self._greetings:
            # This side has hung up, and cannot answer.
            raise LinkRefused("this listener has hung up", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        if not side.proven:
            await self._host.admit(hello, accepted.source, proven=False)
        if not choice.present:
            self._complete(accepted)
            return True
        if not side.proven:
            text = f"cluster {hello.cluster_id} cannot prove that it is the linked process"
            raise LinkRefused(text, status_code=LLMStatusCode.LLM_LINK_BUSY)
        meeting.close()
        await accepted.send(side.say(side.linked(self._host.recognise(hello))))
        return False

    def _complete(self, accepted: _Accepted) -> None:
        """Open the data path if both sides chose alike, and install the link, which says Linked."""
        side, hello, meeting = accepted.side, accepted.side.hello, accepted.side.meeting
        side.choose()
        connection = meeting.open()
        try:
            by_communicator = hello.communicator is not None
            origin = LinkOrigin(
                dialled=False,
                sequence=0,  # the host sets it
                peer_sequence=side.choice.sequence,
                reconnected=hello.reconnects,
                source=accepted.source,
                behind=meeting.behind(accepted.source),
                by_communicator=by_communicator,
                greetings=[msgspec.structs.replace(hello, offers={})] if by_communicator else [],
            )
            self._host.install(side.link(connection, origin, accepted.socket), side.linked)
        except BaseException:
            connection.close()
            raise
