"""What only the C++-shaped transfers and copies have: layer pairs, placements, defaults, caches that serve as rows and
as blocks, host memory without an id, lists of lists, the order, and the codes of what they refuse (interface §9, R8,
R10, R13, R14, R16, R17, R26, R31)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import CacheKeyByIdAndIndex
from llm_datadist.cpp_api import Cache, CacheDesc, CacheIndex, KvCacheExtParam, LlmRole
from llm_datadist.testing import StagedDevice
from tests.support.cpp import (
    DEVICE,
    HOST,
    OK,
    Shape,
    attempt,
    dist,
    host_memory,
    index,
    made,
    run,
    start,
    start_pair,
)
from tests.support.devices import BrokenDevice
from tests.support.frozen import frozen
from tests.support.linking import SUCCESS, info
from tests.support.linking import link as link_v2
from tests.support.moves import Spec, Use, call, make, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from llm_datadist.cpp_api import CachePlacement
    from tests.support.ends import LocalEnd
    from tests.support.pairs import Pair
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "cpp_api: Cache CacheDesc CacheIndex KvCacheExtParam LlmDataDist Undefined",
    "cpp_api.LlmDataDist: CopyKvBlocks CopyKvCache PullKvBlocks PullKvCache PushKvBlocks PushKvCache",
)

ALL = (-1, -1)
KV = Use("kv")
ON_HOST = Shape(placement=HOST)
BLOCKS = CacheIndex(1, 1)


# --- what moves -------------------------------------------------------------------------------------------------------

#: What is pushed: (src layers, dst layers, tensors per layer), and the (dst, src) tensors that move of four.
PUSHES: dict[str, tuple[tuple[Any, ...], list[tuple[int, int]]]] = {
    "the first layer of one tensor": (((0, 0), (0, 0), 1), [(0, 0)]),
    "the last layer of one tensor": (((3, 3), (3, 3), 1), [(3, 3)]),
    "the first layer of two tensors": (((0, 0), (0, 0), 2), [(0, 0), (1, 1)]),
    "a layer that is the whole cache": (((0, 0), (0, 0), 4), [(t, t) for t in range(4)]),
    "pairs are inclusive and may differ between the ends": (((0, 1), (2, 3), 1), [(2, 0), (3, 1)]),
    "default source layers stand for all": ((ALL, (0, 1), 2), [(t, t) for t in range(4)]),
    "default destination layers stand for all": (((0, 0), ALL, 4), [(t, t) for t in range(4)]),
    "default layers move everything, 3 tensors per layer": ((ALL, ALL, 3), [(t, t) for t in range(4)]),
    "default layers move everything, 255 tensors per layer": ((ALL, ALL, 255), [(t, t) for t in range(4)]),
}


@pytest.mark.parametrize("there", [DEVICE, HOST])
@pytest.mark.parametrize("here", [DEVICE, HOST])
def test_r14_r16_r31_layers_are_pushed_and_pulled_between_all_placements(
    pair: Pair, here: CachePlacement, there: CachePlacement
) -> None:
    decoder, prompt = pair.decoder, pair.prompt
    start_pair(pair)
    mine, theirs = decoder.do(made, "kv", Shape(placement=here), 1), prompt.do(made, "kv", Shape(placement=there), 2)
    for at, (name, (ext, tensors)) in enumerate(PUSHES.items()):
        pairs = [(7 - at % 8, at % 8), (at % 8, 6 - at % 6)]
        sources, targets = [source for _, source in pairs], [target for target, _ in pairs]
        assert decoder.do(run, "PushKvBlocks", KV, BLOCKS, sources, targets, KvCacheExtParam(*ext)) is OK
        theirs = moved(theirs, mine, pairs, tensors)
        for got, wanted in zip(prompt.do(show, "kv"), theirs, strict=True):
            np.testing.assert_array_equal(got, wanted, err_msg=name)
    layers = KvCacheExtParam((1, 2), (0, 1), 1)
    if here is DEVICE:  # of kHost: tests/api/test_cpp_bad_input.py
        assert decoder.do(run, "PushKvCache", KV, CacheIndex(1, 1, 7), 6, -1, layers) is OK
        theirs = moved(theirs, mine, [(7, 6)], [(0, 1), (1, 2)])
    assert decoder.do(run, "PullKvCache", CacheIndex(1, 1, 6), KV, 1, 17, layers) is OK
    mine = moved(mine, theirs, [(1, 6)], [(0, 1), (1, 2)], 17)
    # Pairs take effect in the order given: the last one wins.
    layers = KvCacheExtParam((1, 1), (0, 0), 2)
    assert decoder.do(run, "PullKvBlocks", BLOCKS, KV, [1, 2, 7, 6], [3, 4, 0, 3], layers) is OK
    mine = moved(mine, theirs, [(3, 1), (4, 2), (0, 7), (3, 6)], [(0, 2), (1, 3)])
    same_bytes(decoder.do(show, "kv"), mine)
    same_bytes(prompt.do(show, "kv"), theirs)


def test_r06_r07_a_peer_that_does_not_answer_times_out_and_the_link_stays(shm_pair: Pair) -> None:
    start_pair(shm_pair, options={"llm.SyncKvCacheWaitTime": "300"})
    decoder, prompt = shm_pair.decoder, shm_pair.prompt
    mine, theirs = decoder.do(made, "kv", Shape(), 1), prompt.do(made, "kv", Shape(), 2)
    calls = ("PullKvCache", BLOCKS, KV), ("PullKvBlocks", BLOCKS, KV, [1], [2])
    with frozen(prompt):
        for each in calls:
            status, text = decoder.do(attempt, *each)
            assert (status.name, "300 ms" in text) == ("LLM_TIMEOUT", True), text
    wait_until(lambda: all(decoder.do(run, *each) is OK for each in calls))
    same_bytes(decoder.do(show, "kv"), moved(mine, theirs, [(0, 0), (2, 1)]))


@pytest.mark.parametrize(
    ("memory", "transport", "checksum"),
    [("pool", "auto", 0), ("inside", "auto", 0), ("private", "auto", 0), ("private", "tcp", 0), ("pool", "auto", 1)],
)
def test_one_cache_serves_as_rows_and_as_blocks_and_where_it_is_is_asked_once(
    shm_pair: Pair, memory: str, transport: str, checksum: int
) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    start_pair(shm_pair, transport=transport, options={"llm.Checksum": str(checksum)})
    mine, theirs = (end.do(made, "kv", Shape(memory=memory), at) for at, end in enumerate((decoder, prompt)))
    there = prompt.do(index, "kv")
    only_id = Cache(decoder.do(index, "kv").cache_id, [1, 2, 3], CacheDesc(HOST, 77))  # nothing else is read
    for at in range(2):
        assert decoder.do(run, "PullKvBlocks", there, KV, np.array([1]), np.array([2 + at], np.uint64)) is OK
        assert decoder.do(run, "PullKvCache", there, only_id) is OK
        mine = moved(mine, theirs, [(2 + at, 1), (0, 0)])
        assert decoder.do(run, "PushKvBlocks", only_id, there, [2], [5 + at]) is OK
        assert decoder.do(run, "PushKvCache", KV, CacheIndex(1, there.cache_id, 3 + at), 6) is OK
        theirs = moved(theirs, mine, [(5 + at, 2), (3 + at, 6)])
    same_bytes(decoder.do(show, "kv"), mine)
    same_bytes(prompt.do(show, "kv"), theirs)
    found = decoder.do(_statistics)
    assert found.links[0].resolved == 4  # once for each direction, of rows and of blocks
    assert found.links[0].verified_bytes == checksum * 4 * 2 * 4 * 64
    assert prompt.do(picture).pins == 0
    totals = {each.name: (each.count, each.errors, each.nbytes) for each in found.operations if each.name[0] == "P"}
    assert totals == dict.fromkeys(["PullKvBlocks", "PullKvCache", "PushKvBlocks", "PushKvCache"], (2, 0, 2 * 4 * 64))


def _statistics(world: World) -> Any:
    return world.dd.statistics()


def test_a_cache_manager_at_the_other_end_uses_it_too(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    port = prompt.do(start, LlmRole.kPrompt, 1, "shm", {})
    theirs = prompt.do(made, "kv", Shape(), 1)
    decoder.start("DECODER", 2, enable_remote_cache_accessible=True, extra={"llm.Transport": "shm"})
    assert decoder.do(link_v2, [info(1, port)]) == SUCCESS
    rows = decoder.do(make, "rows", Spec(rows=8, stride=64), 2)
    blocks = decoder.do(make, "blocks", Spec(rows=16, stride=32, blocks=True), 3)
    paged = decoder.do(make, "paged", Spec(rows=8, stride=64, blocks=True), 4)
    decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, 1, 3), Use("rows"), 5)
    same_bytes(decoder.do(show, "rows"), moved(rows, theirs, [(5, 3)]))
    # A row of the peer in pieces of a block.
    decoder.do(call, "pull_blocks", CacheKeyByIdAndIndex(1, 1, 2), Use("blocks"), [], [9, 4])
    pieces = [tensor[2].reshape(2, 32) for tensor in theirs]
    same_bytes(decoder.do(show, "blocks"), moved(blocks, pieces, [(9, 0), (4, 1)]))
    decoder.do(call, "push_blocks", CacheKeyByIdAndIndex(1, 1), Use("paged"), [1, 2], [6, 7])
    decoder.do(call, "push_cache", CacheKeyByIdAndIndex(1, 1, 0), Use("rows"), 1)
    same_bytes(prompt.do(show, "kv"), moved(moved(theirs, paged, [(6, 1), (7, 2)]), rows, [(0, 1)]))


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "staged"])
def test_r08_r13_r26_lists_take_effect_one_after_the_other_also_from_and_to_the_host(
    end: LocalEnd, device: str | None
) -> None:
    random = np.random.default_rng(0)
    end.do(start, LlmRole.kMix, 1, "auto", {}, StagedDevice() if device else None)
    shapes = {"kv": Shape(rows=50), "other": Shape(rows=70), "host": Shape(rows=50, placement=HOST)}
    held = {name: end.do(made, name, shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    held["cpu"] = end.do(host_memory, "cpu", Shape(rows=60, placement=HOST), 3)
    # An id is looked up, and nothing else of the struct is read.
    assert end.do(run, "CopyKvBlocks", Cache(1, [1], CacheDesc(HOST, 9)), Cache(2), [1], [[2]]) is OK
    assert end.do(run, "CopyKvCache", Cache(1, [1], CacheDesc(HOST, 9)), Cache(2), 3, 4) is OK
    assert end.do(run, "CopyKvCache", KV, Use("host"), 1, 2) is OK
    assert end.do(run, "CopyKvCache", KV, Use("other"), 5, 0, 9, 20) is OK
    held["other"] = moved(held["other"], held["kv"], [(2, 1), (4, 3)])
    for target, source in zip(held["other"], held["kv"], strict=True):
        target[0, 9:29] = source[5, 9:29]
    held["host"] = moved(held["host"], held["kv"], [(2, 1)])
    assert end.world.dd.statistics().swap.staging_bytes == 0
    for _ in range(20):
        # Within "kv" the later pairs read what the earlier ones wrote.
        for of, to in (("kv", "other"), ("kv", "kv"), ("kv", "host"), ("cpu", "kv"), ("kv", "cpu"), ("host", "kv")):
            sources = random.integers(0, 50, int(random.integers(1, 40)))
            lists = random.integers(0, 50, (int(random.integers(1, 5)), len(sources)))
            assert end.do(run, "CopyKvBlocks", Use(of), Use(to), sources.tolist(), lists.tolist()) is OK
            for tensor, source in zip(held[to], held[of], strict=True):
                for row, block in zip(lists.flat, [*sources] * len(lists), strict=True):
                    tensor[row] = source[block]
            for name, wanted in held.items():
                same_bytes(end.do(show, name), wanted)
    # Interface R10: four buffers of a block's size.
    assert end.world.dd.statistics().swap.staging_bytes == (4 * 64 if device else 0)
    # With a size, rows of unequal length will do (interface R8).
    wide = end.do(made, "wide", Shape(width=17), 4)
    assert end.do(run, "CopyKvCache", KV, Use("wide"), 0, 0, 0, 64) is OK
    same_bytes(end.do(show, "wide"), moved(wide, held["kv"], [(0, 0)]))


def test_a_device_that_fails_is_a_status_and_not_an_exception(end: LocalEnd) -> None:
    device = BrokenDevice()
    device.broken = "copy_to_device"
    end.do(start, LlmRole.kMix, 1, "auto", {}, device)
    end.do(made, "kv", Shape(), 1)
    end.do(host_memory, "cpu", ON_HOST, 2)
    status, text = end.do(attempt, "CopyKvBlocks", Use("cpu"), KV, [0], [[0]])
    assert (status.name, text) == ("LLM_FAILED", "device is lost")
    assert isinstance(dist(end.world).last_error, OSError)
    device.broken = ""
    assert end.do(run, "CopyKvBlocks", Use("cpu"), KV, [0], [[0]]) is OK


def test_r06_a_copy_on_the_device_that_takes_too_long_times_out(end: LocalEnd) -> None:
    pool = '{"memory_size": 402653184}'
    end.do(start, LlmRole.kMix, 1, "auto", {"llm.SyncKvCacheWaitTime": "1", "llm.MemPoolConfig": pool})
    for name in ("src", "dst"):  # 64 MiB a block
        status, end.world.memory[f"cache {name}"] = end.do(run, "AllocateCache", Shape(1, 2, 16 << 20).desc)
        assert status is OK
    status, text = end.do(attempt, "CopyKvBlocks", Use("src"), Use("dst"), [0, 1], [[0, 1]] * 16)
    assert (status.name, "CopyKvBlocks" in text) == ("LLM_TIMEOUT", True), text
    end.world.dd.check_integrity()
