"""The worker's lines: nothing gets between them, every order is answered, and it does not outlive its driver."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_BOUND_S = 60
WORK = {"op": "pull", "block_bytes": 64, "blocks": 3, "tensors": 1}


class Driven:
    """A worker that is given lines by hand."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llm_datadist.bench.worker", f"tests.bench.broken:{name}", "alone"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, **order: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture
def worker() -> Iterator[Driven]:
    driven = Driven("Chatters")
    yield driven
    driven.process.kill()
    driven.process.communicate(timeout=_BOUND_S)


def test_orders_are_answered_in_turn_whatever_else_is_printed(worker: Driven) -> None:
    assert worker.ask(do="start", workload=WORK) == {"value": {"transport": "hand"}}
    assert worker.ask(do="fill", seed=5) == {"value": None}
    assert worker.ask(do="poison") == {"value": None}
    assert all(seconds > 0 for seconds in worker.ask(do="timed", count=2)["value"])
    assert worker.ask(do="verify", seed=5) == {"value": True}
    assert worker.ask(do="verify", seed=6)["error"].startswith("WrongBytes: wrong bytes inside")
    assert worker.ask(do="poison") == {"value": None}
    assert len(worker.ask(do="sample", count=3)["value"]) == 3
    assert worker.ask(do="verify", seed=5) == {"value": True}
    assert worker.ask(do="stop") == {"value": None}
    out, err = worker.process.communicate(timeout=_BOUND_S)
    assert (out, worker.process.returncode) == ("", 0)
    assert "hello from Python\n" in err
    assert "hello from C\n" in err


def test_what_is_no_command_or_comes_before_the_start_is_refused(worker: Driven) -> None:
    assert "not started" in worker.ask(do="timed")["error"]
    worker.ask(do="start", workload=WORK)
    for name in ("fly", "own", "__init__", "transfer_one", None):
        assert "no such command" in worker.ask(do=name)["error"]
    assert worker.ask(do="fill", seed=1) == {"value": None}


def test_cpu_seconds_grow_with_a_busy_thread_and_it_ends_when_its_driver_is_gone(worker: Driven) -> None:
    worker.ask(do="start", workload=WORK)
    before = worker.ask(do="cpu")["value"]
    assert worker.ask(do="busy", on=True) == {"value": None}
    # Waits for what must come sooner or later; the test's own limit of time is the bound.
    while worker.ask(do="cpu")["value"] < before + 0.05:
        pass
    assert worker.ask(do="busy", on=False) == {"value": None}
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    worker.process.stdin = None
    assert worker.process.wait(_BOUND_S) == 3
