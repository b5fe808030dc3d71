"""v1: what each argument of KvCacheManager must be, and its own rules; nothing has happened (interface §8, R1)."""

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
    Placement,
)
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
    Spec,
    Table,
    attempt,
    bad,
    each,
    integer,
    no_op,
    refuse,
    refuse_each,
)
from tests.support.v1 import POOL, desc, kv_call, kv_make, start_end

if TYPE_CHECKING:
    from tests.support.ends import LocalEnd
    from tests.support.pairs import Pair
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "KvCacheManager",
    "KvCache: cache_desc create_cpu_cache",
    "KvCacheManager: check_cache_key deallocate_cache is_initialized remove_cache_key",
)

KEY, BLOCKS = CacheKey(1, 10), BlocksCacheKey(1, 3)
BY_ID = CacheKeyByIdAndIndex(1, 1, 0)
NO_ID, TWO_IDS = CacheKey(1, 2**64 - 1), CacheKey(1, 5, 0, 6)
KV, PAGED, CPU = Use("kv"), Use("paged"), Use("cpu")


def host(tensors: int) -> CacheDesc:
    return CacheDesc(tensors, [8, 48], DataType.DT_UINT8, Placement.HOST)


HOST = host(4)
KV_CACHE: Final = Spec((1, desc(), Cache(1, desc(), [1, 2, 3, 4])))
ON_DEVICE: Final = Spec(KV_CACHE.wrong, (RULE, "{}: placement is HOST, only DEVICE", CPU))
KV_ROWS: Final = Spec(KV_CACHE.wrong, *ON_DEVICE.inner, (RULE, "{}: a blocks cache", PAGED))
KV_BLOCKS: Final = Spec(KV_CACHE.wrong, *ON_DEVICE.inner, (RULE, "not a blocks cache", KV), (GONE, "id", Use("freed")))
CACHE_KEY: Final = Spec((7, "key", BLOCKS, BY_ID))
DESCRIPTOR: Final = Spec(
    ("desc", 1, KEY),
    (RULE, "shape", desc(rows=0), desc(rows=-1)),
    (RULE, "num_tensors=0", desc(0)),
    (RULE, "{}: placement is HOST, only DEVICE", HOST),
)
KEYS: Final = Spec((KEY, {KEY}, "keys"), (TYPE, "{}[1]", [KEY, BLOCKS], [KEY, 7]), (NONE, "{}[1]", [KEY, None]))
LIST: Final = Spec((*BLOCK_LIST.wrong, (0, 5), np.zeros(2, np.int64)), *BLOCK_LIST.inner)
ROW: Final = integer(0, 2**32 - 1, 6)
SIZE: Final = Spec(("8", 8.0), (RULE, "must be -1 or above 0", 0, -2), (RULE, "{}", 49, 2**63))
OFFSET: Final = integer(0, 2**64 - 1, none_ok=True)

#: Calls of the end that serves.
PROMPT: Final = (
    Table(
        "v1.allocate_cache",
        {"cache_desc": desc()},
        {"cache_desc": DESCRIPTOR, "cache_keys": KEYS},
        bad(RULE, "2 keys", "1", cache_desc=desc(rows=1), cache_keys=[CacheKey(1, 20), CacheKey(1, 21)]),
    ),
    Table(
        "v1.allocate_blocks_cache",
        {"cache_desc": desc(), "blocks_cache_key": None},
        {"cache_desc": DESCRIPTOR, "blocks_cache_key": Spec((KEY, BY_ID, 7), none_ok=True)},
    ),
    Table("v1.deallocate_cache", {"cache": KV}, {"cache": ON_DEVICE}),
    Table("v1.remove_cache_key", {"cache_key": KEY}, {"cache_key": CACHE_KEY}),
    Table(
        "v1.check_cache_key",
        {"cache_key": KEY},
        {"cache_key": CACHE_KEY},
        *each(RULE, "exactly one", cache_key=[NO_ID, TWO_IDS]),
    ),
)
#: Calls of the end that pulls.
DECODER: Final = (
    Table(
        "v1.pull_cache",
        {"cache_key": KEY, "kv_cache": KV},
        {
            "cache_key": Spec((10, "key", BLOCKS)),
            "kv_cache": KV_ROWS,
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
        *each(RULE, "exactly one", cache_key=[NO_ID, TWO_IDS]),
    ),
    Table(
        "v1.pull_blocks",
        {"prompt_cache_key": BLOCKS, "decoder_kv_cache": PAGED, "prompt_blocks": [0, 5], "decoder_blocks": [1, 2]},
        {
            "prompt_cache_key": Spec((3, KEY, BY_ID)),
            "decoder_kv_cache": KV_BLOCKS,
            "prompt_blocks": LIST,
            "decoder_blocks": LIST,
            **LAYERS,
        },
        *each(RULE, "equal lengths", prompt_blocks=[[0]], decoder_blocks=[[0]]),
        bad(RULE, "prompt_blocks is empty", prompt_blocks=[], decoder_blocks=[]),
        bad(MISMATCH, "block sizes differ", decoder_kv_cache=Use("other size")),
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
            "req_id": OFFSET,
        },
    ),
    Table(
        "v1.copy_blocks",
        {"cache": PAGED, "copy_block_info": {0: [1]}},
        {"cache": KV_BLOCKS, "copy_block_info": COPY_PAIRS},
        no_op(copy_block_info={}),
        no_op(copy_block_info={1: []}),
    ),
    Table(
        "v1.swap_blocks",
        {"src": PAGED, "dst": CPU, "src_to_dst": {0: 1}},
        {"src": KV_CACHE, "dst": KV_CACHE, "src_to_dst": SWAP_PAIRS},
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
#: What is named, the call, its arguments, and the roles that may not do it.
ROLES: Final[list[tuple[str, str, dict[str, Any], str]]] = [
    ("cache_keys", "allocate_cache", {"cache_desc": desc(), "cache_keys": [KEY]}, "DECODER MIX"),
    ("cache_keys", "allocate_cache", {"cache_desc": desc(), "cache_keys": [NO_ID]}, "DECODER MIX"),
    ("blocks_cache_key", "allocate_blocks_cache", {"cache_desc": desc(), "blocks_cache_key": BLOCKS}, "DECODER"),
    ("remove_cache_key", "remove_cache_key", {"cache_key": KEY}, "DECODER MIX"),
    ("pull_cache", "pull_cache", DECODER[0].good, "PROMPT MIX"),
    ("pull_blocks", "pull_blocks", DECODER[1].good, "PROMPT MIX"),
]


def _more(world: World) -> None:
    """Make what the tables name beside the cache "kv"."""
    kv_make(world, "paged", desc(rows=6), 4, (), True, BLOCKS if world.dd.cluster_id == 1 else None)
    kv_make(world, "other size", desc(rows=6, stride=32), 5, (), True)
    kv_make(world, "freed", desc(rows=6), 6, (), True)
    kv_call(world, "deallocate_cache", Use("freed"))
    memory = world.memory["host memory"] = np.zeros(8 * 48, np.uint8)
    address = memory.ctypes.data
    world.memory["kv cpu"] = KvCache.create_cpu_cache(HOST, [address] * 4)
    world.memory["kv cpu of 3"] = KvCache.create_cpu_cache(host(3), [address] * 3)
    world.memory["kv cpu at 0"] = KvCache.create_cpu_cache(HOST, [0] * 4)


@pytest.fixture
def ready(local_pair: Pair) -> Pair:
    """A linked pair; each end has all that the tables name, the prompt's "kv" and "paged" with a key."""
    local_pair.start(**POOL)
    local_pair.prompt.do(kv_make, "kv", desc(rows=6), 1, (KEY,))
    local_pair.decoder.do(kv_make, "kv", desc(rows=6), 3)
    for end in (local_pair.prompt, local_pair.decoder):
        end.do(_more)
    return local_pair


def test_r01_a_wrong_argument_is_a_typed_error_and_nothing_happens(ready: Pair) -> None:
    for table in PROMPT:
        refuse((ready.prompt, ready.decoder), table)
    for table in DECODER:
        refuse((ready.decoder, ready.prompt), table)


@pytest.mark.parametrize("role", ["PROMPT", "DECODER", "MIX"])
def test_what_another_role_does_is_refused(end: LocalEnd, role: str) -> None:
    start_end(end, role)
    end.do(kv_make, "kv", desc(), 1)
    end.do(kv_make, "paged", desc(), 2, (), True)
    for name, method, arguments, roles in ROLES:
        if role in roles:
            refuse([end], Table(f"v1.{method}", arguments, {}, bad(RULE, name, role)))


def test_the_call_of_each_table_is_good_unless_a_row_spoils_it(ready: Pair) -> None:
    """What is pulled ends the key, and so does what is given back: they come last."""
    nothing: dict[str, Any] = dict.fromkeys(("src_layer_range", "dst_layer_range"))
    nothing |= {"src_cache_offset": None, "dst_cache_offset": None}
    made, given_back = (PROMPT[0], PROMPT[1], PROMPT[4]), PROMPT[2:4]
    for table in (*made, *reversed(DECODER), *given_back):
        end = ready.decoder if table in DECODER else ready.prompt
        assert end.do(attempt, table, [nothing if table is DECODER[0] else {}]) == [None], table.call
    KvCacheManager.check_cache_key(CacheKey(1, 2**64 - 1, 0, 5))
    methods = {name for name in dir(KvCacheManager) if not name.startswith("_")} - {"is_initialized"}
    # the other one: test_v1_pulls.py
    assert {table.call[3:] for table in (*PROMPT, *DECODER)} == methods - {"transfer_cache_async"}


def test_create_cpu_cache_refuses() -> None:
    """What one list must hold: tests/unit/test_types.py."""
    good = [1, 2, 3, 4]
    addrs = Spec(
        (tuple(good),),
        (TYPE, "{}", [tuple(good)], [[1, 2, 3, "4"]]),
        (RULE, "{} is empty", []),
        (RULE, "0 addresses for num_tensors=4", [[]]),
        (RULE, "3 addresses for num_tensors=4", good[:3]),
        (RULE, "should be consistent", [[1, 2], 3, 4], [3, [1, 2]]),
        (RULE, "2 lists", [good, good]),
    )
    specs = {"cache_desc": Spec(("desc",), (RULE, "HOST", desc())), "addrs": addrs}
    refuse_each(KvCache.create_cpu_cache, {"cache_desc": HOST, "addrs": good}, specs)
