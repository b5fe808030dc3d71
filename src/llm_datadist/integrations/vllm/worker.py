"""The LLMDataDist of one rank: it registers the KV cache, gives and ends grants, and pulls.

Owns an LLMDataDist. vLLM's thread hands over orders and collects what has ended; the threads of `engines.py` link,
claim, pull and release. A fetch that fails for any reason is reported as failed, with the reason in the log: an engine
neither crashes nor hangs for its peer.

vLLM's thread waits for nothing but this: as long as blocks are kept or awaited, vLLM makes one step after the other,
with or without tokens, and its thread would have a core and the interpreter for itself, which the threads here need.
So it sleeps in steps that have no tokens, a millisecond at most, and no longer than until a fetch ends.

When an offered request is over
    released by its readers, not claimed within its lease, or its reader was lost: the grant has ended, so no reader
    gets its bytes any more, and vLLM is told that it may use the blocks again.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole
from llm_datadist.errors import LLMException, ParamError
from llm_datadist.integrations.vllm.engines import Claimed, Engines
from llm_datadist.integrations.vllm.layout import Layout, describe, rows_of, shares
from llm_datadist.integrations.vllm.offers import (
    Claim,
    ClaimedRequests,
    Endpoint,
    EndpointMetadata,
    Offer,
    Orders,
    Targets,
)
from llm_datadist.integrations.vllm.placement import PoolAllocation
from llm_datadist.integrations.vllm.scheduler import DEFAULT_LEASE_S, init_options
from llm_datadist.integrations.vllm.stats import Stats
from llm_datadist.types.cluster import show_address
from llm_datadist.types.grant import READER_LOST, RELEASED

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from llm_datadist import Cache
    from llm_datadist.types.grant import Grant

__all__ = ["Worker"]

logger = init_logger("vllm.datadist")  # vLLM shows the logs below its own name

_MODEL_ID: Final = 0
_ENDS: Final = {RELEASED: "released_grants", READER_LOST: "lost_grants"}
_PAGE_SHIFT: Final = 16
_IDLE_STEP_S: Final = 0.001


@dataclass
class _Given:
    """A request that is offered: its grant, when that is renewed next, and whether a reader has claimed it."""

    grant: Grant
    renew_at: float
    claimed: bool = False


class Worker:
    """The connector's half in one worker."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        option = transfer.get_from_extra_config
        self._lease_s = float(option("lease_s", DEFAULT_LEASE_S))
        self._host = str(option("host", "127.0.0.1"))
        self._options = init_options(vllm_config)
        self._config = vllm_config
        self._cache_config = kv_cache_config
        self._producer = transfer.is_kv_producer
        self._cluster_id = secrets.randbits(63)
        # The one allocation that vLLM is going to make.
        self._pool_bytes = max((each.size for each in kv_cache_config.kv_cache_tensors), default=0)
        if not option("pool", default=True):
            self._pool_bytes = 0
        self._datadist = self._start(int(option("timeout_ms", 10_000)), str(option("transport", "auto")))
        self._placement: PoolAllocation | None = None
        self._rank = 0
        self._layout: Layout | None = None
        self._cache: Cache | None = None
        self._engines = Engines(self._datadist, self._host, int(option("link_timeout_ms", 5_000)))
        self._claims: dict[str, Future[Claimed]] = {}  # by request, until its fetch or drop; vLLM's thread only
        self._given: dict[str, _Given] = {}  # by request; vLLM's thread only
        self._idle = False  # this step has no tokens; vLLM's thread only
        self._fetching = 0  # fetches ordered and not yet reported; vLLM's thread only
        self._fetch_ended = threading.Event()
        self._lock = threading.Lock()  # guards the three below
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._stats = Stats()
        self._newly_claimed: set[str] = set()  # offered requests; vLLM's thread only
        self._over: set[str] = set()  # offered requests whose grant could not be given; vLLM's thread only

    def _start(self, timeout_ms: int, transport: str) -> LLMDataDist:
        config = LLMConfig()
        config.device_id = 0
        config.enable_cache_manager = True
        config.sync_kv_timeout = timeout_ms
        if self._pool_bytes:
            page = 1 << _PAGE_SHIFT
            size = -(-self._pool_bytes // page) * page
            config.mem_pool_cfg = json.dumps({"memory_size": size, "page_shift": _PAGE_SHIFT})
        if self._producer:
            config.listen_ip_info = show_address((self._host, 0))
        options = config.generate_options() | self._options
        if transport != "auto":
            options["llm.Transport"] = transport
        datadist = LLMDataDist(LLMRole.PROMPT if self._producer else LLMRole.DECODER, self._cluster_id)
        datadist.init(options)
        return datadist

    # --- memory -------------------------------------------------------------------------------------------------------

    def allocation(self) -> PoolAllocation | None:
        """Return what answers vLLM's allocation with our pool; None where the cache is to lie elsewhere."""
        if self._pool_bytes and self._placement is None:
            self._placement = PoolAllocation(self._datadist, self._pool_bytes)
        return self._placement

    def register(self, views: dict[str, torch.Tensor]) -> None:
        """Register the KV cache where it lies."""
        parallel = self._config.parallel_config
        wanted = {
            name
            for group in self._cache_config.transfer_group_ids
            for name in self._cache_config.kv_cache_groups[group].layer_names
        }
        self._rank = get_tensor_model_parallel_rank()
        self._layout, addresses = describe(
            {name: view for name, view in views.items() if name in wanted},
            self._cache_config.num_blocks,
            block_tokens=self._config.cache_config.block_size,
            model=self._config.model_config.model,
            ranks=parallel.tensor_parallel_size,
        )
        rows = self._cache_config.num_blocks * self._layout.rows
        desc = CacheDesc(len(addresses), [rows, self._layout.row_bytes], DataType.DT_INT8)
        manager = self._datadist.cache_manager
        key = BlocksCacheKey(self._cluster_id, _MODEL_ID)
        self._cache = manager.register_blocks_cache(desc, addresses, key if self._producer else None)
        placed = self._placement is not None and self._placement.cache is not None
        logger.info(
            "LLMDataDistConnector: %d tensors of %d rows of %d bytes, %s",
            len(addresses),
            rows,
            self._layout.row_bytes,
            "in a pool that peers of this host map" if placed else "in vLLM's own memory",
        )

    def endpoint(self) -> EndpointMetadata | None:
        port = self._datadist.listen_port
        if port is None or self._layout is None:
            return None
        endpoint = Endpoint(self._cluster_id, self._datadist.incarnation, self._host, port)
        return EndpointMetadata(msgspec.msgpack.encode(endpoint), msgspec.msgpack.encode(self._layout))

    # --- orders of the scheduler --------------------------------------------------------------------------------------

    def obey(self, orders: Orders, *, idle: bool) -> None:
        """Begin what the scheduler wants, in a step that is ``idle`` if it computes no token; never waits."""
        self._idle = idle
        self._fetching += len(orders.fetches) + len(orders.refused)
        for request, (token, groups) in orders.grants.items():
            self._give(request, token, groups)
        for request, claim in orders.claims.items():
            self._claims[request] = self._claim(claim)
        for request, targets in orders.fetches.items():
            self._claims.pop(request).add_done_callback(partial(self._begin_fetch, request, targets))
        for request in orders.drops:
            self._claims.pop(request).add_done_callback(_release)
        for request in orders.refused:
            self._end_fetch(request, failed=True)

    def _begin_fetch(self, request: str, targets: Targets, claim: Future[Claimed]) -> None:
        if (error := claim.exception()) is not None:
            logger.error("the KV of request %s did not come: %s", request, error)
            self._end_fetch(request, failed=True)
        else:
            claim.result().run(self._fetch, request, targets, claim.result())

    def _give(self, request: str, token: bytes, groups: list[list[int]]) -> None:
        assert self._layout is not None
        assert self._cache is not None
        blocks = [block for group in groups for block in group]
        try:
            rows: Any = rows_of(self._layout, blocks, 0, self._layout.heads)
            grant = self._cache.grant(rows, self._lease_s, token=token)
        except LLMException as error:
            logger.error("request %s is not offered: %s", request, error)
            self._over.add(request)
            return
        self._given[request] = _Given(grant, time.monotonic() + self._lease_s / 3)
        self._stats_add("granted_requests")

    def _claim(self, claim: Claim) -> Future[Claimed]:
        """Begin to claim the grants of the ranks that have what this one needs."""
        assert self._layout is not None
        theirs = claim.offer.layout
        try:
            self._layout.check(theirs)
            if len(claim.offer.ranks) != theirs.ranks:
                raise ParamError(f"reference: names {len(claim.offer.ranks)} of {theirs.ranks} ranks")
            return self._engines.claim(claim, shares(self._layout, self._rank, theirs))
        except LLMException as error:
            failed: Future[Claimed] = Future()
            failed.set_exception(error)
            return failed

    # --- threads ------------------------------------------------------------------------------------------------------

    def _fetch(self, request: str, targets: Targets, claimed: Claimed) -> None:
        began = time.perf_counter()
        failed = True
        try:
            nbytes, blocks = self._pull(claimed, targets)
            failed = False
            self._stats_add("fetched_requests")
            self._stats_add("fetched_bytes", nbytes)
            self._stats_add("fetched_blocks", blocks)
        except LLMException as error:
            logger.error("the KV of request %s did not come: %s", request, error)
        except Exception:
            logger.exception("the KV of request %s did not come", request)
        finally:
            claimed.release()
            self._stats_add("fetch_seconds", time.perf_counter() - began)
            self._end_fetch(request, failed=failed)

    def _end_fetch(self, request: str, *, failed: bool) -> None:
        if failed:
            self._stats_add("failed_fetches")
        with self._lock:
            self._received.add(request)
            if failed:
                self._failed.add(request)
        self._fetch_ended.set()

    def _pull(self, claimed: Claimed, targets: Targets) -> tuple[int, int]:
        """Pull what this rank needs of each rank of the prefill engine; return bytes and blocks."""
        layout, cache = self._layout, self._cache
        assert layout is not None
        assert cache is not None
        theirs, ours = _pairs(claimed.offer, targets)
        nbytes = 0
        for share, endpoint, grant in claimed.grants:
            there: Any = rows_of(claimed.offer.layout, theirs, share.theirs, share.count)
            here: Any = rows_of(layout, ours, share.ours, share.count)
            key = BlocksCacheKey(endpoint.cluster_id, _MODEL_ID)
            self._datadist.cache_manager.pull_blocks(key, cache, there, here, grant=grant)
            nbytes += len(here) * layout.row_bytes * len(layout.places)
        return nbytes, len(ours)

    # --- what has ended -----------------------------------------------------------------------------------------------

    def results(self) -> KVConnectorTransferResults:
        """Return which requests have ended since the last call; renew the grants that are being read."""
        sent, self._over = self._over, set()
        now = time.monotonic()
        for request, given in list(self._given.items()):
            if not given.grant.active:
                del self._given[request]
                sent.add(request)
                self._stats_add(_ENDS.get(given.grant.end, "expired_grants"))
            elif (now >= given.renew_at or not given.claimed) and given.grant.claimed():
                if not given.claimed:
                    given.claimed = True
                    self._newly_claimed.add(request)
                if now >= given.renew_at:
                    given.renew_at = now + self._lease_s / 3
                    self._renew(given.grant)
        if self._idle and not sent and (self._given or self._fetching):
            self._fetch_ended.wait(_IDLE_STEP_S)
        self._fetch_ended.clear()
        with self._lock:
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
        self._fetching -= len(received)
        return KVConnectorTransferResults(sent, received, failed)

    def _renew(self, grant: Grant) -> None:
        try:
            grant.renew(self._lease_s)
        except LLMException:
            logger.debug("%r ended just now", grant)

    def take_claimed(self) -> ClaimedRequests | None:
        """Return the offered requests that readers have claimed since the last call."""
        found, self._newly_claimed = self._newly_claimed, set()
        return ClaimedRequests(found) if found else None

    def take_stats(self) -> Stats | None:
        with self._lock:
            found, self._stats = self._stats, Stats()
        return None if found.is_empty() else found

    def _stats_add(self, name: str, number: float = 1) -> None:
        with self._lock:
            self._stats.add(name, number)

    def stop(self) -> None:
        """End all transfers, then the LLMDataDist. Idempotent."""
        self._datadist.finalize()  # pulls under way fail
        self._engines.stop()


def _release(claim: Future[Claimed]) -> None:
    """Release what was claimed, if it was."""
    if claim.exception() is None:
        claim.result().release()


def _pairs(offer: Offer, targets: Targets) -> tuple[list[int], list[int]]:
    """Return the blocks of the offer that are needed, and the blocks of this engine that they go into."""
    if len(offer.groups) != len(targets):
        raise ParamError(f"kv_transfer_params have {len(offer.groups)} groups of layers, this engine {len(targets)}")
    theirs: list[int] = []
    ours: list[int] = []
    for offered, (first, numbers) in zip(offer.groups, targets, strict=True):
        begin = first - offered.first
        chosen = offered.numbers[begin : begin + len(numbers)] if begin >= 0 else []
        if len(chosen) != len(numbers):
            last = offered.first + len(offered.numbers)
            raise ParamError(
                f"kv_transfer_params offer blocks {offered.first} to {last} of the request, "
                f"{first} to {first + len(numbers)} are needed"
            )
        theirs += chosen
        ours += numbers
    return theirs, ours
