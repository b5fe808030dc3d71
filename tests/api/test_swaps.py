"""swap_blocks: blocks between device and host memory, with the bytes around them (interface §6.9, R26), the engine
under it: workers, devices that fail (interface R10), and what is refused."""

import itertools
import signal
import threading
import time
from contextlib import closing
from functools import partial
from typing import Any, Final

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMStatusCode, Placement
from llm_datadist._native import usable_cpus
from llm_datadist.errors import CacheNotFound, DeviceError, OutOfMemory
from llm_datadist.metrics import SwapStatistics
from tests.support import fakecuda
from tests.support.ends import Call, ChildEnd
from tests.support.kinds import LocalEnd, World
from tests.support.memory import cpu_cache, desc, pool, state, user_memory
from tests.support.moves import Spec, Use, make, moved, same_bytes, show, wait_until
from tests.support.refusals import MISMATCH, RULE, SWAP_PAIRS, Kind, Row, Table, attempt, bad, no_op, raises, refuse
from tests.support.refusals import Spec as Argument
from tests.support.world import fill, read

pytestmark = [
    pytest.mark.covers("Cache.create_cpu_cache", "CacheManager.swap_blocks", "LLMDataDist.statistics"),
    pytest.mark.gpu,
]

TENSORS, BLOCKS, HOST_BLOCKS, BLOCK = 4, 8, 12, 512
EVERY_OTHER = {n: n for n in range(0, BLOCKS, 2)}  # nothing to merge


class Scene:
    """A device cache between two neighbours that touch it, a CPU cache inside arrays with a row more at each end."""

    def __init__(
        self, world: World, name: str = "kv", blocks: int = BLOCKS, host_blocks: int = HOST_BLOCKS, block: int = BLOCK
    ) -> None:
        self.world, self.name = world, name
        for seed, each in enumerate((f"left of {name}", name, f"right of {name}")):
            make(world, each, Spec(TENSORS, blocks, block, blocks=True), seed)
        random = np.random.default_rng(9)
        self.around = [random.integers(0, 256, (host_blocks + 2, block), np.uint8) for _ in range(TENSORS)]
        host = CacheDesc(TENSORS, [host_blocks, block], DataType.DT_UINT8, Placement.HOST)
        self.host = Cache.create_cpu_cache(host, [array.ctypes.data + block for array in self.around])

    def move(self, pairs: dict[int, int], *, out: bool) -> None:
        device = self.world.caches[self.name]
        source, target = (device, self.host) if out else (self.host, device)
        self.world.cm.swap_blocks(source, target, pairs)

    def swap(self, pairs: dict[int, int], *, out: bool) -> None:
        """Swap, then compare every byte of both sides and of what lies around them with what was there before."""
        near = {name: show(self.world, name) for name in self.world.caches}
        far = [tensor.copy() for tensor in self.around]
        self.move(pairs, out=out)
        if out:
            far = moved(far, near[self.name], [(int(to) + 1, int(of)) for of, to in pairs.items()])
        else:
            near[self.name] = moved(near[self.name], far, [(int(to), int(of) + 1) for of, to in pairs.items()])
        same_bytes(self.around, far)
        for each, expected in near.items():
            same_bytes(show(self.world, each), expected)
        assert self.world.dd.statistics().pins == 0


@pytest.fixture
def world(end: LocalEnd) -> World:
    end.start("DECODER", 1)
    return end.world


# --- bytes ------------------------------------------------------------------------------------------------------------
PAIRS: Final[list[dict[int, int]]] = [
    {0: 0, 1: 1},  # the example of the samples
    {5: 0, 4: 1, 3: 2, 7: 7},
    {2: 5, 1: 5, 3: 6, 4: 7, 0: 6},  # duplicates: the last one wins
    {1: 2, 2: 3},  # no chain: the two caches are different memory
    {n: n for n in range(BLOCKS)},
    {True: 2, np.int64(3): np.uint8(4)},  # type: ignore[dict-item]  # integers of NumPy
]


def test_seed_swap_blocks_moves_pairs_in_the_order_given_and_nothing_next_to_them(world: World) -> None:
    scene = Scene(world)  # of different block counts
    for pairs in (*PAIRS, {7: 11}):
        scene.swap(pairs, out=True)
    for pairs in (*PAIRS, {11: 7}):
        scene.swap(pairs, out=False)
    (swaps,) = (each for each in world.dd.statistics().operations if each.name == "swap_blocks")
    blocks = 2 * (1 + sum(map(len, PAIRS)))
    assert (swaps.count, swaps.errors, swaps.nbytes) == (2 * len(PAIRS) + 2, 0, blocks * TENSORS * BLOCK)
    before = state(world)
    for out in (True, False):
        scene.swap({}, out=out)
    assert state(world) == before


def test_r26_swap_moves_many_large_blocks_scattered_in_one_run_and_over_one_another(world: World) -> None:
    scene = Scene(world, blocks=48, host_blocks=64, block=16384)
    random = np.random.default_rng(5)
    for out, rows, targets in ((True, 48, 64), (False, 64, 48)):
        sources, destinations = random.permutation(rows)[:40].tolist(), random.permutation(targets)[:40].tolist()
        scene.swap(dict(zip(sources, destinations, strict=True)), out=out)
        scene.swap({block: block + 3 for block in range(40)}, out=out)
        scene.swap({40 - block: block // 3 for block in range(40)}, out=out)


@pytest.mark.gpu(False)
def test_r26_chains_take_effect_in_order_when_both_caches_are_the_same_memory(world: World) -> None:
    addrs = user_memory(world, "mine", desc(shape=(10, 16)))
    device = world.cm.register_blocks_cache(desc(shape=(10, 16)), addrs)
    host = Cache.create_cpu_cache(desc(shape=(10, 16), placement=Placement.HOST), addrs)
    for source, target in ((device, host), (host, device)):
        for pairs in ({1: 2, 2: 3}, {2: 3, 1: 2}, {1: 2, 2: 1}, {4: 4}, {0: 1, 1: 2, 2: 3, 3: 4}):
            expected = fill(device, 5)
            for tensor in expected:
                for block, to in pairs.items():
                    tensor[to] = tensor[block]
            world.cm.swap_blocks(source, target, pairs)
            same_bytes(read(device), expected)


def test_either_side_may_be_of_a_pool_registered_or_unregistered_and_of_another_element_type(world: World) -> None:
    geometry = CacheDesc(TENSORS, [6, BLOCK], DataType.DT_UINT8, Placement.HOST)
    floats = CacheDesc(TENSORS, [6, 2, BLOCK // 8], DataType.DT_FLOAT, Placement.HOST)
    of_device = CacheDesc(TENSORS, [6, BLOCK], DataType.DT_UINT8)
    hosts = [
        world.cm.allocate_blocks_cache(geometry),
        world.cm.register_blocks_cache(geometry, user_memory(world, "host", geometry)),
        Cache.create_cpu_cache(floats, user_memory(world, "floats", floats)),
    ]
    unregistered = world.cm.register_blocks_cache(of_device, user_memory(world, "device", of_device))
    world.cm.unregister_cache(unregistered.cache_id)
    for host, device in itertools.product(hosts, (world.cm.allocate_blocks_cache(of_device), unregistered)):
        source, before = fill(device, 5), fill(host, 6)
        world.cm.swap_blocks(device, host, {5: 0, 3: 1})
        same_bytes(read(host), moved(before, source, [(0, 5), (1, 3)]))
        world.cm.swap_blocks(host, device, {3: 2})
        same_bytes(read(device), moved(source, before, [(2, 3)]))


def test_swaps_of_several_threads_with_blocks_of_several_sizes(world: World) -> None:
    scenes = [Scene(world, f"kv {block}", block=block) for block in (512, 2048, 1024)]
    before = [(show(world, scene.name), [array.copy() for array in scene.around]) for scene in scenes]

    def swap(scene: Scene, blocks: int) -> None:
        """Two threads have each scene, one the even and one the odd blocks."""
        for _ in range(20):
            scene.move({blocks: 7 - blocks, 2 + blocks: 8 + blocks}, out=True)
            scene.move({8 + blocks: blocks, 7 - blocks: 2 + blocks}, out=False)

    for call in [Call(swap, scene, blocks) for scene in scenes for blocks in (0, 1)]:
        call.result()
    for scene, was in zip(scenes, before, strict=True):
        near, far = was
        for blocks in (0, 1) * 20:
            far = moved(far, near, [(8 - blocks, blocks), (9 + blocks, 2 + blocks)])
            near = moved(near, far, [(blocks, 9 + blocks), (2 + blocks, 8 - blocks)])
        same_bytes(show(world, scene.name), near)
        same_bytes(scene.around, far)


@pytest.mark.gpu(True)
def test_r06_r10_swaps_have_no_deadline_no_memory_of_their_own_and_a_worker_for_each_cpu(end: LocalEnd) -> None:
    end.start("DECODER", 1, sync_kv_timeout=50)
    fake, scene, cpus = fakecuda.load(), Scene(end.world, block=65536), usable_cpus()
    scene.swap({0: 0}, out=True)
    used, kept = pool(end.world).used_bytes, fake.state().kept
    fake.set_rate(10 << 20)
    for out in (True, False):
        since = time.monotonic()
        scene.swap(EVERY_OTHER, out=out)
        assert time.monotonic() - since > 0.05
    fake.set_rate(0)
    assert end.world.dd.statistics().swap == SwapStatistics(min(4, cpus), 0)
    assert (pool(end.world).used_bytes, fake.state().kept) == (used, kept)


# --- failures and other callers ---------------------------------------------------------------------------------------
@pytest.mark.gpu(False)
@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuMemAllocHost_v2"])
def test_r10_lack_of_device_memory_copies_nothing_and_is_named(call: str) -> None:
    with closing(ChildEnd("of its own, whose device has no channels yet")) as end:
        end.gpu = True
        end.start("DECODER", 1)
        end.do(lacks_memory, call)
        end.stop()


def lacks_memory(world: World, call: str) -> None:
    scene = Scene(world)
    near, far = show(world, "kv"), [array.copy() for array in scene.around]
    for out in (False, True):
        fakecuda.load().fail(call, 2)
        with pytest.raises(OutOfMemory, match=rf"{call[:-3]}: CUDA_ERROR_OUT_OF_MEMORY \(2\)") as caught:
            scene.move({0: 0, 1: 5}, out=out)
        assert caught.value.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY
        same_bytes(show(world, "kv"), near)
        same_bytes(scene.around, far)
    scene.swap({0: 0, 1: 5}, out=False)


@pytest.mark.gpu(True)
@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuLaunchKernel", "cuEventRecord"])
def test_an_error_of_the_device_reaches_the_caller_and_the_next_swap_works(end: LocalEnd, call: str, out: bool) -> None:
    end.start("DECODER", 1)
    fake, scene = fakecuda.load(), Scene(end.world, blocks=32, host_blocks=32)
    fake.fail(call, 999)
    with pytest.raises(DeviceError, match=r"CUDA_ERROR_UNKNOWN \(999\)") as caught:
        scene.move({n: n for n in range(0, 32, 2)}, out=out)
    assert (caught.value.status_code, caught.value.code) == (LLMStatusCode.LLM_FAILED, 999)
    scene.swap(EVERY_OTHER, out=out)


@pytest.mark.gpu(True)
@pytest.mark.parametrize("out", [False, True])
def test_a_cache_deallocated_during_a_swap_keeps_its_memory_until_the_swap_has_ended(end: LocalEnd, out: bool) -> None:
    end.start("DECODER", 1)
    fake, scene, world = fakecuda.load(), Scene(end.world), end.world
    fake.hang(True)
    try:
        swap = Call(partial(scene.move, EVERY_OTHER, out=out))
        wait_until(lambda: fake.state().unfinished_streams > 0)
        used, cache = pool(world).used_bytes, world.caches.pop("kv")
        world.cm.deallocate_blocks_cache(cache)
        assert (pool(world).used_bytes, world.dd.statistics().caches.draining) == (used, 1)
        content = make(world, "other", Spec(TENSORS, BLOCKS, BLOCK, blocks=True), 3)
    finally:
        fake.hang(False)
    swap.result()
    assert (pool(world).used_bytes, world.dd.statistics().caches.draining) == (used, 0)
    same_bytes(show(world, "other"), content)


@pytest.mark.gpu(True)
@pytest.mark.parametrize("out", [False, True])
def test_a_signal_handler_may_swap_too_during_a_swap(end: LocalEnd, out: bool) -> None:
    fake, main, handled = fakecuda.load(), threading.get_ident(), list[int]()

    def handle(number: int, frame: object) -> None:
        fake.hang(False)
        scene.move(EVERY_OTHER, out=out)
        handled.append(number)

    def ring() -> None:
        wait_until(lambda: fake.state().unfinished_streams > 0)
        signal.pthread_kill(main, signal.SIGUSR1)

    end.start("DECODER", 1)
    scene, before = Scene(end.world), signal.signal(signal.SIGUSR1, handle)
    fake.hang(True)
    ringing = Call(ring)
    try:
        scene.swap(EVERY_OTHER, out=out)
    finally:
        fake.hang(False)
        signal.signal(signal.SIGUSR1, before)
    ringing.result()
    assert handled == [signal.SIGUSR1]


@pytest.mark.gpu(False)
def test_memory_that_is_being_unregistered_is_not_swapped(end: LocalEnd) -> None:
    """Its owner unmaps it as soon as that call has returned."""
    end.start("DECODER", 1)
    scene, world, store = Scene(end.world), end.world, end.world.probe.engine.caches
    addresses = [array.ctypes.data for array in scene.around]
    host = world.cm.register_blocks_cache(
        CacheDesc(TENSORS, [HOST_BLOCKS + 2, BLOCK], DataType.DT_UINT8, Placement.HOST), addresses, BlocksCacheKey(2, 9)
    )
    with store.using(host.cache_id, "test"):
        entry = store.registry.lookup(host.cache_id)
        unregistering = Call(world.cm.unregister_cache, host.cache_id)
        wait_until(lambda: entry.closing)
        before = [array.copy() for array in scene.around]
        with pytest.raises(CacheNotFound, match=f"dst_cache: cache {host.cache_id} is being unregistered"):
            world.cm.swap_blocks(world.caches["kv"], host, {0: 1})
        same_bytes(scene.around, before)
    unregistering.result()


DEVICE_BLOCKS, CPU_BLOCKS = 6, 8
GOOD = {0: 0}


def described(blocks: int, *, tensors: int = 2, block: int = 64, placement: Placement = Placement.DEVICE) -> CacheDesc:
    return CacheDesc(tensors, [blocks, block], DataType.DT_UINT8, placement)


@pytest.fixture
def full(end: LocalEnd) -> LocalEnd:
    """A device blocks cache, CPU caches, others that do not fit them or are gone."""
    end.start("PROMPT", 1)
    world = end.world
    for name, each in {
        "before device": described(DEVICE_BLOCKS),
        "device": described(DEVICE_BLOCKS),
        "other device": described(DEVICE_BLOCKS),
        "gone device": described(DEVICE_BLOCKS),
        "wider": described(DEVICE_BLOCKS, block=128),
        "more tensors": described(DEVICE_BLOCKS, tensors=3),
        "pooled host": described(CPU_BLOCKS, placement=Placement.HOST),
        "gone pooled host": described(CPU_BLOCKS, placement=Placement.HOST),
    }.items():
        world.caches[name] = world.cm.allocate_blocks_cache(each)
    world.caches["continuous"] = world.cm.allocate_cache(described(DEVICE_BLOCKS))
    for name in ("host", "gone host"):
        cpu_cache(world, name, described(CPU_BLOCKS, placement=Placement.HOST))
    for seed, cache in enumerate(world.caches.values()):
        fill(cache, seed)
    for name in ("gone device", "gone pooled host", "gone host"):
        world.cm.deallocate_blocks_cache(world.caches[name])
    return end


def swap(kind: Kind, src: Any, dst: Any, *texts: str, pairs: dict[int, int] = GOOD) -> Row:
    src, dst = (Use(each) if isinstance(each, str) else each for each in (src, dst))
    return bad(kind, *texts, src_cache=src, dst_cache=dst, src_to_dst=pairs)


def both_ways(kind: Kind, one: Any, other: Any, *texts: str, pairs: dict[int, int] = GOOD) -> list[Row]:
    """The texts may name the argument in which ``one`` is: {}."""
    there = swap(kind, one, other, *(text.format("src_cache") for text in texts), pairs=pairs)
    return [there, swap(kind, other, one, *(text.format("dst_cache") for text in texts), pairs=pairs)]


def refuse_swaps(end: LocalEnd, rows: list[Row]) -> None:
    refuse([end], Table("cm.swap_blocks", {}, {}, *rows))


def test_r01_r16_r17_swap_refuses_what_is_no_cache_and_what_breaks_a_rule(full: LocalEnd) -> None:
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
    argument = Argument(("no cache", 1, []))
    specs = {"src_cache": argument, "dst_cache": argument, "src_to_dst": SWAP_PAIRS}
    for src, dst in (("device", "host"), ("host", "device")):
        good = {"src_cache": Use(src), "dst_cache": Use(dst), "src_to_dst": GOOD}
        refuse([full], Table("cm.swap_blocks", good, specs, no_op(src_to_dst={})))


@pytest.mark.gpu(False)
@pytest.mark.parametrize("shift", [-64, 64, 63, -(DEVICE_BLOCKS - 1) * 64, (DEVICE_BLOCKS - 1) * 64])
def test_r26_operands_that_overlap_without_being_the_same_are_refused(full: LocalEnd, shift: int) -> None:
    """Regression: bytes of overlapping operands were mixed, because only identical ones were looked for."""
    addrs = [address + shift for address in full.world.caches["device"].tensor_addrs]
    host = Cache.create_cpu_cache(described(DEVICE_BLOCKS, placement=Placement.HOST), addrs)
    refuse_swaps(full, both_ways(RULE, host, "device", "src_cache", "dst_cache", "overlap", pairs={0: 0, 1: 1}))


def test_swap_refuses_what_is_outside_the_memory_that_was_allocated_whatever_the_shape_became(full: LocalEnd) -> None:
    rows = []
    for host in ("host", "pooled host"):
        for src, dst, end, other in (
            ("device", host, DEVICE_BLOCKS, CPU_BLOCKS),
            (host, "device", CPU_BLOCKS, DEVICE_BLOCKS),
        ):
            rows.append(swap(RULE, src, dst, f"key of src_to_dst: {end}: src_cache has", pairs={0: 0, end: 2}))
            rows.append(swap(RULE, src, dst, f"src_to_dst[2]={other}: dst_cache has", pairs={2: other}))
    refuse_swaps(full, rows)
    shape, before = full.world.caches["device"].cache_desc, full.do(state)
    for dim, was, value in ((0, DEVICE_BLOCKS, 100), (1, 64, 8)):
        shape.update_dim(dim, value)
        errors = full.do(attempt, Table("cm.swap_blocks", {}, {}), [row.changes for row in rows])
        shape.update_dim(dim, was)
        for error, row in zip(errors, rows, strict=True):
            raises(error, RULE, row.texts)
    assert full.do(state) == before
