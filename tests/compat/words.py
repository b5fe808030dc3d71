"""What the tests with two builds send to an end. All ends have this text, whatever their build: it
asks what is public, but for :func:`newest`."""

import logging
import threading
from dataclasses import dataclass, field
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
OF_VERSIONS: Final = ("no common protocol version", "greetings have wire major")


def dial(world: World, cluster_id: int, port: int) -> tuple[str, str]:
    """Link to a peer; return the name of the status, and why."""
    _, (code,) = world.dd.link_clusters([cluster_info(cluster_id, port)], 10_000)
    return code.name, str(getattr(code, "error", None) or "")


def told(world: World, peer: int, name: str) -> Any:
    """Return one attribute of what the end says of a link."""
    return getattr(world.dd.explain(peer), name)


def newest(world: World) -> int:
    """Return the newest version that this build speaks."""
    from llm_datadist._links.versions import VERSIONS

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


@dataclass
class Met:
    """What pulls met: how many were right, wrong bytes, and failures by whose they are."""

    right: int = 0
    wrong_bytes: int = 0
    restarts: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


class Judge(threading.Thread):
    """Pulls from one prompt and compares every byte, until told to stop.

    A restarted prompt is for a moment unreachable, then another process without a link, then one without its cache.
    """

    def __init__(self, world: World, cluster_id: int, port: int) -> None:
        super().__init__(name="pulls")
        self.met = Met()
        self.over = threading.Event()
        self._world, self._prompt = world, (cluster_id, port)

    def run(self) -> None:
        cache = self._world.cm.allocate_blocks_cache(_KIND)
        here, there = _bytes(cache), contents(self._prompt[0])
        random = np.random.default_rng()
        while not self.over.wait(0.005):  # so that restarts have the processor too
            src, dst = (random.permutation(BLOCKS)[:6].tolist() for _ in range(2))
            for tensor in here:
                tensor[:] = 0xEE
            try:
                self._world.cm.pull_blocks(BlocksCacheKey(self._prompt[0], 0), cache, src, dst)
            except LLMException as error:
                self._judge(error)
                continue
            expected = np.full_like(there, 0xEE)
            expected[:, dst] = there[:, src]
            wrong = sum(int(np.count_nonzero(got != wanted)) for got, wanted in zip(here, expected, strict=True))
            self.met.wrong_bytes += wrong
            self.met.right += not wrong

    def _judge(self, error: LLMException) -> None:
        """Count a failure as the version's, a restart's or another; link again."""
        if any(words in str(error) for words in OF_VERSIONS):
            self.met.versions.append(str(error))
        elif isinstance(error, (NotLinked, PeerLost, CacheNotFound)):
            self.met.restarts.append(type(error).__name__)
        else:
            self.met.others.append(repr(error))
        self.over.wait(0.02)
        if isinstance(error, CacheNotFound):
            return
        status, text = dial(self._world, *self._prompt)
        if any(words in text for words in OF_VERSIONS):
            self.met.versions.append(text)
        elif status not in ("LLM_SUCCESS", "LLM_ALREADY_LINK"):
            self.met.restarts.append(f"{status} of link_clusters")


def pull_all_the_time(world: World, prompts: dict[int, int]) -> None:
    """Link to each of these (cluster id: port), and pull from it in a thread of its own."""
    world.memory["judges"] = {each: Judge(world, each, port) for each, port in prompts.items()}
    for cluster_id, judge in world.memory["judges"].items():
        dial(world, cluster_id, prompts[cluster_id])  # what fails is judged by the pulls
        judge.start()


def met(world: World) -> dict[int, Met]:
    """Return what the pulls from each prompt have met so far."""
    return {cluster_id: each.met for cluster_id, each in world.memory.get("judges", {}).items()}


def stop_pulling(world: World) -> dict[int, Met]:
    """Stop, if this end pulls; return what the pulls have met."""
    judges: list[Judge] = list(world.memory.get("judges", {}).values())
    for judge in judges:
        judge.over.set()
    for judge in judges:
        judge.join(30)
        assert not judge.is_alive(), "a pull does not end"
    return met(world)
