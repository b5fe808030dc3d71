"""The transport nixl: UCX moves the bytes, over RDMA if both sides have it; requests use the control channel.

The owner of the memory checks its guards before the first byte and after the last, as with tcp. Each side of a link has
agents of its own (:mod:`.agent`): a transfer that is given up ends its agent, and so every late byte.

When the link begins, one side tells the other its receiver (Meet). Then the initiator asks, the owner answers:

    pull over TCP          Ask(receiver of the initiator)  ->  Moved
    push; pull over RDMA   Ask  ->  Ready(receiver of the owner), then Done  ->  Moved
    any                    NixlRefused, with a status
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias
from weakref import WeakSet

import msgspec
import numpy as np

from llm_datadist._checks import HERE, clean
from llm_datadist._log import logger
from llm_datadist._native import (
    MAX_REQUEST_RUNS,
    Ending,
    Outcome,
    Plan,
    await_work,
    check_plan,
    encode_request,
    load_generation,
)
from llm_datadist._native.lane_engine import CHANGED, LOST, TORN
from llm_datadist._native.plan import PlanSide, split_plan
from llm_datadist._native.public_call import elsewhere, public_call
from llm_datadist._transport.choose import Verdict
from llm_datadist._transport.connection import Capabilities, Connection, ServedConnection, Transfer, Usage
from llm_datadist._transport.moves import MoveReply, answer, is_one_request, refusal, status_of
from llm_datadist._transport.nixl.agent import (
    HOST,
    NOT_INSTALLED,
    Address,
    Agent,
    BytesDone,
    NixlFailed,
    fabric,
    keep_for_ever,
    spans_of,
    ucx_transports,
    usable,
    why_no_gpu,
)
from llm_datadist._transport.transport import Context, Meeting, Transport
from llm_datadist._transport.users import why_other_user
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
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from llm_datadist._memory.exports import RegionDescriptor
    from llm_datadist.config import Options

#: Bytes of one request; the owner serves requests in order.
_PART_BYTES: Final = 128 << 20
#: After the last request a receiver of pushes polls without sleep for so long, then sleeps so long at a time.
_BUSY_SECONDS: Final = 0.5
_LAZY_SECONDS: Final = 0.001
_POLLS: Final = 16  # between two checks for a request
#: Limit on waiting requests of one peer. An honest peer has a few of 1 MiB for each thread.
_MAX_WAITING_BYTES: Final = 64 << 20
_REQUEST_BYTES: Final = 2048  # memory of a request beside its bytes
_UNKNOWN_RECEIVER: Final = 100  # status: the owner's sender needs the receiver's metadata
_OVERDUE: Final = 101  # status: the time was over at the owner first
#: Status: another transfer ended the owner's receiver; the initiator asks again.
_AGAIN: Final = 102
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Known = Annotated[str, msgspec.Meta(max_length=64)]


class Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """Initiator -> owner: move this; ``meta`` is a request as over a data lane.

    If ``direct``, the initiator moves the bytes after Ready. Else ``receiver`` is its own, with tensors at ``bases``
    and runs at ``offsets`` (uint64, little-endian). The ordinal of the GPU in which they lie, if any, follows the
    bases. ``loaded``: the owner's receiver that its sender knows.
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
    """Initiator -> owner: the bytes have moved, or (not ``good``) the move is given up."""

    move: _Number
    good: bool


class Meet(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """One side -> the other, when the link begins: the address of a receiver. Has no answer."""

    receiver: Address


class Ready(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """Owner -> initiator: the memory; ``bases`` and ``offsets`` as in :class:`Ask`."""

    move: _Number
    receiver: Address
    bases: bytes
    offsets: bytes


class Moved(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """Owner -> initiator: all bytes have moved; ``loaded``: the receiver that the owner's sender knows now."""

    loaded: _Known


class NixlRefused(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """Owner -> initiator: no, with a status; ``touched``: bytes may have moved."""

    code: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    text: Annotated[str, msgspec.Meta(max_length=4096)]
    touched: bool


_Answer: TypeAlias = Ready | Moved | NixlRefused
_encode: Final = msgspec.msgpack.Encoder().encode
_ask_decoder: Final = msgspec.msgpack.Decoder(Ask | Done | Meet)
_decode_answer: Callable[[bytes], _Answer] = msgspec.msgpack.Decoder(_Answer).decode


_NOT_ASKED: Final = (
    "this side does not ask for it, and over TCP, or without credentials, no peer may choose it: set "
    "llm.Transport=nixl on both sides"
)
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
        over = _common(mine, theirs)
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
        over, writable = _common(self.fabric, self._theirs(meeting)), meeting.exports.writable
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
                for end in each.server.ends:
                    end.forget(private.tolist())

    def close(self) -> None:
        connections = self._living()
        for each in connections:
            each.abort()
        for each in connections:
            each.server.join()

    def _living(self) -> list[NixlConnection]:
        with self._lock:
            return list(self._connections)


def _common(mine: str, theirs: str) -> str:
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


class AgentSlot:
    """Holder of one agent of a link, made at first use, and again after its end; ``users``: transfers into a receiver.

    Threads: any; one at a time is inside :meth:`using`.
    """

    def __init__(self, context: Context, fabric: str, *, progress: bool) -> None:
        regions = context.exports.regions.values()
        pools = [(segment.address, segment.nbytes, segment.place.device) for segment in regions]
        self._make = partial(Agent, fabric, progress=progress, pools=pools)
        self._lock = threading.RLock()  # held while the agent is used, and for changes below but `_retired = True`
        self.agent: Agent | None = None
        self._closed = False
        self._retired = False
        self.users = 0

    @contextmanager
    def using(self, turn: Callable[[], float]) -> Iterator[Agent]:
        """Lend the agent. While another thread has it, ``turn`` returns the seconds to wait next, or raises.

        Raises NixlFailed if the link has ended.
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
            self._end_if_free()

    def expose(self, turn: Callable[[], float], end: PlanSide, known: str) -> tuple[Address, bytes, bytes]:
        """Register memory for the peer, and count one user until :meth:`leave`.

        Return address, bases and offsets as in :class:`Ask`; ``known``: the receiver that the peer's sender knows.
        """
        (bases, offsets), device = _runs_of(end), end.tensors.place.device
        with self.using(turn) as agent:
            agent.cover(bases, end.tensors.extent, device)
            address = agent.address(known)
            self.users += 1
        if device != HOST:
            bases = np.append(bases, np.uint64(device))
        return address, bases.astype("<u8").tobytes(), offsets.astype("<u8").tobytes()

    def move(self, turn: Callable[[], float], end: PlanSide, there: Ask | Ready, progress: BytesDone) -> str:
        """Write a source of this side to the peer's receiver, or read a destination from it.

        Return how the agent knows that receiver now; empty, and nothing moved, if it needs the metadata. An error
        during the move ends the agent, so that nothing touches the memory.
        """
        (bases, offsets), nbytes = _runs_of(end), end.plan.runs[:, 2]
        device = there.bases[8 * len(bases) :]
        theirs = (
            _numbers(there.bases[: 8 * len(bases)], len(bases), "bases"),
            _numbers(there.offsets, len(offsets), "offsets"),
        )
        devices = end.tensors.place.device, int(_numbers(device, 1, "a GPU")[0]) if device else HOST
        assert there.receiver is not None, "the server has checked it"
        verb = "READ" if end.is_dst else "WRITE"
        with self.using(turn) as agent:
            try:
                if not agent.load(there.receiver):
                    return ""
                agent.cover(bases, end.tensors.extent, devices[0])
                spans = spans_of(bases, offsets, nbytes, devices[0]), spans_of(*theirs, nbytes, devices[1])
                agent.move(verb, there.receiver.name, *spans, turn, progress, devices)
            except BaseException:
                self.end()
                raise
        return there.receiver.known_as

    def leave(self, name: str, *, end: bool) -> None:
        """Count one user less. With ``end``, end the agent of that name; then no byte passes through it."""
        with self._lock:
            if end and self.is_agent(name):
                self.end()
            self.users -= 1
        self._end_if_free()

    def is_agent(self, name: str) -> bool:
        agent = self.agent
        return agent is not None and agent.name == name

    def end(self) -> None:
        with self._lock:
            agent, self.agent, self._retired = self.agent, None, False
            if agent is not None:
                agent.end()

    def forget(self, bases: list[int]) -> None:
        """End the agent if it has registered one of these tensors, once no transfer uses it. Never waits."""
        agent = self.agent
        if agent is None or not agent.covers_any(bases):
            return
        self._retired = True
        self._end_if_free()

    def close(self) -> None:
        """End the agent, and let no other be made."""
        with self._lock:
            self._closed = True
            self.end()

    def _end_if_free(self) -> None:
        """End a retired agent without waiting: who has the lock calls this after its release."""
        while self._retired and not self.users and self._lock.acquire(blocking=False):
            try:
                self._end_retired()
            finally:
                self._lock.release()

    def _end_retired(self) -> None:
        if self._retired and not self.users:
            self.end()


class NixlConnection(ServedConnection):
    """Connection whose bytes NIXL moves over ``fabric``, see :func:`.agent.fabric`.

    Owns: its agents, and ``fallback``, which moves every transfer from the one on in which NIXL failed.
    """

    capabilities = _CAPABILITIES

    def __init__(
        self,
        context: Context,
        fabric: str,
        regions: Iterable[RegionDescriptor] = (),
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
        self.sender, self.receiver, self.pushed = self.server.ends
        self._known = ""  # receiver here that the peer's sender knows
        self._pushed_to = ""  # name of the peer's receiver of pushes
        self._failed = ""  # reason of the fallback
        self._moves = iter(range(1, 2**63))
        super().__init__(regions, writable=writable)

    def begin(self, link: object) -> None:
        # The dialer usually pulls.
        first = self.pushed if self.reads else self.receiver
        self.server.begin(link, first if self._dialled != self.reads else None)
        if self.fallback is not None:
            self.fallback.begin(link)

    def usage(self) -> Usage:
        remark = f"; by tcp, because NIXL failed: {self._failed}" if self._failed else ""
        agents = self.sender.agent, self.receiver.agent
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
        local, remote = transfer.local, transfer.remote
        check_plan(transfer.plan, *((remote, local) if transfer.write else (local, remote)))
        if local.place.device >= 0 and not await_work(transfer.deadline.expires_ns, transfer.deadline.cancelled):
            raise transfer.timeout(0)
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
        self._progress = BytesDone()

    def run(self) -> None:
        """Move every part. Once this returns or raises, nothing touches local memory."""
        plan, done = self._transfer.plan, 0
        move = self._move_directly if self._transfer.write or self._connection.reads else self._have_moved
        parts = (plan,) if is_one_request(plan) else split_plan(plan, _PART_BYTES, MAX_REQUEST_RUNS // 2)
        for part in parts:
            for each in _in_order(part):
                while not move(each):  # other transfers may end an agent again
                    self._progress.done = done
                done += each.nbytes
                self._progress.done = done

    def _have_moved(self, part: Plan) -> bool:
        """Have the owner write a part into this side's receiver; return False to ask again."""
        connection, receiver = self._connection, self._connection.receiver
        where = receiver.expose(self._turn, PlanSide(part, self._transfer.local, True), connection._known)
        address = where[0]
        answer: _Answer | None = None
        try:
            answer = self._ask(self._request(part, *where))
        finally:
            ended = not receiver.is_agent(address.name)  # by another transfer
            over = isinstance(answer, Moved) or (isinstance(answer, NixlRefused) and not answer.touched)
            receiver.leave(address.name, end=not over)  # bytes may still come
        connection._known = answer.loaded if isinstance(answer, Moved) else ""
        if isinstance(answer, Moved):
            return True
        return self._refuse(answer, {LOST: ended, _UNKNOWN_RECEIVER: not address.metadata})

    def _move_directly(self, part: Plan) -> bool:
        """Move a part by this side's sender, once the owner is ready; return False to ask again.

        That is after another transfer has ended an agent of either side.
        """
        connection = self._connection
        ready = self._ask(self._request(part))
        if not isinstance(ready, Ready):
            return self._refuse(ready, {})
        connection._pushed_to = ready.receiver.name
        moved = ""
        failed: NixlFailed | None = None
        try:
            try:
                end = PlanSide(part, self._transfer.local, not self._transfer.write)
                moved = connection.sender.move(self._turn, end, ready, self._progress)
            except NixlFailed as error:
                failed = error  # the owner knows whether its receiver has ended
            done = self._ask(Done(ready.move, good=bool(moved)))
        except BaseException:
            connection.context.wire.tell(connection.server.link, _encode(Done(ready.move, good=False)))
            raise
        if isinstance(done, Moved) and moved:
            return True
        if failed is not None and isinstance(done, NixlRefused) and done.code == LOST:
            raise failed
        return self._refuse(done, {_AGAIN: True, LOST: not moved})

    def _turn(self) -> float:
        """Return the seconds to wait next; raise if this transfer shall stop."""
        seconds = self._transfer.deadline.next_turn()
        if not seconds or self._connection._aborted:
            raise self._transfer.timeout(self._progress.done)
        return seconds

    def _request(self, part: Plan, receiver: Address | None = None, bases: bytes = b"", offsets: bytes = b"") -> Ask:
        connection, remote, write = self._connection, self._transfer.remote, self._transfer.write
        number, meta = next(connection._moves), encode_request(remote.handle, remote.extent, part, write)
        sender, budget_ms = connection.sender.agent, self._transfer.deadline.remaining_ms()
        loaded = "" if sender is None else sender.loaded.get(connection._pushed_to, "")
        return Ask(number, write, receiver is None, meta, receiver, bases, offsets, loaded, budget_ms)

    def _ask(self, request: Ask | Done) -> _Answer:
        connection = self._connection
        self._turn()
        try:
            answer = connection.context.wire.ask(connection.server.link, _encode(request), self._transfer.deadline)
        except DeadlineExceeded as error:
            raise self._transfer.timeout(self._progress.done) from error
        return _answer_of(answer)

    def _refuse(self, answer: _Answer, again: dict[int, bool]) -> Literal[False]:
        """Raise the exception for a part that did not move; return False for a status marked in ``again``."""
        if not isinstance(answer, NixlRefused):
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
    """Return tensor addresses and run offsets of one side of a plan."""
    first, column = (end.plan.dst_first, 0) if end.is_dst else (end.plan.src_first, 1)
    return end.tensors.bases[first : first + end.plan.count], end.plan.runs[:, column]


def _in_order(part: Plan) -> Iterator[Plan]:
    """Yield an ordered plan run by run, because NIXL moves the runs of one transfer in any order."""
    if not part.ordered:
        yield part
        return
    for run in part.runs:
        yield part.replace(runs=run[None, :].copy(), nbytes=int(run[2]) * part.count)


def _numbers(data: bytes, count: int, what: str) -> NDArray[np.uint64]:
    if len(data) != 8 * count:
        raise ProtocolError(f"nixl: {len(data)} bytes of {what}, {count} numbers are needed")
    return np.frombuffer(data, "<u8").astype(np.uint64)


def _answer_of(data: bytes) -> _Answer:
    try:
        return _decode_answer(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"nixl: the peer sent no answer: {clean(str(error))}") from error


@dataclass(slots=True, eq=False)
class _Served:
    plan: Plan
    memory: MoveReply
    ask: Ask
    reply: Callable[[bytes], None]
    until: float  # monotonic
    begun: bool = False  # until it is forgotten, its memory may be touched
    cancelled: bool = False  # by any thread
    receiver: str = ""  # name of the agent that the peer uses
    nbytes: int = 0  # of waiting_bytes until it is forgotten


class NixlWorker:
    """Server of one connection's peer: the control thread checks requests, its own thread serves them in order.

    While that thread waits, it drops ended requests and lets pushed bytes in. The memory of a request in ``served``
    that has begun may be touched: :meth:`quiesce` cancels it and waits for its end.
    Owns: the thread, from the first job on, and the agents in ``ends``.
    """

    def __init__(self, context: Context, fabric: str, *, reads: bool, writable: bool) -> None:
        self.link: object = None
        self.reads = reads  # the peer may read
        self._writable = writable  # the peer may push; else no receiver of pushes is made
        self._context = context
        self._sender = AgentSlot(context, fabric, progress=False)
        self._pushed = AgentSlot(context, fabric, progress=False)  # receiver of pushes; this thread makes its progress
        self.ends = self._sender, AgentSlot(context, fabric, progress=True), self._pushed  # in between that of pulls
        self._queue: SimpleQueue[tuple[Callable[[], None], int] | None] = SimpleQueue()  # jobs, bytes until they begin
        self._held: dict[int, _Served] = {}  # in use by the peer; for the thread only
        self._overdue: deque[int] = deque(maxlen=64)  # last moves dropped at their time limit; for the thread only
        self._changed = threading.Condition(threading.Lock())  # protects all below
        self.served: dict[int, _Served] = {}
        self.waiting_bytes = 0  # of requests without an answer yet
        self._thread: threading.Thread | None = None
        self._stopped = False

    def begin(self, link: object, first: AgentSlot | None) -> None:
        """Have the thread tell the peer the receiver to be used ``first``, unless that is the peer's."""
        self.link = link
        if first is not None:
            self._put(partial(self._meet, first))

    # On the control thread

    def on_request(self, data: bytes, reply: Callable[[bytes], None]) -> None:
        try:
            request = _ask_decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"nixl: a request that is none: {clean(str(error))}") from error
        nbytes = len(data) + _REQUEST_BYTES
        full = self.waiting_bytes + nbytes > _MAX_WAITING_BYTES  # only this thread adds
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
            served = self.accept(request, reply)
        except ProtocolError:
            raise
        except LLMException as error:
            reply(_encode(NixlRefused(*status_of(error), touched=False)))
            return
        served.nbytes = nbytes
        self._put(partial(self._serve, served), served=served)

    def on_late_answer(self, data: bytes) -> bytes | None:
        ready = _answer_of(data)
        return _encode(Done(ready.move, good=False)) if isinstance(ready, Ready) else None

    def accept(self, ask: Ask, reply: Callable[[bytes], None]) -> _Served:
        """Return a request with the memory that it may use. Raises LLMException to refuse it."""
        if ask.direct is (ask.receiver is not None) or (ask.write and not ask.direct):
            raise ProtocolError("nixl: a request that names a receiver has it written to, one that pushes is direct")
        if ask.direct and not ask.write and not self.reads:
            raise ProtocolError("nixl: a peer reads over RDMA only, and with remote cache access only")
        if ask.write and not self._writable:
            raise LLMException(
                "pushes over nixl need remote cache access at the owner (LLMConfig.enable_remote_cache_accessible)",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        move = answer(self._context.owner, self.link, ask.meta, write=ask.write)
        return _Served(move.plan, move.reply, ask, reply, time.monotonic() + ask.budget_ms / 1e3)

    def _put(self, job: Callable[[], None], nbytes: int = 0, served: _Served | None = None) -> None:
        """Have the thread do a job, unless the link has ended: nobody waits for an answer then."""
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

    # On any thread

    def quiesce(self, tag: int) -> None:
        """Cancel requests for memory under ``tag``; wait for those begun, which end at the thread's next wait."""
        with self._changed:
            found = [each for each in self.served.values() if each.memory.tag == tag]
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
        """Have the thread end all agents and itself; without a thread, end them here. Never waits."""
        with self._changed:
            self._stopped = True
            thread = self._thread
        self._queue.put(None)
        if thread is None:
            self._end()

    def join(self) -> None:
        if self._thread is threading.current_thread():  # a finalizer, between two jobs
            self._end()
        elif self._thread is not None:
            self._thread.join()

    # The thread

    def _run(self) -> None:
        asked = 0.0  # time of the last request
        try:
            while not self._stopped:
                timeout = None
                if self._held:
                    # With a thread of UCX that sleeps between messages, pushes would take a third longer.
                    self._let_in()
                    timeout = _LAZY_SECONDS if time.monotonic() > asked + _BUSY_SECONDS else 0
                item = None
                with suppress(Empty):
                    item = self._queue.get(timeout=timeout)
                    asked = time.monotonic()
                self._handle(item)
        finally:
            self._end()  # also after MemoryError: else quiesce would wait for ever

    @public_call
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

    @public_call
    def _let_in(self) -> None:
        with suppress(NixlFailed), self._pushed.using(lambda: _LAZY_SECONDS) as agent:
            for _ in range(_POLLS):
                agent.receive()

    def _meet(self, item: Meet | AgentSlot) -> None:
        """Tell the peer a receiver here, or load its receiver. The first transfer tries again after a failure."""
        try:
            if isinstance(item, Meet):
                with self._sender.using(self._turn) as agent:
                    agent.load(item.receiver)
                return
            with item.using(self._turn) as agent:
                receiver = agent.address("")
            self._context.wire.tell(self.link, _encode(Meet(receiver)))
        except (NixlFailed, LLMException) as error:
            logger.info("nixl: the agents of %s are not connected yet: %s", self.link, error)

    def _serve(self, served: _Served) -> None:
        with self._changed:
            served.begun = True  # from now on quiesce() waits for it
        try:
            if not _unchanged(served):
                self._refuse(served, CHANGED, "a guard has changed", touched=False)
            elif served.ask.direct:
                self._hold(served)
            else:
                self._write(served)
        except (NixlFailed, LLMException) as error:  # of NIXL, unless one of these reasons holds
            code, text = LOST, clean(str(error), 4000)
            if served.cancelled:
                code, text = CHANGED, "the memory was taken back"
            elif time.monotonic() >= served.until:
                code, text = _OVERDUE, "its time was over"
            self._refuse(served, code, text, touched=True)
        except Exception:
            self._refuse(served, int(LLMStatusCode.LLM_FAILED), "the target failed; see its log", touched=True)
            raise

    def _write(self, served: _Served) -> None:
        end = PlanSide(served.plan, served.memory.tensors, False)
        loaded = self._sender.move(partial(self._turn, served), end, served.ask, BytesDone())
        if not loaded:
            self._refuse(served, _UNKNOWN_RECEIVER, "the metadata of the receiver are not known", touched=False)
        elif _unchanged(served):
            self._answer(served, Moved(loaded))
        else:
            self._refuse(served, CHANGED, "a guard changed during the transfer", touched=True)

    def _hold(self, served: _Served) -> None:
        """Grant the memory to the peer, and hold it until the peer is done."""
        ask, end = served.ask, PlanSide(served.plan, served.memory.tensors, served.ask.write)
        where = self._pushed.expose(partial(self._turn, served), end, ask.loaded)
        served.receiver = where[0].name
        self._held[ask.move] = served
        served.reply(_encode(Ready(ask.move, *where)))

    def _finish(self, done: Done, reply: Callable[[bytes], None]) -> None:
        if (served := self._held.pop(done.move, None)) is None:
            late = done.move in self._overdue
            code, text = (_OVERDUE, "its time was over") if late else (TORN, "the memory was taken back")
            reply(_encode(NixlRefused(code, text, touched=True)))
            return
        served.reply = reply
        # A dropped move ends its receiver, and so all moves into that.
        ended = not self._pushed.is_agent(served.receiver)
        self._pushed.leave(served.receiver, end=not done.good)
        if ended:
            self._refuse(served, _AGAIN, "the receiver has ended", touched=True)
        elif not done.good:
            self._refuse(served, LOST, "given up", touched=True)
        elif _unchanged(served):
            self._answer(served, Moved(""))
        else:
            self._refuse(served, TORN, "a guard changed during the transfer", touched=True)

    def _drop_ended(self) -> None:
        """Stop the peer's use of memory whose time is over, or which was taken back."""
        for served in [each for each in self._held.values() if self._gone(each)]:
            del self._held[served.ask.move]
            if not served.cancelled:
                self._overdue.append(served.ask.move)
            self._pushed.leave(served.receiver, end=True)
            self._forget(served)

    def _turn(self, served: _Served | None = None) -> float:
        """Do what cannot wait; return the seconds to wait next. Raises NixlFailed if this shall stop."""
        self._drop_ended()
        if self._held:
            self._let_in()  # else two sides might wait for each other
        if self._stopped if served is None else self._gone(served):
            raise NixlFailed("the time was over, or the memory was taken back")
        return _LAZY_SECONDS if self._held else 0.05

    def _gone(self, served: _Served) -> bool:
        return served.cancelled or self._stopped or time.monotonic() >= served.until

    def _answer(self, served: _Served, answer: Moved | NixlRefused) -> None:
        self._forget(served)  # first: with the answer, the peer may unregister
        served.reply(_encode(answer))

    def _refuse(self, served: _Served, code: int, text: str, *, touched: bool) -> None:
        self._answer(served, NixlRefused(code, text, touched))

    def _forget(self, served: _Served) -> None:
        with self._changed:
            if self.served.pop(served.ask.move, None) is not None:
                self.waiting_bytes -= served.nbytes
            self._changed.notify_all()

    @public_call
    def _end(self) -> None:
        for each in self.ends:
            each.close()
        with self._changed:
            self._stopped = True
            self.served.clear()
            self.waiting_bytes = 0
            self._changed.notify_all()


def _unchanged(served: _Served) -> bool:
    return not served.cancelled and all(load_generation(at) == generation for at, generation in served.memory.guards)
