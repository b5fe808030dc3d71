"""What the clients have in common: options, registration, rank tables, and KV memory of their own, made from a seed, so
that every process knows what every other one holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist import CacheDesc, LLMConfig, LLMDataDist, LLMStatusCode
from tests.support.moves import moved, same_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from llm_datadist import BlocksCacheKey, Cache, DataType, LLMRole
    from tests.support.ends import End
    from tests.support.world import World

Tensors = list["NDArray[np.uint8]"]


def contents(seed: int, tensors: int, blocks: int, block_bytes: int) -> Tensors:
    """Return (blocks, block_bytes) arrays that hold what this seed stands for."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (blocks, block_bytes), np.uint8) for _ in range(tensors)]


def options(**settings: Any) -> dict[str, str]:
    """As every client makes them: properties of LLMConfig; the dict is plain."""
    config = LLMConfig()
    for name, value in ({"device_id": 0} | settings).items():
        setattr(config, name, value)
    return config.generate_options()


def initialised(role: LLMRole, cluster_id: int, given: dict[str, str]) -> LLMDataDist:
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(given)
    return datadist


def registered(
    datadist: LLMDataDist, tensors: Tensors, data_type: DataType, block: Sequence[int], key: BlocksCacheKey | None
) -> Cache:
    """Register one list of (blocks, bytes) tensors as a blocks cache; a block has this shape."""
    desc = CacheDesc(num_tensors=len(tensors), shape=[tensors[0].shape[0], *block], data_type=data_type)
    return datadist.cache_manager.register_blocks_cache(desc, [tensor.ctypes.data for tensor in tensors], key)


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


def shown(world: World, name: str) -> Any:
    """Return every byte of the memory of that name: tensors, or lists of them."""
    return world.memory[name]


def drive(world: World, name: str, *args: Any) -> Any:
    """Call a method of the client of an end, which is kept as "client", or return an attribute of it."""
    return drive_one(world.memory["client"], name, *args)


def drive_one(client: object, name: str, *args: Any) -> Any:
    found = getattr(client, name)
    return found(*args) if callable(found) else found


def succeeded(what: str, status: LLMStatusCode) -> None:
    if status != LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"{what}: {status}")


def same_kinds(got: Iterable[Tensors], wanted: Iterable[Tensors]) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        same_bytes(mine, theirs)


def pulled(
    decoder: End,
    prompt: End,
    names: Iterable[tuple[str, str]],
    blocks: tuple[Sequence[int], Sequence[int]],
    pull: Callable[[], object],
) -> None:
    """Pull ``blocks``, (theirs, ours); compare every byte of the memories of these (own, other) names at both ends."""
    before = [(own, decoder.do(shown, own), other, prompt.do(shown, other)) for own, other in names]
    pull()
    for own, mine, other, theirs in before:
        same_bytes(decoder.do(shown, own), moved(mine, theirs, zip(blocks[1], blocks[0], strict=True)))
        same_bytes(prompt.do(shown, other), theirs)
