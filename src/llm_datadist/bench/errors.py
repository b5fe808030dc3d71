"""What can go wrong in a comparison; each ends one side or one case, not the run."""

from __future__ import annotations

__all__ = ["BenchError", "SideFailed", "WrongBytes"]


class BenchError(Exception):
    """A comparison could not be made; the text says why."""


class WrongBytes(BenchError):
    """A transfer did not move what it should have, or moved more."""


class SideFailed(BenchError):
    """A process of a side died, hung, or reported an error."""
