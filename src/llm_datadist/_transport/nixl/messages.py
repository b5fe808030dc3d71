"""Messages of the transport nixl, which travel over the control channel. Threads: any; they are values.

When the link begins, one side tells the other its receiver (Meet). Then the initiator asks, the owner answers:

    push; pull over RDMA with RCA   Ask  ->  Ready(receiver of the owner), then Done  ->  Moved
    any other pull                  Ask(receiver of the initiator)  ->  Moved
    any                             NixlRefused, with a status
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, TypeAlias, TypeVar

import msgspec
from msgspec.msgpack import Decoder

from llm_datadist._checks import clean
from llm_datadist.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

M = TypeVar("M")
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


def _read(decode: Callable[[bytes], M], otherwise: str, data: bytes) -> M:
    try:
        return decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"nixl: {otherwise}: {clean(str(error))}") from error


# Both raise ProtocolError for anything else.
read_request: Final[Callable[[bytes], Request]] = partial(_read, Decoder(Request).decode, "a request that is none")
read_answer: Final[Callable[[bytes], Answer]] = partial(_read, Decoder(Answer).decode, "the peer sent no answer")
