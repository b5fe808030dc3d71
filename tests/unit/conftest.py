"""What several unit tests need."""

from collections.abc import Iterator

import pytest

from faults import lane_ends
from llm_datadist._native import CopyPool, LaneEngine
from llm_datadist.testing.scene import residue, settled


@pytest.fixture(scope="module")
def pool() -> Iterator[CopyPool]:
    """Three threads that copy, the caller one of them."""
    shared = CopyPool(3)
    yield shared
    shared.close()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Lanes and their engines leave no descriptor and no thread."""
    before = residue()
    yield
    assert settled(before) == before


@pytest.fixture(params=["plain", "sealed"])
def kind_of_lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs over plain lanes, then over sealed ones."""
    monkeypatch.setattr(lane_ends.Kind, "sealed", request.param == "sealed")


@pytest.fixture
def engine() -> Iterator[LaneEngine]:
    """An engine with one thread."""
    engine = LaneEngine(1)
    yield engine
    engine.close()
