"""Servers that share a store and are killed: with one rank and two, and behind the connector of prefill and decode."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from five_cases import answer, offer_of, prompts
from servers import CONNECTORS, Connector, Role, Server, store_connector
from tests.vllm.conftest import EXAMPLES
from tests.vllm.restarts import ALONE, blocks_are_free_within, references

if TYPE_CHECKING:
    from collections.abc import Sequence

    from servers import Servers

pytestmark = pytest.mark.timeout(900)

Tokens = list[int]
TWO: dict[str, Any] = {"cores": "0|1", "options": (*ALONE, "--tensor-parallel-size", "2")}
ASKED = [prompt[:length] for prompt, length in zip(prompts(3, 700), (129, 300, 700), strict=True)]
STORED = sum((len(prompt) - 1) // 128 * 128 for prompt in ASKED)


@dataclass(frozen=True)
class Behind(Connector):
    """The store behind the connector from prefill to decode."""

    store: str = ""

    def config(self, role: Role) -> dict[str, Any]:
        """Return MultiConnector's."""
        last = store_connector(self.store, **PATIENT, pool=False).config("both")
        whole = super().config("both")
        return whole | {"kv_connector_extra_config": {"connectors": [CONNECTORS["datadist"].config(role), last]}}


PATIENT = {"store_options": {"lookup_ms": 2000}}  # machines that run tests are busy


def both(servers: Servers, store: Server, name: str, **settings: Any) -> Server:
    connector = store_connector(f"127.0.0.1:{store.port}", **PATIENT)
    return servers.start("both", connector, name=name, **({"options": ALONE} | settings)).wait(300)


def asked_of(server: Server, expected: Sequence[Tokens]) -> int:
    """Ask all prompts, one after the other; return how many of their tokens were not computed."""
    before = server.pulled_tokens()
    for prompt, tokens in zip(ASKED, expected, strict=True):
        status, _, choice = answer(server, prompt)
        assert (status, choice["token_ids"]) == (200, tokens)
    return server.pulled_tokens() - before


def test_two_ranks_find_again_what_two_ranks_saved_before_they_were_killed(servers: Servers) -> None:
    expected = references(servers, ASKED)
    store = servers.store()
    first = both(servers, store, "first", **TWO)
    assert asked_of(first, expected) == 0
    first.kill()
    second = both(servers, store, "second", **TWO)
    assert asked_of(second, expected) == STORED
    assert second.metric("vllm:datadist_store_loaded_tokens_total") == STORED
    assert second.metric("vllm:datadist_store_hits_total") >= len(ASKED)
    blocks_are_free_within(second, 30)
    second.kill()
    single = both(servers, store, "single")
    assert asked_of(single, expected) == 0, "one rank has other bytes"
    assert asked_of(single, expected) == STORED


def test_the_store_is_used_behind_the_connector_from_prefill_to_decode(servers: Servers) -> None:
    expected = references(servers, ASKED)
    store = servers.store()
    connector = Behind("MultiConnector", policy="recompute", store=f"127.0.0.1:{store.port}")
    roles: tuple[tuple[Role, str], ...] = (("prefill", "0"), ("decode", "1"))
    prefill, decode = (servers.start(role, connector, cores=core, options=ALONE) for role, core in roles)
    prefill.wait(300)
    decode.wait(300)
    for prompt, tokens in zip(ASKED, expected, strict=True):
        before = decode.pulled_tokens()
        assert answer(decode, prompt, kv_transfer_params=offer_of(prefill, prompt))[2]["token_ids"] == tokens
        assert decode.pulled_tokens() - before == len(prompt) - 1, "all but the last from the prefill server"
    assert asked_of(decode, expected) == STORED
    prefill.kill()
    again = servers.start("prefill", connector, name="again", cores="0", options=ALONE).wait(300)
    for prompt, tokens in zip(ASKED, expected, strict=True):
        offer = offer_of(again, prompt)
        assert answer(decode, prompt, kv_transfer_params=offer)[2]["token_ids"] == tokens
    assert again.pulled_tokens() == STORED
    for server in (again, decode):
        blocks_are_free_within(server, 60)


def test_the_example_shows_hits_after_kills() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "prefix_store.py"), "--tokens", "700"],
        check=False,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "prefix store: OK"
