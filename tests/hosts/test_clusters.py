"""Two prompts and two decoders on four hosts, every link at work at once; and what a host chooses for whom."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheKey, LLMStatusCode
from llm_datadist.errors import CacheNotFound
from tests.hosts.cluster import explained
from tests.support.linking import begin_there, bytes_move_both_ways, info, link, links, result_there
from tests.support.moves import Spec, Use, call, make, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from tests.hosts.cluster import Cluster
    from tests.support.ends import ChildEnd
    from tests.support.moves import Bytes
    from tests.support.world import World

PROMPTS, DECODERS = (1, 2), (3, 4)
STRIDE = 16 * 1024 + 64
PAGED = Spec(tensors=4, rows=32, stride=STRIDE, blocks=True)
OWN = replace(PAGED, memory="private")
KINDS = {"pool": PAGED, "private": OWN}
ROUNDS = 3


@dataclass(frozen=True)
class Job:
    """A call of a cache manager, and the pairs (destination block, source block) that it moves."""

    method: str
    args: tuple[Any, ...]


def work(world: World, jobs: list[Job]) -> None:
    for job in jobs:
        call(world, job.method, *job.args)


class Caches:
    """Every cache of a test at every end, as it must be in the end."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[ChildEnd, str], Bytes] = {}
        self.jobs: dict[tuple[ChildEnd, ChildEnd], list[Job]] = {}

    def make(self, end: ChildEnd, name: str, spec: Spec) -> None:
        self._wanted[end, name] = end.do(make, name, spec, len(self._wanted))

    def plan(
        self, job: Job, here: ChildEnd, there: ChildEnd, to: tuple[ChildEnd, str], source: tuple[ChildEnd, str],
        pairs: list[tuple[int, int]],
    ) -> None:  # fmt: skip
        """Have ``here`` do a job with its peer ``there``, which moves these blocks."""
        self.jobs.setdefault((here, there), []).append(job)
        self._wanted[to] = moved(self._wanted[to], self._wanted[source], pairs)

    def pull(self, here: ChildEnd, there: ChildEnd, source: str, key: BlocksCacheKey, name: str) -> None:
        """Plan to pull half of the blocks of a cache."""
        pairs = some_pairs(len(self.jobs.get((here, there), [])) + 10 * here.cluster_id + there.cluster_id)
        job = Job("pull_blocks", (key, Use(name), [src for _, src in pairs], [dst for dst, _ in pairs]))
        self.plan(job, here, there, (here, name), (there, source), pairs)

    def push(self, here: ChildEnd, there: ChildEnd, name: str, key: BlocksCacheKey, target: str) -> None:
        """Plan to push half of the blocks of a cache."""
        pairs = some_pairs(len(self.jobs.get((here, there), [])) + 10 * here.cluster_id + there.cluster_id)
        job = Job("push_blocks", (key, Use(name), [src for _, src in pairs], [dst for dst, _ in pairs]))
        self.plan(job, here, there, (there, target), (here, name), pairs)

    def do_all_at_once(self) -> None:
        """Work off the jobs, one thread for each direction of each link; nothing may fail."""
        for (here, there), jobs in self.jobs.items():
            here.do(begin_there, f"with {there.cluster_id}", work, jobs)
        for here, there in self.jobs:
            assert here.do(result_there, f"with {there.cluster_id}") is None
        self.jobs.clear()

    def check(self) -> None:
        """Compare every byte of every cache."""
        for (end, name), wanted in self._wanted.items():
            same_bytes(end.do(show, name), wanted)


def some_pairs(seed: int) -> list[tuple[int, int]]:
    """Return 16 (destination, source) pairs, no destination twice."""
    random = np.random.default_rng(seed)
    pairs = zip(random.permutation(PAGED.rows)[:16], random.permutation(PAGED.rows)[:16], strict=True)
    return [(int(dst), int(src)) for dst, src in pairs]


def born(cluster: Cluster, *, rca: bool) -> tuple[list[ChildEnd], list[ChildEnd]]:
    """Start two prompts and two decoders, each on a host of its own, and make all four links."""
    settings: dict[str, Any] = {"sync_kv_timeout": 60_000, "enable_remote_cache_accessible": rca}
    prompts = [cluster.born(cluster.hosts[n - 1], "PROMPT", n, **settings) for n in PROMPTS]
    decoders = [cluster.born(cluster.hosts[n - 1], "DECODER", n, **settings) for n in DECODERS]
    for decoder in decoders:
        for prompt in prompts:
            cluster.link(decoder, prompt)
    return prompts, decoders


def over_tcp(one: ChildEnd, other: ChildEnd) -> None:
    """Both ends say that tcp connects them, and that it is because they share no host."""
    for here, there in ((one, other), (other, one)):
        story = here.do(explained, there.cluster_id)
        assert (story.state, story.transport) == ("ready", "tcp")
        assert "not shm: " in story.reason


def test_pulls_of_every_kind_on_every_link_at_once(cluster: Cluster) -> None:
    prompts, decoders = born(cluster, rca=False)
    caches = Caches()
    for prompt in prompts:
        p = prompt.cluster_id
        for number, (kind, spec) in enumerate(KINDS.items()):
            caches.make(prompt, kind, replace(spec, blocks_key=BlocksCacheKey(p, number)))
        keys = tuple(CacheKey(p, 10 + d) for d in DECODERS)
        caches.make(prompt, "rows", Spec(rows=2, stride=STRIDE, keys=keys))
    for decoder in decoders:
        for prompt in prompts:
            p, d = prompt.cluster_id, decoder.cluster_id
            over_tcp(decoder, prompt)
            for number, (kind, spec) in enumerate(KINDS.items()):
                caches.make(decoder, f"{kind} of {p}", spec)
                for _ in range(ROUNDS):
                    caches.pull(decoder, prompt, kind, BlocksCacheKey(p, number), f"{kind} of {p}")
            caches.make(decoder, f"rows of {p}", Spec(rows=3, stride=STRIDE))
            job = Job("pull_cache", (CacheKey(p, 10 + d), Use(f"rows of {p}"), 1))
            caches.plan(job, decoder, prompt, (decoder, f"rows of {p}"), (prompt, "rows"), [(1, d - DECODERS[0])])
    caches.do_all_at_once()
    caches.check()
    for prompt in prompts:
        wait_until(lambda prompt=prompt: len(prompt.do(picture).keys) == len(KINDS))  # type: ignore[misc]
        wait_until(lambda prompt=prompt: prompt.do(picture).pins == 0)  # type: ignore[misc]
        with pytest.raises(CacheNotFound):
            decoders[0].do(call, "pull_cache", CacheKey(prompt.cluster_id, 13), Use(f"rows of {prompt.cluster_id}"), 1)
    caches.check()


def test_pulls_and_pushes_from_both_ends_of_every_link_at_once(cluster: Cluster) -> None:
    prompts, decoders = born(cluster, rca=True)
    caches = Caches()
    ends = [*prompts, *decoders]
    pairs = [(here, there) for here in ends for there in ends if (here in prompts) != (there in prompts)]
    for end in ends:
        for number, (kind, spec) in enumerate(KINDS.items()):
            caches.make(end, kind, replace(spec, blocks_key=BlocksCacheKey(end.cluster_id, number)))
    for here, there in pairs:
        for number, (kind, spec) in enumerate(KINDS.items()):
            inbox = BlocksCacheKey(there.cluster_id, 10 * here.cluster_id + number)
            caches.make(there, f"{kind} from {here.cluster_id}", replace(spec, blocks_key=inbox))
            caches.make(here, f"{kind} of {there.cluster_id}", spec)
    for here, there in pairs:
        for number, kind in enumerate(KINDS):
            for _ in range(ROUNDS):
                key = BlocksCacheKey(there.cluster_id, number)
                caches.pull(here, there, kind, key, f"{kind} of {there.cluster_id}")
                inbox = BlocksCacheKey(there.cluster_id, 10 * here.cluster_id + number)
                caches.push(here, there, kind, inbox, f"{kind} from {here.cluster_id}")
    caches.do_all_at_once()
    caches.check()


def test_auto_takes_shm_on_one_host_and_tcp_to_another(cluster: Cluster) -> None:
    first, second, *_ = cluster.hosts
    prompt = cluster.born(first, "PROMPT", 1)
    near, far = cluster.born(first, "DECODER", 2), cluster.born(second, "DECODER", 3)
    for decoder in (near, far):
        cluster.link(decoder, prompt)
        bytes_move_both_ways(decoder, prompt)
    assert {near.do(explained, 1).transport, prompt.do(explained, 2).transport} == {"shm"}
    over_tcp(far, prompt)


def test_a_forced_transport_is_kept_or_refused_and_never_replaced(cluster: Cluster) -> None:
    first, second, *_ = cluster.hosts
    prompt = cluster.born(first, "PROMPT", 1)
    near = cluster.born(first, "DECODER", 2, extra={"llm.Transport": "tcp"})
    far = cluster.born(second, "DECODER", 3, extra={"llm.Transport": "shm"})
    cluster.link(near, prompt)
    bytes_move_both_ways(near, prompt)
    assert near.do(explained, 1).transport == "tcp"
    code, _ = far.do(link, [info(1, prompt.port, ip=first.address, local=second.address)])
    assert code is LLMStatusCode.LLM_LINK_FAILED
    assert far.do(links) == {}
    assert prompt.do(links).keys() == {2}
