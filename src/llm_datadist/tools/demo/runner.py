"""The whole demo: starts the roles, hands the offer from one to the other, compares, prints."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import ExitStack, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TextIO

from llm_datadist._checks import temporary_folder
from llm_datadist._links.credentials import new_secret
from llm_datadist.tools.demo.model import DemoWorkload
from llm_datadist.tools.demo.roles import RESULT

DemoTransport = StrEnum("DemoTransport", "AUTO SHM CMA TCP NIXL INPROC")
"""Values of ``--transport``; the last runs both roles as two ``LLMDataDist`` in one process."""

DemoMemory = StrEnum("DemoMemory", "POOL REGISTERED")
"""Values of ``--memory``: the library's pools, or the roles' own arrays, registered with the library."""

DemoDevice = StrEnum("DemoDevice", "HOST CUDA")
"""Values of ``--device``, as of ``llm.DeviceMemory``: where the caches lie."""

# The demo takes a few seconds; ten times as long passes.
_PATIENCE_S: Final = 180.0
_INTERRUPTED: Final = 130
# One thread each: equal inputs give equal bits, and two processes fit a small machine. MKL_CBWR makes MKL's results
# independent of the alignment of arrays.
_ENVIRONMENT: Final = {f"{each}_NUM_THREADS": "1" for each in ("OPENBLAS", "OMP", "MKL", "BLIS")} | {"MKL_CBWR": "AUTO"}
_PARTS: Final = {
    "reference": "the single-process run to compare with",
    "prompt": "LLMDataDist in role PROMPT, cluster 0",
    "decoder": "LLMDataDist in role DECODER, cluster 1",
    "both": "PROMPT and DECODER as two LLMDataDist in this one process",
}
#: Fields that ``--json`` prints, null if the demo ended before them.
_FIELDS: Final = (
    "transport reason device tokens_equal blocks bytes seconds gb_per_s kv_equal tokens processes sealed error"
)


def run_demo(transport: DemoTransport, memory: DemoMemory, device: DemoDevice, *, as_json: bool, secure: bool) -> int:
    """Run the demo and print it; return 0 only if tokens and bytes are equal.

    With ``secure`` both sides prove a new secret. With ``as_json`` the last line of standard output is the result.
    """
    result: dict[str, Any] = {"ok": False} | dict.fromkeys(_FIELDS.split())
    try:
        with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder:
            secrets = str(new_secret(Path(folder) / "secrets", "demo")) if secure else ""
            with _Demo((transport, memory, device, secrets), sys.stderr if as_json else sys.stdout) as demo:
                result |= demo.run()
    except (RuntimeError, FileNotFoundError) as error:
        result["error"] = str(error)
    except KeyboardInterrupt:
        result["error"] = "interrupted"
    if result["error"] is not None:
        print(f"demo failed: {result['error']}", file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps(result), flush=True)
    if result["error"] == "interrupted":
        return _INTERRUPTED
    return 0 if result["ok"] else 1


class _Demo(ExitStack):
    """One run. Leaving the context ends its processes."""

    def __init__(self, setup: tuple[str, str, str, str], stream: TextIO) -> None:
        super().__init__()
        self._setup = setup
        self._stream = stream
        self._started = time.monotonic()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._outputs: dict[Any, str] = {}  # of those that have not ended

    def run(self) -> dict[str, Any]:
        """Run all roles and print the comparison; return the fields of the result."""
        transport, _, _, secrets = self._setup
        self._start("reference")
        reference = self._wait("reference")
        self._order("reference")
        self._wait("reference", "exit")
        self._say("reference", f"done: {reference['seconds']:.1f} s of forward passes, without the library")
        roles = ["both"] if transport == DemoTransport.INPROC else ["prompt", "decoder"]
        for role in roles:
            self._start(role)
        offer = self._wait(roles[0])
        self._order(roles[-1], json.dumps(offer))
        outcome = self._wait(roles[-1])
        for role in reversed(roles):  # the prompt side serves until it is told to end
            self._order(role)
            self._wait(role, "exit")
        if transport not in (DemoTransport.AUTO, outcome["transport"]):
            raise RuntimeError(f"transport: asked for {transport}, but the link used {outcome['transport']}")
        if outcome["sealed"] != bool(secrets):
            raise RuntimeError(f"secure: asked for {bool(secrets)}, the link says {outcome['sealed']}")
        # Keys carry their positions, so tokens ignore swapped blocks; the digest does not.
        tokens = [offer["first_token"], *outcome["tokens"]] == [reference["first_token"], *reference["tokens"]]
        kv = outcome.pop("digest") == offer["digest"]
        result = outcome | {"ok": tokens and kv, "tokens_equal": tokens, "kv_equal": kv, "processes": len(roles)}
        result["gb_per_s"] = outcome["bytes"] / outcome["seconds"] / 1e9
        alone = " and in the single-process run" if offer["digest"] == reference["digest"] else ""
        self._show(result, f"equal on both sides{alone} (sha256 {offer['digest'][:16]}...)")
        return result

    def _start(self, role: str) -> None:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", "llm_datadist.tools.demo.roles", role, *self._setup],
                bufsize=0,  # what has been read but not shown would not be seen by select()
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | _ENVIRONMENT,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the others in order
            )
        except OSError as error:
            raise RuntimeError(f"{role}: cannot start its process: {error}") from error
        self.enter_context(process)
        self.callback(process.kill)
        self._processes[role], self._outputs[process.stdout] = process, role
        self._say(role, f"process {process.pid} started: {_PARTS[role]}")

    def _order(self, role: str, order: str = "") -> None:
        """Give an order, and say that no other follows. If the process has ended, :meth:`_wait` tells."""
        orders = self._processes[role].stdin
        assert orders is not None
        with suppress(BrokenPipeError, ValueError), orders:  # ValueError: its input is closed
            orders.write(order.encode())

    def _wait(self, role: str, what: str = "result") -> dict[str, Any]:
        """Show what all say until ``role`` has a result, or has ended well: then the dict is empty."""
        while True:
            ready, _, _ = select.select(self._outputs, [], [], _PATIENCE_S)
            if not ready:
                raise RuntimeError(f"{role}: no {what} within {_PATIENCE_S:.0f} s")
            output = ready[0]
            sender = self._outputs[output]
            if line := output.readline():
                text, mark, result = line.decode(errors="replace").rstrip().partition(RESULT)
                if text:
                    self._say(sender, text)
                found: dict[str, Any] = json.loads(result) if mark else {}
                if "error" in found:
                    raise RuntimeError(f"{sender}: {found['error']}")
                if mark:
                    return found
                continue
            del self._outputs[output]
            status = self._processes[sender].wait()
            if status or (sender == role and what == "result"):
                raise RuntimeError(f"{sender}: the process ended with status {status} before its {what}")
            if sender == role:
                return {}

    def _show(self, result: dict[str, Any], where: str) -> None:
        work, tokens, over = DemoWorkload(), result["tokens"], result["transport"]
        same = f"all {len(tokens)} equal to" if result["tokens_equal"] else "different from"
        apart, together = "prompt and decoder, each with its own LLMDataDist", "two LLMDataDist in one process"
        kept = {"tcp": "too (AES-256-GCM)", "nixl": "were not"}.get(over, "did not leave this host")
        secured = f"both sides proved a shared secret; messages were encrypted (TLS 1.3), KV bytes {kept}"
        rows = {
            "tokens": f"{same} the single-process run: {' '.join(map(str, tokens[:8]))} ...",
            "KV bytes": where if result["kv_equal"] else "what arrived differs from what the prompt side published",
            "moved": f"{result['blocks']} blocks of {work.block_tokens} tokens in {work.shape[0]} tensors, "
            f"{result['bytes'] / 1e6:.2f} MB, to other numbers",
            "transport": f"{over}: {result['reason']}",
            "caches in": f"{result['device']}",
            "pull_blocks": f"{result['seconds'] * 1e3:.2f} ms, {result['gb_per_s']:.2f} GB/s (the one and first call)",
            "processes": f"2: {apart}" if result["processes"] == 2 else f"1: {together}",
            "security": secured if result["sealed"] else "none: any process of this host could have linked (--secure)",
        }
        print("\nTokens equal." if result["ok"] else "\nNOT equal.", file=self._stream)
        for name, text in rows.items():
            first, rest = f"  {name:<12} ", " " * 15
            lines = textwrap.fill(text, 80, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
            print(lines, file=self._stream, flush=True)

    def _say(self, role: str, text: str) -> None:
        print(f"{time.monotonic() - self._started:6.1f} s  {role:<9}  {text}", file=self._stream, flush=True)
