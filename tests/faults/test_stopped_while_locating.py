"""Raw addresses: either end is killed, or the owner stands still, while it is asked what lies there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from faults.gated import watch_there
from faults.gates import Gate
from llm_datadist import LLMStatusCode
from llm_datadist._links.messages import Locate
from tests.support.ends import ChildEnd
from tests.support.layers import OK, addresses, begin, finish, raw, ready, received, send
from tests.support.linking import SUCCESS, alone, bytes_move_both_ways, info, link, links
from tests.support.moves import Spec, forget, make, picture, same_bytes, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.ends import End, LocalEnd
    from tests.support.world import World

KV: Final = Spec(6, 4, 48)
LOST: Final = {LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR, LLMStatusCode.LLM_NOT_YET_LINK}


def stop_answering(world: World, folder: Path, after: bool) -> None:
    """Stop the control thread at a Locate, before it is looked at or when the answer is on its way."""
    assert world.dd._engine is not None
    manager, gate, step = world.dd._engine.links, Gate(folder), "handled" if after else "handle"

    def stop(name: str, subject: object, details: tuple[Any, ...]) -> None:
        if name == step and subject is manager and isinstance(details[0], Locate) and not gate.reached:
            gate.pass_through()

    watch_there(world, stop)


def stop_asking(world: World, folder: Path, after: bool) -> None:
    """Stop the transfer's thread before it asks, or when it has been told."""
    engine, gate = world.dd._engine, Gate(folder)
    assert engine is not None
    original = engine.locator.locate

    def stopped(*args: Any) -> Any:
        if not after:
            gate.pass_through()
        result = original(*args)
        if after:
            gate.pass_through()
        return result

    engine.locator.locate = stopped  # type: ignore[method-assign, assignment]


@pytest.fixture
def victim() -> Iterator[ChildEnd]:
    child = ChildEnd("victim")
    yield child
    child.kill()


def start(owner: End, sender: End, transport: str, **settings: Any) -> tuple[Any, Any]:
    extra = {"llm.Transport": transport}
    owner.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra)
    sender.start("DECODER", 2, extra=extra, **settings)
    assert sender.do(link, [info(1, owner.port)]) == SUCCESS
    return owner.do(make, "kv", KV, 1), sender.do(make, "kv", KV, 2)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("after", [False, True], ids=["asked", "answered"])
def test_r22_the_owner_is_killed(end: LocalEnd, victim: ChildEnd, tmp_path: Path, after: bool, transport: str) -> None:
    start(victim, end, transport)
    victim.do(stop_answering, tmp_path, after)
    end.do(begin, "kv", [raw(victim, "kv")])
    end.do(ready, 0, 1, 2)
    Gate(tmp_path).wait()
    victim.kill()
    result = end.do(finish)
    assert result.first in LOST, result
    alone(end)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("after", [False, True], ids=["not asked", "told"])
def test_r22_the_sender_is_killed_and_nothing_of_its_leave_is_left(
    end: LocalEnd, victim: ChildEnd, tmp_path: Path, after: bool, transport: str
) -> None:
    before, _ = start(end, victim, transport)
    victim.do(stop_asking, tmp_path, after)
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
    successor = ChildEnd("successor")
    try:
        successor.start("DECODER", 2, extra={"llm.Transport": transport})
        assert successor.do(link, [info(1, end.port)]) == SUCCESS
        successor.do(make, "kv", KV, 6)
        assert end.do(addresses, "kv") == config.dst_addrs
        assert successor.do(send, "kv", [config]).first is OK
        successor.stop()
    finally:
        successor.kill()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("after", [False, True], ids=["asked", "answered"])
def test_r07_an_owner_that_stands_still_costs_one_transfer_its_time(
    end: LocalEnd, victim: ChildEnd, tmp_path: Path, after: bool, transport: str
) -> None:
    before, _ = start(victim, end, transport, sync_kv_timeout=300)
    victim.do(stop_answering, tmp_path, after)
    config = raw(victim, "kv")
    assert after or end.do(send, "kv", [config]).first is LLMStatusCode.LLM_TIMEOUT
    if after:  # it has been told where: the push may find the owner still, or finish beside it
        end.do(send, "kv", [config])
    Gate(tmp_path).open()
    if not after:
        same_bytes(received(victim), before)
    assert end.do(links) == {1: "ready"}
    assert end.do(send, "kv", [config]).first is OK
    bytes_move_both_ways(end, victim)
    victim.stop()
