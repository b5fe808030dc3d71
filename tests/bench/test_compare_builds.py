"""The comparison of two builds: the arithmetic of its verdict, and one run."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from benchmarks.compare_builds import build_of, cases, interval, is_slower, main, pair_ratio
from tests.support.source import ROOT


def test_the_interval_is_that_of_the_tables_and_needs_six_ratios() -> None:
    """Of the order statistics of the 95 % interval of a median, from 1."""
    table = {6: (1, 6), 8: (1, 8), 9: (2, 8), 10: (2, 9), 12: (3, 10), 15: (4, 12), 20: (6, 15), 25: (8, 18)}
    for count, positions in table.items():
        ratios = [float(number) for number in range(1, count + 1)]
        random.Random(count).shuffle(ratios)
        assert interval(ratios) == positions
    with pytest.raises(ValueError, match="at least 6"):
        interval([1.0] * 5)


def test_a_build_is_slower_when_the_whole_interval_is() -> None:
    # The upper end is the twelfth: three fast pairs of fifteen are taken for noise, four are not.
    slower = [[0.9] * 15, [0.9] * 12 + [1.2] * 3]
    not_slower = [[0.95] * 15, [1.1] * 15, [0.9] * 11 + [1.2] * 4]
    assert [is_slower(ratios) for ratios in slower + not_slower] == [True] * 2 + [False] * 3


def test_builds_by_path(tmp_path: Path) -> None:
    assert build_of(Path(sys.executable)).python == sys.executable
    source = build_of(tmp_path)
    assert source.python == sys.executable
    assert source.environment is not None
    assert source.environment["PYTHONPATH"] == str(tmp_path / "src")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    installed = build_of(tmp_path)
    assert installed.python == str(tmp_path / ".venv/bin/python")
    assert "PYTHONPATH" not in (installed.environment or {})


def test_one_pair_of_a_build_and_itself_one_that_cannot_run_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    build = build_of(ROOT)
    for number in (0, 1):
        assert 0.01 < pair_ratio(cases(1)["plan"], (build, build), number) < 100
    assert main(["--before", "/bin/false", "--cases", "plan"]) == 1
    assert "FAILED: ours-plan" in capsys.readouterr().out
    assert main(["--list"]) == 0
    assert "pull-shm-4k" in capsys.readouterr().out.split()
    assert main(["--self", "--cases", "none-like-this"]) == 2
    for wrong in ([], ["--self", "--before", "x"], ["--self", "--pairs", "5"]):
        with pytest.raises(SystemExit):
            main(wrong)
