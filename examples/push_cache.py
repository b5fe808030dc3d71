"""A decoder pushes a row of its continuous cache into a row of the prompt's, addressed by cache id.

Source: interface B11.5.
"""

from __future__ import annotations

import numpy as np

from _common import End, cluster, options, run_roles, same, succeeded
from llm_datadist import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMDataDist, LLMRole

PROMPT, DECODER = 0, 1
KV = CacheDesc(num_tensors=2, shape=[3, 10], data_type=DataType.DT_FLOAT)


def prompt(end: End) -> None:
    """Have a cache of zeros and tell its id."""
    dd = LLMDataDist(LLMRole.PROMPT, PROMPT)
    dd.init(options(local_comm_res="", listen_ip_info=end.listen))
    kv = np.zeros((2, 3, 10), np.float32)
    cache = dd.cache_manager.register_cache(KV, [tensor.ctypes.data for tensor in kv])
    end.exchange(ip=end.ip, port=dd.listen_port, cache_id=cache.cache_id)
    end.exchange()  # pushed and unlinked
    expected = np.zeros_like(kv)
    expected[:, 1] = 7
    same("rows", kv, expected)
    end.say("row 1 holds what the decoder pushed, rows 0 and 2 are as they were")
    dd.cache_manager.unregister_cache(cache.cache_id)
    dd.finalize()


def decoder(end: End) -> None:
    """Push row 0 into row 1 of the prompt's cache, and unlink at both ends."""
    dd = LLMDataDist(LLMRole.DECODER, DECODER)
    dd.init(options(local_comm_res=""))
    kv = np.full((2, 3, 10), 7, np.float32)
    cache = dd.cache_manager.register_cache(KV, [tensor.ctypes.data for tensor in kv])
    peer = end.exchange()["prompt"]
    prompts = [cluster(PROMPT, end.ip, peer["ip"], peer["port"])]
    succeeded(dd.link_clusters(prompts, timeout=5000))
    there = CacheKeyByIdAndIndex(PROMPT, cache_id=peer["cache_id"], batch_index=1)
    dd.cache_manager.push_cache(there, cache, src_batch_index=0)
    end.say(f"pushed row 0 to row 1 of cache {peer['cache_id']}")
    succeeded(dd.unlink_clusters(prompts, timeout=5000))
    end.exchange()
    dd.cache_manager.unregister_cache(cache.cache_id)
    dd.finalize()


if __name__ == "__main__":
    run_roles(__file__, {"prompt": prompt, "decoder": decoder})
