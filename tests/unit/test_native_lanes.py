"""The lanes: every byte of both ends, both directions, who waits for whom, and what is left behind."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
import warnings
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from faults.lane_ends import (
    DATA,
    READ,
    Ends,
    Target,
    Wire,
    deadline,
    encode_plan,
    events_of,
    joined,
    next_event,
    one_row,
    tcp_pair,
)
from llm_datadist._native import (
    NO_DEADLINE,
    Ending,
    LaneEngine,
    LaneLost,
    Plan,
    ReadAsked,
    Tensors,
    WriteAsked,
    check_plan,
    plan_row,
)
from llm_datadist._native.lanes import LOST
from llm_datadist.errors import ParamError
from llm_datadist.testing.scene import kernel_threads
from tests.support import twin

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("kind_of_lane", "nothing_left")


def random_plan(seed: int, *, tensors: int, extent: int, runs: int) -> Plan:
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


def check_moves(ends: Ends, plan: Plan, seed: int, *, tensors: int, extent: int, write: bool) -> None:
    ours, theirs = twin.noise(seed, tensors, extent), twin.noise(seed + 1, tensors, extent)
    expected_ours, expected_theirs = [a.copy() for a in ours], [a.copy() for a in theirs]
    if write:
        twin.execute(plan, expected_theirs, expected_ours)
    else:
        twin.execute(plan, expected_ours, expected_theirs)
    with Target(ends.far, twin.tensors_of(theirs)):
        outcome = ends.move(ends.lanes[seed % len(ends.lanes)], plan, twin.tensors_of(ours), write=write)
    assert outcome == (Ending.GOOD, 0, plan.nbytes, "")
    assert all(np.array_equal(a, b) for a, b in zip(ours, expected_ours, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(theirs, expected_theirs, strict=True))


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("make", [socket.socketpair, tcp_pair])
def test_exactly_the_planned_bytes_move(make: Callable[[], tuple[socket.socket, socket.socket]], write: bool) -> None:
    """Payloads below and above what is coalesced, of few and of thousands of runs."""
    shapes = [(1, 64, 1), (3, 5000, 7), (5, 70_000, 40), (4, 600_000, 5000), (2, 3 * MIB, 3)]
    with joined(lanes=0, threads=2) as ends:
        for _ in range(3):
            ends.join(make)
        for seed, (tensors, extent, runs) in enumerate(shapes):
            plan = random_plan(seed, tensors=tensors, extent=extent, runs=runs)
            check_moves(ends, plan, seed, tensors=tensors, extent=extent, write=write)


@pytest.mark.parametrize("write", [False, True])
def test_jobs_of_no_bytes_end_well(write: bool) -> None:
    nothing = twin.make_plan(np.array([[3, 3, 0]], np.uint64))
    with joined() as ends:
        check_moves(ends, nothing, 0, tensors=1, extent=8, write=write)


@pytest.mark.parametrize("write", [False, True])
def test_ordered_runs_take_effect_in_their_order(write: bool) -> None:
    table = np.array([[10, 0, 6], [12, 20, 6], [10, 30, 3], [0, 40, 2], [10, 50, 1]], np.uint64)
    with joined() as ends:
        check_moves(ends, twin.make_plan(table, ordered=True), 3, tensors=1, extent=64, write=write)


def test_both_directions_of_one_lane_at_once() -> None:
    nbytes, rounds = 5 * MIB, 5
    near, far, inbox, outbox = twin.noise(1, 4, nbytes)
    with joined() as ends, Target(ends.far, twin.tensors_of([far])), Target(ends.near, twin.tensors_of([near])):
        other = Ends(ends.far, ends.near)

        def pull(ends: Ends, lane: int, into: twin.Bytes, source: twin.Bytes) -> None:
            for _ in range(rounds):
                into[:] = 0
                assert ends.move(lane, one_row(nbytes), twin.tensors_of([into])).ending is Ending.GOOD
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
    with joined(lanes=40, threads=3) as ends, Target(ends.far, twin.tensors_of([source])):
        results = [np.zeros(3200, np.uint8) for _ in range(2000)]
        jobs = [ends.start(ends.lanes[i % 40], plan, twin.tensors_of([r])) for i, r in enumerate(results)]
        assert {ends.near.wait(job, deadline()).ending for job in jobs} == {Ending.GOOD}
        assert all(np.array_equal(result, wanted) for result in results)


def test_one_lane_asks_for_no_more_than_its_window() -> None:
    with joined() as ends:
        results = [np.zeros(4096, np.uint8) for _ in range(100)]
        jobs = [ends.start(ends.lanes[0], one_row(4096), twin.tensors_of([result])) for result in results]
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
    with joined() as ends, Wire(ends.far) as stopped, Target(ends.far, twin.tensors_of([source])):
        plan = one_row(source.size)
        stopped.send(READ, 7, encode_plan(plan))
        assert stopped.header() == (DATA, 7, 0, source.size)
        for _ in range(20):
            assert ends.move(ends.lanes[0], one_row(MIB), twin.tensors_of([into])).ending is Ending.GOOD
        rest = stopped.receive(source.size)
        assert np.array_equal(np.frombuffer(rest, np.uint8), source)
        assert stopped.receive(8) == bytes(8)


def test_a_write_that_waits_for_its_grant_holds_up_only_its_lane() -> None:
    data, memory = twin.noise(6, 2, 8 * MIB)
    small = np.zeros(4096, np.uint8)
    with joined(lanes=2) as ends:
        job = ends.start(ends.lanes[0], one_row(data.size), twin.tensors_of([data]), write=True)
        asked = next_event(ends.far, WriteAsked)
        assert asked.nbytes == data.size
        later = ends.start(ends.lanes[0], one_row(4096), twin.tensors_of([small]))
        target = Target(ends.far, twin.tensors_of([memory]))
        with target:
            assert ends.move(ends.lanes[1], one_row(4096), twin.tensors_of([small])).ending is Ending.GOOD
            assert ends.near.wait(later, deadline(0.05)).ending is Ending.TIMEOUT
            target.answer(asked)
            assert ends.near.wait(job, deadline()).ending is Ending.GOOD
    assert np.array_equal(memory, data)


# Ends


def test_a_read_that_timed_out_writes_nothing_more() -> None:
    """Its bytes come later, are dropped, and the lane goes on."""
    source = twin.noise(8, 1, 3 * MIB)[0]
    into = np.zeros(source.size, np.uint8)
    with joined() as ends:
        job = ends.start(ends.lanes[0], one_row(source.size), twin.tensors_of([into]))
        asked = next_event(ends.far, ReadAsked)
        assert ends.near.wait(job, deadline(0.01)) == (Ending.TIMEOUT, 0, 0, "")
        with Target(ends.far, twin.tensors_of([source])) as target:
            target.answer(asked)
            again = np.zeros(100, np.uint8)
            assert ends.move(ends.lanes[0], one_row(100), twin.tensors_of([again])).ending is Ending.GOOD
        assert not into.any()
        assert np.array_equal(again, source[:100])


@pytest.mark.parametrize("early", [True, False])
def test_a_wait_that_is_cancelled_gives_its_job_up(early: bool) -> None:
    """Before it begins, or meanwhile; the clock has no part in it."""
    source, into = np.ones(100, np.uint8), np.zeros(100, np.uint8)
    flag = bytearray(1)
    with joined() as ends:
        job = ends.start(ends.lanes[0], one_row(into.size), twin.tensors_of([into]))
        asked = next_event(ends.far, ReadAsked)
        cancel = threading.Timer(0 if early else 0.05, flag.__setitem__, (0, 1))
        cancel.start()
        if early:
            cancel.join()
        assert ends.near.wait(job, NO_DEADLINE, flag) == (Ending.TIMEOUT, 0, 0, "")
        cancel.join()
        with Target(ends.far, twin.tensors_of([source])) as target:
            target.answer(asked)
            again = np.zeros(100, np.uint8)
            assert ends.move(ends.lanes[0], one_row(100), twin.tensors_of([again])).ending is Ending.GOOD
        assert not into.any()
        assert again.all()


def test_a_job_that_has_ended_is_told_to_whoever_was_cancelled_too() -> None:
    source, into = twin.noise(9, 1, 100)[0], np.zeros(100, np.uint8)
    with joined() as ends, Target(ends.far, twin.tensors_of([source])):
        job = ends.start(ends.lanes[0], one_row(100), twin.tensors_of([into]))
        later = ends.move(ends.lanes[0], one_row(100), twin.tensors_of([into.copy()]))  # they go one after the other
        assert later.ending is Ending.GOOD
        assert ends.near.wait(job, NO_DEADLINE, bytearray(b"\1")) == (Ending.GOOD, 0, 100, "")
        assert np.array_equal(into, source)


@pytest.mark.parametrize("size", [0, 2])
def test_a_flag_of_a_wait_is_one_byte(size: int) -> None:
    into = np.zeros(100, np.uint8)
    with joined() as ends:
        job = ends.start(ends.lanes[0], one_row(into.size), twin.tensors_of([into]))
        with pytest.raises(ParamError, match=f"^cancelled has {size} bytes: must be one"):
            ends.near.wait(job, NO_DEADLINE, bytearray(size))
        assert ends.near.give_up(job).ending is Ending.TIMEOUT


def test_a_read_that_timed_out_half_way_writes_nothing_more() -> None:
    nbytes = 3 * MIB
    into = np.zeros(nbytes, np.uint8)
    engine = LaneEngine(1)
    with Wire(engine) as wire:
        job = engine.start_read(wire.lane, b"", one_row(nbytes), twin.tensors_of([into]))
        kind, id, _, _ = wire.header()
        assert kind == READ
        wire.send(DATA, id, payload=bytes([9]) * MIB, declared=nbytes)
        outcome = engine.wait(job, deadline(0.2))
        assert outcome.ending is Ending.TIMEOUT
        assert 0 < outcome.nbytes <= MIB
        into[:] = 0
        wire.sendall(bytes([9]) * (nbytes - MIB) + bytes(8))
        again = engine.start_read(wire.lane, b"", one_row(4), twin.tensors_of([into]))
        _, id, _, _ = wire.header()
        wire.send(DATA, id, payload=b"good" + bytes(8), declared=4)
        assert engine.wait(again, deadline()).ending is Ending.GOOD
        assert into[:4].tobytes() == b"good"
        assert not into[4:].any()
    engine.close()


def test_a_write_given_up_half_way_costs_its_lane() -> None:
    data = twin.noise(8, 1, 16 * MIB)[0]
    engine = LaneEngine(1)
    with Wire(engine) as wire:
        queued = [engine.start_write(wire.lane, b"", one_row(data.size), twin.tensors_of([data])) for _ in range(2)]
        wire.header()
        assert engine.wait(queued[1], deadline(0.01)) == (Ending.TIMEOUT, 0, 0, "")
        assert events_of(engine, 0) == []  # nothing of it was sent: the lane is as it was
        outcome = engine.wait(queued[0], deadline(0.01))
        assert (outcome.ending, outcome.code) == (Ending.TIMEOUT, LOST)
        assert 0 < outcome.nbytes < data.size
        lost = next_event(engine, LaneLost)
        assert (lost.lane, lost.reason) == (wire.lane, "a WRITE was given up half way")
        assert engine.wait(
            engine.start_write(wire.lane, b"", one_row(8), twin.tensors_of([data])), deadline()
        ).text.endswith("is not there any more")
    engine.close()


def test_a_lost_lane_fails_its_jobs_only() -> None:
    source = twin.noise(8, 1, 4096)[0]
    into = np.zeros(4096, np.uint8)
    with joined() as ends, Wire(ends.near) as wire:
        jobs = [ends.near.start_read(wire.lane, b"", one_row(8), twin.tensors_of([into])) for _ in range(40)]
        wire.receive(40 * 32)
        wire.sock.close()
        for job in jobs:
            outcome = ends.near.wait(job, deadline())
            assert outcome.ending is Ending.LOST
            assert outcome.text == f"lane {wire.lane}: the peer closed the connection"
        assert next_event(ends.near, LaneLost).reason == "the peer closed the connection"
        with Target(ends.far, twin.tensors_of([source])):
            assert ends.move(ends.lanes[0], one_row(4096), twin.tensors_of([into])).ending is Ending.GOOD


def test_close_ends_what_waits() -> None:
    into = np.zeros(4096, np.uint8)
    with joined(threads=2) as ends:
        job = ends.start(ends.lanes[0], one_row(4096), twin.tensors_of([into]))
        timer = threading.Timer(0.05, ends.near.close)
        timer.start()
        assert ends.near.wait(job, deadline()).ending is Ending.LOST
        timer.join()
        ends.near.close()
        assert ends.near.closed
        after = ends.start(ends.lanes[0], one_row(4096), twin.tensors_of([into]))
        assert ends.near.wait(after, deadline()).ending is Ending.LOST
        ends.near.drop_lane(ends.lanes[0])
        ends.near.quiesce(0)


def test_a_signal_ends_a_wait_and_its_job() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    source, into = twin.noise(8, 1, 4096)[0], np.zeros(4096, np.uint8)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with joined() as ends:
            job = ends.start(ends.lanes[0], one_row(4096), twin.tensors_of([into]))
            asked = next_event(ends.far, ReadAsked)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Interrupted):
                ends.near.wait(job, deadline())
            with pytest.raises(ParamError, match="never started"):
                ends.near.wait(job, deadline())
            with Target(ends.far, twin.tensors_of([source])) as target:
                target.answer(asked)
                assert ends.move(ends.lanes[0], one_row(1), twin.tensors_of([np.zeros(1, np.uint8)])).nbytes == 1
            assert not into.any()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_threads_are_named_and_take_no_signals() -> None:
    before = kernel_threads()
    with joined(threads=2) as ends:
        names = [name for number, name in kernel_threads().items() if number not in before]
        assert sorted(name for name in names if name.startswith("lldd-")) == [
            "lldd-data-0",
            "lldd-data-0",
            "lldd-data-1",
            "lldd-data-1",
        ]
        assert repr(ends.near) == "<LaneEngine 2 threads>"


def test_a_forked_child_closes_its_copies_and_harms_nobody() -> None:
    source, into = twin.noise(8, 1, 4096)[0], np.zeros(4096, np.uint8)
    others = set(os.listdir("/proc/self/fd"))
    with joined(lanes=3, threads=2) as ends:
        with Target(ends.far, twin.tensors_of([source])):  # so that there is all that lanes make when it is needed
            assert ends.move(ends.lanes[0], one_row(4096), twin.tensors_of([into])).ending is Ending.GOOD
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
            if pid == 0:
                os._exit(_child_of_fork(ends, others))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with Target(ends.far, twin.tensors_of([source])):
            for lane in ends.lanes:
                assert ends.move(lane, one_row(4096), twin.tensors_of([into])).ending is Ending.GOOD


def _child_of_fork(ends: Ends, others: set[str]) -> int:
    signal.alarm(20)
    try:
        for call in (ends.near.poll_events, lambda: ends.near.quiesce(0), lambda: ends.near.drop_lane(1)):
            try:
                call()
            except ParamError:
                continue
            return 1
        ends.close()
        ends.close()
        left = [fd for fd in os.listdir("/proc/self/fd") if fd not in others and _is_ours(fd)]
        return 0 if not left else 4
    except BaseException:  # noqa: BLE001 - whatever it is, the child must leave through _exit
        return 2


def _is_ours(fd: str) -> bool:
    try:
        return any(
            kind in os.readlink(f"/proc/self/fd/{fd}") for kind in ("eventpoll", "eventfd", "socket:", "memfd:lldd")
        )
    except FileNotFoundError:
        return False


# Arguments


def test_plans_outside_the_local_tensors_start_nothing() -> None:
    memory = np.zeros(64, np.uint8)
    tensors = twin.tensors_of([memory])
    beyond = twin.make_plan(plan_row(60, 60, 5))
    wrapping = Plan(0, 0, 1, np.array([[2**64 - 1, 2**64 - 1, 2]], np.uint64), False, 2)
    missing = twin.make_plan(plan_row(0, 0, 1), dst_first=1, src_first=1)
    lying = Plan(0, 0, 1, plan_row(0, 0, 8), False, 9)
    with joined() as ends:
        for plan in (beyond, wrapping, missing, lying):
            for write in (False, True):
                with pytest.raises(ParamError):
                    ends.start(ends.lanes[0], plan, tensors, write=write)
            for verb in (ends.far.serve_read, ends.far.accept_write):
                with pytest.raises(ParamError):
                    verb(ends.far_lanes[0], 1, plan, tensors, [], 0)
            with pytest.raises(ParamError):
                check_plan(plan, tensors, tensors)
        with pytest.raises(ParamError, match="meta has 1048577 bytes"):
            ends.near.start_read(ends.lanes[0], bytes(MIB + 1), one_row(8), tensors)
        with pytest.raises(ParamError, match="divisible by 8"):
            ends.far.serve_read(ends.far_lanes[0], 1, one_row(8), tensors, [(12, 1)], 0)
        with pytest.raises(ParamError, match="success"):
            ends.far.refuse(ends.far_lanes[0], 1, 0, "")
        assert events_of(ends.far, 0) == []


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


def test_a_started_job_is_forgotten_once_its_end_is_told() -> None:
    source, into = twin.noise(8, 1, 64)[0], np.zeros(64, np.uint8)
    with joined() as ends, Target(ends.far, twin.tensors_of([source])):
        job = ends.start(ends.lanes[0], one_row(64), Tensors(np.array([into.ctypes.data], np.uint64), 64))
        time.sleep(0.01)
        assert ends.near.give_up(job) in ((Ending.GOOD, 0, 64, ""), (Ending.TIMEOUT, 0, 0, ""))
        with pytest.raises(ParamError, match="told before"):
            ends.near.give_up(job)
