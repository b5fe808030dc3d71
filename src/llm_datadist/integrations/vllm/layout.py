"""Places of the layers in memory, and the parts of a peer's ranks that go into this engine's. No I/O.

Each layer is a view of vLLM's one allocation. Layers of different groups may share a place, because a block belongs to
one group at a time. A place becomes one tensor of a blocks cache. Its row is the smallest part of a block that a rank
may need: one KV head of a page if heads are contiguous, else the whole page.

Ranks beyond the number of KV heads hold copies: ``replicas`` consecutive ranks have the same heads. Readers are spread
over them. Each rank of a peer is claimed, also one that nobody reads, because its blocks wait for a release.

Engines may differ in tokens per block. Tokens then move in pieces of the greatest common divisor of both page sizes.
Rows of equally many tokens are pulled in place. Others are pulled into a buffer and divided from there, if the kernel's
order of bytes in a row is known.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np

from llm_datadist.errors import CacheMismatch, LLMException, LLMStatusCode
from llm_datadist.integrations.vllm.identity import Identity, differences

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    #: For each group of layers: index of its first block in the request, and an engine's blocks from there.
    Groups = Sequence[tuple[int, Sequence[int]]]
    #: Rows to pull into a buffer, one after another; for each piece and head its row and part there, and at this rank.
    Portion = tuple[NDArray[Any], tuple[NDArray[Any], NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]

Small = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
#: A kernel order: all tokens' first component of K, then their second, and so on; then V, token by token.
COLUMNS: Final = "CPU_ATTN columns"


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Properties of an engine's KV that decide whether, and how, another engine reads it."""

    identity: Identity
    block_tokens: Small  # of one block
    pages: Small  # consecutive parts of a block; each holds all heads of this rank
    heads: Small  # KV heads of this rank; 1 if a page cannot be divided
    row_bytes: Small  # of one head of one page
    places: Annotated[list[list[str]], msgspec.Meta(min_length=1)]  # for each tensor the names of its layers
    ranks: Small  # tensor-parallel ranks of the engine
    replicas: Small  # consecutive ranks that hold the same heads
    #: Parts of a row in which a token's bytes follow the last token's: (number, bytes of a token). Empty if unknown.
    strips: list[tuple[Small, Small]]

    @property
    def rows(self) -> int:
        return self.pages * self.heads

    @property
    def page_tokens(self) -> int:
        return self.block_tokens // self.pages

    @property
    def holders(self) -> int:
        """Number of ranks with different heads."""
        return self.ranks // self.replicas

    def check(self, peer: Layout, accept_versions: Collection[str] = ()) -> None:
        """Raise CacheMismatch with every difference, unless a rank with this layout can read such a peer."""
        if peer.block_tokens % peer.pages or peer.row_bytes % peer.page_tokens or peer.ranks % peer.replicas:
            raise CacheMismatch("the engines do not fit: pages, rows or ranks there do not divide evenly")
        found = differences(peer.identity, self.identity, accept_versions)
        if peer.places != self.places:
            found.append(f"places: {str(peer.places)[:200]} there, {str(self.places)[:200]} here")
        there, here = (each.row_bytes // each.page_tokens for each in (peer, self))
        if there != here:
            found.append(f"bytes of a token of a row: {there} there, {here} here")
        elif peer.heads * peer.holders != self.heads * self.holders:
            held = [f"{each.heads} x {each.holders} ranks" for each in (peer, self)]
            found.append(f"KV heads: {held[0]} there, {held[1]} here")
        if peer.page_tokens != self.page_tokens and not (self.strips and self.strips == peer.strips):
            sizes = f"{peer.block_tokens} there, {self.block_tokens} here"
            found.append(f"block_tokens: {sizes}, and rows of {self.identity['attention']} cannot be divided")
        if found:
            raise CacheMismatch(f"the engines do not fit: {'; '.join(found)}")


class Share(msgspec.Struct, frozen=True):
    """Part of a peer's rank that one rank reads: ``count`` heads from ``theirs`` on, into ``ours`` on."""

    rank: int
    theirs: int
    ours: int
    count: int  # 0: nobody reads that rank, this one claims and releases it
    readers: int  # ranks of this engine that claim that rank


def shares(ours: Layout, rank: int, theirs: Layout) -> list[Share]:
    """Return the shares of ``rank`` in the peer's ranks, which together hold the same heads."""
    first = rank // ours.replicas * ours.heads
    found = []
    for holder in range(theirs.holders):
        begin, end = holder * theirs.heads, (holder + 1) * theirs.heads
        low, high = max(first, begin), min(first + ours.heads, end)
        readers = range(begin // ours.heads * ours.replicas, -(-end // ours.heads) * ours.replicas)
        for replica in range(theirs.replicas):
            peer, mine = holder * theirs.replicas + replica, readers[replica :: theirs.replicas]
            if rank in mine:
                found.append(Share(peer, low - begin, low - first, high - low, len(mine)))
            elif not mine and rank == readers[replica % len(readers)]:
                found.append(Share(peer, 0, 0, 0, 1))
    return found


class Pieces(NamedTuple):
    """Equal parts of pages, in the order of the request: numbers in a peer's rank and in this one's."""

    tokens: int  # of a piece
    theirs: NDArray[np.int64]
    ours: NDArray[np.int64]


def pieces(theirs: Layout, offered: Groups, ours: Layout, wanted: Groups) -> Pieces:
    """Return the pieces of all tokens for which a peer offers blocks and this engine has some, group by group."""
    tokens = math.gcd(theirs.page_tokens, ours.page_tokens)
    found: tuple[list[NDArray[np.int64]], ...] = [], []
    for groups in zip(offered, wanted, strict=True):
        sides = [(*each, layout.block_tokens // tokens) for each, layout in zip(groups, (theirs, ours), strict=True)]
        low = max(first * per_block for first, _, per_block in sides)
        high = min((first + len(blocks)) * per_block for first, blocks, per_block in sides)
        numbers = np.arange(low, max(low, high), dtype=np.int64)  # of the request's pieces
        for to, (first, blocks, per_block) in zip(found, sides, strict=True):
            at = np.asarray(blocks, np.int64)[numbers // per_block - first]
            to.append(at * per_block + numbers % per_block)
    return Pieces(tokens, np.concatenate(found[0]), np.concatenate(found[1]))


def pages_of(layout: Layout, blocks: Sequence[int]) -> NDArray[np.int64]:
    """Return all pages of these blocks."""
    return (np.asarray(blocks, np.int64)[:, None] * layout.pages + np.arange(layout.pages)).reshape(-1)


def rows_of(layout: Layout, pages: NDArray[np.int64], first: int, count: int) -> NDArray[np.int64]:
    """Return the rows of ``count`` heads from ``first`` on, in these pages."""
    return (pages[:, None] * layout.heads + np.arange(first, first + count)).reshape(-1)


def portions(theirs: Layout, ours: Layout, moved: Pieces, share: Share, most: int) -> Iterator[Portion]:
    """Yield a share's pieces in portions of at most ``most`` pages of the peer."""
    per_page, per_own = (each.page_tokens // moved.tokens for each in (theirs, ours))
    pages, place = np.unique(moved.theirs // per_page, return_inverse=True)
    heads = np.arange(share.count)
    for first in range(0, len(pages), most):
        of = (place >= first) & (place < first + most)
        yield (
            rows_of(theirs, pages[first : first + most], share.theirs, share.count),
            ((place[of, None] - first) * share.count + heads, moved.theirs[of, None] % per_page),
            (moved.ours[of, None] // per_own * ours.heads + share.ours + heads, moved.ours[of, None] % per_own),
        )


def divide(
    portion: Portion, tokens: int, theirs: Layout, buffer: NDArray[Any], ours: Layout, own: NDArray[Any]
) -> None:
    """Copy a portion's pieces of so many tokens from a buffer of one tensor's rows to this rank's tensor."""
    _, (old_rows, old_parts), (new_rows, new_parts) = portion
    for old, new in zip(_strips(theirs, buffer, tokens), _strips(ours, own, tokens), strict=True):
        new[new_rows, :, new_parts] = old[old_rows, :, old_parts]


def _strips(layout: Layout, tensor: NDArray[Any], tokens: int) -> Iterator[NDArray[np.void]]:
    """Yield an array (rows, number, parts) for each strip of a tensor's rows; an element has so many tokens."""
    begin, parts = 0, layout.page_tokens // tokens
    for number, nbytes in layout.strips:
        end = begin + number * nbytes * layout.page_tokens
        strip = tensor[:, begin:end].view(np.dtype((np.void, tokens * nbytes)))
        yield strip.reshape(len(tensor), number, parts)
        begin = end


def unsupported(what: str) -> LLMException:
    """Build the error for a feature that this connector lacks."""
    return LLMException(
        f"LLMDataDistConnector does not support {what}", status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    )
