"""The Python side of the lanes: requests from strangers, plans in parts, groups, and handlers that fail."""

import asyncio
import fcntl
import os
import select
import socket
import sys
import termios
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faults.lane_ends import BUDGET_S, DATA, READ, RESULT, WRITE, Wire, frame_of, one_row
from faults.sealing import FAR_KEYS, NEAR_KEYS
from faults.strangers import listener
from llm_datadist import errors
from llm_datadist._deadline import Deadline
from llm_datadist._links.messages import CONTROL_PREAMBLE
from llm_datadist._memory.exports import NON_POOL
from llm_datadist._native import MAX_REQUEST_RUNS, Plan, Tensors, encode_request, usable_cpus
from llm_datadist._native.plan import split_plan
from llm_datadist._transport.connection import Connection, MemoryChanged, Transfer
from llm_datadist._transport.moves import MoveReply, MoveRequest, decode_request
from llm_datadist._transport.tcp import lanes as transport
from llm_datadist._transport.tcp.connection import TcpConnection
from llm_datadist._transport.tcp.lanes import LANE_PREAMBLE, Lanes, LaneSocket, accept_lane, bulk_lanes, dial_lanes
from llm_datadist.errors import DeadlineExceeded, LinkRefused, PeerLost, ProtocolError, TransferFailed
from llm_datadist.testing.peers import loop_thread
from llm_datadist.testing.scene import tensors_over
from tests.support import twin
from tests.support.ends import state_of
from tests.support.moves import wait_until

ROW, NO_RUNS = one_row(64), np.zeros((0, 3), np.uint64)
pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize(
    "meta",
    [
        b"\x01\x00\x00",
        encode_request(b"", 8, ROW, False)[:33],
        encode_request(b"x", 8, one_row(0).replace(runs=NO_RUNS), False)[:-1],
        encode_request(b"", 8, ROW, False) + b"x",
        encode_request(b"x" * 4097, 8, ROW, False),
        *(encode_request(b"", 8, ROW, False)[:at] + b"\xff" * 8 + bytes(32 - at) for at in (2, 10, 18, 26)),
        encode_request(b"", 8, ROW, False) + bytes(16 * MAX_REQUEST_RUNS),
    ],
)
def test_broken_requests_are_protocol_errors(meta: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_request(meta)


@settings(deadline=None)
@given(st.data())
def test_the_parts_of_a_plan_are_the_plan(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=8))
    count = data.draw(st.integers(1, 4))
    runs = np.array([[100 * i, 70 * i + 3, length] for i, length in enumerate(lengths)], np.uint64)
    plan = Plan(1, 2, count, runs, data.draw(st.booleans()), count * sum(lengths))
    part_bytes, max_runs = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 9))
    parts = list(split_plan(plan, part_bytes, max_runs))
    for part in parts:
        assert 0 < part.nbytes <= part_bytes
        assert len(part.runs) <= max_runs
        assert part.nbytes == part.count * int(part.runs[:, 2].sum())
        assert part.ordered == plan.ordered
    assert [each for part in parts for each in bytes_of(part)] == bytes_of(plan)


def bytes_of(plan: Plan) -> list[tuple[int, ...]]:
    """Every (dst tensor, dst offset, src tensor, src offset) in the order of the plan."""
    return [
        (plan.dst_first + pair, d + i, plan.src_first + pair, s + i)
        for pair in range(plan.count)
        for d, s, n in plan.runs.tolist()
        for i in range(n)
    ]


def test_a_group_gives_the_lane_with_the_least_to_do_and_keeps_the_oldest_for_small_transfers() -> None:
    group = transport.LaneGroup(Lanes(1, Handler()))
    with pytest.raises(PeerLost, match="no data lane"):
        group.take(1)
    assert group.add(5)
    assert group.take(1 << 30, large=True) == 5  # there is no other
    assert group.add(3)
    assert group.add(4)
    assert [group.take(10, large=True) for _ in range(3)] == [3, 4, 3]
    assert [group.take(1) for _ in range(3)] == [4, 4, 4]
    group.put(5, 1 << 30)
    assert [group.take(5), group.take(5), group.take(5)] == [5, 5, 5]
    group.put(3, 20)
    assert group.take(1) == 3
    group.discard(5)  # the next oldest takes its place
    group.put(5, 1)
    assert [group.take(100, large=True) for _ in range(2)] == [4, 4]
    assert len(group) == 2
    assert group.lanes() == [3, 4]
    group.close()
    group.close()
    assert not group.add(3)
    assert (len(group), group.closed) == (0, True)


def test_a_peer_that_asks_often_has_one_dial_waiting_and_another_link_is_dialled_after_it() -> None:
    """Attempts of all links wait for one thread, and a peer that does not answer costs each a second."""
    with closing(Lanes(1, Handler())) as lanes:
        mute, other = transport.LaneGroup(lanes), transport.LaneGroup(lanes)
        dials, go_on = list[str](), threading.Event()

        def dial(name: str, missing: int) -> list[int]:
            dials.append(name)
            assert go_on.wait(20)
            return []

        for group, name in ((mute, "mute"), (other, "other")):
            group.wanted = 1
            group.reconnect = lambda missing, deadline, name=name: dial(name, missing)  # type: ignore[assignment]
        mute.redial_soon()
        wait_until(lambda: dials == ["mute"])
        for _ in range(1000):
            mute.redial_soon()
        other.redial_soon()
        go_on.set()
        wait_until(lambda: len(dials) == 3)
    assert dials == ["mute", "mute", "other"]


class Handler:
    """Grants its memory, or raises what it was told to."""

    def __init__(self) -> None:
        self.memory = np.arange(64, dtype=np.uint8)
        self.error: Exception | None = None
        self.extent = 64
        self.lost: list[int] = []

    def on_move(self, link: object, request: MoveRequest) -> MoveReply:
        if self.error is not None:
            raise self.error
        return MoveReply(Tensors(tensors_over(self.memory).bases, self.extent))


def move(connection: Connection, data: twin.Bytes, *, write: bool = False, ordered: bool = False) -> int:
    """Read one run into ``data``, or write it."""
    remote = connection.map(np.array([NON_POOL], np.uint32), np.array([64], np.uint64), data.size, writable=True)
    plan = one_row(data.size).replace(ordered=ordered)
    return connection.move(Transfer(plan, tensors_over(data), remote, None, Deadline(20_000), write))


def test_grants_refusals_and_failures_of_a_handler(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a push whose first part was refused was repeated, after another lane had written parts."""
    handler, into = Handler(), np.zeros(64, np.uint8)
    ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
    with closing(Lanes(1, handler)) as near, closing(Lanes(1, handler)) as far, loop_thread() as loop:
        loop.call_soon_threadsafe(far.start, loop)
        group = far.open(map(LaneSocket, theirs))
        group.redial_soon = lambda: handler.lost.append(len(group))  # type: ignore[method-assign]
        group.begin("the link")
        with TcpConnection(near.open(map(LaneSocket, ours)), writable=True) as connection:
            connection.begin("near")
            for error, extent, kind, text in (
                (errors.CacheNotFound("no such\nkey"), 64, MemoryChanged, "no such key"),
                (errors.ParamError("not there"), 64, errors.CacheMismatch, "not there"),
                (ZeroDivisionError(), 64, TransferFailed, "the target failed"),
                (None, 63, errors.CacheMismatch, "have 63 bytes, not 64"),
            ):
                handler.error, handler.extent = error, extent
                for write in (False, True):
                    with pytest.raises(kind, match=text):
                        move(connection, into, write=write)
            assert "a handler failed" in caplog.text
            handler.extent = 64
            assert (move(connection, into), into.tolist()) == (64, list(range(64)))
        wait_until(lambda: handler.lost == [1, 0])
        assert not far._groups
        loop.call_soon_threadsafe(far.stop)


class Noting(Handler):
    def __init__(self) -> None:
        super().__init__()
        self.order: list[object] = []

    def on_move(self, link: object, request: MoveRequest) -> MoveReply:
        self.order.append(link)
        return super().on_move(link, request)


def sleeping(name: str) -> bool:
    """Return True if the threads of that name of this process sleep."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().startswith(name)]
    return bool(tasks) and all(state_of(int(task.name)) == "S" for task in tasks)


def test_a_request_over_one_link_waits_for_four_of_another_link_that_has_many() -> None:
    handler, meta = Noting(), encode_request(b"", 64, ROW, False)
    ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
    inputs = [each.fileno() for each in theirs]
    with ExitStack() as stack:
        for each in ours:
            stack.enter_context(each)
        far, loop = stack.enter_context(closing(Lanes(1, handler))), stack.enter_context(loop_thread())
        for link, sock in zip(("flooder", "honest"), theirs, strict=True):
            far.open([LaneSocket(sock)]).begin(link)
        for sock, count in zip(ours, (32, 1), strict=True):
            sock.sendall(b"".join(frame_of(READ, number, meta) for number in range(1, count + 1)))
            # All of them are requests that wait for the loop.
            wait_until(lambda: not any(unread(each) for each in inputs) and sleeping("lldd-data"))
        loop.call_soon_threadsafe(far.start, loop)
        wait_until(lambda: len(handler.order) == 33)
        assert handler.order.index("honest") == 4
        loop.call_soon_threadsafe(far.stop)


def unread(descriptor: int) -> int:
    """Return the number of bytes that wait there."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_an_answer_settles_only_the_writes_that_the_owner_was_told_of_before_it() -> None:
    """Another thread's write fails, and is told of, while this one waits for its answer."""
    pings, (ours, theirs) = iter((10, 12)), socket.socketpair()
    with theirs, closing(Lanes(1, Handler())) as near:
        group = near.open([LaneSocket(ours)])
        with TcpConnection(group, writable=True) as connection:
            connection.begin("near")
            (old,) = group.lanes()
            group.put(old, 0, doubtful=True)
            told = connection.recovery.give_up_writes(lambda: next(pings))
            assert told == connection.recovery.give_up_writes(lambda: next(pings)) == (old, 10), "told once"
            ours, theirs_too = socket.socketpair()
            with theirs_too:
                near.add(group, LaneSocket(ours))
                new = max(group.lanes())
                group.put(new, 0, doubtful=True)
                assert connection.recovery.give_up_writes(lambda: next(pings)) == (new, 12)
                connection.recovery.writes_given_up(told[0])
                assert (group.lanes(), connection.recovery.doubts_writes) == ([new], True)
                connection.recovery.writes_given_up(new)
                assert (group.lanes(), connection.recovery.doubts_writes) == ([], False)


def test_a_forked_child_closes_the_lanes_that_wait_for_a_link() -> None:
    """Regression: lanes that waited for their link had no engine that closed them in the child."""
    far, near = socket.socketpair()
    lanes = Lanes(1, Handler())
    with far, near:
        group = lanes.open([LaneSocket(near)], b"token")
        child = os.fork()
        if child == 0:
            os._exit(_close_in_child(lanes, near))
        assert os.waitpid(child, 0)[1] == 0
        assert near.fileno() != -1
        group.close()
        assert near.fileno() == -1
        lanes.close()


def _close_in_child(lanes: Lanes, waiting: socket.socket) -> int:
    try:
        lanes.close()
    except BaseException:  # noqa: BLE001 (the child must not go on in the test)
        return 2
    return int(waiting.fileno() != -1)


@pytest.mark.parametrize("late", [False, True])
def test_lanes_are_sealed_with_the_keys_they_are_added_with(late: bool) -> None:
    """Before their link is there, when they wait with their keys, or after."""
    handler, into = Handler(), np.zeros(64, np.uint8)
    with closing(Lanes(1, handler)) as near, closing(Lanes(1, handler)) as far, loop_thread() as loop:
        loop.call_soon_threadsafe(far.start, loop)
        ends = ((near, near.open(), NEAR_KEYS), (far, far.open(), FAR_KEYS))
        connection = TcpConnection(ends[0][1], writable=True)
        with connection:
            for begins in (late, not late):
                if begins:
                    connection.begin("near")
                    ends[1][1].begin("the link")
                else:
                    for (lanes, group, keys), sock in zip(ends, socket.socketpair(), strict=True):
                        lanes.add(group, LaneSocket(sock, keys))
            assert (move(connection, into), into.tolist()) == (64, list(range(64)))
            ours, theirs = socket.socketpair()
            far.add(ends[1][1], LaneSocket(theirs, FAR_KEYS))
            with ours:
                ours.sendall(bytes(100))
                assert ours.recv(1) == b""
        loop.call_soon_threadsafe(far.stop)


def test_a_listener_that_says_nothing_is_waited_for_until_the_deadline() -> None:
    assert LANE_PREAMBLE[:-2] == CONTROL_PREAMBLE[:-2], "the purpose tells it from a control channel"
    assert len(LANE_PREAMBLE) == len(CONTROL_PREAMBLE)
    assert LANE_PREAMBLE != CONTROL_PREAMBLE
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cancelled = Deadline(600_000, cancellable=True)
        threading.Timer(0.2, cancelled.cancel).start()
        place = r"data lanes to 127\.0\.0\.1"
        for deadline, text in ((Deadline(50), place), (Deadline(0), place), (cancelled, "cancelled by its caller")):
            for secret in (b"", bytes(32)):
                with pytest.raises(DeadlineExceeded, match=text):
                    dial_lanes(silent.getsockname(), bytes(16), 2, deadline, secret=secret)
    with pytest.raises(LinkRefused, match="cannot connect"):
        dial_lanes(("127.0.0.1", 1), bytes(16), 1, Deadline(5000))


@pytest.mark.parametrize("answer", [b"", bytes(15), bytes(16), bytes(17)])
def test_a_listener_that_goes_away_or_refuses_after_its_nonce_is_a_refusal(answer: bytes) -> None:
    def behave(sock: socket.socket) -> None:
        sock.recv(len(LANE_PREAMBLE) + transport.TOKEN_BYTES + transport.NONCE_BYTES, socket.MSG_WAITALL)
        sock.sendall(answer)
        sock.shutdown(socket.SHUT_WR)

    with listener(behave) as port, pytest.raises(LinkRefused, match="rejected the lane token"):
        dial_lanes(("127.0.0.1", port), bytes(16), 1, Deadline(20_000), secret=bytes(32))


# Large and small transfers over the lanes of one link, against a peer that is played by hand

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

    def serve(self, kind: int, part: tuple[int, int, int], memory: twin.Bytes) -> None:
        """Do what was asked for, in a memory of this end."""
        id, offset, nbytes = part
        if kind == READ:
            self.answer(id, memory[offset : offset + nbytes])
        else:
            memory[offset : offset + nbytes] = np.frombuffer(self.receive(nbytes), np.uint8)
            self.send(RESULT, id, bytes(4))

    def is_silent(self) -> bool:
        """Return True when nothing more has come by now."""
        return not select.select([self.sock], [], [], 0)[0]


@contextmanager
def played(lanes: int) -> Iterator[tuple[TcpConnection, list[Far], ThreadPoolExecutor]]:
    """Yield a connection, the far ends of its lanes in their order, and threads for its calls."""
    ours, theirs = zip(*(socket.socketpair() for _ in range(lanes)), strict=True)
    with closing(Lanes(1, Handler())) as near, ExitStack() as stack:
        fars = [stack.enter_context(Far(sock)) for sock in theirs]
        connection = TcpConnection(near.open(map(LaneSocket, ours)), writable=True)
        threads = stack.enter_context(ThreadPoolExecutor(4))
        stack.callback(connection.abort)  # before the threads are joined
        connection.begin("near")
        yield connection, fars, threads


@pytest.mark.parametrize("ordered", [False, True], ids=["", "ordered"])
@pytest.mark.parametrize("kind", [READ, WRITE], ids=["read", "write"])
def test_a_small_transfer_passes_a_large_one(kind: int, ordered: bool) -> None:
    """The large one leaves a lane alone, and a read asks for its third part when the first has come.

    Regression: a large transfer filled every lane.
    """
    sources = twin.noise(1, 1, LARGE) + twin.noise(2, 1, 64)
    copies = [np.zeros_like(each) for each in sources]
    (large, small), (theirs, small_theirs) = (sources, copies) if kind == WRITE else (copies, sources)
    with played(2) as (connection, (quiet, busy), threads):
        running = threads.submit(move, connection, large, write=kind == WRITE, ordered=ordered)
        parts = [busy.asked(kind) for _ in range(1 if kind == WRITE else 2)]
        passing = threads.submit(move, connection, small, write=kind == WRITE)
        quiet.serve(kind, quiet.asked(kind), small_theirs)
        assert passing.result(BUDGET_S) == 64
        assert kind == WRITE or (busy.is_silent() and not large.any())
        served = []
        while parts:
            served.append(parts.pop(0))
            busy.serve(kind, served[-1], theirs)
            if len(served) + len(parts) < 3:
                parts.append(busy.asked(kind))
        assert [part[1:] for part in served] == [(0, PART), (PART, PART), (2 * PART, LARGE - 2 * PART)]
        assert running.result(BUDGET_S) == LARGE
        assert quiet.is_silent()
        assert set(connection.group.loads.values()) == {0}
    assert all(map(np.array_equal, sources, copies))


def test_a_large_transfer_that_fails_in_between_moves_no_more_and_one_lane_serves_without_the_other() -> None:
    """What its parts on their way still bring is dropped, and no further one is asked for."""
    into, source, whole = np.zeros(LARGE, np.uint8), twin.noise(3, 1, 2 * MIB)[0], np.zeros(2 * MIB, np.uint8)
    with played(2) as (connection, (quiet, busy), threads):
        running = threads.submit(move, connection, into)
        (first, *_), (second, *_) = busy.asked(READ), busy.asked(READ)
        busy.answer(second, np.ones(PART, np.uint8))  # answers may come in any order
        busy.send(RESULT, first, (7).to_bytes(4, "little") + b"no more")
        assert "no more" in str(running.exception(BUDGET_S))
        assert busy.is_silent()
        assert quiet.is_silent()
        assert set(connection.group.loads.values()) == {0}
        assert not into[:PART].any()
        assert not into[2 * PART :].any()
        connection.group.owner.drop(connection.group, list(connection.group.loads)[1:])
        running = threads.submit(move, connection, whole)
        id, *part = quiet.asked(READ)
        assert part == [0, whole.size]
        quiet.answer(id, source)
        assert running.result(BUDGET_S) == whole.size
    assert np.array_equal(whole, source)


def test_lanes_fit_the_path() -> None:
    """127.0.0.2 stands for another host: its connections come from another address than they go to."""
    for address, lanes in (("127.0.0.1", min(4, usable_cpus())), ("127.0.0.2", 4)):
        with socket.create_server((address, 0)) as server, ThreadPoolExecutor(1 + lanes) as far, ExitStack() as opened:
            accepting = [far.submit(_accept, server, opened) for _ in range(1 + lanes)]
            dialled = dial_lanes(server.getsockname(), bytes(16), None, Deadline(10_000))
            for each in dialled:
                opened.callback(each.socket.close)
            assert len(dialled) == 1 + lanes
            ends = [each.socket for each in dialled] + [each.result(BUDGET_S) for each in accepting]
            unsent = {each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) for each in ends}
            assert unsent == {1 << 20 if address == "127.0.0.1" else 512 << 10}
            assert address != "127.0.0.1" or {_congestion_control(each) for each in ends} == {b"reno"}
    with socket.socket() as broken:
        assert bulk_lanes(broken) == 4, "a socket that has broken says no address"


def _accept(server: socket.socket, opened: ExitStack) -> socket.socket:
    sock = opened.enter_context(server.accept()[0])
    sock.recv(64)
    sock.setblocking(False)

    async def accept() -> None:
        await accept_lane(asyncio.get_running_loop(), sock)

    asyncio.run(accept())
    return sock


def _congestion_control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
