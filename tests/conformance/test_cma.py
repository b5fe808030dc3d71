"""The cma transport keeps the contract of all transports, over private memory of another real process."""

import numpy as np
import pytest

from llm_datadist._deadline import Deadline
from llm_datadist._memory.exports import PRIVATE
from llm_datadist._transport.cma import CmaConnection
from llm_datadist._transport.connection import Connection
from llm_datadist._transport.peer_memory import PeerMemory
from llm_datadist.errors import ProtocolError, TransferFailed
from llm_datadist.testing import PeerProcess
from llm_datadist.testing.conformance import ProcessConformance, one_row
from llm_datadist.testing.scene import tensors_over


def connect(memory: PeerMemory) -> CmaConnection:
    return CmaConnection(memory, writable=all(region.writable for region in memory.regions.values()))


class TestCma(ProcessConformance):
    @staticmethod
    def start() -> PeerProcess:
        return PeerProcess(connect, private=True)

    @pytest.mark.parametrize(("address", "extent"), [(2**63 - 64, 64), (2**63, 1), (2**64 - 1, 64), (0, 2**63)])
    def test_no_tensor_ends_outside_the_address_space(self, connection: Connection, address: int, extent: int) -> None:
        with pytest.raises(ProtocolError, match="region 0 "):
            connection.map(np.array([PRIVATE], np.uint32), np.array([address], np.uint64), extent, writable=False)

    def test_memory_that_is_not_mapped_there_is_a_failed_transfer(self, connection: Connection) -> None:
        remote = connection.map(np.array([PRIVATE], np.uint32), np.array([8], np.uint64), 64, writable=True)
        for verb in (connection.read, connection.write):
            with pytest.raises(TransferFailed, match="64 bytes at its address 0x8: Bad address"):
                verb(one_row(64), tensors_over(np.zeros(64, np.uint8)), remote, None, Deadline(1000))
        assert connection.bytes_read == connection.bytes_written == 0
