"""A prompt sends its cache layer by layer while it computes the next layer; the decoder waits for it.

Source: interface B11.8.
"""

from __future__ import annotations

import threading

import numpy as np

from _common import End, cluster, options, run_roles, same, succeeded
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LayerSynchronizer,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)

PROMPT, DECODER = 0, 1
LAYERS, BLOCKS, ELEMENTS = 4, 6, 1024
KV = CacheDesc(num_tensors=2 * LAYERS, shape=[BLOCKS, ELEMENTS], data_type=DataType.DT_FLOAT)
SENT, INTO = [0, 1, 2], [5, 3, 4]


class Computed(LayerSynchronizer):
    """One event per layer: set by whoever computes, waited for by the thread that sends."""

    def __init__(self) -> None:
        self._events = [threading.Event() for _ in range(LAYERS)]

    def done(self, layer: int) -> None:
        """The layer's cache has been written."""
        self._events[layer].set()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Block until the layer is there; True: send it."""
        seconds = None if timeout_in_millis is None else timeout_in_millis / 1e3
        return self._events[layer_index].wait(seconds)


def prompt(end: End) -> None:
    """Compute layer after layer, each on its way while the next is computed: first block 0 only, then some blocks."""
    dd = LLMDataDist(LLMRole.PROMPT, PROMPT)
    dd.init(options(enable_remote_cache_accessible=True, listen_ip_info=end.listen))
    kv = np.zeros((2 * LAYERS, BLOCKS, ELEMENTS), np.float32)
    cache = dd.cache_manager.register_blocks_cache(KV, [tensor.ctypes.data for tensor in kv])
    peer = end.exchange()["decoder"]
    decoders = [cluster(DECODER, end.ip, peer["ip"], peer["port"])]
    succeeded(dd.link_clusters(decoders, timeout=5000))
    everything = TransferWithCacheKeyConfig(BlocksCacheKey(DECODER, 0), range(LAYERS), range(LAYERS))
    for number, (sent, into) in enumerate([(None, None), (SENT, INTO)], 1):
        computed = Computed()
        task = dd.cache_manager.transfer_cache_async(cache, computed, [everything], sent, into)
        for layer in range(LAYERS):
            kv[2 * layer : 2 * layer + 2] = number * 10 + layer  # the model's work
            computed.done(layer)
        if task.synchronize(timeout_in_millis=10_000) != LLMStatusCode.LLM_SUCCESS:
            raise SystemExit(f"{task.get_results()}: {task.errors}")
        what = "block 0" if sent is None else f"blocks {sent} to {into}"
        end.say(f"sent {what} of {LAYERS} layers, each while the next one was computed")
        end.exchange()  # the receiver is told by nobody else
        end.exchange()
    succeeded(dd.unlink_clusters(decoders, timeout=5000))
    dd.cache_manager.unregister_cache(cache.cache_id)
    dd.finalize()


def decoder(end: End) -> None:
    """Have a blocks cache that peers may write; look at it when the prompt says that it has sent."""
    dd = LLMDataDist(LLMRole.DECODER, DECODER)
    dd.init(options(enable_remote_cache_accessible=True, listen_ip_info=end.listen))
    kv = np.zeros((2 * LAYERS, BLOCKS, ELEMENTS), np.float32)
    addresses = [tensor.ctypes.data for tensor in kv]
    cache = dd.cache_manager.register_blocks_cache(KV, addresses, BlocksCacheKey(DECODER, 0))
    end.exchange(ip=end.ip, port=dd.listen_port)
    expected = np.zeros_like(kv)
    for number, blocks in enumerate([[0], INTO], 1):
        end.exchange()
        for layer in range(LAYERS):
            expected[2 * layer : 2 * layer + 2, blocks] = number * 10 + layer
        same("cache", kv, expected)
        end.say(f"block{'s' if len(blocks) > 1 else ''} {str(blocks).strip('[]')} came, the others are as they were")
        end.exchange()
    dd.cache_manager.unregister_cache(cache.cache_id)
    dd.finalize()


if __name__ == "__main__":
    run_roles(__file__, {"prompt": prompt, "decoder": decoder})
