"""Native code: block lists, plans, copies, guards, lanes, encryption.

It checks arguments before it touches memory. Threads: any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    """Parse the values that :func:`parse_blocks` leaves, and raise its errors; None for a list without None."""
    if isinstance(values, (list, tuple)):
        for i, value in enumerate(values):
            if value is None:
                raise NoneArgument(f"{name}[{i}] is None: must be a block number")
        return None
    if isinstance(values, range):
        return BlockList(_of_range(name, values))
    if any((each.__module__, each.__name__) == ("torch", "Tensor") for each in type(values).__mro__):
        tensor: Any = values
        try:
            values = tensor.numpy()
        except (TypeError, RuntimeError) as error:  # of another device or layout, or with a gradient
            kind = f"a {tensor.dtype} tensor on {tensor.device} ({tensor.layout})"
            raise TypeError(f"{name} is {kind}: must be a dense 1-D integer tensor on the CPU") from error
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
    raise TypeError(f"{name} is {type(values).__name__}: must be a list, tuple, range, or 1-D integer array or tensor")


def _of_range(name: str, blocks: range) -> NDArray[np.int64]:
    if not blocks:
        return np.empty(0, np.int64)
    first, last = blocks[0], blocks[-1]
    if min(first, last) < 0 or max(first, last) >= 1 << 63:
        raise ParamError(f"{name} is {blocks}: must be in [0, 2**63)")
    count = len(blocks)
    if count > 1 << 27:  # a gigabyte
        raise ParamError(f"{name} is {blocks}: {count} blocks, a range may have 2**27 at most")
    return first + np.arange(count) * (blocks.step if count > 1 else 1)


def parse_indices(name: str, values: object) -> NDArray[np.int64]:
    """Return block numbers as a read-only int64 array. Errors as in :func:`parse_blocks`."""
    return parse_blocks(name, values).array
