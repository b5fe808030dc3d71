"""The memory of another process of this host, checked and mapped here; who that process is, and whether it lives."""

from __future__ import annotations

import errno
import os
import socket
import struct
import warnings
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from llm_datadist._checks import HERE, is_loopback
from llm_datadist._memory.guards import read_cookie
from llm_datadist._memory.segment import SharedSegment
from llm_datadist._memory.write_intents import IntentPage, IntentWriter
from llm_datadist._native import WRITER_PAGE_BYTES, readable
from llm_datadist._native.signals import hold_signals
from llm_datadist._transport.connection import Connection, Watch, Window
from llm_datadist.errors import LinkError, LinkRefused, LLMException, StateError

if TYPE_CHECKING:
    from llm_datadist._transport.rendezvous import MemoryOffer, Packet, RendezvousHello

# Linux 6.5, asm-generic/socket.h: the peer's pidfd itself, where pidfd_open on a pid may meet a recycled one.
_SO_PEERPIDFD: Final = 77
_CREDENTIALS: Final = struct.Struct("=iII")
_PROC: Final = Path("/proc")
_OVERFLOW_UID: Final = _PROC / "sys/kernel/overflowuid"
_USUAL_OVERFLOW_UID: Final = 65534
_TCP_SOCKETS: Final = _PROC / "net/tcp", _PROC / "net/tcp6"
#: How ``::ffff:`` begins an address there: words of 32 bits in the byte order of this host.
_IPV4_IN_IPV6: Final = "{:08X}{:08X}{:08X}".format(*struct.unpack("=3I", bytes(10) + b"\xff\xff"))
_ESTABLISHED: Final = "01"


class PeerProcess(AbstractContextManager["PeerProcess"]):
    """The process at the other end of a socket, of an admitted user and alive. Owns its pidfd until that is taken.

    Opened before the last packet that the peer still has to wait for or to send, its pidfd cannot be that of a
    stranger with a recycled pid: the process was alive afterwards.
    """

    def __init__(self, sock: socket.socket, users: frozenset[int]) -> None:
        self.pid, self.uid = peer_credentials(sock, users)
        self._pidfd = _open_pidfd(sock, self.pid)

    def take_pidfd(self) -> int:
        pidfd, self._pidfd = self._pidfd, -1
        return pidfd

    def __exit__(self, *exc_info: object) -> None:
        if self._pidfd >= 0:
            os.close(self.take_pidfd())


def peer_credentials(sock: socket.socket, users: frozenset[int] = frozenset()) -> tuple[int, int]:
    """Return the peer's (pid, uid); ``LinkRefused`` when it is a process neither of our user nor of ``users``."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid() and uid not in users:
        raise LinkRefused(
            f"same-host peer (pid {pid}) runs as uid {uid}, this process as uid {os.geteuid()}; llm.SameHostUsers of "
            "both may admit each other's"
        )
    if uid == _overflow_uid() and not _shares_users(pid):
        # Every user that our user namespace does not know has this number.
        raise LinkRefused(
            f"same-host peer (pid {pid}) runs as uid {uid} of another user namespace, or as any other user"
        )
    return pid, uid


def why_stranger(sock: socket.socket, users: frozenset[int]) -> str:
    """Return why no process of our user or of ``users`` is at the other end of a TCP connection; empty if one is.

    Empty for other hosts too. A closed connection has no owner, and the kernel shows root as the user of its socket.
    """
    if not is_loopback(sock.getpeername()[0].removeprefix("::ffff:")):
        return ""
    ends, uid = [_kernel_form(sock.getpeername()), _kernel_form(sock.getsockname())], -1
    for table in _TCP_SOCKETS:
        with suppress(OSError):  # /proc is not mounted, or there is no IPv6
            for line in table.read_text().splitlines():
                fields = line.replace(_IPV4_IN_IPV6, "").split()
                if fields[1:4] == [*ends, _ESTABLISHED]:
                    uid = int(fields[7])
    if uid in users | {os.geteuid()}:
        return ""
    peer = f"the peer runs as uid {uid}" if uid >= 0 else "the user of the peer is unknown"
    return f"{peer}, this process as uid {os.geteuid()}: llm.SameHostUsers of both may admit each other's"


def _kernel_form(address: tuple[str, int]) -> str:
    """Return an address as the kernel's tables show it, an IPv4 one in IPv6 as IPv4."""
    host, port = address[:2]
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words).replace(_IPV4_IN_IPV6, '')}:{port:04X}"


@cache
def _overflow_uid() -> int:
    try:
        return int(_OVERFLOW_UID.read_text())
    except (OSError, ValueError):
        return _USUAL_OVERFLOW_UID


def _shares_users(pid: int) -> bool:
    try:
        return (_PROC / str(pid) / "ns/user").readlink() == (_PROC / "self/ns/user").readlink()
    except OSError:
        return False


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


class PeerMemory(AbstractContextManager["PeerMemory"]):
    """What a peer on this host exports, mapped here. The last holder's :meth:`close` releases it.

    Owns the mappings, the pidfd, and the page in which the peer announces what it writes here. Made with one holder;
    :meth:`share` adds one.

    Threads: holders may use and close it in different threads at once; each calls ``close`` once.

    Attributes:
        regions: The peer's exported segments by region id; writable where the peer lets us.
        pid: The peer's process as seen from our pid namespace; 0 when it is not visible from it.
        pidfd: Readable once the process has ended; -1 when closed.
        cookie: 16 bytes read from the mapped guard table's header.
        cookie_address: Where that header is in the peer's own address space, as it says.
        canaries: Where its canaries are, as it says.
        shut_out: The peer has said that the kernel does not let it into this process.
        incarnation: What the peer says its incarnation is; to be compared with the control channel's.
    """

    def __init__(
        self,
        hello: RendezvousHello,
        guards: SharedSegment,
        regions: dict[int, SharedSegment],
        process: PeerProcess,
        intent_writer: IntentWriter,
        page: IntentPage,
    ) -> None:
        self.cookie = hello.cookie
        self.cookie_address = hello.cookie_address
        self.canaries = hello.canaries
        self.shut_out = hello.shut_out
        self.incarnation = hello.incarnation
        self.guards = guards
        self.regions = regions
        self.intent_writer = intent_writer
        self._page = page
        self.pid = process.pid
        self.uid = process.uid
        self._owner = HERE["pid"]
        # One item for every holder but one. Each use is one atomic list operation: a lock could be held when a fork,
        # or a connection's __del__, needs it.
        self._others: list[None] = []
        self.pidfd = process.take_pidfd()
        page.belongs_to(self.pid, self.pidfd)

    @property
    def closed(self) -> bool:
        return self.pidfd < 0

    def alive(self) -> bool:
        """Return False once the peer's process has ended, reaped or not. False when closed."""
        pidfd = self.pidfd
        return pidfd >= 0 and not readable(pidfd)

    def share(self) -> Self:
        if self.closed:
            raise StateError(f"share: {self!r} is closed")
        self._others.append(None)
        return self

    def introduce(self, who: str, cluster_id: int) -> None:
        self._page.introduce(who, cluster_id)

    def settle(self) -> None:
        """Close the page's descriptor: the peer has its own by now."""
        if self._page.segment is not None:
            self._page.segment.close_descriptor()

    def close(self) -> None:
        """End one holder's use. The last one unmaps everything; arrays over the memory keep it mapped."""
        try:
            self._others.pop()
        except IndexError:
            self._release()

    def _release(self) -> None:
        if self.closed:
            return
        self.pidfd = -1
        self.intent_writer.close()
        self._page.retire()  # with the pidfd: a peer that is in the middle of a write may be awaited for long
        self.guards.close()
        for segment in self.regions.values():
            segment.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @hold_signals
    def __del__(self) -> None:
        if getattr(self, "pidfd", -1) >= 0:
            if HERE["pid"] == self._owner:
                warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self._release()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self.regions)} regions mapped, {len(self._others) + 1} holders"
        return f"<PeerMemory of pid {self.pid}: {state}>"


def map_peer(hello: RendezvousHello, packet: Packet, process: PeerProcess, offer: MemoryOffer) -> PeerMemory:
    """Check and map what a hello announces, out of the descriptors that came with it. Takes the offer's page.

    After a refusal nothing is mapped; descriptors not reached yet stay in the packet.
    """
    if len(packet.fds) != 2 + len(hello.regions):
        raise LinkRefused(
            f"same-host peer (pid {process.pid}) sent {len(packet.fds)} descriptors for a guard table and "
            f"{len(hello.regions)} regions"
        )
    with ExitStack() as undo:
        guards = undo.enter_context(_attach(packet, "guards", hello.guards_nbytes, writable=False, sparse=True))
        writers = undo.enter_context(_attach(packet, "writers", WRITER_PAGE_BYTES, writable=True))
        regions = {
            described.region: undo.enter_context(
                _attach(packet, described.name, described.nbytes, writable=described.writable)
            )
            for described in hello.regions
        }
        if read_cookie(guards) != hello.cookie:
            raise LinkRefused(f"same-host peer (pid {process.pid}): the mapped guard table has another cookie")
        undo.pop_all()
    with writers:  # its view keeps it mapped
        return PeerMemory(hello, guards, regions, process, IntentWriter(writers.view()), offer.take_page())


def _attach(packet: Packet, name: str, nbytes: int, *, writable: bool, sparse: bool = False) -> SharedSegment:
    try:
        return SharedSegment.attach(packet.take(), nbytes, writable=writable, sparse=sparse)
    except LLMException as error:
        raise LinkRefused(f"same-host peer: its memory {name!r} is not acceptable: {error}") from error


class SameHostConnection(Connection):
    """A connection to another process of this host: shm and cma. Holds the peer's memory, as one of its holders."""

    def __init__(self, peer: PeerMemory) -> None:
        self._peer = peer
        self.intent_writer: IntentWriter = peer.intent_writer
        guards = peer.guards.view()
        self._guard_window: Window | None = Window(guards.ctypes.data, guards.nbytes, writable=False, memory=guards)
        super().__init__()

    def peer_ended(self) -> bool:
        """Return True once the kernel says so. A child that the peer forked may still hold its sockets open."""
        return self.closed or not self._peer.alive()

    def watch(self) -> Watch | None:
        with suppress(LinkError):  # closed
            self._enter("watch")
            try:
                with suppress(OSError):  # no descriptor left
                    pidfd = os.dup(self._peer.pidfd)
                    return Watch(partial(readable, pidfd), partial(os.close, pidfd))
            finally:
                self._leave()
        return None

    def _guards(self) -> Window:
        window = self._guard_window
        if window is None:
            raise LinkError("the connection is closed; link again", phase="copy")
        return window

    def _release(self) -> None:
        self._guard_window = None
        self._peer.close()
