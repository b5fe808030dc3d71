"""Hit, the result of a lookup."""

from __future__ import annotations

from typing import Annotated, Any, Final, Self

import msgspec
import numpy as np

from llm_datadist._checks import check_type
from llm_datadist.errors import ParamError
from llm_datadist.store.messages import BlockShape, Namespace  # noqa: TC001 (msgspec evaluates annotations)
from llm_datadist.types.grant import Grant

_VERSION: Final = 1


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    namespace: Namespace
    grant: bytes
    slots: bytes
    digests: bytes
    nonce: Annotated[bytes, msgspec.Meta(max_length=16)]
    shape: BlockShape | None


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

    __slots__ = ("_held", "digests", "grant", "namespace", "nonce", "shape", "slots")

    def __init__(self, wire: _Wire, *, held: bool = False) -> None:
        self.namespace = wire.namespace
        self.grant = Grant.from_bytes(wire.grant) if wire.grant else None
        if len(wire.slots) % 8 or len(wire.digests) != 2 * len(wire.slots):
            raise ParamError(f"hit: {len(wire.slots)} bytes of slots, {len(wire.digests)} of digests do not fit")
        self.slots: np.ndarray[Any, np.dtype[np.int64]] = np.frombuffer(wire.slots, "<i8")
        self.digests: np.ndarray[Any, np.dtype[np.uint64]] = np.frombuffer(wire.digests, "<u8").reshape(-1, 2)
        self.nonce = wire.nonce
        self.shape = wire.shape
        self._held = held  # by this instance, until released
        parts = {bool(wire.slots), self.grant is not None, self.shape is not None, len(self.nonce) == 16}
        if len(parts) > 1:
            raise ParamError("hit: a part is missing")

    def __len__(self) -> int:
        return len(self.slots)

    def to_bytes(self) -> bytes:
        """Return the hit as bytes, for another process that is linked to the same store."""
        grant = b"" if self.grant is None else self.grant.to_bytes()
        parts = self.namespace, grant, self.slots.tobytes(), self.digests.tobytes(), self.nonce, self.shape
        return bytes([_VERSION]) + _encode(_Wire(*parts))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return a copy of a hit. The process that looked it up must release it after the last load.

        Raises:
            TypeError: ``data`` is not bytes.
            ParamError: ``data`` has no hit, or one of another version of the format.
        """
        check_type("data", data, bytes)
        if not data or data[0] != _VERSION:
            raise ParamError(f"data: a hit of version {data[0] if data else 'none'}; this release reads {_VERSION}")
        return cls(_parse(memoryview(data)[1:]))

    def take(self) -> bool:
        """Return True once, for the instance that has to release the hit."""
        held, self._held = self._held, False
        return held

    def __repr__(self) -> str:
        return f"<Hit of {len(self)} keys in {self.namespace[:4].hex()}: {self.grant!r}>"


def _parse(data: memoryview) -> _Wire:
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ParamError(f"data: {len(data)} bytes that are not a hit: {error}") from error


def hit_of(
    namespace: bytes,
    grant: bytes = b"",
    slots: bytes = b"",
    digests: bytes = b"",
    nonce: bytes = b"",
    shape: BlockShape | None = None,
    *,
    held: bool = False,
) -> Hit:
    """Return a hit of these parts, a miss without them. Raises ParamError if they do not fit."""
    return Hit(_Wire(namespace, grant, slots, digests, nonce, shape), held=held)
