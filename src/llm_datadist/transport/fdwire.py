"""Packets of the same-host rendezvous: one msgpack value with file descriptors beside it.

Whoever receives a packet owns its descriptors: a :class:`Packet` closes on exit whatever nobody took out of it, and
a packet that is refused here has been emptied before the error is raised.
"""

from __future__ import annotations

import array
import os
import socket
from typing import Annotated, Final, Self

import msgspec

from llm_datadist.errors import ProtocolError
from llm_datadist.transport.exports import ADDRESS_SPACE, RegionDescriptor

__all__ = ["MAX_REGIONS", "VERSION", "Hello", "Packet", "Refusal", "decode", "receive_packet", "send_packet"]

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
