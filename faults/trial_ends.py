"""What the two ends of a trial do (`faults/trials.py`): contents that say whose they are, the owner's ways to
take memory back and use it again, and what the other end finds afterwards.

Every 64-bit word of a cache says whose it is: a version, the tensor, its place. So each byte that moved, and each that
should not have, is known by looking at it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from faults.harness import Outcome, differing, numbered, outcome_of, words_of
from llm_datadist import BlocksCacheKey, Cache, CacheDesc, CacheKey, DataType
from llm_datadist.errors import DeadlineExceeded, OutOfMemory
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from faults.harness import Words
    from tests.support.world import World

TENSORS: Final = 4
BLOCK: Final = 64 << 10
KEY: Final = BlocksCacheKey(1, 0)
ROW: Final = CacheKey(1, 7)
#: Versions of one trial, by what their words are.
VERSIONS: Final = 4
SOURCE, REUSED, UNTOUCHED, WRITTEN = range(VERSIONS)
ANYTHING: Final = -1
_VERSION_BIT, _TENSOR_BIT = 40, 32


@dataclass(frozen=True)
class Shape:
    """How much moves: ``moved`` blocks of each tensor, between one block before and one behind that stay."""

    mib: int

    @property
    def moved(self) -> int:
        return (self.mib << 20) // (TENSORS * BLOCK)

    @property
    def blocks(self) -> list[int]:
        return list(range(1, 1 + self.moved))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return TENSORS * (self.moved + 2) * BLOCK

    @property
    def desc(self) -> CacheDesc:
        return CacheDesc(TENSORS, [self.moved + 2, BLOCK], DataType.DT_UINT8)


@dataclass(frozen=True)
class Taken:
    """What came of the owner's taking its memory back while the other end was stopped.

    Attributes:
        reused: It has the very memory again, and has filled it.
        refused: The library did not let it: the class of the error, or "" where it got other memory.
        named: That error named the process that stands in the way.
        quarantined: Bytes that were kept from it.
        incomplete: When it had taken its memory back, not everything had been written there.
    """

    reused: bool
    refused: str = ""
    named: bool = False
    quarantined: int = 0
    incomplete: bool = True


@dataclass(frozen=True)
class Ended:
    """What the call at the other end came to, and how many bytes there are not what they should be, by that."""

    outcome: Outcome
    wrong: int = 0


# --- contents ---------------------------------------------------------------------------------------------------------


def word(number: int, kind: int, tensor: int, index: int = 0) -> int:
    """Return the word at place ``index`` of a tensor's content."""
    return (number * VERSIONS + kind) << _VERSION_BIT | tensor << _TENSOR_BIT | index


def _fill(tensors: list[Words], number: int, kind: int) -> None:
    for tensor, words in enumerate(tensors):
        words[:] = numbered(word(number, kind, tensor), words.size)


def _wrong(tensors: list[Words], number: int, kind: int, within: int | None = None) -> int:
    """Return how many bytes are not of a kind; those of the addressed blocks are to be of the kind ``within``.

    ``within``: ANYTHING where they may hold what they like.
    """
    inside = slice(BLOCK // 8, -BLOCK // 8)
    expected = [numbered(word(number, kind, tensor), words.size) for tensor, words in enumerate(tensors)]
    if within is not None:
        for tensor, words in enumerate(expected):
            other = tensors[tensor] if within == ANYTHING else numbered(word(number, within, tensor), words.size)
            words[inside] = other[inside]
    return differing(tensors, expected)


# --- the other end ----------------------------------------------------------------------------------------------------


def give_way(world: World) -> None:
    """Take a processor only where nobody else wants it: whoever is to stop us sees us begin before we have ended."""
    os.nice(10)


def poison(world: World, shape: Shape, number: int, kind: int) -> list[int]:
    """Fill the cache of this end; return the addresses of its tensors."""
    if "mine" not in world.caches:
        world.caches["mine"] = world.cm.allocate_blocks_cache(shape.desc)
    _fill(words_of(world.caches["mine"]), number, kind)
    return list(world.caches["mine"].tensor_addrs)


def pull(world: World, shape: Shape, number: int, way: str) -> Ended:
    """Pull the blocks of the owner; judge every byte that is here afterwards."""
    mine, blocks = world.caches["mine"], shape.blocks
    if way == "remove":
        outcome = outcome_of(world.cm.pull_blocks, ROW, mine, [], blocks)
    else:
        outcome = outcome_of(world.cm.pull_blocks, KEY, mine, blocks, blocks)
    return Ended(outcome, _wrong(words_of(mine), number, UNTOUCHED, SOURCE if outcome.good else ANYTHING))


def push(world: World, shape: Shape, number: int) -> Ended:
    """Push the blocks of this end to the owner, who judges."""
    return Ended(outcome_of(world.cm.push_blocks, KEY, world.caches["mine"], shape.blocks, shape.blocks))


# --- the owner --------------------------------------------------------------------------------------------------------

READER_WAYS: Final = ("deallocate", "unregister", "rebind", "remove", "keep")
WRITER_WAYS: Final = ("deallocate", "full", "unregister", "rebind")


def arena(world: World, shape: Shape, inside: bool) -> None:
    """Make the memory of the user that trials register: of this process's own, or inside the pool."""
    for name in ("arena", "second arena"):
        if inside:
            world.caches[name] = world.cm.allocate_blocks_cache(shape.desc)
            world.memory[name] = words_of(world.caches[name])
        else:
            world.memory[name] = [np.zeros((shape.moved + 2) * BLOCK // 8, np.uint64) for _ in range(TENSORS)]
    world.memory["used"] = _used(world)


def _register(world: World, shape: Shape, name: str) -> Cache:
    addresses = [words.ctypes.data for words in world.memory[name]]
    return world.cm.register_blocks_cache(shape.desc, addresses, KEY)


def offer(world: World, shape: Shape, number: int, way: str, kind: int) -> list[int]:
    """Make the cache of a trial, filled; return the addresses of its tensors' first addressed bytes."""
    edge = BLOCK
    if way == "remove":
        # One row with a key: the addressed bytes are all of it.
        desc = CacheDesc(TENSORS, [1, shape.moved * BLOCK], DataType.DT_UINT8)
        theirs, edge = world.cm.allocate_cache(desc, [ROW]), 0
    elif way in ("unregister", "rebind"):
        theirs = _register(world, shape, "arena")
    else:
        theirs = world.cm.allocate_blocks_cache(shape.desc, KEY)
    world.caches["theirs"] = theirs
    _fill(words_of(theirs), number, kind)
    if way == "remove":
        # What arrives lies one block further in at the other end, and is counted from there.
        for words in words_of(theirs):
            np.add(words, np.uint64(BLOCK // 8), out=words)
    return [address + edge for address in theirs.tensor_addrs]


def begin_write(world: World, shape: Shape, number: int, way: str) -> list[int]:
    """:func:`offer` for a writer; "full" takes all that is left of the pool as well."""
    addresses = offer(world, shape, number, way, UNTOUCHED)
    if way == "full":
        (pool,) = world.dd.statistics().pools
        pages = int(pool.free_bytes) // BLOCK
        world.caches["rest"] = world.cm.allocate_blocks_cache(CacheDesc(1, [pages, BLOCK], DataType.DT_UINT8))
    return addresses


def take_back(world: World, shape: Shape, number: int, way: str, pid: int, reading: bool) -> Taken:
    """Take the memory back and use it again, as far as the library lets us, while the other end is stopped."""
    if way == "keep":
        return Taken(reused=False)
    words = words_of(world.caches["theirs"])
    take = {"rebind": _rebind, "unregister": _unregister, "remove": _remove}.get(way, _deallocate)
    return take(world, shape, number, _Stopped(pid, reading, words))


@dataclass(frozen=True)
class _Stopped:
    """Who is stopped, and the memory that it is at."""

    pid: int
    reading: bool
    words: list[Words]

    def in_the_way(self, error: Exception) -> bool:
        return f"pid {self.pid} " in str(error)

    def incomplete(self, number: int) -> bool:
        """Return True when what it writes is not all there: by the last words of its blocks."""
        if self.reading:
            return True
        version = word(number, WRITTEN, 0) >> _VERSION_BIT
        step = BLOCK // 8
        return any((words[2 * step - 1 : -step : step] >> _VERSION_BIT != version).any() for words in self.words)


def _rebind(world: World, shape: Shape, number: int, stopped: _Stopped) -> Taken:
    """Bind the key to other memory, where a writer who was promised the old one must not write.

    The old memory is registered still, without a key: a reader's is put to another use by its user, a writer's cannot.
    """
    world.caches["rebound"] = _register(world, shape, "second arena")
    incomplete = stopped.incomplete(number)
    _fill(world.memory["second arena"], number, REUSED)
    if stopped.reading:
        _fill(world.memory["arena"], number, REUSED)
    return Taken(reused=stopped.reading, incomplete=incomplete)


def _unregister(world: World, shape: Shape, number: int, stopped: _Stopped) -> Taken:
    """Unregister; only where that is done is the memory the user's again."""
    try:
        world.cm.unregister_cache(world.caches["theirs"].cache_id)
    except DeadlineExceeded as error:
        return Taken(False, "DeadlineExceeded", stopped.in_the_way(error), incomplete=stopped.incomplete(number))
    del world.caches["theirs"]
    incomplete = stopped.incomplete(number)
    _fill(world.memory["arena"], number, REUSED)
    return Taken(reused=True, incomplete=incomplete)


def _remove(world: World, shape: Shape, number: int, stopped: _Stopped) -> Taken:
    """Give a cache with a key back: its reader's pin keeps the memory, so that we get another."""
    theirs = world.caches["theirs"]
    before = list(theirs.tensor_addrs)
    world.cm.remove_cache_key(ROW)
    world.cm.deallocate_cache(theirs)
    world.caches["again"] = again = world.cm.allocate_cache(theirs.cache_desc)
    _fill(words_of(again), number, REUSED)
    return Taken(reused=again.tensor_addrs == before)


def _deallocate(world: World, shape: Shape, number: int, stopped: _Stopped) -> Taken:
    theirs = world.caches["theirs"]
    before = list(theirs.tensor_addrs)
    world.cm.deallocate_blocks_cache(theirs)
    incomplete = stopped.incomplete(number)
    kept = world.dd.statistics().quarantined_bytes
    try:
        world.caches["again"] = again = world.cm.allocate_blocks_cache(shape.desc)
    except OutOfMemory as error:
        return Taken(False, "OutOfMemory", stopped.in_the_way(error), kept, incomplete)
    _fill(words_of(again), number, REUSED)
    return Taken(again.tensor_addrs == before, quarantined=kept, incomplete=incomplete)


def use_again(world: World, shape: Shape, number: int, way: str) -> float:
    """The other end has ended, or its process has: what was kept from us must come back, and is used.

    Returns:
        Seconds that took.
    """
    since = time.monotonic()
    wait_until(lambda: world.dd.statistics().quarantined_bytes == 0)
    if way == "full" and "again" not in world.caches:
        world.caches["again"] = world.cm.allocate_blocks_cache(shape.desc)
        _fill(words_of(world.caches["again"]), number, REUSED)
    if way == "unregister" and "theirs" in world.caches:
        world.cm.unregister_cache(world.caches.pop("theirs").cache_id)
        _fill(world.memory["arena"], number, REUSED)
    return time.monotonic() - since


def look_back(world: World, number: int, way: str, pushed: bool) -> int:
    """Return how many bytes of the memory in its new use are not what the owner put there; then give all back.

    ``pushed``: A push by the key has succeeded, so that the cache that has the key now may show all of it, or nothing.
    """
    strange = 0
    if "again" in world.caches:
        strange += _wrong(words_of(world.caches["again"]), number, REUSED)
    if way == "unregister":
        strange += _wrong(world.memory["arena"], number, REUSED)
    if way == "rebind":
        arena = world.memory["second arena"]
        untouched = _wrong(arena, number, REUSED)
        strange += min(untouched, _wrong(arena, number, REUSED, WRITTEN)) if pushed else untouched
    _give_back(world)
    wait_until(lambda: world.dd.statistics().pins == 0 and _used(world) == world.memory["used"])
    world.dd.check_integrity()
    return strange


def _give_back(world: World) -> None:
    for name in ("again", "rest", "theirs", "rebound"):
        cache = world.caches.pop(name, None)
        if cache is None:
            continue
        world.cm.remove_cache_key(ROW)
        if cache.is_blocks_cache:
            world.cm.deallocate_blocks_cache(cache)
        else:
            world.cm.deallocate_cache(cache)
        world.cm.unregister_cache(cache.cache_id)


def _used(world: World) -> int:
    return sum(pool.used_bytes for pool in world.dd.statistics().pools)
