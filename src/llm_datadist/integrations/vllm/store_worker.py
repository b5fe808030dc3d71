"""The LLMDataDist of one rank of an engine with a prefix store: registers the KV cache, loads hits, saves blocks.

Threads: vLLM's gives orders and collects results; four load, one saves.
Errors: a load that fails is reported, and the request computed; a save that fails is one that a later request makes.
"""

from __future__ import annotations

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from llm_datadist import BlocksCacheKey
from llm_datadist.errors import LLMException
from llm_datadist.integrations.vllm.rank import Rank
from llm_datadist.integrations.vllm.store_scheduler import StoreOrders, StoreTold, client_of
from llm_datadist.store import Hit, namespace
from llm_datadist.store.messages import MAX_LOOKUP_KEYS

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from llm_datadist import Cache
    from llm_datadist.integrations.vllm.layout import Layout
    from llm_datadist.store import StoreClient

logger = init_logger("vllm.datadist.store")

_LOADERS: Final = 4


def namespace_of(config: VllmConfig, layout: Layout, rank: int) -> bytes:
    """Return the namespace of a rank's blocks: everything that, changed, makes other bytes under vLLM's hashes."""
    algorithm = config.cache_config.prefix_caching_hash_algo
    return namespace(
        fingerprint=hashlib.sha256(msgspec.msgpack.encode(layout, order="deterministic")).digest(),
        tp_size=layout.ranks,
        tp_rank=rank,
        hash_algorithm=algorithm,
        hash_seed=resolve_none_hash_seed(get_hash_fn_by_name(algorithm)),
        salt=str(config.kv_transfer_config.get_from_extra_config("salt", "")),
    )


class StoreWorker(Rank):
    """The store connector's half in one worker. Threads: vLLM's, unless stated.

    What ends is a load, named by its request, or a save, by its number, each with True if it failed.
    """

    _cache: Cache  # from `register` on
    client: StoreClient

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, kv_cache_config, None)
        self._loaders = ThreadPoolExecutor(_LOADERS, "lldd-vllm-load")
        self._saver = ThreadPoolExecutor(1, "lldd-vllm-save")
        self._running = 0  # loads and saves that are not reported
        self._unsaved: StoreOrders = StoreOrders()  # of this step, until :meth:`save`
        self._failing = False  # the last save failed
        self._told = StoreTold()

    def register(self, views: dict[str, torch.Tensor]) -> None:
        self._cache = self._register(views, BlocksCacheKey(self.cluster_id), whole=True)
        space = namespace_of(self._config, self._layout, self._rank)
        self.client = client_of(self._config, self.datadist, space)
        self._at_end.callback(self.client.close)
        self._told.namespaces[self._rank] = space
        logger.info("LLMDataDistStoreConnector: %r, namespace %s", self._cache, space.hex()[:8])

    # --- orders of the scheduler --------------------------------------------------------------------------------------

    def obey(self, orders: StoreOrders, *, idle: bool) -> None:
        """Begin the scheduler's loads; never waits. ``idle``: the step has no tokens."""
        self._idle, self._unsaved = idle, orders
        for request, (hits, blocks, slots) in orders.loads.items():
            self._running += 1
            self._loads[request] = slots, blocks
            self._loaders.submit(self._load, request, hits[self._rank], slots or blocks)

    def save(self) -> None:
        """Begin the step's save; once for each step, when it has run. vLLM calls it although the step has failed."""
        orders, self._unsaved = self._unsaved, StoreOrders()
        if orders.save is not None and sys.exc_info()[0] is None:
            number, keys, blocks, slots = orders.save
            if slots:
                self.copier.save(blocks, slots)
            self._running += 1
            self._saver.submit(self._save, number, keys, slots or blocks)

    # --- on a thread of a pool ----------------------------------------------------------------------------------------

    def _load(self, request: str, hit: bytes, blocks: list[int]) -> None:
        failed = False
        try:
            self.client.load(Hit.from_bytes(hit), self._cache, blocks, release=False)
        except Exception as error:
            known, failed = isinstance(error, LLMException), True
            logger.warning("request %s is computed: %s", request, error, exc_info=None if known else error)
        self._ended.put((request, failed))

    def _save(self, number: int, keys: list[bytes], blocks: list[int]) -> None:
        failed = True
        try:
            failed = self.client.save(keys, self._cache, blocks) < len(keys)
            if failed:  # it had some, or took none
                failed = not _has(self.client, keys)
                why: Exception | str = "it is gone, busy or full, or another server saves the same"
        except Exception as error:  # noqa: BLE001 (the blocks are not in the store)
            why = error
        if failed and not self._failing:
            known = not isinstance(why, Exception) or isinstance(why, LLMException)
            logger.warning("the store does not take blocks: %s", why, exc_info=None if known else why)
        self._failing = failed
        self._ended.put((number, failed))

    # --- what has ended -----------------------------------------------------------------------------------------------

    def results(self) -> KVConnectorTransferResults:
        """Return the requests whose load ended since the last call; in a step without tokens, wait a moment for one."""
        received: dict[str, bool] = {}
        for what, has_failed in self._take_ended(wait=self._idle and self._running > 0):
            self._running -= 1
            if isinstance(what, int):
                self._told.ended[what] += 1
                self._told.unsaved |= {what} if has_failed else set()
            else:
                self._copy_loaded(what, failed=has_failed)
                received[what] = has_failed
        return KVConnectorTransferResults(set(), set(received), {each for each, failed in received.items() if failed})

    def stop(self) -> None:
        """End all loads and saves, then the LLMDataDist. Idempotent."""
        self._at_end.close()
        self.datadist.finalize()  # running ones fail
        self._loaders.shutdown(cancel_futures=True)
        self._saver.shutdown(cancel_futures=True)


def _has(client: StoreClient, keys: list[bytes]) -> bool:
    """Return True if the store has all keys now."""
    for begin in range(0, len(keys), MAX_LOOKUP_KEYS):
        part = keys[begin : begin + MAX_LOOKUP_KEYS]
        hit = client.lookup(part)
        client.release(hit)
        if len(hit) < len(part):
            return False
    return True
