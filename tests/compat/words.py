"""What the tests with two builds send to an end. All ends have this text, whatever their build: it
asks what is public, but for :func:`newest`."""

import logging
import threading
from collections import Counter
from logging.handlers import BufferingHandler
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from llm_datadist.errors import CacheNotFound, LLMException, NotLinked, PeerLost
from llm_datadist.views import tensor_views
from tests.support.world import World, cluster_info

BLOCKS: Final = 16
STRIDE: Final = 4096
TENSORS: Final = 4
_KIND: Final = CacheDesc(TENSORS, [BLOCKS, STRIDE], DataType.DT_UINT8)
#: What a refusal for the version says; that it may be one is said of any peer that hangs up.
OF_VERSIONS: Final = ("no common protocol version", "wire major is")


def dial(world: World, cluster_id: int, port: int) -> tuple[str, str]:
    """Link to a peer; return the name of the status, and why."""
    _, (code,) = world.dd.link_clusters([cluster_info(cluster_id, port)], 10_000)
    return code.name, str(getattr(code, "error", None) or "")


def told(world: World, peer: int, name: str) -> Any:
    """Return one attribute of what the end says of a link."""
    return getattr(world.dd.explain(peer), name)


def newest(world: World) -> int:
    """Return the newest version that this build speaks."""
    from tests.support.wire import VERSIONS  # a build that is refused has no such module, and is not asked

    return VERSIONS[1]


def listen_to_log(world: World) -> None:
    """Keep all that the library logs from now on; :func:`logged` returns it."""
    world.memory["log"] = BufferingHandler(10_000)
    logging.getLogger("LLM_DATADIST").handlers = [world.memory["log"]]
    logging.getLogger("LLM_DATADIST").setLevel(logging.INFO)


def logged(world: World) -> list[str]:
    return [record.getMessage() for record in world.memory["log"].buffer]


# --- pulls under load, each judged ---
def contents(cluster_id: int) -> NDArray[np.uint8]:
    """Return the bytes of a prompt's cache, in every build: [tensor, block, byte]."""
    return np.random.default_rng(cluster_id).integers(0, 256, (TENSORS, BLOCKS, STRIDE), np.uint8)


def _bytes(cache: Any) -> list[NDArray[np.uint8]]:
    return [view.reshape(-1).view(np.uint8).reshape(BLOCKS, STRIDE) for view in tensor_views(cache)]


def publish(world: World, cluster_id: int, spoilt: bool = False) -> None:
    """Have the cache that all pull from; if ``spoilt``, one byte of a block is not as expected."""
    world.caches["memory"] = cache = world.cm.allocate_blocks_cache(_KIND)
    for tensor, expected in zip(_bytes(cache), contents(cluster_id), strict=True):
        tensor[:] = expected
    if spoilt:
        _bytes(cache)[2][0, -1] ^= 1
    # Only now: decoders pull as soon as there is a cache of this key.
    world.caches["kv"] = world.cm.register_blocks_cache(_KIND, list(cache.tensor_addrs), BlocksCacheKey(cluster_id, 0))


def _pull(world: World, cluster_id: int, port: int) -> None:
    """Pull from one prompt and compare every byte, until told to stop; count what is met, and whose failures are.

    A restarted prompt is for a moment unreachable, then another process without a link, then one without its cache.
    """
    met, over = world.memory["met"][cluster_id], world.memory["over"]
    cache = world.cm.allocate_blocks_cache(_KIND)
    here, there, random = _bytes(cache), contents(cluster_id), np.random.default_rng()
    dial(world, cluster_id, port)  # what fails is met by the pulls
    while not over.wait(0.005):  # so that restarts have the processor too
        src, dst = (random.permutation(BLOCKS)[:6].tolist() for _ in range(2))
        for tensor in here:
            tensor[:] = 0xEE
        try:
            world.cm.pull_blocks(BlocksCacheKey(cluster_id, 0), cache, src, dst)
        except LLMException as error:
            expected_then = isinstance(error, (NotLinked, PeerLost, CacheNotFound))
            met[
                _whose(str(error)) or (f"restart: {type(error).__name__}" if expected_then else f"other: {error!r}")
            ] += 1
            over.wait(0.02)
            if not isinstance(error, CacheNotFound):
                status, text = dial(world, cluster_id, port)
                if status not in ("LLM_SUCCESS", "LLM_ALREADY_LINK"):
                    met[_whose(text) or f"restart: {status} of link_clusters"] += 1
            continue
        expected = np.full_like(there, 0xEE)
        expected[:, dst] = there[:, src]
        met["right" if all(map(np.array_equal, here, expected)) else "wrong"] += 1


def _whose(text: str) -> str:
    return f"version: {text}" if any(words in text for words in OF_VERSIONS) else ""


def pull_all_the_time(world: World, prompts: dict[int, int]) -> None:
    """Link to each of these (cluster id: port), and pull from it in a thread of its own."""
    world.memory |= {"met": {each: Counter() for each in prompts}, "over": threading.Event()}
    world.memory["pulls"] = [threading.Thread(target=_pull, args=(world, *each)) for each in prompts.items()]
    for thread in world.memory["pulls"]:
        thread.start()


def met(world: World) -> list[dict[str, int]]:
    """Return how often the pulls from each prompt have met what: ``right``, ``wrong``, or a failure by whose it is."""
    return [dict(each) for each in world.memory.get("met", {}).values()]


def stop_pulling(world: World) -> list[dict[str, int]]:
    """Stop, if this end pulls; return what the pulls have met."""
    for thread in world.memory.get("pulls", []):
        world.memory["over"].set()
        thread.join(30)
        assert not thread.is_alive(), "a pull does not end"
    return met(world)
