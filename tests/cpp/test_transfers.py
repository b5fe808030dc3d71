"""What only the C++-shaped transfers and copies have: layer pairs, placements, defaults, caches that serve as rows and
as blocks, host memory without an id, lists of lists, the order, and the codes of what they refuse (interface §9, R8,
R10, R13, R14, R16, R17, R26, R31). The rest: tests/api/test_dialects.py."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import CacheKeyByIdAndIndex
from llm_datadist.cpp_api import Cache, CacheDesc, CacheIndex, DataType, KvCacheExtParam, LlmDataDist, LlmRole
from llm_datadist.testing import StagedDevice
from tests.support.cpp import (
    BAD,
    DEVICE,
    GONE,
    HOST,
    OK,
    UNLINKED,
    Shape,
    all_unchanged,
    attempt,
    dist,
    host_memory,
    index,
    made,
    run,
    show,
    start,
    start_pair,
)
from tests.support.devices import BrokenDevice
from tests.support.linking import SUCCESS, info
from tests.support.linking import link as link_v2
from tests.support.moves import Spec, Use, call, make, moved, picture, same_bytes
from tests.support.moves import show as show_v2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.cpp_api import CachePlacement
    from tests.conftest import Pair
    from tests.support.cpp import Row
    from tests.support.ends import LocalEnd
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "cpp_api: Cache CacheDesc CacheIndex KvCacheExtParam LlmDataDist Undefined",
    "cpp_api.LlmDataDist: CopyKvBlocks CopyKvCache PullKvBlocks PullKvCache PushKvBlocks PushKvCache",
)

ALL = (-1, -1)
KV = Use("kv")
ON_HOST = Shape(placement=HOST)
ROW, BLOCKS = CacheIndex(1, 1, 3), CacheIndex(1, 1)
UNKNOWN, ELSEWHERE, OURSELVES = CacheIndex(1, 99), CacheIndex(7, 1), CacheIndex(2, 1)


def both(pair: Pair, here: Shape | None = None, there: Shape | None = None) -> tuple[Bytes, Bytes]:
    """Return what the decoder, which calls, and the prompt hold in cache 1."""
    start_pair(pair)
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
    for at in range(2):
        assert decoder.do(run, "PullKvBlocks", there, KV, [1], [2 + at]) is OK
        assert decoder.do(run, "PullKvCache", there, KV, 4 + at) is OK
        mine = moved(mine, theirs, [(2 + at, 1), (4 + at, 0)])
        assert decoder.do(run, "PushKvBlocks", KV, there, [2], [5 + at]) is OK
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
    same_bytes(decoder.do(show_v2, "rows"), moved(rows, theirs, [(5, 3)]))
    # A row of the peer in pieces of a block.
    decoder.do(call, "pull_blocks", CacheKeyByIdAndIndex(1, 1, 2), Use("blocks"), [], [9, 4])
    pieces = [tensor[2].reshape(2, 32) for tensor in theirs]
    same_bytes(decoder.do(show_v2, "blocks"), moved(blocks, pieces, [(9, 0), (4, 1)]))
    decoder.do(call, "push_blocks", CacheKeyByIdAndIndex(1, 1), Use("paged"), [1, 2], [6, 7])
    decoder.do(call, "push_cache", CacheKeyByIdAndIndex(1, 1, 0), Use("rows"), 1)
    same_bytes(prompt.do(show, "kv"), moved(moved(theirs, paged, [(6, 1), (7, 2)]), rows, [(0, 1)]))


# --- what is refused; one wrong argument at a time: tests/api/test_cpp_bad_input.py ----------------------------------

#: KvCacheExtParam of a push, and parts of the reason.
BAD_LAYERS: list[tuple[tuple[Any, ...], tuple[str, ...]]] = [
    (((0, 1), (0, 0), 2), ("src_layer_range", "dst_layer_range")),
    (((0, 0), (0, 0), 8), ("tensor_num_per_layer=8",)),
    (((0, 0), (2, 2), 2), ("dst_layer_range", "2 layers")),
    (((4, 4), (4, 4), 1), ("src_layer_range", "4 layers")),
    (((-1, 0), (-1, 0), 2), ("src_layer_range",)),
    (((-2, -2), ALL, 2), ("src_layer_range",)),
    ((ALL, ALL, -1), ("tensor_num_per_layer", "uint8")),
]
REFUSED: list[Row] = [
    (BAD, ("our own",), ("PullKvCache", OURSELVES, KV)),
    (BAD, ("our own",), ("PullKvBlocks", OURSELVES, KV, [1], [2])),
    (BAD, ("batch_index",), ("PushKvCache", KV, CacheIndex(1, 1, 8))),
    (BAD, ("src_blocks is empty",), ("PushKvBlocks", KV, BLOCKS, [], [])),
    (BAD, ("2", "1", "equal"), ("PushKvBlocks", KV, BLOCKS, [1, 2], [3])),
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


def test_r14_r17_r31_transfers_that_are_refused_have_their_code_and_change_nothing(shm_pair: Pair) -> None:
    both(shm_pair)
    for width in (32, 15):
        shm_pair.prompt.do(made, f"kv of {width}", Shape(width=width), width)
    all_unchanged((shm_pair.decoder, shm_pair.prompt), ["kv", "kv of 32", "kv of 15"], REFUSED)


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def one(end: LocalEnd) -> LocalEnd:
    end.do(start, LlmRole.kMix, 1, "auto", {})
    return end


@pytest.mark.parametrize("device", [None, "staged"])
def test_r13_device_to_host_and_back_one_list_to_every_inner_list(end: LocalEnd, device: str | None) -> None:
    end.do(start, LlmRole.kMix, 1, "auto", {}, StagedDevice() if device else None)
    kv = end.do(made, "kv", Shape(), 1)
    for name, make_host in (("by id", made), ("without an id", host_memory)):
        host = end.do(make_host, name, Shape(rows=5, placement=HOST), 2)
        assert end.do(run, "CopyKvBlocks", KV, Use(name), [6, 7, 2], [[0, 1, 4], [3, 2, 3]]) is OK
        host = moved(host, kv, [(0, 6), (1, 7), (4, 2), (3, 6), (2, 7), (3, 2)])
        same_bytes(end.do(show, name), host)
        same_bytes(end.do(show, "kv"), kv)
        assert end.do(run, "CopyKvBlocks", Use(name), KV, [0, 4], [[0, 1], [7, 6]]) is OK
        kv = moved(kv, host, [(0, 0), (1, 4), (7, 0), (6, 4)])
        same_bytes(end.do(show, "kv"), kv)
        same_bytes(end.do(show, name), host)


def test_r26_r13_random_lists_take_effect_list_by_list_in_the_order_given(one: LocalEnd) -> None:
    random = np.random.default_rng(0)
    kv, other = one.do(made, "kv", Shape(rows=50), 1), one.do(made, "other", Shape(rows=70), 2)
    # An id is looked up, and nothing else of the struct is read.
    assert one.do(run, "CopyKvBlocks", Cache(1, [1], CacheDesc(HOST, 9)), Cache(2), [1], [[2]]) is OK
    assert one.do(run, "CopyKvCache", Cache(1, [1], CacheDesc(HOST, 9)), Cache(2), 3, 4) is OK
    other = moved(other, kv, [(2, 1), (4, 3)])
    for _ in range(20):
        sources = random.integers(0, 50, int(random.integers(1, 40)))
        lists = random.integers(0, 50, (int(random.integers(1, 5)), len(sources)))
        pairs = [(int(to), int(of)) for row in lists for of, to in zip(sources, row, strict=True)]
        for name, target in (("other", other), ("kv", kv)):  # the second one reads what it wrote
            assert one.do(run, "CopyKvBlocks", KV, Use(name), sources.tolist(), lists.tolist()) is OK
            for tensor, source in zip(target, kv, strict=True):
                for to, of in pairs:
                    tensor[to] = source[of]
            same_bytes(one.do(show, name), target)


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


SHAPES = {"src": Shape(), "dst": Shape(rows=6), "wide": Shape(width=17), "few": Shape(tensors=3)}
SHAPES |= {"host": ON_HOST, "one": Shape(tensors=1)}
SRC, DST = Use("src"), Use("dst")


def host_desc(num_tensors: int = 4, placement: CachePlacement = HOST, shape: Sequence[int] = (8, 16)) -> CacheDesc:
    return CacheDesc(placement, num_tensors, DataType.DT_INT32, list(shape))


#: (src, dst, src_blocks, dst_blocks_list, parts of the reason)
LISTS: list[tuple[Any, ...]] = [
    (SRC, DST, [], [[]], ("src_blocks is empty",)),
    (SRC, DST, [1], [], ("dst_blocks_list is empty",)),
    (SRC, DST, [1], [[2], []], ("dst_blocks_list[1]", "equal")),
    (SRC, DST, [1, 2], [[2]], ("dst_blocks_list[0]", "2", "1", "equal")),
    (SRC, DST, [8], [[2]], ("src_blocks[0]", "8")),
    (SRC, DST, [0, 1], [[2, 3], [4, 6]], ("dst_blocks_list[1][1]=6", "[0, 6)")),
    (SRC, DST, [-1], [[2]], ("src_blocks[0]", "-1")),
    (SRC, DST, [1], [[-2]], ("dst_blocks_list[0][0]", "-2")),
    (SRC, DST, [1], [[2**64]], ("dst_blocks_list[0][0]",)),
    (SRC, Use("wide"), [1], [[2]], ("block sizes", "64", "68")),
    (SRC, Use("few"), [1], [[2]], ("num_tensors", "4", "3")),
    *((Use(src), Use(dst), [1], [[2]], ("HOST",)) for src, dst in (("host", "host"), ("host", "cpu"), ("cpu", "cpu"))),
]
#: What is no host memory without an id, and parts of the reason.
INCOMPLETE: list[tuple[Cache, tuple[str, ...]]] = [
    (Cache(-1, [64] * 4, host_desc(placement=DEVICE)), ("cache_id=-1", "kDevice")),
    (Cache(-1, [64] * 4, host_desc(num_tensors=0)), ("num_tensors=0",)),
    (Cache(-1, [64] * 4, CacheDesc(HOST, 4, shape=[8, 16])), ("DT_UNDEFINED",)),
    (Cache(-1, [64] * 4, host_desc(shape=[])), ("shape is empty",)),
    (Cache(-1, [64] * 4, host_desc(shape=[8, -16])), ("shape", "-16")),
    (Cache(-1, [64] * 3, host_desc()), ("tensor_addrs has 3", "4")),
    (Cache(-1, [64, 64, 0, 64], host_desc()), ("tensor_addrs[2]=0",)),
    (Cache(-1, [64, 64, -1, 64], host_desc()), ("tensor_addrs[2]", "uint64")),
    (Cache(-1, [64, 64, 2**64 - 8, 64], host_desc()), ("address space",)),
    (Cache(0, [64] * 4, host_desc()), ("cache_id=0",)),
    (Cache(-2, [64] * 4, host_desc()), ("cache_id=-2",)),
]
NO_SUCH = Cache(99, [64] * 4, host_desc())
BLOCK_ROWS: list[Row] = [
    *((BAD, parts, ("CopyKvBlocks", *args)) for *args, parts in LISTS),
    *((BAD, parts, ("CopyKvBlocks", cache, SRC, [1], [[2]])) for cache, parts in INCOMPLETE),
    *((BAD, parts, ("CopyKvBlocks", SRC, cache, [1], [[2]])) for cache, parts in INCOMPLETE),
    (GONE, ("src_cache", "99"), ("CopyKvBlocks", NO_SUCH, SRC, [1], [[2]])),
    (GONE, ("dst_cache", "99"), ("CopyKvBlocks", SRC, NO_SUCH, [1], [[2]])),
]
ROW_ROWS: list[Row] = [
    (BAD, ("src_batch_index=8",), ("CopyKvCache", SRC, DST, 8)),
    (BAD, ("dst_batch_index=6",), ("CopyKvCache", SRC, DST, 0, 6)),
    (BAD, ("offset=64",), ("CopyKvCache", SRC, DST, 0, 0, 64)),
    (BAD, ("offset=1", "size=64"), ("CopyKvCache", SRC, DST, 0, 0, 1, 64)),
    (BAD, ("row shapes",), ("CopyKvCache", SRC, Use("wide"))),
    (BAD, ("4 tensors", "3"), ("CopyKvCache", SRC, Use("few"))),
    (BAD, ("src_cache", "kHost"), ("CopyKvCache", Use("host"), SRC)),
]


def test_r08_r13_copies_that_are_refused_have_their_code_and_change_nothing(one: LocalEnd) -> None:
    before = {name: one.do(made, name, shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())}
    one.do(host_memory, "cpu", ON_HOST, 9)
    # Tensors that overlap without being the same.
    shifted = Cache(-1, [one.world.memory["cache one"].tensor_addrs[0] + 64], host_desc(num_tensors=1))
    overlap: Row = (BAD, ("overlap",), ("CopyKvBlocks", shifted, Use("one"), [1], [[2]]))
    all_unchanged([one], [*SHAPES, "cpu"], [*BLOCK_ROWS, *ROW_ROWS, overlap])
    # With a size, rows of unequal length will do (interface R8), and the host may be the destination.
    assert one.do(run, "CopyKvCache", SRC, Use("wide"), 0, 0, 0, 64) is OK
    assert one.do(run, "CopyKvCache", SRC, Use("host"), 1, 2) is OK
    for got, old, source in zip(one.do(show, "wide"), before["wide"], before["src"], strict=True):
        old[0, :64] = source[0]
        np.testing.assert_array_equal(got, old)
    same_bytes(one.do(show, "host"), moved(before["host"], before["src"], [(2, 1)]))
