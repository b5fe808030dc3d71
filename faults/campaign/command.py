"""``python -m faults campaign --seconds 600 --seed 1``: exit status 1 when anything was as it must never be."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from faults.campaign.schedule import TRANSPORTS
from faults.campaign.supervisor import Supervisor
from faults.harness import say
from llm_datadist._links.credentials import new_secret
from llm_datadist.bench.progress import Progress
from tests.support.world import SECRETS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The long campaign of faults, see docs/faults.md.")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long, about")
    parser.add_argument("--epoch", type=float, default=20.0, help="seconds of faults between two looks at what is left")
    parser.add_argument("--seed", type=int, default=None, help="what it is made from; any, if left out")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="only this one; may be repeated")
    parser.add_argument("--secure", action="store_true", help="with links that are authenticated and sealed")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    say(f"seed {seed}")
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        if options.secure:
            os.environ[SECRETS_VARIABLE] = str(new_secret(Path(folder) / "secrets", "campaign"))
        with Progress(sys.stdout, "seconds") as progress:
            supervisor = Supervisor(seed, tuple(options.transport or ()), Path(folder), progress)
            supervisor.run(options.seconds, options.epoch)
    report = supervisor.report
    say(f"\n{report.table()}\n\nseed {seed}: {'FAILED' if report.failed else 'passed'}")
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_dict() | {"seed": seed}, indent=1) + "\n")
    return int(report.failed)
