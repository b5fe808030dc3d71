"""Slots for the agents of one link: an agent exposes memory to the peer, or moves bytes to and from the peer's memory.

Threads: callers of transfers and the worker's thread take turns at an agent. A thread that frees memory waits for no
turn.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist._transport.nixl.agent import HOST, Agent, spans_of
from llm_datadist._transport.nixl.bindings import NixlFailed
from llm_datadist.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from llm_datadist._native.plan import PlanSide
    from llm_datadist._transport.nixl.messages import Address, Ask, Ready
    from llm_datadist._transport.transport import Context

_MOST_GPUS: Final = 64  # of one process, as in device.hpp


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

    def expose(self, turn: Callable[[], float], side: PlanSide, known: str) -> tuple[Address, bytes, bytes]:
        """Register memory for the peer, and count one user until :meth:`withdraw`.

        Return address, bases and offsets as in :class:`Ask`; ``known``: the receiver that the peer's sender knows.
        """
        (bases, offsets), device = _runs_of(side), side.tensors.place.device
        with self.using(turn) as agent:
            agent.cover(bases, side.tensors.extent, device)
            address = agent.address(known)
            self.users += 1
        if device != HOST:
            bases = np.append(bases, np.uint64(device))
        return address, bases.astype("<u8").tobytes(), offsets.astype("<u8").tobytes()

    def move(self, turn: Callable[[], float], side: PlanSide, there: Ask | Ready, moved: Callable[[int], None]) -> str:
        """Write a source of this side to the peer's receiver, or read a destination from it.

        Return how the agent knows that receiver now; empty, and nothing moved, if it needs the metadata. An error
        during the move ends the agent, so that nothing touches the memory.
        """
        (bases, offsets), nbytes = _runs_of(side), side.plan.runs[:, 2]
        device = there.bases[8 * len(bases) :]
        theirs = (
            _numbers(there.bases[: 8 * len(bases)], len(bases), "bases"),
            _numbers(there.offsets, len(offsets), "offsets"),
        )
        devices = side.tensors.place.device, int(_numbers(device, 1, "a GPU")[0]) if device else HOST
        if devices[1] >= _MOST_GPUS:
            raise ProtocolError(f"nixl: the peer's memory lies in GPU {devices[1]}; must be below {_MOST_GPUS}")
        assert there.receiver is not None, "the server has checked it"
        verb = "READ" if side.is_dst else "WRITE"
        with self.using(turn) as agent:
            try:
                if not agent.load(there.receiver):
                    return ""
                agent.cover(bases, side.tensors.extent, devices[0])
                spans = spans_of(bases, offsets, nbytes, devices[0]), spans_of(*theirs, nbytes, devices[1])
                agent.move(verb, there.receiver.name, *spans, turn, moved, devices)
            except BaseException:
                self.end()
                raise
        return there.receiver.known_as

    def withdraw(self, name: str, *, end: bool) -> None:
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


def _runs_of(side: PlanSide) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return tensor addresses and run offsets of one side of a plan."""
    first, column = (side.plan.dst_first, 0) if side.is_dst else (side.plan.src_first, 1)
    return side.tensors.bases[first : first + side.plan.count], side.plan.runs[:, column]


def _numbers(data: bytes, count: int, what: str) -> NDArray[np.uint64]:
    if len(data) != 8 * count:
        raise ProtocolError(f"nixl: {len(data)} bytes of {what}, {count} numbers are needed")
    return np.frombuffer(data, "<u8").astype(np.uint64)
