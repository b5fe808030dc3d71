"""Enumerations, structs and option keys of the C++ header (interface §1.2, §2, §9).

Plain mutable values, as in C++: a field may hold anything until a call takes the struct; the call checks it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llm_datadist.types.data_type import DataType

__all__ = [
    "DT_UNDEFINED",
    "OPTION_BUF_POOL_CFG",
    "OPTION_DEVICE_ID",
    "OPTION_ENABLE_SET_ROLE",
    "OPTION_GLOBAL_RESOURCE_CONFIG",
    "OPTION_LISTEN_IP_INFO",
    "OPTION_LOCAL_COMM_RES",
    "OPTION_SYNC_CACHE_WAIT_TIME",
    "OPTION_TRANSFER_BACKEND",
    "Cache",
    "CacheDesc",
    "CacheIndex",
    "CachePlacement",
    "ClusterInfo",
    "IpInfo",
    "KvCacheExtParam",
    "LlmRole",
    "RegisterCfg",
    "Undefined",
]

OPTION_DEVICE_ID: Final = "llm.DeviceId"
"""Required: the device, in digits; 0: only the host is there. Python's ``ge.exec.deviceId`` counts if given too."""
OPTION_LISTEN_IP_INFO: Final = "llm.ListenIpInfo"
"""ip:port to listen on; port 0 picks a free one. Python's ``llm.listenIpInfo`` counts if given too."""
OPTION_SYNC_CACHE_WAIT_TIME: Final = "llm.SyncKvCacheWaitTime"
"""Milliseconds that one operation may take; 1000 when left out."""
OPTION_LOCAL_COMM_RES: Final = "llm.LocalCommRes"
"""Any text; with it no cluster needs a local ip. No other effect here."""
OPTION_TRANSFER_BACKEND: Final = "llm.TransferBackend"
"""Only "hixl"; both ends then listen, and either may link."""
OPTION_GLOBAL_RESOURCE_CONFIG: Final = "llm.GlobalResourceConfig"
"""JSON; no effect here."""
OPTION_BUF_POOL_CFG: Final = "llm.BufPoolCfg"
"""JSON with size classes; checked, no effect here."""
OPTION_ENABLE_SET_ROLE: Final = "llm.EnableSwitchRole"
"""What the older generation needs before SetRole; accepted, not needed here."""


class LlmRole(IntEnum):
    """What an instance does in a cluster: a label with no effect on transfers. ``kEnd`` is no role.

    Source: interface §1.2.
    """

    kPrompt = 1
    kDecoder = 2
    kMix = 3
    kEnd = 4


class CachePlacement(IntEnum):
    """Where a cache's memory is.

    Source: interface §1.2.
    """

    kHost = 0
    kDevice = 1


class Undefined(Enum):
    """The type of :data:`DT_UNDEFINED`.

    Source: interface §9.
    """

    DT_UNDEFINED = "undefined"

    def __repr__(self) -> str:
        return self.name


DT_UNDEFINED: Final = Undefined.DT_UNDEFINED
"""No element type yet: what a new :class:`CacheDesc` has."""


@dataclass(slots=True)
class CacheDesc:
    """What a cache looks like. Another class than :class:`llm_datadist.CacheDesc`, with the defaults of C++.

    Attributes:
        placement: Where the memory is.
        num_tensors: uint32.
        data_type: Element type; a call needs one.
        shape: Shape of one tensor, int64; ``shape[0]`` counts batch rows or blocks.

    Source: interface §9.
    """

    placement: CachePlacement = CachePlacement.kDevice
    num_tensors: int = 0
    data_type: DataType | Undefined = DT_UNDEFINED
    shape: list[int] = field(default_factory=list)


class Mapped:
    """Keeps the memory that a cache's addresses point into mapped for as long as the struct lives.

    A copy of the struct holds the same memory; in another process, where the addresses mean nothing, it holds none.
    """

    __slots__ = ("_views",)

    def __init__(self, views: tuple[object, ...] = ()) -> None:
        self._views = views

    def __deepcopy__(self, memo: object) -> Mapped:
        return self

    def __reduce__(self) -> tuple[type[Mapped], tuple[()]]:
        return Mapped, ()


@dataclass(slots=True)
class Cache:
    """A cache of this process.

    Attributes:
        cache_id: int64, from RegisterKvCache or AllocateCache; what the calls look the cache up by. -1: none.
        tensor_addrs: Address of each tensor.
        cache_desc: What it looks like.

    Source: interface §9.
    """

    cache_id: int = -1
    tensor_addrs: list[int] = field(default_factory=list)
    cache_desc: CacheDesc = field(default_factory=CacheDesc)
    _memory: Mapped | None = field(default=None, init=False, repr=False, compare=False)


@dataclass(slots=True)
class CacheIndex:
    """A cache of a peer, and one of its batch rows.

    Attributes:
        cluster_id: uint64: the owner; selects the link.
        cache_id: int64: the cache's id there.
        batch_index: uint32: the row; 0 where blocks are addressed.

    Source: interface §9.
    """

    cluster_id: int = 0
    cache_id: int = -1
    batch_index: int = 0


@dataclass(slots=True)
class IpInfo:
    """An endpoint: ``ip`` of the form 1.2.3.4 or an IPv6 address, of a peer also a name; ``port`` in uint16.

    Source: interface §9.
    """

    ip: str = ""
    port: int = 0


@dataclass(slots=True)
class ClusterInfo:
    """One cluster to link to, or to unlink from.

    Attributes:
        remote_cluster_id: uint64. LinkLlmClusters learns it in the handshake where it is left 0 (interface R28).
        remote_role_type: Has no effect, as documented.
        local_ip_infos: This host's address; the port does not matter.
        remote_ip_infos: The peer's listening endpoint, exactly one.

    Source: interface §9.
    """

    remote_cluster_id: int = 0
    remote_role_type: int = 0
    local_ip_infos: list[IpInfo] = field(default_factory=list)
    remote_ip_infos: list[IpInfo] = field(default_factory=list)


@dataclass(slots=True)
class KvCacheExtParam:
    """Which layers a pull or push moves (interface R14).

    Attributes:
        src_layer_range: First and last layer at the source, both **inclusive**, int32; (-1, -1): all.
        dst_layer_range: The same at the destination; as many layers.
        tensor_num_per_layer: uint8; must divide ``num_tensors`` when a range is given.

    Source: interface §9.
    """

    src_layer_range: tuple[int, int] = (-1, -1)
    dst_layer_range: tuple[int, int] = (-1, -1)
    tensor_num_per_layer: int = 2


@dataclass(slots=True)
class RegisterCfg:
    """Reserved by the interface: it has no fields.

    Source: interface §9.
    """
