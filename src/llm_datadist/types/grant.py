"""Grant: permission to pull certain blocks, for as long as they hold what they held when it was given.

The owner of the blocks gives it, under a token. A reader claims it by the token, pulls, and releases it. Who keeps the
grants of an owner, and what ends them, is in ``_transfer/grants.py``.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Final, Protocol, Self

import msgspec
import numpy as np

from llm_datadist._checks import check_type
from llm_datadist.errors import ParamError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TOKEN_BYTES: Final = 16
_MAX_BLOCKS: Final = 1 << 20
#: Why a grant has ended, where that is asked for.
RELEASED: Final = "released by its readers"
EXPIRED: Final = "its time was over"
READER_LOST: Final = "a reader was lost"
U64 = Annotated[int, msgspec.Meta(ge=0)]
Block = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def shown(token: bytes) -> str:
    """Return as much of a token as logs and errors may show: who has all of it may claim the grant."""
    return token[:4].hex()


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    cluster_id: U64
    incarnation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    cache_id: Annotated[int, msgspec.Meta(ge=1)]
    slot: Annotated[int, msgspec.Meta(ge=1)]
    generation: Annotated[int, msgspec.Meta(ge=1)]
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    blocks: Annotated[list[Block], msgspec.Meta(min_length=1, max_length=_MAX_BLOCKS)]


_decode: Final = msgspec.msgpack.Decoder(_Wire).decode


class Granter(Protocol):
    """What gives and ends grants at the owner of the cache."""

    def grant(self, cache_id: int, blocks: object, ttl: float, token: bytes | None) -> Grant:
        """Give one."""

    def require_here(self, what: str) -> None:
        """Refuse ``what`` in a forked child of the owner."""

    def claimed(self, grant: Grant) -> bool:
        """Return True while a reader holds it: one that has claimed it and has not released it."""

    def renew(self, grant: Grant, ttl: float) -> None:
        """Let it last longer, or less long."""

    def revoke(self, grant: Grant) -> None:
        """End it."""


class Reader(Protocol):
    """What tells the owner at the reader's end of a link."""

    def release(self, grant: Grant) -> None:
        """Tell the owner that nothing more is read."""


class GrantState(msgspec.Struct):
    """What has become of a grant in this process; ``_transfer/grants.py`` writes it."""

    end: str = ""  # why it has ended, at the owner
    reader: Reader | None = None  # where it was claimed


class Grant:
    """Permission to pull certain blocks of a blocks cache, until it ends. An extension.

    ``cache.grant(blocks, ttl)`` makes one at the owner. A reader gets it by ``CacheManager.claim_grant(cluster_id,
    token)``, or inside a message of the user's own: it pickles, and :meth:`to_bytes` is for everything else.
    ``pull_blocks(..., grant=...)`` checks it before the first byte and after the last, so that bytes of a block that
    was used again meanwhile are never taken for the old ones.

    It ends once its time is over, the owner revokes it or frees the cache, all its readers have released it, or the
    link to a reader that has claimed it is lost; pulls and claims are ``GrantEnded`` from then on. The owner may use
    the blocks again once :attr:`active` is False.

    What is "at the owner only" raises StateError at a copy that came from another process, and in a forked child.

    Attributes:
        cluster_id: The owner.
        cache_id: The owner's cache.
        token: 16 bytes that name the grant; the process that has them may claim it.
        blocks: The blocks.
        block_numbers: The same as an array, ascending, each once.
    """

    __slots__ = ("_granter", "_state", "_wire", "block_numbers", "blocks", "cache_id", "cluster_id", "token")

    def __init__(
        self,
        cluster_id: int,
        incarnation: bytes,
        cache_id: int,
        guard: tuple[int, int],
        token: bytes,
        blocks: Iterable[int],
        granter: Granter | None = None,
    ) -> None:
        self.blocks = frozenset(blocks)
        self.block_numbers = np.array(sorted(self.blocks), dtype=np.int64)
        self._wire = _Wire(cluster_id, incarnation, cache_id, *guard, token, self.block_numbers.tolist())
        self._granter = granter
        self._state = GrantState()
        self.cluster_id = cluster_id
        self.cache_id = cache_id
        self.token = token

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
        """True until the grant ends. At the owner only."""
        self._at_owner("active")
        return not self._state.end

    @property
    def end(self) -> str:
        """Why the grant has ended, in a few words; empty while it is active. At the owner only."""
        self._at_owner("end")
        return self._state.end

    def claimed(self) -> bool:
        """Return True while a reader holds it: one that has claimed it and has not released it. At the owner only.

        Of several readers that share a grant one may have released it, and another may never come: then this is False,
        and the grant lasts for the rest of its time.
        """
        return self._at_owner("claimed").claimed(self)

    def released(self) -> bool:
        """Return True once all its readers have released it. At the owner only."""
        self._at_owner("released")
        return self._state.end == RELEASED

    def renew(self, ttl: float) -> None:
        """Let the grant last ``ttl`` seconds from now on, at most. At the owner only.

        Raises:
            TypeError: ``ttl`` is no number.
            ParamError: It is not above 0, or not finite.
            StateError: The grant has ended.
        """
        self._at_owner("renew").renew(self, ttl)

    def revoke(self) -> None:
        """End the grant now: pulls of it that are not complete fail. At the owner only; idempotent.

        When this returns, the blocks may be used again. Exception: inside of another call of this thread, as by a
        finalizer (``__del__``), it is put off until that one ends, and :attr:`active` is True until then.
        """
        self._at_owner("revoke").revoke(self)

    def release(self) -> None:
        """Tell the owner that this reader needs the blocks no more. At a reader that has claimed it only; idempotent.

        Returns at once. Where the link is lost there is nothing to tell: that has ended the grant.

        Raises:
            StateError: This grant was not claimed here, or a forked child calls.
        """
        if self._state.reader is None:
            raise StateError(f"release: {self!r} was not claimed here (CacheManager.claim_grant)")
        self._state.reader.release(self)

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
            wire = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ParamError(f"data: {len(data)} bytes that are no grant: {error}") from error
        return cls(
            wire.cluster_id, wire.incarnation, wire.cache_id, (wire.slot, wire.generation), wire.token, wire.blocks
        )

    def _at_owner(self, what: str) -> Granter:
        if self._granter is None:
            raise StateError(f"{what}: {self!r} is a copy; only the process of cluster {self.cluster_id} can do that")
        self._granter.require_here(f"{what}: {self!r}")
        return self._granter

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        return Grant.from_bytes, (self.to_bytes(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grant) and self._wire == other._wire

    def __hash__(self) -> int:
        return hash((self.incarnation, self.guard))

    def __repr__(self) -> str:
        where = f"{len(self.blocks)} blocks of cache {self.cache_id} of cluster {self.cluster_id}"
        return f"<Grant {shown(self.token)} of {where}>"


state_of: Final[Callable[[Grant], GrantState]] = attrgetter("_state")
