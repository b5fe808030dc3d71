"""Values of ``statistics()``, ``explain()`` and ``explain_communicator()``. An extension."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "DURATION_BOUNDS",
    "CacheStatistics",
    "CommunicatorStatistics",
    "DeviceStatistics",
    "DurationStatistics",
    "GrantStatistics",
    "KeyStatistics",
    "LinkStatistics",
    "OperationStatistics",
    "RedialStatistics",
    "Statistics",
    "SwapStatistics",
    "quantile",
]

DURATION_BOUNDS: Final = tuple((1 << bit) / 1e9 for bit in range(10, 35))
"""Inclusive upper bounds of the duration buckets, in seconds: powers of two from 1.024 µs to 17.2 s."""


@dataclass(frozen=True, slots=True)
class DurationStatistics:
    """Durations of one operation over one transport, failed ones included.

    Attributes:
        transport: Transport that moved the bytes; empty inside this process, and if none was chosen.
        buckets: ``buckets[i]`` operations took at most ``DURATION_BOUNDS[i]`` seconds, but more than the bound before.
            The last bucket has no bound.
    """

    transport: str
    count: int
    nbytes: int
    seconds: float
    buckets: tuple[int, ...]

    def quantile(self, share: float) -> float:
        """Return an upper bound, in seconds, of a quantile."""
        return quantile(self.buckets, share)


def quantile(buckets: Sequence[int], share: float) -> float:
    """Return the upper bound, in seconds, of the bucket that contains a quantile.

    Above 1.024 µs at most twice the true value. Without operations 0.0; ``inf`` beyond the last bound.
    """
    needed = share * sum(buckets)
    below = sum(seen < needed for seen in accumulate(buckets))
    return (*DURATION_BOUNDS, math.inf, math.inf)[below] if needed else 0.0


@dataclass(frozen=True, slots=True)
class OperationStatistics:
    """Totals of one operation (``pull_blocks``, ``copy_cache``, ...) since ``init``.

    Attributes:
        count: Operations that ended, failed ones included.
        seconds: Sum of the durations.
        failures: ``errors``, the operations that raised, by exception class name.
        transports: The same by transport.
    """

    name: str
    count: int
    errors: int
    nbytes: int
    seconds: float
    failures: dict[str, int] = field(default_factory=dict)
    transports: tuple[DurationStatistics, ...] = ()

    def quantile(self, share: float) -> float:
        """Return an upper bound, in seconds, of a quantile over all transports."""
        together = [sum(counts) for counts in zip(*(each.buckets for each in self.transports), strict=True)]
        return quantile(together, share)


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Figures of a pool at one moment. Sizes are whole pages."""

    name: str
    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    largest_hole_bytes: int
    live_allocations: int
    page_bytes: int
    peak_used_bytes: int
    quarantined_bytes: int = 0  # part of used_bytes: freed, but perhaps still written by a foreign writer
    device: str = "host"  # where it lies; a GPU as "cuda:0 (its name)"


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """A GPU, in this process: figures of all its instances together."""

    name: str
    window_bytes: int  # through windows of host memory, as over data lanes; what a peer maps needs none
    wait_seconds: float  # that data lanes have waited for it, each by itself; also for copies that never ended


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Caches with memory, by state and owner; ``nbytes`` is their bytes."""

    live: int
    deferred: int
    draining: int
    allocated: int
    registered: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class KeyStatistics:
    """A bound key: seconds since its binding, and bytes not consumed (interface R5).

    ``unconsumed_bytes`` is 0 for blocks keys, prefix keys and keys of registered caches: no pull consumes them.
    """

    key: str
    cache_id: int
    row: int
    age_seconds: float
    unconsumed_bytes: int


@dataclass(frozen=True, slots=True)
class GrantStatistics:
    """Grants of this instance.

    Attributes:
        active, claimed: Grants that have not ended, and their claims that were not released.
        waiting: Claims of grants that do not exist yet.
        released, expired, revoked, lost: Grants ended by all readers, by lifetime, by ``Grant.revoke``, with a link.
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
    """Worker threads of ``swap_blocks``, and bytes of its staging buffers: 0 (interface R10)."""

    workers: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """One link, as ``explain()`` returns it.

    Attributes:
        transport: Transport for the peer's pools.
        private_transport: Transport for the peer's non-pool memory; None if no transport reaches it.
        resolved: Cached resolutions.
        verified_bytes: Bytes of this side's pulls and pushes whose checksums agreed (``llm.Checksum``).
        sealed: Both sides are authenticated; all bytes that leave this host are encrypted, except KV bytes over nixl
            (``llm.NixlPlaintext``).
        authenticated_at: Last authentication, seconds since the epoch (``llm.MaxLinkAge``), or None.
        progress_seconds: CPU seconds of UCX's threads for this link; 0 unless the transport is nixl.
        peer_incarnation: The peer's :attr:`LLMDataDist.incarnation`.
        protocol: Version of the wire that both sides speak.
        dialled: Address that this side dialled, "ip:port" or "[ipv6]:port"; "a communicator's" for a member of
            ``link()``; empty if the peer dialled.
        peer_release, peer_role: As the peer said when it was linked; empty if it is older.
        served_bytes, received_bytes: Bytes that the peer has read here and written here. This side counts those of tcp;
            the peer reports all others, at most a heartbeat late. None if an older peer does not.
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
    protocol: int = 0
    dialled: str = ""
    peer_release: str = ""
    peer_role: str = ""
    served_bytes: int | None = None
    received_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RedialStatistics:
    """A lost link that is dialled again; ``reason`` is the last failure.

    ``refused`` is True if nothing listens at the address: the peer's process has ended, unless a firewall answers.
    """

    remote_cluster_id: int
    address: str
    attempts: int
    reason: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class CommunicatorStatistics:
    """One communicator, as ``explain_communicator()`` returns it.

    Attributes:
        status: ``PREPARING``, ``OK`` or ``FAILED``.
        reason: Cause of the failure; while preparing, the last obstacle.
        members: Cluster ids of all members, by rank.
        waiting_for: Cluster ids of the missing members.
    """

    comm_id: int
    name: str
    status: str
    reason: str
    members: tuple[int, ...]
    waiting_for: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leftover:
    """What ``drain()`` has left, for ``finalize`` to cut; false if there is nothing.

    Attributes:
        keys: Keys of allocated rows that nothing has consumed, as text; with remote cache access no pull consumes one.
        grants: Active grants; their readers may still pull.
        tasks: Layer-wise transfers that run.
        links: Peers that have not agreed to unlink, because they transfer or do not answer.
    """

    keys: tuple[str, ...]
    grants: int
    tasks: int
    links: tuple[int, ...]

    @property
    def promised(self) -> bool:
        """True if something is left beside links."""
        return bool(self.keys or self.grants or self.tasks)

    def __bool__(self) -> bool:
        return self.promised or bool(self.links)


@dataclass(frozen=True, slots=True)
class Statistics:
    """State of one LLMDataDist; its parts are read one after the other.

    Attributes:
        pins: Pins of peers on caches.
        unknown_releases: Releases without a pin: it expired, its peer was lost, or the release came first.
        quarantined_bytes: Freed pool bytes that a foreign writer still uses.
        lost_writers: Peers without a link that have not ended a write into this memory; they may be stopped.
        links_lost: Links that ended without unlinking, by cause: ``connection`` (broken or closed), ``process_ended``,
            ``silent``, ``unauthenticated`` (renewal failed or late), ``replaced`` (by a newer link of the same cluster
            id).
        reconnects: Lost links that this instance has dialled back.
        devices: The GPU of caches with ``Placement.DEVICE``, if that is one.
        tables: Entries of bounded tables that fill for hours, which is no leak: ``ended_grants``, ``peer_secrets``.
        release, role: Of this instance.
        protocol: Newest version of the wire that this release speaks.
        transport: Asked for by ``llm.Transport``; empty if the link chooses.
        lost_peers: Cluster id and kind of loss of each lost peer, until it is linked again or unlinked here.
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
    devices: tuple[DeviceStatistics, ...] = ()
    tables: dict[str, int] = field(default_factory=dict, compare=False)  # history, no state
    release: str = ""
    role: str = ""
    protocol: int = 0
    transport: str = ""
    lost_peers: tuple[tuple[int, str], ...] = ()
