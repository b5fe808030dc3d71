"""A peer that asks for more and more over its data lanes and never reads an answer: bounded memory at the owner, and
nobody else notices (architecture rule 8). The lanes are made by the real handshake; from then on they are sockets of
the test."""

import ctypes
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from faults.lane_ends import READ, frame_of
from llm_datadist import BlocksCacheKey
from tests.support.ends import LocalEnd
from tests.support.linking import SUCCESS, bytes_move_both_ways, info, link, links
from tests.support.moves import Spec, Use, call, make, picture, wait_until
from tests.support.pairs import Pair
from tests.support.probe import deadline
from tests.support.wire import MAX_LANES, MAX_REQUEST_RUNS, Plan, encode_request
from tests.support.world import World, anonymous_bytes, residue, settled

REQUESTS: Final = 10_000
BOUND: Final = 64 << 20
pytestmark = pytest.mark.gpu
KEY: Final = BlocksCacheKey(1, 3)
STRIDE: Final = 2 << 20
#: As `lane.hpp` of the native code has it.
WINDOW, WINDOW_BYTES = 32, 4 << 20


class Flood:
    """A peer of the owner with lanes of its own making. A context manager."""

    def __init__(self, port: int | None) -> None:
        self.end = LocalEnd("flood")
        self.end.start("DECODER", 66, extra={"llm.Transport": "tcp"})
        assert self.end.do(link, [info(1, port)]) == SUCCESS
        self.end.do(make, "mine", Spec(tensors=1, rows=1, stride=STRIDE, blocks=True), 2)
        self.end.do(call, "pull_blocks", KEY, Use("mine"), [0], [0])
        there = self.end.world.probe.link(1)
        (answer,) = there.caches.cached.values()
        self.remote = answer.tensors
        connection: Any = there.connection.shared
        self._dial = connection.recovery.reconnect
        # What the library has dialled makes room for what we will.
        connection.recovery.drop()
        self._open = ExitStack()
        self.asked = 0

    def lane(self) -> socket.socket:
        """Return a new lane, once the owner has room for one more."""
        made: list[socket.socket] = []

        def dial() -> bool:
            with suppress(OSError, Exception):
                made.extend(lane.socket for lane in self._dial(1, deadline(10_000)))
            return bool(made)

        wait_until(dial)
        made[0].settimeout(10)
        return self._open.enter_context(made[0])

    def ask(self, lane: socket.socket, runs: NDArray[np.uint64], times: int) -> None:
        """Send so many requests for these runs of the cache; no answer is ever read."""
        nbytes = int(runs[:, 2].sum())
        meta = encode_request(self.remote.handle, self.remote.extent, Plan(0, 0, 1, runs, False, nbytes), False)
        for _ in range(times):
            self.asked += 1
            lane.sendall(frame_of(READ, self.asked, meta))

    def stop(self) -> None:
        self._open.close()
        self.end.stop()


@pytest.fixture
def flood(tcp_pair: Pair) -> Iterator[Flood]:
    tcp_pair.start()
    tcp_pair.prompt.do(make, "kv", Spec(tensors=1, rows=4, stride=STRIDE, blocks=True, blocks_key=KEY), 1)
    before = residue()
    flood = Flood(tcp_pair.prompt.port)
    yield flood
    flood.stop()
    del flood
    assert settled(before) == before
    wait_until(lambda: tcp_pair.prompt.do(links) == {2: "ready"})
    assert tcp_pair.prompt.do(picture).pins == 0


class Mallinfo(ctypes.Structure):
    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def allocated_bytes(_: World) -> int:
    """Return what malloc has handed out in this process: unlike its RSS, without what earlier tests have freed."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    numbers = mallinfo().numbers
    return int(numbers[4] + numbers[7])  # hblkhd and uordblks


def whole() -> NDArray[np.uint64]:
    return np.array([[0, 0, 4 * STRIDE]], np.uint64)


def test_rule_10_ten_thousand_reads_whose_answers_nobody_reads_cost_bounded_memory(
    tcp_pair: Pair, flood: Flood
) -> None:
    """Regression: requests of one peer held more than 64 MiB."""
    owner = tcp_pair.prompt
    before = owner.do(anonymous_bytes)
    worst = 0
    lanes = 0
    while flood.asked < REQUESTS:
        lane = flood.lane()
        lanes += 1
        # Those beyond the window cost the lane, which makes room for the next one.
        with suppress(OSError):
            flood.ask(lane, whole(), WINDOW)
            if lanes % MAX_LANES == 0:
                bytes_move_both_ways(owner, tcp_pair.decoder)
                worst = max(worst, owner.do(anonymous_bytes) - before)
            flood.ask(lane, whole(), 1)
    assert worst < BOUND
    assert owner.do(anonymous_bytes) - before < BOUND
    assert owner.do(links)[66] == "ready", "lanes were lost, not the link"
    bytes_move_both_ways(owner, tcp_pair.decoder)


def test_rule_10_the_longest_requests_on_all_lanes_there_can_be_cost_bounded_memory(
    tcp_pair: Pair, flood: Flood
) -> None:
    """Regression: 16 lanes were allowed on one link."""
    owner = tcp_pair.prompt
    before, allocated = owner.do(anonymous_bytes), owner.do(allocated_bytes)
    offsets = np.arange(MAX_REQUEST_RUNS, dtype=np.uint64) * np.uint64(2)
    many = np.stack([offsets, offsets, np.ones(MAX_REQUEST_RUNS, np.uint64)], axis=1)
    each = 16 * MAX_REQUEST_RUNS + 4096
    for _ in range(MAX_LANES):
        lane = flood.lane()
        flood.ask(lane, whole(), 1)
        flood.ask(lane, many, WINDOW_BYTES // each)
    # What they ask for is kept until it is answered: that is the memory in question.
    held = MAX_LANES * (WINDOW_BYTES // each) * MAX_REQUEST_RUNS * 16
    wait_until(lambda: owner.do(allocated_bytes) - allocated > held - (1 << 20))  # something else may be freed
    for _ in range(3):
        bytes_move_both_ways(owner, tcp_pair.decoder)
    assert owner.do(anonymous_bytes) - before < BOUND
