"""Contenders for the tests of the driver: one that moves what it should, and others that each do one thing wrong."""

import os
import sys
import threading
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.cuda import CudaCopy
from llm_datadist.tools.bench.contenders.base import Contender, Facts, Role
from llm_datadist.tools.bench.workload import BenchWorkload


class Good(Contender):
    roles: ClassVar[tuple[Role, ...]] = (Role.ALONE,)

    @classmethod
    def why_not(cls, workload: BenchWorkload) -> str | None:
        return None

    def start(self) -> Facts:
        shape = (self.workload.rows, self.workload.block_bytes)
        self.source_views = [np.zeros(shape, np.uint8) for _ in range(self.workload.tensors)]
        self.destination_views = [np.zeros(shape, np.uint8) for _ in range(self.workload.tensors)]
        return {"transport": "hand"}

    def transfer(self) -> None:
        for index in range(self.workload.blocks):
            self.transfer_one(index)

    def transfer_one(self, index: int) -> None:
        src, dst = self.workload.src_blocks[index], self.workload.dst_blocks[index]
        for there, here in zip(self.source_views, self.destination_views, strict=True):
            here[dst] = there[src]


class MovesNothing(Good):
    def transfer(self) -> None:
        pass


class MovesNothingOnAGpu(CudaCopy):
    def transfer(self) -> None:
        pass


class MovesNothingAfterTheFirst(Good):
    """What a contender would do that hands out what it once got."""

    _kept: ClassVar[list[NDArray[np.uint8]]] = []

    def transfer(self) -> None:
        if not self._kept:
            super().transfer()
            self._kept.extend(view.copy() for view in self.destination_views)
        for view, kept in zip(self.destination_views, self._kept, strict=True):
            view[:] = kept


class MovesAWrongBlock(Good):
    """Two blocks swap places in the last tensor."""

    def transfer(self) -> None:
        super().transfer()
        first, second = self.workload.dst_blocks[:2]
        self.destination_views[-1][[first, second]] = self.destination_views[-1][[second, first]]


class WritesOutside(Good):
    def transfer(self) -> None:
        super().transfer()
        self.destination_views[0][self.workload.dst_blocks[0] - 1, 0] ^= 1


class VerifiesNothing(Good):
    def verify(self, seed: int) -> bool:
        return False


class Dies(Good):
    def transfer(self) -> None:
        os.write(1, b"the last words\n")  # the standard output of workers is the driver's: this goes to the other one
        os._exit(7)


class Hangs(Good):
    def transfer(self) -> None:
        threading.Event().wait()


class Raises(Good):
    def transfer(self) -> None:
        raise ValueError("no wind")


class CannotStart(Good):
    def start(self) -> Facts:
        raise OSError("no such adapter")


class Chatters(Good):
    """As libraries do that print on standard output, from Python and from C."""

    def transfer(self) -> None:
        sys.stdout.write("hello from Python\n")
        sys.stdout.flush()
        os.write(1, b"hello from C\n")
        super().transfer()
