"""Slots for staged KV, and the copies into and out of them, without an engine."""

from __future__ import annotations

import json
from collections import deque
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch

from llm_datadist import LLMConfig, LLMDataDist, LLMRole
from llm_datadist.errors import ParamError
from llm_datadist.integrations.vllm import staging
from llm_datadist.integrations.vllm.staging import (
    PortableCopier,
    SlotPool,
    block_rows,
    blocks_of,
    make_copier,
    make_slots,
    staged_slots,
)

SLOTS = 6
_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
#: A device, and how it copies; by vLLM's operation, if memory cannot be locked.
WAYS = ["cpu", pytest.param("cuda", marks=_CUDA), pytest.param("cuda, not locked", marks=_CUDA)]


def device_of(way: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the device of a way; its memory is locked from now on, or not."""
    device, _, unlocked = way.partition(", ")
    if unlocked:
        monkeypatch.setattr(staging, "_MAPPED", 1 << 30)  # no flag: CUDA refuses it
    return device


class RingMachine(RuleBasedStateMachine):
    """Requests in vLLM's queue, asked in its order in each step; those with slots end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.slot_pool = SlotPool(range(SLOTS))
        self.queue: deque[tuple[str, int]] = deque()
        self.held: dict[str, list[int]] = {}
        self.made = 0

    def take(self, name: str, count: int) -> list[int]:
        """Ask for blocks of two groups."""
        wanted = [(3, 3 + count // 2), (0, count - count // 2)]
        found = self.slot_pool.take(name, wanted)
        assert not found or [(first, first + len(slots)) for first, slots in found] == wanted
        return [slot for _, slots in found for slot in slots]

    @rule(count=st.integers(1, SLOTS))
    def comes(self, count: int) -> None:
        self.made += 1
        self.queue.append((f"r{self.made}", count))

    @rule(reached=st.integers(1, 8))
    def step(self, reached: int) -> None:
        """Ask the first requests of the queue; others are not reached in this step."""
        waits: list[tuple[str, int]] = []
        free = SLOTS - sum(map(len, self.held.values()))
        while self.queue and reached:
            reached -= 1
            name, count = self.queue.popleft()
            slots = self.take(name, count)
            assert bool(slots) == (count <= free and not waits), "all or none, in the order of the queue"
            if not slots:
                waits.append((name, count))
            else:
                assert len(slots) == count
                free -= count
                self.held[name] = slots
        self.queue.extendleft(reversed(waits))
        self.slot_pool.closed = False

    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        if self.held:
            name = data.draw(st.sampled_from(sorted(self.held)))
            self.slot_pool.free(name)
            self.slot_pool.free(name)  # idempotent
            del self.held[name]

    @rule(data=st.data(), count=st.integers(1, SLOTS))
    def asks_again(self, data: st.DataObject, count: int) -> None:
        """A request that got no blocks is asked again, perhaps for another number, as its cached prefix changes."""
        if not self.held:
            return
        name = data.draw(st.sampled_from(sorted(self.held)))
        before = self.held.pop(name)
        slots = self.take(name, count)
        if not slots:
            assert count > SLOTS - sum(map(len, self.held.values()))
        else:
            self.held[name] = slots
            assert len(slots) == count
            assert count != len(before) or slots == before
        self.slot_pool.closed = False

    @rule(data=st.data())
    def leaves_the_queue(self, data: st.DataObject) -> None:
        if self.queue:
            gone = data.draw(st.sampled_from(sorted(self.queue)))
            self.queue.remove(gone)
            self.slot_pool.free(gone[0])

    @invariant()
    def no_slot_has_two_requests(self) -> None:
        slots = [slot for held in self.held.values() for slot in held]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(SLOTS))

    def teardown(self) -> None:
        """Whoever waits gets its slots once those that have some end."""
        while self.queue:
            for name in list(self.held):
                self.slot_pool.free(name)
                del self.held[name]
            before = len(self.queue)
            self.step(8)
            assert len(self.queue) < before


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def raw(view: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each block of a place, in the order of memory."""
    flat = torch.empty(0, dtype=torch.uint8, device=view.device).set_(
        view.untyped_storage(), view.storage_offset() * view.element_size(), (view.nbytes,)
    )
    return flat.reshape(len(view), -1).cpu()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4)], ids=["heads first", "tokens first"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_slot_has_the_bytes_of_the_block_in_its_order(
    way: str, order: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    datadist, device, at_end = pool(1 << 20), device_of(way, monkeypatch), ExitStack()
    made = torch.randint(0, 100, (2, 7, 2, 4, 3, 8)).to(device, dtype)
    places = {name: place.permute(order) for name, place in zip("ab", made, strict=True)}
    slots = make_slots(datadist, 3, places)
    copier = make_copier(places, slots, no_operation if device == "cpu" else copy_as_cuda, at_end)
    assert isinstance(copier, PortableCopier)
    assert copier.slots["a"].is_cuda is (way == "cuda")  # they were unlocked at the end of the test before
    copier.save([6, 1], [2, 0])
    for place, view in places.items():
        assert slots[place].device.type == "cpu"
        assert slots[place].stride() == view.stride()
        assert raw(slots[place])[[2, 0]].equal(raw(view)[[6, 1]])
        assert not raw(slots[place])[1].any()
    before = made.clone()
    copier.load([0], [5])
    for view, place in zip(places.values(), before, strict=True):
        place[5] = place[1]
        assert raw(view).equal(raw(place))
    at_end.close()
    datadist.finalize()


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_has_what_the_step_before_it_writes(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is submitted, and runs later; so does a load, which the next step reads. A copy takes a millisecond."""
    datadist, device, at_end, size = pool(128 << 20), device_of(way, monkeypatch), ExitStack(), 32 << 20
    places = {"a": torch.zeros(3, size, dtype=torch.int8, device=device)}
    slots = make_slots(datadist, 3, places)
    copier = make_copier(places, slots, no_operation if device == "cpu" else copy_as_cuda, at_end)
    for value in range(1, 10):
        if device == "cuda":
            torch.cuda._sleep(1_000_000)  # noqa: SLF001 (cycles)
        places["a"][1] = value
        copier.save([1], [2])
        assert slots["a"][2, -1] == value
        assert bool((slots["a"][2] == value).all())
        copier.load([2], [0])
        slots["a"][2, size // 2 :] = -1
        assert bool((places["a"][0] == value).all())
    at_end.close()
    datadist.finalize()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["heads first", "tokens first"])
@pytest.mark.parametrize("size", [8, 3])
def test_blocks_as_rows_are_the_same_memory(size: int, order: tuple[int, ...]) -> None:
    blocks = torch.randint(0, 100, (4, 2, 5, size), dtype=torch.int8)
    rows = block_rows(blocks.permute(order))
    assert rows.data_ptr() == blocks.data_ptr()
    assert rows.dtype == (torch.int64 if size == 8 else torch.int8)
    assert rows.view(torch.int8).equal(blocks.reshape(4, -1))


def test_other_devices_are_copied_by_the_operation_of_vllm() -> None:
    calls: list[Any] = []
    device, slots = {"a": torch.zeros(4, 2, device="meta")}, {"a": torch.zeros(2, 2)}
    copier = make_copier(device, slots, lambda *args: calls.append(args), ExitStack())
    copier.save([3], [0])
    copier.load([1], [2])
    assert calls == [(device, slots, [3], [0], "d2h"), (slots, device, [1], [2], "h2d")]


def copy_as_cuda(sources: Any, targets: Any, source_ids: list[int], target_ids: list[int], direction: str) -> None:
    """Copy as vLLM's operation does on its platform for CUDA."""
    for name, source in sources.items():
        moved = source[torch.tensor(source_ids, device=source.device)]
        target = targets[name]
        there = torch.tensor(target_ids, device=target.device)
        target[there] = moved.cpu() if direction == "d2h" else moved.to(target.device)


def no_operation(*args: object) -> None:
    raise AssertionError(f"vLLM's operation is not for hosts: {args}")


def pool(nbytes: int) -> LLMDataDist:
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.mem_pool_cfg = json.dumps({"memory_size": nbytes, "page_shift": 16})
    datadist = LLMDataDist(LLMRole.PROMPT, 1)
    datadist.init(config.generate_options())
    return datadist


def config_of(role: str, **extra: object) -> Any:
    """Return the configuration of an engine with blocks of 8 tokens, and prompts of at most 1,000."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            get_from_extra_config=extra.get, is_kv_producer=role != "consumer", is_kv_consumer=role != "producer"
        ),
        model_config=SimpleNamespace(max_model_len=1_000),
        cache_config=SimpleNamespace(block_size=8),
    )


def slots_of(windows: list[int | None], role: str = "producer", **extra: object) -> tuple[int, int]:
    """Return the slots of that engine if a block has 100 bytes."""
    cache: Any = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=400), SimpleNamespace(size=800)], num_blocks=8)
    _, slots, nbytes = staged_slots(config_of(role, **extra), cache, windows)
    return slots.stop, nbytes


@pytest.mark.parametrize(("role", "offering"), [("producer", 250), ("consumer", 0), ("both", 125)])
def test_offers_and_fetches_have_slots_of_their_own(role: str, offering: int) -> None:
    """Else the offers of two engines that read each other could fill both, and the fetches of both would wait."""
    cache: Any = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=800)], num_blocks=8)
    of_offers, of_fetches, _ = staged_slots(config_of(role, staging=True, staging_bytes=25_000), cache, [None])
    assert of_offers == range(offering)
    assert of_fetches == range(offering, 250)


def test_the_smallest_ring_holds_one_request_of_max_model_len() -> None:
    assert slots_of([None], staging=True, staging_bytes=12_500) == (125, 100)
    with pytest.raises(ParamError, match=r"^staging_bytes=12499: requests of max_model_len=1000 tokens need 12500$"):
        slots_of([None], staging=True, staging_bytes=12_499)
    assert slots_of([None, 20], staging=True, staging_bytes=12_900) == (129, 100)
    assert slots_of([None], staging=True) == ((4 << 30) // 100, 100)
    assert slots_of([None], "both", staging=True, staging_bytes=25_000) == (250, 100)
    with pytest.raises(ParamError, match=r"need 25000$"):
        slots_of([None], "both", staging=True, staging_bytes=24_999)
    assert slots_of([None], staging_bytes=1) == (0, 0)


@pytest.mark.parametrize("window", [1, 7, 8, 9, 20, 24, 10_000])
def test_no_request_needs_more_blocks_than_the_ring_is_sized_for(window: int) -> None:
    """The blocks are those of `Scheduler._needed`."""
    for tokens in range(1, 1_001):
        first = max(0, tokens - window) // 8
        assert -(-tokens // 8) - first <= blocks_of(1_000, window, 8)


def test_each_block_is_saved_once() -> None:
    slot_pool = SlotPool(range(9))
    (_, whole), (_, window) = slot_pool.take("one", [(0, 6), (4, 6)])
    blocks = [[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]]
    assert slot_pool.save("one", [each[:3] for each in blocks], 2) == [(10, whole[0]), (11, whole[1])]
    found = slot_pool.save("one", blocks, 5)
    assert found == [(12, whole[2]), (13, whole[3]), (14, whole[4]), (24, window[0])]
    assert slot_pool.save("one", blocks, 5) == []
    assert slot_pool.save("one", blocks, 6) == [(15, whole[5]), (25, window[1])]
    slot_pool.free("one")
    assert slot_pool.take("one", [(0, 6), (4, 6)])
    assert [block for block, _ in slot_pool.save("one", blocks, 1)] == [10], "other slots may have other bytes"
