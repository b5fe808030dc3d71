"""The demo's transformer: its tokens and its digest prove that every block arrived."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llm_datadist.demo.model import Array, Llama, ModelConfig, PagedKV
from llm_datadist.demo.workload import DemoWorkload

SMALL = DemoWorkload(
    model=ModelConfig(layers=4, hidden=128, heads=8, kv_heads=2, ffn=256, vocab=1024),
    prompt_tokens=150,
    chunk=40,
    generate=16,
    pool_blocks=24,
)


def empty_cache() -> list[Array]:
    return [np.full(SMALL.shape, np.nan, dtype=np.float32) for _ in range(SMALL.num_tensors)]


def prefilled(blocks: Sequence[int], chunk: int) -> tuple[list[Array], PagedKV, int]:
    """Return the prompt's cache and the first new token."""
    tensors = empty_cache()
    kv = PagedKV(tensors, blocks)
    return tensors, kv, Llama(SMALL.model).prefill(SMALL.prompt(), kv, chunk)


def test_tokens_and_digest_are_those_of_the_single_process_run_only_with_every_block_in_its_place() -> None:
    """Keys carry their positions, so attention sees no order and the tokens may stay: the digest has to tell."""
    model, numbers = Llama(SMALL.model), SMALL.destination_blocks()
    source, source_kv, first = prefilled(SMALL.source_blocks(), SMALL.chunk)
    count = len(source_kv.used_blocks())
    _, alone, again = prefilled(range(SMALL.pool_blocks), SMALL.chunk)
    assert (alone.digest(), again) == (source_kv.digest(), first), "the same seed gives the same bits"
    _, whole, _ = prefilled(range(SMALL.pool_blocks), SMALL.prompt_tokens)
    last = SMALL.model.layers - 1
    for one, other in zip(whole.read(last, whole.length), alone.read(last, alone.length), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)  # chunks do not change the prompt, up to rounding
    undisturbed = model.generate(first, SMALL.generate, alone)

    def told(layers: slice, where: Any, harm: Callable[[Array], Any]) -> tuple[str, list[int]]:
        """Decode from what pull_blocks makes, the prompt's blocks at the decoder's numbers, otherwise NaN; harmed."""
        tensors = empty_cache()
        for dst, src in zip(tensors, source, strict=True):
            dst[numbers[:count]] = src[SMALL.source_blocks()[:count]]
        for tensor in tensors[layers]:
            tensor[where] = harm(tensor)
        kv = PagedKV(tensors, numbers, SMALL.prompt_tokens)
        return kv.digest(), model.generate(first, SMALL.generate, kv)

    def swapped(tensor: Array) -> Array:
        return tensor[numbers[3:1:-1]]

    right = source_kv.digest(), undisturbed
    assert told(slice(0), (), swapped) == right
    assert len(set(undisturbed)) > SMALL.generate // 2, "tokens that repeat prove little"
    value = PagedKV(source, numbers, SMALL.prompt_tokens).used_blocks()[-1], 0, 0, 0
    harms: list[tuple[str, int, slice, Any, Callable[[Array], Any]]] = [
        *[(f"block {at} does not matter", 1, slice(None), numbers[at], lambda _: 0) for at in range(count)],
        ("keys under the wrong values", 1, slice(0, None, 2), numbers[2:4], swapped),
        ("a block that did not arrive", 1, slice(3, 4), numbers[0], lambda _: np.nan),
        ("blocks that changed places", 0, slice(None), numbers[2:4], swapped),
        ("one value", 0, slice(-1, None), value, lambda tensor: tensor[value] + 1),
    ]
    for what, part, layers, where, harm in harms:
        assert told(layers, where, harm)[part] != right[part], what
