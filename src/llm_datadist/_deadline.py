"""The deadline of one public call: built once at the public method, passed down, never renewed. How its caller waits.

A caller waits in turns of at most 50 ms. Between two of them, without a lock, handlers of signals run, which may raise,
and a cancellation is noticed.
"""

from __future__ import annotations

import select
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Final, TypeVar

from llm_datadist._native import deliver_signals
from llm_datadist.errors import DeadlineExceeded

if TYPE_CHECKING:
    import socket
    import threading
    from collections.abc import Callable

T = TypeVar("T")

_NS_PER_MS: Final = 1_000_000
_SHORTEST_POLL_S: Final = 0.0005
_LONGEST_POLL_S: Final = 0.02
_LONGEST_TURN_S: Final = 0.05


class Deadline:
    """A point on the monotonic clock, ``budget_ms`` milliseconds from now, with the budget it came from.

    Attributes:
        budget_ms: Milliseconds the call was given.
        expires_ns: ``time.monotonic_ns()`` at which it is over; what native loops compare with.
        cancelled: One byte that is not zero after :meth:`cancel`, which native loops read. None: not cancellable.
    """

    __slots__ = ("_started_ns", "budget_ms", "cancelled", "expires_ns")

    def __init__(self, budget_ms: int, *, cancellable: bool = False) -> None:
        self.budget_ms = budget_ms
        self.cancelled = bytearray(1) if cancellable else None
        self._started_ns = time.monotonic_ns()
        self.expires_ns = self._started_ns + budget_ms * _NS_PER_MS

    def remaining(self) -> float:
        """Return the seconds left, never below zero: what a wait may take."""
        return max(0, self.expires_ns - time.monotonic_ns()) / 1e9

    def next_turn(self) -> float:
        """Return the seconds that the next turn of a wait may take. The caller holds no lock: handlers run."""
        deliver_signals()
        return min(self.remaining(), _LONGEST_TURN_S)

    def remaining_ms(self) -> int:
        """Return the whole milliseconds left, rounded up, never below zero."""
        return -(-max(0, self.expires_ns - time.monotonic_ns()) // _NS_PER_MS)

    def elapsed_ms(self) -> float:
        """Return the milliseconds since the call began."""
        return (time.monotonic_ns() - self._started_ns) / _NS_PER_MS

    def expired(self) -> bool:
        return time.monotonic_ns() >= self.expires_ns

    def cancel(self) -> None:
        """End the deadline now; waits notice within 50 ms, native work after its current chunk. Any thread."""
        assert self.cancelled is not None, "it was not made to be cancelled"
        self.cancelled[0] = 1
        self.expires_ns = 0

    def was_cancelled(self) -> bool:
        """Return True when the caller was cancelled: then the lack of time says nothing about the peer."""
        return self.cancelled is not None and self.cancelled[0] != 0

    def poll(self, done: Callable[[], bool]) -> bool:
        """Poll ``done``, ever less often; return True once it is, False when no time is left."""
        pause = _SHORTEST_POLL_S
        while not done():
            if self.expired():
                return False
            time.sleep(min(pause, self.next_turn()))
            pause = min(2 * pause, _LONGEST_POLL_S)
        return True

    def ready(self, sock: socket.socket, event: int) -> bool:
        """Wait until a socket is ready for ``event`` (of ``select.poll``) or has failed; False when no time is left."""
        poll = select.poll()
        poll.register(sock, event)
        while not poll.poll(self.next_turn() * 1e3):
            if self.expired():
                return False
        return True

    def wait_for(self, condition: threading.Condition, done: Callable[[], bool]) -> bool:
        """Wait until ``done``, called under the lock at every change; return False when no time is left."""
        while True:
            seconds = self.next_turn()
            with condition:
                if condition.wait_for(done, seconds):
                    return True
            if self.expired():
                return False

    def error(self, what: str, phase: str, peer: int | None = None) -> DeadlineExceeded:
        """Build the error that says ``what`` ran out of time in which ``phase``."""
        elapsed = self.elapsed_ms()
        when = f"(phase {phase}, {elapsed:.0f} ms elapsed)"
        if self.was_cancelled():
            text = f"{what}: cancelled by its caller {when}"
        else:
            advice = "raise sync_kv_timeout or the call's timeout if the work is that large"
            text = f"{what}: no answer within {self.budget_ms} ms {when}; {advice}"
        return DeadlineExceeded(text, phase=phase, budget_ms=self.budget_ms, elapsed_ms=elapsed, peer=peer)

    def check(self, what: str, phase: str, peer: int | None = None) -> None:
        """Raise :class:`DeadlineExceeded` when no time is left."""
        if self.expired():
            raise self.error(what, phase, peer)


def wait_all(futures: list[Future[T]], cancel: Callable[[], object]) -> list[T]:
    """Wait for all futures and return their results, or raise the first error.

    If the handler of a signal raises, ``cancel`` must make them end soon: they have ended when this raises.
    """
    try:
        while wait(futures, _LONGEST_TURN_S).not_done:
            deliver_signals()
    except BaseException:
        cancel()
        wait(futures)
        raise
    return [each.result() for each in futures]
