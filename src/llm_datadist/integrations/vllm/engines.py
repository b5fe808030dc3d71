"""Prefill engines that a rank reads: links to their ranks, and claims of their grants.

Each engine has four threads, so a silent engine delays only its own requests. If it cannot be reached, all earlier
orders fail, too: one timeout serves them all.

Whoever has a reference finds its grants given (`scheduler.py`), so no claim waits: an unknown token is refused at once.
"""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Never

from vllm.logger import init_logger

from llm_datadist import LLMClusterInfo, LLMStatusCode
from llm_datadist.errors import DeadlineExceeded, GrantEnded, LinkError, LLMException, NotLinked

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist import LLMDataDist
    from llm_datadist.integrations.vllm.layout import Share
    from llm_datadist.integrations.vllm.offers import KvOffer, RankEndpoint
    from llm_datadist.metrics import LinkStatistics
    from llm_datadist.types.grant import Grant

logger = init_logger("vllm.datadist.engines")

_MAX_ENGINES: Final = 64
THREADS: Final = 4  # for each engine


class _Engine:
    def __init__(self, ranks: list[RankEndpoint]) -> None:
        self.ranks = ranks
        self.threads = ThreadPoolExecutor(THREADS, "lldd-vllm-engine")
        self.users = 0  # running or held claims; guarded by Engines' lock
        self.linking = threading.Lock()
        self.failure, self.failed_at = "", -math.inf  # last failure to reach it

    def check(self, ordered: float) -> None:
        """Raise NotLinked if reaching the engine failed after ``ordered``."""
        if self.failed_at > ordered:
            raise NotLinked(self.failure)

    def fail(self, why: str) -> Never:
        """Raise NotLinked, here and for all earlier orders."""
        self.failure, self.failed_at = why, time.monotonic()
        raise NotLinked(why)


@dataclass(eq=False)
class ClaimedOffer:
    """A running or held claim: one grant for each share. Threads: one at a time, until it is held."""

    offer: KvOffer
    token: bytes
    shares: list[Share]
    engine: _Engine
    grants: list[Grant] = field(default_factory=list)  # in the order of the shares
    ordered: float = field(default_factory=time.monotonic)


class Engines:
    """Links to prefill engines, from address ``host`` of this rank, each in ``link_ms``; claims of their grants.

    Their ``datadist`` is finalized before :meth:`stop`.
    """

    def __init__(self, datadist: LLMDataDist, host: str, link_ms: int) -> None:
        self._datadist, self._host, self._link_ms = datadist, host, link_ms
        self._lock = threading.Lock()  # guards ``known`` and ``users``
        self.known: dict[int, _Engine] = {}  # by the first rank's cluster id, the longest idle first

    def claim(self, offer: KvOffer, token: bytes, shares_of: Callable[[KvOffer], list[Share]]) -> Future[ClaimedOffer]:
        """Claim an offer's grants for the shares that ``shares_of`` returns or refuses; never waits."""
        future: Future[ClaimedOffer] = Future()
        claimed: ClaimedOffer | None = None
        try:
            claimed = ClaimedOffer(offer, token, shares_of(offer), self._engine_of(offer.ranks))
            claimed.engine.threads.submit(self._claim_all, claimed, future)
        except Exception as error:  # noqa: BLE001 (fails the request)
            if claimed is not None:  # no thread could be started
                if not future.cancel():
                    return future  # another one runs it: the executor keeps what it refuses
                self.release(claimed)
                future = Future()
            future.set_exception(error)
        return future

    def release(self, claimed: ClaimedOffer) -> None:
        """Release all grants of a claim. Once."""
        for grant in claimed.grants:
            grant.release()
        key = claimed.engine.ranks[0].cluster_id
        with self._lock:
            claimed.engine.users -= 1
            self.known[key] = self.known.pop(key)

    def _engine_of(self, ranks: list[RankEndpoint]) -> _Engine:
        key = ranks[0].cluster_id
        with self._lock:
            if key not in self.known:
                self._retire()
                self.known[key] = _Engine(ranks)
            self.known[key].users += 1
            return self.known[key]

    def _retire(self) -> None:
        """Give up idle engines without a link, then, if there are too many, the longest idle one.

        Raises LinkError if all are in use.
        """
        idle = [key for key, each in self.known.items() if not each.users]
        linked = {each.remote_cluster_id for each in self._datadist.statistics().links}
        retired = [key for key in idle if linked.isdisjoint(each.cluster_id for each in self.known[key].ranks)]
        if len(self.known) - len(retired) >= _MAX_ENGINES:
            if not idle:
                raise LinkError(f"{_MAX_ENGINES} prefill engines are in use; there is no link to another one")
            retired = idle[:1]
        for key in retired:
            engine = self.known.pop(key)
            engine.threads.submit(self._unlink_retired, engine)
            engine.threads.shutdown(wait=False)

    # --- on an engine's thread ----------------------------------------------------------------------------------------

    def _claim_all(self, claimed: ClaimedOffer, future: Future[ClaimedOffer]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            for share in claimed.shares:
                claimed.grants.append(self._claim_of(claimed, share))
        except Exception as error:  # noqa: BLE001 (fails the request)
            self.release(claimed)
            future.set_exception(error)
        else:
            future.set_result(claimed)

    def _claim_of(self, claimed: ClaimedOffer, share: Share) -> Grant:
        """Return one rank's grant. Raises GrantEnded if the rank does not know it."""
        engine, endpoint = claimed.engine, claimed.offer.ranks[share.rank]
        claim = partial(self._datadist.cache_manager.claim_grant, endpoint.cluster_id, claimed.token, share.readers)
        engine.check(claimed.ordered)
        try:
            try:
                self._link_to(endpoint)
                return claim(wait=False)
            except LinkError:  # no link yet, or it has just broken
                with engine.linking:
                    engine.check(claimed.ordered)
                    self._link(engine, endpoint)
                return claim(wait=False)
        except DeadlineExceeded as error:
            if error.budget_ms:
                engine.fail(str(error))
            where = f"the prefill engine at {endpoint.host}:{endpoint.port}"
            raise GrantEnded(f"{where} has no such grant: it was used, or its time is over") from None

    def _link_to(self, endpoint: RankEndpoint) -> LinkStatistics:
        """Return the link to the process of the offer, or raise NotLinked. NAT makes addresses meaningless."""
        link = self._datadist.explain(endpoint.cluster_id)
        if link.peer_incarnation != endpoint.incarnation:
            another = f"cluster {endpoint.cluster_id} is another process than the one of the reference"
            raise NotLinked(f"{another}: {link.peer_incarnation}")
        return link

    def _link(self, engine: _Engine, endpoint: RankEndpoint) -> None:
        where = f"{endpoint.host}:{endpoint.port}"
        _, statuses = self._datadist.link_clusters([self._info(endpoint)], self._link_ms)
        if statuses[0] not in (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK):
            engine.fail(f"no link to the prefill engine at {where}: {statuses[0]}")
        try:
            link = self._link_to(endpoint)
        except NotLinked:
            if statuses[0] == LLMStatusCode.LLM_SUCCESS:
                self._unlink(endpoint)
            raise
        said = "linked to the prefill engine at %s: its pool is read over %s, other memory of it over %s: %s"
        logger.info(said, where, link.transport, link.private_transport, link.reason)

    def _unlink_retired(self, engine: _Engine) -> None:
        """Unlink all ranks, unless the engine is in use again."""
        for endpoint in engine.ranks:
            with self._lock:
                again = engine.ranks[0].cluster_id in self.known
            if not again:
                self._unlink(endpoint)

    def _unlink(self, endpoint: RankEndpoint) -> None:
        with suppress(LLMException):
            self._datadist.unlink_clusters([self._info(endpoint)], self._link_ms, force=True)

    def _info(self, endpoint: RankEndpoint) -> Any:
        info = LLMClusterInfo()
        info.remote_cluster_id = endpoint.cluster_id
        info.append_local_ip_info(self._host, 0)
        info.append_remote_ip_info(endpoint.host, endpoint.port)
        return info

    def stop(self) -> None:
        """End the threads. Idempotent."""
        for engine in list(self.known.values()):
            engine.threads.shutdown(cancel_futures=True)
