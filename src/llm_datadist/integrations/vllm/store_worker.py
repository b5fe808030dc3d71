"""The LLMDataDist of one rank of an engine with a prefix store: registers the KV cache, loads hits, saves blocks.

Threads: vLLM's gives orders and collects results; four load, one saves.
Errors: a load that fails is reported, and the request computed; a save that fails is tried at most three times.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from llm_datadist import BlocksCacheKey
from llm_datadist._log import named
from llm_datadist.errors import LLMException
from llm_datadist.integrations.vllm.rank import Rank
from llm_datadist.integrations.vllm.store_scheduler import StoreOrders, StoreTold, client_of
from llm_datadist.store import Hit, namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from llm_datadist.integrations.vllm.layout import Layout
    from llm_datadist.store import StoreClient

logger = init_logger("vllm.datadist.store")

_LOADERS: Final = 4
_PAUSES: Final = (0, 0.5, 1)  # seconds before a save is tried, as long as the store does not take it


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

    What ends is a load, by its request, with True if it failed, or a save, by its number, with what was refused.
    """

    client: StoreClient  # from `register` on

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, kv_cache_config, None)
        self._loaders = ThreadPoolExecutor(_LOADERS, "lldd-vllm-load")
        self._saver = ThreadPoolExecutor(1, "lldd-vllm-save")
        self._unsaved: StoreOrders = StoreOrders()  # of this step, until :meth:`save`
        self._failing = False  # the last save failed: while the store takes nothing, blocks are not held for it
        self._stopping = threading.Event()
        self._told = StoreTold()
        self._part = b""  # of the orders' namespaces
        self._begun: dict[str | int, float] = {}  # by load or save that is not reported: monotonic
        self._cleared_at = 0.0  # monotonic, when the saver heard of it: saves that began before are of before

    def register(self, views: dict[str, torch.Tensor]) -> None:
        self._register(views, BlocksCacheKey(self.cluster_id), whole=True)
        self._spaces = [namespace_of(self._config, self._layout, rank) for rank in range(self._layout.ranks)]
        self._told.namespaces[self._rank] = self._spaces[self._rank]
        self.client = client_of(self._config, self.datadist, self._spaces, b"", self._rank)
        self._at_end.callback(lambda: self.client.close())  # noqa: PLW0108 (the client of the end)
        logger.info("LLMDataDistStoreConnector: %r, namespace %s", self._cache, self._spaces[self._rank].hex()[:8])

    # --- orders of the scheduler --------------------------------------------------------------------------------------

    def obey(self, orders: StoreOrders, *, idle: bool) -> None:
        """Begin the scheduler's loads; never waits. ``idle``: the step has no tokens."""
        self._idle, self._unsaved = idle, orders
        if orders.part != self._part:  # what runs is of the namespace before
            self._saver.submit(self.client.close)
            self._part = orders.part
            self.client = client_of(self._config, self.datadist, self._spaces, self._part, self._rank)
        for request, (hits, blocks, slots) in orders.loads.items():
            self._begun[request] = time.monotonic()
            self._loads[request] = slots, blocks
            earlier = self._submitted()
            self._loaders.submit(self._load, self.client, request, hits[self._rank], slots or blocks, earlier)

    def save(self) -> None:
        """Begin the step's save; once for each step, when it has run. vLLM calls it although the step has failed."""
        orders, self._unsaved = self._unsaved, StoreOrders()
        if orders.save is not None and sys.exc_info()[0] is None:
            number, keys, blocks, slots = orders.save
            if slots:
                self.copier.save(blocks, slots)
            self._begun[number] = time.monotonic()
            self._saver.submit(self._save, self.client, number, keys, slots or blocks, self._submitted())

    # --- on a thread of a pool ----------------------------------------------------------------------------------------

    def _load(
        self, client: StoreClient, request: str, hit: bytes, blocks: list[int], earlier: Callable[[], object]
    ) -> None:
        failed = False
        try:
            earlier()
            client.load(Hit.from_bytes(hit), self._cache, blocks, release=False)
        except Exception as error:
            known, failed = isinstance(error, LLMException), True
            logger.warning("request %s is computed: %s", request, error, exc_info=None if known else error)
        self._ended.put((request, failed))

    def _save(
        self, client: StoreClient, number: int, keys: list[bytes], blocks: list[int], written: Callable[[], object]
    ) -> None:
        refused, counted = Counter[str](), Counter[str]()
        for pause in _PAUSES[: 1 if self._failing else None]:
            if self._begun[number] < self._cleared_at:
                refused = Counter(cleared=len(keys))
                break
            if self._stopping.wait(pause):
                break
            counted["retried_blocks"] += refused.total()
            before = Counter(client.statistics().refused)
            try:
                written()
                client.save(keys, self._cache, blocks)
                refused = Counter(client.statistics().refused) - before
            except Exception as error:  # noqa: BLE001 (the blocks are not in the store)
                logger.warning_once("the store does not take blocks: %s", named(error))
                refused = Counter(failed=len(keys))
            if refused["cleared"]:
                self._cleared_at = time.monotonic()
            if not refused or refused["late"]:  # a store that is late holds blocks
                break
        self._failing = bool(refused)
        counted.update({f"refused_{why}": number for why, number in refused.items()})
        self._ended.put((number, counted))

    # --- what has ended -----------------------------------------------------------------------------------------------

    def results(self) -> KVConnectorTransferResults:
        """Return the requests whose load ended since the last call; in a step without tokens, wait a moment for one."""
        received: dict[str, bool] = {}
        for what, failed in self._take_ended(wait=self._idle and bool(self._begun)):
            name = "save_seconds" if isinstance(what, int) else "load_seconds"
            self.stats.add(name, time.monotonic() - self._begun.pop(what))
            if isinstance(what, int):
                self._told.ended[what] += 1
                self._told.unsaved |= {what} if failed.total() > failed["retried_blocks"] else set()
                self._told.counted += failed
            else:
                self._copy_loaded(what, failed=failed)
                received[what] = failed
        return KVConnectorTransferResults(set(), set(received), {each for each, failed in received.items() if failed})

    def stop(self) -> None:
        """Let what runs end, then all loads and saves, then the LLMDataDist. Idempotent."""
        self._drain()
        self._stopping.set()
        self._at_end.close()
        self.datadist.finalize()  # running ones fail
        self._loaders.shutdown(cancel_futures=True)
        self._saver.shutdown(cancel_futures=True)
