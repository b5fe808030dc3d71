"""One framed control connection: read by the control thread, written by whoever has something to say.

Reading is an ``asyncio.Protocol``. Writing does not go through asyncio: the caller encodes its frame and sends it on a
duplicate of the socket under the channel's send lock, so a request costs no thread hop. What the kernel will not take
at once waits in a bounded backlog that the control thread drains. After half a frame, or a bad one, the channel aborts.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from llm_datadist.control.messages import FRAME_HEADER, FRAME_LIMIT, decode, frame
from llm_datadist.errors import NotLinked, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.control.loop import ControlLoop
    from llm_datadist.control.messages import Message

__all__ = ["Channel", "FrameParser", "tune"]

#: Above this much unsent, the peer is not read from any more: it must take its answers first (ARCHITECTURE rule 10).
_PAUSE_BYTES: Final = 1 << 20
#: Above this the peer is given up: our own callers still send while it does not read.
_ABORT_BYTES: Final = 16 << 20


def tune(sock: socket.socket) -> None:
    """Set what every control socket has: no Nagle delay, keepalive after 1 s, give up unacknowledged data after 10 s."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)


class FrameParser:
    """Cuts a byte stream into frames. No I/O.

    >>> parser = FrameParser()
    >>> [bytes(payload) for payload in parser.feed(bytes([0, 0, 0, 2, 65, 66, 0, 0]))]
    [b'AB']
    """

    def __init__(self, limit: int = FRAME_LIMIT) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the payloads that are complete now.

        Raises:
            ProtocolError: A header announces more than a frame may have.
        """
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(buffer) - start >= FRAME_HEADER.size:
            (length,) = FRAME_HEADER.unpack_from(buffer, start)
            if length > self._limit:
                raise ProtocolError(f"peer announced a frame of {length} bytes: at most {self._limit} are allowed")
            end = start + FRAME_HEADER.size + length
            if end > len(buffer):
                break
            payloads.append(bytes(buffer[start + FRAME_HEADER.size : end]))
            start = end
        del buffer[:start]
        return payloads

    def rest(self) -> bytes:
        """Return the bytes of an incomplete frame."""
        return bytes(self._buffer)


class Channel(asyncio.Protocol):
    """One connection of one link.

    ``on_message`` and ``on_lost`` are called on the control thread; ``on_lost`` exactly once, with the reason.
    """

    def __init__(
        self,
        control: ControlLoop,
        sock: socket.socket,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
        leftover: bytes = b"",
    ) -> None:
        self._control = control
        self._on_message = on_message
        self._on_lost = on_lost
        self._leftover = leftover
        self._parser = FrameParser()
        self._transport: asyncio.Transport | None = None
        self._reading_socket = sock
        self._sender: socket.socket | None = sock.dup()
        self._send_lock = threading.Lock()
        self._backlog = bytearray()
        self._flushing = False
        self._paused = False
        self._lost = False
        self.reason = ""

    async def open(self) -> None:
        """Begin to read. On the control thread."""
        await self._control.loop.connect_accepted_socket(lambda: self, self._reading_socket)

    # --- writing: any thread ---------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send one message without blocking.

        Raises:
            NotLinked: The channel is closed, or the peer has stopped reading for too long.
        """
        data = frame(message)
        with self._send_lock:
            if self._sender is None:
                raise NotLinked(f"the control connection is closed: {self.reason or 'unlinked'}")
            sent = 0 if self._backlog else self._try_send(data)
            if sent == len(data):
                return
            self._backlog += data[sent:]
            backlog = len(self._backlog)
            start_flush, self._flushing = not self._flushing, True
        if start_flush:
            self._control.post(self._begin_flush)
        if backlog > _ABORT_BYTES:
            self.abort(f"peer left {backlog} bytes of control messages unread")

    def _try_send(self, data: bytes | bytearray) -> int:
        """Under the send lock: give the kernel what it takes now. A dead socket takes everything: reading reports it."""
        sender = self._sender
        if sender is None:
            return len(data)
        try:
            return sender.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)

    def _begin_flush(self) -> None:
        if self._sender is not None:
            self._control.loop.add_writer(self._sender, self._flush)
            self._throttle()

    def _flush(self) -> None:
        """Control thread: the socket takes data again."""
        with self._send_lock:
            sent = self._try_send(self._backlog)
            del self._backlog[:sent]
            if not self._backlog and self._sender is not None:
                self._control.loop.remove_writer(self._sender)
                self._flushing = False
        self._throttle()

    def _throttle(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        too_much = len(self._backlog) > _PAUSE_BYTES
        if too_much and not self._paused:
            transport.pause_reading()
        elif self._paused and not too_much:
            transport.resume_reading()
        self._paused = too_much

    # --- reading: the control thread -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio has the socket."""
        self._transport = transport  # type: ignore[assignment]  # asyncio's own annotation is the base class
        if self._leftover:
            leftover, self._leftover = self._leftover, b""
            self.data_received(leftover)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._lost:
            return
        try:
            for payload in self._parser.feed(data):
                self._on_message(decode(payload))
        except ProtocolError as error:
            self.abort(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over, whoever ended it."""
        half = self._parser.rest()
        text = str(exc) if exc is not None else "peer closed the connection" + (" inside a frame" if half else "")
        self._finish(self.reason or text)

    # --- ending: any thread ----------------------------------------------------------------------------------------

    def close(self, reason: str = "unlinked") -> None:
        """End the connection; what is in the backlog is dropped. Idempotent."""
        self.abort(reason)

    def abort(self, reason: str) -> None:
        """End the connection at once. Idempotent."""
        self.reason = self.reason or reason
        if self._control.inside():
            self._finish(self.reason)
        else:
            self._control.post(self._finish, self.reason)

    def _finish(self, reason: str) -> None:
        if self._lost:
            return
        self._lost = True
        self.reason = reason
        with self._send_lock:
            sender, self._sender = self._sender, None
            self._backlog.clear()
        if sender is not None:
            self._control.loop.remove_writer(sender)
            # A forked child may hold the same socket: only a shutdown tells the peer.
            with suppress(OSError):
                sender.shutdown(socket.SHUT_RDWR)
            sender.close()
        if self._transport is not None:
            self._transport.abort()
        else:
            self._reading_socket.close()
        self._on_lost(reason)
