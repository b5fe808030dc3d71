"""Argument checks; errors have the argument's name, its value and the rule (interface R1, §1.3).

A wrong type is TypeError, a forbidden None NoneArgument, a broken rule or width ParamError. ``bool`` and types with
``__index__`` (``np.int64``) count as int.
"""

from __future__ import annotations

import ipaddress
import mmap
import operator
import os
import re
import reprlib
import socket
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Self, TypeVar, overload

from llm_datadist.errors import LLMException, LLMStatusCode, NoneArgument, OutOfMemory, ParamError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")

INVALID_ID: Final = 2**64 - 1
"""The largest uint64: "no id" for a request or prefix."""

_INNER: Final = "inner type only support"
_ODD: Final = re.compile("[\0\ud800-\udfff]")  # compiled now: init may lack memory for it


def type_error(name: str, value: object, types: type | tuple[type, ...], rule: str = "only support") -> TypeError:
    """Build the error for a wrong type; NoneArgument for None."""
    allowed = ", ".join(t.__name__ for t in (types if isinstance(types, tuple) else (types,)))
    if value is None:
        return NoneArgument(f"{name} {rule} [{allowed}] but got None")
    return TypeError(f"{name} {rule} [{allowed}] but got {type(value).__name__}: {clean(reprlib.repr(value))}")


@overload
def check_type(name: str, value: object, types: type[T]) -> T: ...
@overload
def check_type(name: str, value: object, types: tuple[type[T], type[U]]) -> T | U: ...
@overload
def check_type(name: str, value: object, types: tuple[type[T], type[U], type[V]]) -> T | U | V: ...
def check_type(name: str, value: object, types: type | tuple[type, ...]) -> Any:
    if isinstance(value, types):
        return value
    raise type_error(name, value, types)


def check_callable(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` can be called."""
    if not callable(value):
        raise type_error(name, value, FunctionType)


def check_int(name: str, value: object) -> int:
    """Return ``value`` as an int of any width."""
    try:
        return operator.index(value)  # type: ignore[arg-type]  # no __index__: handled below
    except TypeError:
        raise type_error(name, value, int) from None


def _integer_check(kind: str, low: int, high: int) -> Callable[[str, object], int]:
    def check(name: str, value: object) -> int:
        if type(value) is int and low <= value <= high:
            return value
        number = check_int(name, value)
        if not low <= number <= high:
            raise ParamError(f"{name}: {number} is outside [{low}, {high}] ({kind})")
        return number

    check.__name__ = check.__qualname__ = f"check_{kind}"
    check.__doc__ = f"Return ``value`` as an int in [{low}, {high}]. Raises TypeError, NoneArgument or ParamError."
    return check


check_uint64 = _integer_check("uint64", 0, 2**64 - 1)
check_uint32 = _integer_check("uint32", 0, 2**32 - 1)
check_uint16 = _integer_check("uint16", 0, 2**16 - 1)
check_uint8 = _integer_check("uint8", 0, 2**8 - 1)
check_int64 = _integer_check("int64", -(2**63), 2**63 - 1)
check_int32 = _integer_check("int32", -(2**31), 2**31 - 1)


def check_list(name: str, value: object, inner: type[T]) -> list[T] | tuple[T, ...]:
    items: list[T] | tuple[T, ...] = check_type(name, value, (list, tuple))
    for i, item in enumerate(items):
        if not isinstance(item, inner):
            raise type_error(f"{name}[{i}]", item, inner, _INNER)
    return items


def check_uint64_list(name: str, value: object, *, tuple_ok: bool = True) -> list[int]:
    """Return the elements of a list, or with ``tuple_ok`` of a tuple, as a new list of ints in [0, 2**64)."""
    items = check_type(name, value, (list, tuple)) if tuple_ok else check_type(name, value, list)
    # Elements get a name only for an error.
    return [
        x if type(x) is int and 0 <= x <= INVALID_ID else check_uint64(f"{name}[{i}]", x) for i, x in enumerate(items)
    ]


def check_dict(name: str, value: object, key: type[T], inner: type[U]) -> dict[T, U]:
    if not isinstance(value, dict):
        raise type_error(name, value, dict)
    for k, v in value.items():
        if not isinstance(k, key):
            raise type_error(f"key of {name}", k, key, _INNER)
        if not isinstance(v, inner):
            raise type_error(f"{name}[{k!r}]", v, inner, _INNER)
    return value


def check_range(name: str, value: object, *, empty_ok: bool = True) -> range:
    """Return ``value``, a range with step 1 and start >= 0 (interface §6.10)."""
    layers = check_type(name, value, range)
    if layers.step != 1:
        raise ParamError(f"{name}: {layers} has step {layers.step}, only 1 is allowed")
    if layers.start < 0:
        raise ParamError(f"{name}: {layers} starts at {layers.start}, below layer 0")
    if not empty_ok and not layers:
        raise ParamError(f"{name}: {layers} is empty, start must be below stop")
    return layers


def _read_only(name: str, value: object) -> NoReturn:
    raise AttributeError(f"{name} is read-only, so it cannot become {value!r}")


def assign_known(instance: object, name: str, value: object) -> None:
    """Assign an attribute, unless its name is public and the class lacks it.

    For such a name raise AttributeError, which suggests the nearest known name. :class:`Attribute` makes this function
    the ``__setattr__`` of classes at run time: type checkers that saw a ``__setattr__`` would allow every name.
    """
    if name[0] != "_" and not hasattr(type(instance), name):
        known = [each for each in dir(instance) if each[0] != "_"]
        raise AttributeError(f"{type(instance).__name__} has no attribute {name!r}{nearest(name, known)}")
    object.__setattr__(instance, name, value)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a text about an unknown name: the known one that is nearest, if any is near."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


class Attribute(Generic[T]):
    """Documented attribute ``x`` of a public class, kept in ``_x``; ``check`` returns the new value."""

    def __init__(self, doc: str, check: Callable[[str, Any], T] = _read_only) -> None:
        self.__doc__ = doc
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._field = f"_{name}"
        type.__setattr__(owner, "__setattr__", assign_known)

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object, owner: type) -> Self | T:
        if instance is None:
            return self
        value: T = getattr(instance, self._field)
        return value

    def __set__(self, instance: object, value: T) -> None:
        setattr(instance, self._field, self._check(self._name, value))


def is_ipv6(text: str) -> bool:
    """Return True for an IPv6 address without brackets."""
    try:
        return bool(socket.inet_pton(socket.AF_INET6, text))
    except (OSError, ValueError):
        return False


def is_ip(value: object) -> bool:
    """Return True for an IPv4 address, or an IPv6 address without brackets."""
    try:
        return isinstance(value, str) and (is_ipv6(value) or bool(socket.inet_pton(socket.AF_INET, value)))
    except (OSError, ValueError):
        return False


def check_unscoped(name: str, text: str) -> None:
    """Raise ParamError if an IPv6 address names an interface, which has another name at peers."""
    rule = "an address with a scope (%) is link-local, which is not supported"
    instead = "give that host's IPv4, global or unique local (fd...) address"
    check_rule("%" not in text, f"{name}: {text!r}: {rule}; {instead}")


def is_loopback(host: str) -> bool:
    """Return True for a loopback address or ``localhost``; other names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def clean(text: str, most: int = 4096) -> str:
    """Return a text of a peer for people: one line of printable characters, at most ``most`` of them.

    Call it where the text enters, so that exceptions, logs, metrics and tables need not. Never compare its result.
    """
    line = " ".join(text[:most].split())
    return line if line.isprintable() else "".join(each if each.isprintable() else "?" for each in line)


def is_digits(text: str) -> bool:
    """Return True for 1 to 20 ASCII digits, as many as a uint64 can have."""
    return text.isascii() and text.isdigit() and len(text) <= 20


def temporary_folder() -> str:
    """Return the folder of temporary files. FileNotFoundError names those tried, and TMPDIR, if none can be written."""
    import tempfile

    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        text = f"{error.strerror}; set TMPDIR to a folder that this process may write"
        raise FileNotFoundError(error.errno, text) from None


def check_rule(condition: object, text: str) -> None:
    if not condition:
        raise ParamError(text)


def check_timeout(timeout: object, name: str = "timeout") -> None:
    """Check the milliseconds that a call may take."""
    milliseconds = check_int32(name, timeout)
    check_rule(milliseconds > 0, f"{name}={milliseconds}: milliseconds above 0 are needed")


def check_text(name: str, text: str) -> str:
    """Return ``text``. ParamError if it has a NUL or a surrogate, which no path, host or message can hold."""
    if found := _ODD.search(text):
        raise ParamError(f"{name}: {text[:200]!r} has {found[0]!r}: NUL and lone surrogates are not allowed")
    return text


def require_intact(condition: object, text: str) -> None:
    """Raise AssertionError unless ``condition`` is true, also under ``python -O``."""
    if not condition:
        raise AssertionError(text)


def check_enabled(condition: object, text: str) -> None:
    if not condition:
        raise LLMException(text, status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)


#: Address space for the error that none is left; untouched.
_reserve: Final[list[mmap.mmap]] = []


def _keep_reserve() -> None:
    with suppress(OSError, MemoryError):
        _reserve.append(mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


_keep_reserve()


@contextmanager
def typed_memory_error(what: str) -> Iterator[None]:
    """Turn a MemoryError of Python or native code into OutOfMemory."""
    if not _reserve:
        _keep_reserve()
    try:
        yield
    except MemoryError as error:
        if isinstance(error, LLMException):
            raise
        raise out_of_memory(what, error) from error


def out_of_memory(what: str, error: MemoryError) -> OutOfMemory:
    """Return the error; give up the reserve for its text."""
    try:  # noqa: SIM105 (suppress would take memory)
        _reserve.pop().close()
    except IndexError:
        pass
    return OutOfMemory(f"{what}: this process has no memory left: {error!r}")


#: Own pid, without a system call at each use.
HERE: Final = {"pid": os.getpid()}
os.register_at_fork(after_in_child=lambda: HERE.update(pid=os.getpid()))


def require_process(owner: int, what: str) -> None:
    """Raise StateError for ``what`` in a forked child of process ``owner``.

    It takes no lock: a thread of the parent may have held any at the fork.
    """
    if HERE["pid"] != owner:
        raise StateError(f"{what}: it belongs to process {owner}, of which this one is a fork; call it there")
