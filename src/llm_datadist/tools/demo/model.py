"""A small transformer in NumPy, with seeded weights, over a paged KV cache.

Keys and values exist only in the cache's blocks: a wrong or missing block changes the tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DemoWorkload:
    """Sizes of the model, which has two tensors (K, V) for each layer, and of the work.

    The decoder generates ``generate`` tokens. A cache has ``pool_blocks``, used or not.
    """

    layers: int = 8
    heads: int = 2
    head_dim: int = 64
    vocab: int = 4096
    prompt_tokens: int = 1000
    generate: int = 32
    block_tokens: int = 16
    pool_blocks: int = 96
    seed: int = 5

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Tensors, and the shape of each."""
        return (2 * self.layers, self.pool_blocks, self.block_tokens, self.heads, self.head_dim)

    def prompt(self) -> NDArray[np.int64]:
        """Return the prompt's tokens."""
        return np.random.default_rng(self.seed).integers(0, self.vocab, self.prompt_tokens)

    def blocks(self, *, shifted: bool) -> list[int]:
        """Return the scattered block numbers of the prompt side, or the decoder's, which differ at every place."""
        blocks: list[int] = np.random.default_rng(self.seed).permutation(self.pool_blocks).tolist()
        return blocks[1:] + blocks[:1] if shifted else blocks


class PagedKV:
    """Keys and values of one sequence of ``length`` tokens, in ``blocks``, in sequence order, of ``tensors``.

    These are K0, V0, K1, V1, ..., each (num_blocks, block_tokens, heads, head_dim), used without a copy.
    """

    def __init__(self, tensors: list[Array], blocks: list[int], length: int = 0) -> None:
        self._tensors = tensors
        self._block_tokens = tensors[0].shape[1]
        self._blocks = np.array(blocks, dtype=np.int64)
        self.length = length

    def extend(self, index: int, values: Array) -> Array:
        """Write what follows the ``length`` tokens into a tensor; return that of all tokens, (N, heads, head_dim)."""
        slots = np.arange(self.length, self.length + len(values))
        self._tensors[index][self._blocks[slots // self._block_tokens], slots % self._block_tokens] = values
        return self.gather(index, self.length + len(values))

    def gather(self, index: int, length: int) -> Array:
        """Return what a tensor has of the first ``length`` tokens."""
        tensor = self._tensors[index]
        gathered: Array = tensor[self._blocks[: -(-length // self._block_tokens)]]
        return gathered.reshape(-1, *tensor.shape[2:])[:length]

    def digest(self) -> str:
        """Return the SHA-256 of all keys and values."""
        state = hashlib.sha256()
        for index in range(len(self._tensors)):
            state.update(self.gather(index, self.length).tobytes())
        return state.hexdigest()


class DemoModel:
    """Weights from the workload's seed, and a forward step."""

    def __init__(self, work: DemoWorkload) -> None:
        rng, width = np.random.default_rng(work.seed), work.heads * work.head_dim

        def weight(rows: int, columns: int, gain: float = 1.0) -> Array:
            return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / np.sqrt(rows))

        # Random weights attend to all tokens equally. Sharper scores make the output depend on single blocks.
        gains = {"query": 2.0, "key": 2.0, "value": 1.0, "output": 1.0, "up": 1.0, "down": 1.0}
        self._head_dim = work.head_dim
        self._embedding = weight(work.vocab, width, np.sqrt(work.vocab))
        self._layers = [{name: weight(width, width, gain) for name, gain in gains.items()} for _ in range(work.layers)]
        self._head = weight(width, work.vocab)

    def generate(self, token: int, count: int, kv: PagedKV) -> list[int]:
        """Feed ``token``; return the ``count`` most likely tokens that follow."""
        tokens = [token]
        for _ in range(count):
            tokens.append(self.forward(np.array(tokens[-1:]), kv))
        return tokens[1:]

    def forward(self, tokens: NDArray[np.int64], kv: PagedKV) -> int:
        """Append ``tokens``, shape (T,), to the sequence; return the most likely next token."""
        positions = np.arange(kv.length, kv.length + len(tokens))
        x = self._embedding[tokens]
        for index, layer in enumerate(self._layers):
            h = _normed(x)
            query, key, value = ((h @ layer[n]).reshape(len(h), -1, self._head_dim) for n in ("query", "key", "value"))
            keys, values = kv.extend(2 * index, _rotated(key, positions)), kv.extend(2 * index + 1, value)
            x = x + _attend(_rotated(query, positions), keys, values, positions).reshape(h.shape) @ layer["output"]
            x = x + np.tanh(_normed(x) @ layer["up"]) @ layer["down"]
        kv.length += len(tokens)
        return int(np.argmax(_normed(x[-1:]) @ self._head))


def _normed(x: Array) -> Array:
    """Scale each row of ``x``, shape (T, width), to a root mean square of one."""
    mean: Array = np.mean(x * x, axis=-1, keepdims=True)
    result: Array = x / np.sqrt(mean + np.float32(1e-5))
    return result


def _rotated(x: Array, positions: NDArray[np.int64]) -> Array:
    """Rotate the halves of each head of ``x``, shape (T, heads, head_dim), by the positions' angles."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def _attend(query: Array, keys: Array, values: Array, positions: NDArray[np.int64]) -> Array:
    """Return causal attention of ``query``, shape (T, heads, head_dim), to what is at or before its ``positions``."""
    scores = query.transpose(1, 0, 2) @ keys.transpose(1, 2, 0) * np.float32(query.shape[-1] ** -0.5)
    scores = np.where(np.arange(len(keys)) > positions[:, None], np.float32(-np.inf), scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed: Array = (weights / weights.sum(axis=-1, keepdims=True)) @ values.transpose(1, 0, 2)
    return mixed.transpose(1, 0, 2)
