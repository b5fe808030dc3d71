"""Values of ``StoreServer.statistics()``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NamespaceStatistics:
    """Figures of one namespace.

    Attributes:
        tenant: Tenant of its clients by the store's ``llm.PeerPolicy``, or empty.
        namespace: Its digest, as logs and metrics show it.
        slots, free, filling, published: Slots, and those in these states.
        loads: Hits that were not released.
        events, logged: Number of the last event; keys that are kept of events, with one more for each event.
        block_bytes: Bytes of a slot.
        lookups, asked, found: Lookups, their keys, and the keys found.
        refused: Lookups refused because their reader held as many hits as it may.
        stored, removed: Keys stored; keys evicted or found wrong.
        failed: Pulls that failed.
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
