"""Run a program of the fault tool: ``python -m faults NAME [option ...]``; without a name, list them."""

import argparse
import sys
from importlib import import_module
from typing import Any, Final

#: Name -> module. It has ``OPTIONS``, ``measure``, which yields lines of text and whether each is good, and may have a
#: ``HEAD``. Its functions travel to other processes by the name of the module, so that none is run as __main__.
PROGRAMS: Final = {
    "campaign": "faults.campaign.supervisor",
    "fuzz": "faults.fuzz.command",
    "interrupts": "faults.interrupts",
    "store": "faults.store.command",
    "stuck-readers": "faults.stuck_readers",
    "trials": "faults.trials",
}


def parsed(module: Any, arguments: list[str]) -> argparse.Namespace:
    """Parse by ``OPTIONS``: name -> (default, help). A tuple are choices, all unless told."""
    parser = argparse.ArgumentParser(description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, text) in module.OPTIONS.items():
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action="store_true", help=text)
        elif isinstance(default, tuple):
            parser.add_argument(f"--{name}", nargs="+", choices=default, default=default, help=text)
        else:
            kind = int if default is None else type(default)
            parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser.parse_args(arguments)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Return the program's exit status: 0 if nothing was found, 2 for wrong usage."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name not in PROGRAMS:
        for each, module in PROGRAMS.items():
            say(f"{each:16}{(import_module(module).__doc__ or '').partition(chr(10))[0]}")
        return 2
    program: Any = import_module(PROGRAMS[name])
    sys.argv[:] = [f"python -m faults {name}"]  # for the usage
    options, good = parsed(program, rest), True
    if head := getattr(program, "HEAD", ""):
        say(head)
    for text, right in program.measure(options):
        good &= right
        say(text)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
