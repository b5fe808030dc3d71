"""Allocator of a pool's byte ranges. Arithmetic only, under the pool's lock: no bytes."""

from __future__ import annotations

from bisect import bisect_left, insort

from llm_datadist._checks import require_intact


class PageAllocator:
    """Best-fit allocator of page-aligned ranges of ``[0, capacity)``; freed ranges merge with free neighbours."""

    def __init__(self, capacity: int, page_shift: int) -> None:
        self.capacity = capacity >> page_shift << page_shift
        self.page_bytes = 1 << page_shift
        self.used_bytes = 0
        self._live: dict[int, int] = {}  # offset -> bytes
        self._by_size: list[tuple[int, int]] = []  # (bytes, offset), sorted
        self._hole_at: dict[int, int] = {}  # start -> bytes
        self._hole_before: dict[int, int] = {}  # end -> start
        self._add_hole(0, self.capacity)

    @property
    def free_bytes(self) -> int:
        return self.capacity - self.used_bytes

    @property
    def largest_hole(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def live(self) -> int:
        return len(self._live)

    def rounded(self, nbytes: int) -> int:
        """Return ``nbytes``, rounded up to whole pages."""
        return -(-nbytes // self.page_bytes) * self.page_bytes

    def allocate(self, nbytes: int) -> int | None:
        """Take whole pages from the smallest, then lowest, hole that fits; return the offset, or None if none fits."""
        need = self.rounded(nbytes)
        position = bisect_left(self._by_size, (need, 0))
        if position == len(self._by_size):
            return None
        size, offset = self._by_size[position]
        self._remove_hole(offset, size)
        if size > need:
            self._add_hole(offset + need, size - need)
        self._live[offset] = need
        self.used_bytes += need
        return offset

    def free(self, offset: int) -> None:
        """Free the live range at ``offset``; raise ValueError if there is none."""
        if (size := self._live.pop(offset, None)) is None:
            raise ValueError(f"offset {offset} is not allocated: unknown or freed twice")
        self.used_bytes -= size
        start, end = offset, offset + size
        if (left := self._hole_before.get(start)) is not None:
            self._remove_hole(left, start - left)
            start = left
        if (right := self._hole_at.get(end)) is not None:
            self._remove_hole(end, right)
            end += right
        self._add_hole(start, end - start)

    def check_integrity(self) -> None:
        ranges = sorted(
            [(o, n, "live") for o, n in self._live.items()] + [(o, n, "hole") for o, n in self._hole_at.items()]
        )
        at, before = 0, ""
        for offset, size, kind in ranges:
            require_intact(offset == at, f"{kind} range at {offset} should start at {at}: gap or overlap")
            require_intact(size > 0 and size % self.page_bytes == 0, f"{kind} range at {offset} has {size} bytes")
            require_intact((before, kind) != ("hole", "hole"), f"holes meet unmerged at {offset}")
            at, before = offset + size, kind
        require_intact(at == self.capacity, f"ranges end at {at}, the capacity is {self.capacity}")
        holes = sorted((size, offset) for offset, size in self._hole_at.items())
        require_intact(holes == self._by_size, f"holes by size {self._by_size} are not the holes {holes}")
        ends = {offset + size: offset for offset, size in self._hole_at.items()}
        require_intact(ends == self._hole_before, f"hole ends {self._hole_before} are not {ends}")
        used = sum(self._live.values())
        require_intact(self.used_bytes == used, f"used {self.used_bytes} is not the sum of the live ranges")

    def _add_hole(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        self._hole_at[offset] = size
        self._hole_before[offset + size] = offset

    def _remove_hole(self, offset: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        del self._hole_at[offset]
        del self._hole_before[offset + size]
