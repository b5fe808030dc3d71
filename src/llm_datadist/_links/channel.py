"""The control channel of a link: framed messages on one non-blocking socket, without an asyncio transport.

Any thread sends under the channel's lock; a bounded backlog holds what the kernel refuses. One thread at a time holds
the *reader role*, the right to use input and parser. A waiting caller takes it if it is free, so neither request nor
answer costs a thread hop.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from llm_datadist._links.messages import FRAME_HEADER, FRAME_LIMIT, Message, decode, frame
from llm_datadist._log import logger
from llm_datadist._native import SocketInput, send_now
from llm_datadist._transport.address import shut_down
from llm_datadist.errors import AuthFailed, NotLinked, ProtocolError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline
    from llm_datadist._links.loop import ControlLoop
    from llm_datadist._links.tls_session import TlsSession

#: Unsent bytes above which the peer is not read: answers could fill memory.
_PAUSE_BYTES: Final = 1 << 20
#: What one channel may handle while all others wait.
_TURN_MESSAGES: Final = 4
_TURN_SECONDS: Final = 0.0002
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


class Waiter:
    """A caller that waits for one answer: a lock that the reader opens."""

    __slots__ = ("answer", "gate")

    def __init__(self) -> None:
        self.answer: Message | None = None
        self.gate = threading.Lock()  # locked while it waits
        self.gate.acquire()

    def wait(self, deadline: Deadline) -> None:
        """Return when woken, or at the deadline. Called once."""
        while not deadline.expired():
            if self.gate.acquire(timeout=deadline.next_turn()):
                return

    def wake(self, answer: Message | None) -> None:
        """Deliver the answer, or None if there will be none. Called at most once."""
        self.answer = answer
        self.gate.release()


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


class Channel:
    """The framed connection of one link, encrypted if it has a ``tls``.

    ``on_answer`` delivers an answer to its caller; it returns False for other messages, which ``on_message`` handles.
    ``on_lost`` gets the reason, exactly once, and no ``on_message`` follows. The control thread handles messages in
    turns: what a turn leaves is served after all other channels had theirs.

    Owns: the socket, which the last reader closes.
    Threads: any for ``begin``, ``send``, ``take_role``, ``wait``, ``forgo``, ``close``; the reader for ``on_answer``;
        the control thread for the rest. If that has stopped, the calling thread ends the channel.
    Errors: a bad frame, tampering or an exception of a handler ends the channel.
    """

    def __init__(
        self,
        control: ControlLoop,
        sock: socket.socket,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
        on_answer: Callable[[Message], bool] = lambda message: False,
        tls: TlsSession | None = None,
    ) -> None:
        sock.setblocking(False)
        self._control = control
        self._socket = sock
        self._on_message = on_message
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._tls = tls
        # For the holder of the reader role.
        self._input = SocketInput(sock.fileno(), *(() if tls is None else (_ENCRYPTED_BYTES,)))
        self._parser = FrameParser()
        self._set_aside: bytes | None = None  # a frame for the control thread
        self._for_control = False  # the role must go to the control thread
        # Guards every write to the socket, and the fields below. Without it the control thread assigns `_parked` and
        # `_paused`, the reader clears `reader`, any thread sets the first `reason`.
        self._lock = threading.Lock()
        self._open = True
        self._role_held = True
        self._parked = True  # unusable: before begin, and while the peer is not read
        self.reader: Waiter | None = None  # the caller that holds the role
        self._watched = True  # by the loop; a reading caller changes it
        self._released = False
        self._backlog = bytearray()
        self._flushing = False
        self._paused = False
        self.reason = ""

    def send_first(self, first: Message) -> None:
        """Queue the first message before :meth:`begin`."""
        self._backlog += self._encrypted(frame(first))
        self._flushing = True

    def begin(self, leftover: bytes = b"") -> None:
        """Start; ``leftover`` was received, and decrypted, before."""
        self._inside(self._begin, leftover)

    def send(self, message: Message) -> None:
        """Send without blocking. Raises NotLinked once closed; ProtocolError if too large."""
        data = frame(message)
        with self._lock:
            if not self._open:
                raise NotLinked(f"the control channel is closed: {self.reason}")
            data = self._encrypted(data)
            # The reader finds a dead socket.
            sent = 0 if self._backlog else send_now(self._socket.fileno(), data)
            if sent == len(data):
                return
            self._backlog += data[sent:]
            unsent = len(self._backlog)
            start_flush, self._flushing = not self._flushing, True
        if start_flush:
            self._inside(self._begin_flush)
        if unsent > _ABORT_BYTES:
            self.close(f"the peer left {unsent} bytes of control messages unread")

    def _encrypted(self, data: bytes) -> bytes:
        """Under the lock, which orders the records. Raises NotLinked after tampering."""
        if self._tls is None:
            return data
        try:
            return self._tls.encrypt(data)
        except AuthFailed as error:  # the reader ends this channel
            raise NotLinked(f"the control channel was tampered with: {error}") from None

    def _begin_flush(self) -> None:
        if self._open:
            self._control.loop.add_writer(self._socket.fileno(), self._flush)

    def _flush(self) -> None:
        with self._lock:
            del self._backlog[: send_now(self._socket.fileno(), self._backlog)]
            self._flushing = bool(self._backlog)
        if not self._flushing:
            self._control.loop.remove_writer(self._socket.fileno())
        if self._paused and len(self._backlog) <= _PAUSE_BYTES:
            self._paused = False
            self._take_turn()

    def _begin(self, leftover: bytes) -> None:
        if not self._open:
            return
        if self._flushing:
            self._begin_flush()
        self._parser.feed(leftover)
        self._control.serve(self._socket, self._readable)
        self._take_turn()

    def _readable(self) -> None:
        if not self.take_role():
            return  # a caller has it
        if not self._receive():
            self._finish("the peer closed the connection" + (" inside a frame" if self._parser.rest() else ""))
        self._take_turn()

    def _receive(self, seconds: float = 0.0) -> bool:
        """Caller holds the reader role. Read for at most ``seconds``; return False at the end."""
        try:
            if data := self._input.receive(seconds):
                self._parser.feed(data if self._tls is None else self._tls.decrypt(data))
            return data != b""
        except OSError as error:
            self.close(f"the connection broke: {error.strerror or error}")
        except AuthFailed as error:
            self.close(f"the connection was tampered with: {error}")
        except Exception as error:  # noqa: BLE001 (as a lack of memory: bytes are lost)
            self.close(f"internal error: {error!r}")
        return False

    def _take_turn(self) -> None:
        """Caller holds the reader role. Handle some frames, then release the role, or keep it for the next turn."""
        self._parked = False
        if self._dispatch():
            self._release_role()
            return
        self._parked = True
        if not self._paused:
            self._control.go_on(self._take_turn)
            return
        with self._lock:
            self._unwatch()

    def _dispatch(self) -> bool:
        """Dispatch the complete frames of one turn; return False if some are left, or the peer leaves too much unread.

        One message ends the turn if it took too long, so each should cost less than a millisecond.
        """
        handled, end = 0, time.perf_counter() + _TURN_SECONDS
        try:
            while self._open:
                self._paused = len(self._backlog) > _PAUSE_BYTES
                if self._paused:
                    return False
                payload, self._set_aside = self._set_aside, None
                if payload is None and (payload := self._parser.take()) is None:
                    return True
                if handled == _TURN_MESSAGES or (handled and time.perf_counter() > end):
                    self._set_aside = payload
                    return False
                self._on_message(decode(payload))
                handled += 1
        except Exception as error:  # noqa: BLE001 (a bug may cost this link, never the loop)
            self._fail(error)
        return True

    def _fail(self, error: Exception) -> None:
        """End the channel, because a message could not be handled."""
        if isinstance(error, ProtocolError):
            self._finish(str(error))
        else:
            logger.error("unexpected error in a handler of control messages", exc_info=error)
            self._finish(f"internal error: {error!r}")

    def handle(self, answer: Message) -> None:
        """Handle an answer that came, but whose caller was interrupted, as a late one. On the control thread, soon."""
        self._post(self._handle, answer)

    def _handle(self, answer: Message) -> None:
        try:
            if self._open:
                self._on_message(answer)
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(error)

    def wait(self, waiter: Waiter, deadline: Deadline) -> None:
        """Wait for the answer or the deadline; read while the role is free."""
        try:
            while waiter.gate.locked() and (self.reader is waiter or self.take_role(waiter)):
                self._read_for(waiter, deadline.turn())
                if not waiter.gate.locked() or self._for_control or deadline.expired():
                    break  # the control thread needs the role once more, as for the end of the stream
                self.forgo(waiter)
                deadline.next_turn()  # a signal handler may wait for an answer over this channel, too
        finally:
            self.forgo(waiter)
        if waiter.gate.locked():  # usually the caller itself has read it
            waiter.wait(deadline)

    def forgo(self, waiter: Waiter) -> None:
        if self.reader is waiter:
            self.reader = None
            handed, self._for_control = self._for_control, False
            if not handed or not self._post(self._take_turn):
                self._release_role()

    def _read_for(self, waiter: Waiter, seconds: float) -> None:
        """Caller holds the reader role. Deliver answers to all waiting callers until its own has come.

        Another message goes to the control thread with the role, so frames are handled once, in order.
        """
        end = time.monotonic() + seconds
        while waiter.gate.locked() and self._open and (left := end - time.monotonic()) > 0:
            go_on = self._receive(left)
            try:
                while go_on and (payload := self._parser.take()) is not None:
                    self._set_aside = payload
                    if go_on := self._on_answer(decode(payload)):
                        self._set_aside = None
            except Exception:  # noqa: BLE001 (the control thread meets it, too, and ends the channel)
                go_on = False
            if not go_on:
                self._for_control = True
                return

    def take_role(self, reader: Waiter | None = None) -> bool:
        """Take a free reader role; :meth:`forgo` must follow for a ``reader``, a caller.

        A caller takes it before it sends its request. Otherwise an early answer wakes the control thread, which takes
        the interpreter from the caller.
        """
        with self._lock:
            if self._role_held or not self._open:
                return False
            self._role_held = True
            if reader is not None:
                self.reader = reader
                self._unwatch()
            return True

    def _unwatch(self) -> None:
        """Under the lock: stop waking the loop for input."""
        if self._watched and not self._released:
            self._watched = False
            self._control.listen(self._socket, listens=False)

    def _release_role(self) -> None:
        with self._lock:
            self._role_held = False
            if self._open and not self._watched:
                self._watched = True
                self._control.listen(self._socket, listens=True)
            ended = self._released
        if ended:
            self.close_files()

    def close_files(self) -> None:
        """Close the socket. In a forked child peer and loop notice nothing."""
        self._socket.close()

    def close(self, reason: str) -> None:
        """End the channel, on the control thread. Idempotent; the first reason counts."""
        self.reason = self.reason or reason
        self._inside(self._finish, reason)

    def _finish(self, reason: str) -> None:
        with self._lock:
            if not self._open:
                return
            self._open = False
            self.reason = self.reason or reason
            self._backlog.clear()
        self._control.dismiss(self._socket)
        self._control.loop.remove_writer(self._socket.fileno())
        # A forked child may hold the socket: only a shutdown tells the peer. It also wakes a reader.
        shut_down(self._socket)
        with self._lock:
            self._released = True
            unused = self._parked or not self._role_held
        if unused:  # otherwise by the reader
            self.close_files()
        self._on_lost(self.reason)

    def _inside(self, function: Callable[..., None], *args: object) -> None:
        """Run on the control thread; end the channel if that has stopped."""
        if self._control.inside():
            function(*args)
        else:
            self._post(function, *args)

    def _post(self, function: Callable[..., None], *args: object) -> bool:
        try:
            self._control.post(function, *args)
        except StateError as error:
            self._finish(str(error))
            return False
        return True
