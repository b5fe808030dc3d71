"""swap_blocks: blocks between device and host memory, with the bytes around them (interface §6.9, R26), the engine
under it: workers, staging buffers and their memory, devices that fail (interface R10), and what is refused."""

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMStatusCode, Placement
from llm_datadist.errors import CacheNotFound, OutOfMemory
from llm_datadist.testing import StagedDevice
from tests.support.ends import Call
from tests.support.kinds import LocalEnd, World
from tests.support.memory import BrokenDevice, cpu_cache, desc, pool, state, user_memory
from tests.support.moves import Spec, Use, make, moved, same_bytes, show, wait_until
from tests.support.refusals import MISMATCH, RULE, SWAP_PAIRS, Kind, Row, Table, attempt, bad, no_op, raises, refuse
from tests.support.refusals import Spec as Argument
from tests.support.world import fill, read

pytestmark = pytest.mark.covers("Cache.create_cpu_cache", "CacheManager.swap_blocks", "LLMDataDist.statistics")

TENSORS, BLOCKS, HOST_BLOCKS, BLOCK = 4, 8, 12, 512
BUFFERS = 4
POOL_BYTES = 32 * 2**20
EVERY_OTHER = {n: n for n in range(0, BLOCKS, 2)}  # nothing to merge
COPIES = TENSORS * len(EVERY_OTHER)


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


@pytest.fixture(params=["host", "staged"])
def world(request: pytest.FixtureRequest, end: LocalEnd) -> World:
    """An end on a device without, and on one with staging."""
    end.start("DECODER", 1, device=None if request.param == "host" else StagedDevice())
    return end.world


def start(end: LocalEnd, device: StagedDevice) -> Scene:
    end.start("DECODER", 1, device=device)
    return Scene(end.world)


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
    scenes = [Scene(world, f"kv {block}", block=block) for block in (512, 2048, 1024)]  # staging grows on the way
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


@pytest.mark.parametrize("workers", [1, 4])
def test_r06_r10_swap_out_copies_in_as_many_threads_at_once_without_a_deadline(end: LocalEnd, workers: int) -> None:
    meeting = threading.Barrier(workers)

    class Slow(StagedDevice):
        """Copies from the device only when so many threads are at it, later than any deadline."""

        def copy_from_device(self, dst: int, src: int, nbytes: int) -> None:
            meeting.wait(30)
            time.sleep(0.03)
            super().copy_from_device(dst, src, nbytes)

    device = Slow()
    end.start("DECODER", 1, device=device, sync_kv_timeout=100)
    scene = Scene(end.world)
    end.world.probe.engine.swap.workers = workers  # this machine may have fewer CPUs than the test needs
    scene.swap(EVERY_OTHER, out=True)
    count = device.count("from_device")
    assert (count.copies, count.nbytes, len(count.threads)) == (COPIES, COPIES * BLOCK, workers)
    assert all(name.startswith("llm-datadist-swap") for name in count.threads)
    assert device.count("on_device").copies == 0


class Watched(StagedDevice):
    """Empties the first buffer only when all four have been filled; notes the buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.filled: set[int] = set()

    def copy_to_device(self, dst: int, src: int, nbytes: int) -> None:
        self.filled.add(dst)
        super().copy_to_device(dst, src, nbytes)

    def copy_on_device(self, dst: int, src: int, nbytes: int) -> None:
        wait_until(lambda: self.count("to_device").copies >= BUFFERS, 30)
        super().copy_on_device(dst, src, nbytes)


def test_r10_four_staging_buffers_outside_the_pool_until_finalize_that_one_thread_empties(end: LocalEnd) -> None:
    device = Watched()
    small = start(end, device)
    large = Scene(end.world, "large", block=2048)
    used, workers = pool(end.world).used_bytes, end.world.dd.statistics().swap.workers
    small.swap({0: 1, 5: 7}, out=True)
    assert (end.world.dd.statistics().swap.staging_bytes, device.allocated_bytes) == (0, POOL_BYTES)
    small.swap({0: 0, 1: 1, 2: 2, 9: 4, 7: 6}, out=False)  # 0, 1, 2 are merged, and cut again for the buffers
    filled, emptied = device.count("to_device"), device.count("on_device")
    assert (filled.copies, filled.nbytes) == (emptied.copies, emptied.nbytes) == (20, 20 * BLOCK)
    assert (len(device.filled), len(emptied.threads)) == (BUFFERS, 1)
    assert not filled.threads & emptied.threads
    assert len(filled.threads) <= workers
    assert device.count("from_device").copies == 2 * TENSORS
    for scene, out, staging in (
        (small, False, BUFFERS * BLOCK),
        (large, False, BUFFERS * 2048),
        (small, False, BUFFERS * 2048),
        (small, True, BUFFERS * 2048),
    ):
        scene.swap({0: 1, 5: 7}, out=out)
        assert end.world.dd.statistics().swap.staging_bytes == staging
        assert device.allocated_bytes == POOL_BYTES + staging
        assert pool(end.world).used_bytes == used
    end.world.dd.finalize()
    assert device.allocated_bytes == 0
    end.world.caches.clear()


@pytest.mark.parametrize("room", [0, BLOCK, BUFFERS * BLOCK - 1])
def test_r10_lack_of_staging_memory_copies_nothing_and_names_the_size(end: LocalEnd, room: int) -> None:
    device = StagedDevice()
    large, small = start(end, device), Scene(end.world, "small", block=64)
    device.refuse_after(POOL_BYTES + room)
    figures = ("swap_blocks: ", f"4 staging buffers of {BLOCK} bytes ({BUFFERS * BLOCK} in all)")
    far = [array.copy() for array in large.around]
    for _ in range(2):  # the second time there are small buffers to give back first
        near = show(end.world, "kv")
        with pytest.raises(OutOfMemory) as caught:
            large.move({0: 0, 1: 5}, out=False)
        assert [part for part in figures if part not in str(caught.value)] == []
        assert (caught.value.status_code, caught.value.requested) == (LLMStatusCode.LLM_OUT_OF_MEMORY, BUFFERS * BLOCK)
        assert device.allocated_bytes == POOL_BYTES
        same_bytes(show(end.world, "kv"), near)
        same_bytes(large.around, far)
        large.swap({0: 0}, out=True)
        far = [array.copy() for array in large.around]
        if room >= BUFFERS * 64:
            small.swap({0: 0, 1: 5}, out=False)
    device.refuse_after(POOL_BYTES + BUFFERS * BLOCK)
    large.swap({1: 2}, out=False)


# --- failures and other callers ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["allocate", "copy_to_device", "copy_on_device", "copy_from_device"])
def test_an_error_of_the_device_reaches_the_caller_and_the_next_swap_works(end: LocalEnd, method: str) -> None:
    device = BrokenDevice()
    scene = start(end, device)
    out = method == "copy_from_device"
    device.broken = method
    with pytest.raises(OSError, match="device is lost"):
        scene.move(EVERY_OTHER, out=out)
    if method == "allocate":
        assert device.allocated_bytes == POOL_BYTES
    else:
        with pytest.raises(OSError, match="device is lost"):
            scene.move({0: 3, 1: 3}, out=out)
    device.broken = ""
    scene.swap(EVERY_OTHER, out=out)
    assert end.world.dd.statistics().swap.staging_bytes == (0 if out else BUFFERS * BLOCK)


def test_a_cache_deallocated_during_a_swap_keeps_its_memory_until_the_swap_has_ended(end: LocalEnd) -> None:
    arrived, gate = threading.Event(), threading.Event()

    class Gated(StagedDevice):
        def copy_on_device(self, dst: int, src: int, nbytes: int) -> None:
            arrived.set()
            assert gate.wait(30)
            super().copy_on_device(dst, src, nbytes)

    scene = start(end, Gated())
    world, cache = end.world, end.world.caches.pop("kv")
    swap = Call(world.cm.swap_blocks, scene.host, cache, EVERY_OTHER)
    assert arrived.wait(30)
    used = pool(world).used_bytes
    world.cm.deallocate_blocks_cache(cache)
    assert (pool(world).used_bytes, world.dd.statistics().caches.draining) == (used, 1)
    content = make(world, "other", Spec(TENSORS, BLOCKS, BLOCK, blocks=True), 3)
    gate.set()
    swap.result()
    assert (pool(world).used_bytes, world.dd.statistics().caches.draining) == (used, 0)
    same_bytes(show(world, "other"), content)


@pytest.mark.parametrize("pairs", [EVERY_OTHER, {0: 3, 1: 3}], ids=["at once", "in order"])
@pytest.mark.parametrize("out", [False, True])
def test_a_signal_handler_may_swap_too_once_a_staged_swap_has_ended(
    end: LocalEnd, out: bool, pairs: dict[int, int]
) -> None:
    main, copying, handled = threading.get_ident(), threading.Event(), list[bool]()

    class Ringing(StagedDevice):
        def ring(self) -> None:
            if not copying.is_set():
                copying.set()
                signal.pthread_kill(main, signal.SIGUSR1)

        def copy_from_device(self, dst: int, src: int, nbytes: int) -> None:
            self.ring()
            super().copy_from_device(dst, src, nbytes)

        def copy_to_device(self, dst: int, src: int, nbytes: int) -> None:
            self.ring()
            super().copy_to_device(dst, src, nbytes)

    def handle(number: int, frame: object) -> None:
        scene.move(pairs, out=out)
        handled.append(copying.is_set())

    scene, before = start(end, Ringing()), signal.signal(signal.SIGUSR1, handle)
    try:
        scene.swap(pairs, out=out)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled == [True]


def test_memory_that_is_being_unregistered_is_not_swapped(end: LocalEnd) -> None:
    """Its owner unmaps it as soon as that call has returned."""
    scene = start(end, StagedDevice())
    world, store = end.world, end.world.probe.engine.store
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
def full(end: LocalEnd) -> Iterator[LocalEnd]:
    """A device blocks cache, CPU caches, others that do not fit them or are gone; the device never hears of a call."""
    staged = StagedDevice()
    end.start("PROMPT", 1, device=staged)
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
            rows.append(swap(RULE, src, dst, "sources of src_to_dst", str(end), pairs={0: 0, end: 2}))
            rows.append(swap(RULE, src, dst, "destinations of src_to_dst", str(other), pairs={2: other}))
    refuse_swaps(full, rows)
    shape, before = full.world.caches["device"].cache_desc, full.do(state)
    for dim, was, value in ((0, DEVICE_BLOCKS, 100), (1, 64, 8)):
        shape.update_dim(dim, value)
        errors = full.do(attempt, Table("cm.swap_blocks", {}, {}), [row.changes for row in rows])
        shape.update_dim(dim, was)
        for error, row in zip(errors, rows, strict=True):
            raises(error, RULE, row.texts)
    assert full.do(state) == before
