"""Keys: frozen values that name a cluster's cache or row (interface §4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

from llm_datadist._checks import INVALID_ID, check_int64, check_uint32, check_uint64
from llm_datadist.errors import ParamError

_ALIASES = {"prompt_cluster_id": "cluster_id"}
_DEFAULTS = {"model_id": 0, "prefix_id": INVALID_ID}


def _assign(key: object, fields: tuple[str, ...], args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Match arguments to ``fields`` and set them; ParamError, not TypeError, for a wrong call."""
    kind = type(key).__name__
    if len(args) > len(fields):
        raise ParamError(f"{kind}: {len(args)} arguments given, at most {len(fields)} ({', '.join(fields)})")
    bound = dict(zip(fields, args, strict=False))
    for given, value in kwargs.items():
        name = _ALIASES.get(given, given)
        if name not in fields:
            raise ParamError(f"{kind}: Unsupported argument {given}={value!r}, allowed: {', '.join(fields)}")
        if name in bound:
            raise ParamError(f"{kind}: {given}={value!r}, but {name} is already {bound[name]!r}")
        bound[name] = value
    values = _DEFAULTS | bound
    for name in fields:
        if name not in values:
            raise ParamError(f"{kind}: {name} is required, got {bound!r}")
    for name in fields:
        object.__setattr__(key, name, check_uint64(name, values[name]))


@dataclass(init=False, frozen=True, slots=True)
class CacheKey:
    """Name of one batch row of a continuous cache, by request or by prefix.

    ``CacheKey(cluster_id, req_id, model_id=0, prefix_id=2**64 - 1)``; ``prompt_cluster_id`` is another name of
    ``cluster_id``, which selects the link of a pull. Hashable, immutable.

    Raises:
        ParamError: Too many, missing, repeated or unknown arguments; a value outside uint64.
        TypeError: A value that is not an int (NoneArgument for None).

    Source: interface §4.
    """

    cluster_id: int
    req_id: int
    model_id: int
    prefix_id: int

    @overload
    def __init__(self, cluster_id: int, req_id: int, model_id: int = 0, prefix_id: int = INVALID_ID) -> None: ...
    @overload
    def __init__(
        self, *, prompt_cluster_id: int, req_id: int, model_id: int = 0, prefix_id: int = INVALID_ID
    ) -> None: ...
    def __init__(self, *args: object, **kwargs: object) -> None:
        _assign(self, ("cluster_id", "req_id", "model_id", "prefix_id"), args, kwargs)

    @property
    def prompt_cluster_id(self) -> int:
        """The cluster id, under its older name."""
        return self.cluster_id

    @property
    def is_prefix(self) -> bool:
        """True for a prefix key. An extension."""
        return self.prefix_id != INVALID_ID

    @property
    def is_placeholder(self) -> bool:
        """True if the key names no row (interface R4). An extension."""
        return self.req_id == INVALID_ID and self.prefix_id == INVALID_ID


@dataclass(init=False, frozen=True, slots=True)
class BlocksCacheKey:
    """Name of a cluster's blocks cache by model id.

    ``BlocksCacheKey(cluster_id, model_id=0)``, with names, errors and properties as of :class:`CacheKey`.

    Source: interface §4.
    """

    cluster_id: int
    model_id: int

    @overload
    def __init__(self, cluster_id: int, model_id: int = 0) -> None: ...
    @overload
    def __init__(self, *, prompt_cluster_id: int, model_id: int = 0) -> None: ...
    def __init__(self, *args: object, **kwargs: object) -> None:
        _assign(self, ("cluster_id", "model_id"), args, kwargs)

    @property
    def prompt_cluster_id(self) -> int:
        """The cluster id, under its older name."""
        return self.cluster_id


@dataclass(frozen=True, slots=True)
class CacheKeyByIdAndIndex:
    """Name of one batch row by the cache's id at its owner. Hashable, immutable.

    Attributes:
        cluster_id: The owner's cluster id, uint64.
        cache_id: Its ``Cache.cache_id``, int64.
        batch_index: The row, uint32.

    Source: interface §4.
    """

    cluster_id: int
    cache_id: int
    batch_index: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "cluster_id", check_uint64("cluster_id", self.cluster_id))
        object.__setattr__(self, "cache_id", check_int64("cache_id", self.cache_id))
        object.__setattr__(self, "batch_index", check_uint32("batch_index", self.batch_index))
