"""Jobs by themselves: the source's memory is given back once, whatever ends first."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist._transfer.layerwise import CacheTask, Tasks, TransferJob
from llm_datadist.errors import DeadlineExceeded, StateError
from tests.support.layers import FAILED, OK, Always

if TYPE_CHECKING:
    from collections.abc import Iterator

BOUND_S = 20.0


class Delivered:
    """A destination that remembers; ``error`` is raised, ``gate`` waited for."""

    def __init__(self, layers: range, error: BaseException | None = None, gate: threading.Event | None = None) -> None:
        self.layers = layers
        self.sent: list[int] = []
        self.begun = threading.Event()
        self._error, self._gate = error, gate

    def send(self, layer: int) -> None:
        self.begun.set()
        if self._gate is not None:
            assert self._gate.wait(BOUND_S)
        if self._error is not None:
            raise self._error
        self.sent.append(layer)


@pytest.fixture
def tasks() -> Iterator[Tasks]:
    tasks = Tasks(500)
    yield tasks
    tasks.join()
    assert not [each for each in threading.enumerate() if each.name.startswith("llm-datadist-task-")]


def _job(tasks: Tasks, *deliveries: Delivered, **more: Any) -> tuple[TransferJob, list[str]]:
    released: list[str] = []
    job = TransferJob(tasks.name(), deliveries, Always(), lambda: released.append("source"), **more)
    return job, released


def test_the_source_is_given_back_once_before_the_results_are_seen_and_a_time_out_has_its_name(tasks: Tasks) -> None:
    one, code = Delivered(range(3)), LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    job, released = _job(tasks, one)
    assert CacheTask(job).get_results(0) == [LLMStatusCode.LLM_TIMEOUT]
    task = tasks.start(job)
    assert task.synchronize() is OK
    assert (released, one.sent) == (["source"], [0, 1, 2])
    job.end(StateError("late"))
    assert (released, task.get_results()) == (["source"], [OK])
    late = DeadlineExceeded("late", phase="copy", budget_ms=1, elapsed_ms=2)
    job, _ = _job(tasks, Delivered(range(1), late), timeout_code=code)
    assert CacheTask(job).synchronize(0) is code
    assert tasks.start(job).get_results() == [code]


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), ValueError("x")], ids=repr)
def test_r18_whatever_a_transfer_dies_of_nothing_unfinished_reads_as_success(
    tasks: Tasks, error: BaseException
) -> None:
    job, released = _job(tasks, Delivered(range(1)), Delivered(range(2), error), Delivered(range(1, 2)))
    task = tasks.start(job)
    assert task.synchronize() is FAILED
    assert task.get_results() == [OK, FAILED, FAILED]
    assert task.errors == [None, error, error]
    assert released == ["source"]


def test_after_the_end_no_job_starts_and_one_that_goes_on_keeps_its_source_until_it_has_ended(tasks: Tasks) -> None:
    gate = threading.Event()
    one, late = Delivered(range(2), gate=gate), Delivered(range(2))
    job, released = _job(tasks, one)
    task = tasks.start(job)
    assert one.begun.wait(BOUND_S)
    tasks.stop()
    assert not job.done, "its bytes still move"
    assert released == []
    late_job, late_released = _job(tasks, late)
    with pytest.raises(StateError) as caught:
        tasks.start(late_job)
    assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
    assert (late_released, late.sent) == (["source"], [])
    gate.set()
    assert task.synchronize() is LLMStatusCode.LLM_ENGINE_FINALIZED
    assert (released, one.sent) == (["source"], [0])
