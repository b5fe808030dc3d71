"""TCP: the owner of the memory sends or receives it by itself, over the data lanes of the link.

Nothing is mapped and no guard page is shared: the target finds the memory by its handle, checks its guards before the
first byte and after the last, and says so.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist._memory.exports import ADDRESS_SPACE, PRIVATE
from llm_datadist._native import Ending, Outcome, check_plan
from llm_datadist._native.lanes import CHANGED, LOST, TORN
from llm_datadist._transport.connection import Capabilities, Connection, MemoryChanged, Transfer, Window
from llm_datadist._transport.lanes import MAX_RUNS, encode_request
from llm_datadist.errors import (
    CacheMismatch,
    LinkError,
    LLMException,
    LLMStatusCode,
    PeerLost,
    TransferAborted,
    TransferFailed,
    code_2_status,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.exports import RegionDescriptor
    from llm_datadist._native import CopyPool, Plan, Tensors
    from llm_datadist._transport.connection import RemoteTensors
    from llm_datadist._transport.lanes import LaneGroup, Lanes

__all__ = ["TcpConnection", "split_plan"]

# Where tensors of a peer are said to be: no process has addresses like these, so nobody takes them for local ones.
_ELSEWHERE: Final = 1 << 62

# Measured: below it another lane costs more than it brings; above it a job that is given up holds its lane up too long.
_MIN_PART_BYTES: Final = 1 << 20
_MAX_PART_BYTES: Final = 16 << 20
# Parts of one transfer on their way for each lane that it uses: one moves while the next is asked for.
_PARTS_PER_LANE: Final = 2

# Calls that run out of time on a lane without a byte of theirs moving, before the lane is given up.
_SILENT_TRANSFERS: Final = 2


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a transfer on its way."""

    job: int
    lane: int
    nbytes: int
    transfer: int


class TcpConnection(Connection):
    """A connection over the data lanes of a link. Threads as in the base class; owns the link's lanes.

    Args:
        lanes: The engine of this process.
        group: The link's lanes; :meth:`begin` begins it.
        regions: What the peer exports.
        writable: True when the peer's private memory may be written (RCA).
        redial: Makes so many new lanes within a deadline, at the end that can dial; None at the other.
    """

    capabilities = Capabilities("tcp", shared_regions=True, private_memory=True, remote_guards=True)

    def __init__(
        self,
        lanes: Lanes,
        group: LaneGroup,
        regions: Iterable[RegionDescriptor],
        *,
        writable: bool,
        reconnect: Callable[[int, Deadline], list[socket.socket]] | None = None,
    ) -> None:
        self._lanes = lanes
        self._group = group
        self._wanted = len(group)
        self._reconnect = reconnect
        self._transfers = itertools.count()
        self._silent: dict[int, set[int]] = {}  # lane -> transfers that had not a byte over it, since it last moved one
        self._mending = threading.Lock()  # held while lanes are dialled, and protects nothing else
        self._windows = {each.region: Window(_ELSEWHERE, each.nbytes, each.writable) for each in regions}
        self._windows[PRIVATE] = Window(_ELSEWHERE, ADDRESS_SPACE, writable)
        super().__init__()

    def begin(self, link: object) -> None:
        """Serve the lanes from now on, in the name of ``link``."""
        self._lanes.begin(self._group, link)

    def reconnect_lanes(self, deadline: Deadline) -> None:
        """Dial the lanes again that were lost, where this end can; one thread at a time does.

        Raises:
            LLMException: It cannot, and no lane is left.
        """
        self._reconnect_lanes(deadline, deadline.remaining())

    def _reconnect_lanes(self, deadline: Deadline, patience: float) -> None:
        """:meth:`reconnect_lanes`, waiting so many seconds for another thread that does."""
        if self._reconnect is None or len(self._group) >= self._wanted:
            return
        if not self._mending.acquire(timeout=patience):
            return
        try:
            missing = self._wanted - len(self._group)
            if missing > 0 and not self.closed:
                self._lanes.add_all(self._group, self._reconnect(missing, deadline))
        except LLMException:
            if not len(self._group):
                raise
        finally:
            self._mending.release()

    def abort(self) -> None:
        """Close at once; calls in progress fail with ``TransferAborted``. Idempotent."""
        super().abort()
        self._lanes.shut(self._group)  # those calls wait for their jobs, which end with the lanes

    def _window(self, region: int) -> Window | None:
        return self._windows.get(region)

    def _guards(self) -> Window:
        raise LinkError("generation: tcp maps no guards, the peer checks them by itself (remote_guards)")

    def _move(
        self,
        plan: Plan,
        local: Tensors,
        remote: RemoteTensors,
        pool: CopyPool | None,
        deadline: Deadline,
        *,
        write: bool,
    ) -> Transfer:
        what = "write" if write else "read"
        check_plan(plan, *((remote, local) if write else (local, remote)))
        if time.monotonic_ns() >= deadline.expires_ns:
            raise deadline.error(f"{what} (0 of {plan.nbytes} bytes done)", "copy")
        started: deque[_Part] = deque()
        try:
            # With a lane left it is not worth waiting for another thread that dials.
            self._reconnect_lanes(deadline, 0 if len(self._group) else deadline.remaining())
            self._run(started, plan, local, remote, deadline, write=write)
        except LinkError as error:
            if self._aborted:
                raise TransferAborted(f"{what}: the tcp connection was aborted", phase="copy") from error
            raise
        finally:
            self._give_up(started, deadline)
        return Transfer(plan.nbytes)

    def _run(
        self,
        started: deque[_Part],
        plan: Plan,
        local: Tensors,
        remote: RemoteTensors,
        deadline: Deadline,
        *,
        write: bool,
    ) -> None:
        """Move a plan in parts, each on the lane with the least to do; those on their way are in ``started``.

        A lane serves one after the other. So that whatever comes later need not wait for the whole of a large
        transfer, only some of its parts are on their way at a time, and all of them keep off one lane.
        """
        start = self._lanes.engine.start_write if write else self._lanes.engine.start_read
        large = plan.nbytes > _MAX_PART_BYTES
        shared = max(1, len(self._group) - large)
        part_bytes = min(max(-(-plan.nbytes // shared), _MIN_PART_BYTES), _MAX_PART_BYTES)
        lane, done, transfer = None, 0, next(self._transfers)
        for part in split_plan(plan, part_bytes, MAX_RUNS):
            if len(started) >= _PARTS_PER_LANE * shared:
                done += self._finish(started, done, plan.nbytes, deadline, write=write)
            # The parts of an ordered plan follow each other on one lane.
            if lane is None or not plan.ordered:
                lane = self._group.take(part.nbytes, deadline, large=large)
            meta = encode_request(remote.handle, remote.extent, part, write=write)
            started.append(_Part(start(lane, meta, part, local), lane, part.nbytes, transfer))
        while started:
            done += self._finish(started, done, plan.nbytes, deadline, write=write)

    def _finish(self, started: deque[_Part], before: int, total: int, deadline: Deadline, *, write: bool) -> int:
        """Wait for the first part, taking it out of ``started``; return its bytes, or raise why it failed."""
        part = started.popleft()
        try:
            outcome = self._lanes.engine.wait(part.job, deadline.expires_ns, deadline.cancelled)
        except BaseException:  # of a signal, which has ended the job
            self._group.put(part.lane, part.nbytes)
            raise
        self._ended(part, outcome, deadline)
        if outcome.ending is Ending.GOOD:
            return outcome.nbytes
        done = before + outcome.nbytes
        if outcome.ending is Ending.TIMEOUT:
            done += self._give_up(started, deadline)
        what = f"{'write' if write else 'read'} ({done} of {total} bytes done)"
        if outcome.ending is Ending.TIMEOUT:
            raise deadline.error(what, "copy")
        untouched = done == 0 and _untouched(outcome) and self._all_untouched(started, deadline)
        raise self._failure(outcome, what, untouched=untouched)

    def _all_untouched(self, started: deque[_Part], deadline: Deadline) -> bool:
        """Return True when every other part was refused too: on another lane one may have been in time."""
        untouched = True
        while started:
            part = started.popleft()
            outcome = self._lanes.engine.wait(part.job, deadline.expires_ns, deadline.cancelled)
            self._ended(part, outcome, deadline)
            untouched &= _untouched(outcome)
        return untouched

    def _give_up(self, started: deque[_Part], deadline: Deadline) -> int:
        """End what is left of a transfer, so that local memory is the caller's again; return the bytes it moved."""
        done = 0
        while started:
            part = started.pop()
            outcome = self._lanes.engine.give_up(part.job)
            self._ended(part, outcome, deadline)
            done += outcome.nbytes
        return done

    def _ended(self, part: _Part, outcome: Outcome, deadline: Deadline) -> None:
        self._group.put(part.lane, part.nbytes)
        if outcome.nbytes:
            self._silent.pop(part.lane, None)
        if outcome.ending is Ending.LOST or outcome.code == LOST:
            self._silent.pop(part.lane, None)
            self._group.discard(part.lane)  # the event says so too, later
        elif outcome.ending is Ending.TIMEOUT and not outcome.nbytes and not deadline.was_cancelled():
            self._suspect(part)

    def _suspect(self, part: _Part) -> None:
        """A network may have lost a connection that both ends still believe in: what is silent twice is not used again.

        Whatever else waits for that lane is tried again on another one.
        """
        transfers = self._silent.setdefault(part.lane, set())
        transfers.add(part.transfer)
        if len(transfers) >= _SILENT_TRANSFERS:
            self._silent.pop(part.lane, None)
            self._lanes.drop(self._group, [part.lane])

    def _failure(self, outcome: Outcome, what: str, *, untouched: bool) -> LLMException:
        if self._aborted:
            return TransferAborted(f"{what}: the tcp connection was aborted", phase="copy")
        if outcome.ending is Ending.TRAILER:
            return TransferFailed(f"{what}: {outcome.text}; the bytes are not to be used", phase="copy")
        if outcome.ending is Ending.REFUSED:
            return _refusal(outcome, what, untouched=untouched)
        # Whether the peer is lost, or only the lane, is for those to find out who know the link.
        return PeerLost(f"{what}: {outcome.text}; {len(self._group)} data lanes are left", phase="copy")

    def _release(self) -> None:
        self._lanes.shut(self._group)


def _untouched(outcome: Outcome) -> bool:
    """Return True for a refusal that came before the first byte."""
    return outcome.ending is Ending.REFUSED and outcome.code != TORN


def _refusal(outcome: Outcome, what: str, *, untouched: bool) -> LLMException:
    """Return the target's refusal as the exception a caller expects."""
    code = code_2_status(outcome.code)  # the engine's own are small numbers, which no status of the interface is
    text = " ".join(f"{what}: the peer refused: {outcome.text}".splitlines())
    if not untouched:
        return TransferFailed(f"{text}; the addressed bytes are undefined", phase="copy")
    if outcome.code in (CHANGED, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        return MemoryChanged(text, phase="copy")
    kind = CacheMismatch if code is LLMStatusCode.LLM_PARAM_INVALID else TransferFailed
    return kind(text, status_code=code, phase="copy")


def split_plan(plan: Plan, part_bytes: int, max_runs: int) -> Iterator[Plan]:
    """Yield parts of a plan that together are the plan, in its order: whole tensors where they are small.

    Args:
        plan: What to cut; a plan of no bytes has no parts.
        part_bytes: Bytes of a part, at most.
        max_runs: Runs of a part, at most.
    """
    if not plan.nbytes:
        return
    per_pair = plan.nbytes // plan.count
    if per_pair <= part_bytes and len(plan.runs) <= max_runs:
        pairs = part_bytes // per_pair
        for begin in range(0, plan.count, pairs):
            yield _part(plan, begin, min(pairs, plan.count - begin), plan.runs, per_pair)
        return
    slices = list(_slices(plan.runs, part_bytes, max_runs))
    for pair in range(plan.count):
        for runs, nbytes in slices:
            yield _part(plan, pair, 1, runs, nbytes)


def _part(plan: Plan, begin: int, count: int, runs: NDArray[np.uint64], per_pair: int) -> Plan:
    return plan.replace(
        dst_first=plan.dst_first + begin,
        src_first=plan.src_first + begin,
        count=count,
        runs=runs,
        nbytes=count * per_pair,
    )


def _slices(runs: NDArray[np.uint64], part_bytes: int, max_runs: int) -> Iterator[tuple[NDArray[np.uint64], int]]:
    """Yield (runs, bytes) of consecutive pieces of one tensor's runs; long runs are cut."""
    ends = np.cumsum(runs[:, 2].astype(np.int64))
    starts = ends - runs[:, 2].astype(np.int64)
    at, total = 0, int(ends[-1])
    while at < total:
        first = int(np.searchsorted(ends, at, side="right"))
        last = min(int(np.searchsorted(starts, at + part_bytes, side="left")), first + max_runs)
        upto = min(at + part_bytes, int(ends[last - 1]))
        piece = runs[first:last].copy()
        skipped, cut = np.uint64(at - int(starts[first])), np.uint64(int(ends[last - 1]) - upto)
        piece[0] += np.array([skipped, skipped, 0], np.uint64)
        piece[0, 2] -= skipped
        piece[-1, 2] -= cut
        yield piece, upto - at
        at = upto
