"""LinkManager: every link of one LLMDataDist, the listener, the beats, and linking and unlinking."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from llm_datadist.control.channel import Channel
from llm_datadist.control.handshake import dial
from llm_datadist.control.link import Link, Peer
from llm_datadist.control.listener import Listener
from llm_datadist.control.machine import LinkState
from llm_datadist.control.messages import Beat, Failed, Farewell, Goodbye, Hello, Message, Resolved
from llm_datadist.deadline import Deadline
from llm_datadist.errors import (
    AlreadyLinked,
    DeadlineExceeded,
    LinkRefused,
    LLMException,
    LLMStatusCode,
    NotLinked,
    ProtocolError,
    StateError,
)
from llm_datadist.log import logger
from llm_datadist.transport.samehost import SameHostListener

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from llm_datadist.control.handshake import Dialled, Identity
    from llm_datadist.control.loop import ControlLoop
    from llm_datadist.metrics import LinkStatistics
    from llm_datadist.transport import Choice
    from llm_datadist.transport.base import Connection, Exports

__all__ = ["LinkManager"]

_BEAT_SECONDS: Final = 1.0
_SUSPECT_SECONDS: Final = 3.0


class LinkManager:
    """Owns the listener, the same-host rendezvous and all links, by the cluster id that the peer announced.

    Callers' threads link, unlink and look links up; the control thread accepts, dispatches, beats and breaks. One lock
    guards the table; links are ended outside it.

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
        self._handlers = handlers
        self._on_end = on_end
        self._on_tick = on_tick
        self._peer_timeout = peer_timeout
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._links: dict[int, Link] = {}
        self._loopback: set[Link] = set()
        self._dialling: dict[int, int] = {}
        self._sequence = itertools.count(1)
        self._listener: Listener | None = None
        self._rendezvous = SameHostListener(exports, socket_dir)
        self._beats = 0
        self._last_tick = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

    # --- start and stop: init and finalize -------------------------------------------------------------------------

    def start(self, listening: socket.socket | None) -> None:
        """Begin to beat, to meet, and, with a bound socket, to listen."""
        self._control.call(self._start, listening)

    def _start(self, listening: socket.socket | None) -> None:
        self._rendezvous.start(self._control.loop)
        if listening is not None:
            self._listener = Listener(self._control, listening, self._identity, self._exports, self._rendezvous, self)
        self._last_tick = time.monotonic()
        self._timer = self._control.loop.call_later(_BEAT_SECONDS, self._tick)

    def stop(self, reason: str) -> None:
        """End every link without a word to the peers (API §3.2), then the listener and the rendezvous."""
        with self._lock:
            self._closing = True
            links = [*self._links.values(), *self._loopback]
        for link in links:
            link.begin_unlink()
            self._end(link, reason, lost=False)
        self._control.call(self._stop)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._rendezvous.close()

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
        link = self._links.get(cluster_id)
        if link is None or not link.usable:
            raise NotLinked(
                f"cluster {cluster_id} is not linked; link_clusters makes the link, from either side", peer=cluster_id
            )
        return link

    def all(self) -> list[Link]:
        """Return every link."""
        with self._lock:
            return [*self._links.values(), *self._loopback]

    def statistics(self) -> tuple[LinkStatistics, ...]:
        """Return one value per link."""
        return tuple(link.statistics() for link in self.all())

    # --- linking: a caller's thread --------------------------------------------------------------------------------

    def link(self, wanted: int | None, address: tuple[str, int], deadline: Deadline) -> None:
        """Link to the listener at ``address``; ``wanted`` None learns its cluster id (R28).

        Raises:
            AlreadyLinked: There is a live link to that cluster.
            DeadlineExceeded: Not done in time.
            LinkRefused: Unreachable or refused, with the reason.
        """
        if wanted is not None:
            self._refuse_if_linked(wanted)
            with self._lock:
                self._dialling[wanted] = self._dialling.get(wanted, 0) + 1
        try:
            dialled = dial(address, wanted, next(self._sequence), self._identity, self._exports, deadline)
            self._install_dialled(dialled, deadline)
        except LinkRefused as error:
            crossed = error.status_code is LLMStatusCode.LLM_LINK_BUSY
            if not (crossed and wanted is not None and self._wait_linked(wanted, deadline)):
                raise
        finally:
            if wanted is not None:
                with self._lock:
                    self._dialling[wanted] -= 1
                    if not self._dialling[wanted]:
                        del self._dialling[wanted]

    def _refuse_if_linked(self, cluster_id: int) -> None:
        link = self._links.get(cluster_id)
        if link is not None and link.usable:
            raise AlreadyLinked(f"already linked to {link.peer}", peer=cluster_id)

    def _wait_linked(self, cluster_id: int, deadline: Deadline) -> bool:
        """Two dials at once and the peer's won: wait until it is through."""

        def linked() -> bool:
            link = self._links.get(cluster_id)
            return link is not None and link.usable

        with self._lock:
            return self._changed.wait_for(linked, deadline.remaining())

    def _install_dialled(self, dialled: Dialled, deadline: Deadline) -> None:
        welcome = dialled.welcome
        peer = Peer(welcome.cluster_id, welcome.incarnation, welcome.pid, welcome.host)
        link = Link(
            peer, dialled.connection, dialled.choice, sequence=next(self._sequence), dialled=True, loopback=False
        )
        channel = self._channel(link, dialled.sock, dialled.leftover)
        link.ready(channel)
        with self._lock:
            old = self._links.get(peer.cluster_id)
            keep_old = old is not None and old.usable and not self._dial_wins(old)
            if not keep_old and not self._closing:
                self._links[peer.cluster_id] = link
                self._changed.notify_all()
        if keep_old or self._closing:
            self._discard(link)
            if keep_old and old is not None and not old.dialled and old.peer.incarnation == peer.incarnation:
                return  # both ends dialled at once: the peer's link is the one that stays
            raise AlreadyLinked(f"already linked to {peer}", peer=peer.cluster_id)
        if old is not None:
            self._end(old, "replaced by a newer link", lost=True)
        opened = asyncio.run_coroutine_threadsafe(channel.open(), self._control.loop)
        opened.result(max(deadline.remaining(), 1.0))
        logger.info("linked to %s over %s: %s", peer, dialled.choice.name, dialled.choice.reason)

    def _dial_wins(self, old: Link) -> bool:
        """Of two links made at once the one dialled by the smaller incarnation stays (ARCHITECTURE rule 8)."""
        return not old.dialled and self._identity.incarnation < old.peer.incarnation

    def _discard(self, link: Link) -> None:
        link.begin_unlink()
        link.end("not needed", lost=False)

    def _channel(self, link: Link, sock: socket.socket, leftover: bytes) -> Channel:
        sock.setblocking(False)
        return Channel(
            self._control,
            sock,
            lambda message: self._dispatch(link, message),
            lambda reason: self._end(link, reason, lost=True),
            leftover,
        )

    # --- being linked: the control thread (see listener.Host) ------------------------------------------------------

    async def admit(self, hello: Hello) -> None:
        """Decide whether the stranger may be linked, given who is linked already (rule 8)."""
        if self._closing:
            raise LinkRefused("this end is being finalised", status_code=LLMStatusCode.LLM_LINK_FAILED)
        mine = self._identity.incarnation
        with self._lock:
            crossing = hello.cluster_id in self._dialling
        if crossing and mine < hello.incarnation:
            raise LinkRefused(
                "both ends dialled at once; the call of the other end goes on", status_code=LLMStatusCode.LLM_LINK_BUSY
            )
        give_up = self._control.loop.time() + _BEAT_SECONDS
        while (old := self._rival(hello)) is not None:
            if self._control.loop.time() >= give_up:
                raise LinkRefused(
                    f"cluster {hello.cluster_id} is linked to {old.peer}; a second one (pid {hello.pid} on "
                    f"{hello.host}) must have another cluster id",
                    status_code=LLMStatusCode.LLM_ALREADY_LINK,
                )
            # A restarted peer may dial before the end of its old connection has been read: give that one beat.
            await asyncio.sleep(_BEAT_SECONDS / 20)

    def _rival(self, hello: Hello) -> Link | None:
        """Return the live link of another process under the same cluster id."""
        if hello.incarnation == self._identity.incarnation:
            return None
        old = self._links.get(hello.cluster_id)
        same = old is None or not old.usable or old.peer.incarnation == hello.incarnation
        return None if same else old

    def install(
        self, hello: Hello, connection: Connection, choice: Choice, sock: socket.socket, leftover: bytes
    ) -> None:
        """Make the link of a stranger usable; a link of the same incarnation is replaced."""
        if self._closing:
            raise StateError("this end is being finalised")
        peer = Peer(hello.cluster_id, hello.incarnation, hello.pid, hello.host)
        loopback = hello.incarnation == self._identity.incarnation
        link = Link(peer, connection, choice, sequence=hello.sequence, dialled=False, loopback=loopback)
        channel = self._channel(link, sock, leftover)
        link.ready(channel)
        old: Link | None = None
        with self._lock:
            if loopback:
                self._loopback.add(link)
            else:
                old = self._links.get(peer.cluster_id)
                self._links[peer.cluster_id] = link
            self._changed.notify_all()
        if old is not None:
            self._end(old, "replaced by a newer link", lost=True)
        self._control.spawn(channel.open())
        logger.info("linked by %s over %s: %s", peer, choice.name, choice.reason)

    # --- unlinking: a caller's thread ------------------------------------------------------------------------------

    def unlink(self, cluster_id: int, deadline: Deadline, *, force: bool) -> None:
        """Give up the link to a cluster; no link is success.

        Forced: this side only, without a word. Otherwise: let what runs finish, tell the peer, wait for its answer.

        Raises:
            DeadlineExceeded: Operations still ran, or the peer did not answer; the link is kept (API §3.4).
        """
        link = self._links.get(cluster_id)
        if link is None or not link.begin_unlink():
            return
        if not force and not self._part(link, deadline):
            return
        self._end(link, "unlinked", lost=False)

    def _part(self, link: Link, deadline: Deadline) -> bool:
        """Part in agreement; False when the link broke meanwhile, which is as good."""
        what = f"unlink of {link.peer}"
        if not link.wait_idle(deadline):
            link.resume()
            raise deadline.error(what, "drain", link.peer.cluster_id)
        try:
            link.request(Goodbye, deadline, what, "unlink")
        except DeadlineExceeded:
            link.resume()
            raise
        except LLMException:
            return self._links.get(link.peer.cluster_id) is link
        return True

    # --- the control thread ----------------------------------------------------------------------------------------

    def _dispatch(self, link: Link, message: Message) -> None:
        link.heard()
        if isinstance(message, Beat):
            return
        if isinstance(message, Resolved | Failed | Farewell) and link.answer(message.id, message):
            return
        if isinstance(message, Failed | Farewell):
            return  # late: its caller has given up
        if isinstance(message, Goodbye):
            self._on_goodbye(link, message)
            return
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"{type(message).__name__} has no place on a link that is up")
        handler(link, message)

    def _on_goodbye(self, link: Link, message: Goodbye) -> None:
        link.begin_unlink()

        def farewell() -> None:
            try:
                link.send(Farewell(message.id))
            except LLMException as error:
                logger.info("farewell to %s not sent: %s", link.peer, error)
            self._end(link, "the peer unlinked", lost=False)

        link.when_idle(farewell)

    def _end(self, link: Link, reason: str, *, lost: bool) -> None:
        """A link is over. Any thread; the first reason counts."""
        with self._lock:
            if self._links.get(link.peer.cluster_id) is link:
                del self._links[link.peer.cluster_id]
            self._loopback.discard(link)
            self._changed.notify_all()
        expected = link.state is LinkState.DRAINING
        if link.end(reason, lost=lost):
            log = logger.info if expected or not lost else logger.warning
            log("link to %s ended: %s", link.peer, reason)
            self._on_end(link)

    def _tick(self) -> None:
        """Every beat: tell every peer we are alive, see who has fallen silent, let pins expire."""
        now = time.monotonic()
        # If this process itself was stopped or deaf, the silence was ours: every bound moves by as much.
        overslept = max(0.0, now - self._last_tick - 2 * _BEAT_SECONDS)
        self._last_tick = now
        self._beats += 1
        for link in self.all():
            link.last_heard += overslept
            self._beat(link, now - link.last_heard)
        self._on_tick(now)
        self._timer = self._control.loop.call_later(_BEAT_SECONDS, self._tick)

    def _beat(self, link: Link, silence: float) -> None:
        try:
            link.send(Beat(self._beats))
        except LLMException:
            return  # the channel's end is on its way
        if silence > self._peer_timeout:
            self._end(link, f"silent for {silence:.1f} s", lost=True)
        elif silence > _SUSPECT_SECONDS and link.silent():
            logger.warning("%s has been silent for %.1f s", link.peer, silence)
