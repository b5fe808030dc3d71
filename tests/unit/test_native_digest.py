"""The digest against a twin, which sees every bit, place and length. What of an ordered plan is comparable."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llm_datadist._native import NO_DEADLINE, CopyPool, Plan, Tensors, surviving
from llm_datadist._native.plan import NONCE_BYTES, PlanSide, digest
from llm_datadist.errors import ParamError
from tests.support import twin

NONCE = bytes(range(NONCE_BYTES))
MIB = 1 << 20
Run = tuple[int, int, int]


# --- the digest again, in plain Python integers --------------------------------------------------------------------

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STRIPE = 1024


def _scramble(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def _keys(nonce: bytes) -> Iterator[int]:
    first, second = int.from_bytes(nonce[:8], "little"), int.from_bytes(nonce[8:], "little")
    state = _scramble((first + _GOLDEN) & _MASK) ^ second
    while True:
        state = (state + _GOLDEN) & _MASK
        yield _scramble(state)


def _nh(stripe: bytes, keys: list[int]) -> int:
    padded = stripe + bytes(-len(stripe) % 16)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    keyed = [(word + key) & _MASK for word, key in zip(words, keys, strict=False)]
    return sum(a * b for a, b in zip(keyed[::2], keyed[1::2], strict=True)) % 2**128


def digest_of(data: bytes, nonce: bytes) -> tuple[int, int]:
    """Return (low, high) of one stream of bytes: slow, obvious, the oracle of these tests."""
    drawn = _keys(nonce)
    keys = [next(drawn) for _ in range(_STRIPE // 8)]
    place_key, length_key = next(drawn), next(drawn)
    low = high = 0
    for number, at in enumerate(range(0, len(data), _STRIPE)):
        value = _nh(data[at : at + _STRIPE], keys)
        place = _scramble((place_key + number * _GOLDEN) & _MASK)
        one = _scramble(((value & _MASK) + place) & _MASK)
        other = _scramble(value >> 64 ^ one)
        low = (low + one + other * _GOLDEN) & _MASK
        high = (high + other) & _MASK
    low = _scramble(low ^ _scramble((length_key + len(data)) & _MASK))
    return low, _scramble((high + low) & _MASK)


def stands_of(runs: Iterable[tuple[int, int, int]], *, alias: bool) -> set[tuple[int, int]]:
    """Return the (destination, source) bytes that can be compared after runs that were done in their order."""
    pairs = [(number, dst + i, src + i) for number, (dst, src, length) in enumerate(runs) for i in range(length)]
    written_by = {dst: number for number, dst, _ in pairs}  # destination byte -> the last run that wrote it
    return {
        (dst, src)
        for number, dst, src in pairs
        if written_by[dst] == number and not (alias and written_by.get(src, -1) > number)
    }


def plan_of(runs: Sequence[Run] | NDArray[Any], count: int = 1, first: int = 0, *, ordered: bool = False) -> Plan:
    array = np.array(runs, dtype=np.uint64).reshape(-1, 3)
    return Plan(first, first, count, array, ordered=ordered, nbytes=int(array[:, 2].sum()) * count)


def found(
    plan: Plan,
    tensors: Sequence[twin.Bytes],
    nonce: bytes = NONCE,
    pool: CopyPool | None = None,
    *,
    dst: bool = False,
    each_run: bool = False,
) -> NDArray[np.uint64]:
    end = PlanSide(plan, twin.tensors_of(list(tensors)), dst)
    digests = digest(end, pool, NO_DEADLINE, nonce, each_run=each_run)
    assert digests is not None
    return digests


# --- the value --------------------------------------------------------------------------------------------------------


def test_every_size_and_alignment_is_as_in_the_twin() -> None:
    (data,) = twin.noise(1, 1, 600_100)
    sizes = [*range(301), *range(1008, 1042), 2047, 2048, 2049, 4096, 4100, 600_001]
    for size in sizes:
        at = size % 64  # every alignment
        expected = digest_of(data[at : at + size].tobytes(), NONCE)
        assert tuple(found(plan_of([(0, at, size)]), [data])[0, 0].tolist()) == expected, size


def test_the_value_is_the_same_on_every_machine() -> None:
    # Both ends of a link compute it: a change of these numbers is a change of the protocol.
    data = np.arange(5000, dtype=np.uint16).view(np.uint8)
    halves = found(plan_of([(0, 0, data.size)]), [data])[0, 0].tolist()
    assert [f"{half:016x}" for half in halves] == ["cdf306525b383f04", "1ec05fd6ff260330"]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 1500)), max_size=12),
    st.integers(0, 2),
    st.integers(1, 3),
    st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES),
    st.booleans(),
)
def test_runs_of_several_tensors_are_as_in_the_twin(
    spans: list[tuple[int, int]], first: int, count: int, nonce: bytes, dst: bool
) -> None:
    tensors = twin.noise(2, 5, 4500)
    runs = [(at, 0, n) if dst else (0, at, n) for at, n in spans]
    plan = plan_of(runs, count, first)
    whole = found(plan, tensors, nonce, dst=dst)
    each = found(plan, tensors, nonce, dst=dst, each_run=True)
    assert whole.shape == (count, 1, 2)
    assert each.shape == (count, len(runs), 2)
    for i in range(count):
        pieces = [tensors[first + i][at : at + n].tobytes() for at, n in spans]
        assert tuple(whole[i, 0].tolist()) == digest_of(b"".join(pieces), nonce)
        assert [tuple(d) for d in each[i].tolist()] == [digest_of(piece, nonce) for piece in pieces]


@pytest.mark.parametrize(
    "runs", [[(0, 0, 9 * MIB + 77)], [(0, at, 70_001) for at in range(0, 9 * MIB - 70_003, 70_003)]]
)
@pytest.mark.parametrize("each_run", [False, True])
def test_the_number_of_threads_does_not_matter(pool: CopyPool, runs: list[Run], each_run: bool) -> None:
    tensors = twin.noise(5, 3, 9 * MIB + 77)
    plan = plan_of(runs, 3)
    alone = found(plan, tensors, each_run=each_run)
    assert (found(plan, tensors, pool=pool, each_run=each_run) == alone).all()
    assert len({tuple(d) for d in alone.reshape(-1, 2).tolist()}) == alone.size // 2


def test_several_callers_share_the_threads(pool: CopyPool) -> None:
    tensors = twin.noise(6, 2, 3 * MIB)
    plan = plan_of([(0, 0, 3 * MIB)], 2)
    expected = found(plan, tensors)

    def work(_: int) -> bool:
        return all((found(plan, tensors, pool=pool) == expected).all() for _ in range(20))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(work, range(4)))


# --- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "nonce", "text"),
    [
        ({"runs": np.array([[0, 1, 100]], np.uint64)}, NONCE, r"runs\[0\] is 100 bytes at offset 1: ends outside"),
        ({"runs": np.array([[0, 2**64 - 1, 2]], np.uint64)}, NONCE, "ends outside"),
        ({"runs": np.array([[0, 0, 2**64 - 1]], np.uint64)}, NONCE, "ends outside"),
        ({"count": 3}, NONCE, "2 tensors"),
        ({"count": -1}, NONCE, "2 tensors"),
        ({"src_first": 2}, NONCE, "2 tensors"),
        ({"src_first": -1}, NONCE, "2 tensors"),
        ({"src_first": 2**62, "count": 2**62}, NONCE, "2 tensors"),
        ({}, NONCE[:15], "nonce has 15 bytes"),
        ({}, NONCE + b"\0", "nonce has 17 bytes"),
    ],
)
def test_bytes_outside_the_tensors_are_not_touched(change: dict[str, Any], nonce: bytes, text: str) -> None:
    tensors = twin.noise(12, 2, 100)
    with pytest.raises(ParamError, match=text):
        found(plan_of([(0, 0, 100)]).replace(**change), tensors, nonce)


def test_more_bytes_than_can_be_counted_are_refused() -> None:
    huge = Tensors(np.array([4096], np.uint64), 2**62)  # nothing is there, and nothing is read
    with pytest.raises(ParamError, match="more than"):
        digest(PlanSide(plan_of([(0, 0, 2**62)] * 5), huge, is_dst=False), None, NO_DEADLINE, NONCE)


def test_what_is_cancelled_gives_no_digest(pool: CopyPool) -> None:
    """Nor what is too late. Regression: a digest went on to the deadline of its cancelled call."""
    tensors = twin.noise(15, 1, 8 * MIB)
    end = PlanSide(plan_of([(0, 0, 8 * MIB)]), twin.tensors_of(tensors), is_dst=False)
    for helpers in (None, pool):
        assert digest(end, helpers, 0, NONCE) is None
        assert digest(end, helpers, NO_DEADLINE, NONCE, cancelled=bytearray(b"\1")) is None
        whole = digest(end, helpers, NO_DEADLINE, NONCE, cancelled=bytearray(1))
        assert whole is not None
        assert (whole.itemsize, whole.nbytes) == (8, 16), "two halves"
    assert found(plan_of([]), tensors).shape == (1, 1, 2)


# --- what of an ordered plan can be compared --------------------------------------------------------------------------


def pairs_of(plan: Plan) -> set[tuple[int, int]]:
    return {(d + i, s + i) for d, s, n in plan.runs.tolist() for i in range(n)}


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 9)), max_size=14), st.booleans())
def test_what_stands_after_ordered_runs_is_as_in_the_twin(runs: list[Run], alias: bool) -> None:
    stands = surviving(plan_of(runs, 2, ordered=True), alias=alias)
    expected = stands_of(runs, alias=alias)
    assert pairs_of(stands) == expected
    assert stands.nbytes == 2 * len(expected) == 2 * int(stands.runs[:, 2].sum())
    assert (stands.count, stands.dst_first, stands.src_first) == (2, 0, 0)


def test_a_plan_without_order_stands_as_it_is() -> None:
    plan = plan_of([(0, 0, 5), (0, 5, 5)])
    assert surviving(plan, alias=True) is plan
