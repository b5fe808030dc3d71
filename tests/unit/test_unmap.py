"""Unmapping memory without a control thread that waits for it."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from llm_datadist._memory import unmap
from llm_datadist._memory.segment import SharedSegment
from llm_datadist._native import unmap_elsewhere
from llm_datadist.testing.scene import residue, settled

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Kernel:
    """Notes which thread unmaps: the calling one, by libc, or another one."""

    def __init__(self, libc: object) -> None:
        self._libc = libc
        self.here = self.elsewhere = 0

    def munmap(self, address: int, nbytes: int) -> None:
        self.here += 1
        self._libc.munmap(address, nbytes)  # type: ignore[attr-defined]

    def unmap_elsewhere(self, address: int, nbytes: int, piece: int) -> bool:
        done = unmap_elsewhere(address, nbytes, piece)
        self.elsewhere += done
        return done


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Kernel]:
    before = residue()
    kernel = _Kernel(unmap._libc)
    monkeypatch.setattr(unmap, "_libc", kernel)
    monkeypatch.setattr(unmap, "unmap_elsewhere", kernel.unmap_elsewhere)
    yield kernel
    assert settled(before) == before  # all of it was unmapped, and no thread is left


def _drop(nbytes: int) -> None:
    with SharedSegment.create("x", nbytes, peers_may_write=True, prefault=True):
        pass


LARGE = unmap._SMALL_BYTES + 4096


def test_only_a_thread_that_must_not_wait_leaves_large_unmappings_to_another_one(kernel: _Kernel) -> None:
    with unmap.never_wait_here():
        for _ in range(3):
            _drop(LARGE)
        assert (kernel.here, kernel.elsewhere) == (0, 3)
        other = threading.Thread(target=_drop, args=(LARGE,))
        other.start()
        other.join()
    assert (kernel.here, kernel.elsewhere) == (1, 3)


@pytest.mark.parametrize("nbytes", [unmap._SMALL_BYTES, unmap._SMALL_SPARSE_BYTES])
def test_a_thread_that_must_not_wait_unmaps_what_is_small_by_itself(kernel: _Kernel, nbytes: int) -> None:
    owner = SharedSegment.create("x", nbytes, peers_may_write=True)
    peer = SharedSegment.attach(os.dup(owner.fd), nbytes, writable=False, sparse=nbytes > unmap._SMALL_BYTES)
    with unmap.never_wait_here():
        peer.close()
    assert (kernel.here, kernel.elsewhere) == (1, 0)
    owner.close()


def test_without_a_thread_left_the_caller_unmaps(kernel: _Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unmap, "unmap_elsewhere", lambda *_: False)
    with unmap.never_wait_here():
        _drop(LARGE)
        _drop(LARGE)
    assert kernel.here == 2
