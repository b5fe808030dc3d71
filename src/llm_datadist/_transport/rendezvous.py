"""The packets of the same-host rendezvous: what each end says, and the descriptors of its memory that go with it.

A packet is one message on a ``SOCK_SEQPACKET`` unix socket. What comes from a peer is checked here for its form and its
limits only; :mod:`llm_datadist._transport.peer_memory` checks the memory itself.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Self

import msgspec

from llm_datadist._memory.exports import ADDRESS_SPACE, Exports, RegionDescriptor
from llm_datadist._memory.segment import SharedSegment
from llm_datadist._native import close_elsewhere, closing
from llm_datadist.errors import LinkRefused, LLMException, ProtocolError

if TYPE_CHECKING:
    from llm_datadist._memory.write_intents import IntentPage

VERSION: Final = 6
_MAX_REGIONS: Final = 32
_MAX_DESCRIPTORS: Final = _MAX_REGIONS + 2
# SCM_MAX_FD: all that a packet can have. The kernel closes what it has no room for, in the thread that receives it.
_ROOM: Final = socket.CMSG_SPACE(253 * array.array("i").itemsize)
# A full hello: 32 names of 64 characters of 4 bytes, and some.
_MAX_PACKET: Final = 16 << 10
# Linux 6.16, asm-generic/socket.h: the kernel refuses descriptors for a socket.
SO_PASSRIGHTS: Final = 83
_MAX_CLOSING: Final = 256  # descriptors
_Address = Annotated[int, msgspec.Meta(ge=0, le=ADDRESS_SPACE)]


class RendezvousHello(msgspec.Struct, frozen=True, tag="hello"):
    """What either end offers.

    Its descriptors: the guard table's, that of the page in which the receiver announces what it writes, then one per
    region in the order of ``regions``. ``token`` is the control channel's, for one use; the answer repeats it.
    ``cookie`` is what the receiver must find in the mapped guard table's header, ``cookie_address`` where that is in
    the sender's own address space, for cma; not trusted. 0: not told. ``canaries`` are the addresses there at which
    cma overwrites a byte before it writes anything else. ``shut_out``: the sender has tried cma, and the kernel does
    not let it into the receiver.
    """

    version: int
    token: Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
    incarnation: Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
    cookie: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    guards_nbytes: Annotated[int, msgspec.Meta(ge=1, le=ADDRESS_SPACE)]
    regions: Annotated[list[RegionDescriptor], msgspec.Meta(max_length=_MAX_REGIONS)]
    cookie_address: Annotated[int, msgspec.Meta(ge=0)] = 0
    canaries: tuple[_Address, _Address] = (0, 0)
    shut_out: bool = False


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The listener's answer when there will be no rendezvous. Its reason is one line."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)]


def pass_rights(sock: socket.socket, *, allowed: bool) -> None:
    """Let the kernel take descriptors for ``sock`` or refuse them, where it can.

    A listener's accepted sockets begin as the listener is. Who sends a descriptor to one that takes none gets EPERM.
    """
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, allowed)


def check_closers() -> None:
    """Raise OSError while as many descriptors as there may be wait for their close."""
    if closing() >= _MAX_CLOSING:
        raise OSError("descriptors of peers are not closed yet")


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(RendezvousHello | Refusal)


def decode(data: bytes) -> RendezvousHello | Refusal:
    """Return the value in a packet, checked; ``ProtocolError`` when there is none."""
    try:
        value: RendezvousHello | Refusal = _decoder.decode(data)
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


@dataclass(slots=True)
class Packet(AbstractContextManager["Packet"]):
    """One received packet; owns the descriptors that nothing has taken yet. Used by one thread."""

    data: bytes
    fds: list[int]

    @classmethod
    def receive(cls, sock: socket.socket) -> Self:
        """Receive one packet. ``ProtocolError``: the peer closed its end, or sent more than a packet may hold."""
        check_closers()
        data, ancillary, flags, _ = sock.recvmsg(_MAX_PACKET, _ROOM, socket.MSG_CMSG_CLOEXEC)
        packet = cls(data, array.array("i", b"".join(sent for _, _, sent in ancillary)).tolist())
        if reason := packet._defect(flags):
            packet.close()
            raise ProtocolError(reason)
        return packet

    def _defect(self, flags: int) -> str | None:
        if flags & socket.MSG_CTRUNC or len(self.fds) > _MAX_DESCRIPTORS:
            return f"same-host packet has more than {_MAX_DESCRIPTORS} descriptors, or this process has none left"
        if flags & socket.MSG_TRUNC:
            return f"same-host packet is larger than {_MAX_PACKET} bytes"
        return None if self.data else "the peer closed the same-host socket without a word"

    def take(self) -> int:
        """Return the next descriptor, which is the caller's; ``LinkRefused`` if it is no memfd: its close may block."""
        try:
            fcntl.fcntl(self.fds[0], fcntl.F_GET_SEALS)  # only those have seals; anything else that is asked may block
        except OSError as error:
            raise LinkRefused("it is no memfd") from error
        return self.fds.pop(0)

    def close(self) -> None:
        """Close what nothing has taken."""
        fds, self.fds = self.fds, []
        if fds:
            close_elsewhere(fds)

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def send_packet(sock: socket.socket, value: RendezvousHello | Refusal, fds: list[int]) -> None:
    """Send one value with descriptors, which stay the caller's."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([_encoder.encode(value)], rights, socket.MSG_NOSIGNAL)


class MemoryOffer(AbstractContextManager["MemoryOffer"]):
    """What one peer is offered: a hello and its descriptors, all of memfds. Used by one thread.

    Owns the page for the peer's writers until it is taken; descriptors for writing stay their segments'.
    ``LinkRefused`` when there is no memory or descriptor left for that page, or this process is being finalised.
    """

    def __init__(self, exports: Exports, token: bytes) -> None:
        shared = {region: segment for region, segment in exports.regions.items() if isinstance(segment, SharedSegment)}
        regions = [described for described in exports.descriptors() if described.region in shared]
        guards = exports.guards
        try:
            page = exports.writers.open()
        except LLMException as error:
            raise LinkRefused(f"no page for the writers of this peer: {error}") from error
        self._page: IntentPage | None = page
        memory = page.segment
        assert memory is not None
        segments = [shared[described.region] for described in regions]
        # The receiver may ignore RegionDescriptor.writable, but not the mode of a descriptor.
        sealed = exports.writable or all(segment.sealed for segment in segments)
        self._opened = [] if sealed else self._open_for_reading(segments)
        pools = self._opened or [segment.fd for segment in segments]
        first, second = guards.canaries
        self.hello = RendezvousHello(
            VERSION,
            token,
            exports.incarnation,
            guards.cookie,
            guards.segment.nbytes,
            regions,
            guards.segment.address if exports.private else 0,
            (first.address, second.address) if exports.private else (0, 0),
        )
        self.fds = [guards.segment.fd, memory.fd, *pools]

    def _open_for_reading(self, segments: list[SharedSegment]) -> list[int]:
        opened: list[int] = []
        try:
            opened.extend(segment.open_for_reading() for segment in segments)
        except OSError as error:
            for fd in opened:
                os.close(fd)
            self.take_page().retire()
            raise LinkRefused(f"no descriptor by which this peer can only read: {error}") from error
        return opened

    def send(self, sock: socket.socket, *, shut_out: bool = False) -> None:
        send_packet(sock, msgspec.structs.replace(self.hello, shut_out=shut_out), self.fds)

    def take_page(self) -> IntentPage:
        page, self._page = self._page, None
        assert page is not None, "taken once"
        return page

    def __exit__(self, *exc_info: object) -> None:
        while self._opened:
            os.close(self._opened.pop())
        if self._page is not None:
            self._page.retire()
