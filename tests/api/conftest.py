"""One end alone."""

import pytest

from tests.support.kinds import LocalEnd, World


@pytest.fixture
def world(end: LocalEnd) -> World:
    """An initialised end alone, with both pools, pages of 4 KiB."""
    end.start("PROMPT", 1)
    return end.world
