"""The driver catches a contender that does not do its work, loses no figures of other contenders, and never hangs.

That every wrong byte is found is shown in test_contenders.py.
"""

import io
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from llm_datadist.tools.bench.cases import Case
from llm_datadist.tools.bench.driver import run
from llm_datadist.tools.bench.processes import RunningContender
from llm_datadist.tools.bench.report import BenchReporter
from llm_datadist.tools.bench.workload import BenchWorkload, Op
from tests.support.ends import has_ended, state_of
from tests.support.moves import wait_until
from tests.support.source import PATHS

#: For what must not take long on a machine under load, and for what has to hang.
LONG_S, SHORT_S = 120.0, 4.0

WORK = BenchWorkload(op=Op.PULL, block_bytes=512, blocks=20, tensors=2)


def contender(name: str) -> str:
    return f"tests.bench.broken:{name}"


GOOD = Case(contender=contender("Good"), call="copy", transport="hand", workload=WORK, passes=2)


class Told(BenchReporter):
    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.lines: list[str] = []
        self.steps: list[tuple[str, int, int]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, case: Case, contender: str, done: int, total: int) -> None:
        self.steps.append((contender, done, total))


@pytest.fixture(autouse=True)
def _workers_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PATHS["PYTHONPATH"], prepend=os.pathsep)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.mark.parametrize(
    ("name", "op", "transport"),
    [(contender("Good"), Op.PULL, "hand"), ("cma", Op.PULL, "cma"), ("cma", Op.PUSH, "cma")],
)
def test_a_good_contender_gives_a_row_and_two_processes_read_and_write_at_the_right_ends(
    told: Told, name: str, op: Op, transport: str
) -> None:
    case = replace(GOOD, contender=name, workload=BenchWorkload(op=op, block_bytes=512, blocks=20))
    results = run([case], told, LONG_S)
    assert results.failures == []
    [row] = results.rows
    assert (row.transport, row.passes, row.verified, row.bytes) == (transport, 2, True, 20 * 512)
    assert told.steps == [(case.contender, number, 3) for number in range(3)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MovesNothing", "wrong bytes inside the addressed blocks"),
        ("MovesNothingAfterTheFirst", "wrong bytes inside the addressed blocks"),
        ("MovesAWrongBlock", "wrong bytes inside the addressed blocks"),
        ("WritesOutside", "wrong bytes outside the addressed blocks"),
        ("VerifiesNothing", "no process verified anything"),
        ("Raises", "ValueError: no wind"),
        ("Dies", "ended with status 7 during timed; it wrote: the last words"),
        ("CannotStart", "OSError: no such adapter"),
    ],
)
def test_a_bad_contender_is_caught_and_has_no_row(told: Told, name: str, said: str) -> None:
    results = run([replace(GOOD, contender=contender(name))], told, LONG_S)
    assert results.rows == []
    [failure] = results.failures
    assert said in failure
    assert failure in told.lines


def test_bad_peers_cost_their_own_figures_only_and_limit_and_peer_stand_beside_ours(told: Told) -> None:
    bad = [contender(name) for name in ("MovesNothing", "VerifiesNothing", "Dies", "CannotStart")]
    results = run([replace(GOOD, limit=contender("Chatters"), peers=(*bad, contender("Good"))), GOOD], told, LONG_S)
    assert [(row.limit, row.peer) for row in results.rows] == [(contender("Chatters"), contender("Good")), (None, None)]
    assert all(row.verified for row in results.rows)
    assert len(results.failures) == len(bad)
    assert all(any(name in failure for failure in results.failures) for name in bad)


def test_a_contender_that_hangs_ends_with_its_processes(told: Told) -> None:
    results = run([replace(GOOD, contender=contender("Hangs")), GOOD], told, SHORT_S)
    assert "no answer to" in results.failures[0]
    # Under load the second case may not make it in so little time; it must not hang either.
    assert len(results.rows) + len(results.failures) == 2


DRIVER = """
from llm_datadist.tools.bench.processes import RunningContender
from llm_datadist.tools.bench.workload import Op, BenchWorkload
running = RunningContender("cma", 120)
with running.turn():
    running.start(BenchWorkload(op=Op.PULL, block_bytes=64, blocks=2))
print(*(each.pid for each in running.processes), flush=True)
input()
"""


def test_processes_run_in_their_turn_only_and_end_with_their_driver_also_when_they_are_stopped() -> None:
    with RunningContender("cma", LONG_S) as running:
        pids = [each.pid for each in running.processes]
        for number in range(3):
            with running.turn():
                if number == 0:
                    running.start(WORK)
                running.prepare(number)
                running.run("timed", 1)
                running.verify(number)
            wait_until(lambda: {state_of(pid) for pid in pids} == {"T"})
        assert len(set(pids)) == 2
    assert {state_of(pid) for pid in pids} == {""}, "they are gone at the end"
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with driver:
        assert driver.stdout is not None
        pids = [int(each) for each in driver.stdout.readline().split()]
        assert len(pids) == 2
        wait_until(lambda: {state_of(pid) for pid in pids} == {"T"})
        driver.kill()
    wait_until(lambda: all(map(has_ended, pids)))
