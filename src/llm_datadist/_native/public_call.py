"""Public calls, and their errands: what no signal handler may stop half way.

A Python signal handler runs in the main thread between any two instructions, and may raise, also inside a ``finally``.
So a public call in the main thread is an errand of a thread ``lldd-call``, where no handler runs. The main thread waits
and runs handlers. Once one has raised, the errand raises CutOff where it waits (:func:`check_signals`), and the main
thread raises when it has ended. Calls that are too short for the 15 microseconds of a change of threads stay *here*, in
the caller's thread: all that they hold are native objects, which end with their ``with`` block or when they are freed,
and their rare parts are errands (:func:`elsewhere`, :func:`whole`).

Finalizers run wherever a thread allocates, also under a lock that they would wait for. So cleanup asks :func:`put_off`,
which queues it until the thread's outermost call ends; calls that cannot be late use :func:`require_outermost`. Threads
of the library run their work as such calls.

In a forked child the wrapper refuses calls of an :class:`OfProcess`: threads of the parent may have held any lock.
"""

from __future__ import annotations

from functools import update_wrapper, wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from llm_datadist._checks import HERE, require_process
from llm_datadist._native import _native
from llm_datadist._native._native import (
    CutOff,
    check_signals,
    do_what_was_put_off,
    for_main_thread,
    inside_another_call,
    put_off,
)
from llm_datadist.errors import ProtocolError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CutOff", "check_signals", "do_what_was_put_off", "for_main_thread", "inside_another_call", "put_off"]

F = TypeVar("F", bound="Callable[..., Any]")
PublicCall = type(_native.public_call(int, False, False, None))

C = TypeVar("C", bound=type)
P = ParamSpec("P")
T = TypeVar("T")


class OfProcess:
    """Base of objects whose public calls (:func:`public_calls`) are StateErrors in a forked child."""

    __slots__ = ("_pid",)
    _pid: int

    def __new__(cls, *_: object, **__: object) -> Self:
        """Note the process, before a constructor may fail or start a thread."""
        self = super().__new__(cls)
        self._pid = HERE["pid"]
        return self


def _refuse(self: OfProcess, function: FunctionType) -> None:
    require_process(self._pid, f"{function.__name__}: {type(self).__name__}")


def public_call(function: F, *, here: bool = False, whole: bool = False, owned: bool = False) -> F:
    """Make a function a public call; with ``owned`` the first argument is an :class:`OfProcess`.

    Unless ``here``, a call in the main thread is an errand; a ``whole`` one goes on to its end after a handler has
    raised. If the caller does not get its result then, the first argument's ``_cut_off(result)`` is called, if there is
    such a method. The call is never freed: it belongs to a class or a module.
    """
    call = _native.public_call(function, not here, whole, _refuse if owned else None)
    call.owned = owned  # type: ignore[attr-defined]  # for tests
    return update_wrapper(call, function)  # type: ignore[return-value]  # the call


def public_calls(
    *, here: tuple[str, ...] = (), whole: tuple[str, ...] = (), plain: tuple[str, ...] = ()
) -> Callable[[C], C]:
    """Make a class's public methods, and named ones, public calls: ``here`` and ``whole`` as :func:`public_call`.

    Awaited forms, and properties of an :class:`OfProcess`, stay here. ``plain`` methods are no public calls.
    """

    def decorate(kind: C) -> C:
        owned = issubclass(kind, OfProcess)
        for name, member in list(vars(kind).items()):
            if name in plain or (name.startswith("_") and name not in here + whole):
                continue
            if type(member) is FunctionType:
                stays = name in here or (name.endswith("_async") and name.removesuffix("_async") in vars(kind))
                setattr(kind, name, public_call(member, here=stays, whole=name in whole, owned=owned))
            elif owned and type(member) is property and member.fget is not None:
                setattr(kind, name, member.getter(public_call(member.fget, here=True, owned=True)))
        return kind

    return decorate


def elsewhere(function: Callable[P, T]) -> Callable[P, T]:
    """Make calls of a function in the main thread errands, also inside a public call that stays here."""
    return _errand(function, whole=False)


def whole(function: Callable[P, T]) -> Callable[P, T]:
    """:func:`elsewhere`, to the end: a handler that has raised does not cut it off."""
    return _errand(function, whole=True)


def _errand(function: Callable[P, T], *, whole: bool) -> Callable[P, T]:
    @wraps(function)
    def errand(*args: P.args, **named: P.kwargs) -> T:
        if not _native.in_main_thread():  # a native frame would not survive the exit's unwinding of daemon threads
            return function(*args, **named)
        return _native.elsewhere(function, args, named, whole)

    return errand


def raise_of_handler(error: Exception, function: Callable[..., object], *args: object) -> None:
    """Raise what a signal handler has raised inside ``function``, if that took it for an error of its own.

    It is so if the function, as an errand, does not fail again. Codecs do that with ValueError and TypeError.
    """
    try:
        elsewhere(function)(*args)
    except (ValueError, ProtocolError):
        return
    first: BaseException = error
    while (cause := first.__cause__ or first.__context__) is not None:
        first = cause
    raise first from None


def require_outermost(call: str) -> None:
    """Raise StateError inside another call of this thread, and on threads of the library."""
    if inside_another_call():
        raise StateError(
            f"{call}: called by a finalizer or a callback inside of another call of this library: it would have to "
            "wait for that; call it after that one, or from another thread"
        )
