"""The same-host rendezvous: two processes prove that they share a host and swap the memfds of what they export.

The listener waits on an abstract unix socket, or on a socket file in a directory that containers with separate
network namespaces share. The dialer connects, both look at who the other is (SO_PEERCRED), the dialer sends one
packet with a one-time token that came over the control channel and its descriptors, the listener answers with its own.

Same host is proven by connecting, mapping and reading the cookie in the peer's guard table; nothing a peer merely says
about its host is believed. Every memfd's size and seals are checked before it is mapped.
"""

from __future__ import annotations

import array
import errno
import logging
import os
import secrets
import socket
import stat
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Self

import msgspec

from llm_datadist._memory.exports import ADDRESS_SPACE, RegionDescriptor
from llm_datadist._memory.segment import SharedSegment
from llm_datadist._transport.peer_memory import PeerMemory, PeerProcess, map_peer, peer_credentials
from llm_datadist.errors import LinkError, LinkRefused, LLMException, ParamError, ProtocolError

if TYPE_CHECKING:
    import asyncio

    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.exports import Exports
    from llm_datadist._memory.write_intents import WriterPage

__all__ = [
    "MAX_REGIONS",
    "VERSION",
    "Hello",
    "Offer",
    "Packet",
    "PeerMemory",
    "Refusal",
    "SameHostListener",
    "decode",
    "exchange_memory",
    "receive_packet",
    "send_packet",
]

MAX_PENDING: Final = 64
TOKEN_BYTES: Final = range(16, 65)
_PREFIX: Final = "llm-datadist-"
_SUFFIX: Final = ".sock"
_BACKLOG: Final = 128
# A full backlog of a unix socket refuses at once instead of waiting, so connecting is tried again at this pace.
_CONNECT_PACE_S: Final = 0.002
_ACCEPT_PAUSE_S: Final = 1.0
_CLOSE_WAIT_S: Final = 5.0

_log = logging.getLogger(__name__)

Callback = Callable[["PeerMemory | LinkError"], None]


class SameHostListener:
    """The waiting end. Owns its socket, the socket file and every accepted socket; borrows the exports.

    Threads: :meth:`start` and all that follows from it run on the loop's thread, never block it, and call the
    callbacks there; :meth:`expect` and :meth:`forget` may be called from any thread (each is one atomic dict
    operation). :meth:`close` may be called from any thread. In a forked child only ``close`` may be called: it closes
    the child's descriptors, and touches neither the loop nor the socket file, which are the parent's.

    Args:
        exports: What every accepted peer is given.
        socket_dir: Directory for a socket file, or None for an abstract socket.
        idle_timeout: Seconds an accepted peer has for its packet.

    Attributes:
        name: What the peer passes to :func:`exchange_memory`: ``@...`` is abstract, else a path.

    Raises:
        ParamError: ``socket_dir`` cannot hold a socket.
    """

    def __init__(self, exports: Exports, socket_dir: str | None, *, idle_timeout: float = 5.0) -> None:
        self._exports = exports
        self._idle_timeout = idle_timeout
        self._pid = os.getpid()
        self._expected: dict[bytes, Callback] = {}
        self._pending: dict[socket.socket, asyncio.TimerHandle] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._resume: asyncio.TimerHandle | None = None
        self._socket, self.name = _listen(socket_dir)
        self._closed = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Accept peers from now on; called on ``loop``'s thread."""
        self._loop = loop
        self._thread = threading.get_ident()
        loop.add_reader(self._socket, self._accept)

    def expect(self, token: bytes, callback: Callback) -> None:
        """Admit one peer with ``token``; the callback gets, and then owns, its memory, or the reason why not.

        The token is used up by the first packet that carries it. A callback of a listener that is closed first is
        never called.

        Raises:
            ParamError: The token is not of 16 to 64 bytes, or is expected already.
        """
        if len(token) not in TOKEN_BYTES:
            raise ParamError(f"expect: token has {len(token)} bytes, must have 16 to 64")
        if self._expected.setdefault(token, callback) is not callback:
            raise ParamError("expect: this token is expected already; tokens are for one use")

    def forget(self, token: bytes) -> None:
        """Admit nobody with ``token`` any more. Unknown and used ones are ignored."""
        self._expected.pop(token, None)

    def close(self) -> None:
        """Stop listening, drop every accepted peer, remove the socket file. Idempotent."""
        loop = self._loop
        if self._closed:
            return
        if os.getpid() != self._pid:
            self._close_descriptors()
        elif loop is None or not loop.is_running() or threading.get_ident() == self._thread:
            self._close_here()
        else:
            self._close_on(loop)

    # On the loop's thread

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(error)
            return
        sock.setblocking(False)
        reason = self._admission(sock)
        if reason is not None:
            _log.info("same-host peer refused: %s", reason)
            sock.close()
            return
        self._pending[sock] = self._running_loop().call_later(self._idle_timeout, self._drop, sock, "it said nothing")
        self._running_loop().add_reader(sock, self._receive, sock)

    def _admission(self, sock: socket.socket) -> str | None:
        if len(self._pending) >= MAX_PENDING:
            return f"{MAX_PENDING} accepted peers have not said anything yet"
        try:
            peer_credentials(sock)
        except LinkRefused as error:
            return str(error)
        return None

    def _pause(self, error: OSError) -> None:
        # Out of descriptors: the backlog stays readable, so without a pause the loop would do nothing else.
        _log.warning("same-host listener %s cannot accept and pauses for %.0f s: %s", self.name, _ACCEPT_PAUSE_S, error)
        loop = self._running_loop()
        loop.remove_reader(self._socket)
        self._resume = loop.call_later(_ACCEPT_PAUSE_S, self.start, loop)

    def _receive(self, sock: socket.socket) -> None:
        try:
            packet = receive_packet(sock)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            self._drop(sock, str(error))
            return
        with packet:
            self._settle(sock, packet)

    def _settle(self, sock: socket.socket, packet: Packet) -> None:
        """Answer one packet, close its socket, and tell whoever expected it."""
        callback: Callback | None = None
        result: PeerMemory | LinkError
        try:
            hello = _expect_hello(decode(packet.data))
            callback = self._expected.pop(hello.token, None)
            if callback is None:
                raise LinkRefused("unknown or already used token")
            result = self._exchange(sock, hello, packet)
        except LLMException as error:
            result = error if isinstance(error, LinkRefused) else LinkRefused(f"same-host rendezvous: {error}")
            with suppress(OSError):
                send_packet(sock, Refusal(str(error)[:1000]), [])
            self._drop(sock, str(error))
        else:
            self._drop(sock, None)
        if callback is not None:
            callback(result)

    def _exchange(self, sock: socket.socket, hello: Hello, packet: Packet) -> PeerMemory:
        # Opened before the answer is sent, which only a living peer can still get.
        with Offer(self._exports, hello.token) as offer, PeerProcess(sock) as process:
            peer = map_peer(hello, packet, process, offer)
        try:
            offer.send(sock)
            peer.settle()
        except OSError as error:
            peer.close()
            raise LinkRefused(f"same-host peer (pid {peer.pid}) left before the answer: {error}") from error
        return peer

    def _drop(self, sock: socket.socket, reason: str | None) -> None:
        timer = self._pending.pop(sock, None)
        if timer is not None:
            timer.cancel()
            self._running_loop().remove_reader(sock)
        sock.close()
        if reason is not None:
            _log.info("same-host peer dropped: %s", reason)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "only reached from callbacks of the loop given to start()"
        return self._loop

    # Closing

    def _close_on(self, loop: asyncio.AbstractEventLoop) -> None:
        done = threading.Event()

        def close_there() -> None:
            self._close_here()
            done.set()

        try:
            loop.call_soon_threadsafe(close_there)
        except RuntimeError:  # the loop has been closed meanwhile
            self._close_here()
        else:
            done.wait(_CLOSE_WAIT_S)

    def _close_here(self) -> None:
        if self._closed:
            return
        loop = self._loop
        if loop is not None and not loop.is_closed():
            self._leave_loop(loop)
        self._close_descriptors()
        if not self.name.startswith("@"):
            Path(self.name).unlink(missing_ok=True)

    def _leave_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._resume is not None:
            self._resume.cancel()
        loop.remove_reader(self._socket)
        for sock, timer in self._pending.items():
            timer.cancel()
            loop.remove_reader(sock)

    def _close_descriptors(self) -> None:
        self._closed = True
        self._expected.clear()
        self._socket.close()
        while self._pending:
            self._pending.popitem()[0].close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        if os.getpid() == self._pid:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self._close_here()
        else:
            self._close_descriptors()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._expected)} expected, {len(self._pending)} pending"
        return f"<SameHostListener {self.name}: {state}>"


def exchange_memory(name: str, token: bytes, exports: Exports, deadline: Deadline) -> PeerMemory:
    """Dial a peer's :class:`SameHostListener`, swap memory with it and return the peer's; the caller owns it.

    Blocks in the caller's thread, within the deadline.

    Args:
        name: The peer's ``SameHostListener.name``.
        token: The token that the peer expects.
        exports: What the peer is given.
        deadline: Of the whole call.

    Raises:
        LinkRefused: There is no such listener on this host, or one side refused; the text holds the reason.
        DeadlineExceeded: No answer in time (phase ``link``).
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        _dial(sock, name, deadline)
        # Opened before anything is sent: what answers later was alive then.
        with PeerProcess(sock) as process, Offer(exports, token) as offer, _ask(sock, name, offer, deadline) as packet:
            peer = map_peer(_check_answer(packet, name, token), packet, process, offer)
            peer.settle()
            return peer


def _dial(sock: socket.socket, name: str, deadline: Deadline) -> None:
    address = _address(name)
    sock.setblocking(False)
    while True:
        deadline.check(f"same-host rendezvous with {name!r}", "link")
        try:
            sock.connect(address)
        except BlockingIOError:
            time.sleep(min(_CONNECT_PACE_S, deadline.remaining()))
        except OSError as error:
            raise LinkRefused(
                f"no same-host listener {name!r} to be reached from here: {error}; the peer is on another host or in "
                "another network namespace (then give both llm.ShmSocketDir, a directory that both see)"
            ) from error
        else:
            return


def _ask(sock: socket.socket, name: str, offer: Offer, deadline: Deadline) -> Packet:
    try:
        offer.send(sock)
        sock.settimeout(deadline.remaining())
        return receive_packet(sock)
    except (BlockingIOError, TimeoutError) as error:
        raise deadline.error(f"same-host rendezvous with {name!r}", "link") from error
    except (OSError, ProtocolError) as error:
        raise LinkRefused(f"same-host listener {name!r} broke off: {error}") from error


def _check_answer(packet: Packet, name: str, token: bytes) -> Hello:
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


def _expect_hello(value: Hello | Refusal) -> Hello:
    if isinstance(value, Refusal):
        raise ProtocolError("a same-host dialer began with a refusal")
    return value


def _address(name: str) -> str:
    # A name comes from the peer: nothing but a listener's is ever dialled.
    last = name.removeprefix("@") if name.startswith("@") else name.rpartition("/")[2]
    if not name.isprintable() or name[:1] not in ("@", "/") or not last.startswith(_PREFIX):
        raise LinkRefused(f"{name[:200]!r} is not the name of a same-host listener")
    return "\0" + last if name.startswith("@") else name


def _listen(socket_dir: str | None) -> tuple[socket.socket, str]:
    """Return a listening socket and its name."""
    unique = _PREFIX + secrets.token_hex(8)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        if socket_dir is not None:
            return sock, _listen_in(sock, Path(socket_dir).absolute(), unique)
        sock.bind("\0" + unique)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        where = "an abstract name" if socket_dir is None else f"llm.ShmSocketDir={socket_dir!r}"
        raise ParamError(f"same-host listener: cannot listen at {where}: {error}") from error
    return sock, "@" + unique


def _listen_in(sock: socket.socket, folder: Path, unique: str) -> str:
    _remove_stale(folder)
    path, temporary = folder / (unique + _SUFFIX), folder / ("." + unique + _SUFFIX)
    try:
        sock.bind(str(temporary))
        temporary.chmod(0o600)
        sock.listen(_BACKLOG)
        # Only now under its name: a socket file of that name that refuses a connection is surely nobody's.
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return str(path)


def _remove_stale(folder: Path) -> None:
    """Remove the socket files that killed processes of our user left (rule 12)."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            status = path.lstat()
            if stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid() and _refuses(path):
                path.unlink()


def _refuses(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


VERSION: Final = 2
MAX_REGIONS: Final = 32
MAX_DESCRIPTORS: Final = MAX_REGIONS + 2
# A full hello: 32 names of 64 characters of 4 bytes, and some.
_MAX_PACKET: Final = 16 << 10
_FD_BYTES: Final = array.array("i").itemsize
# CMSG_LEN, not CMSG_SPACE: its padding would let one more in.
_ANCILLARY: Final = socket.CMSG_LEN(MAX_DESCRIPTORS * _FD_BYTES)


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Either end's offer.

    Its descriptors: the guard table's, that of the page for writers if there is one, then one per region in the order
    of ``regions``.

    Attributes:
        version: Of these packets.
        token: The one-time token of the control channel; the answer repeats it.
        incarnation: Of the sender.
        cookie: What the receiver must find in the mapped guard table's header.
        guards_nbytes: Size of the guard table.
        writers_nbytes: Size of the page in which the receiver announces what it writes; 0 where nobody may write.
        regions: The exported segments.
    """

    version: int
    token: Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
    incarnation: Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
    cookie: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    guards_nbytes: Annotated[int, msgspec.Meta(ge=1, le=ADDRESS_SPACE)]
    writers_nbytes: Annotated[int, msgspec.Meta(ge=0, le=ADDRESS_SPACE)]
    regions: Annotated[list[RegionDescriptor], msgspec.Meta(max_length=MAX_REGIONS)]

    @property
    def descriptors(self) -> int:
        """How many descriptors belong to it."""
        return 1 + bool(self.writers_nbytes) + len(self.regions)


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The listener's answer when there will be no rendezvous.

    Attributes:
        reason: One line.
    """

    reason: Annotated[str, msgspec.Meta(max_length=1000)]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Hello | Refusal)


class Packet:
    """One received packet; owns its descriptors. Used by one thread.

    Attributes:
        data: The encoded value.
        fds: Descriptors nobody has taken yet.
    """

    __slots__ = ("data", "fds")

    def __init__(self, data: bytes, fds: list[int]) -> None:
        self.data = data
        self.fds = fds

    def take(self) -> int:
        """Return the next descriptor; the caller owns it from now on."""
        return self.fds.pop(0)

    def close(self) -> None:
        """Close every descriptor nobody took. Idempotent."""
        while self.fds:
            os.close(self.fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def send_packet(sock: socket.socket, value: Hello | Refusal, fds: list[int]) -> None:
    """Send one value with descriptors, which stay the caller's.

    Raises:
        OSError: The socket's, ``BlockingIOError`` and ``TimeoutError`` among them.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([_encoder.encode(value)], rights, socket.MSG_NOSIGNAL)


def receive_packet(sock: socket.socket) -> Packet:
    """Receive one packet.

    Raises:
        ProtocolError: The peer closed its end, or sent more than a packet may hold; no descriptor is left open.
        OSError: The socket's, ``BlockingIOError`` and ``TimeoutError`` among them.
    """
    data, ancillary, flags, _ = sock.recvmsg(_MAX_PACKET, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    packet = Packet(data, _descriptors(ancillary))
    reason = _defect(data, flags)
    if reason is not None:
        packet.close()
        raise ProtocolError(reason)
    return packet


def decode(data: bytes) -> Hello | Refusal:
    """Return the value in a packet, schema-checked.

    Raises:
        ProtocolError: It is none, of another version, or names a region twice.
    """
    try:
        value: Hello | Refusal = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"same-host packet of {len(data)} bytes is malformed: {error}") from error
    if isinstance(value, Refusal):
        return value
    if value.version != VERSION:
        raise ProtocolError(f"same-host packets of version {value.version} are not understood here, only {VERSION}")
    regions = [descriptor.region for descriptor in value.regions]
    if len(set(regions)) != len(regions):
        raise ProtocolError(f"same-host hello names a region twice: {regions}")
    return value


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            # A truncated message may end inside a descriptor that was not installed.
            fds.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
    return fds.tolist()


def _defect(data: bytes, flags: int) -> str | None:
    if flags & socket.MSG_CTRUNC:
        return f"same-host packet has more than {MAX_DESCRIPTORS} descriptors, or this process has none left"
    if flags & socket.MSG_TRUNC:
        return f"same-host packet is larger than {_MAX_PACKET} bytes"
    if not data:
        return "the peer closed the same-host socket without a word"
    return None


class Offer:
    """Made for one peer, used by one thread. Owns the page until somebody takes it; only memfds are offered.

    Args:
        exports: What the peer is given.
        token: Of the rendezvous.

    Attributes:
        hello: What is said.
        fds: The descriptors that go with it; they stay their segments'.

    Raises:
        LinkRefused: There is no memory or descriptor left for the page, or this process is being finalised.
    """

    def __init__(self, exports: Exports, token: bytes) -> None:
        shared = {region: segment for region, segment in exports.regions.items() if isinstance(segment, SharedSegment)}
        regions = [described for described in exports.descriptors() if described.region in shared]
        guards = exports.guards
        try:
            page = exports.writers.open()
        except LLMException as error:
            raise LinkRefused(f"no page for the writers of this peer: {error}") from error
        self._page: WriterPage | None = page
        memory = page.segment
        assert memory is not None
        self.hello = Hello(
            VERSION, token, exports.incarnation, guards.cookie, guards.segment.nbytes, memory.nbytes, regions
        )
        self.fds = [guards.segment.fd, memory.fd, *(shared[described.region].fd for described in regions)]

    def send(self, sock: socket.socket) -> None:
        """Send it, once.

        Raises:
            OSError: The socket's, ``BlockingIOError`` and ``TimeoutError`` among them.
        """
        send_packet(sock, self.hello, self.fds)

    def take_page(self) -> WriterPage | None:
        """Return the page for the peer's writers, the caller's from now on; None if it was taken already."""
        page, self._page = self._page, None
        return page

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        page = self.take_page()
        if page is not None:
            page.retire()
