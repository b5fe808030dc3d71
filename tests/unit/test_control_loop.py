"""The control thread: what is posted runs, what fails is logged, what is stopped gives everything back."""

import asyncio
import errno
import gc
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from llm_datadist._links.loop import ControlLoop
from llm_datadist.errors import StateError
from tests.support.moves import wait_until


def test_a_loop_without_descriptors_is_not_made_and_leaves_nothing_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asyncio's own loop would warn, and fail to close what it has not."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "no descriptor is left")

    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    monkeypatch.setattr(socket, "socketpair", refuse)
    with pytest.raises(OSError, match="no descriptor"):
        ControlLoop()
    gc.collect()
    assert ignored == []


def test_what_was_accepted_runs_before_the_stop_and_nothing_is_accepted_after(control: ControlLoop) -> None:
    done: list[object] = []

    async def hold() -> None:
        try:
            done.append("begun")
            await asyncio.sleep(600)
        finally:
            done.append("given back")

    for number in range(100):
        control.post(done.append, number)
    control.post(lambda: control.spawn(hold()))
    control.stop()
    assert done == [*range(100), "begun", "given back"], "a coroutine has begun before it is cancelled"
    for refused in (control.post, control.call):
        with pytest.raises(StateError, match="stopped"):
            refused(done.append, 0)
    control.stop()
    ControlLoop().stop()  # one that was never started


@contextmanager
def served(control: ControlLoop, callback: Callable[[], object]) -> Iterator[socket.socket]:
    """Serve one end of a socket pair; yield the other one."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def take_one() -> None:
            ours.recv(1)
            callback()

        control.call(control.serve, ours, take_one)
        yield theirs
        control.call(control.dismiss, ours)
        control.call(control.dismiss, ours)  # once is enough


def test_calls_and_what_is_served_until_it_is_dismissed_run_on_the_control_thread(control: ControlLoop) -> None:
    where: list[str] = []
    assert (control.call(control.inside), control.inside()) == (True, False)
    with pytest.raises(ZeroDivisionError):
        control.call(lambda: 1 // 0)
    with served(control, lambda: where.append(control.call(lambda: threading.current_thread().name))) as theirs:
        theirs.send(b"abc")
        wait_until(lambda: len(where) == 3)
        assert control.call(lambda: 7) == 7
    with served(control, lambda: where.append("another")) as another:  # may have the descriptor of the first
        another.send(b"a")
        wait_until(lambda: len(where) == 4)
    control.call(lambda: None)
    assert where == ["llm-datadist-control"] * 3 + ["another"]


def test_asyncio_has_its_turn_beside_what_is_served_without_end(control: ControlLoop) -> None:
    turns: list[str] = []

    async def coroutine() -> None:
        await asyncio.sleep(0.001)
        turns.append("timer")

    with served(control, lambda: None) as theirs:

        def feed() -> None:
            while not turns:
                theirs.send(b"x" * 64)

        feeder = threading.Thread(target=feed, daemon=True)
        feeder.start()
        control.post(lambda: control.spawn(coroutine()))
        assert control.call(lambda: 7) == 7
        feeder.join(10)
        assert turns == ["timer"]


def test_asyncio_is_not_told_of_what_a_served_callback_has_closed(control: ControlLoop) -> None:
    told: list[int] = []
    ours, theirs = socket.socketpair()

    def close() -> None:
        control.loop.remove_writer(ours)
        ours.close()

    def both_at_once(peer: socket.socket) -> None:
        # The loop finds what asyncio watches first, and what is served, when it looks next.
        control.loop.add_writer(ours, told.append, 1)
        peer.send(b"a")

    with theirs, served(control, close) as peer:
        control.call(both_at_once, peer)
        wait_until(lambda: ours.fileno() == -1)
        assert control.call(lambda: "alive") == "alive"
    assert len(told) <= 1


def test_what_fails_is_logged_and_the_loop_goes_on(control: ControlLoop, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise KeyError("in a coroutine")

    control.post(lambda: 1 // 0)
    control.post(lambda: control.spawn(fail()))
    with served(control, lambda: int("not a number")) as theirs:
        theirs.send(b"a")
        wait_until(lambda: len(caplog.records) == 3)
    assert all(part in caplog.text for part in ("ZeroDivisionError", "in a coroutine", "ValueError"))
    assert {record.name for record in caplog.records} == {"LLM_DATADIST"}
    assert control.call(lambda: "alive") == "alive"
