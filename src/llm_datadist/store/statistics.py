"""Values of ``StoreServer.statistics()`` and ``StoreClient.statistics()``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NamespaceStatistics:
    """Figures of one namespace.

    Attributes:
        tenant: Tenant of its clients by the store's ``llm.PeerPolicy``, or empty.
        namespace: Its digest, as logs and metrics show it.
        label: ``StoreOptions.label`` of its first save.
        rank: Its tensor-parallel rank in its engine, and their number: ``0/2``.
        slots, free, filling, published: Slots, and those in these states.
        loads: Hits that were not released.
        events, logged: Number of the last event; keys that are kept of events, with one more for each event.
        block_bytes: Bytes of a slot.
        lookups, asked, found: Lookups, their keys, and the keys found.
        refused: Lookups refused because their reader held as many hits as it may.
        stored, removed: Keys stored; keys evicted, found wrong or cleared.
        failed: Pulls that failed.
        cleared: Times that it was emptied by :meth:`StoreClient.clear`.
    """

    tenant: str
    namespace: str
    slots: int
    free: int
    filling: int
    published: int
    loads: int
    events: int
    logged: int
    block_bytes: int
    lookups: int = 0
    asked: int = 0
    found: int = 0
    refused: int = 0
    stored: int = 0
    removed: int = 0
    failed: int = 0
    cleared: int = 0
    rank: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Figures of a store at one moment.

    Attributes:
        namespaces: One for each.
        most_namespaces: Namespaces that have room.
        cleared: Namespaces displaced.
        waiting: Saves that wait for a thread.
    """

    namespaces: tuple[NamespaceStatistics, ...]
    most_namespaces: int
    cleared: int
    waiting: int


@dataclass(frozen=True, slots=True)
class StoreClientStatistics:
    """Figures of a client since it was made.

    A ``late`` store did not answer in time, a ``busy`` one refused for now. A ``gone`` one was not linked, or refused.
    After such a failure calls are skipped for a while; they count as it did.

    Attributes:
        lookups, hits: Lookups, and those that found a key.
        misses: The others, by reason: ``absent``, ``late``, ``gone``, ``busy``.
        keys, stored: Keys of saves, and those newly stored. The store had those that neither count as refused.
        refused: Keys not stored, by reason: ``busy`` (or full), ``gone``, ``late``, ``failed`` (the store could not
            pull), ``cleared``.
    """

    lookups: int
    hits: int
    misses: dict[str, int]
    keys: int
    stored: int
    refused: dict[str, int]
