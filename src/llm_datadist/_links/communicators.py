"""Communicators: every ``link()`` of one LLMDataDist, until ``unlink`` (interface §3.5, B2.3).

Members may call ``link()`` in any order. During the preparation the lower cluster id of two listens, the other dials.
"""

from __future__ import annotations

import errno
import itertools
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from llm_datadist._checks import clean
from llm_datadist._deadline import Deadline
from llm_datadist._links.listener import AdmissionPolicy, Listener, listening_socket
from llm_datadist._links.messages import CommunicatorId
from llm_datadist._links.ranktable import PORTS_VARIABLE, ports
from llm_datadist._links.retry import Attempt, RetryQueue
from llm_datadist._log import links_logger as logger
from llm_datadist.errors import DeadlineExceeded, LinkRefused, LLMException, LLMStatusCode, NotLinked, StateError
from llm_datadist.metrics import CommunicatorStatistics
from llm_datadist.types.enums import RegisterMemStatus

if TYPE_CHECKING:
    import asyncio
    import socket

    from llm_datadist._links.link import Link
    from llm_datadist._links.loop import ControlLoop
    from llm_datadist._links.messages import Hello

#: Attempts at once (interface §3.5).
_DIAL_THREADS: Final = 16
#: For a process that accepts and stays silent.
_LONGEST_ATTEMPT_MS: Final = 5000
_SHORTEST_ATTEMPT_MS: Final = 100
#: Between two attempts for a member.
_FIRST_PAUSE_SECONDS: Final = 0.02
_LONGEST_PAUSE_SECONDS: Final = 0.5
_PAUSE_GROWTH: Final = 1.5
#: Of all members: an attempt costs half a millisecond of CPU.
_ATTEMPTS_PER_SECOND: Final = 150


@dataclass(frozen=True, slots=True)
class CommunicatorPlan:
    """Checked arguments of ``link()``."""

    name: str
    ranks: dict[int, int]  # by cluster id; includes this instance
    addresses: dict[int, str]  # by cluster id, from the rank table
    table: bytes  # digest of the rank table
    seconds: int  # link_total_time
    attempts: int  # link_retry_count: bounds an attempt to seconds / attempts, from 100 to 5000 ms


class Communicator:
    """A communicator. The lock of :class:`Communicators` guards all but socket, listener and timer."""

    def __init__(self, comm_id: int, own: int, plan: CommunicatorPlan, deadline: Deadline) -> None:
        self.comm_id = comm_id
        self.plan = plan
        self.deadline = deadline
        self.status = RegisterMemStatus.PREPARING  # then OK or FAILED, which is final
        self.reason = ""  # of FAILED; while preparing, of the last failed attempt
        self.others = [cluster_id for cluster_id in plan.ranks if cluster_id != own]
        self.expected = [cluster_id for cluster_id in self.others if cluster_id > own]
        self.waiting = set(self.others)  # members to be linked
        token = secrets.token_bytes(16)
        self.own_id = CommunicatorId(plan.name, sorted(plan.ranks.items()), plan.table, token)
        self.ports: dict[int, list[int]] = {}  # of members that this side dials; set once
        self.sock: socket.socket | None = None  # until the listener has it; None if this side only dials
        # For the control thread; the listener only if members dial.
        self.listener: Listener | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._own = own
        self._tokens: dict[int, bytes] = {}  # of the greetings by which members joined, by cluster id

    @property
    def preparing(self) -> bool:
        return self.status is RegisterMemStatus.PREPARING

    def holds(self, cluster_id: int) -> bool:
        """Return True if it needs the link to that member: it has not failed."""
        return self.status is not RegisterMemStatus.FAILED and cluster_id in self.others

    def is_for(self, theirs: CommunicatorId, cluster_id: int) -> bool:
        return theirs.name == self.plan.name and cluster_id in self.expected

    def expects(self, theirs: CommunicatorId, cluster_id: int) -> bool:
        """Return True unless that member has joined by another of its communicators."""
        return self.is_for(theirs, cluster_id) and self._tokens.get(cluster_id, theirs.token) == theirs.token

    def has_joined(self, theirs: CommunicatorId, cluster_id: int) -> bool:
        return cluster_id not in self.waiting and self._tokens.get(cluster_id) == theirs.token

    def difference(self, theirs: CommunicatorId, cluster_id: int) -> str | None:
        """Return how the member's arguments differ from these; None if they agree."""
        mine = self.own_id
        if theirs.members != mine.members:
            there = f"{dict(theirs.members)} at cluster {cluster_id}"
            return f"cluster_rank_info differs: {there}, {dict(mine.members)} at cluster {self._own}"
        if theirs.table != mine.table:
            there = f"digest {theirs.table.hex()[:8]} at cluster {cluster_id}"
            here = f"{mine.table.hex()[:8]} at cluster {self._own}"
            return f"rank_table differs: {there}, {here}; all members have to give the same table"
        return None

    def join(self, cluster_id: int, theirs: CommunicatorId | None) -> None:
        """Count a member as linked; ``theirs`` is from its greeting, if it dialled."""
        self.waiting.discard(cluster_id)
        if theirs is not None:
            self._tokens[cluster_id] = theirs.token
        if not self.waiting:
            self.status, self.reason = RegisterMemStatus.OK, ""

    def lose(self, cluster_id: int) -> bool:
        """Wait again for a member; return False if it was not linked."""
        if cluster_id not in self.others or cluster_id in self.waiting:
            return False
        self.waiting.add(cluster_id)
        self._tokens.pop(cluster_id, None)
        self.reason = f"the link to cluster {cluster_id} was lost before all members had come"
        return True

    def fail(self, reason: str) -> None:
        self.status, self.reason = RegisterMemStatus.FAILED, reason

    def statistics(self) -> CommunicatorStatistics:
        return CommunicatorStatistics(
            comm_id=self.comm_id,
            name=self.plan.name,
            status=self.status.name,
            reason=self.reason,
            members=tuple(self.plan.ranks),
            waiting_for=tuple(sorted(self.waiting)),
        )

    def __str__(self) -> str:
        name = clean(self.plan.name)
        return f"communicator {self.comm_id} {name!r}"


class MemberDial(Attempt):
    """One member of a communicator that this side dials.

    ``again``: its link was lost; it waits, so that links that break at once cost little.
    """

    def __init__(self, communicator: Communicator, cluster_id: int, *, again: bool = False) -> None:
        self._delay = _LONGEST_PAUSE_SECONDS if again else _FIRST_PAUSE_SECONDS
        super().__init__(communicator, time.monotonic() + self._delay if again else 0.0)
        self.communicator = communicator
        self.cluster_id = cluster_id
        self.ports = communicator.ports[cluster_id]  # the next to try is first

    @property
    def address(self) -> tuple[str, int]:
        return self.communicator.plan.addresses[self.cluster_id], self.ports[0]

    def next_port(self) -> None:
        self.ports = [*self.ports[1:], self.ports[0]]

    def postpone(self, crowd: int) -> None:
        self._dial = None
        self.due = time.monotonic() + max(self._delay, crowd / _ATTEMPTS_PER_SECOND)
        self._delay = min(_PAUSE_GROWTH * self._delay, _LONGEST_PAUSE_SECONDS)

    def __repr__(self) -> str:
        return f"<MemberDial of cluster {self.cluster_id} at {self.address[0]} {self.ports} for {self.communicator}>"


class LinkPort(Protocol):
    """Methods of :class:`LinkManager` for communicators."""

    def listener_for(self, admission: AdmissionPolicy | None, listening: socket.socket) -> Listener: ...
    def dial_member(self, member: MemberDial, deadline: Deadline) -> None: ...
    def peek(self, cluster_id: int) -> Link | None: ...
    def unlink(self, cluster_id: int, deadline: Deadline, *, force: bool) -> None: ...
    def end(self, link: Link, reason: str, *, lost: bool) -> None: ...


class Communicators:
    """All communicators of one LLMDataDist.

    Threads: callers open and close communicators. Threads of the retry queue dial members. The control thread accepts
        members, and fails a preparation whose time is over. One lock guards all communicators; its holder never blocks.
    Errors: a preparation that fails ends the links that were made for it alone.
    """

    def __init__(self, links: LinkPort, control: ControlLoop, own: int) -> None:
        self.called = False  # a ``link()`` has returned (interface §6.6)
        self._links = links
        self._control = control
        self._own = own
        self._lock = threading.Lock()
        self._all: dict[int, Communicator] = {}
        # Clients may compare ids with statuses. No generator, which an exception inside it would end.
        self._ids = itertools.filterfalse(set(LLMStatusCode).__contains__, itertools.count(1))
        self._stopped = False
        self._dials: RetryQueue[MemberDial] = RetryQueue("llm-datadist-meet", _DIAL_THREADS, self._attempt)

    def open(self, plan: CommunicatorPlan) -> int:
        """Begin to prepare a communicator; return its id at once.

        Raises ParamError if the environment names no range of ports. Raises LinkRefused if no port is free here, no
        thread can start, or the instance is being finalized.
        """
        deadline = Deadline(plan.seconds * 1000)
        candidates = {peer: ports(plan.name, peer) for peer in plan.ranks if peer < self._own}
        sock = self._bind(plan) if any(peer > self._own for peer in plan.ranks) else None
        communicator = Communicator(next(self._ids), self._own, plan, deadline)
        communicator.ports, communicator.sock = candidates, sock
        try:
            with self._lock:
                if self._stopped:
                    raise LinkRefused(f"link {plan.name!r}: the instance is being finalized")
                self._all[communicator.comm_id] = communicator
            self._control.call(self._start, communicator)
            for peer in candidates:
                if not self._dials.add(MemberDial(communicator, peer)):
                    raise LinkRefused("the instance is being finalized")
        except LLMException:
            self._forget(communicator)
            raise
        self.called = True
        logger.info("%s is being prepared: %s", communicator, plan.ranks)
        return communicator.comm_id

    def _bind(self, plan: CommunicatorPlan) -> socket.socket:
        """Listen on the first free port, at the table's address or, if this host lacks it, at any."""
        host, candidates = plan.addresses[self._own], ports(plan.name, self._own)
        reasons = []
        for port in candidates:
            try:
                return _listen(host, port)
            except OSError as error:
                reasons.append(f"{port}: {error.strerror or error}")
        text = f"link {plan.name!r}: cannot listen at {host} on any of its ports ({', '.join(reasons)})"
        raise LinkRefused(f"{text}; {PORTS_VARIABLE} moves them, for all members")

    def _forget(self, communicator: Communicator) -> None:
        """Remove one that could not begin."""
        with self._lock:
            self._all.pop(communicator.comm_id, None)
            communicator.fail("not begun")
        self._dials.cancel(communicator)
        with suppress(StateError):  # the control thread has stopped
            self._control.call(self._shut, communicator)
        if communicator.sock is not None:
            communicator.sock.close()

    def _get(self, comm_id: int) -> Communicator:  # under the lock
        if (communicator := self._all.get(comm_id)) is None:
            raise NotLinked(f"communicator {comm_id} does not exist: it was unlinked, or link() never returned that id")
        return communicator

    def status(self, comm_id: int) -> RegisterMemStatus:
        with self._lock:
            return self._get(comm_id).status

    def explain(self, comm_id: int) -> CommunicatorStatistics:
        with self._lock:
            return self._get(comm_id).statistics()

    def close(self, comm_id: int, deadline: Deadline) -> None:
        """End a communicator, and the links made for it alone. Raises NotLinked for an unknown id.

        Operations on these links may finish until the deadline. The peers only see the links end.
        """
        with self._lock:
            communicator = self._get(comm_id)
            del self._all[comm_id]
            communicator.fail("unlinked")
            for peer in communicator.others:
                self._open_link(peer)  # shuts it unless an OK communicator holds it
        self._dials.cancel(communicator)
        self._control.call(self._shut, communicator)
        try:
            self._dials.wait(communicator, deadline)
            for peer in communicator.others:
                if self._spare(peer) is not None:
                    self._links.unlink(peer, deadline, force=True)
        except BaseException:  # raised by a signal handler
            for peer in communicator.others:
                self._drop_spare(peer, "unlinked")
            raise
        logger.info("%s unlinked", communicator)

    def statistics(self) -> tuple[CommunicatorStatistics, ...]:
        with self._lock:
            return tuple(each.statistics() for each in self._all.values())

    def preparing(self) -> list[str]:
        with self._lock:
            return [str(each) for each in self._all.values() if each.preparing]

    def story(self, cluster_id: int) -> str:
        """Return the newest communicator of a cluster, as the end of an error text."""
        with self._lock:
            for newest in reversed(self._all.values()):
                if cluster_id in newest.others:
                    reason = f": {newest.reason}" if newest.reason else ""
                    return f"; {newest} is {newest.status.name}{reason}"
        return ""

    def check_integrity(self) -> None:
        with self._lock:
            for each in self._all.values():
                if (not each.waiting) != (each.status is RegisterMemStatus.OK):
                    raise AssertionError(f"{each}: {each.status.name}, waits for {sorted(each.waiting)}")

    def join(self, communicator: Communicator, cluster_id: int, theirs: CommunicatorId | None = None) -> bool:
        """Count a linked member; ``theirs`` is from its greeting, if it dialled.

        Return False if the communicator is decided, or the link has ended.
        """
        with self._lock:
            if not (communicator.preparing and self._is_linked(cluster_id)):
                return False
            communicator.join(cluster_id, theirs)
            done = not communicator.preparing
            for peer in communicator.others:
                self._open_link(peer)
        if done:
            self._control.post(self._shut, communicator)
            logger.info("%s is ready after %.0f ms", communicator, communicator.deadline.elapsed_ms())
        return True

    def lost(self, peer: int) -> None:
        """Wait again for a member whose link has ended, in every preparation."""
        with self._lock:
            if self._is_linked(peer):
                return  # by a link that replaced it
            again = [each for each in self._all.values() if each.preparing and each.lose(peer)]
        for communicator in again:
            if peer in communicator.ports:
                try:
                    self._dials.add(MemberDial(communicator, peer, again=True))
                except LinkRefused as error:
                    self.note(communicator, str(error))

    def _is_linked(self, peer: int) -> bool:
        link = self._links.peek(peer)
        return link is not None and not link.ended

    def _open_link(self, peer: int) -> None:
        """Under the lock: open a spare link to operations if an OK communicator holds it, else shut it."""
        if (link := self._links.peek(peer)) is not None and link.origin.spare:
            link.origin.open = any(not each.preparing and each.holds(peer) for each in self._all.values())

    def _spare(self, peer: int) -> Link | None:
        """Return the link to a member if its communicators are gone."""
        with self._lock:
            if any(each.holds(peer) for each in self._all.values()):
                return None
        link = self._links.peek(peer)
        return link if link is not None and link.origin.spare else None

    def _drop_spare(self, peer: int, reason: str) -> None:
        if (link := self._spare(peer)) is not None:
            self._links.end(link, reason, lost=False)

    def _fail(self, communicator: Communicator, reason: str) -> None:
        """Make a communicator FAILED, and end its own links. The first outcome counts."""
        with self._lock:
            if not communicator.preparing:
                return
            communicator.fail(reason)
        logger.warning("%s FAILED: %s", communicator, reason)
        self._dials.cancel(communicator)
        self._control.call(self._shut, communicator)
        for peer in communicator.others:
            self._drop_spare(peer, f"{communicator} failed: {reason}")

    def note(self, communicator: Communicator, reason: str, phase: str | None = None) -> None:
        """Keep the latest reason; one of phase ``handshake`` replaces no other."""
        with self._lock:
            if communicator.preparing and not (phase == "handshake" and communicator.reason):
                communicator.reason = reason

    def _start(self, communicator: Communicator) -> None:
        if not communicator.preparing:  # finalized, or unlinked by a guessed id
            raise LinkRefused(f"{communicator}: {communicator.reason} before it had begun")
        communicator.timer = self._control.loop.call_later(
            communicator.deadline.remaining(), self._expire, communicator
        )
        if communicator.sock is not None:
            admission = AdmissionPolicy(partial(self._admit, communicator), partial(self._on_refused, communicator))
            communicator.listener = self._links.listener_for(admission, communicator.sock)
            communicator.sock = None

    def _shut(self, communicator: Communicator) -> None:
        timer, communicator.timer = communicator.timer, None
        listener, communicator.listener = communicator.listener, None
        if timer is not None:
            timer.cancel()
        if listener is not None:
            listener.close()

    def _expire(self, communicator: Communicator) -> None:
        with self._lock:
            missing = ", ".join(f"cluster {peer}" for peer in sorted(communicator.waiting))
            heard = f"; heard last: {communicator.reason}" if communicator.reason else ""
        self._fail(
            communicator,
            f"{missing} did not join within {communicator.plan.seconds} s (llm.LinkTotalTime); every member has to "
            f"call link() with the same name, ranks and table{heard}",
        )

    def _admit(self, communicator: Communicator, hello: Hello) -> None:
        """Raise LinkRefused unless the communicator expects this peer.

        ``LLM_NOT_YET_LINK``: the peer tries its next port. ``LLM_PARAM_INVALID``: its communicator fails.
        """
        theirs, peer = hello.communicator, hello.cluster_id
        if theirs is None:
            text = f"this port is for the members of {communicator} only; link_clusters needs a listen_ip_info"
            raise LinkRefused(text)
        with self._lock:
            expected = communicator.preparing and communicator.expects(theirs, peer)
            difference = communicator.difference(theirs, peer)
        if not expected:
            text = "another communicator is prepared at this port"
            raise LinkRefused(text, status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        if difference is not None:
            raise LinkRefused(difference, status_code=LLMStatusCode.LLM_PARAM_INVALID)

    def _on_refused(self, communicator: Communicator, hello: Hello, error: LLMException) -> None:
        """Note the refusal of a member; fail if no attempt can succeed."""
        if hello.communicator is None or not communicator.is_for(hello.communicator, hello.cluster_id):
            return
        text = f"cluster {hello.cluster_id} was refused here: {error}"
        if error.status_code is LLMStatusCode.LLM_PARAM_INVALID:
            self._fail(communicator, text)
        elif error.status_code is not LLMStatusCode.LLM_NOT_YET_LINK:
            self.note(communicator, text, error.phase)

    def joined(self, hello: Hello) -> None:
        """Count a linked member that dialled; raise LinkRefused if no communicator waits for it."""
        theirs, peer = hello.communicator, hello.cluster_id
        if theirs is None:
            return
        with self._lock:
            alike = [each for each in self._all.values() if each.is_for(theirs, peer)]
            if any(each.has_joined(theirs, peer) for each in alike):
                return  # greeted again, over a replacing link
            alike = [each for each in alike if each.preparing and each.expects(theirs, peer)]
            waiting = [each for each in alike if each.difference(theirs, peer) is None]
        # Of equal communicators, one that still waits comes first.
        for communicator in sorted(waiting, key=lambda each: peer not in each.waiting):
            if self.join(communicator, peer, theirs):
                return
        text = f"no communicator of cluster {self._own} waits for this member any more"
        raise LinkRefused(text, status_code=LLMStatusCode.LLM_NOT_YET_LINK)

    def _attempt(self, member: MemberDial) -> bool:
        """Try the member's ports until one takes too long; return True to repeat."""
        communicator = member.communicator
        for _ in member.ports:
            if not communicator.preparing:
                return False  # decided, perhaps before the first dial
            if member.cancelled or communicator.deadline.expired():
                break
            try:
                share = communicator.plan.seconds * 1000 // communicator.plan.attempts
                longest = max(_SHORTEST_ATTEMPT_MS, min(share, _LONGEST_ATTEMPT_MS))
                self._links.dial_member(member, Deadline(min(longest, communicator.deadline.remaining_ms())))
            except DeadlineExceeded as error:
                self.note(communicator, str(error))
                member.next_port()
                break  # other members wait for this thread
            except LLMException as error:
                if error.status_code is LLMStatusCode.LLM_PARAM_INVALID:  # no attempt can succeed
                    self._fail(communicator, str(error))
                    return False
                # Ports without a listener, or of other communicators, are expected.
                if error.phase != "connect" and error.status_code is not LLMStatusCode.LLM_NOT_YET_LINK:
                    self.note(communicator, str(error), error.phase)
                member.next_port()
            else:
                if self.join(communicator, member.cluster_id):
                    return False
                self._drop_spare(member.cluster_id, f"{communicator} was given up")
                return communicator.preparing
        return True

    def stop(self) -> None:
        """Fail all, join the dialling threads, close the listeners."""
        with self._lock:
            self._stopped = True
            dropped = list(self._all.values())
            self._all.clear()
            for communicator in dropped:
                communicator.fail("finalized")
        self._dials.stop()
        for communicator in dropped:
            self._control.call(self._shut, communicator)

    def abandon(self) -> None:
        """In a forked child, without locks: close copies of sockets."""
        self._dials.abandon()
        for communicator in list(self._all.values()):
            if communicator.listener is not None:
                communicator.listener.abandon()
            elif communicator.sock is not None:
                communicator.sock.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listening_socket((host, port))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    # Behind address translation this host does not have its address.
    return listening_socket(("::" if ":" in host else "0.0.0.0", port))
