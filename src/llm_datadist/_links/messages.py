"""The messages of the control connection: one frozen struct each, schema-checked, never pickle; no I/O.

The wire format is in docs/protocol.md, "Connections". Errors travel as :class:`Failed` and :class:`Refused`.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec

from llm_datadist._transport.address import preamble
from llm_datadist.errors import (
    AuthFailed,
    CacheMismatch,
    CacheNotFound,
    LinkError,
    LinkRefused,
    LLMException,
    LLMStatusCode,
    ProtocolError,
    TransferFailed,
    code_2_status,
)

FRAME_LIMIT: Final = 1 << 20
FRAME_HEADER: Final = struct.Struct(">I")
CONTROL_PREAMBLE: Final = preamble(0)
#: All that follows is TLS (:mod:`.tls_session`).
TLS_PREAMBLE: Final = preamble(2)
PREAMBLE_BYTES: Final = len(CONTROL_PREAMBLE)

#: Runs of one :class:`Verify`: 256 KiB, so that waiting messages cost little.
MAX_VERIFY_RUNS: Final = 1 << 14

#: Addresses of one :class:`Locate`: two per layer, so that one message is enough for any model.
MAX_LOCATE: Final = 1 << 12

#: What a communicator may have (interface §3.5): characters of its name, members.
MAX_NAME: Final = 127
MAX_MEMBERS: Final = 4

#: Readers that share one grant: the ranks of one engine.
MAX_READERS: Final = 1024
#: Bytes of a grant that can be claimed.
MAX_GRANT: Final = FRAME_LIMIT - 64

#: Characters of a reason or an error text that are sent: fewer than :data:`Text` has room for.
MAX_REASON: Final = 4000

#: msgpack has no integer above 2**64 - 1, so a lower bound is enough.
U64 = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(max_length=64)]
Identity16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
#: A part of a TLS handshake: of some KiB at most, see :mod:`.tls_session`.
Handshake = Annotated[bytes, msgspec.Meta(max_length=1 << 14)]
#: What one transport offers in a greeting, and how many may.
MAX_OFFER: Final = 1 << 13
MAX_OFFERS: Final = 32
Offer = Annotated[bytes, msgspec.Meta(max_length=MAX_OFFER)]
#: What may be missing is empty.
Maybe32 = Annotated[bytes, msgspec.Meta(max_length=32)]
Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=str.lower):
    """Base of every message. The tag is the class name in lower case, unless the class says another."""


class CommunicatorId(msgspec.Struct, frozen=True, array_like=True):
    """Which communicator a :class:`Hello` is for: name, ranks and table given to ``link()``.

    ``members`` are (cluster id, rank), ``table`` is a digest of the rank table. ``token`` tells one ``link()`` of the
    initiator from the next one with the same arguments.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    members: Annotated[list[tuple[U64, U32]], msgspec.Meta(max_length=MAX_MEMBERS)]
    table: Identity16
    token: Identity16


class Greeting(Message, frozen=True):
    """What each end says about itself first, to any stranger: nothing of its memory. The tag tells its role.

    ``transport`` is the one that its ``llm.Transport`` asks for, if any. ``nonce`` makes the proofs of this handshake
    good for no other. ``share`` is this end's half of the link's secret; empty where the connection is not sealed.
    ``offers`` has what its transports offer, under their names, undecoded here.
    """

    version: int
    cluster_id: U64
    incarnation: Identity16
    remote_accessible: bool
    pid: Id
    host: Text
    transport: Name | None
    nonce: Identity16
    share: Maybe32
    offers: Annotated[dict[Name, Offer], msgspec.Meta(max_length=MAX_OFFERS)]


class Hello(Greeting, frozen=True):
    """Initiator -> target, first frame: who I am and what I want.

    ``wanted`` is the cluster id the caller expects, or None to learn it (interface R28). ``reconnects``: no user asked
    for this link now, the initiator has lost it and wants it back. ``token`` opens, once, what a transport of the
    target keeps for this handshake, and finds the initiator in the table of its own process. With ``communicator`` it
    is ``link()`` that asks, and only the same communicator of the target will do.
    """

    wanted: U64 | None
    reconnects: bool
    token: Identity16
    communicator: CommunicatorId | None = None


class Welcome(Greeting, frozen=True):
    """Target -> initiator: who answers.

    ``proof`` shows that the target is the process that the initiator has met before, empty if they have no secret
    (:mod:`.identity`).
    """

    proof: Maybe32


class Refused(Message, frozen=True):
    """Target -> initiator: no link, with the status code and the reason in one line.

    ``authentication``: it is the initiator's authentication that is missing or not believed.
    """

    code: int
    text: Text
    authentication: bool = False


class TransportChoice(Message, frozen=True):
    """Initiator -> target: which transport the initiator chose, and why.

    ``private`` is the transport for private memory, None where nothing reaches it.
    ``sequence`` orders the links of this incarnation with each other: an older dial never replaces a newer link.
    ``present``: the initiator has a link to this incarnation already, which its communicator is to use. ``proof``: the
    initiator's, after a proof of the target; else ``share``: its half of a new secret.
    """

    transport: Text
    reason: Text
    sequence: Id
    present: bool = False
    proof: Maybe32 = b""
    share: Maybe32 = b""
    private: Name | None = None


class Linked(Message, frozen=True):
    """Target -> initiator, last frame of the handshake: the link is ready here too.

    ``sequence`` is the target's own number for the link, as in :class:`TransportChoice`. ``share`` is its half of a new
    secret, if the initiator has sent one.
    """

    sequence: Id
    share: Maybe32 = b""


class Beat(Message, frozen=True):
    """Either way, every second: I am alive."""

    count: Id


class Ping(Message, frozen=True):
    """Either way: are you alive? Answered by :class:`Pong` at once."""

    id: Id


class Pong(Message, frozen=True):
    """Answer to :class:`Ping`."""

    id: Id


class Authenticate(Message, frozen=True):
    """Either way, on a sealed link: a part of the asking end's half of a new handshake (:mod:`.renewal`)."""

    data: Handshake


class Authenticated(Message, frozen=True):
    """Answer to :class:`Authenticate`: a part of the other half."""

    data: Handshake


class UnlinkRequest(Message, frozen=True):
    """Either way: unlink. Answered by :class:`UnlinkAck` as soon as the receiver's own operations are done."""

    id: Id


class UnlinkAck(Message, frozen=True):
    """Answer to :class:`UnlinkRequest`: no operation runs here now. The asking end closes, or sends UnlinkCancel."""

    id: Id


class UnlinkCancel(Message, frozen=True):
    """Either way: take the :class:`UnlinkRequest` back; the link is kept (interface §3.4)."""


class Resolve(Message, frozen=True):
    """Initiator -> target: where is this cache? Answered by :class:`Resolved` or :class:`Failed`.

    Exactly one way of naming it: ``key`` (namespace, id, model id), or ``cache_id`` and ``row``. ``budget_ms`` is what
    is left of the caller's deadline: a pin does not outlive it by much. ``consumes``: a push after which the initiator
    sends :class:`Consumed`.
    """

    id: Id
    push: bool
    key: tuple[int, U64, U64] | None
    cache_id: int
    row: Id
    budget_ms: Id
    consumes: bool = False


class Guarded(msgspec.Struct, frozen=True, array_like=True):
    """A guard slot of the target and the generation that makes the answer valid."""

    slot: Id
    generation: U64


class Resolved(Message, frozen=True):
    """Target -> initiator: the cache's geometry, its tensors, and the guards of this answer.

    ``geometry`` is passed through undecoded: this package does not know what a cache is.
    ``regions`` are uint32 and ``offsets`` uint64, little-endian, one per tensor; both are empty where the target moves
    the bytes itself: tensors then go by their indices. ``pin`` 0: nothing to release, and
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


class Failed(Message, frozen=True):
    """Target -> initiator: the request ``id`` ended with this status; the link is fine."""

    id: Id
    code: int
    text: Text


class Release(Message, frozen=True):
    """Initiator -> target: the pin may end; ``count`` tensors from ``first`` arrived."""

    pin: Id
    first: Id
    count: Id


class Consumed(Message, frozen=True):
    """Initiator -> target: these tensors of this row have been pushed (interface R5)."""

    cache_id: int
    row: Id
    first: Id
    count: Id


class Locate(Message, frozen=True):
    """Initiator -> target: in which caches do these addresses of your process lie?

    ``addresses`` are uint64, little-endian; ``nbytes`` bytes from each on must lie inside one tensor. What is located
    may be written over this link by pushes, without remote cache access too. Answered by :class:`Located` or
    :class:`Failed`.
    """

    id: Id
    addresses: Annotated[bytes, msgspec.Meta(min_length=8, max_length=MAX_LOCATE * 8)]
    nbytes: Id


class Located(Message, frozen=True):
    """Target -> initiator: for each address cache (uint64), tensor (uint32) and offset (uint64).

    Little-endian, in their order. ``allocated``: one of these caches is memory of the target's pools, not of its user.
    """

    id: Id
    cache_ids: bytes
    tensors: bytes
    offsets: bytes
    allocated: bool


class Verify(Message, frozen=True):
    """Initiator -> target: digest these bytes of this cache, as your memory holds them now.

    The cache is named by ``pin``, or by ``cache_id`` alone where an answer without a pin was kept. ``guards`` are those
    of the answer; ``push`` says that the bytes were written there. ``runs`` are pairs of uint64, little-endian: offset
    in a tensor of ``extent`` bytes, and length; tensors ``first`` to ``first + count``. ``each_run`` asks for a digest
    of every run of one tensor, otherwise there is one for each tensor. ``nonce`` keys the digests of this request.
    Answered by :class:`Verified` or :class:`Failed`.
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


class Verified(Message, frozen=True):
    """Target -> initiator: 16 bytes for each tensor, or for each run, in their order."""

    id: Id
    digests: bytes


class SocketsDropped(Message, frozen=True, tag="laneslost"):
    """Either way: sockets beside this connection are silent, or carry a write that was given up.

    They are dropped here: drop them.
    """


class TransportAsk(Message, frozen=True, tag="nixlask"):
    """Either way: a request of the link's transport, passed through undecoded. Answered by TransportSaid, or not."""

    id: Id
    data: bytes


class TransportSaid(Message, frozen=True, tag="nixlsaid"):
    """Answer to :class:`TransportAsk`, passed through undecoded."""

    id: Id
    data: bytes


class Claim(Message, frozen=True):
    """Reader -> owner of blocks: give me the grant of this token.

    Answered by :class:`Claimed`, :class:`ClaimOver` or :class:`Failed`. Where there is no such grant yet, the answer
    comes with it, unless ``budget_ms`` are over before; if they are 0, :class:`Failed` comes at once, with LLM_TIMEOUT.
    ``readers``, of which this is one, share the grant: it ends when all of them have released it. 0 readers only ask
    whether it has ended: :class:`Failed` says that it has not.
    """

    id: Id
    token: Identity16
    readers: Annotated[int, msgspec.Meta(ge=0, le=MAX_READERS)]
    budget_ms: Id


class Claimed(Message, frozen=True):
    """Owner -> reader: the grant, which ends with this link unless :class:`ClaimEnded` comes before.

    ``grant`` is passed through undecoded, as :meth:`Grant.to_bytes` made it.
    """

    id: Id
    grant: Annotated[bytes, msgspec.Meta(max_length=MAX_GRANT)]


class ClaimOver(Message, frozen=True):
    """Owner -> reader: the grant has ended, so many milliseconds ago."""

    id: Id
    why: Text
    ms: Id


class ClaimEnded(Message, frozen=True):
    """Reader -> owner: the claim is over. ``released``: nothing more is read; else another may claim the grant."""

    token: Identity16
    released: bool


_HANDSHAKE = Hello | Welcome | Refused | TransportChoice | Linked
_LINK = Beat | Ping | Pong | Authenticate | Authenticated | UnlinkRequest | UnlinkAck | UnlinkCancel
_TRANSFER = Resolve | Resolved | Failed | Release | Consumed | Locate | Located | Verify | Verified
_TRANSPORT = SocketsDropped | TransportAsk | TransportSaid
_GRANTS = Claim | Claimed | ClaimOver | ClaimEnded
AnyMessage = _HANDSHAKE | _LINK | _TRANSFER | _TRANSPORT | _GRANTS
#: Returns the payload of a frame.
encode: Final = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def frame(message: Message) -> bytes:
    """Return a whole frame, header included. Raises ProtocolError when the message is larger than a frame may be."""
    payload = encode(message)
    if len(payload) > FRAME_LIMIT:
        raise ProtocolError(f"{type(message).__name__} of {len(payload)} bytes: a frame has at most {FRAME_LIMIT}")
    return FRAME_HEADER.pack(len(payload)) + payload


def decode(payload: bytes | bytearray | memoryview) -> Message:
    """Return the message in a payload. Raises ProtocolError for what is none of this protocol."""
    try:
        message: Message = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"peer sent what is no message of this protocol: {error}") from error
    return message


class RemoteFailure(LLMException):
    """The target answered a request with a status and a text; the link is fine."""

    def typed(self, what: str) -> LLMException:
        """Return it as the exception that a caller of this end expects."""
        kind = _KINDS.get(self.status_code, TransferFailed)
        return kind(f"{what}: {self}", status_code=self.status_code, peer=self.peer, phase=self.phase)


_KINDS: Final[dict[LLMStatusCode, type[LLMException]]] = {
    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST: CacheNotFound,
    LLMStatusCode.LLM_PARAM_INVALID: CacheMismatch,
    LLMStatusCode.LLM_LINK_BUSY: LinkError,
}


def failed(number: int, error: LLMException) -> Failed:
    return Failed(number, int(error.status_code), str(error)[:MAX_REASON])


def refused(error: LLMException) -> Refused:
    return Refused(int(error.status_code), str(error)[:MAX_REASON])


def remote_failure(message: Failed, peer: int, phase: str) -> RemoteFailure:
    status = _status(message, LLMStatusCode.LLM_FAILED)
    return RemoteFailure(" ".join(message.text.splitlines()), status_code=status, peer=peer, phase=phase)


def remote_refusal(message: Refused, what: str) -> LinkRefused | AuthFailed:
    """Return the error that a target reported instead of a link; ``what`` was asked for."""
    status = _status(message, LLMStatusCode.LLM_LINK_FAILED)
    if message.authentication:
        return AuthFailed(f"{what}: refused: {' '.join(message.text.split())}")
    return LinkRefused(f"{what}: refused: {' '.join(message.text.split())}", status_code=status)


def _status(message: Failed | Refused, failure: LLMStatusCode) -> LLMStatusCode:
    """Return the peer's status; ``failure`` instead of success, which no exception carries (interface R29)."""
    status = code_2_status(message.code)
    return failure if status is LLMStatusCode.LLM_SUCCESS else status
