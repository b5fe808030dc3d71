"""The memory of another process of this host, mapped here after it has been checked; and who that process is."""

from __future__ import annotations

import errno
import os
import socket
import struct
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Self

from llm_datadist._memory.guards import read_cookie
from llm_datadist._memory.segment import SharedSegment
from llm_datadist._memory.write_intents import WRITER_PAGE_BYTES, IntentWriter
from llm_datadist._native import readable
from llm_datadist._transport.connection import Connection, Window
from llm_datadist.errors import LinkError, LinkRefused, LLMException, StateError

if TYPE_CHECKING:
    from llm_datadist._memory.write_intents import WriterPage
    from llm_datadist._transport.samehost import Hello, Offer, Packet

__all__ = ["MetConnection", "PeerMemory", "PeerProcess", "SharedPeer", "map_peer", "peer_credentials"]

# Linux 6.5, asm-generic/socket.h: the peer's pidfd itself, where pidfd_open on a pid may meet a recycled one.
_SO_PEERPIDFD: Final = 77
_CREDENTIALS: Final = struct.Struct("=iII")


class PeerMemory:
    """What a peer on this host exports, mapped here. Owns the mappings and the pidfd until :meth:`close`.

    Owns the page too in which the peer announces what it writes here: that goes when the peer is done writing.

    Used by one owner, a link or its connection; :meth:`alive` from any thread as long as it is not closed.

    Attributes:
        regions: The peer's exported segments by region id; writable where the peer lets us.
        guards: The peer's guard table, read-only.
        announcer: Where this process announces what it writes there; None where it may not.
        pid: The peer's process as seen from our pid namespace; 0 when it is not visible from it.
        uid: Its effective user.
        pidfd: Readable once the process has ended; -1 when closed.
        cookie: 16 bytes read from the mapped guard table's header.
        incarnation: What the peer says its incarnation is; to be compared with the control channel's.
    """

    def __init__(
        self,
        guards: SharedSegment,
        regions: dict[int, SharedSegment],
        process: PeerProcess,
        *,
        cookie: bytes,
        incarnation: bytes,
        intent_writer: IntentWriter | None = None,
        page: WriterPage | None = None,
    ) -> None:
        self.guards = guards
        self.regions = regions
        self.intent_writer = intent_writer
        self._page = page
        self.cookie = cookie
        self.incarnation = incarnation
        self.pid = process.pid
        self.uid = process.uid
        self._owner = os.getpid()
        self.pidfd = process.take_pidfd()
        if page is not None:
            page.belongs_to(self.pid, self.pidfd)

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self.pidfd < 0

    def alive(self) -> bool:
        """Return False once the peer's process has ended, reaped or not. False when closed."""
        pidfd = self.pidfd
        return pidfd >= 0 and not readable(pidfd)

    def introduce(self, who: str, cluster_id: int) -> None:
        """Say who the peer is, for messages about what it writes here."""
        if self._page is not None:
            self._page.introduce(who, cluster_id)

    def settle(self) -> None:
        """The peer has been given its page: keep no descriptor of it."""
        if self._page is not None and self._page.segment is not None:
            self._page.segment.close_descriptor()

    def duplicate_pidfd(self) -> int | None:
        """Return a new descriptor of the peer's process, the caller's to close; None when closed."""
        try:
            return os.dup(self.pidfd)
        except OSError:
            return None  # closed, perhaps just now: -1 is no descriptor either

    def close(self) -> None:
        """Unmap everything and close the pidfd; arrays over the memory keep it mapped. Idempotent."""
        if self.closed:
            return
        pidfd, self.pidfd = self.pidfd, -1
        if self.intent_writer is not None:
            self.intent_writer.close()
        if self._page is None:
            os.close(pidfd)
        else:
            self._page.retire()  # with the pidfd: a peer that is in the middle of a write may be awaited for long
        self.guards.close()
        for segment in self.regions.values():
            segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "pidfd", -1) >= 0:
            if os.getpid() == self._owner:
                warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self.regions)} regions mapped"
        return f"<PeerMemory of pid {self.pid}: {state}>"


class PeerProcess:
    """Who is at the other end of a socket. Owns the pidfd until somebody takes it. Used by one thread.

    Opened before the last packet that the peer still has to wait for or to send, its pidfd cannot be that of a
    stranger with a recycled pid: the process was alive afterwards.

    Raises:
        LinkRefused: Another user's process, or one that has ended.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.pid, self.uid = peer_credentials(sock)
        self._pidfd = _open_pidfd(sock, self.pid)

    def take_pidfd(self) -> int:
        """Return the pidfd; the caller owns it from now on."""
        pidfd, self._pidfd = self._pidfd, -1
        return pidfd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._pidfd >= 0:
            os.close(self.take_pidfd())


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the peer's (pid, uid).

    Raises:
        LinkRefused: It is not a process of our user.
    """
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise LinkRefused(f"same-host peer (pid {pid}) runs as uid {uid}, this process as uid {os.geteuid()}")
    return pid, uid


def map_peer(hello: Hello, packet: Packet, process: PeerProcess, offer: Offer) -> PeerMemory:
    """Check and map what a hello announces, out of the descriptors that came with it; takes the offer's page.

    Raises:
        LinkRefused: Their number, a size or a seal is not as announced, or the cookie is another one. Everything
            that was mapped is unmapped; descriptors not reached yet stay in the packet.
    """
    if len(packet.fds) != hello.descriptors:
        raise LinkRefused(
            f"same-host peer (pid {process.pid}) sent {len(packet.fds)} descriptors for a guard table and "
            f"{len(hello.regions)} regions"
        )
    if hello.writers_nbytes not in (0, WRITER_PAGE_BYTES):
        raise LinkRefused(f"same-host peer (pid {process.pid}) has a page for writers of {hello.writers_nbytes} bytes")
    with ExitStack() as undo:
        guards = undo.enter_context(_attach(packet, "guards", hello.guards_nbytes, writable=False))
        intent_writer = _intent_writer(packet) if hello.writers_nbytes else None
        regions = {
            described.region: undo.enter_context(
                _attach(packet, described.name, described.nbytes, writable=described.writable)
            )
            for described in hello.regions
        }
        cookie = read_cookie(guards)
        if cookie != hello.cookie:
            raise LinkRefused(f"same-host peer (pid {process.pid}): the mapped guard table has another cookie")
        undo.pop_all()
    return PeerMemory(
        guards,
        regions,
        process,
        cookie=cookie,
        incarnation=hello.incarnation,
        intent_writer=intent_writer,
        page=offer.take_page(),
    )


def _intent_writer(packet: Packet) -> IntentWriter:
    # The array keeps the mapping: nobody needs the segment itself.
    with _attach(packet, "writers", WRITER_PAGE_BYTES, writable=True) as segment:
        return IntentWriter(segment.view())


def _attach(packet: Packet, name: str, nbytes: int, *, writable: bool) -> SharedSegment:
    try:
        return SharedSegment.attach(packet.take(), nbytes, writable=writable)
    except LLMException as error:
        raise LinkRefused(f"same-host peer: its memory {name!r} is not acceptable: {error}") from error


def _open_pidfd(sock: socket.socket, pid: int) -> int:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise LinkRefused(f"same-host peer (pid {pid}) has ended: {error}") from error
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise LinkRefused(f"same-host peer (pid {pid}) has ended, or is not in our pid namespace: {error}") from error


def writers_of(peer: PeerMemory | SharedPeer) -> IntentWriter:
    """Return where this process announces what it writes at the peer.

    Raises:
        LinkError: The peer has not let us: it has no remote cache access (RCA).
    """
    if peer.intent_writer is None:
        raise LinkError(f"write: pid {peer.pid} lets nobody write: it has no remote cache access (RCA)", phase="copy")
    return peer.intent_writer


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
        self.intent_writer = memory.intent_writer
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

    def _intent_writer(self, *, write: bool) -> IntentWriter | None:
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
