"""Tests that keep faults away that were found before: each one named in docs/notes/regressions.md exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent


def test_every_test_of_a_regression_exists() -> None:
    text = (ROOT / "docs" / "notes" / "regressions.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 50
    code = {path: (ROOT / path).read_text() for path, _ in named if (ROOT / path).is_file()}
    missing = [(path, name) for path, name in named if not name and path not in code]
    missing += [(path, name) for path, name in named if name and f"def {name}(" not in code.get(path, "")]
    assert not missing, f"merge or rename them in docs/notes/regressions.md too: {missing}"
