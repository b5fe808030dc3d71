"""Links of one LLMDataDist, and the one that stays when two compete. No I/O.

Both sides may dial at once. A dial is *committed* before its TransportChoice, a peer's link *admitted* before its
Linked. The rules are in docs/protocol.md ("Two dials at once"): both sides decide alike.
"""

from __future__ import annotations

import threading
import time
from copy import copy
from typing import TYPE_CHECKING, Final, TypeVar

from llm_datadist._checks import require_intact
from llm_datadist._log import named
from llm_datadist.errors import AlreadyLinked, LinkRefused, LLMException, LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link, Peer

#: Notes kept of clusters that are not linked.
_MAX_REMEMBERED: Final = 4096
_MAX_LOST: Final = 256  # each is a series of a metric

V = TypeVar("V")


class LinkTable:
    """Links by the peer's cluster id, committed dials, and the numbers that order both. Threads: any; one lock."""

    def __init__(self, incarnation: bytes, max_links: int = 1024) -> None:
        self._mine = incarnation
        self._max_links = max_links
        self._changed = threading.Condition(threading.Lock())
        self.links: dict[int, Link] = {}
        self._loopback: set[Link] = set()  # accepted sides of links to itself; the dialled ones are in ``links``
        self._dialling: set[bytes] = set()
        self._unlinked: dict[int, None] = {}  # clusters, oldest first: they may not reconnect
        self._past: dict[int, tuple[str, float, LLMException | str]] = {}  # last end or failure, its time and reason
        self.lost: dict[int, str] = {}  # kind of the loss by cluster, until it is linked again or unlinked here
        self.sequence = 0  # number of the newest dial or accepted link
        self._refused = ""  # why no link is made any more

    def get(self, cluster_id: int) -> Link | None:
        """Return the link to a cluster in any state. Takes no lock."""
        return self.links.get(cluster_id)

    def all(self) -> list[Link]:
        """Return every link, without the lock, which a forked child may find held."""
        return [*self.links.values(), *self._loopback]

    def dials(self) -> list[str]:
        with self._changed:
            return [f"the link that is being made to incarnation {each.hex()[:8]}" for each in self._dialling]

    def refuse(self, why: str) -> list[Link]:
        """Make no link any more; return those that there are."""
        with self._changed:
            self._refused = why
            self._changed.notify_all()
            return self.all()

    def commit(self, peer: Peer, deadline: Deadline) -> int | Link:
        """Commit a dial, or return a usable link that exists. :meth:`withdraw` must follow.

        Waits for another dial or unlink. Raises AlreadyLinked if another process is linked under the cluster id,
        DeadlineExceeded, and LinkRefused once closed.
        """
        committed: int | Link | None = None

        def try_commit() -> bool:
            nonlocal committed
            self.refuse_new()
            if (old := self.links.get(peer.cluster_id)) is None and peer.incarnation not in self._dialling:
                self._dialling.add(peer.incarnation)
                committed = self._next()
            elif old is not None and old.usable:
                if old.peer.incarnation != peer.incarnation:
                    text = f"cluster {peer.cluster_id} is linked to {old.peer}; {peer} must have another cluster id"
                    raise AlreadyLinked(text, peer=peer.cluster_id)
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
        """Enter a dialled link; return one that the caller must end.

        Raises LinkRefused once closed; AlreadyLinked for a reconnect if another process has its cluster id.
        """
        with self._changed:
            self.refuse_new()
            if link.origin.reconnected:
                self._refuse_conflict(link.peer)
            old = self.links.get(link.peer.cluster_id)
            self.links[link.peer.cluster_id] = link
            self._made(link.peer.cluster_id)
            self._changed.notify_all()
            return old

    def conflict(self, peer: Peer, *, proven: bool = True) -> Link | None:
        """Return the link to another process of that cluster id; to any if not ``proven``."""
        old = self.links.get(peer.cluster_id)
        return None if old is None or old.ended or (proven and old.peer.incarnation == peer.incarnation) else old

    def _refuse_conflict(self, peer: Peer) -> None:
        if (other := self.conflict(peer)) is not None:
            raise AlreadyLinked(f"cluster {peer.cluster_id} is linked to {other.peer}")

    def refuse_if_full(self, cluster_id: int, source: str) -> None:
        """Raise LinkRefused if an accepted link from ``source`` replaces none and exceeds a limit."""
        if cluster_id in self.links:
            return
        sources = [each.origin.source for each in self.all() if not each.origin.dialled]
        half = max(1, self._max_links // 2)
        for number, most, where in ((len(sources), self._max_links, "all"), (sources.count(source), half, source)):
            if number >= most:
                raise LinkRefused(f"there are {number} links from {where} already (llm.MaxLinks={self._max_links})")

    def admit(self, link: Link) -> Link | None:
        """Enter and number an accepted link; return one that the caller must end.

        Raises AlreadyLinked if another process has the cluster id. Raises LinkRefused once closed or full. The status
        is ``LLM_LINK_BUSY`` if a dial of this side goes on instead or the peer's is stale. It is ``LLM_NOT_YET_LINK``
        if the peer reconnects after this side's unlink.
        """
        peer = link.peer
        with self._changed:
            self.refuse_new(reconnected=link.origin.reconnected)
            self.refuse_if_full(peer.cluster_id, link.origin.source)
            link.origin.sequence = self._next()
            if peer.incarnation == self._mine:
                self._loopback.add(link)
                return None
            old = self.links.get(peer.cluster_id)
            self._refuse_conflict(peer)
            if link.origin.reconnected and peer.cluster_id in self._unlinked:
                text = f"cluster {peer.cluster_id} was unlinked here; link_clusters of either side links it again"
                raise LinkRefused(text, status_code=LLMStatusCode.LLM_NOT_YET_LINK)
            dials_here = peer.incarnation in self._dialling and self._mine < peer.incarnation
            if dials_here or (old is not None and link.origin.peer_sequence < old.origin.peer_sequence):
                text = "both sides dialled at once; the call of the other side goes on"
                raise LinkRefused(text, status_code=LLMStatusCode.LLM_LINK_BUSY)
            self.links[peer.cluster_id] = link
            self._made(peer.cluster_id)
            return old

    def refuse_reconnects(self, cluster_id: int) -> None:
        """Admit no reconnect of a cluster until a call links it again."""
        with self._changed:
            _remember(self._unlinked, cluster_id, None)
            self.lost.pop(cluster_id, None)

    def refuses_reconnects(self, cluster_id: int) -> bool:
        return cluster_id in self._unlinked

    def note(self, cluster_id: int, what: str, why: LLMException | str) -> None:
        """Remember the fate of a link for :meth:`past`."""
        with self._changed:  # a copy: an exception keeps frames and their objects
            _remember(self._past, cluster_id, (what, time.monotonic(), copy(why)))

    def past(self, cluster_id: int) -> tuple[str, LLMException | None]:
        """Return the last note, as the end of an error text, and its exception."""
        what, when, why = self._past.get(cluster_id, ("", 0.0, ""))
        error, ago = why if isinstance(why, LLMException) else None, time.monotonic() - when
        return f"; {what} {ago:.1f} s ago: {named(error) if error else why}" if what else "", error

    def remove(self, link: Link, lost: str = "") -> None:
        """Remove a link; ``lost`` is the kind of its loss, if it was lost."""
        with self._changed:
            if self.links.get(link.peer.cluster_id) is link:
                del self.links[link.peer.cluster_id]
                if lost:
                    _remember(self.lost, link.peer.cluster_id, lost, _MAX_LOST)
            self._loopback.discard(link)
            self._changed.notify_all()

    def touch(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        return deadline.wait_for(self._changed, condition)

    def _made(self, cluster_id: int) -> None:
        self._unlinked.pop(cluster_id, None)
        self.lost.pop(cluster_id, None)

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence

    def refuse_new(self, *, reconnected: bool = False) -> None:
        """Raise LinkRefused once :meth:`refuse` was called; a reconnect is told that it need not try again."""
        if self._refused:
            raise LinkRefused(self._refused, status_code=LLMStatusCode.LLM_NOT_YET_LINK if reconnected else None)

    def check_integrity(self) -> None:
        with self._changed:
            for cluster_id, link in self.links.items():
                require_intact(link.peer.cluster_id == cluster_id, f"{link!r} is filed under cluster {cluster_id}")
            for link in self._loopback:
                require_intact(link.peer.incarnation == self._mine, f"{link!r} is filed as a link to ourselves")


def _remember(table: dict[int, V], cluster_id: int, value: V, most: int = _MAX_REMEMBERED) -> None:
    table.pop(cluster_id, None)
    table[cluster_id] = value
    if len(table) > most:
        del table[next(iter(table))]
