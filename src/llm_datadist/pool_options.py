"""The JSON texts that size the memory pools, parsed once (R11, API §7)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from llm_datadist.checks import check_rule, check_type
from llm_datadist.errors import ParamError
from llm_datadist.log import logger

__all__ = ["HOST_POOL_LIMIT", "PoolOptions", "check_buf_pool", "parse_json"]

HOST_POOL_LIMIT: Final = 20 * 2**30
"""Bytes a host pool may have at most."""

_DEFAULT_PAGE_SHIFT: Final = 16
_MIN_PAGE_SHIFT: Final = 10
_PAGE_SHIFT_END: Final = 31
_PAGES_END: Final = 2**32 - 1

_MIB2: Final = 2 * 2**20


def parse_json(name: str, text: str) -> object:
    """Return the value of the JSON ``text``. Raises ParamError naming ``name`` and where it is malformed."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParamError(f"{name}: {text[:200]!r} is no JSON ({error})") from None
    return value


def _integer(name: str, fields: dict[str, Any], field: str, default: int | None = None) -> int:
    """Return a field that must be a JSON integer; ``true`` and ``1.0`` are none."""
    if field not in fields and default is None:
        raise ParamError(f"{name}: {field} is missing")
    value = fields.get(field, default)
    if type(value) is not int:
        raise ParamError(f"{name}: {field} is {value!r}, an integer is needed")
    return value


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How large a memory pool is and what it rounds allocations up to.

    Attributes:
        memory_size: Bytes.
        page_shift: A page is ``1 << page_shift`` bytes.
    """

    memory_size: int
    page_shift: int = _DEFAULT_PAGE_SHIFT

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return 1 << self.page_shift

    @classmethod
    def parse(cls, name: str, text: str, limit: int | None = None) -> PoolOptions:
        """Parse the JSON object ``text`` of option ``name``; fields it does not know give one warning.

        Args:
            name: The option, for messages.
            text: ``{"memory_size": bytes, "page_shift": 10..30 (optional, 16)}``.
            limit: Most bytes allowed, if there is a limit.

        Raises:
            ParamError: naming the field that breaks a rule.
            TypeError: ``text`` is no str.
        """
        fields = parse_json(name, check_type(name, text, str))
        if not isinstance(fields, dict):
            raise ParamError(f"{name}: {text[:200]!r} is no JSON object")
        pool = cls(
            _integer(name, fields, "memory_size"), _integer(name, fields, "page_shift", default=_DEFAULT_PAGE_SHIFT)
        )
        pool.check(name, limit)
        unknown = sorted(set(fields) - {"memory_size", "page_shift"})
        if unknown:
            logger.warning("%s: unknown fields ignored: %s", name, ", ".join(unknown))
        return pool

    def check(self, name: str, limit: int | None = None) -> None:
        """Raise ParamError, naming option ``name`` and the field, if the sizes break a rule."""
        size, shift = self.memory_size, self.page_shift
        check_rule(size > 0, f"{name}: memory_size is {size}, it must be above 0")
        check_rule(
            _MIN_PAGE_SHIFT <= shift < _PAGE_SHIFT_END,
            f"{name}: page_shift is {shift}, outside [{_MIN_PAGE_SHIFT}, {_PAGE_SHIFT_END})",
        )
        check_rule(
            self.page_bytes <= size,
            f"{name}: memory_size is {size}, below one page of {self.page_bytes} bytes (page_shift {shift})",
        )
        check_rule(
            size >> shift < _PAGES_END,
            f"{name}: memory_size is {size}, {size >> shift} pages; below {_PAGES_END} are possible, raise page_shift",
        )
        if limit is not None:
            check_rule(size <= limit, f"{name}: memory_size is {size}, above the limit of {limit} bytes")


def check_buf_pool(name: str, text: str) -> None:
    """Check the size classes of the older pool (API §7.3); they have no effect here.

    Raises ParamError naming the field that breaks a rule.
    """
    fields = parse_json(name, text)
    classes = fields.get("buf_cfg") if isinstance(fields, dict) else None
    if not isinstance(classes, list) or not all(isinstance(entry, dict) for entry in classes):
        raise ParamError(f"{name}: {text[:200]!r} has no list of objects named buf_cfg")
    previous = 0
    for i, entry in enumerate(classes):
        previous = _check_buf_class(f"{name}: buf_cfg[{i}]", entry, previous)


def _check_buf_class(name: str, entry: dict[str, Any], previous: int) -> int:
    """Check one size class; return its max_buf_size, which the next one must exceed."""
    total, block, largest = (_integer(name, entry, field) for field in ("total_size", "blk_size", "max_buf_size"))
    check_rule(
        0 < block <= _MIB2 and block & (block - 1) == 0,
        f"{name}: blk_size is {block}, no power of two in (0, {_MIB2}]",
    )
    check_rule(
        0 < total <= 0xFFFFFFFF and total % _MIB2 == 0 and total % block == 0,
        f"{name}: total_size is {total}, no multiple of {_MIB2} and of blk_size {block} up to {0xFFFFFFFF}",
    )
    check_rule(
        block <= largest < total, f"{name}: max_buf_size is {largest}, outside [blk_size {block}, total_size {total})"
    )
    check_rule(largest > previous, f"{name}: max_buf_size is {largest}, not above the previous one, {previous}")
    return largest
