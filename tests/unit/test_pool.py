"""Pools: all or nothing, the numbers in an error, the lock, and the check against the host's memory (interface R11).

Memory straight from a device (interface R12): counted, bounded, given back with its cache. An allocator's model.
"""

import itertools
import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from llm_datadist._memory import device as devices
from llm_datadist._memory.allocator import PageAllocator
from llm_datadist._memory.device import Device, HostDevice
from llm_datadist._memory.pool import DirectMemory, MemoryPool, create_pool
from llm_datadist._memory.segment import SharedSegment
from llm_datadist._option_kinds import PoolOptions
from llm_datadist.errors import LLMStatusCode, OutOfMemory, StateError
from llm_datadist.metrics import PoolStatistics
from tests.support.world import residue, settled

pytestmark = pytest.mark.covers("PageAllocator")

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096  # of memory without a pool


def create(nbytes: int = MIB, page_shift: int = 16, device: Device | None = None) -> MemoryPool:
    sizes = PoolOptions(nbytes, page_shift)
    return create_pool("device", device or HostDevice(), sizes, peers_may_write=False, prefault=False)


@pytest.fixture
def pool() -> Iterator[MemoryPool]:
    """A pool of 1 MiB in pages of 64 KiB."""
    pool = create()
    yield pool
    pool.check_integrity()
    pool.close()


def test_an_allocation_knows_its_place_and_is_given_back_once(pool: MemoryPool) -> None:
    keep = pool.allocate_many(1, 1)
    drop = pool.allocate_many(3, 70_000)
    assert (drop.pool, drop.nbytes, drop.offsets) == (pool, 70_000, (64 * KIB, 192 * KIB, 320 * KIB))
    assert drop.addresses == tuple(pool.segment.address + offset for offset in drop.offsets)
    drop.free()
    second = pool.allocate_many(1, 960 * KIB)
    drop.free()  # again: what is the next owner's now stays taken
    assert pool.statistics().used_bytes == MIB
    second.free()
    assert (drop.freed, keep.freed) == (True, False)
    assert pool.statistics() == PoolStatistics(
        name="device",
        capacity_bytes=MIB,
        used_bytes=64 * KIB,
        free_bytes=960 * KIB,
        largest_hole_bytes=960 * KIB,
        live_allocations=1,
        page_bytes=64 * KIB,
        peak_used_bytes=MIB,
    )
    pool._peak_used = 0
    with pytest.raises(AssertionError, match="peak 0 is below"):
        pool.check_integrity()
    pool._peak_used = MIB
    pool._allocator.used_bytes += 1
    with pytest.raises(AssertionError, match="is not the sum"):
        pool.check_integrity()
    pool._allocator.used_bytes -= 1


def test_allocate_many_is_all_or_nothing_and_says_every_number(pool: MemoryPool) -> None:
    parts = [pool.allocate_many(1, 256 * KIB) for _ in range(4)]
    parts[0].free()
    parts[2].free()
    before = pool.statistics()
    with pytest.raises(OutOfMemory) as caught:
        pool.allocate_many(2, 300_000)
    error = caught.value
    assert str(error) == (
        "pool device cannot hold 2 x 300000 bytes: requested 655360 bytes in whole pages of 65536, free 524288, "
        "largest hole 262144, capacity 1048576; free caches or enlarge the pool"
    )
    assert (error.pool, error.requested, error.free, error.largest_hole) == ("device", 655_360, 524_288, 262_144)
    assert (error.status_code, error.retryable) == (LLMStatusCode.LLM_OUT_OF_MEMORY, True)
    with pytest.raises(OutOfMemory):
        pool.allocate_many(9, 64 * KIB)  # eight would fit
    assert pool.statistics() == before
    pool.allocate_many(8, 64 * KIB)
    assert pool.statistics().free_bytes == 0


def test_all_after_a_close_is_refused(pool: MemoryPool) -> None:
    """A pool is closed twice here, with a live allocation. Impossible sizes: test_config.py, test_layout.py."""
    direct, live = DirectMemory("device", HostDevice()), pool.allocate_many(1, 1)
    for memory, name in ((pool, "pool"), (direct, "memory")):
        memory.close()  # direct memory in use: tests/api/test_v1_caches.py
        with pytest.raises(StateError, match=f"{name} device is closed"):
            memory.allocate_many(1, 1)
    assert pool.segment.closed
    live.free()


def test_r11_larger_than_the_host_is_out_of_memory_naming_both_figures_and_the_pages_own_example_touches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = (MIB, "cgroup limit /sys/fs/cgroup/job/memory.max")
    monkeypatch.setattr(devices, "host_memory_limit", lambda: limit)
    with pytest.raises(OutOfMemory) as caught:
        create(MIB + 1)
    error = caught.value
    assert str(error) == (
        "pool device: memory_size is 1048577 bytes, larger than the 1048576 bytes of "
        "cgroup limit /sys/fs/cgroup/job/memory.max"
    )
    assert (error.requested, error.largest_hole, error.status_code) == (MIB + 1, MIB, LLMStatusCode.LLM_OUT_OF_MEMORY)
    create().close()
    example = 18_737_418_240  # the page's own memory_size (interface R11)
    monkeypatch.setattr(devices, "host_memory_limit", lambda: (24 << 30, "host memory"))
    monkeypatch.setattr(devices, "available_memory", lambda: (24 << 30, "MemAvailable"))
    pool = create(example)
    last = pool.allocate_many(2, example // 2 - 65_536)
    pool.segment.view(last.offsets[1] + last.nbytes - 1)[0] = 1
    assert isinstance(pool.segment, SharedSegment)
    assert 0 < os.fstat(pool.segment.fd).st_blocks * 512 <= 2 * MIB
    pool.close()


def test_memory_of_its_own_is_whole_pages_of_zeros_bounded_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "host_memory_limit", lambda: (10 * PAGE, "a test"))
    memory = DirectMemory("device", HostDevice())
    before = residue()
    taken = memory.allocate_many(3, PAGE + 1)
    now = memory.statistics()
    assert (now.used_bytes, now.live_allocations) == (6 * PAGE, 3)
    assert residue()["fds"] == before["fds"], "the descriptor is sent to no peer, so none is kept"
    view = taken.segment.view()
    assert not view.any()
    assert [address - taken.addresses[0] for address in taken.addresses] == [0, 2 * PAGE, 4 * PAGE]
    memory.check_integrity()
    for quarantined in (0, 6 * PAGE):  # which is worth waiting for
        with pytest.raises(OutOfMemory) as caught:
            memory.allocate_many(5, PAGE)
        error = caught.value
        assert (error.requested, error.free, error.quarantined) == (5 * PAGE, 4 * PAGE, quarantined)
        assert f"{5 * PAGE} bytes are wanted and {6 * PAGE} taken, of the {10 * PAGE} bytes of a test" in str(error)
        assert memory.statistics().used_bytes == 6 * PAGE
        taken.pool.detain(taken)
    taken.free()
    taken.free()
    del view
    now = memory.statistics()
    assert (now.used_bytes, now.peak_used_bytes) == (0, 6 * PAGE)
    memory.check_integrity()
    memory.allocate_many(5, PAGE).free()
    memory.close()
    assert settled(before) == before


def test_a_pool_that_cannot_be_backed_is_out_of_memory_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: (65536, "MemAvailable"))
    create(65536, 12).close()
    with pytest.raises(OutOfMemory, match=r"131072 bytes, of which 65536 can be had now \(MemAvailable\)") as caught:
        create(131072, 12)
    assert (caught.value.requested, caught.value.free) == (131072, 65536)


# The allocator

PAGES = 32


def test_i6_a_capacity_is_rounded_down_and_wrong_offsets_are_errors_and_change_nothing() -> None:
    assert PageAllocator(1, 0).allocate(1) == 0
    allocator = PageAllocator(8 * KIB + 1023, 10)
    assert (allocator.capacity, allocator.page_bytes) == (8 * KIB, KIB)
    assert [allocator.allocate(nbytes) for nbytes in (2 * KIB, KIB)] == [0, 2 * KIB]
    allocator.free(2 * KIB)
    before = (allocator.live, allocator.used_bytes, allocator.largest_hole)
    for offset in (KIB, 2 * KIB, 5 * KIB, 1, -KIB, 1 << 40):
        with pytest.raises(ValueError, match=f"offset {offset} is not allocated: unknown or freed twice"):
            allocator.free(offset)
    assert (allocator.live, allocator.used_bytes, allocator.largest_hole) == before
    allocator.check_integrity()


@pytest.mark.parametrize(
    ("break_it", "seen"),
    [
        (lambda a: a._live.update({0: 2 * KIB}), "gap or overlap"),
        (lambda a: a._live.pop(0), "gap or overlap"),
        (lambda a: a._live.update({KIB: 4 * KIB}), "gap or overlap"),
        (lambda a: a._hole_at.update({2 * KIB: 2 * KIB + 1}), "has 2049 bytes"),
        (lambda a: a._live.update({4 * KIB: 0}), "has 0 bytes"),
        (lambda a: a._hole_at.update({2 * KIB: KIB, 3 * KIB: KIB}), "holes meet unmerged"),
        (lambda a: a._hole_at.clear(), "ranges end at 2048, the capacity is 4096"),
        (lambda a: a._by_size.append((1, 1)), "holes by size"),
        (lambda a: a._hole_before.clear(), "hole ends"),
        (lambda a: setattr(a, "used_bytes", 0), "is not the sum"),
    ],
)
def test_the_integrity_check_sees_damage(break_it: Callable[[PageAllocator], object], seen: str) -> None:
    allocator = PageAllocator(4 * KIB, 10)
    allocator.allocate(KIB)
    allocator.allocate(KIB)
    allocator.check_integrity()
    break_it(allocator)
    with pytest.raises(AssertionError, match=seen):
        allocator.check_integrity()


class AllocatorAgainstModel(RuleBasedStateMachine):
    """The model is a list of pages, each free (None) or marked with the offset of the range that has it."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(PAGES * KIB, 10)
        self.pages: list[int | None] = [None] * PAGES

    def holes(self) -> dict[int, int]:
        """Return first page -> pages of every maximal run of free pages."""
        holes: dict[int, int] = {}
        start = 0
        for free, run in itertools.groupby(self.pages, lambda owner: owner is None):
            pages = len([*run])
            holes |= {start: pages} if free else {}
            start += pages
        return holes

    @rule(target=taken, nbytes=st.integers(1, 9 * KIB))
    def allocate(self, nbytes: int) -> int:
        """Take the smallest of the holes that fit, the lowest of equal ones."""
        need = -(-nbytes // KIB)
        fitting = [(pages, start) for start, pages in self.holes().items() if pages >= need]
        offset = self.allocator.allocate(nbytes)
        if not fitting:
            assert offset is None
            return -1
        start = min(fitting)[1]
        assert offset == start * KIB
        self.pages[start : start + need] = [offset] * need
        return offset

    @rule(offset=consumes(taken))
    def free(self, offset: int) -> None:
        if offset >= 0:
            self.allocator.free(offset)
            self.pages = [None if owner == offset else owner for owner in self.pages]

    @invariant()
    def agrees(self) -> None:
        free = self.pages.count(None)
        assert self.allocator.free_bytes == free * KIB
        assert self.allocator.used_bytes == (PAGES - free) * KIB
        assert self.allocator.largest_hole == max(self.holes().values(), default=0) * KIB
        assert self.allocator.live == len(set(self.pages) - {None})
        self.allocator.check_integrity()


AllocatorAgainstModel.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestAllocatorAgainstModel = AllocatorAgainstModel.TestCase
