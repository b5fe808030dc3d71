"""Helpers that existing code imports by path: checks, statuses, layer arithmetic (interface R23).

The library uses the stricter ``_checks.py``. The alias modules (``status``, ``utils/``, ``v2/``) import from here.
Source: interface §1.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from llm_datadist._checks import (
    check_int,
    check_int32,
    check_int64,
    check_range,
    check_type,
    check_uint8,
    check_uint16,
    check_uint32,
    check_uint64,
)
from llm_datadist._log import logger
from llm_datadist.errors import LLMException, LLMStatusCode, NoneArgument, ParamError, code_2_status

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "check_dict",
    "check_isinstance",
    "check_layer_range",
    "check_list_int32",
    "check_list_int64",
    "check_list_uint8",
    "check_list_uint16",
    "check_list_uint32",
    "check_list_uint64",
    "check_positive_or_set_default",
    "handle_llm_status",
    "layer_range_to_tensor_indices",
    "raise_if_false",
    "raise_if_true",
]

Types = type | list[type] | tuple[type, ...]


def raise_if_false(
    pred: object, fmt: str, *args: object, status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID
) -> None:
    """Log a text at ERROR and raise it unless ``pred`` is true.

    Args:
        fmt: The text, a template for ``args`` in ``%`` or ``{}`` style.
        status_code: The exception's status.

    Raises:
        ParamError, LLMException: With ``LLM_PARAM_INVALID``; with another status.
    """
    if not pred:
        _log_and_raise(_filled(fmt, args), status_code)


def raise_if_true(
    pred: object, fmt: str, *args: object, status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID
) -> None:
    """Do as :func:`raise_if_false`, but if ``pred`` is true."""
    if pred:
        _log_and_raise(_filled(fmt, args), status_code)


def handle_llm_status(status: int | LLMStatusCode, func_name: str, other_info: object = "") -> None:
    """Raise the exception of a status, as :func:`raise_if_false` does, unless it is ``LLM_SUCCESS``.

    Args:
        status: Any number; one without a name counts as ``LLM_FAILED``.
        func_name: Caller's name in the text, such as ``"[pull_cache]"``.
        other_info: End of the text.
    """
    code = code_2_status(check_int("status", status))
    if code is not LLMStatusCode.LLM_SUCCESS:
        _log_and_raise(f"{func_name} failed: {code.name} ({check_int('status', status)}), {other_info}", code)


def _log_and_raise(text: str, status_code: LLMStatusCode) -> NoReturn:
    logger.error("%s", text, stacklevel=3)
    if status_code is LLMStatusCode.LLM_PARAM_INVALID:
        raise ParamError(text)
    raise LLMException(text, status_code=status_code)


def _filled(fmt: str, args: tuple[object, ...]) -> str:
    """Fill a template in either style; return both if the arguments do not fit."""
    if not args:
        return fmt
    try:
        return fmt.format(*args) if "{" in fmt else fmt % args
    except (TypeError, ValueError, LookupError, AttributeError):
        return f"{fmt} {args}"


def check_isinstance(
    name: str, value: object, types: Types, inner: Types | None = None, extra_fmt: str = "", allow_none: bool = True
) -> None:
    """Check the type of an argument and of a container's elements. **None passes by default.**

    Args:
        types: Allowed class or classes; a bool counts as int.
        inner: Those of its elements, of a dict's keys. Default: None, unchecked.
        extra_fmt: Begin of the text.

    Raises:
        TypeError: ``name only support [...] but got ...``, for an element ``name inner type only support [...]``;
            ``NoneArgument`` for a refused None.
    """
    if value is None and allow_none:
        return
    if not isinstance(value, _classes(types)):
        raise _refusal(f"{extra_fmt}{name} only support", types, value)
    if inner is None:
        return
    for element in value if isinstance(value, (list, tuple, set, frozenset, dict)) else ():
        if not isinstance(element, _classes(inner)):
            raise _refusal(f"{extra_fmt}{name} inner type only support", inner, element)


def check_dict(name: str, d: object, ktype: Types, vtype: Types, v_inner: Types | None = None) -> None:
    """Check the types of a dict's keys, values and (``v_inner``) their elements; errors as :func:`check_isinstance`."""
    check_isinstance(name, d, dict, ktype, allow_none=False)
    for key, value in check_type(name, d, dict).items():
        check_isinstance(f"{name}[{key!r}]", value, vtype, v_inner, allow_none=False)


def check_positive_or_set_default(name: str, value: object) -> int:
    """Return an int that is not negative, or -1 for None.

    Raises:
        TypeError, ParamError: Not an int; negative.
    """
    if value is None:
        return -1
    number = check_int(name, value)
    if number < 0:
        raise ParamError(f"{name}: {number} is negative")
    return number


def _classes(types: Types) -> tuple[type, ...]:
    return (types,) if isinstance(types, type) else tuple(types)


def _refusal(rule: str, types: Types, value: object) -> TypeError:
    text = f"{rule} [{', '.join(each.__name__ for each in _classes(types))}] but got {type(value).__name__}"
    return NoneArgument(text) if value is None else TypeError(text)


def _list_check(kind: str, check: Callable[[str, object], int]) -> Callable[[str, object], None]:
    def check_each(name: str, value: object) -> None:
        for i, element in enumerate(check_type(name, value, (list, tuple))):
            check(f"{name}[{i}]", element)

    check_each.__name__ = check_each.__qualname__ = f"check_list_{kind}"
    check_each.__doc__ = f"Check a list or tuple of {kind}: another type is a TypeError, a number outside a ValueError."
    return check_each


check_list_uint64 = _list_check("uint64", check_uint64)
check_list_uint32 = _list_check("uint32", check_uint32)
check_list_uint16 = _list_check("uint16", check_uint16)
check_list_uint8 = _list_check("uint8", check_uint8)
check_list_int64 = _list_check("int64", check_int64)
check_list_int32 = _list_check("int32", check_int32)


def check_layer_range(name: str, layer_range: object) -> None:
    """Check a push's layer range: step 1 and ``0 <= start < stop``.

    Raises:
        TypeError, ParamError: Not a range; one that breaks the rule.

    Source: interface §6.12.
    """
    check_range(name, layer_range, empty_ok=False)


def layer_range_to_tensor_indices(layer_range: range, tensor_num_per_layer: int = 2) -> list[int]:
    """Return layers' tensor indices: of layer k ``tensor_num_per_layer`` ones from ``k * tensor_num_per_layer``.

    Raises:
        TypeError, ParamError: Wrong types; another step, a negative start, or no tensor per layer.

    Source: interface §5.
    """
    layers = check_range("layer_range", layer_range)
    per_layer = check_uint32("tensor_num_per_layer", tensor_num_per_layer)
    if per_layer == 0:
        raise ParamError("tensor_num_per_layer: 0, a layer has at least one tensor")
    return list(range(layers.start * per_layer, layers.stop * per_layer)) if layers else []
