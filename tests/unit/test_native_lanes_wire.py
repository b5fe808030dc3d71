"""The lanes against a peer that speaks the wire by hand: a breach costs that lane and nothing else; guards, refusals,
memory that is taken back. Cached replies, against a model: a lane answers by itself exactly what was granted."""

import itertools
import random
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pytest

from faults import lane_ends
from faults.lane_ends import BIG, DATA, HEADER, MAGIC, READ, RESULT, WRITE, Wire, deadline, joined, next_event, one_row
from llm_datadist._memory.guards import Guard, GuardTable
from llm_datadist._native import (
    MAPPED,
    MAX_REQUEST_RUNS,
    USER,
    Ending,
    LaneEngine,
    LaneLost,
    LentBlocks,
    Plan,
    ReadAsked,
    ReplyCache,
    WriteAsked,
)
from llm_datadist._native.lane_engine import ABORTED, CHANGED, MISFIT, TORN
from llm_datadist.testing.scene import tensors_over as tensors
from tests.support import twin
from tests.support.moves import wait_until as wait_for

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("kind_of_lane", "nothing_left")


def header(kind: int, **fields: int) -> bytes:
    good = {"magic": MAGIC, "kind": kind, "flags": 0, "zero": 0, "id": 1, "meta": 0, "size": 0, "last": 0}
    return HEADER.pack(*(good | fields).values())


UNASKED = [
    (header(READ, magic=1), "not of this protocol"),
    (b"GET / HTTP/1.1\r\nHost: somewhere\r\nAccept: */*\r\n\r\n", "not of this protocol"),
    (header(0), "unknown kind 0"),
    (header(5), "unknown kind 5"),
    (header(255), "unknown kind 255"),
    (header(READ, flags=1), "reserved bits"),
    (header(READ, zero=256), "reserved bits"),
    (header(READ, last=1 << 63), "reserved bits"),
    (header(READ, meta=MIB + 1), "1048577 bytes of meta"),
    (header(READ, meta=2**64 - 1), "bytes of meta"),
    (header(READ, size=1), "1 bytes of payload"),
    (header(WRITE, size=(1 << 48) + 1), "bytes of payload"),
    (header(WRITE, size=2**64 - 1), "bytes of payload"),
    (header(DATA, meta=1), "1 bytes of meta"),
    (header(DATA, id=77, size=8), "unknown id 77"),
    (header(RESULT, meta=3), "3 bytes of meta"),
    (header(RESULT, meta=4005), "4005 bytes of meta"),
    (header(RESULT, meta=4, size=1), "1 bytes of payload"),
    (header(RESULT, id=2**64 - 1, meta=4), "unknown id 18446744073709551615"),
    (header(READ) + header(READ), "is of an unanswered request"),
    (b"".join(header(READ, id=id) for id in range(33)), "more than 32 requests"),
    (b"".join(header(READ, id=id, meta=MIB) + bytes(MIB) for id in range(4)) + header(READ, id=9, meta=1), "4194304"),
]
TO_A_READ = [  # of 16 bytes
    (header(DATA, size=24) + bytes(24), "DATA of 24 bytes answers a READ of 16"),
    (header(DATA, size=8) + bytes(8), "DATA of 8 bytes answers a READ of 16"),
    (header(RESULT, meta=4) + bytes(4), "whose bytes have not moved"),
]
TO_A_WRITE = [  # that is still on its way, and cannot be done already
    (header(DATA, size=BIG), "answers a WRITE"),
    (header(RESULT, meta=4) + bytes(4), "have not moved"),
]


@pytest.mark.parametrize(
    ("job", "frame", "reason"),
    [(job, *row) for job, rows in (("", UNASKED), ("read", TO_A_READ), ("write", TO_A_WRITE)) for row in rows],
)
def test_a_breach_costs_the_lane_and_nothing_else(job: str, frame: bytes, reason: str) -> None:
    ours = np.full(BIG, 5, np.uint8)
    with joined() as ends, Wire(ends.near) as wire:
        if job:
            nbytes, write = (BIG, True) if job == "write" else (16, False)
            assert ends.near.start(wire.lane, b"", one_row(nbytes), tensors(ours[:nbytes]), write=write) == 1
            wire.header()
        wire.sendall(frame)
        if job:
            outcome = ends.near.wait(1, deadline())
            assert outcome.ending is Ending.LOST
            assert reason in outcome.text
        if job != "write":  # much of it lies in the socket
            assert wire.is_closed()
        lost: list[LaneLost] = []
        while not lost:
            lost = [event for event in lane_ends.events_of(ends.near) if isinstance(event, LaneLost)]
        assert lost[0].lane == wire.lane
        assert reason in lost[0].reason
        assert ends.works(ends.lanes[0])
        assert (ours == 5).all()


# What the target answers


@pytest.fixture
def guards() -> Iterator[GuardTable]:
    with closing(GuardTable(16)) as table:
        yield table


def ask_read(engine: LaneEngine, wire: Wire, id: int, nbytes: int) -> ReadAsked:
    wire.send(READ, id, lane_ends.encode_plan(one_row(nbytes)))
    return next_event(engine, ReadAsked)


def moved_by(replies: ReplyCache, engine: LaneEngine) -> tuple[int, int]:
    """Return the bytes of replies that count, once the lane threads have ended what they do."""
    engine.quiesce(99)
    return replies.moved


@pytest.mark.parametrize(
    ("nbytes", "change"), [(100, "before"), (BIG, "before"), (BIG, "on its way"), (100, "never"), (BIG, "never")]
)
def test_a_read_is_good_while_its_guards_hold(engine: LaneEngine, guards: GuardTable, nbytes: int, change: str) -> None:
    memory, kept, replies = np.full(nbytes, 3, np.uint8), [guards.allocate() for _ in range(3)], ReplyCache()
    with Wire(engine, grants=replies) as wire:
        asked = ask_read(engine, wire, 5, nbytes)
        pairs = [(guards.address_of(guard.slot), guard.generation) for guard in kept]
        if change == "before":
            guards.advance(kept[2].slot)
        engine.reply(asked.lane, asked.id, one_row(nbytes), tensors(memory), pairs, 0, write=False)
        if change == "before":
            id, code, text = wire.result()
            assert (id, code) == (5, CHANGED)
            assert "guard has changed" in text
            assert moved_by(replies, engine) == (0, 0)
            return
        assert wire.header() == (DATA, 5, 0, nbytes)
        if change == "on its way":
            guards.advance(kept[0].slot)
            engine.quiesce(99)  # waits for what is being sent
            memory[:] = 7  # of the next request
            got = np.frombuffer(wire.receive(nbytes), np.uint8)
            assert (not (got == 7).any(), got[-1]) == (True, 0)
        else:
            assert wire.receive(nbytes) == bytes([3]) * nbytes
        assert int.from_bytes(wire.receive(8), "little") == (CHANGED if change == "on its way" else 0)
        assert moved_by(replies, engine) == (0 if change == "on its way" else nbytes, 0)


def test_the_initiator_learns_of_the_trailer(engine: LaneEngine) -> None:
    into = np.zeros(16, np.uint8)
    with Wire(engine) as wire:
        job = engine.start(wire.lane, b"what", one_row(16), tensors(into), write=False)
        _, id, meta, _ = wire.header()
        assert wire.receive(meta) == b"what"
        wire.send(DATA, id, payload=bytes(16) + CHANGED.to_bytes(8, "little"), declared=16)
        ending, code, nbytes, text = engine.wait(job, deadline())
        assert (ending, code, nbytes) == (Ending.TRAILER, CHANGED, 16)
        assert "guard has changed" in text


@pytest.mark.parametrize(
    ("wrong", "code"), [("guard before", CHANGED), ("guard on its way", TORN), ("size of the grant", MISFIT)]
)
def test_a_write_whose_guard_changes_on_its_way_is_not_good(
    engine: LaneEngine, guards: GuardTable, wrong: str, code: int
) -> None:
    """Where it has changed before, or the grant has another size than the payload, nothing is touched.

    Regression: a push whose memory changed after its first byte succeeded.
    """
    memory, guard, replies = np.zeros(BIG + 1, np.uint8), guards.allocate(), ReplyCache()
    with Wire(engine, grants=replies) as wire:
        wire.send(WRITE, 5, b"m", bytes([9]), declared=BIG)
        asked = next_event(engine, WriteAsked)
        pair = (guards.address_of(guard.slot), guard.generation)
        if wrong == "guard before":
            guards.advance(guard.slot)
        plan = one_row(BIG + (wrong == "size of the grant"))
        engine.reply(asked.lane, asked.id, plan, tensors(memory), [pair], 0, write=True)
        if wrong == "guard on its way":
            wait_for(lambda: memory[0] == 9)
            guards.advance(guard.slot)
        wire.sendall(bytes([9]) * (BIG - 1))
        assert wire.result()[:2] == (5, code)
        assert moved_by(replies, engine) == (0, 0)
        assert wire.write_is_good(engine, 6)
        assert replies.moved > (0, 0)
    assert memory.any() == (wrong == "guard on its way")


# Refusals


def test_refusals_reach_the_initiator_with_code_and_text() -> None:
    data = np.zeros(BIG, np.uint8)
    with joined() as ends:
        for write in (False, True):
            job = ends.start(ends.lanes[0], one_row(BIG), tensors(data), write=write)
            asked: ReadAsked | WriteAsked
            asked = next_event(ends.far, WriteAsked) if write else next_event(ends.far, ReadAsked)
            ends.far.refuse(asked.lane, asked.id, 0xFFFFFFFF, "no, thänk you")
            assert ends.near.wait(job, deadline()) == (Ending.REFUSED, 0xFFFFFFFF, 0, "no, thänk you")
        assert ends.works(ends.lanes[0])


def test_a_refused_write_reads_nothing_more_of_local_memory(engine: LaneEngine) -> None:
    """What is left of its frame is zeros, and the lane goes on."""
    data = np.full(BIG, 9, np.uint8)
    with Wire(engine) as wire:
        job = engine.start(wire.lane, b"", one_row(BIG), tensors(data), write=True)
        kind, id, _, nbytes = wire.header()
        assert (kind, nbytes) == (WRITE, BIG)
        wire.send(RESULT, id, (77).to_bytes(4, "little") + b"no")
        assert engine.wait(job, deadline()) == (Ending.REFUSED, 77, 0, "no")
        data[:] = 5
        payload = np.frombuffer(wire.receive(BIG), np.uint8)
        assert not (payload == 5).any()
        assert payload[0] == 9
        assert payload[-1] == 0
        assert lane_ends.events_of(engine, 0) == []
        later = engine.start(wire.lane, b"", one_row(8), tensors(data), write=False)
        wire.send(DATA, wire.header()[1], payload=b"x" * 8 + bytes(8), declared=8)
        assert engine.wait(later, deadline()).ending is Ending.GOOD


def test_a_refused_payload_that_does_not_end_costs_the_lane() -> None:
    with closing(LaneEngine(1, drain_ms=300)) as engine, Wire(engine) as wire:
        wire.send(WRITE, 5, declared=1 << 48)
        asked = next_event(engine, WriteAsked)
        engine.refuse(asked.lane, asked.id, 1, "x" * 5000)
        assert wire.result() == (5, 1, "x" * 4000), "long texts are cut"
        assert wire.is_closed()
        assert next_event(engine, LaneLost).reason == "a payload that nobody wants did not end in time"


def test_answers_to_what_is_gone_or_was_answered(engine: LaneEngine) -> None:
    memory = np.zeros(100, np.uint8)
    with Wire(engine) as wire:
        asked = ask_read(engine, wire, 5, 8)
        engine.refuse(asked.lane, asked.id, 1, "no")
        engine.refuse(asked.lane, asked.id, 1, "no")
        for lane, id in ((asked.lane, asked.id), (asked.lane, 99), (12345, 1)):
            engine.reply(lane, id, one_row(8), tensors(memory), [], 0, write=False)
            engine.reply(lane, id, one_row(8), tensors(memory), [], 0, write=True)
        assert wire.result() == (5, 1, "no")
        assert wire.write_is_good(engine, 6)


# Memory that is taken back


def test_quiesce_takes_memory_from_under_a_running_read(engine: LaneEngine) -> None:
    memory, replies = np.full(BIG, 3, np.uint8), ReplyCache()
    with Wire(engine, grants=replies) as wire:
        first, second, other = (ask_read(engine, wire, id, BIG) for id in (5, 6, 7))
        for asked, tag in ((first, 1), (second, 1), (other, 2)):
            engine.reply(asked.lane, asked.id, one_row(BIG), tensors(memory), [], tag, write=False)
        assert wire.header() == (DATA, 5, 0, BIG)
        engine.quiesce(1)
        memory[:] = 7
        got = np.frombuffer(wire.receive(BIG), np.uint8)
        assert not (got == 7).any()
        assert got[-1] == 0
        assert int.from_bytes(wire.receive(8), "little") == ABORTED
        assert wire.result()[:2] == (6, ABORTED)
        assert wire.header() == (DATA, 7, 0, BIG)
        assert wire.receive(BIG + 8) == bytes([7]) * BIG + bytes(8)
        assert moved_by(replies, engine) == (BIG, 0)


def test_a_lane_that_is_lost_with_grants_on_it_is_told_of_once(engine: LaneEngine) -> None:
    memory = np.full(BIG, 3, np.uint8)
    with Wire(engine) as wire:
        for id in (5, 6):
            asked = ask_read(engine, wire, id, BIG)
            engine.reply(asked.lane, asked.id, one_row(BIG), tensors(memory), [], 0, write=False)
        wire.header()
    next_event(engine, LaneLost)
    assert lane_ends.events_of(engine, 0) == []


# Cached replies

TENSORS: Final = 3
EXTENT: Final = 24_000
MOST: Final = 4096
HANDLES: Final = (b"", b"a", b"b", b"\xffa")


@dataclass
class Memory:
    """What the owner has, and what it must hold by now."""

    tensors: list[twin.Bytes]
    expected: list[twin.Bytes]
    guard: Guard
    tag: int


def put(payload: bytes, places: list[twin.Bytes]) -> None:
    for place in places:
        place[:], payload = np.frombuffer(payload, np.uint8, place.size), payload[place.size :]


class Scene:
    """One lane with its grants. The model: the memory of each handle, and the guard that it was granted under."""

    def __init__(self, seed: int, engine: LaneEngine, wire: Wire, grants: ReplyCache, table: GuardTable) -> None:
        self.random, self.engine, self.wire, self.grants, self.table = random.Random(seed), engine, wire, grants, table
        filled = [twin.noise(10 * seed + tag, TENSORS, EXTENT) for tag in range(3)]
        self.memories = [Memory(t, [x.copy() for x in t], table.allocate(), tag) for tag, t in enumerate(filled)]
        self.model: dict[tuple[bool, bytes], tuple[Memory, Guard]] = {}
        self.id = self.asked = self.sent = self.received = 0

    def keep(self, handle: bytes | None = None) -> None:
        handle = self.random.choice(HANDLES) if handle is None else handle
        memory = self.random.choice(self.memories)
        write, mapped = (self.random.random() < 0.5 for _ in range(2))
        place = MAPPED if mapped else USER
        guard = self.table.address_of(memory.guard.slot), memory.guard.generation
        tensors = replace(twin.tensors_of(memory.tensors), place=place).native
        self.grants.keep(handle, write, tensors, [guard], memory.tag)
        if len(self.model) >= MOST:
            self.model.clear()
        self.model[write, handle] = memory, memory.guard

    def advance(self) -> None:
        memory = self.random.choice(self.memories)
        memory.guard = Guard(memory.guard.slot, self.table.advance(memory.guard.slot))

    def quiesce(self) -> None:
        tag = self.random.choice(self.memories).tag
        self.engine.quiesce(tag)
        self.model = {key: value for key, value in self.model.items() if value[0].tag != tag}

    def request(self) -> None:
        """Ask for something good, or for something that is wrong in one place."""
        choose, write, handle = self.random, self.random.random() < 0.5, self.random.choice(HANDLES)
        first = choose.randrange(TENSORS)
        count = choose.randint(1, TENSORS - first)
        offsets = [choose.randrange(EXTENT + 1) for _ in range(choose.randint(0, 4))]
        spans = [(at, choose.randint(0, min(EXTENT - at, EXTENT // 4))) for at in offsets]
        wrong = choose.choice(["", "", "", "number", "span", "short", "long", "many"])
        if wrong == "span":
            spans.append(choose.choice([(EXTENT, 1), (1, EXTENT), (2**64 - 8, 16), (0, 2**64 - 1), (2**63, 1)]))
        if wrong == "many":
            spans += [(0, 0)] * (MAX_REQUEST_RUNS + 1 - len(spans))
        head = [len(handle), first, count, EXTENT, count * sum(length for _, length in spans) % 2**64]
        if wrong == "number":
            at = choose.randint(1, 4)
            head[at] = (head[at] + choose.choice([-1, 1, 2**62, 2**63])) % 2**64
        meta = struct.pack("<HQQQQ", *head) + handle + b"".join(struct.pack("<QQ", *span) for span in spans)
        meta = meta[:-1] if wrong == "short" else meta + b"x" if wrong == "long" else meta
        _, first, count, extent, nbytes = head
        fits = wrong != "span" and extent == EXTENT and first + count <= TENSORS
        fits = fits and nbytes == count * sum(length for _, length in spans)
        well_formed = wrong not in ("short", "long", "many") and max(head[1:]) < 2**63
        memory = self.granted(write, handle) if well_formed else None
        payload = choose.randbytes(nbytes) if write and fits else b""
        self.id += 1
        self.wire.send(WRITE if write else READ, self.id, meta, payload)
        tensors = range(first, first + count)
        if memory is None or not fits:
            self.expect_event(meta, WriteAsked if write else ReadAsked)
        elif write:
            assert self.wire.result() == (self.id, 0, "")
            self.received += nbytes
            put(payload, [memory.expected[tensor][at : at + length] for tensor in tensors for at, length in spans])
        else:
            wanted = b"".join(memory.expected[t][at : at + length].tobytes() for t in tensors for at, length in spans)
            assert self.wire.header() == (DATA, self.id, 0, len(wanted))
            assert self.wire.receive(len(wanted) + 8) == wanted + bytes(8)
            self.sent += nbytes

    def granted(self, write: bool, handle: bytes) -> Memory | None:
        """Return what the model grants; a look at a grant whose guard has advanced ends it."""
        memory, guard = self.model.get((write, handle), (None, None))
        if memory is None or memory.guard == guard:
            return memory
        del self.model[write, handle]
        return None

    def expect_event(self, meta: bytes, kind: type[ReadAsked | WriteAsked]) -> None:
        self.asked += 1
        (asked,) = lane_ends.events_of(self.engine)
        assert isinstance(asked, kind)
        assert asked.meta == meta
        self.engine.refuse(asked.lane, asked.id, 22, "no")
        assert self.wire.result() == (self.id, 22, "no")

    def check(self) -> None:
        assert len(self.grants) == len(self.model)
        assert moved_by(self.grants, self.engine) == (self.sent, self.received)
        assert self.engine.poll_events() == []
        for each in self.memories:
            assert all(map(np.array_equal, each.tensors, each.expected))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_granted_is_answered_and_nothing_else(seed: int) -> None:
    grants = ReplyCache()
    with closing(GuardTable(16)) as table, closing(LaneEngine(1)) as engine, Wire(engine, grants=grants) as wire:
        scene = Scene(seed, engine, wire, grants, table)
        steps = [scene.request] * 60 + [scene.keep] * 30 + [scene.advance] * 4 + [scene.quiesce] * 4
        for number in range(600):
            scene.random.choice(steps)()
            for other in range(MOST if number % 300 == 299 else 0):
                scene.keep(b"one of many %d" % other)
            scene.check()
        assert 100 < scene.asked < scene.id - 50, "the steps refuse, or grant, too little"


@pytest.mark.parametrize("seed", range(4))
def test_blocks_that_are_lent_hold_a_run_if_each_of_its_bytes_is_in_one(seed: int) -> None:
    stride, count = 7, 9
    lent = sorted(random.Random(seed).sample(range(count), 5))
    blocks, inside = (
        LentBlocks(lent, stride),
        {at for block in lent for at in range(block * stride, (block + 1) * stride)},
    )

    def held(*spans: tuple[int, int]) -> bool:
        runs = np.array([(0, *span) for span in spans], np.uint64).reshape(-1, 3)
        return blocks.hold(Plan(0, 0, 1, runs, ordered=False, nbytes=0))

    good = []
    for at, size in itertools.product(range(count * stride + 2), range(1, 3 * stride + 2)):
        assert held((at, size)) is (set(range(at, at + size)) <= inside), (lent, at, size)
        good += [(at, size)] if held((at, size)) else []
    assert held()
    assert held(*good)
    assert not held(*good, (count * stride, 1))
    at = lent[-1] * stride
    for size in (2**63, 2**64 - 1 - at, 2**64 - at, 2**64 - 1):
        assert not held((at, size)), "a sum that wraps"
    for beyond in (2**63 - 1, 2**64 - 1):
        assert not held((beyond, 1))


def test_a_cached_reply_for_lent_blocks_answers_for_these_only_while_they_are_lent() -> None:
    memory, grants, lent = np.arange(4 * 64, dtype=np.uint8), ReplyCache(), [LentBlocks([1, 2], 64)]
    with closing(LaneEngine(1)) as engine, Wire(engine, grants=grants) as wire:
        grants.keep(b"a", False, tensors(memory).native, [], 0, lent[0])
        spans = [(64, 64), (100, 60), (0, 64), (63, 2), (191, 2), (192, 1), (64, 128), (64, 64)]
        for id, (at, size) in enumerate(spans, 1):
            if id == len(spans):
                lent.clear()
            meta = struct.pack("<HQQQQ", 1, 0, 1, memory.size, size) + b"a" + struct.pack("<QQ", at, size)
            wire.send(READ, id, meta)
            if lent and at >= 64 and at + size <= 192:
                assert wire.header() == (DATA, id, 0, size)
                assert wire.receive(size + 8) == memory[at : at + size].tobytes() + bytes(8)
            else:
                asked = next_event(engine, ReadAsked)
                engine.refuse(asked.lane, asked.id, 22, "no")
                assert wire.result() == (id, 22, "no")


def test_statuses_on_the_wire_keep_their_numbers() -> None:
    assert (CHANGED, ABORTED, MISFIT, TORN) == (1, 2, 4, 5)
