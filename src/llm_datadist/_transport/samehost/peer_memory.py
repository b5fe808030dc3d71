"""Memory of another process of this host, checked and mapped here."""

from __future__ import annotations

import _thread
import errno
import os
import socket
import threading
import time
import warnings
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from llm_datadist._checks import HERE, clean
from llm_datadist._log import links_logger as logger
from llm_datadist._memory.cuda import CudaDevice, DeviceSegment
from llm_datadist._memory.guards import read_cookie
from llm_datadist._memory.segment import SharedSegment
from llm_datadist._memory.write_intents import IntentWriter
from llm_datadist._native import WRITER_PAGE_BYTES, close_elsewhere, readable
from llm_datadist._native.public_call import elsewhere, public_call
from llm_datadist._transport.connection import Connection, PeerRange, Watch
from llm_datadist._transport.users import peer_credentials
from llm_datadist.errors import LinkError, LinkRefused, LLMException, StateError

if TYPE_CHECKING:
    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.exports import RegionDescriptor
    from llm_datadist._transport.samehost.rendezvous import MemoryOffer, Packet, RendezvousHello

# Linux 6.5, asm-generic/socket.h: the peer's pidfd; pidfd_open may meet a recycled pid.
_SO_PEERPIDFD: Final = 77
_LINK_SECONDS: Final = 3.0  # most that a link waits for imports, which take milliseconds on an idle host
_LATE_SECONDS: Final = 5.0
_MAX_LATE: Final = 16  # imports that have taken longer; while there are so many, none is begun

_begun: Final[dict[DeviceRegions, float]] = {}  # whose imports have not ended


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


class DeviceRegions:
    """Regions of a peer's GPU, mapped here from the descriptors of a rendezvous.

    The driver takes a descriptor of anything, and may wait for its other end: a FIFO, a socket, a file of FUSE. So a
    thread of its own imports. What is not mapped, or not yet, goes over data lanes. The same thread unmaps, as the
    driver may wait there too, and as a new thread may end before its first line for want of memory.

    Owns: the descriptors, until they are imported; the segments, until :meth:`close`.
    Threads: one of its own imports and unmaps; any others. It is no ``threading.Thread``, whose ``start`` never returns
        if the thread ends at once.
    Errors: a region that is not mapped has its reason in ``left_out``.
    """

    def __init__(self, device: CudaDevice, wanted: list[tuple[RegionDescriptor, int]]) -> None:
        self._device = device
        self._pid = HERE["pid"]
        self._lock = threading.Lock()  # for the next three, held for no call
        self.left_out = {each.region: _because(each, "the driver has not answered yet") for each, _ in wanted}
        self._segments: dict[int, DeviceSegment] = {}
        self._wanted = wanted
        self._ended = threading.Event()
        self._in_use = threading.Lock()
        self._in_use.acquire()
        try:
            if sum(time.monotonic() - since > _LATE_SECONDS for since in list(_begun.values())) >= _MAX_LATE:
                raise RuntimeError(f"{_MAX_LATE} imports of other peers' memory do not end")
            _thread.start_new_thread(self._import, ())
        except (RuntimeError, MemoryError) as error:  # no thread
            self.left_out = {each.region: _because(each, str(error)) for each, _ in wanted}
            self._drop_wanted()
            self._ended.set()

    def get(self, region: int) -> DeviceSegment | None:
        return self._segments.get(region)

    @elsewhere
    def wait(self, deadline: Deadline) -> None:
        """Wait a little until all imports have ended, so that the first transfer needs no lane."""
        self._ended.wait(min(_LINK_SECONDS, deadline.remaining_ms() / 2000))

    def remark(self) -> str:
        with self._lock:
            return "".join(f"; {reason}: by data lanes" for reason in self.left_out.values())

    def close(self) -> None:
        """Have all unmapped, also what is imported later. Idempotent."""
        if HERE["pid"] != self._pid:
            return
        self._drop_wanted()
        with self._lock:
            if self._in_use.locked():
                self._in_use.release()

    def _drop_wanted(self) -> None:
        with self._lock:
            left, self._wanted = self._wanted, []
        close_elsewhere([fd for _, fd in left])

    def _import(self) -> None:
        _begun[self] = time.monotonic()
        try:
            while (wanted := self._next()) is not None:
                self._import_one(*wanted)
        except Exception:  # noqa: BLE001 (a bug costs a region, and the other descriptors are closed)
            logger.exception("the import of a peer's memory failed")
        finally:
            self._drop_wanted()
            self._ended.set()
            _begun.pop(self, None)
        if self._segments:
            self._in_use.acquire()
        for segment in self._segments.values():
            segment.close()

    def _next(self) -> tuple[RegionDescriptor, int] | None:
        with self._lock:
            return self._wanted.pop(0) if self._wanted else None

    def _import_one(self, described: RegionDescriptor, fd: int) -> None:
        region, writable = described.region, described.writable
        try:
            segment = DeviceSegment.attach(self._device, fd, described.nbytes, described.device, writable=writable)
        except LLMException as error:
            with self._lock:
                self.left_out[region] = _because(described, str(error))
            return
        with self._lock:
            self._segments[region] = segment
            del self.left_out[region]


def _because(described: RegionDescriptor, why: str) -> str:
    return f"region {described.region} (GPU {described.device.hex()[:8]}) is not mapped: {clean(why)}"


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
        self._guard_range = PeerRange(guards.address, guards.nbytes, False, guards.view())
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
