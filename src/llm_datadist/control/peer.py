"""Who is at the other end of a link, and what waits for its answers."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llm_datadist.errors import CacheMismatch, CacheNotFound, LinkError, LLMException, LLMStatusCode, TransferFailed

if TYPE_CHECKING:
    from llm_datadist.control.messages import Message
    from llm_datadist.deadline import Deadline

__all__ = ["Peer", "RemoteFailure", "Waiter"]

_KINDS: Final[dict[LLMStatusCode, type[LLMException]]] = {
    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST: CacheNotFound,
    LLMStatusCode.LLM_PARAM_INVALID: CacheMismatch,
    LLMStatusCode.LLM_LINK_BUSY: LinkError,
}


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end: the process incarnation, not only the cluster id it goes by."""

    cluster_id: int
    incarnation: bytes
    pid: int
    host: str

    def __str__(self) -> str:
        # The peer's own words: on one line, whatever they are.
        host = "".join(c if c.isprintable() else "?" for c in self.host[:255])
        return f"cluster {self.cluster_id} (pid {self.pid} on {host})"


class RemoteFailure(LLMException):
    """The target answered a request with a status and a text; the link is fine."""

    def typed(self, what: str) -> LLMException:
        """Return it as the exception that a caller of this end expects."""
        # Nothing that is raised carries success (R29), whatever the peer says.
        code = self.status_code if self.status_code is not LLMStatusCode.LLM_SUCCESS else LLMStatusCode.LLM_FAILED
        text = " ".join(f"{what}: {self}".splitlines())
        return _KINDS.get(code, TransferFailed)(text, status_code=code, peer=self.peer, phase=self.phase)


class Waiter:
    """One caller waiting for one answer: a lock that whoever reads the answer opens."""

    __slots__ = ("_gate", "answer")

    def __init__(self) -> None:
        self.answer: Message | None = None
        self._gate = threading.Lock()
        self._gate.acquire()

    @property
    def waiting(self) -> bool:
        """True until it is woken."""
        return self._gate.locked()

    def wait(self, deadline: Deadline) -> None:
        """Return when woken, or when the time is over. Called once, by the caller."""
        woken = self._gate.acquire(blocking=False)  # already, as a rule: by the caller itself
        while not woken and not deadline.expired():
            woken = self._gate.acquire(timeout=deadline.wait_at_most())

    def wake(self, answer: Message | None) -> None:
        """Hand over the answer, or None: there will be none. Called once at most."""
        self.answer = answer
        self._gate.release()
