"""The classes that vLLM makes, one in its scheduler and one in each worker; they pass each call to their half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.version import __version__ as vllm_version

from llm_datadist.errors import ParamError
from llm_datadist.integrations.vllm.kinds import require_supported, windows_of
from llm_datadist.integrations.vllm.scheduler import Scheduler
from llm_datadist.integrations.vllm.stats import Stats, StatsMetrics, StoreStatsMetrics
from llm_datadist.integrations.vllm.store_scheduler import StoreScheduler
from llm_datadist.integrations.vllm.store_worker import StoreWorker
from llm_datadist.integrations.vllm.worker import RankWorker

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorTransferResults,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.datadist")

TRIED: Final = ("0.32.0",)
_HASHES: Final = ("sha256_cbor", "sha256")
_WEAK: Final = "its seed is random, or prompts can be made that collide"


def passed(method: str) -> Callable[..., Any]:
    """Return a method of a connector that passes its arguments to a method of its half."""

    def call(self: HalvedConnector, *args: Any) -> Any:
        return getattr(self._half, method)(*args)

    return call


class HalvedConnector(KVConnectorBase_V1, SupportsHMA):
    """Passes vLLM's calls to its half: one of the scheduler, or one of a worker."""

    supports_sleep_mode = False  # vLLM 0.32 does not ask
    _half: Any
    _halves: tuple[type[Any], type[Any]]
    build_prom_metrics = StatsMetrics

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER and vllm_version.partition("+")[0] not in TRIED:
            logger.warning_once("vLLM %s was never tried with these connectors; %s was", vllm_version, *TRIED)
        require_supported(vllm_config, kv_cache_config)
        self._require(vllm_config, kv_cache_config, role)
        scheduler, worker = self._halves
        self._half = (scheduler if role is KVConnectorRole.SCHEDULER else worker)(vllm_config, kv_cache_config)

    def _require(self, config: VllmConfig, cache: KVCacheConfig, role: KVConnectorRole) -> None:
        """Raise ParamError, in one sentence, for an engine that this connector cannot serve."""

    shutdown = passed("stop")

    # --- in the scheduler ---------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._half.pool = gpu_block_pool

    on_new_request = passed("on_new_request")
    update_state_after_alloc = passed("allocated")
    update_connector_output = passed("take_output")
    has_pending_push_work = passed("needs_steps")
    build_connector_meta = passed("take_orders")
    request_finished_all_groups = passed("finished")

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens to fetch, None to be asked again, and True if any: they load between steps."""
        count = self._half.matched_tokens(request, num_computed_tokens)
        return count, bool(count)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._half.finished(request, (block_ids,))

    # --- in a worker --------------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Return the context that allocates the KV cache from the pool."""
        return self._half.allocation

    register_kv_caches = passed("register")
    set_host_xfer_buffer_ops = passed("use_copies")
    wait_for_save = passed("save")
    build_connector_worker_meta = passed("take_told")

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._half.obey(self._get_connector_metadata(), idle=forward_context.attn_metadata is None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests are parked until all of their KV is there."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: peers read the blocks in place, or slots are copied once a step has run."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._half.results()

    # --- metrics ------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._half.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return Stats(data or {})


class LLMDataDistConnector(HalvedConnector):
    """Moves a prompt's KV cache from a prefill engine to a decode engine.

    docs/vllm.md has its options (``kv_connector_extra_config``). Threads: vLLM's. Inside a MultiConnector, which hands
    the first part's handshake to all parts, ranks tell their endpoints with the results of the first step.
    """

    _cache_hit_source = CacheHitSource.P2P
    _halves = Scheduler, RankWorker

    set_xfer_handshake_metadata_pp_aware = passed("take_endpoints")
    #: Ends the grants of aborted and preempted requests, before this step overwrites their blocks.
    handle_preemptions = passed("revoke")

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return all transferred groups: the blocks are the request's own."""
        return self._kv_cache_config.transfer_group_ids

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._half.endpoint() if get_kv_transfer_group() is self else None


class LLMDataDistStoreConnector(HalvedConnector):
    """Keeps KV of prefixes in the host's store (`llm_datadist.store`), and loads it from there.

    docs/howto-vllm-store.md has its options (``kv_connector_extra_config``). Threads: vLLM's.
    """

    _cache_hit_source = CacheHitSource.HOST
    requires_kv_delivery = False  # what is not saved is computed
    _halves = StoreScheduler, StoreWorker
    build_prom_metrics = StoreStatsMetrics

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

    take_events = passed("take_events")
    reset_cache = passed("reset")
