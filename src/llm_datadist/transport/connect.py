"""Opening the data connection of a link: the rendezvous where one is needed, the proof of who came, the choice."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from llm_datadist import transport
from llm_datadist.errors import DeadlineExceeded, LinkError, LinkRefused
from llm_datadist.transport import inproc
from llm_datadist.transport.peermemory import PeerMemory
from llm_datadist.transport.samehost import meet
from llm_datadist.transport.shm import ShmConnection

if TYPE_CHECKING:
    from llm_datadist.deadline import Deadline
    from llm_datadist.transport import Choice
    from llm_datadist.transport.base import Connection, Exports

__all__ = ["meet_peer", "open_connection"]


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


def open_connection(
    incarnation: bytes, cookie: bytes, memory: PeerMemory | LinkError | None, forced: str | None
) -> tuple[Connection, Choice]:
    """Choose a transport and open its connection; ``memory`` belongs to the connection, or is given back.

    Args:
        incarnation: Of the peer, as told over the control connection.
        cookie: What the header of its guard table must show, as told there too: proof of the same host.
        memory: Outcome of the rendezvous.
        forced: Name of the transport that must be used, or None for the best.

    Raises:
        LinkRefused: No transport, or not the forced one, reaches the peer.
    """
    memory = _proven(memory, incarnation, cookie)
    try:
        choice = transport.choose(same_process=inproc.lives_here(incarnation), same_host=memory, forced=forced)
        connection: Connection
        if choice.name == "inproc":
            connection = inproc.connect(incarnation)
            _give_back(memory)
        else:
            connection = ShmConnection(cast("PeerMemory", memory))
    except BaseException:
        _give_back(memory)
        raise
    return connection, choice


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
