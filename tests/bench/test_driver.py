"""The driver catches a side that does not do its work, loses no figures of other sides, and never hangs.

That every wrong byte is found is shown in test_workload.py.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llm_datadist.bench import SideFailed
from llm_datadist.bench.cases import Case
from llm_datadist.bench.driver import prepare, run
from llm_datadist.bench.processes import RunningSide
from llm_datadist.bench.workload import Op, Workload

if TYPE_CHECKING:
    from tests.bench.conftest import Told

#: For what must not take long on a machine under load, and for what has to hang.
LONG_S, SHORT_S = 120.0, 4.0

WORK = Workload(op=Op.PULL, block_bytes=512, blocks=20, tensors=2)


def side(name: str) -> str:
    return f"tests.bench.broken:{name}"


GOOD = Case(side=side("Good"), call="copy", transport="hand", workload=WORK, passes=2)


def test_a_good_side_gives_a_row(told: Told) -> None:
    results = run([GOOD], told, LONG_S)
    assert results.failures == []
    [row] = results.rows
    assert (row.transport, row.passes, row.verified, row.bytes) == ("hand", 2, True, 20 * 512 * 2)
    assert told.steps == [(GOOD.side, number, 3) for number in range(3)]


@pytest.mark.parametrize("op", [Op.PULL, Op.PUSH])
def test_two_processes_read_and_write_at_the_right_ends(told: Told, op: Op) -> None:
    work = Workload(op=op, block_bytes=512, blocks=20)
    results = run([replace(GOOD, side=side("Pair"), workload=work)], told, LONG_S)
    assert results.failures == []
    assert [row.transport for row in results.rows] == ["file"]


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
def test_a_bad_side_is_caught_and_has_no_row(told: Told, name: str, said: str) -> None:
    results = run([replace(GOOD, side=side(name))], told, LONG_S)
    assert results.rows == []
    [failure] = results.failures
    assert said in failure
    assert failure in told.lines


def test_bad_peers_cost_their_own_figures_only_and_limit_and_peer_stand_beside_ours(told: Told) -> None:
    bad = [side(name) for name in ("MovesNothing", "VerifiesNothing", "Dies", "CannotStart")]
    results = run([replace(GOOD, limit=side("Chatters"), peers=(*bad, side("Good"))), GOOD], told, LONG_S)
    assert [(row.limit, row.peer) for row in results.rows] == [(side("Chatters"), side("Good")), (None, None)]
    assert all(row.verified for row in results.rows)
    assert len(results.failures) == len(bad)
    assert all(any(name in failure for failure in results.failures) for name in bad)


def test_a_side_that_hangs_ends_with_its_processes(told: Told) -> None:
    results = run([replace(GOOD, side=side("Hangs")), GOOD], told, SHORT_S)
    assert "no answer to" in results.failures[0]
    # Under load the second case may not make it in so little time; it must not hang either.
    assert len(results.rows) + len(results.failures) == 2


def test_processes_are_gone_at_the_end() -> None:
    with RunningSide(side("Pair"), LONG_S) as running:
        running.start(Workload(op=Op.PULL, block_bytes=64, blocks=2))
        pids = running.pids
        assert len(set(pids)) == 2
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(SideFailed, match="no such adapter"), RunningSide(side("CannotStart"), LONG_S) as running:
        running.start(WORK)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_what_cannot_run_is_said_before_the_start_and_the_rest_goes_on(told: Told) -> None:
    case = replace(
        GOOD, limit=side("CannotStart"), peers=(side("NotForThis"), "nowhere:Side", side("Good"), side("Missing"))
    )
    left = prepare([case, case], told, LONG_S)
    assert [each.sides for each in left] == [(side("Good"), side("Good"))] * 2
    assert sum("never for pull" in line for line in told.lines) == 1, "each thing is said once"
    for said in ("no such adapter", "never for pull", "No module named 'nowhere'", "has no attribute 'Missing'"):
        assert said in told.text
    assert told.steps == []


def test_without_our_side_or_without_memory_there_is_no_case(told: Told) -> None:
    large = Workload(op=Op.PULL, block_bytes=1 << 30, blocks=1 << 20)
    for name in ("CannotStart", "NotForThis", "Missing"):
        told.lines.clear()
        assert prepare([replace(GOOD, side=side(name))], told, LONG_S) == []
        assert f"left out: {GOOD.title}" in told.lines
    assert prepare([replace(GOOD, workload=large), GOOD], told, LONG_S) == [GOOD]
    [line] = [each for each in told.lines if "GiB are available" in each]
    assert line.startswith("left out")
    assert "need 4194304 GiB" in line
