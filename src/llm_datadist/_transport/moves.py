"""A peer asks the owner of memory to move bytes: the request, the reply and the refusal, on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from llm_datadist import _native
from llm_datadist._native import MAX_REQUEST_RUNS
from llm_datadist._native.lane_engine import CHANGED
from llm_datadist._transport.connection import MemoryChanged
from llm_datadist.errors import (
    CacheMismatch,
    LLMException,
    LLMStatusCode,
    ParamError,
    ProtocolError,
    TransferFailed,
    code_2_status,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist._native import Outcome, Plan, Tensors

ONE_REQUEST_BYTES: Final = 1 << 20
"""Measured: a transfer of fewer bytes gains nothing from a second socket."""


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """A peer's request for memory of this process. It is well-formed; its numbers are not checked yet."""

    handle: bytes  # what the peer was given to name the memory
    extent: int  # bytes of each tensor, as the peer believes
    plan: Plan  # with the same offsets as destination and source; to be checked against the true memory
    write: bool


@dataclass(frozen=True, slots=True)
class MoveReply:
    """The owner's reply to a request: this memory, as long as these guards hold."""

    tensors: Tensors  # all of what the handle names, valid until Transport.quiesce() has returned for the tag
    guards: Sequence[tuple[int, int]] = ()  # (address, generation), checked before the first byte and after the last
    tag: int = 0  # what quiesce() will call this memory
    standing: bool = False  # later requests with this handle need not be asked about while the guards hold
    plan: Plan | None = None  # instead of the request's, which does not know where in the tensors it is


class MoveOwner(Protocol):
    """What knows the memory of this process. Threads: control; short."""

    def on_move(self, link: object, request: MoveRequest) -> MoveReply:
        """Return what the peer of ``link`` may use. An ``LLMException`` refuses it, with its status and text."""


class Move(NamedTuple):
    """A request that was granted."""

    handle: bytes
    plan: Plan
    reply: MoveReply


def decode_request(meta: bytes, *, write: bool = False) -> MoveRequest:
    """Return the request in a meta; ``ProtocolError`` when it holds none."""
    try:
        handle, extent, plan = _native.decode_request(meta)
    except ParamError as error:
        raise ProtocolError(str(error)) from None
    return MoveRequest(handle, extent, plan, write)


def answer(owner: MoveOwner, link: object, meta: bytes, *, write: bool) -> Move:
    """Answer a peer that asks this side to move bytes. Raises LLMException to refuse it."""
    request = decode_request(meta, write=write)
    reply = owner.on_move(link, request)
    if request.extent != reply.tensors.extent:
        raise ParamError(f"the tensors have {reply.tensors.extent} bytes, not {request.extent}")
    return Move(request.handle, reply.plan or request.plan, reply)


def status_of(error: LLMException) -> tuple[int, str]:
    """Return a refusal as it travels: the status as u32, never success, and one line."""
    return int(error.status_code) & 0xFFFFFFFF or int(LLMStatusCode.LLM_FAILED), " ".join(str(error).split())[:4000]


def is_one_request(plan: Plan) -> bool:
    """Return True for a plan that is one request, whatever the number of sockets."""
    return 0 < plan.nbytes <= ONE_REQUEST_BYTES and len(plan.runs) <= MAX_REQUEST_RUNS


def refusal(outcome: Outcome, progress: str, *, untouched: bool) -> LLMException:
    """Return the target's refusal as the exception a caller expects."""
    code = code_2_status(outcome.code)  # the engine's own are small numbers, which no status of the interface is
    text = " ".join(f"{progress}: the peer refused: {outcome.text}".splitlines())
    if not untouched:
        return TransferFailed(f"{text}; the addressed bytes are undefined", phase="copy")
    if outcome.code in (CHANGED, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        return MemoryChanged(text, status_code=code, phase="copy")
    kind = CacheMismatch if code is LLMStatusCode.LLM_PARAM_INVALID else TransferFailed
    return kind(text, status_code=code, phase="copy")
