"""Guards: generations only grow, peers can read and not write them, the cookie names the table."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist._memory.guards import SLOT_BYTES, GuardTable, read_cookie, slot_address
from llm_datadist._memory.segment import F_SEAL_FUTURE_WRITE, ExternalSegment, SharedSegment
from llm_datadist._native import GuardSet, advance_generation, load_generation
from llm_datadist.errors import OutOfMemory, ParamError, ProtocolError, StateError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def table() -> Iterator[GuardTable]:
    """A table with room for eight guards."""
    table = GuardTable(slots=9)
    yield table
    table.check_integrity()
    table.close()


@pytest.fixture
def peer(table: GuardTable) -> Iterator[SharedSegment]:
    """The table as a peer maps it."""
    with SharedSegment.attach(os.dup(table.segment.fd), table.segment.nbytes, writable=False) as peer:
        yield peer


def test_a_new_guard_shows_its_generation_which_is_never_zero(table: GuardTable) -> None:
    guards = [table.allocate() for _ in range(8)]
    assert sorted(guard.slot for guard in guards) == list(range(1, 9))
    assert all(guard.generation > 0 and table.load(guard.slot) == guard.generation for guard in guards)
    assert (table.live, table.capacity) == (8, 8)


def test_advance_changes_one_slot_and_returns_its_new_generation(table: GuardTable) -> None:
    one, two = table.allocate(), table.allocate()
    assert table.advance(one.slot) == one.generation + 1 == table.load(one.slot)
    assert table.load(two.slot) == two.generation


def test_release_voids_the_guard_at_once(table: GuardTable) -> None:
    guard = table.allocate()
    table.release(guard.slot)
    assert table.load(guard.slot) > guard.generation
    assert table.live == 0


def test_a_generation_never_comes_back_through_reuse(table: GuardTable) -> None:
    choose, seen = random.Random(7), dict.fromkeys(range(1, 9), 0)
    handed_out: set[tuple[int, int]] = set()
    live: list[int] = []
    for _ in range(500):
        if live and choose.random() < 0.5:
            slot = live.pop(choose.randrange(len(live)))
            table.release(slot)
        elif len(live) < 8:
            guard = table.allocate()
            slot = guard.slot
            assert (slot, guard.generation) not in handed_out
            handed_out.add((slot, guard.generation))
            live.append(slot)
        else:
            slot = choose.choice(live)
            handed_out.add((slot, table.advance(slot)))
        assert table.load(slot) > seen[slot]
        seen[slot] = table.load(slot)
        table.check_integrity()


def test_a_full_table_is_out_of_memory_until_one_is_released(table: GuardTable) -> None:
    guards = [table.allocate() for _ in range(8)]
    with pytest.raises(OutOfMemory, match="all 8 guards are live") as caught:
        table.allocate()
    assert (caught.value.pool, caught.value.requested) == ("guards", SLOT_BYTES)
    table.release(guards[3].slot)
    assert table.allocate().slot == guards[3].slot


@pytest.mark.parametrize("slot", [0, 1, 2, 9, -1])
def test_only_live_slots_can_be_advanced_or_released(table: GuardTable, slot: int) -> None:
    table.release(table.allocate().slot)
    for change in (table.advance, table.release):
        with pytest.raises(ValueError, match=f"guard slot {slot} is not allocated"):
            change(slot)


@pytest.mark.parametrize("slot", [0, 9, 10, -1, 1 << 60])
def test_a_slot_outside_is_a_protocol_error(table: GuardTable, slot: int) -> None:
    for use in (table.load, table.address_of):
        with pytest.raises(ProtocolError, match=f"guard slot {slot} must be in"):
            use(slot)


def test_slot_addresses_are_a_cache_line_apart_and_inside() -> None:
    assert [slot_address(4096, slot, 256) for slot in (1, 2, 3)] == [4160, 4224, 4288]
    for slot, nbytes in ((4, 256), (3, 255), (1, 64), (1, 0)):
        with pytest.raises(ProtocolError):
            slot_address(4096, slot, nbytes)


def test_a_peer_sees_every_change_and_the_cookie(table: GuardTable, peer: SharedSegment) -> None:
    guard = table.allocate()
    address = slot_address(peer.address, guard.slot, peer.nbytes)
    assert load_generation(address) == guard.generation
    assert table.advance(guard.slot) == load_generation(address) == guard.generation + 1
    assert read_cookie(peer) == table.cookie
    assert len(table.cookie) == 16


def test_a_peer_cannot_write(table: GuardTable, peer: SharedSegment) -> None:
    assert fcntl.fcntl(table.segment.fd, fcntl.F_GET_SEALS) & F_SEAL_FUTURE_WRITE
    with pytest.raises(ProtocolError, match="not permitted"):
        SharedSegment.attach(os.dup(table.segment.fd), table.segment.nbytes, writable=True)
    with pytest.raises(PermissionError):
        mmap.mmap(table.segment.fd, table.segment.nbytes)
    assert not peer.view().flags.writeable


def test_cookies_differ_and_a_table_without_a_header_has_none() -> None:
    one, two = GuardTable(slots=2), GuardTable(slots=2)
    assert one.cookie != two.cookie
    one.close()
    two.close()
    memory = np.zeros(32, dtype=np.uint8)
    with pytest.raises(ProtocolError, match="no room for its header"):
        read_cookie(ExternalSegment(memory.ctypes.data, 32))


def test_close_voids_what_is_live_for_peers_that_still_map_it() -> None:
    table = GuardTable(slots=4)
    guard = table.allocate()
    with SharedSegment.attach(os.dup(table.segment.fd), table.segment.nbytes, writable=False) as peer:
        table.close()
        table.close()
        assert load_generation(slot_address(peer.address, guard.slot, peer.nbytes)) > guard.generation
    assert repr(table) == "<GuardTable 3 guards: 0 live, closed>"
    for use in (table.allocate, table.check_integrity):
        with pytest.raises(StateError, match="closed"):
            use()
    for change in (table.advance, table.release, table.load):
        with pytest.raises(StateError, match="closed"):
            change(guard.slot)


def test_the_default_table_is_large_and_sparse() -> None:
    table = GuardTable()
    assert table.segment.nbytes == 64 << 20
    for _ in range(100):
        table.allocate()
    assert os.fstat(table.segment.fd).st_blocks * 512 <= 1 << 20
    assert repr(table) == "<GuardTable 1048575 guards: 100 live>"
    table.close()


def test_a_table_needs_room_for_a_guard() -> None:
    with pytest.raises(ParamError, match="slots is 1"):
        GuardTable(slots=1)


def test_the_integrity_check_sees_damage(table: GuardTable) -> None:
    guard = table.allocate()
    words = table.segment.view().view(np.uint64)
    at = guard.slot * SLOT_BYTES // 8
    words[at] += np.uint64(1)
    with pytest.raises(AssertionError, match=f"guard slot {guard.slot} shows generation"):
        table.check_integrity()
    words[at] -= np.uint64(1)
    words[0] ^= np.uint64(1)
    with pytest.raises(AssertionError, match="cookie"):
        table.check_integrity()
    words[0] ^= np.uint64(1)
    table._reusable.append(guard.slot)
    with pytest.raises(AssertionError, match="once each"):
        table.check_integrity()
    table._reusable.pop()


def test_generations_change_only_under_the_lock(table: GuardTable, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[bool] = []

    def watched(address: int) -> int:
        locked.append(table._lock.locked())
        return advance_generation(address)

    monkeypatch.setattr("llm_datadist._memory.guards.advance_generation", watched)
    guard = table.allocate()
    table.advance(guard.slot)
    table.release(guard.slot)
    assert locked == [True, True, True]


def test_many_threads_get_different_guards() -> None:
    table = GuardTable(slots=2000)
    got: list[tuple[int, int]] = []

    def work() -> None:
        for turn in range(200):
            guard = table.allocate()
            got.append((guard.slot, guard.generation))
            if turn % 2:
                table.release(guard.slot)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == len(set(got)) == 800
    assert table.live == 400
    table.check_integrity()
    table.close()


def test_a_promise_is_made_void_once_and_nobody_elses_with_it() -> None:
    table = GuardTable(4)
    first = table.allocate()
    table.void(first)
    assert table.load(first.slot) == first.generation + 1
    table.void(first)
    assert table.load(first.slot) == first.generation + 1, "it was void already"
    table.release(first.slot)
    table.void(first)
    second = table.allocate()
    assert second.slot == first.slot
    table.void(first)
    assert table.load(second.slot) == second.generation, "the slot is somebody else's now"
    table.check_integrity()
    table.close()
    with pytest.raises(StateError):
        table.void(second)


def test_promises_hold_until_one_of_them_is_void(table: GuardTable) -> None:
    first, second = table.allocate(), table.allocate()
    guard_set = GuardSet([(each.slot, each.generation) for each in (first, second)], SLOT_BYTES)
    where = (table.segment.address, table.segment.nbytes)
    assert guard_set.unchanged(*where)
    table.advance(second.slot)
    assert not guard_set.unchanged(*where)
    assert GuardSet([(first.slot, first.generation)], SLOT_BYTES).unchanged(*where)


@pytest.mark.parametrize("slot", [0, 2**63, 2**64 - 1])
def test_promises_outside_the_table_are_refused(table: GuardTable, slot: int) -> None:
    for each in (slot, table.capacity + 1):
        with pytest.raises(ParamError, match="guard slot"):
            GuardSet([(each, 1)], SLOT_BYTES).unchanged(table.segment.address, table.segment.nbytes)
