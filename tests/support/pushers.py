"""An owner of memory in this process, and a peer in a child that is stopped in the middle of a push into it."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llm_datadist import BlocksCacheKey
from tests.support.ends import ChildEnd, LocalEnd
from tests.support.frozen import freeze
from tests.support.linking import SUCCESS, info, link
from tests.support.moves import Spec, Use, make
from tests.support.world import residue, settled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.world import World

__all__ = ["KEY", "PUSH", "Pushed", "both", "freeze", "pushed_over", "quarantined", "small_pool", "writing"]

KEY = BlocksCacheKey(1, 0)
#: What the child calls: two of its blocks into two of the owner's.
PUSH = ("push_blocks", KEY, Use("kv"), [0, 5], [6, 7])


@dataclass
class Pushed:
    """The owner ("prompt", cluster 1, here) and the pusher ("decoder", cluster 2, a child that a test may kill)."""

    transport: str
    owner: LocalEnd
    pusher: ChildEnd


@contextmanager
def pushed_over(transport: str) -> Iterator[Pushed]:
    """Two ends that are not started yet; afterwards nothing may be left in this process."""
    before = residue()
    pushed = Pushed(transport, LocalEnd("prompt"), ChildEnd("decoder"))
    try:
        yield pushed
    finally:
        pushed.pusher.signal(signal.SIGCONT)
        pushed.pusher.kill()
        pushed.owner.stop()
        assert settled(before) == before


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


def small_pool(mib: int = 1) -> dict[str, Any]:
    """Return settings with one pool of that size and pages of 4 KiB."""
    return {"mem_pool_cfg": f'{{"memory_size": {mib << 20}, "page_shift": 12}}', "host_mem_pool_cfg": None}


def both(pushed: Pushed, rows: int, stride: int, memory: str = "pool", **settings: Any) -> Any:
    """Start both with RCA, link them, make a blocks cache "kv" of one tensor at both; return the bytes of the pusher's.

    ``settings`` are the owner's.
    """
    extra = {"llm.Transport": pushed.transport, "llm.PeerTimeout": "600"}
    common: dict[str, Any] = {"enable_remote_cache_accessible": True, "extra": extra}
    pushed.owner.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", **(common | settings))
    pushed.pusher.start("DECODER", 2, **common)
    assert pushed.pusher.do(link, [info(1, pushed.owner.port)]) == SUCCESS
    pushed.owner.do(make, "kv", Spec(1, rows, stride, blocks=True, blocks_key=KEY, memory=memory), 1)
    return pushed.pusher.do(make, "kv", Spec(1, rows, stride, blocks=True), 2)
