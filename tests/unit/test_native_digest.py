"""The digest against its twin: what it must depend on and what not, what it must see. What of a plan is comparable."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist._native import NO_DEADLINE, Plan, Tensors
from llm_datadist._native.plan import DIGEST_BYTES, NONCE_BYTES, PlanEnd, digest, standing
from llm_datadist.errors import ParamError
from tests.support import twin
from tests.unit import digest_twin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from llm_datadist._native import CopyPool

NONCE = bytes(range(NONCE_BYTES))
MIB = 1 << 20
Run = tuple[int, int, int]


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
    end = PlanEnd(plan, twin.tensors_of(list(tensors)), dst)
    digests = digest(end, pool, NO_DEADLINE, nonce, each_run=each_run)
    assert digests is not None
    return digests


def of_bytes(data: twin.Bytes, nonce: bytes = NONCE) -> tuple[int, int]:
    low, high = found(plan_of([(0, 0, data.size)]), [data], nonce)[0, 0].tolist()
    return low, high


# --- the value --------------------------------------------------------------------------------------------------------


def test_every_size_and_alignment_is_as_in_the_twin() -> None:
    (data,) = twin.noise(1, 1, 600_100)
    sizes = [*range(301), *range(1008, 1042), 2047, 2048, 2049, 4096, 4100, 600_001]
    for size in sizes:
        at = size % 64  # every alignment
        expected = digest_twin.digest(data[at : at + size].tobytes(), NONCE)
        assert tuple(found(plan_of([(0, at, size)]), [data])[0, 0].tolist()) == expected, size


def test_the_value_is_the_same_on_every_machine() -> None:
    # Both ends of a link compute it: a change of these numbers is a change of the protocol.
    data = np.arange(5000, dtype=np.uint16).view(np.uint8)
    assert [f"{half:016x}" for half in of_bytes(data)] == ["cdf306525b383f04", "1ec05fd6ff260330"]


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
        assert tuple(whole[i, 0].tolist()) == digest_twin.digest(b"".join(pieces), nonce)
        assert [tuple(d) for d in each[i].tolist()] == [digest_twin.digest(piece, nonce) for piece in pieces]


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


# --- what it must see -------------------------------------------------------------------------------------------------


def test_every_single_bit_is_seen_and_changes_half_of_the_digest() -> None:
    (data,) = twin.noise(7, 1, 2500)
    before = of_bytes(data)
    flips = []
    for bit in range(0, 2500 * 8, 7):
        data[bit // 8] ^= 1 << bit % 8
        after = of_bytes(data)
        data[bit // 8] ^= 1 << bit % 8
        flips.append([(x ^ y).bit_count() for x, y in zip(before, after, strict=True)])
    assert min(map(min, flips)) > 5  # of 64, where 32 are expected
    assert 31 < np.mean(flips) < 33


def test_swapped_words_lanes_and_tensors_are_seen() -> None:
    (data,) = twin.noise(9, 1, 2048)
    right = of_bytes(data)
    for step in (1, 2, 4, 8, 16, 32, 64, 256, 1024):
        swapped = data.copy()
        swapped[:step], swapped[step : 2 * step] = data[step : 2 * step], data[:step]
        assert not set(of_bytes(swapped)) & set(right), step
    one, other = twin.noise(10, 2, 500)
    plan = plan_of([(0, 0, 500)], 2)
    assert (found(plan, [one, other]) != found(plan, [other, one])).all()


def test_the_nonce_changes_everything() -> None:
    (data,) = twin.noise(11, 1, 1500)
    nonces = [bytes(16), *(bytes(15 - i) + b"\1" + bytes(i) for i in range(16))]
    halves = {half for nonce in nonces for half in of_bytes(data, nonce)}
    assert len(halves) == 2 * len(nonces)
    empty = {of_bytes(data[:0], nonce) for nonce in nonces}
    assert len(empty) == len(nonces)


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
        digest(PlanEnd(plan_of([(0, 0, 2**62)] * 5), huge, is_dst=False), None, NO_DEADLINE, NONCE)


def test_what_is_cancelled_gives_no_digest(pool: CopyPool) -> None:
    """Nor what is too late."""
    tensors = twin.noise(15, 1, 8 * MIB)
    end = PlanEnd(plan_of([(0, 0, 8 * MIB)]), twin.tensors_of(tensors), is_dst=False)
    for helpers in (None, pool):
        assert digest(end, helpers, 0, NONCE) is None
        assert digest(end, helpers, NO_DEADLINE, NONCE, cancelled=bytearray(b"\1")) is None
        whole = digest(end, helpers, NO_DEADLINE, NONCE, cancelled=bytearray(1))
        assert whole is not None
        assert (whole.itemsize, whole.nbytes) == (8, DIGEST_BYTES), "two halves"
    assert found(plan_of([]), tensors).shape == (1, 1, 2)


# --- what of an ordered plan can be compared --------------------------------------------------------------------------


def pairs_of(plan: Plan) -> set[tuple[int, int]]:
    return {(d + i, s + i) for d, s, n in plan.runs.tolist() for i in range(n)}


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 9)), max_size=14),
    st.booleans(),
)
def test_what_stands_after_ordered_runs_is_as_in_the_twin(runs: list[Run], alias: bool) -> None:
    stands = standing(plan_of(runs, 2, ordered=True), alias=alias)
    expected = digest_twin.standing(runs, alias=alias)
    assert pairs_of(stands) == expected
    assert stands.nbytes == 2 * len(expected) == 2 * int(stands.runs[:, 2].sum())
    assert (stands.count, stands.dst_first, stands.src_first) == (2, 0, 0)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=12), st.booleans(), st.integers(1, 40))
def test_what_stands_agrees_after_the_copy(pairs: list[tuple[int, int]], alias: bool, block: int) -> None:
    runs = [(d * block, s * block, block) for d, s in pairs if not (alias and d == s)]
    dst, src = twin.noise(15, 2, 8 * block)
    if alias:
        src = dst
    plan = plan_of(runs, ordered=True)
    twin.execute(plan, [dst], [src])
    stands = standing(plan, alias=alias)
    assert (found(stands, [dst], dst=True) == found(stands, [src], dst=False)).all()


def test_a_plan_without_order_stands_as_it_is() -> None:
    plan = plan_of([(0, 0, 5), (0, 5, 5)])
    assert standing(plan, alias=True) is plan
