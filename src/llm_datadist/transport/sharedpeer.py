"""One peer's memory for several connections of its link: mapped once, given back by the last; and what these share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.errors import LinkError, StateError
from llm_datadist.transport.base import Connection, Window

if TYPE_CHECKING:
    from llm_datadist.memory.writers import Announcer
    from llm_datadist.transport.peermemory import PeerMemory

__all__ = ["MetConnection", "SharedPeer"]


def writers_of(peer: PeerMemory | SharedPeer) -> Announcer:
    """Return where this process announces what it writes at the peer.

    Raises:
        LinkError: The peer has not let us: it has no remote cache access (RCA).
    """
    if peer.announcer is None:
        raise LinkError(f"write: pid {peer.pid} lets nobody write: it has no remote cache access (RCA)", phase="copy")
    return peer.announcer


class SharedPeer:
    """One holder's share of a :class:`PeerMemory`, which is closed with the last share of it.

    Constructed it is the first share, and owns the memory. Each share has one holder, who closes it; different shares
    may be used and closed by different threads at once.

    Attributes:
        regions: As in :class:`PeerMemory`, like all below.
        guards: The peer's guard table, read-only.
        announcer: Where this process announces what it writes there; None where it may not.
        pid: The peer's process as seen from our pid namespace; 0 when it is not visible from it.
        uid: Its effective user.
        cookie: 16 bytes read from the mapped guard table's header.
        incarnation: What the peer says its incarnation is.
    """

    def __init__(self, memory: PeerMemory, *, _others: list[None] | None = None) -> None:
        self._memory: PeerMemory | None = memory
        # One item for every open share but one. Each use is one atomic list operation: no lock that a fork, or a
        # connection's __del__, could meet while it is held.
        self._others: list[None] = [] if _others is None else _others
        self.regions = memory.regions
        self.guards = memory.guards
        self.announcer = memory.announcer
        self.pid = memory.pid
        self.uid = memory.uid
        self.cookie = memory.cookie
        self.incarnation = memory.incarnation

    def share(self) -> SharedPeer:
        """Return one more share.

        Raises:
            StateError: This one is closed: the memory may be gone.
        """
        if self._memory is None:
            raise StateError(f"share: {self!r} is closed")
        self._others.append(None)
        return SharedPeer(self._memory, _others=self._others)

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._memory is None

    def alive(self) -> bool:
        """Return False once the peer's process has ended, reaped or not. False when closed."""
        memory = self._memory
        return memory is not None and memory.alive()

    def introduce(self, who: str, cluster_id: int) -> None:
        """Say who the peer is, for messages about what it writes here."""
        if self._memory is not None:
            self._memory.introduce(who, cluster_id)

    def duplicate_pidfd(self) -> int | None:
        """Return a new descriptor that is readable once the peer's process has ended; None when closed."""
        memory = self._memory
        return None if memory is None else memory.duplicate_pidfd()

    def close(self) -> None:
        """Give the share back, and with the last one the memory. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        try:
            self._others.pop()
        except IndexError:
            memory.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._others) + 1} shares open"
        return f"<SharedPeer of pid {self.pid}: {state}>"


class MetConnection(Connection):
    """A connection to a process that was met on this host: shm and cma. Threads as in the base class; owns its share.

    Args:
        peer: The share, or the memory itself.
    """

    def __init__(self, peer: PeerMemory | SharedPeer) -> None:
        self._peer = peer
        guards = peer.guards.view()
        self._guard_window: Window | None = Window(guards.ctypes.data, guards.nbytes, writable=False, memory=guards)
        super().__init__()

    def peer_ended(self) -> bool:
        """Return True once the kernel says so: a child that the peer forked may still hold its sockets open."""
        return not self._peer.alive()

    def introduce(self, who: str, cluster_id: int) -> None:
        """Learn who the peer is."""
        self._peer.introduce(who, cluster_id)

    def _announcer(self, *, write: bool) -> Announcer | None:
        # Readers fail by the generation, nobody waits for them.
        return writers_of(self._peer) if write else None

    def _duplicate_pidfd(self) -> int | None:
        return self._peer.duplicate_pidfd()

    def _guards(self) -> Window:
        window = self._guard_window
        if window is None:
            raise LinkError("the connection is closed; link again", phase="copy")
        return window

    def _release(self) -> None:
        self._guard_window = None
        self._peer.close()
