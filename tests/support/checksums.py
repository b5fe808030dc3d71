"""What the tests of checksums share: ends with them on, memory that changes after a copy, answers that do not come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llm_datadist import CacheKey
from tests.support.moves import BLOCKS, Spec, make, picture, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.ends import End
    from tests.support.moves import Bytes
    from tests.support.pairs import Pair
    from tests.support.world import World

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


def kept(pair: Pair) -> int:
    """Return how many keys the prompt has (interface R5), once every pin is given back."""
    wait_until(lambda: pair.prompt.do(picture).pins == 0)
    return len(pair.prompt.do(picture).keys)


def block_answers(world: World, go: Path) -> None:
    """Keep this end from answering until a file is there."""
    world.dd._require_engine("test")._checksums._thread.submit(wait_until, go.exists, 60)


def questions(world: World) -> int:
    """Return how many questions wait for an answer of this end."""
    return sum(len(queue) for queue in world.dd._require_engine("test")._checksums._queues.values())
