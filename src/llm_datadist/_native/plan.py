"""Sides of copy plans: tensors, digests, and parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from llm_datadist._native import _native
from llm_datadist._native._native import Place, Plan, TensorList

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from llm_datadist._native._native import CopyPool


USER: Final = Place()
"""Host memory that its user may unmap: native code receives into it by system calls, which fail instead of crashing."""

MAPPED: Final = Place(mapped=True)
"""Host memory that only this library can unmap or protect."""


@dataclass(slots=True, eq=False)
class Tensors:
    """Tensors of one side, as mapped in this process. Immutable; ``frozen`` would double the time of construction."""

    bases: NDArray[np.uint64]  # shape (T,): address of each tensor; native code has a copy
    extent: int  # bytes of each tensor
    place: Place = field(default=USER, kw_only=True)
    native: TensorList = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.native = TensorList(self.bases, self.extent, self.place)


NONCE_BYTES: Final = 16

NO_DEADLINE: Final = 2**63 - 1
"""``deadline_ns`` that never passes."""


class PlanSide(NamedTuple):
    """One side of ``plan``: the destination if ``is_dst``, else the source."""

    plan: Plan
    tensors: Tensors
    is_dst: bool


def digest(
    side: PlanSide,
    pool: CopyPool | None,
    deadline_ns: int,
    nonce: bytes,
    *,
    each_run: bool = False,
    cancelled: bytearray | None = None,
) -> NDArray[np.uint64] | None:
    """Digest the bytes of one side of a plan, in the plan's order. Merging or splitting runs does not change it.

    Above 256 KiB it releases the GIL, above 1 MiB threads of ``pool`` help; it stops as ``execute`` does. ``nonce``:
    16 bytes that were unknown when the bytes were written. With ``each_run`` each run has a digest, else each tensor.
    Returns shape ``(count, R or 1, 2)``; None if it stopped early. All 128 bits of a hash: folding makes collisions
    likelier.
    """
    plan, tensors, is_dst = side
    found = _native.digest(plan, tensors.native, is_dst, each_run, nonce, pool, deadline_ns, cancelled)
    return None if found is None else found.reshape(plan.count, len(plan.runs) if each_run else 1, 2)


def split_plan(plan: Plan, part_bytes: int, max_runs: int) -> Iterator[Plan]:
    """Yield parts that together are the plan, in its order: whole tensors where they are small."""
    if not plan.nbytes:
        return
    per_pair = plan.nbytes // plan.count
    pairs, slices = 1, [(plan.runs, per_pair)]
    if per_pair <= part_bytes and len(plan.runs) <= max_runs:
        pairs = part_bytes // per_pair
    else:
        slices = list(_slices(plan.runs, part_bytes, max_runs))
    for begin in range(0, plan.count, pairs):
        count = min(pairs, plan.count - begin)
        for runs, nbytes in slices:
            dst, src = plan.dst_first + begin, plan.src_first + begin
            yield plan.replace(dst_first=dst, src_first=src, count=count, runs=runs, nbytes=count * nbytes)


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
