"""swap_blocks: the bytes around what is swapped, many blocks, all four staging buffers at work, no deadline.

Rules and single cases: test_swap_blocks.py; workers and staging memory: test_swap_engine.py.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist import Cache, CacheDesc, DataType, LLMStatusCode, Placement
from llm_datadist._memory.device import HostDevice
from llm_datadist.errors import OutOfMemory
from llm_datadist.testing import StagedDevice
from tests.support.memory import state
from tests.support.moves import Spec, make, moved, same_bytes, show, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._memory.device import Device
    from tests.support.ends import LocalEnd
    from tests.support.moves import Bytes
    from tests.support.world import World

TENSORS, BLOCKS, HOST_BLOCKS, BLOCK_BYTES = 4, 8, 12, 512
BUFFERS = 4
DEVICES: dict[str, Callable[[], Device]] = {"direct": HostDevice, "staged": StagedDevice}


@dataclass
class Scene:
    """A device cache between two neighbours that touch it, a CPU cache inside arrays with a row more at each end."""

    world: World
    name: str
    host: Cache
    around: Bytes

    @classmethod
    def add(
        cls,
        world: World,
        name: str = "kv",
        blocks: int = BLOCKS,
        host_blocks: int = HOST_BLOCKS,
        block: int = BLOCK_BYTES,
    ) -> Scene:
        for seed, each in enumerate((f"left of {name}", name, f"right of {name}")):
            make(world, each, Spec(TENSORS, blocks, block, blocks=True), seed)
        random = np.random.default_rng(9)
        around = [random.integers(0, 256, (host_blocks + 2, block), np.uint8) for _ in range(TENSORS)]
        desc = CacheDesc(TENSORS, [host_blocks, block], DataType.DT_UINT8, Placement.HOST)
        host = Cache.create_cpu_cache(desc, [array.ctypes.data + block for array in around])
        return cls(world, name, host, around)

    @property
    def device(self) -> Cache:
        return self.world.caches[self.name]

    def swap(self, pairs: dict[int, int], *, out: bool) -> None:
        """Swap, then compare every byte of both sides and of what lies around them with what was there before."""
        near = {name: show(self.world, name) for name in self.world.caches}
        far = [tensor.copy() for tensor in self.around]
        if out:
            self.world.cm.swap_blocks(self.device, self.host, pairs)
            far = moved(far, near[self.name], [(to + 1, of) for of, to in pairs.items()])
        else:
            self.world.cm.swap_blocks(self.host, self.device, pairs)
            near[self.name] = moved(near[self.name], far, [(to, of + 1) for of, to in pairs.items()])
        same_bytes(self.around, far)
        for each, expected in near.items():
            same_bytes(show(self.world, each), expected)


@pytest.fixture(params=DEVICES)
def world(request: pytest.FixtureRequest, end: LocalEnd) -> World:
    """An end on a device with, and on one without staging."""
    end.start("PROMPT", 1, device=DEVICES[request.param]())
    return end.world


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_swap_leaves_alone_what_lies_next_to_the_first_and_the_last_block(world: World) -> None:
    scene = Scene.add(world)
    scene.swap({0: 0, 3: 4, 7: 11}, out=True)
    scene.swap({11: 7, 0: 0, 5: 3}, out=False)
    scene.swap({block: block for block in range(BLOCKS)}, out=True)
    scene.swap({block + 4: block for block in range(BLOCKS)}, out=False)
    (swaps,) = (each for each in world.dd.statistics().operations if each.name == "swap_blocks")
    assert (swaps.count, swaps.errors, swaps.nbytes) == (4, 0, (3 + 3 + 8 + 8) * TENSORS * BLOCK_BYTES)


def test_swap_moves_many_large_blocks_scattered_and_in_one_run(world: World) -> None:
    scene = Scene.add(world, blocks=48, host_blocks=64, block=16384)
    random = np.random.default_rng(5)
    for out, rows, targets in ((True, 48, 64), (False, 64, 48)):
        sources, destinations = random.permutation(rows)[:40].tolist(), random.permutation(targets)[:40].tolist()
        scene.swap(dict(zip(sources, destinations, strict=True)), out=out)
        scene.swap({block: block + 3 for block in range(40)}, out=out)


@pytest.mark.parametrize(("blocks", "host_blocks"), [(3, 20), (20, 3), (1, 1)])
def test_swap_between_different_block_counts(world: World, blocks: int, host_blocks: int) -> None:
    scene = Scene.add(world, blocks=blocks, host_blocks=host_blocks)
    scene.swap({blocks - 1: host_blocks - 1}, out=True)
    scene.swap({host_blocks - 1: 0}, out=False)


def test_swap_of_an_empty_dict_does_nothing(world: World) -> None:
    scene = Scene.add(world)
    before = state(world)
    scene.swap({}, out=True)
    scene.swap({}, out=False)
    assert state(world) == before


@pytest.mark.parametrize("out", [True, False])
def test_r26_the_last_of_two_pairs_with_one_destination_wins(world: World, out: bool) -> None:
    scene = Scene.add(world)
    scene.swap({1: 5, 2: 5}, out=out)
    scene.swap({2: 5, 1: 5, 3: 6, 4: 7, 0: 6}, out=out)


def test_swaps_of_several_threads_with_blocks_of_several_sizes(world: World) -> None:
    scenes = [Scene.add(world, f"kv {block}", block=block) for block in (512, 2048, 1024)]  # staging grows on the way
    before = [(show(world, scene.name), [array.copy() for array in scene.around]) for scene in scenes]
    failures: list[BaseException] = []

    def swap(scene: Scene) -> None:
        try:
            for _ in range(20):
                world.cm.swap_blocks(scene.device, scene.host, {0: 7, 2: 8, 3: 9})
                world.cm.swap_blocks(scene.host, scene.device, {8: 0, 7: 2, 9: 3})
        except BaseException as error:  # noqa: BLE001 (carried to the test)
            failures.append(error)

    threads = [threading.Thread(target=swap, args=(scene,)) for scene in scenes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []
    for scene, wanted in zip(scenes, before, strict=True):
        near, far = wanted
        for _ in range(20):
            far = moved(far, near, [(8, 0), (9, 2), (10, 3)])
            near = moved(near, far, [(0, 9), (2, 8), (3, 10)])
        same_bytes(show(world, scene.name), near)
        same_bytes(scene.around, far)


# --- staging ----------------------------------------------------------------------------------------------------------


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


def test_r10_all_four_buffers_are_full_at_once_and_the_filling_threads_do_not_empty_them(end: LocalEnd) -> None:
    device = Watched()
    end.start("PROMPT", 1, device=device)
    scene = Scene.add(end.world)
    taken, pools = device.allocated_bytes, end.world.dd.statistics().pools
    scene.swap({0: 0, 1: 1, 2: 2, 9: 4, 7: 6}, out=False)
    filled, emptied = device.count("to_device"), device.count("on_device")
    assert (filled.copies, filled.nbytes) == (emptied.copies, emptied.nbytes) == (20, 20 * BLOCK_BYTES)
    assert len(device.filled) == BUFFERS
    assert len(emptied.threads) == 1
    assert not filled.threads & emptied.threads
    assert device.allocated_bytes - taken == BUFFERS * BLOCK_BYTES
    assert end.world.dd.statistics().pools == pools


def test_r10_lack_of_memory_for_larger_buffers_copies_nothing_and_small_blocks_still_swap(end: LocalEnd) -> None:
    device = StagedDevice()
    end.start("PROMPT", 1, device=device)
    small, large = Scene.add(end.world), Scene.add(end.world, "large", block=2048)
    device.refuse_after(device.allocated_bytes + BUFFERS * 2048 - 1)
    small.swap({0: 0, 1: 5}, out=False)
    copies, near, far = device.count("to_device"), show(end.world, "large"), [array.copy() for array in large.around]
    with pytest.raises(OutOfMemory, match=r"swap_blocks: .*4 staging buffers of 2048 bytes \(8192 in all\)") as caught:
        end.world.cm.swap_blocks(large.host, large.device, {0: 0, 1: 5})
    assert (caught.value.status_code, caught.value.requested) == (LLMStatusCode.LLM_OUT_OF_MEMORY, 8192)
    assert device.count("to_device") == copies
    same_bytes(show(end.world, "large"), near)
    same_bytes(large.around, far)
    small.swap({1: 0, 3: 5}, out=False)


def test_r06_swap_blocks_has_no_deadline(end: LocalEnd) -> None:
    class Slow(StagedDevice):
        def copy_from_device(self, dst: int, src: int, nbytes: int) -> None:
            beyond = time.monotonic() + 0.12
            wait_until(lambda: time.monotonic() > beyond)
            super().copy_from_device(dst, src, nbytes)

    end.start("PROMPT", 1, device=Slow(), sync_kv_timeout=100)
    Scene.add(end.world).swap({0: 1}, out=True)
