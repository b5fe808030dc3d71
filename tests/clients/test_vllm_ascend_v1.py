"""vllm-ascend, v1 engine: LLMDataDistCMgrConnector, written as that client writes it. Links on demand, polled without a
bound; MHA, MLA and sparse caches."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple
from unittest.mock import patch

import pytest

from llm_datadist import BlocksCacheKey, DataType, LLMDataDist, LLMException, LLMRole, RegisterMemStatus
from tests.clients.kv import contents, drive, initialised, options, pulled, rank_table, registered
from tests.support.linking import begin_there, links, result_there
from tests.support.moves import wait_until
from tests.support.ranks import host

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist import Cache
    from tests.support.ends import ChildEnd
    from tests.support.family import Processes
    from tests.support.world import World

pytestmark = pytest.mark.covers("vllm-ascend, v1 engine")

#: Tensors of each registered cache, by kind of attention: bytes of one block. MHA: K0, V0, K1, V1, ... in one cache.
LAYOUTS: Final = {
    "mha": [(8, 2048)],
    "mla": [(4, 4096), (4, 512)],
    "sparse": [(4, 4096), (4, 512), (4, 256)],
}
BLOCKS: Final = 24
REMOTE, LOCAL = [3, 4, 5, 9, 23], [0, 1, 17, 8, 2]


class Agent(NamedTuple):
    """What one worker tells another over its side channel."""

    cluster_id: int
    server_id: str
    device_ip: str
    super_pod_id: str | None = None


def sync_kv_timeout() -> int:
    """Return milliseconds, from the environment: about 33 s."""
    if given := os.environ.get("ASCEND_TRANSFER_TIMEOUT"):
        return int(given)
    timeout = int(os.environ.get("HCCL_RDMA_TIMEOUT", "20"))
    retries = int(os.environ.get("HCCL_RDMA_RETRY_CNT", "7"))
    return int((4.096 * (2**timeout)) * retries // 1000 + 3000)


@dataclass
class Connector:
    role: LLMRole
    own: Agent
    linked: dict[int, int] = field(default_factory=dict)
    caches: list[Cache] = field(default_factory=list)

    def initialise(self) -> LLMDataDist:
        """No listen address, no pool: rank tables only."""
        given = options(
            sync_kv_timeout=sync_kv_timeout(),
            enable_switch_role=True,
            enable_cache_manager=True,
            enable_remote_cache_accessible=True,
        )
        self.datadist = initialised(self.role, self.own.cluster_id, given)
        self.pool = ThreadPoolExecutor(1)
        return self.datadist

    def register(self, groups: list[list[NDArray[np.uint8]]]) -> None:
        """Model 0, or 0 and 1 (k_nope, k_pe), or 0, 1 and 2 (with k_idx)."""
        for model_id, tensors in enumerate(groups):
            try:
                own = self.own.cluster_id
                key = BlocksCacheKey(own) if len(groups) == 1 else BlocksCacheKey(own, model_id)
                values = [tensors[0].shape[1] // 2]
                self.caches.append(registered(self.datadist, tensors, DataType.DT_FLOAT16, values, key))
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
            table_of(prefill, decode),
        )
        while True:
            status = self.datadist.query_register_mem_status(comm_id=comm_id)
            if status == RegisterMemStatus.OK:
                break
            if status == RegisterMemStatus.FAILED:
                raise RuntimeError(f"link to {other.cluster_id} failed")
            time.sleep(0.1)  # 1 there
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
                self.datadist.cache_manager.pull_blocks(key, cache, remote, local)
            except LLMException as error:
                raise RuntimeError(f"pull failed, perhaps it timed out: {error}") from error

    def close(self) -> None:
        self.pool.shutdown()
        self.datadist.finalize()


def table_of(prefill: Agent, decode: Agent) -> str:
    """Return a table of version 1.2, in which device ips are the devices' own."""
    devices = []
    for rank, agent in enumerate((prefill, decode)):
        device = {"device_id": "0", "device_ip": agent.device_ip, "rank_id": str(rank)}
        if agent.super_pod_id is not None:
            device["super_device_id"] = str(rank)
        devices.append((agent.server_id, device))
    return rank_table(devices, "1.2", sorted({each.super_pod_id for each in (prefill, decode) if each.super_pod_id}))


def begin(world: World, role: str, own: Agent, layout: str, seed: int, environment: dict[str, str]) -> int:
    """Initialise and register; return the timeout in force, in ms."""
    connector = Connector(LLMRole[role], own)
    with patch.dict(os.environ, environment):
        world.dd = connector.initialise()
        milliseconds = sync_kv_timeout()
    world.memory["client"] = connector
    groups = [
        contents(seed + model, tensors, BLOCKS, nbytes) for model, (tensors, nbytes) in enumerate(LAYOUTS[layout])
    ]
    world.memory |= {f"kv {model}": tensors for model, tensors in enumerate(groups)}
    connector.register(groups)
    return milliseconds


def read(world: World, other: Agent, remote: list[int], local: list[int]) -> None:
    """Link to the worker that has the blocks, if need be, then pull them."""
    drive(world, "read_blocks", drive(world, "add_remote_agent", other), remote, local)


def agent(number: int, server: int = 0, pod: str | None = None) -> Agent:
    """Worker ``number``: its device has an ip that no host has, which does not matter, because its server has one."""
    return Agent(number, host(server), f"192.0.{os.getpid() % 250}.{number}", pod)


def compared(
    decode: ChildEnd, prefill: ChildEnd, other: Agent, layout: str, remote: list[int], local: list[int]
) -> None:
    """Link, pull, compare every byte; the last remote blocks are meant where there are fewer local ones."""
    names = [(f"kv {model}", f"kv {model}") for model in range(len(LAYOUTS[layout]))]
    pulled(decode, prefill, names, (remote[-len(local) :], local), lambda: decode.do(read, other, remote, local))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_request_links_both_workers_and_pulls(ends: tuple[ChildEnd, ChildEnd], layout: str) -> None:
    prefill, decode = ends
    p, d = agent(1, 0, "0"), agent(2, 1, "1")
    assert prefill.do(begin, "PROMPT", p, layout, 10, {}) == 33_064
    decode.do(begin, "DECODER", d, layout, 20, {})
    # The decode worker asks the prefill worker over the side channel; its answer comes after its own link.
    prefill.do(begin_there, "link", drive, "add_remote_agent", d)
    compared(decode, prefill, p, layout, REMOTE, LOCAL)
    assert prefill.do(result_there, "link") == 2
    compared(decode, prefill, p, layout, REMOTE, LOCAL[:2])
    for end in ends:
        end.do(drive, "close")


def test_two_prefill_workers_one_of_them_late_on_loopback_addresses_serve_one_decode_worker(
    processes: Processes,
) -> None:
    first, second, decode = (processes.child(name) for name in ("prefill 1", "prefill 2", "decode"))
    p, q, d = agent(1), agent(2), agent(3)
    assert p.server_id.startswith("127.")
    first.do(begin, "PROMPT", p, "mla", 10, {})
    decode.do(begin, "DECODER", d, "mla", 20, {"ASCEND_TRANSFER_TIMEOUT": "20000"})
    first.do(begin_there, "link", drive, "add_remote_agent", d)
    compared(decode, first, p, "mla", REMOTE[:3], LOCAL[:3])
    decode.do(begin_there, "late", drive, "add_remote_agent", q)  # it polls before the other one is there
    second.do(begin, "PROMPT", q, "mla", 30, {})
    assert second.do(drive, "add_remote_agent", d) == 3
    assert (first.do(result_there, "link"), decode.do(result_there, "late")) == (3, 2)
    compared(decode, second, q, "mla", REMOTE[3:], LOCAL[3:])
    assert decode.do(links) == {1: "ready", 2: "ready"}
    first.do(drive, "remove_remote_agent", 3)
    wait_until(lambda: decode.do(links) == {2: "ready"})
    with pytest.raises(RuntimeError, match="cluster 1 is not linked"):
        decode.do(drive, "read_blocks", 1, REMOTE, LOCAL)
    for end in (decode, first, second):
        end.do(drive, "close")
