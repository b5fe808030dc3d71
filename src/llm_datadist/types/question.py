"""PeerQuestion, a peer's question to a handler of this instance. ``_transfer/questions.py`` has the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.errors import LLMException

    Send = Callable[[bytes | BaseException], None]


class PeerQuestion:
    """Question of a peer, until it is answered. An extension.

    ``LLMDataDist.answer_questions`` calls a handler with it. Threads: any.

    Attributes:
        cluster_id: The peer, as its link has proved it.
        incarnation: The peer's ``LLMDataDist.incarnation``.
        body: Bytes of the peer; never trust them.
        budget_ms: Milliseconds for which the peer waits, as it says.
    """

    __slots__ = ("_send", "body", "budget_ms", "cluster_id", "incarnation")

    def __init__(self, cluster_id: int, incarnation: str, body: bytes, budget_ms: int, send: Send) -> None:
        self.cluster_id = cluster_id
        self.incarnation = incarnation
        self.body = body
        self.budget_ms = budget_ms
        self._send = send

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
