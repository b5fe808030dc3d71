"""What this project's tests ask of the inside of an instance. No interface: it changes with the code.

A test that needs a fact from inside gets it here, so that a change inside is a change of this module, not of fifty
tests. What an instance tells its users (``statistics``, ``explain``, ``check_integrity``) is asked there.
"""

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from llm_datadist import Cache
from llm_datadist._cache import local_caches
from llm_datadist._cache.registry import Pin, Registry
from llm_datadist._deadline import Deadline
from llm_datadist._links.link import Link
from llm_datadist._links.messages import Message
from llm_datadist._links.retry import Reconnector
from llm_datadist._links.table import LinkTable
from llm_datadist._memory import pool
from llm_datadist._memory.pool import DirectMemory, MemoryPool
from llm_datadist._transfer.engine import Engine
from llm_datadist._transfer.layerwise import CacheTask
from llm_datadist._transport.nixl.bindings import installed
from llm_datadist._transport.tcp.lanes import LaneGroup
from llm_datadist.datadist import Life, LLMDataDist, life_of
from llm_datadist.errors import StateError
from llm_datadist.kv_cache import KvCache
from llm_datadist.kv_cache_manager import KvCacheManager

T = TypeVar("T")


def kept_by(cache: Cache) -> list[object]:
    """Return what keeps a cache's memory mapped."""
    memory = cache._memory
    return [each.keep() for each in memory.segments] if isinstance(memory, local_caches.Storage) else []


class Probe:
    """The inside of one initialised instance of this process. Threads: any; what it returns is true of that moment.

    Attributes:
        engine: What the instance owns; its public attributes are the tests' too.
    """

    def __init__(self, datadist: LLMDataDist) -> None:
        engine = life_of(datadist).engine  # read once: another thread may finalize
        if engine is None:
            raise StateError("a probe needs an LLMDataDist that is initialised")
        self.engine: Engine = engine

    def on_control(self, function: Callable[..., T], *args: Any) -> T:
        """Run short work on the control thread and return its result."""
        return self.engine._control.call(function, *args)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function`` on the control thread soon."""
        self.engine._control.post(function, *args)

    def link(self, peer: int) -> Link:
        """Return the link to a peer. Raises NotLinked as :meth:`LinkManager.get`."""
        return self.engine.links.get(peer)

    @property
    def reconnector(self) -> Reconnector:
        return self.engine.links._reconnector

    def transport(self, name: str) -> Any:
        """Return the transport of this name."""
        return self.engine.transports.by_name[name]

    def lanes(self, peer: int) -> LaneGroup:
        """Return the data lanes of the link to a peer."""
        connection: Any = self.link(peer).connection
        group: LaneGroup = getattr(connection, "shared", connection).group
        return group

    def pins(self) -> list[Pin]:
        """Return what peers have pinned here."""
        return list(self.engine.caches.registry._pins.values())

    def generations(self) -> list[int]:
        """Return the generation of every guard slot that was ever used."""
        guards = self.engine.caches.exports.guards
        return [guards.load(slot) for slot in range(1, guards._next_fresh)]

    def dial_deadlines(self) -> list[Deadline]:
        """Return the deadlines of the dials to members of communicators that are under way."""
        dials = [attempt._dial for attempt in self.engine.links.communicators._dials._current]
        return [each._deadline for each in dials if each is not None]

    def grant_looks(self) -> tuple[int, int]:
        """Return how many expiries of grants are remembered, and how many looks at them are scheduled."""
        grants = self.engine.grants
        return len(grants._expiries), len(grants._looks)

    @property
    def parts(self) -> list[object]:
        """All that the engine owns."""
        return list(vars(self.engine).values())

    def loads(self, peer: int) -> list[int]:
        """Return how many bytes each data lane to a peer has to move."""
        return list(self.lanes(peer).loads.values())

    def break_lanes(self, peer: int, keep: int = 0) -> None:
        """Do what a network does that forgets connections: the lanes end, the control channel stays."""
        group = self.lanes(peer)
        for lane in group.lanes()[keep:]:
            self.transport("tcp").lanes.engine.drop_lane(lane)
            group.discard(lane)

    def lane_dial(self, peer: int) -> tuple[tuple[str, int], bytes, bytes]:
        """Return address, token and secret by which this end dials data lanes to a peer."""
        connection: Any = self.link(peer).connection
        dial = connection.shared.recovery.reconnect
        return *dial.args, dial.keywords["secret"]

    def unsent(self, peer: int) -> int:
        """Return how many bytes for a peer wait until its control channel has room."""
        channel: Any = self.link(peer).channel
        return int(channel._stream.unsent)

    @property
    def link_table(self) -> LinkTable:
        return self.engine.links._table

    @staticmethod
    def dropped(manager: KvCacheManager) -> list[int]:
        """Return the caches whose handle was dropped, which the next call of the manager gives back."""
        return list(manager._forgotten)

    @staticmethod
    def ended(task: CacheTask) -> bool:
        """Return True once no further layer of a transfer may succeed."""
        return task._job._ended is not None

    @contextmanager
    def answered(
        self, kind: type[Message], answer: Callable[[Link, Any, Callable[[Link, Any], None]], None]
    ) -> Iterator[None]:
        """Have ``answer(link, message, honest)`` called for messages of a kind, on the control thread."""
        handlers = self.engine.links._handlers
        honest = handlers[kind]
        handlers[kind] = lambda link, message: answer(link, message, honest)
        try:
            yield
        finally:
            handlers[kind] = honest


def instances() -> list[LLMDataDist]:
    """Return every initialised instance of this process."""
    return list(Life.all)


def socket_of(link: Link) -> socket.socket:
    """Return the socket of a link's control channel."""
    assert link.channel is not None, "a link that can be found has a channel"
    return link.channel._socket


def lock_of(part: MemoryPool | DirectMemory | Registry) -> threading.Lock:
    """Return the lock that all use of a part waits for."""
    return part._lock


def cache_of(handle: KvCache) -> Cache:
    """Return the cache of a handle of the first interface."""
    return handle._cache


def count_ids_again(span: int) -> None:
    """Let ids of caches begin at 1 again, each instance's ``span`` after the last one's. No instance may live."""
    local_caches.first_ids = itertools.count(1, span)


def deadline(budget_ms: int) -> Deadline:
    """Return what a public call makes of its time and passes down."""
    return Deadline(budget_ms)


#: Whether NIXL is there.
nixl_is_installed = installed

#: The memory without a pool that stays mapped because a peer may still write it.
kept_mapped = pool.kept_mapped
