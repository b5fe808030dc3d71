"""The command ``llm-datadist bench``: options, files and exit status."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path  # noqa: TC003  typer reads the annotations
from typing import Annotated, Final

import msgspec
import typer

from llm_datadist._tables import show_table
from llm_datadist.tools.bench import BenchError
from llm_datadist.tools.bench.cases import Request, cases_of
from llm_datadist.tools.bench.driver import prepare, run
from llm_datadist.tools.bench.plot import draw
from llm_datadist.tools.bench.report import BenchReporter, show_floors, show_rows, show_summary
from llm_datadist.tools.bench.suite import floors, standard
from llm_datadist.tools.bench.workload import BenchMemory, Op
from llm_datadist.tools.cli import FAILED, USAGE_ERROR
from llm_datadist.tools.cli.usage import Secrets, about

_MIB: Final = 20
#: Upper bounds, checked here: not every version of typer names value and range.
_HIGHEST: Final = {
    "block_bytes": 1 << 30,
    "blocks": 10_000_000,
    "tensors": 4096,
    "threads": 1024,
    "passes": 1000,
    "set_mib": 1 << 20,
    "timeout": 3600,
}


#: The argument of ``bench``: the standard suite, or an op.
What = StrEnum("What", "STANDARD PULL PUSH COPY SWAP D2D H2D D2H LATENCY PLAN ALLOC LINK")
#: Values of ``--transport``.
BenchTransport = StrEnum("BenchTransport", "SHM CMA TCP NIXL INPROC")


def bench(
    what: Annotated[What, typer.Argument(metavar="WHAT", show_default=False)] = What.STANDARD,
    transport: Annotated[
        BenchTransport | None, typer.Option(help="Transport of pull, push, latency and link (shm).", show_default=False)
    ] = None,
    block_bytes: Annotated[
        str | None, typer.Option(help="Bytes of one block of one tensor, several separated by commas (65536).")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(help="Blocks moved in each tensor (pull, push, copy, swap: what the set holds).")
    ] = None,
    tensors: Annotated[
        int | None, typer.Option(help="Tensors of a cache (1; copy_cache: 64; plan, alloc: 122).")
    ] = None,
    memory: Annotated[
        BenchMemory | None,
        typer.Option(help="Memory of our caches (pool; over cma: registered; d2d, h2d, d2h: gpu).", show_default=False),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help=f"{about('llm.CopyThreads')} In each process (the usable CPUs).")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Limits and peers, separated by commas; empty text: none (the op's usual ones).")
    ] = None,
    passes: Annotated[int | None, typer.Option(help="Passes after the first (5).")] = None,
    secrets: Secrets = None,
    set_mib: Annotated[int, typer.Option(help="MiB that one transfer moves, unless --blocks is given.")] = 512,
    timeout: Annotated[int, typer.Option(help="Seconds for one step of a contender.")] = 120,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results to this file, one row a line.")
    ] = None,
    plot_folder: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            exists=True,
            file_okay=False,
            writable=True,
            help="Draw pictures in this folder, one .svg for each question.",
        ),
    ] = None,
) -> None:
    """Measure speed beside the machine's limits and other software. Verify every byte.

    Without an argument run the standard suite, which takes --threads, --against and --set-mib of the options about
    work.
    """
    work = {"blocks": blocks, "tensors": tensors, "threads": threads, "passes": passes}
    sizes = _sizes(block_bytes)
    bounded = {**work, "set_mib": set_mib, "timeout": timeout}
    for name, value in [*bounded.items(), *(("block_bytes", each) for each in sizes)]:
        if value is not None and not 1 <= value <= _HIGHEST[name]:
            raise typer.BadParameter(f"--{name.replace('_', '-')}: {value} is outside [1, {_HIGHEST[name]}]")
    _check_file("--json", json_file)
    if plot_folder is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("--plot needs matplotlib: pip install 'open-datadist[plot]'")
    names = None if against is None else tuple(name.strip() for name in against.split(",") if name.strip())
    request = Request(
        op=Op.PULL if what is What.STANDARD else Op(what),
        transport=transport,
        memory=memory,
        against=names,
        secrets=None if secrets is None else str(secrets),
        set_bytes=set_mib << _MIB,
        **work,
    )
    requests = [replace(request, block_bytes=each) for each in sizes]
    raise typer.Exit(_run(requests, timeout, json_file, plot_folder, suite=what is What.STANDARD))


def _sizes(text: str | None) -> list[int | None]:
    """Return the sizes in their order, each once; without a text the default."""
    if text is None:
        return [None]
    try:
        return list(dict.fromkeys(int(each) for each in text.split(",")))
    except ValueError:
        raise typer.BadParameter(f"--block-bytes: {text!r} is not a list of numbers of bytes") from None


def _run(requests: list[Request], timeout: int, json_file: Path | None, plot: Path | None, *, suite: bool) -> int:
    try:
        wanted = standard(requests[0]) if suite else [case for each in requests for case in cases_of(each)]
    except BenchError as error:
        raise typer.BadParameter(str(error)) from None
    with BenchReporter(sys.stderr) as reporter:
        if not (cases := prepare(wanted, reporter, timeout)):
            reporter.say("nothing is left to run")
            return USAGE_ERROR
        reporter.take(cases)
        results = run(cases, reporter, timeout)
    show_rows(results.rows, sys.stdout)
    if reporter.left_out:
        left_out = [{"what": ", ".join(what), "why": why} for why, what in reporter.left_out.items()]
        show_table("left out", left_out, sys.stdout)
    if suite:
        asked = floors(results.rows)
        show_floors(asked, sys.stdout)
        show_summary(results.rows, asked, sys.stdout)
    if json_file is not None:
        lines = b",\n".join(msgspec.json.encode(row) for row in results.rows)
        json_file.write_bytes(b"[\n" + lines + b"\n]\n")
    if plot is not None:
        draw(results.rows, plot)
    for failure in results.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return FAILED if results.failures else 0


def _check_file(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before minutes of work."""
    if path is None:
        return
    if path.is_dir():
        raise typer.BadParameter(f"{option}: {path} is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{option}: {path} cannot be written")
