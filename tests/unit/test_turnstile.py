"""The native counts: how many are inside of what can be shut, and totals of operations."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from llm_datadist._native import Meter, OperationMeter, Timer, UseGate
from llm_datadist._native._native import FIRST_DURATION_BIT, LAST_DURATION_BIT
from llm_datadist.metrics import DURATION_BOUNDS, quantile


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


def test_a_timer_counts_once_in_a_bucket_of_its_transport_and_among_the_failures_of_its_exception() -> None:
    added, meter = Meter(), OperationMeter()
    added.add(10)
    added.add(5, 0.5, failed=True)
    assert (added.count, added.errors, added.nbytes, added.seconds) == (2, 1, 15, 0.5)
    for before, transport in enumerate(("shm", "tcp", "".join(["s", "hm"]))):  # the last one is another object
        with Timer(meter) as timer:
            timer.nbytes, timer.transport = 8, transport
            assert meter.count == before
    assert (meter.count, meter.errors, meter.nbytes) == (3, 0, 24)
    for error in (KeyError, ValueError, KeyError):
        with pytest.raises(error, match="mine"), Timer(meter):
            raise error("mine")
    assert (meter.count, meter.errors, meter.nbytes) == (6, 3, 24)
    with pytest.raises((TypeError, RuntimeError)):
        Timer("meter")  # type: ignore[arg-type]
    found = {name: (nbytes, sum(buckets)) for name, nbytes, _, buckets in meter.transports}
    assert found == {"shm": (16, 2), "tcp": (8, 1), "": (0, 3)}
    assert 0 < sum(seconds for _, _, seconds, _ in meter.transports) == pytest.approx(meter.seconds)
    assert meter.failures == {"KeyError": 2, "ValueError": 1}
    sizes = {len(buckets) for *_, buckets in meter.transports}
    assert sizes == {len(DURATION_BOUNDS) + 1}
    assert DURATION_BOUNDS[0] == 2**FIRST_DURATION_BIT / 1e9
    assert DURATION_BOUNDS[-1] == 2**LAST_DURATION_BIT / 1e9


def test_the_bucket_of_one_operation_is_that_of_its_duration() -> None:
    for _ in range(200):
        meter = OperationMeter()
        with Timer(meter) as timer:
            pass
        ((_, _, seconds, buckets),) = meter.transports
        at = buckets.index(1)
        assert seconds == timer.seconds <= DURATION_BOUNDS[at]
        assert at == 0 or seconds > DURATION_BOUNDS[at - 1]


def test_a_quantile_is_the_bound_of_the_bucket_where_it_is_reached() -> None:
    buckets = [0] * (len(DURATION_BOUNDS) + 1)
    assert quantile(buckets, 0.5) == 0.0
    buckets[3], buckets[5] = 98, 2
    assert [quantile(buckets, share) for share in (0.5, 0.98, 0.99)] == [DURATION_BOUNDS[at] for at in (3, 3, 5)]
    buckets[-1] = 900
    assert quantile(buckets, 0.99) == math.inf
