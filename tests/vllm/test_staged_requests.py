"""Both halves of the connector with staged KV, in engines that schedule as vLLM does, without a model.

Freed device blocks and freed slots are filled with NaN, so whoever reads one too late, or gives one back too early,
shows it.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch
from vllm.v1.request import Request, RequestStatus

from llm_datadist.integrations.request_states import Offer
from llm_datadist.integrations.vllm.offers import ClaimedRequests
from llm_datadist.integrations.vllm.staging import PortableCopier
from tests.vllm.test_requests import BLOCKS, TOKENS, Engine, asked
from tests.vllm.test_staging import WAYS, device_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llm_datadist.integrations.vllm.scheduler import Scheduler
    from llm_datadist.integrations.vllm.staging import SlotPool

pytestmark = pytest.mark.usefixtures("one_rank")

#: Slots of the smallest pool: one request with as many tokens as there are blocks for.
SLOTS = BLOCKS
SLOT_BYTES = 2 * TOKENS * 64
NAN = -1  # four such bytes are a NaN, two are a NaN of 16 bits


class DelayedCopier(PortableCopier):
    """Copies on another thread, a little later."""

    def __init__(self, copier: PortableCopier, source: random.Random) -> None:
        self.copier, self.source = copier, source

    def save(self, blocks: list[int], slots: list[int]) -> None:
        self._later(self.copier.save, blocks, slots)

    def load(self, slots: list[int], blocks: list[int]) -> None:
        self._later(self.copier.load, slots, blocks)

    def _later(self, copy: Callable[[list[int], list[int]], None], *args: list[int]) -> None:
        timer = threading.Timer(self.source.random() * 0.003, copy, args)
        timer.start()
        timer.join()


class GatedCopier(DelayedCopier):
    """Waits before the copy of a step that grants, until the gate is open."""

    def __init__(self, copier: PortableCopier, scheduler: Scheduler) -> None:
        super().__init__(copier, random.Random(0))
        self.scheduler = scheduler
        self.reached, self.gate = threading.Event(), threading.Event()

    def save(self, blocks: list[int], slots: list[int]) -> None:
        if any(each.offer is Offer.GRANTED for each in self.scheduler.requests.values()):
            self.reached.set()
            assert self.gate.wait(60)
        super().save(blocks, slots)


class StagedEngine(Engine):
    """Schedules in the order of vLLM: its queue, chunks of prompts, blocks, preemptions."""

    def __init__(self, role: str, seed: int, device_blocks: int = BLOCKS, **extra: Any) -> None:
        super().__init__(role, staging=True, **{"staging_bytes": SLOTS * SLOT_BYTES} | extra)
        self.random = random.Random(seed)
        assert isinstance(self.worker.copier, PortableCopier)
        self.portable = self.worker.copier
        self.worker.copier = DelayedCopier(self.portable, self.random)
        self.free = list(range(1, device_blocks))
        self.kv[:] = NAN
        self.blocks: dict[str, list[int]] = {}
        self.queue: deque[Request] = deque()
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.offers: dict[str, dict[str, Any] | None] = {}
        self.ends = True  # requests, with their prompts
        self.waits = 0  # times that a request had to wait
        self._poison_freed_slots()

    def _poison_freed_slots(self) -> None:
        """Fill slots that the scheduler takes back."""
        memory = self.portable.slots["layer"]
        for pool in (self.scheduler.offering, self.scheduler.fetching):

            def poisoned(request: str, pool: SlotPool = pool, free: Callable[[str], None] = pool.free) -> None:
                for _, slots in pool.held.get(request, ()):
                    memory[slots] = NAN
                    if memory.is_cuda:
                        torch.cuda.synchronize()
                free(request)

            pool.free = poisoned  # type: ignore[method-assign]

    def comes(self, request: Request) -> None:
        self.scheduler.on_new_request(request)
        self.queue.append(request)

    def give_back(self, request: Request) -> None:
        blocks = self.blocks.pop(request.request_id, [])
        self.kv[blocks] = NAN
        self.free += blocks

    def abort(self, request: Request) -> None:
        """End a request of the queue, or one that runs."""
        (self.queue if request in self.queue else self.running).remove(request)
        request.status = RequestStatus.FINISHED_ABORTED
        assert self.scheduler.finished(request, (self.blocks.get(request.request_id, []),)) == (False, None)
        self.give_back(request)

    def preempt(self) -> Any:
        request = self.running.pop()
        self.give_back(request)
        request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED
        self.queue.appendleft(request)
        return request.request_id

    def run(self, kv: Callable[[Request], torch.Tensor], *, preempt: bool = False) -> None:
        """Make a step, in which a model writes ``kv`` of the scheduled tokens."""
        preempted = {self.preempt()} if preempt and self.running else set()
        tokens = {each.request_id: self._chunk(each) for each in self.running}
        skipped = []
        while self.queue and not preempted:
            request = self.queue.popleft()
            name, needed = request.request_id, -(-request.num_prompt_tokens // TOKENS)
            count = self.scheduler.matched_tokens(request, 0)
            if count is None:
                self.waits += 1
                skipped.append(request)
                continue
            if needed > len(self.free):
                skipped.append(request)
                break
            self.blocks[name] = [self.free.pop() for _ in range(needed)]
            given: Any = SimpleNamespace(get_block_ids=lambda name=name: (self.blocks[name],))
            self.scheduler.allocated(request, given, count)
            if count:
                self.loading[name] = request
            else:
                self.running.append(request)
                tokens[name] = self._chunk(request)
        self.queue.extendleft(reversed(skipped))
        step: Any = SimpleNamespace(
            num_scheduled_tokens=tokens,
            preempted_req_ids=preempted,
            kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda name: (self.blocks[name],)),
        )
        orders = self.scheduler.take_orders(step)
        self.worker.revoke(orders)
        for request in self.running:
            self._compute(request, kv(request), tokens[request.request_id])
        self.worker.obey(orders, idle=not tokens)
        self.worker.save()
        results = self.worker.results()
        assert results.finished_sending == set(), "vLLM has the blocks already"
        for name in results.finished_recving:
            self._came(self.loading.pop(name), kv, came=name not in results.failed_recving)
        told: Any = SimpleNamespace(
            kv_connector_worker_meta=self.worker.take_told(),
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
        )
        self.scheduler.take_output(told)
        for request in [each for each in self.running if self.ends and not self._chunk(each)]:
            self._end(request)

    def _chunk(self, request: Request) -> int:
        left: int = request.num_prompt_tokens - request.num_computed_tokens
        return min(self.random.randint(1, 64), left)

    def _compute(self, request: Request, kv: torch.Tensor, count: int) -> None:
        if self.kv.is_cuda:  # a step that is only submitted
            torch.cuda._sleep(1_000_000)  # noqa: SLF001
        for token in range(request.num_computed_tokens, request.num_computed_tokens + count):
            self.kv[self.blocks[request.request_id][token // TOKENS], :, token % TOKENS] = kv[token]
        request.num_computed_tokens += count

    def _came(self, request: Request, kv: Callable[[Request], torch.Tensor], *, came: bool) -> None:
        self.ended[request.request_id] = came
        if came:
            blocks = self.kv[self.blocks[request.request_id]].transpose(1, 2).flatten(0, 1).cpu()
            tokens = request.num_prompt_tokens - 1  # vLLM computes the last one in any case
            assert blocks[:tokens].equal(kv(request)[:tokens]), "the request would read other bytes"
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.scheduler.finished(request, (self.blocks[request.request_id],))
        self.give_back(request)

    def _end(self, request: Request) -> None:
        self.running.remove(request)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        kept, self.offers[request.request_id] = self.scheduler.finished(request, (self.blocks[request.request_id],))
        assert not kept
        self.give_back(request)

    def is_idle(self) -> bool:
        held = self.scheduler.offering.held or self.scheduler.fetching.held
        return not held and not self.scheduler.needs_steps()


@pytest.fixture(params=WAYS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StagedEngine]]:
    made: list[StagedEngine] = []
    device = device_of(request.param, monkeypatch)

    def one(role: str, seed: int = 0, **extra: Any) -> StagedEngine:
        made.append(StagedEngine(role, seed, device=device, **extra))
        return made[-1]

    yield one
    for each in made:
        each.worker.stop()


def kv_of(request: Request) -> torch.Tensor:
    """Return the KV of a prompt: bytes that depend on all its tokens."""
    generator = torch.Generator().manual_seed(hash(tuple(request.prompt_token_ids or ())))
    return torch.randint(0, 100, (request.num_prompt_tokens, 2, 64), dtype=torch.int8, generator=generator)


def until(done: Callable[[], bool], step: Callable[[], object]) -> None:
    limit = time.monotonic() + 240
    while not done():
        assert time.monotonic() < limit
        step()


class Cluster:
    """Engines, and a proxy that routes what the one has computed to the other."""

    def __init__(self, source: random.Random, *pairs: tuple[StagedEngine, StagedEngine]) -> None:
        self.source, self.pairs = source, pairs
        self.prompts: dict[str, list[int]] = {}
        self.routed: set[str] = set()

    def ask(self, count: int, tokens: int) -> None:
        for number in range(count):
            prompt = [self.source.randrange(1000) for _ in range(self.source.randint(2, tokens))]
            self.prompts[f"r{number}"] = prompt
            self.pairs[number % len(self.pairs)][0].comes(asked(f"r{number}", {"do_remote_decode": True}, prompt))

    def step(self) -> None:
        for engine in {engine for pair in self.pairs for engine in pair}:
            engine.run(kv_of, preempt=self.source.random() < 0.03)
        for prefill, decode in self.pairs:
            for name in prefill.offers.keys() - self.routed:
                self.routed.add(name)
                assert prefill.offers[name] is not None, "no request is refused"
                decode.comes(asked(f"{name}'", prefill.offers[name], self.prompts[name]))

    def is_done(self) -> bool:
        ended = sum(len(engine.ended) for _, engine in self.pairs)
        return ended == len(self.prompts) and all(engine.is_idle() for pair in self.pairs for engine in pair)


@pytest.mark.parametrize("seed", range(3))
def test_requests_wait_for_the_smallest_ring_and_get_their_bytes(make: Callable[..., StagedEngine], seed: int) -> None:
    prefill, decode = make("prefill", seed), make("decode", seed, device_blocks=48)
    cluster = Cluster(random.Random(seed), (prefill, decode))
    cluster.ask(32, 300)
    until(cluster.is_done, cluster.step)
    assert all(decode.ended.values())
    assert prefill.waits
    assert len(prefill.free) == BLOCKS - 1
    assert len(decode.free) == 47


def test_two_engines_that_read_each_other_with_full_rings_go_on(make: Callable[..., StagedEngine]) -> None:
    one, two = (make("both", seed, staging_bytes=2 * SLOTS * SLOT_BYTES) for seed in range(2))
    cluster = Cluster(random.Random(0), (one, two), (two, one))
    cluster.ask(32, 500)
    until(cluster.is_done, cluster.step)
    assert all((one.ended | two.ended).values())
    assert one.waits
    assert two.waits


def test_a_prompt_is_granted_once_its_slots_have_all_bytes(make: Callable[..., StagedEngine]) -> None:
    prefill, decode = make("prefill"), make("decode")
    copier = prefill.worker.copier = GatedCopier(prefill.portable, prefill.scheduler)
    prompt = list(range(20))
    prefill.comes(asked("one", {"do_remote_decode": True}, prompt))
    running = threading.Thread(target=until, args=(lambda: prefill.offers, lambda: prefill.run(kv_of)))
    running.start()
    assert copier.reached.wait(60)
    decode.comes(asked("early", prefill.unoffered("one"), prompt))
    until(lambda: "early" in decode.ended, lambda: decode.run(kv_of))
    copier.gate.set()
    running.join(60)
    decode.comes(asked("one'", prefill.offers["one"], prompt))
    until(lambda: "one'" in decode.ended, lambda: decode.run(kv_of))
    assert decode.ended == {"early": False, "one'": True}


def test_slots_are_free_after_an_abort_at_any_time(make: Callable[..., StagedEngine]) -> None:
    """In the queue with and without slots, half computed, preempted, granted; in a decode engine before its blocks."""
    prefill, decode = make("prefill", lease_s=3600), make("decode", device_blocks=4)
    prompt = list(range(400))
    requests = [asked(f"r{number}", {"do_remote_decode": True}, prompt[: 400 - number]) for number in range(3)]
    for request in requests:
        prefill.comes(request)
    prefill.run(kv_of)
    assert list(prefill.scheduler.offering.held) == ["r0"]
    prefill.run(kv_of, preempt=True)
    assert prefill.is_idle(), "a preempted request has no slots"
    prefill.run(kv_of)
    assert list(prefill.scheduler.offering.held) == ["r0"]
    prefill.abort(requests[2])
    prefill.abort(requests[0])
    assert prefill.is_idle()
    prefill.ends = False  # requests go on to decode here
    until(lambda: prefill.scheduler.requests["r1"].offer is Offer.GRANTED, lambda: prefill.run(kv_of))
    reference = prefill.unoffered("r1")
    prefill.abort(requests[1])
    assert prefill.is_idle()
    prefill.run(kv_of)
    decode.comes(waiting := asked("waiting", reference, prompt[:399]))
    decode.run(kv_of)
    assert list(decode.scheduler.fetching.held) == ["waiting"]
    assert decode.queue, "it waits for blocks"
    decode.abort(waiting)
    assert decode.is_idle()


def test_a_failed_fetch_frees_its_slots_and_copies_nothing(make: Callable[..., StagedEngine]) -> None:
    prefill, decode = make("prefill", lease_s=0.001), make("decode")
    prompt = list(range(20))
    prefill.comes(asked("one", {"do_remote_decode": True}, prompt))
    until(lambda: bool(prefill.offers) and prefill.is_idle(), lambda: prefill.run(kv_of))
    decode.comes(asked("late", prefill.offers["one"], prompt))
    until(lambda: "late" in decode.ended, lambda: decode.run(kv_of))
    assert decode.ended == {"late": False}
    assert decode.is_idle()
    assert bool((decode.kv == NAN).all())


def test_a_request_that_vllm_did_not_let_wait_is_not_offered(make: Callable[..., StagedEngine]) -> None:
    """A request with logprobs of its prompt reads no prefix cache, so vLLM schedules it whatever it is answered."""
    prefill = make("prefill", lease_s=3600)
    prefill.comes(asked("first", {"do_remote_decode": True}, list(range(500))))
    until(lambda: bool(prefill.offers), lambda: prefill.run(kv_of))
    second = prefill.add("second", list(range(20)))
    assert prefill.scheduler.matched_tokens(second, 0) is None
    for _ in range(2):
        prefill.compute(second, [1, 2, 3], 10)
    assert prefill.finish(second, [1, 2, 3]) is None
    stats = prefill.scheduler.stats.take()
    assert stats is not None
    assert stats.data["refused_offers"] == 1


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_an_engine_that_cannot_offer_lets_no_prompt_wait(make: Callable[..., StagedEngine], role: str) -> None:
    """A decode engine has no slots for offers; inside MultiConnector a prefill engine may not know its ranks yet."""
    engine = make(role, lease_s=3600)
    engine.scheduler.ranks = []
    engine.worker.take_told()  # has the endpoint
    for number in range(3):
        engine.comes(asked(f"r{number}", {"do_remote_decode": True}, list(range(500))))
        until(lambda name=f"r{number}": name in engine.offers, lambda: engine.run(kv_of))  # type: ignore[misc]
    assert engine.offers == dict.fromkeys(["r0", "r1", "r2"])
    assert not engine.waits
    assert not engine.scheduler.offering.held


def test_an_aborted_fetch_keeps_its_slots_until_its_pull_has_ended(
    make: Callable[..., StagedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the pull would write into slots of another request. vLLM keeps the blocks as long."""
    prefill, decode = make("prefill", staging_bytes=2 * SLOTS * SLOT_BYTES), make("decode")
    prompts = {name: [number, *range(299)] for number, name in enumerate(["one", "two"])}
    for name, prompt in prompts.items():
        prefill.comes(asked(name, {"do_remote_decode": True}, prompt))
    until(lambda: len(prefill.offers) == 2, lambda: prefill.run(kv_of))
    reached, gate, pull = threading.Event(), threading.Event(), decode.worker._pull_rows  # noqa: SLF001

    def gated(*args: Any) -> None:
        reached.set()
        assert gate.wait(60)
        pull(*args)

    monkeypatch.setattr(decode.worker, "_pull_rows", gated)
    decode.comes(first := asked("one", prefill.offers["one"], prompts["one"]))
    until(reached.is_set, lambda: decode.run(kv_of))
    first.status = RequestStatus.FINISHED_ABORTED
    assert decode.scheduler.finished(first, (decode.blocks["one"],)) == (False, None)
    decode.comes(asked("two", prefill.offers["two"], prompts["two"]))
    for _ in range(3):
        decode.run(kv_of)
    assert list(decode.scheduler.fetching.held) == ["one"]
    assert decode.waits == 3
    gate.set()
    until(lambda: len(decode.ended) == 2, lambda: decode.run(kv_of))
    assert decode.ended == {"one": True, "two": True}


def test_slots_are_free_once_the_grants_of_all_ranks_have_ended(make: Callable[..., StagedEngine]) -> None:
    prefill = make("prefill", lease_s=0.001)
    prefill.scheduler.ranks *= 2
    prefill.comes(asked("one", {"do_remote_decode": True}, list(range(20))))
    until(lambda: bool(prefill.offers) and not prefill.worker.given, lambda: prefill.run(kv_of))
    assert prefill.scheduler.needs_steps()
    assert "one" in prefill.scheduler.offering.held, "the other rank may be read"
    other = ClaimedRequests(set(), Counter({"one": 1})).aggregate(ClaimedRequests({"two"}, Counter()))
    told: Any = SimpleNamespace(kv_connector_worker_meta=other, finished_sending=None, finished_recving=None)
    prefill.scheduler.take_output(told)
    assert prefill.is_idle()


def test_a_second_request_of_the_same_name_leaves_the_slots_of_an_offer_alone(
    make: Callable[..., StagedEngine],
) -> None:
    """vLLM has forgotten the first one, and makes names unique unless it is told not to."""
    prefill, decode = make("prefill"), make("decode")
    prompt = list(range(20))
    prefill.comes(asked("one", {"do_remote_decode": True}, prompt))
    until(lambda: bool(prefill.offers), lambda: prefill.run(kv_of))
    first = prefill.offers.pop("one")
    prefill.comes(asked("one", {"do_remote_decode": True}, prompt[1:]))
    prefill.run(kv_of)
    prefill.run(kv_of, preempt=True)
    until(lambda: bool(prefill.offers), lambda: prefill.run(kv_of))
    assert prefill.offers == {"one": None}
    decode.comes(asked("one'", first, prompt))
    until(lambda: "one'" in decode.ended, lambda: decode.run(kv_of))
    assert decode.ended == {"one'": True}
