"""One link over two transports: what the peer exports goes one way, its private memory another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.transport.exports import PRIVATE
from llm_datadist.transport.values import Capabilities

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist.deadline import Deadline
    from llm_datadist.memory.writers import Announced
    from llm_datadist.native import CopyPool, Plan, Promises, Tensors
    from llm_datadist.transport.base import Connection
    from llm_datadist.transport.values import RemoteTensors, Transfer

__all__ = ["RoutedConnection"]


class RoutedConnection:
    """Two connections to one peer behind the verbs of one. Owns both; threads as for each of them.

    Tensors are mapped by the one that reaches them, and moved by the one that mapped them.

    Args:
        shared: Reaches what the peer exports, and its guards.
        private: Reaches the peer's private memory.
    """

    def __init__(self, shared: Connection, private: Connection) -> None:
        self._shared = shared
        self._private = private
        ways = shared.capabilities, private.capabilities
        self.capabilities = Capabilities(
            shared.capabilities.name,
            shared_regions=True,
            private_memory=True,
            announces_reads=any(each.announces_reads for each in ways),
        )

    @property
    def bytes_read(self) -> int:
        """Bytes moved from the peer so far."""
        return self._shared.bytes_read + self._private.bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes moved to the peer so far."""
        return self._shared.bytes_written + self._private.bytes_written

    @property
    def closed(self) -> bool:
        """True after :meth:`close` or :meth:`abort`."""
        return self._shared.closed

    def map(
        self,
        regions: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
        extent: int,
        *,
        writable: bool,
        handle: bytes = b"",
        located: bool = False,
    ) -> RemoteTensors:
        """Return where the peer's tensors are; all of them lie in exported regions, or none."""
        chosen = self._private if {PRIVATE}.issuperset(regions.tolist()) else self._shared
        return chosen.map(regions, offsets, extent, writable=writable, handle=handle, located=located)

    def generation(self, slot: int) -> int:
        """Return the generation in the peer's guard ``slot``."""
        return self._shared.generation(slot)

    def hold(self, promises: Promises) -> bool:
        """Return True while guards of the peer show what was promised."""
        return self._shared.hold(promises)

    def announced(self, remote: RemoteTensors, slot: int, deadline: Deadline, *, write: bool) -> Announced | None:
        """Announce a movement of the peer's tensors to their owner."""
        return self._route(remote).announced(remote, slot, deadline, write=write)

    def introduce(self, who: str, cluster_id: int) -> None:
        """Learn who the peer is."""
        self._shared.introduce(who, cluster_id)
        self._private.introduce(who, cluster_id)

    def read(
        self, plan: Plan, local: Tensors, remote: RemoteTensors, pool: CopyPool | None, deadline: Deadline
    ) -> Transfer:
        """Move ``plan`` from the peer's tensors to local ones."""
        return self._route(remote).read(plan, local, remote, pool, deadline)

    def write(
        self, plan: Plan, local: Tensors, remote: RemoteTensors, pool: CopyPool | None, deadline: Deadline
    ) -> Transfer:
        """Move ``plan`` from local tensors to the peer's."""
        return self._route(remote).write(plan, local, remote, pool, deadline)

    def begin(self, link: object) -> None:
        """Serve what the peer asks, in the name of ``link``."""
        self._shared.begin(link)
        self._private.begin(link)

    def mend(self, deadline: Deadline) -> None:
        """Make again what was lost without the link."""
        self._shared.mend(deadline)
        self._private.mend(deadline)

    def peer_ended(self) -> bool:
        """Return True when it is certain that the peer's process has ended."""
        return self._shared.peer_ended() or self._private.peer_ended()

    def peer_pidfd(self) -> int | None:
        """Return a new descriptor that is readable once the peer's process has ended, if either route has one."""
        shared = self._shared.peer_pidfd()
        return self._private.peer_pidfd() if shared is None else shared

    def close(self) -> None:
        """Close both. Idempotent, never waits."""
        self._shared.close()
        self._private.close()

    def abort(self) -> None:
        """Abort both. Idempotent, never waits."""
        self._shared.abort()
        self._private.abort()

    def _route(self, remote: RemoteTensors) -> Connection:
        # What neither of them mapped is refused by the first.
        return self._private if self._private.owns(remote) else self._shared

    def __repr__(self) -> str:
        return f"<RoutedConnection {self._shared!r}, {self._private!r}>"
