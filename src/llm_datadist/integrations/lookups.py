"""Lookups of an engine's requests in a prefix store, in a thread: the engine's scheduler never waits for the store."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llm_datadist.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from llm_datadist.store import Hit, StoreClient

logger = logging.getLogger("vllm.datadist.store")

_UNUSED: Final = 1.0  # seconds of a hit
_PATIENCE: Final = 4  # times the client's limit: a question may have others before it


@dataclass
class _Lookup:
    first: int  # of the request's blocks
    hits: Future[list[Hit]]  # by rank; none for a miss
    since: float = 0.0  # monotonic; when it was asked
    until: float = 0.0  # once it has hits


_MISS: Final[Future[list[Hit]]] = Future()
_MISS.set_result([])


class Lookups:
    """Questions, unused hits and misses of requests; at most ``most`` have a question or a hit.

    Owns: its client, its thread, and each hit until :meth:`take`.
    Threads: the scheduler's; another one asks.
    Errors: a question that raises is a miss.
    """

    def __init__(self, most: int, lookup_ms: int, block_tokens: int) -> None:
        self.client: StoreClient | None = None
        self.busy: set[str] = set()  # requests with a question or a hit
        self.counted: deque[tuple[str, float]] = deque()  # for the scheduler's statistics
        self._most, self._patience, self._block_tokens = most, _PATIENCE * lookup_ms / 1e3, block_tokens
        self._all: dict[str, _Lookup] = {}  # by request
        self._thread = ThreadPoolExecutor(1, "lldd-vllm-lookup")

    def find(self, request: str, first: int, keys: Callable[[], Sequence[bytes]]) -> list[Hit] | None:
        """Return the hits of a request's blocks from ``first`` on, one of each rank, or []; None to ask again."""
        found, now = self._all.get(request), time.monotonic()
        if found is not None and found.first != first:
            self.end(request)
            found = None
        if found is None:
            if len(self.busy) < self._most and self.client is not None:
                asked = self._thread.submit(self._ask, self.client, keys, now)
                self._all[request] = _Lookup(first, asked, now)
                self.busy.add(request)
            return None
        if not found.hits.done():
            if now < found.since + self._patience:
                return None
            self.end(request)
            self._all[request] = found = _Lookup(first, _MISS)
            self.counted.append(("misses_late", 1))
        return found.hits.result()

    def _ask(self, client: StoreClient, keys: Callable[[], Sequence[bytes]], since: float) -> list[Hit]:
        hits: list[Hit] = []
        before = client.statistics().misses
        try:
            hits = client.lookup_ranks(keys())
        except StateError:
            pass  # at the end of the engine
        except Exception:  # the request would wait
            logger.exception("a request is computed: its prefix cannot be looked up")
        self.counted.append(("lookup_seconds", time.monotonic() - since))
        if hits:
            self.counted += ("hits", 1), ("found_tokens", len(hits[0]) * self._block_tokens)
        self.counted += ((f"misses_{why}", n - before[why]) for why, n in client.statistics().misses.items())
        return hits

    def take(self, request: str) -> tuple[int, list[Hit]]:
        """Forget a request; return the block at which its hits begin, and them, for the caller to release."""
        found = self._all.get(request)
        if found is None or not found.hits.done():
            self.end(request)
            return 0, []
        self.busy.discard(request)
        return self._all.pop(request).first, found.hits.result()

    def end(self, request: str) -> None:
        """Forget a request; its hits are released, also if they come later."""
        self.busy.discard(request)
        found = self._all.pop(request, None)
        if found is not None and not found.hits.cancel():
            found.hits.add_done_callback(lambda done: self.release(done.result()))

    def release(self, hits: Iterable[Hit]) -> None:
        if self.client is not None:
            for hit in hits:
                self.client.release(hit)

    def sweep(self) -> None:
        """Once a step: release the hits that were not used in time; their requests ask again."""
        now = time.monotonic()
        for request, found in [(each, self._all[each]) for each in self.busy if self._all[each].hits.done()]:
            if not found.hits.result():
                self.busy.remove(request)
            elif not found.until:
                found.until = now + _UNUSED
            elif found.until < now:
                self.end(request)

    def use(self, client: StoreClient) -> None:
        """Forget all requests, and ask this client from now on."""
        for request in [*self._all]:
            self.end(request)
        if self.client is not None:
            self._thread.submit(self.client.close)  # it may wait for a dial
        self.client = client

    def stop(self) -> None:
        """End the thread and the client; its LLMDataDist is finalized, so that no question is on its way."""
        self._thread.shutdown(cancel_futures=True)
        if self.client is not None:
            self.client.close()
