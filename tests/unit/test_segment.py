"""Segments: seals, ownership of descriptors and mappings, views; and how much memory this process may have."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist._memory.device import HostDevice
from llm_datadist._memory.host import host_memory_limit
from llm_datadist._memory.segment import F_SEAL_FUTURE_WRITE, ExternalSegment, SharedSegment
from llm_datadist.errors import LLMException, OutOfMemory, ParamError, ProtocolError, StateError
from llm_datadist.testing.staged_device import CopyCount, StagedDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llm_datadist._memory.device import Device
    from llm_datadist._memory.segment import Segment

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
MIB = 1 << 20


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings(address: int) -> bool:
    """Return True when something is mapped at ``address``."""
    ranges = (line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def resident_bytes(segment: Segment) -> int:
    """Return how much of a segment's mapping is in memory; smaps is exact, the totals in status are not."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{segment.address:x}-"):
            return next(int(each.split()[1]) * 1024 for each in lines if each.startswith("Rss:"))
    raise AssertionError(f"{segment} is not in /proc/self/smaps")


def memfd(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("theirs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.fixture(autouse=True)
def _no_descriptor_leaks() -> Iterator[None]:
    before = open_fds()
    yield
    gc.collect()
    assert open_fds() == before


class TestSharedSegment:
    def test_is_zero_writable_and_of_the_exact_size(self) -> None:
        with SharedSegment.create("pool", 10_000, peers_may_write=False) as segment:
            view = segment.view()
            assert view.shape == (10_000,)
            assert view.flags.writeable
            assert not view.any()
            assert view.ctypes.data == segment.address
            assert os.fstat(segment.fd).st_size == 10_000

    @pytest.mark.parametrize(("peers_may_write", "more"), [(True, 0), (False, F_SEAL_FUTURE_WRITE)])
    def test_seals_are_present(self, peers_may_write: bool, more: int) -> None:
        with SharedSegment.create("pool", MIB, peers_may_write=peers_may_write) as segment:
            assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) == SIZE_SEALS | fcntl.F_SEAL_SEAL | more
            assert fcntl.fcntl(segment.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC

    @pytest.mark.parametrize("size", [0, MIB - 4096, MIB + 4096])
    def test_not_even_the_owner_can_resize(self, size: int) -> None:
        with SharedSegment.create("pool", MIB, peers_may_write=True) as segment:
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, size)
            assert os.fstat(segment.fd).st_size == MIB

    def test_sealed_for_writing_refuses_every_other_writable_mapping(self) -> None:
        with SharedSegment.create("pool", MIB, peers_may_write=False) as segment:
            with pytest.raises(PermissionError):
                mmap.mmap(segment.fd, MIB)
            with pytest.raises(PermissionError):
                os.pwrite(segment.fd, b"x", 0)
            with pytest.raises(ProtocolError, match=r"writable=True.*not permitted"):
                SharedSegment.attach(os.dup(segment.fd), MIB, writable=True)
            segment.view()[:] = 7  # our own mapping stays writable
            with SharedSegment.attach(os.dup(segment.fd), MIB, writable=False) as peer:
                assert (peer.view() == 7).all()

    def test_a_read_only_attachment_reads_along_and_cannot_be_made_writable(self) -> None:
        with (
            SharedSegment.create("pool", MIB, peers_may_write=True) as segment,
            SharedSegment.attach(os.dup(segment.fd), MIB, writable=False) as peer,
        ):
            segment.view()[5] = 42
            view = peer.view()
            assert view[5] == 42
            assert not peer.writable
            with pytest.raises(ValueError, match="read-only"):
                view[5] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True

    def test_a_writable_attachment_writes_through(self) -> None:
        with (
            SharedSegment.create("pool", MIB, peers_may_write=True) as segment,
            SharedSegment.attach(os.dup(segment.fd), MIB, writable=True) as peer,
        ):
            peer.view(MIB - 2)[:] = 9
            assert segment.view()[-3:].tolist() == [0, 9, 9]

    def test_an_attachment_keeps_no_descriptor_and_outlives_the_owner(self) -> None:
        segment = SharedSegment.create("pool", MIB, peers_may_write=False)
        segment.view()[:] = 3
        before = open_fds()
        peer = SharedSegment.attach(os.dup(segment.fd), MIB, writable=False)
        assert open_fds() == before
        segment.close()
        with peer:
            assert (peer.view() == 3).all()
            with pytest.raises(StateError, match="no descriptor"):
                _ = peer.fd

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: memfd(MIB, 0), "lack shrink and grow"),
            (lambda: memfd(MIB, fcntl.F_SEAL_SHRINK), "lack shrink and grow"),
            (lambda: memfd(MIB, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), "lack shrink and grow"),
            (lambda: memfd(MIB - 1, SIZE_SEALS), f"announced as {MIB} bytes, its descriptor has {MIB - 1}"),
            (lambda: memfd(2 * MIB, SIZE_SEALS), f"announced as {MIB} bytes, its descriptor has {2 * MIB}"),
            (lambda: os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC), "its descriptor has 0"),
        ],
    )
    def test_a_receiver_refuses_what_is_unsealed_or_of_another_size(self, make: Callable[[], int], text: str) -> None:
        with pytest.raises(ProtocolError, match=text):
            SharedSegment.attach(make(), MIB, writable=False)

    def test_a_receiver_refuses_a_plain_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(4096))
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CLOEXEC)
        with pytest.raises(ProtocolError, match=r"Invalid argument|lack shrink"):
            SharedSegment.attach(fd, 4096, writable=False)

    def test_a_receiver_refuses_a_segment_announced_as_empty(self) -> None:
        with pytest.raises(ProtocolError, match="announced as 0 bytes"):
            SharedSegment.attach(memfd(0, SIZE_SEALS), 0, writable=False)

    @pytest.mark.parametrize("nbytes", [0, -1, 1 << 64])
    def test_an_impossible_size_is_refused(self, nbytes: int) -> None:
        with pytest.raises(ParamError, match=f"nbytes is {nbytes}"):
            SharedSegment.create("pool", nbytes, peers_may_write=False)

    def test_more_than_the_address_space_is_out_of_memory(self) -> None:
        with pytest.raises(OutOfMemory, match=f"'pool' of {1 << 62} bytes cannot be created") as caught:
            SharedSegment.create("pool", 1 << 62, peers_may_write=False)
        assert (caught.value.pool, caught.value.requested) == ("pool", 1 << 62)
        assert isinstance(caught.value.__cause__, OSError)

    def test_another_refusal_of_the_kernel_is_a_plain_failure(self) -> None:
        with pytest.raises(LLMException, match="Invalid argument") as caught:
            SharedSegment.create("x" * 300, MIB, peers_may_write=False)
        assert not isinstance(caught.value, OutOfMemory)
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.EINVAL

    def test_prefault_takes_the_memory_at_once(self) -> None:
        with SharedSegment.create("pool", 16 * MIB, peers_may_write=False, prefault=True) as segment:
            assert resident_bytes(segment) == 16 * MIB
            assert not segment.view().any()

    def test_untouched_pages_take_no_memory(self) -> None:
        with SharedSegment.create("pool", 1 << 30, peers_may_write=False) as segment:
            segment.view()[0] = 1
            assert 0 < resident_bytes(segment) <= 2 * MIB


class TestClosing:
    def test_is_idempotent_and_gives_back_descriptor_and_mapping(self) -> None:
        before = open_fds()
        segment = SharedSegment.create("pool", MIB, peers_may_write=False)
        address = segment.address
        assert (open_fds(), mappings(address)) == (before + 1, True)
        segment.close()
        segment.close()
        assert segment.closed
        assert (open_fds(), mappings(address)) == (before, False)

    def test_views_outlive_it_and_the_last_one_unmaps(self) -> None:
        before = open_fds()
        segment = SharedSegment.create("pool", MIB, peers_may_write=False)
        address = segment.address
        words = segment.view(4096, 8192).view(np.uint64)[2:].reshape(2, -1)
        segment.close()
        assert open_fds() == before
        words[:] = 0x0102030405060708
        assert int(words.sum() & np.uint64(0xFF)) == len(words.ravel()) * 8 % 256
        assert mappings(address)
        del words
        assert not mappings(address)

    def test_a_view_may_die_in_another_thread(self) -> None:
        segment = SharedSegment.create("pool", MIB, peers_may_write=False)
        address, views = segment.address, [segment.view()]
        segment.close()
        thread = threading.Thread(target=views.clear)
        thread.start()
        thread.join()
        assert not mappings(address)

    def test_a_closed_segment_gives_neither_address_nor_view_nor_descriptor(self) -> None:
        segment = SharedSegment.create("pool", MIB, peers_may_write=False)
        segment.close()
        for use in (lambda: segment.address, segment.view, lambda: segment.fd):
            with pytest.raises(StateError, match="'pool'"):
                use()

    def test_a_forgotten_one_is_a_resource_warning_and_is_closed_all_the_same(self) -> None:
        before = open_fds()
        segment = SharedSegment.create("pool", MIB, peers_may_write=False)
        with pytest.warns(ResourceWarning, match="unclosed segment <SharedSegment 'pool'"):
            del segment
        assert open_fds() == before

    def test_a_forgotten_attachment_is_a_resource_warning(self) -> None:
        with SharedSegment.create("pool", MIB, peers_may_write=False) as segment:
            peer = SharedSegment.attach(os.dup(segment.fd), MIB, writable=False)
            with pytest.warns(ResourceWarning, match="unclosed segment"):
                del peer

    def test_repr_shows_the_state(self) -> None:
        segment = SharedSegment.create("pool", MIB, peers_may_write=False)
        assert repr(segment) == f"<SharedSegment 'pool' {MIB} bytes at {segment.address:#x}>"
        segment.close()
        assert repr(segment) == f"<SharedSegment 'pool' {MIB} bytes closed>"


class TestView:
    @pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 4097), (4096, 1), (5000, None), (1, -1)])
    def test_outside_is_refused(self, offset: int, nbytes: int | None) -> None:
        with (
            SharedSegment.create("pool", 4096, peers_may_write=False) as segment,
            pytest.raises(ParamError, match=f"offset {offset}"),
        ):
            segment.view(offset, nbytes)

    def test_inside_is_where_it_should_be(self) -> None:
        with SharedSegment.create("pool", 4096, peers_may_write=False) as segment:
            assert segment.view(100, 50).shape == (50,)
            assert segment.view(100).shape == (3996,)
            assert segment.view(4096).shape == (0,)
            assert segment.view(100).ctypes.data == segment.address + 100


class TestExternalSegment:
    def test_reads_and_writes_the_users_bytes_and_never_owns_them(self) -> None:
        memory = np.arange(256, dtype=np.uint8)
        segment = ExternalSegment(memory.ctypes.data, memory.nbytes)
        view = segment.view(16, 4)
        assert view.tolist() == [16, 17, 18, 19]
        view[:] = 0
        segment.close()
        segment.close()
        assert view.tolist() == [0, 0, 0, 0]
        assert memory[15:21].tolist() == [15, 0, 0, 0, 0, 20]

    def test_may_be_forgotten(self) -> None:
        memory = bytearray(16)
        ExternalSegment(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 16)

    @pytest.mark.parametrize(("address", "nbytes"), [(0, 1), (-8, 8), (4096, 0), (4096, -1), (1 << 63, 1 << 63 | 1)])
    def test_no_range_of_addresses_is_refused(self, address: int, nbytes: int) -> None:
        with pytest.raises(ParamError, match=f"address {address} and nbytes {nbytes}"):
            ExternalSegment(address, nbytes)


class TestDevices:
    @pytest.mark.parametrize("device", [HostDevice(), StagedDevice()])
    def test_copies_arrive(self, device: Device) -> None:
        host = np.arange(100, dtype=np.uint8)
        with device.allocate(300, "staging", peers_may_write=False, prefault=False) as segment:
            device.copy_to_device(segment.address, host.ctypes.data, 100)
            device.copy_on_device(segment.address + 50, segment.address, 100)
            assert segment.view(50, 100).tolist() == host.tolist()
            host[:] = 0
            device.copy_from_device(host.ctypes.data, segment.address + 100, 50)
            assert host.tolist() == list(range(50, 100)) + [0] * 50

    def test_only_the_staged_one_needs_staging(self) -> None:
        assert (HostDevice().needs_staging, StagedDevice().needs_staging) == (False, True)
        assert (HostDevice().name, repr(HostDevice())) == ("host", "<HostDevice>")

    def test_the_staged_one_counts_by_direction_and_thread(self) -> None:
        device, memory = StagedDevice(), np.zeros(64, dtype=np.uint8)
        base = memory.ctypes.data
        device.copy_to_device(base, base + 32, 32)
        thread = threading.Thread(target=device.copy_to_device, args=(base, base + 32, 8), name="swap-1")
        thread.start()
        thread.join()
        device.copy_on_device(base, base, 1)
        main = threading.current_thread().name
        assert device.count("to_device") == CopyCount(2, 40, frozenset({main, "swap-1"}))
        assert device.count("on_device") == CopyCount(1, 1, frozenset({main}))
        assert device.count("from_device") == CopyCount()

    def test_the_staged_one_refuses_when_told(self) -> None:
        device = StagedDevice(refuse_after_bytes=3 * MIB)
        first = device.allocate(2 * MIB, "staging", peers_may_write=False, prefault=False)
        with pytest.raises(OutOfMemory, match=f"{2 * MIB} bytes for staging: {2 * MIB} of {3 * MIB}") as caught:
            device.allocate(2 * MIB, "staging", peers_may_write=False, prefault=False)
        assert (caught.value.requested, caught.value.free) == (2 * MIB, MIB)
        assert repr(device) == f"<StagedDevice staged: {2 * MIB} bytes allocated>"
        device.refuse_after(None)
        second = device.allocate(2 * MIB, "staging", peers_may_write=False, prefault=False)
        assert device.allocated_bytes == 4 * MIB
        first.close()
        second.close()
        assert device.allocated_bytes == 0


V1_NO_LIMIT = str((1 << 63) - 4096)
MEMINFO = "MemTotal:       16384 kB\nMemFree:        1 kB\n"
V2_MOUNT = "35 24 0:30 / {top} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "36 24 0:31 {root} {top} rw - cgroup cgroup rw,memory\n37 24 0:32 / /elsewhere rw - cgroup cgroup rw,cpu\n"


class TestHostMemoryLimit:
    """Each test has its own procfs: 16 MiB of host memory and a cgroup tree in ``tmp_path``."""

    def proc(self, tmp_path: Path, cgroup: str, mountinfo: str, limits: dict[str, str]) -> Path:
        for path, text in limits.items():
            file = tmp_path / "cgroup fs" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        own = tmp_path / "proc" / "self"
        own.mkdir(parents=True)
        (own / "cgroup").write_text(cgroup)
        (own / "mountinfo").write_text(mountinfo)
        (own.parent / "meminfo").write_text(MEMINFO)
        return own.parent

    def top(self, tmp_path: Path) -> str:
        return str(tmp_path / "cgroup fs").replace(" ", "\\040")

    @pytest.mark.parametrize(
        ("limits", "expected", "setter"),
        [
            ({"a/b/memory.max": "max", "a/memory.max": "max"}, 16 * MIB, None),
            ({"a/b/memory.max": str(MIB), "a/memory.max": "max"}, MIB, "a/b/memory.max"),
            ({"a/b/memory.max": "max", "a/memory.max": str(2 * MIB)}, 2 * MIB, "a/memory.max"),
            ({"a/b/memory.max": str(8 * MIB), "memory.max": str(3 * MIB)}, 3 * MIB, "memory.max"),
            ({"a/b/memory.max": str(64 * MIB)}, 16 * MIB, None),
            ({"c/memory.max": "1"}, 16 * MIB, None),
        ],
    )
    def test_v2_takes_the_smallest_of_host_group_and_ancestors(
        self, tmp_path: Path, limits: dict[str, str], expected: int, setter: str | None
    ) -> None:
        proc = self.proc(tmp_path, "0::/a/b\n", V2_MOUNT.format(top=self.top(tmp_path)), limits)
        source = "host memory" if setter is None else f"cgroup limit {tmp_path / 'cgroup fs' / setter}"
        assert host_memory_limit(proc) == (expected, source)

    @pytest.mark.parametrize("root", ["/", "/docker/x"])
    @pytest.mark.parametrize(("job", "above"), [(V1_NO_LIMIT, str(MIB)), (str(MIB), V1_NO_LIMIT)])
    def test_v1_counts_too_also_where_only_a_subtree_is_mounted(
        self, tmp_path: Path, root: str, job: str, above: str
    ) -> None:
        folder = "docker/x/" if root == "/" else ""
        proc = self.proc(
            tmp_path,
            "12:cpu,cpuacct:/other\n4:hugetlb,memory:/docker/x/job\n1:name=systemd:/memory\n0::/\n",
            V1_MOUNT.format(root=root, top=self.top(tmp_path)),
            {f"{folder}job/memory.limit_in_bytes": job, f"{folder}memory.limit_in_bytes": above},
        )
        assert host_memory_limit(proc)[0] == MIB

    @pytest.mark.parametrize(("root", "group"), [("/", "/../outside"), ("/docker/x", "/not/under/root")])
    def test_a_group_outside_of_the_mount_leaves_the_limit_at_its_top(
        self, tmp_path: Path, root: str, group: str
    ) -> None:
        limits = {
            "memory.limit_in_bytes": str(5 * MIB),
            "../outside/memory.limit_in_bytes": "1",
            "not/under/root/memory.limit_in_bytes": "1",
        }
        mount = V1_MOUNT.format(root=root, top=self.top(tmp_path))
        proc = self.proc(tmp_path, f"4:memory:{group}\n", mount, limits)
        assert host_memory_limit(proc)[0] == 5 * MIB

    def test_without_any_cgroup_it_is_the_host(self, tmp_path: Path) -> None:
        assert host_memory_limit(self.proc(tmp_path, "", "", {})) == (16 * MIB, "host memory")

    def test_without_memtotal_it_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "meminfo").write_text("MemFree: 1 kB\n")
        with pytest.raises(OSError, match="no MemTotal"):
            host_memory_limit(tmp_path)

    def test_the_real_one_is_no_more_than_physical_memory(self) -> None:
        nbytes, source = host_memory_limit()
        assert 0 < nbytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert source
