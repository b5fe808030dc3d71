"""The class of the store connector, and the engines that it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from llm_datadist.errors import ParamError
from llm_datadist.integrations.vllm.connector import HalvedConnector, passed
from llm_datadist.integrations.vllm.kinds import windows_of
from llm_datadist.integrations.vllm.stats import StoreStatsMetrics
from llm_datadist.integrations.vllm.store_scheduler import StoreScheduler
from llm_datadist.integrations.vllm.store_worker import StoreWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig

_HASHES: Final = ("sha256_cbor", "sha256")
_WEAK: Final = "its seed is random, or prompts can be made that collide"


class LLMDataDistStoreConnector(HalvedConnector):
    """Keeps KV of prefixes in the host's store (`llm_datadist.store`), and loads it from there.

    docs/howto-vllm-store.md has its options (``kv_connector_extra_config``). Threads: vLLM's.
    """

    _cache_hit_source = CacheHitSource.HOST
    requires_kv_delivery = False  # what is not saved is computed
    _halves, _metrics = (StoreScheduler, StoreWorker), StoreStatsMetrics

    def _require(self, config: VllmConfig, cache: KVCacheConfig, role: KVConnectorRole) -> None:
        transfer, algorithm = config.kv_transfer_config, config.cache_config.prefix_caching_hash_algo
        option = transfer.get_from_extra_config
        # Inside MultiConnector, workers see vLLM's own configuration, and the scheduler its part's only.
        whole = (get_current_vllm_config_or_none() or config).kv_transfer_config
        worker, policy = role is KVConnectorRole.WORKER, whole.kv_load_failure_policy
        for refused, rule in (
            (not isinstance(option("store", None), str), 'store: "IP:PORT" of `llm-datadist store` is needed'),
            (transfer.kv_role != "kv_both", f"kv_role={transfer.kv_role}: must be kv_both"),
            (worker and policy != "recompute", f"kv_load_failure_policy={policy}: must be recompute"),
            (algorithm not in _HASHES, f"prefix_caching_hash_algo={algorithm}: {_WEAK}; use sha256_cbor"),
            (config.speculative_config is not None, "speculative decoding is not supported"),
            (windows_of(cache) != [None], "layers: only one group of full attention or MLA is supported"),
        ):
            if refused:
                raise ParamError(f"LLMDataDistStoreConnector: {rule}")

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        hashed, size = gpu_block_pool.hash_block_size, self._vllm_config.cache_config.block_size
        if hashed != size:  # a key would name other tokens than its block has
            raise ParamError(f"LLMDataDistStoreConnector: hash_block_size={hashed}: must be the block size, {size}")
        super().bind_gpu_block_pool(gpu_block_pool)

    take_events = passed("_scheduler", "take_events")
    reset_cache = passed("_scheduler", "reset")
