"""Many threads at once on one link, both directions at the same time, every byte compared.

Over several links: tests/faults/test_campaign.py."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from tests.support.background import Call
from tests.support.moves import Spec, Use, call, make, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Pair
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers("LLMDataDist.init")

THREADS, ROUNDS, ROWS, STRIDE = 12, 12, 16, 1000


def prepare(world: World, cluster_id: int) -> dict[str, Bytes]:
    """A source with a blocks key, a row cache with one key per thread and round, and destinations of each thread."""
    keys = tuple(CacheKey(cluster_id, number) for number in range(THREADS * ROUNDS))
    specs = {
        "source": Spec(2, ROWS, STRIDE, blocks=True, blocks_key=BlocksCacheKey(cluster_id, 0)),
        "rows": Spec(2, len(keys), STRIDE, keys=keys),
    }
    for thread in range(THREADS):
        specs[f"blocks {thread}"] = Spec(2, ROWS, STRIDE, blocks=True)
        specs[f"row {thread}"] = Spec(2, ROUNDS, STRIDE)
        specs[f"big {thread}"] = Spec(1, 2, 300_000, blocks=True)
    return {name: make(world, name, spec, 100 * cluster_id + n) for n, (name, spec) in enumerate(specs.items())}


def shown(world: World) -> dict[str, Bytes]:
    return {name: show(world, name) for name in world.caches}


def pairs_of(thread: int) -> list[tuple[int, int]]:
    random = np.random.default_rng(thread)
    return [(int(d), int(s)) for d, s in random.integers(0, ROWS, (40, 2))]


def run_threads(work: Callable[[int], None]) -> None:
    start = threading.Barrier(THREADS)

    def run(thread: int) -> None:
        start.wait(30)
        work(thread)

    for each in [Call(run, thread) for thread in range(THREADS)]:
        each.result()


def pull_in_threads(world: World, peer: int) -> None:
    """Every thread pulls blocks into its own cache, and rows by keys of its own."""

    def work(thread: int) -> None:
        blocks = [s for _, s in pairs_of(thread)], [d for d, _ in pairs_of(thread)]
        for turn in range(ROUNDS):
            call(world, "pull_blocks", BlocksCacheKey(peer, 0), Use(f"blocks {thread}"), *blocks)
            call(world, "pull_cache", CacheKey(peer, thread * ROUNDS + turn), Use(f"row {thread}"), turn)

    run_threads(work)


def push_in_threads(world: World, peer: int) -> None:
    """Every thread pushes into caches of its own there, from caches that threads share."""

    def work(thread: int) -> None:
        for turn in range(ROUNDS):
            ids = CacheKeyByIdAndIndex(peer, 3 + thread * 3)
            call(world, "push_blocks", ids, Use("source"), [turn % ROWS, thread], [thread, turn % ROWS])
            row = CacheKeyByIdAndIndex(peer, 4 + thread * 3, turn)
            call(world, "push_cache", row, Use("rows"), thread * ROUNDS + turn)
            big = CacheKeyByIdAndIndex(peer, 5 + thread * 3)
            call(world, "push_blocks", big, Use(f"big {thread}"), [0, 1], [1, 0])

    run_threads(work)


def check(before: dict[str, Bytes], after: dict[str, Bytes], source: dict[str, Bytes], *, push: bool) -> None:
    """Compare every byte of every cache of an end that got these, but the big ones of pushes, which both ends write."""
    wanted = {name: content for name, content in before.items() if not (push and name.startswith("big"))}
    for thread in range(THREADS):
        blocks, row = f"blocks {thread}", f"row {thread}"
        for turn in range(ROUNDS):
            pairs = [(thread, turn % ROWS), (turn % ROWS, thread)] if push else pairs_of(thread)
            wanted[blocks] = moved(wanted[blocks], source["source"], pairs)
            wanted[row] = moved(wanted[row], source["rows"], [(turn, thread * ROUNDS + turn)])
    for name, content in wanted.items():
        same_bytes(after[name], content)


@pytest.mark.parametrize("push", [False, True])
def test_both_ends_move_with_twelve_threads_at_the_same_time(pair: Pair, push: bool) -> None:
    pair.start(rca=push)
    prompt, decoder = pair.prompt.do(prepare, 1), pair.decoder.do(prepare, 2)
    move = push_in_threads if push else pull_in_threads
    calls = [Call(end.do, move, peer) for end, peer in ((pair.decoder, 1), (pair.prompt, 2))]
    assert [each.outcome() for each in calls] == [None, None]
    check(decoder, pair.decoder.do(shown), prompt, push=push)
    check(prompt, pair.prompt.do(shown), decoder, push=push)
    for end in (pair.prompt, pair.decoder):
        wait_until(lambda end=end: end.do(picture).pins == 0)  # type: ignore[misc]  # bound at once
        # Every key of a row was pulled once, by one of the threads.
        assert len(end.do(picture).keys) == (1 + THREADS * ROUNDS if push else 1)
