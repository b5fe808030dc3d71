"""Sockets for addresses of listeners, (host, port): IPv4, IPv6, or a name of an IPv4 host."""

from __future__ import annotations

import select
import socket
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from llm_datadist.errors import LinkRefused, ProtocolError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline

R = TypeVar("R")


def new_socket(address: tuple[str, int]) -> socket.socket:
    """Return a stream socket that can listen at an address, or connect to it. Raises OSError."""
    return socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)


async def read_exactly(loop: asyncio.AbstractEventLoop, sock: socket.socket, count: int, what: str) -> bytes:
    """Read so many bytes, and not one more: what follows has another reader. Raises ProtocolError."""
    data = b""
    while len(data) < count:
        more = await loop.sock_recv(sock, count - len(data))
        if not more:
            raise ProtocolError(f"the connection ended before its {what}")
        data += more
    return data


class DialledSocket:
    """A connection whose calls wait within one deadline. Whatever fails leaves as DeadlineExceeded or LinkRefused."""

    def __init__(self, address: tuple[str, int], deadline: Deadline, what: str) -> None:
        self._address = address
        self._deadline = deadline
        self.what = what
        try:
            self.socket = new_socket(address)
            self.socket.setblocking(False)
        except OSError as error:
            raise LinkRefused(f"{what}: no socket: {error.strerror}") from error

    def connect(self, tune: Callable[[socket.socket], None]) -> None:
        self._call("connect", select.POLLOUT, lambda: self.socket.connect(self._address))
        self._call("connect", select.POLLOUT, lambda: tune(self.socket))

    def send(self, data: bytes) -> None:
        while data:
            data = data[self._call("handshake", select.POLLOUT, partial(self.socket.send, data)) :]

    def read(self, most: int) -> bytes:
        self._deadline.ready(self.socket, select.POLLIN)  # first: what is read here is the answer to what was just sent
        return self._call("handshake", select.POLLIN, lambda: self.socket.recv(most))

    def _call(self, phase: str, event: int, operation: Callable[[], R]) -> R:
        """Do one socket call, repeated when the socket is ready for ``event``, within what is left of the deadline."""
        while True:
            self._deadline.check(self.what, phase)
            try:
                return operation()
            except BlockingIOError:
                self._deadline.ready(self.socket, event)
            except OSError as error:
                raise LinkRefused(f"{self.what}: cannot {phase}: {error.strerror or error}", phase=phase) from error
