"""v1: every argument of KvCacheManager wrong in every way; a typed error each, and nothing happened (interface §8,
R1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    KvCacheManager,
    LLMStatusCode,
    Placement,
)
from llm_datadist.errors import ParamError
from tests.support.moves import Use
from tests.support.refusals import (
    BLOCK_LIST,
    COPY_PAIRS,
    GONE,
    LAYERS,
    MISMATCH,
    NONE,
    RULE,
    SWAP_PAIRS,
    TYPE,
    UNEQUAL_LAYERS,
    Kind,
    Spec,
    Table,
    attempt,
    bad,
    integer,
    no_op,
    raises,
    refuse,
)
from tests.support.v1 import desc, kv_call, kv_make, start_end, start_v1

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import LocalEnd
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "KvCacheManager",
    "KvCache: cache_desc create_cpu_cache",
    "KvCacheManager: check_cache_key deallocate_cache is_initialized remove_cache_key",
)

KEY, BLOCKS = CacheKey(1, 10), BlocksCacheKey(1, 3)
BY_ID = CacheKeyByIdAndIndex(1, 1, 0)
NO_ID, TWO_IDS = CacheKey(1, 2**64 - 1), CacheKey(1, 5, 0, 6)
HOST = CacheDesc(4, [8, 48], DataType.DT_UINT8, Placement.HOST)
KV, PAGED, CPU = Use("kv"), Use("paged"), Use("cpu")
V2_CACHE = Cache(1, desc(), [1, 2, 3, 4])

# --- kinds of arguments that only v1 has ------------------------------------------------------------------------------

KV_CACHE: Final = Spec((1, desc(), V2_CACHE))
KV_ROWS: Final = Spec(KV_CACHE.wrong, (PAGED, RULE, "{}: a blocks cache"), (CPU, RULE, "{}: placement is HOST"))
CACHE_KEY: Final = Spec((7, "key", BLOCKS, BY_ID))
ANY_ROW: Final = Spec((10, "key", BLOCKS))
DESCRIPTOR: Final = Spec(
    ("desc", 1, KEY),
    *((CacheDesc(1, dims, DataType.DT_UINT8), RULE, "shape") for dims in ([0, 8], [-1, 8], [2**40] * 2, [1] * 32)),
    (CacheDesc(0, [8], DataType.DT_UINT8), RULE, "num_tensors=0"),
    (HOST, RULE, "{}"),
)
KEYS: Final = Spec(
    (KEY, {KEY}, "keys"), *(([KEY, each], kind, "{}[1]") for each, kind in ((BLOCKS, TYPE), (7, TYPE), (None, NONE)))
)
ROW: Final = integer(0, 2**32 - 1, 8)
SIZE: Final = Spec(("8", 8.0), *((value, RULE, "{}") for value in (0, -2, 49, 2**63)))
OFFSET: Final = Spec(("0", 1.0), (-1, RULE, "{}"), (2**64, RULE, "{}"), none_ok=True)

#: Calls of the end that serves.
PROMPT: Final = (
    Table(
        "v1.allocate_cache",
        {"cache_desc": desc()},
        {"cache_desc": DESCRIPTOR, "cache_keys": KEYS},
        bad(RULE, "cache_desc", "HOST", "DEVICE", cache_desc=HOST),
        bad(RULE, "2 keys", "1", cache_desc=desc(rows=1), cache_keys=[CacheKey(1, 20), CacheKey(1, 21)]),
    ),
    Table(
        "v1.allocate_blocks_cache",
        {"cache_desc": desc(), "blocks_cache_key": None},
        {"cache_desc": DESCRIPTOR, "blocks_cache_key": Spec((KEY, BY_ID, 7), none_ok=True)},
        bad(RULE, "cache_desc", "HOST", "DEVICE", cache_desc=HOST),
    ),
    Table("v1.deallocate_cache", {"cache": KV}, {"cache": KV_CACHE}, bad(RULE, "cache", "HOST", cache=CPU)),
    Table("v1.remove_cache_key", {"cache_key": KEY}, {"cache_key": CACHE_KEY}),
    Table(
        "v1.check_cache_key",
        {"cache_key": KEY},
        {"cache_key": CACHE_KEY},
        bad(RULE, "exactly one", cache_key=NO_ID),
        bad(RULE, "exactly one", cache_key=TWO_IDS),
    ),
    Table("v1.pull_cache", {"cache_key": KEY, "kv_cache": KV}, {}, bad(RULE, "pull_cache", "DECODER", "PROMPT")),
    Table(
        "v1.pull_blocks",
        {"prompt_cache_key": BLOCKS, "decoder_kv_cache": PAGED, "prompt_blocks": [0], "decoder_blocks": [0]},
        {},
        bad(RULE, "pull_blocks", "DECODER", "PROMPT"),
    ),
)
#: Calls of the end that pulls, each but for those of the other role.
DECODER: Final = (
    Table(
        "v1.pull_cache",
        {"cache_key": KEY, "kv_cache": KV},
        {
            "cache_key": ANY_ROW,
            "kv_cache": KV_CACHE,
            "batch_index": ROW,
            "size": SIZE,
            "src_cache_offset": OFFSET,
            "dst_cache_offset": OFFSET,
            **LAYERS,
        },
        bad(RULE, "dst_cache_offset=48", dst_cache_offset=48),
        bad(RULE, "dst_cache_offset=41", size=8, dst_cache_offset=41),
        bad(MISMATCH, "41", size=8, src_cache_offset=41),
        bad(MISMATCH, "1", src_cache_offset=1),  # size -1 is the whole destination row
        bad(RULE, "blocks cache", kv_cache=PAGED),
        bad(RULE, "kv_cache", "HOST", kv_cache=CPU),
        bad(RULE, "exactly one", cache_key=NO_ID),
        bad(RULE, "exactly one", cache_key=CacheKey(1, 1, 0, 1)),
        *UNEQUAL_LAYERS,
    ),
    Table(
        "v1.pull_blocks",
        {"prompt_cache_key": BLOCKS, "decoder_kv_cache": PAGED, "prompt_blocks": [0, 5], "decoder_blocks": [1, 2]},
        {
            "prompt_cache_key": Spec((3, KEY, BY_ID)),
            "decoder_kv_cache": KV_CACHE,
            "prompt_blocks": BLOCK_LIST,
            "decoder_blocks": BLOCK_LIST,
            **LAYERS,
        },
        bad(TYPE, prompt_blocks=(0, 5)),
        bad(TYPE, decoder_blocks=(1, 2)),
        bad(TYPE, prompt_blocks=np.zeros(2, np.int64)),
        bad(TYPE, decoder_blocks=np.zeros(2, np.int64)),
        bad(RULE, "equal lengths", prompt_blocks=[0]),
        bad(RULE, "equal lengths", decoder_blocks=[0]),
        bad(RULE, "prompt_blocks is empty", prompt_blocks=[], decoder_blocks=[]),
        bad(RULE, "decoder_kv_cache", "not a blocks cache", decoder_kv_cache=KV),
        bad(RULE, "decoder_kv_cache", "HOST", decoder_kv_cache=CPU),
        bad(MISMATCH, "block sizes differ", decoder_kv_cache=Use("other size")),
        bad(GONE, "id", decoder_kv_cache=Use("freed")),
        *UNEQUAL_LAYERS,
    ),
    Table(
        "v1.copy_cache",
        {"dst": KV, "src": KV, "src_batch_index": 1},
        {
            "dst": KV_ROWS,
            "src": KV_ROWS,
            "dst_batch_index": ROW,
            "src_batch_index": ROW,
            "offset": integer(0, 2**64 - 1, 48),
            "size": SIZE,
            "req_id": Spec(("7", 7.5), (-1, RULE, "{}"), (2**64, RULE, "{}"), none_ok=True),
        },
    ),
    Table(
        "v1.copy_blocks",
        {"cache": PAGED, "copy_block_info": {0: [1]}},
        {"cache": KV_CACHE, "copy_block_info": COPY_PAIRS},
        bad(RULE, "blocks cache", cache=KV),
        bad(RULE, "HOST", cache=CPU),
        bad(GONE, "id", cache=Use("freed")),
        no_op(copy_block_info={}),
        no_op(copy_block_info={1: []}),
    ),
    Table(
        "v1.swap_blocks",
        {"src": PAGED, "dst": CPU, "src_to_dst": {0: 1}},
        {"src": KV_CACHE, "dst": KV_CACHE, "src_to_dst": SWAP_PAIRS},
        bad(RULE, "src_to_dst", "8", src_to_dst={8: 1}),
        bad(RULE, "src_to_dst", "8", src_to_dst={0: 8}),
        bad(MISMATCH, "block sizes differ: blocks of src have", "of dst", dst=Use("other size")),
        bad(MISMATCH, "num_tensors differ: src has 4, dst 3", dst=Use("cpu of 3")),
        bad(RULE, "src and dst are both on DEVICE", dst=KV),
        bad(RULE, "src and dst are both on HOST", src=CPU),
        bad(RULE, "dst: tensor_addrs[0]=0", dst=Use("cpu at 0")),
        bad(RULE, "src: it has no memory any more (deallocated)", src=Use("freed")),
        no_op(src_to_dst={}),
    ),
    Table(
        "v1.get_cache_tensors",
        {"cache": KV, "tensor_index": 0},
        {"cache": KV_CACHE, "tensor_index": integer(-(2**31), 2**31 - 1, -1, 4)},
        bad(RULE, "deallocated", cache=Use("freed")),
    ),
)
#: What only a PROMPT does.
WRONG_ROLE: Final = (
    Table(
        "v1.allocate_cache",
        {"cache_desc": desc()},
        {},
        bad(RULE, "cache_keys", "PROMPT", "DECODER", cache_keys=[CacheKey(1, 20)]),
        bad(RULE, "cache_keys", "PROMPT", cache_keys=[NO_ID]),
    ),
    Table(
        "v1.allocate_blocks_cache",
        {"cache_desc": desc()},
        {},
        bad(RULE, "blocks_cache_key", "DECODER", blocks_cache_key=BLOCKS),
    ),
    Table("v1.remove_cache_key", {"cache_key": KEY}, {}, bad(RULE, "remove_cache_key", "PROMPT", "DECODER")),
)


def _host(world: World) -> None:
    """Make the CPU caches that the tables name."""
    memory = world.memory["host memory"] = np.zeros(8 * 48, np.uint8)
    address = memory.ctypes.data
    three = CacheDesc(3, [8, 48], DataType.DT_UINT8, Placement.HOST)
    world.memory["kv cpu"] = KvCache.create_cpu_cache(HOST, [address] * 4)
    world.memory["kv cpu of 3"] = KvCache.create_cpu_cache(three, [address] * 3)
    world.memory["kv cpu at 0"] = KvCache.create_cpu_cache(HOST, [0] * 4)


@pytest.fixture
def ready(local_pair: Pair) -> Pair:
    """A linked pair; the prompt has "kv" and "paged", both with a key, the decoder one of each, and more."""
    start_v1(local_pair)
    local_pair.prompt.do(kv_make, "kv", desc(), 1, (KEY,))
    local_pair.prompt.do(kv_make, "paged", desc(), 2, (), True, BLOCKS)
    local_pair.decoder.do(kv_make, "kv", desc(), 3)
    local_pair.decoder.do(kv_make, "paged", desc(), 4, (), True)
    local_pair.decoder.do(kv_make, "other size", desc(stride=32), 5, (), True)
    local_pair.decoder.do(kv_make, "freed", desc(), 6, (), True)
    local_pair.decoder.do(kv_call, "deallocate_cache", Use("freed"))
    for end in (local_pair.prompt, local_pair.decoder):
        end.do(_host)
    return local_pair


def test_r01_a_wrong_argument_is_a_typed_error_and_nothing_happens(ready: Pair) -> None:
    for table in PROMPT:
        refuse((ready.prompt, ready.decoder), table)
    for table in (*DECODER, *WRONG_ROLE):
        refuse((ready.decoder, ready.prompt), table)


def test_the_call_of_each_table_is_good_unless_a_row_spoils_it(ready: Pair) -> None:
    """Also None where it is allowed. What is pulled ends the key, so that comes last."""
    nothing: dict[str, Any] = dict.fromkeys(("src_layer_range", "dst_layer_range"))
    more = {
        "copy_cache": {"req_id": None},
        "v1.pull_cache": nothing | {"src_cache_offset": None, "dst_cache_offset": None},
    }
    made = [table for table in PROMPT if table.call.startswith(("v1.allocate", "v1.check"))]
    given_back = [table for table in PROMPT if table.call.startswith(("v1.remove", "v1.deallocate"))]
    assert [ready.prompt.do(attempt, table, [{}]) for table in made] == [[None]] * 3
    for table in reversed(DECODER):
        assert ready.decoder.do(attempt, table, [more.get(table.call, {})]) == [None], table.call
    assert [ready.prompt.do(attempt, table, [{}]) for table in given_back] == [[None]] * 2
    for key in (CacheKey(1, 5), CacheKey(1, 2**64 - 1, 0, 5)):
        KvCacheManager.check_cache_key(key)


def test_the_tables_cover_every_method() -> None:
    methods = {name for name in dir(KvCacheManager) if not name.startswith("_")} - {"is_initialized"}
    assert {table.call[3:] for table in (*PROMPT, *DECODER)} == methods - {
        "transfer_cache_async"
    }  # in test_v1_pulls.py


def test_a_mix_neither_serves_rows_nor_pulls(end: LocalEnd) -> None:
    start_end(end, "MIX")
    manager = end.world.dd.kv_cache_manager
    cache, paged = manager.allocate_cache(desc()), manager.allocate_blocks_cache(desc(), BlocksCacheKey(1))
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("allocate_cache", (desc(), [KEY])),
        ("remove_cache_key", (KEY,)),
        ("pull_cache", (KEY, cache)),
        ("pull_blocks", (BLOCKS, paged, [0], [0])),
    ]
    for method, args in calls:
        with pytest.raises(ParamError, match="MIX") as caught:
            getattr(manager, method)(*args)
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


def test_create_cpu_cache_refuses() -> None:
    addrs = [1, 2, 3, 4]
    wrong: list[tuple[Any, Any, Kind, str]] = [
        (None, addrs, NONE, "cache_desc"),
        ("desc", addrs, TYPE, "cache_desc"),
        (desc(), addrs, RULE, "HOST"),
        (HOST, None, NONE, "addrs"),
        (HOST, (1, 2, 3, 4), TYPE, "addrs"),
        (HOST, ["1", 2, 3, 4], TYPE, "addrs"),
        (HOST, [[1, 2, 3, "4"]], TYPE, "addrs"),
        (HOST, [(1, 2, 3, 4)], TYPE, "addrs"),
        (HOST, [1, 2, 3, -4], RULE, "addrs"),
        (HOST, [], RULE, "addrs is empty"),
        (HOST, [[]], RULE, "0 addresses for num_tensors=4"),
        (HOST, [1, 2, 3], RULE, "3 addresses for num_tensors=4"),
        (HOST, [[*addrs, 5]], RULE, "5 addresses for num_tensors=4"),
        (HOST, [[1, 2], 3, 4], RULE, "should be consistent"),
        (HOST, [3, [1, 2]], RULE, "should be consistent"),
        (HOST, [addrs, addrs], RULE, "2 lists"),
    ]
    for cache_desc, given, kind, text in wrong:
        with pytest.raises(kind.error) as caught:
            KvCache.create_cpu_cache(cache_desc, given)
        raises(caught.value, kind, (text,))
