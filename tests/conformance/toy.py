"""The transport toy: what a new transport needs, in one module. Its bytes travel in messages of the control connection.

The owner of the memory moves them on its control thread, so that it checks its guards itself.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
from numpy.typing import NDArray

from llm_datadist._memory.exports import RegionDescriptor
from llm_datadist._native import (
    NO_DEADLINE,
    Ending,
    Outcome,
    Plan,
    Tensors,
    check_plan,
    encode_request,
    execute,
    load_generation,
)
from llm_datadist._native.lane_engine import CHANGED, TORN
from llm_datadist._native.plan import split_plan
from llm_datadist._transport.choose import Verdict
from llm_datadist._transport.connection import Capabilities, Connection, ServedConnection, Transfer
from llm_datadist._transport.moves import MoveOwner, MoveReply, answer, refusal, status_of
from llm_datadist._transport.registry import ORDER
from llm_datadist._transport.transport import Context, Meeting, Transport, Wire
from llm_datadist.errors import DeadlineExceeded, LLMException, ProtocolError

_SPOKEN = b"toy 1"
_PART_BYTES, _PART_RUNS = 256 << 10, 1 << 12
_CAPABILITIES = Capabilities("toy", shared_regions=True, non_pool_memory=True, remote_guards=True)


class Ask(msgspec.Struct, array_like=True):
    """Initiator -> owner: move this; ``data`` are the bytes of a write."""

    meta: bytes
    write: bool
    data: bytes


class Said(msgspec.Struct, array_like=True):
    """Owner -> initiator: a status, 0 for success, why, and the bytes of a read."""

    code: int
    text: str
    data: bytes


_encode = msgspec.msgpack.Encoder().encode
_ask = msgspec.msgpack.Decoder(Ask).decode
_said = msgspec.msgpack.Decoder(Said).decode


class ToyTransport(Transport):
    name = "toy"
    capabilities = _CAPABILITIES

    def __init__(self, context: Context) -> None:
        self._owner, self._wire, self._moving = context.owner, context.wire, threading.Lock()

    def offer(self, meeting: Meeting) -> bytes:
        return _SPOKEN

    def judge(self, meeting: Meeting) -> Verdict:
        spoken = meeting.theirs.get(self.name) == _SPOKEN
        return Verdict(spoken, "toys on both sides" if spoken else "the peer has no toy")

    def connect(self, meeting: Meeting) -> Connection:
        server = ToyServer(self._owner, self._moving)
        return ToyConnection(self._wire, server, writable=meeting.exports.writable)

    def quiesce(self, tag: int, private: NDArray[np.uint64] | None) -> None:
        with self._moving:  # the guards have been advanced: what comes later is refused
            pass


class ToyServer:
    """Serves the peer of one connection, on the control thread."""

    def __init__(self, owner: MoveOwner, moving: threading.Lock) -> None:
        self.link: object = None
        self._owner, self._moving = owner, moving

    def on_request(self, data: bytes, reply: Callable[[bytes], None]) -> None:
        try:
            request = _ask(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"toy: a request that is none: {error}") from error
        try:
            _, plan, granted = answer(self._owner, self.link, request.meta, write=request.write)
            with self._moving:
                said = _serve(plan, granted, request)
        except LLMException as error:
            said = Said(*status_of(error), b"")
        reply(_encode(said))

    def on_late_answer(self, data: bytes) -> bytes | None:
        return None


def _serve(plan: Plan, granted: MoveReply, request: Ask) -> Said:
    if not _current(granted):
        return Said(CHANGED, "a guard has changed", b"")
    packing, buffer = _packed(plan, request.data if request.write else None)
    dst, src = (granted.tensors, buffer) if request.write else (buffer, granted.tensors)
    execute(packing(dst=not request.write), dst.native, src.native, None, NO_DEADLINE)
    if not _current(granted):
        return Said(TORN, "a guard changed meanwhile", b"")
    return Said(0, "", b"" if request.write else buffer.memory.tobytes())


def _current(granted: MoveReply) -> bool:
    return all(load_generation(at) == generation for at, generation in granted.guards)


class _Buffer(Tensors):
    """The bytes of a plan one after the other, one row for each tensor."""

    memory: NDArray[np.uint8]


def _packed(plan: Plan, data: bytes | None) -> tuple[Callable[..., Plan], _Buffer]:
    """Return the buffer of a plan, with its bytes if there are any, and what makes the plan between it and tensors."""
    per_tensor = plan.nbytes // max(1, plan.count)
    memory = np.zeros(plan.nbytes, np.uint8)
    if data is not None:
        if len(data) != plan.nbytes:
            raise ProtocolError(f"toy: {len(data)} bytes came for a plan of {plan.nbytes}")
        memory[:] = np.frombuffer(data, np.uint8)
    bases = np.arange(plan.count, dtype=np.uint64) * np.uint64(per_tensor) + np.uint64(memory.ctypes.data or 1)
    buffer = _Buffer(bases, per_tensor)
    buffer.memory = memory

    def packing(*, dst: bool) -> Plan:
        """``dst``: the buffer is the destination."""
        runs = plan.runs.copy()
        runs[:, 0 if dst else 1] = np.cumsum(runs[:, 2]) - runs[:, 2]
        return plan.replace(runs=runs, dst_first=0) if dst else plan.replace(runs=runs, src_first=0)

    return packing, buffer


class ToyConnection(ServedConnection):
    """A connection whose bytes travel in messages."""

    capabilities = _CAPABILITIES

    def __init__(
        self, wire: Wire, server: ToyServer, regions: Iterable[RegionDescriptor] = (), *, writable: bool
    ) -> None:
        self.server: ToyServer = server
        self._wire = wire
        super().__init__(regions, writable=writable)

    def begin(self, link: object) -> None:
        self.server.link = link

    def _move(self, transfer: Transfer) -> None:
        local, remote, write, done = transfer.local, transfer.remote, transfer.write, 0
        check_plan(transfer.plan, *transfer.sides())
        for part in split_plan(transfer.plan, _PART_BYTES, _PART_RUNS):
            if time.monotonic_ns() >= transfer.deadline.expires_ns:
                raise transfer.timeout(done)
            packing, buffer = _packed(part, None)
            if write:
                execute(packing(dst=True), buffer.native, local.native, None, NO_DEADLINE)
            meta = encode_request(remote.handle, remote.extent, part, write)
            said = self._asked(transfer, Ask(meta, write, buffer.memory.tobytes() if write else b""), done)
            if said.code:
                outcome = Outcome(Ending.REFUSED, said.code, 0, said.text)
                raise refusal(outcome, transfer.progress(done), untouched=said.code != TORN and not done)
            if not write:
                packing, buffer = _packed(part, said.data)
                execute(packing(dst=False), local.native, buffer.native, None, NO_DEADLINE)
            done += part.nbytes

    def _asked(self, transfer: Transfer, request: Ask, done: int) -> Said:
        try:
            return _said(self._wire.ask(self.server.link, _encode(request), transfer.deadline))
        except DeadlineExceeded as error:
            raise transfer.timeout(done) from error
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"toy: an answer that is none: {error}") from error

    def _release(self) -> None:
        """Nothing is owned."""


def regions_of(sizes: dict[int, int], *, writable: bool) -> list[RegionDescriptor]:
    """Return what a peer says of its pools: by region, how many bytes."""
    return [RegionDescriptor(region, size, "", writable) for region, size in sizes.items()]


@contextmanager
def first_of_all() -> Iterator[None]:
    """Links to come take the toy, where both sides have it."""
    ORDER.insert(0, ToyTransport)
    yield
    ORDER.remove(ToyTransport)
