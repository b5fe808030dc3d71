"""Sockets for addresses of listeners: (host, port), IPv4, IPv6 or a name."""

from __future__ import annotations

import select
import socket
import struct
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from llm_datadist._checks import is_ip
from llm_datadist.errors import LinkRefused, ProtocolError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline

R = TypeVar("R")

#: In every preamble. It changes only if greetings can no longer be read; links agree on a version (docs/protocol.md).
WIRE_MAJOR: Final = 11
_MAGIC: Final = b"ODATDIST"
_LIMIT: Final = "sync_kv_timeout or the call's timeout"


def preamble(purpose: int) -> bytes:
    """Return the first bytes of a connection to a listener: magic, wire major, purpose."""
    return _MAGIC + struct.pack(">HH", WIRE_MAJOR, purpose)


def other_build(preamble: bytes) -> str:
    """Return what an unknown preamble says of the peer."""
    (major,) = struct.unpack_from(">H", preamble, len(_MAGIC))
    if not preamble.startswith(_MAGIC) or major == WIRE_MAJOR:
        return f"the preamble {preamble!r} is not one of ours"
    return f"the dialer's wire major is {major}, the listener's {WIRE_MAJOR}: install releases next to each other"


def is_plain(preamble: bytes) -> bool:
    """Return True for a plain control channel of any wire major."""
    return preamble.startswith(_MAGIC) and preamble.endswith(b"\0\0")


def new_socket(address: tuple[str, int]) -> socket.socket:
    """Return a stream socket of an address's family. Raises OSError."""
    return socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)


def shut_down(sock: socket.socket) -> None:
    """End both directions, also of a socket that is closed already; who waits for it wakes."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def resolve(address: tuple[str, int], deadline: Deadline, what: str) -> list[tuple[str, int]]:
    """Return the addresses of a host, in the order in which to try them.

    A daemon thread asks the C library's resolver, because the resolver takes no deadline; the thread may outlive this
    call. Raises LinkRefused if the host cannot be resolved, DeadlineExceeded if the resolver has not answered in time.
    """
    host, port = address
    if is_ip(host):
        return [address]
    found: list[list[tuple[str, int]] | OSError] = []

    def look_up() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.append([(str(each[4][0]), port) for each in infos])
        except OSError as error:
            found.append(error)

    threading.Thread(target=look_up, name="llm-datadist-resolve", daemon=True).start()
    if not deadline.poll(lambda: bool(found)):
        raise deadline.error(f"{what}: looking up {host!r}", "resolve", advice="give an address, or a larger timeout")
    if isinstance(found[0], OSError):
        reason = found[0].strerror or found[0]
        raise LinkRefused(f"{what}: cannot resolve {host!r}: {reason}", phase="resolve") from found[0]
    return found[0]


async def read_exactly(loop: asyncio.AbstractEventLoop, sock: socket.socket, count: int, what: str) -> bytes:
    """Read ``count`` bytes: another reader takes the rest. Raises ProtocolError if the stream ends."""
    data = b""
    while len(data) < count:
        more = await loop.sock_recv(sock, count - len(data))
        if not more:
            raise ProtocolError(f"the connection ended before its {what}")
        data += more
    return data


class DialledSocket:
    """Connection to the first address that accepts. Calls raise LinkRefused, or DeadlineExceeded naming ``limit``."""

    def __init__(self, addresses: list[tuple[str, int]], deadline: Deadline, what: str, limit: str = _LIMIT) -> None:
        self._left = list(addresses)
        self._deadline = deadline
        self.what = what
        self._limit = limit
        self._heard = False
        self.hung_up = False
        self._open()

    def _open(self) -> None:
        self.address = self._left.pop(0)
        try:
            self.socket = new_socket(self.address)
            self.socket.setblocking(False)
        except OSError as error:
            if not self._left:
                raise LinkRefused(f"{self.what}: no socket: {error.strerror}") from error
            self._open()

    def connect(self, tune: Callable[[socket.socket], None]) -> None:
        try:
            self._call("connect", select.POLLOUT, lambda: self.socket.connect(self.address))
            self._call("connect", select.POLLOUT, lambda: tune(self.socket))
        except LinkRefused:
            if not self._left or self.hung_up:
                raise
            self.close()
            self._open()
            self.connect(tune)

    def close(self) -> None:
        self.socket.close()

    def hang_up(self) -> None:
        """End the connection, and calls that wait for it, at once. Any thread."""
        self.hung_up = True
        shut_down(self.socket)

    def send(self, data: bytes) -> None:
        while data:
            data = data[self._call("handshake", select.POLLOUT, partial(self.socket.send, data, socket.MSG_NOSIGNAL)) :]

    def read(self, most: int) -> bytes:
        self._deadline.ready(self.socket, select.POLLIN)  # first: the answer is not there yet
        data = self._call("handshake", select.POLLIN, lambda: self.socket.recv(most))
        self._heard = True
        return data

    def _advice(self, phase: str) -> str:
        known = "nothing answers at that address: an absent host, or a firewall"
        if phase != "connect":
            known = "something there accepts connections, and says nothing: another program, or a stopped peer"
        return f"{'' if self._heard else f'{known}; '}raise {self._limit} only for a slow peer or network"

    def _call(self, phase: str, event: int, operation: Callable[[], R]) -> R:
        """Repeat a socket call until it does not block; between the tries, wait for ``event`` within the deadline."""
        while True:
            if self._deadline.expired():
                raise self._deadline.error(self.what, phase, advice=self._advice(phase))
            if self.hung_up:  # connect() would try once more
                raise LinkRefused(f"{self.what}: given up here", phase=phase)
            try:
                return operation()
            except BlockingIOError:
                self._deadline.ready(self.socket, event)
            except OSError as error:
                raise LinkRefused(f"{self.what}: cannot {phase}: {error.strerror or error}", phase=phase) from error
