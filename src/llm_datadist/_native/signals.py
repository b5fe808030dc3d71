"""Calls in which other code of the user runs only where it does no harm: handlers of signals, and finalizers.

The interpreter runs the handler of a signal in the main thread, between any two instructions, and the handler may
raise: ``KeyboardInterrupt``, or what an engine raises to end itself. Inside of a ``finally`` that would leave a lock
held, a pin that is never given back, or a lane that writes into memory which its owner believes free. So every public
call, and every finaliser, *holds* signals. A caller that waits calls :func:`deliver_signals`, where it holds no lock
and where an exception is one more way for the wait to fail. After one exception no handler runs until the call ends.

The garbage collector runs finalizers (``__del__``) wherever a thread allocates: below a lock of the library too, which
the finalizer would wait for in vain. So a call that gives something back asks :func:`put_off` first. Inside of another
call of its thread it is queued, and done when the outermost one ends. Calls that promise more at their return use
:func:`require_outermost`. Threads of the library run their work as such calls.

Threads: signals concern the main thread only. What another thread raises here by ``PyThreadState_SetAsyncExc`` is not
held.
"""

from __future__ import annotations

from functools import WRAPPER_ASSIGNMENTS, update_wrapper
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from llm_datadist._native._native import HoldingCall, do_what_was_put_off, inside_another_call, put_off
from llm_datadist.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["do_what_was_put_off", "hold_signals", "public_calls_hold_signals", "put_off", "require_outermost"]

F = TypeVar("F", bound="Callable[..., Any]")
C = TypeVar("C", bound=type)

#: Attributes of a function that :mod:`inspect` reads of all that looks like one.
_COPIED: Final = (*WRAPPER_ASSIGNMENTS, "__code__", "__defaults__", "__kwdefaults__", "__globals__", "__closure__")


def hold_signals(function: F, undo: Callable[[Any, Any], object] | None = None, *, whole: bool = False) -> F:
    """Make a function hold signals.

    ``undo(self, result)`` takes a call back that was done when the exception of a handler came: its caller never gets
    the result. ``whole``: no handler runs before the call has ended, wherever it waits.
    """
    call = HoldingCall(function, undo, whole)
    return update_wrapper(call, function, _COPIED)  # type: ignore[return-value]  # it is as callable


def require_outermost(call: str) -> None:
    """Raise StateError if the thread is inside of another call, or is one of the library's."""
    if inside_another_call():
        raise StateError(
            f"{call}: called by a finalizer or a callback inside of another call of this library: it would have to "
            "wait for that; call it after that one, or from another thread"
        )


def public_calls_hold_signals(*, whole: tuple[str, ...] = (), **undone_by: str) -> Callable[[C], C]:
    """Make the public methods of a class hold signals, those in ``whole`` to their end.

    ``undone_by`` names, for a method, the one that takes its result back.
    """

    def decorate(kind: C) -> C:
        for name, member in list(vars(kind).items()):
            if type(member) is FunctionType and not name.startswith("_"):  # a call that holds signals looks like one
                setattr(kind, name, hold_signals(member, _undo(undone_by.get(name)), whole=name in whole))
        return kind

    return decorate


def _undo(method: str | None) -> Callable[[Any, Any], object] | None:
    return None if method is None else lambda self, result: getattr(self, method)(result)
