"""Gates, steps of the source and rows of walk 1 name each other. tests/faults/test_kill_at_steps.py stops at each."""

import re
from pathlib import Path

from faults.gates import STEPS

ROOT = Path(__file__).parent.parent.parent


def test_there_is_a_gate_at_every_step_of_walk_1() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    walk = text[text.index("## Walk 1") : text.index("## Walk 2")]
    numbers = {int(row) for row in re.findall(r"^\| (\d+) \|", walk, re.MULTILINE)}
    inside = {9}  # of one native call: a page trap stops there
    assert {step.number for step in STEPS.values()} | inside == numbers
    targets = {step.number for step in STEPS.values() if step.end == "target"}
    assert targets == {n for n in numbers if f"| {n} | P " in walk}


def test_every_step_of_the_library_has_a_gate_and_every_gate_a_step() -> None:
    sources = (ROOT / "src" / "llm_datadist").rglob("*.py")
    named = {name for path in sources for name in re.findall(r"\bsteps\.watch\(\s*\"(\w+)\"", path.read_text())}
    assert named | {"call"} == {step.name for step in STEPS.values()}
