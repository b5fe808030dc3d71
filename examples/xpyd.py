"""Two prompts and two decoders: every decoder links to all prompts in one call and pulls blocks from each.

Source: interface B11.7.
"""

from __future__ import annotations

import ipaddress

import numpy as np

from _common import End, cluster, options, run_roles, same, succeeded
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMDataDist, LLMRole

PROMPTS, DECODERS = ("prompt-1", "prompt-2"), ("decoder-1", "decoder-2")
KV = CacheDesc(num_tensors=1, shape=[3, 10], data_type=DataType.DT_INT64)


def cluster_id(end: End) -> int:
    """Return an id that no other process has: its ip, and a number that is unique at that ip (a port would do)."""
    return int(ipaddress.IPv4Address(end.ip)) << 16 | (*PROMPTS, *DECODERS).index(end.role)


def prompt(end: End) -> None:
    """Publish a cache that is full of this prompt's cluster id."""
    own = cluster_id(end)
    dd = LLMDataDist(LLMRole.PROMPT, own)
    dd.init(options(listen_ip_info=end.listen))
    kv = np.full((3, 10), own)
    cache = dd.cache_manager.register_blocks_cache(KV, [kv.ctypes.data], BlocksCacheKey(own, 0))
    end.exchange(cluster_id=own, ip=end.ip, port=dd.listen_port)
    end.exchange()  # all decoders have what they want
    dd.cache_manager.unregister_cache(cache.cache_id)
    dd.finalize()


def decoder(end: End) -> None:
    """Pull from each prompt in turn; all unlinked at once."""
    dd = LLMDataDist(LLMRole.DECODER, cluster_id(end))
    dd.init(options())
    kv = np.zeros((3, 10), np.int64)
    cache = dd.cache_manager.register_blocks_cache(KV, [kv.ctypes.data])
    everybody = end.exchange()
    peers = [everybody[role] for role in PROMPTS]
    prompts = [cluster(peer["cluster_id"], end.ip, peer["ip"], peer["port"]) for peer in peers]
    succeeded(dd.link_clusters(prompts, timeout=5000))
    for peer in peers:
        dd.cache_manager.pull_blocks(BlocksCacheKey(peer["cluster_id"], 0), cache, [0, 1], [0, 2])
        same("pulled blocks", kv[[0, 2]], peer["cluster_id"])
        same("block 1", kv[1], 0)
    end.say(f"pulled from clusters {', '.join(str(peer['cluster_id']) for peer in peers)}")
    succeeded(dd.unlink_clusters(prompts, timeout=5000))
    end.exchange()
    dd.cache_manager.unregister_cache(cache.cache_id)
    dd.finalize()


if __name__ == "__main__":
    run_roles(__file__, {role: prompt if role in PROMPTS else decoder for role in (*PROMPTS, *DECODERS)})
