"""The lanes' target against a peer that speaks the wire by hand: guards, refusals, memory that is taken back."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from faults.lane_ends import (
    BIG,
    DATA,
    READ,
    RESULT,
    WRITE,
    Target,
    Wire,
    deadline,
    encode_plan,
    events_of,
    joined,
    next_event,
    one_row,
)
from llm_datadist._memory.guards import GuardTable
from llm_datadist._native import Ending, LaneEngine, LaneLost, ReadAsked, WriteAsked
from llm_datadist._native.lanes import ABORTED, CHANGED, MISFIT, TORN
from llm_datadist.testing.scene import tensors_over as tensors
from tests.support.moves import wait_until as wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("kind_of_lane", "nothing_left")


@pytest.fixture
def engine() -> Iterator[LaneEngine]:
    engine = LaneEngine(1, drain_ms=300)
    yield engine
    engine.close()


@pytest.fixture
def guards() -> Iterator[GuardTable]:
    with closing(GuardTable(16)) as table:
        yield table


def ask_read(engine: LaneEngine, wire: Wire, id: int, nbytes: int) -> ReadAsked:
    wire.send(READ, id, encode_plan(one_row(nbytes)))
    return next_event(engine, ReadAsked)


# Guards


@pytest.mark.parametrize("nbytes", [100, BIG])
def test_a_read_whose_guard_changed_before_is_refused(engine: LaneEngine, guards: GuardTable, nbytes: int) -> None:
    memory, guard = np.full(nbytes, 3, np.uint8), guards.allocate()
    with Wire(engine) as wire:
        asked = ask_read(engine, wire, 5, nbytes)
        pair = (guards.address_of(guard.slot), guard.generation)
        guards.advance(guard.slot)
        engine.serve_read(asked.lane, asked.id, one_row(nbytes), tensors(memory), [pair], 0)
        id, code, text = wire.result()
        assert (id, code) == (5, CHANGED)
        assert "guard has changed" in text


def test_a_read_whose_guard_changes_on_its_way_says_so_in_its_trailer(engine: LaneEngine, guards: GuardTable) -> None:
    memory, guard = np.full(BIG, 3, np.uint8), guards.allocate()
    with Wire(engine) as wire:
        asked = ask_read(engine, wire, 5, BIG)
        pair = (guards.address_of(guard.slot), guard.generation)
        engine.serve_read(asked.lane, asked.id, one_row(BIG), tensors(memory), [pair], 0)
        assert wire.header() == (DATA, 5, 0, BIG)
        guards.advance(guard.slot)
        assert wire.receive(BIG) == bytes([3]) * BIG
        assert int.from_bytes(wire.receive(8), "little") == CHANGED


@pytest.mark.parametrize("nbytes", [100, BIG])
def test_a_read_whose_guards_hold_is_good(engine: LaneEngine, guards: GuardTable, nbytes: int) -> None:
    memory, kept = np.full(nbytes, 3, np.uint8), [guards.allocate() for _ in range(3)]
    with Wire(engine) as wire:
        asked = ask_read(engine, wire, 5, nbytes)
        pairs = [(guards.address_of(guard.slot), guard.generation) for guard in kept]
        engine.serve_read(asked.lane, asked.id, one_row(nbytes), tensors(memory), pairs, 0)
        assert wire.header() == (DATA, 5, 0, nbytes)
        assert wire.receive(nbytes + 8) == bytes([3]) * nbytes + bytes(8)


def test_the_initiator_learns_of_the_trailer() -> None:
    into = np.zeros(16, np.uint8)
    engine = LaneEngine(1)
    with Wire(engine) as wire:
        job = engine.start_read(wire.lane, b"what", one_row(16), tensors(into))
        _, id, meta, _ = wire.header()
        assert wire.receive(meta) == b"what"
        wire.send(DATA, id, payload=bytes(16) + CHANGED.to_bytes(8, "little"), declared=16)
        ending, code, nbytes, text = engine.wait(job, deadline())
        assert (ending, code, nbytes) == (Ending.TRAILER, CHANGED, 16)
        assert "guard has changed" in text
    engine.close()


def test_a_write_whose_guard_changed_before_touches_nothing(engine: LaneEngine, guards: GuardTable) -> None:
    memory, guard = np.zeros(BIG, np.uint8), guards.allocate()
    with Wire(engine) as wire:
        wire.send(WRITE, 5, b"m", b"", declared=BIG)
        asked = next_event(engine, WriteAsked)
        pair = (guards.address_of(guard.slot), guard.generation)
        guards.advance(guard.slot)
        engine.accept_write(asked.lane, asked.id, one_row(BIG), tensors(memory), [pair], 0)
        assert wire.result()[:2] == (5, CHANGED)
        wire.sendall(bytes([9]) * BIG)
        write_is_good(engine, wire, 6)
    assert not memory.any()


def test_a_write_whose_guard_changes_on_its_way_is_not_good(engine: LaneEngine, guards: GuardTable) -> None:
    memory, guard = np.zeros(BIG, np.uint8), guards.allocate()
    with Wire(engine) as wire:
        wire.send(WRITE, 5, b"m", bytes([9]), declared=BIG)
        asked = next_event(engine, WriteAsked)
        pair = (guards.address_of(guard.slot), guard.generation)
        engine.accept_write(asked.lane, asked.id, one_row(BIG), tensors(memory), [pair], 0)
        wait_for(lambda: memory[0] == 9)
        guards.advance(guard.slot)
        wire.sendall(bytes([9]) * (BIG - 1))
        assert wire.result()[:2] == (5, TORN)


def write_is_good(engine: LaneEngine, wire: Wire, id: int) -> None:
    memory = np.zeros(1000, np.uint8)
    wire.send(WRITE, id, b"", b"x" * 1000)
    asked = next_event(engine, WriteAsked)
    assert (asked.id, asked.nbytes) == (id, 1000)
    engine.accept_write(asked.lane, id, one_row(1000), tensors(memory), [], 0)
    assert wire.result() == (id, 0, "")
    assert memory.tobytes() == b"x" * 1000


# Refusals


def test_refusals_reach_the_initiator_with_code_and_text() -> None:
    data = np.zeros(BIG, np.uint8)
    with joined() as ends:
        for write in (False, True):
            job = ends.start(ends.lanes[0], one_row(BIG), tensors(data), write=write)
            asked: ReadAsked | WriteAsked
            asked = next_event(ends.far, WriteAsked) if write else next_event(ends.far, ReadAsked)
            ends.far.refuse(asked.lane, asked.id, 0xFFFFFFFF, "no, thänk you")
            assert ends.near.wait(job, deadline()) == (Ending.REFUSED, 0xFFFFFFFF, 0, "no, thänk you")
        with Target(ends.far, tensors(data)):
            assert ends.move(ends.lanes[0], one_row(8), tensors(data)).ending is Ending.GOOD


def test_a_refused_write_reads_nothing_more_of_local_memory() -> None:
    """What is left of its frame is zeros, and the lane goes on."""
    engine = LaneEngine(1)
    data = np.full(BIG, 9, np.uint8)
    with Wire(engine) as wire:
        job = engine.start_write(wire.lane, b"", one_row(BIG), tensors(data))
        kind, id, _, nbytes = wire.header()
        assert (kind, nbytes) == (WRITE, BIG)
        wire.send(RESULT, id, (77).to_bytes(4, "little") + b"no")
        assert engine.wait(job, deadline()) == (Ending.REFUSED, 77, 0, "no")
        data[:] = 5
        payload = np.frombuffer(wire.receive(BIG), np.uint8)
        assert not (payload == 5).any()
        assert payload[0] == 9
        assert payload[-1] == 0
        assert events_of(engine, 0) == []
    engine.close()


def test_long_texts_are_cut(engine: LaneEngine) -> None:
    with Wire(engine) as wire:
        asked = ask_read(engine, wire, 5, 8)
        engine.refuse(asked.lane, asked.id, 1, "x" * 5000)
        assert wire.result() == (5, 1, "x" * 4000)


def test_a_refused_payload_that_does_not_end_costs_the_lane(engine: LaneEngine) -> None:
    with Wire(engine) as wire:
        wire.send(WRITE, 5, declared=1 << 48)
        asked = next_event(engine, WriteAsked)
        engine.refuse(asked.lane, asked.id, 1, "too large")
        assert wire.result() == (5, 1, "too large")
        assert wire.is_closed()
        assert next_event(engine, LaneLost).reason == "a payload that nobody wants did not end in time"


def test_grants_of_another_size_than_the_payload(engine: LaneEngine) -> None:
    memory = np.zeros(100, np.uint8)
    with Wire(engine) as wire:
        wire.send(WRITE, 5, b"", b"x" * 50)
        asked = next_event(engine, WriteAsked)
        engine.accept_write(asked.lane, 5, one_row(51), tensors(memory), [], 0)
        assert wire.result()[:2] == (5, MISFIT)
        write_is_good(engine, wire, 6)
    assert not memory.any()


def test_answers_to_what_is_gone_or_was_answered(engine: LaneEngine) -> None:
    memory = np.zeros(100, np.uint8)
    with Wire(engine) as wire:
        asked = ask_read(engine, wire, 5, 8)
        engine.refuse(asked.lane, asked.id, 1, "no")
        engine.refuse(asked.lane, asked.id, 1, "no")
        for lane, id in ((asked.lane, asked.id), (asked.lane, 99), (12345, 1)):
            engine.serve_read(lane, id, one_row(8), tensors(memory), [], 0)
            engine.accept_write(lane, id, one_row(8), tensors(memory), [], 0)
        assert wire.result() == (5, 1, "no")
        write_is_good(engine, wire, 6)


# Memory that is taken back


def test_quiesce_takes_memory_from_under_a_running_read(engine: LaneEngine) -> None:
    memory = np.full(BIG, 3, np.uint8)
    with Wire(engine) as wire:
        first, second, other = (ask_read(engine, wire, id, BIG) for id in (5, 6, 7))
        for asked, tag in ((first, 1), (second, 1), (other, 2)):
            engine.serve_read(asked.lane, asked.id, one_row(BIG), tensors(memory), [], tag)
        assert wire.header() == (DATA, 5, 0, BIG)
        engine.quiesce(1)
        memory[:] = 7
        got = np.frombuffer(wire.receive(BIG), np.uint8)
        assert not (got == 7).any()
        assert got[-1] == 0
        assert int.from_bytes(wire.receive(8), "little") == ABORTED
        assert wire.result()[:2] == (6, ABORTED)
        assert wire.header() == (DATA, 7, 0, BIG)
        assert wire.receive(BIG + 8) == bytes([7]) * BIG + bytes(8)


def test_quiesce_takes_memory_from_under_a_running_write(engine: LaneEngine) -> None:
    memory = np.zeros(BIG, np.uint8)
    with Wire(engine) as wire:
        wire.send(WRITE, 5, b"", bytes([9]), declared=BIG)
        asked = next_event(engine, WriteAsked)
        engine.accept_write(asked.lane, asked.id, one_row(BIG), tensors(memory), [], 4)
        wait_for(lambda: memory[0] == 9)
        engine.quiesce(3)
        wire.sendall(bytes([9]))
        wait_for(lambda: memory[1] == 9)
        engine.quiesce(4)
        wire.sendall(bytes([9]) * (BIG - 2))
        assert wire.result()[:2] == (5, TORN)
        assert not memory[2:].any()
        write_is_good(engine, wire, 6)


def test_a_lane_that_is_lost_with_grants_on_it_is_told_of_once(engine: LaneEngine) -> None:
    memory = np.full(BIG, 3, np.uint8)
    with Wire(engine) as wire:
        for id in (5, 6):
            asked = ask_read(engine, wire, id, BIG)
            engine.serve_read(asked.lane, asked.id, one_row(BIG), tensors(memory), [], 0)
        wire.header()
    next_event(engine, LaneLost)
    assert events_of(engine, 0) == []
