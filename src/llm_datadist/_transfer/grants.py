"""The grants that this process has given to peers. A grant ends when revoked, out of time, or with its cache."""

from __future__ import annotations

import heapq
import threading
import time
from typing import TYPE_CHECKING

from llm_datadist._cache.geometry import CacheKind
from llm_datadist._checks import check_rule, check_type
from llm_datadist._native import parse_indices
from llm_datadist._native.signals import public_calls_hold_signals
from llm_datadist.errors import LLMStatusCode, StateError
from llm_datadist.types.grant import Grant

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._cache.store import CacheStore


@public_calls_hold_signals(grant="revoke")
class Grants:
    """Owns a guard for every grant that has not ended.

    Threads: any; the control thread ends those out of time. Guards are advanced outside the lock, each once.
    ``call_at(seconds, function)`` calls ``function`` at a monotonic time.
    """

    def __init__(
        self, cluster_id: int, store: CacheStore, call_at: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self._cluster_id = cluster_id
        self._store = store
        self._call_at = call_at
        self._lock = threading.Lock()  # guards the next three
        self._live: dict[tuple[int, int], Grant] = {}
        self._expiries: list[tuple[float, tuple[int, int]]] = []
        self._closed = False

    def grant(self, cache_id: int, blocks: object, ttl: float) -> Grant:
        """Return a grant for ``blocks`` that lasts ``ttl`` seconds at most. Errors as :meth:`Cache.grant`."""
        numbers = parse_indices("blocks", blocks)
        check_rule(len(numbers) > 0, "blocks: empty, a grant is for one block at least")
        check_type("ttl", ttl, (int, float))
        check_rule(0 < ttl < float("inf"), f"ttl: {ttl} s, it must be above 0 and finite")
        with self._store.using(cache_id, "grant: cache") as entry:
            entry.geometry.require_kind("grant: cache", CacheKind.BLOCKS)
            rows = entry.geometry.rows
            for block in (int(numbers.min()), int(numbers.max())):
                check_rule(0 <= block < rows, f"blocks: block {block} is outside [0, {rows}) of cache {cache_id}")
            guard = self._store.exports.guards.allocate()
        key = (guard.slot, guard.generation)
        granted = Grant(self._cluster_id, self._store.exports.incarnation, cache_id, key, numbers.tolist(), self)
        expires = time.monotonic() + ttl
        with self._lock:
            closed, earliest = self._closed, False
            if not closed:
                self._live[key] = granted
                heapq.heappush(self._expiries, (expires, key))
                earliest = self._expiries[0][1] == key
        if closed:
            self._store.exports.guards.release(guard.slot)
            raise StateError("grant: this LLMDataDist is finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)
        if earliest:
            self._call_at(expires, self._expire)
        return granted

    def active(self, grant: Grant) -> bool:
        return grant.guard in self._live

    def revoke(self, grant: Grant) -> None:
        with self._lock:
            live = self._live.pop(grant.guard, None)
        if live is not None:
            self._store.exports.guards.release(grant.guard[0])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            live, self._live, self._expiries = list(self._live.values()), {}, []
        for grant in live:
            self._store.exports.guards.release(grant.guard[0])

    def _expire(self) -> None:
        """End the grants that are out of time; schedule the next look. Threads: control."""
        now = time.monotonic()
        over: list[Grant] = []
        with self._lock:
            while self._expiries and self._expiries[0][0] <= now:
                grant = self._live.get(heapq.heappop(self._expiries)[1])
                if grant is not None:
                    over.append(grant)
            following = self._expiries[0][0] if self._expiries else None
        for grant in over:
            self.revoke(grant)
        if following is not None:
            self._call_at(following, self._expire)
