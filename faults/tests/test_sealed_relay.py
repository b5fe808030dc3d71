"""A relay that changes what goes over a sealed lane or control connection: nothing wrong passes, and nothing hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from faults import sealed_control
from faults.sealed_relay import FAULTS, run
from tests.support.world import residue, settled

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIALS = 10_000
CONTROL_TRIALS = 1_500
LINKS = 100


@pytest.fixture
def nothing_left() -> Iterator[None]:
    sealed_control.run_links(1, 1, "shm")  # whatever is made once is made now
    before = residue()
    yield
    assert settled(before) == before


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


@pytest.mark.usefixtures("nothing_left")
def test_no_changed_byte_passes_a_sealed_control_connection() -> None:
    report = sealed_control.run(CONTROL_TRIALS, seed=20)
    assert not report.wrong, report.wrong[:5]
    assert not report.hung, report.hung[:5]
    assert sum(report.hit.values()) > CONTROL_TRIALS // 2, report
    assert {name for name, count in report.hit.items() if count} == set(FAULTS)
    assert min(report.ended[how] for how in ("good", "handshake refused", "tampered with")) > 0, report


def test_over_a_plain_control_connection_changed_bytes_are_found() -> None:
    """So that the test above looks at something."""
    assert sealed_control.run(300, seed=20, sealed=False).wrong


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_control_connection_that_is_tampered_with_costs_its_link_and_moves_no_wrong_byte(transport: str) -> None:
    report = sealed_control.run_links(LINKS, 20, transport)
    assert not report.wrong, report.wrong[:5]
    assert not report.hung, report.hung[:5]
    assert sum(report.hit.values()) > LINKS // 2, report
    assert min(report.ended[how] for how in ("link refused", "link ended")) > 0, report
