"""Options: what the option strings become (interface §2, §3.1).

What init refuses: tests/api/test_bad_input_instance.py.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from typing import TYPE_CHECKING

import pytest

from llm_datadist.config import LLMConfig, Options, parse_listen_ip_info
from llm_datadist.errors import NoneArgument, ParamError
from llm_datadist.types.enums import LLMRole

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.covers(
    "apply_environment",
    "parse_listen_ip_info",
    "LLMConfig: buf_pool_cfg deploy_res_path device_id enable_remote_cache_accessible enable_switch_role",
    "LLMConfig: global_resource_config link_retry_count link_total_time listen_ip_info output_max_size",
    "LLMConfig: rdma_service_level rdma_traffic_class",
    "Options.parse",
    "ge: exec.deviceId flowGraphMemMaxSize session_device_id",
    "llm: AuthSecretFile BufPoolCfg Checksum CopyThreads DeviceId EnableCacheManager",
    "llm: EnableRemoteCacheAccessible EnableSetRole EnableSwitchRole GlobalResourceConfig LinkRetryCount",
    "llm: LinkTotalTime ListenIp ListenIpInfo ListenPort OutputMaxSize PoolPrefault RdmaServiceLevel",
    "llm: RdmaTrafficClass RefInput Role ShmSocketDir TlsCa TlsCert TlsKey deployResPath listenIpInfo",
)

DEVICE = {"ge.exec.deviceId": "0"}
V2 = DEVICE | {"llm.EnableCacheManager": "1"}


def parse(options: object, role: LLMRole = LLMRole.DECODER) -> Options:
    return Options.parse(options, role)  # type: ignore[arg-type]


# --- Options: types and defaults -----------------------------------------------------------------------------------


def test_defaults_of_a_minimal_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCCL_CONNECT_TIMEOUT", raising=False)
    assert dataclasses.asdict(parse(DEVICE)) == {
        "role": LLMRole.DECODER,
        "device_id": 0,
        "listen": None,
        "sync_kv_timeout_ms": 1000,
        "cache_manager": False,
        "remote_accessible": False,
        "mem_pool": None,
        "host_mem_pool": None,
        "local_comm_res": None,
        "transfer_backend": None,
        "enable_switch_role": False,
        "link_total_time": 120,
        "link_retry_count": 1,
        "transport": "auto",
        "shm_socket_dir": None,
        "pool_prefault": False,
        "copy_threads": None,
        "peer_timeout": 10.0,
        "checksum": False,
        "max_links": 1024,
        "write_by_address": True,
    }


def test_the_dict_is_not_changed_and_the_result_is_frozen() -> None:
    given = DEVICE | {"llm.LocalCommRes": "", "llm.DeviceId": "0"}
    before = dict(given)
    parsed = parse(given)
    assert given == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        parsed.device_id = 1  # type: ignore[misc]


def test_r1_role_must_be_an_llm_role(refused: Callable[..., None]) -> None:
    for role, kind in ((1, TypeError), ("PROMPT", TypeError), (None, NoneArgument)):
        refused(kind, partial(parse, DEVICE, role), "role", "LLMRole")  # type: ignore[arg-type]


# --- Options: single values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"ge.exec.deviceId": "7"}, "device_id", 7),
        ({"llm.DeviceId": "7"}, "device_id", 0),
        ({"llm.SyncKvCacheWaitTime": "2147483647"}, "sync_kv_timeout_ms", 2147483647),
        ({"llm.listenIpInfo": "10.1.2.3:26000"}, "listen", ("10.1.2.3", 26000)),
        ({"llm.ListenIpInfo": "10.1.2.3:26000"}, "listen", ("10.1.2.3", 26000)),
        ({"llm.EnableCacheManager": "1"}, "cache_manager", True),
        ({"llm.EnableCacheManager": "1", "llm.EnableRemoteCacheAccessible": "1"}, "remote_accessible", True),
        ({"llm.EnableSwitchRole": "1"}, "enable_switch_role", True),
        ({"llm.LocalCommRes": "x"}, "local_comm_res", "x"),
        ({"llm.LinkTotalTime": "1080"}, "link_total_time", 1080),
        ({"llm.LinkRetryCount": "80"}, "link_retry_count", 80),
        ({"llm.Transport": "auto"}, "transport", "auto"),
        ({"llm.Transport": "inproc"}, "transport", "inproc"),
        ({"llm.Transport": "shm"}, "transport", "shm"),
        ({"llm.ShmSocketDir": "/run/x"}, "shm_socket_dir", "/run/x"),
        ({"llm.PoolPrefault": "1"}, "pool_prefault", True),
        ({"llm.PoolPrefault": "0"}, "pool_prefault", False),
        ({"llm.CopyThreads": "1"}, "copy_threads", 1),
        ({"llm.PeerTimeout": "0.5"}, "peer_timeout", 0.5),
        ({"llm.PeerTimeout": "30"}, "peer_timeout", 30.0),
        ({"llm.Checksum": "0"}, "checksum", False),
        ({"llm.Checksum": "1"}, "checksum", True),
    ],
)
def test_option_is_parsed(given: dict[str, str], field: str, value: object) -> None:
    assert getattr(parse(DEVICE | given), field) == value


def test_device_id_by_its_cpp_name() -> None:
    assert parse({"llm.DeviceId": "7"}).device_id == 7


@pytest.mark.parametrize("value", [None, "0"])
@pytest.mark.parametrize(("environment", "seconds"), [(None, 120), ("300", 300), ("0", 120), ("long", 120)])
def test_link_total_time_zero_is_the_environment_or_120_s(
    value: str | None, environment: str | None, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HCCL_CONNECT_TIMEOUT", raising=False)
    if environment is not None:
        monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", environment)
    given = {} if value is None else {"llm.LinkTotalTime": value}
    assert parse(DEVICE | given).link_total_time == seconds


def test_r1_listen_ip_info_is_ip_and_port(refused: Callable[..., None]) -> None:
    assert parse_listen_ip_info("0.0.0.0:0") == ("0.0.0.0", 0)
    assert parse_listen_ip_info("a:65535") == ("a", 65535)
    refused(ParamError, partial(parse_listen_ip_info, "1.2.3.4:65536"), "listen_ip_info", "'1.2.3.4:65536'")
    refused(TypeError, partial(parse_listen_ip_info, 26000), "listen_ip_info", "str")  # type: ignore[arg-type]
    refused(NoneArgument, partial(parse_listen_ip_info, None), "listen_ip_info", "str")  # type: ignore[arg-type]


# --- Options: modes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "cache_manager", "accessible"),
    [
        ({}, False, False),
        ({"llm.EnableCacheManager": "1"}, True, False),
        ({"llm.EnableCacheManager": "0"}, False, False),
        ({"llm.EnableRemoteCacheAccessible": "1"}, False, False),
        ({"llm.LocalCommRes": ""}, True, True),
        ({"llm.LocalCommRes": "no JSON"}, True, True),
        ({"llm.LocalCommRes": "", "llm.EnableRemoteCacheAccessible": "0"}, True, False),
        ({"llm.LocalCommRes": "", "llm.EnableCacheManager": "1"}, True, True),
        ({"llm.TransferBackend": "hixl", "llm.EnableCacheManager": "1", "llm.listenIpInfo": "a:1"}, True, True),
        ({"llm.TransferBackend": "hixl", "llm.LocalCommRes": "", "llm.listenIpInfo": "a:1"}, True, True),
    ],
)
def test_mode_defaults(given: dict[str, str], cache_manager: bool, accessible: bool) -> None:
    parsed = parse(DEVICE | given)
    assert (parsed.cache_manager, parsed.remote_accessible) == (cache_manager, accessible)


def test_v1_prompt_must_listen(refused: Callable[..., None]) -> None:
    refused(ParamError, lambda: parse(DEVICE, LLMRole.PROMPT), "llm.listenIpInfo", "LLMRole.PROMPT")
    assert parse(V2, LLMRole.PROMPT).listen is None
    assert parse(DEVICE | {"llm.listenIpInfo": "a:1"}, LLMRole.PROMPT).listen == ("a", 1)


# --- Options: what has no effect, what is not there ----------------------------------------------------------------


SILENT = (
    "ge.exec.rankId ge.resourceConfigPath ge.session_device_id ge.anything llm.ClusterInfo llm.EnableSetRole "
    "llm.ListenIp llm.ListenPort llm.OutputMaxSize llm.RdmaServiceLevel llm.RdmaTrafficClass llm.RefInputShapes "
    "llm.Role llm.deployResPath RESOURCE_CONFIG_PATH"
)


def test_known_option_without_effect_is_accepted_silently(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="LLM_DATADIST"):
        for key in SILENT.split():
            assert parse(DEVICE | {key: "whatever"}) == parse(DEVICE), key
    assert caplog.records == []


def test_unknown_options_are_one_warning_naming_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
        assert parse(DEVICE | {"llm.Typo": "1", "llm.MemPoolCfg": "2", "x.y": "3"}) == parse(DEVICE)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "llm.MemPoolCfg, llm.Typo" in caplog.text
    assert "x.y" not in caplog.text


def test_every_option_of_llm_config_is_known(caplog: pytest.LogCaptureFixture) -> None:
    config = LLMConfig()
    config.device_id = 0
    config.sync_kv_timeout = 1
    config.listen_ip_info = "a:1"
    config.enable_cache_manager = config.enable_remote_cache_accessible = config.enable_switch_role = True
    config.mem_pool_cfg = config.host_mem_pool_cfg = '{"memory_size": 65536}'
    config.local_comm_res = config.global_resource_config = ""
    config.transfer_backend = "hixl"
    config.link_total_time = config.link_retry_count = config.output_max_size = 5
    config.rdma_traffic_class = config.rdma_service_level = 4
    config.buf_pool_cfg = '{"buf_cfg": []}'
    config.deploy_res_path = "/x"
    config.cluster_info = "{}"
    with caplog.at_level(logging.DEBUG, logger="LLM_DATADIST"):
        parse(config.generate_options(), LLMRole.PROMPT)
    assert caplog.records == []
