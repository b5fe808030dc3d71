"""Options: the option strings of ``init``, parsed once and checked once (API §2, §3.1, R11).

A plain dict of strings is what clients write by hand and what :class:`~llm_datadist.config.LLMConfig` generates. Keys
of the interface that mean nothing on this hardware are accepted and have no effect (``NO_EFFECT``); keys outside
``llm.*`` belong to other software and are ignored.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Final

from llm_datadist.checks import check_dict, check_rule, check_type, is_digits
from llm_datadist.enums import LLMRole
from llm_datadist.errors import ParamError
from llm_datadist.log import logger
from llm_datadist.pool_options import HOST_POOL_LIMIT, PoolOptions, check_buf_pool, parse_json

__all__ = ["NO_EFFECT", "TRANSPORTS", "Options", "parse_listen_ip_info"]

DEVICE_ID: Final = "ge.exec.deviceId"
GRAPH_MEMORY: Final = "ge.flowGraphMemMaxSize"
SYNC_TIMEOUT: Final = "llm.SyncKvCacheWaitTime"
LISTEN: Final = "llm.listenIpInfo"
CACHE_MANAGER: Final = "llm.EnableCacheManager"
REMOTE_ACCESSIBLE: Final = "llm.EnableRemoteCacheAccessible"
MEM_POOL: Final = "llm.MemPoolConfig"
HOST_MEM_POOL: Final = "llm.HostMemPoolConfig"
LOCAL_COMM_RES: Final = "llm.LocalCommRes"
TRANSFER_BACKEND: Final = "llm.TransferBackend"
GLOBAL_RESOURCE: Final = "llm.GlobalResourceConfig"
LINK_TOTAL_TIME: Final = "llm.LinkTotalTime"
LINK_RETRY_COUNT: Final = "llm.LinkRetryCount"
SWITCH_ROLE: Final = "llm.EnableSwitchRole"
MEM_UTILIZATION: Final = "llm.MemoryUtilization"
BUF_POOL: Final = "llm.BufPoolCfg"
TRANSPORT: Final = "llm.Transport"
SHM_SOCKET_DIR: Final = "llm.ShmSocketDir"
POOL_PREFAULT: Final = "llm.PoolPrefault"
COPY_THREADS: Final = "llm.CopyThreads"
PEER_TIMEOUT: Final = "llm.PeerTimeout"
CHECKSUM: Final = "llm.Checksum"

NO_EFFECT: Final = frozenset(
    {
        "llm.ClusterInfo",
        "llm.EnableSetRole",
        "llm.ListenIp",
        "llm.ListenPort",
        "llm.OutputMaxSize",
        "llm.RdmaServiceLevel",
        "llm.RdmaTrafficClass",
        "llm.Role",
        "llm.deployResPath",
    }
)
"""Options of the interface that are accepted and have no effect here; so is every ``llm.RefInput*``."""

TRANSPORTS: Final = ("auto", "inproc", "shm", "cma", "tcp")
"""The values of ``llm.Transport``."""

_UNBUILT: Final = ("llm.AuthSecretFile", "llm.TlsCert", "llm.TlsKey", "llm.TlsCa")
# The C++ interface spells two keys in its own way.
_CPP_NAMES: Final = {"llm.DeviceId": DEVICE_ID, "llm.ListenIpInfo": LISTEN}

_INT32_MAX: Final = 2**31 - 1
_UINT32_MAX: Final = 2**32 - 1
_MAX_COPY_THREADS: Final = 1024
_DEFAULT_LINK_SECONDS: Final = 120


def parse_listen_ip_info(listen_ip_info: str) -> tuple[str, int]:
    """Split "ip:port" into its two parts.

    Raises:
        ParamError: not exactly two parts, no ip, a port that is no number or outside 0..65535 (0: pick a free one).
        TypeError: no str.

    Source: API §2.
    """
    parts = check_type("listen_ip_info", listen_ip_info, str).split(":")
    if len(parts) != 2 or not parts[0]:
        raise ParamError(f"listen_ip_info: {listen_ip_info!r} is not of the form ip:port")
    ip, port = parts
    if not is_digits(port) or int(port) > 65535:
        raise ParamError(f"listen_ip_info: port {port!r} of {listen_ip_info!r} is no number in [0, 65535]")
    return ip, int(port)


class _Reader:
    """The option dict, with one method per kind of value; remembers which keys were asked for."""

    def __init__(self, options: object) -> None:
        for key, value in check_dict("options", options, str, object).items():
            check_type(f"options[{key!r}]", value, str)
        self._options = check_dict("options", options, str, str).copy()
        for spelling, key in _CPP_NAMES.items():
            if spelling in self._options:
                self._options.setdefault(key, self._options.pop(spelling))
        self._asked: set[str] = set()

    def text(self, key: str) -> str | None:
        self._asked.add(key)
        return self._options.get(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.text(key)
        check_rule(value in (None, "0", "1"), f"{key}: {value!r} is neither '0' nor '1'")
        return default if value is None else value == "1"

    def integer(self, key: str, low: int, high: int) -> int | None:
        value = self.text(key)
        if value is None:
            return None
        if not is_digits(value) or not low <= int(value) <= high:
            raise ParamError(f"{key}: {value!r} is no whole number in [{low}, {high}]")
        return int(value)

    def number(self, key: str, default: float) -> float:
        value = self.text(key)
        if value is None:
            return default
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        check_rule(math.isfinite(number), f"{key}: {value!r} is no number")
        return number

    def warn_unknown(self) -> None:
        unknown = sorted(key for key in self._options.keys() - self._asked - NO_EFFECT if key.startswith("llm."))
        unknown = [key for key in unknown if not key.startswith("llm.RefInput")]
        if unknown:
            logger.warning("options unknown to this version are ignored: %s", ", ".join(unknown))


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What ``init`` was asked for. Made by :meth:`parse`.

    Attributes:
        role: PROMPT, DECODER or MIX.
        device_id: The one device served.
        listen: (ip, port) to listen on, or None.
        sync_kv_timeout_ms: Budget of each operation in milliseconds.
        cache_manager: True: CacheManager (v2) mode; False: KvCacheManager (v1) mode.
        remote_accessible: True: peers may read and write caches without this process taking part (RCA). Never in v1
            mode, whatever the option says.
        mem_pool: The device pool, or None. In v1 mode also made of ``ge.flowGraphMemMaxSize`` (R12).
        host_mem_pool: The host pool, or None: in v1 mode always, where no call takes host memory.
        local_comm_res: The text given, or None; only whether it is there, and empty, matters.
        transfer_backend: "hixl" or None.
        enable_switch_role: What v1 mode needs before ``switch_role``.
        link_total_time: Seconds that ``link()`` may take in all.
        link_retry_count: Connection attempts among which that time is divided.
        transport: "auto", or the transport that every link must use.
        shm_socket_dir: Folder for the same-host socket files; None: an abstract socket.
        pool_prefault: Touch every page of the pools at init.
        copy_threads: Threads that copy; None: as many as there are usable CPUs.
        peer_timeout: Seconds until a silent peer counts as dead.
        checksum: Compare both ends after every pull and push of this end; copies inside the process are not compared.
    """

    role: LLMRole
    device_id: int
    listen: tuple[str, int] | None = None
    sync_kv_timeout_ms: int = 1000
    cache_manager: bool = False
    remote_accessible: bool = False
    mem_pool: PoolOptions | None = None
    host_mem_pool: PoolOptions | None = None
    local_comm_res: str | None = None
    transfer_backend: str | None = None
    enable_switch_role: bool = False
    link_total_time: int = _DEFAULT_LINK_SECONDS
    link_retry_count: int = 1
    transport: str = "auto"
    shm_socket_dir: str | None = None
    pool_prefault: bool = False
    copy_threads: int | None = None
    peer_timeout: float = 10.0
    checksum: bool = False

    @classmethod
    def parse(cls, options: dict[str, str], role: LLMRole) -> Options:
        """Parse and check the option dict; it is not changed.

        Raises:
            TypeError: no dict, a key or value that is no str, no LLMRole (NoneArgument for None).
            ParamError: a value that breaks a rule, or an option this version does not have; the text names the key.
        """
        check_type("role", role, LLMRole)
        reader = _Reader(options)
        graph_memory = _graph_memory(reader)
        _refuse_unbuilt(reader)
        cache_manager, remote_accessible = _modes(reader)
        _check_ignored_json(reader)
        host_pool = _pool(reader, HOST_MEM_POOL, HOST_POOL_LIMIT)
        if not cache_manager and (remote_accessible or host_pool is not None):
            logger.warning("without %s='1' %s and %s have no effect", CACHE_MANAGER, REMOTE_ACCESSIBLE, HOST_MEM_POOL)
            remote_accessible, host_pool = False, None
        parsed = cls(
            role=role,
            device_id=_device_id(reader),
            listen=_listen(reader, role, cache_manager),
            sync_kv_timeout_ms=reader.integer(SYNC_TIMEOUT, 1, _INT32_MAX) or 1000,
            cache_manager=cache_manager,
            remote_accessible=remote_accessible,
            mem_pool=_device_pool(reader, None if cache_manager else graph_memory),
            host_mem_pool=host_pool,
            local_comm_res=reader.text(LOCAL_COMM_RES),
            transfer_backend=reader.text(TRANSFER_BACKEND),
            enable_switch_role=reader.flag(SWITCH_ROLE, default=False),
            link_total_time=reader.integer(LINK_TOTAL_TIME, 0, _UINT32_MAX) or _default_link_seconds(),
            link_retry_count=reader.integer(LINK_RETRY_COUNT, 1, 100) or 1,
            transport=_transport(reader),
            shm_socket_dir=_socket_dir(reader),
            pool_prefault=reader.flag(POOL_PREFAULT, default=False),
            copy_threads=reader.integer(COPY_THREADS, 1, _MAX_COPY_THREADS),
            peer_timeout=_peer_timeout(reader),
            checksum=reader.flag(CHECKSUM, default=False),
        )
        reader.warn_unknown()
        return parsed


def _graph_memory(reader: _Reader) -> int | None:
    """Return ``ge.flowGraphMemMaxSize``, which has its own rules in both modes (API §3.1 item 4)."""
    text = reader.text(GRAPH_MEMORY)
    if text is None:
        return None
    check_rule("," not in text, f"{GRAPH_MEMORY}: {text!r} lists several pools, only one is supported")
    check_rule(is_digits(text), f"{GRAPH_MEMORY}: {text!r} is no whole number of bytes")
    return int(text)


def _refuse_unbuilt(reader: _Reader) -> None:
    """Refuse options that would protect data and are not built: ignoring them would be silently wrong."""
    for key in _UNBUILT:
        check_rule(
            reader.text(key) is None, f"{key}: {reader.text(key)!r}: this version does not have {key}, leave it out"
        )


def _modes(reader: _Reader) -> tuple[bool, bool]:
    """Return (CacheManager mode, remote cache accessible) after the rules of API §3.1 items 5 and 6."""
    local = reader.text(LOCAL_COMM_RES) is not None
    backend = reader.text(TRANSFER_BACKEND)
    cache_manager = reader.flag(CACHE_MANAGER, default=local)
    if local:
        check_rule(cache_manager, f"{CACHE_MANAGER}: '0', but {LOCAL_COMM_RES} is given, which needs '1'")
    if backend is None:
        return cache_manager, reader.flag(REMOTE_ACCESSIBLE, default=local)
    check_rule(cache_manager, f"{TRANSFER_BACKEND}: {backend!r} needs {CACHE_MANAGER}='1'")
    accessible = reader.flag(REMOTE_ACCESSIBLE, default=True)
    check_rule(accessible, f"{TRANSFER_BACKEND}: {backend!r} needs {REMOTE_ACCESSIBLE}='1', got '0'")
    check_rule(reader.text(LISTEN) is not None, f"{TRANSFER_BACKEND}: {backend!r} needs {LISTEN}, which is missing")
    check_rule(backend == "hixl", f"{TRANSFER_BACKEND}: {backend!r} is unknown, known: 'hixl'")
    return cache_manager, accessible


def _check_ignored_json(reader: _Reader) -> None:
    """Check the two JSON options that have no effect here: a typing error in them is still worth telling."""
    if text := reader.text(GLOBAL_RESOURCE):
        parse_json(GLOBAL_RESOURCE, text)
    if text := reader.text(BUF_POOL):
        check_buf_pool(BUF_POOL, text)


def _device_id(reader: _Reader) -> int:
    text = reader.text(DEVICE_ID)
    check_rule(text is not None, f"{DEVICE_ID} is missing: set LLMConfig.device_id, 0 where there is only the host")
    check_rule(";" not in (text or ""), f"{DEVICE_ID}: {text!r} lists several devices, one instance serves one device")
    return reader.integer(DEVICE_ID, 0, _INT32_MAX) or 0


def _listen(reader: _Reader, role: LLMRole, cache_manager: bool) -> tuple[str, int] | None:
    text = reader.text(LISTEN)
    if text is not None:
        parts = text.split(";")
        check_rule(
            cache_manager or len(parts) == 1,
            f"{LISTEN}: {text!r} lists {len(parts)} addresses: one per device is needed, and there is one device",
        )
        return parse_listen_ip_info(text)
    check_rule(
        cache_manager or role is not LLMRole.PROMPT,
        f"{LISTEN} is missing: {role} needs it unless {CACHE_MANAGER} is '1'",
    )
    return None


def _pool(reader: _Reader, key: str, limit: int | None = None) -> PoolOptions | None:
    text = reader.text(key)
    return None if text is None else PoolOptions.parse(key, text, limit)


def _device_pool(reader: _Reader, graph_memory: int | None) -> PoolOptions | None:
    """Return the device pool; without one of its own, v1 takes a share of the graph memory (R12)."""
    share = reader.number(MEM_UTILIZATION, default=0.95)
    check_rule(0.0 <= share <= 1.0, f"{MEM_UTILIZATION}: {share} is outside [0.0, 1.0]")
    pool = _pool(reader, MEM_POOL)
    if pool is not None or not graph_memory or not share:
        return pool
    pool = PoolOptions(int(graph_memory * share))
    pool.check(f"{GRAPH_MEMORY} x {MEM_UTILIZATION}")
    return pool


def _default_link_seconds() -> int:
    text = os.environ.get("HCCL_CONNECT_TIMEOUT", "")
    seconds = int(text) if is_digits(text) else 0
    return seconds or _DEFAULT_LINK_SECONDS


def _transport(reader: _Reader) -> str:
    name = reader.text(TRANSPORT) or "auto"
    check_rule(name in TRANSPORTS, f"{TRANSPORT}: {name!r} is unknown, known: {', '.join(TRANSPORTS)}")
    return name


def _socket_dir(reader: _Reader) -> str | None:
    path = reader.text(SHM_SOCKET_DIR)
    check_rule(path != "", f"{SHM_SOCKET_DIR}: '' names no folder, leave it out for abstract sockets")
    return path


def _peer_timeout(reader: _Reader) -> float:
    seconds = reader.number(PEER_TIMEOUT, default=10.0)
    check_rule(seconds > 0, f"{PEER_TIMEOUT}: {seconds} s, it must be above 0")
    return seconds
