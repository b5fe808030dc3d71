"""The value types: enumerations, CacheDesc, Cache, keys, configs of transfers, LLMClusterInfo, Tensor (interface §1.2,
§2.1, §4, §5, §8)."""

import copy
import gc
import pickle
import re
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest

from llm_datadist import LLMClusterInfo, LLMConfig, Placement, Tensor, TensorDesc, TransferConfig
from llm_datadist.data_type import dtype_to_np_dtype, np_dtype_to_dtype, valid_np_dtypes
from llm_datadist.errors import ParamError
from llm_datadist.types import BlocksCacheKey, Cache, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, MemInfo
from llm_datadist.types.cluster import trans_int_ip, trans_str_ip
from llm_datadist.types.data_type import data_type_of, numpy_type
from llm_datadist.types.enums import LLMRole, Memtype, PushType, RegisterMemStatus
from llm_datadist.types.layerwise import LayerSynchronizer, TransferWithCacheKeyConfig
from tests.support.refusals import INT64, NONE, RULE, TYPE, UINT32, UINT64, Spec, assign, bad, integer, refuse_each

pytestmark = [
    pytest.mark.covers("Cache", "Cache: cache_desc cache_id create_cpu_cache is_blocks_cache tensor_addrs"),
    pytest.mark.covers("BlocksCacheKey*", "CacheDesc*", "CacheKey*", "DataType*", "LLMClusterInfo*", "LLMRole"),
    pytest.mark.covers("LayerSynchronizer*", "Mem*", "Placement", "RegisterMemStatus", "Transfer*Config*"),
    pytest.mark.covers("KvCacheManager", "Tensor", "Tensor: numpy tensor_desc", "TensorDesc*", "valid_np_dtypes"),
]

HALF = DataType.DT_FLOAT16
MAX64 = 2**64 - 1
BLOCKS, ROW = BlocksCacheKey(1), CacheKeyByIdAndIndex(1, 1)


def test_r01_enumerations_are_ints_with_the_name_as_text_and_another_number_is_a_value_error() -> None:
    """The documented members and their values are in test_public_api.py."""
    every: list[type[Any]] = [LLMRole, Placement, RegisterMemStatus, Memtype, PushType, DataType]
    for enum in every:
        for value in (-1, 5_000, "PROMPT", None, 0.5):
            with pytest.raises(ValueError, match=f"{value!r} is not a valid {enum.__name__}"):
                enum(value)
    assert str(LLMRole.MIX) == f"{LLMRole.MIX}" == "LLMRole.MIX"
    assert f"{LLMRole.MIX:d}" == "3"


#: The types of each size; the codes are in test_public_api.py.
SIZES: dict[int, dict[str, type]] = {
    1: {"INT8": np.int8, "UINT8": np.uint8, "BOOL": np.bool_},
    2: {"FLOAT16": np.float16, "INT16": np.int16, "UINT16": np.uint16, "BF16": np.float16},
    4: {"FLOAT": np.float32, "INT32": np.int32, "UINT32": np.uint32},
    8: {"INT64": np.int64, "UINT64": np.uint64, "DOUBLE": np.float64},
    16: {"STRING": np.bytes_},
}


def test_every_data_type_has_its_size_and_numpy_type_which_map_back_except_bfloat16() -> None:
    for size, types in SIZES.items():
        for name, scalar in types.items():
            dtype = DataType[f"DT_{name}"]
            assert (dtype.itemsize, dtype_to_np_dtype[dtype]) == (size, scalar)
            assert np_dtype_to_dtype[scalar] is (DataType.DT_FLOAT16 if name == "BF16" else dtype)
            assert CacheDesc(60, [3, 5, 7], dtype).size == 105 * size, "bytes of one tensor"
    assert len(dtype_to_np_dtype) == len(DataType) == sum(map(len, SIZES.values())) == 14
    assert len(np_dtype_to_dtype) == len(valid_np_dtypes) == 13
    assert set(valid_np_dtypes) == set(np_dtype_to_dtype)
    of_dtypes = [np_dtype_to_dtype[np.dtype(each)] for each in (np.uint16, np.longlong, "S3")]
    assert of_dtypes == [DataType.DT_UINT16, DataType.DT_INT64, DataType.DT_STRING]
    with pytest.raises(KeyError):
        np_dtype_to_dtype[np.dtype(np.complex64)]


def test_desc_takes_what_numpy_calls_an_element_type_and_nothing_that_only_sounds_like_one() -> None:
    given = {each: np_dtype_to_dtype[each] for each in valid_np_dtypes if each is not np.bytes_}
    given |= {np.longlong: DataType.DT_INT64, np.ulonglong: DataType.DT_UINT64}
    for scalar, data_type in given.items():
        for dtype in (scalar, np.dtype(scalar), data_type):
            assert CacheDesc(1, [2], dtype).data_type is data_type_of("dtype", dtype) is data_type
        assert np.dtype(numpy_type("data_type", data_type)) == np.dtype(scalar)
    for wrong in (np.bytes_, np.floating, np.complex64, np.dtype(">f4"), np.dtype([("k", "f4")]), np.dtype(object)):
        with pytest.raises(ParamError, match=re.escape(f"data_type={wrong}: not an element type of caches")):
            CacheDesc(1, [2], wrong)


def test_desc_gives_back_what_it_was_made_of_and_has_defaults() -> None:
    shape = [4, 8, 2]
    desc = CacheDesc(3, shape, HALF, Placement.HOST, 1, 2, "BSH")
    assert desc.shape is shape
    assert (desc.num_tensors, desc.data_type, desc.placement) == (3, HALF, Placement.HOST)
    assert (desc.batch_dim, desc.batch_size, desc.seq_len_dim_index, desc.kv_tensor_format) == (1, 8, 2, "BSH")
    desc = CacheDesc(0, (4, 8), DataType.DT_INT8)
    assert desc.placement is Placement.DEVICE
    assert (desc.batch_dim, desc.batch_size, desc.seq_len_dim_index, desc.kv_tensor_format) == (0, 4, -1, None)
    desc = CacheDesc(np.int32(2), [np.int32(2**20), np.int32(2**20)], HALF)  # type: ignore[arg-type, list-item]
    assert desc.size == 2**41
    assert type(desc.batch_size) is int


def test_r01_desc_and_update_dim_refuse() -> None:
    specs = {
        "num_tensors": UINT32,
        "shape": Spec(
            ("12", {1, 2}),
            (TYPE, "{}[1]", [1, 2.0]),
            (NONE, "{}[0]", [None]),
            (RULE, f"{{}}[1]: {2**63}", [1, 2**63]),
            (RULE, "{}[0]", [-(2**63) - 1]),
        ),
        "data_type": Spec((1, "float16", float, "DT_FLOAT16", list)),
        "placement": Spec((1,)),
        "batch_dim_index": Spec((0.0,), (RULE, "[0, 2)", 2, -1)),
        "seq_len_dim_index": integer(-(2**31), 2**31 - 1, 2, -2),
        "kv_tensor_format": Spec((1,), none_ok=True),
    }
    good = {"num_tensors": 1, "shape": [1, 2], "data_type": HALF}
    refuse_each(CacheDesc, good, specs, bad(RULE, "shape is empty: 1 to 31 dimensions", shape=[], batch_dim_index=7))
    specs = {"dim_index": Spec((0.0,), (RULE, "[0, 2)", 2, -1)), "dim_value": INT64}
    good = {"dim_index": 0, "dim_value": 1}
    refuse_each(CacheDesc(1, [4, 8], HALF).update_dim, good, specs)
    refuse_each(CacheDesc(1, (4, 8), HALF).update_dim, good, {}, bad(TYPE, "shape", "(4, 8)", "list"))


def test_r29_size_of_an_impossible_shape_is_param_invalid() -> None:
    for shape, *texts in (
        ([4, 0], "[4, 0]", "not positive"),
        ([4, -8], "-8", "not positive"),
        ([1] * 32, "32 dimensions", "31"),
        ([2**62, 2**62], str(2**62), "beyond"),
        ([2**62], "DT_FLOAT16", "beyond"),
    ):
        desc = CacheDesc(1, shape, HALF)
        refuse_each(lambda desc=desc: desc.size, {}, {}, bad(RULE, "shape", *texts))
    assert CacheDesc(1, [1] * 30 + [5], HALF).size == 10


def test_update_dim_and_the_callers_own_list_change_shape_and_size_but_not_batch_size_and_all_is_shown() -> None:
    shape = [4, 8]
    desc = CacheDesc(1, shape, HALF)
    assert desc.size == 64
    desc.update_dim(0, 6)
    assert (shape, desc.size, desc.batch_size) == ([6, 8], 96, 4)
    shape[1] = 1
    assert (desc.size, desc.batch_size) == (12, 4)
    assert repr(CacheDesc(2, [0, 3], HALF, Placement.HOST)) == (  # even of an impossible shape
        "CacheDesc(num_tensors=2, shape=[0, 3], data_type=DataType.DT_FLOAT16, placement=Placement.HOST, "
        "batch_dim_index=0, seq_len_dim_index=-1, kv_tensor_format=None)"
    )


HOST_DESC = CacheDesc(2, [4, 8], HALF, Placement.HOST)


def test_r01_r16_cpu_cache_is_an_unregistered_blocks_cache_on_the_host() -> None:
    addresses = [4096, 8192]
    cache = Cache.create_cpu_cache(HOST_DESC, addresses)
    assert (cache.cache_id, cache.is_blocks_cache, cache.tensor_addrs) == (-1, True, addresses)
    assert cache.cache_desc is HOST_DESC
    assert cache.tensor_addrs is not addresses
    specs = {
        "cache_desc": Spec(("d",), (RULE, "{}: placement is Placement.DEVICE", CacheDesc(2, [4, 8], HALF))),
        "addrs": Spec(
            ((1, 2),),
            (TYPE, "{}[1]", [1, "2"]),
            (RULE, "{}[1]: -2", [1, -2]),
            (RULE, "{}: 1 addresses for num_tensors=2", [1]),
        ),
    }
    refuse_each(Cache.create_cpu_cache, {"cache_desc": HOST_DESC, "addrs": addresses}, specs)


def test_cache_tells_what_it_is_keeps_its_memory_until_it_is_emptied_and_has_fields_that_cannot_be_replaced() -> None:
    memory = np.zeros(1)
    alive = weakref.ref(memory)
    cache = Cache(3, HOST_DESC, [1, 2], is_blocks_cache=True, memory=memory)
    del memory
    gc.collect()
    assert alive() is not None
    addresses = cache.tensor_addrs
    assert repr(cache) == "<Cache 3: blocks, 2 x [4, 8] DT_FLOAT16 on HOST>"
    cache._empty()
    gc.collect()
    assert alive() is None
    assert addresses == cache.tensor_addrs == []
    cache._empty()
    assert repr(cache) == "<Cache 3: blocks, 2 x [4, 8] DT_FLOAT16 on HOST, deallocated>"
    with pytest.raises(AttributeError):
        cache.cache_id = 4


def test_r01_mem_info_checks_types_only() -> None:
    good = {"mem_type": Memtype.MEM_TYPE_HOST, "addr": 0, "size": -1}
    assert MemInfo(**good) == MemInfo(**good)  # type: ignore[arg-type]
    refuse_each(MemInfo, good, {"mem_type": Spec((0,)), "addr": Spec(("1",)), "size": Spec((1.0,))})


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


def test_r01_configs_refuse_in_constructor_and_setter() -> None:
    layers = (
        (RULE, "step 2", range(0, 4, 2)),
        (RULE, "starts at -1", range(-1, 2)),
        (RULE, "empty", range(2, 2), range(3, 1)),
    )
    by_address = {
        "dst_cluster_id": UINT64,
        "dst_addrs": Spec((5,), (TYPE, "{}[1]", [1, "2"]), (TYPE, "{}[0]", [1.0]), (RULE, "{}[1]: -1", [1, -1])),
        "src_layer_range": Spec(([0],), *layers, none_ok=True),
        "src_batch_index": UINT32,
    }
    by_key = {
        "cache_key": Spec((1, CacheKey(1, 2))),
        "src_layer_range": Spec(((0, 1),), *layers),
        "dst_layer_range": Spec(((0, 1),), *layers),
        "src_batch_index": UINT32,
    }
    keyed: dict[str, Any] = {"cache_key": ROW, "src_layer_range": range(2), "dst_layer_range": range(2)}
    for made, good, specs in (
        (TransferConfig, {"dst_cluster_id": 1, "dst_addrs": [10, 20]}, by_address),
        (TransferWithCacheKeyConfig, keyed, by_key),
    ):
        config = made(**good)
        before = repr(config)
        refuse_each(made, good, specs)
        refuse_each(partial(assign, config), {}, specs)
        assert repr(config) == before


def test_key_config_gives_back_what_it_was_made_of_and_follows_a_changed_key() -> None:
    config = TransferWithCacheKeyConfig(ROW, range(2), range(3, 5), 7)
    assert (config.cache_key, config.dst_cluster_id, config.src_batch_index) == (ROW, 1, 7)
    assert (config.src_layer_range, config.dst_layer_range) == (range(2), range(3, 5))
    assert repr(config).startswith("TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(cluster_id=1")
    config.src_batch_index = 0
    config.cache_key = BlocksCacheKey(9)
    assert config.dst_cluster_id == 9


def test_r01_key_config_refuses_a_row_of_a_blocks_cache_and_ranges_of_unequal_length() -> None:
    good = {"cache_key": ROW, "src_layer_range": range(2), "dst_layer_range": range(2)}
    of_blocks = bad(RULE, "src_batch_index: 2", "BlocksCacheKey", cache_key=BLOCKS, src_batch_index=2)
    unequal = bad(RULE, "src_layer_range: range(0, 2)", "dst_layer_range: range(0, 3)", dst_layer_range=range(3))
    refuse_each(TransferWithCacheKeyConfig, good, {}, of_blocks, unequal)
    blocks, row = (TransferWithCacheKeyConfig(key, range(2), range(2)) for key in (BLOCKS, ROW))
    refuse_each(partial(assign, blocks), {}, {}, bad(RULE, "src_batch_index: 1", src_batch_index=1))
    row.src_batch_index = 1
    refuse_each(partial(assign, row), {}, {}, bad(RULE, "src_batch_index: 1", cache_key=BLOCKS))
    assert row.cache_key is ROW
    row.src_layer_range = range(4)
    refuse_each(row.check_lengths, {}, {}, bad(RULE, "range(0, 4)", "range(0, 2)"))
    row.dst_layer_range = range(4, 8)
    row.check_lengths()


def test_a_name_that_a_class_does_not_have_is_refused_with_the_nearest_one_and_one_that_it_has_is_not() -> None:
    desc = CacheDesc(1, [1], DataType.DT_INT8)
    given: list[tuple[object, str, str]] = [
        (LLMConfig(), "enable_cachemanager", "'enable_cache_manager'"),
        (LLMConfig(), "gen_option", "'gen_options'"),
        (LLMClusterInfo(), "remote_cluster", "'remote_cluster_id'"),
        (desc, "dtype", "'data_type'"),
        (TensorDesc(DataType.DT_INT8, [1]), "shapes", "'shape'"),
        (TransferConfig(1, []), "dst_layers_range", "'dst_layer_range'"),
        (TransferWithCacheKeyConfig(ROW, range(1), range(1)), "cachekey", "'cache_key'"),
        (Cache(1, desc, [1]), "tensor_addr", "'tensor_addrs'"),
    ]
    for instance, name, near in given:
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'; did you mean {near}"):
            setattr(instance, name, True)
        assert not hasattr(instance, name)
    with pytest.raises(AttributeError, match=r"LLMConfig has no attribute 'xyzzy'$"):
        setattr(LLMConfig(), "xyzzy", 1)  # noqa: B010 (checkers would refuse it, too)

    class Ours(LLMConfig):
        team: str = ""

    ours = Ours()
    ours.team, ours.device_id = "a", 1
    assert (ours.team, ours.generate_options()["ge.exec.deviceId"]) == ("a", "1")
    config = TransferConfig(1, [])
    config.dst_layer_range = range(2)
    assert config.dst_layer_range == range(2)


def test_layer_synchronizer_must_be_implemented() -> None:
    with pytest.raises(TypeError, match="synchronize_layer"):
        LayerSynchronizer()  # type: ignore[abstract]


def test_r28_cluster_info_is_empty_at_first_and_collects_endpoints_with_the_first_octet_lowest() -> None:
    packed = {"1.2.3.4": 0x04030201, "127.0.0.1": 0x0100007F, "0.0.0.0": 0, "255.255.255.255": 2**32 - 1}
    for text, number in packed.items():
        assert (trans_str_ip(text), trans_int_ip(number)) == (number, text)
    info = LLMClusterInfo()
    assert info.remote_cluster_id is None
    assert info.local_ip_info_list == info.remote_ip_info_list == []
    info.remote_cluster_id = MAX64
    info.remote_role_type = LLMRole.PROMPT
    info.append_local_ip_info("10.0.0.1", 0)
    info.append_remote_ip_info("10.0.0.2", 26000)
    info.append_remote_ip_info(0x0300000A, 65535)
    assert (info.remote_cluster_id, info.remote_role_type) == (MAX64, LLMRole.PROMPT)
    assert info.local_ip_info_list == [(0x0100000A, 0)]
    assert info.remote_ip_info_list == [(0x0200000A, 26000), (0x0300000A, 65535)]
    assert repr(info) == (f"<LLMClusterInfo {MAX64}: local [10.0.0.1:0], remote [10.0.0.2:26000, 10.0.0.3:65535]>")
    names = ["localhost", "prefill-0.prefill.ns.svc.cluster.local", "a_b.", "1st", f"{'a' * 63}.b"]
    for name in names:
        info.append_remote_ip_info(name, 1)
    assert info.remote_ip_info_list[2:] == [(name, 1) for name in names]


def test_r01_cluster_info_refuses() -> None:
    info = LLMClusterInfo()
    no_ips = ("1.2.3", "300.1.1.1", "::g", "", "1.2.3.4\0", -1, 2**32)
    no_names = (*["-a", "a-.b", "a..b", ".a", "a.7", "7", "a:1", "ä"], "a b", "a\n", f"{'a' * 64}.b", "a." * 127 + "a")
    for append, wrong in (
        (info.append_local_ip_info, (*no_ips, "localhost")),
        (info.append_remote_ip_info, (*no_ips, *no_names)),
    ):
        endpoint = {"ip": Spec((1.5,), *((RULE, f"ip: {ip!r}", ip) for ip in wrong)), "port": integer(0, 2**16 - 1)}
        refuse_each(append, {"ip": "1.2.3.4", "port": 1}, endpoint)
    scope = "an address with a scope (%) is link-local, which is not supported; give that host's IPv4, "
    texts = dict.fromkeys(("fe80::1%eth0", "[fe80::1%eth0]"), f": {scope}")
    texts |= dict.fromkeys(("tcp://10.0.0.1", "http://[::1]:26000"), " has a scheme; give the host alone")
    of_port = " has a port, which is the second argument; give the host alone"
    texts |= dict.fromkeys(("10.0.0.1:26000", "[::1]:26000", "prefill-0:26000"), of_port)
    for append in (info.append_local_ip_info, info.append_remote_ip_info):
        for ip, text in texts.items():
            with pytest.raises(ParamError, match=re.escape(f"ip: {ip!r}{text}")):
                append(ip, 1)
    with pytest.raises(ParamError, match=re.escape(f"ip: 'fe80::1%eth0': {scope}")):
        trans_str_ip("fe80::1%eth0")
    refuse_each(partial(assign, info), {}, {"remote_cluster_id": UINT64, "remote_role_type": Spec(("PROMPT", 1.0))})
    assert info.local_ip_info_list == info.remote_ip_info_list == []


# --- keys ------------------------------------------------------------------------------------------------------------


def test_positional_keyword_and_older_name_are_the_same_and_a_placeholder_has_neither_request_nor_prefix() -> None:
    key = CacheKey(1, 2, 3, 4)
    assert key == CacheKey(cluster_id=1, req_id=2, model_id=3, prefix_id=4)
    assert key == CacheKey(prompt_cluster_id=1, req_id=2, model_id=3, prefix_id=4)
    assert key == CacheKey(1, 2, prefix_id=4, model_id=3)
    assert (key.cluster_id, key.prompt_cluster_id, key.req_id, key.model_id, key.prefix_id) == (1, 1, 2, 3, 4)
    assert BlocksCacheKey(1) == BlocksCacheKey(cluster_id=1, model_id=0) == BlocksCacheKey(prompt_cluster_id=1)
    assert BlocksCacheKey(1, 2).prompt_cluster_id == 1
    assert (CacheKey(1, 2).model_id, CacheKey(1, 2).prefix_id) == (0, MAX64)
    for key, is_prefix, is_placeholder in (
        (CacheKey(1, 2), False, False),
        (CacheKey(1, MAX64), False, True),
        (CacheKey(1, MAX64, prefix_id=5), True, False),
    ):
        assert (key.is_prefix, key.is_placeholder) == (is_prefix, is_placeholder)


def test_keys_hold_the_whole_uint64_and_take_numpy_integers() -> None:
    key = CacheKey(MAX64, MAX64, MAX64, MAX64)
    assert (key.cluster_id, key.req_id, key.model_id, key.prefix_id) == (MAX64,) * 4
    assert BlocksCacheKey(MAX64, MAX64).model_id == MAX64
    assert CacheKeyByIdAndIndex(MAX64, 2**63 - 1, 2**32 - 1).batch_index == 2**32 - 1
    assert CacheKeyByIdAndIndex(1, -1).batch_index == 0
    assert CacheKey(np.uint64(1), np.int64(2)) == CacheKey(1, 2)  # type: ignore[call-overload]
    assert type(CacheKeyByIdAndIndex(np.int32(1), 2).cluster_id) is int  # type: ignore[arg-type]


def test_r01_keys_refuse_wrong_names_and_numbers_of_arguments_and_what_is_no_such_integer() -> None:
    def made(key: type, args: tuple[int, ...] = (), **given: object) -> object:
        return key(*args, **given)

    twice = ("prompt_cluster_id=1", "already 1")
    refuse_each(
        made,
        {},
        {},
        bad(RULE, "CacheKey", "5 arguments", "at most 4", key=CacheKey, args=(1, 2, 3, 4, 5)),
        bad(RULE, "cluster_id is required", key=CacheKey, req_id=1),
        bad(RULE, "req_id is required", key=CacheKey, args=(1,)),
        bad(RULE, "req_id is required", key=CacheKey, cluster_id=1),
        bad(RULE, "Unsupported", "modelid=3", key=CacheKey, args=(1, 2), modelid=3),
        bad(RULE, "cluster_id=3", "already 1", key=CacheKey, args=(1, 2), cluster_id=3),
        bad(RULE, *twice, key=CacheKey, args=(1, 2), prompt_cluster_id=1),
        bad(RULE, *twice, key=CacheKey, cluster_id=1, prompt_cluster_id=1, req_id=2),
        bad(RULE, "BlocksCacheKey", "3 arguments", "at most 2", key=BlocksCacheKey, args=(1, 2, 3)),
        bad(RULE, "cluster_id is required", key=BlocksCacheKey),
        bad(RULE, "Unsupported", "req_id=3", key=BlocksCacheKey, args=(1,), req_id=3),
        bad(RULE, *twice, key=BlocksCacheKey, cluster_id=1, prompt_cluster_id=1),
        bad(TYPE, "cache_id", key=CacheKeyByIdAndIndex, args=(1,)),
    )
    for key, fields in (
        (CacheKey, dict.fromkeys(("cluster_id", "req_id", "model_id", "prefix_id"), UINT64)),
        (BlocksCacheKey, dict.fromkeys(("cluster_id", "model_id"), UINT64)),
        (CacheKeyByIdAndIndex, {"cluster_id": UINT64, "cache_id": INT64, "batch_index": UINT32}),
    ):
        refuse_each(key, dict.fromkeys(fields, 1), fields)


def test_keys_are_frozen_hashable_values() -> None:
    by_id = CacheKeyByIdAndIndex(1, 2)
    cases: list[tuple[Any, Any, str]] = [
        (CacheKey(1, 2), CacheKey(1, 3), f"CacheKey(cluster_id=1, req_id=2, model_id=0, prefix_id={MAX64})"),
        (BlocksCacheKey(1), BlocksCacheKey(1, 1), "BlocksCacheKey(cluster_id=1, model_id=0)"),
        (by_id, CacheKeyByIdAndIndex(1, 2, 1), "CacheKeyByIdAndIndex(cluster_id=1, cache_id=2, batch_index=0)"),
    ]
    for key, other, text in cases:
        again = copy.deepcopy(pickle.loads(pickle.dumps(key)))
        assert again == key
        assert hash(again) == hash(key)
        assert key != other
        assert len({key, again, other, BlocksCacheKey(1, 2), CacheKeyByIdAndIndex(1, 2, 3), CacheKey(1, 2, 3)}) == 5
        assert repr(key) == text
        with pytest.raises(AttributeError):
            key.cluster_id = 5


# --- Tensor and TensorDesc of v1 (interface §8) ----------------------------------------------------------------------


def test_a_tensor_over_an_array_is_the_array() -> None:
    for scalar in valid_np_dtypes:
        if scalar is np.bytes_:
            continue
        array = np.arange(6).astype(scalar).reshape(2, 3)
        tensor = Tensor(array)
        assert np.shares_memory(tensor.numpy(), array)
        assert (tensor.numpy().dtype, tensor.tensor_desc.shape) == (array.dtype, [2, 3])
        copy = tensor.numpy(copy=True)
        assert not np.shares_memory(copy, array)
        np.testing.assert_array_equal(copy, array)
        same = Tensor(tensor, TensorDesc(tensor.tensor_desc.dtype, (2, 3)))
        for again in (Tensor(tensor), same):
            assert np.shares_memory(again.numpy(), array)


def test_both_of_numpys_types_for_one_integer_are_that_integer() -> None:
    """Regression: a Tensor refused arrays of the other NumPy type for int64."""
    int64 = DataType.DT_INT64
    for name, dtype in ((np.longlong, int64), (np.ulonglong, DataType.DT_UINT64), (np.int_, int64)):
        array = np.arange(3, dtype=name)
        assert Tensor(array).tensor_desc.dtype is dtype
        assert Tensor(array, TensorDesc(dtype, [3])).numpy() is array


def test_bf16_comes_as_float32_by_value() -> None:
    patterns = np.array([0x0000, 0x8000, 0x3F80, 0xBF00, 0x4049, 0x7F80, 0x0001], np.uint16)
    expected = np.array([0.0, -0.0, 1.0, -0.5, 3.140625, np.inf, 2.0**-133], np.float32)
    for data in (patterns, patterns.view(np.float16)):
        tensor = Tensor(data, TensorDesc(DataType.DT_BF16, [7]))
        np.testing.assert_array_equal(tensor.numpy(), expected)
        assert tensor.numpy().dtype == np.float32
        assert np.signbit(tensor.numpy()[1])
        assert repr(tensor) == "<Tensor DT_BF16 [7]>"


def test_text_is_dt_string_and_only_copied() -> None:
    for text in (np.array(["a", "äb"]), np.array([b"a", b"bc"])):
        tensor = Tensor(text)
        assert tensor.tensor_desc.dtype is DataType.DT_STRING
        with pytest.raises(RuntimeError, match="copy=True"):
            tensor.numpy()
        copy = tensor.numpy(copy=True)
        assert copy.tolist() == text.tolist()
        assert not np.shares_memory(copy, text)


def test_an_address_with_a_descriptor_of_its_own_shape_is_the_memory_there() -> None:
    array, shape = np.arange(6, dtype=np.int64), [3, 2]
    desc = TensorDesc(DataType.DT_INT64, shape)
    shape[0] = 9
    desc.shape[1] = 9
    assert (desc.dtype, desc.shape, TensorDesc(DataType.DT_INT8, ()).shape) == (DataType.DT_INT64, [3, 2], [])
    Tensor(array.ctypes.data, desc).numpy()[2, 1] = 50
    assert array[5] == 50


def test_what_is_no_tensor_is_a_param_error_and_a_wrong_type_a_type_error() -> None:
    half = np.zeros((2, 3), np.float16)
    cases: list[tuple[Any, TensorDesc | None, str]] = [
        (half, TensorDesc(DataType.DT_FLOAT, [2, 3]), "DT_FLOAT"),
        (half, TensorDesc(DataType.DT_FLOAT16, [3, 2]), "[3, 2]"),
        (half, TensorDesc(DataType.DT_FLOAT16, [6]), "[6]"),
        (Tensor(half), TensorDesc(DataType.DT_INT16, [2, 3]), "DT_INT16"),
        (half.astype(np.int16), TensorDesc(DataType.DT_BF16, [2, 3]), "DT_BF16"),
        (half.T, None, "not contiguous"),
        (half.astype(np.complex64), None, "complex64"),
        (half.astype(object), None, "object"),
        (half.astype(">f4"), None, ">f4"),
        (np.zeros(2, "M8[s]"), None, "datetime64"),
        (4096, None, "tensor_desc"),
        *[(at, TensorDesc(DataType.DT_INT8, [4]), f"data={at}: 4 bytes") for at in (0, -1, 2**64 - 2)],
        (4096, TensorDesc(DataType.DT_INT8, [4, 0]), "[4, 0]"),
        (4096, TensorDesc(DataType.DT_STRING, [4]), "DT_STRING"),
    ]
    refuse_each(Tensor, {}, {}, *[bad(RULE, part, data=data, tensor_desc=desc) for data, desc, part in cases])
    refuse_each(
        Tensor, {"data": half}, {"data": Spec(([1], "a", 1.0, True)), "tensor_desc": Spec(([2, 3],), none_ok=True)}
    )
    refuse_each(Tensor(half).numpy, {}, {"copy": Spec((1,))})
    shapes = Spec((3,), (TYPE, "{}[1]", [1, "2"]), (RULE, "{}", [1, -1], [1, 2**63]))
    refuse_each(TensorDesc, {"dtype": DataType.DT_INT8, "shape": [1]}, {"dtype": Spec(("f",)), "shape": shapes})
