"""The class of the store connector, and the engines that it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from llm_datadist.errors import LLMException, LLMStatusCode, ParamError
from llm_datadist.integrations.vllm.connector import HalvedConnector
from llm_datadist.integrations.vllm.kinds import require_supported, windows_of
from llm_datadist.integrations.vllm.store_scheduler import StoreScheduler
from llm_datadist.integrations.vllm.store_worker import StoreWorker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig

_HASHES: Final = ("sha256_cbor", "sha256")


class LLMDataDistStoreConnector(HalvedConnector):
    """Keeps KV of prefixes in the host's store (`llm_datadist.store`), and loads it from there.

    docs/howto-vllm-store.md has its options (``kv_connector_extra_config``). Threads: vLLM's.
    """

    _cache_hit_source = CacheHitSource.HOST
    supports_sleep_mode = False  # vLLM 0.32 does not ask
    requires_kv_delivery = False  # what is not saved is computed

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _require_storable(vllm_config, kv_cache_config, role)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = StoreScheduler(vllm_config, kv_cache_config)
        else:
            self._worker = StoreWorker(vllm_config, kv_cache_config)

    def has_pending_block_frees(self) -> bool:
        """Return True if a running request had better wait for blocks that are saved than preempt another."""
        return bool(self._scheduler.frees_soon())

    def take_events(self) -> Iterable[KVCacheEvent]:
        found: list[KVCacheEvent] = self._scheduler.take_events()
        return found

    def shutdown(self) -> None:
        (self._worker or self._scheduler).stop()


def _require_storable(config: VllmConfig, cache: KVCacheConfig, role: KVConnectorRole) -> None:
    """Raise ParamError or LLMException, in one sentence, for an engine that this connector cannot serve."""
    transfer = config.kv_transfer_config
    option = transfer.get_from_extra_config
    if not isinstance(option("store", None), str):
        raise ParamError('store: not given; kv_connector_extra_config needs "store": "IP:PORT" of `llm-datadist store`')
    if transfer.kv_role != "kv_both":
        raise ParamError(f"kv_role={transfer.kv_role}: LLMDataDistStoreConnector is kv_both")
    # Inside MultiConnector, workers see vLLM's own configuration, and the scheduler its part's only.
    whole = get_current_vllm_config_or_none() or config
    if role is KVConnectorRole.WORKER and whole.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ParamError(
            "kv_load_failure_policy: not recompute; a store may lose what it has, so requests must be computed then"
        )
    algorithm = config.cache_config.prefix_caching_hash_algo
    if algorithm not in _HASHES:
        raise ParamError(
            f"prefix_caching_hash_algo={algorithm}: its seed is random, or prompts can be made that collide; "
            "use sha256_cbor"
        )
    require_supported(config, cache)
    found = ""
    if current_platform.device_type != "cpu" or option("staging", None):
        found = f"KV on {current_platform.device_type}, nor staging it"
    elif config.speculative_config is not None:
        found = "speculative decoding"
    elif windows_of(cache) != [None]:
        found = (
            f"{len(cache.kv_cache_groups)} groups of layers or sliding windows, only one group of full attention or MLA"
        )
    if found:
        said = f"LLMDataDistStoreConnector does not support {found}"
        raise LLMException(said, status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
