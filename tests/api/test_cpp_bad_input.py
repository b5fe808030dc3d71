"""Every argument of every call of the C++-shaped interface, wrong: TypeError or status, nothing has happened
(interface R1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from llm_datadist.errors import NoneArgument
from tests.support.cpp import BAD, DEVICE, OK, Shape, attempt, cluster, made, run, show, start_pair, unchanged
from tests.support.moves import Use, nothing_happens, same_bytes

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.world import World

pytestmark = pytest.mark.covers("cpp_api.RegisterCfg")

KV, ROW = Use("kv"), CacheIndex(1, 1)
DESC = CacheDesc(DEVICE, 2, DataType.DT_INT32, [8, 16])
ADDRS = [4096, 8192]
#: A call of each kind that is right, but for those that end something.
GOOD: dict[str, tuple[Any, ...]] = {
    "LinkLlmClusters": ([ClusterInfo(9)], 1000),
    "UnlinkLlmClusters": ([cluster(9, 1)], 1000, False),
    "RegisterKvCache": (DESC, ADDRS, RegisterCfg()),
    "UnregisterKvCache": (77,),
    "AllocateCache": (DESC,),
    "DeallocateCache": (77,),
    "PullKvCache": (ROW, KV, 0, -1, KvCacheExtParam()),
    "PullKvBlocks": (ROW, KV, [1], [2], KvCacheExtParam()),
    "PushKvCache": (KV, ROW, 0, -1, KvCacheExtParam()),
    "PushKvBlocks": (KV, ROW, [1], [2], KvCacheExtParam()),
    "CopyKvCache": (KV, KV, 0, 1, 0, -1),
    "CopyKvBlocks": (KV, KV, [1], [[2]]),
}
#: What no argument of the calls may be: (method, position) -> values of a wrong type, None apart.
_NO_INT: list[Any] = ["1", 1.0, [1]]
_NO_LIST: list[Any] = [1, "12", {1: 2}, [1.5], ["1"], [None]]
_NO_STRUCT: list[Any] = [1, "kv", (1, 1)]
_NO_EXT: list[Any] = [
    *_NO_STRUCT,
    KvCacheExtParam(0),  # type: ignore[arg-type]
    KvCacheExtParam((0,)),  # type: ignore[arg-type]
    KvCacheExtParam((0, 0, 0)),  # type: ignore[arg-type]
    KvCacheExtParam((0, 0.5)),  # type: ignore[arg-type]
    KvCacheExtParam(dst_layer_range=None),  # type: ignore[arg-type]
    KvCacheExtParam(dst_layer_range=range(2)),  # type: ignore[arg-type]
    KvCacheExtParam(tensor_num_per_layer=None),  # type: ignore[arg-type]
    KvCacheExtParam(tensor_num_per_layer=2.0),  # type: ignore[arg-type]
]
_NO_INDEX: list[Any] = [
    *_NO_STRUCT,
    Cache(1),
    CacheIndex("1", 1),  # type: ignore[arg-type]
    CacheIndex(None, 1),  # type: ignore[arg-type]
    CacheIndex(1, 1.0),  # type: ignore[arg-type]
    CacheIndex(1, None),  # type: ignore[arg-type]
    CacheIndex(1, 1, "0"),  # type: ignore[arg-type]
]
_NO_CACHE: list[Any] = [*_NO_STRUCT, ROW, Cache("1"), Cache(None), Cache(1.0)]  # type: ignore[arg-type]
_NO_DESC: list[Any] = [
    *_NO_STRUCT,
    CacheDesc(1, 2, DataType.DT_INT32, [8]),  # type: ignore[arg-type]
    CacheDesc(None, 2, DataType.DT_INT32, [8]),  # type: ignore[arg-type]
    CacheDesc(DEVICE, 2.0, DataType.DT_INT32, [8]),  # type: ignore[arg-type]
    CacheDesc(DEVICE, None, DataType.DT_INT32, [8]),  # type: ignore[arg-type]
    CacheDesc(DEVICE, 2, 3, [8]),  # type: ignore[arg-type]
    CacheDesc(DEVICE, 2, None, [8]),  # type: ignore[arg-type]
    CacheDesc(DEVICE, 2, DataType.DT_INT32, None),  # type: ignore[arg-type]
    CacheDesc(DEVICE, 2, DataType.DT_INT32, 8),  # type: ignore[arg-type]
    CacheDesc(DEVICE, 2, DataType.DT_INT32, [8.0]),  # type: ignore[list-item]
    CacheDesc(DEVICE, 2, DataType.DT_INT32, [None]),  # type: ignore[list-item]
]
_NO_CLUSTERS: list[Any] = [
    1,
    ClusterInfo(9),
    ["9"],
    [None],
    [ClusterInfo("9")],  # type: ignore[arg-type]
    [ClusterInfo(None)],  # type: ignore[arg-type]
    [ClusterInfo(9, "0")],  # type: ignore[arg-type]
    [ClusterInfo(9, 0, None)],  # type: ignore[arg-type]
    [ClusterInfo(9, 0, ["1.2.3.4"])],  # type: ignore[list-item]
    [ClusterInfo(9, 0, [], "1.2.3.4")],  # type: ignore[arg-type]
    [ClusterInfo(9, 0, [], [IpInfo(None, 1)])],  # type: ignore[arg-type]
    [ClusterInfo(9, 0, [], [IpInfo("1.2.3.4", "1")])],  # type: ignore[arg-type]
    [ClusterInfo(9, 0, [IpInfo("1.2.3.4", None)])],  # type: ignore[arg-type]
]
WRONG_TYPES: dict[str, list[list[Any]]] = {
    "LinkLlmClusters": [_NO_CLUSTERS, _NO_INT],
    "UnlinkLlmClusters": [_NO_CLUSTERS, _NO_INT, [0, 1, "x"]],
    "RegisterKvCache": [_NO_DESC, [*_NO_LIST, (4096, 8192)], _NO_STRUCT],
    "UnregisterKvCache": [_NO_INT],
    "AllocateCache": [_NO_DESC],
    "DeallocateCache": [_NO_INT],
    "PullKvCache": [_NO_INDEX, _NO_CACHE, _NO_INT, _NO_INT, _NO_EXT],
    "PullKvBlocks": [_NO_INDEX, _NO_CACHE, _NO_LIST, _NO_LIST, _NO_EXT],
    "PushKvCache": [_NO_CACHE, _NO_INDEX, _NO_INT, _NO_INT, _NO_EXT],
    "PushKvBlocks": [_NO_CACHE, _NO_INDEX, _NO_LIST, _NO_LIST, _NO_EXT],
    "CopyKvCache": [_NO_CACHE, _NO_CACHE, _NO_INT, _NO_INT, _NO_INT, _NO_INT],
    "CopyKvBlocks": [_NO_CACHE, _NO_CACHE, _NO_LIST, [1, "12", [1], [[1.5]], [None], [[None]]]],
}


@pytest.fixture
def both(local_pair: Pair) -> Pair:
    """Return two linked ends in this process, each with a cache "kv"."""
    start_pair(local_pair)
    for seed, each in enumerate((local_pair.decoder, local_pair.prompt)):
        each.do(made, "kv", Shape(), seed)
    return local_pair


def _raises(pair: Pair, kind: type[Exception], method: str, args: tuple[Any, ...]) -> None:
    ends = (pair.decoder, pair.prompt)
    before = [each.do(show, "kv") for each in ends]

    def action() -> None:
        with pytest.raises(kind) as caught:
            pair.decoder.do(run, method, *args)
        assert "\n" not in str(caught.value)

    try:
        nothing_happens(ends, (), action)
    except BaseException as error:
        error.add_note(f"{method}{args}")
        raise
    for each, was in zip(ends, before, strict=True):
        same_bytes(each.do(show, "kv"), was)


def _with(method: str, position: int, value: Any) -> tuple[Any, ...]:
    return tuple(value if i == position else each for i, each in enumerate(GOOD[method]))


def test_the_matrix_has_every_call_and_every_argument() -> None:
    methods = {name for name, value in vars(LlmDataDist).items() if name[0].isupper() and callable(value)}
    for base in LlmDataDist.__mro__[1:-1]:
        methods |= {name for name, value in vars(base).items() if name[0].isupper() and callable(value)}
    assert set(GOOD) == set(WRONG_TYPES) == methods - {"Initialize", "Finalize", "SetRole"}
    assert {name: len(GOOD[name]) for name in GOOD} == {name: len(WRONG_TYPES[name]) for name in GOOD}


@pytest.mark.parametrize("method", GOOD)
def test_r01_none_is_a_type_error(both: Pair, method: str) -> None:
    for position in range(len(GOOD[method])):
        _raises(both, NoneArgument, method, _with(method, position, None))


@pytest.mark.parametrize("method", GOOD)
def test_r01_a_wrong_type_is_a_type_error(both: Pair, method: str) -> None:
    for position, values in enumerate(WRONG_TYPES[method]):
        for value in values:
            _raises(both, TypeError, method, _with(method, position, value))


WIDE_INT = [-1, 2**64]
BAD_VALUES: list[tuple[str, int, Any, tuple[str, ...]]] = [
    *(("UnregisterKvCache", 0, value, ("cache_id", "int64")) for value in (2**63, -(2**63) - 1)),
    *(("DeallocateCache", 0, value, ("cache_id", "int64")) for value in (2**63, -(2**63) - 1)),
    *((call, 0, CacheDesc(DEVICE, *rest), parts) for call in ("RegisterKvCache", "AllocateCache") for rest, parts in (
        ((0, DataType.DT_INT32, [8]), ("num_tensors=0",)),
        ((-1, DataType.DT_INT32, [8]), ("num_tensors", "uint32")),
        ((2**32, DataType.DT_INT32, [8]), ("num_tensors", "uint32")),
        ((2, cpp_api.DT_UNDEFINED, [8]), ("data_type=DT_UNDEFINED",)),
        ((2, DataType.DT_INT32, []), ("shape is empty",)),
        ((2, DataType.DT_INT32, [0]), ("shape", "0")),
        ((2, DataType.DT_INT32, [8, -1]), ("shape", "-1")),
        ((2, DataType.DT_INT32, [2**63]), ("shape", "int64")),
        ((2, DataType.DT_INT32, [2**62]), ("shape", "bytes")),
        ((2, DataType.DT_INT32, [1] * 32), ("32 dimensions",)),
    )),
    ("RegisterKvCache", 1, [], ("addrs is empty",)),
    ("RegisterKvCache", 1, [4096], ("addrs has 1", "2")),
    ("RegisterKvCache", 1, [4096, 8192, 12288], ("addrs has 3", "2")),
    ("RegisterKvCache", 1, [4096, 0], ("addrs[1]=0",)),
    ("RegisterKvCache", 1, [4096, -1], ("addrs[1]", "uint64")),
    ("RegisterKvCache", 1, [4096, 2**64], ("addrs[1]", "uint64")),
    ("RegisterKvCache", 1, [4096, 2**64 - 4], ("address space",)),
    *((call, 1, value, ("timeout",)) for call in ("LinkLlmClusters", "UnlinkLlmClusters") for value in (0, -1, 2**31)),
    *((call, 0, value, parts) for call in ("LinkLlmClusters", "UnlinkLlmClusters") for value, parts in (
        ([], ("clusters is empty",)),
        ([cluster(-1, 1)], ("clusters[0].remote_cluster_id", "uint64")),
        ([cluster(1, 1), cluster(2**64, 1)], ("clusters[1].remote_cluster_id", "uint64")),
        ([cluster(1, -1)], ("clusters[0].remote_ip_infos[0].port", "uint16")),
        ([cluster(1, 65536)], ("clusters[0].remote_ip_infos[0].port", "uint16")),
        ([ClusterInfo(1, 0, [], [IpInfo("", 1)])], ("clusters[0].remote_ip_infos[0].ip", "''")),
        ([ClusterInfo(1, 0, [], [IpInfo("1.2.3", 1)])], ("remote_ip_infos[0].ip", "1.2.3")),
        ([ClusterInfo(1, 0, [IpInfo("localhost", 1)])], ("local_ip_infos[0].ip", "localhost")),
        ([ClusterInfo(1, 2**31)], ("remote_role_type", "int32")),
    )),
    *((call, position, KvCacheExtParam(*ext), parts)
      for call, position in (("PullKvCache", 4), ("PullKvBlocks", 4), ("PushKvCache", 4), ("PushKvBlocks", 4))
      for ext, parts in (
        (((0, -1),), ("src_layer_range",)),
        (((-1, 0),), ("src_layer_range",)),
        (((1, 0),), ("src_layer_range",)),
        (((0, 2**31),), ("src_layer_range[1]", "int32")),
        (((-1, -1), (0, -1)), ("dst_layer_range",)),
        (((0, 0),), ("src_layer_range",)),
        (((-1, -1), (0, 0)), ("dst_layer_range",)),
        (((0, 2), (0, 2)), ("2 layers",)),
        (((0, 0), (0, 0), 3), ("tensor_num_per_layer=3",)),
        (((-1, -1), (-1, -1), 0), ("tensor_num_per_layer=0",)),
        (((-1, -1), (-1, -1), 256), ("tensor_num_per_layer", "uint8")),
    )),
    *((call, position, CacheIndex(*index), parts)
      for call, position in (("PullKvCache", 0), ("PullKvBlocks", 0), ("PushKvCache", 1), ("PushKvBlocks", 1))
      for index, parts in (
        ((-1, 1), ("cluster_id", "uint64")),
        ((2**64, 1), ("cluster_id", "uint64")),
        ((1, 2**63), ("cache_id", "int64")),
        ((1, 1, -1), ("batch_index", "uint32")),
        ((1, 1, 2**32), ("batch_index", "uint32")),
    )),
    *((call, position, Cache(2**63), ("cache.cache_id", "int64"))
      for call, position in (("PullKvCache", 1), ("PullKvBlocks", 1), ("PushKvCache", 0), ("PushKvBlocks", 0),
                             ("CopyKvCache", 0), ("CopyKvCache", 1), ("CopyKvBlocks", 0), ("CopyKvBlocks", 1))),
    *((call, position, [value], (name,))
      for call in ("PullKvBlocks", "PushKvBlocks") for position, name in ((2, "src_blocks"), (3, "dst_blocks"))
      for value in (-1, 8, 2**63, 2**64)),
    *((call, position, [], (name,))
      for call in ("PullKvBlocks", "PushKvBlocks") for position, name in ((2, "src_blocks"), (3, "dst_blocks"))),
    *(("PullKvCache", 2, value, ("batch_index",)) for value in (-1, 8, 2**32)),
    *(("PullKvCache", 3, value, ("size",)) for value in (0, -2, 65, 2**63)),
    *(("PushKvCache", 2, value, ("src_batch_index",)) for value in (-1, 8, 2**32)),
    *(("PushKvCache", 3, value, ("size",)) for value in (0, -2, 64, 2**63)),
]  # fmt: skip


@pytest.mark.parametrize("method", GOOD)
def test_r01_a_value_that_breaks_a_rule_is_param_invalid_and_nothing_has_happened(both: Pair, method: str) -> None:
    cases = [case[1:] for case in BAD_VALUES if case[0] == method]
    ends = (both.decoder, both.prompt)
    for position, value, parts in cases:
        try:
            unchanged(ends, ["kv"], BAD, parts, method, *_with(method, position, value))
        except BaseException as error:
            error.add_note(f"{method} with {value!r} as argument {position}")
            raise


@pytest.mark.parametrize("method", [name for name in GOOD if name != "LinkLlmClusters"])
def test_the_calls_of_the_matrix_are_right_but_for_the_one_argument(both: Pair, method: str) -> None:
    args = GOOD[method]
    status, text = both.decoder.do(attempt, method, *args)
    assert status is OK, text


def test_r01_initialize_and_the_constructor_take_their_types_only() -> None:
    dist = LlmDataDist(1, LlmRole.kMix)
    wrong: list[Any] = [None, [], "0", {1: "0"}, {"llm.DeviceId": 0}, {"llm.DeviceId": None}]
    for options in wrong:
        with pytest.raises(TypeError):
            dist.Initialize(options)
    arguments: list[tuple[Any, Any]] = [
        (None, LlmRole.kMix),
        ("1", LlmRole.kMix),
        (1.0, LlmRole.kMix),
        (1, None),
        (1, 3),
        (1, "kMix"),
    ]
    for args in arguments:
        with pytest.raises(TypeError):
            LlmDataDist(*args)


def test_a_bool_counts_as_an_int_but_not_the_other_way_round(both: Pair) -> None:
    assert both.decoder.do(_row_true) is OK


def _row_true(world: World) -> Any:
    return run(world, "PullKvCache", ROW, KV, True)
