"""Engine of the data lanes: native threads that move jobs over stream sockets.

An initiator starts jobs and waits for them; a target accepts or refuses requests. One engine has both roles. If a lane
fails, its jobs end as lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from llm_datadist._native import _native

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


class ReadAsked(NamedTuple):
    """Request for bytes; answer by :meth:`LaneEngine.reply` or ``refuse``."""

    lane: int
    id: int
    meta: bytes


class WriteAsked(NamedTuple):
    """Request to send bytes; until :meth:`LaneEngine.reply` or ``refuse`` answers it, the lane is not read."""

    lane: int
    id: int
    meta: bytes
    nbytes: int


class LaneLost(NamedTuple):
    """End of a lane without :meth:`LaneEngine.drop_lane`."""

    lane: int
    reason: str


LaneEvent = ReadAsked | WriteAsked | LaneLost

_EVENTS: Final = {"read": ReadAsked, "write": WriteAsked, "lost": LaneLost}


class LaneEngine:
    """1 to 64 native threads ``lldd-data-<n>`` that serve stream sockets (lanes). ``_native.pyi`` has native methods.

    Frames on a lane go one after the other in each direction. Lanes take turns, so a slow peer delays only its own
    jobs. A bad frame costs the lane, and so does a discarded payload after ``drain_ms``. With keys a lane is encrypted.
    Owns: both, until :meth:`close`.
    Threads: any. In a forked child only :meth:`close` and ``reserve_lane`` do not raise.
    """

    def __init__(self, threads: int, drain_ms: int = 10_000) -> None:
        self._native = native = _native.LaneEngine(threads, drain_ms)
        self.close = native.close
        self.add_lane = native.add_lane
        self.reserve_lane = native.reserve_lane
        self.attach_lane = native.attach_lane
        self.drop_lane = native.drop_lane
        self.event_fd = native.event_fd
        self.move = native.move
        self.refuse = native.refuse
        self.quiesce = native.quiesce

    def poll_events(self) -> list[LaneEvent]:
        """Return the events since the last call, in order for each lane."""
        return [_EVENTS[name](*fields) for name, *fields in self._native.poll_events()]

    def start(self, lane: int, meta: bytes, plan: Plan, local: Tensors, *, write: bool) -> int:
        """Send the bytes of a plan's source, or ask the target for those of its destination; return the job's number.

        One :meth:`wait` or :meth:`give_up` must follow; until the job has ended ``local`` stays valid. ``meta``, at
        most 1 MiB, is for the target.
        """
        return self._native.start(lane, write, meta, plan, local.native)

    def wait(self, job: int, deadline_ns: int, cancelled: bytearray | None = None) -> Outcome:
        """Return, once, the end of a job. Runs signal handlers.

        The job is given up at the deadline (``time.monotonic_ns()``), or within 50 ms once the byte ``cancelled`` is
        not zero.
        """
        return Outcome(*self._native.wait(job, deadline_ns, cancelled))

    def give_up(self, job: int) -> Outcome:
        """End a job unless it has ended, and return its end.

        Bytes of a read that still arrive are dropped. A half-sent write costs its lane.
        """
        return Outcome(*self._native.give_up(job))

    def reply(
        self, lane: int, id: int, plan: Plan, mine: Tensors, guards: Sequence[tuple[int, int]], tag: int, *, write: bool
    ) -> None:
        """Receive the bytes of a :class:`WriteAsked` (``write``), or answer a :class:`ReadAsked` with its bytes.

        ``mine`` stays valid until :meth:`quiesce` has returned for ``tag``. The ``guards``, (address, generation), must
        hold before the first byte and after the last. If this raises, the request still needs an answer.
        """
        self._native.reply(lane, id, write, plan, mine.native, guards, tag)
