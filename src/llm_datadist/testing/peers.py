"""Peers for the conformance suite; their owner reads and writes their memory without the tested transport.

:class:`LocalPeer` lives in this process, :class:`PeerProcess` in a child (``python -m llm_datadist.testing.peers FD``).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar

import msgspec
import numpy as np

from llm_datadist._deadline import Deadline
from llm_datadist._memory.device import Device, HostDevice
from llm_datadist._memory.exports import NON_POOL, Exports
from llm_datadist._memory.guards import GuardTable
from llm_datadist._native import USER, Tensors
from llm_datadist._transport import instances
from llm_datadist._transport.connection import ServedConnection
from llm_datadist._transport.inproc import InprocConnection
from llm_datadist._transport.moves import MoveReply
from llm_datadist._transport.samehost.listener import SameHostListener, exchange_memory
from llm_datadist._transport.samehost.peer_memory import PeerMemory
from llm_datadist.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from llm_datadist._transport.connection import Connection, PeerRange, RemoteTensors
    from llm_datadist._transport.moves import MoveRequest

REGION_BYTES: Final = {1: 3 << 20, 2: (256 << 10) + 4096}
"""Bytes of each exported region, by its id."""
NON_POOL_BYTES: Final = 1 << 20
"""Bytes of a peer's non-pool memory."""
_SLOTS: Final = 64

T = TypeVar("T")


class Peer(ABC):
    """The peer of a tested connection. Threads: one.

    Only :meth:`connect` uses the transport; the memory's owner does the rest. Region :data:`NON_POOL` is addressed from
    the start of the peer's non-pool memory.
    """

    @abstractmethod
    def connect(self) -> Connection:
        """Return a new connection to the peer; the caller closes it."""

    @abstractmethod
    def poke(self, region: int, data: NDArray[np.uint8]) -> None:
        """Overwrite the beginning of a region with bytes, shape (n,)."""

    @abstractmethod
    def peek(self, region: int) -> NDArray[np.uint8]:
        """Return a copy of a region's bytes, shape (nbytes,)."""

    @abstractmethod
    def address(self, region: int) -> int:
        """Return a region's address in the peer's process."""

    def place(self, region: int, offset: int) -> tuple[int, int]:
        """Return the (region, offset) that names a byte of region 1 or 2."""
        return region, offset

    @abstractmethod
    def guard(self) -> tuple[int, int]:
        """Allocate a guard; return its slot and generation."""

    @abstractmethod
    def advance(self, slot: int) -> int:
        """Advance a guard; return its new generation."""

    def hold(self, slot: int, generation: int) -> None:  # noqa: B027 (not every transport needs it)
        """Make every later transfer depend on a guard, if the owner checks guards (``remote_guards``)."""

    def close(self) -> None:  # noqa: B027 (not every peer owns something)
        """Free the peer. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class LocalPeer(Peer):
    """A peer in this process, registered for inproc until :meth:`close`. Owns its memory.

    Args:
        private: True to keep regions 1 and 2 in non-pool memory.
    """

    device: Device = HostDevice()  # of the regions

    def __init__(self, *, writable: bool, private: bool = False) -> None:
        self.exports = new_exports(writable=writable, device=self.device)
        sizes = {NON_POOL: NON_POOL_BYTES} | (REGION_BYTES if private else {})
        self._private = {region: np.zeros(nbytes, np.uint8) for region, nbytes in sizes.items()}
        instances.register(self.exports)

    def connect(self) -> Connection:
        return InprocConnection(self.exports)

    def poke(self, region: int, data: NDArray[np.uint8]) -> None:
        self._bytes(region)[: data.size] = data

    def peek(self, region: int) -> NDArray[np.uint8]:
        return self._bytes(region).copy()

    def address(self, region: int) -> int:
        own = self._private.get(region)
        return self.exports.regions[region].address if own is None else own.ctypes.data

    def guard(self) -> tuple[int, int]:
        guard = self.exports.guards.allocate()
        return guard.slot, guard.generation

    def advance(self, slot: int) -> int:
        return self.exports.guards.advance(slot)

    def cookie_address(self) -> int:
        return self.exports.guards.segment.address

    def close(self) -> None:
        instances.unregister(self.exports.incarnation)
        close_exports(self.exports)

    def _bytes(self, region: int) -> NDArray[np.uint8]:
        return self._private[region] if region in self._private else self.exports.regions[region].view()


class Handles(ServedConnection):
    """First base of a tested connection to a :class:`MemoryHandler`: its handles name regions and offsets."""

    def map(self, regions: NDArray[np.uint32], offsets: NDArray[np.uint64], extent: int, **how: bool) -> RemoteTensors:
        handle = msgspec.msgpack.encode([regions.tolist(), offsets.tolist()])
        return replace(super().map(regions, offsets, extent, **how), handle=handle)

    def _range(self, region: int) -> PeerRange | None:
        elsewhere = self._ranges[NON_POOL]
        return replace(elsewhere, nbytes=REGION_BYTES[region]) if region in REGION_BYTES else super()._range(region)


class MemoryHandler:
    """Owner of a peer's memory, as a :class:`llm_datadist.transport.MoveOwner`; it replaces the cache layer.

    Attributes:
        guards: Guards of every reply, (address, generation).
    """

    def __init__(self, peer: LocalPeer) -> None:
        self.guards: list[tuple[int, int]] = []
        self._peer = peer

    def on_move(self, link: object, request: MoveRequest) -> MoveReply:
        if request.write and not self._peer.exports.writable:
            raise ParamError("this peer may not be written")
        regions, offsets = _places(request.handle)
        bases = [self._base(*place, request.extent) for place in zip(regions, offsets, strict=True)]
        place = USER if NON_POOL in regions else self._peer.device.place
        return MoveReply(Tensors(np.array(bases, np.uint64), request.extent, place=place), self.guards)

    def hold(self, slot: int, generation: int) -> None:
        """Let every reply from now on depend on a guard of the peer."""
        self.guards = [(self._peer.exports.guards.address_of(slot), generation)]

    def _base(self, region: int, offset: int, extent: int) -> int:
        start = self._peer.address(region)
        offset = offset - start if region == NON_POOL else offset
        limit = NON_POOL_BYTES if region == NON_POOL else REGION_BYTES[region]
        if not 0 <= offset <= limit - extent:
            raise ParamError(f"region {region} has no {extent} bytes at {offset}")
        return start + offset


_places = msgspec.msgpack.Decoder(tuple[list[int], list[int]]).decode


class PeerProcess(Peer):
    """A peer in a child process. Owns the child until :meth:`close`. Threads: one.

    Args:
        open_connection: Makes the tested connection from the rendezvous's result, which the connection then owns.
        private: True to test only non-pool memory.
    """

    module: ClassVar[str] = __name__
    """Module that the child runs."""
    device: Device = HostDevice()  # by which this side maps the regions

    def __init__(self, open_connection: Callable[[PeerMemory], Connection], *, private: bool = False) -> None:
        self._open_connection = open_connection
        self._private = private
        self._exports = new_exports(writable=False, device=self.device)
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", self.module, str(theirs.fileno())]
            self._child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._pipe = Pipe(ours.detach())

    @property
    def pid(self) -> int:
        return self._child.pid

    @contextmanager
    def serving(self, *, writable: bool) -> Iterator[Self]:
        """Export new, zeroed memory during the ``with`` block."""
        self._tell("serve", writable, self._private)
        try:
            yield self
        finally:
            if self._child.poll() is None:
                self._tell("stop")

    def connect(self) -> Connection:
        token = secrets.token_bytes(16)
        name = self.ask(str, "expect", token)
        return self._open_connection(exchange_memory(name, token, self._exports, Deadline(10_000)))

    def poke(self, region: int, data: NDArray[np.uint8]) -> None:
        self._tell("poke", region, data.tobytes())

    def peek(self, region: int) -> NDArray[np.uint8]:
        return np.frombuffer(self.ask(bytes, "peek", region), np.uint8)

    def address(self, region: int) -> int:
        return self.ask(int, "address", region)

    def place(self, region: int, offset: int) -> tuple[int, int]:
        return (NON_POOL, self.address(region) + offset) if self._private else (region, offset)

    def guard(self) -> tuple[int, int]:
        slot, generation = self.ask(list[int], "guard")
        return slot, generation

    def advance(self, slot: int) -> int:
        return self.ask(int, "advance", slot)

    def kill(self) -> None:
        """Kill the child by SIGKILL; return when it has ended."""
        self._child.kill()
        self._child.wait()

    def close(self) -> None:
        self._pipe.close()
        self._child.wait()
        close_exports(self._exports)

    def _tell(self, verb: str, *arguments: object) -> None:
        self.ask(type(None), verb, *arguments)

    def ask(self, answer: type[T], verb: str, *arguments: object) -> T:
        self._pipe.send_bytes(msgspec.msgpack.encode([verb, *arguments]))
        return msgspec.msgpack.decode(self._pipe.recv_bytes(), type=answer)  # noqa: TID251 (of no Struct)


class PeerChild:
    """The child's side. Threads: the main one obeys commands, another runs the listener's loop."""

    peer: ClassVar[type[LocalPeer]] = LocalPeer

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._peer: LocalPeer
        self._listener: SameHostListener
        self._met: list[PeerMemory] = []

    def obey(self, verb: str, arguments: list[Any]) -> object:
        """Return the answer to one command."""
        handler: Callable[..., object] = getattr(self, f"_{verb}", None) or getattr(self._peer, verb)
        return handler(*arguments)

    def _peek(self, region: int) -> bytes:
        return self._peer.peek(region).tobytes()

    def _poke(self, region: int, data: bytes) -> None:
        self._peer.poke(region, np.frombuffer(data, np.uint8))

    def _serve(self, writable: bool, private: bool) -> None:
        self._peer = self.peer(writable=writable, private=private)
        self._listener = SameHostListener(self._peer.exports, None)
        self._loop.call_soon_threadsafe(self._listener.start, self._loop)

    def _stop(self) -> None:
        closed = threading.Event()
        self._loop.call_soon_threadsafe(self._listener.close)
        self._loop.call_soon_threadsafe(closed.set)
        closed.wait()
        self._peer.close()
        while self._met:
            self._met.pop().close()

    def _expect(self, token: bytes) -> str:
        self._listener.expect(token, lambda peer: self._met.append(peer) if isinstance(peer, PeerMemory) else None)
        return self._listener.name


def new_exports(*, writable: bool, device: Device = HostDevice()) -> Exports:  # noqa: B008 (it has no state)
    """Return exports with regions of :data:`REGION_BYTES`; of the host they are zeroed."""
    regions = {
        region: device.allocate(nbytes, f"pool-{region}", peers_may_write=writable, prefault=False)
        for region, nbytes in REGION_BYTES.items()
    }
    gpu = device if device.ordinal >= 0 else None
    return Exports(secrets.token_bytes(16), regions, GuardTable(_SLOTS), writable, device=gpu)


def close_exports(exports: Exports) -> None:
    """Close everything that :func:`new_exports` made."""
    exports.guards.close()
    for segment in exports.regions.values():
        segment.close()


@contextmanager
def loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="lldd-test-loop")
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def child_main(fd: int, make: Callable[[asyncio.AbstractEventLoop], PeerChild] = PeerChild) -> None:
    """Obey commands from the pipe ``fd`` until it ends."""
    with Pipe(fd) as pipe, loop_thread() as loop:
        child = make(loop)
        while True:
            try:
                verb, *arguments = msgspec.msgpack.decode(pipe.recv_bytes(), type=list[Any])  # noqa: TID251 (as above)
            except EOFError:
                return
            pipe.send_bytes(msgspec.msgpack.encode(child.obey(verb, arguments)))


if __name__ == "__main__":
    child_main(int(sys.argv[1]))
