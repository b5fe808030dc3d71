"""Limits of a process, reached for a while: descriptors that it may open, threads that the library may start."""

from __future__ import annotations

import os
import resource
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["few_descriptors", "few_threads"]


@contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """Leave the process so many descriptors that it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1 + free, hard))
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            pass
        for each in [held.pop() for _ in range(min(free, len(held)))]:
            os.close(each)
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def few_threads(free: int) -> Iterator[None]:
    """Let ``free`` more threads of the library start; those of others are not counted."""
    real, left = threading.Thread.start, [None] * free

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("llm-datadist"):
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
        real(thread)

    setattr(threading.Thread, "start", start)  # noqa: B010 (no assignment to a method)
    try:
        yield
    finally:
        setattr(threading.Thread, "start", real)  # noqa: B010
