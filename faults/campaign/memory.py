"""Caches of one worker and the bytes they must hold: from a pool, registered inside one, or over private memory.

Every 64-bit word of a cache names its owner, its cache and its place there. So whatever is found somewhere, late,
early, shifted, from another cache or half overwritten, is seen, and can be named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_datadist import BlocksCacheKey, Cache, CacheDesc, DataType, Placement
from llm_datadist.cache_manager import CacheManager
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from faults.campaign.journal import Journal

Words = NDArray[np.uint64]

WORD_BYTES: Final = 8
#: Generations and incarnations wrap there.
GENERATIONS: Final = 1 << 20
INCARNATIONS: Final = 1 << 6
_PLACE_BITS: Final = 28
_PLACES: Final = 1 << 12


@dataclass(frozen=True)
class Shape:
    """``tensors`` tensors of ``rows`` rows or blocks of ``words`` 64-bit words."""

    tensors: int
    rows: int
    words: int

    def desc(self, placement: Placement = Placement.DEVICE) -> CacheDesc:
        return CacheDesc(self.tensors, [self.rows, self.words], DataType.DT_UINT64, placement)

    @property
    def nbytes(self) -> int:
        return self.tensors * self.rows * self.words * WORD_BYTES

    @property
    def long(self) -> Shape:
        """The same memory as a continuous cache: four blocks make a row."""
        return Shape(self.tensors, self.rows // 4, self.words * 4)


@dataclass(frozen=True)
class Stamp:
    """Which cache: the fourth field counts what was made at the same place after one another."""

    owner: int
    incarnation: int
    slot: int
    generation: int

    @property
    def base(self) -> int:
        inner = (self.slot << 20) | (self.generation % GENERATIONS)
        return ((self.owner << 32) | ((self.incarnation % INCARNATIONS) << 26) | inner) << _PLACE_BITS


@lru_cache(maxsize=8)
def _ramp(words: int) -> Words:
    return np.arange(words, dtype=np.uint64) & np.uint64(_PLACES - 1)


def pattern(stamp: Stamp, tensors: Sequence[int], rows: Sequence[int], words: int) -> Words:
    """Return what these rows of these tensors of a cache hold, shape (tensors, rows, words)."""
    columns = np.array(tensors, dtype=np.uint64)[:, None, None] << np.uint64(22)
    lines = np.array(rows, dtype=np.uint64)[None, :, None] << np.uint64(12)
    return np.uint64(stamp.base) | columns | lines | _ramp(words)[None, None, :]


def whole(stamp: Stamp, shape: Shape) -> Words:
    return pattern(stamp, range(shape.tensors), range(shape.rows), shape.words)


def stamp_of(word: int) -> Stamp:
    word = int(word) >> _PLACE_BITS
    return Stamp(word >> 32, (word >> 26) % INCARNATIONS, (word >> 20) % 64, word % GENERATIONS)


def tell(word: int) -> str:
    stamp, place = stamp_of(word), int(word) % (1 << _PLACE_BITS)
    return (
        f"{int(word):#018x} (worker {stamp.owner} life {stamp.incarnation} slot {stamp.slot} generation "
        f"{stamp.generation} tensor {place >> 22} row {(place >> 12) % 1024} word {place % _PLACES})"
    )


def difference(found: Words, wanted: Words) -> str:
    wrong = np.argwhere(found != wanted)
    places = {(int(t), int(r)) for t, r, _ in wrong}
    first, last = tuple(wrong[0]), tuple(wrong[-1])
    return (
        f"{len(wrong)} words in {len(places)} rows {sorted(places)[:4]}; first {tuple(map(int, first))}: found "
        f"{tell(found[first])}, wanted {tell(wanted[first])}; last {tuple(map(int, last))}: found {tell(found[last])}"
    )


class Memory:
    """Memory to register, reused again and again: a pool's or the process's own. One thread."""

    def __init__(self, journal: Journal, cm: CacheManager, shape: Shape, budget: float, *, private: bool) -> None:
        self.shape, self._journal, self._cm = shape, journal, cm
        self._under: Cache | None = None
        if private:
            self.arrays: list[NDArray[np.uint64]] = [
                np.zeros((shape.rows, shape.words), np.uint64) for _ in range(shape.tensors)
            ]
            self.addrs = [array.ctypes.data for array in self.arrays]
            return
        under = journal.call("allocate", budget, cm.allocate_blocks_cache, shape.desc())
        if isinstance(under, Exception):
            raise under
        self._under = under
        self.arrays = tensor_views(under)
        self.addrs = list(under.tensor_addrs)

    def fill(self, stamp: Stamp) -> None:
        fill(self.arrays, stamp)

    def register(self, budget: float, *, key: BlocksCacheKey | None = None, rows: Shape | None = None) -> Any:
        if rows is not None:
            return self._journal.call("register", budget, self._cm.register_cache, rows.desc(), self.addrs)
        return self._journal.call(
            "register", budget, self._cm.register_blocks_cache, self.shape.desc(), self.addrs, key
        )

    def close(self) -> None:
        if self._under is not None:
            self._journal.call("deallocate", 0.0, self._cm.deallocate_blocks_cache, self._under)


def fill(views: Sequence[NDArray[np.uint64]], stamp: Stamp) -> None:
    for tensor, view in enumerate(views):
        rows, words = view.shape
        view[...] = pattern(stamp, (tensor,), range(rows), words)[0]


def same(journal: Journal, what: str, views: Sequence[NDArray[np.uint64]], stamp: Stamp, rows: Sequence[int]) -> bool:
    right = True
    for tensor, view in enumerate(views):
        wanted = pattern(stamp, (tensor,), rows, view.shape[1])
        found = view[list(rows)][None]
        if np.array_equal(found, wanted):
            continue
        right = False
        journal.violation("wrong bytes", f"{what}: tensor {tensor}: {difference(found, wanted)}")
    if right:
        journal.verified(len(views) * len(rows) * views[0].shape[1] * 8)
    return right


class Destination:
    """A cache that one thread pulls into, with every byte that it must hold. Blocks, or rows where ``long``."""

    def __init__(self, journal: Journal, cm: CacheManager, shape: Shape, stamp: Stamp, **settings: Any) -> None:
        self.shape = shape
        self._journal, self._cm = journal, cm
        self._stamp = stamp
        self._fillings = 0
        self._budget: float = settings["budget"]
        self._long: bool = settings.get("long", False)
        self._memory: Memory | None = None
        if settings["kind"] == "allocated":
            allocate = cm.allocate_cache if self._long else cm.allocate_blocks_cache
            placement = settings.get("placement", Placement.DEVICE)
            made = journal.call("allocate", self._budget, allocate, shape.desc(placement))
        else:
            # Rows are as long as they are: four blocks of the shape that memory has.
            self._memory = Memory(journal, cm, shape, self._budget, private=settings["kind"] == "private")
            made = self._memory.register(self._budget, rows=shape if self._long else None)
        if isinstance(made, Exception):
            raise made
        self.cache: Cache = made
        self.views: list[NDArray[np.uint64]] = tensor_views(made)
        self.fill(stamp)

    def fill(self, stamp: Stamp) -> None:
        fill(self.views, stamp)
        self.expected: Words = np.stack(self.views)

    def settle(self, what: str, tensors: Sequence[int], rows: Sequence[int], new: Words | None) -> bool:
        """Judge every byte after a call that addressed these rows: they hold ``new``, or anything if that is None."""
        index = np.ix_(list(tensors), list(rows))
        found = np.stack(self.views)
        self.expected[index] = found[index] if new is None else new
        right = bool(np.array_equal(found, self.expected))
        if not right:
            self._journal.violation("wrong bytes", f"{what}: {difference(found, self.expected)}")
            self.expected = found
        elif new is not None:
            self._journal.verified(found.nbytes)
        if new is None:
            self._write_anew(tensors, rows)
        return right

    def _write_anew(self, tensors: Sequence[int], rows: Sequence[int]) -> None:
        self._fillings += 1
        stamp = replace(self._stamp, slot=self._stamp.slot ^ 4, generation=self._fillings)
        fresh = pattern(stamp, tensors, rows, self.shape.words)
        self.expected[np.ix_(list(tensors), list(rows))] = fresh
        for tensor, words in zip(tensors, fresh, strict=True):
            self.views[tensor][list(rows)] = words

    def close(self) -> bool:
        if self._memory is None:
            give = self._cm.deallocate_cache if self._long else self._cm.deallocate_blocks_cache
            self._journal.call("deallocate", 0.0, give, self.cache)
            return True
        gone = self._journal.call("unregister", self._budget, self._cm.unregister_cache, self.cache.cache_id)
        if gone is None:
            self._memory.close()
        return gone is None


def close_all(destinations: Sequence[Destination]) -> bool:
    done = [each.close() for each in destinations]
    for each in destinations:
        each.views.clear()
    return all(done)
