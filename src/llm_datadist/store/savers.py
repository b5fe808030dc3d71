"""Threads of a store that pull for clients, in turns that are fair between processes."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from llm_datadist._log import logger
from llm_datadist.errors import DeadlineExceeded, LinkError, LLMException, LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.types.question import PeerQuestion

    Job = Callable[[], bytes]
    Name = tuple[int, str]

_THREADS: Final = 8
_NAME: Final = "llm-datadist-store-save"
_MAX_WAITING: Final = 16  # of one client; beyond, the answer is LLM_LINK_BUSY


@dataclass(slots=True, eq=False)
class _Client:
    """One link, or one that has ended while its job runs."""

    jobs: deque[tuple[PeerQuestion, Job]] = field(default_factory=deque)
    runs: bool = False  # one of its jobs
    late: bool = False  # its last job met a deadline


class Savers:
    """Eight threads that do the jobs of each client one after the other, in its order.

    Clients whose :attr:`PeerQuestion.origin` is one have one thread between them, more only while most are free. So a
    process with many links leaves threads to others. Of the clients of an origin whose last job met a deadline, one at
    a time gets a thread.

    Threads: any for :meth:`submit` and :meth:`close`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self._origins: dict[str, dict[Name, _Client]] = {}  # in turns: who was served goes to the end
        self._free = _THREADS
        self._closed = False
        # No executor: that a thread cannot be started shows here, and a store that is not closed ends with its process.
        self._threads: list[threading.Thread] = []
        try:
            for number in range(_THREADS):
                thread = threading.Thread(target=self._run, name=f"{_NAME}_{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def submit(self, question: PeerQuestion, job: Job) -> None:
        """Queue the job that answers a question; LinkError (``LLM_LINK_BUSY``) if its client has too many."""
        with self._changed:
            if self._closed:
                raise LLMException("the store ends", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)
            clients = self._origins.setdefault(question.origin, {})
            client = clients.setdefault((question.cluster_id, question.incarnation), _Client())
            if len(client.jobs) >= _MAX_WAITING:
                raise busy(f"{_MAX_WAITING} saves of this client wait already")
            client.jobs.append((question, job))
            self._changed.notify()

    def waiting(self) -> int:
        """Return the number of jobs that wait for a thread."""
        with self._changed:
            return sum(len(each.jobs) for clients in self._origins.values() for each in clients.values())

    def close(self) -> None:
        """Drop waiting jobs, join the threads. Idempotent."""
        with self._changed:
            self._closed = True
            self._origins.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            origin, name, client, question, job = taken
            late = False
            try:
                late = _serve(question, job)
            except BaseException as error:  # noqa: BLE001 (as a lack of memory for the refusal: the thread goes on)
                logger.error("unexpected error while a save is answered", exc_info=error)
            for other, _ in self._give_back(origin, name, client, late=late):
                other.refuse(busy("an earlier save of this client met its deadline"))

    def _take(self) -> tuple[str, Name, _Client, PeerQuestion, Job] | None:
        """Wait for the next job; None once closed."""
        with self._changed:
            while not self._closed:
                if (found := self._next()) is not None:
                    origin, name, client = found
                    client.runs = True
                    self._free -= 1
                    return origin, name, client, *client.jobs.popleft()
                self._changed.wait()
        return None

    def _next(self) -> tuple[str, Name, _Client] | None:
        """Under the lock."""
        for origin, clients in self._origins.items():
            running = [each for each in clients.values() if each.runs]
            if running and 2 * self._free <= _THREADS:
                continue
            late = any(each.late for each in running)
            for name, client in clients.items():
                if client.jobs and not client.runs and not (client.late and late):
                    return origin, name, client
        return None

    def _give_back(self, origin: str, name: Name, client: _Client, *, late: bool) -> list[tuple[PeerQuestion, Job]]:
        """Free the thread; return the jobs of a late client, which would be late, too."""
        with self._changed:
            self._free += 1
            client.runs, client.late = False, late
            dropped = list(client.jobs) if late else []
            if late:
                client.jobs.clear()
            if (clients := self._origins.pop(origin, None)) is not None:
                clients.pop(name, None)
                if client.jobs or late:  # a late one is remembered while others of its origin have work
                    clients[name] = client
                if any(each.jobs or each.runs for each in clients.values()):
                    self._origins[origin] = clients
            self._changed.notify_all()
        return dropped


def _serve(question: PeerQuestion, job: Job) -> bool:
    """Answer a question with a job; return True if that met a deadline."""
    late = False

    def run() -> bytes:
        nonlocal late
        try:
            return job()
        except DeadlineExceeded:
            late = True
            raise

    question.answer_by(run)
    return late


def busy(text: str) -> LinkError:
    """Return the error of a store that could serve a question later."""
    return LinkError(text, status_code=LLMStatusCode.LLM_LINK_BUSY)
