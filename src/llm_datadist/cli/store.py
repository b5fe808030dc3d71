"""``llm-datadist store``: a prefix store in this process, until interrupted."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path  # noqa: TC003  typer reads the annotations
from typing import Annotated, Any, Final

import msgspec
import typer

from llm_datadist.cli.usage import about, pair
from llm_datadist.config import AUTH_SECRET
from llm_datadist.errors import LLMException
from llm_datadist.store import STORE_ID, StoreServer

_FAILED: Final = 2
_TURN_SECONDS: Final = 0.2
_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE: Final = re.compile(r"(\d+)(|KiB|MiB|GiB|TiB)")


def store(
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of the pool: a number, KiB, MiB, GiB or TiB.")],
    listen: Annotated[
        str, typer.Option(metavar="IP:PORT", help="Listen address; port 0 picks one.")
    ] = "127.0.0.1:26100",
    namespaces: Annotated[
        int, typer.Option(min=1, help="Namespaces that share the memory equally: one for each model and rank.")
    ] = 4,
    cluster_id: Annotated[
        int, typer.Option(min=0, max=(1 << 64) - 1, help="Cluster id of the store.", show_default=False)
    ] = STORE_ID,
    metrics: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve Prometheus metrics at this port of 127.0.0.1.")
    ] = None,
    secrets: Annotated[Path | None, typer.Option(metavar="FILE", help=about(AUTH_SECRET))] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of the instance. Repeatable.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines: the address once it listens, the statistics at the end.")
    ] = False,
) -> None:
    """Keep KV blocks of this host's engines, until interrupted. Engines find them under their complete identity."""
    size = _bytes(memory)
    given = dict(pair(text) for text in option or [])
    if secrets is not None:
        given[AUTH_SECRET] = str(secrets)
    ended: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, _: ended.append(number))
    try:
        with StoreServer(size, listen, cluster_id=cluster_id, namespaces=namespaces, options=given) as server:
            address = f"{listen.rpartition(':')[0]}:{server.port}"
            shown: dict[str, Any] = {"address": address, "cluster_id": cluster_id, "memory": size}
            if metrics is not None:
                import llm_datadist.prometheus  # noqa: F401 (its error names the missing extra)
                from llm_datadist.store.prometheus import serve

                shown["metrics"] = serve(server, metrics)
            share = size / namespaces / 2**20
            text = f"store at {address}: {namespaces} namespaces of {share:.4g} MiB; interrupt to end"
            print(msgspec.json.encode(shown).decode() if as_json else text, flush=True)
            while not ended:  # not sigwait: until it begins, threads of NumPy could take the signal
                time.sleep(_TURN_SECONDS)
            if as_json:
                print(msgspec.json.encode({"statistics": server.statistics()}).decode(), flush=True)
    except (OSError, LLMException) as error:
        print(f"llm-datadist store: {error}", file=sys.stderr)
        raise typer.Exit(_FAILED) from None


def _bytes(text: str) -> int:
    if (found := _SIZE.fullmatch(text)) is None:
        raise typer.BadParameter(f"--memory {text!r} is not a number of bytes, or of KiB, MiB, GiB or TiB as in 16GiB")
    return int(found[1]) * _UNITS[found[2]]
