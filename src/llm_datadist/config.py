"""The options of one LLMDataDist: LLMConfig, where users set them, and Options, which ``init`` parses (interface §2,
§7).

The dict of strings between the two is the interface; it may be written by hand too. Everything runs in the caller's
thread; whatever breaks a rule raises TypeError or ParamError before anything has happened.
"""

from __future__ import annotations

import json
import math
import os
import pwd
import resource
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

from llm_datadist._checks import (
    assign_known,
    check_dict,
    check_int,
    check_int32,
    check_rule,
    check_text,
    check_type,
    check_uint32,
    is_digits,
    is_ipv6,
    is_loopback,
)
from llm_datadist._log import logger
from llm_datadist._policy import PeerPolicy
from llm_datadist.errors import NoneArgument, ParamError
from llm_datadist.types.cluster import trans_str_ip
from llm_datadist.types.enums import LLMRole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["LLMConfig", "LlmConfig", "parse_listen_ip_info"]

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
TRACING: Final = "llm.Tracing"
STATISTICS_PAGE: Final = "llm.StatisticsPage"
MAX_LINKS: Final = "llm.MaxLinks"
WRITE_BY_ADDRESS: Final = "llm.WriteByAddress"
AUTH_SECRET: Final = "llm.AuthSecretFile"
TLS_CERT: Final = "llm.TlsCert"
TLS_KEY: Final = "llm.TlsKey"
TLS_CA: Final = "llm.TlsCa"
MAX_LINK_AGE: Final = "llm.MaxLinkAge"
PEER_POLICY: Final = "llm.PeerPolicy"
SAME_HOST_USERS: Final = "llm.SameHostUsers"
NIXL_FALLBACK: Final = "llm.NixlFallback"
NIXL_PLAINTEXT: Final = "llm.NixlPlaintext"
STRICT_TYPES: Final = "llm.StrictTypes"
INSECURE: Final = "llm.Insecure"
INSECURE_VARIABLE: Final = "LLM_DATADIST_INSECURE"
"""``1`` in it is as ``llm.Insecure`` for clients that do not know that option."""

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

TRANSPORTS: Final = ("auto", "inproc", "shm", "cma", "nixl", "tcp")
"""The values of ``llm.Transport``."""

# The C++ interface spells two keys in its own way.
_CPP_NAMES: Final = {"llm.DeviceId": DEVICE_ID, "llm.ListenIpInfo": LISTEN}

HOST_POOL_LIMIT: Final = 20 * 2**30
"""Bytes a host pool may have at most."""

_INT32_MAX: Final = 2**31 - 1
_UINT32_MAX: Final = 2**32 - 1
_MAX_COPY_THREADS: Final = 1024
_DEFAULT_LINK_SECONDS: Final = 120
_DEFAULT_PAGE_SHIFT: Final = 16
_MIN_PAGE_SHIFT: Final = 10
_PAGE_SHIFT_END: Final = 31
_PAGES_END: Final = 2**32 - 1
_LEAST_PEER_TIMEOUT: Final = 0.1  # below, both ends would do little else than send heartbeats
_LEAST_LINK_AGE: Final = 1.0  # a handshake costs both ends some milliseconds
_MAX_LINKS: Final = 1024
_DESCRIPTORS_PER_LINK: Final = 16  # a link over tcp has ten at most
_MIB2: Final = 2 * 2**20


def parse_listen_ip_info(listen_ip_info: str) -> tuple[str, int]:
    """Split "ip:port" into its two parts; an IPv6 address stands in brackets, "[::1]:26051" (extension).

    Raises:
        ParamError: not exactly two parts, no ip, no IPv6 address in brackets, a port that is no number or outside
            0..65535 (0: pick a free one).
        TypeError: no str.

    Source: interface §2.
    """
    text = check_text("listen_ip_info", check_type("listen_ip_info", listen_ip_info, str))
    ip, colon, port = text[1:].partition("]:") if text.startswith("[") else text.partition(":")
    if not ip or not colon or ":" in port or (text.startswith("[") and not is_ipv6(ip)):
        raise ParamError(f"listen_ip_info: {listen_ip_info!r} is not of the form ip:port")
    if not is_digits(port) or int(port) > 65535:
        raise ParamError(f"listen_ip_info: port {port!r} of {listen_ip_info!r} is no number in [0, 65535]")
    return ip, int(port)


def parse_json(name: str, text: str) -> object:
    """Return the value of the JSON ``text``. Raises ParamError naming ``name`` and where it is malformed."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParamError(f"{name}: {text[:200]!r} is no JSON ({error})") from None
    return value


def _integer(name: str, fields: dict[str, Any], field: str, default: int | None = None) -> int:
    """Return a field that must be a JSON integer; ``true`` and ``1.0`` are none."""
    if field not in fields and default is None:
        raise ParamError(f"{name}: {field} is missing")
    value = fields.get(field, default)
    if type(value) is not int:
        raise ParamError(f"{name}: {field} is {value!r}, an integer is needed")
    return value


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How many bytes a memory pool has, and what it rounds allocations up to: ``1 << page_shift`` bytes.

    With ``huge_pages`` (extension) its memory consists of huge pages.
    """

    memory_size: int
    page_shift: int = _DEFAULT_PAGE_SHIFT
    huge_pages: bool = False

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return 1 << self.page_shift

    @classmethod
    def parse(cls, name: str, text: str, limit: int | None = None) -> PoolOptions:
        """Parse the JSON object ``text`` of option ``name``; a field that it does not know gives a warning.

        Raises ParamError naming the field that breaks a rule, or a size above ``limit`` bytes.
        """
        fields = parse_json(name, check_type(name, text, str))
        if not isinstance(fields, dict):
            raise ParamError(f"{name}: {text[:200]!r} is no JSON object")
        huge_pages = fields.get("huge_pages", False)
        check_rule(type(huge_pages) is bool, f"{name}: huge_pages is {huge_pages!r}, true or false is needed")
        pool = cls(
            _integer(name, fields, "memory_size"),
            _integer(name, fields, "page_shift", default=_DEFAULT_PAGE_SHIFT),
            huge_pages,
        )
        pool.check(name, limit)
        unknown = sorted(set(fields) - {"memory_size", "page_shift", "huge_pages"})
        if unknown:
            logger.warning("%s: unknown fields ignored: %s", name, ", ".join(unknown))
        return pool

    def check(self, name: str, limit: int | None = None) -> None:
        """Raise ParamError, naming option ``name`` and the field, if the sizes break a rule."""
        size, shift = self.memory_size, self.page_shift
        check_rule(size > 0, f"{name}: memory_size is {size}, it must be above 0")
        check_rule(
            _MIN_PAGE_SHIFT <= shift < _PAGE_SHIFT_END,
            f"{name}: page_shift is {shift}, outside [{_MIN_PAGE_SHIFT}, {_PAGE_SHIFT_END})",
        )
        check_rule(
            self.page_bytes <= size,
            f"{name}: memory_size is {size}, below one page of {self.page_bytes} bytes (page_shift {shift})",
        )
        check_rule(
            size >> shift < _PAGES_END,
            f"{name}: memory_size is {size}, {size >> shift} pages; below {_PAGES_END} are possible, raise page_shift",
        )
        if limit is not None:
            check_rule(size <= limit, f"{name}: memory_size is {size}, above the limit of {limit} bytes")


def check_buf_pool(name: str, text: str) -> None:
    """Check the size classes of the older pool (interface §7.3); they have no effect here.

    Raises ParamError naming the field that breaks a rule.
    """
    fields = parse_json(name, text)
    classes = fields.get("buf_cfg") if isinstance(fields, dict) else None
    if not isinstance(classes, list) or not all(isinstance(entry, dict) for entry in classes):
        raise ParamError(f"{name}: {text[:200]!r} has no list of objects named buf_cfg")
    previous = 0
    for i, entry in enumerate(classes):
        previous = _check_buf_class(f"{name}: buf_cfg[{i}]", entry, previous)


def _check_buf_class(name: str, entry: dict[str, Any], previous: int) -> int:
    """Check one size class; return its max_buf_size, which the next one must exceed."""
    total, block, largest = (_integer(name, entry, field) for field in ("total_size", "blk_size", "max_buf_size"))
    check_rule(
        0 < block <= _MIB2 and block & (block - 1) == 0,
        f"{name}: blk_size is {block}, no power of two in (0, {_MIB2}]",
    )
    check_rule(
        0 < total <= 0xFFFFFFFF and total % _MIB2 == 0 and total % block == 0,
        f"{name}: total_size is {total}, no multiple of {_MIB2} and of blk_size {block} up to {0xFFFFFFFF}",
    )
    check_rule(
        block <= largest < total, f"{name}: max_buf_size is {largest}, outside [blk_size {block}, total_size {total})"
    )
    check_rule(largest > previous, f"{name}: max_buf_size is {largest}, not above the previous one, {previous}")
    return largest


@dataclass(frozen=True, slots=True)
class CredentialFiles:
    """Where the credentials are: the file of secrets, or certificate, key and CA in PEM."""

    secrets: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None

    def stamp(self) -> tuple[object, ...]:
        """Return what differs once a file was changed or replaced. Raises OSError."""
        paths = (self.secrets, self.certificate, self.key, self.authority)
        found = [path.stat() for path in paths if path is not None]
        return tuple((at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for at in found)


class _Reader:
    """Reads the option dict, one method per kind of value, and remembers which keys were asked for."""

    def __init__(self, options: object) -> None:
        for key, value in check_dict("options", options, str, object).items():
            check_text(check_text("options", key), check_type(f"options[{key!r}]", value, str))
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

    def pool(self, key: str, limit: int | None = None) -> PoolOptions | None:
        value = self.text(key)
        return None if value is None else PoolOptions.parse(key, value, limit)

    def warn_unknown(self) -> None:
        left = sorted(self._options.keys() - self._asked - NO_EFFECT)
        unknown = [key for key in left if key.startswith("llm.") and not key.startswith("llm.RefInput")]
        if unknown:
            logger.warning("options unknown to this version are ignored: %s", ", ".join(unknown))


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of one ``init``, parsed and checked by :meth:`parse`.

    Attributes:
        listen: (ip, port) to listen on, or None.
        sync_kv_timeout_ms: Budget of each operation in milliseconds.
        cache_manager: True: CacheManager (v2) mode; False: KvCacheManager (v1) mode.
        remote_accessible: True: peers may read and write caches without this process taking part (RCA). Never in v1
            mode, whatever the option says.
        mem_pool: The device pool, or None. In v1 mode also made of ``ge.flowGraphMemMaxSize`` (interface R12).
        host_mem_pool: The host pool, or None: in v1 mode always, where no call takes host memory.
        local_comm_res: The text given, or None; only whether it is there, and empty, matters.
        transfer_backend: "hixl" or None.
        link_total_time: Seconds that ``link()`` may take in all.
        link_retry_count: Connection attempts among which that time is divided.
        transport: "auto", or the transport that every link must use.
        shm_socket_dir: Folder for the same-host socket files; None: an abstract socket.
        pool_prefault: Touch every page of the pools at init.
        copy_threads: Threads that copy; None: as many as there are usable CPUs.
        peer_timeout: Seconds until a silent peer counts as dead.
        write_by_address: Peers may ask which cache lies at an address, and then write it without RCA.
        max_links: Links that peers may make to this end; half of them from one address.
        checksum: Compare both ends after every pull and push of this end; copies inside the process are not compared.
        tracing: A span of OpenTelemetry for each call.
        statistics_page: Publish the statistics to processes of the same user on this host.
        credentials: Files by which links are authenticated and sealed; None: they are not.
        max_link_age: Seconds after which the ends of a link authenticate each other again; None: never.
        insecure: Links to other hosts may do without credentials.
        same_host_users: User ids, beside this process's own, whose processes on this host may map the pools.
        peer_policy: What each peer may do at this end; None: all that the other options allow.
        nixl_fallback: Links over nixl that this end dials have data lanes too, and use them once NIXL has failed.
        nixl_plaintext: Sealed links may use nixl, which sends KV bytes as they are.
        strict_types: Refuse pulls and pushes of this end between unlike caches; otherwise the log warns.
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
    tracing: bool = False
    statistics_page: bool = True
    max_links: int = _MAX_LINKS
    write_by_address: bool = True
    credentials: CredentialFiles | None = None
    max_link_age: float | None = None
    insecure: bool = False
    same_host_users: frozenset[int] = frozenset()
    peer_policy: PeerPolicy | None = None
    nixl_fallback: bool = False
    nixl_plaintext: bool = False
    strict_types: bool = False

    def check_reach(self, name: str, host: str) -> None:
        """Refuse to leave this host without authentication. Raises ParamError that names ``name``."""
        if self.credentials is None and not self.insecure and not is_loopback(host):
            raise ParamError(
                f"{name}: {host} is beyond this host, where links need authentication: set {AUTH_SECRET} (or {TLS_CERT}"
                f", {TLS_KEY}, {TLS_CA}), or {INSECURE}='1' where every host that reaches this one is trusted"
            )

    @classmethod
    def parse(cls, options: dict[str, str], role: LLMRole) -> Options:
        """Parse and check the option dict, which is not changed.

        Raises ParamError, naming the key, for a value that breaks a rule and for an option this version does not have.
        """
        check_type("role", role, LLMRole)
        reader = _Reader(options)
        graph_memory = _graph_memory(reader)
        cache_manager, remote_accessible = _modes(reader)
        # They have no effect here; a malformed text is an error all the same.
        if text := reader.text(GLOBAL_RESOURCE):
            parse_json(GLOBAL_RESOURCE, text)
        if text := reader.text(BUF_POOL):
            check_buf_pool(BUF_POOL, text)
        host_pool = reader.pool(HOST_MEM_POOL, HOST_POOL_LIMIT)
        if not cache_manager and (remote_accessible or host_pool is not None):
            logger.warning("without %s='1' %s and %s have no effect", CACHE_MANAGER, REMOTE_ACCESSIBLE, HOST_MEM_POOL)
            remote_accessible, host_pool = False, None
        environment = os.environ.get("HCCL_CONNECT_TIMEOUT", "")
        link_seconds = (int(environment) if is_digits(environment) else 0) or _DEFAULT_LINK_SECONDS
        credentials = _credentials(reader)
        insecure = reader.flag(INSECURE, default=os.environ.get(INSECURE_VARIABLE) == "1")
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
            link_total_time=reader.integer(LINK_TOTAL_TIME, 0, _UINT32_MAX) or link_seconds,
            link_retry_count=reader.integer(LINK_RETRY_COUNT, 1, 100) or 1,
            transport=_transport(reader),
            shm_socket_dir=_socket_dir(reader),
            pool_prefault=reader.flag(POOL_PREFAULT, default=False),
            copy_threads=reader.integer(COPY_THREADS, 1, _MAX_COPY_THREADS),
            peer_timeout=_peer_timeout(reader),
            checksum=reader.flag(CHECKSUM, default=False),
            tracing=reader.flag(TRACING, default=False),
            statistics_page=reader.flag(STATISTICS_PAGE, default=True),
            write_by_address=reader.flag(WRITE_BY_ADDRESS, default=True),
            credentials=credentials,
            max_link_age=_max_link_age(reader, believed=credentials is not None),
            insecure=insecure,
            same_host_users=_same_host_users(reader),
            peer_policy=_peer_policy(reader, believed=credentials is not None, insecure=insecure),
            nixl_fallback=reader.flag(NIXL_FALLBACK, default=False),
            nixl_plaintext=reader.flag(NIXL_PLAINTEXT, default=False),
            strict_types=reader.flag(STRICT_TYPES, default=False),
            max_links=reader.integer(MAX_LINKS, 1, _UINT32_MAX) or _default_max_links(),
        )
        reader.warn_unknown()
        return parsed


def _graph_memory(reader: _Reader) -> int | None:
    """Return ``ge.flowGraphMemMaxSize``, which has its own rules in both modes (interface §3.1 item 4)."""
    text = reader.text(GRAPH_MEMORY)
    if text is None:
        return None
    check_rule("," not in text, f"{GRAPH_MEMORY}: {text!r} lists several pools, only one is supported")
    check_rule(is_digits(text), f"{GRAPH_MEMORY}: {text!r} is no whole number of bytes")
    return int(text)


def _transport(reader: _Reader) -> str:
    name = reader.text(TRANSPORT) or "auto"
    check_rule(name in TRANSPORTS, f"{TRANSPORT}: {name!r} is unknown, known: {', '.join(TRANSPORTS)}")
    return name


def _socket_dir(reader: _Reader) -> str | None:
    folder = reader.text(SHM_SOCKET_DIR)
    check_rule(folder != "", f"{SHM_SOCKET_DIR}: '' names no folder, leave it out for abstract sockets")
    return folder


def _credentials(reader: _Reader) -> CredentialFiles | None:
    tls = {key: reader.text(key) for key in (TLS_CERT, TLS_KEY, TLS_CA)}
    given = [key for key, text in tls.items() if text is not None]
    secrets = reader.text(AUTH_SECRET)
    for option, text in (*tls.items(), (AUTH_SECRET, secrets)):
        check_rule(text != "", f"{option}: '' names no file, leave it out")
    if secrets is not None:
        check_rule(not given, f"{AUTH_SECRET} and {', '.join(given)}: links are authenticated in one way, choose one")
        return CredentialFiles(secrets=Path(secrets))
    if not given:
        return None
    missing = [key for key, text in tls.items() if text is None]
    check_rule(not missing, f"{', '.join(missing)} is missing: {', '.join(given)} needs it")
    certificate, key, authority = (Path(text or "") for text in tls.values())
    return CredentialFiles(certificate=certificate, key=key, authority=authority)


def _max_link_age(reader: _Reader, *, believed: bool) -> float | None:
    text = reader.text(MAX_LINK_AGE)
    if text is None:
        return None
    seconds, least = reader.number(MAX_LINK_AGE, default=0.0), _LEAST_LINK_AGE
    check_rule(seconds >= least, f"{MAX_LINK_AGE}: {text!r} seconds, {least} s at least are needed")
    which = f"{AUTH_SECRET} (or {TLS_CERT}, {TLS_KEY}, {TLS_CA})"
    check_rule(believed, f"{MAX_LINK_AGE}: {text!r}, but links without {which} are not authenticated")
    return seconds


def _same_host_users(reader: _Reader) -> frozenset[int]:
    text = reader.text(SAME_HOST_USERS)
    return frozenset() if text is None else frozenset(_user_id(text, each.strip()) for each in text.split(","))


def _user_id(text: str, user: str) -> int:
    """Return the id of a user that ``text`` gives by id or by name. Raises ParamError for none of this host."""
    if is_digits(user) and int(user) < _UINT32_MAX:
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise ParamError(
            f"{SAME_HOST_USERS}: {text!r}: {user!r} is neither a user id nor a user of this host"
        ) from None


def _peer_policy(reader: _Reader, *, believed: bool, insecure: bool) -> PeerPolicy | None:
    """Return ``llm.PeerPolicy``; ``believed`` says that peers prove who they are, which it needs."""
    text = reader.text(PEER_POLICY)
    if text is None:
        return None
    policy = PeerPolicy.parse(PEER_POLICY, text)
    check_rule(
        believed or insecure,
        f"{PEER_POLICY}: without authentication any peer may say any cluster id: set {AUTH_SECRET} (or {TLS_CERT}, "
        f"{TLS_KEY}, {TLS_CA}), or {INSECURE}='1' to believe them",
    )
    if not believed:
        logger.warning("%s without authentication: peers are believed to be the clusters they say", PEER_POLICY)
    return policy


def _peer_timeout(reader: _Reader) -> float:
    seconds, least = reader.number(PEER_TIMEOUT, default=10.0), _LEAST_PEER_TIMEOUT
    check_rule(seconds >= least, f"{PEER_TIMEOUT}: {seconds} s, it must be above 0: {least} s at least")
    return seconds


def _default_max_links() -> int:
    """Return a number of links that leaves this process most of the descriptors that it may open."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = descriptors == resource.RLIM_INFINITY
    return _MAX_LINKS if unlimited else max(1, min(_MAX_LINKS, descriptors // _DESCRIPTORS_PER_LINK))


def _modes(reader: _Reader) -> tuple[bool, bool]:
    """Return (CacheManager mode, remote cache accessible) after the rules of interface §3.1 items 5 and 6."""
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


def _device_pool(reader: _Reader, graph_memory: int | None) -> PoolOptions | None:
    """Return the device pool; in v1, without one, a share of the graph memory (interface R12)."""
    share = reader.number(MEM_UTILIZATION, default=0.95)
    check_rule(0.0 <= share <= 1.0, f"{MEM_UTILIZATION}: {share} is outside [0.0, 1.0]")
    pool = reader.pool(MEM_POOL)
    if pool is not None or not graph_memory or not share:
        return pool
    pool = PoolOptions(int(graph_memory * share))
    pool.check(f"{GRAPH_MEMORY} x {MEM_UTILIZATION}")
    return pool


V = TypeVar("V")


@dataclass(eq=False)
class _Setting(Generic[V]):
    """One property of LLMConfig.

    Attributes:
        key: The option's key.
        check: Checks (name, value) and returns what is kept.
        default: What the getter returns while nothing is assigned.
        doc: What the property means.
        emit: Returns the option's text; None: leave the option out. Called only once something is assigned.
        none_resets: Assigning None means "not assigned" again; otherwise it is a NoneArgument.
        always: Emit the default too.
    """

    key: str
    _: KW_ONLY
    check: Callable[[str, Any], V]
    default: V
    doc: str
    emit: Callable[[V], str | None] = str
    none_resets: bool = True
    always: bool = False

    def __post_init__(self) -> None:
        self.__doc__ = self.doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        type.__setattr__(owner, "__setattr__", assign_known)

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
            if not self.none_resets:
                raise NoneArgument(f"{self._name} is None, a value is needed")
            instance._assigned.pop(self._name, None)
        else:
            instance._assigned[self._name] = self.check(self._name, value)

    def text(self, instance: LLMConfig) -> str | None:
        """Return the option's text, or None where the option is left out."""
        if self._name not in instance._assigned and not self.always:
            return None
        return self.emit(self.__get__(instance, type(instance)))


_text = partial(check_type, types=str)
_flag = partial(check_type, types=bool)


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
    text = check_type(name, value, str)
    _packed_cluster_info(text)  # raises where it is malformed
    return text


def _packed_cluster_info(text: str) -> str | None:
    """Return the JSON with the addresses of ``listen_ip_info`` as ints, which is the option's form."""
    if not text:
        return None
    info = parse_json("cluster_info", text)
    endpoints = info.get("listen_ip_info") if isinstance(info, dict) else None
    for endpoint in endpoints if isinstance(endpoints, list) else ():
        if isinstance(endpoint, dict) and isinstance(endpoint.get("ip"), str) and not is_ipv6(endpoint["ip"]):
            endpoint["ip"] = trans_str_ip(endpoint["ip"], "cluster_info: listen_ip_info.ip")
    return json.dumps(info)


_text_setting = partial(_Setting[str], check=_text, default="", emit=lambda text: text or None)
_any_text_setting = partial(_Setting[str], check=_text, default="")
_flag_setting = partial(_Setting[bool], check=_flag, default=False, emit=lambda flag: "1" if flag else "0")
_uint32_setting = partial(_Setting[int | None], check=check_uint32, default=None, none_resets=False)


class LLMConfig:
    """Settings of one LLMDataDist, made into the option dict that ``init`` takes.

    Every property is checked when it is assigned: a wrong type is a TypeError (NoneArgument for None where a value is
    needed), a value outside its range a ParamError. Where None is accepted it means "not assigned". A name that
    is no property is an AttributeError, which says the nearest one.

    Source: interface §2.
    """

    device_id: _Setting[int | Sequence[int] | None] = _Setting(
        DEVICE_ID,
        check=_device_ids,
        default=None,
        emit=lambda ids: str(ids) if isinstance(ids, int) else ";".join(map(str, ids or ())),
        doc="Device served: an int, or a list or tuple of ints, of which ``init`` accepts exactly one. Required.",
    )
    sync_kv_timeout: _Setting[int | str | None] = _Setting(
        SYNC_TIMEOUT,
        check=_timeout_ms,
        default=None,
        none_resets=False,
        doc="Budget of each operation in milliseconds, an int or digits, above 0; 1000 when not set.",
    )
    listen_ip_info = _text_setting(LISTEN, doc='"ip:port" or "[ipv6]:port" to listen on; port 0 picks a free one.')
    enable_cache_manager = _flag_setting(CACHE_MANAGER, doc="True: CacheManager mode; False: KvCacheManager mode.")
    enable_remote_cache_accessible = _flag_setting(
        REMOTE_ACCESSIBLE, doc="True: peers read and write caches one-sidedly (RCA)."
    )
    mem_pool_cfg = _text_setting(
        MEM_POOL,
        none_resets=False,
        doc='Device pool, JSON: ``{"memory_size": bytes, "page_shift": 10..30, 16 by default}``. Parsed by ``init``. '
        "Source: interface §7.1.",
    )
    host_mem_pool_cfg = _text_setting(
        HOST_MEM_POOL,
        none_resets=False,
        doc="Host pool, in the form of ``mem_pool_cfg``; at most 20 GiB. Parsed by ``init``. Source: interface §7.1.",
    )
    local_comm_res = _any_text_setting(
        LOCAL_COMM_RES,
        doc="Any text, the empty one too: turns CacheManager mode and RCA on by default. The content has no effect.",
    )
    transfer_backend = _any_text_setting(
        TRANSFER_BACKEND, doc='Only "hixl": needs CacheManager mode, RCA and ``listen_ip_info``.'
    )
    global_resource_config = _any_text_setting(
        GLOBAL_RESOURCE, doc="JSON, checked by ``init``. No effect here: Ascend only."
    )
    link_total_time = _Setting(
        LINK_TOTAL_TIME,
        check=check_uint32,
        default=0,
        none_resets=False,
        doc="Seconds that ``link()`` may take in all, uint32; 0: HCCL_CONNECT_TIMEOUT, or else 120.",
    )
    link_retry_count = _Setting(
        LINK_RETRY_COUNT,
        check=_retries,
        default=1,
        none_resets=False,
        doc="Connection attempts of ``link()``, 1 to 100; they share ``link_total_time``.",
    )
    rdma_traffic_class = _uint32_setting("llm.RdmaTrafficClass", doc="uint32. No effect here: Ascend only.")
    rdma_service_level = _uint32_setting("llm.RdmaServiceLevel", doc="uint32. No effect here: Ascend only.")
    enable_switch_role = _flag_setting(
        SWITCH_ROLE, emit=lambda flag: "1" if flag else None, doc="KvCacheManager mode: allow ``switch_role``."
    )
    mem_utilization = _Setting(
        MEM_UTILIZATION,
        check=_share,
        default=0.95,
        always=True,
        doc="KvCacheManager mode: share of ``ge.flowGraphMemMaxSize`` that is the pool, a float in [0.0, 1.0].",
    )
    buf_pool_cfg = _text_setting(BUF_POOL, doc="Size classes of the older pool, JSON, checked by ``init``. No effect.")
    deploy_res_path = _text_setting("llm.deployResPath", doc="No effect here: Ascend only.")
    cluster_info = _Setting(
        "llm.ClusterInfo",
        check=_cluster_info,
        default="",
        emit=_packed_cluster_info,
        none_resets=False,
        doc="JSON; the addresses in ``listen_ip_info`` become ints in the option. No effect here: Ascend only.",
    )
    output_max_size: _Setting[int | None] = _Setting(
        "llm.OutputMaxSize", check=check_int, default=None, doc="No effect: legacy."
    )

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
        """Return the option dict.

        It is always the same dict: what the caller adds, and what was once set, stays in it.

        Source: interface §2.
        """
        self._options.update(self._ge_options)
        for setting in _SETTINGS:
            text = setting.text(self)
            if text is not None:
                self._options[setting.key] = text
        device = self._options.get(DEVICE_ID)
        if device is not None and self.device_id is not None:
            self._options["ge.session_device_id"] = device.partition(";")[0]
        return self._options

    gen_options = generate_options

    def __repr__(self) -> str:
        return f"LLMConfig({', '.join(f'{name}={value!r}' for name, value in self._assigned.items())})"


_SETTINGS = tuple(value for value in vars(LLMConfig).values() if isinstance(value, _Setting))

LlmConfig = LLMConfig
