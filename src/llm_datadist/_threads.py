"""Executor that never does refused work, and calls that the interpreter's exit waits for.

The standard library's queues work first. If no thread can be started then, ``submit`` raises, and a later thread does
the work: a copy into memory that its caller has reused.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from llm_datadist._native.public_call import public_call
from llm_datadist.errors import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Threads(AbstractContextManager["Threads"]):
    """Threads ``<name>_<n>``, at most ``limit``, each from the first work that needs it until :meth:`shutdown`."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._queue: SimpleQueue[Work[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()  # protects the rest
        self._threads: list[threading.Thread] = []
        self._free = 0  # threads, less their work
        self._stopped = False

    def submit(self, function: Callable[..., T], /, *args: Any) -> Future[T]:  # noqa: ANN401
        """Have a thread do the work.

        Raises:
            LLMException: No thread can be started (``LLM_FAILED``); the work is not done.
            RuntimeError: After :meth:`shutdown`.
        """
        work = Work(partial(function, *args))
        with self._lock:
            if self._stopped:
                raise RuntimeError("no work is taken after shutdown")
            if self._free <= 0 and len(self._threads) < self._limit:
                self._start()
            self._free -= 1
            self._queue.put(work)
        return work.future

    def share(self, function: Callable[..., T], /, *args: Any) -> Future[T]:  # noqa: ANN401
        """:meth:`submit` work; if no thread can be started, do it in this call."""
        try:
            return self.submit(function, *args)
        except LLMException:
            work = Work(partial(function, *args))
            work.run()
            return work.future

    def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
        """Refuse new work, cancel work that has not begun if asked to, and join the threads if ``wait``."""
        with self._lock:
            self._stopped = True
            with suppress(Empty):
                while cancel_futures:
                    if (work := self._queue.get_nowait()) is not None:
                        work.future.cancel()
                        work.run()  # tells those that wait for it
            for _ in self._threads:
                self._queue.put(None)
        if wait:
            for thread in self._threads:
                if thread is not threading.current_thread():  # a finalizer
                    thread.join()

    def _start(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            text = f"no thread can be started: {error}"
            raise LLMException(text, status_code=LLMStatusCode.LLM_FAILED) from error
        self._threads.append(thread)
        self._free += 1

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self._do(work)
            del work  # it may hold memory that its caller wants to free

    @public_call
    def _do(self, work: Work[Any]) -> None:
        work.run()
        with self._lock:
            self._free += 1

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


def finish_before_exit(function: Callable[[], T]) -> T:
    """Call a function that the interpreter's exit must not end half way.

    The exit waits for daemon threads in it, at most ten seconds.

    Before Python 3.14 the exit ends daemon threads by unwinding their stacks, and Rust code there aborts the process.
    Once the exit has begun, a daemon thread stays here for ever, as it would at its next step.
    """
    thread = threading.current_thread()
    if not thread.daemon:
        return function()
    try:
        _finishing.add(thread)
        if not _exiting.is_set():
            return function()
    finally:
        _finishing.discard(thread)
    threading.Event().wait()
    raise AssertionError


def _wait_at_exit() -> None:
    _exiting.set()
    until = time.monotonic() + _EXIT_SECONDS
    while any(thread.is_alive() for thread in list(_finishing)) and time.monotonic() < until:
        time.sleep(0.001)


_finishing: Final[set[threading.Thread]] = set()
_exiting: Final = threading.Event()
_EXIT_SECONDS: Final = 10.0
atexit.register(_wait_at_exit)
os.register_at_fork(after_in_child=_finishing.clear)


class Work(Generic[T]):
    """A function to call once, unless its future is cancelled before."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.future: Future[T] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001 (the caller gets it)
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
