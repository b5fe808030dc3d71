"""The values of ``statistics()``: what an LLMDataDist counts about itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "DURATION_BOUNDS",
    "CacheStatistics",
    "CommunicatorStatistics",
    "DurationStatistics",
    "GrantStatistics",
    "KeyStatistics",
    "LinkStatistics",
    "OperationStatistics",
    "PoolStatistics",
    "RedialStatistics",
    "Statistics",
    "SwapStatistics",
    "quantile",
]


DURATION_BOUNDS: Final = tuple((1 << bit) / 1e9 for bit in range(10, 35))
"""Upper bounds of the buckets of durations, in seconds, each included: from 1.024 µs to 17.2 s, by powers of two."""


@dataclass(frozen=True, slots=True)
class DurationStatistics:
    """How long the operations of one kind took that one transport carried out, failed ones included.

    Attributes:
        transport: What moved the bytes; empty for operations inside this process, and for those that ended before a
            transport was asked to move anything.
        count: Operations.
        nbytes: Bytes that they moved.
        seconds: Time that they took together.
        buckets: Operations by duration: ``buckets[i]`` took at most ``DURATION_BOUNDS[i]`` seconds and more than the
            bound before; the last one, without a bound, took longer. Their sum is ``count``.
    """

    transport: str
    count: int
    nbytes: int
    seconds: float
    buckets: tuple[int, ...]

    def quantile(self, share: float) -> float:
        """Return the bound in seconds below which that share of the operations ended; see :func:`quantile`."""
        return quantile(self.buckets, share)


def quantile(buckets: Sequence[int], share: float) -> float:
    """Return the upper bound, in seconds, of the bucket in which that share of the operations is reached.

    At most twice the true value. It is 0.0 without operations, and ``inf`` beyond the last bound.
    """
    needed, seen = share * sum(buckets), 0
    if not needed:
        return 0.0
    for bound, count in zip((*DURATION_BOUNDS, math.inf), buckets, strict=True):
        seen += count
        if seen >= needed:
            return bound
    return math.inf


@dataclass(frozen=True, slots=True)
class OperationStatistics:
    """Totals of one operation (``pull_blocks``, ``copy_cache``, ...) since init.

    Attributes:
        name: The operation.
        count: Operations that ended, failed ones included.
        errors: Those that raised.
        nbytes: Bytes that they moved.
        seconds: Time that they took together.
        failures: ``errors`` by the name of the exception's class.
        transports: Durations and bytes, one entry for each transport. Their sums are the totals.
    """

    name: str
    count: int
    errors: int
    nbytes: int
    seconds: float
    failures: dict[str, int] = field(default_factory=dict)
    transports: tuple[DurationStatistics, ...] = ()

    def quantile(self, share: float) -> float:
        """Return the bound in seconds below which that share of all operations ended; see :func:`quantile`."""
        return quantile(
            [sum(counts) for counts in zip(*(each.buckets for each in self.transports), strict=True)], share
        )


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """One pool at one moment. Sizes in bytes, whole pages."""

    name: str
    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    largest_hole_bytes: int
    live_allocations: int
    page_bytes: int
    peak_used_bytes: int
    quarantined_bytes: int = 0  # part of the used ones: given back, but a foreign writer may still write there


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
    """One bound key: for how long it has been bound, and how many bytes pulls can consume of it (interface R5).

    No pull consumes a blocks key, a prefix key, or a key of a registered cache: their ``unconsumed_bytes`` are 0.
    """

    key: str
    cache_id: int
    row: int
    age_seconds: float
    unconsumed_bytes: int


@dataclass(frozen=True, slots=True)
class GrantStatistics:
    """The grants that this end has given.

    Attributes:
        active: That have not ended.
        claimed: Claims of them that were not released.
        waiting: Claims of grants that this end has not given yet.
        released: Ended, because all readers have released them.
        expired: Ended, because their time was over.
        revoked: Ended by ``Grant.revoke``.
        lost: Ended, because the link to a reader was lost.
    """

    active: int
    claimed: int
    waiting: int
    released: int
    expired: int
    revoked: int
    lost: int


@dataclass(frozen=True, slots=True)
class SwapStatistics:
    """The engine of swap_blocks (interface R10): worker threads, and bytes of staging held on the device."""

    workers: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """One link: who, in which state, over what and why, and what it moved. Also what ``explain()`` returns.

    Attributes:
        transport: What moves what the peer exports: its pools.
        private_transport: What moves the peer's registered memory outside its pools; None: nothing can.
        verified_bytes: Bytes of this end's pulls and pushes whose checksums agreed (``llm.Checksum``).
        sealed: Both ends have authenticated each other, and all that leaves this host is encrypted.
        authenticated_at: When they did so last, in seconds since the epoch, see ``llm.MaxLinkAge``; None where they
            did not.
        progress_seconds: CPU time of UCX's threads for this link, in seconds; 0 unless the transport is nixl.
        peer_incarnation: The peer's :attr:`LLMDataDist.incarnation`.
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
    sealed: bool = False
    authenticated_at: float | None = None
    progress_seconds: float = 0.0
    peer_incarnation: str = ""


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
        pools: Every configured pool.
        caches: Counts and bytes of caches.
        keys: Every bound key with its age.
        pins: Peers' holds on caches.
        unknown_releases: Releases that named no pin (expired, a lost peer's, or not asked for yet).
        quarantined_bytes: Pool bytes that wait for a foreign writer before they are free.
        lost_writers: Peers without a link that have not ended a write into our memory; their process may be stopped.
        grants: Grants that this end has given.
        swap: The engine of swap_blocks.
        links: Every link.
        redials: Links that were lost and are being dialled again.
        communicators: What ``link()`` made and ``unlink()`` has not given up.
        operations: Totals per operation.
        links_lost: Links that ended without being unlinked, by kind of reason: ``connection`` (broken or closed),
            ``process_ended``, ``silent``, ``unauthenticated`` (not authenticated again in time), ``replaced`` (by a
            newer link of the same peer).
        reconnects: Lost links that this end has dialled again with success.
    """

    pools: tuple[PoolStatistics, ...]
    caches: CacheStatistics
    keys: tuple[KeyStatistics, ...]
    pins: int
    unknown_releases: int
    quarantined_bytes: int
    lost_writers: int
    grants: GrantStatistics
    swap: SwapStatistics
    links: tuple[LinkStatistics, ...]
    redials: tuple[RedialStatistics, ...]
    communicators: tuple[CommunicatorStatistics, ...]
    operations: tuple[OperationStatistics, ...]
    links_lost: dict[str, int] = field(default_factory=dict)
    reconnects: int = 0
