"""omni-infer with dynamic and with static links, and omni-npu, written as those clients write it."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from llm_datadist import BlocksCacheKey, DataType, LLMDataDist, LLMException, LLMRole, RegisterMemStatus
from tests.clients.kv import contents, drive, drive_one, initialised, options, registered, same_kinds, succeeded
from tests.support.linking import info, links
from tests.support.moves import moved, picture, same_bytes, wait_until
from tests.support.ranks import host

if TYPE_CHECKING:
    from llm_datadist import Cache
    from tests.clients.kv import Tensors
    from tests.support.ends import ChildEnd
    from tests.support.family import Processes
    from tests.support.world import World

KINDS, LAYERS, BLOCKS, BLOCK_BYTES = 3, 4, 40, 320
SRC, DST = [5, 6, 7, 30, 2], [0, 1, 11, 10, 39]
LINK_TIMEOUT = 5000
#: ip (32 bits), port (16), tensor parallel size (16): all 64 bits are in use.
PROMPT_ID, DECODER_ID = (int(IPv4Address(ip)) << 32 | 26000 << 16 | 8 for ip in ("203.0.113.7", "198.51.100.9"))


def kinds(seed: int, layers: int = LAYERS) -> list[Tensors]:
    """K, V and rope of a manager."""
    return [contents(seed + kind, layers, BLOCKS, BLOCK_BYTES) for kind in range(KINDS)]


@dataclass
class Manager:
    """One LLMDataDist of that client, with its registered caches."""

    role: LLMRole
    cluster_id: int
    caches: list[Cache] = field(default_factory=list)

    def initialise(self, **settings: Any) -> LLMDataDist:
        self.options = options(enable_remote_cache_accessible=True, **settings)
        self.data_dist = initialised(self.role, self.cluster_id, self.options)
        return self.data_dist

    def register(self, seed: int, layers: int = LAYERS) -> list[int]:
        """One cache per position of the KV tuples: the position is the model id. Decoders give no key."""
        self.memory = kinds(seed, layers)
        for model_id, tensors in enumerate(self.memory):
            key = BlocksCacheKey(self.cluster_id, model_id) if self.role is LLMRole.PROMPT else None
            self.caches.append(self.register_one(tensors, key))
        return [cache.cache_id for cache in self.caches]

    def register_one(self, tensors: Tensors, key: BlocksCacheKey | None) -> Cache:
        return registered(self.data_dist, tensors, DataType.DT_BF16, [BLOCK_BYTES // 2], key)

    def unregister(self) -> None:
        for cache in self.caches:
            self.data_dist.cache_manager.unregister_cache(cache.cache_id)
        self.caches.clear()

    def sleep(self) -> None:
        """A prompt finalizes; its object and its options stay."""
        self.data_dist.finalize()
        self.caches.clear()

    def wake(self) -> int | None:
        """The same object, the saved options."""
        self.data_dist.init(self.options)
        return self.data_dist.listen_port


class Prompt(NamedTuple):
    """What a decoder is told about a prompt with the first request: the host gets a new timestamp when it restarts."""

    port: int
    timestamp: int = 1
    cluster_id: int = PROMPT_ID


@dataclass
class Dynamic(Manager):
    """Only prompts listen; an empty local_comm_res stands for CacheManager."""

    port: int = 0
    links: dict[int, Prompt] = field(default_factory=dict)
    attempts: int = 0

    def initialise(self, **settings: Any) -> LLMDataDist:
        if self.role is LLMRole.PROMPT:
            settings["listen_ip_info"] = f"127.0.0.1:{self.port}"
        return super().initialise(local_comm_res="", sync_kv_timeout=5000, **settings)

    def link(self, prompt: Prompt) -> None:
        cluster = info(prompt.cluster_id, prompt.port)
        status, _ = self.data_dist.link_clusters([cluster], timeout=LINK_TIMEOUT)
        succeeded(f"link to {prompt.cluster_id}", status)
        self.links[prompt.cluster_id] = prompt

    def force_unlink(self, *cluster_ids: int) -> None:
        """By id alone; also of what is dead or was never linked."""
        clusters = [info(cluster_id, local=None) for cluster_id in cluster_ids]
        status, _ = self.data_dist.unlink_clusters(clusters, timeout=LINK_TIMEOUT, force=True)
        succeeded("unlink", status)
        for cluster_id in cluster_ids:
            self.links.pop(cluster_id, None)

    def close_link(self, prompt: Prompt) -> None:
        """Unlink in agreement with the peer: before sleep."""
        status, _ = self.data_dist.unlink_clusters([info(prompt.cluster_id, prompt.port)], timeout=LINK_TIMEOUT)
        succeeded("unlink", status)
        del self.links[prompt.cluster_id]

    def pull_kv(self, prompt: Prompt) -> None:
        """Link lazily, pull every model id; after a failure force-unlink, link again and pull once more."""
        known = self.links.get(prompt.cluster_id)
        if known is not None and known.timestamp != prompt.timestamp:
            self.force_unlink(prompt.cluster_id)
        if prompt.cluster_id not in self.links:
            self.link(prompt)
        if self._pull(prompt):
            return
        self.force_unlink(prompt.cluster_id)
        self.link(prompt)
        if not self._pull(prompt):
            raise RuntimeError(f"pull from {prompt.cluster_id} failed")

    def _pull(self, prompt: Prompt) -> bool:
        for model_id, cache in enumerate(self.caches):
            self.attempts += 1
            try:
                self.data_dist.cache_manager.pull_blocks(BlocksCacheKey(prompt.cluster_id, model_id), cache, SRC, DST)
            except LLMException:
                return False
        return True

    # Prompts in pipeline stages: keyless caches over parts of the same tensors, registered after linking.

    def register_parts(self, parts: list[tuple[int, int]]) -> None:
        self.parts = [self.register_one(self.memory[0][first:last], None) for first, last in parts]

    def pull_part(self, part: int, cluster_id: int) -> None:
        self.data_dist.cache_manager.pull_blocks(BlocksCacheKey(cluster_id, 0), self.parts[part], SRC, DST)

    def unregister_parts(self) -> None:
        for cache in self.parts:
            self.data_dist.cache_manager.unregister_cache(cache.cache_id)


class Rank(NamedTuple):
    """One process, or one die of it: its cluster id, its address, its rank in its group."""

    cluster_id: int
    host_ip: str
    rank: int


@dataclass
class Static(Manager):
    """Linked at the start to all of the other side, by rank tables: none listens."""

    own: Rank = field(kw_only=True)
    comm_ids: dict[int, int] = field(default_factory=dict)

    def initialise(self, **settings: Any) -> LLMDataDist:
        return super().initialise(
            enable_switch_role=True, enable_cache_manager=True, sync_kv_timeout=20_000, **settings
        )

    def link(self, others: list[Rank]) -> None:
        """Begin all links, in bursts of 32."""
        for number, other in enumerate(others):
            if number and number % 32 == 0:
                time.sleep(0.5)
            prompt, decoder = (self.own, other) if self.role is LLMRole.PROMPT else (other, self.own)
            name = f"{prompt.host_ip}-{prompt.cluster_id}-{decoder.host_ip}-{decoder.cluster_id}"
            name = f"{name}-p{prompt.rank}-d{decoder.rank}"
            servers = [  # one for each end, also where both are on one host
                {
                    "server_id": each.host_ip,
                    "device": [{"device_id": str(each.rank), "device_ip": each.host_ip, "rank_id": str(rank_id)}],
                    "host_ip": each.host_ip,
                }
                for rank_id, each in enumerate((prompt, decoder))
            ]
            table = {"version": "1.0", "server_count": "2", "server_list": servers, "status": "completed"}
            ranks = {prompt.cluster_id: 0, decoder.cluster_id: 1}
            self.comm_ids[other.cluster_id] = self.data_dist.link(name, ranks, json.dumps(table))

    def wait(self) -> int:
        """Poll all of them in rounds (every 3 s there); return how many rounds it took."""
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
                time.sleep(0.3)
        return rounds

    def pull_kv(self, cluster_id: int, src: list[int], dst: list[int]) -> None:
        for model_id, cache in enumerate(self.caches):
            self.data_dist.cache_manager.pull_blocks(BlocksCacheKey(cluster_id, model_id), cache, src, dst)


# --- at an end --------------------------------------------------------------------------------------------------------


def start(world: World, manager: Manager, seed: int, layers: int = LAYERS) -> Any:
    """Initialise and register; return the port. Several managers may live in one process."""
    world.dd = manager.initialise()
    manager.register(seed, layers)
    world.memory["client"] = manager
    world.memory.setdefault("managers", []).append(manager)
    return world.dd.listen_port


def everyone(world: World, name: str, *args: Any) -> list[Any]:
    return [drive_one(manager, name, *args) for manager in world.memory["managers"]]


def holds(end: ChildEnd, own_seed: int, *pulls: tuple[int, list[int], list[int]]) -> None:
    """Every byte of all kinds: of the prompts (seed, src, dst) in the blocks that were pulled, its own elsewhere."""
    expected = kinds(own_seed)
    for seed, src, dst in pulls:
        pairs = list(zip(dst, src, strict=True))
        expected = [moved(mine, theirs, pairs) for mine, theirs in zip(expected, kinds(seed), strict=True)]
    same_kinds(end.do(drive, "memory"), expected)


@pytest.fixture
def two(ends: tuple[ChildEnd, ChildEnd]) -> tuple[ChildEnd, ChildEnd, Prompt]:
    """A prompt (seed 10) and a decoder (seed 20), not linked, and what the decoder is told."""
    prompt, decoder = ends
    port = prompt.do(start, Dynamic(LLMRole.PROMPT, PROMPT_ID), 10)
    decoder.do(start, Dynamic(LLMRole.DECODER, DECODER_ID), 20)
    return prompt, decoder, Prompt(port)


@pytest.mark.covers("omni-infer, dynamic")
def test_links_are_lazy_and_after_a_failure_unlink_by_force_link_again_and_one_more_pull(
    two: tuple[ChildEnd, ChildEnd, Prompt],
) -> None:
    prompt, decoder, told = two
    assert min(PROMPT_ID, DECODER_ID) > 2**63
    assert decoder.do(links) == {}
    for _ in range(2):
        decoder.do(drive, "pull_kv", told)
        holds(decoder, 20, (10, SRC, DST))
        assert decoder.do(links) == {PROMPT_ID: "ready"}
    assert decoder.do(drive, "attempts") == 2 * KINDS, "none had to be repeated"

    # The prompt is asleep in the middle of its topology change; it keeps the old entity of the link all the time.
    prompt.do(drive, "unregister")
    with pytest.raises(RuntimeError, match=r"pull from .* failed"):
        decoder.do(drive, "pull_kv", told)
    assert decoder.do(drive, "attempts") == 2 * KINDS + 2, "one model each time: the first failure ends the request"
    assert decoder.do(links) == {PROMPT_ID: "ready"}
    holds(decoder, 20, (10, SRC, DST))
    prompt.do(drive, "register", 30)
    decoder.do(drive, "pull_kv", told)
    holds(decoder, 20, (30, SRC, DST))
    wait_until(lambda: prompt.do(links) == {DECODER_ID: "ready"})

    # The prompt has dropped its side by force: the first pull fails, the second is on a new link.
    prompt.do(drive, "force_unlink", DECODER_ID)
    decoder.do(drive, "pull_kv", told)
    holds(decoder, 20, (30, SRC, DST))


@pytest.mark.covers("omni-infer, dynamic")
def test_force_unlink_by_bare_id_is_a_success_for_the_living_the_dead_and_the_unknown_and_a_prompt_comes_back(
    processes: Processes, two: tuple[ChildEnd, ChildEnd, Prompt]
) -> None:
    prompt, decoder, told = two
    for ids in ([PROMPT_ID, 2**64 - 1, 0], [PROMPT_ID, 12345]):
        decoder.do(drive, "force_unlink", *ids)
        decoder.do(drive, "pull_kv", told)
    # A new process with the same id: a failed pull finds it out; then the host has a new timestamp.
    for timestamp, seed in ((1, 40), (2, 50)):
        processes.kill(prompt)
        prompt = processes.child(f"prompt of {seed}")
        prompt.do(start, Dynamic(LLMRole.PROMPT, PROMPT_ID, port=told.port), seed)
        decoder.do(drive, "pull_kv", told._replace(timestamp=timestamp))
        holds(decoder, 20, (seed, SRC, DST))
        assert decoder.do(links) == {PROMPT_ID: "ready"}
    processes.kill(prompt)
    for _ in range(2):
        decoder.do(drive, "force_unlink", PROMPT_ID)
        assert decoder.do(links) == {}
    with pytest.raises(RuntimeError, match="link to "):
        decoder.do(drive, "pull_kv", told)
    holds(decoder, 20, (50, SRC, DST))


@pytest.mark.covers("omni-npu")
def test_sleep_mode_the_prompts_object_is_initialised_again_with_the_saved_options(
    two: tuple[ChildEnd, ChildEnd, Prompt],
) -> None:
    prompt, decoder, told = two
    for nap in range(2):
        decoder.do(drive, "pull_kv", told)
        holds(decoder, 20 + nap, (10 + 100 * nap, SRC, DST))
        decoder.do(drive, "close_link", told)
        decoder.do(drive, "unregister")
        assert decoder.do(picture).caches.registered == 0
        prompt.do(drive, "sleep")
        with pytest.raises(RuntimeError, match="link to "):
            decoder.do(drive, "link", told)
        told = Prompt(prompt.do(drive, "wake"))
        prompt.do(drive, "register", 110 + 100 * nap)
        decoder.do(drive, "register", 21 + nap)
    decoder.do(drive, "pull_kv", told)
    holds(decoder, 22, (210, SRC, DST))


@pytest.mark.covers("omni-npu")
def test_overlapping_keyless_caches_over_parts_of_the_tensors_registered_after_linking(processes: Processes) -> None:
    parts = [(0, 2), (2, 4), (1, 3), (0, 4)]  # two topologies and the whole: every address is in three caches
    decoder = processes.child("decoder")
    decoder.do(start, Dynamic(LLMRole.DECODER, DECODER_ID), 20)
    for stage, (first, last) in enumerate(parts):  # each has its own layers only
        manager = Dynamic(LLMRole.PROMPT, PROMPT_ID + stage)
        port = processes.child(f"stage {stage}").do(start, manager, 50 + 10 * stage, last - first)
        decoder.do(drive, "link", Prompt(port, 1, PROMPT_ID + stage))
    decoder.do(drive, "register_parts", parts)
    expected = kinds(20)
    for stage, (first, last) in enumerate(parts):
        decoder.do(drive, "pull_part", stage, PROMPT_ID + stage)
        source, tensors = kinds(50 + 10 * stage, last - first)[0], [(first + t, t) for t in range(last - first)]
        expected[0] = moved(expected[0], source, zip(DST, SRC, strict=True), tensors)
        same_bytes(decoder.do(drive, "memory")[0], expected[0])
    decoder.do(drive, "unregister_parts")  # another topology; the caches of all layers stay
    assert decoder.do(picture).caches.registered == KINDS
    decoder.do(drive, "register_parts", [(3, 4)])
    decoder.do(drive, "unregister_parts")
    same_kinds(decoder.do(drive, "memory"), expected)


@pytest.mark.covers("omni-infer, static")
def test_more_pairs_than_one_burst_all_become_ready_and_two_ranks_serve_one_decoder(processes: Processes) -> None:
    """34 prompts in two processes and two decoders: 32 links, a pause, 2 more."""
    prompts = [Rank(2**63 + number, host(number % 2), number) for number in range(34)]
    decoders = [Rank(2**64 - 2 - number, host(number), number) for number in range(2)]
    serving, pulling = ([processes.child(f"{name} {at}") for at in range(2)] for name in ("prompts", "decoder"))
    for rank in prompts:
        manager = Static(LLMRole.PROMPT, rank.cluster_id, own=rank)
        serving[rank.rank % 2].do(start, manager, 100 * rank.rank)
    for rank, end in zip(decoders, pulling, strict=True):
        end.do(start, Static(LLMRole.DECODER, rank.cluster_id, own=rank), 5 + rank.rank)
    for ends, others in ((serving, decoders), (pulling, prompts)):
        for end in ends:
            end.do(everyone, "link", others)
    for ends, others in ((pulling, prompts), (serving, decoders)):
        for end in ends:
            assert max(end.do(everyone, "wait")) <= 40
            assert end.do(links) == {other.cluster_id: "ready" for other in others}
    held: list[list[Any]] = [[], []]
    halves = [(0, 0, [2, 3, 4, 5, 38]), (0, 1, DST)]  # two prompt ranks for one decoder: each has half of the blocks
    for at, number, dst in [*itertools.product((0, 1), (0, 17, 33), [DST]), *halves]:
        pulling[at].do(drive, "pull_kv", prompts[number].cluster_id, SRC, dst)
        held[at].append((100 * number, SRC, dst))
        holds(pulling[at], 5 + at, *held[at])
    for parity, end in enumerate(serving):
        for at, held_there in enumerate(end.do(everyone, "memory")):
            same_kinds(held_there, kinds(100 * (2 * at + parity)))
    for end in (*serving, *pulling):
        end.do(everyone, "sleep")
