"""What a link needs of its data connection, whether that is one transport's or several routed into one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist.deadline import Deadline
    from llm_datadist.memory.writers import Announced
    from llm_datadist.native import CopyPool, Plan, Promises, Tensors
    from llm_datadist.transport.values import Capabilities, RemoteTensors, Transfer

__all__ = ["DataPath"]


class DataPath(Protocol):
    """The public verbs of :class:`llm_datadist.transport.base.Connection`, which documents them."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    @property
    def bytes_read(self) -> int:
        """Bytes moved from the peer so far."""

    @property
    def bytes_written(self) -> int:
        """Bytes moved to the peer so far."""

    @property
    def closed(self) -> bool:
        """True after close or abort."""

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
        """Return where the peer's tensors are."""

    def generation(self, slot: int) -> int:
        """Return what a guard of the peer shows."""

    def hold(self, promises: Promises) -> bool:
        """Return True while guards of the peer show what was promised."""

    def announced(self, remote: RemoteTensors, slot: int, deadline: Deadline, *, write: bool) -> Announced | None:
        """Announce a movement to the owner of the memory."""

    def introduce(self, who: str, cluster_id: int) -> None:
        """Learn who the peer is."""

    def read(
        self, plan: Plan, local: Tensors, remote: RemoteTensors, pool: CopyPool | None, deadline: Deadline
    ) -> Transfer:
        """Move from the peer."""

    def write(
        self, plan: Plan, local: Tensors, remote: RemoteTensors, pool: CopyPool | None, deadline: Deadline
    ) -> Transfer:
        """Move to the peer."""

    def begin(self, link: object) -> None:
        """Serve what the peer asks, in the name of ``link``."""

    def mend(self, deadline: Deadline) -> None:
        """Make again what was lost without the link."""

    def peer_ended(self) -> bool:
        """Return True when it is certain that the peer has ended."""

    def peer_pidfd(self) -> int | None:
        """Return a new descriptor that is readable once the peer's process has ended, or None."""

    def close(self) -> None:
        """Refuse new calls, release when the running ones have ended."""

    def abort(self) -> None:
        """Close, and fail the running calls."""
