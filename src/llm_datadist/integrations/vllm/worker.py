"""The LLMDataDist of one rank: it registers the KV cache, gives and ends grants, and pulls.

Owns an LLMDataDist and a few threads. vLLM's thread hands over orders and collects what has ended; the threads link,
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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)
from llm_datadist.errors import LinkError, LLMException, NotLinked, ParamError
from llm_datadist.integrations.vllm.layout import Layout, Share, describe, rows_of, shares
from llm_datadist.integrations.vllm.offers import Claim, Endpoint, EndpointMetadata, Offer, Orders, Targets
from llm_datadist.integrations.vllm.placement import PoolAllocation
from llm_datadist.integrations.vllm.scheduler import DEFAULT_LEASE_S
from llm_datadist.integrations.vllm.stats import Stats
from llm_datadist.types.grant import READER_LOST, RELEASED

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from llm_datadist import Cache
    from llm_datadist.types.grant import Grant

__all__ = ["Claimed", "Worker"]

logger = init_logger("vllm.datadist")  # vLLM shows the logs below its own name

_MODEL_ID: Final = 0
_ENDS: Final = {RELEASED: "released_grants", READER_LOST: "lost_grants"}
_PAGE_SHIFT: Final = 16
_CLAIM_THREADS: Final = 16
_PULL_THREADS: Final = 4
_IDLE_STEP_S: Final = 0.001


@dataclass
class _Given:
    """A request that is offered: its grant, and when that is renewed next."""

    grant: Grant
    renew_at: float


@dataclass
class Claimed:
    """An offer whose grants are held by this rank: one for each rank of the prefill engine that it reads."""

    offer: Offer
    grants: list[tuple[Share, Endpoint, Grant]]

    def release(self) -> None:
        """Release all of them."""
        for _, _, grant in self.grants:
            grant.release()


class Worker:
    """The connector's half in one worker."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        option = transfer.get_from_extra_config
        self._lease_s = float(option("lease_s", DEFAULT_LEASE_S))
        self._host = str(option("host", "127.0.0.1"))
        self._link_ms = int(option("link_timeout_ms", 5_000))
        self._options = {str(key): str(value) for key, value in dict(option("options", {})).items()}
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
        # Claims may wait for their prefill engine: pulls are not to wait behind them.
        self._claimers = ThreadPoolExecutor(_CLAIM_THREADS, "lldd-vllm-claim")
        self._pullers = ThreadPoolExecutor(_PULL_THREADS, "lldd-vllm-pull")
        self._claims: dict[str, Future[Claimed]] = {}  # by request, until its fetch or drop; vLLM's thread only
        self._given: dict[str, _Given] = {}  # by request; vLLM's thread only
        self._idle = False  # this step has no tokens; vLLM's thread only
        self._fetching = 0  # fetches ordered and not yet reported; vLLM's thread only
        self._fetch_ended = threading.Event()
        self._lock = threading.Lock()  # guards the four below
        self._linking: dict[int, Future[None]] = {}  # by cluster: the attempt that all who need the link wait for
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._stats = Stats()
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
            config.listen_ip_info = f"{self._host}:0"
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
        endpoint = Endpoint(f"{self._cluster_id:016x}", self._host, port, self._layout)
        return EndpointMetadata(msgspec.msgpack.encode(endpoint))

    # --- orders of the scheduler --------------------------------------------------------------------------------------

    def obey(self, orders: Orders, *, idle: bool) -> None:
        """Begin what the scheduler wants, in a step that is ``idle`` if it computes no token; never waits."""
        self._idle = idle
        self._fetching += len(orders.fetches)
        for request, (token, groups) in orders.grants.items():
            self._give(request, token, groups)
        for request, claim in orders.claims.items():
            self._claims[request] = self._claimers.submit(self._claim, claim)
        for request, targets in orders.fetches.items():
            self._claims.pop(request).add_done_callback(partial(self._begin_fetch, request, targets))
        for request in orders.drops:
            self._claims.pop(request).add_done_callback(_release)

    def _begin_fetch(self, request: str, targets: Targets, claim: Future[Claimed]) -> None:
        self._pullers.submit(self._fetch, request, targets, claim)

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

    # --- threads ------------------------------------------------------------------------------------------------------

    def _claim(self, claim: Claim) -> Claimed:
        """Link to the ranks of the prefill engine that have what this one needs, and claim their grants."""
        assert self._layout is not None
        offer = Offer.parse(claim.params)
        if claim.prompt is None or offer.prompt != claim.prompt:
            raise ParamError("kv_transfer_params are for another prompt than this request's")
        theirs = offer.ranks[0].layout
        self._layout.check(theirs)
        if len(offer.ranks) != theirs.ranks:
            raise ParamError(f"kv_transfer_params name {len(offer.ranks)} of {theirs.ranks} ranks")
        token = offer.token(claim.prompt)
        claimed = Claimed(offer, [])
        try:
            for share in shares(self._layout, self._rank, theirs):
                endpoint = offer.ranks[share.rank]
                claimed.grants.append((share, endpoint, self._claim_of(endpoint, token, share.readers)))
        except BaseException:
            claimed.release()
            raise
        return claimed

    def _claim_of(self, endpoint: Endpoint, token: bytes, readers: int) -> Grant:
        cluster_id, manager = int(endpoint.cluster_id, 16), self._datadist.cache_manager
        try:
            return manager.claim_grant(cluster_id, token, readers)
        except LinkError:  # there is no link yet, or it has just broken
            self._link(cluster_id, endpoint)
            return manager.claim_grant(cluster_id, token, readers)

    def _link(self, cluster_id: int, endpoint: Endpoint) -> None:
        """Link to a rank of a prefill engine, or wait for the thread that does so, and share its success or failure.

        One after the other they would wait for a silent engine as often as it has requests; and none waits for
        another engine's.
        """
        attempt: Future[None] = Future()
        with self._lock:
            present = self._linking.setdefault(cluster_id, attempt)
        if present is not attempt:
            present.result()
            return
        try:
            self._link_now(cluster_id, endpoint)
        except BaseException as error:
            attempt.set_exception(error)
            raise
        else:
            attempt.set_result(None)
        finally:
            with self._lock:
                del self._linking[cluster_id]

    def _link_now(self, cluster_id: int, endpoint: Endpoint) -> None:
        info = LLMClusterInfo()
        info.remote_cluster_id = cluster_id
        info.append_local_ip_info(self._host, 0)
        info.append_remote_ip_info(endpoint.host, endpoint.port)
        _, statuses = self._datadist.link_clusters([info], self._link_ms)
        good = (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK)
        if statuses[0] not in good:
            where = f"{endpoint.host}:{endpoint.port}"
            raise NotLinked(f"no link to the prefill engine at {where}: {statuses[0]}", status_code=statuses[0])
        link = self._datadist.explain(cluster_id)
        logger.info(
            "linked to the prefill engine at %s:%d: its pool is read over %s, other memory of it over %s: %s",
            endpoint.host,
            endpoint.port,
            link.transport,
            link.private_transport,
            link.reason,
        )

    def _fetch(self, request: str, targets: Targets, claim: Future[Claimed]) -> None:
        began = time.perf_counter()
        failed = True
        try:
            nbytes, blocks = self._pull(claim.result(), targets)
            failed = False
            self._stats_add("fetched_requests")
            self._stats_add("fetched_bytes", nbytes)
            self._stats_add("fetched_blocks", blocks)
        except LLMException as error:
            logger.error("the KV of request %s did not come: %s", request, error)
        except Exception:
            logger.exception("the KV of request %s did not come", request)
        finally:
            _release(claim)
            self._stats_add("fetch_seconds", time.perf_counter() - began)
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
            there: Any = rows_of(endpoint.layout, theirs, share.theirs, share.count)
            here: Any = rows_of(layout, ours, share.ours, share.count)
            key = BlocksCacheKey(int(endpoint.cluster_id, 16), _MODEL_ID)
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
            elif now >= given.renew_at and given.grant.claimed():
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
        for threads in (self._claimers, self._pullers):
            threads.shutdown(cancel_futures=True)


def _release(claim: Future[Claimed]) -> None:
    """Release what was claimed, if it was."""
    if not claim.cancelled() and claim.exception() is None:
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
