"""Lanes with memory of a GPU whose copies are slow: nothing moves after the end of what asked for it, and guards are
compared only after the last copy."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from faults.lane_ends import DATA, WRITE, Target, Wire, deadline, joined, next_event, one_row
from llm_datadist._native import Ending, LaneEngine, Place, Tensors, WriteAsked, advance_generation
from llm_datadist._native.lane_engine import CHANGED, TORN
from tests.support import fakecuda
from tests.support.moves import wait_until

NBYTES, RATE = 1 << 20, 4 << 20  # of one window, and a second: each copy takes a quarter

pytestmark = [pytest.mark.usefixtures("kind_of_lane"), pytest.mark.gpu(True)]


class Memory:
    """Bytes of a GPU, and a guard of them."""

    def __init__(self, gpu: bool) -> None:
        self._kept = fakecuda.UserMemory(NBYTES)
        self.bytes = fakecuda.load().view(self._kept.address, NBYTES)
        self.bytes[:] = 1
        self.tensors = Tensors(np.array([self._kept.address], np.uint64), NBYTES, place=Place(device=0))
        self._guard = np.array([7], np.uint64)

    @property
    def guards(self) -> list[tuple[int, int]]:
        return [(self._guard.ctypes.data, 7)]

    def change(self) -> None:
        advance_generation(self._guard.ctypes.data)


@pytest.fixture
def memory(gpu: bool) -> Iterator[Memory]:
    fake, memory = fakecuda.load(), Memory(gpu)
    fake.set_rate(RATE)
    yield memory
    fake.set_rate(0)
    wait_until(idle)
    assert fakecuda.complaints_here() == []


def idle() -> bool:
    return fakecuda.load().state().unfinished_streams == 0


def copying() -> bool:
    return not idle()


def ask_to_write(wire: Wire, engine: LaneEngine, memory: Memory, guards: list[tuple[int, int]]) -> None:
    """Have the engine take a write of all bytes, with id 5, into memory with tag 4."""
    wire.send(WRITE, 5, b"", bytes([9]), declared=NBYTES)
    asked = next_event(engine, WriteAsked)
    engine.reply(asked.lane, asked.id, one_row(NBYTES), memory.tensors, guards, 4, write=True)
    wire.sendall(bytes([9]) * (NBYTES - 1))


def stays_zero(memory: Memory) -> None:
    """Use the memory again; no copy writes there."""
    memory.bytes[:] = 0
    time.sleep(0.3)
    wait_until(idle)
    assert not memory.bytes.any()


def test_a_read_that_is_given_up_writes_nothing_after_that(memory: Memory, engine: LaneEngine) -> None:
    with Wire(engine) as wire:
        job = engine.start(wire.lane, b"", one_row(NBYTES), memory.tensors, write=False)
        wire.send(DATA, wire.header()[1], payload=bytes([9]) * NBYTES)  # and no trailer
        wait_until(copying)
        assert engine.give_up(job).ending is Ending.TIMEOUT
        stays_zero(memory)


def test_quiesce_waits_for_the_copies_of_a_write(memory: Memory, engine: LaneEngine) -> None:
    with Wire(engine) as wire:
        ask_to_write(wire, engine, memory, [])
        wait_until(copying)
        engine.quiesce(4)
        stays_zero(memory)


def test_a_guard_that_advances_during_the_last_copy_of_a_write_is_seen(memory: Memory, engine: LaneEngine) -> None:
    with Wire(engine) as wire:
        ask_to_write(wire, engine, memory, memory.guards)
        wait_until(copying)
        memory.change()
        assert wire.result()[:2] == (5, TORN)


def test_a_guard_that_advances_during_the_last_copy_of_a_read_is_seen(memory: Memory) -> None:
    into = np.zeros(NBYTES, np.uint8)
    here = Tensors(np.array([into.ctypes.data], np.uint64), NBYTES)
    with joined() as ends, Target(ends.far, memory.tensors, memory.guards):
        job = ends.start(ends.lanes[0], one_row(NBYTES), here)
        wait_until(copying)
        memory.change()
        outcome = ends.near.wait(job, deadline())
    assert (outcome.ending, outcome.code) == (Ending.TRAILER, CHANGED)
