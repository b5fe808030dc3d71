"""The demo's transformer: its tokens and its digest prove that every block arrived."""

from collections.abc import Callable
from typing import Any

import numpy as np

from llm_datadist.tools.demo.model import Array, DemoModel, DemoWorkload, PagedKV

SMALL = DemoWorkload(layers=4, vocab=1024, prompt_tokens=150, generate=16, pool_blocks=24)


def test_tokens_and_digest_are_those_of_the_single_process_run_only_with_every_block_in_its_place() -> None:
    """Keys carry their positions, so attention sees no order and the tokens may stay: the digest has to tell."""
    model, source = DemoModel(SMALL), list(np.full(SMALL.shape, np.nan, np.float32))
    numbers, others = SMALL.blocks(shifted=False), SMALL.blocks(shifted=True)
    count = -(-SMALL.prompt_tokens // SMALL.block_tokens)
    kv = PagedKV(source, numbers)
    first = model.forward(SMALL.prompt(), kv)
    alone = PagedKV(list(np.zeros(SMALL.shape, np.float32)), list(range(SMALL.pool_blocks)))
    assert (model.forward(SMALL.prompt(), alone), alone.digest()) == (first, kv.digest()), "the same bits"
    right = alone.digest(), model.generate(first, SMALL.generate, alone)

    def told(layers: slice, where: Any, harm: Callable[[Array], Any]) -> tuple[str, list[int]]:
        """Decode from what pull_blocks makes, the prompt's blocks at the decoder's numbers, otherwise NaN; harmed."""
        tensors: list[Array] = list(np.full(SMALL.shape, np.nan, np.float32))
        for dst, src in zip(tensors, source, strict=True):
            dst[others[:count]] = src[numbers[:count]]
        for tensor in tensors[layers]:
            tensor[where] = harm(tensor)
        pulled = PagedKV(tensors, others, SMALL.prompt_tokens)
        return pulled.digest(), model.generate(first, SMALL.generate, pulled)

    def swapped(tensor: Array) -> Array:
        return tensor[others[3:1:-1]]

    assert told(slice(0), (), swapped) == right
    assert len(set(right[1])) > SMALL.generate // 2, "tokens that repeat prove little"
    value = others[count - 1], 0, 0, 0
    harms: list[tuple[str, int, slice, Any, Callable[[Array], Any]]] = [
        *[(f"block {at} does not matter", 1, slice(None), others[at], lambda _: 0) for at in range(count)],
        ("keys under the wrong values", 1, slice(0, None, 2), others[2:4], swapped),
        ("a block that did not arrive", 1, slice(3, 4), others[0], lambda _: np.nan),
        ("blocks that changed places", 0, slice(None), others[2:4], swapped),
        ("one value", 0, slice(-1, None), value, lambda tensor: tensor[value] + 1),
    ]
    for what, part, layers, where, harm in harms:
        assert told(layers, where, harm)[part] != right[part], what
