"""`kill -9` of either end at every step of walk 1, pull and push (interface R22): the survivor has right bytes or a
typed error, its other link moves data, nothing of the dead is left, and it links to the restarted end with no
unlink."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from faults.gated import gated_call, open_there, shut_there
from faults.gates import STEPS, Gate
from llm_datadist import CacheKey, CacheKeyByIdAndIndex
from llm_datadist.errors import LLMException
from tests.support.ends import ChildEnd, LocalEnd
from tests.support.linking import SUCCESS, begin_there, bytes_move_both_ways, info, link, links, result_there
from tests.support.moves import Spec, Use, cache_id, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import residue, settled

KEY: Final = CacheKey(1, 10)
PUSH_ONLY: Final = {"before write", "after write", "consumed", "target consumed"}
PULL_ONLY: Final = {"before copy", "after copy", "release", "released", "target release", "target released"}
TIMED: Final = {"deadline", "write deadline"}
TRANSPORTS: Final = ("shm", "cma", "tcp", "shm+gpu", "tcp+gpu")  # caches in the memory of the host, or of a GPU


class Ends:
    """A survivor in this process with a neighbour, and a child that dies."""

    def __init__(self, transport: str, *, push: bool) -> None:
        self.push = push
        transport, _, gpu = transport.partition("+")
        extra = {"llm.Transport": transport}
        self.settings: dict[str, Any] = {"extra": extra, "gpu": bool(gpu), "sync_kv_timeout": 20_000}
        if push:
            self.settings["enable_remote_cache_accessible"] = True
        self.survivor, self.neighbour = LocalEnd("survivor"), LocalEnd("neighbour")
        self.survivor.start("PROMPT", 2, listen_ip_info="127.0.0.1:0", **self.settings)
        self.neighbour.start("DECODER", 3, **self.settings)
        assert self.neighbour.do(link, [info(2, self.survivor.port)]) == SUCCESS
        self._next = ChildEnd("victim")
        self.victim = self.born()

    def born(self) -> ChildEnd:
        # The one after it loads the library meanwhile.
        victim, self._next = self._next, ChildEnd("victim")
        victim.start("DECODER", 1, listen_ip_info="127.0.0.1:0", **self.settings)
        assert self.survivor.do(link, [info(1, victim.port)]) == SUCCESS
        return victim

    def stop(self) -> None:
        self.neighbour.stop()
        self.survivor.stop()
        self.victim.kill()
        self._next.close()


def steps(*, push: bool) -> list[str]:
    """Return the steps that a transfer of that kind comes to."""
    others = TIMED | (PULL_ONLY if push else PUSH_ONLY)
    return [step for step in STEPS if step not in others]


def one_of_each_row(names: list[str]) -> list[str]:
    """Return the last step of each row of the walk and end: who looks on from the other end sees no more of it."""
    return list({(STEPS[step].number, STEPS[step].end): step for step in names}.values())


def cases(choose: Callable[[list[str]], list[str]]) -> list[Any]:
    return [
        pytest.param((transport, push), step, id=f"{transport}-{'push' if push else 'pull'}-{step}")
        for transport in TRANSPORTS
        for push in (False, True)
        for step in choose(steps(push=push))
    ]


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """The survivor lives through all steps; the end that is born again after one of them dies at the next."""
    before = residue()
    transport, push = request.param
    ends = Ends(transport, push=push)
    yield ends
    ends.stop()
    del ends
    assert settled(before) == before


def held() -> dict[str, Any]:
    """Return descriptors and mappings; the thread that brings lost lanes back stays once it was needed."""
    return {name: value for name, value in residue().items() if "threads" not in name}


@dataclass
class Scene:
    """One row to be moved, and what each end holds of it."""

    ends: Ends
    initiator: Any
    target: Any

    def __post_init__(self) -> None:
        self.push = self.ends.push
        self.key = CacheKey(self.target.cluster_id, 10)
        self.theirs = self.target.do(make, "rows", Spec(keys=() if self.push else (self.key,)), 1)
        self.mine = self.initiator.do(make, "rows", Spec(), 2)
        by_id = CacheKeyByIdAndIndex(self.target.cluster_id, self.target.do(cache_id, "rows"), 0)
        named = by_id if self.push else self.key
        self.call = ("push_cache" if self.push else "pull_cache", named, Use("rows"), 5)

    def initiator_survived(self) -> None:
        """It has right bytes or a typed error, and where it pulled nothing it has what it had."""
        outcome = self.initiator.do(result_there, "call")
        assert outcome is None or isinstance(outcome, LLMException), outcome
        arrived = moved(self.mine, self.theirs, [(5, 0)]) if outcome is None and not self.push else self.mine
        shown = self.initiator.do(show, "rows")
        if outcome is not None and not self.push:
            for got, was in zip(shown, self.mine, strict=True):
                got[5] = was[5]  # the addressed row is undefined, the rest untouched
        same_bytes(shown, arrived)

    def target_survived(self, *, copying: bool = False) -> None:
        """It has all of the row that was pushed, or none of it; where the kill may halve the copy, a part of it."""
        shown = self.target.do(show, "rows")
        if self.push:
            whole = moved(self.theirs, self.mine, [(0, 5)])
            if copying:
                for got, was, new in zip(shown, self.theirs, whole, strict=True):
                    assert ((got == was) | (got == new)).all()
            else:
                assert any(np.array_equal(shown, each) for each in (whole, self.theirs))
        else:
            same_bytes(shown, self.theirs)

    def clean_up(self, before: dict[str, Any]) -> None:
        """Nothing of the dead is left, and its successor is linked with no unlink."""
        ends, survivor = self.ends, self.ends.survivor
        wait_until(lambda: survivor.do(links) == {3: "ready"})
        wait_until(lambda: survivor.do(picture).pins == 0)
        survivor.do(call, "remove_cache_key", self.key)  # what was not consumed
        survivor.do(forget, "rows")
        wait_until(lambda: survivor.do(picture).quarantined_bytes == 0)
        ends.victim = ends.born()
        bytes_move_both_ways(survivor, ends.victim)
        wait_until(lambda: held() == before)


@pytest.mark.parametrize(("ends", "step"), cases(list), indirect=["ends"])
def test_r22_killed_at_a_step(ends: Ends, step: str, tmp_path: Path) -> None:
    """Who stands at the step is killed there."""
    before = held()
    initiator_dies = STEPS[step].end == "initiator"
    pair = (ends.victim, ends.survivor) if initiator_dies else (ends.survivor, ends.victim)
    scene = Scene(ends, *pair)
    if initiator_dies:
        ends.victim.begin(gated_call, scene.target.cluster_id, step, tmp_path, *scene.call)
    else:
        ends.victim.do(shut_there, step, tmp_path, 2)
        ends.survivor.do(begin_there, "call", call, *scene.call)
    Gate(tmp_path).wait()
    ends.victim.kill()
    bytes_move_both_ways(ends.survivor, ends.neighbour)
    if initiator_dies:
        scene.target_survived()
        if STEPS[step].number < 9 or not ends.push:
            same_bytes(ends.survivor.do(show, "rows"), scene.theirs)
        wait_until(lambda: ends.survivor.do(picture).pins == 0)
        if not ends.push:
            assert bool(ends.survivor.do(picture).keys) == (step != "released"), "only a release consumes"
    else:
        scene.initiator_survived()
    scene.clean_up(before)


@pytest.mark.parametrize(("ends", "step"), cases(one_of_each_row), indirect=["ends"])
def test_r22_killed_while_the_other_end_is_at_a_step(ends: Ends, step: str, tmp_path: Path) -> None:
    """Who stands at the step goes on, and finds that the other end was killed."""
    before = held()
    target_dies = STEPS[step].end == "initiator"
    pair = (ends.survivor, ends.victim) if target_dies else (ends.victim, ends.survivor)
    scene = Scene(ends, *pair)
    ends.survivor.do(shut_there, step, tmp_path, 1)
    try:
        if target_dies:
            ends.survivor.do(begin_there, "call", call, *scene.call)
        else:
            ends.victim.begin(call, *scene.call)
        Gate(tmp_path).wait()
        ends.victim.kill()
        Gate(tmp_path).open()
        if target_dies:
            scene.initiator_survived()
        bytes_move_both_ways(ends.survivor, ends.neighbour)
        if not target_dies:
            scene.target_survived(copying=step == "target answered")
    finally:
        ends.survivor.do(open_there)
    scene.clean_up(before)
