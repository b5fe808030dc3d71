"""Engines and layers of vLLM that this connector can serve; the others are refused when it starts.

Layers are judged by their exact kind: a subclass of a known one may keep other tokens, or other bytes of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, iter_layer_specs

from llm_datadist.integrations.vllm.layout import COLUMNS, Layout, unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_KINDS: Final = (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec)
_NOT_DIVIDED: Final = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")


def require_supported(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Raise LLMException, in one sentence, for an engine that this connector cannot serve."""
    for name in _NOT_DIVIDED:
        if (size := getattr(config.parallel_config, name)) > 1:
            raise unsupported(f"{name}={size}")
    if config.model_config.enable_sleep_mode:
        raise unsupported("sleep mode: it discards KV that peers read")
    if config.weight_transfer_config is not None:
        raise unsupported("weights that change while the engine runs (weight_transfer_config)")
    device = current_platform.device_type
    if device != "cpu" and not (is_in_gpu(config) or config.kv_transfer_config.get_from_extra_config("staging", None)):
        where = f'{device} with "pool": false' if device == "cuda" else device
        raise unsupported(f'KV on {where}, unless kv_connector_extra_config has "staging": true')
    for spec in _specs(cache).values():
        if type(spec) not in _KINDS:
            raise unsupported(f"layers of kind {type(spec).__name__}")


def is_in_gpu(config: VllmConfig) -> bool:
    """Return True if the KV cache lies in a pool in a GPU: unless "pool" is false, or "staging" true."""
    option = config.kv_transfer_config.get_from_extra_config
    return current_platform.device_type == "cuda" and option("pool", True) and not option("staging", None)


def windows_of(cache: KVCacheConfig) -> list[int | None]:
    """Return for each transferred group the tokens that it looks back; None for all."""
    groups: list[Any] = [cache.kv_cache_groups[each].kv_cache_spec for each in cache.transfer_group_ids]
    firsts = (next(iter(iter_layer_specs(each))) for each in groups)  # all layers of a group have the same window
    return [
        each.sliding_window + each.extra_retained_tokens if type(each) is SlidingWindowSpec else None for each in firsts
    ]


def _specs(cache: KVCacheConfig) -> dict[str, Any]:
    """Return the kind of each transferred layer."""
    found: dict[str, Any] = {}
    for group in (cache.kv_cache_groups[each] for each in cache.transfer_group_ids):
        each_own = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        found |= {name: each_own.get(name, group.kv_cache_spec) for name in group.layer_names}
    return found


def describe(
    views: Mapping[str, torch.Tensor], config: VllmConfig, cache: KVCacheConfig, identity: dict[str, str]
) -> tuple[Layout, list[int]]:
    """Return the layout of a rank's KV cache, and the address of each place, once its kernels are chosen.

    A layer's view has the shape (pages, heads, tokens, bytes of K and V). Raises :func:`unsupported` for memory that
    this connector cannot name.
    """
    specs = {name: each for name, each in _specs(cache).items() if name in views}
    num_blocks, block_tokens = cache.num_blocks, config.cache_config.block_size
    places: dict[int, list[str]] = {}
    for name in sorted(specs):
        places.setdefault(views[name].data_ptr(), []).append(name)
    shapes = {(tuple(views[name].shape), views[name].stride(), str(views[name].dtype)) for name in specs}
    if len(shapes) != 1:
        raise unsupported(f"layers of {len(shapes)} shapes: {sorted(map(str, shapes))}")
    layers = config.compilation_config.static_forward_context
    orders = {_order(layers[name], spec) for name, spec in specs.items()}
    if len(orders) != 1:
        raise unsupported(f"layers of several attention kernels: {sorted(orders)}")
    order, (name, spec) = orders.pop(), next(iter(specs.items()))
    view, plain = views[name], all(each.num_heads == each.num_kv_heads for each in specs.values())
    apart = _heads_are_apart(view, num_blocks, block_tokens) and plain  # else all heads are one row
    heads, size, page_bytes = view.shape[1] if apart else 1, view.element_size(), view.nbytes // len(view)
    half = page_bytes // heads // view.shape[2] // 2
    ranks = config.parallel_config.tensor_parallel_size
    total = 1 if type(spec) is MLAAttentionSpec else config.model_config.get_total_num_kv_heads()
    ordered = sorted(places.items())
    layout = Layout(
        identity=identity | {"attention": order},
        block_tokens=block_tokens,
        pages=view.shape[0] // num_blocks,
        heads=heads,
        row_bytes=page_bytes // heads,
        places=[names for _, names in ordered],
        ranks=ranks,
        replicas=max(1, ranks // total),
        strips=[(half // size, size), (1, half)] if order == COLUMNS and apart else [],
    )
    return layout, [address for address, _ in ordered]


def _heads_are_apart(view: torch.Tensor, num_blocks: int, block_tokens: int) -> bool:
    """Return True if a page has its heads one after another, False if it has its tokens so."""
    if view.dim() != 4 or view.shape[0] % num_blocks or view.shape[0] // num_blocks * view.shape[2] != block_tokens:
        raise unsupported(f"a layer of shape {tuple(view.shape)} for {num_blocks} blocks of {block_tokens} tokens")
    page = view[0]
    if not page.is_contiguous() and not page.transpose(0, 1).is_contiguous():
        raise unsupported(f"a page of shape {tuple(page.shape)} with strides {page.stride()}")
    if view.stride(0) != page.numel():
        raise unsupported("blocks that hold the pages of all layers (kv_cache_layout BLHNC)")
    return page.is_contiguous()


def _order(layer: Any, spec: Any) -> str:
    """Return the name of a kernel's order of bytes in a row."""
    kernel, isa = layer.get_attn_backend().get_name(), getattr(layer, "isa", "")
    if kernel == "CPU_ATTN" and isa in {"vec", "vec16"} and spec.dtype.itemsize > 1:
        return COLUMNS  # tests/vllm/test_layouts.py asks the kernel
    return f"{kernel} {isa}".strip()
