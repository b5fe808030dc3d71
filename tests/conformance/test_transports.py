"""The transports keep the contract of all transports: inproc, and shm, cma and tcp between two real processes."""

from contextlib import AbstractContextManager

import numpy as np
import pytest

from faults.lanepeer import LanePeerProcess
from llm_datadist._deadline import Deadline
from llm_datadist._memory.exports import NON_POOL
from llm_datadist._transport import instances
from llm_datadist._transport.connection import Connection
from llm_datadist._transport.inproc import InprocConnection
from llm_datadist._transport.samehost.cma import CmaConnection
from llm_datadist._transport.samehost.peer_memory import PeerMemory
from llm_datadist._transport.samehost.shm import ShmConnection
from llm_datadist.errors import LinkError, LinkRefused, ParamError, PeerLost, ProtocolError, TransferFailed
from llm_datadist.testing import LocalPeer, Peer, PeerProcess, TransportConformance
from llm_datadist.testing.conformance import ProcessConformance, ServedConformance
from llm_datadist.testing.scene import one_row, pull, push, tensors_over, unchanged
from tests.conformance.gpu import GpuLanes, GpuPeer, GpuProcess


class TestInproc(TransportConformance):
    def open_peer(self, *, writable: bool) -> AbstractContextManager[Peer]:
        return LocalPeer(writable=writable)


class TestShm(ProcessConformance):
    @staticmethod
    def start() -> PeerProcess:
        return PeerProcess(ShmConnection)


def _connect(memory: PeerMemory) -> CmaConnection:
    return CmaConnection(memory, writable=all(region.writable for region in memory.regions.values()))


class TestCma(ProcessConformance):
    """Over non-pool memory of the other process."""

    @staticmethod
    def start() -> PeerProcess:
        return PeerProcess(_connect, private=True)

    @pytest.mark.parametrize(("address", "extent"), [(2**63 - 64, 64), (2**63, 1), (2**64 - 1, 64), (0, 2**63)])
    def test_no_tensor_ends_outside_the_address_space(self, connection: Connection, address: int, extent: int) -> None:
        with pytest.raises(ProtocolError, match="region 0 "):
            connection.map(np.array([NON_POOL], np.uint32), np.array([address], np.uint64), extent, writable=False)

    def test_memory_that_is_not_mapped_there_is_a_failed_transfer(self, connection: Connection) -> None:
        remote = connection.map(np.array([NON_POOL], np.uint32), np.array([8], np.uint64), 64, writable=True)
        for verb in (pull, push):
            with pytest.raises(TransferFailed, match="64 bytes at its address 0x8: Bad address"):
                verb(one_row(64), tensors_over(np.zeros(64, np.uint8)), remote, Deadline(1000))
        assert connection.usage()[:2] == (0, 0)


class TestTcp(ServedConformance):
    lost = PeerLost, LinkRefused, TransferFailed

    @staticmethod
    def start() -> LanePeerProcess:
        return LanePeerProcess()


class TestInprocOnGpu(TransportConformance):
    def open_peer(self, *, writable: bool) -> AbstractContextManager[Peer]:
        return GpuPeer(writable=writable)


class TestShmOnGpu(ProcessConformance):
    @staticmethod
    def start() -> PeerProcess:
        return GpuProcess()


class TestTcpOnGpu(TestTcp):
    @staticmethod
    def start() -> LanePeerProcess:
        return GpuLanes()


def test_a_finalised_peer_is_lost_and_its_memory_stays_until_the_connection_closes() -> None:
    with LocalPeer(writable=True) as peer, peer.connect() as connection:
        peer.close()
        with pytest.raises(PeerLost, match="finalised"):
            connection.map(np.array([1], np.uint32), np.array([0], np.uint64), 64, writable=False)
        with pytest.raises(PeerLost, match="finalised"):
            unchanged(connection, 1, 0)


def test_peers_are_found_by_incarnation_only_while_registered() -> None:
    with LocalPeer(writable=True) as peer:
        assert instances.lives_here(peer.exports.incarnation)
        instances.register(peer.exports)  # again, the same: nothing
        with LocalPeer(writable=True) as other, pytest.raises(ParamError, match="already registered"):
            instances.register(type(other.exports)(peer.exports.incarnation, {}, other.exports.guards, True))
    assert not instances.lives_here(peer.exports.incarnation)
    with pytest.raises(LinkError, match="does not live"):
        InprocConnection(peer.exports)
