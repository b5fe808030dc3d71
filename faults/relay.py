"""A relay between two ends, which does to their bytes what networks, dying hosts and attackers do.

An end that links to :attr:`Relay.address` instead of its peer's listener goes through the relay with all its
connections, the control connection and the data lanes. What happens to which bytes is said by :class:`Fault`, for
connections to come (:meth:`Relay.plan`) or for those that there are (:meth:`Relay.now`)::

    with Relay(("127.0.0.1", port)) as relay:
        relay.plan("control", "up", Fault("corrupt", at=40))  # byte 40 from the dialer to the listener
        ...
        relay.now("lane", "down", Fault("stall"))  # lanes carry nothing to the dialer any more
        relay.resume()

*Up* is from the dialer to the listener, *down* the other way. A :class:`Way` does one wrong thing, chosen by a seed, to
bytes or to records; :func:`carry` takes two sockets along their ways in the caller's thread.
"""

from __future__ import annotations

import math
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, Self

from faults.sealing import meaning
from llm_datadist import CacheKey
from llm_datadist._links.messages import PREAMBLE_BYTES
from llm_datadist._transport.lanes import LANE_PREAMBLE
from tests.support.linking import bytes_move_both_ways, info, link
from tests.support.moves import Spec

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from faults.sealing import Framing
    from llm_datadist import LLMStatusCode
    from tests.support.ends import LocalEnd
    from tests.support.pairs import Pair

Direction = Literal["up", "down"]
Kind = Literal["control", "lane"]

_CHUNK: Final = 1 << 16
_REMEMBERED: Final = 256
#: More than this on its way in one direction, and the sender has to wait.
_BUFFER: Final = 1 << 20
_CONNECT_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 30.0
_RESET: Final = struct.pack("ii", 1, 0)  # linger for no time: close sends a reset
#: When nothing moves for so long after a wrong byte the relay hangs up: an end may wait for what was dropped.
_QUIET_SECONDS: Final = 0.004
_LINK_QUIET_SECONDS: Final = 0.03

#: What a fault can do, at the byte numbered ``at`` of its direction.
FAULTS: Final = {
    "drop": "``count`` bytes vanish, all that follow if it is 0",
    "delay": "bytes from there on arrive ``seconds`` later",
    "throttle": "bytes from there on arrive at ``rate`` bytes a second at most",
    "truncate": "nothing of this connection goes on, either way: both ends see it end in good order",
    "reset": "the same, by a reset",
    "corrupt": "``count`` bytes, at least one, have their bits flipped",
    "duplicate": "``count`` bytes, at least one, are sent twice",
    "half_close": "the receiver sees the end of the stream; the other direction goes on",
    "stall": "nothing goes on in this direction until :meth:`Relay.resume`",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens to one direction of a connection."""

    what: str  # a key of FAULTS
    at: int = 0  # the byte, from 0 at the start of the connection, or from now for Relay.now
    count: int = 0
    seconds: float = 0.0
    rate: float = 0.0  # bytes a second

    def __post_init__(self) -> None:
        if self.what not in FAULTS:
            raise ValueError(f"what={self.what!r} is no fault; known are {', '.join(FAULTS)}")
        if self.what == "throttle" and self.rate <= 0:
            raise ValueError(f"rate={self.rate}: a throttle needs bytes a second, more than 0")


class Stream:
    """One direction of one connection: bytes in, bytes out, and the faults in between. No I/O, no clock."""

    def __init__(self, faults: tuple[Fault, ...] = ()) -> None:
        self.taken = self.waiting = 0
        self.end = ""
        self.stalled = False
        self.way: Way | None = None
        self._faults = sorted(faults, key=lambda fault: fault.at)
        self._left: dict[str, float] = {"corrupt": 0, "drop": 0, "duplicate": 0}  # bytes that suffer it
        self._repeated = bytearray()
        self._seconds = self._rate = 0.0
        self._clear_at = 0.0  # when the throttle has let the last byte through
        self._out: deque[tuple[float, bytes]] = deque()

    def add(self, fault: Fault) -> None:
        """Add a fault at its byte; one at or before the bytes that came in begins with the next byte."""
        self._faults = sorted([*self._faults, fault], key=lambda each: each.at)
        self._begin_due()

    def feed(self, data: bytes, now: float) -> None:
        if self.way is not None:
            data = self.way.feed(data)
        self._begin_due()
        while data and not self.end:
            room = self._faults[0].at - self.taken if self._faults else len(data)
            piece, data = data[:room], data[room:]
            self._pass(piece, now)
            self._begin_due()
        if self.way is not None and self.way.cut:
            self.end = "truncate"

    def due(self, now: float) -> bytes:
        out = bytearray()
        while self._out and not self.stalled and self._out[0][0] <= now:
            out += self._out.popleft()[1]
        self.waiting -= len(out)
        return bytes(out)

    def next_due(self) -> float | None:
        """Return when something may leave; None when nothing waits or nothing may."""
        return self._out[0][0] if self._out and not self.stalled else None

    @property
    def swallows(self) -> bool:
        """True when nothing that comes in will ever come out, its end included."""
        return self._left["drop"] == math.inf

    def _begin_due(self) -> None:
        while self._faults and self._faults[0].at <= self.taken and not self.end:
            fault = self._faults.pop(0)
            match fault.what:
                case "drop":
                    self._left["drop"] = fault.count or math.inf
                case "corrupt" | "duplicate":
                    self._left[fault.what] = max(fault.count, 1)
                case "delay":
                    self._seconds = fault.seconds
                case "throttle":
                    self._rate = fault.rate
                case "stall":
                    self.stalled = True
                case _:
                    self.end = fault.what

    def _part(self, what: str, data: bytes) -> int:
        """Return how many of these bytes suffer it."""
        count = int(min(self._left[what], len(data)))
        self._left[what] -= count
        return count

    def _pass(self, data: bytes, now: float) -> None:
        self.taken += len(data)
        count = self._part("corrupt", data)
        data = bytes(byte ^ 0xFF for byte in data[:count]) + data[count:]
        data = data[self._part("drop", data) :]
        if count := self._part("duplicate", data):
            self._repeated += data[:count]
            if not self._left["duplicate"]:
                data = data[:count] + bytes(self._repeated) + data[count:]
                self._repeated.clear()
        self.waiting += len(data)
        start = now + self._seconds
        # Pieces of a hundredth of a second, so that a slow network is slow and not merely late.
        step = max(int(self._rate / 100), 1) if self._rate else len(data) or 1
        for first in range(0, len(data), step):
            piece = data[first : first + step]
            if self._rate:
                self._clear_at = start = max(self._clear_at, start) + len(piece) / self._rate
            self._out.append((start, piece))


BYTE_HARM: Final = ("flip", "drop", "repeat", "insert", "cut")
RECORD_HARM: Final = ("drop record", "repeat record", "swap records", "replace record", "shorten record", "reflect")
NEVER: Final = 1 << 60


class Way:
    """One direction, and one wrong thing: to bytes ``at`` an offset, or to the record number ``at``."""

    def __init__(self, fault: str, at: int, rng: random.Random, framing: Framing) -> None:
        self.hit = self.cut = False
        self.came, self.went = bytearray(), bytearray()
        self.other: Way | None = None
        self._records: list[bytes] = []
        self._fault, self._at, self._rng, self._framing = fault, at, rng, framing
        self._seen = 0
        self._pending = bytearray()
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        self.came += data
        out = self._feed_records(data) if self._fault in RECORD_HARM else self._feed_bytes(data)
        self.went += out
        return out

    @property
    def harmed(self) -> bool:
        """Whether what went is another stream of TLS than what came, so far."""
        return not meaning(bytes(self.came)).startswith(meaning(bytes(self.went)))

    def _feed_bytes(self, data: bytes) -> bytes:
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
        while len(self._pending) >= self._framing.head.size:
            size = self._framing.nbytes_of(self._pending)
            if len(self._pending) < size:
                break
            record = bytes(self._pending[:size])
            del self._pending[:size]
            self._records.append(record)
            out += self._altered(record)
        return out

    def _altered(self, record: bytes) -> bytes:
        if held := self._held:
            self._held = b""
            return record + held
        if self.hit or len(self._records) - 1 < self._at:
            return record
        others = self._records[:-1]
        if self._fault == "reflect":
            assert self.other is not None
            others = self.other._records
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
                return self._framing.shortened(record)
        self._held = record
        return b""


def both_ways(fault: str, at: int, rng: random.Random, framing: Framing, *, backwards: bool) -> tuple[Way, Way]:
    faulty, honest = Way(fault, at, rng, framing), Way(fault, NEVER, rng, framing)
    faulty.other = honest
    return (honest, faulty) if backwards else (faulty, honest)


def carry(
    here: socket.socket,
    there: socket.socket,
    ways: tuple[Way, Way],
    turn: Callable[[], object] = lambda: None,
    beside: tuple[int, ...] = (),
) -> None:
    """Take bytes between two sockets until an end hangs up, a way is cut, nothing moves, or ``turn`` returns True.

    ``turn`` is called after each step; descriptors ``beside`` wake it, too.
    """
    routes = {here: (there, ways[0]), there: (here, ways[1])}
    out = {here: bytearray(), there: bytearray()}
    for sock in routes:
        sock.setblocking(False)
    while not (turn() or ways[0].cut or ways[1].cut):
        waited: list[socket.socket | int] = [*routes, *beside]
        ready, room, _ = select.select(waited, [sock for sock in out if out[sock]], [], _QUIET_SECONDS)
        if not (ready or room):
            return
        try:
            for sock, (to, way) in routes.items():
                if sock in ready:
                    if not (data := sock.recv(1 << 20)):
                        return
                    out[to] += way.feed(data)
            for sock, rest in out.items():
                with suppress(BlockingIOError):
                    del rest[: sock.send(rest) if rest else 0]
        except ConnectionError:
            return


class Half:
    """One direction of one connection with its sockets. The relay's thread only."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.stream = Stream()
        self.pending = b""  # out of the stream, not taken by the kernel yet
        self.ended = False  # the source has said its last
        self.shut = False  # and the sink knows

    @property
    def wants_to_read(self) -> bool:
        return not self.ended and self.stream.waiting + len(self.pending) < _BUFFER

    def read(self) -> bytes:
        """Return what the source says; b"" when nothing more comes."""
        data = self.source.recv(_CHUNK)
        self.ended = not data
        return data

    def write(self, now: float) -> None:
        if not self.pending:
            self.pending = self.stream.due(now)
        if self.pending:
            with suppress(BlockingIOError):
                self.pending = self.pending[self.sink.send(self.pending) :]

    @property
    def drained(self) -> bool:
        return not self.pending and not self.stream.waiting

    def finish(self) -> None:
        """Tell the sink that the stream has ended, once it has."""
        over = self.stream.end == "half_close" or (self.ended and not self.stream.swallows and not self.stream.stalled)
        if over and self.drained and not self.shut:
            self.shut = True
            with suppress(OSError):
                self.sink.shutdown(socket.SHUT_WR)


class Carried:
    """One connection through the relay. Its attributes may be read by any thread."""

    def __init__(self, dialer: socket.socket, listener: socket.socket) -> None:
        self.kind: Kind = "control"
        self.said = b""
        self.over = False
        self.moved_at = 0.0
        self.halves: dict[Direction, Half] = {"up": Half(dialer, listener), "down": Half(listener, dialer)}
        self._first: bytes | None = b""  # None once the kind is known

    def taken(self, direction: Direction) -> int:
        return self.halves[direction].stream.taken

    def waits_in_vain(self) -> bool:
        """Return True if a wrong byte has gone on, and nothing has moved since for a while."""
        hit = any(half.stream.way is not None and half.stream.way.hit for half in self.halves.values())
        return hit and time.monotonic() - self.moved_at > _LINK_QUIET_SECONDS

    def __repr__(self) -> str:
        state = "over" if self.over else "open"
        return f"<Carried {self.kind}, {state}: {self.taken('up')} bytes up, {self.taken('down')} down>"


class Relay:
    """Listens on loopback and carries every connection to ``target``. Any thread may call. A context manager.

    ``ways`` are for the first control connection, behind its preamble: then no other is carried, and after a wrong byte
    the relay hangs up when nothing moves.
    """

    def __init__(self, target: tuple[str, int], ways: tuple[Way, Way] | None = None) -> None:
        self._target = target
        self._ways = ways
        self._strict = ways is not None
        self._lock = threading.Lock()  # of the two below
        self._plans: list[tuple[Kind | None, Direction, Fault]] = []
        self._commands: list[Callable[[], None]] = []
        self._carried: list[Carried] = []  # appended by the relay's thread only
        self._stopped = False
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._wake, self._bell = socket.socketpair()
        self._wake.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        for sock in (self._listener, self._wake):
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="llm-datadist-relay", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self.address[1]

    def plan(self, kind: Kind | None, direction: Direction, *faults: Fault) -> None:
        """Do this to connections to come. ``kind`` None: to all."""
        with self._lock:
            self._plans += [(kind, direction, fault) for fault in faults]

    def forget_plans(self) -> None:
        """Carry connections to come faithfully again."""
        with self._lock:
            self._plans.clear()

    def now(self, kind: Kind | None, direction: Direction, fault: Fault) -> int:
        """Do this to the connections that there are, ``fault.at`` bytes from now; return to how many."""

        def apply() -> int:
            chosen = [each for each in self._carried if not each.over and kind in (None, each.kind)]
            for carried in chosen:
                stream = carried.halves[direction].stream
                stream.add(replace(fault, at=stream.taken + fault.at))
            return len(chosen)

        return self._ask(apply)

    def resume(self) -> None:
        def apply() -> int:
            for carried in self._carried:
                for half in carried.halves.values():
                    half.stream.stalled = False
            return 0

        self._ask(apply)

    def cut(self, kind: Kind | None = None, *, reset: bool = False) -> int:
        """End connections at once, by a reset or in good order; return how many."""
        return self.now(kind, "up", Fault("reset" if reset else "truncate"))

    def carried(self, kind: Kind | None = None) -> list[Carried]:
        """Return the connections so far, those that are over included."""
        return [each for each in list(self._carried) if kind in (None, each.kind)]

    def close(self) -> None:
        """End every connection and join the thread. Idempotent."""
        if self._thread.is_alive():
            self._stopped = True
            with suppress(BrokenPipeError):  # the thread was awake, has seen it, and has closed its end
                self._bell.send(b"x")
            self._thread.join()
        self._bell.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ask(self, function: Callable[[], int]) -> int:
        done: Future[int] = Future()
        with self._lock:
            self._commands.append(lambda: done.set_result(function()))
        self._bell.send(b"x")
        return done.result(_ANSWER_SECONDS)

    # The relay's thread

    def _run(self) -> None:
        try:
            while not self._stopped:
                for key, _ in self._selector.select(self._patience()):
                    self._ready(key.fileobj)
                for carried in self._carried:
                    if not carried.over:
                        self._go_on(carried)
                    if not carried.over and carried.waits_in_vain():
                        self._end(carried, reset=False)
        finally:
            for carried in self._carried:
                self._end(carried, reset=False)
            self._selector.close()
            for sock in (self._listener, self._wake):
                sock.close()

    def _patience(self) -> float | None:
        due = [half.stream.next_due() for each in self._carried if not each.over for half in each.halves.values()]
        known = [time_due for time_due in due if time_due is not None]
        soon = max(min(known) - time.monotonic(), 0.0) if known else None
        return _LINK_QUIET_SECONDS if self._strict and soon is None else soon

    def _ready(self, source: object) -> None:
        if source is self._listener:
            self._accept()
        elif source is self._wake:
            self._wake.recv(4096)
            with self._lock:
                commands, self._commands = self._commands, []
            for command in commands:
                command()

    def _accept(self) -> None:
        with suppress(OSError):
            dialer, _ = self._listener.accept()
            try:
                listener = socket.create_connection(self._target, _CONNECT_SECONDS)
            except OSError:
                dialer.close()
                return
            for sock in (dialer, listener):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._carried.append(Carried(dialer, listener))

    def _go_on(self, carried: Carried) -> None:
        """Read, write and end what can be, then wait for what cannot."""
        now = time.monotonic()
        try:
            for direction, half in carried.halves.items():
                if half.wants_to_read:
                    self._read(carried, direction, half, now)
                half.write(now)
                half.finish()
        except OSError:  # one side has been reset: so is the other
            self._end(carried, reset=True)
            return
        ends = {half.stream.end: half.drained for half in carried.halves.values()}
        if ends.get("reset") or ends.get("truncate"):
            self._end(carried, reset="reset" in ends)
        elif all(half.shut for half in carried.halves.values()):
            self._end(carried, reset=False)
        else:
            self._await(carried)

    def _read(self, carried: Carried, direction: Direction, half: Half, now: float) -> None:
        try:
            data = half.read()
        except BlockingIOError:
            return
        if direction == "up":
            carried.said += data[: _REMEMBERED - len(carried.said)]
        if direction == "up" and carried._first is not None:
            carried._first += data
            if len(carried._first) < PREAMBLE_BYTES and data:
                return
            data = self._recognise(carried, carried._first, now)
        carried.moved_at = now
        half.stream.feed(data, now)

    def _recognise(self, carried: Carried, first: bytes, now: float) -> bytes:
        """The first bytes say what the connection is for: plan its faults; return what of them is to go on."""
        carried.kind = "lane" if first[:PREAMBLE_BYTES] == LANE_PREAMBLE else "control"
        carried._first = None
        with self._lock:
            for kind, direction, fault in self._plans:
                if kind in (None, carried.kind):
                    carried.halves[direction].stream.add(fault)
        if not self._strict or carried.kind == "lane":
            return first
        ways, self._ways = self._ways, None
        if ways is None:
            raise ConnectionAbortedError("a second control connection")
        carried.halves["up"].stream.feed(first[:PREAMBLE_BYTES], now)
        for half, way in zip(carried.halves.values(), ways, strict=True):
            half.stream.way = way
        return first[PREAMBLE_BYTES:]

    def _await(self, carried: Carried) -> None:
        wanted: dict[socket.socket, int] = {}
        for half in carried.halves.values():
            reading = selectors.EVENT_READ if half.wants_to_read else 0
            writing = selectors.EVENT_WRITE if half.pending else 0
            wanted[half.source] = wanted.get(half.source, 0) | reading
            wanted[half.sink] = wanted.get(half.sink, 0) | writing
        for sock, events in wanted.items():
            self._watch(sock, events)

    def _watch(self, sock: socket.socket, events: int) -> None:
        known = sock in self._selector.get_map()
        if events and known:
            self._selector.modify(sock, events)
        elif events:
            self._selector.register(sock, events)
        elif known:
            self._selector.unregister(sock)

    def _end(self, carried: Carried, *, reset: bool) -> None:
        if carried.over:
            return
        for half in carried.halves.values():
            self._watch(half.source, 0)
            if reset:
                with suppress(OSError):
                    half.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            half.source.close()
        carried.over = True


# --- two ends with a relay between them

KEY: Final = CacheKey(1, 10)
BIG: Final = Spec(tensors=4, rows=2, stride=1 << 20, keys=(KEY,))
DEADLINE_MS: Final = 1_500
HARM: Final[dict[str, Callable[[int], Fault]]] = {
    "truncate": lambda at: Fault("truncate", at=at),
    "reset": lambda at: Fault("reset", at=at),
    "half_close": lambda at: Fault("half_close", at=at),
    "corrupt": lambda at: Fault("corrupt", at=at, count=4),
    "duplicate": lambda at: Fault("duplicate", at=at, count=9),
    "drop": lambda at: Fault("drop", at=at),
    "stall": lambda at: Fault("stall", at=at),
}


class Relayed:
    """A prompt, a decoder, a relay in front of the prompt, and a neighbour that is linked to the prompt directly."""

    def __init__(self, pair: Pair, relay: Relay, neighbour: LocalEnd) -> None:
        self.prompt, self.decoder, self.neighbour = pair.prompt, pair.decoder, neighbour
        self.pair = pair
        self.relay = relay

    def link(self, timeout: int = 10_000) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        return self.decoder.do(link, [info(1, self.relay.port)], timeout)

    def others_are_served(self) -> None:
        """The prompt's other link moves data."""
        bytes_move_both_ways(self.prompt, self.neighbour)
