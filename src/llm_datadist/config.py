"""Options of an instance: one row each, their parser, and LLMConfig, where users set them (interface §2, §7).

A row stands at its field of :class:`Options`, or in ``_OTHER_ROWS`` if no field is its value alone. Properties of
LLMConfig, help of commands and docs/options.md come from the rows.
"""

from __future__ import annotations

import json
import os
import re
import resource
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict, TypeVar, Unpack

from llm_datadist import _option_kinds as kinds
from llm_datadist._checks import (
    Attribute,
    check_dict,
    check_int,
    check_int32,
    check_rule,
    check_text,
    check_type,
    check_uint32,
    check_unscoped,
    is_digits,
    is_ipv6,
    is_loopback,
    nearest,
)
from llm_datadist._log import logger
from llm_datadist.errors import NoneArgument, ParamError
from llm_datadist.types.cluster import trans_str_ip
from llm_datadist.types.enums import LLMRole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llm_datadist._option_kinds import Kind, PoolOptions
    from llm_datadist._policy import PeerPolicy

__all__ = ["LLMConfig", "LlmConfig", "parse_listen_ip_info"]

# Options named beyond their rows.
DEVICE_ID: Final = "ge.exec.deviceId"
GRAPH_MEMORY: Final = "ge.flowGraphMemMaxSize"
MEM_UTILIZATION: Final = "llm.MemoryUtilization"
SYNC_TIMEOUT: Final = "llm.SyncKvCacheWaitTime"
LISTEN: Final = "llm.listenIpInfo"
CACHE_MANAGER: Final = "llm.EnableCacheManager"
REMOTE_ACCESSIBLE: Final = "llm.EnableRemoteCacheAccessible"
MEM_POOL: Final = "llm.MemPoolConfig"
HOST_MEM_POOL: Final = "llm.HostMemPoolConfig"
LOCAL_COMM_RES: Final = "llm.LocalCommRes"
TRANSFER_BACKEND: Final = "llm.TransferBackend"
LINK_TOTAL_TIME: Final = "llm.LinkTotalTime"
SWITCH_ROLE: Final = "llm.EnableSwitchRole"
DEVICE_MEMORY: Final = "llm.DeviceMemory"
TRANSPORT: Final = "llm.Transport"
SHM_SOCKET_DIR: Final = "llm.ShmSocketDir"
MAX_LINKS: Final = "llm.MaxLinks"
AUTH_SECRET: Final = "llm.AuthSecretFile"
TLS_CERT: Final = "llm.TlsCert"
TLS_KEY: Final = "llm.TlsKey"
TLS_CA: Final = "llm.TlsCa"
MAX_LINK_AGE: Final = "llm.MaxLinkAge"
SAME_USER_ONLY: Final = "llm.SameUserOnly"
PEER_POLICY: Final = "llm.PeerPolicy"
GRANTED_READS: Final = "llm.GrantedReads"
NIXL_PLAINTEXT: Final = "llm.NixlPlaintext"
INSECURE: Final = "llm.Insecure"
INSECURE_VARIABLE: Final = "LLM_DATADIST_INSECURE"
"""With the value 1 as ``llm.Insecure``, for clients that do not know that option."""

# The C++ interface has its own spelling of two keys.
CPP_NAMES: Final = {"llm.DeviceId": DEVICE_ID, "llm.ListenIpInfo": LISTEN}
_CREDENTIALS: Final = f"{AUTH_SECRET} (or {TLS_CERT}, {TLS_KEY}, {TLS_CA})"
_LINK_SECONDS: Final = 120
_DEFAULT_SHARE: Final = 0.95
_MAX_LINKS: Final = 1024
_DESCRIPTORS_PER_LINK: Final = 16  # one over nixl has eleven, over tcp six

V = TypeVar("V")
if TYPE_CHECKING:
    Check: TypeAlias = Callable[[str, Any], V]
    Emit: TypeAlias = Callable[[V], str | None]


def parse_listen_ip_info(listen_ip_info: str, name: str = "listen_ip_info") -> tuple[str, int]:
    """Split "ip:port"; an IPv6 address stands in brackets, "[::1]:26051" (extension). Port 0 picks a free one.

    Raises:
        ParamError: Another form, brackets without an IPv6 address, or a port outside 0..65535.
        TypeError: Not a str.

    Source: interface §2.
    """
    text = check_text(name, check_type(name, listen_ip_info, str))
    check_unscoped(name, text)
    ip, colon, port = text[1:].partition("]:") if text.startswith("[") else text.partition(":")
    if not ip or not colon or ":" in port or (text.startswith("[") and not is_ipv6(ip)):
        raise ParamError(f"{name}: {listen_ip_info!r} is not of the form ip:port or [ipv6]:port")
    if not is_digits(port) or int(port) > 65535:
        raise ParamError(f"{name}: port {port!r} of {listen_ip_info!r} is no number in [0, 65535]")
    return ip, int(port)


@dataclass(frozen=True, slots=True)
class CredentialFiles:
    """Files of the credentials: the secrets, or certificate, key and CA in PEM."""

    secrets: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None

    def stamp(self) -> tuple[object, ...]:
        """Return a value that changes with the files. Raises OSError."""
        found = [path.stat() for path in (self.secrets, self.certificate, self.key, self.authority) if path is not None]
        return tuple((at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for at in found)


@dataclass(frozen=True, slots=True)
class Option:
    """Row of one option; ``values`` and ``default`` are words.

    ``field``: that of :class:`Options` with its value, if any. Without ``effect`` it is only parsed.
    """

    name: str
    values: str
    parse: Callable[[str, str], Any]
    default: str
    meaning: str
    field: str = ""
    effect: bool = True


def _row(name: str, kind: Kind[V], default: V, meaning: str, shown: str = "") -> V:
    """Return a field of Options with its row; ``shown``: words for a default that depends on the process."""
    words = "none" if default is None else f"{default:g}" if isinstance(default, int | float) else str(default)
    made: V = field(default=default, metadata={"row": Option(name, *kind, shown or words, meaning)})
    return made


_ADDRESS: Final[Kind[tuple[str, int]]] = "ip:port or [ipv6]:port", lambda name, text: parse_listen_ip_info(text, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The parsed options of one ``init``; a field's row describes its option.

    In v1 mode ``remote_accessible`` is always False and ``host_mem_pool`` is always None. If v1 mode is given no
    ``mem_pool``, it makes one from ``ge.flowGraphMemMaxSize``, if that is given (interface R12). If ``credentials`` is
    None, links are not authenticated.
    """

    # fmt: off
    # A table: one shape for all rows.
    role: LLMRole
    device_id: int = _row(DEVICE_ID, kinds.whole(0, kinds.INT32_MAX), 0,
        "Number of the one device that the instance serves; in host memory it has no effect.", "required")
    listen: tuple[str, int] | None = _row(LISTEN, _ADDRESS, None,
        "Address at which the instance listens; port 0 picks a free one.")
    sync_kv_timeout_ms: int = _row(SYNC_TIMEOUT, kinds.whole(1, kinds.INT32_MAX), 1000,
        "Time limit of each operation on caches, in milliseconds; ``swap_blocks`` has none.")
    cache_manager: bool = _row(CACHE_MANAGER, kinds.FLAG, False,
        "Selects CacheManager mode (v2) instead of KvCacheManager mode (v1).", "0; with ``llm.LocalCommRes`` 1")
    remote_accessible: bool = _row(REMOTE_ACCESSIBLE, kinds.FLAG, False,
        "Peers may push, and pulls consume no key (RCA); both sides of a link need the same value.",
        "0; with ``llm.LocalCommRes`` or ``llm.TransferBackend`` 1")
    mem_pool: PoolOptions | None = _row(MEM_POOL, kinds.POOL, None,  # noqa: RUF009
        "Bytes and page size of the device pool.")
    host_mem_pool: PoolOptions | None = _row(HOST_MEM_POOL, kinds.HOST_POOL, None,  # noqa: RUF009
        "Bytes and page size of the host pool; v2 mode only.")
    local_comm_res: str | None = _row(LOCAL_COMM_RES, kinds.TEXT, None,
        "Makes v2 mode and RCA the defaults; unless it is empty, ``link_clusters`` needs no local ip.")
    transfer_backend: str | None = _row(TRANSFER_BACKEND, kinds.HIXL, None,
        "Lets both sides of a link call ``link_clusters``; needs v2 mode, RCA and ``llm.listenIpInfo``.")
    enable_switch_role: bool = _row(SWITCH_ROLE, kinds.FLAG, False,
        "Allows ``switch_role`` in v1 mode; v2 mode always does.")
    link_total_time: int = _row(LINK_TOTAL_TIME, kinds.whole(0, kinds.UINT32_MAX), _LINK_SECONDS,
        "Seconds that preparing a communicator with ``link()`` may take; 0 stands for the default.",
        f"``HCCL_CONNECT_TIMEOUT`` in the environment, else {_LINK_SECONDS}")
    link_retry_count: int = _row("llm.LinkRetryCount", kinds.whole(1, 100), 1,
        "Divides ``llm.LinkTotalTime``: the quotient, within 0.1 to 5 s, limits each attempt of ``link()``.")
    device_memory: str = _row(DEVICE_MEMORY, kinds.DEVICE_MEMORY, "host",
        "Where caches with Placement.DEVICE lie: ``cuda`` in the GPU of number ``device_id``.")
    device_mover: str = _row("llm.DeviceMover", kinds.DEVICE_MOVER, "auto",
        "How a GPU moves bytes: by a kernel, by plain copies, or as the call suits.")
    transport: str = _row(TRANSPORT, kinds.TRANSPORT, "auto",
        "The one transport of every link; ``auto`` takes the best that both sides can use.")
    shm_socket_dir: str | None = _row(SHM_SOCKET_DIR, kinds.DIRECTORY, None,
        "Directory of the socket by which instances of one host meet.", "an abstract socket")
    pool_prefault: bool = _row("llm.PoolPrefault", kinds.FLAG, False,
        "Touches every page of the pools at ``init``, so that no transfer has to.")
    copy_threads: int | None = _row("llm.CopyThreads", kinds.whole(1, 1024), None,
        "Threads that share one large copy, the caller's included.", "the usable CPUs (affinity, cgroup)")
    peer_timeout: float = _row("llm.PeerTimeout", kinds.SILENCE, 10.0,
        "Seconds of silence after which a peer counts as dead, unless the kernel reports it earlier.")
    checksum: bool = _row("llm.Checksum", kinds.FLAG, False,
        "Compares both sides after every pull and push of this instance.")
    tracing: bool = _row("llm.Tracing", kinds.FLAG, False,
        "Makes a span of OpenTelemetry for each call; needs the extra ``[otel]``.")
    statistics_page: bool = _row("llm.StatisticsPage", kinds.FLAG, True,
        "Publishes ``statistics()`` once a second to processes of the same user on this host.")
    max_links: int = _row(MAX_LINKS, kinds.whole(1, kinds.UINT32_MAX), _MAX_LINKS,
        "Links that peers may make to this instance, half of them from one address.",
        f"a sixteenth of ``ulimit -n``, 1 to {_MAX_LINKS}")
    write_by_address: bool = _row("llm.WriteByAddress", kinds.FLAG, True,
        "Lets peers name memory by raw addresses and write there, without RCA too.")
    granted_reads: bool = _row(GRANTED_READS, kinds.FLAG, False,
        "Lets peers read every blocks cache under grants only, and write none.")
    credentials: CredentialFiles | None = None
    max_link_age: float | None = _row(MAX_LINK_AGE, kinds.LINK_AGE, None,
        "Seconds after which both sides of a link authenticate each other again; needs credentials.", "never")
    insecure: bool = _row(INSECURE, kinds.FLAG, False,
        "Allows links beyond this host, and ``llm.PeerPolicy``, without credentials.",
        f"``{INSECURE_VARIABLE}`` in the environment, else 0")
    same_host_users: frozenset[int] = _row("llm.SameHostUsers", kinds.USERS, frozenset(),
        "Other users whose processes on this host may map what this instance exports.", "none")
    same_user_only: bool = _row(SAME_USER_ONLY, kinds.FLAG, False,
        "Without credentials and ``llm.Insecure``: links only this user and ``llm.SameHostUsers``.")
    peer_policy: PeerPolicy | None = _row(PEER_POLICY, kinds.POLICY, None,  # noqa: RUF009
        "Permissions of each peer at this instance; needs credentials or ``llm.Insecure``.", "all")
    nixl_fallback: bool = _row("llm.NixlFallback", kinds.FLAG, False,
        "Gives links over ``nixl`` that this instance dials data lanes too, for use once NIXL has failed.")
    nixl_plaintext: bool = _row(NIXL_PLAINTEXT, kinds.FLAG, False,
        "Lets links with credentials use ``nixl``, which sends KV bytes unencrypted and lets peers reach all memory.")
    strict_types: bool = _row("llm.StrictTypes", kinds.FLAG, False,
        "Refuses pulls and pushes of this instance between caches of unlike element types or dimensions.")
    # fmt: on

    @property
    def linked_users(self) -> frozenset[int] | None:
        """Users that may link beside this process's own; None if every user may."""
        return self.same_host_users if self.same_user_only and not (self.credentials or self.insecure) else None

    def check_reach(self, name: str, host: str) -> None:
        """Raise ParamError with ``name`` if ``host`` is beyond this host, unless links there are allowed."""
        if self.credentials is None and not self.insecure and not is_loopback(host):
            raise ParamError(
                f"{name}: {host} is beyond this host, where links need authentication: set {_CREDENTIALS}, or "
                f"{INSECURE}='1' where every host that reaches this one is trusted"
            )

    @classmethod
    def parse(cls, options: dict[str, str], role: LLMRole) -> Options:
        """Parse and check the option dict; unknown ``llm.*`` options only log a warning.

        Raises TypeError, or ParamError with the option that breaks a rule.
        """
        check_type("role", role, LLMRole)
        texts = _texts(options)
        _check_one_device(texts)
        given = {name: row.parse(name, texts[name]) for name, row in OPTIONS.items() if name in texts}
        cache_manager, remote_accessible = _modes(texts, given)
        check_rule(
            cache_manager or role is not LLMRole.PROMPT or LISTEN in given,
            f"{LISTEN} is missing: {role} needs it unless {CACHE_MANAGER} is '1'",
        )
        host_pool = given.get(HOST_MEM_POOL)
        if not cache_manager and (remote_accessible or host_pool is not None):
            logger.warning("without %s='1' %s and %s have no effect", CACHE_MANAGER, REMOTE_ACCESSIBLE, HOST_MEM_POOL)
            remote_accessible, host_pool = False, None
        seconds = os.environ.get("HCCL_CONNECT_TIMEOUT", "")
        depending: dict[str, Any] = {
            "cache_manager": cache_manager,
            "remote_accessible": remote_accessible,
            "mem_pool": _device_pool(given, cache_manager),
            "host_mem_pool": host_pool,
            "link_total_time": given.get(LINK_TOTAL_TIME) or (is_digits(seconds) and int(seconds)) or _LINK_SECONDS,
            "max_links": given.get(MAX_LINKS) or _default_max_links(),
            "credentials": _credentials(given),
            "insecure": given.get(INSECURE, os.environ.get(INSECURE_VARIABLE) == "1"),
        }
        found = {OPTIONS[name].field: value for name, value in given.items() if OPTIONS[name].field}
        parsed = cls(role=role, **found | depending)
        _check_credentials(parsed, texts)
        if unknown := [key for key in texts.keys() - OPTIONS.keys() if re.match(r"llm\.(?!RefInput)", key)]:
            logger.warning("options unknown to this version are ignored: %s", ", ".join(sorted(unknown)))
        return parsed


def _ignored(names: str, meaning: str, kind: Kind[Any] = kinds.TEXT) -> list[Option]:
    return [Option(name, *kind, "none", meaning, effect=False) for name in names.split()]


# fmt: off
_OTHER_ROWS: Final = [
    Option(GRAPH_MEMORY, *kinds.BYTES, "none",
        "Memory of which v1 mode takes ``llm.MemoryUtilization`` as device pool, unless one is given."),
    Option(MEM_UTILIZATION, *kinds.SHARE, str(_DEFAULT_SHARE),
        "Share of ``ge.flowGraphMemMaxSize`` that becomes the device pool of v1 mode."),
    Option(AUTH_SECRET, *kinds.FILE, "none", "File of shared secrets by which links are authenticated and encrypted."),
    Option(TLS_CERT, *kinds.FILE, "none", "Certificate of this instance (PEM), instead of shared secrets."),
    Option(TLS_KEY, *kinds.FILE, "none", "Private key of ``llm.TlsCert`` (PEM)."),
    Option(TLS_CA, *kinds.FILE, "none", "Authorities (PEM) by which certificates of peers must be issued."),
    *_ignored("llm.GlobalResourceConfig", "Resources of accelerators.", kinds.JSON),
    *_ignored("llm.BufPoolCfg", "Size classes of the older pool.", kinds.SIZE_CLASSES),
    *_ignored("llm.RdmaTrafficClass llm.RdmaServiceLevel", "Network of accelerators; ``nixl`` ignores it."),
    *_ignored("llm.ClusterInfo", "Endpoints of accelerators."),
    *_ignored("llm.deployResPath llm.OutputMaxSize llm.RefInput*", "Settings of older engines."),
    *_ignored("llm.Role", "The role given to the constructor counts."),
    *_ignored("llm.ListenIp llm.ListenPort", "``llm.listenIpInfo`` counts."),
    *_ignored("llm.EnableSetRole", "``llm.EnableSwitchRole`` counts."),
]
# fmt: on
_FIELD_ROWS: Final = [replace(each.metadata["row"], field=each.name) for each in fields(Options) if each.metadata]
OPTIONS: Final[dict[str, Option]] = {row.name: row for row in [*_FIELD_ROWS, *_OTHER_ROWS]}
"""All rows by name; ``llm.RefInput*`` stands for all names with that prefix."""


# --- rules between options --------------------------------------------------------------------------------------------
def _texts(options: object) -> dict[str, str]:
    """Return a copy of the option dict with Python's keys. Raises TypeError or ParamError."""
    for key, value in check_dict("options", options, str, object).items():
        check_text(check_text("options", key), check_type(f"options[{key!r}]", value, str))
    texts = check_dict("options", options, str, str).copy()
    for spelling, key in CPP_NAMES.items():
        if spelling in texts:
            texts.setdefault(key, texts.pop(spelling))
    return texts


def _check_one_device(texts: Mapping[str, str]) -> None:
    ids, listen = texts.get(DEVICE_ID), texts.get(LISTEN, "")
    check_rule(ids is not None, f"{DEVICE_ID} is missing: set LLMConfig.device_id, 0 where there is only the host")
    check_rule(";" not in str(ids), f"{DEVICE_ID}: {ids!r} lists several devices, one instance serves one device")
    v2, count = texts.get(CACHE_MANAGER, str(int(LOCAL_COMM_RES in texts))) == "1", listen.count(";") + 1
    rule = "one per device is needed, and there is one device"
    check_rule(v2 or count == 1, f"{LISTEN}: {listen!r} lists {count} addresses: {rule}")


def _modes(texts: Mapping[str, str], given: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return (CacheManager mode, remote cache accessible) after the rules of interface §3.1 items 5 and 6."""
    local, backend = LOCAL_COMM_RES in given, texts.get(TRANSFER_BACKEND)
    cache_manager: bool = given.get(CACHE_MANAGER, local)
    check_rule(cache_manager or not local, f"{CACHE_MANAGER}: '0', but {LOCAL_COMM_RES} is given, which needs '1'")
    accessible: bool = given.get(REMOTE_ACCESSIBLE, local or backend is not None)
    if backend is not None:
        check_rule(cache_manager, f"{TRANSFER_BACKEND}: {backend!r} needs {CACHE_MANAGER}='1'")
        check_rule(accessible, f"{TRANSFER_BACKEND}: {backend!r} needs {REMOTE_ACCESSIBLE}='1', got '0'")
        check_rule(LISTEN in given, f"{TRANSFER_BACKEND}: {backend!r} needs {LISTEN}, which is missing")
        check_rule(backend == "hixl", f"{TRANSFER_BACKEND}: {backend!r} is unknown, known: 'hixl'")
    return cache_manager, accessible


def _device_pool(given: Mapping[str, Any], cache_manager: bool) -> PoolOptions | None:
    """Return the device pool; in v1, without one, a share of the graph memory (interface R12)."""
    graph_memory, share = given.get(GRAPH_MEMORY), given.get(MEM_UTILIZATION, _DEFAULT_SHARE)
    pool: PoolOptions | None = given.get(MEM_POOL)
    if pool is None and graph_memory and share and not cache_manager:
        pool = kinds.PoolOptions(int(graph_memory * share))
        pool.check(f"{GRAPH_MEMORY} x {MEM_UTILIZATION}")
    return pool


def _credentials(given: Mapping[str, Any]) -> CredentialFiles | None:
    tls = {key: given.get(key) for key in (TLS_CERT, TLS_KEY, TLS_CA)}
    named = ", ".join(key for key, path in tls.items() if path)
    if AUTH_SECRET in given:
        check_rule(not named, f"{AUTH_SECRET} and {named}: links are authenticated in one way, choose one")
        return CredentialFiles(Path(given[AUTH_SECRET]))
    if not named:
        return None
    missing = ", ".join(key for key, path in tls.items() if not path)
    check_rule(not missing, f"{missing} is missing: {named} needs it")
    return CredentialFiles(None, *(Path(path or "") for path in tls.values()))


def _default_max_links() -> int:
    """Return a number of links that leaves a third of the descriptors for other use."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = descriptors == resource.RLIM_INFINITY
    return _MAX_LINKS if unlimited else max(1, min(_MAX_LINKS, descriptors // _DESCRIPTORS_PER_LINK))


def _check_credentials(options: Options, texts: Mapping[str, str]) -> None:
    if options.credentials is not None:
        return
    given = texts.get(MAX_LINK_AGE)
    check_rule(given is None, f"{MAX_LINK_AGE}: {given!r}, but links without {_CREDENTIALS} are not authenticated")
    if options.peer_policy is not None:
        check_rule(
            options.insecure,
            f"{PEER_POLICY}: without authentication any peer may say any cluster id: set {_CREDENTIALS}, or "
            f"{INSECURE}='1' to believe them",
        )
        logger.warning("%s without authentication: peers are believed to be the clusters they say", PEER_POLICY)


# --- LLMConfig --------------------------------------------------------------------------------------------------------
class _Setting(Attribute[V]):
    """Property of LLMConfig for option ``key``, whose row documents it.

    ``emit`` returns the text, or None to leave it out. ``resets``: None means "not assigned", else a NoneArgument.
    ``always``: emitted even if not assigned.
    """

    def __init__(
        self, key: str, check: Check[V], default: V, *, emit: Emit[V] = str, resets: bool = True, always: bool = False
    ) -> None:
        row = OPTIONS[key]
        meaning = row.meaning if row.effect else f"{row.meaning} No effect."
        super().__init__(f"{meaning} Option ``{key}``: {row.values}; default: {row.default}.", check)
        self.key, self._default, self._emit, self._resets, self._always = key, default, emit, resets, always

    def __set_name__(self, owner: type, name: str) -> None:
        super().__set_name__(owner, name)
        type.__setattr__(owner, self._field, self._default)  # until it is assigned

    def __set__(self, instance: object, value: V | None) -> None:
        if value is not None:
            super().__set__(instance, value)
        elif self._resets:
            vars(instance).pop(self._field, None)
        else:
            raise NoneArgument(f"{self._name} is None, a value is needed")

    def text(self, config: LLMConfig) -> str | None:
        """Return the option's text; None to leave it out."""
        return self._emit(getattr(config, self._field)) if self._always or self._field in vars(config) else None


def _ruled(check: Check[V], holds: Callable[[V], bool], rule: str) -> Check[V]:
    def checked(name: str, value: object) -> V:
        found = check(name, value)
        check_rule(holds(found), f"{name}: {found} {rule}")
        return found

    return checked


_device = _ruled(check_int32, lambda device: device >= 0, "is negative")
_retries = _ruled(check_int, lambda count: 1 <= count <= 100, "is outside [1, 100]")
_share = _ruled(
    lambda name, value: float(check_type(name, value, float)),
    lambda share: 0.0 <= share <= 1.0,
    "is outside [0.0, 1.0]",
)


def _device_ids(name: str, value: object) -> int | Sequence[int]:
    if not isinstance(value, (list, tuple)):
        if not hasattr(value, "__index__"):
            check_type(name, value, (int, list, tuple))
        return _device(name, value)
    check_rule(value, f"{name}: {value!r} is empty, one device id is needed")
    devices = [_device(f"{name}[{i}]", item) for i, item in enumerate(value)]
    return devices if isinstance(value, list) else tuple(devices)


def _joined(ids: int | Sequence[int] | None) -> str:
    return str(ids) if isinstance(ids, int) else ";".join(map(str, ids or ()))


def _timeout_ms(name: str, value: object) -> int | str:
    if not hasattr(value, "__index__"):
        check_type(name, value, (int, str))
    check_rule(not isinstance(value, str) or is_digits(value), f"{name}: {value!r} is no whole number of milliseconds")
    budget = check_int32(name, int(value) if isinstance(value, str) else value)
    check_rule(budget > 0, f"{name}: {budget} ms, it must be above 0")
    return value if isinstance(value, str) else budget


def _cluster_info(name: str, value: object) -> str:
    text = check_type(name, value, str)
    _packed_cluster_info(text)  # raises where it is malformed
    return text


def _packed_cluster_info(text: str) -> str | None:
    """Return the JSON in the option's form: addresses of ``listen_ip_info`` as ints."""
    if not text:
        return None
    info = kinds.parse_json("cluster_info", text)
    endpoints = info.get("listen_ip_info") if isinstance(info, dict) else None
    for endpoint in endpoints if isinstance(endpoints, list) else ():
        if isinstance(endpoint, dict) and isinstance(endpoint.get("ip"), str) and not is_ipv6(endpoint["ip"]):
            endpoint["ip"] = trans_str_ip(endpoint["ip"], "cluster_info: listen_ip_info.ip")
    return json.dumps(info)


class _PoolSetting(_Setting[str]):
    """Text of a pool; an integer is its bytes."""

    def __set__(self, instance: object, value: str | int | None) -> None:
        if hasattr(value, "__index__"):
            value = str(_pool_bytes(self._name, value))
        super().__set__(instance, value)


_pool_bytes = _ruled(check_int, lambda nbytes: nbytes > 0, "bytes, it must be above 0")
_any_text_setting = partial(_Setting[str], check=partial(check_type, types=str), default="")
_text_setting = partial(_any_text_setting, emit=lambda text: text or None)
_pool_setting = partial(
    _PoolSetting, check=partial(check_type, types=str), default="", emit=lambda text: text or None, resets=False
)
_flag_setting = partial(
    _Setting[bool], check=partial(check_type, types=bool), default=False, emit=lambda flag: "1" if flag else "0"
)


class Settings(TypedDict, total=False):
    """Keywords of :class:`LLMConfig`."""

    device_id: int | Sequence[int] | None
    sync_kv_timeout: int | str
    listen_ip_info: str
    enable_cache_manager: bool
    enable_remote_cache_accessible: bool
    mem_pool_cfg: str | int
    host_mem_pool_cfg: str | int
    local_comm_res: str | None
    transfer_backend: str | None
    global_resource_config: str | None
    link_total_time: int
    link_retry_count: int
    rdma_traffic_class: int
    rdma_service_level: int
    enable_switch_role: bool
    mem_utilization: float
    buf_pool_cfg: str
    deploy_res_path: str
    cluster_info: str
    ge_options: dict[str, str]
    output_max_size: int | None


class LLMConfig:
    """Settings of one LLMDataDist, made into the option dict that ``init`` takes.

    Keywords (extension) assign attributes: ``LLMConfig(listen_ip_info="10.0.0.1:26000", mem_pool_cfg="64MiB")``. A pool
    may also be an int, its bytes.

    Assignments check values: a wrong type is a TypeError (NoneArgument for None, unless None means "not assigned"), a
    value outside its range a ParamError. ``init`` checks JSON texts. An unknown name is an AttributeError with the
    nearest name. ``device_id`` is an int, or a list or tuple of ints; ``sync_kv_timeout`` an int or digits.

    Source: interface §2.
    """

    device_id: _Setting[int | Sequence[int] | None] = _Setting(DEVICE_ID, _device_ids, None, emit=_joined)
    sync_kv_timeout: _Setting[int | str | None] = _Setting(SYNC_TIMEOUT, _timeout_ms, None, resets=False)
    listen_ip_info = _text_setting(LISTEN)
    enable_cache_manager = _flag_setting(CACHE_MANAGER)
    enable_remote_cache_accessible = _flag_setting(REMOTE_ACCESSIBLE)
    mem_pool_cfg = _pool_setting(MEM_POOL)
    host_mem_pool_cfg = _pool_setting(HOST_MEM_POOL)
    local_comm_res = _any_text_setting(LOCAL_COMM_RES)
    transfer_backend = _any_text_setting(TRANSFER_BACKEND)
    global_resource_config = _any_text_setting("llm.GlobalResourceConfig")
    link_total_time = _Setting(LINK_TOTAL_TIME, check_uint32, 0, resets=False)
    link_retry_count = _Setting("llm.LinkRetryCount", _retries, 1, resets=False)
    rdma_traffic_class: _Setting[int | None] = _Setting("llm.RdmaTrafficClass", check_uint32, None, resets=False)
    rdma_service_level: _Setting[int | None] = _Setting("llm.RdmaServiceLevel", check_uint32, None, resets=False)
    enable_switch_role = _flag_setting(SWITCH_ROLE, emit=lambda flag: "1" if flag else None)
    mem_utilization = _Setting(MEM_UTILIZATION, _share, _DEFAULT_SHARE, always=True)
    buf_pool_cfg = _text_setting("llm.BufPoolCfg")
    deploy_res_path = _text_setting("llm.deployResPath")
    cluster_info = _Setting("llm.ClusterInfo", _cluster_info, "", emit=_packed_cluster_info, resets=False)
    ge_options = Attribute(
        "Options handed on as they are, any that ``init`` knows; properties that were assigned override them.",
        lambda name, value: {} if value is None else check_dict(name, value, str, str),
    )
    output_max_size: _Setting[int | None] = _Setting("llm.OutputMaxSize", check_int, None)

    def __init__(self, **settings: Unpack[Settings]) -> None:
        self._ge_options: dict[str, str] = {}
        self._options: dict[str, str] = {}
        for name, value in settings.items():
            if name not in Settings.__annotations__:
                raise ParamError(f"LLMConfig: {name!r} is no setting{nearest(name, Settings.__annotations__)}")
            setattr(self, name, value)

    def generate_options(self) -> dict[str, str]:
        """Return the option dict, always the same object: entries of the caller and former settings stay in it."""
        self._options.update(self._ge_options)
        for setting in _SETTINGS.values():
            if (text := setting.text(self)) is not None:
                self._options[setting.key] = text
        if self.device_id is not None:
            self._options["ge.session_device_id"] = self._options[DEVICE_ID].partition(";")[0]
        return self._options

    gen_options = generate_options

    def __repr__(self) -> str:
        assigned = {name[1:]: value for name, value in vars(self).items() if name[1:] in _SETTINGS}
        return f"LLMConfig({', '.join(f'{name}={value!r}' for name, value in assigned.items())})"


_SETTINGS: Final = {name: each for name, each in vars(LLMConfig).items() if isinstance(each, _Setting)}

LlmConfig = LLMConfig
