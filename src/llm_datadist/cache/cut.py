"""What of each tensor of a source goes where, for the layer-wise transfer (API §6.14). Pure, like ``layout.py``.

A cut is made from the source alone, once per transfer: its runs have destination offsets counted from wherever the
destination begins, be that a raw address or a row, so that the same runs do for every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llm_datadist import native
from llm_datadist.cache.layout import CacheKind, Geometry
from llm_datadist.errors import CacheMismatch, ParamError
from llm_datadist.native import BlockList, Plan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Cut", "cut_pairs", "cut_pieces", "cut_row"]

#: No destination that is given by an address ends beyond this, so that offsets cannot wrap.
_REACH: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Cut:
    """Runs from a source tensor to a destination tensor.

    Attributes:
        kind: Of the source.
        runs: As in :class:`Plan`, destination offsets from the beginning of the destination.
        ordered: As in :class:`Plan`.
        unit: Bytes of a destination block; of the row, where there are no blocks.
        blocks: The destination's blocks, None where there are none.
        extent: Bytes from the beginning of the destination to the end of the last run.
    """

    kind: CacheKind
    runs: NDArray[np.uint64]
    ordered: bool
    unit: int
    blocks: NDArray[np.int64] | None
    extent: int

    def plan(self, dst_first: int, src_first: int, count: int, *, offset: int, alias: bool) -> Plan:
        """Return the copy of ``count`` tensors into destinations that begin at ``offset``.

        ``alias``: both ends have the same tensors, so the runs take effect in the order given (R26).
        """
        runs = self.runs
        if offset:
            runs = runs.copy()
            runs[:, 0] += offset
        nbytes = int(runs[:, 2].sum()) * count
        return Plan(dst_first, src_first, count, runs, ordered=self.ordered or alias, nbytes=nbytes)

    def offset_in(self, dst: Geometry, row: int) -> int:
        """Return where the destination begins in the tensors of a cache that was named by key or by id and row.

        Raises:
            CacheMismatch: Sizes or kinds do not fit (R17).
            ParamError: A block outside the cache.
        """
        if self.blocks is None:
            return self._row_offset(dst, row)
        if dst.kind is not CacheKind.BLOCKS or row:
            raise CacheMismatch(f"dst_block_indices: row {row} of a {dst.kind.word} cache has no blocks")
        if dst.stride != self.unit:
            raise CacheMismatch(f"block sizes differ: {self.unit} bytes are sent into blocks of {dst.stride}")
        worst = int(self.blocks.max())
        if worst >= dst.rows:
            at = int(self.blocks.argmax())
            raise ParamError(f"dst_block_indices[{at}]={worst}: the destination has {dst.rows} blocks")
        return 0

    def _row_offset(self, dst: Geometry, row: int) -> int:
        if dst.kind is CacheKind.BLOCKS and row:
            raise CacheMismatch(f"batch_index={row} of cache_key: a blocks cache has only row 0")
        both_blocks = dst.kind is CacheKind.BLOCKS and self.kind is CacheKind.BLOCKS
        if self.unit > dst.stride or (both_blocks and self.unit != dst.stride):
            what = "block" if dst.kind is CacheKind.BLOCKS else "row"
            raise CacheMismatch(f"{self.unit} bytes per tensor do not fit a {what} of {dst.stride} at the destination")
        return row * dst.stride


def cut_row(src: Geometry, row: int) -> Cut:
    """Cut a whole row out of each tensor; of a blocks cache that is its first block (its "batch" is 1).

    Raises:
        ParamError: No such row.
    """
    if src.kind is CacheKind.BLOCKS and row:
        raise ParamError(f"src_batch_index={row}: a blocks cache has only row 0")
    src.require_row("src_batch_index", row)
    return Cut(
        src.kind,
        native.plan_row(0, row * src.stride, src.stride),
        ordered=False,
        unit=src.stride,
        blocks=None,
        extent=src.stride,
    )


def cut_pieces(src: Geometry, dst_blocks: BlockList, unit: int) -> Cut:
    """Cut each whole tensor into pieces of ``unit`` bytes, piece i for block ``dst_blocks[i]``; the last may be short.

    Raises:
        ParamError: ``unit`` is not between 0 and the size of a tensor, or there are fewer pieces than blocks.
    """
    if not 0 < unit < src.tensor_bytes:
        raise ParamError(
            f"dst_block_memory_size={unit}: a tensor of {src.tensor_bytes} bytes is cut by it, so it must be above 0 "
            "and below that"
        )
    pieces = -(-src.tensor_bytes // unit)
    if len(dst_blocks) > pieces:
        raise ParamError(
            f"dst_block_indices has {len(dst_blocks)} entries: a tensor of {src.tensor_bytes} bytes has {pieces} "
            f"pieces of {unit}"
        )
    plan = native.plan_pieces(
        dst_blocks,
        block_bytes=unit,
        dst_count=_REACH // unit,
        src_offset=0,
        src_bytes=src.tensor_bytes,
        dst_name="dst_block_indices",
    )
    return _blocks(src, plan, unit, dst_blocks)


def cut_pairs(src: Geometry, src_blocks: BlockList, dst_blocks: BlockList) -> Cut:
    """Cut out blocks (rows of a continuous cache): ``src_blocks[i]`` for ``dst_blocks[i]``, in the order given (R26).

    Raises:
        ParamError: A block outside the source.
    """
    plan = native.plan_blocks(
        dst_blocks,
        src_blocks,
        block_bytes=src.stride,
        dst_count=_REACH // src.stride,
        src_count=src.rows,
        alias=False,
        dst_name="dst_block_indices",
        src_name="src_block_indices",
    )
    return _blocks(src, plan, src.stride, dst_blocks)


def _blocks(src: Geometry, plan: Plan, unit: int, blocks: BlockList) -> Cut:
    runs = plan.runs
    return Cut(src.kind, runs, plan.ordered, unit, blocks.array, extent=int((runs[:, 0] + runs[:, 2]).max()))
