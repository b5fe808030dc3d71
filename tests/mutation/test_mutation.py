"""The parts of mutation testing that need no mutants to be run: which there are, sessions, comparisons."""

import tomllib
from pathlib import Path

import pytest

from tests.mutation import headers
from tests.mutation.session import KILLED, NO_MUTANT, SURVIVED, Session, compare

HERE = Path(__file__).parent
SOURCE = """
from typing import TYPE_CHECKING
def first(x: int | None = None, y: "int" = 3) -> int | str:
    '''A docstring with 3 and not.'''
    kept: int | None = x
    return 7 if x == y else 8
"""


def test_annotations_and_imports_for_type_checkers_are_no_mutants() -> None:
    mutants = pytest.importorskip("tests.mutation.mutants", reason="cosmic-ray is not installed").mutants
    plan = tomllib.loads((HERE / "plan.toml").read_text())
    operators = [*plan["operators"], "core/ReplaceBinaryOperator_BitOr_BitAnd"]
    keys = [each.key for each in mutants("m.py", SOURCE, operators, None, 1)]
    assert keys
    assert not [key for key in keys if "BitOr" in key or "TYPE_CHECKING" in key]
    assert "m.py: first: ComparisonOperator_Eq_NotEq: return 7 if x == y else 8 #1" in keys
    moved = [each.key for each in mutants("m.py", "import sys\n\n" + SOURCE, operators, None, 1)]
    assert moved == keys, "a mutant keeps its name when code is added elsewhere"
    sample = [each.key for each in mutants("m.py", SOURCE, operators, 3, 1)]
    assert len(sample) == 3
    assert sample == [each.key for each in mutants("m.py", SOURCE, operators, 3, 1)]


def test_headers_are_changed_in_code_only() -> None:
    source = "// a == b\n#if A == B\n    if (a == b && c < 0) break;  // == 0\n    close(a);\n"
    found = {
        each.code.splitlines()[2] + each.code.splitlines()[3] for each in headers.mutants("m.hpp", source, None, 1)
    }
    line, call = "    if (a == b && c < 0) break;  // == 0", "    close(a);"
    wanted = {line.replace("a == b", "a != b"), line.replace("&&", "||"), line.replace("c < 0", "c <= 0")}
    wanted |= {line.replace("< 0)", "< 1)"), line.replace("break;", ";")}
    assert found == {each + call for each in wanted} | {line + "    ;"}


def test_a_session_goes_on_where_it_ended_refuses_other_code_and_names_what_no_test_kills_any_more(
    tmp_path: Path,
) -> None:
    session = Session(tmp_path / "s")
    session.begin({"seed": 1})
    session.choose("m.py: a")
    session.choose("m.py: b")
    session.add({"mutant": "m.py: a", "stage": "unit", "outcome": SURVIVED})
    again = Session(tmp_path / "s")
    again.begin({"seed": 1})
    assert (again.outcome("m.py: a"), again.outcome("m.py: b")) == (SURVIVED, None)
    again.add({"mutant": "m.py: a", "stage": "wide", "outcome": KILLED})
    assert again.table().splitlines()[1].split() == ["m.py", "2", "0", "1", "0", "0", "1"]
    with pytest.raises(ValueError, match="take another file"):
        again.begin({"seed": 2})
    after = Session(tmp_path / "after")
    for name, before, now in (("c", KILLED, SURVIVED), ("d", SURVIVED, KILLED)):
        again.add({"mutant": f"m.py: {name}", "stage": "unit", "outcome": before})
        after.add({"mutant": f"m.py: {name}", "stage": "unit", "outcome": now})
    again.add({"mutant": "m.hpp: e", "stage": "unit", "outcome": NO_MUTANT})
    again.add({"mutant": "m.py: f", "stage": "unit", "outcome": KILLED, "killer": "a.py::b", "digest": "1"})
    assert Session(tmp_path / "s").killers == {"m.py: f": ("a.py::b", "1")}
    lost, summary = compare(again, after)
    assert lost == ["m.py: c"]
    assert summary.startswith("2 mutants in both: 1 killed before survive now, 1 the other way; 3 only before, 0 only")


def test_what_the_plan_names_exists() -> None:
    modules = tomllib.loads((HERE / "plan.toml").read_text())["modules"]
    named = [f"src/llm_datadist/{module}" for module in modules]
    named += [test for stages in modules.values() for tests in stages.values() for test in tests]
    assert [name for name in named if not (HERE.parent.parent / name).exists()] == []
