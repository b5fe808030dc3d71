"""What is moved: sizes, block numbers, and bytes that differ from block to block so that any error shows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from llm_datadist._native import usable_cpus
from llm_datadist.bench import WrongBytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""One tensor at one end: uint8, shape (rows, block_bytes)."""

POISON: Final = 0xA5
"""What every byte of a destination is before a pass."""

SPREAD: Final = 2
"""Blocks in memory for one block moved: sources have even numbers and destinations odd ones, so none are adjacent."""

_WORD: Final = np.dtype(np.uint64)

# Rows are written and compared in parts of about this many bytes, so that temporary arrays stay in the cache.
_CHUNK_BYTES: Final = 1 << 19


class Op(StrEnum):
    """What ``llm-datadist bench`` measures."""

    PULL = "pull"
    PUSH = "push"
    COPY = "copy"
    SWAP = "swap"
    LATENCY = "latency"
    PLAN = "plan"
    ALLOC = "alloc"
    LINK = "link"


MOVES: Final = (Op.PULL, Op.PUSH, Op.COPY, Op.SWAP)
"""Those that move many blocks in one call: their results are rates, those of the others times."""


class BenchMemory(StrEnum):
    """Where our own caches lie; peers and limits have no such choice."""

    POOL = "pool"
    REGISTERED = "registered"


class BenchWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work, the same for all contenders of a case.

    Attributes:
        op: What is done.
        block_bytes: Bytes of one block of one tensor.
        blocks: Blocks moved in each tensor.
        tensors: Tensors; the same block numbers in each.
        memory: Where our own caches lie.
        threads: Threads that copy, in each process.
        seed: Of the order of the blocks.
    """

    op: Op
    block_bytes: int
    blocks: int
    tensors: int = 1
    memory: BenchMemory = BenchMemory.POOL
    threads: int = 1
    seed: int = 1

    @property
    def rows(self) -> int:
        """Blocks of one tensor in memory, moved or not."""
        return self.blocks * SPREAD

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor in memory."""
        return self.rows * self.block_bytes

    @property
    def nbytes(self) -> int:
        """Bytes moved by one transfer."""
        return self.blocks * self.block_bytes * self.tensors

    @property
    def src_blocks(self) -> NDArray[np.int64]:
        """Numbers of the blocks that are read, in order: shape (blocks,), all even."""
        return self._shuffled(0)

    @property
    def dst_blocks(self) -> NDArray[np.int64]:
        """Numbers of the blocks that are written: shape (blocks,), all odd; number i takes ``src_blocks[i]``."""
        return self._shuffled(1)

    def _shuffled(self, first: int) -> NDArray[np.int64]:
        order = np.random.default_rng([self.seed, first]).permutation(self.blocks).astype(np.int64)
        return order * SPREAD + first


def fill(views: Sequence[Bytes], seed: int) -> None:
    """Fill every block of every tensor with bytes of its own.

    They are a random pattern, shifted by the block's number.
    """
    for tensor, view in enumerate(views):
        windows = _windows(view, seed, tensor)
        for part in _parts(*view.shape):
            view[part] = windows[part]


def poison(views: Sequence[Bytes]) -> None:
    """Overwrite every byte with ``POISON``."""
    for view in views:
        view.fill(POISON)


def poison_blocks(views: Sequence[Bytes], workload: BenchWorkload) -> None:
    """Poison only the blocks that are to be written, for copies inside one cache."""
    for view in views:
        view[1::SPREAD] = POISON


def verify(views: Sequence[Bytes], workload: BenchWorkload, seed: int, *, in_place: bool = False) -> None:
    """Compare every byte of the destination: the blocks that were addressed, and all others.

    Args:
        views: The destination's tensors.
        workload: What should have been moved.
        seed: With which the source was filled.
        in_place: Source and destination are one memory: what was not addressed holds the source's bytes, not poison.

    Raises:
        WrongBytes: Some byte is not what it must be; the text names the tensor and the block.
    """
    # By destination block, all of which are odd: what was written is read from front to back and never gathered.
    sources = workload.src_blocks[np.argsort(workload.dst_blocks)]
    with ThreadPoolExecutor(usable_cpus()) as threads:
        for tensor, view in enumerate(views):
            windows = _windows(view, seed, tensor)

            def compare(part: slice, tensor: int = tensor, view: Bytes = view, windows: Bytes = windows) -> None:
                _compare(view[1::SPREAD][part], windows[sources[part]], tensor, 1 + SPREAD * part.start)
                rest = windows[::SPREAD][part] if in_place else np.uint8(POISON)
                _compare(view[::SPREAD][part], rest, tensor, SPREAD * part.start)

            for _ in threads.map(compare, _parts(workload.blocks, view.shape[1])):
                pass


def verify_front(views: Sequence[Bytes], workload: BenchWorkload, seed: int) -> None:
    """Compare every byte of a destination that took the first ``blocks`` rows of the source, in order.

    Raises:
        WrongBytes: As ``verify``.
    """
    for tensor, view in enumerate(views):
        windows = _windows(view, seed, tensor)
        for part in _parts(workload.blocks, view.shape[1]):
            if not _equal(view[part], windows[part]):
                raise WrongBytes(f"wrong bytes among the first blocks of tensor {tensor}, in {part.start} and after")
            if not _equal(view[workload.blocks :][part], np.uint8(POISON)):
                raise WrongBytes(f"wrong bytes behind the first {workload.blocks} blocks of tensor {tensor}")


def _compare(got: Bytes, expected: Bytes | np.uint8, tensor: int, first: int) -> None:
    if _equal(got, expected):
        return
    differs = got != expected
    where = "inside" if first % SPREAD else "outside"
    block = first + SPREAD * int(np.flatnonzero(differs.any(axis=1))[0])
    raise WrongBytes(
        f"wrong bytes {where} the addressed blocks: {int(differs.sum())} or more of tensor {tensor}, first in block "
        f"{block}"
    )


def _equal(got: Bytes, expected: Bytes | np.uint8) -> bool:
    """Compare eight bytes at a time if the block size allows it.

    Single bytes would take longer than the transfer.
    """
    if got.shape[1] % _WORD.itemsize:
        return bool((got == expected).all())
    words = expected.view(_WORD) if isinstance(expected, np.ndarray) else np.full(_WORD.itemsize, expected).view(_WORD)
    return bool((got.view(_WORD) == words).all())


def _windows(view: Bytes, seed: int, tensor: int) -> Bytes:
    """Return what every row of a tensor holds, as a view of one small pattern.

    Shape (rows, block_bytes).
    """
    rows, block_bytes = view.shape
    pattern = np.random.default_rng([seed, tensor]).integers(0, 256, rows + block_bytes, dtype=np.uint8)
    return np.lib.stride_tricks.sliding_window_view(pattern, block_bytes)[:rows]


def _parts(rows: int, block_bytes: int) -> Iterator[slice]:
    step = max(1, _CHUNK_BYTES // block_bytes)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
