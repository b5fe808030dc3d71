"""What the tests of checksums share: ends with them on, memory that changes after a copy, answers that do not come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist import CacheKey, LLMStatusCode
from llm_datadist.views import tensor_views
from tests.support.moves import BLOCKS, Spec, call, make, picture, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from llm_datadist.errors import ChecksumMismatch
    from tests.conftest import Pair
    from tests.support.ends import End
    from tests.support.moves import Bytes
    from tests.support.world import World

__all__ = [
    "KEY",
    "ON",
    "PAGED",
    "ROWS",
    "STRIDE",
    "TENSORS",
    "block_answers",
    "both",
    "flip",
    "flipping",
    "is_named",
    "questions",
    "unconsumed",
    "verified",
]

ON = {"llm.Checksum": "1"}
KEY = CacheKey(1, 10)
ROWS = Spec(keys=(KEY,))
PAGED = Spec(blocks=True, blocks_key=BLOCKS)
TENSORS, STRIDE = 4, 48


def both(pair: Pair, source: Spec, target: Spec, **settings: Any) -> tuple[Bytes, Bytes]:
    pair.start(extra=ON | settings.pop("extra", {}), **settings)
    return pair.prompt.do(make, "kv", source, 1), pair.decoder.do(make, "kv", target, 2)


def verified(end: End) -> int:
    (only,) = end.do(picture).links
    total: int = only.verified_bytes
    return total


def flip(world: World, name: str, tensor: int, at: int) -> None:
    """Change one bit of a cache."""
    tensor_views(world.caches[name])[tensor].reshape(-1).view(np.uint8)[at] ^= 4


def flipping(world: World, verb: str, name: str, tensor: int, at: int, method: str, *args: Any, **kwargs: Any) -> None:
    """Make a call; once its bytes have moved (``verb`` is read or write), one bit of a cache of this end changes."""
    assert world.dd._engine is not None
    connections: tuple[Any, ...] = world.dd._engine.links.get(1).connection.connections

    def corrupted(original: Any) -> Any:
        def move(*args: Any) -> Any:
            result = original(*args)
            flip(world, name, tensor, at)
            return result

        return move

    for connection in connections:
        setattr(connection, verb, corrupted(getattr(connection, verb)))
    try:
        call(world, method, *args, **kwargs)
    finally:
        for connection in connections:
            del connection.__dict__[verb]


def is_named(
    error: ChecksumMismatch, *parts: str, cache_id: int, local: tuple[int, int], remote: tuple[int, int]
) -> None:
    """The error says where: (tensor, block) at this end and the other."""
    assert (error.local_tensor, error.local_block) == local
    assert (error.remote_tensor, error.remote_block) == remote
    assert (error.cache_id, error.peer, error.phase) == (cache_id, 1, "verify")
    assert error.status_code is LLMStatusCode.LLM_FAILED
    assert error.retryable
    text = str(error)
    named = (f"tensor {local[0]} ", f" {local[1]} (", f"tensor {remote[0]} ", f" {remote[1]} (", f"cache {cache_id} ")
    assert [part for part in ("cluster 1", *named, *parts) if part not in text] == [], text
    assert "\n" not in text


def unconsumed(pair: Pair, keys: int) -> None:
    """The pin is given back, and every key is still there (interface R5)."""
    wait_until(lambda: pair.prompt.do(picture).pins == 0)
    assert len(pair.prompt.do(picture).keys) == keys


def block_answers(world: World, go: Path) -> None:
    """Keep this end from answering until a file is there."""
    assert world.dd._engine is not None
    world.dd._engine._checksums._thread.submit(wait_until, go.exists, 60)


def questions(world: World) -> int:
    """Return how many questions wait for an answer of this end."""
    assert world.dd._engine is not None
    return sum(len(queue) for queue in world.dd._engine._checksums._queues.values())
