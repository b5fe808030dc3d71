"""What this project's tests ask of the inside of an instance. No interface: it changes with the code.

A test that needs a fact from inside gets it here, so that a change inside is a change of this module, not of fifty
tests. What an instance tells its users (``statistics``, ``explain``, ``check_integrity``) is asked there.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from llm_datadist.errors import StateError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from llm_datadist._links.link import Link
    from llm_datadist._links.messages import Message
    from llm_datadist._links.table import LinkTable
    from llm_datadist._transfer.engine import Engine
    from llm_datadist._transfer.layerwise import CacheTask
    from llm_datadist._transport.lanes import LaneGroup
    from llm_datadist.datadist import LLMDataDist
    from llm_datadist.kv_cache_manager import KvCacheManager

T = TypeVar("T")


class Probe:
    """The inside of one initialised instance of this process. Threads: any; what it returns is true of that moment.

    Attributes:
        engine: What the instance owns; its public attributes are the tests' too.
    """

    def __init__(self, datadist: LLMDataDist) -> None:
        if datadist._engine is None:
            raise StateError("a probe needs an LLMDataDist that is initialised")
        self.engine: Engine = datadist._engine

    def on_control(self, function: Callable[..., T], *args: Any) -> T:
        """Run short work on the control thread and return its result."""
        return self.engine._control.call(function, *args)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function`` on the control thread soon."""
        self.engine._control.post(function, *args)

    def link(self, peer: int) -> Link:
        """Return the link to a peer. Raises NotLinked as :meth:`LinkManager.get`."""
        return self.engine.links.get(peer)

    def lanes(self, peer: int) -> LaneGroup:
        """Return the data lanes of the link to a peer."""
        connection: Any = self.link(peer).connection
        group: LaneGroup = getattr(connection, "shared", connection)._group
        return group

    @property
    def parts(self) -> list[object]:
        """All that the engine owns."""
        return list(vars(self.engine).values())

    def loads(self, peer: int) -> list[int]:
        """Return how many bytes each data lane to a peer has to move."""
        return list(self.lanes(peer)._loads.values())

    def break_lanes(self, peer: int, keep: int = 0) -> None:
        """Do what a network does that forgets connections: the lanes end, the control connection stays."""
        group = self.lanes(peer)
        for lane in group.lanes()[keep:]:
            self.engine._lanes.engine.drop_lane(lane)
            group.discard(lane)

    def lane_dial(self, peer: int) -> tuple[tuple[str, int], bytes, bytes]:
        """Return address, token and secret by which this end dials data lanes to a peer."""
        connection: Any = self.link(peer).connection
        dial = connection.shared._reconnect
        return *dial.args, dial.keywords["secret"]

    def control_socket(self, peer: int) -> socket.socket:
        """Return the socket of the control connection to a peer."""
        channel: Any = self.link(peer).channel
        sock: socket.socket = channel._socket
        return sock

    def unsent(self, peer: int) -> int:
        """Return how many bytes for a peer wait until its control connection has room."""
        channel: Any = self.link(peer).channel
        return len(channel._backlog)

    @property
    def link_table(self) -> LinkTable:
        return self.engine.links._table

    @property
    def registry_lock(self) -> AbstractContextManager[object]:
        """What every use of the table of caches waits for."""
        return self.engine.store.registry._lock

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
