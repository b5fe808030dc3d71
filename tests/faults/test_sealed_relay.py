"""A relay that changes what goes over a sealed lane: no wrong byte passes, and nothing hangs."""

from __future__ import annotations

from tests.faults.sealed_relay import FAULTS, run

TRIALS = 10_000


def test_no_changed_byte_passes_a_sealed_lane() -> None:
    report = run(TRIALS, seed=20)
    assert not report.wrong, report.wrong[:5]
    assert not report.hung, report.hung[:5]
    assert sum(report.hit.values()) > TRIALS // 2, report
    assert set(report.hit) == set(FAULTS)
    assert report.ended["good"] > 0, report


def test_over_plain_lanes_changed_bytes_are_found() -> None:
    """So that the test above looks at something."""
    assert run(300, seed=20, sealed=False).wrong
