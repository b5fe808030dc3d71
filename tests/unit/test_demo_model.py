"""The demo's transformer: its paged attention is attention, and its tokens prove that every block arrived."""

from __future__ import annotations

import numpy as np
import pytest

from llm_datadist.demo.model import Array, Llama, ModelConfig, PagedKV, attend, rms_norm, rotate
from llm_datadist.demo.workload import Workload

SMALL = Workload(
    model=ModelConfig(layers=4, hidden=128, heads=8, kv_heads=2, ffn=256, vocab=1024),
    prompt_tokens=150,
    chunk=40,
    generate=16,
    pool_blocks=24,
)


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(SMALL.model)


def empty_cache(workload: Workload = SMALL, fill: float = np.nan) -> list[Array]:
    return [np.full(workload.shape, fill, dtype=np.float32) for _ in range(workload.num_tensors)]


@pytest.fixture(scope="module")
def published(model: Llama) -> tuple[list[Array], int]:
    """The prompt's cache in the source's blocks, and the first new token."""
    tensors = empty_cache(fill=0)
    return tensors, model.prefill(SMALL.prompt(), PagedKV(tensors, SMALL.source_blocks()), SMALL.chunk)


@pytest.fixture
def moved(published: tuple[list[Array], int]) -> list[Array]:
    """What pull_blocks makes: the prompt's blocks at the decoder's block numbers of another cache, otherwise NaN."""
    count, destination = SMALL.prompt_blocks, empty_cache()
    for dst, src in zip(destination, published[0], strict=True):
        dst[SMALL.destination_blocks()[:count]] = src[SMALL.source_blocks()[:count]]
    return destination


def copies(tensors: list[Array]) -> list[Array]:
    return [tensor.copy() for tensor in tensors]


def decoded(tensors: list[Array]) -> PagedKV:
    return PagedKV(tensors, SMALL.destination_blocks(), SMALL.prompt_tokens)


@pytest.fixture(scope="module")
def undisturbed(model: Llama) -> list[int]:
    """The single-process run: prompt and generation in one cache with neighbouring blocks."""
    kv = PagedKV(empty_cache(), range(SMALL.pool_blocks))
    first = model.prefill(SMALL.prompt(), kv, SMALL.chunk)
    return model.generate(first, SMALL.generate, kv)


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


def test_chunks_do_not_change_the_prompt(model: Llama) -> None:
    """The cache of a prompt run in one step is, up to rounding, that of the prompt run in chunks."""
    whole, chunked = (PagedKV(empty_cache(), range(SMALL.pool_blocks)) for _ in range(2))
    model.prefill(SMALL.prompt(), whole, SMALL.prompt_tokens)
    model.prefill(SMALL.prompt(), chunked, 37)
    for one, other in zip(
        whole.read(SMALL.model.layers - 1, whole.length), chunked.read(SMALL.model.layers - 1, 150), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-3)


def test_the_tokens_are_those_of_the_single_process_run_only_with_every_block_in_its_place(
    model: Llama, published: tuple[list[Array], int], moved: list[Array], undisturbed: list[int]
) -> None:
    numbers = SMALL.destination_blocks()

    def tokens(tensors: list[Array]) -> list[int]:
        return model.generate(published[1], SMALL.generate, decoded(tensors))

    for position in range(SMALL.prompt_blocks):
        tensors = copies(moved)
        for tensor in tensors:
            tensor[numbers[position]] = 0
        assert tokens(tensors) != undisturbed, f"block {position} does not matter"
    tensors = copies(moved)
    for keys in tensors[::2]:
        keys[numbers[2:4]] = keys[numbers[3:1:-1]]
    assert tokens(tensors) != undisturbed, "keys under the wrong values"
    tensors = copies(moved)
    tensors[3][numbers[0]] = np.nan
    assert tokens(tensors) != undisturbed, "a block that did not arrive"
    assert tokens(moved) == undisturbed
    assert len(set(undisturbed)) > SMALL.generate // 2, "tokens that repeat prove little"


def test_the_digest_follows_the_sequence_and_sees_swapped_blocks_and_single_bytes(
    model: Llama, published: tuple[list[Array], int], moved: list[Array]
) -> None:
    """Keys carry their positions, so attention sees no order and the tokens may stay: the digest has to tell."""
    source = PagedKV(published[0], SMALL.source_blocks(), SMALL.prompt_tokens)
    again = empty_cache(fill=0)
    first = Llama(SMALL.model).prefill(SMALL.prompt(), PagedKV(again, SMALL.source_blocks()), SMALL.chunk)
    assert first == published[1], "the same seed gives the same bits"
    assert all(np.array_equal(one, other) for one, other in zip(again, published[0], strict=True))
    assert decoded(moved).digest() == source.digest()
    swapped, numbers = copies(moved), SMALL.destination_blocks()
    for tensor in swapped:
        tensor[numbers[2:4]] = tensor[numbers[3:1:-1]]
    assert decoded(swapped).digest() != source.digest()
    moved[-1][decoded(moved).used_blocks()[-1], 0, 0, 0] += 1
    assert decoded(moved).digest() != source.digest()


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
