"""sglang, later version: the decoder opens the link, the prompt pushes over it from 12 threads at once.

What the tests themselves add: processes instead of devices, smaller tensors, and the comparison of every byte.
"""

from __future__ import annotations

import json
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    DataType,
    LLMRole,
    LLMStatusCode,
)
from tests.clients.kv import contents, initialised, options, registered, shown
from tests.support.linking import info, links
from tests.support.moves import moved, same_bytes, wait_until

if TYPE_CHECKING:
    from tests.clients.conftest import Processes
    from tests.support.ends import ChildEnd
    from tests.support.world import World

pytestmark = pytest.mark.covers("sglang", "LLMConfig.local_comm_res", "llm.LocalCommRes")

THREADS = 12
WORLD_SIZE, LAYERS = 8, 5
PAGES, PAGE_TOKENS = 96, 16
METADATA_BUFFERS = 32


@dataclass(frozen=True)
class Model:
    """What is registered for it: kinds of buffers, and one page of each as the client shapes it."""

    kinds: int
    page: tuple[int, ...]

    @property
    def page_bytes(self) -> int:
        return int(np.prod(self.page)) * 2


#: K and V of 4 heads; or the latent cache, whose (tokens, 1, dim) buffers are viewed as (pages, page, dim).
MODELS = {"mha": Model(2, (PAGE_TOKENS, 4, 32)), "mla": Model(1, (PAGE_TOKENS, 144))}


def cluster_id(device: int, node: int, prompt: bool) -> int:
    return (device + WORLD_SIZE * node) * 2 + (not prompt)


def local_comm_res(device: int) -> str:
    """Its own rank table: one server, one device, and the super pod it is in."""
    server = {"server_id": "127.0.0.1", "device": [{"device_id": str(device), "device_ip": f"10.0.0.{device + 1}"}]}
    return json.dumps(
        {
            "version": "1.2",
            "server_count": "1",
            "status": "completed",
            "server_list": [server],
            "super_pod_list": [{"super_pod_id": "0", "server_list": [{"server_id": "127.0.0.1"}]}],
        }
    )


def start(world: World, device: int, prompt: bool, model: Model, seed: int) -> int | None:
    """Initialise, register one cache per kind of buffer and the aux buffer; return the listening port."""
    own = cluster_id(device, 0, prompt)
    listen = {"listen_ip_info": "127.0.0.1:0"} if prompt else {}
    given = options(device_id=device, local_comm_res=local_comm_res(device), sync_kv_timeout=20000, **listen)
    world.dd = initialised(LLMRole.PROMPT if prompt else LLMRole.DECODER, own, given)
    caches = []
    for kind in range(model.kinds):
        # One buffer per layer, of tokens; only the registration speaks of pages.
        world.memory[f"kv {kind}"] = contents(seed + kind, LAYERS, PAGES, model.page_bytes)
        key = BlocksCacheKey(own, kind)
        caches.append(registered(world.dd, world.memory[f"kv {kind}"], DataType.DT_FLOAT16, model.page, key))
    world.memory["aux"] = contents(seed + 9, 1, METADATA_BUFFERS, 16 * 4)
    key = BlocksCacheKey(own, model.kinds)
    caches.append(registered(world.dd, world.memory["aux"], DataType.DT_INT32, [16], key))
    world.memory["caches"] = caches
    return world.dd.listen_port


def link_once(world: World, ports: list[int]) -> None:
    """The decoder's part: one cluster info per prompt, with nothing in it but where the prompt listens."""
    for port in ports:
        status, _ = world.dd.link_clusters([info(None, port, local=None)], 20000)
        if status != LLMStatusCode.LLM_SUCCESS:
            raise RuntimeError(f"link: {status}")


@dataclass(frozen=True)
class Chunk:
    """Pages of one request on their way; the last chunk takes the aux row with it."""

    room: int
    dst_cluster: int
    src: list[int]
    dst: list[int]
    aux: tuple[int, int] | None = None


class Sender:
    """The prompt's 12 threads, one queue each; a room always goes to the same one."""

    def __init__(self, world: World, model: Model) -> None:
        self._world, self._model = world, model
        self._queues: list[queue.Queue[Chunk | None]] = [queue.Queue() for _ in range(THREADS)]
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in self._queues]
        self.started = threading.Barrier(THREADS)
        self.errors: list[BaseException] = []

    def send(self, chunks: list[Chunk]) -> None:
        """Queue all, push all."""
        for chunk in chunks:
            self._queues[chunk.room % THREADS].put(chunk)
        for each in self._queues:
            each.put(None)
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()

    def _run(self, chunks: queue.Queue[Chunk | None]) -> None:
        self.started.wait()
        try:
            while (chunk := chunks.get()) is not None:
                self._push(chunk)
        except BaseException as error:  # noqa: BLE001 (carried to the test)
            self.errors.append(error)

    def _push(self, chunk: Chunk) -> None:
        cache_manager, caches = self._world.cm, self._world.memory["caches"]
        src, dst = np.array(chunk.src, np.int32).tolist(), np.array(chunk.dst, np.int32).tolist()
        for i in range(self._model.kinds):
            key = BlocksCacheKey(chunk.dst_cluster, i)
            cache_manager.push_blocks(key, caches[i], src, dst, range(LAYERS), range(LAYERS), 1)
        if chunk.aux is not None:
            key = BlocksCacheKey(chunk.dst_cluster, self._model.kinds)
            aux, dst_aux = chunk.aux
            cache_manager.push_blocks(key, caches[-1], [aux], [dst_aux], range(1), range(1), 1)


def push_all(world: World, model: Model, chunks: list[Chunk]) -> None:
    sender = Sender(world, model)
    sender.send(chunks)
    for error in sender.errors:
        raise error


def requests(prompt: int, decoders: list[int], seed: int) -> list[Chunk]:
    """24 rooms of one to four pages in chunks of two; no page or aux row of a decoder is written twice."""
    random = np.random.default_rng(seed)
    free = {cluster: list(random.permutation(range(prompt, PAGES, 2))) for cluster in decoders}
    chunks = []
    for room in range(24):
        cluster = decoders[room % len(decoders)]
        count = int(random.integers(1, 5))
        src = random.integers(0, PAGES, count).tolist()  # a shared prefix is a page of several requests
        dst = [int(free[cluster].pop()) for _ in range(count)]
        aux = (room, 16 * prompt + room // 2)  # the two decoders take turns: 12 rooms of each
        parts = [(src[at : at + 2], dst[at : at + 2]) for at in range(0, count, 2)]
        chunks += [Chunk(room, cluster, *part, aux if part is parts[-1] else None) for part in parts]
    return chunks


@pytest.mark.parametrize("name", MODELS)
def test_twelve_threads_push_over_the_links_that_the_decoders_opened(processes: Processes, name: str) -> None:
    model = MODELS[name]
    prompts = [processes.born(f"prompt {device}") for device in range(2)]
    decoders = [processes.born(f"decoder {device}") for device in range(2)]
    ports: list[Any] = [end.do(start, device, True, model, 1000 + 10 * device) for device, end in enumerate(prompts)]
    # No enable_* is set anywhere in this client: local_comm_res turns both modes on.
    assert prompts[0].do(modes) == (True, True)
    for device, end in enumerate(decoders):
        end.do(start, device, False, model, 2000 + 10 * device)
        end.do(link_once, ports)
        assert end.do(links) == {0: "ready", 2: "ready"}, "the ids were learned"
    for end in prompts:
        wait_until(lambda end=end: end.do(links) == {1: "ready", 3: "ready"})  # type: ignore[misc]

    sent = [requests(device, [1, 3], seed=device) for device in range(2)]
    for end, chunks in zip(prompts, sent, strict=True):
        end.begin(push_all, model, chunks)
    for end in prompts:
        end.finish()

    for device, end in enumerate(decoders):
        everything_arrived(end, model, device, sent)
    for device, end in enumerate(prompts):
        for kind in range(model.kinds):
            expected = contents(1000 + 10 * device + kind, LAYERS, PAGES, model.page_bytes)
            same_bytes(end.do(shown, f"kv {kind}"), expected)


def everything_arrived(end: ChildEnd, model: Model, device: int, sent: list[list[Chunk]]) -> None:
    """Every byte of every cache of a decoder: what was pushed to it, and what was there before everywhere else."""
    mine = [(prompt, chunk) for prompt, chunks in enumerate(sent) for chunk in chunks]
    mine = [(prompt, chunk) for prompt, chunk in mine if chunk.dst_cluster == cluster_id(device, 0, False)]
    assert len(mine) > 20
    for kind in range(model.kinds):
        expected = contents(2000 + 10 * device + kind, LAYERS, PAGES, model.page_bytes)
        for prompt, chunk in mine:
            source = contents(1000 + 10 * prompt + kind, LAYERS, PAGES, model.page_bytes)
            expected = moved(expected, source, zip(chunk.dst, chunk.src, strict=True))
        same_bytes(end.do(shown, f"kv {kind}"), expected)
    expected = contents(2000 + 10 * device + 9, 1, METADATA_BUFFERS, 64)
    for prompt, chunk in mine:
        if chunk.aux is not None:
            source = contents(1000 + 10 * prompt + 9, 1, METADATA_BUFFERS, 64)
            expected = moved(expected, source, [(chunk.aux[1], chunk.aux[0])])
    same_bytes(end.do(shown, "aux"), expected)


def modes(world: World) -> tuple[bool, bool]:
    assert world.dd._engine is not None
    return world.dd._engine.options.cache_manager, world.dd._engine.options.remote_accessible
