"""vllm-ascend's LLMDataDistCMgrConnector, written as that client writes it, and how tests drive it."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMException,
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

__all__ = ["LAYOUTS", "Agent", "begin", "begin_read", "drive"]

#: Tensors of each registered cache, by kind of attention: bytes of one block. MHA: K0, V0, K1, V1, ... in one cache.
LAYOUTS: Final[dict[str, list[tuple[int, int]]]] = {
    "mha": [(8, 2048)],
    "mla": [(4, 4096), (4, 512)],
    "sparse": [(4, 4096), (4, 512), (4, 256)],
}
BLOCKS: Final = 24
POLL_SECONDS: Final = 1


@dataclass(frozen=True)
class Agent:
    """What one worker tells another over its side channel."""

    cluster_id: int
    server_id: str
    device_ip: str
    super_pod_id: str | None = None


def sync_kv_timeout() -> int:
    """Return milliseconds, from the environment: about 33 s."""
    given = os.environ.get("ASCEND_TRANSFER_TIMEOUT")
    if given:
        return int(given)
    timeout = int(os.environ.get("HCCL_RDMA_TIMEOUT", "20"))
    retries = int(os.environ.get("HCCL_RDMA_RETRY_CNT", "7"))
    return int((4.096 * (2**timeout)) * retries // 1000 + 3000)


@dataclass
class Connector:
    """One worker's connector."""

    role: LLMRole
    own: Agent
    linked: dict[int, int] = field(default_factory=dict)
    caches: list[Cache] = field(default_factory=list)

    def initialise(self) -> LLMDataDist:
        """No listen address, no pool: rank tables only."""
        config = LLMConfig()
        config.device_id = 0
        config.sync_kv_timeout = sync_kv_timeout()
        config.enable_switch_role = True
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = True
        self.datadist = LLMDataDist(self.role, self.own.cluster_id)
        self.datadist.init(config.generate_options())
        self.cache_manager = self.datadist.cache_manager
        self.pool = ThreadPoolExecutor(1)
        return self.datadist

    def register(self, groups: list[list[NDArray[np.uint8]]]) -> None:
        """Model 0, or 0 and 1 (k_nope, k_pe), or 0, 1 and 2 (with k_idx)."""
        for model_id, tensors in enumerate(groups):
            desc = CacheDesc(
                len(tensors), [BLOCKS, tensors[0].shape[1] // 2], DataType.DT_FLOAT16, placement=Placement.DEVICE
            )
            try:
                if len(groups) == 1:
                    key = BlocksCacheKey(self.own.cluster_id)
                else:
                    key = BlocksCacheKey(self.own.cluster_id, model_id)
                self.caches.append(self.cache_manager.register_blocks_cache(desc, addresses(tensors), key))
            except (TypeError, ValueError) as error:
                raise RuntimeError(f"register failed: {error}") from error

    def add_remote_agent(self, other: Agent) -> int:
        """Link on demand, and poll without an upper bound; both workers of a pair do this."""
        if other.cluster_id in self.linked:
            return other.cluster_id
        prefill, decode = (self.own, other) if self.role is LLMRole.PROMPT else (other, self.own)
        comm_id = self.datadist.link(
            f"pd_comm_{prefill.device_ip}_{decode.device_ip}",
            {prefill.cluster_id: 0, decode.cluster_id: 1},
            rank_table(prefill, decode),
        )
        while True:
            status = self.datadist.query_register_mem_status(comm_id=comm_id)
            if status == RegisterMemStatus.OK:
                break
            if status == RegisterMemStatus.FAILED:
                raise RuntimeError(f"link to {other.cluster_id} failed")
            time.sleep(POLL_SECONDS)
        self.linked[other.cluster_id] = comm_id
        return other.cluster_id

    def remove_remote_agent(self, cluster_id: int) -> None:
        """Give it up, on request of the other worker."""
        self.datadist.unlink(self.linked.pop(cluster_id))

    def read_blocks(self, cluster_id: int, remote: list[int], local: list[int]) -> None:
        """Pull in the one thread; fewer local blocks take the last of the remote ones."""
        self.pool.submit(self._read_blocks, cluster_id, remote, local).result()

    def _read_blocks(self, cluster_id: int, remote: list[int], local: list[int]) -> None:
        if len(local) < len(remote):
            remote = remote[-len(local) :]
        for model_id, cache in enumerate(self.caches):
            try:
                key = BlocksCacheKey(cluster_id, model_id=model_id)
                self.cache_manager.pull_blocks(key, cache, remote, local)
            except LLMException as error:
                raise RuntimeError(f"pull failed, perhaps it timed out: {error}") from error

    def close(self) -> None:
        """End the thread, and the LLMDataDist."""
        self.pool.shutdown()
        self.datadist.finalize()


def rank_table(prefill: Agent, decode: Agent) -> str:
    """Return a table of version 1.2, in which device ips are the devices' own."""
    servers: list[dict[str, Any]] = []
    for rank, agent in enumerate((prefill, decode)):
        device = {"device_id": "0", "device_ip": agent.device_ip, "rank_id": str(rank)}
        if agent.super_pod_id is not None:
            device["super_device_id"] = str(rank)
        if servers and servers[0]["server_id"] == agent.server_id:
            servers[0]["device"].append(device)
        else:
            servers.append({"server_id": agent.server_id, "device": [device]})
    table: dict[str, Any] = {
        "version": "1.2",
        "server_count": str(len(servers)),
        "server_list": servers,
        "status": "completed",
    }
    if prefill.super_pod_id is not None:
        pods = {prefill.super_pod_id, decode.super_pod_id}
        table["super_pod_list"] = [
            {"super_pod_id": pod, "server_list": [{"server_id": server["server_id"]} for server in servers]}
            for pod in sorted(map(str, pods))
        ]
    return json.dumps(table)


# --- at an end --------------------------------------------------------------------------------------------------------


def begin(world: World, role: str, own: Agent, layout: str, seed: int, environment: dict[str, str]) -> int:
    """Initialise and register; return the timeout in force, in ms."""
    os.environ.update(environment)
    try:
        connector = Connector(LLMRole[role], own)
        world.dd = connector.initialise()
        milliseconds = sync_kv_timeout()
    finally:
        for name in environment:
            del os.environ[name]
    world.memory["connector"] = connector
    groups = [
        contents(seed + model, tensors, BLOCKS, nbytes) for model, (tensors, nbytes) in enumerate(LAYOUTS[layout])
    ]
    for model, tensors in enumerate(groups):
        world.memory[f"kv {model}"] = tensors
    connector.register(groups)
    return milliseconds


def drive(world: World, method: str, *args: Any) -> Any:
    """Call the connector."""
    return getattr(world.memory["connector"], method)(*args)


def begin_read(world: World, other: Agent, remote: list[int], local: list[int]) -> None:
    """Link to whoever has the blocks, if need be, then pull them."""
    cluster_id = drive(world, "add_remote_agent", other)
    drive(world, "read_blocks", cluster_id, remote, local)
