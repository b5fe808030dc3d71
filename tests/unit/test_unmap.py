"""Unmapping memory without a control thread that waits for it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from llm_datadist._memory import unmap
from llm_datadist._memory.segment import SharedSegment
from llm_datadist.testing.scene import residue, settled

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Kernel:
    """Stands for libc: notes which thread unmaps, and holds it up until told."""

    def __init__(self, libc: object) -> None:
        self._libc = libc
        self.threads: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def munmap(self, address: int, nbytes: int) -> None:
        self.threads.append(threading.current_thread().name)
        self.go_on.wait(10)
        self._libc.munmap(address, nbytes)  # type: ignore[attr-defined]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Kernel]:
    before = residue()
    kernel = _Kernel(unmap._libc)
    monkeypatch.setattr(unmap, "_libc", kernel)
    yield kernel
    assert settled(before) == before


def _drop(nbytes: int) -> None:
    with SharedSegment.create("x", nbytes, peers_may_write=True):
        pass


LARGE = unmap._SMALL_BYTES + 4096


def test_a_thread_that_must_not_wait_leaves_large_unmappings_to_another_one(kernel: _Kernel) -> None:
    kernel.go_on.clear()
    with unmap.never_wait_here():
        for _ in range(3):  # returns although the kernel does not
            _drop(LARGE)
    kernel.go_on.set()
    while len(kernel.threads) < 3:
        time.sleep(0.001)
    assert kernel.threads.count("llm-datadist-unmap") == 3


def test_every_other_thread_unmaps_by_itself(kernel: _Kernel) -> None:
    _drop(LARGE)
    assert kernel.threads == [threading.current_thread().name]


def test_without_a_thread_left_the_caller_unmaps(kernel: _Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with unmap.never_wait_here():
        _drop(LARGE)
        _drop(LARGE)
    assert kernel.threads == [threading.current_thread().name] * 2
