"""What the tests of the C++-shaped interface send to an end: an LlmDataDist, its caches, its calls by name."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

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
from tests.support.moves import Use, nothing_happens, same_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tests.conftest import Pair
    from tests.support.ends import End
    from tests.support.moves import Bytes
    from tests.support.world import World

    #: What a failing call returns, parts of the text of its reason, and the call: method and arguments.
    Row = tuple[LLMStatusCode, Sequence[str], tuple[Any, ...]]

OK = LLMStatusCode.LLM_SUCCESS
BAD = LLMStatusCode.LLM_PARAM_INVALID
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
UNLINKED = LLMStatusCode.LLM_NOT_YET_LINK
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


def start(
    world: World, role: LlmRole, cluster_id: int, transport: str, options: dict[str, str], device: Any = None
) -> int:
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
    world.memory["dist"] = made = LlmDataDist(cluster_id, role, device=device)
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
        addrs = _user_memory(world, name, shape)
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
    return _filled(world, name, Cache(-1, _user_memory(world, name, shape), shape.desc), seed)


def _user_memory(world: World, name: str, shape: Shape) -> list[int]:
    arrays = [np.zeros(shape.rows * shape.width, np.int32) for _ in range(shape.tensors)]
    world.memory[f"memory of {name}"] = arrays
    return [array.ctypes.data for array in arrays]


def _filled(world: World, name: str, cache: Cache, seed: int) -> Bytes:
    world.memory[f"cache {name}"] = cache
    random = np.random.default_rng(seed)
    for view in _views(cache):
        view[:] = random.integers(0, 256, view.shape, dtype=np.uint8)
    return show(world, name)


def _views(cache: Cache) -> list[NDArray[np.uint8]]:
    """Return every byte of a cache, as arrays over its memory."""
    rows, nbytes = cache.cache_desc.shape[0], int(np.prod(cache.cache_desc.shape)) * 4
    return [
        np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)).reshape(rows, -1)
        for address in cache.tensor_addrs
    ]


def show(world: World, name: str) -> Bytes:
    return [view.copy() for view in _views(world.memory[f"cache {name}"])]


def index(world: World, name: str, batch_index: int = 0) -> CacheIndex:
    """Return how peers name a cache of this end."""
    return CacheIndex(world.dd.cluster_id, world.memory[f"cache {name}"].cache_id, batch_index)


def run(world: World, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method; :class:`Use` arguments become caches of this end."""
    real = [world.memory[f"cache {each.name}"] if isinstance(each, Use) else each for each in args]
    return getattr(dist(world), method)(*real, **kwargs)


def failed(world: World, method: str, *args: Any, **kwargs: Any) -> tuple[LLMStatusCode, BaseException | None]:
    """Call a method; return its status and the reason, which is kept for this thread."""
    before = dist(world).last_error
    result = run(world, method, *args, **kwargs)
    status: LLMStatusCode = result[0] if isinstance(result, tuple) else result
    error = dist(world).last_error
    assert (status is OK) == (error is before), f"{method}: {status}, {error!r}"
    if status is OK:
        return status, None
    assert not isinstance(result, tuple) or not result[1], f"{method} failed and returned {result}"
    assert error is not None
    assert error.__traceback__ is None
    assert getattr(error, "status_code", None) is status
    assert "\n" not in str(error)
    return status, error


def attempt(world: World, method: str, *args: Any) -> tuple[LLMStatusCode, str]:
    status, error = failed(world, method, *args)
    return status, "" if error is None else str(error)


def all_unchanged(ends: Sequence[End], names: Sequence[str], rows: Sequence[Row]) -> None:
    """Each call of the first end fails as its row says; after all of them tables and bytes are as before."""
    shown = [{name: end.do(show, name) for name in names if end.do(_has, name)} for end in ends]

    def action() -> None:
        for status, parts, (method, *args) in rows:
            got, text = ends[0].do(attempt, method, *args)
            assert got is status, f"{method}{args}: {got}: {text}"
            assert [part for part in parts if part not in text] == [], f"{method}{args}: {text}"

    nothing_happens(ends, (), action)
    for end, before in zip(ends, shown, strict=True):
        for name, old in before.items():
            same_bytes(end.do(show, name), old)


def _has(world: World, name: str) -> bool:
    return f"cache {name}" in world.memory
