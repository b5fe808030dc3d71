"""omni-infer's manager with dynamic links, written as that client writes it, and how tests drive it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_datadist import (
    BlocksCacheKey,
    DataType,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from tests.clients.kv import contents, initialised, options, registered, shown
from tests.support.linking import info
from tests.support.moves import moved, same_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist import Cache
    from tests.support.ends import ChildEnd
    from tests.support.world import World


SYNC_KV_TIMEOUT = 5000
LINK_TIMEOUT = 5000
KV_CACHE_RETRY_TIMES = 1
RETRYABLE = (
    LLMStatusCode.LLM_REPEAT_REQUEST,
    LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT,
    LLMStatusCode.LLM_PROCESSING_LINK,
    LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
    LLMStatusCode.LLM_TIMEOUT,
    LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
    LLMStatusCode.LLM_LINK_BUSY,
)


def pack_cluster_id(host: str, port: int, tp: int) -> int:
    """ip (32 bits), port (16), tensor parallel size (16): all 64 bits are in use."""
    return int(ipaddress.IPv4Address(host)) << 32 | port << 16 | tp


@dataclass(frozen=True)
class Prompt:
    """What a decoder is told about a prompt with the first request: the host gets a new timestamp when it restarts."""

    cluster_id: int
    ip: str
    port: int
    timestamp: int


@dataclass
class OmniManager:
    """One LLMDataDist of that client, with its registered caches and its map of links."""

    role: LLMRole
    cluster_id: int
    local_ip: str = "127.0.0.1"
    links: dict[int, Prompt] = field(default_factory=dict)
    caches: list[Cache] = field(default_factory=list)
    attempts: int = 0

    def initialise(self, listen_port: int | None = None) -> LLMDataDist:
        """Only prompts listen; an empty local_comm_res stands for CacheManager and remote access."""
        listen = {} if listen_port is None else {"listen_ip_info": f"{self.local_ip}:{listen_port}"}
        self.options = options(
            local_comm_res="", enable_remote_cache_accessible=True, sync_kv_timeout=SYNC_KV_TIMEOUT, **listen
        )
        self.data_dist = initialised(self.role, self.cluster_id, self.options)
        return self.data_dist

    # --- memory ----------------------------------------------------------------------------------------------------

    def register(self, kinds: list[list[NDArray[np.uint8]]], data_type: DataType = DataType.DT_BF16) -> None:
        """One cache per position of the KV tuples (K, V, rope): the position is the model id. Decoders give no key."""
        for model_id, tensors in enumerate(kinds):
            key = BlocksCacheKey(self.cluster_id, model_id) if self.role is LLMRole.PROMPT else None
            self.caches.append(self.register_one(tensors, key, data_type))

    def register_one(
        self, tensors: list[NDArray[np.uint8]], key: BlocksCacheKey | None, data_type: DataType = DataType.DT_BF16
    ) -> Cache:
        """Register one list of tensors, (blocks, bytes) each."""
        values = [tensors[0].shape[1] // data_type.itemsize]
        return registered(self.data_dist, tensors, data_type, values, key)

    def unregister(self) -> None:
        """Drop all caches: a change of topology, or sleep."""
        for cache in self.caches:
            self.data_dist.cache_manager.unregister_cache(cache.cache_id)
        self.caches.clear()

    # --- links -----------------------------------------------------------------------------------------------------

    def link(self, prompt: Prompt) -> None:
        """Link now; raise unless all went well."""
        cluster = info(prompt.cluster_id, prompt.port, ip=prompt.ip, local=self.local_ip)
        status, _ = self.data_dist.link_clusters([cluster], timeout=LINK_TIMEOUT)
        if status != LLMStatusCode.LLM_SUCCESS:
            raise RuntimeError(f"link to {prompt.cluster_id}: {status}")
        self.links[prompt.cluster_id] = prompt

    def force_unlink(self, *cluster_ids: int) -> None:
        """By id alone; also of what is dead or was never linked."""
        clusters = [info(cluster_id, local=None) for cluster_id in cluster_ids]
        status, each = self.data_dist.unlink_clusters(clusters, timeout=LINK_TIMEOUT, force=True)
        if status != LLMStatusCode.LLM_SUCCESS:
            raise RuntimeError(f"unlink: {status} {each}")
        for cluster_id in cluster_ids:
            self.links.pop(cluster_id, None)

    def close_link(self, prompt: Prompt) -> None:
        """Unlink in agreement with the peer: before sleep."""
        cluster = info(prompt.cluster_id, prompt.port, ip=prompt.ip, local=self.local_ip)
        status, _ = self.data_dist.unlink_clusters([cluster], timeout=LINK_TIMEOUT)
        if status != LLMStatusCode.LLM_SUCCESS:
            raise RuntimeError(f"unlink: {status}")
        del self.links[prompt.cluster_id]

    # --- pulling ---------------------------------------------------------------------------------------------------

    def pull_kv(self, prompt: Prompt, src_blocks: list[int], dst_blocks: list[int]) -> None:
        """Link lazily, pull every model id; after a failure force-unlink, link again and pull once more."""
        known = self.links.get(prompt.cluster_id)
        if known is not None and known.timestamp != prompt.timestamp:
            self.force_unlink(prompt.cluster_id)
        if prompt.cluster_id not in self.links:
            self.link(prompt)
        if self._pull(prompt, src_blocks, dst_blocks):
            return
        self.force_unlink(prompt.cluster_id)
        self.link(prompt)
        if not self._pull(prompt, src_blocks, dst_blocks):
            raise RuntimeError(f"pull from {prompt.cluster_id} failed")

    def _pull(self, prompt: Prompt, src_blocks: list[int], dst_blocks: list[int]) -> bool:
        return all(self._pull_one(prompt, i, cache, src_blocks, dst_blocks) for i, cache in enumerate(self.caches))

    def _pull_one(self, prompt: Prompt, model_id: int, cache: Cache, src: list[int], dst: list[int]) -> bool:
        key = BlocksCacheKey(prompt.cluster_id, model_id)
        for _ in range(KV_CACHE_RETRY_TIMES):
            self.attempts += 1
            try:
                self.data_dist.cache_manager.pull_blocks(key, cache, src, dst)
            except LLMException as error:
                if error.status_code not in RETRYABLE:
                    return False
            except (TypeError, ValueError):
                raise
            else:
                return True
        return False

    # --- sleep mode ------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """A prompt finalizes; its object and its options stay."""
        self.data_dist.finalize()
        self.caches.clear()

    def wake(self) -> None:
        """The same object, the saved options."""
        self.data_dist.init(self.options)


# --- at an end, and from the test ---------------------------------------------------------------------------------

KINDS, LAYERS, BLOCKS, BLOCK_BYTES = 3, 4, 40, 320
HOST_P, HOST_D = "203.0.113.7", "198.51.100.9"
PROMPT_ID, DECODER_ID = pack_cluster_id(HOST_P, 26000, 8), pack_cluster_id(HOST_D, 26000, 8)

SRC, DST = [5, 6, 7, 30, 2], [0, 1, 11, 10, 39]


def start(world: World, prompt: bool, seed: int, port: int | None = None) -> int | None:
    """Make the manager, initialise it, register K, V and rope."""
    manager = OmniManager(LLMRole.PROMPT if prompt else LLMRole.DECODER, PROMPT_ID if prompt else DECODER_ID)
    world.memory["client"] = manager
    world.dd = manager.initialise((port or 0) if prompt else None)
    register(world, seed)
    return world.dd.listen_port


def register(world: World, seed: int) -> None:
    """Make fresh memory and register it."""
    for kind in range(KINDS):
        world.memory[f"kv {kind}"] = contents(seed + kind, LAYERS, BLOCKS, BLOCK_BYTES)
    world.memory["client"].register([world.memory[f"kv {kind}"] for kind in range(KINDS)])


def attempts(world: World) -> int:
    count: int = world.memory["client"].attempts
    return count


def holds(end: ChildEnd, own_seed: int, prompt_seed: int, *, src: list[int] = SRC, dst: list[int] = DST) -> None:
    """Every byte of all kinds: the prompt's in the blocks that were asked for, its own everywhere else."""
    for kind in range(KINDS):
        before = contents(own_seed + kind, LAYERS, BLOCKS, BLOCK_BYTES)
        source = contents(prompt_seed + kind, LAYERS, BLOCKS, BLOCK_BYTES)
        same_bytes(end.do(shown, f"kv {kind}"), moved(before, source, zip(dst, src, strict=True)))


def told(port: int | None, timestamp: int = 1) -> Prompt:
    assert port is not None
    return Prompt(PROMPT_ID, "127.0.0.1", port, timestamp)
