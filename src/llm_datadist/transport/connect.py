"""Opening the data connection of a link: the rendezvous where one is needed, the proof of who came, the choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llm_datadist import transport
from llm_datadist.errors import DeadlineExceeded, LinkError, LinkRefused
from llm_datadist.transport import inproc
from llm_datadist.transport.cma import CmaConnection, probe
from llm_datadist.transport.onehost import OneHostConnection
from llm_datadist.transport.peermemory import PeerMemory
from llm_datadist.transport.samehost import meet
from llm_datadist.transport.sharedpeer import SharedPeer
from llm_datadist.transport.shm import ShmConnection

if TYPE_CHECKING:
    from llm_datadist.deadline import Deadline
    from llm_datadist.transport import Choice
    from llm_datadist.transport.base import Connection, Exports

__all__ = ["Claim", "meet_peer", "open_connection"]


def meet_peer(
    name: str, token: bytes, incarnation: bytes, exports: Exports, forced: str | None, deadline: Deadline
) -> PeerMemory | LinkError | None:
    """Meet the peer on the same host, unless it lives in this process and shm is not forced. Runs on the initiator.

    Returns:
        The peer's memory, which the caller owns; why there is none (:func:`transport.choose` reports it); or None.

    Raises:
        DeadlineExceeded: No answer in time.
    """
    if inproc.lives_here(incarnation) and forced in (None, "inproc"):
        return None
    try:
        return meet(name, token, exports, deadline)
    except LinkError as error:
        return error
    except DeadlineExceeded:  # an OSError too, but not one of the socket's
        raise
    except OSError as error:
        return LinkRefused(f"same-host rendezvous with {name!r}: {error}")


@dataclass(frozen=True, slots=True)
class Claim:
    """Who the peer says it is, over the control connection: what the rendezvous and cma must find.

    Attributes:
        incarnation: Random id of its process incarnation.
        cookie: What the header of its guard table shows.
        cookie_address: Where that header is in its own address space; not trusted.
    """

    incarnation: bytes
    cookie: bytes
    cookie_address: int


def open_connection(
    claim: Claim, memory: PeerMemory | LinkError | None, forced: str | None, writable: bool
) -> tuple[Connection, Choice]:
    """Choose a transport and open its connection; ``memory`` belongs to the connection, or is given back.

    Args:
        claim: Of the peer: proof of the same host, and of the same process.
        memory: Outcome of the rendezvous.
        forced: Name of the one transport that must be used for everything, or None for the best of each kind.
        writable: True when peers may write each other (RCA).

    Raises:
        LinkRefused: No transport, or not the forced one, reaches the peer.
    """
    memory = _proven(memory, claim.incarnation, claim.cookie)
    try:
        peer = SharedPeer(memory) if isinstance(memory, PeerMemory) else None
        private = _why_not_cma(peer, claim, forced)
        same_process = inproc.lives_here(claim.incarnation)
        choice = transport.choose(same_process=same_process, same_host=memory, forced=forced, private=private)
        if choice.name == "inproc" or peer is None:
            connection: Connection = inproc.connect(claim.incarnation)
            _give_back(memory)
        elif choice.name == "cma":
            connection = CmaConnection(peer, writable=writable)
        elif private is None:
            connection = OneHostConnection(peer, writable=writable)
            choice = replace(choice, reason=f"{choice.reason}; private memory by cma")
        else:
            connection = ShmConnection(peer)
            choice = replace(choice, reason=f"{choice.reason}; private memory not by cma: {private}")
    except BaseException:
        _give_back(memory)
        raise
    return connection, choice


def _why_not_cma(peer: SharedPeer | None, claim: Claim, forced: str | None) -> str | None:
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


def _give_back(memory: PeerMemory | LinkError | None) -> None:
    if isinstance(memory, PeerMemory):
        memory.close()
