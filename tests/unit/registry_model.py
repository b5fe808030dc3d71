"""What the registry should do, said a second time and as simply as possible: the oracle of test_registry_machine.

Nothing is kept that can be derived: a cache is needed while it has an owner, a bound key or a pin, and that is all.
"""

from dataclasses import dataclass, field

from llm_datadist._cache.geometry import CacheKind, Geometry
from llm_datadist._cache.registry import Effects

Key = tuple[int, int, int]


def geometry(kind: CacheKind, rows: int, tensors: int) -> Geometry:
    return Geometry(kind, tensors, rows, 8, 8 * rows, (rows, 8), 2, 1)


class Ledger:
    """Carries effects out the way LocalCaches does, and refuses to do anything twice. Storages and guards are names."""

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


@dataclass(eq=False)
class Cache:
    """One cache that was ever made."""

    name: str
    owned: bool
    kind: CacheKind
    rows: int
    tensors: int
    owner: bool = True
    withdrawn: bool = False
    holds: int = 0


@dataclass(eq=False)
class Binding:
    """One binding that was ever asked for. ``void``: its readers were told to fail."""

    name: str
    key: Key
    cache: Cache
    row: int
    left: set[int]
    bound: bool = True
    void: bool = False

    @property
    def consumable(self) -> bool:
        return self.cache.owned and self.key[0] == 0


@dataclass(eq=False)
class Pin:
    """One pin that a peer holds."""

    peer: object
    cache: Cache
    binding: Binding | None
    expires: float


@dataclass
class Model:
    """All of them, by the registry's numbers."""

    caches: dict[int, Cache] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)
    pins: dict[int, Pin] = field(default_factory=dict)

    def keys(self, cache: Cache) -> list[Binding]:
        return [b for b in self.bindings if b.bound and b.cache is cache]

    def bound(self, key: Key) -> Binding | None:
        return next((b for b in self.bindings if b.bound and b.key == key), None)

    def of_row(self, cache: Cache, row: int) -> Binding | None:
        return next((b for b in self.keys(cache) if b.row == row and b.key[0] == 0), None)

    def findable(self, cache: Cache) -> bool:
        return cache.owner or bool(self.keys(cache))

    def freed(self, cache: Cache) -> bool:
        return not self.findable(cache) and not cache.holds and all(p.cache is not cache for p in self.pins.values())

    def at(self, cache_id: int) -> Cache | None:
        cache = self.caches.get(cache_id)
        return cache if cache is not None and self.findable(cache) else None

    def find(self, key: Key | None, cache_id: int, row: int) -> tuple[Cache, int, Binding | None] | None:
        if key is not None:
            binding = self.bound(key)
            return None if binding is None else (binding.cache, binding.row, binding)
        cache = self.at(cache_id)
        return None if cache is None or row >= cache.rows else (cache, row, self.of_row(cache, row))

    def expected(self) -> tuple[set[str], set[str], set[str]]:
        """Names of the storages that are freed, of the guards that are retired, and of those that are void."""
        freed = {c.name for c in self.caches.values() if self.freed(c)}
        read = [pin.binding for pin in self.pins.values()]
        retired = freed | {b.name for b in self.bindings if not b.bound and b not in read}
        void = retired | {c.name for c in self.caches.values() if c.withdrawn}
        return freed, retired, void | {b.name for b in self.bindings if b.void}

    def add(self, cache_id: int, cache: Cache, keys: list[tuple[Key, int, str]]) -> None:
        self.caches[cache_id] = cache
        for key, row, name in keys:
            binding = Binding(name, key, cache, row, set(range(cache.tensors)))
            old = self.bound(key)
            if old is not None and not cache.owned and cache.kind is CacheKind.CACHE:
                binding.bound = False  # the first one stays
            elif old is not None:
                self.unbind(old)
            self.bindings.append(binding)

    def unbind(self, binding: Binding) -> None:
        binding.bound, binding.void = False, True

    def withdraw(self, cache: Cache) -> None:
        cache.owner, cache.withdrawn = False, True
        for binding in self.keys(cache):
            self.unbind(binding)

    def deallocate(self, cache: Cache) -> None:
        if cache.owned and cache.owner and cache.kind is not CacheKind.CACHE:
            self.withdraw(cache)
        elif cache.owned:
            cache.owner = False

    def consume(self, binding: Binding | None, first: int, count: int) -> None:
        if binding is None or not binding.bound or not binding.consumable:
            return
        tensors = range(binding.cache.tensors)
        if count > 0 and first in tensors and first + count - 1 in tensors:
            binding.left -= set(range(first, first + count))
            binding.bound = bool(binding.left)

    def clear(self) -> None:
        for cache in self.caches.values():
            if self.findable(cache):
                self.withdraw(cache)
        self.pins.clear()
