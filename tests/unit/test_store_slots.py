"""The slots of the store against a simple model, step by step, under hypothesis; SIEVE against a list."""

from typing import Any, Final

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llm_datadist.errors import StateError
from llm_datadist.store.slots import MAX_VISITS, TRANSITIONS, SlotEvent, Slots, SlotState

SLOTS: Final = 5
KEYS: Final = [bytes([n]) for n in range(9)]
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)


class Sieve:
    """SIEVE as its authors write it: a list from the oldest to the newest, and a hand."""

    def __init__(self) -> None:
        self.queue: list[bytes] = []
        self.visited: set[bytes] = set()
        self.hand: bytes | None = None

    def after(self, key: bytes) -> bytes | None:
        at = self.queue.index(key) + 1
        return self.queue[at] if at < len(self.queue) else None

    def remove(self, key: bytes) -> None:
        if self.hand == key:
            self.hand = self.after(key)
        self.queue.remove(key)
        self.visited.discard(key)

    def evict(self, read: set[bytes]) -> bytes | None:
        if not set(self.queue) - read:
            return None
        while True:
            key = self.hand if self.hand is not None else self.queue[0]
            if key not in read and key not in self.visited:
                self.remove(key)
                return key
            if key not in read:
                self.visited.discard(key)
            self.hand = self.after(key)


class SlotsMachine(RuleBasedStateMachine):
    """The oracle knows what each slot holds, who reads it, and which keys are found."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(SLOTS)
        self.sieve = Sieve()
        self.held: dict[int, tuple[bytes, int]] = {}  # slot -> key, number of its contents
        self.filling: list[list[int]] = []  # calls of fill
        self.reads: list[dict[int, tuple[bytes, int]]] = []  # what each reader was promised
        self.dropped: set[int] = set()
        self.numbers = 0

    def found(self) -> dict[bytes, int]:
        filling = {slot for each in self.filling for slot in each}
        return {key: slot for slot, (key, _) in self.held.items() if slot not in filling | self.dropped}

    def read_slots(self) -> set[int]:
        return {slot for read in self.reads for slot in read}

    @rule(keys=some_keys)
    def look_up(self, keys: list[bytes]) -> None:
        found, run = self.found(), []
        for key in keys:
            if key not in found:
                break
            run.append(found[key])
            self.sieve.visited.add(key)
        assert self.slots.run(msgspec.msgpack.encode(keys)).tolist() == run
        if run:
            np.testing.assert_array_equal(self.slots.digests(run)[:, 0], [self.held[slot][1] for slot in run])
            assert self.slots.begin_read(run).tolist() == sorted(set(run))
            self.reads.append({slot: self.held[slot] for slot in run})

    @precondition(lambda self: self.reads)
    @rule(pick=st.integers(0, 99))
    def end_read(self, pick: int) -> None:
        read = self.reads.pop(pick % len(self.reads))
        self.slots.end_read(np.array(list(read)))
        for slot in set(read) & self.dropped - self.read_slots():
            self.dropped.discard(slot)
            del self.held[slot]

    @rule(keys=some_keys)
    def fill(self, keys: list[bytes]) -> None:
        known = {key for slot, (key, _) in self.held.items() if slot not in self.dropped}
        found = self.found()
        self.sieve.visited |= {key for key in keys if key in found}
        wanted = [at for at, key in enumerate(keys) if key not in known and key not in keys[:at]]
        room = SLOTS - len(self.held)
        evicted: list[bytes] = []
        while room + len(evicted) < len(wanted):
            gone = self.sieve.evict({key for key, slot in found.items() if slot in self.read_slots() or key in keys})
            if gone is None:
                break
            evicted.append(gone)
            del self.held[found.pop(gone)]
        positions = wanted[: room + len(evicted)]
        filling = self.slots.fill(keys)
        assert (filling.positions, filling.evicted) == (positions, evicted)
        assert not set(filling.slots) & (self.read_slots() | set(self.held)), "a slot with readers is filled"
        for position, slot in zip(filling.positions, filling.slots, strict=True):
            self.numbers += 1
            self.held[slot] = keys[position], self.numbers
        if filling.slots:
            self.filling.append(filling.slots)

    @precondition(lambda self: self.filling)
    @rule(pick=st.integers(0, 99), succeeds=st.booleans())
    def end_fill(self, pick: int, succeeds: bool) -> None:
        slots = self.filling.pop(pick % len(self.filling))
        if succeeds:
            self.slots.publish(slots, np.array([[self.held[slot][1], 0] for slot in slots], np.uint64))
            self.sieve.queue += [self.held[slot][0] for slot in slots]
            return
        self.slots.abandon(slots)
        for slot in slots:
            del self.held[slot]

    @rule(slots=st.lists(st.integers(-1, SLOTS), min_size=1, max_size=3))
    def drop(self, slots: list[int]) -> None:
        published = [slot for slot in dict.fromkeys(slots) if slot in self.found().values()]
        assert self.slots.published_of(slots) == published
        assert self.slots.drop(published) == [self.held[slot][0] for slot in published]
        for slot in published:
            self.sieve.remove(self.held[slot][0])
            if slot in self.read_slots():
                self.dropped.add(slot)
            else:
                del self.held[slot]

    @rule()
    def drop_oldest(self) -> None:
        oldest = self.sieve.queue[:MAX_VISITS]
        found = self.found()
        dropped = self.slots.drop_oldest()
        assert dropped == oldest[: len(dropped)]
        assert bool(dropped) == bool(oldest)
        for slot in [found[key] for key in dropped]:
            self.sieve.remove(self.held[slot][0])
            if slot in self.read_slots():
                self.dropped.add(slot)
            else:
                del self.held[slot]

    @invariant()
    def agrees(self) -> None:
        self.slots.check_integrity()
        filling = sum(map(len, self.filling))
        assert (self.slots.free, self.slots.filling) == (SLOTS - len(self.held), filling)
        assert self.slots.keys() == self.sieve.queue
        assert sorted(self.found()) == sorted(self.sieve.queue)
        assert self.slots.idle() == (not self.filling and not self.reads)
        for read in self.reads:  # what a reader was promised is still there
            assert {slot: self.held[slot] for slot in read} == read


TestSlots: Any = SlotsMachine.TestCase


def in_state(state: SlotState) -> Slots:
    slots = Slots(1)
    if state is not SlotState.FREE:
        slots.fill([b"a"])
    if state in (SlotState.PUBLISHED, SlotState.DROPPED):
        slots.publish([0], np.zeros((1, 2), np.uint64))
    if state is SlotState.DROPPED:
        slots.begin_read([0])
        slots.drop([0])
    return slots


@pytest.mark.parametrize("state", SlotState)
def test_an_event_that_the_table_lacks_is_refused_and_changes_nothing(state: SlotState) -> None:
    digest = np.zeros((1, 2), np.uint64)
    if state is not SlotState.FILLING:
        with pytest.raises(StateError, match="publish is illegal while"):
            in_state(state).publish([0], digest)
        with pytest.raises(StateError, match="abandon is illegal while"):
            in_state(state).abandon([0])
    if state is not SlotState.PUBLISHED:
        with pytest.raises(StateError, match="only a published one is read"):
            in_state(state).begin_read([0])
        assert in_state(state).drop([0]) == []
    assert set(TRANSITIONS) == set(SlotEvent)


def test_the_hand_visits_a_bounded_number_of_slots() -> None:
    count, read = MAX_VISITS + 8, MAX_VISITS + 1
    slots = Slots(count)
    keys = [n.to_bytes(2, "big") for n in range(count)]
    slots.publish(slots.fill(keys).slots, np.zeros((count, 2), np.uint64))
    slots.begin_read(slots.run(msgspec.msgpack.encode(keys[:read])))
    assert slots.fill([b"new"]) == ([], [], [], 1)
    assert slots.fill([b"new"]).evicted == [keys[read]], "the next call goes on where the last one ended"
    slots.check_integrity()


def test_neighbours_are_neighbours_again_when_a_full_store_takes_them() -> None:
    """Their blocks are moved in one piece."""
    slots = Slots(8)
    taken = []
    for first in range(0, 24, 4):
        filling = slots.fill([bytes([n]) for n in range(first, first + 4)])
        slots.publish(filling.slots, np.zeros((4, 2), np.uint64))
        taken.append(filling.slots)
    assert taken == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3
