"""The registry: walk 2 of docs/architecture.md and its other exits, each by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from llm_datadist._cache.geometry import CacheKind
from llm_datadist._cache.registry import State
from llm_datadist.errors import CacheNotFound
from tests.unit.ledger import LATER, Owner, P, Q, blocks, req

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.end()


# --- walk 2 -----------------------------------------------------------------------------------------------------------


def test_walk_2_allocate_pull_deallocate_consumed_freed(owner: Owner) -> None:
    entry = owner.add("a", req(1))
    pin = owner.pin(P, req(1))
    owner.drop(entry)
    assert (entry.life.state, owner.done.freed, owner.void("a")) == (State.DEFERRED, set(), False)
    owner.pulled(P, pin)
    assert (entry.life.state, owner.done.freed) == (State.FREED, {"a"})
    assert owner.done.retired == {"a", "a row 0"}
    assert not owner.bound(req(1))


# --- other exits ------------------------------------------------------------------------------------------------------


def test_exit_remove_cache_key_before_deallocate(owner: Owner) -> None:
    entry = owner.add("a", req(1))
    owner.remove(req(1))
    assert not owner.bound(req(1))
    assert (owner.done.retired, owner.done.freed) == ({"a row 0"}, set())
    owner.drop(entry)
    assert (entry.life.state, owner.done.freed) == (State.FREED, {"a"})


def test_exit_remove_cache_key_after_deallocate(owner: Owner) -> None:
    entry = owner.add("a", req(1), req(2))
    owner.drop(entry)
    owner.remove(req(1))
    assert (entry.life.state, owner.done.freed) == (State.DEFERRED, set())
    owner.remove(req(2))
    assert (entry.life.state, owner.done.freed) == (State.FREED, {"a"})


def test_exit_remove_cache_key_while_it_is_pulled_fails_that_reader_only(owner: Owner) -> None:
    entry = owner.add("a", req(1), req(2))
    pin, other = owner.pin(P, req(1)), owner.pin(P, req(2))
    owner.remove(req(1))
    assert owner.void("a row 0")
    assert not owner.void("a row 1")
    assert not owner.void("a")
    assert "a row 0" not in owner.done.retired
    owner.drop(entry)
    owner.pulled(P, other)
    assert (entry.life.state, owner.done.freed) == (State.DRAINING, set())
    owner.pulled(P, pin)
    assert owner.done.freed == {"a"}
    assert owner.done.retired == {"a", "a row 0", "a row 1"}


def test_exit_two_peers_pull_one_key_at_once_and_both_finish(owner: Owner) -> None:
    entry = owner.add("a", req(1))
    first, second = owner.pin(P, req(1)), owner.pin(Q, req(1))
    owner.drop(entry)
    owner.pulled(P, first)
    assert not owner.bound(req(1))
    assert (entry.life.state, owner.done.freed) == (State.DRAINING, set())
    assert not owner.void("a")
    assert not owner.void("a row 0")
    owner.pulled(Q, second)
    assert (owner.done.freed, owner.done.retired) == ({"a"}, {"a", "a row 0"})
    assert owner.done.advanced == set()


def test_exit_key_bound_again_while_a_pull_of_the_old_binding_runs(owner: Owner) -> None:
    old = owner.add("old", req(1))
    pin = owner.pin(P, req(1))
    owner.remove(req(1))
    owner.drop(old)
    new = owner.add("new", req(1))
    owner.pulled(P, pin)
    assert owner.done.freed == {"old"}
    assert owner.registry.find(key=req(1))[0] is new
    assert not owner.void("new")
    assert not owner.void("new row 0")
    owner.pulled(P, owner.pin(P, req(1)))
    assert not owner.bound(req(1))


def test_exit_blocks_key_bound_again_by_a_newer_cache_fails_readers_of_the_old_binding(owner: Owner) -> None:
    entry = owner.add("a", blocks(), kind=CacheKind.BLOCKS)
    pin = owner.pin(P, blocks())
    again = owner.add("b", blocks(), owned=False, kind=CacheKind.BLOCKS)
    assert owner.void("a row 0")
    assert not owner.void("a")
    owner.failed(P, pin)
    assert owner.registry.find(key=blocks())[0] is again
    assert owner.registry.lookup(entry.cache_id) is entry


def test_exit_peer_lost_after_the_pin_keeps_the_key(owner: Owner) -> None:
    entry = owner.add("a", req(1))
    pin, other = owner.pin(P, req(1)), owner.pin(Q, req(1))
    owner.drop(entry)
    owner.done.apply(owner.registry.drop_peer(P))
    assert owner.bound(req(1))
    assert owner.registry.snapshot()[2] == 1
    owner.pulled(P, pin)
    assert owner.registry.unknown_releases == 1
    assert owner.bound(req(1))
    owner.pulled(Q, other)
    assert owner.done.freed == {"a"}


def test_exit_lease_end_frees_what_nobody_needs_and_keeps_the_key(owner: Owner) -> None:
    keyed, unkeyed = owner.add("keyed", req(1)), owner.add("unkeyed")
    late = owner.pin(P, req(1), expires=5.0)
    owner.registry.pin(P, 5.0, cache_id=unkeyed.cache_id)
    owner.drop(keyed)
    owner.drop(unkeyed)
    owner.done.apply(owner.registry.expire(4.9))
    assert (unkeyed.life.state, owner.done.freed) == (State.DRAINING, set())
    owner.done.apply(owner.registry.expire(5.0))
    assert owner.done.freed == {"unkeyed"}
    assert "unkeyed" in owner.done.retired
    assert owner.bound(req(1))
    owner.pulled(P, late)
    assert owner.registry.unknown_releases == 1
    assert owner.bound(req(1))


def test_exit_blocks_cache_drops_owner_and_key_at_once_and_memory_with_the_last_pin(owner: Owner) -> None:
    entry = owner.add("b", blocks(), kind=CacheKind.BLOCKS)
    pins = owner.pin(P, blocks()), owner.pin(Q, blocks())
    owner.drop(entry)
    assert not owner.bound(blocks())
    assert owner.void("b")
    assert owner.void("b row 0")
    assert (entry.life.state, owner.done.freed) == (State.DRAINING, set())
    with pytest.raises(CacheNotFound):
        owner.registry.pin(P, LATER, cache_id=entry.cache_id)
    owner.failed(P, pins[0])
    assert owner.done.freed == set()
    owner.failed(Q, pins[1])
    assert (owner.done.freed, owner.done.retired) == ({"b"}, {"b", "b row 0"})


def test_exit_unregister_fails_readers_at_once_and_waits_for_our_own_calls(owner: Owner) -> None:
    entry = owner.add("r", req(1), owned=False)
    held = owner.registry.begin_use(entry.cache_id)
    owner.done.apply(owner.registry.unregister(entry.cache_id))
    assert owner.void("r")
    assert not owner.bound(req(1))
    assert (entry.life.state, owner.done.freed) == (State.DRAINING, set())
    with pytest.raises(CacheNotFound):
        owner.registry.begin_use(entry.cache_id)
    owner.done.apply(owner.registry.end_use(held))
    assert owner.done.freed == {"r"}


def test_exit_finalize_frees_everything_pinned_or_not(owner: Owner) -> None:
    live, deferred = owner.add("live", req(1)), owner.add("deferred", req(2))
    owner.add("blocks", blocks(), kind=CacheKind.BLOCKS)
    owner.add("registered", req(3), owned=False)
    draining = owner.add("draining")
    owner.pin(P, req(1))
    owner.registry.pin(Q, LATER, cache_id=draining.cache_id)
    owner.drop(deferred)
    owner.drop(draining)
    assert draining.life.state is State.DRAINING
    owner.done.apply(owner.registry.clear())
    assert owner.done.freed == {"live", "deferred", "blocks", "registered", "draining"}
    assert live.life.state is State.FREED
    assert owner.registry.snapshot() == ([], [], 0)


def test_exit_deallocate_of_a_row_and_block_cache_goes_at_once_as_a_blocks_cache_does(owner: Owner) -> None:
    entry = owner.add("a", kind=CacheKind.MIX)
    owner.registry.begin_use(entry.cache_id)
    owner.drop(entry)
    assert owner.void("a")  # peers that kept where it is must not wait for our own call to end
    assert (entry.life.state, owner.done.freed) == (State.DRAINING, set())
    owner.done.apply(owner.registry.end_use(entry))
    assert (entry.life.state, owner.done.freed) == (State.FREED, {"a"})
