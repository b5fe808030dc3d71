"""Guards: generations only grow, peers can read and not write them, the cookie names the table."""

import fcntl
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest

from llm_datadist._memory.guards import SLOT_BYTES, Guard, GuardTable, read_cookie, slot_address
from llm_datadist._memory.segment import F_SEAL_FUTURE_WRITE, SharedSegment
from llm_datadist._native import GuardSet, advance_generation, load_generation
from llm_datadist.errors import OutOfMemory, ParamError, ProtocolError, StateError
from tests.unit.holder import in_a_forked_child


@pytest.fixture
def table() -> Iterator[GuardTable]:
    """A table with room for eight guards."""
    table = GuardTable(slots=9)
    yield table
    table.check_integrity()
    table.close()


def attach(table: GuardTable) -> SharedSegment:
    """Return the table as a peer maps it."""
    return SharedSegment.attach(os.dup(table.segment.fd), table.segment.nbytes, writable=False)


def test_a_generation_only_grows_by_one_in_its_own_slot_and_under_the_lock(
    table: GuardTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A void promise, or one whose slot belongs to another promise by now, is void already."""

    def watched(address: int) -> int:
        assert table._lock.locked()
        return advance_generation(address)

    monkeypatch.setattr("llm_datadist._memory.guards.advance_generation", watched)
    choose, shown = random.Random(7), dict.fromkeys(range(1, 9), 0)
    handed_out: list[Guard] = []
    live: dict[int, int] = {}  # slot -> generation
    for _ in range(600):
        action, slot = choose.choice(("allocate", "advance", "release", "void")), 0
        if action == "allocate" and len(live) < 8:
            handed_out.append(guard := table.allocate())
            assert guard.slot not in live
            slot, live[guard.slot] = guard.slot, guard.generation
        elif action == "advance" and live:
            slot = choose.choice([*live])
            live[slot] = table.advance(slot)
            handed_out.append(Guard(slot, live[slot]))
        elif action == "release" and live:
            slot = choose.choice([*live])
            table.release(slot)
            del live[slot]
        elif action == "void" and handed_out:
            guard = choose.choice(handed_out[-9:])
            table.void(guard)
            if live.get(guard.slot) == guard.generation:
                slot, live[guard.slot] = guard.slot, guard.generation + 1
        if slot:
            shown[slot] += 1
        assert {each: table.load(each) for each in shown} == shown == shown | live
        assert (table.live, table.capacity) == (len(live), 8)
        table.check_integrity()


def test_a_full_table_is_out_of_memory_until_one_is_released(table: GuardTable) -> None:
    guards = [table.allocate(), *table.allocate_many(6)]
    with pytest.raises(OutOfMemory, match="all 8 guards are live") as caught:
        table.allocate_many(2)
    assert (caught.value.pool, caught.value.requested) == ("guards", 2 * SLOT_BYTES)
    guards.append(table.allocate())
    assert sorted(guard.slot for guard in guards) == list(range(1, 9))
    with pytest.raises(OutOfMemory):
        table.allocate()
    table.release(guards[3].slot)
    assert table.allocate().slot == guards[3].slot


def test_slots_that_are_not_live_or_not_there_are_refused(table: GuardTable) -> None:
    table.release(table.allocate().slot)
    for slot in (0, 1, 2, 9, -1):
        for change in (table.advance, table.release):
            with pytest.raises(ValueError, match=f"guard slot {slot} is not allocated"):
                change(slot)
    for slot in (0, 9, 10, -1, 1 << 60):
        for use in (table.load, table.address_of):
            with pytest.raises(ProtocolError, match=f"guard slot {slot} must be in"):
                use(slot)
    assert [slot_address(4096, slot, 256) for slot in (1, 2, 3)] == [4160, 4224, 4288]  # a cache line apart
    for slot, nbytes in ((4, 256), (3, 255), (1, 64), (1, 0)):
        with pytest.raises(ProtocolError, match=rf"must be in \[1, {nbytes // 64}\) of a table of {nbytes} bytes"):
            slot_address(4096, slot, nbytes)


def test_a_peer_sees_every_change_and_the_cookie_and_cannot_write(table: GuardTable) -> None:
    with attach(table) as peer:
        guard = table.allocate()
        address = slot_address(peer.address, guard.slot, peer.nbytes)
        assert load_generation(address) == guard.generation
        assert table.advance(guard.slot) == load_generation(address) == guard.generation + 1
        assert read_cookie(peer) == table.cookie
        assert len(table.cookie) == 16
        assert not peer.view().flags.writeable
    with (
        SharedSegment.create("short", SLOT_BYTES - 1, peers_may_write=False) as short,
        pytest.raises(ProtocolError, match="no room for its header"),
    ):
        read_cookie(short)
    assert fcntl.fcntl(table.segment.fd, fcntl.F_GET_SEALS) & F_SEAL_FUTURE_WRITE


def test_close_voids_what_is_live_for_peers_that_still_map_it() -> None:
    table, other = GuardTable(slots=4), GuardTable(slots=2)
    assert other.cookie != table.cookie
    other.close()
    guard = table.allocate()
    with attach(table) as peer:
        table.close()
        table.close()
        assert load_generation(slot_address(peer.address, guard.slot, peer.nbytes)) > guard.generation
        assert (table.capacity, table.live) == (3, 0)
        large = GuardTable()
        large.allocate_many(100)
        assert (large.segment.nbytes, large.capacity, large.live) == (64 << 20, 1048575, 100)
        assert os.fstat(large.segment.fd).st_blocks * 512 <= 1 << 20, "it is sparse"
        large.close()
    for use in (
        table.allocate,
        table.check_integrity,
        lambda: table.advance(guard.slot),
        lambda: table.release(guard.slot),
        lambda: table.load(guard.slot),
        lambda: table.void(guard),
    ):
        with pytest.raises(StateError, match="closed"):
            use()


def test_the_integrity_check_sees_damage(table: GuardTable) -> None:
    guard = table.allocate()
    words = table.segment.view().view(np.uint64)
    for at, text in ((guard.slot * SLOT_BYTES // 8, f"guard slot {guard.slot} shows generation"), (0, "cookie")):
        words[at] ^= np.uint64(1)
        with pytest.raises(AssertionError, match=text):
            table.check_integrity()
        words[at] ^= np.uint64(1)
    table._reusable.append(guard.slot)
    with pytest.raises(AssertionError, match="once each"):
        table.check_integrity()
    table._reusable.pop()


def test_promises_hold_until_one_of_them_is_void_and_none_is_outside_the_table(table: GuardTable) -> None:
    first, second = table.allocate(), table.allocate()
    where = (table.segment.address, table.segment.nbytes)

    def unchanged(*promises: tuple[int, int]) -> bool:
        return GuardSet(list(promises), SLOT_BYTES, *where).unchanged()

    promises = [(each.slot, each.generation) for each in (first, second)]
    assert unchanged(*promises)
    table.advance(second.slot)
    assert not unchanged(*promises)
    assert unchanged(promises[0])
    for slot in (0, table.capacity + 1, 2**63, 2**64 - 1):
        with pytest.raises(ParamError, match="guard slot"):
            unchanged((slot, 1))


def test_a_forked_child_changes_no_generation_even_where_the_fork_found_the_lock_held(table: GuardTable) -> None:
    guard, before = table.allocate(), table.segment.view().copy()
    changes = (
        table.allocate,
        lambda: table.allocate_many(2),
        lambda: table.advance(guard.slot),
        lambda: table.void(guard),
        lambda: table.release(guard.slot),
        table.close,
    )

    def change() -> None:
        for call in changes:
            with pytest.raises(StateError, match="fork"):
                call()

    with table._lock:
        in_a_forked_child(change)
    assert (table.segment.view() == before).all()
    assert table.allocate().slot != guard.slot
