"""References that keep caches alive: owner, keys, pins of peers, local uses (interface B3, R2 to R5, R25, R27).

No I/O and no bytes. Mutators compute under one lock and return :class:`Effects`. The caller applies these after it,
guards first, so no reader mistakes reused memory for the cache that it resolved.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from llm_datadist._cache.geometry import CacheKind, Geometry
from llm_datadist._checks import INVALID_ID, require_intact
from llm_datadist._native import UseGate
from llm_datadist.errors import CacheNotFound, KeyInUse, LinkError, LLMStatusCode, ParamError, StateError
from llm_datadist.metrics import CacheStatistics, KeyStatistics
from llm_datadist.types import BlocksCacheKey, CacheKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MAX_PINS_PER_PEER: Final = 4096  # bounds the cost of a peer that never releases
DRAIN: Final = "drain"  # phase of errors about a cache that is being unregistered
FIRST_PEER_CHOSEN_PIN: Final = 1 << 62  # peers number their pins from here on; the registry's own numbers are below


class Namespace:
    """Name spaces of keys; a placeholder is in none (interface R4, R25)."""

    REQUEST: Final = 0
    PREFIX: Final = 1
    BLOCKS: Final = 2


#: (namespace, request or prefix id, model id); blocks keys have id 0.
Key = tuple[int, int, int]


def key_of(key: CacheKey | BlocksCacheKey) -> Key | None:
    """Return the table key; None for a placeholder (interface R4)."""
    if isinstance(key, BlocksCacheKey):
        return (Namespace.BLOCKS, 0, key.model_id)
    if key.prefix_id != INVALID_ID:
        return (Namespace.PREFIX, key.prefix_id, key.model_id)
    if key.req_id != INVALID_ID:
        return (Namespace.REQUEST, key.req_id, key.model_id)
    return None


def _show_key(key: Key) -> str:
    namespace, number, model = key
    if namespace == Namespace.BLOCKS:
        return f"BlocksCacheKey(model_id={model})"
    name = "prefix_id" if namespace == Namespace.PREFIX else "req_id"
    return f"CacheKey({name}={number}, model_id={model})"


class CacheState(Enum):
    LIVE = "live"
    DEFERRED = "deferred"
    DRAINING = "draining"
    FREED = "freed"

    __hash__ = object.__hash__  # faster: Enum.__hash__ is Python code


class Event(Enum):
    BIND = "bind"
    UNBIND = "unbind"
    PIN = "pin"
    UNPIN = "unpin"
    DROP_OWNER = "drop owner"
    WITHDRAW = "withdraw"  # owner and keys at once: blocks caches, registered caches, finalize

    __hash__ = object.__hash__  # as CacheState


_L, _D, _P, _F = CacheState.LIVE, CacheState.DEFERRED, CacheState.DRAINING, CacheState.FREED

#: (state, event) -> possible states; other pairs are illegal. The remaining references decide: owner -> LIVE, keys ->
#: DEFERRED, only users -> DRAINING, none -> FREED.
TRANSITIONS: Final[dict[tuple[CacheState, Event], frozenset[CacheState]]] = {
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


@dataclass(slots=True, eq=False)
class Lifecycle:
    """State of one entry and its last 16 events. Used under the registry's lock."""

    name: str
    state: CacheState = CacheState.LIVE
    _history: deque[tuple[Event, int, int, CacheState]] = field(default_factory=partial(deque, maxlen=16))

    def require(self, event: Event) -> frozenset[CacheState]:
        """Return the states after ``event``; StateError, with the history, if it is illegal."""
        if (targets := TRANSITIONS.get((self.state, event))) is None:
            raise StateError(f"{self.name}: {event.value} is illegal when {self.state.value}; story: {self.story()}")
        return targets

    def transition(self, event: Event, *, owner: bool, keys: int, pins: int) -> CacheState:
        """Enter the state that the references imply."""
        targets = self.require(event)
        target = _L if owner else _D if keys else _P if pins else _F
        if target not in targets:
            raise StateError(
                f"{self.name}: {event.value} cannot lead from {self.state.value} to {target.value}; "
                f"story: {self.story()}"
            )
        self.state = target
        self._history.append((event, keys, pins, target))  # formatted only for an error
        return target

    def story(self) -> str:
        events = [f"{event.value} (keys {keys}, pins {pins}) -> {to.value}" for event, keys, pins, to in self._history]
        return "; ".join(events) or "added"


@dataclass(slots=True, eq=False)
class Binding:
    """Binding of a key to a row; a later one is another object."""

    key: Key
    entry: Entry
    row: int
    guard: Any
    remaining: int  # bit t: tensor t was not pulled yet
    since: float = field(default_factory=time.monotonic)
    bound: bool = True
    pins: int = 0

    @property
    def consumable(self) -> bool:
        """True for a request key of an allocated cache (interface R5)."""
        return self.entry.owned and self.key[0] == Namespace.REQUEST


@dataclass(slots=True, eq=False)
class Entry:
    """One cache. ``storage`` and ``guard`` are the caller's."""

    cache_id: int
    geometry: Geometry
    storage: Any
    guard: Any
    owned: bool
    remote_accessible: bool
    life: Lifecycle
    owner: bool = True  # False once its owner has given it back
    bindings: dict[Key, Binding] = field(default_factory=dict)
    pins: int = 0  # of peers
    uses: UseGate = field(default_factory=UseGate)  # local; open while the cache can be found; changes under the lock
    closing: bool = False  # True while the cache is being unregistered
    kept: object = field(default=None, repr=False)  # what keeps registered memory, while anybody uses it

    @property
    def reachable(self) -> bool:
        """True if the cache is LIVE or DEFERRED."""
        return self.owner or bool(self.bindings)

    def binding_of_row(self, row: int) -> Binding | None:
        """Return the request-key binding of ``row``."""
        # A copy: another thread may bind a key meanwhile. Not tuple(): a garbage collection inside it lets threads run.
        bindings = list(self.bindings.values())
        return next((b for b in bindings if b.row == row and b.key[0] == Namespace.REQUEST), None)


@dataclass(slots=True, eq=False)
class Pin:
    """Protection of an entry's memory for a peer, until release or expiry."""

    pin_id: int
    peer: object
    entry: Entry
    row: int
    binding: Binding | None
    expires: float
    served: int | None = None  # bit t: this process agreed to send tensor t; None if the peer reads the memory itself


def _tensors(entry: Entry, first: int, count: int) -> int:
    """Return the bits of tensors [first, first + count); 0 if the cache lacks one."""
    if count < 1 or first < 0 or first + count > entry.geometry.num_tensors:
        return 0
    return ((1 << count) - 1) << first


@dataclass(slots=True)
class Effects:
    """Work for after the lock: advance guards, retire guards, free storages, in this order."""

    advance: list[Any] = field(default_factory=list)
    retire: list[Any] = field(default_factory=list)
    free: list[Entry] = field(default_factory=list)


class Registry:
    """Caches, keys and pins of one LLMDataDist. Ids count from ``first_id``.

    Threads: any; one lock, under which nothing waits and no user code runs. Look-ups need none.
    Errors: a refused call changes nothing.
    """

    def __init__(self, first_id: int = 1) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, Entry] = {}
        #: Returns the entry of an id, or None, without a call of Python.
        self.entry_of: Callable[[int], Entry | None] = self._entries.get
        self._keys: dict[Key, Binding] = {}
        self._pins: dict[tuple[object, int], Pin] = {}  # by peer and number
        self._pins_of: dict[object, int] = {}  # peer -> its pins; absent: none
        self._draining: set[Entry] = set()
        self.next_id = first_id
        self._next_pin = 1
        #: Pins released before their peer asked for them, over another connection. By id() of the peer: a wrong match
        #: only refuses a pin.
        self._early_releases: deque[tuple[int, int]] = deque(maxlen=64)
        self.unknown_releases = 0

    def require_free(self, keys: Iterable[Key]) -> None:
        """Raise KeyInUse if a key is bound (interface R3). Without the lock an early check: :meth:`add` decides."""
        for key in keys:
            if (binding := self._keys.get(key)) is not None:
                cache = binding.entry.cache_id
                raise KeyInUse(f"key {_show_key(key)} is bound to cache {cache}: remove or pull it first")

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
        """Add a cache with its ``(key, row, guard)`` bindings.

        For an allocated cache (``owned``) a bound key is KeyInUse, and of two equal keys the last wins (interface R2).
        A registered cache refuses no key (interface §6.6): a continuous one leaves a bound key, others take it over.
        """
        effects = Effects()
        with self._lock:
            if owned:
                self.require_free(key for key, _, _ in keys)
            life = Lifecycle(f"cache {self.next_id}")
            entry = Entry(self.next_id, geometry, storage, guard, owned, remote_accessible, life)
            self.next_id += 1
            self._entries[entry.cache_id] = entry
            for key, row, key_guard in keys:
                self._bind(entry, key, row, key_guard, effects)
            return entry, effects

    def drop_owner(self, cache_id: int) -> Effects:
        """End the owner's need of an allocated cache; ignore any other id.

        A blocks cache loses its key now (interface R27); a continuous one lives until its keys are consumed.
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
                self._transition(entry, Event.DROP_OWNER, effects)
        return effects

    def remove_key(self, key: Key) -> Effects:
        """Unbind ``key``, also of a registered cache (interface R25), if it is bound."""
        effects = Effects()
        with self._lock:
            if (binding := self._keys.get(key)) is not None:
                self._unbind(binding, effects, invalidate=True)
        return effects

    def withdraw(self, cache_id: int, *, owned: bool) -> Effects:
        """Drop an allocated (``owned``) or a registered cache and its keys; ignore any other id."""
        effects = Effects()
        with self._lock:
            if (entry := self._entries.get(cache_id)) is not None and entry.owned is owned and entry.owner:
                self._withdraw(entry, effects)
        return effects

    def registered(self, cache_id: int) -> Entry | None:
        """Return the registered cache, even one being unregistered, or None."""
        entry = self._entries.get(cache_id)
        return None if entry is None or entry.owned else entry

    def begin_closing(self, entry: Entry) -> bool:
        """Make lookups fail; return False if the cache is gone or already closing."""
        with self._lock:
            if entry.closing or self._entries.get(entry.cache_id) is not entry:
                return False
            entry.closing = True
            entry.uses.shut()
            return True

    def reopen(self, entry: Entry, guard: object) -> None:
        """Undo :meth:`begin_closing`, under a newer guard."""
        with self._lock:
            entry.guard = guard  # first, because look-ups take no lock
            entry.closing = False
            if entry.reachable:  # else finalize has dropped it
                entry.uses.open()

    def clear(self) -> Effects:
        """Drop every owner, key and pin, for finalize."""
        effects = Effects()
        with self._lock:
            for entry in list(self._entries.values()):
                self._withdraw(entry, effects)
            for pin in list(self._pins.values()):
                self._unpin(pin, effects)
        return effects

    def lookup(self, cache_id: int, what: object = "cache") -> Entry:
        """Return the entry, also if deallocated with unconsumed keys, or raise CacheNotFound."""
        if (entry := self._entries.get(cache_id)) is None:
            raise CacheNotFound(f"{what}: no cache with id {cache_id} (never made, or freed)")
        if entry.closing:
            raise CacheNotFound(f"{what}: cache {cache_id} is being unregistered", phase=DRAIN)
        return entry

    def begin_use(self, cache_id: int, what: object = "cache") -> Entry:
        """Look a cache up as :meth:`lookup`; keep its memory until :meth:`end_use`."""
        with self._lock:
            entry = self.lookup(cache_id, what)
            entry.uses.enter()  # no event: a use changes no state of an open cache
            return entry

    def end_use(self, entry: Entry) -> Effects:
        """End a use, which may be the last of a DRAINING cache."""
        entry.uses.leave()
        return self.last_left(entry)

    def last_left(self, entry: Entry) -> Effects:
        """Take note that a user has left; the last one of a DRAINING cache frees it."""
        effects = Effects()
        with self._lock:
            if entry.life.state is CacheState.DRAINING:
                self._transition(entry, Event.UNPIN, effects)
        return effects

    def find(self, *, key: Key | None = None, cache_id: int = 0, row: int = 0) -> tuple[Entry, int, Binding | None]:
        """Return (entry, row, binding) of a key, or of a cache id and row; CacheNotFound (interface B8)."""
        if key is not None:
            if (binding := self._keys.get(key)) is None:
                raise CacheNotFound(f"key {_show_key(key)} is not bound: not published yet, consumed, or removed")
            return self.lookup(binding.entry.cache_id), binding.row, binding
        entry = self.lookup(cache_id, "cache_id")
        if row >= entry.geometry.rows:
            raise CacheNotFound(f"cache {cache_id} has {entry.geometry.rows} rows, so no row {row}")
        return entry, row, entry.binding_of_row(row)

    def pin(
        self, peer: object, expires: float, *, key: Key | None = None, cache_id: int = 0, row: int = 0, pin_id: int = 0
    ) -> Pin:
        """Pin the cache that :meth:`find` returns, until the peer releases it or is lost, or until ``expires``.

        ``expires`` is monotonic, in seconds; ``pin_id`` the peer's number, or 0 for one of the registry's. ParamError
        if that is in use or was released; LinkError (``LLM_LINK_BUSY``) if the peer holds 4096 pins.
        """
        with self._lock:
            entry, found_row, binding = self.find(key=key, cache_id=cache_id, row=row)
            if pin_id and ((peer, pin_id) in self._pins or (id(peer), pin_id) in self._early_releases):
                raise ParamError(f"pin {pin_id} of this peer is in use, or was released before")
            held = self._pins_of.get(peer, 0)
            if held >= MAX_PINS_PER_PEER:
                text = f"peer holds {MAX_PINS_PER_PEER} unreleased pins: no more until it releases some"
                raise LinkError(text, status_code=LLMStatusCode.LLM_LINK_BUSY)
            entry.life.require(Event.PIN)
            pin = Pin(pin_id or self._next_pin, peer, entry, found_row, binding, expires)
            if not pin_id:
                self._next_pin += 1
            self._pins[peer, pin.pin_id] = pin
            self._pins_of[peer] = held + 1
            entry.pins += 1
            if binding is not None:
                binding.pins += 1
            self._transition(entry, Event.PIN, Effects())
            return pin

    def reach(
        self, peer: object, cache_id: int, pin_id: int, *, use: bool = False, serve: tuple[int, int] | None = None
    ) -> Entry:
        """Return a cache for a peer: by its pin, even if DRAINING, or by id if ``pin_id`` is 0.

        With ``use``, begin a use. ``serve`` is (first, count) of tensors to send to the peer.
        """
        with self._lock:
            pin = self._pins.get((peer, pin_id))
            if pin_id and (pin is None or pin.entry.cache_id != cache_id):
                raise CacheNotFound(f"no pin {pin_id} of this peer on cache {cache_id}: released, or expired")
            entry = pin.entry if pin is not None else self.lookup(cache_id, "cache_id")
            if serve is not None and pin is not None:
                pin.served = (pin.served or 0) | _tensors(entry, *serve)
            if use:
                entry.uses.enter()  # no event, as in begin_use
            return entry

    def release(self, peer: object, pin_id: int, first: int = 0, count: int = 0, *, consume: bool = False) -> Effects:
        """End a pin of ``peer``; with ``consume``, count tensors [first, first + count) as pulled.

        Of tensors that this process sends, only those count that it agreed to send. Only the pin's binding is consumed,
        no later one (interface R5). An unknown pin (expired, or of a lost peer) is counted and ignored.
        """
        effects = Effects()
        with self._lock:
            if (pin := self._pins.get((peer, pin_id))) is None:
                self.unknown_releases += 1
                if pin_id >= FIRST_PEER_CHOSEN_PIN:
                    self._early_releases.append((id(peer), pin_id))
                return effects
            if consume and pin.binding is not None:
                pulled = _tensors(pin.entry, first, count)
                self._consume(pin.binding, pulled if pin.served is None else pulled & pin.served, effects)
            self._unpin(pin, effects)
        return effects

    def consume_row(self, cache_id: int, row: int, first: int, count: int) -> Effects:
        """Count tensors of a row as pushed; the last consumes its key (interface R5)."""
        effects = Effects()
        with self._lock:
            entry = self._entries.get(cache_id)
            binding = entry.binding_of_row(row) if entry is not None else None
            if binding is not None:
                self._consume(binding, _tensors(binding.entry, first, count), effects)
        return effects

    def drop_peer(self, peer: object) -> Effects:
        """End the pins of a lost peer; the keys stay (interface R5)."""
        return self._unpin_all(lambda pin: pin.peer is peer)

    def expire(self, now: float) -> Effects:
        """End the pins whose time is over."""
        return self._unpin_all(lambda pin: pin.expires <= now)

    def _unpin_all(self, ended: Callable[[Pin], bool]) -> Effects:
        effects = Effects()
        with self._lock:
            for pin in [pin for pin in self._pins.values() if ended(pin)]:
                self._unpin(pin, effects)
        return effects

    def snapshot(self) -> tuple[list[Entry], list[Binding], int]:
        """Return (entries with memory, bindings, number of pins)."""
        with self._lock:
            return [*self._entries.values(), *self._draining], list(self._keys.values()), len(self._pins)

    def statistics(self) -> tuple[CacheStatistics, tuple[KeyStatistics, ...], int]:
        entries, bindings, pins = self.snapshot()
        states = [entry.life.state for entry in entries]
        caches = CacheStatistics(
            live=states.count(CacheState.LIVE),
            deferred=states.count(CacheState.DEFERRED),
            draining=states.count(CacheState.DRAINING),
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
                unconsumed_bytes=binding.consumable * binding.remaining.bit_count() * binding.entry.geometry.stride,
            )
            for binding in bindings
        )
        return caches, keys, pins

    def check_integrity(self) -> None:
        with self._lock:
            self._check_entries()
            self._check_pins()

    def _bind(self, entry: Entry, key: Key, row: int, guard: object, effects: Effects) -> None:
        if (old := self._keys.get(key)) is not None:
            if not entry.owned and entry.geometry.kind is CacheKind.CACHE:  # the first wins
                effects.retire.append(guard)
                return
            self._unbind(old, effects, invalidate=True)
        every_tensor = (1 << entry.geometry.num_tensors) - 1
        self._keys[key] = entry.bindings[key] = Binding(key, entry, row, guard, every_tensor)
        self._transition(entry, Event.BIND, effects)

    def _unbind(self, binding: Binding, effects: Effects, *, invalidate: bool) -> None:
        """Remove a key; with ``invalidate``, readers of this binding fail."""
        del self._keys[binding.key]
        del binding.entry.bindings[binding.key]
        binding.bound = False
        if binding.pins == 0:
            effects.retire.append(binding.guard)
        elif invalidate:
            effects.advance.append(binding.guard)
        self._transition(binding.entry, Event.UNBIND, effects)

    def _consume(self, binding: Binding, tensors: int, effects: Effects) -> None:
        if not (binding.bound and binding.consumable and tensors):
            return
        binding.remaining &= ~tensors
        if binding.remaining == 0:
            self._unbind(binding, effects, invalidate=False)

    def _unpin(self, pin: Pin, effects: Effects) -> None:
        del self._pins[pin.peer, pin.pin_id]
        self._pins_of[pin.peer] -= 1
        if not self._pins_of[pin.peer]:
            del self._pins_of[pin.peer]
        if (binding := pin.binding) is not None:
            binding.pins -= 1
            if binding.pins == 0 and not binding.bound:
                effects.retire.append(binding.guard)
        pin.entry.pins -= 1
        self._transition(pin.entry, Event.UNPIN, effects)

    def _withdraw(self, entry: Entry, effects: Effects) -> None:
        """Drop owner and keys, so readers fail; the last user frees the memory."""
        entry.life.require(Event.WITHDRAW)
        entry.owner = False
        for binding in entry.bindings.values():
            del self._keys[binding.key]
            binding.bound = False
            (effects.advance if binding.pins else effects.retire).append(binding.guard)
        entry.bindings.clear()
        effects.advance.append(entry.guard)
        self._transition(entry, Event.WITHDRAW, effects)

    def _transition(self, entry: Entry, event: Event, effects: Effects) -> None:
        if not entry.reachable:
            entry.uses.shut()  # before users are counted, so no new one can enter
        users = entry.pins + entry.uses.inside
        state = entry.life.transition(event, owner=entry.owner, keys=len(entry.bindings), pins=users)
        if state is CacheState.DRAINING or state is CacheState.FREED:
            self._entries.pop(entry.cache_id, None)
        if state is CacheState.DRAINING:
            self._draining.add(entry)
        elif state is CacheState.FREED:
            self._draining.discard(entry)
            effects.retire.append(entry.guard)
            effects.free.append(entry)

    def _check_entries(self) -> None:
        for key, binding in self._keys.items():
            filed = binding.entry.bindings.get(key) is binding
            require_intact(binding.bound and filed, f"key {key} is not its entry's")
            require_intact(binding.remaining != 0, f"key {key} is bound though every tensor was pulled")
        for cache_id, entry in self._entries.items():
            name, state = entry.life.name, entry.life.state
            require_intact(entry.cache_id == cache_id, f"cache {cache_id} is filed under another id")
            require_intact(state in (CacheState.LIVE, CacheState.DEFERRED), f"{name}: {state}")
            require_intact(entry.owner == (state is CacheState.LIVE), f"{name}: owner and state differ")
            require_intact(all(self._keys.get(k) is b for k, b in entry.bindings.items()), f"{name}: keys")
            require_intact(not (entry.closing and entry.owned), f"{name} is allocated, and is being unregistered")
            require_intact(entry.uses.is_open is not entry.closing, f"{name}: its gate and its lookups differ")
        for entry in self._draining:
            used = entry.pins + entry.uses.inside > 0 and not entry.uses.is_open
            require_intact(entry.life.state is CacheState.DRAINING and used, f"{entry.life.name} drains for nothing")

    def _check_pins(self) -> None:
        pins = self._pins.values()
        of_peer, of_entry = Counter(pin.peer for pin in pins), Counter(pin.entry for pin in pins)
        of_binding = Counter(pin.binding for pin in pins if pin.binding is not None)
        require_intact(of_peer == self._pins_of, f"pins are {of_peer}, counted {self._pins_of}")
        bindings = {*self._keys.values(), *of_binding}
        require_intact(all(b.pins == of_binding[b] for b in bindings), "pins of a binding are miscounted")
        entries = {*self._entries.values(), *self._draining, *of_entry}
        require_intact(all(e.pins == of_entry[e] for e in entries), "pins of a cache are miscounted")
        lost = [pin.pin_id for pin in pins if pin.entry.life.state is CacheState.FREED]
        require_intact(not lost, f"pins {lost} hold a cache that was freed")
