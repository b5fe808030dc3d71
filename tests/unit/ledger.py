"""What the registry's unit tests share: geometries that fit anything, and somebody who carries the effects out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist import BlocksCacheKey, CacheKey
from llm_datadist._cache.geometry import CacheKind, Geometry
from llm_datadist._cache.registry import Entry, Key, Pin, Registry, key_of
from llm_datadist.errors import CacheNotFound

if TYPE_CHECKING:
    from llm_datadist._cache.registry import Effects

__all__ = ["LATER", "TENSORS", "Ledger", "Owner", "P", "Q", "blocks", "geometry", "req"]

TENSORS = 4
P, Q = "peer p", "peer q"
LATER = 100.0


def geometry(kind: CacheKind, rows: int, tensors: int) -> Geometry:
    return Geometry(kind, tensors, rows, 8, 8 * rows, (rows, 8), 2, 1)


class Ledger:
    """Carries effects out the way CacheStore does, and refuses to do anything twice."""

    def __init__(self) -> None:
        self.advanced: set[str] = set()
        self.retired: set[str] = set()
        self.freed: set[str] = set()

    def apply(self, effects: Effects) -> None:
        for guard in effects.advance:
            assert guard not in self.advanced | self.retired, f"{guard} advanced twice, or after it was retired"
            self.advanced.add(guard)
        for guard in effects.retire:
            assert guard not in self.retired, f"{guard} retired twice"
            self.retired.add(guard)
        for entry in effects.free:
            storage = entry.storage
            assert storage not in self.freed, f"{storage} freed twice"
            assert storage in self.retired, f"{storage} freed before its guard was retired"
            self.freed.add(storage)


def req(number: int, model: int = 0) -> Key:
    key = key_of(CacheKey(9, number, model))
    assert key is not None
    return key


def blocks(model: int = 0) -> Key:
    key = key_of(BlocksCacheKey(9, model))
    assert key is not None
    return key


class Owner:
    """A registry whose storages and guards are names; what it decides is carried out in ``done``."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.done = Ledger()

    def add(self, name: str, *keys: Key, owned: bool = True, kind: CacheKind = CacheKind.CACHE) -> Entry:
        bindings = [(key, row, f"{name} row {row}") for row, key in enumerate(keys)]
        entry, effects = self.registry.add(geometry(kind, 3, TENSORS), name, name, bindings, owned=owned)
        self.done.apply(effects)
        return entry

    def pin(self, peer: object, key: Key, expires: float = LATER) -> Pin:
        return self.registry.pin(peer, expires, key=key)

    def pulled(self, peer: object, pin: Pin, first: int = 0, count: int = TENSORS) -> None:
        self.done.apply(self.registry.release(peer, pin.pin_id, first, count, consume=True))

    def failed(self, peer: object, pin: Pin) -> None:
        self.done.apply(self.registry.release(peer, pin.pin_id, 0, TENSORS))

    def drop(self, entry: Entry) -> None:
        self.done.apply(self.registry.drop_owner(entry.cache_id))

    def remove(self, key: Key) -> None:
        self.done.apply(self.registry.remove_key(key))

    def bound(self, key: Key) -> bool:
        try:
            self.registry.find(key=key)
        except CacheNotFound:
            return False
        return True

    def void(self, guard: str) -> bool:
        """Whether a reader that resolved under ``guard`` would now fail."""
        return guard in self.done.advanced | self.done.retired

    def end(self) -> None:
        """Finalize: nothing may be left."""
        self.registry.check_integrity()
        self.done.apply(self.registry.clear())
        self.registry.check_integrity()
        assert self.registry.snapshot() == ([], [], 0)
