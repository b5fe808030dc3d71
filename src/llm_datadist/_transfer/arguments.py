"""The argument rules of API §6 that are more than one type check. Each raises before anything has happened."""

from __future__ import annotations

from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist import _native
from llm_datadist._cache.geometry import LayerSelection
from llm_datadist._cache.registry import key_of
from llm_datadist._checks import (
    INVALID_ID,
    check_int64,
    check_range,
    check_rule,
    check_type,
    check_uint32,
    check_uint64,
    check_uint64_list,
)
from llm_datadist._log import logger
from llm_datadist._transfer.resolution import RemoteName
from llm_datadist.errors import LLMException, NoneArgument, ParamError
from llm_datadist.types import BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex, MemInfo, Memtype
from llm_datadist.types.grant import Grant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Sized

    from numpy.typing import NDArray

    from llm_datadist._cache.geometry import Geometry
    from llm_datadist._native import BlockList
    from llm_datadist._transfer.engine import Engine

__all__ = [
    "accessible",
    "addresses",
    "blocks_keys",
    "byte_count",
    "check_addresses",
    "check_blocks",
    "check_copy",
    "check_grant",
    "check_key_count",
    "check_mem_infos",
    "check_pull_blocks",
    "check_pull_cache",
    "check_push_blocks",
    "check_single_id",
    "check_size",
    "copy_pairs",
    "equal_lengths",
    "layer_selection",
    "made_here",
    "naming_request",
    "remote_name",
    "require_rca",
    "swap_pairs",
]

# --- making caches ----------------------------------------------------------------------------------------------------


def check_key_count(keys: Sequence[CacheKey], rows: int) -> None:
    """At most one key per batch row."""
    check_rule(len(keys) <= rows, f"cache_keys has {len(keys)} keys: at most one per batch row, and there are {rows}")


def blocks_keys(key: object) -> list[tuple[CacheKey | BlocksCacheKey, int]]:
    """Return the (key, row) pairs of a blocks cache: none or one."""
    if key is None:
        return []
    return [(check_type("blocks_cache_key", key, BlocksCacheKey), 0)]


def addresses(addrs: object) -> list[int]:
    """Return ``addrs`` checked: a list (no tuple, API §6.6) of integers in uint64."""
    return check_uint64_list("addrs", addrs, tuple_ok=False)


def check_addresses(addrs: list[int], geometry: Geometry) -> None:
    """One non-zero address per tensor, and every tensor inside the address space."""
    check_rule(addrs, "addrs is empty: one address per tensor is needed")
    check_rule(
        len(addrs) == geometry.num_tensors,
        f"addrs has {len(addrs)} addresses: one per tensor is needed, and num_tensors is {geometry.num_tensors}",
    )
    check_rule(all(addrs), f"addrs[{addrs.index(0) if 0 in addrs else 0}]=0: an address cannot be zero")
    end = max(addrs) + geometry.tensor_bytes
    check_rule(end <= INVALID_ID, f"addrs: {max(addrs)} + {geometry.tensor_bytes} bytes is beyond the address space")


def accessible(remote_accessible: object, *, linked: bool) -> bool:
    """Check ``remote_accessible``: None means True (R16). ``linked``: ``link()`` was called (API §6.6)."""
    if remote_accessible is None:
        return True
    value = check_type("remote_accessible", remote_accessible, bool)
    check_rule(
        not (value and linked),
        "remote_accessible: True is for memory registered before link(); leave it out, which means the same here",
    )
    return value


def check_mem_infos(mem_infos: object) -> None:
    """API §6.15: MemInfo, or a list of them that is not empty; device memory, address and size not zero."""
    infos = mem_infos if isinstance(mem_infos, list) else [mem_infos]
    check_rule(infos, "mem_infos is empty: at least one MemInfo is needed")
    for i, info in enumerate(infos):
        if info is None:
            raise NoneArgument(f"mem_infos[{i}] is None: must be MemInfo")
        if not isinstance(info, MemInfo):
            raise ParamError(f"mem_infos[{i}] is {type(info).__name__}: must be MemInfo")
        check_rule(info.mem_type is Memtype.MEM_TYPE_DEVICE, f"mem_infos[{i}].mem_type={info.mem_type}: only device")
        check_rule(info.addr > 0 and info.size > 0, f"mem_infos[{i}]={info}: addr and size must be above 0")


def made_here(call: str, cache: Cache, engine: Engine) -> bool:
    """Return False for a handle of another LLMDataDist, or from before ``finalize``: its id is another cache's here."""
    if cache._granter is None or cache._granter is engine.grants:
        return True
    logger.warning("%s: %r was made by another LLMDataDist, or before finalize: nothing is given back", call, cache)
    return False


# --- copies -----------------------------------------------------------------------------------------------------------


def check_copy(
    dst: object,
    src: object,
    dst_batch_index: object,
    src_batch_index: object,
    offset: object,
    size: object,
    req_id: object,
) -> None:
    """The checks of copy_cache in their documented order (API §6.5)."""
    target = check_type("dst", dst, Cache)
    source = check_type("src", src, Cache)
    check_uint32("dst_batch_index", dst_batch_index)
    check_uint32("src_batch_index", src_batch_index)
    check_uint64("offset", offset)
    check_int64("size", size)
    check_rule(not source.is_blocks_cache, "src: a blocks cache; use copy_blocks")
    check_rule(not target.is_blocks_cache, "dst: a blocks cache; use copy_blocks")
    byte_count(size)
    if req_id is not None:
        check_uint64("req_id", req_id)


def copy_pairs(copy_block_info: object) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (sources, destinations), pair by pair in the order given, of a dict of int to list of int (API §6.8)."""
    pairs = check_type("copy_block_info", copy_block_info, dict)
    if (plain := _native.parse_pairs(pairs, lists=True)) is not None:
        return plain
    for source, targets in pairs.items():
        if not isinstance(targets, list):
            check_type(f"copy_block_info[{source!r}]", targets, list)
    try:
        sources = _native.parse_indices("copy_block_info", list(pairs))
        flat = _native.parse_indices("copy_block_info", [target for targets in pairs.values() for target in targets])
    except (TypeError, ParamError):
        for source, targets in pairs.items():
            _block_number("key of copy_block_info", source)
            for i, target in enumerate(targets):
                _block_number(f"copy_block_info[{source}][{i}]", target)
        raise
    return np.repeat(sources, np.fromiter(map(len, pairs.values()), np.int64, len(pairs))), flat


def swap_pairs(src_to_dst: object) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (sources, destinations), in the order given, of a dict of int to int (API §6.9)."""
    pairs = check_type("src_to_dst", src_to_dst, dict)
    if (plain := _native.parse_pairs(pairs, lists=False)) is not None:
        return plain
    try:
        return (
            _native.parse_indices("src_to_dst", list(pairs)),
            _native.parse_indices("src_to_dst", list(pairs.values())),
        )
    except (TypeError, ParamError):
        for source, target in pairs.items():
            _block_number("key of src_to_dst", source)
            _block_number(f"src_to_dst[{source}]", target)
        raise


def _block_number(name: str, value: object) -> None:
    """Name what the native parser, which knows no dicts, has refused."""
    number = check_int64(name, value)
    check_rule(number >= 0, f"{name}: {number} is negative, blocks count from 0")


@contextmanager
def naming_request(req_id: object) -> Iterator[None]:
    """Put ``req_id=N`` into the text of every error of the block (R9)."""
    try:
        yield
    except (LLMException, TypeError) as error:
        if req_id is not None and f"req_id={req_id}" not in str(error):
            error.args = (f"{error} (req_id={req_id})", *error.args[1:])
        raise


# --- transfers --------------------------------------------------------------------------------------------------------


def require_rca(remote_accessible: bool, call: str) -> None:
    """Pushes need remote cache access (R16)."""
    check_rule(
        remote_accessible, f"{call} needs enable_remote_cache_accessible=True (llm.EnableRemoteCacheAccessible=1)"
    )


def layer_selection(
    src_layer_range: object, dst_layer_range: object, tensor_num_per_layer: object, *, empty_ok: bool = True
) -> LayerSelection:
    """Return the layers of a call. An empty range means "not given" in pulls and is an error in pushes."""
    per_layer = check_uint32("tensor_num_per_layer", tensor_num_per_layer)
    if per_layer == 0:
        raise ParamError("tensor_num_per_layer=0: at least one tensor makes a layer")
    if src_layer_range is None and dst_layer_range is None:
        return _all_layers(per_layer)
    ranges = [
        None if layers is None else check_range(name, layers, empty_ok=empty_ok) or None
        for name, layers in (("src_layer_range", src_layer_range), ("dst_layer_range", dst_layer_range))
    ]
    return LayerSelection(ranges[0], ranges[1], per_layer)


@lru_cache(maxsize=64)
def _all_layers(tensors_per_layer: int) -> LayerSelection:
    """Return the selection of nearly every call, made once."""
    return LayerSelection(None, None, tensors_per_layer)


def check_single_id(key: object) -> None:
    """Exactly one of a CacheKey's ids must be set (API §6.0); other kinds of keys pass."""
    if isinstance(key, CacheKey):
        given = (key.req_id != INVALID_ID) + (key.prefix_id != INVALID_ID)
        check_rule(
            given == 1,
            f"cache_key req_id={key.req_id}, prefix_id={key.prefix_id}: exactly one must be below 2**64 - 1",
        )


def remote_name(key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey, own_cluster_id: int | None) -> RemoteName:
    """Return how the peer is asked for ``key``. Pulling from oneself is refused; pass None for a push (R28)."""
    cluster = key.cluster_id
    if cluster == own_cluster_id:
        raise ParamError(f"cluster_id={cluster} of the key is our own: copy instead of pulling")
    if isinstance(key, CacheKeyByIdAndIndex):
        return RemoteName(cluster, None, key.cache_id, key.batch_index)
    return RemoteName(cluster, key_of(key))


def check_pull_cache(rca: bool, cache_key: object, cache: object, batch_index: object, size: object) -> None:
    """The checks of pull_cache in their documented order (API §6.10)."""
    if rca:
        check_type("cache_key", cache_key, CacheKeyByIdAndIndex)
    else:
        check_type("cache_key", cache_key, (CacheKey, CacheKeyByIdAndIndex))
    local = check_type("cache", cache, Cache)
    check_uint32("batch_index", batch_index)
    check_int64("size", size)
    check_rule(not local.is_blocks_cache, "cache: a blocks cache; use pull_blocks")
    byte_count(size)


def byte_count(size: object) -> int:
    """Return ``size``, bytes per tensor: above 0, or -1, which stands for the rest of a row."""
    nbytes = check_int64("size", size)
    check_rule(nbytes == -1 or nbytes > 0, f"size={nbytes}: must be -1 or above 0")
    return nbytes


def check_size(size: int, geometry: Geometry, offset: int = 0) -> None:
    """``size`` bytes from ``dst_cache_offset`` on (v1; -1: all that follow) must lie in a row of the local cache."""
    row = f"a row of the local cache has {geometry.stride} bytes"
    check_rule(offset < geometry.stride, f"dst_cache_offset={offset}: {row}")
    at = f" from dst_cache_offset={offset} on" if offset else ""
    check_rule(offset + size <= geometry.stride, f"size={size}{at}: {row}")


def check_blocks(name: str, blocks: BlockList, geometry: Geometry) -> None:
    """Every index must be one of the local cache's blocks."""
    if blocks.largest >= geometry.rows:
        at = int(blocks.array.argmax())
        raise ParamError(f"{name}[{at}]={blocks.largest}: the local cache has {geometry.rows} blocks")


def check_pull_blocks(key: object, src_blocks: BlockList, dst_blocks: BlockList) -> None:
    """Which lists go with which key (API §6.11)."""
    sources, targets = len(src_blocks), len(dst_blocks)
    if not targets:
        raise ParamError("dst_blocks is empty: at least one block is needed")
    if isinstance(key, BlocksCacheKey):
        if not sources:
            raise ParamError("src_blocks is empty: a BlocksCacheKey needs the blocks to pull")
        equal_lengths(src_blocks, dst_blocks)
        return
    check_rule(not sources, f"src_blocks has {sources} entries: only a BlocksCacheKey addresses blocks")
    check_single_id(key)


def check_grant(grant: object, key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey, sources: BlockList) -> None:
    """Check that a grant is for this peer and these blocks."""
    grant = check_type("grant", grant, Grant)
    check_rule(isinstance(key, BlocksCacheKey), "grant: only with a BlocksCacheKey")
    check_rule(
        key.cluster_id == grant.cluster_id,
        f"grant: it is one of cluster {grant.cluster_id}, the key names cluster {key.cluster_id}",
    )
    inside = np.isin(sources.array, grant.block_numbers)
    if not inside.all():
        block = int(sources.array[~inside][0])
        raise ParamError(f"src_blocks: block {block} is not among the {len(grant.blocks)} blocks of the grant")


def check_push_blocks(key: object, src_blocks: BlockList, dst_blocks: BlockList) -> None:
    """Both lists are needed, equally long (API §6.13); an id-key addresses the whole cache (R31)."""
    if not len(dst_blocks):
        raise ParamError("dst_blocks is empty: at least one block is needed")
    if not len(src_blocks):
        raise ParamError("src_blocks is empty: at least one block is needed")
    equal_lengths(src_blocks, dst_blocks)
    if isinstance(key, CacheKeyByIdAndIndex):
        check_rule(key.batch_index == 0, f"batch_index={key.batch_index} of dst_cache_key: blocks have no rows, so 0")


def equal_lengths(
    src_blocks: Sized,
    dst_blocks: Sized,
    names: tuple[str, str] = ("src_blocks", "dst_blocks"),
) -> None:
    """Pair i is source i and destination i; ``names``: what the caller knows the two lists as."""
    if len(src_blocks) != len(dst_blocks):
        raise ParamError(
            f"{names[0]} has {len(src_blocks)} entries and {names[1]} {len(dst_blocks)}: equal lengths are needed"
        )
