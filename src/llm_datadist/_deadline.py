"""Deadline of one public call, and its waits: turns of at most 50 ms.

Between turns a cancellation is noticed, and that a signal handler has raised.
"""

from __future__ import annotations

import select
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Final, TypeVar

from llm_datadist._native import NO_DEADLINE, check_signals
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
_ADVICE: Final = "raise sync_kv_timeout or the call's timeout if the work is that large"


class Deadline:
    """End of a call, ``budget_ms`` milliseconds after its construction.

    Attributes:
        budget_ms: Milliseconds of the call.
        expires_ns: ``time.monotonic_ns()`` of the end.
        cancelled: Byte for native loops, not 0 after :meth:`cancel`; None if not cancellable.
    """

    __slots__ = ("_started_ns", "budget_ms", "cancelled", "expires_ns")

    def __init__(self, budget_ms: int, *, cancellable: bool = False) -> None:
        self.budget_ms = budget_ms
        self.cancelled = bytearray(1) if cancellable else None
        self._started_ns = time.monotonic_ns()
        self.expires_ns = min(self._started_ns + budget_ms * _NS_PER_MS, NO_DEADLINE)

    def remaining(self) -> float:
        """Return the seconds left, at least 0."""
        return max(0, self.expires_ns - time.monotonic_ns()) / 1e9

    def next_turn(self) -> float:
        """Return the seconds of the next turn; raise if a signal handler has raised."""
        check_signals()
        return self.turn()

    def turn(self) -> float:
        """Return the seconds of a turn before which no signal is looked for."""
        return min(self.remaining(), _LONGEST_TURN_S)

    def remaining_ms(self) -> int:
        """Return the milliseconds left, rounded up, at least 0."""
        return -(-max(0, self.expires_ns - time.monotonic_ns()) // _NS_PER_MS)

    def elapsed_ms(self) -> float:
        return (time.monotonic_ns() - self._started_ns) / _NS_PER_MS

    def expired(self) -> bool:
        return time.monotonic_ns() >= self.expires_ns

    def cancel(self) -> None:
        """End the deadline now, from any thread. Waits notice within 50 ms, native copies after their chunk."""
        assert self.cancelled is not None, "it was not made to be cancelled"
        self.cancelled[0] = 1
        self.expires_ns = 0

    def was_cancelled(self) -> bool:
        """Return True after :meth:`cancel`: the deadline then says nothing about the peer."""
        return self.cancelled is not None and self.cancelled[0] != 0

    def poll(self, done: Callable[[], bool]) -> bool:
        """Poll ``done``, at pauses of 0.5 to 20 ms; False if time runs out."""
        pause = _SHORTEST_POLL_S
        while not done():
            if self.expired():
                return False
            time.sleep(min(pause, self.next_turn()))
            pause = min(2 * pause, _LONGEST_POLL_S)
        return True

    def ready(self, sock: socket.socket, event: int) -> bool:
        """Wait until a socket is ready for a ``select.poll`` event, or failed; False if time runs out."""
        poll = select.poll()
        poll.register(sock, event)
        while not poll.poll(self.next_turn() * 1e3):
            if self.expired():
                return False
        return True

    def wait_for(self, condition: threading.Condition, done: Callable[[], bool]) -> bool:
        """Wait until ``done``, called under the lock at each change; False if time runs out."""
        while True:
            seconds = self.next_turn()
            with condition:
                if condition.wait_for(done, seconds):
                    return True
            if self.expired():
                return False

    def error(self, what: str, phase: str, peer: int | None = None, *, advice: str = _ADVICE) -> DeadlineExceeded:
        elapsed = self.elapsed_ms()
        when = f"(phase {phase}, {elapsed:.0f} ms elapsed)"
        if self.was_cancelled():
            text = f"{what}: cancelled by its caller {when}"
        else:
            text = f"{what}: no answer within {self.budget_ms} ms {when}; {advice}"
        return DeadlineExceeded(text, phase=phase, budget_ms=self.budget_ms, elapsed_ms=elapsed, peer=peer)

    def check(self, what: str, phase: str, peer: int | None = None) -> None:
        """Raise :meth:`error` if no time is left."""
        if self.expired():
            raise self.error(what, phase, peer)


def wait_all(futures: list[Future[T]], cancel: Callable[[], object]) -> list[T]:
    """Wait for all futures; return their results, or raise the first error.

    If a signal handler raises, ``cancel`` must end the futures soon; they have ended when this raises.
    """
    try:
        while wait(futures, _LONGEST_TURN_S).not_done:
            check_signals()
    except BaseException:
        cancel()
        wait(futures)
        raise
    return [each.result() for each in futures]
