"""The control channel of a link: framed messages on one non-blocking socket, without an asyncio transport.

Any thread sends; a bounded backlog holds what the kernel refuses. One thread at a time holds the *reader role*, the
right to take input. A waiting caller takes it if it is free, so neither request nor answer costs a thread hop. What the
control thread does with the role is the table :data:`TRANSITIONS`.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Final

from llm_datadist._links.machine import Machine
from llm_datadist._links.messages import ANSWERS, FRAME_HEADER, FRAME_LIMIT, Message, decode, frame
from llm_datadist._log import links_logger as logger
from llm_datadist._native import Stream
from llm_datadist._native.public_call import elsewhere, whole
from llm_datadist._transport.address import shut_down
from llm_datadist.errors import AuthFailed, NotLinked, ParamError, ProtocolError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline
    from llm_datadist._links.loop import ControlLoop
    from llm_datadist._links.tls_session import TlsSession
    from llm_datadist._native import Requests, Waiter

#: Unsent bytes above which the peer is not read: answers could fill memory.
_PAUSE_BYTES: Final = 1 << 20
#: What one channel may handle while all others wait.
_TURN_MESSAGES: Final = 4
_TURN_SECONDS: Final = 0.0002
#: Answers handled in one heartbeat whose callers were cut off.
_LATE_AT_ONCE: Final = 16
#: Received at once if encrypted: as many records of one byte as the control thread decrypts in a millisecond.
_ENCRYPTED_BYTES: Final = 1 << 14
#: Unsent bytes above which the channel ends: callers here still send.
_ABORT_BYTES: Final = 16 << 20


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)


class FrameParser:
    """Splits a byte stream into frames, without I/O.

    >>> parser = FrameParser()
    >>> parser.feed(bytes([0, 0, 0, 2, 65, 66, 0, 0]))
    >>> parser.take(), parser.take(), parser.rest()
    (b'AB', None, b'\\x00\\x00')
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> bytes | None:
        """Return the next complete payload, or None. Raises ProtocolError above :data:`FRAME_LIMIT`."""
        buffer = self._buffer
        if len(buffer) < FRAME_HEADER.size:
            return None
        (length,) = FRAME_HEADER.unpack_from(buffer)
        if length > FRAME_LIMIT:
            raise ProtocolError(f"peer announced a frame of {length} bytes: at most {FRAME_LIMIT} are allowed")
        end = FRAME_HEADER.size + length
        if end > len(buffer):
            return None
        payload = bytes(buffer[FRAME_HEADER.size : end])
        del buffer[:end]
        return payload

    def rest(self) -> bytes:
        return bytes(self._buffer)


class State(IntEnum):  # integers: another Enum's hash is Python code
    """Use of the reader role by the control thread."""

    NEW = 0  # it keeps the role until begin()
    FREE = 1  # the role is free, and epoll reports input; or a caller has the role
    TURN = 2  # it has the role, and handles messages
    DUE = 3  # messages are left: it keeps the role until its next turn
    PAUSED = 4  # the peer leaves much unread: it keeps the role, and takes no input, until the peer reads
    ENDED = 5  # a turn, or a caller, that still has the role closes the socket


class Event(IntEnum):
    BEGIN = 0
    INPUT = 1  # it has taken the role, because there is input
    NEXT = 2  # its next turn has come
    DRAINED = 3  # little is unsent
    END = 4  # the stream was shut
    DONE = 5  # result of a turn: no whole message is left
    LEFT = 6  # result of a turn: messages are left
    FULL = 7  # result of a turn: much is unsent


_S, _E = State, Event
TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    _S.NEW: {_E.BEGIN: _S.TURN, _E.END: _S.ENDED},
    _S.FREE: {_E.INPUT: _S.TURN, _E.END: _S.ENDED},
    _S.TURN: {_E.DONE: _S.FREE, _E.LEFT: _S.DUE, _E.FULL: _S.PAUSED, _E.END: _S.ENDED},
    _S.DUE: {_E.NEXT: _S.TURN, _E.END: _S.ENDED},
    _S.PAUSED: {_E.DRAINED: _S.TURN, _E.END: _S.ENDED},
    # The turn in which it ended has its result; after the loop's stop another thread may have ended it just before.
    _S.ENDED: {_E.INPUT: _S.ENDED, _E.DONE: _S.ENDED, _E.LEFT: _S.ENDED, _E.FULL: _S.ENDED},
}
#: The control thread has the role, but no turn runs that would close the socket.
_KEPT: Final = (_S.NEW, _S.DUE, _S.PAUSED)


@dataclass(eq=False, repr=False)
class Channel:
    """The framed connection of one link, encrypted if it has a ``tls``.

    Answers go to the callers in ``requests`` that wait for them, other messages to ``on_message``. ``on_lost`` gets the
    reason, exactly once, and no ``on_message`` follows. The control thread handles messages in turns: what a turn
    leaves is served after all other channels had theirs.

    Owns: the socket, which the last reader closes.
    Threads: any for ``begin``, ``send``, ``wait``, ``close``; the control thread for the rest, the machine too. If that
        has stopped, the calling thread ends the channel. The role, the backlog and the end are the stream's, each call
        of which is one step for all threads: its first ``shut`` alone ends the channel.
    Errors: a bad frame, tampering or an exception of a handler ends the channel.
    """

    _control: ControlLoop
    _socket: socket.socket
    on_message: Callable[[Message], None]
    _on_lost: Callable[[str], None]
    _requests: Requests
    _tls: TlsSession | None = None

    def __post_init__(self) -> None:
        self._socket.setblocking(False)
        self._order = threading.Lock()  # of encrypted records
        self._machine = Machine("channel", TRANSITIONS, State.NEW)
        at_once = () if self._tls is None else (_ENCRYPTED_BYTES,)
        self._stream = Stream(self._socket.fileno(), self._control.epoll(), ANSWERS, FRAME_LIMIT, *at_once)
        self._flushing = False  # the loop waits for the kernel to take more
        self.reason = ""  # of the end; any thread sets the first one

    @property
    def state(self) -> State:
        return self._machine.state

    @property
    def being_read(self) -> bool:
        """True while a thread has the reader role."""
        return self._stream.held

    def send_first(self, first: Message) -> None:
        """Queue the first message before :meth:`begin`, which sends it."""
        self._put(frame(first), now=False)

    def begin(self, leftover: bytes = b"") -> None:
        """Start; ``leftover`` was received, and decrypted, before."""
        self._inside(self._begin, leftover)

    def send(self, message: Message, reports: Requests | None = None) -> None:
        """Send without blocking; ``reports`` counts it. Raises NotLinked once closed; ProtocolError if too large."""
        unsent = self._put(frame(message), reports=reports)
        if unsent and not self._flushing:
            self._inside(self._begin_flush)
        if unsent > _ABORT_BYTES:
            self.close(f"the peer left {unsent} bytes of control messages unread")

    def _put(self, data: bytes, *, now: bool = True, reports: Requests | None = None) -> int:
        """Send; return the number of bytes that are left. The reader finds a dead socket."""
        send = self._stream.send if self._tls is None else self._put_encrypted
        unsent = send(data, now, reports)
        if unsent is None:
            raise NotLinked(f"the control channel is closed: {self.reason}")
        return unsent

    @whole  # what is encrypted must be sent
    def _put_encrypted(self, data: bytes, now: bool, reports: Requests | None) -> int | None:
        """Raise NotLinked after tampering."""
        assert self._tls is not None
        with self._order:
            try:
                data = self._tls.encrypt(data)
            except AuthFailed as error:  # the reader ends this channel
                raise NotLinked(f"the control channel was tampered with: {error}") from None
            return self._stream.send(data, now, reports)

    def _begin_flush(self) -> None:
        if self._stream.open and self._stream.unsent and self.state is not State.NEW:
            self._flushing = True
            self._control.loop.add_writer(self._socket.fileno(), self._flush)

    def _flush(self) -> None:
        if not self._stream.flush():
            self._flushing = False
            self._control.loop.remove_writer(self._socket.fileno())
            self._begin_flush()  # of what came since; its sender has not seen the change
        if self._stream.unsent <= _PAUSE_BYTES:
            self._resume(Event.DRAINED)

    def _begin(self, leftover: bytes) -> None:
        if self._machine.can(Event.BEGIN):
            self._machine.fire(Event.BEGIN)
            self._begin_flush()
            self._stream.feed(leftover)
            self._control.serve(self._socket, self._readable)
            self._turn()

    def _readable(self) -> None:
        if not self._stream.take_role():
            return  # a caller has it, or this thread keeps it
        self._machine.fire(Event.INPUT)
        if self._stream.deliver(self._requests):  # else a caller has left a message
            self._receive()
        self._turn()

    def _receive(self) -> None:
        try:
            if data := self._stream.receive():
                self._stream.feed(data if self._tls is None else self._tls.decrypt(data))
            if data == b"":
                self._finish("the peer closed the connection" + (" inside a frame" if self._stream.rest else ""))
        except Exception as error:  # noqa: BLE001 (also a lack of memory: bytes are lost)
            self._finish(_reason(error))

    def _resume(self, event: Event) -> None:
        if self._machine.can(event):
            self._machine.fire(event)
            self._turn()

    def _turn(self) -> None:
        """With the reader role: handle some frames, then give the role up, or keep it."""
        state = self._machine.fire(self._dispatch())
        if state is State.DUE:
            self._control.go_on(partial(self._resume, Event.NEXT))
        elif state is State.PAUSED:
            self._stream.watch(watched=False)
        elif self._stream.leave_role():
            self.close_files()

    def _dispatch(self) -> Event:
        """Dispatch the complete frames of one turn; return its result.

        One message ends the turn if it took too long, so each should cost less than a millisecond.
        """
        handled, end = 0, time.perf_counter() + _TURN_SECONDS
        try:
            while self._stream.open:
                if self._stream.unsent > _PAUSE_BYTES:
                    return Event.FULL
                if self._stream.deliver(self._requests):
                    return Event.DONE
                if handled == _TURN_MESSAGES or (handled and time.perf_counter() > end):
                    return Event.LEFT
                message = self._stream.take()
                assert message is not None, "deliver() has found it"
                self.on_message(decode(message))
                handled += 1
        except ParamError as error:  # of a frame that is too long
            self._fail(ProtocolError(str(error)))
        except Exception as error:  # noqa: BLE001 (a bug may cost this link, never the loop)
            self._fail(error)
        return Event.DONE

    def _fail(self, error: Exception) -> None:
        """End the channel, because a message could not be handled."""
        if isinstance(error, ProtocolError):
            self._finish(str(error))
        else:
            logger.error("unexpected error in a handler of control messages", exc_info=error)
            self._finish(f"internal error: {error!r}")

    def handle_late(self) -> None:
        """Handle what callers have left who were cut off: input, and answers, which may hold a pin.

        On the control thread, at each heartbeat.
        """
        try:
            for _ in range(min(len(self._requests.late), _LATE_AT_ONCE)):
                if self._stream.open:
                    self.on_message(decode(self._requests.late.pop()))
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(error)
        if self._stream.rest:
            self._readable()

    def wait(self, waiter: Waiter, deadline: Deadline) -> None:
        """Wait for the answer, or its certain absence, or the deadline; read while the role is free."""
        if self._tls is None:
            self._read_answers(waiter, deadline, None)
        else:
            self._read_encrypted(waiter, deadline)
        while not waiter.done and not deadline.expired():
            waiter.gate.acquire(timeout=deadline.next_turn())

    @elsewhere  # what is received must be decrypted
    def _read_encrypted(self, waiter: Waiter, deadline: Deadline) -> None:
        assert self._tls is not None
        try:
            self._read_answers(waiter, deadline, self._tls.decrypt)
        except Exception as error:  # noqa: BLE001 (of `decrypt`, or a lack of memory: bytes are lost)
            self.close(_reason(error))

    def _read_answers(self, waiter: Waiter, deadline: Deadline, decrypt: Callable[[bytes], bytes] | None) -> None:
        while not waiter.done and not deadline.expired():
            try:
                mine = self._stream.read_answers(self._requests, waiter, deadline.turn(), decrypt)
            finally:
                if self._stream.released:
                    self.close_files()
            if not mine:
                if mine is not None:
                    self._inside(self._readable)  # another message, or the end
                return
            if not waiter.done:
                deadline.next_turn()

    def close_files(self) -> None:
        """Close the socket. In a forked child peer and loop notice nothing."""
        self._socket.close()

    def close(self, reason: str) -> None:
        """End the channel, on the control thread. Idempotent; the first reason counts."""
        self.reason = self.reason or reason
        self._inside(self._finish, reason)

    def _finish(self, reason: str) -> None:
        self.reason = self.reason or reason
        if not self._stream.shut():
            return
        kept = self.state in _KEPT
        self._machine.fire(Event.END)
        self._control.dismiss(self._socket)
        self._control.loop.remove_writer(self._socket.fileno())
        # A forked child may hold the socket: only a shutdown tells the peer. It also wakes a reader.
        shut_down(self._socket)
        if self._stream.release() or kept:  # otherwise the reader closes it
            self.close_files()
        self._on_lost(self.reason)

    def _inside(self, function: Callable[..., None], *args: object) -> None:
        """Run on the control thread; end the channel if that has stopped."""
        if self._control.inside():
            function(*args)
            return
        try:
            self._control.post(function, *args)
        except StateError as error:
            self._finish(str(error))


def _reason(error: Exception) -> str:
    """Return the reason of the end after input could not be received."""
    if isinstance(error, OSError):
        return f"the connection broke: {error.strerror or error}"
    if isinstance(error, AuthFailed):
        return f"the connection was tampered with: {error}"
    return f"internal error: {error!r}"
