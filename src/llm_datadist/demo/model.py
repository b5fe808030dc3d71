"""A small Llama-style transformer in NumPy, with seeded weights, over a paged KV cache.

Keys and values exist only in the cache's blocks: a wrong or missing block changes the tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Takes how many tokens are done, of how many."""

_NORM_EPSILON: Final = np.float32(1e-5)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        layers: Transformer layers; the cache has two tensors (K, V) for each.
        hidden: Width of the residual stream.
        heads: Query heads, each of size ``hidden / heads``.
        kv_heads: Key and value heads.
        ffn: Width of the feed-forward layer.
        rope_base: Base of the rotary frequencies.
    """

    layers: int = 8
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 704
    vocab: int = 4096
    rope_base: float = 10000.0
    seed: int = 2

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.hidden // self.heads


class PagedKV:
    """Keys and values of one sequence, in blocks anywhere in ``tensors``.

    Attributes:
        blocks: Block numbers, in sequence order.
        length: Tokens in the cache.
    """

    def __init__(self, tensors: Sequence[Array], blocks: Sequence[int], length: int = 0) -> None:
        """Use ``tensors`` (K0, V0, K1, V1, ..., each (num_blocks, block_tokens, kv_heads, head_dim)) without a copy."""
        self._tensors = list(tensors)
        self._block_tokens = tensors[0].shape[1]
        self.blocks = np.array(blocks, dtype=np.int64)
        self.length = length

    def write(self, layer: int, keys: Array, values: Array) -> None:
        """Write the keys and values, shape (T, kv_heads, head_dim), of the tokens after ``length``."""
        slots = np.arange(self.length, self.length + len(keys))
        where = (self.blocks[slots // self._block_tokens], slots % self._block_tokens)
        self._tensors[2 * layer][where] = keys
        self._tensors[2 * layer + 1][where] = values

    def read(self, layer: int, length: int) -> tuple[Array, Array]:
        """Gather the keys and values of the first ``length`` tokens, shape (length, kv_heads, head_dim)."""
        return self._gather(2 * layer, length), self._gather(2 * layer + 1, length)

    def used_blocks(self) -> NDArray[np.int64]:
        """Return the blocks that hold tokens, in sequence order."""
        return self.blocks[: -(-self.length // self._block_tokens)]

    def digest(self) -> str:
        """Return the SHA-256 of all keys and values."""
        state = hashlib.sha256()
        for index in range(len(self._tensors)):
            state.update(self._gather(index, self.length).tobytes())
        return state.hexdigest()

    def _gather(self, index: int, length: int) -> Array:
        tensor = self._tensors[index]
        blocks = self.blocks[: -(-length // self._block_tokens)]
        gathered: Array = tensor[blocks].reshape(-1, *tensor.shape[2:])[:length]
        return gathered


class _Layer(NamedTuple):
    query: Array
    key: Array
    value: Array
    output: Array
    gate: Array
    up: Array
    down: Array


class Llama:
    """The model: weights from the seed, and a forward step."""

    # Random weights attend to all tokens equally. Sharper scores make the output depend on single blocks.
    _SHARPNESS: Final = 2.0

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        rng = np.random.default_rng(config.seed)
        kv_width = config.kv_heads * config.head_dim

        def weight(rows: int, columns: int, gain: float = 1.0) -> Array:
            values = rng.standard_normal((rows, columns), dtype=np.float32)
            return values * np.float32(gain / np.sqrt(rows))

        self._embedding = rng.standard_normal((config.vocab, config.hidden), dtype=np.float32)
        self._layers = [
            _Layer(
                query=weight(config.hidden, config.hidden, self._SHARPNESS),
                key=weight(config.hidden, kv_width, self._SHARPNESS),
                value=weight(config.hidden, kv_width),
                output=weight(config.hidden, config.hidden),
                gate=weight(config.hidden, config.ffn),
                up=weight(config.hidden, config.ffn),
                down=weight(config.ffn, config.hidden),
            )
            for _ in range(config.layers)
        ]
        self._head = weight(config.hidden, config.vocab)

    def forward(self, tokens: NDArray[np.int64], kv: PagedKV) -> int:
        """Append ``tokens``, shape (T,), to the sequence; return the most likely next token."""
        start = kv.length
        positions = np.arange(start, start + len(tokens))
        x = self._embedding[tokens]
        for index, layer in enumerate(self._layers):
            x = x + self._attention(index, layer, rms_norm(x), positions, kv)
            x = x + _feed_forward(layer, rms_norm(x))
        kv.length += len(tokens)
        logits = rms_norm(x[-1:]) @ self._head
        return int(np.argmax(logits))

    def prefill(self, prompt: NDArray[np.int64], kv: PagedKV, chunk: int, progress: Progress | None = None) -> int:
        """Run ``prompt`` in chunks of ``chunk`` tokens; return the first new token."""
        token = -1
        for start in range(0, len(prompt), chunk):
            token = self.forward(prompt[start : start + chunk], kv)
            if progress is not None:
                progress(min(start + chunk, len(prompt)), len(prompt))
        return token

    def generate(self, token: int, count: int, kv: PagedKV, progress: Progress | None = None) -> list[int]:
        """Feed ``token``; return the ``count`` most likely tokens that follow."""
        tokens: list[int] = []
        for done in range(1, count + 1):
            token = self.forward(np.array([token]), kv)
            tokens.append(token)
            if progress is not None:
                progress(done, count)
        return tokens

    def _attention(self, index: int, layer: _Layer, h: Array, positions: NDArray[np.int64], kv: PagedKV) -> Array:
        config = self.config
        count = len(h)
        weights = (layer.query, layer.key, layer.value)
        query, key, value = ((h @ each).reshape(count, -1, config.head_dim) for each in weights)
        kv.write(index, rotate(key, positions, config.rope_base), value)
        keys, values = kv.read(index, int(positions[-1]) + 1)
        attended = attend(rotate(query, positions, config.rope_base), keys, values, positions)
        return attended.reshape(count, config.hidden) @ layer.output


def rms_norm(x: Array) -> Array:
    """Scale each row of ``x``, shape (T, hidden), to a root mean square of one."""
    mean: Array = np.mean(x * x, axis=-1, keepdims=True)
    result: Array = x / np.sqrt(mean + _NORM_EPSILON)
    return result


def rotate(x: Array, positions: NDArray[np.int64], base: float) -> Array:
    """Rotate the halves of each head of ``x``, shape (T, heads, head_dim), by the positions' angles."""
    half = x.shape[-1] // 2
    frequencies = base ** (-np.arange(half) / half)
    angles = positions[:, None, None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def attend(query: Array, keys: Array, values: Array, positions: NDArray[np.int64]) -> Array:
    """Return causal grouped-query attention, shape (T, heads, head_dim), for queries of that shape.

    Keys and values, shape (N, kv_heads, head_dim), are of positions 0 to N - 1. A query sees those up to its own of the
    ``positions``, shape (T,).
    """
    count, heads, head_dim = query.shape
    length, kv_heads, _ = keys.shape
    grouped = query.reshape(count, kv_heads, heads // kv_heads, head_dim).transpose(1, 2, 0, 3)
    scores = grouped.reshape(kv_heads, -1, head_dim) @ keys.transpose(1, 2, 0)
    scores = (scores * np.float32(head_dim**-0.5)).reshape(kv_heads, -1, count, length)
    scores = np.where(np.arange(length) > positions[:, None], np.float32(-np.inf), scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = weights.reshape(kv_heads, -1, length) @ values.transpose(1, 0, 2)
    result: Array = mixed.reshape(kv_heads, -1, count, head_dim).transpose(2, 0, 1, 3).reshape(query.shape)
    return result


def _feed_forward(layer: _Layer, h: Array) -> Array:
    gate: Array = h @ layer.gate
    result: Array = (gate / (np.float32(1) + np.exp(-gate)) * (h @ layer.up)) @ layer.down
    return result
