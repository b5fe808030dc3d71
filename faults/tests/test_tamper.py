"""One wrong thing to a sealed lane or control connection: nothing wrong passes, and nothing hangs."""

from collections.abc import Callable, Iterator

import pytest

from faults.tamper import HARM, Channels, Lanes, Links, run
from tests.support.world import residue, settled

SCENES: dict[str, tuple[Callable[[], Lanes | Channels | Links], int, set[str]]] = {
    "lanes": (lambda: Lanes(20, sealed=True), 2_500, {"good"}),
    "channels": (lambda: Channels(20, sealed=True), 500, {"good", "handshake refused", "tampered with"}),
    "links over shm": (lambda: Links(20, "shm"), 50, {"link refused", "link ended"}),
    "links over tcp": (lambda: Links(20, "tcp"), 50, {"link refused", "link ended"}),
}


@pytest.fixture
def nothing_left() -> Iterator[None]:
    run(Links(1, "shm"), 1)  # whatever is made once is made now
    before = residue()
    yield
    assert settled(before) == before


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("scene", SCENES)
def test_what_is_tampered_with_costs_its_lane_or_link_and_moves_no_wrong_byte(scene: str) -> None:
    make, trials, ends = SCENES[scene]
    report = run(make(), trials)
    assert not report.faults, report.faults[:5]
    assert not report.hung, report.hung[:5]
    assert sum(report.hit.values()) > trials // 2, report
    if trials > 100:
        assert {name for name, count in report.hit.items() if count} == set(HARM)
    assert min(report.outcomes[how] for how in ends) > 0, report


@pytest.mark.parametrize("scene", [Lanes, Channels])
def test_without_seals_changed_bytes_are_found(scene: type[Lanes | Channels]) -> None:
    assert run(scene(20, sealed=False), 300).faults
