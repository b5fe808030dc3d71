"""Both halves of the store connector without an engine: which engines are refused, and what each request leaves."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as PromCounter
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import Request

from llm_datadist import LLMDataDist
from llm_datadist.errors import LLMException, ParamError
from llm_datadist.integrations.vllm import (
    LLMDataDistConnector,
    LLMDataDistStoreConnector,
    connector,
    identity,
    store_scheduler,
)
from llm_datadist.integrations.vllm.connector import TRIED
from llm_datadist.integrations.vllm.layout import Layout
from llm_datadist.integrations.vllm.rank import at_once
from llm_datadist.integrations.vllm.store_scheduler import StoreOrders, StoreScheduler, StoreTold
from llm_datadist.integrations.vllm.store_worker import StoreWorker, namespace_of
from llm_datadist.integrations.weights import digest_of
from tests.support.double_store import Double
from tests.support.moves import wait_until
from tests.support.source import ROOT
from tests.vllm.test_layouts import configured, spec_of
from tests.vllm.test_requests import adapter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKENS, BLOCKS, MOST = 4, 40, 3
RECOMPUTE: dict[str, Any] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


# --- refused engines --------------------------------------------------------------------------------------------------


def storable(specs: list[Any], extra: dict[str, Any], algorithm: str, **transfer: Any) -> tuple[Any, Any]:
    """Return the configuration of an engine, and its cache."""
    config, cache = configured(specs)
    config.cache_config = SimpleNamespace(prefix_caching_hash_algo=algorithm)
    config.speculative_config = None
    config.kv_transfer_config = SimpleNamespace(get_from_extra_config=lambda name, other=None: extra.get(name, other))
    for name, value in (RECOMPUTE | transfer).items():
        setattr(config.kv_transfer_config, name, value)
    return config, cache


GOOD: dict[str, Any] = {"extra": {"store": "127.0.0.1:1"}, "algorithm": "sha256_cbor"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"extra": {}}, r'store: "IP:PORT" .* is needed'),
    ({"kv_role": "kv_producer"}, "kv_role=kv_producer: must be kv_both"),
    ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy=fail: must be recompute"),
    ({"algorithm": "xxhash"}, "prefix_caching_hash_algo=xxhash: its seed is random"),
    ({"algorithm": "xxhash_cbor"}, "prefix_caching_hash_algo=xxhash_cbor: its seed is random"),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_an_engine_that_cannot_share_is_refused_in_one_sentence(change: dict[str, Any], said: str) -> None:
    config, cache = storable([spec_of()], **GOOD | change)
    with pytest.raises(LLMException, match=said) as refused, set_current_vllm_config(config, check_compile=False):
        LLMDataDistStoreConnector(config, KVConnectorRole.WORKER, cache)
    assert "\n" not in str(refused.value)
    assert LLMDataDist.llm_engine_instance is None, "a pool was made"


@pytest.mark.parametrize("role", KVConnectorRole)
@pytest.mark.parametrize(
    "specs",
    [[spec_of(), spec_of(SlidingWindowSpec, sliding_window=64)], [spec_of(SlidingWindowSpec, sliding_window=64)]],
)
def test_only_one_group_of_full_attention_is_served(role: KVConnectorRole, specs: list[Any]) -> None:
    config, cache = storable(specs, **GOOD)
    with pytest.raises(LLMException, match="only one group of full attention or MLA"):
        LLMDataDistStoreConnector(config, role, cache)
    assert LLMDataDist.llm_engine_instance is None, "a pool was made"


# --- identity ---------------------------------------------------------------------------------------------------------

LAYOUT = Layout({"weights": "w", "rope": "r"}, 16, 1, 2, 64, [["layer"]], 1, 1, [])
CHANGES: dict[str, dict[str, Any]] = {
    "weights": {"identity": {"weights": "other", "rope": "r"}},
    "rope": {"identity": {"weights": "w", "rope": "other"}},
    "block size": {"block_tokens": 32},
    "heads": {"heads": 1},
    "ranks": {"ranks": 2},
    "layers": {"places": [["other"]]},
}


def named(layout: Layout = LAYOUT, rank: int = 0, algorithm: str = "sha256_cbor", salt: str = "") -> bytes:
    return namespace_of(storable([spec_of()], {"salt": salt}, algorithm)[0], layout, rank)


@pytest.mark.parametrize("change", CHANGES)
def test_another_layout_or_identity_is_another_namespace(change: str) -> None:
    fields = {name: getattr(LAYOUT, name) for name in Layout.__struct_fields__}
    assert named(Layout(**fields)) == named()
    assert named(Layout(**fields | CHANGES[change])) != named()


def test_rank_salt_algorithm_and_seed_are_part_of_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Layout(**{name: getattr(LAYOUT, name) for name in Layout.__struct_fields__} | {"ranks": 2})
    found = {named(), named(two), named(two, rank=1), named(salt="tenant"), named(algorithm="sha256")}
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert len(found | {named()}) == 6


def test_the_order_of_an_identity_does_not_matter() -> None:
    fields = {name: getattr(LAYOUT, name) for name in Layout.__struct_fields__}
    assert named(Layout(**fields | {"identity": {"rope": "r", "weights": "w"}})) == named()


# --- requests ---------------------------------------------------------------------------------------------------------


def make_scheduler(monkeypatch: pytest.MonkeyPatch, **extra: Any) -> StoreScheduler:
    """``extra``: options, as of a rank whose KV is staged."""
    monkeypatch.setattr(store_scheduler, "StoreClient", Double)
    init_none_hash(sha256_cbor)
    config, cache = storable([spec_of()], **GOOD | {"extra": GOOD["extra"] | extra})
    config.kv_transfer_config.is_kv_producer = config.kv_transfer_config.is_kv_consumer = True
    config.model_config.max_model_len = 5 * TOKENS
    config.cache_config.block_size, config.lora_config = TOKENS, None
    config.scheduler_config = SimpleNamespace(max_num_seqs=MOST)
    config.kv_events_config = SimpleNamespace(enable_kv_cache_events=True)
    cache.num_blocks, cache.kv_cache_tensors = BLOCKS, [SimpleNamespace(size=BLOCKS)]
    made = StoreScheduler(config, cache)
    made.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=TOKENS)
    return made


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreScheduler]:
    """A scheduler of two ranks."""
    made = make_scheduler(monkeypatch)
    tell(made, namespaces={1: b"1", 0: b"0"})
    yield made
    made.stop()


def tell(scheduler: StoreScheduler, received: tuple[str, ...] = (), failed: tuple[str, ...] = (), **told: Any) -> None:
    output: Any = SimpleNamespace(
        kv_connector_worker_meta=StoreTold(**told), finished_recving=set(received), failed_recving=set(failed)
    )
    scheduler.take_output(output)


def store_of(scheduler: StoreScheduler) -> Double:
    client: Any = scheduler.lookups.client
    assert isinstance(client, Double)
    return client


def matched(scheduler: StoreScheduler, request: Request, computed: int = 0) -> int:
    """Ask as vLLM does, step by step, until there is an answer."""
    found: list[int | None] = []

    def answered() -> bool:
        found[:] = [scheduler.matched_tokens(request, computed)]
        return found[0] is not None

    wait_until(answered, 60)
    assert found[0] is not None
    return found[0]


def counted(scheduler: StoreScheduler) -> Counter[str]:
    """Return what a step has counted since the last call."""
    step(scheduler, {}, {})
    stats = scheduler.stats.take()
    assert stats is not None
    return Counter(stats.data)


def asked(name: str, tokens: int, lora: LoRARequest | None = None, salt: str | None = None) -> Request:
    hasher = get_request_block_hasher(TOKENS, sha256_cbor)
    params = SamplingParams(max_tokens=1)
    return Request(name, list(range(tokens)), params, None, lora_request=lora, cache_salt=salt, block_hasher=hasher)


def allocate(scheduler: StoreScheduler, request: Request, blocks: list[int], external: int) -> None:
    given: Any = SimpleNamespace(get_block_ids=lambda: (blocks,))
    scheduler.allocated(request, given, external)


def step(scheduler: StoreScheduler, tokens: dict[str, int], blocks: dict[str, list[int]]) -> Any:
    """Return the orders of a step that computes so many tokens of requests with these blocks."""
    state = SimpleNamespace(resolve_block_ids=lambda name: (blocks[name],))
    found: Any = SimpleNamespace(num_scheduled_tokens=tokens, kv_connector_block_state=state)
    return scheduler.take_orders(found)


def test_the_hits_of_all_ranks_are_held_until_they_are_loaded(scheduler: StoreScheduler) -> None:
    request = asked("a", 18)
    keys = list(request.block_hashes)
    assert len(keys) == 4
    scheduler.on_new_request(request)
    store = store_of(scheduler)
    assert (store.space, store.ranks) == (b"0", [b"0", b"1"])
    assert store.options.label == "model", "by which the store's metrics name the namespace"
    store.has(keys, shorter=1)
    assert matched(scheduler, request) == 3 * TOKENS
    assert store.held == 1
    assert matched(scheduler, request) == 3 * TOKENS
    assert store.held == 1, "asked again, a request has one hit"
    assert matched(scheduler, request, TOKENS) == 2 * TOKENS, "vLLM has found a block itself"
    assert store.asked == [keys, keys[1:]]
    allocate(scheduler, request, [5, 6, 7, 8, 9], 2 * TOKENS)
    orders = step(scheduler, {}, {})
    assert orders.loads == {"a": ([b"\0\1", b"\0\1"], [6, 7], [])}
    assert store.held == 1, "workers load"
    tell(scheduler, received=("a",))
    assert store.held == 0
    store.has([])
    other = asked("b", 18)
    scheduler.on_new_request(other)
    assert matched(scheduler, other) == 0


def test_the_last_token_is_left_to_the_engine(scheduler: StoreScheduler) -> None:
    request = asked("a", 4 * TOKENS)
    scheduler.on_new_request(request)
    store_of(scheduler).has(request.block_hashes)
    assert matched(scheduler, request) == 3 * TOKENS
    scheduler.finished(request, ([],))


def test_a_hit_that_is_not_loaded_is_released(scheduler: StoreScheduler) -> None:
    store = store_of(scheduler)
    for name in ("taken by another connector", "aborted"):
        request = asked(name, 18)
        scheduler.on_new_request(request)
        store.has(request.block_hashes)
        assert matched(scheduler, request)
        if name == "aborted":
            assert scheduler.finished(request, ([],)) == (False, None)
        else:
            allocate(scheduler, request, [1, 2, 3, 4, 5], 0)
        assert store.held == 0
    assert step(scheduler, {}, {}).loads == {}


def loading(scheduler: StoreScheduler) -> Request:
    """Return request ``a``, whose four full blocks are being loaded from the store."""
    request = asked("a", 18)
    scheduler.on_new_request(request)
    store_of(scheduler).has(request.block_hashes)
    assert matched(scheduler, request)
    allocate(scheduler, request, [1, 2, 3, 4], 4 * TOKENS)
    return request


def test_a_request_whose_load_failed_is_computed_and_saved_anew(scheduler: StoreScheduler) -> None:
    request = loading(scheduler)
    tell(scheduler, received=("a",), failed=("a",))
    assert store_of(scheduler).held == 0
    assert scheduler.matched_tokens(request, 0) == 0
    _, keys, blocks, _ = step(scheduler, {"a": 18}, {"a": [9, 8, 7, 6, 5]}).save
    assert (keys, blocks) == (list(request.block_hashes), [9, 8, 7, 6])


def test_a_failed_load_of_an_aborted_request_leaves_nothing(scheduler: StoreScheduler) -> None:
    request = loading(scheduler)
    scheduler.finished(request, ([],))
    assert store_of(scheduler).held == 1, "vLLM keeps the blocks until the load has ended"
    assert scheduler.needs_steps(), "an idle engine makes the step that releases the hits"
    tell(scheduler, received=("a",), failed=("a",))
    assert store_of(scheduler).held == 0


def test_steps_save_the_blocks_that_they_complete_and_keep_them_until_all_ranks_have(
    scheduler: StoreScheduler,
) -> None:
    request = asked("a", 18)
    scheduler.on_new_request(request)
    keys, blocks = list(request.block_hashes), [3, 4, 5, 6, 7]
    assert step(scheduler, {"a": 3}, {"a": blocks}).save is None
    request.num_computed_tokens = 3
    number, *saved, _ = step(scheduler, {"a": 6}, {"a": blocks}).save
    assert saved == [keys[:2], [3, 4]]
    request.num_computed_tokens = 9
    other, *saved, _ = step(scheduler, {"a": 9}, {"a": blocks}).save
    assert saved == [keys[2:4], [5, 6]], "the fifth block is not full"
    scheduler.finished(request, ([],))
    kept = [each.ref_cnt for each in scheduler.pool.blocks[3:8]]
    assert kept == [1, 1, 1, 1, 0]
    assert scheduler.needs_steps()
    tell(scheduler, ended=Counter({number: 1, other: 2}))
    assert [each.ref_cnt for each in scheduler.pool.blocks[3:8]] == [1, 1, 0, 0, 0]
    tell(scheduler, ended=Counter({number: 1}))
    assert [each.ref_cnt for each in scheduler.pool.blocks[3:8]] == [0] * 5
    assert not scheduler.needs_steps()
    assert scheduler.pool.get_num_free_blocks() == BLOCKS - 1


def test_at_most_a_quarter_of_the_blocks_is_saved_at_once_and_the_others_later(scheduler: StoreScheduler) -> None:
    request = asked("a", 14 * TOKENS + 1)
    scheduler.on_new_request(request)
    blocks = list(range(1, 16))
    number, _, saved, _ = step(scheduler, {"a": 57}, {"a": blocks}).save
    assert saved == blocks[:10]
    request.num_computed_tokens = 57
    assert step(scheduler, {"a": 1}, {"a": blocks}).save is None
    tell(scheduler, ended=Counter({number: 2}))
    assert step(scheduler, {"a": 1}, {"a": blocks}).save[2] == blocks[10:14]


def test_staged_loads_wait_for_slots_and_staged_saves_for_the_ones_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """One longest request has slots for its load, and as many blocks can be saved at once."""
    scheduler = make_scheduler(monkeypatch, staging=True, staging_bytes=10)
    tell(scheduler, namespaces={0: b"0"})
    store = store_of(scheduler)
    first, second, third = (asked(name, 18) for name in "abd")
    store.has(first.block_hashes)
    for each in (first, second, third):
        scheduler.on_new_request(each)
    assert matched(scheduler, first) == 4 * TOKENS
    assert scheduler.matched_tokens(second, 0) is None
    wait_until(lambda: store.held == 2, 60)
    assert scheduler.matched_tokens(second, 0) is None
    allocate(scheduler, first, [1, 2, 3, 4], 4 * TOKENS)
    assert scheduler.matched_tokens(third, 0) is None
    assert len(store.asked) == 2, "one request that waits keeps its hit"
    _, blocks, slots = step(scheduler, {}, {}).loads["a"]
    assert (blocks, len({*slots}), {*slots} <= {5, 6, 7, 8, 9}) == ([1, 2, 3, 4], 4, True)
    scheduler.finished(first, ([],))
    assert scheduler.matched_tokens(second, 0) is None, "an aborted load has its slots until it is reported"
    tell(scheduler, received=("a",))
    step(scheduler, {}, {})
    assert matched(scheduler, second) == 4 * TOKENS
    step(scheduler, {}, {})  # it got no blocks, so it has no slots either
    assert matched(scheduler, third) == 4 * TOKENS
    for each in (second, third):
        scheduler.finished(each, ([],))
    assert store.held == 0
    long = asked("c", 8 * TOKENS + 1)
    scheduler.on_new_request(long)
    blocks = list(range(1, 10))
    number, _, saved, slots = step(scheduler, {"c": 33}, {"c": blocks}).save
    assert (saved, {*slots}) == (blocks[:5], {0, 1, 2, 3, 4})
    long.num_computed_tokens = 33
    assert step(scheduler, {"c": 1}, {"c": blocks}).save is None
    tell(scheduler, ended=Counter({number: 1}))
    number, _, saved, slots = step(scheduler, {"c": 1}, {"c": blocks}).save
    assert (saved, len({*slots})) == (blocks[5:8], 3)
    tell(scheduler, ended=Counter({number: 1}))
    scheduler.finished(long, ([],))
    assert len(scheduler.load_slots.take("all", [(0, 5)])[0][1]) == 5
    assert len(scheduler.save_slots.take("all", [(0, 5)])[0][1]) == 5
    scheduler.stop()


def test_full_blocks_of_an_ended_request_are_kept_and_saved_without_another_request(scheduler: StoreScheduler) -> None:
    request = asked("a", 18 * TOKENS)
    scheduler.on_new_request(request)
    blocks = list(range(1, 19))
    number, _, saved, _ = step(scheduler, {"a": 18 * TOKENS}, {"a": blocks}).save
    assert saved == blocks[:10]
    scheduler.finished(request, (blocks,))
    assert [each.ref_cnt for each in scheduler.pool.blocks[1:20]] == [1] * 18 + [0]
    assert scheduler.needs_steps()
    assert step(scheduler, {}, {}).save is None, "as many as may be are being saved"
    tell(scheduler, ended=Counter({number: 2}))
    assert scheduler.needs_steps()
    number, keys, saved, _ = step(scheduler, {}, {}).save
    assert (keys, saved) == (list(request.block_hashes[10:]), blocks[10:])
    tell(scheduler, ended=Counter({number: 2}))
    assert not scheduler.needs_steps()
    assert scheduler.pool.get_num_free_blocks() == BLOCKS - 1
    assert counted(scheduler)["saved_blocks"] == 18
    assert [len(each.block_hashes) for each in scheduler.take_events()] == [10, 8]


def test_an_aborted_request_keeps_no_block_that_no_step_has_computed(scheduler: StoreScheduler) -> None:
    """Its blocks are there, for a load of another connector for instance; a step before had others in their place."""
    request = asked("a", 18)
    scheduler.on_new_request(request)
    number = step(scheduler, {"a": 9}, {"a": [1, 2, 3, 4, 5]}).save[0]
    tell(scheduler, ended=Counter({number: 2}))
    request.num_computed_tokens = 16
    allocate(scheduler, request, [6, 7, 8, 9], 0)
    scheduler.finished(request, ([6, 7, 8, 9],))
    assert not scheduler.needs_steps()


def test_at_most_a_quarter_of_the_blocks_is_kept_and_the_others_are_counted(scheduler: StoreScheduler) -> None:
    for name, first in (("a", 1), ("b", 16)):
        request, blocks = asked(name, 14 * TOKENS), list(range(first, first + 14))
        scheduler.on_new_request(request)
        step(scheduler, {name: 14 * TOKENS}, {name: blocks})
        scheduler.finished(request, (blocks,))
    assert scheduler.pool.get_num_free_blocks() == BLOCKS - 1 - 20
    assert counted(scheduler)["lost_crowded_blocks"] == 8


def test_kept_blocks_are_given_up_when_few_are_free(scheduler: StoreScheduler) -> None:
    request, blocks = asked("a", 14 * TOKENS), list(range(1, 15))
    scheduler.on_new_request(request)
    number = step(scheduler, {"a": 14 * TOKENS}, {"a": blocks}).save[0]
    scheduler.finished(request, (blocks,))
    taken = scheduler.pool.get_new_blocks(24)
    assert scheduler.pool.get_num_free_blocks() == 1
    step(scheduler, {}, {})
    assert scheduler.pool.get_num_free_blocks() == 5
    assert counted(scheduler)["lost_needed_blocks"] == 4
    tell(scheduler, ended=Counter({number: 2}))
    assert not scheduler.needs_steps()
    scheduler.pool.free_blocks(taken)


def test_until_the_ranks_have_told_their_namespaces_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(monkeypatch)
    request = asked("a", 18)
    scheduler.on_new_request(request)
    assert scheduler.needs_steps()
    assert scheduler.matched_tokens(request, 0) is None
    tell(scheduler, namespaces={0: b"0"})
    assert matched(scheduler, request) == 0
    step(scheduler, {}, {})
    assert not scheduler.needs_steps()
    scheduler.stop()


def test_events_tell_the_blocks_that_the_store_has_taken_on_all_ranks(scheduler: StoreScheduler) -> None:
    request = asked("a", 18)
    scheduler.on_new_request(request)
    hashes, blocks = [maybe_convert_block_hash(each) for each in request.block_hashes], [1, 2, 3, 4, 5]
    first = step(scheduler, {"a": 8}, {"a": blocks}).save[0]
    request.num_computed_tokens = 8
    second = step(scheduler, {"a": 4}, {"a": blocks}).save[0]
    request.num_computed_tokens = 12
    third = step(scheduler, {"a": 6}, {"a": blocks}).save[0]
    tell(scheduler, ended=Counter({first: 1, second: 2, third: 1}))
    (event,) = scheduler.take_events()
    assert (event.block_hashes, event.parent_block_hash) == (hashes[2:3], hashes[1])
    assert (event.token_ids, event.block_size, event.medium) == ([8, 9, 10, 11], TOKENS, "CPU")
    tell(scheduler, ended=Counter({first: 1}))
    (event,) = scheduler.take_events()
    assert (event.block_hashes, event.parent_block_hash) == (hashes[:2], None)
    assert scheduler.take_events() == []


def test_stored_events_have_the_extra_keys_of_vllms_own(scheduler: StoreScheduler) -> None:
    """Routers file a tenant's blocks by them."""
    image = MultiModalFeatureSpec(None, "image", "a picture", PlaceholderRange(offset=5, length=4))
    request = asked("a", 18, LoRARequest("adapter", 1, "/nowhere"), "tenant")
    request.mm_features = [image]
    pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=TOKENS, enable_kv_cache_events=True)
    pool.cache_full_blocks(request, pool.get_new_blocks(4), 0, 4, TOKENS, 0)
    (own,) = pool.take_events()
    assert own.extra_keys[0] == ("adapter", "tenant")
    request.lora_request = None
    scheduler.on_new_request(request)
    number = step(scheduler, {"a": 18}, {"a": [1, 2, 3, 4, 5]}).save[0]
    request.lora_request = LoRARequest("adapter", 1, "/nowhere")
    tell(scheduler, ended=Counter({number: 2}))
    (event,) = scheduler.take_events()
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "lora_name", "extra_keys")
    for name in names:
        assert getattr(event, name) == getattr(own, name), name


# --- a reset ----------------------------------------------------------------------------------------------------------


def test_a_reset_clears_the_namespaces_and_uses_others_with_a_random_part(scheduler: StoreScheduler) -> None:
    before, request = store_of(scheduler), asked("a", 18)
    scheduler.on_new_request(request)
    before.has(request.block_hashes)
    assert matched(scheduler, request) == 4 * TOKENS
    assert scheduler.reset() is True
    assert (before.held, before.keys) == (0, [set(), set()])
    after = store_of(scheduler)
    assert after.ranks != before.ranks
    assert after.space == after.ranks[0]
    assert scheduler.matched_tokens(request, 0) == 0
    part = step(scheduler, {}, {}).part
    assert [hashlib.sha256(each + part).digest() for each in (b"0", b"1")] == after.ranks
    wait_until(lambda: before.closed, 60)
    scheduler.finished(request, ([],))


def test_an_engine_that_is_reset_again_needs_no_more_namespaces_unless_saves_run(scheduler: StoreScheduler) -> None:
    """The store has few. But a save that is under way may still come after the clear."""
    assert scheduler.reset() is True
    own = store_of(scheduler)
    own.has([b"key"])
    assert scheduler.reset() is True
    assert (store_of(scheduler).ranks, own.keys) == (own.ranks, [set(), set()])
    request = asked("a", 18)
    scheduler.on_new_request(request)
    number, *_ = step(scheduler, {"a": 18}, {"a": [1, 2, 3, 4, 5]}).save
    assert scheduler.reset() is False
    late = asked("b", 18)
    scheduler.on_new_request(late)
    assert matched(scheduler, late) == 0, "the store is not used until a reset succeeds"
    own.has([b"landed after the clear"])
    tell(scheduler, ended=Counter({number: 2}))
    assert scheduler.reset() is True
    assert (store_of(scheduler).ranks, own.keys) == (own.ranks, [set(), set()])


def test_a_shared_namespace_is_cleared_and_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(monkeypatch, clear_shared=True)
    tell(scheduler, namespaces={0: b"0"})
    assert scheduler.reset()
    assert store_of(scheduler).ranks == [b"0"]
    scheduler.stop()


def test_a_reset_without_the_stores_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(monkeypatch)
    assert scheduler.reset() is False, "the namespaces are not known"
    tell(scheduler, namespaces={0: b"0"})
    shared = store_of(scheduler)
    shared.clears = False
    assert scheduler.reset() is False
    assert store_of(scheduler) is shared, "what has the KV of before is to be cleared by the next one"
    shared.clears = True
    assert scheduler.reset() is True
    assert store_of(scheduler).ranks != [b"0"]
    scheduler.stop()


def test_a_reset_drops_what_is_kept_and_saves_no_kv_of_before(scheduler: StoreScheduler) -> None:
    running, ended, after = asked("r", 18), asked("e", 14 * TOKENS), asked("a", 18)
    for each in (running, ended):
        scheduler.on_new_request(each)
    blocks = {"r": [1, 2, 3, 4, 5], "e": list(range(6, 20)), "a": [21, 22, 23, 24, 25]}
    number, *_ = step(scheduler, {"e": 14 * TOKENS}, blocks).save
    scheduler.finished(ended, (blocks["e"],))
    assert scheduler.reset() is False, "vLLM's own cache was not reset either"
    assert scheduler.pool.get_num_free_blocks() == BLOCKS - 1 - 10, "what is being saved is held"
    tell(scheduler, ended=Counter({number: 2}))
    assert not scheduler.needs_steps()
    assert scheduler.reset() is True
    scheduler.on_new_request(after)
    orders = step(scheduler, {"r": 18, "a": 18}, blocks)
    assert orders.save[2] == blocks["a"][:4], "the running one has KV of before"
    scheduler.finished(running, (blocks["r"],))
    tell(scheduler, ended=Counter({orders.save[0]: 2}))
    assert not scheduler.needs_steps()


@pytest.mark.parametrize("shared", [False, True])
def test_each_order_of_a_rank_is_of_the_namespaces_that_it_was_made_for(
    monkeypatch: pytest.MonkeyPatch,
    shared: bool,
) -> None:
    """Saves of before a reset that wait in a worker go to the namespaces of before, those after it to the others."""
    monkeypatch.setattr(store_scheduler, "StoreClient", Double)
    config, _ = storable([spec_of()], **GOOD | {"extra": GOOD["extra"] | {"clear_shared": shared}})
    begun: list[tuple[Any, ...]] = []
    pool = SimpleNamespace(submit=lambda *order: begun.append(order))
    first = Double(space=b"1", ranks=[b"0", b"1"])
    worker: Any = SimpleNamespace(
        _config=config, datadist=None, _spaces=[b"0", b"1"], _rank=1, _part=b"", client=first, _begun={}, _loads={},
        _saver=pool, _loaders=pool, _save=None, _load=None, _submitted=lambda: at_once,
    )  # fmt: skip
    for part in (b"", b"part"):
        save: Any = 1, [b"key"], [2], []
        orders = StoreOrders(loads={"r": ([b"h0", b"h1"], [3], [])}, save=save, part=part)
        StoreWorker.obey(worker, orders, idle=False)
        StoreWorker.save(worker)
    load, saved, close, other_load, other_saved = begun
    assert load[1] is saved[1] is first
    assert close == (first.close,), "after what was to be saved with it"
    other = other_saved[1]
    assert (load[3], other_load[1], other is first) == (b"h1", other, False)
    wanted = [b"0", b"1"] if shared else [hashlib.sha256(each + b"part").digest() for each in (b"0", b"1")]
    assert (other.space, other.ranks) == (wanted[1], wanted)


# --- beside other connectors ------------------------------------------------------------------------------------------


class Part:
    """Another part of a MultiConnector, which has KV of a request or not."""

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens

    def get_num_new_matched_tokens(self, *_: object) -> tuple[int | None, bool]:
        return self.tokens, bool(self.tokens)

    def update_state_after_alloc(self, *_: object) -> None:
        pass


def multi(scheduler: StoreScheduler, other: Part, *, first: bool) -> MultiConnector:
    """Return vLLM's own class over two parts, of which the store is the first or the second."""
    ours: Any = LLMDataDistStoreConnector.__new__(LLMDataDistStoreConnector)
    ours._half = scheduler  # noqa: SLF001
    made = MultiConnector.__new__(MultiConnector)
    vars(made).update(_connectors=[ours, other] if first else [other, ours], _requests_to_connector={})
    return made


@pytest.mark.parametrize("first", [True, False])
def test_a_request_of_a_prefill_server_is_not_delayed_by_a_store(
    scheduler: StoreScheduler,
    first: bool,
) -> None:
    store, request = store_of(scheduler), asked("a", 18)
    request.kv_transfer_params = {"do_remote_prefill": True}
    scheduler.on_new_request(request)
    store.has(request.block_hashes)
    both = multi(scheduler, Part(17), first=first)
    assert both.get_num_new_matched_tokens(request, 0) == (17, True)
    given: Any = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5],))
    both.update_state_after_alloc(request, given, 17)
    assert store.asked == []
    assert step(scheduler, {}, {}).loads == {}
    # It did not come: the store may have it.
    assert matched(scheduler, request) == 4 * TOKENS
    scheduler.finished(request, ([],))


@pytest.mark.parametrize("first", [True, False])
def test_a_request_that_no_other_part_serves_is_loaded_from_the_store(
    scheduler: StoreScheduler,
    first: bool,
) -> None:
    store, request = store_of(scheduler), asked("a", 18)
    scheduler.on_new_request(request)
    store.has(request.block_hashes)
    both = multi(scheduler, Part(0), first=first)
    assert both.get_num_new_matched_tokens(request, 0) == (None, False)
    wait_until(lambda: both.get_num_new_matched_tokens(request, 0) == (4 * TOKENS, True), 60)
    given: Any = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5],))
    both.update_state_after_alloc(request, given, 4 * TOKENS)
    assert list(step(scheduler, {}, {}).loads) == ["a"]
    tell(scheduler, received=("a",))
    assert store.held == 0


# --- what is counted --------------------------------------------------------------------------------------------------


def test_what_is_found_loaded_saved_and_lost_is_counted_and_told_once_a_minute(
    scheduler: StoreScheduler, caplog_vllm: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(store_scheduler, "time", SimpleNamespace(monotonic=lambda: now[0]))
    request = loading(scheduler)
    tell(scheduler, received=("a",))
    stats = counted(scheduler)
    assert {name: stats[name] for name in ("hits", "found_tokens", "loaded_tokens")} == {
        "hits": 1,
        "found_tokens": 4 * TOKENS,
        "loaded_tokens": 4 * TOKENS,
    }
    assert scheduler.stats.take() is None
    scheduler.finished(request, ([],))
    assert not caplog_vllm.text, "nothing was lost"
    store_of(scheduler).reason = "late"
    for number in range(3):
        other = asked(f"o{number}", 18, salt=str(number))
        scheduler.on_new_request(other)
        assert matched(scheduler, other) == 0
        saved = step(scheduler, {other.request_id: 18}, {other.request_id: [1, 2, 3, 4, 5]}).save[0]
        tell(scheduler, ended=Counter({saved: 2}), unsaved={saved}, counted=Counter(refused_late=4))
        scheduler.finished(other, ([],))
        data = counted(scheduler)
        assert (data["misses_late"], data["refused_late"], data["saved_blocks"]) == (1, 4, 0)
        now[0] += 20
    assert [each.getMessage().partition(": ")[2] for each in caplog_vllm.records] == ["misses_late=1"]
    step(scheduler, {}, {})
    assert caplog_vllm.records[1:][0].getMessage().endswith(": misses_late=2, refused_late=12")


def test_counters_of_both_connectors_stand_beside_each_other() -> None:
    registry = CollectorRegistry()
    config, types = SimpleNamespace(kv_transfer_config=None), {Gauge: Gauge, Histogram: Histogram}
    counter = partial(PromCounter, registry=registry)
    for each, name in ((LLMDataDistConnector, "fetched_requests"), (LLMDataDistStoreConnector, "hits")):
        assert each.build_kv_connector_stats().is_empty()
        made = each.build_prom_metrics(config, types | {PromCounter: counter}, ["engine"], {0: ["0"]})
        made.observe({name: 2}, 0)
    assert registry.get_sample_value("vllm:datadist_fetched_requests_total", {"engine": "0"}) == 2
    assert registry.get_sample_value("vllm:datadist_store_hits_total", {"engine": "0"}) == 2


def test_a_worker_saves_nothing_of_a_step_that_has_failed() -> None:
    """vLLM asks for it in its `finally`; test_store_engine.py has an engine that does."""
    begun: list[Any] = []
    saver = SimpleNamespace(submit=lambda _, *order: begun.append(order))
    order: Any = 1, [b"key"], [2], []
    worker: Any = SimpleNamespace(
        _unsaved=StoreOrders(save=order), _begun={}, _save=None, _saver=saver, client="c", _submitted=lambda: at_once
    )
    try:
        raise ArithmeticError
    except ArithmeticError:
        StoreWorker.save(worker)
    assert begun == []
    vars(worker)["_unsaved"] = StoreOrders(save=order)
    StoreWorker.save(worker)
    assert begun == [("c", *order[:3], at_once)]


def save(client: Double, keys: list[bytes], *, failing: bool = False, cleared_at: float = 0.0) -> Counter[str]:
    """Save as a worker does, in second 1; return what it has counted."""
    ended: list[tuple[int, Counter[str]]] = []
    queue, stopping = SimpleNamespace(put=ended.append), SimpleNamespace(wait=lambda _: False)
    worker: Any = SimpleNamespace(
        _cache=None, _ended=queue, _stopping=stopping, _failing=failing, _begun={7: 1.0}, _cleared_at=cleared_at
    )
    vars(StoreWorker)["_save"](worker, client, 7, keys, list(range(len(keys))), at_once)
    ((number, counted),) = ended
    assert (number, worker._failing) == (7, counted.total() > counted["retried_blocks"])  # noqa: SLF001
    return +counted


@pytest.mark.parametrize("refusals", range(5))
def test_what_the_store_refuses_is_saved_again_twice_at_most(refusals: int) -> None:
    keys, tries = [b"a", b"b"], list[list[bytes]]()

    class Refusing(Double):
        def save(self, keys: list[bytes], *_: object) -> int:
            self.refused["busy"] += 1 if len(tries) < refusals else 0
            tries.append(keys)
            return 0

    counted = save(Refusing(), keys)
    assert tries == [keys] * min(refusals + 1, 3)
    assert counted == Counter(retried_blocks=min(refusals, 2), refused_busy=int(refusals > 2))


def test_a_store_that_takes_nothing_for_long_keeps_no_blocks_waiting() -> None:
    class Gone(Double):
        def save(self, keys: list[bytes], *_: object) -> int:
            self.refused["gone"] += len(keys)
            return 0

    client = Gone()
    assert save(client, [b"a", b"b"], failing=True) == Counter(refused_gone=2)
    assert client.refused["gone"] == 2, "one try"


@pytest.mark.parametrize("why", ["late", "cleared"])
def test_a_save_is_not_tried_again_after_a_clear_or_if_the_store_is_late(why: str) -> None:
    class Refusing(Double):
        def save(self, keys: list[bytes], *_: object) -> int:
            self.refused[why] += len(keys)
            return 0

    client = Refusing()
    assert save(client, [b"a", b"b"]) == Counter({f"refused_{why}": 2})
    assert client.refused[why] == 2, "one try"


def test_a_save_that_waited_when_the_store_was_emptied_is_dropped() -> None:
    client = Double()
    assert save(client, [b"a", b"b"], cleared_at=2.0) == Counter(refused_cleared=2)
    assert client.keys == [set()]


def test_a_save_that_raises_has_failed() -> None:
    class Raising(Double):
        def save(self, *_: object) -> int:
            raise MemoryError

    assert save(Raising(), [b"a", b"b"]) == Counter(retried_blocks=4, refused_failed=2)


def add(scheduler: StoreScheduler, request: Request) -> None:
    """Add a request, and wait until its adapter is known."""
    scheduler.on_new_request(request)
    wait_until(lambda: scheduler.matched_tokens(request, 0) is not None)


def saved_keys(scheduler: StoreScheduler, request: Request) -> list[bytes]:
    add(scheduler, request)
    order = step(scheduler, {request.request_id: request.num_tokens}, {request.request_id: [1, 2, 3, 4, 5]}).save
    tell(scheduler, ended=Counter({order[0]: 2}))
    scheduler.finished(request, ([],))
    keys: list[bytes] = order[1]
    return keys


def test_a_salt_and_an_adapter_are_part_of_every_key(scheduler: StoreScheduler, tmp_path: Path) -> None:
    """vLLM's hash has an adapter's name and path only; its files may have changed since another engine ran."""
    one = adapter(tmp_path / "one", 1.0)
    plain = saved_keys(scheduler, asked("plain", 18))
    assert plain == list(asked("again", 18).block_hashes)
    of_one = saved_keys(scheduler, asked("one", 18, LoRARequest("a", 1, str(one))))
    assert of_one == saved_keys(scheduler, asked("one again", 18, LoRARequest("a", 1, str(one))))
    shutil.rmtree(one)
    adapter(one, 2.0)
    of_other = saved_keys(scheduler, asked("other", 18, LoRARequest("a", 2, str(one))))
    salted = saved_keys(scheduler, asked("salted", 18, salt="tenant"))
    assert len({*plain, *of_one, *of_other, *salted}) == 16


def test_the_kv_of_an_adapter_without_files_is_not_stored(
    scheduler: StoreScheduler, tmp_path: Path, caplog_vllm: pytest.LogCaptureFixture
) -> None:
    request = asked("a", 18, LoRARequest("a", 1, str(tmp_path / "nowhere")))
    add(scheduler, request)
    assert scheduler.matched_tokens(request, 0) == 0
    assert step(scheduler, {"a": 18}, {"a": [1, 2, 3, 4, 5]}).save is None
    scheduler.finished(request, ([],))
    assert caplog_vllm.text.count("the KV of request a is not stored") == 1


def test_while_an_adapter_is_digested_its_requests_wait_and_nothing_of_them_is_saved(
    scheduler: StoreScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go = threading.Event()
    monkeypatch.setattr(identity, "digest_of", lambda path: digest_of(path) if may_go.wait(60) else "")
    request, plain = asked("a", 18, LoRARequest("a", 1, str(adapter(tmp_path / "one", 1.0)))), asked("b", 18)
    for each in (request, plain):
        scheduler.on_new_request(each)
    assert (matched(scheduler, plain), scheduler.matched_tokens(request, 0)) == (0, None)
    blocks = {"a": [1, 2, 3, 4, 5], "b": [6, 7, 8, 9, 10]}
    order = step(scheduler, {"a": 18, "b": 18}, blocks).save
    assert order[1:3] == (list(plain.block_hashes), [6, 7, 8, 9]), "vLLM computes it although it was to wait"
    tell(scheduler, ended=Counter({order[0]: 2}))
    may_go.set()
    wait_until(lambda: scheduler.matched_tokens(request, 0) == 0)
    order = step(scheduler, {"a": 18, "b": 0}, blocks).save
    assert order[2] == [1, 2, 3, 4]
    assert not {*order[1]} & {*request.block_hashes}
    tell(scheduler, ended=Counter({order[0]: 2}))


def test_the_kv_of_an_adapter_whose_files_change_is_saved_no_more_and_its_hits_are_released(
    scheduler: StoreScheduler, tmp_path: Path
) -> None:
    folder = adapter(tmp_path / "one", 1.0)
    running, waiting = (asked(name, 18, LoRARequest("a", 1, str(folder))) for name in "ab")
    keys = saved_keys(scheduler, asked("before", 18, LoRARequest("a", 1, str(folder))))
    store_of(scheduler).has(keys)
    for request in (running, waiting):
        add(scheduler, request)
        assert scheduler.matched_tokens(request, 0) == 16
    (folder / "adapter_config.json").write_text("{}")
    scheduler.on_new_request(asked("c", 18, LoRARequest("a", 1, str(folder))))
    assert step(scheduler, {"a": 18}, {"a": [1, 2, 3, 4, 5]}).save is None
    assert scheduler.matched_tokens(waiting, 0) == 0
    assert store_of(scheduler).held == 0


# --- what is looked at when an engine starts --------------------------------------------------------------------------


def test_hashes_of_fewer_tokens_than_a_block_are_refused_when_the_engine_starts() -> None:
    made: Any = LLMDataDistStoreConnector.__new__(LLMDataDistStoreConnector)
    config, half = SimpleNamespace(cache_config=SimpleNamespace(block_size=64)), SimpleNamespace(pool=None)
    vars(made).update(_vllm_config=config, _half=half)
    pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)
    with pytest.raises(ParamError, match="hash_block_size=16: must be the block size, 64"):
        made.bind_gpu_block_pool(pool)
    assert half.pool is None
    config.cache_config.block_size = 16
    made.bind_gpu_block_pool(pool)
    assert half.pool is pool


@pytest.mark.parametrize(
    ("version", "role", "warned"),
    [
        ("0.99.7", KVConnectorRole.SCHEDULER, True),
        ("0.99.8", KVConnectorRole.WORKER, False),
        (f"{TRIED[0]}+cpu", KVConnectorRole.SCHEDULER, False),
    ],
)
def test_one_warning_says_that_a_version_of_vllm_was_never_tried(
    monkeypatch: pytest.MonkeyPatch,
    caplog_vllm: pytest.LogCaptureFixture,
    version: str,
    role: KVConnectorRole,
    warned: bool,
) -> None:
    monkeypatch.setattr(connector, "vllm_version", version)
    config, cache = storable([spec_of()], **GOOD | {"extra": {}})
    for _ in range(2):
        with pytest.raises(LLMException), set_current_vllm_config(config, check_compile=False):
            LLMDataDistStoreConnector(config, role, cache)
    assert caplog_vllm.text.count(f"vLLM {version} was never tried with these connectors; {TRIED[0]} was") == warned


def test_the_page_names_the_versions_that_were_tried() -> None:
    (row,) = [line for line in (ROOT / "docs" / "vllm.md").read_text().splitlines() if line.startswith("| vLLM |")]
    assert row == f"| vLLM | {', '.join(TRIED)} (T) | |"
