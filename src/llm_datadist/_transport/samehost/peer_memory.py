"""Memory of another process of this host, checked and mapped here."""

from __future__ import annotations

import errno
import os
import socket
import warnings
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from llm_datadist._checks import HERE
from llm_datadist._memory.cuda import CudaDevice
from llm_datadist._memory.guards import read_cookie
from llm_datadist._memory.segment import SharedSegment
from llm_datadist._memory.write_intents import IntentWriter
from llm_datadist._native import WRITER_PAGE_BYTES, close_elsewhere, readable
from llm_datadist._native.public_call import public_call
from llm_datadist._transport.connection import AddressRange, Connection, Watch
from llm_datadist._transport.samehost.peer_device import DeviceRegions
from llm_datadist._transport.users import peer_credentials
from llm_datadist.errors import LinkError, LinkRefused, LLMException, StateError

if TYPE_CHECKING:
    from llm_datadist._memory.exports import RegionDescriptor
    from llm_datadist._transport.samehost.rendezvous import MemoryOffer, Packet, RendezvousHello

# Linux 6.5, asm-generic/socket.h: the peer's pidfd; pidfd_open may meet a recycled pid.
_SO_PEERPIDFD: Final = 77


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
        self.hello = hello
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
        self._guard_range = AddressRange(guards.address, guards.nbytes, False, guards.view())
        super().__init__()

    def peer_ended(self) -> bool:
        """Return True by the pidfd: a forked child of the peer may keep its sockets open."""
        return self.closed or not self._peer.alive()

    def watch(self) -> Watch | None:
        with suppress(LinkError, OSError), self._use("watch"):  # closed; no descriptor left
            pidfd = os.dup(self._peer.pidfd)
            return Watch(partial(readable, pidfd), partial(os.close, pidfd))
        return None

    def _release(self) -> None:
        self._guard_range = None
        self._peer.close()
