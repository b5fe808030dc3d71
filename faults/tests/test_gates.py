"""Every gate of walk 1: an end that stands at it, sees what the step says, goes on, and moves the right bytes."""

import re
from pathlib import Path
from typing import Any

import pytest

from faults.gated import open_there, shut_there, stopped
from faults.gates import STEPS, Gate, count_arrivals, shut
from llm_datadist import CacheKey, CacheKeyByIdAndIndex
from llm_datadist.errors import StateError
from tests.support.linking import begin_there, bytes_move_both_ways, result_there
from tests.support.moves import Spec, Use, cache_id, call, make, moved, picture, same_bytes, show, wait_until
from tests.support.pairs import Pair
from tests.support.world import World

KEY = CacheKey(1, 10)
PUSH_ONLY = {"before write", "write deadline", "after write", "consumed", "target consumed"}
INITIATOR = [name for name, step in STEPS.items() if step.end == "initiator"]
TARGET = [name for name, step in STEPS.items() if step.end == "target"]
LATE = {"deadline", "write deadline"}  # the call's own time passes there: tests/api/test_async_forms.py
ROOT = Path(__file__).parent.parent.parent


def move(pair: Pair, *, push: bool) -> tuple[str, str, tuple[Any, ...], list[Any], list[Any]]:
    """Make both caches; return (method, name of what changes, arguments, bytes of the source, of the target)."""
    rows = pair.prompt.do(make, "rows", Spec(keys=() if push else (KEY,)), 1)
    mine = pair.decoder.do(make, "rows", Spec(), 2)
    if push:
        there = CacheKeyByIdAndIndex(1, pair.prompt.do(cache_id, "rows"), 0)
        return "push_cache", "prompt", (there, Use("rows"), 5), mine, rows
    return "pull_cache", "decoder", (KEY, Use("rows"), 5), rows, mine


def check(pair: Pair, source: list[Any], target: list[Any], *, push: bool) -> None:
    changed, kept = (pair.prompt, pair.decoder) if push else (pair.decoder, pair.prompt)
    same_bytes(changed.do(show, "rows"), moved(target, source, [(0, 5)] if push else [(5, 0)]))
    same_bytes(kept.do(show, "rows"), source)
    wait_until(lambda: pair.prompt.do(picture).pins == 0)
    bytes_move_both_ways(pair.prompt, pair.decoder)


@pytest.mark.parametrize("step", [name for name in INITIATOR if name not in LATE])
def test_an_initiator_stops_at_the_gate_and_goes_on(pair: Pair, step: str, tmp_path: Path) -> None:
    stops(pair, step, tmp_path)


def stops(pair: Pair, step: str, tmp_path: Path) -> None:
    push = step in PUSH_ONLY
    pair.start(rca=push)
    method, _, arguments, source, target = move(pair, push=push)
    with stopped(pair.decoder, step, tmp_path, method, *arguments) as stands:
        assert stands.gate.reached
        number = STEPS[step].number
        # A question pins (step 5), a release unpins (12): what lies between is seen at the target.
        if number < 4:
            assert pair.prompt.do(picture).pins == 0
        elif 6 <= number <= 10 and not push:
            assert pair.prompt.do(picture).pins == 1
        stands.finish()
    check(pair, source, target, push=push)


@pytest.mark.parametrize("step", TARGET)
def test_a_target_stops_at_the_gate_and_goes_on(shm_pair: Pair, step: str, tmp_path: Path) -> None:
    push = step in PUSH_ONLY
    shm_pair.start(rca=push, extra={"llm.PeerTimeout": "600"})
    method, _, arguments, source, target = move(shm_pair, push=push)
    shm_pair.prompt.do(shut_there, step, tmp_path, 2)
    shm_pair.decoder.do(begin_there, "call", call, method, *arguments)
    gate = Gate(tmp_path)
    gate.wait()
    pinned = {"target answered": 1, "target release": 1}.get(step, 0)
    if not push:
        assert shm_pair.prompt.do(picture).pins == pinned
    gate.open()
    assert shm_pair.decoder.do(result_there, "call") is None
    shm_pair.prompt.do(open_there)
    check(shm_pair, source, target, push=push)


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


def test_arrivals_are_counted_by_step_and_transport(local_pair: Pair) -> None:
    local_pair.start()
    _, _, arguments, source, target = move(local_pair, push=False)
    with count_arrivals() as arrivals:
        local_pair.decoder.do(call, "pull_cache", *arguments)
        wait_until(lambda: "target released, inproc" in arrivals)
    steps = {name for name, step in STEPS.items() if step.name != "call"} - PUSH_ONLY - LATE
    before_the_link = {"hold", "link"}
    assert set(arrivals) == before_the_link | {f"{step}, inproc" for step in steps - before_the_link}
    check(local_pair, source, target, push=False)


def test_a_gate_stops_one_call_and_no_other(local_pair: Pair, tmp_path: Path) -> None:
    local_pair.start()
    _, _, arguments, source, target = move(local_pair, push=False)
    with stopped(local_pair.decoder, "before copy", tmp_path, "pull_cache", *arguments) as stands:
        bytes_move_both_ways(local_pair.prompt, local_pair.decoder)
        stands.finish()
    check(local_pair, source, target, push=False)


def test_a_gate_may_be_open_before_anybody_comes(local_pair: Pair, tmp_path: Path) -> None:
    local_pair.start()
    _, _, arguments, source, target = move(local_pair, push=False)
    gate = Gate(tmp_path)
    assert not gate.reached
    gate.open()
    gate.open()
    with shut(local_pair.decoder.do(_datadist), "release", tmp_path, peer=1):
        local_pair.decoder.do(call, "pull_cache", *arguments)
    assert gate.reached
    check(local_pair, source, target, push=False)


def _datadist(world: World) -> Any:
    return world.dd


def test_what_cannot_be_gated_is_refused(local_pair: Pair, tmp_path: Path) -> None:
    local_pair.start()
    decoder = local_pair.decoder.do(_datadist)
    with pytest.raises(KeyError), shut(decoder, "nowhere", tmp_path):
        pass
    with pytest.raises(ValueError, match="needs the peer's cluster id"), shut(decoder, "before copy", tmp_path):
        pass
    with pytest.raises(TimeoutError, match="nobody came to the gate"):
        Gate(tmp_path).wait(0.01)
    with pytest.raises(TimeoutError, match="nobody opened the gate"):
        Gate(tmp_path).pass_through(0.01)
    local_pair.decoder.stop()
    with pytest.raises(StateError, match="initialised"), shut(decoder, "call", tmp_path):
        pass
