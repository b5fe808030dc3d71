"""Raw addresses of a peer (``TransferConfig.dst_addrs``): look-up, and the right to write there.

``Locate`` asks for the cache, tensor and offset of each address. Pushes then name cache ids, as all others.

Without remote cache access (RCA) a target allows pushes only into caches located for this link. An ``init`` never
reuses ids, so that right ends with the cache or the link. Pools stay sealed against peers' writes: such a push gets
absolute addresses, or none if the owner moves the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist._cache.registry import CacheState, Entry
from llm_datadist._links.messages import MAX_LOCATE, Locate, Located, RemoteFailure, failed
from llm_datadist._log import logger
from llm_datadist.errors import LLMException, LLMStatusCode, ParamError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from llm_datadist._cache.store import CacheStore
    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link
    from llm_datadist._links.manager import LinkManager
    from llm_datadist._transfer.access import AccessPolicy

#: Located ids of a link above which freed ones are dropped.
_MANY_IDS: Final = 1024


@dataclass(frozen=True, slots=True)
class RemoteOffset:
    """Place of a peer's address: ``offset`` bytes into a tensor of a cache."""

    cache_id: int
    tensor: int
    offset: int


@dataclass(frozen=True, slots=True)
class Locations:
    """Places of addresses; ``allocated`` if one is in an allocated cache, whose memory may be reused."""

    offsets: list[RemoteOffset]
    allocated: bool


class Locator:
    """Initiator of address look-ups. Threads: any."""

    def __init__(self, links: LinkManager) -> None:
        self._links = links

    def locate(
        self, cluster_id: int, addresses: Sequence[int], nbytes: int, deadline: Deadline, what: str
    ) -> Locations:
        """Return the places of ``addresses``; ParamError unless ``nbytes`` at each lie in one writable tensor."""
        link = self._links.get(cluster_id)
        found, allocated = [], False
        with link:
            for start in range(0, len(addresses), MAX_LOCATE):
                part = addresses[start : start + MAX_LOCATE]
                answer = _ask(link, part, nbytes, deadline, what)
                found += offsets_in(answer, len(part), f"{what}: {link.peer}")
                allocated |= answer.allocated
        return Locations(found, allocated)


def _ask(link: Link, addresses: Sequence[int], nbytes: int, deadline: Deadline, what: str) -> Located:
    named, asking = np.array(addresses, dtype="<u8").tobytes(), f"{what}: locating {len(addresses)} addresses"
    try:
        answer = link.request(lambda number: Locate(number, named, nbytes), deadline, asking, "locate")
    except RemoteFailure as failure:
        raise failure.typed(what) from failure
    if not isinstance(answer, Located):
        raise ProtocolError(f"{what}: {link.peer} answered a Locate with {type(answer).__name__}")
    return answer


def offsets_in(answer: Located, count: int, who: str) -> list[RemoteOffset]:
    """Decode an answer about ``count`` addresses; ProtocolError. The push checks the offsets."""
    if not count * 8 == len(answer.cache_ids) == len(answer.offsets) == 2 * len(answer.tensors):
        raise ProtocolError(f"{who} located {len(answer.tensors) // 4} of {count} addresses")
    columns = ((answer.cache_ids, "<u8"), (answer.tensors, "<u4"), (answer.offsets, "<u8"))
    return [RemoteOffset(*row) for row in zip(*(np.frombuffer(*each).tolist() for each in columns), strict=True)]


class LocateTarget:
    """Target of address look-ups, which let the peer write there. Threads: control."""

    def __init__(self, store: CacheStore, policy: AccessPolicy, *, allowed: bool) -> None:
        self._store = store
        self._policy = policy
        self._allowed = allowed
        self._warned = store.remote_accessible  # peers may write anyway

    def on_locate(self, link: Link, message: Locate) -> None:
        try:
            if not self._allowed:
                raise LLMException(
                    "locate: llm.WriteByAddress=0 of the owner: name memory by caches and keys",
                    status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                )
            self._policy.require_locate(link)
            located = _located(self._store, self._policy, link, message)
        except LLMException as error:
            link.tell(failed(message.id, error))
        else:
            self._warn(link, located)
            link.tell(located)

    def _warn(self, link: Link, answer: Located) -> None:
        if self._warned:
            return
        self._warned = True
        caches = sorted(set(np.frombuffer(answer.cache_ids, "<u8").tolist()))
        logger.warning(
            "%s has named memory of this process by its addresses: cache %s can be written by it although "
            "llm.EnableRemoteCacheAccessible is 0, and so can every remote-accessible cache of which a peer knows or "
            "guesses an address; llm.WriteByAddress=0 refuses that",
            link.peer,
            ", ".join(map(str, caches[:8])),
        )


def _located(store: CacheStore, policy: AccessPolicy, link: Link, message: Locate) -> Located:
    if len(message.addresses) % 8 or message.nbytes < 1:
        raise ParamError(f"locate: {len(message.addresses)} bytes of addresses, {message.nbytes} bytes from each")
    addresses = np.frombuffer(message.addresses, "<u8").astype(np.uint64)
    entries, _, _ = store.registry.snapshot()
    live = [each for each in entries if each.life.state in (CacheState.LIVE, CacheState.DEFERRED) and not each.closing]
    live = [each for each in live if policy.may_see(link, each)]  # errors do not reveal the others
    index = _AddressIndex(live, message.nbytes)
    found = index.find(addresses)
    cache_ids = index.cache_ids[found]
    if len(link.caches.located) > _MANY_IDS:
        link.caches.located &= {entry.cache_id for entry in live}
    link.caches.located |= set(cache_ids.tolist())
    return Located(
        message.id,
        cache_ids.astype("<u8").tobytes(),
        index.tensors[found].astype("<u4").tobytes(),
        (addresses - index.bases[found]).astype("<u8").tobytes(),
        bool(index.owned[found].any()),
    )


class _AddressIndex:
    """Tensors with room for ``nbytes``, sorted by address; one row of each array per tensor."""

    def __init__(self, entries: Sequence[Entry], nbytes: int) -> None:
        self._nbytes = nbytes
        self._entries = entries
        large = [each for each in entries if each.remote_accessible and each.geometry.tensor_bytes >= nbytes]
        counts = [each.geometry.num_tensors for each in large]
        nothing = [np.empty(0, np.uint64)]
        bases = np.concatenate([each.storage.tensors.bases for each in large] or nothing)
        order = np.argsort(bases, kind="stable")
        self.bases = bases[order]
        self.tensors = np.concatenate([np.arange(count) for count in counts] or nothing)[order]
        self.cache_ids = np.repeat(np.array([each.cache_id for each in large], np.uint64), counts)[order]
        self.owned = np.repeat(np.array([each.owned for each in large], np.bool_), counts)[order]
        room = np.array([each.geometry.tensor_bytes - nbytes for each in large], np.uint64)
        self._rooms = np.repeat(room, counts)[order]

    def find(self, addresses: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the row of each address; ParamError unless its range is in a tensor."""
        # The last tensor that begins at or before an address holds it, unless caches overlap.
        found = np.searchsorted(self.bases, addresses, side="right") - 1
        if len(self.bases):
            rows = np.maximum(found, 0)
            # Unsigned, so an address before the base differs by more than any room.
            missing = (found < 0) | (addresses - self.bases[rows] > self._rooms[rows])
        else:
            missing = np.ones(len(addresses), np.bool_)
        for i in np.flatnonzero(missing):
            rows = np.flatnonzero(addresses[i] - self.bases <= self._rooms)
            if not len(rows):
                raise self._error(int(addresses[i]))
            found[i] = rows[-1]
        return found

    def _error(self, address: int) -> ParamError:
        what = f"address {address:#x} (dst_addrs): {self._nbytes} bytes from there on"
        for entry in self._entries:
            into = np.uint64(address) - entry.storage.tensors.bases
            inside = np.flatnonzero(into < np.uint64(entry.geometry.tensor_bytes))
            if len(inside) and not entry.remote_accessible:
                return ParamError(f"{what} begin in cache {entry.cache_id}, which has remote_accessible=False")
            if len(inside):
                left = entry.geometry.tensor_bytes - int(into[inside[0]])
                return ParamError(f"{what} leave tensor {inside[0]} of cache {entry.cache_id}, which has {left} left")
        return ParamError(f"{what} are in none of the {len(self._entries)} caches allocated or registered at the peer")
