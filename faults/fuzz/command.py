"""Fuzz all that reads from peers: every target, or some. A finding ends the run with its traceback."""

import argparse
import time
from collections.abc import Iterator
from typing import Final

from faults.fuzz import Targets, greetings, lanes, links, nixl, readers
from llm_datadist.tools.bench.progress import steps

TARGETS: Final[Targets] = readers.TARGETS | links.TARGETS | greetings.TARGETS | lanes.TARGETS | nixl.TARGETS


def measure(options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    total, seed = 0, options.seed or int(time.time())
    for name in steps(options.target):
        share, target = TARGETS[name]
        verdicts = target(options.frames if len(options.target) == 1 else int(options.frames * share) + 1, seed)
        total += verdicts.judged
        yield str(verdicts), True
    yield f"{total} frames judged, no finding", True


OPTIONS: Final = {
    "frames": (1_000_000, "in all; each target gets its share, one alone gets all"),
    "seed": (None, "any, if left out"),
    "target": (tuple(TARGETS), "only these"),
}
