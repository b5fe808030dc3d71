"""Executors where no thread can be started: what was refused is never done."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import pytest

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist._transfer.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def threads() -> Iterator[Threads]:
    with Threads(1, "tested") as threads:
        yield threads


def _refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_refused_work_is_not_done_by_a_thread_that_starts_later(threads: Threads) -> None:
    done: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        with pytest.raises(LLMException, match="no thread can be started: can't start new thread") as caught:
            threads.submit(done.append, 1)
    assert caught.value.status_code is LLMStatusCode.LLM_FAILED
    threads.submit(done.append, 2).result(10)
    assert done == [2]


def test_shared_work_is_done_by_the_caller_where_no_thread_can_be_started(threads: Threads) -> None:
    def fail() -> None:
        raise KeyError(threading.current_thread().name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
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
