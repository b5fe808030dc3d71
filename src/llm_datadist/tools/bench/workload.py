"""The work of a case: sizes, block numbers, memory, and bytes that differ from block to block."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from llm_datadist._native import usable_cpus
from llm_datadist.tools.bench import WrongBytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""One tensor of one side: uint8, shape (rows, block_bytes)."""

POISON: Final = 0xA5
"""Value of every byte of a destination before a pass."""

SPREAD: Final = 2
"""Blocks in memory for each moved block: sources are even, destinations odd, so none are adjacent."""

_WORD: Final = np.dtype(np.uint64)

# Bytes written or compared at once: temporary arrays stay in the cache.
_CHUNK_BYTES: Final = 1 << 19


Op = StrEnum("Op", "PULL PUSH COPY SWAP D2D H2D D2H LATENCY PLAN ALLOC LINK")
"""Operations that ``llm-datadist bench`` measures."""

BESIDE_GPU: Final = (Op.D2D, Op.H2D, Op.D2H)
"""Ops whose caches lie in a GPU, or whose other side does."""

MOVES: Final = (Op.PULL, Op.PUSH, Op.COPY, Op.SWAP, *BESIDE_GPU)
"""Ops that move many blocks in one call: their results are rates, others times."""


BenchMemory = StrEnum("BenchMemory", "POOL REGISTERED GPU")
"""Memory of this library's caches: ``GPU`` is a pool in the memory of one."""


class Mirror(np.ndarray[Any, np.dtype[np.uint8]]):
    """Array of the host that stands for a tensor of a GPU, at ``address`` there."""

    address = 0


class BenchWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work, equal for all contenders of a case.

    Attributes:
        block_bytes: Bytes of one block of one tensor.
        blocks: Blocks moved in each tensor; the same numbers in each.
        threads: Copying threads in each process.
        secrets: File of secrets of both sides; empty: the link is not encrypted.
    """

    op: Op
    block_bytes: int
    blocks: int
    tensors: int = 1
    memory: BenchMemory = BenchMemory.POOL
    threads: int = 1
    secrets: str = ""
    seed: int = 1

    @property
    def rows(self) -> int:
        """Blocks of one tensor, moved or not."""
        return self.blocks * SPREAD

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor."""
        return self.rows * self.block_bytes

    @property
    def nbytes(self) -> int:
        """Bytes moved by one transfer."""
        return self.blocks * self.block_bytes * self.tensors

    @property
    def src_blocks(self) -> NDArray[np.int64]:
        """Blocks to read: shape (blocks,), all even."""
        return self._shuffled(0)

    @property
    def dst_blocks(self) -> NDArray[np.int64]:
        """Blocks to write: shape (blocks,), all odd; number i takes ``src_blocks[i]``."""
        return self._shuffled(1)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Each block to read, with the one to write."""
        return list(zip(self.src_blocks.tolist(), self.dst_blocks.tolist(), strict=True))

    def _shuffled(self, first: int) -> NDArray[np.int64]:
        order = np.random.default_rng([self.seed, first]).permutation(self.blocks).astype(np.int64)
        return order * SPREAD + first


def private_tensors(workload: BenchWorkload) -> list[Bytes]:
    """Return the workload's tensors in private pages of the usual size.

    NumPy would use huge pages, which move at another speed.
    """
    return _tensors(workload, mmap.MAP_PRIVATE)


def tensors_like(workload: BenchWorkload) -> list[Bytes]:
    """Return the workload's tensors in its kind of pages: shared for a pool, else private."""
    return _tensors(workload, mmap.MAP_SHARED if workload.memory is BenchMemory.POOL else mmap.MAP_PRIVATE)


def mirrors(workload: BenchWorkload, addresses: Sequence[int]) -> list[Bytes]:
    """Return arrays that stand for the workload's tensors at these addresses of a GPU."""
    made = [each.view(Mirror) for each in private_tensors(workload)]
    for each, address in zip(made, addresses, strict=True):
        each.address = address
    return [*made]


def _tensors(workload: BenchWorkload, sharing: int) -> list[Bytes]:
    shape = (workload.rows, workload.block_bytes)
    flags = sharing | mmap.MAP_ANONYMOUS
    pages = (mmap.mmap(-1, workload.tensor_bytes, flags=flags) for _ in range(workload.tensors))
    return [np.frombuffer(each, np.uint8).reshape(shape) for each in pages]


def fill(views: Sequence[Bytes], seed: int) -> None:
    """Fill each block with its own bytes: a random pattern, shifted by its number."""
    for tensor, view in enumerate(views):
        windows = _windows(view, seed, tensor)
        for part in _parts(*view.shape):
            view[part] = windows[part]


def poison(views: Sequence[Bytes], *, in_place: bool = False) -> None:
    """Overwrite every byte with ``POISON``; ``in_place``, for copies inside one cache, only destination blocks."""
    for view in views:
        (view[1::SPREAD] if in_place else view)[...] = POISON


def verify(views: Sequence[Bytes], workload: BenchWorkload, seed: int, *, in_place: bool = False) -> None:
    """Compare every byte of the destination, addressed blocks and all others, or raise WrongBytes.

    ``in_place``: source and destination are one memory; other blocks hold the source's bytes, not poison.
    """
    # By destination block: reads go from front to back, without a gather.
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
    """Compare every byte of a destination of the source's first ``blocks`` rows in order, or raise WrongBytes."""
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
    """Compare eight bytes at a time if possible; single bytes are slower than the transfer."""
    if got.shape[1] % _WORD.itemsize:
        return bool((got == expected).all())
    words = expected.view(_WORD) if isinstance(expected, np.ndarray) else np.full(_WORD.itemsize, expected).view(_WORD)
    return bool((got.view(_WORD) == words).all())


def _windows(view: Bytes, seed: int, tensor: int) -> Bytes:
    """Return a tensor's expected rows, shape (rows, block_bytes), as a view of a small pattern."""
    rows, block_bytes = view.shape
    pattern = np.random.default_rng([seed, tensor]).integers(0, 256, rows + block_bytes, dtype=np.uint8)
    return np.lib.stride_tricks.sliding_window_view(pattern, block_bytes)[:rows]


def _parts(rows: int, block_bytes: int) -> Iterator[slice]:
    step = max(1, _CHUNK_BYTES // block_bytes)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
