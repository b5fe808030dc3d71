"""Which transports the two ends of a link use, and why: a pure decision that both make alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from llm_datadist._transport.peer_memory import PeerMemory
from llm_datadist.errors import LinkError, LinkRefused, ParamError

TRANSPORTS: Final = ("inproc", "shm", "cma", "nixl", "tcp")
"""Names of all transports, the best first."""
NOT_TOLD: Final = "the peer lets this end into none of its memory"
"""Why cma cannot be used where the peer has told no address: data lanes would get nothing either."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The transports of a link, and why those."""

    name: str  # one of :data:`TRANSPORTS`: for what the peer exports
    private: str | None  # one of them for the peer's private memory; None: nothing reaches it
    reason: str  # one line: why they can be used, and why each better one cannot
    fabric: str = ""  # what NIXL uses, where it is nixl


@dataclass(frozen=True, slots=True)
class NixlOffer:
    """What NIXL can use at both ends: ``rdma``, ``tcp``, or nothing, and why not."""

    fabric: str = ""
    reason: str = "neither end has NIXL"


def agree(mine: str | None, theirs: str | None) -> str | None:
    """Return the transport that one of the ends asks for, None when neither does. The other end takes it too."""
    if theirs is not None and theirs not in TRANSPORTS:
        raise LinkRefused(f"the peer asks for llm.Transport={theirs!r}; known here are {', '.join(TRANSPORTS)}")
    if mine is not None and theirs is not None and mine != theirs:
        raise LinkRefused(f"llm.Transport differs: {theirs} at the peer, {mine} here")
    return mine or theirs


def choose(
    *,
    same_process: bool,
    same_host: PeerMemory | LinkError | None,
    forced: str | None,
    private: str | None = "nobody tried",
    nixl: NixlOffer = NixlOffer(),
) -> Choice:
    """Return the best transports that both ends can use, or the forced one for everything.

    ``same_host`` is the outcome of the rendezvous: the peer's memory, why there is none, or None when none was tried.
    ``private``: why cma cannot reach the peer's private memory, None when it can. Over tcp NIXL is slower than data
    lanes: it is used then only when it is forced.
    """
    if forced is not None and forced not in TRANSPORTS:
        raise ParamError(f"llm.Transport={forced!r} is no transport; known are {', '.join(TRANSPORTS)}")
    verdicts = {
        "inproc": (same_process, f"the peer is in {'this' if same_process else 'another'} process"),
        "shm": _shm(same_host),
        "cma": (private is None, private or "the kernel lets us into the peer's memory"),
        "nixl": (nixl.fabric == "rdma" or (forced == "nixl" and nixl.fabric != ""), nixl.reason),
        "tcp": (True, "data lanes reach every peer" if forced is None else "data lanes, as llm.Transport asks"),
    }
    # cma alone reaches no pool by itself: for what the peer exports it is used when it is asked for only.
    automatic = ("inproc", "shm", "tcp") if nixl == NixlOffer() else ("inproc", "shm", "nixl", "tcp")
    candidates = automatic if forced is None else (forced,)
    against: list[str] = []
    for name in candidates:
        possible, reason = verdicts[name]
        if possible:
            choice = _with_private(name, "; ".join([reason, *against]), forced, private)
            return replace(choice, fabric=nixl.fabric) if name == "nixl" else choice
        against.append(f"not {name}: {reason}")
    raise LinkRefused(f"llm.Transport={forced!r} cannot reach the peer: {'; '.join(against)}")


def _shm(same_host: PeerMemory | LinkError | None) -> tuple[bool, str]:
    if isinstance(same_host, PeerMemory):
        return True, f"the peer (pid {same_host.pid}) is on this host, {len(same_host.regions)} regions mapped"
    return False, "no same-host rendezvous was made" if same_host is None else str(same_host)


def _with_private(name: str, reason: str, forced: str | None, private: str | None) -> Choice:
    """Add how private memory is reached: by the same transport, else by cma, else by tcp."""
    if name != "shm":
        return Choice(name, name, reason)
    if forced is not None or private == NOT_TOLD:
        return Choice(name, None, f"{reason}; private memory by nothing: {private}")
    if private is None:
        return Choice(name, "cma", f"{reason}; private memory by cma")
    return Choice(name, "tcp", f"{reason}; private memory by tcp, not by cma: {private}")
