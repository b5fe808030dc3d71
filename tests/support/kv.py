"""KV blocks whose bytes follow from the identity of their engine and from their key: the oracle of a prefix store."""

import hashlib

import numpy as np
from numpy.typing import NDArray

#: What an engine holds in blocks that it has not computed or loaded.
POISON = 0xA5


def key_of(space: str, number: int) -> bytes:
    """Return key ``number`` of a space: 32 bytes, as a digest of tokens."""
    return hashlib.blake2b(f"{space} {number}".encode(), digest_size=32).digest()


def bytes_of(identity: bytes, key: bytes, tensors: int, nbytes: int) -> NDArray[np.uint8]:
    """Return the bytes of one key's block, ``(tensors, nbytes)``; ``nbytes`` is a multiple of 8.

    Consecutive words from a start that is a digest: no word of a block appears at another place of it, and none in the
    block of another identity, key or geometry, but by a chance of 2**-40 or less.
    """
    name = b"%d %d " % (tensors, nbytes) + identity + key
    start = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())
    words = np.arange(tensors * nbytes // 8, dtype=np.uint64) + np.uint64(start)
    return words.view(np.uint8).reshape(tensors, nbytes)
