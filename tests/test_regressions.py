"""Tests that keep faults away that were found before: each one named in docs/notes/regressions.md runs."""

import re
import sys
from typing import Final

from tests.support.source import ROOT, run

#: Prints the id of each collected test that is not skipped.
_COLLECT: Final = """
import sys
import pytest
from _pytest.skipping import evaluate_skip_marks

class Ids:
    def pytest_collection_finish(self, session):
        print(*(item.nodeid for item in session.items if evaluate_skip_marks(item) is None), sep="\\n")

sys.exit(pytest.main(["--collect-only", "-qq", "--no-summary", *sys.argv[1:]], plugins=[Ids()]))
"""


def test_every_test_of_a_regression_is_collected_and_not_skipped() -> None:
    text = (ROOT / "docs" / "notes" / "regressions.md").read_text()
    named = sorted(set(re.findall(r"`((?:tests|faults)/[\w/]+\.py(?:::\w+(?:::\w+)?(?:\[[^`]+\])?)?)`", text)))
    assert len(named) > 50
    files = sorted({each.partition("::")[0] for each in named})
    done = run(sys.executable, "-c", _COLLECT, *files, cwd=ROOT, timeout=None)
    assert done.returncode == 0, done.stdout + done.stderr
    ids = set(done.stdout.split("\n"))
    known = ids | {each.partition("[")[0] for each in ids} | {each.partition("::")[0] for each in ids}
    missing = [each for each in named if each not in known]
    assert not missing, f"merge or rename them in docs/notes/regressions.md too: {missing}"


def test_every_brittle_test_exists() -> None:
    lines = (ROOT / "tests" / "brittle.txt").read_text().splitlines()
    named = [line.partition("::") for line in lines if not line.startswith("#")]
    missing = [f"{file}::{name}" for file, _, name in named if f"def {name.rpartition('::')[2]}" not in _text(file)]
    assert named
    assert not missing


def _text(file: str) -> str:
    path = ROOT / file
    return path.read_text() if path.exists() else ""
