"""Engines and layers of vLLM that this connector can serve; the others are refused when it starts.

Layers are judged by their exact kind: a subclass of a known one may keep other tokens, or other bytes of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, iter_layer_specs

from llm_datadist.integrations.vllm.layout import COLUMNS, EngineFacts, unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_KINDS: Final = (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec)
#: Fields of vLLM's parallel configuration that must be 1.
_ONE: Final = {
    "pipeline_parallel_size": "pipeline parallelism",
    "decode_context_parallel_size": "decode context parallelism",
    "prefill_context_parallel_size": "prefill context parallelism",
}


def require_supported(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Raise LLMException, in one sentence, for an engine that this connector cannot serve."""
    for name, what in _ONE.items():
        if (size := getattr(config.parallel_config, name)) > 1:
            raise unsupported(f"{what} ({name} is {size})")
    for spec in _specs(cache):
        if type(spec) not in _KINDS:
            raise unsupported(f"layers of kind {type(spec).__name__}")
        if spec.tokens_per_state != 1:
            raise unsupported(f"layers with {spec.tokens_per_state} tokens in one state")
        if spec.block_size != config.cache_config.block_size:
            raise unsupported(f"layers with blocks of {spec.block_size} and {config.cache_config.block_size} tokens")


def windows_of(cache: KVCacheConfig) -> list[int | None]:
    """Return for each transferred group the tokens that it looks back; None for all."""
    found: list[int | None] = []
    for group in cache.transfer_group_ids:
        windows = {_window(each) for each in iter_layer_specs(cache.kv_cache_groups[group].kv_cache_spec)}
        if len(windows) != 1:
            raise unsupported(f"layers of several windows in one group: {sorted(map(str, windows))}")
        found += windows
    return found


def facts_of(config: VllmConfig, cache: KVCacheConfig, identity: dict[str, str]) -> EngineFacts:
    """Return the facts of a worker's engine, once its attention kernels are chosen."""
    specs, ranks = _specs(cache), config.parallel_config.tensor_parallel_size
    layers = config.compilation_config.static_forward_context
    replicas = {_replicas(each, ranks, config) for each in specs}
    if len(replicas) != 1:
        raise unsupported(f"layers with {sorted(replicas)} ranks for one KV head")
    groups = [cache.kv_cache_groups[each] for each in cache.transfer_group_ids]
    pairs = [
        (name, spec) for group in groups for name in group.layer_names for spec in iter_layer_specs(group.kv_cache_spec)
    ]
    orders = {_order(layers[name], spec) for name, spec in pairs if name in layers}
    if len(orders) != 1:
        raise unsupported(f"layers of several attention kernels: {sorted(orders)}")
    return EngineFacts(
        identity=identity | {"attention": orders.pop()},
        block_tokens=config.cache_config.block_size,
        ranks=ranks,
        replicas=replicas.pop(),
        whole=any(each.num_heads != each.num_kv_heads for each in specs),
    )


def _specs(cache: KVCacheConfig) -> list[Any]:
    groups = [cache.kv_cache_groups[each] for each in cache.transfer_group_ids]
    return [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]


def _window(spec: Any) -> int | None:
    return spec.sliding_window + spec.extra_retained_tokens if type(spec) is SlidingWindowSpec else None


def _replicas(spec: Any, ranks: int, config: VllmConfig) -> int:
    """Return the number of consecutive ranks that hold the same KV heads."""
    total = 1 if type(spec) is MLAAttentionSpec else config.model_config.get_total_num_kv_heads()
    held = spec.num_kv_heads * ranks
    if held % total or (held != total and spec.num_kv_heads != 1):
        raise unsupported(f"{ranks} ranks with {spec.num_kv_heads} KV heads each of {total}")
    return int(held // total)


def _order(layer: Any, spec: Any) -> str:
    """Return the name of a kernel's order of bytes in a row."""
    kernel, isa = layer.get_attn_backend().get_name(), getattr(layer, "isa", "")
    if kernel == "CPU_ATTN" and isa in {"vec", "vec16"} and spec.dtype.itemsize > 1:
        return COLUMNS  # tests/vllm/test_layouts.py asks the kernel
    return f"{kernel} {isa}".strip()
