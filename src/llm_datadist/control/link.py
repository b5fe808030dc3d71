"""One link: the peer, the control channel, the data connection, and who is using them right now."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llm_datadist.control.machine import USABLE, LinkEvent, LinkMachine, LinkState
from llm_datadist.control.messages import Failed, Message
from llm_datadist.errors import LLMException, NotLinked, PeerLost, code_2_status
from llm_datadist.metrics import LinkStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llm_datadist.control.channel import Channel
    from llm_datadist.deadline import Deadline
    from llm_datadist.transport import Choice
    from llm_datadist.transport.base import Connection

__all__ = ["Link", "Peer", "RemoteFailure"]


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end: the process incarnation, not only the cluster id it goes by."""

    cluster_id: int
    incarnation: bytes
    pid: int
    host: str

    def __str__(self) -> str:
        return f"cluster {self.cluster_id} (pid {self.pid} on {self.host})"


class RemoteFailure(LLMException):
    """The target answered a request with a status and a text; the link is fine."""


class _Waiter:
    """One caller waiting for one answer: a lock that the control thread opens."""

    __slots__ = ("_gate", "answer")

    def __init__(self) -> None:
        self.answer: Message | None = None
        self._gate = threading.Lock()
        self._gate.acquire()

    def wait(self, seconds: float) -> bool:
        return self._gate.acquire(timeout=seconds)

    def wake(self, answer: Message | None) -> None:
        self.answer = answer
        self._gate.release()


class Link:
    """A link that is at least shaken hands on.

    Callers' threads run operations and requests; the control thread delivers answers, beats and the end. The lock
    guards the machine, the waiters and the count of operations; nothing blocks under it. The link owns the channel and
    the data connection, and closes both when it ends.

    Attributes:
        peer: Who is at the other end.
        choice: The transport in use, and why.
        kept: Answers of the peer that stay valid while their guards do; belongs to the transfer layer.
    """

    def __init__(
        self, peer: Peer, connection: Connection, choice: Choice, *, sequence: int, dialled: bool, loopback: bool
    ) -> None:
        self.peer = peer
        self.connection = connection
        self.choice = choice
        self.sequence = sequence
        self.dialled = dialled
        self.loopback = loopback
        self.kept: dict[Any, Any] = {}
        self.channel: Channel | None = None
        self.last_heard = time.monotonic()
        self._machine = LinkMachine(f"link to {peer}")
        self._machine.fire(LinkEvent.HELLO)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._operations = 0
        self._waiters: dict[int, _Waiter] = {}
        self._ids = itertools.count(1)
        self._farewell: Callable[[], None] | None = None
        self._lost_reason = ""

    @property
    def state(self) -> LinkState:
        """The state now."""
        return self._machine.state

    @property
    def usable(self) -> bool:
        """True when operations may start."""
        return self._machine.state in USABLE

    def ready(self, channel: Channel) -> None:
        """The handshake is over."""
        with self._lock:
            self.channel = channel
            self._machine.fire(LinkEvent.READY)

    # --- operations: callers' threads ------------------------------------------------------------------------------

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Keep the data connection open for the length of the block.

        Raises:
            NotLinked: The link is being given up or is gone.
        """
        with self._lock:
            if self._machine.state not in USABLE:
                raise NotLinked(f"the link to {self.peer} is {self._machine.state.value}", peer=self.peer.cluster_id)
            self._operations += 1
        try:
            yield
        finally:
            with self._lock:
                self._operations -= 1
                farewell = self._due_farewell()
                if self._operations == 0:
                    self._idle.notify_all()
            if farewell is not None:
                farewell()

    def request(self, build: Callable[[int], Message], deadline: Deadline, what: str, phase: str) -> Message:
        """Send a request and wait for its answer.

        Raises:
            RemoteFailure: The target answered with a failure.
            DeadlineExceeded: No answer in time; a late one is dealt with when it comes.
            PeerLost: The link broke meanwhile.
        """
        waiter = _Waiter()
        number = next(self._ids)
        with self._lock:
            self._waiters[number] = waiter
        try:
            self.send(build(number))
            answered = waiter.wait(deadline.remaining())
        finally:
            with self._lock:
                # An answer that comes from now on is late: nobody waits for it.
                self._waiters.pop(number, None)
        answer = waiter.answer
        if answer is None:
            if answered or not self.usable:
                raise self.lost_error(what, phase)
            raise deadline.error(f"{what} from {self.peer}", phase, self.peer.cluster_id)
        if isinstance(answer, Failed):
            raise RemoteFailure(
                answer.text, status_code=code_2_status(answer.code), peer=self.peer.cluster_id, phase=phase
            )
        return answer

    def send(self, message: Message) -> None:
        """Send a message that nobody answers."""
        channel = self.channel
        if channel is None:
            raise NotLinked(f"the link to {self.peer} is not ready")
        try:
            channel.send(message)
        except NotLinked as error:
            raise self.lost_error(type(message).__name__, "send") from error

    def lost_error(self, what: str, phase: str) -> LLMException:
        """Build the error for an operation that the loss of this link ended."""
        reason = self._lost_reason or "the link was given up"
        return PeerLost(
            f"{what}: lost {self.peer} in phase {phase}: {reason}; link again to recover",
            peer=self.peer.cluster_id,
            phase=phase,
        )

    # --- what the control thread reports ---------------------------------------------------------------------------

    def answer(self, number: int, message: Message) -> bool:
        """Deliver an answer; False when nobody waits for it any more."""
        with self._lock:
            waiter = self._waiters.pop(number, None)
        if waiter is None:
            return False
        waiter.wake(message)
        return True

    def heard(self) -> None:
        """Something came from the peer."""
        self.last_heard = time.monotonic()
        if self._machine.state is LinkState.SUSPECT:
            with self._lock:
                if self._machine.can(LinkEvent.HEARD):
                    self._machine.fire(LinkEvent.HEARD)

    def silent(self) -> bool:
        """Nothing came for a while: become SUSPECT. True when that is news."""
        with self._lock:
            if not self._machine.can(LinkEvent.SILENT):
                return False
            self._machine.fire(LinkEvent.SILENT)
            return True

    # --- the end ---------------------------------------------------------------------------------------------------

    def begin_unlink(self) -> bool:
        """Let no operation start any more; False when the link is not usable anyway."""
        with self._lock:
            if not self._machine.can(LinkEvent.UNLINK):
                return False
            self._machine.fire(LinkEvent.UNLINK)
            return True

    def resume(self) -> None:
        """Take an unlink back: the peer did not answer it."""
        with self._lock:
            if self._machine.can(LinkEvent.RESUME):
                self._machine.fire(LinkEvent.RESUME)

    def wait_idle(self, deadline: Deadline) -> bool:
        """Wait until no operation runs; False when the deadline passed first."""
        with self._lock:
            return self._idle.wait_for(lambda: self._operations == 0, deadline.remaining())

    def when_idle(self, farewell: Callable[[], None]) -> None:
        """Call ``farewell`` once no operation runs: now, or by the last one's thread."""
        with self._lock:
            self._farewell = farewell
            due = self._due_farewell()
        if due is not None:
            due()

    def end(self, reason: str, *, lost: bool) -> bool:
        """The link is over: fail who waits, close what nobody uses. False when it was over already."""
        with self._lock:
            if self._machine.state is LinkState.CLOSED:
                return False
            if lost or not self._machine.can(LinkEvent.IDLE):
                self._machine.fire(LinkEvent.LOST)
                self._machine.fire(LinkEvent.CLEANUP)
            else:
                self._machine.fire(LinkEvent.IDLE)
            self._lost_reason = reason
            waiters = list(self._waiters.values())
            self._waiters.clear()
        for waiter in waiters:
            waiter.wake(None)
        # Operations still copying keep the mappings until they are done: the connection counts its users.
        self.connection.close()
        if self.channel is not None:
            self.channel.close(reason)
        return True

    def _due_farewell(self) -> Callable[[], None] | None:
        """Under the lock: the farewell, if it waits and no operation runs."""
        if self._operations:
            return None
        farewell, self._farewell = self._farewell, None
        return farewell

    def statistics(self) -> LinkStatistics:
        """Return what is known about this link."""
        return LinkStatistics(
            remote_cluster_id=self.peer.cluster_id,
            state=self._machine.state.value,
            transport=self.choice.name,
            reason=self.choice.reason,
            peer_pid=self.peer.pid,
            peer_host=self.peer.host,
            read_bytes=self.connection.bytes_read,
            written_bytes=self.connection.bytes_written,
            resolved=len(self.kept),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when the link contradicts itself."""
        with self._lock:
            if self._operations < 0:
                raise AssertionError(f"{self._machine.name}: {self._operations} operations")
            if self._machine.state is LinkState.CLOSED and self._waiters:
                raise AssertionError(f"{self._machine.name}: closed with {len(self._waiters)} waiting callers")

    def __repr__(self) -> str:
        return f"<Link to {self.peer}: {self._machine.state.value}, {self.choice.name}, {self._operations} running>"
