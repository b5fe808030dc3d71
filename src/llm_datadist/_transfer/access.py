"""The access rule: which peers may link, which caches they may use, and how.

Handshakes, resolves, data lanes, checksums, grants and questions for addresses all ask here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from llm_datadist._cache.geometry import CacheKind
from llm_datadist._cache.registry import Namespace
from llm_datadist._links.link import Link
from llm_datadist._policy import Permissions
from llm_datadist.config import PEER_POLICY
from llm_datadist.errors import AuthFailed, LinkRefused, ParamError

if TYPE_CHECKING:
    from llm_datadist._cache.registry import Binding, Entry, Key
    from llm_datadist._cache.store import CacheStore
    from llm_datadist._memory.exports import Exports
    from llm_datadist._policy import PeerPolicy

_NOTHING: Final = Permissions()


class AccessPolicy:
    """Decides what a peer may do at this end; a call that does not raise permits. Threads: any; keeps no state.

    A peer may use a cache that is remote accessible, under a pin where one is needed. It may write where this end has
    remote cache access (RCA), or into a cache that it has located by address over the same link.

    ``peers`` (``llm.PeerPolicy``) takes rights away, by the cluster id of the link: without it every peer has them all.
    """

    def __init__(self, store: CacheStore, peers: PeerPolicy | None = None) -> None:
        self._store = store
        self._peers = peers

    def require_link(self, cluster_id: int) -> None:
        """Raise AuthFailed unless a cluster may be linked, whichever end dials."""
        if self._peers is not None and not self._peers.of(cluster_id).link:
            raise AuthFailed(f"cluster {cluster_id} may not link: {PEER_POLICY} of this end")

    def offered_to(self, cluster_id: int) -> Exports:
        """Return what a cluster on this host may map. Raises LinkRefused where requests must be decided one by one.

        A mapping has no bounds inside a pool, and what may be written can be read too.
        """
        exports = self._store.exports
        if self._peers is None:
            return exports
        may = self._peers.of(cluster_id)
        if not may.pull and not may.push:
            return replace(exports, regions={}, writable=False, private=False)
        if isinstance(may.models, frozenset):
            raise LinkRefused(
                f"{PEER_POLICY} allows cluster {cluster_id} some models only: no pool is mapped as a whole"
            )
        if not may.pull:
            raise LinkRefused(f"{PEER_POLICY} allows cluster {cluster_id} to push only: a mapped pool could be read")
        return exports if may.push else replace(exports, writable=False)

    def require_move(self, link: object, *, push: bool) -> None:
        """Raise ParamError unless the peer may pull, or push, at all."""
        if self._peers is not None:
            may = self._of(link)
            if not (may.push if push else may.pull):
                raise _denied(link, "push" if push else "pull")

    def require_push(self, link: object, cache_id: int | None) -> None:
        """Raise ParamError unless the peer may write a cache; ``cache_id`` is None where it named a key."""
        self.require_move(link, push=True)
        located = isinstance(link, Link) and cache_id in link.caches.located
        if not self._store.remote_accessible and not located:
            raise ParamError("push needs remote cache access (llm.EnableRemoteCacheAccessible=1) at both ends")

    def require_locate(self, link: object) -> None:
        """Raise ParamError unless the peer may ask by address."""
        if self._peers is not None and not self._of(link).locate:
            raise _denied(link, "locate")

    def require_key(self, link: object, key: Key) -> None:
        """Raise ParamError unless the peer may name keys of that model."""
        if self._peers is not None:
            models = self._of(link).models
            if isinstance(models, frozenset) and key[2] not in models:
                raise _denied(link, f"use model {key[2]}")

    def may_see(self, link: object, entry: Entry) -> bool:
        """Return True unless the peer is bound to models, and the cache has no key of one."""
        if self._peers is None:
            return True
        models = self._of(link).models
        # Copied first: another thread may bind a key meanwhile.
        return not isinstance(models, frozenset) or any(key[2] in models for key in tuple(entry.bindings))

    def require_sight(self, link: object, entry: Entry) -> None:
        """Raise ParamError unless :meth:`may_see`."""
        if not self.may_see(link, entry):
            raise _denied(link, f"use cache {entry.cache_id}, which has no key of its models")

    def may_consume(self, link: object) -> bool:
        """Return True unless the peer may consume no keys."""
        return self._peers is None or self._of(link).consume

    def require_consumed(self, link: object, cache_id: int) -> None:
        """Raise ParamError or CacheNotFound unless the peer may have pushed to the cache so that a key is consumed."""
        if self._peers is not None:
            self.require_move(link, push=True)
            self.require_sight(link, self._store.registry.lookup(cache_id))
            if not self.may_consume(link):
                raise _denied(link, "consume keys")

    def require_consume(self, link: object, entry: Entry, binding: Binding | None) -> None:
        """Raise ParamError if the transfer would consume the binding, and the peer may not."""
        if self.may_consume(link):
            return
        if binding is not None and entry.owned and binding.key[0] == Namespace.REQUEST:
            raise _denied(link, "consume the key of this row")

    def needs_pin(self, entry: Entry) -> bool:
        """Return True if a peer must pin the cache to use it.

        A complete pull consumes a row's key, after which the memory may be freed. Nothing is consumed of blocks
        caches, nor of registered ones with remote cache access: a peer may keep where these are, protected by guards.
        """
        return entry.geometry.kind is CacheKind.CACHE and (entry.owned or not self._store.remote_accessible)

    def require_use(self, link: object, entry: Entry, pin: int) -> None:
        """Raise ParamError unless the peer may use a cache under ``pin``; 0 stands for none."""
        if not pin:  # the peer got its pin by a resolve, which has asked; the key may be consumed meanwhile
            self.require_sight(link, entry)
        if not entry.remote_accessible:
            raise ParamError(f"cache {entry.cache_id} was registered with remote_accessible=False")
        if not pin and self.needs_pin(entry):
            raise ParamError(f"cache {entry.cache_id} is read under a pin")

    def _of(self, link: object) -> Permissions:
        if self._peers is None or not isinstance(link, Link):
            return _NOTHING
        return self._peers.of(link.peer.cluster_id)


def _denied(link: object, what: str) -> ParamError:
    who = f"cluster {link.peer.cluster_id}" if isinstance(link, Link) else "a stranger"
    return ParamError(f"{PEER_POLICY} of the owner does not allow {who} to {what}")
