"""Pools: all or nothing, the numbers in an error, many threads, and the check against the host's memory
(interface R11)."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llm_datadist._memory.device import HostDevice
from llm_datadist._memory.pool import MemoryPool, PoolStatistics, create_pool
from llm_datadist._memory.segment import SharedSegment
from llm_datadist.errors import LLMStatusCode, OutOfMemory, ParamError, StateError
from llm_datadist.testing.staged_device import StagedDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1 << 10
MIB = 1 << 20
PAGE_EXAMPLE = 18_737_418_240  # the page's own memory_size (interface R11)


@pytest.fixture
def pool() -> Iterator[MemoryPool]:
    """A pool of 1 MiB in pages of 64 KiB."""
    pool = create_pool("device", HostDevice(), MIB, 16, peers_may_write=False, prefault=False)
    yield pool
    pool.check_integrity()
    pool.close()


def test_an_allocation_knows_offsets_addresses_and_size(pool: MemoryPool) -> None:
    allocation = pool.allocate_many(3, 70_000)
    assert allocation.pool is pool
    assert allocation.nbytes == 70_000
    assert allocation.offsets == (0, 128 * KIB, 256 * KIB)
    assert allocation.addresses == tuple(pool.segment.address + offset for offset in allocation.offsets)
    assert repr(allocation) == "<Allocation 3 x 70000 bytes in pool device: live>"


def test_free_is_idempotent_and_merges(pool: MemoryPool) -> None:
    keep, drop = pool.allocate_many(1, 1), pool.allocate_many(4, 100_000)
    drop.free()
    drop.free()
    assert (drop.freed, keep.freed) == (True, False)
    assert repr(drop) == "<Allocation 4 x 100000 bytes in pool device: freed>"
    assert pool.statistics() == PoolStatistics(
        name="device",
        capacity_bytes=MIB,
        used_bytes=64 * KIB,
        free_bytes=960 * KIB,
        largest_hole_bytes=960 * KIB,
        live_allocations=1,
        page_bytes=64 * KIB,
        peak_used_bytes=576 * KIB,
    )


def test_a_second_free_does_not_free_the_next_owner(pool: MemoryPool) -> None:
    first = pool.allocate_many(1, MIB)
    first.free()
    second = pool.allocate_many(1, MIB)
    first.free()
    assert pool.statistics().used_bytes == MIB
    second.free()


def test_allocate_many_is_all_or_nothing(pool: MemoryPool) -> None:
    pool.allocate_many(10, 64 * KIB)
    before = pool.statistics()
    with pytest.raises(OutOfMemory):
        pool.allocate_many(7, 64 * KIB)
    assert pool.statistics() == before
    pool.allocate_many(6, 64 * KIB)
    assert pool.statistics().free_bytes == 0


def test_out_of_memory_says_every_number(pool: MemoryPool) -> None:
    parts = [pool.allocate_many(1, 256 * KIB) for _ in range(4)]
    parts[0].free()
    parts[2].free()
    with pytest.raises(OutOfMemory) as caught:
        pool.allocate_many(2, 300_000)
    error = caught.value
    assert str(error) == (
        "pool device cannot hold 2 x 300000 bytes: requested 655360 bytes in whole pages of 65536, free 524288, "
        "largest hole 262144, capacity 1048576; free caches or enlarge the pool"
    )
    assert (error.pool, error.requested, error.free, error.largest_hole) == ("device", 655_360, 524_288, 262_144)
    assert error.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY
    assert error.retryable


@pytest.mark.parametrize(("count", "nbytes"), [(0, 1), (-1, 1), (1, 0), (1, -5)])
def test_an_empty_request_is_refused(pool: MemoryPool, count: int, nbytes: int) -> None:
    with pytest.raises(ParamError, match=f"count {count} and nbytes {nbytes}"):
        pool.allocate_many(count, nbytes)


def test_close_ends_allocation_and_tolerates_live_ones() -> None:
    pool = create_pool("device", HostDevice(), MIB, 16, peers_may_write=False, prefault=False)
    allocation = pool.allocate_many(2, 1)
    pool.close()
    pool.close()
    assert pool.closed
    assert pool.segment.closed
    with pytest.raises(StateError, match="pool device is closed"):
        pool.allocate_many(1, 1)
    allocation.free()
    assert repr(pool) == "<MemoryPool device 1.0 MiB: 0 live, 0.0 MiB used, largest hole 1.0 MiB, closed>"


def test_repr_shows_the_whole_state() -> None:
    pool = create_pool("device", HostDevice(), 64 * MIB, 16, peers_may_write=False, prefault=False)
    parts = [pool.allocate_many(1, nbytes) for nbytes in (8 * MIB, 11 * MIB + MIB // 2, 4 * MIB, MIB // 2)]
    parts[1].free()
    assert repr(pool) == "<MemoryPool device 64.0 MiB: 3 live, 12.5 MiB used, largest hole 40.0 MiB>"
    pool.close()


def test_the_integrity_check_covers_allocator_and_peak(pool: MemoryPool) -> None:
    pool.allocate_many(1, 1)
    pool._peak_used = 0
    with pytest.raises(AssertionError, match="peak 0 is below"):
        pool.check_integrity()
    pool._peak_used = MIB
    pool._allocator.used_bytes += 1
    with pytest.raises(AssertionError, match="is not the sum"):
        pool.check_integrity()
    pool._allocator.used_bytes -= 1


def test_the_allocator_is_only_ever_used_under_the_lock(pool: MemoryPool) -> None:
    """Deterministic where a race would need luck: every use of the allocator looks whether the lock is held."""
    allocator, uses = pool._allocator, []

    class Watched:
        def __getattr__(self, name: str) -> object:
            uses.append((name, pool._lock.locked()))
            return getattr(allocator, name)

    setattr(pool, "_allocator", Watched())  # noqa: B010 - mypy knows the attribute's type
    pool.allocate_many(2, 1).free()
    pool.statistics()
    pool.check_integrity()
    assert {"allocate", "free", "used_bytes", "check_integrity"} <= {name for name, _ in uses}
    assert [name for name, locked in uses if not locked] == []


def test_many_threads_never_share_a_byte(pool: MemoryPool) -> None:
    failures: list[str] = []

    def work(mark: int) -> None:
        choose = random.Random(mark)
        for _ in range(150):
            try:
                allocation = pool.allocate_many(choose.randint(1, 3), choose.randint(1, 100_000))
            except OutOfMemory:
                continue
            views = [pool.segment.view(offset, allocation.nbytes) for offset in allocation.offsets]
            for view in views:
                view[:] = mark
            if not all((view == mark).all() for view in views):
                failures.append(f"thread {mark} lost its bytes in {allocation}")
            allocation.free()

    threads = [threading.Thread(target=work, args=(mark,)) for mark in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.statistics().used_bytes == 0


class TestCreatePool:
    def test_a_page_larger_than_the_pool_is_refused(self) -> None:
        with pytest.raises(ParamError, match="memory_size is 65535 bytes, must hold a page of 65536"):
            create_pool("host", HostDevice(), 65_535, 16, peers_may_write=False, prefault=False)

    @pytest.mark.parametrize("page_shift", [-1, 63])
    def test_a_page_shift_out_of_range_is_refused(self, page_shift: int) -> None:
        with pytest.raises(ParamError, match=f"page_shift is {page_shift}"):
            create_pool("host", HostDevice(), MIB, page_shift, peers_may_write=False, prefault=False)

    def test_r11_larger_than_this_machine_is_out_of_memory_naming_both_figures(self) -> None:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        with pytest.raises(
            OutOfMemory, match=rf"pool device: memory_size is {1 << 50} bytes, larger than the \d+ bytes"
        ) as e:
            create_pool("device", HostDevice(), 1 << 50, 16, peers_may_write=False, prefault=False)
        assert e.value.requested == 1 << 50
        assert 0 < e.value.largest_hole <= physical
        assert e.value.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY

    def test_r11_larger_than_the_cgroup_is_out_of_memory_naming_both_figures(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        device, limit = StagedDevice(), (MIB, "cgroup limit /sys/fs/cgroup/job/memory.max")
        monkeypatch.setattr("llm_datadist._memory.pool.host_memory_limit", lambda: limit)
        with pytest.raises(OutOfMemory) as caught:
            create_pool("host", device, MIB + 1, 16, peers_may_write=False, prefault=False)
        assert str(caught.value) == (
            "pool host: memory_size is 1048577 bytes, larger than the 1048576 bytes of "
            "cgroup limit /sys/fs/cgroup/job/memory.max"
        )
        assert device.allocated_bytes == 0
        create_pool("host", device, MIB, 16, peers_may_write=False, prefault=False).close()

    def test_r11_the_pages_own_example_touches_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = _resident_bytes()
        monkeypatch.setattr("llm_datadist._memory.pool.host_memory_limit", lambda: (24 << 30, "host memory"))
        pool = create_pool("device", HostDevice(), PAGE_EXAMPLE, 16, peers_may_write=False, prefault=False)
        last = pool.allocate_many(2, PAGE_EXAMPLE // 2 - 65_536)
        pool.segment.view(last.offsets[1] + last.nbytes - 1)[0] = 1
        assert isinstance(pool.segment, SharedSegment)
        assert 0 < os.fstat(pool.segment.fd).st_blocks * 512 <= 2 * MIB
        # Loose: the kernel keeps the total per processor and adds it up now and then.
        assert _resident_bytes() - before < 256 * MIB
        last.free()
        pool.check_integrity()
        pool.close()

    def test_a_device_that_refuses_leaves_nothing_behind(self) -> None:
        device = StagedDevice(refuse_after_bytes=MIB)
        with pytest.raises(OutOfMemory, match="device staged refuses"):
            create_pool("device", device, 2 * MIB, 16, peers_may_write=False, prefault=False)
        assert device.allocated_bytes == 0

    def test_the_rest_beyond_whole_pages_is_not_used(self) -> None:
        pool = MemoryPool("host", SharedSegment.create("host", MIB + 1000, peers_may_write=True), 12)
        assert pool.statistics().capacity_bytes == MIB
        pool.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
