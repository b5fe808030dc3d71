"""The registry against a simple model, step by step, under hypothesis (interface R2 to R5, R25, R27, B3)."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llm_datadist._cache.geometry import CacheKind
from llm_datadist._cache.registry import Entry, Namespace, Registry
from llm_datadist.errors import CacheNotFound, KeyInUse
from llm_datadist.metrics import CacheStatistics
from tests.unit import registry_model as model

PEERS = (object(), object())
NORMAL_KEYS = [*[(Namespace.REQUEST, number, m) for number, m in ((0, 0), (1, 0), (0, 1))], (Namespace.PREFIX, 0, 0)]
BLOCKS_KEYS = [(Namespace.BLOCKS, 0, m) for m in range(2)]
#: What a call of the owner, or a message of a peer, may be: the common ones are said more often.
OWNER_OPS = [*["deallocate"] * 3, "remove_key", "unregister", "hold", "let_go"]
PULL_OPS = ["pin", "pin", "pull_ends"]
PEER_OPS = [*["release_whatever", "reach", "consume_row"] * 2, "drop_peer", "expire"]


class Args(NamedTuple):
    """What an event may need."""

    peer: object
    pick: int
    row: int
    first: int
    tensors: int
    time: int
    flag: bool


some_keys = st.lists(st.sampled_from(NORMAL_KEYS), max_size=3) | st.lists(
    st.sampled_from(BLOCKS_KEYS), min_size=1, max_size=1
)
arguments = st.builds(
    Args,
    peer=st.sampled_from(PEERS),
    pick=st.integers(0, 2**16),
    row=st.sampled_from([0, 0, 0, 1, 3]),
    first=st.sampled_from([0, 0, 0, 1, 2, -1]),
    tensors=st.sampled_from([1, 1, 2, 3, 3, 0, 4, 2**60]),
    time=st.integers(1, 3),
    flag=st.booleans(),
)


def _pick(values: list[Any], pick: int) -> Any:
    return values[pick % len(values)]


class RegistryMachine(RuleBasedStateMachine):
    """Names are shared: the storage and the guard of cache 3 are both called "cache 3"."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry()
        self.model = model.Model()
        self.ledger = model.Ledger()
        self.entries: dict[int, Entry] = {}
        self.held: list[int] = []
        self.made = self.bound = self.unknown = self.pinned = 0

    @initialize(keys=st.permutations(NORMAL_KEYS), tensors=st.sampled_from([2, 3]))
    def begin(self, keys: list[Any], tensors: int) -> None:
        """Something to pull from the first step on."""
        self.make_cache(True, keys[:2], tensors, mix=False)
        self.make_cache(False, [BLOCKS_KEYS[0]], tensors, mix=False)
        self.make_cache(True, keys[2:], 1, mix=False)
        self.make_cache(True, [BLOCKS_KEYS[1]], tensors, mix=False)
        self.make_cache(True, [], 1, mix=True)

    @rule(owned=st.booleans(), keys=some_keys, tensors=st.sampled_from([1, 1, 2, 3]), mix=st.booleans())
    def make_cache(self, owned: bool, keys: list[Any], tensors: int, mix: bool) -> None:
        blocks = keys[:1] in ([key] for key in BLOCKS_KEYS)
        kind = CacheKind.BLOCKS if blocks else CacheKind.MIX if mix and not keys else CacheKind.CACHE
        self.made += 1
        cache = model.Cache(f"cache {self.made}", owned, kind, 1 if blocks else 3, tensors)
        wanted = []
        for row, key in enumerate(keys):
            self.bound += 1
            wanted.append((key, row, f"binding {self.bound}"))
        what = (model.geometry(kind, cache.rows, tensors), cache.name, cache.name, wanted)
        if owned and any(self.model.bound(key) for key, _, _ in wanted):
            with pytest.raises(KeyInUse):
                self.registry.require_free(key for key, _, _ in wanted)
            with pytest.raises(KeyInUse):
                self.registry.add(*what, owned=owned)
            return
        entry, effects = self.registry.add(*what, owned=owned)
        self.ledger.apply(effects)
        assert entry.cache_id == max(self.model.caches, default=0) + 1
        self.entries[entry.cache_id] = entry
        self.model.add(entry.cache_id, cache, wanted)

    @rule(op=st.sampled_from(OWNER_OPS), a=arguments)
    def owner_acts(self, op: str, a: Args) -> None:
        getattr(self, op)(a)

    @rule(op=st.sampled_from(PULL_OPS), a=arguments)
    def pulls(self, op: str, a: Args) -> None:
        getattr(self, op)(a)

    @rule(op=st.sampled_from(PEER_OPS), a=arguments)
    def peer_acts(self, op: str, a: Args) -> None:
        getattr(self, op)(a)

    @precondition(lambda self: len(self.model.caches) > 12)
    @rule()
    def clear(self) -> None:
        self.ledger.apply(self.registry.clear())
        self.model.clear()

    def deallocate(self, a: Args) -> None:
        cache_id = self.some_id(a.pick, self.owned(True))
        self.ledger.apply(self.registry.drop_owner(cache_id))
        cache = self.model.at(cache_id)
        if cache is not None:
            self.model.deallocate(cache)

    def remove_key(self, a: Args) -> None:
        key = _pick(NORMAL_KEYS + BLOCKS_KEYS, a.pick)
        self.ledger.apply(self.registry.remove_key(key))
        binding = self.model.bound(key)
        if binding is not None:
            self.model.unbind(binding)

    def unregister(self, a: Args) -> None:
        cache_id = self.some_id(a.pick, self.owned(False))
        self.ledger.apply(self.registry.withdraw(cache_id, owned=False))
        cache = self.model.at(cache_id)
        if cache is not None and not cache.owned:
            self.model.withdraw(cache)

    def pin(self, a: Args) -> None:
        row = a.row
        key, cache_id = (self.some_key(a.pick), 0) if a.flag else (None, self.some_id(a.pick))
        found = self.model.find(key, cache_id, row)
        with self.refused_unless(found is not None):
            pin = self.registry.pin(a.peer, a.time, key=key, cache_id=cache_id, row=row)
            assert found is not None
            cache, found_row, binding = found
            assert (pin.entry.storage, pin.row) == (cache.name, found_row)
            assert (pin.binding and pin.binding.guard) == (binding and binding.name)
            self.pinned = pin.pin_id
            self.model.pins[pin.pin_id] = model.Pin(a.peer, cache, binding, a.time)

    def release_whatever(self, a: Args) -> None:
        """A release of a pin that may never have been, or be over, or be another peer's."""
        self.release(a.peer, a.pick % (self.pinned + 2), a.first, a.tensors, consume=a.flag)

    def pull_ends(self, a: Args) -> None:
        if self.model.pins:
            pin_id = _pick(sorted(self.model.pins), a.pick)
            pin = self.model.pins[pin_id]
            first, tensors = (0, pin.cache.tensors) if a.flag else (a.first, a.tensors)  # all at once, or a part
            self.release(pin.peer, pin_id, first, tensors, consume=True)

    def release(self, peer: object, pin_id: int, first: int, count: int, *, consume: bool) -> None:
        self.ledger.apply(self.registry.release(peer, pin_id, first, count, consume=consume))
        pin = self.model.pins.get(pin_id)
        if pin is None or pin.peer is not peer:
            self.unknown += 1
            return
        if consume:
            self.model.consume(pin.binding, first, count)
        del self.model.pins[pin_id]

    def consume_row(self, a: Args) -> None:
        cache_id = self.some_id(a.pick)
        self.ledger.apply(self.registry.consume_row(cache_id, a.row, a.first, a.tensors))
        cache = self.model.at(cache_id)
        if cache is not None:
            self.model.consume(self.model.of_row(cache, a.row), a.first, a.tensors)

    def drop_peer(self, a: Args) -> None:
        self.ledger.apply(self.registry.drop_peer(a.peer))
        self.model.pins = {n: pin for n, pin in self.model.pins.items() if pin.peer is not a.peer}

    def expire(self, a: Args) -> None:
        self.ledger.apply(self.registry.expire(a.time))
        self.model.pins = {n: pin for n, pin in self.model.pins.items() if pin.expires > a.time}

    def reach(self, a: Args) -> None:
        """As a lane does: by a pin that may be over or another peer's, or by the id alone."""
        pin_id = a.pick % (self.pinned + 2) if a.flag else 0
        pin = self.model.pins.get(pin_id)
        own = [cache_id for cache_id, cache in self.model.caches.items() if pin is not None and cache is pin.cache]
        cache_id = own[0] if own and a.row == 0 else self.some_id(a.pick)
        mine = pin is not None and pin.peer is a.peer and own == [cache_id]
        with self.refused_unless(mine if pin_id else self.model.at(cache_id) is not None):
            self.in_use(cache_id, self.registry.reach(a.peer, cache_id, pin_id, use=True))

    def hold(self, a: Args) -> None:
        cache_id = self.some_id(a.pick)
        with self.refused_unless(self.model.at(cache_id) is not None):
            assert self.registry.lookup(cache_id) is self.entries[cache_id]
            self.in_use(cache_id, self.registry.begin_use(cache_id))

    def in_use(self, cache_id: int, entry: Entry) -> None:
        assert entry is self.entries[cache_id]
        self.model.caches[cache_id].holds += 1
        self.held.append(cache_id)

    def let_go(self, a: Args) -> None:
        if self.held:
            cache_id = self.held.pop(a.pick % len(self.held))
            self.ledger.apply(self.registry.end_use(self.entries[cache_id]))
            self.model.caches[cache_id].holds -= 1

    @invariant()
    def tables_are_sound_and_storages_and_guards_where_they_should_be(self) -> None:
        self.registry.check_integrity()
        freed, retired, void = self.model.expected()
        assert self.ledger.freed == freed
        assert self.ledger.retired == retired
        assert self.ledger.retired | self.ledger.advanced == void

    @invariant()
    def everybody_finds_what_the_model_finds(self) -> None:
        for key in NORMAL_KEYS + BLOCKS_KEYS:
            self.same_answer(key, 0, 0)
        for cache_id in range(1, len(self.model.caches) + 2):
            self.same_answer(None, cache_id, (cache_id + len(self.model.bindings)) % 2)

    @invariant()
    def statistics_count_the_same(self) -> None:
        caches, keys, pins = self.registry.statistics()
        alive = [c for c in self.model.caches.values() if not self.model.freed(c)]
        assert {entry.storage for entry in self.registry.snapshot()[0]} == {c.name for c in alive}
        findable = sum(self.model.findable(c) for c in alive)
        owners, owned = sum(c.owner for c in alive), sum(c.owned for c in alive)
        assert caches == CacheStatistics(
            live=owners,
            deferred=findable - owners,
            draining=len(alive) - findable,
            allocated=owned,
            registered=len(alive) - owned,
            nbytes=sum(8 * c.rows * c.tensors for c in alive),
        )
        bound = [
            (repr(b.key), b.row, b.cache.name, 8 * len(b.left) if b.consumable else 0)
            for b in self.model.bindings
            if b.bound
        ]
        shown = [(k.key, k.row, self.entries[k.cache_id].storage, k.unconsumed_bytes) for k in keys]
        assert (sorted(shown), pins) == (sorted(bound), len(self.model.pins))
        assert self.registry.unknown_releases == self.unknown

    def owned(self, owned: bool) -> list[int]:
        """Return the caches that their owner, of this sort, can still give back."""
        return [cache_id for cache_id, cache in self.model.caches.items() if cache.owner and cache.owned is owned]

    def some_id(self, pick: int, wanted: list[int] | None = None) -> Any:
        """A cache that is there, or one of those wanted, mostly; or one that was, or never."""
        if wanted is None:
            wanted = [cache_id for cache_id in self.model.caches if self.model.at(cache_id)]
        return _pick(wanted * 5 + list(range(len(self.model.caches) + 2)), pick)

    def some_key(self, pick: int) -> Any:
        """A key that is bound, mostly."""
        bound = [binding.key for binding in self.model.bindings if binding.bound]
        return _pick(bound * 5 + NORMAL_KEYS, pick)

    def same_answer(self, key: Any, cache_id: int, row: int) -> None:
        found = expected = None
        if (cache := self.model.find(key, cache_id, row)) is not None:
            expected = (cache[0].name, cache[1], cache[2] and cache[2].name)
        with contextlib.suppress(CacheNotFound):
            entry, found_row, binding = self.registry.find(key=key, cache_id=cache_id, row=row)
            found = (entry.storage, found_row, binding and binding.guard)
        assert found == expected

    @contextlib.contextmanager
    def refused_unless(self, there: bool) -> Iterator[None]:
        if there:
            yield
        else:
            with pytest.raises(CacheNotFound):
                yield

    def teardown(self) -> None:
        """Finalize: everything goes, exactly once."""
        self.clear()
        while self.held:
            self.let_go(Args(PEERS[0], 0, 0, 0, 0, 0, flag=False))
        self.tables_are_sound_and_storages_and_guards_where_they_should_be()
        assert self.ledger.freed == {cache.name for cache in self.model.caches.values()}
        names = {binding.name for binding in self.model.bindings}
        assert self.ledger.retired == self.ledger.freed | names
        super().teardown()


RegistryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestRegistryMachine = RegistryMachine.TestCase
