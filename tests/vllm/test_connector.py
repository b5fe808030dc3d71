"""Two real vLLM servers with our connector: the tokens are those of one ordinary server, or there is an error.

The servers are shared by the tests of this file: an ordinary one, whose answers are the reference, a prefill server,
two decode servers of either failure policy, and a decode server that zeroes what it pulled. In the environment of
`make test-vllm`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from five_cases import BLOCKS, NEW, answer, five_cases, offer_of, prompts
from model import build
from servers import CONNECTORS, Connector, Server, Servers
from tests.vllm.restarts import blocks_are_free_within, references

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(600)

OURS = CONNECTORS["datadist"]
#: Keeps all of its blocks for readers: 32 requests at once need more than the half of them.
KEEPING = replace(OURS, extra={"max_unclaimed_blocks": BLOCKS})
BROKEN = Connector("ZeroedConnector", "tests.vllm.broken")
#: Prompts that are not pulled anew for each test would prove nothing.
ALONE = ["--no-enable-prefix-caching"]
LENGTHS = (2, 127, 128, 129, 500, 2000)

Tokens = list[int]


@dataclass
class Scene:
    """The servers, and what is asked of them."""

    servers: Servers
    prefill: Server
    failing: Server
    recomputing: Server
    zeroing: Server
    asked: list[Tokens]
    expected: list[Tokens]

    def fetched(self, decode: Server, prompt: Tokens) -> tuple[int, Tokens, str | None]:
        """Prefill here, decode there; return status, tokens and why it ended."""
        status, _, choice = answer(decode, prompt, kv_transfer_params=offer_of(self.prefill, prompt))
        return status, choice.get("token_ids") or [], choice.get("finish_reason")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("vllm")
    asked = [prompts(1, length)[0] for length in LENGTHS] + prompts(32, 300)
    with Servers(folder, build(folder / "model")) as servers:
        expected = references(servers, asked)
        started = [
            servers.start("prefill", KEEPING, cores="0", blocks=BLOCKS, options=ALONE),
            servers.start("decode", OURS, name="failing", cores="1", blocks=128, options=ALONE),
            servers.start("decode", replace(OURS, policy="recompute"), name="recomputing", cores="1", options=ALONE),
            servers.start("decode", BROKEN, name="zeroing", cores="1", options=ALONE),
        ]
        prefill, failing, recomputing, zeroing = (each.wait(300) for each in started)
        yield Scene(servers, prefill, failing, recomputing, zeroing, asked, expected)


@pytest.mark.parametrize("place", range(len(LENGTHS)), ids=map(str, LENGTHS))
def test_the_tokens_are_those_of_one_server_at_every_length_and_others_from_wrong_kv(scene: Scene, place: int) -> None:
    prompt, expected = scene.asked[place], scene.expected[place]
    assert scene.fetched(scene.failing, prompt) == (200, expected, "length")
    status, tokens, _ = scene.fetched(scene.zeroing, prompt)
    assert (status, len(tokens)) == (200, NEW)
    assert tokens != expected, "the model does not look at its KV: equal tokens prove nothing"


def test_thirty_two_requests_at_once(scene: Scene) -> None:
    many, expected = scene.asked[len(LENGTHS) :], scene.expected[len(LENGTHS) :]
    before = scene.failing.metric("vllm:datadist_fetched_requests_total")
    with ThreadPoolExecutor(len(many)) as clients:
        found = list(clients.map(lambda prompt: scene.fetched(scene.failing, prompt), many))
    assert found == [(200, tokens, "length") for tokens in expected]
    assert scene.failing.metric("vllm:datadist_fetched_requests_total") - before == len(many)
    for server in (scene.prefill, scene.failing):
        blocks_are_free_within(server, 5)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_five_references_good_and_bad(scene: Scene, policy: str) -> None:
    decode = scene.failing if policy == "fail" else scene.recomputing
    places = range(len(LENGTHS), len(LENGTHS) + 5)
    rows = list(
        five_cases(scene.prefill, decode, [scene.asked[i] for i in places], [scene.expected[i] for i in places])
    )
    bad = "clean error" if policy == "fail" else "ok"
    assert [row.verdict for row in rows] == ["ok", bad, bad, bad, "ok"], rows
    # The reference of the case with two of them that was not used is kept until its lease ends: 30 s.
    blocks_are_free_within(scene.prefill, 45)


def test_blocks_of_a_reader_that_dies_are_free_soon(scene: Scene) -> None:
    blocks_are_free_within(scene.prefill, 45)
    command = [sys.executable, "-m", "tests.vllm.reader"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        try:
            assert reader.stdin is not None
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
            reader.stdin.write(json.dumps(offer_of(scene.prefill, scene.asked[4])))
            reader.stdin.close()
            assert reader.stdout.readline().startswith("claimed")
            time.sleep(1)
            assert scene.prefill.metric("vllm:kv_cache_usage_perc") > 0, "a claim keeps them"
            lost = scene.prefill.metric("vllm:datadist_lost_grants_total")
        finally:
            reader.kill()
    blocks_are_free_within(scene.prefill, 2)
    assert scene.prefill.metric("vllm:datadist_lost_grants_total") == lost + 1


def test_a_prefill_server_that_is_killed_costs_its_requests_and_no_more(scene: Scene) -> None:
    mortal = scene.servers.start("prefill", OURS, name="mortal", cores="0", blocks=BLOCKS, options=ALONE).wait(300)
    prompt, expected = scene.asked[4], scene.expected[4]
    params: list[Any] = [offer_of(mortal, prompt) for _ in range(3)]
    status, _, choice = answer(scene.failing, prompt, kv_transfer_params=params.pop())
    assert (status, choice["token_ids"]) == (200, expected)
    mortal.kill()
    for each, decode in zip(params, (scene.failing, scene.recomputing), strict=True):
        began = time.monotonic()
        status, _, choice = answer(decode, prompt, kv_transfer_params=each)
        assert time.monotonic() - began < 30
        if decode is scene.failing:
            assert status == 500
        else:
            assert (status, choice["token_ids"]) == (200, expected)
    assert scene.fetched(scene.failing, prompt) == (200, expected, "length")
    blocks_are_free_within(scene.failing, 5)
