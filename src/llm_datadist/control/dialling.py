"""How this end dials: for ``link_clusters``, again after a loss, and for a communicator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist.control.handshake import Dial
from llm_datadist.control.link import Link
from llm_datadist.errors import DeadlineExceeded, LinkRefused, LLMStatusCode
from llm_datadist.log import logger

if TYPE_CHECKING:
    import socket

    from llm_datadist.control.approach import Approach
    from llm_datadist.control.channel import Channel
    from llm_datadist.control.handshake import Identity
    from llm_datadist.control.messages import Message
    from llm_datadist.control.redial import Redial, Redialler
    from llm_datadist.control.rivals import Rivals
    from llm_datadist.control.table import LinkTable
    from llm_datadist.deadline import Deadline
    from llm_datadist.transport.base import Exports
    from llm_datadist.transport.lanes import Lanes

__all__ = ["Dialling"]

#: When both ends dialled at once, the one that gave way looks that often for the other's link.
_CROSSING_POLL_SECONDS: Final = 0.05


class Dialling:
    """The initiator's half of :class:`~llm_datadist.control.links.LinkManager`. Callers' threads, and who redials."""

    _identity: Identity
    _exports: Exports
    _lanes: Lanes
    _table: LinkTable
    _rivals: Rivals
    _redialler: Redialler

    def _usable(self, cluster_id: int | None) -> Link | None:
        raise NotImplementedError

    def _channel(self, link: Link, sock: socket.socket, first: Message | None = None) -> Channel:
        raise NotImplementedError

    def _await_answer(self, link: Link, old: Link | None) -> None:
        raise NotImplementedError

    def _end(self, link: Link, reason: str, *, lost: bool) -> None:
        raise NotImplementedError

    def link(self, wanted: int | None, address: tuple[str, int], deadline: Deadline, *, mutual: bool = False) -> None:
        """Link to the listener at ``address``; ``wanted`` None learns its cluster id (R28).

        When the peer dials this end meanwhile, one link is made and both calls succeed; so does the first call after
        a loss that a redial has already mended.

        Args:
            mutual: Both ends link explicitly (transfer backend hixl): a link that the peer made is no obstacle to
                this end's first call.

        Raises:
            AlreadyLinked: There is a live link to that cluster.
            DeadlineExceeded: Not done in time.
            LinkRefused: Unreachable or refused, with the reason.
        """
        since = self._table.now()
        silent = self._usable(wanted)
        if silent is not None and self._rivals.answers(silent, deadline):
            _claim(silent, since, address, mutual=mutual)
            return
        try:
            present = self._dial_until_linked(wanted, address, deadline, since)
        except (DeadlineExceeded, LinkRefused):
            if silent is not None and silent.usable:
                raise silent.already() from None  # whoever cannot be reached twice is still linked
            raise
        if present is not None:
            _claim(present, since, address, mutual=mutual)

    def _dial_until_linked(
        self, wanted: int | None, address: tuple[str, int], deadline: Deadline, since: int
    ) -> Link | None:
        """Make a link; return the one that there is already, when it was there first and its peer knows it."""
        while True:
            try:
                present = self._dial(wanted, address, deadline)
            except LinkRefused as error:
                if error.status_code is not LLMStatusCode.LLM_LINK_BUSY:
                    raise
                # Both ends dialled at once, and this one gives way: has the other come through? Else try again.
                if not self._table.wait(lambda: self._is_new(wanted, since), _CROSSING_POLL_SECONDS):
                    deadline.check(f"link to {address[0]}:{address[1]}: both ends dial", "link", wanted)
                continue
            if present is None or self._rivals.answers(present, deadline):
                return present
            # The process lives, it has just answered, but it knows nothing of this link any more.
            self._rivals.lose(present, "its peer answers new dials only", deadline)

    def _is_new(self, cluster_id: int | None, since: int) -> bool:
        link = self._usable(cluster_id)
        return link is not None and link.sequence > since

    def _dial(
        self, wanted: int | None, address: tuple[str, int], deadline: Deadline, again: Redial | None = None
    ) -> Link | None:
        """Make one link; return the one that there is already, when it was there first."""
        incarnation = None if again is None else again.peer.incarnation
        with Dial(address, self._identity, self._exports, self._lanes, deadline, again=incarnation) as dial:
            if again is not None:
                again.begin(dial)
            dial.greet(wanted)
            self._rivals.replace(dial.peer, deadline)
            number = self._table.commit(dial.peer, deadline)
            if isinstance(number, Link):
                return number
            try:
                self._install_dialled(dial, number, dial.settle(number), again)
            finally:
                self._table.withdraw(dial.peer)
        return None

    def _dial_again(self, again: Redial, deadline: Deadline) -> None:
        """One attempt of the redialler, on its thread."""
        self._dial(None, again.address, deadline, again)
        link = self._table.get(again.peer.cluster_id)
        if again.cancelled and link is not None and link.redialled:
            self._end(link, "unlinked", lost=False)

    def _install_dialled(self, dial: Dial, number: int, peer_number: int, again: Redial | None) -> None:
        link = Link(dial.peer, dial.connection, dial.choice, dialled=True, sequence=number, peer_sequence=peer_number)
        link.redialled = again is not None
        link.asked_for = again is None and not dial.by_table
        if dial.by_table:
            # Where the peer listened until now there will soon be nobody: it is not dialled again.
            link.by_table, link.open = True, False
        else:
            link.address = dial.address
        sock, leftover = dial.take()
        link.ready(channel := self._channel(link, sock))
        try:
            old = self._table.install(link)
        except LinkRefused:
            link.end("finalized", lost=False)
            raise
        link.connection.begin(link)
        channel.begin(leftover)
        self._redialler.linked(link.peer.cluster_id)
        self._await_answer(link, old)
        if old is not None:
            self._end(old, "replaced by a newer link", lost=True)
        logger.info("linked to %s over %s: %s", link.peer, link.choice.name, link.choice.reason)

    # --- for a communicator: a thread of Approaches ----------------------------------------------------------------

    def meet(self, approach: Approach, deadline: Deadline) -> None:
        """One attempt to find a member of a communicator; a link to it that is there already will do.

        Raises:
            LinkRefused: Not there; with ``LLM_PARAM_INVALID`` when another attempt would be refused as well.
            DeadlineExceeded: Not done in time.
        """
        meeting = approach.communicator.meeting
        with Dial(approach.address, self._identity, self._exports, self._lanes, deadline, meeting=meeting) as dial:
            approach.begin(dial)
            dial.greet(approach.cluster_id)
            self._rivals.replace(dial.peer, deadline)
            number = self._table.commit(dial.peer, deadline)
            if isinstance(number, Link):
                self._recognise(dial, number, deadline)
                return
            try:
                self._install_dialled(dial, number, dial.settle(number), None)
            finally:
                self._table.withdraw(dial.peer)

    def _recognise(self, dial: Dial, present: Link, deadline: Deadline) -> None:
        """Agree with the peer that the link which is there is the one that is meant."""
        try:
            dial.settle(present.sequence, present=True)
        except LinkRefused:
            if not self._rivals.answers(present, deadline):
                self._rivals.lose(present, "its peer knows nothing of it", deadline)
            raise


def _claim(link: Link, since: int, address: tuple[str, int], *, mutual: bool) -> None:
    """``link_clusters`` found this link: see :meth:`Link.claim`."""
    link.claim(since, mutual=mutual)
    if link.by_table:
        link.address = address  # from now on it is known where to dial, should it be lost
