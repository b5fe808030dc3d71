"""Limits of a process, reached for a while: descriptors that it may open, threads that the library may start."""

import mmap
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.support import fakecuda
from tests.support.world import World

_OUT_OF_MEMORY: Final = 2  # CUDA_ERROR_OUT_OF_MEMORY


@contextmanager
def few_descriptors(free: int) -> Iterator[None]:
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
def few_threads(free: int, named: str = "llm-datadist") -> Iterator[None]:
    """Let ``free`` more threads start whose names begin so, by default the library's; others are not counted."""
    real, left = threading.Thread.start, [None] * free

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith(named):
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
        real(thread)

    setattr(threading.Thread, "start", start)  # noqa: B010 (no assignment to a method)
    try:
        yield
    finally:
        setattr(threading.Thread, "start", real)  # noqa: B010


@contextmanager
def few_device_allocations(free: int) -> Iterator[None]:
    """Let so many more allocations of a fake GPU, and of memory pinned for it, succeed, of each kind."""
    fake = fakecuda.load()
    for name in ("cuMemCreate", "cuMemAlloc_v2", "cuMemAllocHost_v2"):
        fake.fail(name, _OUT_OF_MEMORY, after=free, times=1 << 30)
    try:
        yield
    finally:
        fake.heal()


def take(world: World, limit: Any, *free: Any) -> None:
    world.memory["few"] = limit(*free)
    world.memory["few"].__enter__()


def give(world: World) -> None:
    world.memory.pop("few").__exit__(None, None, None)


@contextmanager
def little_memory(free: int) -> Iterator[None]:
    """Leave the process so many bytes of address space; threads need some, too."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
