"""Many threads at once on one link, both directions at the same time, every byte compared.

Over several links: faults/tests/test_campaign.py."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from tests.support.background import Call
from tests.support.moves import Spec, Use, call, make, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from tests.support.moves import Bytes
    from tests.support.pairs import Pair
    from tests.support.world import World

pytestmark = pytest.mark.covers("LLMDataDist.init")

THREADS, ROUNDS, ROWS = 12, 12, 16
LARGE, SMALL = 8000, 1000
#: (destination, source) blocks of each thread, some of them several times.
PAIRS = [[(int(d), int(s)) for d, s in np.random.default_rng(n).integers(0, ROWS, (40, 2))] for n in range(THREADS)]


def prepare(world: World, cluster_id: int) -> dict[str, Bytes]:
    """A source with a blocks key, a row cache with one key per thread and round, and destinations of each thread."""
    keys = tuple(CacheKey(cluster_id, number) for number in range(THREADS * ROUNDS))
    specs = {
        "source": Spec(2, ROWS, LARGE, blocks=True, blocks_key=BlocksCacheKey(cluster_id, 0)),
        "rows": Spec(2, len(keys), SMALL, keys=keys),
    }
    for thread in range(THREADS):
        specs[f"blocks {thread}"] = Spec(2, ROWS, LARGE, blocks=True)
        specs[f"row {thread}"] = Spec(2, ROUNDS, SMALL)
    return {name: make(world, name, spec, 100 * cluster_id + n) for n, (name, spec) in enumerate(specs.items())}


def ids_of(world: World) -> dict[str, int]:
    return {name: cache.cache_id for name, cache in world.caches.items()}


def move(world: World, peer: int, push: bool, ids: dict[str, int]) -> None:
    """Every thread moves blocks and rows, each row once: into caches of its own, here or there (``ids``)."""
    start = threading.Barrier(THREADS)

    def work(thread: int) -> None:
        blocks = [s for _, s in PAIRS[thread]], [d for d, _ in PAIRS[thread]]
        start.wait(30)
        for turn in range(ROUNDS):
            row = thread * ROUNDS + turn
            if push:
                call(world, "push_blocks", CacheKeyByIdAndIndex(peer, ids[f"blocks {thread}"]), Use("source"), *blocks)
                call(world, "push_cache", CacheKeyByIdAndIndex(peer, ids[f"row {thread}"], turn), Use("rows"), row)
            else:
                call(world, "pull_blocks", BlocksCacheKey(peer, 0), Use(f"blocks {thread}"), *blocks)
                call(world, "pull_cache", CacheKey(peer, row), Use(f"row {thread}"), turn)

    for each in [Call(work, thread) for thread in range(THREADS)]:
        each.result()


@pytest.mark.parametrize("push", [False, True])
def test_both_ends_move_with_twelve_threads_at_the_same_time(pair: Pair, push: bool) -> None:
    pair.start(rca=push)
    ends = [(pair.prompt, 2), (pair.decoder, 1)]
    before = [pair.prompt.do(prepare, 1), pair.decoder.do(prepare, 2)]
    ids = [end.do(ids_of) for end, _ in ends]
    calls = [Call(end.do, move, peer, push, there) for (end, peer), there in zip(ends, ids[::-1], strict=True)]
    assert [each.outcome() for each in calls] == [None, None]
    for (end, _), expected, source in zip(ends, before, before[::-1], strict=True):
        for thread, pairs in enumerate(PAIRS):
            rows = [(turn, thread * ROUNDS + turn) for turn in range(ROUNDS)]
            for name, of, moves in ((f"blocks {thread}", "source", pairs), (f"row {thread}", "rows", rows)):
                expected[name] = moved(expected[name], source[of], moves)
        for name, content in expected.items():
            same_bytes(end.do(show, name), content)
        wait_until(lambda end=end: end.do(picture).pins == 0)  # type: ignore[misc]  # bound at once
        # Every key of a row was pulled once, by one of the threads.
        assert len(end.do(picture).keys) == (1 + THREADS * ROUNDS if push else 1)
