"""The command ``llm-datadist doctor``: options, table and exit status."""

from __future__ import annotations

import signal
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console

from llm_datadist import LLMConfig, LLMDataDist, LLMRole
from llm_datadist._option_kinds import INT32_MAX
from llm_datadist.config import DEVICE_ID, DEVICE_MEMORY
from llm_datadist.tools.cli.usage import More, Secrets, failing, given
from llm_datadist.tools.doctor import device, kernel, limits, peer, versions
from llm_datadist.tools.doctor.finding import Finding, Severity, exit_code, run_checks
from llm_datadist.tools.doctor.serve import CLUSTER, serving
from llm_datadist.types.cluster import show_address

_PORT: Final = 26000
_STYLES: Final = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "red", Severity.UNKNOWN: "cyan"}


def doctor(
    peer_address: Annotated[
        str | None, typer.Option("--peer", metavar="HOST:PORT", help="Examine the way to this peer, too.")
    ] = None,
    cluster_id: Annotated[
        int,
        typer.Option(
            min=0, max=(1 << 64) - 1, help="With --peer: cluster id of a peer that is not a doctor.", show_default=False
        ),
    ] = CLUSTER,
    ready: Annotated[
        bool, typer.Option("--ready", help="With --peer: only link to it, for probes. The exit status is 0 or 2.")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Act as the peer of another doctor, until interrupted.")
    ] = False,
    host: Annotated[str, typer.Option(help="With --serve: the listen address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="With --serve: the port; the next one is used, too.")] = _PORT,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
    secrets: Secrets = None,
    option: More = None,
) -> None:
    """Examine this host and the way to a peer. Print each finding's meaning and the command that mends it.

    The exit status is 0, 1 with warnings or unknowns, 2 with problems.
    """
    options = given(secrets, option)
    if ready:
        if peer_address is None or serve or as_json:
            raise typer.BadParameter("--ready needs --peer, and neither --serve nor --json")
        _link(_address(peer_address), None if cluster_id == CLUSTER else cluster_id, options)
        return
    if serve:
        _serve(host, port, options)
        return
    wanted = _gpu(options)
    address = None if peer_address is None else _address(peer_address)
    findings = run_checks([*kernel.CHECKS, *limits.CHECKS, *versions.CHECKS])
    findings += device.examine(*wanted)
    if address is not None:
        with Console(stderr=True).status("examining the peer") as status:
            findings += peer.examine(*address, options, status.update, cluster_id)
    if as_json:
        print(msgspec.json.encode({"exit_code": exit_code(findings), "findings": findings}).decode())
    else:
        _show(findings)
    raise typer.Exit(exit_code(findings))


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or "%" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise typer.BadParameter(f"--peer {text!r} is not of the form HOST:PORT; a scope (%) is not allowed")
    return host.strip("[]"), int(port)


def _gpu(options: dict[str, str]) -> list[int]:
    """Return the number of the GPU in which the options want caches, if any."""
    number = options.get(DEVICE_ID, "0")
    if not number.isdecimal() or int(number) > INT32_MAX:
        raise typer.BadParameter(f"--option {DEVICE_ID}={number!r} is not the number of a device")
    return [int(number)] if options.get(DEVICE_MEMORY) == "cuda" else []


def _link(address: tuple[str, int], wanted: int | None, options: dict[str, str]) -> None:
    end = LLMDataDist(LLMRole.DECODER, config=LLMConfig(ge_options=options))
    with failing("doctor"), end, end.connect(show_address(address), wanted) as link:
        print(f"cluster {link.cluster_id} takes links")


def _serve(host: str, port: int, options: dict[str, str]) -> None:
    ends = {signal.SIGINT, signal.SIGTERM}
    if not 0 < port < (1 << 16) - 1:
        raise typer.BadParameter(f"--port {port} is outside [1, 65534]")
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # threads that start later inherit the mask
    with failing("doctor"), serving(host, port, options):
        print(f"serving at {show_address((host, port))} and {port + 1}; interrupt to end", flush=True)
        signal.sigwait(ends)


def _show(findings: list[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for each in findings:
        console.print(f"{each.state:8}", style=_STYLES[each.state], end="")
        value = "".join(c if c.isprintable() else "?" for c in each.value)  # perhaps a peer's text
        console.print(f"{each.name}: {value}", markup=False)
        if each.state is not Severity.OK:
            console.print(f"        means: {each.meaning}\n        mend:  {each.mend}", markup=False)
