"""A member of a communicator that is killed, or stands still until the other one gives up, at each step of meeting."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import pytest

from faults.gates import Gate
from llm_datadist._links.communicators import Communicators
from llm_datadist._links.handshake import Dial, _BlockingFrames
from llm_datadist._links.manager import LinkManager
from llm_datadist._links.messages import Linked
from tests.support.ends import ChildEnd
from tests.support.linking import alone, bytes_move_both_ways, links
from tests.support.moves import picture, wait_until
from tests.support.ranks import OK, PREPARING, drop, explained, host, join, new_name, settle, status, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.ends import LocalEnd
    from tests.support.world import World

#: An attempt takes 600 ms at most.
SETTINGS: Final = {"link_total_time": 60, "link_retry_count": 100}
#: Step -> the victim's cluster id: of two members the one with the lower id listens. The survivor is cluster 2.
STEPS: Final = {
    "greeted": 3,
    "before met": 3,
    "met": 3,
    "linked": 3,
    "before install": 1,
    "installed": 1,
    "joined": 1,
}
#: Where the attempt may still come to nothing.
UNDECIDED: Final = ("greeted", "before met", "met", "before install")


def stop_at(world: World, step: str, folder: Path) -> None:
    """Stop this process's next member at a step of meeting; the process is a test's own."""
    gate = Gate(folder)
    owner, method, after = {
        "greeted": (Dial, "greet", True),
        "before met": (Dial, "settle", False),
        "met": (_BlockingFrames, "receive", False),
        "linked": (Dial, "settle", True),
        "before install": (LinkManager, "install", False),
        "installed": (LinkManager, "install", True),
        "joined": (Communicators, "joined", True),
    }[step]
    setattr(owner, method, stopping(getattr(owner, method), gate, step, after=after))


def stopping(original: Callable[..., Any], gate: Gate, step: str, *, after: bool) -> Callable[..., Any]:
    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if gate.reached or (step == "met" and args[0] is not Linked):
            return original(self, *args, **kwargs)
        if after:
            result = original(self, *args, **kwargs)
            gate.pass_through()
            return result
        gate.pass_through()
        return original(self, *args, **kwargs)

    return stepped


@pytest.fixture
def victim() -> Iterator[ChildEnd]:
    child = ChildEnd("victim")
    yield child
    child.kill()


def start_at(end: LocalEnd, victim: ChildEnd, step: str, folder: Path, transport: str) -> tuple[str, dict[int, int]]:
    """Both call link(), and the victim stands at the step."""
    extra = {"llm.Transport": transport}
    end.start("MIX", 2, extra=extra, **SETTINGS)
    victim.start("MIX", STEPS[step], extra=extra, **SETTINGS)
    victim.do(stop_at, step, folder)
    name, ranks = new_name(), {cluster_id: rank for rank, cluster_id in enumerate(sorted((2, STEPS[step])))}
    for member in (victim, end):
        member.do(join, name, ranks, table(host(0), host(0)))
    Gate(folder).wait()
    return name, ranks


@pytest.mark.parametrize(("step", "transport"), list(zip(STEPS, cycle(["shm", "tcp"]))))
def test_r22_killed_while_joining(end: LocalEnd, victim: ChildEnd, tmp_path: Path, step: str, transport: str) -> None:
    """Whatever the survivor makes of it, its link is gone, nothing is left, and the successor joins."""
    name, ranks = start_at(end, victim, step, tmp_path, transport)
    victim.kill()
    alone(end)
    if end.do(status, 1) is OK:  # all was done, but for the victim's own part
        assert step in ("linked", "installed", "joined")
        end.do(drop, 1)
        name = new_name()
        end.do(join, name, ranks, table(host(0), host(0)))
    comm_id = 1 if end.do(picture).communicators[0].comm_id == 1 else 2
    assert end.do(status, comm_id) is PREPARING
    successor = ChildEnd("successor")
    try:
        successor.start("MIX", STEPS[step], extra={"llm.Transport": transport}, **SETTINGS)
        successor.do(join, name, ranks, table(host(0), host(0)))
        assert settle([end, successor], [comm_id, 1]) == [OK, OK]
        bytes_move_both_ways(end, successor)
        end.do(drop, comm_id)
        alone(successor)
        successor.stop()
    finally:
        successor.kill()


@pytest.mark.parametrize(("step", "transport"), list(zip(UNDECIDED, cycle(["tcp", "shm"]))))
def test_a_member_that_stands_still_until_the_attempt_is_over_is_met_by_the_next_one(
    end: LocalEnd, victim: ChildEnd, tmp_path: Path, step: str, transport: str
) -> None:
    start_at(end, victim, step, tmp_path, transport)
    dialler, peer = (victim, 2) if STEPS[step] == 3 else (end, STEPS[step])
    attempt_is_over(dialler, tmp_path, held=dialler is victim)
    Gate(tmp_path).open()
    assert settle([end, victim], [1, 1], 30) == [OK, OK], (end.do(explained, 1), victim.do(explained, 1))
    bytes_move_both_ways(end, victim)
    assert dialler.do(links) == {peer: "ready"}
    victim.stop()


def attempt_is_over(dialler: Any, folder: Path, *, held: bool) -> None:
    """Return when the attempt that is held up can come to nothing any more."""
    wait_until((lambda: dialler.do(attempt_has_expired)) if held else (lambda: dialler.do(gave_up_once)))


def attempt_has_expired(world: World) -> bool:
    engine = world.dd._engine
    assert engine is not None
    current = engine.links.communicators._dials._current
    dial = current[0]._dial
    return dial is not None and dial._deadline.expired()


def gave_up_once(world: World) -> bool:
    return "no answer within" in world.dd.explain_communicator(1).reason
