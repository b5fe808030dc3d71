"""Calls that hold signal handlers and finalizers of the user back until they do no harm.

A Python signal handler runs in the main thread between any two instructions, and may raise. In a ``finally`` that would
leave a lock held, a pin unreleased, or a lane writing into freed memory. So public calls and finalizers *hold* signals.
A caller that waits without a lock calls :func:`deliver_signals`. After one exception no handler runs until the call
ends. Exceptions by ``PyThreadState_SetAsyncExc`` are not held.

Finalizers run wherever a thread allocates, also under a lock that they would wait for. So cleanup asks :func:`put_off`,
which queues it until the thread's outermost call ends; calls that cannot be late use :func:`require_outermost`. Threads
of the library run their work as such calls.

In a forked child the wrapper refuses calls of an :class:`OfProcess`: threads of the parent may have held any lock.
"""

from __future__ import annotations

from functools import WRAPPER_ASSIGNMENTS, update_wrapper
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from llm_datadist._checks import HERE, require_process
from llm_datadist._native._native import HoldingCall, do_what_was_put_off, inside_another_call, put_off
from llm_datadist.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["do_what_was_put_off", "hold_signals", "public_calls_hold_signals", "put_off", "require_outermost"]

F = TypeVar("F", bound="Callable[..., Any]")
C = TypeVar("C", bound=type)

#: Attributes of a function that :mod:`inspect` reads of all that looks like one.
_COPIED: Final = (*WRAPPER_ASSIGNMENTS, "__code__", "__defaults__", "__kwdefaults__", "__globals__", "__closure__")


class OfProcess:
    """Base of objects whose public calls (:func:`public_calls_hold_signals`) are StateErrors in a forked child."""

    __slots__ = ("_pid",)
    _pid: int

    def __new__(cls, *_: object, **__: object) -> Self:
        """Note the process, before a constructor may fail or start a thread."""
        self = super().__new__(cls)
        self._pid = HERE["pid"]
        return self


def _refuse(self: OfProcess, function: FunctionType) -> None:
    require_process(self._pid, f"{function.__name__}: {type(self).__name__}")


def hold_signals(
    function: F, undo: Callable[[Any, Any], object] | None = None, *, whole: bool = False, owned: bool = False
) -> F:
    """Make a function hold signals; with ``whole``, also where it waits.

    ``undo(self, result)`` reverts a call if a handler's exception replaces its result. With ``owned`` the first
    argument is an :class:`OfProcess`.
    """
    call = HoldingCall(function, undo, whole, _refuse if owned else None)
    return update_wrapper(call, function, _COPIED)  # type: ignore[return-value]  # as callable


def require_outermost(call: str) -> None:
    """Raise StateError inside another call of this thread, and on threads of the library."""
    if inside_another_call():
        raise StateError(
            f"{call}: called by a finalizer or a callback inside of another call of this library: it would have to "
            "wait for that; call it after that one, or from another thread"
        )


def public_calls_hold_signals(
    *, whole: tuple[str, ...] = (), plain: tuple[str, ...] = (), **undone_by: str
) -> Callable[[C], C]:
    """Make a class's public calls hold signals; ``undone_by`` maps them to methods that revert them.

    Those of an :class:`OfProcess` include its properties. ``plain`` ones stay as they are.
    """

    def decorate(kind: C) -> C:
        owned = issubclass(kind, OfProcess)
        for name, member in list(vars(kind).items()):
            if name in plain or (name.startswith("_") and name not in undone_by):
                continue
            if type(member) is FunctionType:  # a call that holds signals looks like one
                undo = _undo(undone_by.get(name))
                setattr(kind, name, hold_signals(member, undo, whole=name in whole, owned=owned))
            elif owned and type(member) is property and member.fget is not None:
                setattr(kind, name, member.getter(hold_signals(member.fget, owned=True)))
        return kind

    return decorate


def _undo(method: str | None) -> Callable[[Any, Any], object] | None:
    return None if method is None else lambda self, result: getattr(self, method)(result)
