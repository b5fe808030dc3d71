"""Handles: the names by which the owner of memory finds what a peer asks it to move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from llm_datadist._cache.geometry import Geometry  # noqa: TC001 (msgspec evaluates annotations)
from llm_datadist._cache.registry import FIRST_NAMED_PIN
from llm_datadist._links.messages import U64, Guarded, Id  # noqa: TC001 (as above)
from llm_datadist.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist._cache.registry import Key

_MAX_GUARDS: Final = 8


class Handle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    """What the initiator read from a Resolved: the cache, its pin or 0, the guards of the answer."""

    cache_id: Id
    pin: Id
    guards: Annotated[list[Guarded], msgspec.Meta(min_length=1, max_length=_MAX_GUARDS)]


class KeyHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """What the initiator assumes without a Resolved: a cache of this geometry, which the owner finds by its key.

    The owner pins it under the number ``pin``. Offsets of the request are from where the key's row begins. ``settled``
    are the messages that ended transfers before: one of them may have consumed the key, and be on its way still.
    """

    key: tuple[int, U64, U64]
    geometry: Geometry
    pin: Annotated[int, msgspec.Meta(ge=FIRST_NAMED_PIN, le=2**63 - 1)]
    budget_ms: Id
    settled: Id


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Handle | KeyHandle)


def encode_handle(cache_id: int, pin: int, guards: Sequence[Guarded]) -> bytes:
    """Encode, on the initiator, what the peer's :class:`~.target.MoveTarget` needs to find its cache again."""
    return _encoder.encode(Handle(cache_id, pin, list(guards)))


def encode_key_handle(key: Key, geometry: Geometry, pin: int, budget_ms: int, settled: int) -> bytes:
    """Encode, on the initiator, what the peer's :class:`~.target.MoveTarget` needs to pin a cache like ``geometry``."""
    return _encoder.encode(KeyHandle(key, geometry, pin, budget_ms, settled))


def decode_handle(data: bytes) -> Handle | KeyHandle:
    """Return the handle in a request. Raises ProtocolError."""
    try:
        handle: Handle | KeyHandle = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a request to move bytes names nothing: {error}") from error
    return handle
