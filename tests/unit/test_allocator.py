"""The allocator: by example, against a model, and with patterns written through its offsets into real bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from llm_datadist._memory.allocator import PageAllocator, format_mib

pytestmark = pytest.mark.covers("PageAllocator")

KIB = 1 << 10
PAGES = 32


def full_of_pages(pages: int) -> tuple[PageAllocator, list[int]]:
    """Return an allocator whose every page is a live range, and the offsets."""
    allocator = PageAllocator(pages * KIB, 10)
    offsets = [allocator.allocate(KIB) for _ in range(pages)]
    return allocator, [offset for offset in offsets if offset is not None]


def test_i6_sizes_are_rounded_up_to_pages_and_the_capacity_down() -> None:
    allocator = PageAllocator(10 * KIB + 1023, 10)
    assert (allocator.capacity, allocator.page_bytes) == (10 * KIB, KIB)
    assert allocator.allocate(1) == 0
    assert allocator.allocate(KIB + 1) == KIB
    assert (allocator.used_bytes, allocator.free_bytes, allocator.live) == (3 * KIB, 7 * KIB, 2)
    allocator.check_integrity()


def test_best_fit_takes_the_smallest_hole_that_is_large_enough() -> None:
    allocator, _ = full_of_pages(12)
    for page in (0, 1, 2, 4, 5, 7, 8, 9, 10):  # holes of 3, 2 and 4 pages at 0, 4 and 7
        allocator.free(page * KIB)
    assert allocator.allocate(2 * KIB) == 4 * KIB
    assert allocator.allocate(2 * KIB) == 0
    assert allocator.largest_hole == 4 * KIB
    allocator.check_integrity()


def test_the_lowest_of_equal_holes_is_taken() -> None:
    allocator, offsets = full_of_pages(8)
    for page in (6, 2, 4):
        allocator.free(offsets[page])
    assert [allocator.allocate(KIB) for _ in range(3)] == [2 * KIB, 4 * KIB, 6 * KIB]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_freed_ranges_merge_with_both_neighbours(order: tuple[int, ...]) -> None:
    allocator, offsets = full_of_pages(4)
    for page in order:
        allocator.free(offsets[page])
        allocator.check_integrity()
    assert allocator.largest_hole == 3 * KIB
    allocator.free(offsets[3])
    assert allocator.largest_hole == allocator.capacity


def test_largest_hole_is_what_the_next_allocation_can_have_at_most() -> None:
    allocator, offsets = full_of_pages(8)
    assert (allocator.largest_hole, allocator.free_bytes) == (0, 0)
    for page in (1, 3, 4, 6):
        allocator.free(offsets[page])
    assert (allocator.largest_hole, allocator.free_bytes) == (2 * KIB, 4 * KIB)
    assert allocator.allocate(2 * KIB + 1) is None
    assert allocator.allocate(2 * KIB) == 3 * KIB


def test_a_refused_allocation_changes_nothing() -> None:
    allocator = PageAllocator(4 * KIB, 10)
    before = repr(allocator)
    assert allocator.allocate(4 * KIB + 1) is None
    assert repr(allocator) == before
    allocator.check_integrity()


@pytest.mark.parametrize("offset", [KIB, 5 * KIB, 1, -KIB, 1 << 40])
def test_freeing_what_is_not_a_live_start_is_an_error_and_changes_nothing(offset: int) -> None:
    allocator = PageAllocator(8 * KIB, 10)
    allocator.allocate(2 * KIB)
    with pytest.raises(ValueError, match=f"offset {offset} is not allocated"):
        allocator.free(offset)
    assert allocator.used_bytes == 2 * KIB
    allocator.check_integrity()


def test_a_double_free_is_an_error() -> None:
    allocator, offsets = full_of_pages(3)
    allocator.free(offsets[1])
    with pytest.raises(ValueError, match="freed twice"):
        allocator.free(offsets[1])
    allocator.check_integrity()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_allocation_has_at_least_one_byte(nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"nbytes is {nbytes}"):
        PageAllocator(KIB, 10).allocate(nbytes)


@pytest.mark.parametrize(("capacity", "page_shift"), [(1023, 10), (0, 0), (-4096, 10), (4096, -1)])
def test_a_capacity_without_a_page_is_an_error(capacity: int, page_shift: int) -> None:
    with pytest.raises(ValueError, match=r"capacity|page_shift"):
        PageAllocator(capacity, page_shift)


def test_repr_shows_the_whole_state() -> None:
    allocator = PageAllocator(64 << 20, 16)
    allocator.allocate(12 << 20)
    assert repr(allocator) == (
        "<PageAllocator 64.0 MiB in pages of 65536 bytes: 1 live, 12.0 MiB used, largest hole 52.0 MiB>"
    )
    assert format_mib(12_582_912 + 524_288) == "12.5 MiB"


@pytest.mark.parametrize(
    "break_it",
    [
        lambda a: a._live.update({0: 2 * KIB}),  # overlaps the next one
        lambda a: a._live.pop(0),  # gap
        lambda a: a._hole_at.update({2 * KIB: 2 * KIB + 1}),
        lambda a: a._by_size.append((1, 1)),
        lambda a: a._hole_before.clear(),
        lambda a: setattr(a, "used_bytes", 0),
    ],
)
def test_the_integrity_check_sees_damage(break_it: object) -> None:
    allocator = PageAllocator(4 * KIB, 10)
    allocator.allocate(KIB)
    allocator.allocate(KIB)
    allocator.check_integrity()
    assert callable(break_it)
    break_it(allocator)
    with pytest.raises(AssertionError):
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
        for page, owner in enumerate([*self.pages, -1]):
            if owner is not None:
                if page > start:
                    holes[start] = page - start
                start = page + 1
        return holes

    @rule(target=taken, nbytes=st.integers(1, 9 * KIB))
    def allocate(self, nbytes: int) -> int:
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


@given(seed=st.integers(0, 2**32 - 1), page_shift=st.sampled_from([6, 10, 12]))
@settings(max_examples=25, deadline=None)
def test_ranges_never_share_a_byte(seed: int, page_shift: int) -> None:
    """Each live range is filled with its own pattern, which must be whole when the range is freed."""
    choose = random.Random(seed)
    memory = np.zeros(1 << 18, dtype=np.uint8)
    allocator = PageAllocator(memory.nbytes, page_shift)
    live: dict[int, tuple[int, int]] = {}  # offset -> (bytes asked for, pattern)
    for step in range(300):
        if live and choose.random() < 0.45:
            offset = choose.choice(list(live))
            nbytes, pattern = live.pop(offset)
            assert (memory[offset : offset + nbytes] == pattern).all()
            allocator.free(offset)
            continue
        nbytes = choose.randint(1, 1 << choose.randint(1, 16))
        found = allocator.allocate(nbytes)
        if found is not None:
            live[found] = nbytes, step % 251 + 1
            memory[found : found + nbytes] = step % 251 + 1
    allocator.check_integrity()
    for offset, (nbytes, pattern) in live.items():
        assert (memory[offset : offset + nbytes] == pattern).all()
        allocator.free(offset)
    assert allocator.largest_hole == allocator.capacity
