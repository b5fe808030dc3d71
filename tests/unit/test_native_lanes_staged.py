"""Small blocks that the engine itself puts into memory nobody can take away, and those it leaves to the kernel."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np
import pytest

from faults.lane_ends import DATA, HEADER, MAGIC, WRITE, Target, Wire, deadline, joined, next_event, one_row
from llm_datadist._native import Ending, LaneEngine, Plan, Tensors, WriteAsked, plan_blocks
from llm_datadist._native.lanes import TORN
from tests.support import twin
from tests.support.moves import wait_until as wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("kind_of_lane", "nothing_left")

SMALL = 5000  # bytes of a block: no multiple of anything
COUNT = 1200  # blocks of each end's tensors; every other one is moved


@pytest.fixture
def engine() -> Iterator[LaneEngine]:
    made = LaneEngine(1)
    yield made
    made.close()


def scattered(block: int, count: int, tensors: int = 1) -> Plan:
    """Return a plan of half of the blocks of each tensor, in random order, none adjacent."""
    rng = np.random.default_rng(block)
    dst, src = (rng.permutation(count // 2) * 2 + first for first in (1, 0))
    plan = plan_blocks(dst, src, block_bytes=block, dst_count=count, src_count=count, alias=False)
    return twin.make_plan(plan.runs, count=tensors)


def mapped(arrays: list[twin.Bytes]) -> Tensors:
    """Return the arrays as memory that nobody can take away."""
    one = twin.tensors_of(arrays)
    return Tensors(one.bases, one.extent, mapped=True)


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    ("block", "count", "tensors"),
    [(4096, 1000, 2), (SMALL, COUNT, 1), (7, 40_000, 1), (16 << 10, 64, 3), (24 << 10, 64, 1), (4096, 34, 1)],
)
def test_every_byte_inside_and_outside_the_blocks(write: bool, block: int, count: int, tensors: int) -> None:
    plan = scattered(block, count, tensors)
    ours, theirs = twin.noise(1, tensors, block * count), twin.noise(2, tensors, block * count)
    expected = [[tensor.copy() for tensor in end] for end in (ours, theirs)]
    dst, src = (1, 0) if write else (0, 1)
    twin.execute(plan, expected[dst], expected[src])
    with joined() as ends, Target(ends.far, mapped(theirs)):
        outcome = ends.move(ends.lanes[0], plan, mapped(ours), write=write)
    assert outcome == (Ending.GOOD, 0, plan.nbytes, "")
    for got, wanted in zip([*ours, *theirs], [*expected[0], *expected[1]], strict=True):
        assert np.array_equal(got, wanted)


def test_quiesce_takes_memory_from_under_small_blocks(engine: LaneEngine) -> None:
    memory = np.zeros(SMALL * COUNT, np.uint8)
    plan = scattered(SMALL, COUNT)
    first = int(plan.runs[0, 0])
    with Wire(engine) as wire:
        wire.send(WRITE, 5, b"", bytes([9]) * 2, declared=plan.nbytes)
        asked = next_event(engine, WriteAsked)
        engine.accept_write(asked.lane, asked.id, plan, mapped([memory]), [], 4)
        wait_for(lambda: memory[first + 1] == 9)
        engine.quiesce(4)
        wire.sendall(bytes([9]) * (plan.nbytes - 2))
        assert wire.result()[:2] == (5, TORN)
        assert np.flatnonzero(memory).tolist() == [first, first + 1]


def test_a_job_given_up_writes_no_small_block_any_more(engine: LaneEngine) -> None:
    memory = np.zeros(SMALL * COUNT, np.uint8)
    plan = scattered(SMALL, COUNT)
    first = int(plan.runs[0, 0])
    with Wire(engine) as wire:
        job = engine.start_read(wire.lane, b"", plan, mapped([memory]))
        id = wire.header()[1]
        wire.sendall(HEADER.pack(MAGIC, DATA, 0, 0, id, 0, plan.nbytes, 0) + bytes([9]))
        wait_for(lambda: memory[first] == 9)
        assert engine.give_up(job) == (Ending.TIMEOUT, 0, 1, "")
        wire.sendall(bytes([9]) * (plan.nbytes - 1) + bytes(8))
        into = np.zeros(8, np.uint8)
        after = engine.start_read(wire.lane, b"", one_row(8), mapped([into]))
        wire.sendall(HEADER.pack(MAGIC, DATA, 0, 0, wire.header()[1], 0, 8, 0) + bytes([3]) * 8 + bytes(8))
        assert engine.wait(after, deadline()).ending is Ending.GOOD  # so that what was dropped has come, too
        assert np.flatnonzero(memory).tolist() == [first]


@pytest.mark.parametrize("write", [False, True])
def test_memory_of_the_user_that_cannot_be_written_costs_the_lane_only(write: bool) -> None:
    """The kernel says so; a copy of ours would end the process."""
    protected = np.frombuffer(mmap.mmap(-1, SMALL * COUNT, prot=mmap.PROT_READ), np.uint8)
    memory = np.zeros(SMALL * COUNT, np.uint8)
    ours, theirs = (memory, protected) if write else (protected, memory)
    with joined() as ends, Target(ends.far, twin.tensors_of([theirs])):
        job = ends.start(ends.lanes[0], scattered(SMALL, COUNT), twin.tensors_of([ours]), write=write)
        assert ends.near.wait(job, deadline()).ending is Ending.LOST
