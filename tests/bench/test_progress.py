"""Progress of long work: a bar on a terminal, which no thread draws, and plain lines elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest

from tests.support.source import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

pytest.importorskip("rich")

#: Three steps, each with a line of its own; the number of threads meanwhile is the exit status.
_STEPS: Final = """
import sys, threading
from llm_datadist.bench.progress import Progress, steps
for each in steps("abc", "step {}".format):
    print("did", each, flush=True)
with Progress(sys.stderr, "frames") as progress:
    progress.begin(2)
    for each in (1, 2):
        progress.show(each, "[red]")
        progress.say(f"line {each} :x: [red]")
sys.exit(threading.active_count())
"""
_PULL: Final = ["-m", "llm_datadist.cli", "bench", "pull", "--blocks", "20", "--passes", "2", "--against", ","]
_FUZZ: Final = ["-m", "faults", "fuzz", "--frames", "200", "--target", "parser"]
_CAMPAIGN: Final = ["-m", "faults", "campaign", "--seconds", "2", "--epoch", "2", "--seed", "1", "--transport=shm"]
_BAR: Final = "\N{BOX DRAWINGS HEAVY HORIZONTAL}" * 4


def on_pipes(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, *arguments], check=False, capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def on_terminal(*arguments: str) -> tuple[int, str]:
    """Run with a terminal for all three streams; return the status and what it would have shown."""
    ours, theirs = os.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(
        [sys.executable, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        while part := _read(ours):
            shown += part
    os.close(ours)
    return process.returncode, shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # EIO: the other end is closed
        return b""


def test_on_pipes_a_line_for_each_step_apart_from_results_on_a_terminal_a_bar_that_no_thread_draws() -> None:
    lines = ["1 of 3: step a", "2 of 3: step b", "3 of 3: step c", "line 1 :x: [red]", "line 2 :x: [red]", ""]
    assert on_pipes("-c", _STEPS) == (1, "did a\ndid b\ndid c\n", "\n".join(lines))
    status, shown = on_terminal("-c", _STEPS)
    assert status == 1, shown  # the main thread is the only one
    assert _BAR in shown
    for text in ("did a", "did b", "did c", "3/3", "line 1 :x: [red]", "line 2 :x: [red]", "2/2", "frames"):
        assert text in shown
    assert "1 of 3" not in shown


@pytest.mark.parametrize(
    ("arguments", "line", "unit"),
    [
        (_PULL, "1 of 1: pull", "cases"),
        (_FUZZ, "frames judged, no finding", "targets"),
        (_CAMPAIGN, "seed 1: passed", "seconds"),
    ],
    ids=["bench", "fuzz", "campaign"],
)
def test_bench_and_faults_have_a_bar_on_a_terminal_and_only_lines_on_pipes(
    arguments: Sequence[str], line: str, unit: str
) -> None:
    status, out, err = on_pipes(*arguments)
    assert status == 0, out + err
    assert line in out + err
    assert _BAR not in err
    assert "\x1b" not in out + err
    status, shown = on_terminal(*arguments)
    assert status == 0, shown
    assert re.search(rf"{_BAR}.* \d+/\d+ {unit}", re.sub(r"\x1b\[[\d;?]*\w", "", shown)), shown
