"""Two prompts and two decoders on four hosts, every link at work at once; and what is chosen between hosts."""

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, LLMStatusCode
from tests.hosts.conftest import Cluster, impossible
from tests.hosts.network import Impossible, Network
from tests.support.ends import ChildEnd
from tests.support.linking import begin_there, explain, info, link, links, result_there
from tests.support.moves import Bytes, Spec, Use, call, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import World

PROMPTS, DECODERS = (1, 2), (3, 4)
STRIDE = 16 * 1024 + 64
PAGED = Spec(tensors=4, rows=32, stride=STRIDE, blocks=True)
KINDS = {"pool": PAGED, "private": replace(PAGED, memory="private")}
ROUNDS = 3


def work(world: World, jobs: list[tuple[Any, ...]]) -> None:
    for job in jobs:
        call(world, *job)


def over_tcp(one: ChildEnd, other: ChildEnd) -> None:
    """Both ends say that tcp connects them, and that it is because they share no host."""
    for here, there in ((one, other), (other, one)):
        story = here.do(explain, there.cluster_id)
        assert (story.state, story.transport) == ("ready", "tcp")
        assert "not shm: " in story.reason


def test_pulls_and_pushes_of_all_ends_on_every_link_at_once(cluster: Cluster) -> None:
    settings: dict[str, Any] = {"sync_kv_timeout": 60_000, "enable_remote_cache_accessible": True}
    roles = dict.fromkeys(PROMPTS, "PROMPT") | dict.fromkeys(DECODERS, "DECODER")
    ends = {n: cluster.born(cluster.hosts[n - 1], role, n, **settings) for n, role in roles.items()}
    wanted: dict[tuple[int, str], Bytes] = {}  # every cache of every end, as it must be in the end
    jobs: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
    random = np.random.default_rng(5)

    def cache(n: int, name: str, spec: Spec) -> None:
        wanted[n, name] = ends[n].do(make, name, spec, len(wanted))

    def arrives(to: tuple[int, str], source: tuple[int, str], rows: Iterable[tuple[int, int]]) -> None:
        wanted[to] = moved(wanted[to], wanted[source], rows)

    for n, (number, (kind, spec)) in product(ends, enumerate(KINDS.items())):
        cache(n, kind, replace(spec, blocks_key=BlocksCacheKey(n, number)))
    pairs = list(product(DECODERS, PROMPTS))
    for decoder, prompt in pairs:
        cluster.link(ends[decoder], ends[prompt])
        over_tcp(ends[decoder], ends[prompt])
    for here, there in pairs + [(prompt, decoder) for decoder, prompt in pairs]:
        todo = jobs.setdefault((here, there), [])
        for number, (kind, spec) in enumerate(KINDS.items()):
            key, inbox = BlocksCacheKey(there, number), BlocksCacheKey(there, 10 * here + number)
            cache(here, f"{kind} of {there}", spec)
            cache(there, f"{kind} from {here}", replace(spec, blocks_key=inbox))
            for _ in range(ROUNDS):
                dst, src = (random.permutation(PAGED.rows)[:16].tolist() for _ in range(2))
                rows = list(zip(dst, src, strict=True))
                todo.append(("pull_blocks", key, Use(f"{kind} of {there}"), src, dst))
                arrives((here, f"{kind} of {there}"), (there, kind), rows)
                todo.append(("push_blocks", inbox, Use(kind), src, dst))
                arrives((there, f"{kind} from {here}"), (here, kind), rows)
    for (n, peer), todo in jobs.items():
        ends[n].do(begin_there, f"with {peer}", work, todo)
    assert [ends[n].do(result_there, f"with {peer}") for n, peer in jobs] == [None] * len(jobs)
    for end in ends.values():
        wait_until(lambda end=end: end.do(picture).pins == 0)  # type: ignore[misc]
    for (n, name), was in wanted.items():
        same_bytes(ends[n].do(show, name), was)


def test_between_hosts_a_forced_shm_is_refused_and_the_doctor_finds_nothing_wrong(
    cluster: Cluster, tmp_path: Path
) -> None:
    first, second, *_ = cluster.hosts
    prompt = cluster.born(first, "PROMPT", 7)
    refused = cluster.born(second, "DECODER", 5, extra={"llm.Transport": "shm"})
    code, _ = refused.do(link, [info(7, prompt.port, ip=first.address, local=second.address)])
    assert code is LLMStatusCode.LLM_LINK_FAILED
    assert (refused.do(links), prompt.do(links)) == ({}, {})
    command = f"doctor --peer {first.address}:{prompt.port} --cluster-id 7 --json --secrets {tmp_path / 'secrets'}"
    said = second.run("sh", "-c", f"{sys.executable} -m llm_datadist {command} || true")
    found = {each["name"]: each for each in json.loads(said)["findings"] if each["name"].startswith("peer_")}
    assert {each["state"] for each in found.values()} == {"ok"}, found
    assert found["peer_transport"]["value"].startswith("tcp: ")


def test_no_hosts_are_a_reason_to_skip_unless_they_are_required_and_a_missing_tool_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Impossible, match="ip, tc, nsenter, unshare cannot") as caught:
        Network(1)
    for wish, outcome in (("", pytest.skip.Exception), ("required", pytest.fail.Exception)):
        monkeypatch.setenv("LLM_DATADIST_HOSTS", wish)
        with pytest.raises(outcome, match="ip, tc, nsenter, unshare cannot be found"):
            impossible(caught.value)
