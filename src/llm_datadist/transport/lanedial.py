"""How a lane is set up: a socket to the peer's listener that says which session it belongs to.

    dialer                                     listener
    12 bytes  LANE_PREAMBLE          ------>   tells a lane from a control connection
    16 bytes  the session's token    ------>
    2 bytes   lane number            ------>   whoever knows the token belongs to the session
                                     <------   1 byte: ACCEPTED; otherwise the connection ends

From then on both ends speak the frames of the native lane engine.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from llm_datadist.errors import DeadlineExceeded, LinkRefused, ProtocolError

if TYPE_CHECKING:
    import asyncio

    from llm_datadist.deadline import Deadline

__all__ = ["LANE_PREAMBLE", "TOKEN_BYTES", "accept_lane", "dial_lanes", "read_lane_greeting", "tune_lane"]

#: As the preamble of a control connection (magic, protocol version), with purpose 1.
LANE_PREAMBLE: Final = b"ODATDIST" + struct.pack(">HH", 1, 1)
TOKEN_BYTES: Final = 16
_NUMBER: Final = struct.Struct(">H")
_ACCEPTED: Final = b"\x01"
# What the kernel takes of a lane beyond what is on its way. Without a bound, a hundred readers that are stuck hold
# gigabytes of the memory that the host's TCP connections share, and all of them lose packets.
_UNSENT_BYTES: Final = 512 << 10


def tune_lane(sock: socket.socket) -> None:
    """Set what every lane has. Liveness is the control connection's affair, what is on its way the kernel's."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def dial_lanes(
    address: tuple[str, int], token: bytes, count: int, deadline: Deadline, *, first: int = 0
) -> list[socket.socket]:
    """Connect ``count`` lanes of the session ``token`` to the listener at ``address``. Blocks in the caller's thread.

    Args:
        address: Host and port of the peer's listener.
        token: 16 bytes that the listener expects.
        count: How many.
        deadline: For all of them.
        first: Number of the first one.

    Raises:
        DeadlineExceeded: Not all were accepted in time (phase ``connect``); none is left open.
        LinkRefused: Unreachable or refused; none is left open.
    """
    what = f"data lanes to {address[0]}:{address[1]}"
    with ExitStack() as opened:
        socks = [_connect(address, deadline, what, opened) for _ in range(count)]
        try:
            for number, sock in enumerate(socks, first):
                sock.sendall(LANE_PREAMBLE + token + _NUMBER.pack(number))  # which a new connection has room for
            for sock in socks:
                _await_accept(sock, deadline, what)
        except DeadlineExceeded:
            raise
        except OSError as error:
            raise LinkRefused(f"{what}: the connection broke: {error}") from error
        opened.pop_all()
        return socks


def _connect(address: tuple[str, int], deadline: Deadline, what: str, opened: ExitStack) -> socket.socket:
    """Return a new connection, which does not block."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        sock = opened.enter_context(socket.socket(family, kind, protocol))
        sock.setblocking(False)
        tune_lane(sock)
        failed = sock.connect_ex(where)
        if failed == errno.EINPROGRESS:
            _await(sock, select.POLLOUT, deadline, what)
            failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, os.strerror(failed))
    except DeadlineExceeded:
        raise
    except OSError as error:
        raise LinkRefused(f"{what}: cannot connect: {error}") from error
    return sock


def _await_accept(sock: socket.socket, deadline: Deadline, what: str) -> None:
    _await(sock, select.POLLIN, deadline, what)
    if sock.recv(1) != _ACCEPTED:
        raise LinkRefused(f"{what}: the peer does not know this session, or has lanes enough")
    sock.setblocking(True)


def _await(sock: socket.socket, event: int, deadline: Deadline, what: str) -> None:
    """Return when the socket is ready or has failed. In turns, between which a cancellation is noticed."""
    ready = select.poll()
    ready.register(sock, event)
    while not ready.poll(deadline.wait_at_most() * 1e3):
        deadline.check(what, "connect")


async def read_lane_greeting(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> tuple[bytes, int]:
    """Return (token, lane number) of a new lane, after the listener has read its preamble. Runs on the target.

    The caller bounds the time, checks the token, then calls :func:`accept_lane` or closes the socket.

    Raises:
        ProtocolError: The connection ended first.
        OSError: It broke.
    """
    data = b""
    while len(data) < TOKEN_BYTES + _NUMBER.size:
        # Not a byte more: what follows belongs to the lane engine.
        more = await loop.sock_recv(sock, TOKEN_BYTES + _NUMBER.size - len(data))
        if not more:
            raise ProtocolError("the connection ended before its lane greeting")
        data += more
    return data[:TOKEN_BYTES], _NUMBER.unpack(data[TOKEN_BYTES:])[0]


async def accept_lane(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    """Tell the dialer that its lane is accepted; the socket is then ready for :meth:`Lanes.add`."""
    tune_lane(sock)
    await loop.sock_sendall(sock, _ACCEPTED)
