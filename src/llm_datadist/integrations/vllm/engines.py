"""The prefill engines that a rank reads: links to their ranks, and claims of what they offered.

Each engine has a few threads of its own, so an engine that is silent keeps only its own requests waiting. What fails
because the engine cannot be reached also fails all that was ordered before: one timeout serves all of them.

A claim may come before its grant, because the scheduler of the prefill engine answers before its workers have their
orders. Such a claim holds no thread: it is repeated for a second at most.
"""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vllm.logger import init_logger

from llm_datadist import LLMClusterInfo, LLMStatusCode
from llm_datadist.errors import DeadlineExceeded, LinkError, LLMException, NotLinked

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist import LLMDataDist
    from llm_datadist.integrations.vllm.layout import Share
    from llm_datadist.integrations.vllm.offers import Claim, Endpoint, Offer
    from llm_datadist.types.grant import Grant

__all__ = ["Claimed", "Engines"]

logger = init_logger("vllm.datadist.engines")

_MAX_ENGINES: Final = 64
_THREADS: Final = 4
"""Of each engine."""
_MAX_WAITING: Final = 64
"""Claims of each engine that wait for their grants."""
_WAIT_S: Final = 1.0
_REPEAT_S: Final = 0.005


class _Engine:
    """One prefill engine. All but ``users`` and ``waiting`` is guarded by ``lock``, which is held while linking."""

    def __init__(self, offer: Offer) -> None:
        self.ranks = offer.ranks
        self.threads = ThreadPoolExecutor(_THREADS, "lldd-vllm-engine")
        self.lock = threading.Lock()
        self.users = 0  # claims under way or held; guarded by the lock of Engines
        self.waiting = 0  # claims that wait for their grants; the same
        self.failed_at = -math.inf  # when it could not be reached last
        self.failure = ""

    def fail(self, error: LLMException) -> None:
        self.failed_at, self.failure = time.monotonic(), str(error)


@dataclass(eq=False)
class Claimed:
    """An offer whose grants are held by this rank: one for each rank of the prefill engine that it reads."""

    offer: Offer
    engine: _Engine
    done: Callable[[_Engine], None]
    grants: list[tuple[Share, Endpoint, Grant]] = field(default_factory=list)

    def run(self, function: Callable[..., None], *args: object) -> None:
        """Call a function on a thread of the engine."""
        self.engine.threads.submit(function, *args)

    def release(self) -> None:
        """Release all of them. Once."""
        for _, _, grant in self.grants:
            grant.release()
        self.done(self.engine)


@dataclass(eq=False)
class _Attempt:
    """A claim under way."""

    claim: Claim
    left: list[Share]
    claimed: Claimed
    future: Future[Claimed]
    ordered: float
    until: float = math.inf  # from the first grant on that was not given yet


class Engines:
    """Links to prefill engines and claims their grants.

    Args:
        datadist: Whose links these are; finalized before :meth:`stop`.
        host: Address of this rank.
        link_ms: For one link.
    """

    def __init__(self, datadist: LLMDataDist, host: str, link_ms: int) -> None:
        self._datadist, self._host, self._link_ms = datadist, host, link_ms
        self._lock = threading.Lock()  # guards the two below
        self._engines: dict[int, _Engine] = {}  # by the cluster id of the first rank, the longest idle first
        self._waiting: list[_Attempt] = []
        self._waiter = ThreadPoolExecutor(1, "lldd-vllm-wait")

    def claim(self, claim: Claim, shares: list[Share]) -> Future[Claimed]:
        """Claim what an offer grants of these shares; never waits.

        Raises:
            LinkError: So many engines are in use that there is no room for another one.
        """
        engine = self._engine_of(claim.offer)
        future: Future[Claimed] = Future()
        claimed = Claimed(claim.offer, engine, self._leave)
        engine.threads.submit(self._advance, _Attempt(claim, list(shares), claimed, future, time.monotonic()))
        return future

    def _engine_of(self, offer: Offer) -> _Engine:
        key = offer.ranks[0].cluster_id
        with self._lock:
            engine = self._engines.get(key)
            if engine is None:
                if len(self._engines) >= _MAX_ENGINES:
                    idle = next((known for known, each in self._engines.items() if not each.users), None)
                    if idle is None:
                        raise LinkError(f"{_MAX_ENGINES} prefill engines are in use; there is no link to another one")
                    self._retire(self._engines.pop(idle))
                engine = self._engines[key] = _Engine(offer)
            engine.users += 1
        return engine

    def _leave(self, engine: _Engine) -> None:
        key = engine.ranks[0].cluster_id
        with self._lock:
            engine.users -= 1
            self._engines[key] = self._engines.pop(key)

    def _retire(self, engine: _Engine) -> None:
        for endpoint in engine.ranks:
            engine.threads.submit(self._unlink, endpoint)
        engine.threads.shutdown(wait=False)

    # --- on a thread of the engine ------------------------------------------------------------------------------------

    def _advance(self, attempt: _Attempt) -> None:
        """Claim the grants that are left, until one is not given yet."""
        try:
            while attempt.left:
                share = attempt.left[0]
                endpoint = attempt.claim.offer.ranks[share.rank]
                grant = self._claim_of(attempt, endpoint, share.readers)
                if grant is None:
                    self._repeat_later(attempt)
                    return
                attempt.claimed.grants.append((share, endpoint, grant))
                del attempt.left[0]
        except Exception as error:  # noqa: BLE001 (the request fails with it)
            attempt.claimed.release()
            attempt.future.set_exception(error)
        else:
            attempt.future.set_result(attempt.claimed)

    def _claim_of(self, attempt: _Attempt, endpoint: Endpoint, readers: int) -> Grant | None:
        """Return the grant of one rank, or None if it is not given yet."""
        engine, token = attempt.claimed.engine, attempt.claim.token
        self._check_reached(attempt)
        try:
            try:
                self._check_peer(endpoint)
                return self._datadist.cache_manager.claim_grant(endpoint.cluster_id, token, readers, wait=False)
            except LinkError:  # there is no link yet, or it has just broken
                with engine.lock:
                    self._check_reached(attempt)
                    try:
                        self._link(endpoint)
                    except LLMException as error:
                        engine.fail(error)
                        raise
                return self._datadist.cache_manager.claim_grant(endpoint.cluster_id, token, readers, wait=False)
        except DeadlineExceeded as error:
            if not error.budget_ms:
                return None
            engine.fail(error)
            raise

    @staticmethod
    def _check_reached(attempt: _Attempt) -> None:
        engine = attempt.claimed.engine
        if engine.failed_at > attempt.ordered:
            raise NotLinked(engine.failure)

    def _check_peer(self, endpoint: Endpoint) -> None:
        """Raise NotLinked unless there is a link to the process that has made the offer. Addresses say nothing: NAT."""
        there = self._datadist.explain(endpoint.cluster_id).peer_incarnation
        if there != endpoint.incarnation:
            raise NotLinked(f"cluster {endpoint.cluster_id} is another process than the one of the reference: {there}")

    def _link(self, endpoint: Endpoint) -> None:
        _, statuses = self._datadist.link_clusters([self._info(endpoint)], self._link_ms)
        good = (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK)
        if statuses[0] not in good:
            where = f"{endpoint.host}:{endpoint.port}"
            raise NotLinked(f"no link to the prefill engine at {where}: {statuses[0]}", status_code=statuses[0])
        try:
            self._check_peer(endpoint)
        except NotLinked:
            self._unlink(endpoint)
            raise
        link = self._datadist.explain(endpoint.cluster_id)
        logger.info(
            "linked to the prefill engine at %s:%d: its pool is read over %s, other memory of it over %s: %s",
            endpoint.host,
            endpoint.port,
            link.transport,
            link.private_transport,
            link.reason,
        )

    def _unlink(self, endpoint: Endpoint) -> None:
        with suppress(LLMException):
            self._datadist.unlink_clusters([self._info(endpoint)], self._link_ms, force=True)

    def _info(self, endpoint: Endpoint) -> Any:
        info = LLMClusterInfo()
        info.remote_cluster_id = endpoint.cluster_id
        info.append_local_ip_info(self._host, 0)
        info.append_remote_ip_info(endpoint.host, endpoint.port)
        return info

    # --- claims that wait for their grants ----------------------------------------------------------------------------

    def _repeat_later(self, attempt: _Attempt) -> None:
        engine, now = attempt.claimed.engine, time.monotonic()
        attempt.until = min(attempt.until, now + _WAIT_S)
        with self._lock:
            if now >= attempt.until or engine.waiting >= _MAX_WAITING:
                raise DeadlineExceeded("the prefill engine has not given the grant in time")
            engine.waiting += 1
            self._waiting.append(attempt)
            first = len(self._waiting) == 1
        if first:
            self._waiter.submit(self._repeat)

    def _repeat(self) -> None:
        time.sleep(_REPEAT_S)
        with self._lock:
            waiting, self._waiting = self._waiting, []
            for attempt in waiting:
                attempt.claimed.engine.waiting -= 1
        for attempt in waiting:
            attempt.claimed.engine.threads.submit(self._advance, attempt)

    def stop(self) -> None:
        """End the threads. Idempotent."""
        self._waiter.shutdown(cancel_futures=True)
        for engine in list(self._engines.values()):
            engine.threads.shutdown(cancel_futures=True)
