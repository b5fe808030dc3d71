"""Cuts a plan into parts that can move on their own, so that several lanes share it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from llm_datadist.native import Plan

__all__ = ["cut_plan"]


def cut_plan(plan: Plan, part_bytes: int, max_runs: int) -> Iterator[Plan]:
    """Yield parts of a plan that together are the plan, in its order: whole tensors where they are small.

    Args:
        plan: What to cut; a plan of no bytes has no parts.
        part_bytes: Bytes of a part, at most.
        max_runs: Runs of a part, at most.
    """
    if not plan.nbytes:
        return
    per_pair = plan.nbytes // plan.count
    if per_pair <= part_bytes and len(plan.runs) <= max_runs:
        pairs = part_bytes // per_pair
        for begin in range(0, plan.count, pairs):
            yield _part(plan, begin, min(pairs, plan.count - begin), plan.runs, per_pair)
        return
    slices = list(_slices(plan.runs, part_bytes, max_runs))
    for pair in range(plan.count):
        for runs, nbytes in slices:
            yield _part(plan, pair, 1, runs, nbytes)


def _part(plan: Plan, begin: int, count: int, runs: NDArray[np.uint64], per_pair: int) -> Plan:
    return plan.replace(
        dst_first=plan.dst_first + begin,
        src_first=plan.src_first + begin,
        count=count,
        runs=runs,
        nbytes=count * per_pair,
    )


def _slices(runs: NDArray[np.uint64], part_bytes: int, max_runs: int) -> Iterator[tuple[NDArray[np.uint64], int]]:
    """Yield (runs, bytes) of consecutive pieces of one tensor's runs; long runs are cut."""
    ends = np.cumsum(runs[:, 2].astype(np.int64))
    starts = ends - runs[:, 2].astype(np.int64)
    at, total = 0, int(ends[-1])
    while at < total:
        first = int(np.searchsorted(ends, at, side="right"))
        last = min(int(np.searchsorted(starts, at + part_bytes, side="left")), first + max_runs)
        upto = min(at + part_bytes, int(ends[last - 1]))
        piece = runs[first:last].copy()
        skipped, cut = np.uint64(at - int(starts[first])), np.uint64(int(ends[last - 1]) - upto)
        piece[0] += np.array([skipped, skipped, 0], np.uint64)
        piece[0, 2] -= skipped
        piece[-1, 2] -= cut
        yield piece, upto - at
        at = upto
