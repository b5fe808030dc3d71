"""Prefill and decode with two builds of this library, both ways: the tokens are those of one server without it."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from five_cases import answer, offer_of, prompts
from servers import CONNECTORS, Server, Servers
from tests.compat.builds import made
from tests.vllm.restarts import ALONE, references

pytestmark = pytest.mark.timeout(600)


def _uses(server: Server, build: Path) -> bool:
    """Return True if a process of the server has mapped the native module of a build."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it may have ended
            if os.getpgid(int(maps.parent.name)) == server.process.pid and f"{build}/" in maps.read_text():
                return True
    return False


def test_the_tokens_are_those_of_one_server_whichever_side_is_newer(servers: Servers, tmp_path: Path) -> None:
    asked = [prompts(1, length)[0] for length in (127, 129, 500)]
    expected = references(servers, asked)
    newer = made("newer", tmp_path)
    for prefill_env, decode_env in (({}, {"PYTHONPATH": str(newer)}), ({"PYTHONPATH": str(newer)}, {})):
        name = "newer decode" if decode_env else "newer prefill"
        ours = CONNECTORS["datadist"]
        started = (
            servers.start("prefill", ours, name=f"{name}, prefill", cores="0", options=ALONE, environment=prefill_env),
            servers.start("decode", ours, name=f"{name}, decode", cores="1", options=ALONE, environment=decode_env),
        )
        prefill, decode = (each.wait(300) for each in started)
        assert [_uses(each, newer) for each in (prefill, decode)] == [bool(prefill_env), bool(decode_env)]
        for prompt, tokens in zip(asked, expected, strict=True):
            status, _, choice = answer(decode, prompt, kv_transfer_params=offer_of(prefill, prompt))
            assert (status, choice.get("token_ids")) == (200, tokens)
        assert decode.pulled_tokens() > sum(map(len, asked)) // 2
        for each in (prefill, decode):
            each.stop()
