"""A decoder pulls two requests, each by its key, into rows of its own cache.

Without remote cache access the pull takes the key with it. Source: interface B11.1.
"""

from __future__ import annotations

from _common import End, cluster, options, run_roles, same, succeeded
from llm_datadist import CacheDesc, CacheKey, DataType, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from llm_datadist.views import tensor_views

KV = CacheDesc(num_tensors=4, shape=[2, 16384], data_type=DataType.DT_FLOAT16)  # two rows: one for each request


def value(tensor: int, request: int) -> int:
    """What the prompt "computes": another number in every tensor of every request."""
    return 10 * request + tensor + 1


def prompt(end: End) -> None:
    """Publish the caches of requests 0 and 1."""
    dd = LLMDataDist(LLMRole.PROMPT, cluster_id=1)
    dd.init(options(listen_ip_info=end.listen))
    keys = [CacheKey(1, req_id=0), CacheKey(1, req_id=1)]
    cache = dd.cache_manager.allocate_cache(KV, keys)
    for tensor, view in enumerate(tensor_views(cache)):
        view[0], view[1] = value(tensor, 0), value(tensor, 1)
    # The memory stays until both keys have been pulled: the prompt needs no word from the decoder for that.
    dd.cache_manager.deallocate_cache(cache)
    end.exchange(ip=end.ip, port=dd.listen_port)
    end.exchange()
    for key in keys:
        dd.cache_manager.remove_cache_key(key)  # pulled already, so this does nothing
    end.say(f"{dd.statistics().caches.nbytes} bytes of caches are left")
    dd.finalize()


def decoder(end: End) -> None:
    """Pull request 0 into row 0 and request 1 into row 1."""
    dd = LLMDataDist(LLMRole.DECODER, cluster_id=2)
    dd.init(options())
    cache = dd.cache_manager.allocate_cache(KV)
    peer = end.exchange()["prompt"]
    prompts = [cluster(1, end.ip, peer["ip"], peer["port"])]
    succeeded(dd.link_clusters(prompts, timeout=5000))

    for request in (0, 1):
        dd.cache_manager.pull_cache(CacheKey(1, req_id=request), cache, batch_index=request)
    for tensor, view in enumerate(tensor_views(cache)):
        same(f"tensor {tensor}, row 0", view[0], value(tensor, 0))
        same(f"tensor {tensor}, row 1", view[1], value(tensor, 1))
    end.say("pulled requests 0 and 1 into rows 0 and 1")

    try:
        dd.cache_manager.pull_cache(CacheKey(1, req_id=0), cache)
    except LLMException as error:
        if error.status_code != LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
            raise
        end.say("a second pull of request 0: LLM_KV_CACHE_NOT_EXIST")
    else:
        raise SystemExit("a key was pulled twice")

    succeeded(dd.unlink_clusters(prompts, timeout=5000))
    end.exchange()
    dd.cache_manager.deallocate_cache(cache)
    dd.finalize()


if __name__ == "__main__":
    run_roles(__file__, {"prompt": prompt, "decoder": decoder})
