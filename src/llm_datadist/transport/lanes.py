"""The data lanes of one process: which lane belongs to which link, and who answers what comes in on them."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llm_datadist.errors import LLMException, LLMStatusCode, ParamError, PeerLost
from llm_datadist.log import logger
from llm_datadist.native import LaneEngine, LaneLost, ReadAsked, Served, WriteAsked
from llm_datadist.transport.lanerequest import decode_request

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Iterable, Sequence

    from llm_datadist.native import LaneEvent, Tensors
    from llm_datadist.transport.lanerequest import LaneRequest

__all__ = ["LaneGrant", "LaneGroup", "LaneHandler", "Lanes"]


@dataclass(frozen=True, slots=True)
class LaneGrant:
    """The target's answer to a request: this memory, as long as these guards hold.

    Attributes:
        tensors: All tensors of what the handle names, valid until :meth:`Lanes.quiesce` has returned for ``tag``.
        guards: (address, generation) pairs, checked before the first byte and after the last.
        tag: What ``quiesce`` will call this memory.
    """

    tensors: Tensors
    guards: Sequence[tuple[int, int]] = ()
    tag: int = 0


class LaneHandler(Protocol):
    """What the owner of the memory does for lanes. Everything is called on the loop's thread and must be short."""

    def on_read(self, link: object, request: LaneRequest) -> LaneGrant:
        """Return what the peer of ``link`` may read; any ``LLMException`` refuses it, with its status and text."""

    def on_write(self, link: object, request: LaneRequest) -> LaneGrant:
        """Return what the peer of ``link`` may write; as :meth:`on_read`."""

    def on_served(self, link: object, nbytes: int) -> None:
        """Take note that a granted request has ended: ``nbytes`` moved, 0 if it failed."""

    def on_lane_lost(self, link: object, left: int, reason: str) -> None:
        """Take note that a lane of ``link`` ended by itself and ``left`` are there still."""


class LaneGroup:
    """The lanes of one link. Any thread; made and ended by :class:`Lanes`.

    Attributes:
        link: Whose they are, opaque here.
    """

    def __init__(self, link: object) -> None:
        self.link = link
        self._lock = threading.Lock()  # protects the two below
        self._loads: dict[int, int] = {}  # lane -> bytes of our jobs on it
        self._closed = False

    def __len__(self) -> int:
        """Return how many lanes there are now."""
        return len(self._loads)

    @property
    def closed(self) -> bool:
        """True once the link's lanes were closed."""
        return self._closed

    def take(self, nbytes: int) -> int:
        """Return the lane with the least to do, and note ``nbytes`` more on it.

        Raises:
            PeerLost: There is none left.
        """
        with self._lock:
            lane = min(self._loads, key=self._loads.__getitem__, default=None)
            if lane is not None:
                self._loads[lane] += nbytes
        if lane is None:
            raise PeerLost("no data lane to the peer is left; link again", phase="copy")
        return lane

    def put(self, lane: int, nbytes: int) -> None:
        """Note that so many bytes of a lane have ended, and whether they moved does not matter."""
        with self._lock:
            if lane in self._loads:
                self._loads[lane] -= nbytes

    def add(self, lane: int) -> bool:
        """Take a new lane in; False when the group was closed meanwhile."""
        with self._lock:
            if not self._closed:
                self._loads[lane] = 0
            return not self._closed

    def discard(self, lane: int) -> None:
        """Take a lane out that has ended."""
        with self._lock:
            self._loads.pop(lane, None)

    def close(self) -> list[int]:
        """Take every lane out, for good, and return them."""
        with self._lock:
            self._closed = True
            lanes, self._loads = list(self._loads), {}
            return lanes

    def __repr__(self) -> str:
        return f"<LaneGroup {len(self)} lanes{', closed' if self._closed else ''}>"


class Lanes:
    """Owns the engine, its threads and all lanes until :meth:`close`. Requests are answered on the loop's thread.

    Args:
        threads: Threads that move bytes.
        handler: Who answers what peers ask.
    """

    def __init__(self, threads: int, handler: LaneHandler) -> None:
        self.engine = LaneEngine(threads)
        self._handler = handler
        self._pid = os.getpid()
        # Single dict operations only: callers add, the loop's thread looks up.
        self._groups: dict[int, LaneGroup] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer requests from now on. Called once, on the loop's thread."""
        self._loop = loop
        loop.add_reader(self.engine.event_fd(), self._on_events)

    def stop(self) -> None:
        """Answer no more. Called on the loop's thread, before :meth:`close`; idempotent."""
        if self._loop is not None:
            self._loop.remove_reader(self.engine.event_fd())
            self._loop = None

    def close(self) -> None:
        """Lose every lane and join the threads: no memory is touched any more. Idempotent, any thread."""
        self.engine.close()
        self._groups.clear()

    def open(self, link: object, socks: Iterable[socket.socket] = ()) -> LaneGroup:
        """Return the group of a new link, with lanes over these sockets, which are taken over."""
        group = LaneGroup(link)
        for sock in socks:
            self.add(group, sock)
        return group

    def add(self, group: LaneGroup, sock: socket.socket) -> None:
        """Add a lane to a link over a connected socket, which is taken over."""
        lane = self.engine.reserve_lane()
        # Before its first event can come.
        self._groups[lane] = group
        self.engine.attach_lane(lane, sock.detach())
        if not group.add(lane):
            self.drop(group, [lane])
        elif lane not in self._groups:  # lost already
            group.discard(lane)

    def shut(self, group: LaneGroup) -> None:
        """Close all lanes of a link: its jobs fail, and no memory is touched for it any more. Idempotent."""
        if self._pid == os.getpid():  # a forked child's copies go with the engine, and the lock may be held there
            self.drop(group, group.close())

    def drop(self, group: LaneGroup, lanes: Iterable[int]) -> None:
        """Close some lanes of a link."""
        for lane in lanes:
            group.discard(lane)
            self._groups.pop(lane, None)
            self.engine.drop_lane(lane)

    def quiesce(self, tag: int) -> None:
        """Stop all use of memory granted under ``tag``; none of it is touched any more when this returns.

        Advance its guards before: they stop what is granted later.
        """
        self.engine.quiesce(tag)

    # Events, on the loop's thread

    def _on_events(self) -> None:
        for event in self.engine.poll_events():
            group = self._groups.get(event.lane)
            if group is not None:  # else we dropped it
                self._dispatch(group, event)

    def _dispatch(self, group: LaneGroup, event: LaneEvent) -> None:
        try:
            match event:
                case ReadAsked() | WriteAsked():
                    self._answer(group, event)
                case Served():
                    self._handler.on_served(group.link, event.nbytes)
                case LaneLost():
                    self._groups.pop(event.lane, None)
                    group.discard(event.lane)  # after the line above: see add()
                    self._handler.on_lane_lost(group.link, len(group), event.reason)
        except Exception:  # noqa: BLE001 (a bug in a handler must neither end the loop nor keep a peer waiting)
            logger.exception("lane %d: a handler failed on %s", event.lane, type(event).__name__)
            if isinstance(event, ReadAsked | WriteAsked):
                self.engine.refuse(event.lane, event.id, LLMStatusCode.LLM_FAILED, "the target failed; see its log")

    def _answer(self, group: LaneGroup, event: ReadAsked | WriteAsked) -> None:
        try:
            request = decode_request(event.meta)
            write = isinstance(event, WriteAsked)
            handle = self._handler.on_write if write else self._handler.on_read
            grant = handle(group.link, request)
            if request.extent != grant.tensors.extent:
                raise ParamError(f"the tensors have {grant.tensors.extent} bytes, not {request.extent}")
            give = self.engine.accept_write if write else self.engine.serve_read
            give(event.lane, event.id, request.plan, grant.tensors, grant.guards, grant.tag)
        except LLMException as error:
            self.engine.refuse(event.lane, event.id, _wire_code(error), " ".join(str(error).splitlines()))

    def __repr__(self) -> str:
        return f"<Lanes {len(self._groups)} lanes, {self.engine.threads} threads>"


def _wire_code(error: LLMException) -> int:
    """Return the status as u32; success is not among what can be refused with."""
    return int(error.status_code) & 0xFFFFFFFF or int(LLMStatusCode.LLM_FAILED)
