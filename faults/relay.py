"""A TCP relay between two ends, which does to their bytes what networks and dying hosts do.

An end that links to :attr:`Relay.address` instead of its peer's listener goes through the relay with all its
connections, the control connection and the data lanes. What happens to which bytes is said by
:class:`~faults.streams.Fault`, for connections to come (:meth:`Relay.plan`) or for those that there are
(:meth:`Relay.now`)::

    with Relay(("127.0.0.1", port)) as relay:
        relay.plan("control", "up", Fault("corrupt", at=40))  # byte 40 from the dialer to the listener
        ...
        relay.now("lane", "down", Fault("stall"))  # lanes carry nothing to the dialer any more
        relay.resume()

*Up* is from the dialer to the listener, *down* the other way.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, Self

from faults.streams import FAULTS, Fault, Stream
from llm_datadist._links.messages import PREAMBLE_BYTES
from llm_datadist._transport.lanes import LANE_PREAMBLE

if TYPE_CHECKING:
    from collections.abc import Callable

Direction = Literal["up", "down"]
Kind = Literal["control", "lane"]

_CHUNK: Final = 1 << 16
_REMEMBERED: Final = 256
#: More than this on its way in one direction, and the sender has to wait.
_BUFFER: Final = 1 << 20
_CONNECT_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 30.0
_RESET: Final = struct.pack("ii", 1, 0)  # linger for no time: close sends a reset


class _Half:
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
        """Give the sink what is due."""
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
    """One connection through the relay. Its attributes may be read by any thread.

    Attributes:
        kind: "control" or "lane", by its preamble; "control" until that is known.
        said: The first bytes that have come from the dialer, in plain text or not.
        over: True once it has ended.
    """

    def __init__(self, dialer: socket.socket, listener: socket.socket) -> None:
        self.kind: Kind = "control"
        self.said = b""
        self.over = False
        self._halves: dict[Direction, _Half] = {"up": _Half(dialer, listener), "down": _Half(listener, dialer)}
        self._first: bytes | None = b""  # None once the kind is known

    def taken(self, direction: Direction) -> int:
        """Return how many bytes have come in from the sender of a direction."""
        return self._halves[direction].stream.taken

    def __repr__(self) -> str:
        state = "over" if self.over else "open"
        return f"<Carried {self.kind}, {state}: {self.taken('up')} bytes up, {self.taken('down')} down>"


class Relay:
    """Listens on loopback and carries every connection to ``target``. Owns its thread and all sockets until close.

    Any thread may call. A context manager.

    Args:
        target: Host and port of the listener behind it.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
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
        """The port of :attr:`address`."""
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
                stream = carried._halves[direction].stream
                stream.add(replace(fault, at=stream.taken + fault.at))
            return len(chosen)

        return self._ask(apply)

    def resume(self) -> None:
        """End every stall."""

        def apply() -> int:
            for carried in self._carried:
                for half in carried._halves.values():
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
        """Run a function on the relay's thread and return its result."""
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
        finally:
            for carried in self._carried:
                self._end(carried, reset=False)
            self._selector.close()
            for sock in (self._listener, self._wake):
                sock.close()

    def _patience(self) -> float | None:
        due = [half.stream.next_due() for each in self._carried if not each.over for half in each._halves.values()]
        known = [time_due for time_due in due if time_due is not None]
        return max(min(known) - time.monotonic(), 0.0) if known else None

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
            for direction, half in carried._halves.items():
                if half.wants_to_read:
                    self._read(carried, direction, half, now)
                half.write(now)
                half.finish()
        except OSError:  # one side has been reset: so is the other
            self._end(carried, reset=True)
            return
        ends = {half.stream.end: half.drained for half in carried._halves.values()}
        if ends.get("reset") or ends.get("truncate"):
            self._end(carried, reset="reset" in ends)
        elif all(half.shut for half in carried._halves.values()):
            self._end(carried, reset=False)
        else:
            self._await(carried)

    def _read(self, carried: Carried, direction: Direction, half: _Half, now: float) -> None:
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
            data = self._recognise(carried, carried._first)
        half.stream.feed(data, now)

    def _recognise(self, carried: Carried, first: bytes) -> bytes:
        """The first bytes say what the connection is for: plan its faults, and let them go on."""
        carried.kind = "lane" if first[:PREAMBLE_BYTES] == LANE_PREAMBLE else "control"
        carried._first = None
        with self._lock:
            for kind, direction, fault in self._plans:
                if kind in (None, carried.kind):
                    carried._halves[direction].stream.add(fault)
        return first

    def _await(self, carried: Carried) -> None:
        wanted: dict[socket.socket, int] = {}
        for half in carried._halves.values():
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
        for half in carried._halves.values():
            self._watch(half.source, 0)
            if reset:
                with suppress(OSError):
                    half.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            half.source.close()
        carried.over = True
