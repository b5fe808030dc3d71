"""A decode engine's transfers without vLLM's engine: claims what an offer grants, and holds it or pulls it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole
from llm_datadist.errors import CacheMismatch
from llm_datadist.integrations.references import ReferenceKeys, runtime_secret_file
from llm_datadist.integrations.vllm.layout import pages_of, rows_of
from llm_datadist.integrations.vllm.offers import KvOffer, RankEndpoint
from llm_datadist.types.grant import Grant


class Reader:
    """An LLMDataDist that links to prefill engines of one rank."""

    def __init__(self, cluster_id: int) -> None:
        config = LLMConfig()
        config.device_id = 0
        config.enable_cache_manager = True
        self.datadist = LLMDataDist(LLMRole.DECODER, cluster_id)
        self.datadist.init(config.generate_options())
        self._linked: set[int] = set()

    def claim(self, endpoint: RankEndpoint, token: bytes) -> Grant:
        """Claim without a wait."""
        if endpoint.cluster_id not in self._linked:
            info = LLMClusterInfo()
            info.remote_cluster_id = endpoint.cluster_id
            info.append_local_ip_info("127.0.0.1", 0)
            info.append_remote_ip_info(endpoint.host, endpoint.port)
            self.datadist.link_clusters([info], 5_000)
            self._linked.add(endpoint.cluster_id)
        return self.datadist.cache_manager.claim_grant(endpoint.cluster_id, token, wait=False)

    def pull(self, offer: KvOffer, grant: Grant) -> np.ndarray:
        """Return all blocks of an offer, in its order: (places, bytes). They are NaN before, and without the grant."""
        pages = pages_of(offer.layout, [block for _, blocks in offer.groups for block in blocks])
        there = rows_of(offer.layout, pages, 0, offer.layout.heads)
        shape = (len(offer.layout.places), len(there), offer.layout.row_bytes)
        memory = np.full(shape, 0xFF, np.uint8)
        addresses = [each.ctypes.data for each in memory]
        manager = self.datadist.cache_manager
        cache = manager.register_blocks_cache(CacheDesc(shape[0], list(shape[1:]), DataType.DT_INT8), addresses, None)
        try:
            here, key = list(range(len(there))), BlocksCacheKey(grant.cluster_id)
            with pytest.raises(CacheMismatch, match="is read under grants only"):
                manager.pull_blocks(key, cache, there.tolist(), here)
            manager.pull_blocks(key, cache, there.tolist(), here, grant=grant)
        finally:
            manager.unregister_cache(cache.cache_id)
        return memory.reshape(len(memory), -1)


def main() -> None:
    """Read params from standard input, one a line, once all is imported: that takes longer than many an offer lasts.

    With a folder the KV of each is pulled into a file there; else the first claim is held.
    """
    reader, keys = Reader(7), ReferenceKeys(runtime_secret_file())
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin):
        offer, token = KvOffer.read(json.loads(line)["datadist"], keys)
        began = time.perf_counter()
        grant = reader.claim(offer.ranks[0], token)
        said = f"claimed {grant} in {(time.perf_counter() - began) * 1e3:.1f} ms, with a link if it is the first"
        if len(sys.argv) == 1:
            print(said, flush=True)
            time.sleep(600)
        np.save(Path(sys.argv[1]) / f"{number}.npy", reader.pull(offer, grant))
        grant.release()
        print(said, flush=True)


if __name__ == "__main__":
    main()
