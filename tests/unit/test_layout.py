"""The geometry of a cache, off a descriptor and off the wire, where a stranger may have written it; plans and layer
ranges, without bytes of a peer: against rows and blocks of NumPy arrays."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from llm_datadist import CacheDesc, DataType, LLMStatusCode, Placement
from llm_datadist._cache import geometry as layout
from llm_datadist._cache.geometry import CacheKind, Geometry, LayerPlan, LayerSelection, RowRange, decode_geometry
from llm_datadist._native import Plan, parse_blocks
from llm_datadist.errors import CacheMismatch, CacheNotFound, LLMException, ParamError, ProtocolError
from tests.support import twin
from tests.support.refusals import raises

Tensor = NDArray[np.uint8]

pytestmark = pytest.mark.covers("CacheKind", "CacheDesc.batch_dim", "Geometry.stride")

ALL = LayerSelection(None, None, 2)


def geometry(
    tensors: int = 4, rows: int = 8, stride: int = 12, kind: CacheKind = CacheKind.CACHE, data_type: int = 4
) -> Geometry:
    return Geometry(kind, tensors, rows, stride, rows * stride, (rows, stride), data_type, 1)


def blocks(tensors: int = 4, rows: int = 8, stride: int = 12) -> Geometry:
    return geometry(tensors, rows, stride, CacheKind.BLOCKS)


def mismatch(kind: type[LLMException], call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    raises(caught.value, kind, parts)


def check(plan: Plan, dst: Geometry, src: Geometry, move: Callable[[Tensor, Tensor], None]) -> None:
    """The plan leaves the bytes that ``move(rows of dst, rows of src)`` leaves in every tensor, and counts them."""
    to, from_ = (twin.noise(seed, of.num_tensors, of.tensor_bytes) for seed, of in ((1, dst), (2, src)))
    wanted = [tensor.copy().reshape(dst.rows, dst.stride) for tensor in to]
    for ours, theirs in zip(wanted, from_, strict=True):
        move(ours, theirs.reshape(src.rows, src.stride))
    twin.execute(plan, to, from_)
    for got, expected in zip(to, wanted, strict=True):
        np.testing.assert_array_equal(got, expected.reshape(-1))
    assert plan.nbytes == plan.count * int(plan.runs[:, 2].sum())


# --- interface R14: layer ranges and tensor_num_per_layer -------------------------------------------------------------

BEYOND = 2**70


def test_r14_a_range_is_layers_of_so_many_tensors_and_none_is_all_of_them() -> None:
    cases: list[tuple[range | None, range | None, int, tuple[int, int], tuple[int, int, int]]] = [
        *[(None, None, per_layer, (5, 5), (0, 0, 5)) for per_layer in (1, 2, 3, 4, 5, 2**32 - 1)],
        (range(1), range(1), 2, (6, 6), (0, 0, 2)),
        (range(1, 3), range(2), 2, (6, 6), (0, 2, 4)),
        (range(2), range(1, 3), 2, (6, 6), (2, 0, 4)),
        (range(5, 6), range(1), 1, (6, 6), (0, 5, 1)),
        (range(1), range(1), 6, (6, 6), (0, 0, 6)),  # tensor_num_per_layer goes up to num_tensors
        (range(1, 2), range(1, 2), 3, (6, 6), (3, 3, 3)),
        (range(3), None, 2, (6, 6), (0, 0, 6)),
        (None, range(3), 2, (6, 6), (0, 0, 6)),
        (range(3, 4), None, 2, (8, 2), (0, 6, 2)),  # unequal tensor counts meet through ranges
        (None, range(3, 4), 2, (2, 8), (6, 0, 2)),
    ]
    for src, dst, per_layer, counts, expected in cases:
        selection = LayerSelection(src, dst, per_layer)
        selection.check_local("src_layer_range", counts[0])
        selection.check_local("dst_layer_range", counts[1])
        assert selection.tensors(geometry(counts[0]), geometry(counts[1])) == expected


def test_r14_default_ranges_need_equal_tensor_counts_and_given_ones_whole_layers() -> None:
    mismatch(CacheMismatch, lambda: ALL.tensors(geometry(4), geometry(6)), "source has 4", "destination 6")
    for count, per_layer in ((5, 2), (4, 3), (4, 8), (4, 2**32 - 1)):
        for src, dst in ((range(1), None), (None, range(1)), (range(1), range(1))):
            selection, cache = LayerSelection(src, dst, per_layer), geometry(count)
            for check in (
                partial(selection.check_local, "src_layer_range", count),
                partial(selection.check_local, "dst_layer_range", count),
                partial(selection.tensors, cache, cache),
            ):
                mismatch(ParamError, check, f"tensor_num_per_layer={per_layer}", f"{count} te")


def test_r14_unequal_lengths_and_ranges_outside_a_cache_are_refused_at_either_end() -> None:
    far = range(BEYOND)
    pairs = ((range(2), range(1)), (range(1), None), (None, range(1, 2)), (far, range(1)), (range(1), far), (far, None))
    for src, dst in pairs:
        selection = LayerSelection(src, dst, 2)
        with pytest.raises(ParamError, match="layer") as caught:
            selection.tensors(geometry(), geometry())
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
        # The end that knows both lengths by itself says so before it asks the peer.
        for remote, local_name in ((src, "dst_layer_range"), (dst, "src_layer_range")):
            if remote is not None:
                with pytest.raises(ParamError, match=r"range=.*( stands for all 2 layers|has 2 layers of 2 tensors)"):
                    selection.check_local(local_name, 4)
    for layers in (range(3), range(2, 3), range(1, BEYOND), range(BEYOND, BEYOND + 1)):
        one, source, target = range(1), f"src_layer_range={layers}", f"dst_layer_range={layers}"
        both, to, from_ = (LayerSelection(*ends, 2) for ends in ((layers, layers), (one, layers), (layers, one)))
        mismatch(ParamError, partial(both.check_local, "src_layer_range", 4), source, "2 layers of 2 tensors")
        mismatch(ParamError, partial(to.tensors, geometry(), geometry()), target)
        mismatch(ParamError, partial(from_.tensors, geometry(), geometry()), source)


# --- rows -------------------------------------------------------------------------------------------------------------

a_cache = st.builds(geometry, st.just(3), st.integers(1, 4), st.integers(1, 30))


@given(a_cache, a_cache, st.data())
def test_i7_plan_row_moves_bytes_inside_one_row(src: Geometry, dst: Geometry, data: st.DataObject) -> None:
    src_row, dst_row = (data.draw(st.integers(0, end.rows - 1)) for end in (src, dst))
    src_at, dst_at = (data.draw(st.just(0) | st.integers(0, end.stride)) for end in (src, dst))
    size = data.draw(st.just(-1) | st.integers(1, 12))
    length = dst.stride - dst_at if size == -1 else size

    rows = RowRange(src_row, src_at), RowRange(dst_row, dst_at)
    plan = partial(layout.plan_row, src, dst, *rows, size=size, layers=ALL)

    def move(to: Tensor, from_: Tensor) -> None:
        to[dst_row, dst_at : dst_at + length] = from_[src_row, src_at : src_at + length]

    if length < 1 or src_at + length > src.stride or dst_at + length > dst.stride:
        at = f"from src_cache_offset={src_at} to dst_cache_offset={dst_at}" if src_at or dst_at else "tensor do not"
        mismatch(CacheMismatch, plan, f"size={size}", f"{src.stride} bytes", f"row {dst.stride}", at)
    else:
        check(plan(), dst, src, move)
        assert not plan().ordered


@given(a_cache, a_cache, st.integers(0, 32), st.just(-1) | st.integers(1, 32), st.data())
def test_r08_plan_copy_row_moves_a_range_of_a_row_to_the_same_offset(
    src: Geometry, dst: Geometry, offset: int, size: int, data: st.DataObject
) -> None:
    src_row, dst_row = (data.draw(st.integers(0, end.rows - 1)) for end in (src, dst))
    end, most = src.stride if size == -1 else offset + size, min(src.stride, dst.stride)

    plan = partial(layout.plan_copy_row, src, dst, src_row=src_row, dst_row=dst_row, offset=offset, size=size)

    def move(to: Tensor, from_: Tensor) -> None:
        to[dst_row, offset:end] = from_[src_row, offset:end]

    if size == -1 and src.stride != dst.stride:
        mismatch(CacheMismatch, plan, "size=-1", "row shapes")
    elif end <= offset or end > most:
        mismatch(ParamError, plan, f"offset={offset}", f"size={size}", f"{most} bytes")
    else:
        check(plan(), dst, src, move)
        assert not plan().ordered


def test_r08_equal_bytes_of_another_row_shape_need_a_size() -> None:
    src, dst = geometry(), msgspec.structs.replace(geometry(), shape=(8, 3, 4))
    plan = partial(layout.plan_copy_row, src, dst, src_row=0, dst_row=0, offset=0)
    mismatch(CacheMismatch, partial(plan, size=-1), "[12]", "[3, 4]")
    assert plan(size=12).nbytes == 4 * 12


# --- blocks and pieces ------------------------------------------------------------------------------------------------


def plan_blocks(
    src: Geometry, dst: Geometry, pairs: Sequence[tuple[int, int]], layers: LayerSelection = ALL, *, alias: bool = False
) -> Plan:
    """Plan (dst block, src block) pairs."""
    lists = np.array(pairs, np.int64).reshape(-1, 2).T.copy()
    return layout.compare_blocks(src, dst, layers, alias=alias).plan(lists[0], lists[1])


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 9), st.booleans(), st.data())
def test_r26_blocks_are_planned_in_the_order_given_and_in_the_rows_of_either_cache(
    src_rows: int, dst_rows: int, stride: int, alias: bool, data: st.DataObject
) -> None:
    """What such a plan moves: test_native_plan.py, test_native_movers.py."""
    src, dst = blocks(3, src_rows, stride), blocks(3, src_rows if alias else dst_rows, stride)
    pairs = data.draw(st.lists(st.tuples(st.integers(0, dst.rows - 1), st.integers(0, src_rows - 1)), max_size=30))
    to, from_ = [d for d, _ in pairs], [s for _, s in pairs]
    same_plan(plan_blocks(src, dst, pairs, alias=alias), *twin.plan_blocks(to, from_, stride, alias=alias))
    for beyond in ((dst.rows, 0), (0, src_rows)):
        with pytest.raises(ParamError, match="must be in"):
            plan_blocks(src, dst, [beyond], alias=alias)


def same_plan(plan: Plan, runs: NDArray[np.uint64], ordered: bool) -> None:
    """It is that of all three tensors."""
    assert (plan.runs.tolist(), plan.ordered) == (runs.tolist(), ordered)
    assert (plan.dst_first, plan.src_first, plan.count) == (0, 0, 3)
    assert plan.nbytes == 3 * int(runs[:, 2].sum())


def test_r26_a_plan_is_of_the_layers_given_and_the_same_block_of_another_one_is_not_the_same_memory() -> None:
    cache = blocks()
    plan = plan_blocks(cache, cache, [(1, 1), (2, 2)], LayerSelection(range(1), range(1, 2), 2), alias=True)
    assert (plan.dst_first, plan.src_first, plan.count, plan.nbytes) == (2, 0, 2, 2 * 2 * cache.stride)
    layers = LayerSelection(range(2, 3), range(1, 2), 2)
    plan = layout.plan_row(geometry(6), geometry(4), RowRange(3), RowRange(1), size=-1, layers=layers)
    assert (plan.dst_first, plan.src_first, plan.count, plan.nbytes) == (2, 4, 2, 2 * 12)


@given(a_cache, st.integers(1, 20), st.lists(st.integers(0, 7), min_size=1, max_size=12), st.data())
def test_i8_plan_pieces_cuts_a_row_and_the_last_piece_may_be_short(
    src: Geometry, unit: int, targets: list[int], data: st.DataObject
) -> None:
    dst, row = blocks(3, 8, unit), data.draw(st.integers(0, src.rows - 1))
    pieces = math.ceil(src.stride / unit)
    plan = partial(layout.plan_pieces, src, dst, src_row=row, dst_blocks=np.array(targets, np.int64), layers=ALL)

    if len(targets) > pieces:
        mismatch(ParamError, plan, f"dst_blocks has {len(targets)}", f"{pieces} pieces of {unit}")
    else:
        same_plan(plan(), *twin.plan_pieces(targets, unit, row * src.stride, src.stride))


# --- refusals ---------------------------------------------------------------------------------------------------------


def row(src: Geometry, dst: Geometry, src_row: int = 0, dst_row: int = 0) -> Plan:
    return layout.plan_row(src, dst, RowRange(src_row), RowRange(dst_row), size=-1, layers=ALL)


def copy(src: Geometry, dst: Geometry, src_row: int = 0, dst_row: int = 0) -> Plan:
    return layout.plan_copy_row(src, dst, src_row=src_row, dst_row=dst_row, offset=0, size=4)


def pieces(src: Geometry, dst: Geometry, src_row: int = 0) -> Plan:
    return layout.plan_pieces(src, dst, src_row=src_row, dst_blocks=np.array([0], np.int64), layers=ALL)


def test_r17_wrong_kinds_rows_and_blocks_are_refused_by_name() -> None:
    low, two, tall = geometry(rows=2), (0, 2), blocks(rows=9)
    cases: list[
        tuple[type[LLMException], Callable[..., Plan], Geometry, Geometry, tuple[Any, ...], tuple[str, ...]]
    ] = [
        (CacheMismatch, row, blocks(), geometry(), (), ("source", "blocks cache")),
        (CacheMismatch, row, geometry(), blocks(), (), ("destination", "blocks cache")),
        (CacheNotFound, row, low, geometry(), (2,), ("batch index 2", "2 rows, so at most 1")),
        (ParamError, row, geometry(), low, two, ("batch_index=2", "2 rows")),
        (CacheMismatch, plan_blocks, blocks(stride=12), blocks(stride=16), ([(0, 0)],), ("12 bytes", "16")),
        (CacheMismatch, plan_blocks, geometry(), blocks(), ([(0, 0)],), ("source is not",)),
        (CacheMismatch, plan_blocks, blocks(), geometry(), ([(0, 0)],), ("destination",)),
        (ParamError, plan_blocks, blocks(), tall, ([(0, 0), (1, 8)],), ("src_blocks[1] is 8", "[0, 8)")),
        (ParamError, plan_blocks, blocks(), tall, ([(9, 0), (1, 1)],), ("dst_blocks[0] is 9", "[0, 9)")),
        (ParamError, plan_blocks, blocks(), tall, ([(0, 2**62)],), ("src_blocks[0]",)),
        (CacheMismatch, pieces, blocks(), blocks(), (), ("source is blocks", "BlocksCacheKey")),
        (CacheMismatch, pieces, geometry(), geometry(), (), ("destination continuous",)),
        (CacheNotFound, pieces, low, blocks(), (2,), ("2 rows, so at most 1",)),
        (CacheMismatch, copy, geometry(), geometry(5), (), ("src has 4 tensors", "dst 5")),
        (CacheMismatch, copy, geometry(), geometry(data_type=2), (), ("data type DT_UINT8", "of DT_INT8")),
        (ParamError, copy, geometry(), geometry(), (8, 0), ("src_batch_index=8", "8 rows")),
        (ParamError, copy, geometry(), low, two, ("dst_batch_index=2", "2 rows")),
    ]
    for kind, plan, src, dst, more, parts in cases:
        mismatch(kind, partial(plan, src, dst, *more), *parts)
    uneven = partial(layout.compare_blocks(blocks(), blocks(), ALL).plan, np.arange(1), np.arange(2))
    mismatch(ParamError, uneven, "dst_blocks has 1", "src_blocks has 2")


# --- the geometry itself ----------------------------------------------------------------------------------------------

HONEST = geometry()


def test_geometry_counts_rows_by_the_first_dimension_whatever_the_batch_dimension() -> None:
    for kind, tensors in zip(CacheKind, (1, 2, 3), strict=True):
        desc = CacheDesc(tensors, [4, 5, 6], DataType.DT_FLOAT16, Placement.HOST, batch_dim_index=1)
        assert Geometry.of(desc, kind) == Geometry(kind, tensors, 4, 60, 240, (4, 5, 6), 1, 0)
    with pytest.raises(ParamError, match="num_tensors=0"):
        Geometry.of(CacheDesc(0, [4], DataType.DT_INT8), CacheKind.CACHE)


@pytest.mark.parametrize("shape", [(8, 12), (8, 12) + (1,) * 298])  # one whose text is kept, one whose is too long
def test_a_geometry_travels_unchanged_and_one_that_lies_is_refused_however_often(shape: tuple[int, ...]) -> None:
    honest = msgspec.structs.replace(HONEST, shape=shape)
    largest = msgspec.structs.replace(honest, num_tensors=2**20, tensor_bytes=2**63 - 1)
    smallest = msgspec.structs.replace(honest, num_tensors=1, rows=1, stride=1, tensor_bytes=1)
    lies = [
        *[{"num_tensors": count} for count in (0, -1, 2**20 + 1)],
        *[{"tensor_bytes": nbytes} for nbytes in (0, 8 * 12 - 1, 2**63)],
        *[{"rows": rows} for rows in (0, -1)],
        *[{"stride": stride} for stride in (0, -12)],
        *[{"rows": rows, "stride": stride} for rows, stride in ((2**63, 2**63), (-8, -12))],
    ]
    for change in lies * 2:
        for sound in (honest, largest, smallest):
            assert decode_geometry(msgspec.msgpack.encode(sound)) == sound
        with pytest.raises(ProtocolError, match="impossible cache geometry") as caught:
            decode_geometry(msgspec.msgpack.encode(msgspec.structs.replace(honest, **change)))
        assert caught.value.status_code is LLMStatusCode.LLM_FAILED
        assert "\n" not in str(caught.value)


def test_what_is_no_wire_geometry_is_a_protocol_error() -> None:
    values = [[7, 4, 8, 12, 96, [8, 12], 4, 1]]  # no such kind
    values += [[0, 4, 8, 12, 96, ["8"], 4, 1], [0, 4.0, 8, 12, 96, [8, 12], 4, 1], [0, 4, None, 12, 96, [8, 12], 4, 1]]
    for wire in [b"", b"\x90", b"\xc0", *map(msgspec.msgpack.encode, values)]:
        with pytest.raises(ProtocolError, match="an invalid cache geometry"):
            decode_geometry(wire)


def test_require_row_and_require_kind_name_the_argument_and_what_would_do() -> None:
    for rows in (1, 8):
        cache = geometry(rows=rows)
        cache.require_row("batch_index", rows - 1)
        with pytest.raises(ParamError, match=f"batch_index={rows}: the cache has {rows} rows, so at most {rows - 1}"):
            cache.require_row("batch_index", rows)
    HONEST.require_kind("cache", CacheKind.CACHE)
    with pytest.raises(ParamError, match="cache: a blocks cache is needed here, this is a continuous one"):
        HONEST.require_kind("cache", CacheKind.BLOCKS)


def test_a_piece_of_a_layer_is_above_nothing_and_below_a_tensor() -> None:
    src = geometry()
    for unit in (-1, 0, src.tensor_bytes, src.tensor_bytes + 1):
        of_pieces = partial(LayerPlan.of_pieces, src, parse_blocks("b", [0]), unit)
        mismatch(ParamError, of_pieces, f"size={unit}: ")
    plan = LayerPlan.of_pieces(src, parse_blocks("b", [3, 0]), src.tensor_bytes // 4)
    assert (plan.unit, plan.extent, plan.runs.tolist()) == (24, 96, [[72, 0, 24], [0, 24, 24]])
    mismatch(
        ParamError, lambda: LayerPlan.of_pieces(src, parse_blocks("b", [0] * 5), 24), "has 5 entries", "4 pieces of 24"
    )
