"""A connector that loses what it pulled: the control of every test that compares tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from llm_datadist.integrations.vllm import LLMDataDistConnector
from llm_datadist.integrations.vllm.worker import RankWorker
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from llm_datadist.integrations.vllm.engines import ClaimedOffer
    from llm_datadist.integrations.vllm.offers import Targets

__all__ = ["ZeroedConnector"]


class _ZeroedWorker(RankWorker):
    def _pull(self, claimed: ClaimedOffer, targets: Targets) -> dict[str, float]:
        found = super()._pull(claimed, targets)
        assert self._cache is not None
        assert self._layout is not None
        rows = self._layout.rows
        for view in tensor_views(self._cache):
            for _, numbers in targets:
                for block in numbers:
                    view[block * rows : (block + 1) * rows] = 0
        return found


class ZeroedConnector(LLMDataDistConnector):
    """Pulls as its base does, and reports success, but the blocks are zero."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.WORKER:
            self._half.stop()
            self._half = _ZeroedWorker(vllm_config, kv_cache_config)
