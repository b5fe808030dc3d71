"""A short campaign from a fixed seed, over shm with pushes and over tcp with keys; `make faults` runs the long one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from faults.__main__ import main
from faults.campaign.memory import (
    REMEMBERED,
    Directory,
    Found,
    Kind,
    Shape,
    Stamp,
    difference,
    pattern,
    stamp_of,
    whole,
)
from faults.campaign.report import VIOLATIONS, Report, expected
from faults.campaign.schedule import plan_epoch


def test_every_byte_is_right_and_nothing_is_left_after_a_short_campaign(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    status = main(["campaign", "--seconds", "10", "--epoch", "5", "--seed", "7", "--json", str(report)])
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
    assert any(call.endswith("|Interrupted") for call in numbers["calls"])
    assert any(call.endswith("|Cancelled") for call in numbers["calls"])
    assert calls >= {"allocate", "register", "link_clusters", "pull_blocks healed", "finalize"}


@pytest.mark.parametrize(
    ("transport", "lost", "finished", "found"),
    [
        ("shm", "", True, ""),
        ("shm", "plan", True, "no call came to: plan"),
        ("shm", "plan", False, ""),
        ("auto", "plan", True, ""),
    ],
)
def test_a_step_that_no_call_comes_to_any_more_is_named(
    tmp_path: Path, transport: str, lost: str, finished: bool, found: str
) -> None:
    report = Report(tmp_path)
    epoch = plan_epoch(1, 0, (transport,))
    report.begin(epoch)
    arrivals = {f"{step}, shm": 1 for step in expected(plan_epoch(1, 0, ("shm",))) - {lost}}
    journal = {"calls": {}, "counts": {}, "arrivals": arrivals, "worst": 0, "slowest": 0}
    (tmp_path / "journal-1.json").write_text(json.dumps(journal))
    report.collect(finished=finished)
    assert [each["text"] for each in report.violations] == [found] * bool(found)
    assert report.as_dict()["arrivals"]["shm"]["ask"] == 1


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


def test_a_new_generation_is_seen_without_the_end_of_an_old_one_in_its_place(tmp_path: Path) -> None:
    """Regression: a new generation was visible before the end of an old one was forgotten in its place."""
    seen: list[int] = []

    class Watched(Directory):
        def unmark(self, worker: int, slot: int, generation: int) -> None:
            seen.append(self.newest(old))
            super().unmark(worker, slot, generation)

    old = Found(1, 2, Kind.ROWS, 7, 5, 40, Shape(4, 24, 64))
    directory = Watched(tmp_path / "directory", create=True)
    later = replace(old, generation=old.generation + REMEMBERED)
    directory.publish(old)
    directory.mark(old.worker, old.slot, old.generation, "ending")
    directory.publish(later)
    assert seen == [0, old.generation], "its end was forgotten before others could see the new one"
    assert directory.look(1, 2) == later
    assert not directory.moment(later, later.generation, "ending")
    directory.close()


def test_a_new_life_knows_what_an_earlier_one_may_have_pulled(tmp_path: Path) -> None:
    """Regression: a killed worker's next life did not know what the earlier one had pulled."""
    directory = Directory(tmp_path / "directory", create=True)
    directory.publish(Found(1, 2, Kind.ROWS, 7, 5, 40, Shape(4, 24, 64)))
    directory.reborn(0)
    assert (1, 7, 2, 5) in directory.generations()
    directory.reborn(1)
    assert (1, 7, 2, 5) not in directory.generations()
    directory.close()
