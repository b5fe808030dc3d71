"""Bad input to the calls that copy inside a process: one table per call (interface §6.5, §6.8, §6.9, R1, R8, R16,
R17)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from llm_datadist import Cache, CacheDesc, DataType, Placement
from tests.api.conftest import PLAIN
from tests.support.moves import Use
from tests.support.refusals import (
    GONE,
    NONE,
    RULE,
    TYPE,
    Row,
    Table,
    attempt,
    bad,
    integers,
    no_op,
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
NO_ADDRESS: Final = Cache.create_cpu_cache(CacheDesc(4, [6, 32], UINT8, Placement.HOST), [*ADDRS[:3], 0])

COPY_CACHE: Final = Table(
    "copy_cache",
    {
        "dst": Use("more rows"),
        "src": Use("rows"),
        "dst_batch_index": 0,
        "src_batch_index": 0,
        "offset": 0,
        "size": -1,
        "req_id": None,
    },
    (
        *types("dst", 1, "rows", [Use("rows")]),
        *types("src", 1, "rows", [Use("rows")]),
        *integers("dst_batch_index", 0, 2**32 - 1),
        *integers("src_batch_index", 0, 2**32 - 1),
        *integers("offset", 0, 2**64 - 1),
        *integers("size", -(2**63), 2**63 - 1),
        *integers("req_id", 0, 2**64 - 1, none_ok=True),
        # placement in the call: continuous caches only
        *bad(RULE, "blocks cache", dst=Use("paged")),
        *bad(RULE, "blocks cache", src=Use("paged")),
        *bad(RULE, "blocks cache", dst=UNKNOWN_BLOCKS),
        # sizes and rows
        *bad(RULE, size=0),
        *bad(RULE, size=-2),
        *bad(RULE, dst_batch_index=5),
        *bad(RULE, src_batch_index=3),
        *bad(RULE, "33", size=33),
        *bad(RULE, "32", offset=32),
        *bad(RULE, "33", offset=33, size=1),
        *bad(RULE, "20", offset=20, size=13),
        *bad(RULE, "16", dst=Use("narrow rows"), size=17),
        *bad(RULE, "16", src=Use("narrow rows"), size=17),
        *bad(RULE, "16", src=Use("narrow rows"), offset=16, size=1),
        # descriptors that do not match (interface R8)
        *bad(RULE, "16", dst=Use("narrow rows")),
        *bad(RULE, "dst 2", dst=Use("two tensors")),
        *bad(RULE, "5 tensors", src=Use("five tensors")),
        *bad(RULE, "DT_INT8", src=Use("signed")),
        *bad(RULE, "DT_INT8", dst=Use("signed"), size=8),
        # caches that are not there
        *bad(GONE, "no cache with id", dst=Use("freed rows")),
        *bad(GONE, "no cache with id", src=Use("freed rows")),
        *bad(GONE, "99", dst=UNKNOWN_ROWS),
        *bad(GONE, "99", src=UNKNOWN_ROWS),
        *bad(GONE, "req_id=7", src=UNKNOWN_ROWS, req_id=7),
    ),
)
COPY_BLOCKS: Final = Table(
    "copy_blocks",
    {"cache": Use("paged"), "copy_block_info": {0: [1, 2]}},
    (
        *types("cache", 1, "paged", [Use("paged")]),
        *types("copy_block_info", [(0, [1])], "0", 1, {0}),
        *bad(RULE, "not a blocks cache", cache=Use("rows")),
        *bad(RULE, "not a blocks cache", cache=UNKNOWN_ROWS),
        *bad(GONE, "no cache with id", cache=Use("freed blocks")),
        *bad(GONE, "99", cache=UNKNOWN_BLOCKS),
        *bad(NONE, "copy_block_info", copy_block_info={0: None}),
        *bad(TYPE, "copy_block_info", copy_block_info={0: 1}),
        *bad(TYPE, "copy_block_info", copy_block_info={0: (1, 2)}),
        *bad(TYPE, "copy_block_info", copy_block_info={0: "1"}),
        *bad(NONE, "copy_block_info[0][1]", copy_block_info={0: [1, None]}),
        *bad(TYPE, "copy_block_info[0][0]", copy_block_info={0: ["1"]}),
        *bad(TYPE, "copy_block_info[0][0]", copy_block_info={0: [1.0]}),
        *bad(NONE, "key of copy_block_info", copy_block_info={None: [1]}),
        *bad(TYPE, "key of copy_block_info", copy_block_info={"0": [1]}),
        *bad(TYPE, "key of copy_block_info", copy_block_info={0.0: [1]}),
        *bad(RULE, "-1", copy_block_info={-1: [1]}),
        *bad(RULE, "-1", copy_block_info={0: [1, -1]}),
        *bad(RULE, str(2**64), copy_block_info={0: [2**64]}),
        *bad(RULE, "6", copy_block_info={6: [1]}),
        *bad(RULE, "6", copy_block_info={0: [1], 1: [2, 6]}),
        *bad(RULE, str(2**62), copy_block_info={2**62: [1]}),
        *no_op(copy_block_info={}),
        *no_op(copy_block_info={0: []}),
        *no_op(copy_block_info={3: [3]}),
    ),
)
SWAP_BLOCKS: Final = Table(
    "swap_blocks",
    {"src_cache": Use("paged"), "dst_cache": Use("host"), "src_to_dst": {0: 1, 1: 2}},
    (
        *types("src_cache", 1, "paged", [Use("paged")]),
        *types("dst_cache", 1, "host", [Use("host")]),
        *types("src_to_dst", [(0, 1)], "0", 1, {0, 1}),
        *bad(RULE, "not a blocks cache", src_cache=Use("rows")),
        *bad(RULE, "not a blocks cache", dst_cache=Use("rows")),
        *bad(NONE, "src_to_dst[0]", src_to_dst={0: None}),
        *bad(TYPE, "src_to_dst[0]", src_to_dst={0: "1"}),
        *bad(TYPE, "src_to_dst[0]", src_to_dst={0: 1.0}),
        *bad(TYPE, "src_to_dst[0]", src_to_dst={0: [1]}),
        *bad(NONE, "key of src_to_dst", src_to_dst={None: 1}),
        *bad(TYPE, "key of src_to_dst", src_to_dst={"0": 1}),
        *bad(TYPE, "key of src_to_dst", src_to_dst={0.5: 1}),
        *bad(RULE, "-1", src_to_dst={-1: 0}),
        *bad(RULE, "-1", src_to_dst={0: -1}),
        *bad(RULE, "6", src_to_dst={0: 0, 6: 1}),  # the device has 6 blocks
        *bad(RULE, "8", src_to_dst={0: 0, 1: 8}),  # the host 8
        *bad(RULE, str(2**64), src_to_dst={0: 2**64}),
        # geometry and placement (interface R16, R17)
        *bad(RULE, "64", dst_cache=Use("wide host")),
        *bad(RULE, "num_tensors", dst_cache=Use("two host tensors")),
        *bad(RULE, "DEVICE", dst_cache=Use("more blocks")),
        *bad(RULE, "HOST", src_cache=Use("host"), dst_cache=Use("host")),
        *bad(RULE, "DEVICE", src_cache=Use("more blocks"), dst_cache=Use("paged"), src_to_dst={}),
        # memory that is not there
        *bad(RULE, "src_cache", src_cache=Use("freed blocks")),
        *bad(RULE, "dst_cache", src_cache=Use("host"), dst_cache=Use("freed blocks")),
        *bad(RULE, "dst_cache", dst_cache=NO_ADDRESS),
        *bad(RULE, "src_cache", src_cache=NO_ADDRESS, dst_cache=Use("paged")),
        *no_op(src_to_dst={}),
    ),
)

TABLES: Final = (COPY_CACHE, COPY_BLOCKS, SWAP_BLOCKS)


@PLAIN
@rows(TABLES)
def test_r01_bad_input_is_refused_and_nothing_has_happened(scene: Pair, table: Table, row: Row) -> None:
    refuse((scene.decoder, scene.prompt), table, row)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.call)
def test_the_call_of_each_table_is_good_unless_a_row_spoils_it(fresh_scene: Pair, table: Table) -> None:
    assert fresh_scene.decoder.do(attempt, table, {}) is None
