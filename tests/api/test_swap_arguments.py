"""What swap_blocks refuses, both ways, on a device that needs staging and hears nothing of it (interface R1, R16,
§6.9).

Without a device that counts, and each argument by itself: test_bad_input_calls.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import Cache, CacheDesc, DataType, LLMException, LLMStatusCode, Placement
from llm_datadist.testing import StagedDevice
from tests.support.memory import cpu_cache
from tests.support.moves import Use
from tests.support.refusals import (
    MISMATCH,
    RULE,
    SWAP_PAIRS,
    Kind,
    Row,
    Spec,
    Table,
    attempt,
    bad,
    raises,
    refuse,
    state,
)
from tests.support.world import fill, make_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.ends import LocalEnd

pytestmark = pytest.mark.covers("CacheManager.swap_blocks", "LLMStatusCode.LLM_ENGINE_FINALIZED")

BLOCKS, HOST_BLOCKS = 8, 12
GOOD = {0: 0}
CACHE = Spec(("no cache", 1, []))


def desc(blocks: int, *, tensors: int = 2, block: int = 64, placement: Placement = Placement.DEVICE) -> CacheDesc:
    return CacheDesc(tensors, [blocks, block], DataType.DT_UINT8, placement)


@pytest.fixture
def full(end: LocalEnd) -> Iterator[LocalEnd]:
    """A device blocks cache, CPU caches, others that do not fit them or are gone; the device never hears of a call."""
    staged = StagedDevice()
    end.start("PROMPT", 1, device=staged)
    world = end.world
    for name, each in {
        "device": desc(BLOCKS),
        "other device": desc(BLOCKS),
        "gone device": desc(BLOCKS),
        "wider": desc(BLOCKS, block=128),
        "more tensors": desc(BLOCKS, tensors=3),
        "pooled host": desc(HOST_BLOCKS, placement=Placement.HOST),
        "gone pooled host": desc(HOST_BLOCKS, placement=Placement.HOST),
    }.items():
        world.caches[name] = world.cm.allocate_blocks_cache(each)
    world.caches["continuous"] = world.cm.allocate_cache(desc(BLOCKS))
    for name in ("host", "gone host"):
        cpu_cache(world, name, desc(HOST_BLOCKS, placement=Placement.HOST))
    for seed, cache in enumerate(world.caches.values()):
        fill(cache, seed)
    for name in ("gone device", "gone pooled host", "gone host"):
        world.cm.deallocate_blocks_cache(world.caches[name])
    taken = staged.allocated_bytes
    copies = [staged.count(way).copies for way in ("to_device", "from_device", "on_device")]
    yield end
    if world.caches:  # not finalized
        assert staged.allocated_bytes == taken
    assert [staged.count(way).copies for way in ("to_device", "from_device", "on_device")] == copies


def swap(kind: Kind, src: Any, dst: Any, *texts: str, pairs: dict[int, int] = GOOD) -> Row:
    src, dst = (Use(each) if isinstance(each, str) else each for each in (src, dst))
    return bad(kind, *texts, src_cache=src, dst_cache=dst, src_to_dst=pairs)


def both_ways(kind: Kind, one: Any, other: Any, *texts: str, pairs: dict[int, int] = GOOD) -> list[Row]:
    """The texts may name the argument in which ``one`` is: {}."""
    there = swap(kind, one, other, *(text.format("src_cache") for text in texts), pairs=pairs)
    return [there, swap(kind, other, one, *(text.format("dst_cache") for text in texts), pairs=pairs)]


def refuse_swaps(end: LocalEnd, rows: list[Row]) -> None:
    refuse([end], Table("cm.swap_blocks", {}, {}, *rows))


@pytest.mark.parametrize(("src", "dst"), [("device", "host"), ("host", "device")])
def test_r01_swap_refuses_what_is_no_blocks_cache_and_no_dict(full: LocalEnd, src: str, dst: str) -> None:
    good = {"src_cache": Use(src), "dst_cache": Use(dst), "src_to_dst": GOOD}
    specs = {"src_cache": CACHE, "dst_cache": CACHE, "src_to_dst": SWAP_PAIRS}
    continuous = both_ways(RULE, "continuous", dst, "{}", "not a blocks cache")
    refuse([full], Table("cm.swap_blocks", good, specs, *continuous))


def test_r01_swap_refuses_indices_outside_their_own_side(full: LocalEnd) -> None:
    rows = []
    for host in ("host", "pooled host"):
        for src, dst, end, other in (("device", host, BLOCKS, HOST_BLOCKS), (host, "device", HOST_BLOCKS, BLOCKS)):
            for good in ({}, {0: 0, 1: 1}):
                rows.append(swap(RULE, src, dst, "sources of src_to_dst", str(end), pairs=good | {end: 2}))
                rows.append(swap(RULE, src, dst, "destinations of src_to_dst", str(other), pairs=good | {2: other}))
    refuse_swaps(full, rows)


def test_r17_swap_refuses_caches_of_unequal_geometry(full: LocalEnd) -> None:
    wider = both_ways(MISMATCH, "wider", "host", "block sizes differ", "128", "64")
    more = both_ways(MISMATCH, "more tensors", "host", "num_tensors differ", "3", "2")
    refuse_swaps(full, [*wider, *more])


def test_r16_swap_refuses_two_caches_of_one_placement(full: LocalEnd) -> None:
    hosts = [("host", "host"), ("host", "pooled host"), ("pooled host", "host")]
    devices = [("device", "other device"), ("device", "device")]
    rows = []
    for pairs in (GOOD, {}, {1: 5, 2: 5}):
        rows += [swap(RULE, *two, "src_cache", "dst_cache", "both on HOST", pairs=pairs) for two in hosts]
        rows += [swap(RULE, *two, "src_cache", "dst_cache", "both on DEVICE", pairs=pairs) for two in devices]
    refuse_swaps(full, rows)


def test_swap_refuses_a_cache_without_memory(full: LocalEnd) -> None:
    rows = []
    for gone, other in (("gone device", "host"), ("gone host", "device"), ("gone pooled host", "device")):
        for pairs in (GOOD, {}):
            rows += both_ways(RULE, gone, other, "{}", "deallocated", pairs=pairs)
    host = full.world.caches["host"]
    for at in (0, 1):
        addrs = [0 if i == at else address for i, address in enumerate(host.tensor_addrs)]
        no_address = Cache.create_cpu_cache(host.cache_desc, addrs)
        rows += both_ways(RULE, no_address, "device", "{}", f"tensor_addrs[{at}]=0", "zero")
    refuse_swaps(full, rows)


@pytest.mark.parametrize("shift", [-64, 64, 63, -(BLOCKS - 1) * 64, (BLOCKS - 1) * 64])
def test_r26_operands_that_overlap_without_being_the_same_are_refused(full: LocalEnd, shift: int) -> None:
    addrs = [address + shift for address in full.world.caches["device"].tensor_addrs]
    host = Cache.create_cpu_cache(desc(BLOCKS, placement=Placement.HOST), addrs)
    refuse_swaps(full, both_ways(RULE, host, "device", "src_cache", "dst_cache", "overlap", pairs={0: 0, 1: 1}))


@pytest.mark.parametrize(("dim", "value"), [(0, 100), (1, 8)])
def test_swap_goes_by_the_memory_that_was_allocated_not_by_a_shape_that_changed_since(
    full: LocalEnd, dim: int, value: int
) -> None:
    shape = full.world.caches["device"].cache_desc
    was = shape.shape[dim]
    sources = swap(RULE, "device", "host", "sources of src_to_dst", str(BLOCKS), pairs={BLOCKS: 0})
    destinations = swap(RULE, "host", "device", "destinations of src_to_dst", str(BLOCKS), pairs={0: BLOCKS})
    before = full.do(state)
    shape.update_dim(dim, value)
    errors = full.do(attempt, Table("cm.swap_blocks", {}, {}), [sources.changes, destinations.changes])
    shape.update_dim(dim, was)
    for error, row in zip(errors, (sources, destinations), strict=True):
        raises(error, RULE, row.texts)
    assert full.do(state) == before


@pytest.mark.parametrize("end_of_life", ["finalize", "init again"])
def test_r21_swap_of_a_stale_manager_is_refused(full: LocalEnd, end_of_life: str) -> None:
    world = full.world
    stale, caches = world.cm, dict(world.caches)
    world.caches.clear()
    world.dd.finalize()
    if end_of_life == "init again":
        world.dd.init(make_config())
    with pytest.raises(LLMException) as caught:
        stale.swap_blocks(caches["device"], caches["host"], GOOD)
    assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
