"""The fake driver behaves as a driver does, and finds what a driver would not forgive."""

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.device.programs import BEGIN, begin, line, run
from tests.support import source
from tests.support.fakecuda import library


def test_a_program_that_frees_everything_leaves_nothing() -> None:
    program = """
        device, memory = allocated(100), (c_char * 4096)()
        host, back = pinned(4096, bytes(range(256)) * 16), pinned(4096)
        copy(at, host, 4096, s); copy(back, at, 4096, s); call("cuEventRecord", e, s); wait(s)
        assert back.raw == host.raw
        call("cuMemHostRegister_v2", memory, SIZE(4096), 3); call("cuMemHostUnregister", memory)
        unmap(at, handle); unmap(*mapped(2 * MIB))
        call("cuMemFree_v2", U64(device)); call("cuMemFreeHost", host); call("cuMemFreeHost", back)
        call("cuStreamDestroy_v2", s); call("cuEventDestroy_v2", e); call("cuDevicePrimaryCtxRelease_v2", 0)
    """
    _, (left,) = run(program, memory=3 << 20)
    assert set(left.leaked.values()) == set(left.kept.values()) == {0}
    assert (left.copies, left.moved_bytes, left.unfinished_streams, left.violations) == (2, 8192, 0, [])


def test_a_report_separates_what_the_library_keeps_from_what_it_leaks() -> None:
    program = """
        host, device, function, memory = pinned(4096), allocated(8192), kernel(), (c_char * 100)()
        mapped(2 * MIB, fd=export(handle)); call("cuMemHostRegister_v2", memory, SIZE(100), 3)
    """
    _, (left,) = run(program)
    leaked = {"handles": 1, "imports": 1, "reservations": 2, "mapped_bytes": 4 << 20, "registered_bytes": 100}
    assert left.leaked == leaked | {"opened_bytes": 0}
    kept = {"device_bytes": 8192, "host_bytes": 4096}
    assert left.kept == kept | dict.fromkeys(("contexts", "streams", "events", "modules"), 1)


def test_the_host_crashes_where_it_touches_a_device_address() -> None:
    run("string_at(at, 1)", ends=-signal.SIGSEGV)


def test_a_copy_of_pinned_memory_begins_late_and_one_of_pageable_memory_has_its_bytes_at_once() -> None:
    run("""
        host, back, pageable, filled = pinned(8, b"before!!"), pinned(8), (c_char * 8)(), (c_char * 8)()
        copy(at, host, 8, s); host.raw = b"after!!!"
        copy(back, at, 8, s); assert back.raw == b"\\xa7" * 8
        wait(s); assert back.raw == b"after!!!"
        pageable.raw = b"before!!"; copy(at, pageable, 8, s); pageable.raw = b"after!!!"
        copy(filled, at, 8, s); assert filled.raw == b"before!!"
    """)


@pytest.mark.parametrize(
    ("program", "error", "settings"),
    [
        ('call("cuDeviceGetCount", byref(INT()))', "NOT_INITIALIZED", {}),
        ("start(2)", "INVALID_DEVICE", {}),
        ("start()", "NO_DEVICE", {"devices": 0}),
        ("start(); allocated(MIB); allocated(2 * MIB)", "OUT_OF_MEMORY", {"memory": 2 << 20}),
        ('start(); call("cuMemHostRegister_v2", pinned(8), SIZE(8), 3)', "HOST_MEMORY_ALREADY_REGISTERED", {}),
        ('start(); call("cuIpcGetMemHandle", IpcHandle(), U64(mapped(2 * MIB)[0]))', "INVALID_VALUE", {}),
        ('start(); call("cuPointerGetAttribute", INT(), 2, U64(addressof(INT())))', "INVALID_VALUE", {}),
        ('start(); mapped(2 * MIB, fd=os.memfd_create(""))', "INVALID_VALUE", {}),
        ("start(); mapped(2 * MIB)", "NOT_SUPPORTED", {"posix_fd": 0}),
        ("start(); mapped(2 * MIB)", "OUT_OF_MEMORY", {"fail": "cuMemRelease:1,cuMemMap:2"}),
        ("start(); mapped(2 * MIB, user=1)", "PEER_ACCESS_UNSUPPORTED", {"peers": 0}),
        ('start(); one = event(); start(1); call("cuEventRecord", one, stream())', "INVALID_HANDLE", {}),
    ],
)
def test_a_call_is_refused(program: str, error: str, settings: dict[str, Any]) -> None:
    caught = f"try: {program}\nexcept CudaError as error: print(error.args[1])"
    assert run(caught, scene=BEGIN, **settings)[0] == f"CUDA_ERROR_{error}\n"


def test_a_failure_comes_when_a_test_wants_it_and_a_lost_device_stays_lost() -> None:
    run("""
        driver.fakecuda_fail(b"cuMemcpyAsync", 700, c_long(1), c_long(1))
        copy(at, at + 65536, 16, s); wait(s)
        assert [code("cuMemcpyAsync", U64(at), U64(at + 65536), SIZE(16), s) for _ in range(2)] == [700, 700]
        assert (code("cuStreamSynchronize", s), code("cuMemRelease", handle)) == (700, 700)
        assert code("cuDeviceGetCount", byref(INT())) == 0
        driver.fakecuda_heal(); copy(at, at + 65536, 16, s)
        driver.fakecuda_fail(b"cuStreamSynchronize", 999, c_long(0), c_long(1))
        assert [code("cuStreamSynchronize", s) for _ in range(2)] == [999, 0]
    """)


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("copy(at, device, 64, s); unmap(at, handle)", "cuMemUnmap"),
        ('copy(at, host, 4096, s); call("cuMemFreeHost", host)', "cuMemFreeHost"),
        ('copy(at, device, 64, s); call("cuStreamDestroy_v2", s)', "cuStreamDestroy"),
        ('launch(kernel(), [device], [device], [(0, 8, 8)], s); call("cuDevicePrimaryCtxRelease_v2", 0)', "release"),
        ("copy(at, at + 4095, 4096, s)", "overlaps itself"),
        ('unmap(at, handle); code("cuMemcpyAsync", U64(at), U64(device), SIZE(16), s)', "has no memory"),
        ('code("cuMemcpyAsync", U64(at + 2 * MIB - 8), U64(device), SIZE(16), s)', "has no memory"),
        ('code("cuMemRelease", U64(2))', "does not exist"),
    ],
)
def test_a_mistake_is_a_violation(program: str, found: str) -> None:
    _, (left,) = run("host, device = pinned(4096), allocated(64)\n" + program)
    assert [found in text for text in left.violations] == [True]


def test_a_kernel_moves_every_run_of_every_pair_in_no_promised_order() -> None:
    run("""
        function, host, back, b = kernel(), pinned(4096, os.urandom(4096)), pinned(4096), allocated(4096)
        copy(at, host, 4096, s); copy(b, host, 4096, s)
        launch(function, [b, b + 2048], [at + 1024, at], [(7, 0, 3), (512, 100, 333)], s)
        copy(back, b, 4096, s); wait(s)
        expected = bytearray(host.raw)
        for to, of in (0, 1024), (2048, 0):
            for begin, first, size in (7, 0, 3), (512, 100, 333):
                expected[to + begin : to + begin + size] = host.raw[of + first : of + first + size]
        assert back.raw == expected
        launch(function, [at], [at], [(8, 0, 8), (16, 8, 8)], s)  # one run reads what the other writes
        copy(back, at, 24, s); wait(s)
        assert back.raw[:24] == host.raw[:8] + host.raw[:16]
    """)


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("mapped(2 * MIB, access=READ)[0]", "is mapped for reading only"),
        ("mapped(2 * MIB, user=1)[0]", "is not accessible"),
        ("addressof(memory)", "is pageable"),
        ("registered(1)", "is not mapped for devices"),
        ("registered(3)", "has another address"),
    ],
)
def test_a_kernel_that_touches_what_it_cannot_ends_all_work(to: str, why: str) -> None:
    program = f"""
        memory = (c_char * 4096)()
        def registered(flags):
            call("cuMemHostRegister_v2", memory, SIZE(4096), flags)
            return addressof(memory)
        launch(kernel(), [{to}], [at], [(0, 0, 16)], s)
        assert (code("cuStreamSynchronize", s), code("cuMemFree_v2", U64(at))) == (700, 700)
    """
    _, (left,) = run(program, host_pointers=0)
    assert (left.sticky, [why in text for text in left.violations]) == (700, [True])


def test_a_copy_cannot_write_memory_that_is_mapped_for_reading() -> None:
    run("""
        back, (other, _) = pinned(4), mapped(2 * MIB, fd=export(handle), access=READ)
        assert code("cuMemcpyAsync", U64(other), U64(at), SIZE(4), s) == 1
        copy(at, pinned(4, b"read"), 4, s); copy(back, other, 4, s); wait(s)
        assert back.raw == b"read"
    """)


def test_a_stream_waits_for_the_latest_record_of_an_event() -> None:
    run("""
        other, back = stream(), pinned(8); driver.fakecuda_set_rate(c_long(40960))
        call("cuStreamWaitEvent", other, e, 0); wait(other)  # nothing is recorded yet
        copy(at, pinned(4096, b"recorded" * 512), 4096, s); call("cuEventRecord", e, s)
        assert code("cuEventQuery", e) == 600
        call("cuStreamWaitEvent", other, e, 0); copy(back, at + 4088, 8, other); wait(other)
        assert (back.raw, code("cuEventQuery", e)) == (b"recorded", 0)
    """)


def test_a_rate_lets_others_see_half_of_a_copy() -> None:
    run("""
        from tests.support.fakecuda import load
        fake, (at, _) = load(), mapped(32 * MIB); view = fake.view(at, 32 * MIB); view[:] = 0
        fake.set_delay(0); fake.set_rate(16 * MIB)
        copy(at, pinned(32 * MIB, b"1" * 32 * MIB), 32 * MIB, s); call("cuEventRecord", e, s)
        while not view[0]: pass
        assert not view[-1] and code("cuEventQuery", e) == 600
        fake.set_rate(0); wait(s)
        assert view.min() == ord("1") and code("cuEventQuery", e) == 0
    """)


def test_a_device_that_hangs_completes_no_event_until_it_is_let_go() -> None:
    run("""
        from tests.support.fakecuda import load
        fake, late = load(), event(); view = fake.view(at, 8); fake.set_delay(0)
        call("cuEventRecord", e, None); fake.hang(True)  # the default stream
        copy(at, pinned(8, b"moved..."), 8, s); call("cuEventRecord", late, s); copy(at, pinned(8), 8, s)
        while bytes(view) != b"moved..." or code("cuEventQuery", e): pass
        assert code("cuEventQuery", late) == 600
        fake.hang(False); wait(s)
        assert (code("cuEventQuery", late), bytes(view)) == (0, b"\\xa7" * 8)
    """)


def test_a_view_is_the_bytes_of_device_memory_and_of_nothing_else() -> None:
    run("""
        from tests.support.fakecuda import load
        fake, back = load(), pinned(3)
        fake.view(at + MIB, 3)[:] = [1, 2, 3]; copy(back, at + MIB, 3, s); wait(s)
        assert back.raw == bytes([1, 2, 3]) and not fake.violations()
        for address, size in (at + 2 * MIB - 1, 2), (addressof(back), 1), (0, 1):
            try: fake.view(address, size)
            except ValueError: continue
            raise AssertionError(address)
        code("cuMemRelease", U64(9)); assert len(fake.violations()) == 1
        fake.forget_violations(); assert not fake.violations()
    """)


def test_attributes_tell_a_reservation_a_mapping_and_a_device() -> None:
    run("""
        start(1); s = stream(); handle, value, base, size, whole = U64(), U64(), U64(), SIZE(), 8 * MIB
        call("cuMemAddressReserve", byref(base), SIZE(whole), SIZE(0), U64(0), U64(0)); at = base.value
        call("cuMemCreate", byref(handle), SIZE(2 * MIB), byref(Properties(1, 1, (1, 1))), U64(0))
        for part in at + 2 * MIB, at + 4 * MIB:
            call("cuMemMap", U64(part), SIZE(2 * MIB), SIZE(0), handle, U64(0))
            call("cuMemSetAccess", U64(part), SIZE(2 * MIB), byref(Access((1, 1), WRITE)), SIZE(1))
        def attributes(address, *numbers):
            for each in numbers:
                value.value = 0; call("cuPointerGetAttribute", byref(value), each, U64(address)); yield value.value
        assert [*attributes(at + 3 * MIB, 11, 12, 9, 2, 10, 14)] == [at, whole, 1, 2, 0, 1]
        assert [*attributes(allocated(8), 2, 9, 10)] == [2, 1, 1]
        assert [*attributes(addressof(pinned(8)), 2, 9)] == [1, 1]
        call("cuMemGetAddressRange_v2", byref(base), byref(size), U64(at + 3 * MIB))
        assert (base.value, size.value) == (at + 2 * MIB, 2 * MIB)
        back = pinned(8); copy(at + 4 * MIB - 4, pinned(8, b"end+head"), 8, s); copy(back, at + 2 * MIB, 4, s)
        wait(s); assert back.raw[:4] == b"head"  # the same memory twice, so a copy over the seam reaches its begin
    """)


def test_contexts_are_a_stack_of_each_thread_and_a_forked_child_has_no_driver() -> None:
    run("""
        import threading
        now = c_void_p(); found = []
        def current(): call("cuCtxGetCurrent", byref(now)); return now.value
        first = current(); start(1); second = current()
        call("cuCtxPushCurrent_v2", c_void_p(first)); assert current() == first
        call("cuCtxPopCurrent_v2", byref(now)); assert (now.value, current()) == (first, second)
        call("cuCtxSetCurrent", None); assert current() is None
        thread = threading.Thread(target=lambda: found.append(code("cuMemFree_v2", U64(1)))); thread.start()
        thread.join(); assert found == [201]
        if (pid := os.fork()) == 0: os._exit(10 * code("cuInit", 0) + code("cuDeviceGetCount", byref(INT())))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 33
    """)


def test_two_processes_share_memory_and_the_exporter_may_die() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    exporter = f"""
        import socket
        start(); s = stream(); at, handle = mapped(4 * MIB)
        copy(at, pinned(4 * MIB, bytes(range(256)) * (4 << 12)), 4 * MIB, s); wait(s)
        socket.send_fds(socket.socket(fileno={theirs.fileno()}), [b"here"], [export(handle)]); input()
    """
    with ours, theirs, begin(exporter, theirs.fileno()) as running:
        _, (fd,), _, _ = socket.recv_fds(ours, 16, 1)
        with pytest.raises(OSError, match="Invalid argument"):
            fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # no memfd
        importer = f"""
            start(); s = stream(); at, handle = mapped(4 * MIB, fd={fd}); os.close({fd}); back = pinned(4 * MIB)
            print("mapped", flush=True); input()
            copy(back, at, 4 * MIB, s); wait(s); assert back.raw == bytes(range(256)) * (4 << 12)
            copy(at, at + 100, 50, s); wait(s); unmap(at, handle, 4 * MIB); print("right")
        """
        with begin(importer, fd) as reader:
            os.close(fd)
            assert line(reader) == "mapped"
            running.kill()
            running.wait()
            assert reader.communicate("\n")[0] == "right\n"


def test_a_legacy_handle_opens_in_other_processes_while_its_maker_lives() -> None:
    exporter = """
        start(); at, s, handle = allocated(MIB), stream(), IpcHandle()
        copy(at, pinned(MIB, b"K" * MIB), MIB, s); wait(s); call("cuIpcGetMemHandle", byref(handle), U64(at))
        print(bytes(handle).hex(), code("cuIpcOpenMemHandle_v2", byref(U64()), handle, 1), flush=True); input()
    """
    with begin(exporter) as running:
        handle, in_its_own_process = line(running).split()
        importer = f"""
            at, again, handle = U64(), U64(), IpcHandle.from_buffer_copy(bytes.fromhex("{handle}"))
            if error := code("cuIpcOpenMemHandle_v2", byref(at), handle, 1): print(error); raise SystemExit
            call("cuIpcOpenMemHandle_v2", byref(again), handle, 1); assert at.value == again.value
            back = pinned(MIB); copy(back, at.value, MIB, s); wait(s); print(back.raw == b"K" * MIB)
            assert [code("cuIpcCloseMemHandle", at) for _ in range(3)] == [0, 0, 1]
        """
        assert (run(importer)[0], in_its_own_process) == ("True\n", "201")
        running.kill()
    assert run(importer)[0] == "1\n"


@pytest.mark.parametrize(("visible", "found"), [("0,1,2,3", "4 0"), ("2,1,7,0", "2 2")])
def test_devices_are_those_that_are_visible(visible: str, found: str) -> None:
    program = f"""
        os.environ["CUDA_VISIBLE_DEVICES"] = "{visible}"
        start(); count, uuid = INT(), create_string_buffer(16); call("cuDeviceGetCount", byref(count))
        call("cuDeviceGetUuid_v2", uuid, 0); print(count.value, int(uuid.raw.decode().removeprefix("fakecuda-gpu-")))
    """
    assert run(program, scene=BEGIN, devices=4)[0] == f"{found}\n"


def test_processes_that_need_the_fake_at_once_compile_one_and_find_it_by_its_name(tmp_path: Path) -> None:
    header = (source.SOURCE / "_native" / "cuda_abi.h").read_text()
    names = re.findall(r"^CUresult (\w+)\(", header, re.MULTILINE)
    program = f"""
        import ctypes
        from tests.support.fakecuda import library, load
        load(); found = ctypes.CDLL("libcuda.so.1"); assert found.fakecuda_violation_count() == 0
        print(library(), [name for name in {names} if not hasattr(found, name)])
    """
    compiler = tmp_path / "another-cc"  # makes another fake
    compiler.write_text('#!/bin/sh\nexec cc "$@"\n')
    compiler.chmod(0o755)
    environment = os.environ | source.PATHS | {"CC": str(compiler), "LD_LIBRARY_PATH": ""}
    command = [sys.executable, "-c", dedent(program)]
    made = [subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE) for _ in range(3)]
    ((path, lacking),) = {tuple(each.communicate()[0].split()) for each in made}
    assert (path == str(library()), lacking, len(names) > 30) == (False, "[]", True)
    assert os.listdir(Path(path).parent) == ["libcuda.so.1"]
    shutil.rmtree(Path(path).parent)
