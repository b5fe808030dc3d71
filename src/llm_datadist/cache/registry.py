"""Who still needs which cache: entries, keys, bindings, owners and pins (BEHAVIOUR §3, R2 to R5, R25, R27).

No I/O and no bytes: storages and guards are opaque values. Every mutator computes under the one lock and returns
:class:`Effects`: which guards to advance, which to retire, whose storages to free. The caller applies them after the
lock is gone, guards first, so that no reader can mistake reused memory for the cache it resolved.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from llm_datadist.cache.audit import check_tables
from llm_datadist.cache.entries import NOTHING, Binding, Effects, Entry, Key, Namespace, Pin, key_of, show_key
from llm_datadist.cache.layout import CacheKind
from llm_datadist.cache.lifecycle import Event, Lifecycle, State
from llm_datadist.errors import CacheNotFound, KeyInUse, LinkError, LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llm_datadist.cache.layout import Geometry

__all__ = ["Binding", "Effects", "Entry", "Key", "Namespace", "Pin", "Registry", "key_of"]

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
