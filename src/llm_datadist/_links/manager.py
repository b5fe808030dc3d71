"""LinkManager: every link of one LLMDataDist, the listener, and linking and unlinking."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from llm_datadist._links.channel import Channel
from llm_datadist._links.communicators import Communicators
from llm_datadist._links.handshake import Dial, Listener
from llm_datadist._links.link import Link, LinkState, Peer
from llm_datadist._links.liveness import Heartbeat, LinkConflicts
from llm_datadist._links.messages import (
    Beat,
    Failed,
    Hello,
    Linked,
    Located,
    Message,
    Ping,
    Pong,
    Resolved,
    TransportChoice,
    UnlinkAck,
    UnlinkCancel,
    UnlinkRequest,
    Verified,
)
from llm_datadist._links.retry import Reconnector
from llm_datadist._links.table import LinkTable
from llm_datadist._log import logger
from llm_datadist._native import steps
from llm_datadist._transport.samehost import SameHostListener
from llm_datadist.errors import (
    DeadlineExceeded,
    LinkRefused,
    LLMException,
    LLMStatusCode,
    NotLinked,
    ProtocolError,
    StateError,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from llm_datadist._deadline import Deadline
    from llm_datadist._links.handshake import AdmissionPolicy, Identity
    from llm_datadist._links.loop import ControlLoop
    from llm_datadist._links.retry import MemberDial, Reconnect
    from llm_datadist._memory.exports import Exports
    from llm_datadist._transport import Choice
    from llm_datadist._transport.connection import DataPath
    from llm_datadist._transport.lanes import Lanes
    from llm_datadist.metrics import LinkStatistics, RedialStatistics

__all__ = ["LinkManager", "give_up", "on_unlink_request"]

#: Whoever has said goodbye, and was answered, closes next.
_PARTING_SECONDS: Final = 1.0


#: Answers that leave nothing behind at the end that gave them: one that comes too late is nobody's.
_FINAL: Final = (Failed, UnlinkAck, Located, Verified)
_ANSWERS: Final = (Resolved, *_FINAL)


class LinkManager:
    """Owns the listener, the same-host rendezvous and all links.

    Callers' threads link, unlink and look links up; the control thread accepts, dispatches, beats and breaks. Links
    are ended outside every lock.

    Args:
        handlers: Message type -> function(link, message), called on the control thread: what this layer does not know.
        on_end: Called once for every link that ended, after its last message was dispatched.
        on_tick: Called every beat.
        peer_timeout: Seconds of silence after which a peer counts as dead.

    Attributes:
        communicators: The links that rank tables ask for.
    """

    def __init__(
        self,
        control: ControlLoop,
        identity: Identity,
        exports: Exports,
        lanes: Lanes,
        *,
        socket_dir: str | None,
        peer_timeout: float,
        handlers: Mapping[type[Message], Callable[[Link, Any], None]],
        on_end: Callable[[Link], None],
        on_tick: Callable[[float], None],
    ) -> None:
        self._control = control
        self._identity = identity
        self._exports = exports
        self._lanes = lanes
        self._handlers: dict[type[Message], Callable[[Link, Any], None]] = {
            Ping: lambda link, message: link.tell(Pong(message.id)),
            Pong: self._on_pong,
            UnlinkRequest: on_unlink_request,
            UnlinkCancel: lambda link, _: self._on_unlink_cancel(link),
            **handlers,
        }
        self._on_end = on_end
        self._table = LinkTable(identity.incarnation)
        self._listener: Listener | None = None
        self._rendezvous = SameHostListener(exports, socket_dir)
        self._started = False
        self._conflicts = LinkConflicts(self._table, self._end)
        self._reconnector = Reconnector(self._dial_again, lambda cluster_id: self._usable(cluster_id) is not None)
        self._heartbeat = Heartbeat(control, self._table.all, self._end, on_tick, peer_timeout)
        self.communicators = Communicators(self, control, identity.cluster_id)

    # --- start and stop: init and finalize -------------------------------------------------------------------------

    def start(self, listening: socket.socket | None) -> None:
        """Begin to beat, to meet, and, with a bound socket, to listen. The control thread runs by now."""
        self._started = True
        self._control.call(self._start, listening)

    def _start(self, listening: socket.socket | None) -> None:
        self._rendezvous.start(self._control.loop)
        if listening is not None:
            self._listener = self.listener_for(None, listening)
        self._heartbeat.start()

    def listener_for(self, admission: AdmissionPolicy | None, listening: socket.socket) -> Listener:
        """Return a listener on a bound socket, which its owner closes. On the control thread."""
        return Listener(
            self._control, listening, self._identity, self._exports, self._rendezvous, self._lanes, self, admission
        )

    def stop(self, reason: str) -> None:
        """End every link without a word to the peers (API §3.2), then the listener and the rendezvous."""
        self.communicators.stop()
        self._reconnector.stop()
        for link in self._table.close():
            link.begin_unlink()
            self._end(link, reason, lost=False)
        if self._started:
            self._control.call(self._stop)
        else:
            self._stop()

    def _stop(self) -> None:
        self._heartbeat.stop()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._rendezvous.close()

    def abandon(self) -> None:
        """In a forked child, without any lock: close the child's copies of the parent's sockets, which stay up."""
        self._rendezvous.close()
        self._reconnector.abandon()
        self.communicators.abandon()
        if self._listener is not None:
            self._listener.abandon()
        for link in self._table.snapshot():
            if link.channel is not None:
                link.channel.abandon()

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """Where this process listens, with the port that was picked; None when it does not."""
        return self._listener.address if self._listener is not None else None

    def listen(self, listening: socket.socket | None, *, even_if_linked: bool = False) -> None:
        """Take another listening socket in the place of the one there is; None: listen no more.

        Raises:
            StateError: There is a link, or one is on its way (``LLM_EXIST_LINK``): nothing has changed, and the socket
                is still the caller's.
        """
        self._control.call(self._listen, listening, even_if_linked)

    def _listen(self, listening: socket.socket | None, even_if_linked: bool) -> None:
        if not even_if_linked:
            self.refuse_if_linked()
        if self._listener is not None:
            self._listener.close()
        self._listener = None if listening is None else self.listener_for(None, listening)

    def settle_unlinks(self) -> None:
        """Wait a moment for the ends of links whose peer has said goodbye: they are on their way. A caller's thread."""
        self._table.wait(lambda: not any(link.parted for link in self._table.snapshot()), _PARTING_SECONDS)

    def refuse_if_linked(self) -> None:
        """Raise StateError with ``LLM_EXIST_LINK`` while a link of either style is there or is being prepared."""
        there = [f"the link to {link.peer}" for link in self.all() if not link.ended]
        there += self._table.dials()
        there += self.communicators.preparing()
        if there:
            raise StateError(
                f"{', '.join(there[:3])}{' and others' if len(there) > 3 else ''} must be unlinked first",
                status_code=LLMStatusCode.LLM_EXIST_LINK,
            )

    # --- looking up ------------------------------------------------------------------------------------------------

    def get(self, cluster_id: int) -> Link:
        """Return the link to a cluster.

        Raises:
            NotLinked: There is none.
        """
        link = self._table.get(cluster_id)
        if link is None or not (link.usable and link.open):
            story = self._reconnector.story(cluster_id) or self.communicators.story(cluster_id)
            story = story or "; link_clusters makes the link, from either side"
            raise NotLinked(f"cluster {cluster_id} is not linked{story}", peer=cluster_id)
        return link

    def _usable(self, cluster_id: int | None) -> Link | None:
        link = None if cluster_id is None else self._table.get(cluster_id)
        return link if link is not None and link.usable else None

    def peek(self, cluster_id: int) -> Link | None:
        """Return the link to a cluster, in whichever state; None without one. Takes no lock."""
        return self._table.get(cluster_id)

    def all(self) -> list[Link]:
        """Return every link."""
        return self._table.all()

    def statistics(self) -> tuple[LinkStatistics, ...]:
        """Return one value per link."""
        return tuple(link.statistics() for link in self.all())

    def redials(self) -> tuple[RedialStatistics, ...]:
        """Return one value per lost link that is being dialled again."""
        return self._reconnector.statistics()

    def check_integrity(self) -> None:
        """Raise AssertionError when the links contradict themselves or the table."""
        self._table.check_integrity()
        self.communicators.check_integrity()
        for link in self.all():
            link.check_integrity()

    # --- both ways of becoming linked ------------------------------------------------------------------------------

    def _channel(self, link: Link, sock: socket.socket, first: Message | None = None) -> Channel:
        return Channel(
            self._control,
            sock,
            partial(self._dispatch, link),
            lambda reason: self._end(link, "the peer unlinked" if link.parted else reason, lost=not link.parted),
            first,
            partial(self._answers, link),
        )

    # --- being linked: the control thread (see listener.Host) ------------------------------------------------------

    async def admit(self, hello: Hello) -> None:
        """Refuse a second process under a linked cluster id, unless the first one is gone (rule 8)."""
        peer = Peer(hello.cluster_id, hello.incarnation, hello.pid, hello.host)
        await self._conflicts.give_way(peer)

    def install(
        self,
        hello: Hello,
        met: TransportChoice,
        connection: DataPath,
        choice: Choice,
        sock: socket.socket,
        leftover: bytes,
    ) -> None:
        """Make the link of a stranger usable, and tell it so; an older link of the same incarnation is replaced."""
        peer = Peer(hello.cluster_id, hello.incarnation, hello.pid, hello.host)
        link = Link(peer, connection, choice, dialled=False, sequence=0, peer_sequence=met.sequence)
        link.redialled = hello.redials
        link.by_table = hello.meeting is not None
        link.open = not link.by_table
        old = self._table.admit(link)
        # Usable here before the initiator hears of it, and it hears of it before anything else.
        channel = self._channel(link, sock, Linked(link.sequence))
        link.ready(channel)
        link.connection.begin(link)
        self._table.touch()
        channel.begin(leftover)
        self._reconnector.linked(peer.cluster_id)
        if link.by_table:
            link.greetings.append(hello)
        self._await_answer(link, old)
        if old is not None:
            self._end(old, "replaced by a newer link", lost=True)
        logger.info("linked by %s over %s: %s", peer, choice.name, choice.reason)

    def _await_answer(self, link: Link, old: Link | None) -> None:
        """Members join once the peer answers: it may have given this attempt up by now, and would come again.

        It may also have dialled twice at once, for two communicators: what the link in whose place this one is was
        dialled with counts as well.
        """
        if old is not None and old.peer.incarnation == link.peer.incarnation:
            link.greetings += old.greetings
            old.greetings = []
        if link.greetings:
            link.ping()

    def recognise(self, hello: Hello) -> int:
        """A communicator of the peer is to use the link that there is; return this end's number of it."""
        link = self._usable(hello.cluster_id)
        if link is None or link.peer.incarnation != hello.incarnation:
            raise LinkRefused(
                f"cluster {self._identity.cluster_id} has no link to this process of cluster {hello.cluster_id} (yet)",
                status_code=LLMStatusCode.LLM_LINK_BUSY,
            )
        self.communicators.joined(hello)
        return link.sequence

    # --- unlinking: a caller's thread ------------------------------------------------------------------------------

    def unlink(self, cluster_id: int, deadline: Deadline, *, force: bool) -> None:
        """Give up the link to a cluster, a lost one that is being dialled again too; no link is success.

        Running operations may finish first. Forced: this side only, without a word; what still runs at the deadline
        fails. Otherwise: tell the peer and wait for its agreement.

        Raises:
            DeadlineExceeded: Operations still ran, or the peer did not answer; the link is kept (API §3.4).
        """
        self._reconnector.cancel(cluster_id, deadline)
        try:
            link = self._table.get(cluster_id)
            if link is not None:
                give_up(self._table, link, deadline, force=force)
            # From here on the peer does not come back by itself; one that just has is not wanted either.
            self._table.part(cluster_id)
            if link is not None:
                self._end(link, "unlinked", lost=False)
            back = self._usable(cluster_id)
            if back is not None and back.redialled and not back.asked_for:
                self._end(back, "unlinked", lost=False)
        finally:
            self._reconnector.cancel(cluster_id, deadline)  # what the loss of the link began meanwhile

    def drop(self, link: Link, reason: str) -> None:
        """End a link at once: operations that run on it fail. Any thread; the peer sees it end."""
        self._end(link, reason, lost=False)

    # --- the control thread ----------------------------------------------------------------------------------------

    @staticmethod
    def _answers(link: Link, message: Message) -> bool:
        """Deliver an answer that somebody waits for; the thread of any caller that reads, too."""
        link.heard()
        return isinstance(message, _ANSWERS) and link.answer(message.id, message)

    def _dispatch(self, link: Link, message: Message) -> None:
        if self._answers(link, message) or isinstance(message, Beat):
            return
        if isinstance(message, _FINAL):
            return  # late: its caller has given up
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"{type(message).__name__} has no place on a link that is up")
        if steps.watch is not None:
            steps.watch("handle", self, message, link)
        handler(link, message)
        if steps.watch is not None:
            steps.watch("handled", self, message, link)

    def _on_unlink_cancel(self, link: Link) -> None:
        link.peer_stays()
        self._table.touch()

    def _end(self, link: Link, reason: str, *, lost: bool) -> None:
        """A link is over. Any thread; the first reason counts."""
        expected = not lost or link.state is LinkState.DRAINING
        # Before the link is gone: whoever unlinks what is gone must find what has been begun.
        in_table = self._table.get(link.peer.cluster_id) is link
        reconnect = self._reconnector.begin(link) if in_table and not expected else None
        self._table.remove(link)
        ended = link.end(reason, lost=lost)
        if reconnect is not None and not ended:
            self._reconnector.forget(reconnect)  # another call was first
        if ended:
            log = logger.info if expected else logger.warning
            log("link to %s ended: %s", link.peer, reason)
            self._on_end(link)
            self.communicators.lost(link.peer.cluster_id)

    def _on_pong(self, link: Link, message: Pong) -> None:
        link.last_pong = max(link.last_pong, message.id)
        self._table.touch()
        greetings, link.greetings = link.greetings, []
        refused: list[LinkRefused] = []
        for hello in greetings:
            try:
                self.communicators.joined(hello)
            except LinkRefused as error:
                refused.append(error)
        if refused and len(refused) == len(greetings):
            self._end(link, str(refused[-1]), lost=False)

    def link(self, wanted: int | None, address: tuple[str, int], deadline: Deadline, *, mutual: bool = False) -> None:
        """Link to the listener at ``address``; ``wanted`` None learns its cluster id (R28).

        When the peer dials this end meanwhile, one link is made and both calls succeed; so does the first call after
        a loss that a redial has already mended.

        Args:
            mutual: Both ends link explicitly (transfer backend hixl): a link that the peer made is no obstacle to
                this end's first call.

        Raises:
            AlreadyLinked: There is a live link to that cluster.
            DeadlineExceeded: Not done in time.
            LinkRefused: Unreachable or refused, with the reason.
        """
        since = self._table.now()
        silent = self._usable(wanted)
        if silent is not None and self._conflicts.answers(silent, deadline):
            _claim(silent, since, address, mutual=mutual)
            return
        try:
            present = self._dial_until_linked(wanted, address, deadline, since)
        except (DeadlineExceeded, LinkRefused):
            if silent is not None and silent.usable:
                raise silent.already() from None  # whoever cannot be reached twice is still linked
            raise
        if present is not None:
            _claim(present, since, address, mutual=mutual)

    def _dial_until_linked(
        self, wanted: int | None, address: tuple[str, int], deadline: Deadline, since: int
    ) -> Link | None:
        """Make a link; return the one that there is already, when it was there first and its peer knows it."""
        while True:
            try:
                present = self._dial(wanted, address, deadline)
            except LinkRefused as error:
                if error.status_code is not LLMStatusCode.LLM_LINK_BUSY:
                    raise
                # Both ends dialled at once, and this one gives way: has the other come through? Else try again.
                if not self._table.wait(lambda: self._is_new(wanted, since), _CROSSING_POLL_SECONDS):
                    deadline.check(f"link to {address[0]}:{address[1]}: both ends dial", "link", wanted)
                continue
            if present is None or self._conflicts.answers(present, deadline):
                return present
            # The process lives, it has just answered, but it knows nothing of this link any more.
            self._conflicts.lose(present, "its peer answers new dials only", deadline)

    def _is_new(self, cluster_id: int | None, since: int) -> bool:
        link = self._usable(cluster_id)
        return link is not None and link.sequence > since

    def _dial(
        self, wanted: int | None, address: tuple[str, int], deadline: Deadline, again: Reconnect | None = None
    ) -> Link | None:
        """Make one link; return the one that there is already, when it was there first."""
        incarnation = None if again is None else again.peer.incarnation
        with Dial(address, self._identity, self._exports, self._lanes, deadline, again=incarnation) as dial:
            if again is not None:
                again.begin(dial)
            dial.greet(wanted)
            self._conflicts.replace(dial.peer, deadline)
            number = self._table.commit(dial.peer, deadline)
            if isinstance(number, Link):
                return number
            try:
                self._install_dialled(dial, number, dial.settle(number), again)
            finally:
                self._table.withdraw(dial.peer)
        return None

    def _dial_again(self, again: Reconnect, deadline: Deadline) -> None:
        """One attempt of the redialler, on its thread."""
        self._dial(None, again.address, deadline, again)
        link = self._table.get(again.peer.cluster_id)
        if again.cancelled and link is not None and link.redialled:
            self._end(link, "unlinked", lost=False)

    def _install_dialled(self, dial: Dial, number: int, peer_number: int, again: Reconnect | None) -> None:
        link = Link(dial.peer, dial.connection, dial.choice, dialled=True, sequence=number, peer_sequence=peer_number)
        link.redialled = again is not None
        link.asked_for = again is None and not dial.by_table
        if dial.by_table:
            # Where the peer listened until now there will soon be nobody: it is not dialled again.
            link.by_table, link.open = True, False
        else:
            link.address = dial.address
        sock, leftover = dial.take()
        link.ready(channel := self._channel(link, sock))
        try:
            old = self._table.install(link)
        except LinkRefused:
            link.end("finalized", lost=False)
            raise
        link.connection.begin(link)
        channel.begin(leftover)
        self._reconnector.linked(link.peer.cluster_id)
        self._await_answer(link, old)
        if old is not None:
            self._end(old, "replaced by a newer link", lost=True)
        logger.info("linked to %s over %s: %s", link.peer, link.choice.name, link.choice.reason)

    # --- for a communicator: a thread of Approaches ----------------------------------------------------------------

    def dial_member(self, member: MemberDial, deadline: Deadline) -> None:
        """One attempt to find a member of a communicator; a link to it that is there already will do.

        Raises:
            LinkRefused: Not there; with ``LLM_PARAM_INVALID`` when another attempt would be refused as well.
            DeadlineExceeded: Not done in time.
        """
        meeting = member.communicator.meeting
        with Dial(member.address, self._identity, self._exports, self._lanes, deadline, meeting=meeting) as dial:
            member.begin(dial)
            dial.greet(member.cluster_id)
            self._conflicts.replace(dial.peer, deadline)
            number = self._table.commit(dial.peer, deadline)
            if isinstance(number, Link):
                self._recognise(dial, number, deadline)
                return
            try:
                self._install_dialled(dial, number, dial.settle(number), None)
            finally:
                self._table.withdraw(dial.peer)

    def _recognise(self, dial: Dial, present: Link, deadline: Deadline) -> None:
        """Agree with the peer that the link which is there is the one that is meant."""
        try:
            dial.settle(present.sequence, present=True)
        except LinkRefused:
            if not self._conflicts.answers(present, deadline):
                self._conflicts.lose(present, "its peer knows nothing of it", deadline)
            raise


#: When both ends dialled at once, the one that gave way looks that often for the other's link.
_CROSSING_POLL_SECONDS: Final = 0.05


def _claim(link: Link, since: int, address: tuple[str, int], *, mutual: bool) -> None:
    """``link_clusters`` found this link: see :meth:`Link.claim`."""
    link.claim(since, mutual=mutual)
    if link.by_table:
        link.address = address  # from now on it is known where to dial, should it be lost


def give_up(table: LinkTable, link: Link, deadline: Deadline, *, force: bool) -> None:
    """Let running operations finish, and the peer agree, as far as there is time. A caller's thread.

    Raises:
        DeadlineExceeded: Operations still run, or the peer did not answer: the link is kept. Not when forced.
    """
    cluster_id = link.peer.cluster_id
    if not link.begin_unlink():
        # Another call, of either end, is at it.
        gone = table.wait(lambda: table.get(cluster_id) is not link, deadline.remaining())
        if not gone and not force:
            raise deadline.error(f"unlink of {link.peer}", "drain", cluster_id)
    elif force:
        link.wait_idle(deadline)
    else:
        _part(table, link, deadline)


def _part(table: LinkTable, link: Link, deadline: Deadline) -> None:
    """Part in agreement. A link that breaks meanwhile is as good."""
    what = f"unlink of {link.peer}"
    try:
        if not link.wait_idle(deadline):
            raise deadline.error(what, "drain", link.peer.cluster_id)
        link.request(UnlinkRequest, deadline, what, "unlink")
    except DeadlineExceeded:
        link.tell(UnlinkCancel())
        link.resume()
        table.touch()
        raise
    except LLMException as error:
        logger.info("%s: %s", what, error)


def on_unlink_request(link: Link, message: UnlinkRequest) -> None:
    """The peer wants to part: say farewell once nothing runs here. The control thread."""
    link.peer_parts(lambda: link.tell(UnlinkAck(message.id)))
