"""The command ``llm-datadist``. Needs the extra ``[cli]``: typer, rich and textual."""

from __future__ import annotations

import sys
from typing import Final

FAILED: Final = 1
USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130
_EXTRA: Final = {"typer", "rich", "textual"}


def main() -> int:
    """Run the command line; return the exit status, 2 for wrong usage or without the extra."""
    try:
        from llm_datadist.tools.cli.app import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        print(f"llm-datadist needs {error.name}: pip install 'open-datadist[cli]'", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:  # during the imports; commands handle their own
        return INTERRUPTED
    return run()
