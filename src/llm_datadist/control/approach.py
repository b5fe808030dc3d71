"""Approaches: the members of communicators that this end has to dial, tried again until they are there.

A member may call ``link()`` long after this end: whoever dials tries the ports where the other one may listen, over
and over. An attempt that finds nobody takes no time and no thread, and all attempts together are bounded: neither one
that never comes nor hundreds of them hold up anybody.
"""

from __future__ import annotations

import heapq
import threading
import time
from typing import TYPE_CHECKING, Final

from llm_datadist.errors import LinkRefused, LLMException, LLMStatusCode
from llm_datadist.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.control.communicator import Communicator
    from llm_datadist.control.handshake import Dial
    from llm_datadist.deadline import Deadline

__all__ = ["Approach", "Approaches"]

#: Attempts at once (API §3.5); more wait for their turn, which is soon.
_THREADS: Final = 16
_FIRST_SECONDS: Final = 0.02
_LONGEST_SECONDS: Final = 0.5
_GROWTH: Final = 1.5
#: Of all members together: one attempt costs half a millisecond, and hundreds that never come may not cost a CPU.
_ATTEMPTS_PER_SECOND: Final = 150


class Approach:
    """One member that is to be dialled. Used by one thread at a time; :meth:`hang_up` by any.

    Args:
        communicator: For whom.
        cluster_id: Who has to answer.
        again: It was met, and is lost: no hurry, so that a link which breaks at once costs little.

    Attributes:
        communicator: For whom.
        cluster_id: Who has to answer.
        host: Where.
        ports: At which ports it may listen; the next one to try is first.
        cancelled: True once nobody wants it any more.
        due: When it is to be tried next, on the monotonic clock.
    """

    def __init__(self, communicator: Communicator, cluster_id: int, *, again: bool = False) -> None:
        self.communicator = communicator
        self.cluster_id = cluster_id
        self.host = communicator.plan.addresses[cluster_id]
        self.ports = communicator.ports[cluster_id]
        self.cancelled = False
        self._delay = _LONGEST_SECONDS if again else _FIRST_SECONDS
        self.due = time.monotonic() + self._delay if again else 0.0
        self._dial: Dial | None = None

    @property
    def address(self) -> tuple[str, int]:
        """What to dial now."""
        return self.host, self.ports[0]

    def begin(self, dial: Dial) -> None:
        """The attempt has a socket that :meth:`hang_up` can end.

        Raises:
            LinkRefused: Cancelled before it began.
        """
        self._dial = dial
        if self.cancelled:
            raise LinkRefused("unlinked meanwhile", status_code=LLMStatusCode.LLM_NOT_YET_LINK)

    def next_port(self) -> None:
        """The first one is not where the member listens, or not now: try it last."""
        self.ports = [*self.ports[1:], self.ports[0]]

    def hang_up(self) -> None:
        """End the attempt that goes on, if any. Any thread."""
        self.cancelled = True
        dial = self._dial
        if dial is not None:
            dial.hang_up()

    def later(self, crowd: int) -> None:
        """Nobody was there: look again a little later; the later, the more members are looked for."""
        self._dial = None
        self.due = time.monotonic() + max(self._delay, crowd / _ATTEMPTS_PER_SECOND)
        self._delay = min(_GROWTH * self._delay, _LONGEST_SECONDS)

    def __lt__(self, other: Approach) -> bool:
        return self.due < other.due

    def abandon(self) -> None:
        """In a forked child: close the child's copy of the socket."""
        if self._dial is not None:
            self._dial.abandon()

    def __repr__(self) -> str:
        return f"<Approach to cluster {self.cluster_id} at {self.host} {self.ports} for {self.communicator}>"


class Approaches:
    """All approaches of one LLMDataDist. Any thread; nothing blocks under the lock.

    Up to 16 threads ``llm-datadist-meet_<n>`` run while there is something to dial; :meth:`stop` joins them.

    Args:
        attempt: Tries once; returns True when it has to be tried again.
    """

    def __init__(self, attempt: Callable[[Approach], bool]) -> None:
        self._attempt = attempt
        self._changed = threading.Condition(threading.Lock())
        #: A heap: who is due first is first.
        self._waiting: list[Approach] = []
        self._current: list[Approach] = []
        self._threads: set[threading.Thread] = set()
        self._started = 0
        self._stopped = False

    def add(self, approach: Approach) -> None:
        """Begin to dial.

        Raises:
            LinkRefused: This end is being finalised, or the system refuses a thread and none runs.
        """
        with self._changed:
            if self._stopped:
                raise LinkRefused("this end is being finalised")
            heapq.heappush(self._waiting, approach)
            if len(self._threads) < min(_THREADS, len(self._waiting) + len(self._current)):
                self._start(approach)
            self._changed.notify_all()

    def _start(self, approach: Approach) -> None:
        """Under the lock: one more thread."""
        thread = threading.Thread(target=self._run, name=f"llm-datadist-meet_{self._started}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if self._threads:
                return
            self._waiting.remove(approach)
            heapq.heapify(self._waiting)
            raise LinkRefused(f"no thread to prepare {approach.communicator} with: {error}") from error
        self._started += 1
        self._threads.add(thread)

    def cancel(self, communicator: Communicator) -> None:
        """Dial nobody for it any more; an attempt that goes on is hung up on. Does not wait."""
        with self._changed:
            self._waiting = [each for each in self._waiting if each.communicator is not communicator]
            heapq.heapify(self._waiting)
            current = [each for each in self._current if each.communicator is communicator]
            self._changed.notify_all()
        for approach in current:
            approach.hang_up()

    def wait(self, communicator: Communicator, deadline: Deadline) -> None:
        """Return once no attempt for it goes on, or at the deadline. Not from an attempt."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(each.communicator is not communicator for each in self._current), deadline.remaining()
            )

    def stop(self) -> None:
        """Dial nobody any more, and join the threads. Not from one of them."""
        with self._changed:
            self._stopped = True
            self._waiting.clear()
            current, threads = list(self._current), list(self._threads)
            self._changed.notify_all()
        for approach in current:
            approach.hang_up()
        for thread in threads:
            thread.join()

    def abandon(self) -> None:
        """In a forked child, without any lock: the threads are the parent's; close the child's copies of sockets."""
        for approach in list(self._current):
            approach.abandon()

    # --- the threads -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (approach := self._next()) is not None:
            self._finish(approach, again=self._try(approach))

    def _next(self) -> Approach | None:
        """Wait for the next one that is due; None when no other waits for its turn."""
        with self._changed:
            while self._waiting and not self._stopped:
                approach = self._waiting[0]
                seconds = approach.due - time.monotonic()
                if seconds <= 0:
                    heapq.heappop(self._waiting)
                    self._current.append(approach)
                    return approach
                self._changed.wait(seconds)
            self._threads.discard(threading.current_thread())
            return None

    def _try(self, approach: Approach) -> bool:
        try:
            return self._attempt(approach)
        except LLMException as error:  # what an attempt may end with was dealt with: this end is being closed
            logger.info("%r: %s", approach, error)
        except Exception as error:  # noqa: BLE001 (a bug may cost this member, not the others)
            logger.error("unexpected error in %r", approach, exc_info=error)
        return False

    def _finish(self, approach: Approach, *, again: bool) -> None:
        with self._changed:
            self._current.remove(approach)
            approach.later(len(self._waiting))
            if again and not (self._stopped or approach.cancelled):
                heapq.heappush(self._waiting, approach)
            self._changed.notify_all()
