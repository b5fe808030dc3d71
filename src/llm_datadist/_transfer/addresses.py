"""Raw addresses of a peer (``TransferConfig.dst_addrs``): which of its caches they are, and leave to write there.

An address of another process means nothing here, and a peer that writes where it likes is not to be had. So the
initiator asks first: ``Locate`` names addresses and how many bytes from each on will be written, and the target looks
them up among the tensors of its caches. Outside all of them, or across the end of one, is ``LLM_PARAM_INVALID``. The
answer, ``Located``, names cache, tensor and offset, and from then on the pushes are pushes like all others: by cache
id, resolved, pinned where that is needed, under guards, planned against the true geometry.

Without remote cache access (RCA) a target refuses pushes. It makes an exception for caches that it has located for this
link (``PeerCacheView.located``): ids are never used again within an ``init``, so the leave ends with the cache or with
the link.
The pools stay sealed against peers' writes: the target answers such a push with absolute addresses, which cma, the data
lanes or the same process reach, and shared memory does not; the owner finds the writers as it does with RCA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llm_datadist._cache.registry import State
from llm_datadist._links.messages import MAX_LOCATE, Locate, Located, RemoteFailure, failed
from llm_datadist.errors import LLMException, ParamError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from llm_datadist._cache.registry import Entry
    from llm_datadist._cache.store import CacheStore
    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link
    from llm_datadist._links.manager import LinkManager
    from llm_datadist._links.messages import Message

__all__ = ["AddressBook", "Locations", "Locator", "RemoteOffset", "places_in"]

#: Ids kept per link; beyond, those whose caches are gone are forgotten.
_MANY_IDS: Final = 1024


@dataclass(frozen=True, slots=True)
class RemoteOffset:
    """Where an address of the peer lies: ``offset`` bytes into a tensor of one of its caches."""

    cache_id: int
    tensor: int
    offset: int


@dataclass(frozen=True, slots=True)
class Locations:
    """Where all addresses of a question lie; ``allocated`` when one of them lies in memory of the peer's pools.

    Such memory is a cache's only until that is freed; memory of the user is what it is, however it is registered.
    """

    places: list[RemoteOffset]
    allocated: bool


# --- the initiator ---------------------------------------------------------------------------------------------------


class Locator:
    """Asks peers what lies at their addresses. Any thread; keeps nothing."""

    def __init__(self, links: LinkManager) -> None:
        self._links = links

    def locate(
        self, cluster_id: int, addresses: Sequence[int], nbytes: int, deadline: Deadline, what: str
    ) -> Locations:
        """Return the places of ``addresses``, from each of which on ``nbytes`` bytes are to be written.

        Raises:
            NotLinked: No link to the cluster.
            ParamError: An address, or a part of its range, lies in no cache that the peer lets us write; the text
                names it.
            DeadlineExceeded: In phase ``locate``.
            PeerLost: The link broke.
        """
        link = self._links.get(cluster_id)
        with link.operation():
            parts = [
                _ask(link, addresses[start : start + MAX_LOCATE], nbytes, deadline, what)
                for start in range(0, len(addresses), MAX_LOCATE)
            ]
        places = [place for part in parts for place in part.places]
        return Locations(places, any(part.allocated for part in parts))


def _ask(link: Link, addresses: Sequence[int], nbytes: int, deadline: Deadline, what: str) -> Locations:
    named = np.array(addresses, dtype="<u8").tobytes()
    try:
        answer = link.request(
            lambda number: Locate(number, named, nbytes),
            deadline,
            f"{what}: locating {len(addresses)} addresses",
            "locate",
        )
    except RemoteFailure as failure:
        raise failure.typed(what) from failure
    if not isinstance(answer, Located):
        raise ProtocolError(f"{what}: {link.peer} answered a Locate with {type(answer).__name__}")
    return Locations(places_in(answer, len(addresses), f"{what}: {link.peer}"), answer.allocated)


def places_in(answer: Located, count: int, who: str) -> list[RemoteOffset]:
    """Return the places in an answer about ``count`` addresses; whether a cache has such a place is seen at the push.

    Raises:
        ProtocolError: It is not about as many.
    """
    if not count * 8 == len(answer.cache_ids) == len(answer.offsets) == 2 * len(answer.tensors):
        raise ProtocolError(f"{who} located {len(answer.tensors) // 4} of {count} addresses")
    columns = ((answer.cache_ids, "<u8"), (answer.tensors, "<u4"), (answer.offsets, "<u8"))
    return [RemoteOffset(*row) for row in zip(*(np.frombuffer(*each).tolist() for each in columns), strict=True)]


# --- the target ------------------------------------------------------------------------------------------------------


class AddressBook:
    """Answers :class:`~llm_datadist._links.messages.Locate`. Runs on the control thread."""

    def __init__(self, store: CacheStore) -> None:
        self._store = store

    def handlers(self) -> Mapping[type[Message], Callable[[Link, Any], None]]:
        """Return what the link manager dispatches to this class."""
        return {Locate: self.on_locate}

    def on_locate(self, link: Link, message: Locate) -> None:
        """A peer wants to know what lies at addresses of ours, in order to write there."""
        try:
            answer: Message = self._located(link, message)
        except LLMException as error:
            answer = failed(message.id, error)
        link.tell(answer)

    def _located(self, link: Link, message: Locate) -> Located:
        if len(message.addresses) % 8 or message.nbytes < 1:
            raise ParamError(f"locate: {len(message.addresses)} bytes of addresses, {message.nbytes} bytes from each")
        addresses = np.frombuffer(message.addresses, "<u8").astype(np.uint64)
        directory = _Directory(self._entries(), message.nbytes)
        found = directory.find(addresses)
        cache_ids = directory.cache_ids[found]
        self._allow(link, cache_ids)
        return Located(
            message.id,
            cache_ids.astype("<u8").tobytes(),
            directory.tensors[found].astype("<u4").tobytes(),
            (addresses - directory.bases[found]).astype("<u8").tobytes(),
            bool(directory.owned[found].any()),
        )

    def _entries(self) -> list[Entry]:
        entries, _, _ = self._store.registry.snapshot()
        return [each for each in entries if each.life.state in (State.LIVE, State.DEFERRED) and not each.closing]

    def _allow(self, link: Link, cache_ids: NDArray[np.uint64]) -> None:
        if len(link.caches.located) > _MANY_IDS:
            link.caches.located &= {entry.cache_id for entry in self._entries()}
        link.caches.located |= set(cache_ids.tolist())


class _Directory:
    """The tensors of some caches by address, as arrays: one row each, those with room for ``nbytes`` only."""

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
        """Return the row of each address.

        Raises:
            ParamError: One of them, or a part of what follows it, is in no tensor.
        """
        # The tensor that begins last before an address is the one, but where caches overlap.
        found = np.searchsorted(self.bases, addresses, side="right") - 1
        for i in np.flatnonzero((found < 0) | ~self._holds(np.maximum(found, 0), addresses)):
            found[i] = self._look_everywhere(addresses[i])
        return found

    def _holds(self, rows: NDArray[np.intp], addresses: NDArray[np.uint64]) -> NDArray[np.bool_]:
        if not len(self.bases):
            return np.zeros(len(rows), np.bool_)
        # Unsigned, so that an address before the base is as far beyond the room as can be.
        return np.asarray(addresses - self.bases[rows] <= self._rooms[rows])

    def _look_everywhere(self, address: np.uint64) -> int:
        rows = np.flatnonzero(address - self.bases <= self._rooms)
        if not len(rows):
            raise self._error(int(address))
        return int(rows[-1])

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
