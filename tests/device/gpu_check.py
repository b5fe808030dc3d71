"""Check on an NVIDIA GPU what this project assumes of the driver, and its caches there: ``make gpu-check``.

    python -m tests.device.gpu_check [--seconds 420] [--only questions,d2d] [--out results.json] [--fake]

Each section is a process of its own with a limit: an error of the device ends all work of its process, and a call that
hangs costs one section. It needs this checkout, Python 3.11, the library, NumPy and msgspec, and no network. ``--fake``
takes the fake driver of tests/device/fakecuda.c, and small sizes.

Exit status: 1 if a section failed, or was left out for lack of time, or the driver does not answer as the fake does; 2
without a GPU.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tests.support.fakecuda import environment
from tests.support.source import ROOT, SOURCE

Figure = dict[str, Any]
#: In order of worth: seconds at most, and the module of the function.
SECTIONS: Final = {
    "questions": (60, "driver"),
    "refusals": (30, "driver"),
    "imports": (60, "driver"),
    "after_error": (30, "driver"),
    "movers": (90, "moves"),
    "dead_vmm": (30, "driver"),
    "library_shm": (90, "pair"),
    "library_tcp": (90, "pair"),
    "lost": (30, "pair"),
    "d2d": (60, "moves"),
    "h2d": (60, "moves"),
    "d2h": (60, "moves"),
    "torch_views": (60, "pair"),
}
#: Constants of device.hpp, the table that tells their value, and what must not be slower there than what else.
_THRESHOLDS: Final = (
    ("copies_from_bytes", "d2d, GB/s", "KiB", "kernel", "copy"),
    ("host_copies_from_bytes", "h2d, GB/s", "KiB", "kernel", "copy"),
    ("host_copies_from_bytes", "d2h, GB/s", "KiB", "kernel", "copy"),
    ("kernel_from_runs", "h2d, us of few blocks of 16 KiB", "blocks", "copy", "kernel"),
    ("kernel_from_runs", "d2h, us of few blocks of 16 KiB", "blocks", "copy", "kernel"),
)
_HELPERS: Final = {"card": "driver", "peer": "pair"}


def _section(name: str) -> None:
    """Be the process of a section."""
    module = SECTIONS[name][1] if name in SECTIONS else _HELPERS[name]
    getattr(import_module(f"tests.device.gpu_{module}"), name)()
    sys.stdout.flush()
    os._exit(0)  # a call of the driver may hang, and its library be in any state


def _run(name: str, seconds: float, env: dict[str, str]) -> Figure:
    """Run a section in a process of its own; return its verdict, its seconds and what it told."""
    command, began = [sys.executable, "-m", "tests.device.gpu_check", "--section", name], time.monotonic()
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=told, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(seconds)
            verdict = "right" if status == 0 else f"failed, exit {status}"
        except subprocess.TimeoutExpired:
            verdict = f"did not end within {seconds:.0f} s"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        told.seek(0)
        lines = told.read().splitlines()
    figures, text = [], []
    for line in lines:
        try:
            figures.append(dict(json.loads(line)))
        except (ValueError, TypeError):  # a warning, or the last line of a section that was cut off
            text.append(line)
    if verdict == "right" and not all(each.get("right", True) for each in figures):
        verdict = "wrong"
    return {"verdict": verdict, "seconds": round(time.monotonic() - began, 1), "figures": figures, "text": text[-40:]}


def _commit() -> str:
    """Return the commit of this checkout, which a copy without git has in build/commit."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(command, cwd=ROOT, text=True, stderr=subprocess.DEVNULL).strip()
    file = ROOT / "build" / "commit"
    return file.read_text().strip() if file.exists() else "unknown"


def _thresholds(figures: list[Figure]) -> Figure:
    """Return for constants of device.hpp the least size, or number, from which on the other mover was never slower."""
    source, found = (SOURCE / "_native" / "copy" / "device.hpp").read_text(), Figure()
    for name, table, unit, slow, quick in _THRESHOLDS:
        least: int | None = None
        for row in reversed([each for each in figures if each.get("table") == table]):
            less = row[slow] <= row[quick] if "GB/s" in table else row[slow] >= row[quick]
            least = row[unit] if less else least
            if not less:
                break
        now = re.findall(rf"\b{name} = ([^;]+);", source)
        found[f"{name}, {table}"] = {"now": now, f"least {unit}": least}
    return found


def _show(name: str, section: Figure) -> None:
    """Print what a section told, and all that it printed unless it came to its end."""
    print(f"\n== {name}: {section['verdict']}, {section['seconds']} s")
    for each in section["figures"]:
        wrong = "" if each.get("right", True) else "WRONG: "
        print(wrong + ", ".join(f"{key}: {value}" for key, value in each.items() if key not in ("right", "line")))
    print(*section["text"], sep="\n")


def main() -> int:
    """Run the sections; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=420, help="most seconds in all")
    parser.add_argument("--only", default=",".join(SECTIONS), help="names of sections, comma-separated")
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument("--fake", action="store_true", help="take the fake driver")
    parser.add_argument("--section", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        _section(options.section[0])
    names, began = options.only.split(","), time.monotonic()
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"no sections: {', '.join(unknown)}")
    env = dict(os.environ) | (environment(delay_us=100) if options.fake else {})
    card = _run("card", 60, env)
    if card["verdict"] != "right":
        print("no GPU of NVIDIA can be used:", *card["text"][-1:])
        return 2
    results: Figure = {
        **card["figures"][0], "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": _commit(),
        "python": sys.version.split()[0], "sections": {},
    }  # fmt: skip
    print(*(f"{key}: {value}" for key, value in results.items() if key != "sections"), sep="\n")
    for name in names:
        seconds = min(SECTIONS[name][0], options.seconds - (time.monotonic() - began))
        # Work that begins late unless a call waits: a question about waiting has one answer.
        slow = {"FAKECUDA_DELAY_US": "10000000"} if SECTIONS[name][1] == "driver" else {}
        skipped = {"verdict": "no time was left", "seconds": 0, "figures": [], "text": []}
        section = _run(name, seconds, env | slow) if seconds > 3 else skipped
        results["sections"][name] = section
        _show(name, section)
        everything = [figure for each in results["sections"].values() for figure in each["figures"]]
        bad = [key for key, each in results["sections"].items() if each["verdict"] != "right"]
        results |= {"thresholds": _thresholds(everything), "seconds": round(time.monotonic() - began, 1)}
        results["verdict"] = f"not right: {', '.join(bad)}" if bad else "right"
        if options.out:  # after each section: a run may be cut off
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    print("", *(f"{name}: {each}" for name, each in results["thresholds"].items()), sep="\n")
    print(f"{results['seconds']} s, verdict: {results['verdict']}")
    return int(results["verdict"] != "right")


if __name__ == "__main__":
    sys.exit(main())
