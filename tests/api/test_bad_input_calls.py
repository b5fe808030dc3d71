"""Bad input to every call of CacheManager and LLMDataDist: one table per call (interface §3, §6, R1)."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
    TransferWithCacheKeyConfig,
    config,
)
from llm_datadist.errors import NotInitialized
from tests.support import refusals
from tests.support.layers import Always
from tests.support.linking import free_port, info, link, unlink
from tests.support.memory import FIXED_ADDRS
from tests.support.moves import Spec as CacheSpec
from tests.support.moves import Use, make
from tests.support.pairs import Pair, pair_of
from tests.support.refusals import GONE, MISMATCH, NONE, RULE, TYPE, UNLINKED, Spec, Table, bad, each, integer, no_op
from tests.support.tensors import Tensor
from tests.support.world import World, fill, read, residue, settled, small_pool

# --- the scene of the tables: two linked ends full of caches, made once per file: no row changes it ---
#: The prompt's caches by id, in the order of making: all of one pool, rows of 32 bytes unless the name says otherwise.
PROMPT_CACHES: Final[dict[str, CacheSpec]] = {
    "rows": CacheSpec(4, 3, 32, keys=(CacheKey(1, 10), CacheKey(1, 11), CacheKey(1, 12))),
    "paged": CacheSpec(4, 6, 32, blocks=True, blocks_key=BlocksCacheKey(1, 0)),
    "narrow rows": CacheSpec(4, 3, 16, keys=(CacheKey(1, 30), CacheKey(1, 0, model_id=1))),
    "two tensors": CacheSpec(2, 3, 32, keys=(CacheKey(1, 40),)),
    "wide blocks": CacheSpec(4, 6, 64, blocks=True, blocks_key=BlocksCacheKey(1, 1)),
    "two paged tensors": CacheSpec(2, 6, 32, blocks=True, blocks_key=BlocksCacheKey(1, 2)),
    "hidden rows": CacheSpec(4, 3, 32, memory="private", accessible=False),
    "hidden blocks": CacheSpec(
        4, 6, 32, blocks=True, blocks_key=BlocksCacheKey(1, 3), memory="private", accessible=False
    ),
    "five tensors": CacheSpec(5, 3, 32, keys=(CacheKey(1, 50),)),
    "prefix": CacheSpec(4, 3, 32, keys=(CacheKey(1, 2**64 - 1, 0, 20),)),
}

#: The decoder's, which is the end that calls.
DECODER_CACHES: Final[dict[str, CacheSpec]] = {
    "rows": CacheSpec(4, 3, 32, keys=(CacheKey(2, 1),)),
    "more rows": CacheSpec(4, 5, 32),
    "narrow rows": CacheSpec(4, 3, 16),
    "two tensors": CacheSpec(2, 3, 32),
    "five tensors": CacheSpec(5, 3, 32),
    "paged": CacheSpec(4, 6, 32, blocks=True, blocks_key=BlocksCacheKey(2, 0)),
    "more blocks": CacheSpec(4, 6, 32, blocks=True),
    "host": CacheSpec(4, 8, 32, blocks=True, placement=Placement.HOST, memory="private"),
    "freed rows": CacheSpec(4, 3, 32),
    "freed blocks": CacheSpec(4, 6, 32, blocks=True),
    "waiting": CacheSpec(4, 3, 32, keys=(CacheKey(2, 50),)),
}


def _populate(world: World, specs: dict[str, CacheSpec]) -> None:
    for seed, (name, spec) in enumerate(specs.items()):
        make(world, name, spec, seed)


def _populate_decoder(world: World) -> None:
    """Beside those of the table: one of another element type, two that were given back, one that waits for a pull."""
    _populate(world, DECODER_CACHES)
    world.caches["signed"] = world.cm.allocate_cache(CacheDesc(4, [3, 32], DataType.DT_INT8))
    fill(world.caches["signed"], 99)
    world.cm.deallocate_cache(world.caches["freed rows"])
    world.cm.deallocate_blocks_cache(world.caches["freed blocks"])
    world.cm.deallocate_cache(world.caches["waiting"])


def _scene(request: pytest.FixtureRequest, transport: str, *, rca: bool) -> Iterator[Pair]:
    for pair in pair_of(request, transport):
        pair.start(rca=rca, **small_pool())
        pair.prompt.do(_populate, PROMPT_CACHES)
        pair.decoder.do(_populate_decoder)
        yield pair


@pytest.fixture(scope="module")
def scene(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two linked ends; one at a time, since the child processes are those of all tests. See :data:`PLAIN`."""
    yield from _scene(request, "shm", rca=request.param)


#: Without and with remote cache access; neither has a host pool.
PLAIN: Final = pytest.mark.parametrize("scene", [pytest.param(False, id="shm")], indirect=True, scope="module")
ACCESSIBLE: Final = pytest.mark.parametrize("scene", [pytest.param(True, id="shm")], indirect=True, scope="module")


@pytest.fixture
def fresh_scene(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The same in this process, for a test that does change it; with remote cache access."""
    yield from _scene(request, "inproc", rca=True)


INT8: Final = DataType.DT_INT8
MAX: Final = 2**64 - 1
DESC: Final = CacheDesc(2, [3, 32], INT8)
ADDRS: Final = FIXED_ADDRS
UNKNOWN_ROWS: Final = Cache(99, DESC, ADDRS)
UNKNOWN_BLOCKS: Final = Cache(99, DESC, ADDRS, is_blocks_cache=True)
PLACEHOLDER: Final = CacheKey(1, MAX)
#: The prompt's ids count from 1 in the order of making (interface I11).
ID: Final = {name: number for number, name in enumerate(PROMPT_CACHES, start=1)}


def row_of(name: str, row: int = 0, cluster: int = 1) -> CacheKeyByIdAndIndex:
    """The row of one of the prompt's caches, by id: the address that works in both modes."""
    return CacheKeyByIdAndIndex(cluster, ID[name], row)


def blocks_of(model: int = 0, cluster: int = 1) -> BlocksCacheKey:
    return BlocksCacheKey(cluster, model)


#: At a cluster that is not linked, and at our own; caches that are not there any more.
AWAY, BLOCKS_AWAY = row_of("rows", cluster=77), blocks_of(cluster=77)
OURS, OUR_BLOCKS = row_of("rows", cluster=2), blocks_of(cluster=2)
FREED, FREED_BLOCKS = Use("freed rows"), Use("freed blocks")

# --- kinds of arguments that only these calls have --------------------------------------------------------------------
CACHE: Final = Spec((1, "rows", DESC, [Use("rows")], [Use("paged")]))
ROWS: Final = Spec(
    CACHE.wrong,
    (RULE, "blocks cache", Use("paged"), UNKNOWN_BLOCKS),
    (GONE, "no cache with id", FREED),
    (GONE, "99", UNKNOWN_ROWS),
)
PAGED: Final = Spec(
    CACHE.wrong,
    (RULE, "not a blocks cache", Use("rows"), UNKNOWN_ROWS),
    (GONE, "no cache with id", FREED_BLOCKS),
    (GONE, "99", UNKNOWN_BLOCKS),
)
CACHE_DESC: Final = Spec(
    ("desc", [3, 32], 1),
    (RULE, "num_tensors", CacheDesc(0, [3, 32], INT8), CacheDesc(2**20 + 1, [3, 32], INT8)),
    (RULE, "shape", *(CacheDesc(2, shape, INT8) for shape in ([0, 32], [3, -1], [1] * 32, [2**40, 2**40]))),
)
ROW_KEYS: Final = Spec(
    (CacheKey(1, 1), {CacheKey(1, 1)}, "keys", 1),
    (NONE, "{}[1]", [CacheKey(1, 1), None]),
    (TYPE, "{}[0]", [BlocksCacheKey(1)]),
    (TYPE, "{}[2]", [PLACEHOLDER, PLACEHOLDER, 7]),
    (RULE, "4 keys", [CacheKey(1, n) for n in range(100, 104)], [PLACEHOLDER] * 4),
)
BLOCKS_KEY: Final = Spec((CacheKey(2, 1), [BlocksCacheKey(2)], 0), none_ok=True)
ADDRESSES: Final = Spec(
    (tuple(ADDRS), ADDRS[0], "addrs", set(ADDRS)),
    (NONE, "{}[1]", [ADDRS[0], None]),
    (TYPE, "{}[1]", [ADDRS[0], "2"]),
    (TYPE, "{}[0]", [1.0, ADDRS[1]]),
    (RULE, "{}[1]", [ADDRS[0], -1], [ADDRS[0], 2**64]),
    (RULE, "{}[1]=0", [ADDRS[0], 0]),
    (RULE, "address space", [ADDRS[0], 2**64 - 8]),
    (RULE, "{}[1]=0x8: its 96 bytes must be mapped", [ADDRS[0], 8]),
    (RULE, "{}[0]=0x7f1234560000: its 96 bytes must be mapped", [0x7F1234560000, ADDRS[1]]),
    (RULE, "empty", []),
    (RULE, "1 addresses", [ADDRS[0]]),
    (RULE, "3 addresses", [*ADDRS, ADDRS[0]]),
)
ACCESS: Final = Spec((1, 0, "yes", [True]), none_ok=True)
ROW_KEY: Final = Spec(
    (1, "key", (1, 10), blocks_of(), [row_of("rows")]),
    (UNLINKED, "77", AWAY),
    (UNLINKED, "0", row_of("rows", cluster=0)),
    (GONE, "99", CacheKeyByIdAndIndex(1, 99)),
    (GONE, "0", CacheKeyByIdAndIndex(1, 0)),  # in a push it stands for request 0 of model 0; there is one of model 1
    (RULE, "blocks cache", row_of("paged")),
    (MISMATCH, "16", row_of("narrow rows")),
    (MISMATCH, "num_tensors", row_of("two tensors")),
    (MISMATCH, "5", row_of("five tensors")),
    (RULE, "remote_accessible", row_of("hidden rows")),
)
MODEL: Final = Spec(
    (1, "key", (1, 0), [blocks_of()]),
    (UNLINKED, "77", BLOCKS_AWAY),
    (GONE, "model_id=9", blocks_of(9)),
    (MISMATCH, "64", blocks_of(1)),
    (MISMATCH, "num_tensors", blocks_of(2)),
    (RULE, "remote_accessible", blocks_of(3)),
)
ROW: Final = integer(0, 2**32 - 1, 3)
SIZE: Final = integer(-(2**63), 2**63 - 1, 0, -2, 33)
CLUSTERS: Final = Spec(
    (info(5, 9), 1, "clusters", {1: info(5, 9)}),
    (NONE, "{}[1]", [info(1, 9), None]),
    (TYPE, "{}[1]", [info(1, 9), 1]),
    (TYPE, "{}[0]", [[info(1, 9)]]),
)

# --- caches and their memory ------------------------------------------------------------------------------------------
NO_ROOM: Final = (
    bad(refusals.FULL, "device", cache_desc=CacheDesc(1, [1, 2**20 + 1], INT8)),  # larger than the pool
    bad(refusals.FULL, "device", cache_desc=CacheDesc(2, [1, 2**19 + 2**18], INT8)),  # the first tensor fits
    bad(refusals.FULL, "device", cache_desc=CacheDesc(2**20, [1], INT8)),
    bad(RULE, "host_mem_pool_cfg", cache_desc=CacheDesc(2, [3, 32], INT8, Placement.HOST)),
)
MAKE: Final = {"cache_desc": DESC}
REGISTER: Final = {"cache_desc": CACHE_DESC, "addrs": ADDRESSES, "remote_accessible": ACCESS}
DEVICE: Final = Memtype.MEM_TYPE_DEVICE
GOOD_INFO: Final = MemInfo(DEVICE, 1 << 20, 64)
MEM_INFOS: Final = Spec(
    (),
    (NONE, "{}[1]", [GOOD_INFO, None]),
    (RULE, "empty", []),
    (RULE, "{}[0]", 1 << 20, (GOOD_INFO,), MemInfo(DEVICE, 1 << 20, 0), MemInfo(DEVICE, 1 << 20, -1)),  # no TypeError
    (RULE, "{}[1]", [GOOD_INFO, "x"], [GOOD_INFO, MemInfo(DEVICE, 0, 64)]),
    (RULE, "only device", MemInfo(Memtype.MEM_TYPE_HOST, 1 << 20, 64)),
)
MAKING: Final = (
    Table(
        "cm.allocate_cache",
        MAKE | {"cache_keys": ()},
        {"cache_desc": CACHE_DESC, "cache_keys": ROW_KEYS},
        *NO_ROOM,
        # the cluster id does not matter
        *each(refusals.IN_USE, "req_id=1", cache_keys=[[CacheKey(2, 1)], [CacheKey(7, 100), CacheKey(7, 1)]]),
        bad(refusals.IN_USE, "req_id=50", cache_keys=[CacheKey(2, 50)]),  # deallocated, not pulled yet
    ),
    Table(
        "cm.allocate_blocks_cache",
        MAKE | {"blocks_cache_key": None},
        {"cache_desc": CACHE_DESC, "blocks_cache_key": BLOCKS_KEY},
        *NO_ROOM,
        *each(refusals.IN_USE, "model_id=0", blocks_cache_key=[BlocksCacheKey(2, 0), BlocksCacheKey(7, 0)]),
    ),
    Table("cm.register_cache", MAKE | {"addrs": ADDRS}, REGISTER | {"cache_keys": ROW_KEYS}),
    Table("cm.register_blocks_cache", MAKE | {"addrs": ADDRS}, REGISTER | {"blocks_cache_key": BLOCKS_KEY}),
    Table("cm.remap_registered_memory", {"mem_infos": GOOD_INFO}, {"mem_infos": MEM_INFOS}),
)
GIVING_BACK: Final = (
    Table(
        "cm.deallocate_cache",
        {"cache": Use("more rows")},
        {"cache": CACHE},
        *each(RULE, "blocks cache", cache=[Use("paged"), UNKNOWN_BLOCKS]),
        *(no_op(cache=cache) for cache in (UNKNOWN_ROWS, FREED)),
    ),
    Table(
        "cm.deallocate_blocks_cache",
        {"cache": Use("more blocks")},
        {"cache": CACHE},
        *each(RULE, "not a blocks cache", cache=[Use("rows"), UNKNOWN_ROWS]),
        *(no_op(cache=cache) for cache in (UNKNOWN_BLOCKS, FREED_BLOCKS)),
    ),
    Table(
        "cm.remove_cache_key",
        {"cache_key": CacheKey(2, 1)},
        {"cache_key": Spec((1, "key", (2, 1), [CacheKey(2, 1)], BlocksCacheKey(2)))},
        # the blocks key of model 0 stays (interface R25), and request 1 is no prefix 1
        *(no_op(cache_key=key) for key in (CacheKey(2, 99), CacheKey(2, 1, 1), PLACEHOLDER, CacheKey(2, MAX, 0, 1))),
    ),
    Table(
        "cm.unregister_cache",
        {"cache_id": 8},
        {"cache_id": refusals.INT64},
        bad(TYPE, cache_id=Use("host")),
        *(no_op(cache_id=number) for number in (99, 0, -1, -(2**63), 1)),  # 1 is an allocated cache
    ),
)

# --- copies inside the process; swaps: test_swaps.py ---------------------------------------------------------
ORDER: Final = ("dst", "src", "dst_batch_index", "src_batch_index", "offset", "size")  # in which they are checked
COPYING: Final = (
    Table(
        "cm.copy_cache",
        {"dst": Use("more rows"), "src": Use("rows")},
        {
            "dst": ROWS,
            "src": ROWS,
            "dst_batch_index": refusals.UINT32,
            "src_batch_index": ROW,
            "offset": refusals.UINT64,
            "size": SIZE,
            "req_id": integer(0, MAX, none_ok=True),
        },
        # sizes and rows
        bad(RULE, dst_batch_index=5),
        bad(RULE, "32", offset=32),
        bad(RULE, "33", offset=33, size=1),
        bad(RULE, "20", offset=20, size=13),
        bad(RULE, "16", dst=Use("narrow rows"), size=17),
        bad(RULE, "16", src=Use("narrow rows"), size=17),
        bad(RULE, "16", src=Use("narrow rows"), offset=16, size=1),
        # descriptors that do not match (interface R8)
        bad(MISMATCH, "16", dst=Use("narrow rows")),
        bad(MISMATCH, "dst 2", dst=Use("two tensors")),
        bad(MISMATCH, "5 tensors", src=Use("five tensors")),
        bad(MISMATCH, "DT_INT8", src=Use("signed")),
        bad(MISMATCH, "DT_INT8", dst=Use("signed"), size=8),
        bad(GONE, "req_id=7", src=UNKNOWN_ROWS, req_id=7),
        *each(RULE, "{}: a continuous cache is needed", dst=[Cache(6, DESC, ADDRS)], src=[Cache(6, DESC, ADDRS)]),
        *(bad(NONE, f"{name} only", req_id="x", **dict.fromkeys(ORDER[at:])) for at, name in enumerate(ORDER)),
        bad(RULE, "size=0", size=0, req_id="x"),
    ),
    Table(
        "cm.copy_blocks",
        {"cache": Use("paged"), "copy_block_info": {0: [1, 2]}},
        {"cache": PAGED, "copy_block_info": refusals.COPY_PAIRS},
        bad(RULE, "cache: a blocks cache is needed", cache=Cache(1, DESC, ADDRS, is_blocks_cache=True)),
        bad(GONE, "id -1", cache=Cache.create_cpu_cache(CacheDesc(2, [3, 32], INT8, Placement.HOST), ADDRS)),
        no_op(copy_block_info={}),
        no_op(copy_block_info={0: []}),
        no_op(copy_block_info={3: [3]}),
    ),
)

# --- pulls ------------------------------------------------------------------------------------------------------------
BLOCKS: Final = {"src_blocks": refusals.BLOCK_LIST, "dst_blocks": refusals.BLOCK_LIST, **refusals.LAYERS}
UNEQUAL_LISTS: Final = (
    *refusals.UNEQUAL_LAYERS,
    bad(RULE, "is empty", src_blocks=(), dst_blocks=()),
    *each(RULE, "{} is empty", src_blocks=[[]], dst_blocks=[[]]),
    *each(RULE, "{}", src_blocks=[[0, 6], [2**40, 0]], dst_blocks=[[0, 6]]),
    *each(RULE, "equal lengths", src_blocks=[[0]], dst_blocks=[[0, 1, 2]]),
)
ROW_IN_BLOCKS: Final = {"src_blocks": [], "dst_blocks": [0]}
#: Without remote cache access rows are named by their keys as well.
GOOD_ROW_BY_KEY: Final = {"cache_key": CacheKey(1, 10), "cache": Use("rows")}
PULL_CACHE: Final = Table(
    "cm.pull_cache",
    {"cache_key": row_of("rows"), "cache": Use("rows"), "tensor_num_per_layer": 2},
    {"cache_key": ROW_KEY, "cache": ROWS, "batch_index": ROW, "size": SIZE, **refusals.LAYERS},
    *refusals.UNEQUAL_LAYERS,
    *each(RULE, "must be -1 or above 0", size=[0, -2]),
    # First types, one's own cluster, the local cache and its shape, then the link, then what is there.
    bad(TYPE, "batch_index", cache_key=OURS, cache=FREED, batch_index="3"),
    bad(RULE, "our own", cache_key=OURS, cache=FREED, batch_index=3),
    bad(GONE, "no cache with id", cache_key=AWAY, cache=FREED, batch_index=3),
    bad(RULE, "size", cache_key=AWAY, size=33),
    bad(RULE, "batch_index", cache_key=AWAY, batch_index=3),
    bad(UNLINKED, "cluster 77", cache_key=row_of("rows", 9, cluster=77)),
    bad(GONE, "row 9", cache_key=row_of("narrow rows", 9)),
    bad(GONE, "-5", cache_key=CacheKeyByIdAndIndex(1, -5)),
    *each(GONE, "3 rows", cache_key=[row_of("rows", 3), row_of("rows", 2**32 - 1)]),
    bad(MISMATCH, "16", cache_key=row_of("narrow rows"), size=17),
    bad(MISMATCH, "num_tensors", cache=Use("two tensors")),
    bad(RULE, "5 tensors", cache=Use("five tensors"), **refusals.ONE_LAYER),
    bad(RULE, "5 tensors", cache_key=row_of("five tensors"), **refusals.ONE_LAYER),
)
PULL_CACHE_BY_KEY: Final = Table(
    "cm.pull_cache",
    GOOD_ROW_BY_KEY,
    {},
    *each(RULE, "exactly one", cache_key=[PLACEHOLDER, CacheKey(1, 10, 0, 20)]),
    bad(RULE, "our own", cache_key=CacheKey(2, 1)),
    bad(UNLINKED, "77", cache_key=CacheKey(77, 10)),
    bad(GONE, "req_id=13", cache_key=CacheKey(1, 13)),
    bad(GONE, "model_id=1", cache_key=CacheKey(1, 10, 1)),
    bad(GONE, "req_id=20", cache_key=CacheKey(1, 20)),  # a prefix id
    bad(GONE, "prefix_id=10", cache_key=CacheKey(1, MAX, 0, 10)),  # a request id
    bad(MISMATCH, "num_tensors", cache_key=CacheKey(1, 40)),
    bad(MISMATCH, "16", cache_key=CacheKey(1, 30)),
)
#: With it they are not (the page), even if everything else about the call is wrong too.
PULL_CACHE_BY_KEY_WITH_ACCESS: Final = Table(
    "cm.pull_cache",
    GOOD_ROW_BY_KEY,
    {},
    bad(TYPE, "CacheKeyByIdAndIndex"),
    bad(TYPE, "CacheKeyByIdAndIndex", cache_key=CacheKey(77, 10), cache=None),
)
PULL_BLOCKS: Final = Table(
    "cm.pull_blocks",
    {"src_cache_key": blocks_of(), "dst_cache": Use("paged"), "src_blocks": [0, 5], "dst_blocks": [3, 1]},
    {"src_cache_key": MODEL, "dst_cache": PAGED, **BLOCKS, "grant": Spec(("grant", 1), none_ok=True)},
    *UNEQUAL_LISTS,
    bad(RULE, "dst_blocks is empty", src_blocks=[], dst_blocks=[]),
    bad(RULE, "dst_blocks[1]=6", dst_blocks=[0, 6]),
    # in the order of pull_cache
    bad(TYPE, "dst_blocks", src_cache_key=OUR_BLOCKS, dst_cache=FREED_BLOCKS, dst_blocks=[0, "6"]),
    bad(RULE, "our own", src_cache_key=OUR_BLOCKS, dst_cache=FREED_BLOCKS, dst_blocks=[0, 6]),
    bad(GONE, "no cache with id", src_cache_key=BLOCKS_AWAY, dst_cache=FREED_BLOCKS, dst_blocks=[0, 6]),
    bad(RULE, "dst_blocks[1]=6", src_cache_key=BLOCKS_AWAY, dst_blocks=[0, 6]),
    bad(UNLINKED, "cluster 77", src_cache_key=BLOCKS_AWAY, src_blocks=[0, 99]),
    bad(GONE, "model_id=9", src_cache_key=blocks_of(9), src_blocks=[0, 99]),
    bad(MISMATCH, "block sizes", src_cache_key=blocks_of(1), src_blocks=[0, 99]),
    # a row that is cut into blocks
    *each(RULE, "only a BlocksCacheKey", src_cache_key=[row_of("rows"), CacheKey(1, 10)]),
    bad(GONE, "99", src_cache_key=CacheKeyByIdAndIndex(1, 99), **ROW_IN_BLOCKS),
    bad(GONE, "3 rows", src_cache_key=row_of("rows", 3), **ROW_IN_BLOCKS),
    bad(RULE, "dst_blocks", src_cache_key=row_of("rows"), src_blocks=[], dst_blocks=[0, 1]),  # one piece only
    bad(RULE, "blocks cache", src_cache_key=row_of("paged"), **ROW_IN_BLOCKS),
    bad(MISMATCH, "num_tensors", src_cache_key=row_of("two tensors"), **ROW_IN_BLOCKS),
    bad(RULE, "our own", src_cache_key=OURS, **ROW_IN_BLOCKS),
    bad(RULE, "exactly one", src_cache_key=PLACEHOLDER, **ROW_IN_BLOCKS),
    bad(GONE, "req_id=13", src_cache_key=CacheKey(1, 13), **ROW_IN_BLOCKS),
    bad(GONE, "req_id=10", src_cache_key=CacheKey(1, 10, 4), **ROW_IN_BLOCKS),
)

# --- pushes -----------------------------------------------------------------------------------------------------------
#: An empty range is not "all layers", as in a pull.
EMPTY_LAYERS: Final = (
    bad(RULE, "empty", src_layer_range=range(0), dst_layer_range=range(0)),
    *each(RULE, "is empty", src_layer_range=[range(2, 1)], dst_layer_range=[range(1, 1)]),
)
PUSH_CACHE: Final = Table(
    "cm.push_cache",
    {"dst_cache_key": row_of("rows"), "src_cache": Use("rows"), "tensor_num_per_layer": 2},
    {
        "dst_cache_key": ROW_KEY,
        "src_cache": ROWS,
        "src_batch_index": ROW,
        "size": integer(-1, -1, 32),  # only the whole row
        **refusals.LAYERS,
    },
    *refusals.UNEQUAL_LAYERS,
    *EMPTY_LAYERS,
    bad(TYPE, "src_batch_index", dst_cache_key=AWAY, src_cache=FREED, src_batch_index="3"),
    bad(GONE, "no cache with id", dst_cache_key=AWAY, src_cache=FREED, src_batch_index=3),
    bad(RULE, "src_batch_index", dst_cache_key=AWAY, src_batch_index=3),
    bad(UNLINKED, "cluster 77", dst_cache_key=row_of("rows", 9, cluster=77)),
    bad(RULE, "batch_index", dst_cache_key=row_of("narrow rows", 9)),
    bad(GONE, "req_id=0", dst_cache_key=CacheKeyByIdAndIndex(1, -1)),
    bad(TYPE, dst_cache_key=CacheKey(1, 10)),
    bad(RULE, "3 rows", dst_cache_key=row_of("rows", 3)),
    bad(MISMATCH, "num_tensors", src_cache=Use("two tensors")),
    bad(RULE, "5 tensors", src_cache=Use("five tensors"), **refusals.ONE_LAYER),
)
PUSH_BLOCKS: Final = Table(
    "cm.push_blocks",
    {"dst_cache_key": blocks_of(), "src_cache": Use("paged"), "src_blocks": [0, 5], "dst_blocks": [3, 1]},
    {"dst_cache_key": MODEL, "src_cache": PAGED, **BLOCKS},
    *UNEQUAL_LISTS,
    *EMPTY_LAYERS,
    bad(RULE, "src_blocks[1]=6", src_blocks=[0, 6]),
    bad(TYPE, "src_blocks", dst_cache_key=BLOCKS_AWAY, src_cache=FREED_BLOCKS, src_blocks=[0, "6"]),
    bad(GONE, "no cache with id", dst_cache_key=BLOCKS_AWAY, src_cache=FREED_BLOCKS, src_blocks=[0, 6]),
    bad(RULE, "src_blocks[1]=6", dst_cache_key=BLOCKS_AWAY, src_blocks=[0, 6]),
    bad(UNLINKED, "cluster 77", dst_cache_key=BLOCKS_AWAY, dst_blocks=[0, 99]),
    bad(GONE, "model_id=9", dst_cache_key=blocks_of(9), dst_blocks=[0, 99]),
    bad(MISMATCH, "block sizes", dst_cache_key=blocks_of(1), dst_blocks=[0, 99]),
    bad(TYPE, dst_cache_key=CacheKey(1, 10)),
    bad(GONE, "99", dst_cache_key=CacheKeyByIdAndIndex(1, 99)),
    bad(RULE, "batch_index=1", dst_cache_key=row_of("paged", 1)),
    bad(RULE, "blocks", dst_cache_key=row_of("rows")),
)
PUSHES: Final = (PUSH_CACHE, PUSH_BLOCKS)
#: Whatever the arguments are: remote access is asked for first (interface R16).
WITHOUT_ACCESS: Final = [
    bad(RULE, "enable_remote_cache_accessible", **changes)
    for changes in ({}, {"dst_cache_key": None, "src_cache": None}, {"dst_cache_key": BLOCKS_AWAY})
]

# --- values that no argument of these kinds may have, as users pass them by mistake -----------------------------------
NAN: Final = float("nan")
#: Block numbers, of which two are wanted in caches of six.
ODD_LISTS: Final = Spec(
    (
        b"\0\5",
        "\0\5",
        "\uff10\uff15",
        bytearray(2),
        frozenset({0, 5}),
        {0: 5}.keys(),
        iter([0, 5]),
        (each for each in (0, 5)),
        NAN,
    ),
    (TYPE, "{} is a 2-D int64 array", np.zeros((1, 2), np.int64)),
    (TYPE, "{} is a 1-D bool array", np.ones(2, np.bool_), Tensor([True, False])),
    (TYPE, "{} is a 1-D float64 array", np.array([0, NAN]), Tensor([0.0, 5.0])),
    (TYPE, "{} is a torch.int64 tensor on cuda:0", Tensor([0, 5], "cuda:0")),
    (TYPE, "{}[1] is ", [0, NAN], (0, "\0"), [0, b"5"], [0, np.float32(5)], [0, np.ones((2, 2))], [0, Tensor(5.0)]),
    (RULE, "{}[1] is ", [0, 2**63], (0, 2**70), np.array([0, -1]), np.array([0, 2**63], np.uint64), Tensor([0, -1])),
    (RULE, "{} is range(", range(-2, 0), range(1, -2, -2), range(2**70), range(2**40)),
)
#: Millions of entries: none of the blocks after the sixth is there.
MILLIONS: Final = (range(2_000_000), np.arange(2_000_000))
ODD_NUMBERS: Final = Spec(
    (NAN, "é", "\0", b"1", {1}, [1], iter([1]), np.zeros((1, 1), np.int64), np.ones(2, np.bool_), 1.0),
    (RULE, str(2**70), 2**70),
    (RULE, str(-(2**70)), -(2**70)),
)
TWO: Final = {"src_blocks": ODD_LISTS, "dst_blocks": ODD_LISTS}
ALL_LAYERS: Final = TransferWithCacheKeyConfig(blocks_of(), range(2), range(2))


def of_values(lists: Spec, name: str) -> list[refusals.Row]:
    """Rows of a dict of whose lists one is odd."""
    rows = lists.rows(f"{name}[0]")
    return [refusals.Row({name: {0: value}}, row.kind, row.texts) for row in rows for value in row.changes.values()]


ODD: Final = (
    Table(
        "cm.pull_blocks", PULL_BLOCKS.good, TWO, *each(RULE, "equal lengths", src_blocks=MILLIONS, dst_blocks=MILLIONS)
    ),
    Table(
        "cm.push_blocks", PUSH_BLOCKS.good, TWO, *each(RULE, "equal lengths", src_blocks=MILLIONS, dst_blocks=MILLIONS)
    ),
    Table(
        "cm.transfer_cache_async",
        {
            "src_cache": Use("paged"),
            "layer_synchronizer": Always(),
            "transfer_configs": [ALL_LAYERS],
            "src_block_indices": [0, 5],
            "dst_block_indices": [3, 1],
        },
        {
            "transfer_configs": Spec((ALL_LAYERS, {0: ALL_LAYERS}), (RULE, "{} is empty", [], ())),
            "src_block_indices": Spec(ODD_LISTS.wrong, *ODD_LISTS.inner, none_ok=True),
            "dst_block_indices": Spec(ODD_LISTS.wrong, *ODD_LISTS.inner, none_ok=True),
        },
        *each(RULE, "equal lengths", src_block_indices=MILLIONS),
    ),
    Table(
        "cm.digest_blocks",
        {"cache": Use("paged"), "blocks": [0, 5], "nonce": bytes(16)},
        {"cache": PAGED, "blocks": ODD_LISTS, "nonce": Spec(("\0" * 16, 16), (RULE, "{}: 15", bytes(15)))},
        *each(RULE, "{}", blocks=[*MILLIONS, [6], range(6, 5, -1)]),
    ),
    Table(
        "cache.grant",
        {"cache": Use("paged"), "blocks": [0, 5], "ttl": 60.0},
        {"blocks": ODD_LISTS},
        *each(RULE, "{}", blocks=[*MILLIONS, [], range(0), np.array([], np.int32)], ttl=[0, -1.0, NAN, None]),
        *each(TYPE, "{}", ttl=["60", [60]]),
    ),
    Table(
        "cm.copy_blocks",
        {"cache": Use("paged"), "copy_block_info": {0: [1, 2]}},
        {},
        *of_values(Spec(ODD_LISTS.wrong, *ODD_LISTS.inner[:4]), "copy_block_info"),
        *each(RULE, "{}[0][6]=6: cache has 6 blocks", copy_block_info=[{0: each} for each in MILLIONS]),
        *each(TYPE, "key of {}", copy_block_info=[{NAN: [1]}, {"é": [1]}, {b"0": [1]}, {Tensor(0.5): [1]}]),
        *each(RULE, "{}", copy_block_info=[{0: [2**70]}, {2**70: [1]}, {0: (1, -1)}, {np.int64(-1): range(1)}]),
        bad(RULE, "copy_block_info[3][0]=7: cache has 6", copy_block_info={1: [5], np.int64(3): Tensor([7])}),
        no_op(copy_block_info={3: range(3, 4), 4: (4,), np.int32(5): np.array([5]), Tensor(1): Tensor([1])}),
        no_op(copy_block_info={3: [3] * 1000}),
        no_op(copy_block_info={3: range(0), 4: ()}),
    ),
    Table(
        "cm.swap_blocks",
        {"src_cache": Use("paged"), "dst_cache": Use("host"), "src_to_dst": {0: 0}},
        {"src_cache": CACHE, "dst_cache": CACHE},
        *each(
            TYPE,
            "{}[0]",
            src_to_dst=[{0: each} for each in (NAN, "0", "\0", b"0", (0,), [0], {0}, np.ones(1), Tensor(0.5))],
        ),
        *each(TYPE, "key of {}", src_to_dst=[{each: 0} for each in (NAN, "0", "é", b"0", (0,), Tensor(0.5))]),
        *each(TYPE, "{}", src_to_dst=[[0], {0}, iter({0: 0}), range(1), np.zeros((2, 2), np.int64)]),
        *each(RULE, "{}[0]: ", src_to_dst=[{0: each} for each in (-1, 2**63, 2**70, np.int64(-1), Tensor(-1))]),
        *each(RULE, "key of {}: ", src_to_dst=[{each: 0} for each in (-1, 2**63, 2**70, np.int64(6), Tensor(6))]),
        bad(RULE, "src_to_dst[5]=999: dst_cache has 8 blocks", src_to_dst={2: 1, 5: 999}),
        bad(RULE, "key of src_to_dst: 6: src_cache has 6", src_to_dst=dict.fromkeys(range(1_000_000), 1)),
        no_op(src_to_dst={}),
    ),
    Table(
        "cm.copy_cache",
        {"dst": Use("more rows"), "src": Use("rows")},
        dict.fromkeys(("dst_batch_index", "src_batch_index", "offset", "size"), ODD_NUMBERS),
        *each(TYPE, "{}", req_id=[NAN, "é", {1}]),
    ),
    Table("cm.pull_cache", PULL_CACHE.good, {"batch_index": ODD_NUMBERS, "size": ODD_NUMBERS}),
    Table("cm.push_cache", PUSH_CACHE.good, {"src_batch_index": ODD_NUMBERS}),
    Table("cm.unregister_cache", {"cache_id": 99}, {"cache_id": ODD_NUMBERS}),
    Table("cm.claim_grant", {"cluster_id": 1, "token": bytes(16)}, {"cluster_id": ODD_NUMBERS, "readers": ODD_NUMBERS}),
    Table("cm.release_grant", {"cluster_id": 1, "token": bytes(16)}, {"cluster_id": ODD_NUMBERS}),
)


@pytest.mark.parametrize("table", ODD, ids=lambda table: table.call)
def test_r01_odd_input_of_every_kind_is_refused_or_without_effect(fresh_scene: Pair, table: Table) -> None:
    """Handles of another instance, finalized managers: test_lifecycle_api.py. Forked children: test_forked_child.py."""
    refusals.refuse((fresh_scene.decoder, fresh_scene.prompt), table)


#: Two block numbers in each form that every call takes.
FORMS: Final[dict[str, Callable[[int, int], Any]]] = {
    "tuple": lambda first, second: (first, second),
    "range": lambda first, second: range(first, 2 * second - first, second - first),
    "int64": lambda *blocks: np.array(blocks),
    "uint8, strided": lambda first, second: np.array([second, 0, first], np.uint8)[::-2],
    "integers of NumPy": lambda *blocks: list(map(np.int16, blocks)),
    "tensor": lambda *blocks: Tensor(blocks),
    "int32 tensor": lambda *blocks: Tensor(np.array(blocks, np.int32)),
    "tensors": lambda *blocks: tuple(map(Tensor, blocks)),
}


def use_everywhere(world: World, form: Callable[[int, int], Any]) -> list[Any]:
    """Use lists of blocks in every call; return what the calls return."""
    cm, paged, there = world.cm, world.caches["paged"], blocks_of()
    cm.pull_blocks(there, paged, form(0, 5), form(3, 1))
    cm.push_blocks(there, paged, form(3, 2), dst_blocks=form(4, 0))
    cm.copy_blocks(paged, {2: form(0, 5)})
    cm.copy_blocks(paged, dict(zip(form(1, 0), [form(4, 3), form(2, 4)], strict=True)))
    cm.swap_blocks(paged, world.caches["host"], dict(zip(form(0, 3), form(7, 1), strict=True)))
    task = cm.transfer_cache_async(paged, Always(), [ALL_LAYERS], form(5, 2), form(1, 3))
    assert task.synchronize() is OK
    given = paged.grant(form(4, 1), 60.0)
    given.revoke()
    return [list(given.blocks), cm.digest_blocks(paged, form(2, 0), bytes(16)).tolist()]


@pytest.mark.parametrize("form", FORMS)
def test_every_call_takes_blocks_in_every_form(fresh_scene: Pair, form: str) -> None:
    worlds: list[World] = [end.do(lambda world: world) for end in (fresh_scene.decoder, fresh_scene.prompt)]

    def left(blocks: Callable[[int, int], Any]) -> tuple[list[Any], list[bytes]]:
        for world in worlds:
            for seed, name in enumerate(name for name in ("paged", "host") if name in world.caches):
                fill(world.caches[name], seed)
        said = use_everywhere(worlds[0], blocks)
        caches = [world.caches[name] for world in worlds for name in ("paged", "host") if name in world.caches]
        return said, [tensor.tobytes() for cache in caches for tensor in read(cache)]

    assert left(FORMS[form]) == left(lambda *blocks: list(blocks))


# --- links of style A: what is raised; what is returned is in test_bad_input_calls.py -----------------------------
LINK: Final = {"clusters": CLUSTERS, "timeout": integer(1, 2**31 - 1, -1, -(2**31) - 1)}
LINKS: Final = (
    Table(
        "dd.link_clusters",
        {"clusters": [info(5, 9)], "timeout": 1000},
        LINK,
        *each(RULE, "local_ip_info_list is empty", clusters=[[info(5, 9, local=None)], [LLMClusterInfo()]]),
        bad(RULE, "clusters[1]: local_ip_info_list is empty", clusters=[info(5, 9), info(6, 9, local=None)]),
    ),
    Table(
        "dd.explain",
        {"remote_cluster_id": 1},
        {"remote_cluster_id": refusals.UINT64},
        *(bad(UNLINKED, str(number), remote_cluster_id=number) for number in (77, 2)),
    ),
    Table(
        "dd.unlink_clusters",
        {"clusters": [info(1)], "timeout": 1000, "force": True},
        LINK | {"force": Spec((1, 0, "yes"))},
        bad(NONE, "clusters[0].remote_cluster_id", clusters=[LLMClusterInfo()]),
        bad(NONE, "clusters[1].remote_cluster_id", clusters=[info(1), info(None, 9)]),
    ),
)

IN_BOTH_MODES: Final = (PULL_CACHE, PULL_BLOCKS)


@PLAIN
def test_r01_r16_bad_input_and_every_push_is_refused_and_nothing_has_happened(scene: Pair) -> None:
    pushes = [Table(table.call, table.good, {}, *WITHOUT_ACCESS) for table in PUSHES]
    for table in (*MAKING, *GIVING_BACK, *COPYING, *IN_BOTH_MODES, PULL_CACHE_BY_KEY, *LINKS, *pushes):
        refusals.refuse((scene.decoder, scene.prompt), table)
    assert scene.decoder.do(refusals.attempt, PULL_CACHE_BY_KEY, [{}]) == [None]


@ACCESSIBLE
def test_r01_bad_input_with_remote_access_is_refused_and_nothing_has_happened(scene: Pair) -> None:
    for table in (*IN_BOTH_MODES, PULL_CACHE_BY_KEY_WITH_ACCESS, *PUSHES):
        refusals.refuse((scene.decoder, scene.prompt), table)


def test_the_call_of_each_table_is_good_unless_a_row_spoils_it(fresh_scene: Pair) -> None:
    """In this order: what gives something back after what uses it, the link last."""
    tables = (*MAKING, *COPYING, *IN_BOTH_MODES, *PUSHES, *GIVING_BACK, *LINKS)
    for table in tables:
        assert fresh_scene.decoder.do(refusals.attempt, table, [{}]) == [None], table.call


def test_r01_constructor() -> None:
    specs = {"role": Spec(("PROMPT", 1, LLMRole)), "cluster_id": refusals.UINT64}
    refusals.refuse_each(LLMDataDist, {"role": LLMRole.MIX, "cluster_id": 1}, specs)
    assert LLMDataDist.llm_engine_instance is None


# --- init (interface §3.1): the rules of the options, each broken alone -----------------------------------------------
DEVICE_ID: Final = {"ge.exec.deviceId": "0"}
OPTIONS: Final = DEVICE_ID | {"llm.EnableCacheManager": "1", "llm.listenIpInfo": "127.0.0.1:0"}
HIXL: Final = OPTIONS | {"llm.TransferBackend": "hixl"}
HIXL_BY_RES: Final = {"llm.TransferBackend": "hixl", "llm.LocalCommRes": ""}
DIRECT: Final = {"llm.LocalCommRes": "", "llm.EnableCacheManager": "0"}
POOLS: Final = ("llm.MemPoolConfig", "llm.HostMemPoolConfig")

#: Option, bad values, and what the error names beside the option and the value.
BAD_VALUES: Final[list[tuple[str, list[str], str]]] = [
    ("ge.exec.deviceId", ["", "-1", "cuda:0", "cpu", str(2**31)], ""),
    ("ge.exec.deviceId", ["0;1"], "several"),  # one instance serves one device
    ("ge.flowGraphMemMaxSize", ["1,2", "-1", "1.23", ""], ""),
    ("llm.EnableCacheManager", ["2", "true", ""], "'0' nor '1'"),
    ("llm.EnableRemoteCacheAccessible", ["yes", "True"], ""),
    ("llm.EnableSwitchRole", ["2"], ""),
    ("llm.SyncKvCacheWaitTime", ["0", "-5", "1.5", str(2**31)], ""),
    ("llm.SyncKvCacheWaitTime", ["0"], "[1, 2147483647]"),
    ("llm.GlobalResourceConfig", ["{"], "JSON"),
    ("llm.LinkTotalTime", ["-1", str(2**32)], ""),
    ("llm.LinkRetryCount", ["0", "101"], "[1, 100]"),
    ("llm.MemoryUtilization", ["much"], ""),
    ("llm.TransferBackend", ["other", "ucx", ""], "'hixl'"),
    ("llm.Transport", ["rdma"], "auto, inproc, shm, cma, nixl, tcp"),
    ("llm.ShmSocketDir", [""], ""),
    ("llm.PoolPrefault", ["yes"], ""),
    ("llm.Checksum", ["yes"], ""),
    ("llm.CopyThreads", ["0", "1025"], "[1, 1024]"),
    ("llm.CopyThreads", ["two"], ""),
    ("llm.PeerTimeout", ["inf", "soon"], ""),
    ("llm.MaxLinks", ["0", "-1", "1.5", str(2**32)], ""),
    ("llm.WriteByAddress", ["2", "yes"], ""),
    ("llm.GrantedReads", ["2", "yes"], ""),
    ("llm.AuthSecretFile", [""], "names no file"),
    *((key, [""], "names no file") for key in ("llm.TlsCert", "llm.TlsKey", "llm.TlsCa")),
    ("llm.Insecure", ["", "yes"], "is neither '0' nor '1'"),
    ("llm.SameHostUsers", ["", "1,,2", "-1", "no such user", str(2**32 - 1)], "neither a user id nor a user"),
    ("llm.NixlFallback", ["yes", "2"], ""),
    ("llm.NixlPlaintext", ["yes", "2"], ""),
    ("llm.StrictTypes", ["yes", "2"], ""),
    ("llm.MaxLinkAge", ["0", "0.9", "soon", "inf"], ""),
    ("llm.MaxLinkAge", ["60"], "are not authenticated"),
    *((pool, ["", "{", "[]"], "") for pool in POOLS),
]
BAD_LISTEN: Final = (
    *("", "26000", "1.2.3.4:1:2", "a:", "a:port", "a:-1", "a:65536", "::1:5", ":5", "1:2;3:4", "1:²"),
    *("[::1]", "[::1]26051", "[1.2.3.4]:26051", "[::g]:26051", "[]:26051", "[::1]:65536"),  # IPv6
)
#: Pools: what is written, and the field that the error names; a page is the least, 20 GiB the most of host memory.
BAD_POOLS: Final = [
    ("{}", "memory_size"),
    *((f'{{"memory_size": {size}}}', "memory_size") for size in ("0", "-1", "1e6", "true", '"65536"', "65535")),
    *((f'{{"memory_size": 65536, "page_shift": {n}}}', "page_shift") for n in ("9", "31", "12.0", "true", "null")),
]
#: Every option there is, and one that there is not.
ALL_KEYS: Final = sorted(config.OPTIONS.keys() | {"llm.DeviceId", "llm.ListenIpInfo", "llm.Unknown"})
BAD_INIT: Final[list[tuple[Any, refusals.Kind, tuple[str, ...]]]] = [
    (None, NONE, ("options", "dict")),
    ([], TYPE, ("options", "dict", "list")),
    ("ge.exec.deviceId=0", TYPE, ("options",)),
    (list(OPTIONS.items()), TYPE, ("options",)),
    (OPTIONS | {7: "x"}, TYPE, ("options", "str", "7")),
    (OPTIONS | {"ge.exec.deviceId": 0}, TYPE, ("options['ge.exec.deviceId']", "str", "int: 0")),
    (OPTIONS | {"ge.exec.deviceId": None}, NONE, ("ge.exec.deviceId", "str")),
    (OPTIONS | {"ge.flowGraphMemMaxSize": 5}, TYPE, ("ge.flowGraphMemMaxSize", "str", "5")),
    (OPTIONS | {"llm.EnableCacheManager": True}, TYPE, ("llm.EnableCacheManager", "bool: True")),
    ({}, RULE, ("ge.exec.deviceId is missing",)),
    ({"llm.Transport": "rdma"}, RULE, ("ge.exec.deviceId is missing",)),  # of two wrong options the earlier one
    *((OPTIONS | {key: text}, RULE, (key, part, repr(text)[:20])) for key, texts, part in BAD_VALUES for text in texts),
    (OPTIONS | {"llm.MemoryUtilization": "1.1"}, RULE, ("Utilization: 1.1", "[0.0, 1.0]")),
    *((OPTIONS | {"llm.PeerTimeout": text}, RULE, ("llm.PeerTimeout", text + ".0", "above 0")) for text in ("0", "-3")),
    (OPTIONS | {"llm.PeerTimeout": "0.09"}, RULE, ("llm.PeerTimeout", "0.09", "0.1 s at least")),
    (OPTIONS | {"llm.SyncKvCacheWaitTime": "9" * 5000}, RULE, ("llm.SyncKvCacheWaitTime", "whole number")),
    *((OPTIONS | {"llm.listenIpInfo": text}, RULE, ("llm.listenIpInfo", repr(text))) for text in BAD_LISTEN),
    (
        OPTIONS | {"llm.listenIpInfo": "[fe80::1%lo]:0"},
        RULE,
        ("llm.listenIpInfo: '[fe80::1%lo]:0'", "scope"),
    ),
    *((OPTIONS | {pool: text}, RULE, (part,)) for pool in POOLS for text, part in BAD_POOLS),
    (OPTIONS | {POOLS[1]: f'{{"memory_size": {20 * (2**30) + 65536}}}'}, RULE, (POOLS[1],)),
    *(
        (OPTIONS | {key: text}, RULE, (f"{key}: {text[:200]!r} has {text[-1]!r}: NUL and lone surrogates are not",))
        for key in ALL_KEYS
        for text in ("\0", "/a\ud800", "x" * 100_000 + "\udfff")
    ),
    *((OPTIONS | {f"llm.{letter}": "1"}, RULE, ("options: 'llm.", "NUL and")) for letter in "\0\udc80"),
    # modes
    (OPTIONS | DIRECT, RULE, ("EnableCacheManager", "llm.LocalCommRes", "'0'")),
    (HIXL | {"llm.EnableCacheManager": "0"}, RULE, ("EnableCacheManager", "'hixl'")),
    ({key: HIXL[key] for key in HIXL if key != "llm.EnableCacheManager"}, RULE, ("EnableCacheManager", "'hixl'")),
    (HIXL | {"llm.EnableRemoteCacheAccessible": "0"}, RULE, ("EnableRemoteCacheAccessible", "'0'")),
    ({key: HIXL[key] for key in HIXL if key != "llm.listenIpInfo"}, RULE, ("listenIpInfo", "missing")),
    (DEVICE_ID | HIXL_BY_RES, RULE, ("listenIpInfo", "missing")),
    (OPTIONS | HIXL_BY_RES | {"llm.EnableRemoteCacheAccessible": "0"}, RULE, ("EnableRemoteCacheAccessible", "'0'")),
]


def test_r01_init_names_the_option_and_can_be_repeated() -> None:
    """The object stays as it was: not initialised, and usable by an init with good options."""
    before = residue()
    dd = LLMDataDist(LLMRole.DECODER, 1)
    for options, kind, texts in BAD_INIT:
        try:
            with pytest.raises(kind) as caught:
                dd.init(options)
            refusals.raises(caught.value, kind, texts)
        except BaseException as error:
            error.add_note(f"init({options})"[:200])
            raise
        assert LLMDataDist.llm_engine_instance is None
        with pytest.raises(NotInitialized):
            _ = dd.cache_manager
    dd.init(OPTIONS)
    dd.check_integrity()
    assert LLMDataDist.llm_engine_instance is dd
    dd.finalize()
    assert LLMDataDist.llm_engine_instance is None
    assert settled(before) == before


# --- links of style A: what is returned; failures are statuses, never exceptions --------------------------------------
OK: Final = LLMStatusCode.LLM_SUCCESS
INVALID: Final = LLMStatusCode.LLM_PARAM_INVALID
FAILED: Final = LLMStatusCode.LLM_LINK_FAILED
ALREADY: Final = LLMStatusCode.LLM_ALREADY_LINK


@ACCESSIBLE
def test_link_and_unlink_clusters_return_the_status_of_each_and_nothing_has_happened(scene: Pair) -> None:
    closed, linked = info(5, free_port()), info(1, scene.prompt.port)
    links: list[tuple[list[LLMClusterInfo], list[LLMStatusCode]]] = [
        ([], []),
        ([info(5)], [INVALID]),
        ([info(5, free_port(), free_port())], [INVALID]),
        ([closed], [FAILED]),
        ([closed, info(6)], [FAILED, INVALID]),
        ([info(6), closed], [INVALID, FAILED]),
        ([linked], [ALREADY]),
        ([info(None, scene.prompt.port)], [ALREADY]),
        ([info(9, scene.prompt.port)], [FAILED]),  # it announces another id (interface R28)
        ([linked, closed], [ALREADY, FAILED]),
    ]
    ends = (scene.decoder, scene.prompt)
    calls: list[tuple[Any, list[LLMClusterInfo], list[LLMStatusCode], tuple[bool, ...]]]
    calls = [(link, clusters, statuses, ()) for clusters, statuses in links]
    # Cluster, remote addresses, status unless it is forced: then the id is enough, and there is nothing to do.
    unlinks = [(1, 0, INVALID), (1, 2, INVALID), (77, 0, INVALID), (77, 1, OK), (0, 1, OK), (2**64 - 1, 1, OK)]
    for cluster_id, ips, status in unlinks:
        ports = [free_port() for _ in range(ips)]
        by_force = info(76 if cluster_id == 1 else cluster_id, *ports)  # by force the link to 1 would be gone
        calls += [(unlink, [info(cluster_id, *ports)], [status], ()), (unlink, [by_force], [OK], (True,))]
    for call, clusters, statuses, force in calls:
        before = [end.do(refusals.state) for end in ends]
        overall = next((code for code in reversed(statuses) if code is not OK), OK) if statuses else INVALID
        assert scene.decoder.do(call, clusters, 5000, *force) == (overall, statuses), (call, clusters)
        assert [end.do(refusals.state) for end in ends] == before, (call, clusters)
