"""The lanes: every byte of both ends, both directions, who waits for whom, and what is left behind."""

import mmap
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from itertools import product
from tempfile import TemporaryFile

import numpy as np
import pytest

from faults import lane_ends
from faults.lane_ends import DATA, READ, WRITE, Ends, Target, Wire, deadline, events_of, joined, next_event, one_row
from llm_datadist import _native as native
from llm_datadist._native import (
    NO_DEADLINE,
    Ending,
    LaneEngine,
    LaneLost,
    Place,
    Plan,
    ReadAsked,
    Tensors,
    WriteAsked,
)
from llm_datadist._native.lane_engine import LOST, TORN
from llm_datadist.errors import ParamError
from llm_datadist.testing.scene import descriptors, kernel_threads
from llm_datadist.testing.scene import tensors_over as tensors
from tests.support import twin
from tests.support.moves import wait_until
from tests.unit.holder import in_a_forked_child

MIB = 1 << 20
SMALL = 5000  # bytes of a block: no multiple of anything

pytestmark = pytest.mark.usefixtures("kind_of_lane", "nothing_left")


def random_plan(seed: int, tensors: int, extent: int, runs: int) -> Plan:
    """Return disjoint runs of random lengths, some of none, over a random range of tensors."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, tensors + 1))
    firsts = rng.integers(0, tensors - count + 1, 2).tolist()
    room = extent // runs
    dst, src = rng.permutation(runs) * room, rng.permutation(runs) * room
    lengths = rng.integers(0, room + 1, runs)
    lengths[rng.random(runs) < 0.1] = 0
    table = np.stack([dst, src, lengths], axis=1).astype(np.uint64)
    return twin.make_plan(table, dst_first=firsts[0], src_first=firsts[1], count=count)


def scattered(block: int, count: int, tensors: int = 1) -> Plan:
    """Return a plan of half of the blocks of each tensor, in random order, none adjacent."""
    rng = np.random.default_rng(block)
    dst, src = (rng.permutation(count // 2) * 2 + first for first in (1, 0))
    plan = native.plan_blocks(dst, src, block_bytes=block, dst_count=count, src_count=count, alias=False)
    return twin.make_plan(plan.runs, count=tensors)


def mapped(arrays: list[twin.Bytes]) -> Tensors:
    """Return the arrays as memory that nobody can take away."""
    one = twin.tensors_of(arrays)
    return Tensors(one.bases, one.extent, place=Place(mapped=True))


# Payloads below and above what is coalesced, of few and of thousands of runs.
SHAPES = [(1, 64, 1), (3, 5000, 7), (5, 70_000, 40), (4, 600_000, 5000), (2, 3 * MIB, 3)]
PLANS: dict[str, tuple[Plan, int, int]] = {  # with the number and the size of the tensors
    f"{runs} runs of {tensors} x {extent}": (random_plan(seed, tensors, extent, runs), tensors, extent)
    for seed, (tensors, extent, runs) in enumerate(SHAPES)
}
PLANS["no bytes"] = twin.make_plan(np.array([[3, 3, 0]], np.uint64)), 1, 8
ORDERED = [[10, 0, 6], [12, 20, 6], [10, 30, 3], [0, 40, 2], [10, 50, 1]]
PLANS["in their order"] = twin.make_plan(np.array(ORDERED, np.uint64), ordered=True), 1, 64
# Small blocks, which the engine itself puts into memory that nobody can take away, and large ones, left to the kernel.
BLOCKS = [(4096, 1000, 2), (SMALL, 1200, 1), (7, 40_000, 1), (16 << 10, 64, 3), (24 << 10, 64, 1), (4096, 34, 1)]
MAPPED = {
    f"mapped, {count // 2} blocks of {block} x {tensors}": (scattered(block, count, tensors), tensors, block * count)
    for block, count, tensors in BLOCKS
}


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize(
    ("name", "make"), [*product(PLANS, (socket.socketpair, lane_ends.tcp_pair)), *product(MAPPED, (socket.socketpair,))]
)
def test_exactly_the_planned_bytes_move(
    name: str, make: Callable[[], tuple[socket.socket, socket.socket]], write: bool
) -> None:
    plan, tensors, extent = (PLANS | MAPPED)[name]
    ends_of = mapped if name in MAPPED else twin.tensors_of
    ours, theirs = twin.noise(1, tensors, extent), twin.noise(2, tensors, extent)
    expected_ours, expected_theirs = [a.copy() for a in ours], [a.copy() for a in theirs]
    twin.execute(plan, *((expected_theirs, expected_ours) if write else (expected_ours, expected_theirs)))
    with joined(lanes=0, threads=2) as ends:
        lane = [ends.join(make) for _ in range(3)][-1]
        with Target(ends.far, ends_of(theirs)):
            outcome = ends.move(lane, plan, ends_of(ours), write=write)
    assert outcome == (Ending.GOOD, 0, plan.nbytes, "")
    for got, wanted in zip([*ours, *theirs], [*expected_ours, *expected_theirs], strict=True):
        assert np.array_equal(got, wanted)


def test_both_directions_of_one_lane_at_once() -> None:
    nbytes, rounds = 5 * MIB, 5
    near, far, inbox, outbox = twin.noise(1, 4, nbytes)
    with joined() as ends, Target(ends.far, tensors(far)), Target(ends.near, tensors(near)):
        other = Ends(ends.far, ends.near)

        def pull(ends: Ends, lane: int, into: twin.Bytes, source: twin.Bytes) -> None:
            for _ in range(rounds):
                into[:] = 0
                assert ends.move(lane, one_row(nbytes), tensors(into)).ending is Ending.GOOD
                assert np.array_equal(into, source)

        thread = threading.Thread(target=pull, args=(other, ends.far_lanes[0], outbox, near))
        thread.start()
        pull(ends, ends.lanes[0], inbox, far)
        thread.join()
        assert np.array_equal(outbox, near)


def test_many_jobs_on_many_lanes() -> None:
    """More jobs on each lane than it may have unanswered: the rest waits its turn."""
    source = twin.noise(5, 1, 256 << 10)[0]
    plan = twin.make_plan(np.array([[0, 1000, 3000], [3000, 9000, 200]], np.uint64))
    wanted = np.concatenate([source[1000:4000], source[9000:9200]])
    with joined(lanes=40, threads=3) as ends, Target(ends.far, tensors(source)):
        results = [np.zeros(3200, np.uint8) for _ in range(2000)]
        jobs = [ends.start(ends.lanes[i % 40], plan, tensors(r)) for i, r in enumerate(results)]
        assert {ends.near.wait(job, deadline()).ending for job in jobs} == {Ending.GOOD}
        assert all(np.array_equal(result, wanted) for result in results)


def test_one_lane_asks_for_no_more_than_its_window() -> None:
    with joined() as ends:
        results = [np.zeros(4096, np.uint8) for _ in range(100)]
        jobs = [ends.start(ends.lanes[0], one_row(4096), tensors(result)) for result in results]
        asked: list[object] = []
        while len(asked) < 32:
            asked += events_of(ends.far)
        assert events_of(ends.far, 0.02) == []
        assert ends.near.give_up(jobs[50]).ending is Ending.TIMEOUT
        ends.near.drop_lane(ends.lanes[0])
        endings = {ends.near.wait(job, deadline()).ending for i, job in enumerate(jobs) if i != 50}
        assert endings == {Ending.LOST}


# Who waits for whom


def test_a_peer_that_does_not_read_holds_up_nobody_else() -> None:
    source = twin.noise(5, 1, 64 * MIB)[0]
    into = np.zeros(MIB, np.uint8)
    with joined() as ends, Wire(ends.far) as stopped, Target(ends.far, tensors(source)):
        plan = one_row(source.size)
        stopped.send(READ, 7, lane_ends.encode_plan(plan))
        assert stopped.header() == (DATA, 7, 0, source.size)
        for _ in range(20):
            assert ends.move(ends.lanes[0], one_row(MIB), tensors(into)).ending is Ending.GOOD
        rest = stopped.receive(source.size)
        assert np.array_equal(np.frombuffer(rest, np.uint8), source)
        assert stopped.receive(8) == bytes(8)


def test_a_write_that_waits_for_its_grant_holds_up_only_its_lane() -> None:
    data, memory = twin.noise(6, 2, 8 * MIB)
    small = np.zeros(4096, np.uint8)
    with joined(lanes=2) as ends:
        job = ends.start(ends.lanes[0], one_row(data.size), tensors(data), write=True)
        asked = next_event(ends.far, WriteAsked)
        assert asked.nbytes == data.size
        later = ends.start(ends.lanes[0], one_row(4096), tensors(small))
        target = Target(ends.far, tensors(memory))
        with target:
            assert ends.move(ends.lanes[1], one_row(4096), tensors(small)).ending is Ending.GOOD
            assert ends.near.wait(later, deadline(0.05)).ending is Ending.TIMEOUT
            target.answer(asked)
            assert ends.near.wait(job, deadline()).ending is Ending.GOOD
    assert np.array_equal(memory, data)


# Ends


@pytest.mark.parametrize("by", ["time", "a flag before", "a flag meanwhile"])
def test_a_wait_that_is_cancelled_gives_its_job_up(by: str) -> None:
    """Or whose time is over. Its bytes come later, are dropped, and the lane goes on.

    Regression: a cancelled call over tcp went on to its deadline.
    """
    source = twin.noise(8, 1, 3 * MIB)[0]
    into, again, flag = np.zeros(source.size, np.uint8), np.zeros(100, np.uint8), bytearray(1)
    with joined() as ends:
        job = ends.start(ends.lanes[0], one_row(source.size), tensors(into))
        asked = next_event(ends.far, ReadAsked)
        cancel = threading.Timer(0.05, flag.__setitem__, (0, 1))
        if by == "a flag before":
            flag[0] = 1
        elif by == "a flag meanwhile":
            cancel.start()
        until = deadline(0.01) if by == "time" else NO_DEADLINE
        assert ends.near.wait(job, until, flag) == (Ending.TIMEOUT, 0, 0, "")
        if by == "a flag meanwhile":
            cancel.join()
        with Target(ends.far, tensors(source)) as target:
            target.answer(asked)
            assert ends.move(ends.lanes[0], one_row(100), tensors(again)).ending is Ending.GOOD
        assert not into.any()
        assert np.array_equal(again, source[:100])


def test_a_job_that_has_ended_is_told_once_and_to_whoever_was_cancelled_or_gives_it_up_too() -> None:
    source, into = twin.noise(9, 1, 100)[0], np.zeros((3, 100), np.uint8)
    with joined() as ends, Target(ends.far, tensors(source)):
        one, other = (ends.start(ends.lanes[0], one_row(100), tensors(each)) for each in into[:2])
        later = ends.move(ends.lanes[0], one_row(100), tensors(into[2]))  # they go one after the other
        outcomes = [later, ends.near.wait(one, NO_DEADLINE, bytearray(b"\1")), ends.near.give_up(other)]
        assert outcomes == [(Ending.GOOD, 0, 100, "")] * 3
        for job in (one, other):
            with pytest.raises(ParamError, match="told before"):
                ends.near.give_up(job)
        assert (into == source).all()


HALF_WAY = [(one_row(3 * MIB), 3 * MIB, False), (scattered(SMALL, 1200), SMALL * 1200, True)]


@pytest.mark.parametrize(("plan", "extent", "small"), HALF_WAY, ids=["one row", "small blocks"])
def test_a_read_given_up_half_way_writes_nothing_more(plan: Plan, extent: int, small: bool, engine: LaneEngine) -> None:
    into, again = np.zeros(extent, np.uint8), np.zeros(8, np.uint8)
    first = int(plan.runs[0, 0])
    with Wire(engine) as wire:
        job = engine.start(wire.lane, b"", plan, mapped([into]) if small else tensors(into), write=False)
        kind, id, _, _ = wire.header()
        assert kind == READ
        wire.send(DATA, id, payload=bytes([9]), declared=plan.nbytes)
        wait_until(lambda: into[first] == 9)
        assert engine.give_up(job) == (Ending.TIMEOUT, 0, 1, "")
        wire.sendall(bytes([9]) * (plan.nbytes - 1) + bytes(8))
        later = engine.start(wire.lane, b"", one_row(8), tensors(again), write=False)
        wire.send(DATA, wire.header()[1], payload=b"good" * 2 + bytes(8), declared=8)
        assert engine.wait(later, deadline()).ending is Ending.GOOD  # so that what was dropped has come, too
        assert again.tobytes() == b"good" * 2
        assert np.flatnonzero(into).tolist() == [first]


@pytest.mark.parametrize(("plan", "extent", "small"), HALF_WAY, ids=["one row", "small blocks"])
def test_quiesce_takes_memory_from_under_a_running_write(
    plan: Plan, extent: int, small: bool, engine: LaneEngine
) -> None:
    """Regression: a refusal did not say whether bytes had been written, and the push succeeded."""
    memory, first = np.zeros(extent, np.uint8), int(plan.runs[0, 0])
    with Wire(engine) as wire:
        wire.send(WRITE, 5, b"", bytes([9]), declared=plan.nbytes)
        asked = next_event(engine, WriteAsked)
        engine.reply(asked.lane, asked.id, plan, mapped([memory]) if small else tensors(memory), [], 4, write=True)
        wait_until(lambda: memory[first] == 9)
        engine.quiesce(3)
        wire.sendall(bytes([9]))
        wait_until(lambda: memory[first + 1] == 9)
        engine.quiesce(4)
        wire.sendall(bytes([9]) * (plan.nbytes - 2))
        assert wire.result()[:2] == (5, TORN)
        assert np.flatnonzero(memory).tolist() == [first, first + 1]
        assert wire.write_is_good(engine, 6)


def test_a_write_given_up_half_way_costs_its_lane(engine: LaneEngine) -> None:
    data = twin.noise(8, 1, 16 * MIB)[0]
    with Wire(engine) as wire:
        queued = [engine.start(wire.lane, b"", one_row(data.size), tensors(data), write=True) for _ in range(2)]
        wire.header()
        assert engine.wait(queued[1], deadline(0.01)) == (Ending.TIMEOUT, 0, 0, "")
        assert events_of(engine, 0) == []  # nothing of it was sent: the lane is as it was
        outcome = engine.wait(queued[0], deadline(0.01))
        assert (outcome.ending, outcome.code) == (Ending.TIMEOUT, LOST)
        assert 0 < outcome.nbytes < data.size
        lost = next_event(engine, LaneLost)
        assert (lost.lane, lost.reason) == (wire.lane, "a WRITE was given up half way")
        later = engine.start(wire.lane, b"", one_row(8), tensors(data), write=True)
        assert engine.wait(later, deadline()).text.endswith("is not there any more")


def test_a_lost_lane_fails_its_jobs_only() -> None:
    into = np.zeros(8, np.uint8)
    with joined() as ends, Wire(ends.near) as wire:
        jobs = [ends.near.start(wire.lane, b"", one_row(8), tensors(into), write=False) for _ in range(40)]
        wire.receive(40 * 32)
        wire.sock.close()
        for job in jobs:
            outcome = ends.near.wait(job, deadline())
            assert outcome.ending is Ending.LOST
            assert outcome.text == f"lane {wire.lane}: the peer closed the connection"
        assert next_event(ends.near, LaneLost).reason == "the peer closed the connection"
        assert ends.works(ends.lanes[0])


def test_close_ends_what_waits() -> None:
    into = np.zeros(4096, np.uint8)
    with joined(threads=2) as ends:
        job = ends.start(ends.lanes[0], one_row(4096), tensors(into))
        timer = threading.Timer(0.05, ends.near.close)
        timer.start()
        assert ends.near.wait(job, deadline()).ending is Ending.LOST
        timer.join()
        ends.near.close()
        after = ends.start(ends.lanes[0], one_row(4096), tensors(into))
        assert ends.near.wait(after, deadline()).ending is Ending.LOST
        ends.near.drop_lane(ends.lanes[0])
        ends.near.quiesce(0)


def interrupted_wait(ends: Ends, job: int) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    ends.near.wait(job, deadline())


@pytest.mark.timeout(60)
def test_a_signal_ends_a_wait_and_its_job() -> None:
    source, into = twin.noise(8, 1, 4096)[0], np.zeros(4096, np.uint8)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with joined() as ends:
            begun = False
            while not begun:  # a signal that comes before the wait ends nothing of the engine's
                job = ends.start(ends.lanes[0], one_row(4096), tensors(into))
                asked = next_event(ends.far, ReadAsked)
                with pytest.raises(KeyboardInterrupt):
                    interrupted_wait(ends, job)
                try:
                    ends.near.give_up(job)
                except ParamError as error:
                    begun = "never started" in str(error)
            with Target(ends.far, tensors(source)) as target:
                target.answer(asked)
                assert ends.move(ends.lanes[0], one_row(1), tensors(np.zeros(1, np.uint8))).nbytes == 1
            assert not into.any()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("memory", ["gone", "read-only"])
def test_memory_of_the_user_that_cannot_be_used_costs_the_lane_only(memory: str, write: bool) -> None:
    """The kernel says so; a copy or a cipher of ours would end the process."""
    nbytes, other = SMALL * 1200, np.zeros(SMALL * 1200, np.uint8)
    with TemporaryFile() as file:
        file.truncate(nbytes)
        if memory == "gone":
            bad = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
            file.truncate(0)
            ours, theirs = (bad, other) if write else (other, bad)  # at the end that sends
        else:
            bad = np.frombuffer(mmap.mmap(-1, nbytes, prot=mmap.PROT_READ), np.uint8)
            ours, theirs = (other, bad) if write else (bad, other)
        for plan in (scattered(SMALL, 1200), one_row(nbytes)):
            with joined(2) as ends, Target(ends.far, tensors(theirs)):
                assert ends.move(ends.lanes[0], plan, tensors(ours), write=write).ending is Ending.LOST
                assert Ends(ends.far, ends.near).works(ends.far_lanes[1])
        assert not other.any()


def test_threads_are_named_and_take_no_signals() -> None:
    before = kernel_threads()
    with joined(threads=2):
        names = [name for number, name in kernel_threads().items() if number not in before]
        ours = sorted(name for name in names if name.startswith("lldd-"))
        assert ours == ["lldd-data-0", "lldd-data-0", "lldd-data-1", "lldd-data-1"]  # of either engine


def test_a_forked_child_closes_its_copies_and_harms_nobody() -> None:
    others, ours = descriptors(), ("eventpoll", "eventfd", "socket:", "memfd:lldd")
    with joined(lanes=3, threads=2) as ends:
        assert ends.works(ends.lanes[0])  # so that there is all that lanes make when it is needed

        def close() -> None:
            for call in (ends.near.poll_events, lambda: ends.near.quiesce(0), lambda: ends.near.drop_lane(1)):
                with pytest.raises(ParamError):
                    call()
            ends.close()
            ends.close()
            assert not [each for each in descriptors() if each not in others and any(kind in each for kind in ours)]

        in_a_forked_child(close)
        assert all(map(ends.works, ends.lanes))


# Arguments


def test_plans_outside_the_local_tensors_start_nothing() -> None:
    memory = np.zeros(64, np.uint8)
    local = tensors(memory)
    beyond = twin.make_plan(native.plan_row(60, 60, 5))
    wrapping = Plan(0, 0, 1, np.array([[2**64 - 1, 2**64 - 1, 2]], np.uint64), False, 2)
    missing = twin.make_plan(native.plan_row(0, 0, 1), dst_first=1, src_first=1)
    lying = Plan(0, 0, 1, native.plan_row(0, 0, 8), False, 9)
    with joined() as ends:
        for plan in (beyond, wrapping, missing, lying):
            for write in (False, True):
                with pytest.raises(ParamError):
                    ends.start(ends.lanes[0], plan, local, write=write)
                with pytest.raises(ParamError):
                    ends.far.reply(ends.far_lanes[0], 1, plan, local, [], 0, write=write)
            with pytest.raises(ParamError):
                native.check_plan(plan, local.native, local.native)
        with pytest.raises(ParamError, match="meta has 1048577 bytes"):
            ends.near.start(ends.lanes[0], bytes(MIB + 1), one_row(8), local, write=False)
        with pytest.raises(ParamError, match="divisible by 8"):
            ends.far.reply(ends.far_lanes[0], 1, one_row(8), local, [(12, 1)], 0, write=False)
        with pytest.raises(ParamError, match="success"):
            ends.far.refuse(ends.far_lanes[0], 1, 0, "")
        assert events_of(ends.far, 0) == []
        job = ends.start(ends.lanes[0], one_row(8), local)
        for size in (0, 2):
            with pytest.raises(ParamError, match=f"^cancelled has {size} bytes: must be one"):
                ends.near.wait(job, NO_DEADLINE, bytearray(size))
        assert ends.near.give_up(job).ending is Ending.TIMEOUT


def test_impossible_engines_and_lanes() -> None:
    for threads in (0, -1, 65):
        with pytest.raises(ParamError, match=f"threads is {threads}"):
            LaneEngine(threads)
    engine = LaneEngine(1)
    with pytest.raises(ParamError, match="descriptor"):
        engine.add_lane(-1)
    with pytest.raises(ParamError, match="reserved"):
        engine.attach_lane(1234, -1)
    with pytest.raises(ParamError, match="never started"):
        engine.give_up(1)
    engine.drop_lane(1234)
    engine.close()


def test_an_engine_takes_the_lanes_of_a_thousand_links_and_refuses_what_is_beyond() -> None:
    most = 10 * 1024  # of each of so many links: MAX_LANES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < most + 512:
        pytest.skip(f"this process may open {hard} descriptors at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    near, far = socket.socketpair()
    try:
        with near, far, closing(LaneEngine(1)) as engine:
            lanes = [engine.add_lane(os.dup(near.fileno())) for _ in range(most)]
            with pytest.raises(ParamError, match=f"at most {most} lanes"):
                engine.add_lane(os.dup(near.fileno()))
            engine.drop_lane(lanes[-1])
            engine.add_lane(os.dup(near.fileno()))  # there is room again
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
