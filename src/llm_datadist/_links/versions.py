"""Protocol versions and features: those of this build, and those of a link.

docs/protocol.md tells what each feature is, and what a missing one means.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, NamedTuple

from llm_datadist.errors import LinkRefused

if TYPE_CHECKING:
    from llm_datadist._links.messages import Greeting

#: Oldest and newest protocol version of this build; each minor release after 0.2.0 speaks that of the one before.
VERSIONS: Final = (11, 12)
#: First version whose peers report the bytes that they have moved.
REPORTS: Final = 12
READS_BY_KEY: Final = "reads-by-key"
QUESTIONS: Final = "questions"
GRANTED_ONLY: Final = "granted-only"
FEATURES: Final = [GRANTED_ONLY, QUESTIONS, READS_BY_KEY]


class Spoken(NamedTuple):
    """Language of one link: the newest common version, the common features."""

    version: int
    features: frozenset[str]


def release() -> str:
    """Return ``llm_datadist.__version__``: the package is above this module, which may not import it."""
    return str(sys.modules["llm_datadist"].__version__)


def agree(cluster_id: int, theirs: Greeting) -> Spoken:
    """Return what this side, ``cluster_id``, and the peer speak. Raises LinkRefused, which names both ranges."""
    (low, high), (their_low, their_high) = VERSIONS, theirs.versions
    version = min(high, their_high)
    if version < max(low, their_low):
        there = f"{their_low} to {their_high} at cluster {theirs.cluster_id}"
        here = f"{low} to {high} at cluster {cluster_id}"
        raise LinkRefused(f"no common protocol version: {there}, {here}; install releases next to each other")
    return Spoken(version, frozenset(FEATURES).intersection(theirs.features))
