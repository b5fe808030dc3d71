"""The transport tcp: the owner of the memory sends or receives it over the data lanes of the link.

Nothing is mapped. The target finds the memory by its handle, and checks its guards before the first byte and after the
last. The side that dialled the link dials lost lanes again.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from llm_datadist._native import (
    MAX_REQUEST_RUNS,
    Ending,
    LaneLoad,
    Outcome,
    encode_request,
    usable_cpus,
)
from llm_datadist._native.lane_engine import LOST, TORN
from llm_datadist._native.plan import split_plan
from llm_datadist._native.public_call import elsewhere
from llm_datadist._transport.address import read_exactly
from llm_datadist._transport.choose import Verdict
from llm_datadist._transport.connection import Capabilities, ServedConnection, Transfer
from llm_datadist._transport.moves import ONE_REQUEST_BYTES, is_one_request, refusal
from llm_datadist._transport.tcp.lanes import (
    LANE_PREAMBLE,
    TOKEN_BYTES,
    LaneGroup,
    Lanes,
    LaneSocket,
    accept_lane,
    check_lane,
    dial_lanes,
)
from llm_datadist._transport.transport import Context, Meeting, Transport
from llm_datadist.errors import (
    DeviceError,
    LinkRefused,
    PeerLost,
    TransferFailed,
)

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist._deadline import Deadline


# Measured: a larger job that is given up blocks its lane too long.
_MAX_PART_BYTES: Final = 16 << 20
# Parts of one transfer in progress for each lane that it uses: one moves while the next is requested.
_PARTS_PER_LANE: Final = 2

# Endings that the owner has reported.
_ANSWERED: Final = (Ending.GOOD, Ending.REFUSED, Ending.TRAILER)

#: One thread fills a network of 100 Gb/s; copies of this process need the other cores.
_MAX_THREADS: Final = 4
_CAPABILITIES: Final = Capabilities("tcp", shared_regions=True, non_pool_memory=True, remote_guards=True)


class TcpTransport(Transport):
    """The transport; the listener offers a token for lanes, which the dialer dials. Owns: the lanes of all links."""

    name = "tcp"
    capabilities = _CAPABILITIES
    beside = True
    preamble = LANE_PREAMBLE

    def __init__(self, context: Context) -> None:
        self.lanes = Lanes(min(_MAX_THREADS, usable_cpus()), context.owner)

    def offer(self, meeting: Meeting) -> bytes:
        if meeting.dialled:
            return b""
        token = secrets.token_bytes(TOKEN_BYTES)
        self.lanes.open(token=token).secret = meeting.secret
        return token

    def judge(self, meeting: Meeting) -> Verdict:
        if meeting.dialled and len(meeting.theirs.get(self.name, b"")) != TOKEN_BYTES:
            return Verdict(False, "the peer takes no data lanes")
        reach = "data lanes reach every peer" if meeting.forced is None else "data lanes, as llm.Transport asks"
        return Verdict(True, reach)

    def lacks(self, meeting: Meeting) -> str:
        """At the listener: name the lanes that the dialer has left out."""
        return "" if meeting.dialled or len(self._group(meeting)) else "dialled no data lanes"

    def connect(self, meeting: Meeting) -> TcpConnection:
        writable = meeting.exports.writable
        if not meeting.dialled:
            return TcpConnection(self._group(meeting), writable=writable)
        assert meeting.deadline is not None, "a dial has a deadline"
        if not (verdict := self.judge(meeting)).possible:  # a transport that falls back on lanes has not asked
            raise LinkRefused(verdict.reason)
        dial = partial(dial_lanes, meeting.address, meeting.theirs[self.name], secret=meeting.secret)
        group = self.lanes.open(dial(None, meeting.deadline))
        return TcpConnection(group, writable=writable, reconnect=dial)

    def _group(self, meeting: Meeting) -> LaneGroup:
        return self.lanes.group(meeting.mine[self.name])

    def forget(self, meeting: Meeting) -> None:
        self._group(meeting).close()

    async def admit(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> Callable[[], None]:
        """Check a data lane of a link that is established, or soon will be."""
        token = await read_exactly(loop, sock, TOKEN_BYTES, "lane greeting")
        lane = await check_lane(loop, sock, self.lanes.find(token).secret)
        group = self.lanes.find(token)  # again: its link may have ended since, or have all its lanes
        await accept_lane(loop, sock)
        return partial(self.lanes.add, group, lane)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lanes.start(loop)

    def stop(self) -> None:
        self.lanes.stop()

    def quiesce(self, tag: int, private: NDArray[np.uint64] | None) -> None:
        self.lanes.quiesce(tag)

    def close(self) -> None:
        self.lanes.close()

    abandon = close


class TcpConnection(ServedConnection):
    """Connection over the data lanes of a link, which it owns."""

    capabilities = _CAPABILITIES

    def __init__(
        self,
        group: LaneGroup,
        *,
        writable: bool,
        reconnect: Callable[[int, Deadline], list[LaneSocket]] | None = None,
    ) -> None:
        self.group = group
        self.recovery: LaneGroup = group
        if reconnect is not None:
            group.reconnect, group.wanted = reconnect, len(group)
        super().__init__(writable=writable)

    def begin(self, link: object) -> None:
        self.group.begin(link)

    @property
    def served(self) -> tuple[int, int]:
        return self.group.replies.moved

    def abort(self) -> None:
        super().abort()
        self.group.close()  # running calls wait for their jobs, which end with the lanes

    def _move(self, transfer: Transfer) -> None:
        group, plan = self.group, transfer.plan
        transfer.prepare()
        if time.monotonic_ns() >= transfer.deadline.expires_ns:  # a fallback begins late
            raise transfer.timeout(0)
        if len(group.loads) < group.wanted:
            # With a lane left, waiting for another thread that dials is not worth it.
            group.redial(transfer.deadline, wait=not group.loads)
        if is_one_request(plan):
            _move_at_once(group, transfer)
        else:
            _LaneTransfer(group, transfer).run()

    def _release(self) -> None:
        self.group.close()


class _Part(NamedTuple):
    job: int
    lane: int
    nbytes: int


def _move_at_once(group: LaneGroup, transfer: Transfer) -> None:
    """Move a small transfer by one native call."""
    plan, remote, write = transfer.plan, transfer.remote, transfer.write
    local, deadline, engine = transfer.local, transfer.deadline, group.owner.engine
    lane = group.choose(deadline)
    with LaneLoad(group.loads, lane, plan.nbytes, group.doubts if write else None) as load:
        end = engine.move(
            lane, write, remote.handle, remote.extent, plan, local.native, deadline.expires_ns, deadline.cancelled
        )
        load.answered = end[0] in _ANSWERED
    if end[0] is Ending.GOOD:
        group.moved(lane)
    else:
        _LaneTransfer(group, transfer).finish_only(lane, Outcome(*end))


class _LaneTransfer:
    """One transfer, in parts, each on the lane with the smallest load. Threads: the caller's.

    A lane serves its parts in order. So that other transfers wait less for a large one, few parts of it are in progress
    at a time, and none on the oldest of several lanes.
    """

    def __init__(self, group: LaneGroup, transfer: Transfer) -> None:
        self._engine = group.owner.engine
        self._group = group
        self._transfer = transfer
        self._deadline = transfer.deadline
        self._started: deque[_Part] = deque()
        self._done = 0  # bytes

    @elsewhere
    def run(self) -> None:
        """Move every part. Once this returns or raises, nothing touches local memory."""
        plan, remote, write = self._transfer.plan, self._transfer.remote, self._transfer.write
        large = plan.nbytes > _MAX_PART_BYTES
        shared = max(1, len(self._group) - 1 if large else len(self._group))
        part_bytes = min(max(-(-plan.nbytes // shared), ONE_REQUEST_BYTES), _MAX_PART_BYTES)
        lane = None
        try:
            for part in split_plan(plan, part_bytes, MAX_REQUEST_RUNS):
                if len(self._started) >= _PARTS_PER_LANE * shared:
                    self._judge(self._wait_for_first())
                meta = encode_request(remote.handle, remote.extent, part, write)
                # One lane keeps the parts of an ordered plan in order.
                lane = self._group.take(part.nbytes, self._deadline, large=large, kept=lane if plan.ordered else None)
                try:
                    job = self._engine.start(lane, meta, part, self._transfer.local, write=write)
                except BaseException:
                    self._group.put(lane, part.nbytes)
                    raise
                self._started.append(_Part(job, lane, part.nbytes))
            while self._started:
                self._judge(self._wait_for_first())
        finally:
            self._give_up()

    @elsewhere
    def finish_only(self, lane: int, outcome: Outcome) -> None:
        """Account for the only part, and raise its error."""
        self._ended(_Part(0, lane, 0), outcome)
        self._judge(outcome)

    def _judge(self, outcome: Outcome) -> None:
        if outcome.ending is Ending.GOOD:
            return
        if outcome.ending is Ending.DEVICE:
            text = f"{self._transfer.progress(self._done)}: {outcome.text}; the bytes are not to be used"
            raise DeviceError(text, code=-1 if outcome.code else 0, phase="copy")
        if outcome.ending is Ending.TIMEOUT:
            self._give_up()
            raise self._transfer.timeout(self._done)
        progress, untouched = self._transfer.progress(self._done), self._done == 0 and _untouched(outcome)
        if untouched:
            while self._started:  # a part on another lane may have moved before the memory changed
                untouched &= _untouched(self._wait_for_first())
        if outcome.ending is Ending.TRAILER:
            raise TransferFailed(f"{progress}: {outcome.text}; the bytes are not to be used", phase="copy")
        if outcome.ending is Ending.REFUSED:
            raise refusal(outcome.code, outcome.text, progress, untouched=untouched)
        # The caller, which has the link, finds out whether the peer or only the lane is lost.
        raise PeerLost(f"{progress}: {outcome.text}; {len(self._group)} data lanes are left", phase="copy")

    def _wait_for_first(self) -> Outcome:
        part = self._started.popleft()
        try:
            outcome = self._engine.wait(part.job, self._deadline.expires_ns, self._deadline.cancelled)
        except BaseException:  # of a signal, which has ended the job
            self._group.put(part.lane, part.nbytes, doubtful=self._transfer.write)
            raise
        self._ended(part, outcome)
        return outcome

    def _give_up(self) -> None:
        while self._started:
            part = self._started.pop()
            self._ended(part, self._engine.give_up(part.job))

    def _ended(self, part: _Part, outcome: Outcome) -> None:
        self._done += outcome.nbytes
        doubtful = self._transfer.write and outcome.ending not in _ANSWERED
        self._group.put(part.lane, part.nbytes, moved=outcome.nbytes > 0, doubtful=doubtful)
        if outcome.ending is Ending.LOST or outcome.code == LOST:
            self._group.discard(part.lane)  # the event follows later
        elif outcome.ending is Ending.TIMEOUT and not outcome.nbytes and not self._deadline.was_cancelled():
            self._group.suspect(part.lane)


def _untouched(outcome: Outcome) -> bool:
    return outcome.ending is Ending.REFUSED and outcome.code != TORN
