"""A prompt and a decoder change places: the listener closes here and opens there, the caches stay.

A role is a label, and what a process needs to be linked to is an address to listen at. Source: interface B11.6.
"""

from __future__ import annotations

import logging

import numpy as np

from _common import End, cluster, options, run_roles, same, succeeded
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMDataDist, LLMRole

P, D = 1, 2
KV = CacheDesc(num_tensors=2, shape=[3, 10], data_type=DataType.DT_FLOAT)


def unlink(dd: LLMDataDist, cluster_id: int) -> None:
    """By force: this side only, so both have to. The id is enough."""
    peer = LLMClusterInfo()
    peer.remote_cluster_id = cluster_id
    succeeded(dd.unlink_clusters([peer], force=True))


def first(end: End) -> None:
    """Begin as the prompt: ones here, and a port to link to. Become the decoder, and link to the other one."""
    dd = LLMDataDist(LLMRole.PROMPT, P)
    dd.init(options(local_comm_res="", listen_ip_info=end.listen))
    kv = np.ones((2, 3, 10), np.float32)
    cache = dd.cache_manager.register_blocks_cache(KV, [tensor.ctypes.data for tensor in kv], BlocksCacheKey(P, 0))
    end.exchange(ip=end.ip, port=dd.listen_port)
    end.exchange()  # pulled from here, and unlinked
    dd.switch_role(LLMRole.DECODER)
    end.say(f"a decoder now; it listens at {dd.listen_port}")
    peer = end.exchange()["second"]
    succeeded(dd.link_clusters([cluster(D, end.ip, peer["ip"], peer["port"])], timeout=5000))
    end.exchange()  # linked
    end.exchange()  # pushed into this cache
    expected = np.ones_like(kv)
    expected[:, 1] = 0
    same("blocks", kv, expected)
    end.say("block 1 holds the other one's zeros, blocks 0 and 2 what was pulled from here before")
    unlink(dd, D)
    dd.cache_manager.unregister_cache(cache.cache_id)
    dd.finalize()


def second(end: End) -> None:
    """Begin as the decoder: pull. Become the prompt, and push over the link that the other one makes."""
    dd = LLMDataDist(LLMRole.DECODER, D)
    dd.init(options(local_comm_res=""))
    kv = np.zeros((2, 3, 10), np.float32)
    cache = dd.cache_manager.register_blocks_cache(KV, [tensor.ctypes.data for tensor in kv], BlocksCacheKey(D, 0))
    peer = end.exchange()["first"]
    there = cluster(P, end.ip, peer["ip"], peer["port"])
    succeeded(dd.link_clusters([there], timeout=5000))
    dd.cache_manager.pull_blocks(BlocksCacheKey(P, 0), cache, [0, 1], [0, 2])
    expected = np.zeros_like(kv)
    expected[:, [0, 2]] = 1
    same("blocks", kv, expected)
    end.say("pulled blocks [0, 1] to [0, 2]")
    succeeded(dd.unlink_clusters([there]))
    end.exchange()
    # The dict of a whole LLMConfig will do: only the address to listen at is looked at.
    dd.switch_role(LLMRole.PROMPT, options(listen_ip_info=end.listen))
    end.exchange(ip=end.ip, port=dd.listen_port)
    end.exchange()  # the other one has linked
    layers = range(2)
    dd.cache_manager.push_blocks(BlocksCacheKey(P, 0), cache, [0, 1, 2], [0, 1, 2], layers, layers, 1)
    end.say("a prompt now; pushed blocks [0, 1, 2] over the link that the decoder made")
    end.exchange()
    unlink(dd, P)
    dd.cache_manager.unregister_cache(cache.cache_id)
    dd.finalize()


if __name__ == "__main__":
    # Each end unlinks without a word to the other one, which would warn of a lost link if it is the second.
    logging.getLogger("LLM_DATADIST").setLevel(logging.ERROR)
    run_roles(__file__, {"first": first, "second": second})
