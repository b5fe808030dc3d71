"""docs/coverage.md is true: it is what its script makes, its code and tests exist, and nothing public lacks a row.

A part that is not built yet, or has no test yet, is one line of ``test_no_entry_lacks_its_code_or_a_test``.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from typing import TYPE_CHECKING, Final

import pytest
from scripts import coverage_table
from scripts.coverage_sources import Suite
from scripts.coverage_table import Row, Section, gaps, load, mistakes, render, resolve

import llm_datadist
from llm_datadist import config, errors
from llm_datadist.cache_manager import CacheManager
from tests.support.source import PACKAGE, ROOT, SOURCE

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS: Final = Suite(ROOT)
SECTIONS: Final = load(coverage_table.ENTRIES.read_text(), TESTS)
ROWS: Final = [row for section in SECTIONS for row in section.rows]

#: Rulings without a test: R24 is about how the project is written.
UNTESTED: Final = {24}


def test_the_page_is_what_the_script_makes() -> None:
    assert coverage_table.PAGE.read_text() == render(SECTIONS), "run: python -m scripts.coverage_table"


def test_no_entry_lacks_its_code_or_a_test() -> None:
    assert gaps(SECTIONS) == []


def test_every_test_exists_and_mentions_its_entry() -> None:
    assert mistakes(SECTIONS, TESTS) == []


def test_no_entry_is_there_twice() -> None:
    entries = [(section.title, row.entry) for section in SECTIONS for row in section.rows]
    assert [each for each in entries if entries.count(each) > 1] == []


@pytest.mark.parametrize("number", [n for n in range(1, 32) if n not in UNTESTED])
def test_every_ruling_has_a_row_and_a_test_that_carries_its_number(number: int) -> None:
    assert [row.number for row in ROWS].count(f"r{number}") == 1
    assert TESTS.numbered(f"r{number}") != []


@pytest.mark.parametrize("number", range(1, 16))
def test_every_invariant_has_a_row_and_a_test_that_carries_its_number(number: int) -> None:
    assert [row.number for row in ROWS].count(f"i{number}") == 1
    assert TESTS.numbered(f"i{number}") != []


# --- nothing public is left out --------------------------------------------------------------------------------------


def _classes() -> dict[str, type]:
    """Return the public classes by where they are: the package's, the managers', the C++-shaped ones."""
    found = {f"{PACKAGE}.{name}": getattr(llm_datadist, name) for name in llm_datadist.__all__}
    found |= {f"{PACKAGE}.CacheManager": CacheManager}
    if importlib.util.find_spec("llm_datadist.cpp_api") is not None:
        cpp_api = importlib.import_module("llm_datadist.cpp_api")
        found |= {f"cpp_api.{name}": getattr(cpp_api, name) for name in cpp_api.__all__}
    return {where: value for where, value in found.items() if isinstance(value, type)}


def _members(cls: type) -> Iterator[str]:
    """Yield the public members that we wrote, inherited ones too; the values of an enumeration are its own row."""
    for base in cls.__mro__:
        if base.__module__.startswith(PACKAGE):
            for name, value in vars(base).items():
                wrapped = isinstance(value, property | staticmethod | classmethod) or inspect.isfunction(value)
                if not name.startswith("_") and (wrapped or hasattr(value, "__set_name__")):
                    yield name


def _covered() -> set[object]:
    """Return what the rows' code stands for: the id of each class, and (class, name) for members."""
    found: set[object] = set()
    for code in (code for row in ROWS for code in row.codes if ":" in code and resolve(code) is None):
        module, _, name = code.partition(":")
        *owners, last = name.split(".")
        owner: object = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        found.add((owner, last) if owners else id(getattr(owner, last)))
    return found


def test_every_public_class_and_member_has_a_row() -> None:
    covered = _covered()
    missing = [where for where, cls in _classes().items() if id(cls) not in covered]
    missing += [
        f"{where}.{name}"
        for where, cls in _classes().items()
        for name in dict.fromkeys(_members(cls))
        if (cls, name) not in covered
    ]
    assert missing == []


def test_every_option_has_a_row() -> None:
    written = set(re.findall(r"\"((?:llm|ge)\.[\w.]+)\"", (SOURCE / "config.py").read_text()))
    written |= set(re.findall(r"\"((?:llm|ge)\.[\w.]+)\"", (SOURCE / "config.py").read_text()))
    shown = {name for row in ROWS for name in re.findall(r"`((?:llm|ge)\.[\w.]+)\*?`", row.entry)}
    assert written - shown == set()
    assert {config.TRANSPORT, config.DEVICE_ID} <= written


def test_every_status_code_and_every_exception_has_a_row() -> None:
    shown = {name for row in ROWS for name in re.findall(r"`(\w+)`", row.entry)}
    exceptions = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}
    assert (set(errors.LLMStatusCode.__members__) | exceptions) - shown == set()


def test_every_older_path_has_a_row() -> None:
    aliases = [path for path in SOURCE.rglob("*.py") if "(R23)" in path.read_text().partition('"""\n')[0]]
    aliases += [SOURCE.parent / f"{name}/__init__.py" for name in ("llm_datadist_v1", "llm_datadist_wrapper")]
    named = {path.relative_to(ROOT).as_posix() for path in aliases if path.name != "__init__.py"}
    assert named - {code for row in ROWS for code in row.codes} <= {"src/llm_datadist/compat.py"}
    assert len(named) >= 8


# --- the checks themselves -------------------------------------------------------------------------------------------

REAL: Final = "tests/unit/test_compat.py::test_layer_range_to_tensor_indices"


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (Row("x", "", "", (REAL,)), "no code"),
        (Row("x", "", "llm_datadist.errors:ParamError", ()), "no test"),
        (Row("x", "", "llm_datadist.nowhere:f", (REAL,)), "there is no module llm_datadist.nowhere"),
        (Row("x", "", "nowhere.at.all:f", (REAL,)), "there is no module nowhere.at.all"),
        (Row("x", "", "llm_datadist.errors:Nothing", (REAL,)), "has no Nothing"),
        (Row("x", "", "llm_datadist.datadist:LLMDataDist.nothing", (REAL,)), "has no LLMDataDist.nothing"),
        (Row("x", "", "examples/nothing.py", (REAL,)), "there is no such file"),
    ],
)
def test_a_gap_is_seen(row: Row, text: str) -> None:
    (line,) = gaps([Section("S", "", (row,))])
    assert line.startswith("S: x: ")
    assert text in line


@pytest.mark.parametrize(
    ("entry", "test", "text"),
    [
        ("`f`", "tests/unit/test_compat.py::test_nothing", "there is no test"),
        ("`f`", "tests/unit/test_nowhere.py::test_f", "there is no test"),
        ("`pull_blocks`", REAL, "does not mention pull_blocks"),
    ],
)
def test_a_test_that_is_not_there_or_shows_something_else_is_seen(entry: str, test: str, text: str) -> None:
    found = mistakes([Section("S", "", (Row(entry, "", "README.md", (test,)),))], TESTS)
    assert len(found) == 1
    assert text in found[0]


def test_mentions_are_looked_for_in_parameters_helpers_and_fixtures() -> None:
    assert TESTS.mentions("tests/unit/test_errors.py::test_status_codes_have_the_documented_values", "LLM_LINK_BUSY")
    assert TESTS.mentions(
        "tests/api/test_unlink.py::test_i2_unlinking_what_is_not_linked_is_a_success", "unlink_clusters"
    )
    assert not TESTS.mentions(REAL, "LLM_LINK_BUSY")


def test_numbers_are_whole_numbers() -> None:
    assert {"test_r01_", "test_r10_"} <= {re.sub(r"^(test_r\d+_).*", r"\1", _name(test)) for test in TESTS.names}
    assert all(re.match(r"test_(?:[ri]\d+_)*r0?1_", _name(test)) for test in TESTS.numbered("r1"))
    assert any("test_r06_r07" in test for test in TESTS.numbered("r7"))


def _name(test: str) -> str:
    return test.rpartition("::")[2].rpartition(".")[2]


def test_a_row_needs_three_fields() -> None:
    with pytest.raises(ValueError, match="entry, source and code"):
        load('[[section]]\ntitle = "S"\nrows = [["a", "b"]]', TESTS)
