"""An end that is killed, or stands still, at each step of meeting in a communicator and of asking where raw addresses
lie."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import pytest

from faults.gated import watch_there
from faults.gates import Gate
from llm_datadist import LLMStatusCode
from llm_datadist._links.communicators import Communicators
from llm_datadist._links.dial import Dial
from llm_datadist._links.manager import LinkManager
from llm_datadist._links.messages import Linked, Locate
from llm_datadist._transfer.layerwise import AddressDelivery
from tests.support.ends import ChildEnd, End, LocalEnd
from tests.support.layers import addresses, begin, finish, raw, ready, received, send
from tests.support.linking import SUCCESS, alone, bytes_move_both_ways, info, link, links
from tests.support.moves import Spec, forget, make, picture, same_bytes, wait_until
from tests.support.ranks import OK, PREPARING, drop, explained, host, join, new_name, settle, status, table
from tests.support.world import World

#: An attempt takes 600 ms at most.
SETTINGS: Final = {"link_total_time": 60, "link_retry_count": 100}
#: Step of meeting -> the victim's cluster id: of two members the one with the lower id listens. The survivor is cluster
#: 2. And what is wrapped to stop there, before it or after it.
MEETING: Final[dict[str, tuple[int, type, str, bool]]] = {
    "greeted": (3, Dial, "greet", True),
    "before met": (3, Dial, "confirm", False),
    "met": (3, Dial, "_receive", False),
    "linked": (3, Dial, "confirm", True),
    "before install": (1, LinkManager, "install", False),
    "installed": (1, LinkManager, "install", True),
    "joined": (1, Communicators, "joined", True),
}
#: Where the attempt may still come to nothing.
UNDECIDED: Final = ("greeted", "before met", "met", "before install")
KV: Final = Spec(6, 4, 48)
LOST: Final = {LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR, LLMStatusCode.LLM_NOT_YET_LINK}
OVER_BOTH: Final = pytest.mark.parametrize("transport", ["auto", "tcp"])


def stop_at(world: World, owner: type, method: str, after: bool, folder: Path) -> None:
    """Stop this process at the next call of a method; the process is a test's own."""
    gate, original = Gate(folder), getattr(owner, method)

    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        here = not gate.reached and (method != "_receive" or args[0] is Linked)
        if here and not after:
            gate.pass_through()
        result = original(self, *args, **kwargs)
        if here and after:
            gate.pass_through()
        return result

    setattr(owner, method, stepped)


@pytest.fixture
def victim(gpu: bool) -> Iterator[ChildEnd]:
    child = ChildEnd("victim")
    child.gpu = gpu
    yield child
    child.kill()


# --- meeting ----------------------------------------------------------------------------------------------------------


def begin_meeting(
    end: LocalEnd, victim: ChildEnd, step: str, folder: Path, transport: str
) -> tuple[str, dict[int, int]]:
    """Both call link(), and the victim stands at the step."""
    extra = {"llm.Transport": transport}
    cluster_id, *where = MEETING[step]
    end.start("MIX", 2, extra=extra, **SETTINGS)
    victim.start("MIX", cluster_id, extra=extra, **SETTINGS)
    victim.do(stop_at, *where, folder)
    name, ranks = new_name(), {member: rank for rank, member in enumerate(sorted((2, cluster_id)))}
    for member in (victim, end):
        member.do(join, name, ranks, table(host(0), host(0)))
    Gate(folder).wait()
    return name, ranks


@pytest.mark.parametrize(("step", "transport"), list(zip(MEETING, cycle(["shm", "tcp"]))))
def test_r22_killed_while_joining(end: LocalEnd, victim: ChildEnd, tmp_path: Path, step: str, transport: str) -> None:
    """Whatever the survivor makes of it, its link is gone, nothing is left, and the successor joins.

    Regression: a member in the handshake was counted, and both sides disagreed for good whether they are linked.
    """
    name, ranks = begin_meeting(end, victim, step, tmp_path, transport)
    victim.kill()
    alone(end)
    if end.do(status, 1) is OK:  # all was done, but for the victim's own part
        assert step in ("linked", "installed", "joined")
        end.do(drop, 1)
        name = new_name()
        end.do(join, name, ranks, table(host(0), host(0)))
    comm_id = 1 if end.do(picture).communicators[0].comm_id == 1 else 2
    assert end.do(status, comm_id) is PREPARING
    with closing(ChildEnd("successor")) as next_one:
        next_one.start("MIX", MEETING[step][0], extra={"llm.Transport": transport}, **SETTINGS)
        next_one.do(join, name, ranks, table(host(0), host(0)))
        assert settle([end, next_one], [comm_id, 1]) == [OK, OK]
        bytes_move_both_ways(end, next_one)
        end.do(drop, comm_id)
        alone(next_one)
        next_one.stop()


@pytest.mark.parametrize(("step", "transport"), list(zip(UNDECIDED, cycle(["tcp", "shm"]))))
def test_a_member_that_stands_still_until_the_attempt_is_over_is_met_by_the_next_one(
    end: LocalEnd, victim: ChildEnd, tmp_path: Path, step: str, transport: str
) -> None:
    """Regression: the listening member counted one that stood still in the handshake, and both disagreed for good."""
    begin_meeting(end, victim, step, tmp_path, transport)
    dialler: End = victim if victim.cluster_id == 3 else end
    # The attempt that is held up can come to nothing any more.
    wait_until(lambda: dialler.do(attempt_has_expired if dialler is victim else gave_up_once))
    Gate(tmp_path).open()
    assert settle([end, victim], [1, 1], 30) == [OK, OK], (end.do(explained, 1), victim.do(explained, 1))
    bytes_move_both_ways(end, victim)
    assert dialler.do(links) == {2 if dialler is victim else victim.cluster_id: "ready"}
    victim.stop()


def attempt_has_expired(world: World) -> bool:
    return any(deadline.expired() for deadline in world.probe.dial_deadlines())


def gave_up_once(world: World) -> bool:
    return "no answer within" in world.dd.explain_communicator(1).reason


# --- raw addresses ----------------------------------------------------------------------------------------------------


def stop_answering(world: World, folder: Path, after: bool) -> None:
    """Stop the control thread at a Locate, before it is looked at or when the answer is on its way."""
    manager, gate, step = world.probe.engine.links, Gate(folder), "handled" if after else "handle"

    def stop(name: str, subject: object, details: tuple[Any, ...]) -> None:
        if name == step and subject is manager and isinstance(details[0], Locate) and not gate.reached:
            gate.pass_through()

    watch_there(world, stop)


def start(owner: End, sender: End, transport: str, **settings: Any) -> Any:
    """Link them, with a cache each; return the owner's bytes."""
    extra = {"llm.Transport": transport}
    owner.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra)
    sender.start("DECODER", 2, extra=extra, **settings)
    assert sender.do(link, [info(1, owner.port)]) == SUCCESS
    sender.do(make, "kv", KV, 2)
    return owner.do(make, "kv", KV, 1)


@pytest.mark.gpu
@OVER_BOTH
@pytest.mark.parametrize("after", [False, True], ids=["not asked", "told"])
def test_r22_the_sender_is_killed_and_nothing_of_its_leave_is_left(
    end: LocalEnd, victim: ChildEnd, tmp_path: Path, after: bool, transport: str
) -> None:
    before = start(end, victim, transport)
    victim.do(stop_at, AddressDelivery, "_locate", after, tmp_path)
    config = raw(end, "kv")
    victim.do(begin, "kv", [config])
    victim.do(ready, 0, 1, 2)
    Gate(tmp_path).wait()
    victim.kill()
    alone(end)
    same_bytes(received(end), before)
    end.do(forget, "kv")
    wait_until(lambda: end.do(picture).quarantined_bytes == 0)
    end.do(make, "kv", KV, 5)
    with closing(ChildEnd("successor")) as next_one:
        next_one.start("DECODER", 2, extra={"llm.Transport": transport})
        assert next_one.do(link, [info(1, end.port)]) == SUCCESS
        next_one.do(make, "kv", KV, 6)
        assert end.do(addresses, "kv") == config.dst_addrs
        assert next_one.do(send, "kv", [config]).first is LLMStatusCode.LLM_SUCCESS
        next_one.stop()


def be_patient(world: World) -> None:
    """Give later calls a minute."""
    engine = world.probe.engine
    engine.options = replace(engine.options, sync_kv_timeout_ms=60_000)


@pytest.mark.gpu
@OVER_BOTH
@pytest.mark.parametrize("after", [False, True], ids=["asked", "answered"])
@pytest.mark.parametrize("killed", [False, True], ids=["stands still", "is killed"])
def test_r07_r22_an_owner_that_stands_still_costs_one_transfer_its_time_and_one_that_is_killed_the_link(
    end: LocalEnd, victim: ChildEnd, tmp_path: Path, killed: bool, after: bool, transport: str
) -> None:
    before = start(victim, end, transport, **({} if killed else {"sync_kv_timeout": 300}))
    victim.do(stop_answering, tmp_path, after)
    config = raw(victim, "kv")
    end.do(begin, "kv", [config])
    end.do(ready, 0, 1, 2)
    Gate(tmp_path).wait()
    if killed:
        victim.kill()
        assert end.do(finish).first in LOST
        alone(end)
        return
    result = end.do(finish).first
    # Where it has been told, the push may find the owner still, or finish beside it.
    assert after or result is LLMStatusCode.LLM_TIMEOUT
    Gate(tmp_path).open()
    end.do(be_patient)
    if not after:
        same_bytes(received(victim), before)
    assert end.do(links) == {1: "ready"}
    assert end.do(send, "kv", [config]).first is LLMStatusCode.LLM_SUCCESS
    bytes_move_both_ways(end, victim)
    victim.stop()
