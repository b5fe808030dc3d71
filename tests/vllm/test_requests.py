"""Both halves of the connector without a server: whatever a client says of KV costs its own request and no engine."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from llm_datadist._native.public_call import public_call
from llm_datadist.datadist import Life
from llm_datadist.errors import LinkError, ParamError
from llm_datadist.integrations.references import ReferenceKeys, runtime_secret_file
from llm_datadist.integrations.vllm import LLMDataDistConnector, engines, identity, rank, worker
from llm_datadist.integrations.vllm.offers import KvOffer, Orders, RankEndpoint
from llm_datadist.integrations.vllm.scheduler import Scheduler
from llm_datadist.integrations.vllm.worker import RankWorker
from llm_datadist.integrations.weights import digest_of
from llm_datadist.types.grant import Grant
from tests.support.moves import wait_until
from tests.vllm import fake_torch
from tests.vllm.odd import odd_params
from tests.vllm.test_staging import copy_as_cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from llm_datadist.integrations.vllm.store_worker import StoreWorker

pytestmark = pytest.mark.usefixtures("one_rank")

BLOCKS, TOKENS = 64, 8
PROMPT = list(range(20))  # three blocks
#: A step without tokens.
NOTHING: Any = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None, kv_connector_block_state=None)
KERNEL = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "CPU_ATTN"), isa="vec")


def configured(role: str, **extra: Any) -> tuple[Any, Any]:
    """Return the configuration of an engine of that role, and its cache of one layer."""
    given = {"pool": False, "drain_ms": 0} | extra  # what no test fetches is not waited for

    def option(name: str, default: Any = None) -> Any:
        return given.get(name, default)

    transfer = SimpleNamespace(
        engine_id=role,
        is_kv_producer=role != "decode",
        is_kv_consumer=role != "prefill",
        get_from_extra_config=option,
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        cache_config=SimpleNamespace(block_size=TOKENS, prefix_caching_hash_algo="sha256"),
        model_config=SimpleNamespace(max_model_len=BLOCKS * TOKENS, get_total_num_kv_heads=lambda: 2, model="toy"),
        lora_config=None,
        compilation_config=SimpleNamespace(static_forward_context={"layer": KERNEL}),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.float32)
    cache = SimpleNamespace(
        transfer_group_ids=[0],
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])],
        kv_cache_tensors=[SimpleNamespace(size=BLOCKS * 2 * TOKENS * 64)],
        num_blocks=BLOCKS,
        select_transfer_block_ids=lambda ids: ids,
    )
    return config, cache


def register_kv(rank: RankWorker | StoreWorker, device: str) -> torch.Tensor:
    """Register a KV cache of zeros on that device, in the rank's pool if it has one; return it, for the host."""
    with rank.allocation or nullcontext():
        kv = torch.zeros(BLOCKS * 2 * TOKENS * 64, dtype=torch.int8, device=device).view(BLOCKS, 2, TOKENS, 64)
    in_pool = rank.allocation is not None and rank.allocation.cache
    rank.register({"layer": fake_torch.tensor_of(in_pool).view_as(kv) if in_pool and device == "cuda" else kv})
    rank.use_copies(copy_as_cuda)
    return kv


class Engine:
    """A scheduler and a worker, with the KV cache of one layer."""

    def __init__(self, role: str, device: str = "cpu", **extra: Any) -> None:
        config, cache = configured(role, **extra)
        self.scheduler = Scheduler(config, cache)
        self.worker = RankWorker(config, cache)
        self.kv = register_kv(self.worker, device)
        if (endpoint := self.worker.endpoint()) is not None:
            self.scheduler.take_endpoints({(0, 0): endpoint})
        self.ended: dict[str, bool] = {}  # fetches: whether they came
        self.sent: set[str] = set()

    def step(self, tokens: dict[str, int] | None = None, blocks: Any = (), preempted: Iterable[str] = ()) -> None:
        """Let the worker have its orders, and the scheduler what came of earlier ones; compute tokens of a request."""
        step: Any = SimpleNamespace(
            num_scheduled_tokens=tokens or {},
            preempted_req_ids=set(preempted),
            kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda _: (blocks,)),
        )
        orders = self.scheduler.take_orders(step)
        self.worker.revoke(orders)
        self.worker.obey(orders, idle=not tokens)
        self.worker.save()
        results = self.worker.results()
        self.ended |= {each: each not in results.failed_recving for each in results.finished_recving}
        self.sent |= results.finished_sending
        told: Any = SimpleNamespace(
            kv_connector_worker_meta=self.worker.take_told(),
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
        )
        self.scheduler.take_output(told)

    def until(self, done: Callable[[], bool]) -> None:
        limit = time.monotonic() + 60
        while not done():
            assert time.monotonic() < limit
            self.step()

    def decode(self, name: str, params: Any, blocks: list[int], prompt: list[int] = PROMPT) -> bool:
        """Return True if the request is parked until its KV has come, or has failed to."""
        request = asked(name, params, prompt)
        self.scheduler.on_new_request(request)
        count = self.scheduler.matched_tokens(request, 0)
        assert count is not None
        given: Any = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.scheduler.allocated(request, given, count)
        request.status, request.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, len(prompt)
        if not count:
            assert self.scheduler.finished(request, (blocks,)) == (False, None)
        return count > 0

    def add(self, name: str, prompt: list[int] = PROMPT, cached: int = 0) -> Request:
        """Add a request to be decoded elsewhere, the first tokens of which are cached."""
        request = asked(name, {"do_remote_decode": True}, prompt)
        request.num_computed_tokens = cached
        self.scheduler.on_new_request(request)
        return request

    def compute(self, request: Request, blocks: list[int], count: int = 1, preempted: Iterable[str] = ()) -> None:
        self.step({request.request_id: count}, blocks, preempted)
        request.num_computed_tokens += count

    def finish(
        self, request: Request, blocks: list[int], status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED
    ) -> dict[str, Any] | None:
        request.status = status
        kept, offer = self.scheduler.finished(request, (blocks,))
        assert kept is (offer is not None)
        return offer

    def prefill(self, name: str, params: Any, blocks: list[int], prompt: list[int] = PROMPT) -> dict[str, Any] | None:
        request = asked(name, params, prompt)
        self.scheduler.on_new_request(request)
        self.compute(request, blocks, len(prompt))
        return self.finish(request, blocks)

    def unoffered(self, name: str) -> dict[str, Any]:
        """Return what a decode engine would be given, had the offer of a running request been handed out."""
        return {"do_remote_prefill": True, "datadist": self.scheduler.requests[name].reference}

    def fetched(self, name: str, params: Any, blocks: list[int]) -> bool:
        assert self.decode(name, params, blocks)
        self.until(lambda: name in self.ended)
        return self.ended[name]


def asked(name: str, params: Any, prompt: list[int]) -> Request:
    request = Request(name, prompt, SamplingParams(max_tokens=1), None)
    request.kv_transfer_params = params  # past the checks of vLLM
    return request


@pytest.fixture(params=["host", "gpu"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """Makes engines with the KV cache in host memory, or in a pool in a GPU, of the fake driver."""
    made: list[Engine] = []
    where: dict[str, Any] = {}
    if request.param == "gpu":
        request.getfixturevalue("gpu_of_torch")
        where = {"device": "cuda", "pool": True}

    def one(role: str, **extra: Any) -> Engine:
        made.append(Engine(role, **where | extra))
        return made[-1]

    yield one
    for each in made:
        each.worker.stop()
        each.scheduler.stop()
        del each.kv  # which keeps the pool mapped


def offered(prefill: Engine, name: str, blocks: list[int]) -> dict[str, Any]:
    """Return the offer of a request whose KV is random bytes; the engine makes no further step."""
    prefill.kv[blocks] = torch.randint(-128, 127, (len(blocks), 2, TOKENS, 64), dtype=torch.int8)
    params = prefill.prefill(name, {"do_remote_decode": True}, blocks)
    assert params is not None
    return params


def comes(prefill: Engine, decode: Engine, name: str) -> bool:
    params = offered(prefill, name, [1, 2, 3])
    return decode.fetched(name, params, [6, 4, 5]) and bool((prefill.kv[[1, 2, 3]] == decode.kv[[6, 4, 5]]).all())


@pytest.mark.parametrize("make", ["host"], indirect=True)  # a minute
def test_ten_thousand_odd_requests_end_no_engine(make: Callable[..., Engine]) -> None:
    source = random.Random(5)
    prefill, decode = make("prefill", lease_s=3600), make("decode")
    true = offered(prefill, "true", [7, 8, 9])
    parked = set()
    for number in range(10_000):
        name, params = f"odd{number}", odd_params(source, true)
        if number % 2:
            if decode.decode(name, params, [1, 2, 3], source.choice([PROMPT, PROMPT, [5]])):
                parked.add(name)
        else:
            prefill.prefill(name, params, [1, 2, 3])
        if number % 100 < 2:
            prefill.step()
            decode.step()
    decode.until(lambda: parked <= decode.ended.keys())
    assert len(parked) > 1000
    assert comes(prefill, decode, "honest")


def test_an_engine_that_listens_nowhere_offers_nothing(make: Callable[..., Engine]) -> None:
    assert make("decode").prefill("one", {"do_remote_decode": True}, [1, 2, 3]) is None


def test_tokens_in_place_of_embeddings_are_neither_offered_nor_fetched(make: Callable[..., Engine]) -> None:
    prefill, decode = make("prefill"), make("decode")
    mixed = asked("mixed", {"do_remote_decode": True}, PROMPT)
    mixed.prompt_embeds = torch.zeros(len(PROMPT), 8)
    prefill.scheduler.on_new_request(mixed)
    prefill.compute(mixed, [1, 2, 3], len(PROMPT))
    assert prefill.finish(mixed, [1, 2, 3]) is None
    mixed.kv_transfer_params = offered(prefill, "tokens", [1, 2, 3])
    decode.scheduler.on_new_request(mixed)
    assert decode.scheduler.take_orders(NOTHING).claims == {}


def test_a_reference_that_is_refused_costs_no_order_but_its_own_failure(make: Callable[..., Engine]) -> None:
    prefill, decode = make("prefill"), make("decode")
    params = offered(prefill, "one", [1, 2, 3])
    text = params["datadist"]
    assert decode.decode("forged", params | {"datadist": text[:-1] + ("0" if text[-1] != "0" else "1")}, [1, 2, 3])
    assert decode.decode("another's", params, [1, 2, 3], PROMPT[1:])
    orders = decode.scheduler.take_orders(NOTHING)
    assert (orders.claims, orders.fetches, orders.drops) == ({}, {}, [])
    assert orders.refused == ["forged", "another's"]
    assert decode.fetched("true", params, [1, 2, 3])


def test_blocks_of_unclaimed_offers_are_bounded_and_counted(make: Callable[..., Engine]) -> None:
    prefill, decode = make("prefill", max_unclaimed_blocks=6), make("decode")
    first = offered(prefill, "first", [1, 2, 3])
    offered(prefill, "second", [3, 4, 5])  # five blocks, because one is the same
    assert prefill.prefill("third", {"do_remote_decode": True}, [6, 7]) is None
    stats = prefill.scheduler.stats.take()
    assert stats is not None
    assert stats.data["refused_offers"] == 1
    assert decode.fetched("first", first, [1, 2, 3])
    prefill.until(lambda: "first" in prefill.sent)
    assert prefill.prefill("fourth", {"do_remote_decode": True}, [6, 7]) is not None
    assert make("prefill").scheduler.max_unclaimed == BLOCKS // 2


def test_an_offer_that_ends_with_its_cache_is_not_counted_as_expired(make: Callable[..., Engine]) -> None:
    prefill = make("prefill", lease_s=3600)
    offered(prefill, "first", [1, 2, 3])
    (key,) = prefill.worker.datadist.statistics().keys
    prefill.worker.datadist.cache_manager.unregister_cache(key.cache_id)
    prefill.until(lambda: "first" in prefill.sent)
    stats = prefill.worker.stats.take()
    assert stats is not None
    assert stats.data["revoked_grants"] == 1
    assert not stats.data.get("expired_grants")


def test_a_claimed_offer_counts_no_more(make: Callable[..., Engine]) -> None:
    prefill, decode = make("prefill", max_unclaimed_blocks=3), make("decode")
    params = offered(prefill, "first", [1, 2, 3])
    decode.scheduler.on_new_request(asked("waits", params, PROMPT))
    decode.step()
    prefill.until(lambda: not prefill.scheduler.unclaimed)
    assert "first" not in prefill.sent
    assert prefill.prefill("second", {"do_remote_decode": True}, [4, 5, 6]) is not None


class FullEngine:
    """An engine that prefills and decodes, and schedules its queue as vLLM does: a request without blocks waits."""

    def __init__(self, engine: Engine, name: str, prompts: int) -> None:
        self.engine, self.free = engine, list(range(BLOCKS))
        self.prompts = [f"{name}{number}" for number in range(prompts)]
        self.fetches: list[Request] = []
        self.blocks: dict[str, list[int]] = {}  # of offers, until they are sent; of fetches, until they end
        self.refused = 0

    def take(self) -> list[int]:
        taken, self.free = self.free[:3], self.free[3:]
        return taken

    def turn(self, other: FullEngine) -> None:
        """Schedule what has blocks, prompts first; their offers go to ``other``."""
        while self.prompts and len(self.free) >= 3:
            name, blocks = self.prompts.pop(), self.take()
            params = self.engine.prefill(name, {"do_remote_decode": True}, blocks)
            if params is None:
                self.free += blocks
                self.refused += 1
            else:
                self.blocks[name] = blocks
                other.fetches.append(request := asked(f"{name}'", params, PROMPT))
                other.engine.scheduler.on_new_request(request)
                other.engine.step()
        while self.fetches and len(self.free) >= 3:
            request, blocks = self.fetches.pop(), self.take()
            count = self.engine.scheduler.matched_tokens(request, 0)
            assert count
            given: Any = SimpleNamespace(get_block_ids=lambda blocks=blocks: (blocks,))
            self.engine.scheduler.allocated(request, given, count)
            self.blocks[request.request_id] = blocks
        self.engine.step()
        for name in {*self.engine.sent, *self.engine.ended} & self.blocks.keys():
            self.free += self.blocks.pop(name)


def test_two_full_engines_that_decode_for_each_other_do_not_wait_for_ever(make: Callable[..., Engine]) -> None:
    """Blocks wait for a reader that has none of its own, because they wait for this engine's: nobody would go on."""
    ours, theirs = (FullEngine(make("both", lease_s=3600), name, 2 * BLOCKS) for name in "ab")
    limit = time.monotonic() + 60
    while any(each.prompts or each.blocks or each.fetches for each in (ours, theirs)):
        assert time.monotonic() < limit, "they wait for each other"
        ours.turn(theirs)
        theirs.turn(ours)
    for each in (ours, theirs):
        assert len(each.free) == BLOCKS
        assert all(each.engine.ended.values())
        assert len(each.engine.ended) + each.refused == 2 * BLOCKS


def signed(params: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return params with a changed offer, as an engine that has the secret could make them."""
    keys = ReferenceKeys(runtime_secret_file())
    offer, _ = KvOffer.read(params["datadist"], keys)
    return params | {"datadist": msgspec.structs.replace(offer, **changes).sign(keys)[0]}


def test_orders_which_vllm_logs_when_a_step_fails_show_no_token() -> None:
    offer: Any = None
    token = bytes(range(16))
    shown = repr(Orders(claims={"a": (offer, token)}, drops=["b"], grants={"c": (token, [1])}))
    assert "drops=['b']" in shown
    assert repr(token) not in shown


def test_signed_references_without_grants_are_claimed_once_without_a_wait(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make("prefill"), make("decode")
    params = offered(prefill, "first", [1, 2, 3])
    manager, waits = decode.worker.datadist.cache_manager, []
    claim = manager.claim_grant

    def claim_grant(cluster_id: int, token: bytes, readers: int = 1, wait: bool = True) -> Any:
        waits.append(wait)
        return claim(cluster_id, token, readers, wait)

    monkeypatch.setattr(manager, "claim_grant", claim_grant)  # looks on
    names = {f"vain{number}" for number in range(80)}
    for name in names:
        assert decode.decode(name, signed(params, nonce=random.randbytes(16)), [7, 8, 9])
    assert decode.fetched("first", params, [6, 4, 5])
    decode.until(lambda: names <= decode.ended.keys())
    assert not any(decode.ended[name] for name in names)
    assert waits == [False] * 81


@pytest.mark.parametrize("cached", [0, 5, 19])
def test_blocks_are_granted_in_the_step_of_the_last_prompt_token(make: Callable[..., Engine], cached: int) -> None:
    prefill, decode = make("prefill"), make("decode")
    request = prefill.add("one", cached=cached)
    for _ in range(cached, 19):
        prefill.compute(request, [1, 2, 3])
        assert prefill.worker.stats.is_empty()
    prefill.kv[[1, 2, 3]] = 7
    prefill.compute(request, [1, 2, 3])
    params = prefill.finish(request, [1, 2, 3, 4])  # a token more was scheduled already
    assert decode.fetched("one", params, [6, 4, 5])
    assert bool((decode.kv[[4, 5, 6]] == 7).all())
    assert decode.kv.count_nonzero() == 3 * 2 * TOKENS * 64


@pytest.mark.parametrize("why", ["abort", "error", "window", "more input"])
def test_a_granted_request_that_ends_otherwise_is_not_offered_and_its_token_is_dead(
    make: Callable[..., Engine], why: str
) -> None:
    prefill, decode = make("prefill", max_unclaimed_blocks=3, lease_s=3600), make("decode")
    request = prefill.add("one")
    prefill.compute(request, [1, 2, 3], len(PROMPT))
    given = prefill.unoffered("one")
    claimed = asked("alive", given, PROMPT)
    decode.scheduler.on_new_request(claimed)
    decode.step()
    wait_until(prefill.worker.given["one"].grant.claimed)  # the token is good: it is dead later because it was revoked
    status = {"abort": RequestStatus.FINISHED_ABORTED, "error": RequestStatus.FINISHED_ERROR}
    if why == "more input":
        request.num_prompt_tokens += 1
    ended = status.get(why, RequestStatus.FINISHED_STOPPED)
    assert prefill.finish(request, [0, 2, 3] if why == "window" else [1, 2, 3], ended) is None
    assert not prefill.scheduler.unclaimed
    prefill.step()
    assert not decode.fetched("late", given, [6, 4, 5])
    blocks: Any = SimpleNamespace(get_block_ids=lambda: ([6, 4, 5],))
    decode.scheduler.allocated(claimed, blocks, len(PROMPT) - 1)
    decode.until(lambda: "alive" in decode.ended)
    assert not decode.ended["alive"], "a claim from before lasts no longer"
    assert decode.kv.count_nonzero() == 0
    stats = prefill.worker.stats.take()
    assert stats is not None
    assert stats.data["revoked_grants"] == 1
    assert prefill.sent == set(), "vLLM has freed the blocks by itself"
    assert comes(prefill, decode, "honest")


@pytest.mark.parametrize("at_once", [True, False], ids=["computed again in the same step", "later"])
def test_a_preempted_request_is_revoked_before_the_step_and_granted_anew(
    make: Callable[..., Engine], at_once: bool
) -> None:
    prefill, decode = make("prefill", max_unclaimed_blocks=3), make("decode")
    request = prefill.add("one")
    prefill.compute(request, [1, 2, 3], len(PROMPT))
    first = prefill.unoffered("one")
    grant = prefill.worker.given["one"].grant
    request.num_computed_tokens = 0
    if not at_once:
        prefill.step(preempted=["one"])
        assert not grant.active
        assert prefill.finish(prefill.add("other"), []) is None  # nothing of it was computed
    prefill.kv[[1, 2, 3]] = 5  # another request's
    prefill.kv[[7, 8, 9]] = 7
    prefill.compute(request, [7, 8, 9], len(PROMPT), preempted=["one"] if at_once else [])
    params = prefill.finish(request, [7, 8, 9])
    assert params is not None
    assert params["datadist"] != first["datadist"]
    assert not decode.fetched("first", first, [6, 4, 5])
    assert decode.fetched("second", params, [6, 4, 5])
    assert bool((decode.kv[[4, 5, 6]] == 7).all())


def test_grants_end_by_the_hook_that_precedes_the_step(make: Callable[..., Engine]) -> None:
    prefill = make("prefill")
    request = prefill.add("one")
    prefill.compute(request, [1, 2, 3], len(PROMPT))
    grant = prefill.worker.given["one"].grant
    connectors = [object.__new__(LLMDataDistConnector) for _ in range(2)]
    for connector, half in zip(connectors, (prefill.scheduler, prefill.worker), strict=True):
        connector._half = half  # noqa: SLF001
    step: Any = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids={"one"}, kv_connector_block_state=None)
    orders = connectors[0].build_connector_meta(step)
    assert grant.active
    connectors[1].handle_preemptions(orders)
    assert not grant.active


def test_blocks_of_running_requests_count_until_they_are_revoked(make: Callable[..., Engine]) -> None:
    prefill = make("prefill", max_unclaimed_blocks=3)
    first, second, third = (prefill.add(name) for name in ("first", "second", "third"))
    prefill.compute(first, [1, 2, 3], len(PROMPT))
    prefill.compute(second, [4, 5, 6], len(PROMPT))
    assert prefill.finish(second, [4, 5, 6]) is None
    assert prefill.finish(first, [1, 2, 3], RequestStatus.FINISHED_ABORTED) is None
    prefill.compute(third, [4, 5, 6], len(PROMPT))
    assert prefill.finish(third, [4, 5, 6]) is not None


def test_a_grant_that_ends_while_its_request_runs_is_reported_once_it_was_offered(make: Callable[..., Engine]) -> None:
    prefill = make("prefill")
    request = prefill.add("one")
    prefill.compute(request, [1, 2, 3], len(PROMPT))
    (key,) = prefill.worker.datadist.statistics().keys
    prefill.worker.datadist.cache_manager.unregister_cache(key.cache_id)
    prefill.step()
    assert prefill.finish(request, [1, 2, 3]) is not None
    assert prefill.sent == set(), "vLLM asserts that such a request has ended"
    prefill.step()
    assert prefill.sent == {"one"}


def test_a_grant_is_renewed_while_its_request_runs_and_once_it_is_offered(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, renewed, now = make("prefill", lease_s=3600), [], [time.monotonic()]
    renew = Grant.renew

    def renew_seen(grant: Grant, ttl: float) -> None:
        renewed.append(ttl)
        renew(grant, ttl)

    monkeypatch.setattr(Grant, "renew", renew_seen)  # looks on
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0]))
    request = prefill.add("one")
    prefill.compute(request, [1, 2, 3], len(PROMPT))
    for _ in range(6):
        now[0] += 601
        prefill.compute(request, [1, 2, 3])
    assert renewed == [3600] * 3
    assert prefill.finish(request, [1, 2, 3]) is not None
    for _ in range(6):
        prefill.step()
        now[0] += 601
    assert renewed == [3600] * 4, "readers that have not come have one lease"


@pytest.mark.parametrize("change", ["incarnation", "cluster_id", "port"])
def test_another_process_than_that_of_the_reference_is_not_read(make: Callable[..., Engine], change: str) -> None:
    prefill, decode = make("prefill"), make("decode", link_timeout_ms=1000)
    params = offered(prefill, "first", [1, 2, 3])
    endpoint = prefill.scheduler.ranks[0]
    wrong: dict[str, Any] = {"incarnation": "0" * 32, "cluster_id": 7, "port": 1}
    elsewhere: RankEndpoint = msgspec.structs.replace(endpoint, **{change: wrong[change]})
    assert not decode.fetched("wrong", signed(params, ranks=[elsewhere]), [1, 2, 3])
    assert decode.kv.count_nonzero() == 0
    assert decode.worker.datadist.statistics().links == (), "it is linked to a process that it must not believe"
    assert comes(prefill, decode, "honest")


def test_a_reference_of_another_process_cuts_no_link(make: Callable[..., Engine]) -> None:
    prefill, decode = make("prefill"), make("decode")
    assert comes(prefill, decode, "honest")
    elsewhere: RankEndpoint = msgspec.structs.replace(prefill.scheduler.ranks[0], incarnation="0" * 32)
    assert not decode.fetched("wrong", signed(offered(prefill, "first", [1, 2, 3]), ranks=[elsewhere]), [1, 2, 3])
    assert decode.worker.datadist.explain(prefill.worker.cluster_id).state == "ready"


def test_engines_beyond_the_bound_take_the_place_of_the_longest_idle(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_MAX_ENGINES", 2)  # 64
    decode, prefills = make("decode"), [make("prefill") for _ in range(3)]
    for number in (0, 1, 0, 2):
        assert comes(prefills[number], decode, f"request{len(decode.ended)}")
    idle = prefills[1].worker.cluster_id
    wait_until(lambda: idle not in {each.remote_cluster_id for each in decode.worker.datadist.statistics().links})
    assert decode.worker.datadist.explain(prefills[0].worker.cluster_id).state == "ready"
    assert comes(prefills[1], decode, "again")


def test_an_engine_that_comes_back_before_it_was_unlinked_stays_linked(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_MAX_ENGINES", 2)  # 64
    decode, prefills, gate = make("decode"), [make("prefill") for _ in range(3)], threading.Event()
    for number in (0, 1):
        assert comes(prefills[number], decode, f"request{number}")
    first = prefills[0].worker.cluster_id
    threads = decode.worker.engines.known[first].threads
    for _ in range(engines.THREADS):
        threads.submit(gate.wait, 60)
    assert comes(prefills[2], decode, "takes the place of the first")
    assert comes(prefills[0], decode, "again")
    gate.set()
    threads.shutdown()
    assert decode.worker.datadist.explain(first).state == "ready"


def drains(engine: Engine) -> bool:
    try:
        engine.worker._cache.grant([9], 60.0).revoke()  # noqa: SLF001 (an offer needs a step, which an ending one lacks)
    except LinkError as refusal:
        return "draining" in str(refusal)
    return False


@pytest.mark.parametrize("fetched", [True, False], ids=["fetched", "forgotten"])
def test_an_engine_that_ends_waits_a_while_for_its_offers(
    make: Callable[..., Engine], caplog_vllm: pytest.LogCaptureFixture, fetched: bool
) -> None:
    prefill, decode = make("prefill", drain_ms=60_000 if fetched else 100), make("decode")
    assert comes(prefill, decode, "links")
    params = offered(prefill, "offered", [1, 2, 3])
    with ThreadPoolExecutor() as threads:
        ended = threads.submit(prefill.worker.stop)
        if fetched:
            wait_until(lambda: drains(prefill))
            assert decode.fetched("offered", params, [6, 4, 5])
            assert (prefill.kv[[1, 2, 3]] == decode.kv[[6, 4, 5]]).all()
        ended.result(50)
    assert ("after 100 ms this is given up" in caplog_vllm.text) is not fetched
    if not fetched:
        assert not decode.fetched("offered", params, [6, 4, 5])


def test_a_time_for_offers_that_is_none_is_refused_before_anything_starts(make: Callable[..., Engine]) -> None:
    before = len(Life.all)
    with pytest.raises(ParamError, match="drain_ms=-1: milliseconds above 0"):
        make("prefill", drain_ms=-1)
    assert len(Life.all) == before


def test_an_engine_that_a_finalizer_ends_waits_for_nothing(make: Callable[..., Engine]) -> None:
    prefill = make("prefill", drain_ms=60_000)
    offered(prefill, "offered", [1, 2, 3])
    public_call(prefill.worker.stop)()
    assert prefill.worker.datadist not in Life.all


def test_engines_that_are_gone_are_forgotten_with_their_threads_once_another_comes(
    make: Callable[..., Engine],
) -> None:
    decode, prefills = make("decode"), [make("prefill") for _ in range(3)]
    for number in (0, 1):
        assert comes(prefills[number], decode, f"request{number}")
    gone, there = (each.worker.cluster_id for each in prefills[:2])
    threads = decode.worker.engines.known[gone].threads
    prefills[0].worker.stop()
    wait_until(lambda: gone not in {each.remote_cluster_id for each in decode.worker.datadist.statistics().links})
    assert comes(prefills[2], decode, "another")
    assert list(decode.worker.engines.known) == [there, prefills[2].worker.cluster_id]
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.submit(int)
    assert decode.worker.datadist.statistics().redials == ()


def with_identity(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, role: str, **extra: Any) -> Engine:
    said = extra.pop("identity")
    with monkeypatch.context() as patch:
        patch.setattr(rank, "identity_of", lambda _: said)
        return make(role, **extra)


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ({"vllm": "1", "weights": "w", "rope": "r"}, "weights: w there, v here"),
        ({"vllm": "1", "rope": "r"}, "weights: none there, v here"),
        ({"vllm": "2", "weights": "v", "rope": "r"}, "vllm: 2 there, 1 here"),
        ({"vllm": "1", "weights": "v", "rope": "s", "draft": "d"}, "draft: d there, none here; rope: s there, r here"),
    ],
)
def test_another_identity_is_refused_with_every_difference_before_anything_is_read(
    make: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog_vllm: pytest.LogCaptureFixture,
    theirs: dict[str, str],
    named: str,
) -> None:
    ours = {"vllm": "1", "weights": "v", "rope": "r"}
    decode = with_identity(make, monkeypatch, "decode", identity=ours, accept_versions=["0.9", "3"])
    prefill = with_identity(make, monkeypatch, "prefill", identity=theirs)
    assert not decode.fetched("one", offered(prefill, "one", [1, 2, 3]), [1, 2, 3])
    assert f"the engines do not fit: {named}\n" in caplog_vllm.text
    assert decode.worker.datadist.statistics().links == ()
    assert comes(with_identity(make, monkeypatch, "prefill", identity=ours), decode, "equal")
    assert comes(with_identity(make, monkeypatch, "prefill", identity=ours | {"vllm": "3"}), decode, "accepted")


def test_wrong_accept_versions_end_the_start(make: Callable[..., Engine]) -> None:
    with pytest.raises(ParamError, match=r"accept_versions: '0\.32': not a list"):
        make("decode", accept_versions="0.32")


def adapted(name: str, params: Any, folder: Path | None, number: int = 1) -> Request:
    request = asked(name, params, PROMPT)
    request.lora_request = LoRARequest("a", number, str(folder)) if folder else None
    return request


def add(engine: Engine, request: Request) -> int | None:
    """Add a request; return what vLLM is told when the request's adapter is known."""
    engine.scheduler.on_new_request(request)
    wait_until(lambda: engine.scheduler.matched_tokens(request, 0) is not None)
    return engine.scheduler.matched_tokens(request, 0)


def test_adapters_of_one_name_with_other_weights_do_not_fit(make: Callable[..., Engine], tmp_path: Path) -> None:
    prefill, decode = make("prefill"), make("decode")
    one, other = (adapter(tmp_path / name, scale) for name, scale in (("one", 1.0), ("other", 2.0)))
    for number, (theirs, ours, fits) in enumerate([(one, one, True), (one, other, False), (one, None, False)]):
        request = adapted(f"p{number}", {"do_remote_decode": True}, theirs)
        assert add(prefill, request) == 0
        prefill.compute(request, [1, 2, 3], len(PROMPT))
        params = prefill.finish(request, [1, 2, 3])
        add(decode, adapted(f"d{number}", params, ours, 1 + (ours is other)))
        assert (f"d{number}" in decode.scheduler.take_orders(NOTHING).claims) is fits


def test_requests_wait_while_their_adapter_is_digested_and_others_do_not(
    make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = make("prefill"), make("decode")
    folder = adapter(tmp_path / "one", 1.0)
    request = adapted("first", {"do_remote_decode": True}, folder)
    add(prefill, request)
    prefill.compute(request, [1, 2, 3], len(PROMPT))
    params = prefill.finish(request, [1, 2, 3])
    may_go = threading.Event()
    monkeypatch.setattr(identity, "digest_of", lambda path: digest_of(path) if may_go.wait(60) else "")
    waiting = adapted("second", {"do_remote_decode": True}, folder, 2), adapted("third", params, folder)
    for engine, each in zip((prefill, decode), waiting, strict=True):
        engine.scheduler.on_new_request(each)
        assert engine.scheduler.matched_tokens(each, 0) is None
        assert decode.scheduler.take_orders(NOTHING).claims == {}, "nothing is claimed before the prompt is compared"
        assert add(engine, asked("plain", {}, PROMPT)) == 0
    aborted = adapted("aborted", params, folder)
    decode.scheduler.on_new_request(aborted)
    assert decode.scheduler.finished(aborted, ([],)) == (False, None)
    may_go.set()
    wait_until(lambda: decode.scheduler.matched_tokens(waiting[1], 0) == len(PROMPT) - 1)
    orders = decode.scheduler.take_orders(NOTHING)
    assert (list(orders.claims), orders.drops, orders.refused) == (["third"], [], [])


def test_an_adapter_that_cannot_be_told_apart_is_not_offered(
    make: Callable[..., Engine], tmp_path: Path, caplog_vllm: pytest.LogCaptureFixture
) -> None:
    request = adapted("one", {"do_remote_decode": True}, tmp_path / "nowhere")
    prefill = make("prefill")
    assert add(prefill, request) == 0
    prefill.compute(request, [1, 2, 3], len(PROMPT))
    assert prefill.finish(request, [1, 2, 3]) is None
    assert "the KV of request one cannot be named" in caplog_vllm.text


def test_an_adapter_of_no_safetensors_file_is_known_by_its_other_files(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    folder = adapter(tmp_path / "one", 1.0)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    request = adapted("one", {"do_remote_decode": True}, folder)
    prefill = make("prefill")
    assert add(prefill, request) == 0
    prefill.compute(request, [1, 2, 3], len(PROMPT))
    assert prefill.finish(request, [1, 2, 3]) is not None


def test_the_end_of_a_scheduler_ends_the_threads_that_digest(make: Callable[..., Engine], tmp_path: Path) -> None:
    prefill = make("prefill")
    add(prefill, adapted("one", {"do_remote_decode": True}, adapter(tmp_path / "one", 1.0)))
    connector: Any = LLMDataDistConnector.__new__(LLMDataDistConnector)
    vars(connector)["_half"] = prefill.scheduler
    connector.shutdown()
    connector.shutdown()
    assert not [each for each in threading.enumerate() if each.name.startswith("lldd-vllm-adapter")]


def adapter(folder: Path, scale: float, alpha: int = 8) -> Path:
    folder.mkdir()
    save_file({"layer.lora_A.weight": torch.full((8, 64), scale)}, folder / "adapter_model.safetensors")
    config = {"r": 8, "lora_alpha": alpha, "base_model_name_or_path": str(folder)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_an_engine_that_leaves_its_host_without_a_secret_does_not_start() -> None:
    with pytest.raises(ParamError, match="reference_secret_file: not given"):
        Engine("decode", options={"llm.Insecure": "1"})
