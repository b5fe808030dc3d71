"""The transport toy: KV bytes travel in messages of the link's control channel."""

import threading
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from llm_datadist.errors import DeadlineExceeded, LLMException, ParamError, ProtocolError
from llm_datadist.transport import (
    CHANGED,
    NO_DEADLINE,
    TORN,
    Capabilities,
    Connection,
    Context,
    Meeting,
    Plan,
    ServedConnection,
    Tensors,
    Transfer,
    Transport,
    Verdict,
    answer,
    encode_request,
    execute,
    refusal,
    split_plan,
    status_of,
)

_CAPABILITIES = Capabilities("toy", shared_regions=True, non_pool_memory=True, remote_guards=True)
_PART_BYTES = 256 << 10  # a message has at most 1 MiB
_encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(tuple[bytes, bool, bytes]).decode  # handle and plan; write or not; bytes to write
_reply = msgspec.msgpack.Decoder(tuple[int, str, bytes]).decode  # status, reason, bytes that were read


class ToyTransport(Transport):
    name = "toy"
    capabilities = _CAPABILITIES

    def __init__(self, context: Context) -> None:
        self.context = context
        self.moving = threading.Lock()  # held while memory of this side is touched for a peer

    def offer(self, meeting: Meeting) -> bytes:
        return b"version 1"

    def judge(self, meeting: Meeting) -> Verdict:
        spoken = meeting.theirs.get(self.name) == b"version 1"
        return Verdict(spoken, "toys on both sides" if spoken else "the peer has no toy of this version")

    def connect(self, meeting: Meeting) -> Connection:
        return ToyConnection(self, writable=meeting.exports.writable)

    def quiesce(self, tag: int, private: NDArray[np.uint64] | None) -> None:
        with self.moving:  # the guards have advanced, so later requests are refused
            pass


class ToyServer:
    """Moves bytes of this side's memory for the peer, on the control thread."""

    def __init__(self, transport: ToyTransport) -> None:
        self.link: object = None
        self._transport = transport

    def on_request(self, data: bytes, reply: Callable[[bytes], None]) -> None:
        try:
            meta, write, sent = _request(data)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"toy: malformed request: {error}") from error
        try:
            said = self._serve(meta, write, sent)
        except LLMException as error:
            said = *status_of(error), b""
        reply(_encode(said))

    def _serve(self, meta: bytes, write: bool, sent: bytes) -> tuple[int, str, bytes]:
        _, plan, memory = answer(self._transport.context.owner, self.link, meta, write=write)
        if plan.nbytes > _PART_BYTES:
            raise ParamError(f"toy: {plan.nbytes} bytes in one request, at most {_PART_BYTES}")
        with self._transport.moving:
            if not memory.unchanged():
                return CHANGED, "a guard has changed", b""
            read = b""
            if write:
                scatter(plan, sent, memory.tensors)
            else:
                read = gather(plan, memory.tensors)
            return (0, "", read) if memory.unchanged() else (TORN, "a guard changed during the copy", b"")

    def on_late_answer(self, data: bytes) -> bytes | None:
        return None  # nothing is held for an answer


class ToyConnection(ServedConnection):
    capabilities = _CAPABILITIES

    def __init__(self, transport: ToyTransport, *, writable: bool) -> None:
        self.server: ToyServer = ToyServer(transport)
        self._wire = transport.context.wire
        super().__init__(writable=writable)

    def begin(self, link: object) -> None:
        self.server.link = link

    def _move(self, transfer: Transfer) -> None:
        transfer.prepare()
        done = 0
        for part in split_plan(transfer.plan, _PART_BYTES, 4096):
            self._move_part(transfer, part, done)
            done += part.nbytes

    def _move_part(self, transfer: Transfer, part: Plan, done: int) -> None:
        meta = encode_request(transfer.remote.handle, transfer.remote.extent, part, transfer.write)
        sent = gather(part, transfer.local) if transfer.write else b""
        if transfer.deadline.expired():
            raise transfer.timeout(done)
        try:
            said = self._wire.ask(self.server.link, _encode((meta, transfer.write, sent)), transfer.deadline)
            code, text, read = _reply(said)
        except DeadlineExceeded as error:
            raise transfer.timeout(done) from error
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"toy: malformed answer: {error}") from error
        if code:
            raise refusal(code, text, transfer.progress(done), untouched=code != TORN and not done)
        if not transfer.write:
            scatter(part, read, transfer.local)

    def _release(self) -> None:
        pass  # it owns nothing


def gather(plan: Plan, source: Tensors) -> bytes:
    """Return the bytes that a plan reads, in its order."""
    buffer = np.empty(plan.nbytes, np.uint8)
    packed, tensors = in_order(plan, buffer, 0)
    execute(packed, tensors.native, source.native, None, NO_DEADLINE)
    return buffer.tobytes()


def scatter(plan: Plan, data: bytes, destination: Tensors) -> None:
    """Write the bytes of :func:`gather` to a plan's destination."""
    if len(data) != plan.nbytes:
        raise ProtocolError(f"toy: {len(data)} bytes came for a plan of {plan.nbytes}")
    packed, tensors = in_order(plan, np.frombuffer(data, np.uint8), 1)
    execute(packed, destination.native, tensors.native, None, NO_DEADLINE)


def in_order(plan: Plan, buffer: NDArray[np.uint8], side: int) -> tuple[Plan, Tensors]:
    """Return a plan of which one side, 0 the destination or 1 the source, is a buffer with its bytes in order."""
    runs, extent = plan.runs.copy(), plan.nbytes // max(1, plan.count)
    runs[:, side] = np.cumsum(runs[:, 2]) - runs[:, 2]
    bases = np.arange(plan.count, dtype=np.uint64) * np.uint64(extent) + np.uint64(buffer.ctypes.data)
    packed = plan.replace(src_first=0, runs=runs) if side else plan.replace(dst_first=0, runs=runs)
    return packed, Tensors(bases, extent)
