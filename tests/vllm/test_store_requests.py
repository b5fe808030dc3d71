"""Both halves of the store connector without an engine: which engines are refused, and what each request leaves."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import Request

from llm_datadist.errors import LLMException, ParamError
from llm_datadist.integrations.vllm import LLMDataDistStoreConnector, connector, identity, store_scheduler
from llm_datadist.integrations.vllm.connector import TRIED
from llm_datadist.integrations.vllm.layout import Layout
from llm_datadist.integrations.vllm.store_scheduler import StoreOrders, StoreScheduler, StoreTold
from llm_datadist.integrations.vllm.store_worker import StoreWorker, namespace_of
from llm_datadist.integrations.weights import digest_of
from llm_datadist.store.messages import MAX_LOOKUP_KEYS
from tests.support.moves import wait_until
from tests.support.source import ROOT
from tests.vllm.test_layouts import configured, spec_of
from tests.vllm.test_requests import adapter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKENS, BLOCKS = 4, 40
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
    ({"extra": {}}, r'store: not given; "IP:PORT" .* is needed'),
    ({"kv_role": "kv_producer"}, "kv_role=kv_producer: must be kv_both"),
    ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy=fail: must be recompute"),
    ({"algorithm": "xxhash"}, "prefix_caching_hash_algo=xxhash: its seed is random"),
    ({"algorithm": "xxhash_cbor"}, "prefix_caching_hash_algo=xxhash_cbor: its seed is random"),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_an_engine_that_cannot_share_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr("llm_datadist.LLMDataDist.init", lambda *_: pytest.fail("a pool was made"))
    config, cache = storable([spec_of()], **GOOD | change)
    with pytest.raises(LLMException, match=said) as refused, set_current_vllm_config(config, check_compile=False):
        LLMDataDistStoreConnector(config, KVConnectorRole.WORKER, cache)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("role", KVConnectorRole)
@pytest.mark.parametrize(
    "specs",
    [[spec_of(), spec_of(SlidingWindowSpec, sliding_window=64)], [spec_of(SlidingWindowSpec, sliding_window=64)]],
)
def test_only_one_group_of_full_attention_is_served(
    monkeypatch: pytest.MonkeyPatch, role: KVConnectorRole, specs: list[Any]
) -> None:
    monkeypatch.setattr("llm_datadist.LLMDataDist.init", lambda *_: pytest.fail("a pool was made"))
    config, cache = storable(specs, **GOOD)
    with pytest.raises(LLMException, match="only one group of full attention or MLA"):
        LLMDataDistStoreConnector(config, role, cache)


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


class Double:
    """What a scheduler sees of a store: one rank's client. Keys are in it, hits are counted."""

    def __init__(self, _: Any, address: str, space: bytes, options: Any) -> None:
        self.space = space
        self.keys: set[bytes] = set()
        self.open: Counter[int] = Counter()

    def lookup(self, keys: list[bytes]) -> Any:
        run = next((number for number, key in enumerate(keys) if key not in self.keys), len(keys))
        hit = DoubleHit(range(run))
        self.open[id(hit)] += bool(run)
        return hit

    def release(self, hit: Any) -> None:
        self.open[id(hit)] -= bool(len(hit))
        assert self.open[id(hit)] == 0

    def close(self) -> None:
        assert not self.held

    @property
    def held(self) -> int:
        return sum(self.open.values())


class DoubleHit(list[int]):
    def to_bytes(self) -> bytes:
        return bytes(self)


def make_scheduler(monkeypatch: pytest.MonkeyPatch, **extra: Any) -> StoreScheduler:
    """``extra``: options, as of a rank whose KV is staged."""
    monkeypatch.setattr(store_scheduler, "StoreClient", Double)
    init_none_hash(sha256_cbor)
    config, cache = storable([spec_of()], **GOOD | {"extra": GOOD["extra"] | extra})
    config.kv_transfer_config.is_kv_producer = config.kv_transfer_config.is_kv_consumer = True
    config.model_config.max_model_len = 5 * TOKENS
    config.cache_config.block_size, config.lora_config = TOKENS, None
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


def clients(scheduler: StoreScheduler) -> list[Double]:
    return [each for each in scheduler.clients if isinstance(each, Double)]


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


def test_the_shortest_run_of_all_ranks_counts_and_longer_hits_are_released(scheduler: StoreScheduler) -> None:
    request = asked("a", 18)
    keys = list(request.block_hashes)
    assert len(keys) == 4
    scheduler.on_new_request(request)
    first, second = clients(scheduler)
    assert (first.space, second.space) == (b"0", b"1")
    first.keys, second.keys = set(keys), set(keys[:3])
    assert scheduler.matched_tokens(request, 0) == 3 * TOKENS
    assert (first.held, second.held) == (1, 1)
    assert scheduler.matched_tokens(request, 0) == 3 * TOKENS
    assert (first.held, second.held) == (1, 1), "asked again, a request has one hit"
    assert scheduler.matched_tokens(request, TOKENS) == 2 * TOKENS  # vLLM has found a block itself
    allocate(scheduler, request, [5, 6, 7, 8, 9], 2 * TOKENS)
    orders = step(scheduler, {}, {})
    assert orders.loads == {"a": ([b"\0\1\2", b"\0\1"], [6, 7], [])}
    assert (first.held, second.held) == (1, 1), "workers load"
    tell(scheduler, received=("a",))
    assert (first.held, second.held) == (0, 0)
    second.keys = set()
    other = asked("b", 18)
    scheduler.on_new_request(other)
    assert scheduler.matched_tokens(other, 0) == 0
    assert (first.held, second.held) == (0, 0)


def test_the_last_token_is_left_to_the_engine(scheduler: StoreScheduler) -> None:
    request = asked("a", 4 * TOKENS)
    scheduler.on_new_request(request)
    for each in clients(scheduler):
        each.keys = set(request.block_hashes)
    assert scheduler.matched_tokens(request, 0) == 3 * TOKENS
    scheduler.finished(request, ([],))


def test_a_hit_that_is_not_loaded_is_released(scheduler: StoreScheduler) -> None:
    first, second = clients(scheduler)
    for name in ("taken by another connector", "aborted"):
        request = asked(name, 18)
        scheduler.on_new_request(request)
        first.keys = second.keys = set(request.block_hashes)
        assert scheduler.matched_tokens(request, 0)
        if name == "aborted":
            assert scheduler.finished(request, ([],)) == (False, None)
        else:
            allocate(scheduler, request, [1, 2, 3, 4, 5], 0)
        assert (first.held, second.held) == (0, 0)
    assert step(scheduler, {}, {}).loads == {}


def loading(scheduler: StoreScheduler) -> Request:
    """Return request ``a``, whose four full blocks are being loaded from the store."""
    request = asked("a", 18)
    scheduler.on_new_request(request)
    for each in clients(scheduler):
        each.keys = set(request.block_hashes)
    assert scheduler.matched_tokens(request, 0)
    allocate(scheduler, request, [1, 2, 3, 4], 4 * TOKENS)
    return request


def test_a_request_whose_load_failed_is_computed_and_saved_anew(scheduler: StoreScheduler) -> None:
    request = loading(scheduler)
    tell(scheduler, received=("a",), failed=("a",))
    assert sum(each.held for each in clients(scheduler)) == 0
    assert scheduler.matched_tokens(request, 0) == 0
    _, keys, blocks, _ = step(scheduler, {"a": 18}, {"a": [9, 8, 7, 6, 5]}).save
    assert (keys, blocks) == (list(request.block_hashes), [9, 8, 7, 6])


def test_a_failed_load_of_an_aborted_request_leaves_nothing(scheduler: StoreScheduler) -> None:
    request = loading(scheduler)
    scheduler.finished(request, ([],))
    assert [each.held for each in clients(scheduler)] == [1, 1], "vLLM keeps the blocks until the load has ended"
    assert scheduler.needs_steps(), "an idle engine makes the step that releases the hits"
    tell(scheduler, received=("a",), failed=("a",))
    assert [each.held for each in clients(scheduler)] == [0, 0]


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
    tell(scheduler, ended=Counter({number: 1}), unsaved={number})
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
    (client,) = clients(scheduler)
    first, second, third = (asked(name, 18) for name in "abd")
    client.keys = set(first.block_hashes)
    for each in (first, second, third):
        scheduler.on_new_request(each)
    assert scheduler.matched_tokens(first, 0) == 4 * TOKENS
    assert scheduler.matched_tokens(second, 0) is None
    allocate(scheduler, first, [1, 2, 3, 4], 4 * TOKENS)
    assert scheduler.matched_tokens(third, 0) is None
    assert client.held == 2, "one request that waits keeps its hit"
    _, blocks, slots = step(scheduler, {}, {}).loads["a"]
    assert (blocks, len({*slots}), {*slots} <= {5, 6, 7, 8, 9}) == ([1, 2, 3, 4], 4, True)
    scheduler.finished(first, ([],))
    assert scheduler.matched_tokens(second, 0) is None, "an aborted load has its slots until it is reported"
    tell(scheduler, received=("a",))
    step(scheduler, {}, {})
    assert scheduler.matched_tokens(second, 0) == 4 * TOKENS
    step(scheduler, {}, {})  # it got no blocks, so it has no slots either
    assert scheduler.matched_tokens(third, 0) == 4 * TOKENS
    for each in (second, third):
        scheduler.finished(each, ([],))
    assert client.held == 0
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


def test_until_the_ranks_have_told_their_namespaces_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(monkeypatch)
    request = asked("a", 18)
    scheduler.on_new_request(request)
    assert scheduler.needs_steps()
    assert scheduler.matched_tokens(request, 0) is None
    tell(scheduler, namespaces={0: b"0"})
    assert scheduler.matched_tokens(request, 0) == 0
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
    tell(scheduler, ended=Counter({first: 1, second: 2, third: 2}), unsaved={third})
    (event,) = scheduler.take_events()
    assert (event.block_hashes, event.parent_block_hash) == (hashes[2:3], hashes[1])
    assert (event.token_ids, event.block_size, event.medium) == ([8, 9, 10, 11], TOKENS, "CPU")
    tell(scheduler, ended=Counter({first: 1}))
    (event,) = scheduler.take_events()
    assert (event.block_hashes, event.parent_block_hash) == (hashes[:2], None)
    assert scheduler.take_events() == []


def test_a_worker_saves_nothing_of_a_step_that_has_failed() -> None:
    """vLLM asks for it in its `finally`; test_store_engine.py has an engine that does."""
    begun: list[Any] = []
    saver = SimpleNamespace(submit=lambda _, *order: begun.append(order))
    order: Any = 1, [b"key"], [2], []
    worker: Any = SimpleNamespace(_unsaved=StoreOrders(save=order), _running=0, _save=None, _saver=saver)
    try:
        raise ArithmeticError
    except ArithmeticError:
        StoreWorker.save(worker)
    assert begun == []
    vars(worker)["_unsaved"] = StoreOrders(save=order)
    StoreWorker.save(worker)
    assert begun == [order[:3]]


@pytest.mark.parametrize("missing", [None, 5000])
def test_a_save_of_more_keys_than_one_lookup_takes_has_failed_only_if_one_is_missing(missing: int | None) -> None:
    """The store stored nothing new: it had them all, or took none."""
    keys, ended = [b"%d" % number for number in range(MAX_LOOKUP_KEYS + 1000)], list[tuple[int, bool]]()

    class Client(Double):
        def save(self, *_: object) -> int:
            return 0

        def lookup(self, keys: list[bytes]) -> Any:
            return super().lookup(keys[:MAX_LOOKUP_KEYS])

    client = Client(None, "", b"", None)
    client.keys.update(key for number, key in enumerate(keys) if number != missing)
    worker: Any = SimpleNamespace(client=client, _cache=None, _failing=False, _ended=SimpleNamespace(put=ended.append))
    vars(StoreWorker)["_save"](worker, 7, keys, list(range(len(keys))))
    assert (ended, client.held) == ([(7, missing is not None)], 0)


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
    assert [scheduler.matched_tokens(each, 0) for each in (request, plain)] == [None, 0]
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
    for each in clients(scheduler):
        each.keys = set(keys)
    for request in (running, waiting):
        add(scheduler, request)
        assert scheduler.matched_tokens(request, 0) == 16
    (folder / "adapter_config.json").write_text("{}")
    scheduler.on_new_request(asked("c", 18, LoRARequest("a", 1, str(folder))))
    assert step(scheduler, {"a": 18}, {"a": [1, 2, 3, 4, 5]}).save is None
    assert scheduler.matched_tokens(waiting, 0) == 0
    assert [each.held for each in clients(scheduler)] == [0, 0]


# --- what is looked at when an engine starts --------------------------------------------------------------------------


def test_hashes_of_fewer_tokens_than_a_block_are_refused_when_the_engine_starts() -> None:
    made: Any = LLMDataDistStoreConnector.__new__(LLMDataDistStoreConnector)
    config, half = SimpleNamespace(cache_config=SimpleNamespace(block_size=64)), SimpleNamespace(pool=None)
    vars(made).update(_vllm_config=config, _scheduler=half)
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
