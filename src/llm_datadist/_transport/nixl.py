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
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, Protocol
from weakref import WeakSet

import msgspec
import numpy as np

from llm_datadist._log import logger
from llm_datadist._memory.exports import ADDRESS_SPACE, PRIVATE, RegionDescriptor
from llm_datadist._native import Ending, Outcome, Plan, check_plan, encode_request, load_generation
from llm_datadist._native.lanes import CHANGED, LOST, TORN
from llm_datadist._native.signals import hold_signals
from llm_datadist._transport.connection import Capabilities, Connection, Transfer, Window
from llm_datadist._transport.lanes import MAX_RUNS, LaneGrant, LaneHandler, decode_request
from llm_datadist._transport.nixl_agent import Address, Agent, NixlFailed, Progress, keep_for_ever, spans_of
from llm_datadist._transport.tcp import is_one_job, refusal, split_plan
from llm_datadist.errors import (
    DeadlineExceeded,
    LinkError,
    LLMException,
    LLMStatusCode,
    ParamError,
    PeerLost,
    ProtocolError,
    TransferAborted,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from llm_datadist._deadline import Deadline
    from llm_datadist._transport.tcp import TcpConnection

_ELSEWHERE: Final = 1 << 62
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
_answer_decoder: Final = msgspec.msgpack.Decoder(Granted | Moved | Refused)


class Wire(Protocol):
    """Carries requests to the peer of a link, and its answers. Threads: any."""

    def ask(self, link: Any, data: bytes, deadline: Deadline) -> bytes:  # noqa: ANN401 (a link, opaque here)
        """Send a request and return its answer. Raises DeadlineExceeded, or LinkError where the link is lost."""
        ...

    def tell(self, link: Any, data: bytes) -> None:  # noqa: ANN401
        """Send a request whose answer is not waited for; nothing happens where the link has ended."""


class Nixl:
    """What the links of one LLMDataDist that use NIXL share. Owns nothing but the list of their connections.

    ``pools``: spans (address, bytes) that every agent registers at once. ``fallback``: links that this end dials have
    data lanes too, for the time when NIXL has failed.
    """

    def __init__(
        self, wire: Wire, handler: LaneHandler, pools: Sequence[tuple[int, int]], *, fallback: bool = False
    ) -> None:
        self.wire = wire
        self.handler = handler
        self.pools = pools
        self.fallback = fallback
        self._lock = threading.Lock()
        self._connections: WeakSet[NixlConnection] = WeakSet()

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
                each.sender.forget(private.tolist())
                each.receiver.forget(private.tolist())
                each.server.forget(private.tolist())

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
        self._nixl = nixl
        self._fabric = fabric
        self._progress = progress
        self._lock = threading.RLock()  # protects all below; held while the agent is used
        self._agent: Agent | None = None
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
            if self._retired and not self.users:
                self._end()
            if self._agent is None:
                self._agent = Agent(self._fabric, progress=self._progress, pools=self._nixl.pools)
            yield self._agent
        finally:
            self._lock.release()

    def leave(self) -> None:
        """Count one user less, of a transfer whose bytes do not come any more."""
        with self._lock:
            self.users -= 1
            if self._retired and not self.users:
                self._end()

    def loaded(self, name: str) -> str:
        """Return how this agent knows a receiver of the peer; empty if it does not."""
        agent = self._agent
        return "" if agent is None else agent.loaded.get(name, "")

    def is_agent(self, name: str) -> bool:
        """Return True until the agent of this name has ended."""
        agent = self._agent
        return agent is not None and agent.name == name

    def end(self, name: str | None = None) -> None:
        """End the agent, or only that of this name: no byte comes or goes through it any more."""
        with self._lock:
            if self._agent is not None and name in (None, self._agent.name):
                self._end()

    def forget(self, bases: list[int]) -> None:
        """Register these tensors no longer: the agent ends when no transfer uses it."""
        agent = self._agent
        if agent is None or not agent.covers_any(bases):
            return
        self._retired = True
        if self._lock.acquire(blocking=False):
            try:
                if self._retired and not self.users:
                    self._end()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the agent, and make no other."""
        with self._lock:
            self._closed = True
            self._end()

    def cpu_seconds(self) -> float:
        agent = self._agent
        return 0.0 if agent is None else agent.cpu_seconds()

    def _end(self) -> None:
        agent, self._agent, self._retired = self._agent, None, False
        if agent is not None:
            agent.end()


class NixlConnection(Connection):
    """A connection whose bytes are moved by NIXL. Made by :class:`ConnectionBuilder`.

    ``fabric`` is what UCX uses, see :func:`.nixl_agent.fabric`. ``dialled``: this end made the link. ``fallback`` is
    used for every transfer from the one on that NIXL failed, where there is one; the connection owns it.
    """

    capabilities = Capabilities("nixl", shared_regions=True, private_memory=True, remote_guards=True)

    def __init__(
        self,
        nixl: Nixl,
        fabric: str,
        regions: Iterable[RegionDescriptor] = (),
        *,
        writable: bool,
        dialled: bool = False,
        fallback: TcpConnection | None = None,
    ) -> None:
        self.nixl = nixl
        self.fallback = fallback
        self._dialled = dialled
        # A pull is a READ of this end. UCX only emulates it over tcp, and what can be read can be written.
        self.reads = fabric == "rdma" and writable
        self.sender = _End(nixl, fabric, progress=False)
        self.receiver = _End(nixl, fabric, progress=True)  # of what is pulled
        self._pushed = _End(nixl, fabric, progress=False)  # the receiver of what is pushed
        self.server = Server(nixl, self.sender, self.receiver, self._pushed, reads=self.reads, writable=writable)
        self._windows = {each.region: Window(_ELSEWHERE, each.nbytes, each.writable) for each in regions}
        self._windows[PRIVATE] = Window(_ELSEWHERE, ADDRESS_SPACE, writable)
        self._known = ""  # the receiver of this end that the peer's sender knows
        self._pushed_to = ""  # the name of the peer's receiver of what is pushed
        self._failed = ""  # why NIXL is not used any more
        self._numbers = iter(range(1, 2**63))
        super().__init__()
        nixl.add(self)

    @property
    def link(self) -> object:
        return self.server.link

    def begin(self, link: object) -> None:
        # The end that dials is the one that pulls, as a rule. What the other direction needs is made when it is needed.
        first = self._pushed if self.reads else self.receiver
        self.server.begin(link, first if self._dialled != self.reads else None)
        if self.fallback is not None:
            self.fallback.begin(link)

    @property
    def remark(self) -> str:
        """What became of NIXL on this link, for people; empty while it is used."""
        return f"; by tcp, because NIXL failed: {self._failed}" if self._failed else ""

    def progress_seconds(self) -> float:
        """Return the CPU time of UCX's threads of this link, in seconds."""
        return self.sender.cpu_seconds() + self.receiver.cpu_seconds()

    @property
    def suspects_lanes(self) -> bool:
        return self.fallback is not None and self.fallback.suspects_lanes

    def drop_suspects(self, *, peer_lives: bool) -> int:
        return 0 if self.fallback is None else self.fallback.drop_suspects(peer_lives=peer_lives)

    def drop_lanes(self) -> None:
        if self.fallback is not None:
            self.fallback.drop_lanes()

    def reconnect_lanes(self, deadline: Deadline) -> None:
        if self.fallback is not None:
            self.fallback.reconnect_lanes(deadline)

    def abort(self) -> None:
        super().abort()
        if self.fallback is not None:
            self.fallback.abort()

    def _window(self, region: int) -> Window | None:
        return self._windows.get(region)

    def _guards(self) -> Window:
        raise LinkError("nixl maps no guards, the peer checks them by itself (remote_guards)")

    def _release(self) -> None:
        if self._forked:  # the agents' threads are the parent's
            keep_for_ever(self.sender, self.receiver, self.server)
        else:
            self.server.stop()
        if self.fallback is not None:
            self.fallback.close()

    def _move(self, transfer: Transfer) -> None:
        local, remote = transfer.local, transfer.remote
        check_plan(transfer.plan, *((remote, local) if transfer.write else (local, remote)))
        if self._failed and self.fallback is not None:
            self.fallback._move(transfer)
            return
        try:
            _NixlTransfer(self, transfer).run()
        except NixlFailed as error:
            self._fall_back(transfer, error)
        except LinkError as error:
            if self._aborted:
                raise TransferAborted(f"{transfer.what}: the nixl connection was aborted", phase="copy") from error
            raise

    def _fall_back(self, transfer: Transfer, error: NixlFailed) -> None:
        if self._aborted:
            raise TransferAborted(f"{transfer.what}: the nixl connection was aborted", phase="copy") from error
        logger.warning("%s: NIXL: %s%s", self.link, error, "" if self.fallback is None else "; tcp from now on")
        if self.fallback is None:
            # The caller, which knows the link, finds out whether the peer is lost.
            text = f"{transfer.what}: NIXL: {error}; the addressed bytes are undefined"
            raise PeerLost(text, phase="copy") from error
        self._failed = str(error)
        self.fallback._move(transfer)

    def next_move(self) -> int:
        return next(self._numbers)

    def stopped(self, deadline: Deadline) -> bool:
        """Return True when a transfer of this connection is to stop; handlers of signals run."""
        deadline.next_turn()
        return time.monotonic_ns() >= deadline.expires_ns or self._aborted


class _NixlTransfer:
    """One transfer of a connection, in parts of one request each. Used by the calling thread."""

    def __init__(self, connection: NixlConnection, transfer: Transfer) -> None:
        self._connection = connection
        self._transfer = transfer
        self._deadline = transfer.deadline
        self._done = 0  # bytes of parts that are over

    def run(self) -> None:
        """Move every part. When this returns or raises, local memory is the caller's again."""
        plan = self._transfer.plan
        direct = self._transfer.write or self._connection.reads
        parts = (plan,) if is_one_job(plan) else split_plan(plan, _PART_BYTES, MAX_RUNS // 2)
        for part in parts:
            for each in _in_order(part):
                while not (self._move_directly if direct else self._have_moved)(each):
                    pass  # until the deadline: the parts of other transfers may end an agent again
                self._done += each.nbytes

    def _have_moved(self, part: Plan) -> bool:
        """Have the owner write a part into this end's receiver; return False if another transfer has ended that."""
        connection, receiver, local = self._connection, self._connection.receiver, self._transfer.local
        bases = local.bases[part.dst_first : part.dst_first + part.count]
        with receiver.using(self._turn) as agent:
            agent.cover(bases, local.extent)
            address = agent.address(connection._known)
            receiver.users += 1
        quiet = ended = False  # nothing comes any more; the receiver has ended
        try:
            while True:
                offsets = part.runs[:, 0].astype("<u8").tobytes()
                ask = self._request(part, address, bases.astype("<u8").tobytes(), offsets)
                answer = self._ask(ask)
                if isinstance(answer, Refused) and answer.code == _UNKNOWN_RECEIVER and not address.metadata:
                    with receiver.using(self._turn) as agent:
                        address = agent.address("")
                    continue
                quiet = isinstance(answer, Moved) or (isinstance(answer, Refused) and not answer.touched)
                break
        finally:
            ended = not receiver.is_agent(address.name)
            if not quiet:
                receiver.end(address.name)
            receiver.leave()
        if isinstance(answer, Moved):
            connection._known = answer.loaded
            return True
        if ended and isinstance(answer, Refused) and answer.code == LOST:
            return False
        return self._refuse(answer)

    def _move_directly(self, part: Plan) -> bool:
        """Move a part by this end's sender, once the owner has told where the other end of it is.

        Return False if the owner has ended its receiver for the sake of another transfer.
        """
        sender, write = self._connection.sender, self._transfer.write
        answer = self._ask(self._request(part, None, b"", b""))
        if not isinstance(answer, Granted):
            self._refuse(answer)
        moved, failed = False, None
        try:
            with sender.using(self._turn) as agent:
                try:
                    self._drive(agent, part, answer, "WRITE" if write else "READ")
                    moved = True
                finally:
                    if not moved:
                        sender.end()
        except NixlFailed as error:
            failed = error  # the owner knows whether it has ended the receiver
        finally:
            if not moved and failed is None:
                self._tell(Done(answer.move, good=False))
        done = self._ask(Done(answer.move, good=moved))
        if isinstance(done, Moved):
            return True
        if isinstance(done, Refused) and done.code == _AGAIN:
            return False
        if failed is not None and isinstance(done, Refused) and done.code == LOST:
            raise failed
        return self._refuse(done)

    def _drive(self, agent: Agent, part: Plan, granted: Granted, verb: str) -> None:
        local, write = self._transfer.local, self._transfer.write
        first, column = (part.src_first, 1) if write else (part.dst_first, 0)
        bases = local.bases[first : first + part.count]
        there = _numbers(granted.bases, part.count, "bases"), _numbers(granted.offsets, len(part.runs), "offsets")
        agent.cover(bases, local.extent)
        self._connection._pushed_to = granted.receiver.name
        if not agent.load(granted.receiver):
            raise NixlFailed("the peer has left out the metadata of a receiver that this end does not know")
        nbytes, done = part.runs[:, 2], Progress()
        mine, theirs = spans_of(bases, part.runs[:, column], nbytes), spans_of(*there, nbytes)
        if not agent.move(
            verb, granted.receiver.name, mine, theirs, lambda: self._connection.stopped(self._deadline), done
        ):
            self._give_up(done.done)

    def _turn(self) -> float:
        if self._connection.stopped(self._deadline):
            self._give_up(0)
        return self._deadline.next_turn()

    def _request(self, part: Plan, receiver: Address | None, bases: bytes, offsets: bytes) -> Ask:
        remote, write = self._transfer.remote, self._transfer.write
        return Ask(
            self._connection.next_move(),
            write,
            receiver is None,
            encode_request(remote.handle, remote.extent, part, write),
            receiver,
            bases,
            offsets,
            self._connection.sender.loaded(self._connection._pushed_to),
            self._deadline.remaining_ms(),
        )

    def _ask(self, request: Ask | Done) -> Granted | Moved | Refused:
        connection = self._connection
        if connection.stopped(self._deadline):
            self._give_up(0)
        try:
            return _answer_of(connection.nixl.wire.ask(connection.link, _encode(request), self._deadline))
        except DeadlineExceeded:
            self._give_up(0)

    def _tell(self, request: Done) -> None:
        self._connection.nixl.wire.tell(self._connection.link, _encode(request))

    def _give_up(self, done: int) -> NoReturn:
        if self._connection._aborted:
            raise TransferAborted(f"{self._what()}: the nixl connection was aborted", phase="copy")
        raise self._transfer.timeout(self._done + done)

    def _refuse(self, answer: Granted | Moved | Refused) -> NoReturn:
        """Raise what the answer to a part means that was not moved."""
        if not isinstance(answer, Refused):
            raise ProtocolError(f"{self._what()}: the peer answered with {type(answer).__name__}")
        if answer.code == _OVERDUE:
            raise self._transfer.timeout(self._done)
        if answer.code in (LOST, _UNKNOWN_RECEIVER):
            raise NixlFailed(f"at the peer: {answer.text}")
        touched = answer.touched or self._done > 0
        outcome = Outcome(Ending.REFUSED, TORN if answer.touched else answer.code, 0, answer.text)
        raise refusal(outcome, self._what(), untouched=not touched)

    def _what(self) -> str:
        return self._transfer.progress(self._done)


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
        answer: Granted | Moved | Refused = _answer_decoder.decode(data)
        return answer
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"nixl: the peer sent no answer: {error}") from error


def give_back(answer: bytes) -> bytes | None:
    """Return the request that gives back what an answer, which came too late, has granted; None for nothing."""
    granted = _answer_of(answer)
    return _encode(Done(granted.move, good=False)) if isinstance(granted, Granted) else None


@dataclass(slots=True, eq=False)
class _Served:
    """One request that the owner has granted. Its fields are set by one thread; ``cancelled`` by any."""

    move: int
    plan: Plan
    grant: LaneGrant
    ask: Ask
    reply: Callable[[bytes], None]
    until: float  # monotonic
    cancelled: bool = False
    receiver: str = ""  # name of the agent that the peer writes to
    nbytes: int = 0  # that count as waiting until it is forgotten


@dataclass(frozen=True, slots=True)
class _Told:
    """A request of the peer that asks for no memory, on its way to the thread."""

    request: Done | Meet
    reply: Callable[[bytes], None]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Meeting:
    """What :meth:`Server.begin` has the thread do: tell the peer of this receiver."""

    receiver: _End


class Server:
    """Serves what the peer of one connection asks. Owns one thread, from the first request to the end.

    The control thread checks and grants; the thread moves the bytes of pulls, one after the other, and tells receivers
    to those that push. While a request is in ``_served``, its memory may be touched: :meth:`quiesce` cancels it and
    waits for its end. Of what was dropped because its time was over the last numbers are kept, for the answer.
    """

    def __init__(
        self, nixl: Nixl, sender: _End, receiver: _End, pushed: _End, *, reads: bool = False, writable: bool = False
    ) -> None:
        self.link: object = None
        self._reads = reads  # the peer may read by itself
        self._writable = writable  # it may push: else no receiver for that is ever made
        self._pushed = pushed  # the receiver of what is pushed, in which this thread makes progress
        self._nixl = nixl
        self._sender = sender
        self._receiver = receiver
        self._queue: SimpleQueue[_Served | _Told | _Meeting | None] = SimpleQueue()
        self._changed = threading.Condition(threading.Lock())  # protects all below
        self._served: dict[int, _Served] = {}
        self._overdue: deque[int] = deque(maxlen=64)  # used by the thread alone
        self._waiting_bytes = 0  # of requests of the peer that are not answered yet
        self._thread: threading.Thread | None = None
        self._stopped = False

    def begin(self, link: object, first: _End | None) -> None:
        """Let the peer know the receiver whose bytes are likely to come first, in the thread; None: of the peer's."""
        self.link = link
        if first is not None:
            self._put(_Meeting(first))

    # Called on the control thread

    def on_request(self, data: bytes, reply: Callable[[bytes], None]) -> None:
        """Take a request of the peer; ``reply`` is called once, by any thread. Raises ProtocolError."""
        try:
            request = _ask_decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"nixl: a request that is none: {error}") from error
        nbytes = len(data) + _REQUEST_BYTES
        full = self._waiting_bytes + nbytes > _MAX_WAITING_BYTES  # only this thread adds to it
        if not isinstance(request, Ask):
            if full:
                raise ProtocolError(f"nixl: {_MAX_WAITING_BYTES >> 20} MiB of requests wait already")
            self._count(nbytes)
            self._put(_Told(request, reply, nbytes))
            return
        try:
            if full:
                text = f"{_MAX_WAITING_BYTES >> 20} MiB of requests over this link wait already"
                raise LinkError(text, status_code=LLMStatusCode.LLM_LINK_BUSY)
            served = self._grant(request, reply)
        except ProtocolError:
            raise
        except LLMException as error:
            code = int(error.status_code) & 0xFFFFFFFF or int(LLMStatusCode.LLM_FAILED)
            reply(_encode(Refused(code, " ".join(str(error).split())[:4000], touched=False)))
            return
        with self._changed:
            if self._stopped:
                return  # the link has ended: nobody waits for an answer, and nothing would take this away again
            if served.move in self._served:
                raise ProtocolError(f"nixl: move {served.move} is asked for twice")
            self._served[served.move] = served
            served.nbytes = nbytes
            self._waiting_bytes += nbytes
        self._put(served)

    def _grant(self, ask: Ask, reply: Callable[[bytes], None]) -> _Served:
        handler, request = self._nixl.handler, decode_request(ask.meta)
        if ask.direct is (ask.receiver is not None) or (ask.write and not ask.direct):
            raise ProtocolError("nixl: a request that names a receiver has it written to, one that pushes is direct")
        if ask.direct and not ask.write and not self._reads:
            raise ProtocolError("nixl: a peer reads by itself over RDMA only, and with remote cache access only")
        if ask.write and not self._writable:
            raise LLMException(
                "pushes over nixl need remote cache access at the owner (LLMConfig.enable_remote_cache_accessible)",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        grant = (handler.on_write if ask.write else handler.on_read)(self.link, request)
        if request.extent != grant.tensors.extent:
            raise ParamError(f"the tensors have {grant.tensors.extent} bytes, not {request.extent}")
        plan = grant.plan or request.plan
        check_plan(plan, grant.tensors, grant.tensors)
        return _Served(ask.move, plan, grant, ask, reply, time.monotonic() + ask.budget_ms / 1e3)

    def _count(self, nbytes: int) -> None:
        with self._changed:
            self._waiting_bytes += nbytes

    def _put(self, item: _Served | _Told | _Meeting) -> None:
        with self._changed:
            if self._stopped:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="llm-datadist-nixl", daemon=True)
                self._thread.start()
        self._queue.put(item)

    # Called by any thread

    def quiesce(self, tag: int) -> None:
        """Cancel what was granted under ``tag``, and wait until none of its memory is touched any more."""
        with self._changed:
            found = [each for each in self._served.values() if each.grant.tag == tag]
            for each in found:
                each.cancelled = True
            if not found or self._thread is threading.current_thread():
                return
            self._queue.put(None)
            self._changed.wait_for(lambda: not any(self._served.get(each.move) is each for each in found))

    def forget(self, bases: list[int]) -> None:
        """As :meth:`_End.forget`, of the receiver of what is pushed."""
        self._pushed.forget(bases)

    def stop(self) -> None:
        """End soon: the thread ends both agents, and here and now where there is no thread. Waits for nothing."""
        with self._changed:
            self._stopped = True
            thread = self._thread
        self._queue.put(None)
        if thread is None:
            self._end()

    def join(self) -> None:
        """Wait for the thread, which is told to stop when the connection is released."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # The thread

    def _run(self) -> None:
        held: dict[int, _Served] = {}
        try:
            while not self._stopped:
                item: _Served | _Told | _Meeting | None = None
                with suppress(Empty):
                    item = self._receive(held) if held else self._queue.get()
                self._handle(held, item)
        finally:
            self._end()  # also after MemoryError: else quiesce would wait without end

    @hold_signals
    def _handle(self, held: dict[int, _Served], item: _Served | _Told | _Meeting | None) -> None:
        try:
            self._drop_overdue(held)
            if isinstance(item, _Served):
                self._serve(held, item)
            elif isinstance(item, _Meeting):
                self._meet(item)
            elif item is not None:
                self._count(-item.nbytes)
                if isinstance(item.request, Done):
                    self._finish(held, item.request, item.reply)
                else:
                    self._meet(item.request)
        except Exception:  # noqa: BLE001 (a bug costs a request, not the thread)
            logger.exception("nixl: a request of %s failed", self.link)
            if isinstance(item, _Served):
                self._refuse(item, int(LLMStatusCode.LLM_FAILED), "the target failed; see its log", touched=True)

    @hold_signals
    def _receive(self, held: dict[int, _Served]) -> _Served | _Told | _Meeting | None:
        """Let pushed bytes come in until the next request, or until one that is held is overdue; raises Empty then.

        As long as bytes may be coming this thread does not sleep, as the receiving end of a NIXL program does: with a
        thread of UCX that sleeps between two messages, pushes take a third longer.
        """
        until, busy_until = min(each.until for each in held.values()), time.monotonic() + _BUSY_SECONDS
        while (now := time.monotonic()) < until:
            with suppress(NixlFailed), self._pushed.using(self._turn) as agent:
                for _ in range(_POLLS):
                    agent.receive()
            if now > busy_until:
                return self._queue.get(timeout=min(until - now, _LAZY_SECONDS))
            with suppress(Empty):
                return self._queue.get_nowait()
        raise Empty

    def _meet(self, item: Meet | _Meeting) -> None:
        """Tell the peer of the receiver here, or learn of its receiver. A failure shows in the first transfer."""
        try:
            if isinstance(item, Meet):
                with self._sender.using(self._turn) as agent:
                    agent.load(item.receiver)
                return
            with item.receiver.using(self._turn) as agent:
                receiver = agent.address("")
            self._nixl.wire.tell(self.link, _encode(Meet(receiver)))
        except (NixlFailed, LLMException) as error:
            logger.info("nixl: the ends of %s are not connected yet: %s", self.link, error)

    def _serve(self, held: dict[int, _Served], served: _Served) -> None:
        if not _unchanged(served):
            self._refuse(served, CHANGED, "a guard has changed", touched=False)
            return
        try:
            if served.ask.direct:
                self._hold(held, served)
            else:
                self._write(served)
        except (NixlFailed, LLMException) as error:
            self._refuse(served, *self._why(served, error), touched=True)

    @staticmethod
    def _why(served: _Served, error: Exception) -> tuple[int, str]:
        """Return the status of a request that failed: only a failure of NIXL itself is LOST."""
        if served.cancelled:
            return CHANGED, "the memory was taken back"
        if time.monotonic() >= served.until:
            return _OVERDUE, "its time was over"
        return LOST, " ".join(str(error).split())[:4000]

    def _write(self, served: _Served) -> None:
        """Write what was asked for into the receiver of the peer, and answer."""
        ask, plan, sender = served.ask, served.plan, self._sender
        bases = served.grant.tensors.bases[plan.src_first : plan.src_first + plan.count]
        there = _numbers(ask.bases, plan.count, "bases"), _numbers(ask.offsets, len(plan.runs), "offsets")
        with sender.using(partial(self._turn, served)) as agent:
            assert ask.receiver is not None
            if not agent.load(ask.receiver):
                self._refuse(served, _UNKNOWN_RECEIVER, "the metadata of the receiver are not known", touched=False)
                return
            agent.cover(bases, served.grant.tensors.extent)
            nbytes, moved = plan.runs[:, 2], False
            mine, theirs = spans_of(bases, plan.runs[:, 1], nbytes), spans_of(*there, nbytes)
            try:
                moved = agent.move("WRITE", ask.receiver.name, mine, theirs, partial(self._gone, served), Progress())
            finally:
                if not moved:
                    sender.end()  # first: then nothing reads the memory any more
            if not moved:
                self._turn(served)
            loaded = ask.receiver.known_as
        if _unchanged(served):
            self._answer(served, Moved(loaded))
        else:
            self._refuse(served, CHANGED, "a guard changed meanwhile", touched=True)

    def _hold(self, held: dict[int, _Served], served: _Served) -> None:
        """Tell the peer where it may write, or read, and keep that memory until it is done."""
        plan, tensors, receiver = served.plan, served.grant.tensors, self._pushed
        first = plan.dst_first if served.ask.write else plan.src_first
        bases = tensors.bases[first : first + plan.count]
        with receiver.using(partial(self._turn, served)) as agent:
            agent.cover(bases, tensors.extent)
            address = agent.address(served.ask.loaded)
            receiver.users += 1
        served.receiver = address.name
        held[served.move] = served
        offsets = plan.runs[:, 0 if served.ask.write else 1].astype("<u8").tobytes()
        served.reply(_encode(Granted(served.move, address, bases.astype("<u8").tobytes(), offsets)))

    def _finish(self, held: dict[int, _Served], done: Done, reply: Callable[[bytes], None]) -> None:
        served = held.pop(done.move, None)
        if served is None:
            late = done.move in self._overdue
            code, text = (_OVERDUE, "its time was over") if late else (TORN, "the memory was taken back")
            reply(_encode(Refused(code, text, touched=True)))
            return
        served.reply = reply
        # A receiver ends for all that are written to it when one of them is dropped.
        ended = not self._pushed.is_agent(served.receiver)
        if ended or not done.good:
            self._drop(served)
            code, text = (_AGAIN, "the receiver has ended") if ended else (LOST, "given up")
            reply(_encode(Refused(code, text, touched=True)))
        elif _unchanged(served):
            self._pushed.leave()
            self._answer(served, Moved(""))
        else:
            self._pushed.leave()
            self._refuse(served, TORN, "a guard changed meanwhile", touched=True)

    def _drop_overdue(self, held: dict[int, _Served]) -> None:
        for served in [each for each in held.values() if self._gone(each)]:
            del held[served.move]
            if not served.cancelled:
                self._overdue.append(served.move)
            self._drop(served)

    def _drop(self, served: _Served) -> None:
        """Make sure that the peer does not write any more, then forget the request."""
        self._pushed.end(served.receiver)
        self._pushed.leave()
        self._forget(served)

    def _turn(self, served: _Served | None = None) -> float:
        if self._stopped if served is None else self._gone(served):
            raise NixlFailed("the time was over, or the memory was taken back")
        return 0.05

    def _gone(self, served: _Served) -> bool:
        return served.cancelled or self._stopped or time.monotonic() >= served.until

    def _answer(self, served: _Served, answer: Moved | Refused) -> None:
        self._forget(served)  # first: the peer may unregister as soon as it has the answer
        served.reply(_encode(answer))

    def _refuse(self, served: _Served, code: int, text: str, *, touched: bool) -> None:
        self._answer(served, Refused(code, text, touched))

    def _forget(self, served: _Served) -> None:
        with self._changed:
            if self._served.pop(served.move, None) is not None:
                self._waiting_bytes -= served.nbytes
            self._changed.notify_all()

    @hold_signals
    def _end(self) -> None:
        """End both agents; nothing is touched any more."""
        for each in (self._sender, self._receiver, self._pushed):
            each.close()
        with self._changed:
            self._stopped = True
            self._served.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()


def _unchanged(served: _Served) -> bool:
    """Return True while every guard shows its generation, and the memory was not taken back."""
    return not served.cancelled and all(load_generation(at) == generation for at, generation in served.grant.guards)
