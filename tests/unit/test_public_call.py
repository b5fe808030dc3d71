"""Public calls and their errands: where they run, what signal handlers, finalizers and forks do to them."""

import contextvars
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from llm_datadist._deadline import Deadline
from llm_datadist._native import Requests, Use, UseGate, Waiter, WriteIntent, check_signals
from llm_datadist._native._native import LaneLoad
from llm_datadist._native.public_call import (
    CutOff,
    elsewhere,
    inside_another_call,
    public_call,
    public_calls,
    put_off,
    whole,
)
from tests.support.moves import wait_until

SIGNAL = signal.SIGUSR1


class Raised(Exception):
    pass


@pytest.fixture
def came() -> Iterator[list[int]]:
    """The signal raises; the list has those whose handlers have run."""
    came: list[int] = []

    def handler(number: int, _: object) -> None:
        came.append(number)
        raise Raised(number)

    before = signal.signal(SIGNAL, handler)
    yield came
    signal.signal(SIGNAL, before)


def interrupt() -> None:
    """Send the signal to the main thread, which may sleep."""
    signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)


def test_an_errand_has_the_name_arguments_and_context_of_its_call() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")

    @public_call
    def call(*args: int, **named: int) -> tuple[Any, ...]:
        return threading.current_thread().name, args, named, variable.get(), inside_another_call()

    variable.set(7)
    assert call(1, 2, three=3) == ("lldd-call", (1, 2), {"three": 3}, 7, False)
    assert public_call(call, here=True)(1) == ("lldd-call", (1,), {}, 7, True), "a call inside another one"
    seen: list[Any] = []
    thread = threading.Thread(target=contextvars.copy_context().run, args=(lambda: seen.append(call(1)),))
    thread.start()
    thread.join()
    assert seen == [(thread.name, (1,), {}, 7, False)]


def test_a_call_looks_like_its_function() -> None:
    class Made:
        def call(self, name: str) -> str:
            """Return it."""
            return name

        _private = call

    made = public_calls()(Made)
    assert (made.call.__doc__, str(inspect.signature(made().call))) == ("Return it.", "(name: str) -> str")
    assert "Made.call" in repr(made.call)
    assert inspect.isroutine(made.call)
    assert type(made._private).__name__ == "function"
    with pytest.raises(ValueError, match="a text"):
        public_call(lambda: int("a text"))()


def test_an_errand_is_cut_off_where_it_waits_and_the_caller_raises_once_it_has_ended(came: list[int]) -> None:
    seen: list[object] = []

    @public_call
    def call() -> None:
        try:
            interrupt()
            Deadline(10_000).poll(lambda: False)
        except CutOff as error:
            seen.append(str(error))
            time.sleep(0.1)
            seen.append("the end")
            raise

    with pytest.raises(Raised) as caught:
        call()
    assert seen == ["the handler of a signal has raised in the caller's thread", "the end"]
    assert caught.value.args == (SIGNAL,)
    assert came == [SIGNAL]
    check_signals()


@pytest.mark.parametrize("make", [lambda call: public_call(call, whole=True), whole])
def test_a_whole_errand_goes_on_and_a_second_exception_does_not_replace_the_first(
    came: list[int], make: Callable[[Any], Any]
) -> None:
    seen: list[int] = []

    def call() -> None:
        for count in (1, 2):
            interrupt()
            wait_until(lambda count=count: len(came) == count)  # type: ignore[misc]  # its default
            check_signals()
        seen.extend(came)

    with pytest.raises(Raised):
        make(call)()
    assert seen == [SIGNAL, SIGNAL]


def test_a_result_that_the_caller_does_not_get_is_undone(came: list[int]) -> None:
    undone: list[object] = []

    class Maker:
        def make(self, name: str) -> str:
            interrupt()
            wait_until(lambda: bool(came))
            return name

        def _cut_off(self, name: str) -> None:
            undone.append((name, threading.current_thread().name))

    with pytest.raises(Raised):
        public_calls()(Maker)().make(name="a")
    assert undone == [("a", "lldd-call")]


def test_what_is_put_off_in_an_errand_that_is_cut_off_is_done_to_its_end(came: list[int]) -> None:
    done: list[str] = []

    def work() -> None:
        check_signals()
        done.append("cleanup")

    @public_call
    def call() -> None:
        public_call(lambda: put_off(work))()
        interrupt()
        Deadline(10_000).poll(lambda: False)

    with pytest.raises(Raised):
        call()
    assert done == ["cleanup"]


def test_a_signal_that_another_thread_gets_ends_the_wait_too(came: list[int]) -> None:
    @elsewhere
    def call() -> None:
        signal.pthread_kill(threading.get_ident(), SIGNAL)
        Deadline(10_000).poll(lambda: False)

    with pytest.raises(Raised):
        call()


def test_what_is_put_off_is_done_after_the_outermost_call(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: reported.append(what.exc_value))

    def work(number: int) -> None:
        done.append((number, threading.current_thread().name))
        if number == 1:
            assert not put_off(work, 3), "it is the only call of this thread now"
            inner(4)
            raise ValueError(number)

    @public_call
    def inner(number: int) -> None:
        done.append(f"{number} put off: {put_off(work, number)}")

    @public_call
    def outer() -> None:
        assert not put_off(work, 0)
        inner(1)
        inner(2)
        done.append("outer ends")

    assert not put_off(work, 0), "no call at all"
    for call in (outer, public_call(outer.__wrapped__, here=True)):  # type: ignore[attr-defined]  # set by wraps
        done.clear()
        call()
        assert done[:3] == ["1 put off: True", "2 put off: True", "outer ends"]
        errand = "lldd-call"  # also of a call that stayed here
        assert done[3:] == [(1, errand), "4 put off: True", (2, errand), (4, errand)]
    assert list(map(repr, reported)) == ["ValueError(1)"] * 2


def test_a_handler_may_call_and_its_cleanup_comes_after_the_call_that_waits() -> None:
    done: list[object] = []
    before = signal.signal(SIGNAL, lambda *_: done.append(public_call(lambda: put_off(done.append, "late"))()))

    @public_call
    def call() -> None:
        interrupt()
        wait_until(lambda: bool(done))
        done.append("the call ends")

    try:
        call()
    finally:
        signal.signal(SIGNAL, before)
    assert done == [True, "the call ends", "late"]


def test_a_handler_that_forks_ends_the_call_in_the_child_which_has_errands_of_its_own() -> None:
    children: list[int] = []
    before = signal.signal(SIGNAL, lambda *_: children.append(os.fork()))

    def call() -> str:
        interrupt()
        wait_until(lambda: bool(children))
        return "the parent's"

    parent = os.getpid()
    try:
        ended = elsewhere(call)()
    except RuntimeError:
        os._exit(7 if os.getpid() != parent and elsewhere(threading.current_thread)().name == "lldd-call" else 8)
    finally:
        signal.signal(SIGNAL, before)
    assert ended == "the parent's"
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7


_UNTOUCHED = """
import ctypes, signal

def actions():
    read = ctypes.CDLL(None).sigaction
    found = {}
    for number in range(1, 65):
        action = ctypes.create_string_buffer(152)
        if read(number, None, action) == 0:
            found[number] = action.raw[:16], action.raw[136:140]  # handler, mask (of the kernel), flags
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return found, handlers, signal.signal, signal.getsignal

signal.signal(signal.SIGTERM, lambda *_: None)
before = actions()
from llm_datadist import CacheDesc, DataType, LLMDataDist, LLMRole
dist = LLMDataDist(LLMRole.MIX, 1)
dist.init({"ge.exec.deviceId": "0", "llm.EnableCacheManager": "1", "llm.MemPoolConfig": '{"memory_size": 65536}'})
cache = dist.cache_manager.allocate_blocks_cache(CacheDesc(1, [2, 16], DataType.DT_UINT8))
dist.cache_manager.copy_blocks(cache, {0: [1]})
assert actions() == before
dist.finalize()
assert actions() == before
assert len(before[0]) > 60
"""


def test_no_signal_of_the_process_gets_another_handler() -> None:
    subprocess.run([sys.executable, "-c", _UNTOUCHED], check=True, timeout=60)


class _Owner:
    def refuse(self, used: object, what: object) -> None:
        """It is open."""

    def last_left(self, _: object) -> None:
        self.thread = threading.current_thread().name


def test_what_a_call_holds_ends_when_it_is_freed() -> None:
    """From Python 3.14 on a handler may raise between the beginning of a ``with`` block and its body."""
    gate, owner = UseGate(), _Owner()
    use = Use(gate, used := object(), owner, None)
    assert use.__enter__() is used
    assert gate.shut() == 1
    del use
    assert (gate.inside, owner.thread) == (0, "lldd-call")

    requests = Requests()
    waiter = Waiter(requests)
    waiter.__enter__()
    assert requests.waiting == 1
    del waiter
    assert requests.waiting == 0

    loads, doubts = {3: 5}, [0]
    load = LaneLoad(loads, 3, 10, doubts)
    load.__enter__()
    assert (loads, doubts) == ({3: 15}, [0])
    del load
    assert (loads, doubts) == ({3: 5}, [3])

    page, free = np.zeros(1 << 16, np.uint8), [1]
    address = -(-page.ctypes.data // 4096) * 4096
    intent = WriteIntent(free, page, address, 1, lambda: None, lambda: pytest.fail("it is open"))
    intent.__enter__()
    assert free == []
    del intent
    assert free == [1]
