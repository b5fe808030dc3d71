"""Threads of transfers: how many swap, what becomes of refused work, and jobs, which give their source back once."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any
from unittest.mock import Mock, call

import pytest

from llm_datadist import LLMException, LLMStatusCode, _native
from llm_datadist._threads import Threads
from llm_datadist._transfer.layerwise import CacheTask, Tasks, TransferJob
from llm_datadist._transfer.local_copy import SwapEngine
from llm_datadist.errors import DeadlineExceeded, StateError
from tests.support.ends import LocalEnd
from tests.support.layers import FAILED, OK, Always


@pytest.fixture
def threads() -> Iterator[Threads]:
    with Threads(1, "tested") as threads:
        yield threads


def test_shared_work_is_done_by_the_caller_where_no_thread_can_be_started(threads: Threads) -> None:
    def fail() -> None:
        raise KeyError(threading.current_thread().name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        assert threads.share(pow, 2, 3).result(0) == 8
        assert isinstance(error := threads.share(fail).exception(0), KeyError)
        assert error.args == (threading.current_thread().name,)
    assert threads.share(threading.current_thread).result(10) is not threading.current_thread()


def test_a_shutdown_cancels_what_a_busy_thread_has_not_begun_and_refuses_what_comes(threads: Threads) -> None:
    busy, go_on = threading.Event(), threading.Event()
    threads.submit(busy.set)
    first, taken = threads.submit(go_on.wait, 10), threads.submit(threading.current_thread)
    assert busy.wait(10)
    assert not taken.done()
    go_on.set()
    first.result(10)
    assert taken.result(10).name.startswith("tested")
    go_on.clear()
    last, waiting, dropped = threads.submit(go_on.wait, 10), threads.submit(int), threads.submit(int)
    assert dropped.cancel()
    threads.shutdown(wait=False, cancel_futures=True)
    go_on.set()
    with pytest.raises(CancelledError):
        waiting.result(10)
    with pytest.raises(RuntimeError, match="after shutdown") as caught:
        threads.submit(int)
    assert not isinstance(caught.value, LLMException)
    assert last.done() or last.result(10)


def test_r10_four_workers_or_as_many_as_cpus_are_usable(end: LocalEnd) -> None:
    assert [SwapEngine(cpus).workers for cpus in (1, 2, 3, 4, 5, 64)] == [1, 2, 3, 4, 4, 4]
    end.start("DECODER", 1)
    assert end.world.dd.statistics().swap.workers == min(4, _native.usable_cpus())


def destination(layers: range, effect: Any = None) -> Mock:
    """A destination whose sends have this effect: an exception, or a call with the layer."""
    return Mock(layers=layers, send=Mock(side_effect=effect))


@pytest.fixture
def tasks() -> Iterator[Tasks]:
    tasks = Tasks(500)
    yield tasks
    tasks.join()
    assert not [each for each in threading.enumerate() if each.name.startswith("llm-datadist-task-")]


def _job(tasks: Tasks, *deliveries: Mock, **more: Any) -> tuple[TransferJob, list[str]]:
    released: list[str] = []
    job = TransferJob(tasks.name(), deliveries, Always(), lambda: released.append("source"), **more)
    return job, released


def test_the_source_is_given_back_once_before_the_results_are_seen_and_a_time_out_has_its_name(tasks: Tasks) -> None:
    one, code = destination(range(3)), LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    job, released = _job(tasks, one)
    assert CacheTask(job).get_results(0) == [LLMStatusCode.LLM_TIMEOUT]
    task = tasks.start(job)
    assert task.synchronize() is OK
    assert (released, one.send.mock_calls) == (["source"], [call(0), call(1), call(2)])
    job.end(StateError("late"))
    assert (released, task.get_results()) == (["source"], [OK])
    late = DeadlineExceeded("late", phase="copy", budget_ms=1, elapsed_ms=2)
    job, _ = _job(tasks, destination(range(1), late), timeout_code=code)
    assert CacheTask(job).synchronize(0) is code
    assert tasks.start(job).get_results() == [code]


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), ValueError("x")], ids=repr)
def test_r18_whatever_it_dies_of_nothing_unfinished_is_a_success(tasks: Tasks, error: BaseException) -> None:
    job, released = _job(tasks, destination(range(1)), destination(range(2), error), destination(range(1, 2)))
    task = tasks.start(job)
    assert task.synchronize() is FAILED
    assert task.get_results() == [OK, FAILED, FAILED]
    assert task.errors == [None, error, error]
    assert released == ["source"]


def test_after_the_end_no_job_starts_and_one_that_goes_on_keeps_its_source_until_it_has_ended(tasks: Tasks) -> None:
    meet = threading.Barrier(2, timeout=20)
    one, late = destination(range(2), lambda _: (meet.wait(), meet.wait())), destination(range(2))
    job, released = _job(tasks, one)
    task = tasks.start(job)
    meet.wait()
    tasks.stop()
    assert not job.done, "its bytes still move"
    assert released == []
    late_job, late_released = _job(tasks, late)
    with pytest.raises(StateError) as caught:
        tasks.start(late_job)
    assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
    assert (late_released, late.send.called) == (["source"], False)
    meet.wait()
    assert task.synchronize() is LLMStatusCode.LLM_ENGINE_FINALIZED
    assert (released, one.send.mock_calls) == (["source"], [call(0)])


def test_a_job_that_ends_while_it_sends_asks_for_no_further_layer(tasks: Tasks) -> None:
    """Its synchronizer may wait for the thread that ended it, and that one for the job."""
    one, synchronizer, released = destination(range(2)), Always(), list[str]()
    job = TransferJob(tasks.name(), [one], synchronizer, lambda: released.append("source"))
    one.send.side_effect = lambda _: job.end(LLMException("over", status_code=FAILED))
    assert tasks.start(job).get_results() == [FAILED]
    assert ([layer for layer, _ in synchronizer.asked], released) == ([0], ["source"])


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_job_for_which_no_thread_can_be_started_gives_its_source_back(tasks: Tasks, error: type[Exception]) -> None:
    job, released = _job(tasks, destination(range(1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=error("none")))
        with pytest.raises(LLMException, match="no thread can be started: none"):
            tasks.start(job)
    assert (job.done, released) == (True, ["source"])
