"""Which requests are offered to decode engines, and which are fetched from prefill engines.

Runs in the scheduler's process and moves nothing: it gives its workers orders. One thread, vLLM's.

| request | what happens here |
|---|---|
| comes with an offer | its workers claim the grants, so that the prefill engine keeps the blocks |
| has got blocks | its workers fetch the KV into them; vLLM parks the request until they report it |
| has all its KV here already, or ends before it got blocks | its workers release the grants |
| ends, and is to be decoded elsewhere | its blocks are granted and kept; the answer has the offer |

An offer that cannot be used is found by the worker. It then reports the request as failed: vLLM's
``kv_load_failure_policy`` says what follows.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from llm_datadist.integrations.vllm.layout import unsupported
from llm_datadist.integrations.vllm.offers import (
    VERSION,
    Claim,
    Endpoint,
    EndpointMetadata,
    Offer,
    OfferedBlocks,
    Orders,
    prompt_digest,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["Scheduler"]

DEFAULT_LEASE_S: Final = 30.0


class Scheduler:
    """The connector's half in the scheduler."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._engine_id = transfer.engine_id
        self._lease_s = float(transfer.get_from_extra_config("lease_s", DEFAULT_LEASE_S))
        self._block_tokens = vllm_config.cache_config.block_size
        self._parallel = vllm_config.parallel_config
        self._cache_config = kv_cache_config
        self._windows = [_window(kv_cache_config, group) for group in kv_cache_config.transfer_group_ids]
        self._ranks: list[Endpoint] = []
        self._orders = Orders()

    def take_endpoints(self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Learn where the workers listen, by (pipeline rank, tensor-parallel rank)."""
        ranks = {}
        for (pipeline, rank), each in metadata.items():
            if pipeline or not isinstance(each, EndpointMetadata):
                raise unsupported("pipeline parallelism")
            ranks[rank] = msgspec.msgpack.decode(each.endpoint, type=Endpoint)
        self._ranks = [ranks[rank] for rank in range(len(ranks))]

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            self._orders.claims[request.request_id] = Claim(params, prompt_digest(request))

    def matched_tokens(self, request: Request, num_computed: int) -> int:
        """Return how many tokens a fetch would bring, beyond those that are computed."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0
        return max(0, request.num_prompt_tokens - num_computed)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # one fetch for each request
        if not num_external:
            self._orders.drops.append(request.request_id)
            return
        have = request.num_prompt_tokens - num_external
        targets = []
        chosen = self._cache_config.select_transfer_block_ids(blocks.get_block_ids())
        for window, numbers in zip(self._windows, chosen, strict=True):
            first, last = self._needed(window, have, request.num_prompt_tokens)
            targets.append((first, numbers[first:last]))
        self._orders.fetches[request.request_id] = targets

    def _needed(self, window: int | None, have: int, tokens: int) -> tuple[int, int]:
        """Return the first and last + 1 block that a group needs, for tokens ``have`` to ``tokens``."""
        first, last = have // self._block_tokens, -(-tokens // self._block_tokens)
        if window is not None:
            first = max(first, (tokens - window) // self._block_tokens)
        return first, last

    def finished(self, request: Request, block_ids: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Offer the blocks of a request that is to be decoded elsewhere; return (keep them, the params)."""
        params = request.kv_transfer_params
        if not params:
            return False, None
        if params.get("do_remote_prefill"):  # it never got blocks: the prefill engine need not keep its own
            self._orders.drops.append(request.request_id)
            params["do_remote_prefill"] = False
            return False, None
        if not params.get("do_remote_decode"):
            return False, None
        done = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        prompt = prompt_digest(request)
        if request.status not in done or prompt is None:
            return False, None
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        groups = []
        for window, numbers in zip(self._windows, self._cache_config.select_transfer_block_ids(block_ids), strict=True):
            first, last = self._needed(window, 0, tokens)
            groups.append(OfferedBlocks(first, list(numbers[first:last])))
        if not any(each.numbers for each in groups):
            return False, None
        offer = Offer(VERSION, secrets.token_hex(16), prompt, tokens, groups, self._ranks, self._lease_s)
        numbers = [each.numbers for each in groups]
        self._orders.grants[request.request_id] = (offer.token(prompt), numbers)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": numbers,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self._ranks[0].host,
            "remote_port": self._ranks[0].port,
            "tp_size": self._parallel.tensor_parallel_size,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,  # clocks of two processes cannot be compared: lease_s says what is left
            "transfer_mode": "pull",
            "datadist": msgspec.to_builtins(offer),
        }

    def take_orders(self) -> Orders:
        """Return the orders for this step."""
        orders, self._orders = self._orders, Orders()
        return orders


def _window(kv_cache_config: KVCacheConfig, group: int) -> int | None:
    """Return the tokens that a group looks back; None for all. Raises LLMException for a kind that is not supported."""
    spec = kv_cache_config.kv_cache_groups[group].kv_cache_spec
    if isinstance(spec, SlidingWindowSpec):
        return spec.sliding_window
    if isinstance(spec, FullAttentionSpec):
        return None
    raise unsupported(f"layers of kind {type(spec).__name__}")
