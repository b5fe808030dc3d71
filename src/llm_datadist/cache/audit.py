"""The audit of the registry's tables: what must agree whenever its lock is free."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from llm_datadist.cache.lifecycle import State

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from llm_datadist.cache.entries import Binding, Entry, Key, Pin

__all__ = ["check_tables"]


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
