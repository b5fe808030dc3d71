"""Segments: seals, ownership of descriptors and mappings, views; huge pages, and who unmaps."""

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import numpy as np
import pytest

from llm_datadist._memory import huge_pages, unmap
from llm_datadist._memory import segment as segments
from llm_datadist._memory.segment import F_SEAL_FUTURE_WRITE, Segment, SharedSegment, view_of
from llm_datadist._native import unmap_elsewhere
from llm_datadist._statistics_page import StatisticsPage
from llm_datadist.errors import LLMException, OutOfMemory, ParamError, ProtocolError, StateError
from llm_datadist.testing.scene import residue
from tests.support.huge import HUGE, given, mapped_huge

pytestmark = pytest.mark.usefixtures("nothing_left")

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
MIB = 1 << 20


def held() -> tuple[int, int]:
    """Return how many descriptors this process has, and how many bytes of memfds it maps."""
    return len(os.listdir("/proc/self/fd")), residue()["mapped bytes"]


def resident_bytes(segment: Segment) -> int:
    """Return how much of a segment's mapping is in memory; smaps is exact, the totals in status are not."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{segment.address:x}-"):
            return next(int(each.split()[1]) * 1024 for each in lines if each.startswith("Rss:"))
    raise AssertionError(f"{segment} is not in /proc/self/smaps")


def memfd(nbytes: int, seals: int, flags: int = 0) -> int:
    fd = os.memfd_create("theirs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def new(nbytes: int = MIB, *, peers_may_write: bool = False) -> SharedSegment:
    return SharedSegment.create("pool", nbytes, peers_may_write=peers_may_write)


def attach(segment: SharedSegment, *, writable: bool) -> SharedSegment:
    return SharedSegment.attach(os.dup(segment.fd), segment.nbytes, writable=writable)


# --- shared segments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("peers_may_write", "more"), [(True, 0), (False, F_SEAL_FUTURE_WRITE)])
def test_a_segment_is_zero_sealed_and_not_even_its_owner_can_resize_it(peers_may_write: bool, more: int) -> None:
    with new(10_000, peers_may_write=peers_may_write) as segment:
        view = segment.view()
        assert (view.shape, view.flags.writeable, bool(view.any())) == ((10_000,), True, False)
        assert view.ctypes.data == segment.address
        executable = 0x0020  # F_SEAL_EXEC, of kernels since 6.3
        assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & ~executable == SIZE_SEALS | fcntl.F_SEAL_SEAL | more
        assert fcntl.fcntl(segment.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        for size in (0, 10_000 - 4096, 10_000 + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, size)
        assert os.fstat(segment.fd).st_size == 10_000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [os.O_RDWR, os.O_RDONLY])
def test_a_user_who_was_given_a_descriptor_for_reading_opens_the_memory_no_second_time(mode: int) -> None:
    """What it was given still maps, for reading; that of a page to write in maps for both."""
    with new(peers_may_write=True) as segment, open(segment.open_for_peer(writable=False), "rb") as passed:
        assert stat.S_IMODE(os.fstat(segment.fd).st_mode) == 0o600
        script = (
            "import mmap, os, sys; fd, both, mode = map(int, sys.argv[1:]); os.setuid(54321)\n"
            "assert mmap.mmap(fd, 4096, prot=mmap.PROT_READ)[0] == 5\n"
            "mmap.mmap(both, 4096)[1] = 6\n"
            "try: os.open(f'/proc/self/fd/{fd}', mode)\n"
            "except PermissionError: sys.exit(3)"
        )
        segment.view()[0] = 5
        numbers = [passed.fileno(), segment.fd, mode]
        done = subprocess.run([sys.executable, "-c", script, *map(str, numbers)], pass_fds=numbers[:2], check=False)
        assert done.returncode == 3
        assert segment.view()[:3].tolist() == [5, 6, 0]


def test_a_peer_reads_along_and_writes_only_where_it_may_keeps_no_descriptor_and_outlives_the_owner() -> None:
    with new(peers_may_write=True) as segment, attach(segment, writable=True) as writer:
        writer.view(MIB - 2)[:] = 9
        assert (segment.view()[-3:].tolist(), writer.writable) == ([0, 9, 9], True)
    segment, (fds, nbytes) = new(), held()
    with attach(segment, writable=False) as reader:
        assert held() == (fds, nbytes + MIB)
        for mapped in (mmap.mmap, lambda fd, nbytes: os.pwrite(fd, b"x", 0)):
            with pytest.raises(PermissionError):
                mapped(segment.fd, MIB)
        with pytest.raises(ProtocolError, match=r"writable=True.*not permitted"):
            attach(segment, writable=True)
        segment.view()[:] = 7  # our own mapping stays writable
        segment.close()
        view = reader.view()
        assert ((view == 7).all(), reader.writable) == (True, False)
        with pytest.raises(ValueError, match="read-only"):
            view[5] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
        with pytest.raises(StateError, match="no descriptor"):
            _ = reader.fd


def test_a_receiver_refuses_what_is_unsealed_empty_of_another_size_or_no_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    lack = "lack shrink and grow"
    for fd, nbytes, text in (
        (memfd(MIB, 0), MIB, lack),
        (memfd(MIB, fcntl.F_SEAL_SHRINK), MIB, lack),
        (memfd(MIB, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), MIB, lack),
        (memfd(MIB - 1, SIZE_SEALS), MIB, f"announced as {MIB} bytes, its descriptor has {MIB - 1}"),
        (memfd(2 * MIB, SIZE_SEALS), MIB, f"announced as {MIB} bytes, its descriptor has {2 * MIB}"),
        (memfd(0, SIZE_SEALS), 0, "announced as 0 bytes"),
        (os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC), MIB, "must be tmpfs|its descriptor has 0"),
        (os.open(tmp_path / "file", os.O_RDWR | os.O_CLOEXEC), 4096, "must be tmpfs|Invalid argument|lack shrink"),
    ):
        with pytest.raises(ProtocolError, match=text):
            SharedSegment.attach(fd, nbytes, writable=False)


def test_a_receiver_refuses_huge_pages_that_the_owner_can_take_back() -> None:
    """A page of hugetlbfs that is punched out has no successor where none is free: SIGBUS for whoever reads it."""
    try:
        fd = memfd(2 * MIB, SIZE_SEALS, os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"this kernel makes no memfd on hugetlbfs: {error}")
    with pytest.raises(ProtocolError, match="file system 0x958458f6, must be tmpfs"):
        SharedSegment.attach(fd, 2 * MIB, writable=False)


def test_what_cannot_be_created_or_viewed_is_refused_by_its_reason() -> None:
    for nbytes in (0, -1, 1 << 64):
        with pytest.raises(ParamError, match=f"nbytes is {nbytes}"):
            new(nbytes)
    with pytest.raises(OutOfMemory, match=f"'pool' of {1 << 62} bytes cannot be created") as exhausted:
        new(1 << 62)
    assert (exhausted.value.pool, exhausted.value.requested) == ("pool", 1 << 62)
    assert isinstance(exhausted.value.__cause__, OSError)
    with pytest.raises(LLMException, match="Invalid argument") as caught:
        SharedSegment.create("x" * 300, MIB, peers_may_write=False)
    assert not isinstance(caught.value, OutOfMemory)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EINVAL
    with new(4096) as segment:
        assert [segment.view(*where).shape for where in ((100, 50), (100,), (4096,))] == [(50,), (3996,), (0,)]
        assert segment.view(100).ctypes.data == segment.address + 100
        for offset, size in ((-1, 1), (0, 4097), (4096, 1), (5000, None), (1, -1)):
            with pytest.raises(ParamError, match=f"offset {offset}"):
                segment.view(offset, size)


def test_prefault_takes_the_memory_at_once_and_untouched_pages_take_none() -> None:
    with SharedSegment.create("pool", 16 * MIB, peers_may_write=False, prefault=True) as segment:
        assert resident_bytes(segment) == 16 * MIB
        assert not segment.view().any()
    with new(1 << 30) as segment:
        assert segment.address % huge_pages.ALIGNMENT == 0
        segment.view()[0] = 1
        assert 0 < resident_bytes(segment) <= 2 * MIB


def test_close_is_idempotent_and_the_mapping_goes_with_the_last_view_in_any_thread() -> None:
    fds, nbytes = held()
    segment = new()
    address = segment.address
    words = segment.view(4096, 8192).view(np.uint64)[2:].reshape(2, -1)
    assert (held(), repr(segment)) == ((fds + 1, nbytes + MIB), f"<SharedSegment 'pool' {MIB} bytes at {address:#x}>")
    segment.close()
    segment.close()
    assert segment.closed
    assert (held(), repr(segment)) == ((fds, nbytes + MIB), f"<SharedSegment 'pool' {MIB} bytes closed>")
    for use in (lambda: segment.address, segment.view, lambda: segment.fd):
        with pytest.raises(StateError, match="'pool'"):
            use()
    words[:] = 0x0102030405060708
    assert int(words.sum() & np.uint64(0xFF)) == len(words.ravel()) * 8 % 256
    views = [words]
    del words
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert held() == (fds, nbytes)


_EXITS: Final = """
import os, sys, threading, weakref
from llm_datadist._memory.segment import SharedSegment

class Kept:
    pass

def churn():
    while True:
        SharedSegment.create("churn", 4096, peers_may_write=False).close()

sys.setswitchinterval(1e-6)
kept = [Kept() for _ in range(50_000)]
for each in kept:
    weakref.finalize(each, int)
weakref.finalize(kept[0], print, "finalized")
threading.Thread(target=churn, daemon=True).start()
"""


def test_mappings_that_come_and_go_at_exit_keep_nobody_elses_finalizers_from_running() -> None:
    """The interpreter runs none of them if another one is made or dropped while it collects them."""
    ended = subprocess.run([sys.executable, "-c", _EXITS], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "finalized\n", "")


def test_a_forgotten_one_is_a_resource_warning_and_is_closed_all_the_same() -> None:
    before = held()
    segment = new()
    peer = attach(segment, writable=False)
    with pytest.warns(ResourceWarning, match="unclosed segment"):
        del peer
    with pytest.warns(ResourceWarning, match="unclosed segment <SharedSegment 'pool'"):
        del segment
    assert held() == before


@pytest.mark.parametrize("old_kernel", [False, True])
def test_memory_that_is_shared_is_not_executable(monkeypatch: pytest.MonkeyPatch, old_kernel: bool) -> None:
    real, asked = os.memfd_create, []

    def memfd_create(name: str, flags: int) -> int:
        asked.append(flags & segments._MFD_NOEXEC_SEAL)
        if old_kernel and asked[-1]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(name, flags & ~segments._MFD_NOEXEC_SEAL if old_kernel else flags)

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    with SharedSegment.create("x", 4096, peers_may_write=True) as made:
        assert asked == ([8, 0] if old_kernel else [8])
        assert fcntl.fcntl(made.fd, fcntl.F_GET_SEALS) & SIZE_SEALS == SIZE_SEALS
        assert old_kernel or os.fstat(made.fd).st_mode & 0o111 == 0
    asked.clear()
    StatisticsPage(1, lambda: pytest.fail("nothing is published")).close()
    assert asked == ([8, 0] if old_kernel else [8])


# --- memory of the user, devices --------------------------------------------------------------------------------------


def test_a_view_reads_and_writes_the_users_bytes() -> None:
    memory = np.arange(256, dtype=np.uint8)
    view = view_of(memory.ctypes.data + 16, 4)
    assert view.tolist() == [16, 17, 18, 19]
    view[:] = 0
    assert memory[15:21].tolist() == [15, 0, 0, 0, 0, 20]
    for address, nbytes in ((0, 1), (-8, 8), (4096, 0), (4096, -1), (1 << 63, 1 << 63 | 1)):
        with pytest.raises(ParamError, match=f"address {address} and nbytes {nbytes}"):
            view_of(address, nbytes)


# --- huge pages -------------------------------------------------------------------------------------------------------

GIVEN = pytest.mark.skipif(not given(), reason="this host gives no huge pages to shared memory")


def huge(nbytes: int, *, prefault: bool = False) -> SharedSegment:
    return SharedSegment.create("large", nbytes, peers_may_write=False, prefault=prefault, huge_pages=True)


@GIVEN
@pytest.mark.parametrize("prefault", [False, True])
def test_all_of_it_is_huge_zero_and_sealed_and_a_peer_maps_it_as_such(prefault: bool) -> None:
    nbytes = 35 * HUGE  # more than one system call asks for
    with huge(nbytes, prefault=prefault) as segment:
        assert segment.address % HUGE == 0
        assert os.fstat(segment.fd).st_blocks * 512 == nbytes  # all of its memory is there
        assert not segment.view().any()
        assert mapped_huge("large") == nbytes
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & seals == seals
        with pytest.raises(ProtocolError, match="not permitted"):
            SharedSegment.attach(os.dup(segment.fd), nbytes, writable=True)
        with SharedSegment.attach(segment.open_for_peer(writable=False), nbytes, writable=False) as peer:
            segment.view()[HUGE - 1 :: HUGE] = 7
            assert peer.view()[HUGE - 1 :: HUGE].tolist() == [7] * 35
            assert int(peer.view().sum()) == 7 * 35
            assert mapped_huge("large") == 2 * nbytes
    assert mapped_huge("large") == 0


@GIVEN
def test_a_size_that_is_no_multiple_is_refused_before_anything_is_made() -> None:
    for nbytes in (1, HUGE - 1, HUGE + 4096, 3 * MIB):
        with pytest.raises(ParamError, match=rf"'large'.*multiple of {HUGE} bytes, memory_size is {nbytes}"):
            huge(nbytes)


def failing(*codes: int) -> Mock:
    """Return the libc of a kernel whose madvise answers as told, from the second call on."""
    real, left = ctypes.CDLL(None, use_errno=True).madvise, iter((0, *codes))
    real.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def madvise(*arguments: Any) -> int:
        if code := next(left, 0):
            ctypes.set_errno(code)
            return -1
        answer: int = real(*arguments)
        return answer

    return Mock(madvise=madvise)


@GIVEN
@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOMEM, OutOfMemory), (errno.EBUSY, OutOfMemory), (errno.EPERM, ParamError)]
)
def test_a_refusal_of_the_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]) -> None:
    """Too little memory in one piece, or no right to any."""
    monkeypatch.setattr(huge_pages, "_libc", failing(code))
    before, none = residue(), "this host gives no huge pages.*shmem_enabled.*leave huge_pages out"
    short = f"no more huge pages after {32 * HUGE} of {40 * HUGE} bytes"
    with pytest.raises(kind, match=short if kind is OutOfMemory else none) as refused:
        huge(40 * HUGE)
    if isinstance(error := refused.value, OutOfMemory):
        assert (error.pool, error.requested, error.free) == ("large", 40 * HUGE, 32 * HUGE)
    assert residue() == before  # while the error is still there


@GIVEN
def test_a_page_that_is_busy_is_asked_for_again_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_libc", failing(*[errno.EAGAIN] * 3))
    with huge(40 * HUGE):
        assert mapped_huge("large") == 40 * HUGE
    monkeypatch.setattr(huge_pages, "_libc", failing(*[errno.EAGAIN] * 1000))
    with pytest.raises(OutOfMemory, match="temporarily unavailable"):
        huge(40 * HUGE)


# --- unmapping --------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Notes who unmaps: the calling thread, by ``munmap``, or another one, ``elsewhere``."""
    kernel = Mock(munmap=Mock(wraps=unmap._libc.munmap), elsewhere=Mock(wraps=unmap_elsewhere))
    monkeypatch.setattr(unmap, "_libc", kernel)
    monkeypatch.setattr(unmap, "unmap_elsewhere", kernel.elsewhere)
    return kernel


def counted(kernel: Mock) -> tuple[int, int]:
    return kernel.munmap.call_count, kernel.elsewhere.call_count


def _drop(nbytes: int) -> None:
    with SharedSegment.create("x", nbytes, peers_may_write=True, prefault=True):
        pass


LARGE = unmap._SMALL_BYTES + 4096


def test_only_a_thread_that_must_not_wait_leaves_large_unmappings_to_another_one(kernel: Mock) -> None:
    with unmap.never_wait_here():
        for _ in range(3):
            _drop(LARGE)
        assert counted(kernel) == (0, 3)
        other = threading.Thread(target=_drop, args=(LARGE,))
        other.start()
        other.join()
    assert counted(kernel) == (1, 3)


@pytest.mark.parametrize("nbytes", [unmap._SMALL_BYTES, unmap._SMALL_SPARSE_BYTES])
def test_a_thread_that_must_not_wait_unmaps_what_is_small_by_itself(kernel: Mock, nbytes: int) -> None:
    owner = SharedSegment.create("x", nbytes, peers_may_write=True)
    peer = SharedSegment.attach(os.dup(owner.fd), nbytes, writable=False, sparse=nbytes > unmap._SMALL_BYTES)
    with unmap.never_wait_here():
        peer.close()
    assert counted(kernel) == (1, 0)
    owner.close()


def test_without_a_thread_left_the_caller_unmaps(kernel: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unmap, "unmap_elsewhere", lambda *_: False)
    with unmap.never_wait_here():
        _drop(LARGE)
        _drop(LARGE)
    assert kernel.munmap.call_count == 2
