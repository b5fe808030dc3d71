"""Our connector in an engine of this process, which a test may look into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from llm_datadist.integrations.vllm import LLMDataDistConnector

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorTransferResults,
    )
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["ENVIRONMENT", "SeenConnector"]

#: Of an engine in this process: on one core, and without the network.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class SeenConnector(LLMDataDistConnector):
    """Keeps what passes through it; ``finished_sending`` names finished requests only."""

    orders: ClassVar[list[Any]] = []  # of all steps
    sent: ClassVar[set[str]] = set()
    layers: ClassVar[list[torch.Tensor]] = []
    rank: ClassVar[Any] = None  # what the worker tells the scheduler of itself
    _finished: ClassVar[set[str]] = set()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        found = super().build_connector_meta(scheduler_output)
        self.orders.append(found)
        return found

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self.layers[:] = kv_caches.values()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        type(self).rank = super().get_handshake_metadata()
        return self.rank

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._finished.update(finished_req_ids)
        results = super().get_transfer_results(finished_req_ids)
        assert results.finished_sending <= self._finished
        self.sent.update(results.finished_sending)
        return results
