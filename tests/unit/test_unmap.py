"""Unmapping memory without a control thread that waits for it."""

from __future__ import annotations

import _thread
import os
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
        self.threads: list[int] = []
        self.sizes: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def munmap(self, address: int, nbytes: int) -> None:
        self.threads.append(threading.get_native_id())
        self.sizes.append(nbytes)
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
    while len(kernel.threads) < 6:
        time.sleep(0.001)
    assert threading.get_native_id() not in kernel.threads
    # Piece by piece: meanwhile no other thread could map anything.
    assert sorted(kernel.sizes) == [LARGE - unmap._SMALL_BYTES] * 3 + [unmap._SMALL_BYTES] * 3


def test_every_other_thread_unmaps_by_itself(kernel: _Kernel) -> None:
    _drop(LARGE)
    assert kernel.threads == [threading.get_native_id()]


@pytest.mark.parametrize("nbytes", [unmap._SMALL_BYTES, unmap._SMALL_SPARSE_BYTES])
def test_a_thread_that_must_not_wait_unmaps_what_is_small_by_itself(kernel: _Kernel, nbytes: int) -> None:
    owner = SharedSegment.create("x", nbytes, peers_may_write=True)
    peer = SharedSegment.attach(os.dup(owner.fd), nbytes, writable=False, sparse=nbytes > unmap._SMALL_BYTES)
    with unmap.never_wait_here():
        peer.close()
    assert kernel.threads == [threading.get_native_id()]
    owner.close()


def test_without_a_thread_left_the_caller_unmaps(kernel: _Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", start)
    with unmap.never_wait_here():
        _drop(LARGE)
        _drop(LARGE)
    assert kernel.threads == [threading.get_native_id()] * 2
