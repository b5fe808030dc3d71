"""The target's half of a checksum: it says what its own memory holds, as it would to a stranger.

A question is put into a queue by the control thread and answered by one thread of its own, so that digesting many bytes
delays neither beats nor other requests. What is asked is checked like everything from the wire; the cache's memory is
held while it is digested, and its guards are compared before and after.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llm_datadist.control.messages import Failed, Verified, Verify
from llm_datadist.errors import LLMException, LLMStatusCode, ParamError, TransferFailed
from llm_datadist.log import logger
from llm_datadist.native import Plan
from llm_datadist.native.digest import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llm_datadist.cache.registry import Entry
    from llm_datadist.caches import CacheStore
    from llm_datadist.control.link import Link
    from llm_datadist.control.messages import Message
    from llm_datadist.native import CopyPool

__all__ = ["MAX_QUESTION_BYTES", "MAX_QUESTION_TENSORS", "Witness"]

MAX_QUESTION_BYTES: Final = 64 << 20
"""Bytes of memory that one question may be about: some 10 ms, for which the questions of others wait."""
MAX_QUESTION_TENSORS: Final = 1 << 15
"""Tensors of one question: their digests fit a frame twice."""

#: A peer may have so many questions waiting, of so many bytes; beyond, the answer is LLM_LINK_BUSY.
_MAX_WAITING: Final = 256
_MAX_WAITING_BYTES: Final = 8 << 20
_MAX_BUDGET_MS: Final = 24 * 3600 * 1000


class _Queue:
    """The questions of one peer, with when each must be answered."""

    __slots__ = ("nbytes", "questions")

    def __init__(self) -> None:
        self.questions: deque[tuple[Verify, int]] = deque()
        self.nbytes = 0

    def full(self) -> bool:
        return len(self.questions) >= _MAX_WAITING or self.nbytes >= _MAX_WAITING_BYTES

    def put(self, question: Verify, expires_ns: int) -> None:
        self.questions.append((question, expires_ns))
        self.nbytes += len(question.runs)

    def take(self) -> tuple[Verify, int]:
        question, expires_ns = self.questions.popleft()
        self.nbytes -= len(question.runs)
        return question, expires_ns


class Witness:
    """Answers :class:`~llm_datadist.control.messages.Verify`.

    The control thread puts questions into the queues, the thread ``llm-datadist-verify``, which exists from the first
    question to :meth:`close`, answers one after the other, of each peer in turn. The lock guards the queues.

    Args:
        store: The caches asked about.
        pool: Threads that help to digest, or None.
    """

    def __init__(self, store: CacheStore, pool: CopyPool | None) -> None:
        self._store = store
        self._pool = pool
        self._lock = threading.Lock()
        self._queues: dict[Link, _Queue] = {}  # the first one is next
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llm-datadist-verify")

    def handlers(self) -> Mapping[type[Message], Callable[[Link, Any], None]]:
        """Return what the link manager dispatches to this class."""
        return {Verify: self.on_verify}

    def on_verify(self, link: Link, message: Verify) -> None:
        """A peer wants to know what our memory holds. Runs on the control thread."""
        expires_ns = time.monotonic_ns() + min(message.budget_ms, _MAX_BUDGET_MS) * 1_000_000
        with self._lock:
            queue = self._queues.setdefault(link, _Queue())
            full = queue.full()
            if not full:
                queue.put(message, expires_ns)
        if full:
            text = f"{_MAX_WAITING} checksums of this peer, or {_MAX_WAITING_BYTES} bytes of them, wait already"
            link.tell(Failed(message.id, int(LLMStatusCode.LLM_LINK_BUSY), text))
            return
        try:
            self._thread.submit(self._serve)
        except RuntimeError as error:  # closed meanwhile: the link is about to end
            link.tell(Failed(message.id, int(LLMStatusCode.LLM_ENGINE_FINALIZED), str(error)))

    def drop_peer(self, link: Link) -> None:
        """A link has ended: nobody waits for its answers."""
        with self._lock:
            self._queues.pop(link, None)

    def close(self) -> None:
        """Finish the question in hand, forget the others, and join the thread. Idempotent."""
        with self._lock:
            self._queues.clear()
        self._thread.shutdown(cancel_futures=True)

    # --- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Answer one question."""
        with self._lock:
            if not self._queues:
                return  # its link has ended
            link, queue = next(iter(self._queues.items()))
            question, expires_ns = queue.take()
            del self._queues[link]
            if queue.questions:
                self._queues[link] = queue  # behind the others
        try:
            answer: Message = Verified(question.id, self._digests(link, question, expires_ns))
        except LLMException as error:
            answer = Failed(question.id, int(error.status_code), str(error)[:4000])
        except Exception as error:  # noqa: BLE001 (nobody looks at the future; the caller must hear that it failed)
            logger.error("unexpected error while digesting for %s", link.peer, exc_info=error)
            answer = Failed(question.id, int(LLMStatusCode.LLM_FAILED), f"internal error: {error!r}"[:4000])
        link.tell(answer)

    def _digests(self, link: Link, question: Verify, expires_ns: int) -> bytes:
        registry = self._store.registry
        entry = registry.reach(link, question.cache_id, question.pin, hold=True)
        try:
            self._check(link, entry, question)
            plan = _plan(entry, question)
            self._require_current(entry, question)
            found = digest(
                plan,
                entry.storage.tensors,
                self._pool,
                expires_ns,
                question.nonce,
                dst=False,
                each_run=question.each_run,
            )
            self._require_current(entry, question)
        finally:
            self._store.apply(registry.let_go(entry))
        if found is None:
            raise LLMException("verify: no time was left for the digest", status_code=LLMStatusCode.LLM_TIMEOUT)
        return found.astype("<u8").tobytes()

    def _check(self, link: Link, entry: Entry, question: Verify) -> None:
        """Only what a peer may move it may ask about."""
        if not question.pin and not self._store.keepable(entry):
            raise ParamError(f"verify: cache {entry.cache_id} is read under a pin")
        if not entry.remote_accessible:
            raise ParamError(f"verify: cache {entry.cache_id} was registered with remote_accessible=False")
        if question.push and not self._store.remote_accessible and entry.cache_id not in link.located:
            raise ParamError("verify: a push needs remote cache access (llm.EnableRemoteCacheAccessible=1)")

    def _require_current(self, entry: Entry, question: Verify) -> None:
        """The entry's own guard as well, whatever the peer names: the memory of a withdrawn cache is not touched."""
        load = self._store.exports.guards.load
        named = ((each.slot, each.generation) for each in question.guards)
        for slot, generation in ((entry.guard.slot, entry.guard.generation), *named):
            if load(slot) != generation:
                raise TransferFailed(f"verify: cache {entry.cache_id} was freed, rebound or unregistered meanwhile")


def _plan(entry: Entry, question: Verify) -> Plan:
    """Return what to digest. That it lies inside the tensors is checked again by the digest itself, byte by byte."""
    geometry, count = entry.geometry, question.count
    if question.extent != geometry.tensor_bytes:
        raise ParamError(f"verify: extent={question.extent}: the tensors have {geometry.tensor_bytes} bytes")
    if not 1 <= count <= (1 if question.each_run else MAX_QUESTION_TENSORS):
        raise ParamError(f"verify: count={count}: one question is about 1 to {MAX_QUESTION_TENSORS} tensors")
    if len(question.runs) % 16:
        raise ParamError(f"verify: runs of {len(question.runs)} bytes are no pairs of uint64")
    spans = np.frombuffer(question.runs, "<u8").reshape(-1, 2)
    # Each length before their sum, which could wrap.
    longest = int(spans[:, 1].max(initial=0))
    total = int(spans[:, 1].sum()) * count if longest <= MAX_QUESTION_BYTES else longest
    if total > MAX_QUESTION_BYTES:
        raise ParamError(f"verify: {total} bytes: one question is about at most {MAX_QUESTION_BYTES}")
    runs = np.ascontiguousarray(spans[:, (0, 0, 1)], np.uint64)
    return Plan(question.first, question.first, count, runs, ordered=False, nbytes=total)
