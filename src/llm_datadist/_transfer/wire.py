"""Requests of transports over a link's control channel, and dropped sockets beside it.

The module implements :class:`llm_datadist._transport.transport.Wire`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist._links.messages import SocketsDropped, TransportAsk, TransportSaid
from llm_datadist.errors import ProtocolError

if TYPE_CHECKING:
    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link


def ask(link: Link, data: bytes, deadline: Deadline) -> bytes:
    what = f"a transfer over {link.choice.name}"
    answer = link.request(lambda number: TransportAsk(number, data), deadline, what, "copy")
    if not isinstance(answer, TransportSaid):
        raise ProtocolError(f"{link.peer} answered a TransportAsk with {type(answer).__name__}")
    return answer.data


def tell(link: Link, data: bytes) -> None:
    link.tell(TransportAsk(0, data))  # no request has number 0, so the answer is a late one


def on_ask(link: Link, message: TransportAsk) -> None:
    """Hand a peer's request to the connection's server. Threads: control."""
    if (server := link.connection.server) is None:
        raise ProtocolError("the peer asks for a transfer on a link whose transports serve no requests")
    server.on_request(message.data, lambda answer: link.tell(TransportSaid(message.id, answer)))


def on_late_answer(link: Link, message: TransportSaid) -> None:
    """Have the owner undo a request whose caller has given up. Threads: control."""
    server = link.connection.server
    if server is not None and (request := server.on_late_answer(message.data)) is not None:
        link.tell(TransportAsk(0, request))


def on_sockets_dropped(link: Link, _: SocketsDropped) -> None:
    """Drop all sockets: the peer found them silent, or gave up their writes. Threads: control.

    The answer to the peer's next ``Ping`` says that they touch no memory any more.
    """
    for each in link.connection.connections:
        if each.recovery is not None:
            each.recovery.drop()
            each.recovery.redial_soon()
