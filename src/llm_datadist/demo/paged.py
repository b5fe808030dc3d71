"""The paged KV cache as the model sees it: tensors cut into blocks, and the block numbers of one sequence."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from llm_datadist.demo.model import Array

__all__ = ["PagedKV"]


class PagedKV:
    """Keys and values of one sequence in blocks that lie anywhere in ``tensors``.

    Attributes:
        blocks: Block number of tokens ``i * block_tokens`` and following, for each i.
        length: Tokens whose keys and values are in the cache in every layer.
    """

    def __init__(self, tensors: Sequence[Array], blocks: Sequence[int], length: int = 0) -> None:
        """Use ``tensors`` (K0, V0, K1, V1, ..., each (num_blocks, block_tokens, kv_heads, head_dim)) without a copy."""
        self._tensors = list(tensors)
        self._block_tokens = tensors[0].shape[1]
        self.blocks = np.array(blocks, dtype=np.int64)
        self.length = length

    def write(self, layer: int, keys: Array, values: Array) -> None:
        """Put the keys and values (shape (T, kv_heads, head_dim)) of the tokens after ``length`` into their blocks."""
        slots = np.arange(self.length, self.length + len(keys))
        where = (self.blocks[slots // self._block_tokens], slots % self._block_tokens)
        self._tensors[2 * layer][where] = keys
        self._tensors[2 * layer + 1][where] = values

    def read(self, layer: int, length: int) -> tuple[Array, Array]:
        """Gather the keys and values of the first ``length`` tokens, each of shape (length, kv_heads, head_dim)."""
        return self._gather(2 * layer, length), self._gather(2 * layer + 1, length)

    def advance(self, count: int) -> None:
        """Count ``count`` more tokens as written."""
        self.length += count

    def used_blocks(self) -> NDArray[np.int64]:
        """Return the numbers of the blocks that hold at least one token, in the order of the sequence."""
        return self.blocks[: -(-self.length // self._block_tokens)]

    def digest(self) -> str:
        """Return the SHA-256 of the keys and values of all ``length`` tokens in all tensors, wherever they lie."""
        state = hashlib.sha256()
        for index in range(len(self._tensors)):
            state.update(self._gather(index, self.length).tobytes())
        return state.hexdigest()

    def _gather(self, index: int, length: int) -> Array:
        tensor = self._tensors[index]
        blocks = self.blocks[: -(-length // self._block_tokens)]
        gathered: Array = tensor[blocks].reshape(-1, *tensor.shape[2:])[:length]
        return gathered
