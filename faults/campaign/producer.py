"""The thread of a worker that makes caches, publishes them, and takes their memory back for others.

Every kind of memory that the interface protects is reused at once, under whoever still reads or writes it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from faults.campaign.journal import Scene
from faults.campaign.memory import GENERATIONS, Found, Kind, Memory, Shape, Stamp, fill, same, words_of
from faults.campaign.schedule import MOVERS
from llm_datadist import BlocksCacheKey, Cache, CacheKey
from llm_datadist._checks import INVALID_ID
from llm_datadist.errors import LLMException
from llm_datadist.types.grant import Grant

_BACK_TO_BACK_SECONDS = 0.6
_HELD_SECONDS = 0.3
#: Of every three rows of an inbox the first is nobody's: it sees what misses its place.
_GROUP = 3


def blocks_key(found: Found) -> BlocksCacheKey:
    """Return the key of a blocks cache; one that is bound again has the same for all its generations."""
    number = 0 if found.kind in (Kind.REBOUND, Kind.GRANTED) else found.generation + 1
    return BlocksCacheKey(found.cluster_id, ((found.incarnation * 64 + found.slot) << 24) + number)


def request_of(found: Found, row: int) -> CacheKey:
    number = ((found.incarnation * 64 + found.slot) << 28) + (found.generation << 8) + row
    return CacheKey(found.cluster_id, number)


def prefix_of(found: Found, row: int) -> CacheKey:
    return CacheKey(found.cluster_id, INVALID_ID, prefix_id=request_of(found, row).req_id)


def pusher_of(row: int, generation: int, pushers: int) -> int | None:
    """Return which of the pushers a row of an inbox belongs to; None: nobody.

    Which rows are nobody's changes with the generation: what is written where an older inbox was is seen.
    """
    return None if (row + generation) % _GROUP == 0 else row // _GROUP % pushers


class Slot:
    """A place in the directory and what is there. One thread: the producer's.

    Here it is pool memory: blocks under a key of their own, inboxes, rows, and canaries that nobody may touch.
    Subclasses say how else a generation is made and how it is taken back.
    """

    def __init__(self, scene: Scene, number: int, kind: Kind, shape: Shape) -> None:
        self.scene, self.number, self.kind, self.shape = scene, number, kind, shape
        self.generation = 0
        self.cache: Cache | None = None
        self.views: list[NDArray[Any]] = []
        self.extra = b""

    @property
    def found(self) -> Found:
        scene, cache_id = self.scene, -1 if self.cache is None else self.cache.cache_id
        of = scene.worker, self.number, self.kind, scene.life, self.generation, cache_id
        return Found(*of, self.shape, self.extra)

    @property
    def made(self) -> Cache:
        assert self.cache is not None
        return self.cache

    def call(self, kind: str, function: Callable[..., Any], *args: Any) -> Any:
        return self.scene.call(kind, self.scene.budget, function, *args)

    def mark(self, what: str, generation: int | None = None) -> None:
        which = self.generation if generation is None else generation
        self.scene.directory.mark(self.scene.worker, self.number, which, what)

    def renew(self) -> None:
        """Take the present generation back and make the next one; either may fail, with a typed error."""
        if self.free():
            self.generation = (self.generation + 1) % GENERATIONS
            made = self.make()
            if isinstance(made, Exception):
                return
            self.cache = made
            if self.kind is not Kind.NOTHING:
                self.scene.directory.publish(self.found)

    def make(self) -> Any:
        """Return the next generation's cache, filled, or an exception."""
        cm, desc = self.scene.cm, self.shape.desc()
        if self.kind in (Kind.ROWS, Kind.INROWS):
            return self.filled(self.call("allocate", cm.allocate_cache, desc))
        key = None if self.kind is Kind.NOTHING else blocks_key(self.found)
        return self.filled(self.call("allocate", cm.allocate_blocks_cache, desc, key))

    def take_back(self) -> bool:
        """Give the cache back; False: it stays."""
        cm = self.scene.cm
        give = cm.deallocate_blocks_cache if self.made.is_blocks_cache else cm.deallocate_cache
        return self.scene.call("deallocate", 0.0, give, self.made) is None

    def free(self) -> bool:
        """Look at every byte, then give the cache back; False: it stays as it was."""
        if self.cache is None:
            return True
        self.check()
        self.mark("ending")
        if not self.take_back():
            self.scene.directory.unmark(self.scene.worker, self.number, self.generation)
            return False
        self.mark("ended")
        self.scene.directory.withdraw(self.scene.worker, self.number)
        self.cache, self.views = None, []
        return True

    def check(self) -> None:
        """Nobody has written here but who may."""
        rows: Sequence[int] = range(self.views[0].shape[0])
        if self.kind in (Kind.INBOX, Kind.INROWS, Kind.MAILBOX):
            rows = [row for row in rows if pusher_of(row, self.generation, 1) is None]
        same(self.scene.journal, f"owner's {self.kind.name} slot {self.number}", self.views, self.found.stamp, rows)

    def unregistered(self, cache: Cache) -> bool:
        """Unregister a cache; False: it stays."""
        return self.call("unregister", self.scene.cm.unregister_cache, cache.cache_id) is None

    def filled(self, cache: Any) -> Any:
        if isinstance(cache, Exception):
            return cache
        views = self.call("look at", words_of, cache)  # another thread may finalize
        if isinstance(views, Exception):
            return views
        self.views = views
        fill(self.views, self.found.stamp)
        return cache

    def spoil(self, memory: Memory, generation: int) -> None:
        """Write over memory that nobody is at any more: what is written now is not read by anybody."""
        memory.fill(Stamp(self.scene.worker, self.scene.life, 63, generation))


class Keyed(Slot):
    """Rows with a key each; deallocated early, so that the keys alone keep them."""

    def _keys(self) -> list[CacheKey]:
        key_of = prefix_of if self.kind is Kind.PREFIX else request_of
        return [key_of(self.found, row) for row in range(self.shape.rows)]

    def make(self) -> Any:
        return self.filled(self.call("allocate", self.scene.cm.allocate_cache, self.shape.desc(), self._keys()))

    def take_back(self) -> bool:
        scene = self.scene
        scene.call("deallocate", 0.0, scene.cm.deallocate_cache, self.made)
        for key in self._keys():
            scene.call("remove_cache_key", 0.0, scene.cm.remove_cache_key, key)
        return True


class Reused(Slot):
    """The same registered memory again and again: unregistered, filled anew at once, registered."""

    def __init__(self, scene: Scene, number: int, kind: Kind, shape: Shape, memory: Memory) -> None:
        super().__init__(scene, number, kind, shape)
        self.memory = memory

    def make(self) -> Any:
        self.memory.fill(self.found.stamp)
        self.views = self.memory.arrays
        return self.memory.register(self.scene.budget, key=blocks_key(self.found))

    def take_back(self) -> bool:
        return self.unregistered(self.made)

    def free(self) -> bool:
        gone = super().free()
        if gone:
            self.spoil(self.memory, self.generation)
        return gone


class Rebound(Slot):
    """Two memories under one key: the newer one is bound before the older one goes."""

    def __init__(self, scene: Scene, number: int, shape: Shape, *memories: Memory) -> None:
        super().__init__(scene, number, Kind.REBOUND, shape)
        self.memories = memories
        self._older: tuple[Cache, int] | None = None  # bound no more, not unregistered yet

    def renew(self) -> None:
        if not self._drop_older():
            return
        older = self.cache
        if older is not None:
            self.check()
        self.generation += 1
        memory = self.memories[self.generation % 2]
        memory.fill(self.found.stamp)
        made = memory.register(self.scene.budget, key=blocks_key(self.found))
        if isinstance(made, Exception):
            self.generation -= 1
            return
        if older is not None:
            self.mark("ended", self.generation - 1)
            self._older = older, self.generation - 1
        self.cache, self.views = made, memory.arrays
        self.scene.directory.publish(self.found)
        self._drop_older()

    def _drop_older(self) -> bool:
        if self._older is not None:
            cache, generation = self._older
            if not self.unregistered(cache):
                return False
            self._older = None
            self.spoil(self.memories[generation % 2], generation)
        return True

    def take_back(self) -> bool:
        return self._drop_older() and self.unregistered(self.made)


class Mailbox(Slot):
    """Blocks that peers know by their addresses: nothing else may ever be there in this epoch."""

    def renew(self) -> None:
        if self.cache is None:
            super().renew()

    def filled(self, cache: Any) -> Any:
        if not isinstance(cache, Exception):
            self.extra = np.array(cache.tensor_addrs, "<u8").tobytes()
        return super().filled(cache)


class Granted(Slot):
    """Blocks that stay where they are and are used again, under a grant for each use."""

    def __init__(self, scene: Scene, number: int, shape: Shape) -> None:
        super().__init__(scene, number, Kind.GRANTED, shape)
        self.grant: Grant | None = None

    def renew(self) -> None:
        if self.cache is None:
            super().renew()
        elif self.end():
            self.generation += 1
            fill(self.views, self.found.stamp)
            self.give()
            self.scene.directory.publish(self.found)

    def filled(self, cache: Any) -> Any:
        made = super().filled(cache)
        if self.cache is None and not isinstance(made, Exception):
            self.cache = made
            self.give()
        return made

    def give(self) -> None:
        # Longer than the campaign, or over at once by itself.
        ttl = 600.0 if self.generation % 3 else 0.05
        made = self.scene.call("grant", 0.0, self.made.grant, list(range(self.shape.rows)), ttl)
        self.grant, self.extra = (None, b"") if isinstance(made, Exception) else (made, made.to_bytes())

    def end(self) -> bool:
        self.check()
        self.mark("ending")
        if self.grant is not None and self.call("revoke", self.grant.revoke) is not None:
            return False
        self.mark("ended")
        return True


class Producer:
    """Makes and takes back at random, until told to stop; storms and full pools on command."""

    def __init__(self, scene: Scene, rng: Random) -> None:
        self._scene, self._rng = scene, rng
        self._memories: list[Memory] = []
        self._slots: list[Slot] = []
        self.storm = threading.Event()
        self.exhaust = threading.Event()

    def run(self) -> None:
        while not self._slots and not self._scene.stop.is_set():
            self._begin()
        while not self._scene.stop.is_set():
            if self.storm.is_set():
                self._back_to_back()
            if self.exhaust.is_set():
                self._fill_the_pool()
            self._rng.choice(self._slots).renew()
            self._scene.stop.wait(self._rng.choice((0.0, 0.005, 0.02, 0.1)))

    def free(self) -> bool:
        freed = [slot.free() for slot in self._slots]
        if all(freed):
            self._give_memories_back()
            self._slots.clear()
        return all(freed)

    def calls_of_a_child(self) -> list[Callable[[], object]]:
        """Return calls of grants, which a forked child must not make."""
        found: list[Callable[[], object]] = []
        for slot in self._slots:
            if isinstance(slot, Granted) and slot.cache is not None:
                found.append(partial(slot.cache.grant, [0], 0.01))
                found += [slot.grant.revoke, partial(slot.grant.renew, 0.01)] if slot.grant is not None else []
        return found

    def _begin(self) -> None:
        scene, shape = self._scene, self._scene.epoch.shape
        pushers = MOVERS * len(scene.epoch.peers(scene.worker))
        inbox = Shape(shape.tensors, _GROUP * pushers + 1, shape.words)
        rca = scene.epoch.rca
        try:
            memories = [self._memory(shape) for _ in range(3)]
            letters = self._memory(inbox) if rca else None
        except LLMException:
            self._give_memories_back()
            return
        slots: list[Slot] = [Slot(scene, 0, Kind.BLOCKS, shape), Slot(scene, 1, Kind.BLOCKS, shape)]
        slots += [Reused(scene, 2, Kind.BLOCKS, shape, memories[0]), Rebound(scene, 3, shape, *memories[1:])]
        slots += [Slot(scene, 4, Kind.ROWS, shape.long), Slot(scene, 5, Kind.NOTHING, shape)]
        if letters is not None:
            rows = Shape(shape.tensors, inbox.rows, shape.long.words)
            slots += [Slot(scene, 6, Kind.INBOX, inbox), Slot(scene, 7, Kind.INROWS, rows)]
            slots += [Reused(scene, 8, Kind.INBOX, inbox, letters)]
        else:
            slots += [Keyed(scene, 6, Kind.KEYED, shape.long), Keyed(scene, 7, Kind.KEYED, shape.long)]
            slots += [Keyed(scene, 10, Kind.PREFIX, shape.long), Mailbox(scene, 11, Kind.MAILBOX, inbox)]
        slots.append(Granted(scene, 9, shape))
        self._slots = slots
        for slot in slots:
            slot.renew()

    def _memory(self, shape: Shape) -> Memory:
        scene = self._scene
        private = scene.epoch.private and self._rng.random() < 0.7
        memory = Memory(scene.journal, scene.cm, shape, scene.budget, private=private)
        self._memories.append(memory)
        return memory

    def _give_memories_back(self) -> None:
        for memory in self._memories:
            memory.close()
        self._memories.clear()

    def _back_to_back(self) -> None:
        until = time.monotonic() + _BACK_TO_BACK_SECONDS
        while time.monotonic() < until and not self._scene.stop.is_set():
            for slot in self._slots:
                slot.renew()
        self.storm.clear()

    def _fill_the_pool(self) -> None:
        """Take all there is; what is taken may be written by nobody else."""
        scene = self._scene
        canaries: list[Slot] = []
        while True:
            canary: Slot = Slot(scene, 32 + len(canaries) % 16, Kind.NOTHING, scene.epoch.shape)
            canary.generation = len(canaries)
            made = canary.make()
            if isinstance(made, Exception):
                break
            canary.cache = made
            canaries.append(canary)
        scene.stop.wait(_HELD_SECONDS)
        for canary in canaries:
            canary.check()
            canary.take_back()
        self.exhaust.clear()
