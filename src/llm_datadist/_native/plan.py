"""Copy plans and what they are about: the memory of one end, its digest, and what of a plan can be compared later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from llm_datadist._native import _native
from llm_datadist._native._native import Plan, TensorList

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from llm_datadist._native._native import CopyPool


@dataclass(slots=True, eq=False)
class Tensors:
    """The tensors of one end, as mapped in this process.

    Never changed. Not frozen either: that would double the time to make one, and each pull by key makes one.
    """

    bases: NDArray[np.uint64]  # shape (T,): address of each tensor; native code has its own copy
    extent: int  # bytes of each tensor; every run must end inside it
    #: True if only this library can unmap or protect the memory. Then native code writes it for a peer directly; else
    #: by a system call, which fails where a direct write would crash.
    mapped: bool = field(default=False, kw_only=True)
    native: TensorList = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.native = TensorList(self.bases, self.extent)


DIGEST_BYTES: Final = 16
"""128 bits, as many as the hash of a stripe has: folding them would only make collisions likelier."""
NONCE_BYTES: Final = 16

NO_DEADLINE: Final = 2**63 - 1
"""A ``deadline_ns`` that never passes."""


class PlanEnd(NamedTuple):
    """One end of ``plan``: its ``tensors``, and whether it is the destination or the source."""

    plan: Plan
    tensors: Tensors
    is_dst: bool


def digest(
    end: PlanEnd,
    pool: CopyPool | None,
    deadline_ns: int,
    nonce: bytes,
    *,
    each_run: bool = False,
    cancelled: bytearray | None = None,
) -> NDArray[np.uint64] | None:
    """Digest one end of a plan, in this thread and those of ``pool``.

    A digest depends on the bytes in the order of the plan, on their number and on the nonce; not on addresses, nor on
    how runs were merged or split. The GIL is released for more than 256 KiB; other threads help above 1 MiB.

    Args:
        nonce: 16 bytes that could not be known before the bytes were written.
        each_run: True for one digest of each run of each tensor, False for one of all runs of each tensor.

    Returns:
        Shape ``(count, 1 or R, 2)``: 128 bits for each tensor, or for each run of each tensor; None if it was stopped,
        as ``execute`` is.
    """
    plan, tensors, is_dst = end
    found = _native.digest(
        tensors.bases,
        tensors.extent,
        plan.dst_first if is_dst else plan.src_first,
        plan.count,
        plan.runs,
        is_dst,
        each_run,
        nonce,
        pool,
        min(deadline_ns, NO_DEADLINE),
        cancelled,
    )
    return None if found is None else found.reshape(plan.count, len(plan.runs) if each_run else 1, 2)


def standing(plan: Plan, *, alias: bool) -> Plan:
    """Return the part of ``plan`` whose bytes can still be compared after it is done.

    That is all of it, unless it is ordered (interface R26): then later runs may have overwritten what earlier ones
    wrote; and also what they read, if both ends are the same tensors (``alias``).
    """
    if not plan.ordered:
        return plan
    runs = _native.standing_runs(plan.runs, alias)
    return plan.replace(runs=runs, ordered=False, nbytes=int(runs[:, 2].sum()) * plan.count)


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
            yield plan.replace(
                dst_first=plan.dst_first + begin,
                src_first=plan.src_first + begin,
                count=count,
                runs=runs,
                nbytes=count * nbytes,
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
