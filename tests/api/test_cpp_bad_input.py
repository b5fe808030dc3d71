"""Every argument of every call of the C++-shaped interface, wrong: TypeError or status, nothing has happened
(interface R1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import cpp_api
from llm_datadist.cpp_api import (
    Cache,
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    DataType,
    IpInfo,
    KvCacheExtParam,
    LlmDataDist,
    LlmRole,
    RegisterCfg,
)
from tests.support.cpp import DEVICE, Shape, cluster, made, start_pair
from tests.support.moves import Use
from tests.support.refusals import (
    BLOCK_LIST,
    INT64,
    NONE,
    RULE,
    TYPE,
    UINT64,
    Kind,
    Spec,
    Table,
    attempt,
    bad,
    integer,
    refuse,
)

if TYPE_CHECKING:
    from tests.conftest import Pair

pytestmark = pytest.mark.covers("cpp_api.RegisterCfg")

KV, ROW = Use("kv"), CacheIndex(1, 1)
DESC = CacheDesc(DEVICE, 2, DataType.DT_INT32, [8, 16])
ADDRS = [4096, 8192]

# --- structs: what each field must not be, and what the error names ---------------------------------------------------

NO_STRUCT: Final = (1, "kv", (1, 1))
_DESC: Final[dict[str, Any]] = {"placement": DEVICE, "num_tensors": 2, "data_type": DataType.DT_INT32, "shape": [8]}
_INDEX: Final = {"cluster_id": 1, "cache_id": 1}
_ONE_LAYER: Final = {"src_layer_range": (0, 0), "dst_layer_range": (0, 0)}
_PAIRS: Final = (0, (0,), (0, 0, 0), (0, 0.5), None, range(2))


def wrong(struct: Any, good: dict[str, Any], name: str, *values: Any) -> list[tuple[Any, Kind, str]]:
    """Return the struct with each value of the field; it is of a wrong type."""
    return [(struct(**good | {name: value}), NONE if value in (None, [None]) else TYPE, name) for value in values]


def broken(struct: Any, good: dict[str, Any], text: str, **changes: Any) -> tuple[Any, Kind, str]:
    """Return the struct with these fields, which break a rule."""
    return struct(**good | changes), RULE, text


DESCRIPTOR: Final = Spec(
    NO_STRUCT,
    *wrong(CacheDesc, _DESC, "placement", 1, None),
    *wrong(CacheDesc, _DESC, "num_tensors", 2.0, None),
    *wrong(CacheDesc, _DESC, "data_type", 3, None),
    *wrong(CacheDesc, _DESC, "shape", None, 8, [8.0], [None]),
    broken(CacheDesc, _DESC, "num_tensors=0", num_tensors=0),
    broken(CacheDesc, _DESC, "uint32", num_tensors=-1),
    broken(CacheDesc, _DESC, "uint32", num_tensors=2**32),
    broken(CacheDesc, _DESC, "data_type=DT_UNDEFINED", data_type=cpp_api.DT_UNDEFINED),
    broken(CacheDesc, _DESC, "shape is empty", shape=[]),
    broken(CacheDesc, _DESC, "shape: [0]", shape=[0]),
    broken(CacheDesc, _DESC, "shape: [8, -1]", shape=[8, -1]),
    broken(CacheDesc, _DESC, "int64", shape=[2**63]),
    broken(CacheDesc, _DESC, "bytes", shape=[2**62]),
    broken(CacheDesc, _DESC, "32 dimensions", shape=[1] * 32),
)
CACHE: Final = Spec(
    (*NO_STRUCT, ROW),
    *wrong(Cache, {}, "cache_id", "1", 1.0, None),
    broken(Cache, {}, "cache.cache_id", cache_id=2**63),
    broken(Cache, {}, "int64", cache_id=-(2**63) - 1),
)
INDEX: Final = Spec(
    (*NO_STRUCT, Cache(1)),
    *wrong(CacheIndex, _INDEX, "cluster_id", "1", None),
    *wrong(CacheIndex, _INDEX, "cache_id", 1.0, None),
    *wrong(CacheIndex, _INDEX, "batch_index", "0"),
    broken(CacheIndex, _INDEX, "cluster_id", cluster_id=-1),
    broken(CacheIndex, _INDEX, "uint64", cluster_id=2**64),
    broken(CacheIndex, _INDEX, "cache_id", cache_id=2**63),
    broken(CacheIndex, _INDEX, "batch_index", batch_index=-1),
    broken(CacheIndex, _INDEX, "uint32", batch_index=2**32),
)
EXT: Final = Spec(
    NO_STRUCT,
    *wrong(KvCacheExtParam, {}, "src_layer_range", *_PAIRS),
    *wrong(KvCacheExtParam, {}, "dst_layer_range", *_PAIRS),
    *wrong(KvCacheExtParam, {}, "tensor_num_per_layer", None, 2.0),
    broken(KvCacheExtParam, {}, "src_layer_range", src_layer_range=(0, -1)),
    broken(KvCacheExtParam, {}, "src_layer_range", src_layer_range=(-1, 0)),
    broken(KvCacheExtParam, {}, "src_layer_range", src_layer_range=(1, 0)),
    broken(KvCacheExtParam, {}, "src_layer_range", src_layer_range=(0, 0)),
    broken(KvCacheExtParam, {}, "src_layer_range[1]", src_layer_range=(0, 2**31)),
    broken(KvCacheExtParam, {}, "dst_layer_range", dst_layer_range=(0, -1)),
    broken(KvCacheExtParam, {}, "dst_layer_range", dst_layer_range=(0, 0)),
    broken(KvCacheExtParam, {}, "2 layers", src_layer_range=(0, 2), dst_layer_range=(0, 2)),
    broken(KvCacheExtParam, _ONE_LAYER, "tensor_num_per_layer=3", tensor_num_per_layer=3),
    broken(KvCacheExtParam, {}, "tensor_num_per_layer=0", tensor_num_per_layer=0),
    broken(KvCacheExtParam, {}, "uint8", tensor_num_per_layer=256),
)


def remote(*addresses: IpInfo) -> list[ClusterInfo]:
    return [ClusterInfo(1, 0, [], list(addresses))]


CLUSTERS: Final = Spec(
    (1, ClusterInfo(9)),
    (["9"], TYPE, "{}[0]"),
    ([None], NONE, "{}[0]"),
    ([ClusterInfo("9")], TYPE, "{}[0].remote_cluster_id"),  # type: ignore[arg-type]
    ([ClusterInfo(None)], NONE, "{}[0].remote_cluster_id"),  # type: ignore[arg-type]
    ([ClusterInfo(9, "0")], TYPE, "remote_role_type"),  # type: ignore[arg-type]
    ([ClusterInfo(9, 0, None)], NONE, "local_ip_infos"),  # type: ignore[arg-type]
    ([ClusterInfo(9, 0, ["1.2.3.4"])], TYPE, "local_ip_infos[0]"),  # type: ignore[list-item]
    ([ClusterInfo(9, 0, [], "1.2.3.4")], TYPE, "remote_ip_infos"),  # type: ignore[arg-type]
    (remote(IpInfo(None, 1)), NONE, "remote_ip_infos[0].ip"),  # type: ignore[arg-type]
    (remote(IpInfo("1.2.3.4", "1")), TYPE, "remote_ip_infos[0].port"),  # type: ignore[arg-type]
    ([ClusterInfo(9, 0, [IpInfo("1.2.3.4", None)])], NONE, "local_ip_infos[0].port"),  # type: ignore[arg-type]
    ([], RULE, "{} is empty"),
    ([cluster(-1, 1)], RULE, "{}[0].remote_cluster_id"),
    ([cluster(1, 1), cluster(2**64, 1)], RULE, "{}[1].remote_cluster_id"),
    ([cluster(1, -1)], RULE, "{}[0].remote_ip_infos[0].port"),
    ([cluster(1, 65536)], RULE, "{}[0].remote_ip_infos[0].port"),
    (remote(IpInfo("", 1)), RULE, "{}[0].remote_ip_infos[0].ip: ''"),
    (remote(IpInfo("1.2.3", 1)), RULE, "remote_ip_infos[0].ip: '1.2.3'"),
    ([ClusterInfo(1, 0, [IpInfo("localhost", 1)])], RULE, "local_ip_infos[0].ip: 'localhost'"),
    ([ClusterInfo(1, 2**31)], RULE, "remote_role_type"),
)

# --- calls ------------------------------------------------------------------------------------------------------------

LIST: Final = Spec((1, "12", {1: 2}), ([1.5], TYPE, "{}[0]"), (["1"], TYPE, "{}[0]"), ([None], NONE, "{}[0]"))
ADDRESSES: Final = Spec(
    (1, "12", {1: 2}, tuple(ADDRS)),
    ([1.5], TYPE, "{}[0]"),
    (["1"], TYPE, "{}[0]"),
    ([None], NONE, "{}[0]"),
    ([], RULE, "{} is empty"),
    ([4096], RULE, "{} has 1"),
    ([4096, 8192, 12288], RULE, "{} has 3"),
    ([4096, 0], RULE, "{}[1]=0"),
    ([4096, -1], RULE, "{}[1]"),
    ([4096, 2**64], RULE, "{}[1]"),
    ([4096, 2**64 - 4], RULE, "address space"),
)
TIMEOUT: Final = integer(1, 2**31 - 1, -1)
ROW_INDEX: Final = integer(0, 2**32 - 1, 8)
PULL: Final = {"src_cache_index": INDEX, "dst_cache": CACHE, "ext_param": EXT}
PUSH: Final = {"src_cache": CACHE, "dst_cache_index": INDEX, "ext_param": EXT}
COPY: Final = {"src_cache": CACHE, "dst_cache": CACHE}
SIZE: Final = Spec(
    ("1", 1.0, [1]),
    (0, RULE, "{}=0: must be -1 or above 0"),
    (-2, RULE, "{}=-2: must be -1 or above 0"),
    (65, RULE, "{}"),
    (2**63, RULE, "int64"),
    (-(2**63) - 1, RULE, "int64"),
)
PUSHED_SIZE: Final = integer(-1, -1, 64, 2**63)
LISTS: Final = Spec(
    (1, "12"),
    ([1], TYPE, "{}[0]"),
    ([[1.5]], TYPE, "{}[0]"),
    ([None], NONE, "{}[0]"),
    ([[None]], NONE, "{}[0]"),
)
TWO: Final = {"src_blocks": [1, 2], "dst_blocks": [2, 3]}
OUTSIDE: Final = (bad(RULE, "src_blocks", src_blocks=[0, 8]), bad(RULE, "dst_blocks", dst_blocks=[0, 8]))
BLOCKS: Final = {"src_blocks": BLOCK_LIST, "dst_blocks": BLOCK_LIST}
CALLS: Final = (
    Table(
        "cpp.RegisterKvCache",
        {"cache_desc": DESC, "addrs": ADDRS, "cfg": RegisterCfg()},
        {"cache_desc": DESCRIPTOR, "addrs": ADDRESSES, "cfg": Spec(NO_STRUCT)},
    ),
    Table("cpp.UnregisterKvCache", {"cache_id": 77}, {"cache_id": INT64}),
    Table("cpp.AllocateCache", {"cache_desc": DESC}, {"cache_desc": DESCRIPTOR}),
    Table("cpp.DeallocateCache", {"cache_id": 77}, {"cache_id": INT64}),
    Table(
        "cpp.PullKvCache", {"src_cache_index": ROW, "dst_cache": KV}, PULL | {"batch_index": ROW_INDEX, "size": SIZE}
    ),
    Table("cpp.PullKvBlocks", {"src_cache_index": ROW, "dst_cache": KV, **TWO}, PULL | BLOCKS),
    Table(
        "cpp.PushKvCache",
        {"src_cache": KV, "dst_cache_index": ROW},
        PUSH | {"src_batch_index": ROW_INDEX, "size": PUSHED_SIZE},
    ),
    Table("cpp.PushKvBlocks", {"src_cache": KV, "dst_cache_index": ROW, **TWO}, PUSH | BLOCKS),
    Table(
        "cpp.CopyKvCache",
        {"src_cache": KV, "dst_cache": KV, "dst_batch_index": 1},
        COPY | {"src_batch_index": ROW_INDEX, "dst_batch_index": ROW_INDEX, "offset": UINT64, "size": SIZE},
    ),
    Table(
        "cpp.CopyKvBlocks",
        {"src_cache": KV, "dst_cache": KV, "src_blocks": [1], "dst_blocks_list": [[2]]},
        COPY | {"src_blocks": LIST, "dst_blocks_list": LISTS},
    ),
    Table(
        "cpp.LinkLlmClusters",
        {"clusters": [ClusterInfo(9)], "timeout": 1000},
        {"clusters": CLUSTERS, "timeout": TIMEOUT},
    ),
    Table(
        "cpp.UnlinkLlmClusters",
        {"clusters": [cluster(9, 1)], "timeout": 1000, "force": False},
        {"clusters": CLUSTERS, "timeout": TIMEOUT, "force": Spec((0, 1, "x"))},
    ),
)


@pytest.fixture
def both(local_pair: Pair) -> Pair:
    """Return two linked ends in this process, each with a cache "kv"."""
    start_pair(local_pair)
    for seed, each in enumerate((local_pair.decoder, local_pair.prompt)):
        each.do(made, "kv", Shape(), seed)
    return local_pair


def test_the_tables_have_every_call_and_every_argument() -> None:
    methods = {
        name: value
        for base in LlmDataDist.__mro__[:-1]
        for name, value in vars(base).items()
        if name[0].isupper() and callable(value)
    }
    assert {table.call[4:] for table in CALLS} == methods.keys() - {"Initialize", "Finalize", "SetRole"}
    for table in CALLS:
        names = methods[table.call[4:]].__code__.co_varnames[1 : methods[table.call[4:]].__code__.co_argcount]
        assert set(names) == {name for row in table.rows for name in row.changes}, table.call


def test_r01_a_wrong_argument_is_a_type_error_or_a_status_and_nothing_has_happened(both: Pair) -> None:
    for table in CALLS:
        refuse((both.decoder, both.prompt), table)


def test_the_call_of_each_table_is_good_unless_a_row_spoils_it(both: Pair) -> None:
    """A bool counts as an int. Nothing can be said of linking to a cluster without an address."""
    for table in CALLS[:-2]:
        assert both.decoder.do(attempt, table, [{}]) == [None], table.call
    assert both.decoder.do(attempt, CALLS[4], [{"batch_index": True}]) == [None]
    assert both.decoder.do(attempt, CALLS[-1], [{}]) == [None]


def test_r01_initialize_and_the_constructor_take_their_types_only() -> None:
    dist = LlmDataDist(1, LlmRole.kMix)
    wrong: list[Any] = [None, [], "0", {1: "0"}, {"llm.DeviceId": 0}, {"llm.DeviceId": None}]
    for options in wrong:
        with pytest.raises(TypeError):
            dist.Initialize(options)
    ids: list[Any] = [None, "1", 1.0]
    roles: list[Any] = [None, 3, "kMix"]
    for args in [*((each, LlmRole.kMix) for each in ids), *((1, role) for role in roles)]:
        with pytest.raises(TypeError):
            LlmDataDist(*args)
