"""Shared memory: the peer's sealed memfds are mapped here, a copy is one native call and no message."""

from __future__ import annotations

from llm_datadist._transport.connection import Capabilities, Transfer, Window, move_mapped
from llm_datadist._transport.peer_memory import PeerMemory, SameHostConnection
from llm_datadist.errors import PeerLost


class ShmConnection(SameHostConnection):
    """A connection over mapped memory of another process."""

    capabilities = Capabilities("shm", shared_regions=True, private_memory=False)

    def __init__(self, peer: PeerMemory) -> None:
        self._windows = {
            region: Window(segment.address, segment.nbytes, segment.writable)
            for region, segment in peer.regions.items()
        }
        super().__init__(peer)

    def _window(self, region: int) -> Window | None:
        return self._windows.get(region)

    def _move(self, transfer: Transfer) -> None:
        move_mapped(transfer)
        # The mapping outlives its owner: a write into the memory of an ended process must not be reported as
        # delivered. For a read the guard decides.
        if transfer.write and not self._peer.alive():
            raise PeerLost(f"write: the peer process {self._peer.pid} has ended; nobody sees the bytes", phase="copy")
