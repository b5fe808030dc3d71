"""Engine of the data lanes: native threads that move jobs over stream sockets.

An initiator starts jobs and waits for them; a target accepts or refuses requests. One engine has both roles. If a lane
fails, its jobs end as lost.
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
    """Result of a job, whose local memory the engine no longer touches."""

    ending: Ending
    #: The target's code or status, if it sent one; LOST if giving up cost the lane; else 0.
    code: int
    nbytes: int  # moved at this side; 0 if refused
    text: str  # reason, one line


@dataclass(frozen=True, slots=True)
class ReadAsked:
    """Request for bytes; answer by :meth:`LaneEngine.serve_read` or ``refuse``."""

    lane: int
    id: int
    meta: bytes


@dataclass(frozen=True, slots=True)
class WriteAsked:
    """Request to send bytes; answer by :meth:`LaneEngine.accept_write` or ``refuse``.

    Until then the engine reads nothing from the lane.
    """

    lane: int
    id: int
    meta: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class LaneLost:
    """End of a lane without :meth:`LaneEngine.drop_lane`."""

    lane: int
    reason: str


LaneEvent = ReadAsked | WriteAsked | LaneLost

_EVENTS: Final = {"read": ReadAsked, "write": WriteAsked, "lost": LaneLost}


def check_plan(plan: Plan, dst: Tensors, src: Tensors) -> None:
    """Raise the ParamError that ``execute`` would raise before its first byte."""
    _native.check_plan(plan, dst.native, src.native)


class LaneEngine:
    """Native threads that serve stream sockets (lanes).

    Frames on a lane go one after the other in each direction. Lanes take turns, so a slow peer delays only its own
    jobs. A bad frame costs the lane. With keys a lane is encrypted. ``_native.pyi`` describes native methods.

    Owns: both, until :meth:`close`.
    Threads: any. In a forked child only :meth:`close`, :attr:`closed` and ``reserve_lane`` do not raise.

    Args:
        threads: Number of threads ``lldd-data-<n>``, 1 to 64.
        drain_ms: Milliseconds that a discarded payload may take before its lane is dropped.
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
        return self._native.closed

    def poll_events(self) -> list[LaneEvent]:
        """Return the events since the last call, in order for each lane."""
        return [_EVENTS[name](*fields) for name, *fields in self._native.poll_events()]

    def start_read(self, lane: int, meta: bytes, plan: Plan, dst: Tensors) -> int:
        """Ask the target for ``plan.nbytes`` bytes, in the plan's order; return the job's number.

        Only the plan's destination side is used. One :meth:`wait` or :meth:`give_up` must follow; until the job has
        ended ``dst`` stays valid. ``meta``, at most 1 MiB, is for the target.
        """
        return self._native.start(lane, False, meta, plan, dst.native, dst.mapped)

    def start_write(self, lane: int, meta: bytes, plan: Plan, src: Tensors) -> int:
        """Send the bytes of ``plan``. Otherwise as :meth:`start_read`."""
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
        """Start a job for ``handle`` and :meth:`wait` for it. A signal handler's exception ends it."""
        until = min(deadline_ns, NO_DEADLINE)
        return Outcome(
            *self._native.move(lane, write, handle, extent, plan, local.native, local.mapped, until, cancelled)
        )

    def wait(self, job: int, deadline_ns: int, cancelled: bytearray | None = None) -> Outcome:
        """Return, once, the end of a job. Runs signal handlers.

        The job is given up at the deadline (``time.monotonic_ns()``), or within 50 ms once the byte ``cancelled`` is
        not zero.
        """
        return Outcome(*self._native.wait(job, min(deadline_ns, NO_DEADLINE), cancelled))

    def give_up(self, job: int) -> Outcome:
        """End a job unless it has ended, and return its end.

        Bytes of a read that still arrive are dropped. A half-sent write costs its lane.
        """
        return Outcome(*self._native.give_up(job))

    def serve_read(
        self, lane: int, id: int, plan: Plan, src: Tensors, guards: Sequence[tuple[int, int]], tag: int
    ) -> None:
        """Answer a :class:`ReadAsked` with the bytes of the plan's source side.

        ``src`` stays valid until :meth:`quiesce` has returned for ``tag``. The ``guards``, (address, generation), must
        hold before the first byte and after the last. If this raises, the request still needs an answer.
        """
        self._native.reply(lane, id, False, plan, src.native, guards, tag, src.mapped)

    def accept_write(
        self, lane: int, id: int, plan: Plan, dst: Tensors, guards: Sequence[tuple[int, int]], tag: int
    ) -> None:
        """Receive the ``plan.nbytes`` bytes of a :class:`WriteAsked`. Otherwise as :meth:`serve_read`."""
        self._native.reply(lane, id, True, plan, dst.native, guards, tag, dst.mapped)

    def __repr__(self) -> str:
        return f"<LaneEngine {self._native.threads} threads{', closed' if self.closed else ''}>"
