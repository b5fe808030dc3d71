"""The transport nixl over links: requests and answers in messages, and what this end offers of NIXL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist._links.messages import NixlAsk, NixlSaid
from llm_datadist._transport.connect import NixlEndpoint
from llm_datadist._transport.nixl import Nixl, NixlConnection, give_back
from llm_datadist._transport.nixl_agent import NOT_INSTALLED, fabric, usable
from llm_datadist.config import AUTH_SECRET, NIXL_PLAINTEXT, PEER_POLICY, TLS_CERT, TRANSPORT
from llm_datadist.errors import LLMException, LLMStatusCode, ProtocolError

if TYPE_CHECKING:
    from llm_datadist._cache.store import CacheStore
    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link
    from llm_datadist._transfer.target import LaneTarget
    from llm_datadist.config import Options


class _LinkWire:
    """Carries requests of the transport over the control channel of a link. Threads: any."""

    def ask(self, link: Link, data: bytes, deadline: Deadline) -> bytes:
        answer = link.request(lambda number: NixlAsk(number, data), deadline, "a transfer over nixl", "copy")
        if not isinstance(answer, NixlSaid):
            raise ProtocolError(f"{link.peer} answered a NixlAsk with {type(answer).__name__}")
        return answer.data

    def tell(self, link: Link, data: bytes) -> None:
        link.tell(NixlAsk(0, data))  # no request has this number: its answer is a late one


class NixlTarget:
    """Hands the peer's requests to the connection of its link. Threads: control."""

    @staticmethod
    def on_ask(link: Link, message: NixlAsk) -> None:
        connection = link.connection.shared
        if not isinstance(connection, NixlConnection):
            raise ProtocolError("the peer asks for a transfer over nixl on a link that has none")
        connection.server.on_request(message.data, lambda answer: link.tell(NixlSaid(message.id, answer)))

    @staticmethod
    def on_late_answer(link: Link, message: NixlSaid) -> None:
        """Give back what the owner holds for a request whose caller has given up."""
        if (request := give_back(message.data)) is not None:
            link.tell(NixlAsk(0, request))


def nixl_endpoint(options: Options, store: CacheStore, target: LaneTarget) -> NixlEndpoint:
    """Return what this end offers of NIXL. Raises LLMException where it is asked for and cannot be had."""
    asked = options.transport == "nixl"
    why_not = _why_not(options) or (usable(fabric()) if asked else "")
    if why_not and asked:
        raise LLMException(f"{TRANSPORT}=nixl: {why_not}", status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
    pools = [(segment.address, segment.nbytes) for segment in store.exports.regions.values()]
    shared = Nixl(_LinkWire(), target, pools, fallback=options.nixl_fallback)
    used = "" if why_not else fabric()
    return NixlEndpoint(shared, used, why_not, asked=asked, authenticated=options.credentials is not None)


def _why_not(options: Options) -> str:
    """Return why this end uses no NIXL; empty if it may."""
    if options.credentials is not None and not options.nixl_plaintext:
        return (
            f"it sends KV bytes unencrypted, and this end has credentials ({AUTH_SECRET}, {TLS_CERT}): set "
            f"{NIXL_PLAINTEXT}='1' to allow that"
        )
    if options.peer_policy is not None:
        return f"a peer that UCX has connected reaches all memory of this process: {PEER_POLICY} could not be kept"
    return "" if fabric() else NOT_INSTALLED
