"""Mooncake's TransferEngine over tcp, by its own Python package (the build without CUDA).

Its best settings, and why:

- ``batch_transfer_sync_read`` and ``batch_transfer_sync_write`` with as many blocks a call as it accepts: its lanes
  refuse what does not fit in their queues, so a refused batch is halved, once and for all, down to 64.
- Lanes, queues and slices as they come: other numbers of lanes and longer queues made no difference that could be told
  from noise, or failed.
- Metadata goes from process to process (``P2PHANDSHAKE``), without a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from llm_datadist.tools.bench.contenders import why_not_importable
from llm_datadist.tools.bench.contenders.base import Contender, Facts
from llm_datadist.tools.bench.workload import BenchWorkload, Op, private_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Mooncake"]

_HOST: Final = "127.0.0.1"
_LARGEST_BATCH: Final = 1024
_SMALLEST_BATCH: Final = 64


class Mooncake(Contender):
    """Batches of blocks between two processes over tcp."""

    ops: ClassVar[tuple[Op, ...]] = (Op.PULL, Op.PUSH, Op.LATENCY)
    env: ClassVar[Mapping[str, str]] = {"MC_TCP_BIND_ADDRESS": _HOST, "MC_LOG_LEVEL": "ERROR", "MC_FORCE_TCP": "1"}

    @classmethod
    def why_not(cls, workload: BenchWorkload) -> str | None:
        """Refuse where Mooncake is not installed, too."""
        why = super().why_not(workload) or why_not_importable(
            "mooncake.engine", "--no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1"
        )
        if why is not None and "libibverbs" in why:
            why += " (a library of the system: package libibverbs1 of Debian and Ubuntu)"
        return why

    def start(self) -> Facts:
        from mooncake.engine import TransferEngine

        tensors = private_tensors(self.workload)
        self.own(tensors)
        self._engine = TransferEngine()
        _check(self._engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""), "initialize")
        self._bases = [each.ctypes.data for each in tensors]
        for base in self._bases:
            _check(self._engine.register_memory(base, self.workload.tensor_bytes), "register_memory")
        return {"port": self._engine.get_rpc_port(), "bases": self._bases}

    def connect(self, facts: Facts) -> Facts:
        """Make the lists of addresses: of everything, and where single blocks are timed of each."""
        here = self.workload
        self._peer = f"{_HOST}:{facts['port']}"
        push = here.op is Op.PUSH
        self._call = self._engine.batch_transfer_sync_write if push else self._engine.batch_transfer_sync_read
        mine, theirs = (here.src_blocks, here.dst_blocks) if push else (here.dst_blocks, here.src_blocks)
        self._near = self._addresses(self._bases, mine)
        self._far = self._addresses(facts["bases"], theirs)
        self._sizes = [here.block_bytes] * len(self._near)
        self._batch = min(_LARGEST_BATCH, len(self._near))
        return {"transport": "tcp"}

    def transfer(self) -> None:
        """Move all blocks, batch after batch."""
        at = 0
        while at < len(self._near):
            end = at + self._batch
            if self._call(self._peer, self._near[at:end], self._far[at:end], self._sizes[at:end]) == 0:
                at = end
            elif self._batch <= _SMALLEST_BATCH:
                raise RuntimeError(f"Mooncake refused a batch of {self._batch} blocks")
            else:
                self._batch //= 2

    def transfer_one(self, index: int) -> None:
        every = slice(index, None, self.workload.blocks)
        code = self._call(self._peer, self._near[every], self._far[every], self._sizes[every])
        _check(code, "batch_transfer_sync_read")

    def stop(self) -> None:
        for base in self._bases:
            self._engine.unregister_memory(base)

    def _addresses(self, bases: list[int], numbers: NDArray[np.int64]) -> list[int]:
        offsets = (numbers * self.workload.block_bytes).tolist()
        return [base + offset for base in bases for offset in offsets]


def _check(code: int, call: str) -> None:
    if code != 0:
        raise RuntimeError(f"Mooncake: {call} returned {code}")
