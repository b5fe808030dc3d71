"""Raw addresses of a peer (``TransferConfig.dst_addrs``): look-up, and the right to write there.

``Locate`` asks for the cache, tensor and offset of each address. Pushes then name cache ids, as all others.

Without remote cache access (RCA) a target allows pushes only into caches located for this link. An ``init`` never
reuses ids, so that right ends with the cache or the link. Pools stay sealed against peers' writes: such a push gets
absolute addresses, or none if the owner moves the bytes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from llm_datadist._cache.registry import CacheState, Entry
from llm_datadist._checks import check_enabled
from llm_datadist._links.messages import MAX_LOCATE, Locate, Located, RemoteFailure, failed
from llm_datadist._log import calls_logger as logger
from llm_datadist.errors import LLMException, ParamError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from llm_datadist._cache.local_caches import LocalCaches
    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link
    from llm_datadist._links.manager import LinkManager
    from llm_datadist._transfer.access import AccessPolicy

_WITH_TENSORS: Final = CacheState.LIVE, CacheState.DEFERRED
_MANY_IDS: Final = 1024  # located ids of a link, above which freed ones are dropped


class RemoteOffset(NamedTuple):
    """Place of a peer's address: ``offset`` bytes into a tensor of a cache."""

    cache_id: int
    tensor: int
    offset: int


class Locations(NamedTuple):
    """Places of addresses; ``allocated`` if one is in an allocated cache, whose memory may be reused."""

    offsets: list[RemoteOffset]
    allocated: bool


def locate(
    links: LinkManager, cluster_id: int, addresses: Sequence[int], nbytes: int, deadline: Deadline, what: str
) -> Locations:
    """Return the places of ``addresses``; ParamError unless ``nbytes`` at each lie in one writable tensor."""
    found, allocated = [], False
    with links.operation(cluster_id) as link:
        for start in range(0, len(addresses), MAX_LOCATE):
            part = np.array(addresses[start : start + MAX_LOCATE], "<u8")
            asking = f"{what}: locating {len(part)} addresses"
            try:
                build = partial(Locate, addresses=part.tobytes(), nbytes=nbytes)
                answer = link.request(build, deadline, asking, "locate")
            except RemoteFailure as failure:
                raise failure.typed(what) from failure
            if not isinstance(answer, Located):
                raise ProtocolError(f"{what}: {link.peer} answered a Locate with {type(answer).__name__}")
            found += offsets_in(answer, len(part), f"{what}: {link.peer}")
            allocated |= answer.allocated
    return Locations(found, allocated)


def offsets_in(answer: Located, count: int, who: str) -> list[RemoteOffset]:
    """Decode an answer about ``count`` addresses; ProtocolError. The push checks the offsets."""
    if not count * 8 == len(answer.cache_ids) == len(answer.offsets) == 2 * len(answer.tensors):
        raise ProtocolError(f"{who} located {len(answer.tensors) // 4} of {count} addresses")
    columns = ((answer.cache_ids, "<u8"), (answer.tensors, "<u4"), (answer.offsets, "<u8"))
    return [RemoteOffset(*row) for row in zip(*(np.frombuffer(*each).tolist() for each in columns), strict=True)]


class LocateTarget:
    """Target of address look-ups, which let the peer write there. Threads: control."""

    def __init__(self, caches: LocalCaches, policy: AccessPolicy, *, allowed: bool) -> None:
        self._caches = caches
        self._policy = policy
        self._allowed = allowed
        self._warned = caches.remote_accessible  # peers may write anyway
        #: Ids of the caches of the last look-up, and their tensors: look-ups come more often than caches change.
        self._last: tuple[list[int], NDArray[np.uint64]] = [], _tensors_of([])

    def on_locate(self, link: Link, message: Locate) -> None:
        try:
            check_enabled(self._allowed, "locate: llm.WriteByAddress=0 of the owner: name memory by caches and keys")
            self._policy.require(link, "locate")
            located = self._located(link, message)
        except LLMException as error:
            link.tell(failed(message.id, error))
            return
        if not self._warned:
            self._warned = True
            caches = sorted(set(np.frombuffer(located.cache_ids, "<u8").tolist()))
            logger.warning(
                "%s has named memory of this process by its addresses: cache %s can be written by it although "
                "llm.EnableRemoteCacheAccessible is 0, and so can every remote-accessible cache of which a peer knows "
                "or guesses an address; llm.WriteByAddress=0 refuses that",
                link.peer,
                ", ".join(map(str, caches[:8])),
            )
        link.tell(located)

    def _located(self, link: Link, message: Locate) -> Located:
        if len(message.addresses) % 8 or message.nbytes < 1:
            raise ParamError(f"locate: {len(message.addresses)} bytes of addresses, {message.nbytes} bytes from each")
        addresses = np.frombuffer(message.addresses, "<u8").astype(np.uint64)
        entries, _, _ = self._caches.registry.snapshot()
        live = [each for each in entries if each.life.state in _WITH_TENSORS and not each.closing]
        live = [each for each in live if self._policy.may_see(link, each)]  # errors do not reveal the others
        ids = [each.cache_id for each in live]
        if ids != self._last[0]:
            self._last = ids, _tensors_of(live)
        bases, _, tensors, cache_ids, allocated, _ = _find(self._last[1], len(ids), addresses, message.nbytes).T
        if len(link.caches.located) > _MANY_IDS:
            link.caches.located &= set(ids)
        link.caches.located |= set(cache_ids.tolist())
        return Located(
            message.id,
            cache_ids.astype("<u8").tobytes(),
            tensors.astype("<u4").tobytes(),
            (addresses - bases).astype("<u8").tobytes(),
            bool(allocated.any()),
        )


def _tensors_of(entries: list[Entry]) -> NDArray[np.uint64]:
    """Return (base, bytes, tensor, cache id, allocated, writable) of each tensor, ordered by base."""
    parts = [np.empty((0, 6), np.uint64)]
    for each in entries:
        bases = each.storage.tensors.bases
        part = np.empty((len(bases), 6), np.uint64)
        may_write = each.remote_accessible and each.storage.lent is None
        part[:, 0], part[:, 2] = bases, np.arange(len(bases))
        part[:, (1, 3, 4, 5)] = each.geometry.tensor_bytes, each.cache_id, each.owned, may_write
        parts.append(part)
    rows = np.concatenate(parts)
    return rows[np.argsort(rows[:, 0], kind="stable")]


def _find(every: NDArray[np.uint64], caches: int, addresses: NDArray[np.uint64], nbytes: int) -> NDArray[np.uint64]:
    """Return the row of each address; ParamError unless its range is in a writable tensor."""
    size = np.uint64(nbytes)
    rows = every[(every[:, 1] >= size) & (every[:, 5] > 0)]
    bases, rooms = rows[:, 0], rows[:, 1] - size
    # The last tensor that begins at or before an address holds it, unless caches overlap.
    found = np.searchsorted(bases, addresses, side="right") - 1
    # Unsigned, so an address before the base differs by more than any room.
    missing = addresses - bases[found] > rooms[found] if len(rows) else np.ones(len(addresses), np.bool_)
    for i in np.flatnonzero(missing):
        holding = np.flatnonzero(addresses[i] - bases <= rooms)
        if not len(holding):
            raise _misplaced(every, caches, addresses[i], nbytes)
        found[i] = holding[-1]
    return rows[found]


def _misplaced(every: NDArray[np.uint64], caches: int, address: np.uint64, nbytes: int) -> ParamError:
    what = f"address {int(address):#x} (dst_addrs): {nbytes} bytes from there on"
    into = address - every[:, 0]
    around = every[into < every[:, 1]]
    if not len(around):
        return ParamError(f"{what} are in none of the {caches} caches allocated or registered at the peer")
    base, room, tensor, cache_id, _, writable = around[np.argmin(around[:, 3])].tolist()
    if not writable:
        return ParamError(f"{what} begin in cache {cache_id}, which has remote_accessible=False or granted_only=True")
    left = base + room - int(address)
    return ParamError(f"{what} leave tensor {tensor} of cache {cache_id}, which has {left} left")
