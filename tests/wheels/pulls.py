"""Pull blocks between two processes and compare every byte; a program for an interpreter that has only the wheel.

``pulls.py prompt TRANSPORT MEMORY`` prints its port and ends with its standard input; ``pulls.py decoder TRANSPORT
MEMORY PORT`` pulls from it and prints what it found as JSON. ``pulls.py both TRANSPORT MEMORY`` is one process.
"""

import json
import platform
import sys
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llm_datadist import BlocksCacheKey, Cache, CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole
from llm_datadist.views import tensor_views

#: More than goes through the caches: above 2 MiB a copy takes the streaming stores.
TENSORS, BLOCKS, BLOCK_BYTES = 2, 64, 1 << 16
SRC: Final = [7 * i % BLOCKS for i in range(48)]
DST: Final = [(5 * i + 3) % BLOCKS for i in range(48)]
DESC: Final = CacheDesc(TENSORS, [BLOCKS, BLOCK_BYTES], DataType.DT_INT8)


def contents(seed: int) -> NDArray[np.int8]:
    """Return the bytes of a whole cache, [TENSORS, BLOCKS, BLOCK_BYTES], the same in every process."""
    return np.random.default_rng(seed).integers(-128, 128, (TENSORS, BLOCKS, BLOCK_BYTES), np.int8)


class End:
    """One LLMDataDist with one cache, filled."""

    def __init__(self, role: LLMRole, cluster_id: int, transport: str, memory: str) -> None:
        config = LLMConfig()
        config.device_id, config.enable_cache_manager = 0, True
        config.mem_pool_cfg = '{"memory_size": 33554432}'
        if role is LLMRole.PROMPT:
            config.listen_ip_info = "127.0.0.1:0"
        self.datadist = LLMDataDist(role, cluster_id=cluster_id)
        self.datadist.init(config.generate_options() | {"llm.Transport": transport})
        self._key = BlocksCacheKey(1) if role is LLMRole.PROMPT else None
        self.own = np.empty((TENSORS, BLOCKS, BLOCK_BYTES), np.int8)
        self.cache = self._cache(memory)
        for view, tensor in zip(self.views(), contents(cluster_id), strict=True):
            view[...] = tensor

    def _cache(self, memory: str) -> Cache:
        manager = self.datadist.cache_manager
        if memory == "pool":
            return manager.allocate_blocks_cache(DESC, self._key)
        return manager.register_blocks_cache(DESC, [tensor.ctypes.data for tensor in self.own], self._key)

    def views(self) -> list[NDArray[np.int8]]:
        """Return the cache's memory, one array for each tensor."""
        return tensor_views(self.cache)


def pull(end: End, port: int) -> dict[str, object]:
    """Link to the prompt at the port, pull, and return what is wrong, and how it went."""
    peer = LLMClusterInfo()
    peer.remote_cluster_id = 1
    peer.append_local_ip_info("127.0.0.1", 0)
    peer.append_remote_ip_info("127.0.0.1", port)
    end.datadist.link_clusters([peer], timeout=60_000)
    expected = contents(2)
    expected[:, DST] = contents(1)[:, SRC]
    end.datadist.cache_manager.pull_blocks(BlocksCacheKey(1), end.cache, src_blocks=SRC, dst_blocks=DST)
    found = np.stack(end.views())
    link = end.datadist.explain(1)
    end.datadist.unlink_clusters([peer], timeout=60_000)
    return {
        "machine": platform.machine(),
        "wrong_bytes": int((found != expected).sum()),
        "moved_bytes": int((found != contents(2)).sum()),
        "transport": link.transport,
        "private_transport": link.private_transport,
        "explanation": str(link),
    }


def main(role: str, transport: str, memory: str, port: str = "0") -> None:
    """Play one role, or both."""
    ends = {}
    if role in ("prompt", "both"):
        ends["prompt"] = End(LLMRole.PROMPT, 1, transport, memory)
        port = str(ends["prompt"].datadist.listen_port)
    if role in ("decoder", "both"):
        ends["decoder"] = End(LLMRole.DECODER, 2, transport, memory)
        print(json.dumps(pull(ends["decoder"], int(port))), flush=True)
    else:
        print(port, flush=True)
        sys.stdin.read()
    for end in ends.values():
        end.datadist.finalize()


if __name__ == "__main__":
    main(*sys.argv[1:])
