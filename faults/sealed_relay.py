"""A relay between two ends of a sealed lane that does one wrong thing to the bytes of each job.

    python -m faults sealed-lanes --trials 100000

It changes, drops, repeats, inserts or cuts bytes, or drops, repeats, swaps, replaces, shortens or reflects records. No
job may end well with wrong bytes or touch memory beside its blocks, and every job has to end. `--plain` does the same
to plain lanes, which must be caught with wrong bytes: else nothing was looked at. :mod:`faults.sealed_control`
does it to control connections.
"""

from __future__ import annotations

import argparse
import random
import select
import socket
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from faults.harness import say
from faults.sealing import FAR_KEYS, LENGTH, NEAR_KEYS, OVERHEAD
from llm_datadist._native import (
    Ending,
    LaneEngine,
    LaneEvent,
    LaneLost,
    Plan,
    StandingGrants,
    Tensors,
    WriteAsked,
    encode_request,
)
from llm_datadist._transport.lanes import decode_request
from llm_datadist.errors import LLMException

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

BYTE_FAULTS: Final = ("flip", "drop", "repeat", "insert", "cut")
RECORD_FAULTS: Final = ("drop record", "repeat record", "swap records", "replace record", "shorten record", "reflect")
FAULTS: Final = (*BYTE_FAULTS, *RECORD_FAULTS)

_EXTENT: Final = 400 << 10
_HANDLE: Final = b"memory"
_SECONDS: Final = 30.0
_QUIET_SECONDS: Final = 0.004
"""When nothing moves for so long the relay hangs up: an end may wait for what was dropped."""


@dataclass(frozen=True)
class Framing:
    """How a stream is cut into records.

    Attributes:
        head_nbytes: Bytes in front of a record.
        nbytes_of: function(head); the bytes of the record that begins so, with its head.
        shorten: function(record); it without its last byte, and saying so.
    """

    head_nbytes: int
    nbytes_of: Callable[[bytes | bytearray], int]
    shorten: Callable[[bytes], bytes]


LANE_RECORDS: Final = Framing(
    LENGTH.size,
    lambda head: LENGTH.unpack_from(head)[0] + OVERHEAD,
    lambda record: LENGTH.pack(len(record) - OVERHEAD - 1) + record[LENGTH.size : -1],
)


class Flow:
    """One direction through the relay, with its fault: of bytes ``at`` an offset, or of the record number ``at``."""

    def __init__(self, fault: str, at: int, rng: random.Random, framing: Framing = LANE_RECORDS) -> None:
        self.hit = self.cut = False
        self.records: list[bytes] = []
        self.other: Flow | None = None
        self._fault, self._at, self._rng, self._framing = fault, at, rng, framing
        self._seen = 0
        self._pending = bytearray()
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what goes on instead of these bytes."""
        if self._fault in RECORD_FAULTS:
            return self._feed_records(data)
        index = self._at - self._seen
        self._seen += len(data)
        if self.hit or not 0 <= index < len(data):
            return data
        self.hit = True
        count = self._rng.choice((1, 2, 16, 20, 1000))
        before, these, after = data[:index], data[index : index + count], data[index + count :]
        match self._fault:
            case "flip":
                return before + bytes([these[0] ^ 1 << self._rng.randrange(8)]) + these[1:] + after
            case "drop":
                return before + after
            case "repeat":
                return before + these + these + after
            case "insert":
                return before + self._rng.randbytes(count) + these + after
        self.cut = True
        return before

    def _feed_records(self, data: bytes) -> bytes:
        self._pending += data
        out = b""
        while len(self._pending) >= self._framing.head_nbytes:
            size = self._framing.nbytes_of(self._pending)
            if len(self._pending) < size:
                break
            record = bytes(self._pending[:size])
            del self._pending[:size]
            self.records.append(record)
            out += self._altered(record)
        return out

    def _altered(self, record: bytes) -> bytes:
        if held := self._held:
            self._held = b""
            return record + held
        if self.hit or len(self.records) - 1 < self._at:
            return record
        others = self.records[:-1]
        if self._fault == "reflect":
            assert self.other is not None
            others = self.other.records
        if self._fault in ("replace record", "reflect"):
            self.hit = bool(others)
            return self._rng.choice(others) if others else record
        self.hit = True
        match self._fault:
            case "drop record":
                return b""
            case "repeat record":
                return record + record
            case "shorten record":
                return self._framing.shorten(record)
        self._held = record
        return b""


class _Relay:
    """Two connections, and what goes from one to the other."""

    def __init__(self, fault: str, rng: random.Random, nbytes: int, *, backwards: bool) -> None:
        records = fault in RECORD_FAULTS
        self.near, self._a = socket.socketpair()
        self.far, self._b = socket.socketpair()
        at = rng.choice((0, 0, 1, 2)) if records else rng.randrange(nbytes)
        self.faulty = Flow(fault, at, rng)
        honest = Flow("drop record" if records else "flip", 1 << 60, rng)  # never there; records are noted
        self.faulty.other = honest
        there, back = (honest, self.faulty) if backwards else (self.faulty, honest)
        self._ways = {self._a: (self._b, there), self._b: (self._a, back)}
        self._out = {self._a: bytearray(), self._b: bytearray()}
        for sock in self._ways:
            sock.setblocking(False)

    def run(self, far: LaneEngine, memory: Tensors) -> None:
        """Go on until an end hangs up, the relay has to, or nothing moves."""
        while True:
            writers = [sock for sock, out in self._out.items() if out]
            listened: list[socket.socket | int] = [*self._ways, far.event_fd()]
            ready, room, _ = select.select(listened, writers, [], _QUIET_SECONDS)
            if not (ready or room):
                return
            try:
                for sock in self._ways:
                    if sock in ready and not self._take(sock):
                        return
                for sock, out in self._out.items():
                    if out:
                        with suppress(BlockingIOError):
                            del out[: sock.send(out)]
            except ConnectionError:
                return
            for event in far.poll_events():
                _answer(far, event, memory)

    def _take(self, sock: socket.socket) -> bool:
        data = sock.recv(1 << 20)
        to, flow = self._ways[sock]
        self._out[to] += flow.feed(data)
        if flow.cut:
            with suppress(BlockingIOError):
                to.send(self._out[to])
        return bool(data) and not flow.cut

    def close(self) -> None:
        self._a.close()
        self._b.close()


def _answer(engine: LaneEngine, event: LaneEvent, memory: Tensors) -> None:
    if isinstance(event, LaneLost):
        return
    verb = engine.accept_write if isinstance(event, WriteAsked) else engine.serve_read
    try:
        verb(event.lane, event.id, decode_request(event.meta).plan, memory, [], 0)
    except LLMException as error:
        engine.refuse(event.lane, event.id, 1, str(error))


@dataclass
class Report:
    """What came of the trials."""

    trials: int = 0
    hit: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # ended well with wrong bytes, or wrote beside its blocks
    hung: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        ended = ", ".join(f"{name} {count}" for name, count in sorted(self.ended.items()))
        hits = ", ".join(f"{name} {count}" for name, count in sorted(self.hit.items()))
        return f"{self.trials} trials: {len(self.wrong)} wrong, {len(self.hung)} hung; {ended}; hit by: {hits}"


class Scene:
    """Two engines and their memory. A context manager is :func:`contextlib.closing`."""

    def __init__(self, seed: int, *, sealed: bool) -> None:
        self._near, self._far = LaneEngine(1), LaneEngine(1)
        self._sealed = sealed
        self._rng, noise = random.Random(seed), np.random.default_rng(seed)
        self._ours, self._theirs = (noise.integers(0, 256, _EXTENT, np.uint8) for _ in range(2))
        self.report = Report()

    def close(self) -> None:
        self._near.close()
        self._far.close()

    def trial(self) -> None:
        """Start one job over a lane of its own, and see what comes of it."""
        rng = self._rng
        plan, write, mapped = self._plan(), rng.random() < 0.5, rng.random() < 0.7
        fault = rng.choice(FAULTS if self._sealed else BYTE_FAULTS)
        against_payload = rng.random() < 0.3
        nbytes = 60 if against_payload else rng.choice((60, plan.nbytes + 60))
        relay = _Relay(fault, rng, nbytes, backwards=against_payload == write)
        near, far = (_tensors(memory, mapped=mapped) for memory in (self._ours, self._theirs))
        dst, src = (self._theirs, self._ours) if write else (self._ours, self._theirs)
        before = dst.copy()
        with closing(relay):
            lane, far_lane = self._join(relay, far)
            start = self._near.start_write if write else self._near.start_read
            job = start(lane, encode_request(_HANDLE, _EXTENT, plan, write), plan, near)
            relay.run(self._far, far)
        outcome = self._near.wait(job, time.monotonic_ns() + int(_SECONDS * 1e9))
        self._near.drop_lane(lane)
        self._far.drop_lane(far_lane)
        self._near.poll_events()
        self._far.poll_events()
        name = f"trial {self.report.trials}: {fault}, {'write' if write else 'read'} of {plan.nbytes}, {outcome}"
        self._judge(name, plan, (dst, src, before), outcome.ending)
        self.report.trials += 1
        self.report.hit[fault] += relay.faulty.hit

    def _join(self, relay: _Relay, far: Tensors) -> tuple[int, int]:
        """Add the lane at both ends; the far one may have to ask its owner for each request."""
        grants = None
        if self._rng.random() < 0.6:
            grants = StandingGrants()
            for write in (False, True):
                grants.keep(_HANDLE, write, far.native, [], 0, far.mapped)
        far_lane = self._far.reserve_lane()
        self._far.attach_lane(far_lane, relay.far.detach(), grants, FAR_KEYS if self._sealed else None)
        return self._near.add_lane(relay.near.detach(), NEAR_KEYS if self._sealed else None), far_lane

    def _plan(self) -> Plan:
        """Return up to three runs apart from each other: small ones, around a record's size, and large ones."""
        rng = self._rng
        most = rng.choice((100, 3000, 3000, 23_000, 120_000))
        room = _EXTENT // 3
        dst, src = (rng.sample((0, room, 2 * room), 3) for _ in range(2))
        runs = [
            (d + rng.randrange(100), s + rng.randrange(100), rng.randrange(1, most))
            for d, s in zip(dst, src, strict=True)
        ]
        runs = runs[: rng.randrange(1, 4)]
        return Plan(0, 0, 1, np.array(runs, np.uint64), False, sum(run[2] for run in runs))

    def _judge(self, name: str, plan: Plan, memory: tuple[Bytes, Bytes, Bytes], ending: Ending) -> None:
        dst, src, before = memory
        self.report.ended[ending.name.lower()] += 1
        if ending is Ending.TIMEOUT:
            self.report.hung.append(name)
        expected = before.copy()
        for to, from_, count in plan.runs.tolist():
            # Where a job failed its blocks may have anything.
            good, any_ = src[from_ : from_ + count], dst[to : to + count]
            expected[to : to + count] = good if ending is Ending.GOOD else any_
        if not np.array_equal(dst, expected):
            self.report.wrong.append(name)
        dst[:] = before


def _tensors(memory: Bytes, *, mapped: bool) -> Tensors:
    return Tensors(np.array([memory.ctypes.data], np.uint64), _EXTENT, mapped=mapped)


def run(trials: int, seed: int, *, sealed: bool = True) -> Report:
    """Do so many trials."""
    with closing(Scene(seed, sealed=sealed)) as scene:
        for _ in range(trials):
            scene.trial()
        return scene.report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 when something was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="plain lanes, which must be found wrong")
    options = parser.parse_args(arguments)
    report = run(options.trials, options.seed, sealed=not options.plain)
    say(str(report))
    for line in [*report.wrong[:10], *report.hung[:10]]:
        say(line)
    return int(bool(report.hung) or bool(report.wrong) != options.plain)
