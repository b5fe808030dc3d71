"""Native code behind a checking wrapper: parse block lists, plan copies, execute them, read and advance generations.

Works on numbers, offsets and addresses only. Arguments are checked before any memory is touched. Threads: any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llm_datadist._native import _native
from llm_datadist._native._native import (
    FIRST_DURATION_BIT,
    LAST_DURATION_BIT,
    WRITER_PAGE_BYTES,
    WRITER_SLOTS,
    BlockList,
    BlockPlanner,
    Canary,
    CopyPool,
    Ending,
    GuardSet,
    Meter,
    OperationMeter,
    Plan,
    ProcessMemory,
    SocketInput,
    StandingGrants,
    Timer,
    UseGate,
    advance_generation,
    announce_writer,
    check_mapped,
    close_elsewhere,
    close_writers,
    closing,
    deliver_signals,
    encode_request,
    find_writers,
    listen_for_input,
    load_generation,
    parse_pairs,
    peek_process,
    plan_blocks,
    plan_pieces,
    plan_row,
    readable,
    retract_writer,
    send_now,
    unmap_elsewhere,
    writer_sequence,
)
from llm_datadist._native.cpus import usable_cpus
from llm_datadist._native.lanes import (
    LaneEngine,
    LaneEvent,
    LaneLost,
    Outcome,
    ReadAsked,
    WriteAsked,
    check_plan,
)
from llm_datadist._native.plan import NO_DEADLINE, Tensors
from llm_datadist.errors import NoneArgument, ParamError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def parse_blocks(name: str, values: object) -> BlockList:
    """Check a caller's list of block numbers, and return it for the planner; errors begin with ``name``.

    ``values`` is a list or tuple of ints (anything with ``__index__``), or a 1-D integer array. None is a NoneArgument,
    another container or element a TypeError, a number that is negative or beyond int64 a ParamError.
    """
    try:
        parsed = _native.parse_blocks(name, values)
    except TypeError:
        for i, value in enumerate(values if isinstance(values, (list, tuple)) else ()):
            if value is None:
                raise NoneArgument(f"{name}[{i}] is None: must be a block number") from None
        raise
    if parsed is not None:
        return parsed
    if isinstance(values, np.ndarray):
        return BlockList(_parse_array(name, values))
    if values is None:
        raise NoneArgument(f"{name} is None: must be a list of block numbers")
    raise TypeError(f"{name} is {type(values).__name__}: must be a list, a tuple or a 1-D integer array")


def parse_indices(name: str, values: object) -> NDArray[np.int64]:
    """Return a caller's list of block numbers as a read-only int64 array. Errors as :func:`parse_blocks`."""
    return parse_blocks(name, values).array


def _parse_array(name: str, values: NDArray[np.generic]) -> NDArray[np.int64]:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise TypeError(f"{name} is a {values.ndim}-D {values.dtype} array: must be a 1-D integer array")
    parsed = values.astype(np.int64)  # uint64 beyond int64 turns negative here
    if parsed.size and parsed.min() < 0:
        at = int(np.argmax(parsed < 0))
        raise ParamError(f"{name}[{at}] is {values[at]}: must be in [0, 2**63)")
    return parsed


def execute(
    plan: Plan, dst: Tensors, src: Tensors, pool: CopyPool | None, deadline_ns: int, cancelled: bytearray | None = None
) -> int:
    """Move the bytes of ``plan`` from ``src`` to ``dst``, in this thread and those of ``pool``.

    The GIL is released for more than 256 KiB; other threads help above 1 MiB unless the plan is ordered. A run whose
    two ends overlap moves like ``memmove``. When the call returns every process sees the bytes.

    It stops early at ``deadline_ns`` (of ``time.monotonic_ns()``), or once the byte ``cancelled`` is not zero; both are
    checked about every 4 MiB.

    Returns:
        Bytes done: fewer than ``plan.nbytes`` only if it stopped early.

    Raises:
        ParamError: A tensor that one end does not have, a run that ends outside a tensor, or a wrong ``plan.nbytes``:
            nothing is written.
    """
    return _native.execute(plan, dst.native, src.native, pool, min(deadline_ns, NO_DEADLINE), cancelled)
