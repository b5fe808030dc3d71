"""The access rule: which caches a peer may use, and how. Resolves, data lanes and checksums all ask here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist._cache.geometry import CacheKind
from llm_datadist._links.link import Link
from llm_datadist.errors import ParamError

if TYPE_CHECKING:
    from llm_datadist._cache.registry import Entry
    from llm_datadist._cache.store import CacheStore


class AccessPolicy:
    """Decides what a peer may do with a cache; a call that does not raise permits. Threads: any; keeps no state.

    A peer may use a cache that is remote accessible, under a pin where one is needed. It may write where this end has
    remote cache access (RCA), or into a cache that it has located by address over the same link.
    """

    def __init__(self, store: CacheStore) -> None:
        self._store = store

    def require_push(self, link: object, cache_id: int | None) -> None:
        """Raise ParamError unless the peer may write a cache; ``cache_id`` is None where it named a key."""
        located = isinstance(link, Link) and cache_id in link.caches.located
        if not self._store.remote_accessible and not located:
            raise ParamError("push needs remote cache access (llm.EnableRemoteCacheAccessible=1) at both ends")

    def needs_pin(self, entry: Entry) -> bool:
        """Return True if a peer must pin the cache to use it.

        A complete pull consumes a row's key, after which the memory may be freed. Nothing is consumed of blocks
        caches, nor of registered ones with remote cache access: a peer may keep where these are, protected by guards.
        """
        return entry.geometry.kind is CacheKind.CACHE and (entry.owned or not self._store.remote_accessible)

    def require_use(self, entry: Entry, pin: int) -> None:
        """Raise ParamError unless the peer may use a cache under ``pin``; 0 stands for none."""
        if not entry.remote_accessible:
            raise ParamError(f"cache {entry.cache_id} was registered with remote_accessible=False")
        if not pin and self.needs_pin(entry):
            raise ParamError(f"cache {entry.cache_id} is read under a pin")
