"""A chat completion that one vLLM server prefills and another one decodes, streamed through the proxy.

    python examples/vllm/chat.py datadist

The text has to be the one that a server gives that does both; the exit status says whether it was. It makes no sense:
the model is small and random.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model import build
from servers import CONNECTORS, MODEL, Servers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers import Server

QUESTION = "Which of these two servers has read this, and which one answers? " * 8
REQUEST: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_completion_tokens": 64,
}


def streamed(server: Server, request: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of an answer as they come."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        body = json.dumps(request | {"stream": True})
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{server.name}: {answer.status} {answer.read().decode()}")
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RuntimeError(f"{server.name}: {event['error']}")
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""
    finally:
        connection.close()


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("connector", nargs="?", choices=CONNECTORS, default="datadist")
    connector = CONNECTORS[parser.parse_args().connector]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Servers(folder, build(folder / "model")) as servers:
            prefill = servers.start("prefill", connector, cores="0")
            decode = servers.start("decode", connector, cores="1")
            proxy = servers.proxy([prefill.wait()], [decode.wait()]).wait()
            print(f"{connector.name}: ", end="")
            parts = []
            for part in streamed(proxy, REQUEST):
                print(part.replace("\n", " "), end="", flush=True)
                parts.append(part)
            _, alone = prefill.post("/v1/chat/completions", REQUEST)
            pulled = decode.pulled_tokens()
    right = "".join(parts) == alone["choices"][0]["message"]["content"]
    print(f"\n{'as a single server answers' if right else 'WRONG: a single server answers otherwise'}; ", end="")
    print(f"{pulled} of {alone['usage']['prompt_tokens']} prompt tokens pulled")
    return 0 if right and pulled else 1


if __name__ == "__main__":
    sys.exit(_main())
