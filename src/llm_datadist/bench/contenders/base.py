"""The base class of all contenders: a contender moves the blocks of one workload, in processes of its own.

A contender sets up its memory in ``start``, connects to its other end in ``connect``, and moves blocks in ``transfer`` or
``transfer_one``. This base class gives the source its bytes, poisons the destination and compares afterwards, through
the arrays that the contender put into ``source_views`` and ``destination_views``: a contender cannot vouch for itself.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from llm_datadist.bench import workload as work
from llm_datadist.bench.workload import BenchMemory, BenchWorkload, Bytes, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ENV_HOST: Final = "LLM_DATADIST_BENCH_HOST"
HOST: Final = os.environ.get(ENV_HOST, "127.0.0.1")
"""Where the sources listen."""

Facts = dict[str, Any]
"""What one end returns for the other, and for the driver: JSON values."""


class Role(StrEnum):
    """Which process of a contender."""

    SOURCE = "source"
    """Owns the memory that a pull reads and a push writes."""
    DESTINATION = "destination"
    """Starts the transfers."""
    ALONE = "alone"
    """Both, where a contender has one process."""


class Contender(ABC):
    """One process of a contender.

    Attributes:
        ops: What this contender can be measured at.
        roles: The processes of this contender, in the order of their start.
        env: Added to the environment of its processes.
        pool_only: Why it cannot be measured on registered memory; empty if it can.
        transport: Which one to ask for, where the contender has a choice; see :meth:`over`.
        role: Which of the processes this is.
        workload: What is to be moved.
        source_views: The tensors that are read, where this process owns them: one uint8 array of shape
            (workload.rows, workload.block_bytes) per tensor. Set by ``start`` or ``connect``.
        destination_views: The same for those that are written.
    """

    ops: ClassVar[tuple[Op, ...]] = ()
    roles: ClassVar[tuple[Role, ...]] = (Role.SOURCE, Role.DESTINATION)
    env: ClassVar[Mapping[str, str]] = {}
    pool_only: ClassVar[str] = ""
    transport: ClassVar[str] = ""

    def __init__(self, role: Role, workload: BenchWorkload) -> None:
        self.role = role
        self.workload = workload
        self.source_views: list[Bytes] = []
        self.destination_views: list[Bytes] = []

    @classmethod
    def over(cls, transport: str) -> type[Self]:
        """Return this contender over one transport."""
        return type(f"{cls.__name__}{transport.title()}", (cls,), {"transport": transport})

    @classmethod
    def why_not(cls, workload: BenchWorkload) -> str | None:
        """Return why this contender cannot run the workload, or None.

        The base looks at ``ops`` and ``pool_only``. A contender that overrides this imports no other software here.
        """
        if cls.pool_only and workload.memory is BenchMemory.REGISTERED:
            return cls.pool_only
        return None if workload.op in cls.ops else f"is for {', '.join(cls.ops)}, not for {workload.op}"

    @classmethod
    def footprint(cls, workload: BenchWorkload) -> int:
        """Return the bytes that all processes of this contender hold, moved blocks and others."""
        return 2 * workload.tensor_bytes * workload.tensors

    @abstractmethod
    def start(self) -> Facts:
        """Set up memory; return what the destination needs to connect, such as port and addresses."""

    def connect(self, facts: Facts) -> Facts:
        """Connect the destination to the source, given what its ``start`` returned.

        Returns what the driver should know (``transport``). Contenders with one process are not asked.
        """
        return {}

    def transfer(self) -> None:
        """Move every block once. Only this is timed. Called in the initiating process."""
        raise NotImplementedError(f"{type(self).__name__} has single steps only")

    def transfer_one(self, index: int) -> None:
        """Do the step ``index`` by itself, for ops whose single steps are timed.

        For ``latency``: move block ``src_blocks[index]`` to ``dst_blocks[index]``, in every tensor.
        """
        raise NotImplementedError(f"{type(self).__name__} has no single steps")

    def stop(self) -> None:  # noqa: B027  a contender may have nothing to give back
        """Free everything. Called once, also after a failure."""

    # Called by the worker. Few contenders override one of these.

    @property
    def in_place(self) -> bool:
        """True when source and destination are blocks of the same tensors."""
        return bool(self.source_views) and self.source_views is self.destination_views

    def own(self, views: list[Bytes]) -> None:
        """Take the tensors of one process as source or as destination, by op and role."""
        reads = (self.workload.op is Op.PUSH) == (self.role is Role.DESTINATION)
        self.source_views, self.destination_views = (views, []) if reads else ([], views)

    def fill(self, seed: int) -> None:
        """Fill the source with new bytes, if it is in this process."""
        work.fill(self.source_views, seed)

    def poison(self) -> None:
        """Poison the destination, if it is in this process."""
        if self.in_place:
            work.poison_blocks(self.destination_views, self.workload)
        else:
            work.poison(self.destination_views)

    def verify(self, seed: int) -> bool:
        """Compare every byte of the destination; return False if another process has it.

        Raises WrongBytes.
        """
        if self.destination_views:
            work.verify(self.destination_views, self.workload, seed, in_place=self.in_place)
        return bool(self.destination_views)

    def timed(self, count: int) -> list[float]:
        """Run ``transfer`` ``count`` times; return the seconds of each."""
        return [_seconds(self.transfer) for _ in range(count)]

    def sample(self, count: int) -> list[float]:
        """Run the single steps 0 to ``count - 1``; return the seconds of each."""
        return [_seconds(self.transfer_one, index) for index in range(count)]


def _seconds(action: Callable[..., None], *args: int) -> float:
    started = time.perf_counter()
    action(*args)
    return time.perf_counter() - started
