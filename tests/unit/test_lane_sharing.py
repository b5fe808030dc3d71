"""Large and small transfers over the lanes of one link, against a peer that is played by hand."""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist._deadline import Deadline
from llm_datadist._memory.exports import PRIVATE
from llm_datadist._native import Plan, plan_row
from llm_datadist._transport.lanes import Lanes, decode_request
from llm_datadist._transport.tcp import TcpConnection
from llm_datadist.testing.scene import residue, settled

from . import twin
from .lane_ends import BUDGET_S, DATA, READ, RESULT, WRITE, Wire
from .test_lanes import Handler

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
LARGE = 40 * MIB
PART = 16 * MIB


class Far(Wire):
    """The far end of one lane of a connection: the target, by hand."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(BUDGET_S)

    def asked(self, kind: int) -> tuple[int, int, int]:
        """Return (id, offset, bytes) of the next request, which is for one run."""
        header = self.header()
        assert header[0] == kind
        ((offset, _, nbytes),) = decode_request(self.receive(header[2])).plan.runs.tolist()
        return header[1], offset, nbytes

    def answer(self, id: int, data: twin.Bytes) -> None:
        self.send(DATA, id, payload=data.tobytes() + bytes(8), declared=data.size)

    def is_silent(self) -> bool:
        """Return True when nothing more has come by now."""
        self.sock.setblocking(False)
        try:
            return not self.sock.recv(1)
        except BlockingIOError:
            return True
        finally:
            self.sock.settimeout(BUDGET_S)


@contextmanager
def played(lanes: int) -> Iterator[tuple[TcpConnection, list[Far], ThreadPoolExecutor]]:
    """Yield a connection, the far ends of its lanes in their order, and threads for its calls."""
    pairs = [socket.socketpair() for _ in range(lanes)]
    near = Lanes(1, Handler())
    with ExitStack() as stack:
        stack.callback(near.close)
        fars = [stack.enter_context(Far(far)) for _, far in pairs]
        connection = TcpConnection(near, near.open([near for near, _ in pairs]), [], writable=True)
        threads = stack.enter_context(ThreadPoolExecutor(4))
        stack.callback(connection.abort)  # before the threads are joined
        connection.begin("near")
        yield connection, fars, threads


def begin(
    connection: TcpConnection, threads: ThreadPoolExecutor, data: twin.Bytes, *, write: bool = False
) -> Future[int]:
    """Read one run into ``data``, or write it, in one of the threads."""
    remote = connection.map(np.array([PRIVATE], np.uint32), np.array([64], np.uint64), data.size, writable=True)
    plan = Plan(0, 0, 1, plan_row(0, 0, data.size), False, data.size)
    verb = connection.write if write else connection.read
    return threads.submit(verb, plan, twin.tensors_of([data]), remote, None, Deadline(20_000))


def test_a_small_read_passes_a_large_one() -> None:
    """The large one leaves a lane alone, and asks for its third part when the first has come."""
    before = residue()
    source, small_source = twin.noise(1, 1, LARGE)[0], twin.noise(2, 1, 64)[0]
    large, small = np.zeros(LARGE, np.uint8), np.zeros(64, np.uint8)
    with played(2) as (connection, (quiet, busy), threads):
        running = begin(connection, threads, large)
        parts = [busy.asked(READ) for _ in range(2)]
        assert [part[1:] for part in parts] == [(0, PART), (PART, PART)]
        passing = begin(connection, threads, small)
        quiet.answer(quiet.asked(READ)[0], small_source)
        assert passing.result(BUDGET_S) == 64
        assert np.array_equal(small, small_source)
        assert busy.is_silent()
        assert not large.any()
        for _ in range(3):
            id, offset, nbytes = parts.pop(0)
            busy.answer(id, source[offset : offset + nbytes])
            if offset == 0:
                parts.append(busy.asked(READ))
        assert running.result(BUDGET_S) == LARGE
        assert quiet.is_silent()
        assert set(connection._group._loads.values()) == {0}
    assert np.array_equal(large, source)
    assert settled(before) == before


def test_a_small_write_passes_a_large_one() -> None:
    source, small = twin.noise(1, 1, LARGE)[0], twin.noise(2, 1, 64)[0]
    with played(2) as (connection, (quiet, busy), threads):
        running = begin(connection, threads, source, write=True)
        id, offset, nbytes = busy.asked(WRITE)
        passing = begin(connection, threads, small, write=True)
        small_id, *_ = quiet.asked(WRITE)
        assert quiet.receive(64) == small.tobytes()
        quiet.send(RESULT, small_id, bytes(4))
        assert passing.result(BUDGET_S) == 64
        moved = np.zeros(LARGE, np.uint8)
        for _ in range(2):
            moved[offset : offset + nbytes] = np.frombuffer(busy.receive(nbytes), np.uint8)
            busy.send(RESULT, id, bytes(4))
            id, offset, nbytes = busy.asked(WRITE)
        moved[offset:] = np.frombuffer(busy.receive(nbytes), np.uint8)
        busy.send(RESULT, id, bytes(4))
        assert running.result(BUDGET_S) == LARGE
        assert quiet.is_silent()
    assert np.array_equal(moved, source)


@pytest.mark.parametrize("gone", [0, 1])
def test_with_one_lane_left_everything_goes_over_that(gone: int) -> None:
    source, into = twin.noise(3, 1, 2 * MIB)[0], np.zeros(2 * MIB, np.uint8)
    with played(2) as (connection, fars, threads):
        connection._lanes.drop(connection._group, [list(connection._group._loads)[gone]])
        running = begin(connection, threads, into)
        left = fars[1 - gone]
        id, offset, nbytes = left.asked(READ)
        assert (offset, nbytes) == (0, into.size)
        left.answer(id, source)
        assert running.result(BUDGET_S) == into.size
    assert np.array_equal(into, source)


def test_a_large_transfer_that_fails_in_between_moves_no_more() -> None:
    """What its parts on their way still bring is dropped, and no further one is asked for."""
    into = np.zeros(LARGE, np.uint8)
    with played(2) as (connection, (quiet, busy), threads):
        running = begin(connection, threads, into)
        (first, *_), (second, *_) = busy.asked(READ), busy.asked(READ)
        busy.answer(second, np.ones(PART, np.uint8))  # answers may come in any order
        busy.send(RESULT, first, (7).to_bytes(4, "little") + b"no more")
        assert "no more" in str(running.exception(BUDGET_S))
        assert busy.is_silent()
        assert quiet.is_silent()
        assert set(connection._group._loads.values()) == {0}
    assert not into[:PART].any()
    assert not into[2 * PART :].any()
