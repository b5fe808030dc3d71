"""The native counts: who is inside of what can be shut, and totals of operations."""

from __future__ import annotations

import threading

import pytest

from llm_datadist._native import Meter, Timer, Turnstile


def test_an_open_one_lets_everybody_in_and_out() -> None:
    turnstile = Turnstile()
    assert turnstile.is_open
    assert turnstile.try_enter()
    assert turnstile.try_enter()
    assert turnstile.inside == 2
    assert turnstile.try_leave()
    assert turnstile.inside == 1


def test_a_shut_one_lets_nobody_in_and_the_last_one_out_knows() -> None:
    turnstile = Turnstile()
    for _ in range(2):
        turnstile.try_enter()
    assert turnstile.shut() == 2
    assert not turnstile.is_open
    assert not turnstile.try_enter()
    assert not turnstile.try_leave()
    assert turnstile.inside == 2  # neither has counted
    assert [turnstile.leave(), turnstile.leave()] == [1, 0]


def test_only_the_first_to_shut_it_is_told_how_many_are_inside() -> None:
    turnstile = Turnstile()
    assert [turnstile.shut(), turnstile.shut()] == [0, -1]


def test_it_opens_again_and_may_begin_shut() -> None:
    turnstile = Turnstile(is_open=False)
    assert not turnstile.try_enter()
    turnstile.enter()  # whoever has another right to
    turnstile.open()
    assert turnstile.try_enter()
    assert turnstile.shut() == 2


def test_one_of_many_threads_is_the_last_one_out() -> None:
    turnstile, here = Turnstile(), threading.Barrier(9)
    last: list[int] = []

    def visit(number: int) -> None:
        here.wait(30)
        while turnstile.try_enter():
            if not turnstile.try_leave() and turnstile.leave() == 0:
                last.append(number)

    visitors = [threading.Thread(target=visit, args=(number,)) for number in range(8)]
    for each in visitors:
        each.start()
    here.wait(30)
    nobody = turnstile.shut() == 0
    for each in visitors:
        each.join(30)
    assert turnstile.inside == 0
    assert len(last) == (0 if nobody else 1)


def test_a_meter_adds_up() -> None:
    meter = Meter()
    meter.add(10)
    meter.add(5, 0.5, failed=True)
    assert (meter.count, meter.errors, meter.nbytes, meter.seconds) == (2, 1, 15, 0.5)


def test_a_timer_counts_its_block_once_with_what_it_moved() -> None:
    meter = Meter()
    with Timer(meter) as timer:
        timer.nbytes = 7
        assert meter.count == 0
    assert (meter.count, meter.errors, meter.nbytes) == (1, 0, 7)
    assert meter.seconds == timer.seconds > 0


def test_a_timer_counts_a_block_that_fails_and_lets_the_error_through() -> None:
    meter = Meter()
    with pytest.raises(KeyError, match="mine"), Timer(meter):
        raise KeyError("mine")
    assert (meter.count, meter.errors, meter.nbytes) == (1, 1, 0)


def test_a_timer_needs_a_meter() -> None:
    with pytest.raises((TypeError, RuntimeError)):
        Timer("meter")  # type: ignore[arg-type]
