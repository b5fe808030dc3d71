"""Other processes: one with private memory, for the tests of copies by the kernel's hand; and forked children."""

from __future__ import annotations

import ctypes
import os
import signal
import warnings
from collections.abc import Callable
from mmap import PAGESIZE, mmap
from typing import Any

import numpy as np

from llm_datadist._native import Canary, Tensors, peek_process
from tests.support import twin
from tests.support.ends import ChildEnd
from tests.support.world import World

MEMORY = 24 << 20  # private memory of the other process
COOKIE = b"cookie of holder"


def in_a_forked_child(check: Callable[[], object]) -> None:
    """Run a check in a forked child, which must end well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: fork beside threads
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(20)  # no child outlives a failed test
                check()
                os._exit(0)
            finally:
                os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Holder(ChildEnd):
    """Another process: private memory at ``address``; from ``edge`` on a page without access,
    with one before it, which begins with ``COOKIE``."""

    def __init__(self) -> None:
        super().__init__("holder", fresh=True)
        self.address, self.edge, self.canaries = self.do(_make)
        self.pidfd = os.pidfd_open(self.pid)

    def fill(self, data: twin.Bytes) -> None:
        self.do(_fill, data)

    def show(self, nbytes: int) -> Any:
        return self.do(_show, nbytes)

    def peek(self, other: Holder) -> bytes:
        """Return the first bytes of another one's memory, as this one sees them."""
        seen: bytes = self.do(_peek, other.pid, other.address)
        return seen

    def hide(self) -> None:
        self.do(_hide)

    def tensors(self, count: int, extent: int) -> Tensors:
        return Tensors(np.array([self.address + i * extent for i in range(count)], np.uint64), extent)

    @property
    def cookie_address(self) -> int:
        return self.edge - PAGESIZE

    def close(self) -> None:
        self.kill()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _make(world: World) -> tuple[int, int, tuple[int, int]]:
    memory, pages = np.zeros(MEMORY, np.uint8), mmap(-1, 2 * PAGESIZE)
    pages[: len(COOKIE)] = COOKIE
    edge = np.frombuffer(pages, np.uint8).ctypes.data + PAGESIZE
    # Not unmapped: something else could be mapped there.
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(edge), ctypes.c_size_t(PAGESIZE), 0) == 0
    first, second = Canary(), Canary()
    world.memory |= {"private": memory, "pages": pages, "canaries": (first, second)}
    return memory.ctypes.data, edge, (first.address, second.address)


def _fill(world: World, data: twin.Bytes) -> None:
    world.memory["private"][: data.size] = data


def _show(world: World, nbytes: int) -> Any:
    return world.memory["private"][:nbytes]


def _peek(_: World, pid: int, address: int) -> bytes:
    return peek_process(pid, address, 16)


def _hide(world: World) -> None:
    """As a process that may not be traced, whoever asks."""
    assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0
