"""Links, listener and communicators of one LLMDataDist; linking and unlinking."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

from llm_datadist._deadline import Deadline
from llm_datadist._links import messages
from llm_datadist._links.channel import Channel
from llm_datadist._links.communicators import Communicators, MemberDial
from llm_datadist._links.dial import Dial
from llm_datadist._links.link import Link, LinkState, Peer
from llm_datadist._links.listener import AdmissionPolicy, Listener
from llm_datadist._links.liveness import Heartbeat
from llm_datadist._links.messages import Answer, ClaimOver, Failed, GrantedOnly, Located, UnlinkAck, Verified
from llm_datadist._links.retry import Attempt, Reconnect, Reconnector
from llm_datadist._links.table import LinkTable
from llm_datadist._log import links_logger as logger
from llm_datadist._log import named
from llm_datadist._native import Meter, Use, steps
from llm_datadist._native.public_call import elsewhere
from llm_datadist.errors import (
    AlreadyLinked,
    AuthFailed,
    DeadlineExceeded,
    LinkError,
    LinkRefused,
    LLMException,
    LLMStatusCode,
    NotLinked,
    ProtocolError,
    StateError,
)
from llm_datadist.types.cluster import show_address

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping

    from llm_datadist._links.handshake import Endpoint, NewLink
    from llm_datadist._links.loop import ControlLoop
    from llm_datadist.config import Options

#: Time for a peer to close after UnlinkAck.
_UNLINK_MS: Final = 1000
#: Limit of an answer if another process claims the cluster id.
_ANSWER_MS: Final = 1000
#: Wait of the side that gives way for the other's link.
_CROSSING_POLL_MS: Final = 50
#: Answers that hold nothing, if late.
_IGNORED: Final = Failed, UnlinkAck, GrantedOnly, Located, Verified, ClaimOver, Answer


class LinkManager:
    """All links of one LLMDataDist.

    Owns: listener, links, heartbeat, reconnects and communicators.
    Threads: callers link, unlink and look up. The control thread accepts, dispatches, and calls ``on_tick`` at every
        beat, with the monotonic time. Any thread ends links, outside every lock; the first reason counts. ``on_end`` is
        called in any thread when a link ends, and again on the control thread once no message can follow.
    """

    def __init__(
        self,
        control: ControlLoop,
        endpoint: Endpoint,
        options: Options,
        handlers: Mapping[type[messages.Message], Callable[[Link, Any], None]],
        on_end: Callable[[Link], None],
        on_tick: Callable[[float], None],
    ) -> None:
        self._control = control
        self.endpoint = endpoint
        self._on_end = on_end
        self._handlers: dict[type[messages.Message], Callable[[Link, Any], None]] = {
            messages.Beat: Link.peer_moved,
            messages.Ping: lambda link, message: link.tell(messages.Pong(message.id)),
            messages.Pong: self._on_pong,
            messages.UnlinkRequest: Link.peer_unlinks,
            messages.UnlinkCancel: self._on_unlink_cancel,
            messages.Authenticate: self._on_renewal,
            messages.Authenticated: self._on_renewal,
            **handlers,
        }
        table = self._table = LinkTable(endpoint.transports.exports.incarnation, options.max_links)
        self.note, self.all, self.peek, self.refuse_new = table.note, table.all, table.get, table.refuse_new
        self.listener: Listener | None = None
        self._started = False
        self._lost: dict[str, Meter] = {}  # by kind
        self._reconnector = Reconnector(
            self._reconnect, lambda each: self._usable(each.peer.cluster_id, each.sequence) is not None
        )
        self.reconnects = self._reconnector.statistics
        lose = partial(self.end, lost=True)
        self.heartbeat = Heartbeat(control, self.all, lose, options.peer_timeout, options.max_link_age, on_tick)
        self.communicators = Communicators(self, control, endpoint.cluster_id)

    def start(self, listening: socket.socket | None) -> None:
        """Start the heartbeat and, with a bound socket, the listener."""
        self._started = True
        self._control.call(self._listen, listening)
        self._control.call(self.heartbeat.start)

    def listener_for(self, admission: AdmissionPolicy | None, listening: socket.socket) -> Listener:
        """Return a listener, which the caller closes. On the control thread."""
        return Listener(self._control, listening, self.endpoint, self, admission)

    def stop(self, reason: str) -> None:
        """End every link, then the listener. Peers are told, and not waited for (interface §3.2)."""
        self.communicators.stop()
        self._reconnector.stop()
        for link in self._table.refuse("the instance is being finalized"):
            link.begin_unlink()
            link.say_goodbye()
            self.end(link, reason, lost=False)
        if self._started:
            self._control.call(self.heartbeat.stop)
            self._control.call(self._listen, None)

    def stop_linking(self, why: str) -> None:
        """Make no link any more, and dial no lost one; the others stay."""
        self._table.refuse(why)
        self._reconnector.drop(lambda _: True)

    def abandon(self) -> None:
        """In a forked child, without locks: close copies of sockets."""
        self._reconnector.abandon()
        self.communicators.abandon()
        if self.listener is not None:
            self.listener.abandon()
        for link in self.all():
            if link.channel is not None:
                link.channel.close_files()

    @property
    def listen_address(self) -> tuple[str, int] | None:
        return self.listener.address if self.listener is not None else None

    def listen(self, listening: socket.socket | None, *, even_if_linked: bool = False) -> None:
        """Replace the listening socket; None stops listening.

        Raises as :meth:`refuse_if_linked`; then nothing changes, and the caller keeps the socket.
        """
        self._control.call(self._listen, listening, even_if_linked)

    def _listen(self, listening: socket.socket | None, even_if_linked: bool = True) -> None:
        if not even_if_linked:
            self.refuse_if_linked()
        if self.listener is not None:
            self.listener.close()
        self.listener = None if listening is None else self.listener_for(None, listening)

    def await_unlinks(self) -> None:
        """Wait, at most a second, until the links end that peers have unlinked."""
        self._table.wait(lambda: not any(link.unlink_acknowledged for link in self.all()), Deadline(_UNLINK_MS))

    def refuse_if_linked(self) -> None:
        """Raise StateError (``LLM_EXIST_LINK``) while a link exists or is being prepared."""
        there = [f"the link to {link.peer}" for link in self.all() if not link.ended]
        there += self._table.dials()
        there += self.communicators.preparing()
        if there:
            text = f"{', '.join(there[:3])}{' and others' if len(there) > 3 else ''} must be unlinked first"
            raise StateError(text, status_code=LLMStatusCode.LLM_EXIST_LINK)

    def get(self, cluster_id: int) -> Link:
        """Return the usable link to a cluster. Raises NotLinked."""
        link = self._table.get(cluster_id)
        if link is None or not (link.usable and link.origin.open):
            raise self._not_linked(cluster_id, link)
        return link

    def operation(self, cluster_id: int) -> Use[Link]:
        """Return a context manager for an operation on a link: it raises NotLinked, or unlinking waits for its end."""
        link = self._table.links.get(cluster_id)
        if link is None or not link.origin.open:
            raise self._not_linked(cluster_id, link)
        return Use(link.operations, link, self, cluster_id)

    def refuse(self, link: Link, cluster_id: int) -> NoReturn:
        """Raise NotLinked: the link is not usable."""
        raise self._not_linked(cluster_id, link)

    def last_left(self, link: Link) -> None:
        """End the last operation on a link that admits no more."""
        link.last_left()

    @elsewhere
    def _not_linked(self, cluster_id: int, link: Link | None) -> NotLinked:
        story = self._reconnector.story(cluster_id) or self.communicators.story(cluster_id)
        story = story or "; link_clusters makes the link, from either side"
        past, cause = self._table.past(cluster_id) if link is None else ("", None)
        error = NotLinked(f"cluster {cluster_id} is not linked{past}{story}", peer=cluster_id)
        error.__cause__ = cause
        return error

    def _usable(self, cluster_id: int | None, since: int = 0) -> Link | None:
        """Return the usable link to a cluster, if its number is above ``since``."""
        link = None if cluster_id is None else self._table.get(cluster_id)
        return link if link is not None and link.usable and link.origin.sequence > since else None

    @property
    def lost(self) -> dict[str, int]:
        """Lost links by kind of reason, except those being unlinked."""
        return {kind: meter.count for kind, meter in self._lost.copy().items()}

    @property
    def lost_peers(self) -> tuple[tuple[int, str], ...]:
        """Cluster id and kind of each loss, until the peer is linked again or unlinked here."""
        return tuple(self._table.lost.copy().items())

    @property
    def reconnected(self) -> int:
        return self._reconnector.succeeded

    def check_integrity(self) -> None:
        self._table.check_integrity()
        self.communicators.check_integrity()
        for link in self.all():
            link.check_integrity()

    def link(self, wanted: int | None, address: tuple[str, int], deadline: Deadline, *, mutual: bool = False) -> Peer:
        """Link to the listener at ``address``, return the peer; ``wanted`` None accepts any (interface R28).

        If the peer dials too, one link is made and both calls succeed. The first call after a loss succeeds if the
        link is back already. If ``mutual`` (transfer backend hixl), this side's first call after the peer's succeeds.

        Raises AlreadyLinked if there is a live link to that cluster, LinkRefused if the listener is unreachable or
        refuses, and DeadlineExceeded.
        """
        self.refuse_new()
        since = self._table.sequence
        present, made = self._usable(wanted), False
        if present is None or not _lives(present, deadline):
            silent = present
            try:
                present, made = self._dial_until_linked(wanted, address, deadline, since)
            except (DeadlineExceeded, LinkRefused):
                if silent is not None and silent.usable:
                    raise _already_linked(silent) from None  # unreachable, but linked
                raise
        present.origin.asked = show_address(address)
        if not made:
            _mark_requested(present, since, address, mutual=mutual)
        return present.peer

    def _dial_until_linked(
        self, wanted: int | None, address: tuple[str, int], deadline: Deadline, since: int
    ) -> tuple[Link, bool]:
        """Return a link that the peer knows, and whether it was made here."""
        while True:
            try:
                present, made = self._dial(wanted, address, deadline)
            except LinkRefused as error:
                if error.status_code is not LLMStatusCode.LLM_LINK_BUSY:
                    raise
                # Both sides dialled, and this one gives way: it dials again until the other's link comes.
                if not self._table.wait(lambda: bool(self._usable(wanted, since)), Deadline(_CROSSING_POLL_MS)):
                    deadline.check(f"link to {show_address(address)}: both sides dial", "link", wanted)
                continue
            # The process may answer dials, but have forgotten this link.
            if made or self._keep(present, "its peer answers new dials only", deadline):
                return present, made

    def _reconnect(self, reconnect: Reconnect, deadline: Deadline) -> None:
        """Dial a lost link once. On the reconnector's thread."""
        self._table.refuse_new(reconnected=True)
        present, made = self._dial(None, reconnect.address, deadline, reconnect, incarnation=reconnect.peer.incarnation)
        if not made and present.origin.sequence <= reconnect.sequence:
            raise LinkRefused("the lost link is still ending")
        link = self._table.get(reconnect.peer.cluster_id)
        if reconnect.cancelled and link is not None and link.origin.reconnected:
            self.end(link, "unlinked", lost=False)

    def dial_member(self, member: MemberDial, deadline: Deadline) -> None:
        """Dial a member once, or use a link. Raises LinkRefused: ``LLM_PARAM_INVALID`` if no attempt can succeed."""
        communicator = member.communicator.own_id
        self._dial(member.cluster_id, member.address, deadline, member, communicator=communicator)

    def _dial(
        self,
        wanted: int | None,
        address: tuple[str, int],
        deadline: Deadline,
        attempt: Attempt | None = None,
        *,
        incarnation: bytes | None = None,
        communicator: messages.CommunicatorId | None = None,
    ) -> tuple[Link, bool]:
        """Return a link, and whether it was made: there may be one already."""
        with (
            _refusing(show_address(address), but=LLMException),
            Dial(self.endpoint, address, deadline, incarnation=incarnation, communicator=communicator) as dial,
        ):
            if attempt is not None:
                attempt.begin(dial)
            dial.greet(wanted)
            old = self._table.conflict(dial.peer)
            if incarnation is None and old is not None:  # a reconnect replaces no other process
                self._keep(old, f"silent while {dial.peer} took its place", deadline)
            number = self._table.commit(dial.peer, deadline)
            if isinstance(number, Link):
                try:
                    if communicator is not None:  # which uses that link, if the peer agrees
                        dial.confirm(number.origin.sequence, present=True)
                except LinkRefused:
                    self._keep(number, "its peer knows nothing of it", deadline)
                    raise
                return number, False
            try:
                return self._install_dialled(dial.take(number, dial.confirm(number))), True
            finally:
                self._table.withdraw(dial.peer)

    def _install_dialled(self, new: NewLink) -> Link:
        """Make a dialled link usable. Owns ``new``. Raises LinkRefused and AlreadyLinked."""
        channel = self._channel(new)
        new.link.ready(channel)
        try:
            old = self._table.install(new.link)
        except LinkError as error:
            new.link.end(str(error), lost=False)
            raise
        self._bring_up(new, channel, old)
        return new.link

    def _keep(self, link: Link, reason: str, deadline: Deadline) -> bool:
        """Return True if the peer answers; otherwise end its link. Raises DeadlineExceeded once time is over."""
        if _lives(link, deadline):
            return True
        deadline.check(f"link to {link.peer}", "link", link.peer.cluster_id)
        if link.usable:
            self.end(link, reason, "replaced", lost=True)
        return False

    async def admit(self, hello: messages.Hello, source: str, *, proven: bool) -> None:
        """Wait until no other process with this cluster id is linked.

        Raises AlreadyLinked if that answers within a second, or the peer reconnects while another incarnation is
        linked. Raises LinkRefused above a limit, and (``LLM_LINK_BUSY``) if the linked one has the incarnation of a
        peer without proof: of two first dials at once, one is enough.
        """
        self._table.refuse_if_full(hello.cluster_id, source)
        peer = Peer.of(hello)
        if (old := self._table.conflict(peer, proven=proven)) is None:
            return
        if hello.reconnects and old.peer.incarnation != peer.incarnation:
            raise AlreadyLinked(f"cluster {peer.cluster_id} is {old.peer} since {peer} was lost")
        ping = old.ping()
        give_up = time.monotonic() + _ANSWER_MS / 1e3
        # The end of a restarted peer's channel may not have been read.
        while self._table.conflict(peer, proven=proven) is old and time.monotonic() < give_up:
            if old.last_pong >= ping:
                if old.peer.incarnation == peer.incarnation:
                    text = f"{old.peer} is linked, and this dial cannot prove that it comes from the same process"
                    raise LinkRefused(text, status_code=LLMStatusCode.LLM_LINK_BUSY)
                raise AlreadyLinked(f"cluster {peer.cluster_id} is {old.peer}; {peer} must have another cluster id")
            await asyncio.sleep(0.01)
        if self._table.conflict(peer, proven=proven) is old:
            self.end(old, f"silent while {peer} took its place", "replaced", lost=True)

    def install(self, new: NewLink, linked: Callable[[int], messages.Linked]) -> None:
        """Make an accepted link usable, then send ``linked`` of its number. Owns ``new``, unless it raises."""
        channel = self._channel(new)
        old = self._table.admit(new.link)
        # Usable before Linked, which is the first message.
        channel.send_first(linked(new.link.origin.sequence))
        new.link.ready(channel)
        self._bring_up(new, channel, old)

    def recognise(self, hello: messages.Hello) -> int:
        """Let the peer's communicator use the present link; return its number here."""
        link = self._usable(hello.cluster_id)
        if link is None or link.peer.incarnation != hello.incarnation:
            text = f"cluster {self.endpoint.cluster_id} has no link to this process of cluster {hello.cluster_id} (yet)"
            raise LinkRefused(text, status_code=LLMStatusCode.LLM_LINK_BUSY)
        self.communicators.joined(hello)
        return link.origin.sequence

    def _channel(self, new: NewLink) -> Channel:
        link = new.link
        lost = partial(self._on_channel_lost, link)
        return Channel(self._control, new.sock, partial(self.dispatch, link), lost, link.requests, new.tls)

    def _bring_up(self, new: NewLink, channel: Channel, old: Link | None) -> None:
        """Start a link of the table; end the one that it replaces. Raises LinkRefused."""
        link = new.link
        try:
            with _refusing(link.peer):
                for each in link.connection.connections:
                    each.begin(link)
        except LinkRefused as error:
            self.end(link, str(error), lost=False)
            raise
        self._table.touch()
        channel.begin(new.leftover)
        self._reconnector.drop_older(link)
        origin = link.origin
        # Two communicators may have dialled at once.
        if old is not None and old.peer.incarnation == link.peer.incarnation:
            # One for each communicator: a peer that dials again and again costs no more.
            said = [each.communicator.name for each in origin.greetings if each.communicator]
            origin.greetings += [
                each for each in old.origin.greetings if each.communicator and each.communicator.name not in said
            ]
            old.origin.greetings = []
        # Members join after the answer: the peer may have given up.
        if origin.greetings:
            link.ping()
        if old is not None:
            self.end(old, "replaced by a newer link", "replaced", lost=True)
        who = "to" if origin.dialled else "by"
        logger.info("linked %s %s over %s: %s", who, link.peer, link.choice.name, link.choice.reason)

    def dispatch(self, link: Link, message: messages.Message) -> None:
        """Handle a message that is no answer, or a late one. On the control thread."""
        link.heard()
        if link.ended or isinstance(message, _IGNORED):
            return
        if (handler := self._handlers.get(type(message))) is None:
            raise ProtocolError(f"{type(message).__name__} is not allowed on an established link")
        if steps.watch is not None:
            steps.watch("handle", self, message, link)
        handler(link, message)
        if steps.watch is not None:
            steps.watch("handled", self, message, link)

    def _on_pong(self, link: Link, message: messages.Pong) -> None:
        link.last_pong = max(link.last_pong, message.id)
        self._table.touch()
        greetings, link.origin.greetings = link.origin.greetings, []
        refused: list[LinkRefused] = []
        for hello in greetings:
            try:
                self.communicators.joined(hello)
            except LinkRefused as error:
                refused.append(error)
        if refused and len(refused) == len(greetings):
            self.end(link, str(refused[-1]), lost=False)

    def _on_renewal(self, link: Link, message: messages.Authenticate | messages.Authenticated) -> None:
        """Continue a renewal; end the link if its peer is rejected."""
        if (renewal := link.renewal) is None:
            raise ProtocolError("the peer authenticates itself again on a link without authentication")
        try:
            answer = renewal.answer(message) if isinstance(message, messages.Authenticate) else renewal.take(message)
        except AuthFailed as error:
            self.end(link, f"not authenticated again: {error}", "unauthenticated", lost=True)
            return
        if answer is not None:
            link.tell(answer)
        else:
            logger.info("authenticated again: %s", link.peer)

    def _on_unlink_cancel(self, link: Link, _: messages.UnlinkCancel) -> None:
        link.cancel_unlink(of_peer=True)
        self._table.touch()

    def _on_channel_lost(self, link: Link, reason: str) -> None:
        unlinked = link.unlink_acknowledged
        self.end(link, "the peer unlinked" if unlinked else reason, lost=not unlinked)
        self._on_end(link)  # what a handler took for the peer while another thread ended the link

    def unlink(self, cluster_id: int, deadline: Deadline, *, force: bool) -> None:
        """End the link to a cluster, also one that is being dialled again; without a link it succeeds.

        Operations may finish until the deadline. With ``force`` the rest fails, and the peer is told. Otherwise
        operations or a missing answer raise DeadlineExceeded, and the link is kept (interface §3.4).
        """
        self._reconnector.unlink(cluster_id, deadline)
        try:
            if (link := self._table.get(cluster_id)) is not None:
                self._drain(link, deadline, force=force)
            # A link that the peer restores now ends too.
            self._table.refuse_reconnects(cluster_id)
            if link is not None:
                self.end(link, "unlinked", lost=False)
            back = self._usable(cluster_id)
            if back is not None and back.origin.reconnected and not back.origin.requested:
                back.say_goodbye()
                self.end(back, "unlinked", lost=False)
        finally:
            self._reconnector.unlink(cluster_id, deadline)  # begun by its loss

    def _drain(self, link: Link, deadline: Deadline, *, force: bool) -> None:
        """Wait for operations and, unless forced, the peer. Raises DeadlineExceeded."""
        what, cluster_id = f"unlink of {link.peer}", link.peer.cluster_id
        while not link.begin_unlink():  # it is not ready yet, or another call, of either side, unlinks it or gives up
            self._table.wait(lambda: link.usable or self._table.get(cluster_id) is not link, deadline)
            if self._table.get(cluster_id) is not link or (force and deadline.expired()):
                return
            deadline.check(what, "drain", cluster_id)
        try:
            if not link.wait_idle(deadline) and not force:
                raise deadline.error(what, "drain", cluster_id)
            if force:
                link.say_goodbye()
            else:
                link.request(link.goodbye, deadline, what, "unlink")
        except BaseException as error:
            if isinstance(error, LLMException) and not isinstance(error, DeadlineExceeded):
                logger.info("%s: %s", what, named(error))  # a broken link is unlinked too
                return
            link.tell(messages.UnlinkCancel())
            link.cancel_unlink()
            self._table.touch()
            raise

    def end(self, link: Link, reason: str, kind: str = "connection", *, lost: bool) -> None:
        """End a link and its operations at once. ``kind`` of the reason is for ``links_lost``."""
        expected = not lost or link.state is LinkState.DRAINING
        # First: an unlink that finds no link must find the reconnect.
        in_table = self._table.get(link.peer.cluster_id) is link
        reconnect = self._reconnector.begin(link) if in_table and not expected else None
        if not link.ended:  # first, too: NotLinked names the reason
            self.note(link.peer.cluster_id, f"the link {'was lost' if lost else 'ended'}", reason)
        self._table.remove(link, "" if expected else kind)
        if link.end(reason, lost=lost):
            log = logger.info if expected else logger.warning
            log("link to %s ended: %s", link.peer, reason)
            if not expected:
                self._lost.setdefault(kind, Meter()).add(0)
            self._on_end(link)
            self.communicators.lost(link.peer.cluster_id)
        elif reconnect is not None and (not link.lost or self._table.refuses_reconnects(link.peer.cluster_id)):
            self._reconnector.drop(lambda each: each is reconnect)  # another thread unlinked it


@contextmanager
def _refusing(peer: object, *, but: type[LLMException] | tuple[()] = ()) -> Iterator[None]:
    """Raise LinkRefused at a limit of descriptors, threads or memory."""
    try:
        yield
    except but:
        raise
    except (OSError, RuntimeError, MemoryError) as error:
        raise LinkRefused(f"link to {peer}: {str(error) or type(error).__name__}") from error


def _lives(link: Link, deadline: Deadline) -> bool:
    """Return True if the peer answers in time, and the link is usable."""
    return link.responds(deadline) and link.usable


def _mark_requested(link: Link, since: int, address: tuple[str, int], *, mutual: bool) -> None:
    """Count a link as made by ``link_clusters``, which began when ``since`` was the newest.

    Raises AlreadyLinked if it was requested before. An unrequested link is accepted if the peer made it since then,
    a reconnect made it, its communicators are not OK, or ``mutual``; otherwise AlreadyLinked.
    """
    origin = link.origin
    made_meanwhile = origin.sequence > since and not origin.dialled
    if origin.requested or not (made_meanwhile or mutual or origin.reconnected or not origin.open):
        raise _already_linked(link)
    origin.requested = origin.open = True
    if origin.by_communicator:
        origin.address = address  # to redial


def _already_linked(link: Link) -> AlreadyLinked:
    return AlreadyLinked(f"already linked to {link.peer}", peer=link.peer.cluster_id)
