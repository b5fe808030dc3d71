"""Who still needs which cache: entries, keys, bindings, owners and pins (BEHAVIOUR §3, R2 to R5, R25, R27).

No I/O and no bytes: storages and guards are opaque values. Every mutator computes under the one lock and returns
:class:`Effects`: which guards to advance, which to retire, whose storages to free. The caller applies them after the
lock is gone, guards first, so that no reader can mistake reused memory for the cache it resolved.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from llm_datadist._cache.geometry import CacheKind
from llm_datadist._checks import INVALID_ID
from llm_datadist._native import UseGate
from llm_datadist.errors import CacheNotFound, KeyInUse, LinkError, LLMStatusCode, StateError
from llm_datadist.metrics import CacheStatistics, KeyStatistics
from llm_datadist.types import BlocksCacheKey, CacheKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Set

    from llm_datadist._cache.geometry import Geometry

__all__ = [
    "NOTHING",
    "TRANSITIONS",
    "Binding",
    "Effects",
    "Entry",
    "Event",
    "Key",
    "Lifecycle",
    "Namespace",
    "Pin",
    "Registry",
    "State",
    "check_tables",
    "key_of",
    "registry_statistics",
    "show_key",
]

#: A peer that resolves and never releases costs its owner this many pins and no more (ARCHITECTURE rule 10).
MAX_PINS_PER_PEER: Final = 4096


class Registry:
    """The tables of one LLMDataDist.

    Touched by callers' threads (allocate, register, copy) and by the control thread (resolve, release, lost peers);
    one lock, never held across a call out of this class.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, Entry] = {}
        self._keys: dict[Key, Binding] = {}
        self._pins: dict[int, Pin] = {}
        self._pins_of: dict[object, int] = {}
        self._draining: set[Entry] = set()
        self._next_id = 1
        self._next_binding = 1
        self._next_pin = 1
        self.unknown_releases = 0

    # --- owners and keys -------------------------------------------------------------------------------------------

    def require_free(self, keys: Iterable[Key]) -> None:
        """Raise KeyInUse if one of ``keys`` is bound (R3). A first look; :meth:`add` decides."""
        with self._lock:
            self._require_free(keys)

    def add(
        self,
        geometry: Geometry,
        storage: object,
        guard: object,
        keys: Sequence[tuple[Key, int, object]] = (),
        *,
        owned: bool,
        remote_accessible: bool = True,
    ) -> tuple[Entry, Effects]:
        """Enter a cache with its ``(key, row, guard)`` bindings.

        An allocated cache refuses a key in use with KeyInUse and nothing has happened; of the same key twice in one
        call the last row wins (R2). A registered one refuses none (API §6.6): a continuous cache leaves the first
        binding, a blocks cache replaces it.
        """
        effects = Effects()
        with self._lock:
            if owned:
                self._require_free(key for key, _, _ in keys)
            entry = Entry(
                self._next_id,
                geometry,
                storage,
                guard,
                owned,
                remote_accessible,
                Lifecycle(f"cache {self._next_id}"),
            )
            self._next_id += 1
            self._entries[entry.cache_id] = entry
            for key, row, key_guard in keys:
                self._bind(entry, key, row, key_guard, effects)
            return entry, effects

    def drop_owner(self, cache_id: int) -> Effects:
        """The owner gives an allocated cache back; unknown, registered and already dropped ids are no-ops.

        A blocks cache takes its key with it at once (R27), one of kind MIX has none; a continuous one lives until its
        keys are consumed.
        """
        effects = Effects()
        with self._lock:
            entry = self._entries.get(cache_id)
            if entry is None or not entry.owned or not entry.owner:
                return effects
            if entry.geometry.kind is not CacheKind.CACHE:
                self._withdraw(entry, effects)
            else:
                entry.owner = False
                self._settle(entry, Event.DROP_OWNER, effects)
        return effects

    def remove_key(self, key: Key) -> Effects:
        """Unbind ``key`` from whatever cache carries it, registered ones too (R25); unknown is a no-op."""
        effects = Effects()
        with self._lock:
            binding = self._keys.get(key)
            if binding is not None:
                self._unbind(binding, effects, invalidate=True)
        return effects

    def registered(self, cache_id: int) -> Entry | None:
        """Return the registered cache with that id, also while it is being unregistered; None for any other id."""
        with self._lock:
            entry = self._entries.get(cache_id)
            return None if entry is None or entry.owned else entry

    def begin_closing(self, entry: Entry) -> bool:
        """Let nobody find a registered cache any more, for now; False when it is gone, or another call is at it."""
        with self._lock:
            if entry.closing or self._entries.get(entry.cache_id) is not entry:
                return False
            entry.close()
            return True

    def reopen(self, entry: Entry, guard: object) -> None:
        """Take :meth:`begin_closing` back, under a newer guard: its keys are bound as before."""
        with self._lock:
            entry.reopen(guard)

    def unregister(self, cache_id: int) -> Effects:
        """Drop a registered cache with all its keys; readers in flight fail by its guard. Others: no-op."""
        effects = Effects()
        with self._lock:
            entry = self._entries.get(cache_id)
            if entry is not None and not entry.owned:
                self._withdraw(entry, effects)
        return effects

    def clear(self) -> Effects:
        """Finalize: drop every owner, key and pin. Returns everything that was still held."""
        effects = Effects()
        with self._lock:
            for entry in list(self._entries.values()):
                self._withdraw(entry, effects)
            for pin in list(self._pins.values()):
                self._unpin(pin, effects)
        return effects

    # --- lookups and pins ------------------------------------------------------------------------------------------

    def lookup(self, cache_id: int, what: str = "cache") -> Entry:
        """Return the entry with that id (also a deallocated one whose keys are not consumed yet).

        Raises:
            CacheNotFound: No such cache.
        """
        with self._lock:
            return self._lookup(cache_id, what)

    def hold(self, cache_id: int, what: object = "cache") -> Entry:
        """Like :meth:`lookup`, and keep its memory until :meth:`let_go`: for the length of one local call."""
        entry = self._entries.get(cache_id)
        if entry is not None and entry.holds.try_enter():
            return entry  # no event: wherever a cache can be found, one hold more changes no state
        with self._lock:
            entry = self._lookup(cache_id, what)  # says why not
            entry.holds.enter()
            return entry

    def let_go(self, entry: Entry) -> Effects:
        """End a :meth:`hold`, of :meth:`reach` too: :data:`NOTHING` while its owner or its keys keep the cache."""
        if entry.holds.try_leave():
            return NOTHING  # no event either: one hold less changes no state in which it can be found
        with self._lock:
            entry.holds.leave()
            if entry.life.state is not State.DRAINING:
                return NOTHING
            effects = Effects()
            self._settle(entry, Event.UNPIN, effects)
        return effects

    def find(self, *, key: Key | None = None, cache_id: int = 0, row: int = 0) -> tuple[Entry, int, Binding | None]:
        """Resolve a key, or a (cache id, row), to (entry, row, binding).

        Raises:
            CacheNotFound: Unknown key or id, or the row is outside the cache (BEHAVIOUR §8).
        """
        with self._lock:
            return self._find(key, cache_id, row)

    def pin(self, peer: object, expires: float, *, key: Key | None = None, cache_id: int = 0, row: int = 0) -> Pin:
        """:meth:`find`, and keep the memory for ``peer`` until released, lost, or ``expires`` (monotonic seconds)."""
        with self._lock:
            entry, found_row, binding = self._find(key, cache_id, row)
            if self._pins_of.get(peer, 0) >= MAX_PINS_PER_PEER:
                raise LinkError(
                    f"peer holds {MAX_PINS_PER_PEER} unreleased pins: no more until it releases some",
                    status_code=LLMStatusCode.LLM_LINK_BUSY,
                )
            entry.life.require(Event.PIN)
            pin = Pin(self._next_pin, peer, entry, found_row, binding, expires)
            self._next_pin += 1
            self._pins[pin.pin_id] = pin
            self._pins_of[peer] = self._pins_of.get(peer, 0) + 1
            entry.pins += 1
            if binding is not None:
                binding.pins += 1
            self._settle(entry, Event.PIN, Effects())
            return pin

    def reach(self, peer: object, cache_id: int, pin_id: int, *, hold: bool = False) -> Entry:
        """Return the cache that a peer resolved before: by its pin, which finds a draining one too, or by id alone.

        With ``hold`` its memory is kept until :meth:`let_go`.

        Raises:
            CacheNotFound: No such pin of that peer, or no such cache.
        """
        with self._lock:
            pin = self._pins.get(pin_id)
            if pin_id and (pin is None or pin.peer is not peer or pin.entry.cache_id != cache_id):
                raise CacheNotFound(f"no pin {pin_id} of this peer on cache {cache_id}: released, or expired")
            entry = pin.entry if pin is not None else self._lookup(cache_id, "cache_id")
            if hold:
                entry.holds.enter()  # no event: wherever a cache can be reached, one hold more changes no state
            return entry

    def release(self, peer: object, pin_id: int, first: int = 0, count: int = 0, *, consume: bool = False) -> Effects:
        """End a pin of ``peer``. With ``consume`` tensors [first, first + count) count as pulled by its binding.

        The binding that was resolved is consumed, never a later one under the same key (R5). An unknown pin (expired,
        or a lost peer's) is counted and otherwise ignored.
        """
        effects = Effects()
        with self._lock:
            pin = self._pins.get(pin_id)
            if pin is None or pin.peer is not peer:
                self.unknown_releases += 1
                return effects
            if consume and pin.binding is not None:
                self._consume(pin.binding, first, count, effects)
            self._unpin(pin, effects)
        return effects

    def consume_row(self, cache_id: int, row: int, first: int, count: int) -> Effects:
        """Tensors [first, first + count) of a row were pushed: a complete push consumes the row's key (R5)."""
        effects = Effects()
        with self._lock:
            entry = self._entries.get(cache_id)
            binding = entry.binding_of_row(row) if entry is not None else None
            if binding is not None:
                self._consume(binding, first, count, effects)
        return effects

    def drop_peer(self, peer: object) -> Effects:
        """A peer is gone: its pins end, its keys stay (R5)."""
        effects = Effects()
        with self._lock:
            for pin in [p for p in self._pins.values() if p.peer is peer]:
                self._unpin(pin, effects)
        return effects

    def expire(self, now: float) -> Effects:
        """End the pins whose initiator ran out of time without releasing."""
        effects = Effects()
        with self._lock:
            for pin in [p for p in self._pins.values() if p.expires <= now]:
                self._unpin(pin, effects)
        return effects

    # --- what there is ---------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[list[Entry], list[Binding], int]:
        """Return (entries with memory, bindings, pins): for statistics."""
        with self._lock:
            return [*self._entries.values(), *self._draining], list(self._keys.values()), len(self._pins)

    def check_integrity(self) -> None:
        """Raise AssertionError when the tables contradict each other."""
        with self._lock:
            check_tables(self._entries, self._draining, self._keys, self._pins, self._pins_of)

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"<Registry {len(self._entries)} caches, {len(self._keys)} keys, {len(self._pins)} pins, "
                f"{len(self._draining)} draining>"
            )

    # --- under the lock --------------------------------------------------------------------------------------------

    def _require_free(self, keys: Iterable[Key]) -> None:
        for key in keys:
            binding = self._keys.get(key)
            if binding is not None:
                cache = binding.entry.cache_id
                raise KeyInUse(f"key {show_key(key)} is bound to cache {cache}: remove or pull it first")

    def _lookup(self, cache_id: int, what: object) -> Entry:
        entry = self._entries.get(cache_id)
        if entry is None:
            raise CacheNotFound(f"{what}: no cache with id {cache_id} (never made, or freed)")
        _require_open(entry)
        return entry

    def _find(self, key: Key | None, cache_id: int, row: int) -> tuple[Entry, int, Binding | None]:
        if key is not None:
            binding = self._keys.get(key)
            if binding is None:
                raise CacheNotFound(f"key {show_key(key)} is not bound: not published yet, consumed, or removed")
            _require_open(binding.entry)
            return binding.entry, binding.row, binding
        entry = self._lookup(cache_id, "cache_id")
        if row >= entry.geometry.rows:
            raise CacheNotFound(f"cache {cache_id} has {entry.geometry.rows} rows, so no row {row}")
        return entry, row, entry.binding_of_row(row)

    def _bind(self, entry: Entry, key: Key, row: int, guard: object, effects: Effects) -> None:
        old = self._keys.get(key)
        if old is not None:
            first_wins = not entry.owned and entry.geometry.kind is CacheKind.CACHE
            if first_wins:
                effects.retire.append(guard)
                return
            self._unbind(old, effects, invalidate=True)
        everything = (1 << entry.geometry.num_tensors) - 1
        binding = Binding(self._next_binding, key, entry, row, guard, everything)
        self._next_binding += 1
        self._keys[key] = entry.bindings[key] = binding
        self._settle(entry, Event.BIND, effects)

    def _unbind(self, binding: Binding, effects: Effects, *, invalidate: bool) -> None:
        """Take a key away. ``invalidate``: readers of this binding fail; a consumed one lets them finish."""
        del self._keys[binding.key]
        del binding.entry.bindings[binding.key]
        binding.bound = False
        if binding.pins == 0:
            effects.retire.append(binding.guard)
        elif invalidate:
            effects.advance.append(binding.guard)
        self._settle(binding.entry, Event.UNBIND, effects)

    def _consume(self, binding: Binding, first: int, count: int, effects: Effects) -> None:
        consumable = binding.bound and binding.entry.owned and binding.key[0] == Namespace.REQUEST
        if not consumable or count < 1 or first < 0 or first + count > binding.entry.geometry.num_tensors:
            return
        binding.remaining &= ~(((1 << count) - 1) << first)
        if binding.remaining == 0:
            self._unbind(binding, effects, invalidate=False)

    def _unpin(self, pin: Pin, effects: Effects) -> None:
        del self._pins[pin.pin_id]
        left = self._pins_of[pin.peer] - 1
        if left:
            self._pins_of[pin.peer] = left
        else:
            del self._pins_of[pin.peer]
        binding = pin.binding
        if binding is not None:
            binding.pins -= 1
            if binding.pins == 0 and not binding.bound:
                effects.retire.append(binding.guard)
        pin.entry.pins -= 1
        self._settle(pin.entry, Event.UNPIN, effects)

    def _withdraw(self, entry: Entry, effects: Effects) -> None:
        """Owner and keys go at once; readers fail by the guard; the memory goes with the last pin."""
        entry.life.require(Event.WITHDRAW)
        entry.owner = False
        for binding in entry.bindings.values():
            del self._keys[binding.key]
            binding.bound = False
            (effects.advance if binding.pins else effects.retire).append(binding.guard)
        entry.bindings.clear()
        effects.advance.append(entry.guard)
        self._settle(entry, Event.WITHDRAW, effects)

    def _settle(self, entry: Entry, event: Event, effects: Effects) -> None:
        state = entry.life.settle(event, owner=entry.owner, keys=len(entry.bindings), pins=entry.users())
        if state is State.DRAINING or state is State.FREED:
            self._entries.pop(entry.cache_id, None)
        if state is State.DRAINING:
            self._draining.add(entry)
        elif state is State.FREED:
            self._draining.discard(entry)
            effects.retire.append(entry.guard)
            effects.free.append(entry)


def _require_open(entry: Entry) -> None:
    if entry.closing:
        raise CacheNotFound(f"cache {entry.cache_id} is being unregistered")


_STORY_LENGTH: Final = 16


class State(Enum):
    """Where an entry is in its life."""

    LIVE = "live"
    DEFERRED = "deferred"
    DRAINING = "draining"
    FREED = "freed"

    __hash__ = object.__hash__  # a member is itself and no other; that of Enum is Python code, twice per transition


class Event(Enum):
    """What can happen to an entry."""

    BIND = "bind"
    UNBIND = "unbind"
    PIN = "pin"
    UNPIN = "unpin"
    DROP_OWNER = "drop owner"
    WITHDRAW = "withdraw"  # owner and keys at once: blocks caches, registered caches, finalize

    __hash__ = object.__hash__  # as State's


_L, _D, _P, _F = State.LIVE, State.DEFERRED, State.DRAINING, State.FREED

#: (state, event) -> the states it may lead to. A pair that is not here is illegal; which of several targets it is
#: follows from what is left: keys -> DEFERRED, pins only -> DRAINING, nothing -> FREED.
TRANSITIONS: Final[dict[tuple[State, Event], frozenset[State]]] = {
    (_L, Event.BIND): frozenset({_L}),
    (_L, Event.UNBIND): frozenset({_L}),
    (_L, Event.PIN): frozenset({_L}),
    (_L, Event.UNPIN): frozenset({_L}),
    (_L, Event.DROP_OWNER): frozenset({_D, _P, _F}),
    (_L, Event.WITHDRAW): frozenset({_P, _F}),
    (_D, Event.UNBIND): frozenset({_D, _P, _F}),
    (_D, Event.PIN): frozenset({_D}),
    (_D, Event.UNPIN): frozenset({_D}),
    (_D, Event.WITHDRAW): frozenset({_P, _F}),
    (_P, Event.UNPIN): frozenset({_P, _F}),
}


class Lifecycle:
    """State of one entry and the last things that happened to it. Used under the registry's lock only."""

    __slots__ = ("_story", "name", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = State.LIVE
        self._story: deque[tuple[Event, int, int, State]] = deque(maxlen=_STORY_LENGTH)

    def require(self, event: Event) -> frozenset[State]:
        """Return where ``event`` may lead from here; raise StateError, with the story, when it is illegal."""
        targets = TRANSITIONS.get((self.state, event))
        if targets is None:
            raise StateError(f"{self.name}: {event.value} is illegal when {self.state.value}; story: {self.story()}")
        return targets

    def settle(self, event: Event, *, owner: bool, keys: int, pins: int) -> State:
        """Move to the state that the remaining references imply, after ``event`` changed them."""
        targets = self.require(event)
        target = _L if owner else _D if keys else _P if pins else _F
        if target not in targets:
            raise StateError(
                f"{self.name}: {event.value} cannot lead from {self.state.value} to {target.value}; "
                f"story: {self.story()}"
            )
        self.state = target
        self._story.append((event, keys, pins, target))  # put into words when somebody asks
        return target

    def story(self) -> str:
        """Return what happened to this entry, oldest first, on one line."""
        told = [
            f"{event.value} (keys {keys}, pins {pins}) -> {target.value}" for event, keys, pins, target in self._story
        ]
        return "; ".join(told) or "added"


class Namespace:
    """The three name spaces of keys; a placeholder is in none of them (R4, R25)."""

    REQUEST: Final = 0
    PREFIX: Final = 1
    BLOCKS: Final = 2


#: (namespace, request or prefix id, model id); a blocks key has id 0.
Key = tuple[int, int, int]


def key_of(key: CacheKey | BlocksCacheKey) -> Key | None:
    """Return the table key of a public key, or None for a placeholder, which binds nothing (R4)."""
    if isinstance(key, BlocksCacheKey):
        return (Namespace.BLOCKS, 0, key.model_id)
    if key.prefix_id != INVALID_ID:
        return (Namespace.PREFIX, key.prefix_id, key.model_id)
    if key.req_id != INVALID_ID:
        return (Namespace.REQUEST, key.req_id, key.model_id)
    return None


@dataclass(slots=True, eq=False)
class Binding:
    """One binding of a key to a row. A later binding of the same key is another object with another id."""

    binding_id: int
    key: Key
    entry: Entry
    row: int
    guard: Any
    remaining: int  # bit t set: tensor t has not been pulled by this binding yet
    since: float = field(default_factory=time.monotonic)
    bound: bool = True
    pins: int = 0


@dataclass(slots=True, eq=False)
class Entry:
    """One cache. ``storage`` and ``guard`` belong to the caller; the registry only keeps and returns them.

    Attributes:
        pins: Peers that need its memory.
        holds: Calls of this process that do. Open while the cache can be found; opened and shut under the lock.
        closing: True while it is being unregistered: nobody finds it, and it may come back.
    """

    cache_id: int
    geometry: Geometry
    storage: Any
    guard: Any
    owned: bool
    remote_accessible: bool
    life: Lifecycle
    owner: bool = True
    bindings: dict[Key, Binding] = field(default_factory=dict)
    pins: int = 0
    holds: UseGate = field(default_factory=UseGate)
    closing: bool = False

    def close(self) -> None:
        """Let nobody find it, for as long as it is being unregistered."""
        self.closing = True
        self.holds.shut()

    def reopen(self, guard: object) -> None:
        """Let it be found again, under a newer guard, unless it is gone meanwhile."""
        self.closing = False
        self.guard = guard
        if self.owner or self.bindings:
            self.holds.open()

    def users(self) -> int:
        """Return how many need its memory; where nobody finds it any more no call is let in first."""
        if not self.owner and not self.bindings:
            self.holds.shut()
        return self.pins + self.holds.inside

    def binding_of_row(self, row: int) -> Binding | None:
        """Return the request-key binding of ``row``, if there is one."""
        return next((b for b in self.bindings.values() if b.row == row and b.key[0] == Namespace.REQUEST), None)


@dataclass(slots=True, eq=False)
class Pin:
    """A peer's (or, with ``peer`` None, a local call's) hold on an entry until it is released or expires."""

    pin_id: int
    peer: object
    entry: Entry
    row: int
    binding: Binding | None
    expires: float


@dataclass(slots=True)
class Effects:
    """What the caller must do now that the lock is gone: advance, then retire guards, then free entries' storages."""

    advance: list[Any] = field(default_factory=list)
    retire: list[Any] = field(default_factory=list)
    free: list[Entry] = field(default_factory=list)


#: The effects of what has none: a transfer that lets go of its cache has no other. Not to be changed.
NOTHING: Final = Effects()


def show_key(key: Key) -> str:
    """Return a table key the way a user wrote it, for messages."""
    namespace, number, model = key
    if namespace == Namespace.BLOCKS:
        return f"BlocksCacheKey(model_id={model})"
    name = "prefix_id" if namespace == Namespace.PREFIX else "req_id"
    return f"CacheKey({name}={number}, model_id={model})"


def check_tables(
    entries: Mapping[int, Entry],
    draining: Set[Entry],
    keys: Mapping[Key, Binding],
    pins: Mapping[int, Pin],
    pins_of: Mapping[object, int],
) -> None:
    """Raise AssertionError when the tables contradict each other. Under the registry's lock."""
    for key, binding in keys.items():
        _require(binding.bound and binding.entry.bindings.get(key) is binding, f"key {key} is not its entry's")
        _require(binding.remaining != 0, f"key {key} is bound though every tensor was pulled")
    for cache_id, entry in entries.items():
        name, state = entry.life.name, entry.life.state
        _require(entry.cache_id == cache_id, f"cache {cache_id} is filed under another id")
        _require(state in (State.LIVE, State.DEFERRED), f"{name}: {state}")
        _require(entry.owner == (state is State.LIVE), f"{name}: owner and state differ")
        _require(all(keys.get(k) is b for k, b in entry.bindings.items()), f"{name}: keys")
        _require(not (entry.closing and entry.owned), f"{name} is allocated, and is being unregistered")
        _require(entry.holds.is_open is not entry.closing, f"{name}: who may hold it is not who finds it")
    for entry in draining:
        needed = entry.pins + entry.holds.inside > 0 and not entry.holds.is_open
        _require(entry.life.state is State.DRAINING and needed, f"{entry.life.name} drains for nothing")
    _check_pins({*entries.values(), *draining}, keys, pins, pins_of)


def _check_pins(
    known: Set[Entry], keys: Mapping[Key, Binding], pins: Mapping[int, Pin], pins_of: Mapping[object, int]
) -> None:
    of_peer, of_binding, of_entry = (Counter[Any]() for _ in range(3))
    for pin in pins.values():
        of_peer[pin.peer] += 1
        of_entry[pin.entry] += 1
        if pin.binding is not None:
            of_binding[pin.binding] += 1
    _require(of_peer == pins_of, f"pins are {of_peer}, counted {pins_of}")
    bindings = {*keys.values(), *of_binding}
    _require(all(b.pins == of_binding[b] for b in bindings), "pins of a binding are miscounted")
    entries = {*known, *of_entry}
    _require(all(e.pins == of_entry[e] for e in entries), "pins of a cache are miscounted")
    lost = [pin.pin_id for pin in pins.values() if pin.entry.life.state is State.FREED]
    _require(not lost, f"pins {lost} hold a cache that was freed")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(f"registry: {what}")


def registry_statistics(registry: Registry) -> tuple[CacheStatistics, tuple[KeyStatistics, ...], int]:
    """Return (caches, keys, pins) at this moment."""
    entries, bindings, pins = registry.snapshot()
    states = [entry.life.state for entry in entries]
    caches = CacheStatistics(
        live=states.count(State.LIVE),
        deferred=states.count(State.DEFERRED),
        draining=states.count(State.DRAINING),
        allocated=sum(entry.owned for entry in entries),
        registered=sum(not entry.owned for entry in entries),
        nbytes=sum(entry.geometry.num_tensors * entry.geometry.tensor_bytes for entry in entries),
    )
    now = time.monotonic()
    keys = tuple(
        KeyStatistics(
            key=repr(binding.key),
            cache_id=binding.entry.cache_id,
            row=binding.row,
            age_seconds=now - binding.since,
            unconsumed_bytes=binding.remaining.bit_count() * binding.entry.geometry.stride,
        )
        for binding in bindings
    )
    return caches, keys, pins
