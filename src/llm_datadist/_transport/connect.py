"""Opening the data connection of a link: the rendezvous where one is needed, the proof of who came, the choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from llm_datadist import _transport
from llm_datadist._transport import inproc
from llm_datadist._transport.cma import CmaConnection, probe
from llm_datadist._transport.connection import RoutedConnection
from llm_datadist._transport.lanes import dial_lanes
from llm_datadist._transport.peer_memory import PeerMemory, SharedPeer
from llm_datadist._transport.samehost import exchange_memory
from llm_datadist._transport.shm import ShmConnection
from llm_datadist._transport.tcp import TcpConnection
from llm_datadist.errors import DeadlineExceeded, LinkError, LinkRefused

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.exports import Exports, RegionDescriptor
    from llm_datadist._transport import Choice
    from llm_datadist._transport.connection import Connection, DataPath
    from llm_datadist._transport.lanes import LaneGroup, Lanes

__all__ = ["LANES_PER_LINK", "ConnectionBuilder", "LaneDialer", "PeerIdentity", "exchange_memory_with"]

LANES_PER_LINK: Final = 4
"""Data lanes that the end dials which dialled the link: one for small transfers, the rest for all.

Measured over loopback on 2 CPUs: one lane moves 0.7 to 1.0 times what a raw stream does, two to four 0.9 to 1.2 times.
Between hosts more connections share a line better than one. Threads, not lanes, depend on the usable CPUs.
"""


def exchange_memory_with(
    name: str, token: bytes, incarnation: bytes, exports: Exports, forced: str | None, deadline: Deadline
) -> PeerMemory | LinkError | None:
    """Meet the peer on the same host, unless it lives in this process or tcp is forced. Runs on the initiator.

    Returns:
        The peer's memory, which the caller owns; why there is none (:func:`_transport.choose` reports it); or None.

    Raises:
        DeadlineExceeded: No answer in time.
    """
    if forced == "tcp" or (inproc.lives_here(incarnation) and forced in (None, "inproc")):
        return None
    try:
        return exchange_memory(name, token, exports, deadline)
    except LinkError as error:
        return error
    except DeadlineExceeded:  # an OSError too, but not one of the socket's
        raise
    except OSError as error:
        return LinkRefused(f"same-host rendezvous with {name!r}: {error}")


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who the peer says it is, over the control connection: what the rendezvous and cma must find.

    Attributes:
        incarnation: Random id of its process incarnation.
        cookie: What the header of its guard table shows.
        cookie_address: Where that header is in its own address space; not trusted.
        regions: What it exports, for a transport that maps nothing.
    """

    incarnation: bytes
    cookie: bytes
    cookie_address: int
    regions: Sequence[RegionDescriptor]


@dataclass(frozen=True, slots=True)
class LaneDialer:
    """How the end that dialled the link dials its lanes."""

    address: tuple[str, int]
    token: bytes

    def dial(self, count: int, deadline: Deadline) -> list[socket.socket]:
        """Return so many new lanes."""
        return dial_lanes(self.address, self.token, count, deadline)


class ConnectionBuilder:
    """From the outcome of the rendezvous to an open connection. Used by one thread, once.

    Owns the peer's memory until :meth:`open` has made a connection that does, or :meth:`close`.

    Args:
        claim: Of the peer: proof of the same host, and of the same process.
        memory: Outcome of the rendezvous, taken over.
        forced: Name of the one transport that must be used for everything, or None for the best of each kind.

    Attributes:
        choice: Which transports, and why.

    Raises:
        LinkRefused: No transport, or not the forced one, reaches the peer.
    """

    def __init__(self, claim: PeerIdentity, memory: PeerMemory | LinkError | None, forced: str | None) -> None:
        self._claim = claim
        memory = _proven(memory, claim.incarnation, claim.cookie)
        self._peer = SharedPeer(memory) if isinstance(memory, PeerMemory) else None
        try:
            same_process = inproc.lives_here(claim.incarnation)
            private = _why_not_cma(self._peer, claim, forced)
            self.choice: Choice = _transport.choose(
                same_process=same_process, same_host=memory, forced=forced, private=private
            )
        except BaseException:
            self.close()
            raise

    @property
    def wants_lanes(self) -> bool:
        """True when a route of the choice goes over data lanes."""
        return "tcp" in (self.choice.name, self.choice.private)

    def open(
        self,
        lanes: Lanes,
        group: LaneGroup,
        *,
        writable: bool,
        reconnect: Callable[[int, Deadline], list[socket.socket]] | None = None,
    ) -> DataPath:
        """Return the connection, which owns the lanes of ``group`` if it uses them.

        Args:
            lanes: The lanes of this process.
            group: The link's lanes, not begun yet; to be shut by the caller when no route uses them. Where this end
                does not dial, those that the peer has dialled by now.
            writable: True when peers may write each other (RCA).
            redial: As for :class:`TcpConnection`.
        """
        if self.wants_lanes and reconnect is None and not len(group):
            self._do_without_lanes()
        over_lanes: TcpConnection | None = None
        if self.wants_lanes:
            over_lanes = TcpConnection(lanes, group, self._claim.regions, writable=writable, reconnect=reconnect)
        try:
            if over_lanes is not None and self.choice.name == "tcp":
                return over_lanes
            shared = self._open_shared(writable=writable)
            if self.choice.private in (None, self.choice.name):
                return shared
            return RoutedConnection(shared, over_lanes or self._open_cma(writable=writable))
        finally:
            self.close()

    def _do_without_lanes(self) -> None:
        """The peer, who alone could dial them, needs none itself."""
        if self.choice.name == "tcp":
            raise LinkRefused("the peer chose tcp and dialled no data lanes")
        reason = f"{self.choice.reason}; but the peer dialled no data lanes"
        self.choice = replace(self.choice, private=None, reason=reason)

    def _open_shared(self, *, writable: bool) -> Connection:
        if self.choice.name == "inproc":
            return inproc.connect(self._claim.incarnation)
        assert self._peer is not None, "shm and cma are chosen for a peer that was met"
        return self._open_cma(writable=writable) if self.choice.name == "cma" else ShmConnection(self._peer.share())

    def _open_cma(self, *, writable: bool) -> CmaConnection:
        assert self._peer is not None, "cma is chosen for a peer that was met"
        return CmaConnection(self._peer.share(), writable=writable)

    def close(self) -> None:
        """Give back what no connection owns. Idempotent."""
        if self._peer is not None:
            self._peer.close()


def _why_not_cma(peer: SharedPeer | None, claim: PeerIdentity, forced: str | None) -> str | None:
    if forced not in (None, "cma"):
        return f"llm.Transport is {forced}"
    if peer is None:
        return "no same-host rendezvous was made"
    return probe(peer, claim.cookie_address, claim.cookie)


def _proven(memory: PeerMemory | LinkError | None, incarnation: bytes, cookie: bytes) -> PeerMemory | LinkError | None:
    """Return the memory if it is that of the peer at the other end of the control connection, else why it is not."""
    if not isinstance(memory, PeerMemory):
        return memory
    if memory.cookie == cookie and memory.incarnation == incarnation:
        return memory
    what = "guard table shows another cookie" if memory.incarnation == incarnation else "incarnation is another one"
    memory.close()
    return LinkRefused(f"the rendezvous met a stranger: its {what} than the control connection told")
