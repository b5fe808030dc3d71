"""sglang, later version: the decoder opens the link, the prompt pushes over it from 12 threads at once.
Here with processes instead of devices, smaller tensors, and a comparison of every byte."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, DataType, LLMRole
from tests.clients.kv import contents, initialised, options, rank_table, registered, same_kinds, shown, succeeded
from tests.support.linking import info, links
from tests.support.moves import moved, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.family import Processes
    from tests.support.world import World

pytestmark = pytest.mark.covers("sglang", "LLMConfig.local_comm_res", "llm.LocalCommRes")

THREADS = 12
LAYERS, PAGES, METADATA_BUFFERS = 5, 96, 32

#: Kinds of buffers, and one page of each: K and V of 4 heads; or the latent cache, whose (tokens, 1, dim) buffers are
#: viewed as (pages, page, dim). Only the registration speaks of pages.
Model = tuple[int, tuple[int, ...]]
MODELS: dict[str, Model] = {"mha": (2, (16, 4, 32)), "mla": (1, (16, 144))}


def held(model: Model, seed: int) -> list[Any]:
    """The buffers of each kind, one per layer, and the aux buffer."""
    kinds, page = model
    kv = [contents(seed + kind, LAYERS, PAGES, prod(page) * 2) for kind in range(kinds)]
    return [*kv, contents(seed + 9, 1, METADATA_BUFFERS, 16 * 4)]


def start(world: World, device: int, prompt: bool, model: Model, seed: int) -> int | None:
    """Initialise, register one cache per kind of buffer and the aux buffer; return the listening port.

    No enable_* is set anywhere in this client: local_comm_res, its own rank table, turns both modes on.
    """
    own = device * 2 + (not prompt)
    listen = {"listen_ip_info": "127.0.0.1:0"} if prompt else {}
    devices = [("127.0.0.1", {"device_id": str(device), "device_ip": f"10.0.0.{device + 1}"})]
    table = rank_table(devices, "1.2", ["0"])
    given = options(device_id=device, local_comm_res=table, sync_kv_timeout=20000, **listen)
    world.dd = initialised(LLMRole.PROMPT if prompt else LLMRole.DECODER, own, given)
    world.memory["kv"] = held(model, seed)
    types = [(DataType.DT_FLOAT16, model[1])] * model[0] + [(DataType.DT_INT32, (16,))]
    world.memory["caches"] = [
        registered(world.dd, tensors, data_type, shape, BlocksCacheKey(own, kind))
        for kind, (tensors, (data_type, shape)) in enumerate(zip(world.memory["kv"], types, strict=True))
    ]
    return world.dd.listen_port


def link_once(world: World, ports: list[int]) -> None:
    """The decoder's part: one cluster info per prompt, with nothing in it but where the prompt listens."""
    for port in ports:
        status, _ = world.dd.link_clusters([info(None, port, local=None)], 20000)
        succeeded("link", status)


class Chunk(NamedTuple):
    """Pages of one request on their way; the last chunk takes the aux row with it."""

    room: int
    dst_cluster: int
    src: list[int]
    dst: list[int]
    aux: tuple[int, int] | None = None


def push_all(world: World, kinds: int, chunks: list[Chunk]) -> None:
    """Push from 12 threads; the chunks of a room always go to the same one."""
    started = threading.Barrier(THREADS)

    def run(thread: int) -> None:
        started.wait()
        for chunk in chunks:
            if chunk.room % THREADS == thread:
                push(chunk)

    def push(chunk: Chunk) -> None:
        caches = world.memory["caches"]
        for i in range(kinds):
            key = BlocksCacheKey(chunk.dst_cluster, i)
            world.cm.push_blocks(key, caches[i], chunk.src, chunk.dst, range(LAYERS), range(LAYERS), 1)
        if chunk.aux is not None:
            key = BlocksCacheKey(chunk.dst_cluster, kinds)
            aux, dst_aux = chunk.aux
            world.cm.push_blocks(key, caches[-1], [aux], [dst_aux], range(1), range(1), 1)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run, range(THREADS)))


def requests(prompt: int, decoders: list[int]) -> Iterator[Chunk]:
    """24 rooms of one to four pages in chunks of two; no page or aux row of a decoder is written twice."""
    random = np.random.default_rng(prompt)
    free = {cluster: random.permutation(range(prompt, PAGES, 2)).tolist() for cluster in decoders}
    for room in range(24):
        cluster = decoders[room % len(decoders)]
        count = int(random.integers(1, 5))
        src = random.integers(0, PAGES, count).tolist()  # a shared prefix is a page of several requests
        dst = [free[cluster].pop() for _ in range(count)]
        aux = (room, 16 * prompt + room // 2)  # the two decoders take turns: 12 rooms of each
        for at in range(0, count, 2):
            yield Chunk(room, cluster, src[at : at + 2], dst[at : at + 2], aux if at + 2 >= count else None)


@pytest.mark.parametrize("name", MODELS)
def test_twelve_threads_push_over_the_links_that_the_decoders_opened(processes: Processes, name: str) -> None:
    model = MODELS[name]
    prompts, decoders = ([processes.child(f"{role} {device}") for device in range(2)] for role in ("prompt", "decoder"))
    ports = [end.do(start, device, True, model, 1000 + 10 * device) for device, end in enumerate(prompts)]
    for device, end in enumerate(decoders):
        end.do(start, device, False, model, 2000 + 10 * device)
        end.do(link_once, ports)
        assert end.do(links) == {0: "ready", 2: "ready"}, "the ids were learned"
    for end in prompts:
        wait_until(lambda end=end: end.do(links) == {1: "ready", 3: "ready"})  # type: ignore[misc]

    sent = [list(requests(device, [1, 3])) for device in range(2)]
    for end, chunks in zip(prompts, sent, strict=True):
        end.begin(push_all, model[0], chunks)
    for end in prompts:
        end.finish()

    # Every byte of every cache: what was pushed to a decoder, and what was there before everywhere else.
    for device, end in enumerate(decoders):
        expected = held(model, 2000 + 10 * device)
        for prompt, chunks in enumerate(sent):
            *kv, aux = held(model, 1000 + 10 * prompt)
            for chunk in chunks:
                if chunk.dst_cluster == 2 * device + 1:
                    for kind, source in enumerate(kv):
                        expected[kind] = moved(expected[kind], source, zip(chunk.dst, chunk.src, strict=True))
                    if chunk.aux is not None:
                        expected[-1] = moved(expected[-1], aux, [chunk.aux[::-1]])
        same_kinds(end.do(shown, "kv"), expected)
    for device, end in enumerate(prompts):
        same_kinds(end.do(shown, "kv"), held(model, 1000 + 10 * device))
