"""What the registry's model does not say: texts, namespaces, limits, states, and many threads at once.

The table of states and events is that of docs/interface.md: tests/test_docs.py.
"""

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from llm_datadist import BlocksCacheKey, CacheKey, LLMStatusCode
from llm_datadist._cache import registry as rules
from llm_datadist._cache.geometry import CacheKind
from llm_datadist._cache.registry import Binding, CacheState, Entry, Event, Key, Namespace, Registry, key_of
from llm_datadist._links.link import Link
from llm_datadist._policy import Permissions
from llm_datadist._transfer.access import AccessPolicy
from llm_datadist.errors import CacheNotFound, KeyInUse, LinkError, ParamError, StateError
from tests.unit.registry_model import geometry

UNSET, LATER = 2**64 - 1, 100.0


def req(number: int) -> Key:
    return Namespace.REQUEST, number, 0


def add(registry: Registry, name: str, *keys: Key, tensors: int = 4) -> Entry:
    """Add an allocated cache of three rows; storage and guards are names."""
    bindings = [(key, row, f"{name} row {row}") for row, key in enumerate(keys)]
    return registry.add(geometry(CacheKind.CACHE, 3, tensors), name, name, bindings, owned=True)[0]


def test_r04_placeholders_are_no_keys() -> None:
    assert key_of(CacheKey(1, UNSET)) is None
    assert key_of(CacheKey(1, UNSET, 7)) is None
    spaces = [key_of(CacheKey(1, 0)), key_of(CacheKey(1, 0, 0, 0)), key_of(BlocksCacheKey(1, 0))]
    assert len(set(spaces)) == 3
    assert None not in spaces
    assert key_of(CacheKey(1, 5)) == key_of(CacheKey(2, 5))


def test_refusals_name_the_key_the_cache_or_the_row_and_change_nothing() -> None:
    registry = Registry()
    registry.drop_owner(add(registry, "a", req(1)).cache_id)
    before = registry.snapshot()
    with pytest.raises(KeyInUse, match=r"^key CacheKey\(req_id=1, model_id=0\) is bound to cache 1: ") as in_use:
        add(registry, "b", req(2), req(1))
    assert in_use.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert registry.snapshot() == before
    assert add(registry, "c").cache_id == 2
    blocks, prefix = key_of(BlocksCacheKey(9, 3)), key_of(CacheKey(1, UNSET, 0, 5))
    for key, cache_id, row, text in (
        (None, 99, 0, "cache_id: no cache with id 99 (never made, or freed)"),
        (None, -1, 0, "cache_id: no cache with id -1 (never made, or freed)"),
        (None, 2, 3, "cache 2 has 3 rows, so no row 3"),
        (blocks, 0, 0, "key BlocksCacheKey(model_id=3) is not bound: not published yet, consumed, or removed"),
        (prefix, 0, 0, "key CacheKey(prefix_id=5, model_id=0) is not bound: not published yet, consumed, or removed"),
    ):
        with pytest.raises(CacheNotFound) as caught:
            registry.find(key=key, cache_id=cache_id, row=row)
        assert str(caught.value) == text
    with pytest.raises(CacheNotFound, match=r"^cache: no cache with id 99"):
        registry.begin_use(99)
    with pytest.raises(CacheNotFound, match="no pin 7 of this peer on cache 2: released, or expired"):
        registry.reach("peer", 2, 7)
    assert [len(registry.snapshot()[0]), len(registry.snapshot()[1]), registry.snapshot()[2]] == [2, 1, 0]


def test_a_cache_that_is_being_unregistered_is_not_found_until_it_is_opened_again() -> None:
    registry = Registry()
    owned = add(registry, "owned")
    entry = registry.add(geometry(CacheKind.CACHE, 3, 4), "r", "r", [(req(1), 0, "r row 0")], owned=False)[0]
    assert [registry.registered(cache_id) for cache_id in (owned.cache_id, entry.cache_id, 9)] == [None, entry, None]
    assert registry.begin_closing(entry)
    assert not registry.begin_closing(entry)
    assert registry.registered(entry.cache_id) is entry
    registry.check_integrity()
    for look in (
        lambda: registry.find(key=req(1)),
        lambda: registry.find(cache_id=entry.cache_id),
        lambda: registry.begin_use(entry.cache_id),
    ):
        with pytest.raises(CacheNotFound, match="cache 2 is being unregistered"):
            look()
    registry.reopen(entry, "newer")
    assert (entry.guard, registry.find(cache_id=entry.cache_id)[:2]) == ("newer", (entry, 0))
    assert registry.begin_use(entry.cache_id) is entry
    registry.check_integrity()
    assert registry.withdraw(entry.cache_id, owned=False).free == []
    assert not registry.begin_closing(entry)
    registry.reopen(entry, "late")  # finalize has dropped it meanwhile
    registry.check_integrity()
    assert registry.end_use(entry).free == [entry]


def test_a_cache_that_can_be_found_again_has_its_newer_guard() -> None:
    """Look-ups take no lock: one that comes between two statements of reopen() must not see the advanced guard."""
    found: list[object] = []

    class Watched(Entry):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if not getattr(self, "closing", True):
                found.append(self.guard)

    entry = Watched(1, geometry(CacheKind.CACHE, 3, 4), "r", "advanced", False, True, rules.Lifecycle("cache 1"))
    entry.closing = True
    found.clear()
    Registry().reopen(entry, "newer")
    assert found == ["newer"]


@pytest.mark.parametrize(
    ("break_it", "seen"),
    [
        (lambda entry, binding: setattr(binding, "bound", False), "is not its entry's"),
        (lambda entry, binding: entry.bindings.clear(), "is not its entry's"),
        (lambda entry, binding: setattr(binding, "remaining", 0), "though every tensor was pulled"),
        (lambda entry, binding: setattr(entry, "cache_id", 9), "is filed under another id"),
        (lambda entry, binding: setattr(entry.life, "state", CacheState.FREED), "cache 1: CacheState.FREED"),
        (lambda entry, binding: setattr(entry.life, "state", CacheState.DEFERRED), "owner and state differ"),
        (lambda entry, binding: entry.bindings.update({req(2): binding}), "cache 1: keys"),
        (lambda entry, binding: setattr(entry, "closing", True), "is allocated, and is being unregistered"),
        (lambda entry, binding: entry.uses.shut(), "its gate and its lookups differ"),
        (lambda entry, binding: setattr(binding, "pins", 2), "pins of a binding are miscounted"),
        (lambda entry, binding: setattr(entry, "pins", 2), "pins of a cache are miscounted"),
    ],
)
def test_the_integrity_check_sees_damage(break_it: Callable[[Entry, Binding], object], seen: str) -> None:
    registry = Registry()
    entry = add(registry, "a", req(1))
    assert registry.pin("p", LATER, key=req(1)).pin_id == 1
    registry.check_integrity()
    break_it(entry, entry.bindings[req(1)])
    with pytest.raises(AssertionError, match=seen):
        registry.check_integrity()


def test_a_peer_that_never_releases_is_bounded_and_others_are_not_touched() -> None:
    registry = Registry()
    add(registry, "a", req(1))
    pins = [registry.pin("p", LATER, key=req(1)) for _ in range(rules.MAX_PINS_PER_PEER)]
    with pytest.raises(LinkError, match=r"^peer holds 4096 unreleased pins: ") as caught:
        registry.pin("p", LATER, key=req(1))
    assert caught.value.status_code is LLMStatusCode.LLM_LINK_BUSY
    registry.release("q", registry.pin("q", LATER, key=req(1)).pin_id, 0, 4)  # of which nothing is consumed
    registry.release("p", pins[0].pin_id, -1, 1, consume=True)  # there is no such tensor
    registry.pin("p", LATER, key=req(1))


def test_a_pin_that_its_peer_has_named_is_of_that_peer_and_made_once() -> None:
    registry, name = Registry(), rules.FIRST_PEER_CHOSEN_PIN + 7
    entry = add(registry, "a", req(1))
    for peer in ("p", "q"):
        assert registry.pin(peer, LATER, key=req(1), pin_id=name).pin_id == name
        assert registry.reach(peer, entry.cache_id, name) is entry
    assert registry.pin("p", LATER, key=req(1)).pin_id == 1
    with pytest.raises(ParamError, match="in use"):
        registry.pin("p", LATER, key=req(1), pin_id=name)
    registry.check_integrity()
    registry.release("p", name)
    with pytest.raises(CacheNotFound):
        registry.reach("p", entry.cache_id, name)
    assert registry.reach("q", entry.cache_id, name) is entry
    # Released before it was asked for: by one peer, which does not concern the other.
    registry.release("p", name + 1)
    with pytest.raises(ParamError, match="released before"):
        registry.pin("p", LATER, key=req(1), pin_id=name + 1)
    registry.pin("q", LATER, key=req(1), pin_id=name + 1)
    assert (registry.snapshot()[2], registry.unknown_releases) == (3, 1)


def test_many_threads_free_every_cache_exactly_once() -> None:
    registry = Registry()

    def live(number: int) -> list[object]:
        effects = []
        for turn in range(200):
            key = req(number * 1000 + turn)
            entry = add(registry, f"{number}.{turn}", key, tensors=1)
            pins = [registry.pin(number, LATER, key=key) for _ in range(2)]
            effects.append(registry.drop_owner(entry.cache_id))
            effects += [registry.release(number, pin.pin_id, 0, 1, consume=True) for pin in pins]
        return [entry.storage for each in effects for entry in each.free]

    with ThreadPoolExecutor(4) as threads:
        for number, freed in enumerate(threads.map(live, range(4))):
            assert freed == [f"{number}.{turn}" for turn in range(200)]
    assert registry.snapshot() == ([], [], 0)
    registry.check_integrity()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collects garbage between instructions only")
def test_keys_may_go_while_they_are_looked_through_without_the_lock() -> None:
    """CPython 3.11 collects garbage wherever it allocates, and finalizers let other threads run."""
    store: Any = None
    peers: Any = SimpleNamespace(of=lambda _: Permissions(models=frozenset({1})))
    policy = AccessPolicy(store, peers)
    link: Any = object.__new__(Link)
    link.peer = SimpleNamespace(cluster_id=2)
    looks: tuple[Callable[[Entry], object], ...] = lambda entry: entry.binding_of_row(59), partial(policy.may_see, link)
    for look, threshold in itertools.product(looks, range(1, 12)):  # one of them collects during the copy
        registry = Registry()
        keys = [(req(number), number, f"row {number}") for number in range(60)]  # more than a free list's tuple holds
        entry = registry.add(geometry(CacheKind.CACHE, 60, 4), "a", "a", keys, owned=True)[0]
        with collecting(threshold, partial(registry.remove_key, req(0))):
            found = look(entry)
        assert found in (entry.bindings[req(59)], False)


@contextmanager
def collecting(threshold: int, call: Callable[[], object]) -> Iterator[None]:
    """Collect garbage after ``threshold`` allocations, and ``call`` then."""

    def collected(phase: str, _: object) -> None:
        if phase == "start":
            call()

    before = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(collected)
    gc.set_threshold(threshold)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
        gc.collect()


# --- the life of a cache, pair by pair: what the table allows leads where it says, everything else raises its story ---

#: What is left of (owner, keys, pins) says the state.
LEFT = {
    CacheState.LIVE: (True, 1, 1),
    CacheState.DEFERRED: (False, 1, 1),
    CacheState.DRAINING: (False, 0, 1),
    CacheState.FREED: (False, 0, 0),
}


def in_state(state: CacheState) -> rules.Lifecycle:
    """A life that came to ``state`` by legal events."""
    life = rules.Lifecycle("cache 7")
    life.transition(Event.BIND, owner=True, keys=1, pins=0)
    life.transition(Event.PIN, owner=True, keys=1, pins=1)
    if state is CacheState.DEFERRED:
        life.transition(Event.DROP_OWNER, owner=False, keys=1, pins=1)
    elif state is not CacheState.LIVE:
        life.transition(Event.WITHDRAW, owner=False, keys=0, pins=1)
    if state is CacheState.FREED:
        life.transition(Event.UNPIN, owner=False, keys=0, pins=0)
    assert life.state is state
    return life


def test_a_pair_of_state_and_event_leads_where_the_table_says_or_raises_with_the_story() -> None:
    for state, event in itertools.product(CacheState, Event):
        targets = rules.TRANSITIONS.get((state, event), frozenset())
        illegal = f"is illegal when {state.value}"
        for target, (owner, keys, pins) in LEFT.items():
            life = in_state(state)
            story = life.story()
            assert story.startswith("bind (keys 1, pins 0) -> live; pin (keys 1, pins 1) -> live")
            if target in targets:
                assert life.transition(event, owner=owner, keys=keys, pins=pins) is life.state is target
                assert life.story() == f"{story}; {event.value} (keys {keys}, pins {pins}) -> {target.value}"
                continue
            told = f"cannot lead from {state.value} to {target.value}" if targets else illegal
            with pytest.raises(StateError) as caught:
                life.transition(event, owner=owner, keys=keys, pins=pins)
            assert str(caught.value) == f"cache 7: {event.value} {told}; story: {story}"
            assert caught.value.status_code is LLMStatusCode.LLM_FAILED
            assert (life.state, life.story()) == (state, story)


def test_a_story_keeps_the_last_events_in_order() -> None:
    life = rules.Lifecycle("cache 1")
    assert life.story() == "added"
    for pins in range(1, 40):
        life.transition(Event.PIN, owner=True, keys=0, pins=pins)
    assert life.story() == "; ".join(f"pin (keys 0, pins {pins}) -> live" for pins in range(24, 40))
