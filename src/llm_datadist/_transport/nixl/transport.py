"""The transport nixl: its choice for a link, its connections, and the transfers that this side starts.

Threads: the thread that dials, or the control thread of the listener, judges and connects; a transfer runs in its
caller's thread. A thread that frees memory waits for requests that have begun.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Literal
from weakref import WeakSet

from llm_datadist._checks import HERE
from llm_datadist._log import links_logger as logger
from llm_datadist._native import MAX_REQUEST_RUNS, Plan, encode_request
from llm_datadist._native.lane_engine import LOST, TORN
from llm_datadist._native.plan import PlanSide, split_plan
from llm_datadist._native.public_call import elsewhere
from llm_datadist._transport.choose import Verdict
from llm_datadist._transport.connection import Capabilities, Connection, ServedConnection, Transfer, Usage
from llm_datadist._transport.moves import is_one_request, refusal
from llm_datadist._transport.nixl.agent import fabric, keep_for_ever, usable
from llm_datadist._transport.nixl.bindings import NOT_INSTALLED, NixlFailed, ucx_transports, why_no_gpu
from llm_datadist._transport.nixl.messages import (
    Address,
    Answer,
    Ask,
    Done,
    Moved,
    NixlRefused,
    Ready,
    encode,
    read_answer,
)
from llm_datadist._transport.nixl.worker import NixlWorker
from llm_datadist._transport.transport import Context, Meeting, Transport
from llm_datadist._transport.users import why_other_user
from llm_datadist.config import AUTH_SECRET, NIXL_PLAINTEXT, PEER_POLICY, TLS_CERT, TRANSPORT
from llm_datadist.errors import DeadlineExceeded, LLMException, LLMStatusCode, PeerLost, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist.config import Options

_NOT_ASKED: Final = (
    "this side does not ask for it, and over TCP, or without credentials, no peer may choose it: set "
    "llm.Transport=nixl on both sides"
)
#: Bytes of one request; the owner serves requests in order.
_PART_BYTES: Final = 128 << 20
_CAPABILITIES: Final = Capabilities("nixl", shared_regions=True, non_pool_memory=True, remote_guards=True)


class NixlTransport(Transport):
    """The transport; each side offers the fabric of its NIXL, unless ``why_not`` forbids it.

    Unless this side's option asks for nixl, only authenticated peers get it, and only over RDMA: a peer that UCX has
    connected reaches all memory of this process, and its metadata can end the process.
    """

    name = "nixl"
    capabilities = _CAPABILITIES

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


class NixlConnection(ServedConnection):
    """Connection whose bytes NIXL moves over ``fabric``, see :func:`.agent.fabric`.

    Owns: ``server``, which has the agents of both directions, and ``fallback``. That moves the transfer in which NIXL
        fails for the first time, and all later ones.
    """

    capabilities = _CAPABILITIES

    def __init__(
        self,
        context: Context,
        fabric: str,
        *,
        writable: bool,
        dialled: bool = False,
        fallback: Connection | None = None,
    ) -> None:
        self.context = context
        self.fallback = fallback
        self.recovery = None if fallback is None else fallback.recovery
        self._dialled = dialled
        # Pulls as READs: UCX only emulates READ over tcp, and readable memory is writable too.
        self.reads = fabric == "rdma" and writable
        self.server: NixlWorker = NixlWorker(context, fabric, reads=self.reads, writable=writable)
        self._known_there = ""  # receiver here that the peer's sender knows
        self._receiver_there = ""  # name of the peer's receiver of pushes
        self._failed = ""  # reason of the fallback
        self._numbers = iter(range(1, 2**63))
        super().__init__(writable=writable)

    def begin(self, link: object) -> None:
        # The dialer usually pulls.
        first = self.server.push_receiver if self.reads else self.server.pull_receiver
        self.server.begin(link, first if self._dialled != self.reads else None)
        if self.fallback is not None:
            self.fallback.begin(link)

    def usage(self) -> Usage:
        remark = f"; by tcp, because NIXL failed: {self._failed}" if self._failed else ""
        agents = self.server.push_sender.agent, self.server.pull_receiver.agent
        seconds = sum((each.cpu_seconds() for each in agents if each is not None), 0.0)
        return super().usage()._replace(progress_seconds=seconds, remark=remark)

    def abort(self) -> None:
        super().abort()
        if self.fallback is not None:
            self.fallback.abort()

    def _release(self) -> None:
        if self._pid != HERE["pid"]:  # the agents' threads are the parent's
            keep_for_ever(self.server)
        else:
            self.server.stop()
        if self.fallback is not None:
            self.fallback.close()

    @elsewhere
    def _move(self, transfer: Transfer) -> None:
        transfer.prepare()
        if self.fallback is None or not self._failed:
            try:
                _NixlTransfer(self, transfer).run()
                return
            except NixlFailed as error:
                if not self._aborted:
                    on = "" if self.fallback is None else "; tcp from now on"
                    logger.warning("%s: NIXL: %s%s", self.server.link, error, on)
                if self.fallback is None or self._aborted:
                    # The caller, which has the link, finds out whether the peer is lost.
                    text = f"{transfer.what}: NIXL: {error}; the addressed bytes are undefined"
                    raise PeerLost(text, phase="copy") from error
                self._failed = str(error)
        self.fallback._move(transfer)


class _NixlTransfer:
    """One transfer, in parts of one request each. Threads: the caller's."""

    def __init__(self, connection: NixlConnection, transfer: Transfer) -> None:
        self._connection = connection
        self._transfer = transfer
        self._done = 0  # bytes

    def run(self) -> None:
        """Move every part. Once this returns or raises, nothing touches local memory."""
        plan, done = self._transfer.plan, 0
        move = self._move_directly if self._transfer.write or self._connection.reads else self._have_owner_write
        parts = (plan,) if is_one_request(plan) else split_plan(plan, _PART_BYTES, MAX_REQUEST_RUNS // 2)
        for part in parts:
            for each in _in_order(part):
                while not move(each):  # other transfers may end an agent again
                    self._done = done
                done += each.nbytes
                self._done = done

    def _have_owner_write(self, part: Plan) -> bool:
        """Have the owner write a part into this side's receiver; return False to ask again."""
        connection, receiver = self._connection, self._connection.server.pull_receiver
        where = receiver.expose(self._turn, PlanSide(part, self._transfer.local, True), connection._known_there)
        address = where[0]
        answer: Answer | None = None
        try:
            answer = self._ask(self._request(part, *where))
        finally:
            ended = not receiver.is_agent(address.name)  # by another transfer
            over = isinstance(answer, Moved) or (isinstance(answer, NixlRefused) and not answer.touched)
            receiver.withdraw(address.name, end=not over)  # bytes may still come
        connection._known_there = answer.loaded if isinstance(answer, Moved) else ""
        if isinstance(answer, Moved):
            return True
        return self._on_refusal(answer, {LOST: ended, NixlRefused.UNKNOWN: not address.metadata})

    def _move_directly(self, part: Plan) -> bool:
        """Move a part by this side's sender, once the owner is ready; return False to ask again.

        That is after another transfer has ended an agent of either side.
        """
        connection = self._connection
        ready = self._ask(self._request(part))
        if not isinstance(ready, Ready):
            return self._on_refusal(ready, {})
        connection._receiver_there = ready.receiver.name
        moved = ""
        failed: NixlFailed | None = None
        try:
            try:
                side = PlanSide(part, self._transfer.local, not self._transfer.write)
                moved = connection.server.push_sender.move(self._turn, side, ready, self._add)
            except NixlFailed as error:
                failed = error  # the owner knows whether its receiver has ended
            done = self._ask(Done(ready.move, good=bool(moved)))
        except BaseException:
            connection.context.wire.tell(connection.server.link, encode(Done(ready.move, good=False)))
            raise
        if isinstance(done, Moved) and moved:
            return True
        if failed is not None and isinstance(done, NixlRefused) and done.code == LOST:
            raise failed
        return self._on_refusal(done, {NixlRefused.AGAIN: True, LOST: not moved})

    def _turn(self) -> float:
        """Return the seconds to wait next; raise if this transfer shall stop."""
        seconds = self._transfer.deadline.next_turn()
        if not seconds or self._connection._aborted:
            raise self._transfer.timeout(self._done)
        return seconds

    def _request(self, part: Plan, receiver: Address | None = None, bases: bytes = b"", offsets: bytes = b"") -> Ask:
        connection, remote, write = self._connection, self._transfer.remote, self._transfer.write
        number, meta = next(connection._numbers), encode_request(remote.handle, remote.extent, part, write)
        sender, budget_ms = connection.server.push_sender.agent, self._transfer.deadline.remaining_ms()
        loaded = "" if sender is None else sender.loaded.get(connection._receiver_there, "")
        return Ask(number, write, receiver is None, meta, receiver, bases, offsets, loaded, budget_ms)

    def _ask(self, request: Ask | Done) -> Answer:
        connection = self._connection
        self._turn()
        try:
            answer = connection.context.wire.ask(connection.server.link, encode(request), self._transfer.deadline)
        except DeadlineExceeded as error:
            raise self._transfer.timeout(self._done) from error
        return read_answer(answer)

    def _on_refusal(self, answer: Answer, again: dict[int, bool]) -> Literal[False]:
        """Raise the exception for a part that did not move; return False for a status marked in ``again``."""
        progress = self._transfer.progress(self._done)
        if not isinstance(answer, NixlRefused):
            raise ProtocolError(f"{progress}: the peer answered with {type(answer).__name__}")
        if again.get(answer.code):
            return False
        if answer.code == NixlRefused.OVERDUE:
            raise self._transfer.timeout(self._done)
        if answer.code in (LOST, NixlRefused.UNKNOWN):
            raise NixlFailed(f"at the peer: {answer.text}")
        touched = answer.touched or self._done > 0
        code = TORN if answer.touched else answer.code
        raise refusal(code, answer.text, progress, untouched=not touched)

    def _add(self, nbytes: int) -> None:
        self._done += nbytes


def _in_order(part: Plan) -> Iterator[Plan]:
    """Yield an ordered plan run by run, because NIXL moves the runs of one transfer in any order."""
    if not part.ordered:
        yield part
        return
    for run in part.runs:
        yield part.replace(runs=run[None, :].copy(), nbytes=int(run[2]) * part.count)
