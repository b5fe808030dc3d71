"""What a decode server answers to five references to KV blocks, good and bad ones, with a connector that you name.

    python examples/vllm/five_cases.py datadist nixl

A router may retry a request, mix up two of them, or come late; a connector has to notice. Two vLLM servers answer the
same five requests with each connector; the tokens are compared with those of one ordinary server, which has no
connector. The exit status is 1 if an answer of the first connector was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model import CHARACTERS, SPECIAL, build
from servers import CONNECTORS, MODEL, Server, Servers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from servers import Connector, Role

__all__ = ["CASES", "Row", "answer", "five_cases", "offer_of", "prompts"]

NEW = 16
"""Tokens of an answer."""

BLOCKS = 64
"""Of each server's KV cache."""

CASES = (
    "fresh reference",
    "the same one again, consumed",
    "stale: its blocks were reused",
    "another request's, still live",
    "blocks out of range",
)

ROLES: tuple[tuple[Role, str], ...] = (("prefill", "0"), ("decode", "1"))
"""Who computes on which core."""

Tokens = list[int]


@dataclass(frozen=True)
class Row:
    """What came of one case.

    Attributes:
        case: Which one, of `CASES`.
        status: The HTTP status; 0 if there was no answer.
        finish_reason: As the answer says it; None for an error.
        right: How many of its tokens are those of the ordinary server.
        verdict: ``ok``, ``clean error``, ``WRONG ANSWER``, ``NO ANSWER`` or ``SERVER DIED``.
    """

    case: str
    status: int
    finish_reason: str | None
    right: int
    verdict: str


def prompts(count: int = 5, length: int = 500) -> list[Tokens]:
    """Return prompts of random tokens, always the same ones. At 500 tokens the last of four blocks is not full."""
    source = random.Random(13)
    words = range(len(SPECIAL), len(SPECIAL) + len(CHARACTERS))
    return [source.choices(words, k=length) for _ in range(count)]


def answer(server: Server, prompt: Tokens, **fields: Any) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Ask for a completion; return status, the whole answer, and its first choice, which an error lacks."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": NEW,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    status, content = server.post("/v1/completions", body | fields)
    choices = content.get("choices") or [{}]
    return status, content, choices[0]


def five_cases(prefill: Server, decode: Server, asked: Sequence[Tokens], expected: Sequence[Tokens]) -> Iterator[Row]:
    """Yield what comes of each case; ``expected`` are the right answers to the prompts ``asked``."""
    consumed = offer_of(prefill, asked[0])
    yield _row(CASES[0], decode, asked[0], consumed, expected[0])
    if not decode.pulled_tokens():
        raise RuntimeError("the decode server has computed the prompt by itself: its answers say nothing about KV")
    yield _row(CASES[1], decode, asked[0], consumed, expected[0])
    stale = offer_of(prefill, asked[1])
    answer(decode, asked[1], kv_transfer_params=stale)
    _overwrite(prefill)
    yield _row(CASES[2], decode, asked[1], stale, expected[1])
    offer_of(prefill, asked[2])
    yield _row(CASES[3], decode, asked[2], offer_of(prefill, asked[3]), expected[2])
    outside = offer_of(prefill, asked[4])
    outside["remote_block_ids"] = [[1_000_000 + block for block in group] for group in outside["remote_block_ids"]]
    yield _row(CASES[4], decode, asked[4], outside, expected[4])


def offer_of(prefill: Server, prompt: Tokens) -> dict[str, Any]:
    """Have a prompt computed, as the proxy does; return what the decode server has to be given."""
    wanted = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    status, content, _ = answer(prefill, prompt, max_tokens=1, kv_transfer_params=wanted)
    reference = content.get("kv_transfer_params")
    if status != 200 or not isinstance(reference, dict):
        raise RuntimeError(f"the prefill server answers {status} without kv_transfer_params: {content}")
    return reference


def _overwrite(prefill: Server) -> None:
    """Have other prompts computed until each free block has been written anew."""
    length = 2000
    for prompt in prompts(1 + 2 * BLOCKS * 128 // length, length):
        status, content, _ = answer(prefill, prompt, max_tokens=1)
        if status != 200:
            raise RuntimeError(f"the prefill server answers {status}: {content}")


def _row(case: str, decode: Server, prompt: Tokens, reference: dict[str, Any], expected: Tokens) -> Row:
    try:
        status, _, choice = answer(decode, prompt, kv_transfer_params=reference)
    except (OSError, HTTPException):
        return Row(case, 0, None, 0, "NO ANSWER" if decode.healthy() else "SERVER DIED")
    reason = choice.get("finish_reason")
    right = sum(one == other for one, other in zip(choice.get("token_ids") or [], expected, strict=False))
    if not decode.healthy():
        verdict = "SERVER DIED"
    elif status >= 400 or reason in ("error", "abort"):
        verdict = "clean error"
    else:
        verdict = "ok" if right == NEW else "WRONG ANSWER"
    return Row(case, status, reason, right, verdict)


def _expected(servers: Servers, asked: Sequence[Tokens]) -> list[Tokens]:
    """Return the answers of one ordinary server; stop if they say nothing, because the prompts do not matter."""
    server = servers.start("ordinary", options=["--no-enable-prefix-caching"]).wait()
    found = [answer(server, prompt)[2]["token_ids"] for prompt in asked]
    server.stop()
    if any(sum(map(int.__eq__, found[0], other)) > NEW // 2 for other in found[1:]):
        raise RuntimeError("other prompts have the same answers: this model cannot tell right KV from wrong")
    return found


def _with(servers: Servers, connector: Connector, asked: Sequence[Tokens], expected: Sequence[Tokens]) -> list[Row]:
    """Run the cases between two servers with that connector, a core for each."""
    alone = ["--no-enable-prefix-caching"]  # a prompt that is there already would not be pulled
    prefill, decode = (
        servers.start(role, connector, name=f"{connector.name}-{role}", cores=core, blocks=BLOCKS, options=alone)
        for role, core in ROLES
    )
    rows = list(five_cases(prefill.wait(), decode.wait(), asked, expected))
    prefill.stop()
    decode.stop()
    return rows


def _print(title: str, rows: Sequence[Row]) -> None:
    print(f"\n{title}")
    print(f"{'reference':32}{'HTTP':>6}  {'finish_reason':15}{'right':>8}  verdict")
    for row in rows:
        right = f"{row.right}/{NEW}"
        print(f"{row.case:32}{row.status or '-':>6}  {row.finish_reason or '-':15}{right:>8}  {row.verdict}")


def _known(name: str) -> str:
    if name not in CONNECTORS:
        raise argparse.ArgumentTypeError(f"{name}: must be one of {', '.join(CONNECTORS)}")
    return name


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = "|".join(CONNECTORS)
    # Not by `choices`: argparse checks an empty list against them, too.
    parser.add_argument("connectors", nargs="*", type=_known, help="default: all", metavar=names)
    parser.add_argument("--policy", choices=("fail", "recompute"), default="fail", help="kv_load_failure_policy")
    parser.add_argument("--sliding-window", action="store_true", help="every other layer has one, of 256 tokens")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs; by default they are thrown away")
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    asked_for = parser.parse_args()
    changes: dict[str, Any] = {}
    if asked_for.sliding_window:
        changes = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 256}
    results: dict[str, list[Row]] = {}
    asked = prompts()
    with tempfile.TemporaryDirectory() as folder:
        logs = asked_for.logs or Path(folder)
        with Servers(logs, build(Path(folder) / "model", **changes)) as servers:
            expected = _expected(servers, asked)
            for name in asked_for.connectors or CONNECTORS:
                connector = replace(CONNECTORS[name], policy=asked_for.policy)
                results[name] = _with(servers, connector, asked, expected)
                _print(f"{connector.name}, {asked_for.policy}", results[name])
    if asked_for.json:
        asked_for.json.write_text(json.dumps({name: [asdict(row) for row in rows] for name, rows in results.items()}))
    return int(any(row.verdict.isupper() for row in next(iter(results.values()))))


if __name__ == "__main__":
    sys.exit(_main())
