"""The LLMDataDist of one rank: registers the KV cache, grants, and pulls.

Threads: vLLM's gives orders and collects results; those of `engines.py` link, claim, pull and release.
Errors: a failed fetch is reported, with the reason in the log; an engine never crashes or hangs for a peer.

While blocks are kept or awaited, vLLM makes step after step, and would keep the interpreter from the threads here. So
in steps without tokens its thread sleeps until a fetch ends, at most a millisecond.

A grant lasts ``lease_s``. It is renewed while its request runs, because its offer is handed out at the end, and while
a reader has claimed it. After its grant has ended, readers cannot get a request's bytes, and vLLM may reuse its blocks:
it is told so of offered requests only, which it has kept for that.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from llm_datadist.errors import LLMException, ParamError
from llm_datadist.integrations.vllm.engines import ClaimedOffer, Engines
from llm_datadist.integrations.vllm.layout import Layout, divide, pages_of, pieces, portions, rows_of, shares
from llm_datadist.integrations.vllm.offers import ClaimedRequests, EndpointMetadata, Orders, RankEndpoint
from llm_datadist.integrations.vllm.rank import Rank
from llm_datadist.types.grant import EXPIRED, READER_LOST, RELEASED
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from llm_datadist import Cache
    from llm_datadist.integrations.vllm.layout import Pieces, Share
    from llm_datadist.integrations.vllm.offers import KvOffer, Targets
    from llm_datadist.types.grant import Grant

logger = init_logger("vllm.datadist")  # vLLM shows logs below its name

_ENDS: Final = {RELEASED: "released_grants", EXPIRED: "expired_grants", READER_LOST: "lost_grants"}
_BUFFER_BYTES: Final = 1 << 24  # of a pull of rows that are divided here


@dataclass
class _Given:
    grant: Grant
    renew_at: float
    offered: bool = False  # its request has ended, and a reader may come


class RankWorker(Rank):
    """The connector's half in one worker. Threads: vLLM's, unless stated."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        option = transfer.get_from_extra_config
        self._lease_s = float(option("lease_s", 30))
        self._host = str(option("host", "127.0.0.1"))
        self._accept = option("accept_versions", [])
        if not isinstance(self._accept, list):
            raise ParamError(f"accept_versions: {self._accept!r}: not a list of vLLM's versions")
        self._producer = transfer.is_kv_producer
        super().__init__(vllm_config, kv_cache_config, self._host if self._producer else None)
        self.engines = Engines(self.datadist, self._host, int(option("link_timeout_ms", 5_000)))
        self._claims: dict[str, Future[ClaimedOffer]] = {}  # by request, until its fetch or drop
        self.given: dict[str, _Given] = {}  # by granted request
        self._told = ClaimedRequests()
        self._over: set[str] = set()  # offered requests without a grant
        self._unsaved = Orders()  # of this step, until :meth:`save`

    def register(self, views: dict[str, torch.Tensor]) -> None:
        self._register(views, BlocksCacheKey(self.cluster_id) if self._producer else None)
        logger.info("LLMDataDistConnector: %r", self._cache)
        if (endpoint := self.endpoint()) is not None:
            self._told.endpoints[0, self._rank] = endpoint

    def endpoint(self) -> EndpointMetadata | None:
        """Return this rank's address, after :meth:`register`; None if it does not listen."""
        if (port := self.datadist.listen_port) is None:
            return None
        here = RankEndpoint(self.cluster_id, self.datadist.incarnation, self._host, port)
        return EndpointMetadata(here, self._layout)

    # --- orders of the scheduler --------------------------------------------------------------------------------------

    def obey(self, orders: Orders, *, idle: bool) -> None:
        """Begin the scheduler's orders; never waits. ``idle``: the step has no tokens."""
        self._idle, self._unsaved = idle, orders
        self._loads |= orders.loads
        self.revoke(orders)  # again, for a model runner without that hook
        for request in orders.offered:
            self._offer(request)
        for request, (offer, token) in orders.claims.items():
            self._claims[request] = self.engines.claim(offer, token, self._shares)
        for request, targets in orders.fetches.items():
            begin = partial(self._begin_fetch, request, targets, self._submitted())
            self._claims.pop(request).add_done_callback(begin)
        for request in orders.drops:
            self._claims.pop(request).add_done_callback(self._drop)
        for request in orders.refused:
            self._ended.put((request, {"failed_fetches": 1}))

    def save(self) -> None:
        """Grant the step's prompts; slots have their bytes before. Once for each step, when it has been submitted."""
        orders, self._unsaved = self._unsaved, Orders()
        if orders.grants:  # only submitted yet; no output of it, and so no token, leaves before this returns
            self._submitted()()
        if orders.saves:
            self.copier.save(*map(list, zip(*orders.saves, strict=True)))
        for request, (token, blocks) in orders.grants.items():
            self._give(request, token, blocks)

    def revoke(self, orders: Orders) -> None:
        """End grants, before anything of the step runs. Idempotent."""
        for request in orders.revokes:
            if (given := self.given.pop(request, None)) is not None:
                given.grant.revoke()
                self._count_end(given.grant)

    def _offer(self, request: str) -> None:
        """Let readers have ``lease_s`` from now on; look for their claim in each step."""
        if (given := self.given.get(request)) is None:
            self._over.add(request)
        else:
            self._renew(given)
            given.offered, given.renew_at = True, 0

    def _renew(self, given: _Given) -> None:
        given.renew_at = time.monotonic() + self._lease_s / 3
        with suppress(LLMException):  # it has just ended
            given.grant.renew(self._lease_s)

    def _give(self, request: str, token: bytes, blocks: list[int]) -> None:
        try:
            rows: Any = rows_of(self._layout, pages_of(self._layout, blocks), 0, self._layout.heads)
            grant = self._cache.grant(rows, self._lease_s, token=token)
        except LLMException as error:
            logger.error("the blocks of request %s are not granted: %s", request, error)
        else:
            self.given[request] = _Given(grant, time.monotonic() + self._lease_s / 3)
            self.stats.add("granted_requests")

    def _shares(self, offer: KvOffer) -> list[Share]:
        """Return this rank's shares; raise LLMException unless the engines fit."""
        self._layout.check(offer.layout, self._accept)
        if len(offer.ranks) != offer.layout.ranks:
            raise ParamError(f"reference: names {len(offer.ranks)} of {offer.layout.ranks} ranks")
        return shares(self._layout, self._rank, offer.layout)

    # --- after a claim, on vLLM's thread or an engine's --------------------------------------------------------------

    def _drop(self, claim: Future[ClaimedOffer]) -> None:
        if claim.exception() is None:
            self.engines.release(claim.result())

    def _begin_fetch(
        self, request: str, targets: Targets, earlier: Callable[[], object], claim: Future[ClaimedOffer]
    ) -> None:
        if (error := claim.exception()) is None:
            claim.result().engine.threads.submit(self._fetch, request, targets, earlier, claim.result())
        else:
            self._ended.put((request, _failure(request, error)))

    # --- on an engine's thread ----------------------------------------------------------------------------------------

    def _fetch(self, request: str, targets: Targets, earlier: Callable[[], object], claimed: ClaimedOffer) -> None:
        began = time.perf_counter()
        try:
            earlier()
            began = time.perf_counter()
            counted = self._pull(claimed, targets)
        except Exception as error:  # noqa: BLE001 (fails the request)
            counted = _failure(request, error)
        self.engines.release(claimed)
        self._ended.put((request, counted | {"fetch_seconds": time.perf_counter() - began}))

    def _pull(self, claimed: ClaimedOffer, targets: Targets) -> dict[str, float]:
        theirs, ours = claimed.offer.layout, self._layout
        moved = pieces(theirs, claimed.offer.groups, ours, targets)
        divided = theirs.page_tokens != ours.page_tokens
        if divided and self._slots:  # parts of the ends get no token, and have another request's bytes
            ends = pages_of(ours, [each for _, slots in targets for each in slots[:1] + slots[-1:]])
            for own in tensor_views(self._cache):
                own[rows_of(ours, ends, 0, ours.heads)] = 0
        for share, grant in zip(claimed.shares, claimed.grants, strict=True):
            if share.count and divided:
                self._pull_divided(theirs, moved, share, grant)
            elif share.count:
                there = rows_of(theirs, moved.theirs, share.theirs, share.count)
                self._pull_rows(grant, self._cache, there, rows_of(ours, moved.ours, share.ours, share.count))
        token_bytes = ours.rows * ours.row_bytes * len(ours.places) // ours.block_tokens
        nbytes, blocks = len(moved.ours) * moved.tokens * token_bytes, sum(len(numbers) for _, numbers in targets)
        return {"fetched_requests": 1, "fetched_bytes": nbytes, "fetched_blocks": blocks}

    def _pull_divided(self, theirs: Layout, moved: Pieces, share: Share, grant: Grant) -> None:
        """Pull rows of another size into a buffer, a portion at a time, and their pieces from there."""
        manager, tensors = self.datadist.cache_manager, len(theirs.places)
        most = min(len(moved.theirs), max(1, _BUFFER_BYTES // (tensors * share.count * theirs.row_bytes)))
        memory = np.empty((tensors, most * share.count, theirs.row_bytes), np.int8)
        desc = CacheDesc(tensors, list(memory.shape[1:]), DataType.DT_INT8)
        buffer = manager.register_blocks_cache(desc, [each.ctypes.data for each in memory], remote_accessible=False)
        try:
            for portion in portions(theirs, self._layout, moved, share, most):
                self._pull_rows(grant, buffer, portion[0], np.arange(len(portion[0])))
                for source, own in zip(memory, tensor_views(self._cache), strict=True):
                    divide(portion, moved.tokens, theirs, source, self._layout, own)
        finally:
            manager.unregister_cache(buffer.cache_id)

    def _pull_rows(self, grant: Grant, cache: Cache, there: Any, here: Any) -> None:
        self.datadist.cache_manager.pull_blocks(BlocksCacheKey(grant.cluster_id), cache, there, here, grant=grant)

    # --- what has ended -----------------------------------------------------------------------------------------------

    def results(self) -> KVConnectorTransferResults:
        """Return the requests whose transfer ended since the last call; renew grants."""
        sent, self._over = self._over, set()
        now = time.monotonic()
        for request, given in list(self.given.items()):
            if not given.grant.active:
                if given.offered:
                    del self.given[request]
                    sent.add(request)
                    self._count_end(given.grant)
            elif now >= given.renew_at and (not given.offered or given.grant.claimed()):
                if given.offered:
                    self._told.requests.add(request)
                self._renew(given)
        wait = self._idle and not sent
        received: dict[str, dict[str, float]] = dict(self._take_ended(wait=wait))
        for name, number in chain.from_iterable(counted.items() for counted in received.values()):
            self.stats.add(name, number)
        failed = {request for request, counted in received.items() if "failed_fetches" in counted}
        for request in received:
            self._copy_loaded(request, failed=request in failed)
        if self._slots:  # vLLM has the blocks already
            self._told.ended.update(sent)
            sent = set()
        return KVConnectorTransferResults(sent, set(received), failed)

    def _count_end(self, grant: Grant) -> None:
        self.stats.add(_ENDS.get(grant.end, "revoked_grants"))

    def stop(self) -> None:
        """Let decoders fetch what they were offered, end all transfers, then the LLMDataDist. Idempotent."""
        self._drain()
        self._at_end.close()
        self.datadist.finalize()  # running pulls fail
        self.engines.stop()


def _failure(request: str, error: BaseException) -> dict[str, float]:
    """Log the reason of a failed fetch; return its counters."""
    known = isinstance(error, LLMException)
    logger.error("the KV of request %s did not come: %s", request, error, exc_info=None if known else error)
    return {"failed_fetches": 1}
