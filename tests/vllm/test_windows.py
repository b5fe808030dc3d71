"""Sliding windows under vLLM's own block managers: the blocks that a decode engine reads are those that it is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from llm_datadist.integrations.references import ReferenceKeys, runtime_secret_file
from llm_datadist.integrations.vllm.layout import Layout, pieces
from llm_datadist.integrations.vllm.offers import FIELD, EndpointMetadata, KvOffer, RankEndpoint
from llm_datadist.integrations.vllm.scheduler import Scheduler

WINDOW = 8
BLOCKS = 64
STAGED = [(False, False), (True, False), (False, True), (True, True)]  # prefill, decode
LOST = -1  # a token's KV that was never computed, or overwritten


class Side:
    """The scheduler's half of an engine, vLLM's block manager, and the token whose KV each place has.

    If it is staged, peers read and write slots.
    """

    def __init__(self, role: str, block: int, *, staged: bool) -> None:
        shape = {"block_size": block, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        specs = SlidingWindowSpec(**shape, sliding_window=WINDOW), FullAttentionSpec(**shape)
        groups = [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)]
        cache = KVCacheConfig(BLOCKS, [KVCacheTensor(BLOCKS, ["layer0", "layer1"], 0, 1)], groups)
        self.block = block
        self.manager = KVCacheManager(cache, 512, block, block, enable_caching=False)
        transfer = SimpleNamespace(
            engine_id=role,
            is_kv_producer=role == "prefill",
            is_kv_consumer=role == "decode",
            get_from_extra_config={"staging": staged, "staging_bytes": BLOCKS}.get,
        )
        config: Any = SimpleNamespace(
            kv_transfer_config=transfer,
            cache_config=SimpleNamespace(block_size=block),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            lora_config=None,
            model_config=SimpleNamespace(max_model_len=64),
        )
        self.scheduler = Scheduler(config, cache)
        self.scheduler.pool = self.manager.block_pool
        self.layout = Layout({}, block, 1, 1, block, [["layer0", "layer1"]], 1, 1, [])
        self.memory = np.full((BLOCKS, block), LOST)
        self.staged, self.read = staged, np.full((BLOCKS, block), LOST) if staged else self.memory

    def request(self, tokens: int, params: dict[str, Any]) -> Request:
        made = Request("one", list(range(tokens)), SamplingParams(max_tokens=1), None)
        made.kv_transfer_params = params
        self.scheduler.on_new_request(made)
        return made

    def places(self, request: Request) -> list[np.ndarray[Any, Any]]:
        """Return for each group the place of each token: (block, index)."""
        found = []
        for blocks in self.manager.get_block_ids(request.request_id):
            tokens = np.arange(len(blocks) * self.block)
            found.append(np.stack([np.asarray(blocks)[tokens // self.block], tokens % self.block]))
        return found

    def compute(self, request: Request, count: int) -> Any:
        """Compute tokens in a step; return its orders."""
        assert self.manager.allocate_slots(request, count) is not None
        state = SimpleNamespace(resolve_block_ids=self.manager.get_block_ids)
        step: Any = SimpleNamespace(
            num_scheduled_tokens={"one": count}, preempted_req_ids=None, kv_connector_block_state=state
        )
        orders = self.scheduler.take_orders(step)
        tokens = np.arange(request.num_computed_tokens, request.num_computed_tokens + count)
        for group, places in enumerate(self.places(request)):
            self.memory[tuple(places[:, tokens])] = tokens + 1000 * group
        for block, slot in orders.saves:
            self.read[slot] = self.memory[block]
        request.num_computed_tokens += count
        return orders

    def overwrite_free(self) -> None:
        """Let others use all blocks that are free, and the null block."""
        for block in self.manager.block_pool.blocks:
            if block.ref_cnt == 0 or block.is_null:
                self.memory[block.block_id] = LOST


def prefilled(side: Side, tokens: int, chunk: int, more: int = 0) -> dict[str, Any] | None:
    """Compute a prompt, and so many tokens after the first one; return its offer."""
    request = side.request(tokens, {"do_remote_decode": True})
    for begin in range(0, tokens, chunk):
        side.compute(request, min(chunk, tokens - begin))
        side.overwrite_free()
    for _ in range(more):
        request.append_output_token_ids(5)
        side.compute(request, 1)
        side.overwrite_free()
    request.append_output_token_ids(5)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    side.manager.remove_skipped_blocks("one", request.num_computed_tokens, tokens)  # as vLLM, before it asks
    blocks = side.manager.get_block_ids_for_computed_tokens("one", request.num_computed_tokens)
    kept, params = side.scheduler.finished(request, blocks)
    assert kept is (params is not None and not side.staged)
    if not kept:
        side.manager.free(request)
    side.overwrite_free()
    return params


def decoded(there: Side, here: Side, tokens: int, params: dict[str, Any]) -> list[list[int]]:
    """Fetch; return for each group what the last token of the prompt reads when it is computed."""
    offer, _ = KvOffer.read(params[FIELD], ReferenceKeys(runtime_secret_file()))
    request = here.request(tokens, params)
    count = here.scheduler.matched_tokens(request, 0)
    assert count is not None
    here.manager.allocate_slots(request, 0, num_external_computed_tokens=count, delay_cache_blocks=True)
    here.scheduler.allocated(request, here.manager.get_blocks("one"), count)
    step: Any = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None, kv_connector_block_state=None)
    orders = here.scheduler.take_orders(step)
    moved = pieces(there.layout, offer.groups, here.layout, orders.fetches["one"])
    here.read.reshape(-1, moved.tokens)[moved.ours] = there.read.reshape(-1, moved.tokens)[moved.theirs]
    for slots, blocks in orders.loads.values():
        here.memory[blocks] = here.read[slots]
    here.overwrite_free()
    request.num_computed_tokens = min(count, tokens - 1)  # vLLM computes the last token in any case
    here.compute(request, tokens - request.num_computed_tokens)
    window, whole = here.places(request)
    seen = window[:, max(0, tokens - WINDOW) : tokens], whole[:, :tokens]
    return [here.memory[tuple(places)].tolist() for places in seen]


def expected(tokens: int) -> list[list[int]]:
    return [list(range(max(0, tokens - WINDOW), tokens)), [1000 + token for token in range(tokens)]]


def engines(there: int, here: int, staged: tuple[bool, bool] = (False, False)) -> tuple[Side, Side]:
    sides = Side("prefill", there, staged=staged[0]), Side("decode", here, staged=staged[1])
    sides[0].scheduler.take_endpoints({(0, 0): EndpointMetadata(RankEndpoint(1, "", "h", 1), sides[0].layout)})
    return sides


@pytest.mark.parametrize(("there", "here"), [(4, 4), (8, 4), (4, 8), (2, 8)])
@pytest.mark.parametrize("chunk", [64, 5])
@pytest.mark.parametrize("staged", STAGED)
def test_the_last_token_reads_its_whole_window(there: int, here: int, chunk: int, staged: tuple[bool, bool]) -> None:
    for tokens in range(2, 42):
        prefill, decode = engines(there, here, staged)
        params = prefilled(prefill, tokens, chunk)
        assert params is not None
        assert decoded(prefill, decode, tokens, params) == expected(tokens)
        if not staged[0]:
            prefill.scheduler.take_output(KVConnectorOutput(finished_sending={"one"}))
            prefill.manager.free(SimpleNamespace(request_id="one"))
        assert prefill.manager.usage == 0


@pytest.mark.parametrize("more", range(1, 9))
@pytest.mark.parametrize("staged", STAGED[:2])
def test_after_more_tokens_an_offer_has_its_whole_window_or_there_is_none(more: int, staged: tuple[bool, bool]) -> None:
    offered = 0
    for tokens in range(2, 42):
        prefill, decode = engines(4, 4, staged)
        params = prefilled(prefill, tokens, 64, more)
        if params is not None:
            offered += 1
            assert decoded(prefill, decode, tokens, params) == expected(tokens)
    assert offered == 40 if staged[0] else 0 < offered < 40


def test_a_prompt_of_one_token_is_not_offered() -> None:
    assert prefilled(engines(4, 4)[0], 1, 64) is None


def test_a_window_whose_first_block_is_overwritten_is_noticed() -> None:
    prefill, decode = engines(4, 4)
    params = prefilled(prefill, 19, 64)  # token 11, the first of the window, ends its block
    assert params is not None
    prefill.memory[params["remote_block_ids"][0][0]] = LOST
    assert decoded(prefill, decode, 19, params) == [[LOST, *range(12, 19)], expected(19)[1]]
