"""A peer in a child process that is reached over data lanes; run as a module this file is that child.

What the cache layer would do is reduced to the least: a handle names its tensors by regions and offsets.
"""

import asyncio
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from llm_datadist._deadline import Deadline
from llm_datadist._memory.exports import NON_POOL, RegionDescriptor
from llm_datadist._native import USER, Tensors
from llm_datadist._transport.connection import RemoteTensors
from llm_datadist._transport.moves import MoveReply, MoveRequest
from llm_datadist._transport.tcp import lanes as wire
from llm_datadist._transport.tcp.connection import TcpConnection
from llm_datadist.errors import LLMException, ParamError
from llm_datadist.testing.peers import NON_POOL_BYTES, REGION_BYTES, LocalPeer, PeerChild, PeerProcess, child_main


class Handles:
    """A connection whose handles say where the tensors are, for :class:`MemoryHandler` at the other end."""

    def map(self, regions: NDArray[np.uint32], offsets: NDArray[np.uint64], extent: int, **how: bool) -> RemoteTensors:
        handle = msgspec.msgpack.encode([regions.tolist(), offsets.tolist()])
        mapped: RemoteTensors = super().map(regions, offsets, extent, **how)  # type: ignore[misc]
        return replace(mapped, handle=handle)


class RegionConnection(Handles, TcpConnection):
    """Over data lanes."""


class MemoryHandler:
    def __init__(self, peer: LocalPeer) -> None:
        self.guards: list[tuple[int, int]] = []
        self._peer = peer

    def on_move(self, link: object, request: MoveRequest) -> MoveReply:
        if request.write and not self._peer.exports.writable:
            raise ParamError("this peer may not be written")
        regions, offsets = msgspec.msgpack.decode(request.handle, type=tuple[list[int], list[int]])
        bases = [self._base(*place, request.extent) for place in zip(regions, offsets, strict=True)]
        place = USER if NON_POOL in regions else self._peer.device.place
        return MoveReply(Tensors(np.array(bases, np.uint64), request.extent, place=place), self.guards)

    def _base(self, region: int, offset: int, extent: int) -> int:
        start = self._peer.address(region)
        offset = offset - start if region == NON_POOL else offset
        limit = NON_POOL_BYTES if region == NON_POOL else REGION_BYTES[region]
        if not 0 <= offset <= limit - extent:
            raise ParamError(f"region {region} has no {extent} bytes at {offset}")
        return start + offset


class OwnerProcess(PeerProcess):
    def __init__(self) -> None:
        super().__init__(lambda memory: _no_rendezvous())
        self._writable = False

    @contextmanager
    def serving(self, *, writable: bool) -> Iterator[Self]:
        self._writable = writable
        with super().serving(writable=writable):
            yield self

    def hold(self, slot: int, generation: int) -> None:
        """Let every grant from now on depend on a guard of the child."""
        self._tell("hold", slot, generation)

    def quiesce(self) -> None:
        self._tell("quiesce")


class LanePeerProcess(OwnerProcess):
    """Reached over ``lanes`` loopback connections. Owns also the lanes of this process."""

    module = __name__

    def __init__(self, lanes: int = 2, threads: int = 1) -> None:
        super().__init__()
        self.lanes = wire.Lanes(threads, MemoryHandler(LocalPeer(writable=False)))
        self._count = lanes

    def connect(self) -> RegionConnection:
        token = secrets.token_bytes(16)
        address = ("127.0.0.1", self.ask(int, "listen", token))

        def dial(count: int, deadline: Deadline) -> list[wire.LaneSocket]:
            return wire.dial_lanes(address, token, count, deadline)

        group = self.lanes.open(dial(self._count, Deadline(10_000)))
        group.begin(None)
        regions = [RegionDescriptor(region, size, "", self._writable) for region, size in REGION_BYTES.items()]
        return RegionConnection(group, regions, writable=self._writable, reconnect=dial)

    def close(self) -> None:
        self.lanes.close()
        super().close()


def _no_rendezvous() -> Any:
    raise AssertionError("lanes need no rendezvous")


class OwnerChild(PeerChild):
    """The child's side: grants its memory by handles."""

    own: tuple[str, ...] = ("hold", "quiesce")

    def obey(self, verb: str, arguments: list[Any]) -> object:
        return getattr(self, f"_{verb}")(*arguments) if verb in self.own else super().obey(verb, arguments)

    def _serve(self, writable: bool, private: bool) -> None:
        super()._serve(writable, private)
        self._handler = MemoryHandler(self._peer)

    def _hold(self, slot: int, generation: int) -> None:
        self._handler.guards = [(self._peer.exports.guards.address_of(slot), generation)]


class LaneChild(OwnerChild):
    own = ("hold", "quiesce", "listen")

    def _serve(self, writable: bool, private: bool) -> None:
        super()._serve(writable, private)
        self._lanes = wire.Lanes(1, self._handler)
        self._groups: dict[bytes, wire.LaneGroup] = {}
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setblocking(False)
        self._accepting = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def _start(self) -> asyncio.Task[None]:
        self._lanes.start(self._loop)
        return self._loop.create_task(self._accept())

    def _stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._lanes.close()
        self._quiesce()  # before the memory goes
        self._server.close()
        super()._stop()

    async def _end(self) -> None:
        self._accepting.cancel()
        self._lanes.stop()

    def _listen(self, token: bytes) -> int:
        self._groups[token] = group = self._lanes.open()
        group.begin(token)
        return int(self._server.getsockname()[1])

    def _quiesce(self) -> None:
        self._lanes.quiesce(0)

    async def _accept(self) -> None:
        while True:
            sock, _ = await self._loop.sock_accept(self._server)
            try:
                preamble = await self._loop.sock_recv(sock, len(wire.LANE_PREAMBLE))
                token = await wire.read_lane_greeting(self._loop, sock)
                if preamble != wire.LANE_PREAMBLE or token not in self._groups:
                    sock.close()
                    continue
                await wire.accept_lane(self._loop, sock)
            except (OSError, LLMException):
                sock.close()
            else:
                self._lanes.add(self._groups[token], wire.LaneSocket(sock))


if __name__ == "__main__":
    child_main(int(sys.argv[1]), LaneChild)
