"""Same-host rendezvous: two processes prove that they share a host, and exchange the memfds of their exports.

The listener has an abstract unix socket, or a socket file in a directory that containers share. Both sides check the
other's user (SO_PEERCRED). The dialer sends descriptors and a one-time token from the control channel; the listener
answers alike.

Connecting, mapping and the cookie in the peer's guard table prove the same host. If a rendezvous fails (LinkRefused),
the link takes another transport.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import select
import socket
import stat
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llm_datadist._checks import HERE
from llm_datadist._log import links_logger as logger
from llm_datadist._native import close_elsewhere, readable
from llm_datadist._native.public_call import public_call
from llm_datadist._transport.samehost.cma import probe
from llm_datadist._transport.samehost.peer_memory import PeerMemory, PeerProcess
from llm_datadist._transport.samehost.rendezvous import (
    MemoryOffer,
    Packet,
    Refusal,
    RendezvousHello,
    check_closers,
    decode,
    pass_rights,
    send_packet,
)
from llm_datadist._transport.users import peer_credentials
from llm_datadist.errors import LinkError, LinkRefused, LLMException, ParamError, ProtocolError

if TYPE_CHECKING:
    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.exports import Exports

MAX_PENDING: Final = 64
_PREFIX: Final = "llm-datadist-"
_SUFFIX: Final = ".sock"
_BACKLOG: Final = 128
_LONGEST_PATH: Final = 107  # of a unix socket, without the final null
# Pace of connecting: a unix socket refuses at once while its backlog is full.
_CONNECT_PACE_S: Final = 0.002
_ACCEPT_PAUSE_S: Final = 1.0
_ADMISSION_PACE_S: Final = 100e-6

_Callback = Callable[[PeerMemory | LinkError], None]


class SameHostListener:
    """Listener of the rendezvous; a peer has ``idle_timeout`` seconds for its packet.

    ``name`` is for :func:`exchange_memory`: ``@...`` if abstract, else the path of a file in ``socket_dir``.
    Owns: its socket, the socket file and accepted sockets.
    Threads: :meth:`start`, events and callbacks on the control thread, which they never block; :meth:`close` there, or
        anywhere while the loop does not run; others any.
    Errors: in a forked child call only :meth:`close`; it spares the parent's loop and socket file.
    """

    def __init__(self, exports: Exports, socket_dir: str | None, *, idle_timeout: float = 5.0) -> None:
        self._exports = exports
        self._idle_timeout = idle_timeout
        self._pid = HERE["pid"]
        self._expected: dict[bytes, tuple[_Callback, Exports | LinkError]] = {}
        self._pending: dict[socket.socket, asyncio.TimerHandle] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._resume: asyncio.TimerHandle | None = None
        self._socket, self.name = _listen(socket_dir, shared=bool(exports.users))
        pass_rights(self._socket, allowed=False)
        self._closed = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self._socket, self._accept)

    def expect(self, token: bytes, callback: _Callback, offered: Exports | LinkError | None = None) -> None:
        """Admit one peer with ``token``, which the first packet with it uses up.

        The callback gets the peer's memory, to own, or the reason why not; nothing if the listener is closed first.
        ``offered`` replaces the exports for this peer, or is the reason to refuse it.
        """
        expected = callback, self._exports if offered is None else offered
        if self._expected.setdefault(token, expected) is not expected:
            raise ParamError("expect: this token is expected already; tokens are for one use")

    def forget(self, token: bytes) -> None:
        self._expected.pop(token, None)

    def close(self) -> None:
        """Stop listening, drop accepted peers, remove the socket file. Idempotent."""
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
            self._socket.shutdown(socket.SHUT_RD)  # refuses dialers
            if not self.name.startswith("@"):
                Path(self.name).unlink(missing_ok=True)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._closed = True
        self._expected.clear()
        for sock in (self._socket, *self._pending):  # a thread for each: one that blocks keeps no other open
            close_elsewhere([sock.detach()])
        self._pending.clear()

    def _accept(self) -> None:
        try:
            check_closers()
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors. The backlog stays readable and would keep the loop busy, so pause.
            logger.warning("%r cannot accept and pauses for %.0f s: %s", self, _ACCEPT_PAUSE_S, error)
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
            logger.info("same-host peer refused: %s", error)
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
        """Answer one packet, close its socket, and call the callback of its token."""
        callback: _Callback | None = None
        result: PeerMemory | LinkError
        try:
            hello = decode(packet.data)
            if isinstance(hello, Refusal):
                raise ProtocolError("a same-host dialer began with a refusal")
            unknown = None, LinkRefused("unknown or already used token")
            callback, offered = self._expected.pop(hello.token, unknown)
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
        # Before the answer, which only a living peer can get.
        with MemoryOffer(exports, hello.token) as offer, PeerProcess(sock, exports.users) as process:
            peer = PeerMemory(hello, packet, process, offer)
            try:
                offer.send(sock, shut_out=hello.cookie_address != 0 and probe(peer) is not None)
                peer.close_page_fd()
            except OSError as error:
                peer.close()
                raise LinkRefused(f"same-host peer (pid {peer.pid}) left before the answer: {error}") from error
        return peer

    def _drop(self, sock: socket.socket, reason: str | None) -> None:
        self._pending.pop(sock).cancel()
        asyncio.get_running_loop().remove_reader(sock.fileno())
        close_elsewhere([sock.detach()])
        if reason is not None:
            logger.info("same-host peer dropped: %s", reason)

    @partial(public_call, here=True)  # below any lock of this thread
    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            if HERE["pid"] == self._pid:
                warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._expected)} expected, {len(self._pending)} pending"
        return f"<SameHostListener {self.name}: {state}>"


def exchange_memory(name: str, token: bytes, exports: Exports, deadline: Deadline) -> PeerMemory:
    """Exchange memory with a peer's :class:`SameHostListener`; return the peer's, for the caller to own.

    Raises LinkRefused if this host has no listener of that ``name``, or a side refused.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    pass_rights(sock, allowed=False)
    try:
        _dial(sock, name, deadline)
        # Before anything is sent, as the process that answers later is alive now.
        with PeerProcess(sock, exports.users) as process, MemoryOffer(exports, token) as offer:
            pass_rights(sock, allowed=True)
            with _ask(sock, name, offer, deadline) as packet:
                peer = PeerMemory(_check_answer(packet, name, token), packet, process, offer)
            peer.close_page_fd()
            if peer.on_device is not None:
                peer.on_device.wait(deadline)
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
        with suppress(BrokenPipeError, ConnectionResetError):  # it may have sent its reason before
            _send(sock, offer, deadline)
        deadline.ready(sock, select.POLLIN)
        try:
            return Packet.receive(sock)
        except ConnectionResetError:  # it did not read this packet; its reason comes after that error
            return Packet.receive(sock)
    except BlockingIOError as error:
        raise deadline.error(f"same-host rendezvous with {name!r}", "link") from error
    except (OSError, ProtocolError) as error:
        raise LinkRefused(f"same-host listener {name!r} broke off: {error}") from error


def _send(sock: socket.socket, offer: MemoryOffer, deadline: Deadline) -> None:
    """Send the offer once the listener has admitted this process; before, the kernel refuses descriptors."""
    while not (deadline.expired() or readable(sock.fileno())):  # readable: a refusal
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
        raise LinkRefused(f"same-host listener {name!r} refused: {answer.reason}")
    if answer.token != token:
        raise LinkRefused(f"same-host listener {name!r} answered with another token")
    return answer


def _address(name: str) -> str:
    """Return the socket address of a listener's name. Raises LinkRefused for other names: the peer sent it."""
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
        where = "same-host listener" if socket_dir is None else f"llm.ShmSocketDir={socket_dir!r}"
        action = "" if socket_dir is None else "; give a folder in which this process may make sockets"
        raise ParamError(f"{where}: cannot listen there: {error.strerror or error}{action}") from error
    return sock, "@" + unique


def _listen_in(sock: socket.socket, folder: Path, unique: str, *, shared: bool) -> str:
    path = folder / (unique + _SUFFIX)
    if len(os.fsencode(path)) > _LONGEST_PATH:
        most = _LONGEST_PATH - len(path.name) - 1
        raise OSError(f"the path of a socket file has {_LONGEST_PATH} bytes at most, so this folder's has {most}")
    held = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    here = Path(f"/proc/self/fd/{held}")  # the checked folder, even if its path changes
    temporary = here / f".{path.name}"
    try:
        _check_folder(os.fstat(held))
        _remove_stale(here)
        os.fchmod(sock.fileno(), 0o600)  # mode of the file that bind makes
        sock.bind(str(temporary))
        if shared:  # the user of each peer that connects is checked
            temporary.chmod(0o666)
        sock.listen(_BACKLOG)
        # Last: a socket file with a final name that refuses connections has lost its listener.
        temporary.rename(here / path.name)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(held)
    return str(path)


def _check_folder(status: os.stat_result) -> None:
    """Raise PermissionError if a user other than root and this one could replace a file there."""
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(
            f"this folder belongs to uid {status.st_uid}: it must belong to root or to uid {os.geteuid()}, this one's"
        )
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise PermissionError("others can write this folder: chmod o-w,g-w, or make it sticky (chmod +t)")


def _remove_stale(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
            status = path.lstat()
            ours = stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()
            if ours and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()
