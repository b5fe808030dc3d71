"""Two prompts and two decoders on four hosts, every link at work at once; and what a host chooses for whom."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheKey, LLMStatusCode
from llm_datadist.errors import CacheNotFound
from tests.support.linking import begin_there, bytes_move_both_ways, explain, info, link, links, result_there
from tests.support.moves import Spec, Use, call, make, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hosts.cluster import Cluster
    from tests.support.ends import ChildEnd
    from tests.support.moves import Bytes
    from tests.support.world import World

PROMPTS, DECODERS = (1, 2), (3, 4)
STRIDE = 16 * 1024 + 64
PAGED = Spec(tensors=4, rows=32, stride=STRIDE, blocks=True)
KINDS = {"pool": PAGED, "private": replace(PAGED, memory="private")}
ROUNDS = 3


def work(world: World, jobs: list[tuple[str, tuple[Any, ...]]]) -> None:
    for method, arguments in jobs:
        call(world, method, *arguments)


class Caches:
    """Every cache of a test at every end, as it must be in the end."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[ChildEnd, str], Bytes] = {}
        self._jobs: dict[tuple[ChildEnd, ChildEnd], list[tuple[str, tuple[Any, ...]]]] = {}

    def make(self, end: ChildEnd, name: str, spec: Spec) -> None:
        self._wanted[end, name] = end.do(make, name, spec, len(self._wanted))

    def pull_cache(self, here: ChildEnd, there: ChildEnd, key: CacheKey, name: str, row: int) -> None:
        """Plan to pull a row of the peer's rows to row 1."""
        self._jobs.setdefault((here, there), []).append(("pull_cache", (key, Use(name), 1)))
        self._wanted[here, name] = moved(self._wanted[here, name], self._wanted[there, "rows"], [(1, row)])

    def move_blocks(
        self, method: str, here: ChildEnd, there: ChildEnd, name: str, key: BlocksCacheKey, peers: str
    ) -> None:
        """Plan to pull or push half of the blocks of a cache, to or from the peer's cache behind the key."""
        jobs = self._jobs.setdefault((here, there), [])
        random = np.random.default_rng(len(jobs) + 10 * here.cluster_id + there.cluster_id)
        dst, src = (random.permutation(PAGED.rows)[:16].tolist() for _ in range(2))
        jobs.append((method, (key, Use(name), src, dst)))
        to, source = (here, name), (there, peers)
        if method == "push_blocks":
            to, source = source, to
        self._wanted[to] = moved(self._wanted[to], self._wanted[source], zip(dst, src, strict=True))

    def do_all_at_once(self) -> None:
        """Work off the jobs, one thread for each direction of each link; nothing may fail."""
        for (here, there), jobs in self._jobs.items():
            here.do(begin_there, f"with {there.cluster_id}", work, jobs)
        for here, there in self._jobs:
            assert here.do(result_there, f"with {there.cluster_id}") is None
        self._jobs.clear()

    def check(self) -> None:
        for (end, name), wanted in self._wanted.items():
            same_bytes(end.do(show, name), wanted)


def over_tcp(one: ChildEnd, other: ChildEnd) -> None:
    """Both ends say that tcp connects them, and that it is because they share no host."""
    for here, there in ((one, other), (other, one)):
        story = here.do(explain, there.cluster_id)
        assert (story.state, story.transport) == ("ready", "tcp")
        assert "not shm: " in story.reason


@pytest.mark.parametrize("rca", [False, True])
def test_calls_of_every_kind_on_every_link_at_once(cluster: Cluster, rca: bool) -> None:
    """Decoders pull; where caches may be accessed remotely, prompts pull too, and all push."""
    settings: dict[str, Any] = {"sync_kv_timeout": 60_000, "enable_remote_cache_accessible": rca}
    prompts = [cluster.born(cluster.hosts[n - 1], "PROMPT", n, **settings) for n in PROMPTS]
    decoders = [cluster.born(cluster.hosts[n - 1], "DECODER", n, **settings) for n in DECODERS]
    caches = Caches()
    for end in (*prompts, *decoders):
        for number, (kind, spec) in enumerate(KINDS.items()):
            caches.make(end, kind, replace(spec, blocks_key=BlocksCacheKey(end.cluster_id, number)))
    pairs = [(decoder, prompt) for decoder in decoders for prompt in prompts]
    for prompt in () if rca else prompts:
        keys = tuple(CacheKey(prompt.cluster_id, 10 + d) for d in DECODERS)
        caches.make(prompt, "rows", Spec(rows=2, stride=STRIDE, keys=keys))
    for decoder, prompt in pairs:
        cluster.link(decoder, prompt)
        over_tcp(decoder, prompt)
        if not rca:  # where requests have names
            p, d = prompt.cluster_id, decoder.cluster_id
            caches.make(decoder, f"rows of {p}", Spec(rows=3, stride=STRIDE))
            caches.pull_cache(decoder, prompt, CacheKey(p, 10 + d), f"rows of {p}", d - DECODERS[0])
    for here, there in pairs + rca * [(prompt, decoder) for decoder, prompt in pairs]:
        for number, (kind, spec) in enumerate(KINDS.items()):
            inbox = BlocksCacheKey(there.cluster_id, 10 * here.cluster_id + number)
            caches.make(there, f"{kind} from {here.cluster_id}", replace(spec, blocks_key=inbox))
            caches.make(here, f"{kind} of {there.cluster_id}", spec)
            for _ in range(ROUNDS):
                key = BlocksCacheKey(there.cluster_id, number)
                caches.move_blocks("pull_blocks", here, there, f"{kind} of {there.cluster_id}", key, kind)
                if rca:
                    caches.move_blocks("push_blocks", here, there, kind, inbox, f"{kind} from {here.cluster_id}")
    caches.do_all_at_once()
    caches.check()
    kept = len(KINDS) * (1 + len(DECODERS))
    for prompt in prompts:
        wait_until(lambda prompt=prompt: len(prompt.do(picture).keys) == kept)  # type: ignore[misc]
        wait_until(lambda prompt=prompt: prompt.do(picture).pins == 0)  # type: ignore[misc]
        if not rca:
            again = CacheKey(prompt.cluster_id, 10 + DECODERS[0]), Use(f"rows of {prompt.cluster_id}"), 1
            with pytest.raises(CacheNotFound):
                decoders[0].do(call, "pull_cache", *again)
    caches.check()


def test_the_doctor_finds_nothing_wrong_with_a_service_of_another_host(cluster: Cluster, tmp_path: Path) -> None:
    first, second, *_ = cluster.hosts
    prompt = cluster.born(first, "PROMPT", 7)
    command = f"doctor --peer {first.address}:{prompt.port} --cluster-id 7 --json --secrets {tmp_path / 'secrets'}"
    said = second.run("sh", "-c", f"{sys.executable} -m llm_datadist.cli {command} || true")
    found = {each["name"]: each for each in json.loads(said)["findings"] if each["name"].startswith("peer_")}
    assert {each["state"] for each in found.values()} == {"ok"}, found
    assert found["peer_transport"]["value"].startswith("tcp: ")


def test_auto_takes_shm_on_one_host_and_tcp_to_another_and_a_forced_one_is_kept_or_refused(cluster: Cluster) -> None:
    first, second, *_ = cluster.hosts
    prompt = cluster.born(first, "PROMPT", 1)
    near, far = cluster.born(first, "DECODER", 2), cluster.born(second, "DECODER", 3)
    forced = cluster.born(first, "DECODER", 4, extra={"llm.Transport": "tcp"})
    refused = cluster.born(second, "DECODER", 5, extra={"llm.Transport": "shm"})
    for decoder in (near, far, forced):
        cluster.link(decoder, prompt)
        bytes_move_both_ways(decoder, prompt)
    assert {near.do(explain, 1).transport, prompt.do(explain, 2).transport} == {"shm"}
    over_tcp(far, prompt)
    assert forced.do(explain, 1).transport == "tcp"
    code, _ = refused.do(link, [info(1, prompt.port, ip=first.address, local=second.address)])
    assert code is LLMStatusCode.LLM_LINK_FAILED
    assert refused.do(links) == {}
    assert prompt.do(links).keys() == {2, 3, 4}
