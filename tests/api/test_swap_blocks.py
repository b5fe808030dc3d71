"""swap_blocks: blocks between device and host memory (seed swap_blocks, interface §6.9, R26), and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import Cache, CacheKey, DataType, Placement
from llm_datadist.errors import NoneArgument, ParamError
from llm_datadist.testing import StagedDevice
from tests.support.memory import cpu_cache, desc, equal, refused, user_memory
from tests.support.world import World, fill, read

if TYPE_CHECKING:
    from tests.support.ends import LocalEnd

pytestmark = pytest.mark.covers("Cache.create_cpu_cache", "CacheManager.swap_blocks")

D, H = Placement.DEVICE, Placement.HOST
BLOCKS, CPU_BLOCKS = 10, 6


@pytest.fixture(params=["host", "staged"])
def world(request: pytest.FixtureRequest, end: LocalEnd) -> World:
    """Filled blocks caches of 2 tensors and 64-byte blocks: "device" with 10 blocks, "cpu" with 6, over any device."""
    end.start("DECODER", 1, device=StagedDevice() if request.param == "staged" else None)
    end.world.caches["device"] = end.world.cm.allocate_blocks_cache(desc(shape=(BLOCKS, 16)))
    cpu_cache(end.world, "cpu", desc(shape=(CPU_BLOCKS, 16), placement=H))
    for seed, cache in enumerate(end.world.caches.values()):
        fill(cache, seed)
    return end.world


def check(world: World, src: str, dst: str, pairs: Any) -> None:
    """The pairs move in the order given, and not one byte else changes."""
    source, target = world.caches[src], world.caches[dst]
    before, expected = read(source), read(target)
    for tensor, from_tensor in zip(expected, before, strict=True):
        for block, to in pairs.items():
            tensor[int(to)] = from_tensor[int(block)]
    world.cm.swap_blocks(source, target, pairs)
    equal(read(target), expected)
    equal(read(source), before)
    assert world.dd.statistics().pins == 0


PAIRS = [
    {0: 0, 1: 1},  # the example of the samples
    {0: 5},
    {0: 3, 1: 4, 2: 5, 5: 0},
    {5: 0, 4: 1, 3: 2},
    {1: 5, 2: 5},  # a duplicate: the last one wins
    {2: 5, 1: 5},
    {0: 3, 1: 4, 2: 3, 3: 4},
    {1: 2, 2: 3},  # no chain: the two caches are different memory
    {n: n for n in range(CPU_BLOCKS)},
    {True: 2},
    {},
]


@pytest.mark.parametrize("pairs", PAIRS)
def test_seed_swap_blocks_out_device_to_host(world: World, pairs: dict[int, int]) -> None:
    check(world, "device", "cpu", pairs)


@pytest.mark.parametrize("pairs", PAIRS)
def test_seed_swap_blocks_in_host_to_device(world: World, pairs: dict[int, int]) -> None:
    check(world, "cpu", "device", pairs)


def test_seed_swap_blocks_there_and_back_again(world: World) -> None:
    before = read(world.caches["device"])
    check(world, "device", "cpu", {7: 0, 8: 1, 2: 5})
    fill(world.caches["device"], 9)
    check(world, "cpu", "device", {0: 7, 1: 8, 5: 2})
    for now, then in zip(read(world.caches["device"]), before, strict=True):
        np.testing.assert_array_equal(now[[7, 8, 2]], then[[7, 8, 2]])


def test_r26_duplicates_keep_their_order_among_many_large_blocks(world: World) -> None:
    large: dict[str, Any] = {"num_tensors": 2, "shape": (12, 2**16)}
    world.caches["device"] = world.cm.allocate_blocks_cache(desc(**large))
    cpu_cache(world, "cpu", desc(**large, placement=H))
    for name, pairs in (("device", {n: n // 2 for n in range(12)}), ("cpu", {11 - n: n // 3 for n in range(12)})):
        fill(world.caches["device"], 1)
        fill(world.caches["cpu"], 2)
        check(world, name, "cpu" if name == "device" else "device", pairs)


@pytest.mark.parametrize("pairs", [{1: 2, 2: 3}, {2: 3, 1: 2}, {1: 2, 2: 1}, {4: 4}, {0: 1, 1: 2, 2: 3, 3: 4}])
@pytest.mark.parametrize("to", ["one", "two"])
def test_r26_chains_take_effect_in_order_when_both_caches_are_the_same_memory(
    world: World, pairs: dict[int, int], to: str
) -> None:
    addrs = user_memory(world, "mine", desc(shape=(BLOCKS, 16)))
    world.caches["one"] = world.cm.register_blocks_cache(desc(shape=(BLOCKS, 16)), addrs)
    world.caches["two"] = Cache.create_cpu_cache(desc(shape=(BLOCKS, 16), placement=H), addrs)
    expected = fill(world.caches["one"], 5)
    for tensor in expected:
        for block, target in pairs.items():
            tensor[target] = tensor[block]
    source = "two" if to == "one" else "one"
    world.cm.swap_blocks(world.caches[source], world.caches[to], pairs)
    equal(read(world.caches["one"]), expected)
    equal(read(world.caches["two"]), expected)


def test_host_caches_may_come_from_the_host_pool_or_be_registered(world: World) -> None:
    geometry = desc(shape=(CPU_BLOCKS, 16), placement=H)
    world.caches["pool"] = world.cm.allocate_blocks_cache(geometry)
    world.caches["registered"] = world.cm.register_blocks_cache(geometry, user_memory(world, "mine", geometry))
    for name in ("pool", "registered"):
        fill(world.caches[name], 5)
        check(world, "device", name, {9: 0, 8: 1})
        check(world, name, "device", {0: 3})


def test_element_types_may_differ_when_the_blocks_are_equally_large(world: World) -> None:
    cpu_cache(world, "cpu", desc(shape=(4, 2, 32), data_type=DataType.DT_INT8, placement=H))
    check(world, "device", "cpu", {9: 3})


def test_numpy_integers_are_block_numbers_too(world: World) -> None:
    blocks = np.array([3, 4])
    check(world, "device", "cpu", dict(zip(blocks, blocks + 1, strict=True)))


def test_an_unregistered_cache_is_still_the_users_memory(world: World) -> None:
    geometry = desc(shape=(BLOCKS, 16))
    world.caches["mine"] = world.cm.register_blocks_cache(geometry, user_memory(world, "mine", geometry))
    fill(world.caches["mine"], 5)
    world.cm.unregister_cache(world.caches["mine"].cache_id)
    check(world, "mine", "cpu", {0: 1})


def test_the_geometry_is_that_of_the_cache_and_not_of_a_shape_changed_later(world: World) -> None:
    shape = [4, 16]
    world.caches["kv"] = world.cm.allocate_blocks_cache(desc(shape=shape))
    world.caches["kv"].cache_desc.update_dim(0, 64)
    kv = world.caches.pop("kv")
    with refused(world, ParamError, "src_to_dst", "5", "4"):
        world.cm.swap_blocks(world.caches["cpu"], kv, {0: 5})


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "parts"),
    [
        ({"src_cache": None}, NoneArgument, ["src_cache", "None"]),
        ({"dst_cache": None}, NoneArgument, ["dst_cache", "None"]),
        ({"src_to_dst": None}, NoneArgument, ["src_to_dst", "None"]),
        ({"src_cache": 1}, TypeError, ["src_cache", "int"]),
        ({"dst_cache": [1]}, TypeError, ["dst_cache", "list"]),
        ({"src_to_dst": [(0, 0)]}, TypeError, ["src_to_dst", "list"]),
        ({"src_to_dst": {"0": 0}}, TypeError, ["key of src_to_dst", "'0'"]),
        ({"src_to_dst": {0.0: 0}}, TypeError, ["key of src_to_dst", "0.0"]),
        ({"src_to_dst": {None: 0}}, NoneArgument, ["key of src_to_dst", "None"]),
        ({"src_to_dst": {1: 1, 0: "0"}}, TypeError, ["src_to_dst[0]", "'0'"]),
        ({"src_to_dst": {1: 1, 0: 0.0}}, TypeError, ["src_to_dst[0]", "0.0"]),
        ({"src_to_dst": {1: 1, 0: None}}, NoneArgument, ["src_to_dst[0]", "None"]),
        ({"src_to_dst": {0: [0]}}, TypeError, ["src_to_dst[0]", "[0]"]),
        ({"src_to_dst": {-1: 0}}, ParamError, ["key of src_to_dst", "-1"]),
        ({"src_to_dst": {0: -1}}, ParamError, ["src_to_dst[0]", "-1"]),
        ({"src_to_dst": {0: 2**64}}, ParamError, ["src_to_dst[0]", str(2**64)]),
        ({"src_to_dst": {0: 0, 10: 0}}, ParamError, ["src_to_dst", "sources", "10"]),
        ({"src_to_dst": {0: 0, 1: 6}}, ParamError, ["src_to_dst", "destinations", "6"]),
    ],
)
def test_r01_wrong_arguments_are_refused_and_nothing_happens(
    world: World, change: dict[str, Any], kind: type[Exception], parts: list[str]
) -> None:
    arguments: dict[str, Any] = {"src_cache": world.caches["device"], "dst_cache": world.caches["cpu"]}
    arguments |= {"src_to_dst": {0: 0}} | change
    with refused(world, kind, *parts):
        world.cm.swap_blocks(**arguments)


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        ({"shape": (6, 8)}, ["block sizes differ", "32", "64"]),
        ({"shape": (6, 32)}, ["block sizes differ", "128", "64"]),
        ({"num_tensors": 3, "shape": (6, 16)}, ["num_tensors differ", "3", "2"]),
    ],
)
def test_block_sizes_and_tensor_counts_must_be_equal(world: World, other: dict[str, Any], parts: list[str]) -> None:
    cpu = cpu_cache(world, "other", desc(**other, placement=H))
    with refused(world, ParamError, "swap_blocks", *parts):
        world.cm.swap_blocks(world.caches["device"], cpu, {0: 0})
    with refused(world, ParamError, "swap_blocks", *parts):
        world.cm.swap_blocks(cpu, world.caches["device"], {0: 0})


def test_r16_one_side_must_be_host_and_one_device(world: World) -> None:
    world.caches["device 2"] = world.cm.allocate_blocks_cache(desc(shape=(BLOCKS, 16)))
    cpu_cache(world, "cpu 2", desc(shape=(CPU_BLOCKS, 16), placement=H))
    for one, other, word in (("device", "device 2", "DEVICE"), ("cpu", "cpu 2", "HOST"), ("cpu", "cpu", "HOST")):
        with refused(world, ParamError, "src_cache and dst_cache are both on", word):
            world.cm.swap_blocks(world.caches[one], world.caches[other], {0: 0})


def test_continuous_caches_are_refused(world: World) -> None:
    world.caches["rows"] = rows = world.cm.allocate_cache(desc(shape=(BLOCKS, 16)), [CacheKey(1, 1)])
    with refused(world, ParamError, "src_cache", "not a blocks cache"):
        world.cm.swap_blocks(rows, world.caches["cpu"], {0: 0})
    with refused(world, ParamError, "dst_cache", "not a blocks cache"):
        world.cm.swap_blocks(world.caches["cpu"], rows, {0: 0})


def test_a_deallocated_cache_is_refused(world: World) -> None:
    gone = world.caches.pop("device")
    world.cm.deallocate_blocks_cache(gone)
    with refused(world, ParamError, "src_cache", "deallocated"):
        world.cm.swap_blocks(gone, world.caches["cpu"], {0: 0})
    with refused(world, ParamError, "dst_cache", "deallocated"):
        world.cm.swap_blocks(world.caches["cpu"], gone, {0: 0})


def test_a_zero_address_is_refused_although_create_cpu_cache_takes_it(world: World) -> None:
    geometry = desc(shape=(CPU_BLOCKS, 16), placement=H)
    cpu = Cache.create_cpu_cache(geometry, [user_memory(world, "mine", geometry)[0], 0])
    with refused(world, ParamError, "dst_cache", "tensor_addrs[1]=0"):
        world.cm.swap_blocks(world.caches["device"], cpu, {0: 0})
    with refused(world, ParamError, "src_cache", "tensor_addrs[1]=0"):
        world.cm.swap_blocks(cpu, world.caches["device"], {0: 0})
    with refused(world, ParamError, "src_cache", "tensor_addrs[1]=0"):
        world.cm.swap_blocks(cpu, world.caches["device"], {})
