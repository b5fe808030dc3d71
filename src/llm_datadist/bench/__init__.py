"""``llm-datadist bench``: this library beside the limits of the machine and other software, every byte verified.

A *side* (``sides/``) moves one workload in worker processes of its own. The driver runs all sides of a case in turn,
pass after pass, and makes rows of results. Each exception here ends one side or one case; the run goes on.
"""

from __future__ import annotations


class BenchError(Exception):
    """A comparison could not be made; the text says why."""


class WrongBytes(BenchError):
    """A transfer did not move what it should have, or moved more."""


class SideFailed(BenchError):
    """A process of a side died, hung, or reported an error."""
