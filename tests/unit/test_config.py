"""LLMConfig, property by property, and the dict it makes (interface §2)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.config import LLMConfig, LlmConfig, Options, PoolOptions
from llm_datadist.errors import NoneArgument, ParamError
from llm_datadist.types.enums import LLMRole

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.covers(
    "LLMConfig",
    "LLMConfig: buf_pool_cfg cluster_info deploy_res_path enable_cache_manager",
    "LLMConfig: enable_remote_cache_accessible enable_switch_role ge_options gen_options generate_options",
    "LLMConfig: global_resource_config host_mem_pool_cfg mem_utilization output_max_size rdma_service_level",
    "LLMConfig: rdma_traffic_class sync_kv_timeout transfer_backend",
    "llm: BufPoolCfg ClusterInfo EnableCacheManager EnableRemoteCacheAccessible EnableSwitchRole",
    "llm: GlobalResourceConfig HostMemPoolConfig MemoryUtilization OutputMaxSize RdmaServiceLevel",
    "llm: RdmaTrafficClass SyncKvCacheWaitTime TransferBackend deployResPath",
)

DEVICE = {"ge.exec.deviceId": "0"}


def parse(options: object, role: LLMRole = LLMRole.DECODER) -> Options:
    return Options.parse(options, role)  # type: ignore[arg-type]


# --- LLMConfig: properties -----------------------------------------------------------------------------------------

DEFAULTS: dict[str, object] = {
    "device_id": None,
    "sync_kv_timeout": None,
    "ge_options": {},
    "listen_ip_info": "",
    "enable_cache_manager": False,
    "enable_remote_cache_accessible": False,
    "mem_pool_cfg": "",
    "host_mem_pool_cfg": "",
    "local_comm_res": "",
    "transfer_backend": "",
    "global_resource_config": "",
    "link_total_time": 0,
    "link_retry_count": 1,
    "rdma_traffic_class": None,
    "rdma_service_level": None,
    "enable_switch_role": False,
    "mem_utilization": 0.95,
    "buf_pool_cfg": "",
    "deploy_res_path": "",
    "cluster_info": "",
    "output_max_size": None,
}


def test_every_property_has_its_default_and_only_the_memory_utilization_is_emitted() -> None:
    config = LLMConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert config.generate_options() == EMITTED
    assert LlmConfig is LLMConfig


TEXTS = ["listen_ip_info", "mem_pool_cfg", "host_mem_pool_cfg", "local_comm_res", "transfer_backend"]
TEXTS += ["global_resource_config", "buf_pool_cfg", "deploy_res_path", "cluster_info"]
NO_TEXTS: list[Any] = [1, {"memory_size": 1}, []]
FLAGS = ["enable_cache_manager", "enable_remote_cache_accessible", "enable_switch_role"]
NO_FLAGS: list[Any] = [0, 1, "1", "true"]
NEVER_NONE = ["sync_kv_timeout", "link_total_time", "link_retry_count", "rdma_traffic_class", "rdma_service_level"]
NEVER_NONE += ["mem_pool_cfg", "host_mem_pool_cfg"]  # interface R11
EMITTED = {"llm.MemoryUtilization": "0.95"}


#: Property, option, and what each value becomes; None: no option.
EMITS: list[tuple[str, str, dict[Any, str | None]]] = [
    ("sync_kv_timeout", "llm.SyncKvCacheWaitTime", {1500: "1500", "20000": "20000", 2**31 - 1: "2147483647"}),
    ("listen_ip_info", "llm.listenIpInfo", {"127.0.0.1:26000": "127.0.0.1:26000", "": None}),
    ("enable_cache_manager", "llm.EnableCacheManager", {True: "1", False: "0"}),
    ("enable_remote_cache_accessible", "llm.EnableRemoteCacheAccessible", {True: "1", False: "0"}),
    ("mem_pool_cfg", "llm.MemPoolConfig", {'{"memory_size": 1}': '{"memory_size": 1}', "no JSON": "no JSON", "": None}),
    ("host_mem_pool_cfg", "llm.HostMemPoolConfig", {"{}": "{}", "": None}),
    ("local_comm_res", "llm.LocalCommRes", {"": "", "{}": "{}"}),
    ("transfer_backend", "llm.TransferBackend", {"hixl": "hixl"}),
    ("global_resource_config", "llm.GlobalResourceConfig", {"": ""}),
    ("link_total_time", "llm.LinkTotalTime", {0: "0", 2**32 - 1: "4294967295"}),
    ("link_retry_count", "llm.LinkRetryCount", {1: "1", 100: "100"}),
    ("rdma_traffic_class", "llm.RdmaTrafficClass", {100: "100"}),
    ("rdma_service_level", "llm.RdmaServiceLevel", {100: "100"}),
    ("enable_switch_role", "llm.EnableSwitchRole", {True: "1", False: None}),
    ("mem_utilization", "llm.MemoryUtilization", {0.0: "0.0", 1.0: "1.0"}),
    ("buf_pool_cfg", "llm.BufPoolCfg", {"{}": "{}", "": None}),
    ("deploy_res_path", "llm.deployResPath", {"/a": "/a", "": None}),
    ("cluster_info", "llm.ClusterInfo", {"": None}),
    ("output_max_size", "llm.OutputMaxSize", {7: "7"}),
]


def emitted_by(name: str, value: Any) -> dict[str, str]:
    """Assign it, read it back, and return what is emitted."""
    config = LLMConfig()
    setattr(config, name, value)
    assert getattr(config, name) == value
    return config.generate_options()


def test_assigned_property_is_read_back_and_emitted() -> None:
    value: Any
    for name, option, texts in EMITS:
        for value, text in texts.items():
            assert emitted_by(name, value) == EMITTED | ({} if text is None else {option: text}), (name, value)
    assert emitted_by("ge_options", {"ge.flowGraphMemMaxSize": "9"}) == EMITTED | {"ge.flowGraphMemMaxSize": "9"}
    devices: list[tuple[Any, str, str]] = [(3, "3", "3"), ([0, 2], "0;2", "0"), ((5,), "5", "5")]
    for device, all_of_them, first in devices:
        wanted = {"ge.exec.deviceId": all_of_them, "ge.session_device_id": first}
        assert emitted_by("device_id", device) == EMITTED | wanted


@pytest.mark.parametrize(
    ("name", "value", "kind", "parts"),
    [
        *((name, wrong, TypeError, ("str", repr(wrong))) for name in TEXTS for wrong in NO_TEXTS),
        *((name, wrong, TypeError, ("bool", repr(wrong))) for name in FLAGS for wrong in NO_FLAGS),
        *((name, None, NoneArgument, ()) for name in NEVER_NONE),
        ("device_id", "0", TypeError, ("int, list, tuple", "'0'")),
        ("device_id", 1.0, TypeError, ("1.0",)),
        ("device_id", [0, "1"], TypeError, ("[1]", "'1'")),
        ("device_id", -1, ParamError, ("-1", "negative")),
        ("device_id", [0, -1], ParamError, ("[1]", "-1")),
        ("device_id", 2**31, ParamError, (str(2**31), "int32")),
        ("device_id", [], ParamError, ("empty",)),
        ("sync_kv_timeout", "1s", ParamError, ("'1s'",)),
        ("sync_kv_timeout", "-5", ParamError, ("'-5'",)),
        ("sync_kv_timeout", "", ParamError, ("''",)),
        ("sync_kv_timeout", "0", ParamError, ("0 ms", "above 0")),
        ("sync_kv_timeout", 0, ParamError, ("0 ms",)),
        ("sync_kv_timeout", -1, ParamError, ("-1 ms",)),
        ("sync_kv_timeout", 2**31, ParamError, (str(2**31), "int32")),
        ("sync_kv_timeout", str(2**31), ParamError, (str(2**31), "int32")),
        ("sync_kv_timeout", 1.5, TypeError, ("int, str", "1.5")),
        ("ge_options", ["a"], TypeError, ("dict", "list")),
        ("ge_options", {"a": 1}, TypeError, ("['a']", "str", "1")),
        ("ge_options", {1: "a"}, TypeError, ("key of", "1")),
        ("link_total_time", -1, ParamError, ("-1", str(2**32 - 1))),
        ("link_total_time", 2**32, ParamError, (str(2**32),)),
        ("link_total_time", "5", TypeError, ("'5'",)),
        ("link_retry_count", 0, ParamError, ("0", "[1, 100]")),
        ("link_retry_count", 101, ParamError, ("101", "[1, 100]")),
        ("link_retry_count", 1.0, TypeError, ("1.0",)),
        ("rdma_traffic_class", -1, ParamError, ("-1", "uint32")),
        ("rdma_traffic_class", "132", TypeError, ("'132'",)),
        ("rdma_service_level", 2**32, ParamError, (str(2**32),)),
        ("mem_utilization", 1, TypeError, ("float", "1")),
        ("mem_utilization", -0.1, ParamError, ("-0.1", "[0.0, 1.0]")),
        ("mem_utilization", 1.1, ParamError, ("1.1",)),
        ("mem_utilization", float("nan"), ParamError, ("nan",)),
        ("cluster_info", "{", ParamError, ("'{'", "JSON")),
        ("cluster_info", '{"listen_ip_info": [{"ip": "1.2"}]}', ParamError, ("'1.2'",)),
        ("output_max_size", "7", TypeError, ("'7'",)),
    ],
)
def test_r1_setter_refuses_and_keeps_the_value(
    refused: Callable[..., None], name: str, value: object, kind: type[Exception], parts: tuple[str, ...]
) -> None:
    config = LLMConfig()
    refused(kind, lambda: setattr(config, name, value), name, *parts)
    assert getattr(config, name) == DEFAULTS[name]


def test_none_means_not_assigned_where_it_is_accepted() -> None:
    good = {"listen_ip_info": "a:1", "enable_cache_manager": True, "local_comm_res": "", "transfer_backend": "hixl"}
    good |= {"enable_switch_role": True, "mem_utilization": 0.5, "buf_pool_cfg": "{}", "ge_options": {"a": "b"}}
    for name, value in (good | {"device_id": 1, "output_max_size": 1}).items():
        config = LLMConfig()
        setattr(config, name, value)
        setattr(config, name, None)
        assert getattr(config, name) == DEFAULTS[name]
        assert config.generate_options() == EMITTED, name


def test_numpy_integers_become_plain_text() -> None:
    config = LLMConfig()
    config.device_id = np.int64(3)  # type: ignore[assignment]
    config.sync_kv_timeout = np.int32(7)  # type: ignore[assignment]
    assert config.generate_options()["ge.exec.deviceId"] == "3"
    assert config.generate_options()["llm.SyncKvCacheWaitTime"] == "7"


def test_cluster_info_addresses_become_ints_in_the_option_only() -> None:
    config, text = LLMConfig(), '{"listen_ip_info": [{"ip": "1.2.3.4", "port": 5}, {"ip": 6}], "x": 1}'
    config.cluster_info = text
    assert config.cluster_info == text
    assert json.loads(config.generate_options()["llm.ClusterInfo"]) == {
        "listen_ip_info": [{"ip": 0x04030201, "port": 5}, {"ip": 6}],
        "x": 1,
    }


# --- LLMConfig: the dict -------------------------------------------------------------------------------------------


def test_the_same_mutable_dict_every_time_under_both_names() -> None:
    config = LLMConfig()
    first = config.generate_options()
    first["llm.RdmaServiceLevel"] = "3"
    config.device_id = 1
    assert config.gen_options() is first
    assert first["llm.RdmaServiceLevel"] == "3"
    assert first["ge.exec.deviceId"] == "1"


def test_keys_once_emitted_stay() -> None:
    config = LLMConfig()
    config.listen_ip_info = "1.2.3.4:5"
    config.generate_options()
    config.listen_ip_info = ""
    assert config.generate_options()["llm.listenIpInfo"] == "1.2.3.4:5"


def test_properties_override_ge_options() -> None:
    config = LLMConfig()
    config.ge_options = {"ge.exec.deviceId": "9", "llm.MemoryUtilization": "0.1", "other": "x"}
    config.device_id = 2
    assert config.generate_options() == {
        "ge.exec.deviceId": "2",
        "ge.session_device_id": "2",
        "llm.MemoryUtilization": "0.95",
        "other": "x",
    }


def test_two_configs_share_nothing() -> None:
    first, second = LLMConfig(), LLMConfig()
    first.device_id = 1
    first.ge_options["a"] = "b"
    assert second.device_id is None
    assert second.generate_options() == EMITTED


def test_repr_shows_what_is_assigned() -> None:
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    assert repr(config) == "LLMConfig(device_id=0, enable_cache_manager=True)"


def test_generated_options_parse() -> None:
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.sync_kv_timeout = 5000
    config.listen_ip_info = "127.0.0.1:0"
    config.rdma_traffic_class = 100
    config.mem_pool_cfg = '{"memory_size": 1048576}'
    parsed = parse(config.generate_options(), LLMRole.PROMPT)
    assert (parsed.device_id, parsed.cache_manager, parsed.remote_accessible) == (0, True, True)
    assert (parsed.sync_kv_timeout_ms, parsed.listen) == (5000, ("127.0.0.1", 0))
    assert parsed.mem_pool == PoolOptions(1048576, 16)
