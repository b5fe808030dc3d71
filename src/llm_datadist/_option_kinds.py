"""Kinds of option texts: words for docs/options.md, and a parser.

The parser takes the option's name and text, and raises ParamError that names them.
"""

from __future__ import annotations

import json
import math
import pwd
import re
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from llm_datadist._checks import check_rule, check_type, is_digits
from llm_datadist._log import logger
from llm_datadist._policy import PeerPolicy
from llm_datadist.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint

    V = TypeVar("V")
    Kind: TypeAlias = tuple[str, Callable[[str, str], V]]

TRANSPORTS: Final = ("auto", "inproc", "shm", "cma", "nixl", "tcp")
TRANSPORT_GROUP: Final = "llm_datadist.transports"
"""Entry points of transports; the name of one is the transport's."""
INT32_MAX: Final = 2**31 - 1
UINT32_MAX: Final = 2**32 - 1

_MIN_PAGE_SHIFT: Final = 10
_PAGE_SHIFT_END: Final = 31
_HOST_POOL_LIMIT: Final = 20 * 2**30
_MIB2: Final = 2 * 2**20


def _parse_flag(name: str, text: str) -> bool:
    check_rule(text in ("0", "1"), f"{name}: {text!r} is neither '0' nor '1'")
    return text == "1"


def whole(low: int, high: int) -> Kind[int]:
    def parse(name: str, text: str) -> int:
        if not is_digits(text) or not low <= int(text) <= high:
            raise ParamError(f"{name}: {text!r} is no whole number in [{low}, {high}]")
        return int(text)

    return f"{low} to {high}", parse


def _number(low: float, high: float, rule: str) -> Kind[float]:
    """Return the kind of a number; ``rule`` is the error out of bounds, with fields for number, text, bounds."""

    def parse(name: str, text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        check_rule(math.isfinite(number), f"{name}: {text!r} is no number")
        check_rule(low <= number <= high, f"{name}: {rule.format(number, text, low, high)}")
        return number

    return f"at least {low:g}" if high == math.inf else f"{low} to {high}", parse


def _path(values: str, rule: str) -> Kind[str]:
    def parse(name: str, text: str) -> str:
        check_rule(text, f"{name}: '' {rule}")
        return text

    return values, parse


def _parse_bytes(name: str, text: str) -> int:
    check_rule("," not in text, f"{name}: {text!r} lists several pools, only one is supported")
    check_rule(is_digits(text), f"{name}: {text!r} is no whole number of bytes")
    return int(text)


@cache
def transport_entries() -> tuple[EntryPoint, ...]:
    """Return the transports that installed packages declare; the first call reads all packages, in 11 to 49 ms."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=TRANSPORT_GROUP))


def _parse_transport(name: str, text: str) -> str:
    if text not in ("", *TRANSPORTS):
        foreign = sorted({each.name for each in transport_entries()} - {*TRANSPORTS})
        check_rule(text in foreign, f"{name}: {text!r} is unknown, known: {', '.join([*TRANSPORTS, *foreign])}")
    return text or "auto"


def _parse_users(name: str, text: str) -> frozenset[int]:
    def user_id(user: str) -> int:
        if is_digits(user) and int(user) < UINT32_MAX:
            return int(user)
        try:
            return pwd.getpwnam(user).pw_uid
        except KeyError:
            raise ParamError(f"{name}: {text!r}: {user!r} is neither a user id nor a user of this host") from None

    return frozenset(user_id(each.strip()) for each in text.split(","))


def parse_json(name: str, text: str) -> object:
    """Return the value of a JSON text. Raises ParamError with ``name`` and the place of the error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParamError(f"{name}: {text[:200]!r} is not valid JSON ({error})") from None


def _integer(name: str, fields: dict[str, Any], field: str) -> int:
    """Return a field that must be a JSON integer; ``true`` and ``1.0`` are not."""
    check_rule(field in fields, f"{name}: {field} is missing")
    value = fields[field]
    if type(value) is not int:
        raise ParamError(f"{name}: {field} is {value!r}, an integer is needed")
    return value


def parse_size(text: str) -> int | None:
    """Return the bytes of a text as "64MiB" or "67108864"; None if it is no size."""
    found = re.fullmatch(r"(\d{1,20}) ?(?:([KMGT])iB|B?)", text, re.ASCII)
    return None if found is None else int(found[1]) << 10 * " KMGT".index(found[2] or " ")


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Bytes of a memory pool, in pages of ``1 << page_shift`` bytes to which allocations are rounded up.

    With ``huge_pages`` (extension) the memory consists of huge pages.
    """

    memory_size: int
    page_shift: int = 16
    huge_pages: bool = False

    @property
    def page_bytes(self) -> int:
        return 1 << self.page_shift

    @classmethod
    def parse(cls, name: str, text: str, limit: int | None = None) -> PoolOptions:
        """Parse the JSON object ``text`` of option ``name``, or a size; an unknown field logs a warning.

        Raises ParamError with the field that breaks a rule, or a size above ``limit`` bytes.
        """
        if (size := parse_size(check_type(name, text, str))) is not None:
            fields: object = {"memory_size": size}
        else:
            broken = f"{name}: {text[:200]!r} is no size: bytes, or a number with KiB, MiB, GiB or TiB"
            check_rule(not text[:1].isdigit(), broken)
            fields = parse_json(name, text)
        if not isinstance(fields, dict):
            raise ParamError(f"{name}: {text[:200]!r} is no JSON object")
        huge_pages = fields.pop("huge_pages", False)
        check_rule(type(huge_pages) is bool, f"{name}: huge_pages is {huge_pages!r}, true or false is needed")
        size = _integer(name, fields, "memory_size")
        pool = cls(size, _integer(name, {"page_shift": 16} | fields, "page_shift"), huge_pages)
        pool.check(name, limit)
        if unknown := sorted(fields.keys() - {"memory_size", "page_shift"}):
            logger.warning("%s: unknown fields ignored: %s", name, ", ".join(unknown))
        return pool

    def check(self, name: str, limit: int | None = None) -> None:
        """Raise ParamError with option and field if the sizes break a rule."""
        size, shift, broken = self.memory_size, self.page_shift, ""
        if size <= 0:
            broken = f"memory_size is {size}, it must be above 0"
        elif not _MIN_PAGE_SHIFT <= shift < _PAGE_SHIFT_END:
            broken = f"page_shift is {shift}, outside [{_MIN_PAGE_SHIFT}, {_PAGE_SHIFT_END})"
        elif self.page_bytes > size:
            broken = f"memory_size is {size}, below one page of {self.page_bytes} bytes (page_shift {shift})"
        elif size >> shift >= UINT32_MAX:
            rule = f"below {UINT32_MAX} are possible, raise page_shift"
            broken = f"memory_size is {size}, {size >> shift} pages; {rule}"
        elif limit is not None and size > limit:
            broken = f"memory_size is {size}, above the limit of {limit} bytes"
        check_rule(not broken, f"{name}: {broken}")


def check_buf_pool(name: str, text: str) -> None:
    """Check the size classes of the older pool (interface §7.3). Raises ParamError with the field."""
    value = parse_json(name, text)
    classes = value.get("buf_cfg") if isinstance(value, dict) else None
    if not isinstance(classes, list) or not all(isinstance(entry, dict) for entry in classes):
        raise ParamError(f"{name}: {text[:200]!r} has no list of objects named buf_cfg")
    previous = 0
    for i, entry in enumerate(classes):
        where, broken = f"{name}: buf_cfg[{i}]", ""
        total, block, largest = (_integer(where, entry, each) for each in ("total_size", "blk_size", "max_buf_size"))
        if not 0 < block <= _MIB2 or block & (block - 1):
            broken = f"blk_size is {block}, no power of two in (0, {_MIB2}]"
        elif not 0 < total <= UINT32_MAX or total % _MIB2 or total % block:
            broken = f"total_size is {total}, no multiple of {_MIB2} and of blk_size {block} up to {UINT32_MAX}"
        elif not block <= largest < total:
            broken = f"max_buf_size is {largest}, outside [blk_size {block}, total_size {total})"
        elif largest <= previous:
            broken = f"max_buf_size is {largest}, not above the previous one, {previous}"
        check_rule(not broken, f"{where}: {broken}")
        previous = largest


def _one_of(*words: str) -> Kind[str]:
    def parse(name: str, text: str) -> str:
        check_rule(text in words, f"{name}: {text!r} is unknown, known: {', '.join(words)}")
        return text

    return ", ".join(words), parse


def _or_empty(parse: Callable[[str, str], object]) -> Kind[object]:
    return "JSON, or empty", lambda name, text: parse(name, text) if text else None


TEXT: Final[Kind[str]] = "any text", lambda _, text: text
HIXL: Final[Kind[str]] = "hixl", TEXT[1]  # checked with the options that it needs, later
FLAG: Final[Kind[bool]] = "0 or 1", _parse_flag
BYTES: Final[Kind[int]] = "bytes", _parse_bytes
SHARE: Final = _number(0.0, 1.0, "{0} is outside [{2}, {3}]")
# Below the bounds, links would mostly send heartbeats, or renew handshakes, which take some milliseconds.
SILENCE: Final = _number(0.1, math.inf, "{0} s, it must be above 0: {2} s at least")
LINK_AGE: Final = _number(1.0, math.inf, "{1!r} seconds, {2} s at least are needed")
FILE: Final = _path("a file", "names no file, leave it out")
DIRECTORY: Final = _path("a directory", "names no folder, leave it out for abstract sockets")
DEVICE_MEMORY: Final = _one_of("host", "cuda")
DEVICE_MOVER: Final = _one_of("auto", "kernel", "copy")
TRANSPORT: Final[Kind[str]] = f"{', '.join(TRANSPORTS)}, or an installed one", _parse_transport
USERS: Final[Kind[frozenset[int]]] = "user ids or names, comma-separated", _parse_users
POLICY: Final[Kind[PeerPolicy]] = "JSON, or a file that holds it", PeerPolicy.parse
POOL: Final = "bytes, a size as 64MiB, or JSON: memory_size, page_shift, huge_pages", PoolOptions.parse
HOST_POOL: Final = "as the device pool, at most 20 GiB", partial(PoolOptions.parse, limit=_HOST_POOL_LIMIT)
JSON: Final = _or_empty(parse_json)
SIZE_CLASSES: Final = _or_empty(check_buf_pool)
