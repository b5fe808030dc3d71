"""Pools of threads where no thread can be had: what was refused never runs, and what had begun has ended."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from llm_datadist._threads import Threads
from llm_datadist._transfer.workers import Workers
from llm_datadist.errors import LLMException, LLMStatusCode
from tests.faults.limits import few_threads


@pytest.fixture
def threads() -> Threads:
    return Threads(4, "llm-datadist-test")


def test_what_is_refused_for_want_of_a_thread_never_runs(threads: Threads) -> None:
    gate = threading.Event()
    ran: list[int] = []
    with threads:
        busy = threads.submit(gate.wait, 10)
        with few_threads(0), pytest.raises(LLMException, match="no thread can be had") as caught:
            threads.submit(ran.append, 1)
        assert caught.value.status_code is LLMStatusCode.LLM_FAILED
        gate.set()
        assert busy.result(10)
        assert threads.submit(len, "abc").result(10) == 3
    assert ran == []


def test_a_call_that_a_busy_thread_has_taken_meanwhile_is_not_refused(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, taken = threading.Event(), threading.Event()

    def start(_: threading.Thread) -> None:
        free.set()
        assert taken.wait(10)
        raise RuntimeError("can't start new thread")

    def take() -> int:
        taken.set()
        return 7

    with threads:
        threads.submit(free.wait, 10)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            future = threads.submit(take)
        assert future.result(10) == 7


def test_nothing_is_taken_after_shutdown(threads: Threads) -> None:
    threads.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown") as caught:
        threads.submit(len, "")
    assert not isinstance(caught.value, LLMException)


def test_run_all_ends_what_has_begun_before_it_raises(threads: Threads) -> None:
    stopped = threading.Event()
    ended: list[int] = []

    def work() -> None:
        stopped.wait(10)
        time.sleep(0.02)
        ended.append(1)

    with threads:
        with few_threads(2), pytest.raises(LLMException):
            threads.run_all([work] * 4, stopped.set)
        assert ended == [1, 1]
        assert threads.run_all([lambda: 5] * 4, stopped.set) == [5] * 4


def test_an_awaited_call_without_a_thread_fails_and_does_nothing_later() -> None:
    async def run() -> None:
        gate, workers = threading.Event(), Workers()
        ran: list[int] = []
        try:
            busy = asyncio.ensure_future(workers.run(lambda _: gate.wait(10), 1000))
            await asyncio.sleep(0.05)
            with few_threads(0), pytest.raises(LLMException, match="no thread can be had"):
                await workers.run(lambda _: ran.append(1), 1000)
            gate.set()
            assert await busy
            await asyncio.sleep(0.05)
            assert ran == []
        finally:
            workers.close()

    asyncio.run(run())
