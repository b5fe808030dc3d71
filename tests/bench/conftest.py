"""What the tests of the bench share."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.support.source import ROOT

if TYPE_CHECKING:
    from llm_datadist.bench.cases import Case


@pytest.fixture(autouse=True)
def _workers_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sides of the tests are imported in worker processes."""
    inherited = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT), *inherited.split(os.pathsep)]))


@dataclass
class Told:
    """A listener that keeps what it is told."""

    lines: list[str] = field(default_factory=list)
    steps: list[tuple[str, int, int]] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, case: Case, side: str, done: int, total: int) -> None:
        self.steps.append((side, done, total))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def told() -> Told:
    return Told()
