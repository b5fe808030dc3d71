"""What only the C++-shaped transfers have: layer pairs, placements, defaults, caches that serve as rows and as blocks,
and the codes of what they refuse (interface §9, R14, R16, R17, R31). The rest: tests/api/test_dialects.py."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import CacheKeyByIdAndIndex
from llm_datadist.cpp_api import Cache, CacheDesc, CacheIndex, KvCacheExtParam, LlmDataDist, LlmRole
from tests.support.cpp import (
    BAD,
    DEVICE,
    GONE,
    HOST,
    OK,
    UNLINKED,
    Shape,
    all_unchanged,
    index,
    made,
    run,
    show,
    start,
    start_pair,
)
from tests.support.moves import Spec, Use, call, make, moved, same_bytes
from tests.support.moves import show as show_v2
from tests.support.world import cluster_info

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.cpp import Row
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "cpp_api: Cache CacheDesc CacheIndex KvCacheExtParam",
    "cpp_api.LlmDataDist: PullKvBlocks PullKvCache PushKvBlocks PushKvCache",
)

ALL = (-1, -1)
KV = Use("kv")
ROW, BLOCKS = CacheIndex(1, 1, 3), CacheIndex(1, 1)
UNKNOWN, ELSEWHERE, OURSELVES = CacheIndex(1, 99), CacheIndex(7, 1), CacheIndex(2, 1)


def both(pair: Pair, here: Shape | None = None, there: Shape | None = None, **options: str) -> tuple[Bytes, Bytes]:
    """Return what the decoder, which calls, and the prompt hold in cache 1."""
    start_pair(pair, options=options)
    return pair.decoder.do(made, "kv", here or Shape(), 1), pair.prompt.do(made, "kv", there or Shape(), 2)


def test_r31_the_parameters_have_exactly_the_names_of_the_page() -> None:
    parameters = inspect.signature(LlmDataDist.PushKvBlocks).parameters
    assert list(parameters) == ["self", "src_cache", "dst_cache_index", "src_blocks", "dst_blocks", "ext_param"]
    assert parameters["ext_param"].default == KvCacheExtParam((-1, -1), (-1, -1), 2)
    parameters = inspect.signature(LlmDataDist.CopyKvBlocks).parameters
    assert list(parameters) == ["self", "src_cache", "dst_cache", "src_blocks", "dst_blocks_list"]


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
    "default layers move everything, 1 tensor per layer": ((ALL, ALL, 1), [(t, t) for t in range(4)]),
    "default layers move everything, 3 tensors per layer": ((ALL, ALL, 3), [(t, t) for t in range(4)]),
    "default layers move everything, 255 tensors per layer": ((ALL, ALL, 255), [(t, t) for t in range(4)]),
}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_r14_layer_pairs_of_a_push(shm_pair: Pair, transport: str) -> None:
    shm_pair.transport = transport
    src, dst = both(shm_pair)
    for at, (name, (ext, tensors)) in enumerate(PUSHES.items()):
        pairs = [(7 - at % 8, at % 8), (at % 8, 6 - at % 6)]
        sources, targets = [source for _, source in pairs], [target for target, _ in pairs]
        assert shm_pair.decoder.do(run, "PushKvBlocks", KV, BLOCKS, sources, targets, KvCacheExtParam(*ext)) is OK
        dst = moved(dst, src, pairs, tensors)
        for got, wanted in zip(shm_pair.prompt.do(show, "kv"), dst, strict=True):
            np.testing.assert_array_equal(got, wanted, err_msg=name)
    same_bytes(shm_pair.decoder.do(show, "kv"), src)


def test_r14_r31_pulls_of_layers_defaults_and_arrays(shm_pair: Pair) -> None:
    mine, theirs = both(shm_pair, Shape(tensors=5), Shape(tensors=5, rows=20, width=20))
    decoder = shm_pair.decoder
    assert decoder.do(run, "PullKvCache", BLOCKS, KV) is OK  # row 0 to row 0, and a longer row is cut
    mine = moved(mine, theirs, [(0, 0)])
    assert decoder.do(run, "PullKvCache", CacheIndex(1, 1, 19), KV, 5, -1, KvCacheExtParam((1, 2), (3, 4), 1)) is OK
    mine = moved(mine, theirs, [(5, 19)], [(3, 1), (4, 2)])
    same_bytes(decoder.do(show, "kv"), mine)
    same_bytes(shm_pair.prompt.do(show, "kv"), theirs)
    mine, theirs = decoder.do(made, "kv", Shape(), 3), shm_pair.prompt.do(made, "kv", Shape(rows=20, tensors=6), 4)
    there = CacheIndex(1, 2)
    args = (there, Use("kv"), np.array([15, 16]), np.array([0, 7], np.uint64), KvCacheExtParam((2, 2), (0, 0), 2))
    assert decoder.do(run, "PullKvBlocks", *args) is OK
    mine = moved(mine, theirs, [(0, 15), (7, 16)], [(0, 4), (1, 5)])
    same_bytes(decoder.do(show, "kv"), mine)
    # Only the cache id of a local cache is read.
    only_id = Cache(decoder.do(index, "kv").cache_id, [1, 2, 3], CacheDesc(HOST, 77))
    ext = KvCacheExtParam((0, 0), (2, 2), 2)
    assert decoder.do(run, "PushKvBlocks", only_id, there, [1, 2], [3, 4], ext) is OK
    same_bytes(shm_pair.prompt.do(show, "kv"), moved(theirs, mine, [(3, 1), (4, 2)], [(4, 0), (5, 1)]))
    same_bytes(decoder.do(show, "kv"), mine)


def test_r16_blocks_go_between_all_placements_and_rows_from_the_device(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    start_pair(shm_pair)
    held = {}
    for at, placement in enumerate((DEVICE, HOST)):
        held["mine", at + 1] = decoder.do(made, f"kv {at + 1}", Shape(placement=placement), at)
        held["theirs", at + 1] = prompt.do(made, f"kv {at + 1}", Shape(placement=placement), 10 + at)
    for src in (1, 2):
        for dst in (1, 2):
            args = (Use(f"kv {src}"), CacheIndex(1, dst), [src, 2 + src], [3, 2 * src + dst + 1])
            assert decoder.do(run, "PushKvBlocks", *args) is OK
            pairs = [(3, src), (2 * src + dst + 1, 2 + src)]
            held["theirs", dst] = moved(held["theirs", dst], held["mine", src], pairs)
    assert decoder.do(run, "PushKvCache", Use("kv 1"), CacheIndex(1, 2, 7), 6) is OK
    held["theirs", 2] = moved(held["theirs", 2], held["mine", 1], [(7, 6)])
    row: Row = (BAD, ("src_cache", "kHost"), ("PushKvCache", Use("kv 2"), ROW))
    all_unchanged((decoder, prompt), ["kv 1", "kv 2"], [row])
    for (end, number), wanted in held.items():
        same_bytes((decoder if end == "mine" else prompt).do(show, f"kv {number}"), wanted)


@pytest.mark.parametrize(
    ("memory", "transport"), [("pool", "auto"), ("inside", "auto"), ("private", "auto"), ("private", "tcp")]
)
def test_one_cache_serves_as_rows_and_as_blocks_and_where_it_is_is_asked_once(
    shm_pair: Pair, memory: str, transport: str
) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    start_pair(shm_pair, transport=transport)
    mine, theirs = (end.do(made, "kv", Shape(memory=memory), at) for at, end in enumerate((decoder, prompt)))
    there = prompt.do(index, "kv")
    for at in range(2):
        assert decoder.do(run, "PullKvBlocks", there, KV, [1], [2 + at]) is OK
        assert decoder.do(run, "PullKvCache", there, KV, 4 + at) is OK
        mine = moved(mine, theirs, [(2 + at, 1), (4 + at, 0)])
        assert decoder.do(run, "PushKvBlocks", KV, there, [2], [5 + at]) is OK
        assert decoder.do(run, "PushKvCache", KV, CacheIndex(1, there.cache_id, 3 + at), 6) is OK
        theirs = moved(theirs, mine, [(5 + at, 2), (3 + at, 6)])
    same_bytes(decoder.do(show, "kv"), mine)
    same_bytes(prompt.do(show, "kv"), theirs)
    assert decoder.do(_resolved) == 4  # once for each direction, of rows and of blocks
    assert prompt.do(_pins) == 0
    totals = decoder.do(_totals)
    assert totals == {
        "PullKvBlocks": (2, 0, 2 * 4 * 64),
        "PullKvCache": (2, 0, 2 * 4 * 64),
        "PushKvBlocks": (2, 0, 2 * 4 * 64),
        "PushKvCache": (2, 0, 2 * 4 * 64),
    }


def _resolved(world: World) -> int:
    return world.dd.statistics().links[0].resolved


def _pins(world: World) -> int:
    return world.dd.statistics().pins


def _totals(world: World) -> dict[str, tuple[int, int, int]]:
    operations = world.dd.statistics().operations
    return {
        each.name: (each.count, each.errors, each.nbytes)
        for each in operations
        if each.name.startswith(("Pull", "Push"))
    }


def test_a_cache_manager_at_the_other_end_uses_it_too(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    port = prompt.do(start, LlmRole.kPrompt, 1, "shm", {})
    theirs = prompt.do(made, "kv", Shape(), 1)
    decoder.start("DECODER", 2, enable_remote_cache_accessible=True, extra={"llm.Transport": "shm"})
    assert port is not None
    assert decoder.do(_link_v2, port)[0] is OK
    rows = decoder.do(make, "rows", Spec(rows=8, stride=64), 2)
    blocks = decoder.do(make, "blocks", Spec(rows=16, stride=32, blocks=True), 3)
    paged = decoder.do(make, "paged", Spec(rows=8, stride=64, blocks=True), 4)
    decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, 1, 3), Use("rows"), 5)
    same_bytes(decoder.do(show_v2, "rows"), moved(rows, theirs, [(5, 3)]))
    # A row of the peer in pieces of a block.
    decoder.do(call, "pull_blocks", CacheKeyByIdAndIndex(1, 1, 2), Use("blocks"), [], [9, 4])
    pieces = [tensor[2].reshape(2, 32) for tensor in theirs]
    same_bytes(decoder.do(show_v2, "blocks"), moved(blocks, pieces, [(9, 0), (4, 1)]))
    decoder.do(call, "push_blocks", CacheKeyByIdAndIndex(1, 1), Use("paged"), [1, 2], [6, 7])
    decoder.do(call, "push_cache", CacheKeyByIdAndIndex(1, 1, 0), Use("rows"), 1)
    same_bytes(prompt.do(show, "kv"), moved(moved(theirs, paged, [(6, 1), (7, 2)]), rows, [(0, 1)]))


def _link_v2(world: World, port: int) -> Any:
    return world.dd.link_clusters([cluster_info(1, port)], 10_000)


def test_checksums_cover_them(shm_pair: Pair) -> None:
    mine, theirs = both(shm_pair, Checksum="1")
    assert shm_pair.decoder.do(run, "PullKvBlocks", BLOCKS, KV, [1, 2], [2, 3]) is OK
    assert shm_pair.decoder.do(run, "PullKvCache", ROW, KV, 5) is OK
    same_bytes(shm_pair.decoder.do(show, "kv"), moved(mine, theirs, [(2, 1), (3, 2), (5, 3)]))
    assert shm_pair.decoder.do(_verified) == 3 * 4 * 64


def _verified(world: World) -> int:
    return world.dd.statistics().links[0].verified_bytes


# --- what is refused; one wrong argument at a time: tests/api/test_cpp_bad_input.py ----------------------------------

#: KvCacheExtParam of a push, and parts of the reason.
BAD_LAYERS: list[tuple[tuple[Any, ...], tuple[str, ...]]] = [
    ((ALL, (0, 0), 2), ("dst_layer_range",)),
    (((0, 0), ALL, 2), ("src_layer_range",)),
    (((0, 1), (0, 0), 2), ("src_layer_range", "dst_layer_range")),
    (((0, 0), (0, 0), 8), ("tensor_num_per_layer=8",)),
    (((0, 2), (0, 2), 2), ("src_layer_range", "2 layers")),
    (((0, 0), (2, 2), 2), ("dst_layer_range", "2 layers")),
    (((4, 4), (4, 4), 1), ("src_layer_range", "4 layers")),
    (((-1, 0), (-1, 0), 2), ("src_layer_range",)),
    (((-2, -2), ALL, 2), ("src_layer_range",)),
    ((ALL, ALL, -1), ("tensor_num_per_layer", "uint8")),
]
REFUSED: list[Row] = [
    (BAD, ("our own",), ("PullKvCache", OURSELVES, KV)),
    (BAD, ("our own",), ("PullKvBlocks", OURSELVES, KV, [1], [2])),
    (BAD, ("size=65", "64"), ("PullKvCache", ROW, KV, 5, 65)),
    (BAD, ("size=1",), ("PushKvCache", KV, ROW, 0, 1)),
    (BAD, ("batch_index",), ("PushKvCache", KV, CacheIndex(1, 1, 8))),
    (BAD, ("src_blocks is empty",), ("PushKvBlocks", KV, BLOCKS, [], [])),
    (BAD, ("2", "1", "equal"), ("PushKvBlocks", KV, BLOCKS, [1, 2], [3])),
    (BAD, ("src_blocks",), ("PullKvBlocks", BLOCKS, KV, [], [])),
    (BAD, ("equal",), ("PullKvBlocks", BLOCKS, KV, [1], [1, 2])),
    (BAD, ("dst_blocks[0]",), ("PushKvBlocks", KV, BLOCKS, [1], [8])),
    (BAD, ("src_blocks[0]",), ("PullKvBlocks", BLOCKS, KV, [8], [1])),
    (BAD, ("batch_index=3",), ("PullKvBlocks", ROW, KV, [1], [2])),
    (BAD, ("batch_index=3",), ("PushKvBlocks", KV, ROW, [1], [3])),
    (BAD, ("128 bytes", "64"), ("PullKvBlocks", CacheIndex(1, 2), KV, [1], [2])),  # interface R17
    (BAD, ("64 bytes", "128"), ("PushKvBlocks", KV, CacheIndex(1, 2), [1], [3])),
    (BAD, ("64 bytes", "60"), ("PushKvBlocks", KV, CacheIndex(1, 3), [1], [3])),
    (GONE, (), ("PullKvCache", CacheIndex(1, 1, 8), KV)),
    (GONE, ("99",), ("PushKvCache", KV, UNKNOWN)),
    *((GONE, (), ("PushKvBlocks", KV, CacheIndex(1, number), [1], [3])) for number in (99, 0, -1, -(2**63))),
    *((GONE, (f"id {n}",), ("PushKvBlocks", Cache(n), BLOCKS, [1], [3])) for n in (99, 0, -1, -(2**63))),
    (UNLINKED, ("cluster 7",), ("PushKvCache", KV, ELSEWHERE)),
    (UNLINKED, ("cluster 7",), ("PushKvBlocks", KV, ELSEWHERE, [1], [3])),
    *((BAD, parts, ("PushKvBlocks", KV, BLOCKS, [1], [3], KvCacheExtParam(*ext))) for ext, parts in BAD_LAYERS),
]


def test_r14_r17_r31_what_is_refused_has_its_code_and_changes_nothing(shm_pair: Pair) -> None:
    both(shm_pair)
    for width in (32, 15):
        shm_pair.prompt.do(made, f"kv of {width}", Shape(width=width), width)
    all_unchanged((shm_pair.decoder, shm_pair.prompt), ["kv", "kv of 32", "kv of 15"], REFUSED)
