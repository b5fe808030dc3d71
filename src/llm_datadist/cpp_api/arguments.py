"""Checks of the C++ structs, and their values for the library.

A wrong type is TypeError, all else ParamError; errors name the field and precede any side effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist import types
from llm_datadist._cache.geometry import CacheKind, Geometry, LayerSelection
from llm_datadist._checks import (
    check_int32,
    check_int64,
    check_list,
    check_rule,
    check_type,
    check_uint8,
    check_uint32,
    check_uint64,
    check_uint64_list,
)
from llm_datadist._native import parse_indices
from llm_datadist._transfer.arguments import ARGUMENTS as V2_ARGUMENTS
from llm_datadist._transfer.arguments import Rules, byte_count, equal_lengths, instance_of, selection
from llm_datadist._transfer.local_copy import Operand
from llm_datadist._transfer.resolution import RemoteName
from llm_datadist.cpp_api import structs
from llm_datadist.errors import ParamError
from llm_datadist.types.cluster import check_endpoint

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llm_datadist._memory.device import Device


def role(name: str, value: structs.LlmRole) -> types.LLMRole:
    """Return the engine's role."""
    check_rule(check_type(name, value, structs.LlmRole) is not structs.LlmRole.kEnd, f"{name}={value!r}: not a role")
    return types.LLMRole(int(value))


def cluster_infos(clusters: object, *, local_ip: bool = False) -> list[types.LLMClusterInfo]:
    """Return the clusters for LLMDataDist's calls, without ids of 0; ``local_ip``: each must have a local ip."""
    given = check_list("clusters", clusters, structs.ClusterInfo)
    check_rule(given, "clusters is empty: at least one ClusterInfo is needed")
    return [_cluster_info(f"clusters[{i}]", each, local_ip=local_ip) for i, each in enumerate(given)]


def _cluster_info(name: str, cluster: structs.ClusterInfo, *, local_ip: bool) -> types.LLMClusterInfo:
    info = types.LLMClusterInfo()
    if cluster_id := check_uint64(f"{name}.remote_cluster_id", cluster.remote_cluster_id):
        info.remote_cluster_id = cluster_id
    info.remote_role_type = check_int32(f"{name}.remote_role_type", cluster.remote_role_type)
    info.local_ip_info_list.extend(_endpoints(f"{name}.local_ip_infos", cluster.local_ip_infos, named=False))
    check_rule(info.local_ip_info_list or not local_ip, f"{name}.local_ip_infos is empty: this host's ip is needed")
    info.remote_ip_info_list.extend(_endpoints(f"{name}.remote_ip_infos", cluster.remote_ip_infos, named=True))
    return info


def _endpoints(name: str, infos: object, *, named: bool) -> list[tuple[int | str, int]]:
    endpoints = check_list(name, infos, structs.IpInfo)
    return [
        check_endpoint(check_type(f"{name}[{i}].ip", each.ip, str), each.port, f"{name}[{i}].", named=named)
        for i, each in enumerate(endpoints)
    ]


def cache_id(name: str, cache: object) -> int:
    """Return a local cache's id, the only field that transfers read (interface R31)."""
    return check_int64(f"{name}.cache_id", check_type(name, cache, structs.Cache).cache_id)


def _geometry(name: str, cache_desc: object) -> Geometry:
    """Return the geometry of a cache of rows and blocks."""
    desc = check_type(name, cache_desc, structs.CacheDesc)
    placement = check_type(f"{name}.placement", desc.placement, structs.CachePlacement)
    num_tensors = check_uint32(f"{name}.num_tensors", desc.num_tensors)
    data_type = check_type(f"{name}.data_type", desc.data_type, (types.DataType, structs.Undefined))
    shape = check_type(f"{name}.shape", desc.shape, (list, tuple))
    if isinstance(data_type, structs.Undefined):
        raise ParamError(f"{name}.data_type={structs.DT_UNDEFINED.name}: an element type is needed")
    check_rule(shape, f"{name}.shape is empty: at least one dimension is needed")
    described = types.CacheDesc(num_tensors, list(shape), data_type, types.Placement(int(placement)))
    return Geometry.of(described, CacheKind.MIX)


def operand(name: str, cache: structs.Cache, device: Device) -> int | Operand:
    """Return one side of CopyKvBlocks: a local cache's id, or host memory (interface R13)."""
    number = cache_id(name, cache)
    if number >= 1:
        return number
    check_rule(number == -1, f"{name}.cache_id={number}: ids begin at 1, and -1 stands for host memory without one")
    check_type(f"{name}.cache_desc", cache.cache_desc, structs.CacheDesc)
    check_rule(
        cache.cache_desc.placement is not structs.CachePlacement.kDevice,
        f"{name}: cache_id=-1 on kDevice: only host memory can be named by its addresses; register device memory",
    )
    shape = _geometry(f"{name}.cache_desc", cache.cache_desc)
    addresses = check_uint64_list(f"{name}.tensor_addrs", cache.tensor_addrs)
    found, needed = len(addresses), shape.num_tensors
    text = f"{name}.tensor_addrs has {found} addresses: one per tensor is needed, and there are {needed}"
    check_rule(found == needed, text)
    end = max(addresses) + shape.tensor_bytes
    check_rule(end < 2**64, f"{name}.tensor_addrs: {max(addresses)} + {shape.tensor_bytes} is beyond the address space")
    return Operand.of(name, shape, addresses, device)


def remote_name(name: str, index: object, own_cluster_id: int | None = None, *, row: bool) -> RemoteName:
    """Return the name of a peer's cache; ``row`` False: for blocks.

    ``own_cluster_id`` is refused as the peer of a pull (interface R28); None for a push.
    """
    given = check_type(name, index, structs.CacheIndex)
    cluster = check_uint64(f"{name}.cluster_id", given.cluster_id)
    remote = check_int64(f"{name}.cache_id", given.cache_id)
    batch_index = check_uint32(f"{name}.batch_index", given.batch_index)
    if batch_index and not row:
        raise ParamError(f"{name}.batch_index={batch_index}: blocks are in no row, so 0")
    if cluster == own_cluster_id:
        raise ParamError(f"{name}.cluster_id={cluster} is our own: copy instead of pulling")
    return RemoteName(cluster, cache_id=remote, row=batch_index)


ALL_LAYERS: Final = structs.KvCacheExtParam()
_ALL: Final = selection(None, None, ALL_LAYERS.tensor_num_per_layer)


def layers(name: str, ext_param: object) -> LayerSelection:
    """Return the layers of a transfer (interface R14)."""
    if ext_param is ALL_LAYERS:  # nobody can have changed it
        return _ALL
    ext = check_type(name, ext_param, structs.KvCacheExtParam)
    per_layer = check_uint8(f"{name}.tensor_num_per_layer", ext.tensor_num_per_layer)
    check_rule(per_layer > 0, f"{name}.tensor_num_per_layer=0: at least one tensor makes a layer")
    return selection(
        _layer_range(f"{name}.src_layer_range", ext.src_layer_range),
        _layer_range(f"{name}.dst_layer_range", ext.dst_layer_range),
        per_layer,
    )


def _layer_range(name: str, pair: object) -> range | None:
    # Some clients call once per layer and tensor: no further calls for a correct pair.
    if type(pair) is tuple and len(pair) == 2:
        first, last = pair
        if type(first) is int and type(last) is int and 0 <= first <= last < 2**31:
            return range(first, last + 1)
    ends = check_type(name, pair, (tuple, list))
    if len(ends) != 2:
        raise TypeError(f"{name} has {len(ends)} elements: a pair of layers is needed, got {ends!r}")
    first, last = (check_int32(f"{name}[{i}]", layer) for i, layer in enumerate(ends))
    if (first, last) == (-1, -1):
        return None
    check_rule(
        0 <= first <= last,
        f"{name}=({first}, {last}): first and last layer, 0 <= first <= last, or (-1, -1) for all of them",
    )
    return range(first, last + 1)


#: Differences from v2: caches by id, descriptors and layers in structs.
ARGUMENTS: Final[Rules] = {
    **V2_ARGUMENTS,
    "cache_desc": _geometry,
    "src_cache": cache_id,
    "dst_cache": cache_id,
    "size": byte_count,
    "ext_param": layers,
    "cfg": instance_of(structs.RegisterCfg),
}


def block_lists(src_blocks: object, dst_blocks_list: object) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (sources of shape (N,), destinations of shape (L, N)) of CopyKvBlocks (interface R13)."""
    sources = parse_indices("src_blocks", src_blocks)
    lists = check_type("dst_blocks_list", dst_blocks_list, (list, tuple))
    targets = [parse_indices(f"dst_blocks_list[{i}]", each) for i, each in enumerate(lists)]
    check_rule(sources.size, "src_blocks is empty: at least one block is needed")
    check_rule(targets, "dst_blocks_list is empty: at least one list of blocks is needed")
    for i, each in enumerate(targets):
        equal_lengths(sources, each, ("src_blocks", f"dst_blocks_list[{i}]"))
    return sources, np.stack(targets)
