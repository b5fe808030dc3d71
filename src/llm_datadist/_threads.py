"""Pools of threads in which a function that was refused never runs.

Where no thread can be had, the executor of the standard library raises after it has queued the function: a thread that
is busy now would run it later, when its caller has been told that nothing happens and uses the memory again.
"""

from __future__ import annotations

from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from llm_datadist._deadline import wait_all
from llm_datadist.errors import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Threads"]

T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """An executor of threads. Any thread may call."""

    _closed = False

    def submit(self, function: Callable[..., T], /, *args: object, **kwargs: object) -> Future[T]:
        """Have a thread call a function; return its future.

        Raises:
            LLMException: No thread can be had (``LLM_FAILED``); the function is not called.
            RuntimeError: After ``shutdown``.
        """
        once = _Once(partial(function, *args, **kwargs))
        try:
            return super().submit(once)
        except RuntimeError as error:
            if self._closed:
                raise
            if once.future.cancel():
                raise LLMException(f"no thread can be had: {error}", status_code=LLMStatusCode.LLM_FAILED) from error
            return once.future  # a thread that was busy has taken it meanwhile

    def run_all(self, functions: Iterable[Callable[[], T]], cancel: Callable[[], object]) -> list[T]:
        """Have threads call all these functions, and return their results, or raise the first error.

        ``cancel`` must make them end soon. When this raises, they have ended.
        """
        futures: list[Future[T]] = []
        try:
            futures.extend(self.submit(function) for function in functions)
        except RuntimeError:
            cancel()
            wait(futures)
            raise
        return wait_all(futures, cancel)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more; see the base class."""
        self._closed = True
        super().shutdown(wait, cancel_futures=cancel_futures)


class _Once(Generic[T]):
    """A function that is called unless its future was cancelled before."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.future: Future[T] = Future()

    def __call__(self) -> T:
        if not self.future.set_running_or_notify_cancel():
            raise CancelledError
        try:
            result = self._function()
        except BaseException as error:
            self.future.set_exception(error)
            del self  # the traceback holds this frame: the future would hold itself
            raise
        self.future.set_result(result)
        return result
