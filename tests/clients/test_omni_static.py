"""omni-infer's manager with static links, written as that client writes it: every pair linked at the start, in bursts;
many ranks for one decoder."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import (
    BlocksCacheKey,
    DataType,
    LLMDataDist,
    LLMRole,
    RegisterMemStatus,
)
from tests.clients.kv import contents, initialised, options, pulled, registered
from tests.support.linking import links
from tests.support.ranks import host

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist import Cache
    from tests.clients.conftest import Processes
    from tests.support.world import World

pytestmark = pytest.mark.covers("omni-infer, static")

SCHEDULER_LINK_BATCH_SIZE: Final = 32
SCHEDULER_LINK_INTERVAL: Final = 0.5
ROUND_SECONDS: Final = 0.3  # 3 there
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
        given = options(
            enable_switch_role=True,
            enable_cache_manager=True,
            enable_remote_cache_accessible=True,
            sync_kv_timeout=SYNC_KV_TIMEOUT,
        )
        self.data_dist = initialised(self.role, self.own.cluster_id, given)
        return self.data_dist

    def register(self, unzipped: list[list[NDArray[np.uint8]]]) -> None:
        """One cache per position of the KV tuples; a key at prompts only."""
        for model_id, tensors in enumerate(unzipped):
            key = BlocksCacheKey(self.own.cluster_id, model_id) if self.role is LLMRole.PROMPT else None
            values = [tensors[0].shape[1] // 2]
            self.caches.append(registered(self.data_dist, tensors, DataType.DT_BF16, values, key))

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


# --- the test ---------------------------------------------------------------------------------------------------------

SRC, DST = [1, 2, 3, 15], [8, 0, 1, 12]


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


def link_all(world: World, others: list[Rank]) -> None:
    """All managers of this process link to all of these, without waiting for any."""
    for manager in world.memory["managers"].values():
        manager.link(others)


def drive(world: World, cluster_id: int, method: str, *args: Any) -> Any:
    """Call one of the managers."""
    return getattr(world.memory["managers"][cluster_id], method)(*args)


def finalize_all(world: World) -> None:
    """The end of every manager of this process."""
    for manager in world.memory["managers"].values():
        manager.data_dist.finalize()


def test_more_pairs_than_one_burst_all_become_ready_and_many_ranks_serve_two_decoders(processes: Processes) -> None:
    """36 prompts, all in one process here, and two decoders: 32 links of each, a pause, 4 more."""
    prompts = [Rank(2**63 + number, host(0), number) for number in range(36)]
    decoders = [Rank(2**64 - 2, host(1), 0), Rank(11, host(0), 1)]
    prompt = processes.born("prompts")
    ends = {rank.cluster_id: processes.born(f"cluster {rank.cluster_id}") for rank in decoders}
    for rank in prompts:
        prompt.do(begin, "PROMPT", rank, rank.rank)
    for rank in decoders:
        ends[rank.cluster_id].do(begin, "DECODER", rank, 100 + rank.rank)
        ends[rank.cluster_id].do(link_all, prompts)
    prompt.do(link_all, decoders)
    for own, decoder in ends.items():
        assert decoder.do(drive, own, "wait") <= 10
        assert decoder.do(links) == {rank.cluster_id: "ready" for rank in prompts}
    assert prompt.do(drive, prompts[35].cluster_id, "wait") <= 4
    # Each rank has other blocks of a request.
    for (own, decoder), (at, rank) in itertools.product(
        ends.items(), enumerate((prompts[0], prompts[17], prompts[35]))
    ):
        dst = [(block + at) % BLOCKS for block in DST]
        names = [(f"kv {own} {kind}", f"kv {rank.cluster_id} {kind}") for kind in range(KINDS)]
        pulled(
            decoder,
            prompt,
            names,
            (SRC, dst),
            lambda: decoder.do(drive, own, "pull_kv", rank.cluster_id, SRC, dst),  # noqa: B023 (called at once)
        )
    for end in (prompt, *ends.values()):
        end.do(finalize_all)
