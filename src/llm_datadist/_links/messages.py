"""What goes over the control connection: one frozen struct per message, schema-checked, never pickle.

Wire format: a 12-byte preamble once per connection (magic, protocol version, purpose), then frames of a 4-byte
big-endian length and a msgpack array whose first element is the message's tag. A frame above 1 MiB, an unknown tag or
a field of the wrong type is a ProtocolError and costs the connection.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec

from llm_datadist._memory.exports import RegionDescriptor
from llm_datadist.errors import ProtocolError

__all__ = [
    "CONTROL_PREAMBLE",
    "FRAME_HEADER",
    "FRAME_LIMIT",
    "MAX_LOCATE",
    "MAX_MEMBERS",
    "MAX_NAME",
    "MAX_VERIFY_RUNS",
    "PREAMBLE_BYTES",
    "PROTOCOL_VERSION",
    "Beat",
    "CommunicatorId",
    "Consumed",
    "Failed",
    "Guarded",
    "Hello",
    "Linked",
    "Locate",
    "Located",
    "Message",
    "Ping",
    "Pong",
    "Refused",
    "Release",
    "Resolve",
    "Resolved",
    "TransportChoice",
    "UnlinkAck",
    "UnlinkCancel",
    "UnlinkRequest",
    "Verified",
    "Verify",
    "Welcome",
    "decode",
    "encode",
    "frame",
]

PROTOCOL_VERSION: Final = 1
FRAME_LIMIT: Final = 1 << 20
FRAME_HEADER: Final = struct.Struct(">I")
_MAGIC: Final = b"ODATDIST"
CONTROL_PREAMBLE: Final = _MAGIC + struct.pack(">HH", PROTOCOL_VERSION, 0)
PREAMBLE_BYTES: Final = len(CONTROL_PREAMBLE)

#: Runs of one :class:`Verify`: 256 KiB, so that some that wait cost little.
MAX_VERIFY_RUNS: Final = 1 << 14

#: Addresses of one :class:`Locate`: two per layer, so that one message does for any model.
MAX_LOCATE: Final = 1 << 12

#: What a communicator may have (API §3.5): characters of its name, members.
MAX_NAME: Final = 127
MAX_MEMBERS: Final = 4

#: msgpack has no integer above 2**64 - 1, so a lower bound is enough.
U64 = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(max_length=64)]
Identity16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Regions = Annotated[list[RegionDescriptor], msgspec.Meta(max_length=32)]


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of everything on the control connection."""


class CommunicatorId(Message, frozen=True, array_like=True):
    """Which communicator a :class:`Hello` is for: both ends called ``link()`` with this name, these ranks, this table.

    ``members`` are (cluster id, rank), ``table`` is a digest of the rank table. ``token`` tells one ``link()`` of the
    initiator from the next one with the same arguments.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    members: Annotated[list[tuple[U64, U32]], msgspec.Meta(max_length=MAX_MEMBERS)]
    table: Identity16
    token: Identity16


class Hello(Message, frozen=True, array_like=True, tag="hello"):
    """Initiator -> target, first frame: who I am and what I want.

    ``wanted`` is the cluster id the caller expects, or None to learn it (R28). ``redials`` says that no user asked for
    this link now: the initiator has lost it and wants it back. ``token`` opens the same-host
    rendezvous once; ``cookie`` is what the rendezvous must find in the header of our guard page, and
    what cma must find at ``cookie_address`` of our address space. ``exports`` are what we export, for a
    transport that maps nothing. ``transport`` is the one that this end's ``llm.Transport`` asks for, if any. With
    ``meeting`` it is ``link()`` that asks, and only the same communicator of the target will do.
    """

    version: int
    cluster_id: U64
    incarnation: Identity16
    remote_accessible: bool
    pid: Id
    host: Text
    wanted: U64 | None
    redials: bool
    token: Identity16
    cookie: Identity16
    cookie_address: U64
    exports: Regions
    transport: Name | None
    meeting: CommunicatorId | None = None


class Welcome(Message, frozen=True, array_like=True, tag="welcome"):
    """Target -> initiator: who answers, and where its same-host rendezvous listens. ``transport`` as in :class:`Hello`.

    ``lane_token`` opens the target's listener to the data lanes of this link, until it ends.
    """

    version: int
    cluster_id: U64
    incarnation: Identity16
    remote_accessible: bool
    pid: Id
    host: Text
    rendezvous: Text
    cookie: Identity16
    cookie_address: U64
    exports: Regions
    transport: Name | None
    lane_token: Identity16


class Refused(Message, frozen=True, array_like=True, tag="refused"):
    """Target -> initiator: no link, with the status code and the reason in one line."""

    code: int
    text: Text


class TransportChoice(Message, frozen=True, array_like=True, tag="met"):
    """Initiator -> target: the rendezvous is over; which transport the initiator chose, and why.

    ``sequence`` orders the links of this incarnation with each other: an older dial never replaces a newer link.
    ``present``: the initiator has a link to this incarnation already, which its communicator is to use.
    """

    transport: Text
    reason: Text
    sequence: Id
    present: bool = False


class Linked(Message, frozen=True, array_like=True, tag="linked"):
    """Target -> initiator: the link is ready on this side too. The last frame of the handshake.

    ``sequence`` is the target's own number for the link, as in :class:`Met`.
    """

    sequence: Id


class Beat(Message, frozen=True, array_like=True, tag="beat"):
    """Either way, every second: I am alive."""

    count: Id


class Ping(Message, frozen=True, array_like=True, tag="ping"):
    """Either way: are you alive? Answered by :class:`Pong` at once."""

    id: Id


class Pong(Message, frozen=True, array_like=True, tag="pong"):
    """Answer to :class:`Ping`."""

    id: Id


class UnlinkRequest(Message, frozen=True, array_like=True, tag="goodbye"):
    """Either way: let us unlink. Answered by :class:`UnlinkAck` as soon as the receiver's own operations are done."""

    id: Id


class UnlinkAck(Message, frozen=True, array_like=True, tag="farewell"):
    """Answer to :class:`UnlinkRequest`: no operation runs here now. The asking end closes, or sends UnlinkCancel."""

    id: Id


class UnlinkCancel(Message, frozen=True, array_like=True, tag="stay"):
    """Takes a :class:`UnlinkRequest` back: its answer did not come in time, the link is kept (API §3.4)."""


class Resolve(Message, frozen=True, array_like=True, tag="resolve"):
    """Initiator -> target: where is this cache?

    Exactly one way of naming it: ``key`` (namespace, id, model id), or ``cache_id`` and ``row``. ``budget_ms`` is what
    is left of the caller's deadline: a pin does not outlive it by much.
    """

    id: Id
    push: bool
    key: tuple[int, U64, U64] | None
    cache_id: int
    row: Id
    budget_ms: Id


class Guarded(Message, frozen=True, array_like=True):
    """A guard slot of the target and the generation that makes the answer valid."""

    slot: Id
    generation: U64


class Resolved(Message, frozen=True, array_like=True, tag="resolved"):
    """Target -> initiator: the cache's geometry, where its tensors are, and what proves it is still the same.

    ``geometry`` is passed through undecoded: this layer does not know what a cache is.
    ``regions`` are uint32 and ``offsets`` uint64, little-endian, one per tensor. ``pin`` 0: nothing to release, and
    the answer may be kept for as long as the guards hold.
    """

    id: Id
    cache_id: int
    geometry: msgspec.Raw
    row: Id
    regions: bytes
    offsets: bytes
    guards: list[Guarded]
    pin: Id


class Failed(Message, frozen=True, array_like=True, tag="failed"):
    """Target -> initiator: the request ``id`` ended with this status; the link is fine."""

    id: Id
    code: int
    text: Text


class Release(Message, frozen=True, array_like=True, tag="release"):
    """Initiator -> target: done with the pin; ``count`` tensors from ``first`` on arrived (0: none did)."""

    pin: Id
    first: Id
    count: Id


class Consumed(Message, frozen=True, array_like=True, tag="consumed"):
    """Initiator -> target: these tensors of this row have been pushed (R5)."""

    cache_id: int
    row: Id
    first: Id
    count: Id


class Locate(Message, frozen=True, array_like=True, tag="locate"):
    """Initiator -> target: in which caches do these addresses of your process lie?

    ``addresses`` are uint64, little-endian; ``nbytes`` bytes from each on must lie inside one tensor. What is located
    may be written over this link by pushes, without remote cache access too. Answered by :class:`Located`.
    """

    id: Id
    addresses: Annotated[bytes, msgspec.Meta(min_length=8, max_length=MAX_LOCATE * 8)]
    nbytes: Id


class Located(Message, frozen=True, array_like=True, tag="located"):
    """Target -> initiator: for each address its cache (uint64), tensor (uint32) and offset in that (uint64).

    Little-endian, in their order. ``allocated``: one of these caches is memory of the target's pools, not of its user.
    Or :class:`Failed`.
    """

    id: Id
    cache_ids: bytes
    tensors: bytes
    offsets: bytes
    allocated: bool


class Verify(Message, frozen=True, array_like=True, tag="verify"):
    """Initiator -> target: digest these bytes of this cache, as your memory holds them now.

    The cache is named by ``pin``, or by ``cache_id`` alone where an answer without a pin was kept. ``guards`` are those
    of the answer; ``push`` says that the bytes were written there. ``runs`` are pairs of uint64, little-endian: offset
    in a tensor of ``extent`` bytes, and length; tensors ``first`` to ``first + count``. ``each_run`` asks for a digest
    of every run of one tensor, otherwise there is one for each tensor. ``nonce`` keys the digests of this request.
    """

    id: Id
    cache_id: int
    pin: Id
    guards: Annotated[list[Guarded], msgspec.Meta(max_length=4)]
    push: bool
    extent: Id
    first: Id
    count: Id
    runs: Annotated[bytes, msgspec.Meta(max_length=MAX_VERIFY_RUNS * 16)]
    each_run: bool
    nonce: Identity16
    budget_ms: Id


class Verified(Message, frozen=True, array_like=True, tag="verified"):
    """Target -> initiator: 16 bytes for each tensor, or for each run, in their order. Or :class:`Failed`."""

    id: Id
    digests: bytes


_ANY = (
    Hello
    | Welcome
    | Refused
    | TransportChoice
    | Linked
    | Beat
    | Ping
    | Pong
    | UnlinkRequest
    | UnlinkAck
    | UnlinkCancel
    | Resolve
    | Resolved
    | Failed
    | Release
    | Consumed
    | Locate
    | Located
    | Verify
    | Verified
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_ANY)


def encode(message: Message) -> bytes:
    """Return the payload of a frame."""
    return _encoder.encode(message)


def frame(message: Message) -> bytes:
    """Return a whole frame, header included.

    Raises:
        ProtocolError: The message is larger than a frame may be.
    """
    payload = _encoder.encode(message)
    if len(payload) > FRAME_LIMIT:
        raise ProtocolError(f"{type(message).__name__} of {len(payload)} bytes: a frame has at most {FRAME_LIMIT}")
    return FRAME_HEADER.pack(len(payload)) + payload


def decode(payload: bytes | bytearray | memoryview) -> Message:
    """Return the message in a payload.

    Raises:
        ProtocolError: Not a message of this protocol.
    """
    try:
        message: Message = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"peer sent what is no message of this protocol: {error}") from error
    except (UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"peer sent a broken message: {error}") from error
    return message
