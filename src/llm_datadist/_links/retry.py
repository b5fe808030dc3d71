"""Redialler: what this end dialled and lost is dialled again, with back-off, until somebody links or unlinks it.

Only the same incarnation will do: another one has none of the caches that the link was for, and linking to it is the
user's decision (R22). Operations do not wait for a redial: they fail as without one, and say that it goes on.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import threading
import time
from typing import TYPE_CHECKING, Final

from llm_datadist._deadline import Deadline
from llm_datadist._log import logger
from llm_datadist._transport import inproc
from llm_datadist.errors import LinkRefused, LLMException, LLMStatusCode
from llm_datadist.metrics import RedialStatistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._links.communicator import Communicator
    from llm_datadist._links.handshake import Dial
    from llm_datadist._links.link import Link, Peer

__all__ = ["MemberDial", "MemberDials", "Reconnect", "Reconnector"]

_FIRST_SECONDS: Final = 0.1
_LONGEST_SECONDS: Final = 10.0
#: A link that is lost again within that time goes on with the back-off where it was.
_CALM_SECONDS: Final = 10.0
#: One attempt, and therefore also how long a finalize may have to wait for it.
_ATTEMPT_MS: Final = 3000
#: The peer has been asked, or has been seen to be another one: dialling on would not change that.
_FINAL: Final = frozenset(
    {LLMStatusCode.LLM_ALREADY_LINK, LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_PARAM_INVALID}
)


class Reconnect:
    """One lost link on its way back. Owns a descriptor of the peer's process, where the transport had one.

    Fields change under the redialler's lock; the dial is the redialler's thread's.

    Attributes:
        peer: Who must answer.
        address: Where.
        cancelled: True once this end has unlinked the cluster: a link that is made all the same must end.
    """

    def __init__(self, link: Link, address: tuple[str, int], delay: float) -> None:
        self.peer: Peer = link.peer
        self.address = address
        self.cancelled = False
        self.attempts = 0
        self.reason = ""
        self.delay = delay
        self.due = time.monotonic() + _jittered(delay)
        self._pidfd = link.connection.peer_pidfd()
        self._in_this_process = link.choice.name == "inproc"
        self._dial: Dial | None = None

    def gone(self) -> bool:
        """Return True when it is certain that this incarnation has ended."""
        if self._in_this_process:
            return not inproc.lives_here(self.peer.incarnation)
        if self._pidfd is None:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def begin(self, dial: Dial) -> None:
        """The attempt has a socket that :meth:`hang_up` can end.

        Raises:
            LinkRefused: Cancelled before it began.
        """
        self._dial = dial
        if self.cancelled:
            raise LinkRefused("unlinked meanwhile", status_code=LLMStatusCode.LLM_NOT_YET_LINK)

    def hang_up(self) -> None:
        """End the attempt that goes on, if any. Any thread."""
        self.cancelled = True
        dial = self._dial
        if dial is not None:
            dial.hang_up()

    def later(self, reason: str) -> None:
        """The attempt has failed: wait longer for the next one."""
        self._dial = None
        self.reason = reason
        self.delay = min(2 * self.delay, _LONGEST_SECONDS)
        self.due = time.monotonic() + _jittered(self.delay)

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)

    def abandon(self) -> None:
        """In a forked child: close the child's copies."""
        self.close()
        if self._dial is not None:
            self._dial.abandon()

    def statistics(self) -> RedialStatistics:
        """Return what is known about it."""
        return RedialStatistics(
            remote_cluster_id=self.peer.cluster_id,
            address=f"{self.address[0]}:{self.address[1]}",
            attempts=self.attempts,
            reason=self.reason,
        )

    def __repr__(self) -> str:
        return f"<Redial of {self.peer} at {self.address[0]}:{self.address[1]}: {self.attempts} attempts>"


class Reconnector:
    """All redials of one LLMDataDist, by cluster id. Any thread; nothing blocks under the lock.

    The thread ``llm-datadist-redial`` runs while there is something to dial; :meth:`stop` joins it.

    Args:
        dial: Makes one attempt; returns once the cluster is linked, whoever made the link, and raises otherwise.
        linked: Tells whether a cluster is linked by now.
    """

    def __init__(self, dial: Callable[[Reconnect, Deadline], None], linked: Callable[[int], bool]) -> None:
        self._dial = dial
        self._linked = linked
        self._changed = threading.Condition(threading.Lock())
        self._waiting: dict[int, Reconnect] = {}
        self._current: Reconnect | None = None
        #: Clusters that were dialled again with success: which delay that had taken, and when it was.
        self._made: dict[int, tuple[float, float]] = {}
        self._thread: threading.Thread | None = None
        self._running = False
        self._stopped = False

    # --- what happens to links: any thread -------------------------------------------------------------------------

    def begin(self, link: Link) -> Reconnect | None:
        """A link is being lost: dial it again soon. None when this end did not dial it, or it is not to be."""
        if link.address is None or link.ended:
            return None
        reconnect = Reconnect(link, link.address, self._first_delay(link.peer.cluster_id))
        if reconnect.gone():
            logger.info("%s is not dialled again: its process has ended", link.peer)
        elif self._add(reconnect):
            logger.info("%s is being dialled again at %s:%d", link.peer, *link.address)
            return reconnect
        reconnect.close()
        return None

    def _first_delay(self, cluster_id: int) -> float:
        delay, when = self._made.pop(cluster_id, (0.0, 0.0))
        calm = time.monotonic() - when > _CALM_SECONDS
        return _FIRST_SECONDS if calm else min(2 * delay, _LONGEST_SECONDS)

    def _add(self, reconnect: Reconnect) -> bool:
        with self._changed:
            if self._stopped or self._waiting.setdefault(reconnect.peer.cluster_id, reconnect) is not reconnect:
                return False
            if not self._running:
                self._thread = threading.Thread(target=self._run, name="llm-datadist-redial", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:
                    del self._waiting[reconnect.peer.cluster_id]
                    logger.warning("%s is not dialled again: %s; link_clusters links again", reconnect.peer, error)
                    self._thread = None
                    return False
                self._running = True
            self._changed.notify_all()
            return True

    def forget(self, reconnect: Reconnect) -> None:
        """It was begun for nothing: somebody else ended the link."""
        with self._changed:
            known = self._waiting.get(reconnect.peer.cluster_id) is reconnect
            if known:
                del self._waiting[reconnect.peer.cluster_id]
                self._changed.notify_all()
        if known:
            reconnect.close()

    def linked(self, cluster_id: int) -> None:
        """There is a link again, whoever made it."""
        reconnect = self._waiting.get(cluster_id)
        if reconnect is not None:
            self.forget(reconnect)

    def cancel(self, cluster_id: int, deadline: Deadline) -> None:
        """The cluster is being unlinked: dial it no more. Returns once no attempt goes on, or at the deadline."""
        with self._changed:
            self._made.pop(cluster_id, None)
            reconnect = self._waiting.pop(cluster_id, None)
            current = self._current
            if current is not None and current.peer.cluster_id != cluster_id:
                current = None
            self._changed.notify_all()
        if reconnect is not None:
            reconnect.close()
        if current is not None:
            current.hang_up()
            with self._changed:
                self._changed.wait_for(lambda: self._current is not current, deadline.remaining())

    def stop(self) -> None:
        """Dial nothing any more, and join the thread. Not from that thread."""
        with self._changed:
            self._stopped = True
            dropped = list(self._waiting.values())
            self._waiting.clear()
            current, thread = self._current, self._thread
            self._changed.notify_all()
        for reconnect in dropped:
            reconnect.close()
        if current is not None:
            current.hang_up()
        if thread is not None:
            thread.join()

    def abandon(self) -> None:
        """In a forked child, without any lock: the thread is the parent's; close the child's copies of descriptors."""
        current = self._current
        for reconnect in [*self._waiting.values(), *([] if current is None else [current])]:
            reconnect.abandon()

    # --- looking ---------------------------------------------------------------------------------------------------

    def statistics(self) -> tuple[RedialStatistics, ...]:
        """Return one value per cluster that is being dialled again."""
        with self._changed:
            current = [] if self._current is None else [self._current]
            redials = [*current, *self._waiting.values()]
        # An attempt that has made its link is over, whatever its thread still does.
        return tuple(reconnect.statistics() for reconnect in redials if not self._linked(reconnect.peer.cluster_id))

    def story(self, cluster_id: int) -> str:
        """Return what goes on about a cluster, as the end of an error text; "" when nothing does."""
        for each in self.statistics():
            if each.remote_cluster_id == cluster_id:
                last = f", the last attempt: {each.reason}" if each.reason else ""
                return f"; its link was lost and {each.address} is being dialled again ({each.attempts} attempts{last})"
        return ""

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (reconnect := self._next()) is not None:
            self._finish(reconnect, again=self._attempt(reconnect))

    def _next(self) -> Reconnect | None:
        """Wait for the next one that is due; None when there is nothing left to dial."""
        with self._changed:
            while self._waiting and not self._stopped:
                reconnect = min(self._waiting.values(), key=lambda each: each.due)
                seconds = reconnect.due - time.monotonic()
                if seconds <= 0:
                    self._current = self._waiting.pop(reconnect.peer.cluster_id)
                    reconnect.attempts += 1
                    return reconnect
                self._changed.wait(seconds)
            self._running = False
            return None

    def _attempt(self, reconnect: Reconnect) -> bool:
        """Dial once; return True when it must be tried again."""
        try:
            if self._linked(reconnect.peer.cluster_id):
                return False
            if reconnect.gone():
                raise LinkRefused("its process has ended", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
            self._dial(reconnect, Deadline(_ATTEMPT_MS))
        except LLMException as error:
            if reconnect.cancelled:
                return False
            final = error.status_code in _FINAL
            if final:
                logger.warning("%s is not dialled again: %s; link_clusters links again", reconnect.peer, error)
            reconnect.later(str(error))
            return not final
        except Exception as error:  # noqa: BLE001 (a bug may cost this redial, not those of the other peers)
            logger.error("unexpected error while %s was dialled again", reconnect.peer, exc_info=error)
            return False
        self._made[reconnect.peer.cluster_id] = (reconnect.delay, time.monotonic())
        return False

    def _finish(self, reconnect: Reconnect, *, again: bool) -> None:
        with self._changed:
            self._current = None
            keep = again and not (self._stopped or reconnect.cancelled)
            keep = keep and self._waiting.setdefault(reconnect.peer.cluster_id, reconnect) is reconnect
            self._changed.notify_all()
        if not keep:
            reconnect.close()


def _jittered(seconds: float) -> float:
    """Peers that lost each other at the same moment must not all dial at the same moment."""
    return seconds * random.uniform(0.5, 1.0)


#: Attempts at once (API §3.5); more wait for their turn, which is soon.
_THREADS: Final = 16
_FIRST_ATTEMPT_SECONDS: Final = 0.02
_LONGEST_ATTEMPT_SECONDS: Final = 0.5
_GROWTH: Final = 1.5
#: Of all members together: one attempt costs half a millisecond, and hundreds that never come may not cost a CPU.
_ATTEMPTS_PER_SECOND: Final = 150


class MemberDial:
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
        self._delay = _LONGEST_ATTEMPT_SECONDS if again else _FIRST_ATTEMPT_SECONDS
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
        self._delay = min(_GROWTH * self._delay, _LONGEST_ATTEMPT_SECONDS)

    def __lt__(self, other: MemberDial) -> bool:
        return self.due < other.due

    def abandon(self) -> None:
        """In a forked child: close the child's copy of the socket."""
        if self._dial is not None:
            self._dial.abandon()

    def __repr__(self) -> str:
        return f"<Approach to cluster {self.cluster_id} at {self.host} {self.ports} for {self.communicator}>"


class MemberDials:
    """All approaches of one LLMDataDist. Any thread; nothing blocks under the lock.

    Up to 16 threads ``llm-datadist-meet_<n>`` run while there is something to dial; :meth:`stop` joins them.

    Args:
        attempt: Tries once; returns True when it has to be tried again.
    """

    def __init__(self, attempt: Callable[[MemberDial], bool]) -> None:
        self._attempt = attempt
        self._changed = threading.Condition(threading.Lock())
        #: A heap: who is due first is first.
        self._waiting: list[MemberDial] = []
        self._current: list[MemberDial] = []
        self._threads: set[threading.Thread] = set()
        self._started = 0
        self._stopped = False

    def add(self, member: MemberDial) -> None:
        """Begin to dial.

        Raises:
            LinkRefused: This end is being finalised, or the system refuses a thread and none runs.
        """
        with self._changed:
            if self._stopped:
                raise LinkRefused("this end is being finalised")
            heapq.heappush(self._waiting, member)
            if len(self._threads) < min(_THREADS, len(self._waiting) + len(self._current)):
                self._start(member)
            self._changed.notify_all()

    def _start(self, member: MemberDial) -> None:
        """Under the lock: one more thread."""
        thread = threading.Thread(target=self._run, name=f"llm-datadist-meet_{self._started}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if self._threads:
                return
            self._waiting.remove(member)
            heapq.heapify(self._waiting)
            raise LinkRefused(f"no thread to prepare {member.communicator} with: {error}") from error
        self._started += 1
        self._threads.add(thread)

    def cancel(self, communicator: Communicator) -> None:
        """Dial nobody for it any more; an attempt that goes on is hung up on. Does not wait."""
        with self._changed:
            self._waiting = [each for each in self._waiting if each.communicator is not communicator]
            heapq.heapify(self._waiting)
            current = [each for each in self._current if each.communicator is communicator]
            self._changed.notify_all()
        for member in current:
            member.hang_up()

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
        for member in current:
            member.hang_up()
        for thread in threads:
            thread.join()

    def abandon(self) -> None:
        """In a forked child, without any lock: the threads are the parent's; close the child's copies of sockets."""
        for member in list(self._current):
            member.abandon()

    # --- the threads -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (member := self._next()) is not None:
            self._finish(member, again=self._try(member))

    def _next(self) -> MemberDial | None:
        """Wait for the next one that is due; None when no other waits for its turn."""
        with self._changed:
            while self._waiting and not self._stopped:
                member = self._waiting[0]
                seconds = member.due - time.monotonic()
                if seconds <= 0:
                    heapq.heappop(self._waiting)
                    self._current.append(member)
                    return member
                self._changed.wait(seconds)
            self._threads.discard(threading.current_thread())
            return None

    def _try(self, member: MemberDial) -> bool:
        try:
            return self._attempt(member)
        except LLMException as error:  # what an attempt may end with was dealt with: this end is being closed
            logger.info("%r: %s", member, error)
        except Exception as error:  # noqa: BLE001 (a bug may cost this member, not the others)
            logger.error("unexpected error in %r", member, exc_info=error)
        return False

    def _finish(self, member: MemberDial, *, again: bool) -> None:
        with self._changed:
            self._current.remove(member)
            member.later(len(self._waiting))
            if again and not (self._stopped or member.cancelled):
                heapq.heappush(self._waiting, member)
            self._changed.notify_all()
