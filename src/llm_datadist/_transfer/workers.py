"""Threads for calls that are awaited: the blocking call in a worker, a cancellation that leaves memory safe (R7)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from llm_datadist._deadline import CancellableDeadline
from llm_datadist.errors import LLMStatusCode, StateError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from concurrent.futures import Future

    from llm_datadist._deadline import Deadline

__all__ = ["Workers"]

T = TypeVar("T")

#: A call mostly waits for memory or a peer: more than there are CPUs are of use, and a few hundred are not.
_MAX_WORKERS: Final = 32


class Workers:
    """The threads ``llm-datadist-async_<n>``, at most 32, each there from its first call to :meth:`close`.

    Any thread, any event loop.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_MAX_WORKERS, "llm-datadist-async")
        self._pid = os.getpid()

    async def run(self, call: Callable[[Deadline], T], budget_ms: int) -> T:
        """Call ``call`` with a deadline in a worker thread; the deadline begins when the thread does.

        When the waiting task is cancelled, ``CancelledError`` comes once the call has ended, which it is told to do:
        a call that has not begun never does, one that waits for an answer ends within 50 ms, one that copies ends after
        the chunk it is at, and one whose bytes go over lanes ends with them, or with its deadline. So nothing of it
        writes anywhere afterwards, and the link is as usable as after a timeout. A coroutine that is closed, which
        leaves no time to wait, only tells it.

        Raises:
            StateError: finalize came first (``LLM_ENGINE_FINALIZED``), or this is a forked child.
        """
        import asyncio  # whoever awaits has it loaded

        if os.getpid() != self._pid:
            raise StateError(f"the call is one of process {self._pid}, whose threads are not in this fork of it")
        awaited: _Call[T] = _Call(call, budget_ms)
        try:
            future: Future[T] = self._threads.submit(awaited.run)
        except RuntimeError as error:
            raise _finalized() from error
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if future.cancelled():  # by close, not by the task that waits
                raise _finalized() from None
            await _ended(awaited, future, waiting)
            raise
        except GeneratorExit:
            awaited.give_up(future)
            raise

    def stop(self) -> None:
        """Drop calls that have not begun, and take no more; never waits. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Let running calls end, drop those that have not begun, join the threads. Idempotent."""
        self._threads.shutdown(cancel_futures=True)


class _Call(Generic[T]):
    """One call on its way through a thread. :meth:`give_up` may come from another thread at any time."""

    def __init__(self, call: Callable[[Deadline], T], budget_ms: int) -> None:
        self._call = call
        self._budget_ms = budget_ms
        self._cancelled = False
        self._deadline: CancellableDeadline | None = None

    def run(self) -> T:
        self._deadline = deadline = CancellableDeadline(self._budget_ms)
        if self._cancelled:  # before there was a deadline to cancel
            deadline.cancel()
        return self._call(deadline)

    def give_up(self, future: Future[T]) -> bool:
        """Nobody wants it any more. True when it had not begun, and never will; else it ends as soon as it can."""
        if future.cancel():
            return True
        self._cancelled = True
        if self._deadline is not None:
            self._deadline.cancel()
        return False


async def _ended(call: _Call[T], future: Future[T], waiting: asyncio.Future[T]) -> None:
    """Return when a cancelled call has ended, however often the waiting task is cancelled meanwhile."""
    import asyncio

    if call.give_up(future):
        return
    while not waiting.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([waiting])
    if not waiting.cancelled():
        waiting.exception()  # nobody wants it, and asyncio is told so


def _finalized() -> StateError:
    return StateError(
        "the call was waiting for a thread when its LLMDataDist was finalized",
        status_code=LLMStatusCode.LLM_ENGINE_FINALIZED,
    )
