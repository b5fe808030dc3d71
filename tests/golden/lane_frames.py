"""Frames of data lanes as two engines send them to each other, and what both sides of a lane's joining send."""

import asyncio
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from types import MappingProxyType
from typing import Final, NamedTuple
from unittest.mock import patch

import numpy as np

from faults.lane_ends import HEADER, deadline, next_event
from faults.sealing import FAR_KEYS, LENGTH, NEAR_KEYS, TAG_BYTES
from llm_datadist._deadline import Deadline
from llm_datadist._native import LaneEngine, Plan, ReadAsked, WriteAsked, decode_request, encode_request
from llm_datadist._transport import lanes
from llm_datadist.testing.scene import tensors_over
from tests.golden.values import some

SECONDS: Final = 10.0


class Requested(NamedTuple):
    """What the meta of a READ or a WRITE says."""

    handle: bytes
    extent: int
    first: int
    tensors: int
    runs: list[list[int]]  # offset at the owner, bytes
    nbytes: int


def request_of(meta: bytes) -> Requested:
    handle, extent, plan = decode_request(meta)
    return Requested(handle, extent, plan.dst_first, plan.count, plan.runs[:, 1:].tolist(), plan.nbytes)


def written(request: Requested, *, write: bool = False) -> bytes:
    """Return the meta of a request; offsets of the initiator's side differ, and are not sent."""
    runs = [(place, 7, size) if write else (7, place, size) for place, size in request.runs]
    firsts = (request.first, 99) if write else (99, request.first)
    plan = Plan(*firsts, request.tensors, np.array(runs, np.uint64), False, request.nbytes)
    return encode_request(request.handle, request.extent, plan, write)


REQUEST: Final = Requested(
    handle=b"a handle", extent=163_840, first=2, tensors=3, runs=[[4096, 100], [8192, 20]], nbytes=360
)


class Lane(NamedTuple):
    """One frame, as the receiving engine understands it."""

    kind: str
    id: int
    meta: bytes = b""
    payload: bytes = b""
    ending: str = ""
    code: int = 0
    text: str = ""


META: Final = written(REQUEST)
READ_BYTES, WRITTEN_BYTES = some(0, 24), some(100, 40)
REFUSAL: Final = "no, thänk you"
#: In the order of :func:`exchange`: frame, sent by the near engine, bytes without encryption.
FRAMES: Final = {
    "READ": (Lane("READ", 1, META), True, HEADER.size + len(META)),
    "DATA": (Lane("DATA", 1, b"", READ_BYTES, "GOOD"), False, HEADER.size + len(READ_BYTES) + 8),
    "WRITE": (Lane("WRITE", 2, META, WRITTEN_BYTES), True, HEADER.size + len(META) + len(WRITTEN_BYTES)),
    "RESULT": (Lane("RESULT", 2, b"", b"", "GOOD"), False, HEADER.size + 4),
    "READ, second": (Lane("READ", 3, META), True, HEADER.size + len(META)),
    "RESULT, refused": (
        Lane("RESULT", 3, b"", b"", "REFUSED", 77, REFUSAL),
        False,
        HEADER.size + 4 + len(REFUSAL.encode()),
    ),
}


def exchange(*, encrypted: bool, instead: Mapping[str, bytes] = MappingProxyType({})) -> dict[str, tuple[bytes, Lane]]:
    """Return each frame as it was sent, and as the other engine understood it, or the bytes passed on ``instead``."""
    found: dict[str, tuple[bytes, Lane]] = {}
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(LaneEngine(1))) for _ in range(2)]
        socks, numbers = [], []
        for engine, keys in zip(engines, (NEAR_KEYS, FAR_KEYS), strict=True):
            theirs, ours = socket.socketpair()
            ours.settimeout(SECONDS)
            socks.append(stack.enter_context(ours))
            numbers.append(engine.add_lane(theirs.detach(), keys if encrypted else None))
        near, far = engines

        def passed_on(name: str) -> bytes:
            _, is_near, nbytes = FRAMES[name]
            sent = _received(socks[not is_near], nbytes, encrypted=encrypted)
            socks[is_near].sendall(instead.get(name, sent))
            return sent

        into, memory = (np.zeros(size, np.uint8) for size in (len(READ_BYTES), len(WRITTEN_BYTES)))
        source, other = (np.frombuffer(data, np.uint8) for data in (READ_BYTES, WRITTEN_BYTES))

        def asked_to_read(name: str) -> ReadAsked:
            sent = passed_on(name)
            event = next_event(far, ReadAsked)
            found[name] = sent, Lane("READ", event.id, event.meta)
            return event

        def ended(name: str, job: int, into: bytes | None = None) -> None:
            sent = passed_on(name)
            ending, code, _, text = near.wait(job, deadline(SECONDS))
            kind = name.partition(",")[0]
            found[name] = sent, Lane(kind, job, b"", into or b"", ending.name, code, text)

        job = near.start(numbers[0], META, _row(into.size), tensors_over(into), write=False)
        event = asked_to_read("READ")
        far.reply(event.lane, event.id, _row(source.size), tensors_over(source), [], 0, write=False)
        ended("DATA", job)
        found["DATA"] = found["DATA"][0], found["DATA"][1]._replace(payload=into.tobytes())

        job = near.start(numbers[0], META, _row(other.size), tensors_over(other), write=True)
        sent = passed_on("WRITE")
        asked = next_event(far, WriteAsked)
        far.reply(asked.lane, asked.id, _row(memory.size), tensors_over(memory), [], 0, write=True)
        ended("RESULT", job)
        found["WRITE"] = sent, Lane("WRITE", asked.id, asked.meta, memory.tobytes())

        job = near.start(numbers[0], META, _row(into.size), tensors_over(into), write=False)
        event = asked_to_read("READ, second")
        far.refuse(event.lane, event.id, 77, REFUSAL)
        ended("RESULT, refused", job)
        for sock in socks:
            sock.setblocking(False)
            try:
                raise ValueError(f"bytes that no frame accounts for: {sock.recv(100).hex()}")
            except BlockingIOError:
                continue
    return found


def _row(nbytes: int) -> Plan:
    return Plan(0, 0, 1, np.array([[0, 0, nbytes]], np.uint64), False, nbytes)


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = sock.recv(nbytes - len(data))
        if not more:
            raise EOFError(f"the lane was closed after {len(data)} of {nbytes} bytes")
        data += more
    return data


def _received(sock: socket.socket, nbytes: int, *, encrypted: bool) -> bytes:
    """Return the bytes of one frame; the records of an encrypted one."""
    if not encrypted:
        return _exactly(sock, nbytes)
    data = b""
    while nbytes > 0:
        head = _exactly(sock, LENGTH.size)
        nbytes -= (size := LENGTH.unpack(head)[0])
        data += head + _exactly(sock, size + TAG_BYTES)
    return data


class Join(NamedTuple):
    """What both sides of a lane know when it joins a link."""

    token: bytes
    secret: bytes
    dialer_nonce: bytes
    listener_nonce: bytes


Keys = tuple[bytes, bytes] | None
"""Of the dialer's bytes, of the listener's."""

JOINS: Final = {
    "plain": Join(some(1), b"", b"", b""),
    "encrypted": Join(token=some(1), secret=some(0x40, 32), dialer_nonce=some(0x21), listener_nonce=some(0x31)),
}


def dialled(value: Join, listener: bytes = b"") -> tuple[bytes, Keys]:
    """Return what the dialer sends to a listener with that nonce, or with those bytes, and its keys."""
    listener = listener or value.listener_nonce + b"\x01"

    def answer() -> bytes:
        peer, _ = server.accept()
        with peer:
            peer.settimeout(SECONDS)
            peer.sendall(listener)
            return _exactly(peer, len(lanes.LANE_PREAMBLE) + len(value.token) + (48 if value.secret else 0))

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        server.settimeout(SECONDS)
        sent = pool.submit(answer)
        with _nonce(value.dialer_nonce):
            address, until = server.getsockname(), Deadline(int(SECONDS * 1000))
            (lane,) = lanes.dial_lanes(address, value.token, 1, until, secret=value.secret)
        with lane.socket:
            return sent.result(SECONDS), lane.keys


def listened(value: Join, dialer: bytes) -> tuple[bytes, Keys, bytes]:
    """Return what the listener sends to a dialer that sends these bytes, its keys, and the token."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(dialer)
        with _nonce(value.listener_nonce):
            keys, token = asyncio.run(_listen(here, value.secret))
        there.settimeout(SECONDS)
        return _exactly(there, len(value.listener_nonce) + 1), keys, token


def join_of(value: Join, *, dialer: bytes = b"", listener: bytes = b"") -> Join:
    """Return what a side believes that hears these bytes; its keys must be those of the other side."""
    if dialer:
        _, keys, token = listened(value, dialer)
        other = dialled(value)[1]
    else:
        (_, keys), token = dialled(value, listener), value.token
        other = listened(value, dialled(value)[0])[1]
    if keys != other:
        raise ValueError("the two sides have other keys")
    return value._replace(token=token)


async def _listen(sock: socket.socket, secret: bytes) -> tuple[Keys, bytes]:
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    if (greeting := await loop.sock_recv(sock, len(lanes.LANE_PREAMBLE))) != lanes.LANE_PREAMBLE:
        raise ValueError(f"not the preamble of a lane: {greeting!r}")
    token = await lanes.read_lane_greeting(loop, sock)
    lane = await asyncio.wait_for(lanes.check_lane(loop, sock, secret), SECONDS)
    if lane is None:
        raise ValueError("the listener does not believe the proof")
    await lanes.accept_lane(loop, sock)
    return (lane.keys[1], lane.keys[0]) if lane.keys else None, token


@contextmanager
def _nonce(value: bytes) -> Iterator[None]:
    with patch("secrets.token_bytes", lambda nbytes: value[:nbytes]):
        yield
