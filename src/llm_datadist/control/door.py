"""The door of a communicator's listener: its members only, and only with the same idea of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.errors import LinkRefused, LLMStatusCode

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from llm_datadist.control.communicator import Communicator
    from llm_datadist.control.messages import Hello
    from llm_datadist.errors import LLMException

__all__ = ["CommunicatorDoor"]


class CommunicatorDoor:
    """See ``listener.py:Door``. All on the control thread.

    Args:
        lock: Guards the communicator.
        note: Keeps the reason why a member did not become a link.
        fail: Ends a preparation that cannot succeed.
    """

    def __init__(
        self,
        communicator: Communicator,
        lock: threading.Lock,
        note: Callable[[Communicator, str, str | None], None],
        fail: Callable[[Communicator, str], None],
    ) -> None:
        self._communicator = communicator
        self._lock = lock
        self._note = note
        self._fail = fail

    def check(self, hello: Hello) -> None:
        """Let in who is expected.

        Raises:
            LinkRefused: ``LLM_NOT_YET_LINK``: somebody else, or a member that was met; try another port.
                ``LLM_PARAM_INVALID``: a member with another idea of who is in it. ``LLM_LINK_FAILED``: no ``link()``.
        """
        meeting = hello.meeting
        if meeting is None:
            raise LinkRefused(
                f"this port is for the members of {self._communicator} only; link_clusters needs a listen_ip_info"
            )
        with self._lock:
            communicator = self._communicator
            expected = communicator.preparing and communicator.is_for(meeting, hello.cluster_id)
            taken = communicator.taken(meeting, hello.cluster_id)
            difference = communicator.difference(meeting, hello.cluster_id)
        if not expected or taken:
            raise LinkRefused(
                "another communicator is prepared at this port", status_code=LLMStatusCode.LLM_NOT_YET_LINK
            )
        if difference is not None:
            raise LinkRefused(difference, status_code=LLMStatusCode.LLM_PARAM_INVALID)

    def refused(self, hello: Hello, error: LLMException) -> None:
        """A member did not become a link: what cannot come right ends the preparation, all else is kept."""
        communicator = self._communicator
        if hello.meeting is None or not communicator.is_for(hello.meeting, hello.cluster_id):
            return
        text = f"cluster {hello.cluster_id} was refused here: {error}"
        if error.status_code is LLMStatusCode.LLM_PARAM_INVALID:
            self._fail(communicator, text)
        elif error.status_code is not LLMStatusCode.LLM_NOT_YET_LINK:
            self._note(communicator, text, error.phase)
