"""xllm: C++ calls only, two options, one-tensor caches by the hundred, pushed layer by layer by cache id.
Here with processes instead of devices, smaller tensors, and a comparison of every byte."""

from typing import Any

import numpy as np
import pytest

from llm_datadist import cpp_api
from llm_datadist.cpp_api import Cache, CacheIndex, ClusterInfo, IpInfo, LlmDataDist, LlmRole, LLMStatusCode
from tests.support.cpp import dist, run
from tests.support.kinds import Bytes, ChildEnd, Processes, World
from tests.support.linking import alone
from tests.support.moves import moved, same_bytes

pytestmark = pytest.mark.covers("xllm")

OK = LLMStatusCode.LLM_SUCCESS
NOT_YET_LINK = 0x5010B007
BLOCKS, VALUES = 12, 24
#: xllm names instances by ip and port, packed into one number (here above 2**63).
PROMPT, DECODER, SECOND = (int.from_bytes(bytes([192, 0, 2, 1])) << 32 | port for port in (26000, 26001, 26002))


def begin(world: World, cluster: int, role: LlmRole, num_tensors: int, caches: int, seed: int) -> int | None:
    """Initialize with the two options that xllm sets, and no other; register; return the port."""
    world.memory["dist"] = made = LlmDataDist(cluster, role)
    assert made.Initialize({cpp_api.OPTION_DEVICE_ID: "0", cpp_api.OPTION_LISTEN_IP_INFO: "127.0.0.1:0"}) is OK
    world.dd = made.datadist
    random = np.random.default_rng(seed)
    kv = random.integers(0, 2**16, (caches, num_tensors, BLOCKS, VALUES), dtype=np.uint16)
    desc = cpp_api.CacheDesc(cpp_api.CachePlacement.kDevice, num_tensors, cpp_api.DataType.DT_BF16, [BLOCKS, VALUES])
    for number, tensors in enumerate(kv, start=1):
        assert made.RegisterKvCache(desc, [tensor.ctypes.data for tensor in tensors]) == (OK, number)
    world.memory["kv"], world.memory["ids"] = kv, list(range(1, caches + 1))
    return made.datadist.listen_port


def shown(world: World) -> Bytes:
    """Return every byte, one (blocks, bytes) array per tensor of all caches."""
    kv = world.memory["kv"]
    return [tensor.view(np.uint8).copy() for tensor in kv.reshape(-1, BLOCKS, VALUES)]


def link(end: ChildEnd, *peers: ClusterInfo) -> None:
    assert end.do(run, "LinkLlmClusters", list(peers), 60_000)[0] is OK


def unlink(end: ChildEnd, force: bool, *peers: ClusterInfo) -> None:
    assert end.do(run, "UnlinkLlmClusters", list(peers), 1000, force)[0] is OK


def push_layers(
    world: World, clusters: list[int], src: list[int], dst: list[int], layers: int, one_tensor: bool
) -> list[int]:
    """Push K and V of every layer to every destination; what fails is noted, and the other layers follow."""
    codes = []
    for layer in range(layers):
        for cluster in clusters:
            for kind in (0, 1):
                number, at = (2 * layer + kind, 0) if one_tensor else (kind, layer)
                cache = Cache(world.memory["ids"][number])  # the id alone says which cache
                ext = cpp_api.KvCacheExtParam((at, at), (at, at), 1)
                status = dist(world).PushKvBlocks(cache, CacheIndex(cluster, cache.cache_id, 0), src, dst, ext)
                if status is not OK:
                    codes.append(int(status))
    return codes


def pull(world: World, cluster: int, src: list[int], dst: list[int]) -> bool:
    """Pull K, then V, with default ranges."""
    ids = world.memory["ids"]
    return all(dist(world).PullKvBlocks(CacheIndex(cluster, each, 0), Cache(each), src, dst) is OK for each in ids)


def begun(end: ChildEnd, cluster: int, *args: Any) -> tuple[ClusterInfo, Bytes]:
    """Initialize and register; return how it is linked to, and every byte."""
    port = end.do(begin, cluster, *args)
    assert port is not None
    return ClusterInfo(cluster, 0, [IpInfo("127.0.0.1", 0)], [IpInfo("127.0.0.1", port)]), end.do(shown)


def test_one_cache_per_layer_and_role_to_every_decoder(processes: Processes, ends: tuple[ChildEnd, ChildEnd]) -> None:
    (prompt, decoder), second = ends, processes.child("second decoder")
    layers = 80
    at_prompt, src = begun(prompt, PROMPT, LlmRole.kPrompt, 1, 2 * layers, 1)
    at_decoder, dst = begun(decoder, DECODER, LlmRole.kDecoder, 1, 2 * layers, 2)
    at_second, other = begun(second, SECOND, LlmRole.kMix, 1, 2 * layers, 3)

    # Not linked yet: every layer says so, and the last word is no.
    both = [DECODER, SECOND]
    moves = ([1, 2, 3, 9], [4, 5, 6, 0], layers, True)
    assert prompt.do(push_layers, both, *moves) == [NOT_YET_LINK] * 4 * layers
    link(prompt, at_decoder, at_second)
    assert prompt.do(push_layers, both, *moves) == []
    pairs = [(4, 1), (5, 2), (6, 3), (0, 9)]
    dst, other = moved(dst, src, pairs), moved(other, src, pairs)
    same_bytes(decoder.do(shown), dst)
    same_bytes(prompt.do(shown), src)
    # One destination leaves: its pushes fail, layer by layer, those to the other one do not.
    same_bytes(second.do(shown), other)
    assert second.do(run, "Finalize") is OK
    assert len(prompt.do(push_layers, both, [3], [3], layers, True)) == 2 * layers
    dst = moved(dst, src, [(3, 3)])
    same_bytes(decoder.do(shown), dst)

    # The topology changes: by force at both ends, then roles the other way round over a new link.
    unlink(prompt, True, at_decoder, at_second)
    unlink(decoder, True, at_prompt)
    alone(prompt, decoder)
    assert prompt.do(push_layers, [DECODER], *moves) == [NOT_YET_LINK] * 2 * layers
    link(decoder, at_prompt)
    assert decoder.do(push_layers, [PROMPT], [7], [11], layers, True) == []
    src = moved(src, dst, [(11, 7)])
    same_bytes(prompt.do(shown), src)
    assert prompt.do(push_layers, [DECODER], [11], [8], layers, True) == []
    same_bytes(decoder.do(shown), moved(dst, src, [(8, 11)]))


def test_a_cache_of_k_and_one_of_v_pushed_by_layer_and_pulled_whole(ends: tuple[ChildEnd, ChildEnd]) -> None:
    prompt, decoder = ends
    at_prompt, src = begun(prompt, PROMPT, LlmRole.kPrompt, 61, 2, 3)
    at_decoder, dst = begun(decoder, DECODER, LlmRole.kDecoder, 61, 2, 4)
    assert not decoder.do(pull, PROMPT, [0], [0])
    link(decoder, at_prompt)
    assert decoder.do(pull, PROMPT, [0, 1, 2, 10], [3, 4, 5, 1])
    dst = moved(dst, src, [(3, 0), (4, 1), (5, 2), (1, 10)])
    same_bytes(decoder.do(shown), dst)
    assert prompt.do(push_layers, [DECODER], [5, 6], [8, 7], 61, False) == []
    same_bytes(decoder.do(shown), moved(dst, src, [(8, 5), (7, 6)]))
    # Not by force: both ends agree.
    unlink(prompt, False, at_decoder)
    alone(prompt, decoder)
    link(decoder, at_prompt)
