"""The life of a link as a transition table (ARCHITECTURE §5). No I/O; used under the link's lock.

CLOSED -connect-> CONNECTING -hello-> HANDSHAKE -ready-> READY -unlink-> DRAINING -idle-> CLOSED; READY <-> SUSPECT;
anything -lost-> BROKEN -cleanup-> CLOSED.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final

from llm_datadist.errors import StateError

__all__ = ["TRANSITIONS", "USABLE", "LinkEvent", "LinkMachine", "LinkState"]


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
