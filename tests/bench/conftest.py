"""What the tests of the bench share."""

import os

import pytest

from tests.support.source import ROOT


@pytest.fixture(autouse=True)
def _workers_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sides of the tests are imported in worker processes."""
    inherited = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT), *inherited.split(os.pathsep)]))
