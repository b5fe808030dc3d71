"""Measure `import llm_datadist` beyond numpy's own import, in fresh interpreters.

    python benchmarks/import_time.py [--runs 5]

Each run imports numpy first, so that its time is not ours, then the package, then what `init` imports late (asyncio,
the native module and the layers behind it). One run before the first only writes the bytecode. Prints medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

_SOURCE = Path(__file__).parent.parent / "src"

_SCRIPT = """
import json, time
import numpy
start = time.perf_counter()
import llm_datadist
imported = time.perf_counter()
import llm_datadist.cache_manager, llm_datadist._transfer.engine
print(json.dumps([imported - start, time.perf_counter() - imported]))
"""


def measure() -> tuple[float, float]:
    """Return the seconds of the package's import and of what init adds."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(_SOURCE)},
    )
    package, late = json.loads(done.stdout)
    return package, late


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Import time of llm_datadist beyond numpy's own.")
    parser.add_argument("--runs", type=int, default=5, help="fresh interpreters to take the median of")
    runs: int = parser.parse_args().runs
    measure()
    times = [measure() for _ in range(runs)]
    for what, each in zip(("import llm_datadist", "what init imports late"), zip(*times, strict=True), strict=True):
        median, most = statistics.median(each) * 1e3, max(each) * 1e3
        print(f"{what:24}{median:7.1f} ms (median of {runs}, at most {most:.1f})")


if __name__ == "__main__":
    main()
