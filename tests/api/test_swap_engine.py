"""The engine under swap_blocks (interface R10): workers, staging buffers and their memory, and a device that fails."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import LLMStatusCode, Placement, _native
from llm_datadist._transfer.local_copy import SwapEngine
from llm_datadist.errors import OutOfMemory
from llm_datadist.testing import StagedDevice
from tests.support.devices import BrokenDevice, GatedDevice, MeetingDevice
from tests.support.memory import cpu_cache, desc, equal, pool, refused
from tests.support.world import World, fill, read

if TYPE_CHECKING:
    from llm_datadist._memory.device import Device
    from tests.support.ends import LocalEnd

pytestmark = pytest.mark.covers("LLMDataDist.statistics", "LLMStatusCode.LLM_OUT_OF_MEMORY", "errors.OutOfMemory")

BLOCK = 4096
POOL_BYTES = 32 * 2**20
EVERY_OTHER = {n: n for n in range(0, 16, 2)}  # nothing to merge: eight blocks per tensor


def start(end: LocalEnd, device: Device | None) -> World:
    end.start("DECODER", 1, device=device)
    end.world.caches["device"] = end.world.cm.allocate_blocks_cache(desc(shape=(16, BLOCK // 4)))
    cpu_cache(end.world, "cpu", desc(shape=(16, BLOCK // 4), placement=Placement.HOST))
    for seed, cache in enumerate(end.world.caches.values()):
        fill(cache, seed)
    return end.world


def swap(world: World, src: str, dst: str, pairs: dict[int, int]) -> None:
    source, expected = read(world.caches[src]), read(world.caches[dst])
    for tensor, from_tensor in zip(expected, source, strict=True):
        tensor[list(pairs.values())] = from_tensor[list(pairs)]
    world.cm.swap_blocks(world.caches[src], world.caches[dst], pairs)
    equal(read(world.caches[dst]), expected)
    equal(read(world.caches[src]), source)


# --- workers ----------------------------------------------------------------------------------------------------------


def test_r10_four_workers_or_as_many_as_cpus_are_usable(end: LocalEnd) -> None:
    assert [SwapEngine(StagedDevice(), cpus).workers for cpus in (1, 2, 3, 4, 5, 64)] == [1, 2, 3, 4, 4, 4]
    world = start(end, None)
    assert world.dd.statistics().swap.workers == min(4, _native.usable_cpus())


def test_r10_one_worker_where_one_cpu_is_usable(end: LocalEnd) -> None:
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        device = StagedDevice()
        world = start(end, device)
        swap(world, "device", "cpu", EVERY_OTHER)
        swap(world, "cpu", "device", EVERY_OTHER)
    finally:
        os.sched_setaffinity(0, usable)
    assert world.dd.statistics().swap.workers == 1
    assert [len(device.count(direction).threads) for direction in ("from_device", "to_device")] == [1, 1]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_r10_swap_out_copies_in_as_many_threads_at_once(end: LocalEnd, workers: int) -> None:
    device = MeetingDevice(workers)
    world = start(end, device)
    engine = world.cm._engine._swap
    engine.workers = workers  # this machine may have fewer CPUs than the test needs
    swap(world, "device", "cpu", EVERY_OTHER)
    count = device.count("from_device")
    assert (count.copies, count.nbytes, len(count.threads)) == (16, 16 * BLOCK, workers)
    assert all(name.startswith("llm-datadist-swap") for name in count.threads)
    assert device.count("on_device").copies == 0


# --- staging ----------------------------------------------------------------------------------------------------------


def test_r10_swap_in_goes_through_four_block_sized_buffers_emptied_by_one_thread(end: LocalEnd) -> None:
    device = StagedDevice()
    world = start(end, device)
    swap(world, "cpu", "device", EVERY_OTHER | {1: 1})  # 0, 1, 2 are merged, and cut again for the buffers
    assert world.dd.statistics().swap.staging_bytes == 4 * BLOCK
    filled, emptied = device.count("to_device"), device.count("on_device")
    assert (filled.copies, filled.nbytes) == (emptied.copies, emptied.nbytes) == (18, 18 * BLOCK)
    assert len(emptied.threads) == 1
    assert len(filled.threads) <= world.dd.statistics().swap.workers
    assert device.count("from_device").copies == 0


def test_r10_staging_is_taken_at_first_use_outside_the_pool_and_returned_at_finalize(end: LocalEnd) -> None:
    device = StagedDevice()
    world = start(end, device)
    used = pool(world).used_bytes
    for src, dst, staging in (
        ("device", "cpu", 0),
        ("cpu", "device", 4 * BLOCK),
        ("cpu", "device", 4 * BLOCK),
        ("device", "cpu", 4 * BLOCK),
    ):
        swap(world, src, dst, {0: 1, 5: 7})
        assert world.dd.statistics().swap.staging_bytes == staging
        assert device.allocated_bytes == POOL_BYTES + staging
        assert pool(world).used_bytes == used
    world.dd.finalize()
    assert device.allocated_bytes == 0


def test_r10_larger_blocks_take_larger_buffers_and_smaller_ones_use_those(end: LocalEnd) -> None:
    device = StagedDevice()
    world = start(end, device)
    large: dict[str, Any] = {"shape": (4, BLOCK), "num_tensors": 1}
    world.caches["large"] = world.cm.allocate_blocks_cache(desc(**large))
    cpu_cache(world, "large cpu", desc(**large, placement=Placement.HOST))
    for name, staging in (("", 4 * BLOCK), ("large ", 16 * BLOCK), ("", 16 * BLOCK)):
        swap(world, f"{name}cpu", name.strip() or "device", {0: 1, 2: 3})
        assert world.dd.statistics().swap.staging_bytes == staging
        assert device.allocated_bytes == POOL_BYTES + staging


@pytest.mark.parametrize("room", [0, BLOCK, 4 * BLOCK - 1])
def test_r10_lack_of_staging_memory_is_out_of_memory_naming_the_size(end: LocalEnd, room: int) -> None:
    device = StagedDevice()
    world = start(end, device)
    device.refuse_after(POOL_BYTES + room)
    figures = ("swap_blocks", f"4 staging buffers of {BLOCK} bytes", str(4 * BLOCK))
    with refused(world, OutOfMemory, *figures, status=LLMStatusCode.LLM_OUT_OF_MEMORY):
        world.cm.swap_blocks(world.caches["cpu"], world.caches["device"], {0: 0})
    assert device.allocated_bytes == POOL_BYTES
    swap(world, "device", "cpu", {0: 0})
    device.refuse_after(POOL_BYTES + 4 * BLOCK)
    swap(world, "cpu", "device", {1: 2})


def test_r10_a_host_device_needs_no_staging(end: LocalEnd) -> None:
    world = start(end, None)
    swap(world, "cpu", "device", EVERY_OTHER)
    swap(world, "device", "cpu", EVERY_OTHER)
    assert world.dd.statistics().swap.staging_bytes == 0


# --- failures and other callers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["allocate", "copy_to_device", "copy_on_device", "copy_from_device"])
def test_an_error_of_the_device_reaches_the_caller_and_the_next_swap_works(end: LocalEnd, method: str) -> None:
    device = BrokenDevice()
    world = start(end, device)
    src, dst = ("device", "cpu") if method == "copy_from_device" else ("cpu", "device")
    for pairs in (EVERY_OTHER, {0: 3, 1: 3}):
        device.broken = method
        with pytest.raises(OSError, match="device is lost"):
            world.cm.swap_blocks(world.caches[src], world.caches[dst], pairs)
        if method == "allocate":
            assert device.allocated_bytes == POOL_BYTES
            break
    device.broken = ""
    swap(world, src, dst, EVERY_OTHER)
    assert world.dd.statistics().swap.staging_bytes == (0 if dst == "cpu" else 4 * BLOCK)


def test_a_cache_deallocated_during_a_swap_keeps_its_memory_until_the_swap_has_ended(end: LocalEnd) -> None:
    device = GatedDevice()
    world = start(end, device)
    cache, cpu = world.caches.pop("device"), world.caches["cpu"]
    thread = threading.Thread(target=world.cm.swap_blocks, args=(cpu, cache, EVERY_OTHER))
    thread.start()
    assert device.arrived.wait(30)
    used = pool(world).used_bytes
    world.cm.deallocate_blocks_cache(cache)
    assert (pool(world).used_bytes, world.dd.statistics().caches.draining) == (used, 1)
    other = world.caches["other"] = world.cm.allocate_blocks_cache(desc(shape=(16, BLOCK // 4)))
    content = fill(other, 3)
    device.gate.set()
    thread.join()
    assert (pool(world).used_bytes, world.dd.statistics().caches.draining) == (used, 0)
    equal(read(other), content)


def test_many_callers_swap_at_once_and_every_block_arrives(end: LocalEnd) -> None:
    world = start(end, StagedDevice())
    source, expected = read(world.caches["cpu"]), read(world.caches["device"])
    pairs = [{n: n, n + 8: n + 8} for n in range(8)]
    threads = [
        threading.Thread(target=world.cm.swap_blocks, args=(world.caches["cpu"], world.caches["device"], each))
        for each in pairs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tensor, from_tensor in zip(expected, source, strict=True):
        tensor[:] = from_tensor
    equal(read(world.caches["device"]), expected)
