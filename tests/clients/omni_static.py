"""omni-infer's manager with static links, written as that client writes it, and how tests drive it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    Placement,
    RegisterMemStatus,
)
from tests.clients.kv import addresses, contents

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist import Cache
    from tests.support.world import World

__all__ = ["BLOCKS", "KINDS", "Rank", "begin", "drive", "link_all", "pull_kv"]

SCHEDULER_LINK_BATCH_SIZE: Final = 32
SCHEDULER_LINK_INTERVAL: Final = 0.5
ROUND_SECONDS: Final = 3
SYNC_KV_TIMEOUT: Final = 20000
KINDS, LAYERS, BLOCKS, BLOCK_BYTES = 2, 3, 16, 256


@dataclass(frozen=True)
class Rank:
    """One process, or one die of it: its cluster id, its address, its rank in its group."""

    cluster_id: int
    host_ip: str
    rank: int


@dataclass
class StaticManager:
    """One LLMDataDist of that client: linked at the start to all of the other side."""

    role: LLMRole
    own: Rank
    caches: list[Cache] = field(default_factory=list)
    comm_ids: dict[int, int] = field(default_factory=dict)

    def initialise(self) -> LLMDataDist:
        """Rank tables: nobody listens."""
        config = LLMConfig()
        config.device_id = 0
        config.enable_switch_role = True
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = True
        config.sync_kv_timeout = SYNC_KV_TIMEOUT
        self.data_dist = LLMDataDist(self.role, self.own.cluster_id)
        self.data_dist.init(config.generate_options())
        return self.data_dist

    def register(self, unzipped: list[list[NDArray[np.uint8]]]) -> None:
        """One cache per position of the KV tuples; a key at prompts only."""
        for model_id, tensors in enumerate(unzipped):
            blocks, nbytes = tensors[0].shape
            desc = CacheDesc(len(tensors), [blocks, nbytes // 2], DataType.DT_BF16, placement=Placement.DEVICE)
            key = BlocksCacheKey(self.own.cluster_id, model_id) if self.role is LLMRole.PROMPT else None
            self.caches.append(self.data_dist.cache_manager.register_blocks_cache(desc, addresses(tensors), key))

    def link(self, others: list[Rank]) -> None:
        """Begin all links, in bursts."""
        for number, other in enumerate(others):
            if number and number % SCHEDULER_LINK_BATCH_SIZE == 0:
                time.sleep(SCHEDULER_LINK_INTERVAL)
            prompt, decoder = (self.own, other) if self.role is LLMRole.PROMPT else (other, self.own)
            name = f"{prompt.host_ip}-{prompt.cluster_id}-{decoder.host_ip}-{decoder.cluster_id}"
            name = f"{name}-p{prompt.rank}-d{decoder.rank}"
            ranks = {prompt.cluster_id: 0, decoder.cluster_id: 1}
            self.comm_ids[other.cluster_id] = self.data_dist.link(name, ranks, rank_table(prompt, decoder))

    def wait(self) -> int:
        """Poll all of them in rounds; return how many rounds it took."""
        waiting, rounds = set(self.comm_ids), 0
        while waiting:
            rounds += 1
            for cluster_id in sorted(waiting):
                status = self.data_dist.query_register_mem_status(self.comm_ids[cluster_id])
                if status == RegisterMemStatus.FAILED:
                    raise RuntimeError(f"link to {cluster_id} failed")
                if status == RegisterMemStatus.OK:
                    waiting.discard(cluster_id)
            if waiting:
                time.sleep(ROUND_SECONDS)
        return rounds

    def pull_kv(self, cluster_id: int, src: list[int], dst: list[int]) -> None:
        """One call per position."""
        for model_id, cache in enumerate(self.caches):
            self.data_dist.cache_manager.pull_blocks(BlocksCacheKey(cluster_id, model_id), cache, src, dst)


def rank_table(prompt: Rank, decoder: Rank) -> str:
    """Both servers, each with its one device."""
    servers = [
        {
            "server_id": rank.host_ip,
            "device": [{"device_id": str(rank.rank), "device_ip": rank.host_ip, "rank_id": str(number)}],
            "host_ip": rank.host_ip,
        }
        for number, rank in enumerate((prompt, decoder))
    ]
    return json.dumps({"version": "1.0", "server_count": "2", "server_list": servers, "status": "completed"})


# --- at an end --------------------------------------------------------------------------------------------------------


def begin(world: World, role: str, own: Rank, seed: int) -> None:
    """Initialise, register, keep the manager under its cluster id; several may live in one process."""
    manager = StaticManager(LLMRole[role], own)
    manager.initialise()
    managers: dict[int, StaticManager] = world.memory.setdefault("managers", {})
    managers[own.cluster_id] = manager
    world.dd = manager.data_dist
    kinds = [contents(seed + kind, LAYERS, BLOCKS, BLOCK_BYTES) for kind in range(KINDS)]
    for kind, tensors in enumerate(kinds):
        world.memory[f"kv {own.cluster_id} {kind}"] = tensors
    manager.register(kinds)


def drive(world: World, cluster_id: int, method: str, *args: Any) -> Any:
    """Call one of the managers."""
    return getattr(world.memory["managers"][cluster_id], method)(*args)


def link_all(world: World, others: list[Rank]) -> None:
    """All managers of this process link to all of these, then nobody waits."""
    for manager in world.memory["managers"].values():
        manager.link(others)


def pull_kv(world: World, own: int, cluster_id: int, src: list[int], dst: list[int]) -> None:
    """Pull to one of the managers."""
    drive(world, own, "pull_kv", cluster_id, src, dst)


def finalize_all(world: World) -> None:
    """The end of every manager of this process."""
    for manager in world.memory["managers"].values():
        manager.data_dist.finalize()
