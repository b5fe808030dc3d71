"""Liveness: heartbeats, and the end of links whose peers are silent or gone. No thread of its own."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llm_datadist._links.messages import Beat
from llm_datadist._log import logger
from llm_datadist.errors import AlreadyLinked, LinkRefused, LLMException, LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link, Peer
    from llm_datadist._links.loop import ControlLoop
    from llm_datadist._links.renewal import Renewal
    from llm_datadist._links.table import LinkTable

_BEAT_SECONDS: Final = 1.0
_SUSPECT_SECONDS: Final = 3.0
#: With a small ``llm.PeerTimeout`` this end sends and checks more often, whatever the peer's own setting is.
_BEATS_PER_TIMEOUT: Final = 4
#: How long a peer may take to answer a ping when another process claims its id.
_ANSWER_MS: Final = 1000


@dataclass(eq=False)
class Heartbeat:
    """One timer for all links: sends heartbeats, and ends links whose peers are silent. Threads: the control thread."""

    _control: ControlLoop
    _links: Callable[[], list[Link]]
    _lose: Callable[[Link, str, str], None]  # called after so many seconds without what must come:
    _peer_timeout: float
    _max_link_age: float | None  # seconds after which the peer of a sealed link has to authenticate itself again
    _on_tick: Callable[[float], None]  # called at every beat with the monotonic time
    count: int = 0
    _last_tick: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._period = min(_BEAT_SECONDS, self._peer_timeout / _BEATS_PER_TIMEOUT)
        self._last_tick = time.monotonic()
        self._timer = self._control.loop.call_later(self._period, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        # First of all, so that no error below stops the heartbeat.
        self._timer = self._control.loop.call_later(self._period, self._tick)
        now = time.monotonic()
        # While this process itself was stopped it heard nothing: every bound moves by as much.
        overslept = max(0.0, now - self._last_tick - 2 * self._period)
        self._last_tick = now
        self.count += 1
        for link in self._links():
            link.oversleep(overslept)
            try:
                self._beat(link, now)
            except LLMException as error:
                logger.info("no beat to %s: %s", link.peer, error)  # the end of the channel is on its way
        self._on_tick(now)

    def _beat(self, link: Link, now: float) -> None:
        silence = now - link.last_heard
        if any(each.peer_ended() for each in link.connection.connections):
            self._lose(link, "its process has ended", "process_ended")
        elif silence > self._peer_timeout:
            self._lose(link, f"silent for {silence:.1f} s", "silent")
        else:
            if silence > _SUSPECT_SECONDS and link.silent():
                logger.warning("%s has been silent for %.1f s", link.peer, silence)
            link.send(Beat(self.count))
            if silence > 2 * self._period:
                link.ping()  # its own heartbeat may be slower
            if link.renewal is not None and self._max_link_age is not None:
                self.renew(link, link.renewal, self._max_link_age, now)

    def renew(self, link: Link, renewal: Renewal, max_age: float, now: float) -> None:
        """Ask a peer to authenticate itself again once the link is old; end the link of one that does not."""
        if renewal.asked is None and now - renewal.last >= max_age:
            link.send(renewal.ask(now))
        elif renewal.asked is not None and now - renewal.asked > self._peer_timeout:
            self._lose(link, f"not authenticated again within {self._peer_timeout} s", "unauthenticated")


class LinkConflicts:
    """Links that stand in the way of new ones: their peers must answer a ping."""

    def __init__(self, table: LinkTable, lose: Callable[[Link, str, str], None]) -> None:
        self._table = table
        self._lose = lose

    def answers(self, link: Link, deadline: Deadline) -> bool:
        """Return True when the peer answers a ping in time, and the link may be used."""
        return link.responds(deadline) and link.usable

    def replace(self, peer: Peer, deadline: Deadline) -> None:
        """End the link to another process of ``peer``'s cluster, unless that answers."""
        old = self._table.conflict(peer)
        if old is not None and not self.answers(old, deadline):
            self.lose(old, f"silent while {peer} took its place", deadline)

    def lose(self, link: Link, reason: str, deadline: Deadline) -> None:
        """End a link whose peer did not answer; raise DeadlineExceeded if it had too little time for that."""
        deadline.check(f"link to {link.peer}", "link", link.peer.cluster_id)
        if link.usable:
            self._lose(link, reason, "replaced")

    async def give_way(self, peer: Peer, *, proven: bool, reconnects: bool) -> None:
        """Return once no other process of the cluster of ``peer`` is linked.

        Raises AlreadyLinked if that lives, or if ``peer`` only ``reconnects``; LinkRefused (``LLM_LINK_BUSY``) if it
        has the incarnation of a ``peer`` that is not proven: as when both ends dial at once for the first time, whose
        one link is enough.
        """
        old = self._table.conflict(peer, proven=proven)
        if old is None:
            return
        if reconnects and old.peer.incarnation != peer.incarnation:
            raise AlreadyLinked(f"cluster {peer.cluster_id} is {old.peer} since {peer} was lost")
        ping = old.ping()
        give_up = time.monotonic() + _ANSWER_MS / 1e3
        # A restarted peer may dial before the end of its old connection has been read.
        while self._table.conflict(peer, proven=proven) is old and time.monotonic() < give_up:
            if old.last_pong >= ping:
                if old.peer.incarnation == peer.incarnation:
                    text = f"{old.peer} is linked, and this dial cannot prove that it comes from the same process"
                    raise LinkRefused(text, status_code=LLMStatusCode.LLM_LINK_BUSY)
                raise AlreadyLinked(f"cluster {peer.cluster_id} is {old.peer}; {peer} must have another cluster id")
            await asyncio.sleep(0.01)
        if self._table.conflict(peer, proven=proven) is old:
            self._lose(old, f"silent while {peer} took its place", "replaced")
