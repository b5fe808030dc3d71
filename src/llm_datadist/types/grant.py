"""Grant, an owner's permission to pull certain blocks until it ends. ``_transfer/grants.py`` keeps an owner's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final, Protocol, Self

import msgspec
import numpy as np

from llm_datadist._checks import check_type
from llm_datadist._native.public_call import OfProcess, public_calls
from llm_datadist.errors import ParamError, StateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

TOKEN_BYTES: Final = 16
#: First byte of a grant as bytes.
GRANT_VERSION: Final = 1
_MAX_BLOCKS: Final = 1 << 20
#: Reasons of an end that are compared.
RELEASED: Final = "released by its readers"
EXPIRED: Final = "its time was over"
READER_LOST: Final = "a reader was lost"
U64 = Annotated[int, msgspec.Meta(ge=0)]
Block = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def shown(token: bytes) -> str:
    """Return the part of a token that logs and errors may show."""
    return token[:4].hex()


def ascending(numbers: NDArray[np.int64] | Sequence[int]) -> NDArray[np.int64]:
    """Return the different numbers in order. ``np.unique`` takes five times as long for thousands."""
    ordered = np.array(numbers, np.int64)
    ordered.sort()
    first = np.empty(ordered.size, np.bool_)  # no function of NumPy: some run Python code that two threads may meet
    first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    cluster_id: U64
    incarnation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    cache_id: Annotated[int, msgspec.Meta(ge=1)]
    slot: Annotated[int, msgspec.Meta(ge=1)]
    generation: Annotated[int, msgspec.Meta(ge=1)]
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    blocks: Annotated[list[Block], msgspec.Meta(min_length=1, max_length=_MAX_BLOCKS)]


#: Called with a grant that has ended, if at all.
OnEnd = Callable[["Grant"], None] | None

_decode: Final = msgspec.msgpack.Decoder(_Wire).decode


class Granter(Protocol):
    """Owner of grants, which gives and ends them."""

    def grant(
        self, cache_id: int, blocks: object, ttl: float | None, token: bytes | None, peer: int | None, on_end: OnEnd
    ) -> Grant:
        """Give a grant."""

    def claimed(self, grant: Grant) -> bool:
        """Return True while a claim was not released."""

    def renew(self, grant: Grant, ttl: float) -> None:
        """Change the grant's lifetime."""

    def revoke(self, grant: Grant) -> None:
        """End the grant."""


class GrantState(msgspec.Struct):
    """State of a grant in this process; ``_transfer/grants.py`` writes it."""

    end: str = ""  # reason of the end, at the owner
    end_claim: Callable[..., None] | None = None  # with ``released``; if claimed in this process


@public_calls(plain=("blocks", "to_bytes"))
class Grant(OfProcess):
    """Permission to pull certain blocks of a blocks cache, until it ends. An extension.

    ``cache.grant(blocks, ttl)`` makes a grant at the owner. A reader claims it by its token
    (``CacheManager.claim_grant``), or gets it in a message (:meth:`to_bytes`, or pickled). ``pull_blocks(...,
    grant=...)`` checks it before the first byte and after the last, so it never returns bytes of a later use of the
    blocks.

    It ends with its lifetime, by ``revoke``, with its cache or owner, by the release of all readers, or with the link
    to a claiming reader. Then pulls and claims are ``GrantEnded``. Once :attr:`active` is False, the owner may reuse
    the blocks.

    "Owner only" methods raise StateError in other processes. In a forked child they and :meth:`release` do; what a
    grant is, its attributes and its bytes, can be read there.

    Attributes:
        cluster_id: The owner.
        cache_id: The owner's cache.
        token: 16 bytes that name the grant; a process with them may claim it.
        incarnation: Random id of the owner's ``init``.
        guard: (slot, generation) of the owner's guard.
        block_numbers: Block numbers, ascending.
    """

    __slots__ = ("_granter", "_state", "block_numbers", "cache_id", "cluster_id", "guard", "incarnation", "token")

    def __init__(
        self,
        cluster_id: int,
        incarnation: bytes,
        cache_id: int,
        guard: tuple[int, int],
        token: bytes,
        blocks: NDArray[np.int64] | Sequence[int],
        granter: Granter | None = None,
    ) -> None:
        # Once, as an array: an owner may have thousands of grants, each of thousands of blocks.
        self.block_numbers = ascending(blocks)
        self._granter = granter
        self._state = GrantState()
        self.cluster_id = cluster_id
        self.incarnation = incarnation
        self.cache_id = cache_id
        self.guard = guard
        self.token = token

    @property
    def blocks(self) -> frozenset[int]:
        """Block numbers as a new set; :attr:`block_numbers` takes less time and memory."""
        return frozenset(self.block_numbers.tolist())

    @property
    def active(self) -> bool:
        """True until the grant ends. Owner only."""
        self._at_owner("active")
        return not self._state.end

    @property
    def end(self) -> str:
        """Reason of the end, in a few words; empty while active. Owner only."""
        self._at_owner("end")
        return self._state.end

    def claimed(self) -> bool:
        """Return True while a reader has claimed the grant and not released it. Owner only.

        False is not the end: the grant waits for other readers, for its lifetime.
        """
        return self._at_owner("claimed").claimed(self)

    def released(self) -> bool:
        """Return True once all its readers have released it. Owner only."""
        self._at_owner("released")
        return self._state.end == RELEASED

    def renew(self, ttl: float) -> None:
        """Let the grant end ``ttl`` seconds from now. Owner only.

        Raises:
            TypeError: ``ttl`` is not a number.
            ParamError: Not above 0, or not finite.
            StateError: The grant has ended.
        """
        self._at_owner("renew").renew(self, ttl)

    def revoke(self) -> None:
        """End the grant now; unfinished pulls with it fail. Owner only; idempotent.

        Inside another call of this thread, as by a finalizer (``__del__``), it ends, and stays :attr:`active`, until
        that call ends.
        """
        self._at_owner("revoke").revoke(self)

    def release(self) -> None:
        """Tell the owner that this reader has finished. Only after ``claim_grant``; idempotent.

        The call does not wait. A lost link has ended the grant already.

        Raises:
            StateError: This grant was not claimed here, or a forked child calls.
        """
        if self._state.end_claim is None:
            raise StateError(f"release: {self!r} was not claimed here (CacheManager.claim_grant)")
        self._state.end_claim(released=True)

    def to_bytes(self) -> bytes:
        """Return the grant as bytes, several per block; the first is the version of the format."""
        names = self.cluster_id, self.incarnation, self.cache_id, *self.guard, self.token
        return bytes([GRANT_VERSION]) + msgspec.msgpack.encode((*names, self.block_numbers.tolist()))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the grant of :meth:`to_bytes`.

        Raises:
            TypeError: ``data`` is not bytes.
            ParamError: ``data`` has no grant, or one of another version of the format.
        """
        check_type("data", data, bytes)
        if data and data[0] != GRANT_VERSION:
            raise ParamError(f"data: a grant of version {data[0]}; this release reads version {GRANT_VERSION}")
        try:
            wire = _decode(memoryview(data)[1:])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ParamError(f"data: {len(data)} bytes that are not a grant: {error}") from error
        return cls(
            wire.cluster_id, wire.incarnation, wire.cache_id, (wire.slot, wire.generation), wire.token, wire.blocks
        )

    def _at_owner(self, what: str) -> Granter:
        if self._granter is None:
            raise StateError(f"{what}: {self!r} is a copy; only the process of cluster {self.cluster_id} can do that")
        return self._granter

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        return Grant.from_bytes, (self.to_bytes(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grant) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash((self.incarnation, self.guard))

    def __repr__(self) -> str:
        where = f"{len(self.block_numbers)} blocks of cache {self.cache_id} of cluster {self.cluster_id}"
        return f"<Grant {shown(self.token)} of {where}>"


def state_of(grant: Grant) -> GrantState:
    """Return a grant's state, for this library's packages."""
    return grant._state  # noqa: SLF001 (of this module; no attribute for users)
