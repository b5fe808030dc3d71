"""The tcp transport keeps the contract of all transports, between two real processes."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from faults.lanepeer import LanePeerProcess, RegionConnection
from llm_datadist._deadline import Deadline
from llm_datadist._native import Plan, plan_row
from llm_datadist._transport.lanes import dial_lanes
from llm_datadist.errors import CacheMismatch, DeadlineExceeded, LinkRefused, PeerLost, TransferAborted, TransferFailed
from llm_datadist.testing import TransportConformance
from llm_datadist.testing.peers import REGION_BYTES
from llm_datadist.testing.scene import BUDGET_MS, Scene, beginning_of, read_beginning, tensors_over

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from llm_datadist._transport.connection import Connection
    from llm_datadist.testing import Peer

PLAN = Plan(0, 0, 1, plan_row(0, 0, 64), False, 64)


class TestTcp(TransportConformance):
    process: LanePeerProcess

    @classmethod
    def setup_class(cls) -> None:
        cls.process = LanePeerProcess()

    @classmethod
    def teardown_class(cls) -> None:
        cls.process.close()

    def open_peer(self, *, writable: bool) -> AbstractContextManager[Peer]:
        return self.process.serving(writable=writable)

    def test_the_owner_checks_its_guards(self, peer: LanePeerProcess, connection: Connection) -> None:
        slot, generation = peer.guard()
        peer.hold(slot, generation)
        data = np.ones(64, np.uint8)
        remote = beginning_of(peer, connection, 1, 64, writable=True)
        connection.write(PLAN, tensors_over(data), remote, None, Deadline(BUDGET_MS))
        peer.advance(slot)
        for verb in (connection.read, connection.write):
            with pytest.raises(TransferFailed, match="guard has changed"):
                verb(PLAN, tensors_over(data * 2), remote, None, Deadline(BUDGET_MS))
        assert (peer.peek(1)[:64] == 1).all()

    def test_the_owner_refuses_what_is_not_there(self, peer: Peer, connection: Connection) -> None:
        """What our own checks let pass, because the peer knows better."""
        data = np.ones(64, np.uint8)
        mapped = connection.map(np.array([1], np.uint32), np.array([0], np.uint64), 64, writable=True)
        remote = replace(mapped, handle=b"\x92\x91\x01\x91\xce\xff\xff\xff\xff")
        for verb in (connection.read, connection.write):
            with pytest.raises(CacheMismatch, match="region 1 has no 64 bytes at 4294967295"):
                verb(PLAN, tensors_over(data), remote, None, Deadline(BUDGET_MS))
        broken = replace(mapped, handle=b"\xc1")
        with pytest.raises(TransferFailed, match="the target failed"):
            connection.read(PLAN, tensors_over(data), broken, None, Deadline(BUDGET_MS))
        assert not peer.peek(1).any()

    def test_lost_lanes_are_dialled_again(self, peer: Peer, connection: RegionConnection) -> None:
        into = np.ones(64, np.uint8)
        for kept in (1, 0):
            lanes = list(connection._group._loads)
            self.process.lanes.drop(connection._group, lanes[kept:])
            assert len(connection._group) == kept
            into[:] = 1
            read_beginning(peer, connection, into)
            assert not into.any()
            assert len(connection._group) == 2

    def test_a_deadline_leaves_local_memory_alone(self, peer: Peer, connection: Connection) -> None:
        nbytes = REGION_BYTES[1]
        remote = beginning_of(peer, connection, 1, nbytes, writable=True)
        plan, data = Plan(0, 0, 1, plan_row(0, 0, nbytes), False, nbytes), np.ones(nbytes, np.uint8)
        for _ in range(20):
            for verb in (connection.read, connection.write):
                with suppress(DeadlineExceeded):
                    verb(plan, tensors_over(data), remote, None, Deadline(1))
                data[:] = 7
                assert (data == 7).all()

    def test_many_threads_share_the_lanes(self, peer: Peer, connection: Connection) -> None:
        scene = Scene.build(5, peer)
        remote = scene.remote(connection, writable=False)
        plan = scene.plan((0, 0), 5, list(range(16)), list(range(16))[::-1])
        failures: list[BaseException] = []

        def read() -> None:
            memory = np.zeros_like(scene.memory)
            own = Scene(scene.block_bytes, scene.extent, memory, scene.images, scene.starts, scene.places, peer)
            try:
                for _ in range(10):
                    memory[:] = 0
                    connection.read(plan, own.local, remote, None, Deadline(BUDGET_MS))
                    for tensor in range(5):
                        for block in range(16):
                            assert np.array_equal(own.local_block(tensor, block), own.image_block(tensor, 15 - block))
            except BaseException as error:  # noqa: BLE001 (raised by the test's thread)
                failures.append(error)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


@pytest.fixture
def process() -> Iterator[LanePeerProcess]:
    with LanePeerProcess() as process:
        yield process


def test_a_killed_peer_is_lost(process: LanePeerProcess) -> None:
    with process.serving(writable=True), process.connect() as connection:
        remote = beginning_of(process, connection, 1, 64, writable=True)
        process.kill()
        for verb in (connection.read, connection.write):
            with pytest.raises((PeerLost, LinkRefused, TransferFailed)):
                verb(PLAN, tensors_over(np.ones(64, np.uint8)), remote, None, Deadline(BUDGET_MS))
        assert connection.bytes_read == connection.bytes_written == 0


def test_abort_wakes_a_transfer_that_waits(process: LanePeerProcess) -> None:
    with process.serving(writable=True), process.connect() as connection:
        remote = beginning_of(process, connection, 1, 64, writable=False)
        os.kill(process.pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        timer = threading.Timer(0.05, connection.abort)
        timer.start()
        try:
            with pytest.raises(TransferAborted):
                connection.read(PLAN, tensors_over(np.ones(64, np.uint8)), remote, None, Deadline(BUDGET_MS))
        finally:
            os.kill(process.pid, signal.SIGCONT)
            timer.join()


def test_lanes_of_an_unknown_session_are_refused(process: LanePeerProcess) -> None:
    with process.serving(writable=True):
        port = process._ask(int, "listen", bytes(16))
        with pytest.raises(LinkRefused, match="does not know this session"):
            dial_lanes(("127.0.0.1", port), b"x" * 16, 2, Deadline(BUDGET_MS))
    with pytest.raises(LinkRefused, match="cannot connect"):
        dial_lanes(("127.0.0.1", port), b"x" * 16, 2, Deadline(BUDGET_MS))
