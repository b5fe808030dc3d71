"""`kill -9` of either end at every step of walk 1, pull and push (R22): the survivor has right bytes or a typed error,
its other link moves data, nothing of the dead is left, and it links to the restarted end with no unlink."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import CacheKey, CacheKeyByIdAndIndex
from llm_datadist.errors import LLMException
from llm_datadist.testing.gates import STEPS, Gate, shut
from tests.support.ends import ChildEnd, LocalEnd
from tests.support.gates import gated_call
from tests.support.linking import SUCCESS, begin_there, bytes_move_both_ways, info, link, links, result_there
from tests.support.moves import Spec, Use, cache_id, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import residue, settled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.world import World

KEY: Final = CacheKey(1, 10)
PUSH_ONLY: Final = {"before write", "after write", "consumed", "target consumed"}
PULL_ONLY: Final = {"before copy", "after copy", "release", "released", "target release", "target released"}
TIMED: Final = {"deadline", "write deadline"}


class Ends:
    """A survivor in this process with a neighbour, and a child that dies."""

    def __init__(self, transport: str, *, push: bool) -> None:
        self.settings: dict[str, Any] = {"extra": {"llm.Transport": transport}, "sync_kv_timeout": 20_000}
        if push:
            self.settings["enable_remote_cache_accessible"] = True
        self.survivor, self.neighbour = LocalEnd("survivor"), LocalEnd("neighbour")
        self.survivor.start("PROMPT", 2, listen_ip_info="127.0.0.1:0", **self.settings)
        self.neighbour.start("DECODER", 3, **self.settings)
        assert self.neighbour.do(link, [info(2, self.survivor.port)]) == SUCCESS
        self.victim = self.born()

    def born(self) -> ChildEnd:
        victim = ChildEnd("victim")
        victim.start("DECODER", 1, listen_ip_info="127.0.0.1:0", **self.settings)
        assert self.survivor.do(link, [info(1, victim.port)]) == SUCCESS
        return victim

    def stop(self) -> None:
        self.neighbour.stop()
        self.survivor.stop()
        self.victim.kill()


@pytest.fixture(scope="module", params=[(transport, push) for transport in ("shm", "tcp") for push in (False, True)])
def world_of(request: pytest.FixtureRequest) -> Iterator[tuple[Ends, str, bool]]:
    """The survivor lives through all steps; the end that is born again after one of them dies at the next."""
    before = residue()
    transport, push = request.param
    ends = Ends(transport, push=push)
    yield ends, transport, push
    ends.stop()
    del ends
    assert settled(before) == before


def held() -> dict[str, Any]:
    """Return descriptors and mappings; the thread that brings lost lanes back stays once it was needed."""
    return {name: value for name, value in residue().items() if "threads" not in name}


def shut_there(world: World, step: str, folder: Path) -> None:
    world.memory["gate"] = stack = ExitStack()
    stack.enter_context(shut(world.dd, step, folder, peer=2))


@pytest.mark.parametrize("step", [step for step in STEPS if step not in TIMED])
def test_r22_killed_at_a_step(world_of: tuple[Ends, str, bool], step: str, tmp_path: Path) -> None:
    ends, transport, push = world_of
    if step in (PULL_ONLY if push else PUSH_ONLY):
        pytest.skip("this step is the other direction's")
    if transport == "tcp" and step == "guards":
        pytest.skip("over tcp the owner of the memory compares the guards")
    before = held()
    dies_first = STEPS[step].end == "initiator"
    initiator: Any = ends.victim if dies_first else ends.survivor
    target: Any = ends.survivor if dies_first else ends.victim
    key = CacheKey(target.cluster_id, 10)
    theirs = target.do(make, "rows", Spec(keys=() if push else (key,)), 1)
    mine = initiator.do(make, "rows", Spec(), 2)
    named = CacheKeyByIdAndIndex(target.cluster_id, target.do(cache_id, "rows"), 0) if push else key
    arguments = ("push_cache" if push else "pull_cache", named, Use("rows"), 5)
    if dies_first:
        ends.victim.begin(gated_call, target.cluster_id, step, tmp_path, *arguments)
    else:
        ends.victim.do(shut_there, step, tmp_path)
        ends.survivor.do(begin_there, "call", call, *arguments)
    Gate(tmp_path).wait()
    ends.victim.kill()
    bytes_move_both_ways(ends.survivor, ends.neighbour)
    if dies_first:
        arrived = moved(theirs, mine, [(0, 5)]) if push else theirs
        same_bytes(ends.survivor.do(show, "rows"), arrived if STEPS[step].number >= 10 else theirs)
    else:
        outcome = ends.survivor.do(result_there, "call")
        assert outcome is None or isinstance(outcome, LLMException), outcome
        arrived = moved(mine, theirs, [(5, 0)]) if outcome is None and not push else mine
        same_bytes(ends.survivor.do(show, "rows"), arrived)
    wait_until(lambda: ends.survivor.do(links) == {3: "ready"})
    wait_until(lambda: ends.survivor.do(picture).pins == 0)
    if dies_first and not push:
        ends.survivor.do(call, "remove_cache_key", key)
    ends.survivor.do(forget, "rows")
    ends.victim = ends.born()
    bytes_move_both_ways(ends.survivor, ends.victim)
    wait_until(lambda: held() == before)
