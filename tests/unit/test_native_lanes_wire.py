"""What a peer may send over a lane, and what it may not: a breach costs that lane and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from faults.lane_ends import (
    BIG,
    DATA,
    HEADER,
    MAGIC,
    READ,
    RESULT,
    WRITE,
    Target,
    Wire,
    deadline,
    encode_plan,
    events_of,
    joined,
    next_event,
    one_row,
)
from llm_datadist._native import Ending, LaneEngine, LaneLost
from llm_datadist.testing.scene import tensors_over as tensors
from tests.support import twin

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("kind_of_lane", "nothing_left")


def header(
    kind: int,
    *,
    magic: int = MAGIC,
    flags: int = 0,
    zero: int = 0,
    id: int = 1,
    meta: int = 0,
    size: int = 0,
    last: int = 0,
) -> bytes:
    return HEADER.pack(magic, kind, flags, zero, id, meta, size, last)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
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
        (
            b"".join(header(READ, id=id, meta=MIB) + bytes(MIB) for id in range(4)) + header(READ, id=9, meta=1),
            "4194304",
        ),
    ],
)
def test_a_breach_costs_the_lane_and_nothing_else(frame: bytes, reason: str) -> None:
    source, into = twin.noise(8, 1, 4096)[0], np.zeros(4096, np.uint8)
    with joined() as ends, Wire(ends.far) as wire:
        wire.sendall(frame)
        assert wire.is_closed()
        lost = [event for event in events_of(ends.far) if isinstance(event, LaneLost)]
        while not lost:
            lost = [event for event in events_of(ends.far) if isinstance(event, LaneLost)]
        assert lost[0].lane == wire.lane
        assert reason in lost[0].reason
        with Target(ends.far, tensors(source)):
            assert ends.move(ends.lanes[0], one_row(4096), tensors(into)).ending is Ending.GOOD
        assert np.array_equal(into, source)


@pytest.mark.parametrize(
    ("kind", "meta", "payload", "reason"),
    [
        (DATA, b"", bytes(24), "DATA of 24 bytes answers a READ of 16"),
        (DATA, b"", bytes(8), "DATA of 8 bytes answers a READ of 16"),
        (RESULT, bytes(4), b"", "whose bytes have not moved"),
    ],
)
def test_answers_that_do_not_fit_their_read(kind: int, meta: bytes, payload: bytes, reason: str) -> None:
    into = np.full(16, 5, np.uint8)
    engine = LaneEngine(1)
    with Wire(engine) as wire:
        job = engine.start_read(wire.lane, b"", one_row(16), tensors(into))
        wire.header()
        wire.send(kind, job, meta, payload)
        outcome = engine.wait(job, deadline())
        assert outcome.ending is Ending.LOST
        assert reason in outcome.text
        assert (into == 5).all()
        assert reason in next_event(engine, LaneLost).reason
    engine.close()


@pytest.mark.parametrize(
    ("frame", "reason"),
    [(header(DATA, id=1, size=BIG), "answers a WRITE"), (header(RESULT, id=1, meta=4) + bytes(4), "have not moved")],
)
def test_answers_that_do_not_fit_their_write(frame: bytes, reason: str) -> None:
    """A write that is still on its way cannot be done already."""
    data = np.zeros(BIG, np.uint8)
    engine = LaneEngine(1)
    with Wire(engine) as wire:
        job = engine.start_write(wire.lane, b"", one_row(BIG), tensors(data))
        assert job == 1
        wire.header()
        wire.sendall(frame)
        outcome = engine.wait(job, deadline())
        assert outcome.ending is Ending.LOST
        assert reason in outcome.text
    engine.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes(seed: int) -> None:
    """Frames with a few bytes changed, cut anywhere: the engine lives, and an honest lane beside them works."""
    rng = random.Random(seed)
    source, into = twin.noise(8, 1, 4096)[0], np.zeros(4096, np.uint8)
    with joined() as ends, Target(ends.far, tensors(source)):
        for _ in range(150):
            with Wire(ends.far) as wire:
                frames = bytearray()
                for _ in range(rng.randrange(1, 4)):
                    plan, write = one_row(rng.randrange(1, 5000)), rng.random() < 0.5
                    meta = encode_plan(plan)
                    size = plan.nbytes if write else 0
                    frames += header(WRITE if write else READ, id=rng.randrange(4), meta=len(meta), size=size) + meta
                    frames += bytes(size)
                for _ in range(rng.randrange(4)):
                    frames[rng.randrange(min(len(frames), 120))] ^= 1 << rng.randrange(8)
                wire.sendall(frames[: rng.randrange(len(frames) + 1)])
        assert ends.move(ends.lanes[0], one_row(4096), tensors(into)).ending is Ending.GOOD
