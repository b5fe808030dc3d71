"""Base class of contenders.

It fills the source, poisons the destination and compares afterwards, through ``source_views`` and
``destination_views``: a contender cannot vouch for itself.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from ctypes import c_uint64
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from llm_datadist.tools.bench import cuda
from llm_datadist.tools.bench import workload as work
from llm_datadist.tools.bench.workload import BenchMemory, BenchWorkload, Bytes, Mirror, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ENV_HOST: Final = "LLM_DATADIST_BENCH_HOST"
HOST: Final = os.environ.get(ENV_HOST, "127.0.0.1")
"""Address at which sources listen."""

Facts = dict[str, Any]
"""Facts for the other process and the driver: JSON values."""


Role = StrEnum("Role", "SOURCE DESTINATION ALONE")
"""A contender's processes: the owner of what a pull reads and a push writes, the one that transfers, or both."""


class Contender(ABC):
    """One process of a contender, which moves the blocks of one workload.

    Attributes:
        roles: The contender's processes, in the order of their start.
        env: Additions to the environment of its processes.
        memories: Memory that it can measure.
        pool_only: Reason why registered memory cannot be measured; empty if it can.
        transport: Transport to ask for, if there is a choice.
        sets: Sets of the workload's tensors that its processes hold together.
        source_views: Tensors that are read, if this process owns them: uint8 arrays of shape
            (workload.rows, workload.block_bytes). Set by ``start`` or ``connect``.
        destination_views: The same for tensors that are written.
    """

    ops: ClassVar[tuple[Op, ...]] = ()
    roles: ClassVar[tuple[Role, ...]] = (Role.SOURCE, Role.DESTINATION)
    env: ClassVar[Mapping[str, str]] = {}
    memories: ClassVar[tuple[BenchMemory, ...]] = (BenchMemory.POOL, BenchMemory.REGISTERED)
    pool_only: ClassVar[str] = ""
    transport: ClassVar[str] = ""
    sets: ClassVar[int] = 2

    def __init__(self, role: Role, workload: BenchWorkload) -> None:
        self.role = role
        self.workload = workload
        self.source_views: list[Bytes] = []
        self.destination_views: list[Bytes] = []

    @classmethod
    def over(cls, transport: str) -> type[Self]:
        return type(f"{cls.__name__}{transport.title()}", (cls,), {"transport": transport})

    @classmethod
    def why_not(cls, workload: BenchWorkload) -> str | None:
        """Return the reason why this contender cannot run the workload, or None; must not import other software."""
        if cls.pool_only and workload.memory is BenchMemory.REGISTERED:
            return cls.pool_only
        if workload.op not in cls.ops:
            return f"is for {', '.join(cls.ops)}, not for {workload.op}"
        if workload.memory not in cls.memories:
            return f"is for memory {', '.join(cls.memories)}, not for {workload.memory}"
        return cuda.why_not() if workload.memory is BenchMemory.GPU else None

    @classmethod
    def footprint(cls, workload: BenchWorkload) -> int:
        """Return the bytes that all its processes hold."""
        return cls.sets * workload.tensor_bytes * workload.tensors

    @classmethod
    def footprint_on_gpu(cls, workload: BenchWorkload) -> int:
        """Return the bytes that they hold in the GPU."""
        sets = 1 if workload.op in (Op.SWAP, Op.H2D, Op.D2H) else cls.sets
        return sets * workload.tensor_bytes * workload.tensors if workload.memory is BenchMemory.GPU else 0

    @abstractmethod
    def start(self) -> Facts:
        """Set up memory; return the facts that the destination needs to connect."""

    def connect(self, facts: Facts) -> Facts:
        """Connect the destination, given the source's facts; return facts for the driver. Lone processes skip it."""
        return {}

    def transfer(self) -> None:
        """Move every block once, in the initiating process; only this is timed."""
        raise NotImplementedError(f"{type(self).__name__} has single steps only")

    def transfer_one(self, index: int) -> None:
        """Do step ``index`` alone; for ``latency`` move block ``src_blocks[index]`` to ``dst_blocks[index]``."""
        raise NotImplementedError(f"{type(self).__name__} has no single steps")

    def stop(self) -> None:  # noqa: B027  optional
        """Free everything. Called once, also after a failure."""

    # Called by the worker, rarely overridden.

    @property
    def in_place(self) -> bool:
        return bool(self.source_views) and self.source_views is self.destination_views

    def own(self, views: list[Bytes]) -> None:
        """Take this process's tensors as source or destination, by op and role."""
        reads = (self.workload.op is Op.PUSH) == (self.role is Role.DESTINATION)
        self.source_views, self.destination_views = (views, []) if reads else ([], views)

    def fill(self, seed: int) -> None:
        work.fill(self.source_views, seed)
        exchange(self.source_views, send=True)

    def poison(self) -> None:
        work.poison(self.destination_views, in_place=self.in_place)
        exchange(self.destination_views, send=True)

    def verify(self, seed: int) -> bool:
        """Compare every byte of the destination, or raise WrongBytes; return False if another process has it."""
        exchange(self.destination_views, send=False)
        if self.destination_views:
            work.verify(self.destination_views, self.workload, seed, in_place=self.in_place)
        return bool(self.destination_views)

    def timed(self, count: int) -> list[float]:
        """Run ``transfer`` ``count`` times; return the seconds of each."""
        return [_seconds(self.transfer) for _ in range(count)]

    def sample(self, count: int) -> list[float]:
        """Run the first ``count`` single steps; return the seconds of each."""
        return [_seconds(self.transfer_one, index) for index in range(count)]


def exchange(views: list[Bytes], *, send: bool) -> None:
    """Copy the bytes of those views that are mirrors to the GPU, or from it."""
    for each in views:
        if isinstance(each, Mirror):
            here, there = c_uint64(each.ctypes.data), c_uint64(each.address)
            cuda.copy([(there, here) if send else (here, there)], each.nbytes)


def _seconds(action: Callable[..., None], *args: int) -> float:
    started = time.perf_counter()
    action(*args)
    return time.perf_counter() - started
