"""Enumerations, structs and option keys of the C++ header (interface §1.2, §2, §9).

Mutable values: a field may hold anything until a call takes and checks the struct.
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
"""Required: device number, 0 without devices. Python's ``ge.exec.deviceId`` wins over it."""
OPTION_LISTEN_IP_INFO: Final = "llm.ListenIpInfo"
"""ip:port to listen on; port 0 picks a free one. Python's ``llm.listenIpInfo`` wins over it."""
OPTION_SYNC_CACHE_WAIT_TIME: Final = "llm.SyncKvCacheWaitTime"
"""Milliseconds for one operation. Default: 1000."""
OPTION_LOCAL_COMM_RES: Final = "llm.LocalCommRes"
"""Any text; then no cluster needs a local ip. No other effect."""
OPTION_TRANSFER_BACKEND: Final = "llm.TransferBackend"
"""Only "hixl": both sides listen, and either may link."""
OPTION_GLOBAL_RESOURCE_CONFIG: Final = "llm.GlobalResourceConfig"
"""JSON; checked, no effect."""
OPTION_BUF_POOL_CFG: Final = "llm.BufPoolCfg"
"""JSON with size classes; checked, no effect."""
OPTION_ENABLE_SET_ROLE: Final = "llm.EnableSwitchRole"
"""Accepted; SetRole does not need it."""


class LlmRole(IntEnum):
    """Role of an instance, a label without effect; ``kEnd`` is not a role.

    Source: interface §1.2.
    """

    kPrompt = 1
    kDecoder = 2
    kMix = 3
    kEnd = 4


class CachePlacement(IntEnum):
    """Place of a cache's memory.

    Source: interface §1.2.
    """

    kHost = 0
    kDevice = 1


class Undefined(Enum):
    """Type of :data:`DT_UNDEFINED`.

    Source: interface §9.
    """

    DT_UNDEFINED = "undefined"

    def __repr__(self) -> str:
        return self.name


DT_UNDEFINED: Final = Undefined.DT_UNDEFINED
"""Element type of a new :class:`CacheDesc`: none."""


@dataclass(slots=True)
class CacheDesc:
    """Geometry of a cache, with C++'s defaults; not :class:`llm_datadist.CacheDesc`.

    Attributes:
        num_tensors: uint32.
        data_type: Element type; a call needs one.
        shape: Shape of one tensor, int64; ``shape[0]`` counts batch rows or blocks.

    Source: interface §9.
    """

    placement: CachePlacement = CachePlacement.kDevice
    num_tensors: int = 0
    data_type: DataType | Undefined = DT_UNDEFINED
    shape: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Cache:
    """A cache of this process.

    Attributes:
        cache_id: int64, from RegisterKvCache or AllocateCache; -1: none.
        tensor_addrs: Address of each tensor.
        cache_desc: Its geometry.

    Source: interface §9.
    """

    cache_id: int = -1
    tensor_addrs: list[int] = field(default_factory=list)
    cache_desc: CacheDesc = field(default_factory=CacheDesc)


@dataclass(slots=True)
class CacheIndex:
    """A peer's cache and one of its batch rows.

    Attributes:
        cluster_id: uint64, the owner; selects the link.
        cache_id: int64, the cache's id there.
        batch_index: uint32, the row; 0 for blocks.

    Source: interface §9.
    """

    cluster_id: int = 0
    cache_id: int = -1
    batch_index: int = 0


@dataclass(slots=True)
class IpInfo:
    """An endpoint: IPv4 or IPv6 text, for a peer also a host name; port uint16.

    Source: interface §9.
    """

    ip: str = ""
    port: int = 0


@dataclass(slots=True)
class ClusterInfo:
    """One cluster to link or to unlink.

    Attributes:
        remote_cluster_id: uint64; if it is 0, the peer is known by its address (interface R28).
        remote_role_type: No effect.
        local_ip_infos: This host's address; the port has no effect.
        remote_ip_infos: The peer's listen address, exactly one.

    Source: interface §9.
    """

    remote_cluster_id: int = 0
    remote_role_type: int = 0
    local_ip_infos: list[IpInfo] = field(default_factory=list)
    remote_ip_infos: list[IpInfo] = field(default_factory=list)


@dataclass(slots=True)
class KvCacheExtParam:
    """Layers of a pull or push (interface R14); by default every tensor moves.

    Attributes:
        src_layer_range: First and last layer at the source, both **inclusive**, int32; (-1, -1): all.
        dst_layer_range: The same at the destination; as many layers.
        tensor_num_per_layer: uint8; must divide ``num_tensors`` if a range is given.

    Source: interface §9.
    """

    src_layer_range: tuple[int, int] = (-1, -1)
    dst_layer_range: tuple[int, int] = (-1, -1)
    tensor_num_per_layer: int = 2


@dataclass(slots=True)
class RegisterCfg:
    """Reserved; without fields.

    Source: interface §9.
    """
