"""PeerQuestion, a peer's question to a handler of this instance. ``_transfer/questions.py`` has the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from llm_datadist._checks import check_rule
from llm_datadist._native.public_call import OfProcess, public_calls

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.errors import LLMException

    Send = Callable[[bytes | BaseException], None]


RIGHTS: Final = ("pull", "push", "locate", "consume")
"""Rights for :meth:`PeerQuestion.may`."""


class Asker(NamedTuple):
    """Peer that asks a question; the names are those of :class:`PeerQuestion`."""

    cluster_id: int
    incarnation: str
    origin: str
    tenant: str
    rights: frozenset[str]


@public_calls(here=("may",), plain=("answer_by",))  # user code runs in it, which then answers
class PeerQuestion(OfProcess):
    """Question of a peer, until it is answered. An extension.

    ``LLMDataDist.answer_questions`` calls a handler with it. Threads: any. In a forked child answers are StateErrors.

    Attributes:
        cluster_id: The peer, as its link has proved it.
        incarnation: The peer's ``LLMDataDist.incarnation``.
        body: Bytes of the peer; never trust them.
        budget_ms: Milliseconds for which the peer waits, as it says.
        tenant: The ``tenant`` of the peer's entry in ``llm.PeerPolicy``; empty without one.
        origin: Where the peer runs, for fairness: all links of one process of this host that share memory have one.
            ``pid N`` of that process; ``uid N`` of its user over loopback without shared memory; else the peer's
            address. The kernel says it, never the peer. For a link that this side dialled it is the dialled address.
    """

    __slots__ = ("_rights", "_send", "body", "budget_ms", "cluster_id", "incarnation", "origin", "tenant")

    def __init__(self, asker: Asker, body: bytes, budget_ms: int, send: Send) -> None:
        self.cluster_id, self.incarnation, self.origin, self.tenant, self._rights = asker
        self.body = body
        self.budget_ms = budget_ms
        self._send = send

    def may(self, right: str) -> bool:
        """Return True if the peer has a right: ``pull``, ``push``, ``locate`` or ``consume``.

        It comes from the peer's entry in ``llm.PeerPolicy``. Without that option every peer has all rights.

        Raises:
            ParamError: Another right.
        """
        check_rule(right in RIGHTS, f"right: {right!r} is not one of {', '.join(RIGHTS)}")
        return right in self._rights

    def answer(self, body: bytes) -> None:
        """Send the answer; the first one counts. Without the link it has no effect.

        Raises:
            TypeError: ``body`` is not bytes.
            ParamError: More than 1,048,064 bytes.
        """
        self._send(body)

    def refuse(self, error: LLMException) -> None:
        """Send status and text of an error instead, as :meth:`answer`."""
        self._send(error)

    def answer_by(self, function: Callable[[], bytes | None]) -> None:
        """Answer with what ``function`` returns, unless that is None; refuse with what it raises."""
        try:
            if (body := function()) is not None:
                self.answer(body)
        except BaseException as error:  # of the user; the peer would wait
            self._send(error)
            if not isinstance(error, Exception):
                raise

    def __repr__(self) -> str:
        return f"<PeerQuestion of {len(self.body)} bytes from cluster {self.cluster_id}>"
