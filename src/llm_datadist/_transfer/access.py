"""Permissions of peers: handshakes, resolves, move requests, reports, checksums, claims, look-ups, questions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from llm_datadist._cache.geometry import CacheKind
from llm_datadist._links.link import Link
from llm_datadist._links.versions import GRANTED_ONLY
from llm_datadist._policy import Permissions
from llm_datadist.config import GRANTED_READS, PEER_POLICY
from llm_datadist.errors import AuthFailed, CacheNotFound, LinkRefused, ParamError
from llm_datadist.types.question import RIGHTS, Asker

if TYPE_CHECKING:
    from llm_datadist._cache.local_caches import LocalCaches
    from llm_datadist._cache.registry import Binding, Entry, Key
    from llm_datadist._links.messages import Guarded
    from llm_datadist._memory.exports import Exports
    from llm_datadist._native import LentBlocks, Plan
    from llm_datadist._policy import PeerPolicy

_NOTHING: Final = Permissions()
_ALL: Final = Permissions(link=True, pull=True, push=True, locate=True, consume=True, ask=True)


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Permissions of peers at this instance. Threads: any; stateless.

    ``require_*`` raises ParamError unless the peer is permitted; a method that raises another error names it.

    A peer may use remote-accessible caches, under a pin if :meth:`needs_pin`. It may write with remote cache access
    (RCA), or into a cache located over its link. ``_peers`` (``llm.PeerPolicy``) takes rights away, by cluster id.
    """

    _caches: LocalCaches
    _peers: PeerPolicy | None = None

    def require_link(self, cluster_id: int) -> None:
        """Raise AuthFailed unless the cluster may link, as dialer or listener."""
        if not self._of(cluster_id).link:
            raise AuthFailed(f"cluster {cluster_id} may not link: {PEER_POLICY} of this instance")

    def offered_to(self, cluster_id: int) -> Exports | LinkRefused:
        """Return the exports that a cluster on this host may map, or the reason for none.

        There are none if each request needs a decision, because a mapping shows whole pools and writable memory is
        readable.
        """
        exports, may = self._caches.exports, self._of(cluster_id)
        if not may.pull and not may.push:
            return replace(exports, regions={}, writable=False, private=False)
        if isinstance(may.models, frozenset):
            return LinkRefused(
                f"{PEER_POLICY} allows cluster {cluster_id} some models only: no pool is mapped as a whole"
            )
        if not may.pull:
            return LinkRefused(f"{PEER_POLICY} allows cluster {cluster_id} to push only: a mapped pool could be read")
        return exports if may.push else replace(exports, writable=False)

    def require(self, link: object, right: str) -> None:
        """Require ``pull``, ``push``, ``locate`` or ``ask``."""
        if not getattr(self._may(link), right):
            raise _denied(link, right)

    def require_push(self, link: object, cache_id: int | None) -> None:
        """Require the right to write a cache; ``cache_id`` is None for a key."""
        self.require(link, "push")
        located = isinstance(link, Link) and cache_id in link.caches.located
        if not self._caches.remote_accessible and not located:
            raise ParamError("push needs remote cache access (llm.EnableRemoteCacheAccessible=1) on both sides")

    def asker(self, link: Link) -> Asker:
        """Return who asks a question over a link."""
        peer, may = link.peer, self._may(link)
        rights = frozenset(right for right in RIGHTS if getattr(may, right))
        return Asker(peer.cluster_id, peer.incarnation.hex(), link.origin.behind, may.tenant, rights)

    def require_lent(self, link: object, entry: Entry, *, push: bool) -> None:
        """If a cache is read under grants only, refuse a push, and a peer that does not know such caches."""
        old = isinstance(link, Link) and GRANTED_ONLY not in link.spoken.features
        if entry.storage.lent is not None and (push or old):
            why = "grants permit no push" if push else "the reader's release does not know that; update it"
            raise ParamError(f"{granted_only(entry.cache_id)}; {why}")

    def require_grant(self, entry: Entry, guards: list[Guarded], plan: Plan) -> LentBlocks | None:
        """If a cache is read under grants only, require one for what the plan reads; return its blocks.

        Raises CacheNotFound if a guard has advanced, as by the end of a grant; else ParamError.
        """
        if (granted := entry.storage.lent) is None:
            return None
        found = (granted.get((each.slot, each.generation)) for each in guards)
        lent: LentBlocks | None = next(filter(None, found), None)
        if lent is None and any(self._caches.exports.guards.load(each.slot) != each.generation for each in guards):
            raise CacheNotFound(f"cache {entry.cache_id}, or the grant, has changed since it was resolved")
        if lent is None or not lent.hold(plan):
            raise ParamError(f"{granted_only(entry.cache_id)}; the request is outside of every grant that it names")
        return lent

    def require_key(self, link: object, key: Key) -> None:
        models = self._may(link).models
        if isinstance(models, frozenset) and key[2] not in models:
            raise _denied(link, f"use model {key[2]}")

    def limits_models(self, link: object) -> bool:
        """Return True if the peer may use caches of some models only."""
        return isinstance(self._may(link).models, frozenset)

    def may_see(self, link: object, entry: Entry) -> bool:
        """Return False if the peer is limited to models without a key in the cache."""
        models = self._may(link).models
        # A copy as in Entry.binding_of_row.
        return not isinstance(models, frozenset) or any(key[2] in models for key in list(entry.bindings))

    def require_sight(self, link: object, entry: Entry) -> None:
        if not self.may_see(link, entry):
            raise _denied(link, f"use cache {entry.cache_id}, which has no key of its models")

    def may_consume(self, link: object) -> bool:
        return self._may(link).consume

    def require_consumed(self, link: object, cache_id: int) -> None:
        """Require the right to report a push that consumes a key. Also raises CacheNotFound."""
        if self._peers is not None:
            self.require(link, "push")
            self.require_sight(link, self._caches.registry.lookup(cache_id))
            if not self.may_consume(link):
                raise _denied(link, "consume keys")

    def require_consume(self, link: object, binding: Binding | None) -> None:
        """Require the right to consume, if the transfer would consume the binding."""
        if binding is not None and binding.consumable and not self.may_consume(link):
            raise _denied(link, "consume the key of this row")

    def needs_pin(self, entry: Entry) -> bool:
        """Return True if a peer must pin the cache before it uses the cache.

        The pin keeps the memory, because a complete pull of a row may consume the row's key and free the memory. Blocks
        caches need no pin, nor do registered caches with RCA: no key of theirs is consumed, so guards suffice.
        """
        return entry.geometry.kind is CacheKind.CACHE and (entry.owned or not self._caches.remote_accessible)

    def require_use(self, link: object, entry: Entry, pin: int) -> None:
        """Require the right to use a cache under ``pin`` (0: none)."""
        if not pin:  # a pin was checked when made, and the key may be consumed since
            self.require_sight(link, entry)
        if not entry.remote_accessible:
            raise ParamError(f"cache {entry.cache_id} was registered with remote_accessible=False")
        if not pin and self.needs_pin(entry):
            raise ParamError(f"cache {entry.cache_id} is read under a pin")

    def _may(self, link: object) -> Permissions:
        return _ALL if self._peers is None else self._of(_cluster(link))

    def _of(self, cluster_id: int | None) -> Permissions:
        if self._peers is None:
            return _ALL
        return _NOTHING if cluster_id is None else self._peers.of(cluster_id)


def granted_only(cache_id: int) -> str:
    return f"cache {cache_id} is read under grants only (granted_only=True or {GRANTED_READS}=1 of its owner)"


def _cluster(link: object) -> int | None:
    """Return the peer's cluster id; None for an unverified connection."""
    return link.peer.cluster_id if isinstance(link, Link) else None


def _denied(link: object, what: str) -> ParamError:
    cluster_id = _cluster(link)
    who = "an unverified connection" if cluster_id is None else f"cluster {cluster_id}"
    return ParamError(f"{PEER_POLICY} of the owner does not allow {who} to {what}")
