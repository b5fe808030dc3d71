"""Offers of requests to decode engines, and fetches from prefill engines. Gives orders to workers; moves nothing.

`request_states.py` has the states of a request, all transitions, and the orders on each.

A grant is given during the step that writes its last bytes, and its token is in the offer only. vLLM hands the offer
out with that step's output or a later one, which exists once every rank has run the step. So whoever has a token finds
all grants given, and all bytes written; a grant that is revoked was never named to anybody.

Blocks under a claim wait for the reader's own. Two `kv_both` engines that read each other could wait for ever, so there
a claim waits for nothing: until then an offer lasts its lease, and offers are bounded.

A decode engine fetches the prompt but its last token, which it computes, and so needs the window of that one. By the
request's end vLLM may have freed blocks of it. After one new token they were freed right before that end, and are kept
by a reference of our own; after more, no offer is handed out.

HTTP clients write ``kv_transfer_params``: references are verified here, before anything is spent on them. A request
with a refused one is parked without a fetch, and workers report it as failed in the same step.

Threads: one, vLLM's.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from llm_datadist.errors import ParamError
from llm_datadist.integrations.references import SECRET_FILE, ReferenceKeys, secret_file
from llm_datadist.integrations.request_states import HANDED_OUT, UNCLAIMED, WAITING, Event, Fetch, Offer, RequestStates
from llm_datadist.integrations.vllm.identity import Adapters
from llm_datadist.integrations.vllm.instance import init_options
from llm_datadist.integrations.vllm.kinds import windows_of
from llm_datadist.integrations.vllm.layout import unsupported
from llm_datadist.integrations.vllm.offers import FIELD, ClaimedRequests, EndpointMetadata, KvOffer, Orders, Targets
from llm_datadist.integrations.vllm.staging import SlotPool, staged_slots
from llm_datadist.integrations.vllm.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from llm_datadist.integrations.vllm.layout import Layout
    from llm_datadist.integrations.vllm.offers import RankEndpoint

logger = init_logger("vllm.datadist.scheduler")


@dataclass(eq=False, kw_only=True)
class Tracked(RequestStates):
    """A request, until it ends; its fetch or offer may outlive it, and an offer may meet the next request of its id."""

    request: Request
    source: tuple[KvOffer, bytes] = field(init=False, repr=False)  # from VERIFIED on: the offer to fetch, and its token
    tokens: int = 0  # from GRANTED on: of the prompt
    groups: Targets = field(default_factory=list)
    reference: str = ""
    kept: list[KVCacheBlock] = field(default_factory=list)  # from OFFERED on: blocks that vLLM had freed
    ranks: int = 0  # whose grants last


class Scheduler:
    """The connector's half in the scheduler."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._transfer = vllm_config.kv_transfer_config
        self._block_tokens = vllm_config.cache_config.block_size
        self._cache_config = kv_cache_config
        self._windows = windows_of(kv_cache_config)
        option = self._transfer.get_from_extra_config
        self._keys = ReferenceKeys(*secret_file(option(SECRET_FILE, None), init_options(vllm_config)))
        self._adapters = Adapters(vllm_config.lora_config)
        self.ranks: list[RankEndpoint] = []  # empty: this engine offers nothing
        self._beside = False  # other parts of a MultiConnector
        self._layout: Layout
        self.requests: dict[str, Tracked] = {}
        self.max_unclaimed = int(option("max_unclaimed_blocks", kv_cache_config.num_blocks // 2))
        self.unclaimed: Counter[int] = Counter()  # by block: its requests with a grant without a claim
        self.pool: BlockPool  # vLLM's
        offering, fetching, _ = staged_slots(vllm_config, kv_cache_config, self._windows)
        self._staged = fetching.stop > 0
        self.offering, self.fetching = SlotPool(offering), SlotPool(fetching)
        self._orders = Orders()
        self.stats = Stats()

    def take_endpoints(self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Take the workers' endpoints, by (pipeline rank, tensor-parallel rank)."""
        found = [each for _, each in sorted(metadata.items()) if isinstance(each, EndpointMetadata)]
        for each in found:
            if each.layout != found[0].layout:
                raise unsupported("ranks of different layouts")
            self._layout = each.layout
        self.ranks = [each.endpoint for each in found]

    def needs_steps(self) -> bool:
        """Return True until the endpoints are known, and while slots are offered."""
        offered = self._staged and any(each.offer in HANDED_OUT for each in self.requests.values())
        return offered or bool(self._transfer.is_kv_producer and not self.ranks)

    def _fire(self, tracked: Tracked, event: Event) -> bool:
        """Take a transition; end what the new states do not have. Return False if the states do not name the event."""
        was_unclaimed, request_id = tracked.offer in UNCLAIMED, tracked.request.request_id
        changed = tracked.fire(event)
        if was_unclaimed and tracked.offer not in UNCLAIMED:
            self.unclaimed -= Counter(_numbers(tracked.groups))
        if tracked.fetch is Fetch.NONE:
            self.fetching.free(request_id)
        if tracked.offer is Offer.NONE:
            self.offering.free(request_id)
        if tracked.fetch is Fetch.NONE and tracked.offer is Offer.NONE:
            self.requests.pop(request_id, None)
        return changed

    def on_new_request(self, request: Request) -> None:
        asked: dict[str, Any] = params if isinstance(params := request.kv_transfer_params, dict) else {}
        self._adapters.begin(request.lora_request)
        tracked = self.requests.setdefault(request.request_id, Tracked(request=request))
        tracked.request = request
        if self._transfer.is_kv_producer and asked.get("do_remote_decode"):
            tracked.fire(Event.NAME_READER)
        if asked.get("do_remote_prefill") or FIELD in asked:
            tracked.fire(Event.NAME_OFFER)
            self._verify(tracked)

    def _verify(self, tracked: Tracked) -> None:
        """Verify the offer of a request, once, when its adapter is known."""
        request = tracked.request
        if tracked.fetch is not Fetch.UNVERIFIED or self._adapters.pending(request.lora_request):
            return
        try:
            offer, token = KvOffer.read((request.kv_transfer_params or {}).get(FIELD), self._keys)
            if self._staged and not self._transfer.is_kv_consumer:
                raise ParamError("reference: an engine that stages KV fetches as kv_consumer or kv_both only")
            if offer.prompt != _prompt_digest(request, self._adapters):
                raise ParamError("reference: of another prompt than this request's")
            self._require_all(offer, request.num_prompt_tokens)
        except ParamError as error:
            logger.error("request %s: %s", request.request_id, error)
            tracked.fire(Event.REFUSE)
        else:
            tracked.source = offer, token
            tracked.fire(Event.VERIFY)
            if not self._transfer.is_kv_producer:
                self._orders.claims[request.request_id] = tracked.source

    def _require_all(self, offer: KvOffer, tokens: int) -> None:
        """Raise ParamError unless an offer has all that the last of so many tokens reads."""
        size = offer.layout.block_tokens
        if len(offer.groups) != len(self._windows):
            raise ParamError(f"reference: of {len(offer.groups)} groups of layers, not of {len(self._windows)}")
        for window, (first, blocks) in zip(self._windows, offer.groups, strict=True):
            begin = 0 if window is None else max(0, tokens - window)
            if first * size > begin or (first + len(blocks)) * size < tokens - 1:
                raise ParamError(f"reference: lacks some of tokens {begin} to {tokens - 1} of the request")

    def matched_tokens(self, request: Request, num_computed: int) -> int | None:
        """Return how many tokens a fetch would add to the computed ones; None to wait for slots, or for an adapter."""
        if self._adapters.pending(request.lora_request):
            return None
        if (tracked := self.requests.get(request.request_id)) is None:
            return 0
        self._verify(tracked)
        # vLLM computes the last token in any case.
        count = max(0, request.num_prompt_tokens - 1 - num_computed) if tracked.fetch in WAITING else 0
        if self._staged and (tracked.fetch is Fetch.VERIFIED if count else tracked.offer is Offer.COMPUTING):
            slots, have = (self.fetching, num_computed) if count else (self.offering, 0)
            if not slots.take(request.request_id, self._spans(have, request.num_prompt_tokens)):
                return None
        return count

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        tracked = self.requests.get(request.request_id)
        if tracked is None or tracked.fetch not in WAITING:
            return
        if not num_external:
            self._skip(tracked)
        elif self._claim(tracked, Event.ALLOCATE):
            tokens = request.num_prompt_tokens
            targets = self._needed(blocks.get_block_ids(), tokens - 1 - num_external, tokens)
            if self._staged:
                numbers, targets = _numbers(targets), self.fetching.held[request.request_id]
                self._orders.loads[request.request_id] = _numbers(targets), numbers
            self._orders.fetches[request.request_id] = targets
        else:
            self._orders.refused.append(request.request_id)

    def _claim(self, tracked: Tracked, event: Event) -> bool:
        """Take the end of a wait for blocks; return True if the request has its claim, or now gets it."""
        verified = tracked.fetch is Fetch.VERIFIED
        if verified and self._transfer.is_kv_producer:
            self._orders.claims[tracked.request.request_id] = tracked.source
        self._fire(tracked, event)
        return verified

    def _skip(self, tracked: Tracked) -> None:
        if self._claim(tracked, Event.SKIP):  # the prefill engine need not keep its blocks
            self._orders.drops.append(tracked.request.request_id)

    def _needed(self, block_ids: Sequence[list[int]], have: int, tokens: int) -> Targets:
        """Return the blocks that the last of so many tokens reads, from token ``have`` on."""
        groups = self._cache_config.select_transfer_block_ids(block_ids)
        spans = self._spans(have, tokens)
        return [(first, list(numbers[first:end])) for (first, end), numbers in zip(spans, groups, strict=True)]

    def _spans(self, have: int, tokens: int) -> list[tuple[int, int]]:
        """Return for each group, by index in the request, the first and the end of these blocks."""
        begins = (have if window is None else max(have, tokens - window) for window in self._windows)
        return [(begin // self._block_tokens, -((1 - tokens) // self._block_tokens)) for begin in begins]

    def finished(self, request: Request, block_ids: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Hand out the offer of a granted request; return (keep its blocks, the params)."""
        if (tracked := self.requests.get(request.request_id)) is None:
            return False, None
        self._skip(tracked)
        freed = self._freed(tracked, request, block_ids) if tracked.offer is Offer.GRANTED else None
        if freed is None:
            self._withdraw(tracked, Event.WITHDRAW)
            return False, None
        tracked.kept = [self.pool.blocks[each] for each in freed]
        if tracked.kept:
            self.pool.touch(tracked.kept)
        tracked.ranks = len(self.ranks) if self._staged else 1  # else vLLM counts them
        self._fire(tracked, Event.HAND_OUT)
        self._orders.offered.append(request.request_id)
        return not self._staged, self._params(tracked)

    def _freed(self, granted: Tracked, request: Request, block_ids: Sequence[list[int]]) -> set[int] | None:
        """Return granted blocks that vLLM has freed; None if this end of the request lets nothing be offered."""
        ended = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        same = request.num_prompt_tokens == granted.tokens  # not after more input to a streaming session
        kept = granted.groups if self._staged else self._needed(block_ids, 0, granted.tokens)
        freed = {*_numbers(granted.groups)} - {*_numbers(kept)}
        return freed if ended and same and (not freed or request.num_output_tokens == 1) else None

    def _params(self, tracked: Tracked) -> dict[str, Any]:
        if self._beside:  # parts of a MultiConnector may not give the same fields
            return {FIELD: tracked.reference}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [numbers for _, numbers in tracked.groups],
            "remote_engine_id": self._transfer.engine_id,
            "remote_request_id": tracked.request.request_id,
            "remote_host": self.ranks[0].host,
            "remote_port": self.ranks[0].port,
            "tp_size": len(self.ranks),
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tracked.tokens,
            "remote_blocks_expiry_time": None,  # processes have different clocks
            "transfer_mode": "pull",
            FIELD: tracked.reference,
        }

    def take_output(self, output: KVConnectorOutput) -> None:
        """Forget requests whose fetches or grants have ended."""
        told, sent = output.kv_connector_worker_meta, output.finished_sending or ()
        told = told if isinstance(told, ClaimedRequests) else ClaimedRequests()
        if told.endpoints and not self.ranks:
            self.take_endpoints(told.endpoints)
            self._beside = True
        for tracked in self._known(told.requests):
            self._fire(tracked, Event.CLAIM)
        for tracked in self._known(output.finished_recving or ()):
            self._fire(tracked, Event.REPORT)
        ended = told.ended if self._staged else Counter(sent)
        for tracked in self._known(ended):
            tracked.ranks -= ended[tracked.request.request_id]
            if tracked.ranks <= 0 and self._fire(tracked, Event.RELEASE) and tracked.kept:
                self.pool.free_blocks(tracked.kept)

    def _known(self, request_ids: Iterable[str]) -> list[Tracked]:
        return [self.requests[each] for each in request_ids if each in self.requests]

    def take_orders(self, step: SchedulerOutput) -> Orders:
        """Return the orders of a step; they grant the prompts that it completes."""
        for tracked in self._known(step.preempted_req_ids or ()):
            self._withdraw(tracked, Event.PREEMPT)  # granted anew, with another token, once it is computed again
        state = step.kv_connector_block_state
        for tracked in self._known(step.num_scheduled_tokens) if state else ():
            if tracked.offer is Offer.COMPUTING:
                request = tracked.request
                computed = request.num_computed_tokens + step.num_scheduled_tokens[request.request_id]
                block_ids = state.resolve_block_ids(request.request_id)
                if self._staged:
                    self._save(request, computed, block_ids)
                if computed >= request.num_prompt_tokens:
                    self._grant(tracked, block_ids)
        self.offering.closed = self.fetching.closed = False
        orders, self._orders = self._orders, Orders()
        return orders

    def _withdraw(self, tracked: Tracked, event: Event) -> None:
        if tracked.offer is Offer.GRANTED:
            self._orders.revokes.append(tracked.request.request_id)
        if self._fire(tracked, event):
            self.offering.free(tracked.request.request_id)

    def stop(self) -> None:
        self._adapters.stop()

    def _save(self, request: Request, computed: int, block_ids: Sequence[list[int]]) -> None:
        """Order copies of the blocks that this step completes, if the request has slots, or now gets them.

        vLLM lets no request wait for slots that reads no prefix cache, or had a fetch.
        """
        tokens, size = request.num_prompt_tokens, self._block_tokens
        if self.offering.take(request.request_id, self._spans(0, tokens)):
            end = computed // size if computed < tokens else -((1 - tokens) // size)
            groups = self._cache_config.select_transfer_block_ids(block_ids)
            self._orders.saves += self.offering.save(request.request_id, groups, end)
        else:
            self.stats.add("refused_offers", computed >= tokens)

    def _grant(self, tracked: Tracked, block_ids: Sequence[list[int]]) -> None:
        request, tokens = tracked.request, tracked.request.num_prompt_tokens
        prompt = _prompt_digest(request, self._adapters)
        held = self.offering.held.get(request.request_id, [])
        groups = held if self._staged else self._needed(block_ids, 0, tokens)
        blocks = _numbers(groups) if self.ranks else []
        if prompt is None or not blocks or not (self._staged or self._count_unclaimed(blocks)):
            self._fire(tracked, Event.WITHDRAW)
            return
        tracked.reference, token = KvOffer(prompt, groups, self.ranks, self._layout).sign(self._keys)
        tracked.tokens, tracked.groups = tokens, groups
        self._fire(tracked, Event.GRANT)
        self._orders.grants[request.request_id] = token, blocks

    def _count_unclaimed(self, blocks: list[int]) -> bool:
        """Count blocks kept for a reader; return False if they would be too many."""
        if len(self.unclaimed) + sum(block not in self.unclaimed for block in blocks) > self.max_unclaimed:
            self.stats.add("refused_offers")
            return False
        self.unclaimed.update(blocks)
        return True


def _numbers(groups: Targets) -> list[int]:
    return [block for _, numbers in groups for block in numbers]


def _prompt_digest(request: Request, adapters: Adapters) -> bytes | None:
    """Return a digest of everything that determines a prompt's KV in an engine; None if not all of it is known."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return None
    images = [each.identifier for each in request.mm_features]
    try:
        said = [request.prompt_token_ids, adapters.parts(request.lora_request), images, request.cache_salt]
        return hashlib.blake2b(msgspec.msgpack.encode(said), digest_size=16).digest()
    except (OSError, ValueError, TypeError, OverflowError) as error:
        logger.warning("the KV of request %s cannot be named: %s", request.request_id, error)
        return None
