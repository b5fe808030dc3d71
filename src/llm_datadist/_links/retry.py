"""Dials repeated with back-off: :class:`RetryQueue`, and reconnects by it."""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from llm_datadist._deadline import Deadline
from llm_datadist._log import links_logger as logger
from llm_datadist._log import named
from llm_datadist._native.public_call import public_call
from llm_datadist.errors import LinkRefused, LLMException, LLMStatusCode
from llm_datadist.metrics import RedialStatistics
from llm_datadist.types.cluster import show_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._links.dial import Dial
    from llm_datadist._links.link import Link, Peer
    from llm_datadist._transport.connection import Watch

_FIRST_SECONDS: Final = 0.1
_LONGEST_SECONDS: Final = 10.0
#: A loss within that time continues the back-off.
_CALM_SECONDS: Final = 10.0
#: Limit of one attempt.
_ATTEMPT_MS: Final = 3000
#: A silent peer holds a thread for a whole attempt; the next ones are dialled beside it.
_THREADS: Final = 8
#: Of failures, after which a peer is dialled once a minute.
_PATIENCE_SECONDS: Final = 600.0
_SELDOM_SECONDS: Final = 80.0  # before jitter
#: No attempt can succeed: the peer has refused, or is another process.
_FINAL: Final = (LLMStatusCode.LLM_ALREADY_LINK, LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_PARAM_INVALID)


class Attempt(ABC):
    """One address that a :class:`RetryQueue` dials until it succeeds or is cancelled.

    Threads: the queue's lock or the dialling thread guards the fields; any for :meth:`hang_up`.
    """

    def __init__(self, owner: object, due: float) -> None:
        self.owner = owner  # for RetryQueue.cancel
        self.due = due  # monotonic time of the next dial
        self.attempts = 0
        self.cancelled = False  # a link that is made nevertheless must end
        self._dial: Dial | None = None

    def begin(self, dial: Dial) -> None:
        """Take a handshake, which :meth:`hang_up` can end. Raises LinkRefused if cancelled."""
        self._dial = dial
        if self.cancelled:
            raise LinkRefused("unlinked during the dial", status_code=LLMStatusCode.LLM_NOT_YET_LINK)

    def hang_up(self) -> None:
        self.cancelled = True
        if (dial := self._dial) is not None:
            dial.hang_up()

    @abstractmethod
    def postpone(self, crowd: int) -> None:
        """Set the next time; ``crowd`` other attempts wait."""

    def duplicates(self, other: Attempt) -> bool:
        """Return True if the other attempt replaces this one."""
        return False

    def close(self) -> None:  # noqa: B027 (a member dial holds nothing)
        """Free what it holds. Idempotent."""

    def abandon(self) -> None:
        """In a forked child: close copies of descriptors."""
        self.close()
        if self._dial is not None:
            self._dial.abandon()


A = TypeVar("A", bound=Attempt)


class RetryQueue(Generic[A]):
    """Attempts in the order of their time. ``dial`` returns True if the attempt must be repeated.

    Owns: at most ``limit`` threads, while attempts wait; :meth:`stop` joins them.
    Threads: any; nothing blocks under the lock.
    """

    def __init__(self, name: str, limit: int, dial: Callable[[A], bool]) -> None:
        self._name = name
        self._limit = limit
        self._dial = dial
        self._changed = threading.Condition(threading.Lock())
        self._waiting: list[A] = []
        self._current: list[A] = []
        self._threads: list[threading.Thread] = []  # some may have ended
        self._running = 0
        self._started = 0
        self._stopped = False

    def add(self, attempt: A) -> bool:
        """Queue, in place of its duplicates; return False if stopped or a duplicate itself.

        Raises LinkRefused if no thread can start.
        """
        with self._changed:
            if self._stopped or any(map(attempt.duplicates, self._all())):
                return False
            if self._running < min(self._limit, len(self._all()) + 1):
                self._start_thread()
            replaced = [each for each in self._waiting if each.duplicates(attempt)]
            self._waiting = [attempt, *(each for each in self._waiting if each not in replaced)]
            self._changed.notify_all()
        for each in replaced:
            each.close()
        return True

    def _all(self) -> list[A]:  # under the lock, or in a forked child
        return [*self._current, *self._waiting]

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}_{self._started}", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            if self._running:
                return
            raise LinkRefused(f"no thread to dial with: {error}") from error
        self._started += 1
        self._running += 1
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]

    def cancel(self, owner: object) -> None:
        """Drop an owner's attempts, also those in progress."""
        self.drop(lambda each: each.owner == owner)

    def drop(self, unwanted: Callable[[A], bool], *, hang_up: bool = True) -> None:
        """Drop attempts, with ``hang_up`` also those in progress."""
        with self._changed:
            dropped = [each for each in self._waiting if unwanted(each)]
            current = [each for each in self._current if hang_up and unwanted(each)]
            for attempt in current:
                attempt.cancelled = True
            self._waiting = [each for each in self._waiting if not unwanted(each)]
            self._changed.notify_all()
        for attempt in dropped:
            attempt.close()
        for attempt in current:
            attempt.hang_up()

    def wait(self, owner: object, deadline: Deadline) -> None:
        deadline.wait_for(self._changed, lambda: all(each.owner != owner for each in self._current))

    def stop(self) -> None:
        """Drop all attempts and join the threads."""
        with self._changed:
            self._stopped = True
            threads = list(self._threads)
        self.drop(lambda _: True)
        for thread in threads:
            if thread is not threading.current_thread():  # a finalizer may call this
                thread.join()

    def abandon(self) -> None:
        """In a forked child, without the lock: close copies of descriptors."""
        for attempt in self._all():
            attempt.abandon()

    def _run(self) -> None:
        while self._make_next():
            pass

    @public_call
    def _make_next(self) -> bool:
        """Make the next attempt; return False if there is none."""
        attempt, again = self._next(), False
        if attempt is None:
            return False
        try:
            again = self._dial(attempt)
        except LLMException as error:  # this instance is being closed
            logger.info("%r: %s", attempt, named(error))
        except Exception as error:  # noqa: BLE001 (a bug may cost this attempt only)
            logger.error("unexpected error in %r", attempt, exc_info=error)
        self._finish(attempt, again=again)
        return True

    def _first(self) -> A:
        """Under the lock: return the next of the waiting attempts."""
        return min(self._waiting, key=lambda each: each.due)

    def _next(self) -> A | None:
        """Wait for the next attempt; None ends the thread."""
        with self._changed:
            while self._waiting and not self._stopped:
                attempt = self._first()
                seconds = attempt.due - time.monotonic()
                if seconds <= 0:
                    self._waiting.remove(attempt)
                    self._current.append(attempt)
                    attempt.attempts += 1
                    return attempt
                self._changed.wait(seconds)
            self._running -= 1
            return None

    def _finish(self, attempt: A, *, again: bool) -> None:
        with self._changed:
            self._current.remove(attempt)
            keep = again and not (self._stopped or attempt.cancelled or any(map(attempt.duplicates, self._all())))
            if keep:
                attempt.postpone(len(self._waiting))
                self._waiting.append(attempt)
            self._changed.notify_all()
        if not keep:
            attempt.close()


class Reconnect(Attempt):
    """A lost link that this side dialled. Operations do not wait for it.

    Only the same incarnation may answer: another has none of the caches; the user may link to it (interface R22).

    Owns: a watch on the end of the peer's process, if the transport has one.
    """

    def __init__(self, link: Link, address: tuple[str, int], delay: float) -> None:
        super().__init__(link.peer.cluster_id, time.monotonic() + _jittered(delay))
        self.peer: Peer = link.peer
        self.sequence = link.origin.sequence  # of the lost link
        self.begun = time.monotonic()
        self.cost = 0.0  # seconds that its failed attempts held a thread
        self.address = address
        self.reason = ""  # of the last failure
        self.refused = False  # by the kernel of the peer's host
        self.delay = delay  # before jitter
        self._watch: Watch | None = next(filter(None, (each.watch() for each in link.connection.connections)), None)

    def peer_ended(self) -> bool:
        """Return True if this incarnation has certainly ended."""
        watch = self._watch
        return watch is not None and watch.ended()

    def postpone(self, crowd: int) -> None:
        self._dial = None
        now = time.monotonic()
        seldom = now - self.begun >= _PATIENCE_SECONDS
        self.delay = _SELDOM_SECONDS if seldom else min(2 * self.delay, _LONGEST_SECONDS)
        self.due = now + _jittered(self.delay)

    def duplicates(self, other: Attempt) -> bool:
        """Return True if the other is for that cluster, of the same link or a later one."""
        return isinstance(other, Reconnect) and other.owner == self.owner and other.sequence >= self.sequence

    def close(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def __repr__(self) -> str:
        return f"<Reconnect to {self.peer} at {show_address(self.address)}: {self.attempts} attempts>"


class Reconnector(RetryQueue[Reconnect]):
    """All reconnects of one LLMDataDist, one for each cluster id; an attempt for an earlier link may just be ending.

    Of the dials that are due, the one that cost least is the first, then the link that was lost last: gone peers, which
    let an attempt wait for its whole limit, share the threads that others leave.

    ``dial`` makes one attempt; it returns once the cluster is linked, by any call, and raises otherwise. ``linked``
    returns True if there is a later link than the lost one.
    """

    def __init__(self, dial: Callable[[Reconnect, Deadline], None], linked: Callable[[Reconnect], bool]) -> None:
        super().__init__("llm-datadist-redial", _THREADS, self._attempt)
        self._dial_once = dial
        self._linked = linked
        self.succeeded = 0
        self._made: dict[int, tuple[float, float]] = {}  # delay and time of the last success, by cluster id

    def begin(self, link: Link) -> Reconnect | None:
        """Begin to dial a link that is being lost; None if it cannot come back."""
        if link.origin.address is None or link.ended:
            return None
        cluster_id = link.peer.cluster_id
        delay, when = self._made.pop(cluster_id, (0.0, 0.0))
        calm = time.monotonic() - when > _CALM_SECONDS
        reconnect = Reconnect(link, link.origin.address, _FIRST_SECONDS if calm else min(2 * delay, _LONGEST_SECONDS))
        try:
            if reconnect.peer_ended():
                logger.info("%s is not dialled again: its process has ended", link.peer)
            elif self.add(reconnect):
                logger.info("%s is being dialled again at %s", link.peer, show_address(link.origin.address))
                return reconnect
        except LinkRefused as error:
            logger.warning("%s is not dialled again: %s; link_clusters links again", link.peer, named(error))
        reconnect.close()
        return None

    def _first(self) -> Reconnect:
        now = time.monotonic()
        due = [each for each in self._waiting if each.due <= now]
        return max(due, key=lambda each: (-each.cost, each.begun)) if due else super()._first()

    def drop_older(self, link: Link) -> None:
        """Drop waiting dials of earlier links to that cluster. This one may be lost already: its own dial stays."""
        cluster_id, sequence = link.peer.cluster_id, link.origin.sequence
        self.drop(lambda each: each.owner == cluster_id and each.sequence < sequence, hang_up=False)

    def unlink(self, cluster_id: int, deadline: Deadline) -> None:
        """Give up a cluster; wait for its attempt until the deadline."""
        self._made.pop(cluster_id, None)
        self.cancel(cluster_id)
        self.wait(cluster_id, deadline)

    def statistics(self) -> tuple[RedialStatistics, ...]:
        """Return one for each cluster, the link lost last."""
        with self._changed:
            latest = {each.owner: each for each in sorted(self._all(), key=lambda each: each.sequence)}
        return tuple(
            RedialStatistics(
                remote_cluster_id=each.peer.cluster_id,
                address=show_address(each.address),
                attempts=each.attempts,
                reason=each.reason,
                refused=each.refused,
            )
            for each in latest.values()
            if not self._linked(each)  # its attempt has succeeded
        )

    def story(self, cluster_id: int) -> str:
        """Return the state of a reconnect, as the end of an error text."""
        for each in self.statistics():
            if each.remote_cluster_id == cluster_id:
                last = f", the last attempt: {each.reason}" if each.reason else ""
                return f"; {each.address} is being dialled again ({each.attempts} attempts{last})"
        return ""

    def _attempt(self, reconnect: Reconnect) -> bool:
        """Dial once; return True to repeat."""
        began = time.monotonic()
        try:
            if self._linked(reconnect):
                return False
            if reconnect.peer_ended():
                raise LinkRefused("its process has ended", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
            self._dial_once(reconnect, Deadline(_ATTEMPT_MS))
        except LLMException as error:
            reconnect.reason = str(error)
            reconnect.refused = isinstance(error.__cause__, ConnectionRefusedError)
            reconnect.cost += time.monotonic() - began
            final = error.status_code in _FINAL
            if final and not reconnect.cancelled:
                logger.warning("%s is not dialled again: %s; link_clusters links again", reconnect.peer, named(error))
            return not final
        with self._changed:
            self.succeeded += 1
            self._made[reconnect.peer.cluster_id] = (reconnect.delay, time.monotonic())
        return False


def _jittered(seconds: float) -> float:
    """Return half to all of it: peers that lost each other together must not dial together."""
    return seconds * random.uniform(0.5, 1.0)
