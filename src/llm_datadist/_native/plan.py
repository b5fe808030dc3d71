"""What native code executes: a copy in factored form, and the memory of one end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from llm_datadist._native import _native
from llm_datadist._native._native import BlockList, Plan, TensorList

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist._native._native import CopyPool

__all__ = ["DIGEST_BYTES", "NONCE_BYTES", "BlockList", "Plan", "Tensors", "digest", "standing"]


@dataclass(slots=True, eq=False)
class Tensors:
    """The tensors of one end, as mapped in this process. Not to be changed, but not frozen either: that would double
    the time to make one, which is on the path of every pull by key.

    Attributes:
        bases: Shape ``(T,)``: address of each tensor. Native code has its own copy.
        extent: Bytes of each tensor; every run must end inside it.
        mapped: Nobody but this library can unmap or protect that memory, so that native code may write it on behalf of
            a peer by itself. Elsewhere it lets the kernel do it, which fails where we would crash.
        native: The two, as native code takes them.
    """

    bases: NDArray[np.uint64]
    extent: int
    mapped: bool = field(default=False, kw_only=True)
    native: TensorList = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.native = TensorList(self.bases, self.extent)


DIGEST_BYTES: Final = 16
"""128 bits: the hash of a stripe has them anyway, and folding them would only add a way to collide."""
NONCE_BYTES: Final = 16


def digest(
    plan: Plan,
    tensors: Tensors,
    pool: CopyPool | None,
    deadline_ns: int,
    nonce: bytes,
    *,
    dst: bool,
    each_run: bool = False,
    cancelled: bytearray | None = None,
) -> NDArray[np.uint64] | None:
    """Digest one end of ``plan``, in this thread and those of ``pool``.

    A digest depends on the bytes, in the order of the plan, on how many there are, and on the nonce: not on where they
    lie, nor on how runs were merged or cut. The interpreter lock is released for more than 256 KiB; other threads help
    above 1 MiB.

    Args:
        plan: Which bytes.
        tensors: The memory of that end.
        pool: Threads to help, or None.
        deadline_ns: When to stop, on the clock of ``time.monotonic_ns()``; looked at about every 4 MiB.
        nonce: 16 bytes that nobody could know before the bytes were written.
        dst: True for the destination of the plan, False for its source.
        each_run: True for one digest of each run of each tensor, False for one of all runs of each tensor.
        cancelled: One byte: no digest once it is not zero, as after the deadline. None: only the deadline stops it.

    Returns:
        Shape ``(count, 1 or R, 2)``: 128 bits for each tensor, or for each run of each tensor; None when it was stopped
        first.

    Raises:
        ParamError: A tensor that this end does not have, a run that ends outside it, or a nonce that is none.
    """
    first = plan.dst_first if dst else plan.src_first
    found = _native.digest(
        tensors.bases,
        tensors.extent,
        first,
        plan.count,
        plan.runs,
        dst,
        each_run,
        nonce,
        pool,
        min(deadline_ns, 2**63 - 1),
        cancelled,
    )
    return None if found is None else found.reshape(plan.count, len(plan.runs) if each_run else 1, 2)


def standing(plan: Plan, *, alias: bool) -> Plan:
    """Return the part of ``plan`` that can be compared once it is done.

    That is all of it, unless it is ordered (R26): then later runs may have written over what earlier ones wrote, and
    over what they read where both ends are the same tensors (``alias``).
    """
    if not plan.ordered:
        return plan
    runs = _native.standing_runs(plan.runs, alias)
    return plan.replace(runs=runs, ordered=False, nbytes=int(runs[:, 2].sum()) * plan.count)
