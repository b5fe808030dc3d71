"""Fixed values of any type of message: each field has its own, which follows from its name, and so implies no order."""

import hashlib
from typing import Any, Final

import msgspec
from msgspec import inspect

from tests.support.wire import Geometry

_U64: Final = 2**64
#: Names of kinds, and of fields by `Kind.field`, that have others now and the values of before.
FORMER: Final[dict[str, str]] = {}


def made(kind: Any, least: int = 0) -> Any:
    """Return a value with every field set; if ``least``, one with what may be missing or empty so."""
    return _made(inspect.type_info(kind), named(kind), least)


def named(kind: type) -> str:
    return FORMER.get(kind.__name__, kind.__name__)


def some(name: str, count: int = 16) -> bytes:
    return hashlib.shake_128(name.encode()).digest(count)


def _made(of: inspect.Type, name: str, least: int) -> Any:
    def each(kind: inspect.Type, part: object) -> Any:
        return _made(kind, f"{name}.{part}", least)

    match of:
        case inspect.StructType() | inspect.DataclassType() | inspect.NamedTupleType():
            fields = {FORMER.get(f"{of.cls.__name__}.{field.name}", field.name): field for field in of.fields}
            flags = sorted(former for former, field in fields.items() if isinstance(field.type, inspect.BoolType))
            assert len(flags) < 4
            # No two flags of a kind are equal in both of its values, and each is set in one.
            values = {former: bool(1 + number >> least & 1) for number, former in enumerate(flags)}
            values |= {former: each(field.type, former) for former, field in fields.items() if former not in flags}
            return of.cls(**{field.name: values[former] for former, field in fields.items()})
        case inspect.UnionType():
            (other,) = (kind for kind in of.types if not isinstance(kind, inspect.NoneType))
            return None if least else _made(other, name, least)
        case inspect.ListType() | inspect.VarTupleType():
            count = (of.min_length or 0) if least else min(2, of.max_length or 2)
            found = [each(of.item_type, number) for number in range(count)]
            return found if isinstance(of, inspect.ListType) else tuple(found)
        case inspect.TupleType():
            return tuple(each(kind, number) for number, kind in enumerate(of.item_types))
        case inspect.DictType():
            return {} if least else {each(of.key_type, "key"): each(of.value_type, "value")}
        case inspect.EnumType():
            return list(of.cls)[-1 - least]
        case inspect.RawType():
            return msgspec.Raw(msgspec.msgpack.encode(made(Geometry)))
        case inspect.BoolType():
            return not least
        case inspect.FloatType():
            return int.from_bytes(some(name, 4)) + 0.25
        case inspect.IntType():
            first = -(2**63) if of.ge is None else of.ge
            last = (of.le or (of.lt or 0) - 1) if of.le or of.lt else first + _U64 - 1
            return max(first, 0) if least else first + int.from_bytes(some(name, 8)) % (last - first + 1)
        case inspect.StrType():
            return "x" * (of.min_length or 0) if least else f"ö {name}"[: of.max_length]
        case inspect.BytesType():
            return some(name, (of.min_length or 0) if least else min(of.min_length or 32, of.max_length or 32))
    raise TypeError(f"{name}: no values of {of}")
