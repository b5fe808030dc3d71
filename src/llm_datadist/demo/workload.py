"""The demo's inputs, from seeds: equal in every process."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.demo.model import ModelConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FLOAT_BYTES: Final = 4


DemoTransport = StrEnum("DemoTransport", "AUTO SHM CMA TCP NIXL INPROC")
"""Values of ``--transport``; the last runs both roles as two ``LLMDataDist`` in one process."""

DemoMemory = StrEnum("DemoMemory", "POOL REGISTERED")
"""Values of ``--memory``: the library's pools, or the roles' own arrays, registered with the library."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Transport and memory of the bytes; ``secrets``: file of the secret that both sides prove, None without one."""

    transport: DemoTransport
    memory: DemoMemory
    secrets: str | None = None


@dataclass(frozen=True, slots=True)
class DemoWorkload:
    """Sizes of the demo.

    Attributes:
        chunk: Tokens of the prompt per forward step.
        generate: Tokens that the decoder generates.
        pool_blocks: Blocks of each cache, used or not.
        seed: Seed of prompt and block numbers.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    prompt_tokens: int = 1000
    chunk: int = 125
    generate: int = 32
    block_tokens: int = 16
    pool_blocks: int = 96
    seed: int = 5

    @property
    def num_tensors(self) -> int:
        """Tensors of the cache."""
        return 2 * self.model.layers

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of one tensor."""
        return (self.pool_blocks, self.block_tokens, self.model.kv_heads, self.model.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one tensor."""
        return self.tensor_bytes // self.pool_blocks

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor."""
        return int(np.prod(self.shape)) * _FLOAT_BYTES

    def prompt(self) -> NDArray[np.int64]:
        """Return the prompt's tokens."""
        return np.random.default_rng(self.seed).integers(0, self.model.vocab, self.prompt_tokens)

    def source_blocks(self) -> list[int]:
        """Return the prompt side's scattered block numbers."""
        return [int(block) for block in np.random.default_rng(self.seed).permutation(self.pool_blocks)]

    def destination_blocks(self) -> list[int]:
        """Return the decoder's scattered block numbers; none equals the source's at its place."""
        rng = np.random.default_rng(self.seed + 1)
        while True:
            blocks: list[int] = rng.permutation(self.pool_blocks).tolist()
            if all(a != b for a, b in zip(blocks, self.source_blocks(), strict=True)):
                return blocks
