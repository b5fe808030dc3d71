"""``llm-datadist bench``: this library beside the limits of the machine and other software, every byte verified.

A *contender* (``contenders/``) moves one workload in worker processes of its own. The driver runs all contenders of a case in turn,
pass after pass, and makes rows of results. Each exception here ends one contender or one case; the run goes on.
"""

from __future__ import annotations


class BenchError(Exception):
    """A comparison could not be made; the text says why."""


class WrongBytes(BenchError):
    """A transfer did not move what it should have, or moved more."""


class ContenderFailed(BenchError):
    """A process of a contender died, hung, or reported an error."""
