"""link_clusters and unlink_clusters between two processes."""

from __future__ import annotations

from llm_datadist import LLMStatusCode
from llm_datadist.bench.sides.base import Facts, Role
from llm_datadist.bench.sides.ours import Ours, end_of, link
from llm_datadist.bench.workload import Op, Workload

__all__ = ["Linking"]

_TIMEOUT_MS = 60_000
_POOL_BYTES = 1 << 20


class Linking(Ours):
    """Each step links the destination to the source and unlinks it.

    Both ends have a pool of 1 MiB.
    """

    ops = (Op.LINK,)

    @classmethod
    def footprint(cls, workload: Workload) -> int:
        return 2 * _POOL_BYTES

    def start(self) -> Facts:
        self._end = end_of(self.role, self.workload, self.transport, pool_bytes=_POOL_BYTES)
        return {"port": self._end.listen_port}

    def connect(self, facts: Facts) -> Facts:
        """Link and unlink once, to see that the transport can be used."""
        self._port = facts["port"]
        info = link(self._end, self._port)
        used = self._transport_used(self._end)
        self._end.unlink_clusters([info], _TIMEOUT_MS)
        return {"transport": used}

    def transfer_one(self, index: int) -> None:
        info = link(self._end, self._port)
        status, _ = self._end.unlink_clusters([info], _TIMEOUT_MS)
        if status != LLMStatusCode.LLM_SUCCESS:
            raise RuntimeError(f"unlink_clusters: {status}")

    def verify(self, seed: int) -> bool:
        if self._end.statistics().links and self.role is Role.DESTINATION:
            raise RuntimeError("a link is left after unlink_clusters")
        return self.role is Role.DESTINATION
