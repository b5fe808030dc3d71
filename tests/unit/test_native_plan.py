"""The planner against its NumPy twin, the pairs of interface R26, and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llm_datadist._native import parse_blocks, parse_indices, plan_blocks, plan_pieces, plan_row
from llm_datadist.errors import ParamError
from tests.support import twin

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS = 24
# A small range makes neighbours, duplicates and chains common.
PAIRS = st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)), max_size=40)


def blocks(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return parse_indices("blocks", values)


@given(PAIRS, st.booleans(), st.integers(1, 70_000), st.sampled_from([BLOCKS, 10**6, 10**14]))
def test_blocks_match_the_twin(pairs: list[tuple[int, int]], alias: bool, block_bytes: int, count: int) -> None:
    # A count far above the list's length takes the planner's other set.
    spread = count // BLOCKS
    dst, src = [d * spread for d, _ in pairs], [s * spread for _, s in pairs]
    if count == BLOCKS:
        src = [s + 3 for s in src] if not alias else src
    runs, ordered = twin.parts_of(
        plan_blocks(
            blocks(*dst), blocks(*src), block_bytes=block_bytes, dst_count=count, src_count=count + 3, alias=alias
        )
    )
    expected, expected_ordered = twin.plan_blocks(dst, src, block_bytes, alias=alias)
    assert ordered is expected_ordered
    np.testing.assert_array_equal(runs, expected)


@given(st.lists(st.integers(0, 5000), max_size=300, unique=True), st.booleans())
def test_long_runs_match_the_twin(starts: list[int], alias: bool) -> None:
    dst = [start * 4 + step for start in starts for step in range(3)]
    src = [d + 30_000 for d in dst]
    runs, ordered = twin.parts_of(
        plan_blocks(blocks(*dst), blocks(*src), block_bytes=4096, dst_count=60_000, src_count=60_000, alias=alias)
    )
    expected, _ = twin.plan_blocks(dst, src, 4096, alias=alias)
    assert not ordered
    np.testing.assert_array_equal(runs, expected)


@given(st.data(), st.integers(1, 200), st.integers(0, 4000), st.integers(0, 10**6))
def test_pieces_match_the_twin(data: st.DataObject, block_bytes: int, src_bytes: int, src_offset: int) -> None:
    pieces = -(-src_bytes // block_bytes)
    dst = data.draw(st.lists(st.integers(0, BLOCKS - 1), max_size=min(pieces, 30)))
    runs, ordered = twin.parts_of(
        plan_pieces(blocks(*dst), block_bytes=block_bytes, dst_count=BLOCKS, src_offset=src_offset, src_bytes=src_bytes)
    )
    expected, expected_ordered = twin.plan_pieces(dst, block_bytes, src_offset, src_bytes)
    assert ordered is expected_ordered
    np.testing.assert_array_equal(runs, expected)


SIZES = {"block_bytes": 8, "dst_count": 4, "src_count": 4, "alias": False}
ROW_OF = {"block_bytes": 16, "dst_count": 4, "src_offset": 0, "src_bytes": 16}
BYTES = "the plan has more than 2**63 - 1 bytes"
ROW = {"dst_offset": 0, "src_offset": 0, "length": 0}
EACH = "bytes each: more than"
REFUSED: list[tuple[Callable[..., Any], list[Any], dict[str, Any], str]] = [
    *(
        (plan_blocks, [blocks(0, n), blocks(0, 1)], {"dst_count": n}, f"dst_blocks[1] is {n}: must be in [0, {n}), the")
        for n in (8, 10**12)
    ),
    (plan_blocks, [blocks(0, 1), blocks(3, 4)], {"src_name": "from"}, "from[1] is 4: must be in [0, 4)"),
    (plan_blocks, [blocks(0), np.array([-1])], {}, "src_blocks[0] is -1: "),  # which parsing would have caught
    (plan_blocks, [blocks(0, 1), blocks(0)], {}, "dst_blocks has 2 blocks and src_blocks has 1: "),
    (plan_blocks, [blocks(0)] * 2, {"block_bytes": 2**61, "dst_count": 1, "src_count": 1, "tensors": (0, 0, 4)}, BYTES),
    *(
        (plan, lists, {"block_bytes": nbytes, "dst_count": count}, text)
        for plan, lists in ((plan_blocks, [blocks()] * 2), (plan_pieces, [blocks()]))
        for nbytes, count, text in (
            (0, 4, "block_bytes is 0: must be positive"),
            (-8, 4, "block_bytes is -8: must be positive"),
            (8, -1, "dst_count is -1: must not be negative"),
            (2**40, 2**40, f"dst_count is {2**40} of {2**40} {EACH}"),
        )
    ),
    *(
        (plan_pieces, [blocks(0, 1, 2)], {"src_bytes": 16 * n}, f"dst_blocks has 3 blocks: dst_blocks[{n}] would start")
        for n in range(3)
    ),
    (plan_pieces, [blocks()], {"src_offset": -1}, "src_offset is -1"),
    (plan_pieces, [blocks()], {"src_bytes": -8}, "src_bytes is -8"),
    (plan_pieces, [blocks()], {"src_offset": 2**62, "src_bytes": 2**62}, "src_offset is"),
    (plan_pieces, [blocks(4)], {"dst_name": "to"}, "to[0] is 4: must be in [0, 4)"),
    *((plan_row, [], {name: -1}, f"{name} is -1: must not be negative") for name in ROW),
]


@pytest.mark.parametrize(
    ("plan", "lists", "change", "text"), REFUSED, ids=[f"{each[0].__name__}: {each[3]}" for each in REFUSED]
)
def test_what_cannot_be_planned_is_refused_and_named(
    plan: Callable[..., Any], lists: list[Any], change: dict[str, Any], text: str
) -> None:
    good = {plan_blocks: SIZES, plan_pieces: ROW_OF, plan_row: ROW}
    with pytest.raises(ParamError) as caught:
        plan(*lists, **good[plan] | change)
    assert str(caught.value).startswith(text)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
@example(0, 0, 0)
def test_a_row_is_one_run(dst_offset: int, src_offset: int, length: int) -> None:
    runs = plan_row(dst_offset, src_offset, length)
    assert runs.dtype == np.uint64
    assert runs.tolist() == [[dst_offset, src_offset, length]]


def test_a_plan_can_be_changed_field_by_field() -> None:
    plan = plan_blocks(blocks(3, 0), blocks(1, 2), block_bytes=8, dst_count=4, src_count=4, alias=False)
    changed = plan.replace(dst_first=2, count=5, nbytes=80)
    assert (changed.dst_first, changed.src_first, changed.count, changed.nbytes) == (2, 0, 5, 80)
    assert changed.runs.tolist() == plan.runs.tolist() == [[24, 8, 8], [0, 16, 8]]
    assert (plan.dst_first, plan.count, plan.nbytes) == (0, 1, 16)
    with pytest.raises(TypeError):
        plan.replace(runs=np.zeros((4, 3), np.uint64)[::2])  # native code would read between the rows


def test_the_runs_outlive_their_plan() -> None:
    plan = plan_blocks(
        blocks(*range(1, 400, 2)), blocks(*range(200)), block_bytes=8, dst_count=400, src_count=200, alias=False
    )
    runs = plan.runs
    assert plan.runs is runs
    assert runs.dtype == np.uint64
    assert (runs.shape, runs.flags.c_contiguous, runs.flags.writeable) == ((200, 3), True, False)
    del plan
    assert runs[:, 0].tolist() == [8 * block for block in range(1, 400, 2)]


def test_a_list_of_blocks_knows_its_largest() -> None:
    listed = parse_blocks("blocks", [3, 9, 2])
    assert (len(listed), listed.largest, listed.array.tolist()) == (3, 9, [3, 9, 2])
    assert (len(parse_blocks("blocks", [])), parse_blocks("blocks", ()).largest) == (0, -1)
