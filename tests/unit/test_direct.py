"""Memory straight from a device: counted, bounded, given back with its cache, kept under who still uses it
(interface R12)."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING

import pytest

from llm_datadist._memory import pool
from llm_datadist._memory.device import HostDevice
from llm_datadist._memory.pool import DirectMemory
from llm_datadist.errors import OutOfMemory, ParamError, StateError
from llm_datadist.testing import StagedDevice
from tests.support.world import residue, settled

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._memory.pool import Allocation

PAGE = 4096


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], DirectMemory]:
    """Return what makes memory of a host that has so many bytes."""

    def make(most: int) -> DirectMemory:
        monkeypatch.setattr(pool, "host_memory_limit", lambda: (most, "a test"))
        return DirectMemory("device", HostDevice())

    return make


def test_an_allocation_is_whole_pages_of_zeros_of_its_own_and_leaves_nothing(
    bounded: Callable[[int], DirectMemory],
) -> None:
    before = residue()
    memory = bounded(1 << 20)
    taken = memory.allocate_many(3, PAGE + 1)
    assert memory.statistics().used_bytes == 6 * PAGE
    assert memory.statistics().live_allocations == 3
    assert residue()["fds"] == before["fds"], "nobody is given the descriptor, so none is kept"
    view = taken.pool.segment.view()
    assert not view.any()
    assert [address - taken.addresses[0] for address in taken.addresses] == [0, 2 * PAGE, 4 * PAGE]
    memory.check_integrity()
    taken.free()
    taken.free()
    del view
    assert memory.statistics().used_bytes == 0
    assert memory.statistics().peak_used_bytes == 6 * PAGE
    memory.check_integrity()
    memory.close()
    assert settled(before) == before


def test_more_than_the_host_has_is_refused_with_every_figure(bounded: Callable[[int], DirectMemory]) -> None:
    memory = bounded(10 * PAGE)
    first = memory.allocate_many(2, 3 * PAGE)
    with pytest.raises(OutOfMemory) as caught:
        memory.allocate_many(5, PAGE)
    assert (caught.value.requested, caught.value.free, caught.value.quarantined) == (5 * PAGE, 4 * PAGE, 0)
    for part in (str(5 * PAGE), str(6 * PAGE), str(10 * PAGE), "a test"):
        assert part in str(caught.value)
    assert memory.statistics().used_bytes == 6 * PAGE
    first.detain()
    with pytest.raises(OutOfMemory) as waiting:
        memory.allocate_many(5, PAGE)
    assert waiting.value.quarantined == 6 * PAGE  # worth waiting for
    first.free()
    memory.allocate_many(5, PAGE).free()
    memory.close()


def test_what_the_device_refuses_is_not_counted() -> None:
    device = StagedDevice(refuse_after_bytes=PAGE)
    memory = DirectMemory("device", device)
    with pytest.raises(OutOfMemory, match="refuses"):
        memory.allocate_many(1, PAGE + 1)
    assert memory.statistics().used_bytes == 0
    memory.allocate_many(1, PAGE).free()
    assert device.allocated_bytes == 0
    memory.close()


@pytest.mark.parametrize(("count", "nbytes"), [(0, 1), (-1, 1), (1, 0), (1, -1)])
def test_nothing_is_no_allocation(count: int, nbytes: int, bounded: Callable[[int], DirectMemory]) -> None:
    memory = bounded(1 << 20)
    with pytest.raises(ParamError, match="must both be positive"):
        memory.allocate_many(count, nbytes)
    memory.close()


def test_random_allocations_never_overlap_and_all_come_back(bounded: Callable[[int], DirectMemory]) -> None:
    rng = random.Random(7)
    memory = bounded(1 << 22)
    live: list[tuple[Allocation, int]] = []
    for step in range(300):
        if live and rng.random() < 0.5:
            allocation, pattern = live.pop(rng.randrange(len(live)))
            view = allocation.pool.segment.view()
            assert (view == pattern).all()
            del view
            allocation.free()
        else:
            allocation = memory.allocate_many(rng.randint(1, 4), rng.randint(1, 3 * PAGE))
            allocation.pool.segment.view()[:] = step % 251
            live.append((allocation, step % 251))
        memory.check_integrity()
    for allocation, _ in live:
        allocation.free()
    assert (memory.statistics().used_bytes, memory.statistics().live_allocations) == (0, 0)
    memory.close()


def test_what_is_in_use_at_the_end_stays_mapped_and_is_told(
    caplog: pytest.LogCaptureFixture, bounded: Callable[[int], DirectMemory]
) -> None:
    memory = bounded(1 << 20)
    taken = memory.allocate_many(1, PAGE)
    address = taken.addresses[0]
    try:
        with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
            memory.close()
            memory.close()
        assert caplog.text.count("stay mapped") == 1
        taken.free()  # late, as the end of a quarantine is: nothing is unmapped
        (kept,) = pool._kept_mapped
        assert (kept.ctypes.data, kept.nbytes) == (address, PAGE)
        kept[:] = 1
        with pytest.raises(StateError, match="closed"):
            memory.allocate_many(1, PAGE)
    finally:
        pool._kept_mapped.clear()
