"""What an LLMDataDist counts about itself: spans around operations, and the values of ``statistics()``.

No globals: every LLMDataDist has its own :class:`Meters`. A span costs two clock readings and one lock.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llm_datadist.log import logger

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "CacheStatistics",
    "CommunicatorStatistics",
    "KeyStatistics",
    "LinkStatistics",
    "Meters",
    "OperationStatistics",
    "RedialStatistics",
    "Span",
    "Statistics",
    "SwapStatistics",
]


@dataclass(frozen=True, slots=True)
class OperationStatistics:
    """Totals of one operation (``pull_blocks``, ``copy_cache``, ...) since init."""

    name: str
    count: int
    errors: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """The caches with memory behind them."""

    live: int
    deferred: int
    draining: int
    allocated: int
    registered: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class KeyStatistics:
    """One bound key: how long it has waited and how many bytes wait with it (R5)."""

    key: str
    cache_id: int
    row: int
    age_seconds: float
    unconsumed_bytes: int


@dataclass(frozen=True, slots=True)
class SwapStatistics:
    """The engine of swap_blocks (R10): worker threads, and bytes of staging held on the device."""

    workers: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """One link: who, in which state, over what and why, and what it moved. Also what ``explain()`` returns.

    Attributes:
        transport: What moves what the peer exports: its pools.
        private_transport: What moves the peer's registered memory outside its pools; None: nothing can.
        verified_bytes: Bytes of this end's pulls and pushes whose checksums agreed (``llm.Checksum``).
    """

    remote_cluster_id: int
    state: str
    transport: str
    private_transport: str | None
    reason: str
    peer_pid: int
    peer_host: str
    read_bytes: int
    written_bytes: int
    resolved: int
    verified_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RedialStatistics:
    """A link that was lost and is being dialled again: where, how often so far, and why that failed last."""

    remote_cluster_id: int
    address: str
    attempts: int
    reason: str


@dataclass(frozen=True, slots=True)
class CommunicatorStatistics:
    """One ``link()``: how far it has come. Also what ``explain_communicator()`` returns.

    Attributes:
        comm_id: What ``link()`` returned.
        name: The communicator's name.
        status: ``PREPARING``, ``OK`` or ``FAILED``.
        reason: Why it failed; while it is preparing, the last thing that stood in the way.
        members: Cluster ids of all members, this end's own too, in the order of their ranks.
        waiting_for: Cluster ids of the members that have not joined.
    """

    comm_id: int
    name: str
    status: str
    reason: str
    members: tuple[int, ...]
    waiting_for: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Statistics:
    """A consistent-enough picture of one LLMDataDist; every part is taken under its own lock.

    Attributes:
        pools: One :class:`~llm_datadist.memory.pool.PoolStatistics` per configured pool.
        caches: Counts and bytes of caches.
        keys: Every bound key with its age.
        pins: Peers' holds on caches.
        unknown_releases: Releases that named no pin (expired, or a lost peer's).
        quarantined_bytes: Pool bytes that wait for a foreign writer before they are free.
        lost_writers: Peers without a link that have not ended a write into our memory; their process may be stopped.
        swap: The engine of swap_blocks.
        links: Every link.
        redials: Links that were lost and are being dialled again.
        communicators: What ``link()`` made and ``unlink()`` has not given up.
        operations: Totals per operation.
    """

    pools: tuple[Any, ...]
    caches: CacheStatistics
    keys: tuple[KeyStatistics, ...]
    pins: int
    unknown_releases: int
    quarantined_bytes: int
    lost_writers: int
    swap: SwapStatistics
    links: tuple[LinkStatistics, ...]
    redials: tuple[RedialStatistics, ...]
    communicators: tuple[CommunicatorStatistics, ...]
    operations: tuple[OperationStatistics, ...]


class _Total:
    __slots__ = ("count", "errors", "nbytes", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.errors = 0
        self.nbytes = 0
        self.seconds = 0.0


class Meters:
    """Totals per operation. Any thread; one lock, held for the additions only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, _Total] = {}

    def span(self, name: str, detail: str = "", *args: object) -> Span:
        """Return a context manager that times, counts and logs one operation.

        ``detail`` is a lazy ``%``-format of ``args`` for the log; set ``span.nbytes`` to what moved.
        """
        return Span(self, name, detail, args)

    def add(self, name: str, nbytes: int, seconds: float, *, failed: bool) -> None:
        """Add one finished operation."""
        with self._lock:
            total = self._totals.get(name)
            if total is None:
                total = self._totals[name] = _Total()
            total.count += 1
            total.errors += failed
            total.nbytes += nbytes
            total.seconds += seconds

    def totals(self) -> tuple[OperationStatistics, ...]:
        """Return the totals so far, by name."""
        with self._lock:
            return tuple(
                OperationStatistics(name, t.count, t.errors, t.nbytes, t.seconds)
                for name, t in sorted(self._totals.items())
            )


class Span:
    """One operation while it runs. Used by one thread."""

    __slots__ = ("_args", "_detail", "_meters", "_start", "_told", "name", "nbytes")

    def __init__(self, meters: Meters, name: str, detail: str, args: tuple[object, ...]) -> None:
        self._meters = meters
        self._detail = detail
        self._args = args
        self.name = name
        self.nbytes = 0

    def __enter__(self) -> Span:
        self._told = logger.isEnabledFor(logging.INFO)
        if self._told:
            logger.info("%s started " + self._detail, self.name, *self._args, stacklevel=3)
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._start
        self._meters.add(self.name, self.nbytes, seconds, failed=kind is not None)
        if error is not None:
            logger.info("%s failed " + self._detail + ": %s", self.name, *self._args, error, stacklevel=3)
        elif self._told:
            text = "%s succeeded " + self._detail + " (%d bytes, %.6f s)"
            logger.info(text, self.name, *self._args, self.nbytes, seconds, stacklevel=3)
