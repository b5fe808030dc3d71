"""What the clients have in common: one player of their calls, options, rank tables, and KV memory of their own, made
from a seed, so that every process knows what every other one holds."""

import json
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMConfig, LLMDataDist, LLMException, LLMRole
from llm_datadist import LLMStatusCode as Code
from tests.support.kinds import End, World
from tests.support.moves import moved, same_bytes, wait_until
from tests.support.ranks import OK, status

Tensors = list[NDArray[np.uint8]]
#: A prompt's seed, its blocks, ours.
Pull = tuple[int, list[int], list[int]]


class Kind(NamedTuple):
    """One kind of KV memory, registered as one blocks cache: tensors of blocks, a block's shape and type."""

    tensors: int
    blocks: int
    block: tuple[int, ...]
    data_type: DataType = DataType.DT_FLOAT16

    def held(self, seed: int) -> Tensors:
        """Return (blocks, bytes) arrays that hold what this seed stands for."""
        random, nbytes = np.random.default_rng(seed), prod(self.block) * self.data_type.itemsize
        return [random.integers(0, 256, (self.blocks, nbytes), np.uint8) for _ in range(self.tensors)]


def options(**settings: Any) -> dict[str, str]:
    """As every client makes them: properties of LLMConfig; the dict is plain."""
    config = LLMConfig()
    for name, value in ({"device_id": 0} | settings).items():
        setattr(config, name, value)
    return config.generate_options()


def rank_table(devices: Iterable[tuple[str, dict[str, str]]], version: str, pods: Iterable[str] = ()) -> str:
    """Return a table of these (server id, device); every super pod lists all servers."""
    by_server: dict[str, list[dict[str, str]]] = {}
    for server_id, device in devices:
        by_server.setdefault(server_id, []).append(device)
    servers = [{"server_id": server_id, "device": each} for server_id, each in by_server.items()]
    table: dict[str, Any] = {"version": version, "server_count": str(len(servers)), "status": "completed"}
    ids = [{"server_id": server_id} for server_id in by_server]
    super_pods = [{"super_pod_id": pod, "server_list": ids} for pod in pods]
    return json.dumps(table | {"server_list": servers} | ({"super_pod_list": super_pods} if super_pods else {}))


# --- the player -------------------------------------------------------------------------------------------------------
def play(*steps: tuple[Any, ...]) -> Any:
    """Make calls one after the other, each (end, name, *arguments); return what the last one returns.

    A name is one of a function below, or of a method of the LLMDataDist in use. Linking and unlinking have to succeed.
    """
    result = None
    for end, name, *args in steps:
        try:
            result = end.do(_call, name, *args)
        except Exception as error:
            error.add_note(f"{name} {args}")
            raise
    return result


def _call(world: World, name: str, *args: Any) -> Any:
    if name in _CALLS:
        return _CALLS[name](world, *args)
    result = getattr(world.dd, name)(*args)
    if isinstance(result, tuple):
        assert result[0] is Code.LLM_SUCCESS, (name, result)
    return result


def start(
    world: World, role: str, cluster_id: int, given: dict[str, str], kinds: Sequence[Kind], seed: int, keys: bool
) -> int | None:
    """Initialise an instance, which is in use from now on, and register its memory; return the port."""
    before = dict(given)
    world.dd = LLMDataDist(LLMRole[role], cluster_id)
    world.dd.init(given)
    assert given == before, "read, not changed: clients keep it and pass it again"
    world.memory.setdefault("instances", {})[cluster_id] = world.dd, {}
    register(world, kinds, seed, keys)
    return world.dd.listen_port


def _held(world: World) -> dict[str, Any]:
    """Return what belongs to the instance in use: its memory, "kv", and "caches" over it."""
    held: dict[str, Any] = world.memory["instances"][world.dd.cluster_id][1]
    return held


def use(world: World, cluster_id: int) -> None:
    world.dd = world.memory["instances"][cluster_id][0]


def register(world: World, kinds: Sequence[Kind], seed: int, keys: bool) -> None:
    """One cache for each kind, whose position is the model id; with keys or without."""
    own, kv = world.dd.cluster_id, [kind.held(seed + model_id) for model_id, kind in enumerate(kinds)]
    caches = [
        world.cm.register_blocks_cache(
            CacheDesc(num_tensors=len(tensors), shape=[kind.blocks, *kind.block], data_type=kind.data_type),
            [tensor.ctypes.data for tensor in tensors],
            BlocksCacheKey(own, model_id) if keys else None,
        )
        for model_id, (kind, tensors) in enumerate(zip(kinds, kv, strict=True))
    ]
    _held(world).update(kv=kv, caches=caches)


def unregister(world: World) -> None:
    for cache in _held(world)["caches"]:
        world.cm.unregister_cache(cache.cache_id)


def pull(world: World, cluster_id: int, src: list[int], dst: list[int]) -> Code:
    """One pull for each model id; the first failure ends the request, and its status is all that is known of it."""
    for model_id, cache in enumerate(_held(world)["caches"]):
        try:
            world.cm.pull_blocks(BlocksCacheKey(cluster_id, model_id), cache, src, dst)
        except LLMException as error:
            return error.status_code
    return Code.LLM_SUCCESS


def ready(world: World, comm_id: int) -> None:
    """Poll a communicator until its memory is registered at all members."""
    wait_until(lambda: status(world, comm_id) is OK, 20)


def kv(world: World) -> list[Tensors]:
    tensors: list[Tensors] = _held(world)["kv"]
    return tensors


_CALLS: dict[str, Any] = {each.__name__: each for each in (start, use, register, unregister, pull, ready)}


def holds(end: End, kinds: Sequence[Kind], own_seed: int, *pulls: Pull) -> None:
    """Compare every byte: of the prompts (seed, src, dst) in the blocks that were pulled, its own elsewhere."""
    for model_id, (kind, found) in enumerate(zip(kinds, end.do(kv), strict=True)):
        expected = kind.held(own_seed + model_id)
        for seed, src, dst in pulls:
            expected = moved(expected, kind.held(seed + model_id), zip(dst, src, strict=True))
        same_bytes(found, expected)
