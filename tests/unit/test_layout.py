"""Plans and layer ranges, without bytes of a peer: against rows and blocks of NumPy arrays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist import LLMStatusCode
from llm_datadist._cache import geometry as layout
from llm_datadist._cache.geometry import CacheKind, Geometry, LayerSelection, RowRange
from llm_datadist.errors import CacheMismatch, CacheNotFound, LLMException, ParamError
from tests.unit import twin

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from llm_datadist._native import Plan

ALL = LayerSelection(None, None, 2)


def geometry(
    tensors: int = 4, rows: int = 8, stride: int = 12, kind: CacheKind = CacheKind.CACHE, data_type: int = 4
) -> Geometry:
    return Geometry(kind, tensors, rows, stride, rows * stride, (rows, stride), data_type, 1)


def blocks(tensors: int = 4, rows: int = 8, stride: int = 12) -> Geometry:
    return geometry(tensors, rows, stride, CacheKind.BLOCKS)


def arrays(of: Geometry, seed: int) -> list[NDArray[np.uint8]]:
    return twin.noise(seed, of.num_tensors, of.tensor_bytes)


def indices(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def mismatch(kind: type[LLMException], call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
    assert "\n" not in str(caught.value)
    expected = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST if kind is CacheNotFound else LLMStatusCode.LLM_PARAM_INVALID
    assert caught.value.status_code is expected


def check(plan: Plan, dst: Geometry, src: Geometry, oracle: Callable[[Any, Any], None]) -> None:
    """The plan leaves the bytes that ``oracle(dst row arrays, src row arrays)`` leaves, and counts them."""
    to, from_ = arrays(dst, 1), arrays(src, 2)
    wanted = [tensor.copy().reshape(dst.rows, dst.stride) for tensor in to]
    oracle(wanted, [tensor.reshape(src.rows, src.stride) for tensor in from_])
    twin.execute(plan, to, from_)
    for got, expected in zip(to, wanted, strict=True):
        np.testing.assert_array_equal(got, expected.reshape(-1))
    assert plan.nbytes == plan.count * int(plan.runs[:, 2].sum())


# --- interface R14: layer ranges and tensor_num_per_layer -------------------------------------------------------------


@pytest.mark.parametrize("per_layer", [1, 2, 3, 4, 5, 2**32 - 1])
def test_r14_default_ranges_move_every_tensor_whatever_the_layer_size(per_layer: int) -> None:
    selection = LayerSelection(None, None, per_layer)
    selection.check_local("dst_layer_range", 5)
    assert selection.tensors(geometry(5), geometry(5)) == (0, 0, 5)


def test_r14_default_ranges_need_equal_tensor_counts() -> None:
    mismatch(CacheMismatch, lambda: ALL.tensors(geometry(4), geometry(6)), "source has 4", "destination 6")


@pytest.mark.parametrize(
    ("src", "dst", "per_layer", "expected"),
    [
        (range(1), range(1), 2, (0, 0, 2)),
        (range(1, 3), range(2), 2, (0, 2, 4)),
        (range(2), range(1, 3), 2, (2, 0, 4)),
        (range(5, 6), range(1), 1, (0, 5, 1)),
        (range(1), range(1), 6, (0, 0, 6)),  # tensor_num_per_layer goes up to num_tensors
        (range(1, 2), range(1, 2), 3, (3, 3, 3)),
        (range(3), None, 2, (0, 0, 6)),
        (None, range(3), 2, (0, 0, 6)),
    ],
)
def test_r14_a_range_is_layers_of_so_many_tensors(
    src: range | None, dst: range | None, per_layer: int, expected: tuple[int, int, int]
) -> None:
    selection = LayerSelection(src, dst, per_layer)
    selection.check_local("src_layer_range", 6)
    selection.check_local("dst_layer_range", 6)
    assert selection.tensors(geometry(6), geometry(6)) == expected


@pytest.mark.parametrize(("src", "dst"), [(range(1), None), (None, range(1)), (range(1), range(1))])
@pytest.mark.parametrize(("tensors", "per_layer"), [(5, 2), (4, 3), (4, 8), (4, 2**32 - 1)])
def test_r14_a_given_range_needs_whole_layers(
    src: range | None, dst: range | None, tensors: int, per_layer: int
) -> None:
    selection = LayerSelection(src, dst, per_layer)
    for name in ("src_layer_range", "dst_layer_range"):
        mismatch(
            ParamError,
            lambda name=name: selection.check_local(name, tensors),  # type: ignore[misc]  # bound at once
            f"tensor_num_per_layer={per_layer}",
            f"{tensors} tensors",
        )
    mismatch(ParamError, lambda: selection.tensors(geometry(tensors), geometry(tensors)), "tensor_num_per_layer")


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (range(2), range(1)),
        (range(1), None),
        (None, range(1, 2)),
        (range(2**70), range(1)),
        (range(1), range(2**70)),
        (range(2**70), None),
    ],
)
def test_r14_unequal_lengths_are_refused_and_none_stands_for_all_layers(src: range | None, dst: range | None) -> None:
    selection = LayerSelection(src, dst, 2)
    four = geometry(4)
    with pytest.raises(ParamError, match="layer") as caught:
        selection.tensors(four, four)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    # The end that knows both lengths by itself says so before it asks the peer.
    if src is not None:
        with pytest.raises(ParamError, match="layer_range"):
            selection.check_local("dst_layer_range", 4)
    if dst is not None:
        with pytest.raises(ParamError, match="layer_range"):
            selection.check_local("src_layer_range", 4)


@pytest.mark.parametrize("layers", [range(3), range(2, 3), range(1, 2**70), range(2**70, 2**70 + 1)])
def test_r14_a_range_outside_its_cache_is_refused_at_either_end(layers: range) -> None:
    inside = range(1)
    mismatch(
        ParamError,
        lambda: LayerSelection(layers, layers, 2).check_local("src_layer_range", 4),
        f"src_layer_range={layers}",
        "2 layers of 2 tensors",
    )
    mismatch(
        ParamError,
        lambda: LayerSelection(inside, layers, 2).tensors(geometry(4), geometry(4)),
        f"dst_layer_range={layers}",
    )
    mismatch(
        ParamError,
        lambda: LayerSelection(layers, inside, 2).tensors(geometry(4), geometry(4)),
        f"src_layer_range={layers}",
    )


def test_r14_unequal_tensor_counts_meet_through_ranges() -> None:
    assert LayerSelection(range(3, 4), None, 2).tensors(geometry(8), geometry(2)) == (0, 6, 2)
    assert LayerSelection(None, range(3, 4), 2).tensors(geometry(2), geometry(8)) == (6, 0, 2)


# --- rows ---------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 5),
    st.tuples(st.integers(1, 6), st.integers(1, 40)),
    st.tuples(st.integers(1, 6), st.integers(1, 40)),
    st.data(),
)
def test_i7_plan_row_moves_the_start_of_one_row(
    tensors: int, source: tuple[int, int], target: tuple[int, int], data: st.DataObject
) -> None:
    src, dst = geometry(tensors, *source), geometry(tensors, *target)
    src_row = data.draw(st.integers(0, src.rows - 1))
    dst_row = data.draw(st.integers(0, dst.rows - 1))
    size = data.draw(st.one_of(st.just(-1), st.integers(1, 50)))
    length = dst.stride if size == -1 else size

    def plan() -> Plan:
        return layout.plan_row(src, dst, RowRange(src_row), RowRange(dst_row), size=size, layers=ALL)

    if length > min(src.stride, dst.stride):
        mismatch(CacheMismatch, plan, f"size={size}", str(src.stride), str(dst.stride))
        return

    def oracle(to: Any, from_: Any) -> None:
        for t, f in zip(to, from_, strict=True):
            t[dst_row, :length] = f[src_row, :length]

    check(plan(), dst, src, oracle)


@given(
    st.integers(1, 3),
    st.tuples(st.integers(1, 4), st.integers(1, 30)),
    st.tuples(st.integers(1, 4), st.integers(1, 30)),
    st.data(),
)
def test_plan_row_with_offsets_moves_bytes_inside_one_row(
    tensors: int, source: tuple[int, int], target: tuple[int, int], data: st.DataObject
) -> None:
    src, dst = geometry(tensors, *source), geometry(tensors, *target)
    src_row, dst_row = data.draw(st.integers(0, src.rows - 1)), data.draw(st.integers(0, dst.rows - 1))
    src_at, dst_at = data.draw(st.integers(0, 35)), data.draw(st.integers(0, 35))
    size = data.draw(st.one_of(st.just(-1), st.integers(1, 35)))
    length = dst.stride - dst_at if size == -1 else size

    def plan() -> Plan:
        return layout.plan_row(src, dst, RowRange(src_row, src_at), RowRange(dst_row, dst_at), size=size, layers=ALL)

    if length < 1 or src_at + length > src.stride or dst_at + length > dst.stride:
        mismatch(CacheMismatch, plan, f"size={size}", str(src.stride), str(dst.stride))
        return

    def oracle(to: Any, from_: Any) -> None:
        for t, f in zip(to, from_, strict=True):
            t[dst_row, dst_at : dst_at + length] = f[src_row, src_at : src_at + length]

    check(plan(), dst, src, oracle)


def test_plan_row_moves_the_selected_tensors_only() -> None:
    src, dst = geometry(6), geometry(4)
    layers = LayerSelection(range(2, 3), range(1, 2), 2)
    plan = layout.plan_row(src, dst, RowRange(3), RowRange(1), size=-1, layers=layers)

    def oracle(to: Any, from_: Any) -> None:
        to[2][1], to[3][1] = from_[4][3], from_[5][3]

    check(plan, dst, src, oracle)


def test_plan_row_refuses_the_wrong_kinds_and_rows() -> None:
    def plan(src: Geometry, dst: Geometry, src_row: int = 0, dst_row: int = 0) -> Callable[[], Plan]:
        return lambda: layout.plan_row(src, dst, RowRange(src_row), RowRange(dst_row), size=-1, layers=ALL)

    mismatch(CacheMismatch, plan(blocks(), geometry()), "source", "blocks cache")
    mismatch(CacheMismatch, plan(geometry(), blocks()), "destination", "blocks cache")
    mismatch(CacheNotFound, plan(geometry(rows=2), geometry(), 2), "2", "rows")
    mismatch(ParamError, plan(geometry(), geometry(rows=2), 0, 2), "batch_index=2", "2 rows")


# --- blocks -------------------------------------------------------------------------------------------------------


def plan_blocks(
    src: Geometry, dst: Geometry, src_blocks: Any, dst_blocks: Any, layers: LayerSelection, *, alias: bool = False
) -> Plan:
    return layout.compare_blocks(src, dst, layers, alias=alias).plan(dst_blocks, src_blocks)


@given(st.integers(1, 4), st.integers(1, 20), st.integers(1, 20), st.integers(1, 9), st.data())
def test_r26_plan_blocks_is_the_pairs_one_after_the_other(
    tensors: int, src_rows: int, dst_rows: int, stride: int, data: st.DataObject
) -> None:
    src, dst = blocks(tensors, src_rows, stride), blocks(tensors, dst_rows, stride)
    pairs = data.draw(st.lists(st.tuples(st.integers(0, dst_rows - 1), st.integers(0, src_rows - 1)), max_size=30))
    plan = plan_blocks(src, dst, indices(*(s for _, s in pairs)), indices(*(d for d, _ in pairs)), ALL)

    def oracle(to: Any, from_: Any) -> None:
        for t, f in zip(to, from_, strict=True):
            for d, s in pairs:
                t[d] = f[s]

    check(plan, dst, src, oracle)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20))
def test_r26_chains_within_one_memory_take_effect_in_order(pairs: list[tuple[int, int]]) -> None:
    cache = blocks()
    plan = plan_blocks(cache, cache, indices(*(s for _, s in pairs)), indices(*(d for d, _ in pairs)), ALL, alias=True)
    memory = arrays(cache, 3)
    wanted = [tensor.copy().reshape(cache.rows, -1) for tensor in memory]
    for tensor in wanted:
        for d, s in pairs:
            tensor[d] = tensor[s].copy()
    twin.execute(plan, memory, memory)
    for got, expected in zip(memory, wanted, strict=True):
        np.testing.assert_array_equal(got, expected.reshape(-1))


def test_r26_the_same_block_of_another_layer_is_not_the_same_memory() -> None:
    cache = blocks()
    layers = LayerSelection(range(1), range(1, 2), 2)
    plan = plan_blocks(cache, cache, indices(1, 2), indices(1, 2), layers, alias=True)
    assert (plan.dst_first, plan.src_first, plan.count, plan.nbytes) == (2, 0, 2, 2 * 2 * cache.stride)


def test_r17_plan_blocks_refuses_different_block_sizes() -> None:
    mismatch(
        CacheMismatch,
        lambda: plan_blocks(blocks(stride=12), blocks(stride=16), indices(0), indices(0), ALL),
        "12 bytes",
        "16",
    )


@pytest.mark.parametrize(
    ("src", "dst", "parts"),
    [
        ((0, 1), (0,), ("dst_blocks has 1", "src_blocks has 2")),
        ((0, 8), (0, 1), ("src_blocks[1] is 8", "[0, 8)")),
        ((0, 1), (9, 1), ("dst_blocks[0] is 9", "[0, 9)")),
        ((2**62,), (0,), ("src_blocks[0]",)),
    ],
)
def test_plan_blocks_refuses_wrong_lists(src: tuple[int, ...], dst: tuple[int, ...], parts: tuple[str, ...]) -> None:
    def plan() -> Plan:
        return plan_blocks(blocks(rows=8), blocks(rows=9), indices(*src), indices(*dst), ALL)

    mismatch(ParamError, plan, *parts)


def test_plan_blocks_refuses_the_wrong_kinds() -> None:
    mismatch(CacheMismatch, lambda: plan_blocks(geometry(), blocks(), indices(0), indices(0), ALL), "source is not")
    mismatch(CacheMismatch, lambda: plan_blocks(blocks(), geometry(), indices(0), indices(0), ALL), "destination")


# --- pieces -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 50), st.integers(1, 20), st.data())
def test_i8_plan_pieces_cuts_a_row_and_the_last_piece_may_be_short(
    tensors: int, src_rows: int, row_bytes: int, block_bytes: int, data: st.DataObject
) -> None:
    src, dst = geometry(tensors, src_rows, row_bytes), blocks(tensors, 8, block_bytes)
    row = data.draw(st.integers(0, src_rows - 1))
    targets = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=12))
    pieces = math.ceil(row_bytes / block_bytes)

    def plan() -> Plan:
        return layout.plan_pieces(src, dst, src_row=row, dst_blocks=indices(*targets), layers=ALL)

    if len(targets) > pieces:
        mismatch(ParamError, plan, f"dst_blocks has {len(targets)}", f"{pieces} pieces of {block_bytes}")
        return

    def oracle(to: Any, from_: Any) -> None:
        for t, f in zip(to, from_, strict=True):
            for i, d in enumerate(targets):
                piece = f[row, i * block_bytes : (i + 1) * block_bytes]
                t[d, : len(piece)] = piece

    check(plan(), dst, src, oracle)


def test_plan_pieces_refuses_the_wrong_kinds_and_rows() -> None:
    def plan(src: Geometry, dst: Geometry, row: int = 0) -> Callable[[], Plan]:
        return lambda: layout.plan_pieces(src, dst, src_row=row, dst_blocks=indices(0), layers=ALL)

    mismatch(CacheMismatch, plan(blocks(), blocks()), "source is blocks", "BlocksCacheKey")
    mismatch(CacheMismatch, plan(geometry(), geometry()), "destination continuous")
    mismatch(CacheNotFound, plan(geometry(rows=2), blocks(), 2), "2 rows")


# --- copies inside one process (interface R8) -------------------------------------------------------------------------


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 30)),
    st.tuples(st.integers(1, 4), st.integers(1, 30)),
    st.integers(0, 32),
    st.one_of(st.just(-1), st.integers(1, 32)),
    st.data(),
)
def test_r08_plan_copy_row_moves_a_range_of_a_row_to_the_same_offset(
    source: tuple[int, int], target: tuple[int, int], offset: int, size: int, data: st.DataObject
) -> None:
    src, dst = geometry(3, *source), geometry(3, *target)
    src_row, dst_row = data.draw(st.integers(0, src.rows - 1)), data.draw(st.integers(0, dst.rows - 1))

    def plan() -> Plan:
        return layout.plan_copy_row(src, dst, src_row=src_row, dst_row=dst_row, offset=offset, size=size)

    if size == -1 and src.stride != dst.stride:
        mismatch(CacheMismatch, plan, "size=-1", "row shapes")
        return
    end = src.stride if size == -1 else offset + size
    if end <= offset or end > min(src.stride, dst.stride):
        mismatch(ParamError, plan, f"offset={offset}", f"size={size}", f"{min(src.stride, dst.stride)} bytes")
        return

    def oracle(to: Any, from_: Any) -> None:
        for t, f in zip(to, from_, strict=True):
            t[dst_row, offset:end] = f[src_row, offset:end]

    check(plan(), dst, src, oracle)


@pytest.mark.parametrize(
    ("dst", "rows", "kind", "parts"),
    [
        (geometry(5), (0, 0), CacheMismatch, ("src has 4 tensors", "dst 5")),
        (geometry(data_type=2), (0, 0), CacheMismatch, ("data type DT_UINT8", "of DT_INT8")),
        (geometry(), (8, 0), ParamError, ("src_batch_index=8", "8 rows")),
        (geometry(rows=2), (0, 2), ParamError, ("dst_batch_index=2", "2 rows")),
    ],
)
def test_r08_descriptors_that_do_not_match_are_refused(
    dst: Geometry, rows: tuple[int, int], kind: type[LLMException], parts: tuple[str, ...]
) -> None:
    def plan() -> Plan:
        return layout.plan_copy_row(geometry(), dst, src_row=rows[0], dst_row=rows[1], offset=0, size=4)

    mismatch(kind, plan, *parts)


def test_r08_equal_bytes_of_another_row_shape_need_a_size() -> None:
    src, dst = geometry(), msgspec.structs.replace(geometry(), shape=(8, 3, 4))

    def plan(size: int) -> Plan:
        return layout.plan_copy_row(src, dst, src_row=0, dst_row=0, offset=0, size=size)

    mismatch(CacheMismatch, lambda: plan(-1), "[12]", "[3, 4]")
    assert plan(12).nbytes == 4 * 12
