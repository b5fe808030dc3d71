"""A prefix store: one engine saves the KV blocks of a prompt, another one loads them after the first one has ended.

An extension of the interface: docs/store.md. Not part of the published interface.
"""

from __future__ import annotations

import hashlib

import numpy as np

from _common import End, options, run_roles, same
from llm_datadist import Cache, CacheDesc, DataType, LLMDataDist, LLMRole
from llm_datadist.store import StoreClient, StoreServer, namespace
from llm_datadist.views import tensor_views

BLOCKS, ELEMENTS = 8, 1 << 16
NAME = namespace(
    fingerprint=b"digest of the weights and all that changes KV",
    tp_size=1,
    tp_rank=0,
    hash_algorithm="sha256",
    hash_seed="0",
    salt="",
)
KEYS = [hashlib.sha256(b"all tokens up to the end of block %d" % block).digest() for block in range(4)]


def store(end: End) -> None:
    """Be what `llm-datadist store --memory 16MiB` is."""
    with StoreServer(16 << 20, end.listen) as server:
        end.exchange(address=f"{end.ip}:{server.port}")
        end.exchange()  # the first engine has saved, and ended
        end.exchange()  # the second engine has loaded
        (space,) = server.statistics().namespaces
        end.say(f"{space.published} blocks, of {space.lookups} lookups' keys {space.found} found")


def engine(datadist: LLMDataDist) -> Cache:
    """Return an engine's cache: one float tensor of 8 blocks of 256 KiB."""
    datadist.init(options())
    return datadist.cache_manager.allocate_blocks_cache(CacheDesc(1, [BLOCKS, ELEMENTS], DataType.DT_FLOAT))


def first(end: End) -> None:
    """Compute a prompt's blocks, save them, and end."""
    datadist = LLMDataDist(LLMRole.MIX, cluster_id=1)
    cache = engine(datadist)
    (kv,) = tensor_views(cache)
    kv[:4] = np.arange(4, dtype=np.float32)[:, np.newaxis]
    with StoreClient(datadist, end.exchange()["store"]["address"], NAME) as client:
        stored = client.save(KEYS, cache, [0, 1, 2, 3])
        end.say(f"saved {stored} blocks")
    datadist.finalize()
    end.exchange()
    end.exchange()


def second(end: End) -> None:
    """Look up a longer prompt with the same beginning, and load what is there into other blocks."""
    datadist = LLMDataDist(LLMRole.MIX, cluster_id=2)
    cache = engine(datadist)
    address = end.exchange()["store"]["address"]
    end.exchange()
    with StoreClient(datadist, address, NAME) as client:
        hit = client.lookup([*KEYS, hashlib.sha256(b"its own last block").digest()])
        end.say(f"found {len(hit)} of {len(KEYS) + 1} blocks")
        client.load(hit, cache, [7, 6, 5, 4])
        (kv,) = tensor_views(cache)
        same("blocks of the prompt", kv[[7, 6, 5, 4]], np.arange(4, dtype=np.float32)[:, np.newaxis])
        end.exchange()
    datadist.finalize()


if __name__ == "__main__":
    run_roles(__file__, {"store": store, "first": first, "second": second})
