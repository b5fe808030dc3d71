"""Makes docs/coverage.md: every entry of the interface, the code that implements it, the tests that show it.

The entries are in docs/coverage.toml; the rows of rulings and invariants find their tests by themselves, by the numbers
in their names. Run it to write the page; ``tests/test_coverage_table.py`` holds page, code and tests together.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from scripts.coverage_sources import Suite

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parent.parent
ENTRIES: Final = ROOT / "docs" / "coverage.toml"
PAGE: Final = ROOT / "docs" / "coverage.md"

#: Of a ruling's test files: enough to find it, few enough that a new test seldom changes the page.
_FILES_SHOWN: Final = 3

_HEAD: Final = """\
# Coverage

Every entry of the interface: where it is written down, the code that implements it, and tests that show it. Made by
`scripts/coverage_table.py` from `docs/coverage.toml`; `tests/test_coverage_table.py` fails when the page is not what
the script makes, when code or a test does not exist, when a test does not mention its entry, when a public name has no
row, and when a row has no test.

`module:name` stands for a name of that module of `llm_datadist`. Tests are in `tests/`. "API §n", "BEHAVIOUR §n",
"CLIENTS §n", "Rn" and "[seed:...]" are explained in [CONTRIBUTING.md](../CONTRIBUTING.md).
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One entry.

    Attributes:
        entry: What is implemented; the first name in backticks, if there is one, is what its tests have to mention.
        source: Where it is written down.
        code: ``module:qualified.name``, or the path of a file; several are separated by a space.
        tests: ``path::function``.
        number: "r5" or "i5" for a ruling or invariant, whose tests are found by that number in their names; else "".
    """

    entry: str
    source: str
    code: str
    tests: tuple[str, ...]
    number: str = ""

    @property
    def mention(self) -> str:
        """The name that every test of this row has to mention; "" where there is none."""
        names = re.findall(r"`([^`]+)`", self.entry)
        return names[0].rpartition(" ")[2] if names else ""

    @property
    def codes(self) -> list[str]:
        """The places of the code."""
        return self.code.split()


@dataclass(frozen=True, slots=True)
class Section:
    """One table of the page, with the text above it."""

    title: str
    text: str
    rows: tuple[Row, ...]


def load(text: str, tests: Suite) -> list[Section]:
    """Return the sections of a coverage.toml.

    Raises:
        ValueError: A row with fewer than three fields.
    """
    return [_section(section, tests) for section in tomllib.loads(text)["section"]]


def _section(section: dict[str, Any], tests: Suite) -> Section:
    rows = []
    for fields in section.get("rows", []):
        if len(fields) < 3:
            raise ValueError(f"{section['title']}: {fields}: entry, source and code are needed")
        entry, source, code, *named = fields
        names = re.findall(r"`([^`]+)`", entry)
        own = f"{section['code']}{names[0]}" if not code and names and "code" in section else code
        number = found[1].lower() if (found := re.match(r"([RI]\d+)\b", entry)) else ""
        paths = tuple(f"tests/{test}" for test in named)
        rows.append(Row(entry, source, own, paths or tuple(tests.numbered(number) if number else ()), number))
    return Section(section["title"], section.get("text", ""), tuple(rows))


def resolve(code: str) -> str | None:
    """Return what is wrong with a place of the code, or None."""
    if ":" not in code:
        return None if (ROOT / code).exists() else "there is no such file"
    module, _, name = code.partition(":")
    try:
        if find_spec(module) is None:
            return f"there is no module {module}"
    except ModuleNotFoundError:
        return f"there is no module {module}"
    value: object = import_module(module)
    for part in name.split("."):
        fields = getattr(value, "__dataclass_fields__", {})
        if not hasattr(value, part) and part not in fields:
            return f"{module} has no {name}"
        value = getattr(value, part, None)
    return None


def gaps(sections: list[Section]) -> list[str]:
    """Return one line per entry that lacks its code or a test: what remains to be done."""
    found = []
    for section in sections:
        for row in section.rows:
            missing = [text for code in row.codes if (text := resolve(code)) is not None]
            if not row.code:
                missing.append("no code")
            if not row.tests:
                missing.append("no test")
            if missing:
                found.append(f"{section.title}: {row.entry}: {', '.join(missing)}")
    return found


def mistakes(sections: list[Section], tests: Suite) -> list[str]:
    """Return one line per test that does not exist, or does not mention what it is said to show."""
    found = []
    for row in (row for section in sections for row in section.rows):
        for test in row.tests:
            if not tests.exists(test):
                found.append(f"{row.entry}: there is no test {test}")
            elif not row.number and row.mention and not tests.mentions(test, row.mention):
                found.append(f"{row.entry}: {test} does not mention {row.mention}")
    return found


def render(sections: list[Section]) -> str:
    """Return the page."""
    parts = [_HEAD]
    for section in sections:
        parts.append(f"## {section.title}\n")
        if section.text:
            parts.append(f"{section.text.strip()}\n")
        if section.rows:
            lines = ["| entry | source | code | tests |", "|---|---|---|---|", *map(_line, section.rows)]
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(row: Row) -> str:
    code = "<br>".join(f"`{each.removeprefix('llm_datadist.')}`" for each in row.codes) or "**gap**"
    return f"| {row.entry} | {row.source} | {code} | {'<br>'.join(_tests(row)) or '**gap**'} |"


def _tests(row: Row) -> Iterator[str]:
    """Yield what the last column shows: tests by name, or, for a number, the files with most such tests."""
    names = [test.removeprefix("tests/") for test in row.tests]
    if not row.number:
        yield from (f"`{name}`" for name in names)
        return
    counts = Counter(name.partition("::")[0] for name in names)
    yield from (f"`{path}`" for path in sorted(counts, key=lambda path: (-counts[path], path))[:_FILES_SHOWN])


def main() -> None:
    """Write the page, say what is missing, and which tests could fill it."""
    tests = Suite(ROOT)
    sections = load(ENTRIES.read_text(), tests)
    PAGE.write_text(render(sections))
    for line in [*gaps(sections), *mistakes(sections, tests)]:
        print(line)
    for row in (row for section in sections for row in section.rows if row.mention and not row.tests):
        print(f"{row.entry} is mentioned by {', '.join(tests.mentioning(row.mention)[:5]) or 'no test'}")


if __name__ == "__main__":
    main()
