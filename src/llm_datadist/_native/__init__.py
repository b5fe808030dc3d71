"""Native code: block lists, plans, copies, guards, lanes, encryption.

It checks arguments before it touches memory. Threads: any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llm_datadist._native import _native
from llm_datadist._native._native import (
    AFTER,
    CHANGED_BEFORE,
    CHANGED_DURING,
    MAX_REQUEST_RUNS,
    WRITER_PAGE_BYTES,
    WRITER_SLOTS,
    BlockList,
    BlockPlanner,
    BriefPoll,
    Canary,
    CopyPool,
    Device,
    DeviceMemory,
    DeviceMover,
    Ending,
    GuardSet,
    KeyTable,
    LaneLoad,
    LentBlocks,
    Meter,
    OperationMeter,
    PinnedMemory,
    Place,
    Plan,
    ProcessMemory,
    ReplyCache,
    Requests,
    Stream,
    StreamEvent,
    Timer,
    Use,
    UseGate,
    Waiter,
    WriteIntent,
    add_load,
    advance_generation,
    await_work,
    check_mapped,
    check_plan,
    check_signals,
    close_elsewhere,
    close_writers,
    closing,
    copy_rule,
    count_keys,
    decode_request,
    encode_request,
    execute,
    find_writers,
    least_loaded,
    load_generation,
    parse_blocks,
    parse_pairs,
    peek_process,
    plan_blocks,
    plan_pieces,
    plan_row,
    readable,
    surviving,
    unmap_elsewhere,
    writer_sequence,
)
from llm_datadist._native.cpus import usable_cpus
from llm_datadist._native.lane_engine import LaneEngine, LaneEvent, LaneLost, Outcome, ReadAsked, WriteAsked
from llm_datadist._native.plan import MAPPED, NO_DEADLINE, USER, Tensors
from llm_datadist.errors import NoneArgument, ParamError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def parse_other_blocks(name: str, values: object) -> BlockList | None:
    """Parse the arrays that :func:`parse_blocks` leaves, and raise its errors; None for a list without None."""
    if isinstance(values, (list, tuple)):
        for i, value in enumerate(values):
            if value is None:
                raise NoneArgument(f"{name}[{i}] is None: must be a block number")
        return None
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise TypeError(f"{name} is a {values.ndim}-D {values.dtype} array: must be a 1-D integer array")
        array = values.astype(np.int64)  # uint64 beyond int64 turns negative
        if array.size and array.min() < 0:
            at = int(np.argmax(array < 0))
            raise ParamError(f"{name}[{at}] is {values[at]}: must be in [0, 2**63)")
        return BlockList(array)
    if values is None:
        raise NoneArgument(f"{name} is None: must be a list of block numbers")
    raise TypeError(f"{name} is {type(values).__name__}: must be a list, a tuple or a 1-D integer array")


def parse_indices(name: str, values: object) -> NDArray[np.int64]:
    """Return block numbers as a read-only int64 array. Errors as in :func:`parse_blocks`."""
    return parse_blocks(name, values).array
