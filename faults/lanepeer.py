"""A peer in a child process that is reached over data lanes; run as a module this file is that child.

The cache layer's part is that of :class:`llm_datadist.testing.MemoryHandler`.
"""

import asyncio
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from llm_datadist._deadline import Deadline
from llm_datadist._transport.address import read_exactly
from llm_datadist._transport.tcp import lanes as wire
from llm_datadist._transport.tcp.connection import TcpConnection
from llm_datadist.errors import LLMException
from llm_datadist.testing.peers import (
    Handles,
    LocalPeer,
    MemoryHandler,
    PeerChild,
    PeerProcess,
    child_main,
)


class RegionConnection(Handles, TcpConnection):
    """Over data lanes."""


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
        return RegionConnection(group, writable=self._writable, reconnect=dial)

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
        self._handler.hold(slot, generation)


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
                token = await read_exactly(self._loop, sock, wire.TOKEN_BYTES, "lane greeting")
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
