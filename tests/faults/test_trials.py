"""Some trials of each kind (`tests/faults/trials.py` makes as many as one likes), and the rebind race, in short."""

from __future__ import annotations

import pytest

from tests.faults import rebind_race, trials


@pytest.mark.parametrize("transport", trials.TRANSPORTS)
@pytest.mark.parametrize("what", ["reader", "writer"])
def test_memory_used_again_under_who_was_stopped_inside_a_copy(transport: str, what: str) -> None:
    report = trials.run(transport, what, 8)
    assert report.good, "\n".join([trials.HEAD, report.line(), *report.faults])
    # Each kind of end was seen, so that none of them is only believed to be looked for.
    assert report.outcomes["TransferFailed"] > 0
    if what == "reader":
        assert report.reused > 0
    else:
        assert report.killed > 0
        assert (report.reused if transport == "tcp" else report.quarantines) > 0


@pytest.mark.parametrize("transport", rebind_race.TRANSPORTS)
def test_a_key_bound_anew_during_a_pull_of_the_old_cache(transport: str) -> None:
    race = rebind_race.run(transport, 200)
    assert race.good, "\n".join([rebind_race.HEAD, race.line(), *race.faults])
    assert race.torn > 0
    assert race.consumed > 0
