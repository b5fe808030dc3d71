"""Processes that fork under load, and processes that leave as any interpreter does, in the middle of their calls."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import warnings
from typing import TYPE_CHECKING, Final

from llm_datadist.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from faults.campaign.journal import Journal

#: What a forked child does: it ends at once, ends as an interpreter does, or becomes another program.
CHILDREN: Final = ("os._exit", "sys.exit", "exec")
_SECONDS: Final = 20.0
#: Exit status of a child whose call was not refused.
_NOT_REFUSED: Final = 70


def leave() -> None:
    """End this process as ``sys.exit`` does in a main program: exit functions, destructors, then the process."""
    warnings.simplefilter("ignore", ResourceWarning)  # threads of the campaign stop where they are
    sys.unraisablehook = sys.__unraisablehook__
    ctypes.pythonapi.Py_Exit(0)


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except StateError:
        return True
    return False


class Child:
    """A forked child of the main thread. Owns the process until :meth:`wait`.

    First it makes ``calls``, with what it has a copy of: each has to be refused.
    """

    def __init__(self, how: str, calls: Sequence[Callable[[], object]]) -> None:
        self._how = how
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
            self._pid = os.fork()
        if self._pid == 0:
            if not all(map(_refused, calls)):
                os._exit(_NOT_REFUSED)
            if how == "sys.exit":
                leave()
            if how == "exec":
                os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", ""])
            os._exit(0)

    def wait(self, journal: Journal) -> None:
        limit = time.monotonic() + _SECONDS
        while not (ended := os.waitpid(self._pid, os.WNOHANG))[0]:
            if time.monotonic() > limit:
                journal.violation("hangs", f"a forked child that leaves by {self._how} has not ended")
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                return
            time.sleep(0.01)
        if code := os.waitstatus_to_exitcode(ended[1]):
            journal.violation("crashes", f"a forked child that leaves by {self._how} ended with {code}")
