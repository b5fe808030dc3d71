"""The processes of a client's test: as many as its users have, and nothing left in those that end in order."""

from collections.abc import Iterator

import pytest

from tests.support.ends import ChildEnd, Processes


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Processes of a test of its own: clients kill and restart theirs."""
    processes = Processes()
    yield processes
    processes.part()


@pytest.fixture
def ends(processes: Processes) -> tuple[ChildEnd, ChildEnd]:
    return processes.child("prompt"), processes.child("decoder")
