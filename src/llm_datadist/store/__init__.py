"""Prefix store: one process per host keeps KV blocks of all engines there, under their complete identity.

An extension; docs/store.md describes it. :class:`StoreServer` is the store, :class:`StoreClient` an engine's use of it.
"""

from __future__ import annotations

from llm_datadist.store.client import STORE_ID, StoreClient, StoreOptions
from llm_datadist.store.hit import Hit
from llm_datadist.store.identity import namespace
from llm_datadist.store.messages import NO_EVENTS, BlockShape, Event, Events
from llm_datadist.store.server import StoreServer
from llm_datadist.store.statistics import NamespaceStatistics, StoreClientStatistics, StoreStatistics

__all__ = [
    "NO_EVENTS",
    "STORE_ID",
    "BlockShape",
    "Event",
    "Events",
    "Hit",
    "NamespaceStatistics",
    "StoreClient",
    "StoreClientStatistics",
    "StoreOptions",
    "StoreServer",
    "StoreStatistics",
    "namespace",
]
