"""LinkTable: which links there are, and which one stays when two compete. No I/O; one lock; any thread.

Both ends of a pair may dial at once, from several threads, while links end. A dial is *committed* before its
TransportChoice is sent, a link of the peer is *admitted* before its Linked is sent, each under the conditions that
docs/protocol.md ("Two dials at once") states: so the outcome is the same at both ends.
"""

from __future__ import annotations

import threading
import time
from copy import copy
from typing import TYPE_CHECKING, Final, TypeVar

from llm_datadist._log import named
from llm_datadist.errors import AlreadyLinked, LinkRefused, LLMException, LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link, Peer

#: Clusters of which something is remembered while they are not linked.
_MAX_REMEMBERED: Final = 4096

V = TypeVar("V")


class LinkTable:
    """Links by the peer's cluster id, committed dials, and the numbers that order both."""

    def __init__(self, incarnation: bytes, max_links: int = 1024) -> None:
        self._mine = incarnation
        self._max_links = max_links
        self._changed = threading.Condition(threading.Lock())
        self._links: dict[int, Link] = {}
        #: The accepted ends of links to this process itself; the dialled ends are in the table like any other.
        self._loopback: set[Link] = set()
        self._dialling: set[bytes] = set()
        #: Clusters that this end has unlinked, the oldest first: they may not reconnect.
        self._unlinked: dict[int, None] = {}
        #: What became last of a link, when, and why.
        self._past: dict[int, tuple[str, float, LLMException | str]] = {}
        self._sequence = 0
        self._closed = False

    def get(self, cluster_id: int) -> Link | None:
        return self._links.get(cluster_id)

    def all(self) -> list[Link]:
        with self._changed:
            return self.snapshot()

    def snapshot(self) -> list[Link]:
        """Return every link; without the lock, which a forked child may find held."""
        return [*self._links.values(), *self._loopback]

    def dials(self) -> list[str]:
        """Return the committed dials, which will be links unless the peer refuses."""
        with self._changed:
            return [f"the link that is being made to incarnation {each.hex()[:8]}" for each in self._dialling]

    def now(self) -> int:
        return self._sequence

    def close(self) -> list[Link]:
        """Refuse further links; return those there are."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self.snapshot()

    def commit(self, peer: Peer, deadline: Deadline) -> int | Link:
        """Commit a dial to ``peer``, or return the usable link that exists by now. :meth:`withdraw` must follow.

        Waits while another dial or an unlink goes on. Raises AlreadyLinked when the cluster id is linked to another
        process, DeadlineExceeded, and LinkRefused once the table is closed.
        """
        committed: int | Link | None = None

        def try_commit() -> bool:
            nonlocal committed
            self._refuse_if_closed()
            old = self._links.get(peer.cluster_id)
            if old is None and peer.incarnation not in self._dialling:
                self._dialling.add(peer.incarnation)
                committed = self._next()
            elif old is not None and old.usable:
                if old.peer.incarnation != peer.incarnation:
                    raise AlreadyLinked(
                        f"cluster {peer.cluster_id} is linked to {old.peer}; {peer} must have another cluster id",
                        peer=peer.cluster_id,
                    )
                committed = old
            return committed is not None

        deadline.wait_for(self._changed, try_commit)
        if committed is None:
            raise deadline.error(f"link to {peer}: another call links or unlinks it", "link", peer.cluster_id)
        return committed

    def withdraw(self, peer: Peer) -> None:
        with self._changed:
            self._dialling.discard(peer.incarnation)
            self._changed.notify_all()

    def install(self, link: Link) -> Link | None:
        """Put in a committed dial's link; return one that the caller must end.

        Raises LinkRefused once closed, AlreadyLinked for a reconnect if another process has got its cluster id.
        """
        with self._changed:
            self._refuse_if_closed()
            if link.origin.reconnected:
                self._refuse_conflict(link.peer)
            old = self._links.get(link.peer.cluster_id)
            self._links[link.peer.cluster_id] = link
            self._unlinked.pop(link.peer.cluster_id, None)
            self._changed.notify_all()
            return old

    def conflict(self, peer: Peer, *, proven: bool = True) -> Link | None:
        """Return the link to another process under the same cluster id; to any, if the peer is not ``proven``."""
        old = self._links.get(peer.cluster_id)
        return None if old is None or old.ended or (proven and old.peer.incarnation == peer.incarnation) else old

    def _refuse_conflict(self, peer: Peer) -> None:
        if (other := self.conflict(peer)) is not None:
            raise AlreadyLinked(f"cluster {peer.cluster_id} is linked to {other.peer}")

    def refuse_if_full(self, cluster_id: int, source: str) -> None:
        """Raise LinkRefused if one more link that a peer at the address ``source`` makes would be one too many.

        A link that replaces another one is never too many.
        """
        if cluster_id in self._links:
            return
        sources = [each.origin.source for each in self.snapshot() if not each.origin.dialled]
        for number, most, where in (
            (len(sources), self._max_links, "all"),
            (sources.count(source), max(1, self._max_links // 2), source),
        ):
            if number >= most:
                raise LinkRefused(f"there are {number} links from {where} already (llm.MaxLinks={self._max_links})")

    def admit(self, link: Link) -> Link | None:
        """Put in and number a link that the peer dialled; return one to end.

        Raises AlreadyLinked when the cluster id belongs to another process. Raises LinkRefused once closed, with
        ``LLM_LINK_BUSY`` when a dial of this end goes on instead or the peer's is stale, and with ``LLM_NOT_YET_LINK``
        when the peer reconnects what this end has unlinked.
        """
        peer = link.peer
        with self._changed:
            self._refuse_if_closed()
            self.refuse_if_full(peer.cluster_id, link.origin.source)
            link.origin.sequence = self._next()
            if peer.incarnation == self._mine:
                self._loopback.add(link)
                return None
            old = self._links.get(peer.cluster_id)
            self._refuse_conflict(peer)
            if link.origin.reconnected and peer.cluster_id in self._unlinked:
                raise LinkRefused(
                    f"cluster {peer.cluster_id} was unlinked here; link_clusters of either end links it again",
                    status_code=LLMStatusCode.LLM_NOT_YET_LINK,
                )
            dials_here = peer.incarnation in self._dialling and self._mine < peer.incarnation
            if dials_here or (old is not None and link.origin.peer_sequence < old.origin.peer_sequence):
                raise LinkRefused(
                    "both ends dialled at once; the call of the other end goes on",
                    status_code=LLMStatusCode.LLM_LINK_BUSY,
                )
            self._links[peer.cluster_id] = link
            self._unlinked.pop(peer.cluster_id, None)
            return old

    def refuse_reconnects(self, cluster_id: int) -> None:
        """Admit no reconnect of an unlinked cluster until a call links it again."""
        with self._changed:
            _remember(self._unlinked, cluster_id, None)

    def note(self, cluster_id: int, what: str, why: LLMException | str) -> None:
        """Remember what has become of the link to a cluster, for :meth:`past`."""
        with self._changed:  # a copy, because an exception keeps frames, and what they have in hand
            _remember(self._past, cluster_id, (what, time.monotonic(), copy(why)))

    def past(self, cluster_id: int) -> tuple[str, LLMException | None]:
        """Return what was noted last, as the end of an error text, with the exception if it was one."""
        what, when, why = self._past.get(cluster_id, ("", 0.0, ""))
        error, ago = why if isinstance(why, LLMException) else None, time.monotonic() - when
        return f"; {what} {ago:.1f} s ago: {named(error) if error else why}" if what else "", error

    def remove(self, link: Link) -> None:
        with self._changed:
            if self._links.get(link.peer.cluster_id) is link:
                del self._links[link.peer.cluster_id]
            self._loopback.discard(link)
            self._changed.notify_all()

    def touch(self) -> None:
        """Wake the callers of :meth:`wait`: a link has changed."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        return deadline.wait_for(self._changed, condition)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise LinkRefused("this end is being finalised")

    def check_integrity(self) -> None:
        with self._changed:
            for cluster_id, link in self._links.items():
                if link.peer.cluster_id != cluster_id:
                    raise AssertionError(f"{link!r} is filed under cluster {cluster_id}")
            for link in self._loopback:
                if link.peer.incarnation != self._mine:
                    raise AssertionError(f"{link!r} is filed as a link to ourselves")


def _remember(table: dict[int, V], cluster_id: int, value: V) -> None:
    """Note something of a cluster, at the expense of the oldest note."""
    table.pop(cluster_id, None)
    table[cluster_id] = value
    if len(table) > _MAX_REMEMBERED:
        del table[next(iter(table))]
