"""Memory of another process of this host, checked and mapped here."""

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
from llm_datadist._memory.cuda import CudaDevice
from llm_datadist._memory.guards import read_cookie
from llm_datadist._memory.segment import SharedSegment
from llm_datadist._memory.write_intents import IntentWriter
from llm_datadist._native import WRITER_PAGE_BYTES, close_elsewhere, readable
from llm_datadist._native.public_call import public_call
from llm_datadist._transport.connection import AddressRange, Connection, Watch
from llm_datadist._transport.peer_device import DeviceRegions
from llm_datadist.errors import LinkError, LinkRefused, LLMException, StateError

if TYPE_CHECKING:
    from llm_datadist._memory.exports import RegionDescriptor
    from llm_datadist._transport.rendezvous import MemoryOffer, Packet, RendezvousHello

# Linux 6.5, asm-generic/socket.h: the peer's pidfd; pidfd_open may meet a recycled pid.
_SO_PEERPIDFD: Final = 77
_CREDENTIALS: Final = struct.Struct("=iII")
_PROC: Final = Path("/proc")
_OVERFLOW_UID: Final = _PROC / "sys/kernel/overflowuid"
_USUAL_OVERFLOW_UID: Final = 65534
# linux/sock_diag.h, linux/inet_diag.h. A request: header, ports and hosts, interface and no cookie.
_SOCK_DIAG: Final = 4
_BY_FAMILY: Final = 20
_ESTABLISHED: Final = 1
_DIAG_HEADER: Final = struct.Struct("=IHHII BBxxI")
_DIAG_TAIL: Final = struct.pack("=I8s", 0, b"\xff" * 8)
_DIAG_BYTES: Final = _DIAG_HEADER.size + 36 + len(_DIAG_TAIL)
_DIAG_ANSWER: Final = struct.Struct("=4xH10x xB2x 48x 12x II")


class PeerProcess(AbstractContextManager["PeerProcess"]):
    """Living process of an admitted user across a socket. Owns: its pidfd, until that is taken.

    Make it before the last packet that the peer waits for or sends: so it lives after pidfd_open, and its pid was not
    recycled.
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
    """Return the peer's (pid, uid). Raises LinkRefused unless its user is this one or among ``users``."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid() and uid not in users:
        raise LinkRefused(
            f"same-host peer (pid {pid}) runs as uid {uid}, this process as uid {os.geteuid()}; llm.SameHostUsers of "
            "both may admit each other's"
        )
    if uid == _overflow_uid() and not _shares_users(pid):
        # All users unknown to this user namespace share that number.
        raise LinkRefused(
            f"same-host peer (pid {pid}) runs as uid {uid} of another user namespace, or as any other user"
        )
    return pid, uid


def why_other_user(sock: socket.socket, users: frozenset[int]) -> str:
    """Return why the TCP peer is not of this user or ``users``; empty if it is, or is on another host."""
    uid, addresses = peer_uid(sock), (sock.getpeername()[0], sock.getsockname()[0])
    if uid < 0 and not any(is_loopback(each.removeprefix("::ffff:")) for each in addresses):
        return ""
    if uid in users | {os.geteuid()} and (uid != _overflow_uid() or _knows_all_users()):
        return ""
    peer = f"the peer runs as uid {uid}" if uid >= 0 else "the user of the peer is unknown"
    return f"{peer}, this process as uid {os.geteuid()}: llm.SameHostUsers of both may admit each other's"


def peer_uid(sock: socket.socket) -> int:
    """Return the user of a TCP peer on this host; -1 for another host, a closed socket or a kernel without tcp_diag.

    The kernel looks up that one socket, in some 30 us, however many there are.
    """
    try:
        (host, port), (own, own_port) = sock.getpeername()[:2], sock.getsockname()[:2]
        hosts = [each.removeprefix("::ffff:") for each in (host, own)]
        family = socket.AF_INET6 if ":" in hosts[0] else socket.AF_INET
        ends = [socket.inet_pton(family, each).ljust(16, b"\0") for each in hosts]
        header = _DIAG_HEADER.pack(_DIAG_BYTES, _BY_FAMILY, 1, 0, 0, family, socket.IPPROTO_TCP, 1 << _ESTABLISHED)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.send(header + struct.pack("!HH16s16s", port, own_port, *ends) + _DIAG_TAIL)
            answer = kernel.recv(4096, socket.MSG_DONTWAIT)
    except OSError:
        return -1
    kind, state, uid, inode = _DIAG_ANSWER.unpack_from(answer.ljust(_DIAG_ANSWER.size, b"\0"))
    return uid if kind == _BY_FAMILY and state == _ESTABLISHED and inode else -1  # without an inode: closed


@cache
def _overflow_uid() -> int:
    try:
        return int(_OVERFLOW_UID.read_text())
    except (OSError, ValueError):
        return _USUAL_OVERFLOW_UID


@cache
def _knows_all_users() -> bool:
    """Return False in a user namespace without all users: the others share one number there."""
    try:
        return sum(int(line.split()[2]) for line in (_PROC / "self/uid_map").read_text().splitlines()) >= 2**32 - 1
    except OSError:
        return False


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
    """Exported memory of a peer on this host, checked and mapped here from the descriptors of a packet.

    Owns: the mappings, the pidfd, and the ``page`` of the peer's write intents, taken from the offer; the last holder's
        :meth:`close` frees them. :meth:`share` adds a holder to the first.
    Threads: any; each holder calls ``close`` once.
    Errors: LinkRefused; then nothing is mapped, and unused descriptors stay in the packet.
    """

    def __init__(self, hello: RendezvousHello, packet: Packet, process: PeerProcess, offer: MemoryOffer) -> None:
        if len(packet.fds) != 2 + len(hello.regions):
            raise LinkRefused(
                f"same-host peer (pid {process.pid}) sent {len(packet.fds)} descriptors for a guard table and "
                f"{len(hello.regions)} regions"
            )
        with ExitStack() as undo:
            attach = partial(_attach, undo, packet)
            self.guards = attach("guards", hello.guards_nbytes, writable=False, sparse=True)
            writers = attach("writers", WRITER_PAGE_BYTES, writable=True)
            self.regions: dict[int, SharedSegment] = {}  # by region id; writable if the peer allows that
            of_device: list[tuple[RegionDescriptor, int]] = []
            undo.callback(lambda: close_elsewhere([fd for _, fd in of_device]))
            for each in hello.regions:
                if each.device:
                    of_device.append((each, packet.take_anything()))
                else:
                    self.regions[each.region] = attach(each.name, each.nbytes, writable=each.writable)
            if read_cookie(self.guards) != hello.cookie:
                raise LinkRefused(f"same-host peer (pid {process.pid}): the mapped guard table has another cookie")
            with writers:  # the view keeps it mapped
                self.intent_writer = IntentWriter(writers.view())
            undo.pop_all()
        self.on_device = _import(offer, of_device)
        self.got_devices = offer.has_devices  # the peer was offered pools in a GPU
        self._remark = _gpus(offer, hello) + offer.kept
        self.cookie = hello.cookie  # this and the next four as RendezvousHello says
        self.cookie_address = hello.cookie_address
        self.canaries = hello.canaries
        self.shut_out = hello.shut_out
        self.incarnation = hello.incarnation
        self.pid = process.pid  # in this pid namespace; 0 if not visible
        self.uid = process.uid
        self._owner = HERE["pid"]
        # One item for every holder but one. List operations are atomic: forks and __del__ could meet a held lock.
        self._others: list[None] = []
        self.page = offer.take_page()
        self.pidfd = process.take_pidfd()  # readable once the process has ended; -1 when closed
        self.page.belongs_to(self.pid, self.pidfd)

    @property
    def closed(self) -> bool:
        return self.pidfd < 0

    def remark(self) -> str:
        """Return the GPUs of both sides, and what of their memory is not mapped, and why."""
        return self._remark + ("" if self.on_device is None else self.on_device.remark())

    def alive(self) -> bool:
        """Return False once the peer's process has ended, reaped or not, or this is closed."""
        pidfd = self.pidfd
        return pidfd >= 0 and not readable(pidfd)

    def share(self) -> Self:
        if self.closed:
            raise StateError(f"share: {self!r} is closed")
        self._others.append(None)
        return self

    def close_page_fd(self) -> None:
        """Close the page's descriptor: the peer has its own."""
        if self.page.segment is not None:
            self.page.segment.close_descriptor()

    def close(self) -> None:
        """End one holder's use; the last one unmaps everything that no array uses."""
        try:
            self._others.pop()
        except IndexError:
            self._release()

    def _release(self) -> None:
        if self.closed:
            return
        self.pidfd = -1
        self.intent_writer.close()
        self.page.retire()  # with the pidfd, to wait for a peer in the middle of a write
        self.guards.close()
        for segment in self.regions.values():
            segment.close()
        if self.on_device is not None:
            self.on_device.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @partial(public_call, here=True)  # below any lock of this thread
    def __del__(self) -> None:
        if getattr(self, "pidfd", -1) >= 0:
            if HERE["pid"] == self._owner:
                warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self._release()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self.regions)} regions mapped, {len(self._others) + 1} holders"
        return f"<PeerMemory of pid {self.pid}: {state}>"


def _gpus(offer: MemoryOffer, hello: RendezvousHello) -> str:
    """Say in which GPU each side's pool lies; empty if none does."""
    here = "" if offer.device is None else f"{offer.device.name}, GPU {offer.device.uuid.hex()[:8]}"
    there = " and ".join(sorted({f"GPU {each.device.hex()[:8]}" for each in hello.regions if each.device}))
    return f"; pools in GPUs: here {here or 'none'}, there {there or 'none that is offered'}" if here or there else ""


def _import(offer: MemoryOffer, wanted: list[tuple[RegionDescriptor, int]]) -> DeviceRegions | None:
    """Begin to map the peer's memory of a GPU; None if there is none, or this side has no GPU."""
    if not wanted:
        return None
    if isinstance(offer.device, CudaDevice):
        return DeviceRegions(offer.device, wanted)
    close_elsewhere([fd for _, fd in wanted])
    return None


def _attach(
    undo: ExitStack, packet: Packet, name: str, nbytes: int, *, writable: bool, sparse: bool = False
) -> SharedSegment:
    try:
        return undo.enter_context(SharedSegment.attach(packet.take(), nbytes, writable=writable, sparse=sparse))
    except LLMException as error:
        raise LinkRefused(f"same-host peer: its memory {name!r} is not acceptable: {error}") from error


class SameHostConnection(Connection):
    """Connection over shm or cma; one holder of the peer's memory."""

    def __init__(self, peer: PeerMemory) -> None:
        self._peer = peer
        self.intent_writer: IntentWriter = peer.intent_writer
        guards = peer.guards
        self._guard_range: AddressRange | None = AddressRange(guards.address, guards.nbytes, False, guards.view())
        super().__init__()

    def peer_ended(self) -> bool:
        """Return True by the pidfd: a forked child of the peer may keep its sockets open."""
        return self.closed or not self._peer.alive()

    def watch(self) -> Watch | None:
        with suppress(LinkError, OSError), self._use("watch"):  # closed; no descriptor left
            pidfd = os.dup(self._peer.pidfd)
            return Watch(partial(readable, pidfd), partial(os.close, pidfd))
        return None

    def _guards(self) -> AddressRange:
        if (found := self._guard_range) is None:
            raise LinkError("the connection is closed; link again", phase="copy")
        return found

    def _release(self) -> None:
        self._guard_range = None
        self._peer.close()
