"""The long campaign of faults, see docs/faults.md: random harm for minutes, judged after each epoch."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from faults.campaign.schedule import TRANSPORTS
from faults.campaign.supervisor import Supervisor
from llm_datadist._links.credentials import new_secret
from llm_datadist.bench.progress import Progress
from tests.support.world import SECRETS_VARIABLE


def measure(options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    yield f"seed {seed}", True
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        if options.secure:
            os.environ[SECRETS_VARIABLE] = str(new_secret(Path(folder) / "secrets", "campaign"))
        with Progress(sys.stdout, "seconds") as progress:
            supervisor = Supervisor(seed, tuple(options.transport), Path(folder), progress)
            supervisor.run(options.seconds, options.epoch)
    report = supervisor.report
    if options.json:
        Path(options.json).write_text(json.dumps(report.as_dict() | {"seed": seed}, indent=1) + "\n")
    yield f"\n{report.table()}\n\nseed {seed}: {'FAILED' if report.failed else 'passed'}", not report.failed


OPTIONS: Final = {
    "seconds": (600.0, "how long, about"),
    "epoch": (20.0, "seconds of faults between two looks at what is left"),
    "seed": (None, "what it is made from; any, if left out"),
    "transport": (TRANSPORTS, "taken in turn"),
    "secure": (False, "with links that are authenticated and sealed"),
    "json": ("", "a file for the numbers"),
}
