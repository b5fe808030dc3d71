"""Requests of a peer to move bytes of this side's memory, replies and refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from llm_datadist import _native
from llm_datadist._checks import clean
from llm_datadist._native import MAX_REQUEST_RUNS, check_plan, load_generation
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

    from llm_datadist._native import LentBlocks, Plan, Tensors

ONE_REQUEST_BYTES: Final = 1 << 20
"""Measured: a transfer of at most so many bytes gains nothing from a second socket."""


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """Well-formed request of a peer; its numbers are not checked yet."""

    handle: bytes  # names the memory
    extent: int  # bytes of each tensor, as the peer believes
    plan: Plan  # destination and source have the same offsets
    write: bool


@dataclass(frozen=True, slots=True)
class MoveReply:
    """The owner's reply to a request: the memory, usable while the guards hold."""

    tensors: Tensors  # all that the handle names, valid until Transport.quiesce() has returned for the tag
    guards: Sequence[tuple[int, int]] = ()  # (address, generation), checked before the first byte and after the last
    tag: int = 0  # names this memory in quiesce()
    cacheable: bool = False  # serves later requests with this handle while the guards hold
    lent: LentBlocks | None = None  # which requests with this handle may read; None: all
    plan: Plan | None = None  # replaces that of a request which cannot know its place in the tensors

    def unchanged(self) -> bool:
        """Return True while every guard shows its generation."""
        return all(load_generation(at) == generation for at, generation in self.guards)


class MoveOwner(Protocol):
    """Owner of the memory that peers ask for. Threads: control, briefly."""

    def on_move(self, link: object, request: MoveRequest) -> MoveReply:
        """Return the memory that the peer may use; an LLMException refuses, with its status and text."""


class Move(NamedTuple):
    """A request to which the owner agreed."""

    handle: bytes
    plan: Plan
    reply: MoveReply


def decode_request(meta: bytes, *, write: bool = False) -> MoveRequest:
    """Return the request in ``meta``. Raises ProtocolError if it is malformed."""
    try:
        return MoveRequest(*_native.decode_request(meta), write)
    except ParamError as error:
        raise ProtocolError(str(error)) from None


def answer(owner: MoveOwner, link: object, meta: bytes, *, write: bool) -> Move:
    """Ask the owner, and check that the plan lies in its tensors. Raises LLMException to refuse."""
    request = decode_request(meta, write=write)
    reply = owner.on_move(link, request)
    if request.extent != reply.tensors.extent:
        raise ParamError(f"the tensors have {reply.tensors.extent} bytes, not {request.extent}")
    plan = reply.plan or request.plan
    check_plan(plan, reply.tensors.native, reply.tensors.native)
    return Move(request.handle, plan, reply)


def status_of(error: LLMException) -> tuple[int, str]:
    """Return a refusal for the wire: a u32 status, never success, and one line."""
    return int(error.status_code) & 0xFFFFFFFF or int(LLMStatusCode.LLM_FAILED), clean(str(error), 4000)


def is_one_request(plan: Plan) -> bool:
    return 0 < plan.nbytes <= ONE_REQUEST_BYTES and len(plan.runs) <= MAX_REQUEST_RUNS


def refusal(code: int, text: str, progress: str, *, untouched: bool) -> LLMException:
    """Return the exception for a refusal of the owner; ``untouched``: no byte at the destination has changed.

    ``code`` is a status as :func:`status_of` gives it, or ``CHANGED`` or ``TORN``; ``progress`` as
    :meth:`Transfer.progress`.
    """
    status = code_2_status(code)  # CHANGED and TORN are small numbers, unlike every status
    text = f"{progress}: the peer refused: {clean(text)}"
    if not untouched:
        return TransferFailed(f"{text}; the addressed bytes are undefined", phase="copy")
    if code in (CHANGED, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        return MemoryChanged(text, status_code=status, phase="copy")
    kind = CacheMismatch if status is LLMStatusCode.LLM_PARAM_INVALID else TransferFailed
    return kind(text, status_code=status, phase="copy")
