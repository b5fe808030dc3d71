"""The native table of keys beside a dict, and the keys of a peer's message."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._native import KeyTable, count_keys
from llm_datadist.errors import ParamError

SLOTS = 8
a_key = st.sampled_from(
    [b"a", b"a\0", b"b", bytes(1), bytes(64), b"k" * 64, b"k" * 63, *(b"%d" % n for n in range(40))]
)
encode = msgspec.msgpack.encode


@given(st.lists(st.tuples(a_key, st.integers(0, SLOTS - 1), st.booleans()), max_size=60), st.lists(a_key, max_size=9))
def test_a_table_has_what_a_dict_has(steps: list[tuple[bytes, int, bool]], asked: list[bytes]) -> None:
    table, twin = KeyTable(), dict[bytes, int]()
    for key, slot, adds in steps:
        if adds:
            table[key] = twin[key] = slot
        else:
            del table[key]
            twin.pop(key, None)
        assert {each: table.find(each) for each, *_ in steps} == {each: twin.get(each, -1) for each, *_ in steps}
    states, marks = np.array([1, 2] * (SLOTS // 2), np.uint8), np.zeros(SLOTS, np.uint8)
    run: list[int] = []
    for key in asked:
        if twin.get(key, 0) % 2 == 0:
            break
        run.append(twin[key])
    assert table.run(encode(asked), states, 2, marks).tolist() == run
    assert np.flatnonzero(marks).tolist() == sorted(set(run))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 4096])
def test_keys_of_a_message_are_counted(count: int) -> None:
    assert count_keys(encode([b"%d" % n for n in range(count)])) == count


WRONG: tuple[Any, ...] = (
    [b""],
    [b"k" * 65],
    [b"k" * 256],
    ["text"],
    [1],
    [None],
    [[b"a"]],
    {b"a": b"b"},
    None,
    7,
    b"a",
)


def test_states_of_other_slots_are_refused() -> None:
    table, few = KeyTable(), np.zeros(1, np.uint8)
    table[b"a"] = 1
    with pytest.raises(ParamError, match="states, marks"):
        table.run(encode([b"a"]), few, 0, few)


@pytest.mark.parametrize("wrong", [*map(encode, WRONG), b"", b"\x91", b"\x91\xc4", b"\x91\xc4\x05abc", b"\xdc\x00"])
def test_what_are_no_keys_is_refused(wrong: bytes) -> None:
    table, marks = KeyTable(), np.zeros(1, np.uint8)
    if wrong in (b"", b"\xdc\x00"):  # without the count of an array: none
        wrong = b"\xc0"
    with pytest.raises(ParamError, match="key"):
        count_keys(wrong)
    with pytest.raises(ParamError, match="key"):
        table.run(wrong, marks, 0, marks)
