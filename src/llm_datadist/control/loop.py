"""The control thread: one asyncio loop per LLMDataDist, for sockets and timers and nothing that blocks."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from llm_datadist.errors import StateError
from llm_datadist.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

__all__ = ["ControlLoop"]

T = TypeVar("T")


class ControlLoop:
    """Owns the thread ``llm-datadist-control`` and its loop. Started by init, stopped and joined by finalize.

    Whatever goes wrong in a callback or a coroutine is logged and ends that callback only, never the loop.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_report)
        self._thread = threading.Thread(target=self._run, name="llm-datadist-control", daemon=True)
        self._lock = threading.Lock()
        self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def inside(self) -> bool:
        """Return True on the control thread itself."""
        return threading.current_thread() is self._thread

    def call(self, function: Callable[..., T], *args: Any) -> T:  # noqa: ANN401
        """Run ``function`` on the control thread and return its result; for short work only.

        Raises:
            StateError: The loop has stopped.
        """
        if self.inside():
            return function(*args)
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function(*args))
            except BaseException as error:  # noqa: BLE001 (carried to the caller, whatever it is)
                done.set_exception(error)

        self.post(run)
        return done.result()

    def post(self, function: Callable[..., object], *args: Any) -> None:  # noqa: ANN401
        """Run ``function`` on the control thread soon; what is accepted here runs, also when a stop follows.

        Raises:
            StateError: The loop has stopped.
        """
        with self._lock:
            if self._stopped:
                raise StateError("the control thread has stopped")
            self.loop.call_soon_threadsafe(function, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the control thread, which must be the caller's. Unfinished ones end with the loop."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def stop(self) -> None:
        """Run what was posted, cancel what still runs, stop the loop, join the thread. Idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.close()

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("unexpected error on the control thread: %r", error, exc_info=error)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        # One more turn, so that every coroutine has begun: one that is cancelled before gives nothing back.
        self.loop.run_until_complete(asyncio.sleep(0))
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            self.loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    logger.error("unexpected error on the control thread: %s: %r", context.get("message"), error, exc_info=error)
