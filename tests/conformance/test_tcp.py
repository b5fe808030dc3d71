"""The tcp transport keeps the contract of all transports, between two real processes."""

from dataclasses import replace

import numpy as np
import pytest

from faults.lanepeer import LanePeerProcess, RegionConnection
from llm_datadist._deadline import Deadline
from llm_datadist._transport.connection import Connection
from llm_datadist._transport.lanes import dial_lanes
from llm_datadist.errors import CacheMismatch, LinkRefused, PeerLost, TransferFailed
from llm_datadist.testing import Peer
from llm_datadist.testing.conformance import ServedConformance, one_row
from llm_datadist.testing.scene import BUDGET_MS, read_beginning, tensors_over


class TestTcp(ServedConformance):
    process: LanePeerProcess
    lost = PeerLost, LinkRefused, TransferFailed

    @staticmethod
    def start() -> LanePeerProcess:
        return LanePeerProcess()

    def test_the_owner_refuses_what_is_not_there(self, peer: Peer, connection: Connection) -> None:
        """What our own checks let pass, because the peer knows better."""
        data = np.ones(64, np.uint8)
        mapped = connection.map(np.array([1], np.uint32), np.array([0], np.uint64), 64, writable=True)
        remote = replace(mapped, handle=b"\x92\x91\x01\x91\xce\xff\xff\xff\xff")
        for verb in (connection.read, connection.write):
            with pytest.raises(CacheMismatch, match="region 1 has no 64 bytes at 4294967295"):
                verb(one_row(64), tensors_over(data), remote, None, Deadline(BUDGET_MS))
        broken = replace(mapped, handle=b"\xc1")
        with pytest.raises(TransferFailed, match="the target failed"):
            connection.read(one_row(64), tensors_over(data), broken, None, Deadline(BUDGET_MS))
        assert not peer.peek(1).any()

    def test_lost_lanes_are_dialled_again(self, peer: Peer, connection: RegionConnection) -> None:
        into = np.ones(64, np.uint8)
        for kept in (1, 0):
            lanes = connection.group.lanes()
            self.process.lanes.drop(connection.group, lanes[kept:])
            assert len(connection.group) == kept
            into[:] = 1
            read_beginning(peer, connection, into)
            assert not into.any()
            assert len(connection.group) == 2


def test_lanes_of_an_unknown_session_are_refused() -> None:
    with LanePeerProcess() as process, process.serving(writable=True):
        port = process.ask(int, "listen", bytes(16))
        with pytest.raises(LinkRefused, match="does not know this session"):
            dial_lanes(("127.0.0.1", port), b"x" * 16, 2, Deadline(BUDGET_MS))
    with pytest.raises(LinkRefused, match="cannot connect"):
        dial_lanes(("127.0.0.1", port), b"x" * 16, 2, Deadline(BUDGET_MS))
