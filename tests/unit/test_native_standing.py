"""Standing grants against a model: a lane answers by itself exactly what was granted, and asks about all else."""

from __future__ import annotations

import random
import struct
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import numpy as np
import pytest

from faults.lane_ends import DATA, READ, WRITE, Wire, events_of
from llm_datadist._memory.guards import Guard, GuardTable
from llm_datadist._native import LaneEngine, ReadAsked, StandingGrants, Tensors, WriteAsked
from llm_datadist._transport.lanes import MAX_RUNS
from tests.support import twin

TENSORS: Final = 3
EXTENT: Final = 24_000
MOST: Final = 4096
HANDLES: Final = (b"", b"a", b"b", b"\xffa")

pytestmark = pytest.mark.usefixtures("nothing_left")


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

    def __init__(self, seed: int, engine: LaneEngine, wire: Wire, grants: StandingGrants, table: GuardTable) -> None:
        self.random, self.engine, self.wire, self.grants, self.table = random.Random(seed), engine, wire, grants, table
        filled = [twin.noise(10 * seed + tag, TENSORS, EXTENT) for tag in range(3)]
        self.memories = [Memory(t, [x.copy() for x in t], table.allocate(), tag) for tag, t in enumerate(filled)]
        self.model: dict[tuple[bool, bytes], tuple[Memory, Guard]] = {}
        self.id = self.asked = 0

    def keep(self, handle: bytes | None = None) -> None:
        handle = self.random.choice(HANDLES) if handle is None else handle
        memory = self.random.choice(self.memories)
        write, mapped = (self.random.random() < 0.5 for _ in range(2))
        guard = self.table.address_of(memory.guard.slot), memory.guard.generation
        bases = np.array([tensor.ctypes.data for tensor in memory.tensors], np.uint64)
        self.grants.keep(handle, write, Tensors(bases, EXTENT).native, [guard], memory.tag, mapped)
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
            spans += [(0, 0)] * (MAX_RUNS + 1 - len(spans))
        head = [len(handle), first, count, EXTENT, count * sum(length for _, length in spans) % 2**64]
        if wrong == "number":
            at = choose.randint(1, 4)
            head[at] = (head[at] + choose.choice([-1, 1, 2**62, 2**63])) % 2**64
        meta = struct.pack("<HQQQQ", *head) + handle + b"".join(struct.pack("<QQ", *span) for span in spans)
        meta = meta[:-1] if wrong == "short" else meta + b"x" if wrong == "long" else meta
        _, first, count, extent, nbytes = head
        fits = wrong != "span" and extent == EXTENT and first + count <= TENSORS
        fits = fits and nbytes == count * sum(length for _, length in spans)
        memory = self.granted(write, handle) if wrong not in ("short", "long", "many") else None
        payload = choose.randbytes(nbytes) if write and fits else b""
        self.id += 1
        self.wire.send(WRITE if write else READ, self.id, meta, payload)
        tensors = range(first, first + count)
        if memory is None or not fits:
            self.expect_event(meta, WriteAsked if write else ReadAsked)
        elif write:
            assert self.wire.result() == (self.id, 0, "")
            put(payload, [memory.expected[tensor][at : at + length] for tensor in tensors for at, length in spans])
        else:
            wanted = b"".join(memory.expected[t][at : at + length].tobytes() for t in tensors for at, length in spans)
            assert self.wire.header() == (DATA, self.id, 0, len(wanted))
            assert self.wire.receive(len(wanted) + 8) == wanted + bytes(8)

    def granted(self, write: bool, handle: bytes) -> Memory | None:
        """Return what the model grants; a look at a grant whose guard has advanced ends it."""
        memory, guard = self.model.get((write, handle), (None, None))
        if memory is None or memory.guard == guard:
            return memory
        del self.model[write, handle]
        return None

    def expect_event(self, meta: bytes, kind: type[ReadAsked | WriteAsked]) -> None:
        self.asked += 1
        (asked,) = events_of(self.engine)
        assert isinstance(asked, kind)
        assert asked.meta == meta
        self.engine.refuse(asked.lane, asked.id, 22, "no")
        assert self.wire.result() == (self.id, 22, "no")

    def check(self) -> None:
        assert len(self.grants) == len(self.model)
        assert self.engine.poll_events() == []
        for each in self.memories:
            assert all(map(np.array_equal, each.tensors, each.expected))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_granted_is_answered_and_nothing_else(seed: int) -> None:
    grants = StandingGrants()
    with closing(GuardTable(16)) as table, closing(LaneEngine(1)) as engine, Wire(engine, grants=grants) as wire:
        scene = Scene(seed, engine, wire, grants, table)
        steps = [scene.request] * 60 + [scene.keep] * 30 + [scene.advance] * 4 + [scene.quiesce] * 4
        for number in range(600):
            scene.random.choice(steps)()
            for other in range(MOST if number % 300 == 299 else 0):
                scene.keep(b"one of many %d" % other)
            scene.check()
        assert 100 < scene.asked < scene.id - 50, "the steps refuse, or grant, too little"
