"""LLMConfig, property by property, the dict it makes, and what the options become (interface §2, §3.1, §7).

What init refuses: tests/api/test_bad_input_calls.py.
"""

import dataclasses
import json
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_datadist._option_kinds import PoolOptions
from llm_datadist.config import CredentialFiles, LLMConfig, LlmConfig, Options, Settings, parse_listen_ip_info
from llm_datadist.errors import ParamError
from llm_datadist.types.enums import LLMRole
from tests.support.moves import wait_until
from tests.support.refusals import RULE, TYPE, UINT32, Spec, assign, bad, refuse_each

pytestmark = pytest.mark.covers(
    "LLMConfig*", "ge: *", "llm: *", "parse_listen_ip_info", "Options.parse", "PoolOptions.parse", "check_buf_pool"
)

DEVICE = {"ge.exec.deviceId": "0"}
V2 = DEVICE | {"llm.EnableCacheManager": "1"}
POOLS = {"llm.MemPoolConfig": "mem_pool", "llm.HostMemPoolConfig": "host_mem_pool"}
GIB, MIB2, SIZE = 2**30, 2 * 2**20, {"memory_size": 65536}


def parse(options: dict[str, str], role: LLMRole = LLMRole.DECODER) -> Options:
    return Options.parse(options, role)


# --- LLMConfig: properties -----------------------------------------------------------------------------------------

EMITTED = {"llm.MemoryUtilization": "0.95"}
_ADDRESSES = '{{"listen_ip_info": [{{"ip": {}, "port": 5}}, {{"ip": 6}}], "x": 1}}'
#: Property, default, option, and what each value becomes; None: no option.
PROPERTIES: list[tuple[str, object, str, dict[Any, str | None]]] = [
    ("device_id", None, "ge.exec.deviceId", {}),
    ("ge_options", {}, "", {}),
    ("sync_kv_timeout", None, "llm.SyncKvCacheWaitTime", {1500: "1500", "20000": "20000", 2**31 - 1: "2147483647"}),
    ("listen_ip_info", "", "llm.listenIpInfo", {"127.0.0.1:26000": "127.0.0.1:26000", "": None}),
    ("enable_cache_manager", False, "llm.EnableCacheManager", {True: "1", False: "0"}),
    ("enable_remote_cache_accessible", False, "llm.EnableRemoteCacheAccessible", {True: "1", False: "0"}),
    ("mem_pool_cfg", "", "llm.MemPoolConfig", {"no JSON": "no JSON", "": None}),
    ("host_mem_pool_cfg", "", "llm.HostMemPoolConfig", {"{}": "{}", "": None}),
    ("local_comm_res", "", "llm.LocalCommRes", {"": "", "{}": "{}"}),
    ("transfer_backend", "", "llm.TransferBackend", {"hixl": "hixl"}),
    ("global_resource_config", "", "llm.GlobalResourceConfig", {"": ""}),
    ("link_total_time", 0, "llm.LinkTotalTime", {0: "0", 2**32 - 1: "4294967295"}),
    ("link_retry_count", 1, "llm.LinkRetryCount", {1: "1", 100: "100"}),
    ("rdma_traffic_class", None, "llm.RdmaTrafficClass", {100: "100"}),
    ("rdma_service_level", None, "llm.RdmaServiceLevel", {100: "100"}),
    ("enable_switch_role", False, "llm.EnableSwitchRole", {True: "1", False: None}),
    ("mem_utilization", 0.95, "llm.MemoryUtilization", {0.0: "0.0", 1.0: "1.0"}),
    ("buf_pool_cfg", "", "llm.BufPoolCfg", {"{}": "{}", "": None}),
    ("deploy_res_path", "", "llm.deployResPath", {"/a": "/a", "": None}),
    ("cluster_info", "", "llm.ClusterInfo", {"": None, _ADDRESSES.format('"1.2.3.4"'): _ADDRESSES.format(0x04030201)}),
    ("output_max_size", None, "llm.OutputMaxSize", {7: "7"}),
]
DEFAULTS = {name: default for name, default, *_ in PROPERTIES}


def test_every_property_has_its_default_and_only_the_memory_utilization_is_emitted() -> None:
    config = LLMConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert config.generate_options() == EMITTED
    assert LlmConfig is LLMConfig


def emitted_by(name: str, value: Any) -> dict[str, str]:
    """Assign it, read it back, and return what is emitted."""
    config = LLMConfig()
    setattr(config, name, value)
    assert getattr(config, name) == value
    return config.generate_options()


def test_assigned_property_is_read_back_and_emitted() -> None:
    value: Any
    for name, _, option, texts in PROPERTIES:
        for value, text in texts.items():
            assert emitted_by(name, value) == EMITTED | ({} if text is None else {option: text}), (name, value)
    assert emitted_by("ge_options", {"ge.flowGraphMemMaxSize": "9"}) == EMITTED | {"ge.flowGraphMemMaxSize": "9"}
    assert emitted_by("sync_kv_timeout", np.int32(7)) == EMITTED | {"llm.SyncKvCacheWaitTime": "7"}
    devices: list[tuple[Any, str, str]] = [
        (3, "3", "3"),
        ([0, 2], "0;2", "0"),
        ((5,), "5", "5"),
        (np.int64(3), "3", "3"),
    ]
    for pool in ("mem_pool_cfg", "host_mem_pool_cfg"):
        for nbytes in (1 << 20, np.int64(1 << 20)):
            config = LLMConfig(**{pool: nbytes})  # type: ignore[arg-type]
            assert getattr(config, pool) == "1048576"
    for device, all_of_them, first in devices:
        wanted = {"ge.exec.deviceId": all_of_them, "ge.session_device_id": first}
        assert emitted_by("device_id", device) == EMITTED | wanted


_TEXT = Spec((1, {"memory_size": 1}, []), none_ok=True)
_NO_IP = '{"listen_ip_info": [{"ip": "1.2"}]}'
_SCOPED = '{"listen_ip_info": [{"ip": "fe80::1%eth0"}]}'
_FLAG = Spec((0, 1, "1", "true"), none_ok=True)
SPECS = {
    **dict.fromkeys(("listen_ip_info", "local_comm_res", "transfer_backend", "global_resource_config"), _TEXT),
    **dict.fromkeys(("buf_pool_cfg", "deploy_res_path"), _TEXT),
    **dict.fromkeys(  # never None (interface R11)
        ("mem_pool_cfg", "host_mem_pool_cfg"), Spec((1.0, {"memory_size": 1}, []), (RULE, "above 0", 0, -1, False))
    ),
    **dict.fromkeys(("enable_cache_manager", "enable_remote_cache_accessible", "enable_switch_role"), _FLAG),
    "device_id": Spec(
        ("0", 1.0),
        (TYPE, "{}[1]", [0, "1"]),
        (RULE, "{}: -1 is negative", -1),
        (RULE, "{}[1]: -1", [0, -1]),
        (RULE, "int32", 2**31),
        (RULE, "{}: [] is empty", []),
        none_ok=True,
    ),
    "sync_kv_timeout": Spec(
        (1.5,),
        *((RULE, f"{text!r}", text) for text in ("1s", "-5", "")),
        (RULE, "0 ms", "0", 0),
        (RULE, "-1 ms", -1),
        (RULE, f"{2**31} is outside", 2**31, str(2**31)),
    ),
    "ge_options": Spec((["a"],), (TYPE, "{}['a']", {"a": 1}), (TYPE, "key of {}", {1: "a"}), none_ok=True),
    "link_total_time": UINT32,
    "link_retry_count": Spec((1.0,), (RULE, "[1, 100]", 0, 101)),
    "rdma_traffic_class": UINT32,
    "rdma_service_level": UINT32,
    "mem_utilization": Spec((1,), (RULE, "[0.0, 1.0]", -0.1, 1.1, float("nan")), none_ok=True),
    "cluster_info": Spec(
        _TEXT.wrong, (RULE, "JSON", "{"), (RULE, "'1.2'", _NO_IP), (RULE, "scope", _SCOPED), none_ok=True
    ),
    "output_max_size": Spec(("7",), none_ok=True),
}


def test_r01_setter_refuses_and_keeps_the_value() -> None:
    config = LLMConfig()
    assert SPECS.keys() == DEFAULTS.keys()
    refuse_each(partial(assign, config), {}, SPECS)
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS


def test_none_means_not_assigned_where_it_is_accepted() -> None:
    good = {"listen_ip_info": "a:1", "enable_cache_manager": True, "local_comm_res": "", "transfer_backend": "hixl"}
    good |= {"enable_switch_role": True, "mem_utilization": 0.5, "buf_pool_cfg": "{}", "ge_options": {"a": "b"}}
    for name, value in (good | {"device_id": 1, "output_max_size": 1}).items():
        config = LLMConfig()
        setattr(config, name, value)
        setattr(config, name, None)
        assert getattr(config, name) == DEFAULTS[name]
        assert config.generate_options() == EMITTED, name


def test_a_keyword_is_an_assignment() -> None:
    assert Settings.__annotations__.keys() == DEFAULTS.keys()
    for name, _, _, texts in PROPERTIES:
        for value in texts:
            assert LLMConfig(**{name: value}).generate_options() == emitted_by(name, value)
    with pytest.raises(ParamError, match="'listen_ip' is no setting; did you mean 'listen_ip_info'"):
        LLMConfig(listen_ip="10.0.0.1:26000")  # type: ignore[call-arg]
    for name in ("generate_options", "_options", "xyz"):
        with pytest.raises(ParamError, match=f"{name!r} is no setting"):
            LLMConfig(**{name: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="device_id"):
        LLMConfig(device_id="0")  # type: ignore[arg-type]


def test_the_same_mutable_dict_every_time_under_both_names_and_keys_once_emitted_stay() -> None:
    config, other = LLMConfig(), LLMConfig()
    config.listen_ip_info = "1.2.3.4:5"
    first = config.generate_options()
    first["llm.RdmaServiceLevel"] = "3"
    config.device_id = 1
    config.listen_ip_info = ""
    assert repr(config) == "LLMConfig(listen_ip_info='', device_id=1)"
    config.ge_options["a"] = "b"
    assert config.gen_options() is first
    assert first["llm.RdmaServiceLevel"] == "3"
    assert first["ge.exec.deviceId"] == "1"
    assert first["llm.listenIpInfo"] == "1.2.3.4:5"
    assert (other.device_id, other.generate_options()) == (None, EMITTED), "two share nothing"
    config = LLMConfig()
    config.ge_options = {"ge.exec.deviceId": "9", "llm.MemoryUtilization": "0.1", "other": "x"}
    config.device_id = 2
    device = {"ge.exec.deviceId": "2", "ge.session_device_id": "2"}
    assert config.generate_options() == EMITTED | device | {"other": "x"}, "properties override them"


# --- Options: types and defaults -----------------------------------------------------------------------------------


def test_a_minimal_dict_has_defaults_is_not_changed_and_the_result_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCCL_CONNECT_TIMEOUT", raising=False)
    monkeypatch.delenv("LLM_DATADIST_INSECURE", raising=False)
    monkeypatch.setattr("resource.getrlimit", lambda _: (4096, 8192))
    given = dict(DEVICE)
    parsed = parse(given)
    assert repr(parsed) == (
        "Options(role=<LLMRole.DECODER: 2>, device_id=0, listen=None, sync_kv_timeout_ms=1000, cache_manager=False, "
        "remote_accessible=False, mem_pool=None, host_mem_pool=None, local_comm_res=None, "
        "transfer_backend=None, enable_switch_role=False, link_total_time=120, link_retry_count=1, "
        "device_memory='host', device_mover='auto', "
        "transport='auto', shm_socket_dir=None, pool_prefault=False, copy_threads=None, peer_timeout=10.0, "
        "checksum=False, tracing=False, statistics_page=True, max_links=256, write_by_address=True, "
        "granted_reads=False, credentials=None, max_link_age=None, insecure=False, "
        "same_host_users=frozenset(), same_user_only=False, peer_policy=None, nixl_fallback=False, "
        "nixl_plaintext=False, strict_types=False)"
    )
    assert given == DEVICE
    with pytest.raises(dataclasses.FrozenInstanceError):
        parsed.device_id = 1  # type: ignore[misc]


#: Option, field, and what each text becomes; modes and link_total_time: below.
PARSED: list[tuple[str, str, dict[str, object]]] = [
    ("ge.exec.deviceId", "device_id", {"7": 7}),
    ("llm.DeviceId", "device_id", {"7": 0}),  # the other one counts
    ("llm.SyncKvCacheWaitTime", "sync_kv_timeout_ms", {"2147483647": 2147483647}),
    ("llm.listenIpInfo", "listen", {"10.1.2.3:26000": ("10.1.2.3", 26000)}),
    ("llm.ListenIpInfo", "listen", {"10.1.2.3:26000": ("10.1.2.3", 26000)}),
    ("llm.EnableSwitchRole", "enable_switch_role", {"1": True}),
    ("llm.LocalCommRes", "local_comm_res", {"x": "x"}),
    ("llm.LinkTotalTime", "link_total_time", {"1080": 1080}),
    ("llm.LinkRetryCount", "link_retry_count", {"80": 80}),
    ("llm.DeviceMemory", "device_memory", {"host": "host", "cuda": "cuda"}),
    ("llm.DeviceMover", "device_mover", {"auto": "auto", "kernel": "kernel", "copy": "copy"}),
    ("llm.Transport", "transport", {"auto": "auto", "inproc": "inproc", "shm": "shm"}),
    ("llm.ShmSocketDir", "shm_socket_dir", {"/run/x": "/run/x"}),
    ("llm.PoolPrefault", "pool_prefault", {"1": True, "0": False}),
    ("llm.CopyThreads", "copy_threads", {"1": 1}),
    ("llm.PeerTimeout", "peer_timeout", {"0.5": 0.5, "30": 30.0}),
    ("llm.Checksum", "checksum", {"0": False, "1": True}),
    ("llm.StrictTypes", "strict_types", {"0": False, "1": True}),
    ("llm.Tracing", "tracing", {"0": False, "1": True}),
    ("llm.MaxLinks", "max_links", {"1": 1, "4294967295": 2**32 - 1}),
    ("llm.WriteByAddress", "write_by_address", {"0": False, "1": True}),
    ("llm.GrantedReads", "granted_reads", {"0": False, "1": True}),
    ("llm.SameUserOnly", "same_user_only", {"0": False, "1": True}),
    ("llm.SameHostUsers", "same_host_users", {"1001": {1001}, "root, 7": {0, 7}}),
]


def test_option_is_parsed() -> None:
    for option, field, texts in PARSED:
        for text, value in texts.items():
            assert getattr(parse(DEVICE | {option: text}), field) == value, option
    assert parse({"llm.DeviceId": "7"}).device_id == 7


@pytest.mark.parametrize(("descriptors", "links"), [(8, 1), (1024, 64), (1 << 20, 1024), (-1, 1024)])
def test_a_sixteenth_of_descriptors_may_be_links(monkeypatch: pytest.MonkeyPatch, descriptors: int, links: int) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (descriptors, -1))
    assert parse(DEVICE).max_links == links


def test_link_total_time_zero_is_the_environment_or_120_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCCL_CONNECT_TIMEOUT", raising=False)
    for environment, seconds in ((None, 120), ("300", 300), ("0", 120), ("long", 120)):
        if environment is not None:
            monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", environment)
        assert parse(DEVICE).link_total_time == seconds
        assert parse(DEVICE | {"llm.LinkTotalTime": "0"}).link_total_time == seconds


def test_r01_the_role_and_ip_and_port_are_checked_and_a_v1_prompt_must_listen() -> None:
    assert parse_listen_ip_info("0.0.0.0:0") == ("0.0.0.0", 0)
    assert parse_listen_ip_info("a:65535") == ("a", 65535)
    refuse_each(parse_listen_ip_info, {}, {"listen_ip_info": Spec((26000,), (RULE, "'a:65536'", "a:65536"))})
    to_listen = bad(RULE, "llm.listenIpInfo", "LLMRole.PROMPT", role=LLMRole.PROMPT)
    refuse_each(parse, {"options": DEVICE}, {"role": Spec((1, "PROMPT"))}, to_listen)
    assert parse(DEVICE | {"llm.EnableCacheManager": "1"}, LLMRole.PROMPT).listen is None
    assert parse(DEVICE | {"llm.listenIpInfo": "a:1"}, LLMRole.PROMPT).listen == ("a", 1)


def test_mode_defaults() -> None:
    hixl = {"llm.TransferBackend": "hixl", "llm.listenIpInfo": "a:1"}
    cases: list[tuple[dict[str, str], bool, bool]] = [
        ({}, False, False),
        ({"llm.EnableCacheManager": "1"}, True, False),
        ({"llm.EnableCacheManager": "1", "llm.EnableRemoteCacheAccessible": "1"}, True, True),
        ({"llm.EnableCacheManager": "0"}, False, False),
        ({"llm.EnableRemoteCacheAccessible": "1"}, False, False),
        ({"llm.LocalCommRes": ""}, True, True),
        ({"llm.LocalCommRes": "no JSON"}, True, True),
        ({"llm.LocalCommRes": "", "llm.EnableRemoteCacheAccessible": "0"}, True, False),
        ({"llm.LocalCommRes": "", "llm.EnableCacheManager": "1"}, True, True),
        (hixl | {"llm.EnableCacheManager": "1"}, True, True),
        (hixl | {"llm.LocalCommRes": ""}, True, True),
    ]
    for given, cache_manager, accessible in cases:
        parsed = parse(DEVICE | given)
        assert (parsed.cache_manager, parsed.remote_accessible) == (cache_manager, accessible), given


SILENT = (
    "ge.exec.rankId ge.resourceConfigPath ge.session_device_id ge.anything llm.ClusterInfo llm.EnableSetRole "
    "llm.ListenIp llm.ListenPort llm.OutputMaxSize llm.RdmaServiceLevel llm.RdmaTrafficClass llm.RefInputShapes "
    "llm.Role llm.deployResPath RESOURCE_CONFIG_PATH"
)


def test_known_options_without_effect_are_silent_and_unknown_ones_or_fields_one_warning_naming_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="LLM_DATADIST")
    for key in SILENT.split():
        assert parse(DEVICE | {key: "whatever"}) == parse(DEVICE), key
    assert caplog.records == []
    assert parse(DEVICE | {"llm.Typo": "1", "llm.MemPoolCfg": "2", "x.y": "3"}) == parse(DEVICE)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "llm.MemPoolCfg, llm.Typo" in caplog.text
    assert "x.y" not in caplog.text
    caplog.clear()
    parsed = parse(V2 | {"llm.MemPoolConfig": json.dumps(SIZE | {"zone": "a", "Page_shift": 1})})
    assert parsed.mem_pool == PoolOptions(65536, 16)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert all(part in caplog.text for part in ("llm.MemPoolConfig", "Page_shift", "zone"))


def test_every_option_of_llm_config_is_known_and_parsed(caplog: pytest.LogCaptureFixture) -> None:
    config, pool = LLMConfig(), json.dumps({"memory_size": 1048576})
    values = {name: next(iter(texts)) for name, _, _, texts in PROPERTIES if texts}
    values |= {"device_id": 0, "mem_pool_cfg": pool, "host_mem_pool_cfg": pool, "buf_pool_cfg": '{"buf_cfg": []}'}
    assign(config, **values | {"cluster_info": "{}"})
    with caplog.at_level(logging.DEBUG, logger="LLM_DATADIST"):
        parsed = parse(config.generate_options(), LLMRole.PROMPT)
    assert caplog.records == []
    assert (parsed.cache_manager, parsed.remote_accessible) == (True, True)
    assert parsed.mem_pool == parsed.host_mem_pool == PoolOptions(1048576, 16)


# --- Options: the pools (interface §7, R11, R12) ---------------------------------------------------------------------


def refuse_texts(base: dict[str, str], key: str, *rows: tuple[str, tuple[str, ...]]) -> None:
    """Each row is a text and what the error names beside the option."""
    refuse_each(parse, {}, {}, *[bad(RULE, key, *parts, options=base | {key: text}) for text, parts in rows])


BAD_POOLS: list[tuple[object, tuple[str, ...]]] = [
    ([SIZE], ("JSON object",)),
    (None, ("JSON object",)),
    ({}, ("memory_size", "missing")),
    ({"page_shift": 16}, ("memory_size", "missing")),
    *[({"memory_size": n}, ("memory_size", repr(n))) for n in (None, "65536", 65536.0, True, 0, -65536, 65535)],
    (SIZE | {"page_shift": 17}, ("memory_size", "131072")),
    *[({"memory_size": 2**32, "page_shift": n}, ("page_shift", repr(n))) for n in (31, -1, 16.0, False, None)],
    ({"memory_size": GIB, "page_shift": 9}, ("page_shift", "9", "[10, 31)")),
    ({"memory_size": (2**32 - 1) << 10, "page_shift": 10}, ("memory_size", "pages")),
    *[({"memory_size": 65536, "huge_pages": each}, ("huge_pages", repr(each))) for each in (1, 0, "true", None)],
]


def test_r11_pool_text_is_parsed_or_refused_naming_option_and_field_and_the_host_pool_has_a_limit() -> None:
    over = json.dumps({"memory_size": 20 * GIB + 1})
    for key, field in POOLS.items():
        for text, size, shift in (
            ('{"memory_size": 18737418240, "page_shift": 16}', 18737418240, 16),  # the page's own example
            ('{"memory_size": 65536}', 65536, 16),  # a single page of the default size
            (f'{{"memory_size": {GIB}, "page_shift": 10}}', GIB, 10),
            (f'{{"memory_size": {GIB}, "page_shift": 30}}', GIB, 30),
            (f'{{"memory_size": {20 * GIB}}}', 20 * GIB, 16),
            ('{"memory_size": 65536, "huge_pages": false}', 65536, 16),
            ("65536", 65536, 16),
            ("64KiB", 65536, 16),
            ("3 MiB", 3 << 20, 16),
            ("2GiB", 2 << 30, 16),
            ("65536B", 65536, 16),
        ):
            options = parse(V2 | {key: text})
            parsed = {each: getattr(options, each) for each in POOLS.values()}
            assert parsed == dict.fromkeys(POOLS.values()) | {field: PoolOptions(size, shift)}
            assert PoolOptions(size, shift).page_bytes == 1 << shift
        huge = getattr(parse(V2 | {key: json.dumps(SIZE | {"huge_pages": True})}), field)
        assert huge == PoolOptions(65536, 16, huge_pages=True)
        refuse_texts(V2, key, ("", ("''", "JSON")), ("{", ("'{'", "JSON")), ("[" * 100_000, ("JSON",)))
        refuse_texts(V2, key, *[(json.dumps(value), parts) for value, parts in BAD_POOLS])
        for text in ("64MB", "64mib", "1.5GiB", "1e6", "64Mi", "1 2", "9" * 21, "64MiB ", "\u0664MiB", "0x10"):
            refuse_texts(V2, key, (text, ("no size",)))
        refuse_texts(V2, key, ("0", ("memory_size is 0",)), ("1KiB", ("1024", "one page")), ("9999TiB", ("pages",)))
    refuse_texts(V2, "llm.HostMemPoolConfig", (over, (str(20 * GIB + 1), str(20 * GIB))))
    assert parse(V2 | {"llm.MemPoolConfig": over}).mem_pool is not None


def test_r12_pool_of_v1_is_its_own_text_else_a_share_of_the_graph_memory() -> None:
    name = "ge.flowGraphMemMaxSize"
    graph = DEVICE | {name: "2000000"}
    assert parse(graph).mem_pool == PoolOptions(1900000, 16)
    assert parse(graph | {"llm.MemoryUtilization": "0.5"}).mem_pool == PoolOptions(1000000, 16)
    assert parse(graph | {"llm.MemPoolConfig": json.dumps(SIZE)}).mem_pool == PoolOptions(65536, 16)
    for options in (graph | {"llm.MemoryUtilization": "0.0"}, DEVICE | {name: "0"}, DEVICE, V2 | {name: "2000000"}):
        assert parse(options).mem_pool is None
    refuse_texts(DEVICE, name, ("65536", ("62259",)))
    for base in (DEVICE, V2):
        refuse_texts(base, name, *[(text, (repr(text),)) for text in ("1,2", "-1", "1.23", "", "1e9", "9" * 30)])


def test_buffer_pool_text_is_checked_and_has_no_effect() -> None:
    key, buf = "llm.BufPoolCfg", {"total_size": MIB2, "blk_size": 256, "max_buf_size": 256}
    two = [buf, {"total_size": 2 * MIB2, "blk_size": 8192, "max_buf_size": 8192}]
    for good in ({"buf_cfg": two}, {"buf_cfg": [buf], "buf_pool_size": MIB2}):
        assert parse(DEVICE | {key: json.dumps(good)}) == parse(DEVICE)
    wrong: list[tuple[object, tuple[str, ...]]] = [
        ([], ("buf_cfg",)),
        ({"buf_cfg": 1}, ("buf_cfg",)),
        ({"buf_cfg": [1]}, ("buf_cfg",)),
        ({"buf_cfg": [{"total_size": 2097152}]}, ("buf_cfg[0]", "blk_size", "missing")),
        ({"buf_cfg": [buf] * 2}, ("buf_cfg[1]", "max_buf_size", "256")),
    ]
    for field, values in (
        ("total_size", (MIB2 + 1, 0, 2**32)),
        ("blk_size", (100, 2 * MIB2, 0)),
        ("max_buf_size", (128, MIB2, 256.0)),
    ):
        wrong += [({"buf_cfg": [buf | {field: value}]}, (field, repr(value))) for value in values]
    refuse_texts(DEVICE, key, ("{", ("JSON",)), *[(json.dumps(value), parts) for value, parts in wrong])


def test_a_credentials_file_that_is_written_is_seen_though_its_size_and_time_stay(tmp_path: Path) -> None:
    files = CredentialFiles(secrets=tmp_path / "secrets")

    def written(text: str) -> tuple[object, ...]:
        (tmp_path / "secrets").write_text(text)
        os.utime(tmp_path / "secrets", (1, 1))
        return files.stamp()

    before = written("a" * 40)
    wait_until(lambda: written("b" * 40) != before)  # the kernel's times have steps of some milliseconds
