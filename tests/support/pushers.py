"""An owner of memory in this process, and a peer in a child that is stopped in the middle of a push into it."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llm_datadist import BlocksCacheKey
from tests.support.ends import ChildEnd, LocalEnd
from tests.support.frozen import freeze
from tests.support.moves import Spec, Use, make
from tests.support.world import World, cluster_info, residue, settled

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "KEY",
    "PUSH",
    "Pushed",
    "both",
    "freeze",
    "pushed_over",
    "quarantined",
    "small_pool",
    "writing",
]

KEY = BlocksCacheKey(1, 0)
#: What the child calls: two of its blocks into two of the owner's.
PUSH = ("push_blocks", KEY, Use("kv"), [0, 5], [6, 7])


class Pushed:
    """The owner ("prompt", cluster 1, here) and the pusher ("decoder", cluster 2, a child that a test may kill)."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.before = residue()
        self.owner = LocalEnd("prompt")
        self.pusher = ChildEnd("decoder")

    def start(self, **settings: Any) -> None:
        """Start both with RCA, and link the pusher to the owner; ``settings`` are the owner's."""
        extra = {"llm.Transport": self.transport, "llm.PeerTimeout": "600"}
        common: dict[str, Any] = {"enable_remote_cache_accessible": True, "extra": extra}
        self.owner.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", **(common | settings))
        self.pusher.start("DECODER", 2, **common)
        self.link()

    def link(self) -> None:
        """Link the pusher to the owner."""
        self.pusher.do(_link, self.owner.port)

    def kill(self) -> None:
        """``kill -9`` the pusher."""
        self.pusher.kill()

    def end(self) -> None:
        """Finalize the owner and end the child; nothing may be left here."""
        self.pusher.signal(signal.SIGCONT)
        self.pusher.kill()
        self.owner.stop()
        assert settled(self.before) == self.before


def _link(world: World, port: int) -> None:
    code, _ = world.dd.link_clusters([cluster_info(1, port)], 10_000)
    assert code == 0, code


def writing(world: World, name: str) -> int:
    """Return how many foreign writers are at a cache of this end right now."""
    assert world.dd._engine is not None
    store = world.dd._engine.store
    return len(store.writers.busy(store.registry.lookup(world.caches[name].cache_id).guard.slot))


def quarantined(world: World) -> int:
    """Return the quarantined bytes, the same by both ways of counting, tables checked."""
    world.dd.check_integrity()
    statistics = world.dd.statistics()
    assert sum(pool.quarantined_bytes for pool in statistics.pools) == statistics.quarantined_bytes
    return statistics.quarantined_bytes


@contextmanager
def pushed_over(transport: str) -> Iterator[Pushed]:
    """Two ends that are not started yet; afterwards nothing may be left in this process."""
    pushed = Pushed(transport)
    try:
        yield pushed
    finally:
        pushed.end()


def small_pool(mib: int = 1) -> dict[str, Any]:
    """Return settings with one pool of that size and pages of 4 KiB."""
    return {"mem_pool_cfg": f'{{"memory_size": {mib << 20}, "page_shift": 12}}', "host_mem_pool_cfg": None}


def both(pushed: Pushed, rows: int, stride: int, memory: str = "pool", **settings: Any) -> Any:
    """Start, and make a blocks cache "kv" of one tensor at both ends; return the bytes of the pusher's."""
    pushed.start(**settings)
    pushed.owner.do(make, "kv", Spec(1, rows, stride, blocks=True, blocks_key=KEY, memory=memory), 1)
    return pushed.pusher.do(make, "kv", Spec(1, rows, stride, blocks=True), 2)
