"""Check that every citation in the source names a heading of docs/; print those that do not and exit with 1.

CONTRIBUTING.md defines the forms: ``interface`` with sections, rulings or invariants of docs/interface.md, and
``architecture rule`` with a rule of docs/architecture.md. A number without such a word in front of its list is refused.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parent.parent

#: White space, and what begins a line of a comment.
_GAP: Final = r"(?:\s|\n[ \t]*(?:#:?|//+|\*)?)+"
_NUMBER: Final = r"(?:§\d+(?:\.\d+)*|[RBI]\d+(?:\.\d+)*)"
_SEPARATOR: Final = rf"(?:,{_GAP}(?:and{_GAP})?|{_GAP}and{_GAP}|{_GAP}to{_GAP})"
_INTERFACE: Final = re.compile(rf"\binterface{_GAP}{_NUMBER}(?:{_SEPARATOR}{_NUMBER})*")
_RULE: Final = re.compile(rf"\barchitecture{_GAP}rules?{_GAP}(\d+(?:{_SEPARATOR}\d+)*)")
_HEADING: Final = re.compile(r"^#{2,4} (?:(\d+(?:\.\d+)*)|([RBI]\d+(?:\.\d+)*))\.?(?= )", re.MULTILINE)
_RULE_HEADING: Final = re.compile(r"^### Rule (\d+)\b", re.MULTILINE)
#: What looks like a citation and is none.
_REFUSED: Final = re.compile(
    r"(?:\b(?:API|BEHAVIOUR|CLIENTS|PEERS|ARCHITECTURE)\s)?§[\d.]*|\bR\d{1,2}\b|\bARCHITECTURE\s+rule|\b[rR]ule \d+"
    r"|\[(?:seed|py|cpp|guide|v1|code|v1code):"
)


def headings(docs: Path) -> set[str]:
    """Return what may be cited: "§6.11", "B2.3", "R26", "I4" and "rule 8"."""
    found = _HEADING.findall((docs / "interface.md").read_text())
    rules = _RULE_HEADING.findall((docs / "architecture.md").read_text())
    return {f"§{section}" if section else number for section, number in found} | {f"rule {rule}" for rule in rules}


def mistakes(text: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, what is wrong) for every citation in ``text`` that names no heading or has no valid form."""

    def check(match: re.Match[str]) -> str:
        cited = match[0]
        names = re.findall(_NUMBER, cited) or [f"rule {number}" for number in re.findall(r"\d+", cited)]
        line = text.count("\n", 0, match.start()) + 1
        found.extend((line, f"{name} is no heading of docs/") for name in names if name not in known)
        return re.sub(r"[^\n]", " ", cited)

    found: list[tuple[int, str]] = []
    rest = _RULE.sub(check, _INTERFACE.sub(check, text))
    found += [
        (rest.count("\n", 0, match.start()) + 1, f"{match[0]!r} is no form of a citation")
        for match in _REFUSED.finditer(rest)
    ]
    yield from sorted(found)


def main(trees: list[str]) -> int:
    """Check all sources below ``trees``; return the exit status."""
    known = headings(ROOT / "docs")
    status = 0
    for tree in trees:
        for path in sorted(Path(tree).rglob("*")):
            if path.suffix in (".py", ".pyi", ".c", ".cpp", ".hpp"):
                for line, text in mistakes(path.read_text(), known):
                    print(f"{path}:{line}: {text}")
                    status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [str(ROOT / "src")]))
