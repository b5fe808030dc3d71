"""A short campaign from a fixed seed, over shm with pushes and over tcp with keys; `make faults` runs the long one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.faults.campaign.__main__ import main
from tests.faults.campaign.arrivals import EXPECTED, Arrivals
from tests.faults.campaign.contents import Shape, Stamp, difference, pattern, stamp_of, whole
from tests.faults.campaign.epochs import TRANSPORTS, plan_epoch
from tests.faults.campaign.report import VIOLATIONS
from tests.faults.campaign.schedule import schedule

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_every_byte_is_right_and_nothing_is_left_after_a_short_campaign(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    status = main(["--seconds", "10", "--epoch", "5", "--seed", "7", "--json", str(report)])
    out = capsys.readouterr().out
    assert status == 0, out
    assert out.startswith("seed 7\n")
    assert out.endswith("seed 7: passed\n")
    table = {line[:26].strip(): line[26:].strip() for line in out.splitlines() if line[26:].strip()}
    assert {name: table[name] for name in VIOLATIONS} == dict.fromkeys(VIOLATIONS, "0")
    numbers = json.loads(report.read_text())
    assert numbers["violations"] == []
    assert numbers["counts"]["verified bytes"] > 0
    calls = {call.split("|")[0] for call in numbers["calls"] if call.endswith("|ok")}
    # After healing both directions of every pair moved bytes, whatever the faults were.
    assert calls >= {"allocate", "register", "link_clusters", "pull_blocks healed", "finalize"}


def test_everything_follows_from_the_seed() -> None:
    for number in range(20):
        epoch = plan_epoch(5, number, TRANSPORTS)
        assert epoch == plan_epoch(5, number, TRANSPORTS)
        assert schedule(epoch, 20.0) == schedule(epoch, 20.0)
        assert schedule(epoch, 20.0) != schedule(plan_epoch(6, number, TRANSPORTS), 20.0)
        # Bytes are changed only where checksums are there to see it, and no address of a push can be hit.
        assert not epoch.harmed or (epoch.checksum and not epoch.rca)


def test_every_transport_has_its_turn_with_and_without_remote_cache_access() -> None:
    for transports in (TRANSPORTS, ("shm",), ("shm", "tcp")):
        epochs = [plan_epoch(1, number, transports) for number in range(2 * len(transports))]
        assert {(epoch.transport, epoch.rca) for epoch in epochs} == {
            (t, rca) for t in transports for rca in (False, True)
        }


def test_a_step_that_no_call_comes_to_any_more_is_named() -> None:
    epoch = plan_epoch(1, 0, ("shm",))
    expected = EXPECTED["shm", epoch.rca]
    arrivals = Arrivals()
    arrivals.add({f"{step}, shm": 1 for step in expected})
    assert arrivals.end_epoch(epoch, finished=True) == []
    arrivals.add({f"{step}, shm": 1 for step in expected - {"plan"}})
    assert arrivals.end_epoch(epoch, finished=True) == ["plan"]
    assert arrivals.end_epoch(epoch, finished=False) == []
    assert arrivals.as_dict()["shm"]["plan"] == 1


def test_each_word_says_where_it_comes_from() -> None:
    stamp, shape = Stamp(3, 17, 40, 123_456), Shape(4, 24, 64)
    words = whole(stamp, shape)
    assert words.shape == (4, 24, 64)
    assert len({int(word) for word in words.flat}) == words.size
    assert all(stamp_of(int(word)) == stamp for word in words[:, ::7, ::13].flat)
    assert (words[1:3, [5, 2]] == pattern(stamp, (1, 2), (5, 2), 64)).all()
    other = words.copy()
    other[2, 7, 9] = whole(Stamp(1, 2, 3, 4), shape)[0, 1, 2]
    text = difference(other, words)
    assert "worker 1 life 2 slot 3 generation 4 tensor 0 row 1 word 2" in text
    assert "wanted" in text
    assert "generation 123456 tensor 2 row 7 word 9" in text
