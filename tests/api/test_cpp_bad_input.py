"""C++: what each argument and each field of a struct must be: TypeError or status, nothing has happened
(interface R1)."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import cpp_api
from llm_datadist.cpp_api import Cache, CacheIndex, ClusterInfo, KvCacheExtParam, LlmDataDist, LlmRole, RegisterCfg
from tests.support import refusals
from tests.support.cpp import DEVICE, HOST, Shape, cluster, host_memory, made, start_pair
from tests.support.memory import FIXED_ADDRS
from tests.support.moves import Use
from tests.support.refusals import GONE, MISMATCH, NONE, RULE, TYPE, Spec, Table, attempt, bad, integer, refuse_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.pairs import Pair

pytestmark = pytest.mark.covers("cpp_api.RegisterCfg")

KV, ROW = Use("kv"), CacheIndex(1, 1)
DESC = cpp_api.CacheDesc(DEVICE, 2, cpp_api.DataType.DT_INT32, [8, 16])
ADDRS = FIXED_ADDRS
ON_HOST = Shape(placement=HOST)

# --- structs: what each field must not be, and what the error names ---------------------------------------------------
NO_STRUCT: Final = (1, "kv", (1, 1))
_PAIRS: Final = (0, (0,), (0, 0, 0), (0, 0.5), None, range(2))


def wrong(good: Any, **fields: Sequence[Any]) -> list[tuple[refusals.Kind, str, Any]]:
    """Return the struct with each value of each field; it is of a wrong type."""
    return [
        (NONE if value in (None, [None]) else TYPE, name, replace(good, **{name: value}))
        for name, values in fields.items()
        for value in values
    ]


DESCRIPTOR: Final = Spec(
    NO_STRUCT,
    *wrong(DESC, placement=[1, None], num_tensors=[2.0, None], data_type=[3, None], shape=[None, 8, [8.0], [None]]),
    (RULE, "num_tensors=0", replace(DESC, num_tensors=0)),
    (RULE, "uint32", *(replace(DESC, num_tensors=number) for number in (-1, 2**32))),
    (RULE, "data_type=DT_UNDEFINED", replace(DESC, data_type=cpp_api.DT_UNDEFINED)),
    (RULE, "shape is empty", replace(DESC, shape=[])),
    (RULE, "shape: [8, -1]", replace(DESC, shape=[8, -1])),
    (RULE, "int64", replace(DESC, shape=[2**63])),
)
CACHE: Final = Spec(
    (*NO_STRUCT, ROW),
    *wrong(Cache(1), cache_id=["1", 1.0, None]),
    (RULE, "cache.cache_id", Cache(2**63)),
    (RULE, "int64", Cache(-(2**63) - 1)),
)
INDEX: Final = Spec(
    (*NO_STRUCT, Cache(1)),
    *wrong(ROW, cluster_id=["1", None], cache_id=[1.0, None], batch_index=["0"]),
    (RULE, "cluster_id", CacheIndex(-1, 1)),
    (RULE, "uint64", CacheIndex(2**64, 1)),
    (RULE, "cache_id", CacheIndex(1, 2**63)),
    (RULE, "batch_index", CacheIndex(1, 1, -1)),
    (RULE, "uint32", CacheIndex(1, 1, 2**32)),
)


def memory(addrs: Sequence[int] = (64, 64), **fields: Any) -> Cache:
    """Return host memory without an id, or what is none."""
    return Cache(-1, list(addrs), replace(DESC, **{"placement": HOST} | fields))


#: A side of CopyKvBlocks: a cache, or host memory without an id.
OPERAND: Final = Spec(
    CACHE.wrong,
    *CACHE.inner,
    (RULE, "cache_id=-1 on kDevice", memory(placement=DEVICE)),
    (RULE, "num_tensors=0", memory(num_tensors=0)),
    (RULE, "DT_UNDEFINED", memory(data_type=cpp_api.DT_UNDEFINED)),
    (RULE, "{}.cache_desc.shape is empty", memory(shape=[])),
    (RULE, "-16", memory(shape=[8, -16])),
    (RULE, "{}.tensor_addrs has 3", memory([64] * 3)),
    (RULE, "{}: tensor_addrs[1]=0", memory([64, 0])),
    (RULE, "{}: tensor_addrs[0]=0x40: its 512 bytes must be mapped", memory()),
    (RULE, "{}.tensor_addrs[1]", memory([64, -1])),
    (RULE, "address space", memory([64, 2**64 - 8])),
    *((RULE, f"{{}}.cache_id={number}", Cache(number, ADDRS, replace(DESC, placement=HOST))) for number in (0, -2)),
    (GONE, "99", Cache(99, ADDRS, replace(DESC, placement=HOST))),
)
EXT: Final = Spec(
    NO_STRUCT,
    *wrong(KvCacheExtParam(), src_layer_range=_PAIRS, dst_layer_range=_PAIRS, tensor_num_per_layer=[None, 2.0]),
    (RULE, "src_layer_range", *(KvCacheExtParam(pair) for pair in ((0, -1), (-1, 0), (1, 0), (0, 0)))),
    (RULE, "src_layer_range[1]", KvCacheExtParam((0, 2**31))),
    (RULE, "dst_layer_range", *(KvCacheExtParam((-1, -1), pair) for pair in ((0, -1), (0, 0), (-2, -2)))),
    (RULE, "dst_layer_range", KvCacheExtParam((0, 1), (0, 0))),
    (RULE, "2 layers", *(KvCacheExtParam(pair, (2, 2)) for pair in ((0, 0), (2, 2)))),
    (RULE, "4 layers", KvCacheExtParam((4, 4), (4, 4), 1)),
    (RULE, "tensor_num_per_layer=3", KvCacheExtParam((0, 0), (0, 0), 3)),
    (RULE, "tensor_num_per_layer=8", KvCacheExtParam((0, 0), (0, 0), 8)),
    (RULE, "tensor_num_per_layer=0", KvCacheExtParam(tensor_num_per_layer=0)),
    (RULE, "uint8", *(KvCacheExtParam(tensor_num_per_layer=number) for number in (-1, 256))),
)


_IP: Any = cpp_api.IpInfo


def info(*fields: Any) -> list[ClusterInfo]:
    return [ClusterInfo(*fields)]


CLUSTERS: Final = Spec(
    (1, ClusterInfo(9)),
    (TYPE, "{}[0]", ["9"]),
    (NONE, "{}[0]", [None]),
    (TYPE, "{}[0].remote_cluster_id", info("9")),
    (NONE, "{}[0].remote_cluster_id", info(None)),
    (TYPE, "remote_role_type", info(9, "0")),
    (NONE, "local_ip_infos", info(9, 0, None)),
    (TYPE, "local_ip_infos[0]", info(9, 0, ["1.2.3.4"])),
    (TYPE, "remote_ip_infos", info(9, 0, [], "1.2.3.4")),
    (NONE, "remote_ip_infos[0].ip", info(1, 0, [], [_IP(None)])),
    (TYPE, "remote_ip_infos[0].port", info(1, 0, [], [_IP("1.2.3.4", "1")])),
    (NONE, "local_ip_infos[0].port", info(1, 0, [_IP("1.2.3.4", None)])),
    (RULE, "{} is empty", []),
    (RULE, "{}[0].remote_cluster_id", info(-1)),
    (RULE, "{}[1].remote_cluster_id", [*info(1), *info(2**64)]),
    (RULE, "{}[0].remote_ip_infos[0].port", *(info(1, 0, [], [_IP("1.2.3.4", port)]) for port in (-1, 65536))),
    (RULE, "{}[0].remote_ip_infos[0].ip: ''", info(1, 0, [], [_IP("")])),
    (RULE, "remote_ip_infos[0].ip: '1.2.3'", info(1, 0, [], [_IP("1.2.3")])),
    (RULE, "local_ip_infos[0].ip: 'localhost'", info(1, 0, [_IP("localhost")])),
    (RULE, "remote_role_type", info(1, 2**31)),
)

# --- calls ------------------------------------------------------------------------------------------------------------
LIST: Final = Spec((1, "12", {1: 2}), (TYPE, "{}[0]", [1.5], ["1"]), (NONE, "{}[0]", [None]))
ADDRESSES: Final = Spec(
    (*LIST.wrong, tuple(ADDRS)),
    *LIST.inner,
    (RULE, "{} is empty", []),
    (RULE, "{} has 1", [ADDRS[0]]),
    (RULE, "{}[1]=0", [ADDRS[0], 0]),
    (RULE, "{}[1]=0x8: its 512 bytes must be mapped", [ADDRS[0], 8]),
    (RULE, "{}[1]", [ADDRS[0], -1], [ADDRS[0], 2**64]),
    (RULE, "address space", [ADDRS[0], 2**64 - 4]),
)
LISTS: Final = Spec((1, "12"), (TYPE, "{}[0]", [1], [[1.5]]), (NONE, "{}[0]", [None], [[None]]))
ROW_INDEX: Final = integer(0, 2**32 - 1, 6)
SIZE: Final = Spec(
    ("1", 1.0, [1]),
    (RULE, "{}=0: must be -1 or above 0", 0),
    (RULE, "{}=-2: must be -1 or above 0", -2),
    (RULE, "{}", 65),
    (RULE, "int64", 2**63, -(2**63) - 1),
)
PULL: Final = {"src_cache_index": INDEX, "dst_cache": CACHE, "ext_param": EXT}
PUSH: Final = {"src_cache": CACHE, "dst_cache_index": INDEX, "ext_param": EXT}
COPY: Final = {"src_cache": CACHE, "dst_cache": CACHE}
TO_ROW: Final = {"src_cache": KV, "dst_cache_index": ROW}
FROM_ROW: Final = {"src_cache_index": ROW, "dst_cache": KV}
TWO: Final = {"src_blocks": [1, 2], "dst_blocks": [2, 3]}
BLOCKS: Final = {"src_blocks": refusals.BLOCK_LIST, "dst_blocks": refusals.BLOCK_LIST}
#: Ids that no cache has.
NO_IDS: Final = (99, 0, -1, -(2**63))
PUSHES: Final = (
    bad(GONE, "99", dst_cache_index=CacheIndex(1, 99)),
    bad(refusals.UNLINKED, "cluster 7", dst_cache_index=CacheIndex(7, 1)),
)
PULLS: Final = (
    bad(RULE, "our own", src_cache_index=CacheIndex(2, 1)),
    bad(GONE, "99", src_cache_index=CacheIndex(1, 99)),
    bad(GONE, "id 99", dst_cache=Cache(99)),
    bad(refusals.UNLINKED, "cluster 7", src_cache_index=CacheIndex(7, 1)),
)
UNEQUAL: Final = refusals.each(RULE, "equal lengths", src_blocks=[[1]], dst_blocks=[[2, 3, 4]])
CLUSTER_CALL: Final = {"clusters": CLUSTERS, "timeout": integer(1, 2**31 - 1, -1)}
CALLS: Final = (
    Table(
        "cpp.RegisterKvCache",
        {"cache_desc": DESC, "addrs": ADDRS, "cfg": RegisterCfg()},
        {"cache_desc": DESCRIPTOR, "addrs": ADDRESSES, "cfg": Spec(NO_STRUCT)},
    ),
    Table("cpp.UnregisterKvCache", {"cache_id": 77}, {"cache_id": refusals.INT64}),
    Table(
        "cpp.AllocateCache",
        {"cache_desc": DESC},
        {"cache_desc": DESCRIPTOR},
        bad(refusals.FULL, str(1 << 30), cache_desc=Shape(1, 1, 1 << 28).desc),
    ),
    Table("cpp.DeallocateCache", {"cache_id": 77}, {"cache_id": refusals.INT64}),
    Table(
        "cpp.PullKvCache",
        FROM_ROW,
        PULL | {"batch_index": ROW_INDEX, "size": SIZE},
        *PULLS,
        bad(GONE, "6 rows", src_cache_index=CacheIndex(1, 1, 6)),
    ),
    Table(
        "cpp.PullKvBlocks",
        FROM_ROW | TWO,
        PULL | BLOCKS,
        *UNEQUAL,
        *PULLS,
        bad(RULE, "batch_index=3", src_cache_index=CacheIndex(1, 1, 3)),
        bad(MISMATCH, "128 bytes", "64", src_cache_index=CacheIndex(1, 2)),  # interface R17
    ),
    Table(
        "cpp.PushKvCache",
        TO_ROW,
        PUSH | {"src_batch_index": ROW_INDEX, "size": integer(-1, -1, 64, 2**63)},
        *PUSHES,
        bad(RULE, "batch_index", dst_cache_index=CacheIndex(1, 1, 6)),
        bad(RULE, "src_cache", "kHost", src_cache=Use("host")),
    ),
    Table(
        "cpp.PushKvBlocks",
        TO_ROW | TWO,
        PUSH | BLOCKS,
        *UNEQUAL,
        *PUSHES,
        *(bad(GONE, f"id {number}", src_cache=Cache(number)) for number in NO_IDS),
        *(bad(GONE, "PushKvBlocks: ", dst_cache_index=CacheIndex(1, number)) for number in NO_IDS),
        bad(RULE, "src_blocks is empty", src_blocks=[], dst_blocks=[]),
        bad(RULE, "batch_index=3", dst_cache_index=CacheIndex(1, 1, 3)),
        bad(MISMATCH, "64 bytes", "128", dst_cache_index=CacheIndex(1, 2)),
        bad(MISMATCH, "64 bytes", "60", dst_cache_index=CacheIndex(1, 3)),
    ),
    Table(
        "cpp.CopyKvCache",
        {"src_cache": KV, "dst_cache": KV, "dst_batch_index": 1},
        COPY | {"src_batch_index": ROW_INDEX, "dst_batch_index": ROW_INDEX, "offset": refusals.UINT64, "size": SIZE},
        *(bad(GONE, "99", **{name: Cache(99)}) for name in COPY),
        bad(RULE, "offset=64", offset=64),
        bad(RULE, "offset=1", "size=64", offset=1, size=64),
        bad(MISMATCH, "row shapes", dst_cache=Use("wide")),
        bad(MISMATCH, "4 tensors", "3", dst_cache=Use("few")),
        bad(RULE, "src_cache", "kHost", src_cache=Use("host")),
    ),
    Table(
        "cpp.CopyKvBlocks",
        {"src_cache": KV, "dst_cache": KV, "src_blocks": [1], "dst_blocks_list": [[2]]},
        {"src_cache": OPERAND, "dst_cache": OPERAND, "src_blocks": LIST, "dst_blocks_list": LISTS},
        bad(RULE, "src_blocks is empty", src_blocks=[], dst_blocks_list=[[]]),
        bad(RULE, "dst_blocks_list is empty", dst_blocks_list=[]),
        bad(RULE, "dst_blocks_list[1]", "equal", dst_blocks_list=[[2], []]),
        bad(RULE, "dst_blocks_list[0]", "2", "1", "equal", src_blocks=[1, 2]),
        *(bad(RULE, "src_blocks[0]", str(block), src_blocks=[block]) for block in (6, -1)),
        bad(RULE, "dst_blocks_list[1][1]=6", "[0, 6)", src_blocks=[0, 1], dst_blocks_list=[[2, 3], [4, 6]]),
        *(bad(RULE, "dst_blocks_list[0][0]", dst_blocks_list=[[block]]) for block in (-2, 2**64)),
        bad(MISMATCH, "block sizes", "64", "68", dst_cache=Use("wide")),
        bad(MISMATCH, "num_tensors", "4", "3", dst_cache=Use("few")),
        *(
            bad(RULE, "HOST", src_cache=Use(src), dst_cache=Use(dst))
            for src in ("host", "cpu")
            for dst in ("host", "cpu")
        ),
    ),
    Table("cpp.LinkLlmClusters", {"clusters": info(9), "timeout": 1000}, CLUSTER_CALL),
    Table(
        "cpp.UnlinkLlmClusters",
        {"clusters": [cluster(9, 1)], "timeout": 1000, "force": False},
        CLUSTER_CALL | {"force": Spec((0, 1, "x"))},
    ),
)


@pytest.fixture
def both(local_pair: Pair) -> Pair:
    """Return two linked ends in this process, each with a cache "kv"."""
    start_pair(local_pair)
    for seed, end in enumerate((local_pair.decoder, local_pair.prompt)):
        end.do(made, "kv", Shape(rows=6), seed)
    for width in (32, 15):
        local_pair.prompt.do(made, f"kv of {width}", Shape(width=width), width)
    shapes = {"wide": Shape(width=17), "few": Shape(tensors=3), "host": ON_HOST, "one": Shape(tensors=1)}
    for seed, (name, shape) in enumerate(shapes.items()):
        local_pair.decoder.do(made, name, shape, seed)
    local_pair.decoder.do(host_memory, "cpu", ON_HOST, 9)
    return local_pair


def test_the_tables_have_every_call_and_every_argument() -> None:
    names = {name for name in vars(LlmDataDist) if name[0].isupper()} - {"Initialize", "Finalize", "SetRole"}
    wanted = {f"cpp.{name}": signature(getattr(LlmDataDist, name)).parameters.keys() - {"self"} for name in names}
    assert {table.call: {name for row in table.rows for name in row.changes} for table in CALLS} == wanted


def test_r01_a_wrong_argument_is_a_type_error_or_a_status_and_nothing_has_happened(both: Pair) -> None:
    for table in CALLS:
        refusals.refuse((both.decoder, both.prompt), table)
    # Tensors that overlap without being the same.
    (address,) = both.decoder.world.memory["cache one"].tensor_addrs  # type: ignore[attr-defined]
    shifted = memory([address + 64], num_tensors=1)
    overlap = bad(RULE, "overlap", src_cache=shifted, dst_cache=Use("one"))
    refusals.refuse((both.decoder, both.prompt), Table("cpp.CopyKvBlocks", CALLS[9].good, {}, overlap))


def test_the_call_of_each_table_is_good_unless_a_row_spoils_it(both: Pair) -> None:
    """A bool counts as an int. Nothing can be said of linking to a cluster without an address."""
    for table in CALLS[:-2]:
        assert both.decoder.do(attempt, table, [{}]) == [None], table.call
    assert both.decoder.do(attempt, CALLS[4], [{"batch_index": True}]) == [None]
    assert both.decoder.do(attempt, CALLS[-1], [{}]) == [None]


def test_r01_initialize_and_the_constructor_take_their_types_only() -> None:
    specs = {"cluster_id": Spec(("1", 1.0)), "role": Spec((3, "kMix"))}
    refuse_each(LlmDataDist, {"cluster_id": 1, "role": LlmRole.kMix}, specs)
    key, device = (TYPE, "key of {}", {1: "0"}), "{}['llm.DeviceId']"
    options = Spec(([], "0"), key, (TYPE, device, {"llm.DeviceId": 0}), (NONE, device, {"llm.DeviceId": None}))
    refuse_each(LlmDataDist(1, LlmRole.kMix).Initialize, {}, {"options": options})
