"""KV memory of a client: its own, made from a seed, so that every process knows what every other one holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.support.world import World

__all__ = ["addresses", "contents", "held", "shown"]

Tensors = list["NDArray[np.uint8]"]


def contents(seed: int, tensors: int, blocks: int, block_bytes: int) -> Tensors:
    """Return (blocks, block_bytes) arrays that hold what this seed stands for."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (blocks, block_bytes), np.uint8) for _ in range(tensors)]


def held(world: World, name: str, seed: int, tensors: int, blocks: int, block_bytes: int) -> list[int]:
    """Make such memory at an end, keep it under a name, and return the address of each tensor."""
    world.memory[name] = contents(seed, tensors, blocks, block_bytes)
    return addresses(world.memory[name])


def addresses(tensors: Tensors) -> list[int]:
    """Return what the interface takes: one integer per tensor."""
    return [tensor.ctypes.data for tensor in tensors]


def shown(world: World, name: str) -> Tensors:
    """Return every byte of the memory of that name."""
    kept: Tensors = world.memory[name]
    return kept
