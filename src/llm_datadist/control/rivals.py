"""Rivals: links that stand in the way of another one, and whether their peers still live (rule 8, R22).

A link may outlive its peer for as long as nobody has read its end. Whoever is about to be refused because of it asks
first; a peer that lives answers at once.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from llm_datadist.errors import AlreadyLinked

if TYPE_CHECKING:
    from llm_datadist.control.beats import End
    from llm_datadist.control.link import Link, Peer
    from llm_datadist.control.table import LinkTable
    from llm_datadist.deadline import Deadline

__all__ = ["Rivals"]

#: A link has so long to show that its peer lives.
_ANSWER_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.01


class Rivals:
    """Asks the peers of links that are in the way, and ends the links of those who do not answer.

    Args:
        table: Where the links are; touched whenever one has answered.
        end: Ends one.
    """

    def __init__(self, table: LinkTable, end: End) -> None:
        self._table = table
        self._end = end

    # --- callers' threads ------------------------------------------------------------------------------------------

    def answers(self, link: Link, deadline: Deadline) -> bool:
        """Return True when the peer shows in time that it lives and knows this link."""
        ping = link.ping()
        seconds = min(_ANSWER_SECONDS, deadline.remaining())
        self._table.wait(lambda: link.last_pong >= ping or not link.usable, seconds)
        return link.usable and link.last_pong >= ping

    def replace(self, peer: Peer, deadline: Deadline) -> None:
        """``peer`` has answered a dial: end the link to an earlier process of its cluster, unless that one answers."""
        old = self._table.rival(peer)
        if old is not None and not self.answers(old, deadline):
            self.lose(old, f"silent while {peer} took its place", deadline)

    def lose(self, link: Link, reason: str, deadline: Deadline) -> None:
        """End a link whose peer did not answer, unless somebody else is doing that.

        Raises:
            DeadlineExceeded: It had less time to answer than it may take.
        """
        deadline.check(f"link to {link.peer}", "link", link.peer.cluster_id)
        if link.usable:
            self._end(link, reason, lost=True)

    # --- the control thread ----------------------------------------------------------------------------------------

    async def give_way(self, peer: Peer) -> None:
        """``peer`` dials this end: return once no link to another process of its cluster is in the way.

        Raises:
            AlreadyLinked: That process lives.
        """
        old = self._table.rival(peer)
        if old is None:
            return
        ping = old.ping()
        give_up = time.monotonic() + _ANSWER_SECONDS
        # A restarted peer may dial before the end of its old connection has been read.
        while self._table.rival(peer) is old and time.monotonic() < give_up:
            if old.last_pong >= ping:
                raise AlreadyLinked(f"cluster {peer.cluster_id} is {old.peer}; {peer} must have another cluster id")
            await asyncio.sleep(_POLL_SECONDS)
        if self._table.rival(peer) is old:
            self._end(old, f"silent while {peer} took its place", lost=True)
