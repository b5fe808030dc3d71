"""The census of the registry: what statistics() says of caches, keys and pins."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from llm_datadist.cache.lifecycle import State
from llm_datadist.metrics import CacheStatistics, KeyStatistics

if TYPE_CHECKING:
    from llm_datadist.cache.registry import Registry

__all__ = ["census"]


def census(registry: Registry) -> tuple[CacheStatistics, tuple[KeyStatistics, ...], int]:
    """Return (caches, keys, pins) at this moment."""
    entries, bindings, pins = registry.snapshot()
    states = [entry.life.state for entry in entries]
    caches = CacheStatistics(
        live=states.count(State.LIVE),
        deferred=states.count(State.DEFERRED),
        draining=states.count(State.DRAINING),
        allocated=sum(entry.owned for entry in entries),
        registered=sum(not entry.owned for entry in entries),
        nbytes=sum(entry.geometry.num_tensors * entry.geometry.tensor_bytes for entry in entries),
    )
    now = time.monotonic()
    keys = tuple(
        KeyStatistics(
            key=repr(binding.key),
            cache_id=binding.entry.cache_id,
            row=binding.row,
            age_seconds=now - binding.since,
            unconsumed_bytes=binding.remaining.bit_count() * binding.entry.geometry.stride,
        )
        for binding in bindings
    )
    return caches, keys, pins
