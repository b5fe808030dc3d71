"""Block lists from callers, and their plans against the NumPy twin: what is taken, what is refused in which words."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llm_datadist._native import Plan, parse_blocks, parse_indices, parse_pairs, plan_blocks, plan_pieces, plan_row
from llm_datadist.errors import NoneArgument, ParamError
from tests.support import twin
from tests.support.tensors import Parameter, Tensor

pytestmark = pytest.mark.covers("errors.NoneArgument")

MAX = 2**63 - 1
NUMBERS = st.integers(0, MAX)
INDICES = st.lists(NUMBERS, max_size=50)


class Index:
    """Something with ``__index__`` that runs ``action`` first."""

    def __init__(self, value: int, action: Any = lambda: None) -> None:
        self.value = value
        self.action = action

    def __index__(self) -> int:
        self.action()
        return self.value

    def __repr__(self) -> str:
        return f"Index({self.value})"


@given(INDICES, st.sampled_from([list, tuple, lambda v: np.array(v, dtype=np.int64)]))
def test_every_container_gives_the_same_new_array(values: list[int], container: Any) -> None:
    given_values = container(values)
    parsed = parse_indices("blocks", given_values)
    assert parsed.dtype == np.int64
    assert parsed.flags.c_contiguous
    assert parsed.tolist() == values
    assert not (isinstance(given_values, np.ndarray) and np.shares_memory(parsed, given_values))


@given(INDICES, st.integers(0, 50), st.one_of(st.integers(max_value=-1), st.integers(min_value=MAX + 1)))
def test_a_value_out_of_range_is_named(values: list[int], at: int, bad: int) -> None:
    at = min(at, len(values))
    with pytest.raises(ParamError) as caught:
        parse_indices("src_blocks", [*values[:at], bad, *values[at:]])
    assert str(caught.value) == f"src_blocks[{at}] is {bad}: must be in [0, 2**63)"


@given(INDICES)
def test_r01_none_among_the_elements_is_a_none_argument(values: list[int]) -> None:
    """Regression: native code read None as a number."""
    with pytest.raises(NoneArgument) as caught:
        parse_indices("src_blocks", [*values, None])
    assert str(caught.value) == f"src_blocks[{len(values)}] is None: must be a block number"


ODD: list[tuple[Any, list[int]]] = [
    ([True, np.int64(7), np.uint8(9), Index(11), 13], [1, 7, 9, 11, 13]),
    *((np.arange(20, dtype=dtype)[::-3], [19, 16, 13, 10, 7, 4, 1]) for dtype in ("u1", "i2", "<i4", ">i8", "u8")),
    ([], []),
    ((), []),
    (np.empty(0, np.int32), []),
    *((blocks, list(blocks)) for blocks in (range(3), range(9, 0, -4), range(0), range(MAX, MAX + 1))),
    (range(7, 10**30, 10**30), [7]),
    *(
        (kind(np.arange(6, dtype=dtype)[::2]), [0, 2, 4])
        for kind in (Tensor, Parameter)
        for dtype in ("i4", "i8", "u1")
    ),
    ([Tensor(3), np.int8(4)], [3, 4]),
    ((Parameter([5]),), [5]),
]
NO_CONTAINER = [
    *({1}, {1: 2}, {1: 2}.keys(), "12", b"12", 5, iter([1]), (each for each in [1])),
    *(np.zeros((1, 1), np.int64), np.array(1), np.array([True]), np.ones(1)),
    *(Tensor([[1]]), Tensor(1), Tensor([True]), Tensor([1.0])),
]
NO_LISTS: list[tuple[Any, type[Exception], str]] = [
    ([0, Index(-3)], ParamError, r"\[1\] is -3: "),
    (range(-1, 3), ParamError, r" is range\(-1, 3\): "),
    (range(3, -2, -1), ParamError, r" is range\(3, -2, -1\): "),
    (range(2**70), ParamError, r" is range\(0, 1180591620717411303424\): must be in "),
    (range(2**27 + 1), ParamError, r" is range\(0, 134217729\): 134217729 blocks, "),
    (Tensor([-2]), ParamError, r"\[0\] is -2: "),
    (Tensor([2], "cuda:0"), TypeError, r" is a torch.int64 tensor on cuda:0 .*: must be a dense 1-D integer tensor"),
    ([Tensor([1, 2])], TypeError, r"\[0\] is tensor\(\[1, 2\]\): must be an int, not Tensor$"),
    ([0, np.ones(1)], TypeError, r"\[1\] is array\(\[1.\]\): must be an int, not ndarray$"),
    (np.array([3, -5, -6], dtype=np.int16), ParamError, r"\[1\] is -5: "),
    (np.array([2**63], dtype=np.uint64), ParamError, rf"\[0\] is {2**63}: "),
    (None, NoneArgument, " is None"),
    ((7, 1.5), TypeError, r"\[1\] is 1.5: must be an int, not float$"),
    ([[1]], TypeError, r"\[0\] is \[1\]: must be an int, not list$"),
    *(((7, 8, bad), TypeError, rf"\[2\] is {bad!r}: must be an int, not ") for bad in ("3", b"1")),
    *((values, TypeError, " is ") for values in NO_CONTAINER),
]


@pytest.mark.parametrize(("values", "parsed"), ODD, ids=repr)
def test_numbers_of_any_kind_in_arrays_of_any_stride_are_ints(values: Any, parsed: list[int]) -> None:
    assert parse_indices("blocks", values).tolist() == parsed


@pytest.mark.parametrize(("values", "kind", "text"), NO_LISTS, ids=lambda each: repr(each).partition(" object")[0])
def test_another_container_or_number_is_refused_and_named(values: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"^blocks{text}"):
        parse_indices("blocks", values)


def test_an_index_method_may_change_the_list_or_raise() -> None:
    values: list[object] = [Index(number) for number in range(100)]
    values[3] = Index(3, values.clear)
    assert parse_indices("blocks", values).tolist() == list(range(100))
    assert values == []

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        parse_indices("blocks", [1, Index(2, fail)])


@given(st.dictionaries(NUMBERS, NUMBERS))
def test_pairs_of_a_dict_come_in_its_order(pairs: dict[int, int]) -> None:
    parsed = parse_pairs(pairs, lists=False)
    assert parsed is not None
    assert [part.dtype for part in parsed] == [np.int64, np.int64]
    assert [part.tolist() for part in parsed] == [list(pairs), list(pairs.values())]


@given(st.dictionaries(NUMBERS, st.lists(NUMBERS, max_size=5)))
def test_a_pair_for_each_item_of_the_lists_of_a_dict(pairs: dict[int, list[int]]) -> None:
    parsed = parse_pairs(pairs, lists=True)
    assert parsed is not None
    expected = [(key, value) for key, values in pairs.items() for value in values]
    assert list(zip(*(part.tolist() for part in parsed), strict=True)) == expected


@pytest.mark.parametrize("odd", [-1, MAX + 1, None, 1.5, "1", Index(1), [1]])
@pytest.mark.parametrize("lists", [False, True])
def test_a_dict_with_anything_else_is_left_to_the_caller(odd: Any, lists: bool) -> None:
    one: Any = [1] if lists else 1
    assert parse_pairs({1: one, 2: one, 3: one}, lists=lists) is not None
    assert parse_pairs({1: one, 2: [1, odd] if lists else odd, 3: one}, lists=lists) is None
    if not isinstance(odd, list):
        assert parse_pairs({1: one, odd: one, 3: one}, lists=lists) is None
    assert parse_pairs({1: 1 if lists else [1]}, lists=lists) is None


# Plans

BLOCKS = 24
# A small range makes neighbours, duplicates and chains common.
PAIRS = st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)), max_size=40)


def blocks(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return parse_indices("blocks", values)


def same(plan: Plan, runs: twin.Runs, ordered: bool) -> None:
    assert plan.ordered is ordered
    np.testing.assert_array_equal(plan.runs, runs)


@given(PAIRS, st.booleans(), st.integers(1, 70_000), st.sampled_from([BLOCKS, 10**6, 10**14]))
def test_blocks_match_the_twin(pairs: list[tuple[int, int]], alias: bool, block_bytes: int, count: int) -> None:
    # A count far above the list's length takes the planner's other set.
    spread = count // BLOCKS
    dst, src = [d * spread for d, _ in pairs], [s * spread for _, s in pairs]
    if count == BLOCKS:
        src = [s + 3 for s in src] if not alias else src
    of: dict[str, Any] = {"block_bytes": block_bytes, "dst_count": count, "src_count": count + 3}
    plan = plan_blocks(blocks(*dst), blocks(*src), **of, alias=alias)
    same(plan, *twin.plan_blocks(dst, src, block_bytes, alias=alias))


@given(st.lists(st.integers(0, 5000), max_size=300, unique=True), st.booleans())
def test_long_runs_match_the_twin(starts: list[int], alias: bool) -> None:
    dst = [start * 4 + step for start in starts for step in range(3)]
    src = [d + 30_000 for d in dst]
    of: dict[str, Any] = {"block_bytes": 4096, "dst_count": 60_000, "src_count": 60_000}
    plan = plan_blocks(blocks(*dst), blocks(*src), **of, alias=alias)
    same(plan, twin.plan_blocks(dst, src, 4096, alias=alias)[0], ordered=False)


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


@given(NUMBERS, NUMBERS, NUMBERS)
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
