"""The shm transport keeps the contract of all transports, between two real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist._deadline import Deadline
from llm_datadist._native import Plan, Tensors, plan_row
from llm_datadist._transport.shm import ShmConnection
from llm_datadist.errors import PeerLost
from llm_datadist.testing import PeerProcess, TransportConformance

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from llm_datadist.testing import Peer


class TestShm(TransportConformance):
    process: PeerProcess

    @classmethod
    def setup_class(cls) -> None:
        cls.process = PeerProcess(ShmConnection)

    @classmethod
    def teardown_class(cls) -> None:
        cls.process.close()

    def open_peer(self, *, writable: bool) -> AbstractContextManager[Peer]:
        return self.process.serving(writable=writable)


def test_a_killed_peer_can_be_read_but_a_write_to_it_is_never_reported_done() -> None:
    data = np.arange(64, dtype=np.uint8)
    local = Tensors(np.array([data.ctypes.data], np.uint64), 64)
    plan = Plan(0, 0, 1, plan_row(0, 0, 64), False, 64)
    with PeerProcess(ShmConnection) as process, process.serving(writable=True), process.connect() as connection:
        remote = connection.map(np.array([1], np.uint32), np.array([0], np.uint64), 64, writable=True)
        connection.write(plan, local, remote, None, Deadline(1000))
        process.kill()
        data[:] = 0
        connection.read(plan, local, remote, None, Deadline(1000))
        assert data.tolist() == list(range(64))
        with pytest.raises(PeerLost, match=f"process {process.pid} has ended"):
            connection.write(plan, local, remote, None, Deadline(1000))
        assert connection.bytes_written == 64
