"""What an initiator tells a target in the meta of a READ or WRITE: which memory, and which bytes of it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np

from llm_datadist.errors import ProtocolError
from llm_datadist.native import Plan
from llm_datadist.transport.exports import ADDRESS_SPACE

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MAX_HANDLE_BYTES", "MAX_RUNS", "LaneRequest", "decode_request", "encode_request"]

MAX_HANDLE_BYTES: Final = 4096
MAX_RUNS: Final = 1 << 15
"""Runs of one request: half of what a meta of 1 MiB has room for."""

_LENGTH: Final = struct.Struct("<I")
_RUN_BYTES: Final = 16

Size = Annotated[int, msgspec.Meta(ge=0, le=ADDRESS_SPACE)]
Handle = Annotated[bytes, msgspec.Meta(max_length=MAX_HANDLE_BYTES)]


class _Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    handle: Handle
    first: Size
    count: Size
    extent: Size
    nbytes: Size


@dataclass(frozen=True, slots=True)
class LaneRequest:
    """A peer's request for memory of this process: well formed, nothing more is known to be true of it.

    Attributes:
        handle: What the peer was given to name the memory.
        extent: Bytes of each tensor, as the peer believes.
        plan: The bytes, with the same offsets as destination and source; to be checked against the true memory.
    """

    handle: bytes
    extent: int
    plan: Plan


def encode_request(handle: bytes, extent: int, plan: Plan, *, write: bool) -> bytes:
    """Return the meta for the target's side of a plan: its destination when writing, else its source."""
    first = plan.dst_first if write else plan.src_first
    head = msgspec.msgpack.encode(_Head(handle, first, plan.count, extent, plan.nbytes))
    spans = plan.runs[:, (0 if write else 1, 2)].astype("<u8", order="C")
    return b"".join((_LENGTH.pack(len(head)), head, spans.tobytes()))


def decode_request(meta: bytes) -> LaneRequest:
    """Return the request in a meta.

    Raises:
        ProtocolError: It is none.
    """
    if len(meta) < _LENGTH.size:
        raise ProtocolError(f"a lane request of {len(meta)} bytes has no head")
    (length,) = _LENGTH.unpack_from(meta)
    start = _LENGTH.size + length
    if start > len(meta) or (len(meta) - start) % _RUN_BYTES or (len(meta) - start) // _RUN_BYTES > MAX_RUNS:
        raise ProtocolError(f"a lane request of {len(meta)} bytes with a head of {length} does not add up")
    try:
        head = msgspec.msgpack.decode(memoryview(meta)[_LENGTH.size : start], type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a lane request cannot be decoded: {error}") from error
    runs = _runs_of(meta, start)
    return LaneRequest(head.handle, head.extent, Plan(head.first, head.first, head.count, runs, False, head.nbytes))


def _runs_of(meta: bytes, start: int) -> NDArray[np.uint64]:
    spans = np.frombuffer(meta, "<u8", offset=start).reshape(-1, 2)
    return np.ascontiguousarray(spans[:, (0, 0, 1)], np.uint64)
