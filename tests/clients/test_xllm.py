"""xllm: C++ calls only, two options, one-tensor caches by the hundred, pushed layer by layer by cache id.

What the tests themselves add: processes instead of devices, smaller tensors, and the comparison of every byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist.cpp_api import (
    OPTION_DEVICE_ID,
    OPTION_LISTEN_IP_INFO,
    Cache,
    CacheDesc,
    CacheIndex,
    CachePlacement,
    ClusterInfo,
    DataType,
    IpInfo,
    KvCacheExtParam,
    LlmDataDist,
    LlmRole,
    LLMStatusCode,
)
from tests.support.cpp import dist
from tests.support.linking import alone
from tests.support.moves import moved, same_bytes

if TYPE_CHECKING:
    from tests.clients.conftest import Processes
    from tests.support.ends import ChildEnd
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers("xllm")

OK = LLMStatusCode.LLM_SUCCESS
NOT_YET_LINK = 0x5010B007
BLOCKS, VALUES = 12, 24
LINK_MS, UNLINK_MS = 60_000, 1000


def cluster_id(port: int) -> int:
    """Pack ip and port of an instance into one number (here above 2**63), as xllm names instances."""
    return int.from_bytes(bytes([192, 0, 2, 1])) << 32 | port


PROMPT, DECODER, SECOND = (cluster_id(port) for port in (26000, 26001, 26002))


def initialize(world: World, cluster: int, role: LlmRole) -> int | None:
    """Initialize with the two options that xllm sets, and no other."""
    world.memory["dist"] = made = LlmDataDist(cluster, role)
    assert made.Initialize({OPTION_DEVICE_ID: "0", OPTION_LISTEN_IP_INFO: "127.0.0.1:0"}) is OK
    world.dd = made.datadist
    return made.datadist.listen_port


def register(world: World, num_tensors: int, caches: int, seed: int) -> list[int]:
    """Register caches of ``num_tensors`` tensors each; return their ids."""
    random = np.random.default_rng(seed)
    kv = random.integers(0, 2**16, (caches, num_tensors, BLOCKS, VALUES), dtype=np.uint16)
    desc = CacheDesc(CachePlacement.kDevice, num_tensors, DataType.DT_BF16, [BLOCKS, VALUES])
    ids = []
    for tensors in kv:
        status, number = dist(world).RegisterKvCache(desc, [tensor.ctypes.data for tensor in tensors])
        assert status is OK
        assert number is not None
        ids.append(number)
    world.memory["kv"], world.memory["ids"] = kv, ids
    return ids


def shown(world: World) -> Bytes:
    """Return every byte, one (blocks, bytes) array per tensor of all caches."""
    kv = world.memory["kv"]
    return [tensor.view(np.uint8).copy() for tensor in kv.reshape(-1, BLOCKS, VALUES)]


def peer(cluster: int, port: int) -> ClusterInfo:
    return ClusterInfo(cluster, 0, [IpInfo("127.0.0.1", 0)], [IpInfo("127.0.0.1", port)])


def link(world: World, peers: list[ClusterInfo]) -> bool:
    status, _ = dist(world).LinkLlmClusters(peers, LINK_MS)
    return status is OK


def unlink(world: World, peers: list[ClusterInfo], force: bool) -> bool:
    status, _ = dist(world).UnlinkLlmClusters(peers, UNLINK_MS, force)
    return status is OK


def push_layers(
    world: World, clusters: list[int], src: list[int], dst: list[int], layers: int, one_tensor: bool
) -> tuple[bool, list[int]]:
    """Push K and V of every layer to every destination; what fails is noted, and the other layers follow."""
    codes = []
    for layer in range(layers):
        for cluster in clusters:
            for kind in (0, 1):
                number, at = (2 * layer + kind, 0) if one_tensor else (kind, layer)
                cache = Cache(world.memory["ids"][number])  # the id alone says which cache
                ext = KvCacheExtParam((at, at), (at, at), 1)
                status = dist(world).PushKvBlocks(cache, CacheIndex(cluster, cache.cache_id, 0), src, dst, ext)
                if status is not OK:
                    codes.append(int(status))
    return not codes, codes


def pull(world: World, cluster: int, src: list[int], dst: list[int]) -> bool:
    """Pull K, then V, with default ranges."""
    ids = world.memory["ids"]
    return all(dist(world).PullKvBlocks(CacheIndex(cluster, each, 0), Cache(each), src, dst) is OK for each in ids)


def begun(end: ChildEnd, cluster: int, role: LlmRole, *, num_tensors: int, caches: int, seed: int) -> tuple[int, Bytes]:
    """Initialize and register; return the port and every byte."""
    port = end.do(initialize, cluster, role)
    assert port is not None
    assert end.do(register, num_tensors, caches, seed) == list(range(1, caches + 1))
    return port, end.do(shown)


def test_one_cache_per_layer_and_role_hundreds_of_them_over_a_change_of_topology(
    ends: tuple[ChildEnd, ChildEnd],
) -> None:
    prompt, decoder = ends
    layers = 80
    prompt_port, src = begun(prompt, PROMPT, LlmRole.kPrompt, num_tensors=1, caches=2 * layers, seed=1)
    decoder_port, dst = begun(decoder, DECODER, LlmRole.kDecoder, num_tensors=1, caches=2 * layers, seed=2)

    # Not linked yet: every layer says so, and the last word is no.
    moves = ([DECODER], [1, 2, 3, 9], [4, 5, 6, 0], layers, True)
    assert prompt.do(push_layers, *moves) == (False, [NOT_YET_LINK] * 2 * layers)
    same_bytes(decoder.do(shown), dst)

    assert prompt.do(link, [peer(DECODER, decoder_port)])
    assert prompt.do(push_layers, *moves) == (True, [])
    dst = moved(dst, src, [(4, 1), (5, 2), (6, 3), (0, 9)])
    same_bytes(decoder.do(shown), dst)
    same_bytes(prompt.do(shown), src)

    # The topology changes: by force at both ends, then roles the other way round over a new link.
    assert prompt.do(unlink, [peer(DECODER, decoder_port)], True)
    assert decoder.do(unlink, [peer(PROMPT, prompt_port)], True)
    alone(prompt, decoder)
    assert prompt.do(push_layers, *moves) == (False, [NOT_YET_LINK] * 2 * layers)
    assert decoder.do(link, [peer(PROMPT, prompt_port)])
    assert decoder.do(push_layers, [PROMPT], [7], [11], layers, True) == (True, [])
    src = moved(src, dst, [(11, 7)])
    same_bytes(prompt.do(shown), src)
    assert prompt.do(push_layers, [DECODER], [11], [8], layers, True) == (True, [])
    same_bytes(decoder.do(shown), moved(dst, src, [(8, 11)]))


def test_a_cache_of_k_and_one_of_v_pushed_by_layer_and_pulled_whole_with_an_odd_number_of_layers(
    ends: tuple[ChildEnd, ChildEnd],
) -> None:
    prompt, decoder = ends
    layers = 61
    prompt_port, src = begun(prompt, PROMPT, LlmRole.kPrompt, num_tensors=layers, caches=2, seed=3)
    decoder_port, dst = begun(decoder, DECODER, LlmRole.kDecoder, num_tensors=layers, caches=2, seed=4)
    assert not decoder.do(pull, PROMPT, [0], [0])
    assert decoder.do(link, [peer(PROMPT, prompt_port)])
    assert decoder.do(pull, PROMPT, [0, 1, 2, 10], [3, 4, 5, 1])
    dst = moved(dst, src, [(3, 0), (4, 1), (5, 2), (1, 10)])
    same_bytes(decoder.do(shown), dst)
    assert prompt.do(push_layers, [DECODER], [5, 6], [8, 7], layers, False) == (True, [])
    same_bytes(decoder.do(shown), moved(dst, src, [(8, 5), (7, 6)]))
    # Not by force: both ends agree.
    assert prompt.do(unlink, [peer(DECODER, decoder_port)], False)
    alone(prompt, decoder)
    assert decoder.do(link, [peer(PROMPT, prompt_port)])


def test_each_layer_goes_to_every_destination(processes: Processes, ends: tuple[ChildEnd, ChildEnd]) -> None:
    prompt, decoder = ends
    second = processes.born("second decoder")
    layers = 32
    _, src = begun(prompt, PROMPT, LlmRole.kMix, num_tensors=1, caches=2 * layers, seed=5)
    ports, before = [], []
    for end, cluster, seed in ((decoder, DECODER, 6), (second, SECOND, 7)):
        port, held = begun(end, cluster, LlmRole.kMix, num_tensors=1, caches=2 * layers, seed=seed)
        ports.append(peer(cluster, port))
        before.append(held)
    assert prompt.do(link, ports)
    assert prompt.do(push_layers, [DECODER, SECOND], [0, 1, 2], [9, 10, 11], layers, True) == (True, [])
    for end, held in zip((decoder, second), before, strict=True):
        same_bytes(end.do(shown), moved(held, src, [(9, 0), (10, 1), (11, 2)]))
    # One destination leaves: its pushes fail, layer by layer, those to the other one do not.
    assert second.do(_finalize) is OK
    alone_with = [DECODER, SECOND]
    good, codes = prompt.do(push_layers, alone_with, [3], [3], layers, True)
    assert not good
    assert len(codes) == 2 * layers
    same_bytes(decoder.do(shown), moved(before[0], src, [(9, 0), (10, 1), (11, 2), (3, 3)]))


def _finalize(world: World) -> LLMStatusCode:
    return dist(world).Finalize()
