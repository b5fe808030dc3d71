"""What several unit tests need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from llm_datadist.testing.scene import residue, settled

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Lanes and their engines leave no descriptor and no thread."""
    before = residue()
    yield
    assert settled(before) == before
