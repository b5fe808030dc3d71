"""The same-host rendezvous: two processes prove that they share a host and swap the memfds of what they export.

The listener waits on an abstract unix socket, or on a socket file in a directory that containers with separate
network namespaces share. The dialer connects, and both ends check whose process the other is (SO_PEERCRED). The dialer
sends one packet: its descriptors, and a one-time token that came over the control channel. The listener answers alike.

Same host is proven by connecting, mapping and reading the cookie in the peer's guard table, never by what a peer says.
A rendezvous that fails is a ``LinkRefused``; the link then goes over another transport.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import select
import socket
import stat
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llm_datadist._checks import HERE
from llm_datadist._native import close_elsewhere, readable
from llm_datadist._native.signals import hold_signals
from llm_datadist._transport.cma import probe
from llm_datadist._transport.peer_memory import PeerMemory, PeerProcess, map_peer, peer_credentials
from llm_datadist._transport.rendezvous import (
    MemoryOffer,
    Packet,
    Refusal,
    RendezvousHello,
    check_closers,
    decode,
    pass_rights,
    send_packet,
)
from llm_datadist.errors import LinkError, LinkRefused, LLMException, ParamError, ProtocolError

if TYPE_CHECKING:
    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.exports import Exports

MAX_PENDING: Final = 64
_PREFIX: Final = "llm-datadist-"
_SUFFIX: Final = ".sock"
_BACKLOG: Final = 128
_LONGEST_PATH: Final = 107  # of a unix socket, without the final null
# A full backlog of a unix socket refuses at once instead of waiting, so connecting is tried again at this pace.
_CONNECT_PACE_S: Final = 0.002
_ACCEPT_PAUSE_S: Final = 1.0
_ADMISSION_PACE_S: Final = 100e-6

_log = logging.getLogger(__name__)

_Callback = Callable[[PeerMemory | LinkError], None]


class SameHostListener:
    """The waiting end. Owns its socket, the socket file and every accepted socket; borrows the exports.

    Threads: :meth:`start` and the events that follow run on the loop's thread, never block it, and call the callbacks
    there. :meth:`expect` and :meth:`forget` (one atomic dict operation each) and :meth:`close` may be called from any
    thread. In a forked child only ``close`` may be called: it closes the child's descriptors, and touches neither the
    loop nor the socket file, which are the parent's.

    An accepted peer is given the exports, or what :meth:`expect` says, and has ``idle_timeout`` seconds for its packet.
    ``name`` is what a peer passes to :func:`exchange_memory`: ``@...`` is abstract, else the path of a file in
    ``socket_dir``.
    """

    def __init__(self, exports: Exports, socket_dir: str | None, *, idle_timeout: float = 5.0) -> None:
        self._exports = exports
        self._idle_timeout = idle_timeout
        self._pid = HERE["pid"]
        self._expected: dict[bytes, tuple[_Callback, Exports | LinkError]] = {}
        self._pending: dict[socket.socket, asyncio.TimerHandle] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._resume: asyncio.TimerHandle | None = None
        self._socket, self.name = _listen(socket_dir, shared=bool(exports.users))
        pass_rights(self._socket, allowed=False)
        self._closed = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Accept peers from now on; called on ``loop``'s thread."""
        self._loop = loop
        self._thread = threading.get_ident()
        loop.add_reader(self._socket, self._accept)

    def expect(self, token: bytes, callback: _Callback, offered: Exports | LinkError | None = None) -> None:
        """Admit one peer with ``token``. The callback gets its memory, which it then owns, or the reason why not.

        ``offered`` is what this peer is given instead of the exports, or why it is refused.

        The token is used up by the first packet that carries it. A callback is not called when the listener is closed
        first.
        """
        if not 16 <= len(token) <= 64:
            raise ParamError(f"expect: token has {len(token)} bytes, must have 16 to 64")
        expected = callback, self._exports if offered is None else offered
        if self._expected.setdefault(token, expected) is not expected:
            raise ParamError("expect: this token is expected already; tokens are for one use")

    def forget(self, token: bytes) -> None:
        self._expected.pop(token, None)

    def close(self) -> None:
        """Stop listening, drop every accepted peer, remove the socket file. Idempotent."""
        loop = self._loop
        if HERE["pid"] != self._pid or loop is None or not loop.is_running() or threading.get_ident() == self._thread:
            self._close_here()
            return
        closed = threading.Event()
        try:
            loop.call_soon_threadsafe(self._close_here)
            loop.call_soon_threadsafe(closed.set)
        except RuntimeError:  # the loop has been closed meanwhile
            self._close_here()
        else:
            closed.wait(5.0)

    def _accept(self) -> None:
        try:
            check_closers()
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors, the backlog stays readable and would keep the loop busy: stop accepting for a while.
            _log.warning("%r cannot accept and pauses for %.0f s: %s", self, _ACCEPT_PAUSE_S, error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            self._resume = loop.call_later(_ACCEPT_PAUSE_S, self.start, loop)
            return
        sock.setblocking(False)
        try:
            if len(self._pending) >= MAX_PENDING:
                raise LinkRefused(f"{MAX_PENDING} accepted peers have not said anything yet")
            peer_credentials(sock, self._exports.users)
        except LinkRefused as error:
            _log.info("same-host peer refused: %s", error)
            with suppress(OSError):
                send_packet(sock, Refusal(str(error)), [])
            close_elsewhere([sock.detach()])
            return
        pass_rights(sock, allowed=True)
        loop = asyncio.get_running_loop()
        self._pending[sock] = loop.call_later(self._idle_timeout, self._drop, sock, "it said nothing")
        loop.add_reader(sock.fileno(), self._receive, sock)

    def _receive(self, sock: socket.socket) -> None:
        try:
            packet = Packet.receive(sock)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            self._drop(sock, str(error))
            return
        with packet:
            self._answer(sock, packet)

    def _answer(self, sock: socket.socket, packet: Packet) -> None:
        """Answer one packet, close its socket, and call back the caller that expects its token."""
        callback: _Callback | None = None
        result: PeerMemory | LinkError
        try:
            hello = decode(packet.data)
            if isinstance(hello, Refusal):
                raise ProtocolError("a same-host dialer began with a refusal")
            expected = self._expected.pop(hello.token, None)
            if expected is None:
                raise LinkRefused("unknown or already used token")
            callback, offered = expected
            if isinstance(offered, LinkError):
                raise offered
            result = self._exchange(sock, hello, packet, offered)
        except LLMException as error:
            result = error if isinstance(error, LinkRefused) else LinkRefused(f"same-host rendezvous: {error}")
            with suppress(OSError):
                send_packet(sock, Refusal(str(error)[:1000]), [])
            self._drop(sock, str(error))
        else:
            self._drop(sock, None)
        if callback is not None:
            callback(result)

    def _exchange(self, sock: socket.socket, hello: RendezvousHello, packet: Packet, exports: Exports) -> PeerMemory:
        # Opened before the answer is sent, which only a living peer can still get.
        with MemoryOffer(exports, hello.token) as offer, PeerProcess(sock, exports.users) as process:
            peer = map_peer(hello, packet, process, offer)
            try:
                told = peer.cookie_address
                offer.send(sock, shut_out=told != 0 and probe(peer, told, peer.cookie) is not None)
                peer.settle()
            except OSError as error:
                peer.close()
                raise LinkRefused(f"same-host peer (pid {peer.pid}) left before the answer: {error}") from error
        return peer

    def _drop(self, sock: socket.socket, reason: str | None) -> None:
        self._pending.pop(sock).cancel()
        asyncio.get_running_loop().remove_reader(sock.fileno())
        close_elsewhere([sock.detach()])
        if reason is not None:
            _log.info("same-host peer dropped: %s", reason)

    def _close_here(self) -> None:
        loop = self._loop
        if self._closed:
            return
        if HERE["pid"] == self._pid:
            if loop is not None and not loop.is_closed():
                if self._resume is not None:
                    self._resume.cancel()
                loop.remove_reader(self._socket)
                for sock, timer in self._pending.items():
                    timer.cancel()
                    loop.remove_reader(sock.fileno())
            self._socket.shutdown(socket.SHUT_RD)  # refuses dialers from now on
            if not self.name.startswith("@"):
                Path(self.name).unlink(missing_ok=True)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._closed = True
        self._expected.clear()
        for sock in (self._socket, *self._pending):  # each on its own thread: one that blocks keeps no other open
            close_elsewhere([sock.detach()])
        self._pending.clear()

    @hold_signals
    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            if HERE["pid"] == self._pid:
                warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self._close_here()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._expected)} expected, {len(self._pending)} pending"
        return f"<SameHostListener {self.name}: {state}>"


def exchange_memory(name: str, token: bytes, exports: Exports, deadline: Deadline) -> PeerMemory:
    """Dial a peer's :class:`SameHostListener`, swap memory with it and return the peer's.

    The caller owns that memory. Blocks in the caller's thread, within the deadline. ``LinkRefused``: there is no
    listener of this ``name`` on this host, or one side refused; the text holds the reason.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    pass_rights(sock, allowed=False)
    try:
        _dial(sock, name, deadline)
        # Opened before anything is sent: the process that answers later was alive then.
        with PeerProcess(sock, exports.users) as process, MemoryOffer(exports, token) as offer:
            pass_rights(sock, allowed=True)
            with _ask(sock, name, offer, deadline) as packet:
                peer = map_peer(_check_answer(packet, name, token), packet, process, offer)
            peer.settle()
            return peer
    finally:
        close_elsewhere([sock.detach()])


def _dial(sock: socket.socket, name: str, deadline: Deadline) -> None:
    address = _address(name)
    while True:
        deadline.check(f"same-host rendezvous with {name!r}", "link")
        try:
            return sock.connect(address)
        except BlockingIOError:
            time.sleep(min(_CONNECT_PACE_S, deadline.next_turn()))
        except OSError as error:
            raise LinkRefused(
                f"no same-host listener {name!r} to be reached from here: {error}; the peer is on another host or in "
                "another network namespace (then give both llm.ShmSocketDir, a directory that both see)"
            ) from error


def _ask(sock: socket.socket, name: str, offer: MemoryOffer, deadline: Deadline) -> Packet:
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # it may have said why before it left
            _send(sock, offer, deadline)
        deadline.ready(sock, select.POLLIN)
        try:
            return Packet.receive(sock)
        except ConnectionResetError:  # it has not read our packet; what it said before comes after that error
            return Packet.receive(sock)
    except BlockingIOError as error:
        raise deadline.error(f"same-host rendezvous with {name!r}", "link") from error
    except (OSError, ProtocolError) as error:
        raise LinkRefused(f"same-host listener {name!r} broke off: {error}") from error


def _send(sock: socket.socket, offer: MemoryOffer, deadline: Deadline) -> None:
    """Send the offer once the listener has admitted this process: until then the kernel takes no descriptor."""
    while not (deadline.expired() or readable(sock.fileno())):  # by then it has said why it refuses
        with suppress(PermissionError):
            offer.send(sock)
            return
        time.sleep(min(_ADMISSION_PACE_S, deadline.next_turn()))


def _check_answer(packet: Packet, name: str, token: bytes) -> RendezvousHello:
    try:
        answer = decode(packet.data)
    except ProtocolError as error:
        raise LinkRefused(f"same-host listener {name!r} answered nonsense: {error}") from error
    if isinstance(answer, Refusal):
        # The peer's words, put on one line.
        raise LinkRefused(f"same-host listener {name!r} refused: {' '.join(answer.reason.split())}")
    if answer.token != token:
        raise LinkRefused(f"same-host listener {name!r} answered with another token")
    return answer


def _address(name: str) -> str:
    """Return the socket address of a listener's name. The name comes from the peer: no other address is dialled."""
    last = name.removeprefix("@") if name.startswith("@") else name.rpartition("/")[2]
    if not name.isprintable() or name[:1] not in ("@", "/") or not last.startswith(_PREFIX):
        raise LinkRefused(f"{name[:200]!r} is not the name of a same-host listener")
    return "\0" + last if name.startswith("@") else name


def _listen(socket_dir: str | None, *, shared: bool) -> tuple[socket.socket, str]:
    unique = _PREFIX + secrets.token_hex(8)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        if socket_dir is not None:
            return sock, _listen_in(sock, Path(socket_dir).absolute(), unique, shared=shared)
        sock.bind("\0" + unique)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        where = "an abstract name" if socket_dir is None else f"llm.ShmSocketDir={socket_dir!r}"
        raise ParamError(f"same-host listener: cannot listen at {where}: {error}") from error
    return sock, "@" + unique


def _listen_in(sock: socket.socket, folder: Path, unique: str, *, shared: bool) -> str:
    path = folder / (unique + _SUFFIX)
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise OSError(f"the path of a socket file has {_LONGEST_PATH} bytes at most")
    held = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    here = Path(f"/proc/self/fd/{held}")  # the folder that is checked, wherever its path leads by now
    temporary = here / f".{path.name}"
    try:
        _check_folder(os.fstat(held))
        _remove_stale(here)
        os.fchmod(sock.fileno(), 0o600)  # the mode of the file that bind makes
        sock.bind(str(temporary))
        if shared:  # whose process it is is asked of each that connects
            temporary.chmod(0o666)
        sock.listen(_BACKLOG)
        # Renamed last: a socket file under a final name that refuses a connection has no listener any more.
        temporary.rename(here / path.name)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(held)
    return str(path)


def _check_folder(status: os.stat_result) -> None:
    """Raise PermissionError if another user than root could replace a file of ours."""
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(
            f"this folder belongs to uid {status.st_uid}: it must belong to root or to uid {os.geteuid()}, this one's"
        )
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise PermissionError("others can write this folder: chmod o-w,g-w, or make it sticky (chmod +t)")


def _remove_stale(folder: Path) -> None:
    """Remove the socket files that killed processes of our user left."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
            status = path.lstat()
            ours = stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()
            if ours and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()
