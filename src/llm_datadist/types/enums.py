"""Enumerations of the interface and their values (interface §1.2)."""

from __future__ import annotations

from enum import Enum, IntEnum


class _NamedIntEnum(IntEnum):
    """An int whose text, in f-strings too, is ``Class.NAME``."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, format_spec: str) -> str:
        return int.__format__(self, format_spec) if format_spec else str(self)


class LLMRole(_NamedIntEnum):
    """Role of an instance; in v2 mode a label with no effect on transfers.

    Source: interface §1.2.
    """

    PROMPT = 1
    DECODER = 2
    MIX = 3


class Placement(_NamedIntEnum):
    """Place of a cache's memory.

    Source: interface §1.2.
    """

    HOST = 0
    DEVICE = 1


class RegisterMemStatus(Enum):
    """Status of a communicator.

    Source: interface §1.2.
    """

    OK = 0
    PREPARING = 1
    FAILED = 2


class Memtype(Enum):
    """Place of a :class:`MemInfo`'s memory; the order is opposite to :class:`Placement`.

    Source: interface §1.2.
    """

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class PushType(Enum):
    """Addressing of a layer-wise transfer's destination.

    Source: interface §1.2.
    """

    NO_CACHE_KEY = 0
    BLOCKS_CACHE_KEY = 1
    CACHE_KEY_BY_ID = 2
