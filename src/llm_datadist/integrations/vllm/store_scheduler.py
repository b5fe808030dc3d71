"""Prefixes of requests in the prefix store: lookups, and saves of full blocks. Gives orders to workers; moves nothing.

| request | effect |
|---|---|
| asks for tokens | its keys are looked up for all ranks (`lookups.py`); until the answer is there, it waits |
| gets blocks, and slots if staged | workers load the hits into them |
| is loaded on all ranks, or ends without blocks | the hits are released, and its slots |
| could not be loaded | it is computed, and not looked up again |
| has more full blocks after this step | workers save at most a quarter of all blocks at once, or all slots if fewer |
| ends, and has full blocks that are not saved | they are kept for later steps, at most another quarter |

A block that is saved or kept has a reference of our own until all ranks have reported the end. So vLLM gives it to no
other request before, whether its own ends, is aborted or preempted. While vLLM has less than a twentieth of its blocks
free, none is kept.

A key is vLLM's hash of all tokens up to the block's end, its salt and images; of an adapter the hash has only name and
path, so a digest of the adapter's files is added; a request waits for it. A reset lets no KV of before be found: the
store clears the engine's namespaces, and the engine uses others, with a random part, unless it has ``clear_shared``.

Threads: one, vLLM's; a reset waits a second for the store at most.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys

from llm_datadist.integrations.lookups import Lookups
from llm_datadist.integrations.vllm.identity import Adapters
from llm_datadist.integrations.vllm.instance import start_instance
from llm_datadist.integrations.vllm.offers import FIELD
from llm_datadist.integrations.vllm.staging import SlotPool, staged_slots
from llm_datadist.integrations.vllm.stats import LOST, Stats
from llm_datadist.store import StoreClient, StoreOptions
from llm_datadist.store.messages import MAX_LABEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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

_TELL: Final = 60.0  # seconds between lines of what was lost


def client_of(config: VllmConfig, datadist: LLMDataDist, spaces: list[bytes], part: bytes, rank: int) -> StoreClient:
    """Return a client of the connector's store for a rank; ``part`` is that of resets, which changes spaces."""
    option = config.kv_transfer_config.get_from_extra_config
    if part and not option("clear_shared", None):
        spaces = [hashlib.sha256(space + part).digest() for space in spaces]
    options = StoreOptions(**{"label": config.model_config.model[-MAX_LABEL:]} | option("store_options", {}))
    return StoreClient(datadist, option("store", None), spaces[rank], options, ranks=spaces)


@dataclass
class StoreOrders(KVConnectorMetadata):
    """The scheduler's orders for one step."""

    # by request: ranks' hits, blocks, and slots if these are staged
    loads: dict[str, tuple[list[bytes], list[int], list[int]]] = field(default_factory=dict)
    save: tuple[int, list[bytes], list[int], list[int]] | None = None  # its number, keys, their blocks, and slots
    part: bytes = b""  # random, from the first reset on; loads and the save are of its namespaces


@dataclass
class StoreTold(KVConnectorWorkerMetadata):
    """What a rank tells the scheduler: its namespace, once, and the saves that have ended."""

    namespaces: dict[int, bytes] = field(default_factory=dict)  # by tensor-parallel rank
    ended: Counter[int] = field(default_factory=Counter)  # by save: ranks on which it has ended
    unsaved: set[int] = field(default_factory=set)  # saves that the store did not take
    counted: Counter[str] = field(default_factory=Counter)  # for statistics

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StoreTold:
        namespaces = self.namespaces | other.namespaces
        counted = self.counted + other.counted
        return StoreTold(namespaces, self.ended + other.ended, self.unsaved | other.unsaved, counted)


@dataclass
class _Asked:
    """A request, until it ends."""

    request: Request
    adapter: bytes | None  # digest; empty without one, None while it is not known
    may_load: bool  # no load of it has failed
    elsewhere: bool  # its KV comes from a prefill server, if it comes
    saved: int = 0  # of its first blocks, or loaded, or kept
    full: int = 0  # of its first blocks, with KV after the last step


class _Run(NamedTuple):
    """Full blocks of a request, with a reference of ours."""

    asked: _Asked
    first: int
    blocks: list[KVCacheBlock]


def _size(runs: Iterable[_Run]) -> int:
    return sum(len(run.blocks) for run in runs)


@dataclass
class _Save:
    runs: list[_Run]
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
        options = StoreOptions(**vllm_config.kv_transfer_config.get_from_extra_config("store_options", {}))
        self.lookups = Lookups(vllm_config.scheduler_config.max_num_seqs, options.lookup_ms, self._block_tokens)
        self._spaces: list[bytes] = []  # by rank
        self._part = b""  # random, from the first reset on
        self._stale = False  # a reset has failed: the namespaces may have KV of before
        self._requests: dict[str, _Asked] = {}
        self._loading: dict[str, list[Hit]] = {}  # by request, until all ranks have reported
        self._saves: dict[int, _Save] = {}  # by number
        self._kept: list[_Run] = []  # to be saved
        self._numbers = count()
        saving, loading, _ = staged_slots(vllm_config, kv_cache_config, [None])
        self._staged = loading.stop > 0
        self.save_slots, self.load_slots = SlotPool(saving), SlotPool(loading)
        self._low = kv_cache_config.num_blocks // 20
        self._quarter = max(1, kv_cache_config.num_blocks // 4)
        self._most = min(self._quarter, len(saving)) if self._staged else self._quarter  # that are saved at once
        self._datadist = start_instance(vllm_config, secrets.randbits(63), None, 0)
        self.pool: BlockPool  # vLLM's
        self._orders = StoreOrders()
        self._events: list[BlockStored] = []
        self.stats = Stats()
        self._lost: dict[str, float] = {}  # since the last line
        self._tell_at = 0.0  # monotonic

    def needs_steps(self) -> bool:
        """Return True until the namespaces are known and all is saved, and while hits are held: a step ends them."""
        return bool(self._saves or self._loading or self._kept or self.lookups.busy or not self._spaces)

    def on_new_request(self, request: Request) -> None:
        if self._stale:
            return
        self._adapters.begin(lora := request.lora_request)
        params = request.kv_transfer_params or {}
        elsewhere = bool(params.get("do_remote_prefill") or FIELD in params)
        asked = _Asked(request, None if lora else b"", not request.skip_reading_prefix_cache, elsewhere)
        self._requests[request.request_id] = asked

    def _find(self, request_id: str) -> _Asked | None:
        """Return a request whose KV may be stored, once its adapter is known."""
        asked = self._requests.get(request_id)
        if asked is None or self._adapters.pending(lora := asked.request.lora_request):
            return asked
        try:
            parts = self._adapters.parts(lora)
        except (OSError, ValueError) as error:
            logger.warning("the KV of request %s is not stored: %s", request_id, error)
            del self._requests[request_id]
            self.lookups.end(request_id)
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
        # vLLM computes the last token in any case.
        first, end = num_computed // self._block_tokens, (request.num_tokens - 1) // self._block_tokens
        if asked is None or not asked.may_load or asked.elsewhere or first >= end:
            return 0
        if asked.adapter is None or (self.load_slots.closed and request.request_id not in self.lookups.busy):
            return None
        hits = self.lookups.find(request.request_id, first, partial(self._keys, asked, first, end))
        if not hits:
            return None if hits is None else 0
        blocks = len(hits[0])
        if self._staged and not self.load_slots.take(request.request_id, [(first, first + blocks)]):
            return None
        return blocks * self._block_tokens

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        first, hits = self.lookups.take(request.request_id)
        if (asked := self._requests.get(request.request_id)) is not None:
            asked.elsewhere, asked.full = False, 0
        if asked is None or not hits or not num_external:  # perhaps another connector loads
            self.lookups.release(hits)
            return
        asked.saved = first + len(hits[0])
        numbers = blocks.get_block_ids()[0][first : asked.saved]
        slots = self.load_slots.held[request.request_id][0][1] if self._staged else []
        self._orders.loads[request.request_id] = [hit.to_bytes() for hit in hits], numbers, slots
        self._loading[request.request_id] = hits

    def finished(self, request: Request, block_ids: Sequence[list[int]]) -> tuple[bool, None]:
        """Forget a request, but for blocks that are to be saved; vLLM keeps those of a load until it is reported."""
        self.lookups.end(request.request_id)
        asked = self._requests.pop(request.request_id, None)
        if asked is not None:
            numbers = block_ids[0][asked.saved : asked.full]
            if kept := numbers[: self._quarter - _size(self._kept)]:
                self._kept.append(self._hold(asked, kept))
            self._count(lost_crowded_blocks=len(numbers) - len(kept))
        return False, None

    # --- saves --------------------------------------------------------------------------------------------------------

    def take_orders(self, step: SchedulerOutput) -> StoreOrders:
        """Return the orders of a step; they save the blocks that it completes, and those that are kept."""
        self.load_slots.closed = False
        for request_id in self.load_slots.held.keys() - self._loading.keys():
            self.load_slots.free(request_id)  # it got no blocks: who waits for them must keep no slots
        orders, self._orders = self._orders, StoreOrders()
        orders.part = self._part
        self.lookups.sweep()
        self._sum_up()
        stuck = self._requests and not (step.num_scheduled_tokens or self._loading or self.lookups.busy)
        if stuck or self.pool.get_num_free_blocks() < self._low:
            self._count(lost_needed_blocks=_size(self._kept))
            self._free(self._kept)
        if self._spaces and (runs := self._choose(step)):
            wanted: dict[bytes, int] = {}  # block of each key
            for run in runs:
                keys = self._keys(run.asked, run.first, run.first + len(run.blocks))
                wanted |= zip(keys, (each.block_id for each in run.blocks), strict=True)
            number = next(self._numbers)
            self._saves[number] = _Save(runs)
            slots = self.save_slots.take(str(number), [(0, len(wanted))])[0][1] if self._staged else []
            orders.save = number, list(wanted), list(wanted.values()), slots
        return orders

    def _choose(self, step: SchedulerOutput) -> list[_Run]:
        """Return what there is room for, first of what is kept."""
        room = self._most - sum(_size(each.runs) for each in self._saves.values())
        runs: list[_Run] = []
        while room and self._kept:
            run = self._kept.pop(0)
            if rest := run.blocks[room:]:
                self._kept.insert(0, _Run(run.asked, run.first + room, rest))
            runs.append(run._replace(blocks=run.blocks[:room]))
            room -= len(runs[-1].blocks)
        state = step.kv_connector_block_state
        for request_id, tokens in step.num_scheduled_tokens.items() if state else ():
            if (asked := self._find(request_id)) is None or asked.adapter is None:
                continue
            # Tokens that a step guesses have no hash yet.
            full = (asked.request.num_computed_tokens + tokens) // self._block_tokens
            asked.full = min(full, len(asked.request.block_hashes))
            if numbers := state.resolve_block_ids(request_id)[0][asked.saved : asked.full][:room]:
                runs.append(self._hold(asked, numbers))
                room -= len(numbers)
        return runs

    def _hold(self, asked: _Asked, numbers: list[int]) -> _Run:
        """Return the next blocks of a request, with a reference of ours."""
        run = _Run(asked, asked.saved, [self.pool.blocks[each] for each in numbers])
        self.pool.touch(run.blocks)
        asked.saved += len(numbers)
        return run

    def _free(self, runs: list[_Run]) -> None:
        self.pool.free_blocks([block for run in runs for block in reversed(run.blocks)])
        runs.clear()

    def _event(self, run: _Run) -> BlockStored:
        request, first, end = run.asked.request, run.first, run.first + len(run.blocks)
        hashes = [maybe_convert_block_hash(each) for each in request.block_hashes[max(0, first - 1) : end]]
        lora, size, extra, image = request.lora_request, self._block_tokens, list[Any](), 0
        for begin in range(first * size, end * size, size):
            keys, image = generate_block_hash_extra_keys(request, begin, begin + size, image)
            extra.append(keys)
        return BlockStored(
            block_hashes=hashes[1 if first else 0 :],
            parent_block_hash=hashes[0] if first else None,
            token_ids=list(request.all_token_ids[first * size : end * size]),
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(extra),
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
            if told.namespaces:
                self._spaces = [space for _, space in sorted(told.namespaces.items())]
                self.lookups.use(client_of(self._config, self._datadist, self._spaces, self._part, 0))
            self._count(**told.counted)
            for number, ranks in told.ended.items():
                self._end_save(number, ranks, failed=number in told.unsaved)
        for request_id in output.finished_recving or ():
            if (hits := self._loading.pop(request_id, None)) is not None:
                self.lookups.release(hits)
                self.load_slots.free(request_id)
                asked = self._requests.get(request_id)
                failed = request_id in output.failed_recving
                self._count(failed_loads=failed, loaded_tokens=0 if failed else len(hits[0]) * self._block_tokens)
                if asked is not None and failed:
                    asked.may_load, asked.saved = False, 0
        self._sum_up()

    def _end_save(self, number: int, ranks: int, *, failed: bool) -> None:
        save = self._saves[number]
        save.ranks += ranks
        save.failed |= failed
        if save.ranks < len(self._spaces):
            return
        del self._saves[number]
        self.save_slots.free(str(number))
        if not save.failed:
            self._count(saved_blocks=_size(save.runs))
            self._events += map(self._event, save.runs if self._tells else ())
        self._free(save.runs)

    def reset(self) -> bool:
        """Let no KV of before be found again; return False without the store's answer, or if transfers run.

        Requests of before are neither looked up nor saved any more: they may have KV of before. Nor are others until a
        reset returns True: a save that ran may have ended after the store was emptied.
        """
        self._free(self._kept)
        self._requests.clear()
        client = self.lookups.client
        self._stale = client is None or not client.clear() or bool(self._saves or self._loading)
        if self._stale:
            logger.warning("the store is not used until a reset succeeds: it did not answer, or transfers run")
        elif not self._part:  # what is empty, and this engine's own, is used again: a store has few
            self._part = secrets.token_bytes(16)
            self.lookups.use(client_of(self._config, self._datadist, self._spaces, self._part, 0))
        return not self._stale

    # --- what is counted ----------------------------------------------------------------------------------------------

    def _count(self, **counted: float) -> None:
        for name, number in counted.items():
            self.stats.add(name, number)
            if number and name in LOST:
                self._lost[name] = self._lost.get(name, 0) + number

    def _sum_up(self) -> None:
        """Count what the lookups have counted; at most once a minute, log what was lost."""
        while self.lookups.counted:
            self._count(**dict([self.lookups.counted.popleft()]))
        if self._lost and time.monotonic() >= self._tell_at:
            said = ", ".join(f"{name}={number}" for name, number in sorted(self._lost.items()))
            logger.warning("lost since the last such line: %s", said)
            self._tell_at, self._lost = time.monotonic() + _TELL, {}

    def stop(self) -> None:
        """End the LLMDataDist, then all lookups. Idempotent."""
        self._adapters.stop()
        self._datadist.finalize()
        self.lookups.stop()
