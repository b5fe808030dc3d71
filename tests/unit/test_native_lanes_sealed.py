"""Lanes whose bytes are sealed: keys, records as they are on the wire, and what a peer with the keys may do wrong.

All that plain lanes do sealed ones do too: see the fixture `kind_of_lane`.
"""

import fcntl
import os
import socket
import subprocess
import sys
import termios
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults import lane_ends
from faults.lane_ends import BIG, DATA, READ, WRITE, Target, Wire, deadline, frame_of, joined, next_event, one_row
from faults.sealing import FAR_KEYS, LANE_RECORDS, LENGTH, MAX_RECORD, NEAR_KEYS, OVERHEAD, Opener, Sealer, records_of
from llm_datadist._memory.segment import new_memfd
from llm_datadist._native import MAPPED, USER, Ending, LaneEngine, LaneLost, ReadAsked, ReplyCache, Tensors, WriteAsked
from llm_datadist._native import encode_request as encode
from llm_datadist.errors import ParamError
from llm_datadist.testing.scene import descriptors
from llm_datadist.testing.scene import tensors_over as tensors
from tests.support import twin
from tests.support.moves import wait_until as wait_for

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("only_sealed", "nothing_left")


@pytest.fixture
def only_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_ends.Kind, "sealed", True)


def record(content: bytes) -> bytes:
    """Return the first record of the peer."""
    with closing(Sealer(FAR_KEYS[0])) as sealer:
        return bytes(sealer.record(content))


def changed(record: bytes, at: int) -> bytes:
    return record[:at] + bytes([record[at] ^ (1 if at else 8)]) + record[at + 1 :]


# Keys


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ((bytes(31), bytes(32)), "keys: send_key has 31 bytes, must have 32"),
        ((bytes(32), bytes(33)), "keys: receive_key has 33 bytes, must have 32"),
        ((b"", bytes(32)), "keys: send_key has 0 bytes, must have 32"),
        ((bytes(32), bytes(32)), "keys: send_key and receive_key are the same"),
        ((bytes(32),), "keys is no pair"),
        ((bytes(32), bytes(32), bytes(32)), "keys is no pair"),
        (bytes(64), "keys is no pair"),
        ([bytes(32), bytes(32)], "keys is no pair"),
        ((bytes(32), None), "keys: receive_key is not bytes"),
        (("x" * 32, bytes(32)), "keys: send_key is not bytes"),
        ((bytearray(32), bytes(32)), "keys: send_key is not bytes"),
    ],
)
def test_keys_that_are_none_are_refused_and_the_socket_is_closed(engine: LaneEngine, keys: Any, why: str) -> None:
    for attach in (
        lambda fd: engine.add_lane(fd, keys),
        lambda fd: engine.attach_lane(engine.reserve_lane(), fd, None, keys),
    ):
        near, far = socket.socketpair()
        with far:
            with pytest.raises(ParamError, match=f"^{why}") as refused:
                attach(near.detach())
            assert far.recv(1) == b""
        assert "xxx" not in str(refused.value)


@pytest.mark.parametrize(
    # The first is a mirror: with a key for each direction it is not understood.
    "far_keys",
    [NEAR_KEYS, (FAR_KEYS[0], bytes(32)), (bytes(32), FAR_KEYS[1]), (bytes(32), bytes(31) + b"1"), None],
)
def test_ends_with_different_keys_do_not_understand_each_other(far_keys: tuple[bytes, bytes] | None) -> None:
    source, into = twin.noise(1, 1, 4096)[0], np.zeros(4096, np.uint8)
    near_end, far_end = socket.socketpair()
    with joined(lanes=0) as ends, Target(ends.far, tensors(source)):
        ends.lanes.append(ends.near.add_lane(near_end.detach(), NEAR_KEYS))
        ends.far.add_lane(far_end.detach(), far_keys)
        outcome = ends.move(ends.lanes[0], one_row(4096), tensors(into))
        assert outcome.ending is Ending.LOST
        assert not into.any()


def test_no_bytes_go_out_in_the_clear(engine: LaneEngine) -> None:
    secret = b"nobody on the way may read this "
    payload = np.frombuffer(secret * 5000, np.uint8).copy()
    near, far = socket.socketpair()
    with far, closing(Opener(NEAR_KEYS[0])) as opener:
        far.settimeout(lane_ends.BUDGET_S)
        lane = engine.add_lane(near.detach(), NEAR_KEYS)
        engine.start(lane, b"the meta " * 20, one_row(payload.size), tensors(payload), write=True)
        seen = b""
        while len(opener.plain) < lane_ends.HEADER.size + 180 + payload.size:
            seen += (more := far.recv(MIB))
            opener.feed(more)
        assert opener.plain.endswith(b"the meta " * 20 + payload.tobytes())
        for part in (secret[:8], b"the meta", lane_ends.MAGIC.to_bytes(4, "little")):
            assert part not in seen
        lengths = [LENGTH.unpack_from(record)[0] for record in records_of(seen)]
        assert lengths[0] == lane_ends.HEADER.size + 180, "what comes before a payload is a record, the payload unmoved"
        assert sum(lengths[1:]) == payload.size
        assert max(lengths) == MAX_RECORD


def test_without_openssl_no_lane_is_sealed_and_none_is_plain(tmp_path: Path) -> None:
    """A child finds something else where libcrypto should be."""
    (tmp_path / "libcrypto.so.3").write_text("no library")
    code = """
import socket
from llm_datadist._native import LaneEngine
from llm_datadist.errors import ParamError
engine = LaneEngine(1)
for _ in range(2):
    near, far = socket.socketpair()
    try:
        engine.add_lane(near.detach(), (bytes(32), bytes(31) + b"1"))
    except ParamError as error:
        print(error)
    assert far.recv(100) == b""
    far.close()
plain, far = socket.socketpair()
engine.add_lane(plain.detach())
engine.close()
far.close()
"""
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for line in ran.stdout.splitlines():
        assert line.startswith("keys: encrypted lanes need OpenSSL 3, and libcrypto.so.3 cannot be used: ")
        assert str(tmp_path) in line
    assert len(ran.stdout.splitlines()) == 2


# Records


@pytest.mark.parametrize("size", [1, 7, 39, 40, 41, 1000, MAX_RECORD - 1, MAX_RECORD])
@pytest.mark.parametrize("mapped", [False, True])
def test_records_of_any_size_are_taken(engine: LaneEngine, size: int, mapped: bool) -> None:
    """Frames cut into records as no end of ours would cut them, sent in pieces that are none."""
    nbytes = 3000 if size < 10 else 200_000
    plan = twin.make_plan(
        np.array([[10, 0, nbytes // 2], [250_000, 0, 999], [120_000, 0, nbytes // 2 - 999]], np.uint64)
    )
    into = twin.noise(2, 1, 300_000)[0]
    payload = twin.noise(3, 1, plan.nbytes)[0]
    expected, at = into.copy(), 0
    for to, _, count in plan.runs.tolist():
        expected[to : to + count] = payload[at : at + count]
        at += count
    with Wire(engine) as wire:
        job = engine.start(
            wire.lane, b"", plan, Tensors(tensors(into).bases, into.size, place=MAPPED if mapped else USER), write=False
        )
        id = wire.header()[1]
        frame = frame_of(DATA, id, b"", payload.tobytes()) + bytes(8)
        sealer = Sealer(FAR_KEYS[0])
        stream = sealer.seal(frame, size)
        sealer.close()
        for at in range(0, len(stream), 77_777):
            wire.sock.sendall(stream[at : at + 77_777])
        assert engine.wait(job, deadline()) == (Ending.GOOD, 0, plan.nbytes, "")
    assert np.array_equal(into, expected)


CHANGED, INSIDE = (
    "an encrypted record is not as the peer sent it",
    "the peer closed the connection inside an encrypted record",
)
BREACHES = [
    # Told by the length alone: what it announces need not come.
    *((f"length {size}", LENGTH.pack(size), f"an encrypted record of {size} bytes") for size in (0, 2**31, 2**32 - 1)),
    (f"length {MAX_RECORD + 1}", LENGTH.pack(MAX_RECORD + 1), f"an encrypted record of {MAX_RECORD + 1} bytes"),
    ("empty, with a right tag", record(b""), "an encrypted record of 0 bytes"),
    ("above the limit, with a right tag", record(bytes(MAX_RECORD + 1))[:1000], f"record of {MAX_RECORD + 1} bytes"),
    # Nothing of a record that was changed is interpreted: its header is a breach of its own, with another text.
    *((f"changed at {at}", changed(record(bytes(lane_ends.HEADER.size)), at), CHANGED) for at in (0, 4, 20, 44, 59)),
]
with closing(Sealer(FAR_KEYS[0])) as _sealer, closing(Sealer(NEAR_KEYS[0])) as _mirror:
    FIRST, SECOND, OURS = _sealer.record(bytes(40)), _sealer.record(frame_of(READ, 2)), _mirror.record(bytes(40))
BREACHES += [
    ("the first is missing", SECOND, CHANGED),
    ("two changed places", SECOND + FIRST, CHANGED),
    ("one is a byte shorter", LANE_RECORDS.shortened(FIRST), CHANGED),
    ("ours comes back", OURS, CHANGED),
]
BREACHES += [
    (f"ends after {left} bytes", record(frame_of(READ, 1))[:left], INSIDE)
    for left in (1, LENGTH.size - 1, LENGTH.size, 30, lane_ends.HEADER.size + OVERHEAD - 1)
]


@pytest.mark.parametrize(("stream", "why"), [row[1:] for row in BREACHES], ids=[row[0] for row in BREACHES])
def test_what_is_no_record_of_the_peers_costs_the_lane(engine: LaneEngine, stream: bytes, why: str) -> None:
    with Wire(engine) as wire:
        wire.sock.sendall(stream)
        wire.sock.shutdown(socket.SHUT_WR)
        assert wire.is_closed()
        assert next_event(engine, LaneLost).reason.endswith(why)


def test_a_record_that_comes_twice_costs_the_lane(engine: LaneEngine) -> None:
    with Wire(engine) as wire:
        twice = record(frame_of(READ, 1))
        wire.sock.sendall(twice)
        assert next_event(engine, ReadAsked).id == 1
        wire.sock.sendall(twice)
        assert next_event(engine, LaneLost).reason.endswith(CHANGED)


def test_the_stream_ends_between_two_records(engine: LaneEngine) -> None:
    with Wire(engine) as wire:
        wire.send(READ, 1)
        wire.sock.shutdown(socket.SHUT_WR)
        events = lane_ends.events_of(engine)
        while len(events) < 2:
            events += lane_ends.events_of(engine)
        assert isinstance(events[0], ReadAsked)
        assert events[1] == LaneLost(wire.lane, "the peer closed the connection")


@pytest.mark.parametrize("at", ["payload", "trailer"])
def test_a_lane_that_breaks_in_its_payload_breaks_nothing_else(at: str) -> None:
    """Nor does a wrong trailer make a job good."""
    source, into, other = twin.noise(4, 1, BIG)[0], np.zeros(BIG, np.uint8), np.zeros(BIG, np.uint8)
    with joined() as ends, Wire(ends.near) as wire, Target(ends.far, tensors(source)):
        job = ends.near.start(wire.lane, b"", one_row(BIG), tensors(into), write=False)
        wire.sendall(frame_of(DATA, wire.header()[1], b"", bytes(MIB), BIG))
        if at == "trailer":
            wire.sendall(bytes(BIG - MIB))
        nbytes = 1000 if at == "payload" else 8
        wire.sock.sendall(LENGTH.pack(nbytes) + bytes(nbytes + 16))
        outcome = ends.near.wait(job, deadline())
        assert outcome.ending is Ending.LOST
        assert outcome.text.endswith(CHANGED)
        assert ends.move(ends.lanes[0], one_row(BIG), tensors(other)).ending is Ending.GOOD
    assert np.array_equal(other, source)


F_SEAL_EXEC = 0x20


def transits() -> list[int]:
    """Return the files for bytes on their way to memory that can be unmapped."""
    return [int(each.split()[0]) for each in descriptors() if "lldd-transit" in each]


def sealed_from_execution(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & F_SEAL_EXEC)


def test_an_engine_without_lanes_keeps_nothing_of_them() -> None:
    source, memory = np.ones(MIB, np.uint8), np.zeros(MIB, np.uint8)
    with joined(2) as ends, Target(ends.far, tensors(source)):
        for lane in ends.lanes:
            assert ends.move(lane, one_row(MIB), tensors(memory)).ending is Ending.GOOD
            with open(new_memfd("as others are"), "rb") as other:
                assert [sealed_from_execution(fd) for fd in transits()] == [sealed_from_execution(other.fileno())] * 2
            ends.near.drop_lane(lane)
        wait_for(lambda: not transits())
    assert memory.all()


# What is in hand when the socket is silent


@pytest.mark.parametrize("size", [50, 1000, MAX_RECORD])
@pytest.mark.parametrize("threads", [1, 2])
def test_requests_behind_a_write_that_waits_for_its_grant(size: int, threads: int) -> None:
    """All come at once, in records of that size; then the peer is silent, and each is answered in its turn."""
    memory = np.zeros((8, 3000), np.uint8)
    payloads = twin.noise(5, 8, 3000)
    engine = LaneEngine(threads)
    with Wire(engine) as wire, closing(Sealer(FAR_KEYS[0])) as sealer:
        frames = b"".join(frame_of(WRITE, n, b"m", payloads[n].tobytes()) for n in range(8)) + frame_of(READ, 9, b"end")
        wire.sock.sendall(sealer.seal(frames, size))
        for n in range(8):
            asked = next_event(engine, WriteAsked)
            assert (asked.id, asked.meta, asked.nbytes) == (n, b"m", 3000)
            if n % 4 == 3:
                engine.refuse(asked.lane, n, 7, "no")
            else:
                engine.reply(asked.lane, n, one_row(3000), tensors(memory[n]), [], 0, write=True)
            assert wire.result()[:2] == (n, 7 if n % 4 == 3 else 0)
        assert next_event(engine, ReadAsked).meta == b"end"
    engine.close()
    for n in range(8):
        assert np.array_equal(memory[n], payloads[n] if n % 4 != 3 else np.zeros(3000, np.uint8))


def test_a_silent_peer_with_more_than_a_slice_in_hand(engine: LaneEngine) -> None:
    """Large writes, cached replies, and over TCP, where the low-water mark counts."""
    nbytes, count = 2 * MIB + 777, 6
    memory, payload = np.zeros(nbytes, np.uint8), twin.noise(6, 1, nbytes)[0]
    grants = ReplyCache()
    grants.keep(b"m", True, tensors(memory).native, [], 0)
    near, far = lane_ends.tcp_pair()
    with far, closing(Sealer(FAR_KEYS[0])) as sealer:
        far.settimeout(lane_ends.BUDGET_S)
        lane = engine.reserve_lane()
        engine.attach_lane(lane, near.detach(), grants, NEAR_KEYS)
        meta = encode(b"m", nbytes, one_row(nbytes), True)
        for n in range(count):
            stream = sealer.seal(frame_of(WRITE, n, meta, payload.tobytes()), 60_000 + n)
            far.sendall(stream)
            assert far.recv(1000)  # its RESULT
            assert np.array_equal(memory, payload)
            memory[:] = 0
        assert lane_ends.events_of(engine, 0) == []


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 20])
def test_the_last_bytes_of_a_payload_wake_the_thread_over_tcp(cut: int, engine: LaneEngine) -> None:
    """Most of its last record is here: no more is awaited than what is still to come."""
    into, payload = np.zeros(MIB, np.uint8), twin.noise(7, 1, MIB)[0]
    near, far = lane_ends.tcp_pair()
    descriptor = near.detach()
    with far, closing(Sealer(FAR_KEYS[0])) as sealer:
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lane = engine.add_lane(descriptor, NEAR_KEYS)
        job = engine.start(lane, b"", one_row(MIB), tensors(into), write=False)
        assert far.recv(1000)
        stream = sealer.seal(frame_of(DATA, job, b"", payload.tobytes()) + bytes(8))
        far.sendall(stream[:-cut])
        wait_for(lambda: fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)) == bytes(4))
        far.sendall(stream[-cut:])
        assert engine.wait(job, deadline()).ending is Ending.GOOD
    assert np.array_equal(into, payload)


def test_what_a_caller_leaves_in_hand_the_thread_takes() -> None:
    """A caller receives for itself, for a short time; so many runs take it longer than that, and than a slice."""
    nbytes = 256 << 10
    offsets = np.arange(nbytes, dtype=np.uint64)
    plan = twin.make_plan(np.stack([2 * offsets, offsets, np.ones_like(offsets)], axis=1))
    payload = twin.noise(11, 1, nbytes)[0]
    for _ in range(5):
        into = np.zeros(2 * nbytes, np.uint8)
        engine = LaneEngine(1)
        with Wire(engine, buffer=1 << 20) as wire, closing(Sealer(FAR_KEYS[0])) as sealer:
            job = engine.start(wire.lane, b"", plan, tensors(into), write=False)
            stream = sealer.seal(frame_of(DATA, wire.header()[1], b"", payload.tobytes()) + bytes(8))
            sender = threading.Thread(target=wire.sock.sendall, args=(stream,))
            sender.start()
            assert engine.wait(job, deadline()) == (Ending.GOOD, 0, nbytes, "")
            sender.join()
        engine.close()
        assert np.array_equal(into[::2], payload)
        assert not into[1::2].any()


def test_answers_in_one_record_reach_callers_that_wait_by_themselves(engine: LaneEngine) -> None:
    """One read is answered together with the end of another, to a thread that receives for itself."""
    first, second = np.zeros(100, np.uint8), np.zeros(100, np.uint8)
    with Wire(engine) as wire, closing(Sealer(FAR_KEYS[0])) as sealer:
        for n in range(50):
            jobs = [engine.start(wire.lane, b"", one_row(100), tensors(into), write=False) for into in (first, second)]
            for _ in jobs:
                wire.header()
            frames = [frame_of(DATA, job, b"", bytes([n]) * 100) + bytes(8) for job in jobs]
            wire.sock.sendall(sealer.record(b"".join(frames)))
            for job in jobs:
                assert engine.wait(job, deadline()).ending is Ending.GOOD
            assert (first == n).all()
            assert (second == n).all()


def test_a_payload_that_is_dropped_ends_although_all_of_it_is_in_hand(engine: LaneEngine) -> None:
    with Wire(engine) as wire, closing(Sealer(FAR_KEYS[0])) as sealer:
        wire.sock.sendall(sealer.record(frame_of(WRITE, 1, b"", bytes(5000)) + frame_of(READ, 2)))
        asked = next_event(engine, WriteAsked)
        engine.refuse(asked.lane, 1, 3, "no")
        assert wire.result() == (1, 3, "no")
        assert next_event(engine, ReadAsked).id == 2
        engine.refuse(asked.lane, 2, 4, "no")
        assert wire.result() == (2, 4, "no")
