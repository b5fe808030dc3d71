"""Arguments of the layer-wise transfer, and LLMClusterInfo (interface §2.1, §4)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist.errors import NoneArgument, ParamError
from llm_datadist.types import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMRole,
    MemInfo,
    Memtype,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.types.cluster import trans_int_ip, trans_str_ip

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.covers(
    "LLMClusterInfo",
    "LayerSynchronizer",
    "MemInfo",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "trans_str_ip",
    "CacheKey.cluster_id",
    "CacheKeyByIdAndIndex: batch_index cluster_id",
    "LLMClusterInfo: *",
    "LLMConfig.cluster_info",
    "LayerSynchronizer.synchronize_layer",
    "MemInfo: addr mem_type size",
    "TransferConfig: *",
    "TransferWithCacheKeyConfig: *",
    "llm.ClusterInfo",
)

MAX64 = 2**64 - 1
BLOCKS = BlocksCacheKey(1)
ROW = CacheKeyByIdAndIndex(1, 1)


# --- MemInfo, transfer configs, synchronizer -----------------------------------------------------------------------


def test_mem_info_checks_types_only(refused: Callable[..., None]) -> None:
    assert MemInfo(Memtype.MEM_TYPE_HOST, 0, -1) == MemInfo(Memtype.MEM_TYPE_HOST, 0, -1)
    refused(TypeError, lambda: MemInfo(0, 1, 1), "mem_type", "Memtype")  # type: ignore[arg-type]
    refused(TypeError, lambda: MemInfo(Memtype.MEM_TYPE_HOST, "1", 1), "addr")  # type: ignore[arg-type]
    refused(NoneArgument, lambda: MemInfo(Memtype.MEM_TYPE_HOST, 1, None), "size")  # type: ignore[arg-type]
    refused(NoneArgument, lambda: MemInfo(None, 1, 1), "mem_type")  # type: ignore[arg-type]
    refused(NoneArgument, lambda: MemInfo(Memtype.MEM_TYPE_HOST, None, 1), "addr")  # type: ignore[arg-type]
    refused(TypeError, lambda: MemInfo(Memtype.MEM_TYPE_HOST, 1, 1.0), "size", "1.0")  # type: ignore[arg-type]


def test_transfer_config_has_defaults_and_keeps_the_kind_of_sequence_and_its_own_copy() -> None:
    addresses = [10, 20]
    config = TransferConfig(1, addresses)
    assert (config.dst_cluster_id, config.dst_addrs, config.src_layer_range) == (1, [10, 20], None)
    assert (config.src_batch_index, config.dst_layer_range) == (0, None)
    assert repr(config) == (
        "TransferConfig(dst_cluster_id=1, dst_addrs=<2 addresses>, src_layer_range=None, src_batch_index=0)"
    )
    addresses.append(30)
    assert config.dst_addrs == [10, 20]
    config.dst_addrs = (1, 2)
    assert config.dst_addrs == (1, 2)


GOOD_ADDRESSES: dict[str, Any] = {"dst_cluster_id": 1, "dst_addrs": [10, 20]}
GOOD_KEY: dict[str, Any] = {"cache_key": ROW, "src_layer_range": range(2), "dst_layer_range": range(2)}


def _key_config(key: object = ROW) -> Any:
    return TransferWithCacheKeyConfig(**GOOD_KEY | {"cache_key": key})


#: Field, value, error, and what it names beside the field.
Wrong = tuple[str, Any, type[Exception], tuple[str, ...]]
WRONG_ADDRESSES: list[Wrong] = [
    ("dst_cluster_id", -1, ParamError, ("-1", "uint64")),
    ("dst_cluster_id", 2**64, ParamError, (str(2**64),)),
    ("dst_cluster_id", "1", TypeError, ("'1'",)),
    ("dst_cluster_id", None, NoneArgument, ()),
    ("dst_addrs", None, NoneArgument, ("list, tuple",)),
    ("dst_addrs", 5, TypeError, ("list, tuple", "5")),
    ("dst_addrs", [1, -1], ParamError, ("[1]", "-1")),
    ("dst_addrs", [1, "2"], TypeError, ("[1]", "'2'")),
    ("dst_addrs", [1.0], TypeError, ("[0]", "1.0")),
    ("src_layer_range", [0], TypeError, ("range", "list")),
    ("src_layer_range", range(0, 4, 2), ParamError, ("step 2",)),
    ("src_layer_range", range(-1, 2), ParamError, ("range(-1, 2)",)),
    ("src_layer_range", range(2, 2), ParamError, ("range(2, 2)", "empty")),
    ("src_batch_index", -1, ParamError, ("-1", "uint32")),
    ("src_batch_index", 2**32, ParamError, (str(2**32),)),
    ("src_batch_index", None, NoneArgument, ()),
]
WRONG_KEYS: list[Wrong] = [
    ("cache_key", 1, TypeError, ("BlocksCacheKey",)),
    ("cache_key", CacheKey(1, 2), TypeError, ("BlocksCacheKey", "CacheKeyByIdAndIndex")),
    ("cache_key", None, NoneArgument, ()),
    ("src_layer_range", None, NoneArgument, ("range",)),
    ("dst_layer_range", None, NoneArgument, ("range",)),
    ("src_layer_range", (0, 1), TypeError, ("tuple",)),
    ("dst_layer_range", range(0, 4, 2), ParamError, ("step 2",)),
    ("src_layer_range", range(3, 1), ParamError, ("range(3, 1)", "empty")),
    ("src_batch_index", -1, ParamError, ("-1", "uint32")),
    ("src_batch_index", 1.0, TypeError, ("1.0",)),
]


def test_r1_configs_refuse_in_constructor_and_setter(refused: Callable[..., None]) -> None:
    configs: list[tuple[Any, dict[str, Any], list[Wrong]]] = [
        (TransferConfig, GOOD_ADDRESSES, WRONG_ADDRESSES),
        (TransferWithCacheKeyConfig, GOOD_KEY, WRONG_KEYS),
    ]
    for made, good, wrong in configs:
        for field, value, kind, parts in wrong:
            config = made(**good)
            before = repr(config)
            refused(kind, partial(made, **good | {field: value}), field, *parts)
            refused(kind, partial(setattr, config, field, value), field, *parts)
            assert repr(config) == before, (field, value)


def test_key_config_gives_back_what_it_was_made_of_and_follows_a_changed_key() -> None:
    config = TransferWithCacheKeyConfig(ROW, range(2), range(3, 5), 7)
    assert (config.cache_key, config.dst_cluster_id, config.src_batch_index) == (ROW, 1, 7)
    assert (config.src_layer_range, config.dst_layer_range) == (range(2), range(3, 5))
    assert repr(config).startswith("TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(cluster_id=1")
    config.src_batch_index = 0
    config.cache_key = BlocksCacheKey(9)
    assert config.dst_cluster_id == 9


def test_r1_key_config_refuses_a_row_of_a_blocks_cache(refused: Callable[..., None]) -> None:
    refused(ParamError, lambda: TransferWithCacheKeyConfig(BLOCKS, range(1), range(1), 2), "src_batch_index: 2")
    config = _key_config(BLOCKS)
    refused(ParamError, lambda: setattr(config, "src_batch_index", 1), "src_batch_index: 1", "BlocksCacheKey")
    row = _key_config(ROW)
    row.src_batch_index = 1
    refused(ParamError, lambda: setattr(row, "cache_key", BLOCKS), "src_batch_index: 1")
    assert row.cache_key is ROW


def test_r1_key_config_refuses_ranges_of_unequal_length(refused: Callable[..., None]) -> None:
    refused(
        ParamError,
        lambda: TransferWithCacheKeyConfig(ROW, range(2), range(3)),
        "src_layer_range: range(0, 2)",
        "dst_layer_range: range(0, 3)",
    )
    config = _key_config()
    config.src_layer_range = range(4)
    refused(ParamError, config.check_lengths, "range(0, 4)", "range(0, 2)")
    config.dst_layer_range = range(4, 8)
    config.check_lengths()


def test_layer_synchronizer_must_be_implemented() -> None:
    with pytest.raises(TypeError, match="synchronize_layer"):
        LayerSynchronizer()  # type: ignore[abstract]

    class Ready(LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            return layer_index == 0 and timeout_in_millis is None

    assert Ready().synchronize_layer(0, None)


# --- LLMClusterInfo ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "packed"),
    [("1.2.3.4", 0x04030201), ("127.0.0.1", 0x0100007F), ("0.0.0.0", 0), ("255.255.255.255", 2**32 - 1)],
)
def test_ip_is_packed_first_octet_lowest(text: str, packed: int) -> None:
    assert trans_str_ip(text) == packed
    assert trans_int_ip(packed) == text


def test_r28_cluster_info_is_empty_at_first_and_collects_endpoints() -> None:
    info = LLMClusterInfo()
    assert info.remote_cluster_id is None
    assert info.local_ip_info_list == info.remote_ip_info_list == []
    info.remote_cluster_id = MAX64
    info.remote_role_type = LLMRole.PROMPT
    info.append_local_ip_info("10.0.0.1", 0)
    info.append_remote_ip_info("10.0.0.2", 26000)
    info.append_remote_ip_info(0x0300000A, 65535)
    assert info.remote_cluster_id == MAX64
    assert info.remote_role_type is LLMRole.PROMPT
    assert info.local_ip_info_list == [(0x0100000A, 0)]
    assert info.remote_ip_info_list == [(0x0200000A, 26000), (0x0300000A, 65535)]
    assert repr(info) == (f"<LLMClusterInfo {MAX64}: local [10.0.0.1:0], remote [10.0.0.2:26000, 10.0.0.3:65535]>")


@pytest.mark.parametrize(
    ("ip", "port", "kind", "parts"),
    [
        ("1.2.3", 1, ParamError, ("ip", "'1.2.3'")),
        ("300.1.1.1", 1, ParamError, ("'300.1.1.1'",)),
        ("::g", 1, ParamError, ("'::g'",)),
        ("localhost", 1, ParamError, ("'localhost'",)),
        ("", 1, ParamError, ("''",)),
        ("1.2.3.4\0", 1, ParamError, ("ip",)),
        (-1, 1, ParamError, ("ip", "-1")),
        (2**32, 1, ParamError, ("ip", str(2**32))),
        (1.5, 1, TypeError, ("ip", "str, int", "1.5")),
        (None, 1, NoneArgument, ("ip",)),
        ("1.2.3.4", -1, ParamError, ("port", "-1", "uint16")),
        ("1.2.3.4", 65536, ParamError, ("port", "65536")),
        ("1.2.3.4", "80", TypeError, ("port", "'80'")),
        ("1.2.3.4", None, NoneArgument, ("port",)),
    ],
)
def test_r1_endpoint_refuses(
    refused: Callable[..., None], ip: Any, port: Any, kind: type[Exception], parts: tuple[str, ...]
) -> None:
    info = LLMClusterInfo()
    refused(kind, partial(info.append_local_ip_info, ip, port), *parts)
    refused(kind, partial(info.append_remote_ip_info, ip, port), *parts)
    assert info.local_ip_info_list == info.remote_ip_info_list == []


@pytest.mark.parametrize(
    ("field", "value", "kind", "parts"),
    [
        ("remote_cluster_id", -1, ParamError, ("-1", "uint64")),
        ("remote_cluster_id", 2**64, ParamError, (str(2**64),)),
        ("remote_cluster_id", "1", TypeError, ("'1'",)),
        ("remote_cluster_id", None, NoneArgument, ()),
        ("remote_role_type", "PROMPT", TypeError, ("'PROMPT'",)),
        ("remote_role_type", None, NoneArgument, ()),
        ("remote_role_type", 1.0, TypeError, ("1.0",)),
        ("remote_cluster_id", 1.0, TypeError, ("1.0",)),
    ],
)
def test_r1_cluster_info_refuses(
    refused: Callable[..., None], field: str, value: object, kind: type[Exception], parts: tuple[str, ...]
) -> None:
    info = LLMClusterInfo()
    refused(kind, lambda: setattr(info, field, value), field, *parts)
