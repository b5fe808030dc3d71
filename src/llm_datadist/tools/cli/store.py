"""``llm-datadist store``: a prefix store in this process, until interrupted; ``store clear`` empties another one."""

from __future__ import annotations

import signal
import time
from typing import Annotated, Any, Final

import msgspec
import typer

from llm_datadist import LLMConfig, LLMDataDist, LLMRole
from llm_datadist._option_kinds import parse_size
from llm_datadist.store import STORE_ID, StoreServer, messages
from llm_datadist.tools.cli.usage import More, Secrets, examples, failing, given

_TURN_MS: Final = 200
_CLEAR_MS: Final = 10_000
ClusterId = Annotated[int, typer.Option(min=0, max=(1 << 64) - 1, help="Cluster id of the store.", show_default=False)]

stores = typer.Typer(invoke_without_command=True)


@stores.callback(
    epilog=examples(
        "llm-datadist store --memory 16GiB",
        "llm-datadist store --memory 16GiB --namespaces 2 --metrics 9400 --json",
        "llm-datadist store clear 127.0.0.1:26100",
    )
)
def store(
    ctx: typer.Context,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the pool: a number, KiB, MiB, GiB or TiB. Required.")
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="IP:PORT", help="Listen address; port 0 picks one.")
    ] = "127.0.0.1:26100",
    namespaces: Annotated[
        int, typer.Option(min=1, help="Namespaces that share the memory equally: one for each model and rank.")
    ] = 4,
    cluster_id: ClusterId = STORE_ID,
    metrics: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve metrics (extra [metrics]) at this port of 127.0.0.1.")
    ] = None,
    drain: Annotated[
        float, typer.Option(min=0.0, help="Seconds in which loads and saves may end, once interrupted; again: at once.")
    ] = 10.0,
    secrets: Secrets = None,
    option: More = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON lines: the address once it listens, the statistics at the end.")
    ] = False,
) -> None:
    """Keep KV blocks of this host's engines, until interrupted. Engines find them under their complete identity."""
    if ctx.invoked_subcommand is not None:
        return
    if memory is None:
        raise typer.BadParameter("Missing option '--memory'")
    if (size := parse_size(memory)) is None:
        raise typer.BadParameter(f"--memory {memory!r} is not a number of bytes, or of KiB, MiB, GiB, TiB as in 16GiB")
    options = given(secrets, option)
    ended: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, _: ended.append(number))
    with (
        failing("store"),
        StoreServer(size, listen, cluster_id=cluster_id, namespaces=namespaces, options=options) as server,
    ):
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
            time.sleep(_TURN_MS / 1e3)
        until = time.monotonic() + drain
        while time.monotonic() < until and len(ended) < 2 and server.drain(_TURN_MS):
            pass
        if as_json:
            print(msgspec.json.encode({"statistics": server.statistics()}).decode(), flush=True)


@stores.command(epilog=examples("llm-datadist store clear 127.0.0.1:26100"))
def clear(
    address: Annotated[str, typer.Argument(metavar="IP:PORT", help="Address of the store.", show_default=False)],
    own_id: Annotated[
        int | None,
        typer.Option(
            "--as",
            min=0,
            max=(1 << 64) - 1,
            help="Cluster id of this side, which a policy gives a tenant. [default: any]",
        ),
    ] = None,
    cluster_id: ClusterId = STORE_ID,
    secrets: Secrets = None,
    option: More = None,
) -> None:
    """Empty all namespaces of a tenant in a running store. Saves that are under way store nothing."""
    config = LLMConfig(ge_options=given(secrets, option))
    with (
        failing("store clear"),
        LLMDataDist(LLMRole.MIX, *([] if own_id is None else [own_id]), config=config) as instance,
        instance.connect(address, cluster_id) as link,
    ):
        done = link.ask(messages.CLEAR, messages.Clear([]).encode(), _CLEAR_MS)
        print(f"namespaces emptied: {messages.decode(messages.Done, done, 'store').count}")
