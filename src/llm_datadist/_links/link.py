"""One link: the peer, the control channel, the data connection, and who is using them right now."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Self

from llm_datadist._links.channel import Channel, Waiter
from llm_datadist._links.messages import Failed, Message, Ping
from llm_datadist._log import logger
from llm_datadist._native import UseGate, steps
from llm_datadist.errors import (
    AlreadyLinked,
    CacheMismatch,
    CacheNotFound,
    LinkError,
    LLMException,
    LLMStatusCode,
    NotLinked,
    PeerLost,
    StateError,
    TransferFailed,
    code_2_status,
)
from llm_datadist.metrics import LinkStatistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline
    from llm_datadist._links.messages import Hello
    from llm_datadist._transport import Choice
    from llm_datadist._transport.connection import DataPath

__all__ = ["TRANSITIONS", "USABLE", "Link", "LinkEvent", "LinkMachine", "LinkState", "Peer", "RemoteFailure"]


class Link:
    """A link that is at least shaken hands on.

    Callers' threads run operations and requests, and read answers; the control thread delivers all else. The lock
    guards the machine, the waiters and the count of operations; nothing blocks under it. The link owns the channel and
    the data connection, and closes both when it ends.

    Attributes:
        peer: Who is at the other end.
        choice: The transport in use, and why.
        dialled: True when this end dialled.
        asked_for: True once ``link_clusters`` of this end named this link.
        sequence: This end's number for it; a later link has a higher one.
        peer_sequence: The other end's.
        address: Where this end dialled it; None at the other end.
        redialled: True when the dialling end made it again by itself after a loss: ``link_clusters`` of either end
            may still claim it.
        by_table: True when communicators of both ends made it, and ``link_clusters`` of neither.
        greetings: What members of communicators dialled with, until the peer has shown that it knows this link.
        open: False while no communicator that it was made for is OK: operations of this end may not use it yet.
        last_heard: When something came from the peer, on the monotonic clock.
        last_pong: Number of the last :meth:`ping` that was answered.
        located: Caches of this end that the peer knows by address, and may write; belongs to the transfer layer.
        kept: Answers of the peer that stay valid while their guards do; belongs to the transfer layer.
        mapped: Where tensors of the peer are, by what it called them; belongs to the transfer layer.
    """

    def __init__(
        self, peer: Peer, connection: DataPath, choice: Choice, *, dialled: bool, sequence: int, peer_sequence: int
    ) -> None:
        self.peer = peer
        self.connection = connection
        self.choice = choice
        self.dialled = dialled
        self.asked_for = dialled
        self.sequence = sequence
        self.peer_sequence = peer_sequence
        self.address: tuple[str, int] | None = None
        self.redialled = self.by_table = False
        self.greetings: list[Hello] = []
        self.open = True
        self.kept: dict[Any, Any] = {}
        self.mapped: dict[Any, Any] = {}
        self.located: set[int] = set()
        self.channel: Channel | None = None
        self.last_heard = time.monotonic()
        self.last_pong = 0
        connection.introduce(str(peer), peer.cluster_id)
        self._machine = LinkMachine(f"link to {peer}")
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._operations = UseGate(is_open=False)  # open while the link is usable, changed under the lock
        self._fire(LinkEvent.HELLO)
        self._verified_bytes = 0
        self._waiters: dict[int, Waiter] = {}
        self._ids = itertools.count(1)
        # Who is giving the link up: this end, the peer, or both at once. The farewell waits for operations to end.
        self._unlinking = self._unlink_pending = False
        self._unlink_ack: Callable[[], None] | None = None
        self._end_reason, self._lost = "", False

    @property
    def state(self) -> LinkState:
        """The state now."""
        return self._machine.state

    @property
    def usable(self) -> bool:
        """True when operations may start."""
        return self._machine.state in USABLE

    @property
    def busy(self) -> bool:
        """True while a transfer runs on it."""
        return self._operations.inside > 0

    @property
    def ended(self) -> bool:
        """True once the link is over."""
        return self._machine.state is LinkState.CLOSED

    def ready(self, channel: Channel) -> None:
        """The handshake is over."""
        with self._lock:
            self.channel = channel
            self._fire(LinkEvent.READY)

    def claim(self, since: int, *, mutual: bool) -> None:
        """Count this link as the one that ``link_clusters`` asked for, which began when ``since`` was the newest one.

        Raises:
            AlreadyLinked: It was not made meanwhile, nor by a redial that nobody has claimed, nor for a communicator
                that is not ready, nor are both ends to link (``mutual``).
        """
        made_meanwhile = self.sequence > since and not self.dialled
        if self.asked_for or not (made_meanwhile or mutual or self.redialled or not self.open):
            raise self.already()
        self.asked_for = self.open = True

    def already(self) -> AlreadyLinked:
        """Build the error for a call that asks for a second link."""
        return AlreadyLinked(f"already linked to {self.peer}", peer=self.peer.cluster_id)

    # --- operations: callers' threads ------------------------------------------------------------------------------

    def operation(self) -> Self:
        """Keep the link from being unlinked for the length of the block. NotLinked: it is being given up, or gone."""
        return self

    def __enter__(self) -> Self:
        if not self._operations.try_enter():
            raise NotLinked(f"the link to {self.peer} is {self._machine.state.value}", peer=self.peer.cluster_id)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._operations.try_leave():
            return  # nobody waits for the last one while more may come
        with self._lock:
            if self._operations.leave() == 0:
                self._idle.notify_all()
            due = self._due_unlink_ack()
        if due is not None:
            due()

    def request(
        self,
        build: Callable[[int], Message],
        deadline: Deadline,
        what: object,
        phase: str,
        meanwhile: Callable[[], None] | None = None,
    ) -> Message:
        """Send a request and wait for its answer; ``meanwhile`` is called in between, ``what`` is for errors only.

        Raises:
            RemoteFailure: The target answered with a failure.
            DeadlineExceeded: No answer in time; a late one is dealt with when it comes.
            PeerLost: The link broke meanwhile.
            NotLinked: This end gave the link up meanwhile.
        """
        waiter, number = Waiter(), next(self._ids)
        with self._lock:
            if self.ended:
                raise self.lost_error(what, phase)
            self._waiters[number] = waiter
        # Nobody would read while this end is busy in between.
        reader = self.channel if meanwhile is None else None
        try:
            if reader is not None:
                reader.prepare(waiter)
            channel = self.send(build(number), what, phase)
            if meanwhile is not None:
                meanwhile()
            channel.wait(waiter, deadline)
        finally:
            if reader is not None:
                reader.forgo(waiter)
            with self._lock:
                # An answer that comes from now on is late: nobody waits for it.
                self._waiters.pop(number, None)
        answer = waiter.answer
        if answer is None:
            if self.ended:
                raise self.lost_error(what, phase)
            raise deadline.error(f"{what} from {self.peer}", phase, self.peer.cluster_id)
        if isinstance(answer, Failed):
            raise RemoteFailure(
                answer.text, status_code=code_2_status(answer.code), peer=self.peer.cluster_id, phase=phase
            )
        return answer

    def send(self, message: Message, what: object = None, phase: str = "send") -> Channel:
        """Send a message, return by which channel; ``what`` and ``phase`` are what an error says was going on.

        Raises:
            PeerLost: The link broke.
            NotLinked: It is not ready yet, or this end gave it up.
        """
        if (channel := self.channel) is None:
            raise NotLinked(f"the link to {self.peer} is not ready", peer=self.peer.cluster_id)
        if steps.watch is not None:
            steps.watch("send", self, message)
        try:
            channel.send(message)
        except NotLinked as error:
            raise self.lost_error(what or type(message).__name__, phase) from error
        if steps.watch is not None:
            steps.watch("sent", self, message)
        return channel

    def tell(self, message: Message) -> None:
        """Send a message that may come too late: that the link has ended is told to the log, and to nobody else.

        Raises:
            ProtocolError: The message is larger than a frame may be.
        """
        try:
            self.send(message)
        except LinkError as error:
            logger.info("%s to %s not sent: %s", type(message).__name__, self.peer, error)

    def count_verified(self, nbytes: int) -> None:
        """Add to the bytes that both ends were found to hold alike after a transfer."""
        with self._lock:
            self._verified_bytes += nbytes

    def ping(self) -> int:
        """Ask for a sign of life; return the number that :attr:`last_pong` reaches when it has come."""
        number = next(self._ids)
        with suppress(NotLinked, PeerLost):
            self.send(Ping(number))
        return number

    def lost_error(self, what: object, phase: str) -> LLMException:
        """Build the error for an operation that the end of this link ended."""
        if self.ended and not self._lost:
            return NotLinked(
                f"{what}: the link to {self.peer} was given up in phase {phase}: {self._end_reason}",
                peer=self.peer.cluster_id,
                phase=phase,
            )
        reason = self._end_reason or (self.channel.reason if self.channel is not None else "") or "connection closed"
        return PeerLost(
            f"{what}: lost {self.peer} in phase {phase}: {reason}; link again to recover",
            peer=self.peer.cluster_id,
            phase=phase,
        )

    # --- what the control thread reports ---------------------------------------------------------------------------

    def answer(self, number: int, message: Message) -> bool:
        """Deliver an answer; False when nobody waits for it any more. Any thread that reads."""
        with self._lock:
            waiter = self._waiters.pop(number, None)
            if waiter is None:
                return False
            # Under the lock: whoever finds its waiter gone finds its answer there.
            waiter.wake(message)
            return True

    def heard(self) -> None:
        """Something came from the peer."""
        self.last_heard = time.monotonic()
        if self._machine.state is LinkState.SUSPECT:
            with self._lock:
                if self._machine.can(LinkEvent.HEARD):
                    self._fire(LinkEvent.HEARD)

    def silent(self) -> bool:
        """Nothing came for a while: become SUSPECT. True when that is news."""
        with self._lock:
            if not self._machine.can(LinkEvent.SILENT):
                return False
            self._fire(LinkEvent.SILENT)
            return True

    # --- unlink ----------------------------------------------------------------------------------------------------

    def begin_unlink(self) -> bool:
        """Let no operation start any more; False when the link is not usable anyway."""
        with self._lock:
            if not self._machine.can(LinkEvent.UNLINK):
                return False
            self._fire(LinkEvent.UNLINK)
            self._unlinking = True
            return True

    def resume(self) -> None:
        """Take this end's unlink back; if the peer wants to part too, that goes on."""
        with self._lock:
            self._unlinking = False
            self._resume()

    def wait_idle(self, deadline: Deadline) -> bool:
        """Wait until no operation runs, after :meth:`begin_unlink`; False when the deadline passed first."""
        with self._lock:
            return self._idle.wait_for(lambda: not self.busy, deadline.remaining())

    def peer_parts(self, farewell: Callable[[], None]) -> None:
        """The peer says goodbye: ``farewell`` is called once no operation runs, now or by the last one's thread."""
        with self._lock:
            if self._machine.can(LinkEvent.UNLINK):
                self._fire(LinkEvent.UNLINK)
            self._unlink_pending = True
            self._unlink_ack = farewell
            due = self._due_unlink_ack()
        if due is not None:
            due()

    def peer_stays(self) -> None:
        """The peer has taken its goodbye back."""
        with self._lock:
            self._unlink_pending, self._unlink_ack = False, None
            self._resume()

    @property
    def parted(self) -> bool:
        """True once the peer's goodbye has been answered: it closes next."""
        return self._unlink_pending and self._unlink_ack is None

    def _resume(self) -> None:
        """Under the lock."""
        if not self._unlinking and not self._unlink_pending and self._machine.can(LinkEvent.RESUME):
            self._fire(LinkEvent.RESUME)

    def _fire(self, event: LinkEvent) -> None:
        """Under the lock: operations may start only while the link is usable."""
        if self._machine.fire(event) in USABLE:
            self._operations.open()
        else:
            self._operations.shut()

    def _due_unlink_ack(self) -> Callable[[], None] | None:
        """Under the lock: the farewell, if it waits and no operation runs."""
        if self.busy:
            return None
        acknowledged, self._unlink_ack = self._unlink_ack, None
        return acknowledged

    # --- the end ---------------------------------------------------------------------------------------------------

    def end(self, reason: str, *, lost: bool) -> bool:
        """The link is over: fail who waits, close what nobody uses. False when it was over already."""
        with self._lock:
            if self._machine.state is LinkState.CLOSED:
                return False
            self._end_reason, self._lost = reason, lost
            if lost or not self._machine.can(LinkEvent.IDLE):
                self._fire(LinkEvent.LOST)
                self._fire(LinkEvent.CLEANUP)
            else:
                self._fire(LinkEvent.IDLE)
            for waiter in self._waiters.values():
                waiter.wake(None)
            self._waiters.clear()
        # Operations still copying fail, and keep the mappings until they are out: the connection counts its users.
        self.connection.abort()
        if self.channel is not None:
            self.channel.close(reason)
        return True

    def statistics(self) -> LinkStatistics:
        """Return what is known about this link."""
        return LinkStatistics(
            remote_cluster_id=self.peer.cluster_id,
            state=self._machine.state.value,
            transport=self.choice.name,
            private_transport=self.choice.private,
            reason=self.choice.reason,
            peer_pid=self.peer.pid,
            peer_host=self.peer.host,
            read_bytes=self.connection.bytes_read,
            written_bytes=self.connection.bytes_written,
            resolved=len(self.kept),
            verified_bytes=self._verified_bytes,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when the link contradicts itself."""
        with self._lock:
            if self._operations.inside < 0 or self._operations.is_open is not self.usable:
                raise AssertionError(f"{self._machine.name}, {self.state}: {self._operations.inside} operations")
            if self._machine.state is LinkState.CLOSED and self._waiters:
                raise AssertionError(f"{self._machine.name}: closed with {len(self._waiters)} waiting callers")

    def __repr__(self) -> str:
        return f"<Link to {self.peer}: {self.state.value}, {self.choice.name}, {self._operations.inside} running>"


_KINDS: Final[dict[LLMStatusCode, type[LLMException]]] = {
    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST: CacheNotFound,
    LLMStatusCode.LLM_PARAM_INVALID: CacheMismatch,
    LLMStatusCode.LLM_LINK_BUSY: LinkError,
}


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end: the process incarnation, not only the cluster id it goes by."""

    cluster_id: int
    incarnation: bytes
    pid: int
    host: str

    def __str__(self) -> str:
        # The peer's own words: on one line, whatever they are.
        host = "".join(c if c.isprintable() else "?" for c in self.host[:255])
        return f"cluster {self.cluster_id} (pid {self.pid} on {host})"


class RemoteFailure(LLMException):
    """The target answered a request with a status and a text; the link is fine."""

    def typed(self, what: str) -> LLMException:
        """Return it as the exception that a caller of this end expects."""
        # Nothing that is raised carries success (R29), whatever the peer says.
        code = self.status_code if self.status_code is not LLMStatusCode.LLM_SUCCESS else LLMStatusCode.LLM_FAILED
        text = " ".join(f"{what}: {self}".splitlines())
        return _KINDS.get(code, TransferFailed)(text, status_code=code, peer=self.peer, phase=self.phase)


class LinkState(Enum):
    """Where a link is in its life."""

    CLOSED = "closed"
    CONNECTING = "connecting"
    HANDSHAKE = "handshake"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    BROKEN = "broken"


class LinkEvent(Enum):
    """What can happen to a link."""

    CONNECT = "connect"  # initiator: dialling
    HELLO = "hello"  # initiator: hello sent; target: hello received
    READY = "ready"  # both ends have mapped each other
    SILENT = "silent"  # no beat for a while
    HEARD = "heard"  # a beat after a silence
    UNLINK = "unlink"  # either end wants to part
    RESUME = "resume"  # the peer did not answer the unlink: the link is kept (API §3.4)
    IDLE = "idle"  # drained: nothing in flight
    LOST = "lost"  # io error, bad frame, dead, replaced
    CLEANUP = "cleanup"  # everything of a broken link has been given back


_S, _E = LinkState, LinkEvent

TRANSITIONS: Final[dict[tuple[LinkState, LinkEvent], LinkState]] = {
    (_S.CLOSED, _E.CONNECT): _S.CONNECTING,
    (_S.CLOSED, _E.HELLO): _S.HANDSHAKE,
    (_S.CONNECTING, _E.HELLO): _S.HANDSHAKE,
    (_S.CONNECTING, _E.LOST): _S.BROKEN,
    (_S.HANDSHAKE, _E.READY): _S.READY,
    (_S.HANDSHAKE, _E.LOST): _S.BROKEN,
    (_S.READY, _E.SILENT): _S.SUSPECT,
    (_S.READY, _E.UNLINK): _S.DRAINING,
    (_S.READY, _E.LOST): _S.BROKEN,
    (_S.SUSPECT, _E.HEARD): _S.READY,
    (_S.SUSPECT, _E.UNLINK): _S.DRAINING,
    (_S.SUSPECT, _E.LOST): _S.BROKEN,
    (_S.DRAINING, _E.RESUME): _S.READY,
    (_S.DRAINING, _E.IDLE): _S.CLOSED,
    (_S.DRAINING, _E.LOST): _S.BROKEN,
    (_S.BROKEN, _E.CLEANUP): _S.CLOSED,
}

#: States in which operations may start.
USABLE: Final = (LinkState.READY, LinkState.SUSPECT)  # found by identity; the hash of a member is Python code


class LinkMachine:
    """State of one link and the last things that happened to it."""

    __slots__ = ("_story", "name", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = LinkState.CLOSED
        self._story: deque[str] = deque(maxlen=16)

    def can(self, event: LinkEvent) -> bool:
        """Return True when ``event`` is legal now."""
        return (self.state, event) in TRANSITIONS

    def fire(self, event: LinkEvent) -> LinkState:
        """Take the transition; raise StateError, with the story, when it is illegal."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise StateError(f"{self.name}: {event.value} is illegal when {self.state.value}; story: {self.story()}")
        self._story.append(f"{event.value} -> {target.value}")
        self.state = target
        return target

    def story(self) -> str:
        """Return what happened to this link, oldest first, on one line."""
        return "; ".join(self._story) or "made"
