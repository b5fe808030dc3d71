"""The engine of the data lanes: native threads that move the bytes of many jobs over many stream sockets.

An *initiator* starts jobs and waits for them. A *target* gets an event for each request and grants or refuses it. One
engine has both roles at once, over the same lanes. Threads: any. On failure a lane is lost, and its jobs with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from llm_datadist._native import _native
from llm_datadist._native.plan import NO_DEADLINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist._native._native import Ending, Plan
    from llm_datadist._native.plan import Tensors

#: Statuses of a job, each described in ``_native.pyi``.
CHANGED, ABORTED, LOST, MISFIT, TORN = _native.CHANGED, _native.ABORTED, _native.LOST, _native.MISFIT, _native.TORN


class Outcome(NamedTuple):
    """The end of a job, after which the engine does not touch its local memory any more."""

    ending: Ending
    #: The target's own, CHANGED, ABORTED or TORN, if it sent one; LOST if giving up cost the lane; else 0.
    code: int
    nbytes: int  # that moved at this end
    text: str  # why, in one line


@dataclass(frozen=True, slots=True)
class ReadAsked:
    """The peer asks for bytes. Answer by :meth:`LaneEngine.serve_read` or :meth:`LaneEngine.refuse`."""

    lane: int
    id: int
    meta: bytes


@dataclass(frozen=True, slots=True)
class WriteAsked:
    """The peer sends ``nbytes`` bytes. Answer by :meth:`LaneEngine.accept_write` or :meth:`LaneEngine.refuse`.

    Nothing more is read from that lane until then.
    """

    lane: int
    id: int
    meta: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class LaneLost:
    """A lane ended without :meth:`LaneEngine.drop_lane`."""

    lane: int
    reason: str


LaneEvent = ReadAsked | WriteAsked | LaneLost

_EVENTS: Final = {"read": ReadAsked, "write": WriteAsked, "lost": LaneLost}


def check_plan(plan: Plan, dst: Tensors, src: Tensors) -> None:
    """Raise the ParamError that ``execute`` would raise before its first byte."""
    _native.check_plan(plan, dst.native, src.native)


class LaneEngine:
    """Owns native threads and the lanes they serve until :meth:`close`. Any thread.

    A lane is one stream socket. Jobs on it run one after the other in each direction, and lanes take turns, so that a
    slow peer delays only its own jobs. What a peer sends is checked before it is used, and a violation costs the lane.
    A lane with keys is sealed: its bytes are encrypted, and those that another than the peer sent are not used.
    In a forked child every method but :meth:`close` raises. Methods that need no translation are the native ones,
    which ``_native.pyi`` describes.

    Args:
        threads: Threads that move bytes, named ``lldd-data-<n>``, 1 to 64.
        drain_ms: Milliseconds that the payload of an abandoned job may take before its lane is dropped.
    """

    def __init__(self, threads: int, drain_ms: int = 10_000) -> None:
        self._native = native = _native.LaneEngine(threads, drain_ms)
        self.close = native.close
        self.add_lane = native.add_lane
        self.reserve_lane = native.reserve_lane
        self.attach_lane = native.attach_lane
        self.drop_lane = native.drop_lane
        self.event_fd = native.event_fd
        self.refuse = native.refuse
        self.quiesce = native.quiesce

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._native.closed

    def poll_events(self) -> list[LaneEvent]:
        """Return the events since the last call, in order for each lane."""
        return [_EVENTS[name](*fields) for name, *fields in self._native.poll_events()]

    def start_read(self, lane: int, meta: bytes, plan: Plan, dst: Tensors) -> int:
        """Ask the target for the bytes of ``plan`` and return the job's number.

        Follow it by one :meth:`wait` or :meth:`give_up`. The target must send exactly ``plan.nbytes`` bytes, in the
        order of the plan, of which only the destination side is used here. If the lane is gone the job ends as lost.
        ``meta`` is what the target understands, at most 1 MiB; ``dst`` stays valid until the job has ended.
        """
        return self._native.start(lane, False, meta, plan, dst.native, dst.mapped)

    def start_write(self, lane: int, meta: bytes, plan: Plan, src: Tensors) -> int:
        """Send the bytes of ``plan``; return the job's number. Otherwise as :meth:`start_read`."""
        return self._native.start(lane, True, meta, plan, src.native, src.mapped)

    def move(
        self,
        lane: int,
        handle: bytes,
        extent: int,
        plan: Plan,
        local: Tensors,
        deadline_ns: int,
        cancelled: bytearray | None,
        *,
        write: bool,
    ) -> Outcome:
        """Start one job, by a request for ``handle``, and :meth:`wait` for it; a signal's exception ends it, too."""
        until = min(deadline_ns, NO_DEADLINE)
        return Outcome(
            *self._native.move(lane, write, handle, extent, plan, local.native, local.mapped, until, cancelled)
        )

    def wait(self, job: int, deadline_ns: int, cancelled: bytearray | None = None) -> Outcome:
        """Return, once, how a job ended, after giving it up at the deadline (``time.monotonic_ns()``). Handles signals.

        It is also given up within 50 ms once ``cancelled``, one byte, is not zero.
        """
        return Outcome(*self._native.wait(job, min(deadline_ns, NO_DEADLINE), cancelled))

    def give_up(self, job: int) -> Outcome:
        """End a job if it has not ended yet, and return how it ended.

        Bytes of a read that still arrive are dropped. A write that is half sent costs its lane.
        """
        return Outcome(*self._native.give_up(job))

    def serve_read(
        self, lane: int, id: int, plan: Plan, src: Tensors, guards: Sequence[tuple[int, int]], tag: int
    ) -> None:
        """Send the bytes of ``plan`` from ``src`` as the answer to a :class:`ReadAsked`; only its source side is used.

        ``src`` stays valid until :meth:`quiesce` has returned for ``tag``. ``guards`` are (address, generation) pairs
        that must hold before the first byte and after the last. If this raises, the request still needs an answer.
        """
        self._native.grant(lane, id, False, plan, src.native, guards, tag, src.mapped)

    def accept_write(
        self, lane: int, id: int, plan: Plan, dst: Tensors, guards: Sequence[tuple[int, int]], tag: int
    ) -> None:
        """Receive a :class:`WriteAsked` of ``plan.nbytes`` bytes into ``dst``. Otherwise as :meth:`serve_read`."""
        self._native.grant(lane, id, True, plan, dst.native, guards, tag, dst.mapped)

    def __repr__(self) -> str:
        return f"<LaneEngine {self._native.threads} threads{', closed' if self.closed else ''}>"
