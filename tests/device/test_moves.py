"""Plans with a side in a GPU, executed and digested: each pair of places and each mover beside the twin in NumPy, every
byte inside and outside; late streams, several threads, more of them than there are channels to keep."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import pytest

from llm_datadist._native import NO_DEADLINE, DeviceMover, PinnedMemory, Place, Plan, Tensors, execute
from llm_datadist._native.plan import PlanSide, digest
from llm_datadist.errors import DeviceError, ParamError
from tests.support import fakecuda, twin
from tests.support.moves import same_bytes

MIB: Final = 1 << 20
PLACES: Final = ("pageable", "pinned", "device")
MOVERS: Final = (DeviceMover.AUTO, DeviceMover.KERNEL, DeviceMover.COPY)
PAIRS: Final = [pair for pair in product(PLACES, PLACES) if "device" in pair]
NONCE: Final = bytes(range(16))
PINNED: Final[list[tuple[PinnedMemory, twin.Bytes]]] = []  # what a test has pinned; its end releases it
ROW: Final = twin.make_plan(np.array([(0, 0, 64)], np.uint64))
BEYOND: Final = twin.make_plan(np.array([(1, 1, 64)], np.uint64))


@dataclass
class Memory:
    """Tensors at a place, in one piece of memory, with bytes between them that nobody addresses."""

    where: str
    tensors: int
    nbytes: int

    def __post_init__(self) -> None:
        fake, self.stride = fakecuda.load(), self.nbytes + 133
        size = self.tensors * self.stride
        if self.where == "device":
            self._kept: object = (memory := fakecuda.UserMemory(size))
            self.address, self.bytes = memory.address, fake.view(memory.address, size)
        else:
            self._kept = self.bytes = np.empty(size, np.uint8)
            self.address = self.bytes.ctypes.data
        if self.where == "pinned":
            PINNED.append((PinnedMemory(0, self.address, size), self.bytes))

    def fill(self, seed: int) -> None:
        self.bytes[:] = np.frombuffer(np.random.default_rng(seed).bytes(self.bytes.size), np.uint8)

    def named(self, mover: DeviceMover = DeviceMover.AUTO) -> Tensors:
        starts = [self.address + 7 + i * self.stride for i in range(self.tensors)]
        place = Place(device=0, mover=mover) if self.where == "device" else Place(pinned=self.where == "pinned")
        return Tensors(np.array(starts, np.uint64), self.nbytes, place=place)

    def arrays(self, of: twin.Bytes | None = None) -> list[twin.Bytes]:
        held = self.bytes if of is None else of
        return [held[7 + i * self.stride :][: self.nbytes] for i in range(self.tensors)]


@pytest.fixture(autouse=True)
def nothing_wrong(gpu: bool) -> Iterator[None]:
    fakecuda.load()
    yield
    assert all(PINNED.pop()[0].release() for _ in PINNED[:])
    assert fakecuda.complaints_here() == []


pytestmark = pytest.mark.gpu(True)


def check(plan: Plan, dst: Memory, src: Memory, mover: DeviceMover = DeviceMover.AUTO) -> None:
    """Execute here and in the twin; every byte of both sides, and around them, must come out the same."""
    expected = dst.bytes.copy()
    source = expected if src is dst else src.bytes.copy()
    twin.execute(plan, dst.arrays(expected), src.arrays(source))
    assert execute(plan, dst.named(mover).native, src.named(mover).native, None, NO_DEADLINE) == plan.nbytes
    same_bytes([dst.bytes, src.bytes], [expected, source])


def random_plan(seed: int, nbytes: int) -> Plan:
    ordered = seed % 3 == 0
    runs = twin.runs_of(seed, nbytes, apart=not ordered)
    return twin.make_plan(runs, ordered=ordered, dst_first=seed % 2, src_first=1 - seed % 2, count=1 + seed % 2)


@pytest.mark.parametrize("mover", MOVERS, ids=lambda mover: mover.name)
@pytest.mark.parametrize(("dst", "src"), PAIRS)
def test_random_plans_move_as_in_the_twin(dst: str, src: str, mover: DeviceMover) -> None:
    for nbytes, seeds in ((3000, 9), (5 * MIB // 2, 3)):  # several windows
        two = Memory(dst, 3, nbytes), Memory(src, 3, nbytes)
        for seed in range(seeds):
            for side, each in enumerate(two):
                each.fill(2 * seed + side)
            check(random_plan(seed, nbytes), *two, mover)


def test_runs_that_overlap_in_one_memory_move_as_memmove_does() -> None:
    memory = Memory("device", 1, 3 * MIB)
    for by, nbytes in product((1, 4097, MIB // 2 + 3), (2, 5000, 2 * MIB)):
        for dst, src in ((0, by), (by, 0), (by, by)):
            memory.fill(nbytes + by)
            check(twin.make_plan(np.array([(dst, src, nbytes)], np.uint64)), memory, memory)
    for seed in range(3):
        memory.fill(seed)
        check(
            twin.make_plan(twin.runs_of(seed, 3 * MIB, apart=False), ordered=True),
            memory,
            memory,
        )


def test_an_empty_plan_moves_nothing() -> None:
    device, host = Memory("device", 1, 64), Memory("pageable", 1, 64)
    for runs in (np.zeros((0, 3), np.uint64), np.array([(64, 0, 0), (3, 64, 0)], np.uint64)):
        for two in ((device, host), (host, device), (device, device)):
            check(twin.make_plan(runs), *two)
            assert digest_of(twin.make_plan(runs), device) == digest_of(twin.make_plan(runs), host)


@pytest.mark.parametrize(("dst", "src"), [("device", "device"), ("device", "pinned"), ("pinned", "device")])
def test_a_plan_of_several_launches_overwrites_the_plan_of_none_that_runs(dst: str, src: str) -> None:
    count, block = 40_000, 24  # 960,000 bytes of runs, where a launch has room for 256 KiB
    order = np.random.default_rng(1).permutation(count)
    runs = np.array([np.arange(count) * block, order * block, np.full(count, block)], np.uint64).T.copy()
    two, before = (Memory(dst, 3, count * block), Memory(src, 3, count * block)), fakecuda.load().state().kernels
    for seed, each in enumerate(two):
        each.fill(seed)
    check(twin.make_plan(runs, count=3), *two, DeviceMover.KERNEL)
    assert fakecuda.load().state().kernels - before >= 4


@pytest.mark.parametrize("threads", [4, 24])
def test_threads_move_beside_each_other_also_more_than_have_channels_to_keep(threads: int) -> None:
    """Beyond sixteen a call has a channel of its own, with windows of pageable memory."""
    fake, together = fakecuda.load(), threading.Barrier(threads)

    def work(thread: int) -> None:
        dst, src = PAIRS[thread % len(PAIRS)]
        two = Memory(dst, 4, 300_000), Memory(src, 4, 300_000)
        for seed in range(thread, thread + 4):
            for side, each in enumerate(two):
                each.fill(2 * seed + side)
            together.wait(20)
            check(random_plan(seed, 300_000), *two, MOVERS[seed % 3])

    with ThreadPoolExecutor(threads) as pool:
        for each in [pool.submit(work, thread) for thread in range(threads)]:
            each.result(100)
    assert fake.state().kept["streams"] <= 17  # a default stream of another test's, too


def test_a_copy_whose_time_is_over_moves_nothing() -> None:
    for dst, src in (("device", "device"), ("device", "pageable"), ("pageable", "device")):
        two = Memory(dst, 1, 64), Memory(src, 1, 64)
        two[0].bytes[:], two[1].bytes[:] = 1, 2
        assert execute(ROW, two[0].named().native, two[1].named().native, None, 1) == 0
        assert (two[0].bytes == 1).all()


def digest_of(plan: Plan, memory: Memory, *, dst: bool = True, each_run: bool = False) -> list[object]:
    found = digest(PlanSide(plan, memory.named(), dst), None, NO_DEADLINE, NONCE, each_run=each_run)
    assert found is not None
    return list(found.tolist())


@pytest.mark.parametrize("where", ["device", "pinned"])
def test_digests_are_those_of_the_same_bytes_in_the_host(where: str) -> None:
    for nbytes in (1, 3000, 5 * MIB // 2):
        there, here = Memory(where, 3, nbytes), Memory("pageable", 3, nbytes)
        here.fill(nbytes)
        there.bytes[:] = here.bytes
        for seed, dst, each_run in product(range(3), (False, True), (False, True)):
            plan = twin.make_plan(twin.runs_of(seed, nbytes, apart=False), count=2, dst_first=1, src_first=0)
            wanted = digest_of(plan, here, dst=dst, each_run=each_run)
            assert digest_of(plan, there, dst=dst, each_run=each_run) == wanted


@pytest.mark.parametrize(
    ("move", "error"),
    [
        (lambda d: execute(ROW, d.native, elsewhere(d).native, None, NO_DEADLINE), ParamError),
        (lambda d: execute(BEYOND, d.native, d.native, None, NO_DEADLINE), ParamError),
        (lambda d: execute(BEYOND, d.native, Memory("pageable", 1, 64).named().native, None, NO_DEADLINE), ParamError),
        (lambda d: digest(PlanSide(BEYOND, d, True), None, NO_DEADLINE, NONCE), ParamError),
    ],
)
def test_a_plan_that_leaves_its_tensors_or_the_device_moves_nothing(
    move: Callable[[Tensors], object], error: type[Exception]
) -> None:
    memory, before = Memory("device", 1, 64), fakecuda.load().state()
    with pytest.raises(error):
        move(memory.named())
    after = fakecuda.load().state()
    assert (after.copies, after.kernels) == (before.copies, before.kernels)


def elsewhere(tensors: Tensors) -> Tensors:
    return Tensors(tensors.bases, tensors.extent, place=Place(device=1))


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuMemcpyAsync", "cuEventRecord"])
@pytest.mark.parametrize(("dst", "src"), PAIRS)
def test_a_call_of_the_driver_that_fails_fails_the_copy_and_not_the_next(dst: str, src: str, call: str) -> None:
    two, plan = (Memory(dst, 4, 5000), Memory(src, 4, 5000)), random_plan(5, 5000)
    fakecuda.load().fail(call, 999)
    mover = DeviceMover.KERNEL if call == "cuLaunchKernel" else DeviceMover.COPY
    # Whether a copy has ended is asked again.
    with (
        suppress(DeviceError)
        if call.startswith("cuEvent")
        else pytest.raises(DeviceError, match=r"CUDA_ERROR_UNKNOWN \(999\)")
    ):
        execute(plan, two[0].named(mover).native, two[1].named(mover).native, None, NO_DEADLINE)
    check(plan, *two)
