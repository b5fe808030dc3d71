"""Findings of checks."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


Severity = StrEnum("Severity", "OK WARNING PROBLEM UNKNOWN")
"""Severity of a finding; ``unknown``: the check could not be made."""


class Finding(msgspec.Struct, frozen=True):
    """One finding; ``mend`` is empty if its state is ok."""

    name: str
    state: Severity
    value: str
    meaning: str
    mend: str = ""


def judge(name: str, good: bool, value: str, meaning: str, mend: str, bad: Severity = Severity.WARNING) -> Finding:
    """Return an ok finding if ``good``, else a ``bad`` one with the command that mends it."""
    return Finding(name, Severity.OK, value, meaning) if good else Finding(name, bad, value, meaning, mend)


_EXIT: Final = {Severity.OK: 0, Severity.WARNING: 1, Severity.UNKNOWN: 1, Severity.PROBLEM: 2}


def run_checks(checks: Iterable[Callable[[], Finding]]) -> list[Finding]:
    """Run checks; one that the host denies is an unknown finding."""
    findings = []
    for check in checks:
        try:
            findings.append(check())
        except (OSError, ValueError) as error:
            mend = "run the command again with more rights, for example as root"
            findings.append(Finding(check.__name__, Severity.UNKNOWN, str(error), "the check could not be made", mend))
    return findings


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 2 with a problem, 1 with a warning or unknown, else 0."""
    return max((_EXIT[each.state] for each in findings), default=0)
