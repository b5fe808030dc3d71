"""What can happen to a byte stream on its way, as a calculation: bytes in, bytes out. No I/O and no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

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
    """One thing that happens to one direction of a connection. See :data:`FAULTS`.

    Attributes:
        what: A key of :data:`FAULTS`.
        at: The byte, counted from 0 at the start of the connection, or from now for :meth:`Relay.now`.
        count: Bytes, for those that need it.
        seconds: For "delay".
        rate: Bytes a second, for "throttle".
    """

    what: str
    at: int = 0
    count: int = 0
    seconds: float = 0.0
    rate: float = 0.0

    def __post_init__(self) -> None:
        if self.what not in FAULTS:
            raise ValueError(f"what={self.what!r} is no fault; known are {', '.join(FAULTS)}")
        if self.what == "throttle" and self.rate <= 0:
            raise ValueError(f"rate={self.rate}: a throttle needs bytes a second, more than 0")


class Stream:
    """One direction of one connection: bytes in, bytes out, and the faults in between. No I/O, no clock.

    Attributes:
        taken: Bytes that came in.
        end: How it ended: "" not yet, else "truncate", "reset" or "half_close".
        stalled: True while nothing may leave.
    """

    def __init__(self, faults: tuple[Fault, ...] = ()) -> None:
        self.taken = 0
        self.end = ""
        self.stalled = False
        self._faults = sorted(faults, key=lambda fault: fault.at)
        self._dropping = 0
        self._corrupting = 0
        self._repeating = 0
        self._repeated = bytearray()
        self._seconds = 0.0
        self._rate = 0.0
        self._clear_at = 0.0  # when the throttle has let the last byte through
        self._out: deque[tuple[float, bytes]] = deque()
        self.waiting = 0

    def add(self, fault: Fault) -> None:
        """Add a fault at its byte; one at or before the bytes that came in begins with the next byte."""
        self._faults = sorted([*self._faults, fault], key=lambda each: each.at)
        self._begin_due()

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes in."""
        while data and not self.end:
            self._begin_due()
            room = self._faults[0].at - self.taken if self._faults else len(data)
            piece, data = data[:room], data[room:]
            self._pass(piece, now)
        self._begin_due()

    def due(self, now: float) -> bytes:
        """Take out what may leave now."""
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
        return self._dropping < 0

    def _begin_due(self) -> None:
        while self._faults and self._faults[0].at <= self.taken and not self.end:
            self._begin(self._faults.pop(0))

    def _begin(self, fault: Fault) -> None:
        match fault.what:
            case "drop":
                self._dropping = fault.count or -1
            case "corrupt":
                self._corrupting = max(fault.count, 1)
            case "duplicate":
                self._repeating = max(fault.count, 1)
            case "delay":
                self._seconds = fault.seconds
            case "throttle":
                self._rate = fault.rate
            case "stall":
                self.stalled = True
            case _:
                self.end = fault.what

    def _pass(self, data: bytes, now: float) -> None:
        if self.end:
            return
        self.taken += len(data)
        if self._corrupting:
            count = min(self._corrupting, len(data))
            self._corrupting -= count
            data = bytes(byte ^ 0xFF for byte in data[:count]) + data[count:]
        if self._dropping:
            count = len(data) if self._dropping < 0 else min(self._dropping, len(data))
            self._dropping -= count if self._dropping > 0 else 0
            data = data[count:]
        if self._repeating:
            data = self._repeat(data)
        self._send(data, now)

    def _repeat(self, data: bytes) -> bytes:
        count = min(self._repeating, len(data))
        self._repeating -= count
        self._repeated += data[:count]
        if self._repeating:
            return data
        again, self._repeated = bytes(self._repeated), bytearray()
        return data[:count] + again + data[count:]

    def _send(self, data: bytes, now: float) -> None:
        if not data:
            return
        self.waiting += len(data)
        start = now + self._seconds
        if not self._rate:
            self._out.append((start, data))
            return
        # Pieces of a hundredth of a second, so that a slow network is slow and not merely late.
        step = max(int(self._rate / 100), 1)
        for first in range(0, len(data), step):
            piece = data[first : first + step]
            self._clear_at = max(self._clear_at, start) + len(piece) / self._rate
            self._out.append((self._clear_at, piece))
