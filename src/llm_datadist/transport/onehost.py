"""Two processes of one host: what the peer exports is mapped (shm), the kernel reaches its private memory (cma)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.transport.base import PRIVATE, Capabilities, Window
from llm_datadist.transport.cma import CmaConnection
from llm_datadist.transport.shm import ShmConnection

if TYPE_CHECKING:
    from llm_datadist.deadline import Deadline
    from llm_datadist.native import CopyPool, Plan, Tensors
    from llm_datadist.transport.base import RemoteTensors, Transfer
    from llm_datadist.transport.sharedpeer import SharedPeer

__all__ = ["OneHostConnection"]


class OneHostConnection(ShmConnection):
    """shm with cma beside it, for the tensors that lie outside the peer's pools. Threads as in the base class.

    Owns its share of the peer and a cma connection with another one; counts for both.

    Args:
        peer: The share.
        writable: True when the peer may be written (RCA).
    """

    capabilities = Capabilities("shm", shared_regions=True, private_memory=True)

    def __init__(self, peer: SharedPeer, *, writable: bool) -> None:
        self._private = CmaConnection(peer.share(), writable=writable)
        super().__init__(peer)

    def _window(self, region: int) -> Window | None:
        return self._private._window(region) if region == PRIVATE else super()._window(region)

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
        move = self._private._move if remote.private else super()._move
        return move(plan, local, remote, pool, deadline, write=write)

    def _release(self) -> None:
        self._private.close()
        super()._release()
