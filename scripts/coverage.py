"""Show which tests cover which entry of the interface; exit with 1 if an entry has no test.

The entries come from the code and from docs/interface.md. A test, or a whole module of tests, names what it covers with
the mark ``covers``: ``covers("CacheManager: pull_blocks push_blocks", "R26")``. A ruling or an invariant is also
covered by every test that has its number in its name, as in ``test_r05_...``. Tests are parsed, not run. docs/conf.py
puts the tables into the built page docs/coverage.md.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final

import llm_datadist
from llm_datadist import cache_manager, compat, config, cpp_api, errors
from llm_datadist.errors import LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parent.parent
#: Of the tests of one entry: enough to find one.
_SHOWN: Final = 3
#: A ruling about how the project is written has no test.
_UNTESTED: Final = {"R24"}

_HEADING: Final = re.compile(r"^#{2,4} (?:\d+\.(?:\d+)?|([RI]\d+)\.|B[\d.]+) (.+)$", re.MULTILINE)
_NUMBERED: Final = re.compile(r"(?<![a-z])([ri])(\d+)_")


def entries() -> dict[str, list[str]]:
    """Return every entry of the interface, grouped by the section of the page that shows it."""
    rulings = [number for number, _ in _HEADING.findall((ROOT / "docs/interface.md").read_text()) if number]
    return {
        "Classes and members": sorted(_public()),
        "Exceptions": sorted(f"errors.{name}" for name, each in vars(errors).items() if _is(each, Exception)),
        "Status codes": [f"LLMStatusCode.{name}" for name in LLMStatusCode.__members__],
        "Options": sorted([*config.OPTIONS, "ge.session_device_id", *config.CPP_NAMES]),
        "Helpers and older module paths": [
            *sorted(f"compat.{name}" for name, each in vars(compat).items() if _is_public(each, compat.__name__)),
            *_older(),
        ],
        "Rulings and invariants": [number for number in rulings if number not in _UNTESTED],
        "Examples": sorted(f"examples/{path.name}" for path in (ROOT / "examples").glob("[!_]*.py")),
    }


def _older() -> list[str]:
    """Return the module paths that exist for code written for the original."""
    source = ROOT / "src"
    files = [path for folder in ("utils", "v2") for path in (source / "llm_datadist" / folder).glob("[!_]*.py")]
    names = [path.relative_to(source).with_suffix("").as_posix().replace("/", ".") for path in files]
    single = ["llm_datadist.configs", "llm_datadist.data_type", "llm_datadist.status"]
    return sorted([*names, *single, "llm_datadist_v1", "llm_datadist_wrapper"])


def _is_public(value: object, module: str) -> bool:
    return getattr(value, "__module__", "") == module and not getattr(value, "__name__", "_").startswith("_")


def _is(value: object, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def _public() -> Iterator[str]:
    """Yield public classes with their members, each class once: ``CacheManager.pull_blocks``, ``cpp_api.Cache``."""
    found = {name: getattr(llm_datadist, name) for name in llm_datadist.__all__}
    found |= {"CacheManager": cache_manager.CacheManager}
    found |= {f"cpp_api.{name}": getattr(cpp_api, name) for name in cpp_api.__all__}
    seen: set[type] = set()
    for name, cls in found.items():
        if isinstance(cls, type) and cls not in seen and not issubclass(cls, Exception):
            seen.add(cls)
            yield name
            yield from (f"{name}.{member}" for member in _members(cls))


def _members(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("llm_datadist") else ():
            wrapped = isinstance(value, property | staticmethod | classmethod) or inspect.isroutine(value)
            if not name.startswith("_") and (wrapped or hasattr(value, "__set_name__")):
                yield name


def covering(tests: Path) -> dict[str, list[str]]:
    """Return the tests below ``tests`` by what they say that they cover; an entry may end in ``*``."""
    found: dict[str, list[str]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        for entry, test in _claims(path.read_text()):
            found.setdefault(entry, []).append(f"{path.relative_to(tests.parent).as_posix()}{test}")
    return found


def _claims(text: str) -> Iterator[tuple[str, str]]:
    """Yield (entry, "" for the whole module or "::function") for every mark and every number in a name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield from ((entry, f"::{node.name}") for each in node.decorator_list for entry in _marked(each))
            for letter, number in _NUMBERED.findall(node.name):
                yield f"{letter.upper()}{int(number)}", f"::{node.name}"
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            yield from ((entry, "") for each in ast.walk(node.value) for entry in _marked(each))


def _marked(node: ast.AST) -> list[str]:
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.covers"):
        return []
    names: list[str] = []
    for text in (each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)):
        owner, colon, members = text.partition(": ")
        names += [f"{owner}.{member}" for member in members.split()] if colon else [text]
    return names


def table() -> dict[str, dict[str, list[str]]]:
    """Return, for each section and entry, the tests that cover it."""
    claims = covering(ROOT / "tests")
    known = {title: {name: _of(name, claims) for name in names} for title, names in entries().items()}
    more = {
        claim: tests
        for claim, tests in sorted(claims.items())
        if not any(fnmatchcase(name, claim) for names in known.values() for name in names)
    }
    return known | {"More": more}


def _of(name: str, claims: dict[str, list[str]]) -> list[str]:
    return [test for pattern, tests in claims.items() if fnmatchcase(name, pattern) for test in tests]


def gaps() -> list[str]:
    """Return one line for each entry without a test."""
    return [f"{name} has no test" for names in table().values() for name, tests in names.items() if not tests]


def render() -> str:
    """Return the tables of the page."""
    lines = []
    for title, names in table().items():
        lines += [f"## {title}", "", "| entry | tests |", "|---|---|"]
        lines += [f"| `{name}` | {_shown(tests)} |" for name, tests in names.items()] + [""]
    return "\n".join(lines)


def _shown(tests: list[str]) -> str:
    shown = [f"`{test}`" for test in tests[:_SHOWN]]
    more = len(tests) - len(shown)
    return "<br>".join(shown) + (f"<br>and {more} more" if more else "")


if __name__ == "__main__":
    missing = gaps()
    print("\n".join(missing) or "every entry of the interface has a test")
    sys.exit(bool(missing))
