"""Messages of the control channel: one frozen struct each, schema-checked, never pickle; no I/O.

docs/protocol.md has the wire format. Errors travel as :class:`Failed` and :class:`Refused`.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec

from llm_datadist._checks import clean
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
#: TLS follows (:mod:`.tls_session`).
TLS_PREAMBLE: Final = preamble(2)
PREAMBLE_BYTES: Final = len(CONTROL_PREAMBLE)
#: Runs of one :class:`Verify`: 256 KiB, because messages wait in memory.
MAX_VERIFY_RUNS: Final = 1 << 14
#: Addresses of one :class:`Locate`: two for each layer of any model.
MAX_LOCATE: Final = 1 << 12
#: Of a communicator (interface §3.5): characters of its name, members.
MAX_NAME: Final = 127
MAX_MEMBERS: Final = 4
#: Readers of one grant: the ranks of one engine.
MAX_READERS: Final = 1024
#: Bytes of a grant in :class:`Claimed`.
MAX_GRANT: Final = FRAME_LIMIT - 64
#: Bytes of a question or of its answer.
MAX_BODY: Final = FRAME_LIMIT - 512
#: Bytes in a message of elements that this version does not know: skipping them costs time.
MAX_UNKNOWN: Final = 1 << 16
#: Bytes of a cache's geometry, and guards of an answer.
MAX_GEOMETRY: Final = 1024
MAX_GUARDS: Final = 4
#: Characters sent of an error text; :data:`Text` has room for more.
MAX_REASON: Final = 4000
#: Of a greeting.
MAX_FEATURES: Final = 64
#: Bytes of one offer in a greeting, and number of offers.
MAX_OFFER: Final = 1 << 13
MAX_OFFERS: Final = 32

#: msgpack has no integer above 2**64 - 1.
U64 = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(max_length=64)]
Identity16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
#: Part of a TLS handshake, some KiB.
Handshake = Annotated[bytes, msgspec.Meta(max_length=1 << 14)]
Offer = Annotated[bytes, msgspec.Meta(max_length=MAX_OFFER)]
Body = Annotated[bytes, msgspec.Meta(max_length=MAX_BODY)]
#: Empty if missing.
Maybe32 = Annotated[bytes, msgspec.Meta(max_length=32)]
Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=str.lower):
    """Base of every message. The default tag is the class name in lower case."""


class Numbered(Message, frozen=True):
    """A request, or its answer with the same number."""

    id: Id


class CommunicatorId(msgspec.Struct, frozen=True, array_like=True):
    """Communicator of a :class:`Hello`: name, ranks and table given to ``link()``.

    ``members`` are (cluster id, rank), ``table`` is a digest of the rank table. ``token`` distinguishes equal calls.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    members: Annotated[list[tuple[U64, U32]], msgspec.Meta(max_length=MAX_MEMBERS)]
    table: Identity16
    token: Identity16


class Greeting(Message, frozen=True):
    """First message of each side; the tag tells the role.

    ``versions`` are the oldest and the newest that the side speaks. Unknown ``features`` are ignored, and so are
    elements that later versions add at the end of :class:`Hello` and :class:`Welcome`. ``transport`` is that of
    ``llm.Transport``, if any. ``nonce`` binds proofs to this handshake. ``share`` is half of the link's secret, empty
    without credentials. ``offers`` are bytes of transports by name, not decoded here.
    """

    versions: tuple[U32, U32]
    features: Annotated[list[Name], msgspec.Meta(max_length=MAX_FEATURES)]
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
    """Dialer -> listener, first frame.

    ``wanted`` is the expected cluster id, or None to learn it (interface R28). ``reconnects``: no call asks for the
    link; the dialer has lost it. ``token`` opens, once, what the listener's transports keep for this handshake, and
    finds a dialer of the same process. If given, only the same ``communicator`` may answer. ``release`` and ``role``
    are for people; an older peer says none.
    """

    wanted: U64 | None
    reconnects: bool
    token: Identity16
    communicator: CommunicatorId | None = None
    release: Name = ""
    role: Name = ""


class Welcome(Greeting, frozen=True):
    """Listener -> dialer: answer to :class:`Hello`.

    ``proof`` shows that the dialer has met this process before (:mod:`.identity`); empty without a common secret.
    ``release`` and ``role`` are as in :class:`Hello`.
    """

    proof: Maybe32
    release: Name = ""
    role: Name = ""


class Refused(Message, frozen=True):
    """Listener -> dialer: no link, with status and reason in one line."""

    code: int
    text: Text
    authentication: bool = False  # the dialer's is missing or rejected


class TransportChoice(Message, frozen=True):
    """Dialer -> listener: the chosen transport, and the reason.

    ``private`` is the transport for non-pool memory, None if nothing reaches it. ``sequence`` orders the links of this
    incarnation: an older dial never replaces a newer link. ``present``: the communicator uses an existing link.
    ``agreed`` is the digest of both greetings, as this side sent and heard them. ``proof`` is the dialer's, after a
    proof of the listener; otherwise ``share`` is half of a new secret.
    """

    transport: Text
    reason: Text
    sequence: Id
    agreed: Identity16
    present: bool = False
    proof: Maybe32 = b""
    share: Maybe32 = b""
    private: Name | None = None


class Linked(Message, frozen=True):
    """Listener -> dialer, last frame of the handshake: the link is usable here."""

    sequence: Id  # the listener's number of the link
    agreed: Identity16  # as in TransportChoice
    share: Maybe32 = b""  # half of a new secret, if the dialer sent one


class Beat(Message, frozen=True):
    """Either side: heartbeat, every second or more often.

    ``read`` and ``written``: bytes that the sender has moved over this link so far, except by tcp.
    """

    count: Id
    read: Id = 0
    written: Id = 0


class Ping(Numbered, frozen=True):
    """Either side: answered by :class:`Pong` at once."""


class Pong(Numbered, frozen=True):
    """Answer to :class:`Ping`."""


class Authenticate(Message, frozen=True):
    """Either side, if encrypted: part of a new TLS handshake (:mod:`.renewal`)."""

    data: Handshake


class Authenticated(Message, frozen=True):
    """Answer to :class:`Authenticate`."""

    data: Handshake


class UnlinkRequest(Numbered, frozen=True):
    """As :class:`Beat`; answered by :class:`UnlinkAck` once the receiver's own operations are done."""

    read: Id = 0
    written: Id = 0


class UnlinkAck(Numbered, frozen=True):
    """Answer to :class:`UnlinkRequest`: no operation runs here. The asking side closes or cancels."""


class UnlinkCancel(Message, frozen=True):
    """Either side: cancels the :class:`UnlinkRequest`; the link is kept (interface §3.4)."""


class Resolve(Numbered, frozen=True):
    """Initiator -> target: request for a cache's place. Answered by :class:`Resolved` or :class:`Failed`.

    ``key`` (namespace, id, model id), or ``cache_id`` and ``row``, name the cache. ``budget_ms`` is left of the
    caller's deadline, and bounds the pin. ``consumes``: a push, after which :class:`Consumed` follows.
    """

    push: bool
    key: tuple[int, U64, U64] | None
    cache_id: int
    row: Id
    budget_ms: Id
    consumes: bool = False


class Guarded(msgspec.Struct, frozen=True, array_like=True):
    """Guard slot of the target, and the generation for which the answer is valid."""

    slot: Id
    generation: U64


class Resolved(Numbered, frozen=True):
    """Target -> initiator: the cache's geometry, tensors, and guards.

    ``geometry`` is not decoded here. ``regions`` are uint32 and ``offsets`` uint64, little-endian, one for each tensor;
    both are empty if the target moves the bytes: then indices name tensors. If ``pin`` is 0, nothing is to be released,
    and the answer may be cached while the guards hold.
    """

    cache_id: int
    geometry: msgspec.Raw
    row: Id
    regions: bytes
    offsets: bytes
    guards: Annotated[list[Guarded], msgspec.Meta(max_length=MAX_GUARDS)]
    pin: Id

    def __post_init__(self) -> None:
        """Raise ValueError, a ProtocolError of :func:`decode`, if the geometry is no peer's."""
        if memoryview(self.geometry).nbytes > MAX_GEOMETRY:
            raise ValueError(f"geometry: at most {MAX_GEOMETRY} bytes are allowed")


class GrantedOnly(Resolved, frozen=True):
    """As :class:`Resolved`, of a cache that peers read under grants only."""


class Failed(Numbered, frozen=True):
    """Target -> initiator: the request failed; the link stays."""

    code: int
    text: Text


class Release(Message, frozen=True):
    """Initiator -> target: end of a pin; ``count`` tensors from ``first`` arrived."""

    pin: Id
    first: Id
    count: Id


class Consumed(Message, frozen=True):
    """Initiator -> target: these tensors of this row were pushed (interface R5)."""

    cache_id: int
    row: Id
    first: Id
    count: Id


class Locate(Numbered, frozen=True):
    """Initiator -> target: request for caches by address. Answered by :class:`Located` or :class:`Failed`.

    ``addresses`` are uint64, little-endian, of the target's process; ``nbytes`` bytes from each on must lie inside one
    tensor. Pushes over this link may write located caches, without remote cache access too.
    """

    addresses: Annotated[bytes, msgspec.Meta(min_length=8, max_length=MAX_LOCATE * 8)]
    nbytes: Id


class Located(Numbered, frozen=True):
    """Target -> initiator: cache (uint64), tensor (uint32), offset (uint64) of each address, little-endian."""

    cache_ids: bytes
    tensors: bytes
    offsets: bytes
    allocated: bool  # at least one cache is memory of the target's pools, not of its user


class Verify(Numbered, frozen=True):
    """Initiator -> target: request for digests of memory. Answered by :class:`Verified` or :class:`Failed`.

    ``pin`` names the cache, or ``cache_id`` alone for a cached answer; ``guards`` are those of the answer.
    ``push``: the bytes were written there. ``runs`` are pairs of uint64, little-endian: offset in a tensor of
    ``extent`` bytes, and length, of tensors ``first`` to ``first + count``. ``each_run`` asks for a digest of each
    run of one tensor, otherwise of each tensor. ``nonce`` keys the digests.
    """

    cache_id: int
    pin: Id
    guards: Annotated[list[Guarded], msgspec.Meta(max_length=MAX_GUARDS)]
    push: bool
    extent: Id
    first: Id
    count: Id
    runs: Annotated[bytes, msgspec.Meta(max_length=MAX_VERIFY_RUNS * 16)]
    each_run: bool
    nonce: Identity16
    budget_ms: Id


class Verified(Numbered, frozen=True):
    """Target -> initiator: 16 bytes for each tensor or run, in order."""

    digests: bytes


class SocketsDropped(Message, frozen=True, tag="laneslost"):
    """Either side: sockets beside this channel are silent, or carry a given-up write: drop them."""


class TransportAsk(Numbered, frozen=True, tag="nixlask"):
    """Either side: request of the transport, not decoded here. Answered by TransportSaid, or not."""

    data: bytes


class TransportSaid(Numbered, frozen=True, tag="nixlsaid"):
    """Answer to :class:`TransportAsk`."""

    data: bytes


class Claim(Numbered, frozen=True):
    """Reader -> owner: request for a grant. Answered by :class:`Claimed`, :class:`ClaimOver` or :class:`Failed`.

    The owner answers once the grant exists, within ``budget_ms``; with 0 at once, with LLM_TIMEOUT if there is none.
    ``readers``, with this one, share the grant: it ends when all have released it. 0 readers only ask whether it has
    ended; :class:`Failed` means no.
    """

    token: Identity16
    readers: Annotated[int, msgspec.Meta(ge=0, le=MAX_READERS)]
    budget_ms: Id


class Claimed(Numbered, frozen=True):
    """Owner -> reader: the grant, until this link ends or :class:`ClaimEnded` comes."""

    grant: Annotated[bytes, msgspec.Meta(max_length=MAX_GRANT)]  # of Grant.to_bytes


class ClaimOver(Numbered, frozen=True):
    """Owner -> reader: the grant has ended, ``ms`` milliseconds ago."""

    why: Text
    ms: Id


class ClaimEnded(Message, frozen=True):
    """Reader -> owner: the claim ended. ``released``: nothing more is read; else another may claim the grant."""

    token: Identity16
    released: bool


class Question(Numbered, frozen=True):
    """Either side: a question of the users' own, by name. Answered by :class:`Answer` or :class:`Failed`.

    ``budget_ms`` is left of the caller's deadline.
    """

    name: Name
    body: Body
    budget_ms: Id


class Answer(Numbered, frozen=True):
    """Answer to :class:`Question`."""

    body: Body


_HANDSHAKE = Hello | Welcome | Refused | TransportChoice | Linked
_LINK = Beat | Ping | Pong | Authenticate | Authenticated | UnlinkRequest | UnlinkAck | UnlinkCancel
_TRANSFER = Resolve | Resolved | GrantedOnly | Failed | Release | Consumed | Locate | Located | Verify | Verified
_TRANSPORT = SocketsDropped | TransportAsk | TransportSaid
_GRANTS = Claim | Claimed | ClaimOver | ClaimEnded
_USERS = Question | Answer
AnyMessage = _HANDSHAKE | _LINK | _TRANSFER | _TRANSPORT | _GRANTS | _USERS
_ANSWERS = Resolved, GrantedOnly, Failed, Located, Verified, UnlinkAck, TransportSaid, Claimed, ClaimOver, Answer
#: Names of the messages that answer a request by its number.
ANSWERS: Final = tuple(str(each.__struct_config__.tag) for each in _ANSWERS)
#: Returns the payload of a frame.
encode: Final = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(AnyMessage)


#: Texts of a peer, which :func:`decode` cleans.
_TEXTS: Final[dict[type[Message], tuple[str, ...]]] = {
    Hello: ("host", "release", "role"),
    Welcome: ("host", "release", "role"),
    Refused: ("text",),
    TransportChoice: ("transport", "reason"),
    Failed: ("text",),
    ClaimOver: ("why",),
}


def frame(message: Message) -> bytes:
    """Return a whole frame. Raises ProtocolError above :data:`FRAME_LIMIT`."""
    payload = encode(message)
    if len(payload) > FRAME_LIMIT:
        raise ProtocolError(f"{type(message).__name__} of {len(payload)} bytes: a frame has at most {FRAME_LIMIT}")
    return FRAME_HEADER.pack(len(payload)) + payload


def decode(payload: bytes | bytearray | memoryview) -> Message:
    """Return the message. Raises ProtocolError if it is malformed."""
    try:
        message: Message = _decoder.decode(payload)
        if texts := _TEXTS.get(type(message)):
            message = msgspec.structs.replace(message, **{name: clean(getattr(message, name)) for name in texts})
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"peer sent what is no message of this protocol: {clean(str(error))}") from error
    if len(payload) > MAX_UNKNOWN:
        offers = message.offers.values() if isinstance(message, Greeting) else ()
        known = (*msgspec.structs.astuple(message), *offers)
        if len(payload) - sum(len(each) for each in known if isinstance(each, bytes | str)) > MAX_UNKNOWN:
            raise ProtocolError(f"peer sent a {type(message).__name__} with more than {MAX_UNKNOWN} unknown bytes")
    return message


class RemoteFailure(LLMException):
    """Status and text of a failed request; the link stays."""

    def typed(self, what: str, other: type[LLMException] = TransferFailed) -> LLMException:
        """Return the exception for a caller of this side; ``other`` for a status without one of its own."""
        kind = _KINDS.get(self.status_code, other)
        return kind(f"{what}: {self}", status_code=self.status_code, peer=self.peer, phase=self.phase)


_KINDS: Final[dict[LLMStatusCode, type[LLMException]]] = {
    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST: CacheNotFound,
    LLMStatusCode.LLM_PARAM_INVALID: CacheMismatch,
    LLMStatusCode.LLM_LINK_BUSY: LinkError,
}


def failed(number: int, error: LLMException) -> Failed:
    return Failed(number, int(error.status_code), clean(str(error), MAX_REASON))  # no surrogate can be sent


def remote_failure(message: Failed, peer: int, phase: str) -> RemoteFailure:
    status = code_2_status(message.code) or LLMStatusCode.LLM_FAILED  # not success (interface R29)
    return RemoteFailure(message.text, status_code=status, peer=peer, phase=phase)


def remote_refusal(message: Refused, what: str) -> LinkRefused | AuthFailed:
    """Return the error that a listener reported; ``what`` was asked for."""
    text = f"{what}: refused: {message.text}"
    if message.authentication:
        return AuthFailed(text)
    return LinkRefused(text, status_code=code_2_status(message.code) or LLMStatusCode.LLM_LINK_FAILED)
