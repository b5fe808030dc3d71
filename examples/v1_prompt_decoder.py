"""The older interface (v1): a decoder pulls blocks and a row of a prompt, then copies and swaps what it has.

In v1 the roles count: a PROMPT serves, a DECODER links and pulls. Source: interface B11, older samples.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from _common import End, cluster, options, run_roles, same, succeeded
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    KvCacheManager,
    LLMDataDist,
    LLMRole,
    Placement,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

TENSORS, BLOCKS = 4, 10
PAGED = CacheDesc(TENSORS, [BLOCKS, 128], DataType.DT_FLOAT)
ROWS = CacheDesc(TENSORS, [2, 256], DataType.DT_FLOAT16)
KEYS = [CacheKey(1, req_id=2**64 - 1), CacheKey(1, req_id=7)]
"""The prompt's row 0 has no key: a placeholder."""


def start(role: LLMRole, cluster_id: int, listen: str = "") -> LLMDataDist:
    """Return an initialised end in v1 mode, with a pool of half the graph memory."""
    settings = {"enable_cache_manager": False, "mem_pool_cfg": "", "mem_utilization": 0.5}
    dd = LLMDataDist(role, cluster_id)
    dd.init(options(**settings, ge_options={"ge.flowGraphMemMaxSize": str(128 << 20)}, listen_ip_info=listen))
    return dd


def values(rows: int) -> NDArray[np.float32]:
    """Return what the prompt puts into each row or block of each tensor."""
    return np.arange(1, TENSORS * rows + 1, dtype=np.float32).reshape(TENSORS, rows)


def fill(manager: KvCacheManager, cache: KvCache, contents: NDArray[np.float32]) -> None:
    """Write one value into every row or block."""
    for tensor in range(TENSORS):
        manager.get_cache_tensors(cache, tensor)[0].numpy()[:] = contents[tensor][:, None]


def check(what: str, manager: KvCacheManager, cache: KvCache, contents: NDArray[np.float32]) -> None:
    """Compare every element with the value of its row or block."""
    for tensor in range(TENSORS):
        same(f"{what}, tensor {tensor}", manager.get_cache_tensors(cache, tensor)[0].numpy(), contents[tensor][:, None])


def prompt(end: End) -> None:
    """Publish a blocks cache and a row, and wait until the decoder has what it wants."""
    dd = start(LLMRole.PROMPT, 1, end.listen)
    manager = dd.kv_cache_manager
    paged = manager.allocate_blocks_cache(PAGED, BlocksCacheKey(1, 0))
    fill(manager, paged, values(BLOCKS))
    rows = manager.allocate_cache(ROWS, KEYS)
    fill(manager, rows, values(2))
    manager.deallocate_cache(rows)  # freed when request 7 has been pulled
    end.exchange(ip=end.ip, port=dd.listen_port)
    end.exchange()  # the decoder has pulled
    manager.deallocate_cache(paged)
    limit = time.monotonic() + 10
    while dd.statistics().caches.nbytes and time.monotonic() < limit:
        time.sleep(0.001)  # the decoder's word that it has the row is on its way
    end.say(f"{dd.statistics().caches.nbytes} bytes of rows are left")
    dd.finalize()


def decoder(end: End) -> None:
    """Link, make sure that the link works, and do the two flows."""
    dd = start(LLMRole.DECODER, 2)
    peer = end.exchange()["prompt"]
    prompts = [cluster(1, end.ip, peer["ip"], peer["port"])]
    succeeded(dd.link_clusters(prompts, timeout=5000))
    dd.check_link_status(1)
    blocks_and_swap(end, dd)
    row_and_copy(end, dd.kv_cache_manager)
    succeeded(dd.unlink_clusters(prompts, timeout=5000))
    end.exchange()
    dd.finalize()


def blocks_and_swap(end: End, dd: LLMDataDist) -> None:
    """Pull two blocks, copy one of them twice, swap both out and in."""
    manager = dd.kv_cache_manager
    paged = manager.allocate_blocks_cache(PAGED)
    expected = np.zeros((TENSORS, BLOCKS), np.float32)
    manager.pull_blocks(BlocksCacheKey(1, 0), paged, [0, 1], [2, 3])
    expected[:, 2:4] = values(BLOCKS)[:, :2]
    check("pulled blocks", manager, paged, expected)
    end.say(f"pulled blocks [0, 1] to [2, 3] over {dd.explain(1).transport}")

    manager.copy_blocks(paged, {2: [0, 1]})
    expected[:, :2] = expected[:, 2:3]
    host = np.zeros((TENSORS, 2, 128), np.float32)
    host_desc = CacheDesc(TENSORS, [2, 128], DataType.DT_FLOAT, Placement.HOST)
    cpu_cache = KvCache.create_cpu_cache(host_desc, [tensor.ctypes.data for tensor in host])
    manager.swap_blocks(paged, cpu_cache, {2: 0, 3: 1})
    same("blocks in host memory", host, expected[:, 2:4, None])
    manager.swap_blocks(cpu_cache, paged, {0: 8, 1: 9})
    expected[:, 8:] = expected[:, 2:4]
    check("blocks after swapping", manager, paged, expected)
    end.say("copied block 2 to [0, 1], swapped [2, 3] out to host memory and in again to [8, 9]")
    manager.deallocate_cache(paged)


def row_and_copy(end: End, manager: KvCacheManager) -> None:
    """Pull the row of request 7 and copy it into a batch."""
    pulled, batch = manager.allocate_cache(ROWS), manager.allocate_cache(ROWS)
    manager.pull_cache(KEYS[1], pulled, batch_index=0)
    manager.copy_cache(batch, pulled, dst_batch_index=1, src_batch_index=0, req_id=7)
    check("row", manager, batch, np.stack([np.zeros(TENSORS, np.float32), values(2)[:, 1]], axis=1))
    end.say("pulled request 7 into row 0, copied it to row 1 of another cache")
    for cache in (pulled, batch):
        manager.deallocate_cache(cache)


if __name__ == "__main__":
    run_roles(__file__, {"prompt": prompt, "decoder": decoder})
