"""What the v1 tests send to an end: caches of the KvCacheManager, its calls by name, and the options of that mode."""

from typing import Any

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, KvCache
from tests.support.ends import End
from tests.support.moves import Bytes, Use
from tests.support.probe import cache_of
from tests.support.world import World, fill

#: Settings of ``make_config``: v1 mode, with a pool and without any.
POOL: dict[str, Any] = {"enable_cache_manager": None, "host_mem_pool_cfg": None}
DIRECT: dict[str, Any] = POOL | {"mem_pool_cfg": None}


def desc(tensors: int = 4, rows: int = 8, stride: int = 48) -> CacheDesc:
    return CacheDesc(tensors, [rows, stride], DataType.DT_UINT8)


def kv_make(
    world: World,
    name: str,
    cache_desc: CacheDesc,
    seed: int,
    keys: tuple[CacheKey, ...] = (),
    blocks: bool = False,
    blocks_key: BlocksCacheKey | None = None,
) -> Bytes:
    """Allocate a cache and fill every byte of it; return the bytes."""
    manager = world.dd.kv_cache_manager
    if blocks:
        cache = manager.allocate_blocks_cache(cache_desc, blocks_key)
    else:
        cache = manager.allocate_cache(cache_desc, list(keys))
    world.memory[f"kv {name}"] = cache
    world.caches[name] = cache_of(cache)  # what the shared helpers look at
    return fill(world.caches[name], seed)


def kv_of(world: World, name: str) -> KvCache:
    cache = world.memory[f"kv {name}"]
    assert isinstance(cache, KvCache)
    return cache


def kv_call(world: World, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the KvCacheManager; :class:`Use` arguments become KvCaches of this end."""
    real = [kv_of(world, a.name) if isinstance(a, Use) else a for a in args]
    return getattr(world.dd.kv_cache_manager, method)(*real, **kwargs)


def start_end(end: End, role: str, cluster_id: int = 1, **settings: Any) -> None:
    """Start one end in v1 mode; a PROMPT listens."""
    listen = {"listen_ip_info": "127.0.0.1:0"} if role == "PROMPT" else {}
    end.start(role, cluster_id, **(POOL | listen | settings))
