"""Peers in C++ and in Python."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.ends import Processes


@pytest.fixture
def peers() -> Iterator[ExitStack]:
    """Peers in C++; those that live at the end must end well."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Peers in Python."""
    family = Processes()
    yield family
    family.part()
