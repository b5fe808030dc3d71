"""What two processes send to each other over a data lane, from its joining on."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import cache
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from faults.lane_ends import BUDGET_S, deadline, next_event, one_row
from llm_datadist._deadline import Deadline
from llm_datadist._native import LaneEngine, Plan, ReadAsked, WriteAsked, decode_request, encode_request
from llm_datadist._transport.tcp import lanes
from llm_datadist.testing.scene import tensors_over
from tests.golden.values import some

#: Handle, bytes of a tensor, first tensor, tensors, and runs of the owner's side: what a request tells.
REQUEST: Final = b"a handle", 163_840, 2, 3, [[4096, 100], [8192, 20]]
TOKEN: Final = some("token")
NAMES: Final = (
    *("dialer joins", "listener answers"),
    *("READ", "DATA", "WRITE", "RESULT", "READ, second", "RESULT, refused"),
)
_REFUSAL: Final = "no, thänk you"


def request_of(meta: bytes) -> Any:
    handle, extent, plan = decode_request(meta)
    return handle, extent, plan.dst_first, plan.count, plan.runs[:, 1:].tolist()


def request(value: Any, *, write: bool = False) -> bytes:
    """Return the meta of a request; offsets of the initiator's side differ, and are not sent."""
    handle, extent, first, count, places = value
    runs = [(place, 7, size) if write else (7, place, size) for place, size in places]
    dst, src = (first, 99) if write else (99, first)
    nbytes = count * sum(size for _, size in places)
    return encode_request(handle, extent, Plan(dst, src, count, np.array(runs, np.uint64), False, nbytes), write)


def sent(secret: bytes, name: str) -> bytes:
    """Return what a side of a lane sends, encrypted if there is a secret."""
    return _sent(secret)[name]


@cache
def _sent(secret: bytes) -> dict[str, bytes]:
    """Each side has to understand the other."""
    found: dict[str, bytes] = {}
    logs = bytearray(), bytearray()

    def pump(here: socket.socket, there: socket.socket, log: bytearray) -> None:
        here.settimeout(BUDGET_S)
        while data := here.recv(1 << 16):
            log += data
            there.sendall(data)
        there.shutdown(socket.SHUT_WR)

    def cut() -> None:
        for log in logs:
            found[NAMES[len(found)]] = bytes(log)
            log.clear()

    with ExitStack() as stack:
        enter = stack.enter_context
        pool = enter(ThreadPoolExecutor(3))
        nonces = iter((some("dialer"), some("listener")))
        enter(patch("secrets.token_bytes", lambda nbytes: next(nonces)[:nbytes]))
        server = enter(socket.create_server(("127.0.0.1", 0)))
        dialling = pool.submit(
            lanes.dial_lanes, server.getsockname(), TOKEN, 1, Deadline(int(BUDGET_S * 1000)), secret=secret
        )
        dialer, listener = enter(server.accept()[0]), enter((pair := socket.socketpair())[0])
        pool.submit(pump, dialer, listener, logs[0])
        pool.submit(pump, listener, dialer, logs[1])
        theirs = asyncio.run(_listen(enter(pair[1]), secret))
        (ours,) = dialling.result(BUDGET_S)
        near, far = (enter(closing(LaneEngine(1))) for _ in range(2))
        number = near.add_lane(ours.socket.detach(), ours.keys)
        far.add_lane(theirs.socket.detach(), theirs.keys)
        cut()
        meta = request(REQUEST)

        def ask(into: Any, source: Any, refusal: str = "", *, write: bool = False) -> tuple[Any, ...]:
            here, there = (source, into) if write else (into, source)
            plan = one_row(source.size)
            job = near.start(number, meta, plan, tensors_over(here), write=write)
            asked: ReadAsked | WriteAsked = next_event(far, WriteAsked) if write else next_event(far, ReadAsked)
            assert (asked.id, asked.meta) == (job, meta)
            if refusal:
                far.refuse(asked.lane, job, 77, refusal)
            else:
                far.reply(asked.lane, job, plan, tensors_over(there), [], 0, write=write)
            ending, code, _, text = near.wait(job, deadline())
            return ending.name, code, text, into.tobytes() == source.tobytes()

        source = np.frombuffer(some("what is moved", 40), np.uint8)
        for write in (False, True):
            assert ask(np.zeros_like(source), source, write=write) == ("GOOD", 0, "", True)
            cut()
        refused = ask(np.zeros_like(source), source, _REFUSAL)
        assert refused == ("REFUSED", 77, _REFUSAL, False)
        cut()
    return found


async def _listen(sock: socket.socket, secret: bytes) -> lanes.LaneSocket:
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    assert await loop.sock_recv(sock, len(lanes.LANE_PREAMBLE)) == lanes.LANE_PREAMBLE
    assert await loop.sock_recv(sock, lanes.TOKEN_BYTES) == TOKEN
    lane = await asyncio.wait_for(lanes.check_lane(loop, sock, secret), BUDGET_S)
    await lanes.accept_lane(loop, sock)
    return lane
