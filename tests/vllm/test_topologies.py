"""Servers that are not alike, or several of each kind: ranks, block sizes, caches, windows, restarts.

As in test_connector.py the tokens are those of one ordinary server, or there is an error. Few servers run at a time:
those of one test end with it.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from five_cases import NEW, answer, offer_of, prompts
from model import build
from servers import CONNECTORS, MODEL, Connector, Role, Server, Servers
from tests.vllm.latent import build_latent
from tests.vllm.restarts import Restarts, blocks_are_free_within, references

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)

OURS = CONNECTORS["datadist"]
ALONE = ("--no-enable-prefix-caching",)
LENGTHS = (2, 127, 128, 129, 500, 2000)
UNEVEN = (15, 127, 128, 129, 500)
BROKEN = Connector("ZeroedConnector", "tests.vllm.broken")
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 256}

RANKS: dict[int, dict[str, Any]] = {
    1: {"blocks": 512, "options": ALONE},
    2: {"blocks": 512, "options": (*ALONE, "--tensor-parallel-size", "2"), "cores": "0|1"},
}
NONE: dict[str, Any] = {}
Tokens = list[int]


@dataclass(frozen=True)
class Beside(Connector):
    """Our connector, and beside it another, which writes all KV to files."""

    other: Connector = OURS

    def config(self, role: Role) -> dict[str, Any]:
        """Return MultiConnector's."""
        parts = [OURS.config(role), self.other.config(role)]
        return super().config(role) | {"kv_connector_extra_config": {"connectors": parts}}


@dataclass
class Asked:
    """A model, and prompts with the answers of one ordinary server of it."""

    model: Path
    prompts: list[Tokens]
    expected: list[Tokens]

    @classmethod
    def of(cls, folder: Path, asked: Sequence[Tokens], **changes: Any) -> Asked:
        """Make the model and ask."""
        model = build(folder / "model", **changes)
        with Servers(folder, model) as servers:
            return cls(model, list(asked), references(servers, asked))


def _sharing_prefixes() -> list[Tokens]:
    """Return prompts that have a part in common with others: none, less than a block, some blocks, all."""
    common, *others = prompts(4, 1000)
    cut = [common[:700] + others[0][:300], common[:512] + others[1][:40], common[:128], common + others[2][:200]]
    return [common, *cut, common[:100] + others[0][:60]]


LONG = range(len(LENGTHS), len(LENGTHS) + 20)
SHARING = range(LONG.stop, LONG.stop + len(_sharing_prefixes()))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Prompts of every length, twenty of one length, and some that share prefixes."""
    several = [prompts(1, length)[0] for length in LENGTHS] + prompts(len(LONG), 300) + _sharing_prefixes()
    return Asked.of(tmp_path_factory.mktemp("topologies"), several)


@pytest.fixture
def started(tmp_path: Path, asked: Asked) -> Iterator[Servers]:
    with Servers(tmp_path, asked.model) as servers:
        yield servers


def two(servers: Servers, there: dict[str, Any] = NONE, here: dict[str, Any] = NONE) -> tuple[Server, Server]:
    """Return a prefill and a decode server, each on a core of its own, with our connector but for these settings."""
    ours: dict[str, Any] = {"connector": OURS, "options": ALONE}
    prefill = servers.start("prefill", **(ours | {"cores": "0"} | there))
    decode = servers.start("decode", **(ours | {"cores": "1"} | here))
    return prefill.wait(300), decode.wait(300)


def fetch_all(prefill: Server, decode: Server, asked: Asked, count: int) -> None:
    """The first prompts fetched have the right tokens, and no block is kept."""
    found = [fetched(prefill, decode, prompt) for prompt in asked.prompts[:count]]
    assert found == [(200, tokens) for tokens in asked.expected[:count]]
    wait_until_blocks_are_free(prefill, decode, seconds=30)


def fetched(prefill: Server, decode: Server, prompt: Tokens) -> tuple[int, Tokens]:
    """Prefill at one server, decode at the other; return status and tokens."""
    status, _, choice = answer(decode, prompt, kv_transfer_params=offer_of(prefill, prompt))
    return status, choice.get("token_ids") or []


def wait_until_blocks_are_free(*servers: Server, seconds: float = 10) -> None:
    for each in servers:
        blocks_are_free_within(each, seconds)


@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def test_ranks_fetch_the_heads_that_are_theirs(started: Servers, asked: Asked, there: int, here: int) -> None:
    options: dict[int, dict[str, Any]] = {
        1: {"cores": "0", "options": ALONE},
        2: {"cores": "0|1", "options": (*ALONE, "--tensor-parallel-size", "2")},
    }
    prefill, decode = two(started, options[there], options[here])
    count = len(LENGTHS)
    fetch_all(prefill, decode, asked, count)
    assert decode.metric("vllm:datadist_fetched_requests_total") == here * count
    assert prefill.metric("vllm:datadist_released_grants_total") == there * count


@pytest.fixture(scope="module")
def one_head(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """A model with one KV head, which all ranks hold."""
    several = [prompts(1, length)[0] for length in UNEVEN]
    return Asked.of(tmp_path_factory.mktemp("one_head"), several, num_key_value_heads=1)


def fetch_alike(folder: Path, asked: Asked, there: dict[str, Any], here: dict[str, Any]) -> None:
    """All prompts fetched have the right tokens, others than from wrong KV, and no block is kept."""
    with Servers(folder, asked.model) as servers:
        prefill, decode = two(servers, there, here)
        fetch_all(prefill, decode, asked, len(asked.prompts))
        wait_until_blocks_are_free(prefill, seconds=2)
        assert not decode.metric("vllm:datadist_failed_fetches_total")
        decode.stop()
        zeroing = servers.start("decode", BROKEN, name="zeroing", **({"cores": "1", "options": ALONE} | here))
        for prompt, expected in zip(asked.prompts, asked.expected, strict=True):
            status, tokens = fetched(prefill, zeroing.wait(300), prompt)
            assert status == 200
            assert tokens != expected, "the model does not look at its KV: equal tokens prove nothing"


@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def test_ranks_fetch_from_copies_of_one_head(tmp_path: Path, one_head: Asked, there: int, here: int) -> None:
    fetch_alike(tmp_path, one_head, RANKS[there], RANKS[here])


@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def test_ranks_fetch_from_copies_of_a_latent_head(tmp_path: Path, there: int, here: int) -> None:
    """Tokens are those of as many ranks that read the same KV from files.

    One ordinary server is no reference: with MLA, ranks of vLLM 0.32 for CPUs have other logits than one process.
    """
    files = Connector("FilesConnector", "tests.vllm.files", {"shared_storage_path": str(tmp_path / "files")})
    asked = [prompt for blocks in (1, 8, 31, 125) for prompt in prompts(4, 16 * blocks + 1)]
    with Servers(tmp_path, build_latent(tmp_path / "model")) as servers:
        writing = Beside("MultiConnector", other=files)
        prefill, decode = two(servers, RANKS[there] | {"connector": writing}, RANKS[here])
        found = [fetched(prefill, decode, prompt) for prompt in asked]
        wait_until_blocks_are_free(prefill, decode, seconds=2)
        assert not decode.metric("vllm:datadist_failed_fetches_total")
        decode.stop()
        reading = servers.start("decode", files, name="reading", **({"cores": "1"} | RANKS[here])).wait(300)
        read = [(status, choice["token_ids"]) for status, _, choice in (answer(reading, each) for each in asked)]
        assert reading.pulled_tokens() == sum(len(each) - 1 for each in asked), "it has computed prompts by itself"
        assert found == read
        reading.stop()
        zeroing = servers.start("decode", BROKEN, name="zeroing", **({"cores": "1"} | RANKS[here])).wait(300)
        for prompt, (_, expected) in zip(asked, read, strict=True):
            status, tokens = fetched(prefill, zeroing, prompt)
            assert status == 200
            assert tokens != expected, "the model does not look at its KV: equal tokens prove nothing"


@pytest.mark.parametrize(("there", "here"), [(32, 128), (128, 32), (96, 128)])
def test_tokens_of_blocks_of_another_size_are_fetched(tmp_path: Path, one_head: Asked, there: int, here: int) -> None:
    options = [{"blocks": 8192 // each, "options": (*ALONE, "--block-size", str(each))} for each in (there, here)]
    fetch_alike(tmp_path, one_head, *options)


@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "no prefix caching"])
@pytest.mark.parametrize("chunks", [True, False], ids=["chunked prefill", "no chunked prefill"])
def test_prefix_caching_and_chunked_prefill_change_no_token(
    started: Servers, asked: Asked, caching: bool, chunks: bool
) -> None:
    options = ["--enable-prefix-caching" if caching else "--no-enable-prefix-caching"]
    options += ["--max-num-batched-tokens", "256"] if chunks else ["--no-enable-chunked-prefill"]
    keeping = replace(OURS, extra={"max_unclaimed_blocks": 64})
    prefill, decode = two(started, {"connector": keeping, "options": options}, {"options": options})
    for _ in range(2):  # the second time both may have all of it already
        found = [fetched(prefill, decode, asked.prompts[place]) for place in SHARING]
        assert found == [(200, asked.expected[place]) for place in SHARING]
    with ThreadPoolExecutor(len(SHARING)) as clients:
        found = list(clients.map(lambda place: fetched(prefill, decode, asked.prompts[place]), SHARING))
    assert found == [(200, asked.expected[place]) for place in SHARING]
    wait_until_blocks_are_free(prefill, decode)
    for server in (prefill, decode):
        assert (server.metric("vllm:prefix_cache_hits_total") > 0) is caching


def test_two_of_each_kind_behind_the_proxy(started: Servers, asked: Asked) -> None:
    prefills = [started.start("prefill", OURS, name=f"prefill{i}", cores="0", options=ALONE) for i in range(2)]
    decoders = [started.start("decode", OURS, name=f"decode{i}", cores="1", options=ALONE) for i in range(2)]
    for each in (*prefills, *decoders):
        each.wait(300)
    proxy = started.proxy(prefills, decoders).wait()
    with ThreadPoolExecutor(len(LONG)) as clients:
        answers = list(clients.map(lambda place: answer(proxy, asked.prompts[place]), LONG))
    found = [(status, choice.get("token_ids")) for status, _, choice in answers]
    assert found == [(200, asked.expected[place]) for place in LONG]
    wait_until_blocks_are_free(*prefills, *decoders)
    for each in decoders:
        assert each.metric("vllm:datadist_fetched_requests_total") == len(LONG) / 2
    for each in prefills:
        assert each.metric("vllm:datadist_granted_requests_total") == len(LONG) / 2


def test_a_silent_prefill_server_keeps_only_its_own_requests_waiting(started: Servers, asked: Asked) -> None:
    prompt, expected = asked.prompts[4], asked.expected[4]
    prefill = started.start("prefill", OURS, cores="0", options=ALONE)
    silent = started.start("prefill", OURS, name="silent", cores="0", options=ALONE)
    decode = started.start("decode", replace(OURS, extra={"link_timeout_ms": 4_000}), cores="1", options=ALONE)
    for each in (prefill, silent, decode):
        each.wait(300)
    offers = [offer_of(silent, prompt) for _ in range(6)]
    os.killpg(silent.process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(6) as clients:
        vain = clients.map(lambda params: answer(decode, prompt, kv_transfer_params=params)[0], offers)
        assert fetched(prefill, decode, prompt) == (200, expected)
        assert list(vain) == [500] * 6
    os.killpg(silent.process.pid, signal.SIGCONT)


def test_a_client_that_goes_away_before_its_request_was_scheduled(started: Servers, asked: Asked) -> None:
    prompt, expected = asked.prompts[4], asked.expected[4]
    prefill, decode = two(started, here={"options": (*ALONE, "--max-num-seqs", "1")})
    body = {"model": MODEL, "prompt": prompt, "max_tokens": NEW, "kv_transfer_params": offer_of(prefill, prompt)}
    with ThreadPoolExecutor(1) as other:
        long = other.submit(answer, decode, asked.prompts[0], max_tokens=2000)
        while not decode.metric("vllm:num_requests_running"):
            time.sleep(0.05)
        with pytest.raises(TimeoutError):  # the connection is closed then
            decode.post("/v1/completions", body, seconds=2)
        wait_until_blocks_are_free(prefill)
        assert not long.done(), "the request was not kept waiting"
        assert prefill.metric("vllm:datadist_released_grants_total") == 1
        assert long.result()[0] == 200
    assert fetched(prefill, decode, prompt) == (200, expected)


def test_two_restarts_of_the_prefill_server(started: Servers, asked: Asked) -> None:
    run = Restarts(started, [asked.prompts[i] for i in LONG], [asked.expected[i] for i in LONG])
    for first in (0, len(LONG)):
        run.round(first, len(LONG))
    assert run.check() == []
    assert run.counts["clean error"] >= 2, "the dead servers' references were not used"


def test_a_prefill_server_that_is_asked_to_end_lets_its_offers_be_fetched(started: Servers, asked: Asked) -> None:
    prompt, expected = asked.prompts[4], asked.expected[4]
    drains = {"options": (*ALONE, "--shutdown-timeout", "90")}  # by default vLLM kills its engine
    prefill, decode = two(started, there=drains)
    assert fetched(prefill, decode, prompt) == (200, expected)  # a draining one takes no new links
    params = offer_of(prefill, prompt)
    prefill.process.terminate()
    while "EngineCore: start mode=drain" not in prefill.log.read_text(errors="replace"):
        time.sleep(0.1)
    status, _, choice = answer(decode, prompt, kv_transfer_params=params)
    assert (status, choice.get("token_ids")) == (200, expected)
    assert prefill.process.wait(60) == 0
    assert "is given up" not in prefill.log.read_text(errors="replace")


def test_beside_another_connector_in_a_multi_connector(started: Servers, asked: Asked, tmp_path: Path) -> None:
    folders = [tmp_path / role for role in ("prefill", "decode")]
    others = [Connector("ExampleConnector", extra={"shared_storage_path": str(each)}) for each in folders]
    there, here = ({"connector": Beside("MultiConnector", other=each)} for each in others)
    prefill, decode = two(started, there, here)
    count = len(LENGTHS)
    fetch_all(prefill, decode, asked, count)
    assert decode.metric("vllm:datadist_fetched_requests_total") == count
    assert prefill.metric("vllm:datadist_released_grants_total") == count
    assert list(folders[0].rglob("*.safetensors")), "the other connector was not used"


def test_windows_of_every_other_layer(tmp_path: Path) -> None:
    lengths = (2, 127, 129, 500, 2000)
    windowed = Asked.of(tmp_path, [prompts(1, length)[0] for length in lengths], **WINDOWED)
    with Servers(tmp_path, windowed.model) as servers:
        prefill, decode = two(servers)
        fetch_all(prefill, decode, windowed, len(lengths))
        assert decode.metric("vllm:datadist_fetched_requests_total") == len(lengths)
