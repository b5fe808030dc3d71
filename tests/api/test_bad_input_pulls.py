"""Bad input to the pulls: one table per call, with and without remote cache access (interface §6.10, §6.11, R1, R14,
R17)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from llm_datadist import BlocksCacheKey, Cache, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType
from tests.api.conftest import ACCESSIBLE, PLAIN, PROMPT_CACHES
from tests.support.moves import Use
from tests.support.refusals import (
    GONE,
    NONE,
    RULE,
    TYPE,
    UNLINKED,
    Row,
    Table,
    attempt,
    bad,
    integers,
    refuse,
    rows,
    types,
)

if TYPE_CHECKING:
    from tests.conftest import Pair

UINT8: Final = DataType.DT_UINT8
ADDRS: Final = [n << 20 for n in range(1, 5)]
UNKNOWN_ROWS: Final = Cache(99, CacheDesc(4, [3, 32], UINT8), ADDRS)
UNKNOWN_BLOCKS: Final = Cache(99, CacheDesc(4, [6, 32], UINT8), ADDRS, is_blocks_cache=True)
#: The prompt's ids count from 1 in the order of making (interface I11).
ID: Final = {name: number for number, name in enumerate(PROMPT_CACHES, start=1)}


def row_of(name: str, row: int = 0, cluster: int = 1) -> CacheKeyByIdAndIndex:
    """The row of one of the prompt's caches, by id: the address that works in both modes."""
    return CacheKeyByIdAndIndex(cluster, ID[name], row)


LAYERS: Final[list[Row]] = [
    *integers("tensor_num_per_layer", 1, 2**32 - 1),
    *bad(RULE, tensor_num_per_layer=-1),
    *types("src_layer_range", [0], (0, 1), 1, "0", slice(0, 1), none_ok=True),
    *types("dst_layer_range", [0], (0, 1), 1, "0", slice(0, 1), none_ok=True),
    *bad(RULE, "step 2", src_layer_range=range(0, 2, 2)),
    *bad(RULE, "step -1", dst_layer_range=range(1, -1, -1)),
    *bad(RULE, "below layer 0", src_layer_range=range(-1, 1)),
    *bad(RULE, "below layer 0", dst_layer_range=range(-1, 1)),
    *bad(RULE, "equal", src_layer_range=range(1), dst_layer_range=range(2)),
    *bad(RULE, "equal", src_layer_range=range(1)),  # the other one stands for all layers (interface R14)
    *bad(RULE, "range(0, 1)", dst_layer_range=range(1)),
    *bad(RULE, "dst_layer_range", src_layer_range=range(1), dst_layer_range=range(2, 3)),
    *bad(RULE, "range(2, 3)", src_layer_range=range(2, 3), dst_layer_range=range(1)),
    *bad(RULE, "tensor_num_per_layer=3", src_layer_range=range(1), dst_layer_range=range(1), tensor_num_per_layer=3),
    *bad(RULE, "tensor_num_per_layer=5", src_layer_range=range(1), dst_layer_range=range(1), tensor_num_per_layer=5),
    *bad(RULE, "dst_layer_range", src_layer_range=range(2**70), dst_layer_range=range(2**70)),
]

PULL_CACHE: Final = Table(
    "pull_cache",
    {
        "cache_key": row_of("rows"),
        "cache": Use("rows"),
        "batch_index": 0,
        "size": -1,
        "src_layer_range": None,
        "dst_layer_range": None,
        "tensor_num_per_layer": 2,
    },
    (
        *types("cache_key", 1, "key", (1, 10), BlocksCacheKey(1, 0), [row_of("rows")]),
        *types("cache", 1, "rows", [Use("rows")]),
        *integers("batch_index", 0, 2**32 - 1),
        *integers("size", -(2**63), 2**63 - 1),
        *LAYERS,
        # here
        *bad(RULE, "blocks cache", cache=Use("paged")),
        *bad(RULE, "blocks cache", cache=UNKNOWN_BLOCKS),
        *bad(RULE, size=0),
        *bad(RULE, size=-2),
        *bad(RULE, size=33),
        *bad(RULE, batch_index=3),
        *bad(GONE, "no cache with id", cache=Use("freed rows")),
        *bad(GONE, "99", cache=UNKNOWN_ROWS),
        # the link
        *bad(RULE, "our own", cache_key=row_of("rows", cluster=2)),
        *bad(UNLINKED, "77", cache_key=row_of("rows", cluster=77)),
        *bad(UNLINKED, "0", cache_key=row_of("rows", cluster=0)),
        # what is wrong here is said before what is wrong with the link
        *bad(RULE, "size", cache_key=row_of("rows", cluster=77), size=33),
        *bad(RULE, "batch_index", cache_key=row_of("rows", cluster=77), batch_index=3),
        *bad(GONE, "no cache with id", cache_key=row_of("rows", cluster=77), cache=Use("freed rows")),
        # there
        *bad(GONE, "99", cache_key=CacheKeyByIdAndIndex(1, 99)),
        *bad(GONE, "-5", cache_key=CacheKeyByIdAndIndex(1, -5)),
        *bad(GONE, "3 rows", cache_key=row_of("rows", 3)),
        *bad(GONE, "3 rows", cache_key=row_of("rows", 2**32 - 1)),
        *bad(RULE, "blocks cache", cache_key=row_of("paged")),
        *bad(RULE, "16", cache_key=row_of("narrow rows")),
        *bad(RULE, "16", cache_key=row_of("narrow rows"), size=17),
        *bad(RULE, "num_tensors", cache_key=row_of("two tensors")),
        *bad(RULE, "num_tensors", cache=Use("two tensors")),
        *bad(RULE, "5", cache_key=row_of("five tensors")),
        *bad(RULE, "5 tensors", cache=Use("five tensors"), src_layer_range=range(1), dst_layer_range=range(1)),
        *bad(RULE, "5 tensors", cache_key=row_of("five tensors"), src_layer_range=range(1), dst_layer_range=range(1)),
        *bad(RULE, "remote_accessible", cache_key=row_of("hidden rows")),
    ),
)
#: Without remote cache access rows are named by their keys as well.
PULL_CACHE_BY_KEY: Final = Table(
    "pull_cache",
    {"cache_key": CacheKey(1, 10), "cache": Use("rows")},
    (
        *bad(RULE, "exactly one", cache_key=CacheKey(1, 2**64 - 1)),
        *bad(RULE, "exactly one", cache_key=CacheKey(1, 10, 0, 20)),
        *bad(RULE, "our own", cache_key=CacheKey(2, 1)),
        *bad(UNLINKED, "77", cache_key=CacheKey(77, 10)),
        *bad(GONE, "req_id=13", cache_key=CacheKey(1, 13)),
        *bad(GONE, "model_id=1", cache_key=CacheKey(1, 10, 1)),
        *bad(GONE, "req_id=20", cache_key=CacheKey(1, 20)),  # a prefix id
        *bad(GONE, "prefix_id=10", cache_key=CacheKey(1, 2**64 - 1, 0, 10)),  # a request id
        *bad(RULE, "num_tensors", cache_key=CacheKey(1, 40)),
        *bad(RULE, "16", cache_key=CacheKey(1, 30)),
    ),
)
#: With it they are not (the page), even if everything else about the call is wrong too.
PULL_CACHE_BY_KEY_WITH_ACCESS: Final = Table(
    "pull_cache",
    {"cache_key": CacheKey(1, 10), "cache": Use("rows")},
    (
        *bad(TYPE, "CacheKeyByIdAndIndex", cache_key=CacheKey(1, 10)),
        *bad(TYPE, "CacheKeyByIdAndIndex", cache_key=CacheKey(77, 10), cache=None),
    ),
)

SRC, DST = [0, 5], [3, 1]
PULL_BLOCKS: Final = Table(
    "pull_blocks",
    {
        "src_cache_key": BlocksCacheKey(1, 0),
        "dst_cache": Use("paged"),
        "src_blocks": SRC,
        "dst_blocks": DST,
        "src_layer_range": None,
        "dst_layer_range": None,
        "tensor_num_per_layer": 2,
    },
    (
        *types("src_cache_key", 1, "key", (1, 0), [BlocksCacheKey(1)]),
        *types("dst_cache", 1, "paged", [Use("paged")]),
        *types("src_blocks", 0, "01", {0, 5}, range(2), {0: 5}),
        *types("dst_blocks", 0, "01", {0, 5}, range(2), {0: 5}),
        *bad(NONE, "src_blocks[1]", src_blocks=[0, None]),
        *bad(TYPE, "src_blocks[1]", src_blocks=[0, "5"]),
        *bad(TYPE, "dst_blocks[0]", dst_blocks=[3.0, 1]),
        *bad(TYPE, "dst_blocks[0]", dst_blocks=[[3], 1]),
        *bad(RULE, "src_blocks[1]", src_blocks=[0, -1]),
        *bad(RULE, "dst_blocks[1]", dst_blocks=[0, -1]),
        *bad(RULE, "src_blocks[1]", src_blocks=[0, 2**64]),
        *LAYERS,
        # lists
        *bad(RULE, "src_blocks is empty", src_blocks=[]),
        *bad(RULE, "dst_blocks is empty", dst_blocks=[]),
        *bad(RULE, "dst_blocks is empty", src_blocks=[], dst_blocks=[]),
        *bad(RULE, "equal lengths", src_blocks=[0]),
        *bad(RULE, "equal lengths", dst_blocks=[0, 1, 2]),
        *bad(RULE, "dst_blocks[1]=6", dst_blocks=[0, 6]),
        *bad(RULE, "src_blocks", src_blocks=[0, 6]),
        *bad(RULE, "src_blocks", src_blocks=[2**40, 0]),
        # here
        *bad(RULE, "not a blocks cache", dst_cache=Use("rows")),
        *bad(RULE, "not a blocks cache", dst_cache=UNKNOWN_ROWS),
        *bad(GONE, "no cache with id", dst_cache=Use("freed blocks")),
        *bad(GONE, "99", dst_cache=UNKNOWN_BLOCKS),
        # the link
        *bad(RULE, "our own", src_cache_key=BlocksCacheKey(2, 0)),
        *bad(UNLINKED, "77", src_cache_key=BlocksCacheKey(77, 0)),
        *bad(RULE, "dst_blocks[1]=6", src_cache_key=BlocksCacheKey(77, 0), dst_blocks=[0, 6]),
        *bad(GONE, "no cache with id", src_cache_key=BlocksCacheKey(77, 0), dst_cache=Use("freed blocks")),
        # there
        *bad(GONE, "model_id=9", src_cache_key=BlocksCacheKey(1, 9)),
        *bad(RULE, "64", src_cache_key=BlocksCacheKey(1, 1)),
        *bad(RULE, "num_tensors", src_cache_key=BlocksCacheKey(1, 2)),
        *bad(RULE, "remote_accessible", src_cache_key=BlocksCacheKey(1, 3)),
        # a row that is cut into blocks
        *bad(RULE, "only a BlocksCacheKey", src_cache_key=row_of("rows")),
        *bad(RULE, "only a BlocksCacheKey", src_cache_key=CacheKey(1, 10)),
        *bad(GONE, "99", src_cache_key=CacheKeyByIdAndIndex(1, 99), src_blocks=[], dst_blocks=[0]),
        *bad(GONE, "3 rows", src_cache_key=row_of("rows", 3), src_blocks=[], dst_blocks=[0]),
        *bad(RULE, "dst_blocks", src_cache_key=row_of("rows"), src_blocks=[], dst_blocks=[0, 1]),  # one piece only
        *bad(RULE, "blocks cache", src_cache_key=row_of("paged"), src_blocks=[], dst_blocks=[0]),
        *bad(RULE, "num_tensors", src_cache_key=row_of("two tensors"), src_blocks=[], dst_blocks=[0]),
        *bad(RULE, "our own", src_cache_key=row_of("rows", cluster=2), src_blocks=[], dst_blocks=[0]),
        *bad(RULE, "exactly one", src_cache_key=CacheKey(1, 2**64 - 1), src_blocks=[], dst_blocks=[0]),
        *bad(GONE, "req_id=13", src_cache_key=CacheKey(1, 13), src_blocks=[], dst_blocks=[0]),
        *bad(GONE, "req_id=10", src_cache_key=CacheKey(1, 10, 4), src_blocks=[], dst_blocks=[0]),
        *types("grant", "grant", 1, none_ok=True),
    ),
)


@PLAIN
@rows((PULL_CACHE, PULL_CACHE_BY_KEY, PULL_BLOCKS))
def test_r01_bad_input_is_refused_and_nothing_has_happened(scene: Pair, table: Table, row: Row) -> None:
    refuse((scene.decoder, scene.prompt), table, row)


@ACCESSIBLE
@rows((PULL_CACHE, PULL_CACHE_BY_KEY_WITH_ACCESS, PULL_BLOCKS))
def test_r01_with_remote_access_as_well(scene: Pair, table: Table, row: Row) -> None:
    refuse((scene.decoder, scene.prompt), table, row)


@pytest.mark.parametrize("table", [PULL_CACHE, PULL_BLOCKS], ids=lambda table: table.call)
def test_the_call_of_each_table_is_good_unless_a_row_spoils_it(fresh_scene: Pair, table: Table) -> None:
    assert fresh_scene.decoder.do(attempt, table, {}) is None
