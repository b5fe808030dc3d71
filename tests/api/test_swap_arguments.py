"""What swap_blocks refuses, both ways, on a device that needs staging and hears nothing of it (interface R1, R16)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import Cache, CacheDesc, DataType, Placement
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
    no_op,
    raises,
    refuse,
    state,
)
from tests.support.world import fill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.ends import LocalEnd

pytestmark = pytest.mark.covers("CacheManager.swap_blocks")

BLOCKS, HOST_BLOCKS = 6, 8
GOOD = {0: 0}


def desc(blocks: int, *, tensors: int = 2, block: int = 64, placement: Placement = Placement.DEVICE) -> CacheDesc:
    return CacheDesc(tensors, [blocks, block], DataType.DT_UINT8, placement)


@pytest.fixture
def full(end: LocalEnd) -> Iterator[LocalEnd]:
    """A device blocks cache, CPU caches, others that do not fit them or are gone; the device never hears of a call."""
    staged = StagedDevice()
    end.start("PROMPT", 1, device=staged)
    world = end.world
    for name, each in {
        "before device": desc(BLOCKS),
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
    before = staged.allocated_bytes, [staged.count(way).copies for way in ("to_device", "from_device", "on_device")]
    yield end
    after = staged.allocated_bytes, [staged.count(way).copies for way in ("to_device", "from_device", "on_device")]
    assert after == before


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
def test_r01_swap_refuses_what_is_no_cache_and_no_dict(full: LocalEnd, src: str, dst: str) -> None:
    good = {"src_cache": Use(src), "dst_cache": Use(dst), "src_to_dst": GOOD}
    cache = Spec(("no cache", 1, []))
    specs = {"src_cache": cache, "dst_cache": cache, "src_to_dst": SWAP_PAIRS}
    refuse([full], Table("cm.swap_blocks", good, specs, no_op(src_to_dst={})))


def test_r01_r16_r17_swap_refuses_what_breaks_a_rule(full: LocalEnd) -> None:
    rows = [
        *both_ways(RULE, "continuous", "host", "{}", "not a blocks cache"),
        *both_ways(MISMATCH, "wider", "host", "block sizes differ", "128", "64"),
        *both_ways(MISMATCH, "more tensors", "host", "num_tensors differ", "3", "2"),
    ]
    for pairs in (GOOD, {}):
        # two caches of one placement
        for two in (("host", "host"), ("host", "pooled host")):
            rows += both_ways(RULE, *two, "src_cache", "dst_cache", "both on HOST", pairs=pairs)
        for two in (("device", "other device"), ("device", "device")):
            rows += both_ways(RULE, *two, "src_cache", "dst_cache", "both on DEVICE", pairs=pairs)
        # no memory
        for gone, other in (("gone device", "host"), ("gone host", "device"), ("gone pooled host", "device")):
            rows += both_ways(RULE, gone, other, "{}", "deallocated", pairs=pairs)
    host = full.world.caches["host"]
    for at in (0, 1):
        addrs = [0 if i == at else address for i, address in enumerate(host.tensor_addrs)]
        no_address = Cache.create_cpu_cache(host.cache_desc, addrs)
        rows += both_ways(RULE, no_address, "device", "{}", f"tensor_addrs[{at}]=0", "zero")
        addrs[at] = 8
        unmapped = Cache.create_cpu_cache(host.cache_desc, addrs)
        rows += both_ways(RULE, unmapped, "device", "{}", f"tensor_addrs[{at}]=0x8", "must be mapped")
    refuse_swaps(full, rows)


@pytest.mark.parametrize("shift", [-64, 64, 63, -(BLOCKS - 1) * 64, (BLOCKS - 1) * 64])
def test_r26_operands_that_overlap_without_being_the_same_are_refused(full: LocalEnd, shift: int) -> None:
    addrs = [address + shift for address in full.world.caches["device"].tensor_addrs]
    host = Cache.create_cpu_cache(desc(BLOCKS, placement=Placement.HOST), addrs)
    refuse_swaps(full, both_ways(RULE, host, "device", "src_cache", "dst_cache", "overlap", pairs={0: 0, 1: 1}))


def test_swap_refuses_what_is_outside_the_memory_that_was_allocated_whatever_the_shape_became(full: LocalEnd) -> None:
    rows = []
    for host in ("host", "pooled host"):
        for src, dst, end, other in (("device", host, BLOCKS, HOST_BLOCKS), (host, "device", HOST_BLOCKS, BLOCKS)):
            rows.append(swap(RULE, src, dst, "sources of src_to_dst", str(end), pairs={0: 0, end: 2}))
            rows.append(swap(RULE, src, dst, "destinations of src_to_dst", str(other), pairs={2: other}))
    refuse_swaps(full, rows)
    shape, before = full.world.caches["device"].cache_desc, full.do(state)
    for dim, was, value in ((0, BLOCKS, 100), (1, 64, 8)):
        shape.update_dim(dim, value)
        errors = full.do(attempt, Table("cm.swap_blocks", {}, {}), [row.changes for row in rows])
        shape.update_dim(dim, was)
        for error, row in zip(errors, rows, strict=True):
            raises(error, RULE, row.texts)
    assert full.do(state) == before
