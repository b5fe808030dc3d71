"""The C++-shaped calls: a prompt pushes blocks layer by layer and a row, a decoder pulls; statuses, not exceptions.

Both register memory of their own and listen; caches are addressed by id. Source: interface B11, the C++ samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from _common import End, run_roles, same
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

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROMPT, DECODER = 1, 2
TENSORS, BLOCKS, VALUES = 4, 8, 16
PUSHED = [5, 6, 7]
ROW = 4


def check(dist: LlmDataDist, status: LLMStatusCode) -> None:
    """Stop unless a call was a success. C++ has the code only; here the reason is kept as well."""
    if status != LLMStatusCode.LLM_SUCCESS:
        raise SystemExit(f"0x{status:08x}: {dist.last_error}")


def start(end: End, role: LlmRole, cluster_id: int, kv: NDArray[np.int32]) -> tuple[LlmDataDist, Cache]:
    """Initialize, and register the tensors: as rows and as blocks, as every cache of this interface."""
    dist = LlmDataDist(cluster_id, role)
    check(dist, dist.Initialize({OPTION_DEVICE_ID: "0", OPTION_LISTEN_IP_INFO: end.listen}))
    cache = Cache()
    cache.cache_desc = CacheDesc(CachePlacement.kDevice, TENSORS, DataType.DT_INT32, [BLOCKS, VALUES])
    cache.tensor_addrs = [tensor.ctypes.data for tensor in kv]
    status, cache_id = dist.RegisterKvCache(cache.cache_desc, cache.tensor_addrs)
    check(dist, status)
    cache.cache_id = cache_id or 0
    return dist, cache


def contents(role: LlmRole) -> NDArray[np.int32]:
    """Return TENSORS tensors of BLOCKS blocks; every number says where it is from."""
    return np.arange(TENSORS * BLOCKS * VALUES, dtype=np.int32).reshape(TENSORS, BLOCKS, VALUES) + 10_000 * role


def prompt(end: End) -> None:
    """Link to the decoder; push blocks 5, 6, 7 of one layer after the other, then row 0 of all four tensors at once."""
    kv = contents(LlmRole.kPrompt)
    dist, cache = start(end, LlmRole.kPrompt, PROMPT, kv)
    brought = end.exchange(cache_id=cache.cache_id)["decoder"]
    peer = ClusterInfo(DECODER, remote_ip_infos=[IpInfo(brought["ip"], brought["port"])])
    check(dist, dist.LinkLlmClusters([peer], timeout=5000)[0])
    target = CacheIndex(DECODER, brought["cache_id"])
    for layer in range(TENSORS):  # here the model would compute the next layer
        one_layer = KvCacheExtParam((layer, layer), (layer, layer), tensor_num_per_layer=1)
        check(dist, dist.PushKvBlocks(cache, target, PUSHED, PUSHED, one_layer))
    end.say(f"pushed blocks {PUSHED} of {TENSORS} layers")
    target.batch_index = ROW
    check(dist, dist.PushKvCache(cache, target, 0, -1, KvCacheExtParam((0, 0), (0, 0), tensor_num_per_layer=TENSORS)))
    end.say(f"pushed row 0 to row {ROW}, as one layer of {TENSORS} tensors")
    end.exchange()  # pushed: nothing at the decoder says so by itself
    end.exchange()  # the decoder has pulled
    check(dist, dist.UnlinkLlmClusters([peer], timeout=5000)[0])
    check(dist, dist.UnregisterKvCache(cache.cache_id))
    check(dist, dist.Finalize())


def decoder(end: End) -> None:
    """See what was pushed; pull blocks 1 and 2 over the same link, and copy them to two places each."""
    kv = contents(LlmRole.kDecoder)
    expected, theirs = kv.copy(), contents(LlmRole.kPrompt)
    dist, cache = start(end, LlmRole.kDecoder, DECODER, kv)
    brought = end.exchange(ip=end.ip, port=dist.datadist.listen_port, cache_id=cache.cache_id)["prompt"]
    end.exchange()
    expected[:, PUSHED] = theirs[:, PUSHED]
    expected[:, ROW] = theirs[:, 0]
    same("pushed blocks and row", kv, expected)
    check(dist, dist.PullKvBlocks(CacheIndex(PROMPT, brought["cache_id"]), cache, [1, 2], [0, 1]))
    check(dist, dist.CopyKvBlocks(cache, cache, [0, 1], [[2, 3], [6, 7]]))
    expected[:, [0, 1]] = expected[:, [2, 3]] = expected[:, [6, 7]] = theirs[:, [1, 2]]
    same("pulled and copied blocks", kv, expected)
    end.say("pulled blocks [1, 2] and copied them to [2, 3] and [6, 7]")
    end.exchange()
    check(dist, dist.Finalize())


if __name__ == "__main__":
    run_roles(__file__, {"prompt": prompt, "decoder": decoder})
