"""Opening the data path of a link: the rendezvous where one is needed, the proof that it met the peer, the choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from llm_datadist._transport import inproc
from llm_datadist._transport.choose import NOT_TOLD, Choice, NixlOffer, choose
from llm_datadist._transport.cma import CmaConnection, probe
from llm_datadist._transport.connection import Connection, DataPath
from llm_datadist._transport.nixl import Nixl, NixlConnection
from llm_datadist._transport.nixl_agent import ucx_transports
from llm_datadist._transport.peer_memory import PeerMemory
from llm_datadist._transport.samehost import exchange_memory
from llm_datadist._transport.shm import ShmConnection
from llm_datadist._transport.tcp import TcpConnection
from llm_datadist.errors import DeadlineExceeded, LinkError, LinkRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.exports import Exports
    from llm_datadist._transport.lanes import LaneGroup, Lanes, LaneSocket

_NOT_ASKED: Final = (
    "this end does not ask for it, and over TCP, or without credentials, no peer may choose it for this end: set "
    "llm.Transport=nixl at both ends"
)
_SHUT_OUT: Final = "the kernel does not let the peer into this process"
LANES_PER_LINK: Final = 5
"""Data lanes that the end dials which dialled the link: one for small transfers, the rest for all.

Measured on 2 CPUs, over loopback and between two network namespaces: four beside the first move more than two or three.
Between hosts more connections share a line better than one. Threads, not lanes, depend on the usable CPUs.
"""


def exchange_memory_with(
    name: str, token: bytes, exports: Exports | LinkError, forced: str | None, deadline: Deadline, *, here: bool
) -> PeerMemory | LinkError | None:
    """Try the rendezvous, unless the peer lives in this process (``here``) or nixl or tcp is forced. Runs on the
    initiator.

    ``exports`` is what the peer is offered, or why it is offered nothing: then there is no rendezvous.
    Return the peer's memory, which the caller owns, or why there is none; None when it was not tried.
    """
    if forced in ("nixl", "tcp") or (here and forced in (None, "inproc")):
        return None
    if isinstance(exports, LinkError):
        return exports
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
    """What the peer says about itself over the control connection. The rendezvous must find the same.

    ``here`` is what it exports, if it has proven that it lives in this process.
    """

    incarnation: bytes
    cookie: bytes
    here: Exports | None
    fabric: str = ""  # what its NIXL can use; empty where it has none, or does not want it

    def proven(self, memory: PeerMemory) -> PeerMemory | LinkRefused:
        """Return the memory if it is this peer's, else close it and return why not."""
        if memory.incarnation != self.incarnation:
            what = "incarnation is another one"
        elif memory.cookie != self.cookie:
            what = "guard table shows another cookie"
        else:
            return memory
        memory.close()
        return LinkRefused(f"the rendezvous met a stranger: its {what} than the control connection told")


@dataclass(frozen=True, slots=True)
class NixlEndpoint:
    """What this end offers of NIXL: ``fabric`` is what it can use, empty where it is not to be used: ``why_not``.

    ``asked``: the option of this end asks for NIXL. ``authenticated``: all its peers are. No peer decides this: one
    that UCX has connected over TCP can write any memory of this process, and its metadata can end the process.
    """

    shared: Nixl
    fabric: str
    why_not: str = ""
    asked: bool = False
    authenticated: bool = False

    def offer(self, theirs: str) -> NixlOffer:
        """Return what both ends can use, when the peer can use ``theirs``."""
        if not self.fabric and not theirs:
            return NixlOffer()
        if not self.fabric:
            return NixlOffer("", self.why_not)
        if not theirs:
            return NixlOffer("", "the peer has no NIXL, or does not allow it (llm.NixlPlaintext, llm.PeerPolicy)")
        over = "tcp" if "tcp" in (self.fabric, theirs) else "rdma"
        if not (self.asked or (self.authenticated and over == "rdma")):
            return NixlOffer("", _NOT_ASKED)
        if over == "tcp":
            return NixlOffer("tcp", f"UCX has no RDMA at both ends, it uses {ucx_transports('tcp')}")
        return NixlOffer("rdma", f"UCX uses RDMA ({ucx_transports('rdma')})")


class ConnectionBuilder:
    """Chooses the transports from the outcome of the rendezvous, and opens the data path.

    Owns the peer's memory until :meth:`open` has made a connection that does, or :meth:`close`. Used by one thread.

    ``memory`` is the outcome of the rendezvous, taken over. ``forced`` is the one transport to be used for everything.
    ``nixl`` is None where this end has no NIXL to offer at all.
    """

    def __init__(
        self,
        peer: PeerIdentity,
        memory: PeerMemory | LinkError | None,
        forced: str | None,
        nixl: NixlEndpoint | None = None,
    ) -> None:
        self._peer = peer
        self._nixl = nixl
        same_host = peer.proven(memory) if isinstance(memory, PeerMemory) else memory
        self._memory = same_host if isinstance(same_host, PeerMemory) else None
        try:
            self.choice: Choice = choose(
                same_process=peer.here is not None,
                same_host=same_host,
                forced=forced,
                private=self._why_not_cma(forced, same_host),
                nixl=NixlOffer() if nixl is None else nixl.offer(peer.fabric),
            )
        except BaseException:
            self.close()
            raise

    def _why_not_cma(self, forced: str | None, same_host: PeerMemory | LinkError | None) -> str | None:
        if forced not in (None, "cma"):
            return f"llm.Transport is {forced}"
        if self._memory is None:
            return "no same-host rendezvous was made" if same_host is None else str(same_host)
        if not self._memory.cookie_address:
            return NOT_TOLD
        # Only the end that dials can make data lanes: also where the peer alone is shut out. Both ends use them then.
        reason = probe(self._memory, self._memory.cookie_address, self._peer.cookie)
        return reason or (_SHUT_OUT if self._memory.shut_out else None)

    def take_private(self, theirs: str | None) -> None:
        """Take data lanes for private memory where the end that dials has chosen them."""
        if theirs == "tcp" and self.choice.private == "cma" and self.choice.name == "shm":
            self.choice = replace(self.choice, private="tcp", reason=f"{self.choice.reason}, but {_SHUT_OUT}: by tcp")

    @property
    def wants_lanes(self) -> bool:
        """True where this end dials lanes if it dials at all; else it uses those that the peer has dialled."""
        if self.choice.name == "nixl":
            return self._nixl is not None and self._nixl.shared.fallback
        return "tcp" in (self.choice.name, self.choice.private)

    def uses(self, group: LaneGroup) -> bool:
        """Return True if the data path, once it is open, owns the lanes of ``group``."""
        return "tcp" in (self.choice.name, self.choice.private) or (self.choice.name == "nixl" and len(group) > 0)

    def open(
        self,
        lanes: Lanes,
        group: LaneGroup,
        *,
        writable: bool,
        reconnect: Callable[[int, Deadline], list[LaneSocket]] | None = None,
    ) -> DataPath:
        """Return the data path, which owns the lanes of ``group`` if it uses them.

        ``group`` has not begun yet, and is shut by the caller when no transport uses it; where this end does not dial,
        it has what the peer has dialled by now. ``writable``: peers may write each other (RCA). ``reconnect`` dials so
        many new lanes within a deadline, at the end that can dial.
        """
        if self.wants_lanes and self.choice.name != "nixl" and reconnect is None and not len(group):
            # Only the peer could dial lanes, and it needs none itself.
            if self.choice.name == "tcp":
                raise LinkRefused("the peer chose tcp and dialled no data lanes")
            reason = f"{self.choice.reason}; but the peer dialled no data lanes"
            self.choice = replace(self.choice, private=None, reason=reason)

        def connect(transport: str) -> Connection:
            if transport == "inproc":
                assert self._peer.here is not None, "inproc is chosen for a peer of this process only"
                return inproc.connect(self._peer.here)
            if transport == "tcp":
                return TcpConnection(lanes, group, writable=writable, reconnect=reconnect)
            if transport == "nixl":
                assert self._nixl is not None, "nixl is chosen where both ends have it"
                fallback = TcpConnection(lanes, group, writable=writable, reconnect=reconnect) if len(group) else None
                return NixlConnection(
                    self._nixl.shared,
                    self.choice.fabric,
                    writable=writable,
                    dialled=reconnect is not None,
                    fallback=fallback,
                )
            assert self._memory is not None, "shm and cma are chosen after a rendezvous only"
            held = self._memory.share()
            return ShmConnection(held) if transport == "shm" else CmaConnection(held, writable=writable)

        shared = connect(self.choice.name)
        try:
            private = None if self.choice.private in (None, self.choice.name) else connect(self.choice.private)
        except BaseException:
            shared.close()
            raise
        self.close()
        return DataPath(shared, private)

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
