"""The state of one communicator: which clusters ``link()`` wants linked, which are missing, and the outcome. No I/O."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_datadist._links.messages import CommunicatorId
from llm_datadist.metrics import CommunicatorStatistics
from llm_datadist.types.enums import RegisterMemStatus

if TYPE_CHECKING:
    import asyncio
    import socket

    from llm_datadist._deadline import Deadline
    from llm_datadist._links.handshake import Listener


@dataclass(frozen=True, slots=True)
class CommunicatorPlan:
    """The checked arguments of ``link()``."""

    name: str
    ranks: dict[int, int]  # cluster id -> rank, this end's own among them
    addresses: dict[int, str]  # cluster id -> address, from the rank table
    table: bytes  # digest of the rank table
    seconds: int  # link_total_time: all that the preparation may take
    attempts: int  # link_retry_count: no single attempt may take more than that part of it


class Communicator:
    """A communicator of this end. :class:`Communicators` has the lock for all but socket, listener and timer."""

    def __init__(self, comm_id: int, own: int, plan: CommunicatorPlan, deadline: Deadline) -> None:
        self.comm_id = comm_id
        self.plan = plan
        self.deadline = deadline
        self.status = RegisterMemStatus.PREPARING  # until every other member is linked; then OK or FAILED for good
        self.reason = ""  # why it failed, or what was heard last while it is preparing
        self.others = [cluster_id for cluster_id in plan.ranks if cluster_id != own]
        self.dialled = [cluster_id for cluster_id in self.others if cluster_id < own]
        self.expected = [cluster_id for cluster_id in self.others if cluster_id > own]
        self.waiting = set(self.others)  # members that are not linked yet
        token = secrets.token_bytes(16)
        self.own_id = CommunicatorId(plan.name, sorted(plan.ranks.items()), plan.table, token)
        self.ports: dict[int, list[int]] = {}  # member that this end dials -> where it may listen; set once
        self.sock: socket.socket | None = None  # until the listener has it; None where this end only dials
        # The control thread's: the listener is there while members are expected, the timer ends the preparation.
        self.listener: Listener | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._own = own
        #: Cluster id -> token of the greeting by which it joined.
        self._tokens: dict[int, bytes] = {}

    @property
    def preparing(self) -> bool:
        return self.status is RegisterMemStatus.PREPARING

    def holds(self, cluster_id: int) -> bool:
        """Return True when it needs the link to that member: it has not failed."""
        return self.status is not RegisterMemStatus.FAILED and cluster_id in self.others

    def is_for(self, theirs: CommunicatorId, cluster_id: int) -> bool:
        """Return True when that greeting of that member may be for this communicator."""
        return theirs.name == self.plan.name and cluster_id in self.expected

    def expects(self, theirs: CommunicatorId, cluster_id: int) -> bool:
        """Return True unless that member has joined by another communicator of its own."""
        return self.is_for(theirs, cluster_id) and self._tokens.get(cluster_id, theirs.token) == theirs.token

    def has_joined(self, theirs: CommunicatorId, cluster_id: int) -> bool:
        """Return True when that member has joined by that greeting."""
        return cluster_id not in self.waiting and self._tokens.get(cluster_id) == theirs.token

    def difference(self, theirs: CommunicatorId, cluster_id: int) -> str | None:
        """Return what that member's call has differently from this end's; None where the two agree."""
        mine = self.own_id
        if theirs.members != mine.members:
            return (
                f"cluster_rank_info differs: {dict(theirs.members)} at cluster {cluster_id}, "
                f"{dict(mine.members)} at cluster {self._own}"
            )
        if theirs.table != mine.table:
            return (
                f"rank_table differs: digest {theirs.table.hex()[:8]} at cluster {cluster_id}, "
                f"{mine.table.hex()[:8]} at cluster {self._own}; all members have to give the same table"
            )
        return None

    def join(self, cluster_id: int, theirs: CommunicatorId | None) -> None:
        """Count a member as linked; ``theirs`` is from its greeting, where it dialled."""
        self.waiting.discard(cluster_id)
        if theirs is not None:
            self._tokens[cluster_id] = theirs.token
        if not self.waiting:
            self.status, self.reason = RegisterMemStatus.OK, ""

    def lose(self, cluster_id: int) -> bool:
        """Wait again for a member whose link ended; return False without a link."""
        if cluster_id not in self.others or cluster_id in self.waiting:
            return False
        self.waiting.add(cluster_id)
        self._tokens.pop(cluster_id, None)
        self.reason = f"the link to cluster {cluster_id} was lost before all members had come"
        return True

    def fail(self, reason: str) -> None:
        self.status, self.reason = RegisterMemStatus.FAILED, reason

    def statistics(self) -> CommunicatorStatistics:
        return CommunicatorStatistics(
            comm_id=self.comm_id,
            name=self.plan.name,
            status=self.status.name,
            reason=self.reason,
            members=tuple(self.plan.ranks),
            waiting_for=tuple(sorted(self.waiting)),
        )

    def __str__(self) -> str:
        name = "".join(c if c.isprintable() else "?" for c in self.plan.name)
        return f"communicator {self.comm_id} {name!r}"
