"""A decoder pulls a prompt's continuous cache into blocks of its paged cache.

The row is cut into pieces of the block size; the last one may be short. Source: interface B11.3.
"""

from __future__ import annotations

import numpy as np

from _common import End, cluster, options, run_roles, same, succeeded
from llm_datadist import CacheDesc, CacheKey, DataType, LLMDataDist, LLMRole
from llm_datadist.views import tensor_views

ELEMENTS = 16384
ROW = CacheDesc(num_tensors=4, shape=[1, 2 * ELEMENTS + ELEMENTS // 2], data_type=DataType.DT_FLOAT16)
PAGED = CacheDesc(num_tensors=4, shape=[5, ELEMENTS], data_type=DataType.DT_FLOAT16)


def row(tensor: int) -> np.ndarray:
    """What the prompt "computes" for one tensor: two blocks and a half."""
    return (np.arange(2 * ELEMENTS + ELEMENTS // 2) % 1000 + tensor).astype(np.float16)


def prompt(end: End) -> None:
    """Be linked first, and publish the cache after that."""
    dd = LLMDataDist(LLMRole.PROMPT, cluster_id=1)
    dd.init(options(listen_ip_info=end.listen))
    end.exchange(ip=end.ip, port=dd.listen_port)
    end.exchange()  # linked
    key = CacheKey(1, req_id=0, model_id=0)
    cache = dd.cache_manager.allocate_cache(ROW, [key])
    for tensor, view in enumerate(tensor_views(cache)):
        view[0] = row(tensor)
    end.exchange()  # published
    end.exchange()  # pulled
    dd.cache_manager.remove_cache_key(key)
    dd.cache_manager.deallocate_cache(cache)
    dd.finalize()


def decoder(end: End) -> None:
    """Pull the row into blocks 3, 0 and 4."""
    dd = LLMDataDist(LLMRole.DECODER, cluster_id=2)
    dd.init(options())
    memory = np.zeros((4, 5, ELEMENTS), np.float16)
    cache = dd.cache_manager.register_blocks_cache(PAGED, [tensor.ctypes.data for tensor in memory])
    peer = end.exchange()["prompt"]
    prompts = [cluster(1, end.ip, peer["ip"], peer["port"])]
    succeeded(dd.link_clusters(prompts, timeout=5000))
    end.exchange()
    end.exchange()

    dd.cache_manager.pull_blocks(CacheKey(1, req_id=0, model_id=0), cache, src_blocks=[], dst_blocks=[3, 0, 4])
    expected = np.zeros_like(memory)
    for tensor in range(4):
        expected[tensor, 3], expected[tensor, 0] = row(tensor)[: 2 * ELEMENTS].reshape(2, ELEMENTS)
        expected[tensor, 4, : ELEMENTS // 2] = row(tensor)[2 * ELEMENTS :]
    same("blocks", memory, expected)
    end.say("pulled a row of 2.5 blocks into blocks [3, 0, 4]; the rest of block 4 is as it was")

    end.exchange()
    succeeded(dd.unlink_clusters(prompts, timeout=5000))
    dd.cache_manager.unregister_cache(cache.cache_id)
    dd.finalize()


if __name__ == "__main__":
    run_roles(__file__, {"prompt": prompt, "decoder": decoder})
