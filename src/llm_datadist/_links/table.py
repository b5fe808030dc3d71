"""LinkTable: which links there are, and which one stays when two compete (rule 8). No I/O; one lock; any thread.

Both ends of a pair may dial at once, from several threads, while links end. What makes the outcome the same at both:

* a dial is *committed* (before its Met is sent) only while there is no link to that incarnation and no other dial of
  this end is committed to it; a link of the peer is *admitted* (before its Linked is sent) only while no dial of the
  smaller incarnation is committed here. Either way it is in the table of the target before the initiator can use it;
* every commit and every admission takes the next number of its end, and tells it. A dial committed before the newest
  link was admitted is stale and refused; one committed after it means that its end has lost that link: it replaces it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from llm_datadist.errors import AlreadyLinked, LinkRefused, LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link, Peer

__all__ = ["LinkTable"]

#: Unlinked clusters that are remembered.
_MAX_PARTED: Final = 4096


class LinkTable:
    """Links by the cluster id that the peer announced, dials that are committed, and the numbers that order both."""

    def __init__(self, incarnation: bytes) -> None:
        self._mine = incarnation
        self._changed = threading.Condition(threading.Lock())
        self._links: dict[int, Link] = {}
        #: The accepted ends of links to ourselves; the dialled ends are in the table like any other.
        self._loopback: set[Link] = set()
        self._dialling: set[bytes] = set()
        #: Clusters that this end has unlinked, the oldest first: they may not come back by redialling.
        self._parted: dict[int, None] = {}
        self._sequence = 0
        self._closed = False

    def get(self, cluster_id: int) -> Link | None:
        """Return the link to a cluster, usable or not."""
        return self._links.get(cluster_id)

    def all(self) -> list[Link]:
        """Return every link."""
        with self._changed:
            return self.snapshot()

    def snapshot(self) -> list[Link]:
        """Return every link, without the lock: under it, or in a forked child, where it may be held for ever."""
        return [*self._links.values(), *self._loopback]

    def dials(self) -> list[str]:
        """Return what is being dialled, and will be a link unless the peer refuses."""
        with self._changed:
            return [f"the link that is being made to incarnation {each.hex()[:8]}" for each in self._dialling]

    def now(self) -> int:
        """Return the number of the newest link so far."""
        return self._sequence

    def close(self) -> list[Link]:
        """Take no link any more; return those there are."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self.snapshot()

    # --- the initiator's side: callers' threads --------------------------------------------------------------------

    def commit(self, peer: Peer, deadline: Deadline) -> int | Link:
        """Commit a dial to ``peer``, or return the usable link to it that there is by now.

        Waits while another dial or an unlink is going on. Followed by :meth:`withdraw` in any case.

        Raises:
            AlreadyLinked: The cluster id is linked to another process.
            DeadlineExceeded: What was waited for did not end.
            LinkRefused: The table is closed.
        """
        with self._changed:
            while True:
                self._refuse_if_closed()
                old = self._links.get(peer.cluster_id)
                if old is None and peer.incarnation not in self._dialling:
                    self._dialling.add(peer.incarnation)
                    return self._next()
                if old is not None and old.usable:
                    if old.peer.incarnation == peer.incarnation:
                        return old
                    raise AlreadyLinked(
                        f"cluster {peer.cluster_id} is linked to {old.peer}; {peer} must have another cluster id",
                        peer=peer.cluster_id,
                    )
                if not self._changed.wait(deadline.remaining()):
                    raise deadline.error(f"link to {peer}: another call links or unlinks it", "link", peer.cluster_id)

    def withdraw(self, peer: Peer) -> None:
        """The committed dial is over, whichever way."""
        with self._changed:
            self._dialling.discard(peer.incarnation)
            self._changed.notify_all()

    def install(self, link: Link) -> Link | None:
        """The committed dial has succeeded: put its link in; return one that is to be ended in its place.

        Raises:
            LinkRefused: The table is closed.
        """
        with self._changed:
            self._refuse_if_closed()
            old = self._links.get(link.peer.cluster_id)
            self._links[link.peer.cluster_id] = link
            self._parted.pop(link.peer.cluster_id, None)
            self._changed.notify_all()
            return old

    # --- the target's side: the control thread ---------------------------------------------------------------------

    def rival(self, peer: Peer) -> Link | None:
        """Return the link to another process under the same cluster id."""
        old = self._links.get(peer.cluster_id)
        same = old is None or old.ended or old.peer.incarnation == peer.incarnation
        return None if same else old

    def admit(self, link: Link) -> Link | None:
        """Put in a link that the peer dialled, and number it; return one that is to be ended in its place.

        Raises:
            LinkRefused: With ``LLM_LINK_BUSY`` when a dial of this end goes on instead, or the peer's is stale; the
                cluster id belongs to another process; it redials what this end has unlinked
                (``LLM_NOT_YET_LINK``); the table is closed.
        """
        peer = link.peer
        with self._changed:
            self._refuse_if_closed()
            link.sequence = self._next()
            if peer.incarnation == self._mine:
                self._loopback.add(link)
                return None
            old = self._links.get(peer.cluster_id)
            if self.rival(peer) is not None and old is not None:
                raise AlreadyLinked(f"cluster {peer.cluster_id} is linked to {old.peer}")
            if link.redialled and peer.cluster_id in self._parted:
                raise LinkRefused(
                    f"cluster {peer.cluster_id} was unlinked here; link_clusters of either end links it again",
                    status_code=LLMStatusCode.LLM_NOT_YET_LINK,
                )
            dials_here = peer.incarnation in self._dialling and self._mine < peer.incarnation
            if dials_here or (old is not None and link.peer_sequence < old.peer_sequence):
                raise LinkRefused(
                    "both ends dialled at once; the call of the other end goes on",
                    status_code=LLMStatusCode.LLM_LINK_BUSY,
                )
            self._links[peer.cluster_id] = link
            self._parted.pop(peer.cluster_id, None)
            return old

    def part(self, cluster_id: int) -> None:
        """This end unlinks a cluster: until somebody links it explicitly, no redial of the peer is admitted."""
        with self._changed:
            self._parted.pop(cluster_id, None)
            self._parted[cluster_id] = None
            if len(self._parted) > _MAX_PARTED:
                del self._parted[next(iter(self._parted))]

    # --- both ------------------------------------------------------------------------------------------------------

    def remove(self, link: Link) -> None:
        """The link is over."""
        with self._changed:
            if self._links.get(link.peer.cluster_id) is link:
                del self._links[link.peer.cluster_id]
            self._loopback.discard(link)
            self._changed.notify_all()

    def touch(self) -> None:
        """A link has become usable: wake who waits for that."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the condition holds; looked at whenever the table changes."""
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise LinkRefused("this end is being finalised")

    def check_integrity(self) -> None:
        """Raise AssertionError when the table contradicts itself."""
        with self._changed:
            for cluster_id, link in self._links.items():
                if link.peer.cluster_id != cluster_id:
                    raise AssertionError(f"{link!r} is filed under cluster {cluster_id}")
            for link in self._loopback:
                if link.peer.incarnation != self._mine:
                    raise AssertionError(f"{link!r} is filed as a link to ourselves")

    def __repr__(self) -> str:
        return f"<LinkTable: {len(self._links)} links, {len(self._dialling)} dials, number {self._sequence}>"
