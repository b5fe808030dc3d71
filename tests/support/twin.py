"""The native planner and executor again, in NumPy and plain loops: slow, obvious, the oracle of the tests."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llm_datadist._native import Plan, Tensors

Bytes = NDArray[np.uint8]
Runs = NDArray[np.uint64]


def plan_blocks(dst: Sequence[int], src: Sequence[int], block_bytes: int, *, alias: bool) -> tuple[Runs, bool]:
    pairs = [(d, s) for d, s in zip(dst, src, strict=True) if not (alias and d == s)]
    written = {d for d, _ in pairs}
    chained = alias and any(s in written for _, s in pairs)
    ordered = chained or len(written) < len(pairs)
    runs = [(d * block_bytes, s * block_bytes, block_bytes) for d, s in pairs]
    return _array(runs if ordered else _merged(runs)), ordered


def plan_pieces(dst: Sequence[int], block_bytes: int, src_offset: int, src_bytes: int) -> tuple[Runs, bool]:
    starts = [i * block_bytes for i in range(len(dst))]
    runs = [
        (d * block_bytes, src_offset + s, min(block_bytes, src_bytes - s)) for d, s in zip(dst, starts, strict=True)
    ]
    ordered = len(set(dst)) < len(dst)
    return _array(runs if ordered else _merged(runs)), ordered


def _merged(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    out: list[tuple[int, int, int]] = []
    for d, s, n in runs:
        if out and (out[-1][0] + out[-1][2], out[-1][1] + out[-1][2]) == (d, s):
            out[-1] = (out[-1][0], out[-1][1], out[-1][2] + n)
        else:
            out.append((d, s, n))
    return out


def _array(runs: list[tuple[int, int, int]]) -> Runs:
    return np.array(runs, dtype=np.uint64).reshape(-1, 3)


def execute(plan: Plan, dst: Sequence[Bytes], src: Sequence[Bytes]) -> None:
    """One run after the other; the copy of a run is taken first, so overlapping ends behave like memmove."""
    for pair in range(plan.count):
        to, from_ = dst[plan.dst_first + pair], src[plan.src_first + pair]
        for d, s, n in plan.runs.tolist():
            to[d : d + n] = from_[s : s + n].copy()


def make_plan(runs: Runs, *, ordered: bool = False, dst_first: int = 0, src_first: int = 0, count: int = 1) -> Plan:
    return Plan(dst_first, src_first, count, runs, ordered, count * int(runs[:, 2].sum()))


def tensors_of(arrays: Sequence[Bytes]) -> Tensors:
    return Tensors(np.array([array.ctypes.data for array in arrays], dtype=np.uint64), arrays[0].nbytes)


def noise(seed: int, count: int, nbytes: int) -> list[Bytes]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, nbytes, dtype=np.uint8) for _ in range(count)]


def runs_of(seed: int | np.random.Generator, nbytes: int, *, apart: bool, most: int = 60, unit: int = 1) -> Runs:
    """Return runs, tiny and large, of no bytes too, from multiples of a unit; ``apart``: destinations do not meet."""
    random = np.random.default_rng(seed)
    ends = np.sort(random.integers(0, nbytes // unit + 1, 2 * int(random.integers(1, most)))) * unit
    starts, lengths = ends[::2], ends[1::2] - ends[::2]
    lengths[random.random(lengths.size) < 0.4] %= 40
    sources = random.integers(0, nbytes - lengths + 1) // unit * unit
    if not apart:
        starts = random.integers(0, nbytes - lengths + 1) // unit * unit
    order = random.permutation(lengths.size)
    return np.array([starts, sources, lengths], np.uint64).T[order].copy()
