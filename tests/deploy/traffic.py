"""What two processes of a serving system do, good and bad, so that every metric has something to say.

Cluster 1 prefills, cluster 2 decodes. Functions run at an end (tests/support/ends.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, start_http_server

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMDataDist, LLMRole
from llm_datadist.errors import CacheNotFound, GrantEnded, NotLinked, ParamError
from llm_datadist.prometheus import register
from llm_datadist.types.grant import Grant
from tests.support.linking import SUCCESS, link, link_number, lose
from tests.support.moves import BLOCKS, Spec, make, wait_until
from tests.support.world import World, cluster_info, make_config, small_pool

if TYPE_CHECKING:
    from collections.abc import Callable

PAGED: Final = Spec(tensors=4, rows=64, stride=4096, blocks=True)
ROWS: Final = Spec(tensors=4, rows=4, stride=4096)
#: A peer in the prefill process, which ends while that lives on: it is dialled again for ever.
GONE: Final = 3


def serve(world: World) -> int:
    """Export the metrics of a process, as its user would; return the port."""
    registry = CollectorRegistry()
    for each in [world, *world.memory.values()]:
        if hasattr(each, "dd"):
            register(each.dd, registry)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    world.memory["server"] = server, thread
    return int(server.server_port)


def end_serving(world: World) -> None:
    server, thread = world.memory.pop("server")
    server.shutdown()
    server.server_close()
    thread.join()


def publish(world: World) -> int:
    """Make the caches of the prefill process, one with a key that is never pulled; return the id of the rows."""
    make(world, "kv", replace(PAGED, blocks_key=BLOCKS), 1)
    make(world, "rows", ROWS, 2)
    make(world, "never pulled", replace(ROWS, keys=(CacheKey(1, 1),)), 3)
    return world.caches["rows"].cache_id


def prepare(world: World) -> None:
    make(world, "kv", PAGED, 4)
    make(world, "rows", ROWS, 5)


def begin_other(world: World) -> int:
    other = LLMDataDist(LLMRole.PROMPT, GONE)
    other.init(make_config(listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True, **small_pool()))
    world.memory["other"] = other
    port = other.listen_port
    assert port is not None
    return port


def end_other(world: World) -> None:
    world.memory.pop("other").finalize()


def link_to(world: World, cluster_id: int, port: int) -> None:
    assert link(world, [cluster_info(cluster_id, port)]) == SUCCESS


def lend(world: World) -> bytes:
    """Give a grant that is revoked at once, and one whose time is over soon; return the first."""
    kv = world.caches["kv"]
    kv.grant([3], 0.05)
    revoked = kv.grant([1, 2], 60.0)
    revoked.revoke()
    return revoked.to_bytes()


def work(world: World, rows_id: int, revoked: bytes) -> None:
    """Move what can be moved, and fail in every way that can be had at once."""
    cm, kv, rows = world.cm, world.caches["kv"], world.caches["rows"]
    row = CacheKeyByIdAndIndex(1, rows_id, 0)
    for i in range(8):
        cm.pull_blocks(BLOCKS, kv, [i, i + 20], [i + 1, i + 40])
        cm.push_blocks(BLOCKS, kv, [i], [i + 8])
        cm.pull_cache(row, rows, 1)
        cm.push_cache(row, rows, 2)
        cm.copy_blocks(kv, {i: [i + 30]})
    _fails(CacheNotFound, lambda: cm.pull_blocks(BlocksCacheKey(1, 99), kv, [0], [0]))
    _fails(ParamError, lambda: cm.pull_blocks(BLOCKS, kv, [9999], [0]))
    _fails(NotLinked, lambda: cm.pull_blocks(BlocksCacheKey(77), kv, [0], [0]))
    _fails(GrantEnded, lambda: cm.pull_blocks(BLOCKS, kv, [1], [1], grant=Grant.from_bytes(revoked)))


def _fails(kind: type[Exception], pull: Callable[[], None]) -> None:
    try:
        pull()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def lose_link(world: World) -> None:
    """Lose the link to the prefill process, and wait until it is back."""
    before = link_number(world, 1)
    lose(world, 1)
    wait_until(lambda: link_number(world, 1) > before)
