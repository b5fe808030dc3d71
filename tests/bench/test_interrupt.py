"""Whatever ends the bench ends its workers."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.moves import wait_until

_BOUND_S = 60


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in tasks for child in each.read_text().split()]


def _ended(pid: int) -> bool:
    """Return whether a process is at most an entry that its parent has not collected yet."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_workers_too(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "llm_datadist.cli", "bench", "pull", "--blocks", "200", "--passes", "1000"]
    with subprocess.Popen(
        [*command, "--against", ","], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stderr is not None
        # Nothing is said after this line before the first pass, for which the workers are there.
        while not driver.stderr.readline().startswith("1 of 1"):
            assert driver.poll() is None
        workers = _children(driver.pid)
        assert len(workers) == 2
        driver.send_signal(number)
        driver.communicate(timeout=_BOUND_S)
        assert driver.returncode != 0
        wait_until(lambda: all(_ended(pid) for pid in workers), _BOUND_S)
