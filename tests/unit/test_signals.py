"""Calls that hold signals: handlers run where they wait, or after them."""

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llm_datadist._deadline import Deadline
from llm_datadist._native import deliver_signals
from llm_datadist._native.signals import hold_signals, public_calls_hold_signals, put_off

FIRST, SECOND = signal.SIGUSR1, signal.SIGUSR2


class Raised(Exception):
    pass


@pytest.fixture
def came() -> Iterator[list[int]]:
    """Both signals raise; the list has those whose handlers have run."""
    came: list[int] = []

    def handler(number: int, _: object) -> None:
        came.append(number)
        raise Raised(number)

    before = [signal.signal(each, handler) for each in (FIRST, SECOND)]
    yield came
    for number, each in zip((FIRST, SECOND), before, strict=True):
        signal.signal(number, each)


def test_no_handler_runs_where_the_deadline_of_a_call_holds_it_back(came: list[int]) -> None:
    deadline = Deadline(20)

    @hold_signals
    def call() -> None:
        signal.raise_signal(FIRST)
        with deadline.without_handlers():
            assert not deadline.poll(lambda: False)
        assert came == []
        deadline.next_turn()

    with pytest.raises(Raised):
        call()
    assert came == [FIRST]


@pytest.mark.parametrize("wait", [deliver_signals, lambda: Deadline(1000).poll(lambda: False)])
def test_a_handler_runs_where_the_call_waits_and_no_other(came: list[int], wait: Callable[[], None]) -> None:
    seen: list[list[int]] = []
    signal.signal(SECOND, lambda number, _: came.append(number))  # it would raise at any instruction after the call

    @hold_signals
    def call() -> None:
        signal.raise_signal(SECOND)
        signal.raise_signal(FIRST)
        try:
            wait()
        finally:
            seen.append(list(came))
            deliver_signals()
            seen.append(list(came))

    with pytest.raises(Raised):
        call()
    assert seen == [[FIRST], [FIRST]]
    assert came == [FIRST, SECOND], "the second after the call"


def test_a_whole_call_runs_no_handler_and_a_call_inside_does_not_end_it(came: list[int]) -> None:
    inner = hold_signals(deliver_signals)

    def call() -> list[int]:
        signal.raise_signal(FIRST)
        inner()
        deliver_signals()
        return list(came)

    seen = []
    with pytest.raises(Raised):
        seen.append(hold_signals(call, whole=True)())
    assert (seen, came) == ([], [FIRST])


def test_what_a_call_has_made_is_taken_back_when_an_exception_replaces_it(came: list[int]) -> None:
    undone = []

    @public_calls_hold_signals(make="drop")
    class Maker:
        def make(self, name: str) -> str:
            """Make it."""
            signal.raise_signal(FIRST)
            return name

        def drop(self, name: str) -> None:
            undone.append(name)

    with pytest.raises(Raised):
        Maker().make(name="a")
    assert (undone, came) == (["a"], [FIRST])
    assert (Maker.make.__doc__, str(inspect.signature(Maker().make))) == ("Make it.", "(name: str) -> str")
    assert "Maker.make" in repr(Maker.make)
    assert inspect.isfunction(Maker.make)
    assert not inspect.iscoroutinefunction(Maker.make)


def test_a_handler_runs_after_the_call_also_one_set_in_it_which_is_shown_as_it_was_set(came: list[int]) -> None:
    seen: list[Any] = []

    @hold_signals
    def call() -> None:
        handler = signal.getsignal(FIRST)
        assert signal.signal(FIRST, signal.SIG_IGN) is handler
        signal.signal(FIRST, handler)
        signal.raise_signal(FIRST)
        seen.extend([signal.getsignal(FIRST) is handler, *came])

    with pytest.raises(Raised):
        call()
    assert (seen, came) == ([True], [FIRST])
    with pytest.raises(TypeError):
        signal.signal(FIRST, "no handler")  # type: ignore[arg-type]  # that is the point


def test_a_signal_that_another_thread_receives_is_held_for_the_main_thread(came: list[int]) -> None:
    seen = []

    @hold_signals
    def call() -> None:
        sender = threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), FIRST))
        sender.start()
        sender.join()
        seen.extend(came)

    with pytest.raises(Raised):
        call()
    assert (seen, came) == ([], [FIRST])
    elsewhere: list[str] = []
    thread = threading.Thread(target=hold_signals(lambda: elsewhere.append("a plain call")))
    thread.start()
    thread.join()
    assert elsewhere == ["a plain call"]


def test_a_fork_in_a_held_call_holds_nothing_of_the_parent(came: list[int]) -> None:
    @hold_signals
    def call() -> int:
        signal.raise_signal(FIRST)
        forked: list[int] = []

        def fork() -> None:
            pid = os.fork()
            if pid == 0:  # here this is the main thread, and in no call
                try:
                    signal.raise_signal(SECOND)
                except Raised as error:
                    os._exit(10 if error.args == (SECOND,) else 11)
                os._exit(12)
            forked.append(pid)

        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        return os.waitstatus_to_exitcode(os.waitpid(forked[0], 0)[1])

    codes = []
    with pytest.raises(Raised):
        codes.append(call())
    assert came == [FIRST]
    signals: list[int] = []
    before = signal.signal(FIRST, lambda number, _: signals.append(number))
    try:
        assert hold_signals(call)() == 10
    finally:
        signal.signal(FIRST, before)
    assert signals == [FIRST]


def test_what_is_put_off_is_done_after_the_outermost_call(monkeypatch: pytest.MonkeyPatch, came: list[int]) -> None:
    done: list[object] = []
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: reported.append(what.exc_value))

    def work(number: int) -> None:
        signal.raise_signal(FIRST)
        deliver_signals()
        done.append((number, list(came)))
        if number == 1:
            assert not put_off(work, 3), "it is the only call of this thread now"
            inner(4)
            raise ValueError(number)

    @hold_signals
    def inner(number: int) -> None:
        done.append(f"{number} put off: {put_off(work, number)}")

    @hold_signals
    def outer() -> None:
        assert not put_off(work, 0)
        inner(1)
        inner(2)
        done.append("outer ends")

    assert not put_off(work, 0), "no call at all"
    with pytest.raises(Raised):
        outer()
    assert done[:3] == ["1 put off: True", "2 put off: True", "outer ends"]
    assert done[3:] == [(1, []), "4 put off: True", (2, []), (4, [])]
    assert list(map(repr, reported)) == ["ValueError(1)"]


def test_a_call_that_a_handler_makes_is_no_part_of_the_call_that_waits_which_goes_on(came: list[int]) -> None:
    done: list[object] = []
    signal.signal(FIRST, lambda *_: done.append(hold_signals(lambda: put_off(done.append, "late"))()))

    @hold_signals
    def call() -> None:
        signal.raise_signal(FIRST)
        deliver_signals()
        done.append("the call ends")

    call()
    assert done == [False, "the call ends"]
