"""Grant: permission to pull certain blocks, for as long as they hold what they held when it was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Protocol, Self

import msgspec
import numpy as np

from llm_datadist._checks import check_type
from llm_datadist.errors import ParamError, StateError

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_BLOCKS: Final = 1 << 20
U64 = Annotated[int, msgspec.Meta(ge=0)]
Block = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    cluster_id: U64
    incarnation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    cache_id: Annotated[int, msgspec.Meta(ge=1)]
    slot: Annotated[int, msgspec.Meta(ge=1)]
    generation: Annotated[int, msgspec.Meta(ge=1)]
    blocks: Annotated[list[Block], msgspec.Meta(min_length=1, max_length=_MAX_BLOCKS)]


class Granter(Protocol):
    """What gives and ends grants at the owner of the cache."""

    def grant(self, cache_id: int, blocks: object, ttl: float) -> Grant:
        """Give one."""

    def revoke(self, grant: Grant) -> None:
        """End it."""

    def active(self, grant: Grant) -> bool:
        """Return True until it ends."""


class Grant:
    """Permission to pull certain blocks of a blocks cache, until it is revoked or its time is over. An extension.

    ``cache.grant(blocks, ttl)`` makes one at the owner. It is a small value for the user's own messages: it pickles,
    and :meth:`to_bytes` is for everything else. ``pull_blocks(..., grant=...)`` checks it before the first byte and
    after the last, so that bytes of a block that was used again meanwhile are never taken for the old ones.

    The owner may use the blocks again once :meth:`revoke` has returned, or once :attr:`active` is False.

    Attributes:
        cluster_id: The owner.
        cache_id: The owner's cache.
        blocks: The blocks.
        block_numbers: The same as an array, ascending, each once.
    """

    __slots__ = ("_granter", "_wire", "block_numbers", "blocks", "cache_id", "cluster_id")

    def __init__(
        self,
        cluster_id: int,
        incarnation: bytes,
        cache_id: int,
        guard: tuple[int, int],
        blocks: Iterable[int],
        granter: Granter | None = None,
    ) -> None:
        self.blocks = frozenset(blocks)
        self.block_numbers = np.array(sorted(self.blocks), dtype=np.int64)
        self._wire = _Wire(cluster_id, incarnation, cache_id, *guard, self.block_numbers.tolist())
        self._granter = granter
        self.cluster_id = cluster_id
        self.cache_id = cache_id

    @property
    def incarnation(self) -> bytes:
        """Random id of the owner's ``init``: the grant ends with it."""
        return self._wire.incarnation

    @property
    def guard(self) -> tuple[int, int]:
        """(slot, generation) of the owner's guard that holds the grant."""
        return self._wire.slot, self._wire.generation

    @property
    def active(self) -> bool:
        """True until the grant is revoked or its time is over. At the owner only.

        Raises:
            StateError: This is a copy that came from another process.
        """
        return self._at_owner("active").active(self)

    def revoke(self) -> None:
        """End the grant now: pulls of it that are not complete fail. At the owner only; idempotent.

        When this returns, the blocks may be used again.

        Raises:
            StateError: This is a copy that came from another process.
        """
        self._at_owner("revoke").revoke(self)

    def to_bytes(self) -> bytes:
        """Return the grant for a message, some bytes per block."""
        return msgspec.msgpack.encode(self._wire)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the grant in a message.

        Raises:
            TypeError: ``data`` is not bytes.
            ParamError: It holds no grant.
        """
        check_type("data", data, bytes)
        try:
            wire = msgspec.msgpack.decode(data, type=_Wire)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ParamError(f"data: {len(data)} bytes that are no grant: {error}") from error
        return cls(wire.cluster_id, wire.incarnation, wire.cache_id, (wire.slot, wire.generation), wire.blocks)

    def _at_owner(self, what: str) -> Granter:
        if self._granter is None:
            raise StateError(f"{what}: {self!r} is a copy; only the process of cluster {self.cluster_id} can do that")
        return self._granter

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        return Grant.from_bytes, (self.to_bytes(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grant) and self._wire == other._wire

    def __hash__(self) -> int:
        return hash((self.incarnation, self.guard))

    def __repr__(self) -> str:
        return f"<Grant of {len(self.blocks)} blocks of cache {self.cache_id} of cluster {self.cluster_id}>"
