"""Peers whose regions are memory of a GPU, of the fake driver; run as a module this file is the child."""

import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from faults.lanepeer import LaneChild, LanePeerProcess
from llm_datadist._memory.cuda import CudaDevice
from llm_datadist._memory.device import Device
from llm_datadist._transport.connection import Connection
from llm_datadist._transport.samehost.shm import ShmConnection
from llm_datadist.testing import LocalPeer, PeerProcess
from llm_datadist.testing.peers import REGION_BYTES, child_main
from tests.support import fakecuda
from tests.support.moves import wait_until


def gpu() -> Device:
    try:
        fakecuda.load()
    except fakecuda.Unsupported as error:
        pytest.skip(str(error))
    return CudaDevice(0)


class GpuPeer(LocalPeer):
    """In this process."""

    def __init__(self, **how: Any) -> None:
        self.device = gpu()
        super().__init__(**how)
        for region in REGION_BYTES:
            self._bytes(region)[:] = 0

    def _bytes(self, region: int) -> NDArray[np.uint8]:
        if region in self._private:
            return super()._bytes(region)
        segment = self.exports.regions[region]
        return fakecuda.load().view(segment.address, segment.nbytes, segment.keep())


class GpuProcess(PeerProcess):
    """Whose memory this process maps."""

    module = __name__

    def __init__(self) -> None:
        self.device = gpu()
        super().__init__(ShmConnection)

    def connect(self) -> Connection:
        """Return a connection whose imports have ended: residue of a test does not change by them."""
        connection = super().connect()
        wait_until(lambda: not any(map(connection.leaves_out, REGION_BYTES)))
        return connection


class GpuLanes(LanePeerProcess):
    module = __name__


class GpuChild(LaneChild):
    peer = GpuPeer

    def _stop(self) -> None:
        super()._stop()
        wait_until(lambda: fakecuda.complaints_here() == [])  # a thread unmaps


if __name__ == "__main__":
    child_main(int(sys.argv[1]), GpuChild)
