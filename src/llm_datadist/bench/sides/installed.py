"""Whether a peer can be imported, without importing it into this process."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from typing import Final

__all__ = ["why_not_importable"]

_IMPORT_S: Final = 120


@cache
def why_not_importable(module: str, package: str) -> str | None:
    """Say why ``import module`` fails here, or return None.

    Args:
        module: Dotted name.
        package: What pip installs to have it.
    """
    if find_spec(module.partition(".")[0]) is None:
        return f"not installed (pip install {package})"
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"import {module} takes more than {_IMPORT_S} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return f"import {module}: {lines[-1] if lines else f'exit code {done.returncode}'}"
