"""Messages of the transport nixl, which travel over the control channel. Threads: any; they are values.

When the link begins, one side tells the other its receiver (Meet). Then the initiator asks, the owner answers:

    pull over TCP          Ask(receiver of the initiator)  ->  Moved
    push; pull over RDMA   Ask  ->  Ready(receiver of the owner), then Done  ->  Moved
    any                    NixlRefused, with a status
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final, TypeAlias

import msgspec

from llm_datadist._checks import clean
from llm_datadist.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Known = Annotated[str, msgspec.Meta(max_length=64)]


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Address of a receiver; ``metadata`` is empty if the peer knows this ``version`` of it.

    ``package``: version of NIXL, for errors: metadata of another version may be unreadable.
    """

    name: Annotated[str, msgspec.Meta(max_length=32)]
    version: _Number
    metadata: bytes
    package: Annotated[str, msgspec.Meta(max_length=64)]

    @property
    def known_as(self) -> str:
        return f"{self.name}/{self.version}"


class Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """Initiator -> owner: move this; ``meta`` is a request as over a data lane.

    If ``direct``, the initiator moves the bytes after Ready. Else ``receiver`` is its own, with tensors at ``bases``
    and runs at ``offsets`` (uint64, little-endian). The ordinal of the GPU in which they lie, if any, follows the
    bases. ``loaded``: the owner's receiver that its sender knows.
    """

    move: _Number
    write: bool
    direct: bool
    meta: bytes
    receiver: Address | None
    bases: bytes
    offsets: bytes
    loaded: _Known
    budget_ms: _Number


class Done(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """Initiator -> owner: the bytes have moved, or (not ``good``) the move is given up."""

    move: _Number
    good: bool


class Meet(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """One side -> the other, when the link begins: the address of a receiver. Has no answer."""

    receiver: Address


class Ready(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """Owner -> initiator: the memory; ``bases`` and ``offsets`` as in :class:`Ask`."""

    move: _Number
    receiver: Address
    bases: bytes
    offsets: bytes


class Moved(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """Owner -> initiator: all bytes have moved; ``loaded``: the receiver that the owner's sender knows now."""

    loaded: _Known


class NixlRefused(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """Owner -> initiator: no, with a status of these, lanes or the interface. ``touched``: bytes may have moved."""

    UNKNOWN: ClassVar[int] = 100  # the owner's sender needs the receiver's metadata
    OVERDUE: ClassVar[int] = 101  # the time was over at the owner first
    AGAIN: ClassVar[int] = 102  # another transfer ended the owner's receiver; the initiator asks again
    code: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    text: Annotated[str, msgspec.Meta(max_length=4096)]
    touched: bool


Request: TypeAlias = Ask | Done | Meet
Answer: TypeAlias = Ready | Moved | NixlRefused
encode: Final = msgspec.msgpack.Encoder().encode
_decode_request: Callable[[bytes], Request] = msgspec.msgpack.Decoder(Request).decode
_decode_answer: Callable[[bytes], Answer] = msgspec.msgpack.Decoder(Answer).decode


def read_request(data: bytes) -> Request:
    """Return a request of the peer. Raises ProtocolError."""
    try:
        return _decode_request(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"nixl: a request that is none: {clean(str(error))}") from error


def read_answer(data: bytes) -> Answer:
    """Return an answer of the peer. Raises ProtocolError."""
    try:
        return _decode_answer(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"nixl: the peer sent no answer: {clean(str(error))}") from error
