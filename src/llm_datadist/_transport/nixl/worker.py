"""The owner's side of a link over nixl: the peer's requests, checked and served in order.

Threads: the control thread checks requests and enqueues them. The worker's own thread, ``llm-datadist-nixl``, serves
them, lets pushed bytes in and ends the agents. Any thread may take memory back, or stop the worker.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from llm_datadist._checks import clean
from llm_datadist._log import links_logger as logger
from llm_datadist._native import Device
from llm_datadist._native.lane_engine import CHANGED, LOST, TORN
from llm_datadist._native.plan import PlanSide
from llm_datadist._native.public_call import public_call
from llm_datadist._transport.moves import MoveReply, answer, status_of
from llm_datadist._transport.nixl.bindings import NixlFailed
from llm_datadist._transport.nixl.messages import (
    Ask,
    Done,
    Meet,
    Moved,
    NixlRefused,
    Ready,
    encode,
    read_answer,
    read_request,
)
from llm_datadist._transport.nixl.slots import AgentSlot
from llm_datadist.errors import LinkError, LLMException, LLMStatusCode, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._native import Plan
    from llm_datadist._transport.transport import Context

#: After the last request a receiver of pushes polls without sleep for so long, then sleeps so long at a time.
_BUSY_SECONDS: Final = 0.5
_LAZY_SECONDS: Final = 0.001
_POLLS: Final = 16  # between two checks for a request
#: Limit on waiting requests of one peer. An honest peer has a few of 1 MiB for each thread.
_MAX_WAITING_BYTES: Final = 64 << 20
_REQUEST_BYTES: Final = 2048  # memory of a request beside its bytes


@dataclass(slots=True, eq=False)
class ServedRequest:
    """A request that was accepted, until its answer."""

    plan: Plan
    memory: MoveReply
    ask: Ask
    reply: Callable[[bytes], None]
    expires: float  # monotonic
    begun: bool = False  # until it is forgotten, its memory may be touched
    cancelled: bool = False  # by any thread
    receiver: str = ""  # name of the agent that the peer uses
    nbytes: int = 0  # of waiting_bytes until it is forgotten

    def unchanged(self) -> bool:
        return not self.cancelled and self.memory.unchanged()


class NixlWorker:
    """Server of one connection's peer. Owns: its thread, from the first job on, and all agents of the connection.

    While the thread waits, it drops ended requests and lets pushed bytes in. The memory of a request in ``requests``
    that has begun may be touched: :meth:`quiesce` cancels it and waits for its end.
    """

    def __init__(self, context: Context, fabric: str, *, reads: bool, writable: bool) -> None:
        self.link: object = None
        self.peer_reads = reads  # the peer may read
        self._writable = writable  # the peer may push; else no receiver of pushes is made
        self._context = context
        self.push_sender = AgentSlot(context, fabric, progress=False)  # writes the peer's pulls, and reads, too
        self.pull_receiver = AgentSlot(context, fabric, progress=True)
        self.push_receiver = AgentSlot(context, fabric, progress=False)  # this thread makes its progress
        self.slots = self.push_sender, self.pull_receiver, self.push_receiver
        self._queue: SimpleQueue[tuple[Callable[[], None], int] | None] = SimpleQueue()  # jobs, bytes until they begin
        self._exposed: dict[int, ServedRequest] = {}  # in use by the peer; for the thread only
        self._overdue: deque[int] = deque(maxlen=64)  # last moves dropped at their time limit; for the thread only
        self._changed = threading.Condition(threading.Lock())  # protects all below
        self.requests: dict[int, ServedRequest] = {}
        self.waiting_bytes = 0  # of requests without an answer yet
        self._thread: threading.Thread | None = None
        self._stopped = False

    def begin(self, link: object, first: AgentSlot | None) -> None:
        """Have the thread tell the peer the receiver to be used ``first``, unless that is the peer's."""
        self.link = link
        if first is not None:
            self._enqueue(partial(self._introduce, first))

    # On the control thread

    def on_request(self, data: bytes, reply: Callable[[bytes], None]) -> None:
        request, nbytes = read_request(data), len(data) + _REQUEST_BYTES
        full = self.waiting_bytes + nbytes > _MAX_WAITING_BYTES  # only this thread adds
        if isinstance(request, Ask):
            try:
                if full:
                    text = f"{_MAX_WAITING_BYTES >> 20} MiB of requests over this link wait already"
                    raise LinkError(text, status_code=LLMStatusCode.LLM_LINK_BUSY)
                served = self.accept(request, reply)
            except ProtocolError:
                raise
            except LLMException as error:
                reply(encode(NixlRefused(*status_of(error), touched=False)))
            else:
                served.nbytes = nbytes
                self._enqueue(partial(self._serve, served), served=served)
        elif full:
            raise ProtocolError(f"nixl: {_MAX_WAITING_BYTES >> 20} MiB of requests wait already")
        elif isinstance(request, Done):
            self._enqueue(partial(self._finish, request, reply), nbytes)
        else:
            self._enqueue(partial(self._load, request), nbytes)

    def on_late_answer(self, data: bytes) -> bytes | None:
        ready = read_answer(data)
        return encode(Done(ready.move, good=False)) if isinstance(ready, Ready) else None

    def accept(self, ask: Ask, reply: Callable[[bytes], None]) -> ServedRequest:
        """Return a request with the memory that it may use. Raises LLMException to refuse it."""
        if ask.direct is (ask.receiver is not None) or (ask.write and not ask.direct):
            raise ProtocolError("nixl: a request that names a receiver has it written to, one that pushes is direct")
        if ask.direct and not ask.write and not self.peer_reads:
            raise ProtocolError("nixl: a peer reads over RDMA only, and with remote cache access only")
        if ask.write and not self._writable:
            raise LLMException(
                "pushes over nixl need remote cache access at the owner (LLMConfig.enable_remote_cache_accessible)",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        move = answer(self._context.owner, self.link, ask.meta, write=ask.write)
        if move.reply.tensors.place.device >= 0:
            Device.open(move.reply.tensors.place.device)  # raises if it has failed
        return ServedRequest(move.plan, move.reply, ask, reply, time.monotonic() + ask.budget_ms / 1e3)

    def _enqueue(self, job: Callable[[], None], nbytes: int = 0, served: ServedRequest | None = None) -> None:
        """Have the thread do a job, unless the link has ended: nobody waits for an answer then."""
        with self._changed:
            if self._stopped:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="llm-datadist-nixl", daemon=True)
                thread.start()
                self._thread = thread
            if served is not None and self.requests.setdefault(served.ask.move, served) is not served:
                raise ProtocolError(f"nixl: move {served.ask.move} is asked for twice")
            self.waiting_bytes += nbytes if served is None else served.nbytes
        self._queue.put((job, nbytes))

    # On any thread

    def quiesce(self, tag: int) -> None:
        """Cancel requests for memory under ``tag``; wait for those begun, which end at the thread's next wait."""
        with self._changed:
            found = [each for each in self.requests.values() if each.memory.tag == tag]
            for each in found:
                each.cancelled = True
        if self._thread is threading.current_thread():  # a finalizer, between two jobs
            self._drop_ended()
        elif found:
            self._queue.put(None)
            with self._changed:
                self._changed.wait_for(
                    lambda: not any(each.begun and self.requests.get(each.ask.move) is each for each in found)
                )

    def stop(self) -> None:
        """Have the thread end all agents and itself; without a thread, end them here. Never waits."""
        with self._changed:
            self._stopped = True
            thread = self._thread
        self._queue.put(None)
        if thread is None:
            self._close()

    def join(self) -> None:
        if self._thread is threading.current_thread():  # a finalizer, between two jobs
            self._close()
        elif self._thread is not None:
            self._thread.join()

    # The thread

    def _run(self) -> None:
        asked = 0.0  # time of the last request
        try:
            while not self._stopped:
                timeout = None
                if self._exposed:
                    # With a thread of UCX that sleeps between messages, pushes would take a third longer.
                    self._receive_pushes()
                    timeout = _LAZY_SECONDS if time.monotonic() > asked + _BUSY_SECONDS else 0
                item = None
                with suppress(Empty):
                    item = self._queue.get(timeout=timeout)
                    asked = time.monotonic()
                self._do(item)
        finally:
            self._close()  # also after MemoryError: else quiesce would wait for ever

    @public_call
    def _do(self, item: tuple[Callable[[], None], int] | None) -> None:
        try:
            self._drop_ended()
            if item is not None:
                job, nbytes = item
                with self._changed:
                    self.waiting_bytes -= nbytes
                job()
        except (NixlFailed, LLMException) as error:  # of an introduction: the first transfer tries again
            logger.info("nixl: the agents of %s are not connected yet: %s", self.link, error)
        except Exception:  # noqa: BLE001 (a bug costs a request, not the thread)
            logger.exception("nixl: a request of %s failed", self.link)

    @public_call
    def _receive_pushes(self) -> None:
        with suppress(NixlFailed), self.push_receiver.using(lambda: _LAZY_SECONDS) as agent:
            for _ in range(_POLLS):
                agent.receive()

    def _introduce(self, receiver: AgentSlot) -> None:
        with receiver.using(self._turn) as agent:
            address = agent.address("")
        self._context.wire.tell(self.link, encode(Meet(address)))

    def _load(self, meet: Meet) -> None:
        with self.push_sender.using(self._turn) as agent:
            agent.load(meet.receiver)

    def _serve(self, served: ServedRequest) -> None:
        with self._changed:
            served.begun = True  # from now on quiesce() waits for it
        try:
            if not served.unchanged():
                self._refuse(served, CHANGED, "a guard has changed", touched=False)
            elif served.ask.direct:
                self._expose(served)
            else:
                self._write(served)
        except (NixlFailed, LLMException) as error:  # of NIXL, unless one of these reasons holds
            code, text = LOST, clean(str(error), 4000)
            if served.cancelled:
                code, text = CHANGED, "the memory was taken back"
            elif time.monotonic() >= served.expires:
                code, text = NixlRefused.OVERDUE, "its time was over"
            self._refuse(served, code, text, touched=True)
        except Exception:
            self._refuse(served, int(LLMStatusCode.LLM_FAILED), "the target failed; see its log", touched=True)
            raise

    def _write(self, served: ServedRequest) -> None:
        source = PlanSide(served.plan, served.memory.tensors, False)
        loaded = self.push_sender.move(partial(self._turn, served), source, served.ask, lambda _: None)
        if not loaded:
            self._refuse(served, NixlRefused.UNKNOWN, "the metadata of the receiver are not known", touched=False)
        elif served.unchanged():
            self._answer(served, Moved(loaded))
        else:
            self._refuse(served, CHANGED, "a guard changed during the transfer", touched=True)

    def _expose(self, served: ServedRequest) -> None:
        """Let the peer use the memory until it is done."""
        ask, side = served.ask, PlanSide(served.plan, served.memory.tensors, served.ask.write)
        where = self.push_receiver.expose(partial(self._turn, served), side, ask.loaded)
        served.receiver = where[0].name
        self._exposed[ask.move] = served
        served.reply(encode(Ready(ask.move, *where)))

    def _finish(self, done: Done, reply: Callable[[bytes], None]) -> None:
        if (served := self._exposed.pop(done.move, None)) is None:
            late = done.move in self._overdue
            code, text = (NixlRefused.OVERDUE, "its time was over") if late else (TORN, "the memory was taken back")
            reply(encode(NixlRefused(code, text, touched=True)))
            return
        served.reply = reply
        # A dropped move ends its receiver, and so all moves into that.
        ended = not self.push_receiver.is_agent(served.receiver)
        self.push_receiver.withdraw(served.receiver, end=not done.good)
        if ended:
            self._refuse(served, NixlRefused.AGAIN, "the receiver has ended", touched=True)
        elif not done.good:
            self._refuse(served, LOST, "given up", touched=True)
        elif served.unchanged():
            self._answer(served, Moved(""))
        else:
            self._refuse(served, TORN, "a guard changed during the transfer", touched=True)

    def _drop_ended(self) -> None:
        """Stop the peer's use of memory whose time is over, or which was taken back."""
        for served in [each for each in self._exposed.values() if self._is_over(each)]:
            del self._exposed[served.ask.move]
            if not served.cancelled:
                self._overdue.append(served.ask.move)
            self.push_receiver.withdraw(served.receiver, end=True)
            self._forget(served)

    def _turn(self, served: ServedRequest | None = None) -> float:
        """Do what cannot wait; return the seconds to wait next. Raises NixlFailed if this shall stop."""
        self._drop_ended()
        if self._exposed:
            self._receive_pushes()  # else two sides might wait for each other
        if self._stopped if served is None else self._is_over(served):
            raise NixlFailed("the time was over, or the memory was taken back")
        return _LAZY_SECONDS if self._exposed else 0.05

    def _is_over(self, served: ServedRequest) -> bool:
        return served.cancelled or self._stopped or time.monotonic() >= served.expires

    def _answer(self, served: ServedRequest, answer: Moved | NixlRefused) -> None:
        self._forget(served)  # first: with the answer, the peer may unregister
        served.reply(encode(answer))

    def _refuse(self, served: ServedRequest, code: int, text: str, *, touched: bool) -> None:
        self._answer(served, NixlRefused(code, text, touched))

    def _forget(self, served: ServedRequest) -> None:
        with self._changed:
            if self.requests.pop(served.ask.move, None) is not None:
                self.waiting_bytes -= served.nbytes
            self._changed.notify_all()

    @public_call
    def _close(self) -> None:
        for slot in self.slots:
            slot.close()
        with self._changed:
            self._stopped = True
            self.requests.clear()
            self.waiting_bytes = 0
            self._changed.notify_all()
