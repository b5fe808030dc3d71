"""Two engines joined by lanes, and a peer that speaks the wire by hand: what the tests of the lanes stand on."""

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Self, TypeVar

import numpy as np

from faults.sealing import FAR_KEYS, MAX_RECORD, NEAR_KEYS
from faults.strangers import LaneKeys, Plain
from llm_datadist import _native as native
from tests.support import twin

BUDGET_S: Final = 20.0
"""For what is expected to happen: only a hang can use it up."""
MAGIC: Final = 0x31444C44
READ, DATA, WRITE, RESULT = 1, 2, 3, 4
BIG: Final = 8 << 20
"""Bytes: more than the socket buffers hold."""
HEADER: Final = struct.Struct("<IBBHQQQQ")


class Kind:
    """The kind of lanes that are made here: what the fixture `kind_of_lane` sets for each test."""

    sealed = False


E = TypeVar("E", native.ReadAsked, native.WriteAsked, native.LaneLost)


def deadline(seconds: float = BUDGET_S) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def one_row(nbytes: int) -> native.Plan:
    return twin.make_plan(native.plan_row(0, 0, nbytes))


def encode_plan(plan: native.Plan) -> bytes:
    head = struct.pack("<QQQQ", plan.dst_first, plan.src_first, plan.count, plan.nbytes)
    return head + plan.runs.tobytes()


def decode_plan(meta: bytes) -> native.Plan:
    dst_first, src_first, count, nbytes = struct.unpack_from("<QQQQ", meta)
    runs = np.frombuffer(meta, np.uint64, offset=32).reshape(-1, 3)
    return native.Plan(dst_first, src_first, count, runs, False, nbytes)


def next_event(engine: native.LaneEngine, kind: type[E]) -> E:
    """Return the next event, which must be the only one and of that kind."""
    (event,) = events_of(engine)
    assert isinstance(event, kind), event
    return event


def events_of(engine: native.LaneEngine, timeout: float = BUDGET_S) -> list[native.LaneEvent]:
    """Return the events as soon as there are some, or none in time."""
    until = time.monotonic() + timeout
    while True:
        ready = select.select([engine.event_fd()], [], [], max(0.0, until - time.monotonic()))[0]
        events = engine.poll_events()
        if events or not ready:
            return events


@dataclass
class Target:
    """Answers every request from its tensors, in a thread of its own."""

    engine: native.LaneEngine
    tensors: native.Tensors
    guards: list[tuple[int, int]] = field(default_factory=list)
    tag: int = 0

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            for event in events_of(self.engine, 0.005):
                self.answer(event)

    def answer(self, event: native.LaneEvent) -> None:
        if isinstance(event, native.ReadAsked | native.WriteAsked):
            write = isinstance(event, native.WriteAsked)
            try:
                plan = decode_plan(event.meta)
                self.engine.reply(event.lane, event.id, plan, self.tensors, self.guards, self.tag, write=write)
            except (ValueError, TypeError, struct.error) as error:
                self.engine.refuse(event.lane, event.id, 22, str(error))


@dataclass
class Ends:
    near: native.LaneEngine
    far: native.LaneEngine
    lanes: list[int] = field(default_factory=list)  # numbers at the near end
    far_lanes: list[int] = field(default_factory=list)

    def join(self, make: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair) -> int:
        near, far = make()
        self.lanes.append(self.near.add_lane(near.detach(), NEAR_KEYS if Kind.sealed else None))
        self.far_lanes.append(self.far.add_lane(far.detach(), FAR_KEYS if Kind.sealed else None))
        return self.lanes[-1]

    def start(self, lane: int, plan: native.Plan, local: native.Tensors, *, write: bool = False) -> int:
        return self.near.start(lane, encode_plan(plan), plan, local, write=write)

    def move(self, lane: int, plan: native.Plan, local: native.Tensors, *, write: bool = False) -> native.Outcome:
        return self.near.wait(self.start(lane, plan, local, write=write), deadline())

    def works(self, lane: int) -> bool:
        """Return True if a read over that lane brings what is at the far end."""
        source, into = twin.noise(8, 2, 4096)
        with Target(self.far, twin.tensors_of([source])):
            outcome = self.move(lane, one_row(4096), twin.tensors_of([into]))
        return outcome.ending is native.Ending.GOOD and np.array_equal(into, source)

    def close(self) -> None:
        self.near.close()
        self.far.close()


@contextmanager
def joined(lanes: int = 1, threads: int = 1) -> Iterator[Ends]:
    with closing(Ends(native.LaneEngine(threads), native.LaneEngine(threads))) as ends:
        for _ in range(lanes):
            ends.join()
        yield ends


def frame_of(kind: int, id: int, meta: bytes = b"", payload: bytes = b"", declared: int | None = None) -> bytes:
    """Return a frame; ``declared``: the payload's size in the header, if it is not that of ``payload``."""
    nbytes = len(payload) if declared is None else declared
    return HEADER.pack(MAGIC, kind, 0, 0, id, len(meta), nbytes, 0) + meta + payload


class Wire:
    """The far end of one lane, by hand: sends and receives frames, right or wrong ones."""

    _codec, _here = Plain(), b""

    def __init__(
        self, engine: native.LaneEngine, *, buffer: int | None = None, grants: native.ReplyCache | None = None
    ) -> None:
        near, self.sock = socket.socketpair()
        self.sock.settimeout(BUDGET_S)
        if buffer is not None:
            for end in (near, self.sock):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        self.lane = engine.reserve_lane()
        engine.attach_lane(self.lane, near.detach(), grants, NEAR_KEYS if Kind.sealed else None)
        if Kind.sealed:
            self._codec = LaneKeys(FAR_KEYS)

    def send(self, kind: int, id: int, meta: bytes = b"", payload: bytes = b"", *, declared: int | None = None) -> None:
        self.sendall(frame_of(kind, id, meta, payload, declared))

    def sendall(self, data: bytes | bytearray) -> None:
        self.sock.sendall(self._codec.put(bytes(data)))

    def receive(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            more = self._receive_some(nbytes - len(data))
            assert more, f"the engine closed the lane after {len(data)} of {nbytes} bytes"
            data += more
        return bytes(data)

    def _receive_some(self, nbytes: int) -> bytes:
        while not self._here:
            if not (more := self.sock.recv(MAX_RECORD if Kind.sealed else nbytes)):
                return b""
            self._here = self._codec.opened(more)
        data, self._here = self._here[:nbytes], self._here[nbytes:]
        return data

    def header(self) -> tuple[int, int, int, int]:
        """Return (kind, id, meta bytes, payload bytes) of the next frame, checked."""
        magic, kind, flags, zero, id, meta, payload, reserved = HEADER.unpack(self.receive(HEADER.size))
        assert (magic, flags, zero, reserved) == (MAGIC, 0, 0, 0)
        return kind, id, meta, payload

    def result(self) -> tuple[int, int, str]:
        """Return (id, code, text) of the next frame, which is a RESULT."""
        kind, id, meta, payload = self.header()
        assert (kind, payload) == (RESULT, 0)
        body = self.receive(meta)
        return id, int.from_bytes(body[:4], "little"), body[4:].decode()

    def write_is_good(self, engine: native.LaneEngine, id: int) -> bool:
        """Return True if a write over this lane arrives in the engine's memory and is answered."""
        memory = np.zeros(1000, np.uint8)
        self.send(WRITE, id, b"", b"x" * 1000)
        asked = next_event(engine, native.WriteAsked)
        engine.reply(asked.lane, id, one_row(1000), twin.tensors_of([memory]), [], 0, write=True)
        return (asked.id, asked.nbytes, self.result(), memory.tobytes()) == (id, 1000, (id, 0, ""), b"x" * 1000)

    def is_closed(self) -> bool:
        with suppress(ConnectionResetError):
            return self._receive_some(1) == b""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.sock.close()
