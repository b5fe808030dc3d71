"""Bad input to the calls that make caches and give them back: one table per call (interface §6.1 to §6.7, §6.15,
R1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
)
from llm_datadist.cache_manager import CacheManager
from llm_datadist.errors import LLMException, ParamError
from tests.api.conftest import PLAIN
from tests.support.moves import Use
from tests.support.refusals import (
    FULL,
    IN_USE,
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

INT8: Final = DataType.DT_INT8
DESC: Final = CacheDesc(2, [3, 32], INT8)
ADDRS: Final = [1 << 20, 2 << 20]  # of nothing: registering touches no memory
UNKNOWN_ROWS: Final = Cache(99, DESC, ADDRS)
UNKNOWN_BLOCKS: Final = Cache(99, DESC, ADDRS, is_blocks_cache=True)
PLACEHOLDER: Final = CacheKey(1, 2**64 - 1)

IMPOSSIBLE: Final[list[Row]] = [
    *types("cache_desc", "desc", [3, 32], 1),
    *bad(RULE, "num_tensors", cache_desc=CacheDesc(0, [3, 32], INT8)),
    *bad(RULE, "shape", cache_desc=CacheDesc(2, [0, 32], INT8)),
    *bad(RULE, "shape", cache_desc=CacheDesc(2, [3, -1], INT8)),
    *bad(RULE, "shape", cache_desc=CacheDesc(2, [1] * 32, INT8)),
    *bad(RULE, "shape", cache_desc=CacheDesc(2, [2**40, 2**40], INT8)),
]
NO_ROOM: Final[list[Row]] = [
    *bad(FULL, "device", cache_desc=CacheDesc(1, [1, 2**20 + 1], INT8)),  # larger than the pool
    *bad(FULL, "device", cache_desc=CacheDesc(2, [1, 2**19 + 2**18], INT8)),  # the first tensor fits, the second not
    *bad(FULL, "device", cache_desc=CacheDesc(2**32 - 1, [1], INT8)),
    *bad(RULE, "host_mem_pool_cfg", cache_desc=CacheDesc(2, [3, 32], INT8, Placement.HOST)),
]
ROW_KEYS: Final[list[Row]] = [
    *types("cache_keys", CacheKey(1, 1), {CacheKey(1, 1)}, "keys", 1),
    *bad(NONE, "cache_keys[1]", cache_keys=[CacheKey(1, 1), None]),
    *bad(TYPE, "cache_keys[0]", cache_keys=[BlocksCacheKey(1)]),
    *bad(TYPE, "cache_keys[2]", cache_keys=[PLACEHOLDER, PLACEHOLDER, 7]),
    *bad(RULE, "4 keys", cache_keys=[CacheKey(1, n) for n in range(100, 104)]),
    *bad(RULE, "4 keys", cache_keys=[PLACEHOLDER] * 4),
]
REMOTE: Final[list[Row]] = types("remote_accessible", 1, 0, "yes", [True], none_ok=True)
ADDRESSES: Final[list[Row]] = [
    *types("addrs", tuple(ADDRS), 1 << 20, "addrs", {1 << 20, 2 << 20}),
    *bad(NONE, "addrs[1]", addrs=[1 << 20, None]),
    *bad(TYPE, "addrs[1]", addrs=[1 << 20, "2"]),
    *bad(TYPE, "addrs[0]", addrs=[1.0, 2 << 20]),
    *bad(RULE, "addrs[1]", addrs=[1 << 20, -1]),
    *bad(RULE, "addrs[1]", addrs=[1 << 20, 2**64]),
    *bad(RULE, "addrs[1]=0", addrs=[1 << 20, 0]),
    *bad(RULE, "address space", addrs=[1 << 20, 2**64 - 8]),
    *bad(RULE, "empty", addrs=[]),
    *bad(RULE, "1 addresses", addrs=[1 << 20]),
    *bad(RULE, "3 addresses", addrs=[*ADDRS, 3 << 20]),
]

ALLOCATE_CACHE: Final = Table(
    "allocate_cache",
    {"cache_desc": DESC, "cache_keys": ()},
    (
        *IMPOSSIBLE,
        *NO_ROOM,
        *ROW_KEYS,
        *bad(IN_USE, "req_id=1", cache_keys=[CacheKey(2, 1)]),
        *bad(IN_USE, "req_id=1", cache_keys=[CacheKey(7, 100), CacheKey(7, 1)]),  # the cluster id does not matter
        *bad(IN_USE, "req_id=50", cache_keys=[CacheKey(2, 50)]),  # deallocated, not pulled yet
    ),
)
ALLOCATE_BLOCKS_CACHE: Final = Table(
    "allocate_blocks_cache",
    {"cache_desc": DESC, "blocks_cache_key": None},
    (
        *IMPOSSIBLE,
        *NO_ROOM,
        *types("blocks_cache_key", CacheKey(2, 1), [BlocksCacheKey(2)], 0, none_ok=True),
        *bad(IN_USE, "model_id=0", blocks_cache_key=BlocksCacheKey(2, 0)),
        *bad(IN_USE, "model_id=0", blocks_cache_key=BlocksCacheKey(7, 0)),
    ),
)
REGISTER_CACHE: Final = Table(
    "register_cache",
    {"cache_desc": DESC, "addrs": ADDRS, "cache_keys": (), "remote_accessible": None},
    (*IMPOSSIBLE, *ADDRESSES, *ROW_KEYS, *REMOTE),
)
REGISTER_BLOCKS_CACHE: Final = Table(
    "register_blocks_cache",
    {"cache_desc": DESC, "addrs": ADDRS, "blocks_cache_key": None, "remote_accessible": None},
    (
        *IMPOSSIBLE,
        *ADDRESSES,
        *types("blocks_cache_key", CacheKey(2, 1), [BlocksCacheKey(2)], 0, none_ok=True),
        *REMOTE,
    ),
)
DEALLOCATE_CACHE: Final = Table(
    "deallocate_cache",
    {"cache": Use("more rows")},
    (
        *types("cache", 1, "rows", DESC, [Use("rows")]),
        *bad(RULE, "blocks cache", cache=Use("paged")),
        *bad(RULE, "blocks cache", cache=UNKNOWN_BLOCKS),
        *no_op(cache=UNKNOWN_ROWS),
        *no_op(cache=Use("freed rows")),
    ),
)
DEALLOCATE_BLOCKS_CACHE: Final = Table(
    "deallocate_blocks_cache",
    {"cache": Use("more blocks")},
    (
        *types("cache", 1, "rows", DESC, [Use("paged")]),
        *bad(RULE, "not a blocks cache", cache=Use("rows")),
        *bad(RULE, "not a blocks cache", cache=UNKNOWN_ROWS),
        *no_op(cache=UNKNOWN_BLOCKS),
        *no_op(cache=Use("freed blocks")),
    ),
)
REMOVE_CACHE_KEY: Final = Table(
    "remove_cache_key",
    {"cache_key": CacheKey(2, 1)},
    (
        *types("cache_key", 1, "key", (2, 1), [CacheKey(2, 1)], BlocksCacheKey(2)),
        *no_op(cache_key=CacheKey(2, 99)),
        *no_op(cache_key=CacheKey(2, 1, model_id=1)),
        *no_op(cache_key=PLACEHOLDER),  # the blocks key of model 0 stays (interface R25)
        *no_op(cache_key=CacheKey(2, 2**64 - 1, 0, 1)),  # request 1 is no prefix 1
    ),
)
UNREGISTER_CACHE: Final = Table(
    "unregister_cache",
    {"cache_id": 8},
    (
        *integers("cache_id", -(2**63), 2**63 - 1),
        *types("cache_id", Use("host")),
        *no_op(cache_id=99),
        *no_op(cache_id=0),
        *no_op(cache_id=-1),
        *no_op(cache_id=-(2**63)),
        *no_op(cache_id=1),  # an allocated cache
    ),
)
GOOD_INFO: Final = MemInfo(Memtype.MEM_TYPE_DEVICE, 1 << 20, 64)
REMAP: Final = Table(
    "remap_registered_memory",
    {"mem_infos": GOOD_INFO},
    (
        *bad(NONE, mem_infos=None),
        *bad(NONE, "mem_infos[1]", mem_infos=[GOOD_INFO, None]),
        *bad(RULE, "empty", mem_infos=[]),
        *bad(RULE, "mem_infos[0]", mem_infos=1 << 20),  # the page: LLMException, not TypeError
        *bad(RULE, "mem_infos[0]", mem_infos=(GOOD_INFO,)),
        *bad(RULE, "mem_infos[1]", mem_infos=[GOOD_INFO, "x"]),
        *bad(RULE, "only device", mem_infos=MemInfo(Memtype.MEM_TYPE_HOST, 1 << 20, 64)),
        *bad(RULE, "mem_infos[1]", mem_infos=[GOOD_INFO, MemInfo(Memtype.MEM_TYPE_DEVICE, 0, 64)]),
        *bad(RULE, "mem_infos[0]", mem_infos=MemInfo(Memtype.MEM_TYPE_DEVICE, 1 << 20, 0)),
        *bad(RULE, "mem_infos[0]", mem_infos=MemInfo(Memtype.MEM_TYPE_DEVICE, 1 << 20, -1)),
    ),
)

TABLES: Final = (
    ALLOCATE_CACHE,
    ALLOCATE_BLOCKS_CACHE,
    REGISTER_CACHE,
    REGISTER_BLOCKS_CACHE,
    DEALLOCATE_CACHE,
    DEALLOCATE_BLOCKS_CACHE,
    REMOVE_CACHE_KEY,
    UNREGISTER_CACHE,
    REMAP,
)


@PLAIN
@rows(TABLES)
def test_r01_bad_input_is_refused_and_nothing_has_happened(scene: Pair, table: Table, row: Row) -> None:
    refuse((scene.decoder, scene.prompt), table, row)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.call)
def test_the_call_of_each_table_is_good_unless_a_row_spoils_it(fresh_scene: Pair, table: Table) -> None:
    assert fresh_scene.decoder.do(attempt, table, {}) is None


@pytest.mark.parametrize(
    ("key", "good"),
    [
        (CacheKey(1, 0), True),
        (CacheKey(1, 2**64 - 2), True),
        (CacheKey(1, 2**64 - 1, 0, 0), True),
        (CacheKey(1, 2**64 - 1), False),
        (CacheKey(1, 5, 0, 5), False),
    ],
)
def test_check_cache_key_wants_exactly_one_of_request_and_prefix(key: CacheKey, good: bool) -> None:
    if good:
        CacheManager.check_cache_key(key)
        return
    with pytest.raises(ParamError, match="exactly one") as caught:
        CacheManager.check_cache_key(key)
    assert isinstance(caught.value, LLMException)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
