"""LLMConfig: the properties of API §2, and the option dict that ``init`` takes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from llm_datadist import options as keys
from llm_datadist.checks import check_dict, check_int, check_int32, check_rule, check_type, check_uint32, is_digits
from llm_datadist.cluster import trans_str_ip
from llm_datadist.errors import NoneArgument
from llm_datadist.options import Options, parse_listen_ip_info
from llm_datadist.pool_options import PoolOptions, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["LLMConfig", "LlmConfig", "Options", "PoolOptions", "parse_listen_ip_info"]

V = TypeVar("V")


class _Setting(Generic[V]):
    """One property of LLMConfig: how it is checked when set and how it becomes an option.

    Args:
        key: The option's key.
        default: What the getter returns while nothing is assigned.
        check: Checks (name, value) and returns what is kept.
        emit: The option's text; None: leave the option out. Asked only once something is assigned.
        none_resets: Assigning None means "not assigned" again; otherwise it is a NoneArgument.
        always: Emit the default too.
        doc: What the property means.
    """

    def __init__(
        self,
        key: str,
        default: V,
        check: Callable[[str, Any], V],
        emit: Callable[[V], str | None] = str,
        *,
        none_resets: bool = True,
        always: bool = False,
        doc: str,
    ) -> None:
        self.key = key
        self.default = default
        self.__doc__ = doc
        self._check = check
        self._emit = emit
        self._none_resets = none_resets
        self._always = always

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> _Setting[V]: ...
    @overload
    def __get__(self, instance: LLMConfig, owner: type) -> V: ...
    def __get__(self, instance: LLMConfig | None, owner: type) -> _Setting[V] | V:
        if instance is None:
            return self
        value: V = instance._assigned.get(self._name, self.default)
        return value

    def __set__(self, instance: LLMConfig, value: V | None) -> None:
        if value is None:
            if not self._none_resets:
                raise NoneArgument(f"{self._name} is None, a value is needed")
            instance._assigned.pop(self._name, None)
        else:
            instance._assigned[self._name] = self._check(self._name, value)

    def text(self, instance: LLMConfig) -> str | None:
        """Return the option's text, or None where the option is left out."""
        if self._name not in instance._assigned and not self._always:
            return None
        return self._emit(self.__get__(instance, type(instance)))


def _text(name: str, value: object) -> str:
    return check_type(name, value, str)


def _flag(name: str, value: object) -> bool:
    return check_type(name, value, bool)


def _device_ids(name: str, value: object) -> int | Sequence[int]:
    if not isinstance(value, (list, tuple)):
        if not hasattr(value, "__index__"):
            check_type(name, value, (int, list, tuple))
        return _device(name, value)
    check_rule(value, f"{name}: {value!r} is empty, one device id is needed")
    devices = [_device(f"{name}[{i}]", item) for i, item in enumerate(value)]
    return devices if isinstance(value, list) else tuple(devices)


def _device(name: str, value: object) -> int:
    device = check_int32(name, value)
    check_rule(device >= 0, f"{name}: {device} is negative")
    return device


def _timeout_ms(name: str, value: object) -> int | str:
    if isinstance(value, str):
        check_rule(is_digits(value), f"{name}: {value!r} is no whole number of milliseconds")
    elif not hasattr(value, "__index__"):
        check_type(name, value, (int, str))
    budget = check_int32(name, int(value) if isinstance(value, str) else value)
    check_rule(budget > 0, f"{name}: {budget} ms, it must be above 0")
    return value if isinstance(value, str) else budget


def _retries(name: str, value: object) -> int:
    count = check_int(name, value)
    check_rule(1 <= count <= 100, f"{name}: {count} is outside [1, 100]")
    return count


def _share(name: str, value: object) -> float:
    share = check_type(name, value, float)
    check_rule(0.0 <= share <= 1.0, f"{name}: {share} is outside [0.0, 1.0]")
    return float(share)


def _cluster_info(name: str, value: object) -> str:
    text = _text(name, value)
    _packed_cluster_info(text)
    return text


def _packed_cluster_info(text: str) -> str | None:
    """Return the JSON with the addresses of ``listen_ip_info`` as ints, which is the option's form."""
    if not text:
        return None
    info = parse_json("cluster_info", text)
    endpoints = info.get("listen_ip_info") if isinstance(info, dict) else None
    for endpoint in endpoints if isinstance(endpoints, list) else ():
        if isinstance(endpoint, dict) and isinstance(endpoint.get("ip"), str):
            endpoint["ip"] = trans_str_ip(endpoint["ip"], "cluster_info: listen_ip_info.ip")
    return json.dumps(info)


def _joined(devices: int | Sequence[int] | None) -> str:
    return str(devices) if isinstance(devices, int) else ";".join(map(str, devices or ()))


def _bit(flag: bool) -> str:
    return "1" if flag else "0"


def _if_true(flag: bool) -> str | None:
    return "1" if flag else None


def _if_any(text: str) -> str | None:
    return text or None


class LLMConfig:
    """Settings of one LLMDataDist, made into the option dict that ``init`` takes.

    Every property is checked when it is assigned: a wrong type is a TypeError (NoneArgument for None where a value is
    needed), a value outside its range a ParamError. Where None is accepted it means "not assigned".

    Source: API §2.
    """

    device_id: _Setting[int | Sequence[int] | None] = _Setting(
        keys.DEVICE_ID,
        None,
        _device_ids,
        _joined,
        doc="Device served: an int, or a list or tuple of ints, of which ``init`` accepts exactly one. Required.",
    )
    sync_kv_timeout: _Setting[int | str | None] = _Setting(
        keys.SYNC_TIMEOUT,
        None,
        _timeout_ms,
        none_resets=False,
        doc="Budget of each operation in milliseconds, an int or digits, above 0; 1000 when not set.",
    )
    listen_ip_info = _Setting(keys.LISTEN, "", _text, _if_any, doc='"ip:port" to listen on; port 0 picks a free one.')
    enable_cache_manager = _Setting(
        keys.CACHE_MANAGER, False, _flag, _bit, doc="True: CacheManager mode; False: KvCacheManager mode."
    )
    enable_remote_cache_accessible = _Setting(
        keys.REMOTE_ACCESSIBLE, False, _flag, _bit, doc="True: peers read and write caches one-sidedly (RCA)."
    )
    mem_pool_cfg = _Setting(
        keys.MEM_POOL,
        "",
        _text,
        _if_any,
        none_resets=False,
        doc='Device pool, JSON: ``{"memory_size": bytes, "page_shift": 10..30, 16 by default}``. Parsed by ``init``. '
        "Source: [seed:deprecated], API §7.1.",
    )
    host_mem_pool_cfg = _Setting(
        keys.HOST_MEM_POOL,
        "",
        _text,
        _if_any,
        none_resets=False,
        doc="Host pool, in the form of ``mem_pool_cfg``; at most 20 GiB. Parsed by ``init``. "
        "Source: [seed:deprecated], API §7.1.",
    )
    local_comm_res = _Setting(
        keys.LOCAL_COMM_RES,
        "",
        _text,
        doc="Any text, the empty one too: turns CacheManager mode and RCA on by default. The content has no effect.",
    )
    transfer_backend = _Setting(
        keys.TRANSFER_BACKEND, "", _text, doc='Only "hixl": needs CacheManager mode, RCA and ``listen_ip_info``.'
    )
    global_resource_config = _Setting(
        keys.GLOBAL_RESOURCE, "", _text, doc="JSON, checked by ``init``. No effect here: Ascend only."
    )
    link_total_time = _Setting(
        keys.LINK_TOTAL_TIME,
        0,
        check_uint32,
        none_resets=False,
        doc="Seconds that ``link()`` may take in all, uint32; 0: HCCL_CONNECT_TIMEOUT, or else 120.",
    )
    link_retry_count = _Setting(
        keys.LINK_RETRY_COUNT,
        1,
        _retries,
        none_resets=False,
        doc="Connection attempts of ``link()``, 1 to 100; they share ``link_total_time``.",
    )
    rdma_traffic_class: _Setting[int | None] = _Setting(
        "llm.RdmaTrafficClass", None, check_uint32, none_resets=False, doc="uint32. No effect here: Ascend only."
    )
    rdma_service_level: _Setting[int | None] = _Setting(
        "llm.RdmaServiceLevel", None, check_uint32, none_resets=False, doc="uint32. No effect here: Ascend only."
    )
    enable_switch_role = _Setting(
        keys.SWITCH_ROLE, False, _flag, _if_true, doc="KvCacheManager mode: allow ``switch_role``."
    )
    mem_utilization = _Setting(
        keys.MEM_UTILIZATION,
        0.95,
        _share,
        always=True,
        doc="KvCacheManager mode: share of ``ge.flowGraphMemMaxSize`` that is the pool, a float in [0.0, 1.0].",
    )
    buf_pool_cfg = _Setting(
        keys.BUF_POOL, "", _text, _if_any, doc="Size classes of the older pool, JSON, checked by ``init``. No effect."
    )
    deploy_res_path = _Setting("llm.deployResPath", "", _text, _if_any, doc="No effect here: Ascend only.")
    cluster_info = _Setting(
        "llm.ClusterInfo",
        "",
        _cluster_info,
        _packed_cluster_info,
        none_resets=False,
        doc="JSON; the addresses in ``listen_ip_info`` become ints in the option. No effect here: Ascend only.",
    )
    output_max_size: _Setting[int | None] = _Setting("llm.OutputMaxSize", None, check_int, doc="No effect: legacy.")

    def __init__(self) -> None:
        self._assigned: dict[str, Any] = {}
        self._ge_options: dict[str, str] = {}
        self._options: dict[str, str] = {}

    @property
    def ge_options(self) -> dict[str, str]:
        """Options handed on as they are; every property overrides them. Only ``ge.flowGraphMemMaxSize`` matters."""
        return self._ge_options

    @ge_options.setter
    def ge_options(self, ge_options: dict[str, str] | None) -> None:
        self._ge_options = {} if ge_options is None else check_dict("ge_options", ge_options, str, str)

    def generate_options(self) -> dict[str, str]:
        """Return the option dict: always the same one, so what the caller adds, and what was once set, stays in it.

        Source: API §2.
        """
        self._options.update(self._ge_options)
        for setting in _SETTINGS:
            text = setting.text(self)
            if text is not None:
                self._options[setting.key] = text
        device = self._options.get(keys.DEVICE_ID)
        if device is not None and self.device_id is not None:
            self._options["ge.session_device_id"] = device.partition(";")[0]
        return self._options

    gen_options = generate_options

    def __repr__(self) -> str:
        return f"LLMConfig({', '.join(f'{name}={value!r}' for name, value in self._assigned.items())})"


_SETTINGS = tuple(value for value in vars(LLMConfig).values() if isinstance(value, _Setting))

LlmConfig = LLMConfig
