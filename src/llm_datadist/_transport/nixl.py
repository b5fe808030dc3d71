"""NIXL: UCX moves the bytes, over RDMA where there is any; requests and answers travel over the control connection.

The owner of the memory checks its guards before the first byte and after the last, as with tcp. A pull is written by
the owner, because UCX only emulates READ over tcp, or read by the initiator, over RDMA. A push is written by the
initiator once the owner has told where. Each end of a link has agents of its own (:mod:`.nixl_agent` says why): a
transfer that is given up costs the agent, and with it every late byte.

When the link begins each end tells the other where its receiver is, so that they are connected before the first
transfer. Later these are asked by the initiator and answered by the owner:

    pull      Ask(receiver of the initiator)  ->  Moved
    push      Ask  ->  Granted(receiver of the owner), then Done  ->  Moved
    either    Refused, with a status
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Annotated, Final, Literal
from weakref import WeakSet

import msgspec
import numpy as np

from llm_datadist._checks import HERE
from llm_datadist._log import logger
from llm_datadist._native import MAX_REQUEST_RUNS, Ending, Outcome, Plan, check_plan, encode_request, load_generation
from llm_datadist._native.lane_engine import CHANGED, LOST, TORN
from llm_datadist._native.plan import PlanSide, split_plan
from llm_datadist._native.signals import hold_signals
from llm_datadist._transport.choose import Verdict
from llm_datadist._transport.connection import Capabilities, Connection, ServedConnection, Transfer, Usage
from llm_datadist._transport.moves import MoveOwner, MoveReply, answer, is_one_request, refusal, status_of
from llm_datadist._transport.nixl_agent import (
    NOT_INSTALLED,
    Address,
    Agent,
    NixlFailed,
    Progress,
    fabric,
    keep_for_ever,
    spans_of,
    ucx_transports,
    usable,
)
from llm_datadist._transport.peer_memory import why_stranger
from llm_datadist._transport.transport import Context, Meeting, Transport, Wire
from llm_datadist.config import AUTH_SECRET, NIXL_PLAINTEXT, PEER_POLICY, TLS_CERT, TRANSPORT
from llm_datadist.errors import (
    DeadlineExceeded,
    LinkError,
    LLMException,
    LLMStatusCode,
    PeerLost,
    ProtocolError,
    TransferAborted,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from llm_datadist._memory.exports import RegionDescriptor
    from llm_datadist.config import Options

#: Bytes asked for at once: the owner serves one part after the other.
_PART_BYTES: Final = 128 << 20
#: The thread that receives a push does not sleep for so long after the last request, then at most so long at once.
_BUSY_SECONDS: Final = 0.5
_LAZY_SECONDS: Final = 0.001
_POLLS: Final = 16  # between two looks for a request
#: What the requests of one peer that wait here may hold. An honest one has at most a few of 1 MiB for each thread.
_MAX_WAITING_BYTES: Final = 64 << 20
_REQUEST_BYTES: Final = 2048  # what a request holds here beside its bytes
#: Status of a request that needs the metadata of the receiver, which the sender there has forgotten.
_UNKNOWN_RECEIVER: Final = 100
#: Status of a request whose time was over at the owner first.
_OVERDUE: Final = 101
#: Status of a push whose receiver the owner has ended for the sake of another transfer: it may be asked for again.
_AGAIN: Final = 102
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Known = Annotated[str, msgspec.Meta(max_length=64)]


class Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """Initiator -> owner: move this. ``meta`` is a request as over a data lane.

    ``direct``: the initiator moves the bytes by itself, once it is told where. Else ``receiver`` is its own, ``bases``
    and ``offsets`` (uint64, little-endian) are where each tensor is there and each run in a tensor. ``loaded`` is the
    owner's receiver that the initiator's sender knows.
    """

    move: _Number
    write: bool
    direct: bool
    meta: bytes
    receiver: Address | None
    bases: bytes
    offsets: bytes
    loaded: _Known
    budget_ms: _Number


class Done(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """Initiator -> owner: what was granted has been moved, or (not ``good``) given up."""

    move: _Number
    good: bool


class Meet(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """Either end -> the other, when the link begins: where the receiver is. Has no answer."""

    receiver: Address


class Granted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """Owner -> initiator: there it is; ``bases`` and ``offsets`` as in :class:`Ask`."""

    move: _Number
    receiver: Address
    bases: bytes
    offsets: bytes


class Moved(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """Owner -> initiator: all of it was moved. ``loaded`` is the receiver that the owner's sender knows now."""

    loaded: _Known


class Refused(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """Owner -> initiator: no, with a status; ``touched``: bytes may have been moved."""

    code: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    text: Annotated[str, msgspec.Meta(max_length=4096)]
    touched: bool


_encode: Final = msgspec.msgpack.Encoder().encode
_ask_decoder: Final = msgspec.msgpack.Decoder(Ask | Done | Meet)
_decode_answer: Callable[[bytes], Granted | Moved | Refused] = msgspec.msgpack.Decoder(Granted | Moved | Refused).decode


_NOT_ASKED: Final = (
    "this end does not ask for it, and over TCP, or without credentials, no peer may choose it for this end: set "
    "llm.Transport=nixl at both ends"
)
_CAPABILITIES: Final = Capabilities("nixl", shared_regions=True, private_memory=True, remote_guards=True)


class NixlTransport(Transport):
    """The transport. Each side offers the fabric that its NIXL can use, unless it may not be used: ``why_not``.

    ``asked``: the option of this side asks for NIXL. No peer decides that: one that UCX has connected over TCP can
    write any memory of this process, and its metadata can end the process.
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
        pools = [(segment.address, segment.nbytes) for segment in context.exports.regions.values()]
        self.shared = Nixl(context.wire, context.owner, pools, fallback=options.nixl_fallback)

    def offer(self, meeting: Meeting) -> bytes:
        return self.fabric.encode()

    def judge(self, meeting: Meeting) -> Verdict:
        forced, theirs = meeting.forced == self.name, self._theirs(meeting)
        mine, why_not = self.fabric, self.why_not
        # Another user would reach all memory of this process. ``auto`` takes NIXL from authenticated peers only.
        if forced and not meeting.authenticated and meeting.sock is not None:
            why_not = why_stranger(meeting.sock, meeting.exports.users) or why_not
            mine = "" if why_not else mine
        if not mine:
            return Verdict(False, why_not if theirs else "neither end has NIXL", silent=not theirs)
        if not theirs:
            return Verdict(False, "the peer has no NIXL, or does not allow it (llm.NixlPlaintext, llm.PeerPolicy)")
        over = _common(mine, theirs)
        if not (self.asked or (meeting.authenticated and over == "rdma")):
            return Verdict(False, _NOT_ASKED)
        if over == "tcp":
            return Verdict(forced, f"UCX has no RDMA at both ends, it uses {ucx_transports('tcp')}")
        return Verdict(True, f"UCX uses RDMA ({ucx_transports('rdma')})")

    def _theirs(self, meeting: Meeting) -> str:
        return meeting.theirs.get(self.name, b"").decode(errors="replace")

    def connect(self, meeting: Meeting) -> Connection:
        lanes = meeting.transports["tcp"]
        # The dialer of a link decides whether there is something to fall back on.
        fallback = self.shared.fallback if meeting.dialled else not lanes.lacks(meeting)
        return NixlConnection(
            self.shared,
            _common(self.fabric, self._theirs(meeting)),
            writable=meeting.exports.writable,
            dialled=meeting.dialled,
            fallback=meeting.connect(lanes.name) if fallback else None,
        )

    def quiesce(self, tag: int, private: NDArray[np.uint64] | None) -> None:
        self.shared.quiesce(tag, private)

    def close(self) -> None:
        self.shared.close()


def _common(mine: str, theirs: str) -> str:
    """Return what both sides can use, if each can use something."""
    return "tcp" if "tcp" in (mine, theirs) else "rdma"


def _why_not(options: Options) -> str:
    """Return why this side uses no NIXL; empty if it may."""
    if options.credentials is not None and not options.nixl_plaintext:
        return (
            f"it sends KV bytes unencrypted, and this end has credentials ({AUTH_SECRET}, {TLS_CERT}): set "
            f"{NIXL_PLAINTEXT}='1' to allow that"
        )
    if options.peer_policy is not None:
        return f"a peer that UCX has connected reaches all memory of this process: {PEER_POLICY} could not be kept"
    return "" if fabric() else NOT_INSTALLED


@dataclass(eq=False)
class Nixl:
    """What the links of one LLMDataDist that use NIXL share. Owns nothing but the list of their connections.

    ``pools``: spans (address, bytes) that every agent registers at once. ``fallback``: links that this end dials have
    data lanes too, for the time when NIXL has failed.
    """

    wire: Wire
    owner: MoveOwner
    pools: Sequence[tuple[int, int]]
    fallback: bool = field(default=False, kw_only=True)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _connections: WeakSet[NixlConnection] = field(default_factory=WeakSet, init=False)

    def add(self, connection: NixlConnection) -> None:
        with self._lock:
            self._connections.add(connection)

    def quiesce(self, tag: int, private: NDArray[np.uint64] | None) -> None:
        """Stop all use of memory granted under ``tag``; none of it is touched any more when this returns.

        ``private``: the addresses of its tensors where they are outside all pools; agents forget them. Advance the
        guards before: they stop what is granted later.
        """
        with self._lock:
            connections = list(self._connections)
        for each in connections:
            each.server.quiesce(tag)
            if private is not None:
                for end in each.server.ends:
                    end.forget(private.tolist())

    def close(self) -> None:
        """Join the threads of connections that have ended; closes the others."""
        with self._lock:
            connections = list(self._connections)
        for each in connections:
            each.abort()
        for each in connections:
            each.server.join()


class _End:
    """One agent of a link, made when it is first needed, and again after it has ended.

    Threads: any; one at a time holds :meth:`using`. ``users`` counts transfers that are on their way into a receiver;
    only within :meth:`using` and :meth:`leave` it changes.
    """

    def __init__(self, nixl: Nixl, fabric: str, *, progress: bool) -> None:
        self._make = partial(Agent, fabric, progress=progress, pools=nixl.pools)
        self._lock = threading.RLock()  # protects all below; held while the agent is used
        self.agent: Agent | None = None
        self._closed = False
        self._retired = False
        self.users = 0

    @contextmanager
    def using(self, turn: Callable[[], float]) -> Iterator[Agent]:
        """Lend the agent; raises NixlFailed when this link has ended.

        ``turn`` returns for how many seconds to wait for another thread that uses it, or raises.
        """
        while not self._lock.acquire(timeout=turn()):
            pass
        try:
            if self._closed:
                raise NixlFailed("the link has ended")
            self._end_retired()
            if self.agent is None:
                self.agent = self._make()
            yield self.agent
        finally:
            self._end_retired()
            self._lock.release()

    def expose(self, turn: Callable[[], float], end: PlanSide, known: str) -> tuple[Address, bytes, bytes]:
        """Register memory that the peer is to reach, and count one user more until :meth:`leave`.

        Return where it is, as :class:`Ask` says; ``known`` is the receiver that the peer's sender knows.
        """
        bases, offsets = _runs_of(end)
        with self.using(turn) as agent:
            agent.cover(bases, end.tensors.extent)
            address = agent.address(known)
            self.users += 1
        return address, bases.astype("<u8").tobytes(), offsets.astype("<u8").tobytes()

    def move(self, turn: Callable[[], float], end: PlanSide, there: Ask | Granted, progress: Progress) -> str:
        """Write memory of this end, a source, to where the peer has told, or read what is a destination.

        Return how the agent knows the peer's receiver now; empty, and nothing moved, if it needs the metadata. If this
        raises the agent has ended: nothing touches the memory any more.
        """
        (bases, offsets), nbytes = _runs_of(end), end.plan.runs[:, 2]
        theirs = (_numbers(there.bases, len(bases), "bases"), _numbers(there.offsets, len(offsets), "offsets"))
        assert there.receiver is not None, "the server has checked it"
        verb = "READ" if end.is_dst else "WRITE"
        with self.using(turn) as agent:
            try:
                if not agent.load(there.receiver):
                    return ""
                agent.cover(bases, end.tensors.extent)
                mine = spans_of(bases, offsets, nbytes)
                agent.move(verb, there.receiver.name, mine, spans_of(*theirs, nbytes), turn, progress)
            except BaseException:
                self._end()
                raise
        return there.receiver.known_as

    def leave(self) -> None:
        """Count one user less, of a transfer whose bytes do not come any more."""
        with self._lock:
            self.users -= 1
            self._end_retired()

    def loaded(self, name: str) -> str:
        """Return how this agent knows a receiver of the peer; empty if it does not."""
        agent = self.agent
        return "" if agent is None else agent.loaded.get(name, "")

    def is_agent(self, name: str) -> bool:
        """Return True until the agent of this name has ended."""
        agent = self.agent
        return agent is not None and agent.name == name

    def end(self, name: str | None = None) -> None:
        """End the agent, or only that of this name: no byte comes or goes through it any more."""
        with self._lock:
            if name is None or self.is_agent(name):
                self._end()

    def forget(self, bases: list[int]) -> None:
        """Register these tensors no longer: the agent ends when no transfer uses it. Waits for nothing."""
        agent = self.agent
        if agent is None or not agent.covers_any(bases):
            return
        self._retired = True
        if self._lock.acquire(blocking=False):  # else whoever has it ends the agent
            try:
                self._end_retired()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the agent, and make no other."""
        with self._lock:
            self._closed = True
            self._end()

    def cpu_seconds(self) -> float:
        agent = self.agent
        return 0.0 if agent is None else agent.cpu_seconds()

    def _end_retired(self) -> None:
        if self._retired and not self.users:
            self._end()

    def _end(self) -> None:
        agent, self.agent, self._retired = self.agent, None, False
        if agent is not None:
            agent.end()


class NixlConnection(ServedConnection):
    """A connection whose bytes are moved by NIXL. Made by :class:`NixlTransport`.

    ``fabric`` is what UCX uses, see :func:`.nixl_agent.fabric`. ``dialled``: this end made the link. ``fallback``, if
    there is one, is used for every transfer from the one on that NIXL failed; owned by this connection.
    """

    capabilities = _CAPABILITIES

    def __init__(
        self,
        nixl: Nixl,
        fabric: str,
        regions: Iterable[RegionDescriptor] = (),
        *,
        writable: bool,
        dialled: bool = False,
        fallback: Connection | None = None,
    ) -> None:
        self.nixl = nixl
        self.fallback = fallback
        self.recovery = None if fallback is None else fallback.recovery
        self._dialled = dialled
        # A pull is a READ of this end. UCX only emulates it over tcp, and what can be read can be written.
        self.reads = fabric == "rdma" and writable
        self.sender = _End(nixl, fabric, progress=False)
        self.receiver = _End(nixl, fabric, progress=True)  # of what is pulled
        self.pushed = _End(nixl, fabric, progress=False)  # the receiver of what is pushed
        self.server: Server = Server(nixl, self.sender, self.receiver, self.pushed, reads=self.reads, writable=writable)
        self._known = ""  # the receiver of this end that the peer's sender knows
        self._pushed_to = ""  # the name of the peer's receiver of what is pushed
        self._failed = ""  # why NIXL is not used any more
        self._moves = iter(range(1, 2**63))
        super().__init__(regions, writable=writable)
        nixl.add(self)

    def begin(self, link: object) -> None:
        # The end that dials is the one that pulls, as a rule. What the other direction needs is made when it is needed.
        first = self.pushed if self.reads else self.receiver
        self.server.begin(link, first if self._dialled != self.reads else None)

        if self.fallback is not None:
            self.fallback.begin(link)

    def usage(self) -> Usage:
        """Return it with the CPU time of UCX's threads, and what became of NIXL."""
        remark = f"; by tcp, because NIXL failed: {self._failed}" if self._failed else ""
        return (
            super()
            .usage()
            ._replace(progress_seconds=self.sender.cpu_seconds() + self.receiver.cpu_seconds(), remark=remark)
        )

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

    def _move(self, transfer: Transfer) -> None:
        local, remote = transfer.local, transfer.remote
        check_plan(transfer.plan, *((remote, local) if transfer.write else (local, remote)))
        if self.fallback is None or not self._failed:
            moving = _NixlTransfer(self, transfer)
            try:
                moving.run()
                return
            except (NixlFailed, LinkError, DeadlineExceeded) as error:
                if self._aborted:
                    text = f"{moving.what()}: the nixl connection was aborted"
                    raise TransferAborted(text, phase="copy") from error
                if not isinstance(error, NixlFailed):
                    raise
                on = "" if self.fallback is None else "; tcp from now on"
                logger.warning("%s: NIXL: %s%s", self.server.link, error, on)
                if self.fallback is None:
                    # The caller, which knows the link, finds out whether the peer is lost.
                    text = f"{transfer.what}: NIXL: {error}; the addressed bytes are undefined"
                    raise PeerLost(text, phase="copy") from error
                self._failed = str(error)
        self.fallback._move(transfer)


class _NixlTransfer:
    """One transfer of a connection, in parts of one request each. Used by the calling thread."""

    def __init__(self, connection: NixlConnection, transfer: Transfer) -> None:
        self._connection = connection
        self._transfer = transfer
        self._progress = Progress()

    def run(self) -> None:
        """Move every part. When this returns or raises, local memory is the caller's again."""
        plan, done = self._transfer.plan, 0
        move = self._move_directly if self._transfer.write or self._connection.reads else self._have_moved
        parts = (plan,) if is_one_request(plan) else split_plan(plan, _PART_BYTES, MAX_REQUEST_RUNS // 2)
        for part in parts:
            for each in _in_order(part):
                while not move(each):  # until the deadline: other transfers may end an agent again
                    self._progress.done = done
                done += each.nbytes
                self._progress.done = done

    def _have_moved(self, part: Plan) -> bool:
        """Have the owner write a part into this end's receiver; return False if it is to be asked again."""
        connection, receiver = self._connection, self._connection.receiver
        where = receiver.expose(self._turn, PlanSide(part, self._transfer.local, True), connection._known)
        address = where[0]
        answer: Granted | Moved | Refused | None = None
        try:
            answer = self._ask(self._request(part, *where))
        finally:
            ended = not receiver.is_agent(address.name)  # by another transfer
            if not (isinstance(answer, Moved) or (isinstance(answer, Refused) and not answer.touched)):
                receiver.end(address.name)  # bytes might still come
            receiver.leave()
        connection._known = answer.loaded if isinstance(answer, Moved) else ""
        if isinstance(answer, Moved):
            return True
        return self._refuse(answer, {LOST: ended, _UNKNOWN_RECEIVER: not address.metadata})

    def _move_directly(self, part: Plan) -> bool:
        """Move a part by this end's sender, once the owner has told where the other end of it is.

        Return False if it is to be asked again, because another transfer has ended an agent of either end.
        """
        connection = self._connection
        granted = self._ask(self._request(part))
        if not isinstance(granted, Granted):
            return self._refuse(granted, {})
        connection._pushed_to = granted.receiver.name
        moved = ""
        failed: NixlFailed | None = None
        try:
            try:
                end = PlanSide(part, self._transfer.local, not self._transfer.write)
                moved = connection.sender.move(self._turn, end, granted, self._progress)
            except NixlFailed as error:
                failed = error  # the owner knows whether it has ended the receiver
            done = self._ask(Done(granted.move, good=bool(moved)))
        except BaseException:
            connection.nixl.wire.tell(connection.server.link, _encode(Done(granted.move, good=False)))
            raise
        if isinstance(done, Moved) and moved:
            return True
        if failed is not None and isinstance(done, Refused) and done.code == LOST:
            raise failed
        return self._refuse(done, {_AGAIN: True, LOST: not moved})

    def _turn(self) -> float:
        """Return for how many seconds to wait; raise if this transfer is to stop. Handlers of signals run."""
        seconds = self._transfer.deadline.next_turn()
        if not seconds or self._connection._aborted:
            raise self._transfer.timeout(self._progress.done)
        return seconds

    def _request(self, part: Plan, receiver: Address | None = None, bases: bytes = b"", offsets: bytes = b"") -> Ask:
        connection, remote, write = self._connection, self._transfer.remote, self._transfer.write
        return Ask(
            next(connection._moves),
            write,
            receiver is None,
            encode_request(remote.handle, remote.extent, part, write),
            receiver,
            bases,
            offsets,
            connection.sender.loaded(connection._pushed_to),
            self._transfer.deadline.remaining_ms(),
        )

    def _ask(self, request: Ask | Done) -> Granted | Moved | Refused:
        connection = self._connection
        self._turn()
        try:
            answer = connection.nixl.wire.ask(connection.server.link, _encode(request), self._transfer.deadline)
        except DeadlineExceeded as error:
            raise self._transfer.timeout(self._progress.done) from error
        return _answer_of(answer)

    def _refuse(self, answer: Granted | Moved | Refused, again: dict[int, bool]) -> Literal[False]:
        """Raise what the answer to a part means that was not moved; return False for a status that is ``again``."""
        if not isinstance(answer, Refused):
            raise ProtocolError(f"{self.what()}: the peer answered with {type(answer).__name__}")
        if again.get(answer.code):
            return False
        if answer.code == _OVERDUE:
            raise self._transfer.timeout(self._progress.done)
        if answer.code in (LOST, _UNKNOWN_RECEIVER):
            raise NixlFailed(f"at the peer: {answer.text}")
        touched = answer.touched or self._progress.done > 0
        outcome = Outcome(Ending.REFUSED, TORN if answer.touched else answer.code, 0, answer.text)
        raise refusal(outcome, self.what(), untouched=not touched)

    def what(self) -> str:
        return self._transfer.progress(self._progress.done)


def _runs_of(end: PlanSide) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the addresses of the tensors at one end of a plan, and where the runs begin in each."""
    first, column = (end.plan.dst_first, 0) if end.is_dst else (end.plan.src_first, 1)
    return end.tensors.bases[first : first + end.plan.count], end.plan.runs[:, column]


def _in_order(part: Plan) -> Iterator[Plan]:
    """Yield an ordered plan run by run: NIXL moves the runs of one transfer in any order."""
    if not part.ordered:
        yield part
        return
    for run in part.runs:
        yield part.replace(runs=run[None, :].copy(), nbytes=int(run[2]) * part.count)


def _numbers(data: bytes, count: int, what: str) -> NDArray[np.uint64]:
    if len(data) != 8 * count:
        raise ProtocolError(f"nixl: {len(data)} bytes of {what}, {count} numbers are needed")
    return np.frombuffer(data, "<u8").astype(np.uint64)


def _answer_of(data: bytes) -> Granted | Moved | Refused:
    """Return an answer of the owner. Raises ProtocolError."""
    try:
        return _decode_answer(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"nixl: the peer sent no answer: {error}") from error


@dataclass(slots=True, eq=False)
class _Served:
    """One request that the owner has granted. Its fields are set by one thread; ``cancelled`` by any."""

    plan: Plan
    grant: MoveReply
    ask: Ask
    reply: Callable[[bytes], None]
    until: float  # monotonic
    begun: bool = False  # its memory may be touched until it is forgotten
    cancelled: bool = False
    receiver: str = ""  # name of the agent that the peer writes to
    nbytes: int = 0  # that count as waiting until it is forgotten


class Server:
    """Serves what the peer of one connection asks. Owns one thread, from the first request to the end.

    The control thread checks and grants; the thread moves the bytes of pulls, one after the other, and tells receivers
    to those that push. Wherever it waits it drops what is over, and lets pushed bytes come in. While a request is in
    ``served`` and has begun, its memory may be touched: :meth:`quiesce` cancels it and waits for its end.
    """

    def __init__(
        self, nixl: Nixl, sender: _End, receiver: _End, pushed: _End, *, reads: bool = False, writable: bool = False
    ) -> None:
        self.link: object = None
        self.ends = (sender, receiver, pushed)
        self.reads = reads  # the peer may read by itself
        self._writable = writable  # it may push: else no receiver for that is ever made
        self._pushed = pushed  # the receiver of what is pushed, in which this thread makes progress
        self._nixl = nixl
        self._sender = sender
        self._queue: SimpleQueue[tuple[Callable[[], None], int] | None] = SimpleQueue()  # jobs, bytes until they begin
        self._held: dict[int, _Served] = {}  # what the peer writes or reads by itself; used by the thread alone
        self._overdue: deque[int] = deque(maxlen=64)  # the last that were dropped for that; used by the thread alone
        self._changed = threading.Condition(threading.Lock())  # protects all below
        self.served: dict[int, _Served] = {}
        self.waiting_bytes = 0  # of requests of the peer that are not answered yet
        self._thread: threading.Thread | None = None
        self._stopped = False

    def begin(self, link: object, first: _End | None) -> None:
        """Let the peer know the receiver whose bytes are likely to come first, in the thread; None: of the peer's."""
        self.link = link
        if first is not None:
            self._put(partial(self._meet, first))

    # Called on the control thread

    def on_request(self, data: bytes, reply: Callable[[bytes], None]) -> None:
        """Take a request of the peer; ``reply`` is called once, by any thread. Raises ProtocolError."""
        try:
            request = _ask_decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"nixl: a request that is none: {error}") from error
        nbytes = len(data) + _REQUEST_BYTES
        full = self.waiting_bytes + nbytes > _MAX_WAITING_BYTES  # only this thread adds to it
        if not isinstance(request, Ask):
            if full:
                raise ProtocolError(f"nixl: {_MAX_WAITING_BYTES >> 20} MiB of requests wait already")
            job = partial(self._finish, request, reply) if isinstance(request, Done) else partial(self._meet, request)
            self._put(job, nbytes)
            return
        try:
            if full:
                text = f"{_MAX_WAITING_BYTES >> 20} MiB of requests over this link wait already"
                raise LinkError(text, status_code=LLMStatusCode.LLM_LINK_BUSY)
            served = self.grant(request, reply)
        except ProtocolError:
            raise
        except LLMException as error:
            reply(_encode(Refused(*status_of(error), touched=False)))
            return
        served.nbytes = nbytes
        self._put(partial(self._serve, served), served=served)

    def on_late_answer(self, data: bytes) -> bytes | None:
        """Return the request that gives back what an answer, which came too late, has granted; None for nothing."""
        granted = _answer_of(data)
        return _encode(Done(granted.move, good=False)) if isinstance(granted, Granted) else None

    def grant(self, ask: Ask, reply: Callable[[bytes], None]) -> _Served:
        """Return a request with what it may use. Raises LLMException to refuse it."""
        if ask.direct is (ask.receiver is not None) or (ask.write and not ask.direct):
            raise ProtocolError("nixl: a request that names a receiver has it written to, one that pushes is direct")
        if ask.direct and not ask.write and not self.reads:
            raise ProtocolError("nixl: a peer reads by itself over RDMA only, and with remote cache access only")
        if ask.write and not self._writable:
            raise LLMException(
                "pushes over nixl need remote cache access at the owner (LLMConfig.enable_remote_cache_accessible)",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        move = answer(self._nixl.owner, self.link, ask.meta, write=ask.write)
        check_plan(move.plan, move.reply.tensors, move.reply.tensors)
        return _Served(move.plan, move.reply, ask, reply, time.monotonic() + ask.budget_ms / 1e3)

    def _put(self, job: Callable[[], None], nbytes: int = 0, served: _Served | None = None) -> None:
        """Have the thread do a job; none where the link has ended, because nobody waits for an answer."""
        with self._changed:
            if self._stopped:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="llm-datadist-nixl", daemon=True)
                thread.start()
                self._thread = thread
            if served is not None and self.served.setdefault(served.ask.move, served) is not served:
                raise ProtocolError(f"nixl: move {served.ask.move} is asked for twice")
            self.waiting_bytes += nbytes if served is None else served.nbytes
        self._queue.put((job, nbytes))

    # Called by any thread

    def quiesce(self, tag: int) -> None:
        """Cancel what was granted under ``tag``, and wait until none of its memory is touched any more.

        Waits only for what has begun, which the thread ends wherever it waits itself.
        """
        with self._changed:
            found = [each for each in self.served.values() if each.grant.tag == tag]
            for each in found:
                each.cancelled = True
        if self._thread is threading.current_thread():  # a finalizer, between two jobs
            self._drop_ended()
        elif found:
            self._queue.put(None)
            with self._changed:
                self._changed.wait_for(
                    lambda: not any(each.begun and self.served.get(each.ask.move) is each for each in found)
                )

    def stop(self) -> None:
        """End soon: the thread ends all agents, and here and now where there is no thread. Waits for nothing."""
        with self._changed:
            self._stopped = True
            thread = self._thread
        self._queue.put(None)
        if thread is None:
            self._end()

    def join(self) -> None:
        """Wait for the thread, which is told to stop when the connection is released."""
        if self._thread is threading.current_thread():  # a finalizer, between two jobs
            self._end()
        elif self._thread is not None:
            self._thread.join()

    # The thread

    def _run(self) -> None:
        asked = 0.0  # when the last request came
        try:
            while not self._stopped:
                timeout = None
                if self._held:
                    # As long as bytes may be coming this thread does not sleep, as the receiving end of a NIXL program
                    # does: with a thread of UCX that sleeps between two messages, pushes take a third longer.
                    self._let_in()
                    timeout = _LAZY_SECONDS if time.monotonic() > asked + _BUSY_SECONDS else 0
                item = None
                with suppress(Empty):
                    item = self._queue.get(timeout=timeout)
                    asked = time.monotonic()
                self._handle(item)
        finally:
            self._end()  # also after MemoryError: else quiesce would wait without end

    @hold_signals
    def _handle(self, item: tuple[Callable[[], None], int] | None) -> None:
        try:
            self._drop_ended()
            if item is not None:
                job, nbytes = item
                with self._changed:
                    self.waiting_bytes -= nbytes
                job()
        except Exception:  # noqa: BLE001 (a bug costs a request, not the thread)
            logger.exception("nixl: a request of %s failed", self.link)

    @hold_signals
    def _let_in(self) -> None:
        """Let pushed bytes come in."""
        with suppress(NixlFailed), self._pushed.using(lambda: _LAZY_SECONDS) as agent:
            for _ in range(_POLLS):
                agent.receive()

    def _meet(self, item: Meet | _End) -> None:
        """Tell the peer of a receiver here, or learn of its receiver. A failure shows in the first transfer."""
        try:
            if isinstance(item, Meet):
                with self._sender.using(self._turn) as agent:
                    agent.load(item.receiver)
                return
            with item.using(self._turn) as agent:
                receiver = agent.address("")
            self._nixl.wire.tell(self.link, _encode(Meet(receiver)))
        except (NixlFailed, LLMException) as error:
            logger.info("nixl: the ends of %s are not connected yet: %s", self.link, error)

    def _serve(self, served: _Served) -> None:
        with self._changed:
            served.begun = True  # what is cancelled from now on is waited for
        try:
            if not _unchanged(served):
                self._refuse(served, CHANGED, "a guard has changed", touched=False)
            elif served.ask.direct:
                self._hold(served)
            else:
                self._write(served)
        except (NixlFailed, LLMException) as error:  # only a failure of NIXL itself is LOST
            code, text = LOST, " ".join(str(error).split())[:4000]
            if served.cancelled:
                code, text = CHANGED, "the memory was taken back"
            elif time.monotonic() >= served.until:
                code, text = _OVERDUE, "its time was over"
            self._refuse(served, code, text, touched=True)
        except Exception:
            self._refuse(served, int(LLMStatusCode.LLM_FAILED), "the target failed; see its log", touched=True)
            raise

    def _write(self, served: _Served) -> None:
        """Write what was asked for into the receiver of the peer, and answer."""
        end = PlanSide(served.plan, served.grant.tensors, False)
        loaded = self._sender.move(partial(self._turn, served), end, served.ask, Progress())
        if not loaded:
            self._refuse(served, _UNKNOWN_RECEIVER, "the metadata of the receiver are not known", touched=False)
        elif _unchanged(served):
            self._answer(served, Moved(loaded))
        else:
            self._refuse(served, CHANGED, "a guard changed meanwhile", touched=True)

    def _hold(self, served: _Served) -> None:
        """Tell the peer where it may write, or read, and keep that memory until it is done."""
        ask, end = served.ask, PlanSide(served.plan, served.grant.tensors, served.ask.write)
        where = self._pushed.expose(partial(self._turn, served), end, ask.loaded)
        served.receiver = where[0].name
        self._held[ask.move] = served
        served.reply(_encode(Granted(ask.move, *where)))

    def _finish(self, done: Done, reply: Callable[[bytes], None]) -> None:
        served = self._held.pop(done.move, None)
        if served is None:
            late = done.move in self._overdue
            code, text = (_OVERDUE, "its time was over") if late else (TORN, "the memory was taken back")
            reply(_encode(Refused(code, text, touched=True)))
            return
        served.reply = reply
        # A receiver ends for all that are written to it when one of them is dropped.
        ended = not self._pushed.is_agent(served.receiver)
        if not done.good:
            self._pushed.end(served.receiver)
        self._pushed.leave()
        if ended:
            self._refuse(served, _AGAIN, "the receiver has ended", touched=True)
        elif not done.good:
            self._refuse(served, LOST, "given up", touched=True)
        elif _unchanged(served):
            self._answer(served, Moved(""))
        else:
            self._refuse(served, TORN, "a guard changed meanwhile", touched=True)

    def _drop_ended(self) -> None:
        """Make sure that peers do not write any more where their time is over, or the memory taken back."""
        for served in [each for each in self._held.values() if self._gone(each)]:
            del self._held[served.ask.move]
            if not served.cancelled:
                self._overdue.append(served.ask.move)
            self._pushed.end(served.receiver)
            self._pushed.leave()
            self._forget(served)

    def _turn(self, served: _Served | None = None) -> float:
        """Return for how many seconds to wait, once what cannot wait is done; raise NixlFailed if this is to stop."""
        self._drop_ended()
        if self._held:
            self._let_in()  # else two ends might wait for each other
        if self._stopped if served is None else self._gone(served):
            raise NixlFailed("the time was over, or the memory was taken back")
        return _LAZY_SECONDS if self._held else 0.05

    def _gone(self, served: _Served) -> bool:
        return served.cancelled or self._stopped or time.monotonic() >= served.until

    def _answer(self, served: _Served, answer: Moved | Refused) -> None:
        self._forget(served)  # first: the peer may unregister as soon as it has the answer
        served.reply(_encode(answer))

    def _refuse(self, served: _Served, code: int, text: str, *, touched: bool) -> None:
        self._answer(served, Refused(code, text, touched))

    def _forget(self, served: _Served) -> None:
        with self._changed:
            if self.served.pop(served.ask.move, None) is not None:
                self.waiting_bytes -= served.nbytes
            self._changed.notify_all()

    @hold_signals
    def _end(self) -> None:
        """End all agents; nothing is touched any more."""
        for each in self.ends:
            each.close()
        with self._changed:
            self._stopped = True
            self.served.clear()
            self.waiting_bytes = 0
            self._changed.notify_all()


def _unchanged(served: _Served) -> bool:
    """Return True while every guard shows its generation, and the memory was not taken back."""
    return not served.cancelled and all(load_generation(at) == generation for at, generation in served.grant.guards)
