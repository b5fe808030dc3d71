"""The registry's keys (interface R2 to R5, R25), its limits, and many threads at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from llm_datadist import BlocksCacheKey, CacheKey, LLMStatusCode
from llm_datadist._cache.geometry import CacheKind
from llm_datadist._cache.registry import MAX_PINS_PER_PEER, key_of
from llm_datadist.errors import CacheNotFound, KeyInUse, LinkError
from tests.unit.ledger import LATER, TENSORS, Owner, P, Q, blocks, geometry, req

if TYPE_CHECKING:
    from collections.abc import Iterator


UNSET = 2**64 - 1


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.end()


# --- keys -------------------------------------------------------------------------------------------------------------


def test_r02_the_last_row_of_a_key_given_twice_wins(owner: Owner) -> None:
    entry = owner.add("a", req(1), req(2), req(1))
    assert owner.registry.find(key=req(1))[:2] == (entry, 2)
    assert owner.done.retired == {"a row 0"}
    owner.pulled(P, owner.pin(P, req(1)))
    assert owner.bound(req(2))


def test_r03_a_key_in_use_refuses_the_whole_cache(owner: Owner) -> None:
    deferred = owner.add("a", req(1))
    owner.drop(deferred)
    before = owner.registry.snapshot()
    with pytest.raises(KeyInUse, match=r"^key CacheKey\(req_id=1, model_id=0\) is bound to cache 1: ") as caught:
        owner.add("b", req(2), req(1))
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert owner.registry.snapshot() == before
    assert not owner.bound(req(2))
    assert owner.add("c").cache_id == 2


def test_r04_placeholders_are_no_keys() -> None:
    assert key_of(CacheKey(1, UNSET)) is None
    assert key_of(CacheKey(1, UNSET, 7)) is None
    spaces = [key_of(CacheKey(1, 0)), key_of(CacheKey(1, 0, 0, 0)), key_of(BlocksCacheKey(1, 0))]
    assert len(set(spaces)) == 3
    assert None not in spaces
    assert key_of(CacheKey(1, 5)) == key_of(CacheKey(2, 5))


def test_r05_layer_parts_of_all_peers_add_up_per_binding(owner: Owner) -> None:
    owner.add("a", req(1), req(2))
    owner.pulled(P, owner.pin(P, req(1)), 0, 2)
    owner.pulled(P, owner.pin(P, req(1)), 1, 2)
    owner.pulled(Q, owner.pin(Q, req(2)), 3, 1)
    assert owner.bound(req(1))
    owner.pulled(Q, owner.pin(Q, req(1)), 3, 1)
    assert not owner.bound(req(1))
    assert owner.bound(req(2))


@pytest.mark.parametrize(("first", "count"), [(0, 0), (-1, 5), (0, 5), (4, 1), (3, 2), (0, 2**60)])
def test_r05_a_release_with_impossible_tensors_consumes_nothing(owner: Owner, first: int, count: int) -> None:
    owner.add("a", req(1))
    pin = owner.pin(P, req(1))
    owner.pulled(P, pin, first, count)
    assert owner.registry.snapshot()[1][0].remaining == 0b1111
    assert owner.registry.snapshot()[2] == 0


def test_r05_prefix_keys_blocks_keys_and_registered_caches_are_never_consumed(owner: Owner) -> None:
    prefix = key_of(CacheKey(1, UNSET, 0, 5))
    assert prefix is not None
    owner.add("p", prefix)
    owner.add("b", blocks(), kind=CacheKind.BLOCKS)
    owner.add("r", req(1), owned=False)
    for key in (prefix, blocks(), req(1)):
        owner.pulled(P, owner.pin(P, key))
        assert owner.bound(key)


def test_r05_a_failed_pull_consumes_nothing(owner: Owner) -> None:
    owner.add("a", req(1))
    owner.failed(P, owner.pin(P, req(1)))
    assert owner.registry.snapshot()[1][0].remaining == 0b1111


def test_r05_a_pull_by_id_and_row_consumes_the_key_of_that_row(owner: Owner) -> None:
    entry = owner.add("a", req(1), req(2))
    owner.pulled(P, owner.registry.pin(P, LATER, cache_id=entry.cache_id, row=1))
    assert owner.bound(req(1))
    assert not owner.bound(req(2))


def test_r05_a_complete_push_consumes_the_key_of_its_row(owner: Owner) -> None:
    entry = owner.add("a", req(1), req(2))
    owner.done.apply(owner.registry.consume_row(entry.cache_id, 1, 0, 3))
    assert owner.bound(req(2))
    owner.done.apply(owner.registry.consume_row(entry.cache_id, 1, 3, 1))
    assert not owner.bound(req(2))
    for cache_id, row in ((entry.cache_id, 2), (99, 0)):
        owner.done.apply(owner.registry.consume_row(cache_id, row, 0, TENSORS))
    assert owner.bound(req(1))


def test_r25_a_key_of_a_registered_cache_is_removed(owner: Owner) -> None:
    entry = owner.add("r", req(1), owned=False)
    owner.remove(req(1))
    assert not owner.bound(req(1))
    assert owner.registry.lookup(entry.cache_id) is entry


def test_registered_caches_first_key_stays_blocks_newest_key_wins(owner: Owner) -> None:
    first = owner.add("first", req(1), owned=False)
    owner.add("second", req(1), req(2), req(2), owned=False)
    assert owner.registry.find(key=req(1))[0] is first
    assert owner.registry.find(key=req(2))[1] == 1
    assert owner.done.retired == {"second row 0", "second row 2"}
    owner.add("old", blocks(), owned=False, kind=CacheKind.BLOCKS)
    new = owner.add("new", blocks(), owned=False, kind=CacheKind.BLOCKS)
    assert owner.registry.find(key=blocks())[0] is new
    assert "old row 0" in owner.done.retired


# --- limits and threads -----------------------------------------------------------------------------------------------


def test_rows_and_ids_that_are_not_there_are_not_found(owner: Owner) -> None:
    entry = owner.add("a")
    for cache_id, row, text in (
        (99, 0, "cache_id: no cache with id 99 (never made, or freed)"),
        (-1, 0, "cache_id: no cache with id -1 (never made, or freed)"),
        (entry.cache_id, 3, "cache 1 has 3 rows, so no row 3"),
    ):
        with pytest.raises(CacheNotFound) as caught:
            owner.registry.find(cache_id=cache_id, row=row)
        assert str(caught.value) == text
    with pytest.raises(CacheNotFound, match=r"^key BlocksCacheKey\(model_id=3\) is not bound: not published yet, "):
        owner.registry.find(key=blocks(3))


def test_a_peer_that_never_releases_is_bounded_and_others_are_not_touched(owner: Owner) -> None:
    owner.add("a", req(1))
    pins = [owner.pin(P, req(1)) for _ in range(MAX_PINS_PER_PEER)]
    with pytest.raises(LinkError, match=r"^peer holds 4096 unreleased pins: ") as caught:
        owner.pin(P, req(1))
    assert caught.value.status_code is LLMStatusCode.LLM_LINK_BUSY
    owner.failed(Q, owner.pin(Q, req(1)))
    owner.failed(P, pins[0])
    owner.pin(P, req(1))


def test_many_threads_free_every_cache_exactly_once() -> None:
    owner = Owner()
    lock = threading.Lock()
    freed: list[object] = []

    def live(number: int) -> None:
        for turn in range(200):
            key = req(number * 1000 + turn)
            name = f"{number}.{turn}"
            entry, _ = owner.registry.add(geometry(CacheKind.CACHE, 3, 1), name, name, [(key, 0, key)], owned=True)
            pins = [owner.registry.pin(number, LATER, key=key) for _ in range(2)]
            effects = [owner.registry.drop_owner(entry.cache_id)]
            effects += [owner.registry.release(number, pin.pin_id, 0, 1, consume=True) for pin in pins]
            with lock:
                freed.extend(entry.storage for each in effects for entry in each.free)

    threads = [threading.Thread(target=live, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, freed)) == sorted(f"{n}.{turn}" for n in range(4) for turn in range(200))
    assert owner.registry.snapshot() == ([], [], 0)
    owner.registry.check_integrity()
