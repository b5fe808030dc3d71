"""Packets of the same-host rendezvous, with descriptors of memory: messages on a ``SOCK_SEQPACKET`` unix socket.

Only form and limits are checked here; :mod:`llm_datadist._transport.samehost.peer_memory` checks the memory.
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

from llm_datadist._checks import clean
from llm_datadist._memory.exports import ADDRESS_SPACE, Exports, RegionDescriptor
from llm_datadist._native import close_elsewhere, closing
from llm_datadist.errors import LinkRefused, LLMException, ProtocolError

if TYPE_CHECKING:
    from llm_datadist._memory.write_intents import IntentPage

VERSION: Final = 6
WITH_DEVICES: Final = 7  # a packet that offers memory of a GPU; only a peer that has announced one gets it
_MAX_REGIONS: Final = 32
_MAX_DESCRIPTORS: Final = _MAX_REGIONS + 2
# SCM_MAX_FD, the most of one packet. Without room for all, the kernel closes some, in the receiving thread.
_ROOM: Final = socket.CMSG_SPACE(253 * array.array("i").itemsize)
_MAX_PACKET: Final = 16 << 10  # a full hello: 32 names of 64 characters of 4 bytes, and some
# Linux 6.16, asm-generic/socket.h: whether a socket takes descriptors.
SO_PASSRIGHTS: Final = 83
_MAX_CLOSING: Final = 256  # descriptors
_Address = Annotated[int, msgspec.Meta(ge=0, le=ADDRESS_SPACE)]


class RendezvousHello(msgspec.Struct, frozen=True, tag="hello"):
    """Offer of one side, with descriptors: the guard table, the page for the receiver's write intents, the ``regions``.

    ``token`` comes over the control channel, for one use; the answer repeats it. The guard table's header must have the
    ``cookie``; ``cookie_address`` is its address in the sender's process, for cma, not trusted, 0 if not told. At the
    ``canaries`` there, cma overwrites a byte before any other. ``shut_out``: the kernel has refused cma to the sender.
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
    """Answer instead of an offer; the reason is one line."""

    reason: Annotated[str, msgspec.Meta(max_length=1000)]


def pass_rights(sock: socket.socket, *, allowed: bool) -> None:
    """Let ``sock`` take descriptors or not, if the kernel can; sending some to one that takes none is EPERM.

    Accepted sockets inherit the listener's setting.
    """
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, allowed)


def check_closers() -> None:
    """Raise OSError while too many descriptors wait for their close."""
    if closing() >= _MAX_CLOSING:
        raise OSError("descriptors of peers are not closed yet")


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(RendezvousHello | Refusal)


class _Versioned(msgspec.Struct):
    """Any packet; every build understands a refusal, which has no version."""

    version: int | None = None


_version_of: Final = msgspec.msgpack.Decoder(_Versioned).decode


def decode(data: bytes) -> RendezvousHello | Refusal:
    """Return the value in a packet. Raises ProtocolError if it is malformed."""
    try:
        if (version := _version_of(data).version) not in (None, VERSION, WITH_DEVICES):
            raise ProtocolError(f"same-host packets of version {version} are not understood here, only {VERSION}")
        value: RendezvousHello | Refusal = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"same-host packet of {len(data)} bytes is malformed: {clean(str(error))}") from error
    if isinstance(value, Refusal):
        return Refusal(clean(value.reason))
    regions = [descriptor.region for descriptor in value.regions]
    if len(set(regions)) != len(regions):
        raise ProtocolError(f"same-host hello names a region twice: {regions}")
    return value


@dataclass(slots=True)
class Packet(AbstractContextManager["Packet"]):
    """One received packet. Owns: descriptors that were not taken. Threads: one."""

    data: bytes
    fds: list[int]

    @classmethod
    def receive(cls, sock: socket.socket) -> Self:
        """Receive one packet. Raises ProtocolError if the peer closed the socket or exceeded a limit."""
        check_closers()
        data, ancillary, flags, _ = sock.recvmsg(_MAX_PACKET, _ROOM, socket.MSG_CMSG_CLOEXEC)
        packet = cls(data, array.array("i", b"".join(sent for _, _, sent in ancillary)).tolist())
        if flags & socket.MSG_CTRUNC or len(packet.fds) > _MAX_DESCRIPTORS:
            reason = f"same-host packet has more than {_MAX_DESCRIPTORS} descriptors, or this process has none left"
        elif flags & socket.MSG_TRUNC:
            reason = f"same-host packet is larger than {_MAX_PACKET} bytes"
        elif not data:
            reason = "the peer closed the rendezvous socket before sending data"
        else:
            return packet
        packet.close()
        raise ProtocolError(reason)

    def take(self) -> int:
        """Return the next descriptor, for the caller to close. Raises LinkRefused unless it is a memfd."""
        try:
            fcntl.fcntl(self.fds[0], fcntl.F_GET_SEALS)  # only memfds have seals; other calls, close too, may block
        except OSError as error:
            raise LinkRefused("it is no memfd") from error
        return self.fds.pop(0)

    def take_anything(self) -> int:
        """Return the next descriptor, of whatever it is; only a thread of its own may use or close it."""
        return self.fds.pop(0)

    def close(self) -> None:
        fds, self.fds = self.fds, []
        if fds:
            close_elsewhere(fds)

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def send_packet(sock: socket.socket, value: RendezvousHello | Refusal, fds: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([_encoder.encode(value)], rights, socket.MSG_NOSIGNAL)


class MemoryOffer(AbstractContextManager["MemoryOffer"]):
    """Offer to one peer: a hello and its descriptors, all of memfds or of memory of a GPU.

    Owns: the page for the peer's write intents until it is taken, and the descriptors of the pools.
    Threads: one.
    Errors: LinkRefused without memory or descriptors left, or during finalize.
    """

    def __init__(self, exports: Exports, token: bytes) -> None:
        regions, guards = exports.descriptors(), exports.guards
        self.device = exports.device
        try:
            page = exports.writers.open()
        except LLMException as error:
            raise LinkRefused(f"no page for the writers of this peer: {error}") from error
        self._page: IntentPage | None = page
        memory = page.segment
        assert memory is not None
        self._opened: list[int] = []
        self.kept = ""  # pools in a GPU that are not offered, and why
        for described in list(regions):
            segment = exports.regions[described.region]
            try:
                self._opened.append(segment.open_for_peer(writable=exports.writable))
            except LLMException as error:  # the GPU has failed, or hands out no descriptors: peers use data lanes
                regions.remove(described)
                self.kept = f"; pool {segment.name} is offered to no peer: {error}: by data lanes"
            except OSError as error:
                self.__exit__()
                raise LinkRefused(f"no descriptor for this peer: {error}") from error
        self.has_devices = any(each.device for each in regions)
        table, version = guards.segment, WITH_DEVICES if self.has_devices else VERSION
        self.hello = RendezvousHello(version, token, exports.incarnation, guards.cookie, table.nbytes, regions)
        if exports.private:
            first, second = guards.canaries
            self.hello = msgspec.structs.replace(
                self.hello, cookie_address=table.address, canaries=(first.address, second.address)
            )
        self.fds = [table.fd, memory.fd, *self._opened]

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
