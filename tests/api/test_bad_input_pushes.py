"""Bad input to the pushes: one table per call, and their refusal without remote access (interface §6.12, §6.13, R14,
R16)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from tests.api.conftest import ACCESSIBLE, PLAIN
from tests.api.test_bad_input_pulls import DST, SRC, UNKNOWN_BLOCKS, UNKNOWN_ROWS, row_of
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

LAYERS: Final[list[Row]] = [
    *integers("tensor_num_per_layer", 1, 2**32 - 1),
    *bad(RULE, tensor_num_per_layer=-1),
    *types("src_layer_range", [0], (0, 1), 1, "0", none_ok=True),
    *types("dst_layer_range", [0], (0, 1), 1, "0", none_ok=True),
    *bad(RULE, "step 2", src_layer_range=range(0, 2, 2)),
    *bad(RULE, "below layer 0", dst_layer_range=range(-1, 1)),
    *bad(RULE, "empty", src_layer_range=range(0), dst_layer_range=range(0)),  # in a pull: not given
    *bad(RULE, "empty", src_layer_range=range(2, 1)),
    *bad(RULE, "empty", dst_layer_range=range(1, 1)),
    *bad(RULE, "equal", src_layer_range=range(1), dst_layer_range=range(2)),
    *bad(RULE, "equal", dst_layer_range=range(1)),
    *bad(RULE, "range(0, 1)", src_layer_range=range(1)),
    *bad(RULE, "src_layer_range", src_layer_range=range(2, 3), dst_layer_range=range(1)),
    *bad(RULE, "range(2, 3)", src_layer_range=range(1), dst_layer_range=range(2, 3)),
    *bad(RULE, "tensor_num_per_layer=3", src_layer_range=range(1), dst_layer_range=range(1), tensor_num_per_layer=3),
]

PUSH_CACHE: Final = Table(
    "push_cache",
    {
        "dst_cache_key": row_of("rows"),
        "src_cache": Use("rows"),
        "src_batch_index": 0,
        "src_layer_range": None,
        "dst_layer_range": None,
        "size": -1,
        "tensor_num_per_layer": 2,
    },
    (
        *types("dst_cache_key", 1, "key", CacheKey(1, 10), BlocksCacheKey(1, 0), [row_of("rows")]),
        *types("src_cache", 1, "rows", [Use("rows")]),
        *integers("src_batch_index", 0, 2**32 - 1),
        *integers("size", -1, -1),  # -2 and 0: only the whole row
        *bad(RULE, size=32),
        *LAYERS,
        # here
        *bad(RULE, "blocks cache", src_cache=Use("paged")),
        *bad(RULE, src_batch_index=3),
        *bad(GONE, "no cache with id", src_cache=Use("freed rows")),
        *bad(GONE, "99", src_cache=UNKNOWN_ROWS),
        # the link
        *bad(UNLINKED, "77", dst_cache_key=row_of("rows", cluster=77)),
        *bad(RULE, "src_batch_index", dst_cache_key=row_of("rows", cluster=77), src_batch_index=3),
        # there
        *bad(GONE, "99", dst_cache_key=CacheKeyByIdAndIndex(1, 99)),
        *bad(GONE, "0", dst_cache_key=CacheKeyByIdAndIndex(1, 0)),  # stands for request 0 of model 0
        *bad(RULE, "3 rows", dst_cache_key=row_of("rows", 3)),
        *bad(RULE, "blocks cache", dst_cache_key=row_of("paged")),
        *bad(RULE, "16", dst_cache_key=row_of("narrow rows")),
        *bad(RULE, "num_tensors", dst_cache_key=row_of("two tensors")),
        *bad(RULE, "num_tensors", src_cache=Use("two tensors")),
        *bad(RULE, "5 tensors", src_cache=Use("five tensors"), src_layer_range=range(1), dst_layer_range=range(1)),
        *bad(RULE, "remote_accessible", dst_cache_key=row_of("hidden rows")),
    ),
)
PUSH_BLOCKS: Final = Table(
    "push_blocks",
    {
        "dst_cache_key": BlocksCacheKey(1, 0),
        "src_cache": Use("paged"),
        "src_blocks": SRC,
        "dst_blocks": DST,
        "src_layer_range": None,
        "dst_layer_range": None,
        "tensor_num_per_layer": 2,
    },
    (
        *types("dst_cache_key", 1, "key", CacheKey(1, 10), [BlocksCacheKey(1)]),
        *types("src_cache", 1, "paged", [Use("paged")]),
        *types("src_blocks", 0, "01", {0, 5}, range(2)),
        *types("dst_blocks", 0, "01", {0, 5}, range(2)),
        *bad(NONE, "src_blocks[1]", src_blocks=[0, None]),
        *bad(TYPE, "dst_blocks[1]", dst_blocks=[0, "5"]),
        *bad(TYPE, "src_blocks[0]", src_blocks=[3.0, 1]),
        *bad(RULE, "src_blocks[1]", src_blocks=[0, -1]),
        *bad(RULE, "dst_blocks[1]", dst_blocks=[0, -1]),
        *bad(RULE, "dst_blocks[0]", dst_blocks=[2**64, 1]),
        *LAYERS,
        # lists
        *bad(RULE, "src_blocks is empty", src_blocks=[]),
        *bad(RULE, "dst_blocks is empty", dst_blocks=[]),
        *bad(RULE, "is empty", src_blocks=(), dst_blocks=()),
        *bad(RULE, "equal lengths", src_blocks=[0]),
        *bad(RULE, "equal lengths", dst_blocks=[0]),
        *bad(RULE, "src_blocks[1]=6", src_blocks=[0, 6]),
        *bad(RULE, "dst_blocks", dst_blocks=[0, 6]),
        # here
        *bad(RULE, "not a blocks cache", src_cache=Use("rows")),
        *bad(GONE, "no cache with id", src_cache=Use("freed blocks")),
        *bad(GONE, "99", src_cache=UNKNOWN_BLOCKS),
        # the link
        *bad(UNLINKED, "77", dst_cache_key=BlocksCacheKey(77, 0)),
        *bad(RULE, "src_blocks[1]=6", dst_cache_key=BlocksCacheKey(77, 0), src_blocks=[0, 6]),
        # there
        *bad(GONE, "model_id=9", dst_cache_key=BlocksCacheKey(1, 9)),
        *bad(GONE, "99", dst_cache_key=CacheKeyByIdAndIndex(1, 99)),
        *bad(RULE, "batch_index=1", dst_cache_key=row_of("paged", 1)),
        *bad(RULE, "blocks", dst_cache_key=row_of("rows")),
        *bad(RULE, "64", dst_cache_key=BlocksCacheKey(1, 1)),
        *bad(RULE, "num_tensors", dst_cache_key=BlocksCacheKey(1, 2)),
        *bad(RULE, "remote_accessible", dst_cache_key=BlocksCacheKey(1, 3)),
    ),
)
#: Whatever the arguments are: remote access is asked for first (interface R16).
WITHOUT_ACCESS: Final = tuple(
    Table(
        table.call,
        table.good,
        (
            *bad(RULE, "enable_remote_cache_accessible", tensor_num_per_layer=2),
            *bad(RULE, "enable_remote_cache_accessible", dst_cache_key=None, src_cache=None),
            *bad(RULE, "enable_remote_cache_accessible", dst_cache_key=BlocksCacheKey(77, 0)),
        ),
    )
    for table in (PUSH_CACHE, PUSH_BLOCKS)
)


@ACCESSIBLE
@rows((PUSH_CACHE, PUSH_BLOCKS))
def test_r01_bad_input_is_refused_and_nothing_has_happened(scene: Pair, table: Table, row: Row) -> None:
    refuse((scene.decoder, scene.prompt), table, row)


@PLAIN
@rows(WITHOUT_ACCESS)
def test_r16_without_remote_access_every_push_is_refused(scene: Pair, table: Table, row: Row) -> None:
    refuse((scene.decoder, scene.prompt), table, row)


@pytest.mark.parametrize("table", [PUSH_CACHE, PUSH_BLOCKS], ids=lambda table: table.call)
def test_the_call_of_each_table_is_good_unless_a_row_spoils_it(fresh_scene: Pair, table: Table) -> None:
    assert fresh_scene.decoder.do(attempt, table, {}) is None
