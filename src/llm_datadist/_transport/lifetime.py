"""Lifetime of objects that any thread uses and closes."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Self

from llm_datadist._checks import HERE
from llm_datadist._native import UseGate
from llm_datadist._native.signals import hold_signals
from llm_datadist.errors import LinkError, StateError


class Lifetime(AbstractContextManager["Lifetime"]):
    """Count of running calls: the last one after :meth:`close` releases what the object owns.

    So a lost link never unmaps memory during a copy. ``_aborted``: running calls shall fail.
    Threads: any.
    Errors: in a forked child calls raise StateError; close drops only its references.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = HERE["pid"]
        self._users = UseGate()  # counts running calls; shut by close()
        self._aborted = False

    @abstractmethod
    def _release(self) -> None:
        """Give back what the object owns: once, without a lock, after the last call."""

    @property
    def closed(self) -> bool:
        return not self._users.is_open

    def close(self) -> None:
        """Refuse new calls, and release everything once running calls have ended. Idempotent; never waits."""
        if self._pid != HERE["pid"] and self._users.is_open:
            # A thread that only the parent has may be inside; it never leaves in this process.
            self._users = UseGate()
        if self._users.shut() == 0:
            self._release()

    def abort(self) -> None:
        """:meth:`close`, and let running calls fail with TransferAborted. Idempotent; never waits."""
        self._aborted = True
        self.close()

    def _enter(self, call: str) -> None:
        if self._pid != HERE["pid"] or not self._users.try_enter():
            raise unusable(self, call)

    def _leave(self) -> None:
        if not self._users.try_leave() and self._users.leave() == 0:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @hold_signals
    def __del__(self) -> None:
        # The last reference, so the count does not matter. A constructor may have failed half way.
        if not hasattr(self, "_users") or self.closed:
            return
        self._users.shut()
        if self._pid == HERE["pid"]:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
        self._release()


def unusable(what: Lifetime, call: str) -> StateError | LinkError:
    if what._pid != HERE["pid"]:
        return StateError(f"{call}: this {what._what} belongs to process {what._pid}, not us")
    return LinkError(f"{call}: the {what._what} is closed; link again", phase="copy")
