"""Offers of requests to decode engines, and fetches from prefill engines. Gives orders to workers; moves nothing.

| request | effect |
|---|---|
| comes with an offer | workers claim the grants, so that the prefill engine keeps the blocks; not yet in `kv_both` |
| gets blocks | workers fetch the KV into them; in `kv_both` they claim the grants first |
| has all its KV here, or ends without blocks | workers release the grants |
| has its last prompt token computed in this step, to be decoded elsewhere | workers grant its blocks |
| ends with these blocks | they are kept; the answer has the offer |
| is aborted or preempted, or ends with other blocks | workers revoke the grant |

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from llm_datadist.errors import ParamError
from llm_datadist.integrations.references import SECRET_FILE, ReferenceKeys, secret_file
from llm_datadist.integrations.vllm.identity import Adapters
from llm_datadist.integrations.vllm.instance import init_options
from llm_datadist.integrations.vllm.kinds import windows_of
from llm_datadist.integrations.vllm.layout import unsupported
from llm_datadist.integrations.vllm.offers import FIELD, ClaimedRequests, EndpointMetadata, KvOffer, Orders, Targets
from llm_datadist.integrations.vllm.staging import SlotPool, staged_slots
from llm_datadist.integrations.vllm.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


@dataclass(frozen=True)
class _GrantedRequest:
    request: Request
    tokens: int  # of the prompt, then
    groups: Targets
    reference: str


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
        # Until it has blocks or ends: its verified offer and token; empty: refused; None: not verified yet.
        self._asked: dict[str, tuple[KvOffer, bytes] | tuple[()] | None] = {}
        self._prompts: dict[str, Request] = {}  # to be decoded elsewhere: until granted, or ended
        self.granted: dict[str, _GrantedRequest] = {}  # until they end
        self.max_unclaimed = int(option("max_unclaimed_blocks", kv_cache_config.num_blocks // 2))
        self.unclaimed: dict[str, list[int]] = {}  # by request: blocks under a grant without a claim
        self._held: Counter[int] = Counter()  # requests of ``unclaimed`` with the block
        self.pool: BlockPool  # vLLM's
        self._kept: dict[str, list[KVCacheBlock]] = {}  # by offered request: blocks that vLLM had freed
        offering, fetching, _ = staged_slots(vllm_config, kv_cache_config, self._windows)
        self._staged = fetching.stop > 0
        self.offering, self.fetching = SlotPool(offering), SlotPool(fetching)
        self._offered: Counter[str] = Counter()  # handed out from slots: ranks whose grants last
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
        return bool(self._offered or (self._transfer.is_kv_producer and not self.ranks))

    def on_new_request(self, request: Request) -> None:
        asked: dict[str, Any] = params if isinstance(params := request.kv_transfer_params, dict) else {}
        if self._transfer.is_kv_producer and asked.get("do_remote_decode") and request.request_id not in self._offered:
            self._prompts[request.request_id] = request
        self._adapters.begin(request.lora_request)
        if asked.get("do_remote_prefill") or FIELD in asked:
            self._asked[request.request_id] = None
            self._verify(request)

    def _verify(self, request: Request) -> None:
        """Verify the offer of a request, once, when its adapter is known."""
        if self._asked.get(request.request_id, False) is not None or self._adapters.pending(request.lora_request):
            return
        self._asked[request.request_id] = ()
        try:
            offer, token = KvOffer.read((request.kv_transfer_params or {}).get(FIELD), self._keys)
            if self._staged and not self._transfer.is_kv_consumer:
                raise ParamError("reference: an engine that stages KV fetches as kv_consumer or kv_both only")
            if offer.prompt != _prompt_digest(request, self._adapters):
                raise ParamError("reference: of another prompt than this request's")
            self._require_all(offer, request.num_prompt_tokens)
        except ParamError as error:
            logger.error("request %s: %s", request.request_id, error)
        else:
            self._asked[request.request_id] = offer, token
            if not self._transfer.is_kv_producer:
                self._orders.claims[request.request_id] = offer, token

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
        self._verify(request)
        asked = self._asked.get(request.request_id)
        # vLLM computes the last token in any case.
        count = 0 if asked is None else max(0, request.num_prompt_tokens - 1 - num_computed)
        if self._staged and (asked if count else request.request_id in self._prompts):
            slots, have = (self.fetching, num_computed) if count else (self.offering, 0)
            if not slots.take(request.request_id, self._spans(have, request.num_prompt_tokens)):
                return None
        return count

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        if request.request_id not in self._asked:
            return
        if not num_external:
            self._drop(request.request_id)
        elif self._take_claim(request.request_id):  # once for each request
            tokens = request.num_prompt_tokens
            targets = self._needed(blocks.get_block_ids(), tokens - 1 - num_external, tokens)
            if self._staged:
                numbers, targets = _numbers(targets), self.fetching.held[request.request_id]
                self._orders.loads[request.request_id] = _numbers(targets), numbers
            self._orders.fetches[request.request_id] = targets
        else:
            self._orders.refused.append(request.request_id)

    def _take_claim(self, request_id: str) -> bool:
        """Return whether a request has its claim, or now gets it; False if it was refused or not verified."""
        asked = self._asked.pop(request_id)
        if asked and self._transfer.is_kv_producer:
            self._orders.claims[request_id] = asked
        return bool(asked)

    def _drop(self, request_id: str) -> None:
        if self._take_claim(request_id):
            self._orders.drops.append(request_id)
            self.fetching.free(request_id)

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
        if self._prompts.pop(request.request_id, None):
            self.offering.free(request.request_id)
        if request.request_id in self._asked:  # without blocks: the prefill engine need not keep its own
            self._drop(request.request_id)
        if (granted := self.granted.get(request.request_id)) is None:
            return False, None
        ended = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        same = request.num_prompt_tokens == granted.tokens  # not after more input to a streaming session
        kept = granted.groups if self._staged else self._needed(block_ids, 0, granted.tokens)
        freed = {*_numbers(granted.groups)} - {*_numbers(kept)}
        if not (ended and same and (not freed or request.num_output_tokens == 1)):
            self._revoke(request.request_id)
            return False, None
        del self.granted[request.request_id]
        if self._staged:
            self._offered[request.request_id] = len(self.ranks)
        if freed:
            self._kept[request.request_id] = [self.pool.blocks[each] for each in freed]
            self.pool.touch(self._kept[request.request_id])
        self._orders.offered.append(request.request_id)
        if self._beside:  # parts of a MultiConnector may not give the same fields
            return not self._staged, {FIELD: granted.reference}
        return not self._staged, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [numbers for _, numbers in granted.groups],
            "remote_engine_id": self._transfer.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self.ranks[0].host,
            "remote_port": self.ranks[0].port,
            "tp_size": len(self.ranks),
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": granted.tokens,
            "remote_blocks_expiry_time": None,  # processes have different clocks
            "transfer_mode": "pull",
            FIELD: granted.reference,
        }

    def _hold(self, request_id: str, blocks: list[int]) -> bool:
        """Count blocks kept for a reader; return False if they would be too many."""
        if len(self._held) + sum(block not in self._held for block in blocks) > self.max_unclaimed:
            self.stats.add("refused_offers")
            return False
        self.unclaimed[request_id] = blocks
        self._held.update(blocks)
        return True

    def take_output(self, output: KVConnectorOutput) -> None:
        """Forget requests whose grants were claimed or have ended."""
        told, sent = output.kv_connector_worker_meta, output.finished_sending or ()
        told = told if isinstance(told, ClaimedRequests) else ClaimedRequests()
        if told.endpoints and not self.ranks:
            self.take_endpoints(told.endpoints)
            self._beside = True
        for request_id in {*told.requests, *sent}:
            self._let_go(request_id)
        for request_id in sent:
            if kept := self._kept.pop(request_id, None):
                self.pool.free_blocks(kept)
        for request_id in output.finished_recving or ():
            self.fetching.free(request_id)
        self._offered -= told.ended
        for request_id in told.ended.keys() - self._offered.keys():
            self.offering.free(request_id)

    def _let_go(self, request_id: str) -> None:
        self._held -= Counter(self.unclaimed.pop(request_id, ()))

    def take_orders(self, step: SchedulerOutput) -> Orders:
        """Return the orders of a step; they grant the prompts that it completes."""
        for request_id in step.preempted_req_ids or ():
            if request_id in self._prompts:
                self.offering.free(request_id)
            elif request_id in self.granted:  # granted anew, with another token, once it is computed again
                self._prompts[request_id] = self._revoke(request_id)
        block_state = step.kv_connector_block_state
        for request_id in [each for each in step.num_scheduled_tokens if each in self._prompts] if block_state else ():
            request = self._prompts[request_id]
            computed = request.num_computed_tokens + step.num_scheduled_tokens[request_id]
            block_ids = block_state.resolve_block_ids(request_id)
            if self._staged:
                self._save(request, computed, block_ids)
            if computed >= request.num_prompt_tokens:
                self._grant(self._prompts.pop(request_id), block_ids)
        self.offering.closed = self.fetching.closed = False
        orders, self._orders = self._orders, Orders()
        return orders

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

    def _grant(self, request: Request, block_ids: Sequence[list[int]]) -> None:
        prompt, tokens = _prompt_digest(request, self._adapters), request.num_prompt_tokens
        held = self.offering.held.get(request.request_id, [])
        groups = held if self._staged else self._needed(block_ids, 0, tokens)
        blocks = _numbers(groups) if self.ranks else []
        if prompt is None or not blocks or not (self._staged or self._hold(request.request_id, blocks)):
            self.offering.free(request.request_id)
            return
        reference, token = KvOffer(prompt, groups, self.ranks, self._layout).sign(self._keys)
        self.granted[request.request_id] = _GrantedRequest(request, tokens, groups, reference)
        self._orders.grants[request.request_id] = token, blocks

    def _revoke(self, request_id: str) -> Request:
        self._orders.revokes.append(request_id)
        self.offering.free(request_id)
        self._let_go(request_id)
        return self.granted.pop(request_id).request


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
