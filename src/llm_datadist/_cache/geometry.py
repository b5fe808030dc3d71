"""Geometries of caches, and plans between two of them. Pure: no bytes, no addresses, no peers. Any thread.

``stride`` is the bytes of a row (interface §5): a batch row, or a block. Errors name the caller's argument.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from llm_datadist import _native
from llm_datadist._checks import check_rule, clean
from llm_datadist._native import BlockList, BlockPlanner, Plan
from llm_datadist.errors import CacheMismatch, CacheNotFound, ParamError, ProtocolError
from llm_datadist.types.data_type import DataType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llm_datadist.types import CacheDesc

_MAX_TENSORS: Final = 1 << 20
_MAX_TENSOR_BYTES: Final = 2**63 - 1
_NAMES: Final = {each.value: each.name for each in DataType}
_MAX_DST_BYTES: Final = 1 << 62  # bound of an addressed destination: offsets cannot wrap


class CacheKind(IntEnum):
    """Addressing: by batch row, by block, or by either (MIX, which never has keys)."""

    CACHE = 0
    BLOCKS = 1
    MIX = 2

    @property
    def word(self) -> str:
        """Name in messages."""
        return ("continuous", "blocks", "row-and-block")[self]

    def serves(self, use: CacheKind) -> bool:
        """Return True if it can be used as ``use``."""
        return self is use or self is CacheKind.MIX


class Geometry(msgspec.Struct, frozen=True, array_like=True):
    """Shape of a cache in bytes, as sent in ``Resolved``."""

    kind: CacheKind
    num_tensors: int
    rows: int
    stride: int
    tensor_bytes: int
    shape: tuple[int, ...]
    data_type: int
    placement: int

    @classmethod
    def of(cls, desc: CacheDesc, kind: CacheKind) -> Geometry:
        """Build from a descriptor; ``shape[0]`` counts rows, whatever ``batch_dim_index`` is."""
        text = f"cache_desc.num_tensors={desc.num_tensors}: a cache has 1 to {_MAX_TENSORS} tensors"
        check_rule(1 <= desc.num_tensors <= _MAX_TENSORS, text)
        size = desc.size
        shape = tuple(desc.shape)
        return cls(
            kind=kind,
            num_tensors=desc.num_tensors,
            rows=shape[0],
            stride=size // shape[0],
            tensor_bytes=size,
            shape=shape,
            data_type=desc.data_type.value,
            placement=int(desc.placement),
        )

    def require_row(self, name: str, row: int) -> None:
        """Raise ParamError about argument ``name`` unless the row exists."""
        if row >= self.rows:
            raise ParamError(f"{name}={row}: the cache has {self.rows} rows, so at most {self.rows - 1}")

    def require_kind(self, name: str, kind: CacheKind) -> None:
        """Raise ParamError about argument ``name`` unless the kind serves."""
        if not self.kind.serves(kind):
            raise ParamError(f"{name}: a {kind.word} cache is needed here, this is a {self.kind.word} one")


def unlike(local: Geometry, remote: Geometry) -> str:
    """Return the difference of element types, or of dimensions of equally large rows, or ""."""
    if local.data_type == remote.data_type and (local.stride != remote.stride or local.shape[1:] == remote.shape[1:]):
        return ""
    here, there = (f"{_NAMES.get(at.data_type, at.data_type)} {reprlib.repr(at.shape[1:])}" for at in (local, remote))
    return f"rows or blocks are {here} here, {there} at the peer"


_decoder: Final = msgspec.msgpack.Decoder(Geometry)


@lru_cache(256)
def decode_geometry(raw: bytes) -> Geometry:
    """Decode a peer's geometry. ProtocolError if it could make an address overflow or leave a tensor."""
    try:
        geometry = _decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"peer sent an invalid cache geometry: {clean(str(error))}") from error
    sound = (
        0 < geometry.num_tensors <= _MAX_TENSORS
        and geometry.rows > 0
        and geometry.stride > 0
        and 0 < geometry.tensor_bytes <= _MAX_TENSOR_BYTES
        and geometry.rows * geometry.stride <= geometry.tensor_bytes
    )
    if not sound:
        raise ProtocolError(f"peer sent an impossible cache geometry: {geometry}")
    return geometry


@dataclass(frozen=True, slots=True)
class LayerSelection:
    """Layer ranges of one call (interface R14); None is every tensor of that side."""

    src: range | None
    dst: range | None
    tensors_per_layer: int

    def check_local(self, name: str, num_tensors: int) -> None:
        """Raise ParamError unless ``name``, the local cache's range, fits it and the other range."""
        if self.src is None and self.dst is None:
            return
        local, remote = (self.src, self.dst) if name == "src_layer_range" else (self.dst, self.src)
        layers = self._layer_range(name, local, num_tensors)
        if remote is not None and remote.stop - remote.start != len(layers):
            raise ParamError(
                f"src_layer_range={self.src} and dst_layer_range={self.dst}: equal lengths are needed, and None "
                f"stands for all {num_tensors // self.tensors_per_layer} layers"
            )

    def tensors(self, src: Geometry, dst: Geometry) -> tuple[int, int, int]:
        """Return (first dst tensor, first src tensor, count). CacheMismatch if the counts differ."""
        if self.src is None and self.dst is None:
            if src.num_tensors != dst.num_tensors:
                raise CacheMismatch(
                    f"num_tensors differ: source has {src.num_tensors}, destination {dst.num_tensors}; "
                    "give layer ranges to move a part"
                )
            return 0, 0, src.num_tensors
        source = self._layer_range("src_layer_range", self.src, src.num_tensors)
        target = self._layer_range("dst_layer_range", self.dst, dst.num_tensors)
        if len(source) != len(target):
            raise CacheMismatch(
                f"layers differ: src_layer_range {source} has {len(source)}, dst_layer_range {target} has {len(target)}"
            )
        per_layer = self.tensors_per_layer
        return target.start * per_layer, source.start * per_layer, len(source) * per_layer

    def _layer_range(self, name: str, layers: range | None, num_tensors: int) -> range:
        per_layer = self.tensors_per_layer
        if num_tensors % per_layer:
            raise ParamError(
                f"tensor_num_per_layer={per_layer}: must divide the cache's {num_tensors} tensors when a layer range "
                "is given"
            )
        num_layers = num_tensors // per_layer
        if layers is None:
            return range(num_layers)
        if layers.stop > num_layers:
            raise ParamError(f"{name}={layers}: the cache has {num_layers} layers of {per_layer} tensors")
        return layers


class CachePair(msgspec.Struct, eq=False):
    """Compared remote and local cache, with the last block planner. Any thread."""

    remote: Geometry
    row: int  # of the remote cache
    cache_id: int  # local
    same_memory: bool  # True if both have the same tensors
    _compared: tuple[LayerSelection, BlockPlanner] | None = None

    def block_planner(self, src: Geometry, dst: Geometry, layers: LayerSelection) -> BlockPlanner:
        """Return :func:`compare_blocks`; the last result if ``layers`` is the same object."""
        compared = self._compared
        if compared is None or compared[0] is not layers:
            compared = self._compared = layers, compare_blocks(src, dst, layers, alias=self.same_memory)
        return compared[1]


class RowRange(msgspec.Struct, frozen=True):
    """Row, and the byte in it where a transfer begins (v1)."""

    row: int
    offset: int = 0


def plan_row(
    src: Geometry, dst: Geometry, src_range: RowRange, dst_range: RowRange, *, size: int, layers: LayerSelection
) -> Plan:
    """Plan row -> row, for pull_cache and push_cache.

    ``size`` is bytes per tensor; -1 is the rest of the destination's row, so a longer source row is truncated.
    CacheMismatch: a side is a blocks cache, or the bytes do not fit. CacheNotFound: no such source row. ParamError: no
    such destination row, or a layer range does not fit.
    """
    for side, geometry in (("source", src), ("destination", dst)):
        if not geometry.kind.serves(CacheKind.CACHE):
            raise CacheMismatch(f"the {side} is a blocks cache: use the *_blocks calls")
    _require_src_row(src, src_range.row)
    dst.require_row("batch_index", dst_range.row)
    src_offset, dst_offset = src_range.offset, dst_range.offset
    length = dst.stride - dst_offset if size == -1 else size
    if length < 1 or src_offset + length > src.stride or dst_offset + length > dst.stride:
        at = f" from src_cache_offset={src_offset} to dst_cache_offset={dst_offset}" if src_offset or dst_offset else ""
        raise CacheMismatch(
            f"size={size}: {length} bytes per tensor{at} do not fit, a source row has {src.stride} bytes and a "
            f"destination row {dst.stride}"
        )
    first_dst, first_src, count = layers.tensors(src, dst)
    runs = _native.plan_row(dst_range.row * dst.stride + dst_offset, src_range.row * src.stride + src_offset, length)
    return Plan(first_dst, first_src, count, runs, ordered=False, nbytes=length * count)


def compare_blocks(src: Geometry, dst: Geometry, layers: LayerSelection, *, alias: bool = False) -> BlockPlanner:
    """Return the planner of blocks (interface R26); CacheMismatch if block sizes differ (interface R17).

    ``alias``: both sides have the same tensors.
    """
    for side, geometry in (("source", src), ("destination", dst)):
        if not geometry.kind.serves(CacheKind.BLOCKS):
            raise CacheMismatch(f"the {side} is not a blocks cache")
    if src.stride != dst.stride:
        raise CacheMismatch(f"block sizes differ: source blocks have {src.stride} bytes, destination {dst.stride}")
    tensors = layers.tensors(src, dst)
    return BlockPlanner(
        block_bytes=src.stride,
        dst_count=dst.rows,
        src_count=src.rows,
        alias=alias and tensors[0] == tensors[1],
        tensors=tensors,
    )


def plan_pieces(
    src: Geometry, dst: Geometry, *, src_row: int, dst_blocks: BlockList | NDArray[np.int64], layers: LayerSelection
) -> Plan:
    """Plan row -> blocks: piece i goes to ``dst_blocks[i]``, the last may be short. Errors as in :func:`plan_row`."""
    if not (src.kind.serves(CacheKind.CACHE) and dst.kind.serves(CacheKind.BLOCKS)):
        raise CacheMismatch(
            f"a row of a continuous cache goes into blocks here: source is {src.kind.word}, "
            f"destination {dst.kind.word}; name blocks of a blocks cache by BlocksCacheKey and src_blocks"
        )
    _require_src_row(src, src_row)
    return _native.plan_pieces(
        dst_blocks,
        block_bytes=dst.stride,
        dst_count=dst.rows,
        src_offset=src_row * src.stride,
        src_bytes=src.stride,
        tensors=layers.tensors(src, dst),
    )


def plan_copy_row(src: Geometry, dst: Geometry, *, src_row: int, dst_row: int, offset: int, size: int) -> Plan:
    """Plan copy_cache (interface R8): ``size`` bytes of a row from ``offset`` on, in all tensors; -1 is the rest."""
    if src.num_tensors != dst.num_tensors or src.data_type != dst.data_type:
        raise CacheMismatch(
            f"descriptors must match: src has {src.num_tensors} tensors of data type {DataType(src.data_type).name}, "
            f"dst {dst.num_tensors} of {DataType(dst.data_type).name}"
        )
    src.require_row("src_batch_index", src_row)
    dst.require_row("dst_batch_index", dst_row)
    if size == -1 and src.shape[1:] != dst.shape[1:]:
        raise CacheMismatch(
            f"size=-1 copies whole rows, so row shapes must be equal: src {list(src.shape[1:])}, "
            f"dst {list(dst.shape[1:])}; give size to copy a part"
        )
    length = src.stride - offset if size == -1 else size
    limit = min(src.stride, dst.stride)
    if length < 1 or offset + length > limit:
        raise ParamError(f"offset={offset}, size={size}: the range must lie inside a row of {limit} bytes")
    runs = _native.plan_row(dst_row * dst.stride + offset, src_row * src.stride + offset, length)
    return Plan(0, 0, src.num_tensors, runs, ordered=False, nbytes=length * src.num_tensors)


def _require_src_row(src: Geometry, row: int) -> None:
    if row >= src.rows:
        raise CacheNotFound(f"batch index {row}: the source cache has {src.rows} rows, so at most {src.rows - 1}")


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Plan of one tensor, which a layer-wise transfer applies to each layer and destination."""

    kind: CacheKind  # of the source
    runs: NDArray[np.uint64]  # as in Plan, but destination offsets are relative
    ordered: bool
    unit: int  # bytes of a destination block, or of the row
    blocks: NDArray[np.int64] | None  # of the destination; None for a row
    extent: int  # highest relative end of a run

    @classmethod
    def of_row(cls, src: Geometry, row: int) -> LayerPlan:
        """Plan a whole row; row 0 of a blocks cache is its first block."""
        check_rule(src.kind is not CacheKind.BLOCKS or not row, f"src_batch_index={row}: a blocks cache has only row 0")
        src.require_row("src_batch_index", row)
        runs = _native.plan_row(0, row * src.stride, src.stride)
        return cls(src.kind, runs, ordered=False, unit=src.stride, blocks=None, extent=src.stride)

    @classmethod
    def of_pieces(cls, src: Geometry, dst_blocks: BlockList, unit: int) -> LayerPlan:
        """Plan the first pieces of a tensor: piece i of ``unit`` bytes, the last may be short, to ``dst_blocks[i]``."""
        if not 0 < unit < src.tensor_bytes:
            raise ParamError(
                f"dst_block_memory_size={unit}: a tensor of {src.tensor_bytes} bytes is cut by it, so it must be above "
                "0 and below that"
            )
        pieces = -(-src.tensor_bytes // unit)
        if len(dst_blocks) > pieces:
            raise ParamError(
                f"dst_block_indices has {len(dst_blocks)} entries: a tensor of {src.tensor_bytes} bytes has {pieces} "
                f"pieces of {unit}"
            )
        plan = _native.plan_pieces(
            dst_blocks,
            block_bytes=unit,
            dst_count=_MAX_DST_BYTES // unit,
            src_offset=0,
            src_bytes=src.tensor_bytes,
            dst_name="dst_block_indices",
        )
        return cls._into_blocks(src, plan, unit, dst_blocks)

    @classmethod
    def of_blocks(cls, src: Geometry, src_blocks: BlockList, dst_blocks: BlockList) -> LayerPlan:
        """Plan blocks, or rows, ``src_blocks[i]`` to ``dst_blocks[i]`` in order (interface R26)."""
        plan = _native.plan_blocks(
            dst_blocks,
            src_blocks,
            block_bytes=src.stride,
            dst_count=_MAX_DST_BYTES // src.stride,
            src_count=src.rows,
            alias=False,
            dst_name="dst_block_indices",
            src_name="src_block_indices",
        )
        return cls._into_blocks(src, plan, src.stride, dst_blocks)

    @classmethod
    def _into_blocks(cls, src: Geometry, plan: Plan, unit: int, blocks: BlockList) -> LayerPlan:
        runs = plan.runs
        return cls(src.kind, runs, plan.ordered, unit, blocks.array, extent=int((runs[:, 0] + runs[:, 2]).max()))

    def plan(self, dst_first: int, src_first: int, count: int, *, offset: int, alias: bool) -> Plan:
        """Return the plan of ``count`` tensors, with destinations at byte ``offset``.

        With ``alias``, the same tensors on both sides, runs are ordered (interface R26).
        """
        runs = self.runs + np.array([offset, 0, 0], np.uint64) if offset else self.runs
        nbytes = int(runs[:, 2].sum()) * count
        return Plan(dst_first, src_first, count, runs, ordered=self.ordered or alias, nbytes=nbytes)

    def offset_in(self, dst: Geometry, row: int) -> int:
        """Return the byte offset of the destination in the tensors of ``dst`` (interface R17)."""
        if self.blocks is None:
            return self._row_offset(dst, row)
        if dst.kind is not CacheKind.BLOCKS or row:
            raise CacheMismatch(f"dst_block_indices: row {row} of a {dst.kind.word} cache has no blocks")
        if dst.stride != self.unit:
            raise CacheMismatch(f"block sizes differ: {self.unit} bytes are sent into blocks of {dst.stride}")
        at = int(self.blocks.argmax())
        if self.blocks[at] >= dst.rows:
            raise ParamError(f"dst_block_indices[{at}]={self.blocks[at]}: the destination has {dst.rows} blocks")
        return 0

    def _row_offset(self, dst: Geometry, row: int) -> int:
        if dst.kind is CacheKind.BLOCKS and row:
            raise CacheMismatch(f"batch_index={row} of cache_key: a blocks cache has only row 0")
        both_blocks = dst.kind is CacheKind.BLOCKS and self.kind is CacheKind.BLOCKS
        if self.unit > dst.stride or (both_blocks and self.unit != dst.stride):
            what = "block" if dst.kind is CacheKind.BLOCKS else "row"
            raise CacheMismatch(f"{self.unit} bytes per tensor do not fit a {what} of {dst.stride} at the destination")
        return row * dst.stride
