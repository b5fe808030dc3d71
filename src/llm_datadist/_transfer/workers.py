"""Threads for awaited calls, whose cancellation leaves memory safe (interface R7)."""

from __future__ import annotations

from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from llm_datadist._checks import HERE, require_process
from llm_datadist._deadline import Deadline
from llm_datadist._native.public_call import public_call
from llm_datadist._threads import Threads
from llm_datadist.errors import LLMException, LLMStatusCode, StateError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


T = TypeVar("T")

_MAX_WORKERS: Final = 32  # more than CPUs, because calls mostly wait for memory or a peer


class Workers:
    """Threads ``llm-datadist-async_<n>``, at most 32, from a first call to :meth:`close`. Threads: any, any loop."""

    def __init__(self) -> None:
        self._threads = Threads(_MAX_WORKERS, "llm-datadist-async")
        self._pid = HERE["pid"]

    async def run(self, call: Callable[[Deadline], T], budget_ms: int) -> T:
        """Run ``call`` in a worker thread, with a deadline that begins with its work.

        ``CancelledError`` comes once the call has ended; the link stays usable, and only bytes of a push over lanes may
        still be on their way. A call that has not begun never does. One that waits for an answer or a lane ends within
        50 ms, a copy after its current chunk. Closing the coroutine cancels without waiting.

        Raises:
            LLMException: No thread can be started.
            StateError: Finalize came first (``LLM_ENGINE_FINALIZED``), or this is a forked child.
        """
        import asyncio  # loaded already, as there is an event loop

        require_process(self._pid, "awaited call")
        awaited: _AwaitedCall[T] = _AwaitedCall(call, budget_ms)
        try:
            waiting = asyncio.wrap_future(awaited.begin(self._threads))
            try:
                return await asyncio.shield(waiting)
            except asyncio.CancelledError:
                if waiting.cancelled():  # by stop or close, not by the awaiting task
                    raise _finalized() from None
                if not awaited.cancel():
                    await _end_of(waiting)
                raise
        except GeneratorExit:
            awaited.leave()
            raise
        finally:
            awaited.end()

    def stop(self) -> None:
        """Drop calls that have not begun and refuse others, without waiting. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """:meth:`stop`, then join the threads. Idempotent."""
        self._threads.shutdown(cancel_futures=True)


class _AwaitedCall(Generic[T]):
    """Call in a worker thread; any thread may cancel it."""

    def __init__(self, call: Callable[[Deadline], T], budget_ms: int) -> None:
        self._call = call
        self._context = copy_context()  # of the awaiting task
        self._budget_ms = budget_ms
        self._cancelled = False
        self._future: Future[T] | None = None
        self._deadline: Deadline | None = None

    def run(self) -> T:
        self._deadline = deadline = Deadline(self._budget_ms, cancellable=True)
        if self._cancelled:  # before the deadline existed
            deadline.cancel()
        return self._context.run(self._call, deadline)

    @public_call
    def begin(self, threads: Threads) -> Future[T]:
        try:
            self._future = threads.submit(self.run)
        except LLMException:
            raise  # no thread can be started
        except RuntimeError as error:
            raise _finalized() from error
        return self._future

    @public_call
    def end(self) -> None:
        """Wait for the end, if a signal handler has raised out of the first wait."""
        if self._future is not None and not self.cancel():
            wait([self._future])

    @public_call
    def leave(self) -> None:
        """Cancel the call without waiting for its end."""
        self.cancel()
        self._future = None

    @public_call
    def cancel(self) -> bool:
        """Make the call end soon; return True if it never begins."""
        if self._future is None or self._future.cancel():
            return True
        self._cancelled = True
        if self._deadline is not None:
            self._deadline.cancel()
        return False


async def _end_of(waiting: asyncio.Future[T]) -> None:
    """Wait for the end of a cancelled call, even if the task is cancelled again."""
    import asyncio

    while not waiting.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([waiting])
    if not waiting.cancelled():
        waiting.exception()  # retrieved, or asyncio would log it


def _finalized() -> StateError:
    return StateError(
        "the call was waiting for a thread when its LLMDataDist was finalized",
        status_code=LLMStatusCode.LLM_ENGINE_FINALIZED,
    )
