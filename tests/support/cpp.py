"""What the tests of the C++-shaped interface send to an end: an LlmDataDist, its caches, its calls by name."""

from dataclasses import dataclass
from typing import Any

from llm_datadist import types
from llm_datadist.cpp_api import (
    OPTION_DEVICE_ID,
    OPTION_LISTEN_IP_INFO,
    Cache,
    CacheDesc,
    CacheIndex,
    CachePlacement,
    ClusterInfo,
    DataType,
    IpInfo,
    LlmDataDist,
    LlmRole,
    LLMStatusCode,
)
from tests.support import fakecuda
from tests.support.ends import End
from tests.support.memory import user_memory
from tests.support.moves import Bytes, Use
from tests.support.pairs import Pair
from tests.support.world import GPU_OPTION, World, fill, ids_as_in_a_fresh_process

OK = LLMStatusCode.LLM_SUCCESS
BAD = LLMStatusCode.LLM_PARAM_INVALID
HOST, DEVICE = CachePlacement.kHost, CachePlacement.kDevice


@dataclass(frozen=True)
class Shape:
    """A cache to make: ``tensors`` tensors of ``rows`` rows or blocks of ``width`` int32.

    ``memory``: "pool" allocates it, "private" registers memory of the process's own, "inside" registers pool memory.
    """

    tensors: int = 4
    rows: int = 8
    width: int = 16
    placement: CachePlacement = DEVICE
    memory: str = "pool"

    @property
    def desc(self) -> CacheDesc:
        return CacheDesc(self.placement, self.tensors, DataType.DT_INT32, [self.rows, self.width])


def start(world: World, role: LlmRole, cluster_id: int, transport: str, options: dict[str, str]) -> int:
    """Initialise a fresh LlmDataDist with both pools; return its port. Of ``options`` an empty one is left out."""
    pool = '{"memory_size": 33554432, "page_shift": 12}'
    every = {
        OPTION_DEVICE_ID: "0",
        OPTION_LISTEN_IP_INFO: "127.0.0.1:0",
        "llm.SyncKvCacheWaitTime": "10000",
        "llm.MemPoolConfig": pool,
        "llm.HostMemPoolConfig": pool,
        "llm.Transport": transport,
    } | options
    ids_as_in_a_fresh_process()
    if GPU_OPTION in every:
        fakecuda.load()
    world.memory["dist"] = made = LlmDataDist(cluster_id, role)
    assert made.Initialize({key: value for key, value in every.items() if value}) is OK, made.last_error
    world.dd = made.datadist  # what World.stop ends and what pictures are taken of
    return made.datadist.listen_port or 0


def dist(world: World) -> LlmDataDist:
    found: LlmDataDist = world.memory["dist"]
    return found


def start_pair(
    pair: Pair, *, linked: bool = True, transport: str | None = None, options: dict[str, str] | None = None
) -> int:
    """Start clusters 1 (kPrompt) and 2 (kDecoder), both listening; the decoder links. Return the prompt's port."""
    port = pair.prompt.do(start, LlmRole.kPrompt, 1, transport or pair.transport, options or {})
    pair.decoder.do(start, LlmRole.kDecoder, 2, transport or pair.transport, options or {})
    if linked:
        link(pair.decoder, 1, port)
    return port


def cluster(cluster_id: int, port: int) -> ClusterInfo:
    return ClusterInfo(cluster_id, remote_ip_infos=[IpInfo("127.0.0.1", port)])


def link(end: End, cluster_id: int, port: int) -> None:
    assert end.do(run, "LinkLlmClusters", [cluster(cluster_id, port)], 10_000) == (OK, [OK])


def made(world: World, name: str, shape: Shape, seed: int) -> Bytes:
    """Make a cache and fill every byte of it; return the bytes, one (rows, stride) array per tensor."""
    if shape.memory == "private":
        addrs = user_memory(world, name, _described(shape.desc))
    else:
        status, cache = dist(world).AllocateCache(shape.desc)
        assert cache is not None, dist(world).last_error
        assert status is OK
        if shape.memory == "pool":
            return _filled(world, name, cache, seed)
        world.memory[f"memory of {name}"], addrs = cache, cache.tensor_addrs
    status, cache_id = dist(world).RegisterKvCache(shape.desc, addrs)
    assert cache_id is not None, dist(world).last_error
    assert status is OK
    return _filled(world, name, Cache(cache_id, addrs, shape.desc), seed)


def host_memory(world: World, name: str, shape: Shape, seed: int) -> Bytes:
    """Put host memory without an id behind a name: cache_id -1, cache_desc and tensor_addrs are all there is."""
    return _filled(world, name, Cache(-1, user_memory(world, name, _described(shape.desc)), shape.desc), seed)


def _described(desc: CacheDesc) -> types.CacheDesc:
    return types.CacheDesc(desc.num_tensors, list(desc.shape), DataType.DT_INT32, types.Placement.HOST)


def _filled(world: World, name: str, cache: Cache, seed: int) -> Bytes:
    world.memory[f"cache {name}"] = cache
    # What the shared helpers look at.
    world.caches[name] = types.Cache(cache.cache_id, _described(cache.cache_desc), cache.tensor_addrs)
    return fill(world.caches[name], seed)


def index(world: World, name: str, batch_index: int = 0) -> CacheIndex:
    """Return how peers name a cache of this end."""
    return CacheIndex(world.dd.cluster_id, world.memory[f"cache {name}"].cache_id, batch_index)


def run(world: World, method: str, *args: Any) -> Any:
    """Call a method; :class:`Use` arguments become caches of this end."""
    return getattr(dist(world), method)(*_real(world, args))


def _real(world: World, args: tuple[Any, ...]) -> list[Any]:
    return [world.memory[f"cache {each.name}"] if isinstance(each, Use) else each for each in args]


def failed_with(world: World, method: str, *args: Any, **kwargs: Any) -> tuple[LLMStatusCode, Exception | None]:
    """Call a method; return its status and the reason, which is kept for this thread; None for none."""
    before = dist(world).last_error
    result = getattr(dist(world), method)(*args, **kwargs)
    status, *rest = result if isinstance(result, tuple) else (result,)
    error = dist(world).last_error
    assert (status is OK) == (error is before), f"{method}: {status}, {error!r}"
    if status is OK:
        return OK, None
    assert not any(rest), f"{method} failed and returned {result}"
    assert error is not None
    assert error.__traceback__ is None
    assert "\n" not in str(error)
    return status, error


def attempt(world: World, method: str, *args: Any) -> tuple[LLMStatusCode, str]:
    """Call a method, as :func:`run`; return its status and the text of the reason."""
    status, error = failed_with(world, method, *_real(world, args))
    return status, str(error or "")
