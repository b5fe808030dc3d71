"""KvCache, the handle of a cache in v1 mode (API §4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from llm_datadist.checks import check_rule, check_type
from llm_datadist.descriptors import Cache, CacheDesc

if TYPE_CHECKING:
    from collections import deque

__all__ = ["KvCache"]


class KvCache:
    """The handle of a cache that a KvCacheManager made, or of host memory for ``swap_blocks``. Not made by users.

    A handle that is dropped while its cache is still allocated gives that back, as ``deallocate_cache`` would, at the
    manager's next call: keep the handle for as long as you use the addresses. For the same reason there is one handle
    to a cache: ``copy`` returns the handle itself, and it cannot be pickled.

    Source: API §4.
    """

    __slots__ = ("__weakref__", "_cache", "_forgotten")

    def __init__(self, cache: Cache, forgotten: deque[int] | None = None) -> None:
        self._forgotten = forgotten
        self._cache = cache

    @staticmethod
    def create_cpu_cache(cache_desc: CacheDesc, addrs: list[int] | list[list[int]]) -> KvCache:
        """Return a blocks cache (id -1, not registered) over host memory of yours, an operand of ``swap_blocks``.

        Args:
            cache_desc: Its placement must be HOST.
            addrs: One address per tensor; or one list of them per device, so one list.

        Raises:
            TypeError: Wrong types; ``addrs`` must be a list (``NoneArgument`` for None).
            ParamError: Another placement, addresses and lists mixed, another number of addresses than
                ``num_tensors``, of lists than devices (1), or none at all.

        Source: API §4 (KvCache).
        """
        check_type("cache_desc", cache_desc, CacheDesc)
        given = check_type("addrs", addrs, list)
        check_rule(given, "addrs is empty: one address per tensor is needed")
        nested = [isinstance(each, list) for each in given]
        check_rule(
            all(nested) or not any(nested), "addrs: element types should be consistent, all addresses or all lists"
        )
        if nested[0]:
            check_rule(len(given) == 1, f"addrs has {len(given)} lists: one per device is needed, and there is one")
        return KvCache(Cache.create_cpu_cache(cache_desc, given[0] if nested[0] else given))

    @property
    def cache_id(self) -> int:
        """Id at the owner, >= 1; -1 for a CPU cache."""
        return self._cache.cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """Geometry."""
        return self._cache.cache_desc

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """For each device (one here) the address of each tensor; empty once deallocated."""
        addresses = self._cache.tensor_addrs
        return [addresses] if addresses else []

    # A second handle would give the cache back under the first one.
    def __copy__(self) -> KvCache:
        return self

    def __deepcopy__(self, memo: object) -> KvCache:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r}: it is of this process and cannot be pickled; others name a cache by its key")

    def __del__(self) -> None:
        # Nothing but this: the collector may call it anywhere, under any lock.
        if self._forgotten is not None and self._cache.tensor_addrs:
            self._forgotten.append(self._cache.cache_id)

    def __repr__(self) -> str:
        return f"<Kv{repr(self._cache)[1:]}"
