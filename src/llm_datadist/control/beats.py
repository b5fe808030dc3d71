"""Beats: telling every peer that this process lives, and finding out which peers do not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

from llm_datadist.control.messages import Beat
from llm_datadist.deadline import Deadline
from llm_datadist.errors import LLMException
from llm_datadist.log import logger

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from llm_datadist.control.link import Link
    from llm_datadist.control.loop import ControlLoop

__all__ = ["Beats", "survives"]

_BEAT_SECONDS: Final = 1.0
_SUSPECT_SECONDS: Final = 3.0
#: With a small ``llm.PeerTimeout`` this end beats, looks and asks more often, whatever the peer's own setting is.
_BEATS_PER_TIMEOUT: Final = 4
#: A peer whose data connection broke is given so long to show that the link is not at its end.
_SURVIVAL_MS: Final = 1000
_SURVIVAL_POLL_SECONDS: Final = 0.002


class End(Protocol):
    """Ends a link."""

    def __call__(self, link: Link, reason: str, *, lost: bool) -> None: ...


class Beats:
    """The heart of one LLMDataDist: one timer for all links. Made anywhere, used on the control thread.

    Args:
        links: Returns every link.
        end: Ends one.
        on_tick: Called every beat with the monotonic time.
        peer_timeout: Seconds of silence after which a peer counts as dead.
    """

    def __init__(
        self,
        control: ControlLoop,
        links: Callable[[], list[Link]],
        end: End,
        on_tick: Callable[[float], None],
        peer_timeout: float,
    ) -> None:
        self._control = control
        self._links = links
        self._end = end
        self._on_tick = on_tick
        self._peer_timeout = peer_timeout
        self._period = min(_BEAT_SECONDS, peer_timeout / _BEATS_PER_TIMEOUT)
        self._count = 0
        self._last_tick = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to beat."""
        self._last_tick = time.monotonic()
        self._timer = self._control.loop.call_later(self._period, self._tick)

    def stop(self) -> None:
        """Beat no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        # First of all, so that nothing that goes wrong below stops the heart.
        self._timer = self._control.loop.call_later(self._period, self._tick)
        now = time.monotonic()
        # If this process itself was stopped or deaf, the silence was ours: every bound moves by as much.
        overslept = max(0.0, now - self._last_tick - 2 * self._period)
        self._last_tick = now
        self._count += 1
        for link in self._links():
            link.last_heard += overslept
            try:
                self._beat(link, now - link.last_heard)
            except LLMException as error:
                logger.info("no beat to %s: %s", link.peer, error)  # the end of the channel is on its way
        self._on_tick(now)

    def _beat(self, link: Link, silence: float) -> None:
        if link.connection.peer_ended():
            self._end(link, "its process has ended", lost=True)
        elif silence > self._peer_timeout:
            self._end(link, f"silent for {silence:.1f} s", lost=True)
        else:
            if silence > _SUSPECT_SECONDS and link.silent():
                logger.warning("%s has been silent for %.1f s", link.peer, silence)
            link.send(Beat(self._count))
            if silence > 2 * self._period:
                link.ping()  # it may beat at its own, slower pace


def survives(link: Link, deadline: Deadline) -> bool:
    """Return True when the peer answers after a transfer broke; False when the link ends, or time does, first.

    Waits in a caller's thread.
    """
    number = link.ping()
    give_up = Deadline(min(_SURVIVAL_MS, deadline.remaining_ms()))
    while link.last_pong < number:
        if link.ended or give_up.expired():
            return False
        time.sleep(_SURVIVAL_POLL_SECONDS)
    return not link.ended
