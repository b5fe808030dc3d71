"""Heartbeats, and the end of links whose peers are silent or gone. No thread of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llm_datadist._links.messages import Beat
from llm_datadist._log import links_logger as logger
from llm_datadist.errors import LLMException

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from llm_datadist._links.link import Link
    from llm_datadist._links.loop import ControlLoop
    from llm_datadist._links.renewal import Renewal

_BEAT_SECONDS: Final = 1.0
_SUSPECT_SECONDS: Final = 3.0
#: Beats in ``llm.PeerTimeout``, at least.
_BEATS_PER_TIMEOUT: Final = 4


@dataclass(eq=False)
class Heartbeat:
    """One timer for all links, which also ends links of silent peers. Threads: control."""

    _control: ControlLoop
    _links: Callable[[], list[Link]]
    _lose: Callable[[Link, str, str], None]  # ends a link; the timeouts follow
    _peer_timeout: float
    _max_link_age: float | None  # seconds until peers of encrypted links must authenticate themselves again
    _on_tick: Callable[[float], None]  # at every beat, with the monotonic time
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
        # First, so that no error stops the heartbeat.
        self._timer = self._control.loop.call_later(self._period, self._tick)
        now = time.monotonic()
        # A stopped process hears nothing: bounds of silence and renewal move.
        overslept = max(0.0, now - self._last_tick - 2 * self._period)
        self._last_tick = now
        self.count += 1
        for link in self._links():
            link.oversleep(overslept)
            try:
                if link.channel is not None:
                    link.channel.handle_late()
                self._beat(link, now)
            except LLMException as error:
                logger.info("no beat to %s: %s", link.peer, error)  # the channel is ending
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
            link.send(Beat(self.count, *link.moved_alone()))
            if silence > 2 * self._period:
                link.ping()  # the peer's heartbeat may be slower
            if link.renewal is not None and self._max_link_age is not None:
                self.renew(link, link.renewal, self._max_link_age, now)

    def renew(self, link: Link, renewal: Renewal, max_age: float, now: float) -> None:
        """Ask the peer of an old link to authenticate itself again; end the link if it does not."""
        if renewal.asked is None and now - renewal.last >= max_age:
            link.send(renewal.ask(now))
        elif renewal.asked is not None and now - renewal.asked > self._peer_timeout:
            self._lose(link, f"not authenticated again within {self._peer_timeout} s", "unauthenticated")
