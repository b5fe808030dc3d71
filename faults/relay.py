"""A relay between two ends, which does to their bytes what networks, dying hosts and attackers do.

An end that links to :attr:`Relay.address` instead of its peer's listener goes through the relay with all its
connections, the control channel and the data lanes. What happens to which bytes is said by :class:`Fault`, for
connections to come (:meth:`Relay.plan`) or for those that there are (:meth:`Relay.now`)::

    with Relay(("127.0.0.1", port)) as relay:
        relay.plan("control", "up", Fault("corrupt", at=40))  # byte 40 from the dialer to the listener
        ...
        relay.now("lane", "down", Fault("stall"))  # lanes carry nothing to the dialer any more
        relay.resume()

*Up* is from the dialer to the listener, *down* the other way.
"""

import asyncio
import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, Self, TypeVar

from llm_datadist import CacheKey, LLMStatusCode
from llm_datadist._links.channel import FrameParser
from llm_datadist._links.messages import PREAMBLE_BYTES, Message, decode, frame
from llm_datadist._transport.tcp.lanes import LANE_PREAMBLE
from tests.support.ends import LocalEnd
from tests.support.linking import bytes_move_both_ways, info, link
from tests.support.moves import Spec
from tests.support.pairs import Pair

T = TypeVar("T")
Direction = Literal["up", "down"]
Kind = Literal["control", "lane"]
_CHUNK: Final = 1 << 16
_REMEMBERED: Final = 256
#: More than this on its way in one direction, and the sender has to wait.
_BUFFER: Final = 1 << 20
_CONNECT_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 30.0
_RESET: Final = struct.pack("ii", 1, 0)  # linger for no time: close sends a reset
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
        self.way: Rewriter | None = None
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


class Rewriter:
    """One direction of a plain control channel, of which ``change`` makes other messages, or frames."""

    def __init__(self, change: Callable[[Message], Message | bytes]) -> None:
        self._change, self._frames = change, FrameParser()

    def feed(self, data: bytes) -> bytes:
        self._frames.feed(data)
        out = b""
        while (payload := self._frames.take()) is not None:
            said = self._change(decode(payload))
            out += said if isinstance(said, bytes) else frame(said)
        return out


class Half:
    """One direction of one connection with its sockets. The relay's thread only."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.stream = Stream()
        self.ended = False  # the source has said its last
        self.shut = False  # and the sink knows
        self.woken, self.room = asyncio.Event(), asyncio.Event()

    @property
    def over(self) -> bool:
        stream = self.stream
        ended = stream.end == "half_close" or (self.ended and not stream.swallows and not stream.stalled)
        return ended and not stream.waiting


class Carried:
    """One connection through the relay. Its attributes may be read by any thread."""

    def __init__(self, dialer: socket.socket, listener: socket.socket) -> None:
        self.kind: Kind = "control"  # by its preamble, until which it is that
        self.said = b""  # the first bytes that have come from the dialer, in plain text or not
        self.over = False
        self.halves: dict[Direction, Half] = {"up": Half(dialer, listener), "down": Half(listener, dialer)}
        self.tasks: list[asyncio.Task[None]] = []
        self.ending: asyncio.Task[None] | None = None

    def taken(self, direction: Direction) -> int:
        return self.halves[direction].stream.taken

    def __repr__(self) -> str:
        state = "over" if self.over else "open"
        return f"<Carried {self.kind}, {state}: {self.taken('up')} bytes up, {self.taken('down')} down>"


class Relay:
    """Listens on loopback and carries every connection to ``target``. Any thread may call. A context manager.

    ``ways`` are for the first control channel, behind its preamble: then no other is carried.
    """

    def __init__(self, target: tuple[str, int], ways: tuple[Rewriter, Rewriter] | None = None) -> None:
        self._target = target
        self._ways, self._strict = ways, ways is not None
        self._plans: list[tuple[Kind | None, Direction, Fault]] = []
        self._carried: list[Carried] = []  # appended by the relay's thread only
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.port = self.address[1]
        self._loop = asyncio.new_event_loop()
        self._loop.add_reader(self._listener, self._accept)
        self._joins: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="llm-datadist-relay", daemon=True)
        self._thread.start()

    def plan(self, kind: Kind | None, direction: Direction, *faults: Fault) -> None:
        """Do this to connections to come. ``kind`` None: to all."""
        self._ask(lambda: self._plans.extend((kind, direction, fault) for fault in faults))

    def forget_plans(self) -> None:
        self._ask(self._plans.clear)

    def now(self, kind: Kind | None, direction: Direction, fault: Fault) -> int:
        """Do this to the connections that there are, ``fault.at`` bytes from now; return to how many."""

        def apply() -> int:
            chosen = [each for each in self.carried(kind) if not each.over]
            for half in (carried.halves[direction] for carried in chosen):
                half.stream.add(replace(fault, at=half.stream.taken + fault.at))
                half.woken.set()
            return len(chosen)

        return self._ask(apply)

    def resume(self) -> None:
        """End every stall."""

        def apply() -> None:
            for half in (half for carried in self._carried for half in carried.halves.values()):
                half.stream.stalled = False
                half.woken.set()

        self._ask(apply)

    def cut(self, kind: Kind | None = None, *, reset: bool = False) -> int:
        return self.now(kind, "up", Fault("reset" if reset else "truncate"))

    def carried(self, kind: Kind | None = None) -> list[Carried]:
        return [each for each in list(self._carried) if kind in (None, each.kind)]

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ask(self, function: Callable[[], T]) -> T:
        done: Future[T] = Future()
        self._loop.call_soon_threadsafe(lambda: done.set_result(function()))
        return done.result(_ANSWER_SECONDS)

    # The relay's thread

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._loop.run_until_complete(self._end_all())
        self._loop.close()

    async def _end_all(self) -> None:
        joins = list(self._joins)
        for join in joins:
            join.cancel()
        await asyncio.gather(*joins)
        for carried in self._carried:
            self._end(carried, reset=False)
        await asyncio.gather(*(each.ending for each in self._carried if each.ending is not None))

    def _accept(self) -> None:
        with suppress(OSError):
            dialer, _ = self._listener.accept()
            join = self._loop.create_task(self._join(dialer))
            self._joins.add(join)
            join.add_done_callback(self._joins.discard)

    async def _join(self, dialer: socket.socket) -> None:
        listener = socket.socket()
        for sock in (dialer, listener):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await self._loop.sock_connect(listener, self._target)
        except (OSError, asyncio.CancelledError):
            dialer.close()
            listener.close()
            return
        self._carried.append(carried := Carried(dialer, listener))
        for direction in carried.halves:
            for work in (self._read(carried, direction), self._write(carried, direction)):
                carried.tasks.append(self._loop.create_task(self._guarded(carried, work)))

    async def _guarded(self, carried: Carried, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except OSError:  # one side has been reset: so is the other
            self._end(carried, reset=True)

    async def _read(self, carried: Carried, direction: Direction) -> None:
        half, first = carried.halves[direction], b"" if direction == "up" else None  # None once the kind is known
        while not half.ended:
            data = await self._loop.sock_recv(half.source, _CHUNK)
            half.ended, now = not data, time.monotonic()
            if direction == "up":
                carried.said += data[: _REMEMBERED - len(carried.said)]
            if first is not None:
                first += data
                if len(first) < PREAMBLE_BYTES and data:
                    continue
                data, first = self._recognise(carried, first, now), None
            half.stream.feed(data, now)
            half.woken.set()
            while half.stream.waiting >= _BUFFER:
                half.room.clear()
                await half.room.wait()

    def _recognise(self, carried: Carried, first: bytes, now: float) -> bytes:
        """The first bytes say what the connection is for: plan its faults; return what of them is to go on."""
        carried.kind = "lane" if first[:PREAMBLE_BYTES] == LANE_PREAMBLE else "control"
        for kind, direction, fault in self._plans:
            if kind in (None, carried.kind):
                carried.halves[direction].stream.add(fault)
                carried.halves[direction].woken.set()
        if not self._strict or carried.kind == "lane":
            return first
        ways, self._ways = self._ways, None
        if ways is None:
            raise ConnectionAbortedError("a second control channel")
        carried.halves["up"].stream.feed(first[:PREAMBLE_BYTES], now)
        for half, way in zip(carried.halves.values(), ways, strict=True):
            half.stream.way = way
        return first[PREAMBLE_BYTES:]

    async def _write(self, carried: Carried, direction: Direction) -> None:
        half, stream = carried.halves[direction], carried.halves[direction].stream
        while not half.shut:
            if data := stream.due(time.monotonic()):
                await self._loop.sock_sendall(half.sink, data)
                half.room.set()
            elif stream.end in ("truncate", "reset") and not stream.waiting:
                self._end(carried, reset=stream.end == "reset")
                return
            elif half.over:
                half.shut = True
                half.sink.shutdown(socket.SHUT_WR)
            else:
                due = stream.next_due()
                seconds = None if due is None else max(due - time.monotonic(), 0.0)
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await half.woken.wait()
                half.woken.clear()
        if all(each.shut for each in carried.halves.values()):
            self._end(carried, reset=False)

    def _end(self, carried: Carried, *, reset: bool) -> None:
        if carried.ending is None:
            carried.ending = self._loop.create_task(self._ended(carried, reset=reset))

    async def _ended(self, carried: Carried, *, reset: bool) -> None:
        """Close the sockets once nobody waits for them."""
        for task in carried.tasks:
            task.cancel()
        await asyncio.gather(*carried.tasks, return_exceptions=True)
        for half in carried.halves.values():
            if reset:
                with suppress(OSError):
                    half.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            half.source.close()
        carried.over = True


# --- two ends with a relay between them

KEY: Final = CacheKey(1, 10)
BIG: Final = Spec(tensors=4, rows=2, stride=1 << 20, keys=(KEY,))
DEADLINE_MS: Final = 1_500


def _harm(what: str, count: int, at: int) -> Fault:
    return Fault(what, at, count)


_COUNTS: Final = {"truncate": 0, "reset": 0, "half_close": 0, "corrupt": 4, "duplicate": 9, "drop": 0, "stall": 0}
HARM: Final = {what: partial(_harm, what, count) for what, count in _COUNTS.items()}


class Relayed:
    """A prompt, a decoder, a relay in front of the prompt, and a neighbour that is linked to the prompt directly."""

    def __init__(self, pair: Pair, relay: Relay, neighbour: LocalEnd) -> None:
        self.prompt, self.decoder, self.neighbour = pair.prompt, pair.decoder, neighbour
        self.pair, self.relay = pair, relay

    def link(self, timeout: int = 10_000) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        return self.decoder.do(link, [info(1, self.relay.port)], timeout)

    def others_are_served(self) -> None:
        bytes_move_both_ways(self.prompt, self.neighbour)
