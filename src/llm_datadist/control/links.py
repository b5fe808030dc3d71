"""LinkManager: every link of one LLMDataDist, the listener, and linking and unlinking."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from llm_datadist.control.beats import Beats
from llm_datadist.control.channel import Channel
from llm_datadist.control.handshake import Dial
from llm_datadist.control.link import Link, Peer
from llm_datadist.control.listener import Listener
from llm_datadist.control.machine import LinkState
from llm_datadist.control.messages import (
    Beat,
    Failed,
    Farewell,
    Goodbye,
    Hello,
    Linked,
    Message,
    Met,
    Ping,
    Pong,
    Resolved,
    Stay,
)
from llm_datadist.control.table import LinkTable
from llm_datadist.errors import (
    AlreadyLinked,
    DeadlineExceeded,
    LinkRefused,
    LLMException,
    LLMStatusCode,
    NotLinked,
    ProtocolError,
)
from llm_datadist.log import logger
from llm_datadist.transport.samehost import SameHostListener

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from llm_datadist.control.handshake import Identity
    from llm_datadist.control.loop import ControlLoop
    from llm_datadist.deadline import Deadline
    from llm_datadist.metrics import LinkStatistics
    from llm_datadist.transport import Choice
    from llm_datadist.transport.base import Exports
    from llm_datadist.transport.datapath import DataPath
    from llm_datadist.transport.lanes import Lanes

__all__ = ["LinkManager"]

#: A second process under a linked cluster id waits that long for the first one to show that it lives (rule 8).
_RIVAL_SECONDS: Final = 1.0
_RIVAL_POLL_SECONDS: Final = 0.01
#: When both ends dialled at once, the one that gave way looks that often for the other's link.
_CROSSING_POLL_SECONDS: Final = 0.05


class LinkManager:
    """Owns the listener, the same-host rendezvous and all links.

    Callers' threads link, unlink and look links up; the control thread accepts, dispatches, beats and breaks. Links
    are ended outside every lock.

    Args:
        handlers: Message type -> function(link, message), called on the control thread: what this layer does not know.
        on_end: Called once for every link that ended, after its last message was dispatched.
        on_tick: Called every beat.
        peer_timeout: Seconds of silence after which a peer counts as dead.
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
            Ping: lambda link, message: _reply(link, Pong(message.id)),
            Pong: _on_pong,
            Goodbye: _on_goodbye,
            Stay: lambda link, _: self._on_stay(link),
            **handlers,
        }
        self._on_end = on_end
        self._table = LinkTable(identity.incarnation)
        self._listener: Listener | None = None
        self._rendezvous = SameHostListener(exports, socket_dir)
        self._started = False
        self._beats = Beats(control, self._table.all, self._end, on_tick, peer_timeout)

    # --- start and stop: init and finalize -------------------------------------------------------------------------

    def start(self, listening: socket.socket | None) -> None:
        """Begin to beat, to meet, and, with a bound socket, to listen. The control thread runs by now."""
        self._started = True
        self._control.call(self._start, listening)

    def _start(self, listening: socket.socket | None) -> None:
        self._rendezvous.start(self._control.loop)
        if listening is not None:
            self._listener = Listener(
                self._control, listening, self._identity, self._exports, self._rendezvous, self._lanes, self
            )
        self._beats.start()

    def stop(self, reason: str) -> None:
        """End every link without a word to the peers (API §3.2), then the listener and the rendezvous."""
        for link in self._table.close():
            link.begin_unlink()
            self._end(link, reason, lost=False)
        if self._started:
            self._control.call(self._stop)
        else:
            self._stop()

    def _stop(self) -> None:
        self._beats.stop()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._rendezvous.close()

    def abandon(self) -> None:
        """In a forked child, without any lock: close the child's copies of the parent's sockets, which stay up."""
        self._rendezvous.close()
        if self._listener is not None:
            self._listener.abandon()
        for link in self._table.snapshot():
            if link.channel is not None:
                link.channel.abandon()

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """Where this process listens, with the port that was picked; None when it does not."""
        return self._listener.address if self._listener is not None else None

    # --- looking up ------------------------------------------------------------------------------------------------

    def get(self, cluster_id: int) -> Link:
        """Return the link to a cluster.

        Raises:
            NotLinked: There is none.
        """
        link = self._table.get(cluster_id)
        if link is None or not link.usable:
            raise NotLinked(
                f"cluster {cluster_id} is not linked; link_clusters makes the link, from either side", peer=cluster_id
            )
        return link

    def all(self) -> list[Link]:
        """Return every link."""
        return self._table.all()

    def statistics(self) -> tuple[LinkStatistics, ...]:
        """Return one value per link."""
        return tuple(link.statistics() for link in self.all())

    def check_integrity(self) -> None:
        """Raise AssertionError when the links contradict themselves or the table."""
        self._table.check_integrity()
        for link in self.all():
            link.check_integrity()

    # --- linking: a caller's thread --------------------------------------------------------------------------------

    def link(self, wanted: int | None, address: tuple[str, int], deadline: Deadline, *, mutual: bool = False) -> None:
        """Link to the listener at ``address``; ``wanted`` None learns its cluster id (R28).

        When the peer dials this end meanwhile, one link is made and both calls succeed.

        Args:
            mutual: Both ends link explicitly (transfer backend hixl): a link that the peer made is no obstacle to
                this end's first call.

        Raises:
            AlreadyLinked: There is a live link to that cluster.
            DeadlineExceeded: Not done in time.
            LinkRefused: Unreachable or refused, with the reason.
        """
        since = self._table.now()
        present = None if wanted is None else self._table.get(wanted)
        if present is not None and present.usable:
            _claim(present, since, mutual=mutual)
            return
        while True:
            try:
                present = self._dial(wanted, address, deadline)
            except LinkRefused as error:
                if error.status_code is not LLMStatusCode.LLM_LINK_BUSY:
                    raise
            else:
                break
            # Both ends dialled at once, and this one gives way: look whether the other has come through, or try again.
            crossed = self._table.wait(lambda: self._is_new(wanted, since), _CROSSING_POLL_SECONDS)
            if not crossed:
                deadline.check(f"link to {address[0]}:{address[1]}: both ends dial", "link", wanted)
        if present is not None:
            _claim(present, since, mutual=mutual)

    def _is_new(self, cluster_id: int | None, since: int) -> bool:
        link = None if cluster_id is None else self._table.get(cluster_id)
        return link is not None and link.usable and link.sequence > since

    def _dial(self, wanted: int | None, address: tuple[str, int], deadline: Deadline) -> Link | None:
        """Make one link; return the one that there is already, when it was there first."""
        with Dial(address, self._identity, self._exports, self._lanes, deadline) as dial:
            dial.greet(wanted)
            number = self._table.commit(dial.peer, deadline)
            if isinstance(number, Link):
                return number
            try:
                self._install_dialled(dial, number, dial.settle(number))
            finally:
                self._table.withdraw(dial.peer)
        return None

    def _install_dialled(self, dial: Dial, number: int, peer_number: int) -> None:
        link = Link(dial.peer, dial.connection, dial.choice, dialled=True, sequence=number, peer_sequence=peer_number)
        sock, leftover = dial.take()
        link.ready(channel := self._channel(link, sock))
        try:
            old = self._table.install(link)
        except LinkRefused:
            link.end("finalized", lost=False)
            raise
        link.connection.begin(link)
        channel.begin(leftover)
        if old is not None:
            self._end(old, "replaced by a newer link", lost=True)
        logger.info("linked to %s over %s: %s", link.peer, link.choice.name, link.choice.reason)

    def _channel(self, link: Link, sock: socket.socket, first: Message | None = None) -> Channel:
        return Channel(
            self._control,
            sock,
            lambda message: self._dispatch(link, message),
            lambda reason: self._end(link, "the peer unlinked" if link.parted else reason, lost=not link.parted),
            first,
        )

    # --- being linked: the control thread (see listener.Host) ------------------------------------------------------

    async def admit(self, hello: Hello) -> None:
        """Refuse a second process under a linked cluster id, unless the first one is gone (rule 8)."""
        peer = Peer(hello.cluster_id, hello.incarnation, hello.pid, hello.host)
        old = self._table.rival(peer)
        if old is None:
            return
        ping = old.ping()
        give_up = self._control.loop.time() + _RIVAL_SECONDS
        # A restarted peer may dial before the end of its old connection has been read.
        while self._table.rival(peer) is old and self._control.loop.time() < give_up:
            if old.last_pong >= ping:
                raise AlreadyLinked(f"cluster {peer.cluster_id} is {old.peer}; {peer} must have another cluster id")
            await asyncio.sleep(_RIVAL_POLL_SECONDS)
        if self._table.rival(peer) is old:
            self._end(old, f"silent while {peer} took its place", lost=True)

    def install(
        self, hello: Hello, met: Met, connection: DataPath, choice: Choice, sock: socket.socket, leftover: bytes
    ) -> None:
        """Make the link of a stranger usable, and tell it so; an older link of the same incarnation is replaced."""
        peer = Peer(hello.cluster_id, hello.incarnation, hello.pid, hello.host)
        link = Link(peer, connection, choice, dialled=False, sequence=0, peer_sequence=met.sequence)
        old = self._table.admit(link)
        # Usable here before the initiator hears of it, and it hears of it before anything else.
        channel = self._channel(link, sock, Linked(link.sequence))
        link.ready(channel)
        link.connection.begin(link)
        self._table.touch()
        channel.begin(leftover)
        if old is not None:
            self._end(old, "replaced by a newer link", lost=True)
        logger.info("linked by %s over %s: %s", peer, choice.name, choice.reason)

    # --- unlinking: a caller's thread ------------------------------------------------------------------------------

    def unlink(self, cluster_id: int, deadline: Deadline, *, force: bool) -> None:
        """Give up the link to a cluster; no link is success. Either way running operations may finish first.

        Forced: this side only, without a word; what still runs at the deadline fails. Otherwise: tell the peer and
        wait for its agreement.

        Raises:
            DeadlineExceeded: Operations still ran, or the peer did not answer; the link is kept (API §3.4).
        """
        link = self._table.get(cluster_id)
        if link is None:
            return
        if not link.begin_unlink():
            # Another call, of either end, is at it.
            gone = self._table.wait(lambda: self._table.get(cluster_id) is not link, deadline.remaining())
            if not gone and not force:
                raise deadline.error(f"unlink of {link.peer}", "drain", cluster_id)
        elif force:
            link.wait_idle(deadline)
        else:
            self._part(link, deadline)
        self._end(link, "unlinked", lost=False)

    def _part(self, link: Link, deadline: Deadline) -> None:
        """Part in agreement. A link that breaks meanwhile is as good."""
        what = f"unlink of {link.peer}"
        try:
            if not link.wait_idle(deadline):
                raise deadline.error(what, "drain", link.peer.cluster_id)
            link.request(Goodbye, deadline, what, "unlink")
        except DeadlineExceeded:
            _reply(link, Stay())
            link.resume()
            self._table.touch()
            raise
        except LLMException as error:
            logger.info("%s: %s", what, error)

    # --- the control thread ----------------------------------------------------------------------------------------

    def _dispatch(self, link: Link, message: Message) -> None:
        link.heard()
        if isinstance(message, Beat):
            return
        if isinstance(message, Resolved | Failed | Farewell) and link.answer(message.id, message):
            return
        if isinstance(message, Failed | Farewell):
            return  # late: its caller has given up
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"{type(message).__name__} has no place on a link that is up")
        handler(link, message)

    def _on_stay(self, link: Link) -> None:
        link.peer_stays()
        self._table.touch()

    def _end(self, link: Link, reason: str, *, lost: bool) -> None:
        """A link is over. Any thread; the first reason counts."""
        expected = not lost or link.state is LinkState.DRAINING
        self._table.remove(link)
        if link.end(reason, lost=lost):
            log = logger.info if expected else logger.warning
            log("link to %s ended: %s", link.peer, reason)
            self._on_end(link)


def _claim(link: Link, since: int, *, mutual: bool) -> None:
    """Count a link that is there as the one asked for, if this call or its twin at the peer made it."""
    made_meanwhile = link.sequence > since and not link.dialled
    if link.asked_for or not (made_meanwhile or mutual):
        raise AlreadyLinked(f"already linked to {link.peer}", peer=link.peer.cluster_id)
    link.asked_for = True


def _reply(link: Link, message: Message) -> None:
    """Say something that may come too late."""
    try:
        link.send(message)
    except LLMException as error:
        logger.info("%s to %s not sent: %s", type(message).__name__, link.peer, error)


def _on_pong(link: Link, message: Pong) -> None:
    link.last_pong = max(link.last_pong, message.id)


def _on_goodbye(link: Link, message: Goodbye) -> None:
    link.peer_parts(lambda: _reply(link, Farewell(message.id)))
