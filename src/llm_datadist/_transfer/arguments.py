"""Rules on arguments of v2 (CacheManager), v1 (KvCacheManager) and C++ (cpp_api).

:data:`ARGUMENTS` has the rule of each single argument; v1 and C++ override some. These run in the caller's thread.
Others need the geometry of a cache in local use; of an awaited call they run in its worker. No other side effect comes
before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llm_datadist import _native
from llm_datadist._cache.geometry import Geometry, LayerSelection
from llm_datadist._cache.registry import Namespace, key_of
from llm_datadist._checks import (
    INVALID_ID,
    check_int64,
    check_list,
    check_range,
    check_rule,
    check_type,
    check_uint32,
    check_uint64,
    check_uint64_list,
    type_error,
)
from llm_datadist._native import BlockList, parse_blocks
from llm_datadist._transfer.resolution import RemoteName
from llm_datadist.errors import LLMException, NoneArgument, ParamError
from llm_datadist.types import BlocksCacheKey, Cache, CacheDesc, CacheKey, CacheKeyByIdAndIndex, MemInfo, Memtype
from llm_datadist.types.grant import Grant

if TYPE_CHECKING:
    from llm_datadist._transfer.local_copy import Pairs


Rule = Callable[[str, object], Any]  # (name, value) -> value as used; TypeError, ParamError
Rules = Mapping[str, Rule]

Bindings = list[tuple[CacheKey | BlocksCacheKey, int]]  # keys of a new cache, each with its row

_PULLED: Final = (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey)

selection = lru_cache(maxsize=64)(LayerSelection)  # most calls have no layer ranges


def check(rules: Rules, /, **values: object) -> list[Any]:
    """Return the values, each checked by the rule of its name."""
    return [rules[name](name, value) for name, value in values.items()]


def instance_of(kind: type) -> Rule:
    return partial(check_type, types=kind)


def byte_count(name: str, value: object) -> int:
    """Return the bytes per tensor; -1 stands for the rest of a row."""
    nbytes = check_int64(name, value)
    check_rule(nbytes == -1 or nbytes > 0, f"{name}={nbytes}: must be -1 or above 0")
    return nbytes


def _row_keys(name: str, value: object) -> Bindings:
    return [(key, row) for row, key in enumerate(check_list(name, value, CacheKey))]


def _blocks_key(name: str, value: object) -> Bindings:
    return [] if value is None else [(check_type(name, value, BlocksCacheKey), 0)]


def _uint64_or(default: int | None) -> Rule:
    return lambda name, value: default if value is None else check_uint64(name, value)


def _pairs(name: str, value: object, *, lists: bool) -> Pairs:
    """Return (sources, destinations), pair by pair (interface §6.8, §6.9); ``lists`` of destinations, or one each."""
    pairs = check_type(name, value, dict)
    if (plain := _native.parse_pairs(pairs, lists=lists)) is not None:
        return plain
    if lists:
        pairs = {source: _targets(f"{name}[{source!r}]", targets) for source, targets in pairs.items()}
    flat = [target for targets in pairs.values() for target in targets] if lists else list(pairs.values())
    try:
        sources, destinations = _native.parse_indices(name, list(pairs)), _native.parse_indices(name, flat)
    except (TypeError, ParamError):  # the native parser cannot name the element
        for source, targets in pairs.items():
            _block_number(f"key of {name}", source)
            for i, target in enumerate(targets if lists else [targets]):
                _block_number(f"{name}[{source}][{i}]" if lists else f"{name}[{source}]", target)
        raise
    if lists:
        sources = np.repeat(sources, np.fromiter(map(len, pairs.values()), np.int64, len(pairs)))
    return sources, destinations


def _targets(name: str, value: object) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, (list, tuple)) else _native.parse_indices(name, value).tolist()


def _block_number(name: str, value: object) -> None:
    number = check_int64(name, value)
    check_rule(number >= 0, f"{name}: {number} is negative, blocks count from 0")


#: Rules of v2. Keys of transfers have none, because the allowed kinds depend on the call.
ARGUMENTS: Final[Rules] = {
    # caches and their memory
    "cache_desc": instance_of(CacheDesc),
    "cache_keys": _row_keys,
    "blocks_cache_key": _blocks_key,
    "granted_only": instance_of(bool),
    "addrs": partial(check_uint64_list, tuple_ok=False),  # interface §6.6
    "cache_id": check_int64,
    **dict.fromkeys(("cache", "src_cache", "dst_cache", "src", "dst"), instance_of(Cache)),
    # rows and bytes
    **dict.fromkeys(("batch_index", "src_batch_index", "dst_batch_index"), check_uint32),
    "offset": check_uint64,
    **dict.fromkeys(("src_cache_offset", "dst_cache_offset"), _uint64_or(0)),
    "size": check_int64,
    "req_id": _uint64_or(None),
    # blocks
    "src_blocks": parse_blocks,
    "dst_blocks": parse_blocks,
    "copy_block_info": partial(_pairs, lists=True),
    "src_to_dst": partial(_pairs, lists=False),
}


def check_key_count(keys: Bindings, geometry: Geometry, name: str = "cache_keys") -> None:
    rows = geometry.rows
    check_rule(len(keys) <= rows, f"{name} has {len(keys)} keys: at most one per batch row, and there are {rows}")


def check_addresses(addrs: list[int], geometry: Geometry) -> None:
    """Check that each tensor has a non-zero address; :meth:`LocalCaches.register` checks the memory there."""
    check_rule(addrs, "addrs is empty: one address per tensor is needed")
    check_rule(
        len(addrs) == geometry.num_tensors,
        f"addrs has {len(addrs)} addresses: one per tensor is needed, and num_tensors is {geometry.num_tensors}",
    )
    check_rule(all(addrs), f"addrs[{addrs.index(0) if 0 in addrs else 0}]=0: an address cannot be zero")
    end = max(addrs) + geometry.tensor_bytes
    check_rule(end <= INVALID_ID, f"addrs: {max(addrs)} + {geometry.tensor_bytes} bytes is beyond the address space")


def check_accessible(remote_accessible: object, *, linked: bool) -> bool:
    """Return True if peers may use registered memory (interface R16); refuse True after ``link()`` (interface §6.6)."""
    if remote_accessible is None:
        return True
    value = check_type("remote_accessible", remote_accessible, bool)
    check_rule(
        not (value and linked),
        "remote_accessible: True is for memory registered before link(); leave it out, which means the same here",
    )
    return value


def check_mem_infos(mem_infos: object) -> None:
    """Check one or several MemInfo (interface §6.15)."""
    infos = mem_infos if isinstance(mem_infos, list) else [mem_infos]
    check_rule(infos, "mem_infos is empty: at least one MemInfo is needed")
    for i, info in enumerate(infos):
        if info is None:
            raise NoneArgument(f"mem_infos[{i}] is None: must be MemInfo")
        if not isinstance(info, MemInfo):
            raise ParamError(f"mem_infos[{i}] is {type(info).__name__}: must be MemInfo")
        check_rule(info.mem_type is Memtype.MEM_TYPE_DEVICE, f"mem_infos[{i}].mem_type={info.mem_type}: only device")
        check_rule(info.addr > 0 and info.size > 0, f"mem_infos[{i}]={info}: addr and size must be above 0")


@contextmanager
def naming_request(req_id: object) -> Iterator[None]:
    """Add the request id to the errors of the block (interface R9)."""
    try:
        yield
    except (LLMException, TypeError) as error:
        if req_id is not None and f"req_id={req_id}" not in str(error):
            error.args = (f"{error} (req_id={req_id})", *error.args[1:])
        raise


def require_rca(remote_accessible: bool, call: str) -> None:
    """Check that remote cache access is on (interface R16)."""
    check_rule(
        remote_accessible, f"{call} needs enable_remote_cache_accessible=True (llm.EnableRemoteCacheAccessible=1)"
    )


def layer_selection(
    src_layer_range: object, dst_layer_range: object, tensor_num_per_layer: object, *, empty_ok: bool = True
) -> LayerSelection:
    """Return the layers. With ``empty_ok`` (pulls) an empty range counts as not given."""
    per_layer = tensor_num_per_layer
    if type(per_layer) is not int or not 0 < per_layer < 1 << 32:  # a call less for the usual case
        per_layer = check_uint32("tensor_num_per_layer", per_layer)
    if per_layer == 0:
        raise ParamError("tensor_num_per_layer=0: at least one tensor makes a layer")
    if src_layer_range is None and dst_layer_range is None:
        return selection(None, None, per_layer)
    ranges = [
        None if layers is None else check_range(name, layers, empty_ok=empty_ok) or None
        for name, layers in (("src_layer_range", src_layer_range), ("dst_layer_range", dst_layer_range))
    ]
    return LayerSelection(ranges[0], ranges[1], per_layer)


def check_single_id(key: object) -> None:
    """Check that a CacheKey has exactly one id (interface §6.0); other keys pass."""
    if isinstance(key, CacheKey):
        given = (key.req_id != INVALID_ID) + (key.prefix_id != INVALID_ID)
        check_rule(
            given == 1,
            f"cache_key req_id={key.req_id}, prefix_id={key.prefix_id}: exactly one must be below 2**64 - 1",
        )


def remote_name(key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey, own_cluster_id: int | None) -> RemoteName:
    """Return the remote name of ``key``; refuse ``own_cluster_id``, which is None for pushes (interface R28)."""
    cluster = key.cluster_id
    if cluster == own_cluster_id:
        raise ParamError(f"cluster_id={cluster} of the key is our own: copy instead of pulling")
    if isinstance(key, BlocksCacheKey):
        return RemoteName(cluster, (Namespace.BLOCKS, 0, key.model_id))  # key_of(), without its call
    if isinstance(key, CacheKeyByIdAndIndex):
        return RemoteName(cluster, None, key.cache_id, key.batch_index)
    return RemoteName(cluster, key_of(key))


def check_size(size: int, geometry: Geometry, offset: int) -> None:
    """Check that ``size`` bytes (-1: the rest) from ``offset`` lie in a local row."""
    row = f"a row of the local cache has {geometry.stride} bytes"
    check_rule(offset < geometry.stride, f"dst_cache_offset={offset}: {row}")
    at = f" from dst_cache_offset={offset} on" if offset else ""
    check_rule(offset + size <= geometry.stride, f"size={size}{at}: {row}")


def check_blocks(name: str, blocks: BlockList, geometry: Geometry) -> None:
    if blocks.largest >= geometry.rows:
        raise outside(name, blocks, geometry)


def outside(name: str, blocks: BlockList, geometry: Geometry) -> ParamError:
    """Return the error of a list whose largest block is outside a local cache."""
    at = int(blocks.array.argmax())
    return ParamError(f"{name}[{at}]={blocks.largest}: the local cache has {geometry.rows} blocks")


def check_pull_blocks(
    key: object, src_blocks: BlockList, dst_blocks: BlockList, grant: Grant | None = None
) -> BlockList | None:
    """Check the kind of key, and that the lists suit it (interface §6.11).

    Returns the peer's blocks; None if the key names a row. A grant makes an id-key name a blocks cache.
    """
    if not isinstance(key, _PULLED):
        raise type_error("src_cache_key", key, _PULLED)
    sources, targets = len(src_blocks), len(dst_blocks)
    if not targets:
        raise ParamError("dst_blocks is empty: at least one block is needed")
    if isinstance(key, BlocksCacheKey) or (grant is not None and isinstance(key, CacheKeyByIdAndIndex)):
        if not sources:
            raise ParamError("src_blocks is empty: a BlocksCacheKey, or a grant, needs the blocks to pull")
        if sources != targets:
            equal_lengths(src_blocks, dst_blocks)
        return src_blocks
    check_rule(not sources, f"src_blocks has {sources} entries: only a BlocksCacheKey addresses blocks")
    check_single_id(key)
    return None


def check_grant(grant: object, key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey, sources: BlockList) -> None:
    """Check that the grant is of the key's peer and covers the blocks."""
    grant = check_type("grant", grant, Grant)
    check_rule(not isinstance(key, CacheKey), "grant: only with a BlocksCacheKey, or a CacheKeyByIdAndIndex")
    if isinstance(key, CacheKeyByIdAndIndex):
        given = key.cache_id, key.batch_index
        check_rule(given == (grant.cache_id, 0), f"grant: it is one of cache {grant.cache_id}, the key names {key}")
    check_rule(
        key.cluster_id == grant.cluster_id,
        f"grant: it is one of cluster {grant.cluster_id}, the key names cluster {key.cluster_id}",
    )
    inside = np.isin(sources.array, grant.block_numbers)
    if not inside.all():
        block = int(sources.array[~inside][0])
        raise ParamError(f"src_blocks: block {block} is not among the {len(grant.block_numbers)} blocks of the grant")


def check_push_blocks(key: object, src_blocks: BlockList, dst_blocks: BlockList) -> None:
    """Check pairs of blocks (interface §6.13), and row 0 in an id-key (interface R31)."""
    if not len(dst_blocks):
        raise ParamError("dst_blocks is empty: at least one block is needed")
    check_pairs(src_blocks, dst_blocks)
    if isinstance(key, CacheKeyByIdAndIndex):
        check_rule(key.batch_index == 0, f"batch_index={key.batch_index} of dst_cache_key: blocks have no rows, so 0")


def check_pairs(
    src_blocks: BlockList, dst_blocks: BlockList, names: tuple[str, str] = ("src_blocks", "dst_blocks")
) -> None:
    check_rule(len(src_blocks), f"{names[0]} is empty: at least one block is needed")
    equal_lengths(src_blocks, dst_blocks, names)


def equal_lengths(src_blocks: Sized, dst_blocks: Sized, names: tuple[str, str] = ("src_blocks", "dst_blocks")) -> None:
    if len(src_blocks) != len(dst_blocks):
        raise ParamError(
            f"{names[0]} has {len(src_blocks)} entries and {names[1]} {len(dst_blocks)}: equal lengths are needed"
        )
