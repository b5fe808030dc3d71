"""NIXL with its UCX backend, by its own Python package.

Its best settings, and why:

- Descriptors of all blocks are prepared once, as a strided list of one entry a tensor (``prep_xfer_dlist``), and a
  transfer picks its blocks by index (``make_prepped_xfer``): what connectors of engines do. ``initialize_xfer`` checks
  every descriptor again in each transfer.
- One worker without a progress thread at the end that starts transfers: it polls, and a second thread would only take
  turns with it. ``num_threads`` made it slower on two cores. The other end has the progress thread, as in production
  where Python is busy with other things.
- ``ucx_error_handling_mode`` is ``peer``, the default and what production uses: without it a peer that dies is a hang.
- Transports are UCX's own choice, on one host; ``nixl-tcp`` has ``UCX_TLS=tcp``, like ours on the loopback device.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from llm_datadist.tools.bench import cuda
from llm_datadist.tools.bench.contenders import why_not_importable
from llm_datadist.tools.bench.contenders.base import Contender, Facts, Role
from llm_datadist.tools.bench.workload import BenchMemory, BenchWorkload, Bytes, Op, mirrors, private_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["Nixl", "NixlGpu", "NixlPrepared", "NixlTcp", "NixlTcpPrepared"]

_BACKEND: Final = "UCX"
_TCP: Final = {"NIXL_LOG_LEVEL": "ERROR", "UCX_TLS": "tcp"}


class Nixl(Contender):
    """Each transfer is made from prepared descriptors, posted and polled: READ to pull, WRITE to push."""

    ops: ClassVar[tuple[Op, ...]] = (Op.PULL, Op.PUSH, Op.LATENCY)
    env: ClassVar[Mapping[str, str]] = {"NIXL_LOG_LEVEL": "ERROR"}
    kind: ClassVar[str] = "DRAM"

    @classmethod
    def why_not(cls, workload: BenchWorkload) -> str | None:
        """Refuse where NIXL is not installed, too."""
        return super().why_not(workload) or why_not_importable("nixl", "--no-deps nixl==1.5.1 nixl-cu12==1.5.1")

    def start(self) -> Facts:
        from nixl import nixl_agent, nixl_agent_config

        self.own(self._allocate())
        config = nixl_agent_config(enable_prog_thread=self.role is Role.SOURCE, backends=[])
        self._agent = nixl_agent(str(self.role), config)
        self._agent.create_backend(_BACKEND, {"ucx_error_handling_mode": "peer"})
        regions = [(base, self.workload.tensor_bytes, 0, "") for base in self._bases]
        self._registered = self._agent.register_memory(regions, self.kind)
        return {"metadata": b64encode(self._agent.get_agent_metadata()).decode(), "bases": self._bases}

    def _allocate(self) -> list[Bytes]:
        """Return this process's tensors; ``_bases`` are their addresses."""
        tensors = private_tensors(self.workload)
        self._bases = [each.ctypes.data for each in tensors]
        return tensors

    def connect(self, facts: Facts) -> Facts:
        """Load the source's metadata and prepare the descriptors of all blocks of both ends."""
        peer = self._agent.add_remote_agent(b64decode(facts["metadata"]))
        name = peer.decode() if isinstance(peer, bytes) else peer
        self._agent.make_connection(name)
        here = self.workload
        push = here.op is Op.PUSH
        self._verb = "WRITE" if push else "READ"
        self._mine = self._descriptors("NIXL_INIT_AGENT", self._bases)
        self._theirs = self._descriptors(name, facts["bases"])
        numbers = (here.src_blocks, here.dst_blocks)
        self._near, self._far = map(self._indices, numbers if push else numbers[::-1])
        self.prepare()
        return {"transport": self.env.get("UCX_TLS", "ucx")}

    def prepare(self) -> None:
        """Do what need not be done again for every transfer."""

    def transfer(self) -> None:
        """Make, post and poll one transfer of all blocks."""
        self._make_and_run(self._near.reshape(-1), self._far.reshape(-1))

    def transfer_one(self, index: int) -> None:
        self._make_and_run(self._near[:, index], self._far[:, index])

    def stop(self) -> None:
        self._agent.deregister_memory(self._registered)

    def _make_and_run(self, near: NDArray[np.int32], far: NDArray[np.int32]) -> None:
        handle = self._make(near, far)
        self._run(handle)
        handle.release()

    # Their handles have no types.
    def _make(self, near: NDArray[np.int32], far: NDArray[np.int32]) -> Any:  # noqa: ANN401
        return self._agent.make_prepped_xfer(self._verb, self._mine, near, self._theirs, far)

    def _run(self, handle: Any) -> None:  # noqa: ANN401
        agent = self._agent
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL ended a transfer with {state}")

    def _descriptors(self, agent: str, bases: list[int]) -> Any:  # noqa: ANN401
        """Prepare a descriptor for each row: row ``i`` of tensor ``t`` is ``t * rows + i``."""
        size, rows = self.workload.block_bytes, self.workload.rows
        strided = np.array([(base, size, 0, size, rows) for base in bases], np.uint64)
        return self._agent.prep_xfer_dlist(agent, strided, self.kind)

    def _indices(self, numbers: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the descriptors of block ``numbers``, shape (tensors, blocks)."""
        firsts = np.arange(self.workload.tensors, dtype=np.int64) * self.workload.rows
        return (firsts[:, None] + numbers).astype(np.int32)


class NixlPrepared(Nixl):
    """Transfers are made once, before they are timed: only posted and polled."""

    def prepare(self) -> None:
        """Make the transfer of everything, or one for every block."""
        if self.workload.op is Op.LATENCY:
            columns = range(self.workload.blocks)
            self._handles = [self._make(self._near[:, each], self._far[:, each]) for each in columns]
        else:
            self._handles = [self._make(self._near.reshape(-1), self._far.reshape(-1))]

    def transfer(self) -> None:
        for each in self._handles:
            self._run(each)

    def transfer_one(self, index: int) -> None:
        self._run(self._handles[index])

    def stop(self) -> None:
        for each in getattr(self, "_handles", ()):
            each.release()
        super().stop()


class NixlGpu(Nixl):
    """Between two processes' memory of one GPU, over what UCX chooses: cuda_ipc, where it can. Never run on a GPU.

    The memory is cuMemAlloc's, which UCX exports on every machine.
    """

    memories: ClassVar[tuple[BenchMemory, ...]] = (BenchMemory.GPU,)
    kind: ClassVar[str] = "VRAM"

    def _allocate(self) -> list[Bytes]:
        self._bases = [cuda.allocate(self.workload.tensor_bytes) for _ in range(self.workload.tensors)]
        return mirrors(self.workload, self._bases)


class NixlTcp(Nixl):
    """Over tcp on loopback."""

    env: ClassVar[Mapping[str, str]] = _TCP


class NixlTcpPrepared(NixlPrepared):
    """Over tcp on loopback, prepared."""

    env: ClassVar[Mapping[str, str]] = _TCP
