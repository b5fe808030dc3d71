"""Questions to a store and its answers: bodies of ``LLMDataDist.ask``, each with the version of this format."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from llm_datadist.errors import CacheMismatch, ParamError

#: First byte of each body.
FORMAT: Final = 4
#: Names of the questions.
LOOKUP: Final = "llm_datadist.store lookup"
SAVE: Final = "llm_datadist.store save"
SUSPECT: Final = "llm_datadist.store suspect"
EVENTS: Final = "llm_datadist.store events"
CLEAR: Final = "llm_datadist.store clear"
#: Keys of one question, for a lookup in all its namespaces together, and bytes of one key. The store answers within a
#: millisecond of its control thread.
MAX_LOOKUP_KEYS: Final = 4096
MAX_RANKS: Final = 16
MAX_SAVE_KEYS: Final = 1024
MAX_KEY: Final = 64
#: Characters of a namespace's label.
MAX_LABEL: Final = 128
_MAX_GRANT: Final = 9 * MAX_SAVE_KEYS + 128  # bytes of a grant of so many blocks
_MAX_TENSORS: Final = 4096
_MAX_DIMS: Final = 30

Namespace = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Ranks = Annotated[list[Namespace], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_KEY)]
Token = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
Id = Annotated[int, msgspec.Meta(ge=1)]


class Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all bodies."""

    def encode(self) -> bytes:
        """Return the body as bytes."""
        return bytes([FORMAT]) + _encode(self)


class BlockShape(Body, frozen=True):
    """Block of a namespace: number of tensors, element type (``DataType``), and shape of a block in one tensor."""

    tensors: Annotated[int, msgspec.Meta(ge=1, le=_MAX_TENSORS)]
    data_type: Number
    shape: Annotated[list[Positive], msgspec.Meta(max_length=_MAX_DIMS)]

    def __str__(self) -> str:
        return f"{self.tensors} tensors of blocks {self.shape}, element type {self.data_type}"


class Lookup(Body, frozen=True):
    """Question for the leading run of keys that each namespace has; ``tokens`` name the grants for it, one of each.

    Without keys it only asks whether the store has room for so many ranks, and for the generations.
    """

    namespaces: Ranks
    keys: Annotated[list[Key], msgspec.Meta(max_length=MAX_LOOKUP_KEYS)]
    tokens: Annotated[list[Token], msgspec.Meta(max_length=MAX_RANKS)]


class RawLookup(Body, frozen=True):
    """:class:`Lookup` whose keys are read natively, without an object of each."""

    namespaces: Ranks
    keys: msgspec.Raw
    tokens: Annotated[list[Token], msgspec.Meta(max_length=MAX_RANKS)]


class Found(Body, frozen=True):
    """Run in one namespace: slots (int64) and digests (two uint64 each), little-endian; the asker adds ``owner``."""

    cache_id: Id
    guard: tuple[Id, Id]
    slots: bytes
    digests: bytes
    nonce: bytes
    shape: BlockShape | None
    owner: tuple[int, Token, Token] | None = None  # store, its incarnation, token of the grant


NOTHING: Final = Found(1, (1, 1), b"", b"", b"", None)


class Run(Body, frozen=True):
    """Answer to :class:`Lookup`: equal runs, one of each namespace, or none; and the namespaces' generations."""

    found: Annotated[list[Found], msgspec.Meta(max_length=MAX_RANKS)]
    generations: Annotated[list[Token], msgspec.Meta(max_length=MAX_RANKS)]


class HitCopy(Body, frozen=True):
    """Answers to the questions of one lookup on their way to another process."""

    namespace: Namespace
    parts: list[Found]


class Save(Body, frozen=True):
    """Question to pull blocks under a grant of the asker, one block a key, into the namespace ``ranks[rank]``.

    ``generation`` is the one that the asker knew when it began: in another one nothing is stored. ``label``: for people.
    """

    ranks: Ranks
    rank: Number
    generation: Token
    shape: BlockShape
    keys: Annotated[list[Key], msgspec.Meta(min_length=1, max_length=MAX_SAVE_KEYS)]
    blocks: Annotated[list[Number], msgspec.Meta(min_length=1, max_length=MAX_SAVE_KEYS)]
    grant: Annotated[bytes, msgspec.Meta(max_length=_MAX_GRANT)]
    label: Annotated[str, msgspec.Meta(max_length=MAX_LABEL)] = ""


class Clear(Body, frozen=True):
    """Question to empty namespaces of the asker's tenant, named as logs show them; without names, all of them."""

    namespaces: Annotated[list[str], msgspec.Meta(max_length=MAX_RANKS)]


class Done(Body, frozen=True):
    """Answer to :class:`Save` and :class:`Clear`: keys newly stored, or namespaces emptied; keys without room; the
    generation since."""

    count: Number
    left: Number
    generation: Token


class Suspect(Body, frozen=True):
    """Question to digest slots again, whose bytes a reader found wrong."""

    namespace: Namespace
    slots: Annotated[list[Number], msgspec.Meta(min_length=1, max_length=MAX_SAVE_KEYS)]


class EventsAfter(Body, frozen=True):
    """Question for the events of a namespace after number ``after`` of ``incarnation``, at first an empty one."""

    namespace: Namespace
    incarnation: Annotated[bytes, msgspec.Meta(max_length=16)]
    after: Number


class Event(Body, frozen=True):
    """Change of a namespace's index.

    Attributes:
        number: 1 and up, without gaps, in one incarnation of the namespace.
        kind: ``stored`` or ``removed`` (evicted, found wrong, or cleared).
        keys: Keys stored or removed.
    """

    number: Number
    kind: Literal["stored", "removed"]
    keys: list[bytes]


class Events(Body, frozen=True):
    """Events of a namespace, in their order; also the place to go on from.

    Attributes:
        incarnation: Random id in which the numbers count, 16 bytes. The namespace gets another one when the store
            restarts, or displaces it. Empty: the store does not have the namespace.
        oldest: Number of the oldest event that the store still has.
        last: Number of the last of ``events``; without any, the number that was asked for.
        follows: True if nothing is missing between the place that was asked for and ``events``. If False, a reader
            begins with an empty index, in which keys of events before ``oldest`` stay missing.
        events: The events, at most some thousand keys.
    """

    incarnation: bytes
    oldest: Number
    last: Number
    follows: bool
    events: list[Event]


#: Place before the first event.
NO_EVENTS: Final = Events(b"", 1, 0, True, [])


B = TypeVar("B", bound=Body)

_encode: Final = msgspec.msgpack.Encoder().encode
_KINDS: Final = (Lookup, RawLookup, Run, HitCopy, Save, Clear, Done, Suspect, EventsAfter, Events)
_decoders: Final[dict[type[Any], msgspec.msgpack.Decoder[Any]]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in _KINDS
}


def decode(kind: type[B], body: bytes, who: str) -> B:
    """Return the body. Raises CacheMismatch for another format, ParamError for what is no such body."""
    if not body or body[0] != FORMAT:
        version = body[0] if body else "none"
        raise CacheMismatch(f"{who}: format {version} of the store, this release has format {FORMAT}")
    try:
        found: B = _decoders[kind].decode(memoryview(body)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ParamError(f"{who}: not a body of kind {kind.__name__}: {error}") from error
    return found
