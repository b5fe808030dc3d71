"""How fast the KV of a long prompt comes, with this connector and with vLLM's NixlConnector.

    python examples/vllm/kv_speed.py --rounds 9

Two vLLM servers for each way of moving the KV: from our pool, through slots in it (staged), from memory that vLLM
allocated (registered), and with NixlConnector through a host buffer, as vLLM has it on CPUs. One thread computes in
each server, a core for each. The ways take turns; the servers of the others are stopped meanwhile (SIGSTOP), and the
prefill server has nothing to do while the KV moves. Before it counts, each way has used all of its blocks, and its
answers were those of one ordinary server; the first token of each round is compared, too.

Printed are medians of
    KV seconds per GiB: as each connector counts them: claim, pull and release; for NixlConnector the transfer alone
    first token: of the request to the decode server, in ms
    both: the same with the request to the prefill server before it
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from five_cases import ROLES, answer, offer_of, prompts
from llm_datadist.tools.bench.progress import steps
from model import build
from servers import CONNECTORS, Server, Servers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from servers import Connector

#: 32 KiB of KV for each token: at 2,100 tokens 17 blocks of 4 MiB.
SHAPE = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8}
TOKENS = 2100
SHORT = prompts(1, 40)[0]
BLOCKS = 40
OPTIONS = ("--no-enable-prefix-caching",)  # a prompt that is there already would not be moved
GIB = 1 << 30

WAYS: dict[str, Connector] = {
    "pool": CONNECTORS["datadist"],
    "staged": replace(CONNECTORS["datadist"], extra={"staging": True}),
    "registered": replace(CONNECTORS["datadist"], extra={"pool": False}),
    "nixl": CONNECTORS["nixl"],
}
#: Metrics of the decode server: bytes that came, and the seconds in which.
COUNTED = {
    "datadist": ("vllm:datadist_fetched_bytes_total", "vllm:datadist_fetch_seconds_total"),
    "nixl": ("vllm:nixl_bytes_transferred_sum", "vllm:nixl_xfer_time_seconds_sum"),
}

Tokens = list[int]


@dataclass
class Way:
    """Two servers, and what was measured between them."""

    name: str
    prefill: Server
    decode: Server
    seconds_per_gib: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)
    both_ms: list[float] = field(default_factory=list)
    mib: float = 0

    def stop(self) -> None:
        """Stop both servers where they are."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let both go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for server in (self.prefill, self.decode):
            os.killpg(server.process.pid, number)

    def ask(self, prompt: Tokens) -> Tokens:
        """Have a prompt answered by both servers."""
        status, content, choice = answer(self.decode, prompt, kv_transfer_params=offer_of(self.prefill, prompt))
        if status != 200:
            raise RuntimeError(f"{self.name}: {status} {content}\n{self.decode.tail()}")
        tokens: Tokens = choice["token_ids"]
        return tokens

    def measure(self, prompt: Tokens, first: int) -> None:
        """Move the KV of a prompt once; the answer has to begin with the token ``first``."""
        before = self._counted()
        begin = time.perf_counter()
        offer = offer_of(self.prefill, prompt)
        prefilled = time.perf_counter()
        time.sleep(0.3)  # the prefill server has ended its step
        resumed = time.perf_counter()
        status, content, choice = answer(self.decode, prompt, max_tokens=1, kv_transfer_params=offer)
        end = time.perf_counter()
        if status != 200 or choice["token_ids"] != [first]:
            raise RuntimeError(f"{self.name}: a wrong answer: {status} {content}")
        while (after := self._counted())[0] == before[0]:  # metrics come with the next step
            if time.perf_counter() - end > 20:
                raise RuntimeError(f"{self.name}: no KV was moved")
            time.sleep(0.1)
        moved = after[0] - before[0]
        self.mib = moved / (1 << 20)
        self.seconds_per_gib.append((after[1] - before[1]) / (moved / GIB))
        self.first_token_ms.append((end - resumed) * 1e3)
        self.both_ms.append((end - resumed + prefilled - begin) * 1e3)

    def _counted(self) -> tuple[float, float]:
        nbytes, seconds = COUNTED["nixl" if self.name == "nixl" else "datadist"]
        return self.decode.metric(nbytes), self.decode.metric(seconds)

    def transport(self) -> str:
        """Return what carries the bytes, as the decode server's log says it."""
        memory = "other memory of it" if self.name == "registered" else "its pool is"
        found = re.findall(
            rf"linked to the prefill engine .*{memory}(?: read)? over (\w+)", self.decode.log.read_text()
        )
        return found[-1] if found else "UCX"


def _measure(
    servers: Servers, names: Sequence[str], rounds: int, ways: list[Way], asked: Sequence[tuple[Tokens, Tokens]]
) -> None:
    """Start the servers of each way, and measure the ways in turns; ``asked`` are prompts and their right answers."""
    for name in names:
        prefill, decode = (
            servers.start(role, WAYS[name], name=f"{name}-{role}", cores=core, blocks=BLOCKS, options=OPTIONS)
            for role, core in ROLES
        )
        way = Way(name, prefill.wait(300), decode.wait(300))
        ways.append(way)
        for prompt, tokens in asked:
            if way.ask(prompt) != tokens:
                raise RuntimeError(f"{way.name}: wrong tokens")
        way.stop()
    for number in steps(range(rounds), "round {}".format, "rounds"):
        prompt, tokens = asked[number % len(asked)]
        for way in ways:
            way.resume()
            way.ask(SHORT)  # links may have ended meanwhile
            way.measure(prompt, tokens[0])
            way.stop()


def _row(way: Way, reference: Way) -> str:
    kv, first, both = (
        [statistics.median(getattr(each, name)) for each in (way, reference)]
        for name in ("seconds_per_gib", "first_token_ms", "both_ms")
    )
    return (
        f"{way.name:12}{way.transport():6}{way.mib:6.0f}{kv[0]:10.3f}{kv[1] / kv[0]:7.2f} x"
        f"{first[0]:10.1f}{first[0] / first[1]:7.2f} x{both[0]:9.0f}{both[0] / both[1]:7.2f} x"
    )


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="the last one is compared with")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs; by default they are thrown away")
    asked_for = parser.parse_args()
    asked = prompts(4, TOKENS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Servers(asked_for.logs or folder, build(folder / "model", **SHAPE)) as servers:
            ordinary = servers.start("ordinary", options=OPTIONS, blocks=BLOCKS).wait(300)
            expected = [answer(ordinary, prompt)[2]["token_ids"] for prompt in asked]
            ordinary.stop()
            ways: list[Way] = []
            try:
                _measure(servers, asked_for.ways, asked_for.rounds, ways, list(zip(asked, expected, strict=True)))
            finally:
                for way in ways:  # they end only while they run
                    way.resume()
            print(f"{'way':12}{'over':6}{'MiB':>6}{'KV s/GiB':>10}{'speed':>9}{'first ms':>10}{'':9}{'both ms':>9}")
            for way in ways:
                print(_row(way, ways[-1]))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
