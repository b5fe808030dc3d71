"""The control thread: one asyncio loop per LLMDataDist, for sockets and timers.

Its work may wait for lanes, NIXL and credential files at most. An error in a callback or a coroutine is logged and ends
that one only.
"""

from __future__ import annotations

import asyncio
import os
import select
import selectors
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from llm_datadist._log import links_logger as logger
from llm_datadist._memory.unmap import never_wait_here
from llm_datadist._native import BriefPoll
from llm_datadist._native.public_call import do_what_was_put_off, public_call, whole
from llm_datadist._threads import Work
from llm_datadist.errors import StateError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine
    from typing import Any

T = TypeVar("T")

#: Events that asyncio gets at once, so new connections barely delay linked peers.
_EVENTS_PER_TURN: Final = 2
_NO_MEMORY_SECONDS: Final = 0.01


class _DirectSelector(selectors.EpollSelector):
    """An epoll that calls callbacks of served sockets itself and passes other events to asyncio.

    Served sockets bypass asyncio because it makes some thirty Python calls between an event and its callback. These
    cost more than a small message does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inherited = self.fileno()
        self._few = select.epoll.fromfd(os.dup(self._inherited))  # the inherited epoll
        self._outer = select.epoll()  # of served sockets, and of the inherited epoll
        self._outer.register(self._inherited, select.EPOLLIN)
        self.epoll = self._outer.fileno  # its descriptor
        self._served: dict[int, Callable[[], None]] = {}
        self._turns: deque[Callable[[], None]] = deque()  # of the next round
        self._poll = BriefPoll(self._outer.fileno())
        self._expects = False

    def serve(self, sock: socket.socket, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever ``sock`` can be read. On the control thread."""
        self._served[sock.fileno()] = callback
        self._outer.register(sock, select.EPOLLIN)

    def dismiss(self, sock: socket.socket) -> None:
        """End :meth:`serve` before ``sock`` is closed. On the control thread, or after its end."""
        if self._served.pop(sock.fileno(), None) is not None:
            with suppress(ValueError):  # closed with the loop
                self._outer.unregister(sock)

    def expect(self) -> None:
        """Poll before the next sleep: a message will follow within microseconds. On the control thread."""
        self._expects = True

    def go_on(self, turn: Callable[[], None]) -> None:
        """Call ``turn`` in the next round, in which all others have theirs, too. On the control thread."""
        self._turns.append(turn)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Do one round: wait, call the direct callbacks, then the turns left over; return the other events."""
        do_what_was_put_off()  # by finalizers that ran in a callback
        if turns := len(self._turns):
            timeout = 0
        elif self._expects and timeout != 0:
            self._poll.run()
        asked = self._expects = False
        for descriptor, _ in self._outer.poll(None if timeout is None else max(timeout, 0)):
            if (callback := self._served.get(descriptor)) is not None:
                _call(callback)
            asked |= descriptor == self._inherited
        for _ in range(turns):
            _call(self._turns.popleft())
        # Last: a callback may have closed a file of asyncio.
        return self._few_events() if asked else []

    def _few_events(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Return some of asyncio's events; the kernel reports the others first next time."""
        keys, events = self.get_map(), []
        for descriptor, event in self._few.poll(0, _EVENTS_PER_TURN):
            if (key := keys.get(descriptor)) is not None:
                read = selectors.EVENT_READ if event & ~select.EPOLLOUT else 0
                write = selectors.EVENT_WRITE if event & ~select.EPOLLIN else 0
                events.append((key, (read | write) & key.events))
        return events

    def close(self) -> None:
        self._served.clear()
        self._turns.clear()
        super().close()
        self._few.close()
        self._outer.close()


def _call(callback: Callable[[], None]) -> None:
    """Call it; an exception ends that callback, never the loop."""
    try:
        callback()
    except Exception as error:  # noqa: BLE001
        logger.error("unexpected error on the control thread: %r", error, exc_info=error)


class _EventLoop(asyncio.SelectorEventLoop):
    """A loop that counts as closed until made: asyncio cannot close one that lacked a descriptor."""

    _made = False

    def __init__(self, selector: selectors.BaseSelector) -> None:
        super().__init__(selector)
        self._made = True

    def is_closed(self) -> bool:
        return not self._made or super().is_closed()


class ControlLoop:
    """The thread ``llm-datadist-control`` and its loop, from init to finalize."""

    def __init__(self) -> None:
        selector = _DirectSelector()
        self.serve, self.dismiss = selector.serve, selector.dismiss
        self.epoll = selector.epoll
        self.expect, self.go_on = selector.expect, selector.go_on
        self.loop = _EventLoop(selector)
        self.loop.set_exception_handler(_report)
        self._thread = threading.Thread(target=self._run, name="llm-datadist-control", daemon=True)
        self._lock = threading.Lock()
        self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._thread.start()

    def inside(self) -> bool:
        return threading.current_thread() is self._thread

    def call(self, function: Callable[..., T], *args: Any) -> T:  # noqa: ANN401
        """Run short work on the control thread; return its result. Raises StateError once stopped."""
        if self.inside():
            return function(*args)
        work = Work(partial(function, *args))
        self.post(work.run)
        return work.future.result()

    @whole
    def post(self, function: Callable[..., object], *args: Any) -> None:  # noqa: ANN401
        """Run ``function`` there soon, even if a stop follows. Raises StateError once stopped."""
        with self._lock:
            if self._stopped:
                raise StateError("the control thread has stopped")
            self.loop.call_soon_threadsafe(function, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine, until the loop's end cancels it. On the control thread."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def stop(self) -> None:
        """Run posted functions, cancel coroutines, join the thread. Idempotent."""
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

    @public_call
    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])  # an embedded interpreter does not ignore it
        with never_wait_here():
            asyncio.set_event_loop(self.loop)
            while True:
                try:
                    self.loop.run_forever()
                    break
                except MemoryError:
                    time.sleep(_NO_MEMORY_SECONDS)
            # One more turn: a coroutine that is cancelled before it begins cannot clean up.
            self.loop.run_until_complete(asyncio.sleep(0))
            for task in list(self._tasks):
                task.cancel()
            if self._tasks:
                self.loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    logger.error("unexpected error on the control thread: %s: %r", context.get("message"), error, exc_info=error)
