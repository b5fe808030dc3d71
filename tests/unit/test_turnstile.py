"""The native counts: how many are inside of what can be shut, and totals of operations."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from llm_datadist._native import Meter, Timer, UseGate


def test_an_open_gate_lets_all_in_and_a_shut_one_none_and_the_last_one_out_knows() -> None:
    use_gate = UseGate()
    assert use_gate.is_open
    assert [use_gate.try_enter(), use_gate.try_enter(), use_gate.try_enter()] == [True] * 3
    assert use_gate.inside == 3
    assert use_gate.try_leave()
    assert use_gate.inside == 2
    assert [use_gate.shut(), use_gate.shut()] == [2, -1], "only the first to shut it is told how many are inside"
    assert not use_gate.is_open
    assert [use_gate.try_enter(), use_gate.try_leave()] == [False, False]
    assert use_gate.inside == 2  # neither has counted
    assert [use_gate.leave(), use_gate.leave()] == [1, 0]
    use_gate = UseGate(is_open=False)
    assert not use_gate.try_enter()
    use_gate.enter()  # with another right to
    use_gate.open()
    assert use_gate.try_enter()
    assert use_gate.shut() == 2


def test_one_of_many_threads_is_the_last_one_out() -> None:
    use_gate, here = UseGate(), threading.Barrier(9)
    last: list[int] = []

    def visit(number: int) -> None:
        here.wait(30)
        while use_gate.try_enter():
            if not use_gate.try_leave() and use_gate.leave() == 0:
                last.append(number)

    with ThreadPoolExecutor(8) as threads:
        visits = [threads.submit(visit, number) for number in range(8)]
        here.wait(30)
        empty = use_gate.shut() == 0
    assert [each.exception() for each in visits] == [None] * 8
    assert (use_gate.inside, len(last)) == (0, 0 if empty else 1)


def test_a_meter_adds_up_and_a_timer_counts_its_block_once_also_when_it_fails() -> None:
    meter = Meter()
    meter.add(10)
    meter.add(5, 0.5, failed=True)
    assert (meter.count, meter.errors, meter.nbytes, meter.seconds) == (2, 1, 15, 0.5)
    meter = Meter()
    with Timer(meter) as timer:
        timer.nbytes = 7
        assert meter.count == 0
    assert (meter.count, meter.errors, meter.nbytes) == (1, 0, 7)
    assert meter.seconds == timer.seconds > 0
    with pytest.raises(KeyError, match="mine"), Timer(meter):
        raise KeyError("mine")
    assert (meter.count, meter.errors, meter.nbytes) == (2, 1, 7)
    with pytest.raises((TypeError, RuntimeError)):
        Timer("meter")  # type: ignore[arg-type]
