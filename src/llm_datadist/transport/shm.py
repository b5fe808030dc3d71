"""Shared memory: the peer's sealed memfds are mapped here, a copy is one native call and no message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.errors import PeerLost
from llm_datadist.transport.base import Capabilities, Connection, Window, move_mapped
from llm_datadist.transport.sharedpeer import writers_of

if TYPE_CHECKING:
    from llm_datadist.deadline import Deadline
    from llm_datadist.memory.writers import Announcer
    from llm_datadist.native import CopyPool, Plan, Tensors
    from llm_datadist.transport.base import RemoteTensors, Transfer
    from llm_datadist.transport.peermemory import PeerMemory
    from llm_datadist.transport.sharedpeer import SharedPeer

__all__ = ["ShmConnection"]


class ShmConnection(Connection):
    """A connection over mapped memory of another process. Threads as in the base class; owns the peer's memory."""

    capabilities = Capabilities("shm", shared_regions=True, private_memory=False)

    def __init__(self, peer: PeerMemory | SharedPeer) -> None:
        self._peer = peer
        self._windows = {
            region: Window(segment.address, segment.nbytes, segment.writable)
            for region, segment in peer.regions.items()
        }
        self._guard_window = Window(peer.guards.address, peer.guards.nbytes, writable=False)
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

    def _window(self, region: int) -> Window | None:
        return self._windows.get(region)

    def _guards(self) -> Window:
        return self._guard_window

    def _move(
        self,
        plan: Plan,
        local: Tensors,
        remote: RemoteTensors,
        pool: CopyPool | None,
        deadline: Deadline,
        *,
        write: bool,
    ) -> Transfer:
        transfer = move_mapped(plan, local, remote, pool, deadline, write=write)
        # The mapping outlives its owner: a write that nobody is left to see must not be reported as delivered. A read
        # needs no such question, its guard decides.
        if write and not self._peer.alive():
            raise PeerLost(f"write: the peer process {self._peer.pid} has ended; nobody sees the bytes", phase="copy")
        return transfer

    def _release(self) -> None:
        self._peer.close()
