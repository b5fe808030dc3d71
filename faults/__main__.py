"""Run a program of the fault tool: ``python -m faults NAME [option ...]``; without a name, list them."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Final

from faults.harness import say

#: Name -> module with a function ``main`` that reads sys.argv. The functions of these modules travel to other processes
#: by the name of their module, so none of them is run as __main__.
PROGRAMS: Final = {
    "campaign": "faults.campaign.command",
    "crowd": "faults.crowd",
    "fuzz": "faults.fuzz.command",
    "grants": "faults.grants",
    "interrupts": "faults.interrupts",
    "rebind": "faults.rebind",
    "stuck-readers": "faults.stuck_readers",
    "tamper": "faults.tamper",
    "trials": "faults.trials",
    "unmapping": "faults.unmapping",
}


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in PROGRAMS:
        for each, module in PROGRAMS.items():
            say(f"{each:16}{(import_module(module).__doc__ or '').partition(chr(10))[0]}")
        return 2
    sys.argv[:2] = [f"python -m faults {name}"]
    status: int = import_module(PROGRAMS[name]).main()
    return status


if __name__ == "__main__":
    sys.exit(main())
