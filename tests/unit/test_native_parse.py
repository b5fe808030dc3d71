"""Block lists from callers: what is taken, what is refused, and what the refusal says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._native import parse_indices, parse_pairs
from llm_datadist.errors import NoneArgument, ParamError

pytestmark = pytest.mark.covers("errors.NoneArgument")

MAX = 2**63 - 1
INDICES = st.lists(st.integers(0, MAX), max_size=50)


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


@given(INDICES, st.sampled_from([1.5, "3", b"1", [1]]))
def test_an_element_of_another_type_is_named(values: list[int], bad: object) -> None:
    with pytest.raises(TypeError) as caught:
        parse_indices("src_blocks", (*values, bad))
    assert str(caught.value) == f"src_blocks[{len(values)}] is {bad!r}: must be an int, not {type(bad).__name__}"


@given(INDICES)
def test_r01_none_among_the_elements_is_a_none_argument(values: list[int]) -> None:
    with pytest.raises(NoneArgument) as caught:
        parse_indices("src_blocks", [*values, None])
    assert str(caught.value) == f"src_blocks[{len(values)}] is None: must be a block number"


ODD: list[tuple[Any, list[int]]] = [
    ([True, np.int64(7), np.uint8(9), Index(11), 13], [1, 7, 9, 11, 13]),
    *((np.arange(20, dtype=dtype)[::-3], [19, 16, 13, 10, 7, 4, 1]) for dtype in ("u1", "i2", "<i4", ">i8", "u8")),
    ([], []),
    ((), []),
    (np.empty(0, np.int32), []),
]
NO_CONTAINER = [range(3), {1}, {1: 2}, "12", 5, np.zeros((1, 1), np.int64), np.array(1), np.array([True]), np.ones(1)]
REFUSED: list[tuple[Any, type[Exception], str]] = [
    ([0, Index(-3)], ParamError, r"\[1\] is -3: "),
    (np.array([3, -5, -6], dtype=np.int16), ParamError, r"\[1\] is -5: "),
    (np.array([2**63], dtype=np.uint64), ParamError, rf"\[0\] is {2**63}: "),
    (None, NoneArgument, " is None"),
    *((values, TypeError, " is ") for values in NO_CONTAINER),
]


@pytest.mark.parametrize(("values", "parsed"), ODD, ids=repr)
def test_numbers_of_any_kind_in_arrays_of_any_stride_are_ints(values: Any, parsed: list[int]) -> None:
    assert parse_indices("blocks", values).tolist() == parsed


@pytest.mark.parametrize(("values", "kind", "text"), REFUSED, ids=repr)
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


SMALL = st.integers(0, MAX)


@given(st.dictionaries(SMALL, SMALL))
def test_pairs_of_a_dict_come_in_its_order(pairs: dict[int, int]) -> None:
    parsed = parse_pairs(pairs, lists=False)
    assert parsed is not None
    assert [part.dtype for part in parsed] == [np.int64, np.int64]
    assert [part.tolist() for part in parsed] == [list(pairs), list(pairs.values())]


@given(st.dictionaries(SMALL, st.lists(SMALL, max_size=5)))
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
