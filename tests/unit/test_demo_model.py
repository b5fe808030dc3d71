"""The demo's transformer: its paged attention is attention, and its tokens prove that every block arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist.demo.model import Array, Llama, ModelConfig, PagedKV, attend, rms_norm, rotate
from llm_datadist.demo.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL = Workload(
    model=ModelConfig(layers=4, hidden=128, heads=8, kv_heads=2, ffn=256, vocab=1024),
    prompt_tokens=150,
    chunk=40,
    generate=16,
    pool_blocks=24,
)


def empty_cache() -> list[Array]:
    return [np.full(SMALL.shape, np.nan, dtype=np.float32) for _ in range(SMALL.num_tensors)]


def dense_attention(query: Array, keys: Array, values: Array) -> Array:
    """Attention as the textbook has it: one query and one head at a time, in float64, without a cache."""
    result = np.zeros_like(query)
    group = query.shape[1] // keys.shape[1]
    for position in range(query.shape[0]):
        for head in range(query.shape[1]):
            seen = keys[: position + 1, head // group].astype(np.float64)
            scores = seen @ query[position, head] / np.sqrt(query.shape[2])
            weights = np.exp(scores - scores.max())
            result[position, head] = weights @ values[: position + 1, head // group] / weights.sum()
    return result


def test_paged_attention_equals_dense_attention() -> None:
    rng = np.random.default_rng(1)
    length, block_tokens = 45, 16
    query = rng.standard_normal((length, 8, 16), dtype=np.float32)
    keys, values = (rng.standard_normal((length, 2, 16), dtype=np.float32) for _ in range(2))
    tensors = [np.full((7, block_tokens, 2, 16), np.nan, dtype=np.float32) for _ in range(2)]
    kv = PagedKV(tensors, [5, 0, 3, 6])
    outputs = []
    for start in range(0, length, 20):
        part = slice(start, min(start + 20, length))
        kv.write(0, keys[part], values[part])
        kv.length += part.stop - start
        outputs.append(attend(query[part], *kv.read(0, kv.length), np.arange(start, part.stop)))
    np.testing.assert_allclose(np.concatenate(outputs), dense_attention(query, keys, values), rtol=1e-4, atol=1e-5)
    # Nothing was written outside the sequence's blocks and slots.
    assert np.isnan(tensors[0][[1, 2, 4, 6]]).all()
    assert np.isnan(tensors[0][3, length % block_tokens :]).all()


def test_rotation_is_relative_and_rows_are_normed_to_one() -> None:
    """A score depends on the distance of query and key only, and position 0 is not rotated."""
    rng = np.random.default_rng(2)
    query, key = (rng.standard_normal((1, 1, 32), dtype=np.float32) for _ in range(2))

    def score(query_at: int, key_at: int) -> float:
        rotated = [rotate(x, np.array([at]), 10000.0) for x, at in ((query, query_at), (key, key_at))]
        return float((rotated[0] * rotated[1]).sum())

    np.testing.assert_array_equal(rotate(query, np.array([0]), 10000.0), query)
    assert score(7, 3) == pytest.approx(score(907, 903), rel=1e-3)
    assert score(7, 3) != pytest.approx(score(7, 4), rel=1e-3)
    rows = rng.standard_normal((5, 64), dtype=np.float32) * 40
    np.testing.assert_allclose(np.mean(rms_norm(rows) ** 2, axis=-1), 1, rtol=1e-4)


def prefilled(blocks: Sequence[int], chunk: int) -> tuple[list[Array], PagedKV, int]:
    """Return the prompt's cache and the first new token."""
    tensors = empty_cache()
    kv = PagedKV(tensors, blocks)
    return tensors, kv, Llama(SMALL.model).prefill(SMALL.prompt(), kv, chunk)


def test_tokens_and_digest_are_those_of_the_single_process_run_only_with_every_block_in_its_place() -> None:
    """Keys carry their positions, so attention sees no order and the tokens may stay: the digest has to tell."""
    model, count, numbers = Llama(SMALL.model), SMALL.prompt_blocks, SMALL.destination_blocks()
    source, source_kv, first = prefilled(SMALL.source_blocks(), SMALL.chunk)
    _, alone, again = prefilled(range(SMALL.pool_blocks), SMALL.chunk)
    assert (alone.digest(), again) == (source_kv.digest(), first), "the same seed gives the same bits"
    _, whole, _ = prefilled(range(SMALL.pool_blocks), SMALL.prompt_tokens)
    last = SMALL.model.layers - 1
    for one, other in zip(whole.read(last, whole.length), alone.read(last, alone.length), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)  # chunks do not change the prompt, up to rounding
    undisturbed = model.generate(first, SMALL.generate, alone)

    def moved() -> list[Array]:
        """Return what pull_blocks makes: the prompt's blocks at the decoder's numbers, otherwise NaN."""
        destination = empty_cache()
        for dst, src in zip(destination, source, strict=True):
            dst[numbers[:count]] = src[SMALL.source_blocks()[:count]]
        return destination

    def told(tensors: list[Array]) -> tuple[str, list[int]]:
        kv = PagedKV(tensors, numbers, SMALL.prompt_tokens)
        return kv.digest(), model.generate(first, SMALL.generate, kv)

    right = source_kv.digest(), undisturbed
    assert told(moved()) == right
    assert len(set(undisturbed)) > SMALL.generate // 2, "tokens that repeat prove little"
    for position in range(count):
        tensors = moved()
        for tensor in tensors:
            tensor[numbers[position]] = 0
        assert told(tensors)[1] != undisturbed, f"block {position} does not matter"
    tensors = moved()
    for keys in tensors[::2]:
        keys[numbers[2:4]] = keys[numbers[3:1:-1]]
    assert told(tensors)[1] != undisturbed, "keys under the wrong values"
    tensors = moved()
    tensors[3][numbers[0]] = np.nan
    assert told(tensors)[1] != undisturbed, "a block that did not arrive"
    tensors = moved()
    for tensor in tensors:
        tensor[numbers[2:4]] = tensor[numbers[3:1:-1]]
    assert told(tensors)[0] != right[0], "blocks that changed places"
    tensors = moved()
    tensors[-1][PagedKV(tensors, numbers, SMALL.prompt_tokens).used_blocks()[-1], 0, 0, 0] += 1
    assert told(tensors)[0] != right[0], "one value"


@pytest.mark.parametrize("workload", [SMALL, Workload()], ids=["small", "demo"])
def test_block_numbers(workload: Workload) -> None:
    """Both ends scatter the blocks over their cache, each block number once and none equal at both ends."""
    source, destination = workload.source_blocks(), workload.destination_blocks()
    assert sorted(source) == sorted(destination) == list(range(workload.pool_blocks))
    assert all(a != b for a, b in zip(source, destination, strict=True))
    assert source[: workload.prompt_blocks] != sorted(source[: workload.prompt_blocks])
    held = workload.pool_blocks * workload.block_tokens
    assert workload.prompt_tokens + workload.generate < held
    assert workload.tensor_bytes == held * workload.model.kv_heads * workload.model.head_dim * 4
    assert workload.block_bytes * workload.pool_blocks == workload.tensor_bytes
