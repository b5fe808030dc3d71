"""A decoder pushes blocks into a prompt's cache, over the link it made: either side may move blocks either way.

Pushing needs remote cache access, which an (empty) local_comm_res implies. Source: interface B11.4.
"""

from __future__ import annotations

import numpy as np

from _common import End, cluster, options, run_roles, same, succeeded
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMDataDist, LLMRole

PROMPT, DECODER = 0, 1
KV = CacheDesc(num_tensors=2, shape=[3, 10], data_type=DataType.DT_FLOAT)


def start(end: End, role: LLMRole, cluster_id: int) -> LLMDataDist:
    """Both ends listen, with the same options."""
    dd = LLMDataDist(role, cluster_id)
    dd.init(options(local_comm_res="", listen_ip_info=end.listen))
    return dd


def unlink(dd: LLMDataDist, cluster_id: int) -> None:
    """By force: this side only, so both have to. The id is enough."""
    peer = LLMClusterInfo()
    peer.remote_cluster_id = cluster_id
    succeeded(dd.unlink_clusters([peer], force=True))


def prompt(end: End) -> None:
    """Have a cache of ones, into which somebody writes."""
    dd = start(end, LLMRole.PROMPT, PROMPT)
    kv = np.ones((2, 3, 10), np.float32)
    cache = dd.cache_manager.register_blocks_cache(KV, [tensor.ctypes.data for tensor in kv], BlocksCacheKey(PROMPT, 0))
    end.exchange(ip=end.ip, port=dd.listen_port)
    end.exchange()  # pushed: nothing here says so by itself
    expected = np.ones_like(kv)
    expected[:, [0, 2]] = 0
    same("blocks", kv, expected)
    end.say("blocks 0 and 2 hold the decoder's zeros, block 1 is as it was")
    unlink(dd, DECODER)
    dd.cache_manager.unregister_cache(cache.cache_id)
    dd.finalize()


def decoder(end: End) -> None:
    """Push blocks 0 and 1 of a cache of zeros into blocks 0 and 2 of the prompt's."""
    dd = start(end, LLMRole.DECODER, DECODER)
    kv = np.zeros((2, 3, 10), np.float32)
    cache = dd.cache_manager.register_blocks_cache(KV, [tensor.ctypes.data for tensor in kv], BlocksCacheKey(DECODER))
    peer = end.exchange()["prompt"]
    succeeded(dd.link_clusters([cluster(PROMPT, end.ip, peer["ip"], peer["port"])], timeout=5000))
    dd.cache_manager.push_blocks(BlocksCacheKey(PROMPT, 0), cache, src_blocks=[0, 1], dst_blocks=[0, 2])
    end.say("pushed blocks [0, 1] to [0, 2]")
    end.exchange()
    unlink(dd, PROMPT)
    dd.cache_manager.unregister_cache(cache.cache_id)
    dd.finalize()


if __name__ == "__main__":
    run_roles(__file__, {"prompt": prompt, "decoder": decoder})
