"""One communicator: members to be linked, members missing, and the outcome. No I/O."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_datadist._checks import clean
from llm_datadist._links.messages import CommunicatorId
from llm_datadist.metrics import CommunicatorStatistics
from llm_datadist.types.enums import RegisterMemStatus

if TYPE_CHECKING:
    import asyncio
    import socket

    from llm_datadist._deadline import Deadline
    from llm_datadist._links.listener import Listener


@dataclass(frozen=True, slots=True)
class CommunicatorPlan:
    """Checked arguments of ``link()``."""

    name: str
    ranks: dict[int, int]  # by cluster id; includes this instance
    addresses: dict[int, str]  # by cluster id, from the rank table
    table: bytes  # digest of the rank table
    seconds: int  # link_total_time
    attempts: int  # link_retry_count: bounds an attempt to seconds / attempts, from 100 to 5000 ms


class Communicator:
    """A communicator. The lock of :class:`Communicators` guards all but socket, listener and timer."""

    def __init__(self, comm_id: int, own: int, plan: CommunicatorPlan, deadline: Deadline) -> None:
        self.comm_id = comm_id
        self.plan = plan
        self.deadline = deadline
        self.status = RegisterMemStatus.PREPARING  # then OK or FAILED, which is final
        self.reason = ""  # of FAILED; while preparing, of the last failed attempt
        self.others = [cluster_id for cluster_id in plan.ranks if cluster_id != own]
        self.expected = [cluster_id for cluster_id in self.others if cluster_id > own]
        self.waiting = set(self.others)  # members to be linked
        token = secrets.token_bytes(16)
        self.own_id = CommunicatorId(plan.name, sorted(plan.ranks.items()), plan.table, token)
        self.ports: dict[int, list[int]] = {}  # of members that this side dials; set once
        self.sock: socket.socket | None = None  # until the listener has it; None if this side only dials
        # For the control thread; the listener only if members dial.
        self.listener: Listener | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._own = own
        self._tokens: dict[int, bytes] = {}  # of the greetings by which members joined, by cluster id

    @property
    def preparing(self) -> bool:
        return self.status is RegisterMemStatus.PREPARING

    def holds(self, cluster_id: int) -> bool:
        """Return True if it needs the link to that member: it has not failed."""
        return self.status is not RegisterMemStatus.FAILED and cluster_id in self.others

    def is_for(self, theirs: CommunicatorId, cluster_id: int) -> bool:
        return theirs.name == self.plan.name and cluster_id in self.expected

    def expects(self, theirs: CommunicatorId, cluster_id: int) -> bool:
        """Return True unless that member has joined by another of its communicators."""
        return self.is_for(theirs, cluster_id) and self._tokens.get(cluster_id, theirs.token) == theirs.token

    def has_joined(self, theirs: CommunicatorId, cluster_id: int) -> bool:
        return cluster_id not in self.waiting and self._tokens.get(cluster_id) == theirs.token

    def difference(self, theirs: CommunicatorId, cluster_id: int) -> str | None:
        """Return how the member's arguments differ from these; None if they agree."""
        mine = self.own_id
        if theirs.members != mine.members:
            there = f"{dict(theirs.members)} at cluster {cluster_id}"
            return f"cluster_rank_info differs: {there}, {dict(mine.members)} at cluster {self._own}"
        if theirs.table != mine.table:
            there = f"digest {theirs.table.hex()[:8]} at cluster {cluster_id}"
            here = f"{mine.table.hex()[:8]} at cluster {self._own}"
            return f"rank_table differs: {there}, {here}; all members have to give the same table"
        return None

    def join(self, cluster_id: int, theirs: CommunicatorId | None) -> None:
        """Count a member as linked; ``theirs`` is from its greeting, if it dialled."""
        self.waiting.discard(cluster_id)
        if theirs is not None:
            self._tokens[cluster_id] = theirs.token
        if not self.waiting:
            self.status, self.reason = RegisterMemStatus.OK, ""

    def lose(self, cluster_id: int) -> bool:
        """Wait again for a member; return False if it was not linked."""
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
        name = clean(self.plan.name)
        return f"communicator {self.comm_id} {name!r}"
