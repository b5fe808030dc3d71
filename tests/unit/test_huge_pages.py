"""Huge pages of a segment: all of it or an error, sealed and mapped at peers as any other."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist._memory import huge_pages
from llm_datadist._memory.segment import F_SEAL_FUTURE_WRITE, SharedSegment
from llm_datadist.errors import OutOfMemory, ParamError, ProtocolError
from llm_datadist.testing.scene import residue
from tests.support.huge import HUGE, given, mapped_huge

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("nothing_left")
GIVEN = pytest.mark.skipif(not given(), reason="this host gives no huge pages to shared memory")
MIB = 1 << 20


def new(nbytes: int, *, prefault: bool = False, peers_may_write: bool = False) -> SharedSegment:
    return SharedSegment.create("large", nbytes, peers_may_write=peers_may_write, prefault=prefault, huge_pages=True)


@GIVEN
@pytest.mark.parametrize("prefault", [False, True])
def test_all_of_it_is_huge_zero_and_sealed_and_a_peer_maps_it_as_such(prefault: bool) -> None:
    nbytes = 35 * HUGE  # more than one system call asks for
    with new(nbytes, prefault=prefault) as segment:
        assert segment.address % HUGE == 0
        assert os.fstat(segment.fd).st_blocks * 512 == nbytes  # all of its memory is there
        assert not segment.view().any()
        assert mapped_huge("large") == nbytes
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & seals == seals
        with pytest.raises(ProtocolError, match="not permitted"):
            SharedSegment.attach(os.dup(segment.fd), nbytes, writable=True)
        with SharedSegment.attach(segment.open_for_reading(), nbytes, writable=False) as peer:
            segment.view()[HUGE - 1 :: HUGE] = 7
            assert peer.view()[HUGE - 1 :: HUGE].tolist() == [7] * 35
            assert int(peer.view().sum()) == 7 * 35
            assert mapped_huge("large") == 2 * nbytes
    assert mapped_huge("large") == 0


@GIVEN
def test_a_size_that_is_no_multiple_is_refused_before_anything_is_made() -> None:
    for nbytes in (1, HUGE - 1, HUGE + 4096, 3 * MIB):
        with pytest.raises(ParamError, match=rf"'large'.*multiple of {HUGE} bytes, memory_size is {nbytes}"):
            new(nbytes)


class _Libc:
    """madvise of a kernel that answers as told, from the second call on."""

    def __init__(self, codes: list[int]) -> None:
        self._madvise: Callable[..., int] = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.codes = [0, *codes]

    def madvise(self, *args: Any) -> int:
        code = self.codes.pop(0) if self.codes else 0
        if code:
            ctypes.set_errno(code)
            return -1
        return self._madvise(*args)


NONE = "this host gives no huge pages.*shmem_enabled.*leave huge_pages out"


@GIVEN
@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOMEM, OutOfMemory), (errno.EBUSY, OutOfMemory), (errno.EPERM, ParamError)]
)
def test_what_the_kernel_refuses_is_an_error_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    """Too little memory in one piece, or no right to any."""
    monkeypatch.setattr(huge_pages, "_libc", _Libc([code]))
    before, short = residue(), rf"no more huge pages after {32 * HUGE} of {40 * HUGE} bytes"
    with pytest.raises(kind, match=short if kind is OutOfMemory else NONE) as refused:
        new(40 * HUGE)
    if isinstance(error := refused.value, OutOfMemory):
        assert (error.pool, error.requested, error.free) == ("large", 40 * HUGE, 32 * HUGE)
    assert residue() == before  # while the error is still there


@GIVEN
def test_a_page_that_is_busy_is_asked_for_again_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_libc", _Libc([errno.EAGAIN] * 3))
    with new(40 * HUGE):
        assert mapped_huge("large") == 40 * HUGE
    monkeypatch.setattr(huge_pages, "_libc", _Libc([errno.EAGAIN] * 1000))
    with pytest.raises(OutOfMemory, match="temporarily unavailable"):
        new(40 * HUGE)
