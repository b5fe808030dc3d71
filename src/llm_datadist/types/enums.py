"""The interface's enumerations and their numeric values (interface §1.2)."""

from __future__ import annotations

from enum import Enum, IntEnum


class _NamedIntEnum(IntEnum):
    """An int whose text, in f-strings too, is ``Class.NAME``."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, format_spec: str) -> str:
        return int.__format__(self, format_spec) if format_spec else str(self)


class LLMRole(_NamedIntEnum):
    """What an instance does in a cluster; in CacheManager mode a label with no effect on transfers.

    Source: interface §1.2.
    """

    PROMPT = 1
    DECODER = 2
    MIX = 3


class Placement(_NamedIntEnum):
    """Where a cache's memory is.

    Source: interface §1.2.
    """

    HOST = 0
    DEVICE = 1


class RegisterMemStatus(Enum):
    """How far a link made by ``link()`` has come.

    Source: interface §1.2.
    """

    OK = 0
    PREPARING = 1
    FAILED = 2


class Memtype(Enum):
    """Where the memory of a :class:`MemInfo` is. Note the order: opposite to :class:`Placement`.

    Source: interface §1.2.
    """

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class PushType(Enum):
    """How the target of a layer-wise transfer is addressed.

    Source: interface §1.2.
    """

    NO_CACHE_KEY = 0
    BLOCKS_CACHE_KEY = 1
    CACHE_KEY_BY_ID = 2
