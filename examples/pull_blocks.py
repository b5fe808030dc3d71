"""A decoder pulls two blocks of a paged cache, swaps them out to host memory and in again.

Both ends register memory of their own. Source: interface B11.2.
"""

from __future__ import annotations

import numpy as np

from _common import End, cluster, options, run_roles, same, succeeded
from llm_datadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMDataDist, LLMRole, Placement

BLOCKS, ELEMENTS = 4, 1 << 18


def desc(placement: Placement = Placement.DEVICE) -> CacheDesc:
    """Return one float tensor of 4 blocks of 1 MiB."""
    return CacheDesc(1, [BLOCKS, ELEMENTS], DataType.DT_FLOAT, placement)


def prompt(end: End) -> None:
    """Publish a cache and wait until the decoder has what it wants."""
    kv = np.arange(BLOCKS * ELEMENTS, dtype=np.float32).reshape(BLOCKS, ELEMENTS)
    dd = LLMDataDist(LLMRole.PROMPT, cluster_id=1)
    dd.init(options(listen_ip_info=end.listen))
    cache = dd.cache_manager.register_blocks_cache(desc(), [kv.ctypes.data], BlocksCacheKey(1, model_id=0))
    end.exchange(ip=end.ip, port=dd.listen_port)
    end.exchange()  # the decoder has pulled
    dd.cache_manager.unregister_cache(cache.cache_id)
    dd.finalize()


def decoder(end: End) -> None:
    """Link, pull [2, 3] into [0, 1], swap out, swap in to other blocks."""
    kv, host = np.zeros((2, BLOCKS, ELEMENTS), np.float32)
    dd = LLMDataDist(LLMRole.DECODER, cluster_id=2)
    dd.init(options())
    cache = dd.cache_manager.register_blocks_cache(desc(), [kv.ctypes.data])
    peer = end.exchange()["prompt"]
    prompts = [cluster(1, end.ip, peer["ip"], peer["port"])]
    succeeded(dd.link_clusters(prompts, timeout=5000))

    dd.cache_manager.pull_blocks(BlocksCacheKey(1, model_id=0), cache, src_blocks=[2, 3], dst_blocks=[0, 1])
    sent = np.arange(BLOCKS * ELEMENTS, dtype=np.float32).reshape(BLOCKS, ELEMENTS)
    same("pulled blocks", kv, np.concatenate([sent[2:], np.zeros_like(sent[2:])]))
    end.say(f"pulled blocks [2, 3] over {dd.explain(1).private_transport}")  # "private": registered, in no pool

    cpu_cache = Cache.create_cpu_cache(desc(Placement.HOST), [host.ctypes.data])
    dd.cache_manager.swap_blocks(cache, cpu_cache, {0: 0, 1: 1})
    kv[:] = 0  # somebody else uses the blocks meanwhile
    dd.cache_manager.swap_blocks(cpu_cache, cache, {0: 2, 1: 3})
    same("blocks after swapping", kv, np.concatenate([np.zeros_like(sent[2:]), sent[2:]]))
    end.say("swapped them out to host memory, and in again to blocks [2, 3]")

    succeeded(dd.unlink_clusters(prompts, timeout=5000))
    end.exchange()
    dd.cache_manager.unregister_cache(cache.cache_id)
    dd.finalize()


if __name__ == "__main__":
    run_roles(__file__, {"prompt": prompt, "decoder": decoder})
