"""Places of the layers in memory, and the rows of a peer's ranks that go into this engine's. No I/O.

Each layer is a view of vLLM's one allocation. Layers of different groups may share a place, because a block belongs to
one group at a time. A place becomes one tensor of a blocks cache. Its row is the smallest part of a block that a rank
may need: one KV head if heads are contiguous, else the whole page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from llm_datadist.errors import CacheMismatch, LLMException, LLMStatusCode
from llm_datadist.integrations.vllm.identity import Identity, differences

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

Small = Annotated[int, msgspec.Meta(ge=1, le=2**40)]


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Properties that must agree before one engine reads another's memory."""

    identity: Identity
    block_tokens: Small  # of one block
    pages: Small  # consecutive parts of a block; each holds all heads of this rank
    heads: Small  # KV heads of this rank; 1 if a page cannot be divided
    row_bytes: Small  # of one head of one page
    places: Annotated[list[list[str]], msgspec.Meta(min_length=1)]  # for each tensor the names of its layers
    ranks: Small  # tensor-parallel ranks of the engine
    divisible: bool  # a page can be divided by heads

    @property
    def rows(self) -> int:
        return self.pages * self.heads

    def check(self, peer: Layout, accept_versions: Collection[str] = ()) -> None:
        """Raise CacheMismatch with every difference, unless a rank with this layout can read such a peer."""
        same = ("block_tokens", "pages", "row_bytes", "places", "divisible")
        found = differences(peer.identity, self.identity, accept_versions)
        found += [
            f"{name}: {_short(getattr(peer, name))} there, {_short(getattr(self, name))} here"
            for name in same
            if getattr(peer, name) != getattr(self, name)
        ]
        if peer.heads * peer.ranks != self.heads * self.ranks and not found:
            found.append(f"KV heads: {peer.heads} x {peer.ranks} ranks there, {self.heads} x {self.ranks} here")
        if not self.divisible and peer.ranks != self.ranks:
            found.append(f"tensor parallel size: {peer.ranks} there, {self.ranks} here, and heads cannot be told apart")
        if found:
            raise CacheMismatch(f"the engines do not fit: {'; '.join(found)}")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class Share(msgspec.Struct, frozen=True):
    """Part of a peer's rank that one rank reads: ``count`` heads from ``theirs`` on, into ``ours`` on."""

    rank: int
    theirs: int
    ours: int
    count: int
    readers: int  # ranks of this engine that read that rank


def shares(ours: Layout, rank: int, theirs: Layout) -> list[Share]:
    """Return the shares of ``rank`` in the peer's ranks, which together hold the same heads."""
    first, last = rank * ours.heads, (rank + 1) * ours.heads
    found = []
    for peer in range(theirs.ranks):
        begin, end = peer * theirs.heads, (peer + 1) * theirs.heads
        low, high = max(first, begin), min(last, end)
        if low < high:
            readers = -(-end // ours.heads) - begin // ours.heads
            found.append(Share(peer, low - begin, low - first, high - low, readers))
    return found


def rows_of(layout: Layout, blocks: Sequence[int], first: int, count: int) -> NDArray[np.int64]:
    """Return the rows of ``count`` heads from ``first`` on, in these blocks."""
    starts = np.asarray(blocks, np.int64)[:, None, None] * layout.rows
    pages = np.arange(layout.pages, dtype=np.int64)[None, :, None] * layout.heads
    heads = np.arange(first, first + count, dtype=np.int64)[None, None, :]
    rows: NDArray[np.int64] = (starts + pages + heads).reshape(-1)
    return rows


def describe(
    views: Mapping[str, torch.Tensor], num_blocks: int, *, block_tokens: int, identity: dict[str, str], ranks: int
) -> tuple[Layout, list[int]]:
    """Return the layout of a rank's KV cache, and the address of each place.

    A layer's view has the shape (pages, heads, tokens, bytes of K and V). Raises :func:`unsupported` for memory that
    this connector cannot name.
    """
    places: dict[int, list[str]] = {}
    for name, view in sorted(views.items()):
        places.setdefault(view.data_ptr(), []).append(name)
    shapes = {(tuple(view.shape), view.stride(), str(view.dtype)) for view in views.values()}
    if len(shapes) != 1:
        raise unsupported(f"layers of {len(shapes)} shapes: {sorted(map(str, shapes))}")
    view = next(iter(views.values()))
    if view.dim() != 4 or view.shape[0] % num_blocks:
        raise unsupported(f"a layer of shape {tuple(view.shape)} for {num_blocks} blocks")
    pages, heads = view.shape[0] // num_blocks, view.shape[1]
    page = view[0]
    divisible = page.is_contiguous()  # else tokens precede heads, in one piece
    if not divisible and not page.transpose(0, 1).is_contiguous():
        raise unsupported(f"a page of shape {tuple(page.shape)} with strides {page.stride()}")
    heads_apart = heads if divisible else 1
    page_bytes = page.numel() * page.element_size()
    if view.stride(0) * view.element_size() != page_bytes:
        raise unsupported("blocks that hold the pages of all layers (kv_cache_layout BLHNC)")
    ordered = sorted(places.items())
    layout = Layout(
        identity=identity,
        block_tokens=block_tokens,
        pages=pages,
        heads=heads_apart,
        row_bytes=page_bytes // heads_apart,
        places=[names for _, names in ordered],
        ranks=ranks,
        divisible=divisible,
    )
    return layout, [address for address, _ in ordered]


def unsupported(what: str) -> LLMException:
    """Build the error for a feature that this connector lacks."""
    return LLMException(
        f"LLMDataDistConnector does not support {what}", status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    )
