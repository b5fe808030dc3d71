"""Caches of the workers, the bytes they must hold, and the file in which owners say what there is to pull and push.

Every 64-bit word of a cache names its owner, its cache and its place there. So whatever is found somewhere, late,
early, shifted, from another cache or half overwritten, is seen, and can be named.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_datadist import BlocksCacheKey, Cache, CacheDesc, DataType, Placement
from llm_datadist.cache_manager import CacheManager
from llm_datadist.errors import OutOfMemory
from tests.support import fakecuda
from tests.support.world import byte_views

if TYPE_CHECKING:
    from faults.campaign.journal import Journal, Scene

Words = NDArray[np.uint64]
WORD_BYTES: Final = 8
#: Generations and incarnations wrap there.
GENERATIONS: Final = 1 << 20
INCARNATIONS: Final = 1 << 6
_PLACE_BITS: Final = 28
_PLACES: Final = 1 << 12
SLOTS: Final = 24
WORKERS: Final = 8
REMEMBERED: Final = 32
_NUMBERS: Final = ("turn", "kind", "incarnation", "generation", "tensors", "rows", "words", "length")
#: The last two: when the owner began to take a generation back, and when nobody could find it any more: monotonic ns,
#: or 0.
_RECORD: Final = np.dtype(
    [(name, "u8") for name in _NUMBERS]
    + [("cache_id", "i8"), ("extra", "u1", (256,)), ("ending", "u8", (REMEMBERED,)), ("ended", "u8", (REMEMBERED,))]
)


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
            self._own = [user_memory(8 * shape.rows * shape.words) for _ in range(shape.tensors)]
            self.arrays = [array.view(np.uint64).reshape(shape.rows, shape.words) for _, _, array in self._own]
            self.addrs = [address for address, _, _ in self._own]
            return
        under = journal.call("allocate", budget, cm.allocate_blocks_cache, shape.desc())
        if isinstance(under, Exception):
            raise under
        self._under = under
        self.arrays = words_of(under)
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


def words_of(cache: Cache) -> list[NDArray[np.uint64]]:
    """Return the words of each tensor, wherever they lie."""
    rows = cache.cache_desc.shape[0]
    return [each.view(np.uint64).reshape(rows, -1) for each in byte_views(cache)]


def user_memory(nbytes: int) -> tuple[int, object, NDArray[np.uint8]]:
    """Return memory of the process's own: address, what keeps it, and its bytes."""
    if (fake := fakecuda.loaded()) is not None:
        try:
            memory = fakecuda.UserMemory(nbytes)
        except MemoryError as error:
            raise OutOfMemory(str(error), pool="none", requested=nbytes, free=0, largest_hole=0) from error
        return memory.address, memory, fake.view(memory.address, nbytes)
    array = np.zeros(nbytes, np.uint8)
    return array.ctypes.data, None, array


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

    def __init__(
        self,
        scene: Scene,
        shape: Shape,
        stamp: Stamp,
        kind: str = "allocated",
        *,
        long: bool = False,
        placement: Placement = Placement.DEVICE,
    ) -> None:
        cm = scene.cm
        self.shape, self._stamp, self._long, self._fillings = shape, stamp, long, 0
        self._journal, self._cm, self._budget = scene.journal, cm, scene.budget
        self._memory: Memory | None = None
        if kind == "allocated":
            allocate = cm.allocate_cache if long else cm.allocate_blocks_cache
            made = self._journal.call("allocate", self._budget, allocate, shape.desc(placement))
        else:
            # Rows are as long as they are: four blocks of the shape that memory has.
            self._memory = Memory(self._journal, cm, shape, self._budget, private=kind == "private")
            made = self._memory.register(self._budget, rows=shape if long else None)
        if isinstance(made, Exception):
            raise made
        self.cache: Cache = made
        self.views: list[NDArray[np.uint64]] = words_of(made)
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
        if new is None:  # as a caller may do at once: bytes that come late are seen then
            self._fillings += 1
            stamp = replace(self._stamp, slot=self._stamp.slot ^ 4, generation=self._fillings)
            self.expected[index] = fresh = pattern(stamp, tensors, rows, self.shape.words)
            for tensor, words in zip(tensors, fresh, strict=True):
                self.views[tensor][list(rows)] = words
        return right

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


class Kind(IntEnum):
    NOTHING = 0
    BLOCKS = 1  # by a key of its own, or by id
    REBOUND = 2  # by a key that is bound again and again
    KEYED = 3  # continuous, a key for each row, consumed by pulls
    ROWS = 4  # continuous, by id
    INBOX = 5  # blocks that peers push into
    INROWS = 6  # rows that peers push into
    PROOF = 7  # blocks, after the faults
    GRANTED = 8  # blocks under a grant, used again and again
    PREFIX = 9  # continuous, a prefix key for each row, consumed by nobody
    MAILBOX = 10  # blocks that peers write by their addresses, there for a whole epoch


@dataclass(frozen=True)
class Found:
    """A cache of another worker as its owner published it."""

    worker: int
    slot: int
    kind: Kind
    incarnation: int
    generation: int
    cache_id: int
    shape: Shape
    extra: bytes = b""  # a grant, or addresses

    @property
    def cluster_id(self) -> int:
        return self.worker + 1

    @property
    def stamp(self) -> Stamp:
        return self.at(self.generation)

    def at(self, generation: int) -> Stamp:
        return Stamp(self.worker, self.incarnation, self.slot, generation)


class Directory:
    """A table of slots, one row of it for each worker. One writer for each slot; any process reads."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        mode: Any = "w+" if create else "r+"
        self._table = np.memmap(path, _RECORD, mode, shape=(WORKERS, SLOTS))
        self._lives = np.memmap(path.with_suffix(".lives"), np.uint64, mode, shape=(WORKERS,))
        #: Until when everybody rests, and whether without links.
        self._rest = np.memmap(path.with_suffix(".rest"), np.uint64, mode, shape=(2,))

    def life(self, worker: int) -> int:
        return int(self._lives[worker])

    def reborn(self, worker: int) -> None:
        """A worker has been killed; nothing that it had is there any more."""
        self._lives[worker] += 1
        self._table[worker] = np.zeros((), _RECORD)

    def rest(self, seconds: float, *, apart: bool) -> None:
        """Let all workers rest for so long, without links or as they are."""
        self._rest[:] = time.monotonic_ns() + int(seconds * 1e9), apart

    def resting(self) -> bool:
        return int(self._rest[0]) > time.monotonic_ns()

    def apart(self) -> bool:
        return bool(self._rest[1]) and self.resting()

    def clear(self) -> None:
        self._table[:] = np.zeros((), _RECORD)
        self._rest[:] = 0

    # The owner

    def publish(self, found: Found) -> None:
        record = self._table[found.worker, found.slot]
        record["turn"] += 1
        # First: who sees the new generation must not take the end of one long ago for its own.
        self.unmark(found.worker, found.slot, found.generation)
        for name in ("kind", "incarnation", "generation", "cache_id"):
            record[name] = getattr(found, name)
        for name in ("tensors", "rows", "words"):
            record[name] = getattr(found.shape, name)
        record["length"] = len(found.extra)
        record["extra"][: len(found.extra)] = np.frombuffer(found.extra, np.uint8)
        record["turn"] += 1

    def withdraw(self, worker: int, slot: int) -> None:
        record = self._table[worker, slot]
        record["turn"] += 1
        record["kind"] = Kind.NOTHING
        record["turn"] += 1

    def mark(self, worker: int, slot: int, generation: int, what: str) -> None:
        """Say that the end of a generation begins (``ending``), or is over (``ended``)."""
        self._table[worker, slot][what][generation % REMEMBERED] = time.monotonic_ns()

    def unmark(self, worker: int, slot: int, generation: int) -> None:
        """The end of a generation did not take place."""
        for what in ("ending", "ended"):
            self._table[worker, slot][what][generation % REMEMBERED] = 0

    # Everybody

    def look(self, worker: int, slot: int) -> Found | None:
        record = self._table[worker, slot]
        before = int(record["turn"])
        copy = record.copy()
        if before % 2 or int(record["turn"]) != before or not copy["kind"]:
            return None
        shape = Shape(int(copy["tensors"]), int(copy["rows"]), int(copy["words"]))
        incarnation, generation, cache_id = (int(copy[name]) for name in ("incarnation", "generation", "cache_id"))
        extra = copy["extra"][: int(copy["length"])].tobytes()
        return Found(worker, slot, Kind(int(copy["kind"])), incarnation, generation, cache_id, shape, extra)

    def pick(self, rng: Random, workers: list[int], *kinds: Kind) -> Found | None:
        found = [self.look(worker, slot) for worker in workers for slot in range(SLOTS)]
        fit = [each for each in found if each is not None and each.kind in kinds]
        return rng.choice(fit) if fit else None

    def generations(self) -> frozenset[tuple[int, int, int, int]]:
        """Return (worker, life, slot, generation) of all that is there now."""
        return frozenset(
            (worker, int(record["incarnation"]), slot, int(record["generation"]))
            for worker in range(WORKERS)
            for slot, record in enumerate(self._table[worker].copy())
        )

    def moment(self, found: Found, generation: int, what: str) -> int:
        """Return when the end of a generation began or was over; 0: not yet, or too long ago to be known."""
        distance = (self.newest(found) - generation) % GENERATIONS
        if self.life(found.worker) != found.incarnation or not distance < REMEMBERED - 2:
            return 0
        return int(self._table[found.worker, found.slot][what][generation % REMEMBERED])

    def newest(self, found: Found) -> int:
        return int(self._table[found.worker, found.slot]["generation"])

    def close(self) -> None:
        each: Any
        for each in (self._table, self._lives, self._rest):
            each.base.close()
