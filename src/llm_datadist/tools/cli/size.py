"""``llm-datadist size``: bytes of a blocks cache in a pool, and that pool's options."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from llm_datadist.types import DataType

#: The interface has no FP8; DT_INT8 has its size.
_TYPES: Final = {"bf16": "DT_BF16", "fp16": "DT_FLOAT16", "fp32": "DT_FLOAT", "fp8": "DT_INT8"}


def size(
    layers: Annotated[int, typer.Option(min=1, help="Layers of this process.")],
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of all devices.")],
    head_dim: Annotated[int, typer.Option(min=1, help="Numbers of a head.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that the cache has room for.")],
    dtype: Annotated[str, typer.Option(metavar="|".join(_TYPES), help="Type of a number.")] = "bf16",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    tensors_per_layer: Annotated[int, typer.Option(min=1, help="K and V; 1 for the latent tensor of MLA.")] = 2,
    page_shift: Annotated[int, typer.Option(min=10, max=30, help="Log2 of the bytes of a page.")] = 16,
    devices: Annotated[int, typer.Option(min=1, help="Processes, or GPUs, that share the KV heads.")] = 1,
) -> None:
    """Compute what a model's KV cache takes of the pool of a device. Print the cache's shape and the pool's options."""
    if dtype not in _TYPES:
        raise typer.BadParameter(f"--dtype {dtype!r} is none of {', '.join(_TYPES)}")
    kv_heads = -(-kv_heads // devices)  # of one device: each has at least one
    count, blocks, name = layers * tensors_per_layer, -(-tokens // block_size), _TYPES[dtype]
    token = kv_heads * head_dim * DataType[name].itemsize
    tensor = blocks * block_size * token
    pages = -(-tensor >> page_shift)
    whole = count * pages << page_shift
    print(f"a token    {count * token} bytes in {count} tensors")
    print(f"a block    {block_size} tokens, {block_size * token} bytes of each tensor")
    print(f"a tensor   {blocks} blocks, {tensor} bytes, {pages} pages of {1 << page_shift} bytes")
    print(f"the cache  {whole} bytes ({whole / 2**30:.4g} GiB), {whole / (tokens * count * token) - 1:.1%} by rounding")
    if devices > 1:
        print(f"in all     {devices * whole} bytes on {devices} devices; all else here is for one")
    print()
    print(f"desc = CacheDesc({count}, [{blocks}, {block_size}, {kv_heads}, {head_dim}], DataType.{name})")
    print(f'config.mem_pool_cfg = \'{{"memory_size": {whole}, "page_shift": {page_shift}}}\'')
