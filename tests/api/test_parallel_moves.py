"""Many threads at once on one link and on two, both directions at the same time, every byte compared."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from tests.support.ends import LocalEnd
from tests.support.gates import begin
from tests.support.moves import Spec, Use, call, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import cluster_info

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers("LLMDataDist.init")

THREADS, ROUNDS, ROWS, STRIDE = 12, 12, 16, 1000
KEYS = {cluster: BlocksCacheKey(cluster, 0) for cluster in (1, 2, 3)}


def prepare(world: World, cluster_id: int) -> Bytes:
    """A source with a blocks key, a row cache with one key per thread and round, and one destination per thread."""
    source = make(world, "source", Spec(2, ROWS, STRIDE, blocks=True, blocks_key=KEYS[cluster_id]), cluster_id)
    keys = tuple(CacheKey(cluster_id, number) for number in range(THREADS * ROUNDS))
    make(world, "rows", Spec(2, len(keys), STRIDE, keys=keys), 10 + cluster_id)
    for thread in range(THREADS):
        make(world, f"blocks {thread}", Spec(2, ROWS, STRIDE, blocks=True), 20 + thread)
        make(world, f"row {thread}", Spec(2, ROUNDS, STRIDE), 40 + thread)
        make(world, f"big {thread}", Spec(1, 2, 300_000, blocks=True), 60 + thread)
    return source


def pairs_of(thread: int) -> list[tuple[int, int]]:
    random = np.random.default_rng(thread)
    return [(int(d), int(s)) for d, s in random.integers(0, ROWS, (40, 2))]


def run_threads(work: Any) -> None:
    start, errors = threading.Barrier(THREADS), []

    def run(thread: int) -> None:
        try:
            start.wait(30)
            work(thread)
        except BaseException as error:  # noqa: BLE001 (carried to the test)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(THREADS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not any(each.is_alive() for each in threads)
    if errors:
        raise errors[0]


def pull_in_threads(world: World, peers: list[int]) -> None:
    """Every thread pulls blocks into its own cache, and rows by keys of its own, from one peer after the other."""

    def work(thread: int) -> None:
        pairs = pairs_of(thread)
        for turn in range(ROUNDS):
            peer = peers[(thread + turn) % len(peers)]
            blocks = ([s for _, s in pairs], [d for d, _ in pairs])
            call(world, "pull_blocks", KEYS[peer], Use(f"blocks {thread}"), *blocks)
            key = CacheKey(peer, thread * ROUNDS + turn)
            call(world, "pull_cache", key, Use(f"row {thread}"), turn)

    run_threads(work)


def shown(world: World) -> dict[str, Bytes]:
    return {name: show(world, name) for name in world.caches}


def check_pulls(before: dict[str, Bytes], after: dict[str, Bytes], sources: dict[int, dict[str, Bytes]]) -> None:
    """Compare every byte of every cache of an end that pulled."""
    peers = list(sources)
    for thread in range(THREADS):
        blocks, rows = before[f"blocks {thread}"], before[f"row {thread}"]
        for turn in range(ROUNDS):
            source = sources[peers[(thread + turn) % len(peers)]]
            blocks = moved(blocks, source["source"], pairs_of(thread))
            rows = moved(rows, source["rows"], [(turn, thread * ROUNDS + turn)])
        same_bytes(after[f"blocks {thread}"], blocks)
        same_bytes(after[f"row {thread}"], rows)
        same_bytes(after[f"big {thread}"], before[f"big {thread}"])
    same_bytes(after["source"], before["source"])
    same_bytes(after["rows"], before["rows"])


def test_twelve_threads_pull_over_one_link(pair: Pair) -> None:
    pair.start()
    pair.prompt.do(prepare, 1)
    pair.decoder.do(prepare, 2)
    prompt, decoder = pair.prompt.do(shown), pair.decoder.do(shown)
    pair.decoder.do(pull_in_threads, [1])
    check_pulls(decoder, pair.decoder.do(shown), {1: prompt})
    wait_until(lambda: pair.prompt.do(picture).pins == 0)
    # Every key was pulled once, by one of the threads.
    assert [key.key for key in pair.prompt.do(picture).keys] == ["(2, 0, 0)"]


def test_both_ends_pull_with_twelve_threads_at_the_same_time(pair: Pair) -> None:
    pair.start()
    pair.prompt.do(prepare, 1)
    pair.decoder.do(prepare, 2)
    prompt, decoder = pair.prompt.do(shown), pair.decoder.do(shown)
    finish = begin(pair.decoder, pull_in_threads, [1])
    try:
        _do_beside(pair, pair.prompt, pull_in_threads, [2])
    finally:
        finish()
    check_pulls(decoder, pair.decoder.do(shown), {1: prompt})
    check_pulls(prompt, pair.prompt.do(shown), {2: decoder})


def _do_beside(pair: Pair, end: Any, function: Any, *args: Any) -> None:
    begin(end, function, *args)()


def push_in_threads(world: World, peer: int) -> None:
    """Every thread pushes blocks and a row into places of its own at the peer, and large blocks that threads share."""

    def work(thread: int) -> None:
        for turn in range(ROUNDS):
            ids = CacheKeyByIdAndIndex(peer, 3 + thread * 3)
            call(world, "push_blocks", ids, Use("source"), [turn % ROWS, thread], [thread, turn % ROWS])
            row = CacheKeyByIdAndIndex(peer, 4 + thread * 3, turn)
            call(world, "push_cache", row, Use("rows"), thread * ROUNDS + turn)
            big = CacheKeyByIdAndIndex(peer, 5 + thread * 3)
            call(world, "push_blocks", big, Use(f"big {thread}"), [0, 1], [1, 0])

    run_threads(work)


def test_twelve_threads_push_in_both_directions_at_the_same_time(pair: Pair) -> None:
    pair.start(rca=True)
    pair.prompt.do(prepare, 1)
    pair.decoder.do(prepare, 2)
    before = {1: pair.prompt.do(shown), 2: pair.decoder.do(shown)}
    finish = begin(pair.decoder, push_in_threads, 1)
    try:
        _do_beside(pair, pair.prompt, push_in_threads, 2)
    finally:
        finish()
    after = {1: pair.prompt.do(shown), 2: pair.decoder.do(shown)}
    for here, there in ((1, 2), (2, 1)):
        for thread in range(THREADS):
            blocks, rows = before[here][f"blocks {thread}"], before[here][f"row {thread}"]
            for turn in range(ROUNDS):
                pairs = [(thread, turn % ROWS), (turn % ROWS, thread)]
                blocks = moved(blocks, before[there]["source"], pairs)
                rows = moved(rows, before[there]["rows"], [(turn, thread * ROUNDS + turn)])
            same_bytes(after[here][f"blocks {thread}"], blocks)
            same_bytes(after[here][f"row {thread}"], rows)
        same_bytes(after[here]["source"], before[here]["source"])
        same_bytes(after[here]["rows"], before[here]["rows"])


def test_twelve_threads_pull_over_two_links(local_pair: Pair) -> None:
    local_pair.start(linked=False, extra={})
    for end, cluster in ((local_pair.prompt, 1), (local_pair.decoder, 2)):
        end.do(prepare, cluster)
    third = LocalEnd("third")
    third.start("MIX", 3, listen_ip_info="127.0.0.1:0", extra={"llm.Transport": "inproc"})
    try:
        assert third.port is not None
        for end in (local_pair.prompt, local_pair.decoder):
            end.do(_link, 3, third.port)
        third.do(prepare_target)
        sources = {1: local_pair.prompt.do(shown), 2: local_pair.decoder.do(shown)}
        before = third.do(shown)
        third.do(pull_in_threads, [1, 2])
        check_pulls(before, third.do(shown), sources)
    finally:
        third.stop()


def prepare_target(world: World) -> None:
    prepare(world, 3)


def _link(world: World, cluster_id: int, port: int) -> None:
    assert world.dd.link_clusters([cluster_info(cluster_id, port)], 10_000)[0] is LLMStatusCode.LLM_SUCCESS
