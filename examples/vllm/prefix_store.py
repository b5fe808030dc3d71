"""Two vLLM servers of one host share the KV of a long prompt through a prefix store, which outlives them.

    python examples/vllm/prefix_store.py [--files]

Server A computes the prompt, server B loads it. Then both are killed with -9 and started again, and load it. Then the
store is killed, and A computes the prompt. The answers have to be equal; the exit status says whether they were, and
whether their tokens came from where they should. The servers' own prefix caches are off: they would hide the store.
With ``--files`` two servers do the first part with vLLM's ExampleConnector, which keeps KV in files.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING

from model import CHARACTERS, SPECIAL, build
from servers import MODEL, Connector, Servers, store_connector

if TYPE_CHECKING:
    from servers import Server

NEW = 16
LARGER = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}  # than the tests' model


@dataclass(frozen=True)
class Answer:
    """An answer to the prompt.

    Attributes:
        tokens: The new ones.
        first_s: Seconds until the first of them.
        stored: Tokens of the prompt that came from the store.
    """

    tokens: list[int]
    first_s: float
    stored: int


def ask(server: Server, prompt: list[int]) -> Answer:
    """Have a prompt answered, as a stream."""
    before = server.pulled_tokens()
    body = {"model": MODEL, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
    tokens: list[int] = []
    first_s = 0.0
    try:
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{server.name}: {answer.status} {answer.read().decode()}")
        for line in answer:
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter() - began
                for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                    tokens += choice["token_ids"]
    finally:
        connection.close()
    return Answer(tokens, first_s, server.pulled_tokens() - before)


def _start(servers: Servers, connector: Connector) -> list[Server]:
    """Start servers, each on one core, and have each answer something, which is slow the first time."""
    options = ("--no-enable-prefix-caching",)
    started = [
        servers.start("both", connector, name=letter, cores=core, options=options)
        for letter, core in zip("AB", "01", strict=True)
    ]
    for server in started:
        server.wait(300)
        ask(server, _prompt(300, seed=ord(server.name)))
    return started


def _prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(len(SPECIAL), len(SPECIAL) + len(CHARACTERS)), k=length)


def run(folder: Path, length: int, *, files: bool = False) -> list[tuple[str, Answer, bool]]:
    """Run the scenes; return each with its answer, and True if its tokens should come from the store, or from files."""
    prompt = _prompt(length, 0)
    with Servers(folder, build(folder / "model", **LARGER)) as servers:
        store = servers.store()
        connector = store_connector(f"127.0.0.1:{store.port}")
        first, second = _start(servers, connector)
        rows = [("A, cold", ask(first, prompt), False), ("B", ask(second, prompt), True)]
        for server in (first, second):
            server.kill()
        first, second = _start(servers, connector)
        rows += [("A after kill -9", ask(first, prompt), True), ("B after kill -9", ask(second, prompt), True)]
        store.kill()
        rows.append(("A, store killed", ask(first, prompt), False))
        if files:
            for server in (first, second):
                server.kill()
            first, second = _start(servers, Connector("ExampleConnector", extra={"shared_storage_path": str(folder)}))
            rows += [("A, writes files", ask(first, prompt), False), ("B, reads files", ask(second, prompt), True)]
    return rows


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt, at most 2,200")
    parser.add_argument("--files", action="store_true", help="then the same with vLLM's ExampleConnector")
    options = parser.parse_args()
    length: int = options.tokens
    with tempfile.TemporaryDirectory() as folder:
        rows = run(Path(folder), length, files=options.files)
    cold = rows[0][1]
    right = True
    print(f"{'server':17}{'tokens not computed':>23}{'first token':>14}{'of cold':>9}  answer")
    for name, answer, hit in rows:
        equal = answer.tokens == cold.tokens and len(answer.tokens) == NEW
        right &= equal and bool(answer.stored) == hit
        share = f"{answer.first_s / cold.first_s:.2f}"
        said = "equal" if equal else "OTHER TOKENS"
        print(f"{name:17}{answer.stored:>12} of {length:<7}{answer.first_s * 1000:>11.0f} ms{share:>9}  {said}")
    print("prefix store: OK" if right else "prefix store: WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(_main())
