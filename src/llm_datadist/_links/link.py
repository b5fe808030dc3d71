"""One link: the peer, the control channel, the data path, and the operations that use them."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from llm_datadist._checks import require_intact
from llm_datadist._deadline import Deadline
from llm_datadist._links.machine import Machine
from llm_datadist._links.messages import Failed, Ping, UnlinkAck, UnlinkRequest, decode, remote_failure
from llm_datadist._links.versions import REPORTS
from llm_datadist._log import links_logger as logger
from llm_datadist._native import Requests, UseGate, Waiter, steps
from llm_datadist._native.public_call import raise_of_handler, whole
from llm_datadist.errors import LinkError, LLMException, NotLinked, PeerLost, ProtocolError
from llm_datadist.metrics import LinkStatistics
from llm_datadist.types.cluster import show_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._links.channel import Channel
    from llm_datadist._links.messages import Beat, Consumed, Hello, Message, Release, Welcome
    from llm_datadist._links.renewal import Renewal
    from llm_datadist._links.versions import Spoken
    from llm_datadist._transport.choose import Choice
    from llm_datadist._transport.connection import DataPath


@dataclass(frozen=True, slots=True)
class Peer:
    """Incarnation and cluster id across a link."""

    cluster_id: int
    incarnation: bytes
    pid: int
    host: str
    release: str = ""  # as the peer says; empty for an older one
    role: str = ""

    @classmethod
    def of(cls, said: Hello | Welcome) -> Peer:
        return cls(said.cluster_id, said.incarnation, said.pid, said.host[:255], said.release, said.role)

    def __str__(self) -> str:
        return f"cluster {self.cluster_id} (pid {self.pid} on {self.host})"


class LinkState(Enum):
    HANDSHAKE = "handshake"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    CLOSED = "closed"


class LinkEvent(Enum):
    READY = "ready"  # channel attached; operations may start
    SILENT = "silent"  # nothing heard for three seconds
    HEARD = "heard"  # a message after that
    UNLINK = "unlink"  # either side unlinks
    RESUME = "resume"  # no side unlinks any more (interface §3.4)
    END = "end"  # lost, or given up


_S, _E = LinkState, LinkEvent

TRANSITIONS: Final[dict[LinkState, dict[LinkEvent, LinkState]]] = {
    _S.HANDSHAKE: {_E.READY: _S.READY, _E.END: _S.CLOSED},
    _S.READY: {_E.SILENT: _S.SUSPECT, _E.UNLINK: _S.DRAINING, _E.END: _S.CLOSED},
    _S.SUSPECT: {_E.HEARD: _S.READY, _E.UNLINK: _S.DRAINING, _E.END: _S.CLOSED},
    _S.DRAINING: {_E.RESUME: _S.READY, _E.END: _S.CLOSED},
    _S.CLOSED: {},
}

#: States in which operations may start.
USABLE: Final = (LinkState.READY, LinkState.SUSPECT)  # a tuple: hashing is Python code


@dataclass(slots=True)
class LinkOrigin:
    """Origin of a link, and the calls that may use it."""

    dialled: bool  # by this side
    sequence: int  # this side's number; a later link has a higher one
    peer_sequence: int
    address: tuple[str, int] | None = None  # to redial
    reconnected: bool = False  # restored after a loss; ``link_clusters`` may still request it
    source: str = ""  # the dialling peer's address
    asked: str = ""  # address of ``link_clusters``, also if the peer's dial won
    behind: str = ""  # process, user or address of the peer; as the kernel says, not the peer
    by_communicator: bool = False  # made for communicators, not for ``link_clusters``
    greetings: list[Hello] = field(default_factory=list)  # for communicators, until the peer answers a Ping
    requested: bool = field(init=False)  # by ``link_clusters`` of this side
    open: bool = field(init=False)  # False while no OK communicator uses it: closed to operations here

    def __post_init__(self) -> None:
        self.requested = self.dialled and not (self.reconnected or self.by_communicator)
        self.open = not self.by_communicator

    @property
    def shown(self) -> str:
        """The dialled address; empty if the peer dialled."""
        if not self.dialled:
            return ""
        return show_address(self.address) if self.address is not None else "a communicator's"

    @property
    def spare(self) -> bool:
        return self.by_communicator and not self.requested


@dataclass(slots=True, eq=False)
class PeerCacheView:
    """Per-link cache of transfer state, opaque to `_links`."""

    cached: dict[Any, Any] = field(default_factory=dict)  # answers, valid while their guards are
    mapped: dict[Any, Any] = field(default_factory=dict)  # tensors, by the names that the peer gave them
    predicted: dict[Any, Any] = field(default_factory=dict)  # pinned answers, predicted for the next ones
    unlike: dict[Any, Any] = field(default_factory=dict)  # pairs of caches whose difference was logged
    located: set[int] = field(default_factory=set)  # located caches of this side


@dataclass(eq=False, repr=False)
class Link:
    """A link whose handshake is over.

    Owns: the channel and the data path.
    Threads: any; the lock guards the state; nothing blocks under it.
    Errors: the end of the link fails waiting callers and operations.
    """

    peer: Peer
    connection: DataPath
    choice: Choice
    origin: LinkOrigin
    spoken: Spoken
    renewal: Renewal | None = None  # of an encrypted link

    def __post_init__(self) -> None:
        self.caches = PeerCacheView()
        self.requests = Requests()
        self.channel: Channel | None = None  # until ready()
        self.last_heard = time.monotonic()
        self.last_pong = 0  # of ping(), answered last
        self.last_question = 0  # of the ping() about suspected sockets
        self.peer_reported = 0  # number of the peer's transfer reports handled here; for the control thread
        self._machine = Machine(f"link to {self.peer}", TRANSITIONS, LinkState.HANDSHAKE)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self.operations = UseGate(is_open=False)  # open while usable; changed under the lock
        self._verified_bytes = 0
        self._reported = (0, 0) if self.spoken.version >= REPORTS else None  # by the peer: bytes read, written
        # Both sides may unlink at once.
        self._unlinking = self._peer_unlinks = False
        self._unlink_ack: int | None = None  # number of the peer's request, until the answer
        self._end_reason = ""
        self.lost = False  # True if it has ended, and nobody meant it

    def __str__(self) -> str:
        return str(self.peer)

    @property
    def state(self) -> LinkState:
        return self._machine.state

    @property
    def usable(self) -> bool:
        return self._machine.state in USABLE

    @property
    def busy(self) -> bool:
        return self.operations.inside > 0

    @property
    def ended(self) -> bool:
        return self._machine.state is LinkState.CLOSED

    def ready(self, channel: Channel) -> None:
        with self._lock:
            self.channel = channel
            self._fire(LinkEvent.READY)

    def last_left(self) -> None:
        """Wake this side's unlink; if no operation runs, answer that of the peer."""
        number = None
        with self._lock:
            self._idle.notify_all()
            if not self.busy:
                number, self._unlink_ack = self._unlink_ack, None
        if number is not None:
            self.tell(UnlinkAck(number))

    def request(
        self,
        build: Callable[[int], Message],
        deadline: Deadline,
        what: object,
        phase: str,
        meanwhile: Callable[[], None] | None = None,
        waiter: Waiter | None = None,
    ) -> Message:
        """Send a request, call ``meanwhile``, wait for the answer; ``what`` is for errors.

        Raises RemoteFailure if the target reports a failure. Raises PeerLost if the link broke, NotLinked if it is not
        ready or this side gave it up. Raises DeadlineExceeded if no answer came in time; a late one is handled. Raises
        ProtocolError if the request is too large. ``waiter``: an exception in its block, which the caller has begun,
        makes a good answer a late one, unless that is taken. Default: None, its block is this call.
        """
        if waiter is None:
            with Waiter(self.requests) as waiter:
                return self.request(build, deadline, what, phase, meanwhile, waiter)
        if waiter.done:
            raise self.lost_error(what, phase)
        channel = self.send(build(waiter.number), what, phase)
        if meanwhile is not None:
            meanwhile()
        channel.wait(waiter, deadline)
        if waiter.answer is None:
            if self.ended:
                raise self.lost_error(what, phase)
            raise deadline.error(f"{what} from {self.peer}", phase, self.peer.cluster_id)
        self.heard()
        try:
            answer = decode(waiter.answer)
        except ProtocolError as error:
            raise_of_handler(error, decode, waiter.answer)
            waiter.taken = True
            channel.close(str(error))
            deadline.poll(lambda: self.ended)  # the control thread ends it
            raise self.lost_error(what, phase) from error
        if isinstance(answer, Failed):
            waiter.taken = True
            raise remote_failure(answer, self.peer.cluster_id, phase)
        return answer

    def send(
        self, message: Message, what: object = None, phase: str = "send", reports: Requests | None = None
    ) -> Channel:
        """Send a message, which ``reports`` counts; return its channel.

        Raises PeerLost, NotLinked and ProtocolError as :meth:`request`.
        """
        if steps.watch is not None:
            steps.watch("send", self, message)
        if (channel := self.channel) is None:
            raise NotLinked(f"the link to {self.peer} is not ready", peer=self.peer.cluster_id)
        try:
            channel.send(message, reports)
        except NotLinked as error:
            raise self.lost_error(what or type(message).__name__, phase) from error
        if steps.watch is not None:
            steps.watch("sent", self, message)
        return channel

    def tell(self, message: Message, reports: Requests | None = None) -> None:
        """:meth:`send`, but only log that the link has ended."""
        try:
            self.send(message, reports=reports)
        except LinkError as error:
            whole(logger.info)("%s to %s not sent: %s", type(message).__name__, self.peer, error)

    def say_goodbye(self) -> None:
        """Ask the peer to unlink, without waiting: then it sees no loss in this link's end, and does not dial again."""
        self.tell(self.goodbye(self.requests.number()))

    def goodbye(self, number: int) -> UnlinkRequest:
        return UnlinkRequest(number, *self.moved_alone())

    def moved_alone(self) -> tuple[int, int]:
        """Return the bytes that this side has read and written, except those that the peer counts."""
        alone = [each.moved for each in self.connection.connections if each.served is None]
        return sum(read for read, _ in alone), sum(written for _, written in alone)

    def peer_moved(self, said: Beat | UnlinkRequest) -> None:
        """Take note of the peer's :meth:`moved_alone`, which never falls. Threads: control."""
        if (before := self._reported) is not None:
            self._reported = max(said.read, before[0]), max(said.written, before[1])

    def _served(self) -> tuple[int, int] | tuple[None, None]:
        """Return the bytes that the peer has read and written here; None if it does not report its part."""
        known = [each.served for each in self.connection.connections if each.served is not None]
        if len(known) < len(self.connection.connections):
            if self._reported is None:
                return None, None
            known.append(self._reported)
        return sum(read for read, _ in known), sum(written for _, written in known)

    def report(self, message: Release | Consumed) -> None:
        """Send the end of a transfer, and count it: a request over a lane may overtake it."""
        self.tell(message, reports=self.requests)

    def ping(self) -> int:
        """Send a Ping; return the number for :attr:`last_pong`."""
        number = self.requests.number()
        with suppress(NotLinked, PeerLost):
            self.send(Ping(number))
        return number

    def responds(self, deadline: Deadline, most_ms: int = 1000, *, number: int | None = None) -> bool:
        """Return True if the peer answers a ping (``number``, or a new one) within ``most_ms``."""
        ping = self.ping() if number is None else number
        answer = Deadline(min(most_ms, deadline.remaining_ms()))
        return answer.poll(lambda: self.last_pong >= ping or self.ended) and not self.ended

    def lost_error(self, what: object, phase: str) -> LLMException:
        if self.ended and not self.lost:
            text = f"{what}: the link to {self.peer} was given up in phase {phase}: {self._end_reason}"
            return NotLinked(text, peer=self.peer.cluster_id, phase=phase)
        reason = self._end_reason or (self.channel.reason if self.channel is not None else "") or "connection closed"
        text = f"{what}: lost {self.peer} in phase {phase}: {reason}; link again to recover"
        return PeerLost(text, peer=self.peer.cluster_id, phase=phase)

    def count_verified(self, nbytes: int) -> None:
        with self._lock:
            self._verified_bytes += nbytes

    def heard(self) -> None:
        self.last_heard = time.monotonic()
        if self._machine.state is LinkState.SUSPECT:
            self._heard_again()

    @whole
    def _heard_again(self) -> None:
        with self._lock:
            self._try(LinkEvent.HEARD)

    def oversleep(self, seconds: float) -> None:
        """Forgive seconds in which this process was stopped."""
        self.last_heard += seconds
        if self.renewal is not None and self.renewal.asked is not None:
            self.renewal.asked += seconds

    def silent(self) -> bool:
        """Become SUSPECT; return False unless READY."""
        with self._lock:
            return self._try(LinkEvent.SILENT)

    def begin_unlink(self) -> bool:
        """Start no more operations; return False if unusable."""
        with self._lock:
            begun = self._try(LinkEvent.UNLINK)
            self._unlinking |= begun
            return begun

    def wait_idle(self, deadline: Deadline) -> bool:
        return deadline.wait_for(self._idle, lambda: not self.busy)

    def cancel_unlink(self, *, of_peer: bool = False) -> None:
        """Cancel this side's unlink, or the peer's; resume unless the other remains."""
        with self._lock:
            if of_peer:
                self._peer_unlinks, self._unlink_ack = False, None
            else:
                self._unlinking = False
            if not self._unlinking and not self._peer_unlinks:
                self._try(LinkEvent.RESUME)

    def peer_unlinks(self, request: UnlinkRequest) -> None:
        """Drain; answer the request once no operation runs. Threads: control."""
        self.peer_moved(request)
        with self._lock:
            self._try(LinkEvent.UNLINK)
            self._peer_unlinks = True
            self._unlink_ack = request.id
        self.last_left()

    @property
    def unlink_acknowledged(self) -> bool:
        """True once the peer's unlink is answered: the peer closes next."""
        return self._peer_unlinks and self._unlink_ack is None

    def _fire(self, event: LinkEvent) -> None:
        """Under the lock: operations may start only while usable."""
        if self._machine.fire(event) in USABLE:
            self.operations.open()
        else:
            self.operations.shut()

    def _try(self, event: LinkEvent) -> bool:
        """Under the lock: fire an event if it is legal now."""
        if legal := self._machine.can(event):
            self._fire(event)
        return legal

    def end(self, reason: str, *, lost: bool) -> bool:
        """Fail waiting callers, close channel and data path; return False if already ended."""
        with self._lock:
            if self._machine.state is LinkState.CLOSED:
                return False
            self._end_reason, self.lost = reason, lost
            self._fire(LinkEvent.END)
            self.requests.close()
        # Running copies fail; their mappings stay until they leave.
        for each in self.connection.connections:
            each.abort()
        if self.channel is not None:
            self.channel.close(reason)
        return True

    def statistics(self) -> LinkStatistics:
        used = [each.usage() for each in self.connection.connections]
        served, received = self._served()
        return LinkStatistics(
            remote_cluster_id=self.peer.cluster_id,
            state=self._machine.state.value,
            transport=self.choice.name,
            private_transport=self.choice.private,
            reason=self.choice.reason + "".join(each.remark for each in used),
            peer_pid=self.peer.pid,
            peer_host=self.peer.host,
            read_bytes=sum(each.read_bytes for each in used),
            written_bytes=sum(each.written_bytes for each in used),
            resolved=len(self.caches.cached),
            verified_bytes=self._verified_bytes,
            sealed=self.renewal is not None,
            authenticated_at=None if self.renewal is None else self.renewal.at,
            progress_seconds=sum(each.progress_seconds for each in used),
            peer_incarnation=self.peer.incarnation.hex(),
            protocol=self.spoken.version,
            dialled=self.origin.shown,
            peer_release=self.peer.release,
            peer_role=self.peer.role,
            served_bytes=served,
            received_bytes=received,
        )

    def check_integrity(self) -> None:
        with self._lock:
            name, inside, waiting = self._machine.name, self.operations.inside, self.requests.waiting
            sound = inside >= 0 and self.operations.is_open is self.usable
            require_intact(sound, f"{name}, {self.state}: {inside} operations")
            require_intact(not (self.ended and waiting), f"{name}: closed with {waiting} waiting callers")
