"""The processes of a client's test: as many as its users have, and nothing left in those that end in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.ends import ChildEnd
from tests.support.world import residue_of, settled_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class Processes:
    """Makes child processes; those that were not killed must end with nothing left."""

    def __init__(self) -> None:
        self._alive: dict[ChildEnd, dict[str, Any]] = {}

    def born(self, name: str) -> ChildEnd:
        """Start a process."""
        end = ChildEnd(name)
        self._alive[end] = end.do(residue_of)
        return end

    def kill(self, end: ChildEnd) -> None:
        """End it as a crash does."""
        del self._alive[end]
        end.kill()

    def part(self) -> None:
        """Finalize everywhere, then look."""
        try:
            for end in self._alive:
                end.stop()
            for end, before in self._alive.items():
                assert end.do(settled_of, before) == before
                end.close()
        finally:
            for end in self._alive:
                end.kill()


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Processes of a test of its own: clients kill and restart theirs."""
    processes = Processes()
    yield processes
    processes.part()


@pytest.fixture
def ends(processes: Processes) -> tuple[ChildEnd, ChildEnd]:
    """A prompt and a decoder."""
    return processes.born("prompt"), processes.born("decoder")
