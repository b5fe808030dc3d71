"""Prefixes of requests in the prefix store: lookups, and saves of full blocks. Gives orders to workers; moves nothing.

| request | effect |
|---|---|
| asks for tokens | its keys are looked up for each rank, the shortest run counts; the hits are held |
| gets blocks, and slots if staged | workers load the hits into them |
| is loaded on all ranks, or ends without blocks | the hits are released, and its slots |
| could not be loaded | it is computed, and not looked up again |
| has more full blocks after this step | workers save them |

A block that is saved has a reference of our own until all ranks have reported the end. So vLLM gives it to no other
request before, whether its own ends, is aborted or preempted. At most a quarter of the blocks are saved at once, and at
most as many as there are slots if KV is staged (`staging.py`); the others wait for a later step of their request.

A key is vLLM's hash of all tokens up to the block's end, its salt and images; of an adapter the hash has only name and
path, so a digest of the adapter's files is added; a request waits for it.

Threads: one, vLLM's; the lookups of a store that does not answer are bounded (`StoreClient`).
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import msgspec
from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from llm_datadist.integrations.vllm.identity import Adapters
from llm_datadist.integrations.vllm.instance import start_instance
from llm_datadist.integrations.vllm.staging import Ring, staged_slots
from llm_datadist.store import StoreClient, StoreOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from llm_datadist import LLMDataDist
    from llm_datadist.store import Hit

logger = init_logger("vllm.datadist.store")


def client_of(config: VllmConfig, datadist: LLMDataDist, space: bytes) -> StoreClient:
    """Return a client of the connector's store."""
    option = config.kv_transfer_config.get_from_extra_config
    return StoreClient(datadist, option("store", None), space, StoreOptions(**option("store_options", {})))


@dataclass
class StoreOrders(KVConnectorMetadata):
    """The scheduler's orders for one step."""

    # by request: ranks' hits, blocks, and slots if these are staged
    loads: dict[str, tuple[list[bytes], list[int], list[int]]] = field(default_factory=dict)
    save: tuple[int, list[bytes], list[int], list[int]] | None = None  # its number, keys, their blocks, and slots


@dataclass
class StoreTold(KVConnectorWorkerMetadata):
    """What a rank tells the scheduler: its namespace, once, and the saves that have ended."""

    namespaces: dict[int, bytes] = field(default_factory=dict)  # by tensor-parallel rank
    ended: Counter[int] = field(default_factory=Counter)  # by save: ranks on which it has ended
    unsaved: set[int] = field(default_factory=set)  # saves that the store did not take

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StoreTold:
        namespaces = self.namespaces | other.namespaces
        return StoreTold(namespaces, self.ended + other.ended, self.unsaved | other.unsaved)


@dataclass
class _Asked:
    """A request, until it ends."""

    request: Request
    adapter: bytes | None  # digest; empty without one, None while it is not known
    may_load: bool  # no load of it has failed
    first: int = 0  # of the blocks that ``hits`` are of
    hits: list[Hit] = field(default_factory=list)  # by rank, held for the request's blocks
    saved: int = 0  # of its first blocks, or loaded


@dataclass
class _Save:
    blocks: list[KVCacheBlock]  # referenced
    events: list[BlockStored]
    ranks: int = 0  # on which it has ended
    failed: bool = False


class StoreScheduler:
    """The store connector's half in the scheduler."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        events = vllm_config.kv_events_config
        self._tells = events is not None and events.enable_kv_cache_events
        self._block_tokens = vllm_config.cache_config.block_size
        self._adapters = Adapters(vllm_config.lora_config)
        self._config = vllm_config
        self._datadist = start_instance(vllm_config, secrets.randbits(63), None, 0)
        self.clients: list[StoreClient] = []  # by rank, once the workers have told their namespaces
        self._requests: dict[str, _Asked] = {}
        self._loading: dict[str, list[Hit]] = {}  # by request, until all ranks have reported
        self._saves: dict[int, _Save] = {}  # by number
        self._numbers = count()
        saving, loading, _ = staged_slots(vllm_config, kv_cache_config, [None])
        self._staged = loading.stop > 0
        self.save_slots, self.load_slots = Ring(saving), Ring(loading)
        most = max(1, kv_cache_config.num_blocks // 4)  # blocks that are saved at once
        self._most = min(most, len(saving)) if self._staged else most
        self.pool: BlockPool  # vLLM's
        self._orders = StoreOrders()
        self._events: list[BlockStored] = []

    def needs_steps(self) -> bool:
        """Return True until the namespaces are known, and while saves or loads run: a step releases their hits."""
        return bool(self._saves or self._loading or not self.clients)

    def on_new_request(self, request: Request) -> None:
        self._adapters.begin(lora := request.lora_request)
        asked = _Asked(request, None if lora else b"", not request.skip_reading_prefix_cache)
        self._requests.setdefault(request.request_id, asked)

    def _find(self, request_id: str) -> _Asked | None:
        """Return a request whose KV may be stored, once its adapter is known."""
        asked = self._requests.get(request_id)
        if asked is None or self._adapters.pending(lora := asked.request.lora_request):
            return asked
        try:
            parts = self._adapters.parts(lora)
        except (OSError, ValueError) as error:
            logger.warning("the KV of request %s is not stored: %s", request_id, error)
            self._release(self._requests.pop(request_id).hits)
            return None
        if asked.adapter is None:
            asked.adapter = hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=32).digest()
        return asked

    @staticmethod
    def _keys(asked: _Asked, first: int, end: int) -> list[bytes]:
        found = list(asked.request.block_hashes[first:end])
        if asked.adapter:
            found = [hashlib.blake2b(each, key=asked.adapter, digest_size=32).digest() for each in found]
        return found

    # --- loads --------------------------------------------------------------------------------------------------------

    def matched_tokens(self, request: Request, num_computed: int) -> int | None:
        """Return how many tokens of the store follow the computed ones; None to wait for what it takes to know."""
        asked = self._find(request.request_id)
        if asked is None or not asked.may_load:
            return 0
        if asked.adapter is None or not self.clients or (self.load_slots.closed and not asked.hits):
            return None
        first = num_computed // self._block_tokens
        if not asked.hits or asked.first != first:
            self._release(asked.hits)
            end = (request.num_tokens - 1) // self._block_tokens  # vLLM computes the last token in any case
            asked.first, asked.hits = first, self._look_up(self._keys(asked, first, end))
        if not asked.hits:
            return 0
        blocks = len(asked.hits[-1])
        if self._staged and not self.load_slots.take(request.request_id, [(first, first + blocks)]):
            return None
        return blocks * self._block_tokens

    def _look_up(self, keys: list[bytes]) -> list[Hit]:
        """Return a hit for each rank, none longer than the one before; none at all if a rank has no key."""
        hits: list[Hit] = []
        for client in self.clients if keys else ():
            hits.append(client.lookup(keys))
            keys = keys[: len(hits[-1])]
        if not keys:
            self._release(hits)
        return hits

    def _release(self, hits: list[Hit]) -> None:
        for client, hit in zip(self.clients, hits, strict=False):
            client.release(hit)
        hits.clear()

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        asked = self._requests.get(request.request_id)
        if asked is None or not asked.hits:
            return
        if not num_external:  # another connector loads
            self._release(asked.hits)
            return
        hits, asked.hits = asked.hits, []
        asked.saved = asked.first + len(hits[-1])
        numbers = blocks.get_block_ids()[0][asked.first : asked.saved]
        slots = self.load_slots.held[request.request_id][0][1] if self._staged else []
        self._orders.loads[request.request_id] = [hit.to_bytes() for hit in hits], numbers, slots
        self._loading[request.request_id] = hits

    def finished(self, request: Request, _: Sequence[list[int]]) -> tuple[bool, None]:
        """Forget a request; a load that runs is reported later, and vLLM keeps its blocks until then."""
        if (asked := self._requests.pop(request.request_id, None)) is not None:
            self._release(asked.hits)
        return False, None

    # --- saves --------------------------------------------------------------------------------------------------------

    def take_orders(self, step: SchedulerOutput) -> StoreOrders:
        """Return the orders of a step; they save the blocks that it completes."""
        wanted: dict[bytes, int] = {}  # block of each key
        events: list[BlockStored] = []
        room = self._most - sum(len(each.blocks) for each in self._saves.values())
        state = step.kv_connector_block_state
        for request_id, tokens in step.num_scheduled_tokens.items() if self.clients and state else ():
            if (asked := self._find(request_id)) is None or asked.adapter is None:
                continue
            # Tokens that a step guesses have no hash yet.
            request, first = asked.request, asked.saved
            full = min((request.num_computed_tokens + tokens) // self._block_tokens, len(request.block_hashes))
            end = min(full, first + room - len(wanted))
            if end > first:
                blocks = state.resolve_block_ids(request_id)[0][first:end]
                wanted |= zip(self._keys(asked, first, end), blocks, strict=True)
                asked.saved = end
                if self._tells:
                    events.append(self._event(request, first, end))
        self.load_slots.closed = False
        for request_id in self.load_slots.held.keys() - self._loading.keys():
            self.load_slots.free(request_id)  # it got no blocks: who waits for them must keep no slots
        orders, self._orders = self._orders, StoreOrders()
        if wanted:
            number, held = next(self._numbers), [self.pool.blocks[each] for each in wanted.values()]
            self.pool.touch(held)
            self._saves[number] = _Save(held, events)
            slots = self.save_slots.take(str(number), [(0, len(wanted))])[0][1] if self._staged else []
            orders.save = number, list(wanted), list(wanted.values()), slots
        return orders

    def _event(self, request: Request, first: int, end: int) -> BlockStored:
        hashes = [maybe_convert_block_hash(each) for each in request.block_hashes[max(0, first - 1) : end]]
        lora = request.lora_request
        return BlockStored(
            block_hashes=hashes[1 if first else 0 :],
            parent_block_hash=hashes[0] if first else None,
            token_ids=list(request.all_token_ids[first * self._block_tokens : end * self._block_tokens]),
            block_size=self._block_tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
        )

    def take_events(self) -> list[BlockStored]:
        """Return the blocks that the store has since the last call; the store itself tells which it removes."""
        found, self._events = self._events, []
        return found

    # --- what the workers tell ----------------------------------------------------------------------------------------

    def take_output(self, output: KVConnectorOutput) -> None:
        """Release what the workers have done with."""
        told = output.kv_connector_worker_meta
        if isinstance(told, StoreTold):
            for _, space in sorted(told.namespaces.items()):
                self.clients.append(client_of(self._config, self._datadist, space))
            for number, ranks in told.ended.items():
                self._end_save(number, ranks, failed=number in told.unsaved)
        for request_id in output.finished_recving or ():
            if (hits := self._loading.pop(request_id, None)) is not None:
                self._release(hits)
                self.load_slots.free(request_id)
                asked = self._requests.get(request_id)
                if asked is not None and request_id in output.failed_recving:
                    asked.may_load, asked.saved = False, 0

    def _end_save(self, number: int, ranks: int, *, failed: bool) -> None:
        save = self._saves[number]
        save.ranks += ranks
        save.failed |= failed
        if save.ranks == len(self.clients):
            del self._saves[number]
            self.save_slots.free(str(number))
            self.pool.free_blocks(reversed(save.blocks))
            if not save.failed:
                self._events += save.events

    def stop(self) -> None:
        """End all lookups, then the LLMDataDist. Idempotent."""
        self._adapters.stop()
        for client in self.clients:
            client.close()
        self._datadist.finalize()
