"""The source tree as the tests about it see it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent.parent
PACKAGE: Final = "llm_datadist"
SOURCE: Final = ROOT / "src" / PACKAGE


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name; a package's name stands for its ``__init__``.

    A compiled module is there as its stub.
    """
    found = {}
    for path in sorted([*SOURCE.rglob("*.py"), *SOURCE.rglob("*.pyi")]):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found
