from typing import Any, final

import numpy as np
from numpy.typing import NDArray

def parse_indices(name: str, values: list[Any] | tuple[Any, ...]) -> NDArray[np.int64]: ...
def plan_blocks(
    dst: NDArray[np.int64],
    src: NDArray[np.int64],
    block_bytes: int,
    dst_count: int,
    src_count: int,
    alias: bool,
    dst_name: str,
    src_name: str,
) -> tuple[NDArray[np.uint64], bool]: ...
def plan_pieces(
    dst: NDArray[np.int64],
    block_bytes: int,
    dst_count: int,
    src_offset: int,
    src_bytes: int,
    dst_name: str,
) -> tuple[NDArray[np.uint64], bool]: ...
def plan_row(dst_offset: int, src_offset: int, length: int) -> NDArray[np.uint64]:
    """Return one run of ``length`` bytes, shape ``(1, 3)``. ParamError: a negative value."""

def execute(
    dst_bases: NDArray[np.uint64],
    dst_extent: int,
    dst_first: int,
    src_bases: NDArray[np.uint64],
    src_extent: int,
    src_first: int,
    count: int,
    runs: NDArray[np.uint64],
    ordered: bool,
    nbytes: int,
    pool: CopyPool | None,
    deadline_ns: int,
) -> int: ...
def load_generation(address: int) -> int:
    """Return the uint64 at ``address``, after every load made before: bytes copied until now are judged by it.

    ParamError: a null or misaligned address.
    """

def advance_generation(address: int) -> int:
    """Add one to the uint64 at ``address``, sequentially consistent among all processes, and return the new value.

    ParamError: a null or misaligned address.
    """

def execute_process(
    dst_bases: NDArray[np.uint64],
    dst_extent: int,
    dst_first: int,
    src_bases: NDArray[np.uint64],
    src_extent: int,
    src_first: int,
    count: int,
    runs: NDArray[np.uint64],
    ordered: bool,
    nbytes: int,
    pool: CopyPool | None,
    deadline_ns: int,
    pid: int,
    write: bool,
) -> int: ...
def peek_process(pid: int, address: int, nbytes: int) -> bytes:
    """Return ``nbytes`` (at most 1 MiB) bytes at ``address`` of process ``pid``: a probe, not a transfer.

    OSError: the kernel refused; errno says why. ParamError: too many bytes.
    """

@final
class CopyPool:
    """Threads that help with large copies.

    ``threads`` (1 to 1024) copy at once in one call, the caller's own among them. Several callers may use one pool at a
    time. A closed pool, or one in a forked child, leaves the caller to copy alone.
    """

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int:
        """Threads that copy at once in one call, the caller's included."""
    @property
    def closed(self) -> bool:
        """True once close() was called."""
    def close(self) -> None:
        """Join the threads. Idempotent."""
