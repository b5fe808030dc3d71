"""Bytes that say where they come from: every 64-bit word of a cache names its owner, its cache and its place there.

So whatever is found somewhere, late, early, shifted, from another cache or half overwritten, is seen, and can be named.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist import CacheDesc, DataType, Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

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
    """Return all that a cache holds."""
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
