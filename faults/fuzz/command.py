"""``python -m faults fuzz``: run every target, or one."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Final

from faults.fuzz import greetings, lanes, links, nixl, readers
from llm_datadist.bench.progress import Progress

if TYPE_CHECKING:
    from faults.fuzz import Target

TARGETS: Final[dict[str, Target]] = {
    **readers.TARGETS,
    **links.TARGETS,
    **greetings.TARGETS,
    **lanes.TARGETS,
    **nixl.TARGETS,
}
#: Part of all frames that each target gets, so that all take about as long on one machine.
SHARES: Final = {
    "parser": 0.379,
    "same-host packets": 0.12,
    "lane requests": 0.1,
    "handlers": 0.1,
    "handlers, RCA": 0.04,
    "answers": 0.1,
    "lanes": 0.03,
    "lane handles": 0.03,
    "lane greetings": 0.03,
    "nixl requests": 0.02,
    "greetings": 0.003,
    "dials": 0.003,
    "rendezvous": 0.002,
    "sealed handlers": 0.05,
    "sealed lanes": 0.015,
    "sealed greetings": 0.003,
    "sealed dials": 0.003,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz all that reads from peers.")
    parser.add_argument("--frames", type=int, default=1_000_000, help="in all; each target gets its share")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--target", choices=sorted(SHARES), help="only this one, with all frames")
    given = parser.parse_args(arguments)
    total, chosen = 0, [given.target] if given.target else list(TARGETS)
    with Progress(sys.stdout, "targets") as progress:
        progress.begin(len(chosen))
        for number, name in enumerate(chosen):
            progress.show(number, name)
            frames = given.frames if given.target else int(given.frames * SHARES[name]) + 1
            verdicts = TARGETS[name](frames, given.seed)
            total += verdicts.judged
            progress.say(str(verdicts))
            progress.show(number + 1, name)
    sys.stdout.write(f"{total} frames judged, no finding\n")
    return 0
