"""What all clients have in common: remote access, one blocks cache per model id, many links, any list.

24 prompts in three processes, four model ids with the tensor counts of real models, two decoders.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)
from tests.clients.kv import addresses, contents, shown
from tests.support.moves import moved, same_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.clients.conftest import Processes
    from tests.support.ends import ChildEnd
    from tests.support.world import World

pytestmark = pytest.mark.covers("what all have in common")

#: Tensors and bytes of a block, by model id: K and V of 32 layers; an odd number of layers; quantised K; an index.
MODELS = ((64, 256), (61, 144), (61, 96), (1, 64))
BLOCKS = 64
PROCESSES, EACH = 3, 8
PROMPTS = PROCESSES * EACH
FIRST_ID = 2**63 + 11  # all of uint64 is in use
DECODER_ID = 2**64 - 2


def options(**settings: Any) -> dict[str, str]:
    """As every client makes them: properties first, then raw strings written into the dict."""
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.sync_kv_timeout = 33000
    for name, value in settings.items():
        setattr(config, name, value)
    made = config.generate_options()
    made["llm.RdmaServiceLevel"] = "4"
    made["llm.RdmaTrafficClass"] = "132"
    return made


def seed(prompt: int, model_id: int) -> int:
    return 1000 + 10 * prompt + model_id


def registered(dd: LLMDataDist, model_id: int, tensors: Any, key: BlocksCacheKey | None) -> Any:
    count, nbytes = MODELS[model_id]
    desc = CacheDesc(num_tensors=count, shape=[BLOCKS, nbytes // 2], data_type=DataType.DT_FLOAT16)
    return dd.cache_manager.register_blocks_cache(desc, addresses(tensors), key)


def start_prompts(world: World, process: int) -> list[int | None]:
    """Several prompts in one process (interface R20), each with a cache of its own per model id."""
    ports = []
    world.memory["prompts"] = []
    for prompt in range(process * EACH, (process + 1) * EACH):
        dd = LLMDataDist(LLMRole.PROMPT, FIRST_ID + prompt)
        dd.init(options(listen_ip_info="127.0.0.1:0"))
        for model_id, (count, nbytes) in enumerate(MODELS):
            name = f"{prompt} {model_id}"
            world.memory[name] = contents(seed(prompt, model_id), count, BLOCKS, nbytes)
            registered(dd, model_id, world.memory[name], BlocksCacheKey(FIRST_ID + prompt, model_id))
        world.memory["prompts"].append(dd)
        ports.append(dd.listen_port)
    return ports


def finalize_prompts(world: World) -> None:
    for dd in world.memory["prompts"]:
        dd.check_integrity()
        dd.finalize()
    world.memory.clear()


def start_decoder(world: World) -> None:
    world.dd = LLMDataDist(LLMRole.DECODER, DECODER_ID)
    made = options()
    world.dd.init(made)
    assert type(made) is dict
    assert made == options()  # read, not changed: clients keep it and pass it again
    world.memory["caches"] = []
    for model_id, (count, nbytes) in enumerate(MODELS):
        world.memory[f"own {model_id}"] = contents(model_id, count, BLOCKS, nbytes)
        world.memory["caches"].append(registered(world.dd, model_id, world.memory[f"own {model_id}"], None))


def clusters(ports: list[int]) -> list[LLMClusterInfo]:
    made = []
    for prompt, port in enumerate(ports):
        cluster = LLMClusterInfo()
        cluster.remote_cluster_id = FIRST_ID + prompt
        cluster.append_local_ip_info("127.0.0.1", 0)
        cluster.append_remote_ip_info("127.0.0.1", port)
        made.append(cluster)
    return made


def link_all(world: World, ports: list[int]) -> None:
    status, each = world.dd.link_clusters(clusters(ports), timeout=20000)
    assert (status, set(each), len(each)) == (LLMStatusCode.LLM_SUCCESS, {LLMStatusCode.LLM_SUCCESS}, len(ports))


def force_unlink_all(world: World, ports: list[int]) -> None:
    status, _ = world.dd.unlink_clusters(clusters(ports), timeout=5000, force=True)
    assert status == LLMStatusCode.LLM_SUCCESS
    assert world.dd.statistics().links == ()


Request = tuple[int, list[int], list[int]]
"""Prompt, its blocks, ours."""


def pull_requests(world: World, requests: list[Request], threads: int) -> None:
    """Threads take the requests by turns; one pull per model id and request, positional, default layers."""
    errors: list[BaseException] = []

    def run(mine: list[Request]) -> None:
        try:
            for prompt, src, dst in mine:
                for model_id, cache in enumerate(world.memory["caches"]):
                    world.cm.pull_blocks(BlocksCacheKey(FIRST_ID + prompt, model_id), cache, src, dst)
        except BaseException as error:  # noqa: BLE001 (carried to the test)
            errors.append(error)

    runners = [threading.Thread(target=run, args=(requests[at::threads],)) for at in range(threads)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    for error in errors:
        raise error


def everything_is_as_pulled(decoder: ChildEnd, requests: list[Request]) -> None:
    for model_id, (count, nbytes) in enumerate(MODELS):
        expected = contents(model_id, count, BLOCKS, nbytes)
        for prompt, src, dst in requests:
            source = contents(seed(prompt, model_id), count, BLOCKS, nbytes)
            expected = moved(expected, source, zip(dst, src, strict=True))
        same_bytes(decoder.do(shown, f"own {model_id}"), expected)


@pytest.fixture
def scene(processes: Processes) -> Any:
    """The decoder's process, and the listening ports of 24 prompts in three more; all links are up."""
    prompts = [processes.born(f"prompts {each}") for each in range(PROCESSES)]
    ports = [port for process, end in enumerate(prompts) for port in end.do(start_prompts, process)]
    decoder = processes.born("decoder")
    decoder.do(start_decoder)
    decoder.do(link_all, ports)
    yield decoder, ports
    for end in prompts:
        end.do(finalize_prompts)


def one_request_of_each_prompt(random: np.random.Generator) -> list[Request]:
    """Disjoint blocks of ours, two or three for each prompt; theirs in any order, some of them several times."""
    ours = random.permutation(BLOCKS).tolist()
    requests = []
    for prompt in range(PROMPTS):
        dst = [ours.pop() for _ in range(2 + (prompt % 3 == 0))]
        requests.append((prompt, random.integers(0, BLOCKS, len(dst)).tolist(), dst))
    return requests


@pytest.mark.parametrize("threads", [1, 12])
def test_a_decoder_with_24_links_pulls_from_all_of_them_and_again_after_linking_anew(scene: Any, threads: int) -> None:
    decoder, ports = scene
    random = np.random.default_rng(threads)
    requests = one_request_of_each_prompt(random)
    decoder.do(pull_requests, requests, threads)
    everything_is_as_pulled(decoder, requests)
    decoder.do(force_unlink_all, ports)
    decoder.do(link_all, ports)
    decoder.do(pull_requests, requests[::-1], threads)
    everything_is_as_pulled(decoder, requests)


LISTS: dict[str, Callable[[np.random.Generator], tuple[list[int], list[int]]]] = {
    "one block": lambda random: ([17], [3]),
    "the whole cache": lambda random: (list(range(BLOCKS)), list(range(BLOCKS))),
    "the whole cache backwards": lambda random: (list(range(BLOCKS)), list(range(BLOCKS))[::-1]),
    "short runs": lambda random: ([8, 9, 10, 40, 41, 5, 60, 61, 62, 63], [20, 21, 22, 2, 3, 9, 50, 51, 52, 53]),
    "every second one": lambda random: (list(range(0, BLOCKS, 2)), list(range(1, BLOCKS, 2))),
    "scattered": lambda random: (random.permutation(BLOCKS).tolist(), random.permutation(BLOCKS).tolist()),
    "the last ones of a longer list": lambda random: (list(range(40))[-7:], [0, 9, 1, 8, 2, 7, 3]),
    "one block many times": lambda random: ([5] * 30, random.permutation(BLOCKS).tolist()[:30]),
    "a block written twice: the last wins": lambda random: ([1, 2, 3, 2], [6, 7, 6, 8]),
    "300 blocks": lambda random: (random.integers(0, BLOCKS, 300).tolist(), random.integers(0, BLOCKS, 300).tolist()),
}


def test_arbitrary_block_lists(scene: Any) -> None:
    decoder, _ = scene
    random = np.random.default_rng(7)
    requests = [(at % PROMPTS, *make(random)) for at, make in enumerate(LISTS.values())]
    for at, name in enumerate(LISTS):
        decoder.do(pull_requests, [requests[at]], 1)
        try:
            everything_is_as_pulled(decoder, requests[: at + 1])
        except AssertionError as error:
            error.add_note(name)
            raise


def written_by_hand(listen: str | None) -> dict[str, str]:
    """An options dict without LLMConfig, as the older clients write it, with the two flags of this mode."""
    made = {
        "llm.SyncKvCacheWaitTime": "5000",
        "ge.exec.deviceId": str(0),
        "llm.EnableCacheManager": "1",
        "llm.EnableRemoteCacheAccessible": "1",
    }
    if listen is not None:
        made["llm.listenIpInfo"] = listen
    return made


def start_by_hand(world: World, prompt: bool) -> int | None:
    own = FIRST_ID if prompt else DECODER_ID
    world.dd = LLMDataDist(LLMRole.PROMPT if prompt else LLMRole.MIX, own)
    world.dd.init(written_by_hand("127.0.0.1:0" if prompt else None))
    count, nbytes = MODELS[0]
    world.memory["kv"] = contents(seed(0, 0) if prompt else 0, count, BLOCKS, nbytes)
    world.memory["caches"] = [registered(world.dd, 0, world.memory["kv"], BlocksCacheKey(own, 0) if prompt else None)]
    return world.dd.listen_port


def test_an_options_dict_written_by_hand(processes: Processes) -> None:
    prompt, decoder = processes.born("prompt"), processes.born("decoder")
    port: Any = prompt.do(start_by_hand, True)
    decoder.do(start_by_hand, False)
    decoder.do(link_all, [port])
    decoder.do(pull_requests, [(0, [4, 9], [9, 4])], 1)
    count, nbytes = MODELS[0]
    before, source = contents(0, count, BLOCKS, nbytes), contents(seed(0, 0), count, BLOCKS, nbytes)
    same_bytes(decoder.do(shown, "kv"), moved(before, source, [(9, 4), (4, 9)]))
