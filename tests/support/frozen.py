"""Processes that answer nothing: stopped as a debugger or a frozen container stops them."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.ends import ChildEnd
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.ends import End

__all__ = ["freeze", "frozen"]


def freeze(end: End) -> None:
    """SIGSTOP, and wait until no thread of it runs any more: until then it may still answer."""
    assert isinstance(end, ChildEnd), "it is in this process"
    end.signal(signal.SIGSTOP)
    threads = Path(f"/proc/{end.pid}/task")

    def state(thread: Path) -> str:
        return (thread / "stat").read_text("ascii").rpartition(")")[2].split()[0]

    wait_until(lambda: all(state(thread) == "T" for thread in threads.iterdir()))


@contextmanager
def frozen(end: End) -> Iterator[None]:
    """The process answers nothing meanwhile."""
    assert isinstance(end, ChildEnd), "it is in this process"
    try:
        freeze(end)
        yield
    finally:
        end.signal(signal.SIGCONT)
