"""The demo's two sides, written as users would write them, and the reference run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)
from llm_datadist.demo.messages import DemoOffer, DemoOutcome, DemoProgress, Event, Reference, Said
from llm_datadist.demo.model import Llama, PagedKV, Progress
from llm_datadist.demo.workload import DemoMemory, DemoWorkload, Setup
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from numpy.typing import NDArray


Emit = Callable[[Event], None]
"""Receiver of a role's events."""

_PROMPT_ID: Final = 0
_DECODER_ID: Final = 1
_HOST: Final = "127.0.0.1"
_PAGE_SHIFT: Final = 16
_LINK_TIMEOUT_MS: Final = 5_000
# Far above the pull's time: a loaded machine must not fail the demo.
_PULL_TIMEOUT_MS: Final = 10_000


def run_reference(workload: DemoWorkload, emit: Emit) -> Reference:
    """Run prompt and generation in this process on plain NumPy memory, without the library."""
    model = Llama(workload.model)
    tensors = [np.zeros(workload.shape, dtype=np.float32) for _ in range(workload.num_tensors)]
    kv = PagedKV(tensors, range(workload.pool_blocks))
    started = time.perf_counter()
    first_token = model.prefill(workload.prompt(), kv, workload.chunk, _progress(emit, "prefill"))
    digest = kv.digest()
    tokens = model.generate(first_token, workload.generate, kv, _progress(emit, "generate"))
    return Reference(first_token, tokens, digest, time.perf_counter() - started)


class PromptSide:
    """The prompt (prefill) side: computes and publishes the KV cache; ``close`` finalizes ``datadist``."""

    def __init__(self, workload: DemoWorkload, setup: Setup) -> None:
        self._workload = workload
        self._setup = setup
        self.datadist = _start(LLMRole.PROMPT, _PROMPT_ID, workload, setup)

    def publish(self, model: Llama, emit: Emit) -> DemoOffer:
        """Run the prompt into a blocks cache; return the offer."""
        workload = self._workload
        cache, tensors = _blocks_cache(self.datadist, workload, self._setup.memory, BlocksCacheKey(_PROMPT_ID, 0))
        self._tensors = tensors  # registered memory must outlive its registration
        for tensor in tensors:
            tensor.fill(0)
        kv = PagedKV(tensors, workload.source_blocks())
        first_token = model.prefill(workload.prompt(), kv, workload.chunk, _progress(emit, "prefill"))
        blocks = kv.used_blocks().tolist()
        emit(Said(f"published cache {cache.cache_id}: {len(blocks)} blocks in {workload.num_tensors} tensors"))
        port = self.datadist.listen_port
        assert port is not None, "the options ask for a port"
        return DemoOffer(port, blocks, kv.length, first_token, kv.digest())

    def close(self) -> None:
        """Free the cache and the port."""
        self.datadist.finalize()


class DecoderSide:
    """The decoder side: links, pulls the prompt side's blocks and generates; ``close`` finalizes ``datadist``."""

    def __init__(self, workload: DemoWorkload, setup: Setup) -> None:
        self._workload = workload
        self._setup = setup
        self.datadist = _start(LLMRole.DECODER, _DECODER_ID, workload, setup)
        self._cache, self._tensors = _blocks_cache(self.datadist, workload, setup.memory)
        for tensor in self._tensors:
            # Missing bytes stay NaN, so that no token is right by accident.
            tensor.fill(np.nan)

    def run(self, offer: DemoOffer, model: Llama, emit: Emit) -> DemoOutcome:
        """Link, pull the offered blocks into others, unlink and generate."""
        cluster = _cluster(offer.port)
        _check("link_clusters", *self.datadist.link_clusters([cluster], timeout=_LINK_TIMEOUT_MS))
        choice = self.datadist.explain(remote_cluster_id=_PROMPT_ID)
        # Registered memory may use another transport than pools.
        private = choice.private_transport if self._setup.memory is DemoMemory.REGISTERED else None
        transport = private or choice.transport
        emit(Said(f"linked over {transport}"))
        blocks = self._workload.destination_blocks()
        manager, key = self.datadist.cache_manager, BlocksCacheKey(_PROMPT_ID, 0)
        destination = blocks[: len(offer.blocks)]
        started = time.perf_counter()
        manager.pull_blocks(key, self._cache, src_blocks=offer.blocks, dst_blocks=destination)
        seconds = time.perf_counter() - started
        kv = PagedKV(self._tensors, blocks, offer.length)
        digest = kv.digest()
        nbytes = len(offer.blocks) * self._workload.block_bytes * self._workload.num_tensors
        emit(Said(f"pulled {len(offer.blocks)} blocks, {nbytes / 1e6:.1f} MB, in {seconds * 1e3:.2f} ms"))
        _check("unlink_clusters", *self.datadist.unlink_clusters([cluster], timeout=_LINK_TIMEOUT_MS))
        tokens = model.generate(offer.first_token, self._workload.generate, kv, _progress(emit, "generate"))
        return DemoOutcome(tokens, digest, transport, choice.reason, len(offer.blocks), nbytes, seconds, choice.sealed)

    def close(self) -> None:
        """Free the cache."""
        self.datadist.finalize()


def _start(role: LLMRole, cluster_id: int, workload: DemoWorkload, setup: Setup) -> LLMDataDist:
    page = 1 << _PAGE_SHIFT
    pool_bytes = -(-workload.tensor_bytes // page) * page * workload.num_tensors
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.mem_pool_cfg = json.dumps({"memory_size": pool_bytes, "page_shift": _PAGE_SHIFT})
    config.sync_kv_timeout = _PULL_TIMEOUT_MS
    if role is LLMRole.PROMPT:
        # Port 0: any free port; datadist.listen_port has it.
        config.listen_ip_info = f"{_HOST}:0"
    options = config.generate_options()
    options["llm.Transport"] = setup.transport
    if setup.secrets is not None:
        options["llm.AuthSecretFile"] = setup.secrets
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(options)
    return datadist


def _blocks_cache(
    datadist: LLMDataDist, workload: DemoWorkload, memory: DemoMemory, key: BlocksCacheKey | None = None
) -> tuple[Cache, list[NDArray[Any]]]:
    manager = datadist.cache_manager
    desc = CacheDesc(workload.num_tensors, list(workload.shape), DataType.DT_FLOAT)
    if memory is DemoMemory.POOL:
        cache = manager.allocate_blocks_cache(desc, key)
        return cache, tensor_views(cache)
    tensors = [np.empty(workload.shape, dtype=np.float32) for _ in range(workload.num_tensors)]
    return manager.register_blocks_cache(desc, [each.ctypes.data for each in tensors], key), tensors


def _cluster(port: int) -> LLMClusterInfo:
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = _PROMPT_ID
    cluster.append_local_ip_info(_HOST, 0)
    cluster.append_remote_ip_info(_HOST, port)
    return cluster


def _check(what: str, status: LLMStatusCode, each: list[LLMStatusCode]) -> None:
    if status != LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"{what} to cluster {_PROMPT_ID} failed: {status} ({', '.join(map(str, each))})")


def _progress(emit: Emit, what: str) -> Progress:
    return lambda done, total: emit(DemoProgress(what, done, total))
