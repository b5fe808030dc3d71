"""Hit, the result of a lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from llm_datadist._checks import HERE, check_rule, check_type
from llm_datadist.store.identity import shown
from llm_datadist.store.messages import NOTHING, Found, HitCopy, decode
from llm_datadist.types.grant import Grant

if TYPE_CHECKING:
    from collections.abc import Sequence


class Hit:
    """Leading run of keys that a store has; ``len()`` is their number, 0 for a miss.

    While a hit is not released, the store keeps its slots for this instance, by grants. They end with the release, or
    with the link of the instance that looked it up. ``StoreClient.lookup`` makes hits, ``from_bytes`` copies in other
    processes, and a forked child has copies; releasing a copy has no effect.

    Attributes:
        namespace: The client's namespace.
        grants: Permissions to pull the slots, one for each 4,096 keys; empty for a miss.
        counts: Number of keys of each grant.
        slots: Slot of each key, shape ``(n,)``.
        digests: Digest of each slot, shape ``(n, 2)``.
        nonce: Key of the digests.
        shape: Tensors and shape of a block, or None for a miss.
    """

    __slots__ = ("_held", "_parts", "counts", "digests", "grants", "namespace", "nonce", "shape", "slots")

    def __init__(self, namespace: bytes, parts: Sequence[Found] = (), *, held: bool = False) -> None:
        for found in parts:
            keys = len(found.slots) // 8
            sizes = len(found.slots), len(found.digests), len(found.nonce)
            whole = keys and sizes == (8 * keys, 16 * keys, 16) and found.owner and found.shape
            check_rule(whole, f"hit: {sizes[0]} bytes of slots, {sizes[1]} of digests do not fit, or a part is missing")
        first = parts[0] if parts else NOTHING
        alike = all((found.nonce, found.shape) == (first.nonce, first.shape) for found in parts)
        check_rule(alike, "hit: its parts are not of one namespace of one store")
        self._parts = list(parts)
        self._held = HERE["pid"] if held else None  # by this process, until released
        self.namespace = namespace
        self.counts = tuple(len(found.slots) // 8 for found in parts)
        self.slots: np.ndarray[Any, np.dtype[np.int64]] = np.frombuffer(b"".join(each.slots for each in parts), "<i8")
        check_rule((self.slots >= 0).all(), "hit: a slot below 0")
        self.grants = tuple(map(_grant, parts))
        digests = np.frombuffer(b"".join(each.digests for each in parts), "<u8").reshape(-1, 2)
        self.digests: np.ndarray[Any, np.dtype[np.uint64]] = digests
        self.nonce, self.shape = first.nonce, first.shape

    def __len__(self) -> int:
        return len(self.slots)

    def longer(self, found: Found) -> Hit:
        """Return this hit and the run that follows, to be released instead of it."""
        return Hit(self.namespace, [*self._parts, found], held=True)

    def to_bytes(self) -> bytes:
        """Return the hit as bytes, for another process that is linked to the same store."""
        return HitCopy(self.namespace, self._parts).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return a copy of a hit. The process that looked it up must release it after the last load.

        Raises:
            TypeError: ``data`` is not bytes.
            ParamError: ``data`` is no hit.
            CacheMismatch: A hit of another format.
        """
        copy = decode(HitCopy, check_type("data", data, bytes), "data")
        return cls(copy.namespace, copy.parts)

    def take(self) -> bool:
        """Return True once, in the process that has to release the hit."""
        held, self._held = self._held, None
        return held == HERE["pid"]

    def __repr__(self) -> str:
        return f"<Hit of {len(self)} keys in {shown(self.namespace)}: {list(self.grants)}>"


def _grant(found: Found) -> Grant:
    store, incarnation, token = found.owner or (0, b"", b"")
    return Grant(store, incarnation, found.cache_id, found.guard, token, np.frombuffer(found.slots, "<i8"))
