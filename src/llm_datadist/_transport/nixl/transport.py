"""The choice of nixl for a link, and all connections of an instance over it.

Threads: the dialling caller or the control thread judges and connects; a thread that frees memory waits for requests.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from llm_datadist._transport.nixl.agent import fabric, usable
from llm_datadist._transport.nixl.bindings import NOT_INSTALLED, NixlFailed, ucx_transports, why_no_gpu
from llm_datadist._transport.nixl.connection import CAPABILITIES, NixlConnection
from llm_datadist._transport.transport import Context, Meeting, Transport, Verdict
from llm_datadist._transport.users import why_other_user
from llm_datadist.config import AUTH_SECRET, NIXL_PLAINTEXT, PEER_POLICY, TLS_CERT, TRANSPORT
from llm_datadist.errors import LLMException, LLMStatusCode

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist._transport.connection import Connection
    from llm_datadist.config import Options

_NOT_ASKED: Final = (
    "this side does not ask for it, and over TCP, or without credentials, no peer may choose it: set "
    "llm.Transport=nixl on both sides"
)


class NixlTransport(Transport):
    """The transport; each side offers the fabric of its NIXL, unless ``why_not`` forbids it.

    Unless this side's option asks for nixl, only authenticated peers get it, and only over RDMA: a peer that UCX has
    connected reaches all memory of this process, and its metadata can end the process.
    """

    name = "nixl"
    capabilities = CAPABILITIES

    def __init__(self, context: Context) -> None:
        options = context.options
        self.asked = options.transport == self.name
        self.why_not = _why_not(options) or (usable(fabric()) if self.asked else "")
        if self.why_not and self.asked:
            raise LLMException(f"{TRANSPORT}=nixl: {self.why_not}", status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
        self.fabric = "" if self.why_not else fabric()
        self._context = context
        self._lock = threading.Lock()  # protects the next
        self._connections: WeakSet[NixlConnection] = WeakSet()

    def offer(self, meeting: Meeting) -> bytes:
        return self.fabric.encode()

    def judge(self, meeting: Meeting) -> Verdict:
        forced, theirs = meeting.forced == self.name, self._theirs(meeting)
        mine, why_not = self.fabric, self.why_not
        # Another user would reach all memory of this process. Unforced, only authenticated peers get NIXL.
        if forced and not meeting.authenticated and meeting.sock is not None:
            why_not = why_other_user(meeting.sock, meeting.exports.users) or why_not
            mine = "" if why_not else mine
        if meeting.any_has_device and not forced:
            return Verdict(False, "a side has memory of a GPU, for which no one chooses it: set llm.Transport=nixl")
        if meeting.exports.device is not None and (reason := why_no_gpu() if self.asked else _NOT_ASKED):
            return Verdict(False, reason)
        if not mine:
            return Verdict(False, why_not if theirs else "neither side has NIXL", silent=not theirs)
        if not theirs:
            return Verdict(False, "the peer has no NIXL, or does not allow it (llm.NixlPlaintext, llm.PeerPolicy)")
        over = common_fabric(mine, theirs)
        if not (self.asked or (meeting.authenticated and over == "rdma")):
            return Verdict(False, _NOT_ASKED)
        try:
            transports = ucx_transports(over)
        except NixlFailed as error:
            return Verdict(False, str(error))
        if over == "tcp":
            return Verdict(forced, f"not both sides have RDMA, so UCX uses {transports}")
        return Verdict(True, f"UCX uses RDMA ({transports})")

    def _theirs(self, meeting: Meeting) -> str:
        return meeting.theirs.get(self.name, b"").decode(errors="replace")

    def connect(self, meeting: Meeting) -> Connection:
        lanes = meeting.transports["tcp"]
        # The dialer of a link decides about the fallback.
        fallback = self._context.options.nixl_fallback if meeting.dialled else not lanes.lacks(meeting)
        over, writable = common_fabric(self.fabric, self._theirs(meeting)), meeting.exports.writable
        with ExitStack() as undo:
            connection = undo.enter_context(meeting.connect(lanes.name)) if fallback else None
            made = NixlConnection(self._context, over, writable=writable, dialled=meeting.dialled, fallback=connection)
            undo.pop_all()
        with self._lock:
            self._connections.add(made)
        return made

    def quiesce(self, tag: int, private: NDArray[np.uint64] | None) -> None:
        """Wait for the peers' requests; agents forget the ``private`` tensors."""
        for each in self._living():
            each.server.quiesce(tag)
            if private is not None:
                for slot in each.server.slots:
                    slot.forget(private.tolist())

    def close(self) -> None:
        connections = self._living()
        for each in connections:
            each.abort()
        for each in connections:
            each.server.join()

    def _living(self) -> list[NixlConnection]:
        with self._lock:
            return list(self._connections)


def common_fabric(mine: str, theirs: str) -> str:
    return "tcp" if "tcp" in (mine, theirs) else "rdma"


def _why_not(options: Options) -> str:
    """Return why this side may not use NIXL; empty if it may."""
    if options.credentials is not None and not options.nixl_plaintext:
        return (
            f"it sends KV bytes unencrypted, and this side has credentials ({AUTH_SECRET}, {TLS_CERT}): set "
            f"{NIXL_PLAINTEXT}='1' to allow that"
        )
    if options.peer_policy is not None:
        return f"a peer that UCX has connected reaches all memory of this process: {PEER_POLICY} could not be kept"
    return "" if fabric() else NOT_INSTALLED
