"""``llm-datadist bench``: this library beside machine limits and other software, every byte verified.

A *contender* (``contenders/``) moves one workload in its own worker processes. Each exception here ends one contender
or one case; the run goes on.
"""

from __future__ import annotations


class BenchError(Exception):
    """A comparison is impossible; the text has the reason."""


class WrongBytes(BenchError):
    """A transfer left wrong bytes, inside or outside of the addressed blocks."""


class ContenderFailed(BenchError):
    """A contender's process died, hung, or reported an error."""
