"""Prefill and decode servers that are not alike: ranks, block sizes; prefix caching and chunked prefill."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from five_cases import _reference as offer_of
from five_cases import answer, prompts
from servers import CONNECTORS, Server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from servers import Servers

pytestmark = pytest.mark.timeout(600)

OURS = CONNECTORS["datadist"]
ALONE = ("--no-enable-prefix-caching",)
TWO_RANKS = ("--tensor-parallel-size", "2")
LENGTHS = (1, 129, 500, 2000)

Tokens = list[int]


def references(servers: Servers, asked: Sequence[Tokens]) -> list[Tokens]:
    """Return the answers of one ordinary server, which ends again."""
    ordinary = servers.start("ordinary", options=ALONE).wait(300)
    found = [answer(ordinary, prompt)[2]["token_ids"] for prompt in asked]
    ordinary.stop()
    return found


def fetched(prefill: Server, decode: Server, prompt: Tokens) -> tuple[int, Tokens]:
    """Prefill at one server, decode at the other; return status and tokens."""
    status, _, choice = answer(decode, prompt, kv_transfer_params=offer_of(prefill, prompt))
    return status, choice.get("token_ids") or []


def blocks_are_free(*servers: Server) -> None:
    """Wait until no block of these servers is in use."""
    limit = time.monotonic() + 10
    while any(each.metric("vllm:kv_cache_usage_perc") for each in servers):
        assert time.monotonic() < limit, "blocks are kept"
        time.sleep(0.05)


@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def test_ranks_fetch_the_heads_that_are_theirs(servers: Servers, there: int, here: int) -> None:
    asked = [prompts(1, length)[0] for length in LENGTHS]
    expected = references(servers, asked)
    options: dict[int, dict[str, Any]] = {
        1: {"cores": "0", "options": ALONE},
        2: {"cores": "0|1", "options": (*ALONE, *TWO_RANKS)},
    }
    prefill = servers.start("prefill", OURS, **options[there])
    decode = servers.start("decode", OURS, **options[here])
    prefill.wait(300)
    decode.wait(300)
    assert [fetched(prefill, decode, prompt) for prompt in asked] == [(200, tokens) for tokens in expected]
    assert decode.metric("vllm:datadist_fetched_requests_total") == here * len(asked)
    blocks_are_free(prefill, decode)


def test_prefix_caching_and_chunked_prefill_change_no_token(servers: Servers) -> None:
    common = prompts(1, 1000)[0]
    asked = [common, common, common[:700] + prompts(2, 300)[1], common[:128], common + prompts(3, 200)[2]]
    expected = references(servers, asked)
    chunks = ("--max-num-batched-tokens", "256")
    prefill = servers.start("prefill", OURS, cores="0", options=chunks)
    decode = servers.start("decode", OURS, cores="1", options=chunks)
    prefill.wait(300)
    decode.wait(300)
    assert [fetched(prefill, decode, prompt) for prompt in asked] == [(200, tokens) for tokens in expected]
    blocks_are_free(prefill, decode)
    assert decode.metric("vllm:prefix_cache_hits_total") > 0, "nothing was there already"


def test_another_block_size_is_refused_readably(servers: Servers) -> None:
    asked = prompts(1)
    expected = references(servers, asked)
    prefill = servers.start("prefill", OURS, cores="0", options=(*ALONE, "--block-size", "64")).wait(300)
    failing = servers.start("decode", OURS, cores="1", name="failing", options=ALONE).wait(300)
    status, tokens = fetched(prefill, failing, asked[0])
    assert (status, tokens) == (500, [])
    assert "block_tokens: 64 there, 128 here" in failing.log.read_text()
    failing.stop()
    recomputing = servers.start("decode", replace(OURS, policy="recompute"), cores="1", options=ALONE).wait(300)
    assert fetched(prefill, recomputing, asked[0]) == (200, expected[0])
