"""Both sides listen and both link, as transfer_backend="hixl" asks for; then one pushes and the other one pulls.

Whoever links second finds the link that the first one made, and succeeds. Each unlinks for itself, by the id alone.
Source: interface B11.9.
"""

from __future__ import annotations

import logging

import numpy as np

from _common import End, cluster, options, run_roles, same, succeeded
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMDataDist, LLMRole

PROMPT, DECODER = 1, 2
KV = CacheDesc(num_tensors=2, shape=[3, 10], data_type=DataType.DT_FLOAT)


def start(end: End, role: LLMRole, own: int, peer_role: str, peer: int) -> LLMDataDist:
    """Listen, learn where the other one does, and link to it."""
    dd = LLMDataDist(role, own)
    dd.init(options(transfer_backend="hixl", listen_ip_info=end.listen))
    there = end.exchange(ip=end.ip, port=dd.listen_port)[peer_role]
    succeeded(dd.link_clusters([cluster(peer, end.ip, there["ip"], there["port"])], timeout=5000))
    end.say(f"linked to cluster {peer}: {dd.explain(peer).state}")
    end.exchange()  # both have
    return dd


def unlink(dd: LLMDataDist, cluster_id: int) -> None:
    """This side only, with this backend; neither force nor an address is asked for."""
    peer = LLMClusterInfo()
    peer.remote_cluster_id = cluster_id
    succeeded(dd.unlink_clusters([peer]))


def prompt(end: End) -> None:
    """Have a cache of ones; the decoder pushes two blocks of zeros, and the third is pulled."""
    dd = start(end, LLMRole.PROMPT, PROMPT, "decoder", DECODER)
    kv = np.ones((2, 3, 10), np.float32)
    cache = dd.cache_manager.register_blocks_cache(KV, [tensor.ctypes.data for tensor in kv], BlocksCacheKey(PROMPT, 0))
    end.exchange()  # registered
    end.exchange()  # blocks 0 and 1 were pushed
    dd.cache_manager.pull_blocks(BlocksCacheKey(DECODER, 0), cache, [2], [2])
    same("blocks", kv, 0)
    end.say("all zeros: two blocks were pushed here, one was pulled from there")
    end.exchange()
    unlink(dd, DECODER)
    dd.finalize()


def decoder(end: End) -> None:
    """Push blocks 0 and 1 of a cache of zeros."""
    dd = start(end, LLMRole.DECODER, DECODER, "prompt", PROMPT)
    kv = np.zeros((2, 3, 10), np.float32)
    cache = dd.cache_manager.register_blocks_cache(KV, [tensor.ctypes.data for tensor in kv], BlocksCacheKey(DECODER))
    end.exchange()
    dd.cache_manager.push_blocks(BlocksCacheKey(PROMPT, 0), cache, [0, 1], [0, 1])
    end.say("pushed blocks [0, 1]")
    end.exchange()
    end.exchange()  # pulled
    same("blocks here", kv, 0)
    unlink(dd, PROMPT)
    dd.finalize()


if __name__ == "__main__":
    # Each end unlinks without a word to the other one, which would warn of a lost link if it is the second.
    logging.getLogger("LLM_DATADIST").setLevel(logging.ERROR)
    run_roles(__file__, {"prompt": prompt, "decoder": decoder})
