"""The allocator: against a model; by example where the model does not reach."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from llm_datadist._memory.allocator import PageAllocator

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.covers("PageAllocator")

KIB, PAGES = 1 << 10, 32


def test_i6_sizes_are_rounded_up_to_pages_and_the_capacity_down() -> None:
    allocator = PageAllocator(10 * KIB + 1023, 10)
    assert (allocator.capacity, allocator.page_bytes) == (10 * KIB, KIB)
    assert [allocator.allocate(nbytes) for nbytes in (1, KIB + 1, KIB, 1)] == [0, KIB, 3 * KIB, 4 * KIB]
    assert PageAllocator(1, 0).allocate(1) == 0


def test_wrong_numbers_are_errors_and_change_nothing() -> None:
    for capacity, page_shift in ((1023, 10), (0, 0), (-4096, 10)):
        with pytest.raises(ValueError, match=f"capacity is {capacity} bytes: .* one page of {2**page_shift} bytes"):
            PageAllocator(capacity, page_shift)
    with pytest.raises(ValueError, match="page_shift is -1"):
        PageAllocator(4096, -1)
    allocator = PageAllocator(8 * KIB, 10)
    allocator.allocate(2 * KIB)
    before = (allocator.live, allocator.used_bytes, allocator.largest_hole)
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match=f"nbytes is {nbytes}"):
            allocator.allocate(nbytes)
    for offset in (KIB, 5 * KIB, 1, -KIB, 1 << 40):
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

    @rule(page=st.integers(0, PAGES - 1))
    def free_unknown(self, page: int) -> None:
        if page * KIB not in self.pages:
            with pytest.raises(ValueError, match="not allocated"):
                self.allocator.free(page * KIB)

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
