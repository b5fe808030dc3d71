"""Hit, the result of a lookup."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from llm_datadist._checks import HERE, check_type
from llm_datadist.errors import ParamError
from llm_datadist.store.messages import NOTHING, Found, HitCopy, decode
from llm_datadist.types.grant import Grant


class Hit:
    """Leading run of keys that a store has; ``len()`` is their number, 0 for a miss.

    While a hit is not released, the store keeps its slots for this instance, by a grant. It ends with the release, or
    with the link of the instance that looked it up. ``StoreClient.lookup`` makes hits, ``from_bytes`` copies in other
    processes, and a forked child has copies; releasing a copy has no effect.

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
        self._held = HERE["pid"] if held else None  # by this process, until released
        self.namespace = namespace
        self.grant = Grant.from_bytes(found.grant) if found.grant else None
        self.slots: np.ndarray[Any, np.dtype[np.int64]] = np.frombuffer(found.slots, "<i8")
        self.digests: np.ndarray[Any, np.dtype[np.uint64]] = np.frombuffer(found.digests, "<u8").reshape(-1, 2)
        self.nonce, self.shape = found.nonce, found.shape

    def __len__(self) -> int:
        return len(self.slots)

    def to_bytes(self) -> bytes:
        """Return the hit as bytes, for another process that is linked to the same store."""
        return HitCopy(self.namespace, self._found).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return a copy of a hit. The process that looked it up must release it after the last load.

        Raises:
            TypeError: ``data`` is not bytes.
            ParamError: ``data`` is no hit.
            CacheMismatch: A hit of another format.
        """
        copy = decode(HitCopy, check_type("data", data, bytes), "data")
        return cls(copy.namespace, copy.found)

    def take(self) -> bool:
        """Return True once, in the process that has to release the hit."""
        held, self._held = self._held, None
        return held == HERE["pid"]

    def __repr__(self) -> str:
        return f"<Hit of {len(self)} keys in {self.namespace[:4].hex()}: {self.grant!r}>"
