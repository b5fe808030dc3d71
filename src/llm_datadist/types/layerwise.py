"""Arguments of layer-wise transfers and of ``remap_registered_memory`` (interface §4)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from llm_datadist._checks import (
    Attribute,
    check_int,
    check_range,
    check_rule,
    check_type,
    check_uint32,
    check_uint64,
    check_uint64_list,
)
from llm_datadist.types.enums import Memtype
from llm_datadist.types.keys import BlocksCacheKey, CacheKeyByIdAndIndex

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class MemInfo:
    """A memory range for ``remap_registered_memory``; checks types only.

    Attributes:
        mem_type: Its place.
        addr: Its address.
        size: Its bytes.

    Source: interface §4.
    """

    mem_type: Memtype
    addr: int
    size: int

    def __post_init__(self) -> None:
        check_type("mem_type", self.mem_type, Memtype)
        object.__setattr__(self, "addr", check_int("addr", self.addr))
        object.__setattr__(self, "size", check_int("size", self.size))


def _addresses(name: str, value: Sequence[int]) -> Sequence[int]:
    addresses = check_uint64_list(name, value)
    return tuple(addresses) if isinstance(value, tuple) else addresses


_some_layers = partial(check_range, empty_ok=False)


def _some_layers_or_all(name: str, value: range | None) -> range | None:
    return None if value is None else _some_layers(name, value)


class TransferConfig:
    """One destination of ``transfer_cache_async``, by raw addresses; attributes are checked when assigned.

    Block b lies b block sizes behind its address. If an address, or its range, lies in none of the peer's caches, the
    config ends with ``LLM_PARAM_INVALID``; the error names the address. Over shm alone (``llm.Transport=shm``) it ends
    with ``LLM_FEATURE_NOT_ENABLED``. ``dst_layer_range`` may be assigned and is ignored: the layers are the source's.

    Raises:
        ParamError: An integer outside its width; a range that is empty, starts below 0 or has another step than 1.
        TypeError: A wrong type (NoneArgument for None).

    Source: interface §4.
    """

    dst_cluster_id = Attribute("Cluster that receives, uint64.", check_uint64)
    dst_addrs = Attribute(
        "Two addresses (K, V) per layer of ``src_layer_range``, in order: a copy of the list or tuple of uint64 given.",
        _addresses,
    )
    src_layer_range = Attribute("Layers to send; None means all.", _some_layers_or_all)
    src_batch_index = Attribute("Row to send, uint32.", check_uint32)
    dst_layer_range: range | None = None

    def __init__(
        self,
        dst_cluster_id: int,
        dst_addrs: Sequence[int],
        src_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.dst_cluster_id = dst_cluster_id
        self.dst_addrs = dst_addrs
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index

    def __repr__(self) -> str:
        return (
            f"TransferConfig(dst_cluster_id={self.dst_cluster_id}, dst_addrs=<{len(self.dst_addrs)} addresses>, "
            f"src_layer_range={self.src_layer_range}, src_batch_index={self.src_batch_index})"
        )


class TransferWithCacheKeyConfig:
    """One destination of ``transfer_cache_async``, by key; attributes are checked when assigned.

    A row goes to the key's row, or to block 0 of a blocks cache.

    Raises:
        ParamError: As :class:`TransferConfig`; ranges of unequal length; a row with a BlocksCacheKey.
        TypeError: A wrong type (NoneArgument for None, also for the ranges).

    Source: interface §4.
    """

    src_layer_range = Attribute("Layers to send.", _some_layers)
    dst_layer_range = Attribute("Layers at the receiver, equally many.", _some_layers)

    def __init__(
        self,
        cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_layer_range: range,
        dst_layer_range: range,
        src_batch_index: int = 0,
    ) -> None:
        self._cache_key = check_type("cache_key", cache_key, (BlocksCacheKey, CacheKeyByIdAndIndex))
        self.src_layer_range = src_layer_range
        self.dst_layer_range = dst_layer_range
        self.src_batch_index = src_batch_index
        self.check_lengths()

    @property
    def cache_key(self) -> BlocksCacheKey | CacheKeyByIdAndIndex:
        """The receiving blocks cache, or cache and row."""
        return self._cache_key

    @cache_key.setter
    def cache_key(self, cache_key: BlocksCacheKey | CacheKeyByIdAndIndex) -> None:
        check_type("cache_key", cache_key, (BlocksCacheKey, CacheKeyByIdAndIndex))
        _check_row(self._src_batch_index, cache_key)
        self._cache_key = cache_key

    @property
    def dst_cluster_id(self) -> int:
        """The receiving cluster: that of the present ``cache_key``."""
        return self._cache_key.cluster_id

    @property
    def src_batch_index(self) -> int:
        """Row to send, uint32; 0 with a BlocksCacheKey."""
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, src_batch_index: int) -> None:
        row = check_uint32("src_batch_index", src_batch_index)
        _check_row(row, self._cache_key)
        self._src_batch_index = row

    def check_lengths(self) -> None:
        """Raise ParamError unless both ranges have the same length. An extension.

        Setters change one range at a time, so the transfer checks.
        """
        src, dst = self.src_layer_range, self.dst_layer_range
        check_rule(len(src) == len(dst), f"dst_layer_range: {dst} and src_layer_range: {src} differ in length")

    def __repr__(self) -> str:
        return (
            f"TransferWithCacheKeyConfig({self._cache_key!r}, src_layer_range={self.src_layer_range}, "
            f"dst_layer_range={self.dst_layer_range}, src_batch_index={self._src_batch_index})"
        )


def _check_row(row: int, key: BlocksCacheKey | CacheKeyByIdAndIndex) -> None:
    check_rule(
        row == 0 or not isinstance(key, BlocksCacheKey),
        f"src_batch_index: {row} with {key!r}, a blocks cache has only row 0",
    )


class LayerSynchronizer(ABC):
    """Callback of ``transfer_cache_async`` that waits for a layer; implemented by the user.

    Source: interface §4.
    """

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Block until layer ``layer_index``, from 0, is ready. The transfer's thread calls it.

        A call that never returns keeps that thread, and nothing else, for ever.

        Args:
            timeout_in_millis: Always None: no limit.

        Returns:
            True to send the layer. False stops the transfer: the layer's configs get ``LLM_PARAM_INVALID``, other
                unfinished ones ``LLM_FAILED``.

        Source: interface §4.
        """
