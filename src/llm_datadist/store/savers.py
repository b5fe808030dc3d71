"""Threads of a store that pull for clients, in turns that are fair between processes."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from llm_datadist._log import logger
from llm_datadist.errors import DeadlineExceeded, LinkError, LLMException, LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from llm_datadist.types.question import PeerQuestion

    Job = tuple[PeerQuestion, Callable[[], bytes]]
    Name = tuple[int, str]

_THREADS: Final = 8
THREAD_NAME: Final = "llm-datadist-store-save"
_MAX_WAITING: Final = 16  # of one client; beyond, the answer is LLM_LINK_BUSY
_MAX_PROMPT: Final = 4096  # clients remembered


class Savers:
    """Eight threads that do the jobs of each client one after the other, in its order.

    The clients of one process, which have one :attr:`PeerQuestion.origin`, get a second thread only while most threads
    are free. Clients whose last job met a deadline, or that had none yet, get one thread for each process, and half of
    all. So neither many links nor clients that stand still keep the others out.

    Threads: any for :meth:`submit` and :meth:`close`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        # By origin and client, both in turns: who is served goes to the end.
        self._waiting: dict[str, dict[Name, deque[Job]]] = {}
        self._running: dict[Name, str] = {}  # clients with a thread, and their origins
        self._prompt: dict[Name, None] = {}  # clients whose last job met no deadline, the oldest first
        self._closed = self._draining = False
        # No executor: that a thread cannot be started shows here, and a store that is not closed ends with its process.
        self._threads: list[threading.Thread] = []
        try:
            for number in range(_THREADS):
                thread = threading.Thread(target=self._run, name=f"{THREAD_NAME}_{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def submit(self, question: PeerQuestion, job: Callable[[], bytes]) -> None:
        """Queue the job that answers a question; LinkError (``LLM_LINK_BUSY``) if its client has too many."""
        name = question.cluster_id, question.incarnation
        with self._changed:
            if self._closed:
                raise LLMException("the store ends", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)
            if self._draining:
                raise busy("the store is draining")
            jobs = self._waiting.setdefault(question.origin, {}).setdefault(name, deque())
            if len(jobs) >= _MAX_WAITING:
                raise busy(f"{_MAX_WAITING} saves of this client wait already")
            jobs.append((question, job))
            self._changed.notify()

    def waiting(self) -> int:
        """Return the number of jobs that wait for a thread."""
        with self._changed:
            return sum(len(jobs) for clients in self._waiting.values() for jobs in clients.values())

    def ending(self) -> bool:
        """Take no more jobs; return True while some have not ended."""
        with self._changed:
            self._draining = True
            return bool(self._waiting or self._running)

    def close(self) -> None:
        """Drop waiting jobs, join the threads. Idempotent."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            origin, name, (question, job) = taken
            late = _serve(question, job)
            for other, _ in self._give_back(origin, name, late=late):
                with suppress(BaseException):
                    other.refuse(busy("an earlier save of this client met its deadline"))

    def _take(self) -> tuple[str, Name, Job] | None:
        """Wait for the next job; None once closed."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._closed or self._next())
            if not isinstance(found, tuple):
                return None
            origin, name = found
            clients = self._waiting.pop(origin)
            jobs = clients.pop(name)
            job = jobs.popleft()
            if jobs:
                clients[name] = jobs
            if clients:
                self._waiting[origin] = clients
            self._running[name] = origin
            return origin, name, job

    def _next(self) -> tuple[str, Name] | None:
        """Under the lock."""
        running = self._running.values()
        slow = [origin for name, origin in self._running.items() if name not in self._prompt]
        for origin, clients in self._waiting.items():
            if origin in running and 2 * len(running) >= _THREADS:
                continue
            full = origin in slow or 2 * len(slow) >= _THREADS
            for name in clients:
                if name not in self._running and (name in self._prompt or not full):
                    return origin, name
        return None

    def _give_back(self, origin: str, name: Name, *, late: bool) -> Iterable[Job]:
        """Free the thread; return the jobs of a late client, which would be late, too."""
        with self._changed:
            del self._running[name]
            self._prompt.pop(name, None)
            if not late:
                self._prompt[name] = None
                if len(self._prompt) > _MAX_PROMPT:
                    del self._prompt[next(iter(self._prompt))]
            self._changed.notify_all()
            clients = self._waiting.get(origin, {})
            dropped = clients.pop(name, ()) if late else ()
            if dropped and not clients:
                del self._waiting[origin]
            return dropped


def _serve(question: PeerQuestion, job: Callable[[], bytes]) -> bool:
    """Answer a question with a job; return True if that met a deadline."""
    late = False

    def run() -> bytes:
        nonlocal late
        try:
            return job()
        except DeadlineExceeded:
            late = True
            raise

    try:
        question.answer_by(run)
    except BaseException as error:  # noqa: BLE001 (as a lack of memory for the refusal: the thread goes on)
        with suppress(BaseException):  # of a user's handler of logs
            logger.error("unexpected error while a save is answered", exc_info=error)
    return late


def busy(text: str) -> LinkError:
    """Return the error of a store that could serve a question later."""
    return LinkError(text, status_code=LLMStatusCode.LLM_LINK_BUSY)
