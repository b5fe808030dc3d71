"""Parts of the conformance suite: random memory, gates, and a process's resources."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from llm_datadist._deadline import Deadline
from llm_datadist._native import Plan, Tensors, closing, plan_blocks, plan_row
from llm_datadist._transport.connection import Transfer, guards_of
from llm_datadist.errors import StateError
from llm_datadist.testing.peers import REGION_BYTES, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from llm_datadist._native import CopyPool, GuardSet
    from llm_datadist._transport.connection import Connection, RemoteTensors

T = TypeVar("T")

BLOCKS: Final = 16
TENSORS: Final = 5
BUDGET_MS: Final = 20_000  # for calls that should succeed; only a hang can use it up


@dataclass(frozen=True)
class Scene:
    """Five equal tensors on both sides, at odd places in random memory."""

    block_bytes: int
    extent: int  # bytes of each tensor
    memory: NDArray[np.uint8]  # local: tensors and gaps
    images: dict[int, NDArray[np.uint8]]  # expected bytes of the peer's regions
    starts: list[int]  # local byte offset of each tensor
    places: list[tuple[int, int]]  # (region, offset) of each of the peer's tensors
    peer: Peer

    @classmethod
    def build(cls, seed: int, peer: Peer) -> Scene:
        """Return a scene drawn from ``seed``; fill the peer's memory accordingly."""
        rng = np.random.default_rng(seed)
        block_bytes = int(rng.choice([64, 1000, 4096, 4608]))
        extent = block_bytes * BLOCKS
        images = {region: rng.integers(0, 256, size, np.uint8) for region, size in REGION_BYTES.items()}
        for region, image in images.items():
            peer.poke(region, image)
        memory = rng.integers(0, 256, TENSORS * (extent + 999) + 999, np.uint8)
        gaps = rng.integers(1, 999, TENSORS).tolist()
        starts = [index * (extent + 999) + gap for index, gap in enumerate(gaps)]
        # The last tensor ends with its region.
        places = [(1, start) for start in starts[:3]] + [(2, gaps[3]), (2, REGION_BYTES[2] - extent)]
        return cls(block_bytes, extent, memory, images, starts, places, peer)

    @property
    def local(self) -> Tensors:
        """The local tensors."""
        return Tensors(np.array(self.starts, np.uint64) + np.uint64(self.memory.ctypes.data), self.extent)

    def remote(self, connection: Connection, *, writable: bool) -> RemoteTensors:
        """Return the peer's tensors, mapped through a connection."""
        return _map(self.peer, connection, self.places, self.extent, writable=writable)

    def plan(self, first: tuple[int, int], count: int, dst: list[int], src: list[int]) -> Plan:
        """Return the plan of blocks ``dst[i] <- src[i]``, from tensors ``first`` (destination, source) on."""
        return plan_blocks(
            np.array(dst, np.int64),
            np.array(src, np.int64),
            block_bytes=self.block_bytes,
            dst_count=BLOCKS,
            src_count=BLOCKS,
            alias=False,
            tensors=(*first, count),
        )

    def local_block(self, tensor: int, block: int) -> NDArray[np.uint8]:
        """Return a block of a local tensor."""
        start = self.starts[tensor] + block * self.block_bytes
        return self.memory[start : start + self.block_bytes]

    def image_block(self, tensor: int, block: int) -> NDArray[np.uint8]:
        """Return a block of the peer's tensor in ``images``."""
        region, offset = self.places[tensor]
        start = offset + block * self.block_bytes
        return self.images[region][start : start + self.block_bytes]

    def after_read(self, first: tuple[int, int], count: int, dst: list[int], src: list[int]) -> NDArray[np.uint8]:
        """Return the local memory that a read of these blocks leaves; see :meth:`plan`."""
        after = replace(self, memory=self.memory.copy())
        for tensor, (to, of) in product(range(count), zip(dst, src, strict=True)):
            after.local_block(first[0] + tensor, to)[:] = self.image_block(first[1] + tensor, of)
        return after.memory

    def expect_write(self, first: tuple[int, int], count: int, dst: list[int], src: list[int]) -> None:
        """Do to the images what a write of these blocks does to the peer; see :meth:`plan`."""
        for tensor, (to, of) in product(range(count), zip(dst, src, strict=True)):
            self.image_block(first[0] + tensor, to)[:] = self.local_block(first[1] + tensor, of)

    def check_peer(self) -> None:
        """Compare every byte of the peer with the images."""
        for region, image in self.images.items():
            assert np.array_equal(self.peer.peek(region), image), f"region {region} differs"


class Holds(Deadline):
    """Deadline that holds its transfer in the connection, right before the move, until ``go`` is set."""

    __slots__ = ("_ends_ns", "go", "inside")

    def __init__(self) -> None:
        super().__init__(BUDGET_MS)
        self.inside, self.go = threading.Event(), threading.Event()

    @property
    def expires_ns(self) -> int:
        """End of the transfer, once that may go on."""
        self.inside.set()
        assert self.go.wait(BUDGET_MS / 1e3)
        return self._ends_ns

    @expires_ns.setter
    def expires_ns(self, value: int) -> None:
        self._ends_ns = value


@contextmanager
def held(transfer: Callable[[Deadline], T]) -> Iterator[Future[T]]:
    """Run a transfer in a thread, hold it right before its move during the ``with`` block, then wait for its end."""
    deadline = Holds()
    with ThreadPoolExecutor(1) as thread:
        try:
            outcome = thread.submit(transfer, deadline)
            assert deadline.inside.wait(BUDGET_MS / 1e3)
            yield outcome
        finally:
            deadline.go.set()


#: Beginnings of the names of threads that live as long as the process: for errands, and those of a GPU's driver.
KEPT: Final = ("lldd-call", "cuda", "fakecuda")


def residue() -> dict[str, Any]:
    """Return resources that a close must free."""
    gc.collect()
    with open("/proc/self/maps") as lines:
        # Neighbouring mappings merge, so bytes are counted, not lines.
        spans = [line.split()[0].split("-") for line in lines if "/memfd:" in line]
    return {
        "fds": descriptors(),
        "mapped bytes": sum(int(end, 16) - int(start, 16) for start, end in spans),
        "kernel threads": sorted(number for number, name in kernel_threads().items() if not name.startswith(KEPT)),
    }


def residue_at_rest() -> dict[str, Any]:
    """Return :func:`residue` once it stays as it is: what a close frees in a thread is freed."""
    found: dict[str, Any] = {}
    while (now := residue()) != found:
        found = now
        time.sleep(0.05)
    return found


def kernel_threads() -> dict[int, str]:
    """Return the name of every thread of this process, by number."""
    names = {}
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{task}/comm", "rb") as comm:
            names[int(task)] = comm.read().decode().strip()
    return names


def settled(
    before: dict[str, Any], look: Callable[[], dict[str, Any]] = residue, *, seconds: float = 5.0
) -> dict[str, Any]:
    """Return ``look``'s result once it equals ``before``, or after ``seconds``.

    Threads of ``before`` that have left are no difference.
    """
    give_up = Deadline(int(seconds * 1e3))
    while True:
        now = look()
        now["kernel threads"] = sorted({*now["kernel threads"], *before["kernel threads"]})
        if now == before or give_up.expired():
            return now
        time.sleep(0.001)


def descriptors() -> list[str]:
    """Return number and target of every descriptor, once no close is under way or after 1 s."""
    Deadline(1000).poll(lambda: not closing())
    found = []
    for fd in os.listdir("/proc/self/fd"):
        # The listing's own descriptor is in the list, and gone afterwards.
        with suppress(FileNotFoundError):
            found.append(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return sorted(found)


def open_and_forget(peer: Peer) -> None:
    """Open a connection and drop it."""
    peer.connect()
    gc.collect()


def random_blocks(seed: int) -> tuple[tuple[int, int], int, list[int], list[int]]:
    """Return ((first destination tensor, first source tensor), count, destination blocks, source blocks)."""
    rng = np.random.default_rng(1000 + seed)
    count = int(rng.integers(1, TENSORS + 1))
    first = (int(rng.integers(0, TENSORS - count + 1)), int(rng.integers(0, TENSORS - count + 1)))
    blocks = int(rng.integers(1, BLOCKS + 1))
    dst, src = rng.permutation(BLOCKS)[:blocks].tolist(), rng.permutation(BLOCKS)[:blocks].tolist()
    if seed % 2:  # sorted, so that runs merge
        return first, count, sorted(dst), sorted(src)
    return first, count, dst, src


def tensors_over(memory: NDArray[np.uint8]) -> Tensors:
    """Return one tensor over an array, shape (nbytes,)."""
    return Tensors(np.array([memory.ctypes.data], np.uint64), memory.size)


def one_row(nbytes: int) -> Plan:
    """Return a plan of one run, between the beginnings of tensors."""
    return Plan(0, 0, 1, plan_row(0, 0, nbytes), False, nbytes)


def pull(
    plan: Plan,
    local: Tensors,
    remote: RemoteTensors,
    deadline: Deadline,
    guards: GuardSet | None = None,
    pool: CopyPool | None = None,
    *,
    write: bool = False,
) -> int:
    """Move ``plan`` from remote tensors to local ones, by the connection that mapped them; return its bytes."""
    return remote.connection.move(Transfer(plan, local, remote, pool, deadline, write, guards))


push: Callable[..., int] = partial(pull, write=True)


def beginning_of(peer: Peer, connection: Connection, region: int, extent: int, *, writable: bool) -> RemoteTensors:
    """Map one tensor of ``extent`` bytes at a region's beginning."""
    return _map(peer, connection, [(region, 0)], extent, writable=writable)


def _map(
    peer: Peer, connection: Connection, places: list[tuple[int, int]], extent: int, *, writable: bool
) -> RemoteTensors:
    asked = [peer.place(region, offset) for region, offset in places]
    regions = np.array([region for region, _ in asked], np.uint32)
    offsets = np.array([offset for _, offset in asked], np.uint64)
    return connection.map(regions, offsets, extent, writable=writable)


def read_beginning(
    peer: Peer, connection: Connection, into: NDArray[np.uint8], deadline: Deadline | None = None
) -> NDArray[np.uint8]:
    """Read the beginning of region 1 into an array; return it."""
    remote = beginning_of(peer, connection, 1, into.size, writable=False)
    pull(one_row(into.size), tensors_over(into), remote, deadline or Deadline(BUDGET_MS))
    return into


def unchanged(connection: Connection, slot: int, generation: int) -> bool:
    """Return a connection's verdict on one guard of the peer."""
    return connection.guards_unchanged(guards_of(connection, [(slot, generation)]))


def child_of_fork(connection: Connection) -> int:
    """Return 0 if every verb refuses a forked child, and it can close."""
    signal.alarm(20)  # a hanging child must not outlive the test
    try:
        nowhere = np.zeros(0, np.uint32), np.zeros(0, np.uint64)
        for call in (lambda: unchanged(connection, 1, 0), lambda: connection.map(*nowhere, 64, writable=False)):
            try:
                call()
            except StateError:
                continue
            return 1
        connection.close()
        connection.close()
    except BaseException:  # noqa: BLE001  the child must leave through _exit
        return 2
    return 0 if connection.closed else 3
