"""What all clients have in common: remote access, one blocks cache per model id, many links, any list.

24 prompts in three processes, four model ids with the tensor counts of real models, a decoder.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, DataType, LLMRole
from tests.clients.kv import contents, initialised, registered, same_kinds, shown, succeeded
from tests.clients.kv import options as made
from tests.support.linking import SUCCESS, info
from tests.support.moves import moved

if TYPE_CHECKING:
    from llm_datadist import LLMClusterInfo
    from tests.support.family import Processes
    from tests.support.world import World

pytestmark = pytest.mark.covers("what all have in common")

#: Tensors and bytes of a block, by model id: K and V of 32 layers; an odd number of layers; quantised K; an index.
MODELS = ((64, 256), (61, 144), (61, 96), (1, 64))
BLOCKS = 64
PROCESSES, EACH = 3, 8
PROMPTS = PROCESSES * EACH
FIRST_ID = 2**63 + 11  # all of uint64 is in use
DECODER_ID = 2**64 - 2

#: Prompt, its blocks, ours.
Request = tuple[int, list[int], list[int]]


def options(**listen: str) -> dict[str, str]:
    """As every client makes them: properties first, then raw strings written into the dict."""
    given = made(enable_cache_manager=True, enable_remote_cache_accessible=True, sync_kv_timeout=33000, **listen)
    return given | {"llm.RdmaServiceLevel": "4", "llm.RdmaTrafficClass": "132"}


#: Without LLMConfig, as the older clients write it, with the two flags of this mode.
BY_HAND = {
    "llm.SyncKvCacheWaitTime": "5000",
    "ge.exec.deviceId": "0",
    "llm.EnableCacheManager": "1",
    "llm.EnableRemoteCacheAccessible": "1",
    "llm.listenIpInfo": "127.0.0.1:0",
}


def kv(seed: int) -> list[list[Any]]:
    """The tensors of every model id of a prompt; the decoder's have seed -1."""
    return [contents(1000 + 10 * seed + at, count, BLOCKS, nbytes) for at, (count, nbytes) in enumerate(MODELS)]


def start_prompts(world: World, process: int) -> list[int | None]:
    """Several prompts in one process (interface R20), each with a cache of its own per model id."""
    world.memory["prompts"] = prompts = []
    for prompt in range(process * EACH, (process + 1) * EACH):
        own = FIRST_ID + prompt
        dd = initialised(LLMRole.PROMPT, own, BY_HAND if prompt % 2 else options(listen_ip_info="127.0.0.1:0"))
        world.memory[f"kv {prompt}"] = kv(prompt)
        for model_id, tensors in enumerate(world.memory[f"kv {prompt}"]):
            block = [MODELS[model_id][1] // 2]
            registered(dd, tensors, DataType.DT_FLOAT16, block, BlocksCacheKey(own, model_id))
        prompts.append(dd)
    return [dd.listen_port for dd in prompts]


def finalize_prompts(world: World) -> None:
    for dd in world.memory["prompts"]:
        dd.check_integrity()
        dd.finalize()
    world.memory.clear()


def start_decoder(world: World) -> None:
    given = options()
    world.dd = initialised(LLMRole.DECODER, DECODER_ID, given)
    assert type(given) is dict
    assert given == options()  # read, not changed: clients keep it and pass it again
    world.memory["kv"] = kv(-1)
    world.memory["caches"] = [
        registered(world.dd, tensors, DataType.DT_FLOAT16, [nbytes // 2], None)
        for tensors, (_, nbytes) in zip(world.memory["kv"], MODELS, strict=True)
    ]


def all_of(ports: list[int]) -> list[LLMClusterInfo]:
    return [info(FIRST_ID + prompt, port) for prompt, port in enumerate(ports)]


def link_all(world: World, ports: list[int]) -> None:
    assert world.dd.link_clusters(all_of(ports), timeout=20000) == (SUCCESS[0], SUCCESS[1] * len(ports))


def force_unlink_all(world: World, ports: list[int]) -> None:
    status, _ = world.dd.unlink_clusters(all_of(ports), timeout=5000, force=True)
    succeeded("unlink", status)
    assert world.dd.statistics().links == ()


def pull_requests(world: World, requests: list[Request], threads: int) -> None:
    """Threads take the requests by turns; one pull per model id and request, positional, default layers."""

    def pull(request: Request) -> None:
        prompt, src, dst = request
        for model_id, cache in enumerate(world.memory["caches"]):
            world.cm.pull_blocks(BlocksCacheKey(FIRST_ID + prompt, model_id), cache, src, dst)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(pull, requests))


def one_request_of_each_prompt(random: np.random.Generator) -> list[Request]:
    """Disjoint blocks of ours, two or three for each prompt; theirs in any order, some of them several times."""
    ours = random.permutation(BLOCKS).tolist()
    requests = []
    for prompt in range(PROMPTS):
        dst = [ours.pop() for _ in range(2 + (prompt % 3 == 0))]
        requests.append((prompt, random.integers(0, BLOCKS, len(dst)).tolist(), dst))
    return requests


def lists(random: np.random.Generator) -> dict[str, tuple[list[int], list[int]]]:
    every, scattered = list(range(BLOCKS)), random.permutation(BLOCKS).tolist()
    return {
        "the whole cache backwards": (every, every[::-1]),
        "short runs": ([8, 9, 10, 40, 41, 5, 60, 61, 62, 63], [20, 21, 22, 2, 3, 9, 50, 51, 52, 53]),
        "every second one": (every[::2], every[1::2]),
        "scattered": (scattered, random.permutation(BLOCKS).tolist()),
        "the last ones of a longer list": (every[33:40], [0, 9, 1, 8, 2, 7, 3]),
        "one block many times": ([5] * 30, scattered[:30]),
        "a block written twice: the last wins": ([1, 2, 3, 2], [6, 7, 6, 8]),
        "300 blocks": (random.integers(0, BLOCKS, 300).tolist(), random.integers(0, BLOCKS, 300).tolist()),
    }


def test_a_decoder_with_24_links_pulls_from_all_of_them_and_again_after_linking_anew_any_list(
    processes: Processes,
) -> None:
    prompts = [processes.child(f"prompts {each}") for each in range(PROCESSES)]
    ports = [port for process, end in enumerate(prompts) for port in end.do(start_prompts, process)]
    decoder = processes.child("decoder")
    decoder.do(start_decoder)
    random, expected = np.random.default_rng(1), kv(-1)

    def pulled(requests: list[Request], threads: int, name: str) -> None:
        decoder.do(pull_requests, requests, threads)
        for prompt, src, dst in requests:
            for model_id, source in enumerate(kv(prompt)):
                expected[model_id] = moved(expected[model_id], source, zip(dst, src, strict=True))
        try:
            same_kinds(decoder.do(shown, "kv"), expected)
        except AssertionError as error:
            error.add_note(name)
            raise

    for threads in (1, 12):
        decoder.do(link_all, ports)
        pulled(one_request_of_each_prompt(random), threads, f"{threads} threads")
        decoder.do(force_unlink_all, ports)
    decoder.do(link_all, ports)
    for at, (name, (src, dst)) in enumerate(lists(random).items()):
        pulled([(at % PROMPTS, src, dst)], 1, name)
    for end in prompts:
        end.do(finalize_prompts)
