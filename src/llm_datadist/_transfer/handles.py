"""Handles: names by which the owner (:class:`~.target.Target`) finds the memory of a move request."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from llm_datadist._cache.geometry import Geometry  # noqa: TC001 (msgspec evaluates annotations)
from llm_datadist._cache.registry import FIRST_NAMED_PIN
from llm_datadist._checks import clean
from llm_datadist._links.messages import U64, Guarded, Id  # noqa: TC001 (as above)
from llm_datadist.errors import ProtocolError

_MAX_GUARDS: Final = 8


class Handle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    """Cache, pin (0: none) and guards of a ``Resolved``, with the guard of any grant."""

    cache_id: Id
    pin: Id
    guards: Annotated[list[Guarded], msgspec.Meta(min_length=1, max_length=_MAX_GUARDS)]


class KeyHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """Predicted resolution: the owner finds a cache of this geometry by ``key``.

    It pins the cache as number ``pin``. Offsets of the request begin at the key's row. ``reported`` counts the reports
    sent before; one that is still on its way may consume the key.
    """

    key: tuple[int, U64, U64]
    geometry: Geometry
    pin: Annotated[int, msgspec.Meta(ge=FIRST_NAMED_PIN, le=2**63 - 1)]
    budget_ms: Id
    reported: Id


encode_handle: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(Handle | KeyHandle)


def decode_handle(data: bytes) -> Handle | KeyHandle:
    """Decode a handle; ProtocolError."""
    try:
        handle: Handle | KeyHandle = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"move request: invalid handle: {clean(str(error))}") from error
    return handle
