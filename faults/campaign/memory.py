"""Caches of one worker and the bytes they must hold: from a pool, registered inside one, or over private memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from faults.campaign.contents import Shape, difference, pattern
from llm_datadist import BlocksCacheKey, Cache, CacheKey, Placement
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from faults.campaign.contents import Stamp, Words
    from faults.campaign.journal import Journal
    from llm_datadist.cache_manager import CacheManager


class Memory:
    """Memory to register, reused again and again: a pool's or the process's own. One thread."""

    def __init__(self, journal: Journal, cm: CacheManager, shape: Shape, budget: float, *, private: bool) -> None:
        self.shape = shape
        self._journal = journal
        self._cm = cm
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
        """Register all of it, as blocks, or as ``rows``; return the cache or the exception."""
        if rows is not None:
            return self._journal.call("register", budget, self._cm.register_cache, rows.desc(), self.addrs)
        return self._journal.call(
            "register", budget, self._cm.register_blocks_cache, self.shape.desc(), self.addrs, key
        )

    def close(self) -> None:
        """Give the pool its memory back; nothing of it may be registered any more."""
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


def keys_of(cluster_id: int, first: int, count: int) -> list[CacheKey]:
    return [CacheKey(cluster_id, first + row) for row in range(count)]


class Destination:
    """A cache that one thread pulls into, with every byte that it must hold. Blocks, or rows where ``long``.

    Attributes:
        expected: Shape (tensors, rows, words).
    """

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
        """Judge every byte after a call that addressed these rows: they hold ``new``, or anything if that is None.

        What may hold anything is written anew, as a caller may do at once: bytes that come late are seen then.
        """
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
        """Give the memory back; False: somebody is still at it."""
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
