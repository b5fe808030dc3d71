"""The control thread: what is posted runs, what fails is logged, what is stopped gives everything back."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from llm_datadist.control.loop import ControlLoop
from llm_datadist.errors import StateError
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def control() -> Iterator[ControlLoop]:
    control = ControlLoop()
    control.start()
    yield control
    control.stop()
    assert "llm-datadist-control" not in [thread.name for thread in threading.enumerate()]


def test_call_runs_on_the_control_thread_and_brings_back_result_and_error(control: ControlLoop) -> None:
    assert control.call(lambda: threading.current_thread().name) == "llm-datadist-control"
    assert control.call(control.inside)
    assert not control.inside()
    assert control.call(lambda: control.call(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        control.call(lambda: 1 // 0)


def test_what_was_accepted_runs_before_the_stop_and_nothing_is_accepted_after(control: ControlLoop) -> None:
    done: list[int] = []
    for number in range(100):
        control.post(done.append, number)
    control.stop()
    assert done == list(range(100))
    with pytest.raises(StateError, match="stopped"):
        control.post(done.append, 0)
    with pytest.raises(StateError, match="stopped"):
        control.call(done.append, 0)
    control.stop()


def test_a_coroutine_that_was_spawned_has_begun_before_it_is_cancelled(control: ControlLoop) -> None:
    story: list[str] = []

    async def hold() -> None:
        try:
            story.append("begun")
            await asyncio.sleep(60)
        finally:
            story.append("given back")

    control.post(lambda: control.spawn(hold()))
    control.stop()
    assert story == ["begun", "given back"]


def test_what_fails_is_logged_and_the_loop_goes_on(control: ControlLoop, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise KeyError("in a coroutine")

    control.post(lambda: 1 // 0)
    control.post(lambda: control.spawn(fail()))
    wait_until(lambda: len(caplog.records) == 2)
    assert ["ZeroDivisionError" in caplog.text, "in a coroutine" in caplog.text] == [True, True]
    assert {record.name for record in caplog.records} == {"LLM_DATADIST"}
    assert control.call(lambda: "alive") == "alive"


def test_a_loop_that_was_never_started_can_be_stopped() -> None:
    ControlLoop().stop()
