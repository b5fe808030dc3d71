"""Hit, the result of a lookup."""

from __future__ import annotations

from typing import Any, Final, Self

import msgspec
import numpy as np

from llm_datadist._checks import check_type
from llm_datadist.errors import ParamError
from llm_datadist.store.messages import NOTHING, Found, Namespace
from llm_datadist.types.grant import Grant

_HIT_VERSION: Final = 1


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    namespace: Namespace
    found: Found


_decode: Final = msgspec.msgpack.Decoder(_Wire).decode
_encode: Final = msgspec.msgpack.Encoder().encode


class Hit:
    """Leading run of keys that a store has; ``len()`` is their number, 0 for a miss.

    While a hit is not released, the store keeps its slots for this instance, by a grant. It ends with the release, or
    with the link of the instance that looked it up. ``StoreClient.lookup`` makes hits, ``from_bytes`` copies in other
    processes; releasing a copy has no effect.

    Attributes:
        namespace: The client's namespace.
        grant: Permission to pull the slots, or None for a miss.
        slots: Slot of each key, shape ``(n,)``.
        digests: Digest of each slot, shape ``(n, 2)``.
        nonce: Key of the digests.
        shape: Tensors and shape of a block, or None for a miss.
    """

    __slots__ = ("_found", "_held", "digests", "grant", "namespace", "nonce", "shape", "slots")

    def __init__(self, namespace: bytes, found: Found = NOTHING, *, held: bool = False) -> None:
        sizes = len(found.slots) // 8, len(found.digests) // 16
        parts = {bool(each) for each in (found.slots, found.grant, found.shape, len(found.nonce) == 16)}
        if sizes != (len(found.slots) / 8, len(found.slots) / 8) or len(found.digests) % 16 or len(parts) > 1:
            raise ParamError(f"hit: {sizes[0]} slots, {sizes[1]} digests do not fit, or a part is missing")
        self._found = found
        self._held = held  # by this instance, until released
        self.namespace = namespace
        self.grant = Grant.from_bytes(found.grant) if found.grant else None
        self.slots: np.ndarray[Any, np.dtype[np.int64]] = np.frombuffer(found.slots, "<i8")
        self.digests: np.ndarray[Any, np.dtype[np.uint64]] = np.frombuffer(found.digests, "<u8").reshape(-1, 2)
        self.nonce, self.shape = found.nonce, found.shape

    def __len__(self) -> int:
        return len(self.slots)

    def to_bytes(self) -> bytes:
        """Return the hit as bytes, for another process that is linked to the same store."""
        return bytes([_HIT_VERSION]) + _encode(_Wire(self.namespace, self._found))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return a copy of a hit. The process that looked it up must release it after the last load.

        Raises:
            TypeError: ``data`` is not bytes.
            ParamError: ``data`` has no hit, or one of another version of the format.
        """
        check_type("data", data, bytes)
        if not data or data[0] != _HIT_VERSION:
            raise ParamError(f"data: a hit of version {data[0] if data else 'none'}; this release reads {_HIT_VERSION}")
        try:
            wire = _decode(memoryview(data)[1:])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ParamError(f"data: {len(data)} bytes that are not a hit: {error}") from error
        return cls(wire.namespace, wire.found)

    def take(self) -> bool:
        """Return True once, for the instance that has to release the hit."""
        held, self._held = self._held, False
        return held

    def __repr__(self) -> str:
        return f"<Hit of {len(self)} keys in {self.namespace[:4].hex()}: {self.grant!r}>"
