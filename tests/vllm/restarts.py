"""A prefill server that is killed and started again, while requests go on: right tokens or a clean error, and soon.

    python -m tests.vllm.restarts --requests 200 --each 20

Every ``--each`` requests the prefill server is killed, while some are under way; the decode server is so small that
some have claimed their blocks and wait there. A few references are kept back, until it is dead or until a new one
listens. At the end no server keeps a block.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from five_cases import BLOCKS, answer, offer_of, prompts
from model import build
from servers import CONNECTORS, Servers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from servers import Server

__all__ = ["LIMIT_S", "Restarts", "Verdict"]

LIMIT_S = 30.0
"""In which a request has to end, in whichever way."""

CLIENTS = 8
KEPT_BACK = 4
SMALL = 20
"""Blocks of the decode server: for the longest request, or four of those here."""
ALONE = ("--no-enable-prefix-caching",)

Tokens = list[int]
Verdict = Literal["right", "no prefill", "clean error", "WRONG", "LATE", "NO ANSWER"]


class Restarts:
    """Two servers, one of which does not last.

    Args:
        servers: Starts them.
        asked: Prompts, used in turn.
        expected: Their right answers.
        seed: Of the moments of the kills.
    """

    def __init__(self, servers: Servers, asked: Sequence[Tokens], expected: Sequence[Tokens], *, seed: int = 0) -> None:
        self.counts: Counter[Verdict] = Counter()
        self.longest_s = 0.0
        self._servers = servers
        self._asked = asked
        self._expected = expected
        self._source = random.Random(seed)
        self._lock = threading.Lock()  # guards the counts
        self.prefill = self._start_prefill()
        self.decode = servers.start("decode", CONNECTORS["datadist"], cores="1", blocks=SMALL, options=ALONE)
        self.decode.wait(300)
        self.prefill.wait(300)

    def _start_prefill(self, port: int = 0) -> Server:
        connector = CONNECTORS["datadist"]
        return self._servers.start("prefill", connector, cores="0", port=port, blocks=BLOCKS, options=ALONE)

    def round(self, first: int, count: int) -> None:
        """Have requests answered, kill the prefill server amid them, start it again; use what it has left behind."""
        kept = [(number, offer_of(self.prefill, self._prompt(number))) for number in range(first, first + KEPT_BACK)]
        others = range(first + KEPT_BACK, first + count)
        kill_after = self._source.randrange(2, len(others) - 2)
        with ThreadPoolExecutor(CLIENTS) as clients:
            pending = [clients.submit(self._request, number) for number in others]
            for done, each in enumerate(as_completed(pending)):
                each.result()
                if done == kill_after:
                    self.prefill.kill()
        for number, offer in kept[::2]:
            self._count(number, offer)
        self.prefill = self._start_prefill(self.prefill.port).wait(300)
        for number, offer in kept[1::2]:
            self._count(number, offer)

    def check(self) -> list[str]:
        """Return what is wrong after all rounds; nothing is, if the list is empty."""
        wrong = [f"{number} requests: {verdict}" for verdict, number in self.counts.items() if verdict.isupper()]
        before = self.counts["right"]
        self._request(0)
        if self.counts["right"] != before + 1:
            wrong.append("a request after the last restart is not answered")
        limit = time.monotonic() + 45  # a lease, and time for its end
        for server in (self.prefill, self.decode):
            while used := server.metric("vllm:kv_cache_usage_perc"):
                if time.monotonic() > limit:
                    wrong.append(f"{server.name} keeps blocks: {used}")
                    break
                time.sleep(0.1)
        return wrong

    def _prompt(self, number: int) -> Tokens:
        return self._asked[number % len(self._asked)]

    def _request(self, number: int) -> None:
        try:
            offer = offer_of(self.prefill, self._prompt(number))
        except (OSError, HTTPException, RuntimeError):  # it is dead: the router would say so
            self._note("no prefill")
            return
        self._count(number, offer)

    def _count(self, number: int, offer: dict[str, Any]) -> None:
        began = time.monotonic()
        try:
            status, _, choice = answer(self.decode, self._prompt(number), kv_transfer_params=offer)
        except (OSError, HTTPException):
            self._note("NO ANSWER")
            return
        took = time.monotonic() - began
        tokens = choice.get("token_ids") or []
        right = tokens == self._expected[number % len(self._asked)]
        if took > LIMIT_S:
            self._note("LATE", took)
        elif status == 200:
            self._note("right" if right else "WRONG", took)
        else:
            self._note("clean error", took)

    def _note(self, verdict: Verdict, took: float = 0) -> None:
        with self._lock:
            self.counts[verdict] += 1
            self.longest_s = max(self.longest_s, took)


def references(servers: Servers, asked: Sequence[Tokens], **settings: Any) -> list[Tokens]:
    """Return the answers of one ordinary server with these settings, which ends again."""
    ordinary = servers.start("ordinary", **({"options": ALONE} | settings)).wait(300)
    found = [answer(ordinary, prompt)[2]["token_ids"] for prompt in asked]
    ordinary.stop()
    return found


def blocks_are_free_within(server: Server, seconds: float) -> None:
    """Wait until no block is in use; fail if that takes longer."""
    limit = time.monotonic() + seconds
    while server.metric("vllm:kv_cache_usage_perc"):
        assert time.monotonic() < limit, f"{server.name} still keeps blocks"
        time.sleep(0.05)


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--each", type=int, default=20, help="requests from one kill to the next, 10 at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs; by default they are thrown away")
    asked_for = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logs = asked_for.logs or Path(folder)
        with Servers(logs, build(Path(folder) / "model")) as servers:
            asked = prompts(asked_for.each, 500)
            run = Restarts(servers, asked, references(servers, asked), seed=asked_for.seed)
            for first in range(0, asked_for.requests, asked_for.each):
                run.round(first, asked_for.each)
                print(first + asked_for.each, dict(run.counts), f"longest {run.longest_s:.1f} s", flush=True)
            wrong = run.check()
    print("\n".join(wrong) or "no wrong answer, none late, no block is kept")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(_main())
