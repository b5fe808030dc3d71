"""sglang, later version: the decoder opens the link, the prompt pushes over it from 12 threads at once.
Here with processes instead of devices, smaller tensors, and a comparison of every byte."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, DataType
from tests.clients.kv import Kind, holds, kv, options, play, rank_table
from tests.support.kinds import Processes, World
from tests.support.linking import info, links
from tests.support.moves import moved, same_bytes, wait_until

pytestmark = pytest.mark.covers("sglang", "LLMConfig.local_comm_res", "llm.LocalCommRes")

THREADS = 12
PAGES = 96
AUX = Kind(1, 32, (16,), DataType.DT_INT32)
#: Kinds of buffers, and one page of each: K and V of 4 heads; or the latent cache, whose (tokens, 1, dim) buffers are
#: viewed as (pages, page, dim). Only the registration speaks of pages.
MODELS = {"mha": [*[Kind(5, PAGES, (16, 4, 32))] * 2, AUX], "mla": [Kind(5, PAGES, (16, 144)), AUX]}


class Chunk(NamedTuple):
    """Pages of one request on their way; the last chunk takes the aux row with it."""

    room: int
    dst_cluster: int
    src: list[int]
    dst: list[int]
    aux: tuple[int, int] | None = None


def push_all(world: World, chunks: list[Chunk]) -> None:
    """Push from 12 threads; the chunks of a room always go to the same one."""
    started, caches = threading.Barrier(THREADS), world.memory["instances"][world.dd.cluster_id][1]["caches"]

    def run(thread: int) -> None:
        started.wait()
        for chunk in chunks:
            if chunk.room % THREADS == thread:
                push(chunk)

    def push(chunk: Chunk) -> None:
        for i, cache in enumerate(caches[:-1]):
            key = BlocksCacheKey(chunk.dst_cluster, i)
            world.cm.push_blocks(key, cache, chunk.src, chunk.dst, range(5), range(5), 1)
        if chunk.aux is not None:
            key = BlocksCacheKey(chunk.dst_cluster, len(caches) - 1)
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
    """No enable_* is set anywhere in this client: local_comm_res, its own rank table, turns both modes on."""
    kinds, everyone, ports = MODELS[name], [], []
    for own in (0, 2, 1, 3):  # twice the device; a decoder's is odd
        prompt, device = own % 2 == 0, own // 2
        everyone.append(end := processes.child(f"{'prompt' if prompt else 'decoder'} {device}"))
        devices = [("127.0.0.1", {"device_id": f"{device}", "device_ip": f"10.0.0.{device + 1}"})]
        listen = {"listen_ip_info": "127.0.0.1:0"} if prompt else {}
        table = rank_table(devices, "1.2", ["0"])
        given = options(device_id=device, local_comm_res=table, sync_kv_timeout=20000, **listen)
        port = play((end, "start", "PROMPT" if prompt else "DECODER", own, given, kinds, 1000 * own, True))
        if prompt:
            ports.append(port)
    prompts, decoders = everyone[:2], everyone[2:]
    for end in decoders:  # nothing in a cluster info but where the prompt listens
        for port in ports:
            play((end, "link_clusters", [info(None, port, local=None)], 20000))
        assert end.do(links) == {0: "ready", 2: "ready"}, "the ids were learned"
    for end in prompts:
        wait_until(lambda end=end: end.do(links) == {1: "ready", 3: "ready"})  # type: ignore[misc]
    sent = [list(requests(device, [1, 3])) for device in range(2)]
    for end, chunks in zip(prompts, sent, strict=True):
        end.begin(push_all, chunks)
    for end in prompts:
        end.finish()
    # Every byte of every cache: what was pushed to a decoder, and what was there before everywhere else.
    for own, end in zip((1, 3), decoders, strict=True):
        for kind, (each, found) in enumerate(zip(kinds, end.do(kv), strict=True)):
            expected = each.held(1000 * own + kind)
            for number, chunks in enumerate(sent):
                source = each.held(2000 * number + kind)
                for chunk in (chunk for chunk in chunks if chunk.dst_cluster == own):
                    pairs = list(zip(chunk.dst, chunk.src, strict=True))
                    if each is AUX:
                        pairs = [] if chunk.aux is None else [chunk.aux[::-1]]
                    expected = moved(expected, source, pairs)
            same_bytes(found, expected)
    for number, end in enumerate(prompts):
        holds(end, kinds, 2000 * number)
