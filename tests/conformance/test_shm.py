"""The shm transport keeps the contract of all transports, between two real processes."""

from llm_datadist._transport.shm import ShmConnection
from llm_datadist.testing import PeerProcess
from llm_datadist.testing.conformance import ProcessConformance


class TestShm(ProcessConformance):
    @staticmethod
    def start() -> PeerProcess:
        return PeerProcess(ShmConnection)
